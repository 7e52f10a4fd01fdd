/* Noise schedules: levels, ratios and their inverses, grids, lists of few steps, what networks see, EDM's factors; and every
 * refusal. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/internal.h"
#endif
#include "xd_test.h"

#include <math.h>

enum { STEPS = 1000 };

static xd_ctx *open_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

/* A table like Stable Diffusion's: betas whose roots are evenly spaced. */
static const double *table(void) {
    static double values[STEPS];
    double product = 1.0;
    for (int k = 0; k < STEPS; k++) {
        const double root = sqrt(0.00085) + k * (sqrt(0.012) - sqrt(0.00085)) / (STEPS - 1);
        values[k] = product *= 1.0 - root * root;
    }
    return values;
}

/* alpha = (1 - t)^2, sigma = t (2 - t): no known kind. */
static void square_level(void *user, double t, xd_noise_level *level) {
    *(int *)user += 1;
    level->alpha = (1.0 - t) * (1.0 - t);
    level->sigma = t * (2.0 - t);
    level->alpha_rate = -2.0 * (1.0 - t);
    level->sigma_rate = 2.0 * (1.0 - t);
}

static void broken_level(void *user, double t, xd_noise_level *level) {
    (void)user, (void)t;
    level->alpha = (double)INFINITY;
    level->sigma = 1.0;
}

static int custom_calls;

static xd_noise_schedule schedule_of(xd_noise_kind kind) {
    xd_noise_schedule s = xd_noise_defaults(kind);
    if (kind == XD_NOISE_VP) s.table = table(), s.table_count = STEPS;
    if (kind == XD_NOISE_CUSTOM) s.custom = square_level, s.user = &custom_calls;
    return s;
}

static xd_noise_level level_at(xd_ctx *ctx, const xd_noise_schedule *s, double t) {
    xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
    CHECK(xdi_noise_level_at(ctx, s, t, &level) == XD_OK);
    return level;
}

/* The call failed with this result and message. */
static void refused(xd_ctx *ctx, xd_result result, const char *words) {
    CHECK(result == XD_ERROR_ARGUMENT);
    if (!strstr(xd_last_error(ctx)->message, words)) CHECK_EQ_STR(xd_last_error(ctx)->message, words);
}

