/* A loss row by row: references and sums are computed in one read of the rows, as running sums; where one shard is the whole
 * row, its scalars and its gradient follow at once, while the row is in the cache. Two reads and one write of a row,
 * three reads for JSD. Grid (rows / teams), block 256.
 *
 * Each thread sums relative to the largest elements that it has read; when a larger one comes, its sums are rescaled to
 * that one. They begin with the largest of the team's first columns, so that this is rare. */

/* A thread's running values. The sums are relative to the references in `row`. */
struct xdi_cuda_loss_sweep {
    xdi_cuda_loss_row row;
    xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false> sums; /* LINEAR is the plain sum of x here */
    xdi_cuda_largest student, teacher;
};

/* Brings the sums to new references: xd_loss_rescale for one thread. Empty sums stay 0. */
static __device__ inline void xdi_cuda_loss_move(xdi_cuda_loss_sweep *t, double temperature, float max,
                                                 float teacher_max, float at_arg) {
    double *sum = t->sums.whole.sum;
    const double shift = t->row.max == max ? 0.0 : (double)t->row.max - (double)max, z = shift / temperature;
    const double u =
        (t->row.teacher_max == teacher_max ? 0.0 : (double)t->row.teacher_max - (double)teacher_max) /
        temperature;
    const double f = exp(z), g = exp(u);
    if (t->row.divergence == XD_KL_REVERSE) {
        const double step =
            t->row.at_arg == at_arg ? z : z - ((double)t->row.at_arg - (double)at_arg) / temperature;
        sum[XD_LOSS_CROSS] =
            f > 0.0 && sum[XD_LOSS_SOFT] > 0.0 ? f * (sum[XD_LOSS_CROSS] + sum[XD_LOSS_SOFT] * step) : 0.0;
    } else {
        const double step = t->row.divergence == XD_KL_FORWARD ? u - z : z;
        sum[XD_LOSS_CROSS] = g > 0.0 && sum[XD_LOSS_TEACHER] > 0.0
                                 ? g * (sum[XD_LOSS_CROSS] + sum[XD_LOSS_TEACHER] * step)
                                 : 0.0;
    }
    sum[XD_LOSS_HARD] *= t->row.shared ? f : exp(shift);
    sum[XD_LOSS_SOFT] *= f;
    sum[XD_LOSS_TEACHER] *= g;
    t->row.max = max;
    t->row.teacher_max = teacher_max;
    t->row.at_arg = at_arg;
}

template <typename X, typename Y>
static __device__ inline void xdi_cuda_loss_sweep_eight(const xd_loss_args &a, const X *student,
                                                        const Y *teacher, int64_t c, xdi_cuda_loss_sweep *t) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    const xdi_cuda_eight x = xdi_cuda_read(student, c, columns);
    xdi_cuda_eight y = {};
    xdi_cuda_see(x, c, columns, &t->student);
    if (t->row.soft) {
        y = xdi_cuda_read(teacher, c, columns);
        xdi_cuda_see(y, c, columns, &t->teacher);
    }
    const bool higher = t->student.max > t->row.max;
    if (higher || t->teacher.max > t->row.teacher_max)
        xdi_cuda_loss_move(t, a.temperature, higher ? t->student.max : t->row.max,
                           t->teacher.max > t->row.teacher_max ? t->teacher.max : t->row.teacher_max,
                           higher && t->row.soft ? xdi_cuda_widen(teacher[t->student.arg]) : t->row.at_arg);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        if (c + i >= columns) continue;
        xdi_cuda_loss_terms(t->row, x.at[i], y.at[i], &t->sums);
        if (a.uniform_weight != 0.0) t->sums.add_wide(XD_LOSS_LINEAR, (double)x.at[i]);
    }
    t->sums.end_eight();
}

