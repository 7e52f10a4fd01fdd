/* The file callbacks on POSIX. Reads and writes are complete or fail: a short read is EIO, because every caller knows
 * the file's size. */

#include "base/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* The first file that needs POSIX, so that this is the first line that a compiler prints. */
#if !defined(O_CLOEXEC)
#    error \
        "add `#define _POSIX_C_SOURCE 200809L` above the first #include of this file, or include xdistill.h first"
#endif

#if defined(__linux__) && (defined(_DEFAULT_SOURCE) || defined(_GNU_SOURCE))
#    include <sys/syscall.h>
#endif

/* The flag of open that bypasses the page cache; 0 where there is none. glibc has the number without _GNU_SOURCE too. */
#if defined(O_DIRECT)
enum { XDI_FILE_DIRECT = O_DIRECT };
#elif defined(__O_DIRECT)
enum { XDI_FILE_DIRECT = __O_DIRECT };
#else
enum { XDI_FILE_DIRECT = 0 };
#endif

/* Sets the flag on an open file: an open that creates a file and then fails because of the flag would leave the file
 * behind. */
static void xdi_file_set_direct(int descriptor, bool direct) {
    const int flags = fcntl(descriptor, F_GETFL);
    if (flags >= 0)
        (void)fcntl(descriptor, F_SETFL, direct ? flags | XDI_FILE_DIRECT : flags & ~XDI_FILE_DIRECT);
}

/* 0 for a regular file, otherwise what open says about any other. */
static int xdi_file_kind(const struct stat *status) {
    if (S_ISREG(status->st_mode)) return 0;
    return S_ISDIR(status->st_mode) ? EISDIR : ENXIO;
}

static int xdi_file_open(void *user, const char *path, unsigned mode, intptr_t *file) {
    (void)user;
    struct stat status;
    int flags = O_RDWR;
    switch (mode & ~(unsigned)XD_FILE_DIRECT) {
    case XD_FILE_READ: flags = O_RDONLY; break;
    case XD_FILE_NEW: flags = O_RDWR | O_CREAT | O_EXCL; break;
    case XD_FILE_EXISTING: break;
    default: return EINVAL;
    }
    /* A FIFO would wait for its other end; for a regular file O_NONBLOCK means nothing. */
    const int descriptor = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666);
    if (descriptor < 0) return errno;
    const int error = fstat(descriptor, &status) == 0 ? xdi_file_kind(&status) : errno;
    if (error != 0) {
        close(descriptor);
        return error;
    }
    if (mode & (unsigned)XD_FILE_DIRECT) xdi_file_set_direct(descriptor, true);
    *file = (intptr_t)descriptor;
    return 0;
}

/* Whether to try a failed read or write again, by errno. A direct file returns EINVAL for an address, an offset or a size
 * that its device cannot use: then, once, the flag is cleared. */
static bool xdi_file_again(int descriptor, bool *usual) {
    if (errno == EINTR) return true;
    if (errno != EINVAL || *usual) return false;
    xdi_file_set_direct(descriptor, false);
    *usual = true;
    return true;
}

static int xdi_file_size(void *user, intptr_t file, uint64_t *bytes) {
    (void)user;
    struct stat status;
    if (fstat((int)file, &status) != 0) return errno;
    *bytes = (uint64_t)status.st_size;
    return 0;
}

static int xdi_file_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    unsigned char *to = (unsigned char *)buffer;
    bool usual = XDI_FILE_DIRECT == 0;
    while (bytes > 0) {
        const ssize_t got = pread((int)file, to, bytes, (off_t)offset);
        if (got < 0 && xdi_file_again((int)file, &usual)) continue;
        if (got < 0) return errno;
        if (got == 0) return EIO;
        to += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return 0;
}

static int xdi_file_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    const unsigned char *from = (const unsigned char *)buffer;
    bool usual = XDI_FILE_DIRECT == 0;
    while (bytes > 0) {
        const ssize_t put = pwrite((int)file, from, bytes, (off_t)offset);
        if (put < 0 && xdi_file_again((int)file, &usual)) continue;
        if (put < 0) return errno;
        from += put;
        offset += (uint64_t)put;
        bytes -= (size_t)put;
    }
    return 0;
}

static int xdi_file_resize(void *user, intptr_t file, uint64_t bytes) {
    (void)user;
    return ftruncate((int)file, (off_t)bytes) == 0 ? 0 : errno;
}

static int xdi_file_sync(void *user, intptr_t file) {
    (void)user;
    return fsync((int)file) == 0 ? 0 : errno;
}

