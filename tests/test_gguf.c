/* test_gguf.c - the GGUF reader of examples/common, on files made here by hand. */
#include "xd_test.h"

#include <stdlib.h>

#include "../examples/nn/nn_model.c"
#include "../examples/common/gguf.c"
#include "../examples/common/gguf_model.c"
#include "../examples/common/gguf_pieces.c"
#include "../examples/common/gguf_tokenizer.c"
#include "makers.h"

/* ---- files by hand ---- */

enum { ROOM = 8192 };

typedef struct maker {
    uint8_t *data; /* [ROOM] */
    size_t bytes;
} maker;

static maker make(void) {
    maker m;
    m.data = (uint8_t *)calloc(ROOM, 1);
    m.bytes = 0;
    return m;
}

static void put(maker *m, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) m->data[m->bytes++] = (uint8_t)(value >> (8 * i));
}

static void put_text(maker *m, const char *text) {
    put(m, strlen(text), 8);
    memcpy(m->data + m->bytes, text, strlen(text));
    m->bytes += strlen(text);
}

static void put_f32(maker *m, float value) {
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    put(m, bits, 4);
}

static void put_key(maker *m, const char *key, uint32_t kind) {
    put_text(m, key);
    put(m, kind, 4);
}

static void put_head(maker *m, uint64_t tensors, uint64_t pairs) {
    memcpy(m->data, "GGUF", 4);
    m->bytes = 4;
    put(m, 3, 4);
    put(m, tensors, 8);
    put(m, pairs, 8);
}

static void put_tensor(maker *m, const char *name, uint64_t cols, uint64_t rows, uint32_t type,
                       uint64_t offset) {
    put_text(m, name);
    put(m, rows ? 2 : 1, 4);
    put(m, cols, 8);
    if (rows) put(m, rows, 8);
    put(m, type, 4);
    put(m, offset, 8);
}

static void pad(maker *m, size_t alignment) {
    while (m->bytes % alignment) put(m, 0, 1);
}

/* Parses an exact copy, so that a reader that goes too far is seen by the sanitizers. */
static xd_result parse(xd_ctx *ctx, const maker *m, size_t bytes, gguf **out, uint8_t **copy) {
    *copy = (uint8_t *)malloc(bytes ? bytes : 1);
    if (bytes) memcpy(*copy, m->data, bytes);
    return gguf_parse(ctx, *copy, bytes, out);
}

static bool refused(const maker *m, xd_result expected, const char *words) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    uint8_t *copy = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    const xd_result result = parse(ctx, m, m->bytes, &file, &copy);
    const bool right = result == expected && !file && strstr(xd_last_error(ctx)->message, words);
    if (!right) fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    gguf_close(file);
    free(copy);
    xd_ctx_destroy(ctx);
    return right;
}

/* ---- metadata ---- */

static maker make_metadata(void) {
    static const char *const words[] = { "one", "", "three" };
    maker m = make();
    put_head(&m, 0, 7);
    put_key(&m, "z.i8", 1), put(&m, (uint64_t)-5, 1);
    put_key(&m, "u64", 10), put(&m, UINT64_MAX, 8);
    put_key(&m, "i64", 11), put(&m, (uint64_t)INT64_MIN, 8);
    put_key(&m, "f32", 6), put_f32(&m, 1.5f);
    put_key(&m, "flag", 7), put(&m, 1, 1);
    put_key(&m, "words", 9), put(&m, 8, 4), put(&m, 3, 8);
    for (int i = 0; i < 3; i++) put_text(&m, words[i]);
    put_key(&m, "numbers", 9), put(&m, 3, 4), put(&m, 2, 8);
    put(&m, (uint64_t)-2, 2), put(&m, 7, 2);
    return m;
}

XD_TEST(values_of_every_width_come_back_and_those_that_do_not_fit_do_not) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    maker m = make_metadata();
    int64_t number = 0;
    double real = 0.0;
    bool flag = false;
    xd_text text;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
    CHECK(gguf_int(file, "z.i8", &number) && number == -5);
    CHECK(gguf_int(file, "i64", &number) && number == INT64_MIN);
    CHECK(!gguf_int(file, "u64", &number) && number == INT64_MIN); /* beyond an int64_t: untouched */
    CHECK(gguf_double(file, "f32", &real) && real == 1.5);
    CHECK(gguf_bool(file, "flag", &flag) && flag);
    CHECK(!gguf_int(file, "f32", &number) && !gguf_string(file, "flag", &text) &&
          !gguf_int(file, "none", &number));
    gguf_close(file);
    xd_ctx_destroy(ctx);
    free(m.data);
}

