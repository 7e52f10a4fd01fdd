#include <math.h>

/* Statistics of rows and maxima of columns on vectors. What f32 cannot say is left to the plain kernels. */

/* How far a maximum may lie above the integer that powers are relative to. */
#define XDI_ROWS_ROOM 60.0

/* One read: a tile's maximum, which leaves the tile in the first cache, then its sum relative to an integer
 * that grows with the maximum. */
XD_PRIVATE bool xdi_fast_row_sum(const xdi_tiles *tiles, const xd_rows *x, int64_t row, int64_t columns,
                                 double factor, xdi_row_sum *out) {
    double whole = 0.0, sum = 0.0;
    float unused;
    out->max = -INFINITY;
    out->tile = 0;
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        const xdi_simd_array tile = xdi_fast_array(x, row, c);
        const int64_t n = xdi_fast_tile_at(c, columns);
        const double max = (double)tiles->max(tile, n);
        if (max == -INFINITY) continue;
        if (!xdi_fast_fits(max, factor)) return false; /* also NaN */
        if (sum == 0.0 || max * factor > whole + XDI_ROWS_ROOM) {
            const double next = rint(max * factor);
            sum *= sum == 0.0 ? 0.0 : exp2(whole - next);
            whole = next;
        }
        if (max > out->max) out->tile = c;
        if (max > out->max) out->max = max;
        sum += tiles->sum(tile, n, xdi_tile_power_of(factor, whole), NULL, &unused);
    }
    out->sum = sum * exp2(whole - out->max * (double)(float)factor);
    return out->max > -INFINITY;
}

/* The lowest column that has the maximum. */
static int64_t xdi_fast_row_arg(const xd_rows *x, int64_t row, const xdi_row_sum *sum) {
    int64_t c = sum->tile;
    while (xdi_loss_load(x, row, c) != sum->max) c++;
    return c;
}

static bool xdi_fast_rows_stats(const xdi_tiles *tiles, const xd_softmax_args *a, int64_t r, double *part) {
    xdi_row_sum sum;
    if (!xdi_fast_row_sum(tiles, &a->logits, r, a->end - a->begin, XDI_TILE_LOG2E / a->temperature, &sum))
        return false;
    part[XD_SOFTMAX_MAX] = sum.max;
    part[XD_SOFTMAX_ARG] = (double)(a->begin + xdi_fast_row_arg(&a->logits, r, &sum));
    part[XD_SOFTMAX_SUM] = sum.sum;
    return true;
}

static xd_result xdi_fast_softmax_stats(const xd_launch *launch, const xd_softmax_args *a) {
    const xd_softmax_kernels plain = xd_softmax_kernels_cpu();
    const xdi_tiles *tiles = xdi_fast_tiles(launch);
    if (a->logits.dtype != XD_DTYPE_F32 && a->logits.dtype != XD_DTYPE_BF16) return plain.stats(launch, a);
    for (int64_t r = 0; r < a->logits.rows; r++) {
        xd_softmax_args one = *a;
        if (xdi_fast_rows_stats(tiles, a, r, a->parts + r * XD_SOFTMAX_PARTS)) continue;
        one.logits.data = xdi_fast_array(&a->logits, r, 0).data;
        one.logits.rows = 1;
        one.parts = a->parts + r * XD_SOFTMAX_PARTS;
        XDI_TRY(plain.stats(launch, &one));
    }
    return XD_OK;
}

/* Block by block, so that the maxima stay in the first cache; NaN is no maximum. */
static xd_result xdi_fast_column_maxima(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                        int64_t columns, float *maxima) {
    const xdi_tiles *tiles = xdi_fast_tiles(launch);
    if (logits->dtype != XD_DTYPE_F32 && logits->dtype != XD_DTYPE_BF16)
        return xd_row_kernels_cpu().column_maxima(launch, logits, mask, columns, maxima);
    for (int64_t c = 0; c < columns; c++) maxima[c] = -INFINITY;
    for (int64_t c = 0; c < columns; c += XDI_TILE)
        for (int64_t r = 0; r < logits->rows; r++)
            if (!mask || mask[r])
                tiles->raise(xdi_fast_array(logits, r, c), xdi_fast_tile_at(c, columns), maxima + c);
    return XD_OK;
}

/* The entries that vectors do better. */
XD_PRIVATE void xdi_fast_rows_fill(xd_row_kernels *rows, xd_softmax_kernels *softmax) {
    rows->column_maxima = xdi_fast_column_maxima;
    softmax->stats = xdi_fast_softmax_stats;
}
