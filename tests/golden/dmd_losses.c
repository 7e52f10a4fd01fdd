/* Golden cases of the area dmd: losses of distribution matching, terms of discriminators, weights of f-distill. */
#include "golden.h"
#include "dmd/fdistill.h"

#include <string.h>

/* Tensors of a case as rows of samples, lent to one call. */
typedef struct samples_case {
    golden_case *c;
    golden_loans loans;
    int64_t samples, elements;
    xd_status status;
    xd_sample_values values;
    float *gradients[2];
} samples_case;

/* Samples are the first dimension of the tensor `name`, their elements the others. */
static void samples_open(samples_case *s, golden_case *c, const char *name) {
    const golden_array a = golden_tensor(c, name);
    memset(s, 0, sizeof *s);
    s->c = c;
    s->samples = a.ndim > 0 ? a.shape[0] : 0;
    s->elements = 1;
    for (int d = 1; d < a.ndim; d++) s->elements *= a.shape[d];
    golden_loans_open(&s->loans, golden_ctx(c));
}

static xd_rows samples_in(samples_case *s, const char *name) {
    const golden_array a = golden_tensor(s->c, name);
    if (a.count != s->samples * s->elements) golden_fail(s->c, "%s has another shape", name);
    return golden_rows_in(&s->loans, xd_rows_of(golden_f32(s->c, &a), XD_DTYPE_F32, s->samples, s->elements));
}

static xd_rows samples_gradient(samples_case *s, int which) {
    s->gradients[which] =
        (float *)golden_memory(s->c, (size_t)(s->samples * s->elements + 1) * sizeof *s->gradients[which]);
    return golden_rows_out(&s->loans, xd_rows_of(s->gradients[which], XD_DTYPE_F32, s->samples, s->elements));
}

/* One number a sample, or NULL when the case has no such tensor. */
static const double *samples_numbers(samples_case *s, const char *name) {
    if (!golden_has(s->c, name)) return NULL;
    const golden_array a = golden_tensor(s->c, name);
    if (a.count != s->samples) golden_fail(s->c, "%s is not a number for each sample", name);
    return (const double *)golden_in(&s->loans, a.values, (size_t)a.count * sizeof *a.values);
}

static void samples_common(samples_case *s, xd_sample_common *common) {
    common->status = golden_status(&s->loans, &s->status);
}

static xd_sample_values *samples_out(samples_case *s) {
    return (xd_sample_values *)golden_out(&s->loans, &s->values, sizeof s->values);
}

static void samples_compare_gradient(samples_case *s, int which, const char *name) {
    const int64_t count = s->samples * s->elements;
    golden_gradient(s->c, name, golden_widen(s->c, s->gradients[which], XD_DTYPE_F32, count), count);
}

static bool samples_found(samples_case *s, xd_result result) {
    if (!golden_ok(s->c, golden_found(&s->loans, result, &s->status))) return false;
    golden_close(s->c, "out.loss", &s->values.loss, 1);
    return true;
}

/* ---- the student's term ---- */

static bool vsd_claims(const golden_case *c) {
    return golden_origin_has(c, "vsd_loss") || golden_origin_has(c, "variational_score_distillation_loss");
}

static void vsd_run(golden_case *c) {
    for (int form = XD_VSD_EXACT; form <= (int)XD_VSD_COMPAT; form++) {
        samples_case s;
        xd_vsd_desc d = xd_vsd_defaults();
        samples_open(&s, c, "in.gen_data");
        d.generated = samples_in(&s, "in.gen_data");
        d.teacher = samples_in(&s, "in.teacher_x0");
        d.fake = samples_in(&s, "in.fake_score_x0");
        d.sample_scale = samples_numbers(&s, "in.additional_scale");
        d.gradient = samples_gradient(&s, 0);
        d.form = (xd_vsd_form)form;
        samples_common(&s, &d.common);
        if (samples_found(&s, xd_vsd_loss(golden_ctx(c), &d, samples_out(&s))))
            samples_compare_gradient(&s, 0, "grad.gen_data");
    }
}

/* ---- the denoising term ---- */

static bool denoise_claims(const golden_case *c) {
    return golden_origin_has(c, "dsm_loss") || golden_origin_has(c, "denoising_score_matching_loss");
}

