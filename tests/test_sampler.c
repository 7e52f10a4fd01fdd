/* Samples from noise, and warm-up's targets: networks are formulas, trajectories are computed again in double. */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/internal.h"
#    include "dmd/state.h"
#endif

#include "planned.h"
#include "xd_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENTS = 5, SAMPLES = 6, CALLS = 64 };

/* A network whose prediction is slope x + lift t + condition, and what it was called with. */
typedef struct formula {
    double slope, lift;
    int calls, keeps, backwards;
    int64_t samples[CALLS];
    double times[CALLS][SAMPLES];
    float hidden[CALLS][SAMPLES * ELEMENTS], kept[SAMPLES * ELEMENTS];
    float gradient[CALLS][SAMPLES * ELEMENTS];
    bool more[CALLS];
} formula;

static xd_result forward(void *user, const xd_network_call *call) {
    formula *f = (formula *)user;
    const float *x = (const float *)call->hidden;
    const double push = call->condition ? *(const double *)call->condition : 0.0;
    if (f->calls < CALLS) {
        f->samples[f->calls] = call->samples;
        memcpy(f->times[f->calls], call->times, (size_t)call->samples * sizeof *call->times);
        memcpy(f->hidden[f->calls], x, (size_t)(call->samples * ELEMENTS) * sizeof *x);
    }
    f->calls++;
    if (call->keep) f->keeps++, memcpy(f->kept, x, (size_t)(call->samples * ELEMENTS) * sizeof *x);
    for (int64_t i = 0; i < call->samples * ELEMENTS; i++)
        ((float *)call->raw)[i] = (float)(f->slope * x[i] + f->lift * call->times[i / ELEMENTS] + push);
    return XD_OK;
}

static xd_result backward(void *user, const xd_network_call *call) {
    formula *f = (formula *)user;
    f->more[f->backwards] = call->more;
    memcpy(f->gradient[f->backwards++], call->raw_gradient,
           (size_t)(call->samples * ELEMENTS) * sizeof(float));
    return XD_OK;
}

static xd_network network_of(formula *f) {
    return (xd_network){ .user = f, .predicts = XD_PREDICT_FLOW, .forward = forward, .backward = backward };
}

static const double four[] = { 0.999, 0.75, 0.5, 0.25, 0.0 };

static xd_sampler_desc settings(formula *f, xd_sampler_kind kind) {
    xd_sampler_desc d = xd_sampler_defaults();
    d.network = network_of(f);
    d.kind = kind;
    d.steps = 4;
    d.list = four;
    d.samples = SAMPLES;
    d.elements = ELEMENTS;
    d.seed = 11;
    return d;
}

static xd_result sample(xd_ctx *ctx, const xd_sampler_desc *d, const xd_dmd_batch *batch, void *out) {
    xd_sampler *sampler = NULL;
    XD_TRY(xd_sampler_create(ctx, d, &sampler));
    const xd_result result = xd_sampler_run(sampler, batch, out);
    xd_sampler_destroy(sampler);
    return result;
}

/* ---- the bits of the student's roll-out ---- */

static xd_dmd_desc distillation(formula *student, formula *teacher, formula *fake) {
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    d.networks[XD_DMD_STUDENT] = network_of(student);
    d.networks[XD_DMD_TEACHER] = network_of(teacher);
    d.networks[XD_DMD_FAKE_SCORE] = network_of(fake);
    d.rungs.steps = 4;
    d.rungs.list = four;
    d.rungs.roll_out = true;
    d.rungs.deal = XD_DMD_RUNGS_IN_TURN;
    d.sizes.samples = SAMPLES;
    d.sizes.step_samples = 40;
    d.sizes.elements = ELEMENTS;
    d.seed = 11;
    return d;
}

