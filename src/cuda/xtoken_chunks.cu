/* Averages of chunks, with the bits of kernel/cpu/xtoken_chunks.c. The chunk of every row is in host memory and is passed in
 * the launch parameters, a few hundred rows per launch, so that nothing is copied or retained. */

/* The rows, or chunks, from `first` on: the chunk's index among all, -1: none, and its size. */
struct xdi_cuda_chunk_list {
    enum { ROOM = XDI_CUDA_LIST_BYTES / (int)(2 * sizeof(int64_t)) };
    int64_t first, count;
    int64_t chunk[ROOM], size[ROOM];
};

/* Calls launch_list with the lists of `count` rows or chunks; chunk_of and size_of give their contents. */
template <typename ChunkOf, typename SizeOf, typename LaunchList>
static xd_result xdi_cuda_each_chunk_list(int64_t count, ChunkOf chunk_of, SizeOf size_of,
                                          LaunchList launch_list) {
    xdi_cuda_chunk_list list;
    for (list.first = 0; list.first < count; list.first += list.count) {
        list.count = count - list.first;
        if (list.count > xdi_cuda_chunk_list::ROOM) list.count = xdi_cuda_chunk_list::ROOM;
        for (int64_t i = 0; i < list.count; i++) {
            list.chunk[i] = chunk_of(list.first + i);
            list.size[i] = list.chunk[i] < 0 ? 0 : size_of(list.chunk[i]);
        }
        XD_TRY(launch_list(list));
    }
    return XD_OK;
}

/* ---- sums: one thread per column; reads every element once ---- */

/* A block handles only the chunks of its group, so that many blocks share a few columns, and one thread adds to each sum, in
 * the order of the rows. */
enum { XDI_CUDA_CHUNK_GROUPS = 16 };

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_chunk_sums_kernel(
    const __grid_constant__ xd_chunk_args a, const __grid_constant__ xdi_cuda_chunk_list list) {
    const int64_t n = a.rows.cols, group = (int64_t)blockIdx.x % XDI_CUDA_CHUNK_GROUPS;
    const int64_t c =
        (int64_t)blockIdx.x / XDI_CUDA_CHUNK_GROUPS * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
    if (c >= n) return;
    for (int64_t i = 0; i < list.count; i++) {
        const int64_t chunk = list.chunk[i];
        if (chunk < 0 || chunk % XDI_CUDA_CHUNK_GROUPS != group) continue;
        xdi_cuda_cell_add<FIXED>(a.out, chunk * n + c, (double)xdi_cuda_element(a.rows, list.first + i, c));
    }
}

static xd_result xdi_cuda_chunk_sums(const xd_launch *launch, const xd_chunk_args *a) {
    const int64_t blocks = (a->rows.cols + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks * XDI_CUDA_CHUNK_GROUPS, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_chunk_list(
        a->rows.rows, [&](int64_t row) { return xd_chunk_of_row(a, row); }, [](int64_t) { return 0; },
        [&](const xdi_cuda_chunk_list &list) {
            XDI_CUDA_CELLS(a->fixed, FIXED, {
                return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_chunk_sums_kernel<FIXED>, *a, list);
            })
        });
}

/* ---- averages: one thread per entry ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_chunk_averages_kernel(
    const __grid_constant__ xd_chunk_args a, const __grid_constant__ xdi_cuda_chunk_list list) {
    const int64_t n = a.rows.cols, i = xdi_cuda_flat_index();
    if (i >= list.count * n) return;
    const int64_t size = list.size[i / n], at = list.first * n + i;
    a.out[at] = xd_chunk_average(a.sums[at], size);
}

static xd_result xdi_cuda_chunk_averages(const xd_launch *launch, const xd_chunk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_chunk_list(
        a->count, [](int64_t chunk) { return chunk; }, [&](int64_t chunk) { return a->sizes[chunk]; },
        [&](const xdi_cuda_chunk_list &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(list.count * a->rows.cols),
                                   xdi_cuda_chunk_averages_kernel, *a, list);
        });
}

/* ---- spread: one block per row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_chunk_spread_kernel(
    const __grid_constant__ xd_chunk_args a, const __grid_constant__ xdi_cuda_chunk_list list) {
    const int64_t n = a.rows.cols, row = list.first + blockIdx.x, chunk = list.chunk[blockIdx.x];
    const double size = (double)list.size[blockIdx.x];
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; c < n;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        xdi_cuda_eight out = {};
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (chunk >= 0 && c + i < n) out.at[i] = (float)__ddiv_rn(a.weight[chunk * n + c + i], size);
        xdi_cuda_write_any(a.rows, row, c, n, out);
    }
}

static xd_result xdi_cuda_chunk_spread(const xd_launch *launch, const xd_chunk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_each_chunk_list(
        a->rows.rows, [&](int64_t row) { return xd_chunk_of_row(a, row); },
        [&](int64_t chunk) { return a->sizes[chunk]; },
        [&](const xdi_cuda_chunk_list &list) {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.count, XDI_CUDA_TEAM_BLOCK),
                                   xdi_cuda_chunk_spread_kernel, *a, list);
        });
}

static xd_result xdi_cuda_chunks_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_chunk_sums_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_chunk_sums_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_chunk_averages_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_chunk_spread_kernel);
}

static void xdi_cuda_chunks_fill(xd_xtoken_kernels *kernels) {
    kernels->chunk_sums = xdi_cuda_chunk_sums;
    kernels->chunk_averages = xdi_cuda_chunk_averages;
    kernels->chunk_spread = xdi_cuda_chunk_spread;
}