XD_TEST(arrays_are_read_element_by_element) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    gguf_array array;
    xd_text text;
    int64_t number = 0;
    maker m = make_metadata();
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
    CHECK(gguf_strings(file, "words", &array) && array.left == 3);
    CHECK(gguf_next_string(&array, &text) && text.size == 3 && memcmp(text.data, "one", 3) == 0);
    CHECK(gguf_next_string(&array, &text) && text.size == 0);
    CHECK(gguf_next_string(&array, &text) && text.size == 5);
    CHECK(!gguf_next_string(&array, &text));
    CHECK(gguf_ints(file, "numbers", &array));
    CHECK(gguf_next_int(&array, &number) && number == -2);
    CHECK(gguf_next_int(&array, &number) && number == 7);
    CHECK(!gguf_next_int(&array, &number));
    CHECK(!gguf_ints(file, "words", &array) && !gguf_strings(file, "numbers", &array));
    gguf_close(file);
    xd_ctx_destroy(ctx);
    free(m.data);
}

/* ---- tensors ---- */

enum { HALF = 0x3800, TWO = 0x4000, MINUS_ONE = 0xbc00 }; /* f16 0.5, 2 and -1 */

/* One row of 32 in each of the block types, one row of 2 in each of the others. */
static maker make_tensors(void) {
    maker m = make();
    put_head(&m, 6, 0);
    put_tensor(&m, "f32", 2, 0, GGUF_F32, 0);
    put_tensor(&m, "f16", 1, 2, GGUF_F16, 32);
    put_tensor(&m, "q4_0", 32, 1, GGUF_Q4_0, 64);
    put_tensor(&m, "q4_1", 32, 1, GGUF_Q4_1, 96);
    put_tensor(&m, "q8_0", 32, 1, GGUF_Q8_0, 128);
    put_tensor(&m, "unknown", 256, 1, 13, 192);
    pad(&m, 32);
    put_f32(&m, 3.25f), put_f32(&m, -1.0f), pad(&m, 32);
    put(&m, HALF, 2), put(&m, MINUS_ONE, 2), pad(&m, 32);
    put(&m, HALF, 2);
    for (uint64_t i = 0; i < 16; i++) put(&m, i | (15 - i) << 4, 1);
    pad(&m, 32);
    put(&m, TWO, 2), put(&m, MINUS_ONE, 2);
    for (uint64_t i = 0; i < 16; i++) put(&m, i | (15 - i) << 4, 1);
    pad(&m, 32);
    put(&m, HALF, 2);
    for (uint64_t i = 0; i < 32; i++) put(&m, (uint64_t)(int64_t)(8 * ((int)i - 16)), 1);
    pad(&m, 32);
    return m;
}

static const float *read_all(const gguf *file, const char *name, float *out) {
    const gguf_tensor *tensor = gguf_tensor_find(file, name);
    CHECK(tensor != NULL);
    if (tensor) CHECK(gguf_read(file, tensor, 0, tensor->rows, out) == XD_OK);
    return out;
}

/* What the reference package gives of the bytes (37 i + 11) mod 251 with scales of .5, .25 and .125: some elements, and two sums. */
typedef struct large_block {
    uint32_t type;
    int bytes;
    double some[10], sum, moment;
} large_block;

static const int large_places[10] = { 0, 1, 31, 32, 63, 64, 127, 128, 200, 255 };

static const large_block large_blocks[] = {
    { GGUF_Q4_K, 144, { 63.5, 141, 48, 4.75, 22.75, 286.5, 85.25, 41, 227.75, -9 }, 27166.0, 3654744.5 },
    { GGUF_Q6_K,
      210,
      { -54.375, 174, -93, 11.875, -21.75, 0, -130.625, -124, -79.75, 290 },
      -1310.125,
      73565.625 },
};

