/* The loops of losses over a part of a row, in three widths. */

#include "kernel/simd/simd_math.h"

#include <float.h>
#include <math.h>

XD_PRIVATE xdi_tile_power xdi_tile_power_of(double factor, double whole) {
    xdi_tile_power power;
    power.factor = (float)factor;
    power.whole = (float)whole;
    power.low = (float)((whole - 127.0) / (double)power.factor);
    return power;
}

/* How many vectors take a long way together, step by step; and where differences of logarithms are cut off. */
enum { XDI_TILE_BLOCK = 32 };
#define XDI_TILE_APART 120.0f

/* Where a tile is filled up so that what is less is left out: finite, and its exponent too. */
#define XDI_TILE_LEAST (-1e30f)

/* What follows is written once for every vector width v, as a macro that defines v_... functions with the
 * attributes INLINE and LEAF. */

#define XDI_TILES_SUMS(v, INLINE, LEAF)                                                                 \
    /* The largest element; NaN when there is one, which maxima leave out. */                           \
    INLINE float v##_max_slowly(xdi_simd_array x, int64_t n) {                                          \
        v max = v##_set(-INFINITY), nan = v##_set(0.0f);                                                \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                    \
            const v a = v##_read(x, i, n, -INFINITY);                                                   \
            max = v##_max(a, max);                                                                      \
            nan = v##_pick(a, a, nan, v##_set(1.0f));                                                   \
        }                                                                                               \
        return v##_largest(nan) > 0.0f ? NAN : v##_largest(max);                                        \
    }                                                                                                   \
    /* Of twice whole vectors. 0 times what is not finite is NaN, which stays in `odd`: then slowly. */ \
    INLINE float v##_max_loop(xdi_simd_array x, int64_t n, bool parity) {                               \
        const v zero = v##_set(0.0f);                                                                   \
        v max = v##_set(-INFINITY), more = max, odd = zero, odder = zero, a, b;                         \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                \
            v##_read_two(x, i, parity, &a, &b);                                                         \
            max = v##_max(a, max);                                                                      \
            more = v##_max(b, more);                                                                    \
            odd = v##_fma(a, zero, odd);                                                                \
            odder = v##_fma(b, zero, odder);                                                            \
        }                                                                                               \
        if (v##_total(v##_add(odd, odder)) != 0.0) return v##_max_slowly(x, n);                         \
        return v##_largest(v##_max(max, more));                                                         \
    }                                                                                                   \
    LEAF float v##_tile_max(xdi_simd_array x, int64_t n) {                                              \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                         \
        float room[2 * v##_lanes];                                                                      \
        const float max = x.bf16 ? v##_max_loop(x, whole, true) : v##_max_loop(x, whole, false);        \
        if (whole == n) return max;                                                                     \
        const float rest = v##_max_slowly(xdi_simd_padded(x, whole, n, two, -INFINITY, room), two);     \
        return rest > max || rest != rest ? rest : max;                                                 \
    }                                                                                                   \
    LEAF void v##_tile_raise(xdi_simd_array x, int64_t n, float *maxima) {                              \
        xdi_simd_array to;                                                                              \
        to.data = maxima;                                                                               \
        to.bf16 = false;                                                                                \
        for (int64_t i = 0; i < n; i += v##_lanes)                                                      \
            v##_write(to, i, n, v##_max(v##_read(x, i, n, -INFINITY), v##_read(to, i, n, 0.0f)));       \
    }                                                                                                   \
    LEAF double v##_tile_linear(xdi_simd_array x, int64_t n, float reference) {                         \
        v sum = v##_set(0.0f);                                                                          \
        const v from = v##_set(reference);                                                              \
        for (int64_t i = 0; i < n; i += v##_lanes)                                                      \
            sum = v##_add(sum, v##_sub(v##_read(x, i, n, reference), from));                            \
        return v##_total(sum);                                                                          \
    }                                                                                                   \
    /* The largest of n elements, NaN left out, from what `top` kept of them. Representations */        \
    /* order numbers that are not negative; else, or with a NaN, the numbers are compared. */           \
    INLINE float v##_top_value(xdi_simd_array x, int64_t n, v##_bits tops, bool parity) {               \
        const int32_t bits = v##_top_bits(tops, parity);                                                \
        v largest = v##_set(-INFINITY);                                                                 \
        float top;                                                                                      \
        memcpy(&top, &bits, sizeof top);                                                                \
        if (bits >= 0 && top <= INFINITY) return top;                                                   \
        for (int64_t i = 0; i < n; i += v##_lanes) largest = v##_max(v##_load(x, i), largest);          \
        return v##_largest(largest);                                                                    \
    }                                                                                                   \
    INLINE double v##_sum_loop(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment,       \
                               float *max, bool parity) {                                               \
        const v zero = v##_set(0.0f), low = v##_set(power.low);                                         \
        v sum = zero, more = zero, moments = zero, a, b;                                                \
        v##_bits tops = v##_no_top();                                                                   \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                \
            v##_read_two(x, i, parity, &a, &b);                                                         \
            tops = parity ? v##_top_two(tops, x, i) : v##_top(v##_top(tops, a), b);                     \
            if (!moment) {                                                                              \
                sum = v##_add_exp2(a, &power, sum);                                                     \
                more = v##_add_exp2(b, &power, more);                                                   \
                continue;                                                                               \
            }                                                                                           \
            const v e = v##_exp2(a, &power), f = v##_exp2(b, &power);                                   \
            sum = v##_add(sum, e);                                                                      \
            more = v##_add(more, f);                                                                    \
            moments = v##_fma(e, v##_exponent(v##_max(low, a), &power), moments);                       \
            moments = v##_fma(f, v##_exponent(v##_max(low, b), &power), moments);                       \
        }                                                                                               \
        if (moment) *moment = v##_total(moments);                                                       \
        *max = v##_top_value(x, n, tops, parity);                                                       \
        return v##_total(v##_add(sum, more));                                                           \
    }                                                                                                   \
    LEAF double v##_sum_whole(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment,        \
                              float *max) {                                                             \
        if (moment && x.bf16) return v##_sum_loop(x, n, power, moment, max, true);                      \
        if (moment) return v##_sum_loop(x, n, power, moment, max, false);                               \
        if (x.bf16) return v##_sum_loop(x, n, power, NULL, max, true);                                  \
        return v##_sum_loop(x, n, power, NULL, max, false);                                             \
    }                                                                                                   \
    LEAF double v##_tile_sum(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment,         \
                             float *max) {                                                              \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                         \
        float room[2 * v##_lanes], rest_max;                                                            \
        double rest_moment = 0.0, sum = v##_sum_whole(x, whole, power, moment, max);                    \
        if (whole == n) return sum;                                                                     \
        const xdi_simd_array rest = xdi_simd_padded(x, whole, n, two, -INFINITY, room);                 \
        sum += v##_sum_whole(rest, two, power, moment ? &rest_moment : NULL, &rest_max);                \
        if (moment) *moment += rest_moment;                                                             \
        if (rest_max > *max) *max = rest_max;                                                           \
        return sum;                                                                                     \
    }

#define XDI_TILES_PAIR(v, INLINE, LEAF)                                                                     \
    typedef struct v##_pair_sums {                                                                          \
        v own, other, cross, infinite;                                                                      \
    } v##_pair_sums;                                                                                        \
    /* cross: (log2 p - log2 q) / factor, less `back`, from the difference of the elements, which loses */  \
    /* less than each by itself. */                                                                         \
    INLINE void v##_pair_add(v##_pair_sums *sums, const xdi_tile_pair *pair, v a, v b, float back,          \
                             bool careful, bool own, v *kept) {                                             \
        const v zero = v##_set(0.0f), one = v##_set(1.0f), lowest = v##_set(XDI_TILE_LEAST);                \
        const v e = v##_exp2(a, &pair->p), left = own ? v##_max(v##_set(pair->p.low), a) : zero;            \
        v right = b;                                                                                        \
        if (careful) {                                                                                      \
            const v missing = v##_pick(b, lowest, zero, v##_pick(a, v##_set(-FLT_MAX), one, zero));         \
            sums->infinite = v##_max(missing, sums->infinite);                                              \
            right = v##_max(lowest, b);                                                                     \
        }                                                                                                   \
        sums->own = v##_add(sums->own, e);                                                                  \
        if (kept) {                                                                                         \
            const v f = v##_exp2(b, &pair->q);                                                              \
            sums->other = v##_add(sums->other, f);                                                          \
            kept[0] = e;                                                                                    \
            kept[1] = f;                                                                                    \
        } else {                                                                                            \
            sums->other = v##_add_exp2(b, &pair->q, sums->other);                                           \
        }                                                                                                   \
        sums->cross = v##_fma(e, v##_sub(v##_sub(left, right), v##_set(back)), sums->cross);                \
    }                                                                                                       \
    INLINE void v##_keep_two(float *kept, int64_t i, v a, v b) {                                            \
        xdi_simd_array to;                                                                                  \
        to.data = kept;                                                                                     \
        to.bf16 = false;                                                                                    \
        v##_store(to, i, a);                                                                                \
        v##_store(to, i + v##_lanes, b);                                                                    \
    }                                                                                                       \
    INLINE void v##_pair_loop(xdi_tile_pair *pair, int64_t n, bool careful, bool own, bool parity,          \
                              bool keeps) {                                                                 \
        const xdi_tile_pair given = *pair;                                                                  \
        const double factor = (double)given.q.factor;                                                       \
        const double exact = (own ? (double)given.p.whole : 0.0) - (double)given.q.whole;                   \
        const float back = (float)(exact / factor);                                                         \
        v##_bits own_tops = v##_no_top(), other_tops = own_tops;                                            \
        v##_pair_sums s, r; /* of every other vector */                                                     \
        v a, b, c, d, first[2], second[2];                                                                  \
        s.own = s.other = s.cross = s.infinite = v##_set(0.0f);                                             \
        r = s;                                                                                              \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                    \
            v##_read_two(given.x, i, parity, &a, &b);                                                       \
            v##_read_two(given.y, i, parity, &c, &d);                                                       \
            own_tops = parity ? v##_top_two(own_tops, given.x, i) : v##_top(v##_top(own_tops, a), b);       \
            other_tops = parity ? v##_top_two(other_tops, given.y, i) : v##_top(v##_top(other_tops, c), d); \
            v##_pair_add(&s, &given, a, c, back, careful, own, keeps ? first : NULL);                       \
            v##_pair_add(&r, &given, b, d, back, careful, own, keeps ? second : NULL);                      \
            if (!keeps) continue;                                                                           \
            v##_keep_two(given.kept, i, first[0], second[0]);                                               \
            v##_keep_two(given.kept + XDI_TILE, i, first[1], second[1]);                                    \
        }                                                                                                   \
        pair->own = v##_total(v##_add(s.own, r.own));                                                       \
        pair->other = v##_total(v##_add(s.other, r.other));                                                 \
        pair->cross = factor * v##_total(v##_add(s.cross, r.cross));                                        \
        pair->cross += (factor * (double)back - exact) * pair->own; /* what back is off by */               \
        pair->own_max = v##_top_value(given.x, n, own_tops, parity);                                        \
        pair->other_max = v##_top_value(given.y, n, other_tops, parity);                                    \
        pair->infinite = careful && v##_largest(v##_max(s.infinite, r.infinite)) > 0.0f;                    \
    }                                                                                                       \
    INLINE void v##_pair_kind(xdi_tile_pair *pair, int64_t n, bool parity) {                                \
        switch ((pair->careful ? 2 : 0) + (pair->own_weight != 0.0f ? 1 : 0)) {                             \
        case 0: v##_pair_loop(pair, n, false, false, parity, false); break;                                 \
        case 1: v##_pair_loop(pair, n, false, true, parity, false); break;                                  \
        case 2: v##_pair_loop(pair, n, true, false, parity, false); break;                                  \
        default: v##_pair_loop(pair, n, true, true, parity, false); break;                                  \
        }                                                                                                   \
    }                                                                                                       \
    LEAF void v##_pair_whole(xdi_tile_pair *pair, int64_t n) {                                              \
        if (pair->kept && pair->careful)                                                                    \
            v##_pair_loop(pair, n, true, true, true, true);                                                 \
        else if (pair->kept)                                                                                \
            v##_pair_loop(pair, n, false, true, true, true);                                                \
        else if (pair->x.bf16 && pair->y.bf16)                                                              \
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
        if (pair->kept) rest.kept = pair->kept + whole;                                                     \
        v##_pair_whole(&rest, two);                                                                         \
        pair->own += rest.own;                                                                              \
        pair->other += rest.other;                                                                          \
        pair->cross += rest.cross;                                                                          \
        pair->own_max = rest.own_max > pair->own_max ? rest.own_max : pair->own_max;                        \
        pair->other_max = rest.other_max > pair->other_max ? rest.other_max : pair->other_max;              \
        pair->infinite = pair->infinite || rest.infinite;                                                   \
    }

