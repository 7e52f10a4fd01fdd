/* Minimal fine-tuning and the cosine: kernel/cpu/mft.c is the reference, kernel/mft.h has the formulas. Minimal fine-tuning
 * computes columns in f32 like the losses, and rows in double; the cosine is double throughout, with the CPU's bits wherever
 * its sums have them. */

static __device__ inline bool xdi_cuda_mft_is_fine(const xd_mft_args &a, int64_t r) {
    return a.row_scale[r] != 0.0 && a.row[r].finding == (int)XD_ROW_FINE;
}

static __device__ inline double xdi_cuda_mft_side(const xd_mft_args &a, int shard, int64_t r, int side) {
    return a.all_sides[(shard * a.student.rows + r) * XD_MFT_SIDES + side];
}

/* ---- at_label and correct: one thread a row ---- */

static __global__ void XDI_CUDA_KERNEL xdi_cuda_mft_at_label_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    const int64_t label = xd_id_at(a.labels, r) - a.vocab.begin;
    const bool mine = a.row_scale[r] != 0.0 && label >= 0 && label < a.vocab.end - a.vocab.begin;
    double *sides = a.sides + r * XD_MFT_SIDES;
    sides[XD_MFT_STUDENT] = mine ? (double)xdi_cuda_element(a.student, r, label) : 0.0;
    sides[XD_MFT_TEACHER] = mine ? (double)xdi_cuda_element(a.teacher, r, label) : 0.0;
}

static xd_result xdi_cuda_mft_at_label(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_mft_at_label_kernel, *a);
}

static __device__ void xdi_cuda_mft_correct_row(const xd_mft_args &a, int64_t r, xd_loss_row *row) {
    double x = 0.0, y = 0.0;
    for (int i = 0; i < a.vocab.shards; i++) {
        x += xdi_cuda_mft_side(a, i, r, XD_MFT_STUDENT);
        y += xdi_cuda_mft_side(a, i, r, XD_MFT_TEACHER);
    }
    xd_mft_correct(&a, r, x, y, row->argmax == (double)xd_id_at(a.labels, r), row);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_mft_correct_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows || a.row_scale[r] == 0.0) return;
    xd_loss_row row = a.row[r];
    xd_mft_change_sides(&row);
    if (row.finding == (int)XD_ROW_FINE) xdi_cuda_mft_correct_row(a, r, &row);
    a.row[r] = row;
}

static xd_result xdi_cuda_mft_correct(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_mft_correct_kernel, *a);
}

/* ---- write: grid (rows / teams), block 256; one read of both rows, one write of each output ---- */

/* A column's term and gradient, from x - max of both sides and their powers. */
struct xdi_cuda_mft_scales {
    float max, teacher_max, per_tau, factor;
    float q_share, weight, log_gap; /* q = power q_share; its term weight q (gap / tau + log_gap) */
    float p_scale, q_scale;         /* of the powers in the gradient */
};

static __device__ inline xdi_cuda_mft_scales xdi_cuda_mft_scales_of(const xd_mft_args &a, int64_t r) {
    const xd_loss_row &row = a.row[r];
    const double slope = a.row_scale[r] * a.weight / a.temperature, rest = 1.0 - row.mean;
    const double p_inverse = exp(-row.soft_log), q_share = rest * exp(-row.teacher_log);
    xdi_cuda_mft_scales s;
    s.max = (float)row.max;
    s.teacher_max = (float)row.teacher_max;
    s.per_tau = xdi_cuda_factor(1.0 / a.temperature);
    s.factor = xdi_cuda_factor(XDI_CUDA_LOG2E / a.temperature);
    s.q_share = (float)q_share;
    s.weight = (float)a.weight;
    s.log_gap = (float)(log(rest) + row.soft_log - row.teacher_log);
    s.p_scale = (float)(slope * p_inverse);
    s.q_scale = (float)(slope * q_share);
    return s;
}

static __device__ inline void xdi_cuda_mft_eight(const xdi_cuda_mft_scales &s, const xdi_cuda_eight &x,
                                                 const xdi_cuda_eight &y, xdi_cuda_eight *term,
                                                 xdi_cuda_eight *gradient) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        const float dx = __fsub_rn(x.at[i], s.max), dy = __fsub_rn(y.at[i], s.teacher_max);
        const float p = xdi_cuda_exp_of(dx, s.factor), t = xdi_cuda_exp_of(dy, s.factor);
        const float q = __fmul_rn(t, s.q_share);
        const float log_ratio = __fmaf_rn(__fsub_rn(dy, dx), s.per_tau, s.log_gap);
        term->at[i] = q > 0.0f ? __fmul_rn(s.weight, __fmul_rn(q, log_ratio)) : 0.0f;
        gradient->at[i] = __fmaf_rn(-t, s.q_scale, __fmul_rn(p, s.p_scale));
    }
}

