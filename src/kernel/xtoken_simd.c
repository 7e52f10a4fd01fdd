#include <float.h>
#include <math.h>
#include <string.h>

/* Losses across tokenizers on vectors. A projection is walked for 16 chunks at once: tables of 16 floats a
 * slot or student id, so that an entry of the matrix is one multiply-add of vectors, to and fro. The student
 * comes in blocks of ids whose tables stay in the first cache. */
enum { XDI_XTOKEN_LANES = 16, XDI_XTOKEN_BLOCK = 512 };

typedef double __attribute__((vector_size(64))) xdi_d8;
typedef float __attribute__((vector_size(32))) xdi_f8;

/* p = scale 2^(...) of a row. */
typedef struct xdi_xtoken_power {
    xdi_tile_power power;
    float scale;
} xdi_xtoken_power;

/* A row's gradient: out (+)= p1 + u_scale u - shift p, or p (u_scale u - shift) for the latter. */
typedef struct xdi_xtoken_writer {
    xdi_simd_array x, out;
    bool add, hard, soft, times_p;
    xdi_xtoken_power p, p1;
    const float *u; /* or NULL */
    float u_scale, shift;
} xdi_xtoken_writer;

/* The 16 lanes of a block are this far apart, so that they are not all in one set of the cache. */
enum { XDI_XTOKEN_STRIDE = XDI_XTOKEN_BLOCK + 16 };

/* Inner loops of one vector width; n elements. */
typedef struct xdi_xtoken_loops {
    /* out (+)= p */
    void (*powers)(xdi_simd_array x, int64_t n, xdi_xtoken_power p, bool add, float *out);
    /* sum of p h */
    double (*dot)(xdi_simd_array x, int64_t n, xdi_xtoken_power p, const float *h);
    /* to[16 to_id] += weight from[16 from_id], ids less their base */
    void (*walk)(const int32_t *to_id, int64_t to_base, const int32_t *from_id, int64_t from_base,
                 const float *weight, int64_t n, float *to, const float *from);
    /* A block from lanes [16, STRIDE] to tables [BLOCK, 16], and back. */
    void (*to_tables)(const float *lanes, float *tables);
    void (*to_lanes)(const float *tables, float *lanes);
    /* cells (+)= x factor - shift */
    void (*widen)(xdi_simd_array x, int64_t n, double factor, double shift, bool add, double *cells);
    /* From q / Z and a to d d(c) / d r in q; sums of the divergence and of q r. */
    double (*slopes)(float *q, const float *a, int64_t n, float inverse, bool reverse, double *dot);
    /* e^beta (beta - alpha), or the reverse: the sum, and in slope the derivative by alpha. */
    double (*pair)(const float *alpha, const float *beta, int64_t n, bool reverse, float *slope);
    void (*write)(const xdi_xtoken_writer *w, int64_t n);
} xdi_xtoken_loops;

static inline xdi_simd_array xdi_xtoken_floats(const float *x) {
    xdi_simd_array array;
    array.data = (void *)x;
    array.bf16 = false;
    return array;
}

