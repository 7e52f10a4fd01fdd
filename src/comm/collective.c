/* Collectives: checks, the control record that all ranks compare, counters, and communicators. */

#include "comm/internal.h"
#include "kernel/kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct xd_comm {
    xd_ctx *ctx;
    xd_transport *transport;
    xd_control *all;  /* [size], the records of the call in progress */
    uint64_t *values; /* [size], scratch of the comparison */
    int *members;     /* [size], scratch of split */
    int64_t *counts;  /* [size], scratch of gathers of equal blocks */
    xd_comm_counters counters;
    uint64_t sequence; /* collectives begun, without send and recv */
    double patience;  /* of the messages that are under way: a part of the time limit that they have longer */
    uint64_t refused; /* the last of them that all ranks have seen fail, and that broke nothing */
    bool is_world;    /* its first collective has the longer deadline */
    xd_result broken; /* XD_OK, or what broke the group */
    int culprit;      /* world rank; -1 unknown */
};

static const char *const xdi_comm_kinds[] = { "nothing",        "barrier",    "broadcast",  "all_reduce",
                                              "reduce_scatter", "all_gather", "all_to_all", "gather",
                                              "scatter",        "send",       "recv",       "agree",
                                              "split",          "fork" };
static const char *const xdi_comm_ops[] = { "SUM", "MAX", "MIN", "AVG" };
enum { XDI_COMM_MODES = 3 };
static const char *const xdi_comm_modes[] = { "DETERMINISTIC", "FAST", "INVARIANT" };

static const char *xdi_comm_text(const char *const *texts, size_t size, uint64_t index) {
    return index < size ? texts[index] : "(invalid)";
}

