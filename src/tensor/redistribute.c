#include <string.h>

/* Who holds what of a layout. A cell is one choice of coordinates on the axes that split (or stay partial); inside it,
 * `pieces` coordinates on the axes to be reduced, and `replicas` ranks that hold the same. */
typedef struct xdi_plan_holders {
    int cells, pieces, replicas;
    int *rank; /* [cells][pieces][replicas] */
    int *turn; /* [cells][pieces]: whose turn it is among the replicas */
} xdi_plan_holders;

typedef struct xdi_plan_exchange {
    const xd_layout *from, *to;
    unsigned kept, reduced, added; /* mesh axes: partial on both sides; reduced; newly partial by a sum */
    xd_reduce_op op;
    int cells, pieces;
    int *source; /* [cells][pieces]: the rank that gives me this piece; -1 -> none */
    int64_t *send_counts, *send_displacements, *recv_counts, *recv_displacements;
    int64_t send_count, recv_count, total_count;
    int64_t kept_count; /* elements that reach me from myself */
    bool zero;          /* my part is the zeros beside a newly partial sum */
    xd_region src, dst; /* mine; dst cut to the window */
    bool has_src, has_dst;
    xd_copy *copies; /* pack, then local, then unpack */
    int64_t pack_end, local_end, copy_end;
    void **pointers; /* [pieces] scratch for the reduction */
} xdi_plan_exchange;

struct xd_plan {
    xd_ctx *ctx;
    xd_plan_desc desc;
    xd_region window;
    int64_t stride[2][XD_DIMS_MAX];
    int step_count;
    xdi_plan_exchange step[2];
    xd_layout *middle; /* between two steps */
    void *middle_data, *send, *recv, *own; /* own: my piece of a reduction */
};

static unsigned xdi_plan_axes(const xd_layout *layout, xd_placement_kind kind) {
    const xd_layout_desc *d = xd_layout_settings(layout);
    unsigned mask = 0;
    for (int i = 0; i < d->topology->axis_count; i++)
        if (d->placement[i].kind == kind) mask |= 1u << i;
    return mask;
}

/* Row-major number of the coordinate over the axes in mask; *size is set to how many there are. */
static int xdi_plan_linear(const xd_topology *t, unsigned mask, const int *coordinate, int *size) {
    int linear = 0;
    *size = 1;
    for (int i = 0; i < t->axis_count; i++) {
        if (!(mask >> i & 1u)) continue;
        linear = linear * t->size[i] + coordinate[i];
        *size *= t->size[i];
    }
    return linear;
}

static bool xdi_plan_holders_create(xd_ctx *ctx, const xdi_plan_exchange *x, xdi_plan_holders *h) {
    const xd_topology *t = xd_layout_settings(x->from)->topology;
    const unsigned all = (1u << t->axis_count) - 1u, copies = xdi_plan_axes(x->from, XD_REPLICATE);
    memset(h, 0, sizeof *h);
    h->rank = (int *)xd_allocate(ctx, 2 * (size_t)t->rank_count * sizeof *h->rank);
    if (!h->rank) return false;
    h->turn = h->rank + t->rank_count;
    for (int i = 0; i < t->rank_count; i++) {
        const int rank = t->ranks ? t->ranks[i] : i;
        int coordinate[XD_MESH_AXES_MAX];
        xd_topology_coordinate(t, rank, coordinate);
        const int cell = xdi_plan_linear(t, all & ~copies & ~x->reduced, coordinate, &h->cells);
        const int piece = xdi_plan_linear(t, x->reduced, coordinate, &h->pieces);
        const int replica = xdi_plan_linear(t, copies, coordinate, &h->replicas);
        h->rank[(cell * h->pieces + piece) * h->replicas + replica] = rank;
    }
    return true;
}

