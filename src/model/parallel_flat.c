/* Flat buffers: where each weight lies, the memory of a wrapper, and the values in it. */

#include "base/internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "model/internal.h"

#include <string.h>

/* ---- plans ---- */

/* Ranks that a buffer's sums are divided among. */
static int xdi_flat_shards(const xd_parallel *p, const xdi_flat *flat) {
    return !flat->whole || (p->split_optimizer && flat->trained) ? p->ranks : 1;
}

/* Elements of all weights that have buckets. */
static int64_t xdi_parallel_trained_count(const xd_parallel *p) {
    int64_t sum = 0;
    for (int64_t f = 0; f < p->flat_count; f++)
        for (int64_t i = 0; i < p->flats[f].count && p->flats[f].trained; i++)
            sum += p->flats[f].weights[i]->count;
    return sum;
}

/* Elements from which on a bucket ends, for all buffers alike. */
static xd_result xdi_parallel_bucket_size(const xd_parallel *p, int64_t *out) {
    const int64_t ranks = (int64_t)p->ranks * p->replica_count, count = xdi_parallel_trained_count(p);
    *out = p->bucket_size ? p->bucket_size : 1000000 * (ranks > 40 ? ranks : 40);
    if (p->bucket_parts == 0 || p->stage > 0 || p->chunk > 0 || p->gathers_in_step) return XD_OK;
    XD_REQUIRE(p->ctx, p->bucket_parts <= count, XD_ERROR_ARGUMENT, "%lld buckets of %lld elements",
               (long long)p->bucket_parts, (long long)count);
    *out = count / p->bucket_parts;
    return XD_OK;
}

static xd_result xdi_flat_plan(xd_parallel *p, xdi_flat *flat) {
    xd_bucket_plan_desc d;
    int64_t size = 0;
    XD_TRY(xdi_parallel_bucket_size(p, &size));
    xd_bucket_param *params =
        (xd_bucket_param *)xd_allocate(p->ctx, ((size_t)flat->count + 1) * sizeof *params);
    XD_REQUIRE(p->ctx, params, XD_ERROR_MEMORY, "no room for %lld weights", (long long)flat->count);
    for (int64_t i = 0; i < flat->count; i++) {
        params[i].numel = flat->weights[i]->count;
        params[i].shared_embedding =
            flat->whole && p->split_optimizer && flat->weights[i]->desc.traits.shared_embedding;
    }
    memset(&d, 0, sizeof d);
    d.params = params;
    d.param_count = flat->count;
    d.ranks = xdi_flat_shards(p, flat);
    d.sharded = true; /* also of one rank, for the alignment */
    d.wide_padding = p->wide_padding && d.ranks > 1;
    d.overlap = !p->sharded && p->reductions;
    d.bucket_size = size;
    d.stage = p->stage;
    d.chunk = p->chunk;
    d.gathers_in_step = p->gathers_in_step;
    const xd_result result = xd_bucket_plan_create(p->ctx, &d, &flat->plan);
    xd_release(p->ctx, params);
    if (result == XD_OK && flat->trained) flat->bucket_count = xd_bucket_plan_count(flat->plan);
    return result;
}

XD_PRIVATE xdi_bucket *xdi_flat_bucket(const xd_weight *owner) {
    int64_t index = 0;
    if (!owner->flat->trained) return NULL;
    (void)xd_bucket_plan_param(owner->flat->plan, owner->flat_index, &index);
    return &owner->flat->buckets[index];
}

XD_PRIVATE xdi_bucket *xdi_gradient_bucket(const xd_weight *owner) {
    return xdi_weight_is_trained(owner) ? xdi_flat_bucket(owner) : NULL;
}

XD_PRIVATE xdi_bucket *xdi_block_bucket(xd_parallel *p, const xd_block *block, int64_t i) {
    xdi_bucket *bucket = xdi_gradient_bucket(p->model->weights[block->first + i]->owner);
    if (i == 0) p->round++;
    if (!bucket || bucket->seen == p->round) return NULL;
    bucket->seen = p->round;
    return bucket;
}

