/* Projected losses across tokenizers: kernel/cpu/xtoken.c is the reference. Probabilities are f32 from a
 * logarithm taken in double; sums, and everything about a chunk, are double. Every cell is added to by one thread or
 * warp in one order. */

/* ---- cells ---- */

#define XDI_CUDA_CELL_NAN ((int64_t)1 << 57)
#define XDI_CUDA_CELL_MINUS_INFINITY (-2097152.0)

/* xdi_cells_add */
template <bool FIXED> static __device__ inline void xdi_cuda_cell_add(double *cells, int64_t i, double term) {
    if (!FIXED) {
        cells[i] = __dadd_rn(cells[i], term);
        return;
    }
    xd_fixed *cell = reinterpret_cast<xd_fixed *>(cells) + i;
    const double low = XDI_CUDA_CELL_MINUS_INFINITY;
    xdi_cuda_misfits misfits = {};
    if (cell->high >= XDI_CUDA_CELL_NAN / 2 ||
        (term == -(double)INFINITY && xdi_cuda_fixed_value(*cell) < low / 2.0))
        return;
    xdi_cuda_fixed_add(cell, term == -(double)INFINITY ? low : term, &misfits);
    if (misfits.large + misfits.infinite > 0) cell->high = XDI_CUDA_CELL_NAN;
}

/* A team's sum into its cell. */
static __device__ inline void xdi_cuda_cell_join(double *cells, int64_t i,
                                                 const xdi_cuda_sums<1, false>::totals &sum) {
    cells[i] = __dadd_rn(cells[i], sum.sum[0]);
}

static __device__ inline void xdi_cuda_cell_join(double *cells, int64_t i,
                                                 const xdi_cuda_sums<1, true>::totals &sum) {
    xd_fixed *cell = reinterpret_cast<xd_fixed *>(cells) + i;
    cell->high += sum.sum[0].high;
    cell->low += sum.sum[0].low;
    if (sum.misfits.large + sum.misfits.infinite > 0) cell->high = XDI_CUDA_CELL_NAN;
}

static __device__ inline float xdi_cuda_xtoken_p(const xd_xtoken_args &a, int64_t row, int64_t column) {
    if (!a.lse) return xdi_cuda_element(a.logits, row, column);
    const double z = (double)xdi_cuda_element(a.logits, row, column);
    return expf((float)__dsub_rn(__ddiv_rn(z, a.temperature), a.lse[row]));
}

/* Runs the statements with FIXED as what the cells are. */
#define XDI_CUDA_CELLS(fixed, FIXED, ...) \
    if (fixed) {                          \
        enum { FIXED = 1 };               \
        __VA_ARGS__                       \
    } else {                              \
        enum { FIXED = 0 };               \
        __VA_ARGS__                       \
    }

/* ---- project: one warp a cell, which walks the cell's column of the matrix once a row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_project_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t cell = xdi_cuda_team_row<XDI_CUDA_WARP>(), k = a.matrix.k;
    if (cell >= a.place_count * k) return;
    const int64_t place = cell / k, column = a.ids ? a.ids[cell % k] : cell % k;
    if (a.vocabulary > 0 && (column < 0 || column >= a.vocabulary)) return;
    const int64_t begin = a.matrix.column_begin[column], end = a.matrix.column_begin[column + 1];
    const int64_t last = a.places ? a.count : place + 1;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t i = a.places ? 0 : place; i < last; i++) {
        if (a.places && a.places[i] != place) continue;
        const int64_t row = a.rows ? a.rows[i] : i;
        for (int64_t e = begin + xdi_cuda_team_thread<XDI_CUDA_WARP>(); e < end; e += XDI_CUDA_WARP) {
            const int64_t v = a.matrix.column_student[e] - a.first;
            if (v < 0 || v >= a.matrix.columns) continue;
            mine.add_wide(0,
                          __dmul_rn((double)a.matrix.column_weight[e], (double)xdi_cuda_xtoken_p(a, row, v)));
        }
    }
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() == 0) xdi_cuda_cell_join(a.cells, cell, totals);
}

static xd_result xdi_cuda_xtoken_project(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->place_count * a->matrix.k, XDI_CUDA_WARP),
                               xdi_cuda_xtoken_project_kernel<FIXED>, *a);
    })
}

/* ---- target: one block a chunk, its rows in order ---- */

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
xdi_cuda_xtoken_target_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t place = (int64_t)blockIdx.x;
    for (int64_t i = 0; i < a.count; i++) {
        if (a.places[i] != place) continue;
        const int64_t row = a.rows[i];
        const auto at = [&](int64_t j) {
            return __ddiv_rn((double)xdi_cuda_element(a.logits, row, a.ids[j]), a.temperature);
        };
        const double lse = xdi_cuda_block_lse(a.k, at);
        for (int64_t j = (int64_t)threadIdx.x; j < a.k; j += XDI_CUDA_TEAM_BLOCK)
            xdi_cuda_cell_add<FIXED>(a.cells, place * a.k + j, __dsub_rn(at(j), lse));
    }
}

