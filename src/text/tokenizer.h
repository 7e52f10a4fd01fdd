#ifndef XDI_TEXT_TOKENIZER_H
#define XDI_TEXT_TOKENIZER_H

#include "base/context.h"
#include "base/text.h"

/* Text to token ids and back, for BPE vocabularies: tokenizer.json (Hugging Face), rank files (tiktoken), SentencePiece models
 * and Tekken. Ids and token boundaries are those of the reference implementations. XDISTILL_NO_ACROSS leaves this out.
 *
 *     XD_TRY(xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = "tokenizer.json" }, &tokenizer));
 *     XD_TRY(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder));
 *     XD_TRY(xd_encode(encoder, text, strlen(text), NULL, &e)); // e.ids[0 .. e.count), e.spans */

/* A vocabulary with its rules. Immutable; threads may share it. */
typedef struct xd_tokenizer xd_tokenizer;

/* The buffers of one thread. */
typedef struct xd_encoder xd_encoder;

/* The split pattern, normalisation and special tokens that a rank file lacks. */
typedef enum xd_tokenizer_preset {
    XD_TOKENIZER_PRESET_NONE = 0,
    XD_TOKENIZER_PRESET_GPT2, /* and r50k, p50k */
    XD_TOKENIZER_PRESET_CL100K,
    XD_TOKENIZER_PRESET_O200K,
    XD_TOKENIZER_PRESET_LLAMA3,
    XD_TOKENIZER_PRESET_LLAMA4, /* pattern only: pass the special tokens, BOS included */
    XD_TOKENIZER_PRESET_QWEN
} xd_tokenizer_preset;

/* A special token of the caller. */
typedef struct xd_tokenizer_special {
    const char *content; /* UTF-8, not empty */
    int32_t id;
} xd_tokenizer_special;

/* How to load a tokenizer: from a file, or from its bytes. */
typedef struct xd_tokenizer_desc {
    xd_tokenizer_preset preset; /* rank files only */
    /* Rank files only: overrides the preset's; NUL-terminated. Text between matches is a piece too (tiktoken drops it). */
    const char *pattern;
    const xd_tokenizer_special *specials; /* [special_count] more special tokens */
    int64_t special_count;
    size_t max_bytes; /* of the file; 0 -> 256 MiB */
    /* ADDED or SPECIAL tokens that add_special puts around a text. Both NULL -> what the file defines. */
    const char *bos, *eos;
    const char *path; /* NULL -> data */
    const void *data; /* [data_bytes] the file's bytes, not used after the call; optional with path */
    size_t data_bytes;
} xd_tokenizer_desc;

/* Loads a tokenizer file of any form. Local. Deterministic.
 *
 *   tokenizer.json  BPE; normalizers NFC, NFKC, Prepend, Replace, Sequence; pre-tokenizers Split, ByteLevel,
 *                   Digits, Metaspace, Sequence; post-processors TemplateProcessing ("single"), BertProcessing,
 *                   RobertaProcessing, ByteLevel, Sequence; with others xd_encode refuses add_special
 *   rank file       one "base64 rank" a line; needs a preset or a pattern
 *   .model          SentencePiece BPE with the identity normaliser
 *   Tekken JSON
 *
 * Time and memory are proportional to the file's size and its largest id, at most 2,097,151 (100 MB).
 * Errors: IO, MEMORY, FORMAT (malformed, with the position; a split pattern unsupported or matching an empty text), UNSUPPORTED
 * (a feature, with its name: Unigram, WordPiece, ...), ARGUMENT (desc does not fit the file). */
XD_API xd_result xd_tokenizer_load(xd_ctx *ctx, const xd_tokenizer_desc *desc, xd_tokenizer **out);

/* Destroys a tokenizer, after its encoders. NULL is fine. */
XD_API void xd_tokenizer_destroy(xd_tokenizer *tokenizer);

/* Properties of a tokenizer. */
typedef struct xd_tokenizer_info {
    int32_t size;   /* largest id + 1 */
    int32_t tokens; /* ids in use */
    uint64_t hash;  /* of what decides ids and bytes, not of add_special; names caches and projections */
    /* any bytes survive encoding and decoding: each has a token, and no normaliser, dropped separator or stripped blank
     * changes the text */
    bool byte_level;
    bool adds_prefix; /* encoding may add a blank before a text, which decoding removes */
    int32_t unknown;  /* id for text without a token, or -1 */
    /* Ids around a text, or -1. tokenizer.json: first and last of add_special. SentencePiece: the trainer's control tokens.
     * Tekken: <s>, </s>. Presets: Llama's <|begin_of_text|>, <|end_of_text|>; others none, <|endoftext|>. */
    int32_t bos, eos;
} xd_tokenizer_info;

/* Returns the properties of a tokenizer. Local. */
XD_API xd_tokenizer_info xd_tokenizer_describe(const xd_tokenizer *tokenizer);

/* What an id stands for. */
typedef enum xd_token_kind {
    XD_TOKEN_KIND_NONE = 0, /* a gap: no such id */
    XD_TOKEN_KIND_NORMAL,   /* bytes of text */
    XD_TOKEN_KIND_BYTE,     /* one byte, where no other token fits */
    XD_TOKEN_KIND_ADDED,    /* matched before all others */
    XD_TOKEN_KIND_SPECIAL,  /* as ADDED, with xd_encode_desc.parse_special only */
    XD_TOKEN_KIND_UNKNOWN   /* text without a token; has no bytes */
} xd_token_kind;

