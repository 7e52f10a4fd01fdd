/* Universal logit distillation: kernel/cpu/uld.c is the reference. Exponentials are f32, and everything computed from them is
 * double. Sums are split over blocks, which write partial sums to the scratch; one block adds these in order. */

enum { XDI_CUDA_ULD_DIGITS = 256, XDI_CUDA_ULD_PASSES = 4 };

/* scale times the probabilities of a row. */
struct xdi_cuda_uld_power {
    float max, factor;
    double scale;

    __device__ xdi_cuda_uld_power(const xd_uld_rows &side, int64_t row, double times) {
        const double *part = side.parts + row * XD_SOFTMAX_PARTS;
        max = (float)part[XD_SOFTMAX_MAX];
        factor = xdi_cuda_factor(XDI_CUDA_LOG2E / side.temperature);
        scale = times / part[XD_SOFTMAX_SUM];
    }
    __device__ double operator()(float logit) const {
        return __dmul_rn(scale, (double)xdi_cuda_exp_of(__fsub_rn(logit, max), factor));
    }
};

static int64_t xdi_cuda_uld_segments(int64_t count) {
    return (count + XD_ULD_SEGMENT - 1) / XD_ULD_SEGMENT;
}

/* ---- merge: one thread per chunk ---- */

static __device__ inline void xdi_cuda_uld_merge_side(const xd_uld_rows &side, int which,
                                                      xd_uld_chunk *chunk) {
    double factor = 1.0;
    for (int64_t row = chunk->begin[which]; row < chunk->end[which]; row++) {
        const double max = side.parts[row * XD_SOFTMAX_PARTS + XD_SOFTMAX_MAX];
        if (!isfinite(max)) {
            chunk->finite = false;
            return;
        }
        if (row == chunk->base[which]) continue;
        const double p =
            xdi_cuda_uld_power(side, row, 1.0)(xdi_cuda_element(side.logits, row, side.ids[row]));
        side.scores[row] = p;
        factor *= xd_uld_floored(p);
    }
    chunk->factor[which] = factor;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_uld_merge_kernel(const __grid_constant__ xd_uld_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    a.chunks[i].finite = true;
    for (int which = 0; which < XD_ULD_SIDES; which++)
        xdi_cuda_uld_merge_side(a.side[which], which, &a.chunks[i]);
}

static xd_result xdi_cuda_uld_merge(const xd_launch *launch, const xd_uld_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_uld_merge_kernel, *a);
}

/* ---- sort: a radix sort of four digits; for each digit: a histogram of every segment of a list, the offsets, and the scatter.
 * Reads a list twice per digit and writes it once. ---- */

/* One pass over the lists of a side: from a's logits, or from the previous pass. */
struct xdi_cuda_uld_pass {
    xd_uld_rows side;
    const xd_uld_chunk *chunks;
    int which, shift;
    bool first;
    const uint64_t *from; /* [lists, count] */
    uint64_t *to;
    unsigned *counts; /* [lists, XDI_CUDA_ULD_DIGITS, segments], then offsets */
    int64_t segments;

    __device__ uint64_t record(int64_t list, int64_t j) const {
        if (!first) return from[list * side.count + j];
        const int64_t id = side.list ? (int64_t)side.list[j] : j;
        const uint32_t key =
            ~xdi_cuda_select_key(xdi_cuda_element(side.logits, chunks[list].base[which], id));
        return (uint64_t)key << 32 | (uint64_t)id;
    }
    __device__ int digit(uint64_t record) const {
        return (int)(record >> shift & (XDI_CUDA_ULD_DIGITS - 1));
    }
    __device__ unsigned *cell(int64_t list, int64_t digit, int64_t segment) const {
        return counts + (list * XDI_CUDA_ULD_DIGITS + digit) * segments + segment;
    }
    __device__ int64_t end(int64_t segment) const {
        const int64_t next = (segment + 1) * XD_ULD_SEGMENT;
        return next < side.count ? next : side.count;
    }
};

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_uld_count_kernel(const __grid_constant__ xdi_cuda_uld_pass p) {
    XD_SHARED(unsigned, counts, [XDI_CUDA_ULD_DIGITS]);
    const int64_t list = (int64_t)blockIdx.x / p.segments, segment = (int64_t)blockIdx.x % p.segments;
    if (!p.chunks[list].finite) return; /* the whole block returns */
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t j = segment * XD_ULD_SEGMENT + (int64_t)threadIdx.x; j < p.end(segment);
         j += XDI_CUDA_TEAM_BLOCK)
        atomicAdd(&counts[p.digit(p.record(list, j))], 1u);
    __syncthreads();
    *p.cell(list, (int64_t)threadIdx.x, segment) = counts[threadIdx.x];
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_uld_offset_kernel(const __grid_constant__ xdi_cuda_uld_pass p) {
    const int64_t list = (int64_t)blockIdx.x;
    unsigned mine = 0, total;
    if (!p.chunks[list].finite) return; /* the whole block returns */
    unsigned *cells = p.cell(list, (int64_t)threadIdx.x, 0);
    for (int64_t segment = 0; segment < p.segments; segment++) mine += cells[segment];
    unsigned at = xdi_cuda_select_scan<XDI_CUDA_TEAM_BLOCK>(mine, &total);
    for (int64_t segment = 0; segment < p.segments; segment++) {
        const unsigned here = cells[segment];
        cells[segment] = at;
        at += here;
    }
}

