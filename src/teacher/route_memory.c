/* The memory of a route: its rings, events, windows and message buffers. */

#include "teacher/route_internal.h"

#include <string.h>
#include <time.h>

/* ---- rings ---- */

/* This rank's rows on a GPU. */
static xd_result xdi_route_place_rows(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    const int me = route->plan.rank;
    size_t head, rows;
    xdi_route_ring_bytes(route, me, &head, &rows); /* it fitted before */
    if (route->kernels->device == XD_DEVICE_CPU || rows == 0) return XD_OK;
    rings->rows[me] = (char *)route->kernels->memory.allocate(route->ctx, rows);
    rings->own_rows = rings->rows[me];
    XD_REQUIRE(route->ctx, rings->own_rows, XD_ERROR_MEMORY, "the GPU has no room for a ring of %zu bytes",
               rows);
    return XD_OK;
}

static xd_result xdi_route_place_rings(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    xd_ctx *ctx = route->ctx;
    size_t total, on_device;
    const bool own = !route->shared || route->plan.ranks == 1;
    void *memory = rings->node ? xdi_node_memory(rings->node) : NULL;
    const int large = xdi_route_lay_rings(route, NULL, &total, &on_device);
    xd_result result = large < 0 ? XD_OK
                                 : XD_FAIL(ctx, XD_ERROR_MEMORY, "the ring of rank %d is too large",
                                           xd_comm_world_rank(route->comm, large));
    if (result == XD_OK && own) {
        memory = rings->memory = xd_allocate(ctx, total);
        if (!memory) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a ring of %zu bytes", total);
    }
    if (result == XD_OK && !rings->node) result = xdi_route_place_rows(route);
    XD_TRY(xd_agree(route->comm, result));
    if (!own && !memory) XD_TRY(xdi_threads_share(route->comm, total, &memory));
    route->bytes += total + on_device;
    rings->left = (uint64_t *)memory;
    xdi_route_lay_rings(route, (char *)memory, &total, &on_device);
    return XD_OK;
}

/* ---- shared on a GPU: the links ----
 *
 * What ranks know of one another: link 0 is the address of a rank's rows, 1 + i the event of its slot i, slots + 1
 * that of its reads. Threads of a process share addresses. Events live until the last rank has left, because others
 * may wait for them after their rank has left. */

static int64_t *xdi_route_link(const xdi_route_rings *rings, int rank, int64_t i) {
    return rings->links + rank * ((int64_t)rings->slots + 2) + i;
}

static void *xdi_route_event(const xdi_route_rings *rings, int rank, int64_t i) {
    return (void *)(intptr_t)*xdi_route_link(rings, rank, i);
}

static xd_result xdi_route_make_links(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    const int64_t slots = route->d.slots;
    size_t words;
    const bool fits =
        xdi_size_multiply((size_t)slots + 2, (size_t)route->plan.ranks * sizeof(int64_t), &words);
    if (fits) rings->links = (int64_t *)xd_allocate(route->ctx, words);
    XD_REQUIRE(route->ctx, rings->links, XD_ERROR_MEMORY, "no room for the events of %lld slots",
               (long long)slots);
    *xdi_route_link(rings, route->plan.rank, 0) = (int64_t)(intptr_t)rings->own_rows;
    for (int64_t i = 1; i <= slots + 1; i++) {
        if (!xdi_route_has_side(route, i <= slots ? XDI_ROUTE_TEACHER : XDI_ROUTE_STUDENT)) continue;
        void *event = route->kernels->memory.event_create(route->ctx);
        XD_REQUIRE(route->ctx, event, XD_ERROR_DEVICE, "the device has no events for a ring of %lld slots",
                   (long long)slots);
        *xdi_route_link(rings, route->plan.rank, i) = (int64_t)(intptr_t)event;
    }
    return XD_OK;
}

