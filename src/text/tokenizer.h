#ifndef XDI_TEXT_TOKENIZER_H
#define XDI_TEXT_TOKENIZER_H

#include "base/context.h"
#include "base/text.h"

/* Text to token ids and back for BPE vocabularies, as the reference implementations do. docs/xtoken.md has the forms
 * of files, and the rules of spans. */

/* A vocabulary with its rules. Immutable; threads may share it. */
typedef struct xd_tokenizer xd_tokenizer;

/* Encodes texts with the buffers of one thread. */
typedef struct xd_encoder xd_encoder;

/* What a rank file lacks: split pattern, normalisation, special tokens. */
typedef enum xd_tokenizer_preset {
    XD_TOKENIZER_PRESET_NONE = 0,
    XD_TOKENIZER_PRESET_GPT2, /* and r50k, p50k */
    XD_TOKENIZER_PRESET_CL100K,
    XD_TOKENIZER_PRESET_O200K,
    XD_TOKENIZER_PRESET_LLAMA3,
    XD_TOKENIZER_PRESET_LLAMA4, /* pattern only: pass the special tokens, BOS included */
    XD_TOKENIZER_PRESET_QWEN
} xd_tokenizer_preset;

/* A caller's special token. */
typedef struct xd_tokenizer_special {
    const char *content; /* UTF-8, not empty */
    int32_t id;
} xd_tokenizer_special;

/* A tokenizer to load: a file, or its bytes. */
typedef struct xd_tokenizer_desc {
    xd_tokenizer_preset preset; /* rank files only */
    /* Rank files only: replaces the preset's; NUL-terminated. Text between matches is a piece (tiktoken drops it). */
    const char *pattern;
    const xd_tokenizer_special *specials; /* [special_count] */
    int64_t special_count;
    size_t max_bytes; /* 0 -> 256 MiB */
    /* Names of the ADDED or SPECIAL tokens that add_special puts around a text. Both NULL -> the file's. */
    const char *bos, *eos;
    const char *path; /* NULL -> data */
    const void *data; /* [data_bytes]; optional with path */
    size_t data_bytes;
} xd_tokenizer_desc;

/* Loads a tokenizer.json, a rank file (with a preset or a pattern), a SentencePiece .model or Tekken JSON. Local.
 * Deterministic. Time and memory are proportional to the file's size and its largest id, at most 2,097,151 (100 MB).
 * Errors: IO, MEMORY, FORMAT (malformed, with the position; a split pattern unsupported or matching an empty text),
 * UNSUPPORTED (a feature, by name), ARGUMENT (desc does not fit the file). */
XD_API xd_result xd_tokenizer_load(xd_ctx *ctx, const xd_tokenizer_desc *desc, xd_tokenizer **out);

/* Destroys a tokenizer, after its encoders. */
XD_API void xd_tokenizer_destroy(xd_tokenizer *tokenizer);

/* Properties of a tokenizer. */
typedef struct xd_tokenizer_info {
    int32_t size;   /* largest id + 1 */
    int32_t tokens; /* ids in use */
    /* of all that decides ids and bytes, not of add_special; caches and projections store it */
    uint64_t hash;
    /* any bytes survive encoding and decoding: each has a token, and nothing changes, drops or strips text */
    bool byte_level;
    bool adds_prefix; /* encoding may add a leading blank, which decoding removes */
    int32_t unknown;  /* id for text without a token, or -1 */
    /* ids around a text, or -1 */
    int32_t bos, eos;
} xd_tokenizer_info;

/* Returns the properties. Local. */
XD_API xd_tokenizer_info xd_tokenizer_describe(const xd_tokenizer *tokenizer);

/* What an id stands for. */
typedef enum xd_token_kind {
    XD_TOKEN_KIND_NONE = 0, /* a gap: no such id */
    XD_TOKEN_KIND_NORMAL,   /* bytes of text */
    XD_TOKEN_KIND_BYTE,     /* one byte, where no other token fits */
    XD_TOKEN_KIND_ADDED,    /* matched before all others */
    XD_TOKEN_KIND_SPECIAL,  /* as ADDED, but only with parse_special */
    XD_TOKEN_KIND_UNKNOWN   /* text without a token; has no bytes */
} xd_token_kind;

/* A vocabulary entry, valid as long as the tokenizer. */
typedef struct xd_token {
    xd_token_kind kind;
    const uint8_t *bytes; /* decoded, or an ADDED or SPECIAL name; not NUL-terminated */
    size_t length;
} xd_token;

