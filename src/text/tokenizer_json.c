/* Tokenizers from tokenizer.json. */

#include "text/internal.h"

#include <string.h>

/* tokenizer.json, as the tokenizers library of Hugging Face writes it. */

typedef struct xdi_hf_loader {
    xd_ctx *ctx;
    const xd_json *root, *model, *vocab, *merges, *added;
    xd_tokenizer *t;
    bool byte_level;     /* a pre-tokenizer spells bytes as characters, and so does the vocabulary */
    bool finished_split; /* ... it was found: nothing may follow */
    bool marks;          /* blanks are written as U+2581 */
    uint8_t *buffer;     /* of one spelling or one joined pair */
    size_t buffer_bytes;
} xdi_hf_loader;

/* ---- reading members ---- */

static bool xdi_hf_is(const xd_json *value, const char *text) {
    const char *string = xd_json_string(value, NULL);
    return string && strcmp(string, text) == 0;
}

static bool xdi_hf_flag(const xd_json *object, const char *key, bool otherwise) {
    bool value = otherwise;
    (void)xd_json_bool(xd_json_find(object, key), &value);
    return value;
}

static const char *xdi_hf_type(const xd_json *object) {
    const char *type = xd_json_string(xd_json_find(object, "type"), NULL);
    return type ? type : "without type";
}

static bool xdi_hf_is_absent(const xd_json *value) {
    size_t bytes = 1;
    const char *text = xd_json_string(value, &bytes);
    return !value || xd_json_kind_of(value) == XD_JSON_NULL || (text && bytes == 0);
}

/* All bytes of strings below a value: no stage stores more. */
static size_t xdi_hf_string_bytes(const xd_json *value) {
    size_t bytes = 0;
    (void)xd_json_string(value, &bytes);
    for (const xd_json *item = xd_json_first(value); item; item = xd_json_next(item))
        bytes += xdi_hf_string_bytes(item);
    return bytes;
}

/* ---- the byte alphabet ---- */

/* Each byte is spelled by one character: the printable ones of Latin-1 by themselves, the 68 others, in
 * order, by U+0100 and what follows. */
static int xdi_hf_byte_of(uint32_t point) {
    const bool printable =
        (point >= 33 && point <= 126) || (point >= 161 && point <= 172) || (point >= 174 && point < 256);
    if (printable) return (int)point;
    if (point < 256 || point >= 256 + 68) return -1;
    const int rank = (int)point - 256;
    return rank < 33 ? rank : rank < 67 ? rank - 33 + 127 : 173;
}

/* The bytes that a text spells; false when it holds a character that spells none. */
static bool xdi_hf_unspell(const char *text, size_t bytes, uint8_t *out, size_t *out_bytes) {
    const uint8_t *at = (const uint8_t *)text, *const end = at + bytes;
    size_t count = 0;
    while (at < end) {
        uint32_t point;
        at += xdi_utf8_decode(at, end, &point);
        const int byte = xdi_hf_byte_of(point);
        if (byte < 0) return false;
        out[count++] = (uint8_t)byte;
    }
    *out_bytes = count;
    return true;
}

/* ---- vocabulary ---- */

