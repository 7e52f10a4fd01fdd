/* The student of `make demo` on 2 x 2 x 2 ranks: FSDP, context parallelism and tensor parallelism.
 * Its teacher has another tokenizer. The same ranks form a 2 x 4 mesh for the teacher, with whole
 * sequences and columns in four shards. The losses have the bits of one rank.
 *
 *     make build/examples/25_xtoken_student
 *
 * A demo_rank holds a rank's shares of both models, the batch and the loss: P-KL over chunks of
 * text. A sharded_student holds the student under its wrapper, and the optimizer. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include "sharded/sharded.h"
#include <stdio.h>

enum { STEPS = 4 };

/* Job 0 has the student's mesh, and job 1 has the teacher's. */
typedef struct run {
    demo_job jobs[2];
    demo_step steps[STEPS];
} run;

/* A teacher rank has some columns of all positions; a student rank needs all columns of some. */
static xd_result open_route(const demo_rank *s, const demo_rank *t, xd_route **out) {
    const int64_t begin = t->teacher.share.vocab_begin;
    const int64_t end = begin + t->teacher.share.vocab_count;
    const xd_route_span held = { s->position[0], s->position[0] + s->batch.positions };
    const xd_route_desc desc = {
        .samples = DEMO_BATCH, .length = DEMO_ROW, .columns = t->teacher.config.vocab,
        .teacher = { .sample_count = t->batch.sequences, .sample_begin = t->sequences[0],
                     .column_begin = begin, .column_end = end },
        .student = { .sample_count = s->batch.sequences, .samples = s->sequences,
                     .positions = &held, .span_count = 1 }
    };
    return xd_route_create(s->world, &desc, out);
}

static xd_result teach(demo_rank *t, xd_route *route, int step) {
    nn_flat flat = { &t->teacher, t->teacher_weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    const int64_t rows = demo_rank_rows(t), columns = t->teacher.share.vocab_count;
    float *logits = t->teacher_logits.own, *workspace = t->teacher_workspace;
    demo_read_batch(t, 1.0, 1, step);
    XD_TRY(demo_forward(t, &t->teacher, &source, t->teacher_ids, false, workspace, logits));
    return xd_route_send(route, xd_rows_of(logits, XD_DTYPE_F32, rows, columns), NULL);
}

static xd_result learn(sharded_student *student, xd_route *route, int step, demo_step *out) {
    demo_rank *s = student->rank;
    xd_route_window window;
    demo_read_batch(s, 1.0, 1, step);
    XD_TRY(demo_forward(s, &s->model, &student->source, s->ids, true, s->workspace, s->logits.own));
    XD_TRY(xd_route_take(route, &window));
    s->teacher_logits.whole = window.rows.data;

    /* The gradient overwrites the logits. */
    XD_TRY(demo_arm_loss(s, &s->job->arms[0], out));
    XD_TRY(xd_route_release(route));
    XD_TRY(sharded_student_backward(student));
    return sharded_student_update(student, out);
}

static xd_result open_models(sharded_student *student, demo_rank ranks[2], const demo_job jobs[2]) {
    demo_rank *s = &ranks[0];
    for (int i = 0; i < 2; i++) XD_TRY(demo_rank_join(&ranks[i], student->world, &jobs[i]));
    demo_rank_take_range(&ranks[1]);
    XD_TRY(sharded_student_open(student, s, &(sharded_leg){ .wrap = SHARDED_FSDP }, 1));

    /* The student's mesh needs no buffers for a teacher, since the route brings its logits. */
    s->asks_nobody = true;
    for (int i = 0; i < 2; i++) XD_TRY(demo_rank_make_buffers(&ranks[i]));
    s->asks_nobody = false;
    s->asks_teacher = true;
    return demo_make_loss_workspace(s);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    demo_rank ranks[2], *s = &ranks[0], *t = &ranks[1];
    /* The gradient norm is over all ranks. It counts replicas on ranks of cp once. */
    sharded_student student = { .world = world };
    xd_route *route;
    int sent = 0; /* micro-batches */
    XD_TRY(open_models(&student, ranks, r->jobs));
    XD_TRY(open_route(s, t, &route));

    for (int step = 0; step < STEPS; step++) {
        demo_step now = { .learning_rate = 3e-3 };
        /* Every rank is on both sides: it sends what the next take of any rank waits for. */
        for (; xd_route_describe(route).due > 0; sent++) XD_TRY(teach(t, route, sent));
        XD_TRY(learn(&student, route, step, &now));
        if (xd_comm_rank(world) == 0) r->steps[step] = now;
    }

    /* The window's memory belongs to the route. */
    s->teacher_logits.whole = NULL;
    xd_route_destroy(route);
    sharded_student_close(&student);
    for (int i = 0; i < 2; i++) demo_rank_close(&ranks[i]);
    return XD_OK;
}

/* Prints and counts the first steps whose losses have the same bits. */
static int count_same(const demo_step *one, const demo_step *many) {
    int step = 0;
    for (; step < STEPS; step++) {
        const demo_step *a = &one[step], *b = &many[step];
        if (a->loss != b->loss || a->soft != b->soft) break;
        printf("step %d   loss %.5f   P-KL %.5f   norm of the gradient %.5f\n", step, b->loss,
               b->soft, b->gradient_norm);
    }
    return step;
}

int main(void) {
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    demo_job job = { .dp = 1, .cp = 1, .tp = 1, .fixed_sums = true, .fixed_blocks = true,
                     .arm_count = 1,
                     .arms = { { "pkl", "P-KL", DEMO_PROJECTED, .kd_weight = 0.76, .ce_weight = 0.1,
                                 .temperature = 1.0, .learning_rate = 3e-3, .share = 1.0 } } };
    static demo_lesson lesson;
    xd_error error;
    xd_ctx *ctx;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    if (demo_data_find(ctx, "data", true, &lesson.data) != XD_OK ||
        demo_lesson_load(ctx, 0, &lesson) != XD_OK) {
        fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
        return 1;
    }

    const xd_tokenizer_info tokenizer = xd_tokenizer_describe(lesson.student.tokenizer);
    const nn_config config = demo_config(tokenizer.size, false);
    demo_lesson_tell(&lesson, &job);
    job.config = &config;
    run one = { .jobs = { job, job } }, many = one;
    many.jobs[0].dp = many.jobs[0].cp = many.jobs[0].tp = 2;
    many.jobs[1].dp = 2;
    many.jobs[1].tp = 4;
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(8, &invariant, run_rank, &many, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return 1;
    }

    const int same = count_same(one.steps, many.steps);
    printf("%d of %d steps have the bits of one rank\n", same, STEPS);
    demo_lesson_free(ctx, &lesson);
    xd_ctx_destroy(ctx);
    const int last = STEPS - 1;
    return same < STEPS || one.steps[last].gradient_norm != many.steps[last].gradient_norm;
}
