/* A save: agree, lay out, write together, publish. */

#include "base/crc.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/publish_internal.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "comm/topology.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define XDI_SAVE_LOCK "checkpoint.lock"
#define XDI_SAVE_LATEST "latest"

enum { XDI_SAVE_NAME = 64, XDI_STAGING_LEAST = 64 };

/* ---- before the first file ---- */

static void xdi_save_resolve(xd_checkpoint_save_desc *d) {
    if (d->block_bytes == 0) d->block_bytes = XDI_BLOCK;
    if (d->staging_bytes == 0) d->staging_bytes = XDI_STAGING;
}

static xd_result xdi_save_check_files(const xdi_save *s) {
    const xd_checkpoint_save_desc *d = &s->desc;
    XD_REQUIRE(s->ctx, d->file_count >= 0 && (d->files || d->file_count == 0), XD_ERROR_ARGUMENT,
               "%d files at %p", d->file_count, (const void *)d->files);
    for (int i = 0; i < d->file_count; i++) {
        const xd_checkpoint_file *f = &d->files[i];
        const bool plain =
            xdi_manifest_is_name(f->name) && !strstr(f->name, ".tmp-"); /* which saves sweep away */
        XD_REQUIRE(s->ctx, plain, XD_ERROR_ARGUMENT,
                   "file %d: \"%.80s\" is no name for a file of a checkpoint", i, f->name ? f->name : "");
        XD_REQUIRE(s->ctx, f->data || f->bytes == 0, XD_ERROR_ARGUMENT, "file \"%.80s\": %llu bytes at NULL",
                   f->name, (unsigned long long)f->bytes);
    }
    return xdi_state_check(s->ctx, d->state);
}

XD_PRIVATE xd_result xdi_save_check(const xdi_save *s) {
    const xd_checkpoint_save_desc *d = &s->desc;
    XD_REQUIRE(s->ctx, d->root && d->root[0], XD_ERROR_ARGUMENT, "there is no root to save in");
    XD_REQUIRE(s->ctx, d->step >= 0, XD_ERROR_ARGUMENT, "step %lld is negative", (long long)d->step);
    XD_REQUIRE(s->ctx, d->keep == 0 || d->keep >= 2, XD_ERROR_ARGUMENT,
               "keep is %d: 0 keeps all checkpoints, otherwise two have to stay", d->keep);
    XD_REQUIRE(s->ctx,
               d->block_bytes >= XDI_BLOCK_LEAST && d->block_bytes <= XDI_BLOCK_MOST &&
                   (d->block_bytes & (d->block_bytes - 1)) == 0,
               XD_ERROR_ARGUMENT, "block_bytes %llu is no power of two from %d to %d",
               (unsigned long long)d->block_bytes, (int)XDI_BLOCK_LEAST, (int)XDI_BLOCK_MOST);
    XD_REQUIRE(s->ctx, d->staging_bytes >= XDI_STAGING_LEAST, XD_ERROR_ARGUMENT,
               "staging_bytes %llu is less than %d", (unsigned long long)d->staging_bytes,
               (int)XDI_STAGING_LEAST);
    return s->root ? xdi_save_check_files(s) : XD_OK;
}

XD_PRIVATE xd_result xdi_save_list(xdi_save *s) {
    XD_TRY(xdi_content_create(s->ctx, s->desc.networks, s->desc.network_count, &s->content));
    XD_TRY(xdi_content_get_steps(&s->content));
    return s->root ? xdi_state_write(s->ctx, &s->desc, &s->state, &s->state_bytes) : XD_OK;
}

static xd_result xdi_save_agree_settings(const xdi_save *s) {
    const xd_checkpoint_save_desc *d = &s->desc;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "step", d->step);
    xdi_fact_integer(&facts, "max_shard_bytes", (int64_t)d->max_shard_bytes);
    xdi_fact_integer(&facts, "keep", d->keep);
    xdi_fact_integer(&facts, "overwrite", d->overwrite);
    xdi_fact_integer(&facts, "block_bytes", (int64_t)d->block_bytes);
    return xdi_agree_facts(s->comm, &facts, "settings of a save");
}

