#include <math.h>

/* Statistics of rows and maxima of columns on vectors. What f32 cannot say is left to the plain kernels. */

/* The lowest column that has the maximum. */
static int64_t xdi_fast_rows_find(const xd_rows *x, int64_t row, int64_t columns, double max) {
    int64_t c = 0;
    while (c < columns && xdi_loss_load(x, row, c) != max) c++;
    return c < columns ? c : -1;
}

static bool xdi_fast_rows_stats(const xdi_tiles *tiles, const xd_softmax_args *a, int64_t r, double *part) {
    const int64_t columns = a->end - a->begin;
    const double factor = XDI_TILE_LOG2E / a->temperature;
    double max = -INFINITY, sum = 0.0;
    int64_t tile = 0;
    float unused;
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        const double one = (double)tiles->max(xdi_fast_array(&a->logits, r, c), xdi_fast_tile_at(c, columns));
        if (one <= max) continue;
        max = one;
        tile = c;
        if (isnan(one)) return false;
    }
    if (columns == 0 || !xdi_fast_fits(max, factor)) return false;
    const double whole = rint(max * factor);
    const xdi_tile_power power = xdi_tile_power_of(factor, whole);
    for (int64_t c = 0; c < columns; c += XDI_TILE)
        sum +=
            tiles->sum(xdi_fast_array(&a->logits, r, c), xdi_fast_tile_at(c, columns), power, NULL, &unused);
    const xd_rows from = { xdi_fast_array(&a->logits, r, tile).data, a->logits.dtype, 1, columns - tile, 0 };
    part[XD_SOFTMAX_MAX] = max;
    part[XD_SOFTMAX_ARG] = (double)(a->begin + tile + xdi_fast_rows_find(&from, 0, columns - tile, max));
    part[XD_SOFTMAX_SUM] = sum * exp2(whole - max * (double)power.factor);
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
