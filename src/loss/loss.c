/* Cross entropy and divergences over a row of logits. */

#include "loss/internal.h"

#include <math.h>
#include <string.h>

XD_PRIVATE xd_loss_desc xdi_loss_defaults(const xd_loss_desc *desc) {
    xd_loss_desc d = *desc;
    if (d.soft_weight == 0.0) memset(&d.teacher, 0, sizeof d.teacher);
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (d.divergence == XD_JSD && d.beta == 0.0) d.divergence = XD_KL_FORWARD;
    if (d.divergence == XD_JSD && d.beta == 1.0) d.divergence = XD_KL_REVERSE;
    if (d.temperature_factor == XD_TEMPERATURE_FACTOR_DEFAULT)
        d.temperature_factor = d.divergence == XD_KL_FORWARD || d.divergence == XD_KL_REVERSE
                                   ? XD_TEMPERATURE_FACTOR_SQUARED
                                   : XD_TEMPERATURE_FACTOR_ONE;
    return d;
}

XD_PRIVATE xdi_reduction xdi_loss_reduction(const xd_loss_desc *d) {
    xdi_reduction in = xdi_reduction_of(&d->common, d->student.rows);
    if (d->vocab) in.vocabulary = xd_vocab_describe(d->vocab).size;
    in.hard_weight = d->hard_weight;
    in.soft_weight = d->soft_weight;
    if (d->temperature_factor == XD_TEMPERATURE_FACTOR_SQUARED)
        in.soft_weight *= d->temperature * d->temperature;
    return in;
}

static xd_result xdi_loss_validate_rows(xd_ctx *ctx, const xd_loss_desc *d) {
    XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "student", &d->student, -1));
    if (d->teacher.data) XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "teacher", &d->teacher, d->student.rows));
    return d->common.gradient.data ? xdi_vocab_check_gradient(ctx, d->vocab, &d->student, &d->common.gradient)
                                   : XD_OK;
}

XD_PRIVATE xd_result xdi_loss_validate(xd_ctx *ctx, const xd_loss_desc *d, const xdi_reduction *in) {
    XD_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary: vocab is NULL");
    XD_REQUIRE(ctx, d->hard_weight != 0.0 || d->soft_weight != 0.0, XD_ERROR_ARGUMENT,
               "no term of the loss has a weight: hard_weight is %g and soft_weight %g", d->hard_weight,
               d->soft_weight);
    XD_REQUIRE(ctx, d->common.labels.data || d->teacher.data, XD_ERROR_ARGUMENT,
               "the loss has neither labels nor a teacher");
    XD_REQUIRE(ctx, d->common.labels.data || d->hard_weight == 0.0, XD_ERROR_ARGUMENT,
               "hard_weight is %g without labels", d->hard_weight);
    XD_REQUIRE(ctx, d->teacher.data || d->soft_weight == 0.0 || d->student.rows == 0, XD_ERROR_ARGUMENT,
               "soft_weight is %g without a teacher", d->soft_weight);
    XD_REQUIRE(ctx, d->temperature > 0.0 && isfinite(d->temperature), XD_ERROR_ARGUMENT,
               "temperature %g must be positive and finite", d->temperature);
    XD_REQUIRE(ctx, d->beta >= 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]",
               d->beta);
    XD_REQUIRE(ctx, d->label_smoothing >= 0.0 && d->label_smoothing <= 1.0, XD_ERROR_ARGUMENT,
               "label smoothing %g is outside [0, 1]", d->label_smoothing);
    const int64_t size = xd_vocab_describe(d->vocab).size;
    XD_REQUIRE(ctx, size > 1 || d->label_smoothing == 0.0 || d->smoothing == XD_SMOOTHING_TORCH,
               XD_ERROR_ARGUMENT, "Megatron smoothing needs 2 classes, the vocabulary has %lld",
               (long long)size);
    XD_REQUIRE(ctx, (int)d->divergence >= 0 && (int)d->divergence <= (int)XD_SOFT_CE, XD_ERROR_UNSUPPORTED,
               "divergence %d is not available over the whole vocabulary", (int)d->divergence);
    XD_TRY(xdi_loss_validate_rows(ctx, d));
    return xdi_reduction_check(ctx, in);
}

static void xdi_loss_smoothing(const xd_loss_desc *d, xd_loss_args *a) {
    const double size = (double)a->vocab.size;
    const double mass = d->smoothing == XD_SMOOTHING_MEGATRON && d->label_smoothing > 0.0
                            ? d->label_smoothing * size / (size - 1.0)
                            : d->label_smoothing;
    a->target_weight = 1.0 - mass;
    a->uniform_weight = mass / size;
}

