#ifndef XDI_TEACHER_INTERNAL_H
#define XDI_TEACHER_INTERNAL_H

#include "loss/internal.h"
#include "teacher/cache.h"

#define XDI_CACHE_MAGIC "XDCACHE\n"
/* Tolerance for the sum of probabilities stored in 8 bits: the rounding error and a small margin. */
#define XDI_CACHE_SLACK 0.05

enum {
    XDI_CACHE_VERSION = 1,
    XDI_CACHE_CHECKED = 16, /* the header's part of the checksum begins here */
    XDI_CACHE_DRAWS = 84,   /* u32, then u64 seed */
    XDI_CACHE_NAME = 96,
    XDI_CACHE_HEADER = 160,
    XDI_CACHE_DOCUMENT = 24, /* bytes of a document's entry */
    XDI_CACHE_SPANS = 1,
    XDI_CACHE_MOST_SPAN = 65535
};

/* Bytes of the parts of a position, and where they begin in it. */
typedef struct xdi_cache_form {
    xd_cache_coding coding;
    int64_t k, draws;
    bool spans;
    int id_bytes, code_bytes, wide_bytes;
    size_t span, next, tail, ids, codes, drawn, bytes; /* bytes: of a whole position */
} xdi_cache_form;

XD_PRIVATE xdi_cache_form xdi_cache_form_of(const xd_teacher_cache_desc *desc);

/* Can a file hold this desc, defaults filled in? Errors have the given code. */
XD_PRIVATE xd_result xdi_cache_check_desc(xd_ctx *ctx, const char *path, const xd_teacher_cache_desc *d,
                                          xd_result code);

/* A little-endian integer of 1 to 8 bytes. */
XD_PRIVATE void xdi_cache_put(unsigned char *at, uint64_t value, int bytes);

/* A log-probability of the k ids, or (wide) of tail and next token, as its file has it. */
XD_PRIVATE uint64_t xdi_cache_encode(const xdi_cache_form *form, bool wide, double log_prob);

/* cache.c: the k ids of a position, then the drawn ones, and their probabilities; either may be NULL. */
XD_PRIVATE void xdi_cache_entries(const xd_teacher_cache *c, int64_t position, int32_t *ids,
                                  double *probabilities);

/* Rows of a block whose other ids are drawn. */
typedef struct xdi_cache_draws {
    const xd_vocab *vocab;
    const xd_rows *logits;
    const double *lse;       /* [n] at the temperature */
    const double *last;      /* [n, k] the k largest logits, and */
    const int64_t *last_ids; /* [n, k] their ids: others come after the last of them */
    double temperature;
    int64_t k, count; /* count: draws of a row */
    xd_philox random; /* one number a position */
    int64_t first;    /* position of row 0 in the file */
    uint64_t *blocks; /* [n, xdi_cache_blocks] mass of this shard's columns, in units of 2^-56 */
    uint64_t *masses; /* [ranks, n] */
    int64_t *counts;  /* [ranks] */
    int64_t *drawn;   /* out: [n, count] ids, rising */
} xdi_cache_draws;

/* cache_draw.c: blocks of a number of columns. */
XD_PRIVATE int64_t xdi_cache_blocks(int64_t columns);

/* cache_draw.c: is an id none of the k? */
XD_PRIVATE bool xdi_cache_is_other(const double *last, const int64_t *last_ids, int64_t k, double z,
                                   int64_t id);

/* cache_draw.c: adds a probability to the block of a column. */
XD_PRIVATE void xdi_cache_add_block(uint64_t *blocks, int64_t column, double probability);

/* cache_draw.c: draws, from blocks that are complete. Collective over the vocabulary's group. */
XD_PRIVATE xd_result xdi_cache_draw(const xdi_cache_draws *d);

/* cache.c: log-probability of the next token of a position that the cache has. */
XD_PRIVATE double xdi_cache_next(const xd_teacher_cache *cache, int64_t position);

/* cache.c: may these two use the cache? Names both hashes when not. */
XD_PRIVATE xd_result xdi_cache_check_origin(xd_ctx *ctx, const xd_teacher_cache *cache,
                                            const xd_projection_origin *expected);

#endif
