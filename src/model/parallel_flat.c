/* Flat buffers: where each weight lies, the memory of a wrapper, and the values in it. */

#include "base/internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "model/store_internal.h"

#include <string.h>

/* ---- plans ---- */

/* Ranks that a buffer's sums are divided among. */
static int xdi_flat_shards(const xdi_flat *flat) {
    const xdi_place *place = flat->place;
    return !flat->whole || (place->settings.split_optimizer && flat->trained) ? place->ranks : 1;
}

/* Elements of all weights that have buckets. */
static int64_t xdi_store_trained_count(const xdi_store *store) {
    int64_t sum = 0;
    for (int64_t f = 0; f < store->flat_count; f++)
        for (int64_t i = 0; i < store->flats[f].count && store->flats[f].trained; i++)
            sum += store->flats[f].weights[i]->count;
    return sum;
}

/* Elements from which on a bucket ends, for all buffers alike. */
static xd_result xdi_store_bucket_size(const xdi_store *store, int64_t *out) {
    const xdi_place *place = store->place;
    const xdi_wrap_settings *settings = &place->settings;
    const int64_t ranks = (int64_t)place->ranks * place->replica_count,
                  count = xdi_store_trained_count(store);
    *out = settings->bucket_size ? settings->bucket_size : 1000000 * (ranks > 40 ? ranks : 40);
    if (settings->bucket_parts == 0 || settings->stage > 0 || settings->chunk > 0 ||
        settings->gathers_in_step)
        return XD_OK;
    XD_REQUIRE(place->ctx, settings->bucket_parts <= count, XD_ERROR_ARGUMENT,
               "%lld buckets of %lld elements", (long long)settings->bucket_parts, (long long)count);
    *out = count / settings->bucket_parts;
    return XD_OK;
}

static xd_result xdi_flat_plan(const xdi_store *store, xdi_flat *flat) {
    const xdi_place *place = store->place;
    const xdi_wrap_settings *settings = &place->settings;
    xdi_bucket_plan_desc d;
    int64_t size = 0;
    XD_TRY(xdi_store_bucket_size(store, &size));
    xdi_bucket_param *params =
        (xdi_bucket_param *)xd_allocate(place->ctx, ((size_t)flat->count + 1) * sizeof *params);
    XD_REQUIRE(place->ctx, params, XD_ERROR_MEMORY, "no room for %lld weights", (long long)flat->count);
    for (int64_t i = 0; i < flat->count; i++) {
        params[i].numel = flat->weights[i]->count;
        params[i].shared_embedding =
            flat->whole && settings->split_optimizer && flat->weights[i]->desc.traits.shared_embedding;
    }
    memset(&d, 0, sizeof d);
    d.params = params;
    d.param_count = flat->count;
    d.ranks = xdi_flat_shards(flat);
    d.sharded = true; /* also of one rank, for the alignment */
    d.wide_padding = settings->wide_padding && d.ranks > 1;
    d.overlap = !settings->sharded && settings->reductions;
    d.bucket_size = size;
    d.stage = settings->stage;
    d.chunk = settings->chunk;
    d.gathers_in_step = settings->gathers_in_step;
    const xd_result result = xdi_bucket_plan_create(place->ctx, &d, &flat->plan);
    xd_release(place->ctx, params);
    if (result == XD_OK && flat->trained) flat->bucket_count = xdi_bucket_plan_count(flat->plan);
    return result;
}

XD_PRIVATE xdi_bucket *xdi_flat_bucket(const xd_weight *owner) {
    int64_t index = 0;
    if (!owner->flat->trained) return NULL;
    (void)xdi_bucket_plan_param(owner->flat->plan, owner->flat_index, &index);
    return &owner->flat->buckets[index];
}

XD_PRIVATE xdi_bucket *xdi_gradient_bucket(const xd_weight *owner) {
    return xdi_weight_is_trained(owner) ? xdi_flat_bucket(owner) : NULL;
}

XD_PRIVATE xdi_bucket *xdi_block_bucket(xdi_store *store, const xd_block *block, int64_t i) {
    xdi_bucket *bucket = xdi_gradient_bucket(store->place->model->weights[block->first + i]->owner);
    if (i == 0) store->round++;
    if (!bucket || bucket->seen == store->round) return NULL;
    bucket->seen = store->round;
    return bucket;
}

