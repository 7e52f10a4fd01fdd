/* folder_lock.c - one run at a time in a folder: a record lock on a file in it, which the system takes away with its
 * process. The file itself stays: without one who removes it nobody removes the one that another has just locked. */
#define _POSIX_C_SOURCE 200112L /* fcntl */
#include "folder_lock.h"
#include "folders.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct folder_lock {
    int file;
};

/* All of a file, whatever its length. */
static struct flock folder_lock_range(void) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    return lock;
}

/* 0, or the system's error. `*owner` is the process that has it, 0 when that is not known. */
static int folder_lock_try(int file, long *owner) {
    struct flock lock = folder_lock_range();
    *owner = 0;
    if (fcntl(file, F_SETLK, &lock) == 0) return 0;
    const int error = errno;
    lock = folder_lock_range();
    if (fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK) *owner = (long)lock.l_pid;
    return error;
}

static xd_result folder_lock_refused(xd_ctx *ctx, const char *directory, const char *advice, long owner) {
    char who[64];
    snprintf(who, sizeof who, owner > 0 ? "process %ld" : "a process elsewhere", owner);
    return XD_FAIL(ctx, XD_ERROR_STATE,
                   "%s runs in %s: choose another folder with --out, or wait until it has ended%s", who,
                   directory, advice);
}

/* The file of the lock, open. */
static xd_result folder_lock_open(xd_ctx *ctx, const char *directory, int *file) {
    char path[512];
    XD_TRY(folders_make(ctx, directory));
    snprintf(path, sizeof path, "%s/.lock", directory);
    *file = open(path, O_RDWR | O_CREAT, 0666);
    XD_REQUIRE(ctx, *file >= 0, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
    return XD_OK;
}

xd_result folder_lock_take(xd_ctx *ctx, const char *directory, const char *advice, folder_lock **out) {
    long owner = 0;
    int file = -1;
    XD_TRY(folder_lock_open(ctx, directory, &file));
    const int error = folder_lock_try(file, &owner);
    *out = error ? NULL : (folder_lock *)xd_allocate(ctx, sizeof **out);
    if (*out) {
        (*out)->file = file;
        return XD_OK;
    }
    close(file);
    if (!error) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a lock");
    if (error == EACCES || error == EAGAIN) return folder_lock_refused(ctx, directory, advice, owner);
    fprintf(stderr, "%s cannot be locked (%s): see that no other run writes there\n", directory,
            strerror(error));
    return XD_OK;
}

void folder_lock_release(xd_ctx *ctx, folder_lock *lock) {
    if (!lock) return;
    close(lock->file);
    xd_release(ctx, lock);
}
