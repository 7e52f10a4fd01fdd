#ifndef XDI_TENSOR_FILL_H
#define XDI_TENSOR_FILL_H

#include "base/context.h"
#include "base/philox.h"
#include "tensor/part.h"

/* Writes first values, or noise, to this rank's part of a tensor. The number of an element is a function of (random, its index in
 * the whole tensor) alone: that of xd_philox_fill_normal and xd_philox_fill_uniform at that element, times `scale`, plus
 * `center`, each rounded once in f32. So a part has the bits of the same part of the whole, for every region, range and
 * device; a GPU forms them itself.
 *
 *     const xd_philox random = { .seed = 1, .stream = XD_STREAM_USER };
 *     xd_tensor_part_fill(ctx, &part, &(xd_init){ XD_INIT_NORMAL, 0.0f, 0.02f }, &random);
 *
 *   part     data in memory of the context's device; `replica` is not read
 *   random   read by the random kinds; NULL -> zero. Tensors of one seed and stream need another sample, step or micro each
 *
 * Local; does not wait for a GPU. Allocates a list of boxes during the call. Errors, with nothing written: ARGUMENT (unknown kind;
 * center or scale not finite; elements at NULL), SHAPE (a region or range that is not within the tensor; random numbers for
 * more than 2^42 elements), DTYPE (values other than zero in a dtype without arithmetic), MEMORY. */
XD_API xd_result xd_tensor_part_fill(xd_ctx *ctx, const xd_tensor_part *part, const xd_init *init,
                                     const xd_philox *random);

#endif
