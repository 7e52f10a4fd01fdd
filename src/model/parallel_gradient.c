/* Gradients of leaves: where blocks add them, and how they become one sum over all leaves.
 *
 * Leaves in a row: a rank's leaves are nodes of the canonical tree (xd_leaf_stack), whole; after the last one the forests of
 * all ranks are reduced at once. Strided leaves, i = k N + j: the k-th leaves of all ranks are an aligned block of N, so each is
 * reduced by itself and only parts wait, as nodes of the tree over k. Both are the same additions in the same order when N is
 * a power of two. */

#include "base/internal.h"
#include "comm/internal.h"
#include "kernel/kernels.h"
#include "model/parallel_internal.h"

#include <float.h>
#include <string.h>

XD_PRIVATE bool xdi_batches_owns(const xdi_place *place, int64_t micro_batch) {
    return xdi_batches_number(place, micro_batch) >= 0;
}

/* ---- factors ---- */

static xd_result xdi_gradient_factor(xd_ctx *ctx, double divisor, const char *name, float *out) {
    const float factor = divisor == 0.0 ? 1.0f : (float)(1.0 / divisor);
    XD_REQUIRE(ctx, factor > 0.0f && factor <= FLT_MAX, XD_ERROR_ARGUMENT,
               "divisor %g of %s: its inverse is not a positive number of F32", divisor, name);
    *out = factor;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_batches_set_factors(xdi_place *place, const xd_gradient_divisors *divide) {
    const double after = divide->after == 0.0 ? 1.0 : divide->after;
    XD_TRY(xdi_gradient_factor(place->ctx, divide->before, "micro-batches", &place->batches.before));
    return xdi_gradient_factor(place->ctx, divide->average ? after * (double)place->batches.total : after,
                               "the sum of all micro-batches", &place->batches.after);
}

static xd_result xdi_gradient_scale(xd_ctx *ctx, float *data, int64_t count, float factor) {
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_scale_args args;
    memset(&args, 0, sizeof args);
    args.data = data;
    args.count = count;
    args.dtype = XD_DTYPE_F32;
    args.factor = factor;
    if (factor == 1.0f || count == 0) return XD_OK;
    return xd_ctx_kernels(ctx)->optimizer.scale(&launch, &args);
}

/* ---- a leaf begins ---- */

/* Where this rank's part of a strided leaf's sum arrives on its way to the host: at its own place in the leaf. */
static float *xdi_gradient_arrival(const xdi_bucket *b) {
    const bool parts = xdi_bucket_plan_settings(b->flat->plan)->ranks > 1;
    float *leaf = b->flat->unit->sum->memory + b->flat->offset + b->buffer.begin;
    return leaf + (parts ? b->flat->place->rank * b->kept : 0);
}

/* The sum of a strided leaf over the ranks is there: the next node of the tree over this rank's leaves. */
static xd_result xdi_gradient_land(xdi_bucket *b) {
    const xdi_place *place = b->flat->place;
    struct xdi_unit *unit = b->flat->unit;
    float *next = NULL;
    if (!b->sending.open || !place->batches.strided) return XD_OK;
    XD_TRY(xdi_flight_land(place->settings.reductions, &b->sending));
    XD_TRY(xd_leaf_stack_next(b->stack, &next));
    if (place->on_host)
        XD_TRY(xdi_parts_write(place, next, xdi_gradient_arrival(b), (size_t)b->kept * sizeof *next));
    unit->sending--;
    if (unit->sending + unit->forming == 0) {
        unit->sum->unit = NULL;
        unit->sum = NULL;
    }
    return xd_leaf_stack_push(b->stack, next);
}

static xd_result xdi_unit_land_sums(const struct xdi_unit *unit) {
    for (int64_t f = 0; f < unit->flat_count; f++)
        for (int64_t i = 0; i < unit->flats[f].bucket_count; i++)
            XD_TRY(xdi_gradient_land(&unit->flats[f].buckets[i]));
    return XD_OK;
}

/* Memory for a unit's whole gradient: what is free, or else the sum that a queue has had for longest. */
static xd_result xdi_unit_take_sum(xdi_store *store, struct xdi_unit *unit) {
    xdi_gradient_slot *slot = unit->sums;
    for (int i = 0; i < unit->sum_count && slot->unit; i++) {
        xdi_gradient_slot *at = &unit->sums[i];
        const bool older = slot->unit->forming > 0 || at->taken < slot->taken;
        if (!at->unit || (at->unit->forming == 0 && older)) slot = at;
    }
    const struct xdi_unit *other = slot->unit;
    XD_REQUIRE(
        store->place->ctx, !other || other->forming == 0, XD_ERROR_STATE,
        "backward of unit \"%.80s\" while a micro-batch of unit \"%.80s\" is not complete: %d of a level are "
        "planned at once",
        unit->block->name, other->block->name, unit->sum_count);
    if (other) XD_TRY(xdi_unit_land_sums(other));
    slot->unit = unit;
    slot->taken = ++store->opened;
    unit->sum = slot;
    return XD_OK;
}

/* The place of a leaf in memory of the unit's whole gradient, which a round of leaves keeps until it is sent. */
static xd_result xdi_gradient_begin_sent(xdi_store *store, xdi_bucket *b, int member) {
    const xdi_flat *flat = b->flat;
    struct xdi_unit *unit = flat->unit;
    if (!xdi_bucket_is_forming(b)) {
        XD_TRY(xdi_gradient_land(b)); /* of the leaf before */
        if (!unit->sum) XD_TRY(xdi_unit_take_sum(store, unit));
        unit->forming++;
    }
    b->places[member] =
        unit->sum->memory + flat->offset + member * xdi_bucket_plan_numel(flat->plan) + b->buffer.begin;
    return XD_OK;
}

/* Where leaves of members come in turn and wait, each member's have a stack. */
static xd_leaf_stack *xdi_gradient_stack(const xdi_bucket *b, int member) {
    return b->lanes ? b->lanes[member] : b->stack;
}

static xd_result xdi_gradient_begin(xdi_store *store, xdi_bucket *b, int member) {
    const xdi_place *place = store->place;
    const xd_launch launch = xd_ctx_launch(place->ctx);
    const size_t bytes = (size_t)(b->buffer.end - b->buffer.begin) * sizeof(float);
    if (!xdi_gradient_is_sent(place))
        return xdi_leaf_stack_next_zeros(xdi_gradient_stack(b, member), &b->places[member]);
    XD_TRY(xdi_gradient_begin_sent(store, b, member));
    return xd_ctx_kernels(place->ctx)->memory.fill(&launch, b->places[member], 0, bytes);
}

/* Whether every leaf is a node of the tree of its own, or is sent by itself. Otherwise a rank adds all of its own to one place, in
 * any order. */
static bool xdi_gradient_is_apart(const xdi_place *place) {
    return place->invariant || place->batches.strided;
}

/* A block that still has to add to what a bucket is forming. */
static const xd_block *xdi_bucket_behind(const xdi_place *place, const xdi_bucket *bucket) {
    for (const xd_block *b = &place->model->root; b; b = xdi_block_after(b))
        for (int64_t i = 0; i < b->count && b->micro_batch < bucket->micro_batch + place->members; i++)
            if (xdi_gradient_bucket(place->model->weights[b->first + i]->owner) == bucket) return b;
    return NULL;
}

XD_PRIVATE xd_result xdi_gradient_check_micro_batch(const xdi_place *place, const xd_block *block,
                                                    int64_t micro_batch) {
    for (int64_t i = 0; i < block->count && xdi_gradient_is_apart(place); i++) {
        const xdi_bucket *bucket = xdi_gradient_bucket(place->model->weights[block->first + i]->owner);
        if (!bucket || micro_batch < bucket->micro_batch + place->members) continue;
        const xd_block *behind = xdi_bucket_behind(place, bucket);
        return XD_FAIL(
            place->ctx, XD_ERROR_STATE,
            "micro-batch %lld of block \"%.80s\" while micro-batch %lld of block \"%.80s\" is not complete: "
            "they are summed together, micro-batch after micro-batch",
            (long long)micro_batch, block->name,
            (long long)(behind ? behind->micro_batch : bucket->micro_batch), behind ? behind->name : "");
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_gradient_place(xdi_store *store, const xd_weight *weight, int64_t micro_batch,
                                        void **out) {
    const xd_weight *owner = weight->owner;
    const int member = xdi_gradient_member(store->place, micro_batch);
    xdi_bucket *b = xdi_gradient_bucket(owner);
    *out = NULL;
    if (!b) return XD_OK;
    if (!b->places[member]) XD_TRY(xdi_gradient_begin(store, b, member));
    *out = b->places[member] + xdi_bucket_plan_param(owner->flat->plan, owner->flat_index, NULL).begin -
           b->buffer.begin;
    return XD_OK;
}

/* An addition as in a bracket, to a place that is zero at first: a copy would keep the sign of a zero. */
XD_PRIVATE xd_result xdi_gradient_add(const xd_weight *weight, void *place) {
    const xd_launch launch = xd_ctx_launch(weight->model->ctx);
    const void *pair[2];
    pair[0] = place;
    pair[1] = weight->gradient;
    if (weight->count == 0) return XD_OK;
    return xd_ctx_kernels(weight->model->ctx)
        ->reduce.pieces(&launch, place, pair, 2, weight->count, XD_DTYPE_F32, XD_SUM);
}

/* ---- sums over the ranks ---- */

static xd_collective xdi_gradient_sum(const float *from, float *to) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.send = from;
    c.recv = to;
    c.dtype = XD_DTYPE_F32;
    c.op = XD_SUM;
    return c;
}

/* In INVARIANT mode: the leaves behind a sum, `known` being those of all its ranks. */
static void xdi_gradient_know(const xdi_place *place, xd_collective *sum, const xd_leaves *known, int rank) {
    if (!place->invariant) return;
    sum->leaves = known[rank];
    sum->known_leaves = known;
}

/* This rank's part of a sum of whole gradients, or all of it where every rank keeps that. */
static xd_result xdi_gradient_collect(const xdi_store *store, xdi_bucket *b, const xd_collective *sum) {
    const xdi_place *place = store->place;
    xd_collective c = *sum;
    const bool parts = xdi_bucket_plan_settings(b->flat->plan)->ranks > 1;
    for (int r = 0; r < place->ranks; r++) store->scratch.counts[r] = b->kept;
    c.kind = parts ? XD_COLLECTIVE_REDUCE_SCATTER : XD_COLLECTIVE_ALL_REDUCE;
    if (parts)
        c.send_counts = store->scratch.counts;
    else
        c.count = b->buffer.end - b->buffer.begin;
    return xdi_flight_start(place->settings.reductions, place->data, &c, &b->sending);
}

/* A strided leaf: the parts of its sum over the ranks become the next leaf of the stack. */
static xd_result xdi_gradient_send(const xdi_store *store, xdi_bucket *b, const float *leaf) {
    const xdi_place *place = store->place;
    struct xdi_unit *unit = b->flat->unit;
    float *next = NULL;
    if (place->on_host)
        next = xdi_gradient_arrival(b);
    else
        XD_TRY(xd_leaf_stack_next(b->stack, &next));
    xd_collective c = xdi_gradient_sum(leaf, next);
    xdi_gradient_know(place, &c, place->batches.known, place->rank);
    XD_TRY(xdi_gradient_collect(store, b, &c));
    unit->forming--;
    unit->sending++;
    if (place->settings.reductions) return XD_OK;
    b->sending.open = true; /* and has landed */
    return xdi_gradient_land(b);
}

/* The nodes that wait here, where no other rank has any for this sum. */
static xd_result xdi_gradient_fold(xdi_bucket *b) {
    const xd_leaves leaves = xdi_bucket_leaves(b->flat->place);
    const void *forest = b->lanes ? b->joined : xd_leaf_stack_forest(b->stack);
    if (xd_leaves_nodes(leaves.first, leaves.count) == 1) return XD_OK;
    return xd_reduce_leaves(b->flat->place->parts_ctx, b->sum, &forest, &leaves, 1, b->kept, b->kept,
                            XD_DTYPE_F32, XD_SUM);
}

/* The sum over all leaves of this group of ranks, once; on a queue it has only begun. */
static xd_result xdi_gradient_join(xdi_store *store, xdi_bucket *b) {
    const xdi_place *place = store->place;
    if (b->reduced || b->blocks == 0) return XD_OK;
    XD_TRY(xdi_gradient_land(b));
    XD_TRY(xdi_lanes_join(store, b));
    xd_collective c = xdi_gradient_sum(b->lanes ? b->joined : xd_leaf_stack_forest(b->stack),
                                       b->landed ? b->landed : b->sum);
    xdi_gradient_know(place, &c, place->batches.known, place->rank);
    XD_TRY(place->batches.strided || !xdi_place_assembles(place) ? xdi_gradient_fold(b)
                                                                 : xdi_gradient_collect(store, b, &c));
    b->reduced = true;
    return XD_OK;
}

/* The sums of all groups of replicas. */
static xd_result xdi_gradient_join_replicas(const xdi_bucket *b, float *sum) {
    const xdi_place *place = b->flat->place;
    xd_collective c = xdi_gradient_sum(sum, sum);
    if (!place->replicas) return XD_OK;
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.count = b->kept;
    xdi_gradient_know(place, &c, place->batches.known + place->ranks, place->replica);
    return xd_collective_run(place->replicas, &c);
}

/* ---- a leaf ends ---- */

/* Whether nothing is to be added any more. */
static bool xdi_bucket_is_formed(const xdi_bucket *b) {
    return b->blocks == 0 || b->micro_batch == xdi_batches_passes(b->flat->place);
}

/* Sums that can begin before the step ends. Under FSDP the ranks are at the same leaf, those that have fewer too. Under DDP they
 * may be anywhere, so a sum begins only where a queue runs it, and sums begin in one order. */
static xd_result xdi_gradient_launch(xdi_store *store, xdi_step *step, xdi_bucket *b) {
    const xdi_place *place = store->place;
    if (place->settings.sharded) {
        const bool waits =
            place->batches.strided && place->settings.reductions; /* for parts that are under way */
        return b->micro_batch == xdi_batches_passes(place) && !waits ? xdi_gradient_join(store, b) : XD_OK;
    }
    while (place->settings.reductions && !step->late && step->launched < store->bucket_count &&
           xdi_bucket_is_formed(&store->buckets[step->launched]))
        XD_TRY(xdi_gradient_join(store, &store->buckets[step->launched++]));
    return XD_OK;
}

XD_PRIVATE void xdi_gradient_align(xd_parallel *const *parallels, int count) {
    bool sharded = false;
    for (int i = 0; i < count; i++)
        sharded = sharded || (parallels[i] && parallels[i]->place.settings.sharded);
    for (int i = 0; i < count; i++) {
        xd_parallel *p = parallels[i];
        if (!p) continue;
        p->step.late = (sharded || p->experts) && !p->place.settings.sharded &&
                       p->place.batches.own.total % ((int64_t)p->place.ranks * p->place.members) != 0;
        if (p->experts) p->experts->step.late = p->step.late;
    }
}

/* Whether more leaves are added to the same place: outside of INVARIANT mode those of this rank, unless they are sent. */
static bool xdi_gradient_waits(const xdi_bucket *b) {
    const xdi_place *place = b->flat->place;
    const bool more =
        b->micro_batch < (place->of_experts ? xdi_batches_passes(place) : place->batches.own.count);
    return !place->invariant && !place->batches.strided && more;
}

/* The leaf of a member that a stack takes. */
static xd_result xdi_gradient_push(xdi_bucket *b, int member) {
    float *place = b->places[member];
    b->places[member] = NULL;
    return place ? xd_leaf_stack_push(xdi_gradient_stack(b, member), place) : XD_OK;
}

static xd_result xdi_gradient_send_round(xdi_store *store, xdi_bucket *b) {
    const float *whole = b->places[0];
    XD_TRY(xdi_round_join(store, b));
    for (int i = 0; i < store->place->members; i++) b->places[i] = NULL;
    return xdi_gradient_send(store, b, whole);
}

/* The last block has added to the leaf, or to those of a round. */
static xd_result xdi_gradient_close(xdi_store *store, xdi_step *step, xdi_bucket *b) {
    const xdi_place *place = store->place;
    const int64_t elements = b->buffer.end - b->buffer.begin;
    b->micro_batch += place->members;
    b->done = 0;
    if (xdi_bucket_is_forming(b) && !xdi_gradient_waits(b)) {
        for (int i = 0; i < place->members; i++)
            if (b->places[i])
                XD_TRY(xdi_gradient_scale(place->ctx, b->places[i], elements, place->batches.before));
        if (xdi_gradient_is_sent(place)) XD_TRY(xdi_gradient_send_round(store, b));
        for (int i = 0; i < place->members; i++) XD_TRY(xdi_gradient_push(b, i));
    }
    return xdi_gradient_launch(store, step, b);
}

XD_PRIVATE xd_result xdi_gradient_finish(xdi_store *store, xdi_step *step, xd_block *block) {
    block->micro_batch++;
    if (xdi_block_trains(block)) xdi_state_wait(block->model, &block->model->parallel->step);
    for (int64_t i = 0; i < block->count; i++) {
        xdi_bucket *b = xdi_block_bucket(store, block, i);
        if (b && ++b->done == b->blocks * store->place->members) XD_TRY(xdi_gradient_close(store, step, b));
    }
    return XD_OK;
}

/* ---- a step ends ---- */

/* What follows on the sum of a group, where that is; then it is where parts are kept. */
static xd_result xdi_gradient_complete(const xdi_bucket *b) {
    const xdi_place *place = b->flat->place;
    const size_t bytes = (size_t)b->kept * sizeof *b->sum;
    if (!b->landed) {
        XD_TRY(xdi_gradient_join_replicas(b, b->sum));
        return xdi_gradient_scale(place->parts_ctx, b->sum, b->kept, place->batches.after);
    }
    if (place->batches.strided) XD_TRY(xdi_parts_read(place, b->landed, b->sum, bytes));
    XD_TRY(xdi_gradient_join_replicas(b, b->landed));
    XD_TRY(xdi_gradient_scale(place->ctx, b->landed, b->kept, place->batches.after));
    return xdi_parts_write(place, b->sum, b->landed, bytes);
}

XD_PRIVATE xd_result xdi_gradient_reduce(xdi_store *store) {
    for (int64_t i = 0; i < store->bucket_count; i++) XD_TRY(xdi_gradient_join(store, &store->buckets[i]));
    for (int64_t i = 0; i < store->bucket_count; i++) {
        xdi_bucket *b = &store->buckets[i];
        XD_TRY(xdi_flight_land(store->place->settings.reductions, &b->sending));
        if (b->blocks == 0) continue;
        XD_TRY(xdi_gradient_complete(b));
    }
    return XD_OK;
}

XD_PRIVATE void xdi_gradient_reset(xdi_store *store, xdi_step *step) {
    const xdi_place *place = store->place;
    for (xd_block *b = &place->model->root; b; b = xdi_block_after(b)) {
        b->micro_batch = 0; /* a backward that is open is of no step any more: its end ends no leaf */
        for (int i = 0; i < b->open; i++)
            if (b->passes[i].kind == XD_PASS_BACKWARD) b->passes[i].kind = XD_PASS_RECOMPUTE;
    }
    for (int64_t i = 0; i < store->bucket_count * place->members && store->lanes; i++)
        xd_leaf_stack_reset(store->lanes[i]);
    xdi_inputs_forget(place->model->inputs);
    for (int64_t i = 0; i < store->bucket_count; i++) {
        xdi_bucket *b = &store->buckets[i];
        (void)xdi_flight_land(place->settings.reductions, &b->sending);
        xd_leaf_stack_reset(b->stack);
        b->done = b->micro_batch = 0;
        for (int m = 0; m < place->members; m++) b->places[m] = NULL;
        b->reduced = false;
    }
    for (int64_t i = 0; i < store->unit_count; i++) {
        store->units[i].sum = NULL;
        store->units[i].forming = store->units[i].sending = 0;
    }
    for (int64_t i = 0; i < store->sum_count; i++) store->sums[i].unit = NULL;
    step->launched = 0;
    step->order.signature = 0;
    step->order.opening_count = 0;
    step->reduced = step->summed = step->finished = false;
}