#define XDI_XTOKEN_P_LOOPS(v, LEAF)                                                                         \
    LEAF void v##_xtoken_powers(xdi_simd_array x, int64_t n, xdi_xtoken_power p, bool add, float *out) {    \
        const xdi_simd_array to = xdi_xtoken_floats(out);                                                   \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                        \
            v e = v##_scaled_exp2(v##_read(x, i, n, -INFINITY), &p.power, p.scale);                         \
            if (add) e = v##_add(e, v##_read(to, i, n, 0.0f));                                              \
            v##_write(to, i, n, e);                                                                         \
        }                                                                                                   \
    }                                                                                                       \
    LEAF double v##_xtoken_dot(xdi_simd_array x, int64_t n, xdi_xtoken_power p, const float *h) {           \
        v sum = v##_set(0.0f);                                                                              \
        for (int64_t i = 0; i < n; i += v##_lanes)                                                          \
            sum = v##_fma(v##_scaled_exp2(v##_read(x, i, n, -INFINITY), &p.power, p.scale),                 \
                          v##_read(xdi_xtoken_floats(h), i, n, 0.0f), sum);                                 \
        return v##_total(sum);                                                                              \
    }                                                                                                       \
    LEAF void v##_xtoken_walk(const int32_t *to_id, int64_t to_base, const int32_t *from_id,                \
                              int64_t from_base, const float *weight, int64_t n, float *to,                 \
                              const float *from) {                                                          \
        for (int64_t e = 0; e < n; e++) {                                                                   \
            const xdi_simd_array a = xdi_xtoken_floats(to + (to_id[e] - to_base) * XDI_XTOKEN_LANES);       \
            const xdi_simd_array b = xdi_xtoken_floats(from + (from_id[e] - from_base) * XDI_XTOKEN_LANES); \
            const v w = v##_set(weight[e]);                                                                 \
            for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += v##_lanes)                                  \
                v##_store(a, lane, v##_fma(v##_load(b, lane), w, v##_load(a, lane)));                       \
        }                                                                                                   \
    }                                                                                                       \
    LEAF void v##_xtoken_widen(xdi_simd_array x, int64_t n, double factor, double shift, bool add,          \
                               double *cells) {                                                             \
        float part[16];                                                                                     \
        int64_t i = 0;                                                                                      \
        for (; i + 16 <= n; i += 16) {                                                                      \
            for (int lane = 0; lane < 16; lane += v##_lanes)                                                \
                v##_store(xdi_xtoken_floats(part), lane, v##_load(x, i + lane));                            \
            for (int half = 0; half < 16; half += 8) {                                                      \
                xdi_f8 narrow;                                                                              \
                xdi_d8 sum;                                                                                 \
                memcpy(&narrow, part + half, sizeof narrow);                                                \
                sum = __builtin_convertvector(narrow, xdi_d8) * factor - shift;                             \
                if (add) {                                                                                  \
                    xdi_d8 before;                                                                          \
                    memcpy(&before, cells + i + half, sizeof before);                                       \
                    sum += before;                                                                          \
                }                                                                                           \
                memcpy(cells + i + half, &sum, sizeof sum);                                                 \
            }                                                                                               \
        }                                                                                                   \
        xdi_simd_part(x, i, n, 16, 0.0f, part);                                                             \
        for (int lane = 0; i + lane < n; lane++)                                                            \
            cells[i + lane] = (add ? cells[i + lane] : 0.0) + ((double)part[lane] * factor - shift);        \
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

#define XDI_XTOKEN_W_LOOPS(v, INLINE, LEAF)                                                          \
    INLINE void v##_xtoken_write_loop(const xdi_xtoken_writer *w, int64_t n, bool hard, bool soft) { \
        const v shift = v##_set(w->shift), scale = v##_set(w->u_scale);                              \
        for (int64_t i = 0; i < n; i += v##_lanes) {                                                 \
            const v x = v##_read(w->x, i, n, -INFINITY);                                             \
            v out = w->add ? v##_read(w->out, i, n, 0.0f) : v##_set(0.0f);                           \
            v u = v##_set(0.0f);                                                                     \
            if (hard) out = v##_add(out, v##_scaled_exp2(x, &w->p1.power, w->p1.scale));             \
            if (w->u) u = v##_mul(v##_read(xdi_xtoken_floats(w->u), i, n, 0.0f), scale);             \
            if (soft) {                                                                              \
                const v p = v##_scaled_exp2(x, &w->p.power, w->p.scale);                             \
                u = w->times_p ? v##_mul(p, v##_sub(u, shift)) : v##_sub(u, v##_mul(p, shift));      \
            }                                                                                        \
            v##_write(w->out, i, n, v##_add(out, u));                                                \
        }                                                                                            \
    }                                                                                                \
    LEAF void v##_xtoken_write(const xdi_xtoken_writer *given, int64_t n) {                          \
        const xdi_xtoken_writer w = *given; /* stores cannot change a copy */                        \
        if (w.hard && w.soft) v##_xtoken_write_loop(&w, n, true, true);                              \
        if (w.hard && !w.soft) v##_xtoken_write_loop(&w, n, true, false);                            \
        if (!w.hard && w.soft) v##_xtoken_write_loop(&w, n, false, true);                            \
        if (!w.hard && !w.soft) v##_xtoken_write_loop(&w, n, false, false);                          \
    }

#define XDI_XTOKEN_LOOPS(v, INLINE, LEAF)                                                              \
    XDI_XTOKEN_P_LOOPS(v, LEAF)                                                                        \
    XDI_XTOKEN_D_LOOPS(v, LEAF)                                                                        \
    XDI_XTOKEN_W_LOOPS(v, INLINE, LEAF)                                                                \
    static const xdi_xtoken_loops v##_xtoken = { v##_xtoken_powers, v##_xtoken_dot,  v##_xtoken_walk,  \
                                                 v##_to_tables,     v##_to_lanes,    v##_xtoken_widen, \
                                                 v##_xtoken_slopes, v##_xtoken_pair, v##_xtoken_write };

/* ---- 16 by 16 ---- */

static void xdi_v4_to_tables(const float *lanes, float *tables) {
    for (int i = 0; i < XDI_XTOKEN_BLOCK; i++)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
            tables[i * XDI_XTOKEN_LANES + lane] = lanes[lane * XDI_XTOKEN_STRIDE + i];
}

