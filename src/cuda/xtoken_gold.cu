/* Losses over common and uncommon ids of two tokenizers: kernel/cpu/xtoken_gold.c is the reference. What needs no
 * exponential has its bits. Where a sum is split over many blocks, these write partial sums to the caller's scratch and one
 * block adds them in order, so that the result does not depend on the GPU. */

/* Blocks of a sum over a list, and the number of rows whose log-sum-exps the scratch holds at once. */
enum { XDI_CUDA_GOLD_BLOCKS = 128, XDI_CUDA_GOLD_ROWS = 8192 };

/* ---- log_probs: one block per row for its log-sum-exp, one read; then one thread per column, one read and one write ---- */

/* By the whole block; NaN for a row that is not finite. */
template <typename T> static __device__ inline double xdi_cuda_row_lse(const xd_xtoken_rows &x, int64_t r) {
    const T *row = xdi_cuda_row<T>(x.logits, r);
    const float factor = xdi_cuda_factor(XDI_CUDA_LOG2E / x.temperature);
    xdi_cuda_softmax_seen seen(factor);
    float max;
    const double sum = xdi_cuda_softmax_sum<XDI_CUDA_TEAM_BLOCK>(row, x.columns, &seen, &max);
    if (!(max > -INFINITY && max < INFINITY)) return (double)NAN;
    return (double)max / x.temperature + log(sum);
}

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_lse_kernel(const __grid_constant__ xd_xtoken_log_probs_args a) {
    const double lse = xdi_cuda_row_lse<T>(a.x, a.x.rows[blockIdx.x]);
    if (threadIdx.x == 0) reinterpret_cast<double *>(a.scratch)[blockIdx.x] = lse;
}

/* `lse` holds those of these rows in their order; NULL: a.x.lse has them. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_log_probs_kernel(const __grid_constant__ xd_xtoken_log_probs_args a, const double *lse, bool first) {
    const int64_t v = xdi_cuda_flat_index();
    if (v >= a.x.columns) return;
    if (first) {
        if (FIXED)
            xdi_cuda_fixed_put(reinterpret_cast<xd_fixed *>(a.cells) + v, xd_fixed());
        else
            a.cells[v] = 0.0;
    }
    for (int64_t i = 0; i < a.x.count; i++) {
        const int64_t row = a.x.rows[i];
        const double z = (double)xdi_cuda_element(a.x.logits, row, v), log_sum = lse ? lse[i] : a.x.lse[row];
        xdi_cuda_cell_add<FIXED>(a.cells, v, xd_xtoken_log_prob(z, a.x.temperature, log_sum, a.scale));
    }
}

static xd_result xdi_cuda_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_grid grid = xdi_cuda_flat_grid(a->x.columns);
    int64_t first = 0;
    do {
        xd_xtoken_log_probs_args part = *a;
        part.x.rows = a->x.rows + first;
        if (!a->x.lse && a->x.count - first > XDI_CUDA_GOLD_ROWS)
            part.x.count = XDI_CUDA_GOLD_ROWS;
        else
            part.x.count = a->x.count - first;
        const double *lse = a->x.lse ? NULL : reinterpret_cast<const double *>(a->scratch);
        XDI_CUDA_LOGITS(a->x.logits.dtype, T, {
            if (lse && part.x.count > 0)
                XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(part.x.count, XDI_CUDA_TEAM_BLOCK),
                                        xdi_cuda_xtoken_lse_kernel<T>, part));
        })
        XDI_CUDA_CELLS(a->fixed, FIXED, {
            XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_xtoken_log_probs_kernel<FIXED>, part, lse,
                                    first == 0));
        })
        first += part.x.count;
    } while (first < a->x.count);
    return XD_OK;
}

/* ---- pair and total: a partial result for each block, then one block over these ---- */

/* The partial results in the scratch. */
template <bool FIXED> struct xdi_cuda_gold_parts {
    xdi_cuda_top *best, *other; /* [XDI_CUDA_GOLD_BLOCKS] at: the pair's index */
    typename xdi_cuda_sums<1, FIXED>::totals *sum;

    __device__ explicit xdi_cuda_gold_parts(float *scratch) {
        best = reinterpret_cast<xdi_cuda_top *>(scratch);
        other = best + XDI_CUDA_GOLD_BLOCKS;
        sum = reinterpret_cast<typename xdi_cuda_sums<1, FIXED>::totals *>(other + XDI_CUDA_GOLD_BLOCKS);
    }
};

