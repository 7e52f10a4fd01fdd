/* lesson.c - a run: rooms, steps, measurements, the best student. */
#include "lesson.h"
#include "interrupt.h"
#include "lesson_inside.h"
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

int lesson_point_count(int steps) {
    return steps < LESSON_POINTS ? steps : (int)LESSON_POINTS;
}

int lesson_point_step(int i, int steps) {
    return (int)((int64_t)steps * (i + 1) / lesson_point_count(steps));
}

static bool lesson_has_both(const lesson_desc *d) {
    return d->teacher && !d->pair && d->kd_weight != 0.0 && d->ce_weight != 0.0;
}

/* What a rank takes beside the shared weights. */
static int64_t lesson_rank_bytes(const lesson_desc *d, const nn_model *model) {
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = (d->rows + d->ranks - 1) / d->ranks;
    batch.positions = d->row;
    const int64_t logits = (int64_t)batch.sequences * d->row * d->student.vocab;
    return 4 * (model->float_count + nn_workspace_floats(model, &batch, true) +
                logits * (lesson_has_both(d) ? 2 : 1)) +
           judge_bytes(&d->student, d->row) + lesson_live_bytes(d);
}

int64_t lesson_bytes(const lesson_desc *d) {
    nn_model model;
    if (nn_model_init(&d->student, NULL, NULL, &model)) return 0;
    model.frozen_ends = d->frozen_ends;
    const int64_t shared =
        4 * 5 * model.float_count; /* weights, best, last, and two moments of all that may be trained */
    const int64_t bytes = shared + d->ranks * lesson_rank_bytes(d, &model);
    nn_model_free(&model);
    return bytes;
}

/* ---- a rank ---- */

static bool lesson_trains(const lesson_job *job, const nn_param *p) {
    return p->offset >= job->begin && p->offset < job->end;
}

static void lesson_list_params(lesson_rank *r) {
    const lesson_job *job = r->job;
    for (int i = 0; i < job->model.param_count; i++) {
        const nn_param *from = &job->model.params[i];
        xd_param *to = &r->params[r->param_count];
        if (!lesson_trains(job, from)) continue;
        to->name = from->name;
        to->value = job->weights + from->offset;
        to->gradient = r->gradient + from->offset;
        to->dtype = XD_DTYPE_F32;
        to->count = nn_param_count(from);
        to->no_decay = !nn_param_decays(from);
        r->param_count++;
    }
}

/* Equal shares of the elements, in whole parameters. */
static void lesson_share_params(lesson_rank *r) {
    const int64_t all = r->job->end - r->job->begin;
    const int ranks = xd_comm_size(r->world), rank = xd_comm_rank(r->world);
    int64_t before = 0;
    r->own_begin = r->own_end = r->param_count;
    for (int i = 0; i < r->param_count; i++) {
        const int owner = (int)(before * ranks / all);
        if (owner == rank && r->own_begin == r->param_count) r->own_begin = i;
        if (owner > rank && r->own_end == r->param_count) r->own_end = i;
        before += r->params[i].count;
    }
    if (r->own_begin == r->param_count) r->own_begin = r->own_end;
}

static xd_result lesson_rooms(lesson_rank *r) {
    const lesson_desc *d = r->job->desc;
    const nn_model *m = &r->job->model;
    bool failed = false;
    const int64_t held = (int64_t)r->batch.sequences * d->row,
                  entries = d->teacher && !d->pair ? held * d->teacher->entries : 0;
    r->gradient = (float *)ranks_room(r->ctx, m->float_count, sizeof(float), &failed);
    r->params = (xd_param *)ranks_room(r->ctx, m->param_count, sizeof *r->params, &failed);
    r->workspace =
        (float *)ranks_room(r->ctx, nn_workspace_floats(m, &r->batch, true), sizeof(float), &failed);
    r->logits = (float *)ranks_room(r->ctx, held * m->config.vocab, sizeof(float), &failed);
    r->ids = (int32_t *)ranks_room(r->ctx, held, sizeof(int32_t), &failed);
    r->labels = (int32_t *)ranks_room(r->ctx, held, sizeof(int32_t), &failed);
    r->starts = (int64_t *)ranks_room(r->ctx, r->batch.sequences, sizeof(int64_t), &failed);
    r->cached_ids = (int32_t *)ranks_room(r->ctx, entries, sizeof(int32_t), &failed);
    r->probabilities = (double *)ranks_room(r->ctx, entries, sizeof(double), &failed);
    r->values = (float *)ranks_room(r->ctx, entries, sizeof(float), &failed);
    if (lesson_has_both(d))
        r->beside = (float *)ranks_room(r->ctx, held * m->config.vocab, sizeof(float), &failed);
    XD_REQUIRE(r->ctx, !failed, XD_ERROR_MEMORY, "no room for %d rows of %d tokens", r->batch.sequences,
               d->row);
    r->batch.ids = r->ids;
    XD_TRY(lesson_live_create(r));
    const int most = d->live ? d->live->positions : 0;
    return d->pair ? pairing_row_create(r->ctx, d->row, most, &r->pair_row) : XD_OK;
}