/* Model-Optimizer's cases are of rectified flow; FastGen's of its noise schedules, whose name ends the origin. */
static xd_noise_schedule denoise_schedule(golden_case *c) {
    xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    if (golden_origin_has(c, "AlphasNoiseSchedule")) {
        const golden_array table = golden_tensor(c, "in.alphas_cumprod");
        schedule = xd_noise_defaults(XD_NOISE_VP);
        schedule.table = table.values;
        schedule.table_count = table.count;
    } else if (golden_origin_has(c, "EDMNoiseSchedule")) {
        schedule = xd_noise_defaults(XD_NOISE_EDM);
    } else if (golden_origin_has(c, "TrigNoiseSchedule")) {
        schedule = xd_noise_defaults(XD_NOISE_TRIG);
    } else {
        schedule.max_t = 1.0;
    }
    schedule.min_t = golden_number(c, "cfg.min_t", schedule.min_t);
    schedule.max_t = golden_number(c, "cfg.max_t", schedule.max_t);
    schedule.clamp_min = golden_number(c, "cfg.clamp_min", 0.0);
    return schedule;
}

static void denoise_run(golden_case *c) {
    static const char *const types[] = { "x0", "eps", "v", "flow", NULL };
    const int type = golden_choice(c, "cfg.pred_type", types, XD_PREDICT_V);
    const golden_array times = golden_tensor(c, "in.t");
    const xd_noise_schedule schedule = denoise_schedule(c);
    xd_denoise_form form;
    xd_denoise_desc d = xd_denoise_defaults();
    samples_case s;
    memset(&form, 0, sizeof form);
    form.native = form.space = (xd_prediction)type;
    form.v_of_any_schedule = type == XD_PREDICT_V;
    samples_open(&s, c, "in.net_pred");
    xd_denoise_term *terms = (xd_denoise_term *)golden_memory(c, (size_t)(s.samples + 1) * sizeof *terms);
    for (int64_t b = 0; b < s.samples && times.count > 0; b++)
        if (!golden_ok(c, xd_denoise_term_at(golden_ctx(c), &schedule, &form,
                                             times.values[times.count == s.samples ? b : 0], &terms[b])))
            return;
    d.prediction = samples_in(&s, "in.net_pred");
    d.clean = samples_in(&s, "in.x0");
    d.noise = samples_in(&s, "in.eps");
    d.gradient = samples_gradient(&s, 0);
    d.terms = (const xd_denoise_term *)golden_in(&s.loans, terms, (size_t)s.samples * sizeof *terms);
    samples_common(&s, &d.common);
    if (samples_found(&s, xd_denoise_loss(golden_ctx(c), &d, samples_out(&s))))
        samples_compare_gradient(&s, 0, "grad.net_pred");
}

/* ---- terms on logits ---- */

static bool gan_claims(const golden_case *c) {
    return golden_origin_has(c, "gan_gen_loss") || golden_origin_has(c, "gan_disc_loss") ||
           golden_origin_has(c, "gan_loss_generator") || golden_origin_has(c, "gan_loss_discriminator");
}

static void gan_run(golden_case *c) {
    const bool generator = golden_origin_has(c, "gan_gen_loss") || golden_origin_has(c, "gan_loss_generator");
    samples_case s;
    xd_gan_desc d = xd_gan_defaults();
    samples_open(&s, c, "in.fake_logits");
    d.role = generator ? XD_GAN_GENERATOR : XD_GAN_DISCRIMINATOR;
    d.fake = samples_in(&s, "in.fake_logits");
    d.fake_gradient = samples_gradient(&s, 0);
    if (!generator) {
        d.real = samples_in(&s, "in.real_logits");
        d.real_gradient = samples_gradient(&s, 1);
    }
    samples_common(&s, &d.common);
    if (!samples_found(&s, xd_gan_loss(golden_ctx(c), &d, samples_out(&s)))) return;
    samples_compare_gradient(&s, 0, "grad.fake_logits");
    if (!generator) samples_compare_gradient(&s, 1, "grad.real_logits");
}

static bool r1_claims(const golden_case *c) {
    return golden_origin_has(c, "r1_loss");
}