static xd_result xdi_hf_add_token(xdi_hf_loader *l, const xd_json *item) {
    size_t bytes = 0, raw_bytes = 0;
    const char *text = xd_json_key(item, &bytes);
    int64_t id = -1;
    (void)xd_json_int64(item, &id);                                    /* it is one: they were measured */
    if (bytes == 0) return xdi_vocabulary_set_empty(&l->t->vocab, id); /* Whisper's vocabularies have one */
    if (l->byte_level) {
        if (!xdi_hf_unspell(text, bytes, l->buffer, &raw_bytes)) {
            l->t->vocab.strays = true;
            return xdi_vocabulary_set(&l->t->vocab, id, XD_TOKEN_KIND_NORMAL, text, bytes);
        }
        return xdi_vocabulary_add(&l->t->vocab, id, XD_TOKEN_KIND_NORMAL, l->buffer, raw_bytes, NULL, 0);
    }
    const int byte = l->t->byte_fallback ? xdi_tokenizer_fallback_byte((const uint8_t *)text, bytes) : -1;
    if (byte >= 0) {
        const uint8_t raw = (uint8_t)byte;
        return xdi_vocabulary_add(&l->t->vocab, id, XD_TOKEN_KIND_BYTE, text, bytes, &raw, 1);
    }
    raw_bytes = l->marks ? xdi_tokenizer_unmark((const uint8_t *)text, bytes, l->buffer) : bytes;
    return xdi_vocabulary_add(&l->t->vocab, id, XD_TOKEN_KIND_NORMAL, text, bytes,
                              l->marks ? l->buffer : NULL, raw_bytes);
}

static xd_result xdi_hf_add_vocab(xdi_hf_loader *l) {
    for (const xd_json *item = xd_json_first(l->vocab); item; item = xd_json_next(item))
        XD_TRY(xdi_hf_add_token(l, item));
    size_t bytes = 0;
    const char *unknown = xd_json_string(xd_json_find(l->model, "unk_token"), &bytes);
    const xd_json *item = unknown ? xdi_json_find_n(l->vocab, unknown, bytes) : NULL;
    int64_t id = -1;
    if (!item || !xd_json_int64(item, &id)) return XD_OK;
    l->t->vocab.unknown = (int32_t)id;
    l->t->vocab.tokens[id].kind = XD_TOKEN_KIND_UNKNOWN;
    return XD_OK;
}

/* The token of a piece of a merge, as the vocabulary spells it; its bytes are appended to the buffer. */
static int32_t xdi_hf_half(xdi_hf_loader *l, const char *text, size_t bytes, size_t *used) {
    size_t length = bytes;
    if (bytes > l->buffer_bytes - *used) return -1;
    if (!l->byte_level)
        memcpy(l->buffer + *used, text, bytes);
    else if (!xdi_hf_unspell(text, bytes, l->buffer + *used, &length))
        return -1;
    const int32_t id = xdi_vocabulary_piece(&l->t->vocab, l->buffer + *used, length);
    *used += length;
    return id;
}

/* "left right", or ["left", "right"] in newer files. */
static xd_result xdi_hf_add_merge(xdi_hf_loader *l, const xd_json *item, int32_t rank) {
    const char *left, *right;
    size_t left_bytes = 0, right_bytes = 0, used = 0;
    left = xd_json_string(item, &left_bytes);
    if (left) {
        const char *blank = (const char *)memchr(left, ' ', left_bytes);
        right = blank ? blank + 1 : left;
        right_bytes = blank ? left_bytes - (size_t)(right - left) : 0;
        left_bytes = blank ? (size_t)(blank - left) : 0;
    } else {
        left = xd_json_string(xd_json_at(item, 0), &left_bytes);
        right = xd_json_string(xd_json_at(item, 1), &right_bytes);
    }
    XD_REQUIRE(l->ctx, left && right && left_bytes && right_bytes, XD_ERROR_FORMAT,
               "tokenizer.json: merge %d at byte %llu is not two texts", (int)rank,
               (unsigned long long)xd_json_offset(item));
    const int32_t a = xdi_hf_half(l, left, left_bytes, &used), b = xdi_hf_half(l, right, right_bytes, &used);
    const int32_t whole = a < 0 || b < 0 ? -1 : xdi_vocabulary_piece(&l->t->vocab, l->buffer, used);
    XD_REQUIRE(l->ctx, whole >= 0, XD_ERROR_FORMAT,
               "tokenizer.json: merge %d at byte %llu (\"%.40s\", \"%.40s\") is not in the vocabulary",
               (int)rank, (unsigned long long)xd_json_offset(item), left, right);
    return xdi_merges_add(&l->t->merges, a, b, rank, whole);
}

