/* Exponential moving averages of parameters. */

#include "comm/topology.h"
#include "tensor/internal.h"
#include "train/internal.h"
#include "train/optimizer.h"

#include <math.h>
#include <string.h>

enum {
    XDI_EMA_NAME_ROOM = 1024,
    XDI_EMA_AT_ONCE = 32
}; /* names, and lists of some calls, are on the stack */

/* One shadow, and the entry of the caller's list it follows. */
typedef struct xdi_ema_shadow {
    void *value;
    uint16_t *compensation; /* NULL -> none */
    const char *name;       /* stripped */
    int64_t source;         /* index into the caller's list */
    xd_dtype dtype;
    uint64_t key; /* of its random bits */
    bool tied;    /* several entries of the list */
} xdi_ema_shadow;

/* One name of the caller's list; tied entries point to one shadow. */
typedef struct xdi_ema_name {
    const char *text;
    int64_t shadow;
} xdi_ema_name;

struct xd_ema {
    xd_ctx *ctx;
    xd_ema_desc desc;
    const xd_param *params; /* the caller's */
    int64_t param_count;
    xd_param *created;       /* [param_count]; the list at creation, to notice changes */
    xdi_ema_name *names;     /* [param_count] */
    int64_t *slots;          /* [slot_count]; hash table of names: 1 + index into names, 0 = free */
    int64_t slot_count;      /* a power of two, at least twice param_count */
    xdi_ema_shadow *shadows; /* [shadow_count], room for param_count */
    int64_t shadow_count;
    xd_lerp_array *lerps;    /* [param_count]; filled in again in every update */
    xd_average_array *moves; /* [param_count]; filled in by a step that updates the average beside others */
    xd_cast_array *casts;    /* [param_count] */
    int64_t iteration;
    bool initialized;
    bool swapped;
    int64_t *unmoved;      /* the caller's; NULL -> not counted */
    void *device_memory;   /* that of the shadows when it is not this block itself */
    xd_array_list *list;   /* of the lerps, on a device; NULL on the CPU */
    xd_average_turn *turn; /* counters in memory of the device; NULL on the CPU */
    bool counts_there;     /* the device has the counters, since some step may have been refused; `iteration`
                            * is as if none had */
    int64_t most;          /* then: no iteration is above it */
};

static const char *const xdi_ema_wrappers[] = { "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.",
                                                "_orig_mod.", "module." };

/* ---- configuration and schedules ---- */

XD_API xd_ema_desc xd_ema_defaults(xd_ema_schedule schedule) {
    xd_ema_desc d;
    memset(&d, 0, sizeof d);
    d.schedule = schedule;
    d.decay = 0.9999;
    d.gamma = 16.97;
    d.halflife_kimg = 500.0;
    d.rampup_ratio = 0.05;
    return d;
}

static void xdi_ema_resolve(xd_ema_desc *d) {
    if (d->batch_size == 0) d->batch_size = 1;
    if (d->dtype == XD_DTYPE_NONE) d->dtype = d->stochastic_bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    if (!d->strip_tokens) {
        d->strip_tokens = xdi_ema_wrappers;
        d->strip_count = (int)(sizeof xdi_ema_wrappers / sizeof *xdi_ema_wrappers);
    }
}

static bool xdi_ema_averages(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16 || dtype == XD_DTYPE_F64;
}

static xd_result xdi_ema_validate_format(xd_ctx *ctx, const xd_ema_desc *d) {
    const bool either = d->compensated || d->stochastic_bf16;
    XD_REQUIRE(ctx, !(d->compensated && d->stochastic_bf16), XD_ERROR_ARGUMENT,
               "compensated and stochastic_bf16 exclude each other");
    XD_REQUIRE(ctx, !either || !(d->live_dtype || d->compat_credit), XD_ERROR_ARGUMENT,
               "%s excludes live_dtype and compat_credit",
               d->compensated ? "compensated" : "stochastic_bf16");
    XD_REQUIRE(ctx, !d->compensated || d->dtype == XD_DTYPE_F32, XD_ERROR_DTYPE,
               "compensated shadows are F32, not %s", xd_dtype_name(d->dtype));
    XD_REQUIRE(ctx, !d->stochastic_bf16 || d->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "shadows of stochastic_bf16 are BF16, not %s", xd_dtype_name(d->dtype));
    return XD_OK;
}

/* Written so that NaN fails each of them. */
static xd_result xdi_ema_validate(xd_ctx *ctx, const xd_ema_desc *d) {
    XD_REQUIRE(ctx, (int)d->schedule >= 0 && d->schedule <= XD_EMA_RAMP, XD_ERROR_ARGUMENT,
               "average schedule %d is unknown", (int)d->schedule);
    XD_REQUIRE(ctx, d->decay >= 0.0 && d->decay <= 1.0, XD_ERROR_ARGUMENT, "decay %g is outside [0, 1]",
               d->decay);
    XD_REQUIRE(ctx, d->gamma >= -1.0 && d->gamma < HUGE_VAL, XD_ERROR_ARGUMENT,
               "gamma %g is below -1 or not finite", d->gamma);
    XD_REQUIRE(ctx, d->schedule != XD_EMA_HALFLIFE || (d->halflife_kimg > 0.0 && d->halflife_kimg < HUGE_VAL),
               XD_ERROR_ARGUMENT, "halflife_kimg %g is not above 0 or not finite", d->halflife_kimg);
    XD_REQUIRE(ctx, d->rampup_ratio >= 0.0 && d->rampup_ratio < HUGE_VAL, XD_ERROR_ARGUMENT,
               "rampup_ratio %g is negative or not finite", d->rampup_ratio);
    XD_REQUIRE(ctx, d->batch_size > 0, XD_ERROR_ARGUMENT, "batch_size %lld is negative",
               (long long)d->batch_size);
    XD_REQUIRE(ctx, d->start_iteration >= 0, XD_ERROR_ARGUMENT, "start_iteration %lld is negative",
               (long long)d->start_iteration);
    XD_REQUIRE(ctx, xdi_ema_averages(d->dtype), XD_ERROR_DTYPE, "shadows are F32, BF16, F16 or F64, not %s",
               xd_dtype_name(d->dtype));
    return xdi_ema_validate_format(ctx, d);
}

