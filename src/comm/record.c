/* The record of a collective: its checks on one rank, and the control record by which all ranks compare theirs. */

#include "comm/internal.h"
#include "kernel/kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *const xdi_comm_kinds[] = { "nothing",        "barrier",    "broadcast",  "all_reduce",
                                              "reduce_scatter", "all_gather", "all_to_all", "gather",
                                              "scatter",        "send",       "recv",       "agree",
                                              "split",          "fork" };
static const char *const xdi_comm_ops[] = { "SUM", "MAX", "MIN", "AVG" };
/* The first bit of the floating-point state in `mode`. */
enum { XDI_COMM_MODES = 3, XDI_COMM_FLOATS_AT = 16 };
static const char *const xdi_comm_modes[] = { "DETERMINISTIC", "FAST", "INVARIANT" };

static const char *xdi_comm_text(const char *const *texts, size_t size, uint64_t index) {
    return index < size ? texts[index] : "(invalid)";
}

XD_PRIVATE const char *xdi_comm_kind(uint64_t kind) {
    return xdi_comm_text(xdi_comm_kinds, sizeof xdi_comm_kinds / sizeof *xdi_comm_kinds, kind);
}

/* ---- arithmetic of counts, shared with the transports ---- */

XD_PRIVATE xd_transport *xdi_comm_transport(const xd_comm *comm) {
    return comm->transport;
}

XD_PRIVATE int64_t xdi_comm_total(const int64_t *counts, int n) {
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += counts[i];
    return total;
}

XD_PRIVATE int64_t xdi_comm_offset(const int64_t *counts, const int64_t *displacements, int rank) {
    return displacements ? displacements[rank] : xdi_comm_total(counts, rank);
}

XD_PRIVATE void xdi_comm_piece(int64_t count, int size, int rank, int64_t *begin, int64_t *end) {
    const int64_t each = count / size, rest = count % size;
    *begin = rank * each + (rank < rest ? rank : rest);
    *end = *begin + each + (rank < rest ? 1 : 0);
}

XD_PRIVATE int64_t xdi_comm_nodes(const xd_leaves *leaves) {
    return leaves->total ? xd_leaves_nodes(leaves->first, leaves->count) : 1;
}

XD_PRIVATE int64_t xdi_comm_send_elements(const xd_collective *c, int rank, int size) {
    switch (c->kind) {
    case XD_COLLECTIVE_BROADCAST: return rank == c->root ? c->count : 0;
    case XD_COLLECTIVE_SEND: return c->count;
    case XD_COLLECTIVE_ALL_REDUCE: return c->count * xdi_comm_nodes(&c->leaves);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xdi_comm_total(c->send_counts, size) * xdi_comm_nodes(&c->leaves);
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_GATHER: return c->recv_counts[rank];
    case XD_COLLECTIVE_SCATTER: return rank == c->root ? xdi_comm_total(c->send_counts, size) : 0;
    case XD_COLLECTIVE_ALL_TO_ALL: return xdi_comm_total(c->send_counts, size);
    default: return 0;
    }
}

XD_PRIVATE int64_t xdi_comm_recv_elements(const xd_collective *c, int rank, int size) {
    switch (c->kind) {
    case XD_COLLECTIVE_BROADCAST: return rank == c->root ? 0 : c->count;
    case XD_COLLECTIVE_RECV:
    case XD_COLLECTIVE_ALL_REDUCE: return c->count;
    case XD_COLLECTIVE_REDUCE_SCATTER:
    case XD_COLLECTIVE_SCATTER: return c->send_counts[rank];
    case XD_COLLECTIVE_GATHER: return rank == c->root ? xdi_comm_total(c->recv_counts, size) : 0;
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_ALL_TO_ALL: return xdi_comm_total(c->recv_counts, size);
    default: return 0;
    }
}

XD_PRIVATE bool xdi_comm_reduces(xd_collective_kind kind) {
    return kind == XD_COLLECTIVE_ALL_REDUCE || kind == XD_COLLECTIVE_REDUCE_SCATTER;
}

