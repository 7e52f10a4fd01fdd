/* From one layout to another: the copies and messages, planned once. */

#include "base/extend.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "tensor/internal.h"
#include "tensor/redistribute_internal.h"

#include <string.h>

/* Which ranks hold which part of a layout. A cell is one choice of coordinates on the axes that split (or stay
 * partial); in it are `pieces` coordinates on the axes to be reduced, whose values are the terms of the sum, and
 * `replicas` ranks that hold the same term. */
typedef struct xdi_redistribution_holders {
    int cells, pieces, replicas;
    int *rank; /* [cells][pieces][replicas] */
    int *turn; /* [cells][pieces]: the next of the replicas to send */
} xdi_redistribution_holders;

/* The copies of a rank: pack, then local, then unpack. */
typedef struct xdi_redistribution_copies {
    xd_copy *list; /* NULL while they are counted */
    int64_t pack_end, local_end, end;
} xdi_redistribution_copies;

typedef struct xdi_redistribution_exchange {
    const xd_layout *from, *to;
    unsigned kept, reduced, added; /* mesh axes: partial on both sides; reduced; newly partial by a sum */
    xd_reduce_op op;
    int cells, pieces;
    int *source; /* [cells][pieces]: the rank that sends this term to this rank; -1 -> none */
    int64_t *send_counts, *send_displacements, *recv_counts, *recv_displacements;
    int64_t send_count, recv_count, total_count;
    int64_t kept_count; /* elements from this rank itself; in a reduction they follow the received ones */
    bool zero;          /* this rank's part of a newly partial sum is zeros */
    xd_region src, dst; /* of this rank; dst within the window */
    xdi_redistribution_copies copies;
    void **pointers; /* [pieces] scratch for the reduction */
} xdi_redistribution_exchange;

struct xdi_redistribution {
    xd_ctx *ctx;
    xdi_redistribution_desc desc;
    xd_region window;
    int64_t stride[2][XD_DIMS_MAX];
    int step_count;
    xdi_redistribution_exchange step[2];
    xd_layout *middle;               /* between two steps */
    void *middle_data, *send, *recv; /* in memory of the context's device, like the next */
    void *zero;                      /* eight bytes */
};

static unsigned xdi_redistribution_axes(const xd_layout *layout, xd_placement_kind kind) {
    const xd_layout_desc *d = xd_layout_settings(layout);
    unsigned mask = 0;
    for (int i = 0; i < d->topology->axis_count; i++)
        if (d->placement[i].kind == kind) mask |= 1u << i;
    return mask;
}

/* Row-major index of the coordinate over the axes in mask; *size receives the number of coordinates. */
static int xdi_redistribution_linear(const xd_topology *t, unsigned mask, const int *coordinate, int *size) {
    int linear = 0;
    *size = 1;
    for (int i = 0; i < t->axis_count; i++) {
        if (!(mask >> i & 1u)) continue;
        linear = linear * t->size[i] + coordinate[i];
        *size *= t->size[i];
    }
    return linear;
}

static bool xdi_redistribution_holders_create(xd_ctx *ctx, const xdi_redistribution_exchange *x,
                                              xdi_redistribution_holders *h) {
    const xd_topology *t = xd_layout_settings(x->from)->topology;
    const unsigned all = (1u << t->axis_count) - 1u, copies = xdi_redistribution_axes(x->from, XD_REPLICATE);
    memset(h, 0, sizeof *h);
    h->rank = (int *)xd_allocate(ctx, 2 * (size_t)t->rank_count * sizeof *h->rank);
    if (!h->rank) return false;
    h->turn = h->rank + t->rank_count;
    for (int i = 0; i < t->rank_count; i++) {
        const int rank = t->ranks ? t->ranks[i] : i;
        int coordinate[XD_MESH_AXES_MAX] = { 0 };
        xdi_topology_coordinate(t, rank, coordinate);
        const int cell = xdi_redistribution_linear(t, all & ~copies & ~x->reduced, coordinate, &h->cells);
        const int piece = xdi_redistribution_linear(t, x->reduced, coordinate, &h->pieces);
        const int replica = xdi_redistribution_linear(t, copies, coordinate, &h->replicas);
        h->rank[(cell * h->pieces + piece) * h->replicas + replica] = rank;
    }
    return true;
}

/* The rank among the replicas of one term that sends it to `taker`: `taker` itself, else each in turn. */
static int xdi_redistribution_giver(xdi_redistribution_holders *h, int cell, int piece, int taker) {
    const int slot = cell * h->pieces + piece;
    const int *ranks = h->rank + slot * h->replicas;
    for (int i = 0; i < h->replicas; i++)
        if (ranks[i] == taker) return taker;
    return ranks[h->turn[slot]++ % h->replicas];
}