static double xdi_ema_decay_at(const xd_ema_desc *d, int64_t iteration) {
    const double i = (double)iteration;
    switch (d->schedule) {
    case XD_EMA_POWER: return pow(1.0 - 1.0 / (i > 1.0 ? i : 1.0), d->gamma + 1.0);
    case XD_EMA_HALFLIFE: {
        const double ramp = i * (double)d->batch_size * d->rampup_ratio;
        double halflife = 1000.0 * d->halflife_kimg;
        if (!d->disable_rampup && ramp < halflife) halflife = ramp;
        return pow(2.0, -(double)d->batch_size / (halflife > 1e-8 ? halflife : 1e-8));
    }
    case XD_EMA_RAMP: {
        const double ramp = (1.0 + i) / (10.0 + i);
        return ramp < d->decay ? ramp : d->decay;
    }
    default: return d->decay;
    }
}

XD_API xd_result xd_ema_decay(xd_ctx *ctx, const xd_ema_desc *desc, int64_t iteration, double *decay) {
    xd_ema_desc d = *desc;
    xdi_ema_resolve(&d);
    XD_TRY(xdi_ema_validate(ctx, &d));
    XD_REQUIRE(ctx, iteration >= 0, XD_ERROR_ARGUMENT, "iteration %lld is negative", (long long)iteration);
    *decay = xdi_ema_decay_at(&d, iteration);
    return XD_OK;
}

/* ---- names ---- */

/* Writes `name` without any strip token to `out`, which has room for all of it. Returns the length. */
static size_t xdi_ema_strip(const xd_ema_desc *d, const char *name, char *out) {
    size_t length = 0;
    while (*name) {
        size_t skip = 0;
        for (int i = 0; i < d->strip_count && skip == 0; i++) {
            const size_t n = strlen(d->strip_tokens[i]);
            if (strncmp(name, d->strip_tokens[i], n) == 0) skip = n;
        }
        if (skip == 0) out[length++] = *name;
        name += skip > 0 ? skip : 1;
    }
    out[length] = '\0';
    return length;
}

/* The slot that holds a name, or the free slot for it. FNV-1a over the stripped text. */
static int64_t xdi_ema_slot(const xd_ema *ema, const char *stripped) {
    uint64_t hash = UINT64_C(14695981039346656037);
    for (const char *c = stripped; *c; c++)
        hash = (hash ^ (uint64_t)(unsigned char)*c) * UINT64_C(1099511628211);
    const uint64_t mask = (uint64_t)ema->slot_count - 1;
    uint64_t slot = hash & mask;
    while (ema->slots[slot] && strcmp(ema->names[ema->slots[slot] - 1].text, stripped) != 0)
        slot = (slot + 1) & mask;
    return (int64_t)slot;
}

/* The shadow of a caller's name, -1 for an unknown name. `room` receives the stripped name. */
static int64_t xdi_ema_find(const xd_ema *ema, const char *name, char *room, size_t room_bytes) {
    if (!name || strlen(name) >= room_bytes) return -1;
    xdi_ema_strip(&ema->desc, name, room);
    const int64_t entry = ema->slots[xdi_ema_slot(ema, room)];
    return entry ? ema->names[entry - 1].shadow : -1;
}

/* ---- life ---- */

static xd_result xdi_ema_validate_params(xd_ctx *ctx, const xd_param *params, int64_t count) {
    XD_REQUIRE(ctx, count >= 0 && (params || count == 0), XD_ERROR_ARGUMENT, "%lld parameters at %p",
               (long long)count, (const void *)params);
    for (int64_t i = 0; i < count; i++) {
        const xd_param *p = &params[i];
        XD_REQUIRE(ctx, p->name && strlen(p->name) < XDI_EMA_NAME_ROOM, XD_ERROR_ARGUMENT,
                   "parameter %lld has no name, or one of more than %d bytes", (long long)i,
                   XDI_EMA_NAME_ROOM - 1);
        XD_REQUIRE(ctx, p->dims >= 0, XD_ERROR_ARGUMENT, "%s: %d dimensions", p->name, p->dims);
        XD_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                   "%s: %lld elements at %p", p->name, (long long)p->count, p->value);
        XD_REQUIRE(ctx, p->buffer ? xd_dtype_size(p->dtype) > 0 : xdi_ema_averages(p->dtype), XD_ERROR_DTYPE,
                   "%s: %s cannot be averaged; buffers say so with the flag", p->name,
                   xd_dtype_name(p->dtype));
    }
    return XD_OK;
}

/* Where elements are in their whole parameters, for their random bits. */
static xd_result xdi_ema_validate_places(xd_ctx *ctx, const xd_ema_desc *d, const xd_param *params,
                                         int64_t count) {
    for (int64_t i = 0; i < count && d->stochastic_bf16; i++) {
        const xd_param *p = &params[i];
        XD_REQUIRE(ctx, p->first >= 0, XD_ERROR_ARGUMENT, "%s: its first element is number %lld", p->name,
                   (long long)p->first);
        if (!d->parts) continue;
        XD_REQUIRE(ctx, d->parts[i].ndim >= 0 && d->parts[i].ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
                   "%s: its part has %d dimensions, allowed are %d", p->name, d->parts[i].ndim,
                   (int)XD_DIMS_MAX);
        const int64_t here = d->parts[i].range.end - d->parts[i].range.begin;
        XD_REQUIRE(ctx, here == p->count, XD_ERROR_SHAPE, "%s: %lld elements, its part has %lld", p->name,
                   (long long)p->count, (long long)here);
        XD_TRY(xdi_part_check_region(ctx, &d->parts[i]));
    }
    return XD_OK;
}