/* The label's column, which the correction concerns, or the most probable one: most of the probability may be there, where f32
 * would cancel. Its logits are read before the row is overwritten. */
struct xdi_cuda_mft_column {
    int64_t at; /* -1: not on this shard */
    double x, y;
};

static __device__ inline xdi_cuda_mft_column xdi_cuda_mft_column_of(const xd_mft_args &a, int64_t r,
                                                                    int64_t id) {
    xdi_cuda_mft_column column = { -1, 0.0, 0.0 };
    if (id < a.vocab.begin || id >= a.vocab.end) return column;
    column.at = id - a.vocab.begin;
    column.x = (double)xdi_cuda_element(a.student, r, column.at);
    column.y = (double)xdi_cuda_element(a.teacher, r, column.at);
    return column;
}

static __device__ void xdi_cuda_mft_write_at(const xd_mft_args &a, int64_t r,
                                             const xdi_cuda_mft_column &column) {
    double term, gradient;
    xd_mft_column(&a, r, column.x, column.y, column.at + a.vocab.begin == xd_id_at(a.labels, r), &term, &gradient);
    if (a.terms.data) xdi_cuda_set_element(a.terms, r, column.at, (float)term);
    if (a.gradient.data) xdi_cuda_set_element(a.gradient, r, column.at, (float)gradient);
}

/* A thread writes the eight columns that it has read. */
template <int TEAM>
static __device__ inline void xdi_cuda_mft_columns(const xd_mft_args &a, int64_t r, int64_t columns) {
    const xdi_cuda_mft_scales s = xdi_cuda_mft_scales_of(a, r);
    const int64_t terms = a.terms.data ? a.terms.cols : 0, gradients = a.gradient.data ? a.gradient.cols : 0;
    const int64_t width = terms > gradients ? terms : gradients;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < width; c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight term = {}, gradient = {};
        if (c < columns)
            xdi_cuda_mft_eight(s, xdi_cuda_read_any(a.student, r, c, columns),
                               xdi_cuda_read_any(a.teacher, r, c, columns), &term, &gradient);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (c + i >= columns) term.at[i] = gradient.at[i] = 0.0f;
        if (c < terms) xdi_cuda_write_any(a.terms, r, c, terms, term);
        if (c < gradients) xdi_cuda_write_any(a.gradient, r, c, gradients, gradient);
    }
}

template <int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL xdi_cuda_mft_write_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return; /* the whole team returns */
    const bool fine = xdi_cuda_mft_is_fine(a, r), first = fine && xdi_cuda_team_thread<TEAM>() == 0;
    xdi_cuda_mft_column exact[2] = { { -1, 0.0, 0.0 }, { -1, 0.0, 0.0 } };
    if (first) {
        exact[0] = xdi_cuda_mft_column_of(a, r, (int64_t)a.row[r].argmax);
        exact[1] = xdi_cuda_mft_column_of(a, r, xd_id_at(a.labels, r));
    }
    xdi_cuda_team_sync<TEAM>(); /* now the row may be overwritten */
    xdi_cuda_mft_columns<TEAM>(a, r, fine ? a.vocab.end - a.vocab.begin : 0);
    xdi_cuda_team_sync<TEAM>();
    XD_UNROLL
    for (int i = 0; i < 2; i++)
        if (exact[i].at >= 0) xdi_cuda_mft_write_at(a, r, exact[i]);
}

static xd_result xdi_cuda_mft_write(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_mft_write_kernel<TEAM>, *a);
    })
}

/* ---- cosine: largest and products, grid (rows / teams), block 256; each reads both rows once ---- */

