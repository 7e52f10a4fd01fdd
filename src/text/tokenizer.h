#ifndef XDI_TEXT_TOKENIZER_H
#define XDI_TEXT_TOKENIZER_H

#include "base/context.h"
#include "base/text.h"

/* Text to token ids and back, for BPE vocabularies of the four forms in use: tokenizer.json (Hugging Face),
 * rank files (tiktoken), SentencePiece models and Tekken. Ids and token boundaries are those of each form's reference
 * implementation.
 *
 *     xd_tokenizer *tokenizer = NULL;
 *     xd_encoder *encoder = NULL;
 *     xd_encoding e;
 *     XD_TRY(xd_tokenizer_load(ctx, "tokenizer.json", NULL, &tokenizer));
 *     XD_TRY(xd_encoder_create(ctx, tokenizer, &encoder));
 *     XD_TRY(xd_encode(encoder, text, strlen(text), NULL, &e)); // e.ids[0 .. e.count), e.spans
 *
 * XDISTILL_NO_TEXT leaves all of this out, and with it the Unicode tables. */

/* A vocabulary with its rules. Immutable: any number of threads may use one, each with its own encoder. */
typedef struct xd_tokenizer xd_tokenizer;

/* What one thread needs to encode: buffers, and a cache of words it has seen. */
typedef struct xd_encoder xd_encoder;

/* The rules that a rank file lacks: split pattern, normalisation and special tokens of a model family. */
typedef enum xd_tokenizer_preset {
    XD_TOKENIZER_PRESET_NONE = 0,
    XD_TOKENIZER_PRESET_GPT2, /* and r50k, p50k */
    XD_TOKENIZER_PRESET_CL100K,
    XD_TOKENIZER_PRESET_O200K,
    XD_TOKENIZER_PRESET_LLAMA3,
    XD_TOKENIZER_PRESET_LLAMA4, /* pattern only: pass the special tokens of your release, including BOS */
    XD_TOKENIZER_PRESET_QWEN
} xd_tokenizer_preset;

/* A special token given by the caller. */
typedef struct xd_tokenizer_special {
    const char *content; /* UTF-8, not empty */
    int32_t id;
} xd_tokenizer_special;

/* How to load a tokenizer. Zero is the default of every field. */
typedef struct xd_tokenizer_desc {
    xd_tokenizer_preset preset; /* for rank files; other forms contain their rules: must be NONE */
    const char *pattern; /* for rank files: overrides the preset's; NUL-terminated. What no match has is a
                          * piece too, where tiktoken drops it: those of the presets match every text */
    const xd_tokenizer_special *specials; /* [special_count], besides those of the preset or the file */
    int64_t special_count;
    size_t max_bytes;      /* of the file; 0 -> 256 MiB */
    const char *bos, *eos; /* names of ADDED or SPECIAL tokens: what add_special puts before and after a
                            * text, instead of everything that the file defines. Both NULL -> what the file defines */
} xd_tokenizer_desc;

/* Loads a file; its form is recognised by its content. desc NULL -> defaults.
 *
 *   tokenizer.json  model BPE; normalizers NFC, NFKC, Prepend, Replace, Sequence; pre-tokenizers Split,
 *                   ByteLevel, Digits, Metaspace, Sequence; post-processors TemplateProcessing (its template
 *                   "single"), BertProcessing, RobertaProcessing, ByteLevel, Sequence
 *   rank file       one "base64 rank" a line; needs a preset or a pattern
 *   .model          SentencePiece BPE with the identity normaliser
 *   Tekken JSON
 *
 * A file with a post-processor of another kind is still loaded: xd_encode refuses add_special instead.
 *
 * Local. Deterministic. Reads the whole file. Time and memory for a hostile file are proportional to its size and to
 * its largest id, which is at most 2,097,151 (about 100 MB).
 * Errors: IO; MEMORY; FORMAT for a malformed file, with the position, and for a split pattern that is not supported or that
 * an empty text matches; UNSUPPORTED for a valid feature that is not implemented, with its name (Unigram, WordPiece, a
 * character map, ...); ARGUMENT for a desc that does not fit the file. */
XD_API xd_result xd_tokenizer_load(xd_ctx *ctx, const char *path, const xd_tokenizer_desc *desc,
                                   xd_tokenizer **out);

