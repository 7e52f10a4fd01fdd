/* AdamW and SGD over lists of parameters. */

#include "comm/topology.h"
#include "train/internal.h"
#include "train/optimizer.h"

#include <math.h>
#include <string.h>

enum {
    XDI_OPTIMIZER_BESIDE = 8
}; /* averages in a step's pass, beside the one of its arrays; more are updated after it */

struct xd_optimizer {
    xd_ctx *ctx;
    xd_optimizer_desc desc;
    xd_optimizer_group *groups;   /* [desc.group_count], defaults filled in; at least one */
    xd_optimizer_state *states;   /* [desc.param_count] */
    xd_optimizer_state *reserved; /* [desc.param_count]; of what is thawed later; or NULL */
    int64_t *steps;               /* [desc.param_count], in memory of the device */
    void *device_memory;          /* memory of the states when it is not this block itself */
    uint64_t *keys;               /* [desc.param_count]; hashes of names; NULL without stochastic_bf16 */
    /* [desc.param_count]; the list at creation, then at the last step, to notice changes. */
    xd_param *created;
    xd_update_array *updates; /* [desc.param_count]; of the last step */
    int64_t update_count;
    double update_rate;   /* the learning rate of `updates` */
    const xd_ema *joined; /* whose shadows are in `updates`; NULL -> none are */
    bool listed;          /* a step of the list as it was has succeeded with `updates` */
    bool told_idle;       /* that no parameter has a gradient */
    xd_array_list *list;  /* of the updates, on a device; NULL on the CPU */
};

XD_API xd_optimizer_desc xd_adam_defaults(const xd_param *params, int64_t param_count) {
    xd_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.params = params;
    d.param_count = param_count;
    d.kind = XD_OPTIMIZER_ADAM_L2;
    d.learning_rate = 1e-3;
    d.beta1 = 0.9;
    d.beta2 = 0.999;
    d.eps = 1e-8;
    return d;
}

XD_API xd_optimizer_desc xd_adamw_defaults(const xd_param *params, int64_t param_count) {
    xd_optimizer_desc d = xd_adam_defaults(params, param_count);
    d.kind = XD_OPTIMIZER_ADAMW;
    d.weight_decay = 1e-2;
    return d;
}

static void xdi_optimizer_resolve(xd_optimizer_desc *d) {
    if (d->eps == 0.0) d->eps = 1e-8;
}

/* False for NaN too. */
static bool xdi_optimizer_at_least_zero(double value) {
    return value >= 0.0 && value < HUGE_VAL;
}

static xd_result xdi_optimizer_validate_numbers(xd_ctx *ctx, const xd_optimizer_desc *d) {
    XD_REQUIRE(ctx, (int)d->kind >= 0 && d->kind <= XD_OPTIMIZER_SGD, XD_ERROR_ARGUMENT,
               "optimizer kind %d is unknown", (int)d->kind);
    XD_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->learning_rate), XD_ERROR_ARGUMENT,
               "learning_rate %g is negative or not finite", d->learning_rate);
    XD_REQUIRE(ctx, d->beta1 >= 0.0 && d->beta1 < 1.0, XD_ERROR_ARGUMENT, "beta1 %g is outside [0, 1)",
               d->beta1);
    XD_REQUIRE(ctx, d->beta2 >= 0.0 && d->beta2 < 1.0, XD_ERROR_ARGUMENT, "beta2 %g is outside [0, 1)",
               d->beta2);
    XD_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->eps), XD_ERROR_ARGUMENT,
               "eps %g is negative or not finite", d->eps);
    XD_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->momentum), XD_ERROR_ARGUMENT,
               "momentum %g is negative or not finite", d->momentum);
    XD_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->weight_decay), XD_ERROR_ARGUMENT,
               "weight_decay %g is negative or not finite", d->weight_decay);
    for (int i = 0; i < d->group_count; i++) {
        const xd_optimizer_group *g = &d->groups[i];
        XD_REQUIRE(ctx,
                   xdi_optimizer_at_least_zero(g->learning_rate_scale) &&
                       xdi_optimizer_at_least_zero(g->weight_decay),
                   XD_ERROR_ARGUMENT,
                   "group %d: learning_rate_scale %g or weight_decay %g is negative or not finite", i,
                   g->learning_rate_scale, g->weight_decay);
    }
    return XD_OK;
}

