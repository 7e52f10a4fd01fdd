/* Collectives: the path of every call, messages, counters, and communicators. */

#include "comm/internal.h"
#include "kernel/kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- the path of every call ---- */

/* Adds the payload to the counters. An all_reduce counts as it does in separate address spaces: blocks to their
 * owners, sums back. */
static void xdi_comm_count(xd_comm *comm, const xd_collective *c) {
    const int rank = comm->transport->rank, n = comm->transport->size;
    const uint64_t size = xd_dtype_size(c->dtype), others = (uint64_t)n - 1;
    const int64_t own_nodes = xdi_comm_nodes(&c->leaves);
    int64_t all_nodes = n, begin = 0, end = 0, sent = xdi_comm_send_elements(c, rank, n);
    int64_t received = xdi_comm_recv_elements(c, rank, n);
    comm->counters.calls++;
    for (int r = 0; c->leaves.total && r < n; r++)
        all_nodes += xd_leaves_nodes((int64_t)comm->all[r].extra, (int64_t)comm->all[r].leaves) - 1;
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE:
        xdi_comm_piece(c->count, n, rank, &begin, &end);
        sent = (c->count - (end - begin)) * own_nodes + (end - begin) * (n - 1);
        received = (end - begin) * (all_nodes - own_nodes) + c->count - (end - begin);
        break;
    case XD_COLLECTIVE_REDUCE_SCATTER:
        sent -= c->send_counts[rank] * own_nodes;
        received *= all_nodes - own_nodes;
        break;
    case XD_COLLECTIVE_BROADCAST: sent *= (int64_t)others; break;
    case XD_COLLECTIVE_ALL_GATHER:
        received -= c->recv_counts[rank];
        sent *= (int64_t)others;
        break;
    case XD_COLLECTIVE_GATHER:
        if (rank == c->root) received -= c->recv_counts[rank], sent = 0;
        break;
    case XD_COLLECTIVE_SCATTER:
        if (rank == c->root) sent -= c->send_counts[rank], received = 0;
        break;
    case XD_COLLECTIVE_ALL_TO_ALL:
        sent -= c->send_counts[rank];
        received -= c->recv_counts[rank];
        break;
    default: break;
    }
    comm->counters.bytes_sent += (uint64_t)sent * size;
    comm->counters.bytes_received += (uint64_t)received * size;
}

static xd_result xdi_comm_whole(const xd_comm *comm, const xd_collective *c) {
    XD_TRY(xdi_comm_own(comm));
    if (comm->broken == XD_OK) return XD_OK;
    return XD_FAIL_CULPRIT(comm->ctx, XD_ERROR_PEER, comm->culprit,
                           "%s: the group is broken: rank %d caused %s in an earlier call",
                           xdi_comm_kind((uint64_t)c->kind), comm->culprit, xd_result_name(comm->broken));
}

/* ---- messages ---- */

static bool xdi_comm_is_message(const xd_collective *c) {
    return c->kind == XD_COLLECTIVE_SEND || c->kind == XD_COLLECTIVE_RECV;
}

/* False when there is no other rank to tell that this one has refused. Otherwise the refusal is a record of dtype NONE. */
static bool xdi_comm_refuse(const xd_comm *comm, xd_collective *c) {
    c->count = 0;
    c->dtype = XD_DTYPE_NONE;
    return xdi_comm_is_message(c) && c->root >= 0 && c->root < comm->transport->size &&
           c->root != comm->transport->rank;
}

static double xdi_comm_message_deadline(const xd_comm *comm) {
    return xd_now(comm->ctx) + (1.0 + comm->patience) * xd_ctx_settings(comm->ctx)->timeout_seconds;
}

