/* Many texts at a time: the tokens of xd_encode for any number of threads, and how a failure is reported. */
#include "xdistill.h"
#include "makers.h"
#include "parallel.h"
#include "tokenizer_make.h"

enum { TEXTS = 700, LONGEST = 400 };

static char letters[TEXTS][LONGEST];
static xd_text some[TEXTS];

/* Texts of all lengths, the empty one among them. */
static xd_texts texts(void) {
    const xd_texts all = { some, TEXTS };
    uint64_t state = 3;
    for (int i = 0; i < TEXTS; i++) {
        some[i].data = letters[i];
        some[i].size = (int64_t)i * 37 % LONGEST;
        for (int64_t j = 0; j < some[i].size; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            letters[i][j] = " the abc\n"[(state >> 40) % 9];
        }
    }
    return all;
}

static const file *with_ends(void) {
    return with_post_processor(byte_level(GPT2_BYTES, "t h|th e|a b|ab c|\xc4\xa0 the"),
                               "{\"type\":\"RobertaProcessing\",\"sep\":[\"e\",101],\"cls\":[\"b\",98]}");
}

/* A batch beside xd_encode of each of its texts. */
static void check_batch(xd_ctx *ctx, const xd_tokenizer *tokenizer, const xd_encode_desc *desc) {
    const xd_texts all = texts();
    xd_encoder *batch = NULL;
    xd_encoder *encoder = NULL;
    xd_encoding_batch b;
    int64_t total = 0;
    CHECK_EQ_INT(batch_encoder_create(ctx, tokenizer, &batch), XD_OK);
    CHECK_EQ_INT(encoder_create(ctx, tokenizer, &encoder), XD_OK);
    for (int round = 0; round < 2; round++) CHECK_EQ_INT(xd_encode_batch(batch, &all, desc, &b), XD_OK);
    CHECK_EQ_INT(b.count, TEXTS);
    for (int i = 0; i < TEXTS; i++) {
        xd_encoding e;
        CHECK_EQ_INT(xd_encode(encoder, some[i].data, (size_t)some[i].size, desc, &e), XD_OK);
        const size_t n = (size_t)e.count;
        CHECK_EQ_INT(b.offset[i], total);
        total += e.count;
        CHECK_EQ_INT(b.offset[i + 1], total);
        CHECK(memcmp(b.ids + b.offset[i], e.ids, n * sizeof *e.ids) == 0);
        CHECK(!b.spans == !e.spans && !b.roles == !e.roles);
        if (e.spans) CHECK(memcmp(b.spans + b.offset[i], e.spans, n * sizeof *e.spans) == 0);
        if (e.roles) CHECK(memcmp(b.roles + b.offset[i], e.roles, n) == 0);
    }
    CHECK(total > 10000);
    xd_encoder_destroy(encoder);
    xd_encoder_destroy(batch);
}

XD_TEST(a_batch_has_the_tokens_of_its_texts_for_any_number_of_threads) {
    static const int threads[] = { 1, 2, 3, 7, 2 }; /* the last one with the caller's parallel_for */
    static const xd_encode_desc plain, around = { false, false, true }, bare = { false, true, false };
    fixture f = load(with_ends());
    loop own;
    loop_clear(&own);
    for (int i = 0; i < 5; i++) {
        xd_ctx *ctx = open_ctx(threads[i], i == 4 ? &own : NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
        check_batch(ctx, f.tokenizer, i == 0 ? NULL : &plain);
        check_batch(ctx, f.tokenizer, &around);
        check_batch(ctx, f.tokenizer, &bare);
        xd_ctx_destroy(ctx);
    }
    CHECK(own.rounds > 0);
    unload(&f);
}

XD_TEST(a_batch_of_nothing_is_nothing) {
    fixture f = load(with_ends());
    const xd_texts none = { NULL, 0 };
    xd_encoder *batch = NULL;
    xd_encoding_batch b;
    CHECK_EQ_INT(batch_encoder_create(f.ctx, f.tokenizer, &batch), XD_OK);
    CHECK_EQ_INT(xd_encode_batch(batch, &none, NULL, &b), XD_OK);
    CHECK_EQ_INT(b.count, 0);
    CHECK_EQ_INT(b.offset[0], 0);
    xd_encoder_destroy(batch);
    xd_encoder_destroy(NULL);
    unload(&f);
}

XD_TEST(the_first_text_that_fails_is_named_whatever_the_threads) {
    fixture f = load(with_ends());
    for (int threads = 1; threads <= 7; threads += 3) {
        xd_ctx *ctx = open_ctx(threads, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
        xd_texts all = texts();
        xd_encoder *batch = NULL;
        xd_encoding_batch b = { -1, NULL, NULL, NULL, NULL };
        some[123].size = -5;
        some[124].size = some[600].size = -6;
        CHECK_EQ_INT(batch_encoder_create(ctx, f.tokenizer, &batch), XD_OK);
        CHECK_EQ_INT(xd_encode_batch(batch, &all, NULL, &b), XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, "text 123 of 700") != NULL);
        CHECK(strstr(xd_last_error(ctx)->message, "-5") != NULL);
        CHECK_EQ_INT(b.count, -1);
        all = texts();
        CHECK_EQ_INT(xd_encode_batch(batch, &all, NULL, &b), XD_OK); /* and goes on */
        all.count = -2;
        CHECK_EQ_INT(xd_encode_batch(batch, &all, NULL, &b), XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(ctx)->message, "-2") != NULL);
        xd_encoder_destroy(batch);
        xd_ctx_destroy(ctx);
    }
    unload(&f);
}

/* An allocator that gives `left` blocks and counts those that were not released. */
typedef struct budget {
    int left, alive;
} budget;

static void *budget_allocate(void *user, size_t bytes) {
    budget *b = (budget *)user;
    if (b->left == 0) return NULL;
    b->left--;
    b->alive++;
    return malloc(bytes);
}

static void budget_release(void *user, void *memory) {
    ((budget *)user)->alive--;
    free(memory);
}

static xd_result encode_within(budget *b, const xd_tokenizer *tokenizer) {
    const xd_texts all = texts();
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_encoder *batch = NULL;
    xd_encoding_batch out;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = budget_allocate;
    desc.allocator.release = budget_release;
    desc.allocator.user = b;
    desc.threads = 2;
    xd_result result = xd_ctx_create(&desc, &ctx);
    if (result == XD_OK) result = batch_encoder_create(ctx, tokenizer, &batch);
    if (result == XD_OK) result = xd_encode_batch(batch, &all, NULL, &out);
    xd_encoder_destroy(batch);
    xd_ctx_destroy(ctx);
    return result;
}

XD_TEST(a_batch_that_finds_no_memory_says_so_and_loses_none) {
    fixture f = load(with_ends());
    xd_result result = XD_ERROR_MEMORY;
    int left = 0;
    for (; left < 1000 && result != XD_OK; left++) {
        budget b = { left, 0 };
        result = encode_within(&b, f.tokenizer);
        CHECK(result == XD_OK || result == XD_ERROR_MEMORY);
        CHECK_EQ_INT(b.alive, 0);
    }
    CHECK(left > 15 && left < 1000);
    unload(&f);
}

XD_TEST_MAIN()