/* Returns an id's entry; kind NONE if out of range. O(1). */
XD_API xd_token xd_tokenizer_token(const xd_tokenizer *tokenizer, int32_t id);

/* Returns the NORMAL, else the BYTE token with these bytes, or -1. O(length). */
XD_API int32_t xd_tokenizer_find(const xd_tokenizer *tokenizer, const void *bytes, size_t length);

/* Returns the ADDED or SPECIAL token with this NUL-terminated name, or -1. */
XD_API int32_t xd_tokenizer_find_special(const xd_tokenizer *tokenizer, const char *name);

/* Input and output of xd_tokenizer_decode. */
typedef struct xd_decode_desc {
    const int32_t *ids; /* [count] */
    int64_t count;
    bool skip_special; /* omits SPECIAL tokens; false -> writes their names */
    char *out;         /* [capacity] without a NUL; NULL with capacity 0: only the length */
    size_t capacity;
} xd_decode_desc;

/* Decodes ids to bytes; the result may end inside a character.
 *
 *   length   bytes of the whole result; if they exceed capacity, out has its beginning
 *
 * Local. Errors: DATA (an id is a gap or out of range; with its index), ARGUMENT (count, capacity). */
XD_API xd_result xd_tokenizer_decode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const xd_decode_desc *desc,
                                     size_t *length);

/* ---- encoding ---- */

/* What an encoder encodes. */
typedef struct xd_encoder_desc {
    const xd_tokenizer *tokenizer; /* outlives the encoder */
    /* Allows xd_encode_batch: each thread of the context has one more encoder, 1 MB and the longest text's need. */
    bool batches;
} xd_encoder_desc;

/* Creates an encoder for ctx's thread. Local. With batches threads call the allocator one at a time,
 * under a lock. Errors: MEMORY. */
XD_API xd_result xd_encoder_create(xd_ctx *ctx, const xd_encoder_desc *desc, xd_encoder **out);

/* Destroys an encoder. */
XD_API void xd_encoder_destroy(xd_encoder *encoder);

/* How to encode. */
typedef struct xd_encode_desc {
    bool parse_special; /* SPECIAL names in the text become tokens: not for untrusted text */
    bool skip_spans;
    /* tokenizer.json: adds the post-processor's tokens; other files: BOS if defined, no EOS (as Llama and Mistral) */
    bool add_special;
    bool pieces; /* spans that no token crosses; ids -1 */
} xd_encode_desc;

/* The tokens of a text, until the encoder's next call. Spans never go back. */
typedef struct xd_encoding {
    int64_t count;
    const int32_t *ids;         /* [count] */
    const xd_token_span *spans; /* [count], bytes of the text before normalisation; NULL when skipped */
    const uint8_t *roles;       /* [count] xd_token_role; NULL without add_special */
} xd_encoding;

/* Encodes a text. Local. O(bytes log bytes). Allocates for texts longer than before.
 *
 *   text   UTF-8, not NUL-terminated; other bytes are characters of no class
 *   desc   NULL -> defaults
 *
 * Errors: ARGUMENT (1 GiB or more), UNSUPPORTED (add_special: an unknown post-processor, by name, or no BOS of the
 * preset), DATA (a split pattern takes too many steps), MEMORY. */
XD_API xd_result xd_encode(xd_encoder *encoder, const char *text, size_t bytes, const xd_encode_desc *desc,
                           xd_encoding *out);

/* ---- many texts ---- */

/* The tokens of texts, until the encoder's next xd_encode_batch. Text i has tokens [offset[i], offset[i + 1]). */
typedef struct xd_encoding_batch {
    int64_t count;              /* texts */
    const int64_t *offset;      /* [count + 1] */
    const int32_t *ids;         /* [offset[count]] */
    const xd_token_span *spans; /* [offset[count]]; NULL when skipped */
    const uint8_t *roles;       /* [offset[count]] xd_token_role; NULL without add_special */
} xd_encoding_batch;

/* Encodes texts as xd_encode, on the context's threads; their number changes no token.
 *
 *   desc   NULL -> defaults
 *
 * Local. Allocates when texts are more or longer than before. Errors: those of xd_encode, with the first failing
 * text's index; ARGUMENT (negative count or size; an encoder without batches). */
XD_API xd_result xd_encode_batch(xd_encoder *encoder, const xd_texts *texts, const xd_encode_desc *desc,
                                 xd_encoding_batch *out);

#endif
