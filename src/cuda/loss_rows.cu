/* Which rows count, what they are multiplied by, and how their losses become one value: kernel/cpu/rows.c is the
 * reference. Sums over rows have one order, whatever the GPU. */

static __device__ inline bool xdi_cuda_rows_counts(const xd_positions &p, int64_t i) {
    if (p.mask && !p.mask[i]) return false;
    return !p.labels.data || xd_id_at(p.labels, i) != (p.has_ignore_index ? p.ignore_index : XD_IGNORE_INDEX);
}

/* ---- denominators ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_rows_count_kernel(const __grid_constant__ xd_positions p, int64_t *part) {
    xdi_cuda_sums<1, true> mine;
    int64_t positions = 0;
    for (int64_t i = (int64_t)threadIdx.x; i < p.count; i += XDI_CUDA_TEAM_BLOCK) {
        if (!xdi_cuda_rows_counts(p, i)) continue;
        positions++;
        const float weight = p.weights ? p.weights[i] : 1.0f;
        mine.add(0, weight >= 0.0f ? weight : INFINITY); /* refused like one that is not finite */
    }
    const xdi_cuda_sums<1, true>::totals totals = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine);
    positions = xdi_cuda_block_reduce(positions, (int64_t)0, xdi_cuda_add());
    if (threadIdx.x != 0) return;
    part[XD_COUNT_POSITIONS] += positions;
    part[XD_COUNT_HIGH] += totals.sum[0].high;
    part[XD_COUNT_LOW] += totals.sum[0].low;
    part[XD_COUNT_REFUSED] += totals.misfits.large + totals.misfits.infinite + (p.count < 0 ? 1 : 0);
}

static xd_result xdi_cuda_rows_count(const xd_launch *launch, const xd_positions *positions, int64_t *part) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_rows_count_kernel,
                           *positions, part);
}

/* One thread; part and out may share memory. */
static __global__ void xdi_cuda_rows_denominator_kernel(const int64_t *part, xd_denominator *out) {
    if (threadIdx.x != 0) return;
    const xd_fixed weight = { part[XD_COUNT_HIGH], part[XD_COUNT_LOW] };
    const int64_t positions = part[XD_COUNT_POSITIONS], refused = part[XD_COUNT_REFUSED];
    const double value = refused == 0 ? xd_fixed_read(weight) : 0.0;
    out->value = value;
    out->inverse = value > 0.0 ? 1.0 / value : 0.0;
    out->positions = positions;
    out->refused = refused;
}

static xd_result xdi_cuda_rows_denominator(const xd_launch *launch, const int64_t *part,
                                           xd_denominator *out) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_rows_denominator_kernel, part,
                           out);
}

static __global__ void xdi_cuda_rows_ratio_kernel(const xd_denominator *hit, const xd_denominator *counted,
                                                  double *out) {
    if (threadIdx.x == 0)
        *out = counted->refused ? (double)NAN : counted->value > 0.0 ? hit->value / counted->value : 0.0;
}

static xd_result xdi_cuda_rows_ratio(const xd_launch *launch, const xd_denominator *hit,
                                     const xd_denominator *counted, double *out) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_rows_ratio_kernel, hit,
                           counted, out);
}

/* ---- scales: one thread a row ---- */

static __device__ inline double xdi_cuda_rows_weight(const xd_row_args &a, int64_t row) {
    return a.positions.weights ? (double)a.positions.weights[row] : 1.0;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_scales_kernel(const __grid_constant__ xd_row_args a) {
    const int64_t r = xdi_cuda_flat_index();
    const double inverse = a.denominator               ? a.denominator->inverse
                           : a.denominator_value > 0.0 ? 1.0 / a.denominator_value
                                                       : 0.0;
    const double factor = (a.scale ? *a.scale : 1.0) * inverse;
    if (r == 0) *a.factor = factor;
    if (r >= a.positions.count) return;
    const double scale = xdi_cuda_rows_weight(a, r) * factor;
    a.row_scale[r] = xdi_cuda_rows_counts(a.positions, r) && isfinite(scale) ? scale : 0.0;
}

static xd_result xdi_cuda_rows_scales(const xd_launch *launch, const xd_row_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->positions.count), xdi_cuda_rows_scales_kernel, *a);
}