XD_TEST(blocks_of_256_are_unpacked_as_the_reference_does) {
    for (int b = 0; b < 2; b++) {
        const large_block *block = &large_blocks[b];
        uint8_t bytes[210];
        float x[256];
        double sum = 0.0, moment = 0.0;
        for (int i = 0; i < block->bytes; i++) bytes[i] = (uint8_t)((i * 37 + 11) % 251);
        const uint16_t scales[] = { 0x3800, 0x3400, 0x3000 }; /* f16 .5, .25, .125 */
        memcpy(bytes + (b ? 208 : 0), &scales[b ? 2 : 0], 2);
        if (b == 0) memcpy(bytes + 2, &scales[1], 2);
        gguf_unpack_block(block->type, bytes, x);
        for (int i = 0; i < 10; i++) CHECK((double)x[large_places[i]] == block->some[i]);
        for (int i = 0; i < 256; i++) sum += (double)x[i], moment += (double)x[i] * i;
        CHECK(sum == block->sum && moment == block->moment);
    }
}

XD_TEST(every_type_is_unpacked_as_its_formula_says) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    float x[256];
    maker m = make_tensors();
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
    CHECK_EQ_INT(gguf_tensor_count(file), 6);
    CHECK(read_all(file, "f32", x)[0] == 3.25f && x[1] == -1.0f);
    CHECK(read_all(file, "f16", x)[0] == 0.5f && x[1] == -1.0f);
    read_all(file, "q4_0", x);
    for (int i = 0; i < 16; i++) CHECK(x[i] == 0.5f * (float)(i - 8) && x[16 + i] == 0.5f * (float)(7 - i));
    read_all(file, "q4_1", x);
    for (int i = 0; i < 16; i++)
        CHECK(x[i] == 2.0f * (float)i - 1.0f && x[16 + i] == 2.0f * (float)(15 - i) - 1.0f);
    read_all(file, "q8_0", x);
    for (int i = 0; i < 32; i++) CHECK(x[i] == 0.5f * (float)(8 * (i - 16)));
    CHECK(gguf_read(file, gguf_tensor_find(file, "unknown"), 0, 1, x) == XD_ERROR_UNSUPPORTED);
    CHECK(gguf_read(file, gguf_tensor_find(file, "f16"), 1, 2, x) == XD_ERROR_ARGUMENT);
    CHECK(gguf_tensor_find(file, "f3") == NULL);
    gguf_close(file);
    xd_ctx_destroy(ctx);
    free(m.data);
}

/* ---- what is not a file ---- */

XD_TEST(a_file_that_ends_anywhere_before_its_last_tensor_does_is_refused) {
    xd_ctx *ctx = NULL;
    maker m = make_tensors();
    maker n = make_metadata();
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int which = 0; which < 2; which++) {
        const maker *from = which ? &n : &m;
        for (size_t bytes = 0; bytes < from->bytes - (which ? 0 : 64); bytes++) {
            gguf *file = NULL;
            uint8_t *copy = NULL;
            CHECK(parse(ctx, from, bytes, &file, &copy) == XD_ERROR_FORMAT && !file);
            gguf_close(file);
            free(copy);
        }
    }
    xd_ctx_destroy(ctx);
    free(m.data), free(n.data);
}

XD_TEST(no_changed_byte_makes_the_reader_leave_the_file) {
    xd_ctx *ctx = NULL;
    float x[4096];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (size_t at = 0; at < 600; at++)
        for (int value = 0; value < 3; value++) {
            maker m = make_tensors();
            gguf *file = NULL;
            uint8_t *copy = NULL;
            if (at < m.bytes) m.data[at] = (uint8_t)(value == 0 ? 0 : value == 1 ? 255 : m.data[at] + 1);
            if (parse(ctx, &m, m.bytes, &file, &copy) == XD_OK)
                for (int64_t i = 0; i < gguf_tensor_count(file); i++) {
                    const gguf_tensor *t = gguf_tensor_at(file, i);
                    if (t->rows * t->cols <= 4096) (void)gguf_read(file, t, 0, t->rows, x);
                }
            gguf_close(file);
            free(copy);
            free(m.data);
        }
    xd_ctx_destroy(ctx);
}

/* A file of one tensor of four floats at `offset`, and perhaps an alignment. */
static maker make_one(uint64_t cols, uint64_t rows, uint64_t offset, uint64_t alignment) {
    maker m = make();
    put_head(&m, 1, alignment ? 1 : 0);
    if (alignment) put_key(&m, "general.alignment", 4), put(&m, alignment, 4);
    put_tensor(&m, "x", cols, rows, GGUF_F32, offset);
    pad(&m, 32);
    for (int i = 0; i < 4; i++) put_f32(&m, 1.0f);
    return m;
}

