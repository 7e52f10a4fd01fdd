/* The input is a model directory, file after file: a line with the name, a line with the length, the bytes. Any directory is
 * opened or refused; in an opened one every tensor is found where it lies, and its bytes can be read; also those of whole tensors,
 * whose pieces may be in many files. */
#include "fuzz.h"

#include <errno.h>

enum { FILES = 16 };

/* The files of the current input. */
typedef struct folder {
    const uint8_t *data[FILES];
    size_t bytes[FILES];
    char names[FILES][64];
    int count;
} folder;

static folder current;

/* The line at *at without its end; false without one. */
static bool take_line(const uint8_t *data, size_t bytes, size_t *at, char *out, size_t room) {
    const uint8_t *end = *at < bytes ? (const uint8_t *)memchr(data + *at, '\n', bytes - *at) : NULL;
    const size_t length = end ? (size_t)(end - data) - *at : 0;
    if (!end || length >= room) return false;
    memcpy(out, data + *at, length);
    out[length] = '\0';
    *at += length + 1;
    return true;
}

static void unpack(const uint8_t *data, size_t bytes) {
    size_t at = 0;
    char number[24];
    current.count = 0;
    while (current.count < FILES && take_line(data, bytes, &at, current.names[current.count], 64) &&
           take_line(data, bytes, &at, number, sizeof number)) {
        const unsigned long long asked = strtoull(number, NULL, 10);
        const size_t length = asked < bytes - at ? (size_t)asked : bytes - at;
        current.data[current.count] = data + at;
        current.bytes[current.count++] = length;
        at += length;
    }
}

static int open_file(void *user, const char *path, unsigned mode, intptr_t *file) {
    const char *slash = strrchr(path, '/');
    (void)user;
    if (mode != XD_FILE_READ) return EINVAL;
    for (int i = 0; i < current.count; i++)
        if (slash && strcmp(slash + 1, current.names[i]) == 0) {
            *file = i;
            return 0;
        }
    return ENOENT;
}

static int size_of_file(void *user, intptr_t file, uint64_t *bytes) {
    (void)user;
    *bytes = current.bytes[file];
    return 0;
}

static int read_file(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    if (offset > current.bytes[file] || bytes > current.bytes[file] - offset) return EIO;
    memcpy(buffer, current.data[file] + offset, bytes);
    return 0;
}

static int close_file(void *user, intptr_t file) {
    (void)user;
    FUZZ_CHECK(file >= 0 && file < current.count);
    return 0;
}

static int list_files(void *user, const char *directory, void (*each)(void *argument, const char *name),
                      void *argument) {
    (void)user;
    (void)directory;
    for (int i = 0; i < current.count; i++) each(argument, current.names[i]);
    return 0;
}

static xd_ctx *folder_ctx(void) {
    static xd_ctx *ctx;
    xd_ctx_desc desc;
    if (ctx) return ctx;
    memset(&desc, 0, sizeof desc);
    desc.files.open = open_file;
    desc.files.size = size_of_file;
    desc.files.read = read_file;
    desc.files.close = close_file;
    desc.files.list = list_files;
    FUZZ_CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

/* Each element of a whole tensor is in one piece, so all of them take no more than the input. */
static void read_whole(size_t bytes) {
    const xd_weights_desc desc = { .directory = "model" };
    xd_weights *reader = NULL;
    if (xd_weights_open(folder_ctx(), &desc, &reader) != XD_OK) return;
    for (int64_t i = 0; i < xd_weights_describe(reader).tensor_count; i++) {
        const xd_weights_tensor *t = xd_weights_at(reader, i);
        size_t length = xd_dtype_size(t->dtype);
        FUZZ_CHECK(xd_weights_find(reader, t->name) == i && t->piece_count > 0);
        FUZZ_CHECK(t->begin <= t->end && t->end <= xd_weights_file_at(reader, t->file)->bytes);
        for (int d = 0; d < t->ndim; d++)
            if (t->shape[d] == 0) length = 0;
        for (int d = 0; d < t->ndim && length > 0; d++) length *= (size_t)t->shape[d];
        FUZZ_CHECK(length <= bytes);
        void *copy = malloc(length + 1);
        FUZZ_CHECK(xd_weights_read(reader, i, NULL, copy) == XD_OK);
        const xd_weights_read_desc range = { .bytes = length };
        FUZZ_CHECK(t->piece_count > 1 || xd_weights_read(reader, i, &range, copy) == XD_OK);
        free(copy);
    }
    xd_weights_close(reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    unpack(data, bytes);
    read_whole(bytes);
    return 0;
}
