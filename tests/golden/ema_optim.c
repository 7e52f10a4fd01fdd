/* Golden cases of the areas ema and optim. */
#include "golden.h"
#include "averages.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ROOM = 256, NAME = 256 }; /* tensors of a toy model; bytes of a tensor's name */

/* ---- EMA ---- */

typedef struct model {
    int count;
    const char *names[ROOM]; /* "w" of "in.init.w" */
    void *values[ROOM];      /* on the host; params holds what is lent of them */
    xd_param params[ROOM];
    golden_loans loans, gradients;
} model;

/* Is a tensor of the model a buffer, which an average copies? Those that hold no floats are, and those that the file lists in
 * cfg.buffers; without a list, the statistics of PyTorch's batch norm. */
static bool is_buffer(golden_case *c, const char *name, xd_dtype dtype) {
    const char *list = golden_text(c, "cfg.buffers"), *last = strrchr(name, '.');
    xd_json *names = NULL;
    bool listed = false;
    if (!xd_dtype_is_floating(dtype)) return true;
    last = last ? last + 1 : name;
    if (!list) return strcmp(last, "running_mean") == 0 || strcmp(last, "running_var") == 0;
    if (!golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, list, strlen(list), &names))) return false;
    for (const xd_json *item = xd_json_first(names); item; item = xd_json_next(item)) {
        size_t bytes = 0;
        const char *text = xd_json_string(item, &bytes);
        listed = listed || (text && strcmp(text, name) == 0);
    }
    xd_json_destroy(golden_ctx(c), names);
    return listed;
}

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
        p->buffer = is_buffer(c, p->name, a.dtype);
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

static xd_dtype dtype_of(golden_case *c, const char *key) {
    static const char *const names[] = { "float32", "bfloat16", "float16", NULL };
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    return dtypes[golden_choice(c, key, names, 0)];
}

/* cfg.param_dtype is that of the model in the file. */
static void check_model_dtype(golden_case *c, const model *m) {
    const xd_dtype expected = dtype_of(c, "cfg.param_dtype");
    for (int i = 0; golden_text(c, "cfg.param_dtype") && i < m->count; i++)
        if (xd_dtype_is_floating(m->params[i].dtype) && m->params[i].dtype != expected)
            golden_fail(c, "cfg.param_dtype is %s, but in.init.%s is %s", xd_dtype_name(expected),
                        m->names[i], xd_dtype_name(m->params[i].dtype));
}

static xd_ema_desc ema_desc(golden_case *c, bool widen) {
    static const char *const types[] = { "constant", "power", "halflife", NULL };
    static const xd_ema_schedule schedules[] = { XD_EMA_CONSTANT, XD_EMA_POWER, XD_EMA_HALFLIFE };
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
    d.schedule = schedules[golden_choice(c, "cfg.type", types, 0)];
    if (ema_is_credit(c)) {
        d.schedule = XD_EMA_RAMP;
        d.init_from_current = true;
        d.compat_credit = true;
    }
    d.live_dtype = widen || golden_is(c, "cfg.dtype", "null");
    d.dtype = dtype_of(c, "cfg.dtype");
    return d;
}

/* Compares the shadow after call `step` with the file, in the dtype of the run. */
static void ema_check(golden_case *c, const xd_ema *ema, int step, bool widen) {
    char name[NAME];
    for (int64_t i = 0; i < xd_ema_describe(ema).count; i++) {
        const xd_param view = xd_ema_view(ema, i).shadow;
        snprintf(name, sizeof name, "%s.step%d.%s", widen ? "out" : "out32", step, view.name);
        if (!widen && view.dtype != XD_DTYPE_F32 && !golden_wants(c, name)) /* the same of a narrow shadow */
            snprintf(name, sizeof name, "out.step%d.%s", step, view.name);
        if (!golden_wants(c, name)) continue;
        const void *value = golden_fetch(c, view.value, (size_t)view.count * xd_dtype_size(view.dtype));
        const double *got = golden_widen(c, value, view.dtype, view.count);
        if (view.buffer)
            golden_exact(c, name, got, view.count);
        else if (widen)
            golden_double(c, name, got, view.count);
        else if (view.dtype == XD_DTYPE_F16)
            golden_close(c, name, got, view.count);
        else
            golden_ulps(c, name, value, view.dtype, view.count, view.dtype == XD_DTYPE_F32 ? 2 : 1);
    }
}