/* References [XD_LOSS_REFERENCES] and sums [XD_LOSS_SUMS] of this shard, on every thread of the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_row(const xd_loss_args &a, int64_t r, double *ref,
                                                      double *total) {
    const xdi_cuda_largest none = { -INFINITY, 0, INT64_MAX };
    const X *student = xdi_cuda_row<X>(a.student, r);
    const int64_t columns = a.vocab.end - a.vocab.begin, first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    xdi_cuda_loss_sweep t;
    t.row = xdi_cuda_loss_row_of(a, 0.0, 0.0, 0.0);
    t.row.uniform = false;
    t.student = t.teacher = none;
    const Y *teacher = t.row.soft ? xdi_cuda_row<Y>(a.teacher, r) : NULL;
    if (first < columns) {
        xdi_cuda_see(xdi_cuda_read(student, first, columns), first, columns, &t.student);
        if (t.row.soft) xdi_cuda_see(xdi_cuda_read(teacher, first, columns), first, columns, &t.teacher);
    }
    t.student = xdi_cuda_team_reduce<TEAM>(t.student, none, xdi_cuda_largest_join());
    if (t.row.soft) t.teacher = xdi_cuda_team_reduce<TEAM>(t.teacher, none, xdi_cuda_largest_join());
    t.row.max = t.student.max;
    t.row.teacher_max = t.teacher.max;
    t.row.at_arg = t.row.soft && columns > 0 ? xdi_cuda_widen(teacher[t.student.arg]) : -INFINITY;
    for (int64_t c = first; c < columns; c += XDI_CUDA_EIGHT * TEAM)
        xdi_cuda_loss_sweep_eight(a, student, teacher, c, &t);
    t.student = xdi_cuda_team_reduce<TEAM>(t.student, none, xdi_cuda_largest_join());
    if (t.row.soft) t.teacher = xdi_cuda_team_reduce<TEAM>(t.teacher, none, xdi_cuda_largest_join());
    const float at_arg = t.row.soft && columns > 0 ? xdi_cuda_widen(teacher[t.student.arg]) : -INFINITY;
    xdi_cuda_loss_move(&t, a.temperature, t.student.max, t.teacher.max, at_arg);
    const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false>::totals sums = xdi_cuda_team_totals<TEAM>(t.sums);
    const bool broken = t.student.broken || t.teacher.broken;
    ref[XD_LOSS_MAX] = t.student.broken ? (double)NAN : (double)t.student.max;
    ref[XD_LOSS_ARG] = columns > 0 ? (double)(t.student.arg + a.vocab.begin) : -1.0;
    ref[XD_LOSS_TEACHER_AT_ARG] = t.row.soft ? (double)at_arg : 0.0;
    ref[XD_LOSS_TEACHER_MAX] = !t.row.soft ? 0.0 : t.teacher.broken ? (double)NAN : (double)t.teacher.max;
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) total[i] = broken ? 0.0 : sums.sum[i];
    if (a.uniform_weight != 0.0 && columns > 0 && !broken)
        total[XD_LOSS_LINEAR] -= (double)columns * ref[XD_LOSS_MAX];
    total[XD_LOSS_TARGET] = broken ? 0.0 : xdi_cuda_loss_target(a, r, ref[XD_LOSS_MAX]);
    total[XD_LOSS_BAD] = broken ? 1.0 : 0.0;
}

/* A whole row's scalars, once its references and sums are known: written by one thread, then seen by the team. */
template <int TEAM>
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
    if (!xdi_cuda_loss_has_soft(a) || a.divergence != XD_JSD) return;
    const bool fine = counts && a.row[r].finding == (int)XD_ROW_FINE;
    const xdi_cuda_sums<XD_LOSS_MIXTURES, false>::totals totals =
        xdi_cuda_loss_mixture_row<false, TEAM>(a, r, fine);
    xdi_cuda_team_sync<TEAM>(); /* all threads have read the row's scalars */
    if (fine && xdi_cuda_team_thread<TEAM>() == 0)
        xd_loss_mixture_scalars(&a, r, totals.sum[XD_LOSS_TEACHER_MIXTURE],
                                      totals.sum[XD_LOSS_STUDENT_MIXTURE], a.row + r);
    xdi_cuda_team_sync<TEAM>();
}

template <typename X, typename Y, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_loss_fused_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool counts = a.row_scale[r] != 0.0;
    double ref[XD_LOSS_REFERENCES] = {}, total[XD_LOSS_SUMS] = {};
    if (counts) xdi_cuda_loss_sweep_row<X, Y, TEAM>(a, r, ref, total);
    if (a.vocab.shards == 1) {
        xdi_cuda_loss_row_scalars<TEAM>(a, r, ref, total, counts);
        if (a.gradient.data) xdi_cuda_loss_grad_row<X, Y, TEAM>(a, r);
    } else if (xdi_cuda_team_thread<TEAM>() == 0) {
        for (int i = 0; i < XD_LOSS_REFERENCES; i++) a.references[r * XD_LOSS_REFERENCES + i] = ref[i];
        for (int i = 0; i < XD_LOSS_SUMS; i++) static_cast<double *>(a.sums)[r * XD_LOSS_SUMS + i] = total[i];
    }
}

static xd_result xdi_cuda_loss_fused(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               (xdi_cuda_loss_fused_kernel<X, Y, TEAM>), *a);
    })
}

/* ---- loading, also for loss.cu ---- */

template <typename X, typename Y, int TEAM> static xd_result xdi_cuda_loss_load_rows(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_stats_kernel<X, Y, true, TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_stats_kernel<X, Y, false, TEAM>));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_loss_grad_kernel<X, Y, TEAM>)));
    return xdi_cuda_load(ctx, xdi_cuda_loss_fused_kernel<X, Y, TEAM>);
}

template <int TEAM> static xd_result xdi_cuda_loss_load_team(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_references_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_kernel<true, TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_kernel<false, TEAM>));
    XD_TRY((xdi_cuda_loss_load_rows<float, float, TEAM>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<float, xdi_cuda_bf16, TEAM>(ctx)));
    XD_TRY((xdi_cuda_loss_load_rows<xdi_cuda_bf16, float, TEAM>(ctx)));
    return xdi_cuda_loss_load_rows<xdi_cuda_bf16, xdi_cuda_bf16, TEAM>(ctx);
}

static xd_result xdi_cuda_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_merge_references_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_combine_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_loss_mixture_combine_kernel));
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
