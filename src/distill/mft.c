#include <math.h>
#include <string.h>

/* ---- what both losses share: the workspace, rows and reduction of xd_loss around own sums ---- */

/* Sums that one shard makes of its columns of a row, gathered as a row of the loss's own. */
enum { XDI_MFT_SUMS = XD_LOSS_SUMS };

/* Fills rows: the losses of all rows and what their gradients need. */
typedef xd_result (*xdi_mft_body)(xd_ctx *ctx, const xd_mft_desc *desc, xdi_loss_plan *plan);

static xd_result xdi_mft_prepare(xd_ctx *ctx, const xd_mft_desc *desc, xdi_loss_plan *plan, void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0), arena;
    plan->d = xdi_loss_defaults(&desc->loss);
    plan->reduction = xdi_loss_reduction(&plan->d);
    plan->kernels = xd_ctx_kernels(ctx);
    XDI_REQUIRE(ctx, plan->kernels.device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
                "this loss is not built for a GPU");
    XDI_REQUIRE(ctx, xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT, XD_ERROR_UNSUPPORTED,
                "this loss has no INVARIANT form");
    XDI_REQUIRE(ctx, plan->d.teacher.data || plan->d.student.rows == 0, XD_ERROR_ARGUMENT,
                "the loss has no teacher");
    XDI_TRY(xdi_loss_validate(ctx, &plan->d, &plan->reduction));
    xdi_loss_fill_args(ctx, plan);
    XDI_REQUIRE(ctx, xdi_loss_layout(plan, plan->d.student.rows, &planning), XD_ERROR_ARGUMENT,
                "the workspace would not fit into memory");
    *owned = xd_allocate(ctx, planning.peak);
    XDI_REQUIRE(ctx, *owned, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", planning.peak);
    arena = xd_arena_over(*owned, planning.peak);
    xdi_loss_layout(plan, plan->d.student.rows, &arena);
    memset(plan->rows, 0, (size_t)plan->d.student.rows * sizeof *plan->rows);
    return XD_OK;
}

static xd_result xdi_mft_run(xd_ctx *ctx, const xd_mft_desc *desc, xdi_mft_body body, xd_loss_values *out) {
    xdi_loss_plan plan;
    xd_row_args rows;
    void *owned = NULL;
    memset(&plan, 0, sizeof plan);
    xd_result result = xdi_mft_prepare(ctx, desc, &plan, &owned);
    result = xdi_vocab_agree(desc->loss.vocab ? xd_vocab_describe(desc->loss.vocab).tp : NULL, desc->loss.comm,
                             result);
    if (result == XD_OK) result = xdi_reduction_begin(ctx, &plan.reduction, plan.row_scale, plan.words, &rows);
    if (result == XD_OK) result = body(ctx, desc, &plan);
    if (result == XD_OK) {
        rows.loss_rows = plan.rows;
        rows.row_loss = desc->loss.row_loss;
        result = xdi_reduction_end(ctx, &plan.reduction, &rows, out);
    }
    xd_release(ctx, owned);
    return result;
}

/* All shards' sums of one kind, one after the other: [shards][rows, XDI_MFT_SUMS]. */
static xd_result xdi_mft_gather(xdi_loss_plan *plan, const double **all) {
    const void *gathered;
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, plan->args.sums, plan->all_partials,
                             plan->d.student.rows * XDI_MFT_SUMS, XD_DTYPE_F64, &gathered));
    *all = (const double *)gathered;
    return XD_OK;
}

static double *xdi_mft_own(const xdi_loss_plan *plan, int64_t r) {
    return (double *)plan->args.sums + r * XDI_MFT_SUMS;
}

static const double *xdi_mft_of(const xdi_loss_plan *plan, const double *all, int shard, int64_t r) {
    return all + (shard * plan->d.student.rows + r) * XDI_MFT_SUMS;
}

