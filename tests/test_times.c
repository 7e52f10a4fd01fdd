/* Times of samples: known values of every distribution, their inverses against closed forms and 30-digit arithmetic, ends and clamps,
 * draws from counters, chunks of frames; and every refusal. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/internal.h"
#endif
#include "xd_test.h"

#include <math.h>

static xd_ctx *open_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

/* Model-Optimizer's settings in double. */
static xd_time_sampler sampler_of(xd_time_kind kind) {
    xd_time_sampler s = xd_times_defaults(XD_DMD_MODELOPT);
    s.kind = kind;
    s.dtype = XD_DTYPE_F64;
    return s;
}

static double time_of(xd_ctx *ctx, const xd_time_sampler *s, double draw) {
    double t = (double)NAN;
    CHECK(xdi_time_of_draw(ctx, s, draw, &t) == XD_OK);
    return t;
}

static void refused(xd_ctx *ctx, xd_result result, xd_result expected, const char *words) {
    CHECK_EQ_INT(result, expected);
    if (!strstr(xd_last_error(ctx)->message, words)) CHECK_EQ_STR(xd_last_error(ctx)->message, words);
}

XD_TEST(times_have_the_known_values) {
    static const double shifted[] = { 0.0049800796812749, 0.6256243756243757, 0.8333333333333334,
                                      0.9373436718359179, 0.999 };
    static const double logit[] = { 0.11996451617807331, 0.5, 0.8169393272412564 };
    static const double normals[] = { -2.0, 0.0, 1.5 }, uniforms[] = { 0.1, 0.5, 0.9 };
    static const double narrow[] = { 0.19296609929045502, 0.5090963915448075, 0.8811133625816618 };
    static const double wide[] = { 0.06471431475015954, 0.30120010256961854, 1.4019466928265036 };
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_SHIFTED);
    for (int i = 0; i < 5; i++) CHECK_NEAR(time_of(ctx, &s, i * 0.25), shifted[i], 1e-15);
    s.kind = XD_TIME_LOGIT_NORMAL;
    for (int i = 0; i < 3; i++) CHECK_NEAR(time_of(ctx, &s, normals[i]), logit[i], 1e-15);
    s.kind = XD_TIME_LOG_NORMAL;
    for (int i = 0; i < 3; i++) CHECK_NEAR(time_of(ctx, &s, uniforms[i]), narrow[i], 1e-12);
    s.min_t = 0.002, s.max_t = 80.0, s.mean = -1.2, s.deviation = 1.2;
    for (int i = 0; i < 3; i++) CHECK_NEAR(time_of(ctx, &s, uniforms[i]), wide[i], 1e-12);
    s = sampler_of(XD_TIME_UNIFORM);
    CHECK_NEAR(time_of(ctx, &s, 0.5), 0.5, 1e-15);
    xd_ctx_destroy(ctx);
}

XD_TEST(students_t_has_the_values_of_thirty_digits) {
    static const double freedoms[] = { 0.01, 5.0, 1000.0 };
    static const double expected[3][3] = {
        { 0.0339812438482866951, 0.335112239806496674, 3.83817884323122136 },
        { 0.0233903987439057765, 0.337315574284463062, 5.06511407598491169 },
        { 0.0269371860741611511, 0.334737902081747639, 4.2168773087895455 },
    };
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = xd_times_defaults(XD_DMD_FASTGEN);
    s.kind = XD_TIME_LOG_T;
    for (int i = 0; i < 3; i++) {
        s.freedom = freedoms[i];
        for (int k = 0; k < 3; k++)
            CHECK_NEAR(time_of(ctx, &s, 0.1 + 0.4 * k), expected[i][k], 1e-13 * expected[i][k]);
    }
    xd_ctx_destroy(ctx);
}

