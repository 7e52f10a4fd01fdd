/* Projected losses across tokenizers: kernel/cpu/xtoken*.c is the reference. Probabilities are f32, from a logarithm
 * computed in double; sums, and all values of a chunk, are double. One thread or warp adds to each cell, in a fixed order. */

/* ---- cells ---- */

template <bool FIXED> static __device__ inline void xdi_cuda_cell_add(double *cells, int64_t i, double term) {
    if (FIXED)
        xd_cell_put(reinterpret_cast<xd_fixed *>(cells) + i, term);
    else
        cells[i] = xd_add(cells[i], term);
}

/* Adds a team's sum to its cell. */
static __device__ inline void xdi_cuda_cell_join(double *cells, int64_t i,
                                                 const xdi_cuda_sums<1, false>::totals &sum) {
    cells[i] = __dadd_rn(cells[i], sum.sum[0]);
}

static __device__ inline void xdi_cuda_cell_join(double *cells, int64_t i,
                                                 const xdi_cuda_sums<1, true>::totals &sum) {
    xd_fixed *cell = reinterpret_cast<xd_fixed *>(cells) + i;
    xd_fixed_join(cell, sum.sum[0]);
    if (sum.misfits.large + sum.misfits.infinite > 0) cell->high = XD_CELL_NAN;
}

static __device__ inline float xdi_cuda_xtoken_p(const xd_xtoken_rows &x, int64_t row, int64_t column) {
    const double z = (double)xdi_cuda_element(x.logits, row, column);
    return expf((float)__dsub_rn(__ddiv_rn(z, x.temperature), x.lse[row]));
}

/* Runs the statements with FIXED as the type of the cells. */
#define XDI_CUDA_CELLS(fixed, FIXED, ...) \
    if (fixed) {                          \
        enum { FIXED = 1 };               \
        __VA_ARGS__                       \
    } else {                              \
        enum { FIXED = 0 };               \
        __VA_ARGS__                       \
    }

/* ---- project: one warp per cell, which goes through the cell's column of the matrix once per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_project_kernel(const __grid_constant__ xd_xtoken_project_args a) {
    const int64_t cell = xdi_cuda_team_row<XDI_CUDA_WARP>(), k = a.matrix.k;
    const xd_xtoken_projection &m = a.matrix.projection;
    if (cell >= a.place_count * k) return;
    const int64_t place = cell / k, column = a.matrix.ids[cell % k];
    const int64_t begin = m.column_begin[column], end = m.column_begin[column + 1];
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t i = 0; i < a.x.count; i++) {
        if (a.x.places[i] != place) continue;
        const int64_t row = a.x.rows[i];
        for (int64_t e = begin + xdi_cuda_team_thread<XDI_CUDA_WARP>(); e < end; e += XDI_CUDA_WARP) {
            const int64_t v = m.student_id[e] - a.x.first;
            if (v < 0 || v >= a.x.columns) continue;
            mine.add_wide(0, __dmul_rn((double)m.column_weight[e], (double)xdi_cuda_xtoken_p(a.x, row, v)));
        }
    }
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() == 0) xdi_cuda_cell_join(a.cells, cell, totals);
}

static xd_result xdi_cuda_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->place_count * a->matrix.k, XDI_CUDA_WARP),
                               xdi_cuda_xtoken_project_kernel<FIXED>, *a);
    })
}

/* ---- target: one block per chunk, its rows in order ---- */

/* The larger; a NaN stays. */
struct xdi_cuda_larger_or_nan {
    __device__ double operator()(double a, double b) const {
        return a >= b || isnan(a) ? a : b;
    }
};

static __device__ inline double xdi_cuda_block_sum(double x) {
    return xdi_cuda_block_reduce(x, 0.0, xdi_cuda_add());
}

