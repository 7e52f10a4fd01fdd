/* Collectives of ranks that are threads: what each of them moves and adds, in memory of the host or of a device. */

#include "comm/threads_internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

#include <string.h>

static xdi_threads_page *xdi_threads_page_of(const xdi_threads *t, int rank) {
    return &t->group->slots[rank].page[t->round & 1];
}

/* ---- memory of a device ----
 *
 * The ranks' threads meet in rounds as for host memory, but the data moves later, on their streams: a rank records `ready`
 * before it publishes its addresses, and streams of peers wait for that; each records `done` after its work, and every
 * stream waits for all of these. The host never waits for a device. */

XD_PRIVATE bool xdi_threads_sees_device(const xdi_threads *t, const xd_collective *c) {
    const xd_kernels *kernels = xd_ctx_settings(t->base.ctx)->kernels; /* NULL: the CPU's */
    const void *memory = c->send ? c->send : c->recv;
    return kernels && kernels->device != XD_DEVICE_CPU && memory && kernels->memory.owns(t->base.ctx, memory);
}

XD_PRIVATE xd_launch xdi_threads_launch(const xdi_threads *t, const xd_collective *c) {
    xd_launch launch = xd_ctx_launch(t->base.ctx);
    if (c->stream) launch.stream = c->stream;
    return launch;
}

/* Records that what c sends is complete at this point of the stream. */
XD_PRIVATE xd_result xdi_threads_ready(const xdi_threads *t, const xd_collective *c) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    xdi_threads_slot *slot = t->slot;
    slot->event_destroy = memory->event_destroy;
    if (!slot->ready) slot->ready = memory->event_create(t->base.ctx);
    if (!slot->done) slot->done = memory->event_create(t->base.ctx);
    XD_REQUIRE(t->base.ctx, slot->ready && slot->done, XD_ERROR_DEVICE,
               "the device has no events for a group of ranks");
    return memory->event_record(&launch, slot->ready);
}

/* A failure of this rank's device in the middle of a collective: peers cannot go on without its part. */
XD_PRIVATE xd_result xdi_threads_lost(const xdi_threads *t, xd_result result) {
    if (result == XD_OK) return result;
    xdi_threads_break(t->group->world, XD_ERROR_PEER, t->group->world_ranks[t->base.rank]);
    xdi_threads_settle(t);
    xdi_threads_drain(t);
    return result;
}

/* Copies between this rank's memory and a peer's. */
XD_PRIVATE xd_result xdi_threads_bytes(const xdi_threads *t, const xd_collective *c, void *to,
                                       const void *from, size_t bytes) {
    if (bytes == 0 || to == from) return XD_OK;
    if (t->on_device) {
        const xd_launch launch = xdi_threads_launch(t, c);
        return xd_ctx_kernels(t->base.ctx)->memory.copy(&launch, to, from, bytes, XD_COPY_ON_DEVICE);
    }
    xdi_copy_bytes(to, from, bytes);
    return XD_OK;
}

/* ---- collectives ---- */

static xd_result xdi_threads_publish(const xdi_threads *t, xdi_threads_page *page, const xd_collective *c) {
    const int n = t->base.size;
    page->record = *c;
    page->data = c->send;
    for (int r = 0; c->send_counts && r < n; r++)
        page->offsets[r] = xdi_comm_offset(c->send_counts, c->send_displacements, r);
    const size_t bytes = (size_t)xdi_comm_send_elements(c, t->base.rank, n) * xd_dtype_size(c->dtype);
    page->on_device = xdi_threads_sees_device(t, c);
    page->is_short = bytes <= sizeof page->payload && !c->send_displacements && !page->on_device;
    if (page->on_device) return xdi_threads_ready(t, c);
    if (!page->is_short) return XD_OK;
    if (bytes) memcpy(page->payload, c->send, bytes);
    page->data = page->payload;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_threads_control(xd_transport *transport, const xd_control *mine,
                                         const xd_collective *next, xd_control *all, double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    if (xdi_threads_failure(t->group->world)) return xdi_threads_report(t, false);
    xdi_threads_page *page = &t->slot->page[(t->round + 1) & 1];
    page->control = *mine;
    if (next) XD_TRY(xdi_threads_lost(t, xdi_threads_publish(t, page, next)));
    XD_TRY(xdi_threads_round(t, deadline));
    for (int r = 0; r < t->base.size; r++) all[r] = xdi_threads_page_of(t, r)->control;
    return XD_OK;
}

/* Copies `count` elements from element `from` of a peer's data to element `to` of recv. */
static xd_result xdi_threads_copy(const xdi_threads *t, const xd_collective *c, int64_t to,
                                  const xdi_threads_page *page, int64_t from, int64_t count) {
    const size_t size = xd_dtype_size(c->dtype);
    if (count <= 0) return XD_OK; /* either side may be NULL */
    return xdi_threads_bytes(t, c, (char *)c->recv + (size_t)to * size,
                             (const char *)page->data + (size_t)from * size, (size_t)count * size);
}

/* Where `at` elements behind the beginning of this rank's block each rank's data is. */
static void xdi_threads_locate(const xdi_threads *t, int64_t begin_own, bool by_offset, int64_t at,
                               size_t size) {
    for (int r = 0; r < t->base.size; r++) {
        const xdi_threads_page *page = xdi_threads_page_of(t, r);
        const int64_t begin = at + (by_offset ? page->offsets[t->base.rank] : begin_own);
        t->leaves[r] = page->record.leaves;
        t->pieces[r] = page->data ? (const char *)page->data + (size_t)begin * size : NULL;
    }
}

static xd_result xdi_threads_add(const xdi_threads *t, const xd_collective *c, void *out, int64_t stride,
                                 int64_t count) {
    const xd_reduce_kernels *reduce =
        &(t->on_device ? xd_ctx_kernels(t->base.ctx) : xd_ctx_host_kernels(t->base.ctx))->reduce;
    const xd_launch launch = xdi_threads_launch(t, c);
    if (c->leaves.total)
        return reduce->leaves(&launch, out, t->pieces, t->leaves, t->base.size, stride, count, c->dtype,
                              c->op);
    return reduce->pieces(&launch, out, t->pieces, t->base.size, count, c->dtype, c->op);
}

/* Whether this rank's kernels can read all pieces. */
static bool xdi_threads_reaches(const xdi_threads *t) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    bool all = true;
    for (int r = 0; r < t->base.size && t->on_device && memory->reaches; r++)
        all = all && (!t->pieces[r] || memory->reaches(t->base.ctx, t->pieces[r]));
    return all;
}