/* Compares what both ranks passed. The rank that has refused knows. */
static xd_result xdi_comm_judge(const xd_comm *comm, const xd_message *m) {
    const xd_collective *c = &m->record;
    const int *world = comm->transport->world_ranks, peer = world[c->root];
    const bool sends = c->kind == XD_COLLECTIVE_SEND;
    const int from = sends ? world[comm->transport->rank] : peer,
              to = sends ? peer : world[comm->transport->rank];
    if (c->dtype == XD_DTYPE_NONE) return XD_OK;
    if (m->their_dtype == XD_DTYPE_NONE)
        return XD_FAIL_CULPRIT(comm->ctx, XD_ERROR_PEER, peer, "%s: rank %d refused its own arguments",
                               xdi_comm_kind((uint64_t)c->kind), peer);
    XD_REQUIRE(comm->ctx, c->dtype == m->their_dtype, XD_ERROR_MISMATCH,
               "rank %d sends %s, rank %d receives %s", from,
               xd_dtype_name(sends ? c->dtype : m->their_dtype), to,
               xd_dtype_name(sends ? m->their_dtype : c->dtype));
    XD_REQUIRE(comm->ctx, c->count == m->their_count, XD_ERROR_MISMATCH,
               "rank %d sends count %" PRId64 ", rank %d receives count %" PRId64, from,
               sends ? c->count : m->their_count, to, sends ? m->their_count : c->count);
    return XD_OK;
}

/* The failure of the first record of a list that has one. */
typedef struct xdi_comm_first {
    int index; /* -1: none */
    xd_error error;
} xdi_comm_first;

static void xdi_comm_note(const xd_comm *comm, xdi_comm_first *first, int index) {
    if (first->index >= 0 && first->index < index) return;
    first->index = index;
    first->error = *xd_last_error(comm->ctx);
}

static xd_result xdi_comm_validate_message(const xd_comm *comm, const xd_collective *c, int index) {
    XD_REQUIRE(comm->ctx, xdi_comm_is_message(c), XD_ERROR_ARGUMENT,
               "exchange: record %d is %s, neither send nor recv", index, xdi_comm_kind((uint64_t)c->kind));
    return xdi_comm_validate(comm, c);
}

/* All messages at once, or the refusals of all. `messages` has room for all; those that nobody can be told of are left out of
 * it. */
static xd_result xdi_comm_run_messages(xd_comm *comm, const xd_collective *records, int count, bool refuses,
                                       xd_message *messages) {
    xdi_comm_first first = { -1, { XD_OK, NULL, 0, NULL, 0, 0, "" } };
    int used = 0;
    for (int i = 0; i < count; i++) {
        xd_message *m = &messages[used];
        memset(m, 0, sizeof *m);
        m->record = records[i];
        m->record.stream = records[0].stream ? records[0].stream : xd_ctx_settings(comm->ctx)->stream;
        m->index = i;
        const bool valid = !refuses && xdi_comm_validate_message(comm, &m->record, i) == XD_OK;
        if (!valid && !refuses) xdi_comm_note(comm, &first, i);
        if (valid || xdi_comm_refuse(comm, &m->record)) used++;
    }
    for (int i = 0; i < used; i++) {
        const xd_result admitted = xdi_comm_admit(comm, &messages[i].record, XD_OK);
        if (admitted != XD_OK) return first.index < 0 ? admitted : xdi_ctx_adopt(comm->ctx, &first.error);
    }
    const double deadline = xdi_comm_message_deadline(comm);
    if (used > 0)
        XD_TRY(
            xdi_comm_break(comm, comm->transport->ops->exchange(comm->transport, messages, used, deadline)));
    for (int i = 0; i < used; i++) {
        if (xdi_comm_judge(comm, &messages[i]) != XD_OK)
            xdi_comm_note(comm, &first, messages[i].index);
        else if (messages[i].record.dtype != XD_DTYPE_NONE)
            xdi_comm_count(comm, &messages[i].record);
    }
    return first.index < 0 ? XD_OK : xdi_ctx_adopt(comm->ctx, &first.error);
}

/* Two ranks only. A transport without messages compares what both passed. */
static xd_result xdi_comm_run_pair(xd_comm *comm, const xd_collective *c) {
    xd_collective record = *c;
    xd_message message;
    if (comm->transport->ops->exchange) return xdi_comm_run_messages(comm, c, 1, false, &message);
    const xd_result mine = xdi_comm_validate(comm, c);
    if (mine != XD_OK && !xdi_comm_refuse(comm, &record)) return mine;
    const double deadline = xdi_comm_message_deadline(comm);
    const xd_result result = comm->transport->ops->execute(comm->transport, &record, deadline);
    if (result == XD_ERROR_ARGUMENT) {
        const int culprit = comm->transport->world_ranks[c->root];
        return XD_FAIL_CULPRIT(comm->ctx, XD_ERROR_PEER, culprit, "%s: rank %d refused its own arguments",
                               xdi_comm_kind((uint64_t)c->kind), culprit);
    }
    if (result == XD_ERROR_MISMATCH) return result;
    XD_TRY(xdi_comm_break(comm, result));
    if (mine == XD_OK) xdi_comm_count(comm, c);
    return mine;
}

