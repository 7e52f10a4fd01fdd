/* The k largest of every row: xdi_cpu_select and xdi_cpu_select_merge of kernel/cpu/topk.c. Which kernel a row gets is a matter
 * of k: topk_few.cu, topk_many.cu, or the one here, which has no limit.
 *
 * Here one block of 256 works on a row. Passes over the digits of the values find the k-th largest (radix select); one more
 * collects the larger values and, among those equal to it, the lowest columns; a bitonic network sorts the k. */

/* A value as an integer of the same order; NaN is -infinity, both zeros are one. */
static __device__ inline uint32_t xdi_cuda_select_key(float value) {
    const uint32_t bits = __float_as_uint(__fadd_rn(fmaxf(value, -INFINITY), 0.0f));
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

/* Inclusive sum over the lanes of a warp, in their order. */
template <typename T> static __device__ inline T xdi_cuda_warp_scan(T sum) {
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    XD_UNROLL
    for (int step = 1; step < XDI_CUDA_WARP; step *= 2) {
        const T other = __shfl_up_sync(0xffffffffu, sum, (unsigned)step);
        if (lane >= step) sum += other;
    }
    return sum;
}

/* Exclusive sum over the threads of the block, in their order; *total is the block's. */
template <int TEAM, typename T> static __device__ inline T xdi_cuda_select_scan(T mine, T *total) {
    enum { WARPS = TEAM / XDI_CUDA_WARP };
    XD_SHARED(T, warps, [XDI_CUDA_MAX_WARPS]);
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const T sum = xdi_cuda_warp_scan(mine);
    if (lane == XDI_CUDA_WARP - 1) warps[warp] = sum;
    __syncthreads();
    const T parts = xdi_cuda_warp_scan(lane < WARPS ? warps[lane] : (T)0);
    const T before = __shfl_sync(0xffffffffu, parts, warp > 0 ? warp - 1 : 0);
    *total = __shfl_sync(0xffffffffu, parts, WARPS - 1);
    __syncthreads(); /* warps may be written again */
    return (warp > 0 ? before : 0) + sum - mine;
}

/* Of what is counted by digits: the digit that has the value of rank *need (1: the largest digit's); *need becomes its rank among
 * those of that digit. All threads of the block call it, and counts may be written again when it returns. */
template <int TEAM, int DIGITS> static __device__ inline uint32_t xdi_cuda_select_digit(const unsigned *counts, int64_t *need) {
    enum { WARP = DIGITS <= 8 * XDI_CUDA_WARP, EACH = WARP ? DIGITS / XDI_CUDA_WARP : (DIGITS + TEAM - 1) / TEAM };
    XD_SHARED(unsigned, found, [2]);
    const int top = DIGITS - 1 - EACH * (int)threadIdx.x;
    const unsigned rank = (unsigned)*need;
    unsigned mine = 0, above = 0, total;
    if (!WARP || threadIdx.x < XDI_CUDA_WARP) { /* few digits are left to one warp */
        XD_UNROLL
        for (int i = 0; i < EACH; i++) mine += i <= top ? counts[top - i] : 0;
        if (WARP) above = xdi_cuda_warp_scan(mine) - mine;
    }
    if (!WARP) above = xdi_cuda_select_scan<TEAM>(mine, &total);
    if (above < rank && rank <= above + mine) {
        int i = 0;
        for (; above + counts[top - i] < rank; i++) above += counts[top - i];
        found[0] = (unsigned)(top - i);
        found[1] = above;
    }
    __syncthreads();
    *need -= found[1];
    return found[0];
}

/* The value of rank `need` (1: the largest) among the row's, and how many equal to it belong to the first `need`. TEAM: the
 * threads of the block, here and below. BITS: of a digit. What a load has beyond the row is -infinity and changes neither. */
template <int TEAM, int BITS, typename T>
static __device__ inline uint32_t xdi_cuda_select_threshold(const T *row, int64_t columns, int64_t *need) {
    enum { DIGITS = 1 << BITS, SAME = sizeof(T) == 2 ? 16 : 0 }; /* SAME: bits that the sign alone decides */
    XD_SHARED(unsigned, digits, [DIGITS]);
    unsigned *counts = digits;
    uint32_t prefix = 0;
    for (int left = 32; left > SAME;) { /* bits that are not known */
        const int bits = left - SAME < BITS ? left - SAME : (int)BITS, shift = left - bits;
        const uint32_t mask = (1u << bits) - 1u, known = left < 32 ? ~0u << left : 0u;
        XD_UNROLL_N(1)
        for (int i = (int)threadIdx.x; i < DIGITS; i += TEAM) counts[i] = 0;
        __syncthreads();
        xdi_cuda_each_eight<TEAM>(row, columns, [=](const xdi_cuda_raw<T> &raw, int64_t) {
            const xdi_cuda_eight x = raw.widened();
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                const uint32_t key = xdi_cuda_select_key(x.at[i]);
                if (((key ^ prefix) & known) == 0) atomicAdd(&counts[key >> shift & mask], 1u);
            }
        });
        __syncthreads();
        prefix |= xdi_cuda_select_digit<TEAM, DIGITS>(counts, need) << shift;
        left = shift;
    }
    return SAME > 0 && !(prefix >> 31) ? prefix | 0xffffu : prefix;
}