/* ln sum e^at(i) over i < n, on every thread of the block. */
template <typename At> static __device__ inline double xdi_cuda_block_lse(int64_t n, At at) {
    double max = -(double)INFINITY, sum = 0.0;
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += XDI_CUDA_TEAM_BLOCK)
        max = xdi_cuda_larger_or_nan()(max, at(i));
    max = xdi_cuda_block_reduce(max, -(double)INFINITY, xdi_cuda_larger_or_nan());
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += XDI_CUDA_TEAM_BLOCK)
        sum += (double)expf((float)__dsub_rn(at(i), max));
    return max + log(xdi_cuda_block_sum(sum));
}

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_target_kernel(const __grid_constant__ xd_xtoken_target_args a) {
    const int64_t place = (int64_t)blockIdx.x;
    for (int64_t i = 0; i < a.x.count; i++) {
        if (a.x.places[i] != place) continue;
        const int64_t row = a.x.rows[i];
        const auto at = [&](int64_t j) {
            return __ddiv_rn((double)xdi_cuda_element(a.x.logits, row, a.ids[j]), a.x.temperature);
        };
        double lse = xdi_cuda_block_lse(a.k, at);
        if (a.x.finite && !a.x.finite[row]) lse = (double)NAN;
        for (int64_t j = (int64_t)threadIdx.x; j < a.k; j += XDI_CUDA_TEAM_BLOCK)
            xdi_cuda_cell_add<FIXED>(a.cells, place * a.k + j, __dsub_rn(at(j), lse));
    }
}

static xd_result xdi_cuda_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_target_kernel<FIXED>, *a);
    })
}

/* ---- divergence: one block per chunk; four reads of its two lists, which stay in the cache ---- */

/* The largest of a list and where it came first. A NaN is never larger. */
struct xdi_cuda_top {
    double value;
    int64_t at;
};

struct xdi_cuda_top_join {
    __device__ xdi_cuda_top operator()(xdi_cuda_top a, const xdi_cuda_top &b) const {
        if (b.value > a.value || (b.value == a.value && b.at < a.at)) a = b;
        return a;
    }
};

static __device__ inline int64_t xdi_cuda_block_argmax(const double *x, int64_t n) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_top top = none;
    for (int64_t i = (int64_t)threadIdx.x; i < n; i += XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_top one = { x[i], i };
        top = xdi_cuda_top_join()(top, one);
    }
    return xdi_cuda_block_reduce(top, none, xdi_cuda_top_join()).at;
}

/* Means of both sides in place; the target is normalised when requested. */
static __device__ inline void xdi_cuda_xtoken_means(const xd_xtoken_divergence_args &args, const xd_xtoken_chunk &c,
                                                    double *q, double *a) {
    for (int64_t j = (int64_t)threadIdx.x; j < args.k; j += XDI_CUDA_TEAM_BLOCK) {
        q[j] = __ddiv_rn(q[j], c.student);
        a[j] = __ddiv_rn(a[j], c.teacher);
    }
    __syncthreads();
    if (!args.normalise) return;
    const double lse = xdi_cuda_block_lse(args.k, [&](int64_t j) { return a[j]; });
    for (int64_t j = (int64_t)threadIdx.x; j < args.k; j += XDI_CUDA_TEAM_BLOCK) a[j] = __dsub_rn(a[j], lse);
    __syncthreads();
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_divergence_kernel(const __grid_constant__ xd_xtoken_divergence_args args) {
    const int64_t k = args.k, first = (int64_t)threadIdx.x;
    xd_xtoken_chunk *c = args.chunks + blockIdx.x;
    double *q = args.student + (int64_t)blockIdx.x * k, *a = args.teacher + (int64_t)blockIdx.x * k;
    double mass = 0.0, value = 0.0, dot = 0.0, largest = 0.0;
    if (!c->compared) {
        for (int64_t j = first; j < k; j += XDI_CUDA_TEAM_BLOCK) q[j] = 0.0;
        return;
    }
    xdi_cuda_xtoken_means(args, *c, q, a);
    const bool agree = xdi_cuda_block_argmax(q, k) == xdi_cuda_block_argmax(a, k);
    for (int64_t j = first; j < k; j += XDI_CUDA_TEAM_BLOCK) mass += q[j];
    const double z = xdi_cuda_block_sum(mass) + XD_XTOKEN_EPSILON;
    for (int64_t j = first; j < k; j += XDI_CUDA_TEAM_BLOCK)
        xd_xtoken_slope(&q[j], a[j], z, args.reverse, &value, &dot);
    value = xdi_cuda_block_sum(value);
    dot = xdi_cuda_block_sum(dot);
    const double factor = xd_xtoken_chunk_factor(c, value);
    for (int64_t j = first; j < k; j += XDI_CUDA_TEAM_BLOCK) {
        q[j] = xd_xtoken_scaled(xd_xtoken_slope_of_mean(q[j], dot, z), factor);
        if (fabs(q[j]) > largest) largest = fabs(q[j]);
    }
    largest = xdi_cuda_block_reduce(largest, 0.0, xdi_cuda_larger());
    if (threadIdx.x != 0) return;
    c->value = value;
    c->agree = agree;
    c->largest = largest;
    c->delta = xd_xtoken_slope_delta(dot, z) * factor * c->student;
}

static xd_result xdi_cuda_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->place_count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_divergence_kernel, *a);
}

