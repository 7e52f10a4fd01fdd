/* Golden cases of the area dmd: whole steps. Networks are the file's toys: raw = hidden W^T + time b + condition U^T over the middle
 * axes; the feature is tanh(raw) of the teacher, logits are the feature's mean over the middle axes times V^T. */
#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NAME = 64, CALLS = 16, STEPS_MAX = 64 };

typedef struct steps_case steps_case;

/* A network of the file, and what its backward found. */
typedef struct toy {
    steps_case *s;
    const char *name;
    const float *w, *u, *b; /* [channels, channels], [channels, words], [channels] */
    double *d_w, *d_u, *d_b;
    int call_of_slot[3]; /* the last forward that is kept */
} toy;

struct steps_case {
    golden_case *c;
    int64_t samples, middle, channels, words, heads;
    toy networks[XD_DMD_ROLES];
    const float *v; /* [heads, channels] */
    double *d_v;
    float *condition, *negative; /* [samples, words] */
    int calls, judged, drawn;
    int logits_of_slot[3]; /* which of its calls */
    const char *failed;
};

static int64_t elements(const steps_case *s) {
    return s->middle * s->channels;
}

/* ---- memory of the device ---- */

static float *fetch(steps_case *s, const void *there, int64_t count) {
    float *here = (float *)golden_memory(s->c, (size_t)(count + 1) * sizeof *here);
    if (!golden_ok(s->c, xd_read(golden_ctx(s->c), here, there, (size_t)count * sizeof *here)))
        s->failed = "read";
    return here;
}

static xd_result give(steps_case *s, void *there, const float *here, int64_t count) {
    xd_ctx *ctx = golden_ctx(s->c);
    const xd_device_ops *device = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_TRY(device->copy(&launch, there, here, (size_t)count * sizeof *here, XD_COPY_TO_DEVICE));
    return device->synchronize(&launch);
}

static void compare(steps_case *s, const char *form, int number, const char *what, const float *got,
                    int64_t count) {
    char name[NAME];
    snprintf(name, sizeof name, form, number, what);
    if (!golden_wants(s->c, name)) return;
    const double *wide = golden_widen(s->c, got, XD_DTYPE_F32, count);
    if (strncmp(name, "grad.", 5) == 0)
        golden_gradient(s->c, name, wide, count);
    else
        golden_close(s->c, name, wide, count);
}

/* ---- networks ---- */

/* Which call of the file this is; the order of calls is the file's. */
static int count_call(steps_case *s, const char *name) {
    char expected[32 * CALLS];
    const char *at = golden_text(s->c, "cfg.call_order");
    snprintf(expected, sizeof expected, "%s", at ? at : "");
    char *word = strtok(expected, "[], \"");
    for (int i = 0; word && i < s->calls; i++) word = strtok(NULL, "[], \"");
    if (!word || strcmp(word, name) != 0)
        golden_fail(s->c, "call %d is of the %s, not of the %s", s->calls, name, word ? word : "end");
    return s->calls++;
}

static void toy_raw(const toy *t, const xd_network_call *call, const float *hidden, float *raw) {
    const steps_case *s = t->s;
    const int64_t n = s->channels;
    const float *words = (const float *)call->condition;
    for (int64_t i = 0; i < call->samples * s->middle; i++)
        for (int64_t c = 0; c < n; c++) {
            double sum = call->times[i / s->middle] * t->b[c];
            for (int64_t k = 0; k < n; k++) sum += (double)hidden[i * n + k] * t->w[c * n + k];
            for (int64_t k = 0; k < s->words; k++)
                sum += (double)words[i / s->middle * s->words + k] * t->u[c * s->words + k];
            raw[i * n + c] = (float)sum;
        }
}

