/* The files of a checkpoint, opened one at a time, and their blocks. */

#include "base/crc.h"
#include "checkpoint/internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static size_t xdi_reader_room(const xd_checkpoint *checkpoint, const char *directory) {
    size_t longest = 0;
    for (int64_t i = 0; i < checkpoint->info.file_count; i++) {
        const size_t length = strlen(checkpoint->files[i].name);
        if (length > longest) longest = length;
    }
    return strlen(directory) + 1 + longest + 1;
}

XD_PRIVATE xd_result xdi_reader_create(xdi_reader *r, const xd_checkpoint *checkpoint,
                                       const char *directory) {
    memset(r, 0, sizeof *r);
    r->checkpoint = checkpoint;
    r->directory = directory;
    r->file = -1;
    r->path = (char *)xd_allocate(checkpoint->ctx, xdi_reader_room(checkpoint, directory));
    XD_REQUIRE(checkpoint->ctx, r->path, XD_ERROR_MEMORY, "%s: no room for a path", directory);
    return XD_OK;
}

static void xdi_reader_close_file(xdi_reader *r) {
    const xd_files *files = &xd_ctx_settings(r->checkpoint->ctx)->files;
    if (r->file >= 0) files->close(files->user, r->handle);
    r->file = -1;
}

XD_PRIVATE void xdi_reader_close(xdi_reader *r) {
    if (!r->checkpoint) return;
    xdi_reader_close_file(r);
    xd_release(r->checkpoint->ctx, r->path);
    r->path = NULL;
}

static xd_result xdi_reader_open(xdi_reader *r, int64_t file) {
    xd_ctx *ctx = r->checkpoint->ctx;
    if (r->file == file) return XD_OK;
    xdi_reader_close_file(r);
    snprintf(r->path, xdi_reader_room(r->checkpoint, r->directory), "%s/%s", r->directory,
             r->checkpoint->files[file].name);
    const int error = xdi_file_open_read(ctx, r->path, &r->handle);
    XD_REQUIRE(ctx, error == 0, error == ENOENT ? XD_ERROR_MISSING : XD_ERROR_IO, "%s/%s: open: %s",
               r->directory, r->checkpoint->files[file].name, xdi_open_error(error));
    r->file = file;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_reader_read(xdi_reader *r, int64_t file, uint64_t offset, size_t bytes, void *to) {
    const xd_files *files = &xd_ctx_settings(r->checkpoint->ctx)->files;
    XD_TRY(xdi_reader_open(r, file));
    const int error = bytes ? files->read(files->user, r->handle, to, bytes, offset) : 0;
    XD_REQUIRE(r->checkpoint->ctx, error == 0, XD_ERROR_IO, "%s/%s: read of %llu bytes at %llu: %s",
               r->directory, r->checkpoint->files[file].name, (unsigned long long)bytes,
               (unsigned long long)offset, strerror(error));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_reader_block(xdi_reader *r, int64_t file, int64_t block, void *stage,
                                      size_t stage_bytes) {
    const xd_checkpoint *c = r->checkpoint;
    uint64_t offset;
    uint32_t crc = 0;
    size_t left = xdi_manifest_block(c, file, block, &offset);
    const size_t most = stage_bytes < (size_t)XDI_PIECE ? stage_bytes : (size_t)XDI_PIECE;
    for (size_t n; left > 0; left -= n, offset += n) {
        n = left < most ? left : most;
        XD_TRY(xdi_reader_read(r, file, offset, n, stage));
        crc = xd_crc32c(crc, stage, n);
    }
    return crc == c->blocks[c->first_block[file] + block]
               ? XD_OK
               : xdi_manifest_damage(c, r->directory, file, block, crc);
}
