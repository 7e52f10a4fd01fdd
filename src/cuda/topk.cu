/* Top-k losses: kernel/cpu/topk.c is the reference. The columns outside a row's ids are summed like the other losses,
 * eight at a time in f32; the k + 1 entries of a row belong to one warp and are double throughout. */

static __device__ inline double xdi_cuda_warp_sum(double value) {
    return xdi_cuda_warp_reduce(value, xdi_cuda_add());
}

/* ---- maxima: grid (rows / teams), block 256 ---- */

template <int TEAM, typename T>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_maxima_kernel(const __grid_constant__ xd_topk_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    const int64_t columns = a.row_scale[r] != 0.0 ? a.vocab.end - a.vocab.begin : 0;
    xdi_cuda_places<T, true> places;
    xdi_cuda_each_eight<TEAM>(xdi_cuda_row<T>(a.logits, r), columns,
                              [&](const xdi_cuda_raw<T> &raw, int64_t) { places.see(raw); });
    const float max = xdi_cuda_team_reduce<TEAM>(xdi_cuda_largest_of(places), -INFINITY, xdi_cuda_larger_float<true>());
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    a.maxima[r] = a.row_scale[r] == 0.0 ? 0.0 : max < INFINITY ? (double)max : (double)NAN;
}

static xd_result xdi_cuda_topk_maxima(const xd_launch *launch, const xd_topk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_LOGITS(a->logits.dtype, T, {
        XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
            return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                                   (xdi_cuda_topk_maxima_kernel<TEAM, T>), *a);
        })
    })
}

/* ---- stats: grid (rows / teams), block 256; one read of the rows where the sums outside are wanted ---- */

enum { XDI_CUDA_TOPK_OUTSIDE, XDI_CUDA_TOPK_ENTROPY, XDI_CUDA_TOPK_TERMS };

/* Reads the logits at this shard's ids and puts their columns into order[], ascending: each finds its rank. Returns how many
 * there are. */
template <int TEAM>
static __device__ inline int64_t xdi_cuda_topk_inside(const xd_topk_args &a, int64_t r, bool counts) {
    const int64_t *ids = a.ids + r * a.k;
    int64_t n = 0;
    for (int64_t j = xdi_cuda_team_thread<TEAM>(); j < a.k; j += TEAM) {
        const bool inside = counts && ids[j] >= a.vocab.begin && ids[j] < a.vocab.end;
        int64_t rank = 0;
        a.values[r * a.k + j] = inside ? (double)xdi_cuda_element(a.logits, r, ids[j] - a.vocab.begin) : 0.0;
        if (!inside) continue;
        n++;
        for (int64_t i = 0; i < a.k; i++)
            rank += ids[i] >= a.vocab.begin && (ids[i] < ids[j] || (ids[i] == ids[j] && i < j));
        a.order[r * a.k + rank] = ids[j] - a.vocab.begin;
    }
    n = xdi_cuda_team_reduce<TEAM>(n, (int64_t)0, xdi_cuda_add());
    xdi_cuda_team_sync<TEAM>();
    return n;
}

template <bool FIXED, int TEAM>
static __device__ inline void xdi_cuda_topk_outside(const xd_topk_args &a, int64_t r, int64_t inside,
                                                    xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, FIXED> *sums) {
    const int64_t columns = a.vocab.end - a.vocab.begin, *skipped = a.order + r * a.k;
    const float max = (float)a.maxima[r], per_tau = xdi_cuda_factor(1.0 / a.temperature);
    const float factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature);
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.logits, r, c, columns);
        int64_t next = xdi_cuda_lower_bound(skipped, inside, c);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            while (next < inside && skipped[next] < c + i) next++;
            if (c + i >= columns || (next < inside && skipped[next] == c + i)) continue;
            const float dx = xdi_cuda_minus(x.at[i], max), e = xdi_cuda_exp_of(dx, factor);
            sums->add(XDI_CUDA_TOPK_OUTSIDE, e);
            if (e > 0.0f) sums->add(XDI_CUDA_TOPK_ENTROPY, __fmul_rn(e, __fmul_rn(dx, per_tau)));
        }
        sums->end_eight();
    }
}

