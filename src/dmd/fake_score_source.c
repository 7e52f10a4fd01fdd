/* Where the values of a fake score come from: lists on every rank, and elements from each kind of source. */

#include "dmd/fake_score_internal.h"

#include "comm/internal.h"
#include "comm/mesh.h"

#include <string.h>

/* ---- a teacher as parts ---- */

static bool xdi_fake_teacher_holds(const xd_model *teacher) {
    bool holds = teacher->parallel != NULL;
    for (int64_t i = 0; i < teacher->weight_count; i++) holds = holds || teacher->weights[i]->value;
    return holds;
}

/* Of a teacher with storage, every weight has values that can be taken as they are. */
static xd_result xdi_fake_check_teacher(const xdi_fake *f, bool holds) {
    const xd_model *teacher = f->desc->teacher;
    for (int64_t i = 0; i < teacher->weight_count; i++) {
        const xd_weight *w = teacher->weights[i];
        const xd_layout_desc *cut = w->desc.layout ? xd_layout_settings(w->desc.layout) : NULL;
        if (w->owner != w) continue;
        for (int a = 0; cut && a < cut->topology->axis_count; a++)
            XD_REQUIRE(f->ctx, cut->placement[a].kind != XD_PARTIAL, XD_ERROR_UNSUPPORTED,
                       "weight \"%.80s\" of the teacher is a partial sum over axis %d", w->name, a);
        XD_REQUIRE(f->ctx, !holds || (w->ready && (w->flat || w->value || w->count == 0)), XD_ERROR_STATE,
                   "weight \"%.80s\" of the teacher holds no values", w->name);
    }
    return XD_OK;
}

static xd_result xdi_fake_take_teacher(xdi_fake *f) {
    const xd_model *teacher = f->desc->teacher;
    const bool holds = xdi_fake_teacher_holds(teacher);
    int64_t any = holds;
    XD_TRY(xd_agree(f->world, xdi_fake_check_teacher(f, holds)));
    XD_TRY(xd_all_reduce(f->world, &any, &any, 1, XD_DTYPE_I64, XD_MAX));
    XD_REQUIRE(f->ctx, any, XD_ERROR_STATE, "no rank of %d has values of the teacher",
               xd_comm_size(f->world));
    f->teacher_parts =
        (xd_tensor_part *)xd_allocate(f->ctx, ((size_t)teacher->weight_count + 1) * sizeof *f->teacher_parts);
    XD_TRY(xd_agree(f->world, f->teacher_parts ? XD_OK
                                               : XD_FAIL(f->ctx, XD_ERROR_MEMORY, "no room for %lld parts",
                                                         (long long)teacher->weight_count)));
    for (int64_t i = 0; i < teacher->weight_count; i++) {
        const xd_weight *w = teacher->weights[i];
        if (w->owner != w) continue;
        xd_tensor_part *part = &f->teacher_parts[f->part_count++];
        *part = xdi_fake_part(w, true);
        if (!holds) part->range.end = part->range.begin = 0;
    }
    f->parts = f->teacher_parts;
    return XD_OK;
}

/* Of the indices that a rank has of a weight without a wrapper; 0 for none, and for those of which the wrapper knows who speaks. */
static int64_t xdi_fake_region_hash(const xd_tensor_part *part, bool wrapped) {
    uint64_t hash = 1;
    int64_t out;
    if (wrapped || part->range.begin == part->range.end) return 0;
    for (int d = 0; d < part->ndim; d++)
        hash = xd_hash(hash, part->region->interval[d],
                       (size_t)part->region->count[d] * sizeof part->region->interval[d][0]);
    hash |= 1;
    memcpy(&out, &hash, sizeof out);
    return out;
}

