/* sharded_train.c - what each rank of a leg does: from the start or a checkpoint to the end, or until somebody kills it. */
#define _POSIX_C_SOURCE 200112L /* write, getpid */
#include "sharded.h"

#include <string.h>
#include <unistd.h>

struct sharded_rank {
    xd_ctx *ctx;
    sharded_job own; /* a copy, with one of the leg */
    sharded_leg leg;
    const sharded_job *job;
    demo_rank rank;
    sharded_student student;
    demo_step last; /* what the last step of its state came to */
    sharded_news news;
    demo_report *report; /* of rank 0 */
};

/* On a queue with a thread, which no group counts. */
static uint64_t sharded_sent_beside(const sharded_rank *r) {
    xd_queue *queue = r->student.stages.sends;
    if (!queue || xd_queue_describe(queue).form != XD_QUEUE_WORKER) return 0;
    return xd_queue_describe(queue).traffic.bytes_sent;
}

/* Payload that this rank has sent so far, in all groups that it is in; two of them may be the same. */
static uint64_t sharded_sent(const sharded_rank *r) {
    const xd_groups *stages = r->student.stages.groups;
    const xd_comm *const groups[] = { r->student.world,    r->rank.world,
                                      r->rank.rows,        r->rank.cp,
                                      r->rank.tp,          r->student.data,
                                      r->student.replicas, stages ? stages->pp : NULL };
    uint64_t bytes = sharded_sent_beside(r);
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        bool again = false;
        for (size_t j = 0; j < i; j++) again = again || groups[j] == groups[i];
        if (groups[i] && !again) bytes += xd_comm_traffic(groups[i]).bytes_sent;
    }
    return bytes;
}

/* Pieces of this size are not torn, so all ranks write into one pipe. */
static xd_result sharded_tell(const sharded_rank *r) {
    const sharded_news *news = &r->news;
    if (write(r->job->news, news, sizeof *news) == (ssize_t)sizeof *news) return XD_OK;
    return XD_FAIL(r->rank.ctx, XD_ERROR_IO, "rank %d cannot tell of step %d", news->rank, news->step);
}

/* ---- a step ---- */

static xd_result sharded_learn(sharded_rank *r, int step, demo_step *out) {
    demo_rank *rank = &r->rank;
    const demo_job *job = rank->job;
    const demo_arm *arm = &job->arms[0];
    out->learning_rate = demo_learning_rate(arm->learning_rate, step, job->steps);
    demo_read_batch(rank, arm->share, job->seed, step);
    XD_TRY(demo_ask_teacher(rank));
    if (r->student.stages.built) {
        XD_TRY(sharded_stages_learn(&r->student, arm, out));
        return sharded_student_update(&r->student, out);
    }
    XD_TRY(demo_forward(rank, &rank->model, &r->student.source, rank->ids, true, rank->workspace,
                        rank->logits.own));
    XD_TRY(demo_arm_loss(rank, arm, out));
    XD_TRY(sharded_student_backward(&r->student));
    return sharded_student_update(&r->student, out);
}

static xd_result sharded_record(sharded_rank *r, int step, const demo_step *out) {
    const demo_moment at = { r->rank.job->seed, step, r->news.seconds };
    const xd_result result =
        r->report ? demo_report_step(r->rank.ctx, r->report, r->rank.job, &at, out) : XD_OK;
    return xd_agree(r->student.world, result);
}

static xd_result sharded_step(sharded_rank *r, int step) {
    const double start = xd_now(r->rank.ctx);
    const uint64_t sent = sharded_sent(r);
    demo_step out;
    memset(&out, 0, sizeof out);
    r->student.wrapper_seconds = 0.0;
    const xd_result learned = sharded_learn(r, step, &out);
    if (r->student.done == step + 1) r->last = out; /* others may be lost before they have the weights too */
    XD_TRY(learned);
    r->news.step = step + 1;
    r->news.steps++;
    r->news.seconds += out.seconds = xd_now(r->rank.ctx) - start;
    r->news.wrapper_seconds += r->student.wrapper_seconds;
    r->news.bytes_sent += sharded_sent(r) - sent;
    XD_TRY(sharded_record(r, step, &out));
    const sharded_leg *leg = r->job->leg;
    const bool in_turn = leg->save_every > 0 && (step + 1) % leg->save_every == 0;
    if (step + 1 == leg->save_at || in_turn || step + 1 == r->rank.job->steps)
        XD_TRY(sharded_save(&r->student, leg->directory, step + 1));
    return sharded_tell(r);
}

/* ---- the end ---- */

