/* The terms that a discriminator judges, by features of the teacher. */

#include "base/internal.h"
#include "dmd/state.h"

#include <string.h>

static xd_rows xdi_dmd_logits(const xd_dmd *d, const float *data, int64_t samples) {
    const int64_t heads = d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    return xd_rows_of(data, XD_DTYPE_F32, samples, heads);
}

/* A pass of the discriminator over the features of a slot. */
static xd_network_call xdi_dmd_judging(const xd_dmd *d, const xd_dmd_batch *batch, int slot) {
    xd_network_call call;
    memset(&call, 0, sizeof call);
    call.slot = slot;
    call.samples = batch->samples;
    call.condition = batch->condition;
    call.features = d->features[slot].values;
    call.raw_gradient = d->features[slot].logit_gradients;
    return call;
}

/* Features of the teacher at samples and times. */
static xd_result xdi_dmd_look(xd_dmd *d, const xd_dmd_batch *batch, int slot, const void *x,
                              const xdi_dmd_times *times) {
    const xdi_dmd_point at = { x, times };
    xd_network_call call = xdi_dmd_call(batch, at, d->tensors.prediction);
    call.slot = slot;
    call.features = d->features[slot].values;
    return xdi_dmd_forward(d, XD_DMD_TEACHER, &call);
}

static xd_result xdi_dmd_judge(xd_dmd *d, const xd_dmd_batch *batch, int slot, bool keep) {
    xd_network_call call = xdi_dmd_judging(d, batch, slot);
    call.keep = keep;
    call.raw = d->features[slot].logits;
    call.raw_gradient = NULL;
    return xdi_dmd_forward(d, XD_DMD_DISCRIMINATOR, &call);
}

static xd_result xdi_dmd_adversarial_loss(xd_dmd *d, xd_gan_desc *desc, double weight, double *value) {
    double weighted = 0.0;
    desc->common = xdi_dmd_common(d, d->desc.networks[XD_DMD_DISCRIMINATOR].heads);
    desc->common.weight = weight;
    desc->kind = d->desc.gan.kind;
    XD_TRY(xd_gan_loss(d->ctx, desc, d->results.value));
    XD_TRY(xdi_dmd_add_value(d, value ? &weighted : NULL));
    if (value) *value += weighted / weight;
    return XD_OK;
}

/* ---- in the student's loss ---- */

XD_PRIVATE xd_result xdi_dmd_generator(xd_dmd *d, const xd_dmd_batch *batch, double *value) {
    const xdi_dmd_features *fake = &d->features[XDI_DMD_SLOT_FAKE];
    const xdi_dmd_point at = { d->tensors.noised, &d->noised };
    const xd_rows slope = xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.generated, batch->samples);
    xd_network_call call;
    xd_gan_desc desc = xd_gan_defaults();
    desc.fake = xdi_dmd_logits(d, fake->logits, batch->samples);
    desc.fake_gradient = xdi_dmd_logits(d, fake->logit_gradients, batch->samples);
    XD_TRY(xdi_dmd_judge(d, batch, XDI_DMD_SLOT_FAKE, true));
    XD_TRY(xdi_dmd_adversarial_loss(d, &desc, d->desc.gan.weight, value));
    call = xdi_dmd_judging(d, batch, XDI_DMD_SLOT_FAKE);
    call.input_gradients = d->gradients.features;
    XD_TRY(xdi_dmd_backward(d, XD_DMD_DISCRIMINATOR, &call));
    call = xdi_dmd_call(batch, at, NULL);
    call.slot = XDI_DMD_SLOT_FAKE;
    call.feature_gradients = (const float *const *)d->gradients.features;
    call.hidden_gradient = d->gradients.noised;
    XD_TRY(xdi_dmd_backward(d, XD_DMD_TEACHER, &call));
    for (int64_t i = 0; i < batch->samples; i++) { /* x_t = alpha x + sigma eps */
        XD_TRY(xd_noise_mix(d->ctx, &d->desc.schedule, d->noised.exact[i], &d->factors.host_mixes[i]));
        d->factors.host_mixes[i].c1 = d->factors.host_mixes[i].c0;
        d->factors.host_mixes[i].c0 = 1.0;
    }
    return xdi_dmd_mix(d, slope, xdi_dmd_gradient_rows(&d->desc.sizes, d->gradients.noised, batch->samples),
                       slope);
}

