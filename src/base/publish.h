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

#endif
