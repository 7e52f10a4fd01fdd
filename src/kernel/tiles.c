#include <float.h>
#include <math.h>

XD_PRIVATE xdi_tile_power xdi_tile_power_of(double factor, double whole) {
    xdi_tile_power power;
    power.factor = (float)factor;
    power.whole = (float)whole;
    power.low = (float)((whole - 127.0) / (double)power.factor);
    return power;
}

/* Where a tile is filled up so that what is less is left out: finite, and its exponent too. */
#define XDI_TILE_LEAST (-1e30f)

/* What follows is written once for every vector width v, as a macro that defines v_... functions with the
 * attributes INLINE and LEAF. */

#define XDI_TILES_SUMS(v, INLINE, LEAF)                                                           \
    LEAF float v##_tile_max(xdi_simd_array x, int64_t n) {                                        \
        v max = v##_set(-INFINITY), nan = v##_set(0.0f);                                          \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                              \
            const v a = v##_read(x, i, n, -INFINITY);                                             \
            max = v##_max(a, max);                                                                \
            nan = v##_pick(a, a, nan, v##_set(1.0f));                                             \
        }                                                                                         \
        return v##_largest(nan) > 0.0f ? NAN : v##_largest(max);                                  \
    }                                                                                             \
    LEAF void v##_tile_raise(xdi_simd_array x, int64_t n, float *maxima) {                        \
        xdi_simd_array to;                                                                        \
        to.data = maxima;                                                                         \
        to.bf16 = false;                                                                          \
        for (int64_t i = 0; i < n; i += v##_lanes)                                                \
            v##_write(to, i, n, v##_max(v##_read(x, i, n, -INFINITY), v##_read(to, i, n, 0.0f))); \
    }                                                                                             \
    LEAF double v##_tile_linear(xdi_simd_array x, int64_t n, float reference) {                   \
        v sum = v##_set(0.0f);                                                                    \
        const v from = v##_set(reference);                                                        \
        for (int64_t i = 0; i < n; i += v##_lanes)                                                \
            sum = v##_add(sum, v##_sub(v##_read(x, i, n, reference), from));                      \
        return v##_total(sum);                                                                    \
    }                                                                                             \
    INLINE double v##_sum_loop(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment, \
                               float *max, bool parity) {                                         \
        const v zero = v##_set(0.0f), low = v##_set(power.low);                                   \
        v sum = zero, more = zero, moments = zero, largest = v##_set(-INFINITY), a, b;            \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                          \
            v##_read_two(x, i, parity, &a, &b);                                                   \
            const v e = v##_exp2(a, &power), f = v##_exp2(b, &power);                             \
            sum = v##_add(sum, e);                                                                \
            more = v##_add(more, f);                                                              \
            largest = v##_max(a, v##_max(b, largest));                                            \
            if (!moment) continue;                                                                \
            moments = v##_fma(e, v##_exponent(v##_max(low, a), &power), moments);                 \
            moments = v##_fma(f, v##_exponent(v##_max(low, b), &power), moments);                 \
        }                                                                                         \
        if (moment) *moment = v##_total(moments);                                                 \
        *max = v##_largest(largest);                                                              \
        return v##_total(v##_add(sum, more));                                                     \
    }                                                                                             \
    LEAF double v##_sum_whole(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment,  \
                              float *max) {                                                       \
        if (x.bf16) return v##_sum_loop(x, n, power, moment, max, true);                          \
        return v##_sum_loop(x, n, power, moment, max, false);                                     \
    }                                                                                             \
    LEAF double v##_tile_sum(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment,   \
                             float *max) {                                                        \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                   \
        float room[2 * v##_lanes], rest_max;                                                      \
        double rest_moment = 0.0, sum = v##_sum_whole(x, whole, power, moment, max);              \
        if (whole == n) return sum;                                                               \
        const xdi_simd_array rest = xdi_simd_padded(x, whole, n, two, -INFINITY, room);           \
        sum += v##_sum_whole(rest, two, power, moment ? &rest_moment : NULL, &rest_max);          \
        if (moment) *moment += rest_moment;                                                       \
        if (rest_max > *max) *max = rest_max;                                                     \
        return sum;                                                                               \
    }

#define XDI_TILES_PAIR(v, INLINE, LEAF)                                                                     \
    typedef struct v##_pair_sums {                                                                          \
        v own, other, cross, infinite, own_max, other_max;                                                  \
    } v##_pair_sums;                                                                                        \
    /* cross: log2 p - log2 q from the difference of the elements, which loses less than each by itself. */ \
    INLINE void v##_pair_add(v##_pair_sums *sums, const xdi_tile_pair *pair, v a, v b, bool careful,        \
                             bool own) {                                                                    \
        const v zero = v##_set(0.0f), one = v##_set(1.0f), lowest = v##_set(XDI_TILE_LEAST);                \
        const v e = v##_exp2(a, &pair->p), left = own ? v##_max(v##_set(pair->p.low), a) : zero;            \
        const v factor = v##_set(pair->q.factor);                                                           \
        const v back = v##_set((own ? pair->p.whole : 0.0f) - pair->q.whole);                               \
        v right = b;                                                                                        \
        if (careful) {                                                                                      \
            const v missing = v##_pick(b, lowest, zero, v##_pick(a, v##_set(-FLT_MAX), one, zero));         \
            sums->infinite = v##_max(missing, sums->infinite);                                              \
            right = v##_max(lowest, b);                                                                     \
        }                                                                                                   \
        sums->own = v##_add(sums->own, e);                                                                  \
        sums->other = v##_add(sums->other, v##_exp2(b, &pair->q));                                          \
        sums->cross = v##_fma(e, v##_exact_sub(v##_sub(left, right), factor, back), sums->cross);           \
        sums->own_max = v##_max(a, sums->own_max);                                                          \
        sums->other_max = v##_max(b, sums->other_max);                                                      \
    }                                                                                                       \
    INLINE void v##_pair_loop(xdi_tile_pair *pair, int64_t n, bool careful, bool own, bool parity) {        \
        const xdi_tile_pair given = *pair;                                                                  \
        v##_pair_sums s, r; /* of every other vector */                                                     \
        v a, b, c, d;                                                                                       \
        s.own = s.other = s.cross = s.infinite = v##_set(0.0f);                                             \
        s.own_max = s.other_max = v##_set(-INFINITY);                                                       \
        r = s;                                                                                              \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                    \
            v##_read_two(given.x, i, parity, &a, &b);                                                       \
            v##_read_two(given.y, i, parity, &c, &d);                                                       \
            v##_pair_add(&s, &given, a, c, careful, own);                                                   \
            v##_pair_add(&r, &given, b, d, careful, own);                                                   \
        }                                                                                                   \
        pair->own = v##_total(s.own) + v##_total(r.own);                                                    \
        pair->other = v##_total(s.other) + v##_total(r.other);                                              \
        pair->cross = v##_total(s.cross) + v##_total(r.cross);                                              \
        pair->own_max = v##_largest(v##_max(s.own_max, r.own_max));                                         \
        pair->other_max = v##_largest(v##_max(s.other_max, r.other_max));                                   \
        pair->infinite = v##_largest(v##_max(s.infinite, r.infinite)) > 0.0f;                               \
    }                                                                                                       \
    INLINE void v##_pair_kind(xdi_tile_pair *pair, int64_t n, bool parity) {                                \
        switch ((pair->careful ? 2 : 0) + (pair->own_weight != 0.0f ? 1 : 0)) {                             \
        case 0: v##_pair_loop(pair, n, false, false, parity); break;                                        \
        case 1: v##_pair_loop(pair, n, false, true, parity); break;                                         \
        case 2: v##_pair_loop(pair, n, true, false, parity); break;                                         \
        default: v##_pair_loop(pair, n, true, true, parity); break;                                         \
        }                                                                                                   \
    }                                                                                                       \
    LEAF void v##_pair_whole(xdi_tile_pair *pair, int64_t n) {                                              \
        if (pair->x.bf16 && pair->y.bf16)                                                                   \
            v##_pair_kind(pair, n, true);                                                                   \
        else                                                                                                \
            v##_pair_kind(pair, n, false);                                                                  \
    }                                                                                                       \
    LEAF void v##_tile_pair(xdi_tile_pair *pair, int64_t n) {                                               \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                             \
        float x[2 * v##_lanes], y[2 * v##_lanes];                                                           \
        xdi_tile_pair rest = *pair;                                                                         \
        v##_pair_whole(pair, whole);                                                                        \
        if (whole == n) return;                                                                             \
        rest.x = xdi_simd_padded(rest.x, whole, n, two, -INFINITY, x);                                      \
        rest.y = xdi_simd_padded(rest.y, whole, n, two, XDI_TILE_LEAST, y);                                 \
        v##_pair_whole(&rest, two);                                                                         \
        pair->own += rest.own;                                                                              \
        pair->other += rest.other;                                                                          \
        pair->cross += rest.cross;                                                                          \
        pair->own_max = rest.own_max > pair->own_max ? rest.own_max : pair->own_max;                        \
        pair->other_max = rest.other_max > pair->other_max ? rest.other_max : pair->other_max;              \
        pair->infinite = pair->infinite || rest.infinite;                                                   \
    }

