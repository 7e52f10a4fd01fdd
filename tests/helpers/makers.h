/* makers.h - objects from a path or from bytes, without a desc to fill in. */
#ifndef XD_TEST_MAKERS_H
#define XD_TEST_MAKERS_H

#include <string.h>

static inline xd_result tokenizer_load(xd_ctx *ctx, const char *path, const xd_tokenizer_desc *desc,
                                       xd_tokenizer **out) {
    xd_tokenizer_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.path = path;
    return xd_tokenizer_load(ctx, &d, out);
}

static inline xd_result tokenizer_load_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                              const xd_tokenizer_desc *desc, xd_tokenizer **out) {
    xd_tokenizer_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.data = data;
    d.data_bytes = bytes;
    return xd_tokenizer_load(ctx, &d, out);
}

static inline xd_result encoder_create(xd_ctx *ctx, const xd_tokenizer *tokenizer, xd_encoder **out) {
    const xd_encoder_desc d = { tokenizer, false };
    return xd_encoder_create(ctx, &d, out);
}

static inline xd_result batch_encoder_create(xd_ctx *ctx, const xd_tokenizer *tokenizer, xd_encoder **out) {
    const xd_encoder_desc d = { tokenizer, true };
    return xd_encoder_create(ctx, &d, out);
}

static inline xd_result votes_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size,
                                     xd_votes **out) {
    const xd_votes_desc d = { student_size, teacher_size };
    return xd_votes_create(ctx, &d, out);
}

static inline xd_result exact_map_create(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size,
                                         bool relaxed, xd_exact_map *out) {
    const xd_exact_map_desc d = { rows, teacher_size, relaxed };
    return xd_exact_map_create(ctx, &d, out);
}

static inline xd_result projection_load(xd_ctx *ctx, const char *path, const xd_projection_origin *expected,
                                        xd_projection *out) {
    const xd_projection_load_desc d = { path, NULL, 0, expected };
    return xd_projection_load(ctx, &d, out);
}

static inline xd_result projection_load_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                               const xd_projection_origin *expected, xd_projection *out) {
    const xd_projection_load_desc d = { NULL, data, bytes, expected };
    return xd_projection_load(ctx, &d, out);
}

/* Whether it was built, not read. */
static inline xd_result projection_cached(xd_ctx *ctx, const char *directory, const xd_projection_desc *desc,
                                          xd_projection *out, bool *built) {
    xd_projection_desc d = *desc;
    xd_projection_report report;
    d.directory = directory;
    const xd_result result = xd_projection_build(ctx, &d, out, &report);
    if (result == XD_OK && built) *built = !report.read;
    return result;
}

static inline xd_result cache_writer_create(xd_ctx *ctx, const char *path, const xd_teacher_cache_desc *desc,
                                            xd_teacher_cache_writer **out) {
    xd_teacher_cache_desc d = *desc;
    d.path = path;
    return xd_teacher_cache_writer_create(ctx, &d, out);
}

static inline xd_result cache_open(xd_ctx *ctx, const char *path, const xd_projection_origin *expected,
                                   xd_teacher_cache **out) {
    const xd_teacher_cache_open_desc d = { path, NULL, 0, expected };
    return xd_teacher_cache_open(ctx, &d, out);
}

static inline xd_result cache_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                          const xd_projection_origin *expected, xd_teacher_cache **out) {
    const xd_teacher_cache_open_desc d = { NULL, data, bytes, expected };
    return xd_teacher_cache_open(ctx, &d, out);
}

static inline xd_result cache_read(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t first, int64_t count,
                                   xd_cached_position *out) {
    const xd_teacher_cache_read_desc d = { first, count, out, NULL, NULL };
    return xd_teacher_cache_read(ctx, cache, &d);
}

static inline xd_result cache_entries(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t position,
                                      int32_t *ids, double *probabilities) {
    const xd_teacher_cache_read_desc d = { position, 1, NULL, ids, probabilities };
    return xd_teacher_cache_read(ctx, cache, &d);
}

#endif