static int64_t xdi_mft_columns(const xdi_loss_plan *plan) {
    return plan->args.offsets[plan->args.shard + 1] - plan->args.offsets[plan->args.shard];
}

static bool xdi_mft_counts(const xdi_loss_plan *plan, int64_t r) {
    return plan->row_scale[r] != 0.0;
}

/* A row whose sums are not finite has no loss and no gradient. */
static void xdi_mft_judge(xd_loss_row *row) {
    if (isfinite(row->soft)) return;
    row->soft = 0.0;
    row->finding = (int)XD_ROW_NOT_FINITE;
}

/* ---- cosine ---- */

enum { XDI_COSINE_XX, XDI_COSINE_YY, XDI_COSINE_XY };

static void xdi_cosine_sums(xdi_loss_plan *plan, int64_t r) {
    double *sums = xdi_mft_own(plan, r);
    const int64_t columns = xdi_mft_columns(plan);
    memset(sums, 0, XDI_MFT_SUMS * sizeof *sums);
    for (int64_t c = 0; c < columns && xdi_mft_counts(plan, r); c++) {
        const double x = xdi_loss_load(&plan->d.student, r, c), y = xdi_loss_load(&plan->d.teacher, r, c);
        sums[XDI_COSINE_XX] += x * x;
        sums[XDI_COSINE_YY] += y * y;
        sums[XDI_COSINE_XY] += x * y;
    }
}

/* max and teacher_max hold the two lengths, mean the cosine. */
static void xdi_cosine_row(xdi_loss_plan *plan, const double *all, int64_t r) {
    xd_loss_row *row = plan->rows + r;
    double xx = 0.0, yy = 0.0, xy = 0.0;
    for (int i = 0; i < plan->args.shards; i++) {
        const double *sums = xdi_mft_of(plan, all, i, r);
        xx += sums[XDI_COSINE_XX];
        yy += sums[XDI_COSINE_YY];
        xy += sums[XDI_COSINE_XY];
    }
    row->max = sqrt(xx);
    row->teacher_max = sqrt(yy);
    row->mean = xy / (fmax(row->max, 1e-12) * fmax(row->teacher_max, 1e-12));
    row->soft = 1.0 - row->mean;
    xdi_mft_judge(row);
}

static double xdi_cosine_slope(const xd_loss_row *row, double x, double y) {
    if (row->max < 1e-12) return 0.0;
    return -(y / fmax(row->teacher_max, 1e-12) - row->mean * x / row->max) / row->max;
}

static xd_result xdi_cosine_body(xd_ctx *ctx, const xd_mft_desc *desc, xdi_loss_plan *plan) {
    const double *all = NULL;
    const int64_t columns = xdi_mft_columns(plan);
    (void)ctx, (void)desc;
    for (int64_t r = 0; r < plan->d.student.rows; r++) xdi_cosine_sums(plan, r);
    XDI_TRY(xdi_mft_gather(plan, &all));
    for (int64_t r = 0; r < plan->d.student.rows; r++) {
        const xd_loss_row *row = plan->rows + r;
        if (xdi_mft_counts(plan, r)) xdi_cosine_row(plan, all, r);
        const bool fine = xdi_mft_counts(plan, r) && row->finding == (int)XD_ROW_FINE;
        const double scale = fine ? plan->row_scale[r] * plan->reduction.soft_weight : 0.0;
        for (int64_t c = 0; plan->d.gradient.data && c < plan->d.gradient.cols; c++) {
            double g = 0.0;
            if (fine && c < columns)
                g = scale * xdi_cosine_slope(row, xdi_loss_load(&plan->d.student, r, c),
                                             xdi_loss_load(&plan->d.teacher, r, c));
            xdi_loss_store(&plan->d.gradient, r, c, g);
        }
    }
    return XD_OK;
}

