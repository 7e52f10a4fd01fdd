/* Conversions between predictions: every direction under every schedule against what x0 and eps say, their derivatives, the ends of
 * the schedules, the references' way through x0; the kernel that mixes rows, on every level to the bit; and every refusal. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/internal.h"
#endif
#include "xd_test.h"
#include "xd_test_numbers.h"
#include "xd_test_cpu.h"

#include <math.h>
#include <stdlib.h>

enum { TYPES = 5, STEPS = 16 };

static xd_ctx *open_ctx(xd_cpu_level level, int threads) {
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.cpu = level;
    desc.threads = threads;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

/* alpha = (1 - t)^2, sigma = t (2 - t) */
static void square_level(void *user, double t, xd_noise_level *level) {
    (void)user;
    level->alpha = (1.0 - t) * (1.0 - t);
    level->sigma = t * (2.0 - t);
    level->alpha_rate = -2.0 * (1.0 - t);
    level->sigma_rate = 2.0 * (1.0 - t);
}

/* The cosine schedule without rates. */
static void cosine_level(void *user, double t, xd_noise_level *level) {
    (void)user;
    level->alpha = cos(1.5 * t);
    level->sigma = sin(1.5 * t);
}

static double values_of_table[STEPS];

static xd_noise_schedule schedule_of(int kind) {
    xd_noise_schedule s = xd_noise_defaults(kind <= XD_NOISE_CUSTOM ? (xd_noise_kind)kind : XD_NOISE_CUSTOM);
    for (int k = 0; k < STEPS; k++) values_of_table[k] = 1.0 - (k + 0.5) / STEPS;
    if (kind == XD_NOISE_VP) s.table = values_of_table, s.table_count = STEPS;
    if (kind == XD_NOISE_CUSTOM) s.custom = square_level;
    if (kind > XD_NOISE_CUSTOM) s.custom = cosine_level;
    return s;
}

/* What a type of prediction is, from x0 and eps; NaN where the schedule gives it no meaning. */
static double value_of(xd_prediction type, bool unit, const xd_noise_level *l, double x0, double eps) {
    switch (type) {
    case XD_PREDICT_X0: return x0;
    case XD_PREDICT_EPS: return eps;
    case XD_PREDICT_V: return unit ? l->alpha * eps - l->sigma * x0 : (double)NAN;
    case XD_PREDICT_FLOW: return l->alpha_rate * x0 + l->sigma_rate * eps;
    default: return -eps / l->sigma;
    }
}

static xd_mix mix_of(xd_ctx *ctx, const xd_noise_schedule *s, xd_prediction from, xd_prediction to,
                     double t) {
    const xd_conversion conversion = { from, to, false, false };
    xd_mix mix = { (double)NAN, (double)NAN };
    CHECK(xd_prediction_mix(ctx, s, &conversion, t, &mix) == XD_OK);
    return mix;
}

static void refused(xd_ctx *ctx, xd_result result, xd_result expected, const char *words) {
    CHECK_EQ_INT(result, expected);
    if (!strstr(xd_last_error(ctx)->message, words)) CHECK_EQ_STR(xd_last_error(ctx)->message, words);
}

/* ---- factors ---- */

/* x0 and eps, and all types of prediction of them, at one time. */
static void check_pairs(xd_ctx *ctx, const xd_noise_schedule *s, int kind, double t, uint64_t *state) {
    const double x0 = uniform(state), eps = 2.0 * uniform(state);
    xd_noise_level l;
    CHECK(xdi_noise_level_at(ctx, s, t, &l) == XD_OK);
    const double square = l.alpha * l.alpha + l.sigma * l.sigma;
    const bool unit = kind != XD_NOISE_FLOW && kind != XD_NOISE_EDM && fabs(square - 1.0) <= 0.01;
    const double x_t = l.alpha * x0 + l.sigma * eps;
    for (int i = 0; i < TYPES * TYPES; i++) {
        const xd_conversion way = { (xd_prediction)(i / TYPES), (xd_prediction)(i % TYPES), false,
                                    i % 2 == 1 };
        const double from = value_of(way.from, unit, &l, x0, eps), to = value_of(way.to, unit, &l, x0, eps);
        xd_mix mix = { 7.0, 7.0 };
        const xd_result result = xd_prediction_mix(ctx, s, &way, t, &mix);
        if (way.from != way.to && (isnan(from) || isnan(to))) {
            CHECK(result == XD_ERROR_ARGUMENT && mix.c0 == 7.0);
            continue;
        }
        CHECK(result == XD_OK);
        if (way.from == way.to)
            CHECK(mix.c0 == 1.0 && mix.c1 == 0.0);
        else
            CHECK_NEAR(mix.c0 * from + mix.c1 * x_t, to,
                       2e-14 * (fabs(mix.c0 * from) + fabs(mix.c1 * x_t)) * (way.through_x0 ? 100.0 : 1.0));
    }
}

