#include <math.h>
#include <string.h>

/* Where everything of one call lies in the workspace. */
typedef struct xdi_loss_plan {
    xd_loss_desc d;
    xdi_reduction reduction;
    xd_loss_kernels kernels;
    xd_loss_args args;
    double *row_scale;
    double *all_partials; /* other shards' references and sums */
    void *all_mixtures;
    int64_t *words;
} xdi_loss_plan;

static xd_loss_desc xdi_loss_defaults(const xd_loss_desc *desc) {
    xd_loss_desc d = *desc;
    if (d.hard_weight == 0.0 && d.soft_weight == 0.0) {
        d.hard_weight = d.labels ? 1.0 : 0.0;
        d.soft_weight = d.teacher.data ? 1.0 : 0.0;
    }
    if (d.soft_weight == 0.0) memset(&d.teacher, 0, sizeof d.teacher);
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (d.beta == 0.0) d.beta = 0.5;
    if (d.divergence == XD_JSD && d.beta == 1.0) d.divergence = XD_KL_REVERSE;
    if (d.temperature_factor == XD_TEMPERATURE_FACTOR_DEFAULT)
        d.temperature_factor = d.divergence == XD_KL_FORWARD || d.divergence == XD_KL_REVERSE
                                   ? XD_TEMPERATURE_FACTOR_SQUARED
                                   : XD_TEMPERATURE_FACTOR_ONE;
    return d;
}

static xdi_reduction xdi_loss_reduction(const xd_loss_desc *d) {
    xdi_reduction in;
    in.rows = d->student.rows;
    in.labels = d->labels;
    in.ignore_index = d->ignore_index;
    in.mask = d->mask;
    in.row_weight = d->row_weight;
    in.scale = d->scale;
    in.denominator = d->denominator;
    in.denominator_value = d->denominator_value;
    in.comm = d->comm;
    in.status = d->status;
    in.hard_weight = d->hard_weight;
    in.soft_weight = d->soft_weight;
    if (d->temperature_factor == XD_TEMPERATURE_FACTOR_SQUARED)
        in.soft_weight *= d->temperature * d->temperature;
    return in;
}

static xd_result xdi_loss_validate_rows(xd_ctx *ctx, const xd_loss_desc *d) {
    XDI_TRY(xdi_vocab_check_rows(ctx, d->vocab, "student", &d->student, -1));
    if (d->teacher.data)
        XDI_TRY(xdi_vocab_check_rows(ctx, d->vocab, "teacher", &d->teacher, d->student.rows));
    return d->gradient.data ? xdi_vocab_check_gradient(ctx, d->vocab, &d->student, &d->gradient) : XD_OK;
}

static xd_result xdi_loss_validate(xd_ctx *ctx, const xd_loss_desc *d, const xdi_reduction *in) {
    XDI_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary");
    XDI_REQUIRE(ctx, d->labels || d->teacher.data, XD_ERROR_ARGUMENT,
                "the loss has neither labels nor a teacher");
    XDI_REQUIRE(ctx, d->labels || d->hard_weight == 0.0, XD_ERROR_ARGUMENT,
                "hard_weight is %g without labels", d->hard_weight);
    XDI_REQUIRE(ctx, d->teacher.data || d->soft_weight == 0.0 || d->student.rows == 0, XD_ERROR_ARGUMENT,
                "soft_weight is %g without a teacher", d->soft_weight);
    XDI_REQUIRE(ctx, d->temperature > 0.0 && isfinite(d->temperature), XD_ERROR_ARGUMENT,
                "temperature %g must be positive and finite", d->temperature);
    XDI_REQUIRE(ctx, d->beta > 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]",
                d->beta);
    XDI_REQUIRE(ctx, d->label_smoothing >= 0.0 && d->label_smoothing <= 1.0, XD_ERROR_ARGUMENT,
                "label smoothing %g is outside [0, 1]", d->label_smoothing);
    const int64_t size = xd_vocab_describe(d->vocab).size;
    XDI_REQUIRE(ctx, size > 1 || d->label_smoothing == 0.0 || d->smoothing == XD_SMOOTHING_TORCH,
                XD_ERROR_ARGUMENT, "Megatron smoothing needs 2 classes, the vocabulary has %lld",
                (long long)size);
    XDI_REQUIRE(ctx, (int)d->divergence >= 0 && (int)d->divergence <= (int)XD_SOFT_CE, XD_ERROR_UNSUPPORTED,
                "divergence %d is not available over the whole vocabulary", (int)d->divergence);
    XDI_TRY(xdi_loss_validate_rows(ctx, d));
    return xdi_reduction_check(ctx, in);
}

static void xdi_loss_smoothing(const xd_loss_desc *d, xd_loss_args *a) {
    const double size = (double)a->offsets[a->shards];
    const double mass = d->smoothing == XD_SMOOTHING_MEGATRON && d->label_smoothing > 0.0
                            ? d->label_smoothing * size / (size - 1.0)
                            : d->label_smoothing;
    a->target_weight = 1.0 - mass;
    a->uniform_weight = mass / size;
}

