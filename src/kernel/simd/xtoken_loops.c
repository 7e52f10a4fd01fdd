/* The innermost loops of losses across tokenizers, in three widths. */

#include "kernel/simd/simd_math.h"
#include "kernel/simd/xtoken_loops.h"

#include <float.h>
#include <math.h>
#include <string.h>

typedef double __attribute__((vector_size(64))) xdi_d8;
typedef float __attribute__((vector_size(32))) xdi_f8;

/* Asks for what is behind a block: the next call for the same row comes after those for all others. */
static inline void xdi_xtoken_ahead(xdi_simd_array x, int64_t i) {
    const uintptr_t size = x.bf16 ? sizeof(uint16_t) : sizeof(float);
    __builtin_prefetch((const void *)((uintptr_t)x.data + (uintptr_t)i * size)); /* maybe past the end */
}

/* One by one: no vector operation compresses faster. */
static void xdi_xtoken_pack(xdi_simd_array x, int64_t n, const int32_t *list, int64_t count, float *out) {
    for (int64_t i = 0; i < count && x.bf16; i++) {
        const uint32_t bits = (uint32_t)((const uint16_t *)x.data)[list[i]] << 16;
        xdi_xtoken_ahead(x, n + list[i]);
        memcpy(out + i, &bits, sizeof bits);
    }
    for (int64_t i = 0; i < count && !x.bf16; i++) {
        xdi_xtoken_ahead(x, n + list[i]);
        out[i] = ((const float *)x.data)[list[i]];
    }
    for (int64_t i = count; i % XDI_XTOKEN_LANES != 0; i++) out[i] = -INFINITY;
}