static xd_result xdi_cuda_xtoken_target(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_target_kernel<FIXED>, *a);
    })
}

/* ---- divergence: one block a chunk; four reads of its two lists, which stay in the cache ---- */

/* The largest of a list and where it came first. A NaN is larger than nothing. */
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

/* Means of both sides in place; the target is normalised when asked for. */
static __device__ inline void xdi_cuda_xtoken_means(const xd_xtoken_args &args, const xd_xtoken_chunk &c,
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

/* One entry of xdi_cpu_xtoken_slopes: q becomes dr. */
static __device__ inline void xdi_cuda_xtoken_slope(double *q, double a, double z, bool reverse,
                                                    double *value, double *dot) {
    const double r = *q / z, s = log(r + XD_XTOKEN_EPSILON), target = exp(a);
    const double ds = reverse ? exp(s) * (s - a + 1.0) : -target;
    if (reverse)
        *value += exp(s) * (s - a);
    else if (target != 0.0)
        *value += target * (a - s);
    *q = ds / (r + XD_XTOKEN_EPSILON);
    *dot += *q * r;
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_divergence_kernel(const __grid_constant__ xd_xtoken_args args) {
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
        xdi_cuda_xtoken_slope(&q[j], a[j], z, args.reverse, &value, &dot);
    value = xdi_cuda_block_sum(value);
    dot = xdi_cuda_block_sum(dot);
    const double factor = isfinite(value) ? c->factor : 0.0;
    for (int64_t j = first; j < k; j += XDI_CUDA_TEAM_BLOCK) {
        q[j] = factor != 0.0 ? (q[j] - dot) / z * factor : 0.0;
        if (fabs(q[j]) > largest) largest = fabs(q[j]);
    }
    largest = xdi_cuda_block_reduce(largest, 0.0, xdi_cuda_larger());
    if (threadIdx.x != 0) return;
    c->value = value;
    c->agree = agree;
    c->largest = largest;
    c->delta = dot * XD_XTOKEN_EPSILON / z * factor * c->student;
}

static xd_result xdi_cuda_xtoken_divergence(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->place_count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_divergence_kernel, *a);
}

/* ---- delta: one block a row; reads the row where the matrix has entries ---- */

/* The slot of an entry: a place in J, or the teacher id whose place is looked up; -1: it has none. */
static __device__ inline int64_t xdi_cuda_xtoken_slot(const xd_xtoken_matrix &m, const int32_t *places,
                                                      int32_t slot) {
    if (places) return places[slot];
    if (!m.sorted) return slot;
    const int64_t at = xdi_cuda_lower_bound(m.sorted, m.k, (int64_t)slot);
    return at < m.k && m.sorted[at] == slot ? at : -1;
}

/* (M dy)_v, where ids have these places, or NULL -> slots do for themselves. */
static __device__ inline double xdi_cuda_xtoken_back(const xd_xtoken_args &a, const int32_t *places,
                                                     int64_t v, const double *dy) {
    const xd_xtoken_matrix &m = a.matrix;
    double sum = 0.0;
    if (!m.begin) {
        const int64_t id = v + a.first;
        return id < a.vocabulary && places[id] >= 0 ? dy[places[id]] : 0.0;
    }
    for (int64_t e = m.begin[v]; e < m.begin[v + 1]; e++) {
        const int64_t slot = xdi_cuda_xtoken_slot(m, places, m.slot[e]);
        if (slot >= 0) sum = __dadd_rn(sum, __dmul_rn((double)m.weight[e], dy[slot]));
    }
    return sum;
}

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_delta_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t i = (int64_t)blockIdx.x, row = a.rows[i], place = a.places[i];
    const double largest = a.chunks[place].largest, *dy = a.student + place * a.matrix.k;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t v = (int64_t)threadIdx.x; v < a.matrix.columns && largest != 0.0; v += XDI_CUDA_TEAM_BLOCK)
        if (a.matrix.begin[v] != a.matrix.begin[v + 1])
            mine.add_wide(0, __dmul_rn(__ddiv_rn(xdi_cuda_xtoken_back(a, a.matrix.places, v, dy), largest),
                                       (double)xdi_cuda_xtoken_p(a, row, v)));
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, i, totals);
}