/* A NaN counts as -infinity here; whether the first pair is a NaN is checked again at the end. */
static __device__ inline xdi_cuda_top xdi_cuda_top_of(double value, int64_t at) {
    const xdi_cuda_top top = { isnan(value) ? -(double)INFINITY : value, at };
    return top;
}

template <bool FIXED>
static __device__ inline void xdi_cuda_gold_put(float *scratch, const xdi_cuda_sums<1, FIXED> &mine,
                                                xdi_cuda_top best, xdi_cuda_top other) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    best = xdi_cuda_block_reduce(best, none, xdi_cuda_top_join());
    other = xdi_cuda_block_reduce(other, none, xdi_cuda_top_join());
    if (threadIdx.x != 0) return;
    const xdi_cuda_gold_parts<FIXED> parts(scratch);
    parts.sum[blockIdx.x] = totals;
    parts.best[blockIdx.x] = best;
    parts.other[blockIdx.x] = other;
}

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_pair_kernel(const __grid_constant__ xd_xtoken_pair_args a) {
    xdi_cuda_top best = { -(double)INFINITY, INT64_MAX }, other = best;
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t i = xdi_cuda_flat_index(); i < a.pairs; i += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK) {
        const int64_t v = a.pair[i] - a.first;
        const double beta = a.others[a.other[i]];
        other = xdi_cuda_top_join()(other, xdi_cuda_top_of(beta, i));
        if (v < 0 || v >= a.columns) continue;
        const double alpha = a.means[v];
        double term;
        best = xdi_cuda_top_join()(best, xdi_cuda_top_of(alpha, i));
        if (xd_xtoken_pair_term(alpha, beta, a.reverse, &term, &a.slope[v])) mine.add_wide(0, term);
    }
    xdi_cuda_gold_put<FIXED>(a.scratch, mine, best, other);
}

template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_total_kernel(const __grid_constant__ xd_xtoken_total_args a) {
    const xdi_cuda_top none = { -(double)INFINITY, INT64_MAX };
    xdi_cuda_sums<1, FIXED> mine;
    for (int64_t v = xdi_cuda_flat_index(); v < a.columns; v += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK)
        mine.add_wide(0, (double)a.u[v]);
    xdi_cuda_gold_put<FIXED>(a.scratch, mine, none, none);
}

/* The pair that reading the list in order would give: a NaN in front is never exceeded. */
static __device__ inline double xdi_cuda_gold_number(xdi_cuda_top top, bool front_is_nan, int64_t front) {
    return front_is_nan ? (double)front : top.at == INT64_MAX ? -1.0 : (double)top.at;
}

