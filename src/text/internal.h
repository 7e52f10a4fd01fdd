#ifndef XDI_TEXT_INTERNAL_H
#define XDI_TEXT_INTERNAL_H

#include "base/internal.h"
#include "base/json.h"
#include "text/tokenizer.h"

/* ---- unicode.c ---- */

/* Categories of all code points in a two-stage table, and the tables of normalisation. */
typedef struct xdi_unicode {
    uint16_t block[0x1100];  /* of code point >> 8 */
    uint8_t *properties;     /* [blocks][256]: category, and the flags below */
    uint32_t *pair_points;   /* [XDI_UNICODE_PAIRS], ascending: code points with a canonical decomposition */
    uint32_t *compat_points; /* [XDI_UNICODE_COMPATS], ascending; then where each lies in the pool */
    uint32_t *class_starts;  /* first code point of each run of one combining class */
    uint16_t *compositions;  /* hash table of indexes of pairs + 1 */
} xdi_unicode;

enum {
    XDI_UNICODE_CATEGORY = 31,     /* mask */
    XDI_UNICODE_NFC = 32,          /* NFC changes the character */
    XDI_UNICODE_NFKC = 64,         /* NFKC does, perhaps inside of what NFC makes of it */
    XDI_UNICODE_JOINS = 128,       /* may combine with the character before, or be reordered with it */
    XDI_UNICODE_LONGEST = 18,      /* code points of the longest decomposition */
    XDI_UNICODE_INVALID = 0x110000 /* stands for a byte that is not UTF-8 */
};

/* Sets of categories by their bits, for masks like 1 << category. */
XD_PRIVATE bool xdi_unicode_mask(const char *name, size_t bytes, uint32_t *mask); /* "L", "Lu", "N", ... */
XD_PRIVATE uint32_t xdi_unicode_space_mask(void);

/* Memory is the context's; NULL when it has no memory. */
XD_PRIVATE xdi_unicode *xdi_unicode_create(xd_ctx *ctx);
XD_PRIVATE void xdi_unicode_destroy(xd_ctx *ctx, xdi_unicode *u);

/* Code points that fold to the same one as `point`, without `point`; returns their number, at most 4. */
XD_PRIVATE int xdi_unicode_fold_mates(uint32_t point, uint32_t mates[4]);

/* Full decomposition of one code point. */
XD_PRIVATE int xdi_unicode_decompose(const xdi_unicode *u, uint32_t point, bool compat, uint32_t *out);
/* Canonical order and composition of decomposed code points, in place; the new count. temp has room for
 * count. */
XD_PRIVATE size_t xdi_unicode_compose(const xdi_unicode *u, uint32_t *points, size_t count, uint32_t *temp);

/* One character: its bytes, at least 1; a byte that starts no well-formed sequence is XDI_UNICODE_INVALID. */
XD_PRIVATE size_t xdi_utf8_decode(const uint8_t *at, const uint8_t *end, uint32_t *point);
/* Bytes of the character that ends at `at`, as decoding from the front would give. at > begin. */
XD_PRIVATE size_t xdi_utf8_before(const uint8_t *begin, const uint8_t *at);
XD_PRIVATE size_t xdi_utf8_encode(uint32_t point, uint8_t out[4]);

static inline unsigned xdi_unicode_property(const xdi_unicode *u, uint32_t point) {
    return point < XDI_UNICODE_INVALID ? u->properties[u->block[point >> 8] * 256u + (point & 255u)] : 0u;
}

/* ---- pattern.c ---- */

typedef struct xdi_pattern xdi_pattern;

/* Compiles a split pattern. Errors: FORMAT with the byte offset of what is not supported; MEMORY. */
XD_PRIVATE xd_result xdi_pattern_create(xd_ctx *ctx, const char *text, size_t bytes, const xdi_unicode *u,
                                        xdi_pattern **out);
XD_PRIVATE void xdi_pattern_destroy(xd_ctx *ctx, xdi_pattern *pattern);
/* From now on `$` matches before each line feed too, as in Oniguruma; true when the pattern has one. */
XD_PRIVATE bool xdi_pattern_end_lines(xdi_pattern *pattern);

/* A backtracking point: the options are the character boundaries from high down to low. */
typedef struct xdi_pattern_choice {
    size_t low, high; /* low = SIZE_MAX: high is the only one */
    uint32_t op;
} xdi_pattern_choice;

