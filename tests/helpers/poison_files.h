/* poison_files.h - families of what becomes a file, or comes from one: a number that a file cannot hold is refused on both
 * sides, by writers as ARGUMENT or DATA, by readers as FORMAT. Files lie in a folder for temporary ones, for the call alone. */
#ifndef XD_POISON_FILES_H
#define XD_POISON_FILES_H

#include <unistd.h>

#include "poison.h"
#include "makers.h"

enum { POISON_FROWS = 5, POISON_FCOLS = 9, POISON_FK = 3, POISON_FILE_BYTES = 4096 };

typedef struct poison_files {
    xd_projection_rows rows;
    xd_teacher_cache_desc cache;
    xd_rows logits;
    int32_t ids[POISON_FROWS * POISON_FK], tokens[POISON_FROWS], next[POISON_FROWS];
    float row_weights[POISON_FROWS * POISON_FK];
    double threshold;
    float *weight, *out;
    double *probabilities;
} poison_files;

static inline void poison_path(const poison_scene *s, char path[64]) {
    snprintf(path, 64, "/tmp/xdistill-test-poison-%ld-%d", (long)getpid(), s->rank);
}

/* What a refusal is called: one name for all of them. */
static inline xd_result poison_refusal(xd_result result) {
    return result == XD_ERROR_FORMAT || result == XD_ERROR_DATA ? XD_ERROR_ARGUMENT : result;
}

static inline poison_files *poison_files_begin(poison_scene *s) {
    poison_files *p = (poison_files *)(s->own = poison_take(s, sizeof *p));
    for (int i = 0; i < POISON_FROWS; i++) {
        for (int j = 0; j < POISON_FK; j++) {
            p->ids[i * POISON_FK + j] = (i + 2 * j) % POISON_FCOLS;
            p->row_weights[i * POISON_FK + j] = 1.0f / (float)(i + j + 1);
        }
        p->tokens[i] = i;
        p->next[i] = i + 1 < POISON_FROWS ? i + 1 : -1;
    }
    p->rows.ids = p->ids;
    p->rows.weights = p->row_weights;
    p->rows.rows = POISON_FROWS;
    p->rows.k = POISON_FK;
    p->threshold = 0.3;
    p->cache.vocabulary = POISON_FCOLS;
    p->cache.k = POISON_FK;
    p->cache.temperature = 1.0;
    p->cache.coding = XD_CACHE_F32;
    s->unit = 2;
    return p;
}

/* ---- projections ---- */

static inline bool poison_projection_build(poison_scene *s) {
    poison_files *p = poison_files_begin(s);
    poison_part *weight = poison_matrix(s, "weights", POISON_IN, XD_DTYPE_F32, POISON_FROWS, POISON_FK);
    poison_fill(weight, 1, 0.5, 0.4);
    p->weight = (float *)weight->data;
    if (strcmp(s->family->name, "xd_projection_to_rows"))
        poison_one(s, "special_threshold", POISON_IN | POISON_ONE, &p->threshold);
    p->out = (float *)poison_matrix(s, "rows", POISON_OUT, XD_DTYPE_F32, POISON_FROWS, POISON_FK)->data;
    return true;
}

/* The projection whose weights these are: a struct, so the caller may have filled it himself. */
static inline xd_result poison_projection_of(const poison_scene *s, xd_projection *whole,
                                             xd_projection *poisoned) {
    const poison_files *p = (const poison_files *)s->own;
    XD_TRY(xd_projection_from_rows(s->ctx, &p->rows, POISON_FROWS, POISON_FCOLS, whole));
    CHECK_EQ_INT(whole->entries, POISON_FROWS * POISON_FK);
    *poisoned = *whole;
    poisoned->weight = p->weight;
    poisoned->origin.options = xd_projection_defaults();
    poisoned->origin.options.special_pairs = true;
    poisoned->origin.options.special_threshold = p->threshold;
    return XD_OK;
}

static inline void poison_files_take(poison_files *p, const xd_projection *made) {
    for (int64_t i = 0; i < made->entries && i < POISON_FROWS * POISON_FK; i++) p->out[i] = made->weight[i];
}

static inline xd_result poison_to_rows_call(poison_scene *s) {
    poison_files *p = (poison_files *)s->own;
    xd_projection whole, poisoned;
    xd_projection_rows made;
    XD_TRY(poison_projection_of(s, &whole, &poisoned));
    const xd_result result = xd_projection_to_rows(s->ctx, &poisoned, POISON_FK, &made);
    if (result == XD_OK) {
        memcpy(p->out, made.weights, POISON_FROWS * POISON_FK * sizeof *p->out);
        xd_projection_rows_destroy(s->ctx, &made);
    }
    xd_projection_destroy(s->ctx, &whole);
    return result;
}

