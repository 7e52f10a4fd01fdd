/* The tensors of a save: each rank writes its elements where they belong in the files. */

#include "base/crc.h"
#include "base/publish_internal.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "tensor/internal.h"

#include <string.h>

/* Bytes of a write, and from how many on it goes past the page cache, through which disks take a fraction of what they can. */
enum { XDI_WRITER_PIECE = 4 << 20, XDI_WRITER_DIRECT = 1 << 20 };

static size_t xdi_writer_size(const xdi_stored *t) {
    return xd_dtype_size(t->dtype);
}

XD_PRIVATE uint64_t xdi_writer_bytes(const xdi_writer *w) {
    const xdi_content *c = w->plan->content;
    uint64_t bytes = 0;
    for (int64_t i = 0; i < c->tensor_count; i++) {
        const xdi_stored *t = &c->tensors[i];
        if (!xdi_stored_speaks(t, xd_comm_rank(w->comm))) continue;
        bytes += xdi_stored_bytes(t);
    }
    return bytes;
}

/* Bytes from an offset to the end of its block. */
static uint64_t xdi_writer_room(const xdi_writer *w, int64_t file, uint64_t offset) {
    const uint64_t size = w->plan->block_bytes, rest = w->plan->files[file].layout->file_bytes - offset;
    return size - offset % size < rest ? size - offset % size : rest;
}

/* Adds the checksum of bytes that end so far from the end of their block. A checksum is linear in its pieces: that of a block
 * is the exclusive or of those of its pieces, each moved to its distance from the end of the block. So no list of pieces is
 * kept, however small they are. */
static void xdi_writer_add(xdi_writer *w, int64_t file, uint64_t offset, uint32_t crc, uint64_t distance) {
    const int64_t block = (int64_t)(offset / w->plan->block_bytes);
    w->blocks[w->plan->files[file].first_block + block] ^= xdi_crc32c_combine(crc, 0, distance);
}

XD_PRIVATE void xdi_writer_note(xdi_writer *w, int64_t file, uint64_t offset, const void *data,
                                size_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    while (bytes > 0) {
        const uint64_t room = xdi_writer_room(w, file, offset);
        const size_t n = room < bytes ? (size_t)room : bytes;
        xdi_writer_add(w, file, offset, xd_crc32c(0, at, n), room - n);
        at += n;
        offset += n;
        bytes -= n;
    }
}

/* Counts w->piece, of the tensor that comes next. Blocks and tensors begin at multiples of the size of an element. */
static void xdi_writer_count(void *writer) {
    xdi_writer *w = (xdi_writer *)writer;
    const xdi_writer_piece *piece = &w->piece;
    const size_t size = xdi_writer_size(&w->plan->content->tensors[w->tensor]);
    for (int64_t done = 0, n; done < piece->count; done += n) {
        const uint64_t offset = piece->offset + (uint64_t)done * size;
        const uint64_t room = xdi_writer_room(w, w->file, offset);
        const int64_t left = piece->count - done, fit = (int64_t)(room / size);
        n = left < fit ? left : fit;
        const xdi_checked_data data = { (const unsigned char *)piece->data + (size_t)done * size, size,
                                        piece->index + done, n };
        uint32_t crc = 0;
        w->fingerprints[w->tensor] += xdi_checked(&data, &crc);
        xdi_writer_add(w, w->file, offset, crc, room - (uint64_t)n * size);
    }
}

/* ---- one tensor ---- */

static xd_result xdi_writer_close(xdi_writer *w) {
    xdi_publish *open = w->open;
    w->open = NULL;
    return open ? xdi_publish_commit(open) : XD_OK;
}

