/* Top-k losses on vectors, as in simd/loss.c, and selection by threshold and radix sort. */

#include "kernel/simd/tiles.h"

#include <math.h>
#include <string.h>

static void xdi_simd_topk_maxima_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xd_topk_args *a = (const xd_topk_args *)args;
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        double max = 0.0;
        if (a->row_scale[r] != 0.0) max = (double)tiles->max(xdi_simd_array_of(&a->logits, r, 0), columns);
        a->maxima[r] = max == INFINITY ? NAN : max;
    }
}

static xd_result xdi_simd_topk_maxima(const xd_launch *launch, const xd_topk_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_simd_topk_maxima_rows,
                           a);
}

/* ---- sums over the columns outside the ids ---- */

/* A row's integer, and how far it is from the reference, in powers of two. */
typedef struct xdi_simd_outside {
    xdi_tile_power power;
    double shift;
} xdi_simd_outside;

static xdi_simd_outside xdi_simd_outside_of(double max, double temperature) {
    const double factor = XDI_TILE_LOG2E / temperature, whole = rint(max * factor);
    xdi_simd_outside o;
    o.power = xdi_tile_power_of(factor, whole);
    o.shift = whole - max * (double)o.power.factor;
    return o;
}

/* The tile with -infinity at its ids; a tile with ids is copied to `copy`. *next counts the ids already passed. */
static xdi_simd_array xdi_simd_hide_ids(const xd_topk_args *a, int64_t r, int64_t c, int64_t n,
                                        const int64_t *order, int64_t inside, int64_t *next, float *copy) {
    const int64_t *ids = a->ids + r * a->k, begin = a->vocab.begin;
    xdi_simd_array x = xdi_simd_array_of(&a->logits, r, c);
    if (*next >= inside || ids[order[*next]] - begin >= c + n) return x;
    memcpy(copy, x.data, (size_t)n * (x.bf16 ? sizeof(uint16_t) : sizeof(float)));
    x.data = copy;
    for (; *next < inside && ids[order[*next]] - begin < c + n; ++*next) {
        const int64_t at = ids[order[*next]] - begin - c;
        if (x.bf16)
            ((uint16_t *)x.data)[at] = 0xff80;
        else
            copy[at] = -INFINITY;
    }
    return x;
}

/* False for a row that the plain kernel must compute; only the order has been written then. */
static bool xdi_simd_topk_sums(const xdi_tiles *tiles, const xd_topk_args *a, int64_t r, int64_t *order,
                               double *sums) {
    const int64_t begin = a->vocab.begin, columns = a->vocab.end - begin;
    const int64_t *ids = a->ids + r * a->k;
    float copy[XDI_TILE], unused;
    double sum = 0.0, moment = 0.0;
    int64_t next = 0;
    if (!a->outside || !xdi_simd_fits(a->maxima[r], XDI_TILE_LOG2E / a->temperature)) return false;
    const xdi_simd_outside o = xdi_simd_outside_of(a->maxima[r], a->temperature);
    const int64_t inside = xdi_topk_order(ids, a->k, begin, begin + columns, order);
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        const int64_t n = xdi_simd_tile_at(c, columns);
        double tile_moment;
        const xdi_simd_array x = xdi_simd_hide_ids(a, r, c, n, order, inside, &next, copy);
        sum += tiles->sum(x, n, o.power, &tile_moment, &unused);
        moment += tile_moment;
    }
    if (!isfinite(sum) || !isfinite(moment)) return false;
    sums[XD_TOPK_MAX] = a->maxima[r];
    sums[XD_TOPK_OUTSIDE] = exp2(o.shift) * sum;
    sums[XD_TOPK_ENTROPY] = XDI_TILE_LN2 * exp2(o.shift) * (moment + sum * o.shift);
    sums[XD_TOPK_BAD] = 0.0;
    for (int64_t j = 0; j < a->k; j++) a->values[r * a->k + j] = 0.0;
    for (int64_t j = 0; j < inside; j++)
        a->values[r * a->k + order[j]] = xdi_loss_load(&a->logits, r, ids[order[j]] - begin);
    return true;
}