/* Index of the first entry with the same memory, or i itself. */
static int64_t xdi_ema_tie(const xd_param *params, int64_t i) {
    if (params[i].value)
        for (int64_t k = 0; k < i; k++)
            if (params[k].value == params[i].value && params[k].count == params[i].count) return k;
    return i;
}

static xd_dtype xdi_ema_shadow_dtype(const xd_ema_desc *d, const xd_param *p) {
    return p->buffer || d->live_dtype ? p->dtype : d->dtype;
}

/* Lays everything out after the object itself, shadows in `memory`, which is the same arena on the CPU. Run once
 * without memory to get the sizes, once with it. */
static void xdi_ema_lay_out(xd_arena *arena, xd_arena *memory, const xd_ema_desc *d, const xd_param *params,
                            int64_t count, xd_ema *ema) {
    const size_t n = (size_t)count;
    size_t slots = 2;
    while (slots < 2 * n) slots *= 2;
    xd_ema laid;
    memset(&laid, 0, sizeof laid);
    xd_arena_take_pointer(arena, sizeof laid);
    laid.created = (xd_param *)xd_arena_take_pointer(arena, n * sizeof *laid.created);
    laid.names = (xdi_ema_name *)xd_arena_take_pointer(arena, n * sizeof *laid.names);
    laid.slots = (int64_t *)xd_arena_take_pointer(arena, slots * sizeof *laid.slots);
    laid.slot_count = (int64_t)slots;
    laid.shadows = (xdi_ema_shadow *)xd_arena_take_pointer(arena, n * sizeof *laid.shadows);
    laid.lerps = (xd_lerp_array *)xd_arena_take_pointer(arena, n * sizeof *laid.lerps);
    laid.casts = (xd_cast_array *)xd_arena_take_pointer(arena, n * sizeof *laid.casts);
    laid.moves = (xd_average_array *)xd_arena_take_pointer(arena, n * sizeof *laid.moves);
    for (int64_t i = 0; i < count; i++) {
        const xd_param *p = &params[i];
        const xd_dtype dtype = xdi_ema_shadow_dtype(d, p);
        const int64_t tie = xdi_ema_tie(params, i);
        char *text = (char *)xd_arena_take_pointer(arena, strlen(p->name) + 1);
        int64_t *shape = NULL;
        if (p->shape) shape = (int64_t *)xd_arena_take_pointer(arena, (size_t)p->dims * sizeof *shape);
        void *value = NULL;
        if (tie == i) value = xd_arena_take_pointer(memory, (size_t)p->count * xd_dtype_size(dtype));
        uint16_t *compensation = NULL;
        if (tie == i && d->compensated && !p->buffer)
            compensation = (uint16_t *)xd_arena_take_pointer(memory, (size_t)p->count * sizeof *compensation);
        if (!ema) continue;
        xdi_ema_strip(d, p->name, text);
        if (shape) memcpy(shape, p->shape, (size_t)p->dims * sizeof *shape);
        laid.created[i] = *p;
        laid.created[i].shape = shape;
        laid.names[i].text = text;
        laid.names[i].shadow = tie == i ? laid.shadow_count : laid.names[tie].shadow;
        if (tie != i) {
            laid.shadows[laid.names[i].shadow].tied = true;
            continue;
        }
        xdi_ema_shadow *shadow = &laid.shadows[laid.shadow_count++];
        shadow->value = value;
        shadow->compensation = compensation;
        shadow->key = xd_hash(0, text, strlen(text));
        shadow->name = text;
        shadow->source = i;
        shadow->dtype = dtype;
        shadow->tied = false;
    }
    if (memory != arena) laid.turn = (xd_average_turn *)xd_arena_take_pointer(memory, sizeof *laid.turn);
    if (ema) *ema = laid;
}

static xd_result xdi_ema_index(xd_ema *ema) {
    for (int64_t i = 0; i < ema->param_count; i++) {
        const int64_t slot = xdi_ema_slot(ema, ema->names[i].text);
        XD_REQUIRE(ema->ctx, ema->slots[slot] == 0, XD_ERROR_ARGUMENT,
                   "%s and %s are both \"%s\" without wrappers", ema->params[ema->slots[slot] - 1].name,
                   ema->params[i].name, ema->names[i].text);
        ema->slots[slot] = i + 1;
    }
    return XD_OK;
}

/* Whether the lerp entry has its format. */
static bool xdi_ema_is_plain(const xd_ema *ema) {
    return !ema->desc.compensated && !ema->desc.stochastic_bf16;
}

/* Whether random bits of a shadow are those of one sequence; otherwise it is averaged in pieces. */
static bool xdi_ema_is_adjacent(const xd_ema *ema, const xdi_ema_shadow *s, int64_t *origin) {
    const int64_t count = ema->created[s->source].count;
    *origin = ema->created[s->source].first;
    if (!ema->desc.parts || !ema->desc.stochastic_bf16 || count == 0) return true;
    const xd_tensor_part *part = &ema->desc.parts[s->source];
    return xdi_part_run(part, part->range.begin, origin) == count;
}

/* Whether a step of this shadow's parameter can update it in the same pass. */
static bool xdi_ema_can_join(const xd_ema *ema, const xdi_ema_shadow *s) {
    int64_t origin;
    return !s->tied && xdi_train_steps(&ema->params[s->source]) && xdi_ema_is_adjacent(ema, s, &origin);
}