/* The part of the destination that a rank needs. False when no data moves to it. */
static bool xdi_redistribution_wanted(const xdi_redistribution *plan, const xdi_redistribution_exchange *x,
                                      int rank, xd_region *wanted, bool *zero) {
    const xd_topology *t = xd_layout_settings(x->to)->topology;
    int coordinate[XD_MESH_AXES_MAX] = { 0 }, ignored;
    *zero = false;
    if (!xd_layout_region(x->to, rank, wanted)) return false;
    if (plan->desc.window) {
        const xd_region whole = *wanted;
        xdi_region_intersect(&whole, &plan->window, wanted);
    }
    xdi_topology_coordinate(t, rank, coordinate);
    *zero = xdi_redistribution_linear(t, x->added, coordinate, &ignored) != 0;
    return !*zero && xdi_region_numel(wanted) > 0;
}

/* On axes that stay partial a rank takes only from its own coordinate. */
static bool xdi_redistribution_same_partial(const xdi_redistribution_exchange *x, int a, int b) {
    const xd_topology *t = xd_layout_settings(x->from)->topology;
    int ca[XD_MESH_AXES_MAX], cb[XD_MESH_AXES_MAX], ignored;
    if (!x->kept) return true;
    xdi_topology_coordinate(t, a, ca);
    xdi_topology_coordinate(t, b, cb);
    return xdi_redistribution_linear(t, x->kept, ca, &ignored) ==
           xdi_redistribution_linear(t, x->kept, cb, &ignored);
}

/* A sum that does not fit stays at the maximum, for which there is never memory. */
static void xdi_redistribution_count(int64_t *sum, int64_t count) {
    *sum = count <= INT64_MAX - *sum ? *sum + count : INT64_MAX;
}

/* Decides for every rank which ranks send to it, and stores this rank's part. It must go over all ranks, because
 * replicas take turns. */
static void xdi_redistribution_assign(const xdi_redistribution *plan, xdi_redistribution_exchange *x,
                                      xdi_redistribution_holders *h) {
    const xd_topology *t = xd_layout_settings(x->to)->topology;
    const int me = plan->desc.rank;
    for (int i = 0; i < t->rank_count; i++) {
        const int taker = t->ranks ? t->ranks[i] : i;
        xd_region wanted, held, common;
        bool zero;
        if (!xdi_redistribution_wanted(plan, x, taker, &wanted, &zero)) continue;
        for (int cell = 0; cell < h->cells; cell++) {
            const int first = h->rank[cell * h->pieces * h->replicas];
            xd_layout_region(x->from, first, &held);
            if (!xdi_redistribution_same_partial(x, first, taker) ||
                !xdi_region_intersect(&held, &wanted, &common))
                continue;
            const int64_t count = xdi_region_numel(&common);
            for (int piece = 0; piece < h->pieces; piece++) {
                const int giver = xdi_redistribution_giver(h, cell, piece, taker);
                if (taker == me) x->source[cell * h->pieces + piece] = giver;
                if (giver == taker) {
                    if (taker == me) xdi_redistribution_count(&x->kept_count, count);
                    continue;
                }
                xdi_redistribution_count(&x->total_count, count);
                if (giver == me) x->send_counts[taker] = count;
                if (taker == me) x->recv_counts[giver] = count;
            }
        }
    }
}

/* The intersection of what this rank holds and what `peer` needs, or the reverse, stored densely. */
static bool xdi_redistribution_message(const xdi_redistribution *plan, const xdi_redistribution_exchange *x,
                                       int peer, bool sending, xd_region *message) {
    xd_region other;
    bool zero;
    if (sending) {
        xdi_redistribution_wanted(plan, x, peer, &other, &zero);
        return xdi_region_intersect(&x->src, &other, message);
    }
    xd_layout_region(x->from, peer, &other);
    return xdi_region_intersect(&other, &x->dst, message);
}

/* Appends the copies between two regions; with list NULL it only counts. dense_offset shifts the side that
 * is a staging buffer: 1 the destination, -1 the source, 0 none. */
static void xdi_redistribution_append(xdi_redistribution_copies *to, int64_t *end, int64_t capacity,
                                      const xd_region *src, const int64_t *src_stride, const xd_region *dst,
                                      const int64_t *dst_stride, int side, int64_t dense_offset) {
    const int64_t begin = *end;
    xd_copy *list = to->list ? to->list + begin : NULL;
    *end += xdi_region_copies(src, src_stride, dst, dst_stride, list, to->list ? capacity - begin : 0);
    for (int64_t i = begin; to->list && i < *end; i++) {
        if (side > 0) to->list[i].dst_offset += dense_offset;
        if (side < 0) to->list[i].src_offset += dense_offset;
    }
}