XD_TEST(levels_are_those_of_the_table_in_the_header) {
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW), edm = schedule_of(XD_NOISE_EDM);
    const xd_noise_schedule trig = schedule_of(XD_NOISE_TRIG), own = schedule_of(XD_NOISE_CUSTOM);
    xd_noise_level l = level_at(ctx, &flow, 0.25);
    CHECK(l.alpha == 0.75 && l.sigma == 0.25 && l.alpha_rate == -1.0 && l.sigma_rate == 1.0);
    l = level_at(ctx, &edm, 7.5);
    CHECK(l.alpha == 1.0 && l.sigma == 7.5 && l.alpha_rate == 0.0 && l.sigma_rate == 1.0);
    l = level_at(ctx, &trig, 0.3);
    CHECK(l.alpha == cos(0.3) && l.sigma == sin(0.3) && l.alpha_rate == -sin(0.3) &&
          l.sigma_rate == cos(0.3));
    l = level_at(ctx, &own, 0.5);
    CHECK(l.alpha == 0.25 && l.sigma == 0.75 && l.alpha_rate == -1.0 && l.sigma_rate == 1.0);
    CHECK(custom_calls > 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_table_is_looked_up_without_interpolation_and_has_no_rates) {
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule vp = schedule_of(XD_NOISE_VP);
    for (int k = 0; k < STEPS; k++) {
        double t = 0.0;
        CHECK(xdi_noise_grid_time(ctx, &vp, STEPS, k, &t) == XD_OK);
        CHECK_NEAR(t, k / 1000.0, 1e-15);
        const xd_noise_level l = level_at(ctx, &vp, t);
        CHECK(l.alpha == sqrt(table()[k]) && l.sigma == sqrt(1.0 - table()[k]));
        CHECK(isnan(l.alpha_rate) && isnan(l.sigma_rate));
        CHECK_NEAR(l.alpha * l.alpha + l.sigma * l.sigma, 1.0, 1e-15);
        if (k < 999) CHECK(level_at(ctx, &vp, t + 0.0009).alpha == l.alpha);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(steps_of_tables_of_any_length_are_found_at_their_times) {
    static const int64_t lengths[] = { 1, 2, 50, 100, 999 };
    xd_ctx *ctx = open_ctx();
    for (int i = 0; i < 5; i++) {
        xd_noise_schedule vp = schedule_of(XD_NOISE_VP);
        vp.table_count = lengths[i];
        vp.max_t = 1.0;
        for (int64_t k = 0; k < lengths[i]; k++) {
            double t = 0.0;
            CHECK(xdi_noise_grid_time(ctx, &vp, lengths[i], k, &t) == XD_OK);
            CHECK(level_at(ctx, &vp, t).alpha == sqrt(table()[k]));
        }
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(the_ratio_and_its_inverse_undo_each_other) {
    static const xd_noise_kind kinds[] = { XD_NOISE_FLOW, XD_NOISE_EDM, XD_NOISE_TRIG, XD_NOISE_CUSTOM };
    xd_ctx *ctx = open_ctx();
    for (int k = 0; k < 4; k++) {
        const xd_noise_schedule s = schedule_of(kinds[k]);
        for (int i = 1; i < 20; i++) {
            const double t = s.min_t + (s.max_t - s.min_t) * i / 20.0;
            double ratio = 0.0, back = 0.0;
            CHECK(xdi_noise_ratio(ctx, &s, t, &ratio) == XD_OK);
            const xd_noise_level l = level_at(ctx, &s, t);
            CHECK(ratio == l.alpha / l.sigma);
            CHECK(xdi_noise_time_of_ratio(ctx, &s, ratio, false, &back) == XD_OK);
            CHECK_NEAR(back, t, 1e-13 * (1.0 + t));
        }
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(the_inverse_of_a_table_finds_the_step_and_the_missing_root_does_not) {
    xd_ctx *ctx = open_ctx();
    xd_noise_schedule vp = schedule_of(XD_NOISE_VP);
    for (int k = 0; k < STEPS; k += 37) {
        const double ratio = sqrt(table()[k]) / sqrt(1.0 - table()[k]);
        double t = 0.0, other = 0.0;
        CHECK(xdi_noise_time_of_ratio(ctx, &vp, ratio, false, &t) == XD_OK);
        CHECK_NEAR(t, k / 1000.0, 1e-15);
        CHECK(xdi_noise_time_of_ratio(ctx, &vp, ratio, true, &other) == XD_OK);
        if (k > 0) CHECK(other < t);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(ratios_are_bounded_and_their_times_stay_in_the_range) {
    xd_ctx *ctx = open_ctx();
    xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    double ratio = 0.0, t = -1.0;
    CHECK(xdi_noise_ratio(ctx, &flow, 0.0, &ratio) == XD_OK && ratio == 1.0 / 1e-6);
    flow.clamp_min = 1e-3;
    CHECK(xdi_noise_ratio(ctx, &flow, 0.0, &ratio) == XD_OK && ratio == 1.0 / 1e-3);
    for (int k = XD_NOISE_FLOW; k <= XD_NOISE_CUSTOM; k++) {
        const xd_noise_schedule s = schedule_of((xd_noise_kind)k);
        CHECK(xdi_noise_time_of_ratio(ctx, &s, 0.0, false, &t) == XD_OK);
        CHECK_NEAR(t, s.max_t, 1e-15);
        CHECK(xdi_noise_time_of_ratio(ctx, &s, (double)INFINITY, false, &t) == XD_OK);
        CHECK_NEAR(t, s.min_t, 1e-15);
    }
    t = 7.0;
    refused(ctx, xdi_noise_time_of_ratio(ctx, &flow, -0.5, false, &t), "-0.5 is no ratio");
    refused(ctx, xdi_noise_time_of_ratio(ctx, &flow, (double)NAN, false, &t), "nan is no ratio");
    CHECK(t == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_grid_of_edm_has_the_known_times) {
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule edm = schedule_of(XD_NOISE_EDM), flow = schedule_of(XD_NOISE_FLOW);
    double t = 0.0;
    CHECK(xdi_noise_grid_time(ctx, &edm, 1000, 2, &t) == XD_OK);
    CHECK_NEAR(t, 0.0021014704457180803, 1e-15);
    CHECK(xdi_noise_grid_time(ctx, &edm, 1000, 500, &t) == XD_OK);
    CHECK_NEAR(t, 2.5265068484381206, 1e-13);
    CHECK(xdi_noise_grid_time(ctx, &edm, 1000, 998, &t) == XD_OK);
    CHECK_NEAR(t, 79.56382521581216, 1e-12);
    CHECK(xdi_noise_grid_time(ctx, &flow, 1000, 999, &t) == XD_OK && t == 0.999);
    CHECK(xdi_noise_grid_time(ctx, &flow, 1000, 0, &t) == XD_OK && t == 0.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_nearest_sigma_is_found_and_of_two_the_lower_one) {
    xd_ctx *ctx = open_ctx();
    xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    int64_t index = -1;
    flow.max_t = 1.0;
    CHECK(xdi_noise_nearest(ctx, &flow, 5, 0.375, &index) == XD_OK);
    CHECK_EQ_INT(index, 1); /* 0.25 and 0.5 are as far */
    CHECK(xdi_noise_nearest(ctx, &flow, 5, 0.376, &index) == XD_OK);
    CHECK_EQ_INT(index, 2);
    CHECK(xdi_noise_nearest(ctx, &flow, 5, -3.0, &index) == XD_OK);
    CHECK_EQ_INT(index, 0);
    CHECK(xdi_noise_nearest(ctx, &flow, 5, 3.0, &index) == XD_OK);
    CHECK_EQ_INT(index, 4);
    refused(ctx, xdi_noise_nearest(ctx, &flow, 5, (double)NAN, &index), "nearest to nan");
    CHECK_EQ_INT(index, 4);
    xd_ctx_destroy(ctx);
}

XD_TEST(lists_of_few_steps_descend_to_zero) {
    static const double edm4[] = { 79.56382521581216, 17.498106, 2.5265068484381206, 0.172566, 0.0 };
    static const double flow4[] = { 0.999, 0.74925, 0.4995, 0.24975, 0.0 };
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule edm = schedule_of(XD_NOISE_EDM), flow = schedule_of(XD_NOISE_FLOW);
    double list[997];
    CHECK(xd_noise_steps(ctx, &edm, 4, list) == XD_OK);
    for (int i = 0; i < 5; i++) CHECK_NEAR(list[i], edm4[i], 5e-7);
    CHECK(xd_noise_steps(ctx, &flow, 4, list) == XD_OK);
    for (int i = 0; i < 5; i++) CHECK_NEAR(list[i], flow4[i], 1e-15);
    for (int k = XD_NOISE_FLOW; k <= XD_NOISE_CUSTOM; k++) {
        const xd_noise_schedule s = schedule_of((xd_noise_kind)k);
        for (int steps = 1; steps <= 996; steps = steps * 3 + (steps == 1)) {
            CHECK(xd_noise_steps(ctx, &s, steps, list) == XD_OK);
            CHECK(xdi_noise_check_steps(ctx, &s, steps, list, steps + 1) == XD_OK);
        }
        CHECK(xd_noise_steps(ctx, &s, 996, list) == XD_OK);
        CHECK(xdi_noise_check_steps(ctx, &s, 996, list, 997) == XD_OK);
    }
    list[0] = 7.0;
    refused(ctx, xd_noise_steps(ctx, &flow, 0, list), "0 steps");
    refused(ctx, xd_noise_steps(ctx, &flow, 997, list), "997 steps: 1 to 996");
    CHECK(list[0] == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(lists_that_do_not_fit_are_refused_with_both_numbers) {
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    const double good[] = { 0.999, 0.5, 0.0 }, rising[] = { 0.5, 0.75, 0.0 }, equal[] = { 0.5, 0.5, 0.0 };
    const double high[] = { 1.5, 0.5, 0.0 }, open[] = { 0.75, 0.5, 0.25 }, none[] = { 0.5, (double)NAN, 0.0 };
    CHECK(xdi_noise_check_steps(ctx, &flow, 2, good, 3) == XD_OK);
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 4, good, 3),
            "a list of 3 times for 4 steps: 5 are needed");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 0, good, 1), "a student of 0 steps");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 2, NULL, 3), "no list of 3 times for 2 steps");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 2, rising, 3), "0.75 comes after 0.5");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 2, equal, 3), "0.5 comes after 0.5");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 2, none, 3), "nan comes after 0.5");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 2, high, 3), "begins at 1.5, above max_t 0.999");
    refused(ctx, xdi_noise_check_steps(ctx, &flow, 2, open, 3), "ends in 0.25, not in 0");
    xd_ctx_destroy(ctx);
}

