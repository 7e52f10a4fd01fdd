/* nn_transformer.h - forward and backward pass of the model in nn_model.h.
 *
 *     nn_model_init(&config, NULL, NULL, &model);
 *     float *weights   = calloc(model.float_count, sizeof(float));
 *     float *gradients = calloc(model.float_count, sizeof(float));
 *     float *workspace = malloc(nn_workspace_floats(&model, &batch, true) * sizeof(float));
 *
 *     nn_forward(&model, weights, &batch, true, workspace, logits);
 *     ...  any loss: logits -> d_logits  ...
 *     nn_backward(&model, weights, &batch, workspace, d_logits, gradients);
 *
 * Nothing is allocated inside. With a tensor-parallel group, logits are this rank's columns of the
 * vocabulary; with a context-parallel group, ids and logits are this rank's positions of every sequence. */
#ifndef NN_TRANSFORMER_H
#define NN_TRANSFORMER_H

#include "nn_model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Equally long sequences, and the positions of them that this rank holds. */
typedef struct nn_batch {
    int sequences;
    int positions;           /* held here, per sequence */
    const int32_t *ids;      /* [sequences, positions] */
    const int32_t *position; /* [positions]: which positions these are; NULL = 0, 1, 2, ... */
    /* Only with a context-parallel group: the same two things for every rank, in rank order. */
    const int32_t *cp_count;    /* [cp.size] positions that each rank holds */
    const int32_t *cp_position; /* [sum of cp_count] */
} nn_batch;

/* Floats of workspace. When `training`, everything the backward pass reads is kept; else the layers share
 * their room. Does not look at batch->ids. */
int64_t nn_workspace_floats(const nn_model *model, const nn_batch *batch, bool training);

/* logits [sequences * positions, share.vocab_count] = what follows each position.
 *
 *   weights    [float_count]
 *   training   as given to nn_workspace_floats
 *   workspace  written; nn_backward reads it
 *
 * Collective over tp and cp. Returns 0 or the code of the communication that failed. */
int nn_forward(const nn_model *model, const float *weights, const nn_batch *batch, bool training,
               float *workspace, float *logits);

/* d_weights [float_count] += the gradient, given d_logits = the gradient of the loss with respect to the
 * logits. Uses the workspace as nn_forward left it, once.
 *
 * What the data ranks and the context-parallel ranks add to d_weights must be summed by the caller; over the
 * tensor-parallel group every gradient is complete. Collective over tp and cp; returns as nn_forward. */
int nn_backward(const nn_model *model, const float *weights, const nn_batch *batch, float *workspace,
                const float *d_logits, float *d_weights);

#ifdef __cplusplus
}
#endif

#endif /* NN_TRANSFORMER_H */