/* Saves, and loads again. */
static inline xd_result poison_save_call(poison_scene *s) {
    xd_projection whole, poisoned, made;
    char path[64];
    poison_path(s, path);
    XD_TRY(poison_projection_of(s, &whole, &poisoned));
    xd_result result = xd_projection_save(s->ctx, path, &poisoned);
    if (result == XD_OK) {
        CHECK_EQ_INT(projection_load(s->ctx, path, NULL, &made), XD_OK);
        poison_files_take((poison_files *)s->own, &made);
        xd_projection_destroy(s->ctx, &made);
    }
    CHECK((access(path, F_OK) == 0) == (result == XD_OK)); /* a refused file does not appear */
    remove(path);
    xd_projection_destroy(s->ctx, &whole);
    return result;
}

/* Reads a file into which the numbers were put afterwards. */
static inline xd_result poison_load_call(poison_scene *s) {
    poison_files *p = (poison_files *)s->own;
    unsigned char bytes[POISON_FILE_BYTES];
    xd_projection whole, poisoned, made;
    char path[64];
    poison_path(s, path);
    XD_TRY(poison_projection_of(s, &whole, &poisoned));
    poisoned.weight = whole.weight;
    poisoned.origin.options.special_threshold = 0.3;
    CHECK_EQ_INT(xd_projection_save(s->ctx, path, &poisoned), XD_OK);
    FILE *file = fopen(path, "rb");
    const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
    if (file) fclose(file);
    remove(path);
    const size_t weights = POISON_FROWS * POISON_FK * sizeof(float);
    CHECK(size > weights && size < sizeof bytes);
    memcpy(bytes + 72, &p->threshold, sizeof p->threshold);
    memcpy(bytes + size - weights, p->weight, weights);
    const uint32_t sum = xd_crc32c(0, bytes + 16, size - 16);
    memcpy(bytes + 12, &sum, sizeof sum);
    const xd_result result = projection_load_memory(s->ctx, bytes, size, NULL, &made);
    if (result == XD_OK) {
        poison_files_take(p, &made);
        xd_projection_destroy(s->ctx, &made);
    }
    xd_projection_destroy(s->ctx, &whole);
    return poison_refusal(result);
}

static inline poison_verdict poison_expect_projection(const poison_scene *s, const poison_part *part,
                                                      double value) {
    const bool threshold = part->role & POISON_ONE;
    if (!strcmp(s->family->name, "xd_projection_to_rows")) return POISON_ALONE;
    return value >= 0.0 && value <= (threshold ? 1.0 : 3e38) ? POISON_LEGAL : POISON_REFUSED;
}

static const poison_family poison_family_to_rows = {
    .name = "xd_projection_to_rows",
    .variants = 1,
    .layouts = { true, false, false },
    .build = poison_projection_build,
    .call = poison_to_rows_call,
    .expect = poison_expect_projection,
};
static const poison_family poison_family_projection_save = {
    .name = "xd_projection_save",
    .variants = 1,
    .layouts = { true, false, false },
    .build = poison_projection_build,
    .call = poison_save_call,
    .expect = poison_expect_projection,
};
static const poison_family poison_family_projection_load = {
    .name = "xd_projection_load",
    .variants = 1,
    .layouts = { true, false, false },
    .build = poison_projection_build,
    .call = poison_load_call,
    .expect = poison_expect_projection,
};

/* ---- caches of teachers; variants: at temperature 1, at another ---- */

static inline bool poison_cache_build(poison_scene *s) {
    poison_files *p = poison_files_begin(s);
    const bool append = !strcmp(s->family->name, "xd_teacher_cache_writer_append");
    if (s->variant) p->cache.temperature = 1.5;
    poison_part *logits =
        poison_matrix(s, "logits", append ? POISON_IN : 0, XD_DTYPE_F32, POISON_FROWS, POISON_FCOLS);
    poison_fill(logits, 1, 0.0, 3.0);
    p->logits = poison_rows(logits);
    if (!append) poison_one(s, "temperature", POISON_IN | POISON_ONE, &p->cache.temperature);
    p->probabilities =
        (double *)poison_matrix(s, "probabilities", POISON_OUT, XD_DTYPE_F64, POISON_FROWS, POISON_FK)->data;
    return true;
}

static inline xd_result poison_cache_write(const poison_scene *s, const char *path) {
    const poison_files *p = (const poison_files *)s->own;
    xd_teacher_cache_writer *writer = NULL;
    xd_teacher_cache_block block;
    memset(&block, 0, sizeof block);
    block.logits = p->logits;
    block.ids = p->tokens;
    block.next = p->next;
    XD_TRY(cache_writer_create(s->ctx, path, &p->cache, &writer));
    xd_result result = xd_teacher_cache_writer_document(writer, NULL, 0);
    if (result == XD_OK) result = xd_teacher_cache_writer_append(writer, &block);
    if (result == XD_OK) return xd_teacher_cache_writer_commit(writer);
    xd_teacher_cache_writer_abort(writer);
    return result;
}

static inline xd_result poison_cache_call(poison_scene *s) {
    poison_files *p = (poison_files *)s->own;
    int32_t ids[POISON_FK];
    xd_teacher_cache *cache;
    char path[64];
    poison_path(s, path);
    const xd_result result = poison_cache_write(s, path);
    CHECK((access(path, F_OK) == 0) == (result == XD_OK));
    if (result != XD_OK) return poison_refusal(result);
    CHECK_EQ_INT(cache_open(s->ctx, path, NULL, &cache), XD_OK);
    for (int64_t i = 0; i < POISON_FROWS; i++)
        CHECK_EQ_INT(cache_entries(s->ctx, cache, i, ids, p->probabilities + i * POISON_FK), XD_OK);
    xd_teacher_cache_close(cache);
    remove(path);
    return XD_OK;
}

