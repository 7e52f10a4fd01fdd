/* A teacher on separate ranks: a route brings every student rank the rows that it needs.
 *
 * Two ranks split the teacher's vocabulary. Two other ranks each hold the student and train on half
 * of the samples. The ranks are threads, so students read the memory of the teachers. Processes of
 * one node share memory too, and nodes send messages: the program stays the same. The models are
 * tables with one row of logits per position.
 *
 *     cc -std=c99 -O2 examples/08_teacher_on_other_ranks.c -o route -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

enum { TEACHERS = 2, STUDENTS = 2, SAMPLES = 4, LENGTH = 16, VOCABULARY = 101, STEPS = 60 };
enum { ROWS = SAMPLES / STUDENTS * LENGTH };

static float teacher_logit(int64_t row, int64_t column) {
    return column == row % VOCABULARY ? 5.0f : cosf((float)(3 * row + 7 * column));
}

/* Runs on a teacher rank, for all samples and its columns. */
static xd_result teach(xd_route *route, xd_interval columns) {
    const int64_t width = columns.end - columns.begin;
    for (int step = 0; step <= STEPS; step++) {
        /* Students read this memory. The route reuses it after they release it. */
        xd_rows slot;
        XD_TRY(xd_route_slot(route, &slot, NULL));
        float *logits = slot.data;
        for (int64_t i = 0; i < slot.rows * width; i++)
            logits[i] = teacher_logit(i / width, columns.begin + i % width);
        XD_TRY(xd_route_post(route));
    }
    return XD_OK;
}

static xd_result train(xd_comm *students, xd_route *route, xd_loss_desc *desc,
                       xd_optimizer *optimizer, xd_loss_values *loss) {
    for (int step = 0; step <= STEPS; step++) {
        xd_route_window window;
        XD_TRY(xd_route_take(route, &window));
        desc->teacher = window.rows;
        XD_TRY(xd_loss(xd_comm_ctx(students), desc, loss));
        XD_TRY(xd_route_release(route));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (xd_comm_rank(students) == 0 && step % 20 == 0)
            printf("step %2d   KL %.4f\n", step, loss->soft);
    }
    return XD_OK;
}

/* Runs on a student rank, for its samples and all columns. */
static xd_result learn(xd_comm *students, xd_route *route, xd_loss_values *loss) {
    xd_ctx *ctx = xd_comm_ctx(students);
    float logits[ROWS * VOCABULARY] = { 0 };
    float gradient[ROWS * VOCABULARY];
    xd_optimizer *optimizer;
    xd_vocab *vocab;

    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &vocab));
    const xd_param table = {
        .name = "table",
        .value = logits,
        .gradient = gradient,
        .dtype = XD_DTYPE_F32,
        .count = ROWS * VOCABULARY,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&table, 1);
    adamw.learning_rate = 0.2;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    xd_loss_desc desc = {
        .student = xd_rows_of(logits, XD_DTYPE_F32, ROWS, VOCABULARY),
        .common.gradient = xd_rows_of(gradient, XD_DTYPE_F32, ROWS, VOCABULARY),
        .common.comm = students,
        .vocab = vocab,
        .soft_weight = 1.0,
    };
    XD_TRY(train(students, route, &desc, optimizer, loss));

    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *final) {
    const int rank = xd_comm_rank(world);
    const int teaches = rank < TEACHERS;
    const int place = teaches ? rank : rank - TEACHERS;
    const xd_interval columns = xd_chunk(VOCABULARY, TEACHERS, place);
    const xd_interval samples = xd_chunk(SAMPLES, STUDENTS, place);
    xd_loss_values loss = { 0 };
    xd_comm *mine;
    xd_route *route;

    xd_route_desc desc = {
        .payload = XD_ROUTE_LOGITS,
        .samples = SAMPLES,
        .length = LENGTH,
        .columns = VOCABULARY,
    };
    if (teaches) {
        desc.teacher.sample_count = SAMPLES;
        desc.teacher.column_begin = columns.begin;
        desc.teacher.column_end = columns.end;
    } else {
        desc.student.sample_count = samples.end - samples.begin;
        desc.student.sample_begin = samples.begin;
    }
    XD_TRY(xd_comm_split(world, teaches, rank, &mine));
    XD_TRY(xd_route_create(world, &desc, &route));
    const xd_result result = teaches ? teach(route, columns) : learn(mine, route, &loss);
    xd_route_destroy(route);
    xd_comm_destroy(mine);
    if (rank == TEACHERS) *(xd_loss_values *)final = loss;
    return result;
}

int main(void) {
    xd_error error;
    xd_loss_values final = { 0 };
    if (xd_run_threads(TEACHERS + STUDENTS, NULL, run_rank, &final, &error) == XD_OK)
        return final.soft < 0.02 ? 0 : 1;
    fprintf(stderr, "rank %d: %s: %s\n", error.rank, xd_result_name(error.result), error.message);
    return 1;
}
