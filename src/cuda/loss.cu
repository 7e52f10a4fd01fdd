/* The losses over a row of logits: kernel/cpu/loss.c is the reference, kernel/loss.h has the formulas.
 *
 * references, stats, mixture: one read of the rows. grad: one read, one write; the gradient may be the student's
 * memory, each thread reads its eight columns before it writes them. Terms are f32, with base-2 exponentials; what is
 * summed over a row, and all that follows per row, is double. A probability below 2^-149 is 0 here. */

static __device__ inline bool xdi_cuda_loss_has_soft(const xd_loss_args &a) {
    return a.teacher.data && a.soft_weight != 0.0;
}

static __device__ inline bool xdi_cuda_loss_has_hard(const xd_loss_args &a) {
    return a.labels.data && a.hard_weight != 0.0;
}

/* ---- references: grid (rows / teams), block 256 ---- */

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_loss_references_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>(), columns = a.vocab.end - a.vocab.begin;
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool counts = a.row_scale[r] != 0.0, soft = counts && xdi_cuda_loss_has_soft(a);
    xdi_cuda_largest student = { 0.0f, 0, 0 }, teacher = { 0.0f, 0, 0 };
    if (counts) student = xdi_cuda_row_largest<TEAM>(a.student, r, columns);
    if (soft) teacher = xdi_cuda_row_largest<TEAM>(a.teacher, r, columns);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    double *ref = a.references + r * XD_LOSS_REFERENCES;
    const bool empty = student.arg == INT64_MAX;
    const double nan = (double)NAN;
    ref[XD_LOSS_MAX] = student.broken ? nan : (double)student.max;
    ref[XD_LOSS_ARG] = !counts ? 0.0 : empty ? -1.0 : (double)(student.arg + a.vocab.begin);
    ref[XD_LOSS_TEACHER_AT_ARG] = 0.0;
    if (soft)
        ref[XD_LOSS_TEACHER_AT_ARG] =
            empty ? -(double)INFINITY : (double)xdi_cuda_element(a.teacher, r, student.arg);
    ref[XD_LOSS_TEACHER_MAX] = teacher.broken ? nan : (double)teacher.max;
}

static xd_result xdi_cuda_loss_references(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_loss_references_kernel<TEAM>, *a);
    })
}

/* References of the whole row from those of all shards. */
static __device__ void xdi_cuda_loss_whole_reference(const xd_loss_args &a, int64_t r, double *ref) {
    xd_loss_no_reference(ref);
    XD_UNROLL_N(1)
    for (int i = 0; i < a.vocab.shards; i++)
        xd_loss_join_reference(ref, a.all_references + i * a.reference_stride + r * XD_LOSS_REFERENCES);
}

/* One thread per row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_loss_merge_references_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    double ref[XD_LOSS_REFERENCES]; /* one shard reads and writes the same memory */
    xdi_cuda_loss_whole_reference(a, r, ref);
    for (int i = 0; i < XD_LOSS_REFERENCES; i++) a.references[r * XD_LOSS_REFERENCES + i] = ref[i];
}

static xd_result xdi_cuda_loss_merge_references(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_merge_references_kernel,
                           *a);
}

/* ---- stats: grid (rows / teams), block 256 ---- */

enum { XDI_CUDA_LOSS_TERMS = XD_LOSS_LINEAR + 1 }; /* HARD .. LINEAR come from every column */

/* What the terms of a row are computed with. */
struct xdi_cuda_loss_row {
    float max, teacher_max, at_arg;
    float per_tau, hard_factor, soft_factor; /* 1 / tau, and log2(e) without and with it */
    bool hard, soft, uniform, shared;        /* shared: tau is 1, hard and soft have the same exponential */
    xd_divergence divergence;
};

/* Y is the teacher's type. */
template <typename Y>
static __device__ inline xdi_cuda_loss_row xdi_cuda_loss_row_of(const xd_loss_args &a, double max, double teacher_max,
                                                                double at_arg) {
    xdi_cuda_loss_row w;
    w.max = (float)max; /* logits are f32: exact */
    w.teacher_max = (float)teacher_max;
    w.at_arg = (float)at_arg;
    w.per_tau = xdi_cuda_factor(1.0 / a.temperature);
    w.hard_factor = (float)XDI_CUDA_LOG2E;
    w.soft_factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature);
    w.hard = xdi_cuda_held(xdi_cuda_loss_has_hard(a)) != 0;
    w.soft = xdi_cuda_is<Y>::GIVEN != 0;
    w.uniform = xdi_cuda_held(a.uniform_weight != 0.0) != 0;
    w.shared = xdi_cuda_held(a.temperature == 1.0) != 0;
    w.divergence = (xd_divergence)xdi_cuda_held((int)a.divergence);
    return w;
}

