/* Strided copies, many in a launch: the blocks of a redistribution, and arrays whose dtype does not change. Reads
 * and writes every byte once, 16 at a time where addresses, strides and lengths allow, with four loads of a thread on their way.
 * A thread computes the coordinates of its first unit by divisions and those of the others by additions. Grid: one block of 256
 * threads per chunk of 16384 units. */

enum { XDI_CUDA_MOVE_AHEAD = 4 };

struct xdi_cuda_move {
    char *to;
    const char *from;
    int64_t extent[XD_DIMS_MAX], to_stride[XD_DIMS_MAX], from_stride[XD_DIMS_MAX]; /* strides in bytes */
    int ndim;
    int unit; /* bytes that one thread moves: 16, 8, 4, 2 or 1 */
    int64_t units;
};

/* Both are not negative; those of a real tensor are below 2^32. */
static __device__ inline int64_t xdi_cuda_move_divide(int64_t a, int64_t b) {
    return (((uint64_t)a | (uint64_t)b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

/* Where a thread is in a move. The outer dimensions are computed anew when the last one is at its end. */
struct xdi_cuda_move_at {
    const xdi_cuda_move &m;
    int64_t to, from; /* of the outer dimensions, in bytes */
    int64_t outer, last; /* index of these, and coordinate in the last */

    __device__ xdi_cuda_move_at(const xdi_cuda_move &move, int64_t i) : m(move) {
        const int64_t extent = m.extent[m.ndim - 1];
        outer = xdi_cuda_move_divide(i, extent);
        last = i - outer * extent;
        find();
    }
    __device__ void find() {
        int64_t i = outer;
        to = from = 0;
        for (int d = m.ndim - 2; d >= 0; d--) {
            const int64_t next = d > 0 ? xdi_cuda_move_divide(i, m.extent[d]) : 0, at = i - next * m.extent[d];
            to += at * m.to_stride[d];
            from += at * m.from_stride[d];
            i = next;
        }
    }
    __device__ void advance(int64_t step) {
        const int64_t extent = m.extent[m.ndim - 1];
        last += step;
        if (last < extent) return;
        const int64_t rows = last < 2 * extent ? 1 : xdi_cuda_move_divide(last, extent);
        outer += rows;
        last -= rows * extent;
        find();
    }
};

/* Each of a thread's units, `step` apart: several loads before the first store. */
template <typename T> static __device__ inline void xdi_cuda_move_units(const xdi_cuda_move &m, int64_t begin, int64_t end, int step) {
    const int d = m.ndim - 1;
    const int64_t to_stride = m.to_stride[d], from_stride = m.from_stride[d];
    xdi_cuda_move_at at(m, begin);
    while (begin < end) {
        T units[XDI_CUDA_MOVE_AHEAD];
        char *to[XDI_CUDA_MOVE_AHEAD];
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MOVE_AHEAD; k++) {
            if (begin + k * step >= end) continue;
            to[k] = m.to + at.to + at.last * to_stride;
            units[k] = *reinterpret_cast<const T *>(m.from + at.from + at.last * from_stride);
            at.advance(step);
        }
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MOVE_AHEAD; k++)
            if (begin + k * step < end) *reinterpret_cast<T *>(to[k]) = units[k];
        begin += XDI_CUDA_MOVE_AHEAD * step;
    }
}

static __global__ void __launch_bounds__(XDI_CUDA_THREADS, 1)
    xdi_cuda_move_kernel(const __grid_constant__ xdi_cuda_list<xdi_cuda_move> list, const xd_status *status) {
    if (xd_status_refuses(status)) return;
    const int k = xdi_cuda_list_find(list, blockIdx.x);
    const xdi_cuda_move &m = list.at[k];
    const xdi_cuda_span span = xdi_cuda_span_of(blockIdx.x - list.first(k), m.units);
    const int64_t begin = span.begin + (int64_t)threadIdx.x;
    if (begin >= span.end) return;
    switch (m.unit) {
    case 16: xdi_cuda_move_units<xdi_cuda_bits16>(m, begin, span.end, XDI_CUDA_THREADS); break;
    case 8: xdi_cuda_move_units<uint64_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    case 4: xdi_cuda_move_units<uint32_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    case 2: xdi_cuda_move_units<uint16_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    default: xdi_cuda_move_units<uint8_t>(m, begin, span.end, XDI_CUDA_THREADS); break;
    }
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
