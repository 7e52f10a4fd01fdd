/* A loss from hidden states and the output weights: logits exist for 256 rows at a time, never [tokens, vocabulary].
 *
 *     cc -std=c99 -O2 examples/09_head.c -o head -lm -lpthread
 *
 * Student and teacher are the last layers of two models of different widths. The student's weights are trained, and
 * its hidden states too, instead of the layers that would compute them. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { ROWS = 1024, VOCABULARY = 4000, STUDENT = 32, TEACHER = 48, STEPS = 40 };

static float hidden[ROWS * STUDENT], weight[VOCABULARY * STUDENT];
static float hidden_gradient[ROWS * STUDENT], weight_gradient[VOCABULARY * STUDENT];
static float teacher_hidden[ROWS * TEACHER], teacher_weight[VOCABULARY * TEACHER];

static void fill(float *values, int64_t count, float scale, uint32_t sample) {
    const xd_philox noise = { .seed = 1, .stream = XD_STREAM_USER, .sample = sample };
    xd_philox_fill_normal(&noise, 0, count, values);
    for (int64_t i = 0; i < count; i++) values[i] *= scale;
}

static xd_rows matrix(const float *values, int64_t rows, int64_t columns) {
    return xd_rows_of(values, XD_DTYPE_F32, rows, columns);
}

static xd_result train(xd_ctx *ctx, xd_loss_values *first, xd_loss_values *loss) {
    const xd_param params[] = {
        { "hidden", hidden, hidden_gradient, XD_DTYPE_F32, .count = ROWS * STUDENT },
        { "weight", weight, weight_gradient, XD_DTYPE_F32, .count = VOCABULARY * STUDENT },
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(params, 2);
    xd_optimizer *optimizer;
    xd_vocab *vocab;
    adamw.learning_rate = 0.03;
    XD_TRY(xd_vocab_create_even(ctx, NULL, VOCABULARY, &vocab));
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    const xd_head_loss_desc desc = {
        .loss = { .vocab = vocab, .soft_weight = 1.0, .divergence = XD_JSD, .beta = 0.5 },
        .student = { .hidden = matrix(hidden, ROWS, STUDENT), .weight = matrix(weight, VOCABULARY, STUDENT) },
        .teacher = { .hidden = matrix(teacher_hidden, ROWS, TEACHER),
                     .weight = matrix(teacher_weight, VOCABULARY, TEACHER) },
        .hidden_gradient = matrix(hidden_gradient, ROWS, STUDENT),
        .weight_gradient = weight_gradient,
    };
    printf("workspace %.1f MB; the logits of both sides would be %.1f MB\n",
           (double)xd_head_loss_workspace_bytes(&desc) / 1e6, 2.0 * ROWS * VOCABULARY * sizeof(float) / 1e6);
    for (int step = 0; step <= STEPS; step++) {
        for (int64_t i = 0; i < VOCABULARY * STUDENT; i++) weight_gradient[i] = 0.0f; /* it is added to */
        XD_TRY(xd_head_loss(ctx, &desc, loss));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (step == 0) *first = *loss;
        if (step % 10 == 0) printf("step %2d   JSD %.4f\n", step, loss->soft);
    }
    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

int main(void) {
    xd_loss_values first = { 0 }, last = { 0 };
    xd_ctx *ctx;
    fill(hidden, ROWS * STUDENT, 1.0f, 0);
    fill(weight, VOCABULARY * STUDENT, 0.05f, 1);
    fill(teacher_hidden, ROWS * TEACHER, 1.0f, 2);
    fill(teacher_weight, VOCABULARY * TEACHER, 0.3f, 3);
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    const xd_result result = train(ctx, &first, &last);
    if (result != XD_OK) fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return result == XD_OK && last.soft < 0.5 * first.soft ? 0 : 1;
}
