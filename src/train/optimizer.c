#include <math.h>
#include <string.h>

struct xd_optimizer {
    xd_ctx *ctx;
    xd_optimizer_desc desc;
    xd_optimizer_group *groups; /* [desc.group_count], defaults filled in; at least one */
    xd_optimizer_state *states; /* [desc.param_count] */
    int64_t *steps;             /* [desc.param_count] */
    xd_param *created;          /* [desc.param_count]; the list at creation, to notice changes */
    xd_update_array *updates;   /* [desc.param_count]; filled anew in every step */
};

XD_PRIVATE bool xdi_train_refused(const xd_status *status) {
    return status && (status->label_out_of_range != 0 || status->not_finite != 0 ||
                      status->nothing_counted != 0 || status->overflow != 0);
}

XD_PRIVATE xd_launch xdi_train_launch(xd_ctx *ctx) {
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    return launch;
}

XD_PRIVATE xd_dtype xdi_train_gradient_dtype(const xd_param *param) {
    return param->gradient_dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : param->gradient_dtype;
}

XD_PRIVATE bool xdi_train_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

static bool xdi_optimizer_owns(const xd_param *param) {
    return !param->frozen && !param->buffer;
}

static void xdi_optimizer_defaults(xd_optimizer_desc *d) {
    if (d->learning_rate == 0.0) d->learning_rate = 1e-3;
    if (d->beta1 == 0.0) d->beta1 = 0.9;
    if (d->beta2 == 0.0) d->beta2 = 0.999;
    if (d->eps == 0.0) d->eps = 1e-8;
    if (d->weight_decay == 0.0 && d->kind == XD_OPTIMIZER_ADAMW) d->weight_decay = 1e-2;
    if (!d->groups) d->group_count = 0;
}

/* False for NaN too. */
static bool xdi_optimizer_at_least_zero(double value) {
    return value >= 0.0 && value < HUGE_VAL;
}

static xd_result xdi_optimizer_validate_numbers(xd_ctx *ctx, const xd_optimizer_desc *d) {
    XDI_REQUIRE(ctx, (int)d->kind >= 0 && d->kind <= XD_OPTIMIZER_SGD, XD_ERROR_ARGUMENT,
                "optimizer kind %d is unknown", (int)d->kind);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->learning_rate), XD_ERROR_ARGUMENT,
                "learning_rate %g is negative or not finite", d->learning_rate);
    XDI_REQUIRE(ctx, d->beta1 >= 0.0 && d->beta1 < 1.0, XD_ERROR_ARGUMENT, "beta1 %g is outside [0, 1)",
                d->beta1);
    XDI_REQUIRE(ctx, d->beta2 >= 0.0 && d->beta2 < 1.0, XD_ERROR_ARGUMENT, "beta2 %g is outside [0, 1)",
                d->beta2);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->eps), XD_ERROR_ARGUMENT,
                "eps %g is negative or not finite", d->eps);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->momentum), XD_ERROR_ARGUMENT,
                "momentum %g is negative or not finite", d->momentum);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->weight_decay), XD_ERROR_ARGUMENT,
                "weight_decay %g is negative or not finite", d->weight_decay);
    for (int i = 0; i < d->group_count; i++) {
        const xd_optimizer_group *g = &d->groups[i];
        XDI_REQUIRE(ctx,
                    xdi_optimizer_at_least_zero(g->learning_rate_scale) &&
                        xdi_optimizer_at_least_zero(g->weight_decay),
                    XD_ERROR_ARGUMENT,
                    "group %d: learning_rate_scale %g or weight_decay %g is negative or not finite", i,
                    g->learning_rate_scale, g->weight_decay);
    }
    return XD_OK;
}

static xd_result xdi_optimizer_validate(xd_ctx *ctx, const xd_optimizer_desc *d) {
    XDI_TRY(xdi_optimizer_validate_numbers(ctx, d));
    XDI_REQUIRE(ctx, d->param_count >= 0 && (d->params || d->param_count == 0), XD_ERROR_ARGUMENT,
                "%lld parameters at %p", (long long)d->param_count, (const void *)d->params);
    const int groups = d->group_count > 0 ? d->group_count : 1;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        const char *name = p->name ? p->name : "(unnamed)";
        if (!xdi_optimizer_owns(p)) continue;
        XDI_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                    "%s: %lld elements at %p", name, (long long)p->count, p->value);
        XDI_REQUIRE(ctx, xdi_train_takes(p->dtype), XD_ERROR_DTYPE,
                    "%s: parameters are F32, BF16 or F16, not %s", name, xd_dtype_name(p->dtype));
        XDI_REQUIRE(ctx, p->group >= 0 && p->group < groups, XD_ERROR_ARGUMENT,
                    "%s: group %d, but there are %d", name, p->group, groups);
    }
    return XD_OK;
}

