#ifndef XDI_LOSS_INTERNAL_H
#define XDI_LOSS_INTERNAL_H

#include "base/internal.h"
#include "comm/internal.h"
#include "loss/loss.h"
#include "loss/topk.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

/* vocab.c: the same as xd_vocab_describe, as kernels take it. */
XD_PRIVATE xd_vocab_shard xdi_vocab_shard(const xd_vocab *vocab);
/* vocab.c: a matrix of f32 or bf16 by itself: its type, extents, stride and data. */
XD_PRIVATE xd_result xdi_rows_check(xd_ctx *ctx, const char *name, const xd_rows *rows);
/* vocab.c: are these logits rows of this vocabulary's shard? rows < 0 -> any number of them. */
XD_PRIVATE xd_result xdi_vocab_check_rows(xd_ctx *ctx, const xd_vocab *vocab, const char *name,
                                          const xd_rows *rows, int64_t count);
/* vocab.c: a gradient of the student's shape; over its memory only with its dtype and stride. */
XD_PRIVATE xd_result xdi_vocab_check_gradient(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *student,
                                              const xd_rows *gradient);
/* vocab.c: are these ids, or none, of a dtype that kernels read? */
XD_PRIVATE xd_result xdi_vocab_check_ids(xd_ctx *ctx, const char *name, const xd_ids *ids);
/* vocab.c: all-gathers count elements per rank. On one rank nothing is copied and the result is `mine` itself. */
XD_PRIVATE xd_result xdi_vocab_gather(const xd_vocab *vocab, const void *mine, void *all, int64_t count,
                                      xd_dtype dtype, const void **result);
/* vocab.c: agrees on a local result over both groups (either may be NULL), so that all ranks go on or none
 * does. */
XD_PRIVATE xd_result xdi_vocab_agree(xd_comm *tp, xd_comm *comm, xd_result mine);
/* vocab.c: the same over one group, whose ranks must also have the same number of rows (or other elements). */
XD_PRIVATE xd_result xdi_vocab_agree_rows(xd_comm *comm, xd_result mine, int64_t rows);

/* topk.c: memory for this shard's candidates, [rows, k] values and then as many ids, as 8-byte words; and on
 * several ranks for the candidates of all shards. */
typedef struct xdi_topk_candidates {
    int64_t *mine, *all;
    float *narrow; /* of one rank, instead of values */
} xdi_topk_candidates;
/* topk.c: the best of every shard, and the best of those. */
XD_PRIVATE xd_result xdi_topk_select(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                     const xdi_topk_candidates *c, double *values, int64_t *ids);

/* topk.c: xd_vocab_topk whose values are double. Collective over the vocabulary. */
XD_PRIVATE xd_result xdi_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                    double *values, int64_t *ids);
/* softmax.c: log_sum_exp[T] of logits/temperature (0 -> 1) and argmax[T], ties: lowest id; either may be NULL. Collective
 * over the vocabulary. */
XD_PRIVATE xd_result xdi_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                   double *log_sum_exp, int64_t *argmax);
/* softmax.c: the logit of each row at its id, as xd_log_probs gives it, but double. Collective over the vocabulary. */
XD_PRIVATE xd_result xdi_vocab_at_ids(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, xd_ids ids,
                                      double *values);

/* columns.c: copies rows into those of another stride and dtype, on the context's stream. */
XD_PRIVATE xd_result xdi_rows_copy(xd_ctx *ctx, const xd_kernels *kernels, const xd_rows *from,
                                   const xd_rows *to);
/* topk.c: chooses columns; ids are on the device. */
XD_PRIVATE xd_result xdi_topk_choose(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids);
/* topk.c: the number of sequences; and the rows of sequence b, when rows are sequence by sequence, `held` rows each. */
XD_PRIVATE int64_t xdi_topk_sequences(const xd_vocab_topk_desc *desc);
XD_PRIVATE xd_rows xdi_topk_sequence(const xd_rows *all, int64_t b, int64_t held);
/* topk.c: the rows of sequence b that are finite on all shards, of those whose mask (NULL -> all) is not 0. Collective over the
 * vocabulary. */
