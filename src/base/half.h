#ifndef XDI_BASE_HALF_H
#define XDI_BASE_HALF_H

#include "base/dtype.h"

/* Convert storage types. Narrowing: to nearest, ties to even; overflow gives infinity; NaN becomes a quiet NaN with its sign;
 * subnormals stay. Integer arithmetic: same bits on every machine. */
XD_API uint16_t xd_bf16_from_f32(float value);
XD_API float xd_f32_from_bf16(uint16_t bits);
XD_API float xd_f32_from_f16(uint16_t bits);

/* Returns element `index` of an arithmetic dtype as double; exact except I64 beyond 2^53. */
XD_API double xd_load_f64(const void *data, xd_dtype dtype, int64_t index);

/* Stores a double into element `index`: F32 and F64 round at most once, F16 and BF16 to f32 first, then again; integers
 * truncate. */
XD_API void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value);

#endif