/* The term of CROSS at one column from dx = x - M and dy = y - N; 0 where the weighting probability is 0, so that 0 * infinity
 * never occurs. */
static __device__ inline float xdi_cuda_loss_cross(const xdi_cuda_loss_row &w, float e_s, float e_t, float dx,
                                                   float dy, float y) {
    switch (w.divergence) {
    case XD_KL_FORWARD: return e_t > 0.0f ? __fmul_rn(e_t, __fmul_rn(__fsub_rn(dy, dx), w.per_tau)) : 0.0f;
    case XD_SOFT_CE: return e_t > 0.0f ? __fmul_rn(e_t, __fmul_rn(dx, w.per_tau)) : 0.0f;
    case XD_KL_REVERSE:
        return e_s > 0.0f ? __fmul_rn(e_s, __fmul_rn(__fsub_rn(dx, __fsub_rn(y, w.at_arg)), w.per_tau))
                          : 0.0f;
    default: return 0.0f; /* JSD needs the normalisers first */
    }
}

/* Adds a power whose exponent is `difference`. The largest element's 1 is not added to the f32 part of the sum, so that the
 * other terms keep their digits: on nearly one-hot rows the gradient consists of them. */
template <typename Sums>
static __device__ inline void xdi_cuda_loss_add_power(Sums *sums, int which, float power, float difference) {
    if (difference == 0.0f)
        sums->add_wide(which, 1.0);
    else
        sums->add(which, power);
}

template <typename Sums>
static __device__ inline void xdi_cuda_loss_terms(const xdi_cuda_loss_row &w, float x, float y, Sums *sums) {
    const float dx = xdi_cuda_minus(x, w.max);
    const float e = w.hard || w.shared ? xdi_cuda_exp_of(dx, w.hard_factor) : 0.0f;
    if (w.hard) xdi_cuda_loss_add_power(sums, XD_LOSS_HARD, e, dx);
    if (w.hard && w.uniform)
        sums->add_wide(XD_LOSS_LINEAR, w.max == -INFINITY ? -(double)INFINITY : xd_sub((double)x, (double)w.max));
    if (!w.soft) return;
    const float dy = xdi_cuda_minus(y, w.teacher_max);
    const float e_s = w.shared ? e : xdi_cuda_exp_of(dx, w.soft_factor);
    const float e_t = xdi_cuda_exp_of(dy, w.soft_factor);
    xdi_cuda_loss_add_power(sums, XD_LOSS_SOFT, e_s, dx);
    xdi_cuda_loss_add_power(sums, XD_LOSS_TEACHER, e_t, dy);
    sums->add(XD_LOSS_CROSS, xdi_cuda_loss_cross(w, e_s, e_t, dx, dy, y));
}

/* Logits of either type. */
template <bool FIXED, int TEAM>
static __device__ inline void xdi_cuda_loss_stats_row(const xd_loss_args &a, int64_t r, const double *ref,
                                                      xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, FIXED> *sums) {
    xdi_cuda_loss_row w =
        xdi_cuda_loss_row_of<float>(a, ref[XD_LOSS_MAX], ref[XD_LOSS_TEACHER_MAX], ref[XD_LOSS_TEACHER_AT_ARG]);
    w.soft = xdi_cuda_loss_has_soft(a);
    const int64_t columns = a.vocab.end - a.vocab.begin;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns);
        xdi_cuda_eight y = {};
        if (w.soft) y = xdi_cuda_read_any(a.teacher, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < columns) xdi_cuda_loss_terms(w, x.at[i], y.at[i], sums);
        sums->end_eight();
    }
}

/* TARGET of the shard that owns the label. */
static __device__ inline double xdi_cuda_loss_target(const xd_loss_args &a, int64_t r, double max) {
    if (!xdi_cuda_loss_has_hard(a)) return 0.0;
    const int64_t target = xd_id_at(a.labels, r) - a.vocab.begin;
    if (target < 0 || target >= a.vocab.end - a.vocab.begin) return 0.0;
    const double x = (double)xdi_cuda_element(a.student, r, target);
    return max == -(double)INFINITY ? -(double)INFINITY : xd_sub(x, max);
}

