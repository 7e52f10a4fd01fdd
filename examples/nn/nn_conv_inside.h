/* nn_conv_inside.h - what description, memory and passes of the convolutional network share. */
#ifndef NN_CONV_INSIDE_H
#define NN_CONV_INSIDE_H

#include "nn_condition.h"
#include "nn_conv.h"
#include "nn_conv_block.h"
#include "nn_network.h"

#ifdef __cplusplus
extern "C" {
#endif

/* nn_conv_describe.c: whether there can be such a model. */
xd_result nn_conv_check(xd_ctx *ctx, const nn_conv_config *config);

/* nn_conv_describe.c: the channels between the convolutions of a block that are here, in pieces that are groups. Pure. */
nn_pieces nn_conv_channels(const nn_conv_config *config);

/* Weights of the root, in the order of its block. */
enum {
    NN_CONV_IN, /* [inner, channels, 3, 3] */
    NN_CONV_IN_BIAS,
    NN_CONV_WAVES,                                       /* of time and class: NN_CONDITION_WEIGHTS */
    NN_CONV_LAST = NN_CONV_WAVES + NN_CONDITION_WEIGHTS, /* [inner] scale of the norm, then shift */
    NN_CONV_LAST_BIAS,
    NN_CONV_OUT, /* [channels, inner, 3, 3] */
    NN_CONV_OUT_BIAS,
    NN_CONV_ROOT_WEIGHTS
};

/* One forward: what it keeps of all samples. */
typedef struct nn_conv_slot {
    bool keeps;            /* otherwise rows are those of one chunk only, used again by each */
    int64_t samples;       /* of its last forward; -1 before */
    nn_conditioned time;   /* and class */
    float *pixels;         /* [rows, channels] of the images */
    nn_conv_trace last;    /* of the norm behind the blocks */
    nn_conv_trace *traces; /* [2 blocks] */
} nn_conv_slot;

struct nn_conv {
    xd_ctx *ctx;
    nn_conv_config config;
    int64_t samples, chunk; /* most of a call; samples computed together */
    int64_t places;         /* of an image */
    nn_pieces pieces;       /* the channels between a block's convolutions */
    nn_condition time;      /* and class */
    nn_features features;
    int slot_count;
    nn_conv_slot *slots; /* [slot_count + 1]; the last is that of inference */
    nn_conv_trace *traces;
    xd_block **blocks; /* [blocks + 1]; the last is the root */
    float *x, *d_x;    /* [samples * places, inner] the stream */
    float *d_active;   /* [samples, embedding] */
    nn_conv_room room; /* of a chunk */
    void *memory;
};

#ifdef __cplusplus
}
#endif

#endif /* NN_CONV_INSIDE_H */
