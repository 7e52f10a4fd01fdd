/* poison_train.h - families of optimizers, averages, norms and denominators. Elements of parameters are units: what happens
 * to one does not reach another. */
#ifndef XD_POISON_TRAIN_H
#define XD_POISON_TRAIN_H

#include "poison.h"
#include "averages.h"

enum { POISON_N = 21 };

typedef struct poison_train {
    xd_param param, origin;
    xd_optimizer_desc optimizer;
    xd_ema_desc ema;
    xd_gradient_norm_desc norm;
    xd_gradient_norm out;
    xd_positions positions;
    xd_denominator denominator;
    xd_status status, stop;
    double coefficient, decay;
    uint8_t mask[POISON_N];
    bool reported;
    float *shadow, zeros[POISON_N];
} poison_train;

static inline poison_train *poison_train_begin(poison_scene *s, int gradient_role, int value_role) {
    poison_train *p = (poison_train *)(s->own = poison_take(s, sizeof *p));
    poison_part *value = poison_matrix(s, "value", value_role, XD_DTYPE_F32, POISON_N, 1);
    poison_part *gradient = poison_matrix(s, "gradient", gradient_role, XD_DTYPE_F32, POISON_N, 1);
    poison_fill(value, 1, 0.0, 1.0);
    poison_fill(gradient, 2, 0.0, 1.0);
    p->param.name = "w";
    p->param.value = value->data;
    p->param.gradient = gradient->data;
    p->param.dtype = XD_DTYPE_F32;
    p->param.count = POISON_N;
    p->coefficient = 0.5;
    s->unit = 2;
    return p;
}

/* ---- xd_optimizer_step, through xd_optimizer_create: AdamW, Adam, SGD; the fourth is told to skip the step ---- */

static inline bool poison_optimizer_build(poison_scene *s) {
    poison_train *p = poison_train_begin(s, POISON_IN, POISON_IN | POISON_OUT);
    p->optimizer = s->variant == 1   ? xd_adam_defaults(&p->param, 1)
                   : s->variant == 2 ? (xd_optimizer_desc){ .params = &p->param,
                                                            .param_count = 1,
                                                            .kind = XD_OPTIMIZER_SGD,
                                                            .learning_rate = 1e-3 }
                                     : xd_adamw_defaults(&p->param, 1);
    p->optimizer.momentum = 0.9;
    p->optimizer.weight_decay = 0.01;
    p->stop.not_finite = s->variant == 3;
    poison_one(s, "learning_rate", POISON_IN | POISON_ONE, &p->optimizer.learning_rate);
    poison_one(s, "beta1", POISON_IN | POISON_ONE, &p->optimizer.beta1);
    poison_one(s, "beta2", POISON_IN | POISON_ONE, &p->optimizer.beta2);
    poison_one(s, "eps", POISON_IN | POISON_ONE, &p->optimizer.eps);
    poison_one(s, "momentum", POISON_IN | POISON_ONE, &p->optimizer.momentum);
    poison_one(s, "weight_decay", POISON_IN | POISON_ONE, &p->optimizer.weight_decay);
    return true;
}

static inline xd_result poison_optimizer_call(poison_scene *s) {
    poison_train *p = (poison_train *)s->own;
    xd_optimizer_step_desc step;
    xd_optimizer *optimizer = NULL;
    memset(&step, 0, sizeof step);
    step.status = &p->stop;
    xd_result result = xd_optimizer_create(s->ctx, &p->optimizer, &optimizer);
    for (int i = 0; i < 2 && result == XD_OK; i++) result = xd_optimizer_step(optimizer, &step, NULL);
    xd_optimizer_destroy(optimizer);
    return result;
}

static inline poison_verdict poison_expect_optimizer(const poison_scene *s, const poison_part *part,
                                                     double value) {
    const bool weight = isfinite(value) && value >= 0.0;
    if (part->role & POISON_ONE) {
        if (!strncmp(part->name, "beta", 4)) return weight && value < 1.0 ? POISON_SKIP : POISON_REFUSED;
        return weight ? POISON_SKIP : POISON_REFUSED; /* a rate of 1e30 is the caller's wish */
    }
    if (s->variant == 3) return part->role & POISON_OUT ? POISON_ALONE : POISON_IGNORED;
    return POISON_ALONE;
}

static const poison_family poison_family_optimizer = {
    "xd_optimizer_step",
    4,
    0,
    { true, false, false },
    poison_optimizer_build,
    poison_optimizer_call,
    NULL,
    poison_expect_optimizer,
    NULL,
    NULL,
};

/* ---- xd_optimizer_set_learning_rate, before a step ---- */

static inline bool poison_rate_build(poison_scene *s) {
    poison_train *p = poison_train_begin(s, 0, POISON_OUT);
    p->optimizer = xd_adamw_defaults(&p->param, 1);
    poison_one(s, "learning_rate", POISON_IN | POISON_ONE, &p->coefficient);
    return true;
}

