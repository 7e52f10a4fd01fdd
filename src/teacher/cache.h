#ifndef XDI_TEACHER_CACHE_H
#define XDI_TEACHER_CACHE_H

#include "align/align.h"
#include "align/projection_file.h"
#include "loss/vocab.h"

/* A file of a teacher's predictions for texts: docs/routes.md. A position is a token of the teacher; its entry predicts
 * the next one. */

/* How log-probabilities of k ids are stored. */
typedef enum xd_cache_coding {
    XD_CACHE_8_BITS = 0, /* to 1/32 nat */
    XD_CACHE_16_BITS,    /* to 1/4096 nat */
    XD_CACHE_F32
} xd_cache_coding;

enum {
    XD_CACHE_MAX_K = 1024,
    XD_CACHE_NAME_BYTES = 64 /* with the final zero */
};

/* The contents of a cache. */
typedef struct xd_teacher_cache_desc {
    int64_t vocabulary;    /* required; without padding */
    uint64_t teacher_hash; /* xd_tokenizer_info.hash */
    uint64_t student_hash; /* 0 -> any student */
    double temperature;    /* of the k ids and the tail; 0 -> 1 */
    int64_t k;             /* per position, at least 1 */
    int64_t context;       /* maximum tokens seen before a position; 0 -> unknown */
    xd_cache_coding coding;
    bool spans;            /* to align without a tokenizer */
    const char *name;      /* at most 63 bytes; NULL -> "" */
    const xd_vocab *vocab; /* split of logits, not stored; NULL -> not split */
    const char *path;      /* to write, on every rank; NULL in a header that was read */
    int64_t draws;         /* of other ids, unbiased: docs/routes.md; 0 -> none */
    uint64_t seed;         /* of the draws */
} xd_teacher_cache_desc;

/* ---- writing ---- */

/* Writes a cache. */
typedef struct xd_teacher_cache_writer xd_teacher_cache_writer;

/* Consecutive positions of a document. */
typedef struct xd_teacher_cache_block {
    xd_rows logits;             /* [n, >= this rank's columns] f32 or bf16, before the temperature */
    const int32_t *ids;         /* [n] */
    const int32_t *next;        /* [n] ids[i + 1]; -1 -> the document ends */
    const xd_token_span *spans; /* [n] in the document's text; required with desc.spans */
} xd_teacher_cache_block;

/* Creates a writer. Collective over the vocabulary's group, as are the next three calls. Rank 0 of the group writes
 * the file. Errors: ARGUMENT, UNSUPPORTED (a context on a GPU), IO, MEMORY. */
XD_API xd_result xd_teacher_cache_writer_create(xd_ctx *ctx, const xd_teacher_cache_desc *desc,
                                                xd_teacher_cache_writer **out);

/* Starts a document; stores its size and checksum. NULL with 0 is an empty text. A cache has at least one document.
 * Errors: ARGUMENT (the last document is not complete), MEMORY. */
XD_API xd_result xd_teacher_cache_writer_document(xd_teacher_cache_writer *writer, const void *text,
                                                  size_t bytes);

/* Appends positions to the document; their division into calls changes no byte. Takes [n, k] memory for the call.
 * Deterministic for a fixed split.
 * Errors, nothing appended: ARGUMENT (ids; `next` contradicts ids; spans go back, leave the text or exceed 65535
 * bytes), SHAPE, DTYPE, DATA (logits NaN or +infinity, or all -infinity), IO, MEMORY. */
XD_API xd_result xd_teacher_cache_writer_append(xd_teacher_cache_writer *writer,
                                                const xd_teacher_cache_block *block);

/* Completes the file, which then appears under its name, and frees the writer in every case. Errors, without a file:
 * ARGUMENT (nothing appended; the last `next` is not -1), IO. */
XD_API xd_result xd_teacher_cache_writer_commit(xd_teacher_cache_writer *writer);

/* Discards the file and frees the writer. Local. NULL is fine. */
XD_API void xd_teacher_cache_writer_abort(xd_teacher_cache_writer *writer);

/* ---- reading ---- */

/* An open cache. Immutable; threads may share it. */
typedef struct xd_teacher_cache xd_teacher_cache;

/* Its header. */
typedef struct xd_teacher_cache_info {
    xd_teacher_cache_desc desc; /* vocab is NULL; name lives as long as the cache */
    int64_t positions, documents;
    int64_t text_bytes;
    size_t bytes; /* of the file */
    uint32_t checksum;
} xd_teacher_cache_info;

/* A document: positions [first, first + count). */
typedef struct xd_cached_document {
    int64_t first, count;
    int64_t text_bytes;
    uint32_t text_checksum; /* xd_crc32c(0, text, text_bytes) */
} xd_cached_document;

/* A position without its k ids. */
typedef struct xd_cached_position {
    int32_t id, next;     /* next is -1 at a document's end */
    xd_token_span span;   /* zero without spans */
    double next_log_prob; /* at temperature 1; -infinity at the end */
    double tail;          /* probability of all but the k ids */
} xd_cached_position;

/* A file, or its bytes. */
typedef struct xd_teacher_cache_open_desc {
    const char *path; /* NULL -> data */
    const void *data; /* [data_bytes] must outlive the object; optional with path */
    size_t data_bytes;
    const xd_projection_origin *expected; /* only the hashes are compared; NULL -> any */
} xd_teacher_cache_open_desc;

/* Opens a cache: maps it into memory if possible, or reads it. Checks every number of the file, which must not change
 * while open. Local. Errors: IO, FORMAT, CORRUPT (checksum), UNSUPPORTED (version), ARGUMENT (tokenizers), MEMORY. */
XD_API xd_result xd_teacher_cache_open(xd_ctx *ctx, const xd_teacher_cache_open_desc *desc,
                                       xd_teacher_cache **out);

/* Closes the cache, on the thread of its context. */
XD_API void xd_teacher_cache_close(xd_teacher_cache *cache);

/* Returns the header. Local. */
XD_API xd_teacher_cache_info xd_teacher_cache_describe(const xd_teacher_cache *cache);

/* Returns document d of [0, documents). Errors: ARGUMENT. */
XD_API xd_result xd_teacher_cache_find_document(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t d,
                                                xd_cached_document *out);

/* What to read. */
typedef struct xd_teacher_cache_read_desc {
    int64_t first, count;
    xd_cached_position *positions; /* [count]; NULL -> none */
    int32_t *ids;                  /* [count, k + draws]; NULL -> none */
    /* [count, k + draws] at the cache's temperature, sum 1 with the tail or with draws, which repeat as 0; NULL -> none */
    double *probabilities;
} xd_teacher_cache_read_desc;

/* Reads positions. O(count k). Local. Errors: ARGUMENT (range). */
XD_API xd_result xd_teacher_cache_read(xd_ctx *ctx, const xd_teacher_cache *cache,
                                       const xd_teacher_cache_read_desc *desc);

#endif