static void xdi_v4_to_lanes(const float *tables, float *lanes) {
    for (int i = 0; i < XDI_XTOKEN_BLOCK; i++)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
            lanes[lane * XDI_XTOKEN_STRIDE + i] = tables[i * XDI_XTOKEN_LANES + lane];
}

XDI_XTOKEN_LOOPS(xdi_v4, XDI_SIMD_INLINE, XDI_SIMD_128)

#if defined(XDI_X86)

#    if !defined(__clang__)
#        pragma GCC diagnostic push
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#        pragma GCC diagnostic ignored "-Wuninitialized"
#    endif

/* Eight lines of eight. */
XDI_SIMD_INLINE_256 void xdi_v8_transpose(const float *from, int64_t from_stride, float *to,
                                          int64_t to_stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + i * from_stride);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; half++) {
            a[i + 2 * half] = _mm256_shuffle_ps(b[i + half], b[i + 2 + half], 0x44);
            a[i + 2 * half + 1] = _mm256_shuffle_ps(b[i + half], b[i + 2 + half], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

XDI_SIMD_256 void xdi_v8_to_tables(const float *lanes, float *tables) {
    for (int i = 0; i < XDI_XTOKEN_BLOCK; i += 8)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += 8)
            xdi_v8_transpose(lanes + lane * XDI_XTOKEN_STRIDE + i, XDI_XTOKEN_STRIDE,
                             tables + i * XDI_XTOKEN_LANES + lane, XDI_XTOKEN_LANES);
}

XDI_SIMD_256 void xdi_v8_to_lanes(const float *tables, float *lanes) {
    for (int i = 0; i < XDI_XTOKEN_BLOCK; i += 8)
        for (int lane = 0; lane < XDI_XTOKEN_LANES; lane += 8)
            xdi_v8_transpose(tables + i * XDI_XTOKEN_LANES + lane, XDI_XTOKEN_LANES,
                             lanes + lane * XDI_XTOKEN_STRIDE + i, XDI_XTOKEN_STRIDE);
}

/* Eight at a time is fast enough for both widths. */
XDI_SIMD_512 void xdi_v16_to_tables(const float *lanes, float *tables) {
    xdi_v8_to_tables(lanes, tables);
}

XDI_SIMD_512 void xdi_v16_to_lanes(const float *tables, float *lanes) {
    xdi_v8_to_lanes(tables, lanes);
}

XDI_XTOKEN_LOOPS(xdi_v8, XDI_SIMD_INLINE_256, XDI_SIMD_256)
XDI_XTOKEN_LOOPS(xdi_v16, XDI_SIMD_INLINE_512, XDI_SIMD_512)

#    if !defined(__clang__)
#        pragma GCC diagnostic pop
#    endif

#endif /* XDI_X86 */

static const xdi_xtoken_loops *xdi_xtoken_loops_of(const xd_launch *launch) {
    switch (xd_ctx_settings(launch->ctx)->cpu) {
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_v8_xtoken;
    case XD_CPU_AVX512:
    case XD_CPU_AVX512_BF16: return &xdi_v16_xtoken;
#endif
    default: return &xdi_v4_xtoken;
    }
}

/* ---- rows ---- */

/* scale exp(z / temperature - lse); false where f32 does not fit. */
static bool xdi_fast_xtoken_power(double temperature, double lse, double scale, xdi_xtoken_power *p) {
    const double factor = XDI_TILE_LOG2E / temperature, log2_all = lse * temperature * (double)(float)factor;
    if (!xdi_fast_fits(lse * temperature, factor)) return false;
    p->power = xdi_tile_power_of(factor, rint(log2_all));
    p->scale = (float)(scale * exp2(rint(log2_all) - log2_all));
    return true;
}

static bool xdi_fast_xtoken_takes(const xd_xtoken_args *a) {
    const bool gradient =
        !a->gradient.data || a->gradient.dtype == XD_DTYPE_F32 || a->gradient.dtype == XD_DTYPE_BF16;
    return !a->fixed && gradient && (a->logits.dtype == XD_DTYPE_F32 || a->logits.dtype == XD_DTYPE_BF16);
}

static xd_xtoken_args xdi_fast_xtoken_one(const xd_xtoken_args *a, int64_t i) {
    xd_xtoken_args one = *a;
    one.rows = a->rows + i;
    one.places = a->places + i;
    one.delta = a->delta ? a->delta + i : NULL;
    one.count = 1;
    return one;
}

/* ---- 16 chunks at once ---- */

/* Places [first, first + 16), and where their tables are in the caller's scratch. */
typedef struct xdi_fast_group {
    const xdi_xtoken_loops *loops;
    const xd_xtoken_args *a;
    int64_t first;
    float *slots; /* [k, 16] */
    float *ids;   /* [BLOCK, 16] of a block */
    float *lanes; /* [16, STRIDE] the same, the other way round */
} xdi_fast_group;

static xdi_fast_group xdi_fast_group_at(const xd_launch *launch, const xd_xtoken_args *a, int64_t first) {
    xdi_fast_group g;
    g.loops = xdi_xtoken_loops_of(launch);
    g.a = a;
    g.first = first;
    g.slots = a->scratch;
    g.ids = g.slots + XDI_XTOKEN_LANES * a->k;
    g.lanes = g.ids + XDI_XTOKEN_LANES * XDI_XTOKEN_BLOCK;
    return g;
}

/* The lane of a row at work; -1 when it is not of the group. */
static int64_t xdi_fast_lane(const xdi_fast_group *g, int64_t i) {
    const int64_t lane = g->a->places[i] - g->first;
    return lane >= 0 && lane < XDI_XTOKEN_LANES ? lane : -1;
}

static bool xdi_fast_group_is_empty(const xdi_fast_group *g) {
    for (int64_t i = 0; i < g->a->count; i++)
        if (xdi_fast_lane(g, i) >= 0) return false;
    return true;
}

static int64_t xdi_fast_block_at(int64_t v, int64_t columns) {
    const int64_t block = XDI_XTOKEN_BLOCK;
    return columns - v < block ? columns - v : block;
}

/* Probabilities of a block, summed over each chunk's rows: lanes. */
static void xdi_fast_project_block(const xdi_fast_group *g, int64_t v, int64_t n) {
    const xd_xtoken_args *a = g->a;
    bool has[XDI_XTOKEN_LANES];
    memset(has, 0, sizeof has);
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t lane = xdi_fast_lane(g, i);
        xdi_xtoken_power p;
        if (lane < 0 || !xdi_fast_xtoken_power(a->temperature, a->lse[a->rows[i]], 1.0, &p)) continue;
        g->loops->powers(xdi_fast_array(&a->logits, a->rows[i], v), n, p, has[lane],
                         g->lanes + lane * XDI_XTOKEN_STRIDE);
        has[lane] = true;
    }
    for (int lane = 0; lane < XDI_XTOKEN_LANES; lane++)
        if (!has[lane]) memset(g->lanes + lane * XDI_XTOKEN_STRIDE, 0, XDI_XTOKEN_BLOCK * sizeof(float));
}