/* A list of arrays that is given to the average entry whenever it is full. */
typedef struct xdi_ema_batch {
    const xd_launch *launch;
    xd_average_args args;
    xd_average_array arrays[XDI_EMA_AT_ONCE];
} xdi_ema_batch;

static xd_result xdi_ema_flush(xdi_ema_batch *batch) {
    batch->args.arrays = batch->arrays;
    const xd_result result =
        xd_ctx_kernels(batch->launch->ctx)->optimizer.average(batch->launch, &batch->args);
    batch->args.array_count = 0;
    return result;
}

/* Elements of a shadow and its parameter, of which the first is number `origin` of the whole. */
static void xdi_ema_describe_move(const xd_ema *ema, const xdi_ema_shadow *s, xd_interval elements,
                                  int64_t origin, xd_average_array *a) {
    const xd_param *p = &ema->created[s->source];
    memset(a, 0, sizeof *a);
    a->count = elements.end - elements.begin;
    if (a->count > 0) {
        a->target = (char *)s->value + (size_t)elements.begin * xd_dtype_size(s->dtype);
        a->source = (const char *)p->value + (size_t)elements.begin * xd_dtype_size(p->dtype);
        a->compensation = s->compensation ? s->compensation + elements.begin : NULL;
    }
    a->origin = origin;
    a->key = s->key;
    a->target_dtype = s->dtype;
    a->source_dtype = p->dtype;
    a->random = ema->desc.stochastic_bf16;
}

static xd_result xdi_ema_push(xdi_ema_batch *batch, const xd_ema *ema, const xdi_ema_shadow *s,
                              xd_interval elements, int64_t origin) {
    xdi_ema_describe_move(ema, s, elements, origin, &batch->arrays[batch->args.array_count++]);
    return batch->args.array_count == XDI_EMA_AT_ONCE ? xdi_ema_flush(batch) : XD_OK;
}

/* A shadow, in pieces that are adjacent in the whole parameter where that decides on bits. */
static xd_result xdi_ema_push_shadow(xdi_ema_batch *batch, const xd_ema *ema, const xdi_ema_shadow *s) {
    const xd_param *p = &ema->created[s->source];
    const xd_tensor_part *part = ema->desc.parts ? &ema->desc.parts[s->source] : NULL;
    xd_interval piece = { 0, p->count };
    int64_t origin = p->first;
    if (!part || !ema->desc.stochastic_bf16) return xdi_ema_push(batch, ema, s, piece, origin);
    for (; piece.begin < p->count; piece.begin = piece.end) {
        piece.end = piece.begin + xdi_part_run(part, part->range.begin + piece.begin, &origin);
        XD_TRY(xdi_ema_push(batch, ema, s, piece, origin));
    }
    return XD_OK;
}

/* The average entry's arguments for an iteration, without arrays. */
static void xdi_ema_fill_args(const xd_ema *ema, xd_average_kind kind, int64_t iteration,
                              xd_average_args *args) {
    memset(args, 0, sizeof *args);
    args->kind = kind;
    args->keep = xdi_ema_decay_at(&ema->desc, iteration);
    args->weighted_sum = ema->desc.compat_credit;
    args->seed = ema->desc.seed;
    args->iteration = iteration;
    args->unmoved = ema->unmoved;
    args->turn = ema->counts_there ? ema->turn : NULL;
}

/* What keeps an update from changing anything. */
static const xd_status *xdi_ema_gate(const xd_ema *ema, const xd_status *status) {
    return ema->counts_there ? &ema->turn->rests : status;
}

/* The average entry over all shadows of parameters; `joined`: without those that have joined a step. */
static xd_result xdi_ema_run(const xd_ema *ema, xd_average_kind kind, int64_t iteration, bool joined,
                             const xd_status *status) {
    const xd_launch launch = xdi_train_launch(ema->ctx, status);
    xdi_ema_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.launch = &launch;
    xdi_ema_fill_args(ema, kind, iteration, &batch.args);
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        if (ema->created[s->source].buffer || (joined && xdi_ema_can_join(ema, s))) continue;
        XD_TRY(xdi_ema_push_shadow(&batch, ema, s));
    }
    return batch.args.array_count > 0 ? xdi_ema_flush(&batch) : XD_OK;
}

/* shadow <- live, parameters too when `all`, else buffers only. */
static xd_result xdi_ema_copy(xd_ema *ema, bool all, const xd_status *status) {
    const xd_launch launch = xdi_train_launch(ema->ctx, status);
    int64_t n = 0;
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        if (!p->buffer && (!all || ema->desc.compensated)) continue;
        xd_cast_array *cast = &ema->casts[n++];
        cast->target = s->value;
        cast->target_dtype = s->dtype;
        cast->source = p->value;
        cast->source_dtype = p->dtype;
        cast->count = p->count;
    }
    XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.cast(&launch, ema->casts, n));
    return all && ema->desc.compensated ? xdi_ema_run(ema, XD_AVERAGE_COPY, 0, false, status) : XD_OK;
}

/* Fills the block that begins with the object. */
static xd_result xdi_ema_build(xd_ema *ema, xd_ctx *ctx, const xd_ema_desc *d, const xd_param *params,
                               int64_t count, size_t host_bytes, size_t device_bytes) {
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(ctx)->optimizer;
    xd_arena arena = xd_arena_over(ema, host_bytes);
    void *shadows = device_bytes ? xd_ctx_kernels(ctx)->memory.allocate(ctx, device_bytes) : NULL;
    xd_arena device = xd_arena_over(shadows, device_bytes);
    ema->ctx = ctx;
    if (device_bytes && !shadows)
        return XD_FAIL(ctx, XD_ERROR_MEMORY,
                       "no room for the average of %lld parameters: %zu bytes of the device",
                       (long long)count, device_bytes);
    xdi_ema_lay_out(&arena, shadows ? &device : &arena, d, params, count, ema);
    ema->ctx = ctx;
    ema->device_memory = shadows;
    ema->desc = *d;
    ema->params = params;
    ema->param_count = count;
    ema->initialized = d->init_from_current;
    XD_TRY(xdi_ema_index(ema));
    if (kernels->list_create) XD_TRY(kernels->list_create(ctx, count, &ema->list));
    return xdi_ema_copy(ema, true, NULL);
}