/* The three lists of copies, in the order of the ranks. Called twice: to count, and to fill. */
static void xdi_redistribution_list(const xdi_redistribution *plan, xdi_redistribution_exchange *x,
                                    const int64_t *from_stride, const int64_t *to_stride) {
    const int64_t capacity = x->copies.end;
    int64_t end = 0;
    xd_region message;
    for (int r = 0; r < plan->desc.ranks; r++)
        if (x->send_counts[r] && xdi_redistribution_message(plan, x, r, true, &message))
            xdi_redistribution_append(&x->copies, &end, capacity, &x->src, from_stride, &message, NULL, 1,
                                      x->send_displacements[r]);
    x->copies.pack_end = end;
    if (x->kept_count && x->pieces == 1)
        xdi_redistribution_append(&x->copies, &end, capacity, &x->src, from_stride, &x->dst, to_stride, 0, 0);
    if (x->kept_count && x->pieces > 1 &&
        xdi_redistribution_message(plan, x, plan->desc.rank, false, &message))
        xdi_redistribution_append(&x->copies, &end, capacity, &x->src, from_stride, &message, NULL, 1,
                                  x->recv_count);
    x->copies.local_end = end;
    /* A reduction writes its result over the first term, so only first terms are unpacked. */
    for (int cell = 0; cell < x->cells; cell++) {
        const int giver = x->source[cell * x->pieces];
        if (giver < 0 || (giver == plan->desc.rank && x->pieces == 1)) continue;
        if (!xdi_redistribution_message(plan, x, giver, false, &message)) continue;
        const int64_t at = giver == plan->desc.rank ? x->recv_count : x->recv_displacements[giver];
        xdi_redistribution_append(&x->copies, &end, capacity, &message, NULL, &x->dst, to_stride, -1, at);
    }
    x->copies.end = end;
}

static bool xdi_redistribution_allocate(const xdi_redistribution *plan, xdi_redistribution_exchange *x,
                                        const xdi_redistribution_holders *h) {
    const size_t ranks = (size_t)plan->desc.ranks, slots = (size_t)h->cells * (size_t)h->pieces;
    x->cells = h->cells;
    x->pieces = h->pieces;
    x->send_counts = (int64_t *)xd_allocate(plan->ctx, 4 * ranks * sizeof(int64_t));
    x->source = (int *)xd_allocate(plan->ctx, slots * sizeof(int));
    x->pointers = (void **)xd_allocate(plan->ctx, (size_t)h->pieces * sizeof(void *));
    if (!x->send_counts || !x->source || !x->pointers) return false;
    x->send_displacements = x->send_counts + ranks;
    x->recv_counts = x->send_displacements + ranks;
    x->recv_displacements = x->recv_counts + ranks;
    for (size_t i = 0; i < slots; i++) x->source[i] = -1;
    return true;
}

/* Fills one exchange whose layouts and axes are set. False without memory. */
static bool xdi_redistribution_build(const xdi_redistribution *plan, xdi_redistribution_exchange *x,
                                     const int64_t *from_stride, const int64_t *to_stride) {
    xdi_redistribution_holders holders;
    if (!xdi_redistribution_holders_create(plan->ctx, x, &holders)) return false;
    xd_layout_region(x->from, plan->desc.rank, &x->src);
    xdi_redistribution_wanted(plan, x, plan->desc.rank, &x->dst, &x->zero);
    const bool room = xdi_redistribution_allocate(plan, x, &holders);
    if (room) xdi_redistribution_assign(plan, x, &holders);
    xd_release(plan->ctx, holders.rank);
    if (!room) return false;
    for (int r = 0; r < plan->desc.ranks; r++) {
        x->send_displacements[r] = x->send_count;
        x->recv_displacements[r] = x->recv_count;
        xdi_redistribution_count(&x->send_count, x->send_counts[r]);
        xdi_redistribution_count(&x->recv_count, x->recv_counts[r]);
    }
    xdi_redistribution_list(plan, x, from_stride, to_stride);
    if (x->copies.end)
        x->copies.list = (xd_copy *)xd_allocate(plan->ctx, (size_t)x->copies.end * sizeof *x->copies.list);
    if (x->copies.end && !x->copies.list) return false;
    if (x->copies.list) xdi_redistribution_list(plan, x, from_stride, to_stride);
    return true;
}

