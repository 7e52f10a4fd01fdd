#ifndef XDI_BASE_HALF_H
#define XDI_BASE_HALF_H

#include "base/dtype.h"

/* Convert, with the same bits everywhere. Narrowing: to nearest even; overflow gives infinity; NaN becomes quiet with its
 * sign; subnormals stay. */
XD_API uint16_t xd_bf16_from_f32(float value);
XD_API float xd_f32_from_bf16(uint16_t bits);
XD_API float xd_f32_from_f16(uint16_t bits);

/* Returns an element of an arithmetic dtype; exact except I64 beyond 2^53. */
XD_API double xd_load_f64(const void *data, xd_dtype dtype, int64_t index);

/* Stores an element. F32 and F64 round at most once, F16 and BF16 through f32; integers truncate. */
XD_API void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value);

#endif