XD_TEST(every_type_becomes_every_other_under_every_schedule) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    uint64_t state = 1;
    for (int kind = XD_NOISE_FLOW; kind <= XD_NOISE_CUSTOM + 1; kind++) {
        const xd_noise_schedule s = schedule_of(kind);
        for (int i = 1; i < 50; i++)
            check_pairs(ctx, &s, kind, s.min_t + (s.max_t - s.min_t) * i / 50.0, &state);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(derivatives_by_the_prediction_are_the_first_factors) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW), trig = schedule_of(XD_NOISE_TRIG);
    const xd_noise_schedule vp = schedule_of(XD_NOISE_VP);
    xd_noise_level l;
    xd_mix forward;
    for (double t = 0.001; t < 0.999; t += 0.0499) {
        CHECK(mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_X0, t).c0 == -t);
        CHECK(mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_X0, t).c1 == 1.0);
        CHECK(mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_EPS, t).c0 == 1.0 - t);
        CHECK(mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_EPS, t).c1 == 1.0);
        CHECK(mix_of(ctx, &flow, XD_PREDICT_EPS, XD_PREDICT_X0, t).c0 == -(t / (1.0 - t)));
        CHECK(mix_of(ctx, &trig, XD_PREDICT_V, XD_PREDICT_X0, t).c0 == -sin(t));
        CHECK(xdi_noise_level_at(ctx, &vp, t, &l) == XD_OK);
        CHECK(mix_of(ctx, &vp, XD_PREDICT_V, XD_PREDICT_X0, t).c0 == -l.sigma);
        CHECK(xd_noise_mix(ctx, &flow, t, &forward) == XD_OK);
        CHECK(forward.c0 == 1.0 - t && forward.c1 == t);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(residuals_under_rectified_flow_are_those_of_the_flow) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    uint64_t state = 3;
    for (double t = 0.001; t < 0.999; t += 0.0499) {
        const double x0 = uniform(&state), eps = uniform(&state), r = uniform(&state);
        const double x_t = (1.0 - t) * x0 + t * eps, v = eps - x0 + r;
        const xd_mix to_x0 = mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_X0, t);
        const xd_mix to_eps = mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_EPS, t);
        CHECK_NEAR(x0 - (to_x0.c0 * v + to_x0.c1 * x_t), t * r, 1e-15);
        CHECK_NEAR(eps - (to_eps.c0 * v + to_eps.c1 * x_t), -(1.0 - t) * r, 1e-15);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(targets_are_what_the_types_mean) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    for (int kind = XD_NOISE_FLOW; kind <= XD_NOISE_CUSTOM + 1; kind++) {
        const bool unit = kind == XD_NOISE_VP || kind == XD_NOISE_TRIG || kind > XD_NOISE_CUSTOM;
        const xd_noise_schedule s = schedule_of(kind);
        xd_noise_level l;
        CHECK(xdi_noise_level_at(ctx, &s, 0.3, &l) == XD_OK);
        for (int type = 0; type < TYPES; type++) {
            xd_mix mix = { 7.0, 7.0 };
            const xd_conversion wanted = { XD_PREDICT_X0, (xd_prediction)type, false, false };
            const xd_result result = xdi_target_mix(ctx, &s, &wanted, 0.3, &mix);
            const double of_x0 = value_of((xd_prediction)type, unit, &l, 1.0, 0.0);
            const double of_eps = value_of((xd_prediction)type, unit, &l, 0.0, 1.0);
            CHECK(isnan(of_x0) ? result == XD_ERROR_ARGUMENT && mix.c0 == 7.0
                               : result == XD_OK && mix.c0 == of_x0 && mix.c1 == of_eps);
        }
    }
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    xd_mix v;
    const xd_conversion wanted = { XD_PREDICT_X0, XD_PREDICT_V, true, false };
    CHECK(xdi_target_mix(ctx, &flow, &wanted, 0.3, &v) == XD_OK);
    CHECK(v.c0 == -1.0 && v.c1 == 1.0); /* eps - x0, not (1 - t) eps - t x0 */
    xd_ctx_destroy(ctx);
}

XD_TEST(at_the_ends_divisors_are_bounded) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    const xd_noise_schedule trig = schedule_of(XD_NOISE_TRIG);
    xd_mix m = mix_of(ctx, &flow, XD_PREDICT_X0, XD_PREDICT_EPS, 0.0);
    CHECK_NEAR(m.c0, -1e6, 1e-9);
    CHECK_NEAR(m.c1, 1e6, 1e-9);
    m = mix_of(ctx, &flow, XD_PREDICT_X0, XD_PREDICT_SCORE, 0.0);
    CHECK_NEAR(m.c0, 1e12, 1e-3);
    m = mix_of(ctx, &trig, XD_PREDICT_EPS, XD_PREDICT_X0, trig.max_t);
    CHECK_NEAR(m.c0, -1e6, 1e-9);
    CHECK_NEAR(m.c1, 1e6, 1e-9);
    m = mix_of(ctx, &trig, XD_PREDICT_EPS, XD_PREDICT_SCORE, trig.max_t);
    CHECK(m.c0 == -1.0 && m.c1 == 0.0);
    flow.clamp_min = 1e-3;
    CHECK_NEAR(mix_of(ctx, &flow, XD_PREDICT_X0, XD_PREDICT_EPS, 0.0).c1, 1e3, 1e-12);
    xd_ctx_destroy(ctx);
}

