/* Gradients of losses across tokenizers. A warp works on a span of the columns of a chunk's rows after the other, without a barrier
 * of its block: what depends on the chunk alone is formed once for all rows. Reads the logits, and the gradient of a row that was
 * written before; writes once. */

enum {
    XDI_CUDA_GRADE_LINES = 8, /* rows at a time */
    XDI_CUDA_GRADE_TEAM = 128,
    XDI_CUDA_GRADE_WARPS = XDI_CUDA_GRADE_TEAM / XDI_CUDA_WARP,
    XDI_CUDA_GRADE_SPANS = 8 /* of a warp */
};

/* What a column's derivative comes from. */
enum xdi_cuda_grade_kind {
    XDI_CUDA_GRADE_NONE,   /* cross entropy alone */
    XDI_CUDA_GRADE_MATRIX, /* p (M dy - delta) / temperature */
    XDI_CUDA_GRADE_MEANS   /* scale u - p delta */
};

struct xdi_cuda_grade {
    xd_xtoken_gradient to;
    xdi_cuda_matrix matrix;
    const double *dy; /* [chunks, k] */
    int64_t k;
    const float *u; /* [chunks, columns] */
    const double *delta, *slopes;
    double scale;                  /* of u */
    const xd_xtoken_chunk *chunks; /* NULL: no row is skipped */
    bool one_chunk;                /* all rows are of the first */
    bool by_factor;                /* u's scale is also the chunk's factor */
    bool rest;                     /* rows of the logits, those that were written before are skipped */
    int64_t parts;                 /* blocks of a chunk */
};

/* What the elements of a row have in common; no gaps, as they are copied whole. */
struct xdi_cuda_grade_hard {
    xdi_cuda_xtoken_power one; /* at the temperature 1 */
    float ce;
    int32_t label;
};

struct xdi_cuda_grade_line {
    xdi_cuda_xtoken_power power; /* at the temperature */
    float delta;
    int64_t row;
    int32_t add, soft; /* flags */
};

struct xdi_cuda_grade_lines {
    xdi_cuda_grade_line line;
    xdi_cuda_grade_hard hard;
    int32_t unused;
};

/* A row of the call, or of the logits. */
static __device__ inline int64_t xdi_cuda_grade_row(const xdi_cuda_grade &f, int64_t i) {
    return f.rest ? i : f.to.x.rows[i];
}

static __device__ inline void xdi_cuda_grade_begin(const xdi_cuda_grade &f, int64_t i, double per_delta,
                                                   xdi_cuda_grade_lines *w) {
    const xd_xtoken_rows &x = f.to.x;
    const double delta = f.delta ? f.delta[i] : 0.0;
    const int64_t row = xdi_cuda_grade_row(f, i);
    double ce = 0.0;
    *w = xdi_cuda_grade_lines();
    w->line.row = row;
    w->line.add = f.to.written[row] != 0;
    if (!w->line.add && f.to.ce_factor) ce = f.to.ce_factor[row] * f.to.ce_weight;
    if (f.slopes) ce -= f.slopes[i];
    w->hard.ce = (float)ce;
    w->line.delta = (float)(delta * per_delta);
    w->line.soft = f.dy || delta != 0.0;
    const int64_t label = ce != 0.0 ? xd_id_at(f.to.labels, row) - x.first : -1;
    w->hard.label = label >= 0 && label < x.columns ? (int32_t)label : -1;
    if (ce != 0.0) w->hard.one.set(f.to.lse_one[row], 1.0);
    if (w->line.soft) w->line.power.set(x.lse[row], x.temperature);
}

/* Adds the cross entropy. */
static __device__ inline void xdi_cuda_grade_add_hard(const xdi_cuda_grade_hard &hard, int c, const xdi_cuda_eight &z,
                                                      xdi_cuda_eight *out) {
    const float ce = hard.ce;
    const xdi_cuda_xtoken_power one = hard.one;
    const int label = hard.label - c;
    if (ce == 0.0f) return;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) out->at[i] = __fmaf_rn(ce, one(z.at[i]), out->at[i]);
    if (hard.label < 0 || (unsigned)label >= XDI_CUDA_EIGHT) return;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (i == label) out->at[i] = __fsub_rn(out->at[i], ce);
}

