#ifndef XDI_LOSS_TOPK_H
#define XDI_LOSS_TOPK_H

#include "kernel/types.h"
#include "loss/loss.h"

/* The k largest logits of each position over the whole vocabulary: values [T, k] descending, global ids [T,
 * k], lowest id first among equals; as xd_topk_desc takes them (XD_TOPK_LOGITS). k may be larger than a shard, not larger
 * than the vocabulary. Collective over the vocabulary's group: one exchange of the shards' candidates. Memory [T, k, tp],
 * taken as in loss/softmax.h. The same bits for every split. Errors: ARGUMENT (k), SHAPE, DTYPE, MEMORY. */
XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, float *values,
                               int64_t *ids);

/* Which columns to choose for each sequence: the k whose largest logit over its counted positions is greatest (J). */
typedef struct xd_vocab_topk_desc {
    const xd_vocab *vocab; /* required */
    xd_rows logits;        /* required; [T, V/tp], f32 or bf16 */
    int64_t sequences;     /* B: rows are sequence by sequence, T / B rows each; 0 -> 1 */
    const uint8_t *mask;   /* [T] 0 -> the position does not count; NULL -> all do */
    xd_comm *comm;         /* ranks that hold other positions of the same sequences; NULL -> none */
    int64_t k;             /* required, 1 <= k <= V */
} xd_vocab_topk_desc;

/* Chooses the columns of each sequence.
 *
 *   ids         [B, k] ascending, the same on all ranks of both groups
 *   importance  [B, V/tp] the maxima of this rank's columns, over comm; may be NULL
 *
 * A position that holds NaN or +infinity in any column does not count either: ids and importance are those of the call without
 * it. Nothing is told here; xd_xtoken_loss, and what takes the values of xd_vocab_topk_gather, tell it. -infinity is legal.
 *
 * Collective over the vocabulary's group and comm. Ties: lowest id. The same ids for every split. Memory for
 * the call as in loss/softmax.h, for one sequence. Errors as xd_vocab_topk, and SHAPE when T is not a multiple of B.
 * xd_vocab_topk_gather returns the logits of these columns too. */
XD_API xd_result xd_vocab_topk_columns(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids,
                                       float *importance);

/* What the teacher's values are. */
typedef enum xd_topk_values {
    XD_TOPK_LOG_PROBS = 0, /* ln p at values_temperature; -infinity: the entry is absent */
    XD_TOPK_LOGITS /* raw logits; log_normaliser turns them into probabilities where the mode needs that */
} xd_topk_values;

/* Divergence from a teacher known at k ids per position. The teacher is given in one of two forms: `ids` and
 * `values`, or `teacher`, its logits over the same split vocabulary; with the latter, ids NULL takes the
 * student's k largest (no gradient through the choice). Fields named as in xd_loss_desc mean the same. */
typedef struct xd_topk_desc {
    xd_rows student;       /* required */
    const xd_vocab *vocab; /* required */
    int64_t k;             /* required, 1 <= k <= V */
    xd_ids ids;            /* [T, k] global, distinct where valid; ids of absent entries are not read */
    const float *values;   /* [T, k]; NULL -> teacher */
    xd_topk_values values_kind;
    double values_temperature;    /* of log-probabilities; 0 -> 1; must equal temperature */
    const double *log_normaliser; /* [T] ln sum_v e^(y_v/tau), xd_row_stats: for LOGITS in TAIL and
                                   * TRUNCATE */
    xd_rows teacher;
    xd_topk_mode mode;                        /* what holds the mass outside the ids; 0 -> TAIL */
    xd_divergence divergence;                 /* FORWARD, REVERSE, JSD, MIXED */
    double beta;                              /* JSD, MIXED; 0 is the forward KL */
    double temperature;                       /* 0 -> 1 */
    xd_temperature_factor temperature_factor; /* DEFAULT -> ONE */
    float *student_mass;                      /* [T] probability the student puts on the valid ids; or NULL */
    float *teacher_mass;                      /* [T] the teacher's; 1 where only logits are known; or NULL */
    float *student_log_probs; /* [T, k] of counted rows, as the mode normalises them; or NULL */
    xd_loss_common common;    /* labels only say which rows count; row_loss has the temperature factor */
} xd_topk_desc;

/* Bytes of workspace that xd_topk_kl_loss takes for this desc: arrays of [T, k, tp] and [threads, k]; 0 for an invalid desc.
 * Local. */
XD_API size_t xd_topk_kl_workspace_bytes(xd_ctx *ctx, const xd_topk_desc *desc);

/* Value and gradient. Collectivity, bits and data errors as xd_loss (one exchange over the vocabulary, in
 * INVARIANT mode one more, of the maxima); further data errors: an id outside the vocabulary, an id that appears twice in
 * a row; a teacher's value or log_normaliser that is no number, or probabilities of the teacher that add up to more than 1.1
 * (status tells NaN or their sum). A row with a data error has masses 0 and log-probabilities -infinity, as one that does not
 * count. A row without a valid entry counts with loss 0. Allocates nothing when workspace is given.
 * The tail's mass is summed from the columns outside, never formed as 1 - P, and is at least 1 - e^-1e-7. Only the teacher's,
 * where `values` are given, is 1 - P: log-probabilities as f32 carry it with an error of up to 2^-24 sum p |ln p| over the
 * entries, 6e-8 of the teacher's entropy, logits with that of P by log_normaliser. The loss then errs by at most 1 +
 * |ln(teacher's tail / student's)| times as much, the smaller tail of both readings being taken. Give `teacher` where this counts.
 * Errors: ARGUMENT, SHAPE, DTYPE, MEMORY; UNSUPPORTED for modes and divergences that do not combine. */
XD_API xd_result xd_topk_kl_loss(xd_ctx *ctx, const xd_topk_desc *desc, xd_loss_values *out);

#endif