static __device__ inline void xdi_cuda_loss_put(void *to,
                                                const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false>::totals &t,
                                                double target, bool broken) {
    double *sums = static_cast<double *>(to);
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) sums[i] = t.sum[i];
    sums[XD_LOSS_TARGET] = target;
    sums[XD_LOSS_BAD] = broken ? 1.0 : 0.0;
}

static __device__ inline void xdi_cuda_loss_put(void *to,
                                                const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, true>::totals &t,
                                                double target, bool broken) {
    xd_fixed *sums = static_cast<xd_fixed *>(to);
    xdi_cuda_misfits misfits = t.misfits;
    xd_fixed at_target = { 0, 0 };
    xdi_cuda_fixed_add(&at_target, target, &misfits);
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) xdi_cuda_fixed_put(&sums[i], t.sum[i]);
    xdi_cuda_fixed_put(&sums[XD_LOSS_TARGET], at_target);
    sums[XD_LOSS_BAD].high = misfits.infinite + (broken ? 1 : 0);
    sums[XD_LOSS_BAD].low = misfits.large;
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_loss_stats_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const double *ref = a.references + r * XD_LOSS_REFERENCES;
    const bool broken = isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX]);
    const bool counts = !broken && a.row_scale[r] != 0.0;
    xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, FIXED> mine;
    if (counts) xdi_cuda_loss_stats_row<FIXED, TEAM>(a, r, ref, &mine);
    const typename xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, FIXED>::totals totals =
        xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    const double target = counts ? xdi_cuda_loss_target(a, r, ref[XD_LOSS_MAX]) : 0.0;
    const size_t size = FIXED ? sizeof(xd_fixed) : sizeof(double);
    xdi_cuda_loss_put(static_cast<char *>(a.sums) + (size_t)r * XD_LOSS_SUMS * size, totals, target, broken);
}

static xd_result xdi_cuda_loss_stats(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_loss_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM), (xdi_cuda_loss_stats_kernel<false, TEAM>), *a);
    })
}

/* ---- combine: one thread per row, in double ---- */

static __device__ void xdi_cuda_loss_total_fixed(const xd_loss_args &a, int64_t r, double *total,
                                                 xd_loss_row *row) {
    const xd_fixed *all = static_cast<const xd_fixed *>(a.all_sums);
    for (int i = 0; i < XD_LOSS_SUMS; i++) {
        xd_fixed sum = { 0, 0 };
        for (int shard = 0; shard < a.vocab.shards; shard++) {
            const xd_fixed *part = all + shard * a.sums_stride + r * XD_LOSS_SUMS + i;
            sum.high += part->high;
            sum.low += part->low;
        }
        if (i == XD_LOSS_BAD && sum.low > 0) row->finding = (int)XD_ROW_OVERFLOW;
        if (i == XD_LOSS_BAD && sum.high > 0) row->finding = (int)XD_ROW_NOT_FINITE;
        total[i] = xd_fixed_read(sum);
    }
}

static __device__ void xdi_cuda_loss_total_plain(const xd_loss_args &a, int64_t r, const double *ref,
                                                 double *total) {
    const double *all = static_cast<const double *>(a.all_sums);
    for (int i = 0; i < XD_LOSS_SUMS; i++) total[i] = 0.0;
    XD_UNROLL_N(1)
    for (int i = 0; i < a.vocab.shards; i++) {
        const double *own = a.all_references + i * a.reference_stride + r * XD_LOSS_REFERENCES;
        const double *sums = all + i * a.sums_stride + r * XD_LOSS_SUMS;
        const int64_t begin = a.vocab.offsets[i], end = a.vocab.offsets[i + 1];
        xd_loss_rescale(&a, ref, own, sums, end - begin, total);
        const int64_t label = xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1;
        if (label >= begin && label < end)
            total[XD_LOSS_TARGET] = sums[XD_LOSS_TARGET] + (own[XD_LOSS_MAX] - ref[XD_LOSS_MAX]);
    }
    if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) total[XD_LOSS_BAD] += 1.0;
}

