/* What xd_exchange does, over any transport: each case is a function that every rank of a world runs. */
#ifndef EXCHANGE_SUITE_H
#define EXCHANGE_SUITE_H

#include "xd_test.h"
#include "xdistill.h"

#include <stdlib.h>

enum { EXCHANGE_RANKS = 8, EXCHANGE_LONG = 3000, EXCHANGE_MESSAGES = 4 };

static inline xd_collective message_of(xd_collective_kind kind, float *data, int64_t count, int peer) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.send = kind == XD_COLLECTIVE_SEND ? data : NULL;
    c.recv = kind == XD_COLLECTIVE_RECV ? data : NULL;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.root = peer;
    return c;
}

/* What a rank sends to another as its k-th message. */
static inline float exchange_value(int from, int to, int k, int64_t i) {
    return (float)(from * 1000 + to * 100 + k * 10) + (float)i / 4096.0f;
}

static inline void exchange_check(const float *data, int64_t count, int from, int to, int k) {
    long wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong += data[i] != exchange_value(from, to, k, i);
    CHECK_EQ_INT(wrong, 0);
}

/* Every rank sends `messages` to every rank at the distances of `ring` (0: to all others) and receives as many, sends first. */
static inline void exchange_round(xd_comm *world, int ring, int messages, int64_t count) {
    const int me = xd_comm_rank(world), n = xd_comm_size(world);
    xd_collective records[2 * EXCHANGE_RANKS * EXCHANGE_MESSAGES];
    const size_t all = (size_t)(n * messages) * (size_t)(count + 1);
    float *send = (float *)malloc(all * sizeof *send), *recv = (float *)malloc(all * sizeof *recv);
    int used = 0;
    for (int way = 0; way < 2; way++)
        for (int d = 1; d < n; d++)
            for (int k = 0; k < messages && (!ring || d == ring); k++) {
                const int peer = way ? (me + n - d) % n : (me + d) % n;
                float *at = (way ? recv : send) + (int64_t)(peer * messages + k) * (count + 1);
                for (int64_t i = 0; i < count; i++) at[i] = way ? -7.0f : exchange_value(me, peer, k, i);
                records[used++] = message_of(way ? XD_COLLECTIVE_RECV : XD_COLLECTIVE_SEND, at, count, peer);
            }
    const xd_comm_counters before = xd_comm_traffic(world);
    CHECK_EQ_INT(xd_exchange(world, records, used), XD_OK);
    const xd_comm_counters after = xd_comm_traffic(world);
    for (int i = used / 2; i < used; i++)
        exchange_check((const float *)records[i].recv, count, records[i].root, me, i % messages);
    CHECK_EQ_INT(after.calls - before.calls, used);
    CHECK_EQ_INT(after.bytes_sent - before.bytes_sent, used / 2 * count * 4);
    CHECK_EQ_INT(after.bytes_received - before.bytes_received, used / 2 * count * 4);
    free(recv);
    free(send);
}

static inline xd_result exchange_rounds(xd_comm *world, void *argument) {
    static const int64_t counts[] = { 0, 1, EXCHANGE_LONG };
    (void)argument;
    for (int c = 0; c < 3; c++)
        for (int messages = 1; messages <= EXCHANGE_MESSAGES; messages += 3)
            for (int ring = 0; ring < xd_comm_size(world); ring++)
                exchange_round(world, ring, messages, counts[c]);
    return xd_barrier(world);
}

/* Of three messages of rank 0 to rank 1 the second differs; those before and after it arrive, and the group stays whole. */
static inline xd_result exchange_mismatch(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world);
    float data[3][8];
    xd_collective c[3];
    (void)argument;
    for (int fault = 0; fault < 3 && me < 2; fault++) {
        for (int k = 0; k < 3; k++) {
            for (int i = 0; i < 8; i++) data[k][i] = me ? -7.0f : exchange_value(0, 1, k, i);
            c[k] = message_of(me ? XD_COLLECTIVE_RECV : XD_COLLECTIVE_SEND, data[k], 8, 1 - me);
        }
        if (me == 1 && fault == 0) c[1].count = 5;
        if (me == 1 && fault == 1) c[1].dtype = XD_DTYPE_I32;
        if (me == 1 && fault == 2) c[1].count = -3;
        const xd_result want = fault < 2 ? XD_ERROR_MISMATCH : me ? XD_ERROR_ARGUMENT : XD_ERROR_PEER;
        static const char *const says[] = { "rank 0 sends count 8, rank 1 receives count 5",
                                            "rank 0 sends F32, rank 1 receives I32",
                                            "rank 1 refused its own arguments" };
        CHECK_EQ_INT(xd_exchange(world, c, 3), want);
        const char *message = xd_last_error(xd_comm_ctx(world))->message;
        CHECK(strstr(message, me && fault == 2 ? "count -3 is negative" : says[fault]) != NULL);
        exchange_check(data[0], 8, 0, 1, 0);
        exchange_check(data[2], 8, 0, 1, 2);
        if (me) CHECK(data[1][0] == -7.0f);
    }
    return xd_barrier(world);
}

/* Records that nobody else has a part in; the others of the list go their way. */
static inline xd_result exchange_refusals(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world), n = xd_comm_size(world), right = (me + 1) % n,
              left = (me + n - 1) % n;
    float out[4], in[4];
    xd_collective c[3];
    (void)argument;
    for (int fault = 0; fault < 3; fault++) {
        for (int i = 0; i < 4; i++) out[i] = exchange_value(me, right, 0, i), in[i] = -7.0f;
        c[0] = message_of(XD_COLLECTIVE_SEND, out, 4, right);
        c[1] =
            message_of(fault == 2 ? XD_COLLECTIVE_BARRIER : XD_COLLECTIVE_SEND, out, 4, fault == 1 ? n : me);
        c[2] = message_of(XD_COLLECTIVE_RECV, in, 4, left);
        static const char *const says[] = { "is this rank itself", "is outside [0, ",
                                            "exchange: record 1 is barrier, neither send nor recv" };
        CHECK_EQ_INT(xd_exchange(world, c, 3), XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, says[fault]) != NULL);
        exchange_check(in, 4, left, me, 0);
    }
    CHECK_EQ_INT(xd_exchange(world, c, -1), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_exchange(world, NULL, 2), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_exchange(world, NULL, 0), XD_OK);
    return xd_barrier(world);
}

#endif