/* Whether a value is the parameter itself, rounded at random, instead of a copy of a master. */
static bool xdi_optimizer_rounds(const xd_optimizer_desc *d, const xd_param *p) {
    return d->stochastic_bf16 && p->dtype == XD_DTYPE_BF16;
}

/* Whether memory is set aside for a parameter that is frozen at creation. */
static bool xdi_optimizer_reserves(const xd_optimizer_desc *d, const xd_param *p) {
    return d->reserve_frozen && p->frozen && !p->buffer && xdi_train_takes(p->dtype);
}

static xd_result xdi_optimizer_validate(xd_ctx *ctx, const xd_optimizer_desc *d) {
    XD_REQUIRE(ctx, d->param_count >= 0 && (d->params || d->param_count == 0), XD_ERROR_ARGUMENT,
               "%lld parameters, params at %p", (long long)d->param_count, (const void *)d->params);
    XD_REQUIRE(ctx, d->group_count >= 0, XD_ERROR_ARGUMENT, "%d groups of parameters", d->group_count);
    XD_REQUIRE(ctx, (d->groups != NULL) == (d->group_count > 0), XD_ERROR_ARGUMENT,
               "%s list of groups, and group_count %d", d->groups ? "a" : "no", d->group_count);
    XD_TRY(xdi_optimizer_validate_numbers(ctx, d));
    const int groups = d->group_count > 0 ? d->group_count : 1;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        const char *name = p->name ? p->name : "(unnamed)";
        if (!xdi_train_owns(p) && !xdi_optimizer_reserves(d, p)) continue;
        XD_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                   "%s: %lld elements, value at %p", name, (long long)p->count, p->value);
        XD_REQUIRE(ctx, xdi_train_takes(p->dtype), XD_ERROR_DTYPE,
                   "%s: parameters are F32, BF16 or F16, not %s", name, xd_dtype_name(p->dtype));
        XD_REQUIRE(ctx, p->group >= 0 && p->group < groups, XD_ERROR_ARGUMENT,
                   "%s: group %d, but there are %d", name, p->group, groups);
        if (!xdi_optimizer_rounds(d, p)) continue;
        XD_REQUIRE(ctx, p->name && p->first >= 0, XD_ERROR_ARGUMENT,
                   "%s: its rounding at random needs a name and a first element, which is %lld", name,
                   (long long)p->first);
    }
    return XD_OK;
}

/* Allocates n floats; an empty array gets an address too. NULL in the planning run. */
static float *xdi_optimizer_take(xd_arena *arena, int64_t n) {
    return (float *)xd_arena_take_pointer(arena, (size_t)n * sizeof(float));
}

static xd_optimizer_state xdi_optimizer_take_state(xd_arena *arena, const xd_optimizer_desc *d,
                                                   const xd_param *p) {
    xd_optimizer_state taken;
    memset(&taken, 0, sizeof taken);
    if (p->dtype != XD_DTYPE_F32 && !xdi_optimizer_rounds(d, p))
        taken.master = xdi_optimizer_take(arena, p->count);
    taken.exp_avg = xdi_optimizer_take(arena, p->count);
    if (d->kind != XD_OPTIMIZER_SGD) taken.exp_avg_sq = xdi_optimizer_take(arena, p->count);
    return taken;
}

