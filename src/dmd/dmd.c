/* The object of a distillation: defaults, checks and memory. */

#include "base/internal.h"
#include "dmd/fdistill.h"
#include "dmd/internal.h"
#include "dmd/losses.h"
#include "dmd/state.h"
#include "model/parallel_internal.h"

#include <math.h>
#include <string.h>

/* ---- settings ---- */

/* With a rung drawn for each step the fake score would follow a mixture, which can be right while no rung is. */
enum { XDI_DMD_HOLD = 8 };

XD_API xd_dmd_desc xd_dmd_defaults(xd_dmd_recipe recipe) {
    const xdi_fdistill_desc ratios = xdi_fdistill_defaults();
    const bool free_of_data = recipe == XD_DMD_DATA_FREE;
    xd_dmd_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.schedule = xd_noise_defaults(XD_NOISE_FLOW);
    desc.student_times = xd_times_defaults(recipe);
    if (recipe == XD_DMD_FASTGEN) xdi_times_narrow(&desc.student_times, &desc.schedule);
    desc.fake_times = desc.student_times;
    if (recipe == XD_DMD_ORIGINAL)
        desc.fake_times.first = 0, desc.fake_times.last = desc.fake_times.count - 1;
    desc.sizes.dtype = XD_DTYPE_F32;
    desc.rungs.steps = 1;
    desc.rungs.fresh_noise = recipe == XD_DMD_FASTGEN || free_of_data;
    desc.rungs.hold = free_of_data ? XDI_DMD_HOLD : 0;
    desc.guidance_scale = 1.0;
    desc.normaliser = recipe == XD_DMD_ORIGINAL ? XD_VSD_ORIGINAL : XD_VSD_MEAN;
    desc.fake_loss.space = recipe == XD_DMD_MODELOPT   ? XD_PREDICT_X0
                           : recipe == XD_DMD_ORIGINAL ? XD_PREDICT_EPS
                                                       : XD_PREDICT_FLOW;
    desc.gan.weight = recipe == XD_DMD_FASTGEN ? 0.001 : 0.03;
    desc.gan.r1_alpha = 0.1;
    desc.gan.fdistill.lower = ratios.lower; /* when it is switched on */
    desc.gan.fdistill.upper = ratios.upper;
    desc.gan.fdistill.bins = ratios.bins;
    desc.alternation = free_of_data ? XD_DMD_MODELOPT : recipe;
    desc.frequency = 5;
    desc.own_samples = recipe == XD_DMD_ORIGINAL || free_of_data;
    return desc;
}

/* The student's first step. */
static int64_t xdi_dmd_first_student_step(const xd_dmd_desc *desc) {
    return desc->lead + (desc->alternation == XD_DMD_FASTGEN ? desc->frequency - 1 : 0);
}

XD_API bool xd_dmd_trains(const xd_dmd_desc *desc, xd_dmd_role role, int64_t step) {
    const int64_t f = desc->frequency, first = xdi_dmd_first_student_step(desc);
    const bool student = f > 0 && step >= first && (step - first) % f == 0;
    if (role == XD_DMD_STUDENT) return student;
    if (role == XD_DMD_TEACHER || (role == XD_DMD_DISCRIMINATOR && !xdi_dmd_adversarial(desc))) return false;
    return step >= 0 && (desc->alternation == XD_DMD_ORIGINAL || !student);
}

/* Whether arrays of so many numbers for each sample, and sums of several such arrays, have sizes. */
static bool xdi_dmd_fits(int64_t samples, int64_t numbers) {
    return numbers >= 0 && numbers <= INT64_MAX / 4096 / samples;
}

static xd_result xdi_dmd_check_sizes(xd_ctx *ctx, const xd_dmd_sizes *sizes) {
    const int64_t whole = xdi_dmd_whole(sizes);
    XD_REQUIRE(
        ctx,
        sizes->samples > 0 && sizes->step_samples > 0 && sizes->samples <= INT32_MAX &&
            sizes->step_samples <= UINT32_MAX,
        XD_ERROR_ARGUMENT,
        "micro-batches of %lld samples, steps of %lld: sizes.samples and sizes.step_samples are at least 1",
        (long long)sizes->samples, (long long)sizes->step_samples);
    XD_REQUIRE(ctx,
               sizes->elements >= 0 && whole > 0 && sizes->first_element >= 0 &&
                   sizes->first_element <= whole - sizes->elements,
               XD_ERROR_ARGUMENT, "elements %lld to %lld of samples of %lld%s",
               (long long)sizes->first_element, (long long)(sizes->first_element + sizes->elements - 1),
               (long long)whole, whole > 0 ? "" : ": sizes.elements is 0");
    XD_REQUIRE(ctx, xdi_dmd_fits(sizes->samples, sizes->elements), XD_ERROR_ARGUMENT,
               "%lld samples of %lld elements", (long long)sizes->samples, (long long)sizes->elements);
    XD_REQUIRE(ctx,
               sizes->dtype == XD_DTYPE_F32 || sizes->dtype == XD_DTYPE_BF16 || sizes->dtype == XD_DTYPE_F16,
               XD_ERROR_DTYPE, "samples of %s; F32, BF16 and F16 are possible", xd_dtype_name(sizes->dtype));
    return XD_OK;
}