/* ---- sum: a block for 256 rows, at most 64 of them, and one that adds what they found ---- */

enum { XDI_CUDA_ROWS_BLOCKS = 64 };

/* What one thread has found among its rows. */
struct xdi_cuda_rows_findings {
    int64_t counted, label, not_finite, overflow;
    int64_t hard_eights, soft_eights; /* of the totals in INVARIANT mode, see xd_total */
    int64_t first_row; /* INT64_MAX: none */
    double first_value;

    __device__ void find(int64_t row, int finding, double value) {
        label += finding == (int)XD_ROW_LABEL;
        overflow += finding == (int)XD_ROW_OVERFLOW;
        not_finite += finding == (int)XD_ROW_NOT_FINITE;
        if (row >= first_row) return;
        first_row = row;
        first_value = value;
    }
};

struct xdi_cuda_rows_findings_join {
    __device__ xdi_cuda_rows_findings operator()(xdi_cuda_rows_findings a,
                                                 const xdi_cuda_rows_findings &b) const {
        a.counted += b.counted;
        a.label += b.label;
        a.not_finite += b.not_finite;
        a.overflow += b.overflow;
        a.hard_eights += b.hard_eights;
        a.soft_eights += b.soft_eights;
        if (b.first_row < a.first_row) {
            a.first_row = b.first_row;
            a.first_value = b.first_value;
        }
        return a;
    }
};

struct xdi_cuda_rows_value {
    double hard, soft;
    int finding;
    double value; /* for the status */
};

static __device__ inline xdi_cuda_rows_value xdi_cuda_rows_read(const xd_row_args &a, int64_t r) {
    xdi_cuda_rows_value v;
    if (a.topk_rows) {
        v.hard = 0.0;
        v.soft = a.topk_rows[r].loss;
        v.finding = a.topk_rows[r].finding;
        v.value = a.topk_rows[r].max;
    } else {
        v.hard = a.loss_rows[r].hard;
        v.soft = a.loss_rows[r].soft;
        v.finding = a.loss_rows[r].finding;
        v.value = a.loss_rows[r].max;
        if (v.finding == (int)XD_ROW_LABEL) v.value = (double)xd_id_at(a.positions.labels, r);
        if (v.finding == (int)XD_ROW_NOT_FINITE) v.value = xd_row_reason(v.value, a.loss_rows[r].teacher_max);
    }
    return v;
}

static __device__ inline void xdi_cuda_rows_show(const xd_row_args &a, int64_t r,
                                                 const xdi_cuda_rows_value &v) {
    if (a.row_loss) a.row_loss[r] = (float)xd_loss_of_row(a.hard_weight, v.hard, a.soft_weight, v.soft);
    if (a.student_mass) a.student_mass[r] = (float)a.topk_rows[r].student_mass;
    if (a.teacher_mass) a.teacher_mass[r] = (float)a.topk_rows[r].teacher_mass;
}

/* What xd_total_put gives to the rest; the eights are added to *eights. */
static __device__ inline double xdi_cuda_rows_below_eight(double term, int64_t *eights) {
    const int64_t whole = (int64_t)__dmul_rn(term, 0.125);
    *eights += whole;
    return __dsub_rn(term, __dmul_rn((double)whole, 8.0));
}