/* A NaN counts as infinite. */
template <int TEAM>
static __device__ inline float xdi_cuda_mft_magnitude(const xd_rows &x, int64_t r, int64_t columns) {
    float largest = 0.0f;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight eight = xdi_cuda_read_any(x, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            largest = fmaxf(largest, isnan(eight.at[i]) ? INFINITY : fabsf(eight.at[i]));
    }
    return xdi_cuda_team_reduce<TEAM>(largest, 0.0f, xdi_cuda_larger());
}

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_mft_largest_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const int64_t columns = a.row_scale[r] != 0.0 ? a.vocab.end - a.vocab.begin : 0;
    const float student = xdi_cuda_mft_magnitude<TEAM>(a.student, r, columns);
    const float teacher = xdi_cuda_mft_magnitude<TEAM>(a.teacher, r, columns);
    if (xdi_cuda_team_thread<TEAM>() != 0) return;
    a.sides[r * XD_MFT_SIDES + XD_MFT_STUDENT] = (double)student;
    a.sides[r * XD_MFT_SIDES + XD_MFT_TEACHER] = (double)teacher;
}

static xd_result xdi_cuda_mft_largest(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_mft_largest_kernel<TEAM>, *a);
    })
}

static __device__ inline bool xdi_cuda_mft_exponent(const xd_mft_args &a, int64_t r, int side,
                                                    int *exponent) {
    double largest = 0.0;
    for (int i = 0; a.fixed && i < a.vocab.shards; i++) largest = fmax(largest, xdi_cuda_mft_side(a, i, r, side));
    return xd_cosine_exponent(largest, exponent);
}

template <bool FIXED, int TEAM>
static __device__ inline void xdi_cuda_mft_products_row(const xd_mft_args &a, int64_t r, double x_scale,
                                                        double y_scale,
                                                        xdi_cuda_sums<XD_COSINE_SUMS, FIXED> *sums) {
    const int64_t columns = a.vocab.end - a.vocab.begin;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM) {
        const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns); /* 0 past the end */
        const xdi_cuda_eight y = xdi_cuda_read_any(a.teacher, r, c, columns);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const double p = xd_mul((double)x.at[i], x_scale), q = xd_mul((double)y.at[i], y_scale);
            sums->add_wide(XD_COSINE_STUDENT, xd_mul(p, p));
            sums->add_wide(XD_COSINE_TEACHER, xd_mul(q, q));
            sums->add_wide(XD_COSINE_BOTH, xd_mul(p, q));
        }
    }
}

static __device__ inline void xdi_cuda_mft_put(void *to, int64_t r,
                                               const xdi_cuda_sums<XD_COSINE_SUMS, false>::totals &t) {
    for (int i = 0; i < XD_COSINE_SUMS; i++) static_cast<double *>(to)[r * XD_COSINE_SUMS + i] = t.sum[i];
}

static __device__ inline void xdi_cuda_mft_put(void *to, int64_t r,
                                               const xdi_cuda_sums<XD_COSINE_SUMS, true>::totals &t) {
    for (int i = 0; i < XD_COSINE_SUMS; i++)
        xdi_cuda_fixed_put(static_cast<xd_fixed *>(to) + r * XD_COSINE_SUMS + i, t.sum[i]);
}

template <bool FIXED, int TEAM>
static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_mft_products_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    int x_exponent = 0, y_exponent = 0;
    const bool x_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_STUDENT, &x_exponent);
    const bool y_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_TEACHER, &y_exponent);
    xdi_cuda_sums<XD_COSINE_SUMS, FIXED> mine;
    if (x_fits && y_fits && a.row_scale[r] != 0.0)
        xdi_cuda_mft_products_row<FIXED, TEAM>(a, r, ldexp(1.0, -x_exponent), ldexp(1.0, -y_exponent), &mine);
    const typename xdi_cuda_sums<XD_COSINE_SUMS, FIXED>::totals totals = xdi_cuda_team_totals<TEAM>(mine);
    if (xdi_cuda_team_thread<TEAM>() == 0) xdi_cuda_mft_put(a.sums, r, totals);
}

static xd_result xdi_cuda_mft_products(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (a->fixed) /* exact sums have no order: one kernel does for rows of any length */
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, XDI_CUDA_TEAM_BLOCK), (xdi_cuda_mft_products_kernel<true, XDI_CUDA_TEAM_BLOCK>), *a);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM), (xdi_cuda_mft_products_kernel<false, TEAM>), *a);
    })
}

/* ---- cosine: the row, one thread each ---- */