XD_TEST(schedules_that_make_no_sense_are_refused) {
    xd_ctx *ctx = open_ctx();
    xd_noise_schedule s = schedule_of(XD_NOISE_FLOW);
    s.max_t = 1.0;
    CHECK(xdi_noise_check(ctx, &s) == XD_OK);
    s.max_t = 1.25;
    refused(ctx, xdi_noise_check(ctx, &s), "max_t 1.25 is past the schedule's end, 1");
    s.max_t = 0.5, s.min_t = 0.5;
    refused(ctx, xdi_noise_check(ctx, &s), "from min_t 0.5 to max_t 0.5");
    s.min_t = -0.25;
    refused(ctx, xdi_noise_check(ctx, &s), "from min_t -0.25 to max_t 0.5");
    s.min_t = (double)NAN;
    refused(ctx, xdi_noise_check(ctx, &s), "from min_t nan");
    s.min_t = 0.0, s.max_t = (double)INFINITY, s.kind = XD_NOISE_EDM;
    refused(ctx, xdi_noise_check(ctx, &s), "to max_t inf");
    s = schedule_of(XD_NOISE_TRIG);
    s.max_t = 2.0;
    refused(ctx, xdi_noise_check(ctx, &s), "max_t 2 is past");
    s = schedule_of(XD_NOISE_FLOW);
    s.clamp_min = -1e-6;
    refused(ctx, xdi_noise_check(ctx, &s), "clamp_min, the bound on divisors, is -1e-06");
    s.kind = (xd_noise_kind)9;
    refused(ctx, xdi_noise_check(ctx, &s), "kind 9 is no noise schedule");
    refused(ctx, xdi_noise_check(ctx, NULL), "no noise schedule is given");
    s = xd_noise_defaults(XD_NOISE_CUSTOM);
    refused(ctx, xdi_noise_check(ctx, &s), "without a function");
    xd_ctx_destroy(ctx);
}