/* The scalars of a row from the references and sums of all of it. */
static __device__ inline void xdi_cuda_loss_scalars(const xd_loss_args &a, int64_t r, const double *ref,
                                                    const double *total, xd_loss_row *row) {
    xd_loss_take_references(ref, row);
    const int64_t label = a.labels.data ? xd_id_at(a.labels, r) : 0;
    if (label < 0 || label >= a.vocab.size) {
        row->finding = (int)XD_ROW_LABEL;
        return;
    }
    xd_loss_scalars(&a, xdi_cuda_loss_has_hard(a), xdi_cuda_loss_has_soft(a), a.vocab.size, total, row);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_loss_combine_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    xd_loss_row row;
    memset(&row, 0, sizeof row);
    if (a.row_scale[r] != 0.0) {
        double total[XD_LOSS_SUMS], ref[XD_LOSS_REFERENCES];
        xdi_cuda_loss_whole_reference(a, r, ref);
        if (a.fixed)
            xdi_cuda_loss_total_fixed(a, r, total, &row);
        else
            xdi_cuda_loss_total_plain(a, r, ref, total);
        xdi_cuda_loss_scalars(a, r, ref, total, &row);
        xd_loss_settle(&a, r, &row);
    }
    a.row[r] = row;
}

static xd_result xdi_cuda_loss_combine(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_combine_kernel, *a);
}

/* ---- probabilities of a row after combine ---- */

/* Probabilities come as e^(x - M) times the inverse of the whole sum: the logarithm of a large sum has too few digits
 * in f32. d is the logarithm of teacher/student. */
struct xdi_cuda_loss_scales {
    xdi_cuda_loss_row row;
    float hard_inverse, soft_inverse, teacher_inverse;
    float log_gap; /* ln of the student's sum less that of the teacher's */
    float beta, top, mean;
};

template <typename Y>
static __device__ inline xdi_cuda_loss_scales xdi_cuda_loss_scales_of(const xd_loss_args &a, const xd_loss_row &row) {
    xdi_cuda_loss_scales s;
    s.row = xdi_cuda_loss_row_of<Y>(a, row.max, row.teacher_max, row.teacher_at_arg);
    s.hard_inverse = s.row.hard ? (float)exp(-row.hard_log) : 0.0f;
    s.soft_inverse = s.row.soft ? (float)exp(-row.soft_log) : 0.0f;
    s.teacher_inverse = s.row.soft ? (float)exp(-row.teacher_log) : 0.0f;
    s.log_gap = (float)(row.soft_log - row.teacher_log);
    s.beta = (float)a.beta;
    s.top = (float)row.top;
    s.mean = (float)row.mean;
    return s;
}

/* xd_log_ratios in f32, without branches. With a = |d| one of the two is -ln(1 + u), u = w (e^-a - 1), w the weight of what
 * is less probable, and the other is d away. For small a, where a logarithm near 1 has no digits, by series. */
static __device__ inline void xdi_cuda_loss_log_ratios_of(float d, float beta, float *student,
                                                          float *teacher) {
    const float a = fabsf(d), rest = __fsub_rn(1.0f, beta), less = d > 0.0f ? rest : beta;
    const float more = d > 0.0f ? beta : rest;
    const float e = xdi_cuda_power(__fmul_rn(a, -(float)XDI_CUDA_LOG2E));
    const float direct = __fmul_rn(xdi_cuda_log2(__fmaf_rn(less, e, more)), -0.69314718f);
    float u = __fmaf_rn(a, 1.0f / 5040.0f, -1.0f / 720.0f);
    u = __fmaf_rn(a, u, 1.0f / 120.0f);
    u = __fmaf_rn(a, u, -1.0f / 24.0f);
    u = __fmaf_rn(a, u, 1.0f / 6.0f);
    u = __fmaf_rn(a, u, -0.5f);
    u = __fmul_rn(__fmul_rn(less, -a), __fmaf_rn(a, u, 1.0f)); /* w (e^-a - 1) */
    const float z = xdi_cuda_ratio(u, __fadd_rn(2.0f, u)), zz = __fmul_rn(z, z);
    float series = __fmaf_rn(zz, 1.0f / 9.0f, 1.0f / 7.0f);
    series = __fmaf_rn(zz, series, 0.2f);
    series = __fmaf_rn(zz, series, 1.0f / 3.0f);
    series = __fmul_rn(__fmul_rn(-2.0f, z), __fmaf_rn(zz, series, 1.0f)); /* -2 artanh(z) = -ln(1 + u) */
    const float first = a < 0.5f ? series : direct;
    *student = d > 0.0f ? __fsub_rn(first, d) : first;
    *teacher = d > 0.0f ? first : __fadd_rn(first, d);
}

