/* Tokenizers from ranks: tiktoken and Tekken files. */

#include "text/internal.h"

#include <stdio.h>
#include <string.h>

/* Vocabularies as bytes with a rank each, merged by the rank of the concatenation of two neighbours: the rank
 * files of tiktoken and the Tekken files of Mistral. */

/* ---- base64 ---- */

static int xdi_base64_value(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes padded base64 of at least one byte; out has room for 3/4 of the text. */
static bool xdi_base64_decode(const char *text, size_t bytes, uint8_t *out, size_t *out_bytes) {
    size_t count = 0, padding = 0;
    if (bytes == 0 || bytes % 4 != 0) return false;
    if (text[bytes - 1] == '=') padding = text[bytes - 2] == '=' ? 2 : 1;
    for (size_t i = 0; i < bytes; i += 4) {
        uint32_t word = 0;
        for (size_t k = 0; k < 4; k++) {
            const bool pad = i + k >= bytes - padding;
            const int value = pad ? 0 : xdi_base64_value(text[i + k]);
            if (value < 0) return false;
            word = word << 6 | (uint32_t)value;
        }
        out[count++] = (uint8_t)(word >> 16);
        out[count++] = (uint8_t)(word >> 8);
        out[count++] = (uint8_t)word;
    }
    *out_bytes = count - padding;
    return true;
}

/* ---- presets ---- */

#define XDI_RANKS_CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define XDI_RANKS_SPACES "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define XDI_RANKS_WORDS(digits)                                     \
    XDI_RANKS_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
                           "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" XDI_RANKS_SPACES
#define XDI_RANKS_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define XDI_RANKS_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define XDI_RANKS_O200K                                                                       \
    "[^\\r\\n\\p{L}\\p{N}]?" XDI_RANKS_UPPER "*" XDI_RANKS_LOWER "+" XDI_RANKS_CONTRACTIONS   \
    "?|[^\\r\\n\\p{L}\\p{N}]?" XDI_RANKS_UPPER "+" XDI_RANKS_LOWER "*" XDI_RANKS_CONTRACTIONS \
    "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" XDI_RANKS_SPACES

typedef struct xdi_ranks_preset {
    const char *pattern;
    bool nfc;
    xd_tokenizer_special specials[13]; /* up to the first without content */
    int reserved_begin, reserved_end;  /* ids of "<|reserved_special_token_N|>" ... */
    int reserved_first;                /* ... and the N of the first */
    const char *bos, *eos;             /* names; NULL: none */
} xdi_ranks_preset;

static const xdi_ranks_preset xdi_ranks_presets[] = {
    { NULL, false, { { NULL, 0 } }, 0, 0, 0, NULL, NULL },
    { "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
      false,
      { { "<|endoftext|>", 50256 }, { NULL, 0 } },
      0,
      0,
      0,
      NULL,
      "<|endoftext|>" },
    { "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+| "
      "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|"
      "\\s*[\\r\\n]|\\s+(?!\\S)|\\s",
      false,
      { { "<|endoftext|>", 100257 },
        { "<|fim_prefix|>", 100258 },
        { "<|fim_middle|>", 100259 },
        { "<|fim_suffix|>", 100260 },
        { "<|endofprompt|>", 100276 },
        { NULL, 0 } },
      0,
      0,
      0,
      NULL,
      "<|endoftext|>" },
    { XDI_RANKS_O200K,
      false,
      { { "<|endoftext|>", 199999 }, { "<|endofprompt|>", 200018 }, { NULL, 0 } },
      0,
      0,
      0,
      NULL,
      "<|endoftext|>" },
    { XDI_RANKS_WORDS("\\p{N}{1,3}"),
      false,
      { { "<|begin_of_text|>", 128000 },
        { "<|end_of_text|>", 128001 },
        { "<|reserved_special_token_0|>", 128002 },
        { "<|reserved_special_token_1|>", 128003 },
        { "<|finetune_right_pad_id|>", 128004 },
        { "<|step_id|>", 128005 },
        { "<|start_header_id|>", 128006 },
        { "<|end_header_id|>", 128007 },
        { "<|eom_id|>", 128008 },
        { "<|eot_id|>", 128009 },
        { "<|python_tag|>", 128010 },
        { "<|image|>", 128011 },
        { NULL, 0 } },
      128012,
      128256,
      2,
      "<|begin_of_text|>",
      "<|end_of_text|>" },
    { XDI_RANKS_O200K, false, { { NULL, 0 } }, 0, 0, 0, "<|begin_of_text|>", "<|end_of_text|>" },
    { XDI_RANKS_WORDS("\\p{N}"),
      true,
      { { "<|endoftext|>", 151643 }, { "<|im_start|>", 151644 }, { "<|im_end|>", 151645 }, { NULL, 0 } },
      0,
      0,
      0,
      NULL,
      "<|endoftext|>" },
};

enum {
    XDI_RANKS_PRESETS = (int)(sizeof xdi_ranks_presets / sizeof xdi_ranks_presets[0]),
    XDI_TEKKEN_SPECIALS = 1 << 16,
    XDI_RANKS_NAME = 48 /* bytes of the longest name of a preset's special tokens */
};

static void xdi_ranks_measure_preset(const xdi_ranks_preset *p, int64_t *size, size_t *bytes) {
    for (int i = 0; p->specials[i].content; i++) {
        if (p->specials[i].id >= *size) *size = (int64_t)p->specials[i].id + 1;
        *bytes += XDI_RANKS_NAME;
    }
    if (p->reserved_end > *size) *size = p->reserved_end;
    *bytes += (size_t)(p->reserved_end - p->reserved_begin) * XDI_RANKS_NAME;
}

static xd_result xdi_ranks_add_special(xd_tokenizer *t, int32_t id, const char *name) {
    xdi_added added;
    memset(&added, 0, sizeof added);
    added.id = id;
    added.special = true;
    XD_REQUIRE(t->ctx, t->vocab.tokens[id].kind == XD_TOKEN_KIND_NONE, XD_ERROR_ARGUMENT,
               "the preset's special token %s has id %d, which the file uses otherwise: another preset?",
               name, (int)id);
    return xdi_tokenizer_add_special(t, &added, name, strlen(name));
}

static xd_result xdi_ranks_add_preset(xd_tokenizer *t, const xdi_ranks_preset *p) {
    char name[XDI_RANKS_NAME];
    for (int i = 0; p->specials[i].content; i++)
        XD_TRY(xdi_ranks_add_special(t, p->specials[i].id, p->specials[i].content));
    for (int id = p->reserved_begin; id < p->reserved_end; id++) {
        snprintf(name, sizeof name, "<|reserved_special_token_%d|>",
                 id - p->reserved_begin + p->reserved_first);
        XD_TRY(xdi_ranks_add_special(t, (int32_t)id, name));
    }
    return XD_OK;
}

/* ---- what both forms share ---- */

/* Merges of a complete set of byte tokens whose ids grow with their ranks, and the pattern. */
static xd_result xdi_ranks_finish(xd_tokenizer *t, const char *pattern, size_t pattern_bytes) {
    int32_t *ranks = (int32_t *)xd_allocate(t->ctx, (size_t)t->vocab.size * sizeof *ranks);
    XD_REQUIRE(t->ctx, ranks, XD_ERROR_MEMORY, "no room for %d ranks", (int)t->vocab.size);
    for (int32_t i = 0; i < t->vocab.size; i++) ranks[i] = i;
    const xd_result result = xdi_tokenizer_derive_merges(t, ranks);
    xd_release(t->ctx, ranks);
    XD_TRY(result);
    XD_TRY(xdi_tokenizer_add_split(t, pattern, pattern_bytes, false, XDI_SPLIT_ISOLATED, false));
    return xdi_tokenizer_finish(t);
}

/* ---- rank files ---- */

/* The next line of a rank file: its base64 and its rank. False at the end; *line counts from 1. */
static xd_result xdi_ranks_next(xd_ctx *ctx, const char **at, const char *end, int64_t *line,
                                const char **text, size_t *bytes, int64_t *rank, bool *found) {
    const char *p = *at;
    *found = false;
    for (; p < end && (*p == '\n' || *p == '\r'); p++) *line += *p == '\n';
    if (p == end) return XD_OK;
    *text = p;
    while (p < end && *p != ' ' && *p != '\n') p++;
    *bytes = (size_t)(p - *text);
    while (p < end && *p == ' ') p++;
    const char *digits = p;
    *rank = 0;
    for (; p < end && *p >= '0' && *p <= '9' && *rank < XDI_TOKENIZER_IDS; p++)
        *rank = *rank * 10 + (*p - '0');
    const bool closed = p == end || *p == '\n' || *p == '\r';
    XD_REQUIRE(ctx, p > digits && closed, XD_ERROR_FORMAT, "rank file: line %lld is not base64 and a rank",
               (long long)*line);
    *found = true;
    *at = p;
    return XD_OK;
}

static xd_result xdi_ranks_add_lines(xd_tokenizer *t, const char *text, size_t bytes, uint8_t *buffer) {
    const char *at = text, *base64 = NULL;
    int64_t line = 1, rank = 0;
    size_t length = 0, decoded = 0;
    bool found;
    for (;;) {
        XD_TRY(xdi_ranks_next(t->ctx, &at, text + bytes, &line, &base64, &length, &rank, &found));
        if (!found) return XD_OK;
        if (length == 1 && *base64 == '=') continue; /* no bytes: an unused id, as in Whisper's file */
        XD_REQUIRE(t->ctx, xdi_base64_decode(base64, length, buffer, &decoded), XD_ERROR_FORMAT,
                   "rank file: line %lld is not base64", (long long)line);
        XD_TRY(xdi_vocabulary_add(&t->vocab, rank, XD_TOKEN_KIND_NORMAL, buffer, decoded, NULL, 0));
    }
}

/* What a file needs: ids, bytes of all tokens, bytes of the longest line. */
typedef struct xdi_ranks_size {
    int64_t ids;
    size_t blob, longest;
} xdi_ranks_size;

static xd_result xdi_ranks_measure(xd_ctx *ctx, const char *text, size_t bytes, xdi_ranks_size *size) {
    const char *at = text, *base64 = NULL;
    int64_t line = 1, rank = 0;
    size_t length = 0;
    bool found;
    memset(size, 0, sizeof *size);
    for (;;) {
        XD_TRY(xdi_ranks_next(ctx, &at, text + bytes, &line, &base64, &length, &rank, &found));
        if (!found) return XD_OK;
        if (rank >= size->ids) size->ids = rank + 1;
        if (length > size->longest) size->longest = length;
        size->blob += length;
    }
}

static xd_result xdi_ranks_fill(xd_tokenizer *t, const char *text, size_t bytes,
                                const xd_tokenizer_desc *desc, const xdi_ranks_preset *preset,
                                uint8_t *buffer) {
    t->vocab.byte_level = t->ignore_merges = true;
    XD_TRY(xdi_ranks_add_lines(t, text, bytes, buffer));
    XD_TRY(xdi_ranks_add_preset(t, preset));
    XD_TRY(xdi_tokenizer_add_specials(t, desc));
    xdi_tokenizer_name_ends(t, preset->bos, preset->eos);
    if (preset->nfc) XD_TRY(xdi_tokenizer_add_rewrite(t, XDI_REWRITE_NFC, NULL, 0, false, "", 0));
    t->stages.normalizer_count = t->stages.rewrite_count;
    const char *pattern = desc->pattern ? desc->pattern : preset->pattern;
    return xdi_ranks_finish(t, pattern, strlen(pattern));
}

XD_PRIVATE xd_result xdi_tokenizer_load_ranks(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                              const xd_tokenizer_desc *desc, xd_tokenizer **out) {
    xdi_ranks_size size;
    xd_tokenizer *t = NULL;
    XD_REQUIRE(ctx, desc->preset >= 0 && (int)desc->preset < XDI_RANKS_PRESETS, XD_ERROR_ARGUMENT,
               "tokenizer preset %d; there are 0 to %d", (int)desc->preset, XDI_RANKS_PRESETS - 1);
    const xdi_ranks_preset *preset = &xdi_ranks_presets[desc->preset];
    XD_TRY(xdi_ranks_measure(ctx, file->text, file->bytes, &size));
    XD_REQUIRE(ctx, desc->pattern || preset->pattern, XD_ERROR_ARGUMENT,
               "a rank file needs a preset or a pattern");
    xdi_ranks_measure_preset(preset, &size.ids, &size.blob);
    XD_TRY(xdi_tokenizer_measure_specials(ctx, desc, &size.ids, &size.blob));
    XD_TRY(xdi_tokenizer_begin(ctx, size.ids, size.blob, &t));
    uint8_t *buffer = (uint8_t *)xd_allocate(ctx, size.longest + 4);
    const xd_result result = buffer ? xdi_ranks_fill(t, file->text, file->bytes, desc, preset, buffer)
                                    : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a line");
    xd_release(ctx, buffer);
    if (result == XD_OK)
        *out = t;
    else
        xd_tokenizer_destroy(t);
    return result;
}

/* ---- Tekken ---- */

/* Sizes of a Tekken file: ids begin with the special tokens; then come the ranks that fit. */
typedef struct xdi_tekken {
    xd_ctx *ctx;
    const xd_json *vocab, *specials;
    const char *pattern;
    size_t pattern_bytes, longest, blob;
    int64_t size, special_count;
} xdi_tekken;

static xd_result xdi_tekken_measure(xdi_tekken *k, const xd_json *root, const xd_tokenizer_desc *desc) {
    const xd_json *config = xd_json_find(root, "config");
    k->vocab = xd_json_find(root, "vocab");
    k->specials = xd_json_find(root, "special_tokens");
    k->pattern = xd_json_string(xd_json_find(config, "pattern"), &k->pattern_bytes);
    const bool good = k->pattern && xd_json_int64(xd_json_find(config, "default_vocab_size"), &k->size) &&
                      xd_json_int64(xd_json_find(config, "default_num_special_tokens"), &k->special_count);
    XD_REQUIRE(k->ctx,
               good && k->special_count >= 0 && k->special_count < k->size &&
                   k->special_count <= XDI_TEKKEN_SPECIALS && k->size <= XDI_TOKENIZER_IDS,
               XD_ERROR_FORMAT,
               "Tekken: config lacks pattern, default_vocab_size or default_num_special_tokens, or they "
               "are out of range");
    for (const xd_json *item = xd_json_first(k->vocab); item; item = xd_json_next(item)) {
        size_t length = 0;
        (void)xd_json_string(xd_json_find(item, "token_bytes"), &length);
        k->blob += length;
        if (length > k->longest) k->longest = length;
    }
    for (const xd_json *item = xd_json_first(k->specials); item; item = xd_json_next(item)) {
        size_t length = 0;
        (void)xd_json_string(xd_json_find(item, "token_str"), &length);
        k->blob += length;
    }
    k->blob += (size_t)k->special_count * XDI_RANKS_NAME;
    return xdi_tokenizer_measure_specials(k->ctx, desc, &k->size, &k->blob);
}

static xd_result xdi_tekken_add_vocab(const xdi_tekken *k, xd_tokenizer *t, uint8_t *buffer) {
    int64_t rank = -1;
    size_t length = 0, decoded = 0;
    for (const xd_json *item = xd_json_first(k->vocab); item; item = xd_json_next(item)) {
        const char *base64 = xd_json_string(xd_json_find(item, "token_bytes"), &length);
        const bool good = base64 && xd_json_int64(xd_json_find(item, "rank"), &rank) && rank >= 0 &&
                          xdi_base64_decode(base64, length, buffer, &decoded);
        XD_REQUIRE(k->ctx, good, XD_ERROR_FORMAT, "Tekken: the token at byte %llu lacks token_bytes or rank",
                   (unsigned long long)xd_json_offset(item));
        if (rank < k->size - k->special_count)
            XD_TRY(xdi_vocabulary_add(&t->vocab, rank + k->special_count, XD_TOKEN_KIND_NORMAL, buffer,
                                      decoded, NULL, 0));
    }
    return XD_OK;
}

/* The special tokens of the file; ids it does not name get the names that the reference gives them. */
static xd_result xdi_tekken_add_specials(const xdi_tekken *k, xd_tokenizer *t) {
    static const char *const old[] = { "<unk>",
                                       "<s>",
                                       "</s>",
                                       "[INST]",
                                       "[/INST]",
                                       "[AVAILABLE_TOOLS]",
                                       "[/AVAILABLE_TOOLS]",
                                       "[TOOL_RESULTS]",
                                       "[/TOOL_RESULTS]",
                                       "[TOOL_CALLS]",
                                       "[IMG]",
                                       "<pad>",
                                       "[IMG_BREAK]",
                                       "[IMG_END]",
                                       "[PREFIX]",
                                       "[MIDDLE]",
                                       "[SUFFIX]",
                                       "[SYSTEM_PROMPT]",
                                       "[/SYSTEM_PROMPT]",
                                       "[TOOL_CONTENT]" };
    char name[XDI_RANKS_NAME];
    int64_t rank = -1;
    for (const xd_json *item = xd_json_first(k->specials); item; item = xd_json_next(item)) {
        const char *text = xd_json_string(xd_json_find(item, "token_str"), NULL);
        const bool good = text && *text && xd_json_int64(xd_json_find(item, "rank"), &rank);
        XD_REQUIRE(k->ctx, good && rank >= 0 && rank < k->special_count, XD_ERROR_FORMAT,
                   "Tekken: the special token at byte %llu lacks token_str, or a rank in 0 to %lld",
                   (unsigned long long)xd_json_offset(item), (long long)k->special_count - 1);
        XD_TRY(xdi_ranks_add_special(t, (int32_t)rank, text));
    }
    for (int32_t id = 0; id < k->special_count; id++) {
        if (t->vocab.tokens[id].kind != XD_TOKEN_KIND_NONE) continue;
        const bool named = !k->specials && id < (int32_t)(sizeof old / sizeof old[0]);
        snprintf(name, sizeof name, "%s", named ? old[id] : "");
        if (!named) snprintf(name, sizeof name, "<SPECIAL_%d>", (int)id);
        XD_TRY(xdi_ranks_add_special(t, id, name));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_tokenizer_load_tekken(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                               const xd_tokenizer_desc *desc, xd_tokenizer **out) {
    xdi_tekken k;
    xd_tokenizer *t = NULL;
    memset(&k, 0, sizeof k);
    k.ctx = ctx;
    XD_TRY(xdi_tekken_measure(&k, file->root, desc));
    XD_TRY(xdi_tokenizer_begin(ctx, k.size, k.blob, &t));
    t->vocab.byte_level = t->ignore_merges = true;
    uint8_t *buffer = (uint8_t *)xd_allocate(ctx, k.longest + 4);
    xd_result result = buffer ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a token");
    if (result == XD_OK) result = xdi_tekken_add_vocab(&k, t, buffer);
    if (result == XD_OK) result = xdi_tekken_add_specials(&k, t);
    if (result == XD_OK) result = xdi_tokenizer_add_specials(t, desc);
    if (result == XD_OK) xdi_tokenizer_name_ends(t, "<s>", "</s>");
    if (result == XD_OK) result = xdi_ranks_finish(t, k.pattern, k.pattern_bytes);
    xd_release(ctx, buffer);
    if (result == XD_OK)
        *out = t;
    else
        xd_tokenizer_destroy(t);
    return result;
}
