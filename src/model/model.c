/* The description of a model: blocks, weights, ties, their names and their order. */

#include "model/describe_internal.h"
#include "comm/topology.h"
#include "tensor/interval_internal.h"

#include <string.h>

enum { XDI_MODEL_NAME = 1 << 16 /* bytes of a full name: what safetensors files hold */ };

/* ---- names ---- */

static size_t xdi_model_slot(const xdi_model_named *names, size_t room, const char *name) {
    size_t i = (size_t)xd_hash(0, name, strlen(name)) & (room - 1);
    while (names[i].name && strcmp(names[i].name, name) != 0) i = (i + 1) & (room - 1);
    return i;
}

static const xdi_model_named *xdi_model_named_at(const xd_model *model, const char *name) {
    const xdi_model_named *found = NULL;
    if (model->name_room > 0) found = &model->names[xdi_model_slot(model->names, model->name_room, name)];
    return found && found->name ? found : NULL;
}

/* Makes room for one more name. */
static xd_result xdi_model_grow(xd_model *model) {
    const size_t room = model->name_room ? 2 * model->name_room : 64;
    if (2 * (model->name_count + 1) <= model->name_room) return XD_OK;
    xdi_model_named *names = (xdi_model_named *)xd_allocate(model->ctx, room * sizeof *names);
    XD_REQUIRE(model->ctx, names, XD_ERROR_MEMORY, "no room for %llu names", (unsigned long long)room);
    for (size_t i = 0; i < model->name_room; i++)
        if (model->names[i].name) names[xdi_model_slot(names, room, model->names[i].name)] = model->names[i];
    xd_release(model->ctx, model->names);
    model->names = names;
    model->name_room = room;
    return XD_OK;
}

/* The name must be in memory that lives as long as the model, and there must be room. */
static void xdi_model_enter(xd_model *model, const char *name, xd_block *block, xd_weight *weight) {
    xdi_model_named *entry = &model->names[xdi_model_slot(model->names, model->name_room, name)];
    entry->name = name;
    entry->block = block;
    entry->weight = weight;
    model->name_count++;
}

/* One component or several, none of them empty. */
static xd_result xdi_model_check_name(xd_ctx *ctx, const char *parent, const char *name) {
    XD_REQUIRE(ctx, name && name[0], XD_ERROR_ARGUMENT, "what is added to \"%.80s\" has no name", parent);
    const size_t bytes = strlen(name);
    XD_REQUIRE(ctx, xdi_json_valid_bytes(name, bytes) == bytes, XD_ERROR_ARGUMENT,
               "a name in \"%.80s\" is not UTF-8", parent);
    XD_REQUIRE(ctx, name[0] != '.' && name[bytes - 1] != '.' && !strstr(name, ".."), XD_ERROR_ARGUMENT,
               "the name \"%.80s\" has an empty component", name);
    return XD_OK;
}

/* The full name of `name` in a block, in new memory. */
static xd_result xdi_model_full_name(const xd_block *parent, const char *name, char **out) {
    xd_ctx *ctx = parent->model->ctx;
    XD_TRY(xdi_model_check_name(ctx, parent->name, name));
    const size_t before = strlen(parent->name), bytes = strlen(name), total = before + (before > 0) + bytes;
    XD_REQUIRE(ctx, total <= XDI_MODEL_NAME, XD_ERROR_ARGUMENT,
               "\"%.80s\": a name of %llu bytes, allowed are %d", name, (unsigned long long)total,
               (int)XDI_MODEL_NAME);
    char *full = (char *)xd_allocate(ctx, total + 1);
    XD_REQUIRE(ctx, full, XD_ERROR_MEMORY, "no room for a name of %llu bytes", (unsigned long long)total);
    memcpy(full, parent->name, before);
    if (before > 0) full[before] = '.';
    memcpy(full + total - bytes, name, bytes);
    const xdi_model_named *taken = xdi_model_named_at(parent->model, full);
    const bool reserved = strcmp(full, "__metadata__") == 0;
    if (!taken && !reserved) {
        *out = full;
        return XD_OK;
    }
    const xd_result result = XD_FAIL(ctx, XD_ERROR_ARGUMENT, "the name \"%.80s\" %s", full,
                                     reserved       ? "is reserved for files"
                                     : taken->block ? "is that of a block"
                                                    : "is that of a weight");
    xd_release(ctx, full);
    return result;
}