XD_API xd_result xd_cosine_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    xd_mft_desc d;
    memset(&d, 0, sizeof d);
    d.loss = *desc;
    d.loss.hard_weight = 0.0;
    if (d.loss.soft_weight == 0.0) d.loss.soft_weight = 1.0;
    d.loss.temperature = 1.0; /* a direction has none */
    return xdi_mft_run(ctx, &d, xdi_cosine_body, out);
}

/* ---- minimal fine-tuning ---- */

/* First exchange: maxima, the teacher's favourite, and the label's logits from the shard that has them.
 * Second: sums relative to the maxima of the row, z = (x - max)/tau and u = (y - max)/tau. */
enum { XDI_MFT_MAX, XDI_MFT_TEACHER_MAX, XDI_MFT_FAVOURITE, XDI_MFT_LABEL, XDI_MFT_TEACHER_LABEL };
enum { XDI_MFT_S, XDI_MFT_T, XDI_MFT_TU, XDI_MFT_TZ };

static void xdi_mft_maxima(xdi_loss_plan *plan, int64_t r) {
    double *mine = xdi_mft_own(plan, r);
    const int64_t columns = xdi_mft_columns(plan), begin = plan->args.offsets[plan->args.shard];
    int64_t at = -1, favourite = -1;
    memset(mine, 0, XDI_MFT_SUMS * sizeof *mine);
    mine[XDI_MFT_FAVOURITE] = -1.0;
    mine[XDI_MFT_MAX] = mine[XDI_MFT_TEACHER_MAX] = -INFINITY;
    if (!xdi_mft_counts(plan, r)) return;
    mine[XDI_MFT_MAX] = xdi_loss_row_max(&plan->d.student, r, columns, &at);
    mine[XDI_MFT_TEACHER_MAX] = xdi_loss_row_max(&plan->d.teacher, r, columns, &favourite);
    if (favourite >= 0) mine[XDI_MFT_FAVOURITE] = (double)(favourite + begin);
    const int64_t label = plan->d.labels[r] - begin;
    if (label < 0 || label >= columns) return;
    mine[XDI_MFT_LABEL] = xdi_loss_load(&plan->d.student, r, label);
    mine[XDI_MFT_TEACHER_LABEL] = xdi_loss_load(&plan->d.teacher, r, label);
}

/* What one row knows between the exchanges. hard_log and teacher_log become logarithms of the sums; mean is
 * mu, top the label's share of the teacher; the label's logits wait in `hard` and `soft`. */
static void xdi_mft_merge(xdi_loss_plan *plan, const double *all, int64_t r) {
    xd_loss_row *row = plan->rows + r;
    row->max = row->teacher_max = -INFINITY;
    row->argmax = -1.0;
    for (int i = 0; i < plan->args.shards; i++) {
        const double *shard = xdi_mft_of(plan, all, i, r);
        if (isnan(shard[XDI_MFT_MAX]) || isnan(shard[XDI_MFT_TEACHER_MAX])) row->finding = (int)XD_ROW_NOT_FINITE;
        if (shard[XDI_MFT_MAX] > row->max) row->max = shard[XDI_MFT_MAX];
        if (shard[XDI_MFT_TEACHER_MAX] > row->teacher_max) {
            row->teacher_max = shard[XDI_MFT_TEACHER_MAX];
            row->argmax = shard[XDI_MFT_FAVOURITE];
        }
        row->hard += shard[XDI_MFT_LABEL];
        row->soft += shard[XDI_MFT_TEACHER_LABEL];
    }
    if (!isfinite(row->max) || !isfinite(row->teacher_max)) row->finding = (int)XD_ROW_NOT_FINITE;
    if (plan->d.labels[r] < 0 || plan->d.labels[r] >= plan->args.offsets[plan->args.shards])
        row->finding = (int)XD_ROW_LABEL;
}