/* The distributions differ by x^3 / (4 freedom). */
XD_TEST(many_degrees_of_freedom_are_the_normal_distribution) {
    xd_ctx *ctx = open_ctx();
    for (double freedom = 1e8; freedom < 1e301; freedom *= 1e4)
        for (int i = 0; i <= 16; i++) {
            xd_time_sampler s = xd_times_defaults(XD_DMD_FASTGEN);
            s.kind = XD_TIME_LOG_NORMAL;
            const double expected = time_of(ctx, &s, i / 16.0);
            s.kind = XD_TIME_LOG_T;
            s.freedom = freedom;
            CHECK_NEAR(time_of(ctx, &s, i / 16.0), expected, (1e-12 + 20.0 / freedom) * expected);
        }
    xd_ctx_destroy(ctx);
}

XD_TEST(one_degree_of_freedom_is_the_distribution_of_cauchy) {
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = xd_times_defaults(XD_DMD_FASTGEN);
    s.kind = XD_TIME_LOG_T;
    s.freedom = 1.0;
    const double a = atan((log(s.min_t) - s.mean) / s.deviation),
                 b = atan((log(s.max_t) - s.mean) / s.deviation);
    for (int i = 0; i <= 64; i++) {
        const double expected = exp(s.mean + s.deviation * tan(a + i / 64.0 * (b - a)));
        CHECK_NEAR(time_of(ctx, &s, i / 64.0), expected, 1e-13 * expected);
    }
    xd_ctx_destroy(ctx);
}

/* With two degrees of freedom x is exceeded with probability q(x) = 1 / ((2 + x^2) (1 + x / sqrt(2 + x^2))), which has an inverse. A
 * million deviations out, next to nothing of the distribution is in the range. */
