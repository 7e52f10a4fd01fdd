/* Values of units: gathered when a block is opened, in the type that is sent, shown in the type that the caller computes with.
 *
 * A gathered unit stays in its memory until that is needed for another unit, or until values change (xd_parallel_publish). So a
 * unit that is opened again right away, as the last layer in its backward, and the root, which shares memory with none, are
 * not gathered again. */

#include "base/internal.h"
#include "comm/topology.h"
#include "kernel/kernels.h"
#include "model/internal.h"

#include <string.h>

/* ---- memory of gathered units ---- */

XD_PRIVATE bool xdi_parallel_has_near(const xd_parallel *p) {
    return p->reshard_ranks > 1 && p->reshard_ranks < p->ranks;
}

/* One for each level; or for each unit, where all stay gathered. */
XD_PRIVATE void xdi_parallel_deal_slots(xd_parallel *p) {
    const bool own = p->reshard_ranks == 1;
    p->slot_count = own ? p->unit_count : p->level_count;
    for (int64_t i = 0; i < p->unit_count; i++) {
        p->units[i].slots = &p->slots[own ? i : p->units[i].level];
        p->units[i].slot_count = 1;
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

static void xdi_unit_slot_empty(xdi_unit_slot *slot) {
    if (slot->unit) slot->unit->slot = NULL;
    slot->unit = NULL;
}

XD_PRIVATE void xdi_parallel_forget_values(xd_parallel *p) {
    for (int64_t i = 0; i < p->slot_count; i++) xdi_unit_slot_empty(&p->slots[i]);
    for (int64_t i = 0; i < p->unit_count; i++) p->units[i].near = false;
}

/* ---- gathering ---- */

static xd_result xdi_flat_gather(const xd_parallel *p, const xdi_flat *flat, bool near, void *to) {
    const int n = near ? p->reshard_ranks : p->ranks;
    for (int r = 0; r < n; r++) p->counts[r] = xd_bucket_plan_numel(flat->plan) / n;
    return xd_all_gather(near ? p->near : p->data, near ? flat->near : flat->sent, to, p->counts,
                         flat->sent_dtype);
}

/* This rank's part of what a few ranks keep together after the first gather. */
static xd_result xdi_flat_keep_near(const xd_parallel *p, const xdi_flat *flat, const unsigned char *from) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    const size_t bytes =
        (size_t)(xd_bucket_plan_numel(flat->plan) / p->reshard_ranks) * xd_dtype_size(flat->sent_dtype);
    return xd_ctx_kernels(p->ctx)->memory.copy(
        &launch, flat->near, from + (size_t)xd_comm_rank(p->near) * bytes, bytes, XD_COPY_ON_DEVICE);
}

/* From the kept parts into a slot, in both types. */
static xd_result xdi_flat_fill_slot(const xd_parallel *p, const xdi_flat *flat, bool near,
                                    unsigned char *slot) {
    const void *sent = flat->sent;
    if (p->ranks > 1) {
        XD_TRY(xdi_flat_gather(p, flat, near, slot + flat->slot));
        if (p->near && !near) XD_TRY(xdi_flat_keep_near(p, flat, slot + flat->slot));
        sent = slot + flat->slot;
    }
    if (flat->view_dtype == flat->sent_dtype) return XD_OK;
    return xd_cast(p->ctx, slot + flat->view_slot, flat->view_dtype, sent, flat->sent_dtype,
                   xd_bucket_plan_numel(flat->plan));
}

static xd_result xdi_unit_gather(xd_parallel *p, struct xdi_unit *unit, unsigned char *slot) {
    for (int64_t i = 0; i < unit->flat_count; i++)
        if (!unit->flats[i].whole) XD_TRY(xdi_flat_fill_slot(p, &unit->flats[i], unit->near, slot));
    unit->near = p->near != NULL;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_unit_open(xd_parallel *p, struct xdi_unit *unit) {
    if (unit->gathered_bytes > 0 && !unit->slot) {
        xdi_unit_slot *slot = xdi_unit_find_slot(unit);
        XD_REQUIRE(p->ctx, slot, XD_ERROR_STATE,
                   "unit \"%.80s\" is opened while \"%.80s\" is open, which is not around it: %d are planned "
                   "at once",
                   unit->block->name, unit->slots[0].unit->block->name, p->level_count);
        xdi_unit_slot_empty(slot);
        XD_TRY(xdi_unit_gather(p, unit, slot->memory));
        slot->unit = unit;
        unit->slot = slot;
    }
    if (unit->slot) unit->slot->opened = ++p->opened;
    unit->open++;
    return XD_OK;
}

/* ---- what the caller sees ---- */

static void *xdi_flat_shown(const xd_parallel *p, const xdi_flat *flat) {
    unsigned char *slot = flat->unit->slot ? flat->unit->slot->memory : NULL;
    if (flat->whole) return flat->shown;
    if (flat->view_dtype != flat->sent_dtype) return slot + flat->view_slot;
    return p->ranks > 1 ? slot + flat->slot : (unsigned char *)flat->sent;
}

XD_PRIVATE void *xdi_weight_shown(const xd_parallel *p, const xd_weight *owner) {
    const xdi_flat *flat = owner->flat;
    if (!p || (flat->whole && !flat->shown)) return owner->value;
    const xd_interval place = xd_bucket_plan_param(flat->plan, owner->flat_index, NULL);
    return (unsigned char *)xdi_flat_shown(p, flat) + (size_t)place.begin * xd_dtype_size(flat->view_dtype);
}

/* ---- after values have changed ---- */

/* Of weights that every rank keeps: from their storage into the type that is shown. */
static xd_result xdi_flat_show_whole(const xd_parallel *p, const xdi_flat *flat) {
    for (int64_t i = 0; i < flat->count; i++) {
        const xd_weight *w = flat->weights[i];
        XD_TRY(xd_cast(p->ctx, xdi_weight_shown(p, w), flat->view_dtype, w->value, flat->dtype, w->count));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_convert_values(xd_parallel *p) {
    for (int64_t i = 0; i < p->flat_count; i++) {
        const xdi_flat *flat = &p->flats[i];
        if (flat->shown)
            XD_TRY(xdi_flat_show_whole(p, flat));
        else if (flat->sent_dtype != flat->dtype)
            XD_TRY(xd_cast(p->ctx, flat->sent, flat->sent_dtype, flat->values, flat->dtype,
                           xd_bucket_plan_numel(flat->plan) / p->ranks));
    }
    return XD_OK;
}
