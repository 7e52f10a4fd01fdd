/* Tiles of chunks over common and uncommon ids, after their pairs: both sides' tails, what shards compare of them, and the results. */

/* ---- lists ---- */

/* A list of this shard and where its tail goes. */
struct xdi_cuda_gold_list {
    const int32_t *ids; /* [count] */
    int count, n, k;
    float *keys;     /* [count] */
    uint64_t *words; /* [k] the sorted tail, in the memory of `found` or of `values`: ~key, then the place in the list */
    double *values;  /* [k] */

    __device__ xdi_cuda_gold_list(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
        const int32_t *bounds = xdi_cuda_gold_bounds(a, others);
        ids = (others ? a.map.other_rest : a.map.rest) + bounds[0];
        count = bounds[1] - bounds[0];
        k = (int)a.k;
        n = k < count ? k : count;
        keys = xdi_cuda_gold_room(a).list(a, chunk, others);
        values = others ? a.other_tail + chunk * a.k : a.tails + chunk * (XD_XTOKEN_GOLD_WORDS + a.k) + XD_XTOKEN_GOLD_WORDS;
        words = others ? reinterpret_cast<uint64_t *>(values) : reinterpret_cast<uint64_t *>(a.found + chunk * a.k);
    }
};

template <bool FIXED>
static __device__ inline xdi_cuda_gold_means<FIXED> xdi_cuda_gold_side(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    return others ? xdi_cuda_gold_teacher<FIXED>(a, chunk) : xdi_cuda_gold_student<FIXED>(a, chunk);
}

/* ---- keys: the logits of a list, or sums of them, on the chip where they fit ---- */

/* An id with the sum of the rows before; then this row's logit as it lies in memory. */
struct xdi_cuda_gold_asked {
    int32_t id;
    float sum;
};

struct xdi_cuda_gold_key {
    uint32_t logit;
    float sum;
};

enum { XDI_CUDA_GOLD_TEAM = XDI_CUDA_SELECT_TEAM, XDI_CUDA_GOLD_AHEAD = 8 };

/* Keys that are BF16 logits, and no sums of them. */
static __device__ inline bool xdi_cuda_gold_is_narrow(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    const xd_xtoken_rows &x = others ? a.teacher : a.student;
    return x.logits.dtype == XD_DTYPE_BF16 && x.begin[chunk + 1] - x.begin[chunk] == 1;
}

/* Logits of one row that are BF16, as they are. */
static __device__ inline void xdi_cuda_gold_keys(const xdi_cuda_gold_list &list, const xdi_cuda_gold_means<false> &means, int64_t first,
                                                 xdi_cuda_bf16 *keys) {
    const void *row = means.start;
    uint16_t *bits = reinterpret_cast<uint16_t *>(keys);
    xdi_cuda_each_ahead<XDI_CUDA_GOLD_TEAM, XDI_CUDA_GOLD_AHEAD>(
        list.count, [&](int64_t i) { return list.ids[i]; }, [&](int32_t id) { return xdi_cuda_ask(row, false, id - first); },
        [&](int64_t i, uint32_t asked) { bits[i] = (uint16_t)asked; });
}

/* Sums of logits, row after row. */
static __device__ inline void xdi_cuda_gold_keys(const xdi_cuda_gold_list &list, const xdi_cuda_gold_means<false> &means, int64_t first,
                                                 float *keys) {
    const bool wide = means.x.logits.dtype == XD_DTYPE_F32;
    XD_UNROLL_N(1)
    for (int64_t r = means.rows.begin; r < means.rows.end; r++) {
        const void *row = xdi_cuda_row_of(means.x.logits, means.x.rows[r]);
        const bool adds = r > means.rows.begin;
        xdi_cuda_each_ahead<XDI_CUDA_GOLD_TEAM, XDI_CUDA_GOLD_AHEAD>(
            list.count, [&](int64_t i) -> xdi_cuda_gold_asked { return { list.ids[i], adds ? keys[i] : 0.0f }; },
            [&](const xdi_cuda_gold_asked &x) -> xdi_cuda_gold_key { return { xdi_cuda_ask(row, wide, x.id - first), x.sum }; },
            [&](int64_t i, const xdi_cuda_gold_key &x) {
                const float z = xdi_cuda_asked(x.logit, wide);
                keys[i] = adds ? __fadd_rn(x.sum, z) : z;
            });
    }
}