/* What a discriminator says that it reads is what there is. */
static xd_result xdi_dmd_check_features(xd_ctx *ctx, const xd_network *teacher, const xd_network *judge) {
    if (judge->feature_count == 0) return XD_OK;
    XD_REQUIRE(ctx, judge->feature_count == teacher->feature_count && judge->feature_elements,
               XD_ERROR_ARGUMENT, "the discriminator reads %d features, the teacher gives %d",
               judge->feature_count, teacher->feature_count);
    for (int i = 0; i < judge->feature_count; i++)
        XD_REQUIRE(ctx, judge->feature_elements[i] == teacher->feature_elements[i], XD_ERROR_ARGUMENT,
                   "the discriminator reads %lld elements of feature %d, the teacher gives %lld",
                   (long long)judge->feature_elements[i], i, (long long)teacher->feature_elements[i]);
    return XD_OK;
}

static xd_result xdi_dmd_check_networks(xd_ctx *ctx, const xd_dmd_desc *desc) {
    const xd_network *teacher = &desc->networks[XD_DMD_TEACHER], *fake = &desc->networks[XD_DMD_FAKE_SCORE];
    const bool adversarial = xdi_dmd_adversarial(desc);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        const xd_network *network = &desc->networks[role];
        if (role == XD_DMD_DISCRIMINATOR && !adversarial) continue;
        XD_REQUIRE(ctx, network->forward, XD_ERROR_ARGUMENT, "the %s has no forward",
                   xdi_dmd_role_name((xd_dmd_role)role));
        XD_REQUIRE(ctx, network->backward || (role == XD_DMD_TEACHER && !adversarial), XD_ERROR_ARGUMENT,
                   "the %s has no backward", xdi_dmd_role_name((xd_dmd_role)role));
        if (role == XD_DMD_DISCRIMINATOR) continue;
        XD_TRY(xdi_prediction_check(ctx, &desc->schedule, network->predicts, desc->v_is_flow));
    }
    XD_REQUIRE(ctx,
               fake->user != teacher->user || fake->forward != teacher->forward || !fake->user ||
                   desc->allow_shared,
               XD_ERROR_STATE,
               "teacher and fake score are one network, which trains: say allow_shared if that is meant");
    if (!adversarial) return XD_OK;
    XD_REQUIRE(ctx,
               desc->networks[XD_DMD_DISCRIMINATOR].heads > 0 &&
                   xdi_dmd_fits(desc->sizes.samples, desc->networks[XD_DMD_DISCRIMINATOR].heads),
               XD_ERROR_ARGUMENT, "a discriminator of %lld heads",
               (long long)desc->networks[XD_DMD_DISCRIMINATOR].heads);
    XD_REQUIRE(ctx, teacher->feature_count > 0 && teacher->feature_elements, XD_ERROR_ARGUMENT,
               "a discriminator, and a teacher with %d features", teacher->feature_count);
    for (int i = 0; i < teacher->feature_count; i++)
        XD_REQUIRE(ctx, xdi_dmd_fits(desc->sizes.samples, teacher->feature_elements[i]), XD_ERROR_ARGUMENT,
                   "feature %d has %lld elements", i, (long long)teacher->feature_elements[i]);
    return xdi_dmd_check_features(ctx, teacher, &desc->networks[XD_DMD_DISCRIMINATOR]);
}

