/* Minimal fine-tuning and the cosine on vectors. The former's gradient is that of a forward KL whose teacher weighs
 * less; the cosine's terms are double, exact products among them, so its loops only add in another order than the plain
 * ones, and what they write has their bits. */

#include "kernel/simd/exact.h"
#include "kernel/simd/simd_math.h"

#include <math.h>
#include <string.h>

/* A row's terms of minimal fine-tuning: with q = 2^(...) q_scale they are weight q (slope ((y - y_max) - (x - x_max)) +
 * shift), whose differences lose nothing where q is large. */
typedef struct xdi_mft_tile {
    xdi_simd_array x, y, out;
    xdi_tile_power power;
    float q_scale, weight, x_max, y_max, slope, shift;
} xdi_mft_tile;

/* One set of loops over n elements.
 *   largest    largest magnitude, infinity when there is a NaN
 *   products   sums of the products of x and y
 *   exact      the same of x x_scale and y y_scale, whose magnitudes are below 1
 *   slopes     out = of_x x + of_y y */
typedef struct xdi_mft_level {
    void (*terms)(const xdi_mft_tile *tile, int64_t n);
    float (*largest)(xdi_simd_array x, int64_t n);
    void (*products)(xdi_simd_array x, xdi_simd_array y, int64_t n, double *sums);
    void (*exact)(xdi_simd_array x, xdi_simd_array y, int64_t n, double x_scale, double y_scale,
                  xd_fixed *sums);
    void (*slopes)(xdi_simd_array x, xdi_simd_array y, xdi_simd_array out, int64_t n, double of_x,
                   double of_y);
} xdi_mft_level;

/* Written once for a vector v of f32 and the two of double, d, that it widens to. */
#define XDI_MFT_LOOPS(v, d, INLINE, LEAF)                                                                    \
    LEAF void v##_mft_terms(const xdi_mft_tile *given, int64_t n) {                                          \
        const xdi_mft_tile tile = *given; /* stores cannot change a copy */                                  \
        const v zero = v##_set(0.0f), x_max = v##_set(tile.x_max), y_max = v##_set(tile.y_max);              \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                         \
            const v x = v##_read(tile.x, i, n, 0.0f), y = v##_read(tile.y, i, n, 0.0f);                      \
            const v q = v##_scaled_exp2(y, &tile.power, tile.q_scale);                                       \
            const v gap = v##_sub(v##_sub(y, y_max), v##_sub(x, x_max));                                     \
            const v log_ratio = v##_fma(v##_set(tile.slope), gap, v##_set(tile.shift));                      \
            const v term = v##_mul(v##_set(tile.weight), v##_mul(q, log_ratio));                             \
            v##_write(tile.out, i, n, v##_pick(zero, q, zero, term));                                        \
        }                                                                                                    \
    }                                                                                                        \
    LEAF float v##_mft_largest(xdi_simd_array x, int64_t n) {                                                \
        const v zero = v##_set(0.0f), one = v##_set(1.0f);                                                   \
        v largest = zero, nan = zero;                                                                        \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                         \
            const v a = v##_read(x, i, n, 0.0f);                                                             \
            largest = v##_max(v##_max(a, v##_sub(zero, a)), largest);                                        \
            nan = v##_pick(a, a, nan, one);                                                                  \
        }                                                                                                    \
        return v##_largest(nan) > 0.0f ? INFINITY : v##_largest(largest);                                    \
    }                                                                                                        \
    INLINE double d##_lanes_total(d x) {                                                                     \
        double total = 0.0;                                                                                  \
        for (int i = 0; i < d##_lanes; i++) total += x[i];                                                   \
        return total;                                                                                        \
    }                                                                                                        \
    LEAF void v##_mft_products(xdi_simd_array x, xdi_simd_array y, int64_t n, double *sums) {                \
        d of_x[2], of_y[2], both[2], a[2], b[2];                                                             \
        for (int half = 0; half < 2; half++) of_x[half] = of_y[half] = both[half] = d##_set(0.0);            \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                         \
            d##_widen(v##_read(x, i, n, 0.0f), &a[0], &a[1]);                                                \
            d##_widen(v##_read(y, i, n, 0.0f), &b[0], &b[1]);                                                \
            for (int half = 0; half < 2; half++) {                                                           \
                of_x[half] += a[half] * a[half];                                                             \
                of_y[half] += b[half] * b[half];                                                             \
                both[half] += a[half] * b[half];                                                             \
            }                                                                                                \
        }                                                                                                    \
        sums[XD_COSINE_STUDENT] = d##_lanes_total(of_x[0] + of_x[1]);                                        \
        sums[XD_COSINE_TEACHER] = d##_lanes_total(of_y[0] + of_y[1]);                                        \
        sums[XD_COSINE_BOTH] = d##_lanes_total(both[0] + both[1]);                                           \
    }                                                                                                        \
    LEAF void v##_mft_exact(xdi_simd_array x, xdi_simd_array y, int64_t n, double x_scale, double y_scale,   \
                            xd_fixed *sums) {                                                                \
        d##_sum of_x = d##_no_sum(), of_y = d##_no_sum(), both = d##_no_sum();                               \
        int64_t count = 0;                                                                                   \
        d a[2], b[2];                                                                                        \
        for (int64_t i = 0; i < n; i += v##_lanes, count += v##_lanes) {                                     \
            d##_widen(v##_read(x, i, n, 0.0f), &a[0], &a[1]);                                                \
            d##_widen(v##_read(y, i, n, 0.0f), &b[0], &b[1]);                                                \
            for (int half = 0; half < 2; half++) {                                                           \
                const d p = a[half] * x_scale, q = b[half] * y_scale;                                        \
                d##_add(&of_x, d##_mul(p, p));                                                               \
                d##_add(&of_y, d##_mul(q, q));                                                               \
                d##_add(&both, d##_mul(p, q));                                                               \
            }                                                                                                \
        }                                                                                                    \
        d##_sum_of(&of_x, count, &sums[XD_COSINE_STUDENT]);                                                  \
        d##_sum_of(&of_y, count, &sums[XD_COSINE_TEACHER]);                                                  \
        d##_sum_of(&both, count, &sums[XD_COSINE_BOTH]);                                                     \
    }                                                                                                        \
    INLINE d d##_slope(d x, d y, double of_x, double of_y) {                                                 \
        const d from_x = d##_mul(x, d##_set(of_x)), from_y = d##_mul(y, d##_set(of_y));                      \
        return from_x + from_y;                                                                              \
    }                                                                                                        \
    LEAF void v##_mft_slopes(xdi_simd_array x, xdi_simd_array y, xdi_simd_array out, int64_t n, double of_x, \
                             double of_y) {                                                                  \
        d a[2], b[2];                                                                                        \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                         \
            d##_widen(v##_read(x, i, n, 0.0f), &a[0], &a[1]);                                                \
            d##_widen(v##_read(y, i, n, 0.0f), &b[0], &b[1]);                                                \
            v##_write(out, i, n,                                                                             \
                      d##_narrow(d##_slope(a[0], b[0], of_x, of_y), d##_slope(a[1], b[1], of_x, of_y)));     \
        }                                                                                                    \
    }                                                                                                        \
    static const xdi_mft_level v##_mft = { v##_mft_terms, v##_mft_largest, v##_mft_products, v##_mft_exact,  \
                                           v##_mft_slopes };