/* Of ranks with the same part of a weight the lowest speaks for it: layouts know the ranks of their own mesh alone. Collective. */
static xd_result xdi_fake_choose(xdi_fake *f, int64_t *hashes) {
    const int rank = xd_comm_rank(f->world), size = xd_comm_size(f->world);
    const int64_t n = f->part_count;
    int64_t *const own = hashes + n * size, *const counts = own + n;
    const bool wrapped = f->desc->teacher->parallel != NULL;
    for (int64_t i = 0; i < n; i++) own[i] = xdi_fake_region_hash(&f->teacher_parts[i], wrapped);
    for (int r = 0; r < size; r++) counts[r] = n;
    XD_TRY(xd_all_gather(f->world, own, hashes, counts, XD_DTYPE_I64));
    for (int64_t i = 0; i < n; i++) {
        if (own[i]) f->teacher_parts[i].replica = false;
        for (int r = 0; r < rank && own[i]; r++)
            if (hashes[r * n + i] == own[i]) f->teacher_parts[i].replica = true;
    }
    return XD_OK;
}

static xd_result xdi_fake_choose_speakers(xdi_fake *f) {
    const size_t size = (size_t)xd_comm_size(f->world), room = (size_t)f->part_count * (size + 1) + size;
    if (f->part_count == 0) return XD_OK;
    int64_t *hashes = (int64_t *)xd_allocate(f->ctx, room * sizeof *hashes);
    xd_result result =
        xd_agree(f->world, hashes ? XD_OK
                                  : XD_FAIL(f->ctx, XD_ERROR_MEMORY, "no room for %llu hashes of parts",
                                            (unsigned long long)room));
    if (result == XD_OK) result = xdi_fake_choose(f, hashes);
    xd_release(f->ctx, hashes);
    return result;
}

/* ---- lists ---- */

static xd_result xdi_fake_reserve(xdi_fake *f, int64_t count) {
    f->keys = (xdi_fake_key *)xd_allocate(f->ctx, ((size_t)count + 1) * sizeof *f->keys);
    f->order = (const void **)xd_allocate(f->ctx, ((size_t)count + 1) * sizeof *f->order);
    XD_REQUIRE(f->ctx, f->keys && f->order, XD_ERROR_MEMORY, "no room for a list of %lld tensors",
               (long long)count);
    f->key_count = count;
    return XD_OK;
}

static xd_result xdi_fake_set_key(const xdi_fake *f, int64_t i, const xd_weights_entry *entry) {
    xdi_fake_key *key = &f->keys[i];
    XD_REQUIRE(f->ctx,
               entry->name && entry->name[0] && xd_dtype_size(entry->dtype) && entry->ndim >= 0 &&
                   entry->ndim <= XD_DIMS_MAX && (entry->shape || entry->ndim == 0),
               XD_ERROR_ARGUMENT,
               "tensor %lld of the source: \"%.80s\" of %s and %d dimensions, allowed are %d", (long long)i,
               entry->name ? entry->name : "", xd_dtype_name(entry->dtype), entry->ndim, (int)XD_DIMS_MAX);
    key->name = entry->name;
    key->dtype = entry->dtype;
    key->ndim = entry->ndim;
    key->index = i;
    if (entry->ndim > 0) memcpy(key->shape, entry->shape, (size_t)entry->ndim * sizeof *key->shape);
    return XD_OK;
}

static xd_weights_entry xdi_fake_entry(const char *name, xd_dtype dtype, int ndim, const int64_t *shape) {
    xd_weights_entry entry;
    entry.name = name;
    entry.dtype = dtype;
    entry.ndim = ndim;
    entry.shape = shape;
    return entry;
}

/* This rank's own list. */
static xd_result xdi_fake_fill_keys(xdi_fake *f) {
    const xd_fake_score_source *s = &f->desc->source;
    const bool root = s->from == XD_FAKE_SCORE_FROM_ROOT, reads = s->from == XD_FAKE_SCORE_FROM_READER;
    const int64_t count = root ? s->tensor_count : reads ? s->reader.entry_count : f->part_count;
    XD_TRY(xdi_fake_reserve(f, count));
    for (int64_t i = 0; i < count; i++) {
        const xd_tensor_part *p = root || reads ? NULL : &f->parts[i];
        const xd_state_tensor *t = root ? &s->tensors[i] : NULL;
        const xd_weights_entry entry = reads ? s->reader.entries[i]
                                       : t   ? xdi_fake_entry(t->name, t->dtype, t->ndim, t->shape)
                                             : xdi_fake_entry(p->name, p->dtype, p->ndim, p->shape);
        XD_TRY(xdi_fake_set_key(f, i, &entry));
        bool empty = false;
        for (int d = 0; d < entry.ndim; d++) empty = empty || entry.shape[d] == 0;
        XD_REQUIRE(f->ctx, !t || t->data || empty, XD_ERROR_STATE, "tensor \"%.80s\" of rank 0 has no data",
                   entry.name);
    }
    return XD_OK;
}

