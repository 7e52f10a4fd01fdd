/* nn_patch_describe.c - the patch transformer's description. */
#include "nn_patch_inside.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

nn_patch_config nn_patch_defaults(void) {
    const nn_patch_config c = { 16, 4, 96, 4, 4, 240, 64, 11, NULL, NULL };
    return c;
}

xd_result nn_patch_check(xd_ctx *ctx, const nn_patch_config *c) {
    XD_REQUIRE(ctx, c->side > 0 && c->patch > 0 && c->side % c->patch == 0 && c->side <= 1024,
               XD_ERROR_ARGUMENT, "images of side %d are not cut into patches of side %d", c->side, c->patch);
    const int tokens = c->side / c->patch * (c->side / c->patch);
    XD_REQUIRE(ctx, tokens % 8 == 0, XD_ERROR_ARGUMENT,
               "side %d and patch %d give %d tokens, not a multiple of 8", c->side, c->patch, tokens);
    XD_REQUIRE(ctx, c->heads > 0 && c->heads < 1024 && c->width > 0 && c->width % (8 * c->heads) == 0,
               XD_ERROR_ARGUMENT, "width %d is not a multiple of 8 for each of %d heads", c->width, c->heads);
    XD_REQUIRE(ctx, c->layers > 0 && c->layers < 10000 && c->ffn > 0, XD_ERROR_ARGUMENT,
               "%d layers of inner width %d", c->layers, c->ffn);
    XD_REQUIRE(ctx, c->frequencies > 0 && c->frequencies % 2 == 0 && c->labels > 0, XD_ERROR_ARGUMENT,
               "%d sines and cosines are not an even number, or %d labels are none", c->frequencies,
               c->labels);
    return nn_patch_split_check(ctx, c);
}

/* Samples are rows of pixels, of which each rank has a run. */
xd_result nn_patch_check_cut(xd_ctx *ctx, const nn_patch_config *c) {
    const int across = c->side / c->patch, ranks = c->cp ? xd_comm_size(c->cp) : 1;
    const nn_positions at = nn_positions_of(c->cp, (int64_t)across * across);
    XD_REQUIRE(ctx, ranks <= NN_POSITION_BLOCKS, XD_ERROR_ARGUMENT, "%d ranks share %d blocks of tokens",
               ranks, (int)NN_POSITION_BLOCKS);
    for (int r = 1; r < ranks; r++) {
        const xd_interval tokens = nn_positions_tokens(&at, r);
        XD_REQUIRE(ctx, c->patch == 1 || tokens.begin % across == 0, XD_ERROR_ARGUMENT,
                   "rank %d of %d begins with token %lld, within a row of %d patches", r, ranks,
                   (long long)tokens.begin, across);
    }
    return XD_OK;
}

xd_interval nn_patch_pixels(const nn_patch_config *c) {
    const int64_t across = c->side / c->patch, pixels = (int64_t)c->patch * c->patch;
    const nn_positions at = nn_positions_of(c->cp, across * across);
    const xd_interval own = { at.first * at.each * pixels, (at.first + at.count) * at.each * pixels };
    return own;
}

/* A weight of a block. columns 0: a vector; deviation 0: begins as zeros. */
typedef struct nn_patch_weight {
    const char *name;
    int64_t rows, columns;
    double deviation;
    nn_patch_cut_kind cut;
} nn_patch_weight;

static xd_result nn_patch_add(const nn_patch_config *c, xd_block *block, const nn_patch_weight *of) {
    xd_weight_desc w;
    memset(&w, 0, sizeof w);
    w.name = of->name;
    w.dtype = XD_DTYPE_F32;
    w.ndim = of->columns ? 2 : 1;
    w.shape[0] = of->rows;
    w.shape[1] = of->columns;
    w.init.kind = of->deviation > 0.0 ? XD_INIT_NORMAL : XD_INIT_ZERO;
    w.init.scale = (float)of->deviation;
    if (c->split) XD_TRY(nn_patch_split_layout(c, &w, of->cut, &w.layout));
    return xd_weight_add(block, &w, NULL);
}