/* What every addition needs; *full is the caller's to release when something fails later. */
static xd_result xdi_model_begin_add(xd_block *parent, const char *name, char **full) {
    xd_model *model = parent->model;
    XD_REQUIRE(model->ctx, !model->sealed, XD_ERROR_STATE, "\"%.80s\" comes after xd_model_seal",
               name ? name : "(unnamed)");
    XD_TRY(xdi_model_grow(model));
    return xdi_model_full_name(parent, name, full);
}

/* ---- blocks ---- */

XD_API xd_result xd_model_create(xd_ctx *ctx, const xd_model_desc *desc, xd_model **out) {
    XDI_GIVEN(ctx, ctx, out);
    xd_model *model = XDI_OBJECT(xd_model, ctx, sizeof *model);
    XD_REQUIRE(ctx, model, XD_ERROR_MEMORY, "no room for a model");
    XDI_BORN(xd_block, ctx, &model->root);
    model->ctx = ctx;
    if (desc) model->desc = *desc;
    model->root.model = model;
    model->root.name = "";
    model->root.desc.name = model->root.name;
    *out = model;
    return XD_OK;
}

XD_API xd_block *xd_model_root(const xd_model *model) {
    XD_ASSERT(model);
    return (xd_block *)&model->root;
}

XD_API xd_block_info xd_block_describe(const xd_block *block) {
    XD_ASSERT(block);
    const xd_block_info info = { block->name, &block->desc };
    return info;
}

static char *xdi_model_copy(xd_ctx *ctx, const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = (char *)xd_allocate(ctx, bytes);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

static void xdi_block_append(xd_block *parent, xd_block *block) {
    block->parent = parent;
    if (parent->last_child)
        parent->last_child->next = block;
    else
        parent->first_child = block;
    parent->last_child = block;
}

XD_API xd_result xd_block_add(xd_block *parent, const xd_block_desc *desc, xd_block **out) {
    XDI_LIVE(xd_block, parent);
    XDI_GIVEN(parent ? parent->model->ctx : NULL, parent, desc);
    xd_model *model = parent->model;
    xd_ctx *ctx = model->ctx;
    char *full = NULL;
    XD_REQUIRE(ctx, (int)desc->unit >= 0 && desc->unit <= XD_UNIT_NEVER, XD_ERROR_ARGUMENT,
               "block \"%.80s\": unit %d is unknown", desc->name ? desc->name : "", (int)desc->unit);
    XD_TRY(xdi_model_begin_add(parent, desc->name, &full));
    xd_block *block = XDI_OBJECT(xd_block, ctx, sizeof *block);
    char *type = desc->type ? xdi_model_copy(ctx, desc->type) : NULL;
    if (!block || (desc->type && !type)) {
        const xd_result result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for block \"%.80s\"", full);
        xd_release(ctx, type);
        xd_release(ctx, block);
        xd_release(ctx, full);
        return result;
    }
    block->model = model;
    block->name = full;
    block->type = type;
    block->desc = *desc;
    block->desc.name = full + strlen(full) - strlen(desc->name);
    block->desc.type = type;
    xdi_block_append(parent, block);
    xdi_model_enter(model, full, block, NULL);
    if (out) *out = block;
    return XD_OK;
}

/* ---- weights ---- */

XD_PRIVATE void xdi_weight_stored_shape(const xd_weight_desc *d, int64_t shape[XD_DIMS_MAX]) {
    memcpy(shape, d->shape, sizeof d->shape);
    if (d->stored_rows > 0) shape[0] = d->stored_rows;
}

