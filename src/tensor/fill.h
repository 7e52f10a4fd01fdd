#ifndef XDI_TENSOR_FILL_H
#define XDI_TENSOR_FILL_H

#include "base/context.h"
#include "base/philox.h"
#include "tensor/part.h"

/* Writes initial values or noise to this rank's part of a tensor. An element depends on (random, index in the tensor)
 * only, on every device: xd_philox_fill_normal or xd_philox_fill_uniform, times `scale`, plus `center`, each rounded in f32.
 *
 *     const xd_philox random = { .seed = 1, .stream = XD_STREAM_USER };
 *     xd_tensor_part_fill(ctx, &part, &(xd_init){ XD_INIT_NORMAL, 0.0f, 0.02f }, &random);
 *
 *    part     device memory; `replica` is not read
 *    random   for random kinds; NULL -> zero. Tensors of one seed and stream need different sample, step or micro
 *
 * Local; does not wait for a GPU. Allocates a temporary list.
 * Errors, nothing written: ARGUMENT (kind; center or scale not finite; elements at NULL), SHAPE (outside the tensor; random
 * above 2^42 elements), DTYPE (only zero without arithmetic), MEMORY. */
XD_API xd_result xd_tensor_part_fill(xd_ctx *ctx, const xd_tensor_part *part, const xd_init *init,
                                     const xd_philox *random);

#endif
