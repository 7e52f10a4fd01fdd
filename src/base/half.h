#ifndef XDI_BASE_HALF_H
#define XDI_BASE_HALF_H

#include "base/dtype.h"

/* Storage conversions. To a narrower type: round to nearest, ties to even; overflow gives infinity; NaN stays a quiet
 * NaN with its sign; subnormals are preserved. Integer arithmetic only, so the bits are the same on every machine. */
XD_API uint16_t xd_bf16_from_f32(float value);
XD_API float xd_f32_from_bf16(uint16_t bits);
XD_API uint16_t xd_f16_from_f32(float value);
XD_API float xd_f32_from_f16(uint16_t bits);

/* Element `index` of an array of any arithmetic dtype, widened to double; exact except for I64 beyond 2^53. */
XD_API double xd_load_f64(const void *data, xd_dtype dtype, int64_t index);

/* Stores a double into element `index`: F32 and F64 are rounded at most once, F16 and BF16 are rounded to f32 first and then
 * again; integers are truncated. */
XD_API void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value);

#endif
