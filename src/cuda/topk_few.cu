/* The k largest of a row, k <= 1,024: a block of 256 a row, which is read a little more than once.
 *
 * Each of 2,048 groups of the row's columns (a thread's, at one of its eight places) has a largest element. The k-th largest of
 * these is not above the k-th largest of the row, so what reaches it has the k among it. A part of the row is enough to find one
 * that a few hundred elements reach; where more do than there is room for, the whole row gives a better one. Many equal values
 * leave the row to radix select. Of the elements collected, the best are found by their upper 16 bits and sorted. */

enum {
    XDI_CUDA_SELECT_FEW = 1024,
    XDI_CUDA_SELECT_ROOM = 2048, /* for elements; a threshold of the whole row collects 1,420 of a thousand in the mean */
    XDI_CUDA_SELECT_RANKED = 256 /* so many are sorted by counting those before each */
};

struct xdi_cuda_select_room {
    uint64_t words[XDI_CUDA_SELECT_ROOM];
    uint32_t eights[XDI_CUDA_SELECT_ROOM]; /* numbers of eights with an element that reaches the threshold */
    int eight_count, word_count;
};

/* The upper 16 bits of the key of rank `need`: each(add) calls add(key) for a thread's keys. */
template <int TEAM, typename Each> static __device__ inline uint32_t xdi_cuda_select_high(int64_t need, Each each) {
    enum { DIGITS = 256 };
    XD_SHARED(unsigned, counts, [DIGITS]);
    uint32_t high = 0;
    for (int shift = 24; shift >= 16; shift -= 8) {
        for (int i = (int)threadIdx.x; i < DIGITS; i += TEAM) counts[i] = 0;
        __syncthreads();
        each([&](uint32_t key) {
            if (shift == 24 || key >> 24 == high) atomicAdd(&counts[key >> shift & (DIGITS - 1)], 1u);
        });
        __syncthreads();
        high = high << 8 | xdi_cuda_select_digit<TEAM, DIGITS>(counts, &need);
    }
    return high;
}

/* A value that at least n of the columns [0, end) reach; -infinity: all do. Every group has a column. */
template <typename T> static __device__ inline float xdi_cuda_select_limit(const T *row, int64_t end, int64_t n) {
    enum { NOTHING = 0x007f }; /* of -infinity */
    xdi_cuda_places<T, false> places;
    xdi_cuda_each_eight<XDI_CUDA_TEAM_BLOCK>(row, end, [&](const xdi_cuda_raw<T> &raw, int64_t) { places.see(raw); });
    const bool threads = n <= XDI_CUDA_TEAM_BLOCK / 4; /* a group for each is enough then */
    uint32_t keys[XDI_CUDA_EIGHT];
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        keys[i] = xdi_cuda_select_key(threads && i == 0 ? xdi_cuda_largest_of(places) : places.value(i));
    const uint32_t high = xdi_cuda_select_high<XDI_CUDA_TEAM_BLOCK>(n, [&](auto add) {
        add(keys[0]);
        if (threads) return;
        XD_UNROLL
        for (int i = 1; i < XDI_CUDA_EIGHT; i++) add(keys[i]);
    });
    return high <= NOTHING ? -INFINITY : xd_float_of_key(~(high << 16));
}

/* Collects the elements that reach the limit, in any order. Returns how many there are, or more than there is room for. */
template <typename T>
static __device__ inline int xdi_cuda_select_reaching(const T *row, int64_t columns, float limit, xdi_cuda_select_room *room) {
    if (threadIdx.x == 0) room->eight_count = room->word_count = 0;
    __syncthreads();
    xdi_cuda_each_eight<XDI_CUDA_TEAM_BLOCK>(row, columns, [=](const xdi_cuda_raw<T> &raw, int64_t c) {
        if (!(xdi_cuda_largest_of(raw) >= limit)) return;
        const int at = atomicAdd(&room->eight_count, 1);
        if (at < XDI_CUDA_SELECT_ROOM) room->eights[at] = (uint32_t)(c / XDI_CUDA_EIGHT);
    });
    __syncthreads();
    const int eights = room->eight_count;
    if (eights > XDI_CUDA_SELECT_ROOM) return eights;
    XD_UNROLL_N(1)
    for (int i = (int)threadIdx.x; i < eights; i += XDI_CUDA_TEAM_BLOCK) {
        const int64_t c = (int64_t)room->eights[i] * XDI_CUDA_EIGHT;
        const xdi_cuda_eight x = xdi_cuda_read(row, c, columns, -INFINITY);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            if (!(x.at[j] >= limit)) continue;
            const int at = atomicAdd(&room->word_count, 1);
            if (at < XDI_CUDA_SELECT_ROOM) room->words[at] = xdi_cuda_select_word(x.at[j], c + j);
        }
    }
    __syncthreads();
    return room->word_count;
}