static void xdi_fast_project_group(const xdi_fast_group *g) {
    const xd_xtoken_args *a = g->a;
    const xd_xtoken_matrix *m = &a->matrix;
    memset(g->slots, 0, (size_t)(XDI_XTOKEN_LANES * m->k) * sizeof(float));
    for (int64_t v = 0; v < m->columns; v += XDI_XTOKEN_BLOCK) {
        const int64_t n = xdi_fast_block_at(v, m->columns), from = m->begin[v],
                      count = m->begin[v + n] - from;
        if (count == 0) continue;
        xdi_fast_project_block(g, v, n);
        g->loops->to_tables(g->lanes, g->ids);
        g->loops->walk(m->slot + from, 0, m->student + from, v, m->weight + from, count, g->slots, g->ids);
    }
    for (int64_t lane = 0; lane < XDI_XTOKEN_LANES && g->first + lane < a->place_count; lane++) {
        double *cells = a->cells + (g->first + lane) * m->k;
        for (int64_t j = 0; j < m->k; j++) cells[j] += (double)g->slots[j * XDI_XTOKEN_LANES + lane];
    }
}

static xd_result xdi_fast_xtoken_project(const xd_launch *launch, const xd_xtoken_args *a) {
    const xd_xtoken_kernels plain = xd_xtoken_kernels_cpu();
    xdi_xtoken_power p;
    if (!xdi_fast_xtoken_takes(a)) return plain.project(launch, a);
    for (int64_t first = 0; first < a->place_count; first += XDI_XTOKEN_LANES) {
        const xdi_fast_group g = xdi_fast_group_at(launch, a, first);
        if (!xdi_fast_group_is_empty(&g)) xdi_fast_project_group(&g);
    }
    for (int64_t i = 0; i < a->count; i++) {
        const xd_xtoken_args one = xdi_fast_xtoken_one(a, i);
        if (!xdi_fast_xtoken_power(a->temperature, a->lse[a->rows[i]], 1.0, &p))
            XDI_TRY(plain.project(launch, &one));
    }
    return XD_OK;
}