static __device__ inline void xdi_cuda_gold_keys(const xdi_cuda_gold_list &list, const xdi_cuda_gold_means<true> &means, int64_t first,
                                                 float *keys) {
    XD_UNROLL_N(1)
    for (int64_t i = (int64_t)threadIdx.x; i < list.count; i += XDI_CUDA_GOLD_TEAM) keys[i] = (float)means(list.ids[i] - first);
}

/* Where they go: the chip's room, or the list's memory. */
template <typename T> static __device__ inline T *xdi_cuda_gold_keys_at(const xdi_cuda_gold_list &, unsigned char *room) {
    return reinterpret_cast<T *>(room);
}

template <> __device__ inline float *xdi_cuda_gold_keys_at<float>(const xdi_cuda_gold_list &list, unsigned char *) {
    return list.keys;
}

/* ---- sorts ---- */

/* In memory of the device: a tail of any length. Words are ~key, then the place. */
template <typename T>
static __device__ inline void xdi_cuda_gold_sort_long(const xdi_cuda_gold_list &list, const T *keys) {
    uint64_t *words = list.words;
    int64_t need = list.n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_GOLD_TEAM, 11>(keys, list.count, &need);
    xdi_cuda_select_collect<XDI_CUDA_GOLD_TEAM>(keys, list.count, threshold, need, [=](int64_t at, float value, int64_t column) {
        words[at] = (uint64_t)~xdi_cuda_select_key(value) << 32 | (uint64_t)column;
    });
    xdi_cuda_tail_sort(words, list.n);
}

/* On the chip: of at most 1,024 EACH. */
template <int EACH, typename T>
static __device__ inline void xdi_cuda_gold_sort_short(const xdi_cuda_gold_list &list, const T *keys, xdi_cuda_select_list<EACH> *room) {
    int64_t need = list.n;
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_GOLD_TEAM, 11>(keys, list.count, &need);
    uint32_t differ = 0;
    xdi_cuda_select_collect<XDI_CUDA_GOLD_TEAM>(
        keys, list.count, threshold, need, [&, room](int64_t at, float value, int64_t column) {
            const uint32_t key = xdi_cuda_select_key(value);
            differ |= key ^ threshold;
            room->keys[at] = key;
            room->columns[at] = (uint32_t)column;
        });
    for (int j = list.n + (int)threadIdx.x; j < XDI_CUDA_GOLD_TEAM * EACH; j += XDI_CUDA_GOLD_TEAM) {
        room->keys[j] = threshold; /* behind its equals */
        room->columns[j] = ~0u;
    }
    differ = xdi_cuda_block_reduce(differ, 0u, xdi_cuda_either()); /* a barrier, too */
    if (sizeof(T) == 2) differ &= ~0xffffu;
    const int first = differ ? __ffs((int)differ) - 1 : 0, end = differ ? 32 - __clz((int)differ) : 1, n = list.n;
    uint64_t *words = list.words;
    xdi_cuda_select_sort<EACH>(room, first, end, [=](int i, uint32_t key, uint32_t column) {
        const int rank = (int)threadIdx.x + i * XDI_CUDA_GOLD_TEAM;
        if (rank < n) words[rank] = (uint64_t)~key << 32 | (uint64_t)column;
    });
}

template <int EACH> struct xdi_cuda_gold_sorter {
    template <typename T> static __device__ inline void run(const xdi_cuda_gold_list &list, const T *keys, void *room) {
        xdi_cuda_gold_sort_short<EACH>(list, keys, static_cast<xdi_cuda_select_list<EACH> *>(room));
    }
};

template <> struct xdi_cuda_gold_sorter<0> {
    template <typename T> static __device__ inline void run(const xdi_cuda_gold_list &list, const T *keys, void *) {
        xdi_cuda_gold_sort_long(list, keys);
    }
};