/* Tells the other rank of a message that this one will not take part. */
static xd_result xdi_comm_refuse_pair(xd_comm *comm, const xd_collective *c) {
    xd_collective record = *c;
    if (!xdi_comm_refuse(comm, &record)) return XD_OK;
    return xdi_comm_break(
        comm, comm->transport->ops->execute(comm->transport, &record, xdi_comm_message_deadline(comm)));
}

/* The place of a message in the order of all ranks: by the lower rank, the higher one, upward before downward, then as listed.
 * The first pair of this order that has not met is the next one of both its ranks. */
static uint64_t xdi_comm_message_key(const xd_comm *comm, const xd_collective *c, int index, int count) {
    const int me = comm->transport->rank, size = comm->transport->size;
    const int peer = c->root >= 0 && c->root < size ? c->root : me;
    const int low = me < peer ? me : peer, high = me < peer ? peer : me;
    const int downward = (c->kind == XD_COLLECTIVE_SEND) == (me == high);
    return (((uint64_t)low * (uint64_t)size + (uint64_t)high) * 2 + (uint64_t)downward) * (uint64_t)count +
           (uint64_t)index;
}

static xd_result xdi_comm_run_in_turn(xd_comm *comm, const xd_collective *records, int count, bool refuses) {
    xdi_comm_first first = { -1, { XD_OK, NULL, 0, NULL, 0, 0, "" } };
    uint64_t begin = 0;
    for (int done = 0; done < count; done++) {
        uint64_t least = UINT64_MAX;
        for (int i = 0; i < count; i++) {
            const uint64_t key = xdi_comm_message_key(comm, &records[i], i, count);
            if (key >= begin && key < least) least = key;
        }
        begin = least + 1;
        const int index = (int)(least % (uint64_t)count);
        xd_collective c = records[index];
        c.stream = records[0].stream ? records[0].stream : xd_ctx_settings(comm->ctx)->stream;
        xd_result result =
            xdi_comm_is_message(&c) ? xdi_comm_whole(comm, &c) : xdi_comm_validate_message(comm, &c, index);
        if (result == XD_OK) result = refuses ? xdi_comm_refuse_pair(comm, &c) : xdi_comm_run_pair(comm, &c);
        if (result != XD_OK) xdi_comm_note(comm, &first, index);
    }
    return first.index < 0 ? XD_OK : xdi_ctx_adopt(comm->ctx, &first.error);
}

static xd_result xdi_comm_exchange_records(xd_comm *comm, const xd_collective *records, int count,
                                           bool refuses) {
    xd_collective none;
    memset(&none, 0, sizeof none);
    none.kind = XD_COLLECTIVE_SEND;
    XD_TRY(xdi_comm_whole(comm, &none));
    XD_REQUIRE(comm->ctx, count >= 0 && (records || count == 0), XD_ERROR_ARGUMENT,
               "exchange: count is %d, records are %s", count, records ? "given" : "NULL");
    if (count == 0) return XD_OK;
    xd_message *messages = NULL;
    if (comm->transport->ops->exchange)
        messages = (xd_message *)xdi_scratch_take(comm->ctx, (size_t)count * sizeof *messages);
    const xd_result result =
        messages ? xdi_comm_run_messages(comm, records, count, refuses, messages)
                 : xdi_comm_run_in_turn(comm, records, count, refuses); /* which needs no memory */
    xdi_scratch_give(comm->ctx, messages);
    return result;
}

