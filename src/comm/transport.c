/* What transports that send messages between pairs of ranks have in common. */

#include "comm/internal.h"
#include "comm/transport.h"

#include <string.h>

XD_API void xd_control_assume(const xd_control *mine, const xd_collective *next, int ranks, xd_control *all) {
    for (int r = 0; r < ranks; r++) {
        all[r] = *mine;
        all[r].layout = 0; /* those of an all_to_all add up to zero */
        if (!next || !next->known_leaves) continue;
        all[r].extra = (uint64_t)next->known_leaves[r].first;
        all[r].leaves = (uint64_t)next->known_leaves[r].count;
    }
}

XD_API int64_t xd_control_leaves(const xd_control *all, const xd_collective *collective, int ranks,
                                 xd_leaves *out) {
    int64_t nodes = 0;
    memset(out, 0, (size_t)ranks * sizeof *out);
    for (int r = 0; r < ranks; r++) {
        if (collective->known_leaves) {
            out[r] = collective->known_leaves[r];
        } else if (collective->leaves.total) { /* else the records may be those of an earlier call */
            out[r].first = (int64_t)all[r].extra;
            out[r].count = (int64_t)all[r].leaves;
            out[r].total = collective->leaves.total;
        }
        nodes += xdi_comm_nodes(&out[r]);
    }
    return nodes;
}

XD_API int64_t xd_collective_blocks(const xd_collective *collective, int ranks, bool whole, int64_t *begins,
                                    int64_t *counts) {
    if (collective->kind == XD_COLLECTIVE_REDUCE_SCATTER) {
        int64_t end = 0;
        for (int r = 0; r < ranks; end += counts[r++]) {
            begins[r] = collective->send_displacements ? collective->send_displacements[r] : end;
            counts[r] = collective->send_counts[r];
        }
        return end;
    }
    for (int r = 0; r < ranks; r++) {
        int64_t begin = 0, end = collective->count;
        if (!whole) xdi_comm_piece(collective->count, ranks, r, &begin, &end);
        begins[r] = begin;
        counts[r] = end - begin;
    }
    return collective->count;
}

/* ---- messages ---- */

/* A collective on its way into messages of one rank. */
typedef struct xdi_transport_pass {
    const xd_collective *c;
    const xd_message_sink *sink;
    void *user;
    size_t size;
} xdi_transport_pass;

static void xdi_transport_put(const xdi_transport_pass *p, int peer, int64_t begin, int64_t count) {
    if (count > 0)
        p->sink->put(p->user, peer, (const char *)p->c->send + (size_t)begin * p->size,
                     (size_t)count * p->size);
}

static void xdi_transport_get(const xdi_transport_pass *p, int peer, int64_t begin, int64_t count) {
    if (count > 0)
        p->sink->get(p->user, peer, (char *)p->c->recv + (size_t)begin * p->size, (size_t)count * p->size);
}

/* First element of the next block: its displacement, or the end of the last one. */
static int64_t xdi_transport_place(const int64_t *displacements, int rank, int64_t count, int64_t *end) {
    const int64_t begin = displacements ? displacements[rank] : *end;
    *end += count;
    return begin;
}

XD_API void xd_collective_messages(const xd_collective *collective, int rank, int ranks,
                                   const xd_message_sink *sink, void *user) {
    const xd_collective *c = collective;
    const xdi_transport_pass pass = { c, sink, user, xd_dtype_size(c->dtype) };
    const bool to_all = c->kind == XD_COLLECTIVE_ALL_TO_ALL, gather = c->kind == XD_COLLECTIVE_GATHER;
    const bool all_gather = c->kind == XD_COLLECTIVE_ALL_GATHER, scatter = c->kind == XD_COLLECTIVE_SCATTER;
    const bool broadcast = c->kind == XD_COLLECTIVE_BROADCAST, root = c->root == rank;
    int64_t sent = 0, received = 0;
    for (int r = 0; r < ranks; r++) {
        const bool is_root = r == c->root;
        if (to_all || scatter) {
            const int64_t begin = xdi_transport_place(c->send_displacements, r, c->send_counts[r], &sent);
            if (to_all || root) xdi_transport_put(&pass, r, begin, c->send_counts[r]);
        }
        if (to_all || all_gather || gather) {
            const int64_t begin = xdi_transport_place(c->recv_displacements, r, c->recv_counts[r], &received);
            if (!gather || root) xdi_transport_get(&pass, r, begin, c->recv_counts[r]);
        }
        if (all_gather || (gather && is_root)) xdi_transport_put(&pass, r, 0, c->recv_counts[rank]);
        if (scatter && is_root) xdi_transport_get(&pass, r, 0, c->send_counts[rank]);
        if (broadcast && root && r != rank) xdi_transport_put(&pass, r, 0, c->count);
        if (broadcast && is_root && !root) xdi_transport_get(&pass, r, 0, c->count);
    }
}
