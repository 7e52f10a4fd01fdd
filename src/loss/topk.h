#ifndef XDI_LOSS_TOPK_H
#define XDI_LOSS_TOPK_H

#include "kernel/types.h"
#include "loss/loss.h"

/* Finds each position's k largest logits, for XD_TOPK_LOGITS: values [T, k] descending, global ids [T, k]. Ties: lowest
 * id. k may exceed the columns of a rank.
 *
 * Collective over the vocabulary's group: one exchange. Takes [T, k, tp] memory, as xd_log_probs does without a workspace;
 * one rank on a GPU takes none. The same bits for every split.
 * Errors: ARGUMENT (k), SHAPE, DTYPE, MEMORY. */
XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, float *values,
                               int64_t *ids);

/* Chooses, for each sequence, the k columns with the largest logits over counted positions. */
typedef struct xd_vocab_topk_desc {
    const xd_vocab *vocab; /* required */
    xd_rows logits;        /* required; [T, V/tp], f32 or bf16 */
    int64_t sequences;     /* B: T / B adjacent rows each; 0 -> 1 */
    const uint8_t *mask;   /* [T] 0 -> not counted; NULL -> all count */
    xd_comm *comm;         /* ranks with these sequences' other positions; NULL -> none */
    int64_t k;             /* required, 1 <= k <= V */
    /* Output [T, k], f32 or bf16: the chosen logits, on all ranks; NaN for a row with NaN or +infinity. data NULL -> none */
    xd_rows values;
    float *importance; /* output [B, V/tp], maxima over comm; NULL -> none */
} xd_vocab_topk_desc;

/* Chooses columns as xd_xtoken_loss would.
 *
 *    ids  [B, k] ascending; host memory with values, else on the device
 *
 * Collective over the vocabulary's group and comm, the same ids on all ranks and for every split. Ties: lowest id. A
 * position with NaN or +infinity does not count; -infinity is legal. Memory as xd_log_probs, for one sequence; with values:
 * docs/questions.md.
 * Errors: as xd_vocab_topk; SHAPE (T not a multiple of B). */
XD_API xd_result xd_vocab_topk_columns(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids);

/* The teacher's values. */
typedef enum xd_topk_values {
    XD_TOPK_LOG_PROBS = 0, /* ln p at values_temperature; -infinity: absent */
    XD_TOPK_LOGITS         /* some modes need log_normaliser */
} xd_topk_values;

/* Divergence from a teacher at k ids a position. Give `ids` and `values`, or `teacher`: logits with the same split.
 * With `teacher`, ids NULL -> the student's k largest, a choice without gradient. Other fields as in xd_loss_desc. */
typedef struct xd_topk_desc {
    xd_rows student;       /* required */
    const xd_vocab *vocab; /* required */
    int64_t k;             /* required, 1 <= k <= V */
    xd_ids ids;            /* [T, k] global, distinct; not read where `values` says absent */
    const float *values;   /* [T, k]; NULL -> teacher */
    xd_topk_values values_kind;
    double values_temperature; /* of LOG_PROBS, equal to temperature; 0 -> 1 */
    /* [T] ln sum_v e^(y_v/tau), of xd_log_probs: LOGITS in TAIL, TRUNCATE */
    const double *log_normaliser;
    xd_rows teacher;
    xd_topk_mode mode;                        /* 0 -> TAIL */
    xd_divergence divergence;                 /* FORWARD, REVERSE, JSD, MIXED */
    double beta;                              /* JSD, MIXED; 0: forward KL */
    double temperature;                       /* 0 -> 1 */
    xd_temperature_factor temperature_factor; /* DEFAULT -> ONE */
    float *student_mass;                      /* [T] student's probability of valid ids; or NULL */
    float *teacher_mass;                      /* [T] teacher's; 1 for logits alone; or NULL */
    float *student_log_probs;                 /* [T, k] of counted rows, by mode; or NULL */
    xd_loss_common common;                    /* labels only select; row_loss has temperature_factor */
} xd_topk_desc;

/* Computes value and gradient. Collectivity, bits, data errors as xd_loss; one exchange over the vocabulary, INVARIANT two.
 * Allocates nothing with a workspace. A row without valid entries counts with loss 0.
 *
 * More data errors: id outside the vocabulary or repeated, teacher value or log_normaliser NaN, teacher mass above 1.1.
 * Such rows and uncounted ones have masses 0 and log-probabilities -infinity. A tail's rounding: docs/questions.md.
 * Errors: ARGUMENT, SHAPE, DTYPE, MEMORY, UNSUPPORTED (mode, divergence). */
XD_API xd_result xd_topk_kl_loss(xd_ctx *ctx, const xd_topk_desc *desc, xd_loss_values *out);

#endif