static int xdi_fake_by_name(const void *a, const void *b) {
    return strcmp(((const xdi_fake_key *)a)->name, ((const xdi_fake_key *)b)->name);
}

static xd_result xdi_fake_sort(xdi_fake *f) {
    for (int64_t i = 0; i < f->key_count; i++) f->order[i] = &f->keys[i];
    xdi_sort(f->order, (size_t)f->key_count, xdi_fake_by_name);
    for (int64_t i = 1; i < f->key_count; i++)
        XD_REQUIRE(f->ctx, xdi_fake_by_name(f->order[i - 1], f->order[i]) != 0, XD_ERROR_ARGUMENT,
                   "the source has two tensors named \"%.80s\"", ((const xdi_fake_key *)f->order[i])->name);
    return XD_OK;
}

XD_PRIVATE xdi_fake_key *xdi_fake_find(const xdi_fake *f, const char *name) {
    int64_t low = 0, high = f->key_count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (strcmp(((const xdi_fake_key *)f->order[middle])->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == f->key_count || strcmp(((const xdi_fake_key *)f->order[low])->name, name) != 0) return NULL;
    return &f->keys[(const xdi_fake_key *)f->order[low] - f->keys];
}

static uint64_t xdi_fake_hash_keys(const xdi_fake *f) {
    uint64_t hash = xd_hash(0, &f->key_count, sizeof f->key_count);
    for (int64_t i = 0; i < f->key_count; i++) {
        const xdi_fake_key *key = &f->keys[i];
        const int64_t numbers[2] = { (int64_t)key->dtype, key->ndim };
        hash = xd_hash(hash, numbers, sizeof numbers);
        hash = xd_hash(hash, key->shape, (size_t)key->ndim * sizeof *key->shape);
        hash = xd_hash(hash, key->name, strlen(key->name) + 1);
    }
    return hash;
}

/* ---- the list of rank 0 ---- */

enum {
    XDI_FAKE_NUMBERS = 3 + XD_DIMS_MAX /* about a tensor: the place of its name, dtype, dimensions, shape */
};

/* Into a message, or from there; names in f->text. */
static void xdi_fake_write_keys(const xdi_fake *f, int64_t *numbers) {
    int64_t at = 0;
    for (int64_t i = 0; i < f->key_count; i++, numbers += XDI_FAKE_NUMBERS) {
        const xdi_fake_key *key = &f->keys[i];
        const size_t bytes = strlen(key->name) + 1;
        numbers[0] = at;
        numbers[1] = (int64_t)key->dtype;
        numbers[2] = key->ndim;
        memcpy(numbers + 3, key->shape, sizeof key->shape);
        memcpy(f->text + at, key->name, bytes);
        at += (int64_t)bytes;
    }
}

static void xdi_fake_read_keys(const xdi_fake *f, const int64_t *numbers) {
    for (int64_t i = 0; i < f->key_count; i++, numbers += XDI_FAKE_NUMBERS) {
        xdi_fake_key *key = &f->keys[i];
        key->name = f->text + numbers[0];
        key->dtype = (xd_dtype)numbers[1];
        key->ndim = (int)numbers[2];
        memcpy(key->shape, numbers + 3, sizeof key->shape);
        key->index = i;
    }
}

/* Every rank gets the list of rank 0. Collective. */
static xd_result xdi_fake_publish(xdi_fake *f) {
    const bool root = xd_comm_rank(f->world) == 0;
    int64_t sizes[2] = { f->key_count, 0 };
    for (int64_t i = 0; root && i < f->key_count; i++) sizes[1] += (int64_t)strlen(f->keys[i].name) + 1;
    XD_TRY(xd_broadcast(f->world, sizes, 2, XD_DTYPE_I64, 0));
    const int64_t count = sizes[0] * XDI_FAKE_NUMBERS;
    int64_t *numbers = (int64_t *)xd_allocate(f->ctx, (size_t)(count + 1) * sizeof *numbers);
    f->text = (char *)xd_allocate(f->ctx, (size_t)sizes[1] + 1);
    xd_result result = root ? XD_OK : xdi_fake_reserve(f, sizes[0]);
    if (!numbers || !f->text)
        result =
            XD_FAIL(f->ctx, XD_ERROR_MEMORY, "no room for the list of %lld tensors", (long long)sizes[0]);
    result = xd_agree(f->world, result);
    if (result == XD_OK && root) xdi_fake_write_keys(f, numbers);
    if (result == XD_OK && count > 0) result = xd_broadcast(f->world, numbers, count, XD_DTYPE_I64, 0);
    if (result == XD_OK && count > 0) result = xd_broadcast(f->world, f->text, sizes[1], XD_DTYPE_U8, 0);
    if (result == XD_OK) xdi_fake_read_keys(f, numbers);
    xd_release(f->ctx, numbers);
    return result;
}

/* ---- any list ---- */

/* Parts are the same tensors on all ranks, and each element has a rank that speaks for it. Collective. */
static xd_result xdi_fake_check_parts(xdi_fake *f) {
    xd_checkpoint_network network;
    xdi_content content;
    memset(&network, 0, sizeof network);
    network.parts = f->parts;
    network.part_count = f->part_count;
    xd_result result = xd_agree(f->world, xdi_content_create(f->ctx, &network, 1, &content));
    if (result == XD_OK) result = xdi_content_agree(&content, f->world);
    if (result == XD_OK && f->teacher_parts) result = xdi_fake_choose_speakers(f);
    if (result == XD_OK) result = xdi_cover_check(&content, f->world);
    xdi_content_destroy(&content);
    return result;
}

XD_PRIVATE xd_result xdi_fake_list(xdi_fake *f) {
    const xd_fake_score_source *s = &f->desc->source;
    const bool root = s->from == XD_FAKE_SCORE_FROM_ROOT, reads = s->from == XD_FAKE_SCORE_FROM_READER;
    f->parts = s->parts;
    f->part_count = s->from == XD_FAKE_SCORE_FROM_PARTS ? s->part_count : 0;
    if (s->from == XD_FAKE_SCORE_FROM_TEACHER) XD_TRY(xdi_fake_take_teacher(f));
    if (!root && !reads) XD_TRY(xdi_fake_check_parts(f));
    XD_TRY(xd_agree(f->world, root && xd_comm_rank(f->world) != 0 ? XD_OK : xdi_fake_fill_keys(f)));
    if (root) XD_TRY(xdi_fake_publish(f));
    XD_TRY(xd_agree(f->world, xdi_fake_sort(f)));
    return xdi_agree_list(f->world, f->key_count, xdi_fake_hash_keys(f), "the list of the source's tensors");
}

XD_PRIVATE void xdi_fake_list_release(xdi_fake *f) {
    xd_release(f->ctx, f->teacher_parts);
    xd_release(f->ctx, f->text);
    xd_release(f->ctx, (void *)f->order);
    xd_release(f->ctx, f->keys);
}

/* ---- elements from parts ---- */

static int64_t xdi_fake_loaded(const xdi_fake *f) {
    int64_t n = 0;
    for (int64_t i = 0; i < f->tensor_count; i++) n += f->tensors[i].origin == XDI_FAKE_LOADED;
    return n;
}

static xd_result xdi_fake_load_parts(xdi_fake *f, int64_t count) {
    int64_t n = 0;
    xdi_move *moves = (xdi_move *)xd_allocate(f->ctx, (size_t)count * sizeof *moves);
    xd_result result =
        xd_agree(f->world, moves ? XD_OK
                                 : XD_FAIL(f->ctx, XD_ERROR_MEMORY, "no room for %lld tensors that move",
                                           (long long)count));
    for (int64_t i = 0; result == XD_OK && i < f->tensor_count; i++) {
        const xdi_fake_tensor *t = &f->tensors[i];
        if (t->origin != XDI_FAKE_LOADED) continue;
        moves[n].from = &f->parts[f->keys[t->key].index];
        moves[n++].to = &t->part;
    }
    if (result == XD_OK)
        result = xdi_move_parts(f->world, moves, count, f->desc->staging_bytes, &f->report.local);
    xd_release(f->ctx, moves);
    return result;
}

/* ---- elements from rank 0 ---- */

static xd_result xdi_fake_scatter(const xdi_fake *f, xd_tensor_part *parts, xd_state_tensor *tensors) {
    xd_checkpoint_network network;
    xd_state_scatter_desc d;
    memset(&network, 0, sizeof network);
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < f->tensor_count; i++) {
        const xdi_fake_tensor *t = &f->tensors[i];
        if (t->origin != XDI_FAKE_LOADED) continue;
        parts[network.part_count++] = t->part;
        if (xd_comm_rank(f->world) != 0) continue;
        tensors[d.tensor_count] = f->desc->source.tensors[f->keys[t->key].index];
        tensors[d.tensor_count].group = "model";
        tensors[d.tensor_count++].name = t->part.name;
    }
    network.parts = parts;
    d.networks = &network;
    d.network_count = 1;
    d.tensors = tensors;
    d.convert = true;
    d.staging_bytes = f->desc->staging_bytes;
    return xd_state_scatter(f->world, &d, NULL);
}