/* The counts that must agree on all ranks; NULL for kinds that have none. */
static const int64_t *xdi_comm_shared_counts(const xd_collective *c) {
    if (c->kind == XD_COLLECTIVE_REDUCE_SCATTER || c->kind == XD_COLLECTIVE_SCATTER) return c->send_counts;
    if (c->kind == XD_COLLECTIVE_ALL_GATHER || c->kind == XD_COLLECTIVE_GATHER) return c->recv_counts;
    return NULL;
}

/* ---- local validation ---- */

static xd_result xdi_comm_validate_counts(const xd_comm *comm, const xd_collective *c, const int64_t *counts,
                                          const int64_t *displacements, const char *name) {
    const int64_t most = INT64_MAX / 64; /* room for every sum of extents in bytes */
    const int n = comm->transport->size;
    int64_t total = 0;
    XD_REQUIRE(comm->ctx, counts, XD_ERROR_ARGUMENT, "%s: %s_counts is NULL",
               xdi_comm_kind((uint64_t)c->kind), name);
    for (int r = 0; r < n; r++) {
        XD_REQUIRE(comm->ctx, counts[r] >= 0 && counts[r] <= most - total, XD_ERROR_ARGUMENT,
                   "%s: %s count %" PRId64 " of rank %d is negative or too large",
                   xdi_comm_kind((uint64_t)c->kind), name, counts[r], r);
        total += counts[r];
        XD_REQUIRE(comm->ctx, !displacements || (displacements[r] >= 0 && displacements[r] <= most),
                   XD_ERROR_ARGUMENT, "%s: %s displacement %" PRId64 " of rank %d is negative or too large",
                   xdi_comm_kind((uint64_t)c->kind), name, displacements[r], r);
    }
    return XD_OK;
}

/* What is known of all ranks' leaves: together they are [0, total), and this rank's are those that it passes. */
static xd_result xdi_comm_validate_known(const xd_comm *comm, const xd_collective *c) {
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const int n = comm->transport->size, rank = comm->transport->rank;
    const xd_leaves *known = c->known_leaves, *l = &c->leaves;
    int64_t end = 0;
    if (!known) return XD_OK;
    XD_REQUIRE(comm->ctx,
               known[rank].first == l->first && known[rank].count == l->count &&
                   known[rank].total == l->total,
               XD_ERROR_ARGUMENT,
               "%s: rank %d has leaves [%" PRId64 ", +%" PRId64 ") of %" PRId64 ", and [%" PRId64
               ", +%" PRId64 ") of %" PRId64 " are known of it",
               kind, comm->transport->world_ranks[rank], l->first, l->count, l->total, known[rank].first,
               known[rank].count, known[rank].total);
    for (int r = 0; r < n; end += known[r++].count)
        XD_REQUIRE(comm->ctx,
                   known[r].total == l->total && known[r].first == end && known[r].count >= 0 &&
                       known[r].count <= l->total - end,
                   XD_ERROR_ARGUMENT,
                   "%s: known leaves of rank %d are [%" PRId64 ", +%" PRId64 ") of %" PRId64
                   ", after %" PRId64 " of %" PRId64,
                   kind, comm->transport->world_ranks[r], known[r].first, known[r].count, known[r].total, end,
                   l->total);
    XD_REQUIRE(comm->ctx, end == l->total, XD_ERROR_ARGUMENT,
               "%s: known leaves of %d ranks are %" PRId64 " of %" PRId64, kind, n, end, l->total);
    return XD_OK;
}

