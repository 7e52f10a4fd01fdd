/* Terms of the denoising loss: factors and weights by space and schedule. */

#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/internal.h"
#endif

#include "xd_test.h"

static xd_ctx *context(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

XD_TEST(terms_are_those_of_the_table_for_rectified_flow) {
    static const double t = 0.3;
    xd_ctx *ctx = context();
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW);
    const double factor[] = { -t, 1.0 - t, 0.0, 1.0 }; /* of r = v - (eps - x), by space */
    static const xd_prediction spaces[] = { XD_PREDICT_X0, XD_PREDICT_EPS, XD_PREDICT_FLOW };
    for (int k = 0; k < 3; k++) {
        xd_denoise_form form;
        xd_denoise_term term;
        memset(&form, 0, sizeof form);
        form.native = XD_PREDICT_FLOW;
        form.space = spaces[k];
        CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &form, t, &term), XD_OK);
        const double a = factor[(int)spaces[k]];
        CHECK_NEAR(term.prediction, a, 1e-12);
        CHECK_NEAR(term.clean, a, 1e-12);
        CHECK_NEAR(term.noise, -a, 1e-12);
        CHECK_NEAR(term.weight, 1.0, 0.0);
    }
    xd_ctx_destroy(ctx);
}

/* A prediction made from x and eps leaves no residual, whatever is predicted and wherever it is compared. */
XD_TEST(a_perfect_prediction_leaves_no_residual_in_any_space) {
    static const xd_noise_kind kinds[] = { XD_NOISE_FLOW, XD_NOISE_EDM, XD_NOISE_TRIG };
    xd_ctx *ctx = context();
    for (int k = 0; k < 3; k++)
        for (int native = 0; native <= (int)XD_PREDICT_SCORE; native++)
            for (int space = 0; space <= (int)XD_PREDICT_SCORE; space++) {
                const xd_noise_schedule schedule = xd_noise_defaults(kinds[k]);
                xd_denoise_form form;
                xd_denoise_term term;
                xd_mix target;
                xd_conversion predicted;
                memset(&form, 0, sizeof form);
                memset(&predicted, 0, sizeof predicted);
                predicted.to = (xd_prediction)native;
                form.native = (xd_prediction)native;
                form.space = (xd_prediction)space;
                const bool has_v = kinds[k] == XD_NOISE_TRIG;
                if (!has_v && (native == (int)XD_PREDICT_V || space == (int)XD_PREDICT_V)) {
                    CHECK_EQ_INT(xd_denoise_term_at(ctx, &schedule, &form, 0.7, &term), XD_ERROR_ARGUMENT);
                    continue;
                }
                CHECK_EQ_INT(xd_denoise_term_at(ctx, &schedule, &form, 0.7, &term), XD_OK);
                CHECK_EQ_INT(xdi_target_mix(ctx, &schedule, &predicted, 0.7, &target), XD_OK);
                CHECK_NEAR(term.prediction * target.c0 + term.clean, 0.0, 1e-12);
                CHECK_NEAR(term.prediction * target.c1 + term.noise, 0.0, 1e-12);
            }
    xd_ctx_destroy(ctx);
}