XD_PRIVATE bool xdi_weight_is_trained(const xd_weight *weight) {
    return !weight->desc.buffer && !weight->desc.traits.frozen;
}

static xd_result xdi_weight_check_shape(xd_ctx *ctx, const char *name, const xd_weight_desc *d) {
    int64_t stored[XD_DIMS_MAX];
    size_t bytes = xd_dtype_size(d->dtype);
    XD_REQUIRE(ctx, bytes > 0, XD_ERROR_ARGUMENT, "weight \"%.80s\" has no dtype", name);
    XD_REQUIRE(ctx, d->ndim >= 0 && d->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
               "weight \"%.80s\" has %d dimensions, allowed are %d", name, d->ndim, XD_DIMS_MAX);
    XD_TRY(xdi_shape_check_rest(ctx, name, d->ndim, d->shape));
    XD_REQUIRE(ctx, d->ndim == 0 || d->shape[d->ndim - 1] != 0, XD_ERROR_ARGUMENT,
               "%s: shape[%d] is 0 and ndim %d", name, d->ndim - 1, d->ndim);
    XD_REQUIRE(ctx, d->stored_rows == 0 || (d->ndim > 0 && d->stored_rows >= d->shape[0]), XD_ERROR_SHAPE,
               "weight \"%.80s\": %lld rows are stored, it has %lld", name, (long long)d->stored_rows,
               (long long)(d->ndim > 0 ? d->shape[0] : 0));
    xdi_weight_stored_shape(d, stored);
    for (int i = 0; i < d->ndim; i++)
        XD_REQUIRE(ctx,
                   d->shape[i] >= 0 && xdi_size_multiply(bytes, (size_t)stored[i], &bytes) &&
                       bytes <= (size_t)INT64_MAX,
                   XD_ERROR_SHAPE,
                   "weight \"%.80s\": dimension %d of %lld is negative or makes the size overflow", name, i,
                   (long long)stored[i]);
    return XD_OK;
}

static xd_result xdi_weight_check_layout(xd_ctx *ctx, const char *name, const xd_weight_desc *d) {
    int64_t stored[XD_DIMS_MAX];
    if (!d->layout) return XD_OK;
    const xd_layout_desc *cut = xd_layout_settings(d->layout);
    XD_REQUIRE(ctx, cut->ndim == d->ndim, XD_ERROR_SHAPE, "weight \"%.80s\" has %d dimensions, its layout %d",
               name, d->ndim, cut->ndim);
    xdi_weight_stored_shape(d, stored);
    for (int i = 0; i < d->ndim; i++)
        XD_REQUIRE(ctx, cut->shape[i] == stored[i], XD_ERROR_SHAPE,
                   "weight \"%.80s\": dimension %d is %lld, in its layout %lld", name, i,
                   (long long)stored[i], (long long)cut->shape[i]);
    return XD_OK;
}

static xd_result xdi_weight_check_settings(xd_ctx *ctx, const char *name, const xd_weight_desc *d) {
    XD_TRY(xdi_init_check(ctx, name, d->dtype, &d->init));
    XD_REQUIRE(ctx, (int)d->traits.decay >= 0 && d->traits.decay <= XD_DECAY_NEVER, XD_ERROR_ARGUMENT,
               "weight \"%.80s\": decay %d is unknown", name, (int)d->traits.decay);
    XD_REQUIRE(ctx, !d->transient || d->buffer, XD_ERROR_ARGUMENT,
               "weight \"%.80s\" is transient but no buffer", name);
    XD_REQUIRE(ctx, d->buffer || d->traits.frozen || xd_dtype_is_floating(d->dtype), XD_ERROR_ARGUMENT,
               "weight \"%.80s\" of %s is trained: only floating types are", name, xd_dtype_name(d->dtype));
    XD_REQUIRE(ctx, !d->gradient || (!d->buffer && !d->traits.frozen), XD_ERROR_ARGUMENT,
               "weight \"%.80s\" is not trained but has a gradient", name);
    return XD_OK;
}