static xd_result xdi_hf_add_added(xdi_hf_loader *l, const xd_json *item) {
    size_t bytes = 0;
    int64_t id = -1, known = -1;
    const char *content = xd_json_string(xd_json_find(item, "content"), &bytes);
    XD_REQUIRE(l->ctx,
               content && xd_json_int64(xd_json_find(item, "id"), &id) && id >= 0 && id < l->t->vocab.size,
               XD_ERROR_FORMAT, "tokenizer.json: added token at byte %llu has no content or no id",
               (unsigned long long)xd_json_offset(item));
    if (bytes == 0) return XD_OK; /* the reference ignores it: no text would end before it */
    const xd_json *entry = xdi_json_find_n(l->vocab, content, bytes);
    if (entry) (void)xd_json_int64(entry, &known);
    XD_REQUIRE(l->ctx, entry ? known == id : l->t->vocab.tokens[id].kind == XD_TOKEN_KIND_NONE,
               XD_ERROR_FORMAT,
               "tokenizer.json: added token \"%.80s\" has id %lld, which the vocabulary uses otherwise",
               content, (long long)id);
    xdi_added added;
    memset(&added, 0, sizeof added);
    added.id = (int32_t)id;
    added.special = xdi_hf_flag(item, "special", false);
    added.strip_left = xdi_hf_flag(item, "lstrip", false);
    added.strip_right = xdi_hf_flag(item, "rstrip", false);
    added.single_word = xdi_hf_flag(item, "single_word", false);
    added.normalized = xdi_hf_flag(item, "normalized", !added.special);
    return xdi_tokenizer_add_special(l->t, &added, content, bytes);
}

/* ---- normalizers and pre-tokenizers ---- */

static xd_result xdi_hf_unsupported(const xdi_hf_loader *l, const char *what, const xd_json *value) {
    return XD_FAIL(l->ctx, XD_ERROR_UNSUPPORTED, "tokenizer.json: %s %.80s at byte %llu is not supported",
                   what, xdi_hf_type(value), (unsigned long long)xd_json_offset(value));
}

/* {"String": ...} or {"Regex": ...}. */
static xd_result xdi_hf_pattern(const xdi_hf_loader *l, const xd_json *stage, const char **text,
                                size_t *bytes, bool *literal) {
    const xd_json *pattern = xd_json_find(stage, "pattern");
    *text = xd_json_string(xd_json_find(pattern, "String"), bytes);
    *literal = *text != NULL;
    if (!*text) *text = xd_json_string(xd_json_find(pattern, "Regex"), bytes);
    XD_REQUIRE(l->ctx, *text && *bytes, XD_ERROR_FORMAT, "tokenizer.json: %.80s at byte %llu has no pattern",
               xdi_hf_type(stage), (unsigned long long)xd_json_offset(stage));
    return XD_OK;
}

static xd_result xdi_hf_add_replace(xdi_hf_loader *l, const xd_json *stage) {
    size_t bytes = 0, to_bytes = 0;
    const char *text, *to = xd_json_string(xd_json_find(stage, "content"), &to_bytes);
    bool literal;
    XD_TRY(xdi_hf_pattern(l, stage, &text, &bytes, &literal));
    XD_REQUIRE(l->ctx, to, XD_ERROR_FORMAT, "tokenizer.json: Replace at byte %llu has no content",
               (unsigned long long)xd_json_offset(stage));
    return xdi_tokenizer_add_rewrite(l->t, XDI_REWRITE_REPLACE, text, bytes, literal, to, to_bytes);
}

static xd_result xdi_hf_add_prepend(xdi_hf_loader *l, const char *text, size_t bytes, bool unless_there,
                                    bool only_first) {
    XD_TRY(xdi_tokenizer_add_rewrite(l->t, XDI_REWRITE_PREPEND, NULL, 0, false, text, bytes));
    xdi_rewrite *rewrite = &l->t->stages.rewrites[l->t->stages.rewrite_count - 1];
    rewrite->unless_there = unless_there;
    rewrite->only_first = only_first;
    l->t->adds_prefix = true;
    return XD_OK;
}