/* p and q, and log2(p/m) and log2(q/m). With d the difference of the logarithms, m is the larger of the two
 * times (larger share + smaller share 2^-d): no overflow, and no cancellation when p and q are close. */
#define XDI_TILES_MIXTURE(v, INLINE, LEAF)                                                                 \
    INLINE void v##_mix(const xdi_tile_mixture *m, v a, v b, v *p, v *q, v *p_ratio, v *q_ratio) {         \
        const xdi_tile_power unit = { 1.0f, 0.0f, -127.0f };                                               \
        const v p_share = v##_set(m->p_share), q_share = v##_set(m->q_share);                              \
        const v s = v##_sub(v##_exponent(v##_max(a, v##_set(m->p.low)), &m->p), v##_set(m->p_rest));       \
        const v t = v##_sub(v##_exponent(v##_max(b, v##_set(m->q.low)), &m->q), v##_set(m->q_rest));       \
        const v d = v##_sub(v##_min(s, t), v##_max(s, t));                                                 \
        const v large = v##_pick(s, t, p_share, q_share), small = v##_pick(s, t, q_share, p_share);        \
        const v log_mixture = v##_log2(v##_fma(small, v##_exp2(d, &unit), large));                         \
        const v above = v##_sub(v##_set(0.0f), log_mixture), below = v##_sub(d, log_mixture);              \
        *p = v##_exp2(a, &m->p);                                                                           \
        *q = v##_exp2(b, &m->q);                                                                           \
        *p_ratio = v##_pick(s, t, above, below);                                                           \
        *q_ratio = v##_pick(s, t, below, above);                                                           \
    }                                                                                                      \
    INLINE void v##_mixture_add(const xdi_tile_mixture *m, v a, v b, v *p_sums, v *q_sums) {               \
        v p, q, p_ratio, q_ratio;                                                                          \
        v##_mix(m, a, b, &p, &q, &p_ratio, &q_ratio);                                                      \
        *p_sums = v##_fma(p, v##_sub(p_ratio, v##_set(m->top)), *p_sums);                                  \
        *q_sums = v##_fma(q, q_ratio, *q_sums);                                                            \
    }                                                                                                      \
    INLINE void v##_mixture_loop(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *given,        \
                                 int64_t n, double *p_sum, double *q_sum, bool parity) {                   \
        const xdi_tile_mixture m = *given;                                                                 \
        v p_sums = v##_set(0.0f), q_sums = p_sums, a, b, c, d;                                             \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                   \
            v##_read_two(x, i, parity, &a, &b);                                                            \
            v##_read_two(y, i, parity, &c, &d);                                                            \
            v##_mixture_add(&m, a, c, &p_sums, &q_sums);                                                   \
            v##_mixture_add(&m, b, d, &p_sums, &q_sums);                                                   \
        }                                                                                                  \
        *p_sum = v##_total(p_sums);                                                                        \
        *q_sum = v##_total(q_sums);                                                                        \
    }                                                                                                      \
    LEAF void v##_mixture_whole(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *m,             \
                                int64_t n, double *p_sum, double *q_sum) {                                 \
        if (x.bf16 && y.bf16)                                                                              \
            v##_mixture_loop(x, y, m, n, p_sum, q_sum, true);                                              \
        else                                                                                               \
            v##_mixture_loop(x, y, m, n, p_sum, q_sum, false);                                             \
    }                                                                                                      \
    LEAF void v##_tile_mixture(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *m, int64_t n,   \
                               double *p_sum, double *q_sum) {                                             \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                            \
        float x_room[2 * v##_lanes], y_room[2 * v##_lanes];                                                \
        double p_rest, q_rest;                                                                             \
        v##_mixture_whole(x, y, m, whole, p_sum, q_sum);                                                   \
        if (whole == n) return;                                                                            \
        v##_mixture_whole(xdi_simd_padded(x, whole, n, two, -INFINITY, x_room),                            \
                          xdi_simd_padded(y, whole, n, two, -INFINITY, y_room), m, two, &p_rest, &q_rest); \
        *p_sum += p_rest;                                                                                  \
        *q_sum += q_rest;                                                                                  \
    }