/* The arguments as they would be with this row alone; it has one thread, so the scratch is that of the first. */
static xd_topk_args xdi_simd_topk_row(const xd_topk_args *a, int64_t r, int slot) {
    xd_topk_args one = *a;
    one.order = a->order + slot * a->k;
    one.logits.data = xdi_simd_array_of(&a->logits, r, 0).data;
    one.logits.rows = 1;
    one.ids = a->ids + r * a->k;
    one.row_scale = a->row_scale + r;
    one.maxima = a->maxima + r;
    one.sums = (double *)a->sums + r * XD_TOPK_SUMS;
    one.values = a->values + r * a->k;
    return one;
}

static bool xdi_simd_topk_dtype(const xd_rows *x) {
    return x->dtype == XD_DTYPE_F32 || x->dtype == XD_DTYPE_BF16;
}

static void xdi_simd_topk_stats_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_topk_args *a = (const xd_topk_args *)args;
    const xd_topk_kernels *plain = xdi_topk_kernels_cpu();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    for (int64_t r = begin; r < end; r++) {
        double *sums = (double *)a->sums + r * XD_TOPK_SUMS;
        if (a->row_scale[r] != 0.0 && xdi_simd_topk_sums(tiles, a, r, a->order + slot * a->k, sums)) continue;
        const xd_topk_args one = xdi_simd_topk_row(a, r, slot);
        plain->stats(launch, &one);
    }
}

static xd_result xdi_simd_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    if (!xdi_simd_topk_dtype(&a->logits)) return xdi_topk_kernels_cpu()->stats(launch, a);
    if (a->fixed) return xdi_exact_topk_stats(launch, a);
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_simd_topk_stats_rows,
                           a);
}

/* ---- gradient ---- */

static void xdi_simd_topk_outside(const xdi_tiles *tiles, const xd_topk_kl_args *a, int64_t r, double scale) {
    const int64_t columns = a->vocab.end - a->vocab.begin;
    const xd_topk_row *row = a->row + r;
    const double factor = XDI_TILE_LOG2E / a->temperature;
    const double log2_all = row->max * (double)(float)factor + row->log * XDI_TILE_LOG2E;
    const double rest = log2_all - rint(log2_all), share = scale * exp2(-rest);
    xdi_tile_gradient g;
    memset(&g, 0, sizeof g);
    g.p = xdi_tile_power_of(factor, rint(log2_all));
    g.soft_scale = (float)(share * (row->outside - row->entropy * rest * XDI_TILE_LN2));
    g.teacher_scale = (float)(share * row->entropy * XDI_TILE_LN2);
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        g.x = xdi_simd_array_of(&a->logits, r, c);
        g.out = xdi_simd_array_of(&a->gradient, r, c);
        tiles->gradient(&g, XDI_TILE_OUTSIDE, xdi_simd_tile_at(c, columns));
    }
}

static void xdi_simd_zero(const xd_rows *x, int64_t row, int64_t begin, int64_t end) {
    const xdi_simd_array from = xdi_simd_array_of(x, row, begin);
    if (end > begin) memset(from.data, 0, (size_t)(end - begin) * xd_dtype_size(x->dtype));
}

static void xdi_simd_topk_grad_row(const xdi_tiles *tiles, const xd_topk_kl_args *a, int64_t r) {
    const int64_t begin = a->vocab.begin, columns = a->vocab.end - begin;
    const xd_topk_row *row = a->row + r;
    const int64_t *ids = a->ids + r * a->k;
    const double scale = a->weight * a->row_scale[r] / a->temperature;
    const bool dense = row->outside != 0.0 || row->entropy != 0.0;
    if (dense) xdi_simd_topk_outside(tiles, a, r, scale);
    xdi_simd_zero(&a->gradient, r, dense ? columns : 0, a->gradient.cols);
    for (int64_t j = 0; j < a->k; j++)
        if (ids[j] >= begin && ids[j] < begin + columns)
            xdi_loss_store(&a->gradient, r, ids[j] - begin, scale * a->slots[r * a->k + j]);
}

