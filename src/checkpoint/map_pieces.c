/* An export in pieces: each rank writes what it has into files of its own. */

#include "checkpoint/full.h"
#include "checkpoint/map_internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "kernel/copy.h"
#include "kernel/internal.h"
#include "tensor/interval_internal.h"

#include <stdio.h>
#include <string.h>

/* The files of one rank. A file has a tensor once, so box number k of a tensor is in file k. */
typedef struct xdi_pieces {
    const xdi_mapped_plan *plan;
    const xdi_piece_files *to;
    xd_ctx *ctx;
    int rank;
    xdi_mapped_boxes boxes;
    const void **order;               /* [boxes.count] boxes by tensor of theirs and place */
    int64_t *file;                    /* [boxes.count] of order[i] */
    xd_weights_entry *entries;        /* [boxes.count] of one file at a time */
    int64_t *sizes;                   /* [boxes.count][XD_DIMS_MAX] */
    xd_weights_pair *metadata;        /* of one file at a time */
    xdi_safetensors_writer **writers; /* [file_count] */
    int64_t file_count, named;        /* named: those that have their names */
    unsigned char *stage, *wire;      /* wire: in memory of the device */
    size_t stage_bytes;
} xdi_pieces;

static bool xdi_pieces_on_device(const xdi_pieces *p) {
    return xd_ctx_kernels(p->ctx)->device != XD_DEVICE_CPU;
}

/* ---- what is written ---- */

/* Tensors of theirs without elements are written by rank 0, each as a piece that is all of it. */
static void xdi_pieces_list_empty(xdi_pieces *p) {
    int64_t last = -1;
    for (int64_t i = 0; i < p->plan->piece_count && p->rank == 0; i++) {
        const xdi_mapped_piece *piece = (const xdi_mapped_piece *)p->plan->order[i]; /* by tensor of theirs */
        const xdi_mapped_tensor *t = &p->plan->tensors[piece->their];
        int64_t numel = 1;
        for (int d = 0; d < t->ndim; d++) numel *= t->shape[d];
        if (numel > 0 || piece->their == last) continue;
        last = piece->their;
        if (p->boxes.list && p->boxes.count < p->boxes.room) {
            xdi_mapped_box *box = &p->boxes.list[p->boxes.count];
            memset(box, 0, sizeof *box);
            box->piece = piece;
            memcpy(box->end, t->shape, sizeof box->end);
        }
        p->boxes.count++;
    }
}

static void xdi_pieces_list(xdi_pieces *p) {
    p->boxes.count = 0;
    for (int64_t i = 0; i < p->plan->content->tensor_count; i++) {
        const xdi_stored *t = &p->plan->content->tensors[i];
        if (xdi_stored_numel(t) > 0 && xdi_stored_speaks(t, p->rank))
            xdi_mapped_list(p->plan, i, t->part->region, t->part->range, &p->boxes);
    }
    xdi_pieces_list_empty(p);
}

static int xdi_pieces_by_tensor(const void *a, const void *b) {
    const xdi_mapped_box *one = (const xdi_mapped_box *)a, *other = (const xdi_mapped_box *)b;
    if (one->piece->their != other->piece->their) return one->piece->their < other->piece->their ? -1 : 1;
    for (int d = 0; d < one->piece->ndim; d++)
        if (one->begin[d] != other->begin[d]) return one->begin[d] < other->begin[d] ? -1 : 1;
    return (one > other) - (one < other);
}

