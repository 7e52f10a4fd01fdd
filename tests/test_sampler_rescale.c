/* Samples from noise under rescaled guidance: trajectories computed again in double, split samples, what is refused. */
#include "xdistill.h"

#include "planned.h"
#include "xd_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WHOLE = 13, SAMPLES = 3, ALL = SAMPLES * WHOLE, RANKS = 4 };

static const char with[] = "with", without[] = "without"; /* the two conditions */
static const double four[] = { 0.95, 0.75, 0.5, 0.25, 0.0 };

/* Element by element: what it says depends on the number in the whole sample, which begins at `first`. */
typedef struct formula {
    xd_dtype dtype;
    int64_t elements, first;
    int calls;
    int64_t spoilt; /* the call's sample that gets a NaN at its first element; -1: none */
} formula;

static double say(bool negative, int64_t i, double x, double t) {
    const double wave = negative ? 0.8 * sin(0.7 * (double)i) : 0.5 * cos(0.3 * (double)i) - 0.2;
    return 0.4 * x + wave * (1.0 + t);
}

static xd_result speak(void *user, const xd_network_call *call) {
    formula *f = (formula *)user;
    const bool negative = call->condition == (const void *)without;
    f->calls++;
    for (int64_t i = 0; i < call->samples * f->elements; i++) {
        const float *wide = (const float *)call->hidden;
        const uint16_t *narrow = (const uint16_t *)call->hidden;
        const double x = (double)(f->dtype == XD_DTYPE_F32 ? wide[i] : xd_f32_from_bf16(narrow[i]));
        const int64_t sample = i / f->elements, element = i % f->elements;
        float y = (float)say(negative, f->first + element, x, call->times[sample]);
        if (sample == f->spoilt && element == 0) y = NAN;
        if (f->dtype == XD_DTYPE_F32) ((float *)call->raw)[i] = y;
        if (f->dtype != XD_DTYPE_F32) ((uint16_t *)call->raw)[i] = xd_bf16_from_f32(y);
    }
    return XD_OK;
}

static formula whole_formula(void) {
    const formula f = { .dtype = XD_DTYPE_F32, .elements = WHOLE, .spoilt = -1 };
    return f;
}

static xd_sampler_desc settings(formula *f, xd_sampler_kind kind, double scale, double rescale) {
    xd_sampler_desc d = xd_sampler_defaults();
    d.network = (xd_network){ .user = f, .predicts = XD_PREDICT_FLOW, .forward = speak };
    d.network.guidance.rescale = rescale;
    d.guided = true;
    d.guidance_scale = scale;
    d.kind = kind;
    d.steps = 4;
    d.list = four;
    d.samples = SAMPLES;
    d.elements = f->elements;
    d.first_element = f->first;
    d.whole_elements = WHOLE;
    d.dtype = f->dtype;
    d.seed = 11;
    return d;
}

static xd_result sample(xd_ctx *ctx, const xd_sampler_desc *d, void *out) {
    const xd_dmd_batch batch = { .samples = SAMPLES, .first = 2, .condition = with, .negative = without };
    xd_sampler *sampler = NULL;
    XD_TRY(xd_sampler_create(ctx, d, &sampler));
    const xd_result result = xd_sampler_run(sampler, &batch, out);
    xd_sampler_destroy(sampler);
    return result;
}

/* ---- by hand ---- */

/* One sample on its way: x_t, and what guidance makes of it. */
typedef struct journey {
    const xd_sampler_desc *d;
    double x[WHOLE], clean[WHOLE], eps[WHOLE];
} journey;

static double clean_of(xd_prediction predicts, double p, double x, double t) {
    if (predicts == XD_PREDICT_X0) return p;
    return predicts == XD_PREDICT_EPS ? (x - t * p) / (1.0 - t) : x - t * p;
}

static double deviation(const double *x) {
    double mean = 0.0, square = 0.0;
    for (int i = 0; i < WHOLE; i++) mean += x[i] / WHOLE;
    for (int i = 0; i < WHOLE; i++) square += (x[i] - mean) * (x[i] - mean) / WHOLE;
    return sqrt(square);
}

/* Clean samples and noise at `x`, under rectified flow. */
static void guide_by_hand(journey *j, const double *x, double t) {
    const double s = j->d->guidance_scale, phi = j->d->network.guidance.rescale;
    double plain[WHOLE];
    for (int i = 0; i < WHOLE; i++) {
        const double said[2] = { say(false, i, x[i], (double)(float)t),
                                 say(true, i, x[i], (double)(float)t) };
        const double other = clean_of(j->d->network.predicts, said[1], x[i], t);
        plain[i] = clean_of(j->d->network.predicts, said[0], x[i], t);
        j->clean[i] = other + s * (plain[i] - other);
    }
    const double factor = phi * deviation(plain) / deviation(j->clean) + 1.0 - phi;
    for (int i = 0; i < WHOLE; i++) {
        j->clean[i] *= factor;
        j->eps[i] = (x[i] - (1.0 - t) * j->clean[i]) / t;
    }
}

