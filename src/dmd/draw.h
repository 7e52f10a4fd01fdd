#ifndef XDI_DMD_DRAW_H
#define XDI_DMD_DRAW_H

#include "base/context.h"
#include "kernel/dmd_types.h"

/* Writes random numbers to rows of samples, formed where the tensors are: those of xd_philox_fill_normal, or of
 * xd_philox_fill_uniform, of each row's sample at its elements, rounded once to the type of out. They are what xd_dmd and
 * xd_sampler draw. A part of a sample has the bits of the same elements of the whole, on every device.
 *
 *     xd_draw_desc d = { .random = { .seed = 1, .stream = XD_STREAM_USER, .sample = 0, .step = 12 } };
 *     d.out = xd_rows_of(noise, XD_DTYPE_F32, samples, elements);
 *     xd_draw_rows(ctx, &d);
 *
 *   desc   read during the call; *desc->step by the device, when it comes to it
 *
 * Local; does not wait for a GPU, allocates nothing. Deterministic: a number depends on (random, *step, sample, element)
 * alone. Errors, with nothing written: SHAPE (a negative size, a stride smaller than a row, elements beyond 2^42), DTYPE,
 * ARGUMENT (no memory, a negative first element, samples past 2^32 - 1), UNSUPPORTED (a table of kernels of yours without the
 * entry). */
XD_API xd_result xd_draw_rows(xd_ctx *ctx, const xd_draw_desc *desc);

#endif
