/* A teacher that runs once: the student learns from its cached top 16 tokens of every position.
 *
 * Both models use one tokenizer here. With two tokenizers, the spans in the file align the texts,
 * and a projection maps one vocabulary to the other, as in example 06. The models are tables:
 * each token has a row of logits for the next token.
 *
 *     cc -std=c99 -O2 examples/07_teacher_cache.c -o cache -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>
#include <string.h>

enum { VOCABULARY = 300, TOKENS = 500, STEPS = 60 };

static const char path[] = "build/teacher.xdcache";
static int32_t tokens[TOKENS];
static float teacher[VOCABULARY * VOCABULARY];
static float student[VOCABULARY * VOCABULARY];
static float table_gradient[VOCABULARY * VOCABULARY];
static float logits[TOKENS * VOCABULARY];
static float gradient[TOKENS * VOCABULARY];

static void forward(const float *table) {
    for (int64_t i = 0; i < TOKENS * VOCABULARY; i++)
        logits[i] = table[tokens[i / VOCABULARY] * VOCABULARY + i % VOCABULARY];
}

static void backward(void) {
    memset(table_gradient, 0, sizeof table_gradient);
    for (int64_t i = 0; i < TOKENS * VOCABULARY; i++)
        table_gradient[tokens[i / VOCABULARY] * VOCABULARY + i % VOCABULARY] += gradient[i];
}

/* Runs once, on the ranks of the teacher. Each append may bring any number of positions. */
static xd_result write_cache(xd_ctx *ctx) {
    const xd_teacher_cache_desc desc = {
        .path = path,
        .vocabulary = VOCABULARY,
        .k = 16,
        .name = "a table",
    };
    int32_t next[TOKENS];
    for (int t = 0; t < TOKENS; t++) next[t] = t + 1 < TOKENS ? tokens[t + 1] : -1;
    forward(teacher);
    const xd_teacher_cache_block block = {
        .logits = xd_rows_of(logits, XD_DTYPE_F32, TOKENS, VOCABULARY),
        .ids = tokens,
        .next = next,
    };

    xd_teacher_cache_writer *writer;
    XD_TRY(xd_teacher_cache_writer_create(ctx, &desc, &writer));
    xd_result result = xd_teacher_cache_writer_document(writer, NULL, 0);
    if (result == XD_OK) result = xd_teacher_cache_writer_append(writer, &block);
    if (result == XD_OK) return xd_teacher_cache_writer_commit(writer);
    xd_teacher_cache_writer_abort(writer);
    return result;
}

static xd_result train(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_optimizer *optimizer,
                       xd_xtoken_values *loss) {
    for (int step = 0; step <= STEPS; step++) {
        forward(student);
        XD_TRY(xd_xtoken_loss(ctx, desc, loss));
        backward();
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (step % 20 == 0) printf("step %2d   KL to the cached teacher %.4f\n", step, loss->kd);
    }
    return XD_OK;
}

/* Runs in every training run. Each position is a chunk of one token in both models. */
static xd_result learn(xd_ctx *ctx, const xd_teacher_cache *cache, xd_xtoken_values *loss) {
    int64_t chunks[TOKENS], positions[TOKENS];
    xd_vocab *vocab;
    xd_optimizer *optimizer;
    for (int t = 0; t < TOKENS; t++) {
        positions[t] = t;
        chunks[t] = t;
    }
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &vocab));
    const xd_param table = {
        .name = "table",
        .value = student,
        .gradient = table_gradient,
        .dtype = XD_DTYPE_F32,
        .count = VOCABULARY * VOCABULARY,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&table, 1);
    adamw.learning_rate = 0.1;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    xd_xtoken_teacher one = xd_xtoken_teacher_defaults(XD_XTOKEN_CACHED);
    one.cached.cache = cache;
    one.cached.positions = positions;
    one.logits.rows = TOKENS;
    one.vocabulary = VOCABULARY;
    one.student_chunks = chunks;
    one.teacher_chunks = chunks;
    one.chunks = TOKENS;
    xd_xtoken_desc desc = xd_xtoken_defaults();
    desc.vocab = vocab;
    desc.teachers = &one;
    desc.teacher_count = 1;
    desc.student = xd_rows_of(logits, XD_DTYPE_F32, TOKENS, VOCABULARY);
    desc.common.gradient = xd_rows_of(gradient, XD_DTYPE_F32, TOKENS, VOCABULARY);
    XD_TRY(train(ctx, &desc, optimizer, loss));

    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static void make_up_data(void) {
    const xd_philox noise = { .seed = 1, .stream = XD_STREAM_USER };
    xd_philox_fill_normal(&noise, 0, VOCABULARY * VOCABULARY, teacher);
    for (int i = 0; i < VOCABULARY * VOCABULARY; i++) teacher[i] *= 3.0f;
    for (int t = 1; t < TOKENS; t++) tokens[t] = (7 * tokens[t - 1] + t) % VOCABULARY;
}

static xd_result run(xd_ctx *ctx, xd_teacher_cache **cache, xd_xtoken_values *loss) {
    XD_TRY(write_cache(ctx));
    XD_TRY(xd_teacher_cache_open(ctx, &(xd_teacher_cache_open_desc){ .path = path }, cache));
    printf("%zu bytes a position\n", xd_teacher_cache_describe(*cache).bytes / TOKENS);
    return learn(ctx, *cache, loss);
}

int main(void) {
    xd_ctx *ctx;
    xd_teacher_cache *cache = NULL;
    xd_xtoken_values loss = { 0 };
    make_up_data();
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    const xd_result result = run(ctx, &cache, &loss);
    if (result != XD_OK)
        fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    xd_teacher_cache_close(cache);
    xd_ctx_destroy(ctx);
    return result == XD_OK && loss.kd < 0.2 ? 0 : 1;
}
