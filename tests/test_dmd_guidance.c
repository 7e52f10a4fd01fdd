/* Guidance of the teacher and of the fake score, with and without rescale, against sums in double; what is refused. */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "planned.h"
#include "xd_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 5000, SAMPLES = 2, SPOKEN = 4 };

static const char with[] = "with", without[] = "without"; /* the two conditions */

/* What one of the networks was given and has said, by condition; the student's gradient. */
typedef struct voice {
    int role, *elements;
    double offset;
    float x[SPOKEN][SAMPLES * MOST], said[SPOKEN][SAMPLES * MOST], gradient[SAMPLES * MOST];
    double t[SAMPLES];
    int forwards;
} voice;

static float say(const voice *v, bool negative, int64_t i, float x, double t) {
    const double wave = negative ? 0.8 * sin(0.7 * (double)i) : 0.5 * cos(0.3 * (double)(i + v->role));
    return (float)(0.4 * (double)x + wave * (1.0 + t) + v->offset);
}

static xd_result speak(void *user, const xd_network_call *call) {
    voice *v = (voice *)user;
    const int which = call->condition == (const void *)without;
    float *raw = (float *)call->raw;
    const float *x = (const float *)call->hidden;
    v->forwards++;
    for (int64_t i = 0; i < call->samples * *v->elements; i++) {
        const double t = call->times[i / *v->elements];
        raw[i] = v->said[which][i] = say(v, which != 0, i, x[i], t);
        v->x[which][i] = x[i];
        v->t[i / *v->elements] = t;
    }
    return XD_OK;
}

static xd_result listen(void *user, const xd_network_call *call) {
    voice *v = (voice *)user;
    memcpy(v->gradient, call->raw_gradient, (size_t)(call->samples * *v->elements) * sizeof(float));
    return XD_OK;
}

static voice voices[XD_DMD_ROLES];
static int element_count;
static const double rungs[] = { 0.999, 0.0 };

static xd_dmd_desc settings(int elements, double offset) {
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    memset(voices, 0, sizeof voices);
    element_count = elements;
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        voices[role].role = role;
        voices[role].elements = &element_count;
        if (role == XD_DMD_TEACHER) voices[role].offset = offset;
        if (role == XD_DMD_DISCRIMINATOR) continue;
        d.networks[role].user = &voices[role];
        d.networks[role].predicts = XD_PREDICT_FLOW;
        d.networks[role].forward = speak;
        d.networks[role].backward = listen;
    }
    d.rungs.list = rungs;
    d.sizes.samples = d.sizes.step_samples = SAMPLES;
    d.sizes.elements = elements;
    d.normaliser = XD_VSD_NONE;
    d.seed = 3;
    return d;
}

/* Clean samples of a network under rectified flow, guided: by hand. */
static void guide_by_hand(const voice *v, const xd_guidance *g, double *out) {
    const int n = *v->elements;
    for (int b = 0; b < SAMPLES; b++) {
        double sum[2] = { 0, 0 }, square[2] = { 0, 0 };
        for (int i = b * n; i < (b + 1) * n; i++) {
            const double plain = (double)(float)((double)v->x[0][i] - v->t[b] * (double)v->said[0][i]);
            const double other = (double)(float)((double)v->x[1][i] - v->t[b] * (double)v->said[1][i]);
            out[i] = g->on ? (double)(float)(other + g->scale * (plain - other)) : plain;
            sum[0] += plain / n, sum[1] += out[i] / n;
        }
        for (int i = b * n; i < (b + 1) * n; i++) {
            const double plain = (double)(float)((double)v->x[0][i] - v->t[b] * (double)v->said[0][i]);
            square[0] += (plain - sum[0]) * (plain - sum[0]),
                square[1] += (out[i] - sum[1]) * (out[i] - sum[1]);
        }
        const double ratio = square[1] > 0.0 ? sqrt(square[0] / square[1]) : 1.0;
        for (int i = b * n; i < (b + 1) * n && g->on; i++) out[i] *= g->rescale * ratio + 1.0 - g->rescale;
    }
}

