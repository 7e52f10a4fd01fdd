/* nn_describe.h - the model of nn_model.h as the library sees one: names, shapes and blocks, for wrappers and checkpoints.
 *
 * The root holds the embedding, the last norm and the head, each layer is a block "model.layers.N" of type "layer", and
 * names are those of nn_model, in the order of its numbers. */
#ifndef NN_DESCRIBE_H
#define NN_DESCRIBE_H

#include "nn_model.h"
#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The type of the blocks that are layers: what a wrapper shards by. */
#define NN_LAYER_TYPE "layer"

/* A sealed model without memory for weights, and how tensor-parallel ranks have cut them. */
typedef struct nn_description {
    xd_ctx *ctx;
    xd_model *model;
    xd_layout **layouts; /* [layout_count]; of the tensor-parallel group's ranks */
    int layout_count;
    xd_dtype dtype; /* of the weights */
} nn_description;

/* Describes a model, or this rank's share of one. First values have the size that nn_model_randomize gives them, from the
 * library's random numbers: a weight's depend on the seed, its name and its place in the whole tensor. nn_description_free in
 * any case. The passes are in float: weights of another dtype need a wrapper that shows them as F32. Local. Errors: those of the
 * description. */
xd_result nn_describe(xd_ctx *ctx, const nn_model *model, uint64_t seed, xd_dtype dtype, nn_description *out);
void nn_description_free(nn_description *description);

/* The block of a description that nn_transformer.h numbers so. */
xd_block *nn_find_block(const xd_model *model, int block);

#ifdef __cplusplus
}
#endif

#endif /* NN_DESCRIBE_H */