/* Adds the part of the divergence. slopes: M dy / temperature, or u. */
template <int KIND>
static __device__ inline void xdi_cuda_grade_soft(const xdi_cuda_grade_line &w, const xdi_cuda_eight &slopes, float scale,
                                                  const xdi_cuda_eight &z, xdi_cuda_eight *out) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        const float p = w.soft ? w.power(z.at[i]) : 0.0f;
        if (KIND == XDI_CUDA_GRADE_MATRIX)
            out->at[i] = __fmaf_rn(p, __fsub_rn(slopes.at[i], w.delta), out->at[i]);
        else
            out->at[i] = __fadd_rn(out->at[i], __fmaf_rn(-p, w.delta, __fmul_rn(slopes.at[i], scale)));
    }
}

struct xdi_cuda_grade_asked {
    xdi_cuda_matrix_id id;
    double dy;
};

/* M dy / temperature of a segment's columns, by a warp. first, end: its ids. */
static __device__ inline void xdi_cuda_grade_slopes(const xdi_cuda_grade &f, int begin, int first, int end, const double *dy,
                                                    xdi_cuda_pack<float> *packs) {
    const xdi_cuda_matrix &m = f.matrix;
    const double inverse = 1.0 / f.to.x.temperature;
    const xdi_cuda_pack<float> zero = {};
    float *slopes = packs[0].at;
    __syncwarp(); /* the slopes before are no longer read */
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_MATRIX_SEGMENT / 4; i += XDI_CUDA_WARP) packs[i + (int)(threadIdx.x % XDI_CUDA_WARP)] = zero;
    __syncwarp();
    xdi_cuda_each_ahead<XDI_CUDA_WARP, 3>(
        end - first, [&](int64_t i) { return xdi_cuda_load_whole(m.ids + first + i); },
        [&](const xdi_cuda_matrix_id &id) -> xdi_cuda_grade_asked { return { id, dy[id.entry.slot] }; },
        [&](int64_t, const xdi_cuda_grade_asked &x) {
            slopes[x.id.column - begin] = (float)__dmul_rn(xdi_cuda_matrix_back(m, x.id, x.dy, dy), inverse);
        });
    __syncwarp();
}

/* What lies beyond the columns is 0. */
static __device__ inline void xdi_cuda_grade_trim(int count, xdi_cuda_eight *out) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (i >= count) out->at[i] = 0.0f;
}

