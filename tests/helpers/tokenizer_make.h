/* tokenizer_make.h - for the suites of the tokenizers: makes tokenizer files, and reads encodings. */
#ifndef TOKENIZER_MAKE_H
#define TOKENIZER_MAKE_H

#include "xd_test.h"
#include "makers.h"

#include <stdlib.h>

static inline xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

/* ---- making files ---- */

/* A text that is built up; the longest file of this suite has 20 kB. */
typedef struct file {
    char text[65536];
    size_t bytes;
} file;

static inline void put(file *f, const char *text) {
    const size_t length = strlen(text);
    memcpy(f->text + f->bytes, text, length + 1);
    f->bytes += length;
}

/* The spelling of a byte in a byte-level vocabulary, as UTF-8. */
static inline void put_spelling(file *f, int byte) {
    char utf8[3] = { 0, 0, 0 };
    int point = byte;
    if (byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)
        point = 256 + (byte <= 32 ? byte : byte <= 160 ? byte - 127 + 33 : 67);
    if (byte == '"' || byte == '\\') put(f, "\\");
    if (point < 128) {
        utf8[0] = (char)point;
    } else {
        utf8[0] = (char)(0xc0 | point >> 6);
        utf8[1] = (char)(0x80 | (point & 63));
    }
    put(f, utf8);
}

/* Removes "left right" and the bar after it from a list. */
static inline bool next_merge(const char **list, char left[64], char right[64]) {
    int read = 0;
    if (sscanf(*list, "%63[^ ] %63[^|]%n", left, right, &read) != 2) return false;
    *list += read;
    if (**list == '|') (*list)++;
    return true;
}

/* Ids 0 to 255 are the bytes; merge i of the list (in its spelling, "a b|ab c|...") makes id 256 + i. */
static inline const file *byte_level_with(const char *normalizer, const char *pre_tokenizer,
                                          const char *model, const char *added, const char *merges,
                                          bool pairs) {
    static file f;
    char number[32], left[64], right[64];
    int id = 256;
    f.bytes = 0;
    put(&f, "{\"version\":\"1.0\",\"added_tokens\":[");
    put(&f, added);
    put(&f, "],\"normalizer\":");
    put(&f, normalizer);
    put(&f, ",\"pre_tokenizer\":");
    put(&f, pre_tokenizer);
    put(&f, ",\"model\":{\"type\":\"BPE\",");
    put(&f, model);
    put(&f, "\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        put(&f, byte ? ",\"" : "\"");
        put_spelling(&f, byte);
        snprintf(number, sizeof number, "\":%d", byte);
        put(&f, number);
    }
    for (const char *m = merges; next_merge(&m, left, right);) {
        put(&f, ",\"");
        put(&f, left);
        put(&f, right);
        snprintf(number, sizeof number, "\":%d", id++);
        put(&f, number);
    }
    put(&f, "},\"merges\":[");
    const char *comma = "";
    for (const char *m = merges; next_merge(&m, left, right); comma = ",") {
        put(&f, comma);
        put(&f, pairs ? "[\"" : "\"");
        put(&f, left);
        put(&f, pairs ? "\",\"" : " ");
        put(&f, right);
        put(&f, pairs ? "\"]" : "\"");
    }
    put(&f, "]}}");
    return &f;
}

#define PLAIN_BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define GPT2_BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"

static inline const file *byte_level(const char *pre_tokenizer, const char *merges) {
    return byte_level_with("null", pre_tokenizer, "", "", merges, false);
}

/* A file made here, with a post-processor. */
static inline const file *with_post_processor(const file *plain, const char *post) {
    static file f;
    f.bytes = 0;
    put(&f, "{\"post_processor\":");
    put(&f, post);
    put(&f, ",");
    put(&f, plain->text + 1);
    return &f;
}

/* ---- using them ---- */

typedef struct fixture {
    xd_ctx *ctx;
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
} fixture;

static inline fixture load_with(const void *data, size_t bytes, const xd_tokenizer_desc *desc) {
    fixture f = { new_ctx(), NULL, NULL };
    if (tokenizer_load_memory(f.ctx, data, bytes, desc, &f.tokenizer) != XD_OK)
        CHECK_EQ_STR(xd_last_error(f.ctx)->message, "");
    else
        CHECK_EQ_INT(encoder_create(f.ctx, f.tokenizer, &f.encoder), XD_OK);
    return f;
}

static inline fixture load(const file *data) {
    return load_with(data->text, data->bytes, NULL);
}

static inline void unload(fixture *f) {
    xd_encoder_destroy(f->encoder);
    xd_tokenizer_destroy(f->tokenizer);
    xd_ctx_destroy(f->ctx);
}

