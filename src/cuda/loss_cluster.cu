/* Losses of long rows that stay on the chip: a cluster of blocks holds a row of the student, and of the teacher, in shared
 * memory, so that a row is read once and its gradient written once. One row per cluster, grid (rows * cluster), block 256; a
 * block has `slice` columns, copied in bulk.
 *
 * The blocks share a row as vocabulary shards do: each has its own references and sums, reads those of the others from their
 * shared memory, and computes the row's scalars from all of them, in the order of the columns. JSD has a second exchange. Needs
 * compute capability 9.0; off unless xd_cuda_desc.cluster asks for it. */

/* ---- what a cluster adds to blocks; elsewhere nothing launches these kernels ---- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ inline unsigned xdi_cuda_cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ inline unsigned xdi_cuda_cluster_size() {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

static __device__ inline void xdi_cuda_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* The address in block `rank` of what lies at `shared` in this block. */
template <typename T> static __device__ inline T *xdi_cuda_cluster_map(T *shared, unsigned rank) {
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T *>(address);
}

/* A barrier in shared memory with one arriving thread, which also announces the bytes of the bulk copies. */
static __device__ inline void xdi_cuda_bulk_init(uint64_t *barrier) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(at)
                 : "memory");
}

static __device__ inline void xdi_cuda_bulk_expect(uint64_t *barrier, unsigned bytes) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

static __device__ inline void xdi_cuda_bulk_load(void *shared, const void *global, unsigned bytes,
                                                 uint64_t *barrier) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared),
                   at = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(at)
        : "memory");
}

/* The first use of the barrier. */
static __device__ inline void xdi_cuda_bulk_wait(uint64_t *barrier) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(barrier);
    unsigned done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(at)
                     : "memory");
}

#elif defined(XD_EMU)

static inline unsigned xdi_cuda_cluster_rank() {
    return emu_cluster_rank();
}

static inline unsigned xdi_cuda_cluster_size() {
    return emu_cluster_size();
}

static inline void xdi_cuda_cluster_sync() {
    emu_cluster_sync();
}

template <typename T> static inline T *xdi_cuda_cluster_map(T *shared, unsigned rank) {
    return emu_map_shared(shared, rank);
}

static inline void xdi_cuda_bulk_init(uint64_t *barrier) {
    emu_mbarrier_init(barrier, 1);
}

static inline void xdi_cuda_bulk_expect(uint64_t *barrier, unsigned bytes) {
    emu_mbarrier_expect(barrier, bytes);
}

static inline void xdi_cuda_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *barrier) {
    emu_bulk_load(shared, global, bytes, barrier);
}

static inline void xdi_cuda_bulk_wait(uint64_t *barrier) {
    emu_mbarrier_wait(barrier, 0);
}

#else

static __device__ inline unsigned xdi_cuda_cluster_rank() {
    __trap();
    return 0;
}

static __device__ inline unsigned xdi_cuda_cluster_size() {
    return 1;
}

static __device__ inline void xdi_cuda_cluster_sync() {}

template <typename T> static __device__ inline T *xdi_cuda_cluster_map(T *shared, unsigned) {
    return shared;
}

static __device__ inline void xdi_cuda_bulk_init(uint64_t *) {}

static __device__ inline void xdi_cuda_bulk_expect(uint64_t *, unsigned) {}

static __device__ inline void xdi_cuda_bulk_load(void *, const void *, unsigned, uint64_t *) {}

static __device__ inline void xdi_cuda_bulk_wait(uint64_t *) {}

#endif

/* ---- the row ---- */

enum {
    XDI_CUDA_CLUSTER_MOST = 16,
    XDI_CUDA_CLUSTER_SUMS = XD_LOSS_REFERENCES, /* a block's references, then its sums */
    XDI_CUDA_CLUSTER_WORDS = XD_LOSS_REFERENCES + XD_LOSS_SUMS
};

struct xdi_cuda_cluster_memory {
    uint64_t barrier;
    double mine[XDI_CUDA_CLUSTER_WORDS]; /* the others read these two */
    double mixtures[XD_LOSS_MIXTURES];
    double all[XDI_CUDA_CLUSTER_MOST][XDI_CUDA_CLUSTER_WORDS];
    xd_loss_row row;
};