/* Fills in the defaults of a desc, checks everything, and finds the size of the object itself. */
static xd_result xdi_ema_plan(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                              xd_ema_desc *d, xd_memory_bytes *bytes) {
    memset(d, 0, sizeof *d);
    if (desc) *d = *desc;
    XD_REQUIRE(ctx, d->strip_count >= 0, XD_ERROR_ARGUMENT, "%d tokens to strip", d->strip_count);
    xdi_ema_resolve(d);
    XD_TRY(xdi_ema_validate(ctx, d));
    XD_TRY(xdi_ema_validate_params(ctx, params, count));
    XD_TRY(xdi_ema_validate_places(ctx, d, params, count));
    xd_arena plan = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    xdi_ema_lay_out(&plan, xdi_train_on_device(ctx) ? &device : &plan, d, params, count, NULL);
    bytes->host = plan.peak;
    bytes->device = device.peak;
    return XD_OK;
}

XD_API xd_result xd_ema_bytes(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                              xd_memory_bytes *out) {
    xd_ema_desc d;
    xd_memory_bytes bytes = { 0, 0 };
    XD_TRY(xdi_ema_plan(ctx, params, count, desc, &d, &bytes));
    *out = xdi_train_with_list(ctx, bytes, count);
    return XD_OK;
}

XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                               xd_ema **out) {
    xd_ema_desc d;
    xd_memory_bytes bytes = { 0, 0 };
    XD_TRY(xdi_ema_plan(ctx, params, count, desc, &d, &bytes));
    xd_ema *ema = (xd_ema *)xd_allocate(ctx, bytes.host);
    if (!ema)
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the average of %lld parameters: %zu bytes",
                       (long long)count, bytes.host);
    const xd_result result = xdi_ema_build(ema, ctx, &d, params, count, bytes.host, bytes.device);
    if (result == XD_OK)
        *out = ema;
    else
        xd_ema_destroy(ema);
    return result;
}

XD_API void xd_ema_destroy(xd_ema *ema) {
    if (!ema) return;
    if (ema->device_memory) xd_ctx_kernels(ema->ctx)->memory.release(ema->ctx, ema->device_memory);
    if (ema->list) xd_ctx_kernels(ema->ctx)->optimizer.list_destroy(ema->list);
    xd_release(ema->ctx, ema);
}

/* ---- updates ---- */

/* `joined`: the step before has averaged the shadows that could join it. */
static xd_result xdi_ema_average(xd_ema *ema, int64_t iteration, bool joined, const xd_status *refused) {
    const xd_status *status = xdi_ema_gate(ema, refused);
    if (!xdi_ema_is_plain(ema) || ema->unmoved) {
        XD_TRY(xdi_ema_run(ema, XD_AVERAGE_MOVE, iteration, joined, status));
        return xdi_ema_copy(ema, false, status);
    }
    const xd_launch launch = xdi_train_launch(ema->ctx, status);
    xd_lerp_args args;
    args.arrays = ema->lerps;
    args.list = ema->list;
    args.array_count = 0;
    args.keep = xdi_ema_decay_at(&ema->desc, iteration);
    args.weighted_sum = ema->desc.compat_credit;
    args.turn = ema->counts_there ? ema->turn : NULL;
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        if (p->buffer || (joined && xdi_ema_can_join(ema, s))) continue;
        xd_lerp_array *lerp = &ema->lerps[args.array_count++];
        lerp->target = s->value;
        lerp->target_dtype = s->dtype;
        lerp->source = p->value;
        lerp->source_dtype = p->dtype;
        lerp->count = p->count;
    }
    XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.lerp(&launch, &args));
    return xdi_ema_copy(ema, false, status);
}

/* The error of calls that cannot work while values and shadows are exchanged. */
XD_PRIVATE xd_result xdi_ema_in_place(const xd_ema *ema) {
    XD_REQUIRE(ema->ctx, !ema->swapped, XD_ERROR_STATE,
               "the average is exchanged with the values of its %lld parameters: xd_ema_swap brings it back",
               (long long)ema->param_count);
    return XD_OK;
}

