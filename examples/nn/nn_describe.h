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

/* Describes a model; first values are those that nn_model_randomize is said to have, from the library's random numbers.
 * The description is sealed and holds no memory for weights; the caller destroys it.
 *
 * Errors: UNSUPPORTED for a share of a tensor-parallel group, with its ranks; those of the description. */
xd_result nn_describe(xd_ctx *ctx, const nn_model *model, uint64_t seed, xd_model **out);

/* The block of a description that nn_transformer.h numbers so. */
xd_block *nn_find_block(const xd_model *model, int block);

#ifdef __cplusplus
}
#endif

#endif /* NN_DESCRIBE_H */
