/* Losses of samples: what is not finite, what does not count, and what is refused. */

#include "planned.h"
#include "sample_losses.h"
#include "sample_refused.h"

/* ---- findings ---- */

XD_TEST(what_is_not_finite_makes_its_sample_zero_and_no_bit_of_another_differs) {
    static const float values[] = { NAN, HUGE_VALF, -HUGE_VALF };
    for (int variant = 0; variant < 36; variant++) {
        const int k = variant % 3, kind = variant / 18;
        const xd_reduction mode = variant & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        xd_ctx *ctx = context(mode);
        fill((loss_kind)kind, 2500, XD_DTYPE_F32, true);
        p.form = kind == VSD && variant % 4 == 0 ? XD_VSD_COMPAT : XD_VSD_EXACT;
        int64_t at = 3 * p.elements + 17;
        while (!p.mask[at]) at++;
        const float before = p.in[k][at];
        p.in[k][at] = values[variant / 3 % 3];
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.result, XD_OK);
        CHECK_EQ_INT(first.status.not_finite, 1);
        CHECK_EQ_INT(first.status.first_row, 3);
        CHECK(!isfinite(first.status.first_value));
        CHECK_NEAR(first.sample_loss[3], 0.0, 0.0);
        for (int64_t i = 0; i < p.elements; i++) CHECK(first.gradient[3 * p.elements + i] == 0.0f);
        call_grid(mode, 1, 2, &second);
        CHECK_EQ_INT(second.status.not_finite, 1);
        p.in[k][at] = before;
        call_alone(ctx, &second);
        CHECK_EQ_INT(second.status.not_finite, 0);
        for (int b = 0; b < SAMPLES; b++) CHECK(b == 3 || first.sample_loss[b] == second.sample_loss[b]);
        CHECK(memcmp(first.gradient, second.gradient, (size_t)(3 * p.elements) * sizeof(float)) == 0);
        CHECK(memcmp(first.gradient + 4 * p.elements, second.gradient + 4 * p.elements,
                     (size_t)p.elements * sizeof(float)) == 0);
        p.in[k][at] = values[variant / 3 % 3];
        p.mask[at] = 0; /* a masked element may be anything */
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.not_finite, 0);
        CHECK(isfinite(first.values.loss) && first.gradient[at] == 0.0f);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(factors_that_are_not_finite_are_findings_of_their_sample) {
    for (int variant = 0; variant < 6; variant++) {
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        fill(variant < 3 ? VSD : DENOISE, 100, XD_DTYPE_F32, false);
        if (variant == 0) p.scale[1] = NAN;
        if (variant == 1) p.scale[1] = -1.0;
        if (variant == 2) p.chain[1] = HUGE_VAL;
        if (variant == 3) p.terms[1].prediction = 1e300; /* not in f32 */
        if (variant == 4) p.terms[1].weight = -0.5;
        if (variant == 5) p.terms[1].noise = NAN;
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.not_finite, 1);
        CHECK_EQ_INT(first.status.first_row, 1);
        CHECK_NEAR(first.sample_loss[1], 0.0, 0.0);
        CHECK(isfinite(first.values.loss) && first.values.loss > 0.0);
        p.factor = NAN;
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.not_finite, 2);
        CHECK_NEAR(first.values.loss, 0.0, 0.0);
        for (int64_t i = 0; i < SAMPLES * p.elements; i++) CHECK(first.gradient[i] == 0.0f);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(the_weight_overflows_in_f16_as_the_peers_do_and_not_in_the_exact_form) {
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    fill(VSD, 64, XD_DTYPE_F16, false);
    for (int64_t i = 0; i < p.elements; i++) p.in[0][i] = p.in[1][i]; /* m = 0, w = 1e6 / 2 */
    call_alone(ctx, &first);
    CHECK_EQ_INT(first.status.not_finite, 0);
    CHECK(first.sample_loss[0] > 0.0);
    p.form = XD_VSD_COMPAT;
    call_alone(ctx, &first);
    CHECK_EQ_INT(first.status.not_finite, 1);
    CHECK_EQ_INT(first.status.first_row, 0);
    CHECK_NEAR(first.sample_loss[0], 0.0, 0.0);
    CHECK(first.sample_loss[1] > 0.0);
    p.form = XD_VSD_EXACT;
    p.normaliser = XD_VSD_ORIGINAL; /* x equal to T: such a sample contributes nothing */
    call_alone(ctx, &first);
    CHECK_EQ_INT(first.status.not_finite, 0);
    CHECK_NEAR(first.sample_loss[0], 0.0, 0.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(where_nothing_counts_all_is_zero_and_the_status_says_so) {
    for (int kind = 0; kind < 2; kind++) {
        xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
        fill((loss_kind)kind, 33, XD_DTYPE_F32, true);
        memset(p.mask, 0, sizeof p.mask);
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.nothing_counted, 1);
        CHECK_NEAR(first.values.loss, 0.0, 0.0);
        for (int64_t i = 0; i < SAMPLES * p.elements; i++) CHECK(first.gradient[i] == 0.0f);
        p.counted = false; /* N is given: nothing to report */
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.nothing_counted, 0);
        p.elements = 0;
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.result, XD_OK);
        CHECK_EQ_INT(first.values.counted, 0);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(an_empty_batch_is_no_error_when_others_have_samples) {
    static const int grids[][2] = { { 7, 1 }, { 6, 1 } }; /* more ranks than samples */
    for (int kind = 0; kind < 2; kind++)
        for (int k = 0; k < 2; k++) {
            fill((loss_kind)kind, 300, XD_DTYPE_F32, false);
            xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
            call_alone(ctx, &first);
            call_grid(XD_REDUCTION_INVARIANT, grids[k][0], grids[k][1], &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(without_a_status_findings_are_errors_and_the_value_is_untouched) {
    float x[4] = { 1, NAN, 2, 3 }, t[4] = { 0, 0, 0, 0 }, f[4] = { 1, 1, 1, 1 }, g[4] = { 9, 9, 9, 9 };
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_vsd_desc d = xd_vsd_defaults();
    xd_sample_values values = { 5.0, 5.0, 5 };
    d.generated = xd_rows_of(x, XD_DTYPE_F32, 2, 2);
    d.teacher = xd_rows_of(t, XD_DTYPE_F32, 2, 2);
    d.fake = xd_rows_of(f, XD_DTYPE_F32, 2, 2);
    d.gradient = xd_rows_of(g, XD_DTYPE_F32, 2, 2);
    CHECK_EQ_INT(xd_vsd_loss(ctx, &d, &values), XD_ERROR_DATA);
    CHECK_NEAR(values.loss, 5.0, 0.0);
    CHECK(g[0] == 0.0f && g[1] == 0.0f && g[2] > 0.0f);
    xd_ctx_destroy(ctx);
}

/* ---- refusals ---- */

static void refuse_vsd(xd_ctx *ctx, const xd_vsd_desc *d, xd_result expected, const char *says) {
    xd_sample_values values = untouched_values;
    const xd_result result = xd_vsd_loss(ctx, d, &values);
    sample_refused(ctx, result, &values, expected, says);
}

XD_TEST(the_students_term_refuses_what_it_cannot_read) {
    static float room[3][12];
    char memory[64];
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_vsd_desc good = xd_vsd_defaults(), d;
    good.generated = xd_rows_of(room[0], XD_DTYPE_F32, 2, 4);
    good.teacher = xd_rows_of(room[1], XD_DTYPE_F32, 2, 4);
    good.fake = xd_rows_of(room[2], XD_DTYPE_F32, 2, 4);
    good.gradient = xd_rows_of(room[0], XD_DTYPE_F32, 2, 4);
    d = good, d.teacher.cols = 3;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "teacher is [2, 3] but [2, 4] is expected");
    d = good, d.fake.rows = 3;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "fake is [3, 4]");
    d = good, d.generated.rows = -1;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "-1 samples");
    d = good, d.generated.stride = 2;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "stride 2");
    d = good, d.fake.dtype = XD_DTYPE_F64;
    refuse_vsd(ctx, &d, XD_ERROR_DTYPE, "fake is F64");
    d = good, d.teacher.data = NULL;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "teacher has no data");
    d = good, d.gradient.dtype = XD_DTYPE_BF16;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "gradient over an input");
    d = good, d.gradient.cols = 5;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "gradient is [2, 5]");
    d = good, d.normaliser = (xd_vsd_normaliser)9;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "normaliser 9");
    d = good, d.form = (xd_vsd_form)-1;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "form -1");
    d = good, d.common.weight = 0.0;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "weight 0");
    d = good, d.common.weight = NAN;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "weight");
    d = good, d.common.denominator_value = -2.0;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "denominator -2");
    d = good, d.common.workspace = memory, d.common.workspace_bytes = sizeof memory;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "workspace has 64 bytes but the loss needs");
    d = good, d.generated.rows = d.teacher.rows = d.fake.rows = INT64_MAX / 4, d.gradient.data = NULL;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "would not fit");
    xd_sample_values values;
    CHECK_EQ_INT(PLANNED_WORKSPACE(ctx, xd_vsd_loss(ctx, &d, &values)), 0);
    xd_ctx_destroy(ctx);
}