static xd_result xdi_save_prepare(xdi_save *s) {
    xdi_writer *w = &s->writer;
    XD_TRY(xdi_plan_create(&s->content, s->desc.max_shard_bytes, s->desc.block_bytes, &s->plan));
    w->plan = &s->plan;
    w->comm = s->comm;
    w->stage_bytes = s->desc.staging_bytes;
    w->blocks = (uint64_t *)xd_allocate(s->ctx, (size_t)s->plan.block_count * sizeof *w->blocks);
    w->fingerprints =
        (uint64_t *)xd_allocate(s->ctx, (size_t)s->content.tensor_count * sizeof *w->fingerprints);
    w->stage = (unsigned char *)xd_allocate(s->ctx, s->content.on_host ? 0 : w->stage_bytes);
    XD_REQUIRE(s->ctx, w->blocks && w->fingerprints && w->stage, XD_ERROR_MEMORY,
               "no room for %llu bytes of staging and the checksums of %lld blocks",
               (unsigned long long)w->stage_bytes, (long long)s->plan.block_count);
    return XD_OK;
}

static xd_result xdi_save_agree(xdi_save *s) {
    XD_TRY(xdi_save_agree_settings(s));
    XD_TRY(xdi_content_agree(&s->content, s->comm));
    XD_TRY(xdi_cover_check(&s->content, s->comm));
    XD_TRY(xdi_cover_steps(&s->content, s->comm));
    return xd_agree(s->comm, xdi_save_prepare(s));
}

/* ---- the files ---- */

