/* Universal logit distillation on vectors of f32. Chunks and rows that f32 cannot say are left to the plain
 * kernels. */

#include "kernel/simd/simd_math.h"
#include "kernel/simd/xtoken_loops.h"

#include <math.h>
#include <string.h>

/* Ranks, or pairs of matched ids, at a time. */
enum { XDI_ULD_TILE = 1024 };

/* Rows that are multiplied by less than this, or by more than its inverse, are left to double. */
#define XDI_ULD_LEAST 1e-30

/* A tile of both sides. */
typedef struct xdi_uld_tile {
    float x[XDI_ULD_TILE], y[XDI_ULD_TILE]; /* logits of student and teacher */
    float slope[XDI_ULD_TILE];              /* out */
    double value, mean; /* out: sums of the terms, and of slope times the student's merged probability */
} xdi_uld_tile;

/* The inner loops of one vector width; n elements of a tile. */
typedef struct xdi_uld_loops {
    /* |a - b|; slope is the sign of a - b */
    void (*ranks)(xdi_uld_tile *tile, int64_t n, const xdi_xtoken_power *p, const xdi_xtoken_power *q);
    /* the generalised JSD, and its derivative */
    void (*pairs)(xdi_uld_tile *tile, int64_t n, const xdi_xtoken_power *p, const xdi_xtoken_power *q,
                  double beta);
} xdi_uld_loops;

#define XDI_ULD_LOOPS(v, INLINE, LEAF)                                                           \
    LEAF void v##_uld_ranks(xdi_uld_tile *tile, int64_t n, const xdi_xtoken_power *p,            \
                            const xdi_xtoken_power *q) {                                         \
        const xdi_simd_array x = xdi_xtoken_floats(tile->x), y = xdi_xtoken_floats(tile->y);     \
        const v zero = v##_set(0.0f), one = v##_set(1.0f);                                       \
        v sum = zero, mean = zero;                                                               \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                             \
            const v a = v##_scaled_exp2(v##_read(x, i, n, -INFINITY), &p->power, p->scale);      \
            const v b = v##_scaled_exp2(v##_read(y, i, n, -INFINITY), &q->power, q->scale);      \
            const v sign = v##_sub(v##_pick(a, b, one, zero), v##_pick(b, a, one, zero));        \
            sum = v##_add(sum, v##_max(v##_sub(a, b), v##_sub(b, a)));                           \
            mean = v##_fma(sign, a, mean);                                                       \
            v##_write(xdi_xtoken_floats(tile->slope), i, n, sign);                               \
        }                                                                                        \
        tile->value = v##_total(sum);                                                            \
        tile->mean = v##_total(mean);                                                            \
    }                                                                                            \
    INLINE v v##_uld_ln(v above, v below) {                                                      \
        return v##_mul(v##_log2(v##_div(above, below)), v##_set((float)XDI_TILE_LN2));           \
    }                                                                                            \
    /* Past the end both are the floor, and their terms nothing. */                              \
    LEAF void v##_uld_pairs(xdi_uld_tile *tile, int64_t n, const xdi_xtoken_power *p,            \
                            const xdi_xtoken_power *q, double beta) {                            \
        const xdi_simd_array x = xdi_xtoken_floats(tile->x), y = xdi_xtoken_floats(tile->y);     \
        const v floor = v##_set((float)XD_ULD_FLOOR), zero = v##_set(0.0f), one = v##_set(1.0f); \
        const v b = v##_set((float)beta), rest = v##_set((float)(1.0 - beta));                   \
        v sum = zero, mean = zero;                                                               \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                             \
            const v merged = v##_scaled_exp2(v##_read(x, i, n, -INFINITY), &p->power, p->scale); \
            const v other = v##_scaled_exp2(v##_read(y, i, n, -INFINITY), &q->power, q->scale);  \
            const v s = v##_max(floor, merged), t = v##_max(floor, other);                       \
            v slope;                                                                             \
            if (beta == 0.0) {                                                                   \
                sum = v##_fma(t, v##_uld_ln(t, s), sum);                                         \
                slope = v##_sub(zero, v##_div(t, s));                                            \
            } else if (beta == 1.0) {                                                            \
                const v ln = v##_uld_ln(s, t);                                                   \
                sum = v##_fma(s, ln, sum);                                                       \
                slope = v##_add(ln, one);                                                        \
            } else {                                                                             \
                const v mixture = v##_fma(b, t, v##_mul(rest, s));                               \
                sum = v##_fma(v##_mul(b, t), v##_uld_ln(t, mixture), sum);                       \
                slope = v##_mul(rest, v##_uld_ln(s, mixture));                                   \
                sum = v##_fma(s, slope, sum);                                                    \
            }                                                                                    \
            slope = v##_pick(merged, floor, slope, zero);                                        \
            mean = v##_fma(slope, merged, mean);                                                 \
            v##_write(xdi_xtoken_floats(tile->slope), i, n, slope);                              \
        }                                                                                        \
        tile->value = v##_total(sum);                                                            \
        tile->mean = v##_total(mean);                                                            \
    }                                                                                            \
    static const xdi_uld_loops v##_uld = { v##_uld_ranks, v##_uld_pairs };