/* Deals the boxes to files. */
static xd_result xdi_pieces_reserve(xdi_pieces *p) {
    xdi_mapped_boxes *boxes = &p->boxes;
    XD_REQUIRE(p->ctx, p->to->metadata_count >= 0, XD_ERROR_ARGUMENT, "%lld pairs of metadata",
               (long long)p->to->metadata_count);
    boxes->regions = (xd_region *)xd_allocate(p->ctx, (XDI_REGION_FLAT_MAX + 1) * sizeof *boxes->regions);
    XD_REQUIRE(p->ctx, boxes->regions, XD_ERROR_MEMORY, "no room for the regions of a tensor");
    xdi_pieces_list(p);
    const size_t count = (size_t)boxes->count;
    boxes->room = boxes->count;
    boxes->list = (xdi_mapped_box *)xd_allocate(p->ctx, count * sizeof *boxes->list);
    p->order = (const void **)xd_allocate(p->ctx, count * sizeof *p->order);
    p->file = (int64_t *)xd_allocate(p->ctx, count * sizeof *p->file);
    p->entries = (xd_weights_entry *)xd_allocate(p->ctx, count * sizeof *p->entries);
    p->sizes = (int64_t *)xd_allocate(p->ctx, count * XD_DIMS_MAX * sizeof *p->sizes);
    p->metadata =
        (xd_weights_pair *)xd_allocate(p->ctx, ((size_t)p->to->metadata_count + 2) * sizeof *p->metadata);
    p->stage = (unsigned char *)xd_allocate(p->ctx, p->stage_bytes);
    if (xdi_pieces_on_device(p))
        p->wire = (unsigned char *)xd_ctx_kernels(p->ctx)->memory.allocate(p->ctx, p->stage_bytes);
    XD_REQUIRE(p->ctx,
               boxes->list && p->order && p->file && p->entries && p->sizes && p->metadata && p->stage &&
                   (p->wire || !xdi_pieces_on_device(p)),
               XD_ERROR_MEMORY, "no room for %llu bytes of staging and a list of %llu boxes",
               (unsigned long long)p->stage_bytes, (unsigned long long)count);
    xdi_pieces_list(p);
    for (size_t i = 0; i < count; i++) p->order[i] = &boxes->list[i];
    xdi_sort(p->order, count, xdi_pieces_by_tensor);
    for (size_t i = 0; i < count; i++) {
        const xdi_mapped_box *box = (const xdi_mapped_box *)p->order[i];
        const bool same =
            i > 0 && ((const xdi_mapped_box *)p->order[i - 1])->piece->their == box->piece->their;
        p->file[i] = same ? p->file[i - 1] + 1 : 0;
        if (p->file[i] >= p->file_count) p->file_count = p->file[i] + 1;
    }
    p->writers = (xdi_safetensors_writer **)xd_allocate(p->ctx, (size_t)p->file_count * sizeof *p->writers);
    XD_REQUIRE(p->ctx, p->writers, XD_ERROR_MEMORY, "no room for %lld files", (long long)p->file_count);
    return XD_OK;
}

/* ---- headers ---- */

/* {"name": {"saved_offsets": [...]}} of the boxes of a file. */
static void xdi_pieces_describe(const xdi_pieces *p, int64_t file, xd_json_writer *json) {
    xd_json_write_object(json);
    for (int64_t i = 0; i < p->boxes.count; i++) {
        const xdi_mapped_box *box = (const xdi_mapped_box *)p->order[i];
        if (p->file[i] != file) continue;
        xd_json_write_key(json, p->plan->tensors[box->piece->their].name);
        xd_json_write_object(json);
        xd_json_write_key(json, "saved_offsets");
        xd_json_write_array(json);
        for (int d = 0; d < box->piece->ndim; d++) xd_json_write_int64(json, box->begin[d]);
        xd_json_write_end(json);
        xd_json_write_end(json);
    }
    xd_json_write_end(json);
}

static xd_result xdi_pieces_name(const xdi_pieces *p, int64_t file, char path[XDI_PIECE_PATH]) {
    const int length = snprintf(path, XDI_PIECE_PATH, "%s/shard-%05d-model-%05lld-of-%05lld.safetensors",
                                p->to->directory, p->rank + 1, (long long)file + 1, (long long)p->file_count);
    XD_REQUIRE(p->ctx, length > 0 && length < XDI_PIECE_PATH, XD_ERROR_ARGUMENT,
               "%.80s...: the path is too long", p->to->directory);
    return XD_OK;
}

