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

/* ---- keys: 2,048 of a list a block ---- */

struct xdi_cuda_gold_asked {
    int32_t id;
    uint32_t logit;
};

enum { XDI_CUDA_KEYS_EACH = 8, XDI_CUDA_KEYS = XDI_CUDA_KEYS_EACH * XDI_CUDA_TEAM_BLOCK };

static __host__ __device__ inline int64_t xdi_cuda_gold_key_blocks(int64_t count) {
    return (count + XDI_CUDA_KEYS - 1) / XDI_CUDA_KEYS;
}

/* blocks: of a chunk. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_gold_keys_kernel(const __grid_constant__ xd_xtoken_gold_args a, int64_t blocks) {
    const int64_t chunk = (int64_t)blockIdx.x / blocks, part = (int64_t)blockIdx.x - chunk * blocks;
    const int64_t own = xdi_cuda_gold_key_blocks(a.map.rest_count);
    const bool others = part >= own;
    const int64_t begin = (others ? part - own : part) * XDI_CUDA_KEYS, first = others ? 0 : a.student.first;
    const xdi_cuda_gold_list list(a, chunk, others);
    if (begin >= list.count) return; /* the whole block returns */
    const xdi_cuda_gold_means<FIXED> means = xdi_cuda_gold_side<FIXED>(a, chunk, others);
    const int64_t left = list.count - begin;
    xdi_cuda_each_ahead<XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : (int)XDI_CUDA_KEYS_EACH>(
        left < XDI_CUDA_KEYS ? left : (int64_t)XDI_CUDA_KEYS, [&](int64_t i) { return list.ids[begin + i]; },
        [&](int32_t id) -> xdi_cuda_gold_asked { return { id, means.ask(id - first) }; },
        [&](int64_t i, const xdi_cuda_gold_asked &asked) { list.keys[begin + i] = means.key(asked.logit, asked.id - first); });
}

/* ---- tails: a block of 1,024 per list, the student's and then the teacher's of each chunk ---- */

/* Keys that are logits: do their upper halves tell all? */
static __device__ inline bool xdi_cuda_gold_is_narrow(const xd_xtoken_gold_args &a, int64_t chunk, bool others) {
    const xd_xtoken_rows &x = others ? a.teacher : a.student;
    return x.logits.dtype == XD_DTYPE_BF16 && x.begin[chunk + 1] - x.begin[chunk] == 1;
}

/* In memory of the device: a tail of any length. */
static __device__ inline void xdi_cuda_gold_sort_long(const xdi_cuda_gold_list &list, uint32_t threshold, int64_t need) {
    uint64_t *words = list.words;
    xdi_cuda_select_collect<XDI_CUDA_SELECT_TEAM>(
        list.keys, list.count, threshold, need, [=](int64_t at, float value, int64_t column) {
            words[at] = (uint64_t)~xdi_cuda_select_key(value) << 32 | (uint64_t)column;
        });
    xdi_cuda_tail_sort(words, list.n);
}

/* On the chip: of at most 1,024 EACH. A thread writes the words that it reads then. */
template <int EACH>
static __device__ inline void xdi_cuda_gold_sort_short(const xdi_cuda_gold_list &list, uint32_t threshold, int64_t need, bool narrow,
                                                       xdi_cuda_select_list<EACH> *room) {
    uint32_t differ = 0;
    xdi_cuda_select_collect<XDI_CUDA_SELECT_TEAM>(
        list.keys, list.count, threshold, need, [&, room](int64_t at, float value, int64_t column) {
            const uint32_t key = xdi_cuda_select_key(value);
            differ |= key ^ threshold;
            room->keys[at] = key;
            room->columns[at] = (uint32_t)column;
        });
    for (int j = list.n + (int)threadIdx.x; j < XDI_CUDA_SELECT_TEAM * EACH; j += XDI_CUDA_SELECT_TEAM) {
        room->keys[j] = threshold; /* behind its equals */
        room->columns[j] = ~0u;
    }
    differ = xdi_cuda_block_reduce(differ, 0u, xdi_cuda_either()); /* a barrier, too */
    if (narrow) differ &= ~0xffffu;
    const int first = differ ? __ffs((int)differ) - 1 : 0, end = differ ? 32 - __clz((int)differ) : 1, n = list.n;
    uint64_t *words = list.words;
    xdi_cuda_select_sort<EACH>(room, first, end, [=](int rank, uint32_t key, uint32_t column) {
        if (rank < n) words[rank] = (uint64_t)~key << 32 | (uint64_t)column;
    });
}

/* Dynamic shared memory of a sort of at most 1,024. */
enum { XDI_CUDA_GOLD_SHORT_BYTES = 40 << 10 };
#if !defined(XD_EMU)
static_assert(sizeof(xdi_cuda_select_sorter<1>::type::TempStorage) <= XDI_CUDA_GOLD_SHORT_BYTES, "the sort's room");
#endif

