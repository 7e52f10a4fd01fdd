/* Log-softmax of rows whose vocabulary is split, and columns picked from them: kernel/cpu/softmax.c is the reference.
 * Terms are f32, sums and values per row double. */

/* ---- stats: grid (rows / teams), block 256; one read of the rows ---- */

/* What a thread has seen of a row. Terms are e^((x - base) / tau), where base is an element that the largest one exceeds by at most
 * a factor of 2^16 of the powers: so a sum keeps its digits, and is seldom scaled. NaN gets into the sum alone. */
struct xdi_cuda_softmax_seen {
    enum { OCTAVES = 16 };
    float factor, largest = -INFINITY, base = 0.0f;
    int64_t column = 0; /* of the first eight that have the largest */
    double sum = 0.0;

    explicit __device__ xdi_cuda_softmax_seen(float per_octave) : factor(per_octave) {}

    __device__ bool is_far(float larger) const {
        return larger > largest && (largest == -INFINITY || __fmul_rn(__fsub_rn(larger, base), factor) > (float)OCTAVES);
    }
    /* The sum by terms of another base. */
    __device__ double sum_from(float other) const {
        return largest == -INFINITY ? sum : __dmul_rn(sum, exp2(__dmul_rn((double)base - (double)other, (double)factor)));
    }
    template <typename T> __device__ void see(const xdi_cuda_raw<T> &raw, int64_t c) {
        const float larger = xdi_cuda_largest_of(raw);
        if (is_far(larger)) {
            sum = sum_from(larger);
            base = larger;
        }
        if (larger > largest) column = c;
        largest = fmaxf(largest, larger);
        const xdi_cuda_eight x = raw.widened();
        xdi_cuda_eight terms;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) terms.at[i] = xdi_cuda_exp_of(__fsub_rn(x.at[i], base), factor);
        sum = __dadd_rn(sum, (double)xdi_cuda_sum_of(terms));
    }
};

/* The largest element of a row, and the sum of e^((x - max) / tau), NaN when the row has one; on all threads of the team. */
template <int TEAM, typename T>
static __device__ inline double xdi_cuda_softmax_sum(const T *row, int64_t columns, xdi_cuda_softmax_seen *seen, float *max) {
    xdi_cuda_stream_eights<TEAM>(row, columns, [&](const xdi_cuda_raw<T> &raw, int64_t c) { seen->see(raw, c); });
    *max = xdi_cuda_team_reduce<TEAM>(seen->largest, -INFINITY, xdi_cuda_larger_float<false>());
    return xdi_cuda_team_reduce<TEAM>(seen->sum_from(*max), 0.0, xdi_cuda_add());
}

/* The first of eight columns that has an element. */
template <typename T>
static __device__ inline int64_t xdi_cuda_softmax_first(const T *row, int64_t columns, int64_t column, float element) {
    xdi_cuda_raw<T> raw;
    if (xdi_cuda_is_aligned16(row + column) && column + XDI_CUDA_EIGHT <= columns)
        raw.load(row + column); /* one wait, for which the whole block waits */
    else
        raw = xdi_cuda_raw_of(row, column, columns);
    const xdi_cuda_eight x = raw.widened();
    int first = 0;
    XD_UNROLL
    for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
        if (x.at[i] == element) first = i;
    return column + first;
}

/* The same sum, and the first column that has the largest element; INT64_MAX where nothing is above -infinity. */
struct xdi_cuda_softmax_whole {
    double sum;
    int64_t arg;
};

struct xdi_cuda_softmax_join {
    __device__ xdi_cuda_softmax_whole operator()(const xdi_cuda_softmax_whole &a, const xdi_cuda_softmax_whole &b) const {
        return { a.sum + b.sum, a.arg < b.arg ? a.arg : b.arg };
    }
};

template <int TEAM, typename T>
static __device__ inline xdi_cuda_softmax_whole xdi_cuda_softmax_whole_of(const T *row, int64_t columns, xdi_cuda_softmax_seen *seen,
                                                                          float *max) {
    xdi_cuda_stream_eights<TEAM>(row, columns, [&](const xdi_cuda_raw<T> &raw, int64_t c) { seen->see(raw, c); });
    *max = xdi_cuda_team_reduce<TEAM>(seen->largest, -INFINITY, xdi_cuda_larger_float<false>());
    const bool has = *max > -INFINITY && seen->largest == *max;
    const int64_t arg = has ? xdi_cuda_softmax_first(row, columns, seen->column, *max) : (int64_t)INT64_MAX;
    const xdi_cuda_softmax_whole mine = { seen->sum_from(*max), arg }, none = { 0.0, INT64_MAX };
    return xdi_cuda_team_reduce<TEAM>(mine, none, xdi_cuda_softmax_join());
}

