/* Terms on a discriminator's logits and the weights of f-distill: formulas, finite differences, splits, findings, refusals. */
#include "parallel.h"
#include "planned.h"
#include "sample_refused.h"
#include "xd_test.h"
#include "xd_test_cpu.h"
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/fdistill.h"
#endif

#include <stdlib.h>

enum { SAMPLES = 7, HEADS = 3, CELLS = SAMPLES * HEADS, BINS = 4 };

static xd_ctx *context(xd_reduction reduction) {
    return open_ctx(1, NULL, reduction, xd_test_cpu());
}

/* ---- terms on logits ---- */

typedef struct gan {
    xd_gan_role role;
    xd_gan_kind kind;
    float fake[CELLS], real[CELLS], fake_gradient[CELLS], real_gradient[CELLS];
    double sample_loss[SAMPLES], n;
    xd_sample_values values;
    xd_status status;
} gan;

static double softplus(double u) {
    return u > 20.0 ? u : log1p(exp(u));
}

static double hinge(double u) {
    return u > 0.0 ? u : 0.0;
}

static double gan_formula(const gan *g, double fake, double real) {
    if (g->role == XD_GAN_R1) return (real - fake) * (real - fake);
    if (g->role == XD_GAN_GENERATOR) return g->kind == XD_GAN_SOFTPLUS ? softplus(-fake) : -fake;
    return g->kind == XD_GAN_SOFTPLUS ? softplus(fake) + softplus(-real)
                                      : hinge(1.0 + fake) + hinge(1.0 - real);
}

static void gan_fill(gan *g, int variant) {
    uint64_t state = (uint64_t)variant + 5;
    memset(g, 0, sizeof *g);
    g->role = (xd_gan_role)(variant % 3);
    g->kind = (xd_gan_kind)(variant / 3 % 2);
    for (int i = 0; i < CELLS; i++) {
        g->fake[i] = 3.0f * number(&state);
        g->real[i] = 3.0f * number(&state);
    }
}

/* Samples [from, to). */
static xd_result gan_call(xd_ctx *ctx, gan *g, int from, int to, xd_comm *comm) {
    xd_gan_desc d = xd_gan_defaults();
    const int at = from * HEADS;
    d.role = g->role;
    d.kind = g->kind;
    d.fake = xd_rows_of(g->fake + at, XD_DTYPE_F32, to - from, HEADS);
    d.fake_gradient = xd_rows_of(g->fake_gradient + at, XD_DTYPE_F32, to - from, HEADS);
    if (g->role != XD_GAN_GENERATOR) {
        d.real = xd_rows_of(g->real + at, XD_DTYPE_F32, to - from, HEADS);
        d.real_gradient = xd_rows_of(g->real_gradient + at, XD_DTYPE_F32, to - from, HEADS);
    }
    d.common.weight = 0.03;
    d.common.comm = comm;
    d.common.denominator_value = g->n;
    d.common.sample_loss = g->sample_loss + from;
    d.common.status = &g->status;
    return xd_gan_loss(ctx, &d, &g->values);
}