static void walk_few(journey *j, int64_t number) {
    for (int k = 0; k < j->d->steps; k++) {
        const double next = j->d->list[k + 1];
        const xd_philox fresh = { .seed = j->d->seed,
                                  .stream = (uint8_t)(XD_STREAM_ROLLOUT + 1 + k),
                                  .sample = (uint32_t)number };
        float noise[WHOLE];
        xd_philox_fill_normal(&fresh, 0, WHOLE, noise);
        guide_by_hand(j, j->x, j->d->list[k]);
        for (int i = 0; i < WHOLE; i++)
            j->x[i] = (1.0 - next) * j->clean[i] +
                      next * (j->d->kind == XD_SAMPLER_SDE ? (double)noise[i] : j->eps[i]);
    }
}

static void walk_many(journey *j) {
    for (int k = 0; k < j->d->steps; k++) {
        const double t = j->d->list[k], next = j->d->list[k + 1], h = next - t;
        double slope[WHOLE], ahead[WHOLE];
        guide_by_hand(j, j->x, t);
        for (int i = 0; i < WHOLE; i++) slope[i] = j->eps[i] - j->clean[i], ahead[i] = j->x[i] + h * slope[i];
        if (j->d->kind == XD_SAMPLER_HEUN && next > 0.0) {
            guide_by_hand(j, ahead, next);
            for (int i = 0; i < WHOLE; i++) slope[i] = 0.5 * (slope[i] + j->eps[i] - j->clean[i]);
        }
        for (int i = 0; i < WHOLE; i++) j->x[i] += h * slope[i];
    }
}

static void by_hand(const xd_sampler_desc *d, int64_t number, double *out) {
    const xd_philox random = { .seed = d->seed,
                               .stream = XD_STREAM_STUDENT_NOISE,
                               .sample = (uint32_t)number };
    float noise[WHOLE];
    journey j = { .d = d };
    xd_philox_fill_normal(&random, 0, WHOLE, noise);
    for (int i = 0; i < WHOLE; i++) j.x[i] = d->list[0] * (double)noise[i];
    if (d->kind == XD_SAMPLER_EULER || d->kind == XD_SAMPLER_HEUN) walk_many(&j);
    if (d->kind == XD_SAMPLER_ODE || d->kind == XD_SAMPLER_SDE) walk_few(&j, number);
    memcpy(out, j.x, sizeof j.x);
}

