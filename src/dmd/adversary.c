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
    call.raw_gradient = d->features[slot].slopes;
    return call;
}

/* Features of the teacher at samples and times. */
static xd_result xdi_dmd_look(xd_dmd *d, const xd_dmd_batch *batch, int slot, xdi_dmd_tensor tensor,
                              const xdi_dmd_times *times) {
    xd_network_call call = xdi_dmd_call(d, batch, d->tensors[tensor], times);
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
    XD_TRY(xd_gan_loss(d->ctx, desc, d->value));
    XD_TRY(xdi_dmd_add_value(d, value ? &weighted : NULL));
    if (value) *value += weighted / weight;
    return XD_OK;
}

/* ---- in the student's loss ---- */

XD_PRIVATE xd_result xdi_dmd_generator(xd_dmd *d, const xd_dmd_batch *batch, double *value) {
    const xdi_dmd_features *fake = &d->features[XDI_DMD_SLOT_FAKE];
    const xd_rows slope = xdi_dmd_slopes(d, d->slope, batch->samples);
    xd_network_call call;
    xd_gan_desc desc = xd_gan_defaults();
    desc.fake = xdi_dmd_logits(d, fake->logits, batch->samples);
    desc.fake_gradient = xdi_dmd_logits(d, fake->slopes, batch->samples);
    XD_TRY(xdi_dmd_judge(d, batch, XDI_DMD_SLOT_FAKE, true));
    XD_TRY(xdi_dmd_adversarial_loss(d, &desc, d->desc.gan.weight, value));
    call = xdi_dmd_judging(d, batch, XDI_DMD_SLOT_FAKE);
    call.input_gradients = d->feature_slopes;
    XD_TRY(xdi_dmd_backward(d, XD_DMD_DISCRIMINATOR, &call));
    call = xdi_dmd_call(d, batch, d->tensors[XDI_DMD_NOISED], &d->noised);
    call.slot = XDI_DMD_SLOT_FAKE;
    call.raw = NULL;
    call.feature_gradients = (const float *const *)d->feature_slopes;
    call.hidden_gradient = d->hidden_slope;
    XD_TRY(xdi_dmd_backward(d, XD_DMD_TEACHER, &call));
    for (int64_t i = 0; i < batch->samples; i++) { /* x_t = alpha x + sigma eps */
        XD_TRY(xd_noise_mix(d->ctx, &d->desc.schedule, d->noised.exact[i], &d->host_mixes[i]));
        d->host_mixes[i].c1 = d->host_mixes[i].c0;
        d->host_mixes[i].c0 = 1.0;
    }
    return xdi_dmd_mix(d, slope, xdi_dmd_slopes(d, d->hidden_slope, batch->samples), slope);
}

/* ---- what f-distill weighs by ---- */

/* Logits and times of slot FAKE become those of a leaf. */
static xd_result xdi_dmd_add_ratios(xd_dmd *d, int64_t leaf, int64_t samples) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const int64_t heads = d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    xdi_dmd_ratios *r = &d->ratios;
    if (samples > 0) {
        XD_TRY(xd_ctx_kernels(d->ctx)->memory.copy(
            &launch, r->logits + r->rows * heads, d->features[XDI_DMD_SLOT_FAKE].logits,
            (size_t)(samples * heads) * sizeof *r->logits, XD_COPY_ON_DEVICE));
        XD_TRY(xdi_dmd_send(d, r->times + r->rows, d->noised.exact, (size_t)samples * sizeof *r->times));
    }
    r->first[leaf] = r->rows;
    r->samples[leaf] = samples;
    r->rows += samples;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_dmd_collect_ratios(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch) {
    XD_TRY(xdi_dmd_check_on(dmd));
    XD_TRY(xdi_dmd_check_batch(dmd, leaf, batch, dmd->desc.sizes.step_samples));
    if (dmd->ratios.weighed || dmd->ratios.first[leaf] >= 0) xdi_dmd_forget_ratios(dmd);
    dmd->noised_leaf = -1;
    XD_TRY(xdi_dmd_generate(dmd, XD_DMD_STUDENT, batch, false));
    XD_TRY(xdi_dmd_noise(dmd, XD_DMD_STUDENT, batch));
    XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_FAKE, XDI_DMD_NOISED, &dmd->noised));
    XD_TRY(xdi_dmd_judge(dmd, batch, XDI_DMD_SLOT_FAKE, false));
    return xdi_dmd_add_ratios(dmd, leaf, batch->samples);
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