template <bool FIXED>
static __device__ inline void xdi_cuda_rows_add_row(const xd_row_args &a, int64_t r,
                                                    xdi_cuda_sums<2, FIXED> *sums,
                                                    xdi_cuda_rows_findings *found) {
    const double weight = xdi_cuda_rows_weight(a, r), scale = xd_mul(weight, *a.factor);
    const xdi_cuda_rows_value v = xdi_cuda_rows_read(a, r);
    xdi_cuda_rows_show(a, r, v);
    if (!xdi_cuda_rows_counts(a.positions, r)) return;
    found->counted++;
    if (!isfinite(scale)) found->find(r, (int)XD_ROW_NOT_FINITE, scale);
    if (a.row_scale[r] == 0.0) return;
    if (v.finding != (int)XD_ROW_FINE) {
        found->find(r, v.finding, v.value);
        return;
    }
    const double hard = __dmul_rn(weight, v.hard), soft = __dmul_rn(weight, v.soft);
    const bool fits = !FIXED || (fabs(hard) < 4194304.0 && fabs(soft) < 4194304.0);
    if (!fits) found->find(r, (int)XD_ROW_OVERFLOW, v.value);
    if (!fits) return;
    sums->add_wide(0, FIXED ? xdi_cuda_rows_below_eight(hard, &found->hard_eights) : hard);
    sums->add_wide(1, FIXED ? xdi_cuda_rows_below_eight(soft, &found->soft_eights) : soft);
}

static __device__ inline void xdi_cuda_rows_put(int64_t *record, const xdi_cuda_sums<2, false>::totals &t) {
    record[XD_RECORD_HARD] = __double_as_longlong(t.sum[0]);
    record[XD_RECORD_SOFT] = __double_as_longlong(t.sum[1]);
    record[XD_RECORD_HARD + 1] = record[XD_RECORD_SOFT + 1] = 0;
}

static __device__ inline void xdi_cuda_rows_put(int64_t *record, const xdi_cuda_sums<2, true>::totals &t) {
    record[XD_RECORD_HARD] = t.sum[0].high;
    record[XD_RECORD_HARD + 1] = t.sum[0].low;
    record[XD_RECORD_SOFT] = t.sum[1].high;
    record[XD_RECORD_SOFT + 1] = t.sum[1].low;
    record[XD_RECORD_OVERFLOW] += t.misfits.large;
}

/* What a block has summed. */
template <bool FIXED> struct xdi_cuda_rows_part {
    typename xdi_cuda_sums<2, FIXED>::totals totals;
    xdi_cuda_rows_findings found;
};

/* Adds the block's parts in the order of its threads; its first thread writes the record. */
template <bool FIXED>
static __device__ inline xdi_cuda_rows_part<FIXED> xdi_cuda_rows_reduce(const xdi_cuda_sums<2, FIXED> &mine,
                                                                        const xdi_cuda_rows_findings &found) {
    const xdi_cuda_rows_findings nothing = { 0, 0, 0, 0, 0, 0, INT64_MAX, 0.0 };
    return { xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(mine),
             xdi_cuda_block_reduce(found, nothing, xdi_cuda_rows_findings_join()) };
}

template <bool FIXED>
static __device__ inline void xdi_cuda_rows_record(const xd_row_args &a, const xdi_cuda_rows_part<FIXED> &part) {
    const xdi_cuda_rows_findings &found = part.found;
    a.record[XD_RECORD_COUNTED] = found.counted;
    a.record[XD_RECORD_LABEL] = found.label;
    a.record[XD_RECORD_NOT_FINITE] = found.not_finite;
    a.record[XD_RECORD_OVERFLOW] = found.overflow;
    a.record[XD_RECORD_FIRST_ROW] = found.first_row == INT64_MAX ? 0 : found.first_row;
    a.record[XD_RECORD_FIRST_VALUE] = __double_as_longlong(found.first_value);
    a.record[XD_RECORD_HARD_EIGHTS] = found.hard_eights;
    a.record[XD_RECORD_SOFT_EIGHTS] = found.soft_eights;
    xdi_cuda_rows_put(a.record, part.totals);
}

