#ifndef XDI_BASE_FILE_H
#define XDI_BASE_FILE_H

#include "base/config.h"

/* How a file is opened. */
typedef enum xd_file_mode {
    XD_FILE_READ = 1,
    XD_FILE_WRITE_NEW /* create; fail when the name exists */
} xd_file_mode;

/* Every file call the library makes. Each returns 0 on success or an errno value. Zero entries mean POSIX; tests
 * replace single entries to make each call fail. `file` is whatever open stored. */
typedef struct xd_files {
    int (*open)(void *user, const char *path, xd_file_mode mode, intptr_t *file);
    int (*size)(void *user, intptr_t file, uint64_t *bytes);
    int (*read)(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset); /* all or error */
    int (*write)(void *user, intptr_t file, const void *buffer, size_t bytes,
                 uint64_t offset); /* all or error */
    int (*resize)(void *user, intptr_t file, uint64_t bytes);
    int (*sync)(void *user, intptr_t file);
    int (*close)(void *user, intptr_t file);
    int (*map)(void *user, intptr_t file, uint64_t bytes, const void **address); /* private, read-only */
    int (*unmap)(void *user, const void *address, uint64_t bytes);
    int (*rename)(void *user, const char *from, const char *to); /* replaces `to` atomically */
    int (*remove)(void *user, const char *path);
    int (*make_directory)(void *user, const char *path); /* an existing directory is success */
    int (*sync_directory)(void *user, const char *path);
    void *user;
} xd_files;

#endif
