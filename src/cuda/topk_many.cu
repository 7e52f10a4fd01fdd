/* The k largest of a row, k in 1,025 ... 8,192: a block of 1,024 a row. Radix select with digits of 11 bits finds the k-th largest;
 * the k are collected in the order of their columns into shared memory, where a stable sort of their keys orders them. */

enum {
    XDI_CUDA_SELECT_TEAM = 1024,
    XDI_CUDA_SELECT_EACH = 8,
    XDI_CUDA_SELECT_MANY = XDI_CUDA_SELECT_TEAM * XDI_CUDA_SELECT_EACH,
    XDI_CUDA_SELECT_BYTES = XDI_CUDA_SELECT_MANY * 8 /* dynamic shared memory */
};

/* The keys, then the columns, EACH a thread; the sort works in the same memory, or a little more. */
template <int EACH> struct xdi_cuda_select_list {
    uint32_t keys[XDI_CUDA_SELECT_TEAM * EACH], columns[XDI_CUDA_SELECT_TEAM * EACH];
};

#if !defined(XD_EMU)
template <int EACH> struct xdi_cuda_select_sorter {
    typedef cub::BlockRadixSort<uint32_t, XDI_CUDA_SELECT_TEAM, EACH, uint32_t> type;
};
static_assert(sizeof(xdi_cuda_select_sorter<XDI_CUDA_SELECT_EACH>::type::TempStorage) <= XDI_CUDA_SELECT_BYTES, "the sort's room");
#endif

/* Sorts a full list by descending keys, equal ones in their order. Calls put(i, key, column) with all, i < EACH; the rank is threadIdx.x +
 * i XDI_CUDA_SELECT_TEAM. The keys' bits that differ are [first, end). */
template <int EACH, typename Put>
static __device__ inline void xdi_cuda_select_sort(xdi_cuda_select_list<EACH> *list, int first, int end, Put put) {
#if !defined(XD_EMU)
    typedef typename xdi_cuda_select_sorter<EACH>::type sorter;
    uint32_t keys[EACH], columns[EACH];
    XD_UNROLL
    for (int i = 0; i < EACH; i++) {
        keys[i] = list->keys[threadIdx.x * EACH + i];
        columns[i] = list->columns[threadIdx.x * EACH + i];
    }
    __syncthreads();
    sorter(*reinterpret_cast<typename sorter::TempStorage *>(list)).SortDescendingBlockedToStriped(keys, columns, first, end);
    XD_UNROLL
    for (int i = 0; i < EACH; i++) put(i, keys[i], columns[i]);
#else
    (void)first, (void)end;
    xdi_cuda_bitonic<XDI_CUDA_SELECT_TEAM>(XDI_CUDA_SELECT_TEAM * EACH, [=](int64_t low, int64_t high) {
        const uint32_t x = list->keys[low], y = list->keys[high];
        if (x > y || (x == y && list->columns[low] < list->columns[high])) return;
        std::swap(list->keys[low], list->keys[high]);
        std::swap(list->columns[low], list->columns[high]);
    });
    XD_UNROLL_N(1)
    for (int i = 0, j = (int)threadIdx.x; i < EACH; i++, j += XDI_CUDA_SELECT_TEAM) put(i, list->keys[j], list->columns[j]);
#endif
}

template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_SELECT_TEAM)
    xdi_cuda_select_many_kernel(const __grid_constant__ xd_select_args a) {
    XD_DYN_SHARED(xdi_cuda_select_list<XDI_CUDA_SELECT_EACH>, list);
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    int64_t need = n;
    uint32_t largest = 0;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_SELECT_TEAM, 11>(row, a.columns, &need);
    xdi_cuda_select_collect<XDI_CUDA_SELECT_TEAM>(row, a.columns, threshold, need, [&, list](int64_t at, float value, int64_t column) {
        const uint32_t key = xdi_cuda_select_key(value);
        if (key > largest) largest = key;
        list->keys[at] = key;
        list->columns[at] = (uint32_t)column;
    });
    XD_UNROLL_N(1)
    for (int64_t j = n + (int64_t)threadIdx.x; j < XDI_CUDA_SELECT_MANY; j += XDI_CUDA_SELECT_TEAM) {
        list->keys[j] = threshold; /* behind its equals */
        list->columns[j] = ~0u;
    }
    xdi_cuda_select_fill(a, r, n);
    largest = xdi_cuda_block_reduce(largest, 0u, xdi_cuda_larger()); /* a barrier, too */
    const int first = sizeof(T) == 2 ? 16 : 0, end = 32 - __clz((int)(largest ^ threshold));
    xdi_cuda_select_sort(list, first, end > first ? end : first + 1, [=, &a](int i, uint32_t key, uint32_t column) {
        const int rank = (int)threadIdx.x + i * XDI_CUDA_SELECT_TEAM;
        if (rank < n) xdi_cuda_select_put(a, row, r * a.k + rank, key, column);
    });
}