#define XDI_TILES_GRADIENT(v, INLINE, LEAF)                                                                \
    INLINE v v##_soft(const xdi_tile_gradient *g, v a, v b, xdi_tile_soft soft) {                          \
        const v lowest = v##_set(-FLT_MAX);                                                                \
        v p, q, p_ratio, q_ratio;                                                                          \
        if (soft == XDI_TILE_MIXTURE) {                                                                    \
            v##_mix(&g->mixture, a, b, &p, &q, &p_ratio, &q_ratio);                                        \
            return v##_mul(v##_mul(v##_set(g->soft_scale), p), v##_sub(p_ratio, v##_set(g->mixture.top))); \
        }                                                                                                  \
        if (soft == XDI_TILE_OUTSIDE)                                                                      \
            p = v##_exp2(a, &g->p);                                                                        \
        else                                                                                               \
            p = v##_scaled_exp2(a, &g->p, g->soft_scale);                                                  \
        if (soft == XDI_TILE_FORWARD) return v##_sub(p, v##_scaled_exp2(b, &g->q, g->teacher_scale));      \
        const v s = v##_exponent(v##_max(v##_set(g->p.low), a), &g->p);                                    \
        if (soft == XDI_TILE_OUTSIDE)                                                                      \
            return v##_mul(p, v##_fma(v##_set(g->teacher_scale), s, v##_set(g->soft_scale)));              \
        const v t = v##_max(v##_exponent(b, &g->q), lowest);                                               \
        return v##_mul(p, v##_sub(v##_sub(s, t), v##_set(g->mean)));                                       \
    }                                                                                                      \
    INLINE v v##_gradient(const xdi_tile_gradient *g, v a, v b, bool hard, xdi_tile_soft soft) {           \
        v out = v##_set(0.0f);                                                                             \
        if (hard) out = v##_sub(v##_scaled_exp2(a, &g->h, g->hard_scale), v##_set(g->uniform));            \
        if (soft == XDI_TILE_NONE) return out;                                                             \
        const v more = v##_soft(g, a, b, soft);                                                            \
        return hard ? v##_add(out, more) : more;                                                           \
    }                                                                                                      \
    INLINE void v##_gradient_loop(const xdi_tile_gradient *g, int64_t n, bool hard, xdi_tile_soft soft,    \
                                  bool teacher, bool parity) {                                             \
        v a, b, c = v##_set(0.0f), d = c;                                                                  \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                   \
            v##_read_two(g->x, i, parity, &a, &b);                                                         \
            if (teacher) v##_read_two(g->y, i, parity, &c, &d);                                            \
            a = v##_gradient(g, a, c, hard, soft);                                                         \
            b = v##_gradient(g, b, d, hard, soft);                                                         \
            v##_write_two(g->out, i, parity, a, b);                                                        \
        }                                                                                                  \
    }                                                                                                      \
    INLINE void v##_gradient_kind(const xdi_tile_gradient *g, int64_t n, bool hard, xdi_tile_soft soft) {  \
        const bool teacher = soft != XDI_TILE_NONE && soft != XDI_TILE_OUTSIDE;                            \
        if (g->x.bf16 && g->out.bf16 && (!teacher || g->y.bf16))                                           \
            v##_gradient_loop(g, n, hard, soft, teacher, true);                                            \
        else                                                                                               \
            v##_gradient_loop(g, n, hard, soft, teacher, false);                                           \
    }                                                                                                      \
    LEAF void v##_gradient_whole(const xdi_tile_gradient *given, xdi_tile_soft soft, int64_t n) {          \
        const xdi_tile_gradient g = *given; /* stores cannot change a copy */                              \
        switch ((int)soft * 2 + (g.hard ? 1 : 0)) {                                                        \
        case XDI_TILE_NONE * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_NONE); break;                  \
        case XDI_TILE_FORWARD * 2: v##_gradient_kind(&g, n, false, XDI_TILE_FORWARD); break;               \
        case XDI_TILE_FORWARD * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_FORWARD); break;            \
        case XDI_TILE_REVERSE * 2: v##_gradient_kind(&g, n, false, XDI_TILE_REVERSE); break;               \
        case XDI_TILE_REVERSE * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_REVERSE); break;            \
        case XDI_TILE_MIXTURE * 2: v##_gradient_kind(&g, n, false, XDI_TILE_MIXTURE); break;               \
        case XDI_TILE_MIXTURE * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_MIXTURE); break;            \
        case XDI_TILE_OUTSIDE * 2: v##_gradient_kind(&g, n, false, XDI_TILE_OUTSIDE); break;               \
        default: v##_gradient_kind(&g, n, false, XDI_TILE_NONE); break;                                    \
        }                                                                                                  \
    }                                                                                                      \
    LEAF void v##_tile_gradient(const xdi_tile_gradient *g, xdi_tile_soft soft, int64_t n) {               \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                            \
        float x[2 * v##_lanes], y[2 * v##_lanes], out[2 * v##_lanes];                                      \
        xdi_tile_gradient rest = *g;                                                                       \
        if (whole < n) { /* read before anything is written, which may be the same memory */               \
            rest.x = xdi_simd_padded(g->x, whole, n, two, -INFINITY, x);                                   \
            if (g->y.data) rest.y = xdi_simd_padded(g->y, whole, n, two, -INFINITY, y);                    \
            rest.out.data = out;                                                                           \
        }                                                                                                  \
        v##_gradient_whole(g, soft, whole);                                                                \
        if (whole == n) return;                                                                            \
        v##_gradient_whole(&rest, soft, two);                                                              \
        xdi_simd_copy(rest.out, 0, n - whole, g->out, whole);                                              \
    }