/* `mine`, or the error of a record that starts while a plan is open; the other ranks are informed. */
static xd_result xdi_comm_out_of_plan(xd_comm *comm, xd_collective_kind kind, xd_result mine) {
    if (mine != XD_OK || !xdi_plan_is_open(comm->ctx)) return mine;
    return xdi_plan_refuse(comm->ctx, __FILE__, __LINE__, xdi_comm_kind((uint64_t)kind));
}

/* The error of messages that start while a plan is open; their other ranks are informed. `what` names them. */
static xd_result xdi_comm_exchange_out_of_plan(xd_comm *comm, const xd_collective *records, int count,
                                               const char *what) {
    XD_TRY(xdi_comm_exchange_records(comm, records, count, true));
    return xdi_plan_refuse(comm->ctx, __FILE__, __LINE__, what);
}

XD_API xd_result xd_exchange(xd_comm *comm, const xd_collective *records, int count) {
    XDI_GIVEN_GROUP(comm);
    return xdi_plan_is_open(comm->ctx) ? xdi_comm_exchange_out_of_plan(comm, records, count, __func__)
                                       : xdi_comm_exchange_records(comm, records, count, false);
}

XD_PRIVATE xd_result xdi_comm_exchange_as(xd_comm *comm, const xd_collective *records, int count,
                                          bool refuses, double patience) {
    comm->patience = patience;
    const xd_result result = xdi_comm_exchange_records(comm, records, count, refuses);
    comm->patience = 0.0;
    return result;
}

XD_PRIVATE uint64_t xdi_comm_refused_last(const xd_comm *comm) {
    return comm->refused == comm->sequence ? comm->refused : 0;
}

/* Validates, compares, moves, counts. `mine` is an error found before the call. The peers must be informed of it,
 * and of an error that the context has stored for them (xdi_ctx_settle). */
static xd_result xdi_comm_run(xd_comm *comm, const xd_collective *c, xd_result mine, double *deadline) {
    mine = xdi_comm_out_of_plan(comm, c->kind, mine);
    XD_TRY(xdi_comm_admit(comm, c, mine));
    if (mine == XD_OK && comm->transport->size > 1) mine = xdi_ctx_settle(comm->ctx);
    comm->sequence++;
    *deadline = xdi_comm_deadline(comm);
    const xd_control control = xdi_comm_control(comm, c, mine);
    XD_TRY(xdi_comm_exchange(comm, &control, mine == XD_OK ? c : NULL, *deadline));
    const xd_result result = xdi_comm_agreement(comm, c, mine, *deadline);
    if (result != XD_OK && comm->broken == XD_OK) comm->refused = comm->sequence;
    return result;
}

XD_PRIVATE xd_result xdi_comm_collective_as(xd_comm *comm, const xd_collective *collective, xd_result mine) {
    xd_collective c = *collective;
    if (!xdi_comm_reduces(c.kind)) memset(&c.leaves, 0, sizeof c.leaves), c.known_leaves = NULL;
    if (!c.stream) c.stream = xd_ctx_settings(comm->ctx)->stream;
    XD_TRY(xdi_comm_whole(comm, &c));
    if (xdi_comm_is_message(&c))
        return xdi_plan_is_open(comm->ctx)
                   ? xdi_comm_exchange_out_of_plan(comm, &c, 1, xdi_comm_kind((uint64_t)c.kind))
                   : xdi_comm_run_pair(comm, &c);
    double deadline;
    c.sequence = comm->sequence + 1;
    XD_TRY(xdi_comm_run(comm, &c, mine == XD_OK ? xdi_comm_validate(comm, &c) : mine, &deadline));
    if (c.kind != XD_COLLECTIVE_BARRIER)
        XD_TRY(xdi_comm_break(comm, comm->transport->ops->execute(comm->transport, &c, deadline)));
    xdi_comm_count(comm, &c);
    xd_log(comm->ctx, XD_LOG_TRACE, "%s %" PRIu64 " on %d ranks: %" PRIu64 " bytes sent so far",
           xdi_comm_kind((uint64_t)c.kind), c.sequence, comm->transport->size, comm->counters.bytes_sent);
    return XD_OK;
}

