/* The student of `make demo` on 2 x 2 x 2 ranks of FSDP, shared sequences (cp) and cut columns (tp), beside its teacher, which has
 * another tokenizer and lies on the same ranks as 2 x 4: whole sequences, columns cut in four. Compared with one rank, to the bits.
 *
 *     make build/examples/25_xtoken_student
 *
 * A demo_rank is a place in a mesh, with a share of both models, the rows of a step and the loss, P-KL over chunks of text; a
 * sharded_student is the student under its wrapper, with its optimizer. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include "sharded/sharded.h"

#include <stdio.h>

enum { STEPS = 4 };

typedef struct run {
    demo_job jobs[2]; /* the student's, and the teacher's with its mesh */
    demo_step steps[STEPS];
} run;

/* Teacher ranks have all positions and some columns; student ranks take all columns of their positions. */
static xd_result open_route(const demo_rank *s, const demo_rank *t, xd_route **out) {
    const int64_t begin = t->teacher.share.vocab_begin, end = begin + t->teacher.share.vocab_count;
    const xd_route_span held = { s->position[0], s->position[0] + s->batch.positions };
    xd_route_desc d = { .samples = DEMO_BATCH, .length = DEMO_ROW, .columns = t->teacher.config.vocab };
    d.teacher = (xd_route_side){ t->batch.sequences, t->sequences[0], .column_begin = begin, .column_end = end };
    d.student = (xd_route_side){ s->batch.sequences, .samples = s->sequences, .positions = &held, .span_count = 1 };
    return xd_route_create(s->world, &d, out);
}

static xd_result teach(demo_rank *t, xd_route *route, int step) {
    nn_flat flat = { &t->teacher, t->teacher_weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    demo_read_batch(t, 1.0, 1, step);
    XD_TRY(demo_forward(t, &t->teacher, &source, t->teacher_ids, false, t->teacher_workspace, t->teacher_logits.own));
    return xd_route_send(route, xd_rows_of(t->teacher_logits.own, XD_DTYPE_F32, demo_rank_rows(t), t->teacher.share.vocab_count), NULL);
}

static xd_result learn(sharded_student *student, xd_route *route, int step, demo_step *out) {
    demo_rank *s = student->rank;
    xd_route_window window;
    demo_read_batch(s, 1.0, 1, step);
    XD_TRY(demo_forward(s, &s->model, &student->source, s->ids, true, s->workspace, s->logits.own));
    XD_TRY(xd_route_take(route, &window));
    s->teacher_logits.whole = window.rows.data;
    XD_TRY(demo_arm_loss(s, &s->job->arms[0], out)); /* the gradient takes the place of the logits */
    XD_TRY(xd_route_release(route));
    XD_TRY(sharded_student_backward(student));
    return sharded_student_update(student, out);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    demo_rank ranks[2], *s = &ranks[0], *t = &ranks[1];
    sharded_student student = { 0 };
    xd_route *route;
    for (int i = 0; i < 2; i++) XD_TRY(demo_rank_join(&ranks[i], world, &r->jobs[i]));
    demo_rank_take_range(t);
    student.world = world; /* the gradient's norm is over these; it leaves out what ranks of cp have too */
    XD_TRY(sharded_student_open(&student, s, &(sharded_leg){ .wrap = SHARDED_FSDP }, 1));
    s->asks_nobody = true; /* the teacher is in the other mesh, */
    for (int i = 0; i < 2; i++) XD_TRY(demo_rank_make_buffers(&ranks[i]));
    s->asks_nobody = false, s->asks_teacher = true; /* and its logits come from there */
    XD_TRY(demo_make_loss_workspace(s));
    XD_TRY(open_route(s, t, &route));
    for (int step = 0; step < STEPS; step++) {
        demo_step now = { .learning_rate = 3e-3 };
        XD_TRY(teach(t, route, step));
        XD_TRY(learn(&student, route, step, &now));
        if (xd_comm_rank(world) == 0) r->steps[step] = now;
    }
    s->teacher_logits.whole = NULL, xd_route_destroy(route), sharded_student_close(&student), demo_rank_close(s), demo_rank_close(t);
    return XD_OK;
}

int main(void) {
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    demo_job job = { .dp = 1, .cp = 1, .tp = 1, .fixed_sums = true, .fixed_blocks = true, .arm_count = 1,
                     .arms = { { "pkl", "P-KL", DEMO_PROJECTED, 0.76, 0.1, 1.0, 3e-3, 1.0 } } };
    static demo_lesson lesson;
    xd_error error;
    xd_ctx *ctx;
    int step = 0;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    if (demo_data_find(ctx, "data", true, &lesson.data) != XD_OK || demo_lesson_load(ctx, 0, &lesson) != XD_OK)
        return fprintf(stderr, "%s\n", xd_last_error(ctx)->message), 1;
    const nn_config config = demo_config(xd_tokenizer_describe(lesson.student.tokenizer).size, false);
    demo_lesson_tell(&lesson, &job), job.config = &config;
    run one = { .jobs = { job, job } }, many = one;
    many.jobs[0].dp = many.jobs[0].cp = many.jobs[0].tp = many.jobs[1].dp = 2, many.jobs[1].tp = 4;
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(8, &invariant, run_rank, &many, &error) != XD_OK)
        return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
    for (const demo_step *a = one.steps, *b = many.steps; step < STEPS && a->loss == b->loss && a->soft == b->soft; a++, b++, step++)
        printf("step %d   loss %.5f   P-KL %.5f   norm of the gradient %.5f\n", step, b->loss, b->soft, b->gradient_norm);
    printf("%d of %d steps have the bits of one rank\n", step, STEPS);
    demo_lesson_free(ctx, &lesson), xd_ctx_destroy(ctx);
    return step < STEPS || one.steps[STEPS - 1].gradient_norm != many.steps[STEPS - 1].gradient_norm;
}