/* One thread's state of matching. Zero it, set ctx; free with xdi_matcher_release. */
typedef struct xdi_matcher {
    xd_ctx *ctx;
    const xdi_pattern *pattern;
    const uint8_t *text;
    size_t bytes;
    xdi_pattern_choice *stack;
    size_t used, capacity;
    uint64_t steps; /* left; the maximum depends on the length of the text */
} xdi_matcher;

XD_PRIVATE void xdi_matcher_release(xdi_matcher *m);

/* Prepares for one text; `steps` is set to 256 per byte and a constant. */
XD_PRIVATE void xdi_matcher_start(xdi_matcher *m, const uint8_t *text, size_t bytes);

/* The first match of the pattern that is not empty in [from, to) of the text, which `$` and look-ahead take
 * to end at `to`. *begin = *end = to when there is none. Errors: DATA when the steps are used up, MEMORY. */
XD_PRIVATE xd_result xdi_pattern_find(xdi_matcher *m, const xdi_pattern *pattern, size_t from, size_t to,
                                      size_t *begin, size_t *end);

/* ---- tokenizer.c ---- */

enum {
    XDI_TOKENIZER_IDS = 1 << 21, /* maximum of largest id + 1; files above it are refused */
    XDI_TOKENIZER_BITS = 4,
    XDI_TOKENIZER_PAGE = 128,    /* code points of a block of the table of characters */
    XDI_TOKENIZER_STAGES = 16,   /* normalisers, and pre-tokenizers */
    XDI_TOKENIZER_AROUND = 64,   /* special tokens around a text */
    XDI_TOKENIZER_TEXT = 1 << 30 /* bytes of one text, also after normalisation */
};

#define XDI_TOKENIZER_MARK "\xe2\x96\x81" /* U+2581: a blank, for SentencePiece */

/* An entry of the vocabulary: its text as the merges see it, and the bytes it decodes to, both in the blob.
 */
typedef struct xdi_token {
    uint32_t text, text_bytes, raw, raw_bytes;
    xd_token_kind kind;
} xdi_token;

/* Of a hash table of texts; id + 1, 0: free. */
typedef struct xdi_slot {
    uint32_t hash;
    int32_t id;
} xdi_slot;

/* Joining the tokens of `pair` (left << 32 | right) gives `id`; the lowest rank comes first. */
typedef struct xdi_merge {
    uint64_t pair; /* UINT64_MAX: free */
    int32_t rank, id;
} xdi_merge;

/* A token that is matched before splits and merges. */
typedef struct xdi_added {
    int32_t id;
    uint32_t text, bytes; /* in the blob; the text that is matched */
    bool special, strip_left, strip_right, single_word, normalized;
    bool literal; /* its text is matched as it stands in the file, also in normalised text */
} xdi_added;

/* Added tokens in the order of their bytes, and which pairs of bytes any of them begins with. */
typedef struct xdi_added_list {
    xdi_added *items;
    uint32_t count;
    uint8_t *starts; /* [8192] bits; NULL when count is 0 */
    bool alike;      /* all begin with the byte `first`, as most vocabularies' do */
    uint8_t first;
} xdi_added_list;

/* One step that changes the text. */
typedef enum xdi_rewrite_kind {
    XDI_REWRITE_NFC = 1,
    XDI_REWRITE_NFKC,
    XDI_REWRITE_PREPEND, /* `to` before the text, when there is text */
    XDI_REWRITE_REPLACE  /* every match of the pattern by `to` */
} xdi_rewrite_kind;

typedef struct xdi_rewrite {
    xdi_rewrite_kind kind;
    xdi_pattern *pattern;
    char one;              /* the pattern is this ASCII character; 0 -> it is not one */
    uint32_t to, to_bytes; /* in the blob */
    bool unless_there;     /* prepend only when the text does not begin with it */
    bool only_first;       /* ... and only at the beginning of the whole text */
} xdi_rewrite;

/* What a split does with its matches; the text between them is always a piece. */
typedef enum xdi_split_behavior {
    XDI_SPLIT_ISOLATED = 1, /* a piece each */
    XDI_SPLIT_REMOVED,
    XDI_SPLIT_CONTIGUOUS, /* neighbouring matches are one piece */
    XDI_SPLIT_WITH_PREVIOUS,
    XDI_SPLIT_WITH_NEXT
} xdi_split_behavior;