XD_TEST(no_way_through_x0_is_taken_unless_asked_for) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    const xd_conversion hub = { XD_PREDICT_FLOW, XD_PREDICT_EPS, false, true };
    const xd_mix direct = mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_EPS, 0.0);
    xd_mix m;
    CHECK(direct.c0 == 1.0 && direct.c1 == 1.0); /* eps = x_t + v, where x_t is x0 */
    CHECK(xd_prediction_mix(ctx, &flow, &hub, 0.0, &m) == XD_OK);
    CHECK(m.c0 == 0.0 && m.c1 == 0.0);
    /* A bf16 x0 in between loses a thousandth of itself, divided by t: the references' flow -> x0 -> flow at t = 0.001. */
    const double t = 0.001, x_t = 0.7, v = 1.3;
    const xd_mix there = mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_X0, t);
    const xd_mix back = mix_of(ctx, &flow, XD_PREDICT_X0, XD_PREDICT_FLOW, t);
    const double x0 = (double)xd_f32_from_bf16(xd_bf16_from_f32((float)(there.c0 * v + there.c1 * x_t)));
    CHECK(fabs(back.c0 * x0 + back.c1 * x_t - v) > 0.5);
    CHECK(mix_of(ctx, &flow, XD_PREDICT_FLOW, XD_PREDICT_FLOW, t).c0 == 1.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(v_under_rectified_flow_is_refused_or_is_the_flow) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW), edm = schedule_of(XD_NOISE_EDM);
    const xd_noise_schedule trig = schedule_of(XD_NOISE_TRIG), vp = schedule_of(XD_NOISE_VP);
    xd_conversion way = { XD_PREDICT_V, XD_PREDICT_X0, false, false };
    xd_mix m = { 7.0, 7.0 };
    refused(ctx, xd_prediction_mix(ctx, &flow, &way, 0.25, &m), XD_ERROR_ARGUMENT,
            "v has no meaning under a FLOW schedule with alpha 0.75 and sigma 0.25");
    refused(ctx, xd_prediction_mix(ctx, &edm, &way, 0.25, &m), XD_ERROR_ARGUMENT,
            "v has no meaning under a EDM schedule with alpha 1 and sigma 0.25");
    CHECK(m.c0 == 7.0);
    way.v_is_flow = true;
    CHECK(xd_prediction_mix(ctx, &flow, &way, 0.25, &m) == XD_OK && m.c0 == -0.25 && m.c1 == 1.0);
    way.to = XD_PREDICT_FLOW;
    CHECK(xd_prediction_mix(ctx, &flow, &way, 0.25, &m) == XD_OK && m.c0 == 1.0 && m.c1 == 0.0);
    way.through_x0 = true; /* x0 says nothing of the flow at t = 0, as from flow to eps */
    CHECK(xd_prediction_mix(ctx, &flow, &way, 0.25, &m) == XD_OK && m.c0 == 1.0 && m.c1 == 0.0);
    CHECK(xd_prediction_mix(ctx, &flow, &way, 0.0, &m) == XD_OK && m.c0 == 0.0 && m.c1 == 0.0);
    way.through_x0 = false;
    CHECK(xd_prediction_mix(ctx, &flow, &way, 0.0, &m) == XD_OK && m.c0 == 1.0 && m.c1 == 0.0);
    refused(ctx, xd_prediction_mix(ctx, &trig, &way, 0.25, &m), XD_ERROR_ARGUMENT,
            "v_is_flow is of FLOW schedules, not of TRIG");
    way.v_is_flow = false;
    refused(ctx, xd_prediction_mix(ctx, &vp, &way, 0.25, &m), XD_ERROR_ARGUMENT,
            "flow has no meaning under a VP schedule whose rates are nan and nan");
    way.to = (xd_prediction)9;
    refused(ctx, xd_prediction_mix(ctx, &vp, &way, 0.25, &m), XD_ERROR_ARGUMENT, "prediction 9 is unknown");
    way.to = XD_PREDICT_X0;
    refused(ctx, xd_prediction_mix(ctx, &vp, &way, 1.25, &m), XD_ERROR_ARGUMENT, "t 1.25 is outside");
    refused(ctx, xd_noise_mix(ctx, &vp, 1.25, &m), XD_ERROR_ARGUMENT, "t 1.25 is outside");
    way.to = XD_PREDICT_FLOW;
    refused(ctx, xdi_target_mix(ctx, &vp, &way, 0.25, &m), XD_ERROR_ARGUMENT, "flow has no meaning");
    CHECK(m.c0 == 1.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(types_are_checked_over_the_whole_range) {
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    const xd_noise_schedule vp = schedule_of(XD_NOISE_VP), trig = schedule_of(XD_NOISE_TRIG);
    for (int type = 0; type < TYPES; type++) {
        const xd_prediction p = (xd_prediction)type;
        CHECK(xdi_prediction_check(ctx, &flow, p, false) == (p == XD_PREDICT_V ? XD_ERROR_ARGUMENT : XD_OK));
        CHECK(xdi_prediction_check(ctx, &flow, p, true) == XD_OK);
        CHECK(xdi_prediction_check(ctx, &vp, p, false) == (p == XD_PREDICT_FLOW ? XD_ERROR_ARGUMENT : XD_OK));
    }
    flow.max_t = 1.0;
    CHECK(xdi_prediction_check(ctx, &flow, XD_PREDICT_FLOW, false) == XD_OK);
    refused(ctx, xdi_prediction_check(ctx, &flow, XD_PREDICT_EPS, false), XD_ERROR_ARGUMENT,
            "eps says nothing of x0 at max_t 1: alpha is 0 there");
    refused(ctx, xdi_prediction_check(ctx, &trig, XD_PREDICT_SCORE, false), XD_ERROR_ARGUMENT,
            "score says nothing of x0 at max_t 1.57079633");
    refused(ctx, xdi_prediction_check(ctx, &flow, (xd_prediction)7, false), XD_ERROR_ARGUMENT,
            "prediction 7 is unknown");
    xd_ctx_destroy(ctx);
}

/* ---- rows ---- */

enum { ROWS = 3, MOST = 1100, STRIDE = MOST + 5, ROOM = ROWS * STRIDE };

static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };

