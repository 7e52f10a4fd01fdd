/* Halos: messages and copies of one rank. What two ranks exchange, both list in the same order. */

#include "tensor/halo_internal.h"

#include <string.h>

/* What a message is made for. */
typedef struct xdi_halo_message {
    const xdi_halo_part *taker, *owner; /* one of them is this rank */
    const xd_interval *listed;          /* indices of the taker's part with halo */
    int peer;
    bool outgoing;
    xdi_halo_lane *lane;
    xdi_halo_list list; /* XDI_HALO_LISTS: the message is added up */
} xdi_halo_message;

/* ---- where a box lies ---- */

static int64_t xdi_halo_extent(const xdi_halo_scene *s, const xdi_halo_box *box, int64_t *extent) {
    int64_t numel = 1;
    for (int d = 0; d < s->ndim; d++) {
        extent[d] = box->dim[d].count;
        numel *= extent[d];
    }
    return numel;
}

/* In the part of its owner, whose indices may go down, and in that of its taker. */
static xdi_halo_side xdi_halo_in_part(const xdi_halo_scene *s, const xdi_halo_part *owner,
                                      const xdi_halo_box *box) {
    xdi_halo_side side;
    memset(&side, 0, sizeof side);
    xdi_halo_strides(s->ndim, owner->own, side.stride);
    for (int d = 0; d < s->ndim; d++) {
        side.offset += (box->dim[d].from - owner->own[d].begin) * side.stride[d];
        side.stride[d] *= box->dim[d].step;
    }
    return side;
}

static xdi_halo_side xdi_halo_in_wide(const xdi_halo_scene *s, const xdi_halo_part *taker,
                                      const xdi_halo_box *box) {
    xdi_halo_side side;
    memset(&side, 0, sizeof side);
    xdi_halo_strides(s->ndim, taker->wide, side.stride);
    for (int d = 0; d < s->ndim; d++) side.offset += box->dim[d].at * side.stride[d];
    return side;
}

static xdi_halo_side xdi_halo_in_message(const xdi_halo_scene *s, const int64_t *extent, int64_t offset) {
    xdi_halo_side side;
    memset(&side, 0, sizeof side);
    side.offset = offset;
    xdi_halo_dense(s->ndim, extent, side.stride);
    return side;
}

/* ---- terms ---- */

/* A box that is added to this rank's part; `from` is where its first position lies. Order: zones, the first dimension's slowest. */
static void xdi_halo_block_add(xdi_halo_making *m, const xdi_halo_box *box, const xdi_halo_side *from,
                               int rank, bool received) {
    const xdi_halo_scene *s = m->scene;
    const int sequence = m->block_count++;
    if (!m->blocks) return;
    xdi_halo_block *block = &m->blocks[sequence];
    memset(block, 0, sizeof *block);
    block->offset = from->offset;
    block->rank = rank;
    block->sequence = sequence;
    block->received = received;
    for (int d = 0; d < s->ndim; d++) {
        const xdi_halo_stretch *t = &box->dim[d];
        const int64_t first = t->from - s->part[s->rank].own[d].begin;
        block->zone = block->zone * XDI_HALO_ZONES + t->zone;
        block->lo[d] = t->step > 0 ? first : first - t->count + 1;
        block->hi[d] = block->lo[d] + t->count;
        block->stride[d] = from->stride[d] * t->step;
        if (t->step < 0) block->offset += from->stride[d] * (t->count - 1);
    }
}

/* ---- messages ---- */

/* One message of a lane. It is direct as long as it is one run that lies where its rank needs it. */
static void xdi_halo_message_make(xdi_halo_making *m, const xdi_halo_message *message) {
    const xdi_halo_scene *s = m->scene;
    xdi_halo_lane *lane = message->lane;
    xdi_halo_walk walk;
    xdi_halo_box box;
    const int64_t begin = lane->total;
    int64_t place = begin;
    xdi_halo_walk_begin(&walk, s, message->taker, message->listed, message->owner);
    for (int boxes = 0; xdi_halo_walk_next(&walk, &box); boxes++) {
        int64_t extent[XD_DIMS_MAX];
        const int64_t numel = xdi_halo_extent(s, &box, extent);
        const xdi_halo_side dense = xdi_halo_in_message(s, extent, lane->total);
        const bool in_part = message->owner == &s->part[s->rank];
        const xdi_halo_side near =
            in_part ? xdi_halo_in_part(s, message->owner, &box) : xdi_halo_in_wide(s, message->taker, &box);
        const xd_copy copy = xdi_halo_copy_of(s->ndim, extent, &near, &dense);
        const bool run = copy.ndim == 1 && copy.src_stride[0] == 1 && copy.dst_stride[0] == 1;
        lane->total += numel;
        if (message->list == XDI_HALO_LISTS)
            xdi_halo_block_add(m, &box, &dense, message->peer, true);
        else if (m->decided && lane->direct)
            place = near.offset;
        else
            xdi_halo_copy(m->plan, message->list, s->ndim, extent, message->outgoing ? &near : &dense,
                          message->outgoing ? &dense : &near);
        if (!m->decided && (boxes > 0 || !run)) lane->direct = false;
    }
    if (!lane->counts) return;
    lane->counts[message->peer] = lane->total - begin;
    lane->displacements[message->peer] = place;
}