/* Of a block's rows; the only block writes the record itself. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_rows_sum_kernel(const __grid_constant__ xd_row_args a, xdi_cuda_rows_part<FIXED> *parts) {
    xdi_cuda_rows_findings found = { 0, 0, 0, 0, 0, 0, INT64_MAX, 0.0 };
    xdi_cuda_sums<2, FIXED> mine;
    for (int64_t r = xdi_cuda_flat_index(); r < a.positions.count; r += (int64_t)gridDim.x * XDI_CUDA_TEAM_BLOCK)
        xdi_cuda_rows_add_row<FIXED>(a, r, &mine, &found);
    const xdi_cuda_rows_part<FIXED> part = xdi_cuda_rows_reduce<FIXED>(mine, found);
    if (threadIdx.x != 0) return;
    if (gridDim.x == 1)
        xdi_cuda_rows_record<FIXED>(a, part);
    else
        parts[blockIdx.x] = part;
}

/* Of the blocks' parts, a thread for each. */
template <bool FIXED>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_rows_total_kernel(const __grid_constant__ xd_row_args a, const xdi_cuda_rows_part<FIXED> *parts, int blocks) {
    xdi_cuda_rows_findings found = { 0, 0, 0, 0, 0, 0, INT64_MAX, 0.0 };
    xdi_cuda_sums<2, FIXED> mine;
    if ((int)threadIdx.x < blocks) {
        mine.whole = parts[threadIdx.x].totals;
        found = parts[threadIdx.x].found;
    }
    const xdi_cuda_rows_part<FIXED> part = xdi_cuda_rows_reduce<FIXED>(mine, found);
    if (threadIdx.x == 0) xdi_cuda_rows_record<FIXED>(a, part);
}

template <bool FIXED> static xd_result xdi_cuda_rows_sum_in(const xd_launch *launch, const xd_row_args *a) {
    static_assert((int)XDI_CUDA_ROWS_BLOCKS <= (int)XDI_CUDA_TEAM_BLOCK &&
                      XDI_CUDA_ROWS_BLOCKS * sizeof(xdi_cuda_rows_part<FIXED>) <= XDI_CUDA_NORM_BLOCKS * sizeof(xd_norm_sum),
                  "the context's workspace has a part for each block");
    xdi_cuda_rows_part<FIXED> *parts = (xdi_cuda_rows_part<FIXED> *)xdi_cuda_of(launch->ctx)->workspace;
    xdi_cuda_grid grid = xdi_cuda_flat_grid(a->positions.count);
    if (grid.blocks > XDI_CUDA_ROWS_BLOCKS) grid.blocks = XDI_CUDA_ROWS_BLOCKS;
    XD_TRY(XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_rows_sum_kernel<FIXED>, *a, parts));
    if (grid.blocks == 1) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_TEAM_BLOCK), xdi_cuda_rows_total_kernel<FIXED>, *a, parts,
                           (int)grid.blocks);
}

static xd_result xdi_cuda_rows_sum(const xd_launch *launch, const xd_row_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return a->fixed ? xdi_cuda_rows_sum_in<true>(launch, a) : xdi_cuda_rows_sum_in<false>(launch, a);
}

/* ---- finish: one thread ---- */

static __device__ double xdi_cuda_rows_total(const xd_row_args &a, int which, int eights) {
    double sum = 0.0;
    xd_total fixed = { { 0, 0 }, 0 };
    for (int i = 0; i < a.ranks; i++) {
        const int64_t *word = a.records + i * XD_RECORD_WORDS + which;
        if (a.fixed) {
            fixed.rest.high += word[0];
            fixed.rest.low += word[1];
            fixed.eights += word[eights - which];
        } else {
            sum += __longlong_as_double(word[0]);
        }
    }
    return a.fixed ? xd_total_read(fixed) : sum;
}

static __device__ int64_t xdi_cuda_rows_total_count(const xd_row_args &a, int which) {
    int64_t sum = 0;
    for (int i = 0; i < a.ranks; i++) sum += a.records[i * XD_RECORD_WORDS + which];
    return sum;
}

/* Adds the findings of all ranks; the first one is that of the lowest rank. */
static __device__ void xdi_cuda_rows_status(const xd_row_args &a, bool nothing, xd_status *status) {
    const bool clean = status->label_out_of_range + status->not_finite + status->overflow == 0;
    for (int i = 0; i < a.ranks && clean; i++) {
        const int64_t *part = a.records + i * XD_RECORD_WORDS;
        if (part[XD_RECORD_LABEL] + part[XD_RECORD_NOT_FINITE] + part[XD_RECORD_OVERFLOW] == 0) continue;
        status->first_row = part[XD_RECORD_FIRST_ROW];
        status->first_value = __longlong_as_double(part[XD_RECORD_FIRST_VALUE]);
        break;
    }
    status->label_out_of_range += xdi_cuda_rows_total_count(a, XD_RECORD_LABEL);
    status->not_finite += xdi_cuda_rows_total_count(a, XD_RECORD_NOT_FINITE);
    status->overflow += xdi_cuda_rows_total_count(a, XD_RECORD_OVERFLOW);
    if (nothing) status->nothing_counted++;
}

