/* Reads and writes directories of others through a map. */

#include "checkpoint/map.h"

#include "checkpoint/full.h"
#include "checkpoint/map_internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "io/internal.h"
#include "kernel/copy.h"
#include "kernel/internal.h"
#include "tensor/internal.h"
#include "tensor/interval_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- what both ways have in common ---- */

/* A map that is followed. */
typedef struct xdi_mapped {
    xd_comm *comm;
    xd_ctx *ctx;
    const char *directory;
    size_t staging_bytes;
    xd_checkpoint_network network;
    xdi_content content;
    xdi_mapped_plan plan;
    xdi_mapped_boxes boxes;
    unsigned char *stage;
} xdi_mapped;

static xdi_mapped xdi_mapped_begin(xd_comm *comm, const char *directory, const xd_mapped_weights *weights,
                                   size_t staging_bytes) {
    xdi_mapped m;
    memset(&m, 0, sizeof m);
    m.comm = comm;
    m.ctx = xd_comm_ctx(comm);
    m.directory = directory;
    m.staging_bytes = staging_bytes ? staging_bytes : (size_t)XDI_STAGING;
    m.network.parts = weights->parts;
    m.network.part_count = weights->part_count;
    return m;
}

static void xdi_mapped_end(xdi_mapped *m) {
    xd_release(m->ctx, m->stage);
    xd_release(m->ctx, m->boxes.list);
    xd_release(m->ctx, m->boxes.regions);
    xdi_mapped_plan_destroy(&m->plan);
    xdi_content_destroy(&m->content);
}

static xd_result xdi_mapped_list_content(xdi_mapped *m) {
    XD_REQUIRE(m->ctx, m->directory && m->directory[0], XD_ERROR_ARGUMENT, "there is no directory");
    XD_REQUIRE(m->ctx, m->staging_bytes >= 64, XD_ERROR_ARGUMENT, "staging_bytes %llu is less than 64",
               (unsigned long long)m->staging_bytes);
    XD_TRY(xdi_content_create(m->ctx, &m->network, 1, &m->content));
    m->boxes.regions = (xd_region *)xd_allocate(m->ctx, (XDI_REGION_FLAT_MAX + 1) * sizeof *m->boxes.regions);
    XD_REQUIRE(m->ctx, m->boxes.regions, XD_ERROR_MEMORY, "no room for the regions of a tensor");
    return XD_OK;
}

static uint64_t xdi_mapped_hash_entry(uint64_t hash, const xd_weight_map *map) {
    const int64_t numbers[6] = { map->transpose, map->dim,    map->their_begin,
                                 map->our_begin, map->length, map->ours != NULL };
    hash = xd_hash(hash, numbers, sizeof numbers);
    if (map->theirs) hash = xd_hash(hash, map->theirs, strlen(map->theirs) + 1);
    return map->ours ? xd_hash(hash, map->ours, strlen(map->ours) + 1) : hash;
}

/* What the call is, and what all ranks must say of it alike. */
static xd_result xdi_mapped_agree_settings(const xdi_mapped *m, const xd_mapped_weights *weights,
                                           const xd_weights_import_desc *import, bool pieces) {
    uint64_t maps = 0;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    for (int64_t i = 0; i < weights->map_count && weights->maps; i++)
        maps = xdi_mapped_hash_entry(maps, &weights->maps[i]);
    xdi_fact_integer(&facts, "import", import != NULL);
    xdi_fact_integer(&facts, "staging_bytes", (int64_t)m->staging_bytes);
    xdi_fact_integer(&facts, "lenient", import && import->lenient);
    xdi_fact_integer(&facts, "convert", import && import->convert);
    xdi_fact_integer(&facts, "pieces", pieces);
    xdi_fact_integer(&facts, "map_count", weights->map_count);
    xdi_fact_bytes(&facts, "list of maps", &maps, sizeof maps);
    return xdi_agree_facts(m->comm, &facts, import ? "settings of an import" : "settings of an export");
}

/* The same list and the same plan on every rank. Collective. */
static xd_result xdi_mapped_agree(xdi_mapped *m, const xd_mapped_weights *weights,
                                  const xd_weights_import_desc *import, bool pieces) {
    const bool lenient = import && import->lenient;
    XD_TRY(xd_agree(m->comm, xdi_mapped_list_content(m)));
    XD_TRY(xdi_mapped_agree_settings(m, weights, import, pieces));
    XD_TRY(xdi_content_agree(&m->content, m->comm));
    return xd_agree(m->comm, xdi_mapped_plan_create(&m->content, weights, lenient, &m->plan));
}

