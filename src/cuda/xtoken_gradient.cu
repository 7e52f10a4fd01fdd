/* Gradients of losses across tokenizers. A block works on a part of the columns of a chunk's rows: what depends on the chunk alone is
 * formed once for all of them. Reads the logits, and the gradient of a row that was written before; writes once. */

enum {
    XDI_CUDA_GRADE_LINES = 8,                                      /* rows at a time */
    XDI_CUDA_GRADE_SPAN = 2 * XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK, /* columns at a time: two loads a thread */
    XDI_CUDA_GRADE_SPANS = 16                                      /* of a block */
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

/* What the elements of a row have in common. */
struct xdi_cuda_grade_line {
    xdi_cuda_xtoken_power power, one; /* at the temperature, and at 1 */
    float delta, ce;
    int64_t row, label;
    int add, soft; /* flags; lines have no gaps, as they are copied whole */
};

/* A row of the call, or of the logits. */
static __device__ inline int64_t xdi_cuda_grade_row(const xdi_cuda_grade &f, int64_t i) {
    return f.rest ? i : f.to.x.rows[i];
}

static __device__ inline void xdi_cuda_grade_begin(const xdi_cuda_grade &f, int64_t i, double per_delta,
                                                   xdi_cuda_grade_line *w) {
    const xd_xtoken_rows &x = f.to.x;
    const double delta = f.delta ? f.delta[i] : 0.0;
    double ce = 0.0;
    *w = xdi_cuda_grade_line();
    w->row = xdi_cuda_grade_row(f, i);
    w->add = f.to.written[w->row] != 0;
    if (!w->add && f.to.ce_factor) ce = f.to.ce_factor[w->row] * f.to.ce_weight;
    if (f.slopes) ce -= f.slopes[i];
    w->ce = (float)ce;
    w->delta = (float)(delta * per_delta);
    w->soft = f.dy || delta != 0.0;
    w->label = ce != 0.0 ? xd_id_at(f.to.labels, w->row) - x.first : -1;
    if (ce != 0.0) w->one.set(f.to.lse_one[w->row], 1.0);
    if (w->soft) w->power.set(x.lse[w->row], x.temperature);
}

/* Adds the cross entropy. */
static __device__ inline void xdi_cuda_grade_hard(const xdi_cuda_grade_line &w, int64_t c, const xdi_cuda_eight &z,
                                                  xdi_cuda_eight *out) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) out->at[i] = __fmaf_rn(w.ce, w.one(z.at[i]), out->at[i]);
    if ((uint64_t)(w.label - c) >= XDI_CUDA_EIGHT) return;
    const int label = (int)(w.label - c);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (i == label) out->at[i] = __fsub_rn(out->at[i], w.ce);
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

/* M dy / temperature of the columns [begin, begin + XDI_CUDA_GRADE_SPAN), by the whole block. */
static __device__ inline void xdi_cuda_grade_slopes(const xdi_cuda_grade &f, int64_t begin, const double *dy, float *slopes) {
    enum { SEGMENTS = XDI_CUDA_GRADE_SPAN / XDI_CUDA_MATRIX_SEGMENT };
    static_assert((int)XDI_CUDA_GRADE_SPAN % (int)XDI_CUDA_MATRIX_SEGMENT == 0, "whole segments");
    const xdi_cuda_matrix &m = f.matrix;
    const int64_t segment = begin / XDI_CUDA_MATRIX_SEGMENT, last = segment + SEGMENTS;
    const double inverse = 1.0 / f.to.x.temperature;
    for (int i = (int)threadIdx.x; i < XDI_CUDA_GRADE_SPAN; i += XDI_CUDA_TEAM_BLOCK) slopes[i] = 0.0f;
    __syncthreads();
    if (segment < m.segments) {
        const int64_t end = m.first[last < m.segments ? last : m.segments];
        for (int64_t i = m.first[segment] + (int64_t)threadIdx.x; i < end; i += XDI_CUDA_TEAM_BLOCK) {
            const xdi_cuda_matrix_id id = m.ids[i];
            slopes[id.column - begin] = (float)__dmul_rn(xdi_cuda_matrix_back(m, id, dy[id.entry.slot], dy), inverse);
        }
    }
    __syncthreads();
}

/* What lies beyond the columns is 0. */
static __device__ inline void xdi_cuda_grade_trim(int count, xdi_cuda_eight *out) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (i >= count) out->at[i] = 0.0f;
}