/* Dynamic shared memory of a sort of at most 1,024, and of none. */
enum { XDI_CUDA_GOLD_SHORT_BYTES = 40 << 10 };
#if !defined(XD_EMU)
static_assert(sizeof(xdi_cuda_select_sorter<1>::type::TempStorage) <= XDI_CUDA_GOLD_SHORT_BYTES, "the sort's room");
#endif

template <int EACH> struct xdi_cuda_gold_sort_room {
    enum { BYTES = EACH == 0 ? 0 : EACH == 1 ? (int)XDI_CUDA_GOLD_SHORT_BYTES : (int)XDI_CUDA_SELECT_BYTES };
};

/* ---- lists: a block each, the student's and then the teacher's of each chunk. T: of the keys, of which `kept` fit the chip ---- */

template <bool FIXED, int EACH, typename T>
static __global__ void __launch_bounds__(XDI_CUDA_GOLD_TEAM)
    xdi_cuda_gold_lists_kernel(const __grid_constant__ xd_xtoken_gold_args a, int kept) {
    XD_DYN_SHARED(unsigned char, room);
    const int64_t chunk = (int64_t)blockIdx.x / 2;
    const bool others = blockIdx.x % 2 != 0;
    const xdi_cuda_gold_list list(a, chunk, others);
    const bool is_narrow = !FIXED && list.count <= kept && xdi_cuda_gold_is_narrow(a, chunk, others);
    if (list.n == 0 || is_narrow != (sizeof(T) == 2)) return; /* the whole block returns */
    T *keys = xdi_cuda_gold_keys_at<T>(list, room + xdi_cuda_gold_sort_room<EACH>::BYTES);
    xdi_cuda_gold_keys(list, xdi_cuda_gold_side<FIXED>(a, chunk, others), others ? 0 : a.student.first, keys);
    __syncthreads();
    xdi_cuda_gold_sorter<EACH>::run(list, keys, room);
}

/* ---- what sorted lists mean ---- */

/* A rank of both tails: the sums are of |x - y|, and what that of the derivatives changes by. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_compare(double x, double y, int64_t found, float before, float *u,
                                                    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> *mine) {
    mine->add_wide(0, fabs(__dsub_rn(x, y)));
    if (found < 0) return;
    const float slope = xd_xtoken_tail_slope(x, y);
    u[found] = slope;
    mine->add_wide(XDI_CUDA_GOLD_SLOPES, (double)slope);
    if (before != 0.0f) mine->add_wide(XDI_CUDA_GOLD_SLOPES, -(double)before); /* the id also has a partner */
}

/* An entry of a sorted list: its column, -1: none. */
struct xdi_cuda_gold_entry {
    int32_t column;
    float key;
};

static __device__ inline uint64_t xdi_cuda_gold_word(const xdi_cuda_gold_list &list, int64_t rank) {
    return rank < list.n ? list.words[rank] : ~(uint64_t)0;
}

static __device__ inline xdi_cuda_gold_entry xdi_cuda_gold_entry_of(const xdi_cuda_gold_list &list, uint64_t word, int64_t first) {
    return { word == ~(uint64_t)0 ? -1 : (int32_t)(list.ids[word & 0xffffffffu] - first), xd_float_of_key((uint32_t)(word >> 32)) };
}

/* Threads of a block that ends a chunk: sums in fixed point take more registers. */
template <bool FIXED> struct xdi_cuda_gold_end {
    enum { TEAM = FIXED ? 512 : 1024 };
};

/* The tail of a side in the place of its words, for other ranks. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_tell(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    const xdi_cuda_gold_list list(a, chunk, others);
    const xdi_cuda_gold_means<FIXED> means = xdi_cuda_gold_side<FIXED>(a, chunk, others);
    const int64_t first = others ? 0 : a.student.first;
    int64_t *found = a.found + chunk * a.k;
    xdi_cuda_each_ahead<xdi_cuda_gold_end<FIXED>::TEAM, FIXED ? 1 : 4>(
        list.k, [&](int64_t rank) { return xdi_cuda_gold_word(list, rank); },
        [&](uint64_t word) { return xdi_cuda_gold_entry_of(list, word, first); },
        [&](int64_t rank, const xdi_cuda_gold_entry &entry) {
            list.values[rank] = entry.column < 0 ? -1.0 : means.probability(entry.column, entry.key);
            if (!others) found[rank] = entry.column;
        });
}

/* A rank of both lists. */
struct xdi_cuda_gold_words {
    uint64_t own, other;
};

