#ifndef XDI_BASE_FILE_H
#define XDI_BASE_FILE_H

#include "base/config.h"

/* One of the first three; XD_FILE_DIRECT may be added. */
typedef enum xd_file_mode {
    XD_FILE_READ = 1, /* existing */
    XD_FILE_NEW = 2,  /* create, read and write; EEXIST: it exists */
    /* Read and write in place, with any number of writers; keeps bytes and size. ENOENT: no such file. */
    XD_FILE_EXISTING = 3,
    /* A hint: no page cache for large transfers. Memory, offset, size: multiples of XD_FILE_ALIGNMENT, except a read to the
     * end. */
    XD_FILE_DIRECT = 16
} xd_file_mode;

#define XD_FILE_ALIGNMENT 4096

/* Effects of NULL entries with `open`:
 *
 *   map                   files are read
 *   write, rename         no writing: UNSUPPORTED
 *   resize                no files of preset size: UNSUPPORTED
 *   sync, sync_directory  a file is as durable as its last write
 *   remove                aborted writers leave temporary files
 *   lock                  files of dead writers stay
 *   list                  files of dead writers whose names the next writer cannot form stay
 *   exchange              two renames replace a directory
 *   replaceable           any name is replaced
 *   remove_directory      remove is called
 *   free_space            a full disk is found late
 *   write_direct          writes use the cache */

/* Calls return 0 or an errno value. open takes regular files and never waits. EINVAL: unknown mode. EISDIR: directory.
 * ENXIO: FIFO, socket or device.
 *
 * Without `open`, NULL entries are POSIX's. With `open`, NULL entries are not available; size, read and close are
 * required, and unmap with map. */
typedef struct xd_files {
    int (*open)(void *user, const char *path, unsigned mode, intptr_t *file); /* xd_file_mode */
    int (*size)(void *user, intptr_t file, uint64_t *bytes);
    int (*read)(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset); /* all or error */
    int (*write)(void *user, intptr_t file, const void *buffer, size_t bytes,
                 uint64_t offset); /* all or error */
    int (*resize)(void *user, intptr_t file, uint64_t bytes);
    int (*sync)(void *user, intptr_t file);
    int (*close)(void *user, intptr_t file);
    /* Private, read-only. Truncating it raises SIGBUS: docs/checkpoints.md. ENOTSUP: files are read into memory. */
    int (*map)(void *user, intptr_t file, uint64_t bytes, const void **address);
    int (*unmap)(void *user, const void *address, uint64_t bytes);
    int (*rename)(void *user, const char *from, const char *to); /* replaces `to` atomically */
    int (*remove)(void *user, const char *path);
    int (*make_directory)(void *user, const char *path); /* 0 if it exists */
    int (*sync_directory)(void *user, const char *path); /* EINVAL, ENOTSUP: not possible; writers continue */
    void *user;
    /* Locks the open file `path` without waiting, until the process ends or *held (not `file`) is closed. EWOULDBLOCK:
     * another holder. ESTALE: `path` names another file. Other errors: there are no locks. */
    int (*lock)(void *user, const char *path, intptr_t file, intptr_t *held);
    /* Calls `each` for names but "." and "..", in any order. `each` may remove the file. */
    int (*list)(void *user, const char *directory, void (*each)(void *argument, const char *name),
                void *argument);
    int (*exchange)(void *user, const char *one, const char *other); /* in one step */
    /* 0: regular file or nothing. EISDIR, ENXIO: as open. ELOOP: a symbolic link, which rename would replace. */
    int (*replaceable)(void *user, const char *path);
    /* Removes an empty directory. ENOTEMPTY, EEXIST: not empty. ENOTDIR: no directory, or a link. POSIX `remove` does
     * it too. */
    int (*remove_directory)(void *user, const char *path);
    /* Bytes this user can write, without quotas and other writers. ENOTSUP: unknown. */
    int (*free_space)(void *user, const char *path, uint64_t *bytes);
    /* As write, past the page cache, for any alignment. Partial first and last blocks, which other writers may share, use
     * the cache. Blocks are copied unless address and offset are equal modulo XD_FILE_ALIGNMENT.
     *
     * *reason: 0, or why blocks used the cache: ENOSYS (system), EINVAL (file system, device), ENOMEM. One call on a handle
     * at a time. Durable after sync. */
    int (*write_direct)(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                        int *reason);
} xd_files;

#endif
