/* A loss row by row: references and sums are computed in one read of the rows, as running sums; where one shard is the whole
 * row, its scalars and its gradient follow at once, while the row is in the cache. Two reads and one write of a row,
 * three reads for JSD. Grid (rows / teams), block 256. */

/* References [XD_LOSS_REFERENCES] and sums [XD_LOSS_SUMS] of this shard, on every thread of the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_row(const xd_loss_args &a, int64_t r, double *ref, double *total) {
    const xdi_cuda_line<X> student = xdi_cuda_line<X>::of(a.student, r);
    const xdi_cuda_line<Y> teacher = xdi_cuda_line<Y>::of(a.teacher, r);
    xdi_cuda_loss_sweep_columns<X, Y, TEAM>(a, student, teacher, a.vocab.end - a.vocab.begin, a.vocab.begin, ref, total);
    if (total[XD_LOSS_BAD] == 0.0) total[XD_LOSS_TARGET] = xdi_cuda_loss_target(a, r, ref[XD_LOSS_MAX]);
}

/* xdi_cuda_loss_mixture_row of known types, in the same order. */
template <typename X, typename Y, int TEAM>
static __device__ inline xdi_cuda_sums<XD_LOSS_MIXTURES, false>::totals
xdi_cuda_loss_mixture_ahead(const xd_loss_args &a, int64_t r, bool counts) {
    const xdi_cuda_loss_scales s = xdi_cuda_loss_scales_of<Y>(a, a.row[r]);
    const xdi_cuda_line<X> student = xdi_cuda_line<X>::of(a.student, r);
    const xdi_cuda_line<Y> teacher = xdi_cuda_line<Y>::of(a.teacher, r);
    const int64_t columns = counts ? a.vocab.end - a.vocab.begin : 0, step = XDI_CUDA_EIGHT * TEAM;
    const int64_t first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    const bool aligned = xdi_cuda_is_aligned16(student.at) && xdi_cuda_is_aligned16(teacher.at);
    const int whole = aligned ? (int)(columns / step) : 0;
    xdi_cuda_sums<XD_LOSS_MIXTURES, false> mine;
    xdi_cuda_in_memory::walk(
        student, teacher, first, step, whole, xdi_cuda_steps_of(first, columns, step),
        [&](int k, xdi_cuda_eight *x, xdi_cuda_eight *y) { /* columns that are not there add 0 */
            *x = student.eight(first + k * step, columns, -INFINITY);
            *y = teacher.eight(first + k * step, columns, -INFINITY);
        },
        [&](int, const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) xdi_cuda_loss_mixture_terms(s, x.at[i], y.at[i], &mine);
            mine.end_eight();
        });
    return xdi_cuda_team_totals<TEAM>(mine);
}

/* A whole row's scalars, once its references and sums are known: written by one thread, then seen by the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_row_scalars(const xd_loss_args &a, int64_t r, const double *ref,
                                                         const double *total, bool counts) {
    if (xdi_cuda_team_thread<TEAM>() == 0) {
        xd_loss_row row;
        memset(&row, 0, sizeof row);
        if (counts) {
            xdi_cuda_loss_scalars(a, r, ref, total, &row);
            xd_loss_settle(&a, r, &row);
        }
        a.row[r] = row;
    }
    xdi_cuda_team_sync<TEAM>();
    if (!xdi_cuda_is<Y>::GIVEN || a.divergence != XD_JSD) return;
    const bool fine = counts && a.row[r].finding == (int)XD_ROW_FINE;
    const xdi_cuda_sums<XD_LOSS_MIXTURES, false>::totals totals = xdi_cuda_loss_mixture_ahead<X, Y, TEAM>(a, r, fine);
    xdi_cuda_team_sync<TEAM>(); /* all threads have read the row's scalars */
    if (fine && xdi_cuda_team_thread<TEAM>() == 0)
        xd_loss_mixture_scalars(&a, r, totals.sum[XD_LOSS_TEACHER_MIXTURE],
                                      totals.sum[XD_LOSS_STUDENT_MIXTURE], a.row + r);
    xdi_cuda_team_sync<TEAM>();
}