/* ---- what f-distill weighs by ---- */

/* Logits and times of slot FAKE become those of a micro-batch. */
static xd_result xdi_dmd_add_ratios(xd_dmd *d, int64_t micro_batch, int64_t samples) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const int64_t heads = d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    xdi_dmd_ratios *r = &d->ratios;
    if (samples > 0) {
        XD_TRY(xd_ctx_kernels(d->ctx)->memory.copy(
            &launch, r->logits + r->rows * heads, d->features[XDI_DMD_SLOT_FAKE].logits,
            (size_t)(samples * heads) * sizeof *r->logits, XD_COPY_ON_DEVICE));
        XD_TRY(xdi_dmd_send(d->ctx, r->times + r->rows, d->noised.exact, (size_t)samples * sizeof *r->times));
    }
    r->first[micro_batch] = r->rows;
    r->samples[micro_batch] = samples;
    r->rows += samples;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_collect_ratios(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch) {
    XD_TRY(xdi_dmd_check_on(dmd));
    XD_TRY(xdi_dmd_check_batch(dmd, micro_batch, batch, dmd->desc.sizes.step_samples));
    if (dmd->ratios.weighed || dmd->ratios.first[micro_batch] >= 0) xdi_dmd_forget_ratios(dmd);
    dmd->noised_micro_batch = -1;
    XD_TRY(xdi_dmd_generate(dmd, XD_DMD_STUDENT, batch, false));
    XD_TRY(xdi_dmd_noise(dmd, XD_DMD_STUDENT, batch));
    XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_FAKE, dmd->tensors.noised, &dmd->noised));
    XD_TRY(xdi_dmd_judge(dmd, batch, XDI_DMD_SLOT_FAKE, false));
    return xdi_dmd_add_ratios(dmd, micro_batch, batch->samples);
}

/* ---- the discriminator's own ---- */

static xdi_dmd_where xdi_dmd_of_real(const xd_dmd_batch *batch, int stream) {
    xdi_dmd_where where;
    where.role = XD_DMD_DISCRIMINATOR;
    where.stream = (uint8_t)stream;
    where.first = batch->first;
    where.samples = batch->samples;
    return where;
}

/* `real` = real samples with noise at d->real. */
static xd_result xdi_dmd_noised_real(xd_dmd *d, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    const void *noise = d->desc.gan.same_noise ? d->tensors.epsilon : d->tensors.scratch;
    if (d->desc.gan.same_noise) {
        for (int64_t i = 0; i < n; i++) xdi_dmd_set_time(&d->desc, &d->real, i, d->noised.exact[i]);
    } else {
        XD_TRY(xdi_dmd_draw_times(d, xdi_dmd_of_real(batch, XD_STREAM_TIME_REAL), &d->desc.fake_times,
                                  &d->real));
        XD_TRY(xdi_dmd_normals(d, xdi_dmd_of_real(batch, XD_STREAM_EPSILON_REAL), d->tensors.scratch));
    }
    return xdi_dmd_add_noise(d, &d->real, xdi_dmd_rows(&d->desc.sizes, batch->real, n),
                             xdi_dmd_rows(&d->desc.sizes, noise, n),
                             xdi_dmd_rows(&d->desc.sizes, d->tensors.real, n));
}

/* out = the same samples, perturbed. */
static xd_result xdi_dmd_perturb(xd_dmd *d, const xd_dmd_batch *batch, void *out) {
    const int64_t n = batch->samples;
    const xd_rows real = xdi_dmd_rows(&d->desc.sizes, d->tensors.real, n);
    const xd_rows perturbed = xdi_dmd_rows(&d->desc.sizes, out, n); /* first the normals */
    XD_TRY(xdi_dmd_normals(d, xdi_dmd_of_real(batch, XD_STREAM_R1), out));
    for (int64_t i = 0; i < n; i++)
        d->factors.host_mixes[i].c0 = 1.0, d->factors.host_mixes[i].c1 = d->desc.gan.r1_alpha;
    return xdi_dmd_mix(d, d->desc.gan.r1_on_clean ? xdi_dmd_rows(&d->desc.sizes, batch->real, n) : real,
                       perturbed, perturbed);
}