static xd_result xdi_route_trade_links(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    if (!route->shared || rings->node || route->kernels->device == XD_DEVICE_CPU) return XD_OK;
    XD_TRY(xd_agree(route->comm, xdi_route_make_links(route)));
    XD_TRY(xdi_comm_all_gather_equal(route->comm, xdi_route_link(rings, route->plan.rank, 0), rings->links,
                                     (int64_t)route->d.slots + 2, XD_DTYPE_I64));
    rings->linked = true;
    for (int r = 0; r < route->plan.ranks; r++)
        rings->rows[r] = (char *)(intptr_t)*xdi_route_link(rings, r, 0);
    return XD_OK;
}

/* The slot of the micro-batch to be posted is complete at this point of the stream. */
XD_PRIVATE xd_result xdi_route_show(const xd_route *route) {
    const xd_launch launch = xd_ctx_launch(route->ctx);
    if (!route->rings.linked) return XD_OK;
    const int64_t slot = (int64_t)(route->posted % (uint64_t)route->d.slots);
    return route->kernels->memory.event_record(&launch,
                                               xdi_route_event(&route->rings, route->plan.rank, 1 + slot));
}

/* The stream goes on when the slot is complete; its counter has been seen. */
XD_PRIVATE xd_result xdi_route_follow_slot(const xd_route *route, int teacher, uint64_t number) {
    const xd_launch launch = xd_ctx_launch(route->ctx);
    if (!route->rings.linked) return XD_OK;
    const int64_t slot = (int64_t)(number % (uint64_t)route->d.slots);
    return route->kernels->memory.event_wait(&launch, xdi_route_event(&route->rings, teacher, 1 + slot));
}

/* Records that all kernels reading the slots to be released have been launched so far. */
XD_PRIVATE xd_result xdi_route_finish_reading(const xd_route *route) {
    const xd_launch launch = xd_ctx_launch(route->ctx);
    if (!route->rings.linked) return XD_OK;
    return route->kernels->memory.event_record(
        &launch, xdi_route_event(&route->rings, route->plan.rank, (int64_t)route->d.slots + 1));
}

/* The stream goes on when the student has read what it released; its counter has been seen. */
XD_PRIVATE xd_result xdi_route_follow_reader(const xd_route *route, int student) {
    const xd_launch launch = xd_ctx_launch(route->ctx);
    if (!route->rings.linked) return XD_OK;
    return route->kernels->memory.event_wait(
        &launch, xdi_route_event(&route->rings, student, (int64_t)route->d.slots + 1));
}

static void xdi_route_drop_events(const xd_kernels *kernels, const xdi_route_rings *rings, int rank) {
    for (int64_t i = 1; i <= (int64_t)rings->slots + 1; i++)
        if (xdi_route_event(rings, rank, i)) kernels->memory.event_destroy(xdi_route_event(rings, rank, i));
}

/* This rank posts nothing more and reads no more rings. */
static void xdi_route_say_goodbye(const xd_route *route) {
    const xdi_route_plan *plan = &route->plan;
    const xd_launch launch = xd_ctx_launch(route->ctx);
    if (xdi_route_has_side(route, XDI_ROUTE_TEACHER))
        __atomic_fetch_or(xdi_route_posted(&route->rings, plan->rank), XDI_ROUTE_GONE, __ATOMIC_RELEASE);
    if (!xdi_route_has_side(route, XDI_ROUTE_STUDENT)) return;
    if (route->kernels->memory.synchronize(&launch) == XD_ERROR_TIMEOUT) return; /* it may still read */
    for (int r = 0; r < plan->ranks; r++)
        if (plan->halves[XDI_ROUTE_TEACHER][r].sample_count > 0)
            __atomic_fetch_or(xdi_route_released(&route->rings, r, plan->rank), XDI_ROUTE_GONE,
                              __ATOMIC_RELEASE);
}

/* Waits until no rank reads this rank's rows; false when that is not certain. */
static bool xdi_route_wait_readers(const xd_route *route) {
    const int me = route->plan.rank;
    const struct timespec nap = { 0, XDI_ROUTE_NAP };
    const xd_launch launch = xd_ctx_launch(route->ctx);
    const double deadline = xd_now(route->ctx) + xd_ctx_settings(route->ctx)->timeout_seconds;
    for (int s = 0; s < route->plan.ranks; s++) {
        if (s == me || !route->rings.used_by[s]) continue;
        while (__atomic_load_n(xdi_route_released(&route->rings, me, s), __ATOMIC_ACQUIRE) < route->posted) {
            if (xd_now(route->ctx) > deadline) return false;
            nanosleep(&nap, NULL);
        }
        if (xdi_route_follow_reader(route, s) != XD_OK) return false;
    }
    return route->kernels->memory.synchronize(&launch) != XD_ERROR_TIMEOUT;
}