static void xdi_flat_list_buckets(const xd_parallel *p, xdi_flat *flat, xdi_bucket *buckets) {
    flat->buckets = buckets;
    for (int64_t i = 0; i < flat->bucket_count; i++) {
        buckets[i].flat = flat;
        buckets[i].places = p->places + (&buckets[i] - p->buckets) * p->members;
        if (p->lanes) buckets[i].lanes = p->lanes + (&buckets[i] - p->buckets) * p->members;
        const xd_interval part = xd_bucket_plan_shard(flat->plan, i, p->rank);
        buckets[i].buffer = xd_bucket_plan_at(flat->plan, i).buffer;
        buckets[i].kept = part.end - part.begin;
    }
}

XD_PRIVATE void xdi_parallel_count_blocks(xd_parallel *p) {
    for (int64_t i = 0; i < p->bucket_count; i++) p->buckets[i].blocks = 0;
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b))
        for (int64_t i = 0; i < b->count && b->expert == p->of_experts; i++) {
            xdi_bucket *bucket = xdi_block_bucket(p, b, i);
            if (bucket) bucket->blocks++;
        }
}

/* Lists of the leaves that are formed at once, of their stacks, and of what each stack has of a sum. */
static xd_result xdi_parallel_list_places(xd_parallel *p) {
    const size_t members = (size_t)p->members, all = ((size_t)p->bucket_count + 1) * members;
    const bool lanes = xdi_parallel_has_lanes(p);
    p->places = (float **)xd_allocate(p->ctx, all * sizeof(float *));
    p->forests = (const void **)xd_allocate(p->ctx, members * sizeof(const void *));
    p->forest_leaves = (xd_leaves *)xd_allocate(p->ctx, members * sizeof *p->forest_leaves);
    if (lanes) p->lanes = (xd_leaf_stack **)xd_allocate(p->ctx, all * sizeof(xd_leaf_stack *));
    XD_REQUIRE(p->ctx, p->places && p->forests && p->forest_leaves && (p->lanes || !lanes), XD_ERROR_MEMORY,
               "no room for leaves of %d members in %lld buckets", p->members, (long long)p->bucket_count);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_plan(xd_parallel *p) {
    int64_t at = 0;
    for (int64_t i = 0; i < p->flat_count; i++) {
        XD_TRY(xdi_flat_plan(p, &p->flats[i]));
        p->bucket_count += p->flats[i].bucket_count;
    }
    p->buckets = (xdi_bucket *)xd_allocate(p->ctx, ((size_t)p->bucket_count + 1) * sizeof *p->buckets);
    p->counts = (int64_t *)xd_allocate(p->ctx, (size_t)p->ranks * sizeof *p->counts);
    p->used = (int *)xd_allocate(p->ctx, ((size_t)p->model->weight_count + 1) * sizeof *p->used);
    XD_REQUIRE(p->ctx, p->buckets && p->counts && p->used, XD_ERROR_MEMORY, "no room for %lld buckets",
               (long long)p->bucket_count);
    XD_TRY(xdi_parallel_list_places(p));
    for (int64_t i = 0; i < p->flat_count; i++) {
        xdi_flat_list_buckets(p, &p->flats[i], p->buckets + at);
        at += p->flats[i].bucket_count;
    }
    xdi_parallel_count_blocks(p);
    return XD_OK;
}

/* ---- memory ---- */

/* Elements of a flat buffer's values that this rank keeps. */
static int64_t xdi_flat_kept(const xd_parallel *p, const xdi_flat *flat) {
    const int64_t numel = xd_bucket_plan_numel(flat->plan);
    return flat->whole ? numel : numel / p->ranks;
}

/* Whether the model's own storage is released: under FSDP, and where the model yields it. */
static bool xdi_parallel_leaves(const xd_parallel *p) {
    return p->sharded || p->model->yields;
}

/* Whether a weight that all ranks keep leaves that storage: also where it has another type. */
static bool xdi_flat_moves(const xd_parallel *p, const xd_weight *weight) {
    return (xdi_parallel_leaves(p) || weight->declared) && weight->value && !weight->desc.value;
}

/* Whether values are kept here: not where every weight has storage of its own and none is gathered. */
static bool xdi_flat_keeps(const xd_parallel *p, const xdi_flat *flat) {
    if (!flat->whole || xdi_flat_shards(p, flat) > 1) return true;
    for (int64_t i = 0; i < flat->count; i++)
        if (!flat->weights[i]->value || xdi_flat_moves(p, flat->weights[i])) return true;
    return false;
}

static void *xdi_parallel_take(xd_arena *arena, int64_t count, size_t size, size_t *bytes) {
    const size_t before = arena->used;
    size_t offset = 0;
    if (!xd_arena_take(arena, (size_t)count * size, &offset)) return NULL;
    *bytes += arena->used - before;
    return arena->base ? arena->base + offset : NULL;
}

/* Of what this rank keeps, with those parts that may be offloaded. */
static void *xdi_parallel_keep(xd_parallel *p, xdi_room *room, int64_t count, size_t size, size_t *bytes) {
    return p->offloaded ? xdi_parallel_take(&room->home, count, size, &p->bytes.host)
                        : xdi_parallel_take(&room->device, count, size, bytes);
}

/* What a unit takes while it is open: values as they are sent and, where they differ, as they are shown; whole gradients. */
static void xdi_unit_measure(xd_parallel *p, struct xdi_unit *unit) {
    xd_arena arena = xd_arena_over(NULL, 0);
    for (int64_t i = 0; i < unit->flat_count; i++) {
        xdi_flat *flat = &unit->flats[i];
        const size_t numel = (size_t)xd_bucket_plan_numel(flat->plan);
        if (!flat->whole && xdi_parallel_assembles(p))
            (void)xd_arena_take(&arena, numel * xd_dtype_size(flat->sent_dtype), &flat->slot);
        if (!flat->whole && flat->view_dtype != flat->sent_dtype)
            (void)xd_arena_take(&arena, numel * xd_dtype_size(flat->view_dtype), &flat->view_slot);
        flat->place = unit->gradient_count;
        if (flat->trained && xdi_gradient_is_sent(p))
            unit->gradient_count += (int64_t)numel * xdi_gradient_levels(p);
    }
    unit->gathered_bytes = arena.used;
    for (int i = 0; i < unit->slot_count; i++)
        if (arena.used > unit->slots[i].bytes) unit->slots[i].bytes = arena.used;
    for (int i = 0; i < unit->sum_count; i++)
        if (unit->gradient_count > unit->sums[i].count) unit->sums[i].count = unit->gradient_count;
}

XD_PRIVATE xd_leaves xdi_bucket_leaves(const xd_parallel *p) {
    xd_leaves leaves = p->leaves;
    if (p->dealt) {
        leaves.first = 0;
        if (xdi_gradient_is_sent(p)) leaves.count /= p->members; /* those of a round are one */
        leaves.total = leaves.count;
    } else if (!p->invariant) {
        leaves.first = 0;
        leaves.count = leaves.total = 1;
    }
    return leaves;
}

/* Whether the sum takes the place of the first node: it has its size and is at home, and other nodes are added here. */
static bool xdi_bucket_sums_in_place(const xd_parallel *p, const xdi_flat *flat) {
    const xd_leaves leaves = xdi_bucket_leaves(p);
    const bool one = p->ranks == 1 || xd_leaves_nodes(leaves.first, leaves.count) == 1;
    return p->dealt || (xdi_flat_shards(p, flat) == 1 && one && !p->offloaded);
}

/* Whether xd_pipeline_finish may sum gradients of a buffer over other ranks. */
static bool xdi_flat_is_finished(const xdi_flat *flat) {
    bool some = false;
    for (int64_t i = 0; i < flat->count; i++) {
        const xd_weight_traits *t = &flat->weights[i]->desc.traits;
        some = some || t->pipeline_parallel || t->shared_embedding || t->sequence_parallel ||
               t->averaged_over_tensor_parallel;
    }
    return some;
}

/* A stack, and the memory of its nodes. */
static xd_result xdi_bucket_take_stack(xd_parallel *p, xd_leaf_stack_desc *d, xdi_room *room,
                                       xd_leaf_stack **out) {
    size_t *bytes = &p->bytes.gradients;
    d->memory_bytes = xdi_leaf_stack_bytes(d);
    d->memory = p->dealt ? xdi_parallel_keep(p, room, (int64_t)d->memory_bytes, 1, bytes)
                         : xdi_parallel_take(&room->device, (int64_t)d->memory_bytes, 1, bytes);
    return room->device.base ? xd_leaf_stack_create_in(p->dealt ? p->home : p->ctx, d, out) : XD_OK;
}

/* A stack for each member's leaves, and room for their nodes as one stack would have them. */
static xd_result xdi_bucket_take_lanes(xd_parallel *p, xdi_bucket *b, xd_leaf_stack_desc *d, xdi_room *room) {
    const int64_t nodes = xd_leaves_nodes(d->leaves.first, d->leaves.count);
    for (int i = 0; i < p->members; i++) {
        const xd_interval row = xdi_parallel_row(p, i);
        d->leaves.first = row.begin;
        d->leaves.count = row.end - row.begin;
        XD_TRY(xdi_bucket_take_stack(p, d, room, &b->lanes[i]));
    }
    b->joined =
        (float *)xdi_parallel_take(&room->device, nodes * d->elements, sizeof(float), &p->bytes.gradients);
    return XD_OK;
}

static xd_result xdi_bucket_take(xd_parallel *p, const xdi_flat *flat, xdi_bucket *b, xdi_room *room) {
    size_t *bytes = &p->bytes.gradients;
    xd_leaf_stack_desc d;
    memset(&d, 0, sizeof d);
    d.leaves = xdi_bucket_leaves(p);
    d.elements = p->dealt ? b->kept : b->buffer.end - b->buffer.begin;
    XD_TRY(b->lanes ? xdi_bucket_take_lanes(p, b, &d, room) : xdi_bucket_take_stack(p, &d, room, &b->stack));
    if (xdi_bucket_sums_in_place(p, flat))
        b->sum = b->lanes ? b->joined : (float *)d.memory;
    else
        b->sum = (float *)xdi_parallel_keep(p, room, b->kept, sizeof(float), bytes);
    if (p->offloaded && (p->replica_count > 1 || !p->dealt || xdi_flat_is_finished(flat)))
        b->landed = (float *)xdi_parallel_take(&room->device, b->kept, sizeof(float), bytes);
    return XD_OK;
}

/* Values that stay: in their own type, and in others in which they are sent, shown, or kept by a few ranks together. */
static void xdi_flat_take_whole(xd_parallel *p, xdi_flat *flat, xdi_room *room) {
    const int64_t numel = xd_bucket_plan_numel(flat->plan);
    const size_t size = xd_dtype_size(flat->view_dtype);
    if (p->offloaded || flat->view_dtype != flat->dtype)
        flat->shown = xdi_parallel_take(&room->device, numel, size, &p->bytes.values);
    if (p->offloaded && flat->view_dtype != flat->dtype)
        flat->sent = xdi_parallel_keep(p, room, numel, size, &p->bytes.values);
}

static void xdi_flat_take_values(xd_parallel *p, xdi_flat *flat, xdi_room *room) {
    flat->kept_bytes = (size_t)xdi_flat_kept(p, flat) * xd_dtype_size(flat->dtype);
    flat->values = xdi_parallel_keep(p, room, (int64_t)flat->kept_bytes, 1, &p->bytes.values);
}

static void xdi_flat_take(xd_parallel *p, xdi_flat *flat, xdi_room *room) {
    const int64_t kept = xdi_flat_kept(p, flat), numel = xd_bucket_plan_numel(flat->plan);
    const size_t sent = xd_dtype_size(flat->sent_dtype);
    if (flat->whole) {
        if (xdi_flat_keeps(p, flat)) xdi_flat_take_values(p, flat, room);
        xdi_flat_take_whole(p, flat, room);
        return;
    }
    flat->sent = flat->values;
    if (flat->sent_dtype != flat->dtype)
        flat->sent = xdi_parallel_keep(p, room, kept, sent, &p->bytes.values);
    if (xdi_parallel_has_near(p))
        flat->near = xdi_parallel_take(&room->device, numel / p->reshard_ranks, sent, &p->bytes.gathered);
}

/* Lays everything out; with memory behind the arena also gives it out. */
static xd_result xdi_parallel_lay_out(xd_parallel *p, xdi_room *room) {
    xd_arena *arena = &room->device;
    memset(&p->bytes, 0, sizeof p->bytes);
    for (int64_t i = 0; i < p->flat_count; i++)
        if (!p->flats[i].whole) xdi_flat_take_values(p, &p->flats[i], room);
    room->values = p->offloaded ? room->home.used : arena->used;
    for (int64_t i = 0; i < p->flat_count; i++) {
        xdi_flat *flat = &p->flats[i];
        xdi_flat_take(p, flat, room);
        for (int64_t b = 0; b < flat->bucket_count; b++)
            XD_TRY(xdi_bucket_take(p, flat, &flat->buckets[b], room));
    }
    for (int64_t i = 0; i < p->slot_count; i++)
        p->slots[i].memory =
            (unsigned char *)xdi_parallel_take(arena, (int64_t)p->slots[i].bytes, 1, &p->bytes.gathered);
    for (int64_t i = 0; i < p->sum_count; i++)
        p->sums[i].memory =
            (float *)xdi_parallel_take(arena, p->sums[i].count, sizeof(float), &p->bytes.whole_gradients);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_measure(xd_parallel *p, xdi_room *room) {
    room->device = room->home = xd_arena_over(NULL, 0);
    for (int64_t i = 0; i < p->unit_count; i++) xdi_unit_measure(p, &p->units[i]);
    return xdi_parallel_lay_out(p, room);
}

static size_t xdi_parallel_room_bytes(const xd_arena *arena) {
    return arena->peak > 0 ? arena->peak : (size_t)XD_ARENA_ALIGNMENT;
}

/* Memory for what was measured, at home or on the device, `given` or allocated; the arena is over it then. It is zeroed: what is
 * between weights stays 0, and so do weights that begin as zeros; but where the library can clear a part of it, not what comes
 * first, of which xdi_parallel_take_values writes all. */
static xd_result xdi_parallel_allocate(xd_parallel *p, xdi_room *room, bool home, void *given, void **out) {
    xd_ctx *ctx = home ? p->home : p->ctx;
    xd_arena *arena = home ? &room->home : &room->device;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    const size_t bytes = xdi_parallel_room_bytes(arena);
    const bool in_parts = !given && memory->allocate == xd_allocate;
    const size_t unwritten = in_parts && home == p->offloaded ? room->values : 0;
    *out = given ? given : in_parts ? xdi_allocate_unwritten(ctx, bytes) : memory->allocate(ctx, bytes);
    XD_REQUIRE(p->ctx, *out, XD_ERROR_MEMORY, "no room for %llu bytes of weights and gradients",
               (unsigned long long)bytes);
    *arena = xd_arena_over(*out, bytes);
    if (!in_parts) return memory->fill(&launch, *out, 0, bytes);
    p->unwritten = p->unwritten || unwritten > 0;
    xdi_clear(ctx, (unsigned char *)*out + unwritten, bytes - unwritten);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_take_memory(xd_parallel *p) {
    xdi_room room;
    XD_TRY(xdi_parallel_measure(p, &room));
    XD_TRY(xdi_parallel_allocate(p, &room, false, NULL, &p->memory));
    if (p->offloaded) {
        p->locked = xdi_locked_take(p->ctx, xdi_parallel_room_bytes(&room.home));
        XD_TRY(xdi_parallel_allocate(p, &room, true, p->locked, &p->home_memory));
    }
    return xdi_parallel_lay_out(p, &room);
}

/* ---- values ---- */

XD_PRIVATE bool xdi_flat_piece(const xd_parallel *p, const xd_weight *weight, xd_bucket_piece *out) {
    return xd_bucket_plan_piece(weight->flat->plan, weight->flat_index, p->rank, out);
}

XD_PRIVATE void *xdi_flat_value(const xd_weight *weight, const xd_bucket_piece *piece) {
    const xdi_flat *flat = weight->flat;
    const size_t size = xd_dtype_size(flat->dtype);
    if (flat->whole) return (unsigned char *)weight->value + (size_t)piece->param.begin * size;
    return (unsigned char *)flat->values + (size_t)piece->shard.begin * size;
}

XD_PRIVATE void *xdi_flat_place(const xd_weight *weight) {
    const xdi_flat *flat = weight->flat;
    const xd_interval place = xd_bucket_plan_param(flat->plan, weight->flat_index, NULL);
    return (unsigned char *)flat->values + (size_t)place.begin * xd_dtype_size(flat->dtype);
}

/* First values in memory that has just been taken here: none where they are awaited, but for rows that are padding. */
static xd_result xdi_flat_fill(const xd_parallel *p, const xd_weight *weight, xd_interval range, void *to) {
    const size_t size = xd_dtype_size(weight->desc.dtype);
    int64_t from = weight->awaited ? xdi_weight_true_count(weight) : range.begin;
    if (!weight->awaited && weight->desc.init.kind != XD_INIT_ZERO)
        return xdi_weight_fill(p->home, weight, range, to);
    if (from < range.begin) from = range.begin;
    if (p->unwritten && from < range.end)
        xdi_clear(p->home, (unsigned char *)to + (size_t)(from - range.begin) * size,
                  (size_t)(range.end - from) * size);
    return XD_OK;
}

/* Zeros in what no weight has of a part. The last weight comes first in a buffer. */
static void xdi_flat_clear_gaps(const xd_parallel *p, const xdi_flat *flat) {
    const size_t size = xd_dtype_size(flat->dtype);
    unsigned char *values = (unsigned char *)flat->values;
    size_t at = 0;
    for (int64_t i = flat->count - 1; i >= 0; i--) {
        xd_bucket_piece piece;
        if (!xdi_flat_piece(p, flat->weights[i], &piece)) continue;
        xdi_clear(p->home, values + at, (size_t)piece.shard.begin * size - at);
        at = (size_t)piece.shard.end * size;
    }
    xdi_clear(p->home, values + at, flat->kept_bytes - at);
}

/* A weight that all ranks keep: in its own storage, or here, where it also has a copy of what is to be released. */
static xd_result xdi_flat_keep_whole(const xd_parallel *p, xd_weight *weight) {
    const xd_interval all = { 0, weight->count };
    const size_t bytes = (size_t)weight->count * xd_dtype_size(weight->desc.dtype);
    const bool moves = xdi_flat_moves(p, weight);
    if (moves && weight->declared) return xdi_spectral_take(p, weight, xdi_flat_place(weight));
    if (!weight->value) weight->value = xdi_flat_place(weight);
    if (!weight->ready) XD_TRY(xdi_weight_fill(moves ? p->ctx : p->home, weight, all, weight->value));
    return moves ? xdi_parallel_bring_home(p, xdi_flat_place(weight), weight->value, bytes) : XD_OK;
}

XD_PRIVATE void xdi_parallel_leave_storage(xd_parallel *p) {
    if (!xdi_parallel_leaves(p)) return;
    xdi_model_release(p->model);
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        xd_weight *weight = p->model->weights[i];
        weight->own = NULL;
        if (weight->owner == weight && weight->flat->whole && !weight->value)
            weight->value = xdi_flat_place(weight);
    }
}

/* This rank's part of a weight: of the values that the model has, or the first ones. */
static xd_result xdi_flat_keep_part(xd_parallel *p, xd_weight *weight) {
    const size_t size = xd_dtype_size(weight->desc.dtype);
    xd_bucket_piece piece;
    if (!xdi_flat_piece(p, weight, &piece)) return XD_OK;
    void *to = xdi_flat_value(weight, &piece);
    if (!weight->value || !weight->ready) return xdi_flat_fill(p, weight, piece.param, to);
    return xdi_parallel_bring_home(p, to,
                                   (const unsigned char *)weight->value + (size_t)piece.param.begin * size,
                                   (size_t)(piece.param.end - piece.param.begin) * size);
}

XD_PRIVATE xd_result xdi_parallel_take_values(xd_parallel *p) {
    for (int64_t i = 0; i < p->flat_count && p->unwritten; i++)
        if (!p->flats[i].whole) xdi_flat_clear_gaps(p, &p->flats[i]);
    for (int64_t i = 0; i < p->model->weight_count; i++) {
        xd_weight *weight = p->model->weights[i];
        if (weight->owner != weight || !xdi_parallel_has(p, weight)) continue;
        XD_TRY(weight->flat->whole ? xdi_flat_keep_whole(p, weight) : xdi_flat_keep_part(p, weight));
    }
    for (int64_t i = 0; i < p->model->weight_count; i++)
        if (xdi_parallel_has(p, p->model->weights[i])) p->model->weights[i]->owner->ready = true;
    return xdi_parallel_convert_values(p);
}

/* ---- values after a step ---- */

/* Between a weight's own storage and its place in the flat buffer: this rank's part there, all of it back. */
static xd_result xdi_flat_carry(const xd_parallel *p, const xd_weight *weight, bool back) {
    const xdi_flat *flat = weight->flat;
    const xd_launch launch = xd_ctx_launch(p->ctx);
    const size_t size = xd_dtype_size(flat->dtype);
    const xd_interval place = xd_bucket_plan_param(flat->plan, weight->flat_index, NULL);
    unsigned char *own = (unsigned char *)weight->value,
                  *here = (unsigned char *)flat->values + (size_t)place.begin * size;
    xd_interval range = { 0, weight->count };
    xd_bucket_piece piece;
    if (own == here || weight->count == 0) return XD_OK;
    if (!back && !xdi_flat_piece(p, weight, &piece)) return XD_OK;
    if (!back) range = piece.param;
    const size_t at = (size_t)range.begin * size, bytes = (size_t)(range.end - range.begin) * size;
    return xd_ctx_kernels(p->ctx)->memory.copy(&launch, (back ? own : here) + at, (back ? here : own) + at,
                                               bytes, XD_COPY_ON_DEVICE);
}

/* Whether nobody but blocks reads the values where they arrive: no copies are made from them. */
static bool xdi_flat_is_read_later(const xdi_flat *flat) {
    bool own = flat->shown != NULL;
    for (int64_t i = 0; i < flat->count; i++)
        own = own || flat->weights[i]->value != xdi_flat_place(flat->weights[i]);
    return !own;
}

static xd_result xdi_flat_collect_values(const xd_parallel *p, const xdi_flat *flat) {
    for (int64_t i = 0; i < flat->bucket_count; i++)
        XD_TRY(xdi_flight_land(p->gathers, &flat->buckets[i].spreading));
    for (int64_t i = 0; i < flat->count; i++) XD_TRY(xdi_flat_carry(p, flat->weights[i], true));
    return XD_OK;
}

static xd_result xdi_flat_spread(xd_parallel *p, const xdi_flat *flat) {
    const size_t size = xd_dtype_size(flat->dtype);
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_GATHER;
    c.recv_counts = p->counts;
    c.dtype = flat->dtype;
    for (int64_t i = 0; i < flat->count; i++) XD_TRY(xdi_flat_carry(p, flat->weights[i], false));
    for (int64_t i = 0; i < xd_bucket_plan_count(flat->plan); i++) {
        const xd_interval bucket = xd_bucket_plan_at(flat->plan, i).buffer,
                          part = xd_bucket_plan_shard(flat->plan, i, p->rank);
        unsigned char *values = (unsigned char *)flat->values;
        for (int r = 0; r < p->ranks; r++) p->counts[r] = part.end - part.begin;
        c.send = values + (size_t)part.begin * size;
        c.recv = values + (size_t)bucket.begin * size;
        XD_TRY(xdi_flight_start(p->gathers, p->data, &c, &flat->buckets[i].spreading));
    }
    return xdi_flat_is_read_later(flat) ? XD_OK : xdi_flat_collect_values(p, flat);
}

XD_PRIVATE xd_result xdi_parallel_renew_values(xd_parallel *p) {
    XD_TRY(xdi_parallel_land_values(p)); /* of the step before */
    for (int64_t i = 0; i < p->flat_count; i++)
        if (p->flats[i].whole && xdi_flat_shards(p, &p->flats[i]) > 1 && p->ranks > 1)
            XD_TRY(xdi_flat_spread(p, &p->flats[i]));
    xdi_parallel_forget_values(p);
    return xdi_parallel_convert_values(p);
}