/* What the model holds after the average was written over it, in the model's dtypes. */
static void ema_check_copy(golden_case *c, const xd_ema *ema, model *m) {
    char name[NAME];
    if (!golden_ok(c, xd_ema_copy_to(ema, m->params, m->count, false, NULL))) return;
    golden_home(&m->loans);
    for (int i = 0; i < m->count; i++) {
        const xd_param *p = &m->params[i];
        snprintf(name, sizeof name, "out32.copy_to.%s", p->name);
        if (!golden_wants(c, name)) continue;
        const double *got = golden_widen(c, m->values[i], p->dtype, p->count);
        if (p->dtype == XD_DTYPE_F32 || p->dtype == XD_DTYPE_BF16)
            golden_ulps(c, name, m->values[i], p->dtype, p->count, p->dtype == XD_DTYPE_F32 ? 2 : 1);
        else if (p->buffer)
            golden_exact(c, name, got, p->count);
        else
            golden_close(c, name, got, p->count);
    }
}

/* Saves the shadows, destroys the average, and loads them into a new one, as a resumed job does. */
static bool ema_resume(golden_case *c, model *m, const xd_ema_desc *desc, xd_ema **ema) {
    xd_param saved[ROOM];
    golden_loans *l = golden_case_loans(c);
    const int64_t n = xd_ema_describe(*ema).count;
    for (int64_t i = 0; i < n; i++) {
        saved[i] = xd_ema_view(*ema, i).shadow;
        const size_t bytes = (size_t)saved[i].count * xd_dtype_size(saved[i].dtype);
        void *copy = golden_memory(c, bytes + 1);
        memcpy(copy, golden_fetch(c, saved[i].value, bytes), bytes);
        saved[i].value = golden_out(l, copy, bytes);
        saved[i].name = m->names[i];
    }
    const xd_ema_record record = xd_ema_describe(*ema).record;
    xd_ema_destroy(*ema);
    *ema = NULL;
    const bool made = golden_ok(c, average_create(golden_ctx(c), m->params, m->count, desc, ema));
    return golden_ok(c, golden_back(l, made ? average_load(*ema, saved, n,
                                                           &(xd_ema_load_desc){ .record = &record }, NULL)
                                            : XD_OK)) &&
           made;
}

/* The decay of an iteration, of an average of nothing. */
static bool ema_beta(golden_case *c, const xd_ema_desc *desc, double iteration, double *beta) {
    xd_ema *ema = NULL;
    const bool ok = golden_ok(c, average_create(golden_ctx(c), NULL, 0, desc, &ema)) &&
                    golden_ok(c, xd_ema_update(ema, (int64_t)iteration, NULL));
    if (ok) *beta = xd_ema_describe(ema).decay;
    xd_ema_destroy(ema);
    return ok;
}

static void ema_trajectory(golden_case *c, bool widen) {
    double iterations[ROOM], betas[ROOM];
    model m;
    model_collect(c, &m, widen);
    const xd_ema_desc desc = ema_desc(c, widen);
    if (!widen) check_model_dtype(c, &m);
    int calls = golden_numbers(c, "cfg.iterations", iterations, ROOM);
    if (ema_is_credit(c)) {
        calls = golden_integer(c, "cfg.steps", 0, 1, ROOM);
        for (int s = 0; s < calls; s++) iterations[s] = s + 1;
    }
    if (calls <= 0) {
        golden_fail(c, "no iterations");
        return;
    }
    const int resume = (int)golden_number(c, "cfg.resume_before_step", -1.0);
    xd_ema *ema = NULL;
    bool ok = golden_ok(c, average_create(golden_ctx(c), m.params, m.count, &desc, &ema));
    for (int s = 0; ok && s < calls; s++) {
        model_set(c, &m, s);
        if (s == resume) ok = ema_resume(c, &m, &desc, &ema);
        ok = ok && golden_ok(c, xd_ema_update(ema, (int64_t)iterations[s], NULL)) &&
             ema_beta(c, &desc, iterations[s], &betas[s]);
        if (ok) ema_check(c, ema, s, widen);
    }
    if (ok && !widen) golden_double(c, "out.beta", betas, calls);
    if (ok && !widen) ema_check_copy(c, ema, &m);
    xd_ema_destroy(ema);
    golden_back(&m.loans, XD_OK);
}

static bool ema_claims(const golden_case *c) {
    return golden_is(c, "area", "ema") && (ema_is_credit(c) || golden_text(c, "cfg.iterations")) &&
           !golden_text(c, "cfg.configs");
}

static void ema_run(golden_case *c) {
    ema_trajectory(c, false);
    if (dtype_of(c, "cfg.dtype") == XD_DTYPE_F32)
        ema_trajectory(c, true);
    else
        golden_inert(c, "out.step*"); /* a narrow shadow in double is no other thing: out32 repeated */
}