XD_API xd_result xd_collective_run(xd_comm *comm, const xd_collective *collective) {
    XDI_LIVE(xd_comm, comm);
    XDI_CALL(comm ? comm->ctx : NULL);
    XD_TRY(xdi_comm_given(comm, XDI_CHECK_GIVEN_AS(comm ? comm->ctx : NULL, true, comm, collective)));
    return xdi_comm_collective_as(comm, collective, XD_OK);
}

/* ---- calls of one kind ---- */

static xd_collective xdi_comm_record(xd_collective_kind kind, const void *send, void *recv, xd_dtype dtype) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.send = send;
    c.recv = recv;
    c.dtype = dtype;
    return c;
}

XD_API xd_result xd_barrier(xd_comm *comm) {
    XDI_GIVEN_GROUP(comm);
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_BARRIER, NULL, NULL, XD_DTYPE_NONE);
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_BROADCAST, data, data, dtype);
    c.count = count;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                               xd_reduce_op op) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_REDUCE, send, recv, dtype);
    c.count = count;
    c.op = op;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                                   xd_dtype dtype, xd_reduce_op op) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_REDUCE_SCATTER, send, recv, dtype);
    c.send_counts = counts;
    c.op = op;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                               xd_dtype dtype) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_GATHER, send, recv, dtype);
    c.recv_counts = counts;
    return xd_collective_run(comm, &c);
}

XD_PRIVATE xd_result xdi_comm_all_gather_equal(xd_comm *comm, const void *send, void *recv, int64_t count,
                                               xd_dtype dtype) {
    for (int i = 0; i < comm->transport->size; i++) comm->counts[i] = count;
    return xd_all_gather(comm, send, recv, comm->counts, dtype);
}

XD_API xd_result xd_all_gather_even(xd_comm *comm, const void *send, void *recv, int64_t count,
                                    xd_dtype dtype) {
    XDI_GIVEN_GROUP(comm);
    return xdi_comm_all_gather_equal(comm, send, recv, count, dtype);
}

XD_API xd_result xd_all_to_all(xd_comm *comm, const void *send, const int64_t *send_counts, void *recv,
                               const int64_t *recv_counts, xd_dtype dtype) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_TO_ALL, send, recv, dtype);
    c.send_counts = send_counts;
    c.recv_counts = recv_counts;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                           int root) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_GATHER, send, recv, dtype);
    c.recv_counts = counts;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                            xd_dtype dtype, int root) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_SCATTER, send, recv, dtype);
    c.send_counts = counts;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_SEND, data, NULL, dtype);
    c.count = count;
    c.root = to;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from) {
    XDI_GIVEN_GROUP(comm);
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_RECV, NULL, data, dtype);
    c.count = count;
    c.root = from;
    return xd_collective_run(comm, &c);
}

XD_PRIVATE xd_result xdi_comm_agree_count(xd_comm *comm, xd_result mine, int64_t count) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_AGREE, NULL, NULL, XD_DTYPE_NONE);
    double deadline;
    c.count = count;
    XD_TRY(xdi_comm_whole(comm, &c));
    XD_TRY(xdi_comm_run(comm, &c, mine, &deadline));
    comm->counters.calls++;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_comm_agree_or_record(xd_comm *comm, xd_result mine, int64_t count) {
    return xdi_comm_is_recording(comm) ? mine : xdi_comm_agree_count(comm, mine, count);
}

XD_PRIVATE xd_result xdi_comm_given(xd_comm *comm, xd_result mine) {
    return mine == XD_OK || !comm ? mine : xd_agree(comm, mine);
}

/* Adds up `count` values of every rank, all[ranks][count]. */
static void xdi_comm_add_values(const double *all, int ranks, double *values, int64_t count) {
    memcpy(values, all, (size_t)count * sizeof *values);
    for (int r = 1; r < ranks; r++)
        for (int64_t i = 0; i < count; i++) values[i] += all[r * count + i];
}