/* Checks the placements of the two layouts on each mesh axis, and decides which axes are reduced. */
static xd_result xdi_redistribution_match(xd_ctx *ctx, const xd_layout *from, const xd_layout *to,
                                          xdi_redistribution_exchange *x) {
    const xd_layout_desc *f = xd_layout_settings(from), *t = xd_layout_settings(to);
    const bool same = xdi_topology_equal(f->topology, t->topology);
    const unsigned partial = xdi_redistribution_axes(from, XD_PARTIAL);
    memset(x, 0, sizeof *x);
    x->from = from;
    x->to = to;
    for (int i = 0; i < t->topology->axis_count; i++) {
        if (t->placement[i].kind != XD_PARTIAL) continue;
        XD_REQUIRE(ctx, same, XD_ERROR_UNSUPPORTED,
                   "axis %d of the destination is partial, but the source is on another mesh", i);
        XD_REQUIRE(ctx, f->placement[i].kind != XD_SHARD, XD_ERROR_UNSUPPORTED,
                   "axis %d: a shard cannot become partial; replicate it first", i);
        XD_REQUIRE(ctx, f->placement[i].kind != XD_PARTIAL || f->placement[i].op == t->placement[i].op,
                   XD_ERROR_UNSUPPORTED,
                   "axis %d: partial by operation %d cannot become partial by operation %d", i,
                   (int)f->placement[i].op, (int)t->placement[i].op);
        if (f->placement[i].kind == XD_PARTIAL) x->kept |= 1u << i;
        /* Averages and extrema of equal values are the value: only a sum needs zeros on the other ranks. */
        if (f->placement[i].kind == XD_REPLICATE && t->placement[i].op == XD_SUM) x->added |= 1u << i;
    }
    x->reduced = partial & ~x->kept;
    for (int i = 0; i < f->topology->axis_count; i++)
        if (partial >> i & 1u) x->op = f->placement[i].op;
    return XD_OK;
}

static xd_result xdi_redistribution_validate(xd_ctx *ctx, const xdi_redistribution_desc *d,
                                             xdi_redistribution_exchange *x) {
    const xd_layout_desc *side[2];
    XD_REQUIRE(ctx, d->from && d->to, XD_ERROR_ARGUMENT, "a plan needs two layouts");
    XD_REQUIRE(ctx, xd_dtype_size(d->dtype), XD_ERROR_ARGUMENT, "%d is no dtype", (int)d->dtype);
    XD_REQUIRE(ctx, d->rank >= 0 && d->rank < d->ranks, XD_ERROR_ARGUMENT, "rank %d of %d ranks", d->rank,
               d->ranks);
    side[0] = xd_layout_settings(d->from);
    side[1] = xd_layout_settings(d->to);
    XD_REQUIRE(ctx, side[0]->ndim == side[1]->ndim, XD_ERROR_SHAPE,
               "the source has %d dimensions, the destination %d", side[0]->ndim, side[1]->ndim);
    for (int i = 0; i < side[0]->ndim; i++)
        XD_REQUIRE(ctx, side[0]->shape[i] == side[1]->shape[i], XD_ERROR_SHAPE,
                   "dimension %d: the source has extent %lld, the destination %lld", i,
                   (long long)side[0]->shape[i], (long long)side[1]->shape[i]);
    XD_REQUIRE(ctx, xdi_layout_numel(d->from) <= INT64_MAX / (int64_t)xd_dtype_size(d->dtype), XD_ERROR_SHAPE,
               "a tensor of %lld elements of %s has more than 2^63 bytes",
               (long long)xdi_layout_numel(d->from), xd_dtype_name(d->dtype));
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < side[s]->topology->rank_count; i++) {
            const int rank = side[s]->topology->ranks ? side[s]->topology->ranks[i] : i;
            XD_REQUIRE(ctx, rank < d->ranks, XD_ERROR_TOPOLOGY,
                       "the %s lies on rank %d, the world has %d ranks", s ? "destination" : "source", rank,
                       d->ranks);
        }
    XD_TRY(xdi_redistribution_match(ctx, d->from, d->to, x));
    if (!x->reduced) return XD_OK;
    XD_REQUIRE(ctx, xd_reduce_supports(d->dtype, x->op), XD_ERROR_DTYPE,
               "%s cannot be reduced by operation %d", xd_dtype_name(d->dtype), (int)x->op);
    XD_REQUIRE(ctx,
               xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT || !xd_dtype_is_floating(d->dtype) ||
                   x->op == XD_MAX || x->op == XD_MIN,
               XD_ERROR_UNSUPPORTED,
               "a partial %s sum has no leaves, so it cannot be reduced in INVARIANT mode",
               xd_dtype_name(d->dtype));
    return XD_OK;
}

/* The source layout, but the axes to be reduced split a dimension instead, after all other splits: the one that then
 * has the largest blocks. */
