/* Golden cases of the areas ema and optim. */
#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ROOM = 64, NAME = 256 }; /* tensors of a toy model; bytes of a tensor's name */

/* ---- EMA ---- */

typedef struct model {
    int count;
    const char *names[ROOM]; /* "w" of "in.init.w" */
    void *values[ROOM];      /* on the host; params holds what is lent of them */
    xd_param params[ROOM];
    golden_loans loans, gradients;
} model;

/* Everything the file calls in.init.*, as the live model; its memory is rewritten in each step. `widen` makes
 * F64 of every float, to run the recurrence in double. */
static void model_collect(golden_case *c, model *m, bool widen) {
    memset(m, 0, sizeof *m);
    golden_loans_open(&m->loans, golden_ctx(c));
    golden_loans_open(&m->gradients, golden_ctx(c));
    for (int i = 0; i < golden_tensor_count(c) && m->count < ROOM; i++) {
        const char *name = golden_tensor_name(c, i);
        if (strncmp(name, "in.init.", 8) != 0) continue;
        const golden_array a = golden_tensor(c, name);
        xd_param *p = &m->params[m->count];
        void *value = golden_memory(c, (size_t)(a.count + 1) * 8);
        m->names[m->count] = name + 8;
        m->values[m->count++] = value;
        p->name = name + 8;
        p->dtype = widen && xd_dtype_is_floating(a.dtype) ? XD_DTYPE_F64 : a.dtype;
        p->count = a.count;
        p->buffer = !xd_dtype_is_floating(a.dtype) || strncmp(p->name, "running_", 8) == 0;
        for (int64_t k = 0; k < a.count; k++) xd_store_f64(value, p->dtype, k, a.values[k]);
        p->value = golden_out(&m->loans, value, (size_t)a.count * xd_dtype_size(p->dtype));
    }
}

static void model_set(golden_case *c, model *m, int step) {
    char name[NAME];
    for (int i = 0; i < m->count; i++) {
        snprintf(name, sizeof name, "in.step%d.%s", step, m->names[i]);
        const golden_array a = golden_tensor(c, name);
        for (int64_t k = 0; k < a.count && k < m->params[i].count; k++)
            xd_store_f64(m->values[i], m->params[i].dtype, k, a.values[k]);
    }
    golden_renew(&m->loans);
}

static bool ema_is_credit(const golden_case *c) {
    return golden_origin_has(c, "EMATracker");
}

static xd_dtype ema_dtype(const golden_case *c) {
    if (golden_is(c, "cfg.dtype", "bfloat16")) return XD_DTYPE_BF16;
    if (golden_is(c, "cfg.dtype", "float16")) return XD_DTYPE_F16;
    return XD_DTYPE_F32;
}

static xd_ema_desc ema_desc(const golden_case *c, bool widen) {
    xd_ema_desc d;
    memset(&d, 0, sizeof d);
    const char *ramp = golden_text(c, "cfg.rampup_ratio");
    d.decay = golden_number(c, "cfg.decay", 0.9999);
    d.gamma = golden_number(c, "cfg.gamma", 16.97);
    d.halflife_kimg = golden_number(c, "cfg.halflife_kimg", 500.0);
    d.rampup_ratio = golden_number(c, "cfg.rampup_ratio", 0.05);
    d.disable_rampup = ramp && strcmp(ramp, "null") == 0;
    d.batch_size = (int64_t)golden_number(c, "cfg.batch_size", 1.0);
    d.start_iteration = (int64_t)golden_number(c, "cfg.start_iter", 0.0);
    if (golden_is(c, "cfg.type", "power")) d.schedule = XD_EMA_POWER;
    if (golden_is(c, "cfg.type", "halflife")) d.schedule = XD_EMA_HALFLIFE;
    if (ema_is_credit(c)) {
        d.schedule = XD_EMA_RAMP;
        d.init_from_current = true;
        d.compat_credit = true;
    }
    d.live_dtype = widen || golden_is(c, "cfg.dtype", "null");
    d.dtype = ema_dtype(c);
    return d;
}