XD_TEST(tables_that_rise_or_leave_their_range_are_refused) {
    xd_ctx *ctx = open_ctx();
    xd_noise_schedule s = xd_noise_defaults(XD_NOISE_VP);
    double values[3] = { 0.75, 0.5, 0.25 };
    refused(ctx, xdi_noise_check(ctx, &s), "no table of 0 steps");
    s.table = values;
    refused(ctx, xdi_noise_check(ctx, &s), "a table of 0 steps");
    s.table_count = 3;
    CHECK(xdi_noise_check(ctx, &s) == XD_OK);
    values[2] = 0.625;
    refused(ctx, xdi_noise_check(ctx, &s), "rises from 0.5 to 0.625 at step 2");
    values[2] = 0.0;
    refused(ctx, xdi_noise_check(ctx, &s), "step 2 of the table is 0");
    values[2] = (double)NAN;
    refused(ctx, xdi_noise_check(ctx, &s), "step 2 of the table is nan");
    values[2] = 0.25, values[0] = 1.5;
    refused(ctx, xdi_noise_check(ctx, &s), "step 0 of the table is 1.5");
    xd_ctx_destroy(ctx);
}

XD_TEST(a_time_may_be_one_f32_beyond_the_ends_and_no_more) {
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW), edm = schedule_of(XD_NOISE_EDM);
    xd_noise_level l = { 7.0, 7.0, 7.0, 7.0 };
    CHECK((double)0.999f > 0.999);
    CHECK(xdi_noise_level_at(ctx, &flow, (double)0.999f, &l) == XD_OK && l.sigma == (double)0.999f);
    l.alpha = 7.0;
    refused(ctx, xdi_noise_level_at(ctx, &flow, 0.9991, &l),
            "t 0.9991 is outside the schedule's times, 0 to 0.999");
    refused(ctx, xdi_noise_level_at(ctx, &flow, -0.1, &l), "t -0.1 is outside");
    refused(ctx, xdi_noise_level_at(ctx, &flow, (double)NAN, &l), "t nan is outside");
    refused(ctx, xdi_noise_level_at(ctx, &edm, 0.0, &l), "t 0 is outside the schedule's times, 0.002 to 80");
    refused(ctx, xdi_noise_level_at(ctx, &edm, 81.0, &l), "t 81 is outside");
    xd_noise_schedule own = schedule_of(XD_NOISE_CUSTOM);
    own.custom = broken_level;
    refused(ctx, xdi_noise_level_at(ctx, &own, 0.5, &l), "alpha is inf and its sigma 1 at t 0.5");
    CHECK(l.alpha == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(grids_that_do_not_exist_are_refused) {
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW), vp = schedule_of(XD_NOISE_VP);
    double t = 7.0;
    int64_t index = 7;
    refused(ctx, xdi_noise_grid_time(ctx, &flow, 1, 0, &t), "a grid of 1 times");
    refused(ctx, xdi_noise_grid_time(ctx, &flow, 10, 10, &t), "time 10 of a grid of 10");
    refused(ctx, xdi_noise_grid_time(ctx, &flow, 10, -1, &t), "time -1 of a grid of 10");
    refused(ctx, xdi_noise_grid_time(ctx, &vp, 10, 1, &t), "a grid of 10 times of a table of 1000 steps");
    refused(ctx, xdi_noise_nearest(ctx, &vp, 10, 0.5, &index), "a grid of 10 times of a table of 1000 steps");
    CHECK(t == 7.0 && index == 7);
    xd_ctx_destroy(ctx);
}