static xd_result xdi_redistribution_middle(xd_ctx *ctx, const xdi_redistribution_exchange *x,
                                           xd_layout **middle) {
    xd_layout_desc d = *xd_layout_settings(x->from);
    const int axes = d.topology->axis_count;
    int64_t extent[XD_DIMS_MAX];
    int best = 0, count = 0, order[XD_MESH_AXES_MAX] = { 0 };
    memcpy(extent, d.shape, sizeof extent);
    for (int i = 0; i < axes; i++)
        if (d.placement[i].kind == XD_SHARD) extent[d.placement[i].dim] /= d.topology->size[i];
    for (int i = 1; i < d.ndim; i++)
        if (extent[i] > extent[best]) best = i;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < axes; i++)
            if ((int)(x->reduced >> d.order[i] & 1u) == pass) order[count++] = d.order[i];
    memcpy(d.order, order, sizeof order);
    for (int i = 0; i < axes; i++) {
        if (!(x->reduced >> i & 1u)) continue;
        memset(&d.placement[i], 0, sizeof d.placement[i]);
        d.placement[i].kind = XD_SHARD;
        d.placement[i].dim = best;
    }
    return xd_layout_create(ctx, &d, middle);
}

static void xdi_redistribution_exchange_release(xd_ctx *ctx, xdi_redistribution_exchange *x) {
    xd_release(ctx, x->send_counts);
    xd_release(ctx, x->source);
    xd_release(ctx, x->pointers);
    xd_release(ctx, x->copies.list);
    x->send_counts = NULL;
    x->source = NULL;
    x->pointers = NULL;
    x->copies.list = NULL;
}

XD_PRIVATE void xdi_redistribution_destroy(xdi_redistribution *plan) {
    if (!plan) return;
    for (int i = 0; i < 2; i++) xdi_redistribution_exchange_release(plan->ctx, &plan->step[i]);
    xd_layout_destroy(plan->middle);
    const xd_device_ops *memory = &xd_ctx_kernels(plan->ctx)->memory;
    memory->release(plan->ctx, plan->middle_data);
    memory->release(plan->ctx, plan->send);
    memory->release(plan->ctx, plan->recv);
    memory->release(plan->ctx, plan->zero);
    xd_release(plan->ctx, plan);
}

/* Reduce into parts, then gather them: used when that moves fewer elements than the single step that is already
 * built. */
static xd_result xdi_redistribution_try_two_steps(xdi_redistribution *plan) {
    xdi_redistribution two = *plan;
    xdi_redistribution_exchange *x = two.step;
    xd_ctx *ctx = plan->ctx;
    if (!plan->step[0].reduced || plan->desc.window || xd_layout_settings(plan->desc.from)->ndim == 0)
        return XD_OK;
    XD_TRY(xdi_redistribution_middle(ctx, &plan->step[0], &two.middle));
    xd_result result = xdi_redistribution_match(ctx, plan->desc.from, two.middle, &x[0]);
    if (result == XD_OK) result = xdi_redistribution_match(ctx, two.middle, plan->desc.to, &x[1]);
    const bool room = result == XD_OK &&
                      xdi_redistribution_build(&two, &x[0], plan->desc.from_stride, NULL) &&
                      xdi_redistribution_build(&two, &x[1], NULL, plan->desc.to_stride);
    if (room && x[0].total_count < plan->step[0].total_count - x[1].total_count) {
        xdi_redistribution_exchange_release(ctx, &plan->step[0]);
        two.step_count = 2;
        *plan = two;
        return XD_OK;
    }
    for (int i = 0; i < 2; i++) xdi_redistribution_exchange_release(ctx, &x[i]);
    xd_layout_destroy(two.middle);
    XD_TRY(result);
    XD_REQUIRE(ctx, room, XD_ERROR_MEMORY, "no room for a plan over %d ranks", plan->desc.ranks);
    return XD_OK;
}

static bool xdi_redistribution_take_buffers(xdi_redistribution *plan) {
    const size_t size = xd_dtype_size(plan->desc.dtype);
    size_t send_bytes, recv_bytes;
    int64_t send = 0, recv = 0;
    for (int i = 0; i < plan->step_count; i++) {
        const xdi_redistribution_step s = xdi_redistribution_step_at(plan, i);
        if (s.send_count > send) send = s.send_count;
        if (s.recv_capacity > recv) recv = s.recv_capacity;
    }
    const xd_device_ops *memory = &xd_ctx_kernels(plan->ctx)->memory;
    const xd_launch launch = xd_ctx_launch(plan->ctx);
    if (!xdi_size_multiply((size_t)send, size, &send_bytes) ||
        !xdi_size_multiply((size_t)recv, size, &recv_bytes))
        return false;
    plan->send = xdi_device_allocate(plan->ctx, send_bytes);
    plan->recv = xdi_device_allocate(plan->ctx, recv_bytes);
    plan->zero = memory->allocate(plan->ctx, sizeof(uint64_t));
    if (plan->zero && memory->fill(&launch, plan->zero, 0, sizeof(uint64_t)) != XD_OK) return false;
    if (plan->middle)
        plan->middle_data =
            memory->allocate(plan->ctx, xdi_tensor_bytes(plan->middle, plan->desc.rank, plan->desc.dtype));
    return plan->send && plan->recv && plan->zero && (!plan->middle || plan->middle_data);
}

