/* nn_patch_inside.h - what the description, memory and passes of the patch transformer share. */
#ifndef NN_PATCH_INSIDE_H
#define NN_PATCH_INSIDE_H

#include "nn_condition.h"
#include "nn_network.h"
#include "nn_patch.h"
#include "nn_patch_layer.h"
#include "nn_patch_pieces.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a split cuts a weight: not; of a map's outputs, or of its inputs, the heads (of a query, key and value each) or the
 * inner width. */
typedef enum nn_patch_cut_kind {
    NN_PATCH_WHOLE,
    NN_PATCH_HEADS_OUT,
    NN_PATCH_HEADS_IN,
    NN_PATCH_INNER_OUT,
    NN_PATCH_INNER_IN
} nn_patch_cut_kind;

/* nn_patch_split.c: what of the heads' columns and of the inner width is here; whether that can be; the layout of a weight, which
 * the split keeps. */
nn_pieces nn_patch_heads(const nn_patch_config *config);
nn_pieces nn_patch_inner(const nn_patch_config *config);
xd_result nn_patch_split_check(xd_ctx *ctx, const nn_patch_config *config);
xd_result nn_patch_split_layout(const nn_patch_config *config, const xd_weight_desc *weight,
                                nn_patch_cut_kind cut, const xd_layout **out);

/* nn_patch_describe.c: whether there can be such a model; whether its ranks can share samples so. */
xd_result nn_patch_check(xd_ctx *ctx, const nn_patch_config *config);
xd_result nn_patch_check_cut(xd_ctx *ctx, const nn_patch_config *config);

/* Weights of the root, in the order of its block. */
enum {
    NN_PATCH_EMBED,
    NN_PATCH_EMBED_BIAS,
    NN_PATCH_POSITION,
    NN_PATCH_TIME, /* and class: NN_CONDITION_WEIGHTS */
    NN_PATCH_COMMON =
        NN_PATCH_TIME +
        NN_CONDITION_WEIGHTS, /* [6 width, width]: shift, scale and gate of all layers, from time and class */
    NN_PATCH_COMMON_BIAS,
    NN_PATCH_LAST, /* [2 width, width]: shift and scale behind the layers */
    NN_PATCH_LAST_BIAS,
    NN_PATCH_LAST_TABLE,
    NN_PATCH_OUT,
    NN_PATCH_OUT_BIAS,
    NN_PATCH_ROOT_WEIGHTS
};

/* One forward: what it keeps of all samples. */
typedef struct nn_patch_slot {
    bool keeps;              /* otherwise rows are those of one chunk only, used again by each */
    int64_t samples;         /* of its last forward; -1 before */
    nn_conditioned time;     /* and class */
    float *common, *last;    /* [samples, 6 width], [samples, 2 width] */
    float *patches;          /* [rows, pixels] */
    float *normed, *inverse; /* [rows, width], [rows] behind the layers */
    nn_patch_trace *traces;  /* [layers] */
} nn_patch_slot;

/* Rows here and of all ranks are told apart where tokens may be elsewhere: a row is here if nothing is said. */
struct nn_patch {
    xd_ctx *ctx;
    nn_patch_config config;
    int64_t samples; /* most of a call */
    int64_t chunk;   /* samples computed together */
    nn_positions at;
    nn_pieces heads, inner; /* the columns of heads, and of the inner width */
    nn_grid grid;           /* of a chunk */
    int64_t pixels;         /* of a patch */
    nn_condition time;      /* and class */
    nn_features features;
    int slot_count;
    nn_patch_slot *slots; /* [slot_count + 1]; the last is that of inference */
    nn_patch_trace *traces;
    xd_block **blocks;  /* [layers + 1]; the last is the root */
    float *x, *d_x;     /* [samples * tokens, width] the stream */
    float *d_condition; /* [blocks here, of a call's samples: 6 width each, then 2 width each] by common and
                         * last */
    float *d_active;    /* [samples, width] */
    float *raw;         /* [rows of a chunk, pixels] */
    nn_sums sums;       /* room for any, of `most` floats in all */
    int64_t most;
    nn_patch_room room;
    void *memory;
};

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_INSIDE_H */