typedef struct xdi_split {
    xdi_pattern *pattern;
    xdi_split_behavior behavior;
    bool invert; /* the text between the matches takes their role */
} xdi_split;

/* All tokens by id, their texts, and the tables that find them. */
typedef struct xdi_vocabulary {
    xd_ctx *ctx;
    xdi_token *tokens; /* [size] */
    int32_t size, count;
    uint8_t *blob;
    size_t blob_bytes, blob_capacity;
    /* hash tables by text and, when the symbols are characters or there are strays, by raw bytes */
    xdi_slot *pieces, *raws;
    uint32_t piece_slots; /* of each, a power of two */
    bool byte_level;      /* the model's symbols are bytes, else characters */
    bool strays;          /* it has tokens that no text becomes: of bytes, but with names that spell none */
    int32_t unknown;      /* -1: none */
    int32_t byte_id[256]; /* -1: none */
    /* for symbols that are characters: of each 128 code points, the block that is theirs in character_ids, tokens of
     * one character; -1: none */
    uint16_t *character_pages;
    int32_t *character_ids;
} xdi_vocabulary;

/* All merges by their pairs. */
typedef struct xdi_merges {
    xd_ctx *ctx;
    xdi_merge *items; /* hash table */
    uint64_t *bits;   /* [XDI_TOKENIZER_BITS for each slot] set where a merge has its hash */
    uint32_t slots, count;
    uint64_t *merging; /* [size of the vocabulary] bits: tokens that are part of a merge */
} xdi_merges;

/* The steps from a text to pieces. */
typedef struct xdi_stages {
    xdi_rewrite rewrites[XDI_TOKENIZER_STAGES]; /* normalisers, then what pre-tokenizers change */
    int rewrite_count, normalizer_count;
    xdi_split splits[XDI_TOKENIZER_STAGES];
    int split_count;
} xdi_stages;

/* Special tokens that add_special puts `before` the text, then after it (`behind`). */
typedef struct xdi_around {
    int32_t ids[XDI_TOKENIZER_AROUND];
    int before, behind;
    char refusal[96]; /* why add_special cannot be done; empty when it can */
} xdi_around;

struct xd_tokenizer {
    xd_ctx *ctx;
    xdi_unicode *unicode;
    xdi_vocabulary vocab;
    xdi_merges merges;
    xdi_stages stages;
    xdi_added_list added[2]; /* matched in the text as given; matched after normalisation */
    xdi_around around;
    int32_t bos, eos;   /* -1: none */
    bool ignore_merges; /* a piece that is a token is not merged */
    bool ends_lines;    /* `$` in patterns matches before a line feed too */
    bool text_prefix; /* the last normaliser puts a prefix before the text, which added tokens do not have */
    bool byte_fallback, fuse_unknown, adds_prefix;
    bool cuts_at_mark; /* no merge crosses a blank, so a text may be divided before each */
    uint64_t hash;
};

/* Replaces every U+2581 of a text by a blank and returns the length. out is at least as long as the text. */
XD_PRIVATE size_t xdi_tokenizer_unmark(const uint8_t *text, size_t bytes, uint8_t *out);
/* "<0x0A>" -> 10; -1 for anything else. */
XD_PRIVATE int xdi_tokenizer_fallback_byte(const uint8_t *text, size_t bytes);

/* Building. All sizes are known before: a loader counts first. */

/* An empty tokenizer of ids below `size` whose texts take at most blob_bytes. */
XD_PRIVATE xd_result xdi_tokenizer_begin(xd_ctx *ctx, int64_t size, size_t blob_bytes, xd_tokenizer **out);
/* Gives an id a token that is never found by merges or by text. Errors: FORMAT for an id that is used already. */
XD_PRIVATE xd_result xdi_vocabulary_set(xdi_vocabulary *v, int64_t id, xd_token_kind kind, const void *text,
                                        size_t text_bytes);
/* Gives an id a token without text: no text becomes it, and it decodes to nothing. Errors: as above. */
XD_PRIVATE xd_result xdi_vocabulary_set_empty(xdi_vocabulary *v, int64_t id);
/* Gives an id its token, to be found by its text. raw NULL: the same as the text. Errors: FORMAT for an id or
 * a text that is used already. */