/* ---- delta: one block per row; reads the row where the matrix has entries ---- */

/* The slots of teacher ids in J: the result of `prepare` for a matrix. */
static __host__ __device__ inline int32_t *xdi_cuda_xtoken_places(const xd_xtoken_matrix &m) {
    return static_cast<int32_t *>(m.prepared);
}

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

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_delta_kernel(const __grid_constant__ xd_xtoken_delta_args a) {
    const int64_t i = (int64_t)blockIdx.x, row = a.x.rows[i], place = a.x.places[i];
    const xd_xtoken_projection &m = a.matrix.projection;
    const double largest = a.chunks[place].largest, *dy = a.dy + place * a.matrix.k;
    if (largest == 0.0 || a.chunks[place].alone) return;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t v = (int64_t)threadIdx.x; v < a.x.columns; v += XDI_CUDA_TEAM_BLOCK) {
        const int64_t id = a.x.first + v;
        if (m.row_begin[id] == m.row_begin[id + 1]) continue;
        const double h = xdi_cuda_xtoken_back(m, xdi_cuda_xtoken_places(a.matrix), id, dy);
        mine.add_wide(0, __dmul_rn(__ddiv_rn(h, largest), (double)xdi_cuda_xtoken_p(a.x, row, v)));
    }
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, i, totals);
}

static xd_result xdi_cuda_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_delta_kernel<FIXED>, *a);
    })
}

/* ---- gradients: one block per row; reads the logits, and the gradient if the row was written before; writes once ---- */

/* Which gradient is computed; members that it does not use are NULL. */
struct xdi_cuda_xtoken_form {
    xd_xtoken_gradient to;
    xd_xtoken_projection projection; /* without row_begin a student's id is the teacher's */
    const int32_t *places;           /* indices of ids in dy */
    const double *dy;                /* of row i's chunk, or of row i */
    const int64_t *offset;           /* lists: where dy of each chunk begins; places are relative to it */
    int64_t k, ids;                  /* places covers this many ids, for each list */
    const double *delta, *slopes;
    const float *u;
    double scale;
    const xd_xtoken_chunk *chunks; /* NULL: no row is skipped */
    bool one_chunk, direct, rest;  /* direct: row i is chunk i, and the part of dy is factor M dy */
};

/* What the elements of a row have in common. */
struct xdi_cuda_xtoken_line {
    const double *dy; /* of the row's chunk; NULL where it contributes nothing */
    const int32_t *places;
    double delta, ce, lse_one, factor;
    int64_t row, label;
    bool add, soft;
};