/* dy of the group's chunks: slots. */
static void xdi_fast_load_slopes(const xdi_fast_group *g) {
    for (int64_t lane = 0; lane < XDI_XTOKEN_LANES; lane++) {
        const double *dy = g->a->student + (g->first + lane) * g->a->k;
        const bool there = g->first + lane < g->a->place_count;
        for (int64_t j = 0; j < g->a->k; j++)
            g->slots[j * XDI_XTOKEN_LANES + lane] = there ? (float)dy[j] : 0.0f;
    }
}

/* h = M dy of a block: lanes. */
static void xdi_fast_back_block(const xdi_fast_group *g, int64_t v, int64_t n) {
    const xd_xtoken_matrix *m = &g->a->matrix;
    const int64_t from = m->begin[v], count = m->begin[v + n] - from;
    memset(g->ids, 0, XDI_XTOKEN_LANES * XDI_XTOKEN_BLOCK * sizeof(float));
    g->loops->walk(m->student + from, v, m->slot + from, 0, m->weight + from, count, g->ids, g->slots);
    g->loops->to_lanes(g->ids, g->lanes);
}

static xd_result xdi_fast_xtoken_delta(const xd_launch *launch, const xd_xtoken_args *a) {
    const xd_xtoken_kernels plain = xd_xtoken_kernels_cpu();
    const xd_xtoken_matrix *m = &a->matrix;
    xdi_xtoken_power p;
    if (!xdi_fast_xtoken_takes(a)) return plain.delta(launch, a);
    for (int64_t first = 0; first < a->place_count; first += XDI_XTOKEN_LANES) {
        const xdi_fast_group g = xdi_fast_group_at(launch, a, first);
        if (xdi_fast_group_is_empty(&g)) continue;
        xdi_fast_load_slopes(&g);
        for (int64_t v = 0; v < m->columns; v += XDI_XTOKEN_BLOCK) {
            const int64_t n = xdi_fast_block_at(v, m->columns);
            if (m->begin[v] == m->begin[v + n]) continue;
            xdi_fast_back_block(&g, v, n);
            for (int64_t i = 0; i < a->count; i++) {
                const int64_t lane = xdi_fast_lane(&g, i);
                if (lane < 0 || !xdi_fast_xtoken_power(a->temperature, a->lse[a->rows[i]], 1.0, &p)) continue;
                a->cells[i] += g.loops->dot(xdi_fast_array(&a->logits, a->rows[i], v), n, p,
                                            g.lanes + lane * XDI_XTOKEN_STRIDE) /
                               a->chunks[a->places[i]].largest;
            }
        }
    }
    for (int64_t i = 0; i < a->count; i++) {
        xd_xtoken_args one = xdi_fast_xtoken_one(a, i);
        one.cells = a->cells + i;
        if (!xdi_fast_xtoken_power(a->temperature, a->lse[a->rows[i]], 1.0, &p))
            XDI_TRY(plain.delta(launch, &one));
    }
    return XD_OK;
}

/* ---- gradient ---- */

/* What of rows[i] is the same for all blocks; false where f32 does not fit. */
static bool xdi_fast_writer(const xd_xtoken_args *a, int64_t i, xdi_xtoken_writer *w) {
    const int64_t row = a->rows[i];
    const double delta = a->delta ? a->delta[i] : 0.0;
    memset(w, 0, sizeof *w);
    w->add = a->written[row] != 0;
    w->times_p = a->matrix.begin != NULL;
    w->soft = w->times_p || delta != 0.0;
    w->hard = !w->add && a->ce_factor && a->ce_factor[row] != 0.0;
    w->u = a->u;
    w->u_scale = a->matrix.begin ? 1.0f : (float)a->scale;
    w->shift = (float)delta;
    if (w->soft && !xdi_fast_xtoken_power(a->temperature, a->lse[row],
                                          a->matrix.begin ? 1.0 / a->temperature : 1.0, &w->p))
        return false;
    return !w->hard || xdi_fast_xtoken_power(1.0, a->lse_one[row], a->ce_factor[row] * a->ce_weight, &w->p1);
}

/* Columns [v, v + n) of rows[i]. The label is subtracted before the sum is rounded, and needs what the
 * gradient and the logits held there. */
static void xdi_fast_write_block(const xdi_xtoken_loops *loops, const xd_xtoken_args *a, int64_t i,
                                 xdi_xtoken_writer *w, int64_t v, int64_t n) {
    const int64_t row = a->rows[i], label = w->hard ? a->labels[row] - a->first : -1;
    const bool here = label >= v && label < v + n;
    double at_label = 0.0;
    if (here) {
        const double h = a->matrix.begin ? (double)w->u[label - v] : 0.0;
        at_label = xdi_xtoken_gradient_at(a, i, label, h);
    }
    w->x = xdi_fast_array(&a->logits, row, v);
    w->out = xdi_fast_array(&a->gradient, row, v);
    loops->write(w, n);
    if (here) xdi_loss_store(&a->gradient, row, label, at_label);
}

