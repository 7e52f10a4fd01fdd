/* lesson_state.c - what an interrupted run needs to go on, as one safetensors file. */
#include "lesson_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tensors: trained weights, the best of them, both moments; then the curves. */
enum { STATE_HELDOUT, STATE_WEIGHTS, STATE_BEST, STATE_MEAN, STATE_SQUARE, STATE_LOSSES, STATE_TENSORS };
static const char *const state_names[STATE_TENSORS] = { "heldout", "weights",    "best",
                                                        "exp_avg", "exp_avg_sq", "losses" };

enum { STATE_FACTS, STATE_DONE, STATE_POINTS, STATE_BEST_POINT, STATE_PAIRS };
static const char *const state_keys[STATE_PAIRS] = { "facts", "done", "points", "best_point" };

static void state_counts(const lesson_job *job, int64_t counts[STATE_TENSORS]) {
    for (int i = 0; i < STATE_TENSORS; i++) counts[i] = job->end - job->begin;
    counts[STATE_HELDOUT] = job->points;
    counts[STATE_LOSSES] = job->done;
}

/* ---- saving ---- */

static xd_result state_create(xd_ctx *ctx, const lesson_job *job, xd_weights_writer **writer) {
    const int numbers[STATE_PAIRS] = { 0, job->done, job->points, job->best_point };
    char values[STATE_PAIRS][32];
    int64_t counts[STATE_TENSORS];
    xd_weights_pair pairs[STATE_PAIRS];
    xd_weights_entry entries[STATE_TENSORS];
    xd_weights_writer_desc desc;
    state_counts(job, counts);
    for (int i = 0; i < STATE_PAIRS; i++) {
        snprintf(values[i], sizeof values[i], "%d", numbers[i]);
        pairs[i].key = state_keys[i];
        pairs[i].value = i == STATE_FACTS ? job->desc->facts : values[i];
    }
    for (int i = 0; i < STATE_TENSORS; i++) {
        entries[i].name = state_names[i];
        entries[i].dtype = i == STATE_HELDOUT ? XD_DTYPE_F64 : XD_DTYPE_F32;
        entries[i].ndim = 1;
        entries[i].shape = &counts[i];
    }
    memset(&desc, 0, sizeof desc);
    desc.file = job->desc->state;
    desc.entries = entries;
    desc.entry_count = STATE_TENSORS;
    desc.metadata = pairs;
    desc.metadata_count = STATE_PAIRS;
    return xd_weights_writer_create(ctx, &desc, writer);
}

/* The moments of every trained parameter, from whichever rank steps it. */
static xd_result state_write_moments(const lesson_job *job, xd_weights_writer *writer) {
    int which = 0;
    for (int i = 0; i < job->model.param_count; i++) {
        const nn_param *p = &job->model.params[i];
        const uint64_t at = (uint64_t)(p->offset - job->begin) * sizeof(float);
        const uint64_t bytes = (uint64_t)nn_param_count(p) * sizeof(float);
        if (p->offset < job->begin || p->offset >= job->end) continue;
        const xd_optimizer_state *s = &job->states[which++];
        XD_TRY(xd_weights_writer_write(writer, STATE_MEAN, at, bytes, s->exp_avg));
        XD_TRY(xd_weights_writer_write(writer, STATE_SQUARE, at, bytes, s->exp_avg_sq));
    }
    return XD_OK;
}

static xd_result state_write(const lesson_job *job, xd_weights_writer *writer) {
    const lesson *l = job->out;
    XD_TRY(xd_weights_writer_write(writer, STATE_HELDOUT, 0, XD_WEIGHTS_REST, l->heldout));
    XD_TRY(xd_weights_writer_write(writer, STATE_WEIGHTS, 0, XD_WEIGHTS_REST, job->weights + job->begin));
    XD_TRY(xd_weights_writer_write(writer, STATE_BEST, 0, XD_WEIGHTS_REST, job->best + job->begin));
    XD_TRY(xd_weights_writer_write(writer, STATE_LOSSES, 0, XD_WEIGHTS_REST, l->losses));
    return state_write_moments(job, writer);
}

xd_result lesson_state_save(xd_ctx *ctx, const lesson_job *job) {
    xd_weights_writer *writer = NULL;
    XD_TRY(state_create(ctx, job, &writer));
    const xd_result result = state_write(job, writer);
    if (result == XD_OK) return xd_weights_writer_commit(writer);
    xd_weights_writer_abort(writer);
    return result;
}

/* ---- loading ---- */

/* A number of the file in [0, most], or -1. */
static int state_number(const xd_weights *file, int key, int most) {
    const char *value = xd_weights_metadata(file, state_keys[key]);
    char *end = NULL;
    const long number = value ? strtol(value, &end, 10) : -1;
    return value && end != value && !*end && number >= 0 && number <= most ? (int)number : -1;
}

