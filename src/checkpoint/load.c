/* A load: one manifest for all ranks, then each reads what it holds. */

#include "base/crc.h"
#include "base/json.h"
#include "base/publish.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "comm/topology.h"
#include "tensor/internal.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

enum { XDI_LOAD_GAP = 256 << 10 /* distance in bytes of two ranges from which a second read pays */ };

typedef struct xdi_load {
    xd_comm *comm;
    xd_ctx *ctx;
    xd_checkpoint_load_desc desc; /* defaults filled in */
    xdi_content content;
    int64_t sizes[3]; /* step, bytes of the manifest, bytes of state.json */
    char *manifest_text, *state_text;
    char *directory;
    xd_checkpoint *checkpoint;
    xd_json *state;
    int64_t *match; /* [content.tensor_count]: the checkpoint's tensor; -1: none is loaded */
    bool *used;     /* [tensors of the checkpoint] */
    bool *touched;  /* [blocks of the checkpoint]: to be compared by this rank */
    int64_t *turns; /* likewise: whose turn it is, of the ranks that could */
    xd_checkpoint_report report;
    xdi_reader reader;
    unsigned char *stage, *converted;
    int64_t tensor, position; /* what comes next, of the content */
    int64_t file, block;      /* of the comparison */
} xdi_load;

/* ---- the manifest on all ranks ---- */

static xd_result xdi_load_list(xdi_load *l) {
    const xd_checkpoint_load_desc *d = &l->desc;
    XD_REQUIRE(l->ctx, d->root && d->root[0], XD_ERROR_ARGUMENT, "there is no root to load from");
    XD_REQUIRE(l->ctx, d->step >= XD_CHECKPOINT_NEWEST, XD_ERROR_ARGUMENT, "step %lld is negative",
               (long long)d->step);
    XD_REQUIRE(l->ctx, (int)d->check >= 0 && d->check <= XD_CHECKPOINT_CHECK_NONE, XD_ERROR_ARGUMENT,
               "check %d is unknown", (int)d->check);
    XD_REQUIRE(l->ctx, d->staging_bytes >= 64, XD_ERROR_ARGUMENT, "staging_bytes %llu is less than 64",
               (unsigned long long)d->staging_bytes);
    XD_TRY(xdi_content_create(l->ctx, d->networks, d->network_count, &l->content));
    return xdi_content_get_steps(&l->content); /* those that are not loaded stay as they are */
}

static xd_result xdi_load_agree_settings(const xdi_load *l) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "step", l->desc.step);
    xdi_fact_integer(&facts, "check", (int64_t)l->desc.check);
    xdi_fact_integer(&facts, "lenient", l->desc.lenient);
    xdi_fact_integer(&facts, "convert", l->desc.convert);
    xdi_fact_integer(&facts, "keep_learning_rate", l->desc.keep_learning_rate);
    return xdi_agree_facts(l->comm, &facts, "settings of a load");
}