#define XDI_XTOKEN_P_LOOPS(v, INLINE, LEAF)                                                                  \
    INLINE void v##_powers_loop(xdi_simd_array x, int64_t n, xdi_xtoken_power p, bool bf16, bool add,        \
                                float *out) {                                                                \
        const xdi_simd_array to = xdi_xtoken_floats(out);                                                    \
        int64_t i = 0;                                                                                       \
        x.bf16 = bf16;                                                                                       \
        for (; i + v##_lanes <= n; i += v##_lanes) {                                                         \
            const v e = v##_scaled_exp2(v##_load(x, i), &p.power, p.scale);                                  \
            xdi_xtoken_ahead(x, i + n);                                                                      \
            v##_store(to, i, add ? v##_add(e, v##_load(to, i)) : e);                                         \
        }                                                                                                    \
        if (i == n) return;                                                                                  \
        const v e = v##_scaled_exp2(v##_read(x, i, n, -INFINITY), &p.power, p.scale);                        \
        v##_write(to, i, n, add ? v##_add(e, v##_read(to, i, n, 0.0f)) : e);                                 \
    }                                                                                                        \
    LEAF void v##_xtoken_powers(xdi_simd_array x, int64_t n, xdi_xtoken_power p, bool add, float *out) {     \
        if (x.bf16 && add) v##_powers_loop(x, n, p, true, true, out);                                        \
        if (x.bf16 && !add) v##_powers_loop(x, n, p, true, false, out);                                      \
        if (!x.bf16 && add) v##_powers_loop(x, n, p, false, true, out);                                      \
        if (!x.bf16 && !add) v##_powers_loop(x, n, p, false, false, out);                                    \
    }                                                                                                        \
    INLINE double v##_dot_loop(xdi_simd_array x, int64_t n, xdi_xtoken_power p, bool bf16, const float *h) { \
        const xdi_simd_array with = xdi_xtoken_floats(h);                                                    \
        v sum = v##_set(0.0f);                                                                               \
        int64_t i = 0;                                                                                       \
        x.bf16 = bf16;                                                                                       \
        for (; i + v##_lanes <= n; i += v##_lanes) {                                                         \
            xdi_xtoken_ahead(x, i + n);                                                                      \
            sum = v##_fma(v##_scaled_exp2(v##_load(x, i), &p.power, p.scale), v##_load(with, i), sum);       \
        }                                                                                                    \
        if (i < n)                                                                                           \
            sum = v##_fma(v##_scaled_exp2(v##_read(x, i, n, -INFINITY), &p.power, p.scale),                  \
                          v##_read(with, i, n, 0.0f), sum);                                                  \
        return v##_total(sum);                                                                               \
    }                                                                                                        \
    LEAF double v##_xtoken_dot(xdi_simd_array x, int64_t n, xdi_xtoken_power p, const float *h) {            \
        return x.bf16 ? v##_dot_loop(x, n, p, true, h) : v##_dot_loop(x, n, p, false, h);                    \
    }                                                                                                        \
    INLINE void v##_walk_loop(const int32_t *student, const int32_t *slot, const float *weight, int64_t n,   \
                              bool packed, int64_t first, float *ids, float *slots, bool back) {             \
        int64_t at = 0;                                                                                      \
        for (int64_t e = 0; e < n; e++) {                                                                    \
            at += packed && e > 0 && student[e] != student[e - 1] ? 1 : 0;                                   \
            const xdi_simd_array id =                                                                        \
                xdi_xtoken_floats(ids + (packed ? at : student[e] - first) * XDI_XTOKEN_LANES);              \
            const xdi_simd_array a = xdi_xtoken_floats(slots + (int64_t)slot[e] * XDI_XTOKEN_LANES);         \
            const xdi_simd_array to = back ? id : a, from = back ? a : id;                                   \
            const v w = v##_set(weight[e]);                                                                  \
            for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += v##_lanes)                                   \
                v##_store(to, lane, v##_fma(v##_load(from, lane), w, v##_load(to, lane)));                   \
        }                                                                                                    \
    }                                                                                                        \
    LEAF void v##_xtoken_walk(const int32_t *student, const int32_t *slot, const float *weight, int64_t n,   \
                              bool packed, int64_t first, float *ids, float *slots, bool back) {             \
        if (packed && back) v##_walk_loop(student, slot, weight, n, true, first, ids, slots, true);          \
        if (packed && !back) v##_walk_loop(student, slot, weight, n, true, first, ids, slots, false);        \
        if (!packed && back) v##_walk_loop(student, slot, weight, n, false, first, ids, slots, true);        \
        if (!packed && !back) v##_walk_loop(student, slot, weight, n, false, first, ids, slots, false);      \
    }                                                                                                        \
    LEAF void v##_xtoken_widen(xdi_simd_array x, int64_t n, double factor, double shift, bool add,           \
                               double *cells) {                                                              \
        float part[16];                                                                                      \
        int64_t i = 0;                                                                                       \
        for (; i + 16 <= n; i += 16) {                                                                       \
            for (int lane = 0; lane < 16; lane += v##_lanes)                                                 \
                v##_store(xdi_xtoken_floats(part), lane, v##_load(x, i + lane));                             \
            for (int half = 0; half < 16; half += 8) {                                                       \
                xdi_f8 narrow;                                                                               \
                xdi_d8 sum;                                                                                  \
                memcpy(&narrow, part + half, sizeof narrow);                                                 \
                sum = __builtin_convertvector(narrow, xdi_d8) * factor - shift;                              \
                if (add) {                                                                                   \
                    xdi_d8 before;                                                                           \
                    memcpy(&before, cells + i + half, sizeof before);                                        \
                    sum += before;                                                                           \
                }                                                                                            \
                memcpy(cells + i + half, &sum, sizeof sum);                                                  \
            }                                                                                                \
        }                                                                                                    \
        xdi_simd_part(x, i, n, 16, 0.0f, part);                                                              \
        for (int lane = 0; i + lane < n; lane++)                                                             \
            cells[i + lane] = (add ? cells[i + lane] : 0.0) + ((double)part[lane] * factor - shift);         \
    }                                                                                                        \
    LEAF double v##_xtoken_narrow(const double *x, int64_t n, double factor, double shift, float *out) {     \
        xdi_d8 sums = { 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0 };                                            \
        double sum = 0.0;                                                                                    \
        int64_t i = 0;                                                                                       \
        for (; i + 8 <= n; i += 8) {                                                                         \
            xdi_d8 wide;                                                                                     \
            memcpy(&wide, x + i, sizeof wide);                                                               \
            wide *= factor;                                                                                  \
            sums += wide;                                                                                    \
            const xdi_f8 part = __builtin_convertvector(wide - shift, xdi_f8);                               \
            memcpy(out + i, &part, sizeof part);                                                             \
        }                                                                                                    \
        for (; i < n; i++) {                                                                                 \
            sum += x[i] * factor;                                                                            \
            out[i] = (float)(x[i] * factor - shift);                                                         \
        }                                                                                                    \
        for (int lane = 0; lane < 8; lane++) sum += sums[lane];                                              \
        return sum;                                                                                          \
    }

