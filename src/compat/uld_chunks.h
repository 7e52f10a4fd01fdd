#ifndef XDI_COMPAT_ULD_CHUNKS_H
#define XDI_COMPAT_ULD_CHUNKS_H

#include "xtoken/uld.h"

/* One side of a sequence as TRL sees it. */
typedef struct xd_uld_trl_side {
    const int64_t *labels;      /* [count] -100 where not trained on */
    const xd_token_span *spans; /* [count] bytes of the completion */
    int64_t count;
    bool skip_eos; /* the last token of the span is left out, whatever it is */
} xd_uld_trl_side;

/* The pairs of groups that TRL forms, as chunks, for parity: spans from the first label, `extended` groups by
 * equal end offsets, else tokens by position. *out has no chunks where TRL skips the sequence. Errors:
 * MEMORY. */
XD_API xd_result xd_compat_uld_chunks(xd_ctx *ctx, const xd_uld_trl_side *student,
                                      const xd_uld_trl_side *teacher, bool extended, xd_uld_merge merge,
                                      xd_alignment *out);

#endif