XDI_ULD_LOOPS(xdi_v4, XDI_SIMD_INLINE, XDI_SIMD_128)
#if defined(XDI_X86)
XDI_ULD_LOOPS(xdi_v8, XDI_SIMD_INLINE_256, XDI_SIMD_256)
XDI_ULD_LOOPS(xdi_v16, XDI_SIMD_INLINE_512, XDI_SIMD_512)
#endif

static const xdi_uld_loops *xdi_uld_loops_of(const xd_launch *launch) {
    switch (xd_ctx_settings(launch->ctx)->cpu) {
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_v8_uld;
    case XD_CPU_AVX512:
    case XD_CPU_AVX512_BF16: return &xdi_v16_uld;
#endif
    default: return &xdi_v4_uld;
    }
}

/* scale times a row's probabilities; false where f32 does not fit. */
static bool xdi_fast_uld_power(const xd_uld_rows *side, int64_t row, double scale, xdi_xtoken_power *p) {
    const double *part = side->parts + row * XD_SOFTMAX_PARTS, least = XDI_ULD_LEAST;
    const double lse = part[XD_SOFTMAX_MAX] / side->temperature + log(part[XD_SOFTMAX_SUM]);
    if (scale != 0.0 && !(fabs(scale) > least && fabs(scale) < 1.0 / least)) return false;
    return xdi_fast_xtoken_power(side->temperature, lse, scale, p);
}

/* ---- compare ---- */

/* A chunk on its way. */
typedef struct xdi_fast_uld {
    const xdi_uld_loops *loops;
    const xd_uld_args *a;
    xd_uld_chunk *chunk;
    xdi_xtoken_power power[XD_ULD_SIDES];
    float *slope;
    double mean;
    xdi_uld_tile tile;
} xdi_fast_uld;

/* Logits of ranks [r, r + n), -infinity behind the list's end. */
static void xdi_fast_uld_logits(const uint64_t *sorted, int64_t count, int64_t r, int64_t n, float *out) {
    int64_t i = 0;
    for (; i < n && r + i < count; i++) out[i] = xdi_tile_of_key((uint32_t)(sorted[r + i] >> 32));
    for (; i < n; i++) out[i] = -INFINITY;
}

static void xdi_fast_uld_unmatched(xdi_fast_uld *f, int64_t at) {
    const xd_uld_rows *student = &f->a->side[XD_ULD_STUDENT], *teacher = &f->a->side[XD_ULD_TEACHER];
    const uint64_t *x = student->sorted + at * student->count, *y = teacher->sorted + at * teacher->count;
    const int64_t longest = student->count > teacher->count ? student->count : teacher->count;
    const float weight = (float)f->a->unmatched_weight;
    for (int64_t r = 0; student->count > 0 && teacher->count > 0 && r < longest; r += XDI_ULD_TILE) {
        const int64_t n = longest - r < XDI_ULD_TILE ? longest - r : (int64_t)XDI_ULD_TILE;
        xdi_fast_uld_logits(x, student->count, r, n, f->tile.x);
        xdi_fast_uld_logits(y, teacher->count, r, n, f->tile.y);
        f->loops->ranks(&f->tile, n, &f->power[XD_ULD_STUDENT], &f->power[XD_ULD_TEACHER]);
        f->chunk->unmatched += f->tile.value;
        f->mean += f->a->unmatched_weight * f->tile.mean;
        for (int64_t i = 0; f->slope && i < n && r + i < student->count; i++)
            f->slope[(uint32_t)x[r + i]] = weight * f->tile.slope[i];
    }
}

