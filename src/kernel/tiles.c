#include <float.h>
#include <math.h>

XD_PRIVATE xdi_tile_power xdi_tile_power_of(double factor, double whole) {
    xdi_tile_power power;
    power.factor = (float)factor;
    power.whole = (float)whole;
    power.low = (float)((whole - 127.0) / (double)power.factor);
    return power;
}

/* What follows is written once for every vector width v, as a macro that defines v_... functions with the
 * attributes INLINE and LEAF. */

#define XDI_TILES_SUMS(v, LEAF)                                                                  \
    LEAF float v##_tile_max(xdi_simd_array x, int64_t n) {                                       \
        v max = v##_set(-INFINITY), nan = v##_set(0.0f);                                         \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                             \
            const v a = v##_read(x, i, n, -INFINITY);                                            \
            max = v##_max(a, max);                                                               \
            nan = v##_pick(a, a, nan, v##_set(1.0f));                                            \
        }                                                                                        \
        return v##_largest(nan) > 0.0f ? NAN : v##_largest(max);                                 \
    }                                                                                            \
    LEAF double v##_tile_linear(xdi_simd_array x, int64_t n, float reference) {                  \
        v sum = v##_set(0.0f);                                                                   \
        const v from = v##_set(reference);                                                       \
        for (int64_t i = 0; i < n; i += v##_lanes)                                               \
            sum = v##_add(sum, v##_sub(v##_read(x, i, n, reference), from));                     \
        return v##_total(sum);                                                                   \
    }                                                                                            \
    LEAF double v##_tile_sum(xdi_simd_array x, int64_t n, xdi_tile_power power, double *moment,  \
                             float *max) {                                                       \
        v sum = v##_set(0.0f), moments = v##_set(0.0f), largest = v##_set(-INFINITY);            \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                             \
            const v a = v##_read(x, i, n, -INFINITY), e = v##_exp2(a, &power);                   \
            sum = v##_add(sum, e);                                                               \
            largest = v##_max(a, largest);                                                       \
            if (!moment) continue;                                                               \
            moments = v##_fma(e, v##_exponent(v##_max(v##_set(power.low), a), &power), moments); \
        }                                                                                        \
        if (moment) *moment = v##_total(moments);                                                \
        *max = v##_largest(largest);                                                             \
        return v##_total(sum);                                                                   \
    }

#define XDI_TILES_PAIR(v, INLINE, LEAF)                                                                  \
    INLINE void v##_pair_loop(xdi_tile_pair *pair, int64_t n, bool careful) {                            \
        const xdi_tile_power p = pair->p, q = pair->q;                                                   \
        const xdi_simd_array x = pair->x, y = pair->y;                                                   \
        const v zero = v##_set(0.0f), one = v##_set(1.0f), lowest = v##_set(-FLT_MAX);                   \
        const v weight = v##_set(pair->own_weight);                                                      \
        v own = zero, other = zero, cross = zero, infinite = zero;                                       \
        v own_max = v##_set(-INFINITY), other_max = own_max;                                             \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                     \
            const v a = v##_read(x, i, n, -INFINITY), b = v##_read(y, i, n, q.low);                      \
            const v e = v##_exp2(a, &p);                                                                 \
            v s = v##_exponent(v##_max(v##_set(p.low), a), &p), t = v##_exponent(b, &q);                 \
            if (careful) {                                                                               \
                infinite = v##_max(v##_pick(t, lowest, zero, v##_pick(a, lowest, one, zero)), infinite); \
                t = v##_max(t, lowest);                                                                  \
            }                                                                                            \
            own = v##_add(own, e);                                                                       \
            other = v##_add(other, v##_exp2(b, &q));                                                     \
            cross = v##_fma(e, v##_mul_sub(s, weight, t), cross);                                        \
            own_max = v##_max(a, own_max);                                                               \
            other_max = v##_max(b, other_max);                                                           \
        }                                                                                                \
        pair->own = v##_total(own);                                                                      \
        pair->other = v##_total(other);                                                                  \
        pair->cross = v##_total(cross);                                                                  \
        pair->own_max = v##_largest(own_max);                                                            \
        pair->other_max = v##_largest(other_max);                                                        \
        pair->infinite = v##_largest(infinite) > 0.0f;                                                   \
    }                                                                                                    \
    LEAF void v##_tile_pair(xdi_tile_pair *pair, int64_t n) {                                            \
        if (pair->careful)                                                                               \
            v##_pair_loop(pair, n, true);                                                                \
        else                                                                                             \
            v##_pair_loop(pair, n, false);                                                               \
    }

/* p and q, and log2(p/m) and log2(q/m). With d the difference of the logarithms, m is the larger of the two
 * times (larger share + smaller share 2^-d): no overflow, and no cancellation when p and q are close. */
