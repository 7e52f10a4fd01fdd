/* Losses across tokenizers, by single rows: moments, and teachers of the student's own tokenizer.
 * kernel/cpu/xtoken_rows.c is the reference. */

/* ---- moments: one block per row; two or three reads, all but the first mostly from the cache ---- */

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_moments_kernel(const __grid_constant__ xd_xtoken_moments_args a) {
    const int64_t i = (int64_t)blockIdx.x, row = a.x.rows[i], first = XDI_CUDA_EIGHT * (int64_t)threadIdx.x;
    const xdi_cuda_largest best = xdi_cuda_row_largest<XDI_CUDA_TEAM_BLOCK>(a.x.logits, row, a.x.columns);
    const bool counts = !best.broken && best.max > -INFINITY;
    xdi_cuda_sums<1, false> sums, entropies;
    for (int64_t c = first; counts && c < a.x.columns; c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.x.logits, row, c, a.x.columns);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++)
            if (c + j < a.x.columns) sums.add(0, expf(__fsub_rn(x.at[j], best.max)));
        sums.end_eight();
    }
    const double sum = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(sums).sum[0];
    const double log_sum = counts ? log(sum) : (double)NAN;
    for (int64_t c = first; a.entropy && c < a.x.columns; c += XDI_CUDA_EIGHT * XDI_CUDA_TEAM_BLOCK) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.x.logits, row, c, a.x.columns);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const double p =
                exp((double)__fsub_rn(x.at[j], best.max) - log_sum); /* near 1, ln p has no digits in f32 */
            if (c + j < a.x.columns) entropies.add_wide(0, xd_xtoken_entropy_term(p));
        }
    }
    const double entropy = xdi_cuda_team_totals<XDI_CUDA_TEAM_BLOCK>(entropies).sum[0];
    if (threadIdx.x != 0) return;
    const int64_t label = a.labels.data ? xd_id_at(a.labels, row) : -1;
    double *out = a.moments + i * XD_XTOKEN_MOMENTS;
    out[XD_XTOKEN_LARGEST] = best.broken ? (double)NAN : (double)best.max;
    out[XD_XTOKEN_LOG_SUM] = log_sum;
    out[XD_XTOKEN_ENTROPY] = a.entropy && !counts ? (double)NAN : entropy;
    out[XD_XTOKEN_LABEL] =
        label >= 0 && label < a.x.columns ? (double)xdi_cuda_element(a.x.logits, row, label) : (double)NAN;
}

static xd_result xdi_cuda_xtoken_moments(const xd_launch *launch, const xd_xtoken_moments_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->x.count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_moments_kernel, *a);
}

/* ---- pick: one thread per entry ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_xtoken_pick_kernel(const __grid_constant__ xd_xtoken_pick_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.x.count * a.k) return;
    const int64_t v = a.ids[i % a.k] - a.x.first, row = a.x.rows[i / a.k];
    double value = -(double)INFINITY;
    if (v >= 0 && v < a.x.columns)
        value = xd_xtoken_picked(a.add ? a.out[i] : 0.0, a.scale, (double)xdi_cuda_element(a.x.logits, row, v));
    if (xd_xtoken_row_is_bad(&a.x, row)) value = (double)NAN;
    a.out[i] = value;
}

static xd_result xdi_cuda_xtoken_pick(const xd_launch *launch, const xd_xtoken_pick_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->x.count * a->k == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->x.count * a->k), xdi_cuda_xtoken_pick_kernel, *a);
}

/* ---- compare: one block per row, whose two lists stay in the cache ---- */

/* Log-softmax in place. */
static __device__ inline void xdi_cuda_xtoken_log_softmax(double *x, int64_t k) {
    const double lse = xdi_cuda_block_lse(k, [=](int64_t j) { return x[j]; });
    for (int64_t j = (int64_t)threadIdx.x; j < k; j += XDI_CUDA_TEAM_BLOCK) x[j] = __dsub_rn(x[j], lse);
}

/* A thread reads and writes its own entries only, except for the most probable ones. */
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_xtoken_compare_kernel(const __grid_constant__ xd_xtoken_compare_args a) {
    xd_xtoken_chunk *chunk = a.chunks + blockIdx.x;
    double *s = a.student + (int64_t)blockIdx.x * a.k, *t = a.teacher + (int64_t)blockIdx.x * a.k;
    const int64_t first = (int64_t)threadIdx.x;
    double value = 0.0;
    if (!chunk->compared) return;
    for (int64_t j = first; j < a.k; j += XDI_CUDA_TEAM_BLOCK) {
        s[j] = __ddiv_rn(s[j], a.temperature);
        t[j] = __ddiv_rn(__ddiv_rn(t[j], a.divisor), a.temperature);
    }
    const bool agree = xdi_cuda_block_argmax(s, a.k) == xdi_cuda_block_argmax(t, a.k);
    xdi_cuda_xtoken_log_softmax(s, a.k);
    xdi_cuda_xtoken_log_softmax(t, a.k);
    for (int64_t j = first; j < a.k; j += XDI_CUDA_TEAM_BLOCK) xd_xtoken_add_kl(s[j], t[j], a.reverse, &value);
    value = xdi_cuda_block_sum(value);
    for (int64_t j = first; j < a.k; j += XDI_CUDA_TEAM_BLOCK)
        s[j] = xd_xtoken_kl_slope(s[j], t[j], a.reverse, value);
    if (threadIdx.x != 0) return;
    chunk->value = value;
    chunk->agree = agree;
    chunk->largest = xd_xtoken_chunk_takes(chunk, value) ? 1.0 : 0.0;
}

static xd_result xdi_cuda_xtoken_compare(const xd_launch *launch, const xd_xtoken_compare_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->count == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->count, XDI_CUDA_TEAM_BLOCK),
                           xdi_cuda_xtoken_compare_kernel, *a);
}

static xd_result xdi_cuda_xtoken_rows_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_moments_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_xtoken_pick_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_xtoken_compare_kernel);
}

static void xdi_cuda_xtoken_rows_fill(xd_xtoken_kernels *kernels) {
    kernels->moments = xdi_cuda_xtoken_moments;
    kernels->pick = xdi_cuda_xtoken_pick;
    kernels->compare = xdi_cuda_xtoken_compare;
}