static xd_result xdi_hf_add_normalizer(xdi_hf_loader *l, const xd_json *stage) {
    const xd_json *type = xd_json_find(stage, "type");
    size_t bytes = 0;
    if (!stage || xd_json_kind_of(stage) == XD_JSON_NULL) return XD_OK;
    if (xdi_hf_is(type, "Sequence")) {
        const xd_json *list = xd_json_find(stage, "normalizers");
        for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item))
            XD_TRY(xdi_hf_add_normalizer(l, item));
        return XD_OK;
    }
    if (xdi_hf_is(type, "NFC"))
        return xdi_tokenizer_add_rewrite(l->t, XDI_REWRITE_NFC, NULL, 0, false, "", 0);
    if (xdi_hf_is(type, "NFKC"))
        return xdi_tokenizer_add_rewrite(l->t, XDI_REWRITE_NFKC, NULL, 0, false, "", 0);
    if (xdi_hf_is(type, "Replace")) return xdi_hf_add_replace(l, stage);
    const char *prepend = xd_json_string(xd_json_find(stage, "prepend"), &bytes);
    if (xdi_hf_is(type, "Prepend") && prepend) return xdi_hf_add_prepend(l, prepend, bytes, false, false);
    return xdi_hf_unsupported(l, "normalizer", stage);
}

static xd_result xdi_hf_add_split(xdi_hf_loader *l, const xd_json *stage) {
    static const char *const names[] = { "Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                                         "MergedWithNext" };
    const xd_json *behavior = xd_json_find(stage, "behavior");
    const char *text;
    size_t bytes = 0;
    bool literal;
    XD_TRY(xdi_hf_pattern(l, stage, &text, &bytes, &literal));
    for (int i = 0; i < 5; i++)
        if (xdi_hf_is(behavior, names[i]))
            return xdi_tokenizer_add_split(l->t, text, bytes, literal,
                                           (xdi_split_behavior)(XDI_SPLIT_ISOLATED + i),
                                           xdi_hf_flag(stage, "invert", false));
    return XD_FAIL(l->ctx, XD_ERROR_FORMAT, "tokenizer.json: Split at byte %llu has no known behavior",
                   (unsigned long long)xd_json_offset(stage));
}

/* A pre-tokenizer that changes the text can be the first only: pieces are not changed one by one here. */
static xd_result xdi_hf_check_first(const xdi_hf_loader *l, const xd_json *stage) {
    XD_REQUIRE(l->ctx, l->t->stages.split_count == 0, XD_ERROR_UNSUPPORTED,
               "tokenizer.json: %.80s at byte %llu adds to the text after another pre-tokenizer, which is "
               "not supported",
               xdi_hf_type(stage), (unsigned long long)xd_json_offset(stage));
    return XD_OK;
}

static xd_result xdi_hf_add_byte_level(xdi_hf_loader *l, const xd_json *stage) {
    static const char pattern[] =
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    l->finished_split = true;
    if (xdi_hf_flag(stage, "add_prefix_space", true)) {
        XD_TRY(xdi_hf_check_first(l, stage));
        XD_TRY(xdi_hf_add_prepend(l, " ", 1, true, false));
    }
    if (!xdi_hf_flag(stage, "use_regex", true)) return XD_OK;
    return xdi_tokenizer_add_split(l->t, pattern, sizeof pattern - 1, false, XDI_SPLIT_ISOLATED, false);
}

static xd_result xdi_hf_add_metaspace(xdi_hf_loader *l, const xd_json *stage) {
    size_t bytes = 0;
    const char *mark = xd_json_string(xd_json_find(stage, "replacement"), &bytes);
    const xd_json *scheme = xd_json_find(stage, "prepend_scheme");
    const bool first = xdi_hf_is(scheme, "first");
    const bool always = scheme ? xdi_hf_is(scheme, "always") : xdi_hf_flag(stage, "add_prefix_space", true);
    XD_REQUIRE(l->ctx, mark && bytes, XD_ERROR_FORMAT,
               "tokenizer.json: Metaspace at byte %llu has no replacement",
               (unsigned long long)xd_json_offset(stage));
    XD_TRY(xdi_hf_check_first(l, stage));
    XD_TRY(xdi_tokenizer_add_rewrite(l->t, XDI_REWRITE_REPLACE, " ", 1, true, mark, bytes));
    if (first || always) XD_TRY(xdi_hf_add_prepend(l, mark, bytes, true, first));
    if (!xdi_hf_flag(stage, "split", true)) return XD_OK;
    return xdi_tokenizer_add_split(l->t, mark, bytes, true, XDI_SPLIT_WITH_NEXT, false);
}

static xd_result xdi_hf_add_pre_tokenizer(xdi_hf_loader *l, const xd_json *stage) {
    const xd_json *type = xd_json_find(stage, "type");
    if (!stage || xd_json_kind_of(stage) == XD_JSON_NULL) return XD_OK;
    if (xdi_hf_is(type, "Sequence")) {
        const xd_json *list = xd_json_find(stage, "pretokenizers");
        for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item))
            XD_TRY(xdi_hf_add_pre_tokenizer(l, item));
        return XD_OK;
    }
    if (l->finished_split) return xdi_hf_unsupported(l, "a pre-tokenizer after ByteLevel:", stage);
    if (xdi_hf_is(type, "Split")) return xdi_hf_add_split(l, stage);
    if (xdi_hf_is(type, "ByteLevel")) return xdi_hf_add_byte_level(l, stage);
    if (xdi_hf_is(type, "Metaspace")) return xdi_hf_add_metaspace(l, stage);
    if (!xdi_hf_is(type, "Digits")) return xdi_hf_unsupported(l, "pre-tokenizer", stage);
    const char *pattern = xdi_hf_flag(stage, "individual_digits", false) ? "\\p{N}" : "\\p{N}+";
    return xdi_tokenizer_add_split(l->t, pattern, strlen(pattern), false, XDI_SPLIT_ISOLATED, false);
}

