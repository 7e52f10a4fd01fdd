/* distil_plan.c - how much memory and time a run takes, said before it begins. */
#include "../../examples/nn/nn_matmul.h"
#include "distil.h"
#include "ranks.h"

#include <stdio.h>
#include <string.h>

/* What a rank multiplies in a second, in units of 1e9 operations; 0.1 s. */
static double plan_speed(xd_ctx *ctx) {
    enum { ROWS = 256, WIDTH = 512 };
    bool failed = false;
    float *a = (float *)ranks_room(ctx, ROWS * WIDTH, sizeof *a, &failed);
    float *b = (float *)ranks_room(ctx, WIDTH * WIDTH, sizeof *b, &failed);
    float *c = (float *)ranks_room(ctx, ROWS * WIDTH, sizeof *c, &failed);
    const double start = xd_now(ctx);
    int done = 0;
    double seconds = 0.0;
    for (; !failed && seconds < 0.1; done++, seconds = xd_now(ctx) - start)
        nn_matmul(nn_dense(a, ROWS, WIDTH), nn_transpose(nn_dense(b, WIDTH, WIDTH)), c, WIDTH, false);
    xd_release(ctx, a);
    xd_release(ctx, b);
    xd_release(ctx, c);
    return failed ? 1.0 : 2e-9 * ROWS * WIDTH * WIDTH * done / seconds;
}

/* Billions of operations for a token: forward; and with it backward, where frozen ends need half as much. */
static double plan_forward(const nn_config *c) {
    const int64_t embedding = (int64_t)c->vocab * c->hidden; /* it is looked up, the head is multiplied */
    return 2e-9 * (double)(lm_weight_count(c) - (c->tied ? 0 : embedding));
}

static double plan_training(const nn_config *c, bool frozen) {
    const double head = 2e-9 * (double)c->vocab * c->hidden;
    return 3.0 * plan_forward(c) - (frozen ? head : 0.0);
}

/* Products reach some three quarters of what they do alone: attention, norms and losses lie between. */
static double plan_seconds(const distil_run *r, double operations) {
    return operations / (r->gflops * r->o->ranks * 0.75);
}

static double plan_tokens(const distil_run *r) {
    return (double)r->steps * r->o->batch * r->o->row;
}

/* Of the text alone. */
static double plan_lesson(const distil_run *r) {
    const double tokens = plan_tokens(r);
    const double measured = (double)lesson_point_count(r->steps) * (double)r->text[TEXT_CHOOSE].count;
    const bool frozen = r->student.kind == STUDENT_LAYERS;
    return plan_seconds(r, tokens * plan_training(&r->config, frozen) + measured * plan_forward(&r->config));
}

/* What a running teacher adds: it reads the rows in its own tokens. */
static double plan_live(const distil_run *r) {
    const double ratio =
        (double)distil_teacher_text(r, TEXT_TRAIN)->count / (double)r->text[TEXT_TRAIN].count;
    return r->o->live ? plan_seconds(r, plan_tokens(r) * ratio * plan_forward(&r->teacher.config)) : 0.0;
}

/* The share of an arm's steps that an interrupted run has left. */
static double plan_left(const distil_run *r, distil_arm_kind arm) {
    char state[512];
    distil_state_path(r, arm, state);
    return 1.0 - (double)lesson_done(r->ctx, state, r->facts) / (double)r->steps;
}

static xd_result plan_memory(const distil_run *r, int64_t *bytes) {
    const lesson_desc lesson = { .student = r->config,
                                 .frozen_ends = r->student.kind == STUDENT_LAYERS,
                                 .kd_weight = r->o->kd_weight,
                                 .ce_weight = r->o->ce_weight,
                                 .rows = r->o->batch,
                                 .row = r->o->row,
                                 .live = r->o->live ? &r->teacher : NULL,
                                 .pair = r->own.tokenizer ? &r->pair : NULL,
                                 .ranks = r->o->ranks };
    const int64_t teacher = 4 * lm_weight_count(&r->teacher.config);
    const int64_t caching = r->o->live ? 0 : teacher + cache_bytes(&r->plan);
    const int64_t learning = teacher + 4 * lm_weight_count(&r->config) + lesson_bytes(&lesson);
    const int64_t left = ranks_memory_left();
    *bytes = caching > learning ? caching : learning;
    XD_REQUIRE(
        r->ctx, left == 0 || *bytes <= left, XD_ERROR_MEMORY,
        "this takes about %lld MiB, the machine has %lld left: fewer --ranks, a smaller --batch or a smaller "
        "teacher take less",
        (long long)(*bytes >> 20), (long long)(left >> 20));
    return XD_OK;
}