XD_PRIVATE xd_result xdi_redistribution_create(xd_ctx *ctx, const xdi_redistribution_desc *desc,
                                               xdi_redistribution **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN(ctx, desc->from, desc->to);
    xdi_redistribution_exchange x;
    XD_TRY(xdi_redistribution_validate(ctx, desc, &x));
    xdi_redistribution *plan = (xdi_redistribution *)xd_allocate(ctx, sizeof *plan);
    XD_REQUIRE(ctx, plan, XD_ERROR_MEMORY, "no room for a plan over %d ranks", desc->ranks);
    plan->ctx = ctx;
    plan->desc = *desc;
    plan->step_count = 1;
    plan->step[0] = x;
    const size_t strides = (size_t)xd_layout_settings(desc->from)->ndim * sizeof(int64_t);
    if (desc->window) {
        plan->window = *desc->window;
        plan->desc.window = &plan->window;
    }
    if (desc->from_stride)
        plan->desc.from_stride = (int64_t *)memcpy(plan->stride[0], desc->from_stride, strides);
    if (desc->to_stride) plan->desc.to_stride = (int64_t *)memcpy(plan->stride[1], desc->to_stride, strides);
    xd_result result = XD_OK;
    bool room = xdi_redistribution_build(plan, &plan->step[0], plan->desc.from_stride, plan->desc.to_stride);
    if (room) result = xdi_redistribution_try_two_steps(plan);
    room = room && result == XD_OK && xdi_redistribution_take_buffers(plan);
    if (!room) {
        xdi_redistribution_destroy(plan);
        return result != XD_OK
                   ? result
                   : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a plan over %d ranks", desc->ranks);
    }
    *out = plan;
    return XD_OK;
}

XD_PRIVATE int xdi_redistribution_step_count(const xdi_redistribution *plan) {
    XD_ASSERT(plan);
    return plan->step_count;
}

static bool xdi_redistribution_has(const xdi_redistribution *plan, int step) {
    return step >= 0 && step < plan->step_count;
}

static xd_result xdi_redistribution_check_step(const xdi_redistribution *plan, int step) {
    XD_REQUIRE(plan->ctx, xdi_redistribution_has(plan, step), XD_ERROR_ARGUMENT, "step %d of %d", step,
               plan->step_count);
    return XD_OK;
}

XD_PRIVATE xdi_redistribution_step xdi_redistribution_step_at(const xdi_redistribution *plan, int step) {
    XD_ASSERT(plan);
    xdi_redistribution_step s;
    memset(&s, 0, sizeof s);
    if (!xdi_redistribution_has(plan, step)) return s;
    const xdi_redistribution_exchange *x = &plan->step[step];
    s.send_counts = x->send_counts;
    s.send_displacements = x->send_displacements;
    s.recv_counts = x->recv_counts;
    s.recv_displacements = x->recv_displacements;
    s.send_count = x->send_count;
    s.recv_count = x->recv_count;
    s.reduces = x->pieces > 1;
    s.recv_capacity = x->recv_count;
    if (s.reduces) xdi_redistribution_count(&s.recv_capacity, x->kept_count);
    s.copy_count = x->copies.end;
    s.total_count = x->total_count;
    return s;
}

XD_PRIVATE uint64_t xdi_redistribution_bytes_sent(const xdi_redistribution *plan) {
    XD_ASSERT(plan);
    int64_t count = 0;
    for (int i = 0; i < plan->step_count; i++) count += plan->step[i].send_count;
    return (uint64_t)count * xd_dtype_size(plan->desc.dtype);
}

XD_PRIVATE void xdi_redistribution_shape(const xdi_redistribution *plan, int64_t *shape) {
    XD_ASSERT(plan);
    xdi_region_shape(&plan->step[plan->step_count - 1].dst, shape);
}

XD_PRIVATE xd_result xdi_redistribution_agree(const xdi_redistribution *plan, xd_comm *world,
                                              xd_result mine) {
    XDI_GIVEN(plan ? plan->ctx : NULL, world);
    uint64_t window = 0;
    xdi_facts facts;
    XD_TRY(xd_agree(world, mine));
    xdi_facts_begin(&facts);
    xdi_fact_dtype(&facts, "dtype", plan->desc.dtype);
    xdi_fact_integer(&facts, "ranks", plan->desc.ranks);
    facts.part = "from";
    xdi_facts_layout(&facts, plan->desc.from);
    facts.part = "to";
    xdi_facts_layout(&facts, plan->desc.to);
    facts.part = NULL;
    for (int i = 0; plan->desc.window && i < plan->window.ndim; i++)
        window =
            xd_hash(window, plan->window.interval[i], (size_t)plan->window.count[i] * sizeof(xd_interval));
    xdi_fact_hash(&facts, "window", window);
    return xdi_agree_facts(world, &facts, "redistribution");
}

