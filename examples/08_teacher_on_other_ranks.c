/* A teacher on separate ranks: two ranks share its vocabulary, two others hold the student, half of the samples each,
 * and a route brings every student rank the rows that it needs.
 *
 *     cc -std=c99 -O2 examples/08_teacher_on_other_ranks.c -o route -lm -lpthread
 *
 * The ranks are threads, so the students read the teachers' memory; processes of one node share it too, and nodes send
 * messages: the program stays the same. The models are tables, one row of logits per position. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

enum { TEACHERS = 2, STUDENTS = 2, SAMPLES = 4, LENGTH = 16, VOCABULARY = 101, STEPS = 60 };
enum { ROWS = SAMPLES / STUDENTS * LENGTH };

static float teacher_logit(int64_t row, int64_t column) {
    return column == row % VOCABULARY ? 5.0f : cosf((float)(3 * row + 7 * column));
}

/* A teacher rank: all samples, but only its columns. */
static xd_result teach(xd_route *route, xd_interval columns) {
    const int64_t width = columns.end - columns.begin;
    for (int step = 0; step <= STEPS; step++) {
        xd_rows slot; /* memory that students will read; it may be reused when they have released it */
        XD_TRY(xd_route_slot(route, &slot, NULL));
        for (int64_t i = 0; i < slot.rows * width; i++)
            ((float *)slot.data)[i] = teacher_logit(i / width, columns.begin + i % width);
        XD_TRY(xd_route_post(route));
    }
    return XD_OK;
}

/* A student rank: its samples, all columns. */
static xd_result learn(xd_comm *students, xd_route *route, xd_loss_values *loss) {
    xd_ctx *ctx = xd_comm_ctx(students);
    float logits[ROWS * VOCABULARY] = { 0 }, gradient[ROWS * VOCABULARY];
    const xd_param table = { "table", logits, gradient, XD_DTYPE_F32, .count = ROWS * VOCABULARY };
    xd_optimizer_desc adamw = xd_adamw_defaults(&table, 1);
    xd_optimizer *optimizer;
    xd_vocab *vocab;
    adamw.learning_rate = 0.2;
    XD_TRY(xd_vocab_create_even(ctx, NULL, VOCABULARY, &vocab));
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    xd_loss_desc desc = { .vocab = vocab, .soft_weight = 1.0, .common.comm = students };
    desc.student = xd_rows_of(logits, XD_DTYPE_F32, ROWS, VOCABULARY);
    desc.common.gradient = xd_rows_of(gradient, XD_DTYPE_F32, ROWS, VOCABULARY);
    for (int step = 0; step <= STEPS; step++) {
        xd_route_window window;
        XD_TRY(xd_route_take(route, &window));
        desc.teacher = window.rows;
        XD_TRY(xd_loss(ctx, &desc, loss));
        XD_TRY(xd_route_release(route));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (xd_comm_rank(students) == 0 && step % 20 == 0) printf("step %2d   KL %.4f\n", step, loss->soft);
    }
    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *final) {
    const int rank = xd_comm_rank(world), teaches = rank < TEACHERS, place = teaches ? rank : rank - TEACHERS;
    const xd_interval columns = xd_chunk(VOCABULARY, TEACHERS, place), samples = xd_chunk(SAMPLES, STUDENTS, place);
    xd_route_desc desc = { .payload = XD_ROUTE_LOGITS, .samples = SAMPLES, .length = LENGTH, .columns = VOCABULARY };
    xd_loss_values loss = { 0 };
    xd_comm *mine;
    xd_route *route;
    if (teaches)
        desc.teacher = (xd_route_side){ SAMPLES, .column_begin = columns.begin, .column_end = columns.end };
    else
        desc.student = (xd_route_side){ samples.end - samples.begin, .sample_begin = samples.begin };
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
    if (xd_run_threads(TEACHERS + STUDENTS, NULL, run_rank, &final, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s: %s\n", error.rank, xd_result_name(error.result), error.message);
        return 1;
    }
    return final.soft < 0.02 ? 0 : 1;
}