static xd_result toy_forward(void *user, const xd_network_call *call) {
    toy *t = (toy *)user;
    steps_case *s = t->s;
    const int64_t count = call->samples * elements(s);
    const int number = count_call(s, t->name);
    float *raw = (float *)golden_memory(s->c, (size_t)(count + 1) * sizeof *raw);
    float *times = (float *)golden_memory(s->c, (size_t)(call->samples + 1) * sizeof *times);
    const float *hidden = fetch(s, call->hidden, count);
    for (int64_t i = 0; i < call->samples; i++) times[i] = (float)call->times[i];
    toy_raw(t, call, hidden, raw);
    if (call->keep) t->call_of_slot[call->slot] = number;
    compare(s, "out.call%d.%s", number, "hidden", hidden, count);
    compare(s, "out.call%d.%s", number, "timestep", times, call->samples);
    compare(s, "out.call%d.%s", number, "raw", raw, count);
    XD_TRY(give(s, call->raw, raw, count));
    if (!call->features) return XD_OK;
    for (int64_t i = 0; i < count; i++) raw[i] = (float)tanh((double)raw[i]);
    return give(s, call->features[0], raw, count);
}

static void toy_weights(toy *t, const xd_network_call *call, const float *hidden, const float *slope) {
    const steps_case *s = t->s;
    const int64_t n = s->channels;
    const float *words = (const float *)call->condition;
    for (int64_t i = 0; i < call->samples * s->middle; i++)
        for (int64_t c = 0; c < n; c++) {
            const double g = (double)slope[i * n + c];
            t->d_b[c] += g * call->times[i / s->middle];
            for (int64_t k = 0; k < n; k++) t->d_w[c * n + k] += g * (double)hidden[i * n + k];
            for (int64_t k = 0; k < s->words; k++)
                t->d_u[c * s->words + k] += g * (double)words[i / s->middle * s->words + k];
        }
}

static xd_result toy_backward(void *user, const xd_network_call *call) {
    toy *t = (toy *)user;
    steps_case *s = t->s;
    const int64_t count = call->samples * elements(s), n = s->channels;
    const float *hidden = fetch(s, call->hidden, count);
    float *slope = (float *)golden_memory(s->c, (size_t)(count + 1) * sizeof *slope);
    if (call->feature_gradients) { /* the teacher's, through tanh */
        const float *outer = fetch(s, call->feature_gradients[0], count);
        toy_raw(t, call, hidden, slope);
        for (int64_t i = 0; i < count; i++)
            slope[i] = (float)((double)outer[i] * (1.0 - pow(tanh((double)slope[i]), 2.0)));
    } else {
        memcpy(slope, fetch(s, call->raw_gradient, count), (size_t)count * sizeof *slope);
    }
    compare(s, "grad.call%d.%s", t->call_of_slot[call->slot], "raw", slope, count);
    if (call->weights) toy_weights(t, call, hidden, slope);
    if (!call->hidden_gradient) return XD_OK;
    float *inner = (float *)golden_memory(s->c, (size_t)(count + 1) * sizeof *inner);
    for (int64_t i = 0; i < call->samples * s->middle; i++)
        for (int64_t k = 0; k < n; k++) {
            double sum = 0.0;
            for (int64_t c = 0; c < n; c++) sum += (double)slope[i * n + c] * t->w[c * n + k];
            inner[i * n + k] = (float)sum;
        }
    return give(s, call->hidden_gradient, inner, count);
}

/* Means of the feature over the middle axes. */
static double *feature_means(steps_case *s, const xd_network_call *call) {
    const int64_t n = s->channels;
    const float *feature = fetch(s, call->features[0], call->samples * elements(s));
    double *mean = (double *)golden_memory(s->c, (size_t)(call->samples * n + 1) * sizeof *mean);
    for (int64_t i = 0; i < call->samples * s->middle; i++)
        for (int64_t c = 0; c < n; c++)
            mean[i / s->middle * n + c] += (double)feature[i * n + c] / (double)s->middle;
    return mean;
}