static void check_roll_out(bool fresh, int64_t first) {
    formula *nets = (formula *)calloc(4, sizeof *nets), *sampled = nets + 3;
    float out[SAMPLES * ELEMENTS];
    xd_dmd_values values = { 0 };
    xd_ctx *ctx;
    xd_dmd *dmd;
    const xd_dmd_batch batch = { .samples = SAMPLES, .first = first };
    for (int i = 0; i < 4; i++) nets[i].slope = 0.3, nets[i].lift = 0.2;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = distillation(&nets[0], &nets[1], &nets[2]);
    d.rungs.fresh_noise = fresh;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, &values), XD_OK);
    CHECK_EQ_INT(nets[0].calls, 4); /* three to go down, and the one that is kept */
    CHECK_EQ_INT(nets[0].keeps, 1);
    xd_sampler_desc s = xd_sampler_of_student(&d);
    s.network.user = sampled;
    CHECK_EQ_INT(s.kind, fresh ? XD_SAMPLER_SDE : XD_SAMPLER_ODE);
    CHECK_EQ_INT(sample(ctx, &s, &batch, out), XD_OK);
    CHECK_EQ_INT(sampled->calls, 4);
    for (int64_t k = 0; k < SAMPLES; k++) {
        const int64_t rung = (first + k) % 4;
        CHECK(memcmp(nets[0].kept + k * ELEMENTS, sampled->hidden[rung] + k * ELEMENTS,
                     ELEMENTS * sizeof(float)) == 0);
        CHECK(nets[0].times[3][k] == sampled->times[rung][k]);
        CHECK(sampled->times[rung][k] == (double)(float)four[rung]);
    }
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
    free(nets);
}

XD_TEST(the_student_trains_on_what_its_sampler_sees_at_each_samples_rung) {
    check_roll_out(false, 0);
    check_roll_out(true, 0);
    check_roll_out(false, 13);
    check_roll_out(true, 13);
}

XD_TEST(new_noise_and_implied_noise_are_two_samplers) {
    formula f = { .slope = 0.3 };
    float ode[SAMPLES * ELEMENTS], sde[SAMPLES * ELEMENTS];
    const xd_dmd_batch batch = { .samples = SAMPLES };
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_sampler_desc a = settings(&f, XD_SAMPLER_ODE), b = settings(&f, XD_SAMPLER_SDE);
    CHECK_EQ_INT(sample(ctx, &a, &batch, ode), XD_OK);
    CHECK_EQ_INT(sample(ctx, &b, &batch, sde), XD_OK);
    CHECK(memcmp(ode, sde, sizeof ode) != 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_network_whose_v_is_flow_has_the_samples_of_one_that_predicts_flow) {
    const xd_dmd_batch batch = { .samples = SAMPLES };
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int kind = 0; kind < 4; kind++) {
        formula f = { .slope = 0.3, .lift = 0.1 };
        float of_flow[SAMPLES * ELEMENTS], of_v[SAMPLES * ELEMENTS];
        xd_sampler_desc d = settings(&f, (xd_sampler_kind)kind);
        CHECK_EQ_INT(sample(ctx, &d, &batch, of_flow), XD_OK);
        d.network.predicts = XD_PREDICT_V;
        CHECK_EQ_INT(sample(ctx, &d, &batch, of_v), XD_ERROR_ARGUMENT);
        d.v_is_flow = true;
        CHECK_EQ_INT(sample(ctx, &d, &batch, of_v), XD_OK);
        CHECK(memcmp(of_flow, of_v, sizeof of_v) == 0);
    }
    formula f = { .slope = 0.3 };
    xd_dmd_desc student = distillation(&f, &f, &f); /* and the student's sampler knows it */
    student.networks[XD_DMD_STUDENT].predicts = XD_PREDICT_V;
    student.v_is_flow = true;
    const xd_sampler_desc d = xd_sampler_of_student(&student);
    float of_student[SAMPLES * ELEMENTS];
    CHECK_EQ_INT(sample(ctx, &d, &batch, of_student), XD_OK);
    CHECK_EQ_INT(f.calls, 4);
    xd_ctx_destroy(ctx);
}

/* ---- noise and numbers of samples ---- */