/* The gradient by the student's prediction is -t (F - T) / N. */
static void check_student(const xd_dmd_desc *d, double tolerance) {
    static double target[SAMPLES * MOST], fake[SAMPLES * MOST];
    const xd_guidance teacher = { d->guided, d->guidance_scale,
                                  d->networks[XD_DMD_TEACHER].guidance.rescale };
    const xd_dmd_batch batch = { .samples = SAMPLES, .condition = with, .negative = without };
    xd_dmd *dmd = NULL;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_dmd_create(ctx, d, &dmd), XD_OK);
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_OK);
    guide_by_hand(&voices[XD_DMD_TEACHER], &teacher, target);
    guide_by_hand(&voices[XD_DMD_FAKE_SCORE], &d->networks[XD_DMD_FAKE_SCORE].guidance, fake);
    const int all = SAMPLES * element_count;
    double furthest = 0.0;
    for (int i = 0; i < all; i++) {
        const double got = (double)voices[XD_DMD_STUDENT].gradient[i] * all / -voices[XD_DMD_STUDENT].t[0];
        furthest = fmax(furthest, fabs(got - (fake[i] - target[i])));
    }
    CHECK_NEAR(furthest, 0.0, tolerance);
    CHECK_EQ_INT(voices[XD_DMD_TEACHER].forwards, 1 + d->guided);
    CHECK_EQ_INT(voices[XD_DMD_FAKE_SCORE].forwards, 1 + d->networks[XD_DMD_FAKE_SCORE].guidance.on);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
}

XD_TEST(guided_and_rescaled_samples_are_those_of_the_formula) {
    static const int sizes[] = { 1, 2, 7, 300, MOST };
    static const double rescales[] = { 0.0, 0.7, 1.0 };
    for (int size = 0; size < 5; size++)
        for (int k = 0; k < 3; k++)
            for (int critic = 0; critic < 3; critic++) {
                xd_dmd_desc d = settings(sizes[size], 0.0);
                d.guided = critic < 2;
                d.guidance_scale = 4.0;
                if (d.guided) d.networks[XD_DMD_TEACHER].guidance.rescale = rescales[k];
                if (critic > 0)
                    d.networks[XD_DMD_FAKE_SCORE].guidance = (xd_guidance){ true, 1.5, rescales[2 - k] };
                check_student(&d, 1e-5);
            }
}

XD_TEST(deviations_are_those_around_the_mean_however_far_that_is) {
    static const double offsets[] = { 1.0, -100.0, 1e4 };
    for (int k = 0; k < 3; k++) {
        xd_dmd_desc d = settings(300, offsets[k]);
        d.guided = true;
        d.guidance_scale = 3.0;
        d.networks[XD_DMD_TEACHER].guidance.rescale = 1.0;
        check_student(&d, 3e-6 * (1.0 + fabs(offsets[k])));
    }
}

XD_TEST(a_scale_of_zero_is_the_negative_prediction_and_not_none) {
    xd_dmd_desc d = settings(7, 0.0);
    d.guided = true;
    d.guidance_scale = 0.0;
    check_student(&d, 1e-6);
    d = settings(7, 0.0);
    d.guidance_scale = 5.0; /* not read */
    check_student(&d, 1e-6);
}

/* ---- warm-up ---- */

static double regression(double scale, double rescale) {
    const xd_dmd_batch batch = { .samples = SAMPLES, .condition = with, .negative = without };
    xd_dmd_desc d = settings(300, 0.0);
    xd_dmd_values values = { 0 };
    xd_dmd *dmd;
    xd_ctx *ctx;
    d.guided = true;
    d.guidance_scale = scale;
    d.regression.substeps = 2;
    d.networks[XD_DMD_TEACHER].guidance.rescale = rescale;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    CHECK_EQ_INT(xdi_dmd_warm_up(dmd, 0, &batch, &values), XD_OK);
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
    return values.regression;
}

