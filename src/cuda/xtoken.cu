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

/* ---- single logits ---- */

static __device__ inline const void *xdi_cuda_row_of(const xd_rows &x, int64_t row) {
    return x.dtype == XD_DTYPE_F32 ? (const void *)xdi_cuda_row<float>(x, row) : (const void *)xdi_cuda_row<xdi_cuda_bf16>(x, row);
}

/* A logit as it lies in memory, so that nothing waits for it, and its value. wide: the type is F32. */
static __device__ inline uint32_t xdi_cuda_ask(const void *row, bool wide, int64_t column) {
    return wide ? static_cast<const uint32_t *>(row)[column] : (uint32_t) static_cast<const uint16_t *>(row)[column];
}

static __device__ inline float xdi_cuda_asked(uint32_t bits, bool wide) {
    return xd_float_of_bits(wide ? bits : bits << 16);
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

/* ---- lists of a block ---- */

/* The larger; a NaN stays. */
struct xdi_cuda_larger_or_nan {
    __device__ double operator()(double a, double b) const {
        return a >= b || isnan(a) ? a : b;
    }
};

static __device__ inline double xdi_cuda_block_sum(double x) {
    return xdi_cuda_block_reduce(x, 0.0, xdi_cuda_add());
}

/* Calls use(i, then(ask(i))) for i < n, a thread of the team in steps of TEAM, in batches: what is asked for first is under way for all of
 * a batch before the next load, and these before the first use. */
template <int TEAM, int AHEAD, typename Ask, typename Then, typename Use>
static __device__ inline void xdi_cuda_each_ahead(int64_t n, Ask ask, Then then, Use use) {
    for (int64_t first = (int64_t)xdi_cuda_team_thread<TEAM>(); first < n; first += AHEAD * TEAM) {
        decltype(ask(first)) asked[AHEAD];
        decltype(then(ask(first))) values[AHEAD];
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k * TEAM < n) asked[k] = ask(first + k * TEAM);
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k * TEAM < n) values[k] = then(asked[k]);
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k * TEAM < n) use(first + k * TEAM, values[k]);
    }
}

struct xdi_cuda_same {
    template <typename T> __device__ T operator()(T value) const {
        return value;
    }
};

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

static xd_result xdi_cuda_xtoken_load(xd_ctx *ctx) {
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

/* The entries of sums; the files after this one add theirs. */
static xd_xtoken_kernels xdi_cuda_xtoken_table() {
    xd_xtoken_kernels kernels = {};
    kernels.row_deltas = xdi_cuda_xtoken_row_deltas;
    kernels.close = xdi_cuda_xtoken_close;
    kernels.slots = xdi_cuda_xtoken_slots;
    kernels.settle = xdi_cuda_xtoken_settle;
    kernels.row_sums = xdi_cuda_xtoken_row_sums;
    kernels.row_logs = xdi_cuda_xtoken_row_logs;
    kernels.product = xdi_cuda_xtoken_product;
    kernels.product_back = xdi_cuda_xtoken_product_back;
    return kernels;
}
