/* The tokenizer of a GGUF file of the kind "llama", pieces and scores, beside the SentencePiece model with the same pieces. */
#include "xd_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../examples/common/gguf.c"
#include "../examples/common/gguf_model.c"
#include "../examples/common/gguf_pieces.c"
#include "../examples/common/gguf_tokenizer.c"
#include "../examples/nn/nn_model.c"

typedef struct piece {
    char text[16];
    float score;
    int kind; /* a gguf_token_kind, which is SentencePiece's, too */
} piece;

enum { MOST = 320, ROOM = 1 << 15 };

/* Bytes of a file that is being made. */
typedef struct maker {
    uint8_t data[ROOM];
    size_t bytes;
} maker;

#define MARK "\xe2\x96\x81"

/* Unknown, two controls, 256 bytes, and a few words whose scores are their ranks. */
static int make_pieces(piece *out) {
    static const char *const words[] = { MARK "t",  "he",  "in",   MARK "the", "nt",  "int",
                                         MARK MARK, "er",  "ent",  MARK "int", "ing", "\xc3\xa9",
                                         "nin",     "tin", "thin", "ti" };
    static const char letters[] = "theingra.";
    int count = 0;
    out[count++] = (piece){ "<unk>", 0.0f, GGUF_TOKEN_UNKNOWN };
    out[count++] = (piece){ "<s>", 0.0f, GGUF_TOKEN_CONTROL };
    out[count++] = (piece){ "</s>", 0.0f, GGUF_TOKEN_CONTROL };
    for (int b = 0; b < 256; b++) {
        out[count].score = 0.0f;
        out[count].kind = GGUF_TOKEN_BYTE;
        snprintf(out[count++].text, sizeof out->text, "<0x%02X>", (unsigned)b);
    }
    for (int i = 0; i < (int)(sizeof words / sizeof words[0]); i++) {
        out[count].score = -(float)i;
        out[count].kind = GGUF_TOKEN_NORMAL;
        snprintf(out[count++].text, sizeof out->text, "%s", words[i]);
    }
    out[count++] = (piece){ MARK, -100.0f, GGUF_TOKEN_NORMAL };
    for (int i = 0; letters[i]; i++)
        out[count++] = (piece){ { letters[i], 0 }, -101.0f - (float)i, GGUF_TOKEN_NORMAL };
    return count;
}

/* ---- GGUF ---- */

static void put(maker *m, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) m->data[m->bytes++] = (uint8_t)(value >> (8 * i));
}

static void put_f32(maker *m, float value) {
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    put(m, bits, 4);
}

static void put_bytes(maker *m, const void *data, size_t bytes) {
    memcpy(m->data + m->bytes, data, bytes);
    m->bytes += bytes;
}

static void put_text(maker *m, const char *text) {
    put(m, strlen(text), 8);
    put_bytes(m, text, strlen(text));
}

static void put_array(maker *m, const char *key, uint32_t element, int count) {
    put_text(m, key);
    put(m, 9, 4);
    put(m, element, 4);
    put(m, (uint64_t)count, 8);
}

/* `scores`: how many of them the file has. */
static void make_gguf(maker *m, const piece *pieces, int count, int scores) {
    m->bytes = 0;
    put_bytes(m, "GGUF", 4);
    put(m, 3, 4);
    put(m, 0, 8);
    put(m, 4, 8);
    put_text(m, "tokenizer.ggml.model"), put(m, 8, 4), put_text(m, "llama");
    put_array(m, "tokenizer.ggml.tokens", 8, count);
    for (int i = 0; i < count; i++) put_text(m, pieces[i].text);
    put_array(m, "tokenizer.ggml.scores", 6, scores);
    for (int i = 0; i < scores; i++) put_f32(m, pieces[i].score);
    put_array(m, "tokenizer.ggml.token_type", 5, count);
    for (int i = 0; i < count; i++) put(m, (uint64_t)pieces[i].kind, 4);
}

/* ---- SentencePiece ---- */

/* Every message here is shorter than 128 bytes. */
static void put_message(maker *m, int field, const maker *inside) {
    put(m, (uint64_t)(field << 3 | 2), 1);
    put(m, inside->bytes, 1);
    put_bytes(m, inside->data, inside->bytes);
}

static void put_number(maker *m, int field, int value) {
    const int tag = field << 3;
    if (tag < 128) put(m, (uint64_t)tag, 1);
    if (tag >= 128) put(m, (uint64_t)(tag & 127) | 128, 1), put(m, (uint64_t)(tag >> 7), 1);
    put(m, (uint64_t)value, 1);
}