XD_TEST(a_sample_depends_on_its_number_and_seed_and_step_but_not_on_the_batch) {
    for (int kind = 0; kind < 4; kind++) {
        formula f = { .slope = 0.3, .lift = 0.1 };
        float whole[SAMPLES * ELEMENTS], part[SAMPLES * ELEMENTS], noise[SAMPLES * ELEMENTS];
        const xd_dmd_batch all = { .samples = SAMPLES, .first = 3 }, some = { .samples = 2, .first = 6 };
        xd_dmd_batch given = all;
        xd_sampler *sampler;
        xd_ctx *ctx;
        CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
        xd_sampler_desc d = settings(&f, (xd_sampler_kind)kind);
        CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
        CHECK_EQ_INT(xd_sampler_run(sampler, &all, whole), XD_OK);
        CHECK_EQ_INT(xd_sampler_run(sampler, &some, part), XD_OK);
        CHECK(memcmp(whole + 3 * ELEMENTS, part, 2 * ELEMENTS * sizeof(float)) == 0);
        CHECK_EQ_INT(xdi_sampler_noise(sampler, &all, noise), XD_OK);
        given.noise = noise;
        CHECK_EQ_INT(xd_sampler_run(sampler, &given, part), XD_OK);
        CHECK(memcmp(whole, part, sizeof part) == 0);
        const xd_philox random = { .seed = 11, .stream = XD_STREAM_STUDENT_NOISE, .sample = 4 };
        float expected[ELEMENTS];
        xd_philox_fill_normal(&random, 0, ELEMENTS, expected);
        CHECK(memcmp(noise + ELEMENTS, expected, sizeof expected) == 0);
        xd_sampler_destroy(sampler);
        d.step = 1;
        CHECK_EQ_INT(sample(ctx, &d, &all, part), XD_OK);
        CHECK(memcmp(whole, part, sizeof part) != 0);
        xd_ctx_destroy(ctx);
    }
}

/* Halves of samples' elements, by ranks of their own, are the halves of the whole ones. */
XD_TEST(elements_of_a_sample_have_the_noise_of_the_whole_one) {
    formula f = { .slope = 0.3 };
    float whole[SAMPLES * ELEMENTS], half[SAMPLES * 2];
    const xd_dmd_batch batch = { .samples = SAMPLES };
    xd_sampler *sampler;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_sampler_desc d = settings(&f, XD_SAMPLER_ODE);
    CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
    CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, whole), XD_OK);
    xd_sampler_destroy(sampler);
    d.elements = 2, d.first_element = 3;
    CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
    CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, half), XD_OK);
    xd_sampler_destroy(sampler);
    for (int i = 0; i < SAMPLES; i++)
        CHECK(memcmp(half + 2 * i, whole + ELEMENTS * i + 3, 2 * sizeof(float)) == 0);
    d.elements = 1, d.first_element = 2; /* a single element is one, too */
    CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
    CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, half), XD_OK);
    xd_sampler_destroy(sampler);
    for (int i = 0; i < SAMPLES; i++) CHECK(half[i] == whole[ELEMENTS * i + 2]);
    xd_ctx_destroy(ctx);
}

XD_TEST(narrow_samples_start_from_rounded_noise) {
    formula f = { .slope = 0.3 };
    float wide[SAMPLES * ELEMENTS];
    uint16_t narrow[SAMPLES * ELEMENTS];
    const xd_dmd_batch batch = { .samples = SAMPLES };
    xd_sampler *sampler;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_sampler_desc d = settings(&f, XD_SAMPLER_EULER);
    CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
    CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, wide), XD_OK);
    xd_sampler_destroy(sampler);
    d.dtype = XD_DTYPE_BF16;
    CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
    CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, narrow), XD_OK);
    xd_sampler_destroy(sampler);
    for (int i = 0; i < SAMPLES * ELEMENTS; i++) CHECK_EQ_INT(narrow[i], xd_bf16_from_f32(wide[i]));
    xd_ctx_destroy(ctx);
}

/* ---- along the slope ---- */

/* dx/dt at x under a schedule whose network predicts it. */
static double slope_of(const formula *f, double x, double t, double push) {
    return f->slope * x + f->lift * t + push;
}