static void r1_run(golden_case *c) {
    samples_case s;
    xd_gan_desc d = xd_gan_defaults();
    samples_open(&s, c, "in.real_logits");
    d.role = XD_GAN_R1;
    d.real = samples_in(&s, "in.real_logits");
    d.fake = samples_in(&s, "in.perturbed_real_logits");
    d.fake_gradient = samples_gradient(&s, 0);
    d.real_gradient = samples_gradient(&s, 1);
    samples_common(&s, &d.common);
    if (!samples_found(&s, xd_gan_loss(golden_ctx(c), &d, samples_out(&s)))) return;
    samples_compare_gradient(&s, 0, "grad.perturbed_real_logits");
    samples_compare_gradient(&s, 1, "grad.real_logits");
}

/* ---- f-distill ---- */

static const char *const divergences[] = { "js", "rkl", "kl", "sf", "sh", "jf", "neyman", NULL };

static bool weights_claims(const golden_case *c) {
    return golden_origin_has(c, "_get_f_div_weighting_h");
}

static void weights_run(golden_case *c) {
    samples_case s;
    xdi_fdistill_desc d = xdi_fdistill_defaults();
    samples_open(&s, c, "in.fake_logits");
    d.logits = samples_in(&s, "in.fake_logits");
    d.divergence = (xd_f_divergence)golden_choice(c, "cfg.f_div", divergences, XD_F_JS);
    d.lower = golden_number(c, "cfg.ratio_lower", d.lower);
    d.upper = golden_number(c, "cfg.ratio_upper", d.upper);
    d.rate = golden_number(c, "cfg.ratio_ema_rate", d.rate);
    d.min_t = golden_number(c, "cfg.min_t", d.min_t);
    d.max_t = golden_number(c, "cfg.max_t", d.max_t);
    d.bins = golden_integer(c, "cfg.bin_num", d.bins, 1, XD_FDISTILL_BINS_MAX);
    golden_inert(c, "cfg.schedule"); /* only its times are used, and they are given */
    const int bins = d.bins;
    double *values = (double *)golden_memory(c, (size_t)bins * sizeof *values);
    for (int k = 0; k < bins; k++) values[k] = 1.0;
    if (golden_has(c, "in.bins")) {
        const golden_array given = golden_tensor(c, "in.bins");
        for (int64_t k = 0; k < given.count && k < bins; k++) values[k] = given.values[k];
    }
    if (!golden_flag(c, "cfg.ratio_normalization", true)) d.bins = 0;
    d.times = samples_numbers(&s, "in.t");
    d.bin_values = (double *)golden_out(&s.loans, values, (size_t)bins * sizeof *values);
    d.status = golden_status(&s.loans, &s.status);
    double *weights = (double *)golden_memory(c, (size_t)(s.samples + 1) * sizeof *weights);
    double *there = (double *)golden_out(&s.loans, weights, (size_t)s.samples * sizeof *weights);
    if (!golden_ok(c, golden_found(&s.loans, xdi_fdistill_weights(golden_ctx(c), &d, there), &s.status)))
        return;
    golden_close(c, "out.h", weights, s.samples);
    golden_close(c, "out.bins", values, bins);
}

static bool table_claims(const golden_case *c) {
    return golden_origin_has(c, "all_f_div_weighting_function");
}

static void table_run(golden_case *c) {
    const golden_array ratios = golden_tensor(c, "in.ratio");
    double *weights = (double *)golden_memory(c, (size_t)(ratios.count + 1) * sizeof *weights);
    for (int k = 0; divergences[k]; k++) {
        char name[16] = "out.";
        strcat(name, divergences[k]);
        if (!golden_wants(c, name)) continue;
        for (int64_t i = 0; i < ratios.count; i++)
            weights[i] = xdi_f_weight((xd_f_divergence)k, ratios.values[i]);
        golden_double(c, name, weights, ratios.count);
    }
}

const golden_kind golden_kinds_dmd_losses[] = {
    { "student's term", vsd_claims, vsd_run },
    { "denoising term", denoise_claims, denoise_run },
    { "adversarial term", gan_claims, gan_run },
    { "R1", r1_claims, r1_run },
    { "f-distill weights", weights_claims, weights_run },
    { "f-distill table", table_claims, table_run },
    { NULL, NULL, NULL },
};