/* The sums of some blocks. */
struct xdi_cuda_cluster_total {
    double sum[XD_LOSS_SUMS];
};

struct xdi_cuda_cluster_total_join {
    __device__ xdi_cuda_cluster_total operator()(xdi_cuda_cluster_total a, const xdi_cuda_cluster_total &b) const {
        XD_UNROLL
        for (int i = 0; i < XD_LOSS_SUMS; i++) a.sum[i] = xd_add(a.sum[i], b.sum[i]);
        return a;
    }
};

/* This block's columns: [begin, begin + count) of the row, `x` and `y` in shared memory. */
template <typename X, typename Y> struct xdi_cuda_cluster_slice {
    X *x;
    Y *y; /* NULL without a teacher */
    int64_t begin, count;
};

template <typename T> static __device__ inline unsigned xdi_cuda_cluster_bulk_bytes(int64_t count) {
    return (unsigned)(count * (int64_t)sizeof(T) / 16 * 16);
}

/* Copies elements that begin on 16 bytes, in bulk; the last few, fewer than 16 bytes, one by one. */
template <typename T>
static __device__ inline void xdi_cuda_cluster_copy(T *to, const T *from, int64_t count, uint64_t *barrier) {
    const unsigned bytes = xdi_cuda_cluster_bulk_bytes<T>(count);
    const int64_t i = (int64_t)(bytes / sizeof(T)) + (int64_t)threadIdx.x;
    if (threadIdx.x == 0 && bytes > 0) xdi_cuda_bulk_load(to, from, bytes, barrier);
    if (i < count) to[i] = from[i];
}

template <typename X, typename Y>
static __device__ inline void xdi_cuda_cluster_fill(const xd_loss_args &a, int64_t r,
                                                    const xdi_cuda_cluster_slice<X, Y> &s,
                                                    uint64_t *barrier) {
    if (threadIdx.x == 0) {
        xdi_cuda_bulk_init(barrier); /* bytes are announced before any copy begins */
        xdi_cuda_bulk_expect(barrier, xdi_cuda_cluster_bulk_bytes<X>(s.count) +
                                          (s.y ? xdi_cuda_cluster_bulk_bytes<Y>(s.count) : 0));
    }
    __syncthreads();
    xdi_cuda_cluster_copy(s.x, xdi_cuda_row<X>(a.student, r) + s.begin, s.count, barrier);
    if (s.y) xdi_cuda_cluster_copy(s.y, xdi_cuda_row<Y>(a.teacher, r) + s.begin, s.count, barrier);
    xdi_cuda_bulk_wait(barrier);
    __syncthreads(); /* the remainders too */
}

/* References and sums of the slice, as xdi_cuda_loss_references and _stats leave them for a shard. */
template <typename X, typename Y>
static __device__ inline void xdi_cuda_cluster_stats(const xd_loss_args &a, int64_t r,
                                                     const xdi_cuda_cluster_slice<X, Y> &s, double *mine) {
    double ref[XD_LOSS_REFERENCES], total[XD_LOSS_SUMS];
    xdi_cuda_loss_sweep_columns<X, Y, XDI_CUDA_TEAM_BLOCK, xdi_cuda_on_chip>(a, s.x, s.y, s.count, s.begin, ref, total);
    if (threadIdx.x != 0) return;
    const int64_t label = xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1;
    if (total[XD_LOSS_BAD] == 0.0 && label >= s.begin && label < s.begin + s.count)
        total[XD_LOSS_TARGET] = ref[XD_LOSS_MAX] == -(double)INFINITY
                                    ? -(double)INFINITY
                                    : (double)xdi_cuda_widen(s.x[label - s.begin]) - ref[XD_LOSS_MAX];
    for (int i = 0; i < XD_LOSS_REFERENCES; i++) mine[i] = ref[i];
    for (int i = 0; i < XD_LOSS_SUMS; i++) mine[XDI_CUDA_CLUSTER_SUMS + i] = total[i];
}

/* The row's scalars, zero before, from the sums of all its blocks: xdi_cuda_loss_combine_kernel over slices. Each lane of the
 * first warp brings a block's sums to the row's references; they are added in the order of the columns. */
