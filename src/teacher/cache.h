#ifndef XDI_TEACHER_CACHE_H
#define XDI_TEACHER_CACHE_H

#include "align/align.h"
#include "align/projection_file.h"
#include "loss/vocab.h"

/* What a teacher said about a text, in a file, so that it runs once and not in every training run: at each
 * position its k likeliest tokens, the probability of all others together (the tail), and the probability of
 * the token that follows in the text. A position is a token of the teacher; at it stands what the teacher
 * predicts to come next. Losses read the file as teachers of the kinds XD_XTOKEN_CACHED and
 * XD_XTOKEN_LIKELIHOOD: spans of the positions that lie in a piece of the text are one side of
 * xd_align_bytes, and the shifted chunk ids of those positions go to the loss with their numbers, as
 * cache_positions. The position before the piece may go along: it predicts the piece's first token.
 *
 * Every number in the file is little-endian:
 *
 *      0  8 bytes   "XDCACHE\n"
 *      8  u32       version, 1
 *     12  u32       CRC-32C of everything behind the header and then of the header from byte 16
 *     16  u64       positions N
 *     24  u64       documents
 *     32  u64       vocabulary
 *     40  u64       hash of the student's tokenizer, 0: any
 *     48  u64       hash of the teacher's tokenizer
 *     56  f64       temperature
 *     64  u64       context: the most tokens before a position that the teacher saw; 0: not said
 *     72  u32       k
 *     76  u32       coding: 0, 1 or 2
 *     80  u32       1: positions have spans
 *     84  12 bytes  0
 *     96  64 bytes  name of the teacher, padded with zeros
 *    160            [N] positions, each
 *                       I bytes       id of the token (I is 2 for a vocabulary of at most 65536, else 4)
 *                       u32, u16      with spans: its first byte in the document's text, and its length
 *                       W bytes       log-probability of the next token at temperature 1
 *                       W bytes       log-probability of the tail at the temperature
 *                       I bytes [k]   ids, likeliest first, the lower id first among equals
 *                       C bytes [k]   their log-probabilities at the temperature
 *                   [documents], each u64 first position, u64 bytes of its text, u32 CRC-32C of it, u32 0
 *
 * and nothing behind it. A log-probability l is an unsigned integer c, or an f32:
 *
 *     coding   C   l of the k ids     W   l of tail and next token
 *     0        1   -c / 16            2   -c / 2048
 *     1        2   -c / 2048          2   -c / 2048
 *     2        4   f32                4   f32
 *
 * The largest c, and -infinity, stand for probability 0; what is less likely than the second largest
 * (e^-15.875 of 8 bits, e^-31.999 of 16) is stored as that. A position of the last token of a document has no
 * next token: its log-probability is that of probability 0. At k = 16 and 8 bits a position takes 54 bytes,
 * 60 with spans. */

/* How log-probabilities of the k ids are stored. */
typedef enum xd_cache_coding {
    XD_CACHE_8_BITS = 0, /* to 1/32 nat, which is 3 % of a probability */
    XD_CACHE_16_BITS,    /* to 1/4096 nat */
    XD_CACHE_F32
} xd_cache_coding;

enum {
    XD_CACHE_MOST_K = 1024,
    XD_CACHE_NAME_BYTES = 64 /* of a teacher's name, with the zero at its end */
};

/* What a cache is of. Zero is the default of every field that is not required. */
typedef struct xd_teacher_cache_desc {
    int64_t vocabulary;     /* required: ids of the teacher, columns of its logits without padding */
    uint64_t teacher_hash;  /* xd_tokenizer_info.hash */
    uint64_t student_hash;  /* 0 -> for any student */
    double temperature;     /* of the k ids and the tail; 0 -> 1 */
    int64_t k;              /* ids kept a position, at least 1; 16 is a common choice */
    int64_t context;        /* the most tokens before a position that the teacher saw; 0 -> not said */
    xd_cache_coding coding; /* 0 -> 8 bits */
    bool spans;             /* each token's bytes are stored too: aligning then needs no tokenizer */
    const char *name;       /* of the teacher, at most 63 bytes; NULL -> "" */
    const xd_vocab *vocab;  /* the cut of the logits' columns over ranks; NULL -> all are here; not stored */
} xd_teacher_cache_desc;

/* ---- writing ---- */

/* A cache on its way to its name. */
typedef struct xd_teacher_cache_writer xd_teacher_cache_writer;

/* Positions that follow each other in a document, and the teacher's logits at them. */
typedef struct xd_teacher_cache_block {
    xd_rows logits;             /* [n, >= this rank's columns] f32 or bf16, not divided by the temperature */
    const int32_t *ids;         /* [n] the token at each position */
    const int32_t *next;        /* [n] the token after it: next[i] is ids[i + 1]; -1 -> the document ends */
    const xd_token_span *spans; /* [n] bytes of the document's text; required with desc.spans */
} xd_teacher_cache_block;

