#ifndef XDI_COMPAT_CANONICAL_H
#define XDI_COMPAT_CANONICAL_H

#include "base/internal.h"
#include "align/align.h"

/* The form of token strings for xdi_align_dp and the compat projection: NeMo-RL's canonical tokens (TokenAligner), with its
 * gaps. One marker for a leading space, one newline, characters for byte tokens, some repaired multi-byte characters. */

/* Writes a token's canonical form into out (size + 2 bytes) and returns its length. Pure. Not idempotent: "<0x5F>" gives "_",
 * which gives the space marker. */
XD_PRIVATE int64_t xdi_canonical_token(xd_text token, char *out);

/* A canonical sequence. Token i is text[offsets[i] .. offsets[i + 1]), of original tokens [origin[i], origin[i + 1]). Free it
 * with xdi_canonical_destroy. */
typedef struct xdi_canonical {
    char *text;
    int64_t *offsets; /* [count + 1] */
    int32_t *origin;  /* [count + 1] */
    int64_t count;
} xdi_canonical;

/* Makes a canonical sequence; joins the parts of a character. Local. Errors: MEMORY. */
XD_PRIVATE xd_result xdi_canonical_sequence(xd_ctx *ctx, const xd_text *tokens, int64_t count,
                                            xdi_canonical *out);
XD_PRIVATE void xdi_canonical_destroy(xd_ctx *ctx, xdi_canonical *sequence);

#endif