static xd_result xdi_comm_validate_reduction(const xd_comm *comm, const xd_collective *c) {
    xd_ctx *ctx = comm->ctx;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const xd_leaves *l = &c->leaves;
    XD_REQUIRE(ctx, (int)c->op >= 0 && (int)c->op <= (int)XD_AVG, XD_ERROR_ARGUMENT,
               "%s: operation %d does not exist", kind, (int)c->op);
    XD_REQUIRE(ctx, xd_reduce_supports(c->dtype, c->op), XD_ERROR_DTYPE, "%s: %s of %s is not supported",
               kind, xdi_comm_ops[c->op], xd_dtype_name(c->dtype));
    const bool sum = c->op == XD_SUM || c->op == XD_AVG;
    XD_TRY(xdi_comm_validate_known(comm, c));
    if (l->total == 0) {
        const bool rounds = sum && xd_dtype_is_floating(c->dtype);
        XD_REQUIRE(
            ctx, !rounds || xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT, XD_ERROR_UNSUPPORTED,
            "%s: INVARIANT mode needs the gradient leaves behind a floating-point %s of %s: xd_head_loss "
            "sums a split head's, xd_sum_values numbers to report",
            kind, xdi_comm_ops[c->op], xd_dtype_name(c->dtype));
        return XD_OK;
    }
    XD_REQUIRE(ctx, l->first >= 0 && l->count >= 0 && l->first <= l->total && l->count <= l->total - l->first,
               XD_ERROR_ARGUMENT, "%s: leaves [%" PRId64 ", +%" PRId64 ") lie outside [0, %" PRId64 ")", kind,
               l->first, l->count, l->total);
    XD_REQUIRE(ctx, sum && (c->dtype == XD_DTYPE_F32 || c->dtype == XD_DTYPE_F64), XD_ERROR_DTYPE,
               "%s: leaves go with SUM or AVG of F32 or F64, not %s of %s", kind, xdi_comm_ops[c->op],
               xd_dtype_name(c->dtype));
    return XD_OK;
}

/* True when this rank's buffers overlap, except for recv = send and for the short one being this rank's block of
 * the long one. */
static bool xdi_comm_overlaps(const xd_comm *comm, const xd_collective *c, uintptr_t send_bytes,
                              uintptr_t recv_bytes) {
    const uintptr_t send = (uintptr_t)c->send, recv = (uintptr_t)c->recv;
    if (!send_bytes || !recv_bytes || send >= recv + recv_bytes || recv >= send + send_bytes) return false;
    const int rank = comm->transport->rank;
    const size_t size = xd_dtype_size(c->dtype);
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return send != recv;
    case XD_COLLECTIVE_REDUCE_SCATTER:
    case XD_COLLECTIVE_SCATTER:
        return recv != send + (uintptr_t)xdi_comm_offset(c->send_counts, c->send_displacements, rank) * size;
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_GATHER:
        return send != recv + (uintptr_t)xdi_comm_offset(c->recv_counts, c->recv_displacements, rank) * size;
    default: return true;
    }
}

XD_PRIVATE bool xdi_comm_moves_device(const xd_comm *comm) {
    const xd_kernels *kernels = xd_ctx_settings(comm->ctx)->kernels; /* NULL: the CPU's */
    return !kernels || kernels->device == XD_DEVICE_CPU || comm->transport->ops->moves_device_memory;
}

static bool xdi_comm_reaches(const xd_comm *comm, const void *memory) {
    return xdi_comm_moves_device(comm) || !xd_ctx_kernels(comm->ctx)->memory.owns(comm->ctx, memory);
}

/* Do xd_broadcast, xd_send and xd_recv make this kind, whose one buffer they call data? */
static bool xdi_comm_has_data(xd_collective_kind kind) {
    return kind == XD_COLLECTIVE_BROADCAST || kind == XD_COLLECTIVE_SEND || kind == XD_COLLECTIVE_RECV;
}

