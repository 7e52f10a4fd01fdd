/* Divergences over the k largest entries of a row. */

#include "loss/internal.h"
#include "loss/topk.h"

#include <math.h>
#include <string.h>

/* One call: the desc with defaults, and its blocks of memory. A side (student, or teacher logits) sends sums, then
 * values. */
typedef struct xdi_topk_kl_plan {
    xd_topk_desc d;
    xdi_reduction reduction;
    const xd_kernels *kernels;
    int threads; /* of the context: a CPU computes as many rows at the same time */
    xd_topk_args student, teacher;
    xd_topk_kl_args both;
    int64_t side_words; /* 8-byte words of one side */
    int64_t *send, *all;
    double *row_scale;
    double *teacher_values;
    int64_t *ids; /* absent entries are -1, invalid ones the vocabulary's size */
    int64_t *words;
    size_t bytes;                   /* of the workspace */
    xdi_topk_candidates candidates; /* for the student's k largest */
} xdi_topk_kl_plan;

static xd_topk_desc xdi_topk_kl_defaults(const xd_topk_desc *desc) {
    xd_topk_desc d = *desc;
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (d.values_temperature == 0.0) d.values_temperature = 1.0;
    if (d.divergence == XD_JSD && d.beta == 0.0) d.divergence = XD_KL_FORWARD;
    return d;
}

static xdi_reduction xdi_topk_kl_reduction(const xd_topk_desc *d) {
    const bool squared = d->temperature_factor == XD_TEMPERATURE_FACTOR_SQUARED;
    xdi_reduction in = xdi_reduction_of(&d->common, d->student.rows);
    if (d->vocab) in.vocabulary = xd_vocab_describe(d->vocab).size;
    in.soft_weight = squared ? d->temperature * d->temperature : 1.0;
    return in;
}

static const char *xdi_topk_mode_name(xd_topk_mode mode) {
    static const char *const names[] = { "TAIL", "RENORMALISE", "TRUNCATE", "ZERO_OUTSIDE" };
    return names[mode];
}

static xd_result xdi_topk_kl_validate_teacher(xd_ctx *ctx, const xd_topk_desc *d) {
    const bool whole = d->mode == XD_TOPK_TAIL || d->mode == XD_TOPK_TRUNCATE;
    XD_REQUIRE(ctx, (d->values != NULL) != (d->teacher.data != NULL), XD_ERROR_ARGUMENT,
               "give either the teacher's values at the ids or its logits");
    if (d->teacher.data) return xdi_vocab_check_rows(ctx, d->vocab, "teacher", &d->teacher, d->student.rows);
    XD_REQUIRE(ctx, d->ids.data, XD_ERROR_ARGUMENT, "the teacher's values have no ids");
    if (d->values_kind == XD_TOPK_LOG_PROBS)
        XD_REQUIRE(ctx, d->values_temperature == d->temperature, XD_ERROR_ARGUMENT,
                   "the teacher's log-probabilities are at temperature %g but the loss is at %g",
                   d->values_temperature, d->temperature);
    else
        XD_REQUIRE(ctx, !whole || d->log_normaliser, XD_ERROR_ARGUMENT,
                   "mode %s needs the teacher's mass outside the ids: give log_normaliser with its logits",
                   xdi_topk_mode_name(d->mode));
    return XD_OK;
}