/* False for a row that is skipped. */
static __device__ inline bool xdi_cuda_xtoken_line_of(const xdi_cuda_xtoken_form &f, int64_t i,
                                                      xdi_cuda_xtoken_line *w) {
    const xd_xtoken_rows &x = f.to.x;
    w->row = f.rest ? i : x.rows[i];
    w->add = f.to.written[w->row] != 0;
    if (f.rest && w->add) return false;
    const int64_t place = f.one_chunk || !f.chunks ? 0 : f.direct ? i : x.places[i];
    if (f.chunks && f.chunks[place].largest == 0.0) return false;
    w->delta = f.delta ? f.delta[i] : 0.0;
    if (f.dy) {
        w->dy = f.dy + (f.offset ? f.offset[place] : place * f.k);
        w->places = f.offset ? f.places + place * f.ids : f.places;
        w->factor = f.direct ? f.chunks[place].factor : 0.0;
    }
    w->soft = !f.direct && (w->dy || w->delta != 0.0);
    if (!w->add && f.to.ce_factor) w->ce = f.to.ce_factor[w->row] * f.to.ce_weight;
    if (f.slopes) w->ce -= f.slopes[i];
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
    const double p = w.soft ? (double)expf((float)((double)z / tau - f.to.x.lse[w.row])) : 0.0;
    if (w.dy) {
        const double h = xdi_cuda_xtoken_h(f, w, v);
        return (float)(g + (f.direct ? w.factor * h : xd_xtoken_project_part(p, h, w.delta, tau)));
    }
    return (float)(f.u ? g + xd_xtoken_mean_part((double)f.u[v], f.scale, p, w.delta) : g);
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

static xd_result xdi_cuda_xtoken_project_gradient(const xd_launch *launch,
                                                  const xd_xtoken_project_gradient_args *a) {
    xdi_cuda_xtoken_form f = {};
    f.to = a->to;
    f.projection = a->matrix.projection;
    f.places = xdi_cuda_xtoken_places(a->matrix);
    f.dy = a->dy;
    f.k = a->matrix.k;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_mean_gradient(const xd_launch *launch, const xd_xtoken_mean_gradient_args *a) {
    xdi_cuda_xtoken_form f = {};
    f.to = a->to;
    f.u = a->u;
    f.scale = a->scale;
    f.delta = a->delta;
    f.chunks = a->chunk;
    f.one_chunk = true;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
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

static xd_result xdi_cuda_xtoken_label_gradient(const xd_launch *launch, const xd_xtoken_label_gradient_args *a) {
    xdi_cuda_xtoken_form f = {};
    f.to = a->to;
    f.slopes = a->slopes;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
}

static xd_result xdi_cuda_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to) {
    xdi_cuda_xtoken_form f = {};
    f.to = *to;
    f.rest = true;
    return xdi_cuda_xtoken_gradient(launch, f, to->x.logits.rows);
}

/* ---- slots of ids ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_slots_kernel(const __grid_constant__ xd_xtoken_slots_args a) {
    const int64_t j = xdi_cuda_flat_index();
    if (j < a.k) a.slots[a.ids[j]] = (int32_t)j;
}

static xd_result xdi_cuda_xtoken_slots(const xd_launch *launch, const xd_xtoken_slots_args *a) {
    XD_TRY(xdi_cuda_fill(launch, a->slots, 0xff, (size_t)a->size * sizeof *a->slots));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->k), xdi_cuda_xtoken_slots_kernel, *a);
}

static size_t xdi_cuda_xtoken_matrix_bytes(const xd_xtoken_matrix *m) {
    return (size_t)m->projection.teacher_size * sizeof(int32_t);
}

static int64_t xdi_cuda_xtoken_project_scratch(int64_t, bool) {
    return 0;
}

static int64_t xdi_cuda_xtoken_pick_scratch(int64_t) {
    return 0;
}

static xd_result xdi_cuda_xtoken_prepare(const xd_launch *launch, const xd_xtoken_matrix *m) {
    const xd_xtoken_slots_args a = { m->ids, m->k, m->projection.teacher_size, xdi_cuda_xtoken_places(*m) };
    return xdi_cuda_xtoken_slots(launch, &a);
}

/* ---- cells ---- */

static __device__ inline double xdi_cuda_cell_value(bool fixed, const double *cells, int64_t i) {
    return fixed ? xd_cell_read(reinterpret_cast<const xd_fixed *>(cells)[i]) : cells[i];
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_settle_kernel(const double *cells, int64_t count,
                                                                     double *out) {
    const int64_t i = xdi_cuda_flat_index();
    if (i < count) out[i] = xdi_cuda_cell_value(true, cells, i);
}

static xd_result xdi_cuda_xtoken_settle(const xd_launch *launch, const double *cells, int64_t count, double *out) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(count), xdi_cuda_xtoken_settle_kernel, cells, count, out);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_deltas_kernel(const __grid_constant__ xd_xtoken_row_deltas_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    a.out[i] = xd_xtoken_row_delta(a.chunks + a.places[i], xdi_cuda_cell_value(a.fixed, a.cells, i));
}

static xd_result xdi_cuda_xtoken_row_deltas(const xd_launch *launch, const xd_xtoken_row_deltas_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_row_deltas_kernel, *a);
}

/* One block per row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_sums_kernel(const __grid_constant__ xd_xtoken_row_sums_args a) {
    const int64_t row = (int64_t)blockIdx.x;
    const double largest = __ddiv_rn(a.lse[row], a.temperature);
    xdi_cuda_sums<1, true> mine;
    for (int64_t v = (int64_t)threadIdx.x; v < a.columns; v += XDI_CUDA_TEAM_BLOCK) {
        const double z = (double)xdi_cuda_element(a.logits, row, v);
        mine.add_wide(0, exp(__dsub_rn(__ddiv_rn(z, a.temperature), largest)));
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, row, totals);
}

static xd_result xdi_cuda_xtoken_row_sums(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->logits.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_row_sums_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_close_kernel(const __grid_constant__ xd_xtoken_close_args a) {
    const int64_t i = xdi_cuda_flat_index();
    const double kl = xdi_cuda_cell_value(a.fixed, a.cells, 0), sum = xdi_cuda_cell_value(a.fixed, a.cells, 1);
    if (i < a.count) a.out[i] = __dmul_rn(sum, a.scale);
    if (i == 0) xd_xtoken_close_chunk(&a, kl, sum);
}

static xd_result xdi_cuda_xtoken_close(const xd_launch *launch, const xd_xtoken_close_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_close_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_logs_kernel(const __grid_constant__ xd_xtoken_row_sums_args a) {
    const int64_t row = xdi_cuda_flat_index();
    if (row >= a.logits.rows) return;
    a.lse[row] = xd_xtoken_row_log(a.lse[row], a.temperature, xdi_cuda_cell_value(true, a.cells, row));
}

static xd_result xdi_cuda_xtoken_row_logs(const xd_launch *launch, const xd_xtoken_row_sums_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->logits.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows), xdi_cuda_xtoken_row_logs_kernel, *a);
}

/* ---- products with a projection: one warp per cell; the transposed product: one block per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_product_kernel(const __grid_constant__ xd_xtoken_product_args a) {
    const int64_t cell = xdi_cuda_team_row<XDI_CUDA_WARP>();
    const xd_xtoken_projection &m = a.projection;
    if (cell >= a.rows.rows * a.k) return;
    const int64_t row = cell / a.k, column = a.ids ? a.ids[cell % a.k] : cell % a.k;
    if (column < 0 || column >= m.teacher_size) return;
    const int64_t begin = m.column_begin[column], end = m.column_begin[column + 1];
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t e = begin + xdi_cuda_team_thread<XDI_CUDA_WARP>(); e < end; e += XDI_CUDA_WARP) {
        const int64_t v = m.student_id[e] - a.first;
        if (v < 0 || v >= a.columns) continue;
        mine.add_wide(0, __dmul_rn((double)m.column_weight[e], (double)xdi_cuda_element(a.rows, row, v)));
    }
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() == 0) xdi_cuda_cell_join(a.cells, cell, totals);
}

static xd_result xdi_cuda_xtoken_product(const xd_launch *launch, const xd_xtoken_product_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->rows.rows * a->k == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->rows.rows * a->k, XDI_CUDA_WARP),
                               xdi_cuda_xtoken_product_kernel<FIXED>, *a);
    })
}

/* The index of an id in an ascending list; -1: it is not there. */
static __device__ inline int64_t xdi_cuda_xtoken_place(const int64_t *ids, int64_t k, int64_t id) {
    if (!ids) return id;
    const int64_t at = xdi_cuda_lower_bound(ids, k, id);
    return at < k && ids[at] == id ? at : -1;
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_product_back_kernel(const __grid_constant__ xd_xtoken_product_args a) {
    const int64_t row = (int64_t)blockIdx.x, *begin = a.projection.row_begin + a.first;
    for (int64_t c = (int64_t)threadIdx.x; c < a.rows.cols; c += XDI_CUDA_TEAM_BLOCK) {
        const int64_t end = c < a.columns ? begin[c + 1] : 0;
        double sum = 0.0;
        for (int64_t e = c < a.columns ? begin[c] : 0; e < end; e++) {
            const int64_t j = xdi_cuda_xtoken_place(a.ids, a.k, a.projection.teacher_id[e]);
            if (j < 0) continue;
            sum = __dadd_rn(sum, __dmul_rn((double)a.projection.weight[e], a.weight[row * a.k + j]));
        }
        xdi_cuda_set_element(a.rows, row, c, (float)sum);
    }
}

static xd_result xdi_cuda_xtoken_product_back(const xd_launch *launch, const xd_xtoken_product_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->rows.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->rows.rows, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_product_back_kernel, *a);
}

/* ---- table ---- */

static xd_result xdi_cuda_xtoken_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_project_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_project_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_target_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_target_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_divergence_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_delta_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_delta_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_gradient_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_slots_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_settle_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_row_deltas_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_row_sums_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_close_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_product_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_product_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_product_back_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_row_logs_kernel);
}