static void xdi_fast_end_row(const xd_xtoken_args *a, int64_t row) {
    for (int64_t v = a->columns; v < a->gradient.cols && !a->written[row]; v++)
        xdi_loss_store(&a->gradient, row, v, 0.0);
    a->written[row] = 1;
}

/* Rows of a group by blocks, so that h is made once for all rows of a chunk. */
static void xdi_fast_write_group(const xdi_fast_group *g) {
    const xd_xtoken_args *a = g->a;
    xdi_xtoken_writer w;
    xdi_fast_load_slopes(g);
    for (int64_t v = 0; v < a->columns; v += XDI_XTOKEN_BLOCK) {
        const int64_t n = xdi_fast_block_at(v, a->columns);
        xdi_fast_back_block(g, v, n);
        for (int64_t i = 0; i < a->count; i++) {
            const int64_t lane = xdi_fast_lane(g, i);
            if (lane < 0 || !xdi_fast_writer(a, i, &w)) continue;
            w.u = g->lanes + lane * XDI_XTOKEN_STRIDE;
            xdi_fast_write_block(g->loops, a, i, &w, v, n);
        }
    }
}

static void xdi_fast_write_row(const xdi_xtoken_loops *loops, const xd_xtoken_args *a, int64_t i) {
    xdi_xtoken_writer w;
    if (!xdi_fast_writer(a, i, &w)) {
        xdi_xtoken_gradient_row(a, i);
        return;
    }
    for (int64_t v = 0; v < a->columns; v += XDI_TILE) {
        w.u = a->u ? a->u + v : NULL;
        xdi_fast_write_block(loops, a, i, &w, v, xdi_fast_tile_at(v, a->columns));
    }
    xdi_fast_end_row(a, a->rows[i]);
}

static xd_result xdi_fast_xtoken_gradient(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_xtoken_writer w;
    if (!xdi_fast_xtoken_takes(a)) return xd_xtoken_kernels_cpu().gradient(launch, a);
    if (!a->matrix.begin) {
        for (int64_t i = 0; i < a->count; i++) xdi_fast_write_row(xdi_xtoken_loops_of(launch), a, i);
        return XD_OK;
    }
    for (int64_t first = 0; first < a->place_count; first += XDI_XTOKEN_LANES) {
        const xdi_fast_group g = xdi_fast_group_at(launch, a, first);
        if (!xdi_fast_group_is_empty(&g)) xdi_fast_write_group(&g);
    }
    for (int64_t i = 0; i < a->count; i++) {
        if (xdi_fast_writer(a, i, &w))
            xdi_fast_end_row(a, a->rows[i]);
        else
            xdi_xtoken_gradient_row(a, i);
    }
    return XD_OK;
}

/* ---- teacher ---- */

/* ln sum e^(x / temperature); NaN where f32 does not fit. */
static double xdi_fast_xtoken_lse(const xdi_tiles *tiles, const xd_rows *x, int64_t row, int64_t columns,
                                  double temperature) {
    xdi_row_sum sum;
    if (!xdi_fast_row_sum(tiles, x, row, columns, XDI_TILE_LOG2E / temperature, &sum)) return (double)NAN;
    return sum.max / temperature + log(sum.sum);
}

static xd_result xdi_fast_xtoken_target(const xd_launch *launch, const xd_xtoken_args *a) {
    const xd_xtoken_kernels plain = xd_xtoken_kernels_cpu();
    const xdi_tiles *tiles = xdi_fast_tiles(launch);
    const xd_rows picked = { a->scratch, XD_DTYPE_F32, 1, a->k, 0 };
    if (!xdi_fast_xtoken_takes(a)) return plain.target(launch, a);
    for (int64_t i = 0; i < a->count; i++) {
        const xdi_simd_array y = xdi_fast_array(&a->logits, a->rows[i], 0);
        for (int64_t j = 0; j < a->k; j++)
            a->scratch[j] = y.bf16 ? xd_f32_from_bf16(((const uint16_t *)y.data)[a->ids[j]])
                                   : ((const float *)y.data)[a->ids[j]];
        const double lse = xdi_fast_xtoken_lse(tiles, &picked, 0, a->k, a->temperature);
        const xd_xtoken_args one = xdi_fast_xtoken_one(a, i);
        if (isnan(lse))
            XDI_TRY(plain.target(launch, &one));
        else
            xdi_xtoken_loops_of(launch)->widen(xdi_xtoken_floats(a->scratch), a->k, 1.0 / a->temperature, lse,
                                               true, a->cells + a->places[i] * a->k);
    }
    return XD_OK;
}