/* With d = log2(q/p), the mixture m is p times (share of p + share of q 2^d): nothing cancels when p and q are
 * close. Where d is cut off, p or q is next to nothing. All of it is one long chain, of which a processor sees
 * too few at a time: so some vectors take one step after the other. */
#define XDI_TILES_MIXTURE(v, INLINE, LEAF)                                                                 \
    typedef struct v##_mixed {                                                                             \
        v p[XDI_TILE_BLOCK], q[XDI_TILE_BLOCK]; /* log2(m/p), log2(m/q) */                                 \
    } v##_mixed;                                                                                           \
    INLINE v v##_apart(const xdi_tile_mixture *m, v a, v b) {                                              \
        const v s = v##_exponent(v##_max(v##_set(m->p.low), a), &m->p);                                    \
        const v t = v##_exponent(v##_max(v##_set(m->q.low), b), &m->q);                                    \
        const v d = v##_sub(v##_sub(t, s), v##_set(m->q_rest - m->p_rest));                                \
        return v##_min(v##_max(d, v##_set(-XDI_TILE_APART)), v##_set(XDI_TILE_APART));                     \
    }                                                                                                      \
    INLINE v v##_mixture(const xdi_tile_mixture *m, v apart) {                                             \
        const xdi_tile_power unit = { 1.0f, 0.0f, -XDI_TILE_APART };                                       \
        return v##_fma(v##_set(m->q_share), v##_exp2(apart, &unit), v##_set(m->p_share));                  \
    }                                                                                                      \
    /* Of elements [begin, end), whole vectors. log2(m/q) is log2(m/p) - d, whose large parts go first. */ \
    INLINE void v##_mix(const xdi_tile_mixture *m, xdi_simd_array x, xdi_simd_array y, int64_t begin,      \
                        int64_t end, bool parity, bool both, v##_mixed *out) {                             \
        v a, b, c, d, rest, exponent;                                                                      \
        int at = 0;                                                                                        \
        for (int64_t i = begin; i < end; i += 2 * v##_lanes, at += 2) {                                    \
            v##_read_two(x, i, parity, &a, &b);                                                            \
            v##_read_two(y, i, parity, &c, &d);                                                            \
            a = v##_apart(m, a, c);                                                                        \
            b = v##_apart(m, b, d);                                                                        \
            out->p[at] = v##_mixture(m, a);                                                                \
            out->p[at + 1] = v##_mixture(m, b);                                                            \
            if (!both) continue;                                                                           \
            out->q[at] = a;                                                                                \
            out->q[at + 1] = b;                                                                            \
        }                                                                                                  \
        for (int i = 0; i < at; i++) {                                                                     \
            a = v##_log2_parts(out->p[i], &rest, &exponent);                                               \
            out->p[i] = v##_fma(a, rest, exponent);                                                        \
            if (both) out->q[i] = v##_mul_sub(a, rest, v##_sub(out->q[i], exponent));                      \
        }                                                                                                  \
    }                                                                                                      \
    INLINE void v##_mixture_loop(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *given,        \
                                 int64_t n, double *p_sum, double *q_sum, bool parity) {                   \
        const xdi_tile_mixture m = *given;                                                                 \
        const v top = v##_set(m.top);                                                                      \
        v p_sums = v##_set(0.0f), q_sums = p_sums, a, b, c, d;                                             \
        v##_mixed mixed;                                                                                   \
        for (int64_t i = 0, end; i < n; i = end) {                                                         \
            int at = 0;                                                                                    \
            end = i + XDI_TILE_BLOCK * v##_lanes;                                                          \
            if (end > n) end = n;                                                                          \
            v##_mix(&m, x, y, i, end, parity, true, &mixed);                                               \
            for (int64_t j = i; j < end; j += 2 * v##_lanes, at += 2) {                                    \
                v##_read_two(x, j, parity, &a, &b);                                                        \
                v##_read_two(y, j, parity, &c, &d);                                                        \
                p_sums = v##_fma(v##_exp2(a, &m.p), v##_add(mixed.p[at], top), p_sums);                    \
                q_sums = v##_fma(v##_exp2(c, &m.q), mixed.q[at], q_sums);                                  \
                p_sums = v##_fma(v##_exp2(b, &m.p), v##_add(mixed.p[at + 1], top), p_sums);                \
                q_sums = v##_fma(v##_exp2(d, &m.q), mixed.q[at + 1], q_sums);                              \
            }                                                                                              \
        }                                                                                                  \
        *p_sum = -v##_total(p_sums);                                                                       \
        *q_sum = -v##_total(q_sums);                                                                       \
    }                                                                                                      \
    LEAF void v##_mixture_whole(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *m, int64_t n,  \
                                double *p_sum, double *q_sum) {                                            \
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

#define XDI_TILES_GRADIENT(v, INLINE, LEAF)                                                               \
    INLINE v v##_soft(const xdi_tile_gradient *g, v a, v b, xdi_tile_soft soft) {                         \
        const v lowest = v##_set(-FLT_MAX);                                                               \
        v p;                                                                                              \
        if (soft == XDI_TILE_OUTSIDE)                                                                     \
            p = v##_exp2(a, &g->p);                                                                       \
        else                                                                                              \
            p = v##_scaled_exp2(a, &g->p, g->soft_scale);                                                 \
        if (soft == XDI_TILE_FORWARD) return v##_sub(p, v##_scaled_exp2(b, &g->q, g->teacher_scale));     \
        const v s = v##_exponent(v##_max(v##_set(g->p.low), a), &g->p);                                   \
        if (soft == XDI_TILE_OUTSIDE)                                                                     \
            return v##_mul(p, v##_fma(v##_set(g->teacher_scale), s, v##_set(g->soft_scale)));             \
        const v t = v##_max(v##_exponent(b, &g->q), lowest);                                              \
        return v##_mul(p, v##_sub(v##_sub(s, t), v##_set(g->mean)));                                      \
    }                                                                                                     \
    INLINE v v##_gradient(const xdi_tile_gradient *g, v a, v b, bool hard, xdi_tile_soft soft) {          \
        v out = v##_set(0.0f);                                                                            \
        if (hard) { /* less what every element gets */                                                    \
            v whole;                                                                                      \
            const v fraction = v##_exp2_parts(a, &g->h, g->hard_scale, &whole);                           \
            out = v##_mul_sub(fraction, whole, v##_set(g->uniform));                                      \
        }                                                                                                 \
        if (soft == XDI_TILE_NONE) return out;                                                            \
        const v more = v##_soft(g, a, b, soft);                                                           \
        return hard ? v##_add(out, more) : more;                                                          \
    }                                                                                                     \
    INLINE v v##_mixture_gradient(const xdi_tile_gradient *g, v a, v log, bool hard) {                    \
        const v p = v##_scaled_exp2(a, &g->mixture.p, -g->soft_scale);                                    \
        const v out = v##_mul(p, v##_add(log, v##_set(g->mixture.top)));                                  \
        return hard ? v##_add(v##_gradient(g, a, a, true, XDI_TILE_NONE), out) : out;                     \
    }                                                                                                     \
    INLINE void v##_mixture_gradient_loop(const xdi_tile_gradient *g, int64_t n, bool hard, bool parity,  \
                                          bool sent) {                                                    \
        v a, b;                                                                                           \
        v##_mixed mixed;                                                                                  \
        for (int64_t i = 0, end; i < n; i = end) {                                                        \
            int at = 0;                                                                                   \
            end = i + XDI_TILE_BLOCK * v##_lanes;                                                         \
            if (end > n) end = n;                                                                         \
            v##_mix(&g->mixture, g->x, g->y, i, end, parity, false, &mixed);                              \
            for (int64_t j = i; j < end; j += 2 * v##_lanes, at += 2) {                                   \
                v##_read_two(g->x, j, parity, &a, &b);                                                    \
                a = v##_mixture_gradient(g, a, mixed.p[at], hard);                                        \
                b = v##_mixture_gradient(g, b, mixed.p[at + 1], hard);                                    \
                if (sent)                                                                                 \
                    v##_send_two(g->out, j, parity, a, b);                                                \
                else                                                                                      \
                    v##_write_two(g->out, j, parity, a, b);                                               \
            }                                                                                             \
        }                                                                                                 \
    }                                                                                                     \
    INLINE void v##_gradient_loop(const xdi_tile_gradient *g, int64_t n, bool hard, xdi_tile_soft soft,   \
                                  bool teacher, bool parity, bool sent) {                                 \
        v a, b, c = v##_set(0.0f), d = c;                                                                 \
        if (soft == XDI_TILE_MIXTURE) {                                                                   \
            v##_mixture_gradient_loop(g, n, hard, parity, sent);                                          \
            return;                                                                                       \
        }                                                                                                 \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                                                  \
            v##_read_two(g->x, i, parity, &a, &b);                                                        \
            if (teacher) v##_read_two(g->y, i, parity, &c, &d);                                           \
            if (teacher && g->ahead[0] && i % 32 == 0)                                                    \
                __builtin_prefetch(g->ahead[i / 32 % 2] + i / 64 * XDI_SIMD_LINE);                        \
            a = v##_gradient(g, a, c, hard, soft);                                                        \
            b = v##_gradient(g, b, d, hard, soft);                                                        \
            if (sent)                                                                                     \
                v##_send_two(g->out, i, parity, a, b);                                                    \
            else                                                                                          \
                v##_write_two(g->out, i, parity, a, b);                                                   \
        }                                                                                                 \
    }                                                                                                     \
    INLINE void v##_gradient_kind(const xdi_tile_gradient *g, int64_t n, bool hard, xdi_tile_soft soft) { \
        const bool teacher = soft != XDI_TILE_NONE && soft != XDI_TILE_OUTSIDE;                           \
        if (g->x.bf16 && g->out.bf16 && (!teacher || g->y.bf16)) {                                        \
            if (g->streamed)                                                                              \
                v##_gradient_loop(g, n, hard, soft, teacher, true, true);                                 \
            else                                                                                          \
                v##_gradient_loop(g, n, hard, soft, teacher, true, false);                                \
        } else if (g->streamed && !g->out.bf16) {                                                         \
            v##_gradient_loop(g, n, hard, soft, teacher, false, true);                                    \
        } else {                                                                                          \
            v##_gradient_loop(g, n, hard, soft, teacher, false, false);                                   \
        }                                                                                                 \
    }                                                                                                     \
    LEAF void v##_gradient_whole(const xdi_tile_gradient *given, xdi_tile_soft soft, int64_t n) {         \
        const xdi_tile_gradient g = *given; /* stores cannot change a copy */                             \
        switch ((int)soft * 2 + (g.hard ? 1 : 0)) {                                                       \
        case XDI_TILE_NONE * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_NONE); break;                 \
        case XDI_TILE_FORWARD * 2: v##_gradient_kind(&g, n, false, XDI_TILE_FORWARD); break;              \
        case XDI_TILE_FORWARD * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_FORWARD); break;           \
        case XDI_TILE_REVERSE * 2: v##_gradient_kind(&g, n, false, XDI_TILE_REVERSE); break;              \
        case XDI_TILE_REVERSE * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_REVERSE); break;           \
        case XDI_TILE_MIXTURE * 2: v##_gradient_kind(&g, n, false, XDI_TILE_MIXTURE); break;              \
        case XDI_TILE_MIXTURE * 2 + 1: v##_gradient_kind(&g, n, true, XDI_TILE_MIXTURE); break;           \
        case XDI_TILE_OUTSIDE * 2: v##_gradient_kind(&g, n, false, XDI_TILE_OUTSIDE); break;              \
        default: v##_gradient_kind(&g, n, false, XDI_TILE_NONE); break;                                   \
        }                                                                                                 \
    }                                                                                                     \
    LEAF void v##_tile_gradient(const xdi_tile_gradient *g, xdi_tile_soft soft, int64_t n) {              \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;                                           \
        float x[2 * v##_lanes], y[2 * v##_lanes], out[2 * v##_lanes];                                     \
        xdi_tile_gradient rest = *g;                                                                      \
        if (whole < n) { /* read before anything is written, which may be the same memory */              \
            rest.x = xdi_simd_padded(g->x, whole, n, two, -INFINITY, x);                                  \
            if (g->y.data) rest.y = xdi_simd_padded(g->y, whole, n, two, -INFINITY, y);                   \
            rest.out.data = out;                                                                          \
            rest.streamed = false;                                                                        \
        }                                                                                                 \
        v##_gradient_whole(g, soft, whole);                                                               \
        if (whole == n) return;                                                                           \
        v##_gradient_whole(&rest, soft, two);                                                             \
        xdi_simd_copy(rest.out, 0, n - whole, g->out, whole);                                             \
    }

