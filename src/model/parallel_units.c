/* Which blocks are gathered together, and the weights of each unit, by type. */

#include "base/internal.h"
#include "model/store_internal.h"

#include <string.h>

static bool xdi_unit_is(const xdi_wrap_settings *settings, const xd_fsdp_desc *d, const xd_block *block) {
    if (!block->parent) return true;
    if (!settings->sharded || block->desc.unit == XD_UNIT_NEVER) return false;
    if (block->desc.unit == XD_UNIT_ALWAYS) return true;
    for (int i = 0; i < d->unit_type_count && block->type; i++)
        if (strcmp(d->unit_types[i], block->type) == 0) return true;
    return false;
}

/* Units in the order of their blocks, so that those around one come before it. */
static xd_result xdi_store_find_units(xdi_store *store, const xd_fsdp_desc *d) {
    const xdi_place *place = store->place;
    const int kind = place->of_experts;
    int64_t count = 0;
    for (xd_block *b = &place->model->root; b; b = xdi_block_after(b))
        count += xdi_unit_is(&place->settings, d, b);
    store->units = (struct xdi_unit *)xd_allocate(place->ctx, (size_t)count * sizeof *store->units);
    XD_REQUIRE(place->ctx, store->units, XD_ERROR_MEMORY, "no room for %lld units", (long long)count);
    for (xd_block *b = &place->model->root; b; b = xdi_block_after(b)) {
        const struct xdi_unit *around = b->parent ? b->parent->units[kind] : NULL;
        struct xdi_unit *unit = &store->units[store->unit_count];
        b->units[kind] = b->parent ? b->parent->units[kind] : NULL;
        if (!xdi_unit_is(&place->settings, d, b)) continue;
        b->units[kind] = unit;
        store->unit_count++;
        unit->block = b;
        unit->level = around ? around->level + 1 : 0;
        if (unit->level >= store->level_count) store->level_count = unit->level + 1;
    }
    return XD_OK;
}