static __device__ inline float xdi_cuda_loss_log_ratio(const xdi_cuda_loss_scales &s, float dx, float dy) {
    return __fmaf_rn(__fsub_rn(dy, dx), s.row.per_tau, s.log_gap);
}

/* ---- mixture (JSD): grid (rows / teams), block 256 ---- */

template <typename Sums>
static __device__ inline void xdi_cuda_loss_mixture_terms(const xdi_cuda_loss_scales &s, float x, float y,
                                                          Sums *sums) {
    const float dx = __fsub_rn(x, s.row.max), dy = __fsub_rn(y, s.row.teacher_max);
    const float p = __fmul_rn(xdi_cuda_exp_of(dx, s.row.soft_factor), s.soft_inverse);
    const float q = __fmul_rn(xdi_cuda_exp_of(dy, s.row.soft_factor), s.teacher_inverse);
    float student, teacher;
    xdi_cuda_loss_log_ratios_of(xdi_cuda_loss_log_ratio(s, dx, dy), s.beta, &student, &teacher);
    sums->add(XD_LOSS_TEACHER_MIXTURE, q > 0.0f ? __fmul_rn(q, teacher) : 0.0f);
    sums->add(XD_LOSS_STUDENT_MIXTURE, p > 0.0f ? __fmul_rn(p, __fsub_rn(student, s.top)) : 0.0f);
}

template <bool FIXED, int TEAM>
static __device__ inline typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::totals
xdi_cuda_loss_mixture_row(const xd_loss_args &a, int64_t r, bool counts) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    const xdi_cuda_loss_scales s = xdi_cuda_loss_scales_of<float>(a, a.row[r]); /* a teacher of either type */
    xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED> mine;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); counts && c < columns;
         c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns);
        const xdi_cuda_eight y = xdi_cuda_read_any(a.teacher, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i < columns) xdi_cuda_loss_mixture_terms(s, x.at[i], y.at[i], &mine);
        mine.end_eight();
    }
    return xdi_cuda_team_totals<TEAM>(mine);
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_loss_mixture_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const bool counts = a.row_scale[r] != 0.0 && a.row[r].finding == (int)XD_ROW_FINE;
    const typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::totals totals =
        xdi_cuda_loss_mixture_row<FIXED, TEAM>(a, r, counts);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::sum_type *to =
        static_cast<typename xdi_cuda_sums<XD_LOSS_MIXTURES, FIXED>::sum_type *>(a.mixtures) +
        r * XD_LOSS_MIXTURES;
    for (int i = 0; i < XD_LOSS_MIXTURES; i++) to[i] = totals.sum[i];
}

static xd_result xdi_cuda_loss_mixture(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_loss_mixture_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM), (xdi_cuda_loss_mixture_kernel<false, TEAM>), *a);
    })
}

static __device__ double xdi_cuda_loss_mixture_total(const xd_loss_args &a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a.vocab.shards; i++) {
        const int64_t at = (i * a.student.rows + r) * XD_LOSS_MIXTURES + which;
        if (a.fixed) {
            exact.high += static_cast<const xd_fixed *>(a.all_mixtures)[at].high;
            exact.low += static_cast<const xd_fixed *>(a.all_mixtures)[at].low;
        } else {
            total += static_cast<const double *>(a.all_mixtures)[at];
        }
    }
    return a.fixed ? xd_fixed_read(exact) : total;
}

/* One thread per row. */
static __global__ void XDI_CUDA_KERNEL
xdi_cuda_loss_mixture_combine_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows || a.row_scale[r] == 0.0 || a.row[r].finding != (int)XD_ROW_FINE) return;
    xd_loss_mixture_scalars(&a, r, xdi_cuda_loss_mixture_total(a, r, XD_LOSS_TEACHER_MIXTURE),
                                  xdi_cuda_loss_mixture_total(a, r, XD_LOSS_STUDENT_MIXTURE), a.row + r);
}

static xd_result xdi_cuda_loss_mixture_combine(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_loss_mixture_combine_kernel,
                           *a);
}

/* ---- grad: grid (rows / teams), block 256 ---- */

/* Weights of the losses in a row's gradient, including its scale. */
struct xdi_cuda_loss_weights {
    float hard, soft; /* of p, and of the divergence's gradient */
    float uniform;    /* what hard subtracts everywhere; at the label see xdi_cuda_loss_column */
};

