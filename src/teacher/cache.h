#ifndef XDI_TEACHER_CACHE_H
#define XDI_TEACHER_CACHE_H

#include "align/align.h"
#include "align/projection_file.h"
#include "loss/vocab.h"

/* A teacher's predictions for a text, in a file, so that the teacher runs once and not in every training run: at each
 * position its k most probable tokens, the probability of all others together (the tail), and the probability of
 * the token that follows in the text. A position is a token of the teacher; its entry is what the teacher
 * predicts to come next. Losses read the file as teachers of the kinds XD_XTOKEN_CACHED and
 * XD_XTOKEN_LIKELIHOOD: the spans of the positions inside a passage of the text are one side of
 * xd_align_bytes; the loss takes their shifted chunk ids and their indices in the file
 * (xd_xtoken_cached.positions). The position before the passage may be included: it predicts the passage's first token.
 *
 * Every number in the file is little-endian:
 *
 *      0  8 bytes   "XDCACHE\n"
 *      8  u32       version, 1
 *     12  u32       CRC-32C of everything after the header and then of the header from byte 16
 *     16  u64       positions N
 *     24  u64       documents
 *     32  u64       vocabulary
 *     40  u64       hash of the student's tokenizer, 0: any
 *     48  u64       hash of the teacher's tokenizer
 *     56  f64       temperature
 *     64  u64       context: maximum number of tokens before a position that the teacher saw; 0: unknown
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
 *                       I bytes [k]   ids, most probable first, the lower id first among equals
 *                       C bytes [k]   their log-probabilities at the temperature
 *                   [documents], each u64 first position, u64 bytes of its text, u32 CRC-32C of it, u32 0
 *
 * and nothing after it. A log-probability l is an unsigned integer c, or an f32:
 *
 *     coding   C   l of the k ids     W   l of tail and next token
 *     0        1   -c / 16            2   -c / 2048
 *     1        2   -c / 2048          2   -c / 2048
 *     2        4   f32                4   f32
 *
 * The largest c, and -infinity, mean probability 0; a smaller positive probability than that of the second largest c
 * (e^-15.875 with 8 bits, e^-31.999 with 16) is stored as that c. The last position of a document has no
 * next token: its log-probability is stored as that of probability 0. With k = 16 and 8 bits a position takes 54 bytes,
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

/* What a cache holds. Zero is the default of every field that is not required. */
typedef struct xd_teacher_cache_desc {
    int64_t vocabulary;    /* required: ids of the teacher, columns of its logits without padding */
    uint64_t teacher_hash; /* xd_tokenizer_info.hash */
    uint64_t student_hash; /* of the student's tokenizer; 0 -> any student */
    double temperature;    /* of the k ids and the tail; 0 -> 1 */
    int64_t k;             /* ids stored per position, at least 1; 16 is a common choice */
    int64_t context;       /* maximum number of tokens before a position that the teacher saw; 0 -> unknown */
    xd_cache_coding coding; /* 0 -> 8 bits */
    bool spans;             /* each token's span is stored too: aligning then needs no tokenizer */
    const char *name;       /* of the teacher, at most 63 bytes; NULL -> "" */
    const xd_vocab *vocab;  /* split of the logits' columns over ranks; NULL -> this rank has all; not
                             * stored */
} xd_teacher_cache_desc;

/* ---- writing ---- */

/* A cache that is being written. */
typedef struct xd_teacher_cache_writer xd_teacher_cache_writer;

/* Consecutive positions of a document, and the teacher's logits at them. */
typedef struct xd_teacher_cache_block {
    xd_rows logits;             /* [n, >= this rank's columns] f32 or bf16, not divided by the temperature */
    const int32_t *ids;         /* [n] the token at each position */
    const int32_t *next;        /* [n] the token after it: next[i] is ids[i + 1]; -1 -> the document ends */
    const xd_token_span *spans; /* [n] bytes of the document's text; required with desc.spans */
} xd_teacher_cache_block;

/* Starts a cache. The file appears under its name when it is complete, at commit, or not at all; rank 0 of the
 * vocabulary's group writes it. Memory: the object. Collective over that group, as the next three calls. Errors, the same
 * on every rank: ARGUMENT for a desc that the file cannot hold, IO, MEMORY. */