/* What is kept is measured as it is kept: every weight rounded to bf16. */
static xd_result sharded_finish(sharded_rank *r) {
    demo_rank *rank = &r->rank;
    bool failed = false;
    char sample[SAMPLE_BYTES];
    float *weights = demo_floats(rank, rank->model.float_count, &failed);
    nn_flat flat = { &rank->model, weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    xd_result result = failed ? XD_FAIL(rank->ctx, XD_ERROR_MEMORY, "no room for the whole student") : XD_OK;
    result = xd_agree(rank->world, result);
    if (result == XD_OK) result = sharded_student_gather(&r->student, weights);
    if (result == XD_OK) demo_round_to_bf16(weights, rank->model.float_count);
    if (result == XD_OK) result = demo_evaluate_student(rank, &source, &r->news.bits_per_byte);
    if (result == XD_OK && r->job->leg->keep) result = demo_keep_student(rank, weights, true, sample);
    xd_release(rank->ctx, weights);
    return result == XD_OK ? sharded_tell(r) : result;
}

/* ---- all together ---- */

/* What an interrupted leg wrote after the state that it goes on from is cut off. Who was lost may not have written of the last step
 * of that. */
static xd_result sharded_go_to_line(sharded_rank *r) {
    const int done = r->student.done;
    const demo_moment at = { r->rank.job->seed, done - 1, 0.0 };
    long bytes = 0;
    xd_result result = sharded_metrics_bytes(r->ctx, r->leg.directory, done, &bytes);
    const bool lacks = result == XD_ERROR_DATA && r->news.inherited;
    if (lacks) result = sharded_metrics_bytes(r->ctx, r->leg.directory, done - 1, &bytes);
    if (result == XD_OK) result = demo_report_go_to(r->ctx, r->report, bytes);
    if (result == XD_OK && lacks) result = demo_report_step(r->ctx, r->report, r->rank.job, &at, &r->last);
    return result;
}

static xd_result sharded_open_report(sharded_rank *r) {
    const sharded_leg *leg = r->job->leg;
    xd_result result = XD_OK;
    if (xd_comm_rank(r->student.world) == 0) {
        result = demo_report_open(r->rank.ctx, leg->directory, leg->resume, &r->report);
        if (result == XD_OK && leg->resume) result = sharded_go_to_line(r);
    }
    return xd_agree(r->student.world, result);
}

/* Who was lost may have been so before the first checkpoint: all ranks are told then that it is missing, and begin anew. */
static xd_result sharded_resume(sharded_rank *r, const sharded_rank *held) {
    const sharded_leg *leg = r->job->leg;
    if (!leg->resume) return XD_OK;
    if (held) r->last = held->last;
    xd_result result = XD_ERROR_MISSING;
    if (leg->loss_count > 0) result = sharded_inherit(&r->student, held ? &held->student : NULL, &r->last);
    r->news.inherited = result == XD_OK;
    if (result == XD_ERROR_MISSING) result = sharded_load(&r->student, leg->directory);
    if (result == XD_ERROR_MISSING && leg->loss_count > 0) return XD_OK;
    return result == XD_OK ? sharded_student_publish(&r->student) : result;
}

/* Once it has a state what it held before is closed. */
static xd_result sharded_train(sharded_rank *r, sharded_rank **held) {
    XD_TRY(sharded_resume(r, *held));
    sharded_rank_close(*held);
    *held = r;
    XD_TRY(sharded_open_report(r));
    const int done = r->news.step = r->student.done;
    if (r->job->leg->loss_count > 0) XD_TRY(sharded_tell(r));
    for (int step = done; step < r->rank.job->steps; step++) XD_TRY(sharded_step(r, step));
    if (r->news.inherited && done == r->rank.job->steps) /* nobody may have saved it */
        XD_TRY(sharded_save(&r->student, r->leg.directory, done));
    return r->student.stages.built ? XD_OK : sharded_finish(r); /* stages measure nothing */
}

static xd_result sharded_work(sharded_rank *r, sharded_rank **held) {
    XD_TRY(sharded_student_open(&r->student, &r->rank, r->job->leg, r->rank.job->seed));
    XD_TRY(xd_agree(r->student.world, demo_rank_make_buffers(&r->rank)));
    r->news.rank = xd_comm_rank(r->student.world);
    r->news.process = (long)getpid();
    r->news.world = r->job->world;
    r->news.place.wrap = r->job->leg->wrap;
    r->news.place.axes = r->job->leg->axes;
    r->news.place.pp = r->job->leg->pp;
    r->news.planned = r->student.planned;
    r->news.counted = r->student.counted;
    return sharded_train(r, held);
}

/* A rank's place is one among those of its stage. */
static xd_result sharded_join(sharded_rank *r, xd_comm *world) {
    sharded_stages *stages = &r->student.stages;
    r->student.world = world;
    if (r->job->leg->pp == 1) return demo_rank_join(&r->rank, world, &r->job->demo);
    XD_TRY(sharded_stages_join(stages, world, r->job->leg));
    return demo_rank_join(&r->rank, stages->groups->tp_dp_cp, &r->job->demo);
}

void sharded_rank_close(sharded_rank *r) {
    if (!r) return;
    sharded_student_close(&r->student);
    demo_rank_close(&r->rank);
    xd_grid_destroy(r->student.stages.grid);
    xd_release(r->ctx, r);
}

xd_result sharded_run_on(xd_comm *world, const sharded_job *job, sharded_rank **held) {
    xd_ctx *ctx = xd_comm_ctx(world);
    sharded_rank *r = (sharded_rank *)xd_allocate(ctx, sizeof *r);
    XD_REQUIRE(ctx, r, XD_ERROR_MEMORY, "no room for a rank");
    r->ctx = ctx;
    r->own = *job;
    r->leg = *job->leg;
    r->own.leg = &r->leg;
    r->job = &r->own;
    (void)sharded_counted(); /* from here on */
    xd_result result = sharded_join(r, world);
    if (result == XD_OK) result = sharded_work(r, held);
    const xd_result closed = demo_report_close(ctx, r->report);
    r->report = NULL;
    if (*held != r) sharded_rank_close(r);
    return result == XD_OK ? closed : result;
}

xd_result sharded_run_rank(xd_comm *world, void *job) {
    sharded_rank *held = NULL;
    const xd_result result = sharded_run_on(world, (const sharded_job *)job, &held);
    sharded_rank_close(held);
    return result;
}