/* d soft / d (x / tau) of eight columns; *e has e^(dx / tau) and becomes the gradient. What the call has is asked once for
 * all of them: a branch for each costs as much as its arithmetic. */
static __device__ inline void xdi_cuda_loss_soft_gradient(const xdi_cuda_loss_scales &s, const xdi_cuda_eight &dx,
                                                          const xdi_cuda_eight &y, xdi_cuda_eight *e) {
    const float rest = __fsub_rn(1.0f, s.beta);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) e->at[i] = __fmul_rn(e->at[i], s.soft_inverse);
    if (s.row.divergence == XD_KL_REVERSE) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float p = e->at[i], gap = __fsub_rn(dx.at[i], __fsub_rn(y.at[i], s.row.at_arg));
            e->at[i] = p > 0.0f ? __fmul_rn(p, __fmaf_rn(gap, s.row.per_tau, -s.mean)) : 0.0f;
        }
    } else if (s.row.divergence == XD_JSD) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float p = e->at[i], dy = __fsub_rn(y.at[i], s.row.teacher_max);
            float student, teacher;
            xdi_cuda_loss_log_ratios_of(xdi_cuda_loss_log_ratio(s, dx.at[i], dy), s.beta, &student, &teacher);
            const float slope = __fsub_rn(__fsub_rn(student, s.top), s.mean);
            e->at[i] = p > 0.0f ? __fmul_rn(__fmul_rn(p, rest), slope) : 0.0f;
        }
    } else {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float q = xdi_cuda_exp_of(__fsub_rn(y.at[i], s.row.teacher_max), s.row.soft_factor);
            e->at[i] = __fmaf_rn(-q, s.teacher_inverse, e->at[i]);
        }
    }
}

static __device__ inline xdi_cuda_eight xdi_cuda_loss_gradient(const xdi_cuda_loss_scales &s,
                                                               const xdi_cuda_loss_weights &w,
                                                               const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
    xdi_cuda_eight dx, e = {}, g = {};
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) dx.at[i] = __fsub_rn(x.at[i], s.row.max);
    if (s.row.hard || s.row.shared) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) e.at[i] = xdi_cuda_exp_of(dx.at[i], s.row.hard_factor);
    }
    if (s.row.hard) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            g.at[i] = __fmul_rn(w.hard, __fsub_rn(__fmul_rn(e.at[i], s.hard_inverse), w.uniform));
    }
    if (!s.row.soft) return g;
    if (!s.row.shared) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) e.at[i] = xdi_cuda_exp_of(dx.at[i], s.row.soft_factor);
    }
    xdi_cuda_loss_soft_gradient(s, dx, y, &e);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) g.at[i] = __fmaf_rn(w.soft, e.at[i], g.at[i]);
    return g;
}

/* A column that may hold nearly all probability, where 1 - p has no digits in f32: the label's, or the student's most
 * probable one. Its gradient is double, from logits that are read before the row is overwritten. */
struct xdi_cuda_loss_column {
    int64_t at; /* -1: not on this shard */
    double x, y;
};

static __device__ inline xdi_cuda_loss_column xdi_cuda_loss_column_of(const xd_loss_args &a, int64_t r,
                                                                      int64_t id) {
    xdi_cuda_loss_column column = { -1, 0.0, 0.0 };
    if (id < a.vocab.begin || id >= a.vocab.end) return column;
    column.at = id - a.vocab.begin;
    column.x = (double)xdi_cuda_element(a.student, r, column.at);
    if (a.teacher.data) column.y = (double)xdi_cuda_element(a.teacher, r, column.at);
    return column;
}

/* xdi_loss_gradient_at of kernel/cpu/loss.c. */
XDI_CUDA_APART __device__ double xdi_cuda_loss_gradient_at(const xd_loss_args &a, int64_t r, const xd_loss_row &row,
                                                           const xdi_cuda_loss_column &column) {
    double g = 0.0;
    if (xdi_cuda_loss_has_hard(a))
        g = xd_loss_hard_gradient(&a, &row, column.x, column.at + a.vocab.begin == xd_id_at(a.labels, r));
    if (xdi_cuda_loss_has_soft(a))
        g = xd_loss_add_soft(&a, g, xd_loss_soft_gradient(&a, &row, column.x, column.y));
    return xd_mul(a.row_scale[r], g);
}