template <int TEAM, typename T>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_stats_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>(), columns = a.vocab.end - a.vocab.begin;
    if (r >= a.logits.rows) return;
    const T *row = xdi_cuda_row<T>(a.logits, r);
    xdi_cuda_softmax_seen seen(xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature));
    float max;
    const xdi_cuda_softmax_whole whole = xdi_cuda_softmax_whole_of<TEAM>(row, columns, &seen, &max);
    const double sum = whole.sum;
    int64_t arg = whole.arg;
    if (arg == INT64_MAX) arg = columns > 0 ? 0 : -1 - a.vocab.begin; /* nothing above -infinity */
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    const bool broken = !(max < INFINITY) || !(sum < (double)INFINITY);
    double *part = a.parts + r * XD_SOFTMAX_PARTS;
    part[XD_SOFTMAX_MAX] = broken ? (double)NAN : (double)max;
    part[XD_SOFTMAX_ARG] = (double)(arg + a.vocab.begin);
    part[XD_SOFTMAX_SUM] = broken || max == -INFINITY ? 0.0 : sum;
}

static xd_result xdi_cuda_softmax_stats(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T, {
        XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                                   (xdi_cuda_softmax_stats_kernel<TEAM, T>), *a);
        })
    })
}

/* ---- merge: one thread a row ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_merge_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_flat_index();
    double whole[XD_SOFTMAX_PARTS];
    if (r >= a.logits.rows) return;
    xd_softmax_join(&a, r, whole);
    if (a.log_sum_exp) a.log_sum_exp[r] = xd_softmax_log_sum_exp(whole, a.temperature);
    if (a.argmax) a.argmax[r] = (int64_t)whole[XD_SOFTMAX_ARG];
}

static xd_result xdi_cuda_softmax_merge(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows), xdi_cuda_softmax_merge_kernel, *a);
}

/* ---- write: grid (rows / teams), block 256; one read, one write ---- */

/* What is written of a row. */
enum xdi_cuda_softmax_form {
    XDI_CUDA_SOFTMAX_LOGS,     /* logits / tau - log_sum_exp */
    XDI_CUDA_SOFTMAX_BACKWARD, /* (weights - p * their sum) / tau */
    XDI_CUDA_SOFTMAX_TARGET    /* (one at the id - p) weight / tau */
};

/* One row of a write. The logarithm is taken in double: its whole part would cost the f32 form its digits. */
struct xdi_cuda_softmax_line {
    double per_tau, log_sum_exp;
    float scale;    /* of p */
    float at_id;    /* TARGET: what is added at the id */
    int64_t id;     /* TARGET: this shard's column; -1 elsewhere */
    float weighing; /* BACKWARD: 1 / tau */
};

template <int FORM>
static __device__ inline float xdi_cuda_softmax_value(const xdi_cuda_softmax_line &w, float x, float weight,
                                                      int64_t column) {
    const float log_p = (float)__dsub_rn(__dmul_rn((double)x, w.per_tau), w.log_sum_exp);
    if (FORM == XDI_CUDA_SOFTMAX_LOGS) return log_p;
    const float p = expf(log_p);
    if (FORM == XDI_CUDA_SOFTMAX_BACKWARD) return __fmaf_rn(-p, w.scale, __fmul_rn(weight, w.weighing));
    return column == w.id ? __fmaf_rn(-p, w.scale, w.at_id) : __fmul_rn(-p, w.scale);
}

template <int FORM>
static __device__ inline xdi_cuda_softmax_line xdi_cuda_softmax_line_of(const xd_softmax_args &a, int64_t r,
                                                                        bool *counts) {
    xdi_cuda_softmax_line w = {};
    w.per_tau = 1.0 / a.temperature;
    w.log_sum_exp = a.log_sum_exp[r];
    w.weighing = (float)w.per_tau;
    *counts = true;
    if (FORM == XDI_CUDA_SOFTMAX_BACKWARD) {
        double sum = 0.0;
        for (int i = 0; i < a.vocab.shards; i++) sum += a.all[i * a.all_stride + r];
        w.scale = (float)(sum / a.temperature);
    }
    if (FORM == XDI_CUDA_SOFTMAX_TARGET) {
        const int64_t id = xd_id_at(a.ids, r);
        *counts = a.weight[r] != 0.0f && id >= 0 && id < a.vocab.size;
        w.scale = w.at_id = (float)((double)a.weight[r] / a.temperature);
        w.id = id - a.vocab.begin;
    }
    return w;
}

template <int FORM, int TEAM>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_write_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    bool counts;
    const xdi_cuda_softmax_line w = xdi_cuda_softmax_line_of<FORM>(a, r, &counts);
    const int64_t columns = counts ? a.vocab.end - a.vocab.begin : 0;
    const int64_t width =
        FORM == XDI_CUDA_SOFTMAX_LOGS ? columns : a.out.cols; /* gradients have zeros behind */
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < width; c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight out = {}, weight = {};
        if (c < columns) {
            const xdi_cuda_eight x = xdi_cuda_read_any(a.logits, r, c, columns);
            if (FORM == XDI_CUDA_SOFTMAX_BACKWARD) weight = xdi_cuda_read_any(a.weights, r, c, columns);
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                if (c + i < columns)
                    out.at[i] = xdi_cuda_softmax_value<FORM>(w, x.at[i], weight.at[i], c + i);
        }
        xdi_cuda_write_any(a.out, r, c, width, out);
    }
}