/* A row may hold -infinity, and numbers of any size: probabilities of 0 and 1. */
static inline poison_verdict poison_expect_cache(const poison_scene *s, const poison_part *part,
                                                 double value) {
    (void)s;
    if (part->role & POISON_ONE) return isfinite(value) && value > 0.0 ? POISON_LEGAL : POISON_REFUSED;
    if (isfinite(value) && value > 1e38) return POISON_LEGAL; /* divided by a temperature, perhaps infinite */
    return isfinite(value) || value < 0.0 ? POISON_FINE : POISON_REFUSED;
}

static const poison_family poison_family_cache_create = {
    .name = "xd_teacher_cache_writer_create",
    .variants = 1,
    .layouts = { true, false, false },
    .build = poison_cache_build,
    .call = poison_cache_call,
    .expect = poison_expect_cache,
};
static const poison_family poison_family_cache_append = {
    .name = "xd_teacher_cache_writer_append",
    .variants = 2,
    .layouts = { true, false, false },
    .build = poison_cache_build,
    .call = poison_cache_call,
    .expect = poison_expect_cache,
};

/* ---- reading: a cache into which log-probabilities were put afterwards ---- */

static inline bool poison_open_build(poison_scene *s) {
    poison_files *p = poison_files_begin(s);
    poison_part *logits = poison_matrix(s, "teacher", 0, XD_DTYPE_F32, POISON_FROWS, POISON_FCOLS);
    poison_part *given = poison_matrix(s, "log-probabilities", POISON_IN, XD_DTYPE_F32, POISON_FROWS, 5);
    poison_fill(logits, 1, 0.0, 3.0);
    p->logits = poison_rows(logits);
    p->weight = (float *)given->data;
    memset(given->data, 0, POISON_FROWS * 5 * sizeof(float)); /* 0: as in the file */
    poison_one(s, "temperature", POISON_IN | POISON_ONE, &p->cache.temperature);
    p->probabilities =
        (double *)poison_matrix(s, "probabilities", POISON_OUT, XD_DTYPE_F64, POISON_FROWS, POISON_FK)->data;
    return true;
}

static inline xd_result poison_open_call(poison_scene *s) {
    poison_files *p = (poison_files *)s->own;
    const size_t position = 2 + 4 + 4 + 2 * POISON_FK + 4 * POISON_FK;
    const double temperature = p->cache.temperature;
    unsigned char bytes[POISON_FILE_BYTES];
    int32_t ids[POISON_FK];
    xd_teacher_cache *cache;
    char path[64];
    poison_path(s, path);
    p->cache.temperature = 1.0;
    CHECK_EQ_INT(poison_cache_write(s, path), XD_OK);
    FILE *file = fopen(path, "rb");
    const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
    if (file) fclose(file);
    remove(path);
    CHECK_EQ_INT((int64_t)size, (int64_t)(160 + POISON_FROWS * position + 24));
    memcpy(bytes + 56, &temperature, sizeof temperature);
    for (size_t r = 0; r < POISON_FROWS; r++)
        for (size_t c = 0; c < 5; c++) {
            unsigned char *at =
                bytes + 160 + r * position + (c < 2 ? 2 + 4 * c : 10 + 2 * POISON_FK + 4 * (c - 2));
            if (p->weight[r * 5 + c] != 0.0f) memcpy(at, &p->weight[r * 5 + c], sizeof(float));
        }
    const uint32_t sum = xd_crc32c(xd_crc32c(0, bytes + 160, size - 160), bytes + 16, 144);
    memcpy(bytes + 12, &sum, sizeof sum);
    const xd_result result = cache_open_memory(s->ctx, bytes, size, NULL, &cache);
    if (result != XD_OK) return poison_refusal(result);
    for (int64_t i = 0; i < POISON_FROWS; i++)
        CHECK_EQ_INT(cache_entries(s->ctx, cache, i, ids, p->probabilities + i * POISON_FK), XD_OK);
    xd_teacher_cache_close(cache);
    return XD_OK;
}

/* Probabilities must add up to 1, so a log-probability of -1 may be refused too. */
static inline poison_verdict poison_expect_open(const poison_scene *s, const poison_part *part,
                                                double value) {
    (void)s;
    if (part->role & POISON_ONE) return isfinite(value) && value > 0.0 ? POISON_LEGAL : POISON_REFUSED;
    return value <= 0.0 ? POISON_LEGAL : POISON_REFUSED;
}

static const poison_family poison_family_cache_open = {
    .name = "xd_teacher_cache_open",
    .variants = 1,
    .layouts = { true, false, false },
    .build = poison_open_build,
    .call = poison_open_call,
    .expect = poison_expect_open,
};

#endif