static __device__ inline void xdi_cuda_topk_put(void *to,
                                                const xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, false>::totals &t,
                                                double max, bool broken) {
    double *sums = static_cast<double *>(to);
    sums[XD_TOPK_MAX] = max;
    sums[XD_TOPK_OUTSIDE] = t.sum[XDI_CUDA_TOPK_OUTSIDE];
    sums[XD_TOPK_ENTROPY] = t.sum[XDI_CUDA_TOPK_ENTROPY];
    sums[XD_TOPK_BAD] = broken ? 1.0 : 0.0;
}

static __device__ inline void
xdi_cuda_topk_put(void *to, const xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, true>::totals &t, double, bool broken) {
    xd_fixed *sums = static_cast<xd_fixed *>(to);
    sums[XD_TOPK_MAX].high = sums[XD_TOPK_MAX].low = 0;
    xdi_cuda_fixed_put(&sums[XD_TOPK_OUTSIDE], t.sum[XDI_CUDA_TOPK_OUTSIDE]);
    xdi_cuda_fixed_put(&sums[XD_TOPK_ENTROPY], t.sum[XDI_CUDA_TOPK_ENTROPY]);
    sums[XD_TOPK_BAD].high = t.misfits.infinite + (broken ? 1 : 0);
    sums[XD_TOPK_BAD].low = t.misfits.large;
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_topk_stats_kernel(const __grid_constant__ xd_topk_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    const bool broken = isnan(a.maxima[r]), counts = !broken && a.row_scale[r] != 0.0;
    const int64_t inside = xdi_cuda_topk_inside<TEAM>(a, r, counts);
    xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, FIXED> mine;
    if (counts && a.outside) xdi_cuda_topk_outside<FIXED, TEAM>(a, r, inside, &mine);
    const typename xdi_cuda_sums<XDI_CUDA_TOPK_TERMS, FIXED>::totals totals =
        xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    const size_t size = FIXED ? sizeof(xd_fixed) : sizeof(double);
    xdi_cuda_topk_put(static_cast<char *>(a.sums) + (size_t)r * XD_TOPK_SUMS * size, totals,
                      counts ? a.maxima[r] : 0.0, broken);
}

static xd_result xdi_cuda_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_topk_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM), (xdi_cuda_topk_stats_kernel<false, TEAM>), *a);
    })
}

/* ---- merge: one warp per row ---- */

static __device__ inline void xdi_cuda_topk_merge_fixed(const xd_topk_args &a, int64_t r,
                                                        xd_topk_side *side) {
    xd_fixed sum[XD_TOPK_SUMS];
    memset(sum, 0, sizeof sum);
    for (int i = 0; i < a.vocab.shards; i++)
        for (int which = 0; which < XD_TOPK_SUMS; which++) {
            const int64_t *part = a.all + i * a.all_stride + (r * XD_TOPK_SUMS + which) * 2;
            sum[which].high += part[0];
            sum[which].low += part[1];
        }
    side->max = a.maxima[r];
    side->outside = xd_fixed_read(sum[XD_TOPK_OUTSIDE]);
    side->entropy = xd_fixed_read(sum[XD_TOPK_ENTROPY]);
    if (sum[XD_TOPK_BAD].low > 0) side->finding = (int)XD_ROW_OVERFLOW;
    if (sum[XD_TOPK_BAD].high > 0) side->finding = (int)XD_ROW_NOT_FINITE;
}

static __device__ inline double xdi_cuda_topk_part(const xd_topk_args &a, int shard, int64_t r, int which) {
    return __longlong_as_double(a.all[shard * a.all_stride + r * XD_TOPK_SUMS + which]);
}

static __device__ inline void xdi_cuda_topk_merge_plain(const xd_topk_args &a, int64_t r,
                                                        xd_topk_side *side) {
    side->max = -(double)INFINITY;
    for (int i = 0; i < a.vocab.shards; i++) {
        const double max = xdi_cuda_topk_part(a, i, r, XD_TOPK_MAX);
        if (xdi_cuda_topk_part(a, i, r, XD_TOPK_BAD) != 0.0) side->finding = (int)XD_ROW_NOT_FINITE;
        if (max > side->max) side->max = max;
    }
    if (side->finding != (int)XD_ROW_FINE) side->max = (double)NAN;
    for (int i = 0; i < a.vocab.shards; i++) {
        xd_topk_rescale(side, a.temperature, xdi_cuda_topk_part(a, i, r, XD_TOPK_MAX),
                        xdi_cuda_topk_part(a, i, r, XD_TOPK_OUTSIDE),
                        xdi_cuda_topk_part(a, i, r, XD_TOPK_ENTROPY));
    }
}