XDI_CUDA_APART __device__ void xdi_cuda_cluster_combine(const xd_loss_args &a, int64_t r, int64_t slice, int blocks,
                                                        const double (*all)[XDI_CUDA_CLUSTER_WORDS], xd_loss_row *row) {
    const int lane = (int)threadIdx.x;
    double ref[XD_LOSS_REFERENCES];
    xdi_cuda_cluster_total total;
    memset(&total, 0, sizeof total);
    xd_loss_no_reference(ref);
    for (int i = 0; i < blocks; i++) xd_loss_join_reference(ref, all[i]);
    if (lane < blocks) {
        const double *sums = all[lane] + XDI_CUDA_CLUSTER_SUMS;
        const int64_t left = a.vocab.size - lane * slice, columns = left < 0 ? 0 : left < slice ? left : slice;
        const int64_t label = xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1;
        xd_loss_rescale(&a, ref, all[lane], sums, columns, total.sum);
        if (label >= lane * slice && label < lane * slice + columns)
            total.sum[XD_LOSS_TARGET] = sums[XD_LOSS_TARGET] + (all[lane][XD_LOSS_MAX] - ref[XD_LOSS_MAX]);
    }
    total = xdi_cuda_warp_reduce(total, xdi_cuda_cluster_total_join());
    if (lane != 0) return;
    if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) total.sum[XD_LOSS_BAD] += 1.0;
    xdi_cuda_loss_scalars(a, r, ref, total.sum, row);
    xd_loss_settle(&a, r, row);
}

/* JSD: the second exchange, of a row without a finding. */
template <typename X, typename Y>
static __device__ inline void xdi_cuda_cluster_mixture(const xd_loss_args &a, int64_t r,
                                                       const xdi_cuda_cluster_slice<X, Y> &s, unsigned blocks,
                                                       xdi_cuda_cluster_memory *memory) {
    const xdi_cuda_loss_scales scales = xdi_cuda_loss_scales_of<Y>(a, memory->row);
    xdi_cuda_sums<XD_LOSS_MIXTURES, false> sums;
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; c < s.count;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight x = xdi_cuda_read(s.x, c, s.count), y = xdi_cuda_read(s.y, c, s.count);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < s.count) xdi_cuda_loss_mixture_terms(scales, x.at[i], y.at[i], &sums);
        sums.end_eight();
    }
    const xdi_cuda_sums<XD_LOSS_MIXTURES, false>::totals totals =
        xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(sums);
    if (threadIdx.x == 0)
        for (int i = 0; i < XD_LOSS_MIXTURES; i++) memory->mixtures[i] = totals.sum[i];
    xdi_cuda_cluster_sync();
    if (threadIdx.x == 0) {
        double total[XD_LOSS_MIXTURES] = {};
        for (unsigned b = 0; b < blocks; b++) {
            const double *part = xdi_cuda_cluster_map(memory->mixtures, b);
            for (int i = 0; i < XD_LOSS_MIXTURES; i++) total[i] += part[i];
        }
        xd_loss_mixture_scalars(&a, r, total[XD_LOSS_TEACHER_MIXTURE], total[XD_LOSS_STUDENT_MIXTURE],
                                      &memory->row);
    }
    __syncthreads();
}

/* A column of xdi_cuda_loss_gradient_at, from the slice. */
template <typename X, typename Y>
static __device__ inline xdi_cuda_loss_column xdi_cuda_cluster_column(const xdi_cuda_cluster_slice<X, Y> &s,
                                                                      int64_t id) {
    xdi_cuda_loss_column column = { -1, 0.0, 0.0 };
    if (id < s.begin || id >= s.begin + s.count) return column;
    column.at = id;
    column.x = (double)xdi_cuda_widen(s.x[id - s.begin]);
    if (s.y) column.y = (double)xdi_cuda_widen(s.y[id - s.begin]);
    return column;
}