/* One entry of the vocabulary; valid as long as the tokenizer. */
typedef struct xd_token {
    xd_token_kind kind;
    const uint8_t *bytes; /* decoded bytes, or an ADDED or SPECIAL name; not NUL-terminated */
    size_t length;        /* of bytes */
} xd_token;

/* Returns the entry of an id; kind NONE if out of range. O(1). */
XD_API xd_token xd_tokenizer_token(const xd_tokenizer *tokenizer, int32_t id);

/* Returns the NORMAL, else the BYTE token with these bytes, or -1. O(length). */
XD_API int32_t xd_tokenizer_find(const xd_tokenizer *tokenizer, const void *bytes, size_t length);

/* Returns the ADDED or SPECIAL token with this NUL-terminated name, or -1. */
XD_API int32_t xd_tokenizer_find_special(const xd_tokenizer *tokenizer, const char *name);

/* Input and output of xd_tokenizer_decode. */
typedef struct xd_decode_desc {
    const int32_t *ids; /* [count] */
    int64_t count;
    bool skip_special; /* leave SPECIAL tokens out; else their names */
    char *out;         /* [capacity] without a NUL; NULL with capacity 0: only the length */
    size_t capacity;
} xd_decode_desc;

/* Decodes ids to bytes; the result may end inside a character.
 *
 *   length   bytes of the whole result; if more than capacity, desc->out has its beginning
 *
 * Local. Errors: DATA (an id is a gap or out of range; with its index), ARGUMENT (negative count; capacity without out). */
XD_API xd_result xd_tokenizer_decode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const xd_decode_desc *desc,
                                     size_t *length);

/* ---- encoding ---- */

/* What an encoder encodes. */
typedef struct xd_encoder_desc {
    const xd_tokenizer *tokenizer; /* required; must outlive the encoder */
    /* Also for xd_encode_batch: one more encoder for each thread of the context, 1 MB and the longest text's need each. */
    bool batches;
} xd_encoder_desc;

/* Creates an encoder for ctx's thread. Local. With batches threads call the allocator one at a time. Errors: MEMORY. */
XD_API xd_result xd_encoder_create(xd_ctx *ctx, const xd_encoder_desc *desc, xd_encoder **out);

/* Destroys an encoder. NULL is fine. */
XD_API void xd_encoder_destroy(xd_encoder *encoder);

/* How to encode. */
typedef struct xd_encode_desc {
    bool parse_special; /* SPECIAL names in the text become tokens: not for untrusted text */
    bool skip_spans;    /* no spans */
    /* adds the tokens around a text: the post-processor's; for other forms BOS if defined, and no EOS (as Llama and
     * Mistral) */
    bool add_special;
} xd_encode_desc;

/* The tokens of a text, until the encoder's next call. Spans never go back. They have no gap or overlap, except:
 * - The tokens of a character that normalisation changed all have its bytes.
 * - Inserted tokens have an empty span.
 * - Text without a token, or removed by a normaliser or a Split, is in no span.
 * A token's span includes the blanks at its ends, whatever the file's trim_offsets. */
typedef struct xd_encoding {
    int64_t count;
    const int32_t *ids;         /* [count] */
    const xd_token_span *spans; /* [count], bytes of the text before normalisation; NULL when skipped */
    const uint8_t *roles;       /* [count] xd_token_role, for xd_align_side; NULL without add_special */
} xd_encoding;

/* Encodes a text. Local. Time is O(bytes log bytes). Allocates when a text is longer than all before it.
 *
 *   text   UTF-8, not NUL-terminated; other bytes are characters of no class
 *   desc   NULL -> defaults
 *
 * add_special adds tokens even to an empty text or one with their names. Their spans are [0, 0) and [bytes, bytes). Their role
 * is BOS (first before the text), EOS (last after it) or SPECIAL. Other tokens have TEXT. skip_special drops them if the file
 * calls them special.
 * Errors: ARGUMENT (1 GiB or more), UNSUPPORTED (add_special: an unknown post-processor, with its name, or no BOS of the
 * preset), DATA (a split pattern takes too many steps), MEMORY. */
XD_API xd_result xd_encode(xd_encoder *encoder, const char *text, size_t bytes, const xd_encode_desc *desc,
                           xd_encoding *out);

/* ---- many texts ---- */

/* The tokens of texts, until the encoder's next xd_encode_batch. Text i has [offset[i], offset[i + 1]). */
typedef struct xd_encoding_batch {
    int64_t count;              /* texts */
    const int64_t *offset;      /* [count + 1] */
    const int32_t *ids;         /* [offset[count]] */
    const xd_token_span *spans; /* [offset[count]]; NULL when skipped */
    const uint8_t *roles;       /* [offset[count]] xd_token_role; NULL without add_special */
} xd_encoding_batch;

/* Encodes texts as xd_encode, on the context's threads, with the same tokens for any number of them.
 *
 *   desc   NULL -> defaults
 *
 * Local. Allocates when texts are more or longer than before. Errors: those of xd_encode, with the first failing text's index,
 * without a result; ARGUMENT (negative count or size; an
 * encoder without batches). */
XD_API xd_result xd_encode_batch(xd_encoder *encoder, const xd_texts *texts, const xd_encode_desc *desc,
                                 xd_encoding_batch *out);

#endif