/* What a warp has of a place's rows. T: the type of the logits. */
template <int KIND, typename T> struct xdi_cuda_grade_walk {
    /* Eights of a lane, of which so many are on their way at once. */
    enum { EIGHTS = 4, AHEAD = KIND == XDI_CUDA_GRADE_NONE ? 2 : 1, SPAN = EIGHTS * XDI_CUDA_EIGHT * XDI_CUDA_WARP };
    const xdi_cuda_grade &f;
    const float *u; /* of the place */
    const double *dy;
    float scale;
    xdi_cuda_pack<float> *packs; /* [SPAN / 4] slopes */

    /* What is on its way of eight columns. Nothing waits for it before the logits are widened. */
    struct coming {
        xdi_cuda_raw<T> logits;
        xdi_cuda_raw<float> u;
    };

    __device__ int column(int begin, int e) const {
        return begin + XDI_CUDA_EIGHT * (e * XDI_CUDA_WARP + (int)(threadIdx.x % XDI_CUDA_WARP));
    }
    __device__ int columns() const {
        return (int)f.to.x.columns;
    }
    __device__ bool is_whole(const void *row, int c) const {
        return xdi_cuda_is_aligned16(row) && c + XDI_CUDA_EIGHT <= columns();
    }
    __device__ void ask(const T *row, int c, coming *one) const {
        if (is_whole(row, c)) one->logits.load(row + c);
        if (KIND == XDI_CUDA_GRADE_MEANS && is_whole(u, c)) one->u.load(u + c);
    }
    template <typename X> __device__ xdi_cuda_eight take(const X *row, const xdi_cuda_raw<X> &raw, int c) const {
        if (is_whole(row, c)) return raw.widened();
        return c < columns() ? xdi_cuda_read(row, c, columns()) : xdi_cuda_eight();
    }
    /* to: the row of the gradient. */
    __device__ void write(const xdi_cuda_grade_line &w, const xdi_cuda_grade_hard &hard, void *to, int c, const xdi_cuda_eight &z,
                          const xdi_cuda_eight &slopes) const {
        const int end = w.add ? columns() : (int)f.to.rows.cols;
        const bool wide = f.to.rows.dtype == XD_DTYPE_F32;
        float *floats = static_cast<float *>(to);
        xdi_cuda_bf16 *halves = static_cast<xdi_cuda_bf16 *>(to);
        xdi_cuda_eight out = {};
        if (c >= end) return;
        if (w.add) out = wide ? xdi_cuda_read(floats, c, end) : xdi_cuda_read(halves, c, end);
        xdi_cuda_grade_add_hard(hard, c, z, &out);
        if (KIND != XDI_CUDA_GRADE_NONE) xdi_cuda_grade_soft<KIND>(w, slopes, scale, z, &out);
        if (c + XDI_CUDA_EIGHT > columns()) xdi_cuda_grade_trim(columns() > c ? columns() - c : 0, &out);
        if (wide)
            xdi_cuda_write(floats, c, end, out);
        else
            xdi_cuda_write(halves, c, end, out);
    }
    /* The span's columns from `begin` on. first, end: the ids of a segment. */
    __device__ void span(const xdi_cuda_grade_lines *lines, int count, int begin, int first, int end) const {
        XD_UNROLL_N(1)
        for (int r = 0; r < count; r++) {
            const T *row = xdi_cuda_row<T>(f.to.x.logits, lines[r].line.row);
            coming next[AHEAD];
            XD_UNROLL
            for (int e = 0; e < AHEAD; e++) {
                next[e] = {};
                ask(row, column(begin, e), &next[e]);
            }
            if (KIND == XDI_CUDA_GRADE_MATRIX && r == 0) xdi_cuda_grade_slopes(f, begin, first, end, dy, packs);
            const xdi_cuda_grade_line w = lines[r].line; /* in registers: what is stored might be it */
            void *to = const_cast<void *>(xdi_cuda_row_of(f.to.rows, w.row));
            XD_UNROLL_N(1)
            for (int e = 0; e < EIGHTS; e++) { /* once in the code: what is on its way moves up */
                const int c = column(begin, e);
                const coming now = next[0];
                XD_UNROLL
                for (int i = 1; i < AHEAD; i++) next[i - 1] = next[i];
                if (e + AHEAD < EIGHTS) ask(row, column(begin, e + AHEAD), &next[AHEAD - 1]);
                xdi_cuda_eight slope = {};
                if (KIND == XDI_CUDA_GRADE_MATRIX) slope = xdi_cuda_read_whole(packs[0].at + (c - begin));
                if (KIND == XDI_CUDA_GRADE_MEANS) slope = take(u, now.u, c);
                write(w, lines[r].hard, to, c, take(row, now.logits, c), slope);
            }
        }
    }
};

/* The rows of a block: those of a chunk, all, or one. */
static __device__ inline xdi_cuda_xtoken_range xdi_cuda_grade_rows(const xdi_cuda_grade &f, int64_t place) {
    if (f.chunks && !f.one_chunk) return xdi_cuda_xtoken_range(f.to.x, place);
    return xdi_cuda_xtoken_range(place, place + 1);
}