/* One tensor in each of the types, of numbers of every size, the special ones among them. */
static void fill(double *to, uint64_t seed, bool extreme) {
    static const double special[] = { 0.0,    -0.0,    1e-45,  -1e-40, 6e-8,    65504.0, -65520.0,
                                      3.4e38, -3.4e38, 1e-300, 1.0,    -1.5e-5, 2.5,     0.1 };
    uint64_t state = seed;
    for (int i = 0; i < ROOM; i++) {
        to[i] = 4.0 * uniform(&state) * (extreme ? pow(2.0, floor(30.0 * uniform(&state))) : 1.0);
        if (extreme && i % 7 == 3) to[i] = special[(i / 7) % 14];
        if (extreme && i % 101 == 50) to[i] = i % 2 ? (double)INFINITY : -(double)INFINITY;
        if (extreme && i % 103 == 60) to[i] = (double)NAN;
    }
}

typedef struct tensors {
    double p[ROOM], q[ROOM], out[ROOM]; /* memory of any type */
    xd_mix mix[ROWS];
    xd_mix_desc desc;
} tensors;

static void prepare(tensors *t, xd_dtype of_p, xd_dtype of_q, xd_dtype of_out, int64_t columns) {
    static double p[ROOM], q[ROOM];
    fill(p, 5, true);
    fill(q, 6, true);
    memset(t, 0x5a, sizeof *t);
    for (int i = 0; i < ROOM; i++) xd_store_f64(t->p, of_p, i, p[i]), xd_store_f64(t->q, of_q, i, q[i]);
    const xd_mix mix[ROWS] = { { 0.3, 0.7 }, { 1.0 / 3.0, -1e6 }, { 1.0, 0.0 } };
    memcpy(t->mix, mix, sizeof mix);
    memset(&t->desc, 0, sizeof t->desc);
    t->desc.p = xd_rows_of(t->p, of_p, ROWS, columns);
    t->desc.q = xd_rows_of(t->q, of_q, ROWS, columns);
    t->desc.out = xd_rows_of(t->out, of_out, ROWS, columns);
    t->desc.p.stride = t->desc.q.stride = t->desc.out.stride = STRIDE;
    t->desc.mix = t->mix;
}

/* NaNs are equal whatever their bits. */
static bool same_bits(const tensors *a, const tensors *b, xd_dtype dtype) {
    const size_t size = xd_dtype_size(dtype);
    for (int64_t i = 0; i < ROOM; i++) {
        const char *x = (const char *)a->out + (size_t)i * size, *y = (const char *)b->out + (size_t)i * size;
        const bool nan = isnan(xd_load_f64(a->out, dtype, i)) && isnan(xd_load_f64(b->out, dtype, i));
        if (!nan && memcmp(x, y, size) != 0) return false;
    }
    return true;
}