static xd_result xdi_topk_kl_validate(xd_ctx *ctx, const xd_topk_desc *d, const xdi_reduction *in) {
    XD_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary: vocab is NULL");
    const int64_t size = xd_vocab_describe(d->vocab).size;
    XD_REQUIRE(ctx, d->k >= 1 && d->k <= size, XD_ERROR_ARGUMENT,
               "k is %lld but the vocabulary has %lld columns", (long long)d->k, (long long)size);
    XD_REQUIRE(ctx, d->temperature > 0.0 && isfinite(d->temperature), XD_ERROR_ARGUMENT,
               "temperature %g must be positive and finite", d->temperature);
    XD_REQUIRE(ctx, d->beta >= 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]",
               d->beta);
    XD_REQUIRE(ctx, (int)d->mode >= 0 && (int)d->mode <= (int)XD_TOPK_ZERO_OUTSIDE, XD_ERROR_ARGUMENT,
               "top-k mode %d does not exist", (int)d->mode);
    const bool fits = d->divergence == XD_KL_FORWARD || d->divergence == XD_KL_REVERSE ||
                      d->divergence == XD_KL_MIXED ||
                      (d->divergence == XD_JSD && d->mode != XD_TOPK_ZERO_OUTSIDE);
    XD_REQUIRE(ctx, fits, XD_ERROR_UNSUPPORTED, "divergence %d does not go with top-k mode %s",
               (int)d->divergence, xdi_topk_mode_name(d->mode));
    XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "student", &d->student, -1));
    XD_TRY(xdi_vocab_check_ids(ctx, "the teacher's ids", &d->ids));
    XD_TRY(xdi_topk_kl_validate_teacher(ctx, d));
    if (d->common.gradient.data)
        XD_TRY(xdi_vocab_check_gradient(ctx, d->vocab, &d->student, &d->common.gradient));
    return xdi_reduction_check(ctx, in);
}

/* What the two sides have in common. */
static void xdi_topk_kl_fill_sides(xd_ctx *ctx, xdi_topk_kl_plan *plan) {
    const xd_topk_desc *d = &plan->d;
    xd_topk_args *a = &plan->student;
    memset(a, 0, sizeof *a);
    a->logits = d->student;
    a->k = d->k;
    a->vocab = xdi_vocab_shard(d->vocab);
    a->temperature = d->temperature;
    a->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    a->outside = d->mode != XD_TOPK_RENORMALISE || d->student_mass || d->teacher_mass;
    plan->teacher = *a;
    plan->teacher.logits = d->teacher;
    const int64_t words = XD_TOPK_SUMS * (a->fixed ? 2 : 1) + d->k;
    plan->side_words =
        (int64_t)((uint64_t)d->student.rows * (uint64_t)words); /* the layout refuses what wraps */
}

static void xdi_topk_kl_fill_args(xd_ctx *ctx, xdi_topk_kl_plan *plan) {
    const xd_topk_desc *d = &plan->d;
    xd_topk_kl_args *a = &plan->both;
    xdi_topk_kl_fill_sides(ctx, plan);
    memset(a, 0, sizeof *a);
    a->logits = d->student;
    a->k = d->k;
    a->vocab = plan->student.vocab;
    a->temperature = d->temperature;
    a->log_probs = d->student_log_probs;
    a->mode = d->mode;
    a->divergence = d->divergence;
    a->beta = d->beta;
    a->weight = plan->reduction.soft_weight;
    a->gradient = d->common.gradient;
    a->teacher_temperature = d->teacher.data || d->values_kind == XD_TOPK_LOGITS ? d->temperature : 1.0;
    a->teacher_log = d->values_kind == XD_TOPK_LOGITS ? d->log_normaliser : NULL;
    a->unnormalised = !d->teacher.data && d->values_kind == XD_TOPK_LOGITS && !d->log_normaliser;
    a->fixed = plan->student.fixed;
    a->row_weight = d->common.row_weight;
}

/* What both sides send is one block, sums before values; the other blocks are shared by both sides. */
static void xdi_topk_kl_share(xdi_topk_kl_plan *plan) {
    const int64_t sums = plan->d.student.rows * XD_TOPK_SUMS * (plan->student.fixed ? 2 : 1);
    plan->student.sums = plan->send;
    plan->student.values = (double *)(void *)(plan->send + sums);
    plan->student.row_scale = plan->teacher.row_scale = plan->both.row_scale = plan->row_scale;
    plan->student.ids = plan->teacher.ids = plan->both.ids = plan->ids;
    plan->teacher.order = plan->student.order;
    plan->both.values = plan->student.values;
    plan->both.side = plan->student.side;
    plan->both.teacher_values = plan->teacher_values;
    if (!plan->d.teacher.data) return;
    plan->teacher.sums = plan->send + plan->side_words;
    plan->teacher.values = (double *)(void *)(plan->send + plan->side_words + sums);
    plan->both.teacher_values = plan->teacher.values;
    plan->both.teacher_side = plan->teacher.side;
}

/* Takes every block from the arena; with a planning arena only sizes are counted. False when it does not
 * fit. */