XD_TEST(warm_up_is_rescaled_too) {
    const double plain = regression(1.0, 0.0), same = regression(1.0, 1.0), wide = regression(4.0, 0.0),
                 narrow = regression(4.0, 1.0);
    CHECK_NEAR(same, plain, 1e-5 * plain); /* G is P: the factor is 1 */
    CHECK(plain > 0.0 && fabs(narrow - wide) > 0.05 * wide);
    CHECK(fabs(narrow - plain) < fabs(wide - plain));
}

/* ---- what is refused ---- */

static void refuse(const xd_dmd_desc *d, const char *text) {
    xd_memory_bytes bytes = { 0, 0 };
    xd_dmd *dmd = NULL;
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_dmd_create(ctx, d, &dmd), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, text));
    if (!strstr(xd_last_error(ctx)->message, text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_dmd_create(ctx, d, &dmd), &bytes), XD_ERROR_ARGUMENT);
    CHECK(dmd == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(guidance_that_means_nothing_is_refused) {
    const xd_dmd_desc good = settings(7, 0.0);
    xd_dmd_desc d = good;
    d.networks[XD_DMD_TEACHER].guidance = (xd_guidance){ true, 2.0, 0.0 };
    refuse(&d, "guidance of the teacher by 2; the teacher's is xd_dmd_desc.guided");
    d = good, d.networks[XD_DMD_STUDENT].guidance = (xd_guidance){ true, 2.0, 0.0 };
    refuse(&d, "guidance of the student by 2; it has none");
    d = good, d.networks[XD_DMD_FAKE_SCORE].guidance = (xd_guidance){ true, NAN, 0.0 };
    refuse(&d, "guidance of the fake score by nan");
    d = good, d.networks[XD_DMD_FAKE_SCORE].guidance = (xd_guidance){ true, 2.0, 1.5 };
    refuse(&d, "rescale 1.5, which is outside [0, 1]");
    d = good, d.guided = true, d.networks[XD_DMD_TEACHER].guidance.rescale = NAN;
    refuse(&d, "rescale nan");
    d = good, d.guided = true, d.networks[XD_DMD_TEACHER].guidance.rescale = -0.5;
    refuse(&d, "rescale -0.5");
    d = good, d.networks[XD_DMD_TEACHER].guidance.rescale = 0.5;
    refuse(&d, "rescale 0.5 of the teacher, which has no guidance");
    d = good, d.networks[XD_DMD_FAKE_SCORE].guidance.rescale = 0.5;
    refuse(&d, "rescale 0.5 of the fake score, which has no guidance");
}

XD_TEST(a_guided_fake_score_needs_the_negative_condition_and_rescale_needs_guidance) {
    xd_dmd_desc d = settings(7, 0.0);
    const xd_dmd_batch batch = { .samples = SAMPLES, .condition = with };
    xd_sampler_desc s = xd_sampler_defaults();
    xd_sampler *sampler = NULL;
    xd_dmd *dmd;
    xd_ctx *ctx;
    d.networks[XD_DMD_FAKE_SCORE].guidance = (xd_guidance){ true, 2.5, 0.0 };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_dmd_create(ctx, &d, &dmd), XD_OK);
    CHECK_EQ_INT(xd_dmd_student(dmd, 0, &batch, NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "guidance by 2.5, and no negative condition for 2 samples"));
    CHECK_EQ_INT(voices[XD_DMD_STUDENT].forwards, 0);
    s.network = d.networks[XD_DMD_TEACHER];
    s.network.guidance.rescale = 0.5;
    s.steps = 1;
    s.list = rungs;
    s.samples = SAMPLES;
    s.elements = 7;
    CHECK_EQ_INT(xd_sampler_create(ctx, &s, &sampler), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rescale 0.5"));
    xd_dmd_destroy(dmd);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
