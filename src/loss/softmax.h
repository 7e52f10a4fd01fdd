#ifndef XDI_LOSS_SOFTMAX_H
#define XDI_LOSS_SOFTMAX_H

#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Statistics of rows whose vocabulary is split, and functions of them. A number that belongs to one token (a
 * logit, a log-probability, a weight) is f32, as losses and xd_kl_estimate take it; sums over the vocabulary or over
 * tokens are double. Everything is computed in double. All calls are collective over the vocabulary's group, give the same
 * bits on all its ranks, and need [T, tp] memory: a context on a CPU retains it for later calls, on a GPU it is allocated
 * for the call. With a GPU all arrays and results are device memory. -infinity is a legal logit of
 * probability zero; NaN and +infinity propagate to the row's results. Errors, the same on every rank: SHAPE, DTYPE,
 * ARGUMENT (temperature not positive and finite), MISMATCH (ranks with different numbers of rows), MEMORY. */

/* log_sum_exp[T] of logits/temperature (temperature 0 -> 1) and argmax[T], the lowest id among equals; either
 * may be NULL. A row of only -infinity has log_sum_exp -infinity. */
XD_API xd_result xd_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                              double *log_sum_exp, int64_t *argmax);

/* out[t, c] = logits[t, c] / temperature - log_sum_exp[t] for this rank's columns; out may be logits; padding
 * columns of out are not written. */
XD_API xd_result xd_log_softmax(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                xd_rows out);

/* The vector-Jacobian product of xd_log_softmax: gradient = (weight - softmax * sum_v weight) / temperature,
 * the sum over the whole vocabulary. weight and gradient are [T, V/tp]; gradient may be weight or logits. */
XD_API xd_result xd_log_softmax_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                         double temperature, xd_rows weight, xd_rows gradient);

/* log_probs[T] of the given ids under softmax(logits / temperature); an id outside the vocabulary gets
 * NaN. */
XD_API xd_result xd_target_log_probs(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                     xd_ids ids, float *log_probs);

/* gradient = (onehot(id) - softmax) * weight[t] / temperature, for the log-probabilities above; rows whose id
 * is outside the vocabulary or whose weight is 0 get zero. gradient may be logits. */
XD_API xd_result xd_target_log_probs_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                              double temperature, xd_ids ids, const float *weight,
                                              xd_rows gradient);

/* values[t, j] = logits[t, ids[t, j]], [T, n]. ids_stride is n for a list of ids for each position and 0 for
 * one list for all. An id outside the vocabulary: ARGUMENT when the list is shared and on the host; NaN otherwise. */
XD_API xd_result xd_gather_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, xd_ids ids, int64_t n,
                                   int64_t ids_stride, float *values);

/* Share of the counted positions' weight at which the argmax is the label, over the positions of all ranks of
 * comm (NULL -> this rank). positions describes the rows of logits and has labels. Nothing counted: 0. A
 * weight that xd_denominator_count refuses: ARGUMENT, on a GPU NaN. Also collective over comm. */
XD_API xd_result xd_accuracy(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                             const xd_positions *positions, xd_comm *comm, double *out);

#endif