#define XDI_TILES(v, INLINE, LEAF)                                           \
    XDI_TILES_SUMS(v, INLINE, LEAF)                                          \
    XDI_TILES_PAIR(v, INLINE, LEAF)                                          \
    XDI_TILES_MIXTURE(v, INLINE, LEAF)                                       \
    XDI_TILES_GRADIENT(v, INLINE, LEAF)                                      \
    static const xdi_tiles v##_tiles = {                                     \
        v##_tile_max,     v##_tile_linear,   v##_tile_sum,   v##_tile_pair,  \
        v##_tile_mixture, v##_tile_gradient, v##_tile_raise, v##_tile_collect \
    };

/* Without a compressing store: every index is written, and the next one over it when it does not count. */
static int64_t xdi_v4_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                   int64_t room) {
    int64_t count = 0;
    for (int64_t i = 0; i < n && count < room; i++) {
        const float a = x.bf16 ? xd_f32_from_bf16(((const uint16_t *)x.data)[i]) : ((const float *)x.data)[i];
        indices[count] = (uint32_t)i;
        count += a >= threshold ? 1 : 0;
    }
    return count;
}

XDI_TILES(xdi_v4, XDI_SIMD_INLINE, XDI_SIMD_128)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

XDI_SIMD_256 int64_t xdi_v8_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                         int64_t room) {
    return xdi_v4_tile_collect(x, n, threshold, indices, room);
}

