/* nn_conv_describe.c - the convolutional network's description. */
#include "nn_conv_inside.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NN_CONV_MOST_SIDE = 1024, NN_CONV_MOST_CHANNELS = 4096, NN_CONV_MOST_BLOCKS = 9999 };

nn_conv_config nn_conv_defaults(void) {
    const nn_conv_config c = { 16, 16, 1, 32, 8, 4, 64, 64, 11, NULL };
    return c;
}

xd_result nn_conv_check(xd_ctx *ctx, const nn_conv_config *c) {
    XD_REQUIRE(ctx,
               c->height >= 1 && c->width >= 1 && c->height <= NN_CONV_MOST_SIDE &&
                   c->width <= NN_CONV_MOST_SIDE,
               XD_ERROR_ARGUMENT, "images of %d x %d; the sides are 1 to %d", c->height, c->width,
               (int)NN_CONV_MOST_SIDE);
    XD_REQUIRE(ctx,
               c->channels >= 1 && c->channels <= NN_CONV_MOST_CHANNELS && c->inner >= 1 &&
                   c->inner <= NN_CONV_MOST_CHANNELS,
               XD_ERROR_ARGUMENT, "%d channels of images and %d of the stream; there are 1 to %d",
               c->channels, c->inner, (int)NN_CONV_MOST_CHANNELS);
    XD_REQUIRE(ctx, c->groups >= 1 && c->inner % c->groups == 0, XD_ERROR_ARGUMENT,
               "%d channels are not a multiple of %d groups", c->inner, c->groups);
    XD_REQUIRE(ctx, c->blocks >= 1 && c->blocks <= NN_CONV_MOST_BLOCKS, XD_ERROR_ARGUMENT,
               "%d blocks; there are 1 to %d", c->blocks, (int)NN_CONV_MOST_BLOCKS);
    XD_REQUIRE(ctx, c->frequencies > 0 && c->frequencies % 2 == 0, XD_ERROR_ARGUMENT,
               "%d sines and cosines are not an even number", c->frequencies);
    XD_REQUIRE(ctx, c->embedding > 0 && c->labels > 0, XD_ERROR_ARGUMENT, "%d labels in an embedding of %d",
               c->labels, c->embedding);
    const int ranks = c->split ? xd_comm_size(nn_split_comm(c->split)) : 1;
    XD_REQUIRE(ctx, ranks <= c->groups && ranks <= NN_SPLIT_RANKS, XD_ERROR_ARGUMENT,
               "%d ranks share %d groups of channels; at most %d can", ranks, c->groups, (int)NN_SPLIT_RANKS);
    return XD_OK;
}

nn_pieces nn_conv_channels(const nn_conv_config *c) {
    return nn_pieces_of(nn_split_comm(c->split), c->inner, c->inner / c->groups);
}

/* How a split cuts a weight: not; its outputs, or its inputs, which are the channels between the convolutions of a block. */
typedef enum nn_conv_cut { NN_CONV_WHOLE, NN_CONV_CUT_OUT, NN_CONV_CUT_IN } nn_conv_cut;

static xd_result nn_conv_add(const nn_conv_config *c, xd_block *block, nn_conv_cut cut, xd_weight_desc *w) {
    const nn_pieces pieces = nn_conv_channels(c);
    int64_t offsets[NN_SPLIT_RANKS + 1];
    xd_placement over;
    memset(&over, 0, sizeof over);
    if (cut != NN_CONV_WHOLE) {
        nn_pieces_offsets(&pieces, c->inner, offsets);
        over.kind = XD_SHARD;
        over.dim = cut == NN_CONV_CUT_IN ? 1 : 0;
        over.offsets = offsets;
    }
    if (c->split) XD_TRY(nn_split_layout(c->split, w, (int)cut, &over, &w->layout));
    return xd_weight_add(block, w, NULL);
}

static xd_weight_desc nn_conv_weight(int ndim, int64_t rows, int64_t columns) {
    xd_weight_desc w;
    memset(&w, 0, sizeof w);
    w.dtype = XD_DTYPE_F32;
    w.ndim = ndim;
    w.shape[0] = rows;
    w.shape[1] = columns;
    w.init.kind = XD_INIT_ZERO;
    return w;
}

