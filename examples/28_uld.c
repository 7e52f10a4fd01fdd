/* A teacher with another tokenizer, and neither a projection nor a common vocabulary: universal
 * logit distillation compares sorted probabilities.
 *
 * Texts are encoded and aligned on four threads, all at once. Then each text is a sequence of the
 * loss. The models are tables with one row of logits per token.
 *
 *     cc -std=c99 -O2 examples/28_uld.c -o uld -lm -lpthread
 *     ./uld [STUDENT/tokenizer.json TEACHER/tokenizer.json] */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXTS = 4, STEPS = 30 };

static const char *const texts[TEXTS] = {
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void;",
    "and darkness was upon the face of the deep.",
    "And the Spirit of God moved upon the face of the waters.",
};

/* One model: its tokens of all texts, which belong to the encoder, and a row of logits for each. */
typedef struct side {
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
    xd_encoding_batch batch;
    int64_t vocabulary, *ids;
    float *logits;
} side;

static xd_result side_open(xd_ctx *ctx, const char *path, const xd_texts *all, side *s) {
    XD_TRY(xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = path }, &s->tokenizer));
    const xd_encoder_desc desc = { .tokenizer = s->tokenizer, .batches = true };
    XD_TRY(xd_encoder_create(ctx, &desc, &s->encoder));
    XD_TRY(xd_encode_batch(s->encoder, all, NULL, &s->batch));
    const int64_t count = s->batch.offset[TEXTS];
    s->vocabulary = xd_tokenizer_describe(s->tokenizer).size;
    s->ids = malloc((size_t)count * sizeof *s->ids);
    s->logits = calloc((size_t)(count * s->vocabulary), sizeof *s->logits);
    XD_REQUIRE(ctx, s->ids && s->logits, XD_ERROR_MEMORY, "no room for %lld rows of %lld logits",
               (long long)count, (long long)s->vocabulary);
    for (int64_t i = 0; i < count; i++) s->ids[i] = s->batch.ids[i];
    return XD_OK;
}

static void side_close(side *s) {
    xd_encoder_destroy(s->encoder);
    xd_tokenizer_destroy(s->tokenizer);
    free(s->logits);
    free(s->ids);
}

static xd_align_side side_text(const side *s, int i) {
    const int64_t begin = s->batch.offset[i];
    return (xd_align_side){ .spans = s->batch.spans + begin,
                            .count = s->batch.offset[i + 1] - begin };
}

static xd_uld_side side_rows(const side *s, int i) {
    const int64_t begin = s->batch.offset[i], rows = s->batch.offset[i + 1] - begin;
    return (xd_uld_side){
        .logits = xd_rows_of(s->logits + begin * s->vocabulary, XD_DTYPE_F32, rows, s->vocabulary),
        .vocabulary = s->vocabulary,
        .ids = s->ids + begin,
    };
}

/* The mean over texts, and its gradient. */
static xd_result loss_of(xd_ctx *ctx, const side sides[2], const xd_align_job *jobs,
                         float *gradient, double *loss) {
    *loss = 0.0;
    for (int i = 0; i < TEXTS; i++) {
        xd_uld_values values;
        xd_uld_desc desc = {
            .student = side_rows(&sides[0], i),
            .teacher = side_rows(&sides[1], i),
            .chunks = jobs[i].out.chunks + 1, /* no row predicts the first */
            .chunk_count = jobs[i].out.count - 1,
            .unmatched_weight = 1.0,
            .scale = 1.0 / TEXTS,
        };
        desc.gradient = desc.student.logits;
        desc.gradient.data = gradient + sides[0].batch.offset[i] * sides[0].vocabulary;
        XD_TRY(xd_uld_loss(ctx, &desc, &values));
        *loss += values.loss;
    }
    return XD_OK;
}

static xd_result train(xd_ctx *ctx, side sides[2], const xd_align_job *jobs, double *last) {
    const int64_t count = sides[0].batch.offset[TEXTS] * sides[0].vocabulary;
    float *gradient = malloc((size_t)count * sizeof *gradient);
    XD_REQUIRE(ctx, gradient, XD_ERROR_MEMORY, "no room for %lld logits", (long long)count);
    const xd_param table = {
        .name = "table",
        .value = sides[0].logits,
        .gradient = gradient,
        .dtype = XD_DTYPE_F32,
        .count = count,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&table, 1);
    xd_optimizer *optimizer;
    adamw.learning_rate = 0.3;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    for (int step = 0; step <= STEPS; step++) {
        XD_TRY(loss_of(ctx, sides, jobs, gradient, last));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (step % 10 == 0) printf("step %2d   loss %.4f\n", step, *last);
    }
    xd_optimizer_destroy(optimizer);
    free(gradient);
    return XD_OK;
}

static xd_result run(xd_ctx *ctx, const char *const paths[2], double *last) {
    side sides[2] = { 0 };
    xd_align_job jobs[TEXTS] = { 0 };
    xd_text list[TEXTS];
    for (int i = 0; i < TEXTS; i++) list[i] = (xd_text){ texts[i], (int64_t)strlen(texts[i]) };
    for (int i = 0; i < 2; i++)
        XD_TRY(side_open(ctx, paths[i], &(xd_texts){ list, TEXTS }, &sides[i]));
    for (int i = 0; i < TEXTS; i++) {
        jobs[i].student = side_text(&sides[0], i);
        jobs[i].teacher = side_text(&sides[1], i);
    }
    XD_TRY(xd_align_batch(ctx, jobs, TEXTS));

    /* The teacher is sure of one token in each row. */
    const int64_t rows = sides[1].batch.offset[TEXTS];
    for (int64_t i = 0; i < rows; i++) sides[1].logits[i * sides[1].vocabulary + i % 7] = 9.0f;
    XD_TRY(train(ctx, sides, jobs, last));
    for (int i = 0; i < TEXTS; i++) xd_alignment_destroy(ctx, &jobs[i].out);
    for (int i = 0; i < 2; i++) side_close(&sides[i]);
    return XD_OK;
}

int main(int argc, char **argv) {
    const char *paths[2] = { "data/student/tokenizer.json", "data/teacher/tokenizer.json" };
    double last = 0.0;
    xd_ctx *ctx;
    if (argc == 3) paths[0] = argv[1], paths[1] = argv[2];
    if (xd_ctx_create(&(xd_ctx_desc){ .threads = 4 }, &ctx) != XD_OK) return 1;
    const xd_result result = run(ctx, paths, &last);
    if (result != XD_OK) fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return result == XD_OK && last < 1.0 ? 0 : 1;
}