#define XDI_TILES_KEPT(v, INLINE, LEAF)                                       \
    INLINE v v##_kept_at(const xdi_tile_kept *g, int64_t i) {                 \
        xdi_simd_array p, q;                                                  \
        p.data = g->p;                                                        \
        q.data = g->q;                                                        \
        p.bf16 = q.bf16 = false;                                              \
        return v##_sub(v##_mul(v##_set(g->p_scale), v##_load(p, i)),          \
                       v##_mul(v##_set(g->q_scale), v##_load(q, i)));         \
    }                                                                         \
    INLINE void v##_kept_loop(const xdi_tile_kept *g, int64_t n, bool sent) { \
        for (int64_t i = 0; i < n; i += 2 * v##_lanes) {                      \
            const v a = v##_kept_at(g, i), b = v##_kept_at(g, i + v##_lanes); \
            if (sent)                                                         \
                v##_stream_two(g->out, i, a, b);                              \
            else                                                              \
                v##_store_two(g->out, i, a, b);                               \
        }                                                                     \
    }                                                                         \
    LEAF void v##_tile_kept(const xdi_tile_kept *given, int64_t n) {          \
        const int64_t two = 2 * v##_lanes, whole = n - n % two;               \
        uint16_t out[2 * v##_lanes];                                          \
        xdi_tile_kept g = *given; /* stores cannot change a copy */           \
        if (g.streamed)                                                       \
            v##_kept_loop(&g, whole, true);                                   \
        else                                                                  \
            v##_kept_loop(&g, whole, false);                                  \
        if (whole == n) return;                                               \
        g.p += whole;                                                         \
        g.q += whole;                                                         \
        g.out.data = out;                                                     \
        v##_kept_loop(&g, two, false);                                        \
        xdi_simd_copy(g.out, 0, n - whole, given->out, whole);                \
    }

