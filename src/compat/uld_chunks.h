#ifndef XDI_COMPAT_ULD_CHUNKS_H
#define XDI_COMPAT_ULD_CHUNKS_H

#include "base/internal.h"
#include "xtoken/uld.h"

/* One side of a sequence as TRL sees it. */
typedef struct xdi_uld_trl_side {
    const int64_t *labels;      /* [count] -100: not trained */
    const xd_token_span *spans; /* [count] bytes of the completion; NULL without `extended` */
    int64_t count;
    bool skip_eos; /* leave out the last trained token, whatever it is */
} xdi_uld_trl_side;

/* A sequence as TRL divides it into groups. */
typedef struct xdi_uld_trl_desc {
    xdi_uld_trl_side student, teacher;
    bool extended;      /* groups by equal end offsets; false -> tokens by position */
    xd_uld_merge merge; /* BAYESIAN has no row for a sequence's first token */
} xdi_uld_trl_desc;

/* Returns TRL's pairs of groups as chunks, for parity; none if TRL skips the sequence. Spans start at the first label. Free
 * *out with xd_alignment_destroy. Local. Errors: MEMORY. */
XD_PRIVATE xd_result xdi_compat_uld_chunks(xd_ctx *ctx, const xdi_uld_trl_desc *desc, xd_alignment *out);

#endif