static __device__ double xdi_cuda_mft_total(const xd_mft_args &a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a.vocab.shards; i++) {
        const int64_t at = (i * a.student.rows + r) * XD_COSINE_SUMS + which;
        if (a.fixed) {
            xd_fixed_join(&exact, static_cast<const xd_fixed *>(a.all_sums)[at]);
        } else {
            total = xd_add(total, static_cast<const double *>(a.all_sums)[at]);
        }
    }
    return a.fixed ? xd_fixed_read(exact) : total;
}

static __device__ void xdi_cuda_mft_cosine_row(const xd_mft_args &a, int64_t r, xd_loss_row *row) {
    int exponents[XD_MFT_SIDES] = { 0, 0 };
    double sums[XD_COSINE_SUMS];
    const bool x_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_STUDENT, &exponents[XD_MFT_STUDENT]);
    const bool y_fits = xdi_cuda_mft_exponent(a, r, XD_MFT_TEACHER, &exponents[XD_MFT_TEACHER]);
    for (int i = 0; i < XD_COSINE_SUMS; i++) sums[i] = xdi_cuda_mft_total(a, r, i);
    xd_cosine_row(&a, r, sums, exponents, x_fits && y_fits, row);
}

static __global__ void XDI_CUDA_WIDE_KERNEL
xdi_cuda_mft_cosine_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_flat_index();
    if (r >= a.student.rows) return;
    xd_loss_row row;
    memset(&row, 0, sizeof row);
    if (a.row_scale[r] != 0.0) xdi_cuda_mft_cosine_row(a, r, &row);
    a.row[r] = row;
}

static xd_result xdi_cuda_mft_cosine(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_flat_grid(a->student.rows), xdi_cuda_mft_cosine_kernel, *a);
}

/* ---- cosine: slopes, grid (rows / teams), block 256; one read of both rows, one write ---- */

template <int TEAM>
static __global__ void XDI_CUDA_KERNEL xdi_cuda_mft_slopes_kernel(const __grid_constant__ xd_mft_args a) {
    const int64_t r = xdi_cuda_team_row<TEAM>();
    if (r >= a.student.rows) return;
    const int64_t columns = xdi_cuda_mft_is_fine(a, r) ? a.vocab.end - a.vocab.begin : 0, width = a.gradient.cols;
    double of_x, of_y;
    xd_cosine_slope(&a, r, &of_x, &of_y);
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < width; c += XDI_CUDA_EIGHT * TEAM) {
        xdi_cuda_eight g = {};
        if (c < columns) {
            const xdi_cuda_eight x = xdi_cuda_read_any(a.student, r, c, columns); /* 0 past the end */
            const xdi_cuda_eight y = xdi_cuda_read_any(a.teacher, r, c, columns);
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                g.at[i] =
                    (float)xd_add(xd_mul(of_x, (double)x.at[i]), xd_mul(of_y, (double)y.at[i]));
        }
        xdi_cuda_write_any(a.gradient, r, c, width, g);
    }
}

static xd_result xdi_cuda_mft_slopes(const xd_launch *launch, const xd_mft_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XDI_CUDA_TEAMS(a->vocab.end - a->vocab.begin, TEAM, {
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_team_grid(a->student.rows, TEAM),
                               xdi_cuda_mft_slopes_kernel<TEAM>, *a);
    })
}

/* ---- table ---- */

template <int TEAM> static xd_result xdi_cuda_mft_load_team(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_write_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_largest_kernel<TEAM>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_products_kernel<false, TEAM>));
    return xdi_cuda_load(ctx, xdi_cuda_mft_slopes_kernel<TEAM>);
}

static xd_result xdi_cuda_mft_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_at_label_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_correct_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_mft_cosine_kernel));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_mft_products_kernel<true, XDI_CUDA_TEAM_BLOCK>)));
    XD_TRY(xdi_cuda_mft_load_team<XDI_CUDA_WARP>(ctx));
    return xdi_cuda_mft_load_team<XDI_CUDA_TEAM_BLOCK>(ctx);
}

static xd_mft_kernels xdi_cuda_mft_table() {
    xd_mft_kernels kernels = {};
    kernels.at_label = xdi_cuda_mft_at_label;
    kernels.correct = xdi_cuda_mft_correct;
    kernels.write = xdi_cuda_mft_write;
    kernels.largest = xdi_cuda_mft_largest;
    kernels.products = xdi_cuda_mft_products;
    kernels.cosine = xdi_cuda_mft_cosine;
    kernels.slopes = xdi_cuda_mft_slopes;
    return kernels;
}