XD_TEST(students_t_has_digits_far_out_in_a_tail) {
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = xd_times_defaults(XD_DMD_FASTGEN);
    s.kind = XD_TIME_LOG_T;
    s.freedom = 2.0;
    s.deviation = 1e-6;
    for (int side = -1; side <= 1; side += 2) {
        double q[2];
        s.mean = side > 0 ? -8.0 : 6.0;
        for (int k = 0; k < 2; k++) {
            const double x = fabs(log(k ? s.max_t : s.min_t) - s.mean) / s.deviation,
                         root = sqrt(2.0 + x * x);
            q[k] = 1.0 / (root * root * (1.0 + x / root));
        }
        for (int i = 0; i <= 16; i++) {
            const double above = q[0] + i / 16.0 * (q[1] - q[0]);
            const double x = (1.0 - 2.0 * above) / sqrt(2.0 * above * (1.0 - above));
            const double expected = exp(s.mean + side * s.deviation * x);
            CHECK_NEAR(time_of(ctx, &s, i / 16.0), expected, 1e-11 * expected);
        }
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(distributions_rise_from_one_end_to_the_other) {
    static const double freedoms[] = { 1e-6, 0.01, 3.0, 1e6 };
    xd_ctx *ctx = open_ctx();
    for (int k = 0; k < 7; k++) {
        xd_time_sampler s = xd_times_defaults(XD_DMD_FASTGEN);
        s.kind = k < 3 ? (xd_time_kind)k : XD_TIME_LOG_T;
        if (s.kind == XD_TIME_SHIFTED) s.min_t = 0.001, s.max_t = 0.999;
        if (k >= 3) s.freedom = freedoms[k - 3];
        double before = 0.0;
        for (int i = 0; i <= 200; i++) {
            const double t = time_of(ctx, &s, i / 200.0);
            CHECK(t >= s.min_t && t <= s.max_t && t >= before);
            before = t;
        }
        CHECK_NEAR(time_of(ctx, &s, 1.0), s.max_t, 1e-9 * s.max_t);
        if (s.kind != XD_TIME_SHIFTED) CHECK_NEAR(time_of(ctx, &s, 0.0), s.min_t, 1e-9 * s.min_t);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(a_range_far_out_in_a_tail_has_times) {
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_LOG_NORMAL);
    s.mean = -20.0;
    CHECK_NEAR(time_of(ctx, &s, 0.5), 0.00105393998606166768, 1e-14);
    s.mean = -40.0; /* nearly all of the mass is at min_t, and none is left in double near 1 */
    CHECK_NEAR(time_of(ctx, &s, 0.5), 0.00102114059664086009, 1e-14);
    s.mean = -1e4;
    CHECK(time_of(ctx, &s, 0.5) >= s.min_t && time_of(ctx, &s, 0.5) <= s.max_t);
    s.mean = 1e4;
    CHECK(time_of(ctx, &s, 0.5) >= s.min_t && time_of(ctx, &s, 0.5) <= s.max_t);
    s.mean = 0.0, s.min_t = 0.0;
    CHECK(time_of(ctx, &s, 0.0) <= 1e-11 && time_of(ctx, &s, 0.5) > 0.1);
    s.kind = XD_TIME_LOGIT_NORMAL;
    CHECK(time_of(ctx, &s, 1e9) == s.max_t && time_of(ctx, &s, -1e9) == s.min_t);
    CHECK(time_of(ctx, &s, (double)INFINITY) == s.max_t);
    xd_ctx_destroy(ctx);
}

/* Times in [e^(deviation below), e^(deviation above)], as numbers of deviations; to sixty digits by mpmath. */
XD_TEST(a_normal_range_has_its_times_where_probabilities_are_no_doubles) {
    static const double ranges[][2] = {
        { -37.8, -37.55 }, { -45.0, -40.0 }, { -60.0, -37.9 }, { -300.0, -200.0 }
    };
    static const double uniforms[] = { 5.5511151231257827e-17, 0.001, 0.5, 0.999 };
    static const double expected[][4] = {
        { -37.7999999999999818, -37.7313319504052428, -37.5684395810974258, -37.5500266234683303 },
        { -40.9244945299572115, -40.1722158824790764, -40.0173141267646511, -40.0000249968969414 },
        { -38.8744028172738275, -38.0817010942341409, -37.9182717396571578, -37.9000263800767129 },
        { -200.187057588377064, -200.034534931485577, -200.003465619241109, -200.000005002376552 }
    };
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_LOG_NORMAL);
    s.deviation = 0.01;
    for (int k = 0; k < 4; k++) {
        s.min_t = exp(0.01 * ranges[k][0]), s.max_t = exp(0.01 * ranges[k][1]);
        for (int i = 0; i < 4; i++)
            CHECK_NEAR(log(time_of(ctx, &s, uniforms[i])) / 0.01, expected[k][i], 1e-11 * -expected[k][i]);
        s.min_t = exp(-0.01 * ranges[k][1]), s.max_t = exp(-0.01 * ranges[k][0]);
        for (int i = 1; i < 4; i++) /* the mirrored one; 1 - 2^-54 is no double */
            CHECK_NEAR(log(time_of(ctx, &s, 1.0 - uniforms[i])) / 0.01, -expected[k][i],
                       1e-9 * -expected[k][i]);
    }
    s.min_t = exp(-0.6), s.max_t = exp(0.4);
    CHECK(time_of(ctx, &s, 0.0) == s.min_t && time_of(ctx, &s, 1.0) == s.max_t);
    s.kind = XD_TIME_LOG_T, s.freedom = 1e4, s.deviation = 0.03;
    CHECK(time_of(ctx, &s, 0.0) == s.min_t && time_of(ctx, &s, 1.0) == s.max_t);
    xd_ctx_destroy(ctx);
}

XD_TEST(narrow_times_are_clamped_to_the_f32s_inside) {
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_SHIFTED);
    CHECK(time_of(ctx, &s, 1.0) == 0.999 && (double)0.999f > 0.999);
    s.dtype = XD_DTYPE_F32;
    CHECK(time_of(ctx, &s, 1.0) == (double)nextafterf(0.999f, 0.0f));
    s.kind = XD_TIME_UNIFORM, s.shift = 1.0;
    s.min_t = 0.7; /* (float)0.7 is below it */
    CHECK((double)0.7f < 0.7 && time_of(ctx, &s, 0.0) == (double)nextafterf(0.7f, 1.0f));
    for (int i = 0; i <= 1000; i++) {
        const double t = time_of(ctx, &s, i / 1000.0);
        CHECK(t == (double)(float)t && t >= s.min_t && t <= s.max_t);
    }
    s.min_t = 0.7, s.max_t = 0.70000000001;
    double t = 7.0;
    refused(ctx, xdi_time_of_draw(ctx, &s, 0.5, &t), XD_ERROR_ARGUMENT,
            "no f32 from min_t 0.69999999999999996");
    CHECK(t == 7.0);
    xd_ctx_destroy(ctx);
}

/* With a shift of 5 every u above 0.99502 lies past max_t: 0.399 % of the times are exactly max_t. */
XD_TEST(a_shift_puts_the_known_share_on_the_last_time) {
    enum { N = 100000 };
    xd_ctx *ctx = open_ctx();
    const xd_time_sampler s = sampler_of(XD_TIME_SHIFTED);
    int at_end = 0;
    for (int i = 0; i < N; i++) at_end += time_of(ctx, &s, (i + 0.5) / N) == s.max_t;
    CHECK_NEAR(at_end / (double)N, 0.00399, 2e-5);
    xd_ctx_destroy(ctx);
}

XD_TEST(indices_choose_times_of_grids_lists_and_steps) {
    static const double list[] = { 0.999, 0.75, 0.5, 0.0 };
    xd_ctx *ctx = open_ctx();
    xd_noise_schedule edm = xd_noise_defaults(XD_NOISE_EDM);
    xd_time_sampler s = sampler_of(XD_TIME_GRID), fastgen = xd_times_defaults(XD_DMD_FASTGEN);
    double t = 0.0;
    CHECK(time_of(ctx, &s, 0.0) == 0.001 && time_of(ctx, &s, 999.0) == 0.999);
    CHECK_NEAR(time_of(ctx, &s, 500.0), 0.001 + 0.998 * 500.0 / 999.0, 1e-15);
    fastgen.kind = XD_TIME_GRID;
    CHECK(xdi_noise_grid_time(ctx, &edm, 1000, 500, &t) == XD_OK && time_of(ctx, &fastgen, 500.0) == t);
    s.kind = XD_TIME_LIST, s.list = list, s.list_count = 4;
    for (int i = 0; i < 3; i++) CHECK(time_of(ctx, &s, i) == list[i]);
    refused(ctx, xdi_time_of_draw(ctx, &s, 3.0, &t), XD_ERROR_ARGUMENT, "3 is no index from 0 to 2");
    s.list_to_end = true;
    CHECK(time_of(ctx, &s, 3.0) == 0.0); /* below min_t, and not clamped */
    s = xd_times_defaults(XD_DMD_DATA_FREE);
    CHECK_NEAR(time_of(ctx, &s, 0.5), 0.5, 1e-15);
    CHECK(time_of(ctx, &s, 0.0) == 0.02 && time_of(ctx, &s, 1.0) == 0.98);
    s = xd_times_defaults(XD_DMD_ORIGINAL);
    CHECK(s.first == 20 && s.last == 980 && (double)0.02f < 0.02);
    CHECK(time_of(ctx, &s, 20.0) == (double)nextafterf(0.02f, 1.0f));
    s.first = 0, s.last = 999;
    for (int i = 0; i < 1000; i++) { /* a table of 1000 steps finds the step again, in f32 too */
        s.dtype = i % 2 ? XD_DTYPE_F32 : XD_DTYPE_F64;
        t = time_of(ctx, &s, i);
        CHECK((int)(t * 1000.0) == i);
        CHECK_NEAR(t, i / 1000.0, 1.2e-7);
    }
    refused(ctx, xdi_time_of_draw(ctx, &s, 0.5, &t), XD_ERROR_ARGUMENT, "0.5 is no index from 0 to 999");
    xd_ctx_destroy(ctx);
}

XD_TEST(draws_outside_their_range_are_refused) {
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_UNIFORM);
    double t = 7.0;
    refused(ctx, xdi_time_of_draw(ctx, &s, 1.5, &t), XD_ERROR_ARGUMENT,
            "uniform number 1.5 is not in [0, 1]");
    refused(ctx, xdi_time_of_draw(ctx, &s, -0.5, &t), XD_ERROR_ARGUMENT, "uniform number -0.5");
    refused(ctx, xdi_time_of_draw(ctx, &s, (double)NAN, &t), XD_ERROR_ARGUMENT, "uniform number nan");
    s.kind = XD_TIME_LOGIT_NORMAL;
    refused(ctx, xdi_time_of_draw(ctx, &s, (double)NAN, &t), XD_ERROR_ARGUMENT, "normal number nan");
    s.kind = XD_TIME_GRID;
    refused(ctx, xdi_time_of_draw(ctx, &s, (double)NAN, &t), XD_ERROR_ARGUMENT,
            "nan is no index from 0 to 999");
    refused(ctx, xdi_time_of_draw(ctx, &s, -1.0, &t), XD_ERROR_ARGUMENT, "-1 is no index");
    CHECK(t == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(samplers_that_make_no_sense_are_refused_with_their_numbers) {
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_SHIFTED);
    CHECK(xdi_times_check(ctx, &s, NULL) == XD_OK);
    s.shift = 0.5;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "shift is 0.5: at least 1 is needed");
    s.shift = (double)NAN;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "shift is nan");
    s.kind = XD_TIME_UNIFORM; /* which has no shift */
    CHECK(xdi_times_check(ctx, &s, NULL) == XD_OK);
    s.min_t = 0.999;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "from min_t 0.999 to max_t 0.999");
    s.min_t = -0.5;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "from min_t -0.5 to max_t 0.999");
    s = sampler_of(XD_TIME_LOG_NORMAL), s.deviation = 0.0;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "mean 0 and deviation 0");
    s.deviation = 1.0, s.mean = (double)INFINITY;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "mean inf and deviation 1");
    s = sampler_of(XD_TIME_LOG_T), s.freedom = 0.0;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "0 degrees of freedom");
    s = sampler_of(XD_TIME_UNIFORM), s.dtype = XD_DTYPE_BF16;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_DTYPE, "F64 or F32 is needed");
    s = sampler_of((xd_time_kind)42);
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "kind 42");
    refused(ctx, xdi_times_check(ctx, NULL, NULL), XD_ERROR_ARGUMENT, "no distribution of times is given");
    xd_ctx_destroy(ctx);
}

