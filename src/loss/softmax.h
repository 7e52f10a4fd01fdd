#ifndef XDI_LOSS_SOFTMAX_H
#define XDI_LOSS_SOFTMAX_H

#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Log-probabilities of rows whose columns are split over ranks, and what evaluations take from them. Outputs that are NULL, or
 * without data, are not computed. On a GPU arrays are device memory. Numbers of one token are f32, sums double. */
typedef struct xd_log_probs_desc {
    const xd_vocab *vocab; /* required */
    xd_rows logits;        /* required; [T, V/tp] f32 or bf16 */
    double temperature;    /* divides logits; 0 -> 1 */
    xd_ids ids;            /* [T, ids_per_row] global ids, for the outputs at ids */
    int64_t ids_per_row;   /* 0 -> 1 */
    bool ids_shared;       /* ids is one list [ids_per_row] for all rows */
    xd_positions counted;  /* rows and labels of accuracy */
    xd_comm *comm;         /* ranks with other positions of accuracy; NULL -> none */
    /* Outputs, at least one. */
    double *log_sum_exp;  /* [T] of logits / temperature; -infinity for a row of only -infinity */
    int64_t *argmax;      /* [T]; ties: lowest id */
    float *at_ids;        /* [T, ids_per_row]; NaN for an id outside the vocabulary */
    float *logits_at_ids; /* the same of the logits themselves */
    xd_rows all;      /* [T, V/tp] of this rank's columns, not padding; may be logits; data NULL -> none */
    double *accuracy; /* weighted share of counted rows with the label as argmax; 0 without counted rows */
} xd_log_probs_desc;

/* Computes the outputs of desc. Collective over the vocabulary's group, with accuracy also over comm; the same bits on all
 * ranks. Takes [T, tp] memory: a CPU context retains it, a GPU allocates it for the call. NaN and +infinity propagate in their
 * row.
 * Errors, outputs untouched: SHAPE, DTYPE, ARGUMENT (temperature; nothing asked for; shared id outside the vocabulary, on a GPU
 * NaN; weights that xd_denominator_count refuses, on a GPU NaN), MISMATCH (rows differ between ranks), MEMORY. */
XD_API xd_result xd_log_probs(xd_ctx *ctx, const xd_log_probs_desc *desc);

/* Gradients of a loss by log-probabilities: one of the first two. */
typedef struct xd_log_probs_gradient {
    const float *at_ids; /* [T] d loss / d at_ids, one id a row; NULL -> of all */
    xd_rows all;         /* [T, V/tp] d loss / d all; data NULL -> of at_ids */
    xd_rows logits;      /* required; output [T, V/tp], d loss / d logits; may be logits or all */
} xd_log_probs_gradient;

/* Computes d loss / d logits. Of desc the inputs are read. Zero for an id outside the vocabulary or a gradient of 0. Collective
 * over the vocabulary's group; memory and errors as xd_log_probs. */
XD_API xd_result xd_log_probs_backward(xd_ctx *ctx, const xd_log_probs_desc *desc,
                                       const xd_log_probs_gradient *gradient);

#endif
