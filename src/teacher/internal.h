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
    XDI_CACHE_NAME = 96,
    XDI_CACHE_HEADER = 160,
    XDI_CACHE_DOCUMENT = 24, /* bytes of a document's entry */
    XDI_CACHE_SPANS = 1,
    XDI_CACHE_MOST_SPAN = 65535
};

/* Bytes of the parts of a position, and where they begin in it. */
typedef struct xdi_cache_form {
    xd_cache_coding coding;
    int64_t k;
    bool spans;
    int id_bytes, code_bytes, wide_bytes;
    size_t span, next, tail, ids, codes, bytes; /* bytes: of a whole position */
} xdi_cache_form;

XD_PRIVATE xdi_cache_form xdi_cache_form_of(const xd_teacher_cache_desc *desc);

/* Can a file hold this desc, defaults filled in? Errors have the given code. */
XD_PRIVATE xd_result xdi_cache_check_desc(xd_ctx *ctx, const char *path, const xd_teacher_cache_desc *d,
                                          xd_result code);

/* A little-endian integer of 1 to 8 bytes. */
XD_PRIVATE void xdi_cache_put(unsigned char *at, uint64_t value, int bytes);

/* A log-probability of the k ids, or (wide) of tail and next token, as its file has it. */
XD_PRIVATE uint64_t xdi_cache_encode(const xdi_cache_form *form, bool wide, double log_prob);

/* cache.c: the k ids of a position and their probabilities; either may be NULL. */
XD_PRIVATE void xdi_cache_entries(const xd_teacher_cache *c, int64_t position, int32_t *ids,
                                  double *probabilities);

/* cache.c: log-probability of the next token of a position that the cache has. */
XD_PRIVATE double xdi_cache_next(const xd_teacher_cache *cache, int64_t position);

/* cache.c: may these two use the cache? Names both hashes when not. */
XD_PRIVATE xd_result xdi_cache_check_origin(xd_ctx *ctx, const xd_teacher_cache *cache,
                                            const xd_projection_origin *expected);

#endif
