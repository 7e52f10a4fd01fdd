/* real_judge.c - a teacher beside its students: bits per byte of rows as long as theirs, and what it writes. */
#include "real_lesson.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct real_judge_job {
    const real_teacher *teacher;
    const real_text *text;
    int64_t stride; /* from one measured row to the next, in rows */
    double nats;    /* rank 0's: of all those rows */
    int64_t bytes;
} real_judge_job;

/* What a row of logits loses on `label`. */
static double real_row_nats(const float *logits, int vocab, int32_t label) {
    double most = -INFINITY, sum = 0.0;
    for (int i = 0; i < vocab; i++) most = fmax(most, (double)logits[i]);
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - most);
    return most + log(sum) - (double)logits[label];
}

/* Rank r reads rows r, r + ranks, ... of those that count. */
static xd_result real_judge_rows(xd_comm *world, const real_judge_job *job, real_runner *runner,
                                 double *nats) {
    const real_text *text = job->text;
    const int ranks = xd_comm_size(world), vocab = job->teacher->config.vocab;
    const int64_t rows = (text->count - 2) / (job->stride * REAL_ROW) + 1;
    progress line = progress_begin();
    const double start = xd_now(xd_comm_ctx(world));
    for (int64_t row = xd_comm_rank(world); row < rows; row += ranks) {
        const real_stand at = { "judge", row + ranks < rows ? row + ranks : rows, rows };
        const int64_t place = row * job->stride * REAL_ROW, left = text->count - 1 - place;
        const int count = left < REAL_ROW ? (int)left : REAL_ROW;
        XD_TRY(real_runner_forward(runner, job->teacher->weights, text->ids + place, count));
        for (int i = 0; i < count; i++)
            *nats += real_row_nats(runner->logits + (int64_t)i * vocab, vocab, text->ids[place + i + 1]);
        if (xd_comm_rank(world) == 0) real_progress(&line, &at, "rows", xd_now(xd_comm_ctx(world)) - start);
    }
    return XD_OK;
}

static xd_result real_judge_rank(xd_comm *world, void *argument) {
    real_judge_job *job = (real_judge_job *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    real_runner runner;
    double nats = 0.0;
    memset(&runner, 0, sizeof runner);
    xd_result result = real_runner_create(ctx, &job->teacher->config, REAL_ROW, &runner);
    if (result == XD_OK) result = real_judge_rows(world, job, &runner, &nats);
    real_runner_free(ctx, &runner);
    XD_TRY(xd_agree(world, result));
    XD_TRY(xd_sum_values(world, &nats, 1));
    if (xd_comm_rank(world) == 0) job->nats = nats;
    return XD_OK;
}

/* The bytes of what those rows predict. */
static int64_t real_judged_bytes(const real_judge_job *job) {
    const real_text *text = job->text;
    int64_t bytes = 0;
    for (int64_t at = 0; at + 1 < text->count; at += job->stride * REAL_ROW) {
        const int64_t last = at + REAL_ROW < text->count ? at + REAL_ROW : text->count - 1;
        bytes += text->spans[last].end - text->spans[at].end;
    }
    return bytes;
}

static xd_result real_judge_keep(xd_ctx *ctx, const real_options *o, const real_teacher *teacher,
                                 double bits) {
    real_curve curve;
    char sample[SAMPLE_BYTES];
    const int at = 0;
    if (!o->save) return XD_OK;
    memset(&curve, 0, sizeof curve);
    XD_TRY(real_keep_begin(ctx, o));
    XD_TRY(sample_write(ctx, &teacher->model, teacher->weights, teacher->tokenizer, o->seed, sample));
    curve.name = "teacher";
    curve.vocabulary = teacher->config.vocab;
    curve.heldout = &bits;
    curve.heldout_at = &at;
    curve.points = 1;
    curve.end = bits;
    curve.sample = sample;
    return real_keep_curve(ctx, o->save, &curve);
}

xd_result real_judge(xd_ctx *ctx, const real_options *o) {
    real_teacher teacher;
    real_text text;
    real_judge_job job;
    memset(&text, 0, sizeof text);
    memset(&job, 0, sizeof job);
    XD_TRY(real_teacher_load(ctx, o->path[0], &teacher));
    xd_result result = real_text_load(ctx, teacher.tokenizer, o->path[1], o->bytes, &text);
    if (result == XD_OK && text.count < 2)
        result = XD_FAIL(ctx, XD_ERROR_DATA, "%s has %lld tokens", o->path[1], (long long)text.count);
    job.teacher = &teacher;
    job.text = &text;
    job.stride = (text.count / REAL_ROW + REAL_GLANCE_ROWS) / REAL_GLANCE_ROWS;
    if (result == XD_OK) result = real_run(ctx, o, real_judge_rank, &job);
    if (result == XD_OK) {
        const int64_t bytes = real_judged_bytes(&job);
        const double bits = job.nats / log(2.0) / (double)bytes;
        printf("the teacher: %.4f bits per byte of %lld bytes spread over %s\n", bits, (long long)bytes,
               o->path[1]);
        result = real_judge_keep(ctx, o, &teacher, bits);
        if (result == XD_OK)
            result = real_record(ctx, o, "{\"judge\": \"%s\", \"bytes\": %lld, \"bits_per_byte\": %.6f}",
                                 real_name(o->path[0]), (long long)bytes, bits);
    }
    real_text_free(ctx, &text);
    real_teacher_free(ctx, &teacher);
    return result;
}