/* Copies the nodes of all pieces, `stride` elements apart, to `staged`, which then has the pieces. */
static xd_result xdi_threads_stage(const xdi_threads *t, const xd_collective *c, char *staged, int64_t stride,
                                   int64_t count) {
    const size_t size = xd_dtype_size(c->dtype), bytes = (size_t)count * size;
    for (int r = 0; r < t->base.size; r++) {
        const char *from = (const char *)t->pieces[r];
        const int64_t nodes = xdi_comm_nodes(&t->leaves[r]);
        t->pieces[r] = staged;
        for (int64_t k = 0; k < nodes; k++, staged += bytes)
            XD_TRY(xdi_threads_bytes(t, c, staged, from + (size_t)(k * stride) * size, bytes));
    }
    return XD_OK;
}

/* On a device without access to that of some other rank: a tile after another is copied here and added. */
static xd_result xdi_threads_reduce_staged(const xdi_threads *t, const xd_collective *c, char *out,
                                           int64_t begin_own, bool by_offset, int64_t stride, int64_t count) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const size_t size = xd_dtype_size(c->dtype);
    int64_t nodes = 0;
    for (int r = 0; r < t->base.size; r++) nodes += xdi_comm_nodes(&t->leaves[r]);
    const int64_t room = XDI_THREADS_STAGING / (nodes * (int64_t)size) + 1,
                  tile = room < count ? room : count;
    char *staged = (char *)memory->allocate(t->base.ctx, (size_t)(tile * nodes) * size);
    XD_REQUIRE(t->base.ctx, staged, XD_ERROR_MEMORY,
               "no room for %lld nodes of %lld elements from GPUs that this one cannot access",
               (long long)nodes, (long long)tile);
    xd_result result = XD_OK;
    for (int64_t at = 0; at < count && result == XD_OK; at += tile) {
        const int64_t n = count - at < tile ? count - at : tile;
        xdi_threads_locate(t, begin_own, by_offset, at, size);
        result = xdi_threads_stage(t, c, staged, stride, n);
        if (result == XD_OK) result = xdi_threads_add(t, c, out + (size_t)at * size, n, n);
    }
    memory->release(t->base.ctx, staged);
    return result;
}

/* Reduces `count` elements of all ranks' data into out, from element begin_own or, by_offset, from the block that
 * each rank has for this one; `stride` elements from node to node. */
static xd_result xdi_threads_reduce(const xdi_threads *t, const xd_collective *c, void *out,
                                    int64_t begin_own, bool by_offset, int64_t stride, int64_t count) {
    if (count == 0) return XD_OK;
    xdi_threads_locate(t, begin_own, by_offset, 0, xd_dtype_size(c->dtype));
    if (xdi_threads_reaches(t)) return xdi_threads_add(t, c, out, stride, count);
    return xdi_threads_reduce_staged(t, c, (char *)out, begin_own, by_offset, stride, count);
}

/* Each rank reduces its block and stores the sums into every rank's recv: in place is fine, since no other rank reads
 * that block. Short arrays are reduced whole by every rank. */