static void xdi_mft_sums(xdi_loss_plan *plan, int64_t r) {
    double *sums = xdi_mft_own(plan, r);
    const xd_loss_row *row = plan->rows + r;
    const int64_t columns = xdi_mft_columns(plan);
    memset(sums, 0, XDI_MFT_SUMS * sizeof *sums);
    if (!xdi_mft_counts(plan, r) || row->finding != (int)XD_ROW_FINE) return;
    for (int64_t c = 0; c < columns; c++) {
        const double z = (xdi_loss_load(&plan->d.student, r, c) - row->max) / plan->d.temperature;
        const double u = (xdi_loss_load(&plan->d.teacher, r, c) - row->teacher_max) / plan->d.temperature;
        const double t = exp(u);
        sums[XDI_MFT_S] += exp(z);
        sums[XDI_MFT_T] += t;
        if (t == 0.0) continue; /* 0 times -infinity is 0 here */
        sums[XDI_MFT_TU] += t * u;
        sums[XDI_MFT_TZ] += t * z;
    }
}

/* How far the teacher is moved towards the label. */
static double xdi_mft_share(double favourite, double label, bool right, double threshold) {
    if (!right) return (favourite - label + threshold) / (1.0 + favourite - label + 1e-7);
    const double wanted = label > 1.0 - threshold ? 1.0 : label + threshold;
    return (wanted - favourite) / (1.0 - favourite + 1e-7);
}

/* p ln p, 0 at 0. */
static double xdi_mft_entropy(double p) {
    return p > 0.0 ? p * log(p) : 0.0;
}

static void xdi_mft_row(xdi_loss_plan *plan, const double *all, int64_t r, double threshold) {
    xd_loss_row *row = plan->rows + r;
    const double tau = plan->d.temperature;
    double total[4] = { 0.0, 0.0, 0.0, 0.0 };
    for (int i = 0; i < plan->args.shards; i++)
        for (int k = 0; k < 4; k++) total[k] += xdi_mft_of(plan, all, i, r)[k];
    row->soft_log = log(total[XDI_MFT_S]);
    row->teacher_log = log(total[XDI_MFT_T]);
    const double s_label = (row->hard - row->max) / tau - row->soft_log;
    const double label = exp((row->soft - row->teacher_max) / tau - row->teacher_log);
    const double favourite = 1.0 / total[XDI_MFT_T];
    const double mu = xdi_mft_share(favourite, label, row->argmax == (double)plan->d.labels[r], threshold);
    /* sums over the teacher alone: of q ln q and of q ln p; then with the label's entry replaced */
    const double own = total[XDI_MFT_TU] / total[XDI_MFT_T] - row->teacher_log;
    const double cross = total[XDI_MFT_TZ] / total[XDI_MFT_T] - row->soft_log;
    const double rest = (1.0 - mu) * (own - xdi_mft_entropy(label)) + xdi_mft_entropy(1.0 - mu) * (1.0 - label);
    row->mean = mu;
    row->top = label;
    row->hard = 0.0;
    row->soft = rest + xdi_mft_entropy((1.0 - mu) * label + mu) - (1.0 - mu) * cross - mu * s_label;
    xdi_mft_judge(row);
}

/* The corrected teacher's q, and p, at a column. */
static double xdi_mft_target(const xdi_loss_plan *plan, int64_t r, int64_t c, double *log_p) {
    const xd_loss_row *row = plan->rows + r;
    const double tau = plan->d.temperature;
    const double u = (xdi_loss_load(&plan->d.teacher, r, c) - row->teacher_max) / tau - row->teacher_log;
    const bool label = c + plan->args.offsets[plan->args.shard] == plan->d.labels[r];
    *log_p = (xdi_loss_load(&plan->d.student, r, c) - row->max) / tau - row->soft_log;
    return (1.0 - row->mean) * exp(u) + (label ? row->mean : 0.0);
}