static xd_result xdi_fake_load_root(xdi_fake *f, int64_t count) {
    xd_tensor_part *parts = (xd_tensor_part *)xd_allocate(f->ctx, (size_t)count * sizeof *parts);
    xd_state_tensor *tensors = (xd_state_tensor *)xd_allocate(f->ctx, (size_t)count * sizeof *tensors);
    xd_result result =
        xd_agree(f->world, parts && tensors ? XD_OK
                                            : XD_FAIL(f->ctx, XD_ERROR_MEMORY, "no room for %lld parts",
                                                      (long long)count));
    if (result == XD_OK) result = xdi_fake_scatter(f, parts, tensors);
    xd_release(f->ctx, tensors);
    xd_release(f->ctx, parts);
    return result;
}

/* ---- elements by a function ---- */

typedef struct xdi_fake_reading {
    const xdi_fake *f;
    unsigned char *stage, *converted; /* [room] of the host: as read; as they are on the device */
    size_t room;
    int64_t tensor, position; /* what comes next */
} xdi_fake_reading;

/* Bytes of what this rank wants, as it is stored there and here, whichever is more. */
static uint64_t xdi_fake_bytes(const xdi_fake *f, const xdi_fake_tensor *t) {
    const size_t here = xd_dtype_size(t->part.dtype), there = xd_dtype_size(f->keys[t->key].dtype);
    return (uint64_t)(t->part.range.end - t->part.range.begin) * (here > there ? here : there);
}