XD_PRIVATE void xdi_loss_fill_args(xd_ctx *ctx, xdi_loss_plan *plan) {
    const xd_loss_desc *d = &plan->d;
    xd_loss_args *a = &plan->args;
    memset(a, 0, sizeof *a);
    a->student = d->student;
    a->teacher = d->teacher;
    a->labels = d->common.labels;
    a->row_weight = d->common.row_weight;
    a->vocab = xdi_vocab_shard(d->vocab);
    a->temperature = d->temperature;
    a->divergence = d->divergence;
    a->beta = d->beta;
    a->hard_weight = d->hard_weight;
    a->soft_weight = plan->reduction.soft_weight;
    a->gradient = d->common.gradient;
    a->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    xdi_loss_smoothing(d, a);
}

/* A row's partials are references and sums; sums are doubles or pairs of integers, so the size is that of the
 * wider. */
XD_PRIVATE bool xdi_loss_layout(xdi_loss_plan *plan, int64_t rows, xd_arena *arena) {
    const int64_t all = plan->d.student.rows, ranks = plan->args.vocab.shards;
    const int64_t gathered = ranks > 1 ? ranks : 0; /* a single rank reads its partials */
    const bool jsd = plan->d.teacher.data && plan->d.divergence == XD_JSD;
    const size_t partials = XD_LOSS_REFERENCES * sizeof(double) + XD_LOSS_SUMS * sizeof(xd_fixed);
    const size_t mixtures = jsd ? XD_LOSS_MIXTURES * sizeof(xd_fixed) : 0;
    size_t most; /* no size wraps if this one does not */
    bool fits = true;
    if (!xdi_size_multiply((size_t)(all > rows ? all : rows),
                           ((size_t)ranks + 1) * (partials + mixtures + sizeof(xd_loss_row)), &most))
        return false;
    plan->row_scale = (double *)xdi_arena_array(arena, all, sizeof(double), &fits);
    plan->args.references = (double *)xdi_arena_array(arena, rows, partials, &fits);
    plan->args.mixtures = xdi_arena_array(arena, rows, mixtures, &fits);
    plan->rows = (xd_loss_row *)xdi_arena_array(arena, all, sizeof(xd_loss_row), &fits);
    plan->all_partials = (double *)xdi_arena_array(arena, gathered * rows, partials, &fits);
    plan->all_mixtures = xdi_arena_array(arena, gathered * rows, mixtures, &fits);
    plan->words =
        (int64_t *)xdi_arena_array(arena, xdi_reduction_words(&plan->reduction), sizeof(int64_t), &fits);
    if (!fits || !arena->base) return fits;
    plan->args.row_scale = plan->row_scale;
    plan->args.sums = plan->args.references + rows * XD_LOSS_REFERENCES;
    plan->args.row = plan->rows;
    return true;
}

/* One exchange: each shard's references, followed by its sums. */
static xd_result xdi_loss_gather(xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t rows = a->student.rows, words = rows * ((int)XD_LOSS_REFERENCES + (int)XD_LOSS_SUMS);
    const void *all;
    XD_TRY(xdi_vocab_gather(plan->d.vocab, a->references, plan->all_partials, words, XD_DTYPE_F64, &all));
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
    const int64_t rows = a->student.rows, shards = a->vocab.shards;
    const void *all;
    XD_TRY(xdi_vocab_gather(plan->d.vocab, a->references, plan->all_partials, rows * XD_LOSS_REFERENCES,
                            XD_DTYPE_F64, &all));
    a->all_references = (const double *)all;
    a->reference_stride = rows * XD_LOSS_REFERENCES;
    a->sums_stride = rows * XD_LOSS_SUMS;
    XD_TRY(plan->kernels->loss.merge_references(launch, a));
    XD_TRY(plan->kernels->loss.stats(launch, a));
    return xdi_vocab_gather(plan->d.vocab, a->sums, plan->all_partials + shards * a->reference_stride,
                            rows * XD_LOSS_SUMS * 2, XD_DTYPE_I64, &a->all_sums);
}

