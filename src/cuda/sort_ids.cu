/* Sorts a list of ids in place: xdi_cpu_rows_sort_ids. A bitonic network whose steps are all ascending, so that what lies past the
 * end is the largest. Blocks sort tiles in shared memory; steps between tiles have a thread for each id. */

enum { XDI_CUDA_SORT_TEAM = 1024, XDI_CUDA_SORT_TILE = 4096 };

static __device__ inline void xdi_cuda_sort_pair(int64_t *ids, int64_t low, int64_t high) {
    const int64_t a = ids[low], b = ids[high];
    if (a <= b) return;
    ids[low] = b;
    ids[high] = a;
}

/* A block a tile: the whole sort, or the last steps of one of a larger size. */
static __global__ void __launch_bounds__(XDI_CUDA_SORT_TEAM) xdi_cuda_sort_tile_kernel(int64_t *ids, int64_t count, bool whole) {
    XD_SHARED(int64_t, shared, [XDI_CUDA_SORT_TILE]);
    int64_t *tile = shared;
    const int64_t begin = (int64_t)blockIdx.x * XDI_CUDA_SORT_TILE, left = count - begin;
    const int n = left < XDI_CUDA_SORT_TILE ? (int)left : (int)XDI_CUDA_SORT_TILE;
    for (int i = (int)threadIdx.x; i < n; i += XDI_CUDA_SORT_TEAM) tile[i] = ids[begin + i];
    __syncthreads();
    if (whole)
        xdi_cuda_bitonic<XDI_CUDA_SORT_TEAM>(n, [=](int64_t low, int64_t high) { xdi_cuda_sort_pair(tile, low, high); });
    for (int stride = whole ? 0 : XDI_CUDA_SORT_TILE / 2; stride > 0; stride /= 2) {
        for (int i = (int)threadIdx.x; i < n; i += XDI_CUDA_SORT_TEAM)
            if ((i ^ stride) > i && (i ^ stride) < n) xdi_cuda_sort_pair(tile, i, i ^ stride);
        __syncthreads();
    }
    for (int i = (int)threadIdx.x; i < n; i += XDI_CUDA_SORT_TEAM) ids[begin + i] = tile[i];
}

/* A step of a size: the first compares mirrored places, the others places `stride` apart. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_sort_step_kernel(int64_t *ids, int64_t count, int64_t size, int64_t stride) {
    const int64_t i = xdi_cuda_flat_index(), partner = stride == size / 2 ? i ^ (size - 1) : i ^ stride;
    if (partner > i && partner < count) xdi_cuda_sort_pair(ids, i, partner);
}

static xd_result xdi_cuda_sort_tiles(const xd_launch *launch, int64_t *ids, int64_t count, bool whole) {
    const int64_t tiles = (count + XDI_CUDA_SORT_TILE - 1) / XDI_CUDA_SORT_TILE;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(tiles, XDI_CUDA_SORT_TEAM), xdi_cuda_sort_tile_kernel, ids, count, whole);
}

static xd_result xdi_cuda_rows_sort_ids(const xd_launch *launch, int64_t *ids, int64_t count) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(xdi_cuda_sort_tiles(launch, ids, count, true));
    for (int64_t size = 2 * XDI_CUDA_SORT_TILE; size / 2 < count; size *= 2) {
        for (int64_t stride = size / 2; stride >= XDI_CUDA_SORT_TILE; stride /= 2)
            XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(count), xdi_cuda_sort_step_kernel, ids, count, size, stride));
        XD_TRY(xdi_cuda_sort_tiles(launch, ids, count, false));
    }
    return XD_OK;
}

static xd_result xdi_cuda_sort_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sort_tile_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_sort_step_kernel);
}