/* What updates, steps and exchanges ask of the list. */
static xd_result xdi_ema_same_list(const xd_ema *ema) {
    for (int64_t i = 0; i < ema->param_count; i++) {
        const xd_param *now = &ema->params[i], *then = &ema->created[i];
        XD_REQUIRE(ema->ctx,
                   now->value == then->value && now->count == then->count && now->dtype == then->dtype &&
                       now->buffer == then->buffer,
                   XD_ERROR_STATE, "%s: value, dtype, count or flags changed since creation",
                   ema->names[i].text);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_ema_unchanged(const xd_ema *ema) {
    XD_TRY(xdi_ema_in_place(ema));
    return xdi_ema_same_list(ema);
}

XD_API void xd_ema_count_unmoved(xd_ema *ema, int64_t *unmoved) {
    ema->unmoved = unmoved;
}

/* The count of an update begins. */
static xd_result xdi_ema_count_none(const xd_ema *ema) {
    const xd_launch launch = xdi_train_launch(ema->ctx, NULL);
    if (!ema->unmoved) return XD_OK;
    return xd_ctx_kernels(ema->ctx)->memory.fill(&launch, ema->unmoved, 0, sizeof *ema->unmoved);
}

/* ---- counters on a device ---- */

/* Whether the device counts an update, because it alone knows whether this step is refused, or one before was. */
static bool xdi_ema_is_counted_there(const xd_ema *ema, const xd_status *status) {
    return ema->turn && xd_ctx_kernels(ema->ctx)->optimizer.turn && (status || ema->counts_there);
}

/* Begins an update there. The host goes on as if its step was not refused: it has the decay of that iteration, and if steps were
 * refused the device has it from the update that was to have it. */
static xd_result xdi_ema_take_turn(xd_ema *ema, int64_t iteration, const xd_status *status) {
    const xd_launch launch = xdi_train_launch(ema->ctx, status);
    xd_turn_args args;
    memset(&args, 0, sizeof args);
    args.turn = ema->turn;
    args.next = iteration == XD_EMA_NEXT;
    args.iteration = args.next ? ema->iteration + 1 : iteration;
    args.keep = xdi_ema_decay_at(&ema->desc, args.iteration);
    args.start = ema->desc.start_iteration;
    args.begins = !ema->counts_there;
    args.last = ema->iteration;
    args.initialized = ema->initialized;
    XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.turn(&launch, &args));
    if (args.begins) ema->most = ema->iteration;
    if (args.next) ema->most++;
    if (ema->most < args.iteration) ema->most = args.iteration;
    ema->counts_there = true;
    ema->iteration = args.iteration;
    ema->initialized = ema->initialized || args.iteration >= args.start;
    return XD_OK;
}

/* The counters as they are, wherever. On a device this waits. */
static void xdi_ema_read_counters(const xd_ema *ema, int64_t *iteration, bool *initialized) {
    int64_t counters[2];
    *iteration = ema->iteration;
    *initialized = ema->initialized;
    if (!ema->counts_there || xd_read(ema->ctx, counters, &ema->turn->iteration, sizeof counters) != XD_OK)
        return;
    *iteration = counters[0];
    *initialized = counters[1] != 0;
}

/* The host has the counters again. */
static void xdi_ema_recall_counters(xd_ema *ema) {
    xdi_ema_read_counters(ema, &ema->iteration, &ema->initialized);
    ema->counts_there = false;
}

XD_PRIVATE xd_result xdi_ema_begin(xd_ema *ema, const xd_status *status, const xd_average_turn **turn) {
    *turn = NULL;
    if (!xdi_ema_is_counted_there(ema, status)) return XD_OK;
    XD_TRY(xdi_ema_take_turn(ema, XD_EMA_NEXT, status));
    *turn = ema->turn;
    return XD_OK;
}

/* ---- one update ---- */

static xd_result xdi_ema_update_there(xd_ema *ema, int64_t iteration, const xd_status *status) {
    XD_TRY(xdi_ema_take_turn(ema, iteration, status));
    return ema->most < ema->desc.start_iteration ? XD_OK
                                                 : xdi_ema_average(ema, ema->iteration, false, status);
}

XD_PRIVATE xd_result xdi_ema_has_next(const xd_ema *ema) {
    XD_REQUIRE(ema->ctx, ema->iteration < INT64_MAX, XD_ERROR_ARGUMENT, "there is no iteration after %lld",
               (long long)ema->iteration);
    return XD_OK;
}

XD_API xd_result xd_ema_update(xd_ema *ema, int64_t iteration, const xd_status *status) {
    XD_REQUIRE(ema->ctx, iteration >= XD_EMA_NEXT, XD_ERROR_ARGUMENT, "iteration %lld is negative",
               (long long)iteration);
    if (iteration == XD_EMA_NEXT) XD_TRY(xdi_ema_has_next(ema));
    XD_TRY(xdi_ema_unchanged(ema));
    XD_TRY(xdi_ema_count_none(ema));
    if (xdi_train_refused(ema->ctx, status)) return XD_OK;
    if (xdi_ema_is_counted_there(ema, status)) return xdi_ema_update_there(ema, iteration, status);
    const int64_t i = iteration == XD_EMA_NEXT ? ema->iteration + 1 : iteration;
    ema->iteration = i;
    if (i < ema->desc.start_iteration) return XD_OK;
    /* With init_from_current and start 0 the iterations begin at 1, so they are never equal. */
    if (i != ema->desc.start_iteration && ema->initialized) return xdi_ema_average(ema, i, false, status);
    XD_TRY(xdi_ema_copy(ema, true, status));
    ema->initialized = true;
    return XD_OK;
}

/* When xd_ema_update would average: not before the start iteration, and not the copy at it. Elements that do not move are
 * counted in a pass of its own. */
XD_PRIVATE bool xdi_ema_joins(const xd_ema *ema, const xd_param *list, int64_t count) {
    return list == ema->params && count >= ema->param_count && ema->initialized && !ema->unmoved &&
           ema->iteration + 1 > ema->desc.start_iteration;
}

XD_PRIVATE bool xdi_ema_join_arrays(const xd_ema *ema, xd_update_args *args) {
    if (!xdi_ema_is_plain(ema)) return false;
    args->keep = xdi_ema_decay_at(&ema->desc, ema->iteration + 1);
    args->weighted_sum = ema->desc.compat_credit;
    return true;
}

XD_PRIVATE bool xdi_ema_join_beside(const xd_ema *ema, int64_t count, xd_average_args *args) {
    if (count != ema->param_count) return false;
    xdi_ema_fill_args(ema, XD_AVERAGE_MOVE, ema->iteration + 1, args);
    args->arrays = ema->moves;
    return true;
}

XD_PRIVATE void xdi_ema_join(const xd_ema *ema, int64_t index, xd_update_array *update) {
    if (index >= ema->param_count) return;
    const xdi_ema_shadow *s = &ema->shadows[ema->names[index].shadow];
    if (!xdi_ema_can_join(ema, s)) return;
    update->average = s->value;
    update->average_dtype = s->dtype;
}

XD_PRIVATE void xdi_ema_join_move(const xd_ema *ema, int64_t index, int64_t k) {
    int64_t origin;
    const xdi_ema_shadow *s = &ema->shadows[ema->names[index].shadow];
    const xd_interval all = { 0, ema->created[s->source].count };
    memset(&ema->moves[k], 0, sizeof ema->moves[k]);
    if (!xdi_ema_can_join(ema, s)) return;
    xdi_ema_is_adjacent(ema, s, &origin);
    xdi_ema_describe_move(ema, s, all, origin, &ema->moves[k]);
}

XD_PRIVATE xd_result xdi_ema_follow(xd_ema *ema, const xd_status *status) {
    if (!ema->counts_there) ema->iteration++; /* xdi_ema_begin has */
    return xdi_ema_average(ema, ema->iteration, true, status);
}

/* ---- exchange ---- */

static xd_result xdi_ema_check_swap(const xd_ema *ema) {
    XD_TRY(xdi_ema_same_list(ema));
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_dtype dtype = ema->created[s->source].dtype;
        XD_REQUIRE(ema->ctx, s->dtype == dtype, XD_ERROR_DTYPE, "%s: a shadow of %s and values of %s",
                   s->name, xd_dtype_name(s->dtype), xd_dtype_name(dtype));
    }
    return XD_OK;
}