static xd_result lesson_create_optimizer(lesson_rank *r) {
    xd_optimizer_desc desc = xd_adamw_defaults(r->params + r->own_begin, r->own_end - r->own_begin);
    desc.beta2 = 0.95;
    desc.weight_decay = 0.1;
    XD_TRY(xd_optimizer_create(r->ctx, &desc, &r->optimizer));
    for (int i = r->own_begin; i < r->own_end; i++)
        r->job->states[i] = xd_optimizer_state_at(r->optimizer, i - r->own_begin);
    return XD_OK;
}

static xd_result lesson_rank_create(lesson_rank *r) {
    const lesson_desc *d = r->job->desc;
    const int ranks = xd_comm_size(r->world), rank = xd_comm_rank(r->world);
    r->first_row = d->rows * rank / ranks;
    r->batch.sequences = d->rows * (rank + 1) / ranks - r->first_row;
    r->batch.positions = d->row;
    XD_TRY(lesson_rooms(r));
    lesson_list_params(r);
    lesson_share_params(r);
    XD_TRY(lesson_create_optimizer(r));
    XD_TRY(xd_vocab_create(r->ctx, &(xd_vocab_desc){ .size = d->student.vocab }, &r->columns));
    return judge_create(r->world, &d->student, d->row, &r->judge);
}

static void lesson_rank_free(lesson_rank *r) {
    void *rooms[] = { r->gradient,   r->params, r->workspace, r->logits,        r->ids,           r->labels,
                      r->cached_ids, r->values, r->beside,    r->probabilities, r->losses.memory, r->starts };
    xd_optimizer_destroy(r->optimizer);
    xd_vocab_destroy(r->columns);
    if (r->judge.ctx) judge_free(&r->judge);
    pairing_row_free(r->ctx, &r->pair_row);
    lesson_live_free(r);
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) xd_release(r->ctx, rooms[i]);
}

/* ---- a run ---- */

/* Rank 0: the best weights so far. */
static void lesson_keep(lesson_job *job, double bits) {
    lesson *out = job->out;
    out->heldout[job->points] = bits;
    out->heldout_at[job->points] = job->done;
    if (job->points == 0 || bits < out->heldout[job->best_point]) {
        job->best_point = job->points;
        memcpy(job->best, job->weights, (size_t)job->model.float_count * sizeof *job->best);
    }
    job->points++;
}

/* Every step is done, or nothing was better for long. */
static bool lesson_is_over(const lesson_job *job) {
    const bool tired = job->points > 0 && job->points - 1 - job->best_point >= LESSON_PATIENCE;
    return job->done == job->desc->steps || (job->desc->stop_early && tired);
}

/* Saves take a fiftieth of the time at most; the last one is always there. */
static bool lesson_saves(const lesson_job *job, double now) {
    return job->desc->state && (now - job->saved > 50.0 * job->save_seconds || lesson_is_over(job));
}

/* After a step: measures the student where a point is. Collective. */
static xd_result lesson_point(lesson_rank *r, int done) {
    lesson_job *job = r->job;
    const bool first = xd_comm_rank(r->world) == 0;
    double bits = 0.0;
    xd_result result = XD_OK;
    if (lesson_point_step(job->points, job->desc->steps) != done) return XD_OK;
    XD_TRY(judge_bits(&r->judge, job->weights, job->desc->choose, &bits));
    if (first) {
        job->done = done;
        lesson_keep(job, bits);
        if (lesson_saves(job, xd_now(r->ctx))) {
            const double before = xd_now(r->ctx);
            result = lesson_state_save(r->ctx, job);
            job->saved = xd_now(r->ctx);
            job->save_seconds = job->saved - before;
        }
    }
    return xd_agree(r->world, result); /* the others wait: they read what rank 0 has counted */
}

static void lesson_tell(const lesson_rank *r, meter *line, int done, double loss) {
    const lesson_job *job = r->job;
    char extra[64];
    if (job->points)
        snprintf(extra, sizeof extra, "loss %.3f, held out %.3f", loss, job->out->heldout[job->points - 1]);
    else
        snprintf(extra, sizeof extra, "loss %.3f", loss);
    meter_show(r->ctx, line, done, extra);
}

/* Each step is collective, so all ranks see before its end what rank 0 has set before its beginning. */
static void lesson_ask(lesson_rank *r, int step) {
    if (xd_comm_rank(r->world) == 0 && interrupt_asked() &&
        __atomic_load_n(&r->job->stop, __ATOMIC_RELAXED) == 0)
        __atomic_store_n(&r->job->stop, step + 1, __ATOMIC_RELAXED);
}

/* Rank 0 saves the state between two points. Collective. */
static xd_result lesson_stop(lesson_rank *r, int done) {
    lesson_job *job = r->job;
    xd_result result = XD_OK;
    if (xd_comm_rank(r->world) == 0 && job->points) {
        job->done = done;
        if (job->desc->state) result = lesson_state_save(r->ctx, job);
    }
    return xd_agree(r->world, result);
}