/* What the header says, element by element. */
static void expect(tensors *t) {
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < t->desc.out.cols; c++) {
            const double p = xd_load_f64(t->p, t->desc.p.dtype, r * STRIDE + c);
            const double q = xd_load_f64(t->q, t->desc.q.dtype, r * STRIDE + c);
            const bool both = t->desc.q.data && t->mix[r].c1 != 0.0;
            const double value = both ? fma(t->mix[r].c0, p, t->mix[r].c1 * q) : t->mix[r].c0 * p;
            xd_store_once(t->out, t->desc.out.dtype, r * STRIDE + c, value);
        }
}

XD_TEST(rows_are_mixed_with_the_same_bits_on_every_level_and_thread_count) {
    static const int64_t sizes[] = { 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 511, 512, 513, 1029, MOST };
    tensors *got = (tensors *)malloc(sizeof *got), *expected = (tensors *)malloc(sizeof *expected);
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        xd_ctx *ctx = open_ctx((xd_cpu_level)level, 1 + level % 3);
        for (int k = 0; k < 64; k++) {
            const xd_dtype of_p = dtypes[k % 4], of_q = dtypes[k / 4 % 4], of_out = dtypes[k / 16];
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                prepare(got, of_p, of_q, of_out, sizes[i]);
                if ((k + (int)i) % 5 == 0) got->desc.q.data = NULL;
                *expected = *got;
                expect(expected);
                CHECK(xd_mix_rows(ctx, &got->desc) == XD_OK);
                CHECK(same_bits(got, expected, of_out));
            }
        }
        xd_ctx_destroy(ctx);
    }
    free(got);
    free(expected);
}

XD_TEST(narrow_results_are_rounded_once) {
    /* 1 + 2^-8 + 2^-30 is a little above the middle of two BF16; as f32 it is the middle, which goes to the even one below. */
    const double above = 1.0 + ldexp(1.0, -8) + ldexp(1.0, -30),
                 half = 1.0 + ldexp(1.0, -11) + ldexp(1.0, -40);
    const double p[2] = { above, half }, below[2] = { 2.0 - above, 2.0 - half };
    const xd_mix same = { 1.0, 0.0 };
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    uint16_t out[2] = { 0, 0 };
    xd_mix_desc d;
    memset(&d, 0, sizeof d);
    d.p = xd_rows_of(p, XD_DTYPE_F64, 1, 1);
    d.out = xd_rows_of(out, XD_DTYPE_BF16, 1, 1);
    d.mix = &same;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK);
    CHECK(xd_bf16_from_f32((float)above) == 0x3f80 && out[0] == 0x3f81);
    d.p = xd_rows_of(p + 1, XD_DTYPE_F64, 1, 1);
    d.out.dtype = XD_DTYPE_F16;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK);
    CHECK(f16_of((float)half) == 0x3c00 && out[0] == 0x3c01);
    d.p = xd_rows_of(below, XD_DTYPE_F64, 1, 1);
    d.out.dtype = XD_DTYPE_BF16;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK);
    CHECK((double)xd_f32_from_bf16(out[0]) == 1.0 - ldexp(1.0, -8));
    xd_ctx_destroy(ctx);
}

XD_TEST(to_odd_and_then_narrow_is_one_rounding_for_every_bf16_and_f16) {
    for (uint32_t bits = 0; bits < 0x7f7fu; bits++) {
        const double low = (double)xd_bits_from_bf16((uint16_t)bits),
                     high = (double)xd_bits_from_bf16((uint16_t)(bits + 1));
        const double middle = 0.5 * (low + high);
        const uint16_t even = (uint16_t)(bits + (bits & 1u));
        CHECK(xd_bits_to_bf16(xd_float_to_odd(middle)) == even);
        CHECK(xd_bits_to_bf16(xd_float_to_odd(nextafter(middle, 0.0))) == bits);
        CHECK(xd_bits_to_bf16(xd_float_to_odd(nextafter(middle, HUGE_VAL))) == bits + 1);
    }
    for (uint32_t bits = 0; bits < 0x7bffu; bits++) {
        const double low = (double)xd_bits_from_f16((uint16_t)bits),
                     high = (double)xd_bits_from_f16((uint16_t)(bits + 1));
        const double middle = 0.5 * (low + high);
        const uint16_t even = (uint16_t)(bits + (bits & 1u));
        CHECK(xd_bits_to_f16(xd_float_to_odd(middle)) == even);
        CHECK(xd_bits_to_f16(xd_float_to_odd(-nextafter(middle, 0.0))) == (bits | 0x8000u));
        CHECK(xd_bits_to_f16(xd_float_to_odd(nextafter(middle, HUGE_VAL))) == bits + 1);
    }
    CHECK(isnan(xd_float_to_odd((double)NAN)) && xd_float_to_odd((double)INFINITY) == INFINITY);
    CHECK(xd_bits_to_bf16(xd_float_to_odd(1e300)) == 0x7f80);
}

