/* gguf_tokenizer.c - the tokenizer of a GGUF file as the tokenizer.json it would be. */
#include "gguf_model.h"
#include "gguf_pieces.h"
#include "json_fields.h"

#include <string.h>

/* ---- parts of both kinds ---- */

static void gguf_json_added(xd_json_writer *w, xd_text token, int64_t id, bool special) {
    xd_json_write_object(w);
    xd_json_write_key(w, "id");
    xd_json_write_int64(w, id);
    xd_json_write_key(w, "content");
    xd_json_write_string_n(w, token.data, (size_t)token.size);
    json_field_bool(w, "single_word", false);
    json_field_bool(w, "lstrip", false);
    json_field_bool(w, "rstrip", false);
    json_field_bool(w, "normalized", false);
    json_field_bool(w, "special", special);
    xd_json_write_end(w);
}

static void gguf_json_typed(xd_json_writer *w, const char *type) {
    xd_json_write_object(w);
    json_field_string(w, "type", type);
}

static void gguf_json_byte_level(xd_json_writer *w, bool use_regex) {
    xd_json_write_object(w);
    json_field_string(w, "type", "ByteLevel");
    json_field_bool(w, "add_prefix_space", false);
    json_field_bool(w, "trim_offsets", true);
    json_field_bool(w, "use_regex", use_regex);
    xd_json_write_end(w);
}

/* ---- byte-level ---- */

/* How a text is split before merges. */
typedef struct gguf_rules {
    const char *name;    /* "tokenizer.ggml.pre" */
    bool digits;         /* each digit by itself, before the rule of GPT-2 */
    const char *pattern; /* instead of that rule; NULL -> it */
    bool whole;          /* a piece that is a token is not merged */
} gguf_rules;

#define GGUF_WORDS(digits)                                               \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const gguf_rules gguf_rule_table[] = {
    { "smollm", true, NULL, false },
    { "starcoder", true, NULL, false },
    { "gpt-2", false, NULL, false },
    { "default", false, NULL, false },
    { "llama-bpe", false, GGUF_WORDS("\\p{N}{1,3}"), true },
    { "qwen2", false, GGUF_WORDS("\\p{N}"), false },
};

enum { GGUF_RULES = sizeof gguf_rule_table / sizeof gguf_rule_table[0] };

static void gguf_json_split(xd_json_writer *w, const char *pattern) {
    xd_json_write_object(w);
    json_field_string(w, "type", "Split");
    xd_json_write_key(w, "pattern");
    xd_json_write_object(w);
    json_field_string(w, "Regex", pattern);
    xd_json_write_end(w);
    json_field_string(w, "behavior", "Isolated");
    json_field_bool(w, "invert", false);
    xd_json_write_end(w);
}