/* The gradient of columns [begin, stop); past the slice's columns, and in a row that does not count, it is zero. */
template <typename X, typename Y>
static __device__ inline void xdi_cuda_cluster_grad(const xd_loss_args &a, int64_t r, const xd_loss_row &row,
                                                    const xdi_cuda_cluster_slice<X, Y> &s, bool counts,
                                                    int64_t stop) {
    const xdi_cuda_loss_scales scales = xdi_cuda_loss_scales_of<Y>(a, row);
    const xdi_cuda_loss_weights w = { (float)(a.row_scale[r] * a.hard_weight),
                                      (float)(a.row_scale[r] * a.soft_weight / a.temperature),
                                      (float)a.uniform_weight };
    const int64_t count = counts ? s.count : 0;
    for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; s.begin + c < stop;
         c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        xdi_cuda_eight g = {}, y = {};
        if (c < count) {
            const xdi_cuda_eight x = xdi_cuda_read(s.x, c, count);
            if (s.y) y = xdi_cuda_read(s.y, c, count);
            g = xdi_cuda_loss_gradient(scales, w, x, y);
            if (c + XDI_CUDA_EIGHT > count) {
                XD_UNROLL
                for (int i = 0; i < XDI_CUDA_EIGHT; i++) g.at[i] = c + i < count ? g.at[i] : 0.0f;
            }
        }
        xdi_cuda_write_any(a.gradient, r, s.begin + c, stop, g);
    }
    __syncthreads();
    if (threadIdx.x != 0 || !counts) return;
    XD_UNROLL
    for (int i = 0; i < 2; i++) {
        const int64_t id = i == 0 ? (int64_t)row.argmax : xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1;
        const xdi_cuda_loss_column exact = xdi_cuda_cluster_column(s, id);
        if (exact.at >= 0)
            xdi_cuda_set_element(a.gradient, r, exact.at, (float)xdi_cuda_loss_gradient_at(a, r, row, exact));
    }
}

/* The registers that two blocks per multiprocessor leave: slightly more than three would leave, and none is spilled. */
#define XDI_CUDA_CLUSTER_KERNEL __launch_bounds__(XDI_CUDA_TEAM_BLOCK, 2)

template <typename X, typename Y>
static __global__ void XDI_CUDA_CLUSTER_KERNEL
xdi_cuda_loss_cluster_kernel(const __grid_constant__ xd_loss_args a, int64_t slice) {
    XD_DYN_SHARED(unsigned char, room);
    XD_SHARED(xdi_cuda_cluster_memory, memory, );
    const unsigned rank = xdi_cuda_cluster_rank(), blocks = xdi_cuda_cluster_size();
    const int64_t r = (int64_t)(blockIdx.x / blocks), columns = a.vocab.end - a.vocab.begin;
    const int64_t begin = (int64_t)rank * slice, width = a.gradient.data ? a.gradient.cols : 0;
    const int64_t stop = rank + 1 < blocks && begin + slice < width ? begin + slice : width;
    bool counts = a.row_scale[r] != 0.0;
    xdi_cuda_cluster_slice<X, Y> s = { reinterpret_cast<X *>(room), NULL, begin, 0 };
    if (xdi_cuda_is<Y>::GIVEN) s.y = reinterpret_cast<Y *>(room + slice * (int64_t)sizeof(X));
    if (begin < columns) s.count = columns - begin < slice ? columns - begin : slice;
    if (counts) { /* for the whole cluster */
        xdi_cuda_cluster_fill(a, r, s, &memory.barrier);
        xdi_cuda_cluster_stats(a, r, s, memory.mine);
        xdi_cuda_cluster_sync();
        for (int i = (int)threadIdx.x; i < (int)blocks * XDI_CUDA_CLUSTER_WORDS; i += XDI_CUDA_TEAM_BLOCK) {
            const int block = i / XDI_CUDA_CLUSTER_WORDS, word = i % XDI_CUDA_CLUSTER_WORDS;
            memory.all[block][word] = xdi_cuda_cluster_map(memory.mine, (unsigned)block)[word];
        }
        __syncthreads();
    }
    if (threadIdx.x < XDI_CUDA_WARP) {
        xd_loss_row row;
        memset(&row, 0, sizeof row);
        if (counts) xdi_cuda_cluster_combine(a, r, slice, (int)blocks, memory.all, &row);
        if (threadIdx.x == 0) memory.row = row;
    }
    __syncthreads();
    counts = counts && memory.row.finding == (int)XD_ROW_FINE;
    if (xdi_cuda_is<Y>::GIVEN && counts && a.divergence == XD_JSD) {
        xdi_cuda_cluster_mixture(a, r, s, blocks, &memory);
        counts = memory.row.finding == (int)XD_ROW_FINE;
    }
    if (rank == 0 && threadIdx.x == 0) a.row[r] = memory.row;
    xdi_cuda_cluster_grad(a, r, memory.row, s, counts, stop);
    xdi_cuda_cluster_sync(); /* no block exits while others read its sums */
}