static __global__ void xdi_cuda_rows_finish_kernel(const __grid_constant__ xd_row_args a, xd_status *status) {
    if (threadIdx.x != 0) return;
    const double factor = isfinite(*a.factor) ? *a.factor : 0.0; /* else every row is a finding */
    const double hard = __dmul_rn(xdi_cuda_rows_total(a, XD_RECORD_HARD, XD_RECORD_HARD_EIGHTS), factor);
    const double soft = __dmul_rn(xdi_cuda_rows_total(a, XD_RECORD_SOFT, XD_RECORD_SOFT_EIGHTS), factor);
    a.values->hard = hard;
    a.values->soft = soft;
    a.values->loss = __dadd_rn(__dmul_rn(a.hard_weight, hard), __dmul_rn(a.soft_weight, soft));
    a.values->counted = xdi_cuda_rows_total_count(a, XD_RECORD_COUNTED);
    xdi_cuda_rows_status(a, a.denominator && a.denominator->inverse == 0.0, status);
}

static xd_result xdi_cuda_rows_finish(const xd_launch *launch, const xd_row_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_rows_finish_kernel, *a,
                           launch->status);
}

/* ---- columns ---- */

/* A block has 256 columns. Each of its warps sees every eighth row, eight columns a lane and four rows ahead. */
enum { XDI_CUDA_MAXIMA_WARPS = XDI_CUDA_TEAM_BLOCK / XDI_CUDA_WARP, XDI_CUDA_MAXIMA_AHEAD = 4 };

template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_column_maxima_kernel(
    const __grid_constant__ xd_rows logits, const uint8_t *mask, int64_t columns, float *maxima) {
    XD_SHARED(float, best, [XDI_CUDA_MAXIMA_WARPS * XDI_CUDA_TEAM_BLOCK]);
    const int lane = (int)threadIdx.x % XDI_CUDA_WARP, warp = (int)threadIdx.x / XDI_CUDA_WARP;
    const int64_t first = (int64_t)blockIdx.x * XDI_CUDA_TEAM_BLOCK, c = first + lane * XDI_CUDA_EIGHT;
    const bool whole = c + XDI_CUDA_EIGHT <= columns && xdi_cuda_is_aligned16(xdi_cuda_row<T>(logits, 0)) &&
                       xdi_cuda_stride(logits) * (int64_t)sizeof(T) % 16 == 0;
    xdi_cuda_places<T, false> places;
    for (int64_t r = warp; r < logits.rows; r += XDI_CUDA_MAXIMA_WARPS * XDI_CUDA_MAXIMA_AHEAD) {
        xdi_cuda_raw<T> raw[XDI_CUDA_MAXIMA_AHEAD];
        bool has[XDI_CUDA_MAXIMA_AHEAD];
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MAXIMA_AHEAD; k++) {
            const int64_t at = r + k * XDI_CUDA_MAXIMA_WARPS;
            has[k] = at < logits.rows && (!mask || mask[at]) && c < columns;
            if (!has[k]) continue;
            if (whole)
                raw[k].load(xdi_cuda_row<T>(logits, at) + c);
            else
                raw[k] = xdi_cuda_raw_of(xdi_cuda_row<T>(logits, at), c, columns);
        }
        XD_UNROLL
        for (int k = 0; k < XDI_CUDA_MAXIMA_AHEAD; k++)
            if (has[k]) places.see(raw[k]);
    }
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) best[warp * XDI_CUDA_TEAM_BLOCK + lane * XDI_CUDA_EIGHT + i] = places.value(i);
    __syncthreads();
    float max = -INFINITY;
    for (int w = 0; w < XDI_CUDA_MAXIMA_WARPS; w++) max = fmaxf(max, best[w * XDI_CUDA_TEAM_BLOCK + (int)threadIdx.x]);
    if (first + (int64_t)threadIdx.x < columns) maxima[first + (int64_t)threadIdx.x] = max;
}