/* Collects the logits at all ids; true when an id is out of range or twice in the row. */
static __device__ inline bool xdi_cuda_topk_merge_values(const xd_topk_args &a, int64_t r) {
    const int64_t *ids = a.ids + r * a.k;
    const int64_t sums = a.logits.rows * XD_TOPK_SUMS * (a.fixed ? 2 : 1); /* words before the values */
    int wrong = 0;
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP) {
        int shard = 0;
        if (ids[j] >= a.vocab.size) wrong = 1;
        if (ids[j] < 0 || ids[j] >= a.vocab.size) continue;
        while (ids[j] >= a.vocab.offsets[shard + 1]) shard++;
        a.values[r * a.k + j] = __longlong_as_double(a.all[shard * a.all_stride + sums + r * a.k + j]);
        for (int64_t i = 0; i < j; i++)
            if (ids[i] == ids[j]) wrong = 1;
    }
    return __any_sync(0xffffffffu, wrong) != 0;
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_merge_kernel(const __grid_constant__ xd_topk_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    const bool counts = a.row_scale[r] != 0.0;
    const bool wrong = counts && xdi_cuda_topk_merge_values(a, r);
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() != 0) return;
    xd_topk_side side;
    memset(&side, 0, sizeof side);
    if (counts && a.fixed) xdi_cuda_topk_merge_fixed(a, r, &side);
    if (counts && !a.fixed) xdi_cuda_topk_merge_plain(a, r, &side);
    if (wrong) side.finding = (int)XD_ROW_LABEL;
    if (counts && side.max == -(double)INFINITY) side.finding = (int)XD_ROW_NOT_FINITE;
    a.side[r] = side;
}

static xd_result xdi_cuda_topk_merge(const xd_launch *launch, const xd_topk_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_topk_merge_kernel, *a);
}

/* ---- divergence: one warp per row ---- */

/* One row for the divergence: entries j < k are the ids, the tail is one more entry. All lanes hold the same scalars; lane l
 * has the entries l, l + 32, ... */
struct xdi_cuda_topk_entries {
    double *s, *t; /* [k] logarithms */
    double *g;     /* [k] gradient with respect to the entries' logits */
    const int64_t *ids;
    int64_t k;
    double tail_t; /* logarithm of the teacher's tail */
    bool tail;     /* the outside is an entry of the divergence */
    xd_topk_masses at;
    double teacher_mass;
};

/* Not unrolled: its bodies have exponentials in double. */
#define XDI_CUDA_TOPK_EACH(e, j)                                                            \
    XD_UNROLL_N(1)                                                                          \
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < (e)->k; j += XDI_CUDA_WARP) \
        if ((e)->ids[j] >= 0)

/* values[] / temperature, normalised over the row's own entries. Returns ln of the sum, -infinity without entries. */
static __device__ inline double xdi_cuda_topk_normalise(const xdi_cuda_topk_entries *e, const double *values,
                                                        double temperature, double *out) {
    double max = -(double)INFINITY, sum = 0.0;
    XDI_CUDA_TOPK_EACH(e, j) if (values[j] > max) max = values[j];
    max = xdi_cuda_warp_reduce(max, xdi_cuda_larger());
    XDI_CUDA_TOPK_EACH(e, j) if (max > -(double)INFINITY) sum += exp((values[j] - max) / temperature);
    const double log_sum = log(xdi_cuda_warp_sum(sum));
    XDI_CUDA_TOPK_EACH(e, j) out[j] = (values[j] - max) / temperature - log_sum;
    return max / temperature + log_sum;
}

static __device__ inline double xdi_cuda_topk_mass(const xdi_cuda_topk_entries *e, const double *logs) {
    double sum = 0.0;
    XDI_CUDA_TOPK_EACH(e, j) sum += exp(logs[j]);
    return xdi_cuda_warp_sum(sum);
}