static xd_result xdi_fake_read_reserve(xdi_fake_reading *r, size_t staging_bytes, uint64_t *left) {
    const xdi_fake *f = r->f;
    const bool device = xd_ctx_kernels(f->ctx)->device != XD_DEVICE_CPU;
    uint64_t most = 8;
    for (int64_t i = 0; i < f->tensor_count; i++) {
        const uint64_t bytes =
            f->tensors[i].origin == XDI_FAKE_LOADED ? xdi_fake_bytes(f, &f->tensors[i]) : 0;
        if (bytes > most) most = bytes;
        *left += bytes;
    }
    r->room = most < staging_bytes ? (size_t)most : staging_bytes;
    if (r->room < 8) r->room = 8;
    r->stage = (unsigned char *)xd_allocate(f->ctx, r->room);
    r->converted = (unsigned char *)xd_allocate(f->ctx, device ? r->room : 1);
    XD_REQUIRE(f->ctx, r->stage && r->converted, XD_ERROR_MEMORY, "no room for %llu bytes that are read",
               (unsigned long long)r->room);
    return XD_OK;
}

/* What was read, to where it belongs. */
static xd_result xdi_fake_read_place(const xdi_fake_reading *r, const xdi_fake_tensor *t, xd_dtype dtype,
                                     int64_t count, void *to) {
    const xd_ctx *ctx = r->f->ctx;
    const xd_launch launch = xd_ctx_launch((xd_ctx *)ctx);
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const bool device = kernels->device != XD_DEVICE_CPU;
    const size_t bytes = (size_t)count * xd_dtype_size(t->part.dtype);
    const void *from = r->stage;
    if (dtype != t->part.dtype) {
        xd_cast_array cast;
        cast.target = device ? (void *)r->converted : to;
        cast.target_dtype = t->part.dtype;
        cast.source = r->stage;
        cast.source_dtype = dtype;
        cast.count = count;
        XD_TRY(xd_ctx_host_kernels((xd_ctx *)ctx)->optimizer.cast(&launch, &cast, 1));
        if (!device) return XD_OK;
        from = r->converted;
    }
    XD_TRY(kernels->memory.copy(&launch, to, from, bytes, XD_COPY_TO_DEVICE));
    return kernels->memory.synchronize(&launch);
}