XD_TEST(indices_and_lists_that_do_not_fit_are_refused) {
    static const double rising[] = { 0.5, 0.75, 0.0 }, high[] = { 1.5, 0.5, 0.0 }, open[] = { 0.75, 0.5 };
    xd_ctx *ctx = open_ctx();
    xd_time_sampler s = sampler_of(XD_TIME_GRID);
    s.last = 1000;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT,
            "indices from 0 to 1000 of a grid of 1000");
    s.first = 5, s.last = 4;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "indices from 5 to 4");
    s.first = -1;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "indices from -1 to 4");
    s.first = 0, s.grid = XD_NOISE_TRIG;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "a grid of kind 3");
    s = xd_times_defaults(XD_DMD_ORIGINAL), s.count = 0;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "0 steps: 1 to 2^53");
    s.count = INT64_MAX, s.last = INT64_MAX;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "9223372036854775807 steps");
    s = xd_times_defaults(XD_DMD_ORIGINAL);
    s.count = 900;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "steps 20 to 980 of 900 are times");
    s = sampler_of(XD_TIME_LIST);
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "no list of 0 times");
    s.list = rising, s.list_count = 1;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "a list of 1 times");
    s.list_count = 3;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "0.75 comes after 0.5");
    s.list = high;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "begins at 1.5, above max_t 0.999");
    s.list = open, s.list_count = 2;
    refused(ctx, xdi_times_check(ctx, &s, NULL), XD_ERROR_ARGUMENT, "ends in 0.5, not in 0");
    xd_ctx_destroy(ctx);
}

