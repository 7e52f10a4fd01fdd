/* Records of a wrapper on the caller's queues. */

#include "base/internal.h"
#include "comm/internal.h"
#include "model/internal.h"

XD_PRIVATE xd_result xdi_flight_start(xd_queue *queue, xd_comm *comm, const xd_collective *record,
                                      xdi_flight *flight) {
    if (!queue) return xd_collective_run(comm, record);
    XD_TRY(xd_queue_start(queue, record, &flight->ticket));
    flight->open = true;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_flight_land(xd_queue *queue, xdi_flight *flight) {
    if (!flight->open) return XD_OK;
    flight->open = false;
    return queue ? xd_queue_wait(queue, flight->ticket) : XD_OK;
}

XD_PRIVATE void xdi_parallel_land(xd_parallel *p) {
    for (int64_t i = 0; i < p->flat_count && p->flats; i++)
        (void)xdi_flight_land(p->gathers, &p->flats[i].arriving);
    for (int64_t i = 0; i < p->bucket_count && p->buckets; i++) {
        (void)xdi_flight_land(p->reductions, &p->buckets[i].sending);
        (void)xdi_flight_land(p->gathers, &p->buckets[i].spreading);
    }
}

XD_PRIVATE xd_result xdi_parallel_land_values(xd_parallel *p) {
    for (int64_t i = 0; i < p->bucket_count; i++)
        XD_TRY(xdi_flight_land(p->gathers, &p->buckets[i].spreading));
    return XD_OK;
}

/* ---- room ---- */

/* Records under way at once: gathers of a unit and those ahead of it, or of every bucket after a step; sums of the units that have
 * memory for a gradient, or of every bucket. */
static int64_t xdi_parallel_gathers_at_once(const xd_parallel *p) {
    int64_t most = 0;
    if (!p->sharded) return p->bucket_count;
    for (int64_t i = 0; i < p->unit_count; i++)
        if (p->units[i].flat_count > most) most = p->units[i].flat_count;
    return most * (1 + p->prefetch);
}

static int64_t xdi_parallel_sums_at_once(const xd_parallel *p) {
    int64_t most = 0;
    if (!p->dealt) return p->bucket_count;
    for (int64_t i = 0; i < p->unit_count; i++) {
        int64_t buckets = 0;
        for (int64_t f = 0; f < p->units[i].flat_count; f++) buckets += p->units[i].flats[f].bucket_count;
        if (buckets > most) most = buckets;
    }
    return most * p->sum_count;
}

static xd_result xdi_parallel_check_queue(const xd_parallel *p, xd_queue *queue, int64_t records,
                                          const char *name) {
    if (!queue) return XD_OK;
    const xd_comm *comm = xdi_queue_comm(queue);
    const int capacity = xd_queue_info(queue).capacity;
    XD_REQUIRE(p->ctx, xd_comm_size(comm) == p->ranks && xd_comm_rank(comm) == p->rank, XD_ERROR_ARGUMENT,
               "a queue of %s on rank %d of %d for data rank %d of %d", name, xd_comm_rank(comm),
               xd_comm_size(comm), p->rank, p->ranks);
    XD_REQUIRE(p->ctx, records <= capacity, XD_ERROR_ARGUMENT,
               "a queue of %s has room for %d records, and %lld are under way at once", name, capacity,
               (long long)records);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_check_queues(const xd_parallel *p) {
    XD_TRY(xdi_parallel_check_queue(p, p->gathers, xdi_parallel_gathers_at_once(p), "gathers"));
    return xdi_parallel_check_queue(p, p->reductions, xdi_parallel_sums_at_once(p), "reductions");
}