/* Compares the shadow after call `step` with the file, in the dtype of the run. */
static void ema_check(golden_case *c, const xd_ema *ema, int step, bool widen) {
    char name[NAME];
    for (int64_t i = 0; i < xd_ema_count(ema); i++) {
        const xd_param view = xd_ema_view(ema, i);
        snprintf(name, sizeof name, "%s.step%d.%s", widen ? "out" : "out32", step, view.name);
        if (!golden_has(c, name)) continue;
        const void *value = golden_fetch(c, view.value, (size_t)view.count * xd_dtype_size(view.dtype));
        const double *got = golden_widen(c, value, view.dtype, view.count);
        if (view.buffer)
            golden_exact(c, name, got, view.count);
        else if (widen)
            golden_double(c, name, got, view.count);
        else if (view.dtype == XD_DTYPE_F16)
            golden_close(c, name, got, view.count);
        else
            golden_ulps(c, name, value, view.count, view.dtype == XD_DTYPE_F32 ? 2 : 1);
    }
}

/* Saves the shadows, destroys the average, and loads them into a new one, as a resumed job does. */
static bool ema_resume(golden_case *c, model *m, const xd_ema_desc *desc, xd_ema **ema) {
    xd_param saved[ROOM];
    golden_loans *l = golden_case_loans(c);
    const int64_t n = xd_ema_count(*ema);
    for (int64_t i = 0; i < n; i++) {
        saved[i] = xd_ema_view(*ema, i);
        const size_t bytes = (size_t)saved[i].count * xd_dtype_size(saved[i].dtype);
        void *copy = golden_memory(c, bytes + 1);
        memcpy(copy, golden_fetch(c, saved[i].value, bytes), bytes);
        saved[i].value = golden_out(l, copy, bytes);
        saved[i].name = m->names[i];
    }
    const xd_ema_record record = xd_ema_describe(*ema);
    xd_ema_destroy(*ema);
    *ema = NULL;
    const bool made = golden_ok(c, xd_ema_create(golden_ctx(c), m->params, m->count, desc, ema));
    return golden_ok(c, golden_back(l, made ? xd_ema_load(*ema, saved, n,
                                                          &(xd_ema_load_desc){ .record = &record }, NULL)
                                            : XD_OK)) &&
           made;
}

static void ema_trajectory(golden_case *c, bool widen) {
    double iterations[ROOM], betas[ROOM];
    model m;
    model_collect(c, &m, widen);
    const xd_ema_desc desc = ema_desc(c, widen);
    int calls = golden_numbers(c, "cfg.iterations", iterations, ROOM);
    if (ema_is_credit(c)) {
        calls = (int)golden_number(c, "cfg.steps", 0.0);
        if (calls > ROOM) calls = ROOM;
        for (int s = 0; s < calls; s++) iterations[s] = s + 1;
    }
    if (calls <= 0) {
        golden_fail(c, "no iterations");
        return;
    }
    const int resume = (int)golden_number(c, "cfg.resume_before_step", -1.0);
    xd_ema *ema = NULL;
    bool ok = golden_ok(c, xd_ema_create(golden_ctx(c), m.params, m.count, &desc, &ema));
    for (int s = 0; ok && s < calls; s++) {
        model_set(c, &m, s);
        if (s == resume) ok = ema_resume(c, &m, &desc, &ema);
        ok = ok && golden_ok(c, xd_ema_update(ema, (int64_t)iterations[s], NULL)) &&
             golden_ok(c, xd_ema_decay(golden_ctx(c), &desc, (int64_t)iterations[s], &betas[s]));
        if (ok) ema_check(c, ema, s, widen);
    }
    if (ok && !widen) golden_double(c, "out.beta", betas, calls);
    xd_ema_destroy(ema);
    golden_back(&m.loans, XD_OK);
}

static bool ema_claims(const golden_case *c) {
    return golden_is(c, "area", "ema") && (ema_is_credit(c) || golden_text(c, "cfg.iterations")) &&
           !golden_text(c, "cfg.configs");
}