static bool xdi_topk_kl_layout(xdi_topk_kl_plan *plan, xd_arena *arena) {
    const int64_t rows = plan->d.student.rows, k = plan->d.k, ranks = plan->student.vocab.shards;
    const size_t each = 16 * (2 * XD_TOPK_SUMS + 1) + sizeof(xd_topk_side) + sizeof(xd_topk_row);
    size_t most; /* no size wraps if this one does not */
    bool fits = true;
    if (!xdi_size_multiply((size_t)rows, (size_t)k + 1, &most) ||
        !xdi_size_multiply(most, ((size_t)ranks + 1) * each, &most))
        return false;
    const int64_t sent = (plan->d.teacher.data ? 2 : 1) * plan->side_words;
    const int64_t scratch = plan->kernels->device == XD_DEVICE_CPU
                                ? plan->threads
                                : rows; /* a GPU computes all rows at the same time */
    const int64_t candidates = plan->d.ids.data ? 0 : 2 * rows * k;
    plan->row_scale = (double *)xdi_arena_array(arena, rows, sizeof(double), &fits);
    plan->send = (int64_t *)xdi_arena_array(arena, sent, sizeof(int64_t), &fits);
    plan->all = (int64_t *)xdi_arena_array(arena, ranks > 1 ? ranks * sent : 0, sizeof(int64_t), &fits);
    plan->student.maxima = (double *)xdi_arena_array(arena, rows, sizeof(double), &fits);
    plan->teacher.maxima = (double *)xdi_arena_array(arena, rows, sizeof(double), &fits);
    plan->student.side = (xd_topk_side *)xdi_arena_array(arena, rows, sizeof(xd_topk_side), &fits);
    plan->teacher.side = (xd_topk_side *)xdi_arena_array(arena, rows, sizeof(xd_topk_side), &fits);
    plan->ids = (int64_t *)xdi_arena_array(arena, rows * k, sizeof(int64_t), &fits);
    plan->teacher_values = (double *)xdi_arena_array(arena, rows * k, sizeof(double), &fits);
    plan->both.slots = (double *)xdi_arena_array(arena, rows * k, sizeof(double), &fits);
    plan->student.order = (int64_t *)xdi_arena_array(arena, scratch * k, sizeof(int64_t), &fits);
    plan->both.scratch = (double *)xdi_arena_array(arena, scratch * 3 * (k + 1), sizeof(double), &fits);
    plan->both.row = (xd_topk_row *)xdi_arena_array(arena, rows, sizeof(xd_topk_row), &fits);
    plan->words =
        (int64_t *)xdi_arena_array(arena, xdi_reduction_words(&plan->reduction), sizeof(int64_t), &fits);
    plan->candidates.mine =
        (int64_t *)xdi_arena_array(arena, (ranks > 1 ? ranks + 1 : 1) * candidates, sizeof(int64_t), &fits);
    if (!fits || !arena->base) return fits;
    plan->candidates.all = plan->candidates.mine + candidates;
    xdi_topk_kl_share(plan);
    return true;
}

static xd_result xdi_topk_kl_side(const xd_launch *launch, const xdi_topk_kl_plan *plan,
                                  const xd_topk_args *a) {
    xd_comm *tp = xd_vocab_describe(plan->d.vocab).tp;
    XD_TRY(plan->kernels->topk.maxima(launch, a));
    if (a->fixed && tp) XD_TRY(xd_all_reduce(tp, a->maxima, a->maxima, a->logits.rows, XD_DTYPE_F64, XD_MAX));
    return plan->kernels->topk.stats(launch, a);
}

/* Both sides' statistics in one exchange, then the divergence of every row. */
static xd_result xdi_topk_kl_rows(const xd_launch *launch, xdi_topk_kl_plan *plan) {
    const bool two = plan->d.teacher.data != NULL;
    const int64_t words = plan->side_words * (two ? 2 : 1);
    const void *all;
    XD_TRY(xdi_topk_kl_side(launch, plan, &plan->student));
    if (two) XD_TRY(xdi_topk_kl_side(launch, plan, &plan->teacher));
    XD_TRY(xdi_vocab_gather(plan->d.vocab, plan->send, plan->all, words, XD_DTYPE_I64, &all));
    plan->student.all = (const int64_t *)all;
    plan->student.all_stride = plan->teacher.all_stride = words;
    XD_TRY(plan->kernels->topk.merge(launch, &plan->student));
    if (two) {
        plan->teacher.all = (const int64_t *)all + plan->side_words;
        XD_TRY(plan->kernels->topk.merge(launch, &plan->teacher));
    }
    return plan->kernels->topk.divergence(launch, &plan->both);
}