/* ---- import ---- */

typedef struct xdi_import {
    xdi_mapped m;
    const xd_weights_import_desc *desc;
    xd_weights *reader;
    xd_checkpoint_report report;
    unsigned char *converted, *wire; /* wire: in memory of the device */
    int64_t box, at[XD_DIMS_MAX];    /* what comes next */
} xdi_import;

static bool xdi_import_on_device(const xdi_import *l) {
    return xd_ctx_kernels(l->m.ctx)->device != XD_DEVICE_CPU;
}

static xd_result xdi_import_open(xdi_import *l) {
    xd_weights_desc d;
    memset(&d, 0, sizeof d);
    d.directory = l->m.directory;
    d.mode = XD_WEIGHTS_STREAM;
    d.lenient = l->desc->lenient;
    return xd_weights_open(l->m.ctx, &d, &l->reader);
}

static void xdi_import_note(xdi_import *l, const char *name) {
    xd_checkpoint_report *r = &l->report;
    if (r->missing + r->unexpected + r->wrong_shape <= 5) xdi_load_append(r->names, sizeof r->names, name);
}

static const xd_weights_tensor *xdi_import_theirs(const xdi_import *l, const xdi_mapped_tensor *t) {
    return xd_weights_at(l->reader, t->index);
}

/* Counts one tensor of theirs, and forgets where it is when it does not fit. */
static void xdi_import_judge(xdi_import *l, xdi_mapped_tensor *t) {
    t->index = xd_weights_find(l->reader, t->name);
    if (t->index < 0) {
        l->report.missing++;
        xdi_import_note(l, t->name);
        return;
    }
    const xd_weights_tensor *info = xdi_import_theirs(l, t);
    const size_t bytes = (size_t)t->ndim * sizeof *t->shape;
    if (info->ndim != t->ndim || memcmp(info->shape, t->shape, bytes) != 0) {
        l->report.wrong_shape++;
        xdi_import_note(l, t->name);
        t->index = -1;
        return;
    }
    l->report.loaded++;
}

static int xdi_import_by_name(const void *name, const void *tensor) {
    return strcmp((const char *)name, ((const xdi_mapped_tensor *)tensor)->name);
}

static bool xdi_import_expects(const xdi_import *l, const char *name) {
    const xdi_mapped_plan *p = &l->m.plan;
    return xdi_find(name, p->tensors, sizeof *p->tensors, p->tensor_count, xdi_import_by_name) >= 0 ||
           xdi_mapped_leaves_out(p->weights, name);
}

static void xdi_import_find_unexpected(xdi_import *l) {
    const int64_t count = xd_weights_describe(l->reader).tensor_count;
    for (int64_t i = 0; i < count; i++) {
        const char *name = xd_weights_at(l->reader, i)->name;
        if (xdi_import_expects(l, name)) continue;
        l->report.unexpected++;
        xdi_import_note(l, name);
    }
}

static xd_result xdi_import_check_types(xdi_import *l) {
    const xdi_mapped_plan *p = &l->m.plan;
    int64_t last = -1;
    for (int64_t i = 0; i < p->piece_count; i++) {
        const xdi_mapped_piece *piece = (const xdi_mapped_piece *)p->order[i]; /* by tensor of theirs */
        const xdi_mapped_tensor *t = &p->tensors[piece->their];
        const xd_dtype ours = p->content->tensors[piece->ours].dtype;
        if (t->index < 0) continue;
        const xd_dtype theirs = xdi_import_theirs(l, t)->dtype;
        if (theirs == ours) continue;
        XD_REQUIRE(l->m.ctx, theirs != XD_DTYPE_NONE, XD_ERROR_UNSUPPORTED,
                   "tensor \"%.80s\" in %s is of type %s, which cannot be read", t->name, l->m.directory,
                   xdi_import_theirs(l, t)->type);
        XD_REQUIRE(l->m.ctx, l->desc->convert && xdi_load_converts(theirs) && xdi_load_converts(ours),
                   XD_ERROR_DTYPE, "tensor \"%.80s\" is %s here, and \"%.80s\" in %s is %s%s",
                   p->content->tensors[piece->ours].name, xd_dtype_name(ours), t->name, l->m.directory,
                   xd_dtype_name(theirs),
                   l->desc->convert ? ", which are not converted" : ", and convert is false");
        l->report.converted += piece->their != last;
        last = piece->their;
    }
    return XD_OK;
}