static xd_result xdi_dmd_check_gan(xd_ctx *ctx, const xd_dmd_desc *desc) {
    const xd_dmd_gan *gan = &desc->gan;
    XD_REQUIRE(ctx, gan->r1_weight >= 0.0 && isfinite(gan->r1_weight), XD_ERROR_ARGUMENT, "r1_weight %g",
               gan->r1_weight);
    XD_REQUIRE(ctx, gan->r1_weight == 0.0 || xdi_dmd_adversarial(desc), XD_ERROR_ARGUMENT,
               "r1_weight %g without a discriminator", gan->r1_weight);
    XD_REQUIRE(ctx, !gan->fdistill.on || xdi_dmd_adversarial(desc), XD_ERROR_ARGUMENT,
               "f-distill with %d bins without a discriminator", gan->fdistill.bins);
    if (!xdi_dmd_adversarial(desc)) return XD_OK;
    XD_REQUIRE(ctx, gan->weight > 0.0 && isfinite(gan->weight), XD_ERROR_ARGUMENT,
               "a discriminator with weight %g", gan->weight);
    XD_REQUIRE(ctx, gan->penalty >= XD_DMD_PENALTY_DIFFERENCE && gan->penalty <= XD_DMD_PENALTY_SLOPE,
               XD_ERROR_ARGUMENT, "penalty %d is unknown", (int)gan->penalty);
    XD_REQUIRE(ctx,
               isfinite(gan->r1_alpha) &&
                   (gan->r1_alpha > 0.0 || !xdi_dmd_penalised(desc, XD_DMD_PENALTY_DIFFERENCE)),
               XD_ERROR_ARGUMENT, "r1_alpha %g", gan->r1_alpha);
    XD_REQUIRE(ctx,
               !xdi_dmd_penalised(desc, XD_DMD_PENALTY_SLOPE) || desc->networks[XD_DMD_DISCRIMINATOR].penalty,
               XD_ERROR_ARGUMENT, "r1_weight %g of the slope, and a discriminator without a penalty",
               gan->r1_weight);
    return XD_OK;
}

static xd_result xdi_dmd_check_numbers(xd_ctx *ctx, const xd_dmd_desc *desc) {
    const int64_t min = desc->alternation == XD_DMD_ORIGINAL ? 1 : 2;
    XD_REQUIRE(ctx, desc->alternation >= XD_DMD_MODELOPT && desc->alternation <= XD_DMD_ORIGINAL,
               XD_ERROR_ARGUMENT, "alternation %d", (int)desc->alternation);
    XD_REQUIRE(ctx, desc->frequency >= min, XD_ERROR_ARGUMENT,
               "frequency %lld, at least %lld: the fake score would never train", (long long)desc->frequency,
               (long long)min);
    XD_REQUIRE(ctx, desc->lead >= 0 && desc->lead <= UINT32_MAX && desc->frequency <= UINT32_MAX,
               XD_ERROR_ARGUMENT, "%lld steps before the student's first, and then every %lld",
               (long long)desc->lead, (long long)desc->frequency);
    XD_REQUIRE(ctx, desc->student_times.chunk == 0 && desc->fake_times.chunk == 0, XD_ERROR_ARGUMENT,
               "times of chunks of %lld and %lld frames, but a sample has one time",
               (long long)desc->student_times.chunk, (long long)desc->fake_times.chunk);
    XD_REQUIRE(ctx, !desc->guided || isfinite(desc->guidance_scale), XD_ERROR_ARGUMENT, "guidance by %g",
               desc->guidance_scale);
    XD_REQUIRE(ctx, desc->network_scale >= 0.0 && isfinite(desc->network_scale), XD_ERROR_ARGUMENT,
               "times for networks, times %g", desc->network_scale);
    XD_REQUIRE(ctx,
               !isnan(xdi_noise_network_time(0.5, desc->network_scale,
                                             desc->network_dtype ? desc->network_dtype : XD_DTYPE_F32)),
               XD_ERROR_DTYPE, "times for networks as %s", xd_dtype_name(desc->network_dtype));
    return XD_OK;
}

static xd_result xdi_dmd_check_guidances(xd_ctx *ctx, const xd_dmd_desc *desc) {
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        const xd_guidance *g = &desc->networks[role].guidance;
        const bool guided = role == XD_DMD_TEACHER ? desc->guided : g->on;
        XD_REQUIRE(ctx, !g->on || role == XD_DMD_FAKE_SCORE, XD_ERROR_ARGUMENT,
                   "guidance of the %s by %g; %s", xdi_dmd_role_name((xd_dmd_role)role), g->scale,
                   role == XD_DMD_TEACHER ? "the teacher's is xd_dmd_desc.guided" : "it has none");
        XD_REQUIRE(ctx, !g->on || isfinite(g->scale), XD_ERROR_ARGUMENT, "guidance of the %s by %g",
                   xdi_dmd_role_name((xd_dmd_role)role), g->scale);
        XD_REQUIRE(ctx, g->rescale >= 0.0 && g->rescale <= 1.0, XD_ERROR_ARGUMENT,
                   "guidance of the %s with rescale %g, which is outside [0, 1]",
                   xdi_dmd_role_name((xd_dmd_role)role), g->rescale);
        XD_REQUIRE(ctx, guided || g->rescale == 0.0, XD_ERROR_ARGUMENT,
                   "rescale %g of the %s, which has no guidance", g->rescale,
                   xdi_dmd_role_name((xd_dmd_role)role));
    }
    return XD_OK;
}