/* ---- which rows ---- */

/* Room for the memory of the row and of the reductions; the system takes another 1 KB per block. */
enum { XDI_CUDA_CLUSTER_STATIC = 6144 };
static_assert(sizeof(xdi_cuda_cluster_memory) <= XDI_CUDA_CLUSTER_STATIC - 3 * 1024, "static shared memory");

/* Number of blocks that hold such a row with `columns` columns of so many bytes: the smallest that leaves room for three blocks
 * per multiprocessor, else for two, and more than 8 only to reach two; 0 when the row does not fit. */
static int xdi_cuda_cluster_of(const xd_cuda *cuda, int64_t columns, size_t column_bytes, int64_t *slice) {
    static const struct { int residents, most; } choices[] = { { 3, 8 }, { 2, 8 }, { 2, 16 }, { 1, 16 } };
    for (size_t k = 0; k < sizeof choices / sizeof *choices; k++) {
        const size_t room =
            (cuda->block_shared_bytes + 1024) / (size_t)choices[k].residents - 1024 - XDI_CUDA_CLUSTER_STATIC;
        for (int blocks = 1; blocks <= choices[k].most && blocks <= cuda->cluster_blocks; blocks *= 2) {
            *slice = (columns + 8 * blocks - 1) / (8 * blocks) * 8;
            if ((size_t)*slice * column_bytes <= room) return blocks;
        }
    }
    return 0;
}

static bool xdi_cuda_cluster_reads(const xd_rows &x) {
    return xdi_cuda_is_aligned16(x.data) && xdi_cuda_stride(x) * (int64_t)xd_dtype_size(x.dtype) % 16 == 0;
}

template <typename X, typename Y>
static xd_result xdi_cuda_loss_cluster_launch(const xd_launch *launch, const xd_loss_args *a, int blocks,
                                              int64_t slice, size_t bytes) {
    xdi_cuda_grid grid = xdi_cuda_grid_of(a->student.rows * blocks, XDI_CUDA_TEAM_BLOCK, bytes);
    grid.cluster = blocks;
    return XDI_CUDA_LAUNCH(launch, grid, (xdi_cuda_loss_cluster_kernel<X, Y>), *a, slice);
}

/* The fused entry where clusters are on: rows that clusters cannot hold take the other path. */
static xd_result xdi_cuda_loss_clustered(const xd_launch *launch, const xd_loss_args *a) {
    const bool soft = a->teacher.data && a->soft_weight != 0.0;
    const size_t column_bytes =
        xd_dtype_size(a->student.dtype) + (soft ? xd_dtype_size(a->teacher.dtype) : 0);
    const int64_t columns = a->vocab.end - a->vocab.begin;
    int64_t slice = 0;
    const bool reads = xdi_cuda_cluster_reads(a->student) && (!soft || xdi_cuda_cluster_reads(a->teacher));
    const int blocks = a->vocab.shards == 1 && reads && columns > XDI_CUDA_SHORT_ROW && a->student.rows > 0
                           ? xdi_cuda_cluster_of(xdi_cuda_of(launch->ctx), columns, column_bytes, &slice)
                           : 0;
    if (blocks == 0) return xdi_cuda_loss_fused(launch, a);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOSS_TYPES(a, X, Y, xdi_cuda_none, {
        return xdi_cuda_loss_cluster_launch<X, Y>(launch, a, blocks, slice, (size_t)slice * column_bytes);
    })
}

/* ---- set-up ---- */

