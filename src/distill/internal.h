#ifndef XDI_DISTILL_INTERNAL_H
#define XDI_DISTILL_INTERNAL_H

#include "base/internal.h"
#include "distill/loss.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

/* vocab.c: are these logits rows of this vocabulary's shard? rows < 0 -> any number of them. */
XD_PRIVATE xd_result xdi_vocab_check_rows(xd_ctx *ctx, const xd_vocab *vocab, const char *name,
                                          const xd_rows *rows, int64_t count);
/* vocab.c: a gradient of the student's shape; over its memory only with its dtype and stride. */
XD_PRIVATE xd_result xdi_vocab_check_gradient(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *student,
                                              const xd_rows *gradient);
/* vocab.c: all-gathers count elements a rank. On one rank nothing moves and the result is `mine` itself. */
XD_PRIVATE xd_result xdi_vocab_gather(const xd_vocab *vocab, const void *mine, void *all, int64_t count,
                                      xd_dtype dtype, const void **result);
/* vocab.c: agrees on a local result over both groups (either may be NULL), so that all ranks go on or none
 * does. */
XD_PRIVATE xd_result xdi_vocab_agree(xd_comm *tp, xd_comm *comm, xd_result mine);

/* denominator.c: does position i count? */
XD_PRIVATE bool xdi_denominator_counts(const int64_t *labels, int64_t ignore_index, const uint8_t *mask,
                                       int64_t i);

/* reduction.c: which rows count, by what they are divided, and how their losses become one value. */
typedef struct xdi_reduction {
    int64_t rows;
    const int64_t *labels;
    int64_t ignore_index;
    const uint8_t *mask;
    const float *row_weight;
    const double *scale;
    const xd_denominator *denominator;
    double denominator_value;
    xd_comm *comm;
    xd_status *status;
    double hard_weight, soft_weight; /* soft_weight includes tau^2 */
} xdi_reduction;

/* One row's contribution. */
typedef struct xdi_row_value {
    double hard, soft;
    int finding;  /* xd_row_finding */
    double value; /* what the status shows of it */
} xdi_row_value;
typedef xdi_row_value (*xdi_row_reader)(const void *rows, int64_t row);

XD_PRIVATE xd_result xdi_reduction_check(xd_ctx *ctx, const xdi_reduction *in);
/* Fills row_scale[rows] = w scale / D, 0 for rows that do not count, and gives scale / D. */
XD_PRIVATE xd_result xdi_reduction_scales(xd_ctx *ctx, const xdi_reduction *in, double *row_scale,
                                          double *factor);
XD_PRIVATE int64_t
xdi_reduction_words(const xdi_reduction *in); /* int64 words of workspace that finish wants */
XD_PRIVATE xd_result xdi_reduction_finish(xd_ctx *ctx, const xdi_reduction *in, const double *row_scale,
                                          double factor, xdi_row_reader read, const void *rows,
                                          int64_t *words, xd_loss_values *out);

#endif