/* Both shapes of the first tensor that has two. */
static xd_result xdi_import_refuse_shape(const xdi_import *l) {
    const xdi_mapped_plan *p = &l->m.plan;
    char theirs[XDI_SHAPE_TEXT], ours[XDI_SHAPE_TEXT];
    for (int64_t i = 0; i < p->tensor_count; i++) {
        const xdi_mapped_tensor t = p->tensors[i];
        const int64_t index = xd_weights_find(l->reader, t.name);
        if (t.index >= 0 || index < 0) continue;
        const xd_weights_tensor *info = xd_weights_at(l->reader, index);
        return XD_FAIL(l->m.ctx, XD_ERROR_SHAPE,
                       "%lld tensors have another shape in %s; \"%.80s\" is %s there and %s by the map: %s",
                       (long long)l->report.wrong_shape, l->m.directory, t.name,
                       xdi_shape_print(info->ndim, info->shape, theirs),
                       xdi_shape_print(t.ndim, t.shape, ours), l->report.names);
    }
    return XD_OK;
}

/* Everything here follows from what all ranks have, so all return the same. */
static xd_result xdi_import_match(xdi_import *l) {
    const xd_checkpoint_report *r = &l->report;
    for (int64_t i = 0; i < l->m.plan.tensor_count; i++) xdi_import_judge(l, &l->m.plan.tensors[i]);
    xdi_import_find_unexpected(l);
    XD_TRY(xdi_import_check_types(l));
    if (l->desc->lenient) return XD_OK;
    XD_REQUIRE(l->m.ctx, r->missing == 0, XD_ERROR_MISSING,
               "%lld of %lld tensors are not in %s, which has %lld that are not asked for: %s",
               (long long)r->missing, (long long)l->m.plan.tensor_count, l->m.directory,
               (long long)r->unexpected, r->names);
    XD_REQUIRE(l->m.ctx, r->unexpected == 0, XD_ERROR_UNEXPECTED, "%s has %lld tensors more: %s",
               l->m.directory, (long long)r->unexpected, r->names);
    return r->wrong_shape ? xdi_import_refuse_shape(l) : XD_OK;
}

/* ---- import: elements ---- */

static void xdi_import_list(xdi_import *l) {
    l->m.boxes.count = 0;
    for (int64_t i = 0; i < l->m.content.tensor_count; i++) {
        const xd_tensor_part *part = l->m.content.tensors[i].part;
        xdi_mapped_list(&l->m.plan, i, part->region, part->range, &l->m.boxes);
    }
}

static uint64_t xdi_import_bytes(const xdi_import *l) {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < l->m.content.tensor_count; i++) {
        const xdi_stored *t = &l->m.content.tensors[i];
        bytes += (uint64_t)(t->part->range.end - t->part->range.begin) * xd_dtype_size(t->dtype);
    }
    return bytes;
}

static xd_result xdi_import_reserve(xdi_import *l) {
    const xd_kernels *kernels = xd_ctx_kernels(l->m.ctx);
    size_t room = l->m.staging_bytes;
    const uint64_t all = xdi_import_bytes(l) * sizeof(double); /* elements may be wider there */
    if (all < room) room = all ? (size_t)all : 1;
    xdi_mapped_boxes *boxes = &l->m.boxes;
    xdi_import_list(l);
    boxes->room = boxes->count;
    boxes->list = (xdi_mapped_box *)xd_allocate(l->m.ctx, (size_t)boxes->room * sizeof *boxes->list);
    l->m.stage = (unsigned char *)xd_allocate(l->m.ctx, room);
    l->converted = (unsigned char *)xd_allocate(l->m.ctx, l->desc->convert ? room : 0);
    if (xdi_import_on_device(l)) l->wire = (unsigned char *)kernels->memory.allocate(l->m.ctx, room);
    XD_REQUIRE(l->m.ctx, boxes->list && l->m.stage && l->converted && (l->wire || !xdi_import_on_device(l)),
               XD_ERROR_MEMORY, "no room for %llu bytes of staging and a list of %lld boxes",
               (unsigned long long)room, (long long)boxes->count);
    l->m.staging_bytes = room;
    xdi_import_list(l);
    if (boxes->count > 0) memcpy(l->at, boxes->list[0].begin, sizeof l->at);
    return XD_OK;
}