static xd_result xdi_cuda_xtoken_delta(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_xtoken_delta_kernel<FIXED>, *a);
    })
}

/* ---- gradient: one block a row; reads the logits, and the gradient where the row was written, writes once ---- */

/* What the elements of a row share. */
struct xdi_cuda_xtoken_line {
    const double *dy;      /* of the row's chunk; NULL where nothing comes of it */
    const int32_t *places; /* of the matrix, of the row's chunk */
    double delta, ce, lse_one, factor;
    int64_t row, label;
    bool add, soft, none;
};

static __device__ inline xdi_cuda_xtoken_line xdi_cuda_xtoken_line_of(const xd_xtoken_args &a, int64_t i) {
    xdi_cuda_xtoken_line w = {};
    w.row = a.rows ? a.rows[i] : i;
    w.add = a.written && a.written[w.row] != 0;
    w.delta = a.delta ? a.delta[i] : 0.0;
    w.none = a.chunks && a.chunks[a.places[i]].largest == 0.0;
    if ((a.matrix.begin || a.matrix.places) && !w.none) {
        const int64_t place = a.places ? a.places[i] : i;
        w.dy = a.student + (a.offset ? a.offset[place] : place * a.k);
        w.places = a.offset ? a.matrix.places + place * a.vocabulary : a.matrix.places;
        w.factor = a.direct ? (a.chunks ? a.chunks[place].factor : 1.0) : 0.0;
    }
    w.soft = !w.none && !a.direct && (w.dy || w.delta != 0.0);
    if (!w.add && a.ce_factor) w.ce = a.ce_factor[w.row] * a.ce_weight;
    if (a.slopes) w.ce -= a.slopes[i];
    if (w.ce != 0.0) w.lse_one = a.lse_one[w.row];
    w.label = w.ce != 0.0 ? a.labels[w.row] - a.first : -1;
    return w;
}

static __device__ inline float xdi_cuda_xtoken_element(const xd_xtoken_args &a, const xdi_cuda_xtoken_line &w,
                                                       int64_t v, float z, float before) {
    double g = w.add ? (double)before : 0.0;
    if (w.ce != 0.0) g += w.ce * ((double)expf((float)((double)z - w.lse_one)) - (v == w.label ? 1.0 : 0.0));
    const double p = w.soft ? (double)expf((float)((double)z / a.temperature - a.lse[w.row])) : 0.0;
    if (w.dy) {
        const double h = xdi_cuda_xtoken_back(a, w.places, v, w.dy);
        return (float)(g + (a.direct ? w.factor * h : p * (h - w.delta) / a.temperature));
    }
    return (float)(a.u && !w.none ? g + ((double)a.u[v] * a.scale - p * w.delta) : g);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_gradient_kernel(const __grid_constant__ xd_xtoken_args a) {
    const xdi_cuda_xtoken_line w = xdi_cuda_xtoken_line_of(a, (int64_t)blockIdx.x);
    const int64_t end = w.add ? a.columns : a.gradient.cols;
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; c < end;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        xdi_cuda_eight z = {}, out = {};
        if (a.logits.data) z = xdi_cuda_read_any(a.logits, w.row, c, a.columns);
        if (w.add) out = xdi_cuda_read_any(a.gradient, w.row, c, end);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < a.columns) out.at[i] = xdi_cuda_xtoken_element(a, w, c + i, z.at[i], out.at[i]);
        xdi_cuda_write_any(a.gradient, w.row, c, end, out);
    }
    __syncthreads(); /* all have seen whether the row was written */
    if (threadIdx.x == 0 && a.written) a.written[w.row] = 1;
}

static xd_result xdi_cuda_xtoken_gradient(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_gradient_kernel, *a);
}