/* The rank among the replicas of one piece that gives it to `taker`: itself, else they take turns. */
static int xdi_plan_giver(xdi_plan_holders *h, int cell, int piece, int taker) {
    const int slot = cell * h->pieces + piece;
    const int *ranks = h->rank + slot * h->replicas;
    for (int i = 0; i < h->replicas; i++)
        if (ranks[i] == taker) return taker;
    return ranks[h->turn[slot]++ % h->replicas];
}

/* What a rank is to have of the destination. False when that is nothing that moves. */
static bool xdi_plan_wanted(const xd_plan *plan, const xdi_plan_exchange *x, int rank, xd_region *wanted, bool *zero) {
    const xd_topology *t = xd_layout_settings(x->to)->topology;
    int coordinate[XD_MESH_AXES_MAX], ignored;
    xd_region whole;
    *zero = false;
    if (!xd_layout_region(x->to, rank, &whole)) {
        *wanted = whole;
        return false;
    }
    *wanted = whole;
    if (plan->desc.window) xd_region_intersect(&whole, &plan->window, wanted);
    xd_topology_coordinate(t, rank, coordinate);
    *zero = xdi_plan_linear(t, x->added, coordinate, &ignored) != 0;
    return !*zero && xd_region_numel(wanted) > 0;
}

/* On axes that stay partial a rank takes only from its own coordinate. */
static bool xdi_plan_same_partial(const xdi_plan_exchange *x, int a, int b) {
    const xd_topology *t = xd_layout_settings(x->from)->topology;
    int ca[XD_MESH_AXES_MAX], cb[XD_MESH_AXES_MAX], ignored;
    if (!x->kept) return true;
    xd_topology_coordinate(t, a, ca);
    xd_topology_coordinate(t, b, cb);
    return xdi_plan_linear(t, x->kept, ca, &ignored) == xdi_plan_linear(t, x->kept, cb, &ignored);
}

/* Decides for every rank who gives it what, and notes my part. The whole is walked because replicas take turns. */
static void xdi_plan_assign(const xd_plan *plan, xdi_plan_exchange *x, xdi_plan_holders *h) {
    const xd_topology *t = xd_layout_settings(x->to)->topology;
    const int me = plan->desc.rank;
    for (int i = 0; i < t->rank_count; i++) {
        const int taker = t->ranks ? t->ranks[i] : i;
        xd_region wanted, held, common;
        bool zero;
        if (!xdi_plan_wanted(plan, x, taker, &wanted, &zero)) continue;
        for (int cell = 0; cell < h->cells; cell++) {
            const int first = h->rank[cell * h->pieces * h->replicas];
            xd_layout_region(x->from, first, &held);
            if (!xdi_plan_same_partial(x, first, taker) || !xd_region_intersect(&held, &wanted, &common)) continue;
            const int64_t count = xd_region_numel(&common);
            for (int piece = 0; piece < h->pieces; piece++) {
                const int giver = xdi_plan_giver(h, cell, piece, taker);
                if (taker == me) x->source[cell * h->pieces + piece] = giver;
                if (giver == taker) {
                    if (taker == me) x->kept_count += count;
                    continue;
                }
                x->total_count += count;
                if (giver == me) x->send_counts[taker] = count;
                if (taker == me) x->recv_counts[giver] = count;
            }
        }
    }
}

/* The dense common part of what I hold and what `peer` wants, or the other way round. */
static bool xdi_plan_message(const xd_plan *plan, const xdi_plan_exchange *x, int peer, bool sending, xd_region *message) {
    xd_region other;
    bool zero;
    if (sending) {
        xdi_plan_wanted(plan, x, peer, &other, &zero);
        return xd_region_intersect(&x->src, &other, message);
    }
    xd_layout_region(x->from, peer, &other);
    return xd_region_intersect(&other, &x->dst, message);
}

/* Appends the copies between two regions; with copies NULL it only counts. dense_offset shifts the side that is a staging
 * buffer: 1 the destination, -1 the source, 0 none. */