XD_PRIVATE xd_result xdi_vocabulary_add(xdi_vocabulary *v, int64_t id, xd_token_kind kind, const void *text,
                                        size_t text_bytes, const void *raw, size_t raw_bytes);
/* Adds a merge; of two for one pair the later one counts. */
XD_PRIVATE xd_result xdi_merges_add(xdi_merges *m, int32_t left, int32_t right, int32_t rank, int32_t id);
/* Derives the merges from the tokens: any two whose concatenation is a third. ranks: [size], lower first. */
XD_PRIVATE xd_result xdi_tokenizer_derive_merges(xd_tokenizer *t, const int32_t *ranks);
/* Adds a token to the list that is matched before splits and merges. A token that the id has already is
 * replaced. */
XD_PRIVATE xd_result xdi_tokenizer_add_special(xd_tokenizer *t, const xdi_added *added, const char *text,
                                               size_t bytes);
/* Appends a split by a pattern, or by a literal when `literal` is set. */
XD_PRIVATE xd_result xdi_tokenizer_add_split(xd_tokenizer *t, const char *pattern, size_t bytes, bool literal,
                                             xdi_split_behavior behavior, bool invert);
XD_PRIVATE xd_result xdi_tokenizer_add_rewrite(xd_tokenizer *t, xdi_rewrite_kind kind, const char *pattern,
                                               size_t bytes, bool literal, const char *to, size_t to_bytes);
/* What a caller's special tokens take: *size and *bytes grow as needed. Errors: ARGUMENT. */
XD_PRIVATE xd_result xdi_tokenizer_measure_specials(xd_ctx *ctx, const xd_tokenizer_desc *desc, int64_t *size,
                                                    size_t *bytes);
/* Adds them. Errors: ARGUMENT for an id that is used already. */
XD_PRIVATE xd_result xdi_tokenizer_add_specials(xd_tokenizer *t, const xd_tokenizer_desc *desc);
/* One more token around a text. When there are too many, add_special will be refused. */
XD_PRIVATE void xdi_around_put(xdi_around *a, int32_t id, bool behind);
/* Records why add_special cannot be done; of several reasons the first. */
XD_PRIVATE void xdi_around_refuse(xdi_around *a, const char *what, const char *name);
/* The ADDED or SPECIAL token of a name, -1 when there is none. */
XD_PRIVATE int32_t xdi_tokenizer_special(const xd_tokenizer *t, const char *name, size_t bytes);
/* Names of the tokens that begin and end a text, NULL for none: add_special puts the first, and is refused when it is
 * missing. The special tokens were added before. */
XD_PRIVATE void xdi_tokenizer_name_ends(xd_tokenizer *t, const char *bos, const char *eos);
/* The caller's begin and end tokens instead of the file's, once the object is complete. */
XD_PRIVATE xd_result xdi_tokenizer_replace_ends(xd_tokenizer *t, const xd_tokenizer_desc *desc);
/* Sorts, derives and hashes; then the object is complete. */
XD_PRIVATE xd_result xdi_tokenizer_finish(xd_tokenizer *t);

/* The token whose text this is, -1 when there is none. */
XD_PRIVATE int32_t xdi_vocabulary_piece(const xdi_vocabulary *v, const uint8_t *text, size_t bytes);
/* The same for a text of one character, where symbols are characters. */
static inline int32_t xdi_vocabulary_character(const xdi_vocabulary *v, uint32_t point) {
    const size_t block = v->character_pages[point / XDI_TOKENIZER_PAGE];
    return v->character_ids[block * XDI_TOKENIZER_PAGE + point % XDI_TOKENIZER_PAGE];
}

/* Is a token part of a merge? */
static inline bool xdi_merges_use(const xdi_merges *m, int32_t id) {
    return m->merging[(uint32_t)id / 64u] >> ((uint32_t)id & 63u) & 1u;
}

static inline uint32_t xdi_merge_hash(uint64_t pair) {
    return (uint32_t)((pair * 0x9e3779b97f4a7c15u ^ pair >> 29) >> 20);
}

/* The merge of a pair, NULL when there is none. Most pairs have none, which one bit of a small table shows.
 */
