/* xd_encode_desc.pieces: the parts of a text that no token crosses. */
#include "xdistill.h"
#include "xd_test.h"

#include <string.h>

typedef struct fixture {
    xd_ctx *ctx;
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
} fixture;

static fixture load(void) {
    fixture f;
    CHECK_EQ_INT(xd_ctx_create(NULL, &f.ctx), XD_OK);
    CHECK_EQ_INT(
        xd_tokenizer_load(f.ctx, &(xd_tokenizer_desc){ .path = "data/student/tokenizer.json" }, &f.tokenizer),
        XD_OK);
    CHECK_EQ_INT(xd_encoder_create(f.ctx, &(xd_encoder_desc){ .tokenizer = f.tokenizer }, &f.encoder), XD_OK);
    return f;
}

static void unload(fixture *f) {
    xd_encoder_destroy(f->encoder);
    xd_tokenizer_destroy(f->tokenizer);
    xd_ctx_destroy(f->ctx);
}

XD_TEST(pieces_are_words_as_the_pattern_splits_them) {
    static const char *const words[] = { "In", " the", " beginning", ",", " ", "123", "4", " days", "\n" };
    static const char text[] = "In the beginning, 1234 days\n";
    fixture f = load();
    const xd_encode_desc desc = { .pieces = true };
    xd_encoding e = { 0, NULL, NULL, NULL };
    CHECK_EQ_INT(xd_encode(f.encoder, text, sizeof text - 1, &desc, &e), XD_OK);
    CHECK_EQ_INT(e.count, (int64_t)(sizeof words / sizeof words[0]));
    for (int64_t i = 0, at = 0; i < e.count; at = e.spans[i++].end) {
        CHECK_EQ_INT(e.ids[i], -1);
        CHECK_EQ_INT(e.spans[i].begin, at);
        CHECK(e.spans[i].end - at == (int64_t)strlen(words[i]) &&
              memcmp(text + at, words[i], strlen(words[i])) == 0);
    }
    unload(&f);
}

/* A piece is no entry of the cache of words: tokens are the same before and after. */
XD_TEST(pieces_change_no_later_token) {
    static const char text[] = "And God said, Let there be light";
    fixture f = load();
    const xd_encode_desc desc = { .pieces = true };
    xd_encoding e = { 0, NULL, NULL, NULL };
    int32_t before[64];
    CHECK_EQ_INT(xd_encode(f.encoder, text, sizeof text - 1, NULL, &e), XD_OK);
    const int64_t count = e.count;
    CHECK(count > 0 && count <= 64);
    memcpy(before, e.ids, (size_t)count * sizeof *before);
    CHECK_EQ_INT(xd_encode(f.encoder, text, sizeof text - 1, &desc, &e), XD_OK);
    CHECK(e.count < count);
    CHECK_EQ_INT(xd_encode(f.encoder, text, sizeof text - 1, NULL, &e), XD_OK);
    CHECK(e.count == count && memcmp(before, e.ids, (size_t)count * sizeof *before) == 0);
    unload(&f);
}

XD_TEST(an_added_token_between_pieces_keeps_its_id) {
    static const char text[] = "one<|endoftext|>two";
    fixture f = load();
    const xd_encode_desc desc = { .parse_special = true, .pieces = true };
    xd_encoding e = { 0, NULL, NULL, NULL };
    CHECK_EQ_INT(xd_encode(f.encoder, text, sizeof text - 1, &desc, &e), XD_OK);
    CHECK(e.count == 3 && e.ids[0] == -1 && e.ids[1] == 0 && e.ids[2] == -1);
    CHECK(e.spans[1].begin == 3 && e.spans[1].end == 16);
    unload(&f);
}

XD_TEST_MAIN()
