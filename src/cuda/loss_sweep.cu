/* References and sums of a row of logits, or of the part of one that a block of a cluster holds, in one read.
 *
 * The lanes of a warp sum relative to the largest elements that any of them has read; when a larger one comes, all of them
 * move to it together, which happens a few times in a row. What a call has, hard, soft, and which divergence, is asked once
 * for eight columns. A power of 1, that of the reference itself, is added apart from the others, so that these keep their
 * digits: on nearly one-hot rows the gradient consists of them.
 *
 * Nothing here looks for numbers that are not finite: a NaN makes the sum of the powers NaN, and infinity is the largest
 * element. */

/* The largest elements of a student's columns and where they are. */
struct xdi_cuda_summit {
    float max, teacher_max;
    float beside;  /* the teacher's logit at the student's largest; for KL_REVERSE */
    int32_t eight; /* the number of the eight columns that have the student's largest; INT32_MAX without columns */
};

struct xdi_cuda_summit_join {
    __device__ xdi_cuda_summit operator()(xdi_cuda_summit a, const xdi_cuda_summit &b) const {
        if (b.max > a.max || (b.max == a.max && b.eight < a.eight)) {
            a.max = b.max;
            a.beside = b.beside;
            a.eight = b.eight;
        }
        a.teacher_max = fmaxf(a.teacher_max, b.teacher_max);
        return a;
    }
};

/* A lane at work. The sums are relative to the references in `row`; LINEAR is the plain sum of x. */
struct xdi_cuda_loss_sweep {
    xdi_cuda_loss_row row;
    float base, teacher_base; /* the references; 0 instead of -infinity */
    xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false> sums;
    xdi_cuda_summit seen; /* by this lane */
};

/* How sums change with their references. */
struct xdi_cuda_loss_turn {
    double hard, student, teacher; /* what the sums of powers are multiplied by */
    double step;                   /* of CROSS, for a unit of what weights it */
};

/* e^x by one instruction, or exact. */
template <bool EXACT> static __device__ inline double xdi_cuda_loss_power_of(double x) {
    if (x == 0.0) return 1.0;
    return EXACT ? exp(x) : (double)xdi_cuda_exp_of((float)x, (float)XDI_CUDA_LOG2E);
}

template <bool EXACT>
static __device__ inline xdi_cuda_loss_turn xdi_cuda_loss_turn_to(const xdi_cuda_loss_row &from,
                                                                  const xdi_cuda_summit &to, double temperature) {
    const double shift = from.max == to.max ? 0.0 : (double)from.max - (double)to.max, z = shift / temperature;
    const double fall = from.teacher_max == to.teacher_max ? 0.0 : (double)from.teacher_max - (double)to.teacher_max;
    const double u = fall / temperature;
    xdi_cuda_loss_turn turn = { 1.0, 1.0, 1.0, z };
    if (from.hard) turn.hard = xdi_cuda_loss_power_of<EXACT>(shift);
    if (!from.soft) return turn;
    turn.student = xdi_cuda_loss_power_of<EXACT>(z);
    turn.teacher = xdi_cuda_loss_power_of<EXACT>(u);
    if (from.divergence == XD_KL_FORWARD) turn.step = u - z;
    if (from.divergence == XD_KL_REVERSE && from.at_arg != to.beside)
        turn.step -= ((double)from.at_arg - (double)to.beside) / temperature;
    return turn;
}

/* Adds what is summed in f32, which is done for sixteen columns together: a conversion to double costs as much as a power. */
static __device__ inline void xdi_cuda_loss_flush(xdi_cuda_loss_sweep *t) {
    XD_UNROLL
    for (int i = XD_LOSS_HARD; i <= XD_LOSS_CROSS; i++) {
        if (i == XD_LOSS_HARD ? !t->row.hard : !t->row.soft) continue;
        t->sums.add_wide(i, (double)t->sums.part[i]);
        t->sums.part[i] = 0.0f;
    }
}