/* Elements of a tile to where they belong, converted when types differ. */
static xd_result xdi_import_put(xdi_import *l, const xdi_stored *t, const xdi_mapped_tile *tile,
                                xd_dtype from) {
    const xd_launch launch = xd_ctx_launch(l->m.ctx);
    const xd_kernels *kernels = xd_ctx_kernels(l->m.ctx);
    const size_t size = xd_dtype_size(t->dtype);
    const unsigned char *elements = l->m.stage;
    if (from != t->dtype) {
        xd_cast_array cast;
        cast.target = l->converted;
        cast.target_dtype = t->dtype;
        cast.source = elements;
        cast.source_dtype = from;
        cast.count = tile->count;
        XD_TRY(xd_ctx_host_kernels(l->m.ctx)->optimizer.cast(&launch, &cast, 1));
        elements = l->converted;
    }
    if (xdi_import_on_device(l)) {
        XD_TRY(
            kernels->memory.copy(&launch, l->wire, elements, (size_t)tile->count * size, XD_COPY_TO_DEVICE));
        elements = l->wire;
    }
    XD_TRY(kernels->copies(&launch, &tile->copy, 1, elements, t->data, size));
    return kernels->memory.synchronize(&launch); /* staging is used again */
}

static xd_result xdi_import_tile(xdi_import *l, const xdi_mapped_piece *piece, const xdi_mapped_tile *tile) {
    const xdi_mapped_tensor *from = &l->m.plan.tensors[piece->their];
    const xdi_stored *t = &l->m.content.tensors[piece->ours];
    const xd_dtype dtype = xdi_import_theirs(l, from)->dtype;
    const bool direct = tile->dense && dtype == t->dtype && !xdi_import_on_device(l);
    char *to =
        direct ? (char *)t->data + (size_t)tile->copy.dst_offset * xd_dtype_size(dtype) : (char *)l->m.stage;
    const xd_weights_read_desc box = { tile->begin, tile->size, 0, 0 };
    XD_TRY(xd_weights_read(l->reader, from->index, &box, to));
    return direct ? XD_OK : xdi_import_put(l, t, tile, dtype);
}

/* Elements that fit into the staging in both types. */
static int64_t xdi_import_room(const xdi_import *l, const xdi_mapped_piece *piece) {
    const xdi_mapped_tensor *from = &l->m.plan.tensors[piece->their];
    const size_t ours = xd_dtype_size(l->m.content.tensors[piece->ours].dtype);
    const size_t theirs = xd_dtype_size(xdi_import_theirs(l, from)->dtype);
    return (int64_t)(l->m.staging_bytes / (ours > theirs ? ours : theirs));
}

/* An xdi_work. */
static xd_result xdi_import_work(void *import, uint64_t bytes) {
    xdi_import *l = (xdi_import *)import;
    uint64_t done = 0;
    xdi_mapped_tile tile;
    while (l->box < l->m.boxes.count) {
        const xdi_mapped_box *box = &l->m.boxes.list[l->box];
        const bool read = l->m.plan.tensors[box->piece->their].index >= 0;
        if (done >= bytes) return XD_OK;
        if (read && xdi_mapped_next_tile(box, xdi_import_room(l, box->piece), l->at, &tile)) {
            XD_TRY(xdi_import_tile(l, box->piece, &tile));
            done += (uint64_t)tile.count * xd_dtype_size(l->m.content.tensors[box->piece->ours].dtype);
        } else if (++l->box < l->m.boxes.count) {
            memcpy(l->at, l->m.boxes.list[l->box].begin, sizeof l->at);
        }
    }
    return XD_OK;
}

static xd_result xdi_import_run(xdi_import *l) {
    const xd_weights_import_desc *d = l->desc;
    XD_TRY(xdi_mapped_agree(&l->m, &d->weights, d, false));
    XD_TRY(xdi_comm_agree_alike(l->m.comm, xdi_import_open(l)));
    XD_TRY(xdi_agree_list(l->m.comm, xd_weights_describe(l->reader).tensor_count,
                          xdi_weights_reader_hash(l->reader), "the tensors of the directory"));
    XD_TRY(xdi_import_match(l));
    XD_TRY(xd_agree(l->m.comm, xdi_import_reserve(l)));
    return xdi_rounds(l->m.comm, xdi_import_bytes(l), xdi_import_work, l);
}