XD_TEST(networks_see_times_in_their_own_type) {
    CHECK(xdi_noise_network_time(0.999, 0.0, XD_DTYPE_F64) == 0.999);
    CHECK(xdi_noise_network_time(0.999, 0.0, XD_DTYPE_F32) == (double)0.999f);
    CHECK(xdi_noise_network_time(0.999, 0.0, XD_DTYPE_BF16) == 1.0);
    CHECK(xdi_noise_network_time(0.74925, 0.0, XD_DTYPE_BF16) == 0.75);
    CHECK(xdi_noise_network_time(0.999, 1000.0, XD_DTYPE_BF16) == 1000.0);
    CHECK(xdi_noise_network_time(0.74925, 1000.0, XD_DTYPE_BF16) == 748.0);
    CHECK(xdi_noise_network_time(0.25, 1000.0, XD_DTYPE_F16) == 250.0);
    CHECK(xdi_noise_network_time(0.25, 1000.0, XD_DTYPE_F64) == 250.0);
    CHECK(isnan(xdi_noise_network_time(0.25, 1000.0, XD_DTYPE_I64)));
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW), edm = xd_noise_defaults(XD_NOISE_EDM);
    CHECK(xdi_noise_network_scale(&flow) == 1000.0 && xdi_noise_network_scale(&edm) == 1.0);
}