static xd_result xdi_cuda_rows_column_maxima(const xd_launch *launch, const xd_rows *logits,
                                             const uint8_t *mask, int64_t columns, float *maxima) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(logits->dtype, T, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(columns), xdi_cuda_rows_column_maxima_kernel<T>, *logits,
                               mask, columns, maxima);
    })
}

/* One block a row. */
template <typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_voters_kernel(const __grid_constant__ xd_rows logits,
                                                                   const uint8_t *mask, int64_t columns,
                                                                   uint8_t *voters) {
    const int64_t r = (int64_t)blockIdx.x;
    const bool counts = !mask || mask[r];
    xdi_cuda_places<T, true> places;
    xdi_cuda_each_eight<XDI_CUDA_TEAM_BLOCK>(xdi_cuda_row<T>(logits, r), counts ? columns : 0,
                                             [&](const xdi_cuda_raw<T> &raw, int64_t) { places.see(raw); });
    const int bad = __syncthreads_or(!(xdi_cuda_largest_of(places) < INFINITY));
    if (threadIdx.x == 0) voters[r] = (uint8_t)(counts && !bad);
}

static xd_result xdi_cuda_rows_voters(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                      int64_t columns, uint8_t *voters) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (logits->rows == 0) return XD_OK;
    XDI_CUDA_LOGITS(logits->dtype, T, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(logits->rows, XDI_CUDA_TEAM_BLOCK),
                               xdi_cuda_rows_voters_kernel<T>, *logits, mask, columns, voters);
    })
}

/* ---- rows that are kept: a block each ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_rows_keep_kernel(const __grid_constant__ xd_kept_rows a) {
    const int64_t r = (int64_t)blockIdx.x, columns = a.from.cols;
    bool kept = a.row_scale[r] != 0.0 && a.row[r].finding == (int)XD_ROW_FINE;
    if (kept && a.judge) {
        int bad = 0;
        for (int64_t c = (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_TEAM_BLOCK)
            if (!isfinite(xdi_cuda_element(a.from, r, c))) bad = 1;
        kept = __syncthreads_or(bad) == 0;
        if (!kept && threadIdx.x == 0) xd_loss_reject(a.row + r);
    }
    if (kept && a.to.data == a.from.data) return;
    for (int64_t c = (int64_t)threadIdx.x; c < columns; c += XDI_CUDA_TEAM_BLOCK)
        xdi_cuda_set_element(a.to, r, c, kept ? xdi_cuda_element(a.from, r, c) : 0.0f);
}

static xd_result xdi_cuda_rows_keep(const xd_launch *launch, const xd_kept_rows *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->from.rows == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->from.rows, XDI_CUDA_TEAM_BLOCK), xdi_cuda_rows_keep_kernel, *a);
}

/* ---- table ---- */

static xd_result xdi_cuda_rows_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_count_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_denominator_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_ratio_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_scales_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_sum_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_sum_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_total_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_total_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_finish_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_column_maxima_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_column_maxima_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_voters_kernel<float>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_voters_kernel<xdi_cuda_bf16>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_rows_keep_kernel));
    return xdi_cuda_sort_load(ctx);
}

static xd_row_kernels xdi_cuda_rows_table() {
    xd_row_kernels kernels = {};
    kernels.count = xdi_cuda_rows_count;
    kernels.denominator = xdi_cuda_rows_denominator;
    kernels.ratio = xdi_cuda_rows_ratio;
    kernels.scales = xdi_cuda_rows_scales;
    kernels.sum = xdi_cuda_rows_sum;
    kernels.finish = xdi_cuda_rows_finish;
    kernels.column_maxima = xdi_cuda_rows_column_maxima;
    kernels.voters = xdi_cuda_rows_voters;
    kernels.sort_ids = xdi_cuda_rows_sort_ids;
    kernels.keep = xdi_cuda_rows_keep;
    return kernels;
}