static xd_result judge_forward(void *user, const xd_network_call *call) {
    steps_case *s = (steps_case *)user;
    const double *mean = feature_means(s, call);
    float *logits = (float *)golden_memory(s->c, (size_t)(call->samples * s->heads + 1) * sizeof *logits);
    for (int64_t i = 0; i < call->samples * s->heads; i++) {
        double sum = 0.0;
        for (int64_t c = 0; c < s->channels; c++)
            sum += mean[i / s->heads * s->channels + c] * (double)s->v[i % s->heads * s->channels + c];
        logits[i] = (float)sum;
    }
    s->logits_of_slot[call->slot] = s->judged;
    compare(s, "out.disc%d.%s", s->judged++, "logits", logits, call->samples * s->heads);
    return give(s, (float *)call->raw, logits, call->samples * s->heads);
}

static xd_result judge_backward(void *user, const xd_network_call *call) {
    steps_case *s = (steps_case *)user;
    const int64_t n = s->channels, count = call->samples * elements(s);
    const double *mean = feature_means(s, call);
    const float *slope = fetch(s, call->raw_gradient, call->samples * s->heads);
    compare(s, "grad.disc%d.%s", s->logits_of_slot[call->slot], "logits", slope, call->samples * s->heads);
    for (int64_t i = 0; i < call->samples * s->heads; i++)
        for (int64_t c = 0; c < n; c++)
            s->d_v[i % s->heads * n + c] += (double)slope[i] * mean[i / s->heads * n + c];
    if (!call->input_gradients) return XD_OK;
    float *inner = (float *)golden_memory(s->c, (size_t)(count + 1) * sizeof *inner);
    for (int64_t i = 0; i < count; i++) {
        double sum = 0.0;
        for (int64_t k = 0; k < s->heads; k++)
            sum += (double)slope[i / (n * s->middle) * s->heads + k] * (double)s->v[k * n + i % n];
        inner[i] = (float)(sum / (double)s->middle);
    }
    return give(s, call->input_gradients[0], inner, count);
}

/* ---- draws ---- */

static golden_array next_draw(steps_case *s, const char *const *kinds) {
    char name[NAME];
    for (int i = 0; kinds[i]; i++) {
        snprintf(name, sizeof name, "in.draw%d.%s", s->drawn, kinds[i]);
        if (golden_has(s->c, name)) break;
    }
    s->drawn++;
    return golden_tensor(s->c, name);
}

static xd_result drawn_normals(void *user, const xd_dmd_draw *draw, float *out) {
    static const char *const kinds[] = { "randn_like", "randn", NULL };
    steps_case *s = (steps_case *)user;
    const golden_array a = next_draw(s, kinds);
    if (a.count != draw->rows * draw->columns) golden_fail(s->c, "draw %d has another shape", s->drawn - 1);
    for (int64_t i = 0; i < a.count && i < draw->rows * draw->columns; i++) out[i] = (float)a.values[i];
    return XD_OK;
}

static xd_result drawn_numbers(void *user, const xd_dmd_draw *draw, const xd_time_sampler *sampler,
                               double *out) {
    static const char *const kinds[] = { "rand", "randn", "randint", NULL };
    steps_case *s = (steps_case *)user;
    const golden_array a = next_draw(s, kinds);
    (void)sampler;
    if (a.count != draw->rows) golden_fail(s->c, "draw %d has another shape", s->drawn - 1);
    for (int64_t i = 0; i < a.count && i < draw->rows; i++) out[i] = a.values[i];
    return XD_OK;
}

static xd_result drawn_rungs(void *user, const xd_dmd_draw *draw, int64_t count, int64_t *out) {
    static const char *const kinds[] = { "randint", NULL };
    steps_case *s = (steps_case *)user;
    const golden_array a = next_draw(s, kinds);
    (void)count;
    if (a.count != draw->rows) golden_fail(s->c, "draw %d has another shape", s->drawn - 1);
    for (int64_t i = 0; i < a.count && i < draw->rows; i++) out[i] = (int64_t)a.values[i];
    return XD_OK;
}