/* Every warp forms the lines for itself. */
template <int KIND, typename T>
static __global__ void __launch_bounds__(XDI_CUDA_GRADE_TEAM, sizeof(T) == 2 ? 5 : 4)
    xdi_cuda_grade_kernel(const __grid_constant__ xdi_cuda_grade f) {
    typedef xdi_cuda_grade_walk<KIND, T> walk_type;
    enum { PACKS = KIND == XDI_CUDA_GRADE_MATRIX ? (int)walk_type::SPAN / 4 : 1 };
    static_assert(KIND != XDI_CUDA_GRADE_MATRIX || (int)walk_type::SPAN == (int)XDI_CUDA_MATRIX_SEGMENT, "a segment a span");
    XD_SHARED(xdi_cuda_grade_lines, all_lines, [XDI_CUDA_GRADE_WARPS * XDI_CUDA_GRADE_LINES]);
    XD_SHARED(xdi_cuda_pack<float>, packs, [XDI_CUDA_GRADE_WARPS * PACKS]);
    const int64_t place = (int64_t)blockIdx.x / f.parts, part = (int64_t)blockIdx.x - place * f.parts;
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const xdi_cuda_xtoken_range rows = xdi_cuda_grade_rows(f, place);
    const xd_xtoken_chunk *chunk = f.chunks ? f.chunks + (f.one_chunk ? 0 : place) : NULL;
    const int64_t begin = part * (XDI_CUDA_GRADE_SPANS * XDI_CUDA_GRADE_WARPS) + warp;
    const int64_t own = begin + lane * XDI_CUDA_GRADE_WARPS; /* the span whose ids the lane knows */
    xdi_cuda_grade_lines *lines = all_lines + warp * XDI_CUDA_GRADE_LINES;
    int first = 0, end = 0;
    if (chunk && chunk->largest == 0.0) return; /* the whole block returns */
    if (f.rest && f.to.written[place]) return;  /* as here */
    if (KIND == XDI_CUDA_GRADE_MATRIX && lane < XDI_CUDA_GRADE_SPANS && own < f.matrix.segments)
        first = f.matrix.first[own], end = f.matrix.first[own + 1];
    const float scale = (float)(f.by_factor ? f.scale * chunk->factor : f.scale);
    const double per_delta = KIND == XDI_CUDA_GRADE_MATRIX ? 1.0 / f.to.x.temperature : 1.0;
    const float *u = KIND == XDI_CUDA_GRADE_MEANS ? f.u + (f.one_chunk ? 0 : place) * f.to.x.columns : NULL;
    const double *dy = KIND == XDI_CUDA_GRADE_MATRIX ? f.dy + place * f.k : NULL;
    const walk_type walk = { f, u, dy, scale, packs + warp * PACKS };
    for (int64_t r = rows.begin; r < rows.end; r += XDI_CUDA_GRADE_LINES) {
        const int count = rows.end - r < XDI_CUDA_GRADE_LINES ? (int)(rows.end - r) : (int)XDI_CUDA_GRADE_LINES;
        __syncwarp(); /* the lines before are no longer read */
        if (lane < count) xdi_cuda_grade_begin(f, r + lane, per_delta, &lines[lane]);
        __syncwarp();
        XD_UNROLL_N(1)
        for (int s = 0; s < XDI_CUDA_GRADE_SPANS; s++) {
            const int64_t at = (begin + s * XDI_CUDA_GRADE_WARPS) * walk_type::SPAN;
            if (at >= f.to.rows.cols) break;
            walk.span(lines, count, (int)at, __shfl_sync(0xffffffffu, first, s), __shfl_sync(0xffffffffu, end, s));
        }
    }
}

/* Marks the rows that have been written, when no block asks any more. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_grade_mark_kernel(const __grid_constant__ xdi_cuda_grade f, int64_t count) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= count) return;
    const xd_xtoken_chunk *chunk = f.chunks ? f.chunks + (f.one_chunk ? 0 : f.to.x.places[i]) : NULL;
    if (!chunk || chunk->largest != 0.0) f.to.written[xdi_cuda_grade_row(f, i)] = 1;
}

/* chunks: those of the call, or its rows where they are worked on one by one. */
template <int KIND>
static xd_result xdi_cuda_grade_run(const xd_launch *launch, xdi_cuda_grade f, int64_t chunks, int64_t rows) {
    const int64_t most = (int64_t)xdi_cuda_grade_walk<KIND, float>::SPAN * XDI_CUDA_GRADE_WARPS * XDI_CUDA_GRADE_SPANS;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    f.parts = (f.to.rows.cols + most - 1) / most;
    if (rows == 0 || f.parts == 0) return XD_OK;
    XDI_CUDA_LOGITS(f.to.x.logits.dtype, T, {
        const xdi_cuda_grid grid = xdi_cuda_grid_of(chunks * f.parts, XDI_CUDA_GRADE_TEAM);
        const auto kernel = xdi_cuda_grade_kernel<KIND, T>; /* its comma is none of the macro's */
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, kernel, f));
    })
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(rows), xdi_cuda_grade_mark_kernel, f, rows);
}

