/* nn_network.h - what networks of a root and some blocks of one kind have in common: their description, their blocks, and the
 * streams behind blocks that are features. */
#ifndef NN_NETWORK_H
#define NN_NETWORK_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nn_network {
    const void *config;
    int blocks;       /* "blocks.0", "blocks.1" ... */
    const char *type; /* of a block: for a wrapper's units */
    xd_result (*describe_root)(const void *config, xd_block *root);
    xd_result (*describe_block)(const void *config, xd_block *block);
} nn_network;

/* The sealed model, without memory for weights. Local. Errors: those of the description; nothing is left of it then. */
xd_result nn_network_describe(xd_ctx *ctx, const nn_network *network, const xd_model_desc *desc,
                              xd_model **out);

/* blocks [count + 1] = those of a model, and last the root. Local. Errors: ARGUMENT (one that there is not, with both numbers). */
xd_result nn_network_blocks(xd_ctx *ctx, xd_model *model, int count, xd_block **blocks);

/* ---- features ---- */

typedef struct nn_features {
    int blocks, count;
    int *number;       /* [blocks] of the feature that is the stream behind a block; -1: none */
    int64_t *elements; /* [blocks] the same for all: of a sample's stream */
} nn_features;

/* One feature, the stream behind the middle block, (blocks - 1) / 2, where `number` and `elements` have memory. */
void nn_features_begin(nn_features *features, int64_t elements);

/* The streams behind these blocks, ascending; `what` is a block's name in errors. Errors, nothing changed: ARGUMENT (a block
 * that there is not, or that does not follow the one before it, with both numbers). */
xd_result nn_features_choose(xd_ctx *ctx, nn_features *features, const char *what, const int *blocks,
                             int count);

/* How many blocks a backward goes through: without a gradient by what is predicted, and none of weights, those before the last
 * feature. Pure. */
int nn_features_behind(const nn_features *features, const xd_network_call *call);

#ifdef __cplusplus
}
#endif

#endif /* NN_NETWORK_H */
