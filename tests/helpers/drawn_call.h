/* A collective that the ranks of a world draw together, for programs that something interrupts: its data does not matter. */
#ifndef DRAWN_CALL_H
#define DRAWN_CALL_H

#include "xdistill.h"

enum { DRAWN_RANKS = 4, DRAWN_COUNT = 40000 };

/* The next number in [0, below). */
static inline int drawn_number(uint64_t *state, int below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int)((*state >> 33) % (uint64_t)below);
}

/* A call on the world or on one of its pairs. */
static inline xd_result drawn_call(uint64_t *state, xd_comm *world, xd_comm *pair) {
    static const int sizes[] = { 1, 60, 3000, DRAWN_COUNT };
    static float send[DRAWN_RANKS * DRAWN_COUNT], recv[DRAWN_RANKS * DRAWN_COUNT];
    xd_comm *comm = drawn_number(state, 3) ? world : pair;
    const int kind = drawn_number(state, 10), root = drawn_number(state, xd_comm_size(comm));
    const int64_t n = sizes[drawn_number(state, 4)], counts[DRAWN_RANKS] = { n, n, n, n };
    const int peer = 1 - xd_comm_rank(pair);
    switch (kind) {
    case 0: return xd_barrier(comm);
    case 1: return xd_broadcast(comm, recv, n, XD_DTYPE_F32, root);
    case 2: return xd_all_reduce(comm, send, recv, n, XD_DTYPE_F32, XD_SUM);
    case 3: return xd_reduce_scatter(comm, send, recv, counts, XD_DTYPE_F32, XD_SUM);
    case 4: return xd_all_gather(comm, send, recv, counts, XD_DTYPE_F32);
    case 5: return xd_all_to_all(comm, send, counts, recv, counts, XD_DTYPE_F32);
    case 6: return xd_gather(comm, send, recv, counts, XD_DTYPE_F32, root);
    case 7: return xd_scatter(comm, send, recv, counts, XD_DTYPE_F32, root);
    case 8: return xd_agree(comm, XD_OK);
    default:
        if (peer) return xd_send(pair, send, n, XD_DTYPE_F32, peer);
        return xd_recv(pair, recv, n, XD_DTYPE_F32, peer);
    }
}

#endif