static int xdi_file_close(void *user, intptr_t file) {
    (void)user;
    return close((int)file) == 0 ? 0 : errno;
}

static int xdi_file_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    (void)user;
    void *mapping = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, (int)file, 0);
    if (mapping == MAP_FAILED) return errno;
    *address = mapping;
    return 0;
}

static int xdi_file_unmap(void *user, const void *address, uint64_t bytes) {
    (void)user;
    return munmap((void *)(uintptr_t)address, (size_t)bytes) == 0 ? 0 : errno;
}

static int xdi_file_rename(void *user, const char *from, const char *to) {
    (void)user;
    return rename(from, to) == 0 ? 0 : errno;
}

static int xdi_file_remove(void *user, const char *path) {
    (void)user;
    return remove(path) == 0 ? 0 : errno;
}

static int xdi_file_make_directory(void *user, const char *path) {
    (void)user;
    if (mkdir(path, 0777) == 0) return 0;
    if (errno != EEXIST) return errno;
    struct stat status;
    if (stat(path, &status) != 0) return errno;
    return S_ISDIR(status.st_mode) ? 0 : ENOTDIR;
}

static int xdi_file_sync_directory(void *user, const char *path) {
    (void)user;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
    if (descriptor < 0) return errno;
    const int result = fsync(descriptor) == 0 ? 0 : errno;
    close(descriptor);
    return result;
}

/* flock and not fcntl: the lock belongs to the open file, so it also tells two writers of one process apart, and no close
 * of another descriptor ends it. The locks of open files that fcntl has do the same, but not on every system of POSIX. */
static int xdi_file_lock(void *user, const char *path, intptr_t file, intptr_t *held) {
    (void)user;
    struct stat opened, named;
    const int descriptor = fcntl((int)file, F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0) return errno;
    int error = flock(descriptor, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (error == 0 && fstat(descriptor, &opened) != 0) error = errno;
    if (error == 0 &&
        (stat(path, &named) != 0 || named.st_dev != opened.st_dev || named.st_ino != opened.st_ino))
        error = ESTALE;
    if (error != 0) {
        if (error != EWOULDBLOCK) (void)flock(descriptor, LOCK_UN);
        close(descriptor);
        return error;
    }
    *held = (intptr_t)descriptor;
    return 0;
}

static int xdi_file_list(void *user, const char *directory, void (*each)(void *argument, const char *name),
                         void *argument) {
    (void)user;
    DIR *names = opendir(directory);
    if (!names) return errno;
    errno = 0;
    for (const struct dirent *entry = readdir(names); entry; entry = readdir(names)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            each(argument, entry->d_name);
        errno = 0;
    }
    const int error = errno;
    closedir(names);
    return error;
}

static int xdi_file_exchange(void *user, const char *one, const char *other) {
    (void)user;
#if defined(SYS_renameat2)
    enum { XDI_RENAME_EXCHANGE = 2 };
    return syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, XDI_RENAME_EXCHANGE) == 0 ? 0 : errno;
#else
    (void)one;
    (void)other;
    return ENOSYS;
#endif
}

static int xdi_file_replaceable(void *user, const char *path) {
    (void)user;
    struct stat status;
    if (lstat(path, &status) != 0) return errno == ENOENT ? 0 : errno;
    return S_ISLNK(status.st_mode) ? ELOOP : xdi_file_kind(&status);
}

static int xdi_file_remove_directory(void *user, const char *path) {
    (void)user;
    return rmdir(path) == 0 ? 0 : errno;
}

/* f_bavail leaves out what is kept for the superuser. A file system that has no blocks has no numbers. */
static int xdi_file_free_space(void *user, const char *path, uint64_t *bytes) {
    (void)user;
    struct statvfs status;
    if (statvfs(path, &status) != 0) return errno;
    if (status.f_blocks == 0) return ENOTSUP;
    const uint64_t block = status.f_frsize ? status.f_frsize : status.f_bsize;
    *bytes = block > 0 && status.f_bavail > UINT64_MAX / block ? UINT64_MAX : status.f_bavail * block;
    return 0;
}

/* ---- past the page cache ---- */

enum { XDI_FILE_ROOM = 4 << 20 }; /* bytes of the aligned memory */

/* A page of the cache is not shared by both ways of writing, so a block is a page where pages are larger. */
static uint64_t xdi_file_block(void) {
    const long page = sysconf(_SC_PAGESIZE);
    return page > XD_FILE_ALIGNMENT ? (uint64_t)page : (uint64_t)XD_FILE_ALIGNMENT;
}

/* Writes whole blocks to a file that has the flag, through `room` unless that is NULL. The first refusal clears the flag: the
 * rest goes through the cache. */