/* One element by the same list, in double; times as the network sees them. */
static double by_hand(const formula *f, const xd_sampler_desc *d, double x, double push) {
    for (int j = 0; j < d->steps; j++) {
        const double t = d->list[j], next = d->list[j + 1], h = next - t;
        const double here = slope_of(f, x, (double)(float)t, push);
        if (d->kind == XD_SAMPLER_HEUN && j + 1 < d->steps)
            x += 0.5 * h * (here + slope_of(f, x + h * here, (double)(float)next, push));
        else
            x += h * here;
    }
    return x;
}

static void check_slopes(xd_noise_kind schedule, const double *list, xd_sampler_kind kind) {
    formula f = { .slope = 0.4, .lift = 0.1 };
    float out[SAMPLES * ELEMENTS], noise[SAMPLES * ELEMENTS];
    const xd_dmd_batch batch = { .samples = SAMPLES };
    xd_noise_level level;
    xd_sampler *sampler;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_sampler_desc d = settings(&f, kind);
    d.schedule = xd_noise_defaults(schedule);
    d.list = list;
    CHECK_EQ_INT(xdi_noise_level_at(ctx, &d.schedule, list[0], &level), XD_OK);
    CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
    CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, noise), XD_OK);
    CHECK_EQ_INT(xd_sampler_run(sampler, &batch, out), XD_OK);
    CHECK_EQ_INT(f.calls, kind == XD_SAMPLER_HEUN ? 7 : 4);
    for (int i = 0; i < SAMPLES * ELEMENTS; i++) {
        const double expected = by_hand(&f, &d, level.sigma * (double)noise[i], 0.0);
        CHECK(fabs((double)out[i] - expected) <= 2e-6 * (1.0 + fabs(expected)));
    }
    xd_sampler_destroy(sampler);
    xd_ctx_destroy(ctx);
}

XD_TEST(euler_and_heun_are_those_computed_by_hand) {
    static const double edm[] = { 3.0, 1.5, 0.6, 0.1, 0.0 }, trig[] = { 1.5, 1.0, 0.6, 0.2, 0.0 };
    check_slopes(XD_NOISE_FLOW, four, XD_SAMPLER_EULER);
    check_slopes(XD_NOISE_FLOW, four, XD_SAMPLER_HEUN);
    check_slopes(XD_NOISE_EDM, edm, XD_SAMPLER_EULER);
    check_slopes(XD_NOISE_EDM, edm, XD_SAMPLER_HEUN);
    check_slopes(XD_NOISE_TRIG, trig, XD_SAMPLER_EULER);
    check_slopes(XD_NOISE_TRIG, trig, XD_SAMPLER_HEUN);
}

/* dx/dt = x / 2 has a solution: halving the steps divides the error by 2, or by nearly 4. */
static double error_of(xd_sampler_kind kind, int steps) {
    formula f = { .slope = 0.5 };
    float out[ELEMENTS];
    const float noise[ELEMENTS] = { 1.0f, 1.0f, 1.0f, 1.0f, 1.0f };
    const xd_dmd_batch batch = { .samples = 1, .noise = noise };
    double list[65];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_sampler_desc d = settings(&f, kind);
    d.steps = steps;
    d.list = list;
    for (int i = 0; i <= steps; i++) list[i] = 0.999 * (double)(steps - i) / (double)steps;
    CHECK_EQ_INT(sample(ctx, &d, &batch, out), XD_OK);
    xd_ctx_destroy(ctx);
    return fabs((double)out[0] - 0.999 * exp(-0.5 * 0.999));
}

XD_TEST(errors_fall_with_the_steps_as_the_order_says) {
    const double euler = error_of(XD_SAMPLER_EULER, 16) / error_of(XD_SAMPLER_EULER, 32);
    const double heun = error_of(XD_SAMPLER_HEUN, 8) / error_of(XD_SAMPLER_HEUN, 16);
    CHECK(euler > 1.8 && euler < 2.2);
    CHECK(heun > 3.2 && heun < 4.8);
    CHECK(error_of(XD_SAMPLER_HEUN, 16) < 0.2 * error_of(XD_SAMPLER_EULER, 16));
}