static xd_result lesson_loop(lesson_rank *r) {
    lesson_job *job = r->job;
    const lesson_desc *d = job->desc;
    const bool first = xd_comm_rank(r->world) == 0;
    meter line = meter_begin(r->ctx, d->name, "steps", job->done, d->steps);
    for (int step = job->done; !lesson_is_over(job); step++) {
        double loss = 0.0;
        lesson_ask(r, step);
        XD_TRY(lesson_step(r, step, &loss));
        if (first) job->out->losses[step] = (float)loss;
        XD_TRY(lesson_point(r, step + 1));
        if (first) lesson_tell(r, &line, step + 1, loss);
        if (__atomic_load_n(&job->stop, __ATOMIC_RELAXED) == step + 1 && !lesson_is_over(job))
            return lesson_stop(r, step + 1);
    }
    if (first) job->out->steps = job->done;
    if (first && job->done < d->steps)
        printf("\n%s: no better in %d measurements, so it ends here\n", d->name, (int)LESSON_PATIENCE);
    return XD_OK;
}

typedef struct lesson_start {
    lesson_job *job;
    const xd_weights *file; /* of an interrupted run; NULL -> none */
} lesson_start;

static xd_result lesson_rank_run(xd_comm *world, void *argument) {
    const lesson_start *start = (const lesson_start *)argument;
    lesson_rank r;
    memset(&r, 0, sizeof r);
    r.job = start->job;
    r.world = world;
    r.ctx = xd_comm_ctx(world);
    xd_result result = lesson_rank_create(&r);
    if (result == XD_OK && start->file) result = lesson_state_moments(&r, start->file);
    result = xd_agree(world, result);
    if (result == XD_OK) result = lesson_loop(&r);
    (void)xd_agree(world, result); /* optimizers live until rank 0 has saved their moments */
    lesson_rank_free(&r);
    return result;
}

/* Embedding and head are the first and the last weights of the buffer. */
static xd_result lesson_job_create(xd_ctx *ctx, const lesson_desc *d, lesson *out, lesson_job *job) {
    bool failed = false;
    memset(job, 0, sizeof *job);
    job->desc = d;
    job->out = out;
    const char *problem = nn_model_init(&d->student, NULL, NULL, &job->model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    const int64_t floats = job->model.float_count, end = (int64_t)d->student.vocab * d->student.hidden;
    job->model.frozen_ends = d->frozen_ends;
    job->begin = d->frozen_ends ? end : 0;
    job->end = d->frozen_ends && !d->student.tied ? floats - end : floats;
    job->weights = (float *)ranks_room(ctx, floats, sizeof(float), &failed);
    job->best = (float *)ranks_room(ctx, floats, sizeof(float), &failed);
    job->states = (xd_optimizer_state *)ranks_room(ctx, job->model.param_count, sizeof *job->states, &failed);
    out->losses = (float *)ranks_room(ctx, d->steps, sizeof(float), &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for a student of %lld weights", (long long)floats);
    memcpy(job->weights, d->start, (size_t)floats * sizeof *job->weights);
    job->saved = xd_now(ctx);
    return XD_OK;
}

static xd_result lesson_check(xd_ctx *ctx, const lesson_desc *d) {
    XD_REQUIRE(ctx, d->text->count > d->row + 1, XD_ERROR_DATA,
               "the text has %lld tokens to learn from, a row takes %d", (long long)d->text->count,
               d->row + 1);
    XD_REQUIRE(ctx, d->ranks <= d->rows, XD_ERROR_ARGUMENT,
               "%d ranks share %d rows: give no more ranks than rows", d->ranks, d->rows);
    return XD_OK;
}

xd_result lesson_run(xd_ctx *ctx, const lesson_desc *desc, lesson *out) {
    lesson_job job;
    xd_weights *file = NULL;
    memset(out, 0, sizeof *out);
    XD_TRY(lesson_check(ctx, desc));
    xd_result result = lesson_job_create(ctx, desc, out, &job);
    if (result == XD_OK && desc->state) result = lesson_state_load(ctx, &job, &file);
    const double start = xd_now(ctx);
    const lesson_start ranks = { &job, file };
    if (result == XD_OK) result = ranks_run(ctx, desc->ranks, lesson_rank_run, (void *)&ranks);
    if (result == XD_OK && job.stop && !lesson_is_over(&job))
        result = XD_FAIL(ctx, XD_ERROR_STATE, "%s stopped after step %d of %d: the same command goes on",
                         desc->name, job.points ? job.done : 0, desc->steps);
    xd_weights_close(file);
    out->best = job.best;
    out->last = job.weights;
    out->points = job.points;
    out->best_point = job.best_point;
    out->seconds = xd_now(ctx) - start;
    xd_release(ctx, job.states);
    nn_model_free(&job.model);
    if (result != XD_OK) lesson_free(ctx, out);
    return result;
}

void lesson_free(xd_ctx *ctx, lesson *l) {
    xd_release(ctx, l->best);
    xd_release(ctx, l->last);
    xd_release(ctx, l->losses);
    memset(l, 0, sizeof *l);
}