/* A warp takes neighbouring records, 32 at a time, so that records of one digit keep their order. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_uld_scatter_kernel(const __grid_constant__ xdi_cuda_uld_pass p) {
    enum { WARPS = XDI_CUDA_TEAM_BLOCK / XDI_CUDA_WARP, EACH = XD_ULD_SEGMENT / WARPS };
    static_assert((int)XDI_CUDA_TEAM_BLOCK == (int)XDI_CUDA_ULD_DIGITS, "a thread for each digit");
    XD_SHARED(unsigned, next, [WARPS * XDI_CUDA_ULD_DIGITS]);
    const int64_t list = (int64_t)blockIdx.x / p.segments, segment = (int64_t)blockIdx.x % p.segments;
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP, warp = (int)threadIdx.x / XDI_CUDA_WARP;
    const int64_t begin = segment * XD_ULD_SEGMENT + (int64_t)warp * EACH + lane, end = p.end(segment);
    unsigned *mine = next + warp * XDI_CUDA_ULD_DIGITS;
    if (!p.chunks[list].finite) return; /* the whole block returns */
    for (int w = 0; w < WARPS; w++) next[w * XDI_CUDA_ULD_DIGITS + (int)threadIdx.x] = 0;
    __syncthreads();
    for (int k = 0; k < EACH && begin + k < end; k += XDI_CUDA_WARP)
        atomicAdd(&mine[p.digit(p.record(list, begin + k))], 1u);
    __syncthreads();
    unsigned at = *p.cell(list, (int64_t)threadIdx.x, segment);
    for (int w = 0; w < WARPS; w++) {
        unsigned *cell = &next[w * XDI_CUDA_ULD_DIGITS + (int)threadIdx.x];
        const unsigned here = *cell;
        *cell = at;
        at += here;
    }
    __syncthreads();
    for (int k = 0; k < EACH; k += XDI_CUDA_WARP) {
        const bool has = begin + k < end;
        const uint64_t record = has ? p.record(list, begin + k) : 0;
        const int digit = has ? p.digit(record) : (int)XDI_CUDA_ULD_DIGITS;
        const unsigned equals = __match_any_sync(0xffffffffu, (unsigned)digit);
        const unsigned before = (unsigned)__popc(equals & ((1u << lane) - 1u));
        const unsigned to = has ? mine[digit] : 0;
        __syncwarp();
        if (has && before == 0) mine[digit] = to + (unsigned)__popc(equals);
        __syncwarp();
        if (has) p.to[list * p.side.count + to + before] = record;
    }
}

static xd_result xdi_cuda_uld_sort_side(const xd_launch *launch, const xd_uld_args *a, int which) {
    const xd_uld_rows *side = &a->side[which];
    xdi_cuda_uld_pass p;
    if (side->count == 0) return XD_OK;
    p.side = *side;
    p.chunks = a->chunks;
    p.which = which;
    p.counts = reinterpret_cast<unsigned *>(a->scratch);
    p.segments = xdi_cuda_uld_segments(side->count);
    p.from = NULL;
    for (int pass = 0; pass < XDI_CUDA_ULD_PASSES; pass++) {
        p.shift = 32 + 8 * pass;
        p.first = pass == 0;
        p.to = pass % 2 == 0 ? side->spare : side->sorted;
        const xdi_cuda_grid grid = xdi_cuda_grid_of(a->count * p.segments, XDI_CUDA_TEAM_BLOCK);
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_uld_count_kernel, p));
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK),
                                xdi_cuda_uld_offset_kernel, p));
        XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_uld_scatter_kernel, p));
        p.from = p.to;
    }
    return XD_OK;
}

static xd_result xdi_cuda_uld_sort(const xd_launch *launch, const xd_uld_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int which = 0; which < XD_ULD_SIDES; which++) XD_TRY(xdi_cuda_uld_sort_side(launch, a, which));
    return XD_OK;
}

/* ---- compare: one block for each segment of the ranks and of the matched pairs of a chunk ---- */

enum { XDI_CUDA_ULD_UNMATCHED, XDI_CUDA_ULD_MATCHED, XDI_CUDA_ULD_MEAN, XDI_CUDA_ULD_TOTALS };
typedef xdi_cuda_sums<XDI_CUDA_ULD_TOTALS, false> xdi_cuda_uld_sums;