static xdi_cuda_grade xdi_cuda_grade_of(const xd_xtoken_gradient *to) {
    xdi_cuda_grade f = {};
    f.to = *to;
    f.scale = 1.0;
    return f;
}

static xd_result xdi_cuda_xtoken_project_gradient(const xd_launch *launch,
                                                  const xd_xtoken_project_gradient_args *a) {
    xdi_cuda_grade f = xdi_cuda_grade_of(&a->to);
    f.matrix = xdi_cuda_matrix(a->matrix);
    f.dy = a->dy;
    f.k = a->matrix.k;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_MATRIX>(launch, f, a->place_count, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_mean_gradient(const xd_launch *launch, const xd_xtoken_mean_gradient_args *a) {
    xdi_cuda_grade f = xdi_cuda_grade_of(&a->to);
    f.u = a->u;
    f.scale = a->scale;
    f.delta = a->delta;
    f.chunks = a->chunk;
    f.one_chunk = true;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_MEANS>(launch, f, a->to.x.count, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_label_gradient(const xd_launch *launch, const xd_xtoken_label_gradient_args *a) {
    xdi_cuda_grade f = xdi_cuda_grade_of(&a->to);
    f.slopes = a->slopes;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_NONE>(launch, f, a->to.x.count, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to) {
    xdi_cuda_grade f = xdi_cuda_grade_of(to);
    f.rest = true;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_NONE>(launch, f, to->x.logits.rows, to->x.logits.rows);
}

/* ---- through lists of columns: one block per row ---- */

/* (M dy)_v of a row of student ids. `places` holds the index of each teacher id in dy; -1: not in dy. */
static __device__ inline double xdi_cuda_xtoken_back(const xd_xtoken_projection &m, const int32_t *places,
                                                     int64_t id, const double *dy) {
    double sum = 0.0;
    for (int64_t e = m.row_begin[id]; e < m.row_begin[id + 1]; e++) {
        const int64_t place = places[m.teacher_id[e]];
        if (place >= 0) sum = __dadd_rn(sum, __dmul_rn((double)m.weight[e], dy[place]));
    }
    return sum;
}


/* Which gradient is computed; members that it does not use are NULL. */
struct xdi_cuda_xtoken_form {
    xd_xtoken_gradient to;
    xd_xtoken_projection projection; /* without row_begin a student's id is the teacher's */
    const int32_t *places;           /* indices of ids in dy */
    const double *dy;                /* of row i's chunk, or of row i */
    const int64_t *offset;           /* lists: where dy of each chunk begins; places are relative to it */
    int64_t k, ids;                  /* places covers this many ids, for each list */
    const double *delta;
    const xd_xtoken_chunk *chunks;
    bool direct; /* row i is chunk i, and the part of dy is factor M dy */
};

/* What the elements of a row have in common. */
struct xdi_cuda_xtoken_line {
    const double *dy; /* of the row's chunk */
    const int32_t *places;
    double delta, ce, lse_one, factor;
    int64_t row, label;
    bool add;
};

/* False for a row that is skipped. */
static __device__ inline bool xdi_cuda_xtoken_line_of(const xdi_cuda_xtoken_form &f, int64_t i,
                                                      xdi_cuda_xtoken_line *w) {
    const xd_xtoken_rows &x = f.to.x;
    w->row = x.rows[i];
    w->add = f.to.written[w->row] != 0;
    const int64_t place = f.direct ? i : x.places[i];
    if (f.chunks[place].largest == 0.0) return false;
    w->delta = f.delta ? f.delta[i] : 0.0;
    w->dy = f.dy + (f.offset ? f.offset[place] : place * f.k);
    w->places = f.offset ? f.places + place * f.ids : f.places;
    w->factor = f.direct ? f.chunks[place].factor : 0.0;
    if (!w->add && f.to.ce_factor) w->ce = f.to.ce_factor[w->row] * f.to.ce_weight;
    if (w->ce != 0.0) w->lse_one = f.to.lse_one[w->row];
    w->label = w->ce != 0.0 ? xd_id_at(f.to.labels, w->row) - x.first : -1;
    return true;
}

/* (M dy)_v */
static __device__ inline double xdi_cuda_xtoken_h(const xdi_cuda_xtoken_form &f, const xdi_cuda_xtoken_line &w,
                                                  int64_t v) {
    const int64_t id = v + f.to.x.first;
    if (f.projection.row_begin) return xdi_cuda_xtoken_back(f.projection, w.places, id, w.dy);
    return id < f.ids && w.places[id] >= 0 ? w.dy[w.places[id]] : 0.0;
}

static __device__ inline float xdi_cuda_xtoken_element(const xdi_cuda_xtoken_form &f,
                                                       const xdi_cuda_xtoken_line &w, int64_t v, float z,
                                                       float before) {
    const double tau = f.to.x.temperature;
    double g = w.add ? (double)before : 0.0;
    if (w.ce != 0.0)
        g += xd_xtoken_ce_part(w.ce, (double)expf((float)((double)z - w.lse_one)), v == w.label);
    const double p = f.direct ? 0.0 : (double)expf((float)((double)z / tau - f.to.x.lse[w.row]));
    const double h = xdi_cuda_xtoken_h(f, w, v);
    return (float)(g + (f.direct ? w.factor * h : xd_xtoken_project_part(p, h, w.delta, tau)));
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_gradient_kernel(const __grid_constant__ xdi_cuda_xtoken_form f) {
    xdi_cuda_xtoken_line w = {};
    const bool writes = xdi_cuda_xtoken_line_of(f, (int64_t)blockIdx.x, &w);
    const int64_t columns = f.to.x.columns, end = w.add ? columns : f.to.rows.cols;
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; writes && c < end;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight z = xdi_cuda_read_any(f.to.x.logits, w.row, c, columns);
        xdi_cuda_eight out = {};
        if (w.add) out = xdi_cuda_read_any(f.to.rows, w.row, c, end);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < columns) out.at[i] = xdi_cuda_xtoken_element(f, w, c + i, z.at[i], out.at[i]);
        xdi_cuda_write_any(f.to.rows, w.row, c, end, out);
    }
    __syncthreads(); /* all threads have seen whether the row was written */
    if (threadIdx.x == 0 && writes) f.to.written[w.row] = 1;
}

static xd_result xdi_cuda_xtoken_gradient(const xd_launch *launch, const xdi_cuda_xtoken_form &f, int64_t count) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_gradient_kernel, f);
}

static xd_result xdi_cuda_xtoken_pick_gradient(const xd_launch *launch, const xd_xtoken_pick_gradient_args *a) {
    xdi_cuda_xtoken_form f = {};
    f.to = a->to;
    f.places = a->slots;
    f.ids = INT64_MAX; /* they are student ids */
    f.dy = a->dy;
    f.k = a->k;
    f.chunks = a->chunks;
    f.direct = true;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
}

static int64_t xdi_cuda_xtoken_pick_scratch(int64_t) {
    return 0;
}

template <int KIND> static xd_result xdi_cuda_grade_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_kernel<KIND, float>));
    return xdi_cuda_load(ctx, xdi_cuda_grade_kernel<KIND, xdi_cuda_bf16>);
}

static xd_result xdi_cuda_gradient_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_grade_load<XDI_CUDA_GRADE_NONE>(ctx));
    XD_TRY(xdi_cuda_grade_load<XDI_CUDA_GRADE_MATRIX>(ctx));
    XD_TRY(xdi_cuda_grade_load<XDI_CUDA_GRADE_MEANS>(ctx));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_mark_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_gradient_kernel);
}

static void xdi_cuda_gradient_fill(xd_xtoken_kernels *kernels) {
    kernels->pick_scratch = xdi_cuda_xtoken_pick_scratch;
    kernels->project_gradient = xdi_cuda_xtoken_project_gradient;
    kernels->mean_gradient = xdi_cuda_xtoken_mean_gradient;
    kernels->pick_gradient = xdi_cuda_xtoken_pick_gradient;
    kernels->label_gradient = xdi_cuda_xtoken_label_gradient;
    kernels->rest_gradient = xdi_cuda_xtoken_rest_gradient;
}