XD_TEST(guidance_leads_away_from_the_negative_condition) {
    formula f = { .slope = 0.4 };
    const double plus = 0.5, minus = -0.25;
    float out[SAMPLES * ELEMENTS], noise[SAMPLES * ELEMENTS];
    xd_dmd_batch batch = { .samples = SAMPLES, .condition = &plus };
    xd_sampler *sampler;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int kind = XD_SAMPLER_EULER; kind <= XD_SAMPLER_HEUN; kind++) {
        xd_sampler_desc d = settings(&f, (xd_sampler_kind)kind);
        d.guided = true;
        d.guidance_scale = 3.0;
        CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
        CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, noise), XD_OK);
        batch.negative = NULL;
        CHECK_EQ_INT(xd_sampler_run(sampler, &batch, out), XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, "no negative condition for 6 samples"));
        batch.negative = &minus;
        CHECK_EQ_INT(xd_sampler_run(sampler, &batch, out), XD_OK);
        for (int i = 0; i < SAMPLES * ELEMENTS; i++) {
            const double push = minus + 3.0 * (plus - minus);
            CHECK(fabs((double)out[i] - by_hand(&f, &d, 0.999 * (double)noise[i], push)) < 1e-5);
        }
        xd_sampler_destroy(sampler);
    }
    xd_ctx_destroy(ctx);
}

/* ---- warm-up ---- */

/* Values and gradients at each rung, by the teacher's trajectory in double. */
XD_TEST(warm_up_teaches_mean_velocities_at_every_rung) {
    enum { SUBSTEPS = 3, N = SAMPLES * ELEMENTS };
    formula *nets = (formula *)calloc(3, sizeof *nets);
    formula *student = &nets[0], *teacher = &nets[1];
    float noise[N];
    double x[N], loss = 0.0;
    xd_dmd_values values = { .regression = 1.0 };
    xd_ctx *ctx;
    xd_dmd *dmd;
    student->slope = 0.2, student->lift = -0.1;
    teacher->slope = 0.7, teacher->lift = 0.3;
    for (int i = 0; i < N; i++) noise[i] = sinf((float)i), x[i] = 0.999 * (double)noise[i];
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = distillation(student, teacher, &nets[2]);
    d.regression.substeps = SUBSTEPS;
    d.regression.step_samples = 8;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    const xd_dmd_batch batch = { .samples = SAMPLES, .first = 2, .noise = noise };
    CHECK_EQ_INT(xdi_dmd_warm_up(dmd, 0, &batch, &values), XD_OK);
    CHECK_EQ_INT(teacher->calls, 4 * SUBSTEPS);
    CHECK_EQ_INT(student->calls, 4);
    CHECK_EQ_INT(student->keeps, 4);
    CHECK_EQ_INT(student->backwards, 4);
    for (int rung = 0; rung < 4; rung++) {
        const double t = (double)(float)four[rung], next = (double)(float)four[rung + 1];
        CHECK_EQ_INT(student->more[rung], rung < 3);
        for (int i = 0; i < N; i++) {
            const double begin = x[i];
            for (int k = 0; k < SUBSTEPS; k++) {
                const double at = t + (next - t) * k / SUBSTEPS;
                x[i] += (next - t) / SUBSTEPS * slope_of(teacher, x[i], at, 0.0);
            }
            const double r = slope_of(student, begin, t, 0.0) - (x[i] - begin) / (next - t);
            loss += r * r / (8.0 * ELEMENTS * 4.0);
            CHECK(fabs((double)student->gradient[rung][i] - 2.0 * r / (8.0 * ELEMENTS * 4.0)) < 1e-7);
        }
    }
    CHECK(fabs(values.regression - 1.0 - loss) < 1e-6);
    CHECK(loss > 0.01);
    const xd_dmd_batch beyond = { .samples = SAMPLES, .first = 3 };
    CHECK_EQ_INT(xdi_dmd_warm_up(dmd, 0, &beyond, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "samples 3 to 8 of a step of 8"));
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
    free(nets);
}