static xd_result xdi_topk_kl_run(xd_ctx *ctx, xdi_topk_kl_plan *plan, xd_loss_values *out) {
    const xd_topk_desc *d = &plan->d;
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_topk_kl_args *a = &plan->both;
    const xd_topk_entries_args entries = {
        d->student.rows * d->k, a->vocab.size, d->ids, d->values, plan->ids, plan->teacher_values
    };
    xd_row_args rows;
    XD_TRY(xdi_reduction_begin(ctx, &plan->reduction, plan->row_scale, plan->words, &rows));
    if (!d->ids.data)
        XD_TRY(xdi_topk_select(ctx, d->vocab, &d->student, d->k, &plan->candidates, a->slots, plan->ids));
    XD_TRY(plan->kernels->topk.entries(&launch, &entries));
    XD_TRY(xdi_topk_kl_rows(&launch, plan));
    if (d->common.gradient.data) XD_TRY(plan->kernels->topk.grad(&launch, a));
    rows.topk_rows = a->row;
    rows.row_loss = d->common.row_loss;
    rows.student_mass = d->student_mass;
    rows.teacher_mass = d->teacher_mass;
    return xdi_reduction_end(ctx, &plan->reduction, &rows, out);
}

static void xdi_topk_kl_begin(xd_ctx *ctx, const xd_topk_desc *desc, xdi_topk_kl_plan *plan) {
    memset(plan, 0, sizeof *plan);
    plan->d = xdi_topk_kl_defaults(desc);
    plan->reduction = xdi_topk_kl_reduction(&plan->d);
    plan->kernels = xd_ctx_kernels(ctx);
    plan->threads = xd_ctx_settings(ctx)->threads;
}

/* Everything before the first exchange, local to this rank: checks, defaults, workspace. */
static xd_result xdi_topk_kl_prepare(xd_ctx *ctx, const xd_topk_desc *desc, xdi_topk_kl_plan *plan,
                                     void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0), arena;
    void *memory = desc->common.workspace;
    size_t bytes = desc->common.workspace_bytes;
    xdi_topk_kl_begin(ctx, desc, plan);
    XD_TRY(xdi_topk_kl_validate(ctx, &plan->d, &plan->reduction));
    xdi_topk_kl_fill_args(ctx, plan);
    XD_REQUIRE(ctx, xdi_topk_kl_layout(plan, &planning), XD_ERROR_ARGUMENT,
               "the workspace would not fit into memory");
    plan->bytes = planning.peak;
    if (xdi_plan_is_open(ctx)) return XD_OK;
    if (!memory) {
        bytes = planning.peak;
        memory = *owned = plan->kernels->memory.allocate(ctx, bytes);
        XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    arena = xd_arena_over(memory, bytes);
    XD_REQUIRE(ctx, xdi_topk_kl_layout(plan, &arena), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but the loss needs %zu", bytes, planning.peak);
    return XD_OK;
}

XD_API xd_result xd_topk_kl_loss(xd_ctx *ctx, const xd_topk_desc *desc, xd_loss_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    XDI_LIVE(xd_vocab, desc->vocab);
    xdi_topk_kl_plan plan;
    void *owned = NULL;
    xd_result result = xdi_topk_kl_prepare(ctx, desc, &plan, &owned);
    if (result == XD_OK) result = xdi_loss_check_out(ctx, desc->student.rows, out);
    if (xdi_plan_is_open(ctx)) return xdi_plan_add_workspace(ctx, result, plan.bytes);
    result =
        xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->common.comm, result);
    if (result == XD_OK) result = xdi_topk_kl_run(ctx, &plan, out);
    plan.kernels->memory.release(ctx, owned);
    return result;
}