/* Puts the n best into the room, whatever the values are. */
template <typename T>
XDI_CUDA_APART __device__ void xdi_cuda_select_equals(const T *row, int64_t columns, int64_t n, xdi_cuda_select_room *room) {
    int64_t need = n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TEAM_BLOCK, 8>(row, columns, &need);
    xdi_cuda_select_collect<XDI_CUDA_TEAM_BLOCK>(row, columns, threshold, need, [=](int64_t at, float value, int64_t column) {
        room->words[at] = xdi_cuda_select_word(value, column);
    });
    __syncthreads();
}

/* Puts elements into the room that have the row's n best among them. Returns how many. */
template <typename T>
static __device__ inline int xdi_cuda_select_gather(const T *row, int64_t columns, int64_t n, xdi_cuda_select_room *room) {
    enum { LEAST = 4 * XDI_CUDA_TEAM_BLOCK * XDI_CUDA_EIGHT };
    if (columns <= XDI_CUDA_SELECT_ROOM) {
        XD_UNROLL_N(1)
        for (int64_t c = (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_TEAM_BLOCK)
            room->words[c] = xdi_cuda_select_word(xdi_cuda_widen(row[c]), c);
        __syncthreads();
        return (int)columns;
    }
    int64_t part = n < XDI_CUDA_SELECT_RANKED ? columns / XDI_CUDA_SELECT_RANKED * n : columns;
    if (part < LEAST) part = LEAST;
    if (part > columns) part = columns;
    for (;;) {
        const float limit = xdi_cuda_select_limit(row, part, n);
        if (limit > -INFINITY) {
            const int count = xdi_cuda_select_reaching(row, columns, limit, room);
            if (count <= XDI_CUDA_SELECT_ROOM) return count;
        }
        if (part == columns) break;
        part = columns;
    }
    xdi_cuda_select_equals(row, columns, n, room);
    return (int)n;
}

/* Calls put(rank, word) for the n best words of the room. */
template <typename Put>
static __device__ inline void xdi_cuda_select_order(xdi_cuda_select_room *room, int count, int64_t n, Put put) {
    XD_SHARED(uint64_t, best, [XDI_CUDA_SELECT_RANKED]);
    XD_SHARED(int, best_count, [1]);
    uint64_t *words = room->words;
    int w = XDI_CUDA_SELECT_RANKED + 1;
    if (n <= XDI_CUDA_SELECT_RANKED) {
        const uint32_t high = xdi_cuda_select_high<XDI_CUDA_TEAM_BLOCK>(n, [=](auto add) {
            XD_UNROLL_N(1)
            for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK) add((uint32_t)(words[i] >> 32));
        });
        if (threadIdx.x == 0) best_count[0] = 0;
        __syncthreads();
        XD_UNROLL_N(1)
        for (int i = (int)threadIdx.x; i < count; i += XDI_CUDA_TEAM_BLOCK) {
            if ((uint32_t)(words[i] >> 48) < high) continue;
            const int at = atomicAdd(&best_count[0], 1);
            if (at < XDI_CUDA_SELECT_RANKED) best[at] = words[i];
        }
        __syncthreads();
        w = best_count[0];
    }
    if (w <= XDI_CUDA_SELECT_RANKED) {
        if ((int)threadIdx.x >= w) return;
        const uint64_t mine = best[threadIdx.x];
        int rank = 0;
        for (int i = 0; i < w; i++) rank += best[i] > mine;
        if (rank < n) put(rank, mine);
        return;
    }
    xdi_cuda_select_bitonic(words, count);
    XD_UNROLL_N(1)
    for (int j = (int)threadIdx.x; j < n; j += XDI_CUDA_TEAM_BLOCK) put(j, words[j]);
}

template <typename T>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, XDI_CUDA_BLOCKS(sizeof(T) == 2 ? 5 : 4))
    xdi_cuda_select_few_kernel(const __grid_constant__ xd_select_args a) {
    XD_SHARED(xdi_cuda_select_room, room, [1]);
    const int64_t r = (int64_t)blockIdx.x, n = a.k < a.columns ? a.k : a.columns;
    if (r >= a.logits.rows) return; /* the whole block returns */
    const T *row = xdi_cuda_row<T>(a.logits, r);
    xdi_cuda_select_fill(a, r, n);
    if (n == 0) return;
    const int count = xdi_cuda_select_gather(row, a.columns, n, room);
    xdi_cuda_select_order(room, count, n, [=, &a](int rank, uint64_t word) {
        xdi_cuda_select_put(a, row, r * a.k + rank, (uint32_t)(word >> 32), ~(uint32_t)word);
    });
}