XD_TEST(ranges_are_narrowed_to_the_schedules_or_refused) {
    static const double list[] = { 0.999, 0.5, 0.0 };
    xd_ctx *ctx = open_ctx();
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW), edm = xd_noise_defaults(XD_NOISE_EDM);
    xd_time_sampler s = xd_times_defaults(XD_DMD_FASTGEN);
    CHECK(xdi_times_check(ctx, &s, &edm) == XD_OK);
    refused(ctx, xdi_times_check(ctx, &s, &flow), XD_ERROR_ARGUMENT,
            "times from 0.002 to 80 are drawn, those of the schedule are 0 to 0.999");
    xdi_times_narrow(&s, &flow);
    CHECK(s.min_t == 0.002 && s.max_t == 0.999 && xdi_times_check(ctx, &s, &flow) == XD_OK);
    s = sampler_of(XD_TIME_LIST), s.list = list, s.list_count = 3;
    CHECK(xdi_times_check(ctx, &s, &edm) == XD_OK); /* the final 0 is not drawn */
    s.list_to_end = true;
    refused(ctx, xdi_times_check(ctx, &s, &edm), XD_ERROR_ARGUMENT, "times from 0 to 0.999 are drawn");
    xd_noise_schedule none = flow;
    none.max_t = 2.0;
    refused(ctx, xdi_times_check(ctx, &s, &none), XD_ERROR_ARGUMENT, "max_t 2 is past");
    xd_ctx_destroy(ctx);
}