/* The states of all parameters that have one, and of those to be thawed. */
static void xdi_optimizer_take_states(xd_arena *arena, const xd_optimizer_desc *d, xd_optimizer *o) {
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        const bool reserves = xdi_optimizer_reserves(d, p);
        if (!xdi_train_owns(p) && !reserves) continue;
        const xd_optimizer_state taken = xdi_optimizer_take_state(arena, d, p);
        if (o) *(reserves ? &o->reserved[i] : &o->states[i]) = taken;
    }
}

/* Lays everything out, the state in `memory`, which is the same arena on the CPU. Run once without memory to get the
 * sizes, once with it. */
static void xdi_optimizer_lay_out(xd_arena *arena, xd_arena *memory, const xd_optimizer_desc *d,
                                  xd_optimizer *o) {
    const size_t n = (size_t)d->param_count, groups = d->group_count > 0 ? (size_t)d->group_count : 1;
    void *self = xd_arena_take_pointer(arena, sizeof *o);
    void *group = xd_arena_take_pointer(arena, groups * sizeof *o->groups);
    void *states = xd_arena_take_pointer(arena, n * sizeof *o->states);
    void *reserved = d->reserve_frozen ? xd_arena_take_pointer(arena, n * sizeof *o->reserved) : NULL;
    void *steps = xd_arena_take_pointer(memory, n * sizeof *o->steps);
    void *keys = d->stochastic_bf16 ? xd_arena_take_pointer(arena, n * sizeof *o->keys) : NULL;
    void *created = xd_arena_take_pointer(arena, n * sizeof *o->created);
    void *updates = xd_arena_take_pointer(arena, n * sizeof *o->updates);
    if (o) {
        XD_ASSERT(self == (void *)o);
        (void)self;
        o->groups = (xd_optimizer_group *)group;
        o->states = (xd_optimizer_state *)states;
        o->reserved = (xd_optimizer_state *)reserved;
        o->steps = (int64_t *)steps;
        o->keys = (uint64_t *)keys;
        o->created = (xd_param *)created;
        o->updates = (xd_update_array *)updates;
    }
    xdi_optimizer_take_states(memory, d, o);
}

static void xdi_optimizer_fill(xd_optimizer *o) {
    const xd_optimizer_desc *d = &o->desc;
    o->groups[0].learning_rate_scale = 1.0;
    o->groups[0].weight_decay = d->weight_decay;
    for (int i = 0; i < d->group_count; i++) o->groups[i] = d->groups[i];
    if (d->group_count == 0) o->desc.group_count = 1;
    o->desc.groups = o->groups;
    for (int64_t i = 0; i < d->param_count; i++) {
        o->created[i] = d->params[i];
        o->states[i].step = &o->steps[i];
        const char *name = d->params[i].name;
        if (o->keys && name) o->keys[i] = xd_hash(0, name, strlen(name));
    }
}

/* Copies the current value of a parameter to its master copy, if it has one. */
static xd_result xdi_optimizer_copy_value(xd_ctx *ctx, const xd_param *p, float *master) {
    const xd_launch launch = xdi_train_launch(ctx, NULL);
    xd_cast_array cast;
    cast.target = master;
    cast.target_dtype = XD_DTYPE_F32;
    cast.source = p->value;
    cast.source_dtype = p->dtype;
    cast.count = p->count;
    return master ? xd_ctx_kernels(ctx)->optimizer.cast(&launch, &cast, 1) : XD_OK;
}

/* The state on a device: all zero. */
static xd_result xdi_optimizer_allocate_device(xd_optimizer *o, size_t bytes) {
    const xd_launch launch = xdi_train_launch(o->ctx, NULL);
    const xd_device_ops *memory = &xd_ctx_kernels(o->ctx)->memory;
    o->device_memory = memory->allocate(o->ctx, bytes);
    XD_REQUIRE(o->ctx, o->device_memory, XD_ERROR_MEMORY,
               "no room for the state of %lld parameters: %zu bytes of the device",
               (long long)o->desc.param_count, bytes);
    return memory->fill(&launch, o->device_memory, 0, bytes);
}