static xd_result xdi_comm_validate_buffers(const xd_comm *comm, const xd_collective *c) {
    const int rank = comm->transport->rank, n = comm->transport->size;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const int64_t send = xdi_comm_send_elements(c, rank, n), recv = xdi_comm_recv_elements(c, rank, n);
    const char *data = xdi_comm_has_data(c->kind) ? " (data)" : "";
    XD_REQUIRE(comm->ctx, c->send || send == 0, XD_ERROR_ARGUMENT,
               "%s: send%s is NULL for %" PRId64 " elements", kind, data, send);
    XD_REQUIRE(comm->ctx, c->recv || recv == 0, XD_ERROR_ARGUMENT,
               "%s: recv%s is NULL for %" PRId64 " elements", kind, data, recv);
    const size_t size = xd_dtype_size(c->dtype);
    XD_REQUIRE(comm->ctx, !xdi_comm_overlaps(comm, c, (uintptr_t)send * size, (uintptr_t)recv * size),
               XD_ERROR_ARGUMENT, "%s: send and recv overlap, and not as one in-place call may", kind);
    XD_REQUIRE(comm->ctx,
               (send == 0 || xdi_comm_reaches(comm, c->send)) &&
                   (recv == 0 || xdi_comm_reaches(comm, c->recv)),
               XD_ERROR_UNSUPPORTED,
               "%s: %" PRId64 " elements from and %" PRId64 " to memory of a GPU, which %s does not move",
               kind, send, recv, comm->transport->ops->name);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_comm_validate(const xd_comm *comm, const xd_collective *c) {
    xd_ctx *ctx = comm->ctx;
    const xd_collective_kind k = c->kind;
    const char *kind = xdi_comm_kind((uint64_t)k);
    XD_REQUIRE(ctx, k >= XD_COLLECTIVE_BARRIER && k <= XD_COLLECTIVE_RECV, XD_ERROR_ARGUMENT,
               "collective kind %d cannot be run", (int)k);
    if (k == XD_COLLECTIVE_BARRIER) return XD_OK;
    XD_REQUIRE(ctx, xd_dtype_size(c->dtype) > 0, XD_ERROR_DTYPE, "%s: dtype %d does not exist", kind,
               (int)c->dtype);
    XD_REQUIRE(ctx, c->count >= 0 && c->count <= INT64_MAX / 64, XD_ERROR_ARGUMENT,
               "%s: count %" PRId64 " is negative or too large", kind, c->count);
    const bool pair = k == XD_COLLECTIVE_SEND || k == XD_COLLECTIVE_RECV;
    const bool rooted =
        pair || k == XD_COLLECTIVE_BROADCAST || k == XD_COLLECTIVE_GATHER || k == XD_COLLECTIVE_SCATTER;
    XD_REQUIRE(ctx, !rooted || (c->root >= 0 && c->root < comm->transport->size), XD_ERROR_ARGUMENT,
               "%s: rank %d is outside [0, %d)", kind, c->root, comm->transport->size);
    XD_REQUIRE(ctx, !pair || c->root != comm->transport->rank, XD_ERROR_ARGUMENT,
               "%s: rank %d is this rank itself", kind, c->root);
    const bool to_all = k == XD_COLLECTIVE_ALL_TO_ALL;
    if (to_all || k == XD_COLLECTIVE_REDUCE_SCATTER || k == XD_COLLECTIVE_SCATTER)
        XD_TRY(xdi_comm_validate_counts(comm, c, c->send_counts, c->send_displacements, "send"));
    if (to_all || k == XD_COLLECTIVE_ALL_GATHER || k == XD_COLLECTIVE_GATHER)
        XD_TRY(xdi_comm_validate_counts(comm, c, c->recv_counts, c->recv_displacements, "recv"));
    if (xdi_comm_reduces(k)) XD_TRY(xdi_comm_validate_reduction(comm, c));
    return xdi_comm_validate_buffers(comm, c);
}

/* ---- the control record ---- */

XD_PRIVATE uint64_t xdi_comm_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t xdi_comm_hash(int from, int to, int64_t count) {
    return xdi_comm_mix(xdi_comm_mix(((uint64_t)(uint32_t)from << 32) | (uint32_t)to) + (uint64_t)count);
}

/* Counts that must be the same on all ranks have the same hash on all. In an all_to_all two ranks have each count, the
 * sender and the receiver: it is added to the hash of one and subtracted from that of the other, so the sum over
 * all ranks is zero. */
static uint64_t xdi_comm_layout(const xd_comm *comm, const xd_collective *c) {
    const int n = comm->transport->size, rank = comm->transport->rank;
    const int64_t *shared = xdi_comm_shared_counts(c);
    uint64_t layout = (uint64_t)c->leaves.total;
    for (int r = 0; shared && r < n; r++) layout = xdi_comm_mix(layout + 1) + xdi_comm_hash(0, r, shared[r]);
    for (int r = 0; c->known_leaves && r < n; r++)
        layout = xdi_comm_mix(layout + 2) + xdi_comm_hash(1, r, c->known_leaves[r].first);
    if (c->kind == XD_COLLECTIVE_ALL_TO_ALL)
        for (int r = 0; r < n; r++)
            layout += xdi_comm_hash(rank, r, c->send_counts[r]) - xdi_comm_hash(r, rank, c->recv_counts[r]);
    return layout;
}

XD_PRIVATE xd_control xdi_comm_control(const xd_comm *comm, const xd_collective *c, xd_result status) {
    const xd_ctx_desc *settings = xd_ctx_settings(comm->ctx);
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.sequence = comm->sequence;
    mine.kind = (uint32_t)c->kind;
    mine.status = (int32_t)status;
    mine.mode = (int32_t)settings->reduction + XDI_COMM_MODES * (int32_t)settings->cpu +
                (int32_t)(xdi_ctx_float_state(comm->ctx) << XDI_COMM_FLOATS_AT);
    mine.products = xd_ctx_products(comm->ctx);
    if (status != XD_OK) return mine;
    mine.dtype = (uint32_t)c->dtype;
    mine.op = xdi_comm_reduces(c->kind) ? (uint32_t)c->op : 0u;
    mine.root = c->root;
    mine.count = (uint64_t)c->count;
    mine.layout = xdi_comm_layout(comm, c);
    mine.extra = (uint64_t)c->leaves.first;
    mine.leaves = (uint64_t)c->leaves.count;
    return mine;
}

/* A transport's error breaks the group permanently. */
XD_PRIVATE xd_result xdi_comm_break(xd_comm *comm, xd_result result) {
    if (result != XD_OK && comm->broken == XD_OK) {
        const xd_error *error = xd_last_error(comm->ctx);
        comm->broken = result;
        comm->culprit = error->result == result ? error->culprit : -1;
    }
    return result;
}

XD_PRIVATE bool xdi_comm_is_forked(const xd_comm *comm) {
    return comm->transport->size > 1 && xdi_ctx_is_elsewhere(comm->ctx, comm->process);
}

XD_PRIVATE xd_result xdi_comm_own(const xd_comm *comm) {
    XD_REQUIRE(comm->ctx, !xdi_comm_is_forked(comm), XD_ERROR_STATE,
               "process %lld was forked from process %lld, which alone is rank %d of this group of %d",
               (long long)xdi_process(), (long long)comm->process, comm->transport->rank,
               comm->transport->size);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_comm_broken(const xd_comm *comm) {
    return comm->broken;
}

XD_PRIVATE int xdi_comm_culprit(const xd_comm *comm) {
    return comm->broken == XD_OK ? -1 : comm->culprit;
}

XD_PRIVATE double xdi_comm_deadline(const xd_comm *comm) {
    const xd_ctx_desc *settings = xd_ctx_settings(comm->ctx);
    const bool first = comm->is_world && comm->sequence <= 1;
    return xd_now(comm->ctx) + (first ? settings->init_timeout_seconds : settings->timeout_seconds);
}

XD_PRIVATE xd_result xdi_comm_admit(const xd_comm *comm, const xd_collective *next, xd_result mine) {
    xd_transport *transport = comm->transport;
    if (!transport->ops->admit) return XD_OK;
    if (mine == XD_OK) return transport->ops->admit(transport, next);
    const xd_error first = *xd_last_error(comm->ctx);
    return transport->ops->admit(transport, NULL) == XD_OK ? XD_OK : xdi_ctx_adopt(comm->ctx, &first);
}

XD_PRIVATE bool xdi_comm_is_recording(const xd_comm *comm) {
    xd_transport *transport = comm->transport;
    return transport->ops->is_recording && transport->ops->is_recording(transport);
}

XD_PRIVATE xd_result xdi_comm_exchange(xd_comm *comm, const xd_control *mine, const xd_collective *next,
                                       double deadline) {
    return xdi_comm_break(comm,
                          comm->transport->ops->control(comm->transport, mine, next, comm->all, deadline));
}

/* ---- agreement ---- */

/* "rank 2" or "ranks 2,3": those whose value is `value`, as world ranks. */
static void xdi_comm_list(const xd_comm *comm, uint64_t value, char *text, size_t size) {
    const uint64_t *values = comm->values;
    const int n = comm->transport->size;
    int found = 0;
    for (int r = 0; r < n; r++) found += values[r] == value;
    size_t used = (size_t)snprintf(text, size, found > 1 ? "ranks " : "rank ");
    for (int r = 0, listed = 0; r < n && used + 16 < size; r++)
        if (values[r] == value)
            used += (size_t)snprintf(text + used, size - used, "%s%d", listed++ ? "," : "",
                                     comm->transport->world_ranks[r]);
}

static uint64_t xdi_comm_get(const xd_control *control, int field) {
    switch (field) {
    case XDI_COMM_KIND: return control->kind;
    case XDI_COMM_DTYPE: return control->dtype;
    case XDI_COMM_OP: return control->op;
    case XDI_COMM_ROOT: return (uint64_t)control->root;
    case XDI_COMM_MODE: return (uint64_t)control->mode & ((1u << XDI_COMM_FLOATS_AT) - 1u);
    case XDI_COMM_FLOATS: return (uint64_t)control->mode >> XDI_COMM_FLOATS_AT;
    case XDI_COMM_PRODUCTS: return control->products;
    case XDI_COMM_COUNT: return control->count;
    default: return control->layout;
    }
}

static void xdi_comm_show(int field, uint64_t value, char *text, size_t size) {
    switch (field) {
    case XDI_COMM_KIND: snprintf(text, size, "called %s", xdi_comm_kind(value)); break;
    case XDI_COMM_DTYPE: snprintf(text, size, "passed dtype %s", xd_dtype_name((xd_dtype)value)); break;
    case XDI_COMM_OP:
        snprintf(text, size, "passed operation %s", xdi_comm_text(xdi_comm_ops, 4, value));
        break;
    case XDI_COMM_ROOT: snprintf(text, size, "passed root %d", (int)value); break;
    case XDI_COMM_MODE:
        snprintf(text, size, "runs in mode %s on %s",
                 xdi_comm_text(xdi_comm_modes, XDI_COMM_MODES, value % XDI_COMM_MODES),
                 xd_cpu_level_name((xd_cpu_level)(value / XDI_COMM_MODES)));
        break;
    case XDI_COMM_FLOATS:
        snprintf(text, size, "computes with %s", xdi_float_state_name((unsigned)value));
        break;
    case XDI_COMM_PRODUCTS:
        if (value == 1)
            snprintf(text, size, "multiplies matrices itself (xd_cuda_desc.cublas \"none\")");
        else
            snprintf(text, size, "multiplies matrices by version %" PRIu64 " of a library", value);
        break;
    default: snprintf(text, size, "passed count %" PRIu64, value); break;
    }
}

/* Compares comm->values with that of rank 0; on a difference both sides are shown by `show` of `field`, or
 * as the number `name` when there is a name. */
XD_PRIVATE xd_result xdi_comm_compare(const xd_comm *comm, const char *kind, int field, const char *name) {
    const uint64_t *values = comm->values;
    const int n = comm->transport->size;
    int other = 1;
    while (other < n && values[other] == values[0]) other++;
    if (other == n) return XD_OK;
    char ranks[160], theirs[80], ours[80];
    xdi_comm_list(comm, values[other], ranks, sizeof ranks);
    if (name) {
        snprintf(theirs, sizeof theirs, "passed %s %" PRIu64, name, values[other]);
        snprintf(ours, sizeof ours, "passed %" PRIu64, values[0]);
    } else {
        xdi_comm_show(field, values[other], theirs, sizeof theirs);
        xdi_comm_show(field, values[0], ours, sizeof ours);
    }
    return XD_FAIL_CULPRIT(comm->ctx, XD_ERROR_MISMATCH, comm->transport->world_ranks[other],
                           "%s: %s %s, rank %d %s", kind, ranks, theirs, comm->transport->world_ranks[0],
                           ours);
}

/* One more round of control records, which contain only two numbers. */
XD_PRIVATE xd_result xdi_comm_tell(xd_comm *comm, uint64_t first, uint64_t second, double deadline) {
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = first;
    mine.extra = second;
    return xdi_comm_exchange(comm, &mine, NULL, deadline);
}

/* A round in which ranks compare one number of their records. */
static xd_result xdi_comm_explain(xd_comm *comm, const char *kind, const char *name, int64_t number,
                                  double deadline) {
    XD_TRY(xdi_comm_tell(comm, (uint64_t)number, 0, deadline));
    for (int r = 0; r < comm->transport->size; r++) comm->values[r] = comm->all[r].count;
    return xdi_comm_compare(comm, kind, XDI_COMM_COUNT, name);
}

/* The hashes of shared counts differ: finds the first count that differs. Every rank sees the same rounds and
 * stops at the same one. */
static xd_result xdi_comm_explain_counts(xd_comm *comm, const xd_collective *c, const char *kind,
                                         double deadline) {
    const int n = comm->transport->size;
    const int64_t *shared = xdi_comm_shared_counts(c);
    const xd_leaves *known = c->known_leaves;
    char name[40];
    for (int k = 0; shared && k < n; k++) {
        snprintf(name, sizeof name, "counts[%d] =", k);
        XD_TRY(xdi_comm_explain(comm, kind, name, shared[k], deadline));
    }
    XD_TRY(xdi_comm_explain(comm, kind, "leaves.total", c->leaves.total, deadline));
    XD_TRY(xdi_comm_explain(comm, kind, "known leaves of so many ranks:", known ? n : 0, deadline));
    for (int k = 0; known && k < n; k++) {
        snprintf(name, sizeof name, "known_leaves[%d].first =", k);
        XD_TRY(xdi_comm_explain(comm, kind, name, known[k].first, deadline));
    }
    return XD_FAIL(comm->ctx, XD_ERROR_MISMATCH, "%s: ranks passed different counts", kind);
}

/* Some count of an all_to_all differs between its two ends: round k compares each rank with its k-th right
 * neighbour. */
static xd_result xdi_comm_explain_pairs(xd_comm *comm, const xd_collective *c, double deadline) {
    const int n = comm->transport->size, rank = comm->transport->rank;
    const int *world = comm->transport->world_ranks;
    for (int k = 0; k < n; k++) {
        const int to = (rank + k) % n, from = (rank - k + n) % n;
        XD_TRY(xdi_comm_tell(comm, (uint64_t)c->send_counts[to], (uint64_t)c->recv_counts[from], deadline));
        for (int r = 0; r < n; r++) {
            const int peer = (r + k) % n;
            if (comm->all[r].count != comm->all[peer].extra)
                return XD_FAIL(comm->ctx, XD_ERROR_MISMATCH,
                               "all_to_all: rank %d sends count %" PRIu64
                               ", but rank %d receives count %" PRIu64,
                               world[r], comm->all[r].count, world[peer], comm->all[peer].extra);
        }
    }
    return XD_FAIL(comm->ctx, XD_ERROR_MISMATCH, "all_to_all: counts do not fit");
}

/* The lowest rank whose status is not XD_OK sends its message to the others, 32 bytes per round: count and the three words
 * behind it. */
static xd_result xdi_comm_refused(xd_comm *comm, const char *kind, int refuser, xd_result mine,
                                  double deadline) {
    enum { CHUNK = 32, ROUNDS = 8 };
    const size_t words = offsetof(xd_control, count);
    char message[CHUNK * ROUNDS + 1];
    const int culprit = comm->transport->world_ranks[refuser];
    const xd_result theirs = (xd_result)comm->all[refuser].status;
    memset(message, 0, sizeof message);
    for (int k = 0; k < ROUNDS; k++) {
        xd_control part;
        memset(&part, 0, sizeof part);
        const xd_error *error = xd_last_error(comm->ctx);
        if (mine != XD_OK && error->result == mine)
            memcpy((char *)&part + words, error->message + k * CHUNK, CHUNK);
        XD_TRY(xdi_comm_exchange(comm, &part, NULL, deadline));
        memcpy(message + k * CHUNK, (const char *)&comm->all[refuser] + words, CHUNK);
    }
    if (comm->alike && theirs != XD_ERROR_MEMORY && refuser != comm->transport->rank)
        return XD_FAIL_CULPRIT(comm->ctx, theirs, culprit, "%s", message);
    if (mine != XD_OK) return mine;
    return XD_FAIL_CULPRIT(comm->ctx, XD_ERROR_PEER, culprit, "%s: rank %d failed with %s: %s", kind, culprit,
                           xd_result_name(theirs), message);
}

/* The leaves of the ranks, in rank order, must cover [0, total) without a gap. */
static xd_result xdi_comm_agree_leaves(const xd_comm *comm, const xd_collective *c, const char *kind) {
    const int n = comm->transport->size;
    uint64_t end = 0;
    for (int r = 0; r <= n; r++) {
        const uint64_t begins = r < n ? comm->all[r].extra : (uint64_t)c->leaves.total;
        if (begins != end)
            return XD_FAIL_CULPRIT(comm->ctx, XD_ERROR_MISMATCH,
                                   comm->transport->world_ranks[r < n ? r : n - 1],
                                   "%s: leaves of rank %d end at %" PRIu64 ", and the next begin at %" PRIu64,
                                   kind, r ? comm->transport->world_ranks[r - 1] : -1, end, begins);
        if (r < n) end += comm->all[r].leaves;
    }
    return XD_OK;
}

/* A rank on the CPU has no part in what devices multiply with: it counts as the first one that is on a device. */
static void xdi_comm_leave_out_hosts(const xd_comm *comm) {
    uint64_t *values = comm->values, first = 0;
    for (int r = 0; r < comm->transport->size && first == 0; r++) first = values[r];
    for (int r = 0; r < comm->transport->size; r++)
        if (values[r] == 0) values[r] = first;
}

/* The same result on every rank, computed from the same records. */
XD_PRIVATE xd_result xdi_comm_agreement(xd_comm *comm, const xd_collective *c, xd_result mine,
                                        double deadline) {
    const int n = comm->transport->size;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    for (int r = 0; r < n; r++)
        if (comm->all[r].status != XD_OK) return xdi_comm_refused(comm, kind, r, mine, deadline);
    for (int field = 0; field < XDI_COMM_FIELDS; field++) {
        if (field == XDI_COMM_LAYOUT && c->kind == XD_COLLECTIVE_ALL_TO_ALL) break;
        bool same = true;
        for (int r = 0; r < n; r++) comm->values[r] = xdi_comm_get(&comm->all[r], field);
        if (field == XDI_COMM_PRODUCTS) xdi_comm_leave_out_hosts(comm);
        for (int r = 0; r < n; r++) same = same && comm->values[r] == comm->values[0];
        if (same) continue;
        if (field == XDI_COMM_LAYOUT) return xdi_comm_explain_counts(comm, c, kind, deadline);
        return xdi_comm_compare(comm, kind, field, NULL);
    }
    if (c->kind == XD_COLLECTIVE_ALL_TO_ALL) {
        uint64_t sum = 0;
        for (int r = 0; r < n; r++) sum += comm->all[r].layout;
        if (sum) return xdi_comm_explain_pairs(comm, c, deadline);
    }
    return c->leaves.total ? xdi_comm_agree_leaves(comm, c, kind) : XD_OK;
}
