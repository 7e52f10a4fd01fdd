/* Projected losses: the teacher's sums of a tile's chunks, and divergences. kernel/cpu/xtoken.c is the reference. */

/* ---- target: one block per chunk, its rows in order; the chosen logits of a row are gathered once ---- */

/* A block, and what of its lists stays on the chip. */
enum { XDI_CUDA_LISTS_TEAM = 1024, XDI_CUDA_LISTS_AHEAD = 4, XDI_CUDA_BOTH_AHEAD = 3, XDI_CUDA_LISTS_KEPT = 8 * XDI_CUDA_LISTS_TEAM };

static int64_t xdi_cuda_lists_kept(int64_t k) {
    return k < XDI_CUDA_LISTS_KEPT ? k : (int64_t)XDI_CUDA_LISTS_KEPT;
}

/* A row's chosen logits, of which the first stay on the chip. A thread reads only what it has written. */
struct xdi_cuda_target_row {
    const xd_xtoken_target_args &a;
    int64_t row;
    float *kept;

    __device__ float again(int64_t j) const {
        return j < XDI_CUDA_LISTS_KEPT ? kept[j] : xdi_cuda_element(a.x.logits, row, a.ids[j]);
    }
    /* On every thread of the block; NaN for a row that is not finite. */
    __device__ double log_sum_exp(float factor) const {
        const bool wide = a.x.logits.dtype == XD_DTYPE_F32;
        const void *from = xdi_cuda_row_of(a.x.logits, row);
        const int finite = a.x.finite ? (int)a.x.finite[row] : 1;
        float max = -INFINITY;
        double sum = 0.0;
        xdi_cuda_each_ahead<XDI_CUDA_LISTS_TEAM, XDI_CUDA_LISTS_AHEAD>(
            a.k, [&](int64_t j) { return a.ids[j]; }, [&](int64_t id) { return xdi_cuda_ask(from, wide, id); },
            [&](int64_t j, uint32_t asked) {
                const float z = xdi_cuda_asked(asked, wide);
                max = fmaxf(max, z);
                if (j < XDI_CUDA_LISTS_KEPT) kept[j] = z;
            });
        max = xdi_cuda_block_reduce(max, -INFINITY, xdi_cuda_larger());
        for (int64_t j = (int64_t)threadIdx.x; j < a.k; j += XDI_CUDA_LISTS_TEAM)
            sum = __dadd_rn(sum, (double)xdi_cuda_exp_of(__fsub_rn(again(j), max), factor));
        sum = xdi_cuda_block_sum(sum);
        return !finite ? (double)NAN : (double)max / a.x.temperature + log(sum);
    }
};

/* Adds to a thread's cells of a row, all of which have been asked for before the first is written. */
static __device__ inline void xdi_cuda_target_add(const xdi_cuda_target_row &row, double *cells, double inverse, double lse) {
    xdi_cuda_each_ahead<XDI_CUDA_LISTS_TEAM, XDI_CUDA_LISTS_AHEAD>(
        row.a.k, [=](int64_t j) { return cells[j]; }, xdi_cuda_same(), [&](int64_t j, double before) {
            cells[j] = __dadd_rn(before, __dsub_rn(__dmul_rn((double)row.again(j), inverse), lse));
        });
}

static __device__ inline void xdi_cuda_target_put(const xdi_cuda_target_row &row, double *cells, double inverse, double lse) {
    for (int64_t j = (int64_t)threadIdx.x; j < row.a.k; j += XDI_CUDA_LISTS_TEAM)
        xdi_cuda_cell_add<true>(cells, j, __dsub_rn(__dmul_rn((double)row.again(j), inverse), lse));
}

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_LISTS_TEAM)
    xdi_cuda_xtoken_target_kernel(const __grid_constant__ xd_xtoken_target_args a) {
    XD_DYN_SHARED(float, kept);
    const int64_t place = (int64_t)blockIdx.x;
    const xdi_cuda_xtoken_range range(a.x, place);
    const float factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.x.temperature);
    const double inverse = 1.0 / a.x.temperature;
    double *cells = a.cells + place * a.k * (FIXED ? 2 : 1);
    for (int64_t i = range.begin; i < range.end; i++) {
        const xdi_cuda_target_row row = { a, a.x.rows[i], kept };
        const double lse = row.log_sum_exp(factor);
        if (FIXED)
            xdi_cuda_target_put(row, cells, inverse, lse);
        else
            xdi_cuda_target_add(row, cells, inverse, lse);
    }
}