/* What a block uses of its chunk. */
struct xdi_cuda_uld_pair {
    const xd_uld_args &a;
    int64_t index;
    xdi_cuda_uld_power student, teacher;
    float *slope;

    __device__ xdi_cuda_uld_pair(const xd_uld_args &args, int64_t i)
        : a(args), index(i), student(args.side[XD_ULD_STUDENT], args.chunks[i].base[XD_ULD_STUDENT],
                                     args.chunks[i].factor[XD_ULD_STUDENT]),
          teacher(args.side[XD_ULD_TEACHER], args.chunks[i].base[XD_ULD_TEACHER],
                  args.chunks[i].factor[XD_ULD_TEACHER]),
          slope(args.slope ? args.slope + i * args.side[XD_ULD_STUDENT].columns : NULL) {}

    __device__ void rank(int64_t r, xdi_cuda_uld_sums *sums) const {
        const int64_t n = a.side[XD_ULD_STUDENT].count, m = a.side[XD_ULD_TEACHER].count;
        const uint64_t x = r < n ? a.side[XD_ULD_STUDENT].sorted[index * n + r] : 0;
        const uint64_t y = r < m ? a.side[XD_ULD_TEACHER].sorted[index * m + r] : 0;
        const double u = r < n ? student(xd_float_of_key((uint32_t)(x >> 32))) : 0.0;
        const double v = r < m ? teacher(xd_float_of_key((uint32_t)(y >> 32))) : 0.0;
        const bool compared = n > 0 && m > 0;
        const double d = compared ? xd_uld_sign(a.unmatched_weight, u, v) : 0.0;
        if (compared) sums->add_wide(XDI_CUDA_ULD_UNMATCHED, fabs(u - v));
        if (r >= n || !slope) return;
        slope[(uint32_t)x] = (float)d;
        sums->add_wide(XDI_CUDA_ULD_MEAN, d * u);
    }
    __device__ void matched(int64_t i, xdi_cuda_uld_sums *sums) const {
        const xd_uld_chunk &chunk = a.chunks[index];
        const int64_t s = a.matched[XD_ULD_STUDENT][i], t = a.matched[XD_ULD_TEACHER][i];
        const double u =
            student(xdi_cuda_element(a.side[XD_ULD_STUDENT].logits, chunk.base[XD_ULD_STUDENT], s));
        const double v =
            teacher(xdi_cuda_element(a.side[XD_ULD_TEACHER].logits, chunk.base[XD_ULD_TEACHER], t));
        double d;
        sums->add_wide(XDI_CUDA_ULD_MATCHED, xd_jsd_entry(u, v, a.beta, &d));
        if (!slope) return;
        slope[s] = (float)(a.matched_weight * d);
        sums->add_wide(XDI_CUDA_ULD_MEAN, a.matched_weight * d * u);
    }
};

static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_uld_compare_kernel(const __grid_constant__ xd_uld_args a,
                                                                        int64_t ranks, int64_t segments,
                                                                        int64_t parts) {
    const int64_t chunk = (int64_t)blockIdx.x / parts, part = (int64_t)blockIdx.x % parts;
    const bool sorted = part < segments;
    const int64_t begin = (sorted ? part : part - segments) * XD_ULD_SEGMENT + (int64_t)threadIdx.x;
    const int64_t all = sorted ? ranks : a.matched_count, room = begin + XD_ULD_SEGMENT;
    if (!a.chunks[chunk].finite) return; /* the whole block returns */
    const xdi_cuda_uld_pair pair(a, chunk);
    xdi_cuda_uld_sums mine;
    for (int64_t i = begin; i < room && i < all; i += XDI_CUDA_TEAM_BLOCK) {
        if (sorted)
            pair.rank(i, &mine);
        else
            pair.matched(i, &mine);
    }
    const xdi_cuda_uld_sums::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x == 0) reinterpret_cast<xdi_cuda_uld_sums::totals *>(a.scratch)[blockIdx.x] = totals;
}

/* One block per chunk. */
static __global__ void XDI_CUDA_KERNEL xdi_cuda_uld_total_kernel(const __grid_constant__ xd_uld_args a,
                                                                 int64_t parts) {
    const xdi_cuda_uld_sums::totals *from =
        reinterpret_cast<const xdi_cuda_uld_sums::totals *>(a.scratch) + (int64_t)blockIdx.x * parts;
    xd_uld_chunk *chunk = &a.chunks[blockIdx.x];
    xdi_cuda_uld_sums mine;
    if (!chunk->finite) return; /* the whole block returns */
    for (int64_t i = (int64_t)threadIdx.x; i < parts; i += XDI_CUDA_TEAM_BLOCK)
        mine.whole = xdi_cuda_uld_sums::join()(mine.whole, from[i]);
    const xdi_cuda_uld_sums::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    if (threadIdx.x != 0) return;
    chunk->unmatched = totals.sum[XDI_CUDA_ULD_UNMATCHED];
    chunk->matched = totals.sum[XDI_CUDA_ULD_MATCHED];
    chunk->mean = xd_uld_mean(totals.sum[XDI_CUDA_ULD_MEAN], chunk->factor[XD_ULD_STUDENT]);
}

