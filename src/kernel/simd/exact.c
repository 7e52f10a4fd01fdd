/* INVARIANT mode's sums of a row on vectors, tile by tile: the terms of the plain kernels, and integers are
 * added in any order. Terms that are large or not finite, and the last few columns, are left to those. */

#include "kernel/simd/exact.h"
#include "kernel/simd/simd_math.h"

#include <math.h>
#include <string.h>

/* The logits of a tile and what their terms are relative to. */
typedef struct xdi_exact_tile {
    xdi_simd_array x, y; /* student and teacher */
    double max, teacher_max, teacher_at_arg, scale;
} xdi_exact_tile;

/* What a level does to n columns, a multiple of `lanes`. False when it is for the plain kernels; the sums are
 * then not to be used.
 *   powers    sum e^((x - max) scale)
 *   moments   the same, and of those powers times their exponents
 *   linear    sum x - max
 *   pair      SOFT, TEACHER and CROSS of kernel/loss.h
 *   mixture   the sums of the Jensen-Shannon divergence */
typedef struct xdi_exact_level {
    int lanes;
    bool (*powers)(xdi_simd_array x, int64_t n, double max, double scale, xd_fixed *sum);
    bool (*moments)(xdi_simd_array x, int64_t n, double max, double scale, xd_fixed *sum, xd_fixed *moment);
    bool (*linear)(xdi_simd_array x, int64_t n, double max, xd_fixed *sum);
    bool (*pair)(const xdi_exact_tile *tile, int64_t n, xd_divergence divergence, xd_fixed *sums);
    bool (*mixture)(const xdi_exact_tile *tile, int64_t n, const xd_loss_row *row, double beta,
                    xd_fixed *sums);
} xdi_exact_level;

