#ifndef XDI_BASE_PUBLISH_H
#define XDI_BASE_PUBLISH_H

#include "base/context.h"

/* Atomic publishing of files. A file that is being written has a temporary name and gets its final name only when it is
 * complete and on disk, so a reader never sees an incomplete file and a mapping of the old file stays valid.
 *
 * This holds for every writer of the library. A path that is no regular file is refused, and so is a symbolic link, which the
 * rename would replace while its target stays as it was. A writer holds a lock on its temporary file; the next writer of the
 * same path removes those that nobody holds, whose writers have died. Where the file system has no locks they stay, and the
 * context warns once. A process that forks while it writes gives its child the locks too. */

/* Reads a whole file. *data is NUL-terminated one byte after its end; free it with xd_release.
 *   max_bytes   0 -> 256 MiB
 * Local. Errors: IO; FORMAT when the file is longer than max_bytes, or only a pointer of Git LFS to it; MEMORY. */
XD_API xd_result xd_file_load(xd_ctx *ctx, const char *path, size_t max_bytes, char **data, size_t *bytes);

/* Writes a whole file, replacing an old one of that name atomically. Local.
 * Errors: IO, MEMORY; then no file is left behind and an old file is untouched. */
XD_API xd_result xd_file_save(xd_ctx *ctx, const char *path, const void *data, size_t bytes);

/* The names in a directory, sorted by their bytes, without "." and "..". *names has *count strings in one block of memory; free
 * it with xd_release. Local. Errors: IO; MEMORY; UNSUPPORTED without `list`. */
XD_API xd_result xd_file_list(xd_ctx *ctx, const char *directory, const char ***names, int64_t *count);

/* A file being written under its temporary name. */
typedef struct xd_publish xd_publish;

/* Starts a file under a temporary name in the directory of `path`. Local. Errors: IO, MEMORY. */
XD_API xd_result xd_publish_create(xd_ctx *ctx, const char *path, xd_publish **out);

/* Its temporary name, for xd_publish_join on other ranks. Valid as long as the object. */
XD_API const char *xd_publish_path(const xd_publish *file);

/* Opens a file that exists, to be written in place: one that another rank has started and given its length, of which
 * each rank writes ranges of its own. xd_publish_commit syncs and closes it, and leaves its name to who started it, who commits
 * after all others; xd_publish_abort closes it. Local. Errors: IO, MEMORY, UNSUPPORTED. */
XD_API xd_result xd_publish_join(xd_ctx *ctx, const char *path, xd_publish **out);

/* Writes bytes at an offset; ranges may come in any order. Errors: IO. */
XD_API xd_result xd_publish_write(xd_publish *file, const void *data, size_t bytes, uint64_t offset);

/* The same past the page cache, for much data that nobody here reads soon: see write_direct of xd_files.
 *   reason   0, or the errno value that says why the cache was used, ENOSYS without write_direct; may be NULL
 * Errors: IO. */
XD_API xd_result xd_publish_write_direct(xd_publish *file, const void *data, size_t bytes, uint64_t offset,
                                         int *reason);

/* Sets the length. A file that grows beyond the free space of its file system is refused: that the disk is full is known before
 * the first byte is written. The space is not reserved. Errors: IO, with both numbers; UNSUPPORTED. */
XD_API xd_result xd_publish_resize(xd_publish *file, uint64_t bytes);

/* Syncs, renames to the final name, syncs the directory, and frees the object, whatever the result.
 * Errors: IO; the temporary file is then gone. When only the sync of the directory fails, the file is complete under
 * its name, but a power loss may still undo the rename. */
XD_API xd_result xd_publish_commit(xd_publish *file);

/* Removes the temporary file and frees the object. NULL is fine. */
XD_API void xd_publish_abort(xd_publish *file);

#endif