static xd_result xdi_optimizer_build(xd_optimizer *o, size_t host_bytes, size_t device_bytes) {
    xd_arena arena = xd_arena_over(o, host_bytes);
    if (device_bytes) XD_TRY(xdi_optimizer_allocate_device(o, device_bytes));
    xd_arena device = xd_arena_over(o->device_memory, device_bytes);
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(o->ctx)->optimizer;
    xdi_optimizer_lay_out(&arena, device_bytes ? &device : &arena, &o->desc, o);
    xdi_optimizer_fill(o);
    if (kernels->list_create) XD_TRY(kernels->list_create(o->ctx, o->desc.param_count, &o->list));
    for (int64_t i = 0; i < o->desc.param_count; i++)
        XD_TRY(xdi_optimizer_copy_value(o->ctx, &o->desc.params[i], o->states[i].master));
    return XD_OK;
}

/* Fills in the defaults of a desc, checks it, and finds the size of the object itself. */
static xd_result xdi_optimizer_plan(xd_ctx *ctx, xd_optimizer_desc *d, xd_memory_bytes *bytes) {
    xdi_optimizer_resolve(d);
    XD_TRY(xdi_optimizer_validate(ctx, d));
    xd_arena plan = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    xdi_optimizer_lay_out(&plan, xdi_train_on_device(ctx) ? &device : &plan, d, NULL);
    bytes->host = plan.peak;
    bytes->device = device.peak;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_optimizer_bytes(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_memory_bytes *out) {
    xd_optimizer_desc d = *desc;
    xd_memory_bytes bytes = { 0, 0 };
    XD_TRY(xdi_optimizer_plan(ctx, &d, &bytes));
    *out = xdi_train_with_list(ctx, bytes, d.param_count);
    return XD_OK;
}

static xd_result xdi_optimizer_add_to_plan(xd_ctx *ctx, const xd_optimizer_desc *desc) {
    xd_memory_bytes bytes = { 0, 0 };
    XD_TRY(xdi_optimizer_bytes(ctx, desc, &bytes));
    return xdi_plan_add(ctx, bytes);
}

XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, out);
    if (xdi_plan_is_open(ctx)) {
        *out = NULL;
        return xdi_optimizer_add_to_plan(ctx, desc);
    }
    xd_optimizer_desc d = *desc;
    xd_memory_bytes bytes = { 0, 0 };
    XD_TRY(xdi_optimizer_plan(ctx, &d, &bytes));
    xd_optimizer *o = XDI_OBJECT(xd_optimizer, ctx, bytes.host);
    XD_REQUIRE(ctx, o, XD_ERROR_MEMORY, "no room for the state of %lld parameters: %zu bytes",
               (long long)d.param_count, bytes.host);
    o->ctx = ctx;
    o->desc = d;
    const xd_result result = xdi_optimizer_build(o, bytes.host, bytes.device);
    if (result == XD_OK)
        *out = o;
    else
        xd_optimizer_destroy(o);
    return result;
}

XD_API void xd_optimizer_destroy(xd_optimizer *optimizer) {
    if (!optimizer || XDI_IS_GONE(xd_optimizer, optimizer)) return;
    if (optimizer->device_memory)
        xd_ctx_kernels(optimizer->ctx)->memory.release(optimizer->ctx, optimizer->device_memory);
    if (optimizer->list) xd_ctx_kernels(optimizer->ctx)->optimizer.list_destroy(optimizer->list);
    xd_release(optimizer->ctx, optimizer);
}

XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer) {
    XD_ASSERT(optimizer);
    return &optimizer->desc;
}

XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate) {
    XDI_LIVE(xd_optimizer, optimizer);
    XDI_GIVEN(NULL, optimizer);
    XD_REQUIRE(optimizer->ctx, xdi_optimizer_at_least_zero(learning_rate), XD_ERROR_ARGUMENT,
               "learning_rate %g is negative or not finite", learning_rate);
    optimizer->desc.learning_rate = learning_rate;
    return XD_OK;
}

