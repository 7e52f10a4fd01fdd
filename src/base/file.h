#ifndef XDI_BASE_FILE_H
#define XDI_BASE_FILE_H

#include "base/config.h"

/* File modes: one of the first three, with or without XD_FILE_DIRECT. */
typedef enum xd_file_mode {
    XD_FILE_READ = 1, /* existing; read */
    XD_FILE_NEW = 2,  /* create; read and write; EEXIST if the name exists */
    /* Existing; read and write in place, by any number of writers. Opening keeps bytes and size. ENOENT if the name does not
     * exist. */
    XD_FILE_EXISTING = 3,
    /* A hint: large reads and writes bypass the page cache if the file system can. Memory, offset and size are multiples of
     * XD_FILE_ALIGNMENT, except a read to the end of the file. */
    XD_FILE_DIRECT = 16
} xd_file_mode;

#define XD_FILE_ALIGNMENT 4096

/* Effects of NULL entries in an xd_files with `open`:
 *
 *   map                   files are read
 *   write, rename         writing files is UNSUPPORTED
 *   resize                writing files of preset size is UNSUPPORTED
 *   sync, sync_directory  a file is as durable as its last write
 *   remove                an aborted writer leaves its temporary file
 *   lock                  files of a dead writer stay
 *   list                  those that its next writer cannot name stay
 *   exchange              two renames replace a directory
 *   replaceable           anything under a name is replaced
 *   remove_directory      remove is called
 *   free_space            a full disk is found late
 *   write_direct          writes use the cache */

/* File calls. Each returns 0 or an errno value, EINVAL for an unknown mode. `file` is what open stored. open takes regular
 * files and never waits: EISDIR for a directory, ENXIO for a FIFO, socket or device.
 *
 * Without `open`, NULL entries are the POSIX ones. With it they are not available; size, read and close are then required,
 * and unmap with map. */
typedef struct xd_files {
    int (*open)(void *user, const char *path, unsigned mode, intptr_t *file); /* mode: of xd_file_mode */
    int (*size)(void *user, intptr_t file, uint64_t *bytes);
    int (*read)(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset); /* all or error */
    int (*write)(void *user, intptr_t file, const void *buffer, size_t bytes,
                 uint64_t offset); /* all or error */
    int (*resize)(void *user, intptr_t file, uint64_t bytes);
    int (*sync)(void *user, intptr_t file);
    int (*close)(void *user, intptr_t file);
    /* Private, read-only. Truncating a mapped file raises SIGBUS; the library replaces files instead. If other programs
     * truncate, open safetensors with XD_WEIGHTS_STREAM and return ENOTSUP from map: files are then read into memory. */
    int (*map)(void *user, intptr_t file, uint64_t bytes, const void **address);
    int (*unmap)(void *user, const void *address, uint64_t bytes);
    int (*rename)(void *user, const char *from, const char *to); /* replaces `to` atomically */
    int (*remove)(void *user, const char *path);
    int (*make_directory)(void *user, const char *path); /* success if it exists */
    int (*sync_directory)(void *user, const char *path); /* EINVAL, ENOTSUP: unknown here; writers continue */
    void *user;
    /* Locks the open file `path` without waiting. The lock ends with the process or when *held is closed, not `file`.
     * EWOULDBLOCK: another handle has the lock. ESTALE: `path` names another file. Other errors: no locks here. */
    int (*lock)(void *user, const char *path, intptr_t file, intptr_t *held);
    /* Calls `each` for every name except "." and "..", in any order; it may remove the name. */
    int (*list)(void *user, const char *directory, void (*each)(void *argument, const char *name),
                void *argument);
    int (*exchange)(void *user, const char *one, const char *other); /* in one step */
    /* Whether a new file may take the name. 0: regular file or nothing. EISDIR, ENXIO: as open. ELOOP: a symbolic link, which
     * rename would replace. */
    int (*replaceable)(void *user, const char *path);
    /* Removes an empty directory only. ENOTEMPTY, EEXIST: it has names. ENOTDIR: no directory, or a link to one. POSIX
     * `remove` also removes empty directories. */
    int (*remove_directory)(void *user, const char *path);
    /* Bytes that this user can write on the path's file system, without quotas and other writers. ENOTSUP: unknown. */
    int (*free_space)(void *user, const char *path, uint64_t *bytes);
    /* As write, past the page cache, for any alignment: all or error. Partial first and last blocks, which other writers may
     * share, use the cache. Blocks are copied unless address and offset are equal modulo XD_FILE_ALIGNMENT.
     *
     * *reason is 0, or why blocks used the cache: ENOSYS (system), EINVAL (file system or device), ENOMEM. One call on a
     * handle at a time; each writer has its own. Only sync makes the file durable. */
    int (*write_direct)(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                        int *reason);
} xd_files;

#endif