#define XDI_XTOKEN_D_LOOPS(v, LEAF)                                                                       \
    LEAF double v##_xtoken_slopes(float *q, const float *a, int64_t n, float inverse, bool reverse,       \
                                  double *dot) {                                                          \
        const xdi_tile_power unit = { (float)XDI_TILE_LOG2E, 0.0f, -88.0f };                              \
        const v epsilon = v##_set((float)XD_XTOKEN_EPSILON), ln2 = v##_set((float)XDI_TILE_LN2);          \
        const v zero = v##_set(0.0f), one = v##_set(1.0f);                                                \
        v value = zero, dots = zero;                                                                      \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                      \
            const v r = v##_mul(v##_read(xdi_xtoken_floats(q), i, n, 0.0f), v##_set(inverse));            \
            const v b = v##_read(xdi_xtoken_floats(a), i, n, -100.0f), floor = v##_add(r, epsilon);       \
            const v s = v##_mul(v##_log2(floor), ln2), target = v##_exp2(b, &unit);                       \
            const v d = v##_sub(s, b);                                                                    \
            v slope = v##_sub(zero, v##_div(target, floor));                                              \
            if (reverse) slope = v##_add(d, one);                                                         \
            /* past the end r is 0 and so is what is added, but for the floor's part of the reverse */    \
            if (reverse)                                                                                  \
                value = v##_fma(i + v##_lanes <= n ? floor : r, d, value);                                \
            else                                                                                          \
                value = v##_sub(value, v##_mul(target, d));                                               \
            dots = v##_fma(slope, r, dots);                                                               \
            v##_write(xdi_xtoken_floats(q), i, n, slope);                                                 \
        }                                                                                                 \
        *dot = v##_total(dots);                                                                           \
        return v##_total(value);                                                                          \
    }                                                                                                     \
    LEAF double v##_xtoken_pair(const float *alpha, const float *beta, int64_t n, bool reverse,           \
                                float *slope) {                                                           \
        const xdi_tile_power unit = { (float)XDI_TILE_LOG2E, 0.0f, -88.0f };                              \
        const v zero = v##_set(0.0f), one = v##_set(1.0f), lowest = v##_set(-FLT_MAX);                    \
        v sum = zero;                                                                                     \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                      \
            const v a = v##_read(xdi_xtoken_floats(alpha), i, n, -FLT_MAX);                               \
            const v b = v##_read(xdi_xtoken_floats(beta), i, n, -FLT_MAX);                                \
            const v p = v##_exp2(reverse ? a : b, &unit),                                                 \
                    d = reverse ? v##_sub(a, v##_max(b, lowest)) : v##_sub(v##_max(b, lowest), a);        \
            sum = v##_add(sum, v##_pick(zero, p, zero, v##_mul(p, d)));                                   \
            v##_write(xdi_xtoken_floats(slope), i, n,                                                     \
                      reverse ? v##_pick(zero, p, zero, v##_mul(p, v##_add(d, one))) : v##_sub(zero, p)); \
        }                                                                                                 \
        return v##_total(sum);                                                                            \
    }