static xd_result xdi_loss_mixture(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t words = a->student.rows * XD_LOSS_MIXTURES * (a->fixed ? 2 : 1);
    XD_TRY(plan->kernels->loss.mixture(launch, a));
    XD_TRY(xdi_vocab_gather(plan->d.vocab, a->mixtures, plan->all_mixtures, words,
                            a->fixed ? XD_DTYPE_I64 : XD_DTYPE_F64, &a->all_mixtures));
    return plan->kernels->loss.mixture_combine(launch, a);
}

/* From logits to the partials of this shard and, by the exchange, of all shards. */
static xd_result xdi_loss_partials(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    if (!a->fixed && plan->kernels->loss.fused) {
        XD_TRY(plan->kernels->loss.fused(launch, a));
        return a->vocab.shards > 1 ? xdi_loss_gather(plan) : XD_OK;
    }
    XD_TRY(plan->kernels->loss.references(launch, a));
    if (a->fixed) return xdi_loss_gather_fixed(launch, plan);
    XD_TRY(plan->kernels->loss.stats(launch, a));
    return xdi_loss_gather(plan);
}

XD_PRIVATE xd_result xdi_loss_rows(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    XD_TRY(xdi_loss_partials(launch, plan));
    if (!a->fixed && a->vocab.shards == 1 && plan->kernels->loss.fused) return XD_OK;
    XD_TRY(plan->kernels->loss.combine(launch, a));
    if (a->teacher.data && a->divergence == XD_JSD) XD_TRY(xdi_loss_mixture(launch, plan));
    return a->gradient.data ? plan->kernels->loss.grad(launch, a) : XD_OK;
}

/* Everything before the first exchange, local to this rank: checks, defaults, workspace. */
static xd_result xdi_loss_prepare(xd_ctx *ctx, const xd_loss_desc *desc, xdi_loss_plan *plan, void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0), arena;
    void *memory = desc->common.workspace;
    size_t bytes = desc->common.workspace_bytes;
    plan->d = xdi_loss_defaults(desc);
    plan->reduction = xdi_loss_reduction(&plan->d);
    plan->kernels = xd_ctx_kernels(ctx);
    XD_TRY(xdi_loss_validate(ctx, &plan->d, &plan->reduction));
    xdi_loss_fill_args(ctx, plan);
    XD_REQUIRE(ctx, xdi_loss_layout(plan, plan->d.student.rows, &planning), XD_ERROR_ARGUMENT,
               "the workspace would not fit into memory");
    plan->bytes = planning.peak;
    if (xdi_plan_is_open(ctx)) return XD_OK;
    if (!memory) {
        bytes = planning.peak;
        memory = *owned = plan->kernels->memory.allocate(ctx, bytes);
        XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    arena = xd_arena_over(memory, bytes);
    XD_REQUIRE(ctx, xdi_loss_layout(plan, plan->d.student.rows, &arena), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but the loss needs %zu", bytes, planning.peak);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_loss_check_out(xd_ctx *ctx, int64_t rows, const void *out) {
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "the loss of %lld rows has no place for its values: out is NULL",
               (long long)rows);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_loss_call(xd_ctx *ctx, const xd_loss_desc *desc, xd_result checked,
                                   xdi_loss_body body, const void *user, xd_loss_values *out) {
    const xd_launch launch = xd_ctx_launch(ctx);
    xdi_loss_plan plan;
    xd_row_args rows;
    plan.bytes = 0;
    void *owned = NULL;
    xd_result result = checked == XD_OK ? xdi_loss_prepare(ctx, desc, &plan, &owned) : checked;
    if (result == XD_OK) result = xdi_loss_check_out(ctx, desc->student.rows, out);
    if (xdi_plan_is_open(ctx)) return xdi_plan_add_workspace(ctx, result, plan.bytes);
    result =
        xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->common.comm, result);
    if (result == XD_OK)
        result = xdi_reduction_begin(ctx, &plan.reduction, plan.row_scale, plan.words, &rows);
    if (result == XD_OK) result = body(&launch, &plan, user);
    if (result == XD_OK) {
        rows.loss_rows = plan.rows;
        rows.row_loss = desc->common.row_loss;
        result = xdi_reduction_end(ctx, &plan.reduction, &rows, out);
    }
    xd_ctx_kernels(ctx)->memory.release(ctx, owned);
    return result;
}

static xd_result xdi_loss_body_rows(const xd_launch *launch, xdi_loss_plan *plan, const void *user) {
    (void)user;
    return xdi_loss_rows(launch, plan);
}

XD_PRIVATE xd_result xdi_loss_of_rows(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    return xdi_loss_call(ctx, desc, XD_OK, xdi_loss_body_rows, NULL, out);
}
