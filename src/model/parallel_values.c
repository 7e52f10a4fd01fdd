/* Values of units: gathered when a block is opened, in the type that is sent, shown in the type that the caller computes with.
 *
 * A gathered unit stays in its memory until that is needed for another unit, or until values change (xd_parallel_publish). So a
 * unit that is opened again right away, as the last layer in its backward, and the root, which shares memory with none, are
 * not gathered again. */

#include "base/internal.h"
#include "comm/topology.h"
#include "kernel/kernels.h"
#include "model/store_internal.h"

#include <string.h>

/* ---- memory of gathered units ---- */

XD_PRIVATE bool xdi_place_reshards(const xdi_place *place) {
    return place->settings.reshard_ranks > 1 && place->settings.reshard_ranks < place->ranks;
}

/* For values, one for each unit where all stay gathered; else those of a level share one, and one more for each that is gathered
 * ahead. The root is alone. For gradients, one for each level, and one more for what a queue is summing. */
XD_PRIVATE void xdi_store_deal_slots(xdi_store *store) {
    const xdi_place *place = store->place;
    const bool own = place->settings.reshard_ranks == 1;
    const int each = 1 + place->settings.prefetch, sums = place->settings.reductions ? 2 : 1;
    store->slot_count = own ? store->unit_count : 1 + (int64_t)(store->level_count - 1) * each;
    store->sum_count = (int64_t)store->level_count * sums;
    for (int64_t i = 0; i < store->unit_count; i++) {
        struct xdi_unit *unit = &store->units[i];
        const bool alone = own || unit->level == 0;
        unit->slots = &store->slots[own ? i : alone ? 0 : 1 + (int64_t)(unit->level - 1) * each];
        unit->slot_count = alone ? 1 : each;
        unit->sums = &store->sums[(int64_t)unit->level * sums];
        unit->sum_count = sums;
    }
}

/* The slot that is free, or else the one that was opened longest ago and is not open now; NULL when all are open. */
static xdi_unit_slot *xdi_unit_find_slot(const struct xdi_unit *unit) {
    xdi_unit_slot *best = NULL;
    for (int i = 0; i < unit->slot_count; i++) {
        xdi_unit_slot *slot = &unit->slots[i];
        if (!slot->unit) return slot;
        if (slot->unit->open == 0 && (!best || slot->opened < best->opened)) best = slot;
    }
    return best;
}

/* What comes of a gather that nobody has opened is reported by the next one. */
static void xdi_unit_slot_empty(const xdi_place *place, xdi_unit_slot *slot) {
    struct xdi_unit *unit = slot->unit;
    if (!unit) return;
    for (int64_t i = 0; i < unit->flat_count; i++)
        (void)xdi_flight_land(place->settings.gathers, &unit->flats[i].arriving);
    unit->arriving = false;
    unit->slot = NULL;
    slot->unit = NULL;
}

XD_PRIVATE void xdi_store_drop_ahead(xdi_store *store) {
    for (int64_t i = 0; i < store->slot_count; i++)
        if (store->slots[i].unit && store->slots[i].unit->arriving)
            xdi_unit_slot_empty(store->place, &store->slots[i]);
}

XD_PRIVATE void xdi_store_forget_values(xdi_store *store) {
    for (int64_t i = 0; i < store->slot_count; i++) xdi_unit_slot_empty(store->place, &store->slots[i]);
    for (int64_t i = 0; i < store->unit_count; i++) store->units[i].resharded = false;
}

/* ---- gathering ---- */

/* This rank's part as it is sent: where that is, or, from the host, at its place in what is gathered. */
static xd_result xdi_flat_offer(const xdi_flat *flat, unsigned char *to, const void **out) {
    const xdi_place *place = flat->place;
    const size_t bytes =
        (size_t)(xdi_bucket_plan_numel(flat->plan) / place->ranks) * xd_dtype_size(flat->sent_dtype);
    unsigned char *part = to + (size_t)place->rank * bytes;
    *out = place->on_host ? part : flat->sent;
    return place->on_host ? xdi_parts_read(place, part, flat->sent, bytes) : XD_OK;
}

static xd_result xdi_flat_depart(const xdi_store *store, xdi_flat *flat, bool resharded, unsigned char *to) {
    const xdi_place *place = store->place;
    const int n = resharded ? place->settings.reshard_ranks : place->ranks;
    xd_collective c;
    memset(&c, 0, sizeof c);
    for (int r = 0; r < n; r++) store->scratch.counts[r] = xdi_bucket_plan_numel(flat->plan) / n;
    c.kind = XD_COLLECTIVE_ALL_GATHER;
    c.send = flat->resharded;
    c.recv = to;
    c.recv_counts = store->scratch.counts;
    c.dtype = flat->sent_dtype;
    if (!resharded) XD_TRY(xdi_flat_offer(flat, to, &c.send));
    if (place->ranks == 1) return XD_OK;
    return xdi_flight_start(resharded ? NULL : place->settings.gathers,
                            resharded ? place->resharded : place->data, &c, &flat->arriving);
}

