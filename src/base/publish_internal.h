#ifndef XDI_BASE_PUBLISH_INTERNAL_H
#define XDI_BASE_PUBLISH_INTERNAL_H

#include "base/internal.h"
#include "base/publish.h"

/* publish.c: files that are written in ranges, by one rank or by several. */

/* A file being written under its temporary name. */
typedef struct xdi_publish xdi_publish;

/* Starts a file under a temporary name in the directory of `path`. Local. Errors: IO, MEMORY. */
XD_PRIVATE xd_result xdi_publish_create(xd_ctx *ctx, const char *path, xdi_publish **out);

/* Its temporary name, for xdi_publish_join on other ranks. Valid as long as the object. */
XD_PRIVATE const char *xdi_publish_path(const xdi_publish *file);

/* Opens a file that exists, to be written in place: one that another rank has started and given its length, of which
 * each rank writes ranges of its own. xdi_publish_commit syncs and closes it; the rank that started the file commits last and
 * renames it. xdi_publish_abort closes it. Local. Errors: IO, MEMORY, UNSUPPORTED. */
XD_PRIVATE xd_result xdi_publish_join(xd_ctx *ctx, const char *path, xdi_publish **out);

/* Writes bytes at an offset; ranges may come in any order. Errors: IO. */
XD_PRIVATE xd_result xdi_publish_write(xdi_publish *file, const void *data, size_t bytes, uint64_t offset);

/* The same past the page cache, for much data that this machine does not read soon: see write_direct of xd_files.
 *   reason   0, or the errno value that says why the cache was used, ENOSYS without write_direct; may be NULL
 * Errors: IO. */
XD_PRIVATE xd_result xdi_publish_write_direct(xdi_publish *file, const void *data, size_t bytes,
                                              uint64_t offset, int *reason);

/* Sets the length. Refuses a file that grows beyond the free space of its file system, so a full disk is an error before the
 * first byte. The space is not reserved. Errors: IO, with both numbers; UNSUPPORTED. */
XD_PRIVATE xd_result xdi_publish_resize(xdi_publish *file, uint64_t bytes);

/* Syncs, renames to the final name, syncs the directory, and frees the object, whatever the result.
 * Errors: IO; the temporary file is then gone. When only the sync of the directory fails, the file is complete under
 * its name, but a power loss may still undo the rename. */
XD_PRIVATE xd_result xdi_publish_commit(xdi_publish *file);

/* Removes the temporary file and frees the object. NULL is fine. */
XD_PRIVATE void xdi_publish_abort(xdi_publish *file);

/* xdi_publish_create, whose temporary file has a lock only when `locked`: a writer that holds another needs none;
 * and the parts of xdi_publish_commit: everything up to the rename, and the rename. xdi_publish_abort ends both. */
XD_PRIVATE xd_result xdi_publish_start(xd_ctx *ctx, const char *path, bool locked, xdi_publish **out);
XD_PRIVATE xd_result xdi_publish_close(xdi_publish *file);
XD_PRIVATE xd_result xdi_publish_rename(xdi_publish *file);
XD_PRIVATE bool xdi_publish_is_waiting(const xdi_publish *file); /* under its temporary name */
XD_PRIVATE xd_result xdi_publish_sync_folder(xd_ctx *ctx, const char *path);

#endif
