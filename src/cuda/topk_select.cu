/* The k largest of every row: xdi_cpu_select and xdi_cpu_select_merge of kernel/cpu/topk.c.
 *
 * select: one block of 256 per row. Four passes over eight bits each find the k-th largest value (radix select); a fifth
 * collects the larger values and, among those equal to it, the lowest columns; a bitonic network sorts the k. The row is read
 * from memory once where it stays in the cache. */

enum { XDI_CUDA_SELECT_DIGITS = 256 };

/* A value as an integer of the same order; NaN is -infinity, both zeros are one. */
static __device__ inline uint32_t xdi_cuda_select_key(float value) {
    const uint32_t bits = __float_as_uint(isnan(value) ? -INFINITY : value == 0.0f ? 0.0f : value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Exclusive sum over the threads of the block, in their order; *total is the block's. Two counts below 2^32 / 256 are packed in
 * one value. */
template <int TEAM> static __device__ inline uint64_t xdi_cuda_select_scan(uint64_t mine, uint64_t *total) {
    XD_SHARED(uint64_t, warps, [XDI_CUDA_MAX_WARPS]);
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    uint64_t sum = mine, before = 0;
    XD_UNROLL
    for (int step = 1; step < XDI_CUDA_WARP; step *= 2) {
        const uint64_t other = (uint64_t)__shfl_up_sync(0xffffffffu, (unsigned long long)sum, (unsigned)step);
        if (lane >= step) sum += other;
    }
    if (lane == XDI_CUDA_WARP - 1) warps[warp] = sum;
    __syncthreads();
    *total = 0;
    for (int i = 0; i < TEAM / XDI_CUDA_WARP; i++) {
        if (i < warp) before += warps[i];
        *total += warps[i];
    }
    __syncthreads(); /* warps may be written again */
    return before + sum - mine;
}

/* The value of rank `need` (1: the largest) among the row's, and how many equal to it belong to the first `need`. TEAM: the
 * threads of the block, here and below; at least one per digit value. */
template <int TEAM, typename T>
static __device__ inline uint32_t xdi_cuda_select_threshold(const T *row, int64_t columns, int64_t *need) {
    XD_SHARED(unsigned, counts, [XDI_CUDA_SELECT_DIGITS]);
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < XDI_CUDA_SELECT_DIGITS) counts[threadIdx.x] = 0;
        __syncthreads();
        for (int64_t c = XDI_CUDA_EIGHT * (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_EIGHT * TEAM) {
            const xdi_cuda_eight x = xdi_cuda_read(row, c, columns);
            uint32_t last = 0;
            unsigned same = 0; /* neighbours often share a digit: one addition per run of equal digits */
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                const uint32_t key = xdi_cuda_select_key(x.at[i]), digit = (key >> shift) & 255u;
                const bool known = shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
                if (c + i >= columns || !known) continue;
                if (same > 0 && digit != last) atomicAdd(&counts[last], same);
                same = digit == last ? same + 1 : 1;
                last = digit;
            }
            if (same > 0) atomicAdd(&counts[last], same);
        }
        __syncthreads();
        int64_t above = 0; /* every thread searches for the digit itself */
        uint32_t digit = XDI_CUDA_SELECT_DIGITS - 1;
        for (; digit > 0 && above + (int64_t)counts[digit] < *need; digit--) above += (int64_t)counts[digit];
        *need -= above;
        prefix |= digit << shift;
        __syncthreads(); /* counts are written again */
    }
    return prefix;
}

/* Collects the values above the threshold and the first `need` equal to it, in the order of their columns: put(at, value,
 * column). */