struct xdi_cuda_gold_both {
    xdi_cuda_gold_entry own, other;
    float before; /* the derivative */
};

/* Both sorted lists of a rank that has all columns. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_compare_lists(const xd_xtoken_gold_args &a, int64_t chunk,
                                                          xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> *mine) {
    const xdi_cuda_gold_list list(a, chunk, false), others(a, chunk, true);
    const xdi_cuda_gold_means<FIXED> student = xdi_cuda_gold_student<FIXED>(a, chunk), teacher = xdi_cuda_gold_teacher<FIXED>(a, chunk);
    const int64_t first = a.student.first;
    float *u = a.u + chunk * a.student.columns;
    xdi_cuda_each_ahead<xdi_cuda_gold_end<FIXED>::TEAM, FIXED ? 1 : 2>(
        list.k,
        [&](int64_t rank) -> xdi_cuda_gold_words { return { xdi_cuda_gold_word(list, rank), xdi_cuda_gold_word(others, rank) }; },
        [&](const xdi_cuda_gold_words &words) -> xdi_cuda_gold_both {
            const xdi_cuda_gold_entry own = xdi_cuda_gold_entry_of(list, words.own, first);
            return { own, xdi_cuda_gold_entry_of(others, words.other, 0), own.column < 0 ? 0.0f : u[own.column] };
        },
        [&](int64_t, const xdi_cuda_gold_both &both) {
            const double x = both.own.column < 0 ? -1.0 : student.probability(both.own.column, both.own.key);
            const double y = both.other.column < 0 ? -1.0 : teacher.probability(both.other.column, both.other.key);
            xdi_cuda_gold_compare<FIXED>(x, y, both.own.column, both.before, u, mine);
        });
}

/* Adds up the parts of a chunk's pairs, by a warp. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_join(const xd_xtoken_gold_args &a, int64_t chunk) {
    typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> sums_type;
    const xdi_cuda_gold_room room(a);
    const xdi_cuda_gold_part<FIXED> *parts = reinterpret_cast<const xdi_cuda_gold_part<FIXED> *>(room.sums) + chunk * room.parts;
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_top mean = none, other = none;
    sums_type mine;
    for (int64_t i = (int64_t)threadIdx.x; i < room.parts; i += XDI_CUDA_WARP) {
        mine.whole = typename sums_type::join()(mine.whole, parts[i].sums);
        const xdi_cuda_top one = { parts[i].mean.value, parts[i].mean.at }, two = { parts[i].other.value, parts[i].other.at };
        mean = xdi_cuda_top_join()(mean, one);
        other = xdi_cuda_top_join()(other, two);
    }
    const typename sums_type::totals totals = xdi_cuda_team_totals<XDI_CUDA_WARP>(mine);
    mean = xdi_cuda_warp_reduce(mean, xdi_cuda_top_join());
    other = xdi_cuda_warp_reduce(other, xdi_cuda_top_join());
    if (threadIdx.x != 0) return;
    double *words = a.tails + chunk * (XD_XTOKEN_GOLD_WORDS + a.k);
    for (int which = 0; which < XDI_CUDA_GOLD_SUMS; which++)
        xdi_cuda_gold_set(a.sums, chunk * XDI_CUDA_GOLD_SUMS + which, totals, which);
    words[XD_XTOKEN_GOLD_MEAN] = mean.value;
    words[XD_XTOKEN_GOLD_PAIR] = mean.at == INT64_MAX ? -1.0 : (double)mean.at;
    words[XD_XTOKEN_GOLD_OTHER_MEAN] = other.value;
    words[XD_XTOKEN_GOLD_OTHER] = other.at == INT64_MAX ? -1.0 : (double)other.at;
}

/* ---- results of a chunk ---- */