/* The arguments as they would be with this row alone. */
static xd_topk_kl_args xdi_simd_topk_kl_row(const xd_topk_kl_args *a, int64_t r) {
    xd_topk_kl_args one = *a;
    one.logits.data = xdi_simd_array_of(&a->logits, r, 0).data;
    one.logits.rows = 1;
    one.gradient.data = xdi_simd_array_of(&a->gradient, r, 0).data;
    one.ids = a->ids + r * a->k;
    one.row_scale = a->row_scale + r;
    one.slots = a->slots + r * a->k;
    one.row = a->row + r;
    return one;
}

static void xdi_simd_topk_grad_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                    int slot) {
    const xd_topk_kl_args *a = (const xd_topk_kl_args *)args;
    const xd_topk_kernels *plain = xdi_topk_kernels_cpu();
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const xd_topk_row *row = a->row + r;
        const bool counts = a->row_scale[r] != 0.0 && row->finding == (int)XD_ROW_FINE;
        if (!counts) {
            xdi_simd_zero(&a->gradient, r, 0, a->gradient.cols);
        } else if (xdi_simd_fits(row->max, XDI_TILE_LOG2E / a->temperature)) {
            xdi_simd_topk_grad_row(tiles, a, r);
        } else {
            const xd_topk_kl_args one = xdi_simd_topk_kl_row(a, r);
            plain->grad(launch, &one);
        }
    }
}

static xd_result xdi_simd_topk_grad(const xd_launch *launch, const xd_topk_kl_args *a) {
    if (!xdi_simd_topk_dtype(&a->logits) || !xdi_simd_topk_dtype(&a->gradient))
        return xdi_topk_kernels_cpu()->grad(launch, a);
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_simd_topk_grad_rows, a);
}

/* ---- selection ---- */

/* Below this k a row is filtered by the k-th value so far; above it, by a threshold from a sample of it. */
enum { XDI_SELECT_FEW = 8, XDI_SELECT_BLOCK = 256, XDI_SELECT_SAMPLE = 1024, XDI_SELECT_NEAR = 8 };
enum { XDI_SELECT_BINS = 2048, XDI_SELECT_DIGITS = 3, XDI_SELECT_WIDTH = 13 };

static void xdi_select_few(const xdi_tiles *tiles, const xd_select_args *a, int64_t r) {
    double *values = a->values + r * a->k;
    int64_t *ids = a->ids + r * a->k, n = 0;
    for (int64_t begin = 0; begin < a->columns; begin += XDI_SELECT_BLOCK) {
        const int64_t left = a->columns - begin, block = XDI_SELECT_BLOCK,
                      count = left < block ? left : block;
        const double max = (double)tiles->max(xdi_simd_array_of(&a->logits, r, begin), count);
        if (n == a->k && max <= values[n - 1]) continue; /* not when there is a NaN */
        for (int64_t c = begin; c < begin + count; c++) {
            double value = xdi_loss_load(&a->logits, r, c);
            if (isnan(value)) value = -INFINITY;
            if (n < a->k || value > values[a->k - 1])
                n = xdi_select_insert(values, ids, n, a->k, value, a->first + c);
        }
    }
    for (; n < a->k; n++) {
        values[n] = -INFINITY;
        ids[n] = -1;
    }
}

/* The bin of the rank-th key in order, among those whose bits above shift + 11 are those of `prefix`. */
static uint32_t xdi_select_bin(const uint32_t *keys, int64_t n, int64_t *rank, int shift, uint32_t prefix) {
    int32_t bins[XDI_SELECT_BINS];
    uint32_t bin = 0;
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < n; i++)
        if (shift + 11 >= 32 || keys[i] >> (shift + 11) == prefix) bins[(keys[i] >> shift) & 2047u]++;
    for (; bin < XDI_SELECT_BINS - 1 && *rank >= bins[bin]; bin++) *rank -= bins[bin];
    return bin;
}

static float xdi_select_at(xdi_simd_array x, int64_t i) {
    return x.bf16 ? xd_f32_from_bf16(((const uint16_t *)x.data)[i]) : ((const float *)x.data)[i];
}

/* A threshold estimated from a sample: more than k elements exceed it unless the sample's count is off by more than
 * `deviations` standard deviations. The sample takes a few adjacent elements at many positions: those share a cache miss. */