static __device__ inline void xdi_cuda_topk_student_entries(const xd_topk_kl_args &a, int64_t r,
                                                            xdi_cuda_topk_entries *e) {
    const double *values = a.values + r * a.k;
    const xd_topk_side side = a.side[r];
    double inside = 0.0;
    XDI_CUDA_TOPK_EACH(e, j) inside += exp((values[j] - side.max) / a.temperature);
    inside = xdi_cuda_warp_sum(inside);
    e->at = xd_topk_student_masses(inside, &side, e->tail);
    if (a.mode == XD_TOPK_RENORMALISE) {
        xdi_cuda_topk_normalise(e, values, a.temperature, e->s);
    } else {
        XDI_CUDA_TOPK_EACH(e, j) e->s[j] = (values[j] - side.max) / a.temperature - e->at.log;
    }
}

static __device__ inline void xdi_cuda_topk_teacher_entries(const xd_topk_kl_args &a, int64_t r,
                                                            xdi_cuda_topk_entries *e) {
    const double *values = a.teacher_values + r * a.k;
    const double tau = a.teacher_temperature;
    const double sum = xdi_cuda_topk_normalise(e, values, tau, e->t);
    const xd_topk_teacher teacher =
        xd_topk_teacher_masses(sum, a.teacher_side ? a.teacher_side + r : nullptr, tau,
                               !a.teacher_side && a.teacher_log ? a.teacher_log[r] : 0.0);
    if (a.mode != XD_TOPK_RENORMALISE && a.mode != XD_TOPK_ZERO_OUTSIDE) {
        XDI_CUDA_TOPK_EACH(e, j) e->t[j] = values[j] / tau - teacher.whole;
    }
    e->teacher_mass = teacher.mass;
    e->tail_t = teacher.tail;
}

/* Forward KL of the entries: sum T (t - s), gradient S sum(T) - T. */
static __device__ inline void xdi_cuda_topk_forward(xdi_cuda_topk_entries *e, double weight,
                                                    xd_topk_row *row) {
    double mass = xdi_cuda_topk_mass(e, e->t), loss = 0.0;
    double at_tail = 0.0; /* the tail's gradient is that of the outside */
    if (e->at.tail_flows) mass = xd_add(mass, exp(e->tail_t));
    XDI_CUDA_TOPK_EACH(e, j) loss = xd_add(loss, xd_topk_forward(e->s[j], e->t[j], weight, mass, &e->g[j]));
    row->loss = xd_add(row->loss, xdi_cuda_warp_sum(loss));
    if (e->tail)
        row->loss = xd_add(row->loss, xd_topk_forward(e->at.tail, e->tail_t, weight, mass, &at_tail));
    row->outside = xd_add(row->outside, xd_topk_forward_outside(&e->at, weight, mass, exp(e->tail_t)));
}

/* The entry with the largest mass, the lowest index among equals. */
struct xdi_cuda_topk_most {
    double mass;
    int64_t j;
};
struct xdi_cuda_topk_most_join {
    __device__ xdi_cuda_topk_most operator()(const xdi_cuda_topk_most &a, const xdi_cuda_topk_most &b) const {
        return b.mass > a.mass || (b.mass == a.mass && b.j < a.j) ? b : a;
    }
};

/* Reverse KL and JSD: A = S r, gradient S ((r - c) - sum S (r - c)), with c the r of the entry with the largest mass, so that
 * nothing cancels on nearly one-hot rows. What is not an entry has A = 0: r = 0 beside r + 1 of the entries. */
static __device__ inline void xdi_cuda_topk_backward(xdi_cuda_topk_entries *e, bool zero_outside,
                                                     bool renormalised, double beta, double weight,
                                                     xd_topk_row *row) {
    const double one = beta == 1.0 && !zero_outside && !renormalised ? 1.0 : 0.0;
    double loss, outside = zero_outside ? 100.0 : 0.0, offset = outside, mean = 0.0, losses = 0.0;
    if (e->tail) {
        const double r = xd_topk_ratio(e->at.tail, e->tail_t, beta, &loss);
        row->loss = xd_add(row->loss, xd_mul(weight, loss));
        if (e->at.tail_flows) offset = outside = r + one;
    }
    xdi_cuda_topk_most most = { renormalised ? -1.0 : e->at.outside_mass, INT64_MAX };
    XDI_CUDA_TOPK_EACH(e, j) {
        const double mass = exp(e->s[j]);
        if (!(mass > most.mass)) continue;
        most.mass = mass;
        most.j = j;
    }
    most = xdi_cuda_warp_reduce(most, xdi_cuda_topk_most_join());
    if (most.j != INT64_MAX) offset = xd_topk_ratio(e->s[most.j], e->t[most.j], beta, &loss) + one;
    XDI_CUDA_TOPK_EACH(e, j) {
        const double r = xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one;
        losses = xd_add(losses, xd_mul(weight, loss));
        if (e->s[j] > -(double)INFINITY) mean = xd_add(mean, xd_mul(exp(e->s[j]), xd_sub(r, offset)));
    }
    row->loss += xdi_cuda_warp_sum(losses);
    mean = xdi_cuda_warp_sum(mean);
    if (!renormalised)
        mean = xd_add(mean, xd_topk_outside_mean(&e->at, outside, offset, zero_outside));
    XDI_CUDA_TOPK_EACH(e, j)
    e->g[j] = xd_add(e->g[j], xd_topk_backward(e->s[j], weight, xd_topk_ratio(e->s[j], e->t[j], beta, &loss) + one, offset, mean));
    if (!renormalised)
        row->outside = xd_add(row->outside, xd_mul(weight, xd_sub(xd_sub(outside, offset), mean)));
    if (zero_outside) xd_topk_zero_outside(&e->at, weight, row);
}