/* ---- the case ---- */

static void open_toy(steps_case *s, xd_dmd_role role, const char *name) {
    toy *t = &s->networks[role];
    char tensor[NAME];
    t->s = s;
    t->name = name;
    const char *const parts[] = { "W", "U", "b" };
    const float **where[] = { &t->w, &t->u, &t->b };
    double **slopes[] = { &t->d_w, &t->d_u, &t->d_b };
    for (int i = 0; i < 3; i++) {
        snprintf(tensor, sizeof tensor, "in.%s.%s", name, parts[i]);
        const golden_array a = golden_tensor(s->c, tensor);
        *where[i] = golden_f32(s->c, &a);
        *slopes[i] = (double *)golden_memory(s->c, (size_t)(a.count + 1) * sizeof(double));
    }
}

static void open_case(steps_case *s, golden_case *c) {
    memset(s, 0, sizeof *s);
    s->c = c;
    const golden_array noise = golden_tensor(c, "in.noise"),
                       words = golden_tensor(c, "in.encoder_hidden_states");
    s->samples = noise.shape[0];
    s->channels = noise.shape[noise.ndim - 1];
    s->middle = s->samples * s->channels > 0 ? noise.count / s->samples / s->channels : 0;
    s->words = words.shape[words.ndim - 1];
    s->condition = golden_f32(c, &words);
    open_toy(s, XD_DMD_STUDENT, "student");
    open_toy(s, XD_DMD_FAKE_SCORE, "fake_score");
    open_toy(s, XD_DMD_TEACHER, "teacher");
    if (golden_has(c, "in.negative_encoder_hidden_states")) {
        const golden_array negative = golden_tensor(c, "in.negative_encoder_hidden_states");
        s->negative = golden_f32(c, &negative);
    }
    if (!golden_has(c, "in.discriminator.V")) return;
    const golden_array v = golden_tensor(c, "in.discriminator.V");
    s->v = golden_f32(c, &v);
    s->heads = v.shape[0];
    s->d_v = (double *)golden_memory(c, (size_t)(v.count + 1) * sizeof *s->d_v);
}

static xd_prediction prediction_of(golden_case *c, const char *key, xd_prediction absent) {
    static const char *const names[] = { "x0", "eps", "v", "flow", NULL };
    return (xd_prediction)golden_choice(c, key, names, (int)absent);
}

static xd_time_sampler sampler_of(golden_case *c, double *list, int room) {
    static const char *const names[] = {
        "uniform", "shifted", "lognormal", "logitnormal", "polynomial", NULL
    };
    static const xd_time_kind kinds[] = { XD_TIME_UNIFORM, XD_TIME_SHIFTED, XD_TIME_LOG_NORMAL,
                                          XD_TIME_LOGIT_NORMAL, XD_TIME_GRID };
    xd_time_sampler s = xd_times_defaults(XD_DMD_MODELOPT);
    s.kind = kinds[golden_choice(c, "cfg.sample_t.time_dist_type", names, 1)];
    s.min_t = golden_number(c, "cfg.sample_t.min_t", s.min_t);
    s.max_t = golden_number(c, "cfg.sample_t.max_t", s.max_t);
    s.shift = golden_number(c, "cfg.sample_t.shift", s.shift);
    s.mean = golden_number(c, "cfg.sample_t.p_mean", s.mean);
    s.deviation = golden_number(c, "cfg.sample_t.p_std", s.deviation);
    golden_numbers(c, "cfg.sample_t.t_list", list, room);
    return s;
}

