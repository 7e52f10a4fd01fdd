#ifndef XDI_BASE_DIRECTORY_H
#define XDI_BASE_DIRECTORY_H

#include "base/context.h"

/* A directory being written under a temporary name beside its own. */
typedef struct xd_publish_directory xd_publish_directory;

/* Starts a directory whose files appear all at once: write them into the directory that xd_publish_directory_path names, with
 * any call, then commit. `path` must be free, or a directory: commit replaces that whole, so it should hold nothing
 * else. One writer of a path at a time. Local. Errors: STATE when another writer has it; IO, also for what is no directory
 * or a symbolic link; MEMORY; UNSUPPORTED. */
XD_API xd_result xd_publish_directory_create(xd_ctx *ctx, const char *path, xd_publish_directory **out);
XD_API const char *xd_publish_directory_path(const xd_publish_directory *directory);

/* Gives the directory its name, in exchange for an older one, which is then removed; and frees the object, whatever the
 * result. Where names cannot be exchanged (`exchange` of xd_files) the older one is renamed to path.old-0 first: while `path`
 * is missing, all calls that open a file of it find it there, and the next writer puts it back. A program that
 * opens several files of a directory by path may meet the older one and the new one.
 * Errors: IO. Unless the message says that the new directory is complete, the older one is as it was; when it says so, the older
 * one may be left under a temporary name, which the next writer of the path removes. */
XD_API xd_result xd_publish_directory_commit(xd_publish_directory *directory);

/* Removes the temporary directory and frees the object. NULL is fine. */
XD_API void xd_publish_directory_abort(xd_publish_directory *directory);

#endif