static bool xdi_dtype_trains(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

static xd_result xdi_place_check_weight(const xdi_place *place, const xd_weight *w) {
    const xd_weight *owner = w->owner;
    const xd_weight_desc *d = &owner->desc;
    const struct xdi_unit *unit = xdi_block_unit(w->block), *other = xdi_block_unit(owner->block);
    XD_REQUIRE(place->ctx, other == unit, XD_ERROR_STATE,
               "\"%.80s\" in unit \"%.80s\" is tied to \"%.80s\" in unit \"%.80s\": put both into one unit",
               w->name, unit->block->name, owner->name, other->block->name);
    XD_REQUIRE(place->ctx, !place->settings.sharded || d->buffer || (!d->value && !d->gradient),
               XD_ERROR_STATE,
               "weight \"%.80s\" has the caller's storage, which FSDP cannot keep whole: leave value and "
               "gradient NULL and write first values after xd_model_allocate (xd_weight_set_ready); "
               "xd_ddp_create keeps the caller's",
               owner->name);
    XD_REQUIRE(place->ctx, !place->on_host || !d->value, XD_ERROR_STATE,
               "buffer \"%.80s\" has the caller's storage, and parts are kept in memory of another context "
               "(host): leave value NULL and write first values after xd_model_allocate",
               owner->name);
    XD_REQUIRE(
        place->ctx,
        !xdi_weight_is_trained(owner) || (xdi_dtype_trains(d->dtype) && d->gradient_dtype == XD_DTYPE_F32),
        XD_ERROR_DTYPE, "weight \"%.80s\" trains as %s with gradients of %s: F32, BF16 and F16 do, with F32",
        owner->name, xd_dtype_name(d->dtype), xd_dtype_name(d->gradient_dtype));
    return XD_OK;
}

/* The type in which a weight's values are sent: buffers, integers and what the caller keeps in f32 stay as they are. */
static xd_dtype xdi_weight_sent_dtype(const xdi_wrap_settings *settings, const xd_weight *w) {
    const xd_weight_desc *d = &w->desc;
    const bool converts = settings->sent_dtype != XD_DTYPE_NONE && xdi_dtype_trains(d->dtype) && !d->buffer;
    return settings->sharded && converts && !d->traits.keep_f32 ? settings->sent_dtype : d->dtype;
}

XD_PRIVATE xd_dtype xdi_weight_view_dtype(const xdi_wrap_settings *settings, const xd_weight *w) {
    const bool stays = w->desc.traits.keep_f32 && settings->view_dtype != XD_DTYPE_F32;
    const bool converts =
        settings->view_dtype != XD_DTYPE_NONE && xdi_dtype_trains(w->desc.dtype) && !w->desc.buffer;
    return converts && !stays ? settings->view_dtype : w->desc.dtype;
}

/* Whether a frozen weight has a place for its gradient, so that it can be thawed. */
static bool xdi_weight_is_reserved(const xdi_wrap_settings *settings, const xd_weight *w) {
    const xd_weight_desc *d = &w->desc;
    return settings->reserve_frozen && d->traits.frozen && !d->buffer && xdi_dtype_trains(d->dtype) &&
           d->gradient_dtype == XD_DTYPE_F32;
}

/* Whether two weights of a unit lie in one buffer. */
static bool xdi_flat_fits(const xdi_wrap_settings *settings, const xd_weight *a, const xd_weight *b) {
    return a->desc.dtype == b->desc.dtype && a->desc.buffer == b->desc.buffer &&
           xdi_weight_sent_dtype(settings, a) == xdi_weight_sent_dtype(settings, b) &&
           xdi_weight_view_dtype(settings, a) == xdi_weight_view_dtype(settings, b) &&
           xdi_weight_is_trained(a) == xdi_weight_is_trained(b) &&
           xdi_weight_is_reserved(settings, a) == xdi_weight_is_reserved(settings, b);
}

static bool xdi_unit_has(const xdi_place *place, const struct xdi_unit *unit, const xd_weight *w) {
    return xdi_place_has(place, w) && xdi_block_unit(w->block) == unit;
}

/* A buffer for this weight and all after it that fit to it; *at: where its list begins, and ends afterwards. */
static void xdi_flat_begin(xdi_store *store, struct xdi_unit *unit, int64_t index, int64_t *at) {
    const xdi_place *place = store->place;
    xdi_flat *flat = &store->flats[store->flat_count++];
    const xd_weight *first = place->model->weights[index];
    if (!unit->flats) unit->flats = flat;
    unit->flat_count++;
    flat->place = store->place;
    flat->unit = unit;
    flat->weights = store->weights + *at;
    flat->dtype = first->desc.dtype;
    flat->sent_dtype = xdi_weight_sent_dtype(&place->settings, first);
    flat->view_dtype = xdi_weight_view_dtype(&place->settings, first);
    flat->trained = xdi_weight_is_trained(first) || xdi_weight_is_reserved(&place->settings, first);
    flat->whole = !place->settings.sharded || first->desc.buffer;
    for (int64_t i = index; i < place->model->weight_count; i++) {
        xd_weight *w = place->model->weights[i];
        if (w->owner != w || w->flat || !xdi_unit_has(place, unit, w) ||
            !xdi_flat_fits(&place->settings, first, w))
            continue;
        w->flat = flat;
        w->flat_index = flat->count++;
        store->weights[(*at)++] = w;
    }
}

XD_PRIVATE xd_result xdi_store_divide(xdi_store *store, const xd_fsdp_desc *d) {
    const xdi_place *place = store->place;
    const int64_t n = place->model->weight_count;
    int64_t at = 0;
    XD_TRY(xdi_store_find_units(store, d));
    for (int64_t i = 0; i < n; i++)
        if (xdi_place_has(place, place->model->weights[i]))
            XD_TRY(xdi_place_check_weight(place, place->model->weights[i]));
    store->flats = (xdi_flat *)xd_allocate(place->ctx, ((size_t)n + 1) * sizeof *store->flats);
    store->weights = (xd_weight **)xd_allocate(place->ctx, ((size_t)n + 1) * sizeof(xd_weight *));
    const size_t slots =
        (size_t)store->unit_count + (size_t)store->level_count * (size_t)place->settings.prefetch;
    store->slots = (xdi_unit_slot *)xd_allocate(place->ctx, slots * sizeof *store->slots);
    store->sums =
        (xdi_gradient_slot *)xd_allocate(place->ctx, (size_t)store->level_count * 2 * sizeof *store->sums);
    XD_REQUIRE(place->ctx, store->flats && store->weights && store->slots && store->sums, XD_ERROR_MEMORY,
               "no room for %lld weights", (long long)n);
    xdi_store_deal_slots(store);
    for (int64_t u = 0; u < store->unit_count; u++)
        for (int64_t i = 0; i < n; i++) {
            const xd_weight *w = place->model->weights[i];
            if (w->owner == w && !w->flat && xdi_unit_has(place, &store->units[u], w))
                xdi_flat_begin(store, &store->units[u], i, &at);
        }
    return XD_OK;
}