static void make_model(maker *m, const piece *pieces, int count) {
    static maker inside;
    m->bytes = 0;
    for (int i = 0; i < count; i++) {
        inside.bytes = 0;
        put(&inside, 1 << 3 | 2, 1);
        put(&inside, strlen(pieces[i].text), 1);
        put_bytes(&inside, pieces[i].text, strlen(pieces[i].text));
        put(&inside, 2 << 3 | 5, 1);
        put_f32(&inside, pieces[i].score);
        put_number(&inside, 3, pieces[i].kind);
        put_message(m, 1, &inside);
    }
    inside.bytes = 0;
    put_number(&inside, 3, 2);  /* BPE */
    put_number(&inside, 35, 1); /* bytes */
    put_message(m, 2, &inside);
    inside.bytes = 0;
    put_number(&inside, 3, 1); /* a blank before the text */
    put_number(&inside, 4, 0);
    put_number(&inside, 5, 1);
    put_message(m, 3, &inside);
}

/* ---- tests ---- */

static xd_encoder *encoder_of(xd_ctx *ctx, const xd_tokenizer *tokenizer) {
    xd_encoder *encoder = NULL;
    CHECK_EQ_INT(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder), XD_OK);
    return encoder;
}

XD_TEST(pieces_of_a_gguf_file_encode_as_the_sentencepiece_model) {
    static const char *const texts[] = { "the inner thing",      "  tin",
                                         "nint int  enting the", "caf\xc3\xa9 ring",
                                         "\xf0\x9f\x99\x82",     "a\n\tthe",
                                         "thethethe ninnin" };
    static maker file_bytes, model_bytes;
    static piece pieces[MOST];
    const int count = make_pieces(pieces);
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    xd_tokenizer *ours = NULL, *theirs = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    make_gguf(&file_bytes, pieces, count, count);
    make_model(&model_bytes, pieces, count);
    CHECK_EQ_INT(gguf_parse(ctx, file_bytes.data, file_bytes.bytes, &file), XD_OK);
    CHECK_EQ_INT(gguf_model_tokenizer(ctx, file, &ours), XD_OK);
    CHECK_EQ_INT(
        xd_tokenizer_load(
            ctx, &(xd_tokenizer_desc){ .data = model_bytes.data, .data_bytes = model_bytes.bytes }, &theirs),
        XD_OK);
    CHECK_EQ_INT(xd_tokenizer_describe(ours).size, count);
    CHECK(xd_tokenizer_token(ours, 1).kind == XD_TOKEN_KIND_SPECIAL);
    xd_encoder *one = encoder_of(ctx, ours), *other = encoder_of(ctx, theirs);
    for (int i = 0; i < (int)(sizeof texts / sizeof texts[0]); i++) {
        xd_encoding a = { 0, NULL, NULL, NULL }, b = { 0, NULL, NULL, NULL };
        char text[64];
        size_t length = 0;
        CHECK_EQ_INT(xd_encode(one, texts[i], strlen(texts[i]), NULL, &a), XD_OK);
        CHECK_EQ_INT(xd_encode(other, texts[i], strlen(texts[i]), NULL, &b), XD_OK);
        CHECK(a.count == b.count && memcmp(a.ids, b.ids, (size_t)a.count * sizeof *a.ids) == 0);
        const xd_decode_desc desc = { .ids = a.ids, .count = a.count, .out = text, .capacity = sizeof text };
        CHECK_EQ_INT(xd_tokenizer_decode(ctx, ours, &desc, &length), XD_OK);
        CHECK(length == strlen(texts[i]) && memcmp(text, texts[i], length) == 0);
    }
    xd_encoder_destroy(one);
    xd_encoder_destroy(other);
    xd_tokenizer_destroy(ours);
    xd_tokenizer_destroy(theirs);
    gguf_close(file);
    xd_ctx_destroy(ctx);
}

XD_TEST(fewer_scores_than_pieces_are_an_error_with_both_numbers) {
    static maker bytes;
    static piece pieces[MOST];
    const int count = make_pieces(pieces);
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    xd_tokenizer *tokenizer = NULL;
    char message[64];
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    make_gguf(&bytes, pieces, count, count - 1);
    CHECK_EQ_INT(gguf_parse(ctx, bytes.data, bytes.bytes, &file), XD_OK);
    CHECK_EQ_INT(gguf_model_tokenizer(ctx, file, &tokenizer), XD_ERROR_FORMAT);
    snprintf(message, sizeof message, "%d tokens with %d scores", count, count - 1);
    CHECK(strstr(xd_last_error(ctx)->message, message) != NULL);
    gguf_close(file);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
