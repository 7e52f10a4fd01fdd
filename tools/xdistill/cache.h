/* cache.h - what a teacher says about a text, in files: written once, by all ranks, and read by every run. */
#ifndef CACHE_H
#define CACHE_H

#include "lm.h"
#include "text.h"

/* Contexts of a part, unless a plan has another number. */
enum { CACHE_PART = 8 };

/* A cache is a folder of parts, NNNN.xdcache, each complete: an interrupted run writes those that are missing. */
typedef struct cache_plan {
    const lm *teacher; /* with weights where parts are missing */
    const tokens *text;
    const char *folder;
    int64_t k, draws;   /* likeliest tokens of a position, and draws of the others */
    double temperature; /* of their probabilities */
    int ranks;
    int contexts;  /* of a part; 0 -> CACHE_PART */
    uint64_t seed; /* of the draws, at least 1 */
} cache_plan;

/* Parts of the plan, and how many of them are not there yet. Errors: DATA (a part of another teacher, text or k, by its name). */
xd_result cache_missing(xd_ctx *ctx, const cache_plan *plan, int64_t *parts, int64_t *missing);

/* Removes parts that are of something else. */
void cache_forget_others(xd_ctx *ctx, const cache_plan *plan);

/* Writes the parts that are missing. */
xd_result cache_write(xd_ctx *ctx, const cache_plan *plan);

/* Tokens that the teacher reads for it, and memory beside its weights, in bytes. */
int64_t cache_tokens_read(const cache_plan *plan);
int64_t cache_bytes(const cache_plan *plan);

/* All parts, open. */
typedef struct cached {
    xd_teacher_cache **parts;
    int64_t part_count, part_tokens;
    int64_t entries; /* of a position */
    bool drawn;      /* entries are all of it; else there is a tail */
    size_t bytes;    /* of the files */
} cached;

xd_result cached_open(xd_ctx *ctx, const cache_plan *plan, cached *out);
void cached_close(xd_ctx *ctx, cached *c);

/* What the teacher says behind tokens [first, first + count) of the text: ids and probabilities [count, entries]. Threads may share the
 * cache. */
xd_result cached_read(xd_ctx *ctx, const cached *c, int64_t first, int64_t count, int32_t *ids,
                      double *probabilities);

#endif /* CACHE_H */