#define XDI_TILES_MIXTURE(v, INLINE, LEAF)                                                               \
    INLINE void v##_mix(const xdi_tile_mixture *m, v a, v b, v *p, v *q, v *p_ratio, v *q_ratio) {       \
        const xdi_tile_power unit = { 1.0f, 0.0f, -127.0f };                                             \
        const v p_share = v##_set(m->p_share), q_share = v##_set(m->q_share);                            \
        const v s = v##_sub(v##_exponent(v##_max(a, v##_set(m->p.low)), &m->p), v##_set(m->p_rest));     \
        const v t = v##_sub(v##_exponent(v##_max(b, v##_set(m->q.low)), &m->q), v##_set(m->q_rest));     \
        const v d = v##_sub(v##_min(s, t), v##_max(s, t));                                               \
        const v large = v##_pick(s, t, p_share, q_share), small = v##_pick(s, t, q_share, p_share);      \
        const v log_mixture = v##_log2(v##_fma(small, v##_exp2(d, &unit), large));                       \
        const v above = v##_sub(v##_set(0.0f), log_mixture), below = v##_sub(d, log_mixture);            \
        *p = v##_exp2(a, &m->p);                                                                         \
        *q = v##_exp2(b, &m->q);                                                                         \
        *p_ratio = v##_pick(s, t, above, below);                                                         \
        *q_ratio = v##_pick(s, t, below, above);                                                         \
    }                                                                                                    \
    LEAF void v##_tile_mixture(xdi_simd_array x, xdi_simd_array y, const xdi_tile_mixture *m, int64_t n, \
                               double *p_sum, double *q_sum) {                                           \
        const v top = v##_set(m->top);                                                                   \
        v p_sums = v##_set(0.0f), q_sums = v##_set(0.0f), p, q, p_ratio, q_ratio;                        \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                     \
            const v a = v##_read(x, i, n, -INFINITY), b = v##_read(y, i, n, -INFINITY);                  \
            v##_mix(m, a, b, &p, &q, &p_ratio, &q_ratio);                                                \
            p_sums = v##_fma(p, v##_sub(p_ratio, top), p_sums);                                          \
            q_sums = v##_fma(q, q_ratio, q_sums);                                                        \
        }                                                                                                \
        *p_sum = v##_total(p_sums);                                                                      \
        *q_sum = v##_total(q_sums);                                                                      \
    }

#define XDI_TILES_GRADIENT(v, INLINE, LEAF)                                                                \
    INLINE v v##_soft(const xdi_tile_gradient *g, v a, int64_t i, int64_t n, xdi_tile_soft soft) {         \
        const v lowest = v##_set(-FLT_MAX);                                                                \
        v b = lowest, p, q, p_ratio, q_ratio;                                                              \
        if (soft != XDI_TILE_OUTSIDE) b = v##_read(g->y, i, n, -INFINITY);                                 \
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
    INLINE void v##_gradient_loop(const xdi_tile_gradient *g, int64_t n, bool hard, xdi_tile_soft soft) {  \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                       \
            const v a = v##_read(g->x, i, n, -INFINITY);                                                   \
            v out = v##_set(0.0f);                                                                         \
            if (hard) out = v##_sub(v##_scaled_exp2(a, &g->h, g->hard_scale), v##_set(g->uniform));        \
            if (soft != XDI_TILE_NONE) {                                                                   \
                const v more = v##_soft(g, a, i, n, soft);                                                 \
                out = hard ? v##_add(out, more) : more;                                                    \
            }                                                                                              \
            v##_write(g->out, i, n, out);                                                                  \
        }                                                                                                  \
    }                                                                                                      \
    LEAF void v##_tile_gradient(const xdi_tile_gradient *given, xdi_tile_soft soft, int64_t n) {           \
        const xdi_tile_gradient g = *given; /* stores cannot change a copy */                              \
        switch ((int)soft * 2 + (g.hard ? 1 : 0)) {                                                        \
        case XDI_TILE_NONE * 2 + 1: v##_gradient_loop(&g, n, true, XDI_TILE_NONE); break;                  \
        case XDI_TILE_FORWARD * 2: v##_gradient_loop(&g, n, false, XDI_TILE_FORWARD); break;               \
        case XDI_TILE_FORWARD * 2 + 1: v##_gradient_loop(&g, n, true, XDI_TILE_FORWARD); break;            \
        case XDI_TILE_REVERSE * 2: v##_gradient_loop(&g, n, false, XDI_TILE_REVERSE); break;               \
        case XDI_TILE_REVERSE * 2 + 1: v##_gradient_loop(&g, n, true, XDI_TILE_REVERSE); break;            \
        case XDI_TILE_MIXTURE * 2: v##_gradient_loop(&g, n, false, XDI_TILE_MIXTURE); break;               \
        case XDI_TILE_MIXTURE * 2 + 1: v##_gradient_loop(&g, n, true, XDI_TILE_MIXTURE); break;            \
        case XDI_TILE_OUTSIDE * 2: v##_gradient_loop(&g, n, false, XDI_TILE_OUTSIDE); break;               \
        default: v##_gradient_loop(&g, n, false, XDI_TILE_NONE); break;                                    \
        }                                                                                                  \
    }

#define XDI_TILES(v, INLINE, LEAF)                                           \
    XDI_TILES_SUMS(v, LEAF)                                                  \
    XDI_TILES_PAIR(v, INLINE, LEAF)                                          \
    XDI_TILES_MIXTURE(v, INLINE, LEAF)                                       \
    XDI_TILES_GRADIENT(v, INLINE, LEAF)                                      \
    static const xdi_tiles v##_tiles = {                                     \
        v##_tile_max,     v##_tile_linear,   v##_tile_sum,    v##_tile_pair, \
        v##_tile_mixture, v##_tile_gradient, v##_tile_collect                \
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