/* ---- what the driver of a CPU does itself ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_slots_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t j = xdi_cuda_flat_index();
    if (j < a.k) a.slots[a.ids[j]] = (int32_t)j;
}

static xd_result xdi_cuda_xtoken_slots(const xd_launch *launch, const xd_xtoken_args *a) {
    XD_TRY(xdi_cuda_fill(launch, a->slots, 0xff, (size_t)a->columns * sizeof *a->slots));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->k), xdi_cuda_xtoken_slots_kernel, *a);
}

/* xdi_cells_settle of one cell; what is not fixed is a value. */
static __device__ inline double xdi_cuda_cell_value(bool fixed, const double *cells, int64_t i) {
    if (!fixed) return cells[i];
    const xd_fixed cell = { reinterpret_cast<const int64_t *>(cells)[2 * i],
                            reinterpret_cast<const int64_t *>(cells)[2 * i + 1] };
    const double value = xdi_cuda_fixed_value(cell);
    if (cell.high >= XDI_CUDA_CELL_NAN / 2) return (double)NAN;
    return value < XDI_CUDA_CELL_MINUS_INFINITY / 2.0 ? -(double)INFINITY : value;
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_settle_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i < a.count) a.out[i] = xdi_cuda_cell_value(true, a.cells, i);
}

static xd_result xdi_cuda_xtoken_settle(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_settle_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_deltas_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    const xd_xtoken_chunk *c = a.chunks + a.places[i];
    const double delta = __dmul_rn(xdi_cuda_cell_value(a.fixed, a.cells, i), c->largest);
    a.out[i] = c->largest == 0.0 ? 0.0 : c->student < 1.5 && !a.offset ? c->delta : delta;
}

static xd_result xdi_cuda_xtoken_row_deltas(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_row_deltas_kernel, *a);
}

/* One block a row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_sums_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t row = (int64_t)blockIdx.x;
    const double largest = __ddiv_rn(a.row_lse[row], a.temperature);
    xdi_cuda_sums<1, true> mine;
    for (int64_t v = (int64_t)threadIdx.x; v < a.columns; v += XDI_CUDA_TEAM_BLOCK) {
        const double z = (double)xdi_cuda_element(a.logits, row, v);
        mine.add_wide(0, exp(__dsub_rn(__ddiv_rn(z, a.temperature), largest)));
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, row, totals);
}

static xd_result xdi_cuda_xtoken_row_sums(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->logits.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_row_sums_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_close_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t i = xdi_cuda_flat_index();
    const double kl = xdi_cuda_cell_value(a.fixed, a.cells, 0), sum = xdi_cuda_cell_value(a.fixed, a.cells, 1);
    if (i < a.count) a.out[i] = __dmul_rn(sum, a.scale);
    if (i > 0) return;
    a.chunks->value = kl;
    a.chunks->delta = a.delta[0];
    a.chunks->agree = a.delta[1] != 0.0;
    a.chunks->largest = isfinite(kl + a.delta[0]) ? 1.0 : 0.0;
}

static xd_result xdi_cuda_xtoken_close(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_xtoken_close_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_row_logs_kernel(const __grid_constant__ xd_xtoken_args a) {
    const int64_t row = xdi_cuda_flat_index();
    if (row >= a.logits.rows) return;
    const double largest = __ddiv_rn(a.row_lse[row], a.temperature);
    a.row_lse[row] = __dadd_rn(largest, log(xdi_cuda_cell_value(true, a.cells, row)));
}

static xd_result xdi_cuda_xtoken_row_logs(const xd_launch *launch, const xd_xtoken_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->logits.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows), xdi_cuda_xtoken_row_logs_kernel, *a);
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
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_row_logs_kernel);
}

/* The entries of projected losses; xtoken_gold.cu and xtoken_rows.cu add theirs. */
static xd_xtoken_kernels xdi_cuda_xtoken_table() {
    xd_xtoken_kernels kernels;
    memset(&kernels, 0, sizeof kernels);
    kernels.project = xdi_cuda_xtoken_project;
    kernels.target = xdi_cuda_xtoken_target;
    kernels.divergence = xdi_cuda_xtoken_divergence;
    kernels.delta = xdi_cuda_xtoken_delta;
    kernels.gradient = xdi_cuda_xtoken_gradient;
    kernels.slots = xdi_cuda_xtoken_slots;
    kernels.settle = xdi_cuda_xtoken_settle;
    kernels.row_deltas = xdi_cuda_xtoken_row_deltas;
    kernels.row_sums = xdi_cuda_xtoken_row_sums;
    kernels.close = xdi_cuda_xtoken_close;
    kernels.row_logs = xdi_cuda_xtoken_row_logs;
    return kernels;
}