XD_API xd_optimizer_state xd_optimizer_state_at(xd_optimizer *optimizer, int64_t index) {
    XD_ASSERT(optimizer);
    xd_optimizer_state none;
    memset(&none, 0, sizeof none);
    return index >= 0 && index < optimizer->desc.param_count ? optimizer->states[index] : none;
}

XD_PRIVATE xd_optimizer_state xdi_optimizer_thawed_at(xd_optimizer *optimizer, int64_t index) {
    const xd_optimizer_state state = xd_optimizer_state_at(optimizer, index);
    return optimizer->reserved && !state.exp_avg ? optimizer->reserved[index] : state;
}

static bool xdi_optimizer_same(const xd_param *now, const xd_param *created) {
    return now->value == created->value && now->dtype == created->dtype && now->count == created->count &&
           now->first == created->first && now->frozen == created->frozen && now->buffer == created->buffer &&
           now->group == created->group;
}

static xd_result xdi_optimizer_may_thaw(const xd_optimizer *o, int64_t index) {
    const xd_optimizer_desc *d = &o->desc;
    XD_REQUIRE(o->ctx, index >= 0 && index < d->param_count, XD_ERROR_ARGUMENT,
               "parameter %lld of %lld cannot be thawed", (long long)index, (long long)d->param_count);
    const xd_param *p = &d->params[index];
    const char *name = p->name ? p->name : "(unnamed)";
    xd_param thawed = o->created[index];
    char text[XDI_CHANGED];
    XD_REQUIRE(o->ctx, d->reserve_frozen, XD_ERROR_STATE,
               "%s: no memory was set aside to thaw it; reserve_frozen was not set at creation", name);
    XD_REQUIRE(o->ctx, !thawed.buffer, XD_ERROR_STATE, "%s: a buffer cannot be thawed", name);
    XD_REQUIRE(o->ctx, thawed.frozen, XD_ERROR_STATE, "%s: has a state already", name);
    XD_REQUIRE(o->ctx, xdi_train_takes(thawed.dtype), XD_ERROR_DTYPE,
               "%s: parameters are F32, BF16 or F16, not %s", name, xd_dtype_name(thawed.dtype));
    XD_REQUIRE(o->ctx, !p->frozen, XD_ERROR_STATE, "%s: still frozen in the caller's list", name);
    thawed.frozen = false;
    XD_REQUIRE(o->ctx, xdi_optimizer_same(p, &thawed), XD_ERROR_STATE,
               "%s: value, dtype, count or flags changed since creation: %s", name,
               xdi_train_changed(&thawed, p, text));
    return XD_OK;
}

XD_API xd_result xd_optimizer_thaw(xd_optimizer *optimizer, int64_t index) {
    XDI_LIVE(xd_optimizer, optimizer);
    XDI_GIVEN(optimizer ? optimizer->ctx : NULL, optimizer);
    XD_TRY(xdi_optimizer_may_thaw(optimizer, index));
    xd_optimizer_state state =
        optimizer->reserved[index]; /* zero since creation: nobody had a pointer to it */
    XD_TRY(xdi_optimizer_copy_value(optimizer->ctx, &optimizer->desc.params[index], state.master));
    state.step = optimizer->states[index].step;
    optimizer->states[index] = state;
    optimizer->created[index].frozen = false;
    optimizer->listed = false;
    return XD_OK;
}

/* Product and difference are rounded separately: the compiler must not fuse them. */
static float xdi_optimizer_decay(double learning_rate, double weight_decay) {
    volatile double product = learning_rate * weight_decay;
    return (float)(1.0 - product);
}

