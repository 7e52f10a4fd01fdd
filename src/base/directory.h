#ifndef XDI_BASE_DIRECTORY_H
#define XDI_BASE_DIRECTORY_H

#include "base/context.h"

/* A directory under a temporary name next to its own. */
typedef struct xd_publish_directory xd_publish_directory;

/* Settings. */
typedef struct xd_publish_directory_desc {
    const char *path; /* required; a new name, or a directory that commit replaces whole */
} xd_publish_directory_desc;

/* Starts a directory whose files appear together: write into xd_publish_directory_path, then commit. A path has one
 * writer at a time. Local.
 * Errors: STATE (another writer), IO (also a symbolic link or no directory), MEMORY, UNSUPPORTED. */
XD_API xd_result xd_publish_directory_create(xd_ctx *ctx, const xd_publish_directory_desc *desc,
                                             xd_publish_directory **out);
XD_API const char *xd_publish_directory_path(const xd_publish_directory *directory);

/* Gives the directory its name, removes an older one, and frees the object in every case. Without `exchange` of xd_files
 * the older one first becomes path.old-0: docs/checkpoints.md.
 * Errors: IO. The older directory is unchanged, unless the message says that the new one is complete. Then it may remain
 * under a temporary name until the next writer removes it. */
XD_API xd_result xd_publish_directory_commit(xd_publish_directory *directory);

/* Removes the temporary directory and frees the object. */
XD_API void xd_publish_directory_abort(xd_publish_directory *directory);

#endif