/* One block. Adds the sums of `blocks` blocks to cell 0, in their order; with `best` also the most probable pairs. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_finish_kernel(const __grid_constant__ xd_xtoken_pair_args a,
                                                                     int64_t blocks) {
    xdi_cuda_top best = { -(double)INFINITY, INT64_MAX }, other = best;
    const xdi_cuda_top none = best;
    const xdi_cuda_gold_parts<FIXED> parts(a.scratch);
    xdi_cuda_sums<1, FIXED> mine;
    if ((int64_t)threadIdx.x < blocks) {
        mine.whole = parts.sum[threadIdx.x];
        best = parts.best[threadIdx.x];
        other = parts.other[threadIdx.x];
    }
    const auto totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    best = xdi_cuda_block_reduce(best, none, xdi_cuda_top_join());
    other = xdi_cuda_block_reduce(other, none, xdi_cuda_top_join());
    if (threadIdx.x != 0) return;
    xdi_cuda_cell_join(a.cells, 0, totals);
    if (!a.best) return;
    const int64_t front = xdi_cuda_lower_bound(a.pair, a.pairs, a.first);
    const bool mine_is_nan = best.at != INT64_MAX && isnan(a.means[a.pair[front] - a.first]);
    const double number = xdi_cuda_gold_number(best, mine_is_nan, front);
    a.best[XD_XTOKEN_BEST_MEAN] =
        number < 0.0 ? -(double)INFINITY : a.means[a.pair[(int64_t)number] - a.first];
    a.best[XD_XTOKEN_BEST_PAIR] = number;
    a.best[XD_XTOKEN_BEST_OTHER] = xdi_cuda_gold_number(other, a.pairs > 0 && isnan(a.others[a.other[0]]), 0);
}

/* Blocks for a list; the scratch has room for their partial results. */
static int64_t xdi_cuda_gold_blocks(int64_t count) {
    static_assert(XDI_CUDA_GOLD_BLOCKS *
                          (2 * sizeof(xdi_cuda_top) + sizeof(xdi_cuda_sums<1, true>::totals)) <=
                      XD_XTOKEN_SCRATCH * sizeof(float),
                  "parts fit");
    static_assert(XDI_CUDA_GOLD_ROWS * sizeof(double) <= XD_XTOKEN_SCRATCH * sizeof(float), "rows fit");
    const int64_t blocks = (count + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK;
    return blocks < 1 ? 1 : blocks < XDI_CUDA_GOLD_BLOCKS ? blocks : (int64_t)XDI_CUDA_GOLD_BLOCKS;
}

static xd_result xdi_cuda_xtoken_pair(const xd_launch *launch, const xd_xtoken_pair_args *a) {
    const int64_t blocks = xdi_cuda_gold_blocks(a->pairs);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK);
    const xdi_cuda_grid one = xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->columns > 0) XD_TRY(xdi_cuda_fill(launch, a->slope, 0, (size_t)a->columns * sizeof *a->slope));
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_xtoken_pair_kernel<FIXED>, *a));
        return XDI_CUDA_LAUNCH(launch, one, xdi_cuda_xtoken_finish_kernel<FIXED>, *a, blocks);
    })
}

static xd_result xdi_cuda_xtoken_total(const xd_launch *launch, const xd_xtoken_total_args *a) {
    const int64_t blocks = xdi_cuda_gold_blocks(a->columns);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK);
    const xdi_cuda_grid one = xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK);
    xd_xtoken_pair_args sum = {}; /* without pairs */
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    sum.cells = a->cells;
    sum.scratch = a->scratch;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_xtoken_total_kernel<FIXED>, *a));
        return XDI_CUDA_LAUNCH(launch, one, xdi_cuda_xtoken_finish_kernel<FIXED>, sum, blocks);
    })
}

/* ---- tail: the list's keys, then one block of 1024 that selects, sorts and looks up ----
 *
 * A radix select of the k largest keys, then a bitonic network over them in shared memory, as 64-bit words of key and index, so
 * that no two are equal; a longer tail is sorted in the output. Only the selected values are exponentiated. */

enum { XDI_CUDA_TAIL_TEAM = 1024, XDI_CUDA_TAIL_SHARED = 8192 };

static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_keys_kernel(const __grid_constant__ xd_xtoken_tail t) {
    const int64_t i = xdi_cuda_flat_index(), first = xdi_cuda_lower_bound(t.ids, t.count, t.begin);
    if (first + i >= t.count || t.ids[first + i] >= t.end) return;
    t.scratch[i] = (float)t.means[t.ids[first + i] - t.begin];
}

/* Ascending words are descending values, the lowest index first among equals. */
static __device__ inline void xdi_cuda_tail_sort(uint64_t *words, int64_t n) {
    __syncthreads();
    xdi_cuda_bitonic<XDI_CUDA_TAIL_TEAM>(n, [=](int64_t low, int64_t high) {
        const uint64_t x = words[low], y = words[high];
        if (x <= y) return;
        words[low] = y;
        words[high] = x;
    });
}