/* As many values at a time as there is room for without an allocation: none can fail on one rank alone. */
XD_API xd_result xd_sum_values(xd_comm *comm, double *values, int64_t count) {
    enum { ROOM = 512 };
    double room[ROOM], *all = room;
    XDI_GIVEN_COMM(comm, values);
    const int ranks = comm->transport->size;
    const int64_t most = ranks <= ROOM ? ROOM / ranks : 1;
    if (ranks > ROOM) all = (double *)(void *)comm->values;
    xd_result mine = XD_OK;
    if (count < 0 || count > INT64_MAX / 64)
        mine = XD_FAIL(comm->ctx, XD_ERROR_ARGUMENT,
                       "a sum of %" PRId64 " values of each rank: negative or too large", count);
    XD_TRY(xdi_comm_agree_count(comm, mine, count));
    for (int64_t at = 0; at < count; at += most) {
        const int64_t n = count - at < most ? count - at : most;
        XD_TRY(xdi_comm_all_gather_equal(comm, values + at, all, n, XD_DTYPE_F64));
        xdi_comm_add_values(all, ranks, values + at, n);
    }
    return XD_OK;
}

XD_API xd_result xd_agree(xd_comm *comm, xd_result mine) {
    XDI_GIVEN_GROUP(comm);
    return xdi_comm_agree_count(comm, mine, 0);
}

XD_PRIVATE xd_result xdi_comm_agree_alike(xd_comm *comm, xd_result mine) {
    comm->alike = true;
    const xd_result result = xd_agree(comm, mine);
    comm->alike = false;
    return result;
}

XD_PRIVATE xd_result xdi_comm_agree_number(xd_comm *comm, xd_result mine, const char *call, const char *name,
                                           int64_t number) {
    XD_TRY(xd_agree(comm, mine));
    XD_TRY(xdi_comm_tell(comm, (uint64_t)number, 0, xdi_comm_deadline(comm)));
    for (int r = 0; r < comm->transport->size; r++) comm->values[r] = comm->all[r].count;
    return xdi_comm_compare(comm, call, XDI_COMM_COUNT, name);
}

XD_PRIVATE xd_result xdi_comm_all_can(xd_comm *comm, bool mine, bool *all) {
    int can = mine ? 1 : 0;
    XD_TRY(xd_all_reduce(comm, &can, &can, 1, XD_DTYPE_I32, XD_MIN));
    *all = can == 1;
    return XD_OK;
}

/* ---- handles ---- */

XD_API int xd_comm_rank(const xd_comm *comm) {
    XD_ASSERT(comm);
    return comm->transport->rank;
}

XD_API int xd_comm_size(const xd_comm *comm) {
    XD_ASSERT(comm);
    return comm->transport->size;
}

XD_API int xd_comm_world_rank(const xd_comm *comm, int rank) {
    XD_ASSERT(comm);
    return rank >= 0 && rank < comm->transport->size ? comm->transport->world_ranks[rank] : -1;
}

XD_API xd_ctx *xd_comm_ctx(const xd_comm *comm) {
    XD_ASSERT(comm);
    return comm->ctx;
}

XD_API xd_comm_counters xd_comm_traffic(const xd_comm *comm) {
    XD_ASSERT(comm);
    return comm->counters;
}

XD_PRIVATE bool xdi_comm_forks_for_threads(const xd_comm *comm) {
    return comm->transport->ops->fork && !comm->transport->ops->forks_in_order;
}

/* As xd_comm_create allocates. */
static size_t xdi_comm_handle_bytes(int size) {
    return sizeof(xd_comm) + (size_t)size * (sizeof(xd_control) + sizeof(uint64_t) + sizeof(int) +
                                             sizeof(int64_t) + sizeof(xd_leaves));
}

XD_PRIVATE size_t xdi_comm_fork_bytes(const xd_comm *comm) {
    const xd_transport *t = comm->transport;
    const size_t bytes = t->ops->fork && t->ops->fork_bytes ? t->ops->fork_bytes(t) : 0;
    const bool is_unknown = t->ops->fork && !t->ops->fork_bytes;
    return bytes > 0 || is_unknown ? bytes + xdi_comm_handle_bytes(t->size) : 0;
}

