/* nn_blocks.h - the passes of nn_transformer.h over the blocks of a description: wrapped, or with storage of its own. */
#ifndef NN_BLOCKS_H
#define NN_BLOCKS_H

#include "nn_describe.h"
#include "nn_transformer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nn_blocks {
    const xd_model *model; /* of nn_describe */
    int64_t micro_batch;   /* of the next backward pass; with `recompute` of the next forward pass too */
    const nn_cut *cut;     /* of a stage of a pipeline; NULL = the whole model */
} nn_blocks;

/* Its codes are those of xd_result. A model with `recompute` needs xd_inputs_create first, for inputs of rows * hidden floats. */
nn_source nn_blocks_source(nn_blocks *blocks);

/* The same as nn_batch_fits in words. Local. Errors: UNSUPPORTED with the rank and both numbers of positions, or a position
 * that is out of order. */
xd_result nn_blocks_check(xd_ctx *ctx, const nn_model *model, const nn_batch *batch);

/* nn_group.sum_pieces over a communicator, which is the group's `user`. Collective over it; codes are those of xd_result. */
int nn_blocks_sum_pieces(void *comm, const float *forest, nn_pieces pieces, int64_t count, float *x);

#ifdef __cplusplus
}
#endif

#endif /* NN_BLOCKS_H */