static float xdi_select_threshold(const xd_select_args *a, int64_t r, double deviations) {
    const int64_t places = XDI_SELECT_SAMPLE / XDI_SELECT_NEAR, step = a->columns / places;
    const bool all = step < XDI_SELECT_NEAR; /* a short row: its beginning */
    const int64_t n = all && a->columns < XDI_SELECT_SAMPLE ? a->columns : (int64_t)XDI_SELECT_SAMPLE;
    const double share = (double)a->k / (double)a->columns;
    int64_t rank = (int64_t)(share * (double)n + deviations * sqrt(share * (1.0 - share) * (double)n)) + 4;
    const xdi_simd_array x = xdi_simd_array_of(&a->logits, r, 0);
    const int64_t size = x.bf16 ? 2 : 4;
    uint32_t keys[XDI_SELECT_SAMPLE];
    if (rank >= n) return -INFINITY;
    for (int64_t i = 0; i < n; i += XDI_SELECT_NEAR) /* all cache misses in parallel */
        __builtin_prefetch((const char *)x.data + (all ? i : i / XDI_SELECT_NEAR * step) * size);
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = all ? i : i / XDI_SELECT_NEAR * step + i % XDI_SELECT_NEAR;
        keys[i] = xd_key_of_float(xdi_select_at(x, at));
    }
    const uint32_t high = xdi_select_bin(keys, n, &rank, 21, 0);
    const uint32_t middle = xdi_select_bin(keys, n, &rank, 10, high);
    const float value = xd_float_of_key((high << 21) | (middle << 10) | 1023u);
    return value == value ? value : -INFINITY;
}

/* Memory for a row's candidates: their columns and keys, and two arrays of records (key in the upper half, column in the lower)
 * for the sort. Digits are those of the key minus the smallest key: the largest elements of a row are close together, so they
 * differ in few bits. */
typedef struct xdi_select_scratch {
    uint32_t *columns, *keys;
    uint64_t *from, *to;
    int64_t room;
    uint32_t first;    /* the smallest key */
    int digits, width; /* passes of the sort, and bits per pass */
    uint32_t bins[XDI_SELECT_DIGITS][1 << XDI_SELECT_WIDTH];
} xdi_select_scratch;

/* Counts the keys of each digit value. The third digit begins at bit `third`; 32: there is no third digit. */
static void xdi_select_count(xdi_select_scratch *s, int64_t n, uint32_t mask, int third) {
    uint32_t *low = s->bins[0], *middle = s->bins[1], *high = s->bins[2];
    const uint32_t *keys = s->keys, first = s->first;
    const int width = s->width;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t key = keys[i] - first;
        low[key & mask]++;
        middle[key >> width & mask]++;
    }
    for (int64_t i = 0; third < 32 && i < n; i++) high[(keys[i] - first) >> third]++;
}

/* The passes that the keys need, and the first output index of each digit value in every pass. */
static void xdi_select_plan(const xdi_tiles *tiles, xdi_select_scratch *s, int64_t n) {
    uint32_t last;
    int bits = 1;
    tiles->range(s->keys, n, &s->first, &last);
    while (bits < 32 && (last - s->first) >> bits) bits++;
    s->digits = (bits + XDI_SELECT_WIDTH - 1) / XDI_SELECT_WIDTH;
    s->width = (bits + s->digits - 1) / s->digits;
    if (s->width < 4) s->width = 4;
    const uint32_t mask = ((uint32_t)1 << s->width) - 1;
    for (int digit = 0; digit < XDI_SELECT_DIGITS; digit++)
        memset(s->bins[digit], 0, sizeof(uint32_t) << s->width);
    xdi_select_count(s, n, mask, s->digits < 3 ? 32 : 2 * s->width);
    for (int digit = 0; digit < s->digits; digit++) tiles->offsets(s->bins[digit], mask + 1);
}