/* Takes n floats; an array of none gets an address all the same, or NULL in the planning run. */
static float *xdi_optimizer_take(xd_arena *arena, int64_t n) {
    return (float *)xd_arena_take_pointer(arena, (size_t)n * sizeof(float));
}

static void xdi_optimizer_take_state(xd_arena *arena, const xd_optimizer_desc *d, const xd_param *p,
                                     xd_optimizer_state *state) {
    xd_optimizer_state taken;
    memset(&taken, 0, sizeof taken);
    if (xdi_optimizer_owns(p)) {
        if (p->dtype != XD_DTYPE_F32) taken.master = xdi_optimizer_take(arena, p->count);
        taken.exp_avg = xdi_optimizer_take(arena, p->count);
        if (d->kind != XD_OPTIMIZER_SGD) taken.exp_avg_sq = xdi_optimizer_take(arena, p->count);
    }
    if (state) *state = taken;
}

/* Lays everything out behind the optimizer itself. Run once without memory for the size, once with it. */
static void xdi_optimizer_lay_out(xd_arena *arena, const xd_optimizer_desc *d, xd_optimizer *o) {
    const size_t n = (size_t)d->param_count, groups = d->group_count > 0 ? (size_t)d->group_count : 1;
    void *self = xd_arena_take_pointer(arena, sizeof *o);
    void *group = xd_arena_take_pointer(arena, groups * sizeof *o->groups);
    void *states = xd_arena_take_pointer(arena, n * sizeof *o->states);
    void *steps = xd_arena_take_pointer(arena, n * sizeof *o->steps);
    void *created = xd_arena_take_pointer(arena, n * sizeof *o->created);
    void *updates = xd_arena_take_pointer(arena, n * sizeof *o->updates);
    if (o) {
        XD_ASSERT(self == (void *)o);
        (void)self;
        o->groups = (xd_optimizer_group *)group;
        o->states = (xd_optimizer_state *)states;
        o->steps = (int64_t *)steps;
        o->created = (xd_param *)created;
        o->updates = (xd_update_array *)updates;
    }
    for (int64_t i = 0; i < d->param_count; i++)
        xdi_optimizer_take_state(arena, d, &d->params[i], o ? &o->states[i] : NULL);
}

static void xdi_optimizer_fill(xd_optimizer *o) {
    const xd_optimizer_desc *d = &o->desc;
    o->groups[0].learning_rate_scale = 1.0;
    o->groups[0].weight_decay = d->weight_decay;
    for (int i = 0; i < d->group_count; i++) {
        o->groups[i] = d->groups[i];
        if (o->groups[i].learning_rate_scale == 0.0) o->groups[i].learning_rate_scale = 1.0;
        if (o->groups[i].weight_decay == 0.0) o->groups[i].weight_decay = d->weight_decay;
    }
    if (d->group_count == 0) o->desc.group_count = 1;
    o->desc.groups = o->groups;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        o->created[i] = *p;
        o->states[i].step = &o->steps[i];
        if (o->states[i].master)
            for (int64_t k = 0; k < p->count; k++)
                o->states[i].master[k] = (float)xd_load_f64(p->value, p->dtype, k);
    }
}

XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out) {
    xd_optimizer_desc d = *desc;
    xdi_optimizer_defaults(&d);
    XDI_TRY(xdi_optimizer_validate(ctx, &d));
    xd_arena plan = xd_arena_over(NULL, 0);
    xdi_optimizer_lay_out(&plan, &d, NULL);
    xd_optimizer *o = (xd_optimizer *)xd_allocate(ctx, plan.peak);
    if (!o)
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for the state of %lld parameters: %zu bytes",
                        (long long)d.param_count, plan.peak);
    xd_arena arena = xd_arena_over(o, plan.peak);
    xdi_optimizer_lay_out(&arena, &d, o);
    o->ctx = ctx;
    o->desc = d;
    xdi_optimizer_fill(o);
    *out = o;
    return XD_OK;
}

XD_API void xd_optimizer_destroy(xd_optimizer *optimizer) {
    if (optimizer) xd_release(optimizer->ctx, optimizer);
}

XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer) {
    return &optimizer->desc;
}

XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate) {
    XDI_REQUIRE(optimizer->ctx, xdi_optimizer_at_least_zero(learning_rate), XD_ERROR_ARGUMENT,
                "learning_rate %g is negative or not finite", learning_rate);
    optimizer->desc.learning_rate = learning_rate;
    return XD_OK;
}

XD_API xd_optimizer_state xd_optimizer_get_state(xd_optimizer *optimizer, int64_t index) {
    xd_optimizer_state none;
    memset(&none, 0, sizeof none);
    return index >= 0 && index < optimizer->desc.param_count ? optimizer->states[index] : none;
}

static bool xdi_optimizer_same(const xd_param *now, const xd_param *created) {
    return now->value == created->value && now->dtype == created->dtype && now->count == created->count &&
           now->frozen == created->frozen && now->buffer == created->buffer && now->group == created->group;
}

/* Product and difference are rounded separately, whatever the compiler would like to fuse. */
static float xdi_optimizer_decay(double learning_rate, double weight_decay) {
    volatile double product = learning_rate * weight_decay;
    return (float)(1.0 - product);
}

/* The update of parameter `index` for its next step, t. Scalars are formed in double and rounded once. */
static xd_update_array xdi_optimizer_update(const xd_optimizer *o, int64_t index) {
    const xd_optimizer_desc *d = &o->desc;
    const xd_param *p = &d->params[index];
    const xd_optimizer_state *state = &o->states[index];
    const xd_optimizer_group *group = &o->groups[p->group];
    const double learning_rate = d->learning_rate * group->learning_rate_scale;
    const double weight_decay = p->no_decay ? 0.0 : group->weight_decay;
    const double t = (double)(*state->step + 1);
    xd_update_array u;
    memset(&u, 0, sizeof u);
    u.master = state->master ? state->master : (float *)p->value;
    u.first = state->exp_avg;
    u.second = state->exp_avg_sq;
    u.value = state->master ? p->value : NULL;
    u.value_dtype = p->dtype;
    u.gradient = p->gradient;
    u.gradient_dtype = xdi_train_gradient_dtype(p);
    u.count = p->count;
    u.decay = xdi_optimizer_decay(learning_rate, weight_decay);
    u.weight_decay = (float)weight_decay;
    u.fresh = *state->step == 0;
    u.step_size = (float)learning_rate;
    if (d->kind != XD_OPTIMIZER_SGD) {
        u.step_size = (float)(learning_rate / (1.0 - pow(d->beta1, t)));
        u.root_correction = (float)sqrt(1.0 - pow(d->beta2, t));
    }
    return u;
}

static xd_update_args xdi_optimizer_args(const xd_optimizer *o, const float *gradient_scale) {
    const xd_optimizer_desc *d = &o->desc;
    xd_update_args args;
    memset(&args, 0, sizeof args);
    args.arrays = o->updates;
    args.gradient_scale = gradient_scale && *gradient_scale != 1.0f ? gradient_scale : NULL;
    args.one_minus_beta1 = (float)(1.0 - d->beta1);
    args.one_minus_beta2 = (float)(1.0 - d->beta2);
    args.beta2 = (float)d->beta2;
    args.eps = (float)d->eps;
    args.momentum = (float)d->momentum;
    args.couple_decay = d->kind == XD_OPTIMIZER_ADAM_L2;
    args.maximize = d->maximize;
    return args;
}

XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped) {
    const xd_optimizer_desc *d = &optimizer->desc;
    const xd_launch launch = xdi_train_launch(optimizer->ctx);
    const xd_optimizer_kernels kernels = xd_ctx_kernels(optimizer->ctx).optimizer;
    if (desc && xdi_train_refused(desc->status)) {
        if (skipped) *skipped = true;
        return XD_OK;
    }
    xd_update_args args = xdi_optimizer_args(optimizer, desc ? desc->gradient_scale : NULL);
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        XDI_REQUIRE(optimizer->ctx, xdi_optimizer_same(p, &optimizer->created[i]), XD_ERROR_STATE,
                    "%s: value, dtype, count or flags changed since creation",
                    p->name ? p->name : "(unnamed)");
        if (p->gradient && xdi_optimizer_owns(p))
            optimizer->updates[args.array_count++] = xdi_optimizer_update(optimizer, i);
    }
    XDI_TRY(d->kind == XD_OPTIMIZER_SGD ? kernels.sgd(&launch, &args) : kernels.adam(&launch, &args));
    for (int64_t i = 0; i < d->param_count; i++)
        if (d->params[i].gradient && xdi_optimizer_owns(&d->params[i])) optimizer->steps[i]++;
    if (skipped) *skipped = false;
    return XD_OK;
}