template <int TEAM, typename T, typename Put>
static __device__ inline void xdi_cuda_select_collect(const T *row, int64_t columns, uint32_t threshold,
                                                      int64_t need, Put put) {
    int64_t above = 0, equal = 0; /* of the columns before */
    const int64_t tile = XDI_CUDA_EIGHT * TEAM;
    for (int64_t begin = 0; begin < columns; begin += tile) {
        const int64_t c = begin + XDI_CUDA_EIGHT * (int64_t)threadIdx.x;
        xdi_cuda_eight x = {};
        uint64_t mine = 0, total;
        if (c < columns) x = xdi_cuda_read(row, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const uint32_t key = xdi_cuda_select_key(x.at[i]);
            if (c + i < columns) mine += key > threshold ? (uint64_t)1 << 32 : key == threshold ? 1u : 0u;
        }
        const uint64_t before = xdi_cuda_select_scan<TEAM>(mine, &total);
        int64_t larger = above + (int64_t)(before >> 32), same = equal + (int64_t)(before & 0xffffffffu);
        for (int i = 0; mine != 0 && i < XDI_CUDA_EIGHT; i++) {
            const uint32_t key = xdi_cuda_select_key(x.at[i]);
            if (c + i >= columns || key < threshold) continue;
            if (key > threshold || same < need) put(larger + (same < need ? same : need), x.at[i], c + i);
            if (key > threshold)
                larger++;
            else
                same++;
        }
        above += (int64_t)(total >> 32);
        equal += (int64_t)(total & 0xffffffffu);
    }
}

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_select_kernel(const __grid_constant__ xd_select_args a) {
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    double *values = a.values + r * a.k;
    int64_t *ids = a.ids + r * a.k;
    if (n > 0) {
        int64_t need = n;
        const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TEAM_BLOCK>(row, a.columns, &need);
        xdi_cuda_select_collect<XDI_CUDA_TEAM_BLOCK>(
            row, a.columns, threshold, need, [=, &a](int64_t at, float value, int64_t column) {
                values[at] = isnan(value) ? -(double)INFINITY : (double)value;
                ids[at] = a.first + column;
            });
    }
    for (int64_t j = n + (int64_t)threadIdx.x; j < a.k; j += XDI_CUDA_TEAM_BLOCK) {
        values[j] = -(double)INFINITY;
        ids[j] = -1;
    }
    __syncthreads();
    xdi_cuda_bitonic<XDI_CUDA_TEAM_BLOCK>(n, [=](int64_t low, int64_t high) {
        const double x = values[low], y = values[high];
        const int64_t i = ids[low], j = ids[high];
        if (x > y || (x == y && i < j)) return;
        values[low] = y;
        values[high] = x;
        ids[low] = j;
        ids[high] = i;
    });
}

static xd_result xdi_cuda_select(const xd_launch *launch, const xd_select_args *a) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(a->logits.rows, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T,
                    { return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_select_kernel<T>, *a); })
}

/* ---- select_merge: one warp per row ---- */

/* How many of a shard's n candidates, descending, are larger than value; with `equal` also those that equal it. */
static __device__ inline int64_t xdi_cuda_select_before(const int64_t *words, int64_t n, double value,
                                                        bool equal) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const double other = __longlong_as_double(words[middle]);
        if (other > value || (equal && other == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Number of valid candidates of a row and shard: from there on ids are -1 (padding). */
static __device__ inline int64_t xdi_cuda_select_given(const int64_t *ids, int64_t k) {
    int64_t low = 0, high = k;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (ids[middle] >= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Every candidate finds its rank among all; among equals the earlier shard comes first, because its columns are lower. */
static __device__ inline void xdi_cuda_select_place(const xd_select_args &a, int64_t r, int shard,
                                                    int64_t j) {
    const int64_t candidates = a.logits.rows * a.k, *mine = a.all + shard * a.all_stride + r * a.k;
    const int64_t id = mine[candidates + j];
    const double value = __longlong_as_double(mine[j]);
    int64_t rank = j;
    if (id < 0) return;
    for (int i = 0; i < a.shards; i++) {
        const int64_t *other = a.all + i * a.all_stride + r * a.k;
        if (i != shard)
            rank += xdi_cuda_select_before(other, xdi_cuda_select_given(other + candidates, a.k), value,
                                           i < shard);
    }
    if (rank >= a.k) return;
    a.values[r * a.k + rank] = value;
    a.ids[r * a.k + rank] = id;
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_select_merge_kernel(const __grid_constant__ xd_select_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    for (int shard = 0; shard < a.shards; shard++)
        for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP)
            xdi_cuda_select_place(a, r, shard, j);
}

static xd_result xdi_cuda_select_merge(const xd_launch *launch, const xd_select_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_select_merge_kernel, *a);
}

/* ---- table of the losses ---- */

static xd_result xdi_cuda_select_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_select_kernel<xdi_cuda_bf16>));
    return xdi_cuda_load(ctx, xdi_cuda_select_merge_kernel);
}

static xd_topk_kernels xdi_cuda_topk_table() {
    xd_topk_kernels kernels = {};
    kernels.maxima = xdi_cuda_topk_maxima;
    kernels.stats = xdi_cuda_topk_stats;
    kernels.merge = xdi_cuda_topk_merge;
    kernels.divergence = xdi_cuda_topk_divergence;
    kernels.grad = xdi_cuda_topk_grad;
    kernels.entries = xdi_cuda_topk_entries_run;
    kernels.select = xdi_cuda_select;
    kernels.select_merge = xdi_cuda_select_merge;
    return kernels;
}
