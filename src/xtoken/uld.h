#ifndef XDI_XTOKEN_ULD_H
#define XDI_XTOKEN_ULD_H

#include "align/align.h"
#include "kernel/types.h"

/* Universal logit distillation (Boizard et al., 2024; hybrid and merged forms: TRL, ULDLoss): student and
 * teacher need no common vocabulary, because each sorts its probabilities and the sorted lists are
 * compared. */

/* The distribution of a chunk of several tokens: that of one token times the probabilities of the
 * others. */
typedef enum xd_uld_merge {
    /* The last token's distribution times the probabilities of the tokens before it; row t - 1 predicts token t. */
    XD_ULD_BAYESIAN = 0,
    XD_ULD_OBSERVED /* TRL's default: the first token's distribution times the later tokens' probabilities, with row t
                       taken as the prediction of token t, which is off by one; for parity */
} xd_uld_merge;

/* One side of a sequence. */
typedef struct xd_uld_side {
    xd_rows logits;     /* [T, >= vocabulary], f32 or bf16; whole rows: the vocabulary is not split */
    int64_t vocabulary; /* true columns */
    const int64_t *ids; /* [T] the sequence's tokens */
    double temperature; /* 0 -> 1 */
} xd_uld_side;

/* One sequence. */
typedef struct xd_uld_desc {
    xd_uld_side student, teacher;
    const xd_aligned_chunk *chunks; /* [chunk_count] chunks with an empty side are ignored */
    int64_t chunk_count;
    xd_uld_merge merge;
    /* Hybrid: ids that are one token on both sides are compared with each other by the generalised JSD of
     * TRL, all other ids as sorted lists. NULL: all ids as sorted lists. */
    const int64_t *matched_student, *matched_teacher; /* [matched_count], each id once */
    int64_t matched_count;
    double matched_weight, unmatched_weight;
    double beta;        /* of the JSD; 0 forward, 1 reverse */
    double denominator; /* 0 -> chunks with two sides */
    double scale;       /* of loss and gradient; not 0, and with matched ids not both weights 0 */
    xd_rows gradient;   /* d loss / d student logits, all columns written; may be the student's memory; data
                              NULL -> none */
} xd_uld_desc;

/* Results of one sequence. */
typedef struct xd_uld_values {
    double loss;               /* scale (weights) times the two below, over the denominator */
    double matched, unmatched; /* over the denominator; without matched ids everything is unmatched */
    int64_t chunks;            /* with two sides */
} xd_uld_values;

/* Value and gradient of one sequence. Logits and gradient are memory of the context's device; tokens, chunks,
 * matched ids and *out are host memory, and the call waits for the values. Equal logits are ranked by id.
 * Probabilities of merged tokens below 1e-8 are raised to it and pass no gradient.
 * Local: one rank computes a whole sequence, so the distribution of sequences over ranks changes no bit, in any mode. The
 * same bits on every run; probabilities are f32, except at the plain CPU level, where they are double; sums are double.
 * Memory: between 20 and 30 bytes for each id of both vocabularies, on a CPU for one chunk per thread of the context, on
 * a GPU for as many chunks as 64 MB hold.
 * Errors, outputs untouched: ARGUMENT (temperature, beta, denominator, chunks or ids out of range; scale and weights with
 * which the gradient could leave f32), SHAPE, DTYPE, MEMORY; DATA when a row that is needed has a NaN or +infinity: then the
 * gradient is still written, 0 for the rows of such chunks, but *out is not. */
XD_API xd_result xd_uld_loss(xd_ctx *ctx, const xd_uld_desc *desc, xd_uld_values *out);

#endif
