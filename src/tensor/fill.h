#ifndef XDI_TENSOR_FILL_H
#define XDI_TENSOR_FILL_H

#include "base/context.h"
#include "base/philox.h"
#include "tensor/part.h"

/* Writes initial values or noise to a part. An element depends only on `random` and its index in the tensor, on every
 * device. It is xd_philox_fill_normal or xd_philox_fill_uniform, times `scale`, plus `center`, each rounded in f32.
 *
 *    part     device memory; ignores `replica`
 *    random   NULL -> all fields 0; tensors of one seed and stream must differ in sample, step or micro
 *
 * Local; allocates; does not wait for a GPU.
 * Errors: ARGUMENT (kind; center or scale not finite; elements at NULL), SHAPE (outside the tensor; random above 2^42
 * elements), DTYPE (no arithmetic, except XD_INIT_ZERO), MEMORY. */
XD_API xd_result xd_tensor_part_fill(xd_ctx *ctx, const xd_tensor_part *part, const xd_init *init,
                                     const xd_philox *random);

#endif