static xd_result xdi_cuda_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a) {
    const size_t bytes = (size_t)xdi_cuda_lists_kept(a->k) * sizeof(float);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    XDI_CUDA_CELLS(a->fixed, FIXED, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_LISTS_TEAM, bytes),
                               xdi_cuda_xtoken_target_kernel<FIXED>, *a);
    })
}

/* ---- divergence: one block per chunk; its two lists are read once ---- */

/* What the lists of a chunk have in common. */
struct xdi_cuda_divergence {
    xdi_cuda_top student, teacher;
    double mass;
};

struct xdi_cuda_divergence_join {
    __device__ xdi_cuda_divergence operator()(xdi_cuda_divergence a, const xdi_cuda_divergence &b) const {
        a.student = xdi_cuda_top_join()(a.student, b.student);
        a.teacher = xdi_cuda_top_join()(a.teacher, b.teacher);
        a.mass = a.mass + b.mass;
        return a;
    }
};

/* Of both lists. */
struct alignas(16) xdi_cuda_both {
    double q, a;
};

struct xdi_cuda_both_add {
    __device__ xdi_cuda_both operator()(const xdi_cuda_both &x, const xdi_cuda_both &y) const {
        return { x.q + y.q, x.a + y.a };
    }
};

/* The lists of a chunk, of which the first entries are on the chip once they have been read. A thread reads only what it has
 * written. */
struct xdi_cuda_both_lists {
    double *q, *a;
    xdi_cuda_both *kept;
    int64_t k;

    /* The means of both sides. */
    __device__ xdi_cuda_divergence read(double student, double teacher) const {
        const xdi_cuda_top top = { -(double)INFINITY, INT64_MAX };
        xdi_cuda_divergence mine = { top, top, 0.0 };
        xdi_cuda_each_ahead<XDI_CUDA_LISTS_TEAM, XDI_CUDA_BOTH_AHEAD>(
            k, [&](int64_t j) -> xdi_cuda_both { return { q[j], a[j] }; }, xdi_cuda_same(),
            [&](int64_t j, const xdi_cuda_both &x) {
                const double mean = __dmul_rn(x.q, student), log_mean = __dmul_rn(x.a, teacher);
                const xdi_cuda_divergence one = { { mean, j }, { log_mean, j }, mean };
                put(j, { mean, log_mean });
                mine = xdi_cuda_divergence_join()(mine, one);
            });
        return mine;
    }
    __device__ void put(int64_t j, const xdi_cuda_both &x) const {
        if (j < XDI_CUDA_LISTS_KEPT)
            kept[j] = x;
        else
            q[j] = x.q, a[j] = x.a;
    }
    __device__ xdi_cuda_both at(int64_t j) const {
        if (j < XDI_CUDA_LISTS_KEPT) return kept[j];
        return { q[j], a[j] };
    }
    template <typename Use> __device__ void each(Use use) const {
        XD_UNROLL_N(1)
        for (int64_t j = (int64_t)threadIdx.x; j < k; j += XDI_CUDA_LISTS_TEAM) use(j, at(j));
    }
};

/* xd_xtoken_slope with the inverse of z. sums: the value and sum of slope r. */
static __device__ inline double xdi_cuda_xtoken_slope(double q, double a, double inverse, bool reverse, xdi_cuda_both *sums) {
    const double r = __dmul_rn(q, inverse), shifted = __dadd_rn(r, XD_XTOKEN_EPSILON), s = log(shifted);
    const double target = reverse ? shifted : exp(a);
    const double ds = reverse ? target * (s - a + 1.0) : -target;
    if (reverse || target != 0.0) sums->q += target * (reverse ? s - a : a - s);
    const double slope = reverse ? s - a + 1.0 : ds / shifted;
    sums->a += slope * r;
    return slope;
}