#define XDI_XTOKEN_W_LOOPS(v, INLINE, LEAF)                                                               \
    INLINE void v##_xtoken_write_loop(const xdi_xtoken_writer *w, int64_t begin, int64_t n, bool hard,    \
                                      bool soft) {                                                        \
        const v shift = v##_set(w->shift), scale = v##_set(w->u_scale);                                   \
        for (int64_t i = begin; i < n; i += v##_lanes) {                                                  \
            const v x = v##_read(w->x, i, n, -INFINITY);                                                  \
            v out = w->add ? v##_read(w->out, i, n, 0.0f) : v##_set(0.0f);                                \
            v u = v##_set(0.0f);                                                                          \
            if (hard) out = v##_add(out, v##_scaled_exp2(x, &w->p1.power, w->p1.scale));                  \
            if (w->u) u = v##_mul(v##_read(xdi_xtoken_floats(w->u), i, n, 0.0f), scale);                  \
            if (soft) {                                                                                   \
                const v p = v##_scaled_exp2(x, &w->p.power, w->p.scale);                                  \
                u = w->times_p ? v##_mul(p, v##_sub(u, shift)) : v##_sub(u, v##_mul(p, shift));           \
            }                                                                                             \
            v##_write(w->out, i, n, v##_add(out, u));                                                     \
        }                                                                                                 \
    }                                                                                                     \
    /* The first writer of a row with u, by whole vectors; returns how far it came. */                    \
    INLINE int64_t v##_xtoken_write_first(const xdi_xtoken_writer *w, int64_t n, bool times_p, bool bf16, \
                                          bool past) {                                                    \
        const v shift = v##_set(w->shift), scale = v##_set(w->u_scale);                                   \
        const xdi_xtoken_power p = w->p;                                                                  \
        const xdi_simd_array u = xdi_xtoken_floats(w->u);                                                 \
        xdi_simd_array x = w->x, out = w->out;                                                            \
        int64_t i = 0;                                                                                    \
        x.bf16 = out.bf16 = bf16;                                                                         \
        for (; i + v##_lanes <= n; i += v##_lanes) {                                                      \
            const v e = v##_scaled_exp2(v##_load(x, i), &p.power, p.scale), h = v##_load(u, i);           \
            const v g =                                                                                   \
                times_p ? v##_mul(e, v##_sub(h, shift)) : v##_sub(v##_mul(h, scale), v##_mul(e, shift));  \
            xdi_xtoken_ahead(x, i + XDI_XTOKEN_BLOCK);                                                    \
            if (past)                                                                                     \
                v##_store_past(out, i, g);                                                                \
            else                                                                                          \
                v##_store(out, i, g);                                                                     \
        }                                                                                                 \
        return i;                                                                                         \
    }                                                                                                     \
    LEAF void v##_xtoken_write(const xdi_xtoken_writer *given, int64_t n) {                               \
        const xdi_xtoken_writer w = *given; /* stores cannot change a copy */                             \
        const bool bf16 = w.x.bf16, first = w.u && w.soft && !w.hard && !w.add && w.out.bf16 == bf16;     \
        int64_t i = 0;                                                                                    \
        switch (first ? (w.times_p ? 4 : 0) + (bf16 ? 2 : 0) + (w.past ? 1 : 0) : -1) {                   \
        case 0: i = v##_xtoken_write_first(&w, n, false, false, false); break;                            \
        case 1: i = v##_xtoken_write_first(&w, n, false, false, true); break;                             \
        case 2: i = v##_xtoken_write_first(&w, n, false, true, false); break;                             \
        case 3: i = v##_xtoken_write_first(&w, n, false, true, true); break;                              \
        case 4: i = v##_xtoken_write_first(&w, n, true, false, false); break;                             \
        case 5: i = v##_xtoken_write_first(&w, n, true, false, true); break;                              \
        case 6: i = v##_xtoken_write_first(&w, n, true, true, false); break;                              \
        case 7: i = v##_xtoken_write_first(&w, n, true, true, true); break;                               \
        default: break;                                                                                   \
        }                                                                                                 \
        if (w.hard && w.soft) v##_xtoken_write_loop(&w, i, n, true, true);                                \
        if (w.hard && !w.soft) v##_xtoken_write_loop(&w, i, n, true, false);                              \
        if (!w.hard && w.soft) v##_xtoken_write_loop(&w, i, n, false, true);                              \
        if (!w.hard && !w.soft) v##_xtoken_write_loop(&w, i, n, false, false);                            \
    }