static void xdi_loss_fill_args(xd_ctx *ctx, xdi_loss_plan *plan) {
    const xd_loss_desc *d = &plan->d;
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    xd_loss_args *a = &plan->args;
    memset(a, 0, sizeof *a);
    a->student = d->student;
    a->teacher = d->teacher;
    a->labels = d->labels;
    a->offsets = info.offsets;
    a->shard = info.rank;
    a->shards = info.ranks;
    a->temperature = d->temperature;
    a->divergence = d->divergence;
    a->beta = d->beta;
    a->hard_weight = d->hard_weight;
    a->soft_weight = plan->reduction.soft_weight;
    a->gradient = d->gradient;
    a->fixed = ctx && xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    xdi_loss_smoothing(d, a);
}

/* Takes every block from the arena; with a planning arena this is the size query. False when it does not fit.
 * A row's partials are references and sums; the latter are doubles, or pairs of integers, so there is room
 * for the wider. */
static bool xdi_loss_layout(xdi_loss_plan *plan, xd_arena *arena) {
    const size_t rows = (size_t)plan->d.student.rows, ranks = (size_t)plan->args.shards;
    const size_t gathered = ranks > 1 ? ranks * rows : 0; /* one rank reads its own partials */
    const bool jsd = plan->d.teacher.data && plan->d.divergence == XD_JSD;
    const size_t partials = XD_LOSS_REFERENCES * sizeof(double) + XD_LOSS_SUMS * sizeof(xd_fixed);
    const size_t mixtures = jsd ? XD_LOSS_MIXTURES * sizeof(xd_fixed) : 0;
    const size_t words = (size_t)xdi_reduction_words(&plan->reduction) * sizeof(int64_t);
    const size_t sizes[7] = { rows * sizeof(double),
                              rows * partials,
                              rows * mixtures,
                              rows * sizeof(xd_loss_row),
                              gathered * partials,
                              gathered * mixtures,
                              words };
    size_t at[7];
    for (int i = 0; i < 7; i++)
        if (!xd_arena_take(arena, sizes[i], &at[i])) return false;
    if (!arena->base) return true;
    plan->row_scale = (double *)(void *)(arena->base + at[0]);
    plan->args.row_scale = plan->row_scale;
    plan->args.references = (double *)(void *)(arena->base + at[1]);
    plan->args.sums = plan->args.references + rows * XD_LOSS_REFERENCES;
    plan->args.mixtures = arena->base + at[2];
    plan->args.row = (xd_loss_row *)(void *)(arena->base + at[3]);
    plan->all_partials = (double *)(void *)(arena->base + at[4]);
    plan->all_mixtures = arena->base + at[5];
    plan->words = (int64_t *)(void *)(arena->base + at[6]);
    return true;
}

/* One exchange: each shard's own references and, behind them, its sums. */
static xd_result xdi_loss_gather(xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t rows = plan->d.student.rows, words = rows * (XD_LOSS_REFERENCES + XD_LOSS_SUMS);
    const void *all;
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, a->references, plan->all_partials, words, XD_DTYPE_F64, &all));
    a->all_references = (const double *)all;
    a->all_sums = (const double *)all + rows * XD_LOSS_REFERENCES;
    a->reference_stride = words;
    a->sums_stride = words;
    return XD_OK;
}

/* Two exchanges, so that sums are taken relative to the references of the whole row: the same terms on every
 * mesh. */
static xd_result xdi_loss_gather_fixed(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t rows = plan->d.student.rows, shards = a->shards;
    const void *all;
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, a->references, plan->all_partials, rows * XD_LOSS_REFERENCES,
                             XD_DTYPE_F64, &all));
    a->all_references = (const double *)all;
    a->reference_stride = rows * XD_LOSS_REFERENCES;
    a->sums_stride = rows * XD_LOSS_SUMS;
    XDI_TRY(plan->kernels.merge_references(launch, a));
    XDI_TRY(plan->kernels.stats(launch, a));
    return xdi_vocab_gather(plan->d.vocab, a->sums, plan->all_partials + shards * a->reference_stride,
                            rows * XD_LOSS_SUMS * 2, XD_DTYPE_I64, &a->all_sums);
}

static xd_result xdi_loss_mixture(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t words = plan->d.student.rows * XD_LOSS_MIXTURES * (a->fixed ? 2 : 1);
    XDI_TRY(plan->kernels.mixture(launch, a));
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, a->mixtures, plan->all_mixtures, words,
                             a->fixed ? XD_DTYPE_I64 : XD_DTYPE_F64, &a->all_mixtures));
    return plan->kernels.mixture_combine(launch, a);
}