static xd_result xdi_pieces_start(xdi_pieces *p, int64_t file, const char *info) {
    xd_weights_writer_desc d;
    char path[XDI_PIECE_PATH];
    memset(&d, 0, sizeof d);
    d.entries = p->entries;
    for (int64_t i = 0; i < p->boxes.count; i++) {
        const xdi_mapped_box *box = (const xdi_mapped_box *)p->order[i];
        const xdi_mapped_tensor *t = &p->plan->tensors[box->piece->their];
        xd_weights_entry *e = &p->entries[d.entry_count];
        if (p->file[i] != file) continue;
        e->name = t->name;
        e->dtype = t->dtype;
        e->ndim = t->ndim;
        e->shape = p->sizes + d.entry_count * XD_DIMS_MAX;
        for (int k = 0; k < t->ndim; k++)
            p->sizes[d.entry_count * XD_DIMS_MAX + k] = box->end[k] - box->begin[k];
        d.entry_count++;
    }
    d.metadata = p->metadata;
    d.metadata_count = p->to->metadata_count + 2;
    for (int64_t i = 0; i < p->to->metadata_count; i++) p->metadata[i + 2] = p->to->metadata[i];
    p->metadata[0].key = "DCP_SHARDING_INFO";
    p->metadata[0].value = info;
    p->metadata[1].key = "DCP_VERSION";
    p->metadata[1].value = "1.0";
    XD_TRY(xdi_pieces_name(p, file, path));
    return xdi_safetensors_writer_create(p->ctx, path, &d, &p->writers[file]);
}

static xd_result xdi_pieces_start_all(xdi_pieces *p) {
    for (int64_t file = 0; file < p->file_count; file++) {
        xd_json_writer json = xd_json_writer_create(p->ctx);
        const char *info = NULL;
        xdi_pieces_describe(p, file, &json);
        xd_result result = xd_json_writer_text(&json, &info, NULL);
        if (result == XD_OK) result = xdi_pieces_start(p, file, info);
        xd_json_writer_destroy(&json);
        XD_TRY(result);
    }
    return XD_OK;
}

/* Files of an older save would be pieces too. */
static xd_result xdi_pieces_check_directory(const xdi_pieces *p) {
    const char **names = NULL;
    int64_t count = 0, found = -1;
    XD_TRY(xd_file_list(p->ctx, p->to->directory, &names, &count));
    for (int64_t i = 0; i < count && found < 0; i++) {
        const size_t length = strlen(names[i]);
        if (length > 12 && strcmp(names[i] + length - 12, ".safetensors") == 0) found = i;
    }
    const xd_result result = found < 0 ? XD_OK
                                       : XD_FAIL(p->ctx, XD_ERROR_STATE, "%s: %.80s is there already",
                                                 p->to->directory, names[found]);
    xd_release(p->ctx, (void *)names);
    return result;
}

/* ---- elements ---- */

/* A tile in order into p->stage. */
static xd_result xdi_pieces_fetch(xdi_pieces *p, const xdi_stored *t, const xdi_mapped_tile *tile) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    const xd_kernels *kernels = xd_ctx_kernels(p->ctx);
    const size_t size = xd_dtype_size(t->dtype);
    xd_copy copy = tile->copy; /* the other way */
    copy.src_offset = tile->copy.dst_offset;
    copy.dst_offset = 0;
    memcpy(copy.src_stride, tile->copy.dst_stride, sizeof copy.src_stride);
    memcpy(copy.dst_stride, tile->copy.src_stride, sizeof copy.dst_stride);
    if (!xdi_pieces_on_device(p)) {
        xdi_copy_run(&copy, t->data, p->stage, size);
        return XD_OK;
    }
    XD_TRY(kernels->copies(&launch, &copy, 1, t->data, p->wire, size));
    XD_TRY(kernels->memory.copy(&launch, p->stage, p->wire, (size_t)tile->count * size, XD_COPY_TO_HOST));
    return kernels->memory.synchronize(&launch);
}