static xd_result xdi_dmd_check_rungs(xd_ctx *ctx, const xd_dmd_desc *desc) {
    const xd_dmd_rungs *rungs = &desc->rungs;
    const int substeps = desc->regression.substeps;
    XD_REQUIRE(ctx, rungs->steps >= 1, XD_ERROR_ARGUMENT, "a student of %d steps", rungs->steps);
    XD_REQUIRE(ctx, rungs->steps > 1 || !rungs->roll_out, XD_ERROR_ARGUMENT,
               "roll-outs of a student of %d step", rungs->steps);
    XD_REQUIRE(ctx, rungs->deal >= XD_DMD_ONE_RUNG && rungs->deal <= XD_DMD_RUNGS_IN_TURN, XD_ERROR_ARGUMENT,
               "rungs dealt in manner %d", (int)rungs->deal);
    XD_REQUIRE(ctx, rungs->roll_out || rungs->deal == XD_DMD_ONE_RUNG, XD_ERROR_ARGUMENT,
               "%d rungs in turn without roll-outs", rungs->steps);
    XD_REQUIRE(ctx, rungs->hold >= 0, XD_ERROR_ARGUMENT, "%lld steps at a rung", (long long)rungs->hold);
    XD_REQUIRE(ctx, rungs->hold == 0 || rungs->deal == XD_DMD_ONE_RUNG, XD_ERROR_ARGUMENT,
               "%lld steps at a rung, and rungs in turn", (long long)rungs->hold);
    XD_REQUIRE(ctx, rungs->hold == 0 || !desc->draws || !desc->draws->rungs, XD_ERROR_ARGUMENT,
               "%lld steps at a rung, and draws.rungs", (long long)rungs->hold);
    XD_REQUIRE(ctx, rungs->steps <= XDI_DMD_FRESH_STEPS || !rungs->fresh_noise || !rungs->roll_out,
               XD_ERROR_ARGUMENT, "new noise between %d rungs; there are numbers for %d", rungs->steps,
               XDI_DMD_FRESH_STEPS);
    XD_REQUIRE(ctx, rungs->list, XD_ERROR_ARGUMENT, "a student of %d steps without a list of times",
               rungs->steps);
    XD_TRY(xdi_noise_check_steps(ctx, &desc->schedule, rungs->steps, rungs->list, rungs->steps + 1));
    if (desc->student_times.dtype == XD_DTYPE_F32)
        XD_TRY(xdi_noise_check_list_f32(ctx, rungs->list, (int64_t)rungs->steps + 1));
    XD_REQUIRE(ctx, substeps >= 0 && substeps < INT32_MAX, XD_ERROR_ARGUMENT, "warm-up by %d steps a rung",
               substeps);
    XD_REQUIRE(ctx, desc->regression.step_samples >= 0 && desc->regression.step_samples <= UINT32_MAX,
               XD_ERROR_ARGUMENT, "warm-up by %lld noises a step", (long long)desc->regression.step_samples);
    return XD_OK;
}

static xd_result xdi_dmd_check_trainers(xd_ctx *ctx, const xd_dmd_desc *desc) {
    const xd_parallel *first = desc->trainers[XD_DMD_STUDENT].parallel;
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        const xd_dmd_trainer *trainer = &desc->trainers[role];
        XD_REQUIRE(ctx, isfinite(trainer->max_norm) && trainer->max_norm >= 0.0, XD_ERROR_ARGUMENT,
                   "the %s's norm at most %g", xdi_dmd_role_name((xd_dmd_role)role), trainer->max_norm);
        XD_REQUIRE(ctx, trainer->average_count >= 0 && (trainer->averages || !trainer->average_count),
                   XD_ERROR_ARGUMENT, "the %s has %d averages", xdi_dmd_role_name((xd_dmd_role)role),
                   trainer->average_count);
        if (!first || !trainer->parallel) continue;
        const xd_parallel_micro_batch_count a = xd_parallel_micro_batches(first),
                                            b = xd_parallel_micro_batches(trainer->parallel);
        XD_REQUIRE(ctx, a.own == b.own && a.total == b.total, XD_ERROR_ARGUMENT,
                   "the student has %lld of %lld micro-batches here, the %s %lld of %lld", (long long)a.own,
                   (long long)a.total, xdi_dmd_role_name((xd_dmd_role)role), (long long)b.own,
                   (long long)b.total);
        for (int64_t k = 0; k < a.own; k++)
            XD_REQUIRE(ctx,
                       xd_parallel_micro_batch(first, k) == xd_parallel_micro_batch(trainer->parallel, k),
                       XD_ERROR_ARGUMENT,
                       "micro-batch %lld here is number %lld for the student and %lld for the %s: FSDP deals "
                       "them as DDP does with accumulate_whole",
                       (long long)k, (long long)xd_parallel_micro_batch(first, k),
                       (long long)xd_parallel_micro_batch(trainer->parallel, k),
                       xdi_dmd_role_name((xd_dmd_role)role));
    }
    return XD_OK;
}

