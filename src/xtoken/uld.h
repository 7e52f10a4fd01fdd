#ifndef XDI_XTOKEN_ULD_H
#define XDI_XTOKEN_ULD_H

#include "align/align.h"
#include "kernel/types.h"

/* Universal logit distillation compares sorted probabilities, without a common vocabulary: docs/xtoken.md. */

/* A chunk's distribution: one token's, times the probabilities of the others. */
typedef enum xd_uld_merge {
    /* The last token's; row t - 1 predicts token t. */
    XD_ULD_BAYESIAN = 0,
    XD_ULD_OBSERVED /* TRL's default: the first token's; row t predicts token t */
} xd_uld_merge;

/* One side of a sequence. */
typedef struct xd_uld_side {
    xd_rows logits;     /* [T, >= vocabulary] f32 or bf16; not split */
    int64_t vocabulary; /* without padding */
    const int64_t *ids; /* [T] tokens */
    double temperature; /* 0 -> 1 */
} xd_uld_side;

/* One sequence. */
typedef struct xd_uld_desc {
    xd_uld_side student, teacher;
    const xd_aligned_chunk *chunks; /* [chunk_count]; an empty side: ignored */
    int64_t chunk_count;
    xd_uld_merge merge;
    /* Ids of the same token on both sides; NULL -> none */
    const int64_t *matched_student, *matched_teacher; /* [matched_count], each id once */
    int64_t matched_count;
    double matched_weight, unmatched_weight; /* read with matched ids only */
    double beta;                             /* of the JSD of matched ids; 0 forward, 1 reverse */
    double denominator;                      /* 0 -> chunks with two sides */
    double scale;     /* of loss and gradient; not 0; with matched ids not both weights 0 */
    xd_rows gradient; /* d loss / d student logits, all columns; may be the student's; data NULL -> none */
} xd_uld_desc;

/* Results of one sequence. */
typedef struct xd_uld_values {
    double loss; /* scale (matched_weight matched + unmatched_weight unmatched), or scale unmatched */
    double matched, unmatched; /* sums over chunks, divided by the denominator */
    int64_t chunks;            /* with two sides */
} xd_uld_values;

/* Computes value and gradient of one sequence, and waits for the values. Local. The same bits on every run. Logits
 * and gradient are memory of the context's device, all else host memory.
 * Errors: ARGUMENT (temperature, beta, denominator, chunks, ids; scale and weights whose gradient could leave f32),
 * SHAPE, DTYPE, MEMORY. DATA (NaN or +infinity in a needed row) writes the gradient, 0 in such chunks. */
XD_API xd_result xd_uld_loss(xd_ctx *ctx, const xd_uld_desc *desc, xd_uld_values *out);

#endif
