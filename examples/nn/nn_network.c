/* nn_network.c - see nn_network.h. */
#include "nn_network.h"

#include <stdio.h>
#include <string.h>

/* ---- the description ---- */

static xd_result nn_network_add_blocks(const nn_network *n, xd_model *model) {
    XD_TRY(n->describe_root(n->config, xd_model_root(model)));
    for (int i = 0; i < n->blocks; i++) {
        char name[32];
        xd_block_desc desc;
        xd_block *block;
        memset(&desc, 0, sizeof desc);
        snprintf(name, sizeof name, "blocks.%d", i);
        desc.name = name;
        desc.type = n->type;
        XD_TRY(xd_block_add(xd_model_root(model), &desc, &block));
        XD_TRY(n->describe_block(n->config, block));
    }
    return xd_model_seal(model);
}

xd_result nn_network_describe(xd_ctx *ctx, const nn_network *network, const xd_model_desc *desc,
                              xd_model **out) {
    xd_model *model;
    XD_TRY(xd_model_create(ctx, desc, &model));
    const xd_result result = nn_network_add_blocks(network, model);
    if (result != XD_OK) {
        xd_model_destroy(model);
        return result;
    }
    *out = model;
    return XD_OK;
}

xd_result nn_network_blocks(xd_ctx *ctx, xd_model *model, int count, xd_block **blocks) {
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "blocks.%d", i);
        blocks[i] = xd_model_find_block(model, name);
        XD_REQUIRE(ctx, blocks[i], XD_ERROR_ARGUMENT, "the model has no block \"%s\" of %d", name, count);
    }
    blocks[count] = xd_model_root(model);
    return XD_OK;
}

/* ---- features ---- */

static void nn_features_number(nn_features *f, const int *blocks, int count) {
    for (int i = 0; i < f->blocks; i++) f->number[i] = -1;
    for (int i = 0; i < count; i++) f->number[blocks[i]] = i;
    f->count = count;
}

void nn_features_begin(nn_features *f, int64_t elements) {
    const int middle = (f->blocks - 1) / 2;
    for (int i = 0; i < f->blocks; i++) f->elements[i] = elements;
    nn_features_number(f, &middle, 1);
}

xd_result nn_features_choose(xd_ctx *ctx, nn_features *f, const char *what, const int *blocks, int count) {
    XD_REQUIRE(ctx, count >= 0, XD_ERROR_ARGUMENT, "%d features", count);
    for (int i = 0; i < count; i++) {
        XD_REQUIRE(ctx, blocks[i] >= 0 && blocks[i] < f->blocks, XD_ERROR_ARGUMENT,
                   "a feature behind %s %d of %d", what, blocks[i], f->blocks);
        XD_REQUIRE(ctx, i == 0 || blocks[i] > blocks[i - 1], XD_ERROR_ARGUMENT,
                   "a feature behind %s %d after that behind %s %d", what, blocks[i], what, blocks[i - 1]);
    }
    nn_features_number(f, blocks, count);
    return XD_OK;
}

int nn_features_behind(const nn_features *f, const xd_network_call *call) {
    int blocks = f->blocks;
    if (call->raw_gradient || call->weights) return blocks;
    while (blocks > 0 && (!call->feature_gradients || f->number[blocks - 1] < 0)) blocks--;
    return blocks;
}