#define XDI_TILES(v, INLINE, LEAF)                                                              \
    XDI_TILES_SUMS(v, INLINE, LEAF)                                                             \
    XDI_TILES_PAIR(v, INLINE, LEAF)                                                             \
    XDI_TILES_MIXTURE(v, INLINE, LEAF)                                                          \
    XDI_TILES_GRADIENT(v, INLINE, LEAF)                                                         \
    XDI_TILES_KEPT(v, INLINE, LEAF)                                                             \
    LEAF void v##_tile_fence(void) {                                                            \
        v##_fence();                                                                            \
    }                                                                                           \
    static const xdi_tiles v##_tiles = { v##_tile_max,     v##_tile_linear,  v##_tile_sum,      \
                                         v##_tile_pair,    v##_tile_mixture, v##_tile_gradient, \
                                         v##_tile_kept,    v##_tile_fence,   v##_tile_raise,    \
                                         v##_tile_collect, v##_tile_range,   v##_tile_offsets,  \
                                         v##_tile_unpack };

/* ---- what selections need ---- */

/* Elements [i, n), when `count` have been found before them. Every index is written, and the next one over it
 * when it does not count. */
static int64_t xdi_tile_collect_rest(xdi_simd_array x, int64_t i, int64_t n, float threshold,
                                     uint32_t *indices, uint32_t *keys, int64_t count, int64_t room) {
    for (; i < n && count < room; i++) {
        const float a = x.bf16 ? xd_f32_from_bf16(((const uint16_t *)x.data)[i]) : ((const float *)x.data)[i];
        indices[count] = (uint32_t)i;
        keys[count] = xdi_tile_key(a);
        count += a >= threshold ? 1 : 0;
    }
    return count;
}