/* The learning rate and the decay of a parameter. */
static void xdi_optimizer_rate(const xd_optimizer *o, const xd_param *p, xd_update_array *u) {
    const xd_optimizer_group *group = &o->groups[p->group];
    const double weight_decay = p->no_decay ? 0.0 : group->weight_decay;
    u->learning_rate = o->desc.learning_rate * group->learning_rate_scale;
    u->decay = xdi_optimizer_decay(u->learning_rate, weight_decay);
    u->weight_decay = (float)weight_decay;
}

/* The update of parameter `index` for its next step. */
static xd_update_array xdi_optimizer_update(const xd_optimizer *o, int64_t index) {
    const xd_optimizer_desc *d = &o->desc;
    const xd_param *p = &d->params[index];
    const xd_optimizer_state *state = &o->states[index];
    xd_update_array u;
    memset(&u, 0, sizeof u);
    const bool rounds = xdi_optimizer_rounds(d, p);
    u.master = state->master ? state->master : rounds ? NULL : (float *)p->value;
    u.key = rounds ? o->keys[index] : 0;
    u.origin = p->first;
    u.first = state->exp_avg;
    u.second = state->exp_avg_sq;
    u.value = state->master || rounds ? p->value : NULL;
    u.value_dtype = p->dtype;
    u.gradient = p->gradient;
    u.gradient_dtype = xdi_train_gradient_dtype(p);
    u.count = p->count;
    u.steps = state->step;
    xdi_optimizer_rate(o, p, &u);
    return u;
}

static xd_update_args xdi_optimizer_args(const xd_optimizer *o, const float *gradient_scale) {
    const xd_optimizer_desc *d = &o->desc;
    xd_update_args args;
    memset(&args, 0, sizeof args);
    args.arrays = o->updates;
    args.list = o->list;
    args.gradient_scale = gradient_scale;
    if (gradient_scale && !o->device_memory && *gradient_scale == 1.0f) args.gradient_scale = NULL;
    args.beta1_exact = d->beta1;
    args.beta2_exact = d->beta2;
    args.one_minus_beta1 = (float)(1.0 - d->beta1);
    args.one_minus_beta2 = (float)(1.0 - d->beta2);
    args.beta2 = (float)d->beta2;
    args.eps = (float)d->eps;
    args.momentum = (float)d->momentum;
    args.couple_decay = d->kind == XD_OPTIMIZER_ADAM_L2;
    args.maximize = d->maximize;
    args.rounding_seed = d->seed;
    return args;
}

/* The averages that a step updates in its own pass over the parameters: one as a part of its arrays, others beside it. */
typedef struct xdi_optimizer_averages {
    xd_ema *first; /* NULL -> none */
    xd_ema *beside[XDI_OPTIMIZER_BESIDE];
    xd_average_args args[XDI_OPTIMIZER_BESIDE];
    int count; /* of those beside */
} xdi_optimizer_averages;

/* Whether the list is, to the byte, that of the step before, which has succeeded: what was asked of it then need not be again. */
static bool xdi_optimizer_has_same_list(const xd_optimizer *o) {
    return o->listed &&
           memcmp(o->desc.params, o->created, (size_t)o->desc.param_count * sizeof *o->created) == 0;
}

/* Whether the updates are those of the step before, but for the learning rate. */
static bool xdi_optimizer_is_listed(const xd_optimizer *o, const xdi_optimizer_averages *averages,
                                    bool same_list) {
    const bool again = !averages->first || xdi_ema_joins_again(averages->first, o);
    return again && same_list && averages->first == o->joined && averages->count == 0;
}

/* Changes the learning rate of the updates. */
static void xdi_optimizer_rate_updates(xd_optimizer *o) {
    int64_t k = 0;
    for (int64_t i = 0; i < o->desc.param_count && o->update_rate != o->desc.learning_rate; i++) {
        const xd_param *p = &o->desc.params[i];
        if (!xdi_train_steps(p)) continue;
        xd_update_array *u = &o->updates[k++];
        xdi_optimizer_rate(o, p, u);
    }
    o->update_rate = o->desc.learning_rate;
}