static bool xdi_dmd_steps(const xd_optimizer_desc *steps, const xd_param *param) {
    for (int64_t k = 0; k < steps->param_count; k++)
        if (steps->params[k].value == param->value) return true;
    return false;
}

/* An optimizer over another list would leave the role as it is. It may leave out some of its weights, but not all that are here. */
static xd_result xdi_dmd_check_optimizer(xd_ctx *ctx, const xd_dmd_trainer *trainer, xd_dmd_role role) {
    const xd_model *model = trainer->parallel->place.model;
    const xd_optimizer_desc *steps = xd_optimizer_settings(trainer->optimizer);
    const char *first = NULL;
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *w = model->weights[i];
        if (!xdi_weight_is_listed(w)) continue;
        const xd_param param = xdi_weight_kept_param(w);
        if (param.buffer || param.frozen || param.count == 0) continue;
        if (xdi_dmd_steps(steps, &param)) return XD_OK;
        if (!first) first = param.name;
    }
    XD_REQUIRE(ctx, !first, XD_ERROR_ARGUMENT,
               "the %s's optimizer has %lld parameters, none of its wrapper's, of which the first is \"%s\"",
               xdi_dmd_role_name(role), (long long)steps->param_count, first);
    return XD_OK;
}

/* What two roles may not have in common, and what belongs together in one. */
static xd_result xdi_dmd_check_roles(xd_ctx *ctx, const xd_dmd_desc *desc) {
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        const xd_dmd_trainer *trainer = &desc->trainers[role];
        for (int other = 0; other < role; other++)
            XD_REQUIRE(ctx, !trainer->parallel || trainer->parallel != desc->trainers[other].parallel,
                       XD_ERROR_STATE, "%s and %s have one wrapper, of which each would step the gradients",
                       xdi_dmd_role_name((xd_dmd_role)other), xdi_dmd_role_name((xd_dmd_role)role));
        if (trainer->parallel && trainer->optimizer)
            XD_TRY(xdi_dmd_check_optimizer(ctx, trainer, (xd_dmd_role)role));
    }
    return XD_OK;
}

static xd_result xdi_dmd_check(xd_ctx *ctx, const xd_dmd_desc *desc) {
    XD_TRY(xdi_noise_check(ctx, &desc->schedule));
    XD_TRY(xdi_times_check(ctx, &desc->student_times, &desc->schedule));
    XD_TRY(xdi_times_check(ctx, &desc->fake_times, &desc->schedule));
    XD_TRY(xdi_dmd_check_sizes(ctx, &desc->sizes));
    XD_TRY(xdi_dmd_check_networks(ctx, desc));
    XD_TRY(xdi_dmd_check_numbers(ctx, desc));
    XD_TRY(xdi_dmd_check_guidances(ctx, desc));
    XD_TRY(xdi_dmd_check_rungs(ctx, desc));
    XD_TRY(xdi_dmd_check_gan(ctx, desc));
    XD_TRY(xdi_dmd_check_fdistill(ctx, desc));
    XD_TRY(xdi_dmd_check_trainers(ctx, desc));
    return xdi_dmd_check_roles(ctx, desc);
}

XD_PRIVATE xd_result xdi_dmd_agree(const xd_dmd_desc *desc, xd_result result) {
    if (desc->sizes.split) result = xd_agree(desc->sizes.split, result);
    return desc->data ? xd_agree(desc->data, result) : result;
}

/* ---- memory ---- */

static size_t xdi_dmd_max(size_t a, size_t b) {
    return a > b ? a : b;
}

/* The largest workspace that any of the losses takes for a full batch. */
static size_t xdi_dmd_workspace(const xd_dmd *d) {
    const int64_t n = d->desc.sizes.samples;
    size_t max;
    xd_vsd_desc vsd = xd_vsd_defaults();
    xd_denoise_desc denoise = xd_denoise_defaults();
    xd_gan_desc gan = xd_gan_defaults();
    vsd.generated = vsd.teacher = vsd.fake =
        xdi_dmd_rows(&d->desc.sizes, d, n); /* any address: nothing is read */
    vsd.gradient = xdi_dmd_gradient_rows(&d->desc.sizes, NULL, n);
    vsd.common.split = d->desc.sizes.split;
    denoise.prediction = denoise.clean = denoise.noise = vsd.generated;
    denoise.terms = (const xd_denoise_term *)d;
    denoise.common.split = d->desc.sizes.split;
    max = xdi_dmd_max(xdi_vsd_workspace(d->ctx, &vsd), xdi_denoise_workspace(d->ctx, &denoise));
    if (!xdi_dmd_adversarial(&d->desc)) return max;
    gan.fake = xd_rows_of(d, XD_DTYPE_F32, n, d->desc.networks[XD_DMD_DISCRIMINATOR].heads);
    gan.real = gan.fake;
    gan.role = XD_GAN_DISCRIMINATOR;
    max = xdi_dmd_max(max, xdi_dmd_ratios_workspace(d));
    max = xdi_dmd_max(max, xdi_gan_workspace(d->ctx, &gan));
    const xd_network *teacher = &d->desc.networks[XD_DMD_TEACHER];
    for (int i = 0; i < teacher->feature_count && xdi_dmd_penalised(&d->desc, XD_DMD_PENALTY_SLOPE); i++) {
        denoise.prediction = xd_rows_of(d, XD_DTYPE_F32, n, teacher->feature_elements[i]);
        denoise.clean = denoise.noise = denoise.prediction;
        denoise.common.split = NULL;
        max = xdi_dmd_max(max, xdi_denoise_workspace(d->ctx, &denoise));
    }
    return max;
}