/* Does a stage or one inside it have this type? */
static bool xdi_hf_has(const xd_json *stage, const char *list, const char *type) {
    if (xdi_hf_is(xd_json_find(stage, "type"), type)) return true;
    for (const xd_json *item = xd_json_first(xd_json_find(stage, list)); item; item = xd_json_next(item))
        if (xdi_hf_has(item, list, type)) return true;
    return false;
}

/* ---- post-processors ---- */

/* One token of a post-processor: its id must be one of the vocabulary, which is complete. */
static xd_result xdi_hf_put_around(xdi_hf_loader *l, const xd_json *stage, const xd_json *id, bool behind) {
    int64_t value = -1;
    XD_REQUIRE(l->ctx, xd_json_int64(id, &value), XD_ERROR_FORMAT,
               "tokenizer.json: %.80s at byte %llu has a token without id", xdi_hf_type(stage),
               (unsigned long long)xd_json_offset(stage));
    XD_REQUIRE(l->ctx,
               value >= 0 && value < l->t->vocab.size && l->t->vocab.tokens[value].kind != XD_TOKEN_KIND_NONE,
               XD_ERROR_FORMAT,
               "tokenizer.json: %.80s adds id %lld at byte %llu, which is no token; ids are in 0 to %d",
               xdi_hf_type(stage), (long long)value, (unsigned long long)xd_json_offset(id),
               (int)l->t->vocab.size - 1);
    xdi_around_put(&l->t->around, (int32_t)value, behind);
    return XD_OK;
}