XD_API xd_result xd_weights_import(xd_comm *comm, const xd_weights_import_desc *desc,
                                   xd_checkpoint_report *report) {
    XDI_GIVEN_COMM(comm, desc);
    xdi_import l;
    memset(&l, 0, sizeof l);
    l.m = xdi_mapped_begin(comm, desc->directory, &desc->weights, desc->staging_bytes);
    l.desc = desc;
    const xd_result result = xdi_import_run(&l);
    if (report) *report = l.report;
    if (xdi_import_on_device(&l)) xd_ctx_kernels(l.m.ctx)->memory.release(l.m.ctx, l.wire);
    xd_release(l.m.ctx, l.converted);
    xd_weights_close(l.reader);
    xdi_mapped_end(&l.m);
    return result;
}

/* ---- export ---- */

typedef struct xdi_export {
    xdi_mapped m;
    const xd_weights_export_desc *desc;
    xd_weights_writer *writer; /* of rank 0 */
    int64_t ours;              /* the tensor whose windows come */
} xdi_export;

/* A tile in order, as few pieces of its tensor as it has. */
static xd_result xdi_export_write(xdi_export *e, const xdi_mapped_piece *piece, const xdi_mapped_tile *tile,
                                  const unsigned char *data) {
    const xdi_mapped_tensor *t = &e->m.plan.tensors[piece->their];
    const size_t size = xd_dtype_size(t->dtype);
    int64_t run = 1;
    int outer =
        t->ndim; /* dimensions that are gone through; those from here on are whole, but for the first of them */
    while (outer > 0) {
        outer--;
        run *= tile->size[outer];
        if (tile->size[outer] != t->shape[outer]) break;
    }
    for (int64_t done = 0; done < tile->count; done += run) {
        int64_t index = 0, stride = 1, rest = done;
        for (int d = t->ndim - 1; d >= 0; d--) {
            index += (tile->begin[d] + rest % tile->size[d]) * stride;
            rest /= tile->size[d];
            stride *= t->shape[d];
        }
        XD_TRY(xd_weights_writer_write(e->writer, piece->their, (uint64_t)index * size, (size_t)run * size,
                                       data + (size_t)done * size));
    }
    return XD_OK;
}

static xd_result xdi_export_tile(xdi_export *e, const xdi_mapped_piece *piece, const xdi_mapped_tile *tile,
                                 const void *window) {
    const size_t size = xd_dtype_size(e->m.plan.tensors[piece->their].dtype);
    xd_copy copy = tile->copy; /* the other way */
    if (tile->dense)
        return xdi_export_write(e, piece, tile,
                                (const unsigned char *)window + (size_t)copy.dst_offset * size);
    copy.src_offset = tile->copy.dst_offset;
    copy.dst_offset = 0;
    memcpy(copy.src_stride, tile->copy.dst_stride, sizeof copy.src_stride);
    memcpy(copy.dst_stride, tile->copy.src_stride, sizeof copy.dst_stride);
    xdi_copy_run(&copy, window, e->m.stage, size);
    return xdi_export_write(e, piece, tile, e->m.stage);
}

/* The boxes of a window, in room that is kept for the next ones. */
static xd_result xdi_export_list(xdi_export *e, xd_interval elements) {
    xdi_mapped_boxes *boxes = &e->m.boxes;
    boxes->count = 0;
    xdi_mapped_list(&e->m.plan, e->ours, NULL, elements, boxes);
    if (boxes->count <= boxes->room) return XD_OK;
    xd_release(e->m.ctx, boxes->list);
    boxes->room = boxes->count;
    boxes->list = (xdi_mapped_box *)xd_allocate(e->m.ctx, (size_t)boxes->room * sizeof *boxes->list);
    if (!boxes->list) boxes->room = 0;
    XD_REQUIRE(e->m.ctx, boxes->list, XD_ERROR_MEMORY, "no room for a list of %lld boxes",
               (long long)boxes->count);
    boxes->count = 0;
    xdi_mapped_list(&e->m.plan, e->ours, NULL, elements, boxes);
    return XD_OK;
}