static inline const xdi_merge *xdi_merges_find(const xdi_merges *m, int32_t left, int32_t right) {
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint32_t slot = xdi_merge_hash(pair);
    const uint32_t bit = slot & (XDI_TOKENIZER_BITS * m->slots - 1);
    if (!(m->bits[bit >> 6] >> (bit & 63u) & 1u)) return NULL;
    for (slot &= m->slots - 1; m->items[slot].pair != pair; slot = (slot + 1) & (m->slots - 1))
        if (m->items[slot].pair == UINT64_MAX) return NULL;
    return &m->items[slot];
}

/* ---- tokenizer_text.c ---- */

/* A run of a changed text from byte `at` on: it replaces bytes [from, to) of the original, one to one when
 * `linear`, else as a whole. It ends at the next run's `at`. */
typedef struct xdi_text_run {
    uint32_t at, from, to;
    bool linear;
} xdi_text_run;

/* A text and its runs. */
typedef struct xdi_text {
    uint8_t *bytes;
    size_t length, capacity;
    xdi_text_run *runs;
    size_t run_count, run_capacity;
} xdi_text;

/* A text to read. */
typedef struct xdi_text_view {
    const uint8_t *bytes;
    size_t length;
    const xdi_text_run *runs; /* [run_count], at least one */
    size_t run_count;
} xdi_text_view;

/* Buffers of rewriting. */
typedef struct xdi_rewriter {
    xdi_text texts[4]; /* two for each half of the rewrites */
    uint32_t *points;  /* of one cluster, and scratch memory of the same size */
    size_t point_capacity;
    xdi_matcher matcher;
} xdi_rewriter;

/* Applies rewrites [first, last) of a tokenizer. The result views the input, or one of the two
 * texts from `place` on. */
XD_PRIVATE xd_result xdi_rewrite_apply(xd_ctx *ctx, const xd_tokenizer *t, int first, int last,
                                       xdi_rewriter *r, int place, xdi_text_view in, xdi_text_view *out);
XD_PRIVATE void xdi_rewriter_release(xd_ctx *ctx, xdi_rewriter *r);

/* The original bytes of [begin, end) of a view. `run` is a cursor that only moves on. */
XD_PRIVATE xd_token_span xdi_text_origin(const xdi_text_view *view, size_t *run, size_t begin, size_t end);
/* Part of a view; its runs are in `runs`, which holds at least the view's run_count. `run` as above. */
XD_PRIVATE xdi_text_view xdi_text_part(const xdi_text_view *view, size_t *run, size_t begin, size_t end,
                                       xdi_text_run *runs);

/* ---- formats of files ---- */

/* Input of a loader; `root` is the text as JSON, NULL when it is not JSON. */
typedef struct xdi_tokenizer_file {
    const char *text;
    size_t bytes;
    const xd_json *root;
} xdi_tokenizer_file;

/* A file's format has one of these, and a line in tokenizer_load.c. */
typedef xd_result (*xdi_tokenizer_loader)(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                          const xd_tokenizer_desc *desc, xd_tokenizer **out);
XD_PRIVATE xd_result xdi_tokenizer_load_json(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                             const xd_tokenizer_desc *desc, xd_tokenizer **out);
XD_PRIVATE xd_result xdi_tokenizer_load_tekken(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                               const xd_tokenizer_desc *desc, xd_tokenizer **out);
XD_PRIVATE xd_result xdi_tokenizer_load_ranks(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                              const xd_tokenizer_desc *desc, xd_tokenizer **out);
XD_PRIVATE xd_result xdi_tokenizer_load_sentencepiece(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                                      const xd_tokenizer_desc *desc, xd_tokenizer **out);

/* tokenizer_batch.c: what encodes many texts at a time on the threads of a context. */
typedef struct xdi_batch_encoder xdi_batch_encoder;

/* tokenizer_encode.c: an encoder without batches; its context; where its batch encoder is, NULL without one. */
XD_PRIVATE xd_result xdi_encoder_make(xd_ctx *ctx, const xd_tokenizer *tokenizer, xd_encoder **out);
XD_PRIVATE void xdi_encoder_free(xd_encoder *encoder);
XD_PRIVATE xd_ctx *xdi_encoder_ctx(const xd_encoder *encoder);
XD_PRIVATE xdi_batch_encoder **xdi_encoder_batch(xd_encoder *encoder);

#endif
