#ifndef XDI_COMPAT_CANONICAL_H
#define XDI_COMPAT_CANONICAL_H

#include "align/align.h"

/* The form in which xd_align_dp and the compat projection compare vocabulary strings of different tokenizers
 * (NeMo-RL, TokenAligner's canonical tokens): one marker for a leading space, one newline, characters for
 * byte tokens, a few repaired multi-byte characters. Cases that the reference misses are missed here too, for parity. */

/* Writes the canonical form of one token into out, which holds at least size + 2 bytes, and returns its length.
 * Pure. Not idempotent: "<0x5F>" gives "_", and that gives the space marker. */
XD_API int64_t xd_canonical_token(xd_text token, char *out);

/* A canonical sequence: token i is text[offsets[i] .. offsets[i + 1]) and stands for the original tokens
 * [origin[i], origin[i + 1]). One block of memory, `text`; free it with xd_canonical_destroy. */
typedef struct xd_canonical {
    char *text;
    int64_t *offsets; /* [count + 1] */
    int32_t *origin;  /* [count + 1] */
    int64_t count;
} xd_canonical;

/* Canonical forms of a whole sequence, where tokens that are parts of one character are joined. Local.
 * Errors: MEMORY. */
XD_API xd_result xd_canonical_sequence(xd_ctx *ctx, const xd_text *tokens, int64_t count, xd_canonical *out);
XD_API void xd_canonical_destroy(xd_ctx *ctx, xd_canonical *sequence);

#endif