static int64_t xdi_v4_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                   uint32_t *keys, int64_t room) {
    return xdi_tile_collect_rest(x, 0, n, threshold, indices, keys, 0, room);
}

static void xdi_v4_tile_range(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last) {
    *first = *last = keys[0];
    for (int64_t i = 1; i < n; i++) {
        *first = keys[i] < *first ? keys[i] : *first;
        *last = keys[i] > *last ? keys[i] : *last;
    }
}

static void xdi_v4_tile_offsets(uint32_t *bins, int64_t n) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t count = bins[i];
        bins[i] = sum;
        sum += count;
    }
}

static bool xdi_v4_tile_unpack(const uint64_t *records, int64_t n, int64_t first, double *values,
                               int64_t *ids) {
    bool zero = false;
    for (int64_t j = 0; j < n; j++) {
        values[j] = (double)xdi_tile_of_key((uint32_t)(records[j] >> 32));
        ids[j] = first + (int64_t)(records[j] & 0xffffffffu);
        zero = zero || values[j] == 0.0;
    }
    return zero;
}

XDI_TILES(xdi_v4, XDI_SIMD_INLINE, XDI_SIMD_128)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* The lanes of four that a mask names, before the others. */
static const int32_t xdi_v8_front[16][4] = { { 0, 1, 2, 3 }, { 0, 1, 2, 3 }, { 1, 0, 2, 3 }, { 0, 1, 2, 3 },
                                             { 2, 0, 1, 3 }, { 0, 2, 1, 3 }, { 1, 2, 0, 3 }, { 0, 1, 2, 3 },
                                             { 3, 0, 1, 2 }, { 0, 3, 1, 2 }, { 1, 3, 0, 2 }, { 0, 1, 3, 2 },
                                             { 2, 3, 0, 1 }, { 0, 2, 3, 1 }, { 1, 2, 3, 0 }, { 0, 1, 2, 3 } };