static __device__ inline void xdi_cuda_topk_divergence_row(const xd_topk_kl_args &a, int64_t r,
                                                           xdi_cuda_topk_entries *e, xd_topk_row *row) {
    const bool renormalised = a.mode == XD_TOPK_RENORMALISE, zero = a.mode == XD_TOPK_ZERO_OUTSIDE;
    const double beta = xd_topk_beta(a.divergence, a.beta);
    xdi_cuda_topk_student_entries(a, r, e);
    xdi_cuda_topk_teacher_entries(a, r, e);
    __syncwarp(); /* all lanes read the entry with the largest mass, which one lane wrote */
    const bool jsd = a.divergence == XD_JSD;
    if (!jsd && beta != 1.0) xdi_cuda_topk_forward(e, 1.0 - beta, row);
    if (jsd || beta != 0.0) /* one call: a kernel has its code once */
        xdi_cuda_topk_backward(e, !jsd && zero, renormalised, jsd ? beta : 1.0, jsd ? 1.0 : beta, row);
    if (renormalised) row->outside = 0.0;
    xd_topk_close(&a, r, &e->at, e->teacher_mass, row);
}

static __device__ inline bool xdi_cuda_topk_has_entries(const xdi_cuda_topk_entries *e) {
    int any = 0;
    XDI_CUDA_TOPK_EACH(e, j) any = 1;
    return __any_sync(0xffffffffu, any) != 0;
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_topk_divergence_kernel(const __grid_constant__ xd_topk_kl_args a) {
    const int64_t r = xdi_cuda_team_row<XDI_CUDA_WARP>();
    if (r >= a.logits.rows) return;
    xd_topk_row row;
    xdi_cuda_topk_entries e;
    memset(&row, 0, sizeof row);
    memset(&e, 0, sizeof e);
    e.s = a.scratch + r * 3 * (a.k + 1);
    e.t = e.s + a.k;
    e.g = a.slots + r * a.k;
    e.ids = a.ids + r * a.k;
    e.k = a.k;
    e.tail = a.mode == XD_TOPK_TAIL;
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); j < a.k; j += XDI_CUDA_WARP) {
        e.g[j] = 0.0;
        e.s[j] = -(double)INFINITY;
    }
    row.finding = a.side[r].finding;
    if (a.teacher_side && row.finding == (int)XD_ROW_FINE) row.finding = a.teacher_side[r].finding;
    const bool counts = a.row_scale[r] != 0.0 && row.finding == (int)XD_ROW_FINE;
    if (row.finding == (int)XD_ROW_NOT_FINITE) row.max = xd_topk_reason(&a, r);
    if (xdi_cuda_topk_has_entries(&e) && counts) xdi_cuda_topk_divergence_row(a, r, &e, &row);
    if (a.row_scale[r] != 0.0) xd_topk_settle(&a, r, &row);
    const bool fine = row.finding == (int)XD_ROW_FINE;
    for (int64_t j = xdi_cuda_team_thread<XDI_CUDA_WARP>(); a.log_probs && j < a.k; j += XDI_CUDA_WARP)
        a.log_probs[r * a.k + j] = fine ? (float)e.s[j] : -INFINITY;
    if (xdi_cuda_team_thread<XDI_CUDA_WARP>() == 0) a.row[r] = row;
}