static float *xdi_dmd_floats(xd_arena *arena, int64_t count) {
    return (float *)xd_arena_take_pointer(arena, (size_t)count * sizeof(float));
}

/* What a discriminator needs. */
static void xdi_dmd_lay_out_features(xd_dmd *d, xd_arena *host, xd_arena *device) {
    const xd_network *teacher = &d->desc.networks[XD_DMD_TEACHER];
    const int64_t n = d->desc.sizes.samples, logits = n * d->desc.networks[XD_DMD_DISCRIMINATOR].heads;
    const bool perturbed = xdi_dmd_penalised(&d->desc, XD_DMD_PENALTY_DIFFERENCE);
    const int slots = perturbed ? XDI_DMD_SLOTS : XDI_DMD_SLOT_PERTURBED;
    const size_t pointers = (size_t)teacher->feature_count * sizeof(float *);
    float **slopes = (float **)xd_arena_take_pointer(host, pointers);
    for (int slot = 0; slot < slots; slot++) {
        xdi_dmd_features *f = &d->features[slot];
        f->values = (float **)xd_arena_take_pointer(host, pointers);
        f->logits = xdi_dmd_floats(device, logits);
        f->logit_gradients = xdi_dmd_floats(device, logits);
        for (int i = 0; i < teacher->feature_count; i++) {
            float *values = xdi_dmd_floats(device, n * teacher->feature_elements[i]);
            if (f->values) f->values[i] = values;
        }
    }
    d->gradients.penalty = xdi_dmd_floats(device, logits);
    if (xdi_dmd_penalised(&d->desc, XD_DMD_PENALTY_SLOPE)) d->ones = xdi_dmd_floats(host, logits);
    d->gradients.features = slopes;
    for (int i = 0; i < teacher->feature_count; i++) {
        float *values = xdi_dmd_floats(device, n * teacher->feature_elements[i]);
        if (slopes) slopes[i] = values;
    }
}

static void xdi_dmd_lay_out_tensors(xd_dmd *d, xd_arena *device) {
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    const size_t bytes = (size_t)(sizes->samples * sizes->elements) * xd_dtype_size(sizes->dtype);
    xdi_dmd_tensors *t = &d->tensors;
    void **const all[] = { &t->noise,  &t->input,      &t->prediction, &t->generated, &t->epsilon,
                           &t->noised, &t->teacher_x0, &t->fake_x0,    &t->scratch };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] = xd_arena_take_pointer(device, bytes);
    if (xdi_dmd_adversarial(&d->desc)) t->real = xd_arena_take_pointer(device, bytes);
    if (xdi_dmd_rescales(&d->desc)) t->guided_x0 = xd_arena_take_pointer(device, bytes);
}

static void xdi_dmd_lay_out_device(xd_dmd *d, xd_arena *device) {
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    const int64_t n = sizes->samples, all = n * sizes->elements;
    const size_t bytes = (size_t)all * xd_dtype_size(sizes->dtype);
    xdi_dmd_lay_out_tensors(d, device);
    if (d->desc.own_samples)
        d->kept.samples = xd_arena_take_pointer(device, bytes * (size_t)d->micro_batches);
    d->gradients.generated = xdi_dmd_floats(device, all);
    d->gradients.prediction = xdi_dmd_floats(device, all);
    if (xdi_dmd_adversarial(&d->desc)) d->gradients.noised = xdi_dmd_floats(device, all);
    if (xdi_dmd_draws_between(d->ctx, &d->desc)) d->draws.normals = xdi_dmd_floats(device, all);
    d->factors.mixes = (xd_mix *)xd_arena_take_pointer(device, (size_t)n * sizeof *d->factors.mixes);
    d->factors.terms = (xd_denoise_term *)xd_arena_take_pointer(device, (size_t)n * sizeof *d->factors.terms);
    d->norms = (xd_gradient_norm *)xd_arena_take_pointer(device, XD_DMD_ROLES * sizeof *d->norms);
    d->results.status = (xd_status *)xd_arena_take_pointer(device, sizeof *d->results.status);
    d->results.value = (xd_sample_values *)xd_arena_take_pointer(device, sizeof *d->results.value);
    d->results.distances = (double *)xd_arena_take_pointer(device, (size_t)n * sizeof *d->results.distances);
    d->results.workspace_bytes = xdi_dmd_workspace(d);
    d->results.workspace = xd_arena_take_pointer(device, d->results.workspace_bytes);
}