XD_PRIVATE xd_result xdi_topk_voters(xd_ctx *ctx, const xd_vocab_topk_desc *d, int64_t b, const uint8_t *mask,
                                     uint8_t *voters);

/* reduction.c: which rows count, what their sum is divided by, and how their losses become one value. */
typedef struct xdi_reduction {
    xd_positions positions; /* the rows, with their weights */
    const double *scale;
    const xd_denominator *denominator;
    double denominator_value;
    xd_comm *comm;
    xd_status *status;
    double hard_weight, soft_weight; /* soft_weight includes tau^2 */
    int64_t vocabulary;              /* labels are below it */
} xdi_reduction;

/* vocab.c: as xd_status_check, of labels below `vocabulary`; 0: unknown. */
XD_PRIVATE xd_result xdi_status_check(xd_ctx *ctx, const xd_status *status, int64_t vocabulary);

/* The reduction of a loss over `rows` rows; the two weights are still zero. */
XD_PRIVATE xdi_reduction xdi_reduction_of(const xd_loss_common *common, int64_t rows);
XD_PRIVATE xd_result xdi_reduction_check(xd_ctx *ctx, const xdi_reduction *in);
/* int64 words of workspace that begin and end share */
XD_PRIVATE int64_t xdi_reduction_words(const xdi_reduction *in);
/* Fills row_scale[rows] = w scale / D, 0 for rows that do not count. args go to end, with the rows of a loss
 * and the outputs per row added. */
XD_PRIVATE xd_result xdi_reduction_begin(xd_ctx *ctx, const xdi_reduction *in, double *row_scale,
                                         int64_t *words, xd_row_args *args);
XD_PRIVATE xd_result xdi_reduction_end(xd_ctx *ctx, const xdi_reduction *in, xd_row_args *args,
                                       xd_loss_values *out);

/* loss.c: one call of a loss over the vocabulary, and its blocks of the workspace. */
typedef struct xdi_loss_plan {
    xd_loss_desc d;
    xdi_reduction reduction;
    const xd_kernels *kernels;
    xd_loss_args args;    /* of the current rows */
    double *row_scale;    /* [all rows] */
    xd_loss_row *rows;    /* [all rows] */
    double *all_partials; /* references and sums of all shards, for the current rows */
    void *all_mixtures;
    int64_t *words;
    size_t bytes; /* of the workspace */
} xdi_loss_plan;

/* The desc with every default filled in, its reduction, and the checks of both. */
XD_PRIVATE xd_loss_desc xdi_loss_defaults(const xd_loss_desc *desc);
XD_PRIVATE xdi_reduction xdi_loss_reduction(const xd_loss_desc *d);
XD_PRIVATE xd_result xdi_loss_validate(xd_ctx *ctx, const xd_loss_desc *d, const xdi_reduction *in);
/* plan->args from plan->d, without the blocks of the workspace. */
XD_PRIVATE void xdi_loss_fill_args(xd_ctx *ctx, xdi_loss_plan *plan);
/* Takes every block from the arena, for all rows and for `rows` of them; with a planning arena this is
 * their size. False when it does not fit. */
XD_PRIVATE bool xdi_loss_layout(xdi_loss_plan *plan, int64_t rows, xd_arena *arena);
/* From the logits of plan->args to the scalars of every row, and the gradient. Collective over the vocabulary. */
XD_PRIVATE xd_result xdi_loss_rows(const xd_launch *launch, xdi_loss_plan *plan);
/* Every loss tells its values: ARGUMENT where there is no place for them. */
XD_PRIVATE xd_result xdi_loss_check_out(xd_ctx *ctx, int64_t rows, const void *out);
/* One call: checks, workspace, which rows count, the body, which fills plan->rows, and their sum. `checked`
 * is the result of the caller's checks on this rank. */
typedef xd_result (*xdi_loss_body)(const xd_launch *launch, xdi_loss_plan *plan, const void *user);
XD_PRIVATE xd_result xdi_loss_call(xd_ctx *ctx, const xd_loss_desc *desc, xd_result checked,
                                   xdi_loss_body body, const void *user, xd_loss_values *out);

/* loss.c: xd_loss with cross entropy and the divergences that go with it. */
XD_PRIVATE xd_result xdi_loss_of_rows(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

#endif
