/* Losses across tokenizers whose chunks each have their own list of columns: kernel/cpu/xtoken_lists.c is the reference. */

/* The chunk that an entry of the lists belongs to. */
static __device__ inline int64_t xdi_cuda_list_place(const xd_xtoken_lists &a, int64_t entry) {
    int64_t low = 0, high = a.count - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (a.offset[middle] <= entry)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Adds scale (p M) of one teacher id over this shard's columns: the terms first, first + step, ... of that id. */
template <bool FIXED>
static __device__ inline void xdi_cuda_list_add(const xd_xtoken_list_args &a, int64_t row, int32_t id,
                                                double scale, int64_t first, int64_t step,
                                                xdi_cuda_sums<1, FIXED> *sum) {
    const xd_xtoken_projection &m = a.lists.projection;
    if (!m.column_begin) {
        const int64_t v = id - a.x.first;
        if (first == 0 && v >= 0 && v < a.x.columns)
            sum->add_wide(0, __dmul_rn(scale, (double)xdi_cuda_xtoken_p(a.x, row, v)));
        return;
    }
    for (int64_t e = m.column_begin[id] + first; e < m.column_begin[id + 1]; e += step) {
        const int64_t v = m.student_id[e] - a.x.first;
        if (v < 0 || v >= a.x.columns) continue;
        const double weight = __dmul_rn((double)m.column_weight[e], scale);
        sum->add_wide(0, __dmul_rn(weight, (double)xdi_cuda_xtoken_p(a.x, row, v)));
    }
}

/* ---- list_project: one warp per entry, which goes through the entry's column of the matrix once per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_list_project_kernel(const __grid_constant__ xd_xtoken_list_args a) {
    const int64_t entry = xdi_cuda_team_row<XDI_CUDA_WARP>(), lane = xdi_cuda_team_thread<XDI_CUDA_WARP>();
    if (entry >= a.lists.entries) return;
    const int64_t place = xdi_cuda_list_place(a.lists, entry);
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t r = 0; r < a.x.count; r++)
        if (a.x.places[r] == place)
            xdi_cuda_list_add<FIXED>(a, a.x.rows[r], a.lists.ids[entry], 1.0, lane, XDI_CUDA_WARP, &mine);
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    if (lane == 0) xdi_cuda_cell_join(a.cells, entry, totals);
}

static xd_result xdi_cuda_list_project(const xd_launch *launch, const xd_xtoken_list_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0 || a->lists.entries == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->lists.entries, XDI_CUDA_WARP),
                               xdi_cuda_list_project_kernel<FIXED>, *a);
    })
}

/* ---- list_divergence: one block per chunk; three reads of its lists, which stay in the cache ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_list_divergence_kernel(const __grid_constant__ xd_xtoken_list_args a) {
    xd_xtoken_chunk *c = a.chunks + blockIdx.x;
    const int64_t begin = a.lists.offset[blockIdx.x], n = a.lists.offset[blockIdx.x + 1] - begin;
    const int64_t first = (int64_t)threadIdx.x;
    double *q = a.student + begin, inside = 0.0, target = 0.0, value = 0.0, largest = 0.0, slope = 0.0;
    const double *t = a.teacher + begin;
    if (n == 0) return;
    for (int64_t i = first; i < n; i += XDI_CUDA_TEAM_BLOCK) q[i] = __ddiv_rn(q[i], c->student);
    const bool agree = xdi_cuda_block_argmax(q, n) == xdi_cuda_block_argmax(t, n);
    for (int64_t i = first; i < n; i += XDI_CUDA_TEAM_BLOCK) {
        inside += q[i];
        target += t[i];
        value += xd_xtoken_list_term(q[i], t[i], a.reverse, &q[i]);
    }
    const double outside = 1.0 - xdi_cuda_block_sum(inside), all = xdi_cuda_block_sum(target);
    value = xdi_cuda_block_sum(value) + xd_xtoken_list_rest(outside, all, a.reverse, &slope);
    const double factor = xd_xtoken_chunk_factor(c, value);
    for (int64_t i = first; i < n; i += XDI_CUDA_TEAM_BLOCK) {
        q[i] = xd_xtoken_scaled(xd_xtoken_list_slope(q[i], outside, slope), factor);
        if (fabs(q[i]) > largest) largest = fabs(q[i]);
    }
    largest = xdi_cuda_block_reduce(largest, 0.0, xdi_cuda_larger());
    if (threadIdx.x != 0) return;
    c->value = value;
    c->agree = agree;
    c->largest = largest;
}

static xd_result xdi_cuda_list_divergence(const xd_launch *launch, const xd_xtoken_list_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->lists.count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->lists.count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_list_divergence_kernel, *a);
}

/* ---- list_delta: one block per row ---- */

template <bool FIXED>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_list_delta_kernel(const __grid_constant__ xd_xtoken_list_args a) {
    const int64_t r = (int64_t)blockIdx.x, place = a.x.places[r], end = a.lists.offset[place + 1];
    const double largest = a.chunks[place].largest;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t i = a.lists.offset[place] + (int64_t)threadIdx.x; i < end; i += XDI_CUDA_TEAM_BLOCK)
        if (a.student[i] != 0.0)
            xdi_cuda_list_add<FIXED>(a, a.x.rows[r], a.lists.ids[i], __ddiv_rn(a.student[i], largest), 0, 1, &mine);
    const typename xdi_cuda_sums<1, FIXED>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) xdi_cuda_cell_join(a.cells, r, totals);
}