/* EACH: of the sort on the chip, 0: in memory. */
template <int EACH>
static __global__ void __launch_bounds__(XDI_CUDA_SELECT_TEAM)
    xdi_cuda_gold_tails_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    XD_DYN_SHARED(xdi_cuda_select_list<EACH ? EACH : 1>, room);
    const int64_t chunk = (int64_t)blockIdx.x / 2;
    const bool others = blockIdx.x % 2 != 0;
    const xdi_cuda_gold_list list(a, chunk, others);
    int64_t need = list.n;
    if (list.n == 0) return; /* the whole block returns */
    const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_SELECT_TEAM, 11>(list.keys, list.count, &need);
    if (EACH)
        xdi_cuda_gold_sort_short(list, threshold, need, !a.fixed && xdi_cuda_gold_is_narrow(a, chunk, others), room);
    else
        xdi_cuda_gold_sort_long(list, threshold, need);
}

/* ---- results of lists: a block has so many ranks of both tails; the first of a chunk also adds up its pairs ---- */

struct xdi_cuda_gold_entry {
    int64_t id;
    float key;
};

/* What the sorted words mean, in their place. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_spell(const xd_xtoken_gold_args &a, int64_t chunk, bool others, int64_t begin) {
    const xdi_cuda_gold_list list(a, chunk, others);
    const xdi_cuda_gold_means<FIXED> means = xdi_cuda_gold_side<FIXED>(a, chunk, others);
    const int64_t first = others ? 0 : a.student.first, end = begin + XDI_CUDA_KEYS < list.k ? begin + XDI_CUDA_KEYS : list.k;
    int64_t *found = a.found + chunk * a.k;
    xdi_cuda_each_ahead<XDI_CUDA_TEAM_BLOCK, FIXED ? 1 : (int)XDI_CUDA_KEYS_EACH>(
        end - begin, [&](int64_t i) { return begin + i < list.n ? list.words[begin + i] : ~(uint64_t)0; },
        [&](uint64_t word) -> xdi_cuda_gold_entry {
            return { word == ~(uint64_t)0 ? -1 : list.ids[word & 0xffffffffu] - first, xd_float_of_key((uint32_t)(word >> 32)) };
        },
        [&](int64_t i, const xdi_cuda_gold_entry &entry) {
            list.values[begin + i] = entry.id < 0 ? -1.0 : means.probability(entry.id, entry.key);
            if (!others) found[begin + i] = entry.id;
        });
}

/* Adds up the parts of a chunk's pairs. */
template <bool FIXED>
static __device__ inline void xdi_cuda_gold_join(const xd_xtoken_gold_args &a, int64_t chunk) {
    typedef xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> sums_type;
    const xdi_cuda_gold_room room(a);
    const xdi_cuda_gold_part<FIXED> *parts = reinterpret_cast<const xdi_cuda_gold_part<FIXED> *>(room.sums) + chunk * room.parts;
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_top mean = none, other = none;
    sums_type mine;
    if (threadIdx.x >= XDI_CUDA_WARP) return;
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

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_gold_spell_kernel(const __grid_constant__ xd_xtoken_gold_args a, int64_t blocks) {
    const int64_t chunk = (int64_t)blockIdx.x / blocks, part = (int64_t)blockIdx.x - chunk * blocks;
    if (part == 0) xdi_cuda_gold_join<FIXED>(a, chunk);
    if (part * XDI_CUDA_KEYS >= a.k) return; /* the whole block returns */
    xdi_cuda_gold_spell<FIXED>(a, chunk, false, part * XDI_CUDA_KEYS);
    xdi_cuda_gold_spell<FIXED>(a, chunk, true, part * XDI_CUDA_KEYS);
}

/* ---- sums ---- */

/* The log-sum-exps of the teacher's rows, a block each. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_gold_lse_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const double lse = xdi_cuda_row_lse<T>(a.teacher, a.teacher.rows[blockIdx.x]);
    if (threadIdx.x == 0) xdi_cuda_gold_room(a).lse[blockIdx.x] = lse;
}

static xd_result xdi_cuda_gold_tails(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const int64_t blocks = 2 * a->count, team = XDI_CUDA_SELECT_TEAM;
    if (a->k == 0) return XD_OK;
    if (a->k <= team)
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, (int)team, XDI_CUDA_GOLD_SHORT_BYTES),
                               xdi_cuda_gold_tails_kernel<1>, *a);
    if (a->k <= XDI_CUDA_SELECT_MANY)
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, (int)team, XDI_CUDA_SELECT_BYTES),
                               xdi_cuda_gold_tails_kernel<XDI_CUDA_SELECT_EACH>, *a);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, (int)team), xdi_cuda_gold_tails_kernel<0>, *a);
}

/* Keys, their sort, and what it means. */
template <bool FIXED> static xd_result xdi_cuda_gold_lists(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const int64_t keys = xdi_cuda_gold_key_blocks(a->map.rest_count) + xdi_cuda_gold_key_blocks(a->map.other_rest_count);
    const int64_t ranks = a->k > 0 ? xdi_cuda_gold_key_blocks(a->k) : 1;
    if (a->k > 0)
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * keys, XDI_CUDA_TEAM_BLOCK), xdi_cuda_gold_keys_kernel<FIXED>, *a,
                                keys));
    XD_TRY(xdi_cuda_gold_tails(launch, a));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * ranks, XDI_CUDA_TEAM_BLOCK), xdi_cuda_gold_spell_kernel<FIXED>, *a,
                           ranks);
}

