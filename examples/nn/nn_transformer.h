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
 * Weights come from a source, a block at a time, so that a wrapper may gather a block's weights while it is open and send
 * its gradients when it closes: nn_forward_from and nn_backward_from. nn_forward and nn_backward take one buffer of all.
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

/* Whether the positions can be cut over the ranks so. When the context-parallel group is `invariant`, each rank holds a run
 * of whole blocks: of `all` positions in eighths, rounded up, rank r of n has the blocks from 8 r / n, rounded down, to those
 * of the next rank. Balanced cuts, and others, do not fit; there nn_forward returns XD_ERROR_UNSUPPORTED. Pure. */
bool nn_batch_fits(const nn_model *model, const nn_batch *batch);

/* What a block is opened for. */
typedef enum nn_pass {
    NN_FORWARD,   /* a backward pass follows */
    NN_INFERENCE, /* none does */
    NN_BACKWARD
} nn_pass;

/* The memory of an open block, by the numbers of nn_model.h. */
typedef struct nn_weights {
    const float *value[NN_MOST_WEIGHTS];
    float *gradient[NN_MOST_WEIGHTS]; /* added to; NULL but in a backward pass */
} nn_weights;

/* A layer's forward pass once more, on the input that was kept. */
typedef int (*nn_again)(void *argument, const nn_weights *weights, const float *input);

/* Where the passes find the weights of a block. NN_ROOT is open during the whole pass, layers one after another inside of
 * it. The functions return 0, or a code that ends the pass and is handed on. */
typedef struct nn_source {
    void *user;
    int (*begin)(void *user, int block, nn_pass pass, nn_weights *out);
    int (*end)(void *user, int block);
    /* Of a model with `recompute`, otherwise NULL: keeps the input of a layer that is open for a forward pass; and, in its
     * backward pass, hands it to `forward` with `argument`. */
    int (*keep)(void *user, int block, const float *input, int64_t count);
    int (*recompute)(void *user, int block, nn_again forward, void *argument);
} nn_source;

/* A source over buffers of float_count: all weights, and all gradients, NULL where there is no backward pass. */
typedef struct nn_flat {
    const nn_model *model;
    const float *weights;
    float *gradients;
} nn_flat;
nn_source nn_flat_source(nn_flat *flat);

/* Floats of workspace. When `training`, everything the backward pass reads is kept; else, and where it is computed again, the
 * layers share their room. Does not look at batch->ids. */
int64_t nn_workspace_floats(const nn_model *model, const nn_batch *batch, bool training);

/* logits [sequences * positions, share.vocab_count] = what follows each position.
 *
 *   weights    [float_count]
 *   training   as given to nn_workspace_floats
 *   workspace  written; nn_backward reads it
 *
 * Collective over tp and cp. Returns 0 or the code of the communication that failed; NN_NO_INPUTS when the model has `recompute`
 * and the source keeps none, as that over one buffer. */
#define NN_NO_INPUTS (-1)
int nn_forward(const nn_model *model, const float *weights, const nn_batch *batch, bool training,
               float *workspace, float *logits);
int nn_forward_from(const nn_model *model, const nn_source *source, const nn_batch *batch, bool training,
                    float *workspace, float *logits);

/* d_weights [float_count] += the gradient, given d_logits = the gradient of the loss with respect to the
 * logits. Uses the workspace as nn_forward left it, once.
 *
 * What the data ranks and the context-parallel ranks add to d_weights must be summed by the caller, not the latter when their
 * group is `invariant`: it is complete on each then, as it is over the tensor-parallel group. Collective over tp and cp;
 * returns as nn_forward. */
int nn_backward(const nn_model *model, const float *weights, const nn_batch *batch, float *workspace,
                const float *d_logits, float *d_weights);
int nn_backward_from(const nn_model *model, const nn_source *source, const nn_batch *batch, float *workspace,
                     const float *d_logits);

/* The passes of a stage of a pipeline (nn_model.cut), or of the whole model. An activation is [sequences * positions, hidden].
 *
 *   input    forward: the activation of the stage before; NULL = the first stage, which reads batch->ids. Backward: the gradient
 *            of the output, of the last stage d_logits
 *   output   forward: the activation for the next stage, of the last stage logits. Backward: the gradient of the input; NULL on the
 *            first stage */
typedef struct nn_ends {
    float *workspace;
    const float *input;
    float *output;
} nn_ends;
int nn_forward_stage(const nn_model *model, const nn_source *source, const nn_batch *batch, bool training,
                     const nn_ends *ends);
int nn_backward_stage(const nn_model *model, const nn_source *source, const nn_batch *batch,
                      const nn_ends *ends);

/* Opens and closes every block in the order of a pass, without computing: for ranks that must take part in what others
 * gather, but have nothing of their own to compute. */
int nn_pass_by(const nn_model *model, const nn_source *source, nn_pass pass);

#ifdef __cplusplus
}
#endif

#endif /* NN_TRANSFORMER_H */
