/* A teacher with another tokenizer, from two tokenizer files to training steps.
 *
 * The loss is P-KL: it compares both models over chunks of text. The student is a table of logits
 * with one row per position. The teacher's logits are made up. Real models replace both.
 *
 *     cc -std=c99 -O2 examples/06_cross_tokenizer.c -o cross -lm -lpthread
 *     ./cross [STUDENT/tokenizer.json TEACHER/tokenizer.json]
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>
#include <stdlib.h>

static const char text[] =
    "And the earth was without form, and void; and darkness was upon the face of the deep.";

/* A text has at most as many tokens as bytes. */
enum { MOST = sizeof text, STEPS = 50 };

/* One model and the tokens of the text. Each position has a next token and a chunk. */
typedef struct side {
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
    xd_encoding tokens;
    int64_t vocabulary;
    int64_t labels[MOST];
    int64_t chunks[MOST];
    xd_rows logits;
    xd_rows gradient;
} side;

static xd_result open_side(xd_ctx *ctx, const char *path, side *s) {
    XD_TRY(xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = path }, &s->tokenizer));
    XD_TRY(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = s->tokenizer }, &s->encoder));
    XD_TRY(xd_encode(s->encoder, text, sizeof text - 1, NULL, &s->tokens));
    s->vocabulary = xd_tokenizer_describe(s->tokenizer).size;

    const int64_t count = s->tokens.count * s->vocabulary;
    float *logits = calloc((size_t)count * 2, sizeof *logits);
    s->logits = xd_rows_of(logits, XD_DTYPE_F32, s->tokens.count, s->vocabulary);
    s->gradient = s->logits;
    s->gradient.data = logits + count;
    return logits ? XD_OK : XD_ERROR_MEMORY;
}

static void close_side(side *s) {
    free(s->logits.data);
    xd_encoder_destroy(s->encoder);
    xd_tokenizer_destroy(s->tokenizer);
}

/* Position t predicts token t + 1, so it takes the id and the chunk of that token. */
static void label(const xd_alignment *both, xd_chunk_side which, const xd_align_side *tokens,
                  side *s) {
    const int64_t last = s->tokens.count - 1;
    xd_chunk_ids(both, which, tokens, s->chunks, NULL);
    for (int64_t t = 0; t < last; t++) {
        s->chunks[t] = s->chunks[t + 1];
        s->labels[t] = s->tokens.ids[t + 1];
    }
    s->chunks[last] = -1;
    s->labels[last] = XD_IGNORE_INDEX;
}

/* Makes up a teacher that gives the next token a high probability. */
static void fill_teacher(side *teacher) {
    float *logits = teacher->logits.data;
    for (int64_t t = 0; t < teacher->tokens.count - 1; t++)
        logits[t * teacher->vocabulary + teacher->labels[t]] = 12.0f;
}

static xd_result train(xd_ctx *ctx, side *student, const xd_xtoken_desc *desc,
                       xd_xtoken_values *loss) {
    const xd_param param = {
        .name = "logits",
        .value = student->logits.data,
        .gradient = student->gradient.data,
        .dtype = XD_DTYPE_F32,
        .count = student->tokens.count * student->logits.cols,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.2;
    xd_optimizer *optimizer;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    for (int step = 0; step <= STEPS; step++) {
        XD_TRY(xd_xtoken_loss(ctx, desc, loss));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (step % 10 == 0)
            printf("step %2d   KL %.4f   cross entropy %.4f\n", step, loss->kd, loss->ce);
    }
    xd_optimizer_destroy(optimizer);
    return XD_OK;
}

static xd_result distill(xd_ctx *ctx, side *student, side *teacher, xd_xtoken_values *loss) {
    const xd_encoding *s = &student->tokens, *t = &teacher->tokens;
    const xd_align_side a = { .spans = s->spans, .count = s->count };
    const xd_align_side b = { .spans = t->spans, .count = t->count };
    xd_alignment both;
    XD_TRY(xd_align_bytes(ctx, &a, &b, &both, NULL));
    const xd_projection_desc map = { .student = student->tokenizer, .teacher = teacher->tokenizer };
    xd_projection projection;
    XD_TRY(xd_projection_build(ctx, &map, &projection, NULL));
    xd_vocab *vocab;
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = student->vocabulary }, &vocab));
    label(&both, XD_CHUNK_STUDENT, &a, student);
    label(&both, XD_CHUNK_TEACHER, &b, teacher);
    fill_teacher(teacher);
    printf("%d and %d tokens, %d chunks\n", (int)a.count, (int)b.count, (int)both.count);

    xd_xtoken_teacher one = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    one.logits = teacher->logits;
    one.projected.projection = &projection;
    one.student_chunks = student->chunks;
    one.teacher_chunks = teacher->chunks;
    one.chunks = both.count;
    xd_xtoken_desc desc = xd_xtoken_defaults();
    desc.vocab = vocab;
    desc.teachers = &one;
    desc.teacher_count = 1;
    desc.student = student->logits;
    desc.common.gradient = student->gradient;
    desc.common.labels.data = student->labels;
    XD_TRY(train(ctx, student, &desc, loss));

    xd_vocab_destroy(vocab);
    xd_projection_destroy(ctx, &projection);
    xd_alignment_destroy(ctx, &both);
    return XD_OK;
}

int main(int argc, char **argv) {
    const char *student = argc > 2 ? argv[1] : "data/student/tokenizer.json";
    const char *teacher = argc > 2 ? argv[2] : "data/teacher/tokenizer.json";
    side sides[2] = { { 0 } };
    xd_xtoken_values loss = { 0 };
    xd_ctx *ctx;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_result result = open_side(ctx, student, &sides[0]);
    if (result == XD_OK) result = open_side(ctx, teacher, &sides[1]);
    if (result == XD_OK) result = distill(ctx, &sides[0], &sides[1], &loss);
    if (result != XD_OK)
        fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    for (int i = 0; i < 2; i++) close_side(&sides[i]);
    xd_ctx_destroy(ctx);
    return result == XD_OK && loss.ce < 0.1 ? 0 : 1;
}