static void xdi_flat_list_buckets(const xdi_store *store, xdi_flat *flat, xdi_bucket *buckets) {
    const xdi_place *place = store->place;
    flat->buckets = buckets;
    for (int64_t i = 0; i < flat->bucket_count; i++) {
        buckets[i].flat = flat;
        buckets[i].places = store->places + (&buckets[i] - store->buckets) * place->members;
        if (store->lanes) buckets[i].lanes = store->lanes + (&buckets[i] - store->buckets) * place->members;
        const xd_interval part = xdi_bucket_plan_shard(flat->plan, i, place->rank);
        buckets[i].buffer = xdi_bucket_plan_at(flat->plan, i).buffer;
        buckets[i].kept = part.end - part.begin;
    }
}

XD_PRIVATE void xdi_store_count_blocks(xdi_store *store) {
    const xdi_place *place = store->place;
    for (int64_t i = 0; i < store->bucket_count; i++) store->buckets[i].blocks = 0;
    for (const xd_block *b = &place->model->root; b; b = xdi_block_after(b))
        for (int64_t i = 0; i < b->count && b->expert == place->of_experts; i++) {
            xdi_bucket *bucket = xdi_block_bucket(store, b, i);
            if (bucket) bucket->blocks++;
        }
}

/* Lists of the leaves that are formed at once, of their stacks, and of what each stack has of a sum. */
static xd_result xdi_store_list_places(xdi_store *store) {
    const xdi_place *place = store->place;
    const size_t members = (size_t)place->members, all = ((size_t)store->bucket_count + 1) * members;
    const bool lanes = xdi_place_has_lanes(place);
    store->places = (float **)xd_allocate(place->ctx, all * sizeof(float *));
    store->scratch.forests = (const void **)xd_allocate(place->ctx, members * sizeof(const void *));
    store->scratch.forest_leaves =
        (xd_leaves *)xd_allocate(place->ctx, members * sizeof *store->scratch.forest_leaves);
    if (lanes) store->lanes = (xd_leaf_stack **)xd_allocate(place->ctx, all * sizeof(xd_leaf_stack *));
    XD_REQUIRE(place->ctx,
               store->places && store->scratch.forests && store->scratch.forest_leaves &&
                   (store->lanes || !lanes),
               XD_ERROR_MEMORY, "no room for micro-batches of %d members in %lld buckets", place->members,
               (long long)store->bucket_count);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_store_plan(xdi_store *store) {
    const xdi_place *place = store->place;
    int64_t at = 0;
    for (int64_t i = 0; i < store->flat_count; i++) {
        XD_TRY(xdi_flat_plan(store, &store->flats[i]));
        store->bucket_count += store->flats[i].bucket_count;
    }
    store->buckets =
        (xdi_bucket *)xd_allocate(place->ctx, ((size_t)store->bucket_count + 1) * sizeof *store->buckets);
    store->scratch.counts =
        (int64_t *)xd_allocate(place->ctx, (size_t)place->ranks * sizeof *store->scratch.counts);
    store->scratch.used = (int *)xd_allocate(place->ctx, ((size_t)place->model->weight_count + 1) *
                                                             sizeof *store->scratch.used);
    XD_REQUIRE(place->ctx, store->buckets && store->scratch.counts && store->scratch.used, XD_ERROR_MEMORY,
               "no room for %lld buckets", (long long)store->bucket_count);
    XD_TRY(xdi_store_list_places(store));
    for (int64_t i = 0; i < store->flat_count; i++) {
        xdi_flat_list_buckets(store, &store->flats[i], store->buckets + at);
        at += store->flats[i].bucket_count;
    }
    xdi_store_count_blocks(store);
    return XD_OK;
}

/* ---- memory ---- */

/* Elements of a flat buffer's values that this rank keeps. */
static int64_t xdi_flat_kept(const xdi_flat *flat) {
    const int64_t numel = xdi_bucket_plan_numel(flat->plan);
    return flat->whole ? numel : numel / flat->place->ranks;
}

/* Whether the model's own storage is released: under FSDP, and where the model yields it. */
static bool xdi_place_empties_model(const xdi_place *place) {
    return place->settings.sharded || place->model->yields;
}

/* Whether a weight that all ranks keep leaves that storage: also where it has another type. */
static bool xdi_flat_moves(const xd_weight *weight) {
    return (xdi_place_empties_model(weight->flat->place) || weight->declared) && weight->value &&
           !weight->desc.value;
}

/* Whether values are kept here: not where every weight has storage of its own and none is gathered. */
static bool xdi_flat_keeps(const xdi_flat *flat) {
    if (!flat->whole || xdi_flat_shards(flat) > 1) return true;
    for (int64_t i = 0; i < flat->count; i++)
        if (!flat->weights[i]->value || xdi_flat_moves(flat->weights[i])) return true;
    return false;
}

static void *xdi_arena_give(xd_arena *arena, int64_t count, size_t size, size_t *bytes) {
    const size_t before = arena->used;
    size_t offset = 0;
    if (!xdi_arena_take(arena, (size_t)count * size, &offset)) return NULL;
    *bytes += arena->used - before;
    return arena->base ? arena->base + offset : NULL;
}

/* Of what this rank keeps, with those parts that may be on the host. */
static void *xdi_store_keep(xdi_store *store, xdi_room *room, int64_t count, size_t size, size_t *bytes) {
    return store->place->on_host ? xdi_arena_give(&room->host, count, size, &store->memory.bytes.host)
                                 : xdi_arena_give(&room->device, count, size, bytes);
}

/* What a unit takes while it is open: values as they are sent and, where they differ, as they are shown; whole gradients. */
static void xdi_unit_measure(const xdi_place *place, struct xdi_unit *unit) {
    xd_arena arena = xd_arena_over(NULL, 0);
    for (int64_t i = 0; i < unit->flat_count; i++) {
        xdi_flat *flat = &unit->flats[i];
        const size_t numel = (size_t)xdi_bucket_plan_numel(flat->plan);
        if (!flat->whole && xdi_place_assembles(place))
            (void)xdi_arena_take(&arena, numel * xd_dtype_size(flat->sent_dtype), &flat->slot);
        if (!flat->whole && flat->view_dtype != flat->sent_dtype)
            (void)xdi_arena_take(&arena, numel * xd_dtype_size(flat->view_dtype), &flat->view_slot);
        flat->offset = unit->gradient_count;
        if (flat->trained && xdi_gradient_is_sent(place))
            unit->gradient_count += (int64_t)numel * xdi_gradient_levels(place);
    }
    unit->gathered_bytes = arena.used;
    for (int i = 0; i < unit->slot_count; i++)
        if (arena.used > unit->slots[i].bytes) unit->slots[i].bytes = arena.used;
    for (int i = 0; i < unit->sum_count; i++)
        if (unit->gradient_count > unit->sums[i].count) unit->sums[i].count = unit->gradient_count;
}

XD_PRIVATE xd_leaves xdi_bucket_leaves(const xdi_place *place) {
    xd_leaves leaves = place->batches.own;
    if (place->batches.strided) {
        leaves.first = 0;
        if (xdi_gradient_is_sent(place)) leaves.count /= place->members; /* those of a round are one */
        leaves.total = leaves.count;
    } else if (!place->invariant) {
        leaves.first = 0;
        leaves.count = leaves.total = 1;
    }
    return leaves;
}

/* Whether the sum takes the place of the first node: it has its size and is not on the host, and other nodes are added here. */
static bool xdi_bucket_sums_in_place(const xdi_flat *flat) {
    const xdi_place *place = flat->place;
    const xd_leaves leaves = xdi_bucket_leaves(place);
    const bool one = place->ranks == 1 || xd_leaves_nodes(leaves.first, leaves.count) == 1;
    return place->batches.strided || (xdi_flat_shards(flat) == 1 && one && !place->on_host);
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
static xd_result xdi_bucket_take_stack(xdi_store *store, xd_leaf_stack_desc *d, xdi_room *room,
                                       xd_leaf_stack **out) {
    const xdi_place *place = store->place;
    size_t *bytes = &store->memory.bytes.gradients;
    d->memory_bytes = xdi_leaf_stack_bytes(d);
    d->memory = place->batches.strided ? xdi_store_keep(store, room, (int64_t)d->memory_bytes, 1, bytes)
                                       : xdi_arena_give(&room->device, (int64_t)d->memory_bytes, 1, bytes);
    return room->device.base
               ? xd_leaf_stack_create(place->batches.strided ? place->parts_ctx : place->ctx, d, out)
               : XD_OK;
}

/* A stack for each member's leaves, and room for their nodes as one stack would have them. */
static xd_result xdi_bucket_take_lanes(xdi_store *store, xdi_bucket *b, xd_leaf_stack_desc *d,
                                       xdi_room *room) {
    const int64_t nodes = xd_leaves_nodes(d->leaves.first, d->leaves.count);
    for (int i = 0; i < store->place->members; i++) {
        const xd_interval row = xdi_batches_row(store->place, i);
        d->leaves.first = row.begin;
        d->leaves.count = row.end - row.begin;
        XD_TRY(xdi_bucket_take_stack(store, d, room, &b->lanes[i]));
    }
    b->joined = (float *)xdi_arena_give(&room->device, nodes * d->elements, sizeof(float),
                                        &store->memory.bytes.gradients);
    return XD_OK;
}

static xd_result xdi_bucket_take(xdi_store *store, const xdi_flat *flat, xdi_bucket *b, xdi_room *room) {
    const xdi_place *place = store->place;
    size_t *bytes = &store->memory.bytes.gradients;
    xd_leaf_stack_desc d;
    memset(&d, 0, sizeof d);
    d.leaves = xdi_bucket_leaves(place);
    d.elements = place->batches.strided ? b->kept : b->buffer.end - b->buffer.begin;
    XD_TRY(b->lanes ? xdi_bucket_take_lanes(store, b, &d, room)
                    : xdi_bucket_take_stack(store, &d, room, &b->stack));
    if (xdi_bucket_sums_in_place(flat))
        b->sum = b->lanes ? b->joined : (float *)d.memory;
    else
        b->sum = (float *)xdi_store_keep(store, room, b->kept, sizeof(float), bytes);
    if (place->on_host && (place->replica_count > 1 || !place->batches.strided || xdi_flat_is_finished(flat)))
        b->landed = (float *)xdi_arena_give(&room->device, b->kept, sizeof(float), bytes);
    return XD_OK;
}

/* Values that stay: in their own type, and in others in which they are sent, shown, or kept by a few ranks together. */
static void xdi_flat_take_whole(xdi_store *store, xdi_flat *flat, xdi_room *room) {
    const xdi_place *place = store->place;
    const int64_t numel = xdi_bucket_plan_numel(flat->plan);
    const size_t size = xd_dtype_size(flat->view_dtype);
    if (place->on_host || flat->view_dtype != flat->dtype)
        flat->shown = xdi_arena_give(&room->device, numel, size, &store->memory.bytes.values);
    if (place->on_host && flat->view_dtype != flat->dtype)
        flat->sent = xdi_store_keep(store, room, numel, size, &store->memory.bytes.values);
}

static void xdi_flat_take_values(xdi_store *store, xdi_flat *flat, xdi_room *room) {
    flat->kept_bytes = (size_t)xdi_flat_kept(flat) * xd_dtype_size(flat->dtype);
    flat->values = xdi_store_keep(store, room, (int64_t)flat->kept_bytes, 1, &store->memory.bytes.values);
}

static void xdi_flat_take(xdi_store *store, xdi_flat *flat, xdi_room *room) {
    const int64_t kept = xdi_flat_kept(flat), numel = xdi_bucket_plan_numel(flat->plan);
    const size_t sent = xd_dtype_size(flat->sent_dtype);
    if (flat->whole) {
        if (xdi_flat_keeps(flat)) xdi_flat_take_values(store, flat, room);
        xdi_flat_take_whole(store, flat, room);
        return;
    }
    flat->sent = flat->values;
    if (flat->sent_dtype != flat->dtype)
        flat->sent = xdi_store_keep(store, room, kept, sent, &store->memory.bytes.values);
    if (xdi_place_reshards(store->place))
        flat->resharded = xdi_arena_give(&room->device, numel / store->place->settings.reshard_ranks, sent,
                                         &store->memory.bytes.gathered);
}

/* Lays everything out; with memory behind the arena also gives it out. */
static xd_result xdi_store_lay_out(xdi_store *store, xdi_room *room) {
    xd_arena *arena = &room->device;
    memset(&store->memory.bytes, 0, sizeof store->memory.bytes);
    for (int64_t i = 0; i < store->flat_count; i++)
        if (!store->flats[i].whole) xdi_flat_take_values(store, &store->flats[i], room);
    room->values = store->place->on_host ? room->host.used : arena->used;
    for (int64_t i = 0; i < store->flat_count; i++) {
        xdi_flat *flat = &store->flats[i];
        xdi_flat_take(store, flat, room);
        for (int64_t b = 0; b < flat->bucket_count; b++)
            XD_TRY(xdi_bucket_take(store, flat, &flat->buckets[b], room));
    }
    for (int64_t i = 0; i < store->slot_count; i++)
        store->slots[i].memory = (unsigned char *)xdi_arena_give(arena, (int64_t)store->slots[i].bytes, 1,
                                                                 &store->memory.bytes.gathered);
    for (int64_t i = 0; i < store->sum_count; i++)
        store->sums[i].memory = (float *)xdi_arena_give(arena, store->sums[i].count, sizeof(float),
                                                        &store->memory.bytes.whole_gradients);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_store_measure(xdi_store *store, xdi_room *room) {
    room->device = room->host = xd_arena_over(NULL, 0);
    for (int64_t i = 0; i < store->unit_count; i++) xdi_unit_measure(store->place, &store->units[i]);
    return xdi_store_lay_out(store, room);
}

static size_t xdi_room_bytes(const xd_arena *arena) {
    return arena->peak > 0 ? arena->peak : (size_t)XD_ARENA_ALIGNMENT;
}

/* Memory for what was measured, on the host or on the device, `given` or allocated; the arena is over it then. It is
 * zeroed: what is between weights stays 0, and so do weights that begin as zeros. Where the library can clear a part of it,
 * what comes first is not: xdi_store_take_values writes all of that. */
static xd_result xdi_store_allocate(xdi_store *store, xdi_room *room, bool on_host, void *given, void **out) {
    const xdi_place *place = store->place;
    xd_ctx *ctx = on_host ? place->parts_ctx : place->ctx;
    xd_arena *arena = on_host ? &room->host : &room->device;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    const size_t bytes = xdi_room_bytes(arena);
    const bool in_parts = !given && memory->allocate == xd_allocate;
    const size_t unwritten = in_parts && on_host == place->on_host ? room->values : 0;
    *out = given ? given : in_parts ? xdi_allocate_unwritten(ctx, bytes) : memory->allocate(ctx, bytes);
    XD_REQUIRE(place->ctx, *out, XD_ERROR_MEMORY, "no room for %llu bytes of weights and gradients",
               (unsigned long long)bytes);
    *arena = xd_arena_over(*out, bytes);
    if (!in_parts) return memory->fill(&launch, *out, 0, bytes);
    store->memory.unwritten = store->memory.unwritten || unwritten > 0;
    xdi_clear(ctx, (unsigned char *)*out + unwritten, bytes - unwritten);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_store_take_memory(xdi_store *store) {
    const xdi_place *place = store->place;
    xdi_room room;
    XD_TRY(xdi_store_measure(store, &room));
    XD_TRY(xdi_store_allocate(store, &room, false, NULL, &store->memory.device));
    if (place->on_host) {
        store->memory.locked = xdi_locked_take(place->ctx, xdi_room_bytes(&room.host));
        XD_TRY(xdi_store_allocate(store, &room, true, store->memory.locked, &store->memory.host));
    }
    return xdi_store_lay_out(store, &room);
}

/* ---- values ---- */

XD_PRIVATE bool xdi_flat_piece(const xd_weight *weight, xdi_bucket_piece *out) {
    return xdi_bucket_plan_piece(weight->flat->plan, weight->flat_index, weight->flat->place->rank, out);
}

XD_PRIVATE void *xdi_flat_value(const xd_weight *weight, const xdi_bucket_piece *piece) {
    const xdi_flat *flat = weight->flat;
    const size_t size = xd_dtype_size(flat->dtype);
    if (flat->whole) return (unsigned char *)weight->value + (size_t)piece->param.begin * size;
    return (unsigned char *)flat->values + (size_t)piece->shard.begin * size;
}

XD_PRIVATE void *xdi_flat_place(const xd_weight *weight) {
    const xdi_flat *flat = weight->flat;
    const xd_interval place = xdi_bucket_plan_param(flat->plan, weight->flat_index, NULL);
    return (unsigned char *)flat->values + (size_t)place.begin * xd_dtype_size(flat->dtype);
}

/* First values in memory that has just been taken here: none where they are awaited, but for rows that are padding. */
static xd_result xdi_flat_fill(const xdi_store *store, const xd_weight *weight, xd_interval range, void *to) {
    const xdi_place *place = store->place;
    const size_t size = xd_dtype_size(weight->desc.dtype);
    int64_t from = weight->awaited ? xdi_weight_true_count(weight) : range.begin;
    if (!weight->awaited && weight->desc.init.kind != XD_INIT_ZERO)
        return xdi_weight_fill(place->parts_ctx, weight, range, to);
    if (from < range.begin) from = range.begin;
    if (store->memory.unwritten && from < range.end)
        xdi_clear(place->parts_ctx, (unsigned char *)to + (size_t)(from - range.begin) * size,
                  (size_t)(range.end - from) * size);
    return XD_OK;
}

/* Zeros in what no weight has of a part. The last weight comes first in a buffer. */
static void xdi_flat_clear_gaps(const xdi_flat *flat) {
    const xdi_place *place = flat->place;
    const size_t size = xd_dtype_size(flat->dtype);
    unsigned char *values = (unsigned char *)flat->values;
    size_t at = 0;
    for (int64_t i = flat->count - 1; i >= 0; i--) {
        xdi_bucket_piece piece;
        if (!xdi_flat_piece(flat->weights[i], &piece)) continue;
        xdi_clear(place->parts_ctx, values + at, (size_t)piece.shard.begin * size - at);
        at = (size_t)piece.shard.end * size;
    }
    xdi_clear(place->parts_ctx, values + at, flat->kept_bytes - at);
}

/* A weight that all ranks keep: in its own storage, or here, where it also has a copy of what is to be released. */
static xd_result xdi_flat_keep_whole(xd_weight *weight) {
    const xdi_place *place = weight->flat->place;
    const xd_interval all = { 0, weight->count };
    const size_t bytes = (size_t)weight->count * xd_dtype_size(weight->desc.dtype);
    const bool moves = xdi_flat_moves(weight);
    if (moves && weight->declared) return xdi_spectral_take(place, weight, xdi_flat_place(weight));
    if (!weight->value) weight->value = xdi_flat_place(weight);
    if (!weight->ready)
        XD_TRY(xdi_weight_fill(moves ? place->ctx : place->parts_ctx, weight, all, weight->value));
    return moves ? xdi_parts_write(place, xdi_flat_place(weight), weight->value, bytes) : XD_OK;
}

XD_PRIVATE void xdi_place_leave_storage(const xdi_place *place) {
    if (!xdi_place_empties_model(place)) return;
    xdi_model_release(place->model);
    for (int64_t i = 0; i < place->model->weight_count; i++) {
        xd_weight *weight = place->model->weights[i];
        weight->own = NULL;
        if (weight->owner == weight && weight->flat->whole && !weight->value)
            weight->value = xdi_flat_place(weight);
    }
}

/* This rank's part of a weight: of the values that the model has, or the first ones. */
static xd_result xdi_flat_keep_part(const xdi_store *store, xd_weight *weight) {
    const size_t size = xd_dtype_size(weight->desc.dtype);
    xdi_bucket_piece piece;
    if (!xdi_flat_piece(weight, &piece)) return XD_OK;
    void *to = xdi_flat_value(weight, &piece);
    if (!weight->value || !weight->ready) return xdi_flat_fill(store, weight, piece.param, to);
    return xdi_parts_write(store->place, to,
                           (const unsigned char *)weight->value + (size_t)piece.param.begin * size,
                           (size_t)(piece.param.end - piece.param.begin) * size);
}

XD_PRIVATE xd_result xdi_store_take_values(xdi_store *store) {
    const xdi_place *place = store->place;
    for (int64_t i = 0; i < store->flat_count && store->memory.unwritten; i++)
        if (!store->flats[i].whole) xdi_flat_clear_gaps(&store->flats[i]);
    for (int64_t i = 0; i < place->model->weight_count; i++) {
        xd_weight *weight = place->model->weights[i];
        if (weight->owner != weight || !xdi_place_has(place, weight)) continue;
        XD_TRY(weight->flat->whole ? xdi_flat_keep_whole(weight) : xdi_flat_keep_part(store, weight));
    }
    for (int64_t i = 0; i < place->model->weight_count; i++)
        if (xdi_place_has(place, place->model->weights[i])) place->model->weights[i]->owner->ready = true;
    return xdi_store_convert_values(store);
}

/* ---- values after a step ---- */

/* Between a weight's own storage and its place in the flat buffer: this rank's part there, all of it back. */
static xd_result xdi_flat_carry(const xd_weight *weight, bool back) {
    const xdi_flat *flat = weight->flat;
    const xd_launch launch = xd_ctx_launch(weight->flat->place->ctx);
    const size_t size = xd_dtype_size(flat->dtype);
    const xd_interval place = xdi_bucket_plan_param(flat->plan, weight->flat_index, NULL);
    unsigned char *own = (unsigned char *)weight->value,
                  *here = (unsigned char *)flat->values + (size_t)place.begin * size;
    xd_interval range = { 0, weight->count };
    xdi_bucket_piece piece;
    if (own == here || weight->count == 0) return XD_OK;
    if (!back && !xdi_flat_piece(weight, &piece)) return XD_OK;
    if (!back) range = piece.param;
    const size_t at = (size_t)range.begin * size, bytes = (size_t)(range.end - range.begin) * size;
    return xd_ctx_kernels(weight->flat->place->ctx)
        ->memory.copy(&launch, (back ? own : here) + at, (back ? here : own) + at, bytes, XD_COPY_ON_DEVICE);
}

/* Whether nobody but blocks reads the values where they arrive: no copies are made from them. */
static bool xdi_flat_is_read_later(const xdi_flat *flat) {
    bool own = flat->shown != NULL;
    for (int64_t i = 0; i < flat->count; i++)
        own = own || flat->weights[i]->value != xdi_flat_place(flat->weights[i]);
    return !own;
}

static xd_result xdi_flat_collect_values(const xdi_flat *flat) {
    for (int64_t i = 0; i < flat->bucket_count; i++)
        XD_TRY(xdi_flight_land(flat->place->settings.gathers, &flat->buckets[i].spreading));
    for (int64_t i = 0; i < flat->count; i++) XD_TRY(xdi_flat_carry(flat->weights[i], true));
    return XD_OK;
}

static xd_result xdi_flat_spread(xdi_store *store, const xdi_flat *flat) {
    const xdi_place *place = store->place;
    const size_t size = xd_dtype_size(flat->dtype);
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_GATHER;
    c.recv_counts = store->scratch.counts;
    c.dtype = flat->dtype;
    for (int64_t i = 0; i < flat->count; i++) XD_TRY(xdi_flat_carry(flat->weights[i], false));
    for (int64_t i = 0; i < xdi_bucket_plan_count(flat->plan); i++) {
        const xd_interval bucket = xdi_bucket_plan_at(flat->plan, i).buffer,
                          part = xdi_bucket_plan_shard(flat->plan, i, place->rank);
        unsigned char *values = (unsigned char *)flat->values;
        for (int r = 0; r < place->ranks; r++) store->scratch.counts[r] = part.end - part.begin;
        c.send = values + (size_t)part.begin * size;
        c.recv = values + (size_t)bucket.begin * size;
        XD_TRY(xdi_flight_start(place->settings.gathers, place->data, &c, &flat->buckets[i].spreading));
    }
    return xdi_flat_is_read_later(flat) ? XD_OK : xdi_flat_collect_values(flat);
}

XD_PRIVATE xd_result xdi_store_renew_values(xdi_store *store) {
    XD_TRY(xdi_store_land_values(store)); /* of the step before */
    for (int64_t i = 0; i < store->flat_count; i++)
        if (store->flats[i].whole && xdi_flat_shards(&store->flats[i]) > 1 && store->place->ranks > 1)
            XD_TRY(xdi_flat_spread(store, &store->flats[i]));
    xdi_store_forget_values(store);
    return xdi_store_convert_values(store);
}
