/* nn_patch_layer.h - one layer of the patch transformer on some samples, forward and backward. */
#ifndef NN_PATCH_LAYER_H
#define NN_PATCH_LAYER_H

#include "nn_patch_rows.h"

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
        *inverse[2];         /* before attention, and before the feed-forward part: [rows, width], [rows] */
    float *qkv, *probs;      /* [rows, 3 width], [rows, heads * tokens] */
    float *mixed, *attended; /* [rows, width], before and behind the output's map */
    float *inner, *sigmoid;  /* [rows, ffn] */
    float *fed;              /* [rows, width] */
} nn_patch_trace;

/* Room for the samples of one call of the functions below. */
typedef struct nn_patch_room {
    float *common;          /* [samples, 6 width]: what the layer's table was added to */
    float *d_common;        /* [samples, 6 width] */
    float *read, *d_branch; /* [rows, width] */
    float *wide, *d_wide;   /* [rows, max(ffn, 3 width)] */
    float *attention;
} nn_patch_room;

/* Some samples in a layer. */
typedef struct nn_patch_part {
    nn_grid grid;
    int64_t heads, ffn;
    nn_patch_trace trace; /* of these samples */
    nn_patch_room room;
    const float *common; /* [samples, 6 width] shift, scale and gate of all layers */
    float *x;            /* [rows, width] the stream: read and written */
} nn_patch_part;

void nn_patch_layer_forward(const nn_patch_part *part, const float *const *weights);

/* part->x is not read.
 *   d_x        [rows, width] the gradient by what the layer has written; out: by what it read
 *   d_common   [samples, 6 width] +=
 *   gradients  [NN_PATCH_LAYER_WEIGHTS] +=; those that are NULL are left out */
void nn_patch_layer_backward(const nn_patch_part *part, const float *const *weights, float *const *gradients,
                             float *d_x, float *d_common);

/* y [rows, out] = x [rows, in] w^T + bias */
typedef struct nn_patch_map {
    int64_t rows, in, out;
    const float *weight, *bias;
} nn_patch_map;
void nn_patch_map_forward(const nn_patch_map *map, const float *x, float *y);

/* d_x = ..., d_weight += ..., d_bias += ...; NULL is left out. */
void nn_patch_map_backward(const nn_patch_map *map, const float *x, const float *d_y, float *d_x,
                           float *const gradients[2]);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_LAYER_H */