static void gguf_json_pre_tokenizer(xd_json_writer *w, const gguf_rules *rules) {
    xd_json_write_key(w, "pre_tokenizer");
    xd_json_write_object(w);
    json_field_string(w, "type", "Sequence");
    xd_json_write_key(w, "pretokenizers");
    xd_json_write_array(w);
    if (rules->digits) {
        xd_json_write_object(w);
        json_field_string(w, "type", "Digits");
        json_field_bool(w, "individual_digits", true);
        xd_json_write_end(w);
    }
    if (rules->pattern) gguf_json_split(w, rules->pattern);
    gguf_json_byte_level(w, !rules->pattern);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

/* What the file says of a tokenizer. */
typedef struct gguf_vocabulary {
    gguf_array tokens, types, merges;
    const gguf_rules *rules; /* byte-level; NULL -> SentencePiece, and then: */
    gguf_merge *pieces;      /* [piece_count] */
    int64_t piece_count;
    xd_text *text; /* [tokens.left] */
    bool prefix;   /* a blank before a text */
    char *key;     /* room for the longest token */
} gguf_vocabulary;

static void gguf_json_vocab(xd_json_writer *w, const gguf_vocabulary *v) {
    gguf_array tokens = v->tokens;
    char *key = v->key;
    xd_text text;
    xd_json_write_key(w, "vocab");
    xd_json_write_object(w);
    for (int64_t id = 0; gguf_next_string(&tokens, &text); id++) {
        memcpy(key, text.data, (size_t)text.size);
        key[text.size] = '\0';
        xd_json_write_key(w, key);
        xd_json_write_int64(w, id);
    }
    xd_json_write_end(w);
}

static void gguf_json_model(xd_json_writer *w, const gguf_vocabulary *v) {
    gguf_array merges = v->merges;
    xd_text text;
    xd_json_write_key(w, "model");
    gguf_json_typed(w, "BPE");
    if (v->rules->whole) json_field_bool(w, "ignore_merges", true);
    gguf_json_vocab(w, v);
    xd_json_write_key(w, "merges");
    xd_json_write_array(w);
    while (gguf_next_string(&merges, &text)) xd_json_write_string_n(w, text.data, (size_t)text.size);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

/* ---- SentencePiece ---- */

/* How it writes a blank. */
static const char gguf_mark[] = "\xe2\x96\x81";

static void gguf_json_replace(xd_json_writer *w, const char *from, const char *to) {
    gguf_json_typed(w, "Replace");
    xd_json_write_key(w, "pattern");
    xd_json_write_object(w);
    json_field_string(w, "String", from);
    xd_json_write_end(w);
    json_field_string(w, "content", to);
    xd_json_write_end(w);
}

static void gguf_json_blanks(xd_json_writer *w, const gguf_vocabulary *v) {
    xd_json_write_key(w, "normalizer");
    gguf_json_typed(w, "Sequence");
    xd_json_write_key(w, "normalizers");
    xd_json_write_array(w);
    if (v->prefix) {
        gguf_json_typed(w, "Prepend");
        json_field_string(w, "prepend", gguf_mark);
        xd_json_write_end(w);
    }
    gguf_json_replace(w, " ", gguf_mark);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static void gguf_json_piece_decoder(xd_json_writer *w, const gguf_vocabulary *v) {
    xd_json_write_key(w, "decoder");
    gguf_json_typed(w, "Sequence");
    xd_json_write_key(w, "decoders");
    xd_json_write_array(w);
    gguf_json_replace(w, gguf_mark, " ");
    gguf_json_typed(w, "ByteFallback");
    xd_json_write_end(w);
    gguf_json_typed(w, "Fuse");
    xd_json_write_end(w);
    if (v->prefix) {
        gguf_json_typed(w, "Strip");
        json_field_string(w, "content", " ");
        json_field_int(w, "start", 1);
        json_field_int(w, "stop", 0);
        xd_json_write_end(w);
    }
    xd_json_write_end(w);
    xd_json_write_end(w);
}

/* The name of the piece that stands for what cannot be spelled. */
static void gguf_json_unknown(xd_json_writer *w, const gguf_vocabulary *v) {
    gguf_array tokens = v->tokens, types = v->types;
    xd_text text;
    int64_t type = 0;
    while (gguf_next_string(&tokens, &text) && gguf_next_int(&types, &type)) {
        if (type != GGUF_TOKEN_UNKNOWN) continue;
        xd_json_write_key(w, "unk_token");
        xd_json_write_string_n(w, text.data, (size_t)text.size);
        return;
    }
}

static void gguf_json_pieces(xd_json_writer *w, const gguf_vocabulary *v) {
    xd_json_write_key(w, "model");
    gguf_json_typed(w, "BPE");
    gguf_json_unknown(w, v);
    json_field_bool(w, "fuse_unk", true);
    json_field_bool(w, "byte_fallback", true);
    gguf_json_vocab(w, v);
    xd_json_write_key(w, "merges");
    xd_json_write_array(w);
    for (int64_t i = 0; i < v->piece_count; i++) {
        const xd_text left = v->text[v->pieces[i].left], right = v->text[v->pieces[i].right];
        xd_json_write_array(w);
        xd_json_write_string_n(w, left.data, (size_t)left.size);
        xd_json_write_string_n(w, right.data, (size_t)right.size);
        xd_json_write_end(w);
    }
    xd_json_write_end(w);
    xd_json_write_end(w);
}

/* ---- the file ---- */

static void gguf_json_tokenizer(xd_json_writer *w, const gguf_vocabulary *v) {
    gguf_array names = v->tokens, types = v->types;
    xd_text name;
    int64_t type = 0;
    xd_json_write_object(w);
    json_field_string(w, "version", "1.0");
    xd_json_write_key(w, "added_tokens");
    xd_json_write_array(w);
    for (int64_t id = 0; gguf_next_string(&names, &name) && gguf_next_int(&types, &type); id++)
        if (type == GGUF_TOKEN_CONTROL || type == GGUF_TOKEN_USER || type == GGUF_TOKEN_UNKNOWN)
            gguf_json_added(w, name, id, type != GGUF_TOKEN_USER);
    xd_json_write_end(w);
    if (v->rules) {
        gguf_json_pre_tokenizer(w, v->rules);
        xd_json_write_key(w, "decoder");
        gguf_json_byte_level(w, true);
        gguf_json_model(w, v);
    } else {
        gguf_json_blanks(w, v);
        gguf_json_piece_decoder(w, v);
        gguf_json_pieces(w, v);
    }
    xd_json_write_end(w);
}

/* Room for the longest token as a NUL-terminated string. */
static xd_result gguf_key_room(xd_ctx *ctx, gguf_array tokens, char **out) {
    int64_t longest = 0;
    xd_text text;
    while (gguf_next_string(&tokens, &text)) {
        XD_REQUIRE(ctx, text.size == 0 || !memchr(text.data, 0, (size_t)text.size), XD_ERROR_FORMAT,
                   "a token with a zero byte in it");
        if (text.size > longest) longest = text.size;
    }
    *out = (char *)xd_allocate(ctx, (size_t)longest + 1);
    return *out ? XD_OK
                : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a token of %lld bytes", (long long)longest);
}

/* Which split rules the file names; the file keeps the name of smollm's but no other trace of its digits. */
static xd_result gguf_split_rules(xd_ctx *ctx, const gguf *file, const gguf_rules **out) {
    xd_text pre = { "default", 7 };
    (void)gguf_string(file, "tokenizer.ggml.pre", &pre);
    for (int i = 0; i < GGUF_RULES; i++)
        if (gguf_text_is(pre, gguf_rule_table[i].name)) {
            *out = &gguf_rule_table[i];
            return XD_OK;
        }
    return XD_FAIL(ctx, XD_ERROR_UNSUPPORTED,
                   "split rules \"%.*s\": smollm, starcoder, gpt-2, default, llama-bpe and qwen2 are known",
                   gguf_shown(pre), pre.data);
}

static xd_result gguf_json_copy(xd_ctx *ctx, const gguf_vocabulary *v, char **text, size_t *bytes) {
    const char *written = NULL;
    xd_json_writer writer = xd_json_writer_create(ctx);
    gguf_json_tokenizer(&writer, v);
    xd_result result = xd_json_writer_text(&writer, &written, bytes);
    if (result == XD_OK && !(*text = (char *)xd_allocate(ctx, *bytes + 1)))
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a tokenizer of %zu bytes", *bytes);
    if (result == XD_OK) memcpy(*text, written, *bytes);
    xd_json_writer_destroy(&writer);
    return result;
}

/* The merges of byte-level BPE are in the file, those of SentencePiece follow from scores. */
static xd_result gguf_read_rules(xd_ctx *ctx, const gguf *file, xd_text model, gguf_vocabulary *v) {
    gguf_array tokens = v->tokens;
    if (gguf_text_is(model, "gpt2")) {
        (void)gguf_strings(file, "tokenizer.ggml.merges", &v->merges); /* a file leaves out an empty list */
        return gguf_split_rules(ctx, file, &v->rules);
    }
    v->prefix = true;
    (void)gguf_bool(file, "tokenizer.ggml.add_space_prefix", &v->prefix);
    v->text = (xd_text *)xd_allocate(ctx, ((size_t)tokens.left + 1) * sizeof *v->text);
    XD_REQUIRE(ctx, v->text, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)tokens.left);
    for (int64_t id = 0; gguf_next_string(&tokens, &v->text[id]);) id++;
    return gguf_pieces_merges(ctx, file, &v->pieces, &v->piece_count);
}

static xd_result gguf_read_vocabulary(xd_ctx *ctx, const gguf *file, gguf_vocabulary *v) {
    xd_text model = { "", 0 };
    (void)gguf_string(file, "tokenizer.ggml.model", &model);
    XD_REQUIRE(ctx, gguf_text_is(model, "gpt2") || gguf_text_is(model, "llama"), XD_ERROR_UNSUPPORTED,
               "a tokenizer of kind \"%.*s\": gpt2 and llama are known", gguf_shown(model), model.data);
    const bool whole = gguf_strings(file, "tokenizer.ggml.tokens", &v->tokens) &&
                       gguf_ints(file, "tokenizer.ggml.token_type", &v->types);
    XD_REQUIRE(ctx, whole, XD_ERROR_FORMAT, "a tokenizer without tokens or their types");
    XD_TRY(gguf_read_rules(ctx, file, model, v));
    return gguf_key_room(ctx, v->tokens, &v->key);
}

xd_result gguf_model_tokenizer_json(xd_ctx *ctx, const gguf *file, char **text, size_t *bytes) {
    gguf_vocabulary v;
    memset(&v, 0, sizeof v);
    xd_result result = gguf_read_vocabulary(ctx, file, &v);
    if (result == XD_OK) result = gguf_json_copy(ctx, &v, text, bytes);
    xd_release(ctx, v.key);
    xd_release(ctx, v.text);
    xd_release(ctx, v.pieces);
    return result;
}

/* Through the text of a tokenizer.json: the library has one reader for the rules, and one hash. */
xd_result gguf_model_tokenizer(xd_ctx *ctx, const gguf *file, xd_tokenizer **out) {
    char *text = NULL;
    size_t bytes = 0;
    XD_TRY(gguf_model_tokenizer_json(ctx, file, &text, &bytes));
    const xd_tokenizer_desc desc = { .data = text, .data_bytes = bytes };
    const xd_result result = xd_tokenizer_load(ctx, &desc, out);
    xd_release(ctx, text);
    return result;
}