/* Keys from the bits of numbers, and the other way round. */
XDI_SIMD_INLINE_256 __m256i xdi_v8_key(__m256i bits) {
    const __m256i below = _mm256_srai_epi32(bits, 31);
    return _mm256_xor_si256(bits, _mm256_andnot_si256(below, _mm256_set1_epi32(0x7fffffff)));
}

/* What counts of each half moves to its front; the halves are written one after the other. */
XDI_SIMD_INLINE_256 void xdi_v8_collect_halves(__m256i x, __m256i order, int64_t low, uint32_t *to) {
    const __m256i moved = _mm256_castps_si256(_mm256_permutevar_ps(_mm256_castsi256_ps(x), order));
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(moved));
    _mm_storeu_si128((__m128i *)(void *)(to + low), _mm256_extracti128_si256(moved, 1));
}

XDI_SIMD_256 int64_t xdi_v8_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                         uint32_t *keys, int64_t room) {
    const xdi_v8 limit = xdi_v8_set(threshold), zero = xdi_v8_set(0.0f);
    __m256i at = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    int64_t count = 0, i = 0;
    for (; i + 8 <= n && count + 8 <= room; i += 8) {
        const xdi_v8 a = xdi_v8_load(x, i);
        const int mask = _mm256_movemask_ps(_mm256_cmp_ps(a, limit, _CMP_GE_OQ)), low = mask & 15;
        const __m128i front = _mm_loadu_si128((const __m128i *)(const void *)xdi_v8_front[low]);
        const __m128i back = _mm_loadu_si128((const __m128i *)(const void *)xdi_v8_front[mask >> 4]);
        const __m256i order = _mm256_inserti128_si256(_mm256_castsi128_si256(front), back, 1);
        const int64_t kept = __builtin_popcount((unsigned)low);
        xdi_v8_collect_halves(at, order, kept, indices + count);
        xdi_v8_collect_halves(xdi_v8_key(_mm256_castps_si256(_mm256_add_ps(a, zero))), order, kept,
                              keys + count);
        count += __builtin_popcount((unsigned)mask);
        at = _mm256_add_epi32(at, _mm256_set1_epi32(8));
    }
    return xdi_tile_collect_rest(x, i, n, threshold, indices, keys, count, room);
}