/* The BF16 next to a double, to the even one of two that are as far; by comparing neighbours. */
static uint16_t nearest_bf16(double x) {
    const uint16_t near = xd_bf16_from_f32((float)x);
    uint16_t best = near;
    for (int step = -1; step <= 1; step += 2) {
        const uint16_t other = (uint16_t)(near + step);
        const double here = fabs((double)xd_f32_from_bf16(best) - x),
                     there = fabs((double)xd_f32_from_bf16(other) - x);
        if (there < here || (there == here && other % 2 == 0)) best = other;
    }
    return best;
}

/* Sums on the middle of two BF16, and nearer and nearer to it on either side: what f32 alone does not decide. */
XD_TEST(bf16_sums_close_to_the_middle_of_two_are_rounded_from_the_double) {
    enum { COLUMNS = 200 };
    static uint16_t p[COLUMNS], q[COLUMNS], out[COLUMNS];
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        xd_ctx *ctx = open_ctx((xd_cpu_level)level, 1);
        for (int k = 8; k <= 56; k++)
            for (int way = -1; way <= 1; way++) {
                const double third = k % 2 ? 1.0 / 3.0 : 1.0; /* a factor that f32 rounds, or not */
                const xd_mix mix = { 3.0 * third, ldexp(third, -6) * (1.0 + way * ldexp(1.0, -k)) };
                xd_mix_desc d;
                memset(&d, 0, sizeof d);
                for (int c = 0; c < COLUMNS; c++) { /* q is half a step of 3 third p, more and less often */
                    p[c] = xd_bf16_from_f32((c % 2 ? -1.0f : 1.0f) * (1.0f + (float)(c % 97) / 128.0f));
                    q[c] = xd_bf16_from_f32((float)(c % 5) * 0.5f * (c % 3 ? 1.0f : 0.25f));
                }
                d.p = xd_rows_of(p, XD_DTYPE_BF16, 1, COLUMNS);
                d.q = xd_rows_of(q, XD_DTYPE_BF16, 1, COLUMNS);
                d.out = xd_rows_of(out, XD_DTYPE_BF16, 1, COLUMNS);
                d.mix = &mix;
                CHECK(xd_mix_rows(ctx, &d) == XD_OK);
                for (int c = 0; c < COLUMNS; c++) {
                    const double x = (double)xd_f32_from_bf16(p[c]), y = (double)xd_f32_from_bf16(q[c]);
                    CHECK_EQ_INT(out[c], nearest_bf16(fma(mix.c0, x, mix.c1 * y)));
                }
            }
        xd_ctx_destroy(ctx);
    }
}

/* Every pair of a BF16 with one of many, under factors that cancel, overflow, vanish or are ordinary. */
XD_TEST(bf16_has_the_bits_of_the_double_for_every_number) {
    enum { COLUMNS = 65536 };
    static const xd_mix mixes[] = { { 0.3, 0.7 },  { 1.5, -0.5 },  { -1.0 / 3.0, 1.0 / 3.0 },
                                    { 1e8, 1e-8 }, { 1e-8, -1e8 }, { 1e-12, 1e12 },
                                    { 1.0, 0.0 },  { 0.0, 1.0 } };
    uint16_t *p = (uint16_t *)malloc(3 * COLUMNS * sizeof *p), *q = p + COLUMNS, *out = q + COLUMNS;
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        xd_ctx *ctx = open_ctx((xd_cpu_level)level, 1);
        for (int k = 0; k < 8; k++) {
            uint64_t state = (uint64_t)k;
            for (int c = 0; c < COLUMNS; c++) {
                const double near = (double)xd_f32_from_bf16((uint16_t)c) * (1.0 + 0.02 * uniform(&state));
                p[c] = (uint16_t)c;
                q[c] = c % 3 ? xd_bf16_from_f32((float)near) : (uint16_t)(40503u * (unsigned)c + (unsigned)k);
            }
            xd_mix_desc d;
            memset(&d, 0, sizeof d);
            d.p = xd_rows_of(p, XD_DTYPE_BF16, 1, COLUMNS);
            d.q = xd_rows_of(q, XD_DTYPE_BF16, 1, COLUMNS);
            d.out = xd_rows_of(out, XD_DTYPE_BF16, 1, COLUMNS);
            d.mix = &mixes[k];
            CHECK(xd_mix_rows(ctx, &d) == XD_OK);
            int wrong = 0;
            for (int c = 0; c < COLUMNS; c++) {
                const double x = (double)xd_f32_from_bf16(p[c]), y = (double)xd_f32_from_bf16(q[c]);
                const double sum =
                    mixes[k].c1 != 0.0 ? fma(mixes[k].c0, x, mixes[k].c1 * y) : mixes[k].c0 * x;
                uint16_t expected = 0;
                xd_store_once(&expected, XD_DTYPE_BF16, 0, sum);
                wrong += isnan(sum) ? !isnan(xd_f32_from_bf16(out[c])) : out[c] != expected;
            }
            CHECK_EQ_INT(wrong, 0);
        }
        xd_ctx_destroy(ctx);
    }
    free(p);
}

