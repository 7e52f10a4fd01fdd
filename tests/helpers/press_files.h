/* press_files.h - files of which one call is the last of its process, or fails. */
#ifndef PRESS_FILES_H
#define PRESS_FILES_H

#include "xdistill.h"
#include "xd_test.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

typedef enum press_kind {
    CALL_NONE,
    CALL_SYNC,
    CALL_RENAME,
    CALL_REMOVE,
    CALL_SYNC_DIRECTORY,
    CALL_OTHER
} press_kind;

typedef struct press {
    xd_ctx *ctx;
    xd_files real;
    long calls, at; /* what happens, happens at call `at`; -1: nothing does. Ranks may share the table */
    bool kills;     /* instead of failing */
    bool no_locks, no_exchange;
    press_kind failed;
    int warnings;
    char last_warning[200];
    xd_result result; /* of a save of which a call failed */
} press;

/* Whether this call fails; a killed one does not return. */
static inline bool press_call(press *p, press_kind kind) {
    if (__atomic_fetch_add(&p->calls, 1, __ATOMIC_RELAXED) != p->at) return false;
    if (p->kills) kill(getpid(), SIGKILL);
    p->failed = kind;
    return true;
}

static int press_open(void *user, const char *path, unsigned mode, intptr_t *file) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.open(NULL, path, mode, file);
}

static int press_size(void *user, intptr_t file, uint64_t *bytes) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.size(NULL, file, bytes);
}

static int press_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.read(NULL, file, buffer, bytes, offset);
}

static int press_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    press *p = (press *)user;
    if (__atomic_load_n(&p->calls, __ATOMIC_RELAXED) == p->at)
        p->real.write(NULL, file, buffer, bytes / 2, offset); /* torn */
    return press_call(p, CALL_OTHER) ? ENOSPC : p->real.write(NULL, file, buffer, bytes, offset);
}

static int press_resize(void *user, intptr_t file, uint64_t bytes) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? ENOSPC : p->real.resize(NULL, file, bytes);
}

static int press_sync(void *user, intptr_t file) {
    (void)file; /* the disk's speed is not what is tested */
    return press_call((press *)user, CALL_SYNC) ? EIO : 0;
}

static int press_close(void *user, intptr_t file) {
    press *p = (press *)user;
    const int error = p->real.close(NULL, file);
    return press_call(p, CALL_OTHER) ? EIO : error;
}

static int press_rename(void *user, const char *from, const char *to) {
    press *p = (press *)user;
    return press_call(p, CALL_RENAME) ? EIO : p->real.rename(NULL, from, to);
}

static int press_remove(void *user, const char *path) {
    press *p = (press *)user;
    return press_call(p, CALL_REMOVE) ? EIO : p->real.remove(NULL, path);
}

static int press_sync_directory(void *user, const char *path) {
    (void)path;
    return press_call((press *)user, CALL_SYNC_DIRECTORY) ? EIO : 0;
}

static int press_lock(void *user, const char *path, intptr_t file, intptr_t *held) {
    press *p = (press *)user;
    if (p->no_locks) return ENOLCK;
    return press_call(p, CALL_OTHER) ? EIO : p->real.lock(NULL, path, file, held);
}

static int press_list(void *user, const char *directory, void (*each)(void *argument, const char *name),
                      void *argument) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.list(NULL, directory, each, argument);
}

static int press_exchange(void *user, const char *one, const char *other) {
    press *p = (press *)user;
    if (p->no_exchange) return ENOSYS;
    return press_call(p, CALL_RENAME) ? EIO : p->real.exchange(NULL, one, other);
}

static int press_make_directory(void *user, const char *path) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.make_directory(NULL, path);
}

static int press_replaceable(void *user, const char *path) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.replaceable(NULL, path);
}

static int press_remove_directory(void *user, const char *path) {
    press *p = (press *)user;
    return press_call(p, CALL_REMOVE) ? EIO : p->real.remove_directory(NULL, path);
}

static int press_free_space(void *user, const char *path, uint64_t *bytes) {
    press *p = (press *)user;
    return press_call(p, CALL_OTHER) ? EIO : p->real.free_space(NULL, path, bytes);
}

static void press_warn(void *user, xd_log_level level, const char *line) {
    press *p = (press *)user;
    if (level != XD_LOG_WARN) return;
    p->warnings++;
    snprintf(p->last_warning, sizeof p->last_warning, "%s", line);
}

/* Settings for contexts of any number of ranks. */
static inline xd_ctx_desc press_desc(press *p) {
    xd_ctx *plain = NULL;
    xd_ctx_desc desc;
    memset(p, 0, sizeof *p);
    memset(&desc, 0, sizeof desc);
    CHECK_EQ_INT(xd_ctx_create(NULL, &plain), XD_OK);
    p->real = xd_ctx_settings(plain)->files;
    xd_ctx_destroy(plain);
    p->at = -1;
    desc.logger.write = press_warn;
    desc.logger.user = p;
    desc.files.open = press_open;
    desc.files.size = press_size;
    desc.files.read = press_read;
    desc.files.write = press_write;
    desc.files.resize = press_resize;
    desc.files.sync = press_sync;
    desc.files.close = press_close;
    desc.files.rename = press_rename;
    desc.files.remove = press_remove;
    desc.files.sync_directory = press_sync_directory;
    desc.files.lock = press_lock;
    desc.files.list = press_list;
    desc.files.exchange = press_exchange;
    desc.files.make_directory = press_make_directory;
    desc.files.replaceable = press_replaceable;
    desc.files.remove_directory = press_remove_directory;
    desc.files.free_space = press_free_space;
    desc.files.user = p;
    return desc;
}

static inline void press_start(press *p) {
    const xd_ctx_desc desc = press_desc(p);
    CHECK_EQ_INT(xd_ctx_create(&desc, &p->ctx), XD_OK);
}

#endif