template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_grad_columns(const xd_loss_args &a, int64_t r,
                                                         const xd_loss_row &row, int64_t columns) {
    const xdi_cuda_loss_scales s = xdi_cuda_loss_scales_of<Y>(a, row);
    const xdi_cuda_loss_weights w = { (float)(a.row_scale[r] * a.hard_weight),
                                      (float)(a.row_scale[r] * a.soft_weight / a.temperature),
                                      (float)a.uniform_weight };
    const xdi_cuda_line<X> student = xdi_cuda_line<X>::of(a.student, r);
    const xdi_cuda_line<Y> teacher = xdi_cuda_line<Y>::of(a.teacher, r);
    /* Backwards: what was read last is still in the cache. At the end what is not whole. */
    const int64_t width = a.gradient.cols, step = XDI_CUDA_EIGHT * TEAM, first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    void *gradient = xdi_cuda_aligned_row(a.gradient, r);
    const bool aligned = gradient && xdi_cuda_is_aligned16(student.at) && xdi_cuda_is_aligned16(teacher.at);
    const bool wide = xdi_cuda_held(a.gradient.dtype == XD_DTYPE_F32) != 0;
    const int whole = aligned ? (int)((columns < width ? columns : width) / step) : 0;
    const int64_t last = first + (whole - 1) * step;
    xdi_cuda_in_memory::walk(
        student, teacher, last, -step, whole, xdi_cuda_steps_of(first, width, step),
        [&](int k, xdi_cuda_eight *x, xdi_cuda_eight *y) {
            *x = student.eight(first + k * step, columns, 0.0f);
            *y = teacher.eight(first + k * step, columns, 0.0f);
        },
        [&](int k, const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
            const int64_t c = first + k * step;
            xdi_cuda_eight g = xdi_cuda_loss_gradient(s, w, x, y);
            if (k >= whole) {
                XD_UNROLL
                for (int i = 0; i < XDI_CUDA_EIGHT; i++) g.at[i] = c + i < columns ? g.at[i] : 0.0f;
                xdi_cuda_write_any(a.gradient, r, c, width, g);
            } else if (wide) {
                xdi_cuda_write_whole(static_cast<float *>(gradient) + last - k * step, g);
            } else {
                xdi_cuda_write_whole(static_cast<xdi_cuda_bf16 *>(gradient) + last - k * step, g);
            }
        });
}

template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_grad_row(const xd_loss_args &a, int64_t r) {
    const xd_loss_row row = a.row[r];
    const bool counts = a.row_scale[r] != 0.0 && row.finding == (int)XD_ROW_FINE;
    xdi_cuda_loss_column exact[2] = { { -1, 0.0, 0.0 }, { -1, 0.0, 0.0 } };
    if (counts && xdi_cuda_team_thread<TEAM>() == 0) {
        exact[0] = xdi_cuda_loss_column_of(a, r, (int64_t)row.argmax);
        exact[1] = xdi_cuda_loss_column_of(a, r, xdi_cuda_loss_has_hard(a) ? xd_id_at(a.labels, r) : -1);
    }
    xdi_cuda_team_sync<TEAM>(); /* now the row may be overwritten */
    xdi_cuda_loss_grad_columns<X, Y, TEAM>(a, r, row, counts ? a.vocab.end - a.vocab.begin : 0);
    xdi_cuda_team_sync<TEAM>();
    XD_UNROLL
    for (int i = 0; i < 2; i++)
        if (exact[i].at >= 0)
            xdi_cuda_set_element(a.gradient, r, exact[i].at,
                                 (float)xdi_cuda_loss_gradient_at(a, r, row, exact[i]));
}

/* As many blocks on a multiprocessor as registers allow without spilling, so that some load while others compute. */
template <typename Y> struct xdi_cuda_loss_blocks {
    enum { LEAST = xdi_cuda_is<Y>::GIVEN ? 2 : 4 };
};

template <typename X, typename Y, int TEAM>
static __global__ void __launch_bounds__(XDI_CUDA_TEAM_BLOCK, xdi_cuda_loss_blocks<Y>::LEAST)
xdi_cuda_loss_grad_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r < a.student.rows) xdi_cuda_loss_grad_row<X, Y, TEAM>(a, r); /* the whole team returns */
}

static xd_result xdi_cuda_loss_grad(const xd_launch *launch, const xd_loss_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               (xdi_cuda_loss_grad_kernel<X, Y, TEAM>), *a);
    })
}