/* One configuration of the table: a JSON object whose keys are those of xd_ema_desc. */
static xd_ema_desc table_desc(golden_case *c, const xd_json *config) {
    static const char *const keys[] = { "decay", "gamma", "halflife_kimg", "rampup_ratio", "batch_size" };
    double values[5] = { 0.9999, 16.97, 500.0, 0.05, 1.0 };
    xd_ema_desc d;
    memset(&d, 0, sizeof d);
    for (const xd_json *item = xd_json_first(config); item; item = xd_json_next(item)) {
        const char *key = xd_json_key(item, NULL), *type = xd_json_string(item, NULL);
        int known = 0;
        while (known < 5 && strcmp(key, keys[known]) != 0) known++;
        if (known < 5 && xd_json_double(item, &values[known])) continue;
        if (strcmp(key, "rampup_ratio") == 0 && xd_json_kind_of(item) == XD_JSON_NULL)
            d.disable_rampup = true;
        else if (strcmp(key, "type") == 0 && type && strcmp(type, "power") == 0)
            d.schedule = XD_EMA_POWER;
        else if (strcmp(key, "type") == 0 && type && strcmp(type, "halflife") == 0)
            d.schedule = XD_EMA_HALFLIFE;
        else if (strcmp(key, "type") != 0 || !type || strcmp(type, "constant") != 0)
            golden_fail(c, "cfg.configs: the key %s, or its value, is not known", key);
    }
    d.decay = values[0];
    d.gamma = values[1];
    d.halflife_kimg = values[2];
    d.rampup_ratio = values[3];
    d.batch_size = (int64_t)values[4];
    return d;
}

static bool table_claims(const golden_case *c) {
    return golden_is(c, "area", "ema") && golden_text(c, "cfg.configs");
}

static void table_run(golden_case *c) {
    const golden_array iterations = golden_tensor(c, "in.iterations");
    const char *text = golden_text(c, "cfg.configs");
    int64_t filled = 0;
    xd_json *configs = NULL;
    golden_inert(c, "cfg.iterations"); /* in.iterations once more */
    if (!golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, text, strlen(text), &configs))) return;
    const int64_t room = (int64_t)xd_json_count(configs) * iterations.count;
    double *got = (double *)golden_memory(c, (size_t)(room + 1) * sizeof *got);
    bool ok = true;
    for (const xd_json *item = xd_json_first(configs); item && ok; item = xd_json_next(item)) {
        const xd_ema_desc desc = table_desc(c, item);
        for (int64_t i = 0; ok && i < iterations.count; i++)
            ok = ema_beta(c, &desc, iterations.values[i], &got[filled++]);
    }
    xd_json_destroy(golden_ctx(c), configs);
    if (ok) golden_double(c, "out.beta", got, filled);
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
    d->maximize = golden_flag(c, "cfg.maximize", false);
    golden_lacks(c, "cfg.amsgrad", "false");
    golden_lacks(c, "cfg.nesterov", "false");
    golden_lacks(c, "cfg.dampening", "0");
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
            if (values) golden_close(c, name, golden_widen(c, values, XD_DTYPE_F32, count), count);
        }
        snprintf(name, sizeof name, "out.state.%s.step", m->names[i]);
        const double step = (double)*(const int64_t *)golden_fetch(c, state.step, sizeof *state.step);
        golden_exact(c, name, &step, 1);
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
        golden_close(c, name, &norm.norm, 1);
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
        golden_lacks(c, "cfg.optimizer", "AdamW, Adam and SGD");
        golden_back(&m.loans, XD_OK);
        return;
    }
    const int rate_count = golden_numbers(c, "cfg.lr_schedule", rates, ROOM);
    xd_optimizer *optimizer = NULL;
    bool ok = golden_ok(c, xd_optimizer_create(golden_ctx(c), &desc, &optimizer));
    const int steps = golden_integer(c, "cfg.steps", 0, 1, 1000000);
    for (int s = 0; ok && s < steps; s++) {
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
        golden_lacks(c, "cfg.norm_type", "1, 2 and inf");
        return;
    }
    if (!golden_ok(c, xd_gradient_norm_compute(golden_ctx(c), NULL, &desc, there))) return;
    golden_home(l);
    golden_close(c, "out.total_norm", &norm.norm, 1);
    const float factor =
        given ? xd_clip_factor(XD_CLIP_ABOVE_NEMO, max_norm, golden_number(c, "cfg.total_norm", 0.0))
              : xd_clip_factor(XD_CLIP_ALWAYS, max_norm, norm.norm);
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