XDI_MFT_LOOPS(xdi_v4, xdi_w2, XDI_SIMD_INLINE, XDI_SIMD_128)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

XDI_MFT_LOOPS(xdi_v8, xdi_w4, XDI_SIMD_INLINE_256, XDI_SIMD_256)
XDI_MFT_LOOPS(xdi_v16, xdi_w8, XDI_SIMD_INLINE_512, XDI_SIMD_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

static const xdi_mft_level *xdi_mft_level_of(const xd_launch *launch) {
    switch (xd_ctx_settings(launch->ctx)->cpu) {
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_v8_mft;
    case XD_CPU_AVX512:
    case XD_CPU_AVX512_BF16: return &xdi_v16_mft;
#endif
    default: return &xdi_v4_mft;
    }
}

/* ---- minimal fine-tuning ---- */

static void xdi_mft_fast_terms(const xdi_mft_level *level, const xd_mft_args *a, int64_t r, int64_t columns) {
    const xd_loss_row *row = a->row + r;
    const xdi_fast_power q =
        xdi_fast_normalised(XDI_TILE_LOG2E / a->temperature, row->teacher_max, row->teacher_log);
    xdi_mft_tile tile;
    tile.x = xdi_fast_array(&a->student, r, 0);
    tile.y = xdi_fast_array(&a->teacher, r, 0);
    tile.out = xdi_fast_array(&a->terms, r, 0);
    tile.power = q.power;
    tile.q_scale = (float)((1.0 - row->mean) * exp2(-q.rest));
    tile.weight = (float)a->weight;
    tile.x_max = (float)row->max;
    tile.y_max = (float)row->teacher_max;
    tile.slope = (float)(1.0 / a->temperature);
    tile.shift = (float)(log(1.0 - row->mean) + row->soft_log - row->teacher_log);
    level->terms(&tile, columns);
}

static void xdi_mft_fast_gradient(const xdi_tiles *tiles, const xd_mft_args *a, int64_t r, int64_t columns,
                                  bool streamed) {
    const xd_loss_row *row = a->row + r;
    const double factor = XDI_TILE_LOG2E / a->temperature,
                 weight = a->row_scale[r] * a->weight / a->temperature;
    const xdi_fast_power p = xdi_fast_normalised(factor, row->max, row->soft_log);
    const xdi_fast_power q = xdi_fast_normalised(factor, row->teacher_max, row->teacher_log);
    xdi_tile_gradient g;
    memset(&g, 0, sizeof g);
    g.p = p.power;
    g.q = q.power;
    g.soft_scale = (float)(weight * exp2(-p.rest));
    g.teacher_scale = (float)(weight * (1.0 - row->mean) * exp2(-q.rest));
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        g.x = xdi_fast_array(&a->student, r, c);
        g.y = xdi_fast_array(&a->teacher, r, c);
        g.out = xdi_fast_array(&a->gradient, r, c);
        g.streamed = streamed && (uintptr_t)g.out.data % XDI_SIMD_LINE == 0;
        tiles->gradient(&g, XDI_TILE_FORWARD, xdi_fast_tile_at(c, columns));
    }
}