static void set_networks(steps_case *s, xd_dmd_desc *d, int which, int64_t *feature) {
    const xd_prediction native = prediction_of(s->c, "cfg.pred_type", XD_PREDICT_FLOW);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        d->networks[role].predicts = native;
        d->networks[role].user = &s->networks[role];
        d->networks[role].forward = toy_forward;
        d->networks[role].backward = toy_backward;
    }
    *feature = elements(s);
    d->v_is_flow = native == XD_PREDICT_V;
    d->networks[XD_DMD_TEACHER].feature_count = 1;
    d->networks[XD_DMD_TEACHER].feature_elements = feature;
    memset(&d->networks[XD_DMD_DISCRIMINATOR], 0, sizeof d->networks[XD_DMD_DISCRIMINATOR]);
    /* The peer's student has no adversarial term at weight 0. */
    const bool used = which != 0 || golden_number(s->c, "cfg.gan_loss_weight_gen", 0.0) > 0.0;
    if (!golden_flag(s->c, "cfg.gan", false) || !s->v || !used) return;
    d->networks[XD_DMD_DISCRIMINATOR].user = s;
    d->networks[XD_DMD_DISCRIMINATOR].forward = judge_forward;
    d->networks[XD_DMD_DISCRIMINATOR].backward = judge_backward;
    d->networks[XD_DMD_DISCRIMINATOR].heads = s->heads;
}

/* The peer reads v under rectified flow as the flow, yet compares with alpha eps - sigma x0. */
static void set_fake_space(steps_case *s, xd_dmd_desc *d) {
    xd_prediction *native = &d->networks[XD_DMD_FAKE_SCORE].predicts;
    d->fake_loss.space = prediction_of(s->c, "cfg.fake_score_pred_type", *native);
    if (d->fake_loss.space == XD_PREDICT_V) d->v_is_flow = d->fake_loss.v_of_any_schedule = true;
}

static void set_gan(golden_case *c, xd_dmd_desc *d) {
    const double weight = golden_number(c, "cfg.gan_loss_weight_gen", 0.0);
    d->gan.weight = weight > 0.0 ? weight : 1.0;
    d->gan.same_noise = golden_flag(c, "cfg.gan_use_same_t_noise", false);
    d->gan.r1_weight = golden_number(c, "cfg.gan_r1_reg_weight", 0.0);
    d->gan.r1_alpha = golden_number(c, "cfg.gan_r1_reg_alpha", 0.1);
    d->gan.r1_on_clean = true;
}

static void set_rungs(golden_case *c, xd_dmd_desc *d, double *list) {
    static const char *const types[] = { "ode", "sde", NULL };
    d->rungs.steps = golden_integer(c, "cfg.student_sample_steps", 1, 1, STEPS_MAX - 1);
    d->rungs.fresh_noise = golden_choice(c, "cfg.student_sample_type", types, 0) == 1;
    d->rungs.roll_out = golden_flag(c, "cfg.backward_simulation", false) && d->rungs.steps > 1;
    if (d->rungs.steps == 1) list[0] = d->student_times.max_t, list[1] = 0.0;
    d->rungs.list = list;
}

static void set_guidance(golden_case *c, xd_dmd_desc *d) {
    const double own = golden_number(c, "cfg.guidance_scale", NAN);
    const double scale = golden_number(c, "cfg.call_guidance_scale", own);
    d->guided = !isnan(scale);
    if (d->guided) d->guidance_scale = scale;
}

static void compare_scalar(golden_case *c, const char *name, double got) {
    golden_close(c, name, &got, 1);
}

static void compare_weights(steps_case *s) {
    const int64_t n = s->channels;
    char name[NAME];
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        const toy *t = &s->networks[role];
        const double *slopes[] = { t->d_w, t->d_u, t->d_b };
        const int64_t counts[] = { n * n, n * s->words, n };
        const char *const parts[] = { "W", "U", "b" };
        for (int i = 0; i < 3 && t->name; i++) {
            snprintf(name, sizeof name, "grad.%s.%s", t->name, parts[i]);
            golden_gradient(s->c, name, slopes[i], counts[i]);
        }
    }
    if (s->d_v) golden_gradient(s->c, "grad.discriminator.V", s->d_v, s->heads * n);
}