static xd_result nn_patch_add_plain(const nn_patch_config *c, xd_block *block, const char *name, int64_t rows,
                                    int64_t columns, double deviation) {
    const nn_patch_weight weight = { name, rows, columns, deviation, NN_PATCH_WHOLE };
    return nn_patch_add(c, block, &weight);
}

/* A matrix [out, in], which keeps the size of what it reads, and a bias of zeros. */
typedef struct nn_patch_pair {
    const char *name;
    int64_t out, in;
    bool zero; /* begins so */
    nn_patch_cut_kind cut;
} nn_patch_pair;

static xd_result nn_patch_add_pair(const nn_patch_config *c, xd_block *block, const nn_patch_pair *pair) {
    const bool rows = pair->cut == NN_PATCH_HEADS_OUT || pair->cut == NN_PATCH_INNER_OUT;
    const double deviation = pair->zero ? 0.0 : 1.0 / sqrt((double)pair->in);
    char weight[32], bias[32];
    const nn_patch_weight of = { weight, pair->out, pair->in, deviation, pair->cut },
                          with = { bias, pair->out, 0, 0.0, rows ? pair->cut : NN_PATCH_WHOLE };
    snprintf(weight, sizeof weight, "%s.weight", pair->name);
    snprintf(bias, sizeof bias, "%s.bias", pair->name);
    XD_TRY(nn_patch_add(c, block, &of));
    return nn_patch_add(c, block, &with);
}

static xd_result nn_patch_describe_root(const void *config, xd_block *root) {
    const nn_patch_config *c = (const nn_patch_config *)config;
    const int64_t across = c->side / c->patch, pixels = (int64_t)c->patch * c->patch, width = c->width;
    const nn_patch_pair embed = { "embed", width, pixels, false, NN_PATCH_WHOLE },
                        time = { "time", width, c->frequencies, false, NN_PATCH_WHOLE },
                        common = { "common", 6 * width, width, true, NN_PATCH_WHOLE },
                        last = { "last", 2 * width, width, true, NN_PATCH_WHOLE },
                        out = { "out", pixels, width, true, NN_PATCH_WHOLE };
    XD_TRY(nn_patch_add_pair(c, root, &embed));
    XD_TRY(nn_patch_add_plain(c, root, "position", across * across, width, 0.1));
    XD_TRY(nn_patch_add_pair(c, root, &time));
    XD_TRY(nn_patch_add_plain(c, root, "label", c->labels, width, 0.1));
    XD_TRY(nn_patch_add_pair(c, root, &common));
    XD_TRY(nn_patch_add_pair(c, root, &last));
    XD_TRY(nn_patch_add_plain(c, root, "last.table", 2, width, 0.0));
    return nn_patch_add_pair(c, root, &out);
}

static xd_result nn_patch_describe_layer(const void *config, xd_block *block) {
    const nn_patch_config *c = (const nn_patch_config *)config;
    const nn_patch_pair maps[] = { { "qkv", 3 * (int64_t)c->width, c->width, false, NN_PATCH_HEADS_OUT },
                                   { "attended", c->width, c->width, false, NN_PATCH_HEADS_IN },
                                   { "up", c->ffn, c->width, false, NN_PATCH_INNER_OUT },
                                   { "down", c->width, c->ffn, false, NN_PATCH_INNER_IN } };
    XD_TRY(nn_patch_add_plain(c, block, "table", 6, c->width, 0.0));
    for (int i = 0; i < 4; i++) XD_TRY(nn_patch_add_pair(c, block, &maps[i]));
    return XD_OK;
}

xd_result nn_patch_describe(xd_ctx *ctx, const nn_patch_config *config, uint64_t seed, xd_model **out) {
    const nn_network network = { config, config->layers, "layer", nn_patch_describe_root,
                                 nn_patch_describe_layer };
    xd_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.seed = seed;
    desc.rank = nn_split_rank(config->split);
    XD_TRY(nn_patch_check(ctx, config));
    return nn_network_describe(ctx, &network, &desc, out);
}