static const char *xdi_comm_kind(uint64_t kind) {
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

static int64_t xdi_comm_nodes(const xd_leaves *leaves) {
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

static int64_t xdi_comm_recv_elements(const xd_collective *c, int rank, int size) {
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

static bool xdi_comm_reduces(xd_collective_kind kind) {
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
    XD_REQUIRE(comm->ctx, counts, XD_ERROR_ARGUMENT, "%s: %s counts are NULL",
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

static xd_result xdi_comm_validate_reduction(const xd_comm *comm, const xd_collective *c) {
    xd_ctx *ctx = comm->ctx;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const xd_leaves *l = &c->leaves;
    XD_REQUIRE(ctx, (int)c->op >= 0 && (int)c->op <= (int)XD_AVG, XD_ERROR_ARGUMENT,
               "%s: operation %d does not exist", kind, (int)c->op);
    XD_REQUIRE(ctx, xd_reduce_supports(c->dtype, c->op), XD_ERROR_DTYPE, "%s: %s of %s is not supported",
               kind, xdi_comm_ops[c->op], xd_dtype_name(c->dtype));
    const bool sum = c->op == XD_SUM || c->op == XD_AVG;
    if (l->total == 0) {
        const bool rounds = sum && xd_dtype_is_floating(c->dtype);
        XD_REQUIRE(ctx, !rounds || xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT,
                   XD_ERROR_UNSUPPORTED,
                   "%s: INVARIANT mode needs the gradient leaves behind a floating-point %s of %s", kind,
                   xdi_comm_ops[c->op], xd_dtype_name(c->dtype));
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

static xd_result xdi_comm_validate_buffers(const xd_comm *comm, const xd_collective *c) {
    const int rank = comm->transport->rank, n = comm->transport->size;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const int64_t send = xdi_comm_send_elements(c, rank, n), recv = xdi_comm_recv_elements(c, rank, n);
    XD_REQUIRE(comm->ctx, c->send || send == 0, XD_ERROR_ARGUMENT,
               "%s: send is NULL for %" PRId64 " elements", kind, send);
    XD_REQUIRE(comm->ctx, c->recv || recv == 0, XD_ERROR_ARGUMENT,
               "%s: recv is NULL for %" PRId64 " elements", kind, recv);
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

static xd_result xdi_comm_validate(const xd_comm *comm, const xd_collective *c) {
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

static uint64_t xdi_comm_mix(uint64_t x) {
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
    if (c->kind == XD_COLLECTIVE_ALL_TO_ALL)
        for (int r = 0; r < n; r++)
            layout += xdi_comm_hash(rank, r, c->send_counts[r]) - xdi_comm_hash(r, rank, c->recv_counts[r]);
    return layout;
}

static xd_control xdi_comm_control(const xd_comm *comm, const xd_collective *c, xd_result status) {
    const xd_ctx_desc *settings = xd_ctx_settings(comm->ctx);
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.sequence = comm->sequence;
    mine.kind = (uint32_t)c->kind;
    mine.status = (int32_t)status;
    mine.mode = (int32_t)settings->reduction + XDI_COMM_MODES * (int32_t)settings->cpu;
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
static xd_result xdi_comm_break(xd_comm *comm, xd_result result) {
    if (result != XD_OK && comm->broken == XD_OK) {
        const xd_error *error = xd_last_error(comm->ctx);
        comm->broken = result;
        comm->culprit = error->result == result ? error->culprit : -1;
    }
    return result;
}

XD_PRIVATE xd_result xdi_comm_broken(const xd_comm *comm) {
    return comm->broken;
}

XD_PRIVATE int xdi_comm_culprit(const xd_comm *comm) {
    return comm->broken == XD_OK ? -1 : comm->culprit;
}

static double xdi_comm_deadline(const xd_comm *comm) {
    const xd_ctx_desc *settings = xd_ctx_settings(comm->ctx);
    const bool first = comm->is_world && comm->sequence <= 1;
    return xd_now(comm->ctx) + (first ? settings->init_timeout_seconds : settings->timeout_seconds);
}

static xd_result xdi_comm_exchange(xd_comm *comm, const xd_control *mine, const xd_collective *next,
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

typedef enum xdi_comm_field {
    XDI_COMM_KIND,
    XDI_COMM_DTYPE,
    XDI_COMM_OP,
    XDI_COMM_ROOT,
    XDI_COMM_MODE,
    XDI_COMM_COUNT,
    XDI_COMM_LAYOUT,
    XDI_COMM_FIELDS
} xdi_comm_field;

static uint64_t xdi_comm_get(const xd_control *control, int field) {
    switch (field) {
    case XDI_COMM_KIND: return control->kind;
    case XDI_COMM_DTYPE: return control->dtype;
    case XDI_COMM_OP: return control->op;
    case XDI_COMM_ROOT: return (uint64_t)control->root;
    case XDI_COMM_MODE: return (uint64_t)control->mode;
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
    default: snprintf(text, size, "passed count %" PRIu64, value); break;
    }
}

/* Compares comm->values with that of rank 0; on a difference both sides are shown by `show` of `field`, or
 * as the number `name` when there is a name. */
static xd_result xdi_comm_compare(const xd_comm *comm, const char *kind, int field, const char *name) {
    const uint64_t *values = comm->values;
    const int n = comm->transport->size;
    int other = 1;
    while (other < n && values[other] == values[0]) other++;
    if (other == n) return XD_OK;
    char ranks[160], theirs[64], ours[64];
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
static xd_result xdi_comm_tell(xd_comm *comm, uint64_t first, uint64_t second, double deadline) {
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = first;
    mine.extra = second;
    return xdi_comm_exchange(comm, &mine, NULL, deadline);
}

/* The hashes of shared counts differ: finds the first count that differs. Every rank sees the same rounds and
 * stops at the same one. */
static xd_result xdi_comm_explain_counts(xd_comm *comm, const xd_collective *c, const char *kind,
                                         double deadline) {
    const int n = comm->transport->size;
    const int64_t *shared = xdi_comm_shared_counts(c);
    for (int k = 0; k <= n; k++) {
        if (k < n && !shared) continue;
        char name[32];
        snprintf(name, sizeof name, k < n ? "counts[%d] =" : "leaves.total", k);
        XD_TRY(xdi_comm_tell(comm, (uint64_t)(k < n ? shared[k] : c->leaves.total), 0, deadline));
        for (int r = 0; r < n; r++) comm->values[r] = comm->all[r].count;
        XD_TRY(xdi_comm_compare(comm, kind, XDI_COMM_COUNT, name));
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

/* The lowest rank whose status is not XD_OK sends its message to the others, 32 bytes per round. */
static xd_result xdi_comm_refused(xd_comm *comm, const char *kind, int refuser, xd_result mine,
                                  double deadline) {
    enum { CHUNK = 32, ROUNDS = 8 };
    char message[CHUNK * ROUNDS + 1];
    const int culprit = comm->transport->world_ranks[refuser];
    const xd_result theirs = (xd_result)comm->all[refuser].status;
    memset(message, 0, sizeof message);
    for (int k = 0; k < ROUNDS; k++) {
        xd_control part;
        memset(&part, 0, sizeof part);
        const xd_error *error = xd_last_error(comm->ctx);
        if (mine != XD_OK && error->result == mine) memcpy(&part.count, error->message + k * CHUNK, CHUNK);
        XD_TRY(xdi_comm_exchange(comm, &part, NULL, deadline));
        memcpy(message + k * CHUNK, &comm->all[refuser].count, CHUNK);
    }
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

/* The same result on every rank, computed from the same records. */
static xd_result xdi_comm_agreement(xd_comm *comm, const xd_collective *c, xd_result mine, double deadline) {
    const int n = comm->transport->size;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    for (int r = 0; r < n; r++)
        if (comm->all[r].status != XD_OK) return xdi_comm_refused(comm, kind, r, mine, deadline);
    for (int field = 0; field < XDI_COMM_FIELDS; field++) {
        if (field == XDI_COMM_LAYOUT && c->kind == XD_COLLECTIVE_ALL_TO_ALL) break;
        bool same = true;
        for (int r = 0; r < n; r++) {
            comm->values[r] = xdi_comm_get(&comm->all[r], field);
            same = same && comm->values[r] == comm->values[0];
        }
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

/* All messages at once, or the refusals of all. `messages` has room for all; those that nobody can be told of are left out of it. */
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

XD_API xd_result xd_exchange(xd_comm *comm, const xd_collective *records, int count) {
    return xdi_comm_exchange_records(comm, records, count, false);
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
    if (mine == XD_OK && comm->transport->size > 1) mine = xdi_ctx_settle(comm->ctx);
    comm->sequence++;
    *deadline = xdi_comm_deadline(comm);
    const xd_control control = xdi_comm_control(comm, c, mine);
    XD_TRY(xdi_comm_exchange(comm, &control, mine == XD_OK ? c : NULL, *deadline));
    const xd_result result = xdi_comm_agreement(comm, c, mine, *deadline);
    if (result != XD_OK && comm->broken == XD_OK) comm->refused = comm->sequence;
    return result;
}

XD_API xd_result xd_collective_run(xd_comm *comm, const xd_collective *collective) {
    xd_collective c = *collective;
    if (!xdi_comm_reduces(c.kind)) memset(&c.leaves, 0, sizeof c.leaves);
    if (!c.stream) c.stream = xd_ctx_settings(comm->ctx)->stream;
    XD_TRY(xdi_comm_whole(comm, &c));
    if (xdi_comm_is_message(&c)) return xdi_comm_run_pair(comm, &c);
    double deadline;
    c.sequence = comm->sequence + 1;
    XD_TRY(xdi_comm_run(comm, &c, xdi_comm_validate(comm, &c), &deadline));
    if (c.kind != XD_COLLECTIVE_BARRIER)
        XD_TRY(xdi_comm_break(comm, comm->transport->ops->execute(comm->transport, &c, deadline)));
    xdi_comm_count(comm, &c);
    xd_log(comm->ctx, XD_LOG_TRACE, "%s %" PRIu64 " on %d ranks: %" PRIu64 " bytes sent so far",
           xdi_comm_kind((uint64_t)c.kind), c.sequence, comm->transport->size, comm->counters.bytes_sent);
    return XD_OK;
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
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_BARRIER, NULL, NULL, XD_DTYPE_NONE);
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_BROADCAST, data, data, dtype);
    c.count = count;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                               xd_reduce_op op) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_REDUCE, send, recv, dtype);
    c.count = count;
    c.op = op;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                                   xd_dtype dtype, xd_reduce_op op) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_REDUCE_SCATTER, send, recv, dtype);
    c.send_counts = counts;
    c.op = op;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                               xd_dtype dtype) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_GATHER, send, recv, dtype);
    c.recv_counts = counts;
    return xd_collective_run(comm, &c);
}

XD_PRIVATE xd_result xdi_comm_all_gather_equal(xd_comm *comm, const void *send, void *recv, int64_t count,
                                               xd_dtype dtype) {
    for (int i = 0; i < comm->transport->size; i++) comm->counts[i] = count;
    return xd_all_gather(comm, send, recv, comm->counts, dtype);
}

XD_API xd_result xd_all_to_all(xd_comm *comm, const void *send, const int64_t *send_counts, void *recv,
                               const int64_t *recv_counts, xd_dtype dtype) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_TO_ALL, send, recv, dtype);
    c.send_counts = send_counts;
    c.recv_counts = recv_counts;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                           int root) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_GATHER, send, recv, dtype);
    c.recv_counts = counts;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                            xd_dtype dtype, int root) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_SCATTER, send, recv, dtype);
    c.send_counts = counts;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_SEND, data, NULL, dtype);
    c.count = count;
    c.root = to;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from) {
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

XD_API xd_result xd_agree(xd_comm *comm, xd_result mine) {
    return xdi_comm_agree_count(comm, mine, 0);
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
    return comm->transport->rank;
}

XD_API int xd_comm_size(const xd_comm *comm) {
    return comm->transport->size;
}

XD_API int xd_comm_world_rank(const xd_comm *comm, int rank) {
    return rank >= 0 && rank < comm->transport->size ? comm->transport->world_ranks[rank] : -1;
}

XD_API xd_ctx *xd_comm_ctx(const xd_comm *comm) {
    return comm->ctx;
}

XD_API xd_comm_counters xd_comm_traffic(const xd_comm *comm) {
    return comm->counters;
}

XD_API xd_result xd_comm_create(xd_ctx *ctx, xd_transport *transport, xd_comm **out) {
    const size_t n = (size_t)transport->size;
    xd_comm *comm = (xd_comm *)xd_allocate(ctx, sizeof *comm);
    if (!comm) {
        transport->ops->destroy(transport);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a group handle");
    }
    comm->ctx = ctx;
    comm->transport = transport;
    xdi_ctx_join(ctx, n > 1 ? 1 : 0);
    comm->culprit = -1;
    comm->is_world = true;
    comm->all = (xd_control *)xd_allocate(ctx, n * sizeof *comm->all);
    comm->values = (uint64_t *)xd_allocate(ctx, n * sizeof *comm->values);
    comm->members = (int *)xd_allocate(ctx, n * sizeof *comm->members);
    comm->counts = (int64_t *)xd_allocate(ctx, n * sizeof *comm->counts);
    if (!comm->all || !comm->values || !comm->members || !comm->counts) {
        xd_comm_destroy(comm);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the handle of a group of %d ranks", (int)n);
    }
    *out = comm;
    return XD_OK;
}

XD_API void xd_comm_destroy(xd_comm *comm) {
    if (!comm) return;
    xdi_ctx_join(comm->ctx, comm->transport->size > 1 ? -1 : 0);
    comm->transport->ops->destroy(comm->transport);
    xd_release(comm->ctx, comm->counts);
    xd_release(comm->ctx, comm->members);
    xd_release(comm->ctx, comm->values);
    xd_release(comm->ctx, comm->all);
    xd_release(comm->ctx, comm);
}

XD_API void xd_comm_abort(xd_comm *comm) {
    comm->transport->ops->abort(comm->transport);
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
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_SPLIT, NULL, NULL, XD_DTYPE_NONE);
    XD_TRY(xdi_comm_whole(comm, &c));
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
    xd_comm *twin = NULL;
    XD_TRY(xd_agree(comm, xdi_comm_may_fork(comm, ctx)));
    XD_TRY(xdi_comm_fork(comm, ctx, &twin));
    XD_REQUIRE(comm->ctx, twin, XD_ERROR_UNSUPPORTED, "%s cannot fork a group of %d ranks",
               comm->transport->ops->name, comm->transport->size);
    *out = twin;
    return XD_OK;
}