static void ema_run(golden_case *c) {
    ema_trajectory(c, false);
    if (ema_dtype(c) == XD_DTYPE_F32) ema_trajectory(c, true);
}

/* A field of one flat JSON object in [at, end). */
static const char *table_field(const char *at, const char *end, const char *key) {
    char quoted[NAME];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *found = strstr(at, quoted);
    if (!found || found >= end) return NULL;
    found += strlen(quoted);
    while (*found == ' ') found++;
    return found;
}

static double table_number(const char *at, const char *end, const char *key, double absent) {
    const char *text = table_field(at, end, key);
    double value = absent;
    if (text) sscanf(text, "%lf", &value);
    return value;
}

static xd_ema_desc table_desc(const char *at, const char *end) {
    xd_ema_desc d;
    memset(&d, 0, sizeof d);
    const char *type = table_field(at, end, "type"), *ramp = table_field(at, end, "rampup_ratio");
    if (type && strncmp(type, "\"power\"", 7) == 0) d.schedule = XD_EMA_POWER;
    if (type && strncmp(type, "\"halflife\"", 10) == 0) d.schedule = XD_EMA_HALFLIFE;
    d.decay = table_number(at, end, "decay", 0.9999);
    d.gamma = table_number(at, end, "gamma", 16.97);
    d.halflife_kimg = table_number(at, end, "halflife_kimg", 500.0);
    d.rampup_ratio = table_number(at, end, "rampup_ratio", 0.05);
    d.disable_rampup = ramp && strncmp(ramp, "null", 4) == 0;
    d.batch_size = (int64_t)table_number(at, end, "batch_size", 1.0);
    return d;
}

static bool table_claims(const golden_case *c) {
    return golden_is(c, "area", "ema") && golden_text(c, "cfg.configs");
}

static void table_run(golden_case *c) {
    const golden_array iterations = golden_tensor(c, "in.iterations"),
                       expected = golden_tensor(c, "out.beta");
    double *got = (double *)golden_memory(c, (size_t)(expected.count + 1) * sizeof *got);
    int64_t filled = 0;
    const char *at = strchr(golden_text(c, "cfg.configs"), '{');
    while (at && filled + iterations.count <= expected.count) {
        const char *end = strchr(at, '}');
        if (!end) break;
        const xd_ema_desc desc = table_desc(at, end);
        for (int64_t i = 0; i < iterations.count; i++)
            if (!golden_ok(c,
                           xd_ema_decay(golden_ctx(c), &desc, (int64_t)iterations.values[i], &got[filled++])))
                return;
        at = strchr(end, '{');
    }
    golden_double(c, "out.beta", got, filled);
}

/* ---- optimizers ---- */

static bool optim_claims(const golden_case *c) {
    return golden_is(c, "area", "optim") && golden_text(c, "cfg.optimizer");
}

/* 0 when the library has no such optimizer. */
static bool optim_desc(golden_case *c, xd_optimizer_desc *d) {
    double betas[2] = { 0.9, 0.999 };
    golden_numbers(c, "cfg.betas", betas, 2);
    d->learning_rate = golden_number(c, "cfg.lr", 1e-3);
    d->beta1 = betas[0];
    d->beta2 = betas[1];
    d->eps = golden_number(c, "cfg.eps", 1e-8);
    d->momentum = golden_number(c, "cfg.momentum", 0.0);
    d->weight_decay = golden_number(c, "cfg.weight_decay", 0.0);
    if (golden_is(c, "cfg.optimizer", "Adam"))
        d->kind = XD_OPTIMIZER_ADAM_L2;
    else if (golden_is(c, "cfg.optimizer", "SGD"))
        d->kind = XD_OPTIMIZER_SGD;
    else if (!golden_is(c, "cfg.optimizer", "AdamW"))
        return false;
    return true;
}