XD_PRIVATE void xdi_dmd_take_times(xd_arena *host, int64_t samples, xdi_dmd_times *times) {
    times->exact = (double *)xd_arena_take_pointer(host, (size_t)samples * sizeof(double));
    times->network = (double *)xd_arena_take_pointer(host, (size_t)samples * sizeof(double));
}

/* Rows of the table of values: of every micro-batch that any rank may have, and one for the rank itself. */
static int64_t xdi_dmd_table_rows(const xd_dmd *d) {
    const int64_t ranks = d->desc.data ? xd_comm_size(d->desc.data) : 1;
    return (d->micro_batches + 1) * (ranks + 1); /* what this rank sends stands last */
}

static void xdi_dmd_lay_out_host(xd_dmd *d, xd_arena *host) {
    const size_t n = (size_t)d->desc.sizes.samples;
    if (xdi_dmd_draws_apart(d->ctx, &d->desc))
        d->draws.host_normals = xdi_dmd_floats(host, d->desc.sizes.samples * d->desc.sizes.elements);
    d->factors.host_mixes = (xd_mix *)xd_arena_take_pointer(host, n * sizeof *d->factors.host_mixes);
    d->factors.host_terms = (xd_denoise_term *)xd_arena_take_pointer(host, n * sizeof *d->factors.host_terms);
    d->draws.times = (double *)xd_arena_take_pointer(host, n * sizeof *d->draws.times);
    d->results.host_distances = (double *)xd_arena_take_pointer(host, n * sizeof *d->results.host_distances);
    d->draws.rungs = (int64_t *)xd_arena_take_pointer(host, n * sizeof *d->draws.rungs);
    xdi_dmd_take_times(host, d->desc.sizes.samples, &d->input);
    xdi_dmd_take_times(host, d->desc.sizes.samples, &d->noised);
    xdi_dmd_take_times(host, d->desc.sizes.samples, &d->real);
    d->table.counts = (int64_t *)xd_arena_take_pointer(
        host, (size_t)(d->desc.data ? xd_comm_size(d->desc.data) : 1) * sizeof *d->table.counts);
    d->kept.counts =
        (int64_t *)xd_arena_take_pointer(host, (size_t)d->micro_batches * sizeof *d->kept.counts);
    d->table.rows = (double *)xd_arena_take_pointer(host, (size_t)xdi_dmd_table_rows(d) * XDI_DMD_COLUMNS *
                                                              sizeof *d->table.rows);
}

/* Fills in a model of the object, for sizes alone or over memory. */
static void xdi_dmd_lay_out(xd_dmd *d, xd_ctx *ctx, const xd_dmd_desc *desc, xd_arena *host,
                            xd_arena *device) {
    memset(d, 0, sizeof *d);
    d->ctx = ctx;
    d->desc = *desc;
    d->micro_batches = desc->trainers[XD_DMD_STUDENT].parallel
                           ? xd_parallel_micro_batches(desc->trainers[XD_DMD_STUDENT].parallel).max
                           : 1;
    d->noised_micro_batch = d->beyond = -1;
    d->record.seed = desc->seed;
    xd_arena_take_pointer(host, sizeof *d);
    xdi_dmd_lay_out_host(d, host);
    xdi_dmd_lay_out_device(d, device);
    if (xdi_dmd_rescales(desc)) xdi_dmd_lay_out_deviations(d, host, device);
    if (xdi_dmd_adversarial(desc)) xdi_dmd_lay_out_features(d, host, device);
    if (desc->gan.fdistill.on) xdi_dmd_lay_out_ratios(d, host, device);
}

static xd_result xdi_dmd_add_to_plan(xd_ctx *ctx, const xd_dmd_desc *desc) {
    xd_arena host = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    xd_dmd plan;
    xdi_dmd_lay_out(&plan, ctx, desc, &host, &device);
    return xdi_plan_take(ctx, host.peak, device.peak);
}

