/* nn_describe.c - blocks and weights of the small transformer. */
#include "nn_describe.h"

#include <stdio.h>
#include <string.h>

static void nn_layer_name(int layer, char name[32]) {
    snprintf(name, 32, "model.layers.%d", layer);
}

static xd_weight_desc nn_weight_of(const nn_model *model, const nn_param *p, const char *name) {
    xd_weight_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = name;
    desc.dtype = XD_DTYPE_F32;
    desc.ndim = p->dims;
    desc.shape[0] = p->full_rows;
    desc.shape[1] = p->dims == 2 ? p->full_cols : 0;
    desc.init.kind = p->dims == 2 ? XD_INIT_NORMAL : XD_INIT_CONSTANT;
    desc.init.center = p->dims == 2 ? 0.0f : 1.0f;
    desc.init.scale = nn_param_deviation(model, p);
    desc.traits.decay = nn_param_decays(p) ? XD_DECAY_ALWAYS : XD_DECAY_NEVER;
    return desc;
}

/* The head that is the embedding: another name of it, without settings of its own. */
static xd_weight_desc nn_tied_head(const nn_param *embed) {
    xd_weight_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "lm_head.weight";
    desc.dtype = XD_DTYPE_F32;
    desc.ndim = 2;
    desc.shape[0] = embed->full_rows;
    desc.shape[1] = embed->full_cols;
    desc.tied_to = embed->name;
    return desc;
}

/* Weights are added by their numbers, so that those are their places in an xd_block_view. */
static xd_result nn_describe_block(const nn_model *model, int number, xd_block *block) {
    const char *name = xd_block_name(block);
    const size_t inside = name[0] ? strlen(name) + 1 : 0;
    for (int i = 0; i < nn_block_weights(number); i++) {
        const nn_param *p = nn_block_param(model, number, i);
        const bool tied = number == NN_ROOT && i == NN_HEAD && model->config.tied;
        const xd_weight_desc desc = tied ? nn_tied_head(p) : nn_weight_of(model, p, p->name + inside);
        XD_TRY(xd_weight_add(block, &desc, NULL));
    }
    return XD_OK;
}

static xd_result nn_describe_all(const nn_model *model, xd_model *out) {
    XD_TRY(nn_describe_block(model, NN_ROOT, xd_model_root(out)));
    for (int i = 0; i < model->config.layers; i++) {
        char name[32];
        xd_block_desc desc;
        xd_block *block;
        memset(&desc, 0, sizeof desc);
        nn_layer_name(i, name);
        desc.name = name;
        desc.type = NN_LAYER_TYPE;
        XD_TRY(xd_block_add(xd_model_root(out), &desc, &block));
        XD_TRY(nn_describe_block(model, i, block));
    }
    return xd_model_seal(out);
}

xd_result nn_describe(xd_ctx *ctx, const nn_model *model, uint64_t seed, xd_model **out) {
    xd_model_desc desc;
    if (model->tp.size > 1)
        return XD_FAIL(ctx, XD_ERROR_UNSUPPORTED, "a share of a model that %d tensor-parallel ranks split",
                       model->tp.size);
    memset(&desc, 0, sizeof desc);
    desc.seed = seed;
    *out = NULL;
    XD_TRY(xd_model_create(ctx, &desc, out));
    const xd_result result = nn_describe_all(model, *out);
    if (result == XD_OK) return XD_OK;
    xd_model_destroy(*out);
    *out = NULL;
    return result;
}

xd_block *nn_find_block(const xd_model *model, int block) {
    char name[32];
    if (block == NN_ROOT) return xd_model_root(model);
    nn_layer_name(block, name);
    return xd_model_find_block(model, name);
}