static xd_result xdi_cuda_gold_sums(const xd_launch *launch, const xd_xtoken_gold_args *a) {
    const xdi_cuda_gold_room room(*a);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->teacher.logits.dtype, T, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->teacher.count, XDI_CUDA_TEAM_BLOCK), xdi_cuda_gold_lse_kernel<T>, *a));
    })
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        if (room.parts > 0)
            XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * room.parts, XDI_CUDA_TEAM_BLOCK),
                                    xdi_cuda_gold_pairs_kernel<FIXED>, *a));
        return xdi_cuda_gold_lists<FIXED>(launch, a);
    })
}

/* ---- merge: one block per chunk; every entry finds its rank among those of all shards ---- */

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

/* Of entry i of a shard's tail: its rank among those of all. */
static __device__ inline int64_t xdi_cuda_gold_rank(const xd_xtoken_gold_args &a, const double *tails, int64_t stride, int shard,
                                                    int64_t i, double value) {
    int64_t rank = i;
    for (int r = 0; r < a.shards; r++)
        if (r != shard) rank += xdi_cuda_tail_before(tails + r * stride, a.k, value, r < shard);
    return rank;
}

/* The sums are of |x - y|, and what that of the derivatives changes by. */
template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_SELECT_TEAM)
    xdi_cuda_gold_merge_kernel(const __grid_constant__ xd_xtoken_gold_args a) {
    const int64_t chunk = (int64_t)blockIdx.x, width = XD_XTOKEN_GOLD_WORDS + a.k, stride = a.count * width;
    const double *words = a.all + chunk * width, *tails = words + XD_XTOKEN_GOLD_WORDS, *others = a.other_tail + chunk * a.k;
    const int64_t *found = a.found + chunk * a.k;
    float *u = a.u + chunk * a.student.columns;
    xdi_cuda_sums<XDI_CUDA_GOLD_SUMS, FIXED> mine;
    for (int shard = 0; shard < a.shards; shard++)
        for (int64_t i = (int64_t)threadIdx.x; i < a.k; i += XDI_CUDA_SELECT_TEAM) {
            const double value = tails[shard * stride + i];
            const int64_t rank = xdi_cuda_gold_rank(a, tails, stride, shard, i, value);
            if (isnan(value)) mine.add_wide(0, value);
            if (rank >= a.k) continue;
            const double y = others[rank];
            mine.add_wide(0, fabs(__dsub_rn(value, y)));
            if (shard != a.shard || found[i] < 0) continue;
            const float slope = xd_xtoken_tail_slope(value, y), before = u[found[i]];
            u[found[i]] = slope;
            mine.add_wide(XDI_CUDA_GOLD_SLOPES, (double)slope);
            if (before != 0.0f) mine.add_wide(XDI_CUDA_GOLD_SLOPES, -(double)before); /* the id also has a partner */
        }
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_SELECT_TEAM>(mine);
    if (threadIdx.x != 0) return;
    a.merged[2 * chunk] = xdi_cuda_gold_value(totals, 0);
    a.merged[2 * chunk + 1] = xdi_cuda_gold_agree(a, words, stride) ? 1.0 : 0.0;
    xdi_cuda_gold_add(a.sums, chunk * XDI_CUDA_GOLD_SUMS + XDI_CUDA_GOLD_SLOPES, totals, XDI_CUDA_GOLD_SLOPES);
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
    const int64_t place = a.student.places[i], cell = place * XDI_CUDA_GOLD_SUMS;
    const double kl = xdi_cuda_cell_value(a.fixed, a.sums, cell + XDI_CUDA_GOLD_KL);
    const double sum = a.write ? xdi_cuda_cell_value(a.fixed, a.sums, cell + XDI_CUDA_GOLD_SLOPES) : 0.0;
    xd_xtoken_close_args one = {};
    one.merged = a.merged + 2 * place;
    one.chunk = a.chunks + place;
    a.delta[i] = __dmul_rn(sum, __ddiv_rn(one.chunk->factor, a.student.temperature));
    if (i == a.student.begin[place] - a.student.begin[0]) xd_xtoken_close_chunk(&one, kl, sum);
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

template <bool FIXED> static xd_result xdi_cuda_gold_tile_load_cells(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_pairs_kernel<FIXED>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_keys_kernel<FIXED>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_spell_kernel<FIXED>));
    return xdi_cuda_load(ctx, xdi_cuda_gold_merge_kernel<FIXED>);
}

static xd_result xdi_cuda_gold_tile_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_partners_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_lse_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_lse_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_close_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_tails_kernel<0>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_tails_kernel<1>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gold_tails_kernel<XDI_CUDA_SELECT_EACH>));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(xdi_cuda_gold_tails_kernel<XDI_CUDA_SELECT_EACH>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, XDI_CUDA_SELECT_BYTES));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(xdi_cuda_gold_tails_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           XDI_CUDA_GOLD_SHORT_BYTES));
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
