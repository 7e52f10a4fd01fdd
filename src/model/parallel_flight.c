/* Records of a wrapper on the caller's queues. */

#include "base/internal.h"
#include "comm/internal.h"
#include "model/store_internal.h"

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

XD_PRIVATE void xdi_store_land(xdi_store *store) {
    const xdi_place *place = store->place;
    for (int64_t i = 0; i < store->flat_count && store->flats; i++)
        (void)xdi_flight_land(place->settings.gathers, &store->flats[i].arriving);
    for (int64_t i = 0; i < store->bucket_count && store->buckets; i++) {
        (void)xdi_flight_land(place->settings.reductions, &store->buckets[i].sending);
        (void)xdi_flight_land(place->settings.gathers, &store->buckets[i].spreading);
    }
}

XD_PRIVATE xd_result xdi_store_land_values(xdi_store *store) {
    for (int64_t i = 0; i < store->bucket_count; i++)
        XD_TRY(xdi_flight_land(store->place->settings.gathers, &store->buckets[i].spreading));
    return XD_OK;
}

/* ---- room ---- */

/* Records under way at once: gathers of a unit and those ahead of it, or of every bucket after a step; sums of the units that have
 * memory for a gradient, or of every bucket. */
static int64_t xdi_store_gathers_at_once(const xdi_store *store) {
    const xdi_place *place = store->place;
    int64_t max = 0;
    if (!place->settings.sharded) return store->bucket_count;
    for (int64_t i = 0; i < store->unit_count; i++)
        if (store->units[i].flat_count > max) max = store->units[i].flat_count;
    return max * (1 + place->settings.prefetch);
}

static int64_t xdi_store_sums_at_once(const xdi_store *store) {
    int64_t max = 0;
    if (!store->place->batches.strided) return store->bucket_count;
    for (int64_t i = 0; i < store->unit_count; i++) {
        int64_t buckets = 0;
        for (int64_t f = 0; f < store->units[i].flat_count; f++)
            buckets += store->units[i].flats[f].bucket_count;
        if (buckets > max) max = buckets;
    }
    return max * store->sum_count;
}

static xd_result xdi_place_check_queue(const xdi_place *place, xd_queue *queue, int64_t records,
                                       const char *name) {
    if (!queue) return XD_OK;
    const xd_comm *comm = xdi_queue_comm(queue);
    const int capacity = xd_queue_describe(queue).capacity;
    XD_REQUIRE(place->ctx, xd_comm_size(comm) == place->ranks && xd_comm_rank(comm) == place->rank,
               XD_ERROR_ARGUMENT, "a queue of %s on rank %d of %d for data rank %d of %d", name,
               xd_comm_rank(comm), xd_comm_size(comm), place->rank, place->ranks);
    XD_REQUIRE(place->ctx, records <= capacity, XD_ERROR_ARGUMENT,
               "a queue of %s has room for %d records, and %lld are under way at once", name, capacity,
               (long long)records);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_store_check_queues(const xdi_store *store) {
    const xdi_place *place = store->place;
    XD_TRY(
        xdi_place_check_queue(place, place->settings.gathers, xdi_store_gathers_at_once(store), "gathers"));
    return xdi_place_check_queue(place, place->settings.reductions, xdi_store_sums_at_once(store),
                                 "reductions");
}