/* {"Sequence": {"id": "A"}}: the text, or {"SpecialToken": {"id": name}}, whose ids are in a table. */
static xd_result xdi_hf_add_template_piece(xdi_hf_loader *l, const xd_json *stage, const xd_json *piece,
                                           bool *behind) {
    const xd_json *text = xd_json_find(piece, "Sequence"), *token = xd_json_find(piece, "SpecialToken");
    const unsigned long long offset = (unsigned long long)xd_json_offset(piece);
    size_t bytes = 0;
    const char *name = xd_json_string(xd_json_find(text ? text : token, "id"), &bytes);
    XD_REQUIRE(
        l->ctx, name && !(text && token), XD_ERROR_FORMAT,
        "tokenizer.json: the piece at byte %llu of a template is neither a Sequence nor a SpecialToken",
        offset);
    if (text) {
        XD_REQUIRE(l->ctx, strcmp(name, "A") == 0 && !*behind, XD_ERROR_FORMAT,
                   "tokenizer.json: sequence %.80s at byte %llu of a single template, which has A once", name,
                   offset);
        *behind = true;
        return XD_OK;
    }
    const xd_json *entry = xdi_json_find_n(xd_json_find(stage, "special_tokens"), name, bytes);
    const xd_json *ids = xd_json_find(entry, "ids");
    XD_REQUIRE(l->ctx, xd_json_kind_of(ids) == XD_JSON_ARRAY, XD_ERROR_FORMAT,
               "tokenizer.json: special token \"%.80s\" at byte %llu of a template has no ids in its table",
               name, offset);
    for (const xd_json *id = xd_json_first(ids); id && !l->t->around.refusal[0]; id = xd_json_next(id))
        XD_TRY(xdi_hf_put_around(l, stage, id, *behind));
    return XD_OK;
}

static xd_result xdi_hf_add_template(xdi_hf_loader *l, const xd_json *stage) {
    const xd_json *single = xd_json_find(stage, "single");
    bool behind = false;
    XD_REQUIRE(l->ctx, xd_json_kind_of(single) == XD_JSON_ARRAY, XD_ERROR_FORMAT,
               "tokenizer.json: TemplateProcessing at byte %llu has no list of pieces called single",
               (unsigned long long)xd_json_offset(stage));
    for (const xd_json *piece = xd_json_first(single); piece; piece = xd_json_next(piece))
        XD_TRY(xdi_hf_add_template_piece(l, stage, piece, &behind));
    XD_REQUIRE(l->ctx, behind, XD_ERROR_FORMAT,
               "tokenizer.json: the single template of TemplateProcessing at byte %llu has no sequence A",
               (unsigned long long)xd_json_offset(stage));
    return XD_OK;
}

/* ["[CLS]", id] before the text and ["[SEP]", id] after it. */
static xd_result xdi_hf_add_cls_and_sep(xdi_hf_loader *l, const xd_json *stage) {
    XD_TRY(xdi_hf_put_around(l, stage, xd_json_at(xd_json_find(stage, "cls"), 1), false));
    return xdi_hf_put_around(l, stage, xd_json_at(xd_json_find(stage, "sep"), 1), true);
}