static void check_by_hand(xd_sampler_kind kind, xd_prediction predicts, double scale, double rescale) {
    formula f = whole_formula();
    float out[ALL];
    double expected[WHOLE];
    xd_ctx *ctx;
    xd_sampler_desc d = settings(&f, kind, scale, rescale);
    d.network.predicts = predicts;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(sample(ctx, &d, out), XD_OK);
    CHECK_EQ_INT(f.calls, 2 * (kind == XD_SAMPLER_HEUN ? 7 : 4));
    for (int s = 0; s < SAMPLES; s++) {
        by_hand(&d, 2 + s, expected);
        for (int i = 0; i < WHOLE; i++)
            CHECK_NEAR((double)out[s * WHOLE + i], expected[i], 2e-5 * (1.0 + fabs(expected[i])));
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(rescaled_trajectories_are_those_computed_by_hand) {
    static const xd_prediction kinds[] = { XD_PREDICT_FLOW, XD_PREDICT_X0, XD_PREDICT_EPS };
    for (int kind = XD_SAMPLER_ODE; kind <= XD_SAMPLER_HEUN; kind++)
        for (int k = 0; k < 3; k++) {
            check_by_hand((xd_sampler_kind)kind, kinds[k], 3.0, 0.7);
            check_by_hand((xd_sampler_kind)kind, kinds[k], 1.5, 1.0);
            check_by_hand((xd_sampler_kind)kind, kinds[k], 3.0, 0.0);
        }
}

XD_TEST(rescale_narrows_what_a_large_scale_widens) {
    float out[3][ALL];
    double wide[3][WHOLE];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int k = 0; k < 3; k++) {
        formula f = whole_formula();
        const xd_sampler_desc d = settings(&f, XD_SAMPLER_EULER, k ? 6.0 : 1.0, k == 2 ? 1.0 : 0.0);
        CHECK_EQ_INT(sample(ctx, &d, out[k]), XD_OK);
        for (int i = 0; i < WHOLE; i++) wide[k][i] = (double)out[k][i];
    }
    CHECK(deviation(wide[1]) > 2.0 * deviation(wide[0]));
    CHECK(fabs(deviation(wide[2]) - deviation(wide[0])) < 0.5 * (deviation(wide[1]) - deviation(wide[0])));
    xd_ctx_destroy(ctx);
}

XD_TEST(what_is_not_finite_goes_through_and_leaves_other_samples_as_they_were) {
    for (int kind = XD_SAMPLER_ODE; kind <= XD_SAMPLER_HEUN; kind++) {
        formula good = whole_formula(), bad = whole_formula();
        float clean[ALL], out[ALL];
        xd_ctx *ctx;
        bad.spoilt = 1;
        const xd_sampler_desc d = settings(&good, (xd_sampler_kind)kind, 3.0, 0.7),
                              e = settings(&bad, (xd_sampler_kind)kind, 3.0, 0.7);
        CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
        CHECK_EQ_INT(sample(ctx, &d, clean), XD_OK);
        CHECK_EQ_INT(sample(ctx, &e, out), XD_OK);
        CHECK(isnan(out[WHOLE]));
        CHECK(memcmp(out, clean, WHOLE * sizeof *out) == 0);
        CHECK(memcmp(out + 2 * WHOLE, clean + 2 * WHOLE, WHOLE * sizeof *out) == 0);
        xd_ctx_destroy(ctx);
    }
}

/* ---- samples that ranks share ---- */

typedef struct split_run {
    xd_sampler_kind kind;
    xd_dtype dtype;
    unsigned char out[ALL * sizeof(float)]; /* put together from all ranks */
} split_run;

/* Uneven cuts; of four, one is empty. */
static xd_interval part_of(int rank, int ranks) {
    static const int64_t cuts[RANKS + 1][RANKS + 1] = {
        { 0 }, { 0, WHOLE }, { 0, 5, WHOLE }, { 0, 1, 9, WHOLE }, { 0, 6, 6, 10, WHOLE }
    };
    const xd_interval part = { cuts[ranks][rank], cuts[ranks][rank + 1] };
    return part;
}

static xd_result split_rank(xd_comm *world, void *argument) {
    split_run *run = (split_run *)argument;
    const xd_interval own = part_of(xd_comm_rank(world), xd_comm_size(world));
    const size_t each = run->dtype == XD_DTYPE_F32 ? 4 : 2;
    const size_t bytes = (size_t)(own.end - own.begin) * each;
    formula f = { .dtype = run->dtype, .elements = own.end - own.begin, .first = own.begin, .spoilt = -1 };
    unsigned char here[ALL * sizeof(float)];
    xd_sampler_desc d = settings(&f, run->kind, 3.0, 0.7);
    d.split = world;
    XD_TRY(sample(xd_comm_ctx(world), &d, here));
    for (size_t s = 0; s < SAMPLES; s++)
        memcpy(run->out + (s * WHOLE + (size_t)own.begin) * each, here + s * bytes, bytes);
    return XD_OK;
}

static void split_on(split_run *run, int ranks) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    memset(run->out, 0, sizeof run->out);
    const xd_result result = xd_run_threads(ranks, &desc, split_rank, run, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
}

XD_TEST(split_samples_have_the_bits_of_whole_ones) {
    for (int kind = XD_SAMPLER_ODE; kind <= XD_SAMPLER_HEUN; kind++)
        for (int narrow = 0; narrow < 2; narrow++) {
            split_run one = { .kind = (xd_sampler_kind)kind, .dtype = narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32 },
                      some = one;
            split_on(&one, 1);
            CHECK(one.out[0] != 0 || one.out[1] != 0);
            for (int ranks = 2; ranks <= RANKS; ranks++) {
                split_on(&some, ranks);
                CHECK(memcmp(one.out, some.out, sizeof one.out) == 0);
            }
        }
}

/* ---- memory ---- */

static void *count_allocate(void *user, size_t bytes) {
    ++*(int *)user;
    return malloc(bytes ? bytes : 1);
}

static void count_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(runs_allocate_nothing_and_bytes_are_known_before) {
    const xd_dmd_batch batch = { .samples = SAMPLES, .condition = with, .negative = without };
    int calls = 0;
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, &calls } };
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    for (int kind = XD_SAMPLER_ODE; kind <= XD_SAMPLER_HEUN; kind++) {
        formula f = whole_formula();
        const xd_sampler_desc d = settings(&f, (xd_sampler_kind)kind, 3.0, 0.7),
                              plain = settings(&f, (xd_sampler_kind)kind, 3.0, 0.0);
        xd_memory_bytes bytes = { 0, 0 }, without_it = { 0, 0 };
        xd_sampler *sampler;
        float out[ALL];
        CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_sampler_create(ctx, &d, &sampler), &bytes), XD_OK);
        CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_sampler_create(ctx, &plain, &sampler), &without_it), XD_OK);
        CHECK(bytes.host > without_it.host);
        CHECK_EQ_INT(xd_sampler_create(ctx, &d, &sampler), XD_OK);
        const int before = calls;
        CHECK_EQ_INT(xd_sampler_run(sampler, &batch, out), XD_OK);
        CHECK_EQ_INT(calls, before);
        xd_sampler_destroy(sampler);
    }
    xd_ctx_destroy(ctx);
}

