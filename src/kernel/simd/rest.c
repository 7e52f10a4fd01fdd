/* Elements one by one, for the loops of every width: the last few of an array, and work that vectors do not speed up. */

#include "kernel/simd/loops.h"

#include <math.h>

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

/* Elements [i, n), after `count` matches before them. Every index is written; one that does not match is overwritten by the
 * next. */
XD_PRIVATE int64_t xdi_tile_collect_rest(xdi_simd_array x, int64_t i, int64_t n, float threshold,
                                         uint32_t *indices, uint32_t *keys, int64_t count, int64_t room) {
    for (; i < n && count < room; i++) {
        const float a = x.bf16 ? xd_f32_from_bf16(((const uint16_t *)x.data)[i]) : ((const float *)x.data)[i];
        indices[count] = (uint32_t)i;
        keys[count] = xd_key_of_float(a);
        count += a >= threshold ? 1 : 0;
    }
    return count;
}

XD_PRIVATE bool xdi_tile_unpack_rest(const uint64_t *records, int64_t n, int64_t first, double *values,
                                     int64_t *ids) {
    bool zero = false;
    for (int64_t j = 0; j < n; j++) {
        values[j] = (double)xd_float_of_key((uint32_t)(records[j] >> 32));
        ids[j] = first + (int64_t)(records[j] & 0xffffffffu);
        zero = zero || values[j] == 0.0;
    }
    return zero;
}