XD_API xd_result xd_teacher_cache_writer_create(xd_ctx *ctx, const char *path,
                                                const xd_teacher_cache_desc *desc,
                                                xd_teacher_cache_writer **out);

/* Starts a document: a text that the teacher read separately, from its beginning. Its bytes are not stored, only
 * their number and checksum, by which a reader can check that it has the same text; NULL with 0 is an
 * empty text. A cache has at least one document. */
XD_API xd_result xd_teacher_cache_writer_document(xd_teacher_cache_writer *writer, const void *text,
                                                  size_t bytes);

/* Adds positions to the document, any number at once; the bytes of the file do not depend on how they are divided into
 * calls. Takes [n, k] and [n] memory for the call. Deterministic for a fixed split of the vocabulary; with codings of 8 and
 * 16 bits other splits change at most a few positions. Errors, the same on every rank, and nothing is then
 * added: ARGUMENT for ids outside the vocabulary, a `next` that the ids contradict, spans that go back,
 * leave the text or are longer than 65535; SHAPE, DTYPE; DATA for logits that are NaN or +infinity, or all
 * -infinity; IO, MEMORY. */
XD_API xd_result xd_teacher_cache_writer_append(xd_teacher_cache_writer *writer,
                                                const xd_teacher_cache_block *block);

/* Writes what is left, gives the file its name and frees the writer, whatever the result. Errors, without a file:
 * ARGUMENT when nothing was added or the last document is incomplete (its last `next` is not -1), IO. */
XD_API xd_result xd_teacher_cache_writer_commit(xd_teacher_cache_writer *writer);

/* Discards the file and frees the writer. Local. NULL is fine. */
XD_API void xd_teacher_cache_writer_abort(xd_teacher_cache_writer *writer);

/* ---- reading ---- */

/* An open cache. Immutable; may be shared by threads. */
typedef struct xd_teacher_cache xd_teacher_cache;

/* The contents of its header. */
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
    double next_log_prob; /* at temperature 1; -infinity without a next token */
    double tail;          /* probability; see xd_teacher_cache_entries */
} xd_cached_position;

/* Opens a cache by mapping it into memory (where a system cannot map files, it is read whole).
 *
 *   expected  the tokenizers it is to be used with; only the hashes are compared. NULL -> any
 *
 * A file is hostile input: it is read once from end to end, and every count, id, order and log-probability is checked
 * before the call returns. It must not change while it is open. Local. Errors: IO; FORMAT for what violates the
 * format above; CORRUPT for a wrong checksum; UNSUPPORTED for another version; ARGUMENT for other tokenizers,
 * with all hashes; MEMORY. Close with xd_teacher_cache_close. */
XD_API xd_result xd_teacher_cache_open(xd_ctx *ctx, const char *path, const xd_projection_origin *expected,
                                       xd_teacher_cache **out);

/* The same over bytes in memory, which must outlive the object. */
XD_API xd_result xd_teacher_cache_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                              const xd_projection_origin *expected, xd_teacher_cache **out);

/* Closes the cache, in the context that opened it. NULL is fine. */
XD_API void xd_teacher_cache_close(xd_teacher_cache *cache);

/* The contents of the header. Local. */
XD_API xd_teacher_cache_info xd_teacher_cache_describe(const xd_teacher_cache *cache);

/* Document d of [0, documents). Errors: ARGUMENT. */
XD_API xd_result xd_teacher_cache_find_document(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t d,
                                                xd_cached_document *out);

/* Positions [first, first + count) into out [count]. O(count k). Errors: ARGUMENT for positions out of
 * range. */
XD_API xd_result xd_teacher_cache_read(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t first,
                                       int64_t count, xd_cached_position *out);

/* The k most probable ids of a position, [k], and their probabilities [k] at the cache's temperature. They and
 * the tail sum to 1: they are normalised after decoding. Errors: ARGUMENT for a position out of range. */
XD_API xd_result xd_teacher_cache_entries(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t position,
                                          int32_t *ids, double *probabilities);

#endif