/* Stable radix sort of the keys; the result is in s->from. */
static void xdi_select_sort(xdi_select_scratch *s, int64_t n) {
    const uint32_t mask = ((uint32_t)1 << s->width) - 1, first = s->first;
    uint32_t *bins = s->bins[0];
    uint64_t *from = s->from, *to = s->to;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t key = s->keys[i];
        from[bins[(key - first) & mask]++] = (uint64_t)key << 32 | s->columns[i];
    }
    for (int digit = 1; digit < s->digits; digit++) {
        const int shift = s->width * digit;
        bins = s->bins[digit];
        for (int64_t i = 0; i < n; i++)
            to[bins[((uint32_t)(from[i] >> 32) - first) >> shift & mask]++] = from[i];
        s->to = from;
        s->from = to;
        from = s->from;
        to = s->to;
    }
}

/* False when both thresholds were too high or too many elements are equal: the row then goes to xdi_select_few. */
static bool xdi_select_many(const xdi_tiles *tiles, const xd_select_args *a, int64_t r,
                            xdi_select_scratch *s) {
    const xdi_simd_array x = xdi_simd_array_of(&a->logits, r, 0);
    double *values = a->values + r * a->k;
    int64_t *ids = a->ids + r * a->k, n = 0;
    for (int attempt = 0; attempt < 2 && n < a->k; attempt++) {
        const float threshold = xdi_select_threshold(a, r, attempt ? 8.0 : 1.75);
        n = tiles->collect(x, a->columns, threshold, s->columns, s->keys, s->room);
    }
    if (n < a->k || n + 16 > s->room) return false; /* a full list may be incomplete */
    xdi_select_plan(tiles, s, n);
    xdi_select_sort(s, n);
    if (!tiles->unpack(s->from, a->k, a->first, values, ids)) return true;
    for (int64_t j = 0; j < a->k; j++)
        if (values[j] == 0.0) values[j] = xdi_loss_load(&a->logits, r, ids[j] - a->first);
    return true;
}

/* A selection, and the first thread's memory for candidates; NULL: none. */
typedef struct xdi_select_job {
    const xd_select_args *a;
    void *memory;
    int64_t room;
} xdi_select_job;

static void xdi_simd_select_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                  int slot) {
    const xdi_select_job *job = (const xdi_select_job *)args;
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    xdi_select_scratch s;
    void *memory = job->memory && slot > 0 ? xdi_parallel_scratch(launch->ctx, slot) : job->memory;
    s.room = job->room;
    if (memory) {
        s.from = (uint64_t *)memory;
        s.to = s.from + s.room;
        s.columns = (uint32_t *)(void *)(s.to + s.room);
        s.keys = s.columns + s.room;
    }
    for (int64_t r = begin; r < end; r++) {
        if (memory && xdi_select_many(tiles, job->a, r, &s)) continue;
        xdi_select_few(tiles, job->a, r);
    }
}

XD_PRIVATE xd_result xdi_simd_select(const xd_launch *launch, const xd_select_args *a) {
    xdi_select_job job = { a, NULL, 2 * a->k + 4096 < a->columns + 32 ? 2 * a->k + 4096 : a->columns + 32 };
    if (a->logits.dtype != XD_DTYPE_F32 && a->logits.dtype != XD_DTYPE_BF16)
        return xdi_topk_kernels_cpu()->select(launch, a);
    const size_t bytes = (size_t)job.room * 24;
    if (a->k > XDI_SELECT_FEW && a->columns > a->k && a->columns < INT32_MAX)
        job.memory = xdi_scratch_take(launch->ctx, bytes); /* without memory: the slow way */
    /* When a thread's scratch is too small for the candidates, all rows are one piece. */
    const xd_result result =
        bytes <= XDI_POOL_SCRATCH
            ? xdi_spread_rows(launch, a->logits.rows, a->columns, xdi_simd_select_piece, &job)
            : xdi_spread_items(launch, a->logits.rows, a->logits.rows, xdi_simd_select_piece, &job);
    xdi_scratch_give(launch->ctx, job.memory);
    return result;
}

/* The top-k entries that are faster with vectors. */
XD_PRIVATE void xdi_simd_topk_fill(xd_topk_kernels *kernels) {
    kernels->maxima = xdi_simd_topk_maxima;
    kernels->stats = xdi_simd_topk_stats;
    kernels->grad = xdi_simd_topk_grad;
    kernels->select = xdi_simd_select;
}
