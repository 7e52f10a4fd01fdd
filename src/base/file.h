#ifndef XDI_BASE_FILE_H
#define XDI_BASE_FILE_H

#include "base/config.h"

/* How a file is opened: one of the first three, with XD_FILE_DIRECT or without. */
typedef enum xd_file_mode {
    XD_FILE_READ = 1, /* a file that exists, to be read */
    XD_FILE_NEW = 2,  /* create, to be written and read; EEXIST when the name exists */
    /* A file that exists, to be written in place and read, by any number of writers at once; opening changes neither its bytes
     * nor its size; ENOENT when the name does not exist. */
    XD_FILE_EXISTING = 3,
    /* A flag, and only a hint: reads and writes are large and bypass the page cache. The caller keeps memory, offset and size of
     * each at multiples of XD_FILE_ALIGNMENT, except that a read ends at the end of the file; where the file system cannot do
     * this, the cache is used. */
    XD_FILE_DIRECT = 16
} xd_file_mode;

#define XD_FILE_ALIGNMENT 4096

/* Every file call the library makes. Each returns 0 on success or an errno value, EINVAL for a mode it does not know.
 * `file` is whatever open stored.
 *
 * Without `open` every entry that is NULL is the POSIX one, so single entries may be replaced. With `open` the files are
 * the caller's, and NULL means: not offered. open, size, read and close are then required, and unmap if there is a map.
 * Without map, files are read; without write or rename, writing files is UNSUPPORTED; without resize, so is writing a
 * file whose size is set first; without sync and sync_directory a file is as durable as its last write; without remove,
 * a writer that is aborted leaves its temporary file behind; without lock, what a writer that died has left stays; without
 * list, so does what its next writer cannot name; without exchange a directory is replaced in two renames; without
 * replaceable, whatever lies under a name is replaced; without remove_directory, remove is asked to; without free_space a full
 * disk is noticed when it is; without write_direct, all writing goes through the cache. New entries are added at the end of
 * the table.
 *
 * Only regular files are opened, and never with a wait: EISDIR for a directory, ENXIO for a FIFO, a socket or a device. */
typedef struct xd_files {
    int (*open)(void *user, const char *path, unsigned mode, intptr_t *file); /* mode: of xd_file_mode */
    int (*size)(void *user, intptr_t file, uint64_t *bytes);
    int (*read)(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset); /* all or error */
    int (*write)(void *user, intptr_t file, const void *buffer, size_t bytes,
                 uint64_t offset); /* all or error */
    int (*resize)(void *user, intptr_t file, uint64_t bytes);
    int (*sync)(void *user, intptr_t file);
    int (*close)(void *user, intptr_t file);
    /* Private, read-only. A process that truncates a file while another has it mapped ends that one by SIGBUS: writers of this
     * library never do, they replace files. Who cannot exclude it opens safetensors with XD_SAFETENSORS_STREAM, and all else
     * with a map that returns ENOTSUP, so that files are read into memory. */
    int (*map)(void *user, intptr_t file, uint64_t bytes, const void **address);
    int (*unmap)(void *user, const void *address, uint64_t bytes);
    int (*rename)(void *user, const char *from, const char *to); /* replaces `to` atomically */
    int (*remove)(void *user, const char *path);
    int (*make_directory)(void *user, const char *path); /* an existing directory is success */
    int (*sync_directory)(void *user, const char *path); /* EINVAL, ENOTSUP: not known here; writers go on */
    void *user;
    /* Takes the lock of the open file that was opened as `path`, without a wait. *held is a handle: closing it ends the lock,
     * as does the end of the process; closing `file` does not. EWOULDBLOCK when any other handle in the system holds it,
     * ESTALE when `path` no longer names this file; every other error says that there are no locks here. */
    int (*lock)(void *user, const char *path, intptr_t file, intptr_t *held);
    /* Calls `each` with every name in a directory but "." and "..", in any order; it may remove what it is told. */
    int (*list)(void *user, const char *directory, void (*each)(void *argument, const char *name),
                void *argument);
    int (*exchange)(void *user, const char *one, const char *other); /* two names, in one step */
    /* Whether a new file may take the name: 0 for a regular file and for nothing; EISDIR, ENXIO as open, and ELOOP for a
     * symbolic link, which renaming would replace instead of the file that it points to. */
    int (*replaceable)(void *user, const char *path);
    /* Removes an empty directory and nothing else: ENOTEMPTY or EEXIST when there are names in it, ENOTDIR for what is no
     * directory, also for a symbolic link to one. `remove` of POSIX removes empty directories too. */
    int (*remove_directory)(void *user, const char *path);
    /* Bytes that this user can still write on the file system of something that exists; quotas are not counted, and others may
     * write meanwhile. ENOTSUP where the file system does not say. */
    int (*free_space)(void *user, const char *path, uint64_t *bytes);
    /* As write, past the page cache: all or error, for memory, offset and size without any alignment. Whole blocks go to the
     * device; what shares its first and its last block with other writers goes through the cache. Nothing is copied when
     * address and offset are equal modulo XD_FILE_ALIGNMENT; otherwise blocks go through aligned memory of the entry's own.
     * *reason: 0, or an errno value: why blocks went through the cache after all: ENOSYS where the system has no such writing,
     * EINVAL where the file system or its device refuses it, ENOMEM. One call on a handle at a time; each writer has its own.
     * As for write, only sync makes the file durable. */
    int (*write_direct)(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                        int *reason);
} xd_files;

#endif