static xd_result xdi_cuda_uld_compare(const xd_launch *launch, const xd_uld_args *a) {
    const int64_t n = a->side[XD_ULD_STUDENT].count, m = a->side[XD_ULD_TEACHER].count, ranks = n > m ? n : m;
    const int64_t segments = xdi_cuda_uld_segments(ranks);
    const int64_t parts = segments + xdi_cuda_uld_segments(a->matched_count);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count * parts, XDI_CUDA_TEAM_BLOCK),
                            xdi_cuda_uld_compare_kernel, *a, ranks, segments, parts));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK), xdi_cuda_uld_total_kernel,
                           *a, parts);
}

/* ---- gradient: one thread per eight columns ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_uld_gradient_kernel(const __grid_constant__ xd_uld_args a, int64_t parts) {
    const xd_uld_rows &side = a.side[XD_ULD_STUDENT];
    const int64_t row = a.row + (int64_t)blockIdx.x / parts, i = (int64_t)a.owner[row] - a.first;
    const int64_t c =
        ((int64_t)blockIdx.x % parts * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x) * XDI_CUDA_EIGHT;
    xdi_cuda_eight out = {};
    if (c >= a.gradient.cols) return;
    if (a.owner[row] >= 0 && a.chunks[i].finite) {
        const xd_uld_chunk &chunk = a.chunks[i];
        const bool base = row == chunk.base[XD_ULD_STUDENT];
        const double mean = base ? chunk.mean : side.scores[row], factor = chunk.factor[XD_ULD_STUDENT];
        const double along = base ? factor : mean > XD_ULD_FLOOR ? factor * chunk.mean / mean : 0.0;
        const xdi_cuda_uld_power p(side, row, a.share * along / side.temperature);
        const float *slope = a.slope + i * side.columns;
        const xdi_cuda_eight x = xdi_cuda_read_any(side.logits, row, c, side.columns);
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_EIGHT; k++) {
            if (c + k >= side.columns) continue;
            const double d = base ? (double)slope[c + k] : c + k == side.ids[row] ? 1.0 : 0.0;
            out.at[k] = (float)(p(x.at[k]) * (d - mean));
        }
    }
    xdi_cuda_write_any(a.gradient, row, c, a.gradient.cols, out);
}

static xd_result xdi_cuda_uld_gradient(const xd_launch *launch, const xd_uld_args *a) {
    enum { COLUMNS = XDI_CUDA_TEAM_BLOCK * XDI_CUDA_EIGHT };
    const int64_t parts = (a->gradient.cols + COLUMNS - 1) / COLUMNS;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->rows * parts, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_uld_gradient_kernel, *a, parts);
}

/* ---- jsd ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_jsd_kernel(const __grid_constant__ xd_jsd_args a) {
    xd_flagged_sum mine = { 0.0, -1 };
    for (int64_t i = xdi_cuda_flat_index(); i < a.student.rows * a.student.cols;
         i += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK) {
        const int64_t r = i / a.student.cols, c = i % a.student.cols;
        double slope;
        mine.value += xd_jsd_entry((double)xdi_cuda_element(a.student, r, c),
                                         (double)xdi_cuda_element(a.teacher, r, c), a.beta, &slope);
        if (a.gradient.data) xdi_cuda_set_element(a.gradient, r, c, (float)(slope / a.denominator));
    }
    xdi_cuda_flagged_put(a.out + 1 + blockIdx.x, mine);
}

static xd_result xdi_cuda_jsd(const xd_launch *launch, const xd_jsd_args *a) {
    const int64_t blocks = xdi_cuda_flagged_blocks(a->student.rows * a->student.cols);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_TEAM_BLOCK), xdi_cuda_jsd_kernel, *a));
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_flagged_kernel, a->out,
                           blocks);
}

static xd_result xdi_cuda_uld_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_merge_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_count_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_offset_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_scatter_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_compare_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_total_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_uld_gradient_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_jsd_kernel);
}

static xd_uld_kernels xdi_cuda_uld_table() {
    xd_uld_kernels kernels = {};
    kernels.merge = xdi_cuda_uld_merge;
    kernels.sort = xdi_cuda_uld_sort;
    kernels.compare = xdi_cuda_uld_compare;
    kernels.gradient = xdi_cuda_uld_gradient;
    kernels.jsd = xdi_cuda_jsd;
    return kernels;
}