static xd_result xdi_load_text(xdi_load *l, const char *name, char **text, int64_t *bytes) {
    char *path = xdi_weights_path(l->ctx, l->directory, name);
    size_t size = 0;
    XD_REQUIRE(l->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", l->directory);
    const xd_result result = xd_file_load(l->ctx, path, 0, text, &size);
    xd_release(l->ctx, path);
    *bytes = (int64_t)size;
    return result;
}

/* state.json is small, so its checksum is compared always. */
static xd_result xdi_load_check_state(xdi_load *l, const xd_checkpoint *c) {
    const int64_t file = xdi_manifest_find_file(c, XDI_STATE_FILE);
    const uint32_t crc = xd_crc32c(0, l->state_text, (size_t)l->sizes[2]);
    XD_REQUIRE(l->ctx, file >= 0, XD_ERROR_FORMAT, "%s: the manifest has no %s", l->directory,
               XDI_STATE_FILE);
    XD_REQUIRE(l->ctx, crc == c->files[file].crc32c, XD_ERROR_CORRUPT,
               "%s/%s has checksum %08" PRIx32 ", not %08" PRIx32, l->directory, XDI_STATE_FILE, crc,
               c->files[file].crc32c);
    return XD_OK;
}

static xd_result xdi_load_directory(xdi_load *l, int64_t step) {
    l->directory = xdi_checkpoint_path(l->ctx, l->desc.root, step);
    XD_REQUIRE(l->ctx, l->directory, XD_ERROR_MEMORY, "%s: no room for a path", l->desc.root);
    return XD_OK;
}

/* A checkpoint that is not there has an error of its own. A save that replaces it may have put it aside, so it is the manifest
 * that is looked for. */
static xd_result xdi_load_look(const xdi_load *l) {
    char *path = xdi_weights_path(l->ctx, l->directory, XDI_MANIFEST_FILE);
    const int error = path ? xdi_file_probe(l->ctx, path) : ENOMEM;
    xd_release(l->ctx, path);
    if (error != ENOENT && error != ENOTDIR) return XD_OK;
    char steps[200];
    XD_TRY(xdi_checkpoint_list_steps(l->ctx, l->desc.root, steps, sizeof steps));
    XD_REQUIRE(l->ctx, false, XD_ERROR_MISSING, "%s is no checkpoint: it has no %s%s", l->directory,
               XDI_MANIFEST_FILE, steps);
    return XD_OK;
}

/* Rank 0. */
static xd_result xdi_load_open(xdi_load *l) {
    xd_checkpoint *c = NULL;
    if (xd_comm_rank(l->comm) != 0) return XD_OK;
    l->sizes[0] = l->desc.step;
    if (l->desc.step == XD_CHECKPOINT_NEWEST) XD_TRY(xd_checkpoint_find(l->ctx, l->desc.root, &l->sizes[0]));
    XD_TRY(xdi_load_directory(l, l->sizes[0]));
    XD_TRY(xdi_load_look(l));
    XD_TRY(xdi_checkpoint_open_whole(l->ctx, l->directory, &c));
    xd_result result = xdi_load_text(l, XDI_MANIFEST_FILE, &l->manifest_text, &l->sizes[1]);
    if (result == XD_OK) result = xdi_load_text(l, XDI_STATE_FILE, &l->state_text, &l->sizes[2]);
    if (result == XD_OK) result = xdi_load_check_state(l, c);
    if (result == XD_OK && c->info.step != l->sizes[0])
        result = XD_FAIL(l->ctx, XD_ERROR_FORMAT, "%s: the manifest is of step %lld", l->directory,
                         (long long)c->info.step);
    xd_checkpoint_close(c);
    return result;
}

static xd_result xdi_load_reserve_texts(xdi_load *l) {
    if (xd_comm_rank(l->comm) == 0) return XD_OK;
    l->manifest_text = (char *)xd_allocate(l->ctx, (size_t)l->sizes[1] + 1);
    l->state_text = (char *)xd_allocate(l->ctx, (size_t)l->sizes[2] + 1);
    XD_REQUIRE(l->ctx, l->manifest_text && l->state_text, XD_ERROR_MEMORY,
               "no room for a manifest of %lld bytes", (long long)l->sizes[1]);
    return xdi_load_directory(l, l->sizes[0]);
}

static xd_result xdi_load_parse(xdi_load *l) {
    const size_t manifest = (size_t)l->sizes[1], state = (size_t)l->sizes[2];
    XD_TRY(xdi_checkpoint_open_text(l->ctx, l->manifest_text, manifest, &l->checkpoint));
    const xd_result result = xd_json_load_memory(l->ctx, NULL, l->state_text, state, &l->state);
    XD_REQUIRE(l->ctx, result == XD_OK, result, "%s/%s: %s", l->directory, XDI_STATE_FILE,
               xd_last_error(l->ctx)->message);
    return xdi_state_fits(l->ctx, l->state, &l->desc);
}

/* The same text on every rank, so that whatever follows from it is the same too. Collective. */
static xd_result xdi_load_share(xdi_load *l) {
    XD_TRY(xdi_comm_agree_alike(l->comm, xdi_load_open(l)));
    XD_TRY(xd_broadcast(l->comm, l->sizes, 3, XD_DTYPE_I64, 0));
    XD_TRY(xd_agree(l->comm, xdi_load_reserve_texts(l)));
    XD_TRY(xd_broadcast(l->comm, l->manifest_text, l->sizes[1], XD_DTYPE_U8, 0));
    XD_TRY(xd_broadcast(l->comm, l->state_text, l->sizes[2], XD_DTYPE_U8, 0));
    l->report.step = l->sizes[0];
    return xd_agree(l->comm, xdi_load_parse(l));
}

/* ---- which tensors ---- */

XD_PRIVATE void xdi_load_append(char *names, size_t room, const char *name) {
    const size_t used = strlen(names), length = strlen(name), comma = used ? 2 : 0;
    if (used + comma + length + 1 > room) return;
    memcpy(names + used, ", ", comma);
    memcpy(names + used + comma, name, length + 1);
}

static void xdi_load_note(xdi_load *l, const char *name) {
    xd_checkpoint_report *r = &l->report;
    if (r->missing + r->unexpected + r->wrong_shape <= 5) xdi_load_append(r->names, sizeof r->names, name);
}

static bool xdi_load_same_shape(const xdi_stored *t, const xd_checkpoint_tensor_info *saved) {
    const int ndim = t->step ? 0 : t->part->ndim;
    return ndim == saved->ndim &&
           memcmp(t->part->shape, saved->shape, (size_t)ndim * sizeof *saved->shape) == 0;
}

XD_PRIVATE bool xdi_load_converts(xd_dtype dtype) {
    return dtype == XD_DTYPE_F16 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F64;
}

static xd_result xdi_load_match_one(xdi_load *l, int64_t index) {
    const xdi_stored *t = &l->content.tensors[index];
    const char *group = l->content.groups[t->group].name;
    const int64_t found = xd_checkpoint_tensor_find(l->checkpoint, group, t->name);
    l->match[index] = -1;
    if (found < 0) {
        l->report.missing++;
        xdi_load_note(l, t->name);
        return XD_OK;
    }
    const xd_checkpoint_tensor_info *saved = &l->checkpoint->tensors[found];
    l->used[found] = true;
    if (!xdi_load_same_shape(t, saved)) {
        l->report.wrong_shape++;
        xdi_load_note(l, t->name);
        return XD_OK;
    }
    const bool same = saved->dtype == t->dtype;
    XD_REQUIRE(l->ctx,
               same || (l->desc.convert && xdi_load_converts(saved->dtype) && xdi_load_converts(t->dtype)),
               XD_ERROR_DTYPE, "tensor \"%.80s\" is %s here and %s in the checkpoint%s", t->name,
               xd_dtype_name(t->dtype), xd_dtype_name(saved->dtype),
               l->desc.convert ? ", which are not converted" : ", and convert is false");
    l->match[index] = found;
    l->report.loaded++;
    l->report.converted += !same;
    return XD_OK;
}

static void xdi_load_find_unexpected(xdi_load *l) {
    for (int64_t i = 0; i < l->checkpoint->info.tensor_count; i++) {
        const xd_checkpoint_tensor_info *t = &l->checkpoint->tensors[i];
        bool asked = false;
        for (int64_t g = 0; g < l->content.group_count && !l->used[i]; g++)
            asked = asked || strcmp(l->content.groups[g].name, t->group) == 0;
        if (!asked) continue;
        l->report.unexpected++;
        xdi_load_note(l, t->name);
    }
}

/* Both shapes of the first tensor that has two. */
static xd_result xdi_load_refuse_shape(const xdi_load *l) {
    char here[XDI_SHAPE_TEXT], saved[XDI_SHAPE_TEXT];
    const xdi_stored *t = l->content.tensors;
    int64_t found = -1;
    for (;; t++) {
        found = xd_checkpoint_tensor_find(l->checkpoint, l->content.groups[t->group].name, t->name);
        if (found >= 0 && !xdi_load_same_shape(t, &l->checkpoint->tensors[found])) break;
    }
    const xd_checkpoint_tensor_info *theirs = &l->checkpoint->tensors[found];
    return XD_FAIL(l->ctx, XD_ERROR_SHAPE,
                   "%lld tensors have another shape in %s: \"%.80s\" is %s there and %s here; all: %s",
                   (long long)l->report.wrong_shape, l->directory, t->name,
                   xdi_shape_print(theirs->ndim, theirs->shape, saved),
                   xdi_shape_print(t->step ? 0 : t->part->ndim, t->part->shape, here), l->report.names);
}

/* Everything here follows from what all ranks have, so all return the same. */
static xd_result xdi_load_match(xdi_load *l) {
    const xd_checkpoint_report *r = &l->report;
    for (int64_t i = 0; i < l->content.tensor_count; i++) XD_TRY(xdi_load_match_one(l, i));
    xdi_load_find_unexpected(l);
    if (l->desc.lenient) return XD_OK;
    XD_REQUIRE(l->ctx, r->missing == 0, XD_ERROR_MISSING,
               "%lld of %lld tensors are not in %s, which has %lld that are not asked for: %s",
               (long long)r->missing, (long long)l->content.tensor_count, l->directory,
               (long long)r->unexpected, r->names);
    XD_REQUIRE(l->ctx, r->unexpected == 0, XD_ERROR_UNEXPECTED, "%s has %lld tensors more: %s", l->directory,
               (long long)r->unexpected, r->names);
    return r->wrong_shape ? xdi_load_refuse_shape(l) : XD_OK;
}

static xd_result xdi_load_reserve(xdi_load *l) {
    const xd_checkpoint *c = l->checkpoint;
    const size_t blocks = (size_t)c->first_block[c->info.file_count];
    l->match = (int64_t *)xd_allocate(l->ctx, (size_t)l->content.tensor_count * sizeof *l->match);
    l->used = (bool *)xd_allocate(l->ctx, (size_t)c->info.tensor_count * sizeof *l->used);
    l->touched = (bool *)xd_allocate(l->ctx, blocks * sizeof *l->touched);
    l->turns = (int64_t *)xd_allocate(l->ctx, blocks * sizeof *l->turns);
    l->desc.staging_bytes = xdi_manifest_room(c, l->desc.staging_bytes);
    l->stage = (unsigned char *)xd_allocate(l->ctx, l->desc.staging_bytes);
    l->converted = (unsigned char *)xd_allocate(l->ctx, l->desc.convert ? l->desc.staging_bytes : 0);
    XD_REQUIRE(l->ctx, l->match && l->used && l->touched && l->turns && l->stage && l->converted,
               XD_ERROR_MEMORY, "no room for %llu bytes of staging and a list of %lld tensors",
               (unsigned long long)l->desc.staging_bytes, (long long)l->content.tensor_count);
    return xdi_reader_create(&l->reader, c, l->directory);
}

/* ---- which blocks ---- */

static void xdi_load_touch(xdi_load *l, const xd_checkpoint_tensor_info *saved, int64_t index,
                           int64_t count) {
    const size_t size = xd_dtype_size(saved->dtype), block = l->checkpoint->info.block_bytes;
    const uint64_t begin = saved->begin + (uint64_t)index * size, end = begin + (uint64_t)count * size;
    bool *touched = l->touched + l->checkpoint->first_block[saved->file];
    for (uint64_t b = begin / block; b * block < end; b++) touched[b] = true;
}

static void xdi_load_touch_tensor(xdi_load *l, int64_t i) {
    const xdi_stored *t = &l->content.tensors[i];
    const xd_checkpoint_tensor_info *saved = &l->checkpoint->tensors[l->match[i]];
    int64_t index;
    if (t->step) {
        xdi_load_touch(l, saved, 0, 1);
        return;
    }
    for (int64_t at = t->part->range.begin, run; at < t->part->range.end; at += run) {
        run = xdi_part_run(t->part, at, &index);
        xdi_load_touch(l, saved, index, run);
    }
}

/* Marks the blocks that this rank could compare. */
static void xdi_load_touch_all(xdi_load *l) {
    const xd_checkpoint *c = l->checkpoint;
    const int64_t blocks = c->first_block[c->info.file_count];
    for (int64_t i = 0; i < blocks && l->desc.check == XD_CHECKPOINT_CHECK_ALL; i++)
        l->touched[i] = i % xd_comm_size(l->comm) == xd_comm_rank(l->comm);
    for (int64_t i = 0; i < l->content.tensor_count && l->desc.check == XD_CHECKPOINT_CHECK_TOUCHED; i++)
        if (l->match[i] >= 0) xdi_load_touch_tensor(l, i);
}

/* Where the search for a block's rank begins: anywhere, so that all ranks get alike many. */
static int xdi_load_first(const xdi_load *l, int64_t block) {
    return (int)(((uint64_t)block * UINT64_C(0x9e3779b97f4a7c15) >> 32) % (uint64_t)xd_comm_size(l->comm));
}

/* Of the ranks that have marked a block, one keeps it: replicas, and neighbours in a tensor, do not read it all. Collective. */
static xd_result xdi_load_deal(xdi_load *l) {
    const int64_t blocks = l->checkpoint->first_block[l->checkpoint->info.file_count];
    const int size = xd_comm_size(l->comm), rank = xd_comm_rank(l->comm);
    if (l->desc.check != XD_CHECKPOINT_CHECK_TOUCHED || size == 1) return XD_OK;
    for (int64_t i = 0; i < blocks; i++)
        l->turns[i] = l->touched[i] ? (rank - xdi_load_first(l, i) + size) % size : size;
    XD_TRY(xd_all_reduce(l->comm, l->turns, l->turns, blocks, XD_DTYPE_I64, XD_MIN));
    for (int64_t i = 0; i < blocks; i++)
        l->touched[i] = l->touched[i] && (xdi_load_first(l, i) + l->turns[i]) % size == rank;
    return XD_OK;
}

static uint64_t xdi_load_touched_bytes(const xdi_load *l) {
    const xd_checkpoint *c = l->checkpoint;
    uint64_t bytes = 0;
    for (int64_t i = 0; i < c->first_block[c->info.file_count]; i++)
        bytes += l->touched[i] ? c->info.block_bytes : 0;
    return bytes;
}

/* An xdi_work. */
static xd_result xdi_load_compare(void *load, uint64_t bytes) {
    xdi_load *l = (xdi_load *)load;
    const xd_checkpoint *c = l->checkpoint;
    uint64_t done = 0;
    for (; l->file < c->info.file_count; l->file++, l->block = 0)
        for (; l->block < c->first_block[l->file + 1] - c->first_block[l->file]; l->block++) {
            if (!l->touched[c->first_block[l->file] + l->block]) continue;
            if (done >= bytes) return XD_OK;
            XD_TRY(xdi_reader_block(&l->reader, l->file, l->block, l->stage, l->desc.staging_bytes));
            done += c->info.block_bytes;
        }
    return XD_OK;
}

/* ---- elements ---- */

/* Elements to memory of the device, converted when types differ. */
static xd_result xdi_load_put(xdi_load *l, const void *elements, int64_t count, xd_dtype from) {
    const xdi_stored *t = &l->content.tensors[l->tensor];
    const xd_launch launch = xd_ctx_launch(l->ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(l->ctx)->memory;
    const size_t size = xd_dtype_size(t->dtype);
    if (from != t->dtype) {
        xd_cast_array cast;
        cast.target = l->converted;
        cast.target_dtype = t->dtype;
        cast.source = elements;
        cast.source_dtype = from;
        cast.count = count;
        XD_TRY(xd_ctx_host_kernels(l->ctx)->optimizer.cast(&launch, &cast, 1));
        elements = l->converted;
    }
    XD_TRY(memory->copy(&launch, (char *)t->data + (size_t)l->position * size, elements, (size_t)count * size,
                        XD_COPY_TO_DEVICE));
    return memory->synchronize(&launch); /* staging is used again */
}

/* Runs of the next tensor that share a read: how many elements, and which bytes of the file. */
typedef struct xdi_load_span {
    int64_t count;
    uint64_t offset, end;
    bool gaps;
} xdi_load_span;

static xdi_load_span xdi_load_plan(const xdi_load *l, const xd_checkpoint_tensor_info *saved) {
    const xdi_stored *t = &l->content.tensors[l->tensor];
    const size_t size = xd_dtype_size(saved->dtype);
    const int64_t at = t->part->range.begin + l->position;
    const int64_t room =
        (int64_t)(l->desc.staging_bytes / (saved->dtype == t->dtype ? size : sizeof(double)));
    xdi_load_span s;
    int64_t index;
    memset(&s, 0, sizeof s);
    s.count = xdi_part_run(t->part, at, &index);
    if (s.count > room) s.count = room;
    s.offset = saved->begin + (uint64_t)index * size;
    s.end = s.offset + (uint64_t)s.count * size;
    while (at + s.count < t->part->range.end) {
        const int64_t run = xdi_part_run(t->part, at + s.count, &index);
        const uint64_t offset = saved->begin + (uint64_t)index * size, end = offset + (uint64_t)run * size;
        if (offset - s.end >= XDI_LOAD_GAP || end - s.offset > (uint64_t)room * size) break;
        s.gaps = s.gaps || offset != s.end;
        s.count += run;
        s.end = end;
    }
    return s;
}

/* Moves the runs of a span together. */
static void xdi_load_close_gaps(xdi_load *l, const xd_checkpoint_tensor_info *saved, const xdi_load_span *s) {
    const xd_tensor_part *p = l->content.tensors[l->tensor].part;
    const size_t size = xd_dtype_size(saved->dtype);
    for (int64_t done = 0, run; done < s->count; done += run) {
        int64_t index;
        run = xdi_part_run(p, p->range.begin + l->position + done, &index);
        if (run > s->count - done) run = s->count - done;
        const uint64_t from = saved->begin + (uint64_t)index * size - s->offset;
        memmove(l->stage + (size_t)done * size, l->stage + from, (size_t)run * size);
    }
}

static xd_result xdi_load_some(xdi_load *l, uint64_t *bytes) {
    const xdi_stored *t = &l->content.tensors[l->tensor];
    const xd_checkpoint_tensor_info *saved = &l->checkpoint->tensors[l->match[l->tensor]];
    const size_t size = xd_dtype_size(saved->dtype);
    *bytes = size;
    if (t->step) {
        l->position = 1;
        return xdi_reader_read(&l->reader, saved->file, saved->begin, size, t->step);
    }
    const xdi_load_span s = xdi_load_plan(l, saved);
    const bool direct =
        xd_ctx_kernels(l->ctx)->device == XD_DEVICE_CPU && saved->dtype == t->dtype && !s.gaps;
    unsigned char *to = direct ? (unsigned char *)t->data + (size_t)l->position * size : l->stage;
    XD_TRY(xdi_reader_read(&l->reader, saved->file, s.offset, (size_t)(s.end - s.offset), to));
    if (s.gaps) xdi_load_close_gaps(l, saved, &s);
    if (!direct) XD_TRY(xdi_load_put(l, l->stage, s.count, saved->dtype));
    l->position += s.count;
    *bytes = (uint64_t)s.count * size;
    return XD_OK;
}

/* Elements of tensor i that this rank reads. */
static int64_t xdi_load_count(const xdi_load *l, int64_t i) {
    const xdi_stored *t = &l->content.tensors[i];
    if (l->match[i] < 0) return 0;
    return t->step ? 1 : t->part->range.end - t->part->range.begin;
}

/* An xdi_work. */
static xd_result xdi_load_read(void *load, uint64_t bytes) {
    xdi_load *l = (xdi_load *)load;
    uint64_t done = 0, now = 0;
    for (; l->tensor < l->content.tensor_count; l->tensor++, l->position = 0)
        for (; l->position < xdi_load_count(l, l->tensor); done += now) {
            if (done >= bytes) return XD_OK;
            XD_TRY(xdi_load_some(l, &now));
        }
    return XD_OK;
}

static uint64_t xdi_load_bytes(const xdi_load *l) {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < l->content.tensor_count; i++)
        if (l->match[i] >= 0)
            bytes +=
                (uint64_t)xdi_load_count(l, i) * xd_dtype_size(l->checkpoint->tensors[l->match[i]].dtype);
    return bytes;
}

/* ---- the whole ---- */

/* Memory, and what the caller's state may be refused for, come before anything is changed. */
static xd_result xdi_load_prepare(xdi_load *l, char **state) {
    XD_TRY(xdi_load_reserve(l));
    return state ? xdi_state_take(l->ctx, l->state, l->state_text, (size_t)l->sizes[2], state) : XD_OK;
}

static xd_result xdi_load_run(xdi_load *l, char **state) {
    XD_TRY(xd_agree(l->comm, xdi_load_list(l)));
    XD_TRY(xdi_load_agree_settings(l));
    XD_TRY(xdi_content_agree(&l->content, l->comm));
    XD_TRY(xdi_load_share(l));
    XD_TRY(xd_agree(l->comm, xdi_load_prepare(l, state)));
    XD_TRY(xdi_load_match(l));
    xdi_load_touch_all(l);
    XD_TRY(xdi_load_deal(l));
    XD_TRY(xdi_rounds(l->comm, xdi_load_touched_bytes(l), xdi_load_compare, l));
    XD_TRY(xdi_rounds(l->comm, xdi_load_bytes(l), xdi_load_read, l));
    XD_TRY(xd_agree(l->comm, xdi_content_put_steps(&l->content)));
    xdi_state_apply(l->ctx, l->state, &l->desc, &l->report);
    return XD_OK;
}

static void xdi_load_end(xdi_load *l) {
    xdi_reader_close(&l->reader);
    xd_release(l->ctx, l->converted);
    xd_release(l->ctx, l->stage);
    xd_release(l->ctx, l->turns);
    xd_release(l->ctx, l->touched);
    xd_release(l->ctx, l->used);
    xd_release(l->ctx, l->match);
    xd_json_destroy(l->ctx, l->state);
    xd_checkpoint_close(l->checkpoint);
    xd_release(l->ctx, l->directory);
    xd_release(l->ctx, l->state_text);
    xd_release(l->ctx, l->manifest_text);
    xdi_content_destroy(&l->content);
}

XD_API xd_result xd_checkpoint_load(xd_comm *comm, const xd_checkpoint_load_desc *desc,
                                    xd_checkpoint_report *report, char **state) {
    XDI_GIVEN_COMM(comm, desc);
    xdi_load l;
    memset(&l, 0, sizeof l);
    l.comm = comm;
    l.ctx = xd_comm_ctx(comm);
    l.desc = *desc;
    if (l.desc.staging_bytes == 0) l.desc.staging_bytes = XDI_STAGING;
    char *own = NULL;
    const xd_result result = xdi_load_run(&l, state ? &own : NULL);
    if (report) *report = l.report;
    if (state && result == XD_OK)
        *state = own;
    else
        xd_release(l.ctx, own);
    xdi_load_end(&l);
    return result;
}