XD_TEST(warm_up_is_refused_under_other_schedules_by_name) {
    formula *nets = (formula *)calloc(3, sizeof *nets);
    static const double edm[] = { 3.0, 1.5, 0.6, 0.1, 0.0 };
    const xd_dmd_batch batch = { .samples = SAMPLES };
    xd_dmd_values values = { .regression = 7.0 };
    xd_ctx *ctx;
    xd_dmd *dmd;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = distillation(&nets[0], &nets[1], &nets[2]);
    d.regression.substeps = 1;
    d.schedule = xd_noise_defaults(XD_NOISE_EDM);
    d.rungs.list = edm;
    d.student_times = d.fake_times = xd_times_defaults(XD_DMD_FASTGEN);
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    CHECK_EQ_INT(xdi_dmd_warm_up(dmd, 0, &batch, &values), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "under the schedule EDM; it is for FLOW"));
    CHECK(values.regression == 7.0);
    CHECK_EQ_INT(nets[0].calls + nets[1].calls, 0);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
    free(nets);
}

/* In doubles the list descends; a mean velocity between two equal times is none. */
XD_TEST(rungs_that_are_one_time_in_f32_are_refused) {
    static const double close[] = { 0.999, 0.5, 0.5 - 1e-10, 0.25, 0.0 },
                        tiny[] = { 0.999, 0.5, 0.25, 1e-50, 0.0 };
    formula *nets = (formula *)calloc(3, sizeof *nets);
    xd_ctx *ctx;
    xd_dmd *dmd = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = distillation(&nets[0], &nets[1], &nets[2]);
    d.rungs.list = close;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_ERROR_ARGUMENT);
    CHECK(
        strstr(xd_last_error(ctx)->message, "times 1 and 2 of the list, 0.5 and 0.4999999999, are one f32"));
    d.rungs.list = tiny;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "times 3 and 4 of the list, 1e-50 and 0, are one f32"));
    CHECK(dmd == NULL);
    xd_sampler_desc s = settings(&nets[0], XD_SAMPLER_EULER);
    s.list = close, s.list_dtype = XD_DTYPE_F32;
    xd_sampler *sampler = NULL;
    CHECK_EQ_INT(xd_sampler_create(ctx, &s, &sampler), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "are one f32"));
    s.list_dtype = XD_DTYPE_NONE;
    CHECK_EQ_INT(xd_sampler_create(ctx, &s, &sampler), XD_OK);
    xd_sampler_destroy(sampler);
    d.student_times.dtype = XD_DTYPE_F64;
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
    free(nets);
}

/* ---- values and findings of a loop of one's own ---- */

XD_TEST(the_distance_is_that_of_the_students_samples_from_what_the_teacher_makes_of_them) {
    formula *nets = (formula *)calloc(3, sizeof *nets);
    xd_dmd_values values = { 0 };
    xd_status found;
    xd_ctx *ctx;
    xd_dmd *dmd;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    xd_dmd_desc d = distillation(&nets[0], &nets[1], &nets[2]);
    for (int role = 0; role < XD_DMD_ROLES; role++) d.networks[role].predicts = XD_PREDICT_X0;
    double push = 0.25; /* what every network adds to its prediction */
    xd_dmd_batch batch = { .samples = SAMPLES, .condition = &push };
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, &values), XD_OK);
    CHECK(values.distance == 0.0); /* both say 0.25 */
    nets[1].slope = 1.0;           /* the teacher says x_t + 0.25 */
    values.distance = 0.0;
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, &values), XD_OK);
    double sum = 0.0;
    for (int i = 0; i < SAMPLES * ELEMENTS; i++) sum += fabs((double)nets[1].hidden[nets[1].calls - 1][i]);
    CHECK(fabs(values.distance - sum / ELEMENTS / 40.0) < 1e-6); /* its part of a step of 40 samples */
    CHECK(values.distance > 0.0);
    CHECK_EQ_INT(xd_dmd_findings(dmd, &found), XD_OK);
    CHECK_EQ_INT(found.not_finite, 0);
    push = NAN;
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_OK);
    CHECK_EQ_INT(xd_dmd_findings(dmd, &found), XD_OK);
    CHECK_EQ_INT(found.not_finite, SAMPLES);
    CHECK_EQ_INT(xd_dmd_findings(dmd, &found), XD_OK);
    CHECK_EQ_INT(found.not_finite, 0);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
    free(nets);
}

