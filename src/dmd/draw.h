#ifndef XDI_DMD_DRAW_H
#define XDI_DMD_DRAW_H

#include "base/context.h"
#include "kernel/dmd_types.h"

/* Fills rows with numbers of xd_philox_fill_normal or xd_philox_fill_uniform, rounded once. They depend only on (random,
 * *step, sample, element), on every device: docs/diffusion.md. The device reads *desc->step when it runs. Local; does not
 * wait for a GPU, allocates nothing. Errors: SHAPE (also elements beyond 2^42), DTYPE, ARGUMENT (no memory, a negative
 * first element, samples past 2^32 - 1), UNSUPPORTED (by your kernel table). */
XD_API xd_result xd_draw_rows(xd_ctx *ctx, const xd_draw_desc *desc);

#endif