/* What a shard knows of a row, for the merge over the shards. */
XDI_CUDA_APART __device__ void xdi_cuda_loss_row_keep(const xd_loss_args &a, int64_t r, const double *ref,
                                                      const double *total) {
    for (int i = 0; i < XD_LOSS_REFERENCES; i++) a.references[r * XD_LOSS_REFERENCES + i] = ref[i];
    for (int i = 0; i < XD_LOSS_SUMS; i++) static_cast<double *>(a.sums)[r * XD_LOSS_SUMS + i] = total[i];
}

template <typename X, typename Y, int TEAM>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, xdi_cuda_loss_blocks<Y>::LEAST)
    xdi_cuda_loss_fused_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool counts = a.row_scale[r] != 0.0;
    double ref[XD_LOSS_REFERENCES] = {}, total[XD_LOSS_SUMS] = {};
    if (counts) xdi_cuda_loss_sweep_row<X, Y, TEAM>(a, r, ref, total);
    if (a.vocab.shards > 1) {
        if (xdi_cuda_team_thread<TEAM>() == 0) xdi_cuda_loss_row_keep(a, r, ref, total);
        return;
    }
    xdi_cuda_loss_row_scalars<X, Y, TEAM>(a, r, ref, total, counts);
    if (a.gradient.data) xdi_cuda_loss_grad_row<X, Y, TEAM>(a, r);
}

/* On the current device. */
static xd_result xdi_cuda_loss_fused_start(const xd_launch *launch, const xd_loss_args *a) {
    XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               (xdi_cuda_loss_fused_kernel<X, Y, TEAM>), *a);
    })
}

static xd_result xdi_cuda_loss_fused(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return xdi_cuda_loss_fused_start(launch, a);
}

/* ---- loading, also for loss.cu ---- */

/* The kernels of XDI_CUDA_LOSS_CASES. */
template <typename X, typename Y, int TEAM> static xd_result xdi_cuda_loss_load_rows(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_grad_kernel<X, Y, TEAM>)));
    return xdi_cuda_load(ctx, xdi_cuda_loss_fused_kernel<X, Y, TEAM>);
}

template <int TEAM> static xd_result xdi_cuda_loss_load_team(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_references_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_kernel<false, TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_stats_kernel<false, TEAM>));
    return xdi_cuda_loss_load_rows<xdi_cuda_any, xdi_cuda_any, TEAM>(ctx);
}

static xd_result xdi_cuda_loss_load_types(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_loss_load_rows<xdi_cuda_any, xdi_cuda_none, XDI_CUDA_WARP>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<float, xdi_cuda_none, XDI_CUDA_TEAM_BLOCK>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<xdi_cuda_bf16, xdi_cuda_none, XDI_CUDA_TEAM_BLOCK>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<float, float, XDI_CUDA_TEAM_BLOCK>(ctx)));
    return xdi_cuda_loss_load_rows<xdi_cuda_bf16, xdi_cuda_bf16, XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_result xdi_cuda_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_merge_references_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_combine_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_combine_kernel));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_mixture_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY(xdi_cuda_loss_load_types(ctx));
    XD_TRY(xdi_cuda_loss_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_loss_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_loss_kernels xdi_cuda_loss_table() {
    xd_loss_kernels kernels = {};
    kernels.references = xdi_cuda_loss_references;
    kernels.merge_references = xdi_cuda_loss_merge_references;
    kernels.stats = xdi_cuda_loss_stats;
    kernels.combine = xdi_cuda_loss_combine;
    kernels.mixture = xdi_cuda_loss_mixture;
    kernels.mixture_combine = xdi_cuda_loss_mixture_combine;
    kernels.grad = xdi_cuda_loss_grad;
    kernels.fused = xdi_cuda_loss_fused;
    return kernels;
}