/* More than 8 MiB from the first row to behind the last: stores bypass the caches where a row is aligned for them, which the second
 * of the two shifts leaves out. What lies between the rows stays. */
XD_TEST(a_large_result_has_the_bits_of_a_small_one) {
    enum { LARGE_ROWS = 5, COLUMNS = 1029, APART = 1 << 20 };
    static float p[LARGE_ROWS * COLUMNS], q[LARGE_ROWS * COLUMNS], small[LARGE_ROWS * COLUMNS];
    static const xd_mix mixes[LARGE_ROWS] = {
        { 1, -0.3 }, { 0.7, 0.1 }, { -2, 1.0 / 3.0 }, { 0.25, 0 }, { 0, 3 }
    };
    char *const memory = (char *)malloc((size_t)LARGE_ROWS * APART * sizeof(float) + 128);
    uint64_t state = 9;
    CHECK(memory != NULL);
    XD_TEST_LEVELS(level, XD_CPU_PLAIN)
    for (int k = 0; k < 4 && memory; k++) {
        const xd_dtype dtype = k & 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        const size_t size = xd_dtype_size(dtype), row = COLUMNS * size;
        char *const out = memory + (64 - (uintptr_t)memory % 64) + (k & 2 ? 4 : 0);
        xd_ctx *ctx = open_ctx((xd_cpu_level)level, 1 + k % 2);
        xd_mix_desc d;
        memset(&d, 0, sizeof d);
        for (int i = 0; i < LARGE_ROWS * COLUMNS; i++) {
            xd_store_f64(p, dtype, i, uniform(&state));
            xd_store_f64(q, dtype, i, uniform(&state));
        }
        d.p = xd_rows_of(p, dtype, LARGE_ROWS, COLUMNS);
        d.q = xd_rows_of(q, dtype, LARGE_ROWS, COLUMNS);
        d.out = xd_rows_of(small, dtype, LARGE_ROWS, COLUMNS);
        d.mix = mixes;
        CHECK(xd_mix_rows(ctx, &d) == XD_OK);
        d.out = xd_rows_of(out, dtype, LARGE_ROWS, COLUMNS);
        d.out.stride = APART;
        for (int r = 0; r < LARGE_ROWS; r++) out[(size_t)r * APART * size + row] = 7;
        CHECK(xd_mix_rows(ctx, &d) == XD_OK);
        for (size_t r = 0; r < LARGE_ROWS; r++) {
            CHECK(memcmp(out + r * APART * size, (const char *)small + r * row, row) == 0);
            CHECK_EQ_INT(out[r * APART * size + row], 7);
        }
        xd_ctx_destroy(ctx);
    }
    free(memory);
}

XD_TEST(a_result_may_overwrite_either_tensor) {
    tensors *one = (tensors *)malloc(sizeof *one), *two = (tensors *)malloc(sizeof *two);
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        xd_ctx *ctx = open_ctx((xd_cpu_level)level, 2);
        for (int k = 0; k < 8; k++) {
            const xd_dtype dtype = dtypes[k % 4];
            prepare(one, dtype, dtype, dtype, 1029);
            prepare(two, dtype, dtype, dtype, 1029);
            two->desc.out.data = k / 4 ? (void *)two->q : (void *)two->p;
            CHECK(xd_mix_rows(ctx, &one->desc) == XD_OK && xd_mix_rows(ctx, &two->desc) == XD_OK);
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t c = 0; c < 1029; c++) {
                    const double a = xd_load_f64(one->out, dtype, r * STRIDE + c);
                    const double b = xd_load_f64(two->desc.out.data, dtype, r * STRIDE + c);
                    CHECK(a == b || (isnan(a) && isnan(b)));
                }
        }
        xd_ctx_destroy(ctx);
    }
    free(one);
    free(two);
}