/* A loop that never sets its gradients would train nothing, and hear nothing. */
static void xdi_optimizer_warn_idle(xd_optimizer *o) {
    for (int64_t i = 0; i < o->desc.param_count && !o->told_idle; i++) {
        const xd_param *p = &o->desc.params[i];
        if (p->gradient || p->count == 0 || !xdi_train_owns(p)) continue;
        xd_log(o->ctx, XD_LOG_WARN,
               "xd_optimizer_step changes nothing: none of %lld parameters has a gradient; %s's is NULL",
               (long long)o->desc.param_count, p->name ? p->name : "(unnamed)");
        o->told_idle = true;
    }
}

/* Lists the updates of a step, with the shadows that they update too. */
static xd_result xdi_optimizer_collect(xd_optimizer *o, bool same_list, xdi_optimizer_averages *averages,
                                       xd_update_args *args) {
    const xd_optimizer_desc *d = &o->desc;
    char text[XDI_CHANGED];
    args->same = xdi_optimizer_is_listed(o, averages, same_list);
    if (args->same) {
        xdi_optimizer_rate_updates(o);
        args->array_count = o->update_count;
        return XD_OK;
    }
    o->listed = averages->count == 0;
    o->joined = averages->first;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        XD_REQUIRE(o->ctx, xdi_optimizer_same(p, &o->created[i]), XD_ERROR_STATE,
                   "%s: value, dtype, count or flags changed since creation: %s",
                   p->name ? p->name : "(unnamed)", xdi_train_changed(&o->created[i], p, text));
        memcpy(&o->created[i], p, sizeof *p); /* gaps too */
        if (p->state) o->listed = false;
        if (!xdi_train_steps(p)) continue;
        const int64_t k = args->array_count++;
        o->updates[k] = xdi_optimizer_update(o, i);
        if (averages->first) xdi_ema_join(averages->first, i, &o->updates[k]);
        for (int j = 0; j < averages->count; j++) xdi_ema_join_move(averages->beside[j], i, k);
    }
    if (args->array_count == 0) xdi_optimizer_warn_idle(o);
    o->update_count = args->array_count;
    o->update_rate = d->learning_rate;
    for (int j = 0; j < averages->count; j++) averages->args[j].array_count = args->array_count;
    args->averages = averages->args;
    args->average_count = averages->count;
    return XD_OK;
}

/* What a step asks of the list of an average. The one that has joined the step before was asked then. */
static xd_result xdi_optimizer_check_average(const xd_optimizer *o, bool same_list, const xd_ema *ema) {
    if (same_list && ema == o->joined && xdi_ema_joined_last(ema, o)) return xdi_ema_in_place(ema);
    return xdi_ema_unchanged(ema);
}

/* Checks the list of averages of a step: none NULL, none twice, each over a list that has not changed since its
 * creation. */
static xd_result xdi_optimizer_check_averages(const xd_optimizer *o, bool same_list,
                                              const xd_optimizer_step_desc *d) {
    xd_ctx *const ctx = o->ctx;
    XD_REQUIRE(ctx, d->average_count >= 0 && (d->averages || d->average_count == 0), XD_ERROR_ARGUMENT,
               "%d averages%s", d->average_count, d->averages ? "" : " at NULL");
    for (int i = 0; i < d->average_count; i++) {
        XD_REQUIRE(ctx, d->averages[i], XD_ERROR_ARGUMENT, "average %d of %d is NULL", i, d->average_count);
        for (int k = 0; k < i; k++)
            XD_REQUIRE(ctx, d->averages[k] != d->averages[i], XD_ERROR_ARGUMENT,
                       "averages %d and %d are the same one", k, i);
        XD_TRY(xdi_optimizer_check_average(o, same_list, d->averages[i]));
        XD_TRY(xdi_ema_has_next(d->averages[i]));
    }
    return XD_OK;
}