/* The same over bytes in memory, which are not needed after the call. */
XD_API xd_result xd_tokenizer_load_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                          const xd_tokenizer_desc *desc, xd_tokenizer **out);

/* Frees a tokenizer; its encoders must be gone. NULL is fine. */
XD_API void xd_tokenizer_destroy(xd_tokenizer *tokenizer);

/* Properties of a tokenizer. */
typedef struct xd_tokenizer_info {
    int32_t size;     /* largest id + 1: the rows of an embedding it needs */
    int32_t tokens;   /* ids in use; the others are gaps */
    uint64_t hash;    /* of everything that decides a text's ids and bytes, not of what add_special puts
                       * around it; names caches and projections */
    bool byte_level;  /* any bytes survive encoding and decoding: the symbols are bytes, all 256 have a
                       * token, and no normaliser, dropped separator or blank taken by an added token
                       * changes the text */
    bool adds_prefix; /* encoding may add a blank at the start of a text; decoding removes it */
    int32_t unknown;  /* id for text that has no token; -1: there is no such id */
    int32_t bos, eos; /* ids that begin and end a text; -1 when undefined. tokenizer.json: the first
                       * and the last that add_special puts; SentencePiece: the control tokens the trainer
                       * names; Tekken: <s>, </s>; presets: <|begin_of_text|>, <|end_of_text|> for Llama, else
                       * none and <|endoftext|> */
} xd_tokenizer_info;

/* The properties of this tokenizer. Local. */
XD_API xd_tokenizer_info xd_tokenizer_describe(const xd_tokenizer *tokenizer);

/* What an id stands for. */
typedef enum xd_token_kind {
    XD_TOKEN_KIND_NONE = 0, /* a gap: no such id */
    XD_TOKEN_KIND_NORMAL,   /* bytes of text */
    XD_TOKEN_KIND_BYTE,     /* one byte, written only where no other token fits */
    XD_TOKEN_KIND_ADDED,    /* matched in the text before everything else */
    XD_TOKEN_KIND_SPECIAL,  /* as ADDED, but only when xd_encode_desc.parse_special is set */
    XD_TOKEN_KIND_UNKNOWN   /* stands for text without a token; has no bytes */
} xd_token_kind;

/* One entry of the vocabulary; the pointer lives as long as the tokenizer. */
typedef struct xd_token {
    xd_token_kind kind;
    const uint8_t *bytes; /* what it decodes to; the name of an ADDED or SPECIAL token. Not NUL-terminated */
    size_t length;        /* of bytes; 0 when it has none */
} xd_token;

/* The entry of an id; kind NONE for ids out of range. O(1). */
XD_API xd_token xd_tokenizer_token(const xd_tokenizer *tokenizer, int32_t id);

/* The NORMAL or, failing that, BYTE token with these raw bytes; -1 when not found. O(length). */
XD_API int32_t xd_tokenizer_find(const xd_tokenizer *tokenizer, const void *bytes, size_t length);

/* The ADDED or SPECIAL token with this name, NUL-terminated; -1 when not found. */
XD_API int32_t xd_tokenizer_find_special(const xd_tokenizer *tokenizer, const char *name);

/* What to decode, and where to write it. */
typedef struct xd_decode_desc {
    const int32_t *ids; /* [count] */
    int64_t count;
    bool skip_special; /* leave SPECIAL tokens out instead of spelling their names */
    char *out; /* [capacity] receives the bytes, without a NUL; NULL with capacity 0 to ask for the length */
    size_t capacity;
} xd_decode_desc;

/* Bytes of the ids, one after the other. A token may be part of a character; then so is the result.
 *
 *   length   bytes of the whole result, also when it did not fit; then desc->out holds its beginning
 *
 * Local. Errors: DATA for an id that is a gap or out of range, with its index; ARGUMENT for a negative count, and for a
 * capacity without out. */
XD_API xd_result xd_tokenizer_decode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const xd_decode_desc *desc,
                                     size_t *length);

/* ---- encoding ---- */

/* An encoder for one thread; ctx is that thread's. The tokenizer must outlive it. Local. Errors: MEMORY. */
XD_API xd_result xd_encoder_create(xd_ctx *ctx, const xd_tokenizer *tokenizer, xd_encoder **out);