static xd_result xdi_fast_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_args *a) {
    const xdi_tiles *tiles = xdi_fast_tiles(launch);
    const double factor = a->scale / a->temperature;
    if (!xdi_fast_xtoken_takes(a)) return xd_xtoken_kernels_cpu().log_probs(launch, a);
    if (a->count == 0) memset(a->cells, 0, (size_t)a->columns * sizeof *a->cells);
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t row = a->rows[i];
        const double lse =
            a->lse ? a->lse[row] : xdi_fast_xtoken_lse(tiles, &a->logits, row, a->columns, a->temperature);
        if (isfinite(lse)) {
            xdi_xtoken_loops_of(launch)->widen(xdi_fast_array(&a->logits, row, 0), a->columns, factor,
                                               lse * a->scale, i > 0, a->cells);
            continue;
        }
        if (i == 0) memset(a->cells, 0, (size_t)a->columns * sizeof *a->cells);
        xdi_xtoken_log_probs_row(a, i);
    }
    return XD_OK;
}

/* ---- divergences ---- */

/* x times scale less shift as f32; the sum of the products, and false when one is not finite. */
static bool xdi_fast_narrow(const double *x, int64_t n, double scale, double shift, float *out, double *sum) {
    double sums[4] = { 0.0, 0.0, 0.0, 0.0 };
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int lane = 0; lane < 4; lane++) {
            const double product = x[i + lane] * scale;
            sums[lane] += product;
            out[i + lane] = (float)(product - shift);
        }
    for (; i < n; i++) {
        sums[0] += x[i] * scale;
        out[i] = (float)(x[i] * scale - shift);
    }
    *sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return isfinite(*sum) != 0;
}

static int64_t xdi_fast_argmax(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* As xdi_cpu_xtoken_chunk; false where f32 does not fit, and then nothing is changed. */
static bool xdi_fast_chunk(const xd_launch *launch, const xd_xtoken_args *a, xd_xtoken_chunk *c, double *q,
                           const double *target) {
    const xdi_xtoken_loops *loops = xdi_xtoken_loops_of(launch);
    const int64_t k = a->k;
    float *r = a->scratch, *t = r + k;
    const xd_rows targets = { t, XD_DTYPE_F32, 1, k, 0 };
    double mass, unused, lse = 0.0, dot = 0.0;
    if (!xdi_fast_narrow(q, k, 1.0 / c->student, 0.0, r, &mass) ||
        !xdi_fast_narrow(target, k, 1.0 / c->teacher, 0.0, t, &unused))
        return false;
    if (a->normalise) {
        lse = xdi_fast_xtoken_lse(xdi_fast_tiles(launch), &targets, 0, k, 1.0);
        if (isnan(lse)) return false;
        xdi_fast_narrow(target, k, 1.0 / c->teacher, lse, t, &unused);
    }
    const double z = mass + XD_XTOKEN_EPSILON;
    c->agree = xdi_fast_argmax(r, k) == xdi_fast_argmax(t, k);
    c->value = 0.0;
    for (int64_t j = 0; j < k; j += XDI_TILE) {
        double part;
        c->value += loops->slopes(r + j, t + j, xdi_fast_tile_at(j, k), (float)(1.0 / z), a->reverse, &part);
        dot += part;
    }
    c->delta = dot * XD_XTOKEN_EPSILON / z;
    for (int64_t j = 0; j < k; j++) q[j] = ((double)r[j] - dot) / z;
    xdi_xtoken_scale_slopes(c, q, k);
    return true;
}

static xd_result xdi_fast_xtoken_divergence(const xd_launch *launch, const xd_xtoken_args *a) {
    const xd_xtoken_kernels plain = xd_xtoken_kernels_cpu();
    if (a->fixed) return plain.divergence(launch, a);
    for (int64_t i = 0; i < a->place_count; i++) {
        xd_xtoken_args one = *a;
        one.student = a->student + i * a->k;
        one.teacher = a->teacher + i * a->k;
        one.chunks = a->chunks + i;
        one.place_count = 1;
        if (!one.chunks->compared || !xdi_fast_chunk(launch, a, one.chunks, one.student, one.teacher))
            XDI_TRY(plain.divergence(launch, &one));
    }
    return XD_OK;
}

/* The likeliest pair so far. */
typedef struct xdi_fast_best {
    double value;
    int64_t pair;
} xdi_fast_best;

static inline void xdi_fast_better(xdi_fast_best *best, double value, int64_t pair) {
    if (best->pair >= 0 && !(value > best->value)) return;
    best->value = value;
    best->pair = pair;
}

/* Pairs [at, at + n) of this shard, gathered; returns how many there are. */
static int64_t xdi_fast_pair_gather(const xd_xtoken_args *a, int64_t at, int64_t n, float *alpha, float *beta,
                                    int32_t *ids, xdi_fast_best *best, xdi_fast_best *other_best) {
    const double *means = a->means, *others = a->others;
    const int32_t *pair = a->pair + at, *other = a->other + at;
    const int64_t first = a->first, columns = a->columns;
    xdi_fast_best mine = *best, teacher = *other_best;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t v = pair[i] - first;
        const double y = others[other[i]];
        xdi_fast_better(&teacher, y, at + i);
        if (v < 0 || v >= columns) continue;
        xdi_fast_better(&mine, means[v], at + i);
        alpha[count] = (float)means[v];
        beta[count] = (float)y;
        ids[count++] = (int32_t)v;
    }
    *best = mine;
    *other_best = teacher;
    return count;
}

