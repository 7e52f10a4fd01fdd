/* Exponential moving averages of parameters. */

#include "comm/topology.h"
#include "tensor/internal.h"
#include "train/ema_internal.h"
#include "train/internal.h"
#include "train/optimizer.h"

#include <math.h>
#include <string.h>

enum { XDI_EMA_AT_ONCE = 32 }; /* lists of some calls are on the stack */

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

XD_PRIVATE double xdi_ema_decay_at(const xd_ema_desc *d, int64_t iteration) {
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

XD_PRIVATE int64_t xdi_ema_find(const xd_ema *ema, const char *name, char *room, size_t room_bytes) {
    if (!name || strlen(name) >= room_bytes) return -1;
    xdi_ema_strip(&ema->desc, name, room);
    const int64_t entry = ema->slots[xdi_ema_slot(ema, room)];
    return entry ? ema->names[entry - 1].shadow : -1;
}

/* ---- life ---- */

static xd_result xdi_ema_validate_params(xd_ctx *ctx, const xd_param *params, int64_t count) {
    XD_REQUIRE(ctx, count >= 0, XD_ERROR_ARGUMENT, "%lld parameters", (long long)count);
    XDI_GIVEN_LIST(ctx, params, count);
    for (int64_t i = 0; i < count; i++) {
        const xd_param *p = &params[i];
        XD_REQUIRE(ctx, p->name && strlen(p->name) < XDI_EMA_NAME_ROOM, XD_ERROR_ARGUMENT,
                   "parameter %lld has no name, or one of more than %d bytes", (long long)i,
                   XDI_EMA_NAME_ROOM - 1);
        XD_REQUIRE(ctx, p->dims >= 0, XD_ERROR_ARGUMENT, "%s: %d dimensions", p->name, p->dims);
        XD_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                   "%s: %lld elements, value at %p", p->name, (long long)p->count, p->value);
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
        XD_TRY(xdi_part_check_region(ctx, &d->parts[i]));
        XD_REQUIRE(ctx, xdi_part_fits(&d->parts[i], p->count), XD_ERROR_SHAPE,
                   "%s: %lld elements, its part has %lld", p->name, (long long)p->count, (long long)here);
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

/* Whether a name ends as those of the vectors of a power iteration do. */
static bool xdi_ema_is_vector(const char *name) {
    const size_t length = strlen(name);
    return length > 1 && name[length - 2] == '_' && (name[length - 1] == 'u' || name[length - 1] == 'v');
}

/* Whether a shadow is a copy of what it follows. */
static bool xdi_ema_copies(const xd_ema_desc *d, const xd_param *p) {
    if (!p->buffer) return false;
    return !d->average_buffers || !xdi_ema_averages(p->dtype) || xdi_ema_is_vector(p->name);
}

static xd_dtype xdi_ema_shadow_dtype(const xd_ema_desc *d, const xd_param *p) {
    return xdi_ema_copies(d, p) || d->live_dtype ? p->dtype : d->dtype;
}

/* Memory of an average: the object and its lists, then on a device what is there, and page-locked memory. */
typedef struct xdi_ema_room {
    xd_arena here, device, locked;
} xdi_ema_room;

/* Where shadows go. */
static xd_arena *xdi_ema_shadow_room(xd_ctx *ctx, const xd_ema_desc *d, xdi_ema_room *room) {
    if (!xdi_train_on_device(ctx)) return &room->here;
    return d->host ? &room->locked : &room->device;
}

/* Lays everything out, the object itself first. Run once without memory to get the sizes, once with it. */
static void xdi_ema_lay_out(xd_ctx *ctx, xdi_ema_room *room, const xd_ema_desc *d, xd_ema *ema) {
    const xd_param *params = d->params;
    const int64_t count = d->param_count;
    xd_arena *arena = &room->here, *memory = xdi_ema_shadow_room(ctx, d, room);
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
        if (tie == i && d->compensated && !xdi_ema_copies(d, p))
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
        shadow->copied = xdi_ema_copies(d, p);
    }
    if (memory != arena)
        laid.turn = (xd_average_turn *)xd_arena_take_pointer(&room->device, sizeof *laid.turn);
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
    return part->range.begin < part->range.end && xdi_part_run(part, part->range.begin, origin) == count;
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
        const int64_t at = part->range.begin + piece.begin;
        piece.end =
            at < part->range.end ? piece.begin + xdi_part_run(part, at, &origin) : p->count; /* padding */
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

/* The average entry over all shadows that are no copies; `joined`: without those that have joined a step. */
static xd_result xdi_ema_run(const xd_ema *ema, xd_average_kind kind, int64_t iteration, bool joined,
                             const xd_status *status) {
    const xd_launch launch = xdi_train_launch(ema->ctx, status);
    xdi_ema_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.launch = &launch;
    xdi_ema_fill_args(ema, kind, iteration, &batch.args);
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        if (s->copied || (joined && xdi_ema_can_join(ema, s))) continue;
        XD_TRY(xdi_ema_push_shadow(&batch, ema, s));
    }
    return batch.args.array_count > 0 ? xdi_ema_flush(&batch) : XD_OK;
}

/* shadow <- live, those that are averaged too when `all`, else the copies alone. */
static xd_result xdi_ema_copy(xd_ema *ema, bool all, const xd_status *status) {
    const xd_launch launch = xdi_train_launch(ema->ctx, status);
    int64_t n = 0;
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        if (!s->copied && (!all || ema->desc.compensated)) continue;
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

/* What xdi_ema_room takes. */
typedef struct xdi_ema_sizes {
    size_t here, device, locked;
} xdi_ema_sizes;

static xd_result xdi_ema_take(xd_ema *ema, int64_t count, const xdi_ema_sizes *sizes, xdi_ema_room *room) {
    const xd_device_ops *memory = &xd_ctx_kernels(ema->ctx)->memory;
    if (sizes->device) ema->device_memory = memory->allocate(ema->ctx, sizes->device);
    if (sizes->locked) ema->locked = memory->host_allocate(ema->ctx, sizes->locked);
    XD_REQUIRE(ema->ctx, ema->device_memory || !sizes->device, XD_ERROR_MEMORY,
               "no room for the average of %lld parameters: %zu bytes of the device", (long long)count,
               sizes->device);
    XD_REQUIRE(ema->ctx, ema->locked || !sizes->locked, XD_ERROR_MEMORY,
               "no room for the average of %lld parameters: %zu bytes of page-locked memory",
               (long long)count, sizes->locked);
    room->here = xd_arena_over(ema, sizes->here);
    room->device = xd_arena_over(ema->device_memory, sizes->device);
    room->locked = xd_arena_over(ema->locked, sizes->locked);
    return XD_OK;
}

/* Fills the block that begins with the object. */
static xd_result xdi_ema_build(xd_ema *ema, xd_ctx *ctx, const xd_ema_desc *d, const xdi_ema_sizes *sizes) {
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(ctx)->optimizer;
    xdi_ema_room room;
    ema->ctx = ctx;
    XD_TRY(xdi_ema_take(ema, d->param_count, sizes, &room));
    void *device_memory = ema->device_memory, *locked = ema->locked;
    xdi_ema_lay_out(ctx, &room, d, ema);
    ema->ctx = ctx;
    ema->device_memory = device_memory;
    ema->locked = locked;
    ema->desc = *d;
    ema->params = d->params;
    ema->param_count = d->param_count;
    ema->initialized = d->init_from_current;
    XD_TRY(xdi_ema_index(ema));
    if (kernels->list_create) XD_TRY(kernels->list_create(ctx, d->param_count, &ema->list));
    return xdi_ema_copy(ema, true, NULL);
}

/* Fills in the defaults of a desc, checks everything, and finds the sizes. */
static xd_result xdi_ema_plan(xd_ctx *ctx, xd_ema_desc *d, xdi_ema_sizes *sizes) {
    xdi_ema_room room;
    XD_REQUIRE(ctx, d->strip_count >= 0, XD_ERROR_ARGUMENT, "%d tokens to strip", d->strip_count);
    xdi_ema_resolve(d);
    if (d->schedule == XD_EMA_POWER && d->sigma_rel != 0.0)
        XD_TRY(xdi_post_hoc_gamma(ctx, d->sigma_rel, &d->gamma));
    XD_TRY(xdi_ema_validate(ctx, d));
    XD_TRY(xdi_ema_validate_params(ctx, d->params, d->param_count));
    XD_TRY(xdi_ema_validate_places(ctx, d, d->params, d->param_count));
    XD_REQUIRE(ctx, !d->host || xd_ctx_kernels(ctx)->memory.host_allocate, XD_ERROR_UNSUPPORTED,
               "an average on the host: \"%s\" offers no page-locked memory", xd_ctx_kernels(ctx)->name);
    room.here = room.device = room.locked = xd_arena_over(NULL, 0);
    xdi_ema_lay_out(ctx, &room, d, NULL);
    sizes->here = room.here.peak;
    sizes->device = room.device.peak;
    sizes->locked = room.locked.peak;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_ema_bytes(xd_ctx *ctx, const xd_ema_desc *desc, xd_memory_bytes *out) {
    xd_ema_desc d = *desc;
    xdi_ema_sizes sizes;
    XD_TRY(xdi_ema_plan(ctx, &d, &sizes));
    const xd_memory_bytes bytes = { sizes.here + sizes.locked, sizes.device };
    *out = xdi_train_with_list(ctx, bytes, d.param_count);
    return XD_OK;
}

static xd_result xdi_ema_add_to_plan(xd_ctx *ctx, const xd_ema_desc *desc) {
    xd_memory_bytes bytes = { 0, 0 };
    XD_TRY(xdi_ema_bytes(ctx, desc, &bytes));
    return xdi_plan_add(ctx, bytes);
}

XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_ema_desc *desc, xd_ema **out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, out);
    xd_ema_desc d = *desc;
    xdi_ema_sizes sizes;
    XDI_GIVEN_LIST(ctx, desc->params, desc->param_count);
    if (xdi_plan_is_open(ctx)) {
        *out = NULL;
        return xdi_ema_add_to_plan(ctx, desc);
    }
    XD_TRY(xdi_ema_plan(ctx, &d, &sizes));
    xd_ema *ema = XDI_OBJECT(xd_ema, ctx, sizes.here);
    XD_REQUIRE(ctx, ema, XD_ERROR_MEMORY, "no room for the average of %lld parameters: %zu bytes",
               (long long)d.param_count, sizes.here);
    const xd_result result = xdi_ema_build(ema, ctx, &d, &sizes);
    if (result == XD_OK)
        *out = ema;
    else
        xd_ema_destroy(ema);
    return result;
}

/* Page-locked memory is given back when nothing is under way to it. */
static void xdi_ema_unlock(xd_ema *ema) {
    const xd_device_ops *memory = &xd_ctx_kernels(ema->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ema->ctx);
    if (!ema->locked) return;
    (void)memory->synchronize(&launch);
    memory->host_release(ema->ctx, ema->locked);
}

XD_API void xd_ema_destroy(xd_ema *ema) {
    if (!ema || XDI_IS_GONE(xd_ema, ema)) return;
    xdi_ema_unlock(ema);
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
    args.array_count = joined ? 0 : ema->last.lerp_count;
    args.same = args.array_count > 0; /* what they point at does not change */
    args.keep = xdi_ema_decay_at(&ema->desc, iteration);
    args.weighted_sum = ema->desc.compat_credit;
    args.turn = ema->counts_there ? ema->turn : NULL;
    bool copies = false;
    for (int64_t i = 0; i < ema->shadow_count && !args.same; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        copies = copies || s->copied;
        if (s->copied || (joined && xdi_ema_can_join(ema, s))) continue;
        xd_lerp_array *lerp = &ema->lerps[args.array_count++];
        lerp->target = s->value;
        lerp->target_dtype = s->dtype;
        lerp->source = p->value;
        lerp->source_dtype = p->dtype;
        lerp->count = p->count;
    }
    ema->last.lerp_count = 0; /* until it has succeeded */
    if (joined) ema->last.none_left = false;
    XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.lerp(&launch, &args));
    ema->last.lerp_count = joined ? 0 : args.array_count;
    if (joined) ema->last.none_left = args.array_count == 0 && !copies;
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
    char text[XDI_CHANGED];
    for (int64_t i = 0; i < ema->param_count; i++) {
        const xd_param *now = &ema->params[i], *then = &ema->created[i];
        XD_REQUIRE(ema->ctx,
                   now->value == then->value && now->count == then->count && now->dtype == then->dtype &&
                       now->buffer == then->buffer,
                   XD_ERROR_STATE, "%s: value, dtype, count or flags changed since creation: %s",
                   ema->names[i].text, xdi_train_changed(then, now, text));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_ema_unchanged(const xd_ema *ema) {
    XD_TRY(xdi_ema_in_place(ema));
    return xdi_ema_same_list(ema);
}

XD_API void xd_ema_count_unmoved(xd_ema *ema, int64_t *unmoved) {
    XD_ASSERT(ema);
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

XD_PRIVATE void xdi_ema_read_counters(const xd_ema *ema, int64_t *iteration, bool *initialized) {
    int64_t counters[2];
    *iteration = ema->iteration;
    *initialized = ema->initialized;
    if (!ema->counts_there || xd_read(ema->ctx, counters, &ema->turn->iteration, sizeof counters) != XD_OK)
        return;
    *iteration = counters[0];
    *initialized = counters[1] != 0;
}

XD_PRIVATE void xdi_ema_recall_counters(xd_ema *ema) {
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
    XDI_LIVE(xd_ema, ema);
    XDI_GIVEN(ema ? ema->ctx : NULL, ema);
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

XD_PRIVATE bool xdi_ema_joined_last(const xd_ema *ema, const xd_optimizer *optimizer) {
    return ema->last.optimizer == optimizer;
}

XD_PRIVATE bool xdi_ema_joins_again(xd_ema *ema, const xd_optimizer *optimizer) {
    const bool again = xdi_ema_joined_last(ema, optimizer);
    ema->last.optimizer = optimizer;
    return again;
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

XD_PRIVATE xd_result xdi_ema_follow(xd_ema *ema, bool same, const xd_status *status) {
    if (!ema->counts_there) ema->iteration++; /* xdi_ema_begin has */
    if (same && ema->last.none_left && !ema->unmoved) return XD_OK;
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
    XDI_LIVE(xd_ema, ema);
    XDI_GIVEN(ema ? ema->ctx : NULL, ema);
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