/* Copies [begin, end) of an exchange, by the context's kernels. */
static xd_result xdi_redistribution_copy(const xdi_redistribution *plan, const xdi_redistribution_exchange *x,
                                         int64_t begin, int64_t end, const void *src, void *dst) {
    const xd_launch launch = xd_ctx_launch(plan->ctx);
    if (begin == end) return XD_OK;
    return xd_ctx_kernels(plan->ctx)->copies(&launch, x->copies.list + begin, end - begin, src, dst,
                                             xd_dtype_size(plan->desc.dtype));
}

XD_PRIVATE xd_result xdi_redistribution_pack(const xdi_redistribution *plan, int step, const void *source,
                                             void *send) {
    XD_TRY(xdi_redistribution_check_step(plan, step));
    const xdi_redistribution_exchange *x = &plan->step[step];
    return xdi_redistribution_copy(plan, x, 0, x->copies.pack_end, step ? plan->middle_data : source, send);
}

/* Reduces the terms of every cell into the first of them. */
static xd_result xdi_redistribution_reduce(const xdi_redistribution *plan,
                                           const xdi_redistribution_exchange *x, void *recv) {
    const size_t size = xd_dtype_size(plan->desc.dtype);
    for (int cell = 0; cell < x->cells; cell++) {
        const int *source = x->source + cell * x->pieces;
        int64_t count = 0;
        if (source[0] < 0) continue;
        for (int piece = 0; piece < x->pieces; piece++) {
            const bool own = source[piece] == plan->desc.rank;
            const int64_t at = own ? x->recv_count : x->recv_displacements[source[piece]];
            count = own ? x->kept_count : x->recv_counts[source[piece]];
            x->pointers[piece] = (char *)recv + (size_t)at * size;
        }
        XD_TRY(xd_reduce_pieces(plan->ctx, x->pointers[0], (const void *const *)x->pointers, x->pieces, count,
                                plan->desc.dtype, x->op));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_redistribution_unpack(const xdi_redistribution *plan, int step, const void *source,
                                               void *recv, void *destination) {
    XD_TRY(xdi_redistribution_check_step(plan, step));
    const xdi_redistribution_exchange *x = &plan->step[step];
    const size_t size = xd_dtype_size(plan->desc.dtype);
    const void *src = step ? plan->middle_data : source;
    void *dst = step + 1 < plan->step_count ? plan->middle_data : destination;
    if (x->zero) {
        /* One element, read repeatedly with strides of 0: all bits zero is zero in every dtype. */
        const int64_t none[XD_DIMS_MAX] = { 0 };
        const xd_launch launch = xd_ctx_launch(plan->ctx);
        xd_copy copy;
        if (!xdi_region_copies(&x->dst, none, &x->dst, plan->desc.to_stride, &copy, 1)) return XD_OK;
        return xd_ctx_kernels(plan->ctx)->copies(&launch, &copy, 1, plan->zero, dst, size);
    }
    XD_TRY(xdi_redistribution_copy(plan, x, x->copies.pack_end, x->copies.local_end, src,
                                   x->pieces > 1 ? recv : dst));
    if (x->pieces > 1) XD_TRY(xdi_redistribution_reduce(plan, x, recv));
    return xdi_redistribution_copy(plan, x, x->copies.local_end, x->copies.end, recv, dst);
}

XD_PRIVATE xd_result xdi_redistribution_execute(xdi_redistribution *plan, xd_comm *world, const void *source,
                                                void *destination) {
    XDI_GIVEN_TO_ALL(plan ? plan->ctx : NULL, world, plan, world);
    for (int i = 0; i < plan->step_count; i++) {
        const xdi_redistribution_exchange *x = &plan->step[i];
        xd_collective c;
        memset(&c, 0, sizeof c);
        c.kind = XD_COLLECTIVE_ALL_TO_ALL;
        c.send = plan->send;
        c.recv = plan->recv;
        c.send_counts = x->send_counts;
        c.send_displacements = x->send_displacements;
        c.recv_counts = x->recv_counts;
        c.recv_displacements = x->recv_displacements;
        c.dtype = plan->desc.dtype;
        XD_TRY(xdi_redistribution_pack(plan, i, source, plan->send));
        if (x->total_count) XD_TRY(xd_collective_run(world, &c));
        XD_TRY(xdi_redistribution_unpack(plan, i, source, plan->recv, destination));
    }
    return XD_OK;
}

static xd_result xdi_redistribution_run(xd_comm *world, const xdi_redistribution_desc *desc, xd_result mine,
                                        const void *source, void *destination) {
    xdi_redistribution *plan = NULL;
    if (mine == XD_OK) mine = xdi_redistribution_create(xd_comm_ctx(world), desc, &plan);
    mine = xdi_redistribution_agree(plan, world, mine);
    if (mine == XD_OK) mine = xdi_redistribution_execute(plan, world, source, destination);
    xdi_redistribution_destroy(plan);
    return mine;
}

/* A view must have the extents that its layout gives this rank, and memory unless they are empty. */
static xd_result xdi_tensor_check(xd_comm *world, const xd_tensor *tensor, const char *which) {
    xd_ctx *ctx = xd_comm_ctx(world);
    XD_REQUIRE(ctx, tensor->layout, XD_ERROR_ARGUMENT, "the %s has no layout", which);
    const int rank = xd_comm_rank(world);
    xd_region region;
    const bool member = xd_layout_region(tensor->layout, rank, &region);
    XD_REQUIRE(ctx, tensor->ndim == region.ndim, XD_ERROR_SHAPE, "the %s has %d dimensions, its layout %d",
               which, tensor->ndim, region.ndim);
    XD_TRY(xdi_shape_check_rest(ctx, which, tensor->ndim, tensor->shape));
    for (int i = 0; i < region.ndim; i++) {
        const int64_t extent = xdi_intervals_extent(region.interval[i], region.count[i]);
        XD_REQUIRE(ctx, tensor->shape[i] == extent, XD_ERROR_SHAPE,
                   "dimension %d of the %s has extent %lld, its layout gives rank %d %lld", i, which,
                   (long long)tensor->shape[i], rank, (long long)extent);
    }
    XD_REQUIRE(ctx, tensor->data || !member || xdi_region_numel(&region) == 0, XD_ERROR_ARGUMENT,
               "the %s has no data", which);
    return XD_OK;
}

XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to) {
    XDI_GIVEN_COMM(world, from, to);
    xd_ctx *ctx = xd_comm_ctx(world);
    xdi_redistribution_desc d;
    memset(&d, 0, sizeof d);
    d.from = from->layout;
    d.to = to->layout;
    d.dtype = from->dtype;
    d.ranks = xd_comm_size(world);
    d.rank = xd_comm_rank(world);
    d.from_stride = from->stride;
    d.to_stride = to->stride;
    xd_result result = xdi_tensor_check(world, from, "source");
    if (result == XD_OK) result = xdi_tensor_check(world, to, "destination");
    if (result == XD_OK && from->dtype != to->dtype)
        result = XD_FAIL(ctx, XD_ERROR_DTYPE, "the source is %s, the destination %s",
                         xd_dtype_name(from->dtype), xd_dtype_name(to->dtype));
    return xdi_redistribution_run(world, &d, result, from->data, to->data);
}

/* Moves a tensor, or a window of it, into a dense part under a layout that is destroyed here. */
static xd_result xdi_tensor_move(xd_comm *world, const xd_tensor *tensor, xd_layout *to,
                                 const xd_region *window, xd_result result, void *out) {
    xdi_redistribution_desc d;
    memset(&d, 0, sizeof d);
    d.from = tensor->layout;
    d.to = to;
    d.dtype = tensor->dtype;
    d.ranks = xd_comm_size(world);
    d.rank = xd_comm_rank(world);
    d.window = window;
    d.from_stride = tensor->stride;
    result = xdi_redistribution_run(world, &d, result, tensor->data, out);
    xd_layout_destroy(to);
    return result;
}

static xd_result xdi_tensor_window(xd_ctx *ctx, const xd_tensor *tensor, const xd_interval *window,
                                   xd_region *region) {
    const xd_layout_desc *d = xd_layout_settings(tensor->layout);
    *region = xdi_region_whole(d->ndim, d->shape);
    for (int i = 0; window && i < d->ndim; i++) {
        const xd_interval w = window[i];
        XD_REQUIRE(ctx, w.begin >= 0 && w.begin <= w.end && w.end <= d->shape[i], XD_ERROR_ARGUMENT,
                   "window [%lld, %lld) of dimension %d, whose extent is %lld", (long long)w.begin,
                   (long long)w.end, i, (long long)d->shape[i]);
        region->count[i] = w.begin < w.end;
        region->interval[i][0] = w;
    }
    return XD_OK;
}

XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const xd_interval *window,
                                  int root, void *out) {
    XDI_GIVEN_COMM(world, tensor);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_layout *to = NULL;
    xd_region region;
    xd_result result = xdi_tensor_check(world, tensor, "source");
    if (result == XD_OK) result = xdi_tensor_window(ctx, tensor, window, &region);
    if (result == XD_OK)
        result = root == -1 ? xdi_layout_replicated(ctx, tensor->layout, &to)
                            : xdi_layout_on_rank(ctx, tensor->layout, root, &to);
    return xdi_tensor_move(world, tensor, to, window ? &region : NULL, result, out);
}
