#ifndef XDI_LOSS_SOFTMAX_H
#define XDI_LOSS_SOFTMAX_H

#include "loss/denominator.h"
#include "loss/vocab.h"
#include "kernel/types.h"

/* Log-probabilities of split rows, for evaluations. Outputs NULL, or without data, are not computed. On a GPU arrays are
 * device memory. */
typedef struct xd_log_probs_desc {
    const xd_vocab *vocab; /* required */
    xd_rows logits;        /* required; [T, V/tp] f32 or bf16 */
    double temperature;    /* 0 -> 1 */
    xd_ids ids;            /* [T, ids_per_row] global */
    int64_t ids_per_row;   /* 0 -> 1 */
    bool ids_shared;       /* one list [ids_per_row] for all rows */
    xd_positions counted;  /* of accuracy */
    xd_comm *comm;         /* ranks with accuracy's other positions; NULL -> none */
    /* Outputs, at least one. */
    double *log_sum_exp;    /* [T] of logits / temperature; -infinity for a row of only that */
    int64_t *argmax;        /* [T]; ties: lowest id */
    float *at_ids;          /* [T, ids_per_row]; NaN for an id outside the vocabulary */
    float *logits_at_ids;   /* as at_ids, of logits */
    xd_rows all;            /* [T, V/tp], no padding; may be logits; data NULL -> none */
    double *accuracy;       /* weighted share of counted rows with label = argmax; no rows: 0 */
    void *workspace;        /* of the context's device; NULL -> as below */
    size_t workspace_bytes; /* at least 4096 + 8 T (3 + max(3, ids_per_row) (1 + tp)) */
} xd_log_probs_desc;

/* Computes the outputs. Collective over the vocabulary's group, with accuracy also over comm; all ranks give the same
 * outputs and get the same bits. Allocates nothing with a workspace. Else takes [T, tp] memory: a CPU context retains it, a
 * GPU allocates it for the call. NaN and +infinity propagate in their row.
 * Errors: SHAPE, DTYPE, ARGUMENT (temperature; no output; workspace; shared id outside the vocabulary; weights that
 * xd_denominator_count refuses; on a GPU both give NaN), MISMATCH (rows), MEMORY. */
XD_API xd_result xd_log_probs(xd_ctx *ctx, const xd_log_probs_desc *desc);

/* Gradients by log-probabilities; give one of at_ids and all. */
typedef struct xd_log_probs_gradient {
    const float *at_ids; /* [T] d loss / d at_ids, one id a row; or NULL */
    xd_rows all;         /* d loss / d all; or data NULL */
    xd_rows logits;      /* required; output [T, V/tp]; may be logits or all */
} xd_log_probs_gradient;

/* Computes d loss / d logits from desc's inputs: zero for an id outside the vocabulary or a gradient of 0. Collective
 * over the vocabulary's group; memory, errors as xd_log_probs; ARGUMENT (none or both of at_ids and all). */
XD_API xd_result xd_log_probs_backward(xd_ctx *ctx, const xd_log_probs_desc *desc,
                                       const xd_log_probs_gradient *gradient);

#endif