/* Gradients of one step; a tensor that the file lacks is a parameter without gradient. */
static void optim_gradients(golden_case *c, model *m, int step) {
    char name[NAME];
    golden_back(&m->gradients, XD_OK); /* those of the step before */
    for (int i = 0; i < m->count; i++) {
        snprintf(name, sizeof name, "in.step%d.grad.%s", step, m->names[i]);
        m->params[i].gradient = NULL;
        if (!golden_has(c, name)) continue;
        const golden_array a = golden_tensor(c, name);
        m->params[i].gradient = golden_out(&m->gradients, golden_f32(c, &a), (size_t)a.count * sizeof(float));
    }
}

static void optim_check_values(golden_case *c, model *m, int step) {
    char name[NAME];
    golden_home(&m->loans);
    for (int i = 0; i < m->count; i++) {
        snprintf(name, sizeof name, "out.step%d.%s", step, m->names[i]);
        if (golden_has(c, name))
            golden_close(c, name, golden_widen(c, m->values[i], XD_DTYPE_F32, m->params[i].count),
                         m->params[i].count);
    }
}

static void optim_check_state(golden_case *c, const model *m, xd_optimizer *optimizer) {
    char name[NAME];
    for (int i = 0; i < m->count; i++) {
        const xd_optimizer_state state = xd_optimizer_state_at(optimizer, i);
        const char *const fields[3] = { "exp_avg", "exp_avg_sq", "momentum_buffer" };
        const float *const arrays[3] = { state.exp_avg, state.exp_avg_sq, state.exp_avg };
        for (int f = 0; f < 3; f++) {
            snprintf(name, sizeof name, "out.state.%s.%s", m->names[i], fields[f]);
            const int64_t count = m->params[i].count;
            const void *values = golden_fetch(c, arrays[f], (size_t)count * sizeof(float));
            if (golden_has(c, name) && values)
                golden_close(c, name, golden_widen(c, values, XD_DTYPE_F32, count), count);
        }
        snprintf(name, sizeof name, "out.state.%s.step", m->names[i]);
        const double step = (double)*(const int64_t *)golden_fetch(c, state.step, sizeof *state.step);
        if (golden_has(c, name)) golden_exact(c, name, &step, 1);
    }
}

static bool optim_step(golden_case *c, model *m, xd_optimizer *optimizer, int step) {
    char name[NAME];
    golden_loans *l = golden_case_loans(c);
    xd_gradient_norm_desc clip;
    xd_gradient_norm norm, *there = (xd_gradient_norm *)golden_out(l, &norm, sizeof norm);
    xd_optimizer_step_desc modifiers;
    memset(&clip, 0, sizeof clip);
    memset(&modifiers, 0, sizeof modifiers);
    clip.params = m->params;
    clip.param_count = m->count;
    clip.max_norm = golden_number(c, "cfg.max_norm", 0.0);
    clip.form = XD_CLIP_ALWAYS;
    if (clip.max_norm > 0.0) {
        if (!golden_ok(c, xd_gradient_norm_compute(golden_ctx(c), NULL, &clip, there))) return false;
        golden_home(l);
        snprintf(name, sizeof name, "out.total_norm_step%d", step);
        if (golden_has(c, name)) golden_close(c, name, &norm.norm, 1);
        modifiers.gradient_scale = &there->coefficient;
    }
    return golden_ok(c, golden_back(l, xd_optimizer_step(optimizer, &modifiers, NULL)));
}

static void optim_run(golden_case *c) {
    double rates[ROOM];
    model m;
    model_collect(c, &m, false);
    xd_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = m.params;
    desc.param_count = m.count;
    if (!optim_desc(c, &desc)) {
        golden_skip(c, golden_text(c, "cfg.optimizer"));
        golden_back(&m.loans, XD_OK);
        return;
    }
    const int rate_count = golden_numbers(c, "cfg.lr_schedule", rates, ROOM);
    xd_optimizer *optimizer = NULL;
    bool ok = golden_ok(c, xd_optimizer_create(golden_ctx(c), &desc, &optimizer));
    for (int s = 0; ok && s < (int)golden_number(c, "cfg.steps", 0.0); s++) {
        if (s < rate_count) ok = golden_ok(c, xd_optimizer_set_learning_rate(optimizer, rates[s]));
        optim_gradients(c, &m, s);
        ok = ok && optim_step(c, &m, optimizer, s);
        if (ok) optim_check_values(c, &m, s);
    }
    if (ok) optim_check_state(c, &m, optimizer);
    xd_optimizer_destroy(optimizer);
    golden_back(&m.gradients, XD_OK);
    golden_back(&m.loans, XD_OK);
}