XDI_SIMD_256 void xdi_v8_tile_range(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last) {
    uint32_t lows[8], highs[8];
    __m256i low = _mm256_set1_epi32((int)keys[0]), high = low;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i key = _mm256_loadu_si256((const __m256i *)(const void *)(keys + i));
        low = _mm256_min_epu32(low, key);
        high = _mm256_max_epu32(high, key);
    }
    _mm256_storeu_si256((__m256i *)(void *)lows, low);
    _mm256_storeu_si256((__m256i *)(void *)highs, high);
    *first = lows[0];
    *last = highs[0];
    for (int j = 1; j < 8; j++) {
        *first = lows[j] < *first ? lows[j] : *first;
        *last = highs[j] > *last ? highs[j] : *last;
    }
    for (; i < n; i++) {
        *first = keys[i] < *first ? keys[i] : *first;
        *last = keys[i] > *last ? keys[i] : *last;
    }
}

/* Sums over 1 and 2 neighbours make those of a half; the other half has its own and all of that. */
XDI_SIMD_256 void xdi_v8_tile_offsets(uint32_t *bins, int64_t n) {
    const __m256i top = _mm256_set1_epi32(7), half = _mm256_set1_epi32(3);
    __m256i before = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i count = _mm256_loadu_si256((const __m256i *)(const void *)(bins + i));
        __m256i sum = _mm256_add_epi32(count, _mm256_slli_si256(count, 4));
        sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 8));
        const __m256i lower = _mm256_permutevar8x32_epi32(sum, half);
        sum = _mm256_add_epi32(sum, _mm256_blend_epi32(_mm256_setzero_si256(), lower, 0xf0));
        _mm256_storeu_si256((__m256i *)(void *)(bins + i),
                            _mm256_add_epi32(before, _mm256_sub_epi32(sum, count)));
        before = _mm256_add_epi32(before, _mm256_permutevar8x32_epi32(sum, top));
    }
}

XDI_SIMD_256 bool xdi_v8_tile_unpack(const uint64_t *records, int64_t n, int64_t first, double *values,
                                     int64_t *ids) {
    const __m256i low = _mm256_set1_epi64x(0xffffffff), begin = _mm256_set1_epi64x(first);
    const __m256i upper = _mm256_set_epi32(7, 5, 3, 1, 7, 5, 3, 1);
    __m256d zeros = _mm256_setzero_pd();
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        const __m256i record = _mm256_loadu_si256((const __m256i *)(const void *)(records + j));
        const __m256i bits = xdi_v8_key(_mm256_permutevar8x32_epi32(record, upper));
        const __m256d value = _mm256_cvtps_pd(_mm_castsi128_ps(_mm256_castsi256_si128(bits)));
        zeros = _mm256_or_pd(zeros, _mm256_cmp_pd(value, _mm256_setzero_pd(), _CMP_EQ_OQ));
        _mm256_storeu_pd(values + j, value);
        _mm256_storeu_si256((__m256i *)(void *)(ids + j),
                            _mm256_add_epi64(_mm256_and_si256(record, low), begin));
    }
    const bool rest = xdi_v4_tile_unpack(records + j, n - j, first, values + j, ids + j);
    return _mm256_movemask_pd(zeros) != 0 || rest;
}