/* The penalty's gradient joins that of the logits of real samples. */
static xd_result xdi_dmd_penalise(xd_dmd *d, int64_t samples, double *value) {
    const xdi_dmd_features *real = &d->features[XDI_DMD_SLOT_REAL],
                           *other = &d->features[XDI_DMD_SLOT_PERTURBED];
    const xd_rows slopes = xdi_dmd_logits(d, real->logit_gradients, samples),
                  penalty = xdi_dmd_logits(d, d->gradients.penalty, samples);
    xd_gan_desc desc = xd_gan_defaults();
    desc.role = XD_GAN_R1;
    desc.fake = xdi_dmd_logits(d, other->logits, samples);
    desc.real = xdi_dmd_logits(d, real->logits, samples);
    desc.fake_gradient = xdi_dmd_logits(d, other->logit_gradients, samples);
    desc.real_gradient = penalty;
    XD_TRY(xdi_dmd_adversarial_loss(d, &desc, d->desc.gan.r1_weight, value));
    for (int64_t i = 0; i < samples; i++) d->factors.host_mixes[i].c0 = d->factors.host_mixes[i].c1 = 1.0;
    return xdi_dmd_mix(d, slopes, penalty, slopes);
}

/* u, the gradient of a feature by which each real sample's logits are summed, becomes the gradient of the penalty by it:
 * weight / 2 mean |u|^2 is that of a denoising loss whose target is 0. */
static xd_result xdi_dmd_square(xd_dmd *d, int feature, int64_t samples, double *value) {
    const int64_t elements = d->desc.networks[XD_DMD_TEACHER].feature_elements[feature];
    const double weight = d->desc.gan.r1_weight;
    double weighted = 0.0;
    xd_denoise_desc desc = xd_denoise_defaults();
    desc.prediction = xd_rows_of(d->gradients.features[feature], XD_DTYPE_F32, samples, elements);
    desc.clean = desc.noise = desc.gradient = desc.prediction;
    desc.terms = d->factors.terms;
    desc.common = xdi_dmd_common(d, 1);
    desc.common.weight = 0.5 * weight;
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->results.value));
    XD_TRY(xdi_dmd_add_value(d, value ? &weighted : NULL));
    if (value) *value += weighted / weight;
    return XD_OK;
}

/* The penalty on the slope at real samples: the slope itself, then what moves the weights along it. */
static xd_result xdi_dmd_flatten(xd_dmd *d, int64_t micro_batch, const xd_dmd_batch *batch, double *value) {
    const int64_t n = batch->samples, heads = d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    xd_network_call call = xdi_dmd_judging(d, batch, XDI_DMD_SLOT_REAL);
    XD_TRY(xdi_dmd_send(d->ctx, d->gradients.penalty, d->ones, (size_t)(n * heads) * sizeof *d->ones));
    call.raw_gradient = d->gradients.penalty;
    call.input_gradients = d->gradients.features;
    XD_TRY(xdi_dmd_backward(d, XD_DMD_DISCRIMINATOR, &call));
    for (int64_t i = 0; i < n; i++) {
        d->factors.host_terms[i].prediction = d->factors.host_terms[i].weight = 1.0;
        d->factors.host_terms[i].clean = d->factors.host_terms[i].noise = 0.0;
    }
    XD_TRY(
        xdi_dmd_send(d->ctx, d->factors.terms, d->factors.host_terms, (size_t)n * sizeof *d->factors.terms));
    for (int i = 0; i < d->desc.networks[XD_DMD_TEACHER].feature_count; i++)
        XD_TRY(xdi_dmd_square(d, i, n, value));
    call = xdi_dmd_judging(d, batch, XDI_DMD_SLOT_REAL);
    call.raw_gradient = NULL;
    call.directions = (const float *const *)d->gradients.features;
    call.weights = call.more = true;
    call.micro_batch = micro_batch;
    return xdi_dmd_penalty(d, &call);
}