/* A tie has nothing of its own that could differ from its owner. */
static xd_result xdi_weight_check_tie(xd_ctx *ctx, const char *name, const xd_weight_desc *d,
                                      const xd_weight *owner) {
    XD_REQUIRE(ctx, owner, XD_ERROR_MISSING, "\"%.80s\" is tied to \"%.80s\", which is no weight", name,
               d->tied_to);
    const xd_weight_desc *o = &owner->desc;
    XD_REQUIRE(ctx,
               !d->layout && !d->value && !d->gradient && d->init.kind == XD_INIT_ZERO &&
                   d->buffer == o->buffer,
               XD_ERROR_ARGUMENT,
               "\"%.80s\" is tied to \"%.80s\": layout, storage, init and traits are those of its owner",
               name, d->tied_to);
    XD_REQUIRE(ctx,
               d->dtype == o->dtype && d->ndim == o->ndim &&
                   (d->stored_rows == 0 || d->stored_rows == o->stored_rows),
               XD_ERROR_SHAPE, "\"%.80s\" is %s of %d dimensions, \"%.80s\", to which it is tied, %s of %d",
               name, xd_dtype_name(d->dtype), d->ndim, d->tied_to, xd_dtype_name(o->dtype), o->ndim);
    for (int i = 0; i < d->ndim; i++)
        XD_REQUIRE(ctx, d->shape[i] == o->shape[i], XD_ERROR_SHAPE,
                   "\"%.80s\": dimension %d is %lld, of \"%.80s\", to which it is tied, %lld", name, i,
                   (long long)d->shape[i], d->tied_to, (long long)o->shape[i]);
    return XD_OK;
}

static xd_result xdi_weight_validate(xd_ctx *ctx, const char *name, const xd_weight_desc *d,
                                     const xd_weight *owner) {
    XD_TRY(xdi_weight_check_shape(ctx, name, d));
    XD_TRY(xdi_weight_check_layout(ctx, name, d));
    XD_TRY(xdi_weight_check_settings(ctx, name, d));
    return d->tied_to ? xdi_weight_check_tie(ctx, name, d, owner) : XD_OK;
}

static bool xdi_weight_names(const xd_topology *t, int rank) {
    bool named = !t->ranks && rank < t->rank_count;
    for (int i = 0; t->ranks && i < t->rank_count; i++) named = named || t->ranks[i] == rank;
    return named;
}

/* A rank that nobody has set: the layout is over the whole world, or over ranks of it among which 0 is not. Every rank would hold
 * the part of rank 0. */
static xd_result xdi_weight_check_rank(const xd_weight *weight) {
    const xd_topology *t = xd_layout_settings(weight->desc.layout)->topology;
    int rank;
    const int size = xdi_ctx_world(weight->model->ctx, &rank);
    const bool names = size > 0 && rank > 0 && weight->model->desc.rank == 0 && xdi_weight_names(t, rank);
    XD_REQUIRE(weight->model->ctx, !names || (t->rank_count < size && xdi_weight_names(t, 0)),
               XD_ERROR_ARGUMENT,
               "weight \"%.80s\": xd_model_desc.rank is 0, but this is rank %d, whose part the layout names",
               weight->name, rank);
    return XD_OK;
}

/* What this rank holds, and the caller's storage of it. */
static xd_result xdi_weight_place(xd_weight *weight) {
    const xd_weight_desc *d = &weight->desc;
    int64_t stored[XD_DIMS_MAX];
    xdi_weight_stored_shape(d, stored);
    bool inside = true;
    if (d->layout) XD_TRY(xdi_weight_check_rank(weight));
    if (d->layout)
        inside = xd_layout_region(d->layout, weight->model->desc.rank, &weight->region);
    else
        weight->region = xdi_region_whole(d->ndim, stored);
    xdi_region_shape(&weight->region, weight->shape);
    weight->count = inside ? xdi_region_numel(&weight->region) : 0;
    XD_REQUIRE(weight->model->ctx, (!d->value && !d->gradient) || d->room >= weight->count, XD_ERROR_SHAPE,
               "weight \"%.80s\": there is room for %lld elements, this rank holds %lld", weight->name,
               (long long)d->room, (long long)weight->count);
    weight->value = d->value;
    weight->gradient = d->gradient;
    weight->ready = d->value != NULL;
    return XD_OK;
}