XD_TEST(what_breaks_the_form_is_named_with_its_numbers) {
    maker m = make();
    put_head(&m, 0, 0);
    m.data[4] = 1;
    CHECK(refused(&m, XD_ERROR_UNSUPPORTED, "version 1"));
    m.data[0] = 'g';
    CHECK(refused(&m, XD_ERROR_FORMAT, "no GGUF file"));
    m.bytes = 0;
    for (const char *at = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"; *at; at++)
        put(&m, (uint64_t)(unsigned char)*at, 1);
    CHECK(refused(&m, XD_ERROR_FORMAT, "a pointer of Git LFS, not the GGUF file itself"));
    put_head(&m, 0, (uint64_t)1 << 60);
    CHECK(refused(&m, XD_ERROR_FORMAT, "1152921504606846976 entries"));
    put_head(&m, 0, 2), put_key(&m, "twice", 7), put(&m, 1, 1), put_key(&m, "twice", 7), put(&m, 1, 1);
    CHECK(refused(&m, XD_ERROR_FORMAT, "two values of key twice"));
    put_head(&m, 0, 1), put_key(&m, "nested", 9), put(&m, 9, 4), put(&m, 1, 8);
    CHECK(refused(&m, XD_ERROR_UNSUPPORTED, "array of arrays"));
    put_head(&m, 0, 1), put_key(&m, "kind", 13), put(&m, 0, 8);
    CHECK(refused(&m, XD_ERROR_FORMAT, "kind 13"));
    put_head(&m, 0, 1), put_key(&m, "long", 9), put(&m, 10, 4), put(&m, (uint64_t)1 << 61, 8);
    CHECK(refused(&m, XD_ERROR_FORMAT, "2305843009213693952 values"));
    free(m.data);
}

XD_TEST(tensors_that_do_not_lie_in_the_file_are_refused) {
    static const struct {
        uint64_t cols, rows, offset, alignment;
        const char *words;
    } cases[] = {
        { 4, 2, 0, 0, "needs 32 bytes, the file has 16" },
        { 4, 1, 32, 0, "at byte 32 of 16" },
        { 2, 1, 8, 0, "alignment 32" },
        { 4, 0, 0, 3, "alignment of 3" },
        { (uint64_t)1 << 40, (uint64_t)1 << 40, 0, 0, "1099511627776 elements" },
        { UINT64_MAX, 2, 0, 0, "18446744073709551615 elements" },
        { 0, 1, 0, 0, "0 elements" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        maker m = make_one(cases[i].cols, cases[i].rows, cases[i].offset, cases[i].alignment);
        CHECK(refused(&m, XD_ERROR_FORMAT, cases[i].words));
        free(m.data);
    }
}

/* ---- a model ---- */

enum { HIDDEN = 4, HEAD = 4, FFN = 3, VOCAB = 5 };

static void put_matrix(maker *m, const char *name, uint64_t cols, uint64_t rows, uint64_t *offset) {
    put_tensor(m, name, cols, rows, GGUF_F32, *offset);
    *offset += (cols * (rows ? rows : 1) * 4 + 31) / 32 * 32;
}

/* Element i of tensor number n is 100 n + i. */
static void put_numbers(maker *m, int n, int count) {
    for (int i = 0; i < count; i++) put_f32(m, (float)(100 * n + i));
    pad(m, 32);
}

static maker make_model(const char *architecture) {
    maker m = make();
    uint64_t offset = 0;
    put_head(&m, 11, 6);
    put_key(&m, "general.architecture", 8), put_text(&m, architecture);
    put_key(&m, "llama.embedding_length", 4), put(&m, HIDDEN, 4);
    put_key(&m, "llama.block_count", 4), put(&m, 1, 4);
    put_key(&m, "llama.attention.head_count", 4), put(&m, 1, 4);
    put_key(&m, "llama.feed_forward_length", 4), put(&m, FFN, 4);
    put_key(&m, "llama.attention.layer_norm_rms_epsilon", 6), put_f32(&m, 1e-5f);
    put_matrix(&m, "token_embd.weight", HIDDEN, VOCAB, &offset);
    put_matrix(&m, "blk.0.attn_norm.weight", HIDDEN, 0, &offset);
    put_matrix(&m, "blk.0.attn_q.weight", HIDDEN, HEAD, &offset);
    put_matrix(&m, "blk.0.attn_k.weight", HIDDEN, HEAD, &offset);
    put_matrix(&m, "blk.0.attn_v.weight", HIDDEN, HEAD, &offset);
    put_matrix(&m, "blk.0.attn_output.weight", HEAD, HIDDEN, &offset);
    put_matrix(&m, "blk.0.ffn_norm.weight", HIDDEN, 0, &offset);
    put_matrix(&m, "blk.0.ffn_gate.weight", HIDDEN, FFN, &offset);
    put_matrix(&m, "blk.0.ffn_up.weight", HIDDEN, FFN, &offset);
    put_matrix(&m, "blk.0.ffn_down.weight", FFN, HIDDEN, &offset);
    put_matrix(&m, "output_norm.weight", HIDDEN, 0, &offset);
    pad(&m, 32);
    const int counts[] = { HIDDEN * VOCAB, HIDDEN,        HIDDEN * HEAD, HIDDEN * HEAD,
                           HIDDEN * HEAD,  HEAD * HIDDEN, HIDDEN,        HIDDEN * FFN,
                           HIDDEN * FFN,   FFN * HIDDEN,  HIDDEN };
    for (int i = 0; i < 11; i++) put_numbers(&m, i, counts[i]);
    return m;
}

/* Where a weight begins. */
static int64_t at(const nn_model *model, int block, int weight) {
    return nn_block_param(model, block, weight)->offset;
}

XD_TEST(a_model_comes_out_in_the_order_that_the_forward_pass_wants) {
    static const int rotary[HEAD] = { 0, 2, 1, 3 }; /* (first half, second half) from pairs side by side */
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    nn_config c;
    nn_model model;
    maker m = make_model("llama");
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
    CHECK(gguf_model_config(ctx, file, &c) == XD_OK);
    CHECK(c.vocab == VOCAB && c.hidden == HIDDEN && c.kv_heads == 1 && c.head_dim == HEAD && c.tied);
    CHECK(c.rope_theta == 10000.0f && c.norm_eps == 1e-5f);
    CHECK(nn_model_init(&c, NULL, NULL, &model) == NULL);
    float *w = (float *)calloc((size_t)model.float_count, sizeof *w);
    CHECK(gguf_model_weights(ctx, file, &model, w) == XD_OK);
    const float *q = w + at(&model, 0, NN_Q), *k = w + at(&model, 0, NN_K), *v = w + at(&model, 0, NN_V);
    for (int r = 0; r < HEAD; r++)
        for (int i = 0; i < HIDDEN; i++) {
            CHECK(q[r * HIDDEN + i] == (float)(200 + rotary[r] * HIDDEN + i));
            CHECK(k[r * HIDDEN + i] == (float)(300 + rotary[r] * HIDDEN + i));
            CHECK(v[r * HIDDEN + i] == (float)(400 + r * HIDDEN + i));
        }
    CHECK(w[at(&model, 0, NN_DOWN)] == 900.0f && w[at(&model, 0, NN_POST_NORM) + 1] == 601.0f);
    CHECK(w[at(&model, NN_ROOT, NN_NORM)] == 1000.0f);
    free(w);
    nn_model_free(&model);
    gguf_close(file);
    xd_ctx_destroy(ctx);
    free(m.data);
}

/* A key of an architecture. */
static void put_own_key(maker *m, const char *architecture, const char *name, uint32_t kind) {
    char key[64];
    snprintf(key, sizeof key, "%s.%s", architecture, name);
    put_key(m, key, kind);
}

/* A model of Qwen: two heads on one, with biases or norms; or a Llama with divisors of its rotary planes. */
static maker make_family(const char *architecture, float divisor) {
    static const struct {
        const char *name;
        int cols, rows; /* rows 0: a vector */
    } tensors[] = {
        { "token_embd.weight", 4, 5 },        { "output_norm.weight", 4, 0 },
        { "blk.0.attn_norm.weight", 4, 0 },   { "blk.0.attn_q.weight", 4, 8 },
        { "blk.0.attn_k.weight", 4, 4 },      { "blk.0.attn_v.weight", 4, 4 },
        { "blk.0.attn_output.weight", 8, 4 }, { "blk.0.ffn_norm.weight", 4, 0 },
        { "blk.0.ffn_gate.weight", 4, 3 },    { "blk.0.ffn_up.weight", 4, 3 },
        { "blk.0.ffn_down.weight", 3, 4 },    { "blk.0.attn_q.bias", 8, 0 },
        { "blk.0.attn_k.bias", 4, 0 },        { "blk.0.attn_v.bias", 4, 0 },
        { "blk.0.attn_q_norm.weight", 4, 0 }, { "blk.0.attn_k_norm.weight", 4, 0 },
    };
    enum { TENSORS = sizeof tensors / sizeof tensors[0] };
    maker m = make();
    uint64_t offset = 0;
    put_head(&m, TENSORS + (divisor > 0.0f), 10);
    put_key(&m, "general.architecture", 8), put_text(&m, architecture);
    put_own_key(&m, architecture, "embedding_length", 4), put(&m, 4, 4);
    put_own_key(&m, architecture, "block_count", 4), put(&m, 1, 4);
    put_own_key(&m, architecture, "attention.head_count", 4), put(&m, 2, 4);
    put_own_key(&m, architecture, "attention.head_count_kv", 4), put(&m, 1, 4);
    put_own_key(&m, architecture, "attention.key_length", 4), put(&m, 4, 4);
    put_own_key(&m, architecture, "feed_forward_length", 4), put(&m, 3, 4);
    put_own_key(&m, architecture, "attention.layer_norm_rms_epsilon", 6), put_f32(&m, 1e-5f);
    put_own_key(&m, architecture, "rope.freq_base", 6), put_f32(&m, 500000.0f);
    put_own_key(&m, architecture, "context_length", 4), put(&m, 32768, 4);
    for (int i = 0; i < TENSORS; i++)
        put_matrix(&m, tensors[i].name, (uint64_t)tensors[i].cols, (uint64_t)tensors[i].rows, &offset);
    if (divisor > 0.0f) put_matrix(&m, "rope_freqs.weight", 2, 0, &offset);
    pad(&m, 32);
    for (int i = 0; i < TENSORS; i++)
        put_numbers(&m, i, tensors[i].cols * (tensors[i].rows ? tensors[i].rows : 1));
    if (divisor > 0.0f) put_f32(&m, 1.0f), put_f32(&m, divisor), pad(&m, 32);
    return m;
}

XD_TEST(models_of_qwen_have_their_biases_and_norms_and_rows_as_they_are) {
    static const char *const names[] = { "qwen2", "qwen3" };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int i = 0; i < 2; i++) {
        gguf *file = NULL;
        nn_config c;
        nn_model model;
        int64_t positions = 0;
        maker m = make_family(names[i], 0.0f);
        CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
        CHECK(gguf_model_config(ctx, file, &c) == XD_OK);
        CHECK(c.extra == (i ? NN_QK_NORM : NN_QKV_BIAS) && c.heads == 2 && c.kv_heads == 1 &&
              c.head_dim == 4);
        CHECK(gguf_model_context(file, &positions) && positions == 32768);
        CHECK(nn_model_init(&c, NULL, NULL, &model) == NULL);
        float *w = (float *)calloc((size_t)model.float_count, sizeof *w);
        CHECK(gguf_model_weights(ctx, file, &model, w) == XD_OK);
        for (int j = 0; j < 32; j++) CHECK(w[at(&model, 0, NN_Q) + j] == (float)(300 + j));
        if (i == 0) {
            CHECK(w[at(&model, 0, NN_Q_BIAS) + 7] == 1107.0f && w[at(&model, 0, NN_K_BIAS) + 3] == 1203.0f);
            CHECK(w[at(&model, 0, NN_V_BIAS) + 1] == 1301.0f);
        } else {
            CHECK(w[at(&model, 0, NN_Q_NORM) + 2] == 1402.0f && w[at(&model, 0, NN_K_NORM) + 2] == 1502.0f);
        }
        free(w);
        nn_model_free(&model);
        gguf_close(file);
        free(m.data);
    }
    xd_ctx_destroy(ctx);
}

/* Base 500000 on heads of 4: plane 1 makes .00141 radians a position, 1.8 waves in 8192: the smooth part. */
XD_TEST(divisors_of_rotary_planes_are_those_of_llama_3_or_refused) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    nn_config c;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    maker wrong = make_family("llama", 3.0f), whole = make_family("llama", 1.0f);
    CHECK(gguf_parse(ctx, wrong.data, wrong.bytes, &file) == XD_OK);
    CHECK(gguf_model_config(ctx, file, &c) == XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "divides plane 1 by 3, Llama 3 by") != NULL);
    gguf_close(file);
    CHECK(gguf_parse(ctx, whole.data, whole.bytes, &file) == XD_OK);
    CHECK(gguf_model_config(ctx, file, &c) == XD_OK && c.rope_scaling.factor == 1.0f);
    gguf_close(file);
    free(wrong.data), free(whole.data);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_part_of_a_model_is_that_part_of_the_whole) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    nn_config c;
    nn_model model;
    nn_group tp;
    maker m = make_model("llama");
    memset(&tp, 0, sizeof tp);
    tp.size = 2;
    tp.rank = 1;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
    CHECK(gguf_model_config(ctx, file, &c) == XD_OK);
    CHECK(nn_model_init(&c, &tp, NULL, &model) == NULL);
    float *w = (float *)calloc((size_t)model.float_count + 1, sizeof *w);
    CHECK(gguf_model_weights(ctx, file, &model, w) == XD_OK);
    CHECK(w[at(&model, NN_ROOT, NN_EMBED)] == 12.0f); /* the first three of five rows are rank 0's */
    CHECK(w[at(&model, 0, NN_DOWN)] == 902.0f);       /* so are two of three columns */
    CHECK(w[at(&model, 0, NN_DOWN) + 1] == 905.0f);
    free(w);
    nn_model_free(&model);
    gguf_close(file);
    xd_ctx_destroy(ctx);
    free(m.data);
}