/* One of a row's k, by its key and this shard's column. A key has no zero's sign. */
template <typename T>
static __device__ inline void xdi_cuda_select_put(const xd_select_args &a, const T *row, int64_t at, uint32_t key,
                                                  uint32_t column) {
    float value = xd_float_of_key(~key);
    if (value == 0.0f) value = xdi_cuda_widen(row[column]);
    if (a.narrow)
        a.narrow[at] = value;
    else
        a.values[at] = (double)value;
    a.ids[at] = a.first + (int64_t)column;
}

/* What stands behind the last of a row. */
static __device__ inline void xdi_cuda_select_fill(const xd_select_args &a, int64_t r, int64_t n) {
    XD_UNROLL_N(1)
    for (int64_t at = r * a.k + n + (int64_t)threadIdx.x; at < (r + 1) * a.k; at += blockDim.x) {
        if (a.narrow)
            a.narrow[at] = -INFINITY;
        else
            a.values[at] = -(double)INFINITY;
        a.ids[at] = -1;
    }
}

/* An element: its key, then ~column, so that a larger word comes first. */
static __device__ inline uint64_t xdi_cuda_select_word(float value, int64_t column) {
    return (uint64_t)xdi_cuda_select_key(value) << 32 | (uint32_t)~(uint32_t)column;
}

/* Sorts words by the threads of a block, the largest first. */
static __device__ inline void xdi_cuda_select_bitonic(uint64_t *words, int64_t count) {
    xdi_cuda_bitonic<XDI_CUDA_TEAM_BLOCK>(count, [=](int64_t low, int64_t high) {
        const uint64_t x = words[low], y = words[high];
        if (x >= y) return;
        words[low] = y;
        words[high] = x;
    });
}

/* Collects the values above the threshold and the first `need` equal to it, in the order of their columns: put(at, value,
 * column). */
template <int TEAM, typename T, typename Put>
static __device__ inline void xdi_cuda_select_collect(const T *row, int64_t columns, uint32_t threshold,
                                                      int64_t need, Put put) {
    static_assert(XDI_CUDA_EIGHT * TEAM < 1 << 16, "two counts in a word");
    int64_t above = 0, equal = 0; /* of the columns before */
    const int64_t tile = XDI_CUDA_EIGHT * TEAM, own = XDI_CUDA_EIGHT * (int64_t)threadIdx.x;
    /* What lies beyond the row comes after all that are needed. The next tile is on its way while this one is counted. */
    xdi_cuda_eight next = {};
    if (own < columns) next = xdi_cuda_read(row, own, columns, -INFINITY);
    for (int64_t begin = 0; begin < columns; begin += tile) {
        const int64_t c = begin + own;
        const xdi_cuda_eight x = next;
        uint32_t mine = 0, total;
        if (c + tile < columns) next = xdi_cuda_read(row, c + tile, columns, -INFINITY);
        if (c < columns) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                const uint32_t key = xdi_cuda_select_key(x.at[i]);
                mine += key > threshold ? 1u << 16 : key == threshold ? 1u : 0u;
            }
        }
        const uint32_t before = xdi_cuda_select_scan<TEAM>(mine, &total);
        int64_t larger = above + (int64_t)(before >> 16), same = equal + (int64_t)(before & 0xffffu);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const uint32_t key = xdi_cuda_select_key(x.at[i]);
            if (mine == 0 || key < threshold) continue;
            if (key > threshold || same < need) put(larger + (same < need ? same : need), x.at[i], c + i);
            if (key > threshold)
                larger++;
            else
                same++;
        }
        above += (int64_t)(total >> 16);
        equal += (int64_t)(total & 0xffffu);
    }
}

/* The words are sorted where the ids go. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_select_kernel(const __grid_constant__ xd_select_args a) {
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    uint64_t *words = reinterpret_cast<uint64_t *>(a.ids + r * a.k);
    int64_t need = n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TEAM_BLOCK, 8>(row, a.columns, &need);
    xdi_cuda_select_collect<XDI_CUDA_TEAM_BLOCK>(row, a.columns, threshold, need, [=](int64_t at, float value, int64_t column) {
        words[at] = xdi_cuda_select_word(value, column);
    });
    xdi_cuda_select_fill(a, r, n);
    __syncthreads();
    xdi_cuda_select_bitonic(words, n);
    XD_UNROLL_N(1)
    for (int64_t j = (int64_t)threadIdx.x; j < n; j += XDI_CUDA_TEAM_BLOCK)
        xdi_cuda_select_put(a, row, r * a.k + j, (uint32_t)(words[j] >> 32), ~(uint32_t)words[j]);
}