static void xdi_weight_append(xd_block *block, xd_weight *weight) {
    if (block->last_weight)
        block->last_weight->next = weight;
    else
        block->first_weight = weight;
    block->last_weight = weight;
    block->model->weight_count++;
}

static bool xdi_weight_is_padded(const xd_weight_desc *desc) {
    return desc->ndim > 0 && desc->stored_rows > desc->shape[0];
}

static void xdi_weight_set_saved(xd_weight *weight, xd_region *saved) {
    const xd_region *held = &weight->region;
    const xd_interval rows = { 0, weight->desc.shape[0] };
    *saved = *held;
    saved->count[0] =
        xdi_intervals_intersect(held->interval[0], held->count[0], &rows, rows.end > 0, saved->interval[0]);
    weight->saved = saved;
}

/* Fills in a new weight, whose name is `full`; a region follows it in memory if it is padded. */
static xd_result xdi_weight_set_up(xd_weight *weight, xd_block *block, const xd_weight_desc *desc,
                                   char *full) {
    const xdi_model_named *tie = desc->tied_to ? xdi_model_named_at(block->model, desc->tied_to) : NULL;
    xd_weight *owner = tie ? tie->weight : NULL;
    XD_TRY(xdi_weight_validate(block->model->ctx, full, desc, owner));
    weight->model = block->model;
    weight->block = block;
    weight->name = full;
    weight->desc = *desc;
    weight->owner = owner ? owner->owner : weight;
    if (owner) weight->desc.traits = weight->owner->desc.traits;
    if (owner) weight->desc.stored_rows = weight->owner->desc.stored_rows;
    weight->desc.name = full + strlen(full) - strlen(desc->name);
    weight->desc.tied_to = owner ? weight->owner->name : NULL;
    if (weight->desc.gradient_dtype == XD_DTYPE_NONE) weight->desc.gradient_dtype = XD_DTYPE_F32;
    if (weight->desc.stored_rows == 0 && desc->ndim > 0) weight->desc.stored_rows = desc->shape[0];
    if (weight->desc.traits.partition_stride == 0) weight->desc.traits.partition_stride = 1;
    XD_TRY(xdi_weight_place(weight));
    if (xdi_weight_is_padded(desc)) xdi_weight_set_saved(weight, (xd_region *)(void *)(weight + 1));
    return XD_OK;
}

XD_API xd_result xd_weight_add(xd_block *block, const xd_weight_desc *desc, xd_weight **out) {
    XDI_LIVE(xd_block, block);
    XDI_GIVEN(block ? block->model->ctx : NULL, block, desc);
    xd_model *model = block->model;
    char *full = NULL;
    XD_TRY(xdi_model_begin_add(block, desc->name, &full));
    const size_t more = xdi_weight_is_padded(desc) ? sizeof(xd_region) : 0;
    xd_weight *weight = XDI_OBJECT(xd_weight, model->ctx, sizeof *weight + more);
    const xd_result result = weight
                                 ? xdi_weight_set_up(weight, block, desc, full)
                                 : XD_FAIL(model->ctx, XD_ERROR_MEMORY, "no room for weight \"%.80s\"", full);
    if (result != XD_OK) {
        xd_release(model->ctx, weight);
        xd_release(model->ctx, full);
        return result;
    }
    xdi_weight_append(block, weight);
    xdi_model_enter(model, full, NULL, weight);
    if (out) *out = weight;
    return XD_OK;
}

