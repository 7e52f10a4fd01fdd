#ifndef XDI_DMD_DRAW_H
#define XDI_DMD_DRAW_H

#include "base/context.h"
#include "kernel/dmd_types.h"

/* Fills rows of samples with numbers of xd_philox_fill_normal or xd_philox_fill_uniform, rounded once, as xd_dmd and
 * xd_sampler do. They depend only on (random, *step, sample, element): a part has the bits of the whole, on every device.
 *
 *     xd_draw_desc d = { .random = { .seed = 1, .stream = XD_STREAM_USER, .sample = 0, .step = 12 } };
 *     d.out = xd_rows_of(noise, XD_DTYPE_F32, samples, elements);
 *     xd_draw_rows(ctx, &d);
 *
 * The device reads *desc->step when it runs. Local; does not wait for a GPU, allocates nothing. Errors, with nothing written:
 * SHAPE (also elements beyond 2^42), DTYPE, ARGUMENT (no memory, a negative first element, samples past 2^32 - 1), UNSUPPORTED
 * (your kernel table lacks it). */
XD_API xd_result xd_draw_rows(xd_ctx *ctx, const xd_draw_desc *desc);

#endif