XD_TEST(a_factor_of_zero_does_not_read_the_second_tensor) {
    const float p[4] = { 1.0f, -2.0f, 3.0f, -0.0f };
    const float q[4] = { NAN, INFINITY, -INFINITY, NAN };
    float out[4] = { 7.0f, 7.0f, 7.0f, 7.0f };
    const xd_mix mix = xdi_guidance_mix(1.0);
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    xd_mix_desc d;
    memset(&d, 0, sizeof d);
    d.p = xd_rows_of(p, XD_DTYPE_F32, 1, 4);
    d.q = xd_rows_of(q, XD_DTYPE_F32, 1, 4);
    d.out = xd_rows_of(out, XD_DTYPE_F32, 1, 4);
    d.mix = &mix;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK);
    CHECK(memcmp(out, p, sizeof p) == 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(guidance_adds_the_scaled_difference) {
    const float with[3] = { 1.0f, -2.0f, 0.5f }, without[3] = { 0.5f, 1.0f, 0.5f };
    const float expected[3] = { 2.5f, -11.0f, 0.5f };
    float out[3];
    const xd_mix mix = xdi_guidance_mix(4.0);
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    xd_mix_desc d;
    memset(&d, 0, sizeof d);
    d.p = xd_rows_of(with, XD_DTYPE_F32, 1, 3);
    d.q = xd_rows_of(without, XD_DTYPE_F32, 1, 3);
    d.out = xd_rows_of(out, XD_DTYPE_F32, 1, 3);
    d.mix = &mix;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(rows_that_do_not_fit_are_refused_and_nothing_is_written) {
    float p[8] = { 0 }, q[8] = { 0 }, out[8] = { 7.0f };
    const xd_mix mix[2] = { { 1.0, 1.0 }, { 1.0, 1.0 } };
    xd_ctx *ctx = open_ctx(XD_CPU_BEST, 0);
    xd_mix_desc good, d;
    memset(&good, 0, sizeof good);
    good.p = xd_rows_of(p, XD_DTYPE_F32, 2, 4);
    good.q = xd_rows_of(q, XD_DTYPE_F32, 2, 4);
    good.out = xd_rows_of(out, XD_DTYPE_F32, 2, 4);
    good.mix = mix;
    d = good, d.p.rows = 3;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_SHAPE, "p is 3 x 4 and out 2 x 4");
    d = good, d.q.cols = 3;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_SHAPE, "q is 2 x 3 and out 2 x 4");
    d = good, d.out.stride = 3;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_SHAPE, "out has 2 rows of 4 elements, 3 apart");
    d = good, d.out.rows = -1;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_SHAPE, "out has -1 rows of 4 elements");
    d = good, d.p.dtype = XD_DTYPE_I32;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_DTYPE, "p is ");
    d = good, d.out.dtype = XD_DTYPE_BOOL;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_DTYPE, "out is ");
    d = good, d.p.data = NULL;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_ARGUMENT, "p has no memory");
    d = good, d.mix = NULL;
    refused(ctx, xd_mix_rows(ctx, &d), XD_ERROR_ARGUMENT, "mix is NULL");
    CHECK(out[0] == 7.0f);
    d = good, d.p.rows = d.q.rows = d.out.rows = 0, d.mix = NULL, d.p.data = NULL;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK && out[0] == 7.0f);
    d = good, d.p.cols = d.q.cols = d.out.cols = 0;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK && out[0] == 7.0f);
    xd_ctx_destroy(ctx);
}

/* The allocator of a context that counts. */
static void *count_allocate(void *user, size_t bytes) {
    ++*(int *)user;
    return malloc(bytes);
}

static void count_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(mixing_rows_allocates_nothing) {
    float x[64] = { 1.0f };
    uint16_t out[64];
    int allocations = 0;
    const xd_mix mix[2] = { { 1.0, 2.0 }, { 3.0, 4.0 } };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_mix_desc d;
    memset(&desc, 0, sizeof desc);
    desc.allocator.user = &allocations;
    desc.allocator.allocate = count_allocate;
    desc.allocator.release = count_free;
    desc.cpu = xd_test_cpu();
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    memset(&d, 0, sizeof d);
    d.p = d.q = xd_rows_of(x, XD_DTYPE_F32, 2, 32);
    d.out = xd_rows_of(out, XD_DTYPE_BF16, 2, 32);
    d.mix = mix;
    const int before = allocations;
    CHECK(before > 0 && xd_mix_rows(ctx, &d) == XD_OK && allocations == before);
    xd_ctx_destroy(ctx);
}

/* The forward process of a whole batch equals the formula inlined. */
XD_TEST(noise_is_added_as_the_formula_says_to_the_bit) {
    enum { B = 3, D = 37 };
    static const double t[B] = { 0.25, (double)0.999f, 0.001 };
    float x0[B * D], eps[B * D], x_t[B * D];
    uint64_t state = 11;
    xd_mix mix[B];
    xd_mix_desc d;
    for (int i = 0; i < B * D; i++) x0[i] = (float)uniform(&state), eps[i] = (float)(2.0 * uniform(&state));
    xd_ctx *ctx = open_ctx(xd_test_cpu(), 0);
    const xd_noise_schedule flow = schedule_of(XD_NOISE_FLOW);
    for (int b = 0; b < B; b++) CHECK(xd_noise_mix(ctx, &flow, t[b], &mix[b]) == XD_OK);
    memset(&d, 0, sizeof d);
    d.p = xd_rows_of(x0, XD_DTYPE_F32, B, D);
    d.q = xd_rows_of(eps, XD_DTYPE_F32, B, D);
    d.out = xd_rows_of(x_t, XD_DTYPE_F32, B, D);
    d.mix = mix;
    CHECK(xd_mix_rows(ctx, &d) == XD_OK);
    for (int i = 0; i < B * D; i++) {
        const double s = t[i / D];
        CHECK(x_t[i] == (float)fma(1.0 - s, (double)x0[i], s * (double)eps[i]));
        CHECK_NEAR(x_t[i], (1.0 - s) * (double)x0[i] + s * (double)eps[i], 1.2e-7);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