/* Brings the sums to new references: xd_loss_rescale for one lane. Empty sums stay 0. */
template <bool EXACT>
static __device__ inline void xdi_cuda_loss_move(xdi_cuda_loss_sweep *t, double temperature, const xdi_cuda_summit &to) {
    double *sum = t->sums.whole.sum;
    const xdi_cuda_loss_turn turn = xdi_cuda_loss_turn_to<EXACT>(t->row, to, temperature);
    xdi_cuda_loss_flush(t);
    if (t->row.hard) sum[XD_LOSS_HARD] *= turn.hard;
    if (t->row.soft) {
        const bool reverse = t->row.divergence == XD_KL_REVERSE;
        const double mass = reverse ? sum[XD_LOSS_SOFT] : sum[XD_LOSS_TEACHER];
        const double factor = reverse ? turn.student : turn.teacher;
        sum[XD_LOSS_CROSS] = factor > 0.0 && mass > 0.0 ? factor * (sum[XD_LOSS_CROSS] + mass * turn.step) : 0.0;
        sum[XD_LOSS_SOFT] *= turn.student;
        sum[XD_LOSS_TEACHER] *= turn.teacher;
    }
    t->row.max = to.max;
    t->row.teacher_max = to.teacher_max;
    t->row.at_arg = to.beside;
    t->base = to.max == -INFINITY ? 0.0f : to.max;
    t->teacher_base = to.teacher_max == -INFINITY ? 0.0f : to.teacher_max;
}

/* What the lane has seen with these eight, whose largest are given; then the whole warp's references. Every lane calls it. */
static __device__ inline void xdi_cuda_loss_look(double temperature, const xdi_cuda_eight &x, const xdi_cuda_eight &y,
                                                 float max, float teacher_max, int64_t c, xdi_cuda_loss_sweep *t) {
    const bool higher = max > t->row.max || teacher_max > t->row.teacher_max;
    if (max > t->seen.max) {
        t->seen.max = max;
        t->seen.eight = (int32_t)(c / XDI_CUDA_EIGHT);
        if (t->row.divergence == XD_KL_REVERSE) {
            XD_UNROLL
            for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
                if (x.at[i] == max) t->seen.beside = y.at[i];
        }
    }
    t->seen.teacher_max = fmaxf(t->seen.teacher_max, teacher_max);
    if (__any_sync(0xffffffffu, higher))
        xdi_cuda_loss_move<false>(t, temperature, xdi_cuda_warp_reduce(t->seen, xdi_cuda_summit_join()));
}

/* Adds eight powers; `top`: one of them may be that of the reference. */
static __device__ inline void xdi_cuda_loss_add_powers(xdi_cuda_loss_sweep *t, int which, bool top,
                                                       const xdi_cuda_eight &power, const xdi_cuda_eight &difference) {
    if (!top) {
        t->sums.add(which, xdi_cuda_sum_of(power));
        return;
    }
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        xdi_cuda_loss_add_power(&t->sums, which, power.at[i], difference.at[i]);
}

/* The terms of CROSS, 0 where the weighting probability is 0; without the factor 1 / tau. */
static __device__ inline float xdi_cuda_loss_cross_of(const xdi_cuda_loss_row &w, const xdi_cuda_eight &e,
                                                      const xdi_cuda_eight &q, const xdi_cuda_eight &dx,
                                                      const xdi_cuda_eight &dy, const xdi_cuda_eight &y) {
    xdi_cuda_eight term;
    if (w.divergence == XD_KL_FORWARD) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            term.at[i] = q.at[i] > 0.0f ? __fmul_rn(q.at[i], __fsub_rn(dy.at[i], dx.at[i])) : 0.0f;
    } else if (w.divergence == XD_SOFT_CE) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) term.at[i] = q.at[i] > 0.0f ? __fmul_rn(q.at[i], dx.at[i]) : 0.0f;
    } else {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float gap = __fsub_rn(dx.at[i], __fsub_rn(y.at[i], w.at_arg));
            term.at[i] = e.at[i] > 0.0f ? __fmul_rn(e.at[i], gap) : 0.0f;
        }
    }
    return xdi_cuda_sum_of(term);
}