XD_TEST(samples_have_the_same_times_however_they_are_split) {
    enum { N = 64 };
    xd_ctx *ctx = open_ctx();
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = 42, random.stream = XD_STREAM_TIME, random.step = 7;
    for (int kind = XD_TIME_UNIFORM; kind <= XD_TIME_STEP; kind++) {
        static const double list[] = { 0.999, 0.75, 0.5, 0.25, 0.0 };
        double whole[N], parts[N], other[N];
        xd_time_sampler s = sampler_of((xd_time_kind)kind);
        s.list = list, s.list_count = 5;
        if (kind == XD_TIME_STEP) s.min_t = 0.0;
        random.sample = 1000;
        CHECK(xd_times_draw(ctx, &s, &random, N, whole) == XD_OK);
        for (int i = 0; i < N; i += 16) {
            random.sample = (uint32_t)(1000 + i);
            CHECK(xd_times_draw(ctx, &s, &random, 16, parts + i) == XD_OK);
        }
        random.sample = 1000;
        CHECK(memcmp(whole, parts, sizeof whole) == 0);
        for (int i = 0; i < N; i++) CHECK(whole[i] >= s.min_t && whole[i] <= s.max_t);
        random.step = 8;
        CHECK(xd_times_draw(ctx, &s, &random, N, other) == XD_OK);
        random.step = 7;
        CHECK(memcmp(whole, other, sizeof whole) != 0);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(draws_from_counters_are_those_of_their_uniform_numbers) {
    xd_ctx *ctx = open_ctx();
    xd_philox random;
    double t = 0.0;
    memset(&random, 0, sizeof random);
    random.seed = 3, random.stream = XD_STREAM_TIME, random.sample = 5;
    const double u = xd_philox_uniform_f64(&random, 0);
    xd_time_sampler s = sampler_of(XD_TIME_SHIFTED);
    CHECK(xd_times_draw(ctx, &s, &random, 1, &t) == XD_OK && t == time_of(ctx, &s, u));
    s.kind = XD_TIME_GRID;
    CHECK(xd_times_draw(ctx, &s, &random, 1, &t) == XD_OK && t == time_of(ctx, &s, floor(u * 1000.0)));
    s.kind = XD_TIME_LOGIT_NORMAL; /* back to u by the distribution of the normal number */
    CHECK(xd_times_draw(ctx, &s, &random, 1, &t) == XD_OK);
    const double share = (t - s.min_t) / (s.max_t - s.min_t), z = log(share / (1.0 - share));
    CHECK_NEAR(0.5 * erfc(-z * sqrt(0.5)), u, 1e-14);
    xd_ctx_destroy(ctx);
}

XD_TEST(many_draws_are_distributed_as_they_should_be) {
    enum { N = 20000 };
    static double t[N];
    xd_ctx *ctx = open_ctx();
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = 1, random.stream = XD_STREAM_TIME;
    xd_time_sampler s = sampler_of(XD_TIME_LOGIT_NORMAL);
    double mean = 0.0, square = 0.0;
    CHECK(xd_times_draw(ctx, &s, &random, N, t) == XD_OK);
    for (int i = 0; i < N; i++) {
        const double share = (t[i] - s.min_t) / (s.max_t - s.min_t), z = log(share / (1.0 - share));
        mean += z / N, square += z * z / N;
    }
    CHECK_NEAR(mean, 0.0, 4.0 / sqrt((double)N));
    CHECK_NEAR(square, 1.0, 4.0 * sqrt(2.0 / N));
    int64_t counts[7] = { 0 };
    for (int i = 0; i < N; i++) {
        random.sample = (uint32_t)i;
        const int64_t k = xd_draw_index(&random, 0, 7);
        CHECK(k >= 0 && k < 7);
        counts[k >= 0 && k < 7 ? k : 0]++;
    }
    for (int k = 0; k < 7; k++) CHECK_NEAR((double)counts[k], N / 7.0, 5.0 * sqrt(N / 7.0));
    xd_ctx_destroy(ctx);
}

XD_TEST(frames_of_a_chunk_share_their_time_and_the_first_has_the_rest) {
    static const double list[] = { 0.999, 0.75, 0.5, 0.25, 0.125, 0.0 };
    xd_ctx *ctx = open_ctx();
    xd_philox random;
    double t[11];
    bool ended = false;
    memset(&random, 0, sizeof random);
    random.seed = 9, random.stream = XD_STREAM_TIME;
    xd_time_sampler s = sampler_of(XD_TIME_LIST);
    s.list = list, s.list_count = 6, s.list_to_end = true, s.chunk = 3;
    for (random.sample = 0; random.sample < 50; random.sample++) {
        CHECK(xd_times_draw(ctx, &s, &random, 11, t) == XD_OK); /* chunks of 5, 3 and 3 */
        for (int i = 0; i < 11; i++) {
            const int chunk = i < 5 ? 0 : i < 8 ? 1 : 2;
            CHECK(t[i] == list[xd_draw_index(&random, chunk, 6)]);
            ended = ended || t[i] == 0.0;
        }
    }
    CHECK(ended);
    random.sample = 0;
    s.chunk = 4;
    CHECK(xd_times_draw(ctx, &s, &random, 4, t) == XD_OK && t[0] == t[3]);
    t[0] = 7.0;
    s.chunk = -1;
    refused(ctx, xd_times_draw(ctx, &s, &random, 4, t), XD_ERROR_ARGUMENT, "chunks of -1 frames of 4");
    s.chunk = 5;
    refused(ctx, xd_times_draw(ctx, &s, &random, 4, t), XD_ERROR_ARGUMENT, "chunks of 5 frames of 4");
    s.chunk = 0;
    refused(ctx, xd_times_draw(ctx, &s, &random, -1, t), XD_ERROR_ARGUMENT, "-1 samples from sample 0");
    random.sample = 4294967295u;
    refused(ctx, xd_times_draw(ctx, &s, &random, 2, t), XD_ERROR_ARGUMENT,
            "2 samples from sample 4294967295");
    CHECK(t[0] == 7.0);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