/* REAL: real samples with noise, whose times are then d->real. EPSILON is that of the real ones afterwards. */
static xd_result xdi_dmd_noised_real(xd_dmd *d, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    void *epsilon = d->tensors[XDI_DMD_EPSILON];
    if (d->desc.gan.same_noise) {
        for (int64_t i = 0; i < n; i++) xdi_dmd_set_time(d, &d->real, i, d->noised.exact[i]);
    } else {
        XD_TRY(xdi_dmd_draw_times(d, xdi_dmd_of_real(batch, XD_STREAM_TIME_REAL), &d->desc.fake_times,
                                  &d->real));
        XD_TRY(xdi_dmd_normals(d, xdi_dmd_of_real(batch, XD_STREAM_EPSILON_REAL), epsilon));
    }
    return xdi_dmd_add_noise(d, &d->real, xdi_dmd_rows(d, batch->real, n), xdi_dmd_rows(d, epsilon, n),
                             xdi_dmd_rows(d, d->tensors[XDI_DMD_REAL], n));
}

/* REAL: the same samples, perturbed. */
static xd_result xdi_dmd_perturb(xd_dmd *d, const xd_dmd_batch *batch) {
    const int64_t n = batch->samples;
    const xd_rows real = xdi_dmd_rows(d, d->tensors[XDI_DMD_REAL], n);
    void *normals = d->tensors[XDI_DMD_EPSILON];
    XD_TRY(xdi_dmd_normals(d, xdi_dmd_of_real(batch, XD_STREAM_R1), normals));
    for (int64_t i = 0; i < n; i++) d->host_mixes[i].c0 = 1.0, d->host_mixes[i].c1 = d->desc.gan.r1_alpha;
    return xdi_dmd_mix(d, d->desc.gan.r1_on_clean ? xdi_dmd_rows(d, batch->real, n) : real,
                       xdi_dmd_rows(d, normals, n), real);
}

/* The penalty's gradient joins that of the logits of real samples. */
static xd_result xdi_dmd_penalise(xd_dmd *d, int64_t samples, double *value) {
    const xdi_dmd_features *real = &d->features[XDI_DMD_SLOT_REAL],
                           *other = &d->features[XDI_DMD_SLOT_PERTURBED];
    const xd_rows slopes = xdi_dmd_logits(d, real->slopes, samples),
                  penalty = xdi_dmd_logits(d, d->penalty, samples);
    xd_gan_desc desc = xd_gan_defaults();
    desc.role = XD_GAN_R1;
    desc.fake = xdi_dmd_logits(d, other->logits, samples);
    desc.real = xdi_dmd_logits(d, real->logits, samples);
    desc.fake_gradient = xdi_dmd_logits(d, other->slopes, samples);
    desc.real_gradient = penalty;
    XD_TRY(xdi_dmd_adversarial_loss(d, &desc, d->desc.gan.r1_weight, value));
    for (int64_t i = 0; i < samples; i++) d->host_mixes[i].c0 = d->host_mixes[i].c1 = 1.0;
    return xdi_dmd_mix(d, slopes, penalty, slopes);
}

/* u, the gradient of a feature by which each real sample's logits are summed, becomes the gradient of the penalty by it:
 * weight / 2 mean |u|^2 is that of a denoising loss whose target is 0. */
static xd_result xdi_dmd_square(xd_dmd *d, int feature, int64_t samples, double *value) {
    const int64_t elements = d->desc.networks[XD_DMD_TEACHER].feature_elements[feature];
    const double weight = d->desc.gan.r1_weight;
    double weighted = 0.0;
    xd_denoise_desc desc = xd_denoise_defaults();
    desc.prediction = xd_rows_of(d->feature_slopes[feature], XD_DTYPE_F32, samples, elements);
    desc.clean = desc.noise = desc.gradient = desc.prediction;
    desc.terms = d->terms;
    desc.common = xdi_dmd_common(d, 1);
    desc.common.weight = 0.5 * weight;
    XD_TRY(xd_denoise_loss(d->ctx, &desc, d->value));
    XD_TRY(xdi_dmd_add_value(d, value ? &weighted : NULL));
    if (value) *value += weighted / weight;
    return XD_OK;
}