/* Elements that are adjacent in the tensor, from the next position on; returns their bytes. */
static xd_result xdi_fake_read_some(xdi_fake_reading *r, const xdi_fake_tensor *t, uint64_t *bytes) {
    const xdi_fake *f = r->f;
    const xd_fake_score_reader *reader = &f->desc->source.reader;
    const xdi_fake_key *key = &f->keys[t->key];
    const size_t size = xd_dtype_size(t->part.dtype), there = xd_dtype_size(key->dtype);
    const int64_t room = (int64_t)(r->room / (size > there ? size : there));
    xd_interval elements;
    int64_t run = xdi_part_run(&t->part, r->position, &elements.begin);
    if (run > room) run = room;
    elements.end = elements.begin + run;
    xdi_clear_error(f->ctx);
    XD_TRY(xdi_builder_called(f->ctx,
                              reader->read(reader->user, &reader->entries[key->index], elements, r->stage),
                              "the reader of tensor", (int)key->index));
    XD_TRY(xdi_fake_read_place(r, t, key->dtype, run,
                               (unsigned char *)t->part.data +
                                   (size_t)(r->position - t->part.range.begin) * size));
    r->position += run;
    *bytes = (uint64_t)run * (size > there ? size : there);
    return XD_OK;
}

/* An xdi_work. */
static xd_result xdi_fake_read_work(void *reading, uint64_t bytes) {
    xdi_fake_reading *r = (xdi_fake_reading *)reading;
    for (uint64_t done = 0, some = 0; r->tensor < r->f->tensor_count && done < bytes; done += some) {
        const xdi_fake_tensor *t = &r->f->tensors[r->tensor];
        some = 0;
        if (r->position < t->part.range.begin) r->position = t->part.range.begin;
        if (t->origin == XDI_FAKE_LOADED && r->position < t->part.range.end) {
            XD_TRY(xdi_fake_read_some(r, t, &some));
            continue;
        }
        r->tensor++;
        r->position = 0;
    }
    return XD_OK;
}

static xd_result xdi_fake_load_read(xdi_fake *f) {
    xdi_fake_reading r;
    uint64_t left = 0;
    memset(&r, 0, sizeof r);
    r.f = f;
    const size_t staging = f->desc->staging_bytes ? f->desc->staging_bytes : (size_t)XDI_STAGING;
    xd_result result = xd_agree(f->world, xdi_fake_read_reserve(&r, staging, &left));
    if (result == XD_OK) result = xdi_rounds(f->world, left, xdi_fake_read_work, &r);
    xd_release(f->ctx, r.converted);
    xd_release(f->ctx, r.stage);
    return result;
}

XD_PRIVATE xd_result xdi_fake_load(xdi_fake *f) {
    const int64_t count = xdi_fake_loaded(f);
    if (count == 0) return XD_OK;
    switch (f->desc->source.from) {
    case XD_FAKE_SCORE_FROM_ROOT: return xdi_fake_load_root(f, count);
    case XD_FAKE_SCORE_FROM_READER: return xdi_fake_load_read(f);
    default: return xdi_fake_load_parts(f, count);
    }
}