static __device__ inline xdi_cuda_eight xdi_cuda_differences_of(const xdi_cuda_eight &x, float base) {
    xdi_cuda_eight difference;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) difference.at[i] = __fsub_rn(x.at[i], base);
    return difference;
}

/* e^(difference / tau). */
static __device__ inline xdi_cuda_eight xdi_cuda_powers_of(const xdi_cuda_eight &difference, float factor) {
    xdi_cuda_eight power;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) power.at[i] = xdi_cuda_exp_of(difference.at[i], factor);
    return power;
}

/* Adds eight columns, -infinity where there is none. */
static __device__ inline void xdi_cuda_loss_take(xdi_cuda_loss_sweep *t, const xdi_cuda_eight &x, const xdi_cuda_eight &y,
                                                 bool top, bool teacher_top) {
    const xdi_cuda_eight dx = xdi_cuda_differences_of(x, t->base);
    xdi_cuda_eight e = {};
    if (t->row.hard || t->row.shared) e = xdi_cuda_powers_of(dx, t->row.hard_factor);
    if (t->row.hard) xdi_cuda_loss_add_powers(t, XD_LOSS_HARD, top, e, dx);
    if (!t->row.soft) return;
    if (!t->row.shared) e = xdi_cuda_powers_of(dx, t->row.soft_factor);
    xdi_cuda_loss_add_powers(t, XD_LOSS_SOFT, top, e, dx);
    const xdi_cuda_eight dy = xdi_cuda_differences_of(y, t->teacher_base);
    const xdi_cuda_eight q = xdi_cuda_powers_of(dy, t->row.soft_factor);
    xdi_cuda_loss_add_powers(t, XD_LOSS_TEACHER, teacher_top, q, dy);
    if (t->row.divergence == XD_JSD) return; /* it needs the normalisers first */
    t->sums.add(XD_LOSS_CROSS, __fmul_rn(xdi_cuda_loss_cross_of(t->row, e, q, dx, dy, y), t->row.per_tau));
}

/* The sum of x, for a smoothed label; those at `columns` and beyond are left out. */
static __device__ inline void xdi_cuda_loss_add_plain(xdi_cuda_loss_sweep *t, const xdi_cuda_eight &x, int64_t c,
                                                      int64_t columns) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        if (c + i < columns) t->sums.add_wide(XD_LOSS_LINEAR, (double)x.at[i]);
}

/* Looks at eight columns from c on and adds them. Every lane of the warp calls it. */
static __device__ inline void xdi_cuda_loss_sweep_eight(const xd_loss_args &a, const xdi_cuda_eight &x,
                                                        const xdi_cuda_eight &y, int64_t c, int64_t columns,
                                                        xdi_cuda_loss_sweep *t) {
    const float max = xdi_cuda_max_of(x), teacher_max = t->row.soft ? xdi_cuda_max_of(y) : -INFINITY;
    xdi_cuda_loss_look(a.temperature, x, y, max, teacher_max, c, t);
    xdi_cuda_loss_take(t, x, y, max == t->row.max, teacher_max == t->row.teacher_max);
    if (t->row.uniform) xdi_cuda_loss_add_plain(t, x, c, columns);
}

/* All columns of this lane. The lanes of a warp go through theirs as often as each other. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_lane(const xd_loss_args &a, const xdi_cuda_line<X> &student,
                                                       const xdi_cuda_line<Y> &teacher, int64_t columns, xdi_cuda_loss_sweep *t) {
    const int64_t step = XDI_CUDA_EIGHT * TEAM, warp = XDI_CUDA_EIGHT * XDI_CUDA_WARP;
    const int64_t first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    const int64_t begin = first - XDI_CUDA_EIGHT * (int64_t)(threadIdx.x % XDI_CUDA_WARP); /* of the warp */
    const bool aligned = xdi_cuda_is_aligned16(student.at) && xdi_cuda_is_aligned16(teacher.at);
    const int whole = aligned && columns >= begin + warp ? (int)((columns - begin - warp) / step) + 1 : 0;
    xdi_cuda_in_memory::walk(
        student, teacher, first, step, whole, xdi_cuda_steps_of(begin, columns, step),
        [&](int k, xdi_cuda_eight *x, xdi_cuda_eight *y) {
            *x = student.eight(first + k * step, columns, -INFINITY);
            *y = teacher.eight(first + k * step, columns, -INFINITY);
        },
        [&](int k, const xdi_cuda_eight &x, const xdi_cuda_eight &y) {
            xdi_cuda_loss_sweep_eight(a, x, y, first + k * step, columns, t);
            if ((k & 1) && k < whole) xdi_cuda_loss_flush(t);
        });
}