/* The penalty on the slope at real samples: the slope itself, then what moves the weights along it. */
static xd_result xdi_dmd_flatten(xd_dmd *d, int64_t leaf, const xd_dmd_batch *batch, double *value) {
    const int64_t n = batch->samples, heads = d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    xd_network_call call = xdi_dmd_judging(d, batch, XDI_DMD_SLOT_REAL);
    XD_TRY(xdi_dmd_send(d, d->penalty, d->ones, (size_t)(n * heads) * sizeof *d->ones));
    call.raw_gradient = d->penalty;
    call.input_gradients = d->feature_slopes;
    XD_TRY(xdi_dmd_backward(d, XD_DMD_DISCRIMINATOR, &call));
    for (int64_t i = 0; i < n; i++) {
        d->host_terms[i].prediction = d->host_terms[i].weight = 1.0;
        d->host_terms[i].clean = d->host_terms[i].noise = 0.0;
    }
    XD_TRY(xdi_dmd_send(d, d->terms, d->host_terms, (size_t)n * sizeof *d->terms));
    for (int i = 0; i < d->desc.networks[XD_DMD_TEACHER].feature_count; i++)
        XD_TRY(xdi_dmd_square(d, i, n, value));
    call = xdi_dmd_judging(d, batch, XDI_DMD_SLOT_REAL);
    call.raw_gradient = NULL;
    call.directions = (const float *const *)d->feature_slopes;
    call.weights = call.more = true;
    call.leaf = leaf;
    return xdi_dmd_bend(d, &call);
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
    desc.fake_gradient = xdi_dmd_logits(d, fake->slopes, batch->samples);
    desc.real_gradient = xdi_dmd_logits(d, real->slopes, batch->samples);
    XD_TRY(xdi_dmd_adversarial_loss(d, &desc, 1.0, values ? &values->discriminator : NULL));
    return penalty ? xdi_dmd_penalise(d, batch->samples, values ? &values->r1 : NULL) : XD_OK;
}

XD_API xd_result xd_dmd_discriminator(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch,
                                      xd_dmd_values *values) {
    XDI_GIVEN_OF(dmd, batch);
    const bool penalty = xdi_dmd_penalised(&dmd->desc, XD_DMD_PENALTY_DIFFERENCE);
    const int last = penalty ? XDI_DMD_SLOT_PERTURBED : XDI_DMD_SLOT_REAL;
    XD_REQUIRE(dmd->ctx, xdi_dmd_adversarial(&dmd->desc), XD_ERROR_STATE,
               "there is no discriminator to train");
    XD_TRY(xdi_dmd_check_batch(dmd, leaf, batch, dmd->desc.sizes.step_samples));
    XD_REQUIRE(dmd->ctx, batch->real || batch->samples == 0, XD_ERROR_ARGUMENT,
               "a discriminator needs real samples; the batch has %lld without", (long long)batch->samples);
    if (dmd->noised_leaf != leaf) {
        XD_TRY(xdi_dmd_fetch(dmd, XD_DMD_DISCRIMINATOR, leaf, batch));
        XD_TRY(xdi_dmd_noise(dmd, XD_DMD_DISCRIMINATOR, batch));
    }
    dmd->noised_leaf = -1; /* EPSILON and REAL are used for the real samples below */
    XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_FAKE, XDI_DMD_NOISED, &dmd->noised));
    XD_TRY(xdi_dmd_noised_real(dmd, batch));
    XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_REAL, XDI_DMD_REAL, &dmd->real));
    if (penalty) {
        XD_TRY(xdi_dmd_perturb(dmd, batch));
        XD_TRY(xdi_dmd_look(dmd, batch, XDI_DMD_SLOT_PERTURBED, XDI_DMD_REAL, &dmd->real));
    }
    XD_TRY(xdi_dmd_judge_all(dmd, batch, values));
    if (xdi_dmd_penalised(&dmd->desc, XD_DMD_PENALTY_SLOPE))
        XD_TRY(xdi_dmd_flatten(dmd, leaf, batch, values ? &values->r1 : NULL));
    for (int slot = XDI_DMD_SLOT_FAKE; slot <= last; slot++) {
        xd_network_call call = xdi_dmd_judging(dmd, batch, slot);
        call.weights = true;
        call.leaf = leaf;
        call.more = slot < last;
        XD_TRY(xdi_dmd_backward(dmd, XD_DMD_DISCRIMINATOR, &call));
    }
    return XD_OK;
}