/* ---- clipping ---- */

static bool clip_claims(const golden_case *c) {
    return golden_is(c, "area", "optim") && !golden_text(c, "cfg.optimizer") &&
           golden_text(c, "cfg.max_norm");
}

/* in.grad, or in.grad0, in.grad1, ... as gradients of nameless parameters. */
static int clip_collect(golden_case *c, xd_param *params, float **gradients) {
    int n = 0;
    for (int i = 0; i < golden_tensor_count(c) && n < ROOM; i++) {
        const char *name = golden_tensor_name(c, i);
        if (strncmp(name, "in.grad", 7) != 0) continue;
        const golden_array a = golden_tensor(c, name);
        memset(&params[n], 0, sizeof params[n]);
        params[n].name = name + 3;
        params[n].dtype = XD_DTYPE_F32;
        params[n].count = a.count;
        gradients[n] = golden_f32(c, &a);
        params[n].gradient = golden_out(golden_case_loans(c), gradients[n], (size_t)a.count * sizeof(float));
        n++;
    }
    return n;
}

static void clip_run(golden_case *c) {
    char name[NAME];
    xd_param params[ROOM];
    float *gradients[ROOM];
    golden_loans *l = golden_case_loans(c);
    const int n = clip_collect(c, params, gradients);
    const double max_norm = golden_number(c, "cfg.max_norm", 0.0);
    const double type =
        golden_is(c, "cfg.norm_type", "inf") ? (double)INFINITY : golden_number(c, "cfg.norm_type", 2.0);
    const bool given = golden_text(c, "cfg.total_norm") != NULL; /* NeMo passes the norm in */
    xd_gradient_norm_desc desc;
    xd_gradient_norm norm;
    memset(&desc, 0, sizeof desc);
    memset(&norm, 0, sizeof norm);
    xd_gradient_norm *there = (xd_gradient_norm *)golden_out(l, &norm, sizeof norm);
    desc.params = params;
    desc.param_count = n;
    desc.type = type == 1.0 ? XD_NORM_L1 : type == 2.0 ? XD_NORM_L2 : XD_NORM_MAX;
    if (desc.type == XD_NORM_MAX && !isinf(type)) {
        golden_skip(c, "norms other than 1, 2 and infinity");
        return;
    }
    if (!golden_ok(c, xd_gradient_norm_compute(golden_ctx(c), NULL, &desc, there))) return;
    golden_home(l);
    if (golden_has(c, "out.total_norm")) golden_close(c, "out.total_norm", &norm.norm, 1);
    const float factor =
        given ? xd_clip_coefficient(XD_CLIP_ABOVE_NEMO, max_norm, golden_number(c, "cfg.total_norm", 0.0))
              : xd_clip_coefficient(XD_CLIP_ALWAYS, max_norm, norm.norm);
    if (!golden_ok(c, golden_back(l, xd_clip_gradients(golden_ctx(c), params, n, factor)))) return;
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof name, "out.%s", params[i].name);
        golden_close(c, name, golden_widen(c, gradients[i], XD_DTYPE_F32, params[i].count), params[i].count);
    }
}

const golden_kind golden_kinds_ema[] = { { "ema", ema_claims, ema_run },
                                         { "ema decay table", table_claims, table_run },
                                         { NULL, NULL, NULL } };

const golden_kind golden_kinds_optim[] = { { "optimizer", optim_claims, optim_run },
                                           { "clip", clip_claims, clip_run },
                                           { NULL, NULL, NULL } };