static inline xd_result poison_rate_call(poison_scene *s) {
    poison_train *p = (poison_train *)s->own;
    xd_optimizer *optimizer = NULL;
    xd_result result = xd_optimizer_create(s->ctx, &p->optimizer, &optimizer);
    if (result == XD_OK) result = xd_optimizer_set_learning_rate(optimizer, p->coefficient);
    const double now = xd_optimizer_settings(optimizer)->learning_rate;
    CHECK(now == (result == XD_OK ? p->coefficient : p->optimizer.learning_rate));
    if (result == XD_OK) result = xd_optimizer_step(optimizer, NULL, NULL);
    xd_optimizer_destroy(optimizer);
    return result;
}

/* A rate of 1e30 is the caller's wish. */
static inline poison_verdict poison_expect_rate(const poison_scene *s, const poison_part *part,
                                                double value) {
    (void)s, (void)part;
    return !isfinite(value) || value < 0.0 ? POISON_REFUSED : value < 1e29 ? POISON_LEGAL : POISON_SKIP;
}

static const poison_family poison_family_rate = {
    .name = "xd_optimizer_set_learning_rate",
    .variants = 1,
    .layouts = { true, false, false },
    .build = poison_rate_build,
    .call = poison_rate_call,
    .expect = poison_expect_rate,
};

/* ---- xd_ema_update, through xd_ema_create: one variant for each schedule ---- */

static inline bool poison_ema_build(poison_scene *s) {
    poison_train *p = poison_train_begin(s, 0, POISON_IN);
    p->ema = xd_ema_defaults((xd_ema_schedule)s->variant);
    p->ema.init_from_current = true;
    p->shadow = (float *)poison_matrix(s, "shadow", POISON_OUT, XD_DTYPE_F32, POISON_N, 1)->data;
    poison_one(s, "decay", POISON_IN | POISON_ONE, &p->ema.decay);
    poison_one(s, "gamma", POISON_IN | POISON_ONE, &p->ema.gamma);
    poison_one(s, "halflife_kimg", POISON_IN | POISON_ONE, &p->ema.halflife_kimg);
    poison_one(s, "rampup_ratio", POISON_IN | POISON_ONE, &p->ema.rampup_ratio);
    return true;
}

static inline xd_result poison_ema_call(poison_scene *s) {
    poison_train *p = (poison_train *)s->own;
    xd_ema *ema = NULL;
    xd_result result = average_create(s->ctx, &p->param, 1, &p->ema, &ema);
    if (result == XD_OK) result = xd_ema_update(ema, 3, NULL);
    if (result == XD_OK) p->decay = xd_ema_describe(ema).decay;
    if (result == XD_OK) memcpy(p->shadow, xd_ema_view(ema, 0).shadow.value, POISON_N * sizeof *p->shadow);
    xd_ema_destroy(ema);
    return result;
}

/* Numbers of other schedules are checked, too. */
static inline poison_verdict poison_expect_ema(const poison_scene *s, const poison_part *part, double value) {
    if (!(part->role & POISON_ONE)) return POISON_ALONE;
    if (!strcmp(part->name, "halflife_kimg") && s->variant != (int)XD_EMA_HALFLIFE) return POISON_IGNORED;
    if (!isfinite(value)) return POISON_REFUSED;
    return POISON_LEGAL;
}

static const poison_family poison_family_ema = {
    "xd_ema_update",   4,    0,    { true, false, false }, poison_ema_build, poison_ema_call, NULL,
    poison_expect_ema, NULL, NULL,
};

/* ---- xd_ema_load and xd_ema_copy_to: conversions of elements; variants: f32, bf16 ---- */

static inline bool poison_shadow_build(poison_scene *s) {
    poison_train *p = poison_train_begin(s, 0, POISON_IN);
    const xd_dtype dtype = s->variant ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    p->ema = xd_ema_defaults(XD_EMA_CONSTANT);
    p->shadow = (float *)poison_matrix(s, "copy", POISON_OUT, dtype, POISON_N, 1)->data;
    return true;
}

/* The average is of zeros; it is loaded with the value, or made of it, and then copied. */
static inline xd_result poison_shadow_call(poison_scene *s) {
    poison_train *p = (poison_train *)s->own;
    const bool load = !strcmp(s->family->name, "xd_ema_load");
    xd_param target = p->param;
    xd_ema *ema = NULL;
    p->origin = p->param;
    if (load) p->origin.value = p->zeros;
    target.value = p->shadow;
    target.dtype = s->variant ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    p->ema.init_from_current = !load;
    xd_result result = average_create(s->ctx, &p->origin, 1, &p->ema, &ema);
    if (result == XD_OK)
        result = load ? average_load(ema, &p->param, 1, NULL, NULL) : xd_ema_update(ema, 1, NULL);
    if (result == XD_OK) result = xd_ema_copy_to(ema, &target, 1, false, NULL);
    xd_ema_destroy(ema);
    return result;
}