static xd_result xdi_fast_xtoken_pair(const xd_launch *launch, xd_xtoken_args *a) {
    const xdi_xtoken_loops *loops = xdi_xtoken_loops_of(launch);
    float alpha[XDI_TILE], beta[XDI_TILE], slope[XDI_TILE];
    int32_t ids[XDI_TILE];
    xdi_fast_best best = { -INFINITY, -1 }, other_best = best;
    if (a->fixed) return xd_xtoken_kernels_cpu().pair(launch, a);
    memset(a->slope, 0, (size_t)a->columns * sizeof *a->slope);
    for (int64_t at = 0; at < a->pairs; at += XDI_TILE) {
        const int64_t n =
            xdi_fast_pair_gather(a, at, xdi_fast_tile_at(at, a->pairs), alpha, beta, ids, &best, &other_best);
        a->cells[0] += loops->pair(alpha, beta, n, a->reverse, slope);
        for (int64_t i = 0; i < n; i++) a->slope[ids[i]] = slope[i];
    }
    a->best = best.pair;
    a->other_best = other_best.pair;
    return XD_OK;
}

/* Without -infinity and what is not a number the selected values are the probabilities' logarithms as f32. */
static xd_result xdi_fast_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t) {
    const xdi_xtoken_loops *loops = xdi_xtoken_loops_of(launch);
    const xdi_xtoken_power p = { xdi_tile_power_of(XDI_TILE_LOG2E, 0.0), 1.0f };
    int64_t first;
    float *powers = t->scratch;
    XDI_TRY(xdi_xtoken_tail_select(launch, t, &first));
    if (t->fixed) return xdi_xtoken_tail_finish(t, first);
    for (int64_t i = 0; i < t->k; i++)
        if (t->found[i] < 0 || !(t->values[i] > -INFINITY)) return xdi_xtoken_tail_finish(t, first);
    for (int64_t i = 0; i < t->k; i++) {
        t->found[i] = t->ids[first + t->found[i]] - t->begin;
        powers[i] = (float)t->values[i];
    }
    for (int64_t i = 0; i < t->k; i += XDI_TILE)
        loops->powers(xdi_xtoken_floats(powers + i), xdi_fast_tile_at(i, t->k), p, false, powers + i);
    for (int64_t i = 0; i < t->k; i++) t->values[i] = (double)powers[i];
    return XD_OK;
}

static xd_result xdi_fast_xtoken_total(const xd_launch *launch, const xd_xtoken_args *a) {
    const xdi_tiles *tiles = xdi_fast_tiles(launch);
    if (a->fixed) return xd_xtoken_kernels_cpu().total(launch, a);
    for (int64_t v = 0; v < a->columns; v += XDI_TILE)
        a->cells[0] += tiles->linear(xdi_xtoken_floats(a->u + v), xdi_fast_tile_at(v, a->columns), 0.0f);
    return XD_OK;
}

/* The entries that vectors do better. */
XD_PRIVATE void xdi_fast_xtoken_fill(xd_xtoken_kernels *kernels) {
    kernels->project = xdi_fast_xtoken_project;
    kernels->target = xdi_fast_xtoken_target;
    kernels->divergence = xdi_fast_xtoken_divergence;
    kernels->delta = xdi_fast_xtoken_delta;
    kernels->gradient = xdi_fast_xtoken_gradient;
    kernels->log_probs = xdi_fast_xtoken_log_probs;
    kernels->pair = xdi_fast_xtoken_pair;
    kernels->tail = xdi_fast_xtoken_tail;
    kernels->total = xdi_fast_xtoken_total;
}
