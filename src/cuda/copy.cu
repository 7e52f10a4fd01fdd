/* Strided copies, many in a launch: the blocks of a redistribution, and arrays whose dtype does not change. Reads
 * and writes every byte once, 16 at a time where addresses, strides and lengths allow; coordinates are computed from
 * the index by divisions, whose time is hidden by that of memory. Grid: one block of 256 threads per chunk of 16384
 * units. */

struct xdi_cuda_move {
    char *to;
    const char *from;
    int64_t extent[XD_DIMS_MAX], to_stride[XD_DIMS_MAX], from_stride[XD_DIMS_MAX]; /* strides in bytes */
    int ndim;
    int unit; /* bytes that one thread moves: 16, 8, 4, 2 or 1 */
    int64_t units;
};

template <typename T> static __device__ inline void xdi_cuda_move_unit(char *to, const char *from) {
    *reinterpret_cast<T *>(to) = *reinterpret_cast<const T *>(from);
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_move_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_move> list, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    const int k = xdi_cuda_list_find(list, blockIdx.x);
    const xdi_cuda_move &m = list.at[k];
    xdi_cuda_walk(
        xdi_cuda_span_of(blockIdx.x - list.first(k), m.units), false, [](int64_t) {},
        [&](int64_t i) {
            int64_t to = 0, from = 0;
            for (int d = m.ndim - 1; d >= 0; d--) {
                const int64_t outer = d > 0 ? i / m.extent[d] : 0, at = i - outer * m.extent[d];
                to += at * m.to_stride[d];
                from += at * m.from_stride[d];
                i = outer;
            }
            switch (m.unit) {
            case 16: xdi_cuda_store16(m.to + to, xdi_cuda_load16(m.from + from)); break;
            case 8: xdi_cuda_move_unit<uint64_t>(m.to + to, m.from + from); break;
            case 4: xdi_cuda_move_unit<uint32_t>(m.to + to, m.from + from); break;
            case 2: xdi_cuda_move_unit<uint16_t>(m.to + to, m.from + from); break;
            default: m.to[to] = m.from[from]; break;
            }
        });
}

/* The largest unit, up to `limit`, that divides every address, stride and length. */
static int xdi_cuda_move_unit_of(uint64_t bits, int limit) {
    int unit = limit;
    while (bits % (uint64_t)unit != 0) unit /= 2;
    return unit;
}

static int64_t xdi_cuda_move_bytes(void *to, const void *from, int64_t bytes, xdi_cuda_move *move) {
    memset(move, 0, sizeof *move);
    move->to = (char *)to;
    move->from = (const char *)from;
    move->unit =
        xdi_cuda_move_unit_of((uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from | (uint64_t)bytes, 16);
    move->ndim = 1;
    move->units = move->extent[0] = to == from ? 0 : bytes / move->unit;
    move->to_stride[0] = move->from_stride[0] = move->unit;
    return move->units;
}

/* A strided block of elements of `size` bytes. Where the last dimension is dense on both sides it is moved in
 * larger units; otherwise element by element. A stride of zero reads the same element repeatedly. */
static int64_t xdi_cuda_move_block(const xd_copy *copy, const void *source, void *destination, size_t size,
                                   xdi_cuda_move *move) {
    const int last = copy->ndim - 1;
    const int64_t bytes = (int64_t)size;
    const bool dense = copy->src_stride[last] == 1 && copy->dst_stride[last] == 1;
    memset(move, 0, sizeof *move);
    move->to = (char *)destination + copy->dst_offset * bytes;
    move->from = (const char *)source + copy->src_offset * bytes;
    move->ndim = copy->ndim;
    uint64_t bits = (uint64_t)(uintptr_t)move->to | (uint64_t)(uintptr_t)move->from;
    for (int d = 0; d < copy->ndim; d++) {
        move->extent[d] = copy->extent[d];
        move->to_stride[d] = copy->dst_stride[d] * bytes;
        move->from_stride[d] = copy->src_stride[d] * bytes;
        if (d < last) bits |= (uint64_t)move->to_stride[d] | (uint64_t)move->from_stride[d];
    }
    if (dense) bits |= (uint64_t)(copy->extent[last] * bytes);
    move->unit = xdi_cuda_move_unit_of(bits, dense ? 16 : (int)size);
    if (dense) {
        move->extent[last] = copy->extent[last] * bytes / move->unit;
        move->to_stride[last] = move->from_stride[last] = move->unit;
    }
    move->units = 1;
    for (int d = 0; d < copy->ndim; d++) move->units *= move->extent[d];
    return move->units;
}

/* Launches the moves that make_item(k, &move) -> units fills in. */
template <typename MakeItem>
static xd_result xdi_cuda_move_run(const xd_launch *launch, int64_t count, MakeItem make_item) {
    return xdi_cuda_each_list<xdi_cuda_move>(count, make_item, [&](const xdi_cuda_list<xdi_cuda_move> &list) {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(list.chunks, XDI_CUDA_THREADS), xdi_cuda_move_kernel,
                               list, (const xd_status *)launch->status);
    });
}

static xd_result xdi_cuda_copies(const xd_launch *launch, const xd_copy *copies, int64_t count,
                                 const void *source, void *destination, size_t size) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_move_run(launch, count, [&](int64_t k, xdi_cuda_move *move) {
        return xdi_cuda_move_block(&copies[k], source, destination, size, move);
    });
}

static xd_result xdi_cuda_copy_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_move_kernel);
}
