/* A loss from hidden states and output weights, without logits of all tokens.
 *
 * Logits exist for 256 rows at a time, never as [tokens, vocabulary]. Student and teacher are the
 * last layers of two models with different widths. Training updates the student's weights. It also
 * updates the student's hidden states, which take the place of earlier layers.
 *
 *     cc -std=c99 -O2 examples/09_head.c -o head -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { ROWS = 1024, VOCABULARY = 4000, STUDENT = 32, TEACHER = 48, STEPS = 40 };

static float hidden[ROWS * STUDENT];
static float hidden_gradient[ROWS * STUDENT];
static float weight[VOCABULARY * STUDENT];
static float weight_gradient[VOCABULARY * STUDENT];
static float teacher_hidden[ROWS * TEACHER];
static float teacher_weight[VOCABULARY * TEACHER];

static void fill(float *values, int64_t count, float scale, uint32_t sample) {
    const xd_philox noise = { .seed = 1, .stream = XD_STREAM_USER, .sample = sample };
    xd_philox_fill_normal(&noise, 0, count, values);
    for (int64_t i = 0; i < count; i++) values[i] *= scale;
}

static xd_rows matrix(const float *values, int64_t rows, int64_t columns) {
    return xd_rows_of(values, XD_DTYPE_F32, rows, columns);
}

static xd_result train(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_optimizer *optimizer,
                       xd_loss_values *first, xd_loss_values *loss) {
    for (int step = 0; step <= STEPS; step++) {
        /* The loss adds to the gradient of the weights. */
        for (int64_t i = 0; i < VOCABULARY * STUDENT; i++) weight_gradient[i] = 0.0f;
        XD_TRY(xd_head_loss(ctx, desc, loss));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (step == 0) *first = *loss;
        if (step % 10 == 0) printf("step %2d   JSD %.4f\n", step, loss->soft);
    }
    return XD_OK;
}

static xd_result distill(xd_ctx *ctx, xd_loss_values *first, xd_loss_values *loss) {
    xd_optimizer *optimizer;
    xd_vocab *vocab;
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &vocab));
    const xd_param params[] = {
        { "hidden", hidden, hidden_gradient, XD_DTYPE_F32, .count = ROWS * STUDENT },
        { "weight", weight, weight_gradient, XD_DTYPE_F32, .count = VOCABULARY * STUDENT },
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(params, 2);
    adamw.learning_rate = 0.03;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    const xd_head_loss_desc desc = {
        .loss.vocab = vocab,
        .loss.soft_weight = 1.0,
        .loss.divergence = XD_JSD,
        .loss.beta = 0.5,
        .student.hidden = matrix(hidden, ROWS, STUDENT),
        .student.weight = matrix(weight, VOCABULARY, STUDENT),
        .teacher.hidden = matrix(teacher_hidden, ROWS, TEACHER),
        .teacher.weight = matrix(teacher_weight, VOCABULARY, TEACHER),
        .hidden_gradient = matrix(hidden_gradient, ROWS, STUDENT),
        .weight_gradient = weight_gradient,
    };
    xd_planned planned; /* what the loss will take: it computes nothing yet */
    XD_TRY(xd_plan_begin(ctx, NULL));
    XD_TRY(xd_head_loss(ctx, &desc, loss));
    XD_TRY(xd_plan_end(ctx, &planned));
    const double logits = 2.0 * ROWS * VOCABULARY * sizeof(float) / 1e6;
    printf("workspace %.1f MB; the logits of both sides would be %.1f MB\n",
           (double)planned.workspace / 1e6, logits);
    XD_TRY(train(ctx, &desc, optimizer, first, loss));

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
    const xd_result result = distill(ctx, &first, &last);
    if (result != XD_OK)
        fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return result == XD_OK && last.soft < 0.5 * first.soft ? 0 : 1;
}