XD_TEST(other_architectures_and_tensors_of_other_shapes_are_refused) {
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    nn_config c;
    nn_model model;
    maker m = make_model("mamba"), n = make_model("llama");
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
    CHECK(gguf_model_config(ctx, file, &c) == XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "\"mamba\""));
    gguf_close(file);
    CHECK(gguf_parse(ctx, n.data, n.bytes, &file) == XD_OK);
    CHECK(gguf_model_config(ctx, file, &c) == XD_OK);
    c.ffn = 2;
    CHECK(nn_model_init(&c, NULL, NULL, &model) == NULL);
    float *w = (float *)calloc((size_t)model.float_count, sizeof *w);
    CHECK(gguf_model_weights(ctx, file, &model, w) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "blk.0.ffn_gate.weight has 3 x 4 elements, the model 2 x 4"));
    free(w);
    nn_model_free(&model);
    gguf_close(file);
    xd_ctx_destroy(ctx);
    free(m.data), free(n.data);
}

/* ---- a tokenizer ---- */

XD_TEST(a_tokenizer_splits_digits_as_the_name_of_its_rules_says) {
    static const struct {
        const char *name;
        int count; /* tokens of a1212 */
    } rules[] = { { "gpt-2", 3 }, { "smollm", 5 }, { "qwen2", 5 }, { "llama-bpe", 4 } };
    static const char *const tokens[] = { "<|end|>", "1", "2", "12", "a" };
    xd_ctx *ctx = NULL;
    gguf *file = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int rule = 0; rule < 4; rule++) {
        xd_tokenizer *tokenizer = NULL;
        xd_encoder *encoder = NULL;
        xd_encoding e;
        maker m = make();
        put_head(&m, 0, 5);
        put_key(&m, "tokenizer.ggml.model", 8), put_text(&m, "gpt2");
        put_key(&m, "tokenizer.ggml.pre", 8), put_text(&m, rules[rule].name);
        put_key(&m, "tokenizer.ggml.tokens", 9), put(&m, 8, 4), put(&m, 5, 8);
        for (int i = 0; i < 5; i++) put_text(&m, tokens[i]);
        put_key(&m, "tokenizer.ggml.token_type", 9), put(&m, 5, 4), put(&m, 5, 8);
        for (int i = 0; i < 5; i++) put(&m, i == 0 ? 3 : 1, 4);
        put_key(&m, "tokenizer.ggml.merges", 9), put(&m, 8, 4), put(&m, 1, 8), put_text(&m, "1 2");
        CHECK(gguf_parse(ctx, m.data, m.bytes, &file) == XD_OK);
        CHECK(gguf_model_tokenizer(ctx, file, &tokenizer) == XD_OK);
        CHECK(xd_tokenizer_token(tokenizer, 0).kind == XD_TOKEN_KIND_SPECIAL);
        CHECK(encoder_create(ctx, tokenizer, &encoder) == XD_OK);
        CHECK(xd_encode(encoder, "a1212", 5, NULL, &e) == XD_OK);
        CHECK_EQ_INT(e.count, rules[rule].count);
        xd_encoder_destroy(encoder);
        xd_tokenizer_destroy(tokenizer);
        gguf_close(file);
        free(m.data);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
