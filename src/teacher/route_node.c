/* Rings in memory that the processes of a node share. */

#include "teacher/route_internal.h"

#include <string.h>
#include <time.h>

/* ---- rings that processes of one node share ----
 *
 * Heads and ids, and on a CPU rows, are in shared memory of the node, with the same layout as between threads. On a GPU
 * each teacher rank allocates its rows in device memory that others may open, and puts the handle into its head. Events are
 * not shared between processes: the streams raise the counters, by host functions queued after the work that they cover.
 * So a rank that has seen a counter needs no event, and a rank waits for a GPU only if it needs that GPU's results. */

static bool xdi_route_reads(const xd_route *route, int teacher) {
    for (int64_t i = 0; i < route->plan.piece_count; i++)
        if (route->plan.pieces[i].teacher == teacher && route->plan.pieces[i].student == route->plan.rank)
            return true;
    return false;
}

static xd_device_handle *xdi_route_handle(const xdi_route_rings *rings, int teacher) {
    return (xd_device_handle *)(void *)(rings->heads[teacher] + XDI_ROUTE_LINE * ((size_t)rings->ranks + 1));
}

/* Allocates this rank's rows; false when others could not open them. */
static bool xdi_route_offer_rows(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    const int me = route->plan.rank;
    const size_t bytes = rings->row_bytes[me] * (size_t)route->d.slots;
    if (bytes == 0) return true;
    rings->own_rows = route->kernels->memory.share_create(route->ctx, bytes, xdi_route_handle(rings, me));
    rings->rows[me] = (char *)rings->own_rows;
    return rings->own_rows != NULL;
}

static bool xdi_route_open_rows(xd_route *route) {
    bool opened = true;
    for (int r = 0; r < route->plan.ranks; r++) {
        if (r == route->plan.rank || !xdi_route_reads(route, r)) continue;
        route->rings.rows[r] =
            (char *)route->kernels->memory.share_open(route->ctx, xdi_route_handle(&route->rings, r));
        opened = opened && route->rings.rows[r];
    }
    return opened;
}

static void xdi_route_close_rows(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    for (int r = 0; r < route->plan.ranks; r++)
        if (r != route->plan.rank && rings->rows[r])
            route->kernels->memory.share_close(route->ctx, rings->rows[r]);
    memset((void *)rings->rows, 0, (size_t)route->plan.ranks * sizeof *rings->rows);
}

/* Rows of GPUs; *all false when some rank cannot have them. */
static xd_result xdi_route_trade_rows(xd_route *route, bool *all) {
    XD_TRY(xdi_comm_all_can(route->comm, xdi_route_offer_rows(route), all));
    if (*all) XD_TRY(xdi_comm_all_can(route->comm, xdi_route_open_rows(route), all));
    if (*all) return XD_OK;
    xdi_route_close_rows(route);
    XD_TRY(xd_barrier(route->comm)); /* now all have closed them */
    route->kernels->memory.share_destroy(route->ctx, route->rings.own_rows);
    route->rings.own_rows = NULL;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_route_share_node(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    const bool on_cpu = route->kernels->device == XD_DEVICE_CPU;
    size_t total, on_device;
    bool all = true;
    if (xdi_route_lay_rings(route, NULL, &total, &on_device) < 0) /* too large: the same on every rank */
        XD_TRY(xdi_node_create(route->comm, total, &rings->node));
    if (rings->node) {
        xdi_route_lay_rings(route, (char *)xdi_node_memory(rings->node), &total, &on_device);
        if (!on_cpu) XD_TRY(xdi_route_trade_rows(route, &all));
    }
    if (!all) {
        xdi_node_destroy(rings->node);
        rings->node = NULL;
        memset((void *)rings->heads, 0, (size_t)route->plan.ranks * sizeof *rings->heads);
    }
    route->shared = rings->node != NULL;
    return XD_OK;
}

/* ---- counters that a stream raises ---- */

XD_PRIVATE bool xdi_route_is_late(const xd_route *route) {
    return route->rings.node && route->kernels->device != XD_DEVICE_CPU;
}

static void xdi_route_count_post(void *user) {
    const xd_route *route = (const xd_route *)user;
    __atomic_fetch_add(xdi_route_posted(&route->rings, route->plan.rank), 1, __ATOMIC_RELEASE);
}

/* Windows are reported in order, from 0. */
static void xdi_route_count_read(void *user) {
    xd_route *route = (xd_route *)user;
    xdi_route_release_before(route, __atomic_fetch_add(&route->counted, 1, __ATOMIC_RELAXED));
}

XD_PRIVATE xd_result xdi_route_post_later(xd_route *route) {
    const xd_launch launch = xd_ctx_launch(route->ctx);
    return route->kernels->memory.call(&launch, xdi_route_count_post, route);
}

XD_PRIVATE xd_result xdi_route_release_later(xd_route *route) {
    const xd_launch launch = xd_ctx_launch(route->ctx);
    return route->kernels->memory.call(&launch, xdi_route_count_read, route);
}

/* ---- leaving ---- */

/* Waits until no other process has this rank's rows open; false when that is not certain. */
static bool xdi_route_wait_closed(const xd_route *route) {
    const int me = route->plan.rank;
    const struct timespec nap = { 0, XDI_ROUTE_NAP };
    const double deadline = xd_now(route->ctx) + xd_ctx_settings(route->ctx)->timeout_seconds;
    for (int s = 0; s < route->plan.ranks; s++) {
        if (s == me || !route->rings.used_by[s]) continue;
        const uint64_t *released = xdi_route_released(&route->rings, me, s);
        while (!(__atomic_load_n(released, __ATOMIC_ACQUIRE) & XDI_ROUTE_GONE) &&
               !xdi_node_has_died(route->rings.node, s)) {
            if (xd_now(route->ctx) > deadline) return false;
            nanosleep(&nap, NULL);
        }
    }
    return true;
}

/* This rank posts nothing more and reads no more rings. */
static void xdi_route_say_farewell(const xd_route *route) {
    const xdi_route_plan *plan = &route->plan;
    if (xdi_route_has_side(route, XDI_ROUTE_TEACHER))
        __atomic_fetch_or(xdi_route_posted(&route->rings, plan->rank), XDI_ROUTE_GONE, __ATOMIC_RELEASE);
    for (int r = 0; r < plan->ranks && xdi_route_has_side(route, XDI_ROUTE_STUDENT); r++)
        if (plan->halves[XDI_ROUTE_TEACHER][r].sample_count > 0)
            __atomic_fetch_or(xdi_route_released(&route->rings, r, plan->rank), XDI_ROUTE_GONE,
                              __ATOMIC_RELEASE);
}

XD_PRIVATE bool xdi_route_leave_node(xd_route *route) {
    xdi_route_rings *rings = &route->rings;
    const xd_launch launch = xd_ctx_launch(route->ctx);
    if (!rings->node) return true;
    if (xdi_comm_is_forked(route->comm)) { /* the memory is that of the rank it was forked from */
        xdi_node_destroy(rings->node);
        return true;
    }
    if (xdi_route_is_late(route)) {
        if (route->kernels->memory.synchronize(&launch) == XD_ERROR_TIMEOUT) return false;
        xdi_route_close_rows(route);
    }
    xdi_node_hand_on(rings->node);
    xdi_route_say_farewell(route);
    if (rings->own_rows && xdi_route_wait_closed(route))
        route->kernels->memory.share_destroy(route->ctx, rings->own_rows);
    rings->own_rows = NULL;
    xdi_node_destroy(rings->node);
    return true;
}