/* Whether the most likely pair of all shards is the teacher's. */
static __device__ inline bool xdi_cuda_gold_agree(const xd_xtoken_gold_args &a, const double *words, int64_t stride) {
    xdi_cuda_top mean = { -(double)INFINITY, INT64_MAX }, other = mean;
    for (int r = 0; r < a.shards; r++, words += stride) {
        const xdi_cuda_top one = { words[XD_XTOKEN_GOLD_MEAN], (int64_t)words[XD_XTOKEN_GOLD_PAIR] };
        const xdi_cuda_top two = { words[XD_XTOKEN_GOLD_OTHER_MEAN], (int64_t)words[XD_XTOKEN_GOLD_OTHER] };
        if (one.at >= 0) mean = xdi_cuda_top_join()(mean, one);
        if (two.at >= 0) other = xdi_cuda_top_join()(other, two);
    }
    return mean.at != INT64_MAX && mean.at == other.at;
}

/* By one thread; the sums of this rank's pairs stand in their cells. */
template <typename Totals>
static __device__ inline void xdi_cuda_gold_put_merged(const xd_xtoken_gold_args &a, int64_t chunk, const Totals &totals) {
    const int64_t width = XD_XTOKEN_GOLD_WORDS + a.k;
    a.merged[2 * chunk] = xdi_cuda_gold_value(totals, 0);
    a.merged[2 * chunk + 1] = xdi_cuda_gold_agree(a, a.all + chunk * width, a.count * width) ? 1.0 : 0.0;
    xdi_cuda_gold_add(a.sums, chunk * XDI_CUDA_GOLD_SUMS + XDI_CUDA_GOLD_SLOPES, totals, XDI_CUDA_GOLD_SLOPES);
}

/* Row i of the call; the first of a chunk's completes the chunk. */
static __device__ inline void xdi_cuda_gold_close_row(const xd_xtoken_gold_args &a, int64_t i, int64_t place) {
    const int64_t cell = place * XDI_CUDA_GOLD_SUMS;
    const double kl = xdi_cuda_cell_value(a.fixed, a.sums, cell + XDI_CUDA_GOLD_KL);
    const double sum = a.write ? xdi_cuda_cell_value(a.fixed, a.sums, cell + XDI_CUDA_GOLD_SLOPES) : 0.0;
    xd_xtoken_close_args one = {};
    one.merged = a.merged + 2 * place;
    one.chunk = a.chunks + place;
    a.delta[i] = __dmul_rn(sum, __ddiv_rn(one.chunk->factor, a.student.temperature));
    if (i == a.student.begin[place] - a.student.begin[0]) xd_xtoken_close_chunk(&one, kl, sum);
}

/* ---- ends: a block a chunk. Where one rank has all columns, nothing is left to be merged ---- */

template <bool FIXED>
static __global__ void __launch_bounds__(xdi_cuda_gold_end<FIXED>::TEAM)
    xdi_cuda_gold_ends_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t chunk = (int64_t)blockIdx.x;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> mine;
    XD_UNROLL_N(1)
    for (int side = 0; side < 2 && a.k > 0 && a.shards > 1; side++) xdi_cuda_gold_tell<FIXED>(a, chunk, side == 1);
    if (a.k > 0 && a.shards == 1) xdi_cuda_gold_compare_lists<FIXED>(a, chunk, &mine);
    const auto totals = xdi_cuda_team_totals<xdi_cuda_gold_end<FIXED>::TEAM>(mine);
    if (threadIdx.x >= XDI_CUDA_WARP) return;
    xdi_cuda_gold_join<FIXED>(a, chunk);
    if (a.shards != 1) return;
    if (threadIdx.x == 0) xdi_cuda_gold_put_merged(a, chunk, totals);
    __syncwarp();
    const xdi_cuda_xtoken_range rows(a.student, chunk);
    for (int64_t i = rows.begin + (int64_t)threadIdx.x; i < rows.end; i += XDI_CUDA_WARP) xdi_cuda_gold_close_row(a, i, chunk);
}