/* Written once for a vector v of f32 and the two of double, d, that it widens to. */
#define XDI_EXACT_LOOPS(v, d, INLINE, LEAF)                                                                 \
    LEAF bool v##_exact_powers(xdi_simd_array x, int64_t n, double max, double scale, xd_fixed *sum) {      \
        d##_sum powers = d##_no_sum();                                                                      \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                        \
            d a, b;                                                                                         \
            d##_widen(v##_load(x, i), &a, &b);                                                              \
            d##_add_positive(&powers, d##_exp((a - max) * scale));                                          \
            d##_add_positive(&powers, d##_exp((b - max) * scale));                                          \
        }                                                                                                   \
        return d##_sum_of(&powers, n, sum);                                                                 \
    }                                                                                                       \
    INLINE void d##_moment(d z, d##_sum *powers, d##_sum *moments) {                                        \
        const d power = d##_exp(z);                                                                         \
        d##_add_positive(powers, power);                                                                    \
        d##_add(moments, d##_where((d##_mask)(power > 0.0), d##_mul(power, z)));                            \
    }                                                                                                       \
    LEAF bool v##_exact_moments(xdi_simd_array x, int64_t n, double max, double scale, xd_fixed *sum,       \
                                xd_fixed *moment) {                                                         \
        d##_sum powers = d##_no_sum(), moments = d##_no_sum();                                              \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                        \
            d a, b;                                                                                         \
            d##_widen(v##_load(x, i), &a, &b);                                                              \
            d##_moment((a - max) * scale, &powers, &moments);                                               \
            d##_moment((b - max) * scale, &powers, &moments);                                               \
        }                                                                                                   \
        return d##_sum_of(&powers, n, sum) && d##_sum_of(&moments, n, moment);                              \
    }                                                                                                       \
    LEAF bool v##_exact_linear(xdi_simd_array x, int64_t n, double max, xd_fixed *sum) {                    \
        d##_sum terms = d##_no_sum();                                                                       \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                        \
            d a, b;                                                                                         \
            d##_widen(v##_load(x, i), &a, &b);                                                              \
            d##_add(&terms, a - max);                                                                       \
            d##_add(&terms, b - max);                                                                       \
        }                                                                                                   \
        return d##_sum_of(&terms, n, sum);                                                                  \
    }                                                                                                       \
    INLINE void d##_pair(d x, d y, const xdi_exact_tile *tile, xd_divergence divergence, d##_sum *student,  \
                         d##_sum *teacher, d##_sum *cross) {                                                \
        const d z = (x - tile->max) * tile->scale, u = (y - tile->teacher_max) * tile->scale;               \
        const d p = d##_exp(z), q = d##_exp(u);                                                             \
        d##_add_positive(student, p);                                                                       \
        d##_add_positive(teacher, q);                                                                       \
        if (divergence == XD_KL_FORWARD)                                                                    \
            d##_add(cross, d##_where((d##_mask)(q > 0.0), d##_mul(q, u - z)));                              \
        else if (divergence == XD_SOFT_CE)                                                                  \
            d##_add(cross, d##_where((d##_mask)(q > 0.0), d##_mul(q, z)));                                  \
        else if (divergence == XD_KL_REVERSE)                                                               \
            d##_add(cross, d##_where((d##_mask)(p > 0.0),                                                   \
                                     p *(z - d##_mul(y - tile->teacher_at_arg, d##_set(tile->scale)))));    \
    }                                                                                                       \
    INLINE bool v##_exact_pair_loop(const xdi_exact_tile *tile, int64_t n, xd_divergence divergence,        \
                                    xd_fixed *sums) {                                                       \
        d##_sum student = d##_no_sum(), teacher = d##_no_sum(), cross = d##_no_sum();                       \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                        \
            d x, more_x, y, more_y;                                                                         \
            d##_widen(v##_load(tile->x, i), &x, &more_x);                                                   \
            d##_widen(v##_load(tile->y, i), &y, &more_y);                                                   \
            d##_pair(x, y, tile, divergence, &student, &teacher, &cross);                                   \
            d##_pair(more_x, more_y, tile, divergence, &student, &teacher, &cross);                         \
        }                                                                                                   \
        const int64_t crossed = divergence == XD_JSD ? 0 : n;                                               \
        return d##_sum_of(&student, n, &sums[XD_LOSS_SOFT]) &&                                              \
               d##_sum_of(&teacher, n, &sums[XD_LOSS_TEACHER]) &&                                           \
               d##_sum_of(&cross, crossed, &sums[XD_LOSS_CROSS]);                                           \
    }                                                                                                       \
    LEAF bool v##_exact_pair(const xdi_exact_tile *tile, int64_t n, xd_divergence divergence,               \
                             xd_fixed *sums) {                                                              \
        switch (divergence) {                                                                               \
        case XD_KL_FORWARD: return v##_exact_pair_loop(tile, n, XD_KL_FORWARD, sums);                       \
        case XD_KL_REVERSE: return v##_exact_pair_loop(tile, n, XD_KL_REVERSE, sums);                       \
        case XD_SOFT_CE: return v##_exact_pair_loop(tile, n, XD_SOFT_CE, sums);                             \
        default: return v##_exact_pair_loop(tile, n, XD_JSD, sums);                                         \
        }                                                                                                   \
    }                                                                                                       \
    LEAF bool v##_exact_mixture(const xdi_exact_tile *tile, int64_t n, const xd_loss_row *row, double beta, \
                                xd_fixed *sums) {                                                           \
        const d scale = d##_set(tile->scale);                                                               \
        d##_sum teacher = d##_no_sum(), student = d##_no_sum();                                             \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                        \
            d x[2], y[2], q, p;                                                                             \
            d##_widen(v##_load(tile->x, i), &x[0], &x[1]);                                                  \
            d##_widen(v##_load(tile->y, i), &y[0], &y[1]);                                                  \
            for (int half = 0; half < 2; half++) {                                                          \
                const d s = d##_mul(x[half] - row->max, scale) - row->soft_log;                             \
                const d t = d##_mul(y[half] - row->teacher_max, scale) - row->teacher_log;                  \
                d##_mixture(s, t, beta, row->top, &q, &p);                                                  \
                d##_add(&teacher, q);                                                                       \
                d##_add(&student, p);                                                                       \
            }                                                                                               \
        }                                                                                                   \
        return d##_sum_of(&teacher, n, &sums[XD_LOSS_TEACHER_MIXTURE]) &&                                   \
               d##_sum_of(&student, n, &sums[XD_LOSS_STUDENT_MIXTURE]);                                     \
    }                                                                                                       \
    static const xdi_exact_level v##_exact = { v##_lanes,        v##_exact_powers, v##_exact_moments,       \
                                               v##_exact_linear, v##_exact_pair,   v##_exact_mixture };