#define XDI_XTOKEN_LOOPS(v, INLINE, LEAF)                                                                \
    XDI_XTOKEN_P_LOOPS(v, INLINE, LEAF)                                                                  \
    XDI_XTOKEN_D_LOOPS(v, LEAF)                                                                          \
    XDI_XTOKEN_W_LOOPS(v, INLINE, LEAF)                                                                  \
    LEAF double v##_xtoken_entropy(xdi_simd_array x, int64_t n, xdi_xtoken_power p) {                    \
        const v scale = v##_set(p.scale), epsilon = v##_set((float)XD_XTOKEN_EPSILON);                   \
        v sum = v##_set(0.0f);                                                                           \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                     \
            const v q = v##_mul(v##_exp2(v##_read(x, i, n, -INFINITY), &p.power), scale);                \
            sum = v##_fma(q, v##_log2(v##_add(q, epsilon)), sum);                                        \
        }                                                                                                \
        return -XDI_TILE_LN2 * v##_total(sum);                                                           \
    }                                                                                                    \
    static const xdi_xtoken_loops v##_xtoken = { v##_xtoken_powers, v##_xtoken_dot,    xdi_xtoken_pack,  \
                                                 v##_xtoken_walk,   v##_to_tables,     v##_to_lanes,     \
                                                 v##_xtoken_widen,  v##_xtoken_narrow, v##_xtoken_top,   \
                                                 v##_xtoken_slopes, v##_xtoken_pair,   v##_xtoken_write, \
                                                 v##_xtoken_entropy };

/* ---- 16 by 16 ---- */

static void xdi_v4_to_tables(const float *lanes, int64_t n, float *tables) {
    for (int64_t i = 0; i < n; i++)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
            tables[i * XDI_XTOKEN_LANES + lane] = lanes[lane * XDI_XTOKEN_STRIDE + i];
}

static void xdi_v4_to_lanes(const float *tables, int64_t n, float *lanes) {
    for (int64_t i = 0; i < n; i++)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
            lanes[lane * XDI_XTOKEN_STRIDE + i] = tables[i * XDI_XTOKEN_LANES + lane];
}

/* ---- largest elements ---- */

static double xdi_v4_xtoken_top(const double *x, int64_t n, bool magnitude) {
    double top = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        const double one = magnitude ? fabs(x[i]) : x[i];
        top = one > top ? one : top;
    }
    return top;
}

XDI_SIMD_INLINE void xdi_v4_store_past(xdi_simd_array x, int64_t i, xdi_v4 value) {
    xdi_v4_store(x, i, value);
}

XDI_XTOKEN_LOOPS(xdi_v4, XDI_SIMD_INLINE, XDI_SIMD_128)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* Four of eight elements of eight lines. */
XDI_SIMD_INLINE_256 __m256 xdi_v8_two_quarters(const float *low, const float *high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

XDI_SIMD_INLINE_256 void xdi_v8_transpose_half(const float *from, int64_t stride, float *to,
                                               int64_t to_stride) {
    const __m256 a = xdi_v8_two_quarters(from, from + 4 * stride),
                 b = xdi_v8_two_quarters(from + stride, from + 5 * stride),
                 c = xdi_v8_two_quarters(from + 2 * stride, from + 6 * stride),
                 d = xdi_v8_two_quarters(from + 3 * stride, from + 7 * stride);
    const __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    const __m256 more_ab = _mm256_unpackhi_ps(a, b), more_cd = _mm256_unpackhi_ps(c, d);
    _mm256_storeu_ps(to, _mm256_shuffle_ps(ab, cd, 0x44));
    _mm256_storeu_ps(to + to_stride, _mm256_shuffle_ps(ab, cd, 0xee));
    _mm256_storeu_ps(to + 2 * to_stride, _mm256_shuffle_ps(more_ab, more_cd, 0x44));
    _mm256_storeu_ps(to + 3 * to_stride, _mm256_shuffle_ps(more_ab, more_cd, 0xee));
}

/* Eight lines of eight. */
XDI_SIMD_INLINE_256 void xdi_v8_transpose(const float *from, int64_t from_stride, float *to,
                                          int64_t to_stride) {
    xdi_v8_transpose_half(from, from_stride, to, to_stride);
    xdi_v8_transpose_half(from + 4, from_stride, to + 4 * to_stride, to_stride);
}

XDI_SIMD_256 void xdi_v8_to_tables(const float *lanes, int64_t n, float *tables) {
    for (int64_t i = 0; i < n; i += 8)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += 8)
            xdi_v8_transpose(lanes + lane * XDI_XTOKEN_STRIDE + i, XDI_XTOKEN_STRIDE,
                             tables + i * XDI_XTOKEN_LANES + lane, XDI_XTOKEN_LANES);
}