/* Starts a cache. The file appears under its name whole, at finish, or not at all; rank 0 of the vocabulary's
 * group writes it. Memory: the object. Collective over that group, as the three calls below. Errors, the same
 * on every rank: ARGUMENT for a desc that the file cannot hold, IO, MEMORY. */
XD_API xd_result xd_teacher_cache_writer_create(xd_ctx *ctx, const char *path,
                                                const xd_teacher_cache_desc *desc,
                                                xd_teacher_cache_writer **out);

/* Starts a document: a text that the teacher read from its beginning on its own. Its bytes are not stored,
 * but their number and checksum, by which a reader finds out whether he has the same text; NULL with 0 is an
 * empty one. A cache has at least one document. */
XD_API xd_result xd_teacher_cache_writer_document(xd_teacher_cache_writer *writer, const void *text,
                                                  size_t bytes);

/* Adds positions to the document, any number at once; the bytes of the file do not depend on how it is cut.
 * Takes [n, k] and [n] memory for the call. Deterministic for a fixed cut of the vocabulary; codings of 8 and
 * 16 bits give the same file for nearly every position and cut. Errors, the same on every rank, nothing is
 * then added: ARGUMENT for ids outside the vocabulary, a `next` that the ids contradict, spans that go back,
 * leave the text or are longer than 65535; SHAPE, DTYPE; DATA for logits that are NaN or +infinity, or all
 * -infinity; IO, MEMORY. */
XD_API xd_result xd_teacher_cache_writer_append(xd_teacher_cache_writer *writer,
                                                const xd_teacher_cache_block *block);

/* Writes what is left, gives the file its name and frees the writer, whatever the result. Errors: ARGUMENT
 * when nothing was added or the last document is cut off (its last `next` is not -1), IO; there is then no
 * file. */
XD_API xd_result xd_teacher_cache_writer_commit(xd_teacher_cache_writer *writer);

/* Gives up: no file, the writer is freed. Local. NULL is fine. */
XD_API void xd_teacher_cache_writer_abort(xd_teacher_cache_writer *writer);

/* ---- reading ---- */

/* An open cache. Immutable; may be shared by threads. */
typedef struct xd_teacher_cache xd_teacher_cache;

/* Everything its header says. */
typedef struct xd_teacher_cache_info {
    xd_teacher_cache_desc desc; /* vocab is NULL; name lives as long as the cache */
    int64_t positions, documents;
    int64_t text_bytes; /* of all documents */
    size_t bytes;       /* of the file */
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
    int32_t id, next;     /* next is -1 at the end of a document */
    xd_token_span span;   /* zero when the cache has none */
    double next_log_prob; /* at temperature 1; -infinity without next token */
    double tail;          /* probability; see xd_teacher_cache_entries */
} xd_cached_position;

/* Opens a cache by mapping it (a system without maps reads it whole).
 *
 *   expected  the tokenizers it is to be used with; only the hashes are looked at. NULL -> any
 *
 * A file is hostile input: it is read through once, and every count, id, order and log-probability is checked
 * before the call returns. It must not change while it is open. Local. Errors: IO; FORMAT for what breaks the
 * form above; CORRUPT for a wrong checksum; UNSUPPORTED for another version; ARGUMENT for other tokenizers,
 * with all hashes; MEMORY. Close with xd_teacher_cache_close. */
XD_API xd_result xd_teacher_cache_open(xd_ctx *ctx, const char *path, const xd_projection_origin *expected,
                                       xd_teacher_cache **out);

/* The same over bytes in memory, which must stay as long as the object. */
XD_API xd_result xd_teacher_cache_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                              const xd_projection_origin *expected, xd_teacher_cache **out);

/* Closes the cache, in the context that opened it. NULL is fine. */
XD_API void xd_teacher_cache_close(xd_teacher_cache *cache);

/* Local. */
XD_API xd_teacher_cache_info xd_teacher_cache_describe(const xd_teacher_cache *cache);

/* Document d of [0, documents). Errors: ARGUMENT. */
XD_API xd_result xd_teacher_cache_find_document(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t d,
                                                xd_cached_document *out);

/* Positions [first, first + count) into out [count]. O(count k). Errors: ARGUMENT for positions it does not
 * have. */
XD_API xd_result xd_teacher_cache_read(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t first,
                                       int64_t count, xd_cached_position *out);

/* The k likeliest ids of a position, [k], and their probabilities [k] at the cache's temperature. They and
 * the tail sum to 1: what rounding has left is divided out. Errors: ARGUMENT for a position out of range. */
XD_API xd_result xd_teacher_cache_entries(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t position,
                                          int32_t *ids, double *probabilities);

#endif
