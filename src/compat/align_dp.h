#ifndef XDI_COMPAT_ALIGN_DP_H
#define XDI_COMPAT_ALIGN_DP_H

#include "align/align.h"

/* What xd_align_dp and xd_align_segment align, and how. */
typedef struct xd_align_dp_desc {
    xd_texts student,
        teacher; /* surface strings of the tokens as vocabularies store them ("Ġfox", "▁fox", "<0xE2>") */
    int max_combination; /* tokens that one token may match; 0 -> 4 */
} xd_align_dp_desc;

/* The aligner of NeMo-RL (nemo_rl/algorithms/x_token/token_aligner.py), bit for bit, for parity: a dynamic
 * programme over token surface strings, anchored by unique triples and repaired afterwards. It runs on the padded
 * sequences and its result depends on the padding; use xd_align_bytes for everything else. Time O(n m K), memory O(n m)
 * between anchors. It takes no mask: xd_chunk_ids does. Errors: ARGUMENT for max_combination outside 1 to 64, MEMORY. */
XD_API xd_result xd_align_dp(xd_ctx *ctx, const xd_align_dp_desc *desc, xd_alignment *out);

/* The dynamic programme of xd_align_dp alone, on the strings as they are: no canonical forms, anchors or
 * repairs. *score (may be NULL) in the reference's units: 3 for a match, -3 for a mismatch, -1.5 for a token without
 * partner, 1.5 n for one token that matches n. Ties prefer, in this order, the diagonal, a student token
 * alone, a teacher token alone, one student token to n, one teacher token to n. */
XD_API xd_result xd_align_segment(xd_ctx *ctx, const xd_align_dp_desc *desc, xd_alignment *out,
                                  double *score);

#endif