static xd_result xdi_cuda_list_delta(const xd_launch *launch, const xd_xtoken_list_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_list_delta_kernel<FIXED>, *a);
    })
}

/* ---- list_gradient: the indices of all ids in each chunk's list, one thread per entry; then as for other gradients ---- */

static size_t xdi_cuda_list_bytes(int64_t, const xd_xtoken_lists *lists) {
    return (size_t)(lists->count * lists->projection.teacher_size) * sizeof(int32_t);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_list_slots_kernel(const __grid_constant__ xd_xtoken_lists lists, int32_t *slots) {
    const int64_t entry = xdi_cuda_flat_index();
    if (entry >= lists.entries) return;
    const int64_t place = xdi_cuda_list_place(lists, entry);
    slots[place * lists.projection.teacher_size + lists.ids[entry]] = (int32_t)(entry - lists.offset[place]);
}

static xd_result xdi_cuda_list_gradient(const xd_launch *launch, const xd_xtoken_list_gradient_args *a) {
    int32_t *slots = static_cast<int32_t *>(a->scratch);
    xdi_cuda_xtoken_form f = {};
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->to.x.count == 0 || a->lists.entries == 0) return XD_OK;
    XD_TRY(xdi_cuda_fill(launch, slots, 0xff, xdi_cuda_list_bytes(a->to.x.columns, &a->lists)));
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->lists.entries), xdi_cuda_list_slots_kernel, a->lists,
                            slots));
    f.to = a->to;
    f.projection = a->lists.projection;
    f.places = slots;
    f.ids = a->lists.projection.teacher_size;
    f.offset = a->lists.offset;
    f.dy = a->dy;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_xtoken_gradient(launch, f, a->to.x.count);
}

static xd_result xdi_cuda_list_kernels_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_project_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_project_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_divergence_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_delta_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_list_delta_kernel<false>));
    return xdi_cuda_load(ctx, xdi_cuda_list_slots_kernel);
}

static void xdi_cuda_list_kernels_fill(xd_xtoken_kernels *kernels) {
    kernels->list_project = xdi_cuda_list_project;
    kernels->list_divergence = xdi_cuda_list_divergence;
    kernels->list_delta = xdi_cuda_list_delta;
    kernels->list_bytes = xdi_cuda_list_bytes;
    kernels->list_gradient = xdi_cuda_list_gradient;
}