/* False when this rank's rows may still be read: then they are not freed. */
static bool xdi_route_part(const xd_route *route) {
    const xdi_route_rings *rings = &route->rings;
    const int ranks = route->plan.ranks;
    if (!rings->links || xdi_comm_is_forked(route->comm)) return true;
    if (!rings->linked) {
        xdi_route_drop_events(route->kernels, rings, route->plan.rank);
        return true;
    }
    xdi_route_say_goodbye(route);
    const bool alone = xdi_route_wait_readers(route);
    const bool last = __atomic_add_fetch(rings->left, 1, __ATOMIC_ACQ_REL) == (uint64_t)ranks;
    for (int r = 0; r < ranks && last; r++) xdi_route_drop_events(route->kernels, rings, r);
    return alone;
}

/* ---- windows and messages ---- */

/* The maximum that one step sends and takes, in elements, and in samples with ids. */
typedef struct xdi_route_traffic {
    int64_t sent, taken, sent_ids, taken_ids;
} xdi_route_traffic;

static xdi_route_traffic xdi_route_most_traffic(const xdi_route_plan *plan) {
    xdi_route_traffic most = { 0, 0, 0, 0 };
    for (int64_t i = 0; i < plan->takes; i++) {
        xdi_route_traffic sum = { 0, 0, 0, 0 };
        for (int64_t p = plan->step_begin[i]; p < plan->step_begin[i + 1]; p++) {
            const xdi_route_piece *piece = &plan->pieces[p];
            const int64_t elements = piece->positions * piece->columns, ids = piece->brings_ids ? 1 : 0;
            sum.sent += piece->teacher == plan->rank ? elements : 0;
            sum.sent_ids += piece->teacher == plan->rank ? ids : 0;
            sum.taken += piece->student == plan->rank ? elements : 0;
            sum.taken_ids += piece->student == plan->rank ? ids : 0;
        }
        if (sum.sent > most.sent) most.sent = sum.sent;
        if (sum.taken > most.taken) most.taken = sum.taken;
        if (sum.sent_ids > most.sent_ids) most.sent_ids = sum.sent_ids;
        if (sum.taken_ids > most.taken_ids) most.taken_ids = sum.taken_ids;
    }
    return most;
}

XD_PRIVATE bool xdi_route_is_view(const xd_route *route, int64_t step) {
    return route->shared && route->d.dtype == route->d.wire &&
           xdi_route_plan_view(&route->plan, step) != NULL;
}

/* Never an empty block. */
static void *xdi_route_allocate(xd_route *route, size_t bytes) {
    route->bytes += bytes + 1;
    return xd_allocate(route->ctx, bytes + 1);
}

static char *xdi_route_allocate_rows(xd_route *route, size_t bytes) {
    route->bytes += bytes + 1;
    return (char *)route->kernels->memory.allocate(route->ctx, bytes + 1);
}