static xd_result xdi_threads_all_reduce(const xdi_threads *t, const xd_collective *c, bool is_short) {
    const size_t size = xd_dtype_size(c->dtype);
    if (is_short) return xdi_threads_reduce(t, c, c->recv, 0, false, c->count, c->count);
    int64_t begin, end;
    xdi_comm_piece(c->count, t->base.size, t->base.rank, &begin, &end);
    const int64_t tile =
        t->on_device ? c->count : 4096; /* a tile stays in the cache; on a device few launches are better */
    for (int64_t at = begin; at < end; at += tile) {
        const int64_t n = end - at < tile ? end - at : tile;
        char *sums = (char *)c->recv + (size_t)at * size;
        XD_TRY(xdi_threads_reduce(t, c, sums, at, false, c->count, n));
        for (int r = 0; r < t->base.size; r++)
            if (r != t->base.rank)
                XD_TRY(xdi_threads_bytes(t, c,
                                         (char *)xdi_threads_page_of(t, r)->record.recv + (size_t)at * size,
                                         sums, (size_t)n * size));
    }
    return XD_OK;
}

/* A block that is in its place already is not written: others may be reading it. */
static xd_result xdi_threads_collect(const xdi_threads *t, const xd_collective *c) {
    const size_t size = xd_dtype_size(c->dtype);
    for (int r = 0; r < t->base.size; r++) {
        const xdi_threads_page *page = xdi_threads_page_of(t, r);
        const int64_t from = c->kind == XD_COLLECTIVE_ALL_TO_ALL ? page->offsets[t->base.rank] : 0,
                      to = xdi_comm_offset(c->recv_counts, c->recv_displacements, r);
        const bool in_place =
            r == t->base.rank && c->recv_counts[r] > 0 && c->send == (char *)c->recv + (size_t)to * size;
        if (!in_place) XD_TRY(xdi_threads_copy(t, c, to, page, from, c->recv_counts[r]));
    }
    return XD_OK;
}

static xd_result xdi_threads_move(const xdi_threads *t, const xd_collective *c, bool is_short) {
    const int rank = t->base.rank;
    const xdi_threads_page *root = xdi_threads_page_of(t, c->root);
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return xdi_threads_all_reduce(t, c, is_short);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xdi_threads_reduce(t, c, c->recv, 0, true, xdi_comm_total(c->send_counts, t->base.size),
                                  c->send_counts[rank]);
    case XD_COLLECTIVE_BROADCAST:
        return rank != c->root ? xdi_threads_copy(t, c, 0, root, 0, c->count) : XD_OK;
    case XD_COLLECTIVE_SCATTER:
        return xdi_threads_copy(t, c, 0, root, root->offsets[rank], c->send_counts[rank]);
    case XD_COLLECTIVE_GATHER: return rank == c->root ? xdi_threads_collect(t, c) : XD_OK;
    default: return xdi_threads_collect(t, c);
    }
}

/* Marks this rank as accessing memory of peers; false when the world is broken and their memory may be freed. */
XD_PRIVATE bool xdi_threads_enter(const xdi_threads *t) {
    __atomic_store_n(&t->slot->busy, 1u, __ATOMIC_SEQ_CST);
    if (!xdi_threads_failure(t->group->world)) return true;
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
    return false;
}

XD_PRIVATE void xdi_threads_exit(const xdi_threads *t) {
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
}

/* This rank's part on its stream, after the peers' `ready`. */
static xd_result xdi_threads_move_device(const xdi_threads *t, const xd_collective *c) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    for (int r = 0; r < t->base.size; r++)
        if (r != t->base.rank && xdi_threads_page_of(t, r)->on_device)
            XD_TRY(memory->event_wait(&launch, t->group->slots[r].ready));
    XD_TRY(xdi_threads_move(t, c, false));
    return t->slot->done ? memory->event_record(&launch, t->slot->done) : XD_OK;
}

/* Makes the stream wait until every peer has completed its part. */
static xd_result xdi_threads_follow(const xdi_threads *t, const xd_collective *c) {
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    for (int r = 0; r < t->base.size; r++)
        if (r != t->base.rank && t->group->slots[r].done)
            XD_TRY(memory->event_wait(&launch, t->group->slots[r].done));
    return XD_OK;
}

/* This rank is busy until its stream waits for all peers: work it has launched may run at any time. */
static xd_result xdi_threads_execute_device(xdi_threads *t, const xd_collective *c, double deadline) {
    t->stream = xdi_threads_launch(t, c).stream;
    XD_TRY(xdi_threads_lost(t, xdi_threads_move_device(t, c)));
    XD_TRY(xdi_threads_round(t, deadline));
    XD_TRY(xdi_threads_lost(t, xdi_threads_follow(t, c)));
    xdi_threads_exit(t);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_threads_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    bool is_short = true;
    t->on_device = false;
    for (int r = 0; r < t->base.size; r++) {
        is_short = is_short && xdi_threads_page_of(t, r)->is_short;
        t->on_device = t->on_device || xdi_threads_page_of(t, r)->on_device;
    }
    if (is_short) return xdi_threads_move(t, c, true);
    if (!xdi_threads_enter(t)) return xdi_threads_report(t, true);
    if (t->on_device) return xdi_threads_execute_device(t, c, deadline);
    const xd_result moved = xdi_threads_move(t, c, false);
    xdi_threads_exit(t);
    XD_TRY(moved);
    return xdi_threads_round(t, deadline);
}