XD_TEST(weights_of_terms_are_those_of_the_ratio) {
    xd_ctx *ctx = context();
    const xd_noise_schedule edm = xd_noise_defaults(XD_NOISE_EDM);
    xd_denoise_form form;
    xd_denoise_term term = { 9, 9, 9, 9 };
    memset(&form, 0, sizeof form);
    form.weight = XD_DENOISE_EDM;
    form.sigma_data = 0.5;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 2.0, &term), XD_OK);
    CHECK_NEAR(term.weight, 0.25 + 4.0, 1e-12);
    form.weight = XD_DENOISE_SNR_MIN;
    form.gamma = 5.0;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 2.0, &term), XD_OK);
    CHECK_NEAR(term.weight, 0.25, 1e-12);
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 0.1, &term), XD_OK);
    CHECK_NEAR(term.weight, 5.0, 0.0);
    form.weight = XD_DENOISE_USER;
    form.user = 0.0;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 0.1, &term), XD_OK);
    CHECK_NEAR(term.weight, 0.0, 0.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(terms_that_mean_nothing_are_refused) {
    xd_ctx *ctx = context();
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW);
    xd_denoise_form good, f;
    xd_denoise_term term = { 9, 9, 9, 9 };
    memset(&good, 0, sizeof good);
    f = good, f.weight = (xd_denoise_weight)7;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_EDM; /* sigma_data 0 */
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_SNR_MIN, f.gamma = -1.0;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_SNR_MIN, f.gamma = 5.0, f.space = XD_PREDICT_EPS;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_USER, f.user = NAN;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.native = XD_PREDICT_V, f.space = XD_PREDICT_V; /* under rectified flow */
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.native = XD_PREDICT_FLOW, f.v_of_any_schedule = true;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &good, NAN, &term), XD_ERROR_ARGUMENT);
    CHECK_NEAR(term.weight, 9.0, 0.0);
    f = good, f.native = XD_PREDICT_V, f.space = XD_PREDICT_V, f.v_of_any_schedule = true;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &term), XD_OK);
    CHECK_NEAR(term.clean, 0.25, 0.0);
    CHECK_NEAR(term.noise, -0.75, 0.0);
    xd_ctx_destroy(ctx);
}

/* r = flow of the prediction - (alpha eps - sigma x0); at t = 1/4 the flow of eps p is (p - x_t) / (1 - t). */
XD_TEST(another_type_is_made_flow_before_it_is_compared_with_v) {
    xd_ctx *ctx = context();
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW);
    xd_denoise_form f;
    xd_denoise_term term = { 9, 9, 9, 9 };
    memset(&f, 0, sizeof f);
    f.native = XD_PREDICT_EPS, f.space = XD_PREDICT_V, f.v_of_any_schedule = f.v_is_flow = true;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &term), XD_OK);
    CHECK_NEAR(term.prediction, 4.0 / 3.0, 1e-15);
    CHECK_NEAR(term.clean, -1.0 + 0.25, 1e-15);
    CHECK_NEAR(term.noise, -1.0 / 3.0 - 0.75, 1e-15);
    f.native = XD_PREDICT_FLOW; /* what v is here */
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &term), XD_OK);
    CHECK_NEAR(term.prediction, 1.0, 0.0);
    CHECK_NEAR(term.clean, 0.25, 0.0);
    CHECK_NEAR(term.noise, -0.75, 0.0);
    xd_ctx_destroy(ctx);
}

/* A trainer's V under rectified flow: as a native type and as a space it has the numbers of FLOW. */
XD_TEST(v_that_is_flow_has_the_terms_of_flow) {
    static const xd_prediction ends[][2] = { { XD_PREDICT_V, XD_PREDICT_V },
                                             { XD_PREDICT_V, XD_PREDICT_X0 },
                                             { XD_PREDICT_EPS, XD_PREDICT_V } };
    xd_ctx *ctx = context();
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW), trig = xd_noise_defaults(XD_NOISE_TRIG);
    for (int k = 0; k < 3; k++) {
        xd_denoise_form f;
        xd_denoise_term term = { 9, 9, 9, 9 }, expected = { 9, 9, 9, 9 };
        memset(&f, 0, sizeof f);
        f.native = ends[k][0] == XD_PREDICT_V ? XD_PREDICT_FLOW : ends[k][0];
        f.space = ends[k][1] == XD_PREDICT_V ? XD_PREDICT_FLOW : ends[k][1];
        CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &expected), XD_OK);
        f.native = ends[k][0];
        f.space = ends[k][1];
        CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &term), XD_ERROR_ARGUMENT);
        f.v_is_flow = true;
        CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &term), XD_OK);
        CHECK(memcmp(&term, &expected, sizeof term) == 0);
        CHECK_EQ_INT(xd_denoise_term_at(ctx, &trig, &f, 0.25, &term), XD_ERROR_ARGUMENT);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