static void refuse_denoise(xd_ctx *ctx, const xd_denoise_desc *d, xd_result expected, const char *says) {
    xd_sample_values values = untouched_values;
    const xd_result result = xd_denoise_loss(ctx, d, &values);
    sample_refused(ctx, result, &values, expected, says);
}

XD_TEST(the_denoising_term_refuses_what_it_cannot_read) {
    static float room[3][12];
    static const xd_denoise_term terms[2] = { { 1, 1, 1, 1 }, { 1, 1, 1, 1 } };
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_denoise_desc good = xd_denoise_defaults(), d;
    good.prediction = xd_rows_of(room[0], XD_DTYPE_F32, 2, 4);
    good.clean = xd_rows_of(room[1], XD_DTYPE_F32, 2, 4);
    good.noise = xd_rows_of(room[2], XD_DTYPE_F32, 2, 4);
    good.terms = terms;
    d = good, d.terms = NULL;
    refuse_denoise(ctx, &d, XD_ERROR_ARGUMENT, "no terms for 2 samples");
    d = good, d.noise.cols = 3;
    refuse_denoise(ctx, &d, XD_ERROR_SHAPE, "noise is [2, 3]");
    d = good, d.clean.dtype = XD_DTYPE_I32;
    refuse_denoise(ctx, &d, XD_ERROR_DTYPE, "clean is I32");
    d = good, d.common.weight = -1.0;
    refuse_denoise(ctx, &d, XD_ERROR_ARGUMENT, "weight -1");
    xd_ctx_destroy(ctx);
}

