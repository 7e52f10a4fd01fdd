/* Arguments for the kernels of both losses: the rows and the workspace of a loss's plan. The blocks for references and
 * sums of a loss are large enough for the sides and sums here; those of all shards follow each other. */

#include "loss/internal.h"

#include <string.h>

static xd_mft_args xdi_mft_args_of(const xdi_loss_plan *plan) {
    const xd_loss_args *from = &plan->args;
    xd_mft_args a;
    memset(&a, 0, sizeof a);
    a.student = plan->d.student;
    a.teacher = plan->d.teacher;
    a.gradient = plan->d.common.gradient;
    a.labels = plan->d.common.labels;
    a.row_scale = plan->row_scale;
    a.row_weight = plan->d.common.row_weight;
    a.vocab = from->vocab;
    a.temperature = from->temperature;
    a.weight = plan->reduction.soft_weight;
    a.fixed = from->fixed;
    a.sides = from->references;
    a.sums = from->sums;
    a.row = plan->rows;
    return a;
}

static xd_result xdi_mft_gather_sides(const xdi_loss_plan *plan, xd_mft_args *a) {
    const void *all;
    XD_TRY(xdi_vocab_gather(plan->d.vocab, a->sides, plan->all_partials, a->student.rows * XD_MFT_SIDES,
                            XD_DTYPE_F64, &all));
    a->all_sides = (const double *)all;
    return XD_OK;
}

static xd_result xdi_mft_gather_sums(const xdi_loss_plan *plan, xd_mft_args *a) {
    double *room = plan->all_partials + a->vocab.shards * a->student.rows * XD_MFT_SIDES;
    return xdi_vocab_gather(plan->d.vocab, a->sums, room,
                            a->student.rows * XD_COSINE_SUMS * (a->fixed ? 2 : 1),
                            a->fixed ? XD_DTYPE_I64 : XD_DTYPE_F64, &a->all_sums);
}

static xd_result xdi_mft_check_soft(xd_ctx *ctx, const xd_loss_desc *d) {
    XD_REQUIRE(ctx, d->teacher.data || d->student.rows == 0, XD_ERROR_ARGUMENT, "the loss has no teacher");
    XD_REQUIRE(ctx, d->hard_weight == 0.0, XD_ERROR_ARGUMENT,
               "hard_weight is %g with soft_weight %g: this divergence has no cross entropy", d->hard_weight,
               d->soft_weight);
    return XD_OK;
}

/* ---- cosine ---- */

static xd_result xdi_cosine_rows(const xd_launch *launch, xdi_loss_plan *plan, const void *user) {
    const xd_mft_kernels *kernels = &plan->kernels->mft;
    xd_mft_args a = xdi_mft_args_of(plan);
    (void)user;
    if (a.fixed) {
        XD_TRY(kernels->largest(launch, &a));
        XD_TRY(xdi_mft_gather_sides(plan, &a));
    }
    XD_TRY(kernels->products(launch, &a));
    XD_TRY(xdi_mft_gather_sums(plan, &a));
    XD_TRY(kernels->cosine(launch, &a));
    return a.gradient.data ? kernels->slopes(launch, &a) : XD_OK;
}

static xd_result xdi_cosine_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    xd_loss_desc d = *desc;
    d.divergence = XD_KL_FORWARD;
    d.temperature = 1.0; /* a direction does not depend on it */
    return xdi_loss_call(ctx, &d, xdi_mft_check_soft(ctx, &d), xdi_cosine_rows, NULL, out);
}

/* ---- minimal fine-tuning ---- */

/* The reverse KL of exchanged sides: this is the forward KL, and the argmax is the teacher's. */
static void xdi_mft_exchange(xd_loss_args *a) {
    const xd_rows student = a->student;
    a->student = a->teacher;
    a->teacher = student;
    a->divergence = XD_KL_REVERSE;
    memset(&a->gradient, 0, sizeof a->gradient);
}

static xd_result xdi_mft_rows(const xd_launch *launch, xdi_loss_plan *plan, const void *user) {
    const xd_loss_desc *desc = (const xd_loss_desc *)user;
    const xd_mft_kernels *kernels = &plan->kernels->mft;
    xd_mft_args a = xdi_mft_args_of(plan);
    a.threshold = desc->mft_threshold;
    a.terms = desc->mft_terms;
    xdi_mft_exchange(&plan->args);
    XD_TRY(xdi_loss_rows(launch, plan));
    XD_TRY(kernels->at_label(launch, &a));
    XD_TRY(xdi_mft_gather_sides(plan, &a));
    XD_TRY(kernels->correct(launch, &a));
    return a.gradient.data || a.terms.data ? kernels->write(launch, &a) : XD_OK;
}

static xd_result xdi_mft_validate(xd_ctx *ctx, const xd_loss_desc *d) {
    const xd_rows *terms = &d->mft_terms, *x = &d->student;
    XD_TRY(xdi_mft_check_soft(ctx, d));
    XD_REQUIRE(ctx, d->common.labels.data || x->rows == 0, XD_ERROR_ARGUMENT,
               "minimal fine-tuning has no labels");
    XD_REQUIRE(ctx, d->mft_threshold >= 0.0 && d->mft_threshold <= 1.0, XD_ERROR_ARGUMENT,
               "mft_threshold %g is outside [0, 1]", d->mft_threshold);
    if (!terms->data) return XD_OK;
    XD_REQUIRE(ctx, terms->dtype == XD_DTYPE_F32, XD_ERROR_DTYPE, "mft_terms are %s: F32 is needed",
               xd_dtype_name(terms->dtype));
    XD_REQUIRE(ctx, terms->stride == 0 || terms->stride >= terms->cols, XD_ERROR_SHAPE,
               "mft_terms have stride %lld, less than their %lld columns", (long long)terms->stride,
               (long long)terms->cols);
    XD_REQUIRE(ctx, terms->rows == x->rows && terms->cols == x->cols, XD_ERROR_SHAPE,
               "mft_terms are [%lld, %lld], the student's logits [%lld, %lld]", (long long)terms->rows,
               (long long)terms->cols, (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

static xd_result xdi_mft_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    xd_loss_desc d = *desc;
    d.divergence = XD_KL_FORWARD;
    return xdi_loss_call(ctx, &d, xdi_mft_validate(ctx, &d), xdi_mft_rows, &d, out);
}

/* ---- any divergence ---- */

XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    XDI_LIVE(xd_vocab, desc->vocab);
    if (desc->divergence == XD_MFT) return xdi_mft_loss(ctx, desc, out);
    if (desc->divergence == XD_COSINE) return xdi_cosine_loss(ctx, desc, out);
    return xdi_loss_of_rows(ctx, desc, out);
}