/* Rows of 16: the indices that count move to the front of the vector, which is written whole. */
XDI_SIMD_512 int64_t xdi_v16_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                          int64_t room) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const xdi_v16 limit = xdi_v16_set(threshold);
    int64_t count = 0, i = 0;
    for (; i + 16 <= n && count + 16 <= room; i += 16) {
        const __mmask16 mask = _mm512_cmp_ps_mask(xdi_v16_load(x, i), limit, _CMP_GE_OQ);
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)i));
        _mm512_storeu_si512((void *)(indices + count), _mm512_maskz_compress_epi32(mask, at));
        count += __builtin_popcount((unsigned)mask);
    }
    for (; i < n && count < room; i++) {
        const float a = x.bf16 ? xd_f32_from_bf16(((const uint16_t *)x.data)[i]) : ((const float *)x.data)[i];
        if (a >= threshold) indices[count++] = (uint32_t)i;
    }
    return count;
}

XDI_TILES(xdi_v8, XDI_SIMD_INLINE_256, XDI_SIMD_256)
XDI_TILES(xdi_v16, XDI_SIMD_INLINE_512, XDI_SIMD_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

XD_PRIVATE const xdi_tiles *xdi_tiles_of(xd_cpu_level level) {
    switch (level) {
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_v8_tiles;
    case XD_CPU_AVX512:
    case XD_CPU_AVX512_BF16: return &xdi_v16_tiles;
#endif
    default: return &xdi_v4_tiles;
    }
}