/* `columns` columns, the first of which is number `begin` of the whole row: references [XD_LOSS_REFERENCES] and sums
 * [XD_LOSS_SUMS], without TARGET, on every thread of the team. */
template <typename X, typename Y, int TEAM>
static __device__ inline void xdi_cuda_loss_sweep_columns(const xd_loss_args &a, const xdi_cuda_line<X> &student,
                                                          const xdi_cuda_line<Y> &teacher, int64_t columns, int64_t begin, double *ref, double *total) {
    const xdi_cuda_summit none = { -INFINITY, -INFINITY, -INFINITY, INT32_MAX };
    const int64_t first = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    xdi_cuda_loss_sweep t;
    t.row = xdi_cuda_loss_row_of<Y>(a, -(double)INFINITY, -(double)INFINITY, -(double)INFINITY);
    t.base = t.teacher_base = 0.0f;
    t.seen = none;
    if (first < columns) t.seen.eight = (int32_t)(first / XDI_CUDA_EIGHT);
    xdi_cuda_loss_sweep_lane<X, Y, TEAM>(a, student, teacher, columns, &t);
    xdi_cuda_summit whole = xdi_cuda_team_reduce<TEAM>(t.seen, none, xdi_cuda_summit_join());
    int64_t arg = -1;
    if (whole.eight != INT32_MAX) {
        arg = (int64_t)whole.eight * XDI_CUDA_EIGHT;
        const xdi_cuda_eight x = student.eight(arg, columns, -INFINITY);
        const int64_t begin_of_eight = arg;
        XD_UNROLL
        for (int i = XDI_CUDA_EIGHT - 1; i >= 0; i--)
            if (x.at[i] == whole.max) arg = begin_of_eight + i;
        if (t.row.soft) whole.beside = teacher.element(arg);
    }
    xdi_cuda_loss_move<true>(&t, a.temperature, whole);
    const xdi_cuda_sums<XDI_CUDA_LOSS_TERMS, false>::totals sums = xdi_cuda_team_totals<TEAM>(t.sums);
    const bool bad = whole.max == INFINITY || isnan(sums.sum[XD_LOSS_HARD]) || isnan(sums.sum[XD_LOSS_SOFT]);
    const bool teacher_bad = t.row.soft && (whole.teacher_max == INFINITY || isnan(sums.sum[XD_LOSS_TEACHER]));
    const bool broken = bad || teacher_bad;
    ref[XD_LOSS_MAX] = bad ? (double)NAN : (double)whole.max;
    ref[XD_LOSS_ARG] = arg < 0 ? -1.0 : (double)(arg + begin);
    ref[XD_LOSS_TEACHER_AT_ARG] = t.row.soft ? (double)whole.beside : 0.0;
    ref[XD_LOSS_TEACHER_MAX] = !t.row.soft ? 0.0 : teacher_bad ? (double)NAN : (double)whole.teacher_max;
    for (int i = 0; i < XDI_CUDA_LOSS_TERMS; i++) total[i] = broken ? 0.0 : sums.sum[i];
    if (t.row.uniform && columns > 0 && !broken) total[XD_LOSS_LINEAR] -= (double)columns * ref[XD_LOSS_MAX];
    total[XD_LOSS_TARGET] = 0.0;
    total[XD_LOSS_BAD] = broken ? 1.0 : 0.0;
}