static void xdi_mft_write(xdi_loss_plan *plan, const xd_mft_desc *desc, int64_t r) {
    const bool fine = xdi_mft_counts(plan, r) && plan->rows[r].finding == (int)XD_ROW_FINE;
    const int64_t columns = fine ? xdi_mft_columns(plan) : 0;
    const double weight = plan->reduction.soft_weight, slope = weight / plan->d.temperature;
    double log_p = 0.0;
    for (int64_t c = 0; desc->terms.data && c < desc->terms.cols; c++) {
        const double q = c < columns ? xdi_mft_target(plan, r, c, &log_p) : 0.0;
        xdi_loss_store(&desc->terms, r, c, q > 0.0 ? weight * q * (log(q) - log_p) : 0.0);
    }
    for (int64_t c = 0; plan->d.gradient.data && c < plan->d.gradient.cols; c++) {
        const double q = c < columns ? xdi_mft_target(plan, r, c, &log_p) : 0.0;
        xdi_loss_store(&plan->d.gradient, r, c, c < columns ? plan->row_scale[r] * slope * (exp(log_p) - q) : 0.0);
    }
}

static xd_result xdi_mft_loss_body(xd_ctx *ctx, const xd_mft_desc *desc, xdi_loss_plan *plan) {
    const int64_t rows = plan->d.student.rows;
    const double threshold = desc->threshold != 0.0 ? desc->threshold : 0.2;
    const double *all = NULL;
    (void)ctx;
    for (int64_t r = 0; r < rows; r++) xdi_mft_maxima(plan, r);
    XDI_TRY(xdi_mft_gather(plan, &all));
    for (int64_t r = 0; r < rows; r++)
        if (xdi_mft_counts(plan, r)) xdi_mft_merge(plan, all, r);
    for (int64_t r = 0; r < rows; r++) xdi_mft_sums(plan, r);
    XDI_TRY(xdi_mft_gather(plan, &all));
    for (int64_t r = 0; r < rows; r++) {
        xd_loss_row *row = plan->rows + r;
        if (xdi_mft_counts(plan, r) && row->finding == (int)XD_ROW_FINE)
            xdi_mft_row(plan, all, r, threshold);
        else
            row->hard = row->soft = 0.0;
        xdi_mft_write(plan, desc, r);
    }
    return XD_OK;
}

static xd_result xdi_mft_validate(xd_ctx *ctx, const xd_mft_desc *d) {
    const xd_rows *terms = &d->terms, *x = &d->loss.student;
    XDI_REQUIRE(ctx, d->loss.labels || x->rows == 0, XD_ERROR_ARGUMENT, "minimal fine-tuning has no labels");
    XDI_REQUIRE(ctx, d->threshold >= 0.0 && d->threshold <= 1.0, XD_ERROR_ARGUMENT,
                "threshold %g is outside [0, 1]", d->threshold);
    if (!terms->data) return XD_OK;
    XDI_REQUIRE(ctx, terms->dtype == XD_DTYPE_F32, XD_ERROR_DTYPE, "terms are %s: F32 is needed",
                xd_dtype_name(terms->dtype));
    XDI_REQUIRE(ctx, terms->rows == x->rows && terms->cols == x->cols, XD_ERROR_SHAPE,
                "terms are [%lld, %lld], the student's logits [%lld, %lld]", (long long)terms->rows,
                (long long)terms->cols, (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

XD_API xd_result xd_mft_loss(xd_ctx *ctx, const xd_mft_desc *desc, xd_loss_values *out) {
    xd_mft_desc d = *desc;
    d.loss.hard_weight = 0.0;
    if (d.loss.soft_weight == 0.0) d.loss.soft_weight = 1.0;
    d.loss.divergence = XD_KL_FORWARD;
    const xd_result local = xdi_mft_validate(ctx, &d);
    if (local != XD_OK)
        return xdi_vocab_agree(d.loss.vocab ? xd_vocab_describe(d.loss.vocab).tp : NULL, d.loss.comm, local);
    return xdi_mft_run(ctx, &d, xdi_mft_loss_body, out);
}
