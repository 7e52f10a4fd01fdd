/* Statistics of rows and maxima of columns on vectors. What f32 cannot represent is left to the plain kernels. */

#include "kernel/simd/loops.h"

#include <math.h>

/* How far a maximum may lie above the integer that powers are relative to. */
#define XDI_ROWS_ROOM 60.0

/* One read: a tile's sum, relative to an integer near the maxima so far, comes with the tile's maximum. Where that is far above
 * the integer, the integer is raised and the sum is computed again. */
XD_PRIVATE bool xdi_simd_row_sum(const xdi_tiles *tiles, const xd_rows *x, int64_t row, int64_t columns,
                                 double factor, xdi_row_sum *out) {
    double whole = 0.0, sum = 0.0;
    float top;
    out->max = -INFINITY;
    out->tile = 0;
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        const xdi_simd_array tile = xdi_simd_array_of(x, row, c);
        const int64_t n = xdi_simd_tile_at(c, columns);
        double part = tiles->sum(tile, n, xdi_tile_power_of(factor, whole), NULL, &top);
        const double max = (double)top;
        if (max > -INFINITY && !xdi_simd_fits(max, factor)) return false;
        if (max > -INFINITY && (sum == 0.0 || max * factor > whole + XDI_ROWS_ROOM)) {
            const double next = rint(max * factor);
            sum *= sum == 0.0 ? 0.0 : exp2(whole - next);
            if (whole != next) part = tiles->sum(tile, n, xdi_tile_power_of(factor, next), NULL, &top);
            whole = next;
        }
        if (max > out->max) out->tile = c;
        if (max > out->max) out->max = max;
        sum += part; /* NaN stays */
    }
    out->sum = sum * exp2(whole - out->max * (double)(float)factor);
    return out->max > -INFINITY && !isnan(sum);
}

/* The lowest column that has the maximum. */
static int64_t xdi_simd_row_arg(const xd_rows *x, int64_t row, const xdi_row_sum *sum) {
    int64_t c = sum->tile;
    while (xdi_loss_load(x, row, c) != sum->max) c++;
    return c;
}

static bool xdi_simd_rows_stats(const xdi_tiles *tiles, const xd_softmax_args *a, int64_t r, double *part) {
    xdi_row_sum sum;
    if (!xdi_simd_row_sum(tiles, &a->logits, r, a->vocab.end - a->vocab.begin,
                          XDI_TILE_LOG2E / a->temperature, &sum))
        return false;
    part[XD_SOFTMAX_MAX] = sum.max;
    part[XD_SOFTMAX_ARG] = (double)(a->vocab.begin + xdi_simd_row_arg(&a->logits, r, &sum));
    part[XD_SOFTMAX_SUM] = sum.sum;
    return true;
}

static void xdi_simd_softmax_stats_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xd_softmax_args *a = (const xd_softmax_args *)args;
    const xd_softmax_kernels *plain = xdi_softmax_kernels_cpu();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        xd_softmax_args one = *a;
        if (xdi_simd_rows_stats(tiles, a, r, a->parts + r * XD_SOFTMAX_PARTS)) continue;
        one.logits.data = xdi_simd_array_of(&a->logits, r, 0).data;
        one.logits.rows = 1;
        one.parts = a->parts + r * XD_SOFTMAX_PARTS;
        plain->stats(launch, &one);
    }
}

static xd_result xdi_simd_softmax_stats(const xd_launch *launch, const xd_softmax_args *a) {
    if (a->logits.dtype != XD_DTYPE_F32 && a->logits.dtype != XD_DTYPE_BF16)
        return xdi_softmax_kernels_cpu()->stats(launch, a);
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_simd_softmax_stats_rows,
                           a);
}

/* The entry's arguments. */
typedef struct xdi_rows_maxima {
    const xd_rows *logits;
    const uint8_t *mask;
    int64_t columns;
    float *maxima;
    uint32_t *odd; /* set when something read is not finite; atomic */
} xdi_rows_maxima;

/* Columns [begin, end) in units of XDI_ROWS_PIECE. A NaN is ignored. */
static void xdi_simd_column_maxima_piece(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    const xdi_rows_maxima *m = (const xdi_rows_maxima *)args;
    const xd_rows *logits = m->logits;
    const xdi_rows_raise raise = xdi_loops_of(launch)->raise;
    const int64_t piece = XDI_ROWS_PIECE, last = end * piece < m->columns ? end * piece : m->columns,
                  most = logits->dtype == XD_DTYPE_BF16 ? XDI_ROWS_AT_ONCE : XDI_ROWS_OF_F32;
    (void)slot;
    for (int64_t c = begin * piece; c < last; c++) m->maxima[c] = -INFINITY;
    for (int64_t r = 0; r < logits->rows;) {
        int64_t rows[XDI_ROWS_AT_ONCE], count = 0;
        for (; r < logits->rows && count < most; r++)
            if (!m->mask || m->mask[r]) rows[count++] = r;
        for (int64_t i = count; i > 0 && i < most; i++) rows[i] = rows[0];
        for (int64_t c = begin * piece; c < last && count > 0; c += piece) {
            xdi_simd_array x[XDI_ROWS_AT_ONCE];
            for (int i = 0; i < most; i++) x[i] = xdi_simd_array_of(logits, rows[i], c);
            if (!raise(x, last - c < piece ? last - c : piece, m->maxima + c))
                __atomic_store_n(m->odd, 1u, __ATOMIC_RELAXED);
        }
    }
}

static bool xdi_simd_rows_dtype(const xd_rows *logits) {
    return logits->dtype == XD_DTYPE_F32 || logits->dtype == XD_DTYPE_BF16;
}

static xd_result xdi_simd_finite_maxima(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                        int64_t columns, float *maxima, bool *finite) {
    const int64_t piece = XDI_ROWS_PIECE, pieces = (columns + piece - 1) / piece;
    uint32_t odd = 0;
    const xdi_rows_maxima m = { logits, mask, columns, maxima, &odd };
    *finite = false;
    if (!xdi_simd_rows_dtype(logits))
        return xdi_row_kernels_cpu()->column_maxima(launch, logits, mask, columns, maxima);
    XD_TRY(xdi_spread_items(launch, pieces, 1, xdi_simd_column_maxima_piece, &m));
    *finite = __atomic_load_n(&odd, __ATOMIC_RELAXED) == 0;
    return XD_OK;
}

static xd_result xdi_simd_column_maxima(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                        int64_t columns, float *maxima) {
    bool finite;
    return xdi_simd_finite_maxima(launch, logits, mask, columns, maxima, &finite);
}

/* The entries that are faster with vectors. */
XD_PRIVATE void xdi_simd_rows_fill(xd_row_kernels *rows, xd_softmax_kernels *softmax) {
    rows->column_maxima = xdi_simd_column_maxima;
    rows->finite_maxima = xdi_simd_finite_maxima;
    softmax->stats = xdi_simd_softmax_stats;
}