/* ---- memory ---- */

typedef struct counter {
    int64_t calls;
    size_t bytes;
} counter;

static void *take(void *user, size_t bytes) {
    counter *c = (counter *)user;
    c->calls++;
    c->bytes += bytes;
    return malloc(bytes ? bytes : 1);
}

static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(a_sampler_takes_what_it_says_and_nothing_while_it_runs) {
    for (int kind = 0; kind < 4; kind++)
        for (int guided = 0; guided < 2; guided++) {
            formula f = { .slope = 0.4 };
            float out[SAMPLES * ELEMENTS];
            const double condition = 0.0;
            counter c = { 0, 0 };
            const xd_ctx_desc desc = { .allocator = { take, give_back, &c } };
            const xd_dmd_batch batch = { .samples = SAMPLES, .negative = &condition };
            xd_memory_bytes bytes = { 0, 0 };
            xd_sampler *sampler;
            xd_ctx *ctx;
            CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
            xd_sampler_desc d = settings(&f, (xd_sampler_kind)kind);
            d.guided = guided != 0;
            CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_sampler_create(ctx, &d, &sampler), &bytes), XD_OK);
            const size_t before = c.bytes;
            CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
            CHECK(bytes.host == c.bytes - before && bytes.device == 0);
            const int64_t calls = c.calls;
            CHECK_EQ_INT(xd_sampler_run(sampler, &batch, out), XD_OK);
            CHECK_EQ_INT(xdi_sampler_noise(sampler, &batch, out), XD_OK);
            CHECK_EQ_INT(c.calls, calls);
            xd_sampler_destroy(sampler);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(a_rank_without_samples_makes_the_same_calls) {
    for (int kind = 0; kind < 4; kind++) {
        formula f = { .slope = 0.4 };
        const xd_dmd_batch batch = { .samples = 0 };
        xd_ctx *ctx;
        CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
        const xd_sampler_desc d = settings(&f, (xd_sampler_kind)kind);
        CHECK_EQ_INT(sample(ctx, &d, &batch, NULL), XD_OK);
        CHECK_EQ_INT(f.calls, kind == XD_SAMPLER_HEUN ? 7 : 4);
        CHECK_EQ_INT(f.samples[0], 0);
        xd_ctx_destroy(ctx);
    }
}

/* ---- what is refused ---- */

static void refuse(xd_ctx *ctx, const xd_sampler_desc *d, xd_result code, const char *text) {
    xd_memory_bytes bytes = { 7, 7 };
    xd_sampler *sampler = NULL;
    CHECK_EQ_INT(xd_sampler_create(ctx, d, &sampler), code);
    CHECK(sampler == NULL);
    if (!strstr(xd_last_error(ctx)->message, text))
        printf("\"%s\" is not in: %s\n", text, xd_last_error(ctx)->message);
    CHECK(strstr(xd_last_error(ctx)->message, text));
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_sampler_create(ctx, d, &sampler), &bytes), code);
    CHECK(bytes.host == 7 && bytes.device == 7);
}

#define REFUSES(code, change, text)                       \
    do {                                                  \
        xd_sampler_desc d = settings(&f, XD_SAMPLER_ODE); \
        change;                                           \
        refuse(ctx, &d, code, text);                      \
    } while (0)

static void vp(xd_sampler_desc *d, xd_sampler_kind kind) {
    static const double table[] = { 0.9, 0.7, 0.5, 0.3 }, list[] = { 0.9, 0.5, 0.3, 0.1, 0.0 };
    d->schedule = xd_noise_defaults(XD_NOISE_VP);
    d->schedule.table = table;
    d->schedule.table_count = 4;
    d->list = list;
    d->network.predicts = XD_PREDICT_EPS;
    d->kind = kind;
}

