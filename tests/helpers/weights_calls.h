/* Weights by their path, bytes or box, beside the other settings; settings that are NULL -> all zero. */
#ifndef WEIGHTS_CALLS_H
#define WEIGHTS_CALLS_H

#include "xdistill.h"

#include <string.h>

static inline xd_weights_desc weights_desc(const xd_weights_desc *settings) {
    xd_weights_desc desc;
    memset(&desc, 0, sizeof desc);
    return settings ? *settings : desc;
}

static inline xd_result weights_open_file(xd_ctx *ctx, const char *path, const xd_weights_desc *settings,
                                          xd_weights **out) {
    xd_weights_desc desc = weights_desc(settings);
    desc.file = path;
    return xd_weights_open(ctx, &desc, out);
}

static inline xd_result weights_open_directory(xd_ctx *ctx, const char *path, const xd_weights_desc *settings,
                                               xd_weights **out) {
    xd_weights_desc desc = weights_desc(settings);
    desc.directory = path;
    return xd_weights_open(ctx, &desc, out);
}

static inline xd_result weights_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                            const xd_weights_desc *settings, xd_weights **out) {
    xd_weights_desc desc = weights_desc(settings);
    desc.data = data;
    desc.bytes = bytes;
    return xd_weights_open(ctx, &desc, out);
}

static inline int64_t weights_count(const xd_weights *weights) {
    return xd_weights_describe(weights).tensor_count;
}

/* Pair `index` of the first file; false past the last. */
static inline bool weights_metadata_at(const xd_weights *weights, int64_t index, const char **key,
                                       const char **value) {
    const xd_weights_file *one = xd_weights_file_at(weights, 0);
    if (index < 0 || index >= one->metadata_count) return false;
    *key = one->metadata[index].key;
    *value = one->metadata[index].value;
    return true;
}

static inline xd_result weights_read_bytes(xd_weights *weights, int64_t index, uint64_t first_byte,
                                           size_t bytes, void *to) {
    const xd_weights_read_desc desc = { NULL, NULL, first_byte, bytes };
    return xd_weights_read(weights, index, &desc, to);
}

static inline xd_result weights_read_box(xd_weights *weights, int64_t index, const int64_t *offset,
                                         const int64_t *size, void *to) {
    const xd_weights_read_desc desc = { offset, size, 0, 0 };
    return xd_weights_read(weights, index, &desc, to);
}

static inline xd_result weights_write_file(xd_ctx *ctx, const char *path,
                                           const xd_weights_writer_desc *settings, xd_weights_writer **out) {
    xd_weights_writer_desc desc = *settings;
    desc.file = path;
    return xd_weights_writer_create(ctx, &desc, out);
}

static inline xd_result weights_write_directory(xd_ctx *ctx, const char *path,
                                                const xd_weights_writer_desc *settings,
                                                xd_weights_writer **out) {
    xd_weights_writer_desc desc = *settings;
    desc.directory = path;
    return xd_weights_writer_create(ctx, &desc, out);
}

#endif