/* The entries of projected losses; xtoken_gold.cu and xtoken_rows.cu add theirs. */
static xd_xtoken_kernels xdi_cuda_xtoken_table() {
    xd_xtoken_kernels kernels = {};
    kernels.matrix_bytes = xdi_cuda_xtoken_matrix_bytes;
    kernels.project_scratch = xdi_cuda_xtoken_project_scratch;
    kernels.pick_scratch = xdi_cuda_xtoken_pick_scratch;
    kernels.prepare = xdi_cuda_xtoken_prepare;
    kernels.project = xdi_cuda_xtoken_project;
    kernels.target = xdi_cuda_xtoken_target;
    kernels.divergence = xdi_cuda_xtoken_divergence;
    kernels.delta = xdi_cuda_xtoken_delta;
    kernels.row_deltas = xdi_cuda_xtoken_row_deltas;
    kernels.close = xdi_cuda_xtoken_close;
    kernels.slots = xdi_cuda_xtoken_slots;
    kernels.project_gradient = xdi_cuda_xtoken_project_gradient;
    kernels.mean_gradient = xdi_cuda_xtoken_mean_gradient;
    kernels.pick_gradient = xdi_cuda_xtoken_pick_gradient;
    kernels.label_gradient = xdi_cuda_xtoken_label_gradient;
    kernels.rest_gradient = xdi_cuda_xtoken_rest_gradient;
    kernels.settle = xdi_cuda_xtoken_settle;
    kernels.row_sums = xdi_cuda_xtoken_row_sums;
    kernels.row_logs = xdi_cuda_xtoken_row_logs;
    kernels.product = xdi_cuda_xtoken_product;
    kernels.product_back = xdi_cuda_xtoken_product_back;
    return kernels;
}