XD_API xd_result xd_comm_create(xd_ctx *ctx, xd_transport *transport, xd_comm **out) {
    const size_t n = (size_t)transport->size;
    xd_comm *comm = XDI_OBJECT(xd_comm, ctx, sizeof *comm);
    if (!comm) transport->ops->destroy(transport);
    XD_REQUIRE(ctx, comm, XD_ERROR_MEMORY, "no room for a group handle");
    comm->ctx = ctx;
    comm->transport = transport;
    xdi_ctx_join(ctx, transport->rank, transport->size);
    comm->culprit = -1;
    comm->is_world = true;
    comm->process = xdi_process();
    comm->all = (xd_control *)xd_allocate(ctx, n * sizeof *comm->all);
    comm->values = (uint64_t *)xd_allocate(ctx, n * sizeof *comm->values);
    comm->members = (int *)xd_allocate(ctx, n * sizeof *comm->members);
    comm->counts = (int64_t *)xd_allocate(ctx, n * sizeof *comm->counts);
    comm->one_each = (xd_leaves *)xd_allocate(ctx, n * sizeof *comm->one_each);
    if (!comm->all || !comm->values || !comm->members || !comm->counts || !comm->one_each) {
        xd_comm_destroy(comm);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the handle of a group of %d ranks", (int)n);
    }
    for (int r = 0; r < transport->size; r++) {
        comm->one_each[r].first = r;
        comm->one_each[r].count = 1;
        comm->one_each[r].total = transport->size;
    }
    *out = comm;
    return XD_OK;
}

XD_PRIVATE const xd_leaves *xdi_comm_one_each(const xd_comm *comm) {
    return comm->one_each;
}

XD_API void xd_comm_destroy(xd_comm *comm) {
    if (!comm || XDI_IS_GONE(xd_comm, comm)) return;
    xdi_ctx_leave(comm->ctx, comm->transport->size);
    if (!xdi_comm_is_forked(comm)) comm->transport->ops->destroy(comm->transport);
    xd_release(comm->ctx, comm->one_each);
    xd_release(comm->ctx, comm->counts);
    xd_release(comm->ctx, comm->members);
    xd_release(comm->ctx, comm->values);
    xd_release(comm->ctx, comm->all);
    xd_release(comm->ctx, comm);
}

XD_API void xd_comm_abort(xd_comm *comm) {
    if (!xdi_comm_is_forked(comm)) comm->transport->ops->abort(comm->transport);
}

/* Group ranks of one color in the order of (key, rank); returns their number. */
static int xdi_comm_members(xd_comm *comm, int color) {
    int size = 0;
    for (int r = 0; r < comm->transport->size; r++) {
        if ((int32_t)(comm->all[r].extra >> 32) != color) continue;
        const int32_t key = (int32_t)(comm->all[r].extra & 0xffffffffu);
        int at = size++;
        for (; at > 0 && (int32_t)(comm->all[comm->members[at - 1]].extra & 0xffffffffu) > key; at--)
            comm->members[at] = comm->members[at - 1];
        comm->members[at] = r;
    }
    return size;
}

static xd_result xdi_comm_split_own(xd_comm *comm, int color, double deadline, xd_comm **child) {
    const int size = xdi_comm_members(comm, color);
    int rank = 0;
    while (comm->members[rank] != comm->transport->rank) rank++;
    xd_transport *transport = NULL;
    XD_TRY(comm->transport->ops->split(comm->transport, comm->members, size, rank, deadline, &transport));
    XD_TRY(xd_comm_create(comm->ctx, transport, child));
    (*child)->is_world = false;
    return XD_OK;
}

XD_API xd_result xd_comm_split(xd_comm *comm, int color, int key, xd_comm **out) {
    XDI_GIVEN_COMM(comm, out);
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_SPLIT, NULL, NULL, XD_DTYPE_NONE);
    XD_TRY(xdi_comm_whole(comm, &c));
    XD_TRY(xdi_comm_admit(comm, &c, XD_OK));
    comm->sequence++;
    const double deadline = xdi_comm_deadline(comm);
    xd_control mine = xdi_comm_control(comm, &c, XD_OK);
    mine.extra = ((uint64_t)(uint32_t)color << 32) | (uint32_t)key;
    XD_TRY(xdi_comm_exchange(comm, &mine, NULL, deadline));
    XD_TRY(xdi_comm_agreement(comm, &c, XD_OK, deadline));
    xd_comm *child = NULL;
    const xd_result made = color < 0 ? XD_OK : xdi_comm_split_own(comm, color, deadline, &child);
    const xd_result agreed = xd_agree(comm, made); /* one rank without memory: no rank gets a group */
    if (agreed != XD_OK) {
        xd_comm_destroy(child);
        return agreed;
    }
    *out = child;
    return XD_OK;
}