/* An xd_state_take: a window of one of our tensors, which come in the order of the content. */
static xd_result xdi_export_take(void *user, const xd_state_tensor *tensor, xd_interval elements,
                                 const void *data) {
    xdi_export *e = (xdi_export *)user;
    const int64_t room = (int64_t)(e->m.staging_bytes / xd_dtype_size(tensor->dtype));
    xdi_mapped_tile tile;
    while (strcmp(e->m.content.tensors[e->ours].name, tensor->name) != 0) e->ours++;
    XD_TRY(xdi_export_list(e, elements));
    for (int64_t i = 0; i < e->m.boxes.count; i++) {
        int64_t at[XD_DIMS_MAX];
        memcpy(at, e->m.boxes.list[i].begin, sizeof at);
        while (xdi_mapped_next_tile(&e->m.boxes.list[i], room, at, &tile))
            XD_TRY(xdi_export_tile(e, e->m.boxes.list[i].piece, &tile, data));
    }
    return XD_OK;
}

static xd_result xdi_export_create(xdi_export *e) {
    const xdi_mapped_plan *p = &e->m.plan;
    xd_weights_writer_desc d;
    if (xd_comm_rank(e->m.comm) != 0) return XD_OK;
    xd_weights_entry *entries =
        (xd_weights_entry *)xd_allocate(e->m.ctx, (size_t)p->tensor_count * sizeof *entries);
    XD_REQUIRE(e->m.ctx, entries, XD_ERROR_MEMORY, "no room to plan %lld tensors",
               (long long)p->tensor_count);
    for (int64_t i = 0; i < p->tensor_count; i++) {
        entries[i].name = p->tensors[i].name;
        entries[i].dtype = p->tensors[i].dtype;
        entries[i].ndim = p->tensors[i].ndim;
        entries[i].shape = p->tensors[i].shape;
    }
    memset(&d, 0, sizeof d);
    d.directory = e->m.directory;
    d.entries = entries;
    d.entry_count = p->tensor_count;
    d.max_shard_bytes = e->desc->max_shard_bytes;
    d.metadata = e->desc->metadata;
    d.metadata_count = e->desc->metadata_count;
    const xd_result result = xd_weights_writer_create(e->m.ctx, &d, &e->writer);
    xd_release(e->m.ctx, entries);
    XD_TRY(result);
    e->m.stage = (unsigned char *)xd_allocate(e->m.ctx, e->m.staging_bytes);
    XD_REQUIRE(e->m.ctx, e->m.stage, XD_ERROR_MEMORY, "no room for %llu bytes of staging",
               (unsigned long long)e->m.staging_bytes);
    return XD_OK;
}

static xd_result xdi_export_gather(xdi_export *e) {
    xd_state_gather_desc d;
    memset(&d, 0, sizeof d);
    d.networks = &e->m.network;
    d.network_count = 1;
    d.staging_bytes = e->m.staging_bytes;
    d.take = xdi_export_take;
    d.user = e;
    return xd_state_gather(e->m.comm, &d);
}

static xd_result xdi_export_pieces(xdi_export *e) {
    xdi_piece_files to;
    to.directory = e->m.directory;
    to.staging_bytes = e->m.staging_bytes;
    to.metadata = e->desc->metadata;
    to.metadata_count = e->desc->metadata_count;
    return xdi_mapped_write_pieces(e->m.comm, &e->m.plan, &to);
}

static xd_result xdi_export_run(xdi_export *e) {
    XD_TRY(xdi_mapped_agree(&e->m, &e->desc->weights, NULL, e->desc->pieces));
    XD_TRY(xd_agree(e->m.comm, xdi_mapped_plan_check_types(&e->m.plan)));
    if (e->desc->pieces) return xdi_export_pieces(e);
    XD_TRY(xdi_comm_agree_alike(e->m.comm, xdi_export_create(e)));
    XD_TRY(xdi_export_gather(e));
    xd_weights_writer *writer = e->writer;
    e->writer = NULL;
    return xdi_comm_agree_alike(e->m.comm, writer ? xd_weights_writer_commit(writer) : XD_OK);
}

XD_API xd_result xd_weights_export(xd_comm *comm, const xd_weights_export_desc *desc) {
    XDI_GIVEN_COMM(comm, desc);
    xdi_export e;
    memset(&e, 0, sizeof e);
    e.m = xdi_mapped_begin(comm, desc->directory, &desc->weights, desc->staging_bytes);
    e.desc = desc;
    const xd_result result = xdi_export_run(&e);
    xd_weights_writer_abort(e.writer);
    xdi_mapped_end(&e.m);
    return result;
}