static xd_result xdi_dmd_judge_all(xd_dmd *d, const xd_dmd_batch *batch, xd_dmd_values *values) {
    const xdi_dmd_features *real = &d->features[XDI_DMD_SLOT_REAL], *fake = &d->features[XDI_DMD_SLOT_FAKE];
    const bool penalty = xdi_dmd_penalised(&d->desc, XD_DMD_PENALTY_DIFFERENCE);
    xd_gan_desc desc = xd_gan_defaults();
    XD_TRY(xdi_dmd_judge(d, batch, XDI_DMD_SLOT_REAL, true));
    XD_TRY(xdi_dmd_judge(d, batch, XDI_DMD_SLOT_FAKE, true));
    if (penalty) XD_TRY(xdi_dmd_judge(d, batch, XDI_DMD_SLOT_PERTURBED, true));
    desc.role = XD_GAN_DISCRIMINATOR;
    desc.fake = xdi_dmd_logits(d, fake->logits, batch->samples);
    desc.real = xdi_dmd_logits(d, real->logits, batch->samples);
    desc.fake_gradient = xdi_dmd_logits(d, fake->logit_gradients, batch->samples);
    desc.real_gradient = xdi_dmd_logits(d, real->logit_gradients, batch->samples);
    XD_TRY(xdi_dmd_adversarial_loss(d, &desc, 1.0, values ? &values->discriminator : NULL));
    return penalty ? xdi_dmd_penalise(d, batch->samples, values ? &values->r1 : NULL) : XD_OK;
}

XD_API xd_result xd_dmd_discriminator(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                      xd_dmd_values *values) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, batch);
    const bool penalty = xdi_dmd_penalised(&dmd->desc, XD_DMD_PENALTY_DIFFERENCE);
    void *perturbed = dmd->tensors.scratch;
    const int last = penalty ? XDI_DMD_SLOT_PERTURBED : XDI_DMD_SLOT_REAL;
    XD_REQUIRE(dmd->ctx, xdi_dmd_adversarial(&dmd->desc), XD_ERROR_STATE,
               "there is no discriminator to train");
    XD_TRY(xdi_dmd_check_batch(dmd, micro_batch, batch, dmd->desc.sizes.step_samples));
    XD_REQUIRE(dmd->ctx, batch->real || batch->samples == 0, XD_ERROR_ARGUMENT,
               "a discriminator needs real samples; the batch has %lld without", (long long)batch->samples);
    if (dmd->noised_micro_batch != micro_batch) {
        XD_TRY(xdi_dmd_fetch(dmd, XD_DMD_DISCRIMINATOR, micro_batch, batch));
        XD_TRY(xdi_dmd_noise(dmd, XD_DMD_DISCRIMINATOR, batch));
    }
    dmd->noised_micro_batch = -1; /* a further term of it draws again */
    XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_FAKE, dmd->tensors.noised, &dmd->noised));
    XD_TRY(xdi_dmd_noised_real(dmd, batch));
    XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_REAL, dmd->tensors.real, &dmd->real));
    if (penalty) {
        XD_TRY(xdi_dmd_perturb(dmd, batch, perturbed));
        XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_PERTURBED, perturbed, &dmd->real));
    }
    XD_TRY(xdi_dmd_judge_all(dmd, batch, values));
    if (xdi_dmd_penalised(&dmd->desc, XD_DMD_PENALTY_SLOPE))
        XD_TRY(xdi_dmd_flatten(dmd, micro_batch, batch, values ? &values->r1 : NULL));
    for (int slot = XDI_DMD_SLOT_FAKE; slot <= last; slot++) {
        xd_network_call call = xdi_dmd_judging(dmd, batch, slot);
        call.weights = true;
        call.micro_batch = micro_batch;
        call.more = slot < last;
        XD_TRY(xdi_dmd_backward(dmd, XD_DMD_DISCRIMINATOR, &call));
    }
    return XD_OK;
}