XDI_SIMD_256 void xdi_v8_to_lanes(const float *tables, int64_t n, float *lanes) {
    for (int64_t i = 0; i < n; i += 8)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += 8)
            xdi_v8_transpose(tables + i * XDI_XTOKEN_LANES + lane, XDI_XTOKEN_LANES,
                             lanes + lane * XDI_XTOKEN_STRIDE + i, XDI_XTOKEN_STRIDE);
}

/* Eight at a time is fast enough for both widths. */
XDI_SIMD_512 void xdi_v16_to_tables(const float *lanes, int64_t n, float *tables) {
    xdi_v8_to_tables(lanes, n, tables);
}

XDI_SIMD_512 void xdi_v16_to_lanes(const float *tables, int64_t n, float *lanes) {
    xdi_v8_to_lanes(tables, n, lanes);
}

/* The second operand of a maximum stays where the first is NaN. */
XDI_SIMD_256 double xdi_v8_xtoken_top(const double *x, int64_t n, bool magnitude) {
    const __m256d kept = _mm256_castsi256_pd(_mm256_set1_epi64x(magnitude ? INT64_MAX : -1));
    __m256d tops[2] = { _mm256_set1_pd(-INFINITY), _mm256_set1_pd(-INFINITY) };
    double lanes[4];
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        tops[0] = _mm256_max_pd(_mm256_and_pd(_mm256_loadu_pd(x + i), kept), tops[0]);
        tops[1] = _mm256_max_pd(_mm256_and_pd(_mm256_loadu_pd(x + i + 4), kept), tops[1]);
    }
    _mm256_storeu_pd(lanes, _mm256_max_pd(tops[0], tops[1]));
    const double top = xdi_v4_xtoken_top(lanes, 4, false), rest = xdi_v4_xtoken_top(x + i, n - i, magnitude);
    return rest > top ? rest : top;
}

XDI_SIMD_512 double xdi_v16_xtoken_top(const double *x, int64_t n, bool magnitude) {
    const __m512d kept = _mm512_castsi512_pd(_mm512_set1_epi64(magnitude ? INT64_MAX : -1));
    __m512d tops[2] = { _mm512_set1_pd(-INFINITY), _mm512_set1_pd(-INFINITY) };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        tops[0] = _mm512_max_pd(_mm512_and_pd(_mm512_loadu_pd(x + i), kept), tops[0]);
        tops[1] = _mm512_max_pd(_mm512_and_pd(_mm512_loadu_pd(x + i + 8), kept), tops[1]);
    }
    const double top = _mm512_reduce_max_pd(_mm512_max_pd(tops[0], tops[1]));
    const double rest = xdi_v4_xtoken_top(x + i, n - i, magnitude);
    return rest > top ? rest : top;
}

/* To f32 at a multiple of 32 bytes; there is no gain in it for the halves of bf16. */
XDI_SIMD_INLINE_256 void xdi_v8_store_past(xdi_simd_array x, int64_t i, xdi_v8 value) {
    if (x.bf16)
        xdi_v8_store(x, i, value);
    else
        xdi_v8_stream(x, i, value);
}

/* At a multiple of 64 bytes. */
XDI_SIMD_INLINE_512 void xdi_v16_store_past(xdi_simd_array x, int64_t i, xdi_v16 value) {
    const __m512i order = _mm512_loadu_si512((const void *)xdi_v16_narrow);
    if (x.bf16)
        _mm256_stream_si256((__m256i *)(void *)((uint16_t *)x.data + i),
                            _mm512_castsi512_si256(_mm512_permutexvar_epi16(order, xdi_v16_rounded(value))));
    else
        xdi_v16_stream(x, i, value);
}

XDI_XTOKEN_LOOPS(xdi_v8, XDI_SIMD_INLINE_256, XDI_SIMD_256)
XDI_XTOKEN_LOOPS(xdi_v16, XDI_SIMD_INLINE_512, XDI_SIMD_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

XD_PRIVATE const xdi_xtoken_loops *xdi_xtoken_loops_of(const xd_launch *launch) {
    switch (xd_ctx_settings(launch->ctx)->cpu) {
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_v8_xtoken;
    case XD_CPU_AVX512:
    case XD_CPU_AVX512_BF16: return &xdi_v16_xtoken;
#endif
    default: return &xdi_v4_xtoken;
    }
}