static bool state_has_facts(const xd_weights *file, const char *facts) {
    const char *there = xd_weights_metadata(file, state_keys[STATE_FACTS]);
    return there && strcmp(there, facts) == 0;
}

static xd_result state_check_facts(xd_ctx *ctx, const lesson_job *job, const xd_weights *file) {
    const char *facts = xd_weights_metadata(file, state_keys[STATE_FACTS]);
    XD_REQUIRE(ctx, state_has_facts(file, job->desc->facts), XD_ERROR_DATA,
               "%s is of a run with other settings: %.300s; here %.300s", job->desc->state,
               facts ? facts : "none", job->desc->facts);
    return XD_OK;
}

/* Once it is known how far the run is. */
static xd_result state_check(xd_ctx *ctx, const lesson_job *job, const xd_weights *file) {
    int64_t counts[STATE_TENSORS];
    state_counts(job, counts);
    for (int i = 0; i < STATE_TENSORS; i++) {
        const int64_t index = xd_weights_find(file, state_names[i]);
        const xd_weights_tensor *info = index < 0 ? NULL : xd_weights_at(file, index);
        XD_REQUIRE(ctx, info && info->ndim == 1 && info->shape[0] == counts[i], XD_ERROR_SHAPE,
                   "%s does not have %lld numbers in %s", job->desc->state, (long long)counts[i],
                   state_names[i]);
    }
    return XD_OK;
}

/* Copies a range of one tensor. */
static void state_copy(const xd_weights *file, int tensor, int64_t first, int64_t count, size_t size,
                       void *out) {
    const unsigned char *data =
        (const unsigned char *)xd_weights_data(file, xd_weights_find(file, state_names[tensor]));
    if (count > 0) memcpy(out, data + (size_t)first * size, (size_t)count * size);
}

static xd_result state_read(xd_ctx *ctx, lesson_job *job, const xd_weights *file) {
    const int64_t count = job->end - job->begin;
    XD_TRY(state_check_facts(ctx, job, file));
    job->done = state_number(file, STATE_DONE, job->desc->steps);
    job->points = state_number(file, STATE_POINTS, LESSON_POINTS);
    job->best_point = state_number(file, STATE_BEST_POINT, LESSON_POINTS - 1);
    XD_REQUIRE(ctx, job->done > 0 && job->points > 0 && job->best_point >= 0 && job->best_point < job->points,
               XD_ERROR_DATA, "%s does not say where in %d steps it stands", job->desc->state,
               job->desc->steps);
    XD_TRY(state_check(ctx, job, file));
    state_copy(file, STATE_HELDOUT, 0, job->points, sizeof(double), job->out->heldout);
    state_copy(file, STATE_LOSSES, 0, job->done, sizeof(float), job->out->losses);
    memcpy(job->best, job->weights, (size_t)job->model.float_count * sizeof *job->best);
    state_copy(file, STATE_WEIGHTS, 0, count, sizeof(float), job->weights + job->begin);
    state_copy(file, STATE_BEST, 0, count, sizeof(float), job->best + job->begin);
    for (int i = 0; i < job->points; i++) job->out->heldout_at[i] = lesson_point_step(i, job->desc->steps);
    job->out->steps = job->done;
    printf("%s: goes on after step %d of %d\n", job->desc->name, job->done, job->desc->steps);
    return XD_OK;
}

/* *file NULL -> there is none. */
static xd_result state_open(xd_ctx *ctx, const char *path, xd_weights **file) {
    const xd_weights_desc desc = { .file = path };
    FILE *there = fopen(path, "rb");
    *file = NULL;
    if (!there) return XD_OK;
    fclose(there);
    return xd_weights_open(ctx, &desc, file);
}

xd_result lesson_state_load(xd_ctx *ctx, lesson_job *job, xd_weights **file) {
    XD_TRY(state_open(ctx, job->desc->state, file));
    return *file ? state_read(ctx, job, *file) : XD_OK;
}

/* A damaged file is an error later, when it is read. */
int lesson_done(xd_ctx *ctx, const char *state, const char *facts) {
    xd_weights *file = NULL;
    if (state_open(ctx, state, &file) != XD_OK || !file) return 0;
    const int done = state_has_facts(file, facts) ? state_number(file, STATE_DONE, 1000000) : 0;
    xd_weights_close(file);
    return done > 0 ? done : 0;
}

xd_result lesson_state_moments(lesson_rank *r, const xd_weights *file) {
    const lesson_job *job = r->job;
    for (int i = r->own_begin; i < r->own_end; i++) {
        const int64_t at = (const float *)r->params[i].value - job->weights - job->begin;
        const xd_optimizer_state *s = &job->states[i];
        state_copy(file, STATE_MEAN, at, r->params[i].count, sizeof(float), s->exp_avg);
        state_copy(file, STATE_SQUARE, at, r->params[i].count, sizeof(float), s->exp_avg_sq);
        *s->step = job->done;
    }
    return XD_OK;
}