/* Picks the averages that the step updates in the same pass, as many as the table and the lists have room for. */
static void xdi_optimizer_join(const xd_optimizer *o, const xd_optimizer_step_desc *d,
                               xdi_optimizer_averages *averages, xd_update_args *args) {
    const int room = xd_ctx_kernels(o->ctx)->optimizer.averages_in_steps ? (int)XDI_OPTIMIZER_BESIDE : 0;
    const int64_t count = o->desc.param_count;
    averages->first = NULL;
    averages->count = 0;
    for (int i = 0; i < d->average_count; i++) {
        xd_ema *ema = d->averages[i];
        if (!xdi_ema_joins(ema, o->desc.params, count)) continue;
        if (!averages->first && xdi_ema_join_arrays(ema, args))
            averages->first = ema;
        else if (averages->count < room && xdi_ema_join_beside(ema, count, &averages->args[averages->count]))
            averages->beside[averages->count++] = ema;
    }
    /* On a device those beside the arrays share one more read of the parameters, which saves none for one alone. */
    if (averages->count == 1 && xdi_train_on_device(o->ctx)) averages->count = 0;
}

/* Their updates begin, those of the others with xd_ema_update. */
static xd_result xdi_optimizer_begin(xdi_optimizer_averages *averages, const xd_status *status,
                                     xd_update_args *args) {
    if (averages->first) XD_TRY(xdi_ema_begin(averages->first, status, &args->turn));
    for (int i = 0; i < averages->count; i++)
        XD_TRY(xdi_ema_begin(averages->beside[i], status, &averages->args[i].turn));
    return XD_OK;
}

static bool xdi_optimizer_has_joined(const xdi_optimizer_averages *averages, const xd_ema *ema) {
    bool joined = ema == averages->first;
    for (int i = 0; i < averages->count; i++) joined = joined || ema == averages->beside[i];
    return joined;
}

XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped) {
    XDI_LIVE(xd_optimizer, optimizer);
    XDI_GIVEN(optimizer ? optimizer->ctx : NULL, optimizer);
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(optimizer->ctx)->optimizer;
    xd_optimizer_step_desc d;
    xdi_optimizer_averages averages;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    const bool same_list =
        xdi_optimizer_has_same_list(optimizer); /* of parameters without a state: all gradients are summed */
    if (!same_list)
        XD_TRY(xdi_train_check_summed(optimizer->ctx, optimizer->desc.params, optimizer->desc.param_count,
                                      "xd_optimizer_step"));
    const xd_launch launch = xdi_train_launch(optimizer->ctx, d.status);
    if (xdi_train_refused(optimizer->ctx, d.status)) {
        if (skipped) *skipped = true;
        return XD_OK;
    }
    xd_update_args args = xdi_optimizer_args(optimizer, d.gradient_scale);
    XD_TRY(xdi_optimizer_check_averages(optimizer, same_list, &d));
    xdi_optimizer_join(optimizer, &d, &averages, &args);
    XD_TRY(xdi_optimizer_collect(optimizer, same_list, &averages, &args));
    const bool listed = optimizer->listed;
    optimizer->listed = false; /* until it has succeeded */
    XD_TRY(xdi_optimizer_begin(&averages, d.status, &args));
    XD_TRY(optimizer->desc.kind == XD_OPTIMIZER_SGD ? kernels->sgd(&launch, &args)
                                                    : kernels->adam(&launch, &args));
    optimizer->listed = listed;
    if (skipped) *skipped = false;
    for (int i = 0; i < d.average_count; i++)
        XD_TRY(xdi_optimizer_has_joined(&averages, d.averages[i])
                   ? xdi_ema_follow(d.averages[i], args.same, d.status)
                   : xd_ema_update(d.averages[i], XD_EMA_NEXT, d.status));
    return XD_OK;
}