/* Keys from the bits of numbers, and the other way round. */
XDI_SIMD_INLINE_512 __m512i xdi_v16_key(__m512i bits) {
    const __m512i below = _mm512_srai_epi32(bits, 31);
    return _mm512_xor_si512(bits, _mm512_andnot_si512(below, _mm512_set1_epi32(0x7fffffff)));
}

/* Rows of 16: the indices and keys that count move to the front of the vector, which is written whole. */
XDI_SIMD_512 int64_t xdi_v16_tile_collect(xdi_simd_array x, int64_t n, float threshold, uint32_t *indices,
                                          uint32_t *keys, int64_t room) {
    const xdi_v16 limit = xdi_v16_set(threshold), zero = xdi_v16_set(0.0f);
    __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int64_t count = 0, i = 0;
    for (; i + 16 <= n && count + 16 <= room; i += 16) {
        const xdi_v16 a = xdi_v16_load(x, i);
        const __mmask16 mask = _mm512_cmp_ps_mask(a, limit, _CMP_GE_OQ);
        const __m512i key = xdi_v16_key(_mm512_castps_si512(_mm512_add_ps(a, zero)));
        _mm512_storeu_si512((void *)(indices + count), _mm512_maskz_compress_epi32(mask, at));
        _mm512_storeu_si512((void *)(keys + count), _mm512_maskz_compress_epi32(mask, key));
        count += __builtin_popcount((unsigned)mask);
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
    return xdi_tile_collect_rest(x, i, n, threshold, indices, keys, count, room);
}

XDI_SIMD_512 void xdi_v16_tile_range(const uint32_t *keys, int64_t n, uint32_t *first, uint32_t *last) {
    __m512i low = _mm512_set1_epi32((int)keys[0]), high = low;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i key = _mm512_loadu_si512((const void *)(keys + i));
        low = _mm512_min_epu32(low, key);
        high = _mm512_max_epu32(high, key);
    }
    *first = _mm512_reduce_min_epu32(low);
    *last = _mm512_reduce_max_epu32(high);
    for (; i < n; i++) {
        *first = keys[i] < *first ? keys[i] : *first;
        *last = keys[i] > *last ? keys[i] : *last;
    }
}

/* Sums over 1, 2, 4 and 8 neighbours make those over all before. */
XDI_SIMD_512 void xdi_v16_tile_offsets(uint32_t *bins, int64_t n) {
    const __m512i zero = _mm512_setzero_si512(), top = _mm512_set1_epi32(15);
    __m512i before = zero;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i count = _mm512_loadu_si512((const void *)(bins + i));
        __m512i sum = _mm512_add_epi32(count, _mm512_alignr_epi32(count, zero, 15));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
        _mm512_storeu_si512((void *)(bins + i), _mm512_add_epi32(before, _mm512_sub_epi32(sum, count)));
        before = _mm512_add_epi32(before, _mm512_permutexvar_epi32(top, sum));
    }
}

XDI_SIMD_512 bool xdi_v16_tile_unpack(const uint64_t *records, int64_t n, int64_t first, double *values,
                                      int64_t *ids) {
    const __m512i low = _mm512_set1_epi64(0xffffffff), begin = _mm512_set1_epi64(first);
    const int64_t head = (int64_t)(-(uintptr_t)values % XDI_SIMD_LINE / sizeof *values); /* to a line */
    __mmask8 zeros = 0;
    int64_t j = head < n ? head : n;
    const bool begin_zero = xdi_v4_tile_unpack(records, j, first, values, ids);
    for (; j + 8 <= n; j += 8) {
        const __m512i record = _mm512_loadu_si512((const void *)(records + j));
        const __m512i bits = xdi_v16_key(_mm512_srli_epi64(record, 32));
        const __m512d value = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_cvtepi64_epi32(bits)));
        zeros |= _mm512_cmp_pd_mask(value, _mm512_setzero_pd(), _CMP_EQ_OQ);
        _mm512_storeu_pd(values + j, value);
        _mm512_storeu_si512((void *)(ids + j), _mm512_add_epi64(_mm512_and_si512(record, low), begin));
    }
    const bool rest = xdi_v4_tile_unpack(records + j, n - j, first, values + j, ids + j);
    return zeros != 0 || begin_zero || rest;
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

XD_PRIVATE const xdi_tiles *xdi_fast_tiles(const xd_launch *launch) {
    return xdi_tiles_of(xd_ctx_settings(launch->ctx)->cpu);
}

XD_PRIVATE bool xdi_fast_fits(double max, double factor) {
    return factor > 1e-6 && factor < 1e6 && fabs(max * factor) < 65536.0;
}

XD_PRIVATE int64_t xdi_fast_stride(const xd_rows *x) {
    return x->stride ? x->stride : x->cols;
}

XD_PRIVATE xdi_simd_array xdi_fast_array(const xd_rows *x, int64_t row, int64_t column) {
    const int64_t at = row * xdi_fast_stride(x) + column;
    xdi_simd_array array;
    array.bf16 = x->dtype == XD_DTYPE_BF16;
    array.data = x->data;
    if (!x->data) return array;
    array.data = array.bf16 ? (void *)((uint16_t *)x->data + at) : (void *)((float *)x->data + at);
    return array;
}

XD_PRIVATE int64_t xdi_fast_tile_at(int64_t c, int64_t columns) {
    const int64_t tile = XDI_TILE;
    return columns - c < tile ? columns - c : tile;
}