static xd_result xdi_weight_freeze(xd_weight *weight) {
    xd_weight *owner = weight->owner;
    xd_ctx *ctx = weight->model->ctx;
    XD_REQUIRE(ctx, !weight->model->sealed, XD_ERROR_STATE, "\"%.80s\" is frozen after xd_model_seal",
               weight->name);
    XD_REQUIRE(ctx, !owner->gradient, XD_ERROR_STATE, "\"%.80s\" is frozen, but has a gradient", owner->name);
    owner->desc.traits.frozen = true;
    return XD_OK;
}

static xd_result xdi_weight_thaw(xd_weight *weight) {
    xd_weight *owner = weight->owner;
    xd_ctx *ctx = weight->model->ctx;
    XD_REQUIRE(ctx, !weight->model->sealed, XD_ERROR_STATE, "\"%.80s\" is thawed after xd_model_seal",
               weight->name);
    XD_REQUIRE(ctx, owner->desc.buffer || xd_dtype_is_floating(owner->desc.dtype), XD_ERROR_ARGUMENT,
               "weight \"%.80s\" is thawed, but has integers (%s)", owner->name,
               xd_dtype_name(owner->desc.dtype));
    owner->desc.traits.frozen = false;
    return XD_OK;
}

XD_API xd_result xd_weight_set_frozen(xd_weight *weight, bool frozen) {
    XDI_LIVE(xd_weight, weight);
    XDI_GIVEN(NULL, weight);
    return frozen ? xdi_weight_freeze(weight) : xdi_weight_thaw(weight);
}

XD_API xd_weight_info xd_weight_describe(const xd_weight *weight) {
    XD_ASSERT(weight);
    const xd_weight *owner = weight->owner;
    xd_weight_info info;
    memset(&info, 0, sizeof info);
    info.name = weight->name;
    info.desc = &weight->desc;
    info.owner = weight->owner;
    info.block = weight->block;
    info.region = &owner->region;
    info.count = owner->count;
    info.value = owner->value;
    info.gradient = owner->gradient;
    info.ready = owner->ready;
    return info;
}

/* ---- what there is ---- */

XD_PRIVATE int64_t xdi_model_weight_count(const xd_model *model) {
    return model->sealed ? model->weight_count : 0;
}

XD_API xd_weight *xd_model_weight_at(const xd_model *model, int64_t index) {
    XD_ASSERT(model);
    return model->sealed && index >= 0 && index < model->weight_count ? model->weights[index] : NULL;
}

XD_API xd_weight *xd_model_find_weight(const xd_model *model, const char *name) {
    XD_ASSERT(model);
    const xdi_model_named *found = xdi_model_named_at(model, name);
    return found ? found->weight : NULL;
}

XD_API xd_block *xd_model_find_block(const xd_model *model, const char *name) {
    XD_ASSERT(model);
    const xdi_model_named *found = *name ? xdi_model_named_at(model, name) : NULL;
    return found ? found->block : *name ? NULL : xd_model_root(model);
}

XD_PRIVATE void xdi_inputs_forget(xd_inputs *inputs) {
    for (int64_t i = 0; inputs && i < inputs->count * inputs->in_flight; i++) inputs->micro_batches[i] = -1;
}

XD_API void xd_model_destroy(xd_model *model) {
    if (!model || XDI_IS_GONE(xd_model, model)) return;
    XDI_DEAD(&model->root);
    xd_ctx *ctx = model->ctx;
    for (size_t i = 0; i < model->name_room; i++) {
        const xdi_model_named *entry = &model->names[i];
        if (entry->block) xd_release(ctx, entry->block->type);
        xd_release(ctx, (void *)entry->name);
        xd_release(ctx, entry->block);
        xd_release(ctx, entry->weight);
    }
    if (model->storage) xd_ctx_kernels(ctx)->memory.release(ctx, model->storage);
    xd_release(ctx, model->weights);
    xd_release(ctx, model->names);
    xd_release(ctx, model);
}