static xd_result xdi_hf_add_post_processor(xdi_hf_loader *l, const xd_json *stage) {
    const xd_json *type = xd_json_find(stage, "type"), *list = xd_json_find(stage, "processors");
    XD_REQUIRE(l->ctx, xd_json_kind_of(type) == XD_JSON_STRING, XD_ERROR_FORMAT,
               "tokenizer.json: the post-processor at byte %llu has no type",
               (unsigned long long)xd_json_offset(stage));
    if (xdi_hf_is(type, "Sequence")) {
        XD_REQUIRE(l->ctx, xd_json_kind_of(list) == XD_JSON_ARRAY, XD_ERROR_FORMAT,
                   "tokenizer.json: the post-processor Sequence at byte %llu has no processors",
                   (unsigned long long)xd_json_offset(stage));
        for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item))
            XD_TRY(xdi_hf_add_post_processor(l, item));
        return XD_OK;
    }
    if (xdi_hf_is(type, "ByteLevel")) return XD_OK;    /* trims offsets; our spans keep their blanks */
    if (l->t->around.before + l->t->around.behind > 0) /* the result of the reference has no meaning here */
        xdi_around_refuse(&l->t->around, "post-processor behind another:", xdi_hf_type(stage));
    if (xdi_hf_is(type, "TemplateProcessing")) return xdi_hf_add_template(l, stage);
    if (xdi_hf_is(type, "BertProcessing") || xdi_hf_is(type, "RobertaProcessing"))
        return xdi_hf_add_cls_and_sep(l, stage);
    xdi_around_refuse(&l->t->around, "unsupported post-processor", xdi_hf_type(stage));
    return XD_OK;
}

static xd_result xdi_hf_fill_around(xdi_hf_loader *l) {
    const xd_json *stage = xd_json_find(l->root, "post_processor");
    xd_tokenizer *t = l->t;
    if (!stage || xd_json_kind_of(stage) == XD_JSON_NULL) return XD_OK;
    XD_TRY(xdi_hf_add_post_processor(l, stage));
    if (t->around.refusal[0]) return XD_OK;
    if (t->around.before) t->bos = t->around.ids[0];
    if (t->around.behind) t->eos = t->around.ids[t->around.before + t->around.behind - 1];
    return XD_OK;
}

/* ---- the whole file ---- */