/* Memory of the window, unless every window is a view; and the message buffers. */
static xd_result xdi_route_place_buffers(xd_route *route) {
    xdi_route_messages *messages = &route->messages;
    const xdi_route_half *half = &route->plan.halves[XDI_ROUTE_STUDENT][route->plan.rank];
    const size_t ranks = (size_t)route->plan.ranks, wire = xd_dtype_size(route->d.wire);
    size_t window = 0, ids = 0;
    bool copies = !route->shared, room = true;
    for (int64_t i = 0; i < half->batches; i++) copies = copies || !xdi_route_is_view(route, i);
    if (half->sample_count > 0 && copies)
        room = xdi_route_block_bytes(half, route->d.dtype, &window) && xdi_route_ids_bytes(route, half, &ids);
    if (room) {
        route->window = xdi_route_allocate_rows(route, window);
        route->window_ids = (int64_t *)xdi_route_allocate(route, ids);
        room = route->window && route->window_ids;
    }
    if (room && !route->shared) {
        const xdi_route_traffic most = xdi_route_most_traffic(&route->plan);
        const size_t list =
            route->d.payload == XD_ROUTE_COLUMNS ? (size_t)route->d.columns * sizeof(int64_t) : 0;
        messages->send = xdi_route_allocate_rows(route, (size_t)most.sent * wire);
        messages->recv = xdi_route_allocate_rows(route, (size_t)most.taken * wire);
        messages->send_ids = (int64_t *)xdi_route_allocate(route, (size_t)most.sent_ids * list);
        messages->recv_ids = (int64_t *)xdi_route_allocate(route, (size_t)most.taken_ids * list);
        messages->counts = (int64_t *)xdi_route_allocate(route, 4 * ranks * sizeof(int64_t));
        room =
            messages->send && messages->recv && messages->send_ids && messages->recv_ids && messages->counts;
    }
    return xd_agree(route->comm,
                    room ? XD_OK
                         : XD_FAIL(route->ctx, XD_ERROR_MEMORY, "no room for a window of %zu bytes", window));
}

/* ---- the whole ---- */

XD_PRIVATE xd_result xdi_route_place(xd_route *route) {
    const xdi_route_plan *plan = &route->plan;
    const size_t ranks = (size_t)plan->ranks;
    xdi_route_rings *rings = &route->rings;
    rings->ranks = plan->ranks;
    rings->slots = route->d.slots;
    rings->heads = (char **)xd_allocate(route->ctx, ranks * sizeof *rings->heads);
    rings->rows = (char **)xd_allocate(route->ctx, ranks * sizeof *rings->rows);
    rings->row_bytes = (size_t *)xd_allocate(route->ctx, ranks * sizeof *rings->row_bytes);
    rings->id_bytes = (size_t *)xd_allocate(route->ctx, ranks * sizeof *rings->id_bytes);
    rings->used_by = (uint8_t *)xd_allocate(route->ctx, ranks);
    const bool room = rings->heads && rings->rows && rings->row_bytes && rings->id_bytes && rings->used_by;
    XD_TRY(xd_agree(route->comm, room ? XD_OK
                                      : XD_FAIL(route->ctx, XD_ERROR_MEMORY,
                                                "no room for the rings of %d ranks", plan->ranks)));
    for (int64_t i = 0; i < plan->piece_count; i++)
        if (plan->pieces[i].teacher == plan->rank) rings->used_by[plan->pieces[i].student] = 1;
    if (route->shared && plan->ranks > 1 && !xdi_threads_has(route->comm))
        XD_TRY(xdi_route_share_node(route));
    XD_REQUIRE(route->ctx, route->shared || xdi_comm_moves_device(route->comm), XD_ERROR_UNSUPPORTED,
               "messages of a GPU's rows between %d ranks, which the communicator does not move",
               plan->ranks);
    XD_TRY(xdi_route_place_rings(route));
    XD_TRY(xdi_route_trade_links(route));
    return xdi_route_place_buffers(route);
}

XD_PRIVATE bool xdi_route_leave(xd_route *route) {
    const xdi_route_rings *rings = &route->rings;
    const xdi_route_messages *messages = &route->messages;
    const xd_device_ops *memory = &route->kernels->memory;
    if (!xdi_route_leave_node(route)) return false;
    if (xdi_route_part(route)) memory->release(route->ctx, rings->own_rows);
    xd_release(route->ctx, messages->counts);
    xd_release(route->ctx, messages->recv_ids);
    xd_release(route->ctx, messages->send_ids);
    memory->release(route->ctx, messages->recv);
    memory->release(route->ctx, messages->send);
    xd_release(route->ctx, route->window_ids);
    memory->release(route->ctx, route->window);
    xd_release(route->ctx, rings->links);
    xd_release(route->ctx, rings->memory);
    xd_release(route->ctx, rings->used_by);
    xd_release(route->ctx, rings->id_bytes);
    xd_release(route->ctx, rings->row_bytes);
    xd_release(route->ctx, (void *)rings->rows);
    xd_release(route->ctx, (void *)rings->heads);
    return true;
}