/* Sums the block ranks of a cluster through the blocks' shared memory. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_cluster_probe_kernel(int *sum) {
    XD_SHARED(int, mine, );
    if (threadIdx.x == 0) mine = (int)xdi_cuda_cluster_rank();
    xdi_cuda_cluster_sync();
    if (threadIdx.x == 0 && mine == 0) {
        *sum = 0;
        for (unsigned b = 0; b < xdi_cuda_cluster_size(); b++) *sum += *xdi_cuda_cluster_map(&mine, b);
    }
    xdi_cuda_cluster_sync();
}

/* Whether clusters of so many blocks can run. */
static xd_result xdi_cuda_cluster_probe(xd_ctx *ctx, int *memory, int blocks, bool *works) {
    const xd_launch launch = xd_ctx_launch(ctx);
    int sum = -1;
    xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_WARP);
    grid.cluster = blocks;
    XD_TRY(XDI_CUDA_LAUNCH(&launch, grid, xdi_cuda_cluster_probe_kernel, memory));
    XDI_CUDA_TRY(
        ctx, cudaMemcpyAsync(&sum, memory, sizeof sum, cudaMemcpyDeviceToHost, (cudaStream_t)launch.stream));
    XDI_CUDA_TRY(ctx, cudaStreamSynchronize((cudaStream_t)launch.stream));
    *works = sum == blocks * (blocks - 1) / 2;
    return XD_OK;
}

/* Lets a kernel use as much shared memory as the device gives a block; lowers *most to the size of the largest cluster of such
 * blocks that fits. */
template <typename X, typename Y>
static xd_result xdi_cuda_cluster_allow(xd_ctx *ctx, const xd_cuda *cuda, int *most) {
    void (*kernel)(xd_loss_args, int64_t) = xdi_cuda_loss_cluster_kernel<X, Y>;
    const int bytes = (int)(cuda->block_shared_bytes - XDI_CUDA_CLUSTER_STATIC);
    XD_TRY(xdi_cuda_load(ctx, kernel));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    for (; *most > 0; *most /= 2) {
        int clusters = 0;
        cudaLaunchAttribute cluster = {};
        cudaLaunchConfig_t config = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = (unsigned)*most;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        config.gridDim = dim3((unsigned)*most, 1, 1);
        config.blockDim = dim3(XDI_CUDA_TEAM_BLOCK, 1, 1);
        config.dynamicSmemBytes = (size_t)bytes;
        config.attrs = &cluster;
        config.numAttrs = 1;
        if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0) break;
        cudaGetLastError(); /* "too large" is no failure */
    }
    return XD_OK;
}

/* Turns the path on where the device and the build have it; `architecture` is that of the build. */
static xd_result xdi_cuda_cluster_set_up(xd_ctx *ctx, xd_cuda *cuda, int architecture) {
    int launches = 0, shared_bytes = 0, most = XDI_CUDA_CLUSTER_MOST;
    bool works = false;
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&launches, cudaDevAttrClusterLaunch, cuda->device));
    XDI_CUDA_TRY(
        ctx, cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda->device));
#if defined(XD_EMU)
    architecture = 900;
#endif
    if (cuda->capability >= 90 && architecture >= 900 && launches != 0 && shared_bytes >= 64 << 10)
        XD_TRY(xdi_cuda_cluster_probe(ctx, (int *)cuda->workspace, 8, &works));
    cuda->block_shared_bytes = (size_t)shared_bytes;
    if (works) {
        XD_TRY((xdi_cuda_cluster_allow<float, xdi_cuda_none>(ctx, cuda, &most)));
        XD_TRY((xdi_cuda_cluster_allow<xdi_cuda_bf16, xdi_cuda_none>(ctx, cuda, &most)));
        XD_TRY((xdi_cuda_cluster_allow<float, float>(ctx, cuda, &most)));
        XD_TRY((xdi_cuda_cluster_allow<float, xdi_cuda_bf16>(ctx, cuda, &most)));
        XD_TRY((xdi_cuda_cluster_allow<xdi_cuda_bf16, float>(ctx, cuda, &most)));
        XD_TRY((xdi_cuda_cluster_allow<xdi_cuda_bf16, xdi_cuda_bf16>(ctx, cuda, &most)));
    }
    if (!works || most == 0) {
        xd_log(ctx, XD_LOG_WARN,
               "xd_cuda_desc.cluster: this device or this build launches no clusters; rows are read twice");
        return XD_OK;
    }
    cuda->cluster_blocks = most;
    cuda->kernels.loss.fused = xdi_cuda_loss_clustered;
    return XD_OK;
}