/* One rank refuses, or ranks have different numbers of samples: all return an error. */
static xd_result uneven_rank(xd_comm *world, void *argument) {
    static float room[2][3][12];
    const int rank = xd_comm_rank(world), *variant = (const int *)argument;
    xd_vsd_desc d = xd_vsd_defaults();
    xd_sample_values values = { 5.0, 5.0, 5 };
    const int64_t rows = *variant == 0 ? 2 - rank : 2;
    d.generated = xd_rows_of(room[rank][0], XD_DTYPE_F32, rows, 4);
    d.teacher = xd_rows_of(room[rank][1], XD_DTYPE_F32, rows, 4);
    d.fake = xd_rows_of(room[rank][2], XD_DTYPE_F32, rows, 4);
    if (*variant == 1 && rank == 1) d.common.weight = -3.0;
    if (*variant == 2) d.common.comm = world;
    if (*variant == 2 && rank == 0) d.fake.cols = 9;
    if (*variant != 2) d.common.split = world;
    const xd_result result = xd_vsd_loss(xd_comm_ctx(world), &d, &values);
    const xd_result own = *variant == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_SHAPE;
    const bool mine = rank == (*variant == 1); /* the others are told whose */
    CHECK_EQ_INT(result, *variant == 0 ? XD_ERROR_MISMATCH : mine ? own : XD_ERROR_PEER);
    CHECK(*variant == 0 ||
          strstr(xd_last_error(xd_comm_ctx(world))->message, *variant == 1 ? "weight -3" : "[2, 9]"));
    CHECK_NEAR(values.loss, 5.0, 0.0);
    return XD_OK;
}

XD_TEST(all_ranks_refuse_alike) {
    for (int variant = 0; variant < 3; variant++)
        CHECK_EQ_INT(xd_run_threads(2, NULL, uneven_rank, &variant, NULL), XD_OK);
}

XD_TEST_MAIN()