static int xdi_file_write_blocks(int descriptor, const unsigned char *from, size_t bytes, uint64_t offset,
                                 unsigned char *room, int *reason) {
    while (bytes > 0) {
        const size_t part = room && bytes > (size_t)XDI_FILE_ROOM ? (size_t)XDI_FILE_ROOM : bytes;
        if (room) memcpy(room, from, part);
        const ssize_t put = pwrite(descriptor, room ? room : from, part, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0 && errno == EINVAL && *reason == 0) {
            *reason = EINVAL;
            xdi_file_set_direct(descriptor, false);
            continue;
        }
        if (put < 0) return errno;
        from += put;
        offset += (uint64_t)put;
        bytes -= (size_t)put;
    }
    return 0;
}

/* Sets the flag and takes the aligned memory that the blocks need. Returns why not, 0 when they can be written. */
static int xdi_file_direct_begin(int descriptor, const unsigned char *from, size_t bytes, void **room) {
    const int flags = fcntl(descriptor, F_GETFL);
    if (XDI_FILE_DIRECT == 0) return ENOSYS;
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags | XDI_FILE_DIRECT) != 0) return errno;
    if ((uintptr_t)from % XD_FILE_ALIGNMENT == 0) return 0;
    const size_t size = bytes < (size_t)XDI_FILE_ROOM ? bytes : (size_t)XDI_FILE_ROOM;
    const int error = posix_memalign(room, XD_FILE_ALIGNMENT, size);
    if (error != 0) *room = NULL;
    return error;
}

static int xdi_file_write_direct(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                                 int *reason) {
    const unsigned char *from = (const unsigned char *)buffer;
    const uint64_t block = xdi_file_block(), before = (block - offset % block) % block;
    const size_t head = before < bytes ? (size_t)before : bytes;
    const size_t tail = (size_t)((bytes - head) % block), middle = bytes - head - tail;
    void *room = NULL;
    const int descriptor = (int)file, flags = fcntl(descriptor, F_GETFL);
    *reason = 0;
    if (bytes == 0) return 0;
    if (middle > 0) *reason = xdi_file_direct_begin(descriptor, from + head, middle, &room);
    if (*reason != 0) xdi_file_set_direct(descriptor, false);
    int error =
        xdi_file_write_blocks(descriptor, from + head, middle, offset + head, (unsigned char *)room, reason);
    free(room);
    xdi_file_set_direct(descriptor, false);
    if (error == 0 && head > 0) error = xdi_file_write(user, file, from, head, offset);
    if (error == 0 && tail > 0)
        error = xdi_file_write(user, file, from + head + middle, tail, offset + head + middle);
    if (flags >= 0 && (flags & XDI_FILE_DIRECT)) xdi_file_set_direct(descriptor, true);
    return error;
}

/* Fills the empty entries of a table of POSIX files. Entries that the caller has set stay, as does the user pointer. */
XD_PRIVATE void xdi_files_defaults(xd_files *files) {
    if (files->open) return; /* the caller's own files */
    files->open = xdi_file_open;
    if (!files->size) files->size = xdi_file_size;
    if (!files->read) files->read = xdi_file_read;
    if (!files->write) files->write = xdi_file_write;
    if (!files->resize) files->resize = xdi_file_resize;
    if (!files->sync) files->sync = xdi_file_sync;
    if (!files->close) files->close = xdi_file_close;
    if (!files->map) files->map = xdi_file_map;
    if (!files->unmap) files->unmap = xdi_file_unmap;
    if (!files->rename) files->rename = xdi_file_rename;
    if (!files->remove) files->remove = xdi_file_remove;
    if (!files->make_directory) files->make_directory = xdi_file_make_directory;
    if (!files->sync_directory) files->sync_directory = xdi_file_sync_directory;
    if (!files->lock) files->lock = xdi_file_lock;
    if (!files->list) files->list = xdi_file_list;
    if (!files->exchange) files->exchange = xdi_file_exchange;
    if (!files->replaceable) files->replaceable = xdi_file_replaceable;
    if (!files->remove_directory) files->remove_directory = xdi_file_remove_directory;
    if (!files->free_space) files->free_space = xdi_file_free_space;
    if (!files->write_direct) files->write_direct = xdi_file_write_direct;
}

XD_PRIVATE const char *xdi_open_error(int error) {
    if (error == ENXIO) return "a FIFO, a socket or a device, no regular file";
    if (error == ELOOP) return "a symbolic link: write to the file that it points to, or remove it";
    return strerror(error);
}