static void xdi_plan_append(xdi_plan_exchange *x, int64_t *end, int64_t capacity, const xd_region *src,
                            const int64_t *src_stride, const xd_region *dst, const int64_t *dst_stride, int side,
                            int64_t dense_offset) {
    const int64_t begin = *end;
    xd_copy *copies = x->copies ? x->copies + begin : NULL;
    *end += xd_region_copies(src, src_stride, dst, dst_stride, copies, x->copies ? capacity - begin : 0);
    for (int64_t i = begin; x->copies && i < *end; i++) {
        if (side > 0) x->copies[i].dst_offset += dense_offset;
        if (side < 0) x->copies[i].src_offset += dense_offset;
    }
}

/* The three lists of copies, in the order of the ranks. Called twice: to count, and to fill. */
static void xdi_plan_list(const xd_plan *plan, xdi_plan_exchange *x, const int64_t *from_stride, const int64_t *to_stride) {
    const int64_t capacity = x->copy_end;
    int64_t end = 0;
    xd_region message;
    for (int r = 0; r < plan->desc.ranks; r++)
        if (x->send_counts[r] && xdi_plan_message(plan, x, r, true, &message))
            xdi_plan_append(x, &end, capacity, &x->src, from_stride, &message, NULL, 1, x->send_displacements[r]);
    x->pack_end = end;
    if (x->kept_count && x->pieces == 1) xdi_plan_append(x, &end, capacity, &x->src, from_stride, &x->dst, to_stride, 0, 0);
    if (x->kept_count && x->pieces > 1 && xdi_plan_message(plan, x, plan->desc.rank, false, &message))
        xdi_plan_append(x, &end, capacity, &x->src, from_stride, &message, NULL, 0, 0);
    x->local_end = end;
    /* A reduction leaves its result where the first piece was; so only first pieces are unpacked. */
    for (int cell = 0; cell < x->cells; cell++) {
        const int giver = x->source[cell * x->pieces];
        if (giver < 0 || (giver == plan->desc.rank && x->pieces == 1)) continue;
        if (!xdi_plan_message(plan, x, giver, false, &message)) continue;
        const int64_t at = giver == plan->desc.rank ? x->recv_count : x->recv_displacements[giver];
        xdi_plan_append(x, &end, capacity, &message, NULL, &x->dst, to_stride, -1, at);
    }
    x->copy_end = end;
}

static bool xdi_plan_allocate(const xd_plan *plan, xdi_plan_exchange *x, const xdi_plan_holders *h) {
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
static bool xdi_plan_build(const xd_plan *plan, xdi_plan_exchange *x, const int64_t *from_stride,
                           const int64_t *to_stride) {
    xdi_plan_holders holders;
    if (!xdi_plan_holders_create(plan->ctx, x, &holders)) return false;
    x->has_src = xd_layout_region(x->from, plan->desc.rank, &x->src);
    xdi_plan_wanted(plan, x, plan->desc.rank, &x->dst, &x->zero);
    x->has_dst = xd_layout_region(x->to, plan->desc.rank, &holders_unused(x)->region);
    const bool room = xdi_plan_allocate(plan, x, &holders);
    if (room) xdi_plan_assign(plan, x, &holders);
    xd_release(plan->ctx, holders.rank);
    if (!room) return false;
    for (int r = 0; r < plan->desc.ranks; r++) {
        x->send_displacements[r] = x->send_count;
        x->recv_displacements[r] = x->recv_count;
        x->send_count += x->send_counts[r];
        x->recv_count += x->recv_counts[r];
    }
    xdi_plan_list(plan, x, from_stride, to_stride);
    if (x->copy_end) x->copies = (xd_copy *)xd_allocate(plan->ctx, (size_t)x->copy_end * sizeof *x->copies);
    if (x->copy_end && !x->copies) return false;
    if (x->copies) xdi_plan_list(plan, x, from_stride, to_stride);
    return true;
}