/* Two eights of each row. */
template <int KIND>
static __device__ inline void xdi_cuda_grade_span(const xdi_cuda_grade &f, const xdi_cuda_grade_line *lines, int count,
                                                  int64_t place, int64_t begin, float scale, const float *slopes) {
    const int64_t columns = f.to.x.columns;
    for (int r = 0; r < count; r++) {
        const xdi_cuda_grade_line w = lines[r]; /* in registers: what is stored might be it */
        const int64_t end = w.add ? columns : f.to.rows.cols;
        xdi_cuda_eight z[2], slope[2];
        XD_UNROLL
        for (int half = 0; half < 2; half++) {
            const int64_t c = begin + XDI_CUDA_EIGHT * ((int64_t)threadIdx.x + half * XDI_CUDA_TEAM_BLOCK);
            z[half] = slope[half] = {};
            if (KIND == XDI_CUDA_GRADE_MEANS && c < columns)
                slope[half] = xdi_cuda_read(f.u + place * columns, c, columns);
            if (c < columns) z[half] = xdi_cuda_read_any(f.to.x.logits, w.row, c, columns);
        }
        XD_UNROLL
        for (int half = 0; half < 2; half++) {
            const int64_t at = XDI_CUDA_EIGHT * ((int64_t)threadIdx.x + half * XDI_CUDA_TEAM_BLOCK), c = begin + at;
            xdi_cuda_eight out = {};
            if (c >= end) continue;
            if (w.add) out = xdi_cuda_read_any(f.to.rows, w.row, c, end);
            if (w.ce != 0.0f) xdi_cuda_grade_hard(w, c, z[half], &out);
            if (KIND == XDI_CUDA_GRADE_MATRIX) slope[half] = xdi_cuda_read_whole(slopes + at);
            if (KIND != XDI_CUDA_GRADE_NONE) xdi_cuda_grade_soft<KIND>(w, slope[half], scale, z[half], &out);
            if (c + XDI_CUDA_EIGHT > columns) xdi_cuda_grade_trim((int)(columns > c ? columns - c : 0), &out);
            xdi_cuda_write_any(f.to.rows, w.row, c, end, out);
        }
    }
}

/* The rows of a block: those of a chunk, all, or one. */
static __device__ inline xdi_cuda_xtoken_range xdi_cuda_grade_rows(const xdi_cuda_grade &f, int64_t place) {
    if (f.chunks && !f.one_chunk) return xdi_cuda_xtoken_range(f.to.x, place);
    return xdi_cuda_xtoken_range(place, place + 1);
}

template <int KIND>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, KIND == XDI_CUDA_GRADE_MEANS ? 2 : 3) xdi_cuda_grade_kernel(const __grid_constant__ xdi_cuda_grade f) {
    XD_SHARED(xdi_cuda_grade_line, lines, [XDI_CUDA_GRADE_LINES]);
    XD_SHARED(xdi_cuda_pack<float>, packs, [KIND == XDI_CUDA_GRADE_MATRIX ? XDI_CUDA_GRADE_SPAN / 4 : 1]);
    const int64_t place = (int64_t)blockIdx.x / f.parts, part = (int64_t)blockIdx.x % f.parts;
    const xdi_cuda_xtoken_range rows = xdi_cuda_grade_rows(f, place);
    const xd_xtoken_chunk *chunk = f.chunks ? f.chunks + (f.one_chunk ? 0 : place) : NULL;
    float *slopes = packs[0].at;
    if (chunk && chunk->largest == 0.0) return; /* the whole block returns */
    if (f.rest && f.to.written[place]) return;  /* as here */
    const float scale = (float)(f.by_factor ? f.scale * chunk->factor : f.scale);
    const double per_delta = KIND == XDI_CUDA_GRADE_MATRIX ? 1.0 / f.to.x.temperature : 1.0;
    for (int64_t first = rows.begin; first < rows.end; first += XDI_CUDA_GRADE_LINES) {
        const int64_t left = rows.end - first;
        const int count = left < XDI_CUDA_GRADE_LINES ? (int)left : (int)XDI_CUDA_GRADE_LINES;
        __syncthreads(); /* the lines before are no longer read */
        if ((int)threadIdx.x < count) xdi_cuda_grade_begin(f, first + (int64_t)threadIdx.x, per_delta, &lines[threadIdx.x]);
        __syncthreads();
        for (int64_t s = part * XDI_CUDA_GRADE_SPANS; s < (part + 1) * XDI_CUDA_GRADE_SPANS; s++) {
            const int64_t begin = s * XDI_CUDA_GRADE_SPAN;
            if (begin >= f.to.rows.cols) break;
            if (KIND == XDI_CUDA_GRADE_MATRIX) xdi_cuda_grade_slopes(f, begin, f.dy + place * f.k, slopes);
            xdi_cuda_grade_span<KIND>(f, lines, count, f.one_chunk ? 0 : place, begin, scale, slopes);
            if (KIND == XDI_CUDA_GRADE_MATRIX) __syncthreads(); /* the slopes are no longer read */
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
    const int64_t most = XDI_CUDA_GRADE_SPAN * XDI_CUDA_GRADE_SPANS;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    f.parts = (f.to.rows.cols + most - 1) / most;
    if (rows == 0 || f.parts == 0) return XD_OK;
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(chunks * f.parts, XDI_CUDA_TEAM_BLOCK), xdi_cuda_grade_kernel<KIND>, f));
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

static xd_result xdi_cuda_gradient_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_kernel<XDI_CUDA_GRADE_NONE>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_kernel<XDI_CUDA_GRADE_MATRIX>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_grade_kernel<XDI_CUDA_GRADE_MEANS>));
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
