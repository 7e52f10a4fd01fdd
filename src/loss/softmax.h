#ifndef XDI_LOSS_SOFTMAX_H
#define XDI_LOSS_SOFTMAX_H

#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Row statistics over a split vocabulary. Numbers of one token are f32, sums are double; all arithmetic is double.
 * Collective over the vocabulary's group, the same bits on all ranks. Takes [T, tp] memory: a CPU context retains it, a GPU
 * allocates it for the call. GPU arrays and results are device memory. Logits of -infinity have probability zero; NaN and
 * +infinity propagate in a row.
 * Errors: SHAPE, DTYPE, ARGUMENT (temperature), MISMATCH (rows differ between ranks), MEMORY. */

/* Returns log_sum_exp[T] of logits/temperature (0 -> 1) and argmax[T], ties: lowest id; either may be NULL. A row of only
 * -infinity has log_sum_exp -infinity. */
XD_API xd_result xd_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                              double *log_sum_exp, int64_t *argmax);

/* out[t, c] = logits[t, c] / temperature - log_sum_exp[t] for this rank's columns, not padding; out may be logits. */
XD_API xd_result xd_log_softmax(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                xd_rows out);

/* Gradient of xd_log_softmax. The sum is over the whole vocabulary; weight and gradient are [T, V/tp]; gradient may be
 * weight or logits.
 *
 *     gradient = (weight - softmax sum_v weight) / temperature */
XD_API xd_result xd_log_softmax_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                         double temperature, xd_rows weight, xd_rows gradient);

/* Returns log_probs[T] of ids under softmax(logits / temperature); NaN for an id outside the vocabulary. */
XD_API xd_result xd_target_log_probs(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                     xd_ids ids, float *log_probs);

/* gradient = (onehot(id) - softmax) weight[t] / temperature of xd_target_log_probs; zero for an id outside the vocabulary or
 * weight 0. gradient may be logits. */
XD_API xd_result xd_target_log_probs_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                              double temperature, xd_ids ids, const float *weight,
                                              xd_rows gradient);

/* values[t, j] = logits[t, ids[t, j]], [T, n]. ids_stride is n, or 0 for one shared list. Id outside the vocabulary:
 * ARGUMENT if shared on the host, else NaN. */
XD_API xd_result xd_gather_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, xd_ids ids, int64_t n,
                                   int64_t ids_stride, float *values);

/* Returns the weighted share of counted positions with the label as argmax, over comm (NULL -> this rank). Nothing counted:
 * 0. positions has labels for the rows. Weights that xd_denominator_count refuses: ARGUMENT, on a GPU NaN. Also collective
 * over comm. */
XD_API xd_result xd_accuracy(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                             const xd_positions *positions, xd_comm *comm, double *out);

#endif