static xd_result xdi_hf_check_model(xdi_hf_loader *l) {
    static const char *const absent[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    const xd_json *type = xd_json_find(l->model, "type");
    double dropout = 0.0;
    XD_REQUIRE(l->ctx, xd_json_kind_of(l->model) == XD_JSON_OBJECT, XD_ERROR_FORMAT,
               "tokenizer.json: no model");
    XD_REQUIRE(l->ctx, !type || xdi_hf_is(type, "BPE"), XD_ERROR_UNSUPPORTED,
               "tokenizer.json: model %.80s is not supported, only BPE is", xdi_hf_type(l->model));
    XD_REQUIRE(l->ctx,
               xd_json_kind_of(l->vocab) == XD_JSON_OBJECT && xd_json_kind_of(l->merges) == XD_JSON_ARRAY,
               XD_ERROR_FORMAT, "tokenizer.json: the model lacks vocab or merges");
    for (int i = 0; i < 2; i++)
        XD_REQUIRE(l->ctx, xdi_hf_is_absent(xd_json_find(l->model, absent[i])), XD_ERROR_UNSUPPORTED,
                   "tokenizer.json: %s is not supported", absent[i]);
    (void)xd_json_double(xd_json_find(l->model, "dropout"), &dropout);
    XD_REQUIRE(l->ctx, dropout == 0.0, XD_ERROR_UNSUPPORTED, "tokenizer.json: dropout %g is not supported",
               dropout);
    return XD_OK;
}

/* The largest id, the bytes of all texts and the longest one. */
static xd_result xdi_hf_measure(xdi_hf_loader *l, const xd_tokenizer_desc *desc, int64_t *size,
                                size_t *bytes) {
    size_t length = 0, longest = 0;
    int64_t id;
    *size = 0;
    *bytes = xdi_hf_string_bytes(xd_json_find(l->root, "normalizer"));
    *bytes += 2 * xdi_hf_string_bytes(xd_json_find(l->root, "pre_tokenizer")) + 16;
    for (const xd_json *item = xd_json_first(l->vocab); item; item = xd_json_next(item)) {
        const char *text = xd_json_key(item, &length);
        XD_REQUIRE(l->ctx, xd_json_int64(item, &id), XD_ERROR_FORMAT,
                   "tokenizer.json: \"%.80s\" has no id at byte %llu", text,
                   (unsigned long long)xd_json_offset(item));
        *bytes += 2 * length;
        if (length > longest) longest = length;
        if (id >= *size) *size = id == INT64_MAX ? id : id + 1;
    }
    for (const xd_json *item = xd_json_first(l->added); item; item = xd_json_next(item)) {
        length = 0;
        (void)xd_json_string(xd_json_find(item, "content"), &length);
        *bytes += 8 * length; /* once unchanged, and once more with memory to grow by normalisation */
        if (xd_json_int64(xd_json_find(item, "id"), &id) && id >= *size && id < INT64_MAX) *size = id + 1;
    }
    XD_TRY(xdi_tokenizer_measure_specials(l->ctx, desc, size, bytes));
    l->buffer_bytes = 2 * longest + 2;
    l->buffer = (uint8_t *)xd_allocate(l->ctx, l->buffer_bytes);
    XD_REQUIRE(l->ctx, l->buffer, XD_ERROR_MEMORY, "no room for a token of %llu bytes",
               (unsigned long long)longest);
    return XD_OK;
}

static xd_result xdi_hf_fill(xdi_hf_loader *l, const xd_tokenizer_desc *desc) {
    xd_tokenizer *t = l->t;
    int32_t rank = 0;
    t->vocab.byte_level = l->byte_level;
    t->byte_fallback = xdi_hf_flag(l->model, "byte_fallback", false);
    t->fuse_unknown = xdi_hf_flag(l->model, "fuse_unk", false);
    t->ignore_merges = xdi_hf_flag(l->model, "ignore_merges", false);
    t->ends_lines = true; /* Oniguruma */
    XD_TRY(xdi_hf_add_normalizer(l, xd_json_find(l->root, "normalizer")));
    t->stages.normalizer_count = t->stages.rewrite_count;
    XD_TRY(xdi_hf_add_pre_tokenizer(l, xd_json_find(l->root, "pre_tokenizer")));
    for (int i = 0; i < t->stages.rewrite_count; i++) {
        const xdi_rewrite *w = &t->stages.rewrites[i];
        if (w->to_bytes == 3 && memcmp(t->vocab.blob + w->to, XDI_TOKENIZER_MARK, 3) == 0) l->marks = true;
    }
    XD_TRY(xdi_hf_add_vocab(l));
    for (const xd_json *item = xd_json_first(l->merges); item; item = xd_json_next(item))
        XD_TRY(xdi_hf_add_merge(l, item, rank++));
    for (const xd_json *item = xd_json_first(l->added); item; item = xd_json_next(item))
        XD_TRY(xdi_hf_add_added(l, item));
    XD_TRY(xdi_tokenizer_add_specials(t, desc));
    XD_TRY(xdi_hf_fill_around(l));
    return xdi_tokenizer_finish(t);
}

XD_PRIVATE xd_result xdi_tokenizer_load_json(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                             const xd_tokenizer_desc *desc, xd_tokenizer **out) {
    xdi_hf_loader l;
    int64_t size = 0;
    size_t bytes = 0;
    memset(&l, 0, sizeof l);
    l.ctx = ctx;
    l.root = file->root;
    l.model = xd_json_find(file->root, "model");
    l.vocab = xd_json_find(l.model, "vocab");
    l.merges = xd_json_find(l.model, "merges");
    l.added = xd_json_find(file->root, "added_tokens");
    l.byte_level = xdi_hf_has(xd_json_find(file->root, "pre_tokenizer"), "pretokenizers", "ByteLevel");
    XD_TRY(xdi_hf_check_model(&l));
    xd_result result = xdi_hf_measure(&l, desc, &size, &bytes);
    if (result == XD_OK) result = xdi_tokenizer_begin(ctx, size, bytes, &l.t);
    if (result == XD_OK) result = xdi_hf_fill(&l, desc);
    xd_release(ctx, l.buffer);
    if (result == XD_OK)
        *out = l.t;
    else
        xd_tokenizer_destroy(l.t);
    return result;
}