/* Logits to the scalars of every row. */
static xd_result xdi_loss_partials(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    XDI_TRY(plan->kernels.references(launch, a));
    if (a->fixed) {
        XDI_TRY(xdi_loss_gather_fixed(launch, plan));
    } else {
        XDI_TRY(plan->kernels.stats(launch, a));
        XDI_TRY(xdi_loss_gather(plan));
    }
    XDI_TRY(plan->kernels.combine(launch, a));
    return a->teacher.data && a->divergence == XD_JSD ? xdi_loss_mixture(launch, plan) : XD_OK;
}

/* What the reduction reads of a row. */
static xdi_row_value xdi_loss_read_row(const void *args, int64_t r) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    xdi_row_value value;
    value.hard = a->row[r].hard;
    value.soft = a->row[r].soft;
    value.finding = a->row[r].finding;
    value.value = value.finding == (int)XD_ROW_LABEL ? (double)a->labels[r] : a->row[r].max;
    return value;
}

static xd_result xdi_loss_run(xd_ctx *ctx, xdi_loss_plan *plan, xd_loss_values *out) {
    const xd_loss_desc *d = &plan->d;
    double factor;
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    XDI_TRY(xdi_reduction_scales(ctx, &plan->reduction, plan->row_scale, &factor));
    XDI_TRY(xdi_loss_partials(&launch, plan));
    if (d->gradient.data) XDI_TRY(plan->kernels.grad(&launch, &plan->args));
    for (int64_t r = 0; d->row_loss && r < d->student.rows; r++)
        d->row_loss[r] = (float)(plan->reduction.hard_weight * plan->args.row[r].hard +
                                 plan->reduction.soft_weight * plan->args.row[r].soft);
    return xdi_reduction_finish(ctx, &plan->reduction, plan->row_scale, factor, xdi_loss_read_row,
                                &plan->args, plan->words, out);
}

/* Everything up to the first exchange, on this rank alone: checks, defaults, workspace. */
static xd_result xdi_loss_prepare(xd_ctx *ctx, const xd_loss_desc *desc, xdi_loss_plan *plan, void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0), arena;
    void *memory = desc->workspace;
    size_t bytes = desc->workspace_bytes;
    plan->d = xdi_loss_defaults(desc);
    plan->reduction = xdi_loss_reduction(&plan->d);
    plan->kernels = xd_ctx_kernels(ctx).loss;
    XDI_TRY(xdi_loss_validate(ctx, &plan->d, &plan->reduction));
    xdi_loss_fill_args(ctx, plan);
    XDI_REQUIRE(ctx, xdi_loss_layout(plan, &planning), XD_ERROR_ARGUMENT,
                "the workspace would not fit into memory");
    if (!memory) {
        bytes = planning.peak;
        memory = *owned = xd_allocate(ctx, bytes);
        XDI_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    arena = xd_arena_over(memory, bytes);
    XDI_REQUIRE(ctx, xdi_loss_layout(plan, &arena), XD_ERROR_ARGUMENT,
                "workspace has %zu bytes but the loss needs %zu", bytes, planning.peak);
    return XD_OK;
}

XD_API size_t xd_loss_workspace_bytes(const xd_loss_desc *desc) {
    xdi_loss_plan plan;
    xd_arena arena = xd_arena_over(NULL, 0);
    if (!desc->vocab || desc->student.rows < 0) return 0;
    plan.d = xdi_loss_defaults(desc);
    plan.reduction = xdi_loss_reduction(&plan.d);
    xdi_loss_fill_args(NULL, &plan);
    return xdi_loss_layout(&plan, &arena) ? arena.peak : 0;
}

XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    xdi_loss_plan plan;
    xd_loss_values values = { 0.0, 0.0, 0.0, 0 };
    void *owned = NULL;
    xd_result result = xdi_loss_prepare(ctx, desc, &plan, &owned);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->comm, result);
    if (result == XD_OK) result = xdi_loss_run(ctx, &plan, &values);
    if (result == XD_OK) *out = values;
    xd_release(ctx, owned);
    return result;
}

XD_API xd_result xd_cross_entropy_loss(xd_ctx *ctx, const xd_loss_desc *desc, float *loss) {
    xd_loss_desc d = *desc;
    xd_loss_values values;
    memset(&d.teacher, 0, sizeof d.teacher);
    d.soft_weight = 0.0;
    XDI_TRY(xd_loss(ctx, &d, &values));
    *loss = (float)values.loss;
    return XD_OK;
}

XD_API xd_result xd_kl_loss(xd_ctx *ctx, const xd_loss_desc *desc, float *loss) {
    xd_loss_desc d = *desc;
    xd_loss_values values;
    d.hard_weight = 0.0;
    if (d.soft_weight == 0.0) d.soft_weight = 1.0;
    XDI_TRY(xd_loss(ctx, &d, &values));
    *loss = (float)values.loss;
    return XD_OK;
}