/* BF16 keys that a block's shared memory holds beside a sort and what is static. */
static xd_result xdi_cuda_gold_kept(xd_ctx *ctx, int64_t bytes, int64_t *kept) {
    const int64_t others = 28 << 10;
    int device = 0, most = 0;
    XDI_CUDA_TRY(ctx, cudaGetDevice(&device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    *kept = most > bytes + others ? (most - bytes - others) / 16 * 8 : 0;
    return XD_OK;
}

template <bool FIXED, int EACH, typename T>
static xd_result xdi_cuda_gold_sort_keys(const xd_launch *launch, const xd_xtoken_gold_args *a, int64_t kept) {
    const size_t bytes = (size_t)xdi_cuda_gold_sort_room<EACH>::BYTES + (sizeof(T) == 2 ? 2 * (size_t)kept : 0);
    const auto kernel = xdi_cuda_gold_lists_kernel<FIXED, EACH, T>; /* its commas are none of the macro's */
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(2 * a->count, XDI_CUDA_GOLD_TEAM, bytes), kernel, *a, (int)kept);
}

template <bool FIXED, int EACH> static xd_result xdi_cuda_gold_sort_lists(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const int64_t longest = a->map.rest_count > a->map.other_rest_count ? a->map.rest_count : a->map.other_rest_count;
    const bool narrow = a->student.logits.dtype == XD_DTYPE_BF16 || a->teacher.logits.dtype == XD_DTYPE_BF16;
    int64_t kept = 0;
    if (!FIXED && narrow) XD_TRY(xdi_cuda_gold_kept(launch->ctx, xdi_cuda_gold_sort_room<EACH>::BYTES, &kept));
    if (kept > longest) kept = (longest + 7) / 8 * 8;
    if (kept > 0) XD_TRY((xdi_cuda_gold_sort_keys<false, EACH, xdi_cuda_bf16>(launch, a, kept)));
    return xdi_cuda_gold_sort_keys<FIXED, EACH, float>(launch, a, kept);
}

template <bool FIXED> static xd_result xdi_cuda_gold_lists(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    if (a->k > XDI_CUDA_SELECT_MANY)
        XD_TRY((xdi_cuda_gold_sort_lists<FIXED, 0>(launch, a)));
    else if (a->k > XDI_CUDA_SELECT_TEAM)
        XD_TRY((xdi_cuda_gold_sort_lists<FIXED, XDI_CUDA_SELECT_EACH>(launch, a)));
    else if (a->k > 0)
        XD_TRY((xdi_cuda_gold_sort_lists<FIXED, 1>(launch, a)));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, (int)xdi_cuda_gold_end<FIXED>::TEAM), xdi_cuda_gold_ends_kernel<FIXED>, *a);
}

/* ---- sums ---- */

/* The log-sum-exps of the teacher's rows, a block each. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_lse_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const double lse = xdi_cuda_row_lse<T>(a.teacher, a.teacher.rows[blockIdx.x]);
    if (threadIdx.x == 0) xdi_cuda_gold_room(a).lse[blockIdx.x] = lse;
}

static xd_result xdi_cuda_gold_sums(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->teacher.logits.dtype, T, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->teacher.count, XDI_CUDA_TEAM_BLOCK), xdi_cuda_gold_lse_kernel<T>, *a));
    })
    XD_TRY(xdi_cuda_gold_pairs_all(launch, a));
    XDI_CUDA_CELLS(a->fixed, FIXED, { return xdi_cuda_gold_lists<FIXED>(launch, a); })
}

/* ---- merge: one block per chunk; every entry finds its rank among those of all shards ---- */