/* A matrix [out, in], or a convolution's [out, in, 3, 3]; and a bias of zeros. */
typedef struct nn_conv_pair {
    const char *name;
    int64_t out, in;
    int seen;  /* 1, or NN_CONV_SEEN */
    bool zero; /* begins so; otherwise it keeps the size of what it reads */
    nn_conv_cut cut;
} nn_conv_pair;

static xd_result nn_conv_add_pair(const nn_conv_config *c, xd_block *block, const nn_conv_pair *pair) {
    char weight[32], bias[32];
    xd_weight_desc w = nn_conv_weight(pair->seen == 1 ? 2 : 4, pair->out, pair->in),
                   b = nn_conv_weight(1, pair->out, 0);
    snprintf(weight, sizeof weight, "%s.weight", pair->name);
    snprintf(bias, sizeof bias, "%s.bias", pair->name);
    w.name = weight;
    b.name = bias;
    if (pair->seen != 1) w.shape[2] = w.shape[3] = 3;
    if (!pair->zero) {
        w.init.kind = XD_INIT_NORMAL;
        w.init.scale = (float)(1.0 / sqrt((double)(pair->in * pair->seen)));
    }
    XD_TRY(nn_conv_add(c, block, pair->cut, &w));
    return nn_conv_add(c, block, pair->cut == NN_CONV_CUT_OUT ? NN_CONV_CUT_OUT : NN_CONV_WHOLE, &b);
}

/* Scale and shift behind a norm: ones, and zeros. */
static xd_result nn_conv_add_norm(const nn_conv_config *c, xd_block *block, const char *name,
                                  nn_conv_cut cut) {
    char weight[32], bias[32];
    xd_weight_desc scale = nn_conv_weight(1, c->inner, 0), shift = nn_conv_weight(1, c->inner, 0);
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    scale.name = weight;
    shift.name = bias;
    scale.init.kind = XD_INIT_CONSTANT;
    scale.init.center = 1.0f;
    XD_TRY(nn_conv_add(c, block, cut, &scale));
    return nn_conv_add(c, block, cut, &shift);
}

static xd_result nn_conv_describe_root(const void *config, xd_block *root) {
    const nn_conv_config *c = (const nn_conv_config *)config;
    const nn_conv_pair in = { "in", c->inner, c->channels, NN_CONV_SEEN, false, NN_CONV_WHOLE },
                       time = { "time", c->embedding, c->frequencies, 1, false, NN_CONV_WHOLE },
                       out = { "out", c->channels, c->inner, NN_CONV_SEEN, true, NN_CONV_WHOLE };
    xd_weight_desc label = nn_conv_weight(2, c->labels, c->embedding);
    label.name = "label";
    label.init.kind = XD_INIT_NORMAL;
    label.init.scale = 0.1f;
    XD_TRY(nn_conv_add_pair(c, root, &in));
    XD_TRY(nn_conv_add_pair(c, root, &time));
    XD_TRY(nn_conv_add(c, root, NN_CONV_WHOLE, &label));
    XD_TRY(nn_conv_add_norm(c, root, "norm", NN_CONV_WHOLE));
    return nn_conv_add_pair(c, root, &out);
}

static xd_result nn_conv_describe_block(const void *config, xd_block *block) {
    const nn_conv_config *c = (const nn_conv_config *)config;
    const nn_conv_pair conv1 = { "conv1", c->inner, c->inner, NN_CONV_SEEN, false, NN_CONV_CUT_OUT },
                       time = { "time", c->inner, c->embedding, 1, false, NN_CONV_CUT_OUT },
                       conv2 = { "conv2", c->inner, c->inner, NN_CONV_SEEN, true, NN_CONV_CUT_IN };
    XD_TRY(nn_conv_add_norm(c, block, "norm1", NN_CONV_WHOLE));
    XD_TRY(nn_conv_add_pair(c, block, &conv1));
    XD_TRY(nn_conv_add_pair(c, block, &time));
    XD_TRY(nn_conv_add_norm(c, block, "norm2", NN_CONV_CUT_OUT));
    return nn_conv_add_pair(c, block, &conv2);
}

xd_result nn_conv_describe(xd_ctx *ctx, const nn_conv_config *config, uint64_t seed, xd_model **out) {
    const nn_network network = { config, config->blocks, "residual", nn_conv_describe_root,
                                 nn_conv_describe_block };
    xd_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.seed = seed;
    desc.rank = nn_split_rank(config->split);
    XD_TRY(nn_conv_check(ctx, config));
    return nn_network_describe(ctx, &network, &desc, out);
}
