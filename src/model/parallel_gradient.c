/* Gradients of leaves: where blocks add them, and how they become one sum over all leaves.
 *
 * Leaves in a row: a rank's leaves are nodes of the canonical tree (xd_leaf_stack), whole; after the last one the forests of
 * all ranks are reduced at once. Leaves dealt i = k N + j: the k-th leaves of all ranks are an aligned block of N, so each is
 * reduced by itself and only parts wait, as nodes of the tree over k. Both are the same additions in the same order when N is
 * a power of two. */

#include "base/internal.h"
#include "comm/internal.h"
#include "kernel/kernels.h"
#include "model/internal.h"

#include <float.h>
#include <string.h>

XD_PRIVATE bool xdi_parallel_owns(const xd_parallel *p, int64_t leaf) {
    return xdi_parallel_number(p, leaf) >= 0;
}

/* ---- factors ---- */

static xd_result xdi_gradient_factor(xd_ctx *ctx, double divisor, const char *name, float *out) {
    const float factor = divisor == 0.0 ? 1.0f : (float)(1.0 / divisor);
    XD_REQUIRE(ctx, factor > 0.0f && factor <= FLT_MAX, XD_ERROR_ARGUMENT,
               "divisor %g of %s: its inverse is not a positive number of F32", divisor, name);
    *out = factor;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_gradient_set_factors(xd_parallel *p, const xd_gradient_divisors *divide) {
    const double after = divide->after == 0.0 ? 1.0 : divide->after;
    XD_TRY(xdi_gradient_factor(p->ctx, divide->before, "leaves", &p->before));
    return xdi_gradient_factor(p->ctx, divide->average ? after * (double)p->total : after,
                               "the sum of all leaves", &p->after);
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

/* Where this rank's part of a dealt leaf's sum arrives on its way home: at its own place in the leaf. */
static float *xdi_gradient_arrival(const xd_parallel *p, const xdi_bucket *b) {
    const bool parts = xd_bucket_plan_settings(b->flat->plan)->ranks > 1;
    float *leaf = b->flat->unit->sum->memory + b->flat->place + b->buffer.begin;
    return leaf + (parts ? p->rank * b->kept : 0);
}

/* The sum of a dealt leaf over the ranks is there: the next node of the tree over this rank's leaves. */
static xd_result xdi_gradient_land(xd_parallel *p, xdi_bucket *b) {
    struct xdi_unit *unit = b->flat->unit;
    float *next = NULL;
    if (!b->sending.open || !p->dealt) return XD_OK;
    XD_TRY(xdi_flight_land(p->reductions, &b->sending));
    XD_TRY(xd_leaf_stack_next(b->stack, &next));
    if (p->offloaded)
        XD_TRY(xdi_parallel_bring_home(p, next, xdi_gradient_arrival(p, b), (size_t)b->kept * sizeof *next));
    unit->sending--;
    if (unit->sending + unit->forming == 0) {
        unit->sum->unit = NULL;
        unit->sum = NULL;
    }
    return xd_leaf_stack_push(b->stack, next);
}

static xd_result xdi_unit_land_sums(xd_parallel *p, const struct xdi_unit *unit) {
    for (int64_t f = 0; f < unit->flat_count; f++)
        for (int64_t i = 0; i < unit->flats[f].bucket_count; i++)
            XD_TRY(xdi_gradient_land(p, &unit->flats[f].buckets[i]));
    return XD_OK;
}

/* Memory for a unit's whole gradient: what is free, or else the sum that a queue has had for longest. */
static xd_result xdi_unit_take_sum(xd_parallel *p, struct xdi_unit *unit) {
    xdi_gradient_slot *slot = unit->sums;
    for (int i = 0; i < unit->sum_count && slot->unit; i++) {
        xdi_gradient_slot *at = &unit->sums[i];
        const bool older = slot->unit->forming > 0 || at->taken < slot->taken;
        if (!at->unit || (at->unit->forming == 0 && older)) slot = at;
    }
    const struct xdi_unit *other = slot->unit;
    XD_REQUIRE(p->ctx, !other || other->forming == 0, XD_ERROR_STATE,
               "backward of unit \"%.80s\" while a leaf of unit \"%.80s\" is not complete: %d of a level are "
               "planned at once",
               unit->block->name, other->block->name, unit->sum_count);
    if (other) XD_TRY(xdi_unit_land_sums(p, other));
    slot->unit = unit;
    slot->taken = ++p->opened;
    unit->sum = slot;
    return XD_OK;
}

/* The place of a leaf in memory of the unit's whole gradient, which a round of leaves keeps until it is sent. */
static xd_result xdi_gradient_begin_sent(xd_parallel *p, xdi_bucket *b, int member) {
    const xdi_flat *flat = b->flat;
    struct xdi_unit *unit = flat->unit;
    if (!xdi_bucket_is_forming(p, b)) {
        XD_TRY(xdi_gradient_land(p, b)); /* of the leaf before */
        if (!unit->sum) XD_TRY(xdi_unit_take_sum(p, unit));
        unit->forming++;
    }
    b->places[member] =
        unit->sum->memory + flat->place + member * xd_bucket_plan_numel(flat->plan) + b->buffer.begin;
    return XD_OK;
}

/* Where leaves of members come in turn and wait, each member's have a stack. */
static xd_leaf_stack *xdi_gradient_stack(const xdi_bucket *b, int member) {
    return b->lanes ? b->lanes[member] : b->stack;
}

static xd_result xdi_gradient_begin(xd_parallel *p, xdi_bucket *b, int member) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    const size_t bytes = (size_t)(b->buffer.end - b->buffer.begin) * sizeof(float);
    if (!xdi_gradient_is_sent(p))
        return xdi_leaf_stack_next_zeros(xdi_gradient_stack(b, member), &b->places[member]);
    XD_TRY(xdi_gradient_begin_sent(p, b, member));
    return xd_ctx_kernels(p->ctx)->memory.fill(&launch, b->places[member], 0, bytes);
}

/* Whether every leaf is a node of the tree of its own, or is sent by itself. Otherwise a rank adds all of its own to one place, in
 * any order. */
static bool xdi_gradient_is_apart(const xd_parallel *p) {
    return p->invariant || p->dealt;
}

/* A block that still has to add to what a bucket is forming. */
static const xd_block *xdi_bucket_behind(const xd_parallel *p, const xdi_bucket *bucket) {
    for (const xd_block *b = &p->model->root; b; b = xdi_block_after(b))
        for (int64_t i = 0; i < b->count && b->leaf < bucket->leaf + p->members; i++)
            if (xdi_gradient_bucket(p->model->weights[b->first + i]->owner) == bucket) return b;
    return NULL;
}

XD_PRIVATE xd_result xdi_gradient_check_leaf(const xd_parallel *p, const xd_block *block, int64_t leaf) {
    for (int64_t i = 0; i < block->count && xdi_gradient_is_apart(p); i++) {
        const xdi_bucket *bucket = xdi_gradient_bucket(p->model->weights[block->first + i]->owner);
        if (!bucket || leaf < bucket->leaf + p->members) continue;
        const xd_block *behind = xdi_bucket_behind(p, bucket);
        return XD_FAIL(p->ctx, XD_ERROR_STATE,
                       "leaf %lld of block \"%.80s\" while leaf %lld of block \"%.80s\" is not complete: "
                       "they are summed together, leaf after leaf",
                       (long long)leaf, block->name, (long long)(behind ? behind->leaf : bucket->leaf),
                       behind ? behind->name : "");
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_gradient_place(xd_parallel *p, const xd_weight *weight, int64_t leaf, void **out) {
    const xd_weight *owner = weight->owner;
    const int member = xdi_gradient_member(p, leaf);
    xdi_bucket *b = xdi_gradient_bucket(owner);
    *out = NULL;
    if (!b) return XD_OK;
    if (!b->places[member]) XD_TRY(xdi_gradient_begin(p, b, member));
    *out = b->places[member] + xd_bucket_plan_param(owner->flat->plan, owner->flat_index, NULL).begin -
           b->buffer.begin;
    return XD_OK;
}

/* An addition as in a bracket, to a place that is zero at first: a copy would keep the sign of a zero. */
XD_PRIVATE xd_result xdi_gradient_add(const xd_parallel *p, const xd_weight *weight, void *place) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    const void *pair[2];
    pair[0] = place;
    pair[1] = weight->gradient;
    if (weight->count == 0) return XD_OK;
    return xd_ctx_kernels(p->ctx)->reduce.pieces(&launch, place, pair, 2, weight->count, XD_DTYPE_F32,
                                                 XD_SUM);
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
static void xdi_gradient_know(const xd_parallel *p, xd_collective *sum, const xd_leaves *known, int rank) {
    if (!p->invariant) return;
    sum->leaves = known[rank];
    sum->known_leaves = known;
}

/* This rank's part of a sum of whole gradients, or all of it where every rank keeps that. */
static xd_result xdi_gradient_collect(xd_parallel *p, xdi_bucket *b, const xd_collective *sum) {
    xd_collective c = *sum;
    const bool parts = xd_bucket_plan_settings(b->flat->plan)->ranks > 1;
    for (int r = 0; r < p->ranks; r++) p->counts[r] = b->kept;
    c.kind = parts ? XD_COLLECTIVE_REDUCE_SCATTER : XD_COLLECTIVE_ALL_REDUCE;
    if (parts)
        c.send_counts = p->counts;
    else
        c.count = b->buffer.end - b->buffer.begin;
    return xdi_flight_start(p->reductions, p->data, &c, &b->sending);
}

/* A dealt leaf: the parts of its sum over the ranks become the next leaf of the stack. */
static xd_result xdi_gradient_send(xd_parallel *p, xdi_bucket *b, const float *leaf) {
    struct xdi_unit *unit = b->flat->unit;
    float *next = NULL;
    if (p->offloaded)
        next = xdi_gradient_arrival(p, b);
    else
        XD_TRY(xd_leaf_stack_next(b->stack, &next));
    xd_collective c = xdi_gradient_sum(leaf, next);
    xdi_gradient_know(p, &c, p->known, p->rank);
    XD_TRY(xdi_gradient_collect(p, b, &c));
    unit->forming--;
    unit->sending++;
    if (p->reductions) return XD_OK;
    b->sending.open = true; /* and has landed */
    return xdi_gradient_land(p, b);
}

/* The nodes that wait here, where no other rank has any for this sum. */
static xd_result xdi_gradient_fold(xd_parallel *p, xdi_bucket *b) {
    const xd_leaves leaves = xdi_bucket_leaves(p);
    const void *forest = b->lanes ? b->joined : xd_leaf_stack_forest(b->stack);
    if (xd_leaves_nodes(leaves.first, leaves.count) == 1) return XD_OK;
    return xd_reduce_leaves(p->home, b->sum, &forest, &leaves, 1, b->kept, b->kept, XD_DTYPE_F32, XD_SUM);
}

/* The sum over all leaves of this group of ranks, once; on a queue it has only begun. */
static xd_result xdi_gradient_join(xd_parallel *p, xdi_bucket *b) {
    if (b->reduced || b->blocks == 0) return XD_OK;
    XD_TRY(xdi_gradient_land(p, b));
    XD_TRY(xdi_lanes_join(p, b));
    xd_collective c = xdi_gradient_sum(b->lanes ? b->joined : xd_leaf_stack_forest(b->stack),
                                       b->landed ? b->landed : b->sum);
    xdi_gradient_know(p, &c, p->known, p->rank);
    XD_TRY(p->dealt || !xdi_parallel_assembles(p) ? xdi_gradient_fold(p, b) : xdi_gradient_collect(p, b, &c));
    b->reduced = true;
    return XD_OK;
}

/* The sums of all groups of replicas. */
static xd_result xdi_gradient_join_replicas(xd_parallel *p, const xdi_bucket *b, float *sum) {
    xd_collective c = xdi_gradient_sum(sum, sum);
    if (!p->replicas) return XD_OK;
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.count = b->kept;
    xdi_gradient_know(p, &c, p->known + p->ranks, p->replica);
    return xd_collective_run(p->replicas, &c);
}

/* ---- a leaf ends ---- */

/* Whether nothing is to be added any more. */
static bool xdi_bucket_is_formed(const xd_parallel *p, const xdi_bucket *b) {
    return b->blocks == 0 || b->leaf == xdi_parallel_passes(p);
}

/* Sums that can begin before the step ends. Under FSDP the ranks are at the same leaf, those that have fewer too. Under DDP they
 * may be anywhere, so a sum begins only where a queue runs it, and sums begin in one order. */
static xd_result xdi_gradient_launch(xd_parallel *p, xdi_bucket *b) {
    if (p->sharded) {
        const bool waits = p->dealt && p->reductions; /* for parts that are under way */
        return b->leaf == xdi_parallel_passes(p) && !waits ? xdi_gradient_join(p, b) : XD_OK;
    }
    while (p->reductions && !p->late && p->launched < p->bucket_count &&
           xdi_bucket_is_formed(p, &p->buckets[p->launched]))
        XD_TRY(xdi_gradient_join(p, &p->buckets[p->launched++]));
    return XD_OK;
}

XD_PRIVATE void xdi_gradient_align(xd_parallel *const *parallels, int count) {
    bool sharded = false;
    for (int i = 0; i < count; i++) sharded = sharded || (parallels[i] && parallels[i]->sharded);
    for (int i = 0; i < count; i++) {
        xd_parallel *p = parallels[i];
        if (!p) continue;
        p->late =
            (sharded || p->experts) && !p->sharded && p->leaves.total % ((int64_t)p->ranks * p->members) != 0;
        if (p->experts) p->experts->late = p->late;
    }
}

/* Whether more leaves are added to the same place: outside of INVARIANT mode those of this rank, unless they are sent. */
static bool xdi_gradient_waits(const xd_parallel *p, const xdi_bucket *b) {
    const bool more = b->leaf < (p->of_experts ? xdi_parallel_passes(p) : p->leaves.count);
    return !p->invariant && !p->dealt && more;
}

/* The leaf of a member that a stack takes. */
static xd_result xdi_gradient_push(xdi_bucket *b, int member) {
    float *place = b->places[member];
    b->places[member] = NULL;
    return place ? xd_leaf_stack_push(xdi_gradient_stack(b, member), place) : XD_OK;
}

static xd_result xdi_gradient_send_round(xd_parallel *p, xdi_bucket *b) {
    const float *whole = b->places[0];
    XD_TRY(xdi_round_join(p, b));
    for (int i = 0; i < p->members; i++) b->places[i] = NULL;
    return xdi_gradient_send(p, b, whole);
}

/* The last block has added to the leaf, or to those of a round. */
static xd_result xdi_gradient_close(xd_parallel *p, xdi_bucket *b) {
    const int64_t elements = b->buffer.end - b->buffer.begin;
    b->leaf += p->members;
    b->done = 0;
    if (xdi_bucket_is_forming(p, b) && !xdi_gradient_waits(p, b)) {
        for (int i = 0; i < p->members; i++)
            if (b->places[i]) XD_TRY(xdi_gradient_scale(p->ctx, b->places[i], elements, p->before));
        if (xdi_gradient_is_sent(p)) XD_TRY(xdi_gradient_send_round(p, b));
        for (int i = 0; i < p->members; i++) XD_TRY(xdi_gradient_push(b, i));
    }
    return xdi_gradient_launch(p, b);
}

XD_PRIVATE xd_result xdi_gradient_finish(xd_parallel *p, xd_block *block) {
    block->leaf++;
    if (xdi_block_trains(block)) xdi_state_wait(block->model->parallel);
    for (int64_t i = 0; i < block->count; i++) {
        xdi_bucket *b = xdi_block_bucket(p, block, i);
        if (b && ++b->done == b->blocks * p->members) XD_TRY(xdi_gradient_close(p, b));
    }
    return XD_OK;
}

/* ---- a step ends ---- */

/* What follows on the sum of a group, where that is; then it is at home. */
static xd_result xdi_gradient_complete(xd_parallel *p, const xdi_bucket *b) {
    const size_t bytes = (size_t)b->kept * sizeof *b->sum;
    if (!b->landed) {
        XD_TRY(xdi_gradient_join_replicas(p, b, b->sum));
        return xdi_gradient_scale(p->home, b->sum, b->kept, p->after);
    }
    if (p->dealt) XD_TRY(xdi_parallel_take_out(p, b->landed, b->sum, bytes));
    XD_TRY(xdi_gradient_join_replicas(p, b, b->landed));
    XD_TRY(xdi_gradient_scale(p->ctx, b->landed, b->kept, p->after));
    return xdi_parallel_bring_home(p, b->sum, b->landed, bytes);
}

XD_PRIVATE xd_result xdi_gradient_reduce(xd_parallel *p) {
    for (int64_t i = 0; i < p->bucket_count; i++) XD_TRY(xdi_gradient_join(p, &p->buckets[i]));
    for (int64_t i = 0; i < p->bucket_count; i++) {
        xdi_bucket *b = &p->buckets[i];
        XD_TRY(xdi_flight_land(p->reductions, &b->sending));
        if (b->blocks == 0) continue;
        XD_TRY(xdi_gradient_complete(p, b));
    }
    return XD_OK;
}

XD_PRIVATE void xdi_gradient_reset(xd_parallel *p) {
    for (xd_block *b = &p->model->root; b; b = xdi_block_after(b)) {
        b->leaf = 0; /* a backward that is open is of no step any more: its end ends no leaf */
        for (int i = 0; i < b->open; i++)
            if (b->passes[i].kind == XD_PASS_BACKWARD) b->passes[i].kind = XD_PASS_RECOMPUTE;
    }
    for (int64_t i = 0; i < p->bucket_count * p->members && p->lanes; i++) xd_leaf_stack_reset(p->lanes[i]);
    xdi_inputs_forget(p->model->inputs);
    for (int64_t i = 0; i < p->bucket_count; i++) {
        xdi_bucket *b = &p->buckets[i];
        (void)xdi_flight_land(p->reductions, &b->sending);
        xd_leaf_stack_reset(b->stack);
        b->done = b->leaf = 0;
        for (int m = 0; m < p->members; m++) b->places[m] = NULL;
        b->reduced = false;
    }
    for (int64_t i = 0; i < p->unit_count; i++) {
        p->units[i].sum = NULL;
        p->units[i].forming = p->units[i].sending = 0;
    }
    for (int64_t i = 0; i < p->sum_count; i++) p->sums[i].unit = NULL;
    p->launched = 0;
    p->signature = 0;
    p->opening_count = 0;
    p->reduced = p->summed = p->finished = false;
}
