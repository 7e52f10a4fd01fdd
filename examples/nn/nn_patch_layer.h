/* nn_patch_layer.h - one layer of the patch transformer on some samples, forward and backward. */
#ifndef NN_PATCH_LAYER_H
#define NN_PATCH_LAYER_H

#include "nn_patch_attention.h"
#include "nn_patch_pieces.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Weights of a layer, in the order of its block. Matrices are [out, in]. */
enum {
    NN_LAYER_TABLE, /* [6, width]: shift, scale and gate of attention, then of the feed-forward part */
    NN_LAYER_QKV,
    NN_LAYER_QKV_BIAS,
    NN_LAYER_OUT,
    NN_LAYER_OUT_BIAS,
    NN_LAYER_UP,
    NN_LAYER_UP_BIAS,
    NN_LAYER_DOWN,
    NN_LAYER_DOWN_BIAS,
    NN_PATCH_LAYER_WEIGHTS
};

/* What a forward keeps for its backward, of all rows of a call. */
typedef struct nn_patch_trace {
    float *normed[2],
        *inverse[2];    /* before attention, and before the feed-forward part: [rows, width], [rows] */
    float *qkv, *probs; /* [rows, 3 width], [rows, heads * tokens of a sample] */
    float *keys;        /* [rows of all ranks, 2 width]: keys and values; NULL where all tokens are here */
    float *mixed, *attended; /* [rows, width], before and behind the output's map */
    float *inner, *sigmoid;  /* [rows, ffn] */
    float *fed;              /* [rows, width] */
} nn_patch_trace;

/* Room for the samples of one call of the functions below. */
typedef struct nn_patch_room {
    float *common;          /* [samples, 6 width]: what the layer's table was added to */
    float *d_common;        /* [blocks here, samples, 6 width] */
    float *read, *d_branch; /* [rows, width] */
    float *wide, *d_wide;   /* [rows, max(ffn, 3 width)] */
    nn_attention_room attention;
} nn_patch_room;

/* Some samples in a layer. */
typedef struct nn_patch_part {
    nn_grid grid;
    const nn_positions *at;
    const nn_pieces *heads, *inner; /* columns of heads, and of the inner width, that are here */
    nn_patch_trace trace;           /* of these samples */
    nn_patch_room room;
    const float *common; /* [samples, 6 width] shift, scale and gate of all layers */
    float *x;            /* [rows, width] the stream: read and written */
} nn_patch_part;

/* Collective where ranks share tokens, as the backward. */
xd_result nn_patch_layer_forward(const nn_patch_part *part, const float *const *weights);

/* What a backward adds to. */
typedef struct nn_patch_slopes {
    float *d_x;      /* [rows, width] the gradient by what the layer has written; out: by what it read */
    float *d_common; /* of these samples in the first block here: [samples, 6 width] += */
    int64_t block;   /* floats from there to the next block's */
    float *const *gradients; /* [NN_PATCH_LAYER_WEIGHTS] +=; those that are NULL are left out */
    const nn_sums *sums;     /* over nn_patch_layer_floats; NULL where there are no gradients */
} nn_patch_slopes;

/* part->x is not read. */
xd_result nn_patch_layer_backward(const nn_patch_part *part, const float *const *weights,
                                  const nn_patch_slopes *slopes);

/* Floats of the layer's weights here, and of the largest of its maps. */
typedef struct nn_layer_widths {
    int64_t width, heads, inner; /* of the stream; columns of heads and of the inner width here */
} nn_layer_widths;
int64_t nn_patch_layer_floats(nn_layer_widths widths);
int64_t nn_patch_layer_largest(nn_layer_widths widths);

/* y [rows, out] = x [rows, in] w^T + bias */
typedef struct nn_patch_map {
    int64_t rows, in, out;
    const float *weight, *bias;
} nn_patch_map;
void nn_patch_map_forward(const nn_patch_map *map, const float *x, float *y);

/* d_x = ..., d_weight += ..., d_bias += ...; NULL is left out. */
void nn_patch_map_backward(const nn_patch_map *map, const float *x, const float *d_y, float *d_x,
                           float *const gradients[2]);

/* The map's weight and bias, as arrays of `sums` from `offset` on; rows are tokens. */
void nn_patch_map_sum(const nn_patch_map *map, const nn_sums *sums, int64_t offset, const float *x,
                      const float *d_y);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_LAYER_H */