static __global__ void __launch_bounds__(XDI_CUDA_TAIL_TEAM)
    xdi_cuda_xtoken_tail_kernel(const __grid_constant__ xd_xtoken_tail t) {
    XD_DYN_SHARED(uint64_t, shared);
    const int64_t first = xdi_cuda_lower_bound(t.ids, t.count, t.begin);
    const int64_t columns = xdi_cuda_lower_bound(t.ids, t.count, t.end) - first;
    const int64_t n = t.k < columns ? t.k : columns;
    uint64_t *words =
        t.k <= XDI_CUDA_TAIL_SHARED ? shared : reinterpret_cast<uint64_t *>(static_cast<void *>(t.found));
    if (n > 0) {
        int64_t need = n;
        const uint32_t threshold = xdi_cuda_select_threshold<XDI_CUDA_TAIL_TEAM, 11>(t.scratch, columns, &need);
        xdi_cuda_select_collect<XDI_CUDA_TAIL_TEAM>(
            t.scratch, columns, threshold, need, [=](int64_t at, float value, int64_t column) {
                words[at] = (uint64_t)~xdi_cuda_select_key(value) << 32 | (uint64_t)column;
            });
    }
    xdi_cuda_tail_sort(words, n);
    for (int64_t j = (int64_t)threadIdx.x; j < t.k; j += XDI_CUDA_TAIL_TEAM) {
        const int64_t id = j < n ? t.ids[first + (int64_t)(words[j] & 0xffffffffu)] - t.begin : -1;
        t.values[j] = id >= 0 ? exp(t.means[id]) : -1.0;
        t.found[j] = id;
    }
}

static xd_result xdi_cuda_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t) {
    const size_t shared = t->k <= XDI_CUDA_TAIL_SHARED ? (size_t)t->k * sizeof(uint64_t) : 0;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (t->k == 0) return XD_OK;
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(t->count), xdi_cuda_xtoken_keys_kernel, *t));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TAIL_TEAM, shared),
                           xdi_cuda_xtoken_tail_kernel, *t);
}

/* ---- merge: one block; every entry finds its rank among those of all shards ---- */

/* How many of a descending list are larger than value; with `equal` also those that equal it. */
static __device__ inline int64_t xdi_cuda_tail_before(const double *list, int64_t n, double value,
                                                      bool equal) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (list[middle] > value || (equal && list[middle] == value))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The sum is in fixed point: probabilities fit, and it is the same for every split. A NaN has no rank; it makes the sum NaN. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_xtoken_merge_kernel(const __grid_constant__ xd_xtoken_merge m) {
    xdi_cuda_sums<1, true> mine;
    for (int64_t i = (int64_t)threadIdx.x; i < m.shards * m.k; i += XDI_CUDA_TEAM_BLOCK) {
        const int64_t shard = i / m.k, place = i % m.k;
        const double value = m.all[shard * m.stride + XD_XTOKEN_BEST_WORDS + place];
        int64_t rank = place;
        for (int64_t r = 0; r < m.shards; r++)
            if (r != shard)
                rank +=
                    xdi_cuda_tail_before(m.all + r * m.stride + XD_XTOKEN_BEST_WORDS, m.k, value, r < shard);
        if (isnan(value)) mine.add_wide(0, value);
        if (rank >= m.k) continue;
        const double y = m.others[rank];
        mine.add_wide(0, fabs(value - y));
        if (shard == m.shard && m.found[place] >= 0)
            m.slope[m.found[place]] = xd_xtoken_tail_slope(value, y);
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x != 0) return;
    const bool fits = totals.misfits.large + totals.misfits.infinite == 0;
    m.out[0] = fits ? xd_fixed_read(totals.sum[0]) : (double)NAN;
    m.out[1] = xd_xtoken_agree(&m) ? 1.0 : 0.0;
}

static xd_result xdi_cuda_xtoken_merge(const xd_launch *launch, const xd_xtoken_merge *m) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_xtoken_merge_kernel,
                           *m);
}

static xd_result xdi_cuda_gold_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_lse_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_lse_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_log_probs_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_log_probs_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_pair_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_pair_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_total_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_total_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_finish_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_finish_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_keys_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_tail_kernel));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(xdi_cuda_xtoken_tail_kernel,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)(XDI_CUDA_TAIL_SHARED * sizeof(uint64_t))));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_merge_kernel);
}

static void xdi_cuda_gold_fill(xd_xtoken_kernels *kernels) {
    kernels->log_probs = xdi_cuda_xtoken_log_probs;
    kernels->pair = xdi_cuda_xtoken_pair;
    kernels->tail = xdi_cuda_xtoken_tail;
    kernels->merge = xdi_cuda_xtoken_merge;
    kernels->total = xdi_cuda_xtoken_total;
}
