#ifndef XDI_COMPAT_ALIGN_DP_H
#define XDI_COMPAT_ALIGN_DP_H

#include "base/internal.h"
#include "align/align.h"

/* Scores of the dynamic programme; 0 is 0. */
typedef struct xdi_align_scores {
    double match;       /* of equal tokens; different ones score minus this */
    double combination; /* per token of a run for one token of the other side */
    double gap;         /* of a token without a partner */
} xdi_align_scores;

/* Returns the reference's scores: 3, 1.5 and -1.5. Pure. */
XD_PRIVATE xdi_align_scores xdi_align_scores_defaults(void);

/* The inputs of xdi_align_dp and xdi_align_segment. */
typedef struct xdi_align_dp_desc {
    xd_texts student, teacher;      /* token strings of vocabularies ("Ġfox", "▁fox", "<0xE2>") */
    int max_combination;            /* tokens that one token may match; 0 -> 4 */
    const xdi_align_scores *scores; /* NULL -> xdi_align_scores_defaults() */
} xdi_align_dp_desc;

/* Aligns as NeMo-RL (nemo_rl/algorithms/x_token/token_aligner.py), bit for bit, for parity: a dynamic programme over token
 * strings, anchored by unique triples and repaired afterwards. The result depends on padding. Time O(n m K), memory O(n m)
 * between anchors. Masks: xd_chunk_ids. Errors: ARGUMENT (max_combination outside 1 to 64; scores not finite), MEMORY. */
XD_PRIVATE xd_result xdi_align_dp(xd_ctx *ctx, const xdi_align_dp_desc *desc, xd_alignment *out);

/* Runs that dynamic programme alone, without canonical forms, anchors or repairs. *score (may be NULL) is the sum of scores.
 * Ties prefer the diagonal, a student token alone, a teacher token alone, one student token to n, one teacher token to n. */
XD_PRIVATE xd_result xdi_align_segment(xd_ctx *ctx, const xdi_align_dp_desc *desc, xd_alignment *out,
                                       double *score);

#endif
