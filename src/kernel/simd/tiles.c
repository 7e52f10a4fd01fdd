/* Arguments of the loops over a tile. */

#include "kernel/simd/loops.h"

#include <math.h>

XD_PRIVATE xdi_tile_power xdi_tile_power_of(double factor, double whole) {
    xdi_tile_power power;
    power.factor = (float)factor;
    power.whole = (float)whole;
    power.low = (float)((whole - 127.0) / (double)power.factor);
    return power;
}

XD_PRIVATE const xdi_tiles *xdi_simd_tiles(const xd_launch *launch) {
    const xdi_loops *loops = xdi_loops_of(launch);
    return loops ? loops->tiles : xdi_tiles_plain();
}

XD_PRIVATE bool xdi_simd_fits(double max, double factor) {
    return factor > 1e-6 && factor < 1e6 && fabs(max * factor) < 65536.0;
}

XD_PRIVATE int64_t xdi_simd_stride(const xd_rows *x) {
    return x->stride ? x->stride : x->cols;
}

XD_PRIVATE xdi_simd_array xdi_simd_array_of(const xd_rows *x, int64_t row, int64_t column) {
    const int64_t at = row * xdi_simd_stride(x) + column;
    xdi_simd_array array;
    array.bf16 = x->dtype == XD_DTYPE_BF16;
    array.data = x->data;
    if (!x->data) return array;
    array.data = array.bf16 ? (void *)((uint16_t *)x->data + at) : (void *)((float *)x->data + at);
    return array;
}

XD_PRIVATE int64_t xdi_simd_tile_at(int64_t c, int64_t columns) {
    const int64_t tile = XDI_TILE;
    return columns - c < tile ? columns - c : tile;
}