static xd_result xdi_comm_fork_own(xd_comm *comm, xd_ctx *ctx, double deadline, xd_comm **twin) {
    xd_transport *transport = NULL;
    if (!comm->transport->ops->fork) return XD_OK;
    XD_TRY(comm->transport->ops->fork(comm->transport, ctx, deadline, &transport));
    if (!transport) return XD_OK;
    const xd_result result = xd_comm_create(ctx, transport, twin);
    if (result != XD_OK) return xdi_ctx_adopt(comm->ctx, xd_last_error(ctx));
    (*twin)->is_world = false;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_comm_fork(xd_comm *comm, xd_ctx *ctx, xd_comm **out) {
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_FORK, NULL, NULL, XD_DTYPE_NONE);
    double deadline;
    XD_TRY(xdi_comm_whole(comm, &c));
    XD_TRY(xdi_comm_run(comm, &c, XD_OK, &deadline));
    xd_comm *twin = NULL;
    const xd_result agreed = xd_agree(comm, xdi_comm_fork_own(comm, ctx, deadline, &twin));
    if (agreed != XD_OK) {
        xd_comm_destroy(twin);
        return agreed;
    }
    *out = twin;
    return XD_OK;
}

static xd_result xdi_comm_may_fork(const xd_comm *comm, xd_ctx *ctx) {
    XD_REQUIRE(comm->ctx, ctx, XD_ERROR_ARGUMENT, "a group of %d ranks is forked for no context",
               comm->transport->size);
    const xd_reduction mine = xd_ctx_settings(comm->ctx)->reduction, other = xd_ctx_settings(ctx)->reduction;
    XD_REQUIRE(comm->ctx, mine == other, XD_ERROR_ARGUMENT,
               "a group of reduction mode %d is forked for a context of mode %d", (int)mine, (int)other);
    return XD_OK;
}

XD_API xd_result xd_comm_fork(xd_comm *comm, xd_ctx *ctx, xd_comm **out) {
    XDI_GIVEN_COMM(comm, out);
    xd_comm *twin = NULL;
    XD_TRY(xd_agree(comm, xdi_comm_may_fork(comm, ctx)));
    XD_TRY(xdi_comm_fork(comm, ctx, &twin));
    XD_REQUIRE(comm->ctx, twin, XD_ERROR_UNSUPPORTED, "%s cannot fork a group of %d ranks",
               comm->transport->ops->name, comm->transport->size);
    *out = twin;
    return XD_OK;
}

XD_API xd_result xd_comm_shrink(xd_comm *broken, double timeout_s, xd_comm **out) {
    XDI_LIVE(xd_comm, broken);
    XDI_GIVEN_OF(broken, out);
    xd_ctx *ctx = broken->ctx;
    xd_transport *old = broken->transport, *transport = NULL;
    XD_TRY(xdi_comm_own(broken));
    XD_REQUIRE(ctx, old->ops->shrink, XD_ERROR_UNSUPPORTED,
               "%s cannot go on without one of its %d ranks: the job is started again", old->ops->name,
               old->size);
    XD_REQUIRE(ctx, broken->is_world, XD_ERROR_ARGUMENT,
               "a group of %d ranks is not a world: it goes on as a group of what the world becomes",
               old->size);
    XD_REQUIRE(ctx, timeout_s >= 0.0, XD_ERROR_ARGUMENT, "timeout_s is %g", timeout_s);
    if (timeout_s <= 0.0) timeout_s = xd_ctx_settings(ctx)->timeout_seconds;
    XD_TRY(old->ops->shrink(old, xd_now(ctx) + timeout_s, &transport));
    const int rank = old->world_ranks[old->rank], size = old->size;
    xd_ctx_set_rank(ctx, transport->rank);
    xd_log(ctx, XD_LOG_INFO, "rank %d of %d is rank %d of the %d that go on", rank, size, transport->rank,
           transport->size);
    return xd_comm_create(ctx, transport, out);
}