template <int FORM>
static xd_result xdi_cuda_softmax_write_form(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                               (xdi_cuda_softmax_write_kernel<FORM, TEAM>), *a);
    })
}

/* ---- row_sums: grid (rows / teams), block 256 ---- */

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_row_sums_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>(), columns = a.vocab.end - a.vocab.begin;
    if (r >= a.weights.rows) return;
    xdi_cuda_sums<1, false> mine;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.weights, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) mine.add_wide(0, (double)x.at[i]);
    }
    const xdi_cuda_sums<1, false>::totals totals = xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() == 0) a.parts[r] = totals.sum[0];
}

static xd_result xdi_cuda_softmax_row_sums(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->weights.rows, TEAM),
                               xdi_cuda_softmax_row_sums_kernel<TEAM>, *a);
    })
}

/* ---- pick and take: one thread an id ---- */

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_pick_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t at = xdi_cuda_flat_index();
    if (at >= a.logits.rows * a.ids_count) return;
    const int64_t r = at / a.ids_count, id = xd_id_at(a.ids, r * a.ids_stride + at % a.ids_count);
    const bool owned = id >= a.vocab.begin && id < a.vocab.end;
    const bool bad = owned && a.finite && !a.finite[r];
    const double value = owned ? (double)xdi_cuda_element(a.logits, r, id - a.vocab.begin) : 0.0;
    a.parts[at] = bad ? (double)NAN : value;
}

static xd_result xdi_cuda_softmax_pick(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows * a->ids_count),
                           xdi_cuda_softmax_pick_kernel, *a);
}

static __global__ void XDI_CUDA_KERNEL
xdi_cuda_softmax_take_kernel(const __grid_constant__ xd_softmax_args a) {
    const int64_t at = xdi_cuda_flat_index();
    if (at >= a.logits.rows * a.ids_count) return;
    const int64_t r = at / a.ids_count, id = xd_id_at(a.ids, r * a.ids_stride + at % a.ids_count);
    double value = (double)NAN;
    if (id >= 0 && id < a.vocab.size) {
        int owner = 0;
        while (id >= a.vocab.offsets[owner + 1]) owner++;
        value = a.all[owner * a.all_stride + at];
        if (a.log_sum_exp) value = value / a.temperature - a.log_sum_exp[r];
    }
    if (a.values_dtype == XD_DTYPE_F32)
        static_cast<float *>(a.values)[at] = (float)value;
    else
        static_cast<double *>(a.values)[at] = value;
}

static xd_result xdi_cuda_softmax_take(const xd_launch *launch, const xd_softmax_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->logits.rows * a->ids_count),
                           xdi_cuda_softmax_take_kernel, *a);
}

/* ---- hits: one thread a row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_softmax_hits_kernel(const int64_t *argmax,
                                                                    xd_ids labels,
                                                                    const uint8_t *mask, int64_t rows,
                                                                    uint8_t *hits) {
    const int64_t r = xdi_cuda_flat_index();
    if (r < rows) hits[r] = argmax[r] == xd_id_at(labels, r) && (!mask || mask[r]);
}

static xd_result xdi_cuda_softmax_hits(const xd_launch *launch, const int64_t *argmax, xd_ids labels,
                                       const uint8_t *mask, int64_t rows, uint8_t *hits) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(rows), xdi_cuda_softmax_hits_kernel, argmax, labels,
                           mask, rows, hits);
}

/* ---- table ---- */

template <int TEAM> static xd_result xdi_cuda_softmax_load_team(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_stats_kernel<TEAM, float>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_stats_kernel<TEAM, xdi_cuda_bf16>)));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_row_sums_kernel<TEAM>));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_write_kernel<XDI_CUDA_SOFTMAX_LOGS, TEAM>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_softmax_write_kernel<XDI_CUDA_SOFTMAX_BACKWARD, TEAM>)));
    return xdi_cuda_load(ctx, xdi_cuda_softmax_write_kernel<XDI_CUDA_SOFTMAX_TARGET, TEAM>);
}

static xd_result xdi_cuda_softmax_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_merge_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_pick_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_take_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_softmax_hits_kernel));
    XD_TRY(xdi_cuda_softmax_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_softmax_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_softmax_kernels xdi_cuda_softmax_table() {
    xd_softmax_kernels kernels = {};
    kernels.stats = xdi_cuda_softmax_stats;
    kernels.merge = xdi_cuda_softmax_merge;
    kernels.write = xdi_cuda_softmax_write_form<XDI_CUDA_SOFTMAX_LOGS>;
    kernels.row_sums = xdi_cuda_softmax_row_sums;
    kernels.write_backward = xdi_cuda_softmax_write_form<XDI_CUDA_SOFTMAX_BACKWARD>;
    kernels.pick = xdi_cuda_softmax_pick;
    kernels.take = xdi_cuda_softmax_take;
    kernels.write_target_backward = xdi_cuda_softmax_write_form<XDI_CUDA_SOFTMAX_TARGET>;
    kernels.hits = xdi_cuda_softmax_hits;
    return kernels;
}