/* This rank's part of what a few ranks keep together after the first gather. */
static xd_result xdi_flat_keep_resharded(const xdi_flat *flat, const unsigned char *from) {
    const xdi_place *place = flat->place;
    const xd_launch launch = xd_ctx_launch(place->ctx);
    const size_t bytes = (size_t)(xdi_bucket_plan_numel(flat->plan) / place->settings.reshard_ranks) *
                         xd_dtype_size(flat->sent_dtype);
    return xd_ctx_kernels(place->ctx)
        ->memory.copy(&launch, flat->resharded, from + (size_t)xd_comm_rank(place->resharded) * bytes, bytes,
                      XD_COPY_ON_DEVICE);
}

static xd_result xdi_flat_arrive(xdi_flat *flat, bool resharded, unsigned char *slot) {
    const xdi_place *place = flat->place;
    const void *sent = xdi_place_assembles(place) ? slot + flat->slot : (const unsigned char *)flat->sent;
    XD_TRY(xdi_flight_land(place->settings.gathers, &flat->arriving));
    if (place->resharded && !resharded) XD_TRY(xdi_flat_keep_resharded(flat, slot + flat->slot));
    if (flat->view_dtype == flat->sent_dtype) return XD_OK;
    return xd_cast(place->ctx, slot + flat->view_slot, flat->view_dtype, sent, flat->sent_dtype,
                   xdi_bucket_plan_numel(flat->plan));
}

/* Starts the gather of a unit into a slot, which is emptied first. */
static xd_result xdi_unit_depart(xdi_store *store, struct xdi_unit *unit, xdi_unit_slot *slot) {
    xdi_unit_slot_empty(store->place, slot);
    slot->unit = unit;
    slot->opened = ++store->opened;
    unit->slot = slot;
    unit->arriving = true;
    for (int64_t i = 0; i < unit->flat_count && xdi_place_assembles(store->place); i++) {
        xdi_flat *flat = &unit->flats[i];
        const xd_result result =
            flat->whole ? XD_OK : xdi_flat_depart(store, flat, unit->resharded, slot->memory + flat->slot);
        if (result == XD_OK) continue;
        xdi_unit_slot_empty(store->place, slot);
        return result;
    }
    return XD_OK;
}

static xd_result xdi_unit_arrive(const xdi_place *place, struct xdi_unit *unit) {
    for (int64_t i = 0; i < unit->flat_count; i++) {
        xdi_flat *flat = &unit->flats[i];
        const xd_result result =
            flat->whole ? XD_OK : xdi_flat_arrive(flat, unit->resharded, unit->slot->memory);
        if (result == XD_OK) continue;
        xdi_unit_slot_empty(place, unit->slot);
        return result;
    }
    unit->arriving = false;
    unit->resharded = place->resharded != NULL;
    return XD_OK;
}

/* The units that are likely to be opened next: in the order of registration, backwards in a backward. A wrong guess costs its
 * gather. */
static xd_result xdi_unit_look_ahead(xdi_store *store, const struct xdi_unit *from, bool backward) {
    const int64_t step = backward ? -1 : 1;
    int left = store->place->settings.prefetch;
    for (int64_t i = from - store->units + step; i >= 0 && i < store->unit_count && left > 0; i += step) {
        struct xdi_unit *unit = &store->units[i];
        if (unit->gathered_bytes == 0 || unit->open > 0) continue;
        left--;
        if (unit->slot || unit->resharded) continue;
        xdi_unit_slot *slot = xdi_unit_find_slot(unit);
        if (slot) XD_TRY(xdi_unit_depart(store, unit, slot));
    }
    return XD_OK;
}

static xd_result xdi_unit_refuse(const xdi_place *place, const struct xdi_unit *unit,
                                 const struct xdi_unit *other, int planned) {
    return XD_FAIL(place->ctx, XD_ERROR_STATE,
                   "unit \"%.80s\" is opened while \"%.80s\" is open, which is not around it: %d of a level "
                   "are planned at once; end the other one first, or add this one inside it",
                   unit->block->name, other->block->name, planned);
}

/* Whether several ranks would gather something for it. */
static bool xdi_unit_has_elements(const struct xdi_unit *unit) {
    bool some = false;
    for (int64_t i = 0; i < unit->flat_count; i++)
        some = some || (!unit->flats[i].whole && xdi_bucket_plan_numel(unit->flats[i].plan) > 0);
    return some;
}