/* All messages of one lane. */
static void xdi_halo_lane_make(xdi_halo_making *m, int lane, xdi_halo_list list) {
    const xdi_halo_scene *s = m->scene;
    const xdi_halo_part *me = &s->part[s->rank];
    const bool back = lane == XDI_HALO_BACK_SEND || lane == XDI_HALO_BACK_RECV;
    const bool outgoing = lane == XDI_HALO_SEND || lane == XDI_HALO_BACK_SEND;
    m->plan->lane[lane].total = 0;
    for (int r = 0; r < s->ranks && me->takes_part; r++) {
        const xdi_halo_part *other = &s->part[r];
        xdi_halo_message message;
        if (r == s->rank || !other->takes_part) continue;
        memset(&message, 0, sizeof message);
        message.taker = outgoing == back ? me : other;
        message.owner = outgoing == back ? other : me;
        message.listed = back ? message.taker->back : message.taker->wide;
        message.peer = r;
        message.outgoing = outgoing;
        message.lane = &m->plan->lane[lane];
        message.list = list;
        xdi_halo_message_make(m, &message);
    }
}

/* Which lanes are direct: the forward's, and what the backward sends. Messages that repeat elements of a small part are not,
 * because they would be longer than the memory they are in. */
static void xdi_halo_decide(xdi_halo_making *m) {
    static const xdi_halo_list packed[XDI_HALO_LANES] = { XDI_HALO_PACK, XDI_HALO_UNPACK, XDI_HALO_BACK_PACK,
                                                          XDI_HALO_LISTS };
    const xdi_halo_scene *s = m->scene;
    xdi_halo_lane *lane = m->plan->lane;
    int64_t numel = 1;
    for (int d = 0; d < s->ndim; d++) numel *= xdi_halo_length(s->part[s->rank].own[d]);
    if (lane[XDI_HALO_SEND].total > numel) lane[XDI_HALO_SEND].direct = false;
    lane[XDI_HALO_BACK_RECV].direct = false;
    for (int i = 0; i < XDI_HALO_LANES; i++)
        if (lane[i].direct && packed[i] != XDI_HALO_LISTS) m->plan->copy_count[packed[i]] = 0;
    m->decided = true;
}

/* ---- this rank alone ---- */

static void xdi_halo_make_local(xdi_halo_making *m) {
    const xdi_halo_scene *s = m->scene;
    const xdi_halo_part *me = &s->part[s->rank];
    int64_t extent[XD_DIMS_MAX];
    xdi_halo_walk walk;
    xdi_halo_box box;
    xdi_halo_side nothing;
    memset(&nothing, 0, sizeof nothing);
    if (!me->takes_part) return;
    xdi_halo_walk_begin(&walk, s, me, me->wide, me);
    while (xdi_halo_walk_next(&walk, &box)) {
        const xdi_halo_side src = xdi_halo_in_part(s, me, &box), dst = xdi_halo_in_wide(s, me, &box);
        xdi_halo_extent(s, &box, extent);
        xdi_halo_copy(m->plan, XDI_HALO_LOCAL, s->ndim, extent, &src, &dst);
    }
    xdi_halo_walk_begin(&walk, s, me, me->wide, NULL);
    while (xdi_halo_walk_next(&walk, &box)) {
        const xdi_halo_side dst = xdi_halo_in_wide(s, me, &box);
        xdi_halo_extent(s, &box, extent);
        xdi_halo_copy(m->plan, XDI_HALO_ZEROS, s->ndim, extent, &nothing, &dst);
    }
    xdi_halo_walk_begin(&walk, s, me, me->back, me);
    while (xdi_halo_walk_next(&walk, &box)) {
        const xdi_halo_side dst = xdi_halo_in_part(s, me, &box), src = xdi_halo_in_wide(s, me, &box);
        bool inside = true;
        for (int d = 0; d < s->ndim; d++) inside = inside && box.dim[d].zone == XDI_HALO_INSIDE;
        xdi_halo_extent(s, &box, extent);
        if (inside)
            xdi_halo_copy(m->plan, XDI_HALO_BACK_OWN, s->ndim, extent, &src, &dst);
        else
            xdi_halo_block_add(m, &box, &src, s->rank, false);
    }
}

XD_PRIVATE void xdi_halo_make(xdi_halo_making *m) {
    const bool first = !m->decided;
    memset(m->plan->copy_count, 0, sizeof m->plan->copy_count);
    m->block_count = 0;
    for (int i = 0; i < XDI_HALO_LANES && first; i++) m->plan->lane[i].direct = true;
    xdi_halo_lane_make(m, XDI_HALO_SEND, XDI_HALO_PACK);
    xdi_halo_lane_make(m, XDI_HALO_RECV, XDI_HALO_UNPACK);
    xdi_halo_lane_make(m, XDI_HALO_BACK_SEND, XDI_HALO_BACK_PACK);
    xdi_halo_lane_make(m, XDI_HALO_BACK_RECV, XDI_HALO_LISTS);
    xdi_halo_make_local(m);
    if (first) xdi_halo_decide(m);
    if (m->blocks) xdi_halo_cells(m);
}