/* Tiles of a box follow one another in its file. */
static xd_result xdi_pieces_write_box(xdi_pieces *p, const xdi_mapped_box *box, int64_t file, int64_t entry) {
    const xdi_stored *t = &p->plan->content->tensors[box->piece->ours];
    const size_t size = xd_dtype_size(t->dtype);
    uint64_t done = 0;
    int64_t at[XD_DIMS_MAX];
    xdi_mapped_tile tile;
    if (xdi_stored_numel(t) == 0) return XD_OK;
    memcpy(at, box->begin, sizeof at);
    while (xdi_mapped_next_tile(box, (int64_t)(p->stage_bytes / size), at, &tile)) {
        const size_t bytes = (size_t)tile.count * size;
        XD_TRY(xdi_pieces_fetch(p, t, &tile));
        XD_TRY(xdi_safetensors_writer_write(p->writers[file], entry, done, bytes, p->stage));
        done += bytes;
    }
    return XD_OK;
}

static xd_result xdi_pieces_write_all(xdi_pieces *p) {
    for (int64_t file = 0; file < p->file_count; file++) {
        int64_t entry = 0;
        for (int64_t i = 0; i < p->boxes.count; i++)
            if (p->file[i] == file)
                XD_TRY(xdi_pieces_write_box(p, (const xdi_mapped_box *)p->order[i], file, entry++));
    }
    return XD_OK;
}

static xd_result xdi_pieces_commit(xdi_pieces *p) {
    for (; p->named < p->file_count; p->named++) {
        xdi_safetensors_writer *writer = p->writers[p->named];
        p->writers[p->named] = NULL;
        XD_TRY(xdi_safetensors_writer_commit(writer));
    }
    return XD_OK;
}

/* Files that have names already go again when another rank could not name its own. */
static void xdi_pieces_take_back(const xdi_pieces *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    char path[XDI_PIECE_PATH];
    for (int64_t file = 0; file < p->named && files->remove; file++)
        if (xdi_pieces_name(p, file, path) == XD_OK) (void)files->remove(files->user, path);
}

/* Everything that one rank can fail at before the files get their names. */
static xd_result xdi_pieces_prepare(xdi_pieces *p) {
    XD_TRY(xdi_pieces_reserve(p));
    XD_TRY(xdi_pieces_start_all(p));
    return xdi_pieces_write_all(p);
}

static void xdi_pieces_end(xdi_pieces *p) {
    for (int64_t i = 0; i < p->file_count && p->writers; i++) xdi_safetensors_writer_abort(p->writers[i]);
    if (p->wire) xd_ctx_kernels(p->ctx)->memory.release(p->ctx, p->wire);
    xd_release(p->ctx, p->writers);
    xd_release(p->ctx, p->stage);
    xd_release(p->ctx, p->metadata);
    xd_release(p->ctx, p->sizes);
    xd_release(p->ctx, p->entries);
    xd_release(p->ctx, p->file);
    xd_release(p->ctx, (void *)p->order);
    xd_release(p->ctx, p->boxes.list);
    xd_release(p->ctx, p->boxes.regions);
}

XD_PRIVATE xd_result xdi_mapped_write_pieces(xd_comm *comm, const xdi_mapped_plan *plan,
                                             const xdi_piece_files *to) {
    xdi_pieces p;
    memset(&p, 0, sizeof p);
    p.plan = plan;
    p.to = to;
    p.ctx = plan->ctx;
    p.rank = xd_comm_rank(comm);
    p.stage_bytes = to->staging_bytes;
    xd_result result = xdi_cover_check(plan->content, comm);
    if (result == XD_OK) result = xdi_comm_agree_alike(comm, xdi_pieces_check_directory(&p));
    if (result == XD_OK) result = xdi_comm_agree_alike(comm, xdi_pieces_prepare(&p));
    if (result == XD_OK) result = xdi_comm_agree_alike(comm, xdi_pieces_commit(&p));
    if (result != XD_OK) xdi_pieces_take_back(&p);
    xdi_pieces_end(&p);
    return result;
}