/* The label's column, which the correction is about, and the favourite's: most of the probability may be there, so that
 * f32 would cancel. Their logits are read before the row is overwritten. */
static void xdi_mft_fast_row(const xdi_mft_level *level, const xdi_tiles *tiles, const xd_mft_args *a,
                             int64_t r, int64_t columns, bool streamed) {
    const int64_t at[2] = { a->labels[r] - a->begin, (int64_t)a->row[r].argmax - a->begin };
    double x[2] = { 0.0, 0.0 }, y[2] = { 0.0, 0.0 };
    for (int i = 0; i < 2; i++) {
        if (at[i] < 0 || at[i] >= columns) continue;
        x[i] = xdi_loss_load(&a->student, r, at[i]);
        y[i] = xdi_loss_load(&a->teacher, r, at[i]);
    }
    if (a->terms.data) xdi_mft_fast_terms(level, a, r, columns);
    if (a->gradient.data) xdi_mft_fast_gradient(tiles, a, r, columns, streamed);
    for (int i = 0; i < 2; i++)
        if (at[i] >= 0 && at[i] < columns) xdi_mft_write_at(a, r, at[i], x[i], y[i]);
}

static xd_result xdi_mft_fast_write(const xd_launch *launch, const xd_mft_args *a) {
    const xdi_mft_level *level = xdi_mft_level_of(launch);
    const xdi_tiles *tiles = xdi_fast_tiles(launch);
    const double factor = XDI_TILE_LOG2E / a->temperature;
    const bool streamed = xdi_fast_streams(&a->gradient, a->student.data, a->teacher.data);
    for (int64_t r = 0; r < a->student.rows; r++) {
        const int64_t columns = xdi_mft_begin_row(a, r);
        if (xdi_fast_fits(a->row[r].max, factor) && xdi_fast_fits(a->row[r].teacher_max, factor))
            xdi_mft_fast_row(level, tiles, a, r, columns, streamed);
        else
            xdi_mft_write_row(a, r, columns);
    }
    tiles->fence();
    return XD_OK;
}

/* ---- cosine ---- */

static xd_result xdi_mft_fast_largest(const xd_launch *launch, const xd_mft_args *a) {
    const xdi_mft_level *level = xdi_mft_level_of(launch);
    for (int64_t r = 0; r < a->student.rows; r++) {
        const int64_t columns = a->row_scale[r] != 0.0 ? a->end - a->begin : 0;
        double *sides = a->sides + r * XD_MFT_SIDES;
        sides[XD_MFT_STUDENT] = (double)level->largest(xdi_fast_array(&a->student, r, 0), columns);
        sides[XD_MFT_TEACHER] = (double)level->largest(xdi_fast_array(&a->teacher, r, 0), columns);
    }
    return XD_OK;
}

static void xdi_mft_fast_products_row(const void *state, const xd_mft_args *a, int64_t r, double x_scale,
                                      double y_scale, xdi_cosine_sums *sums) {
    const xdi_mft_level *level = (const xdi_mft_level *)state;
    const xdi_simd_array x = xdi_fast_array(&a->student, r, 0), y = xdi_fast_array(&a->teacher, r, 0);
    if (a->fixed)
        level->exact(x, y, a->end - a->begin, x_scale, y_scale, sums->exact);
    else
        level->products(x, y, a->end - a->begin, sums->plain);
}

static xd_result xdi_mft_fast_products(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cosine_products_rows(a, xdi_mft_fast_products_row, xdi_mft_level_of(launch));
    return XD_OK;
}

static xd_result xdi_mft_fast_slopes(const xd_launch *launch, const xd_mft_args *a) {
    const xdi_mft_level *level = xdi_mft_level_of(launch);
    for (int64_t r = 0; r < a->student.rows; r++) {
        const int64_t columns = xdi_mft_begin_row(a, r);
        double of_x, of_y;
        xdi_cosine_slope(a, r, &of_x, &of_y);
        level->slopes(xdi_fast_array(&a->student, r, 0), xdi_fast_array(&a->teacher, r, 0),
                      xdi_fast_array(&a->gradient, r, 0), columns, of_x, of_y);
    }
    return XD_OK;
}

/* The entries that vectors do better; what is done once a row stays plain. */
XD_PRIVATE void xdi_fast_mft_fill(xd_mft_kernels *kernels) {
    kernels->write = xdi_mft_fast_write;
    kernels->largest = xdi_mft_fast_largest;
    kernels->products = xdi_mft_fast_products;
    kernels->slopes = xdi_mft_fast_slopes;
}