/* ln sum e^a, of which the largest is known. */
static __device__ inline double xdi_cuda_divergence_lse(const xdi_cuda_both_lists &lists, double max) {
    double sum = 0.0;
    lists.each([&](int64_t, const xdi_cuda_both &x) { sum += (double)expf((float)__dsub_rn(x.a, max)); });
    return max + log(xdi_cuda_block_sum(sum));
}

static __global__ void __launch_bounds__(XDI_CUDA_LISTS_TEAM)
    xdi_cuda_xtoken_divergence_kernel(const __grid_constant__ xd_xtoken_divergence_args args) {
    XD_DYN_SHARED(xdi_cuda_both, kept);
    const int64_t k = args.k, start = (int64_t)blockIdx.x * k;
    const xdi_cuda_both_lists lists = { args.student + start, args.teacher + start, kept, k };
    const xdi_cuda_top top = { -(double)INFINITY, INT64_MAX };
    const xdi_cuda_both zero = { 0.0, 0.0 };
    xd_xtoken_chunk *c = args.chunks + blockIdx.x;
    xdi_cuda_both sums = zero;
    double largest = 0.0;
    if (!c->compared) {
        for (int64_t j = (int64_t)threadIdx.x; j < k; j += XDI_CUDA_LISTS_TEAM) lists.q[j] = 0.0;
        return;
    }
    const xdi_cuda_divergence mine = lists.read(1.0 / c->student, 1.0 / c->teacher), none = { top, top, 0.0 };
    const xdi_cuda_divergence all = xdi_cuda_block_reduce(mine, none, xdi_cuda_divergence_join());
    const double lse = args.normalise ? xdi_cuda_divergence_lse(lists, all.teacher.value) : 0.0;
    const double z = all.mass + XD_XTOKEN_EPSILON, inverse = 1.0 / z;
    lists.each([&](int64_t j, const xdi_cuda_both &x) {
        const double slope = xdi_cuda_xtoken_slope(x.q, __dsub_rn(x.a, lse), inverse, args.reverse, &sums);
        lists.put(j, { slope, x.a });
    });
    sums = xdi_cuda_block_reduce(sums, zero, xdi_cuda_both_add());
    const double factor = xd_xtoken_chunk_factor(c, sums.q);
    lists.each([&](int64_t j, const xdi_cuda_both &x) {
        const double dy = xd_xtoken_scaled(__dmul_rn(__dsub_rn(x.q, sums.a), inverse), factor);
        lists.q[j] = dy;
        if (fabs(dy) > largest) largest = fabs(dy);
    });
    largest = xdi_cuda_block_reduce(largest, 0.0, xdi_cuda_larger());
    if (threadIdx.x != 0) return;
    c->value = sums.q;
    c->agree = all.student.at == all.teacher.at;
    c->largest = largest;
    c->delta = xd_xtoken_slope_delta(sums.a, z) * factor * c->student;
}

static xd_result xdi_cuda_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a) {
    const size_t bytes = (size_t)xdi_cuda_lists_kept(a->k) * sizeof(xdi_cuda_both);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->place_count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->place_count, XDI_CUDA_LISTS_TEAM, bytes),
                           xdi_cuda_xtoken_divergence_kernel, *a);
}

static xd_result xdi_cuda_divergence_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_target_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_target_kernel<false>));
    XDI_CUDA_TRY(ctx, cudaFuncSetAttribute(xdi_cuda_xtoken_divergence_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)(XDI_CUDA_LISTS_KEPT * sizeof(xdi_cuda_both))));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_divergence_kernel);
}

static void xdi_cuda_divergence_fill(xd_xtoken_kernels *kernels) {
    kernels->target = xdi_cuda_xtoken_target;
    kernels->divergence = xdi_cuda_xtoken_divergence;
}