static inline poison_verdict poison_expect_shadow(const poison_scene *s, const poison_part *part,
                                                  double value) {
    (void)s, (void)part, (void)value;
    return POISON_ALONE;
}

static const poison_family poison_family_ema_load = {
    .name = "xd_ema_load",
    .variants = 2,
    .layouts = { true, false, false },
    .build = poison_shadow_build,
    .call = poison_shadow_call,
    .expect = poison_expect_shadow,
};
static const poison_family poison_family_ema_copy_to = {
    .name = "xd_ema_copy_to",
    .variants = 2,
    .layouts = { true, false, false },
    .build = poison_shadow_build,
    .call = poison_shadow_call,
    .expect = poison_expect_shadow,
};

/* ---- xd_gradient_norm_compute and xd_clip_gradients ---- */

static inline bool poison_norm_build(poison_scene *s) {
    poison_train *p = poison_train_begin(s, POISON_IN, 0);
    p->norm.params = &p->param;
    p->norm.param_count = 1;
    p->norm.type = (xd_norm_type)s->variant;
    p->norm.max_norm = 1.0;
    p->norm.status = &p->status;
    p->reported = true;
    s->status = &p->status;
    s->reported = &p->reported;
    poison_one(s, "max_norm", POISON_IN | POISON_ONE, &p->norm.max_norm);
    poison_one(s, "coefficient", POISON_TOTAL | POISON_SAME, &p->coefficient);
    return true;
}

static inline xd_result poison_norm_call(poison_scene *s) {
    poison_train *p = (poison_train *)s->own;
    p->norm.status = p->reported ? &p->status : NULL;
    const xd_result result = xd_gradient_norm_compute(s->ctx, s->data, &p->norm, &p->out);
    if (result == XD_OK) p->coefficient = (double)p->out.coefficient;
    return result;
}

static inline poison_verdict poison_expect_norm(const poison_scene *s, const poison_part *part,
                                                double value) {
    const poison_train *p = (const poison_train *)s->own;
    (void)p;
    if (part->role & POISON_ONE) return value >= 0.0 ? POISON_LEGAL : POISON_REFUSED;
    return POISON_NORM;
}

static const poison_family poison_family_norm = {
    "xd_gradient_norm_compute", 3,    0,    { true, false, true }, poison_norm_build, poison_norm_call, NULL,
    poison_expect_norm,         NULL, NULL,
};

static inline bool poison_clip_build(poison_scene *s) {
    poison_train_begin(s, POISON_IN | POISON_OUT, 0);
    return true;
}

static inline xd_result poison_clip_call(poison_scene *s) {
    const poison_train *p = (const poison_train *)s->own;
    return xd_clip_gradients(s->ctx, &p->param, 1, (float)p->coefficient);
}

static inline poison_verdict poison_expect_alone(const poison_scene *s, const poison_part *part,
                                                 double value) {
    (void)s, (void)part, (void)value;
    return POISON_ALONE;
}

static const poison_family poison_family_clip = {
    "xd_clip_gradients", 1,    0,    { true, false, false }, poison_clip_build, poison_clip_call, NULL,
    poison_expect_alone, NULL, NULL,
};

/* ---- xd_denominator_count ---- */

static inline bool poison_denominator_build(poison_scene *s) {
    poison_train *p = (poison_train *)(s->own = poison_take(s, sizeof *p));
    poison_part *weights = poison_matrix(s, "weights", POISON_IN, XD_DTYPE_F32, POISON_N, 1);
    poison_fill(weights, 1, 1.0, 0.5);
    memset(p->mask, 1, sizeof p->mask);
    p->positions.count = POISON_N;
    p->positions.mask = p->mask;
    p->positions.weights = (const float *)weights->data;
    poison_one(s, "value", POISON_TOTAL | POISON_SAME | POISON_LOOSE, &p->denominator.value);
    poison_one(s, "inverse", POISON_TOTAL | POISON_SAME | POISON_LOOSE, &p->denominator.inverse);
    s->unit = 2;
    return true;
}

static inline xd_result poison_denominator_call(poison_scene *s) {
    poison_train *p = (poison_train *)s->own;
    return xd_denominator_count(s->ctx, s->data, &p->positions, 1, &p->denominator);
}

static inline void poison_denominator_leave_out(poison_scene *s, int way) {
    (void)way;
    if (s->layout != POISON_ROWS_SPLIT || s->rank == 1) ((poison_train *)s->own)->mask[s->unit] = 0;
}

static inline poison_verdict poison_expect_denominator(const poison_scene *s, const poison_part *part,
                                                       double value) {
    (void)s, (void)part;
    return value >= 0.0 && value < 4194304.0 ? POISON_FINE : POISON_REFUSED;
}

static const poison_family poison_family_denominator = {
    "xd_denominator_count",
    1,
    1,
    { true, false, true },
    poison_denominator_build,
    poison_denominator_call,
    poison_denominator_leave_out,
    poison_expect_denominator,
    NULL,
    NULL,
};

#endif