XD_API xd_result xd_ema_swap(xd_ema *ema) {
    const xd_launch launch = xdi_train_launch(ema->ctx, NULL);
    xd_swap_array arrays[XDI_EMA_AT_ONCE];
    int64_t n = 0;
    XD_TRY(xdi_ema_check_swap(ema));
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        arrays[n].a = s->value;
        arrays[n].b = p->value;
        arrays[n++].bytes = p->count * (int64_t)xd_dtype_size(s->dtype);
        if (n < XDI_EMA_AT_ONCE && i + 1 < ema->shadow_count) continue;
        XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.swap(&launch, arrays, n));
        n = 0;
    }
    ema->swapped = !ema->swapped;
    return XD_OK;
}

XD_API bool xd_ema_is_swapped(const xd_ema *ema) {
    return ema->swapped;
}

/* ---- in and out ---- */

XD_API int64_t xd_ema_count(const xd_ema *ema) {
    return ema->shadow_count;
}

XD_API xd_param xd_ema_view(const xd_ema *ema, int64_t index) {
    xd_param view;
    memset(&view, 0, sizeof view);
    if (index < 0 || index >= ema->shadow_count) return view;
    const xdi_ema_shadow *s = &ema->shadows[index];
    view = ema->created[s->source];
    view.frozen = ema->params[s->source].frozen; /* it may have been thawed */
    view.name = s->name;
    view.value = s->value;
    view.dtype = s->dtype;
    view.gradient = NULL;
    return view;
}

XD_PRIVATE int64_t xdi_ema_entries(const xd_ema *ema) {
    return ema->param_count;
}

XD_PRIVATE xd_param xdi_ema_entry(const xd_ema *ema, int64_t index) {
    const xdi_ema_shadow *s = &ema->shadows[ema->names[index].shadow];
    xd_param entry = ema->created[index];
    entry.value = s->value;
    entry.dtype = s->dtype;
    entry.gradient = NULL;
    return entry;
}

/* The compensation of a shadow, in the view of its value; a view of nothing where there is none. */
static xd_param xdi_ema_compensation_of(const xd_ema *ema, const xdi_ema_shadow *s, xd_param view) {
    if (!ema->desc.compensated || view.buffer) memset(&view, 0, sizeof view);
    if (view.name) view.dtype = XD_DTYPE_BF16;
    view.value = s->compensation;
    return view;
}

XD_API xd_param xd_ema_compensation(const xd_ema *ema, int64_t index) {
    const xd_param view = xd_ema_view(ema, index);
    return view.name ? xdi_ema_compensation_of(ema, &ema->shadows[index], view) : view;
}

XD_PRIVATE xd_param xdi_ema_entry_compensation(const xd_ema *ema, int64_t index) {
    return xdi_ema_compensation_of(ema, &ema->shadows[ema->names[index].shadow], xdi_ema_entry(ema, index));
}

XD_PRIVATE void xdi_ema_restore(xd_ema *ema, int64_t iteration, bool initialized) {
    ema->counts_there = false;
    ema->iteration = iteration;
    ema->initialized = initialized;
}

XD_API xd_ema_record xd_ema_describe(const xd_ema *ema) {
    xd_ema_record record;
    memset(&record, 0, sizeof record);
    record.format_version = 1;
    xdi_ema_read_counters(ema, &record.iteration, &record.initialized);
    record.config = ema->desc;
    return record;
}

/* Adds a name to the list of those that did not match, while there is room and there are fewer than five. */
static void xdi_ema_note(xd_ema_match *match, const char *name) {
    const int64_t noted = match->missing_in_shadow + match->missing_in_target + match->wrong_shape;
    const size_t used = strlen(match->names), length = strlen(name), comma = used ? 2 : 0;
    if (noted > 5 || used + comma + length + 1 > sizeof match->names) return;
    if (comma) memcpy(match->names + used, ", ", 2);
    memcpy(match->names + used + comma, name, length + 1);
}

static bool xdi_ema_same_shape(const xd_param *a, const xd_param *b) {
    if (a->count != b->count) return false;
    if (!a->shape || !b->shape) return true;
    return a->dims == b->dims && memcmp(a->shape, b->shape, (size_t)a->dims * sizeof *a->shape) == 0;
}

/* Compares a caller's list with the shadows. Matched shadows are marked by casts[shadow].count >= 0: the array is not
 * in use between updates. */