/* Frees an encoder. NULL is fine. */
XD_API void xd_encoder_destroy(xd_encoder *encoder);

/* How to encode. Zero is the default of every field. */
typedef struct xd_encode_desc {
    bool parse_special; /* SPECIAL names in the text become tokens; never do it to untrusted text */
    bool skip_spans;    /* the encoding then has no spans */
    bool add_special; /* add the tokens that the model expects around a text: the post-processor's; for other
                       * forms BOS, if defined, and no EOS, as Llama and Mistral are used */
} xd_encode_desc;

/* A text's tokens. The arrays belong to the encoder until its next call. */
typedef struct xd_encoding {
    int64_t count;
    const int32_t *ids;         /* [count] */
    const xd_token_span *spans; /* [count], bytes of the text before normalisation; NULL when skipped */
    const uint8_t *roles;       /* [count] xd_token_role, for xd_align_side; NULL without add_special */
} xd_encoding;

/* Encodes a text.
 *
 *   text   UTF-8, not NUL-terminated; bytes that are not UTF-8 are characters of no class
 *   desc   NULL -> defaults
 *
 * A text is one document: with add_special each call puts the special tokens around it, also around an empty text and
 * around a text that contains their names already. They have the empty spans [0, 0) and [bytes, bytes) and the roles BOS
 * (the first before the text), EOS (the last after it) and SPECIAL (others); all other tokens have the role TEXT.
 * Decoding with skip_special drops them if the file calls them special.
 *
 * Spans never go back. They follow each other without gap or overlap, with three exceptions: a character that
 * normalisation changed is atomic, so each of its tokens has all its bytes; what normalisation or add_special
 * inserts has an empty span; and text that has no token (the vocabulary cannot write it and has no unknown token, a
 * normaliser removes it, a Split drops it) is in no span. Blanks at the ends of a token are part of its span, whatever a
 * file's trim_offsets says.
 *
 * Local. Time is O(bytes log bytes). Allocates when a text is longer than all before it.
 * Errors: ARGUMENT for texts of 1 GiB and more; UNSUPPORTED for add_special when the file's post-processor is
 * not implemented, with its name, or when the special tokens lack the preset's BOS; DATA when a split pattern takes
 * too many steps; MEMORY. */
XD_API xd_result xd_encode(xd_encoder *encoder, const char *text, size_t bytes, const xd_encode_desc *desc,
                           xd_encoding *out);

/* ---- many texts ---- */

/* Encodes many texts at a time on the threads of its context, each of which has an encoder. */
typedef struct xd_batch_encoder xd_batch_encoder;

/* Local. The tokenizer must outlive it. Memory: an encoder a thread (1 MB and what the longest text needs). The context's
 * allocator is called from the threads, one at a time. Errors: MEMORY. */
XD_API xd_result xd_batch_encoder_create(xd_ctx *ctx, const xd_tokenizer *tokenizer, xd_batch_encoder **out);

/* Frees a batch encoder. NULL is fine. */
XD_API void xd_batch_encoder_destroy(xd_batch_encoder *encoder);

/* The tokens of texts, one after the other: those of text i are [offset[i], offset[i + 1]). The arrays belong to the batch
 * encoder until its next call. */
typedef struct xd_encoding_batch {
    int64_t count;              /* texts */
    const int64_t *offset;      /* [count + 1] */
    const int32_t *ids;         /* [offset[count]] */
    const xd_token_span *spans; /* [offset[count]], bytes of each text; NULL when skipped */
    const uint8_t *roles;       /* [offset[count]] xd_token_role; NULL without add_special */
} xd_encoding_batch;

/* Encodes each of the texts as xd_encode does, with the same tokens for any number of threads.
 *
 *   desc   NULL -> defaults
 *
 * Local. Allocates when texts are more or longer than before. Errors: those of xd_encode, with the index of the first
 * text that fails; nothing is returned then. ARGUMENT for a negative count or size. */
XD_API xd_result xd_encode_batch(xd_batch_encoder *encoder, const xd_texts *texts, const xd_encode_desc *desc,
                                 xd_encoding_batch *out);

#endif