static xd_result xdi_unit_show(xdi_store *store, struct xdi_unit *unit) {
    if (unit->gathered_bytes == 0) return XD_OK;
    if (!unit->slot) {
        xdi_unit_slot *slot = xdi_unit_find_slot(unit);
        if (!slot) return xdi_unit_refuse(store->place, unit, unit->slots[0].unit, unit->slot_count);
        XD_TRY(xdi_unit_depart(store, unit, slot));
    }
    if (unit->arriving) XD_TRY(xdi_unit_arrive(store->place, unit));
    unit->slot->opened = ++store->opened;
    return XD_OK;
}

/* One rank has no slots to run out of, but refuses what several ranks do: more units of a level than they have slots for. */
static xd_result xdi_unit_check_beside(const xdi_store *store, const struct xdi_unit *unit) {
    const xdi_place *place = store->place;
    const struct xdi_unit *other = NULL;
    int open = 0;
    if (!place->alone || unit->open > 0 || unit->level == 0 || !xdi_unit_has_elements(unit)) return XD_OK;
    for (int64_t i = 0; i < store->unit_count; i++) {
        const struct xdi_unit *at = &store->units[i];
        if (at->level != unit->level || at->open == 0 || !xdi_unit_has_elements(at)) continue;
        if (!other) other = at;
        open++;
    }
    return open > place->settings.prefetch ? xdi_unit_refuse(place, unit, other, 1 + place->settings.prefetch)
                                           : XD_OK;
}

XD_PRIVATE xd_result xdi_unit_open(xdi_store *store, struct xdi_unit *unit, bool backward) {
    XD_TRY(xdi_unit_check_beside(store, unit));
    XD_TRY(xdi_unit_show(store, unit));
    unit->open++;
    const xd_result result = xdi_unit_look_ahead(store, unit, backward);
    if (result != XD_OK) unit->open--;
    return result;
}

/* ---- what the caller sees ---- */

/* NULL where a unit has no elements, and so no slot. */
static void *xdi_flat_shown(const xdi_flat *flat) {
    const bool converts = flat->view_dtype != flat->sent_dtype;
    if (flat->whole) return flat->shown;
    if (!converts && !xdi_place_assembles(flat->place)) return flat->sent;
    if (!flat->unit->slot) return NULL;
    return flat->unit->slot->memory + (converts ? flat->view_slot : flat->slot);
}

XD_PRIVATE void *xdi_weight_shown(const xd_weight *owner) {
    const xdi_flat *flat = owner->flat;
    if (!flat || (flat->whole && !flat->shown)) return owner->value;
    const xd_interval place = xdi_bucket_plan_param(flat->plan, owner->flat_index, NULL);
    unsigned char *shown = (unsigned char *)xdi_flat_shown(flat);
    return shown ? shown + (size_t)place.begin * xd_dtype_size(flat->view_dtype) : NULL;
}

/* ---- after values have changed ---- */

/* A weight that every rank keeps: from its storage into the type that is shown, on the host where parts are kept there. */
static xd_result xdi_weight_show_whole(const xd_weight *w) {
    const xdi_flat *flat = w->flat;
    const size_t size = xd_dtype_size(flat->view_dtype);
    const void *value = w->value;
    void *shown = xdi_weight_shown(w);
    if (!w->flat->place->on_host)
        return xd_cast(w->flat->place->ctx, shown, flat->view_dtype, value, flat->dtype, w->count);
    if (flat->sent) {
        const xd_interval place = xdi_bucket_plan_param(flat->plan, w->flat_index, NULL);
        void *copy = (unsigned char *)flat->sent + (size_t)place.begin * size;
        XD_TRY(xd_cast(w->flat->place->parts_ctx, copy, flat->view_dtype, value, flat->dtype, w->count));
        value = copy;
    }
    return xdi_parts_read(w->flat->place, shown, value, (size_t)w->count * size);
}

static xd_result xdi_flat_show_whole(const xdi_flat *flat) {
    for (int64_t i = 0; i < flat->count; i++) XD_TRY(xdi_weight_show_whole(flat->weights[i]));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_store_convert_values(xdi_store *store) {
    const xdi_place *place = store->place;
    XD_TRY(xdi_parts_settle(place)); /* of what is overwritten here */
    for (int64_t i = 0; i < store->flat_count; i++) {
        const xdi_flat *flat = &store->flats[i];
        if (flat->shown)
            XD_TRY(xdi_flat_show_whole(flat));
        else if (flat->sent_dtype != flat->dtype)
            XD_TRY(xd_cast(place->parts_ctx, flat->sent, flat->sent_dtype, flat->values, flat->dtype,
                           xdi_bucket_plan_numel(flat->plan) / place->ranks));
    }
    return XD_OK;
}