static void xdi_ema_compare(const xd_ema *ema, const xd_param *list, int64_t count, xd_ema_match *match) {
    char room[XDI_EMA_NAME_ROOM];
    memset(match, 0, sizeof *match);
    for (int64_t i = 0; i < ema->shadow_count; i++) ema->casts[i].count = -1;
    for (int64_t i = 0; i < count; i++) {
        const char *name = list[i].name ? list[i].name : "(unnamed)";
        const int64_t s = xdi_ema_find(ema, name, room, sizeof room);
        if (s < 0) {
            match->missing_in_shadow++;
            xdi_ema_note(match, name);
            continue;
        }
        ema->casts[s].count = 0;
        if (xdi_ema_same_shape(&list[i], &ema->created[ema->shadows[s].source])) {
            match->matched++;
        } else {
            match->wrong_shape++;
            xdi_ema_note(match, name);
        }
    }
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        if (ema->casts[i].count == 0) continue;
        match->missing_in_target++;
        xdi_ema_note(match, ema->shadows[i].name);
    }
}

static xd_result xdi_ema_judge(const xd_ema *ema, const xd_ema_match *m, bool lenient, bool loading) {
    XD_REQUIRE(ema->ctx, m->wrong_shape == 0, XD_ERROR_SHAPE, "%lld of %lld tensors have another shape: %s",
               (long long)m->wrong_shape, (long long)(m->matched + m->wrong_shape), m->names);
    if (lenient) return XD_OK;
    /* missing: a name that the receiver needs and does not get; unexpected: one that it does not have */
    XD_REQUIRE(ema->ctx, m->missing_in_target == 0, loading ? XD_ERROR_MISSING : XD_ERROR_UNEXPECTED,
               "%lld shadows of %lld have no counterpart: %s", (long long)m->missing_in_target,
               (long long)ema->shadow_count, m->names);
    XD_REQUIRE(ema->ctx, m->missing_in_shadow == 0, loading ? XD_ERROR_UNEXPECTED : XD_ERROR_MISSING,
               "%lld names have no shadow: %s", (long long)m->missing_in_shadow, m->names);
    return XD_OK;
}

static xd_result xdi_ema_move(const xd_ema *ema, const xd_param *list, int64_t count, bool loading,
                              bool write) {
    const xd_launch launch = xdi_train_launch(ema->ctx, NULL);
    char room[XDI_EMA_NAME_ROOM];
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = xdi_ema_find(ema, list[i].name, room, sizeof room);
        if (index < 0) continue;
        XD_REQUIRE(ema->ctx, list[i].value || list[i].count == 0, XD_ERROR_ARGUMENT,
                   "%s: %lld elements at NULL", list[i].name, (long long)list[i].count);
        const xdi_ema_shadow *s = &ema->shadows[index];
        xd_cast_array cast;
        cast.target = loading ? s->value : list[i].value;
        cast.target_dtype = loading ? s->dtype : list[i].dtype;
        cast.source = loading ? list[i].value : s->value;
        cast.source_dtype = loading ? list[i].dtype : s->dtype;
        cast.count = write ? list[i].count : 0; /* an empty cast still checks its dtypes */
        XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.cast(&launch, &cast, 1));
    }
    return XD_OK;
}

/* All checks come before the first element is written. */
static xd_result xdi_ema_exchange(const xd_ema *ema, const xd_param *list, int64_t count, bool lenient,
                                  bool loading, xd_ema_match *match) {
    xd_ema_match found;
    XD_TRY(xdi_ema_in_place(ema));
    XD_REQUIRE(ema->ctx, count >= 0 && (list || count == 0), XD_ERROR_ARGUMENT, "%lld tensors at %p",
               (long long)count, (const void *)list);
    xdi_ema_compare(ema, list, count, &found);
    if (match) *match = found;
    XD_TRY(xdi_ema_judge(ema, &found, lenient, loading));
    XD_TRY(xdi_ema_move(ema, list, count, loading, false));
    return xdi_ema_move(ema, list, count, loading, true);
}

XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match) {
    return xdi_ema_exchange(ema, targets, count, lenient, false, match);
}

/* Whether the last comparison matched every parameter, that is every shadow that is not of a buffer. */
static bool xdi_ema_complete(const xd_ema *ema) {
    for (int64_t i = 0; i < ema->shadow_count; i++)
        if (ema->casts[i].count < 0 && !ema->created[ema->shadows[i].source].buffer) return false;
    return ema->shadow_count > 0;
}

/* Compensations of what the last comparison matched become zero. */
static xd_result xdi_ema_forget(const xd_ema *ema) {
    const xd_launch launch = xdi_train_launch(ema->ctx, NULL);
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const size_t bytes = (size_t)ema->created[s->source].count * sizeof *s->compensation;
        if (!s->compensation || ema->casts[i].count < 0 || bytes == 0) continue;
        XD_TRY(xd_ctx_kernels(ema->ctx)->memory.fill(&launch, s->compensation, 0, bytes));
    }
    return XD_OK;
}

XD_API xd_result xd_ema_load(xd_ema *ema, const xd_param *sources, int64_t count,
                             const xd_ema_load_desc *desc, xd_ema_match *match) {
    const xd_ema_record *record = desc ? desc->record : NULL;
    XD_REQUIRE(ema->ctx, !record || record->format_version == 1, XD_ERROR_FORMAT,
               "the record has format version %d, this library reads 1", record->format_version);
    XD_TRY(xdi_ema_exchange(ema, sources, count, desc && desc->lenient, true, match));
    XD_TRY(xdi_ema_forget(ema));
    xdi_ema_recall_counters(ema);
    if (record) ema->iteration = record->iteration;
    if (xdi_ema_complete(ema) || (record && record->initialized)) ema->initialized = true;
    return XD_OK;
}