static xd_result xdi_dmd_make(xd_ctx *ctx, const xd_dmd_desc *desc, xd_dmd **out) {
    xd_arena host = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    xd_dmd plan, *d;
    xdi_dmd_lay_out(&plan, ctx, desc, &host, &device);
    const size_t host_bytes = host.peak, device_bytes = device.peak;
    d = XDI_OBJECT(xd_dmd, ctx, host_bytes);
    void *memory = d ? xd_ctx_kernels(ctx)->memory.allocate(ctx, device_bytes) : NULL;
    if (!memory) xd_release(ctx, d);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a distillation: %zu bytes, and %zu of the device",
               host_bytes, device_bytes);
    host = xd_arena_over(d, host_bytes);
    device = xd_arena_over(memory, device_bytes);
    xdi_dmd_lay_out(&plan, ctx, desc, &host, &device);
    *d = plan;
    d->memory = memory;
    for (int64_t i = 0; i < d->micro_batches; i++) d->kept.counts[i] = -1;
    const int64_t logits = desc->sizes.samples * desc->networks[XD_DMD_DISCRIMINATOR].heads;
    for (int64_t i = 0; d->ones && i < logits; i++) d->ones[i] = 1.0f;
    *out = d;
    return XD_OK;
}

/* The wrappers of all roles begin their sums in one order on all ranks. */
static void xdi_dmd_align_sums(const xd_dmd_desc *desc) {
    xd_parallel *parallels[XD_DMD_ROLES];
    for (int role = 0; role < XD_DMD_ROLES; role++) parallels[role] = desc->trainers[role].parallel;
    xdi_gradient_align(parallels, XD_DMD_ROLES);
}

XD_API xd_result xd_dmd_create(xd_ctx *ctx, const xd_dmd_desc *desc, xd_dmd **out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    xd_dmd *made = NULL;
    xd_comm *const together[2] = { desc->sizes.split, desc->data };
    xd_result valid = XDI_CHECK_GIVEN_AS(ctx, true, out);
    if (valid == XD_OK) valid = xdi_dmd_check(ctx, desc);
    if (xdi_plan_is_open(ctx)) {
        if (out) *out = NULL;
        return valid == XD_OK ? xdi_dmd_add_to_plan(ctx, desc) : valid;
    }
    XD_TRY(xdi_dmd_agree(desc, valid));
    for (int i = 0; i < 2; i++)
        if (together[i]) XD_TRY(xdi_dmd_agree_settings(desc, together[i]));
    const xd_result result = xdi_dmd_agree(desc, xdi_dmd_make(ctx, desc, &made));
    if (result != XD_OK) xd_dmd_destroy(made);
    XD_TRY(result);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_result cleared =
        xd_ctx_kernels(ctx)->memory.fill(&launch, made->results.status, 0, sizeof *made->results.status);
    if (cleared == XD_OK) cleared = xdi_dmd_begin_ratios(made);
    if (cleared != XD_OK) xd_dmd_destroy(made);
    XD_TRY(cleared);
    xdi_dmd_align_sums(desc);
    *out = made;
    return XD_OK;
}

XD_API void xd_dmd_destroy(xd_dmd *dmd) {
    if (!dmd || XDI_IS_GONE(xd_dmd, dmd)) return;
    xd_ctx_kernels(dmd->ctx)->memory.release(dmd->ctx, dmd->memory);
    xd_release(dmd->ctx, dmd);
}

/* ---- state ---- */

XD_API xd_dmd_record xd_dmd_describe(const xd_dmd *dmd) {
    XD_ASSERT(dmd);
    return dmd->record;
}

XD_API xd_result xd_dmd_resume(xd_dmd *dmd, const xd_dmd_record *record) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, record);
    XD_REQUIRE(dmd->ctx, record->seed == dmd->desc.seed, XD_ERROR_MISMATCH,
               "the run has seed %llu, the distillation %llu", (unsigned long long)record->seed,
               (unsigned long long)dmd->desc.seed);
    XD_REQUIRE(dmd->ctx,
               record->step >= 0 && record->step <= UINT32_MAX && record->warm_up >= 0 &&
                   record->warm_up <= UINT32_MAX,
               XD_ERROR_ARGUMENT, "step %lld, %lld of warm-up", (long long)record->step,
               (long long)record->warm_up);
    XD_REQUIRE(dmd->ctx,
               !dmd->desc.own_samples || record->step <= xdi_dmd_first_student_step(&dmd->desc) ||
                   xd_dmd_trains(&dmd->desc, XD_DMD_STUDENT, record->step),
               XD_ERROR_STATE,
               "step %lld is to train on samples of an earlier one, which are not saved: go on from a step "
               "of the student",
               (long long)record->step);
    for (int role = 0; role < XD_DMD_ROLES; role++)
        XD_REQUIRE(dmd->ctx, record->updates[role] >= 0 && record->updates[role] <= record->step,
                   XD_ERROR_ARGUMENT, "%lld updates of the %s in %lld steps",
                   (long long)record->updates[role], xdi_dmd_role_name((xd_dmd_role)role),
                   (long long)record->step);
    dmd->record = *record;
    dmd->noised_micro_batch = -1;
    for (int64_t k = 0; k < dmd->micro_batches; k++) dmd->kept.counts[k] = -1; /* those of another step */
    return XD_OK;
}