/* A data file at its full length, with its header. */
static xd_result xdi_save_start_file(xdi_save *s, int64_t index) {
    const xdi_planned_file *f = &s->plan.files[index];
    char *path = xdi_weights_path(s->ctx, xd_publish_directory_path(s->directory), f->name);
    xdi_publish *file = NULL;
    XD_REQUIRE(s->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", f->name);
    xd_result result = xdi_publish_start(s->ctx, path, false, &file);
    xd_release(s->ctx, path);
    if (result == XD_OK) result = xdi_publish_resize(file, f->layout->file_bytes);
    if (result == XD_OK)
        result = xdi_publish_write(file, f->layout->header, (size_t)f->layout->header_bytes, 0);
    if (result != XD_OK) {
        xdi_publish_abort(file);
        return result;
    }
    xdi_writer_note(&s->writer, index, 0, f->layout->header, (size_t)f->layout->header_bytes);
    return xdi_publish_commit(file);
}

static xd_result xdi_save_make_root(const xdi_save *s) {
    const xd_files *files = &xd_ctx_settings(s->ctx)->files;
    XD_REQUIRE(s->ctx, files->make_directory, XD_ERROR_UNSUPPORTED,
               "%s: the files of this context offer no make_directory", s->desc.root);
    const int error = xdi_directory_make_all(s->ctx, s->desc.root);
    XD_REQUIRE(s->ctx, error == 0, XD_ERROR_IO, "%s: make: %s", s->desc.root, strerror(error));
    return xdi_publish_sync_folder(s->ctx, s->desc.root);
}

/* Rank 0: the lock, order in root, the temporary directory, and its data files. */
static xd_result xdi_save_start(xdi_save *s) {
    if (!s->root) return XD_OK;
    s->lock_path = xdi_weights_path(s->ctx, s->desc.root, XDI_SAVE_LOCK);
    s->path = xdi_checkpoint_path(s->ctx, s->desc.root, s->desc.step);
    XD_REQUIRE(s->ctx, s->lock_path && s->path, XD_ERROR_MEMORY, "%s: no room for a path", s->desc.root);
    XD_TRY(xdi_save_make_root(s));
    XD_TRY(xdi_lock_take(s->ctx, s->lock_path, &s->lock));
    XD_TRY(xdi_checkpoint_sweep(s->ctx, s->desc.root));
    XD_REQUIRE(s->ctx, s->desc.overwrite || xdi_file_probe(s->ctx, s->path) != EISDIR, XD_ERROR_STATE,
               "%s exists, and overwrite is false", s->path);
    const xd_publish_directory_desc directory = { s->path };
    XD_TRY(xd_publish_directory_create(s->ctx, &directory, &s->directory));
    for (int64_t i = 0; i < s->plan.file_count; i++) XD_TRY(xdi_save_start_file(s, i));
    return XD_OK;
}

/* The name of the directory on every rank, below its own root. Collective. */
static xd_result xdi_save_share(xdi_save *s) {
    char name[XDI_SAVE_NAME];
    memset(name, 0, sizeof name);
    if (s->root) {
        const char *path = xd_publish_directory_path(s->directory), *slash = strrchr(path, '/');
        snprintf(name, sizeof name, "%s", slash ? slash + 1 : path);
    }
    XD_TRY(xd_broadcast(s->comm, name, XDI_SAVE_NAME, XD_DTYPE_U8, 0));
    s->own = xdi_weights_path(s->ctx, s->desc.root, name);
    s->writer.directory = s->own;
    return xd_agree(s->comm, s->own ? XD_OK : XD_FAIL(s->ctx, XD_ERROR_MEMORY, "no room for a path"));
}

/* ---- the other files ---- */

/* Writes one and lists it. */
static xd_result xdi_save_other(xdi_save *s, const char *name, const void *data, size_t bytes) {
    const size_t block = s->desc.block_bytes, count = (size_t)xdi_block_count(bytes, block);
    uint64_t *blocks = (uint64_t *)xd_allocate(s->ctx, count * sizeof *blocks + strlen(name) + 1);
    char *path = xdi_weights_path(s->ctx, s->own, name);
    xd_result result = XD_OK;
    if (!blocks || !path) {
        result = XD_FAIL(s->ctx, XD_ERROR_MEMORY, "%s: no room for its checksums", name);
    } else {
        for (size_t i = 0; i < count; i++) {
            const size_t left = bytes - i * block;
            blocks[i] = xd_crc32c(0, (const char *)data + i * block, left < block ? left : block);
        }
        xdi_manifest_file *f = &s->others[s->other_count++];
        f->name = strcpy((char *)(blocks + count), name);
        f->group = NULL;
        f->bytes = bytes;
        f->blocks = blocks;
        result = xd_file_save(s->ctx, path, data, bytes);
    }
    if (!path) xd_release(s->ctx, blocks);
    xd_release(s->ctx, path);
    return result;
}

/* The index of a group of several files, as Hugging Face reads it. */
static void xdi_save_write_index(const xdi_save *s, int64_t group, xd_json_writer *w) {
    uint64_t total = 0;
    xd_json_write_object(w);
    xd_json_write_key(w, "weight_map");
    xd_json_write_object(w);
    for (int64_t i = 0; i < s->plan.file_count; i++) {
        const xdi_planned_file *f = &s->plan.files[i];
        for (int64_t k = 0; f->group == group && k < f->count; k++) {
            xd_json_write_key(w, s->content.tensors[f->first + k].name);
            xd_json_write_string(w, f->name);
            total += f->layout->bytes[k];
        }
    }
    xd_json_write_end(w);
    xd_json_write_key(w, "metadata");
    xd_json_write_object(w);
    xd_json_write_key(w, "total_size");
    xd_json_write_uint64(w, total);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static xd_result xdi_save_index(xdi_save *s, int64_t group) {
    char name[XDI_FILE_NAME_ROOM];
    xd_json_writer w = xd_json_writer_create(s->ctx);
    const char *text = NULL;
    size_t bytes = 0;
    snprintf(name, sizeof name, "%s.safetensors.index.json", s->content.groups[group].name);
    xdi_save_write_index(s, group, &w);
    xd_result result = xd_json_writer_text(&w, &text, &bytes);
    if (result == XD_OK) result = xdi_save_other(s, name, text, bytes);
    xd_json_writer_destroy(&w);
    return result;
}

static bool xdi_save_is_taken(const xdi_save *s, const char *name) {
    for (int64_t i = 0; i < s->other_count; i++)
        if (strcmp(name, s->others[i].name) == 0) return true;
    for (int64_t i = 0; i < s->plan.file_count; i++)
        if (strcmp(name, s->plan.files[i].name) == 0) return true;
    return false;
}

static xd_result xdi_save_others(xdi_save *s) {
    const size_t room = (size_t)s->content.group_count + 1 + (size_t)s->desc.file_count;
    s->others = (xdi_manifest_file *)xd_allocate(s->ctx, room * sizeof *s->others);
    XD_REQUIRE(s->ctx, s->others, XD_ERROR_MEMORY, "no room for %llu files", (unsigned long long)room);
    for (int64_t i = 0; i < s->plan.file_count; i++) {
        const xdi_planned_file *f = &s->plan.files[i];
        const bool first = i == 0 || s->plan.files[i - 1].group != f->group;
        if (first && f->count < s->content.groups[f->group].count) XD_TRY(xdi_save_index(s, f->group));
    }
    XD_TRY(xdi_save_other(s, XDI_STATE_FILE, s->state, s->state_bytes));
    for (int i = 0; i < s->desc.file_count; i++) {
        const xd_checkpoint_file *f = &s->desc.files[i];
        XD_REQUIRE(s->ctx, !xdi_save_is_taken(s, f->name), XD_ERROR_ARGUMENT,
                   "file %d: the checkpoint has a file \"%.80s\" already", i, f->name);
        XD_TRY(xdi_save_other(s, f->name, f->data, f->bytes));
    }
    return XD_OK;
}

static xd_result xdi_save_manifest(xdi_save *s) {
    char *text = NULL, *path = xdi_weights_path(s->ctx, s->own, XDI_MANIFEST_FILE);
    size_t bytes = 0;
    xd_result result = path ? XD_OK : XD_FAIL(s->ctx, XD_ERROR_MEMORY, "%s: no room for a path", s->own);
    if (result == XD_OK)
        result = xdi_manifest_write(&s->writer, s->desc.step, s->others, s->other_count, &text, &bytes);
    if (result == XD_OK) result = xd_file_save(s->ctx, path, text, bytes);
    xd_release(s->ctx, text);
    xd_release(s->ctx, path);
    return result;
}

/* ---- publication ---- */

static xd_result xdi_save_latest(const xdi_save *s) {
    char text[XDI_SAVE_NAME], *path = xdi_weights_path(s->ctx, s->desc.root, XDI_SAVE_LATEST);
    XD_REQUIRE(s->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", s->desc.root);
    const int bytes = snprintf(text, sizeof text, "step-%lld\n", (long long)s->desc.step);
    const xd_result result = xd_file_save(s->ctx, path, text, (size_t)bytes);
    xd_release(s->ctx, path);
    return result;
}

/* Rank 0. */
static xd_result xdi_save_finish(xdi_save *s) {
    if (!s->root) return XD_OK;
    XD_TRY(xdi_save_others(s));
    XD_TRY(xdi_save_manifest(s));
    xd_publish_directory *directory = s->directory;
    s->directory = NULL;
    XD_TRY(xd_publish_directory_commit(directory));
    xd_result result = xdi_save_latest(s);
    if (result == XD_OK) result = xdi_checkpoint_prune(s->ctx, s->desc.root, s->desc.step, s->desc.keep);
    if (result != XD_OK)
        return XD_FAIL(s->ctx, result, "%s: the checkpoint is complete, but: %s", s->path,
                       xd_last_error(s->ctx)->message);
    return XD_OK;
}

/* Names, places and files; and then how often the ranks meet while they write. */
static xd_result xdi_save_lay_out(xdi_save *s) {
    XD_TRY(xdi_comm_agree_alike(s->comm, xdi_save_start(s)));
    XD_TRY(xdi_save_share(s));
    return xdi_round_count(s->comm, xdi_writer_bytes(&s->writer), &s->rounds);
}

static xd_result xdi_save_publish(xdi_save *s) {
    XD_TRY(xdi_writer_merge(&s->writer));
    return xdi_comm_agree_alike(s->comm, xdi_save_finish(s));
}

XD_PRIVATE xd_result xdi_save_advance(xdi_save *s) {
    switch (s->phase) {
    case XDI_SAVE_AGREE: XD_TRY(xdi_save_agree(s)); break;
    case XDI_SAVE_LAY_OUT: XD_TRY(xdi_save_lay_out(s)); break;
    case XDI_SAVE_WRITE:
        XD_TRY(xdi_comm_agree_alike(s->comm, xdi_writer_work(&s->writer, XDI_ROUND)));
        if (--s->rounds > 0) return XD_OK;
        break;
    case XDI_SAVE_PUBLISH: XD_TRY(xdi_save_publish(s)); break;
    case XDI_SAVE_DONE: return XD_OK;
    }
    s->phase = (xdi_save_phase)(s->phase + 1);
    return XD_OK;
}

XD_PRIVATE void xdi_save_end(xdi_save *s) {
    xdi_hand_end(&s->writer.hand);
    xdi_publish_abort(s->writer.open);
    xd_publish_directory_abort(s->directory);
    if (s->lock_path) xdi_lock_drop(s->ctx, s->lock_path, &s->lock);
    for (int64_t i = 0; i < s->other_count; i++) xd_release(s->ctx, (void *)s->others[i].blocks);
    xd_release(s->ctx, s->others);
    xd_release(s->ctx, s->state);
    xd_release(s->ctx, s->own);
    xd_release(s->ctx, s->path);
    xd_release(s->ctx, s->lock_path);
    xd_release(s->ctx, s->writer.stage);
    xd_release(s->ctx, s->writer.fingerprints);
    xd_release(s->ctx, s->writer.blocks);
    xdi_plan_destroy(&s->plan);
    xdi_content_destroy(&s->content);
    memset(&s->writer, 0, sizeof s->writer);
    s->directory = NULL;
    s->others = NULL;
    s->other_count = 0;
    s->state = s->own = s->path = s->lock_path = NULL;
}

XD_PRIVATE xd_result xdi_save_close(xdi_save *s, xd_result result) {
    const xd_error error = *xd_last_error(s->ctx);
    const bool begun =
        s->phase > XDI_SAVE_AGREE; /* before, there are no files, and ranks may be in different calls */
    xdi_save_end(s);
    if (result == XD_OK || !begun || xdi_comm_broken(s->comm) != XD_OK) return result;
    (void)xd_agree(s->comm, XD_OK);
    (void)xdi_ctx_adopt(s->ctx, &error);
    return result;
}

XD_PRIVATE void xdi_save_open(xdi_save *s, xd_comm *comm, const xd_checkpoint_save_desc *desc) {
    memset(s, 0, sizeof *s);
    s->comm = comm;
    s->ctx = xd_comm_ctx(comm);
    s->desc = *desc;
    s->root = xd_comm_rank(comm) == 0;
    xdi_save_resolve(&s->desc);
}

XD_API xd_result xd_checkpoint_save(xd_comm *comm, const xd_checkpoint_save_desc *desc) {
    XDI_GIVEN_COMM(comm, desc);
    xdi_save s;
    xdi_save_open(&s, comm, desc);
    xd_result result = xdi_save_check(&s);
    if (result == XD_OK) result = xdi_save_list(&s);
    result = xd_agree(comm, result);
    while (result == XD_OK && s.phase != XDI_SAVE_DONE) result = xdi_save_advance(&s);
    return xdi_save_close(&s, result);
}