/* Opens the file of the next tensor, and closes the one before. */
static xd_result xdi_writer_open(xdi_writer *w) {
    while (w->tensor >= w->plan->files[w->file].first + w->plan->files[w->file].count) {
        XD_TRY(xdi_writer_close(w));
        w->file++;
    }
    if (w->open) return XD_OK;
    char *path = xdi_weights_path(w->plan->content->ctx, w->directory, w->plan->files[w->file].name);
    XD_REQUIRE(w->plan->content->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", w->directory);
    const xd_result result = xdi_publish_join(w->plan->content->ctx, path, &w->open);
    xd_release(w->plan->content->ctx, path);
    return result;
}

/* Past the page cache, while another thread counts: a disk keeps the writing one waiting. What goes through the cache after
 * all does not wait, and is counted afterwards. */
static xd_result xdi_writer_put_direct(xdi_writer *w, size_t bytes) {
    const bool beside = !w->cached && xdi_hand_start(&w->hand, xdi_writer_count, w);
    int reason = 0;
    const xd_result result =
        xdi_publish_write_direct(w->open, w->piece.data, bytes, w->piece.offset, &reason);
    if (beside) xdi_hand_wait(&w->hand);
    XD_TRY(result);
    w->cached = reason != 0;
    if (!beside) xdi_writer_count(w);
    return XD_OK;
}

/* Elements in memory of the host, from `index` of the whole tensor on, few enough to be in the cache still when they are looked
 * at after writing. */
static xd_result xdi_writer_put_some(xdi_writer *w, const void *data, int64_t index, int64_t count) {
    const xdi_planned_file *f = &w->plan->files[w->file];
    const size_t size = xdi_writer_size(&w->plan->content->tensors[w->tensor]), bytes = (size_t)count * size;
    const uint64_t offset = f->layout->begin[w->tensor - f->first] + (uint64_t)index * size;
    const xdi_writer_piece piece = { data, offset, index, count };
    w->piece = piece;
    if (bytes >= (size_t)XDI_WRITER_DIRECT) return xdi_writer_put_direct(w, bytes);
    XD_TRY(xdi_publish_write(w->open, data, bytes, offset));
    xdi_writer_count(w);
    return XD_OK;
}

static xd_result xdi_writer_put(xdi_writer *w, const void *data, int64_t index, int64_t count) {
    const size_t size = xdi_writer_size(&w->plan->content->tensors[w->tensor]);
    const int64_t most = (int64_t)((size_t)XDI_WRITER_PIECE / size);
    for (int64_t done = 0, n; done < count; done += n) {
        n = count - done < most ? count - done : most;
        XD_TRY(xdi_writer_put_some(w, (const unsigned char *)data + (size_t)done * size, index + done, n));
    }
    return XD_OK;
}

/* The next elements of the part in memory of the host. */
static xd_result xdi_writer_fetch(xdi_writer *w, int64_t count, const unsigned char **data) {
    const xdi_stored *t = &w->plan->content->tensors[w->tensor];
    xd_ctx *ctx = w->plan->content->ctx;
    const size_t size = xdi_writer_size(t);
    const unsigned char *from = (const unsigned char *)t->data + (size_t)w->position * size;
    *data = from;
    if (w->plan->content->on_host) return XD_OK;
    const xd_launch launch = xd_ctx_launch(ctx);
    *data = w->stage;
    XD_TRY(xd_ctx_kernels(ctx)->memory.copy(&launch, w->stage, from, (size_t)count * size, XD_COPY_TO_HOST));
    return xd_ctx_kernels(ctx)->memory.synchronize(&launch);
}

/* As many elements as staging holds, run by run; *bytes: how many that were. */
static xd_result xdi_writer_some(xdi_writer *w, uint64_t *bytes) {
    const xdi_stored *t = &w->plan->content->tensors[w->tensor];
    const size_t size = xdi_writer_size(t);
    const xd_interval range = t->part->range;
    const unsigned char *data;
    XD_TRY(xdi_writer_open(w));
    *bytes = size;
    if (t->step) {
        w->position = 1;
        return xdi_writer_put(w, t->step, 0, 1);
    }
    const int64_t left = range.end - range.begin - w->position, room = (int64_t)(w->stage_bytes / size);
    const int64_t count = left < room ? left : room;
    XD_TRY(xdi_writer_fetch(w, count, &data));
    for (int64_t done = 0, run; done < count; done += run) {
        int64_t index;
        run = xdi_part_run(t->part, range.begin + w->position + done, &index);
        if (run > count - done) run = count - done;
        XD_TRY(xdi_writer_put(w, data + (size_t)done * size, index, run));
    }
    w->position += count;
    *bytes = (uint64_t)count * size;
    return XD_OK;
}

/* Goes to the next tensor of which this rank has something to write; false behind the last. */
static bool xdi_writer_next(xdi_writer *w) {
    const xdi_content *c = w->plan->content;
    for (; w->tensor < c->tensor_count; w->tensor++, w->position = 0) {
        const xdi_stored *t = &c->tensors[w->tensor];
        if (!xdi_stored_speaks(t, xd_comm_rank(w->comm))) continue;
        if (t->step ? w->position == 0 : w->position < t->part->range.end - t->part->range.begin) return true;
    }
    return false;
}

XD_PRIVATE xd_result xdi_writer_work(void *writer, uint64_t bytes) {
    xdi_writer *w = (xdi_writer *)writer;
    uint64_t done = 0, now = 0;
    while (done < bytes && xdi_writer_next(w)) {
        XD_TRY(xdi_writer_some(w, &now));
        done += now;
    }
    return xdi_writer_next(w) ? XD_OK : xdi_writer_close(w);
}

/* ---- what all ranks have found ---- */

/* values[i] becomes, on rank 0, that of all ranks together. A window at a time. */
static xd_result xdi_writer_merge_array(xdi_writer *w, uint64_t *values, int64_t count, bool add) {
    xd_ctx *ctx = w->plan->content->ctx;
    const int size = xd_comm_size(w->comm), rank = xd_comm_rank(w->comm);
    const int64_t room = (1 << 20) / size + 1, most = count < room ? count : room;
    int64_t *counts = (int64_t *)xd_allocate(ctx, (size_t)size * sizeof *counts);
    uint64_t *all = (uint64_t *)xd_allocate(ctx, (rank == 0 ? (size_t)(most * size) : 0) * sizeof *all);
    xd_result result = xd_agree(w->comm, counts && all ? XD_OK
                                                       : XD_FAIL(ctx, XD_ERROR_MEMORY,
                                                                 "no room for %lld numbers of %d ranks",
                                                                 (long long)most, size));
    for (int64_t first = 0; first < count && result == XD_OK; first += most) {
        const int64_t n = count - first < most ? count - first : most;
        for (int r = 0; r < size; r++) counts[r] = n;
        result = xd_gather(w->comm, values + first, all, counts, XD_DTYPE_U64, 0);
        for (int r = 1; r < size && rank == 0 && result == XD_OK; r++)
            for (int64_t i = 0; i < n; i++) {
                const uint64_t other = all[r * n + i];
                values[first + i] = add ? values[first + i] + other : values[first + i] ^ other;
            }
    }
    xd_release(ctx, all);
    xd_release(ctx, counts);
    return result;
}

XD_PRIVATE xd_result xdi_writer_merge(xdi_writer *w) {
    XD_TRY(xdi_writer_merge_array(w, w->blocks, w->plan->block_count, false));
    return xdi_writer_merge_array(w, w->fingerprints, w->plan->content->tensor_count, true);
}