static void run_step(steps_case *s, const xd_dmd_desc *d, int which) {
    xd_dmd *dmd;
    xd_dmd_values values;
    xd_dmd_batch batch;
    xd_dmd_desc settings = *d;
    golden_loans loans;
    const golden_array noise = golden_tensor(s->c, "in.noise"), real = golden_tensor(s->c, "in.latents");
    xd_result result;
    memset(&values, 0, sizeof values);
    memset(&batch, 0, sizeof batch);
    golden_loans_open(&loans, golden_ctx(s->c));
    batch.samples = s->samples;
    batch.noise = golden_in(&loans, golden_f32(s->c, &noise), (size_t)noise.count * sizeof(float));
    batch.real = golden_in(&loans, golden_f32(s->c, &real), (size_t)real.count * sizeof(float));
    batch.condition = s->condition;
    batch.negative = s->negative;
    if (!golden_ok(s->c, xd_dmd_create(golden_ctx(s->c), &settings, &dmd))) return;
    result = which == 0   ? xd_dmd_student(dmd, 0, &batch, &values)
             : which == 1 ? xd_dmd_fake_score(dmd, 0, &batch, &values)
                          : xd_dmd_discriminator(dmd, 0, &batch, &values);
    xd_dmd_destroy(dmd);
    if (!golden_ok(s->c, golden_back(&loans, result))) return;
    const double gan = d->gan.weight * values.generator, penalty = d->gan.r1_weight * values.r1;
    compare_scalar(s->c, "out.vsd", values.vsd);
    compare_scalar(s->c, "out.gan_gen", values.generator);
    compare_scalar(s->c, "out.fake_score", values.fake_score);
    compare_scalar(s->c, "out.gan_disc", values.discriminator);
    compare_scalar(s->c, "out.r1", values.r1);
    compare_scalar(s->c, "out.total",
                   which == 0   ? values.vsd + gan
                   : which == 1 ? values.fake_score
                                : values.discriminator + penalty);
    compare_weights(s);
}

static bool steps_claims(const golden_case *c) {
    return golden_text(c, "cfg.step") != NULL && golden_text(c, "cfg.call_order") != NULL;
}

static void steps_run(golden_case *c) {
    static const char *const steps[] = { "student", "fake_score", "discriminator", NULL };
    const xd_dmd_draws draws = { NULL, drawn_normals, drawn_numbers, drawn_rungs };
    const int which = golden_choice(c, "cfg.step", steps, 0);
    double list[STEPS_MAX] = { 0 };
    int64_t feature;
    steps_case s;
    xd_dmd_draws recorded = draws;
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    open_case(&s, c);
    recorded.user = &s;
    d.student_times = d.fake_times = sampler_of(c, list, STEPS_MAX);
    d.network_scale = golden_number(c, "cfg.num_train_timesteps", 0.0);
    d.draws = &recorded;
    d.sizes.samples = d.sizes.step_samples = s.samples;
    d.sizes.elements = elements(&s);
    set_networks(&s, &d, which, &feature);
    set_fake_space(&s, &d);
    set_gan(c, &d);
    set_rungs(c, &d, list);
    d.schedule.max_t = list[0] > d.student_times.max_t ? list[0] : d.student_times.max_t;
    set_guidance(c, &d);
    if (!s.v || !d.networks[XD_DMD_DISCRIMINATOR].forward) d.gan.r1_weight = 0.0;
    run_step(&s, &d, which);
    if (golden_has(c, "in.draw0.rand") || s.drawn > 0) {
        char name[NAME];
        const char *const kinds[] = { "rand", "randn", "randint", "randn_like" };
        for (int i = 0; i < 4; i++) {
            snprintf(name, sizeof name, "in.draw%d.%s", s.drawn, kinds[i]);
            if (golden_has(c, name)) golden_fail(c, "%s was not drawn", name);
        }
    }
}

const golden_kind golden_kinds_dmd_steps[] = {
    { "distillation steps", steps_claims, steps_run },
    { NULL, NULL, NULL },
};