/* "id id ..." or, with spans, "id:begin-end ...". */
static inline const char *ids_of(const fixture *f, const char *text, bool special, bool spans) {
    static char out[8192];
    const xd_encode_desc desc = { special, !spans, false, false };
    xd_encoding e = { 0, NULL, NULL, NULL };
    size_t used = 0;
    out[0] = '\0';
    if (!f->encoder) return "no encoder";
    if (xd_encode(f->encoder, text, strlen(text), &desc, &e) != XD_OK) return xd_last_error(f->ctx)->message;
    CHECK((e.spans != NULL) == spans);
    for (int64_t i = 0; i < e.count && used < sizeof out - 64; i++) {
        used += (size_t)snprintf(out + used, 64, i ? " %d" : "%d", (int)e.ids[i]);
        if (spans)
            used += (size_t)snprintf(out + used, 48, ":%d-%d", (int)e.spans[i].begin, (int)e.spans[i].end);
    }
    return out;
}

static inline const char *ids(const fixture *f, const char *text) {
    return ids_of(f, text, false, false);
}
static inline const char *spans(const fixture *f, const char *text) {
    return ids_of(f, text, false, true);
}

/* Encodes and decodes: the same bytes again? Spans must tile the text. */
static inline bool survives(const fixture *f, const char *text, size_t bytes) {
    char back[4096];
    xd_encoding e;
    size_t length = 0;
    int64_t at = 0;
    if (xd_encode(f->encoder, text, bytes, NULL, &e) != XD_OK) return false;
    for (int64_t i = 0; i < e.count; at = e.spans[i++].end)
        if (e.spans[i].begin != at || e.spans[i].end < at) return false;
    if (at != (int64_t)bytes) return false;
    if (xd_tokenizer_decode(
            f->ctx, f->tokenizer,
            &(xd_decode_desc){ .ids = e.ids, .count = e.count, .out = back, .capacity = sizeof back },
            &length) != XD_OK)
        return false;
    return length == bytes && memcmp(back, text, bytes) == 0;
}

/* The file is refused with this result and a message that holds `expected`. It is in memory of exactly its size. */
static inline void refuse_with(const void *data, size_t bytes, const xd_tokenizer_desc *desc,
                               xd_result result, const char *expected) {
    xd_ctx *ctx = new_ctx();
    xd_tokenizer *tokenizer = NULL;
    void *copy = malloc(bytes + 1);
    memcpy(copy, data, bytes);
    CHECK_EQ_INT(tokenizer_load_memory(ctx, copy, bytes, desc, &tokenizer), result);
    CHECK(tokenizer == NULL);
    if (!strstr(xd_last_error(ctx)->message, expected)) CHECK_EQ_STR(xd_last_error(ctx)->message, expected);
    free(copy);
    xd_ctx_destroy(ctx);
}

static inline void refuse(const file *f, xd_result result, const char *expected) {
    refuse_with(f->text, f->bytes, NULL, result, expected);
}

/* Every prefix of a file is refused, or is a valid file; nothing worse happens. */
static inline void cut_everywhere(const void *data, size_t bytes, const xd_tokenizer_desc *desc,
                                  size_t step) {
    xd_ctx *ctx = new_ctx();
    for (size_t length = 0; length < bytes; length += step) {
        xd_tokenizer *tokenizer = NULL;
        void *copy = malloc(length + 1);
        memcpy(copy, data, length);
        if (tokenizer_load_memory(ctx, copy, length, desc, &tokenizer) != XD_OK) CHECK(tokenizer == NULL);
        xd_tokenizer_destroy(tokenizer);
        free(copy);
    }
    xd_ctx_destroy(ctx);
}

#define ADDED(id, content, special, flags) \
    "{\"id\":" #id ",\"content\":\"" content "\",\"special\":" #special ",\"normalized\":false" flags "}"

/* ---- characters as symbols ---- */

#define MARK "\xe2\x96\x81"

/* Like Llama 2: 0 unknown, 1 and 2 special, 3 to 258 bytes, then characters and merges. */
static inline const file *sentence_like(const char *stages, const char *flags, bool bytes) {
    static file f;
    char line[64];
    f.bytes = 0;
    put(&f, "{\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true,\"normalized\":false}],");
    put(&f, stages);
    put(&f, ",\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",");
    put(&f, flags);
    put(&f, "\"vocab\":{\"<unk>\":0,\"<s>\":1,\"</s>\":2");
    for (int i = 0; i < 256 && bytes; i++) {
        snprintf(line, sizeof line, ",\"<0x%02X>\":%d", i, 3 + i);
        put(&f, line);
    }
    put(&f, ",\"" MARK "\":259,\"h\":260,\"i\":261,\"\xc3\xa9\":262,\"hi\":263,\"" MARK
            "hi\":264,\"" MARK MARK "\":265},\"merges\":[\"h i\",\"" MARK " hi\",\"" MARK " " MARK "\"]}}");
    return &f;
}

#define LLAMA_NORMALIZER                                                                               \
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"" MARK \
    "\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"" MARK "\"}]}"
#define FALLBACK "\"byte_fallback\":true,\"fuse_unk\":true,"

#endif