/* Of entry i of a shard's tail: its rank among those of all. */
static __device__ inline int64_t xdi_cuda_gold_rank(const xd_xtoken_gold_args &a, const double *tails, int64_t stride, int shard,
                                                    int64_t i, double value) {
    int64_t rank = i;
    for (int r = 0; r < a.shards; r++)
        if (r != shard) rank += xdi_cuda_tail_before(tails + r * stride, a.k, value, r < shard);
    return rank;
}

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_SELECT_TEAM)
    xdi_cuda_gold_merge_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t chunk = (int64_t)blockIdx.x, width = XD_XTOKEN_GOLD_WORDS + a.k, stride = a.count * width;
    const double *tails = a.all + chunk * width + XD_XTOKEN_GOLD_WORDS, *others = a.other_tail + chunk * a.k;
    const int64_t *found = a.found + chunk * a.k;
    float *u = a.u + chunk * a.student.columns;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> mine;
    for (int shard = 0; shard < a.shards; shard++)
        for (int64_t i = (int64_t)threadIdx.x; i < a.k; i += XDI_CUDA_SELECT_TEAM) {
            const double value = tails[shard * stride + i];
            const int64_t rank = xdi_cuda_gold_rank(a, tails, stride, shard, i, value);
            if (isnan(value)) mine.add_wide(0, value);
            if (rank >= a.k) continue;
            const int64_t column = shard == a.shard ? found[i] : -1;
            xdi_cuda_gold_compare<FIXED>(value, others[rank], column, column >= 0 ? u[column] : 0.0f, u, &mine);
        }
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_SELECT_TEAM>(mine);
    if (threadIdx.x == 0) xdi_cuda_gold_put_merged(a, chunk, totals);
}

static xd_result xdi_cuda_gold_merge(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_SELECT_TEAM), xdi_cuda_gold_merge_kernel<FIXED>, *a);
    })
}

/* ---- close: one thread per row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_close_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.student.count) return;
    xdi_cuda_gold_close_row(a, i, a.student.places[i]);
}

static xd_result xdi_cuda_gold_close(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.count), xdi_cuda_gold_close_kernel, *a);
}

static xd_result xdi_cuda_gold_gradient(const xd_launch *launch, const xd_xtoken_gold_args *a, const xd_xtoken_gradient *to) {
    xdi_cuda_grade f = xdi_cuda_grade_of(to);
    f.u = a->u;
    f.scale = 1.0 / a->student.temperature;
    f.by_factor = true;
    f.delta = a->delta;
    f.chunks = a->chunks;
    return xdi_cuda_grade_run<XDI_CUDA_GRADE_MEANS>(launch, f, a->count, a->student.count);
}

/* ---- table ---- */

template <bool FIXED, int EACH, typename T> static xd_result xdi_cuda_gold_lists_load(xd_ctx *ctx) {
    const int64_t bytes = xdi_cuda_gold_sort_room<EACH>::BYTES;
    const auto kernel = xdi_cuda_gold_lists_kernel<FIXED, EACH, T>;
    int64_t kept = 0;
    XD_TRY(xdi_cuda_load(ctx, kernel));
    if (sizeof(T) == 2) XD_TRY(xdi_cuda_gold_kept(ctx, bytes, &kept));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes + 2 * kept)));
    return XD_OK;
}

template <int EACH> static xd_result xdi_cuda_gold_sorts_load(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_gold_lists_load<false, EACH, xdi_cuda_bf16>(ctx)));
    XD_TRY((xdi_cuda_gold_lists_load<false, EACH, float>(ctx)));
    return xdi_cuda_gold_lists_load<true, EACH, float>(ctx);
}

template <bool FIXED> static xd_result xdi_cuda_gold_tile_load_cells(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_ends_kernel<FIXED>));
    return xdi_cuda_load(ctx, xdi_cuda_gold_merge_kernel<FIXED>);
}

static xd_result xdi_cuda_gold_tile_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_partners_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_lse_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_lse_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_close_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<true, float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<false, float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<false, xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_gold_sorts_load<0>(ctx));
    XD_TRY(xdi_cuda_gold_sorts_load<1>(ctx));
    XD_TRY(xdi_cuda_gold_sorts_load<XDI_CUDA_SELECT_EACH>(ctx));
    XD_TRY(xdi_cuda_gold_tile_load_cells<true>(ctx));
    return xdi_cuda_gold_tile_load_cells<false>(ctx);
}

static void xdi_cuda_gold_tile_fill(xd_xtoken_kernels *kernels) {
    kernels->gold_bytes = xdi_cuda_gold_bytes;
    kernels->gold_partners = xdi_cuda_gold_partners;
    kernels->gold_sums = xdi_cuda_gold_sums;
    kernels->gold_merge = xdi_cuda_gold_merge;
    kernels->gold_close = xdi_cuda_gold_close;
    kernels->gold_gradient = xdi_cuda_gold_gradient;
}