XD_TEST(factors_of_an_edm_network_are_those_of_its_formulas) {
    xd_ctx *ctx = open_ctx();
    xd_edm_desc d = { 0.0, 0.0, 0.0 };
    xd_edm_scales s;
    CHECK(xd_edm_scales_at(ctx, &d, 2.0, &s) == XD_OK);
    CHECK_NEAR(s.input, 1.0 / 2.0615528128088303, 1e-16);
    CHECK_NEAR(s.label, 0.17328679513998633, 1e-16);
    CHECK_NEAR(s.denoised.c0, 1.0 / 2.0615528128088303, 1e-15);
    CHECK_NEAR(s.denoised.c1, 0.25 / 4.25, 1e-16);
    /* A network that is right about data of deviation sigma_data: c0 and c1 keep the variance. */
    const double variance = s.denoised.c0 * s.denoised.c0 + s.denoised.c1 * s.denoised.c1 * 4.25;
    CHECK_NEAR(variance, 0.25, 1e-15);
    d.sigma_shift = 0.5;
    xd_edm_scales shifted, direct;
    CHECK(xd_edm_scales_at(ctx, &d, 1.5, &shifted) == XD_OK);
    d.sigma_shift = 0.0;
    CHECK(xd_edm_scales_at(ctx, &d, 2.0, &direct) == XD_OK);
    CHECK(shifted.input == direct.input && shifted.denoised.c1 == direct.denoised.c1);
    CHECK(xd_edm_scales_at(ctx, &d, 0.0, &s) == XD_OK && s.label == log(1e-6) / 4.0 && s.denoised.c1 == 1.0);
    d.sigma_data = -0.5, s.input = 7.0;
    refused(ctx, xd_edm_scales_at(ctx, &d, 2.0, &s), "sigma_data is -0.5");
    d.sigma_data = 0.5;
    refused(ctx, xd_edm_scales_at(ctx, &d, -2.0, &s), "t -2 shifted by 0 is -2");
    d.min_t = -1.0;
    refused(ctx, xd_edm_scales_at(ctx, &d, 2.0, &s), "min_t is -1");
    CHECK(s.input == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(factors_of_an_edm_network_are_finite_at_every_size) {
    static const double sizes[] = { 1e-300, 1e-160, 1e-9, 0.5, 80.0, 1e153, 1e155, 1e200, 1e308 };
    xd_ctx *ctx = open_ctx();
    xd_edm_desc d = { 0.0, 0.0, 0.0 };
    xd_edm_scales s = { 7.0, 7.0, { 7.0, 7.0 } };
    for (int i = 0; i < 9; i++)
        for (int k = 0; k < 9; k++) {
            const double t = sizes[i], data = sizes[k], root = hypot(t, data), larger = t > data ? t : data;
            d.sigma_data = data;
            CHECK(xd_edm_scales_at(ctx, &d, t, &s) == XD_OK);
            CHECK_NEAR(s.input * larger, larger / root, 1e-14);
            CHECK_NEAR(s.denoised.c0 / (t < data ? t : data), larger / root, 1e-14);
            CHECK_NEAR(s.denoised.c1, data / root * (data / root), 1e-14);
        }
    d.sigma_data = 1e-310, s.input = 7.0;
    refused(ctx, xd_edm_scales_at(ctx, &d, 0.0, &s), "sigma_data 1e-310 and shifted t 0 are too small");
    CHECK(s.input == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
