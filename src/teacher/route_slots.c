/* The slots of a route; every other part of it accesses them through this file: the layout of rings, the address of a slot,
 * and the counters that teachers and students raise. */

#include "teacher/route_internal.h"

/* ---- layout ---- */

/* Adds a block of whole cache lines, at least one; false when the sum is too large. */
static bool xdi_route_add_bytes(size_t *sum, size_t bytes) {
    const size_t lines = bytes / XDI_ROUTE_LINE + 1;
    if (bytes > SIZE_MAX / 2 || *sum > SIZE_MAX / 2) return false;
    *sum += lines * XDI_ROUTE_LINE;
    return true;
}

XD_PRIVATE bool xdi_route_block_bytes(const xdi_route_half *half, xd_dtype dtype, size_t *bytes) {
    const int64_t samples = xdi_route_plan_samples(half, 0);
    *bytes = xd_dtype_size(dtype);
    return xdi_size_multiply(*bytes, (size_t)samples, bytes) &&
           xdi_size_multiply(*bytes, (size_t)half->held, bytes) &&
           xdi_size_multiply(*bytes, (size_t)(half->column_end - half->column_begin), bytes);
}

XD_PRIVATE bool xdi_route_ids_bytes(const xd_route *route, const xdi_route_half *half, size_t *bytes) {
    *bytes = 0;
    if (route->d.payload != XD_ROUTE_COLUMNS) return true;
    return xdi_size_multiply((size_t)xdi_route_plan_samples(half, 0) * sizeof(int64_t),
                             (size_t)route->d.columns, bytes);
}

XD_PRIVATE bool xdi_route_ring_bytes(xd_route *route, int r, size_t *head, size_t *rows) {
    xdi_route_rings *rings = &route->rings;
    const xdi_route_half *half = &route->plan.halves[XDI_ROUTE_TEACHER][r];
    const size_t slots = (size_t)route->d.slots;
    size_t block, ids;
    *head = *rows = rings->row_bytes[r] = rings->id_bytes[r] = 0;
    if (half->sample_count == 0) return true;
    if (!xdi_route_block_bytes(half, route->d.wire, &block) || !xdi_route_ids_bytes(route, half, &ids))
        return false;
    if (!xdi_route_add_bytes(&rings->row_bytes[r], block)) return false;
    if (ids > 0 && !xdi_route_add_bytes(&rings->id_bytes[r], ids)) return false;
    return xdi_size_multiply(rings->row_bytes[r], slots, rows) &&
           xdi_size_multiply(rings->id_bytes[r], slots, &ids) &&
           xdi_route_add_bytes(head, XDI_ROUTE_LINE * ((size_t)route->plan.ranks + 1)) &&
           xdi_route_add_bytes(head, ids);
}

XD_PRIVATE int xdi_route_lay_rings(xd_route *route, char *memory, size_t *total, size_t *on_device) {
    xdi_route_rings *rings = &route->rings;
    const bool on_cpu = route->kernels->device == XD_DEVICE_CPU;
    size_t head, rows;
    *total = *on_device = 0;
    xdi_route_add_bytes(total, sizeof *rings->left);
    for (int r = 0; r < route->plan.ranks; r++) {
        const bool sees = route->shared || r == route->plan.rank;
        if (!xdi_route_ring_bytes(route, r, &head, &rows)) return r;
        if (!sees) continue;
        if (memory) rings->heads[r] = memory + *total;
        if (!xdi_route_add_bytes(total, head)) return r;
        if (memory && on_cpu) rings->rows[r] = memory + *total;
        if (!xdi_route_add_bytes(on_cpu ? total : on_device, rows)) return r;
    }
    return -1;
}

/* ---- counters ---- */

XD_PRIVATE bool xdi_route_has_side(const xd_route *route, int side) {
    return route->plan.halves[side][route->plan.rank].sample_count > 0;
}

XD_PRIVATE uint64_t *xdi_route_posted(const xdi_route_rings *rings, int teacher) {
    return (uint64_t *)(void *)rings->heads[teacher];
}

XD_PRIVATE uint64_t *xdi_route_released(const xdi_route_rings *rings, int teacher, int student) {
    return (uint64_t *)(void *)(rings->heads[teacher] + XDI_ROUTE_LINE * ((size_t)student + 1));
}

XD_PRIVATE char *xdi_route_slot_rows(const xdi_route_rings *rings, int teacher, uint64_t number) {
    return rings->rows[teacher] + (size_t)(number % (uint64_t)rings->slots) * rings->row_bytes[teacher];
}

XD_PRIVATE int64_t *xdi_route_slot_ids(const xdi_route_rings *rings, int teacher, uint64_t number) {
    const size_t head = XDI_ROUTE_LINE * ((size_t)rings->ranks + 2);
    return (int64_t *)(void *)(rings->heads[teacher] + head +
                               (size_t)(number % (uint64_t)rings->slots) * rings->id_bytes[teacher]);
}

XD_PRIVATE xd_result xdi_route_watch(const xd_route *route, const uint64_t *counter, uint64_t target,
                                     int rank) {
    const xdi_route_rings *rings = &route->rings;
    const int world_rank = xd_comm_world_rank(route->comm, rank);
    if (rings->node)
        XD_TRY(xdi_node_watch(rings->node, counter, target, rank));
    else if (rank != route->plan.rank)
        XD_TRY(xdi_threads_watch(route->comm, counter, target, rank));
    if ((__atomic_load_n(counter, __ATOMIC_ACQUIRE) & ~XDI_ROUTE_GONE) >= target) return XD_OK;
    /* It may have left because another rank failed before: then that one is named. */
    if (rings->node) XD_TRY(xdi_node_check(rings->node, rank));
    if (!rings->node && rank != route->plan.rank) XD_TRY(xdi_threads_check(route->comm));
    return XD_FAIL_CULPRIT(route->ctx, XD_ERROR_PEER, world_rank, "rank %d has destroyed its route",
                           world_rank);
}

/* A table's entry of teacher rank r at the students' step `number`; both counted over all steps. */
XD_PRIVATE uint64_t xdi_route_needed_at(const xd_route *route, int r, uint64_t number, const int64_t *table) {
    const uint64_t takes = (uint64_t)route->plan.takes, step = number / takes;
    const int64_t *entries = table + r * (route->plan.takes + 1);
    return step * (uint64_t)route->plan.halves[XDI_ROUTE_TEACHER][r].batches +
           (uint64_t)entries[number % takes];
}

XD_PRIVATE void xdi_route_release_before(const xd_route *route, uint64_t number) {
    const xdi_route_plan *plan = &route->plan;
    for (int r = 0; r < plan->ranks; r++) {
        const int64_t batches = plan->halves[XDI_ROUTE_TEACHER][r].batches;
        if (batches == 0 || plan->still[r * (plan->takes + 1)] == batches)
            continue; /* nothing comes from there */
        __atomic_store_n(xdi_route_released(&route->rings, r, plan->rank),
                         xdi_route_needed_at(route, r, number, plan->still), __ATOMIC_RELEASE);
    }
}