/* The cache's missing parts, what two arms leave to be continued, and the student. */
static xd_result plan_disk(const distil_run *r, int64_t missing, int64_t parts) {
    const int64_t position = 16 + 4 * (int64_t)(r->o->likeliest + r->o->draws);
    const int64_t cache = r->plan.text->count * position / parts * missing;
    const int64_t weights = lm_weight_count(&r->config);
    const int64_t bytes = cache + 2 * (4 * 4 + 2) * weights + (1 << 20);
    const int64_t left = ranks_disk_left(r->o->out);
    XD_REQUIRE(r->ctx, left == 0 || bytes <= left, XD_ERROR_IO,
               "%s takes about %lld MiB, its file system has %lld left", r->o->out, (long long)(bytes >> 20),
               (long long)(left >> 20));
    return XD_OK;
}

static void plan_say_time(const char *what, double seconds) {
    if (seconds < 90.0)
        printf("%s %.0f s", what, seconds < 1.0 ? 1.0 : seconds);
    else
        printf("%s %.0f min", what, seconds / 60.0);
}

/* A student takes `taught`, and without a teacher `alone`; of both what is left. */
static void plan_say_training(const distil_run *r, double taught, double alone,
                              const double left[DISTIL_ARMS]) {
    const char *begin = r->o->live ? " about" : " for the cache,";
    if (left[DISTIL_TAUGHT] < 1.0) {
        plan_say_time(begin,
                      taught * left[DISTIL_TAUGHT] + (r->wants_alone ? alone * left[DISTIL_ALONE] : 0.0));
        printf(" for the steps left\n");
        return;
    }
    plan_say_time(begin, taught);
    printf(" for a student%s\n", r->wants_alone ? ", of two" : "");
}

xd_result distil_plan(distil_run *r) {
    const nn_config *teacher = &r->teacher.config;
    const tokens *text = &r->text[TEXT_TRAIN];
    int64_t bytes = 0, parts = 1, missing = 0;
    char name[96];
    r->gflops = plan_speed(r->ctx);
    XD_TRY(plan_memory(r, &bytes));
    if (!r->o->live) XD_TRY(cache_missing(r->ctx, &r->plan, &parts, &missing));
    XD_TRY(plan_disk(r, missing, parts));
    const double caching = plan_seconds(r, (double)cache_tokens_read(&r->plan) * plan_forward(teacher)) *
                           (double)missing / (double)parts;
    const double alone = plan_lesson(r), taught = alone + plan_live(r);
    const double left[DISTIL_ARMS] = { plan_left(r, DISTIL_TAUGHT), plan_left(r, DISTIL_ALONE) };
    r->wants_alone = r->o->alone || (!r->o->no_alone && alone < 900.0);
    distil_student_name(r, name);
    printf("teacher   %s: %.1f M weights, %d layers, %d tokens\n", r->teacher.name,
           1e-6 * (double)lm_weight_count(teacher), teacher->layers, teacher->vocab);
    printf("student   %s: %.1f M weights\n", name, 1e-6 * (double)lm_weight_count(&r->config));
    printf("text      %zu bytes to learn from (%lld tokens), %zu and %zu held out\n", text->bytes,
           (long long)text->count, r->split.bytes[TEXT_CHOOSE], r->split.bytes[TEXT_REPORT]);
    printf("training  %d steps of %d rows of %d tokens: the text %.1f times\n", r->steps, r->o->batch,
           r->o->row, plan_tokens(r) / (double)text->count);
    printf("takes     about %lld MiB;", (long long)(bytes >> 20));
    if (!r->o->live) plan_say_time(" about", caching);
    plan_say_training(r, taught, alone, left);
    printf("stop      Ctrl-C; the same command goes on\n");
    if (plan_tokens(r) > 10.0 * (double)text->count)
        printf("note      the text is short for so many steps: it may be learned by heart\n");
    fflush(stdout);
    return XD_OK;
}