XDI_EXACT_LOOPS(xdi_v4, xdi_w2, XDI_SIMD_INLINE, XDI_SIMD_128)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

XDI_EXACT_LOOPS(xdi_v8, xdi_w4, XDI_SIMD_INLINE_256, XDI_SIMD_256)
XDI_EXACT_LOOPS(xdi_v16, xdi_w8, XDI_SIMD_INLINE_512, XDI_SIMD_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

static const xdi_exact_level *xdi_exact_level_of(const xd_launch *launch) {
    switch (xd_ctx_settings(launch->ctx)->cpu) {
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_v8_exact;
    case XD_CPU_AVX512:
    case XD_CPU_AVX512_BF16: return &xdi_v16_exact;
#endif
    default: return &xdi_v4_exact;
    }
}

static bool xdi_exact_narrow(const xd_rows *x) {
    return !x->data || x->dtype == XD_DTYPE_F32 || x->dtype == XD_DTYPE_BF16;
}

/* Joins the sums of a tile. False when one of them might run over on the way, which only the plain kernels
 * notice term by term; nothing is joined then. */
static bool xdi_exact_join(xd_fixed *sums, const xd_fixed *part, int count) {
    const int64_t room = (int64_t)1 << 54;
    for (int i = 0; i < count; i++)
        if (sums[i].high >= room || sums[i].high <= -room) return false;
    for (int i = 0; i < count; i++) {
        sums[i].high += part[i].high;
        sums[i].low += part[i].low;
    }
    return true;
}

/* ---- sums of a loss ---- */

/* The sums of n columns; a hard loss of temperature 1 beside a soft one has the same terms. */
static bool xdi_exact_tile_stats(const xdi_exact_level *level, const xd_loss_args *a,
                                 const xdi_exact_tile *tile, int64_t n, xd_fixed *part) {
    const bool hard = xdi_loss_has_hard(a), soft = xdi_loss_has_soft(a);
    const bool shared = soft && a->temperature == 1.0;
    memset(part, 0, XD_LOSS_SUMS * sizeof *part);
    if (soft && !level->pair(tile, n, a->divergence, part)) return false;
    if (!hard) return true;
    if (shared)
        part[XD_LOSS_HARD] = part[XD_LOSS_SOFT];
    else if (!level->powers(tile->x, n, tile->max, 1.0, &part[XD_LOSS_HARD]))
        return false;
    return a->uniform_weight == 0.0 || level->linear(tile->x, n, tile->max, &part[XD_LOSS_LINEAR]);
}

static void xdi_exact_stats_row(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                                xdi_loss_sums *sums) {
    const xdi_exact_level *level = (const xdi_exact_level *)state;
    const int64_t columns = xdi_loss_columns(a), whole = columns - columns % level->lanes;
    const bool soft = xdi_loss_has_soft(a);
    xdi_exact_tile tile;
    memset(&tile, 0, sizeof tile);
    tile.max = ref[XD_LOSS_MAX];
    tile.teacher_max = ref[XD_LOSS_TEACHER_MAX];
    tile.teacher_at_arg = ref[XD_LOSS_TEACHER_AT_ARG];
    tile.scale = 1.0 / a->temperature;
    for (int64_t c = 0; c < whole; c += XDI_TILE) {
        const int64_t n = xdi_fast_tile_at(c, whole);
        xd_fixed part[XD_LOSS_SUMS];
        tile.x = xdi_fast_array(&a->student, r, c);
        if (soft) tile.y = xdi_fast_array(&a->teacher, r, c);
        if (!xdi_exact_tile_stats(level, a, &tile, n, part) ||
            !xdi_exact_join(sums->exact, part, XD_LOSS_BAD))
            xdi_loss_stats_columns(a, r, c, c + n, ref, sums);
    }
    xdi_loss_stats_columns(a, r, whole, columns, ref, sums);
}

XD_PRIVATE xd_result xdi_exact_stats(const xd_launch *launch, const xd_loss_args *a) {
    if (!xdi_exact_narrow(&a->student) || !xdi_exact_narrow(&a->teacher))
        return xd_loss_kernels_cpu_plain().stats(launch, a);
    xdi_loss_stats_rows(a, xdi_exact_stats_row, xdi_exact_level_of(launch));
    return XD_OK;
}

static void xdi_exact_mixture_row(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                                  xdi_loss_sums *sums) {
    const xdi_exact_level *level = (const xdi_exact_level *)state;
    const int64_t columns = xdi_loss_columns(a), whole = columns - columns % level->lanes;
    xdi_exact_tile tile;
    (void)ref;
    memset(&tile, 0, sizeof tile);
    tile.scale = 1.0 / a->temperature;
    for (int64_t c = 0; c < whole; c += XDI_TILE) {
        const int64_t n = xdi_fast_tile_at(c, whole);
        xd_fixed part[XD_LOSS_MIXTURES];
        tile.x = xdi_fast_array(&a->student, r, c);
        tile.y = xdi_fast_array(&a->teacher, r, c);
        if (!level->mixture(&tile, n, a->row + r, a->beta, part) ||
            !xdi_exact_join(sums->exact, part, XD_LOSS_MIXTURES))
            xdi_loss_mixture_columns(a, r, c, c + n, sums);
    }
    xdi_loss_mixture_columns(a, r, whole, columns, sums);
}

XD_PRIVATE xd_result xdi_exact_mixtures(const xd_launch *launch, const xd_loss_args *a) {
    if (!xdi_exact_narrow(&a->student) || !xdi_exact_narrow(&a->teacher))
        return xd_loss_kernels_cpu_plain().mixture(launch, a);
    xdi_loss_mixture_rows(a, xdi_exact_mixture_row, xdi_exact_level_of(launch));
    return XD_OK;
}

/* ---- sums outside the ids of a top-k loss ---- */

static void xdi_exact_topk_columns(const void *state, const xd_topk_args *a, int64_t r, int64_t begin,
                                   int64_t end, xdi_topk_sums *sums) {
    const xdi_exact_level *level = (const xdi_exact_level *)state;
    const int64_t whole = end - (end - begin) % level->lanes;
    for (int64_t c = begin; c < whole; c += XDI_TILE) {
        const int64_t n = xdi_fast_tile_at(c, whole);
        const xdi_simd_array x = xdi_fast_array(&a->logits, r, c);
        xd_fixed part[XD_TOPK_SUMS];
        memset(part, 0, sizeof part);
        if (!level->moments(x, n, a->maxima[r], 1.0 / a->temperature, &part[XD_TOPK_OUTSIDE],
                            &part[XD_TOPK_ENTROPY]) ||
            !xdi_exact_join(sums->exact, part, XD_TOPK_BAD))
            xdi_topk_stats_columns(NULL, a, r, c, c + n, sums);
    }
    xdi_topk_stats_columns(NULL, a, r, whole, end, sums);
}

XD_PRIVATE xd_result xdi_exact_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    xdi_topk_stats_rows(a, xdi_exact_topk_columns, xdi_exact_level_of(launch));
    return XD_OK;
}
