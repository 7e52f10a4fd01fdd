/* Elements one by one, for the loops of every width: the last few of an array, and work that vectors do not speed up. */

#include "kernel/simd/loops.h"

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
