/* Losses across tokenizers, for the loops of every width: elements one by one. */

#include "kernel/simd/xtoken_loops.h"

#include <math.h>
#include <string.h>

XD_PRIVATE void xdi_xtoken_pack(xdi_simd_array x, int64_t n, const int32_t *list, int64_t count, float *out) {
    for (int64_t i = 0; i < count && x.bf16; i++) {
        const uint32_t bits = (uint32_t)((const uint16_t *)x.data)[list[i]] << 16;
        xdi_xtoken_ahead(x, n + list[i]);
        memcpy(out + i, &bits, sizeof bits);
    }
    for (int64_t i = 0; i < count && !x.bf16; i++) {
        xdi_xtoken_ahead(x, n + list[i]);
        out[i] = ((const float *)x.data)[list[i]];
    }
    for (int64_t i = count; i % XDI_XTOKEN_LANES != 0; i++) out[i] = -INFINITY;
}

XD_PRIVATE double xdi_xtoken_top_rest(const double *x, int64_t n, bool magnitude) {
    double top = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        const double one = magnitude ? fabs(x[i]) : x[i];
        top = one > top ? one : top;
    }
    return top;
}