static void xdi_fast_uld_matched(xdi_fast_uld *f) {
    const xd_uld_args *a = f->a;
    const float weight = (float)a->matched_weight;
    for (int64_t first = 0; first < a->matched_count; first += XDI_ULD_TILE) {
        const int64_t left = a->matched_count - first, n = left < XDI_ULD_TILE ? left : (int64_t)XDI_ULD_TILE;
        const int32_t *s = a->matched[XD_ULD_STUDENT] + first, *t = a->matched[XD_ULD_TEACHER] + first;
        for (int64_t i = 0; i < n; i++) {
            f->tile.x[i] =
                (float)xdi_loss_load(&a->side[XD_ULD_STUDENT].logits, f->chunk->base[XD_ULD_STUDENT], s[i]);
            f->tile.y[i] =
                (float)xdi_loss_load(&a->side[XD_ULD_TEACHER].logits, f->chunk->base[XD_ULD_TEACHER], t[i]);
        }
        f->loops->pairs(&f->tile, n, &f->power[XD_ULD_STUDENT], &f->power[XD_ULD_TEACHER], a->beta);
        f->chunk->matched += f->tile.value;
        f->mean += a->matched_weight * f->tile.mean;
        for (int64_t i = 0; f->slope && i < n; i++) f->slope[s[i]] = weight * f->tile.slope[i];
    }
}

/* False: nothing is done. */
static bool xdi_fast_uld_chunk(const xd_launch *launch, const xd_uld_args *a, int64_t i) {
    const int64_t columns = a->side[XD_ULD_STUDENT].columns;
    xdi_fast_uld f;
    f.loops = xdi_uld_loops_of(launch);
    f.a = a;
    f.chunk = &a->chunks[i];
    f.slope = a->slope ? a->slope + i * columns : NULL;
    f.mean = 0.0;
    for (int which = 0; which < XD_ULD_SIDES; which++)
        if (!xdi_fast_uld_power(&a->side[which], f.chunk->base[which], f.chunk->factor[which],
                                &f.power[which]) ||
            f.chunk->factor[which] == 0.0)
            return false;
    f.chunk->matched = f.chunk->unmatched = 0.0;
    if (f.slope) memset(f.slope, 0, (size_t)columns * sizeof *f.slope);
    xdi_fast_uld_unmatched(&f, i);
    xdi_fast_uld_matched(&f);
    f.chunk->mean = f.mean / f.chunk->factor[XD_ULD_STUDENT];
    return true;
}

static xd_result xdi_fast_uld_compare(const xd_launch *launch, const xd_uld_args *a) {
    for (int64_t i = 0; i < a->count; i++)
        if (a->chunks[i].finite && !xdi_fast_uld_chunk(launch, a, i)) xdi_uld_compare_chunk(a, i);
    return XD_OK;
}

/* ---- gradient ---- */

static void xdi_fast_uld_write_row(const xd_launch *launch, const xd_uld_args *a, int64_t row) {
    const xd_uld_rows *side = &a->side[XD_ULD_STUDENT];
    const int64_t i = a->owner[row] - a->first;
    const xdi_uld_scale s = xdi_uld_row_scale(a, &a->chunks[i], row);
    xdi_xtoken_writer w;
    memset(&w, 0, sizeof w);
    w.soft = true;
    w.times_p = s.only < 0;
    w.u_scale = 1.0f;
    w.shift = (float)s.mean;
    if (!xdi_fast_uld_power(side, row, s.scale, &w.p)) {
        xdi_uld_gradient_row(a, row);
        return;
    }
    for (int64_t c = 0; c < side->columns; c += XDI_TILE) {
        w.x = xdi_fast_array(&side->logits, row, c);
        w.out = xdi_fast_array(&a->gradient, row, c);
        w.u = s.only < 0 ? a->slope + i * side->columns + c : NULL;
        xdi_xtoken_loops_of(launch)->write(&w, xdi_fast_tile_at(c, side->columns));
    }
    if (s.only >= 0) xdi_loss_store(&a->gradient, row, s.only, s.scale * s.mean * (1.0 - s.mean));
}

static xd_result xdi_fast_uld_gradient(const xd_launch *launch, const xd_uld_args *a) {
    xdi_uld_gradient_rows(launch, a, xdi_fast_uld_write_row);
    return XD_OK;
}

/* The entries that vectors do better. */
XD_PRIVATE void xdi_fast_uld_fill(xd_uld_kernels *kernels) {
    kernels->compare = xdi_fast_uld_compare;
    kernels->gradient = xdi_fast_uld_gradient;
}