/* ---- what is refused ---- */

static void refuse(const xd_sampler_desc *d, const char *text) {
    xd_memory_bytes bytes = { 0, 0 };
    xd_sampler *sampler = NULL;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_sampler_create(ctx, d, &sampler), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, text));
    if (!strstr(xd_last_error(ctx)->message, text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_sampler_create(ctx, d, &sampler), &bytes), XD_ERROR_ARGUMENT);
    CHECK(sampler == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(rescale_that_means_nothing_is_refused) {
    formula f = whole_formula();
    const xd_sampler_desc good = settings(&f, XD_SAMPLER_ODE, 2.0, 0.5);
    xd_sampler_desc d = good;
    d.network.guidance.rescale = 1.5;
    refuse(&d, "rescale 1.5, which is outside [0, 1]");
    d.network.guidance.rescale = NAN;
    refuse(&d, "rescale nan, which is outside [0, 1]");
    d = good, d.guided = false;
    refuse(&d, "rescale 0.5 of a sampler, which has no guidance");
    d = good, d.network.guidance.on = true, d.network.guidance.scale = 2.0;
    refuse(&d, "a sampler's network with guidance by 2");
    d = good, d.first_element = 4;
    refuse(&d, "elements 4 to 16 of samples of 13");
    d = good, d.whole_elements = 12;
    refuse(&d, "elements 0 to 12 of samples of 12");
    d = good, d.elements = d.whole_elements = 0;
    refuse(&d, "elements 0 to -1 of samples of 0");
}

typedef struct disagreement {
    double scale[2], rescale[2]; /* of each rank */
    xd_result results[2];
    char messages[2][512];
} disagreement;

static xd_result disagree_rank(xd_comm *world, void *argument) {
    disagreement *a = (disagreement *)argument;
    const int me = xd_comm_rank(world);
    const xd_interval own = part_of(me, 2);
    formula f = { .dtype = XD_DTYPE_F32, .elements = own.end - own.begin, .first = own.begin, .spoilt = -1 };
    xd_sampler_desc d = settings(&f, XD_SAMPLER_ODE, a->scale[me], a->rescale[me]);
    xd_sampler *sampler = NULL;
    d.split = world;
    a->results[me] = xd_sampler_create(xd_comm_ctx(world), &d, &sampler);
    snprintf(a->messages[me], sizeof a->messages[me], "%s", xd_last_error(xd_comm_ctx(world))->message);
    CHECK(sampler == NULL && f.calls == 0);
    return XD_OK;
}

XD_TEST(ranks_of_a_split_agree_before_anything_is_called) {
    disagreement other = { .scale = { 2.0, 2.0 }, .rescale = { 0.5, 0.25 } },
                 none = { .scale = { 2.0, 2.0 }, .rescale = { 0.5, 0.0 } },
                 wrong = { .scale = { 2.0, 2.0 }, .rescale = { 0.5, 1.5 } };
    CHECK_EQ_INT(xd_run_threads(2, NULL, disagree_rank, &other, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(2, NULL, disagree_rank, &none, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(2, NULL, disagree_rank, &wrong, NULL), XD_OK);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ_INT(other.results[rank], XD_ERROR_MISMATCH);
        CHECK_EQ_INT(none.results[rank], XD_ERROR_MISMATCH);
        CHECK(strstr(
            other.messages[rank],
            "settings of a sampler: rank 1 passed network.guidance.rescale = 0.25, rank 0 passed 0.5"));
    }
    CHECK_EQ_INT(wrong.results[0], XD_ERROR_PEER);
    CHECK_EQ_INT(wrong.results[1], XD_ERROR_ARGUMENT);
    CHECK(strstr(wrong.messages[1], "rescale 1.5"));
}

static xd_result refuse_forward(void *user, const xd_network_call *call) {
    (void)user;
    (void)call;
    return XD_ERROR_IO;
}

XD_TEST(a_failing_network_of_a_sampler_is_called_the_samplers) {
    formula f = whole_formula();
    xd_sampler_desc d = settings(&f, XD_SAMPLER_ODE, 3.0, 0.7);
    float out[ALL];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    d.network.forward = refuse_forward;
    CHECK_EQ_INT(sample(ctx, &d, out), XD_ERROR_IO);
    CHECK_EQ_STR(xd_last_error(ctx)->message,
                 "the forward of the sampler's network returned ERROR_IO without a message");
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