static xd_result xdi_cuda_topk_divergence(const xd_launch *launch, const xd_topk_kl_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, XDI_CUDA_WARP),
                           xdi_cuda_topk_divergence_kernel, *a);
}

/* ---- grad: grid (rows / teams), block 256; one read where the outside has a gradient, one write ---- */

/* The gradient outside the ids, p (outside + entropy ln p), times the row's scale. */
struct xdi_cuda_topk_line {
    float max, per_tau, factor, inverse, log; /* p = e^((x - max) / tau) inverse */
    float outside, entropy;
};

static __device__ inline float xdi_cuda_topk_outside_gradient(const xdi_cuda_topk_line &w, float x) {
    const float dx = __fsub_rn(x, w.max), p = __fmul_rn(xdi_cuda_exp_of(dx, w.factor), w.inverse);
    if (!(p > 0.0f)) return 0.0f;
    const float log_p = __fmaf_rn(dx, w.per_tau, -w.log);
    return __fmul_rn(p, w.entropy != 0.0f ? __fmaf_rn(w.entropy, log_p, w.outside) : w.outside);
}

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_grad_kernel(const __grid_constant__ xd_topk_kl_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.logits.rows) return;
    const xd_topk_row row = a.row[r];
    const bool counts = a.row_scale[r] != 0.0 && row.finding == (int)XD_ROW_FINE;
    const double scale = a.weight * a.row_scale[r] / a.temperature;
    const xdi_cuda_topk_line w = { (float)row.max,
                                   xdi_cuda_factor(1.0 / a.temperature),
                                   xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature),
                                   (float)exp(-row.log),
                                   (float)row.log,
                                   (float)(scale * row.outside),
                                   (float)(scale * row.entropy) };
    const int64_t columns = counts && (row.outside != 0.0 || row.entropy != 0.0) ? a.vocab.end - a.vocab.begin : 0;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < a.gradient.cols;
         c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight g = {};
        if (c < columns) {
            const xdi_cuda_eight x = xdi_cuda_read_any(a.logits, r, c, columns);
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                if (c + i < columns) g.at[i] = xdi_cuda_topk_outside_gradient(w, x.at[i]);
        }
        xdi_cuda_write_any(a.gradient, r, c, a.gradient.cols, g);
    }
    xdi_cuda_team_sync<TEAM>(); /* the ids' columns are written again */
    for (int64_t j = xdi_cuda_team_thread<TEAM>(); counts && j < a.k; j += TEAM) {
        const int64_t id = a.ids[r * a.k + j];
        if (id >= a.vocab.begin && id < a.vocab.end)
            xdi_cuda_set_element(a.gradient, r, id - a.vocab.begin, (float)(scale * a.slots[r * a.k + j]));
    }
}

static xd_result xdi_cuda_topk_grad(const xd_launch *launch, const xd_topk_kl_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->logits.rows, TEAM),
                               xdi_cuda_topk_grad_kernel<TEAM>, *a);
    })
}

/* ---- entries: one thread per entry ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_topk_entries_kernel(const __grid_constant__ xd_topk_entries_args a) {
    const int64_t i = xdi_cuda_flat_index();
    if (i >= a.count) return;
    const bool absent = a.values && a.values[i] == -INFINITY;
    const int64_t id = a.ids.data ? xd_id_at(a.ids, i) : 0;
    if (a.ids.data) a.entry_ids[i] = absent ? -1 : id < 0 || id > a.size ? a.size : id;
    a.entry_values[i] = a.values ? (double)a.values[i] : 0.0;
}

static xd_result xdi_cuda_topk_entries_run(const xd_launch *launch, const xd_topk_entries_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->count), xdi_cuda_topk_entries_kernel, *a);
}

/* ---- loading ---- */

template <int TEAM> static xd_result xdi_cuda_topk_load_team(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_topk_maxima_kernel<TEAM, float>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_topk_maxima_kernel<TEAM, xdi_cuda_bf16>)));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_stats_kernel<false, TEAM>));
    return xdi_cuda_load(ctx, xdi_cuda_topk_grad_kernel<TEAM>);
}

static xd_result xdi_cuda_topk_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_merge_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_divergence_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_topk_entries_kernel));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_topk_stats_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY(xdi_cuda_topk_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_topk_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}
