#ifndef XDI_COMPAT_ALIGN_DP_H
#define XDI_COMPAT_ALIGN_DP_H

#include "align/align.h"

/* Scores of the dynamic programme. They are used as they are: 0 is 0. */
typedef struct xd_align_scores {
    double match;       /* of two equal tokens; two that differ score minus this */
    double combination; /* per token of a run that spells one token of the other side: n of them score n
                         * times this */
    double gap;         /* of a token without partner */
} xd_align_scores;

/* The reference's scores: 3, 1.5 and -1.5. Pure. */
XD_API xd_align_scores xd_align_scores_defaults(void);

/* What xd_align_dp and xd_align_segment align, and how. */
typedef struct xd_align_dp_desc {
    xd_texts student, teacher;     /* surface strings of the tokens as vocabularies store them ("Ġfox",
                                    * "▁fox", "<0xE2>") */
    int max_combination;           /* tokens that one token may match; 0 -> 4 */
    const xd_align_scores *scores; /* NULL -> xd_align_scores_defaults() */
} xd_align_dp_desc;

/* The aligner of NeMo-RL (nemo_rl/algorithms/x_token/token_aligner.py), bit for bit, for parity: a dynamic
 * programme over token surface strings, anchored by unique triples and repaired afterwards. It runs on the padded
 * sequences and its result depends on the padding; use xd_align_bytes for everything else. Time O(n m K), memory O(n m)
 * between anchors. It takes no mask: xd_chunk_ids does. Errors: ARGUMENT for max_combination outside 1 to 64 and for
 * scores that are not finite, MEMORY. */
XD_API xd_result xd_align_dp(xd_ctx *ctx, const xd_align_dp_desc *desc, xd_alignment *out);

/* The dynamic programme of xd_align_dp alone, on the strings as they are: no canonical forms, anchors or
 * repairs. *score (may be NULL) is the sum of the scores. Ties prefer, in this order, the diagonal, a student token
 * alone, a teacher token alone, one student token to n, one teacher token to n. */
XD_API xd_result xd_align_segment(xd_ctx *ctx, const xd_align_dp_desc *desc, xd_alignment *out,
                                  double *score);

#endif
