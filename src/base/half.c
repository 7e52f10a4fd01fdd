/* bf16 and f16, by integer arithmetic: the formulas stand in base/scalar.h, where devices find them too. */

#include "base/half.h"

#include "base/internal.h"
#include "base/scalar.h"

XD_API uint16_t xd_bf16_from_f32(float value) {
    return xd_bits_to_bf16(value);
}

XD_API float xd_f32_from_bf16(uint16_t bits) {
    return xd_bits_from_bf16(bits);
}

XD_PRIVATE uint16_t xdi_f16_from_f32(float value) {
    return xd_bits_to_f16(value);
}

XD_API float xd_f32_from_f16(uint16_t bits) {
    return xd_bits_from_f16(bits);
}

/* By calls: in the plain kernels, which are many, the conversions would take 40 KB. */
XD_API XDI_NOINLINE double xd_load_f64(const void *data, xd_dtype dtype, int64_t index) {
    return xd_element_load(data, dtype, index);
}

XD_API XDI_NOINLINE void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value) {
    xd_element_store(data, dtype, index, value);
}