XD_TEST(terms_on_logits_are_those_of_the_formulas_and_their_differences) {
    for (int variant = 0; variant < 12; variant++) {
        gan g;
        const double step = 1e-5, n = variant >= 6 ? 50.0 : (double)CELLS;
        xd_ctx *ctx = context(variant & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        gan_fill(&g, variant % 6);
        g.n = variant >= 6 ? 50.0 : 0.0;
        CHECK_EQ_INT(gan_call(ctx, &g, 0, SAMPLES, NULL), XD_OK);
        double sum = 0.0;
        for (int i = 0; i < CELLS; i++) {
            const double a = (double)g.fake[i], b = (double)g.real[i], scale = 0.03 / n / (2.0 * step);
            sum += gan_formula(&g, a, b);
            CHECK_NEAR(g.fake_gradient[i],
                       scale * (gan_formula(&g, a + step, b) - gan_formula(&g, a - step, b)), 1e-9);
            if (g.role == XD_GAN_GENERATOR) continue;
            CHECK_NEAR(g.real_gradient[i],
                       scale * (gan_formula(&g, a, b + step) - gan_formula(&g, a, b - step)), 1e-9);
        }
        CHECK_NEAR(g.values.loss, 0.03 * sum / n, 1e-14);
        CHECK_NEAR(g.values.denominator, n, 0.0);
        CHECK_EQ_INT(g.values.counted, CELLS);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(softplus_has_the_numbers_of_the_specification) {
    static const double in[] = { 0.0, 1.0, -30.0, 100.0 },
                        out[] = { 0.6931471805599453, 1.3132616875182228, 9.357622968839737e-14, 100.0 },
                        slope[] = { 0.5, 0.7310585786300049, 9.357622968839299e-14, 1.0 };
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    for (int k = 0; k < 4; k++) {
        float logit = -(float)in[k], gradient = 9.0f;
        xd_gan_desc d = xd_gan_defaults();
        xd_sample_values values;
        d.fake = xd_rows_of(&logit, XD_DTYPE_F32, 1, 1);
        d.fake_gradient = xd_rows_of(&gradient, XD_DTYPE_F32, 1, 1);
        CHECK_EQ_INT(xd_gan_loss(ctx, &d, &values), XD_OK);
        CHECK_NEAR(values.loss, out[k], 1e-15 * out[k]);
        CHECK_NEAR(gradient, -slope[k], 1e-7 * slope[k]);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(gradients_in_narrow_types_may_lie_over_their_logits) {
    static const xd_dtype types[] = { XD_DTYPE_BF16, XD_DTYPE_F16 };
    for (int k = 0; k < 2; k++) {
        gan g;
        uint16_t fake[CELLS], real[CELLS];
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        xd_gan_desc d = xd_gan_defaults();
        xd_sample_values values;
        gan_fill(&g, 1);
        for (int i = 0; i < CELLS; i++) {
            xd_store_f64(fake, types[k], i, (double)g.fake[i]);
            xd_store_f64(real, types[k], i, (double)g.real[i]);
            g.fake[i] = (float)xd_load_f64(fake, types[k], i);
            g.real[i] = (float)xd_load_f64(real, types[k], i);
        }
        CHECK_EQ_INT(gan_call(ctx, &g, 0, SAMPLES, NULL), XD_OK);
        d.role = XD_GAN_DISCRIMINATOR;
        d.common.weight = 0.03;
        d.fake = d.fake_gradient = xd_rows_of(fake, types[k], SAMPLES, HEADS);
        d.real = d.real_gradient = xd_rows_of(real, types[k], SAMPLES, HEADS);
        CHECK_EQ_INT(xd_gan_loss(ctx, &d, &values), XD_OK);
        CHECK(memcmp(&values, &g.values, sizeof values) == 0);
        for (int i = 0; i < CELLS; i++) {
            CHECK_NEAR(xd_load_f64(fake, types[k], i), g.fake_gradient[i],
                       5e-3 * fabs((double)g.fake_gradient[i]) + 6e-8);
            CHECK_NEAR(xd_load_f64(real, types[k], i), g.real_gradient[i],
                       5e-3 * fabs((double)g.real_gradient[i]) + 6e-8);
        }
        xd_ctx_destroy(ctx);
    }
}

static xd_result gan_rank(xd_comm *world, void *argument) {
    gan *g = (gan *)argument, mine = *g;
    const int rank = xd_comm_rank(world), size = xd_comm_size(world), from = SAMPLES * rank / size,
              to = SAMPLES * (rank + 1) / size;
    XD_TRY(gan_call(xd_comm_ctx(world), &mine, from, to, world));
    for (int i = from * HEADS; i < to * HEADS; i++) {
        g->fake_gradient[i] = mine.fake_gradient[i];
        g->real_gradient[i] = mine.real_gradient[i];
    }
    if (rank == size - 1) g->values = mine.values;
    return XD_OK;
}

XD_TEST(terms_on_logits_have_the_same_bits_for_every_split_of_the_batch) {
    for (int variant = 0; variant < 6; variant++)
        for (int ranks = 1; ranks <= 4; ranks++) {
            gan whole, split;
            xd_ctx_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.reduction = XD_REDUCTION_INVARIANT;
            xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
            gan_fill(&whole, variant);
            split = whole;
            CHECK_EQ_INT(gan_call(ctx, &whole, 0, SAMPLES, NULL), XD_OK);
            CHECK_EQ_INT(xd_run_threads(ranks, &desc, gan_rank, &split, NULL), XD_OK);
            CHECK(memcmp(&whole.values, &split.values, sizeof whole.values) == 0);
            CHECK(memcmp(whole.fake_gradient, split.fake_gradient, sizeof whole.fake_gradient) == 0);
            CHECK(memcmp(whole.real_gradient, split.real_gradient, sizeof whole.real_gradient) == 0);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(logits_that_are_not_finite_make_their_sample_zero) {
    for (int variant = 0; variant < 18; variant++) {
        gan bad, good;
        static const float values[] = { NAN, HUGE_VALF, -HUGE_VALF };
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        gan_fill(&bad, variant % 6);
        good = bad;
        bad.fake[2 * HEADS + 1] = values[variant / 6];
        CHECK_EQ_INT(gan_call(ctx, &bad, 0, SAMPLES, NULL), XD_OK);
        CHECK_EQ_INT(gan_call(ctx, &good, 0, SAMPLES, NULL), XD_OK);
        CHECK_EQ_INT(bad.status.not_finite, 1);
        CHECK_EQ_INT(bad.status.first_row, 2);
        CHECK_NEAR(bad.sample_loss[2], 0.0, 0.0);
        for (int i = 0; i < CELLS; i++) {
            const bool of_it = i / HEADS == 2;
            CHECK(bad.fake_gradient[i] == (of_it ? 0.0f : good.fake_gradient[i]));
            CHECK(bad.real_gradient[i] == (of_it ? 0.0f : good.real_gradient[i]));
        }
        CHECK(isfinite(bad.values.loss));
        xd_ctx_destroy(ctx);
    }
}

static void gan_refuses(xd_ctx *ctx, const xd_gan_desc *d, xd_result expected, const char *says) {
    xd_sample_values values = untouched_values;
    const xd_result result = xd_gan_loss(ctx, d, &values);
    sample_refused(ctx, result, &values, expected, says);
}

XD_TEST(terms_on_logits_refuse_what_they_cannot_read) {
    static float room[2][CELLS];
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_comm *self = NULL;
    xd_gan_desc good = xd_gan_defaults(), d;
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    good.role = XD_GAN_DISCRIMINATOR;
    good.fake = xd_rows_of(room[0], XD_DTYPE_F32, SAMPLES, HEADS);
    good.real = xd_rows_of(room[1], XD_DTYPE_F32, SAMPLES, HEADS);
    d = good, d.role = (xd_gan_role)3;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "role 3");
    d = good, d.kind = (xd_gan_kind)-1;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "loss -1");
    d = good, d.role = XD_GAN_GENERATOR;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "no real logits");
    d = good, d.real.cols = 2;
    gan_refuses(ctx, &d, XD_ERROR_SHAPE, "real is [7, 2]");
    d = good, d.real.data = NULL;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "real has no data");
    d = good, d.fake.dtype = XD_DTYPE_F64;
    gan_refuses(ctx, &d, XD_ERROR_DTYPE, "fake is F64");
    d = good, d.fake_gradient = d.real;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "over the real logits");
    d = good, d.real_gradient = d.fake;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "over the fake logits");
    d = good, d.common.split = self;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "not split");
    d = good, d.common.weight = 0.0;
    gan_refuses(ctx, &d, XD_ERROR_ARGUMENT, "weight 0");
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- f-distill ---- */

typedef struct ratios {
    xdi_fdistill_desc d;
    float logits[CELLS];
    double times[SAMPLES], bins[BINS], weights[SAMPLES];
    xd_status status;
} ratios;

static void ratios_fill(ratios *r, int variant) {
    uint64_t state = 11;
    memset(r, 0, sizeof *r);
    r->d = xdi_fdistill_defaults();
    r->d.divergence = (xd_f_divergence)(variant % 7);
    r->d.bins = variant >= 7 ? BINS : 0;
    r->d.rate = 0.25;
    for (int i = 0; i < CELLS; i++) r->logits[i] = 4.0f * number(&state);
    for (int b = 0; b < SAMPLES; b++) r->times[b] = 0.15 * b; /* some bin may be empty */
    r->times[6] = 0.1;
    for (int k = 0; k < BINS; k++) r->bins[k] = 1.0 + k;
}

static xd_result ratios_call(xd_ctx *ctx, ratios *r, int from, int to, xd_comm *comm) {
    xdi_fdistill_desc d = r->d;
    d.logits = xd_rows_of(r->logits + from * HEADS, XD_DTYPE_F32, to - from, HEADS);
    d.times = r->times + from;
    d.bin_values = r->bins;
    d.comm = comm;
    d.status = &r->status;
    return xdi_fdistill_weights(ctx, &d, r->weights + from);
}

static double ratio_of(const ratios *r, int b) {
    double mean = 0.0;
    for (int k = 0; k < HEADS; k++) mean += (double)r->logits[b * HEADS + k] / HEADS;
    const double e = exp(fmin(fmax(mean, -10.0), 10.0));
    return fmin(fmax(e, r->d.lower), r->d.upper);
}

static int bin_of(const ratios *r, int b) {
    const int k = (int)floor((r->times[b] - r->d.min_t) / ((r->d.max_t - r->d.min_t) / BINS));
    return k < 0 ? 0 : k >= BINS ? BINS - 1 : k;
}

XD_TEST(weights_of_samples_are_those_of_the_formulas) {
    for (int variant = 0; variant < 14; variant++) {
        ratios r, before;
        double rho[SAMPLES], bins[BINS], h[SAMPLES], mean = 0.0;
        xd_ctx *ctx = context(variant & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        ratios_fill(&r, variant);
        before = r;
        CHECK_EQ_INT(ratios_call(ctx, &r, 0, SAMPLES, NULL), XD_OK);
        for (int k = 0; k < BINS; k++) {
            double sum = 0.0, count = 0.0;
            for (int b = 0; b < SAMPLES; b++) {
                rho[b] = ratio_of(&r, b);
                if (bin_of(&r, b) == k) sum += rho[b], count += 1.0;
            }
            bins[k] = count > 0.0 && variant >= 7 ? before.bins[k] * 0.25 + 0.75 * sum / (count + 1e-6)
                                                  : before.bins[k];
            CHECK_NEAR(r.bins[k], bins[k], 1e-14 * bins[k]);
        }
        for (int b = 0; b < SAMPLES; b++) {
            const double x = variant >= 7 ? rho[b] / (bins[bin_of(&r, b)] + 1e-6) : rho[b];
            const double all[] = { 1.0 - 1.0 / (1.0 + x), 1.0, x, 1.0 / (1.0 + x), sqrt(x), 1.0 + x,
                                   1.0 / fmax(x, 1e-8) };
            h[b] = all[variant % 7];
            CHECK_NEAR(h[b], xdi_f_weight((xd_f_divergence)(variant % 7), x), 1e-14 * h[b]);
            mean += h[b] / SAMPLES;
        }
        for (int b = 0; b < SAMPLES; b++)
            CHECK_NEAR(r.weights[b], h[b] / (mean + 1e-6), 1e-13 * r.weights[b]);
        CHECK_EQ_INT(r.status.not_finite, 0);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(the_reverse_divergence_weighs_every_sample_alike) {
    ratios r;
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    ratios_fill(&r, XD_F_RKL + 7);
    CHECK_EQ_INT(ratios_call(ctx, &r, 0, SAMPLES, NULL), XD_OK);
    for (int b = 0; b < SAMPLES; b++) CHECK_NEAR(r.weights[b], 1.0, 1.1e-6);
    CHECK(isnan(xdi_f_weight((xd_f_divergence)7, 1.0)));
    xd_ctx_destroy(ctx);
}

static xd_result ratios_rank(xd_comm *world, void *argument) {
    ratios *r = (ratios *)argument, mine = *r;
    const int rank = xd_comm_rank(world), size = xd_comm_size(world), from = SAMPLES * rank / size,
              to = SAMPLES * (rank + 1) / size;
    XD_TRY(ratios_call(xd_comm_ctx(world), &mine, from, to, world));
    for (int b = from; b < to; b++) r->weights[b] = mine.weights[b];
    XD_TRY(xd_barrier(world));
    if (rank == size - 1) memcpy(r->bins, mine.bins, sizeof mine.bins);
    if (rank == size - 1) r->status = mine.status;
    return XD_OK;
}

XD_TEST(weights_and_bins_have_the_same_bits_for_every_split_of_the_batch) {
    for (int variant = 0; variant < 28; variant++)
        for (int ranks = 1; ranks <= 8; ranks += variant & 1 ? 3 : 1) {
            ratios whole, split;
            xd_ctx_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.reduction = XD_REDUCTION_INVARIANT;
            xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
            ratios_fill(&whole, variant % 14);
            if (variant >= 14) whole.logits[5] = NAN;
            split = whole;
            CHECK_EQ_INT(ratios_call(ctx, &whole, 0, SAMPLES, NULL), XD_OK);
            CHECK_EQ_INT(xd_run_threads(ranks, &desc, ratios_rank, &split, NULL), XD_OK);
            CHECK(memcmp(whole.weights, split.weights, sizeof whole.weights) == 0);
            CHECK(memcmp(whole.bins, split.bins, sizeof whole.bins) == 0);
            CHECK_EQ_INT(split.status.not_finite, variant >= 14);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(a_ratio_that_is_not_finite_has_weight_0_and_keeps_the_bins) {
    for (int variant = 0; variant < 6; variant++) {
        ratios r, before;
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        ratios_fill(&r, XD_F_KL + 7);
        if (variant == 0) r.logits[4 * HEADS] = NAN;
        if (variant == 1) r.logits[4 * HEADS + 2] = HUGE_VALF;
        if (variant == 2) r.logits[4 * HEADS + 2] = -HUGE_VALF;
        if (variant == 3) r.times[4] = NAN;
        if (variant == 4) r.times[4] = HUGE_VAL;
        if (variant == 5) r.status.not_finite = 1; /* of another loss: this step will be skipped */
        before = r;
        CHECK_EQ_INT(ratios_call(ctx, &r, 0, SAMPLES, NULL), XD_OK);
        CHECK_EQ_INT(r.status.not_finite, 1);
        if (variant < 5) CHECK_EQ_INT(r.status.first_row, 4);
        if (variant < 5) CHECK_NEAR(r.weights[4], 0.0, 0.0);
        for (int b = 0; b < SAMPLES; b++) CHECK(isfinite(r.weights[b]) && (b == 4 || r.weights[b] > 0.0));
        CHECK(memcmp(r.bins, before.bins, sizeof r.bins) == 0);
        xd_ctx_destroy(ctx);
    }
}

static void ratios_refuse(xd_ctx *ctx, const xdi_fdistill_desc *d, xd_result expected, const char *says) {
    double weights[SAMPLES] = { 7.0 };
    CHECK_EQ_INT(xdi_fdistill_weights(ctx, d, weights), expected);
    CHECK_NEAR(weights[0], 7.0, 0.0);
    CHECK(strstr(xd_last_error(ctx)->message, says) != NULL);
}

XD_TEST(workspaces_of_the_sizes_asked_are_enough) {
    for (int mode = 0; mode < 2; mode++) {
        gan g;
        ratios r;
        xd_sample_values values;
        xd_ctx *ctx = context(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        xd_gan_desc d = xd_gan_defaults();
        gan_fill(&g, 0);
        ratios_fill(&r, 7);
        d.fake = xd_rows_of(g.fake, XD_DTYPE_F32, SAMPLES, HEADS);
        for (int less = 0; less < 2; less++) {
            d.common.workspace_bytes = PLANNED_WORKSPACE(ctx, xd_gan_loss(ctx, &d, &values)) - (size_t)less;
            d.common.workspace = malloc(d.common.workspace_bytes);
            CHECK_EQ_INT(xd_gan_loss(ctx, &d, &values), less ? XD_ERROR_ARGUMENT : XD_OK);
            free(d.common.workspace);
            r.d.workspace_bytes = xdi_fdistill_workspace_bytes(&r.d) - (size_t)less;
            r.d.workspace = malloc(r.d.workspace_bytes);
            CHECK_EQ_INT(ratios_call(ctx, &r, 0, SAMPLES, NULL), less ? XD_ERROR_ARGUMENT : XD_OK);
            free(r.d.workspace);
        }
        d.fake.rows = -1;
        CHECK_EQ_INT(PLANNED_WORKSPACE(ctx, xd_gan_loss(ctx, &d, &values)), 0);
        r.d.bins = -1;
        CHECK_EQ_INT(xdi_fdistill_workspace_bytes(&r.d), 0);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(weights_of_samples_refuse_numbers_out_of_range) {
    ratios r;
    char memory[64];
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xdi_fdistill_desc good, d;
    ratios_fill(&r, 7);
    good = r.d;
    good.logits = xd_rows_of(r.logits, XD_DTYPE_F32, SAMPLES, HEADS);
    good.times = r.times;
    good.bin_values = r.bins;
    d = good, d.divergence = (xd_f_divergence)7;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "divergence 7");
    d = good, d.lower = 0.0;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "ratios in [0, 20]");
    d = good, d.upper = 0.05;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "ratios in [0.1, 0.05]");
    d = good, d.bins = -1;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "-1 bins");
    d = good, d.bins = XD_FDISTILL_BINS_MAX + 1;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "4097 bins");
    d = good, d.rate = 1.5;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "rate 1.5");
    d = good, d.rate = NAN;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "rate");
    d = good, d.max_t = 0.0;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "times in [0, 0]");
    d = good, d.bin_values = NULL;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "bin_values is NULL for 4 bins");
    d = good, d.times = NULL;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "times is NULL for 7 samples");
    d = good, d.logits.cols = 0;
    ratios_refuse(ctx, &d, XD_ERROR_SHAPE, "0 heads");
    d = good, d.logits.dtype = XD_DTYPE_I64;
    ratios_refuse(ctx, &d, XD_ERROR_DTYPE, "logits is I64");
    d = good, d.workspace = memory, d.workspace_bytes = sizeof memory;
    ratios_refuse(ctx, &d, XD_ERROR_ARGUMENT, "workspace has 64 bytes");
    CHECK_EQ_INT(xdi_fdistill_weights(ctx, &good, NULL), XD_ERROR_ARGUMENT);
    CHECK_NEAR(r.bins[1], 2.0, 0.0);
    r.logits[0] = NAN; /* without a status */
    CHECK_EQ_INT(xdi_fdistill_weights(ctx, &good, r.weights), XD_ERROR_DATA);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