XD_TEST(settings_that_do_not_fit_are_refused_with_their_numbers) {
    static const double rising[] = { 0.5, 0.7, 0.3, 0.2, 0.0 }, low[] = { 3.0, 1.0, 0.5, 0.001, 0.0 };
    formula f = { 0 };
    float out[SAMPLES * ELEMENTS] = { 3.0f };
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    REFUSES(XD_ERROR_ARGUMENT, d.network.forward = NULL, "has no forward");
    REFUSES(XD_ERROR_ARGUMENT, d.steps = 0, "a sampler of 0 steps");
    REFUSES(XD_ERROR_ARGUMENT, d.steps = -1, "a sampler of -1 steps");
    REFUSES(XD_ERROR_ARGUMENT, d.list = NULL, "4 steps without a list");
    REFUSES(XD_ERROR_ARGUMENT, d.list = rising, "0.7");
    REFUSES(XD_ERROR_ARGUMENT, (d.schedule = xd_noise_defaults(XD_NOISE_EDM), d.list = low), "0.001");
    REFUSES(XD_ERROR_ARGUMENT, d.kind = (xd_sampler_kind)4, "kind 4");
    REFUSES(XD_ERROR_ARGUMENT, vp(&d, XD_SAMPLER_HEUN), "sampler HEUN under a schedule (kind 2)");
    REFUSES(XD_ERROR_ARGUMENT, vp(&d, XD_SAMPLER_EULER), "sampler EULER under a schedule (kind 2)");
    REFUSES(XD_ERROR_ARGUMENT, (d.kind = XD_SAMPLER_SDE, d.steps = 58),
            "new noise between 58 times; there are numbers for 57");
    REFUSES(XD_ERROR_ARGUMENT, d.network.predicts = XD_PREDICT_V, "v");
    REFUSES(XD_ERROR_ARGUMENT, (d.guided = true, d.guidance_scale = NAN), "guidance by nan");
    REFUSES(XD_ERROR_ARGUMENT, d.network_scale = -1.0, "times for networks, times -1");
    REFUSES(XD_ERROR_DTYPE, d.network_dtype = XD_DTYPE_I64, "times for networks as");
    REFUSES(XD_ERROR_DTYPE, d.list_dtype = XD_DTYPE_BF16, "times of a list as");
    REFUSES(XD_ERROR_ARGUMENT, d.step = -1, "step -1");
    REFUSES(XD_ERROR_ARGUMENT, d.step = INT64_MAX, "step 9223372036854775807");
    REFUSES(XD_ERROR_ARGUMENT, d.samples = 0, "a sampler of 0 samples");
    REFUSES(XD_ERROR_ARGUMENT, d.samples = INT64_MAX, "a sampler of 9223372036854775807 samples");
    REFUSES(XD_ERROR_ARGUMENT, d.elements = -1, "-1 elements");
    REFUSES(XD_ERROR_ARGUMENT, d.elements = INT64_MAX, "9223372036854775807 elements");
    REFUSES(XD_ERROR_ARGUMENT, d.first_element = -1, "from -1 on");
    REFUSES(XD_ERROR_ARGUMENT, d.first_element = INT64_MAX, "from 9223372036854775807 on");
    REFUSES(XD_ERROR_DTYPE, d.dtype = XD_DTYPE_F64, "samples of");
    xd_sampler_desc fine = settings(&f, XD_SAMPLER_ODE);
    vp(&fine, XD_SAMPLER_ODE);
    const xd_dmd_batch one = { .samples = 1 }, many = { .samples = SAMPLES + 1 }, minus = { .samples = -1 },
                       far = { .samples = 2, .first = UINT32_MAX }, before = { .samples = 1, .first = -1 };
    CHECK_EQ_INT(sample(ctx, &fine, &many, out), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "7 samples in a batch; there is room for 6"));
    CHECK_EQ_INT(sample(ctx, &fine, &minus, out), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(sample(ctx, &fine, &far, out), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "2 samples from sample 4294967295"));
    CHECK_EQ_INT(sample(ctx, &fine, &before, out), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(sample(ctx, &fine, &one, NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "no place for 1 samples"));
    CHECK_EQ_INT(f.calls, 0);
    CHECK(out[0] == 3.0f);
    CHECK_EQ_INT(sample(ctx, &fine, &one, out), XD_OK); /* a VP table has few steps */
    CHECK_EQ_INT(f.calls, 4);
    xd_sampler_destroy(NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
