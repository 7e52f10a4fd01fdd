/* real_teacher.c - the teacher over a text: bits per byte and speed, and the cache of what it says.
 *
 * `check` is one context: its positions are split over the ranks, keys and values are gathered. `cache` is
 * many contexts: each rank runs whole ones by itself. All ranks read the same weights. */
#include "real.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- check ---- */

typedef struct real_check_job {
    const real_teacher *teacher;
    const real_text *text;
    double seconds, busy, nats; /* rank 0's: of the fastest run, wall and processor */
} real_check_job;

/* What a rank of a split context holds. */
typedef struct real_slice {
    nn_model model;
    nn_batch batch;
    int begin; /* of its positions */
    int32_t *position, *all, *counts;
    int64_t *labels;
    float *workspace, *logits;
    xd_vocab *vocab;
} real_slice;

static int real_cut(int64_t total, int part, int parts) {
    return (int)(total * part / parts);
}

static xd_result real_slice_rooms(xd_ctx *ctx, const real_text *text, int ranks, real_slice *s) {
    bool failed = false;
    const int count = s->batch.positions;
    s->position = (int32_t *)real_room(ctx, count, sizeof(int32_t), &failed);
    s->labels = (int64_t *)real_room(ctx, count, sizeof(int64_t), &failed);
    s->all = (int32_t *)real_room(ctx, text->count, sizeof(int32_t), &failed);
    s->counts = (int32_t *)real_room(ctx, ranks, sizeof(int32_t), &failed);
    s->logits = (float *)real_room(ctx, (int64_t)count * s->model.config.vocab, sizeof(float), &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %d positions", count);
    for (int r = 0; r < ranks; r++)
        s->counts[r] = real_cut(text->count, r + 1, ranks) - real_cut(text->count, r, ranks);
    for (int64_t i = 0; i < text->count; i++) s->all[i] = (int32_t)i;
    for (int i = 0; i < count; i++) {
        const int64_t at = s->begin + i;
        s->position[i] = (int32_t)at;
        s->labels[i] = at + 1 < text->count ? text->ids[at + 1] : XD_IGNORE_INDEX;
    }
    s->batch.ids = text->ids + s->begin;
    s->batch.position = s->position;
    s->batch.cp_count = s->counts;
    s->batch.cp_position = s->all;
    s->workspace =
        (float *)real_room(ctx, nn_workspace_floats(&s->model, &s->batch, false), sizeof(float), &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for a context of %lld tokens", (long long)text->count);
    return XD_OK;
}

static xd_result real_slice_create(xd_comm *world, const real_check_job *job, real_slice *s) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int ranks = xd_comm_size(world), rank = xd_comm_rank(world);
    const nn_group cp = real_group(world);
    const char *problem = nn_model_init(&job->teacher->config, NULL, &cp, &s->model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    s->begin = real_cut(job->text->count, rank, ranks);
    s->batch.sequences = 1;
    s->batch.positions = real_cut(job->text->count, rank + 1, ranks) - s->begin;
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = s->model.config.vocab }, &s->vocab));
    return real_slice_rooms(ctx, job->text, ranks, s);
}

static void real_slice_free(xd_ctx *ctx, real_slice *s) {
    void *rooms[] = { s->position, s->all, s->counts, s->labels, s->workspace, s->logits };
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) xd_release(ctx, rooms[i]);
    xd_vocab_destroy(s->vocab);
    nn_model_free(&s->model);
}

static xd_result real_slice_loss(xd_comm *world, const real_slice *s, double *nats) {
    xd_loss_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    desc.student.data = s->logits;
    desc.student.dtype = XD_DTYPE_F32;
    desc.student.rows = s->batch.positions;
    desc.student.cols = s->model.config.vocab;
    desc.common.labels.data = s->labels;
    desc.vocab = s->vocab;
    desc.hard_weight = 1.0;
    desc.common.denominator_value = 1.0; /* the sum, not the mean */
    desc.common.comm = world;
    XD_TRY(xd_loss(xd_comm_ctx(world), &desc, &values));
    *nats = values.hard;
    return XD_OK;
}

static xd_result real_check_slice(xd_comm *world, real_check_job *job, real_slice *s) {
    enum { RUNS = 3 };
    double nats = 0.0, best = INFINITY, least = INFINITY;
    xd_ctx *ctx = xd_comm_ctx(world);
    progress line = progress_begin();
    XD_TRY(xd_agree(world, real_slice_create(world, job, s)));
    for (int run = 0; run < RUNS; run++) {
        const real_stand at = { "check", (run + 1) * job->text->count, RUNS * job->text->count };
        const double start = xd_now(ctx), busy = real_processor_seconds();
        XD_TRY((xd_result)nn_forward(&s->model, job->teacher->weights, &s->batch, false, s->workspace,
                                     s->logits));
        XD_TRY(real_slice_loss(world, s, &nats));
        best = fmin(best, xd_now(ctx) - start);
        least = fmin(least, real_processor_seconds() - busy);
        if (xd_comm_rank(world) == 0) real_progress(&line, &at, "tokens", best * (run + 1));
    }
    if (xd_comm_rank(world) == 0) {
        job->seconds = best;
        job->busy = least;
        job->nats = nats;
    }
    return XD_OK;
}

static xd_result real_check_rank(xd_comm *world, void *argument) {
    real_slice slice;
    memset(&slice, 0, sizeof slice);
    const xd_result result = real_check_slice(world, (real_check_job *)argument, &slice);
    real_slice_free(xd_comm_ctx(world), &slice);
    return result;
}

/* Bits of all tokens but the first, divided by all bytes. */
static xd_result real_check_text(xd_ctx *ctx, const real_options *o, const real_teacher *teacher,
                                 const char *path) {
    real_check_job job;
    real_text text;
    memset(&job, 0, sizeof job);
    XD_TRY(real_text_load(ctx, teacher->tokenizer, path, o->bytes, &text));
    job.teacher = teacher;
    job.text = &text;
    xd_result result = text.count >= o->ranks + 1
                           ? real_run(ctx, o, real_check_rank, &job)
                           : XD_FAIL(ctx, XD_ERROR_DATA, "%s has too few tokens", path);
    const double bits = job.nats / log(2.0) / (double)text.bytes;
    const double rate = (double)text.count / job.seconds;
    if (result == XD_OK) {
        printf("%s: %zu bytes, %lld tokens in one context, %.4f bits per byte, %.0f tokens/s on %d threads, "
               "%.1f "
               "seconds of processor\n",
               real_name(path), text.bytes, (long long)text.count, bits, rate, o->ranks, job.busy);
        result = real_record(ctx, o,
                             "{\"check\": \"%s\", \"bytes\": %zu, \"tokens\": %lld, \"bits_per_byte\": %.6f, "
                             "\"tokens_per_second\": %.1f, \"processor_seconds\": %.2f, \"peak_mib\": %.0f}",
                             real_name(path), text.bytes, (long long)text.count, bits, rate, job.busy,
                             real_peak_mib());
    }
    real_text_free(ctx, &text);
    return result;
}

xd_result real_check(xd_ctx *ctx, const real_options *o) {
    real_teacher teacher;
    XD_TRY(real_teacher_load(ctx, o->path[0], &teacher));
    xd_result result = XD_OK;
    for (int i = 1; i < o->paths && result == XD_OK; i++)
        result = real_check_text(ctx, o, &teacher, o->path[i]);
    real_teacher_free(ctx, &teacher);
    return result;
}

/* ---- cache ---- */

/* A context holds CONTEXT tokens, the first OVERLAP of them read again from the one before: past the first
 * context a position is predicted from at least OVERLAP tokens. */
enum { REAL_CONTEXT = 1024, REAL_OVERLAP = 128, REAL_STEP = REAL_CONTEXT - REAL_OVERLAP };

typedef struct real_cache_job {
    const real_teacher *teacher;
    const real_text *text;
    xd_teacher_cache_writer *writer; /* rank 0 uses it */
    float **logits;                  /* [ranks] what each rank has just computed */
    double start;
} real_cache_job;

/* Context `c` reads tokens [read, end) and adds what it says at [begin, end). */
static void real_context_of(int64_t tokens, int64_t c, int64_t *read, int64_t *begin, int64_t *end) {
    *begin = c * REAL_STEP < tokens ? c * REAL_STEP : tokens;
    *end = *begin + REAL_STEP < tokens ? *begin + REAL_STEP : tokens;
    *read = *begin >= REAL_OVERLAP ? *begin - REAL_OVERLAP : 0;
}

/* Rank 0 writes what all ranks computed in this round. */
static xd_result real_cache_append(const real_cache_job *job, int64_t first, int ranks) {
    int32_t next[REAL_STEP];
    const real_text *text = job->text;
    for (int r = 0; r < ranks; r++) {
        int64_t read = 0, begin = 0, end = 0;
        xd_teacher_cache_block block;
        real_context_of(text->count, first + r, &read, &begin, &end);
        if (begin == end) continue;
        for (int64_t i = begin; i < end; i++) next[i - begin] = i + 1 < text->count ? text->ids[i + 1] : -1;
        memset(&block, 0, sizeof block);
        block.logits.data = job->logits[r] + (begin - read) * job->teacher->config.vocab;
        block.logits.dtype = XD_DTYPE_F32;
        block.logits.rows = end - begin;
        block.logits.cols = job->teacher->config.vocab;
        block.ids = text->ids + begin;
        block.next = next;
        block.spans = text->spans + begin;
        XD_TRY(xd_teacher_cache_writer_append(job->writer, &block));
    }
    return XD_OK;
}

static xd_result real_cache_contexts(xd_comm *world, const real_cache_job *job, real_runner *runner) {
    const int ranks = xd_comm_size(world), rank = xd_comm_rank(world);
    const int64_t tokens = job->text->count, contexts = (tokens + REAL_STEP - 1) / REAL_STEP;
    progress line = progress_begin();
    for (int64_t first = 0; first < contexts; first += ranks) {
        const real_stand at = { "cache", first + ranks < contexts ? first + ranks : contexts, contexts };
        int64_t read = 0, begin = 0, end = 0;
        xd_result result = XD_OK;
        real_context_of(tokens, first + rank, &read, &begin, &end);
        if (begin < end)
            result =
                real_runner_forward(runner, job->teacher->weights, job->text->ids + read, (int)(end - read));
        XD_TRY(xd_agree(world, result));
        if (rank == 0) result = real_cache_append(job, first, ranks);
        XD_TRY(xd_agree(world, result));
        if (rank == 0) real_progress(&line, &at, "contexts", xd_now(xd_comm_ctx(world)) - job->start);
    }
    return XD_OK;
}

static xd_result real_cache_rank(xd_comm *world, void *argument) {
    const real_cache_job *job = (const real_cache_job *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    real_runner runner;
    memset(&runner, 0, sizeof runner);
    xd_result result = xd_agree(world, real_runner_create(ctx, &job->teacher->config, REAL_CONTEXT, &runner));
    if (result == XD_OK) {
        job->logits[xd_comm_rank(world)] = runner.logits;
        result = real_cache_contexts(world, job, &runner);
    }
    /* Nobody frees logits that rank 0 still reads: real_cache_contexts ends with an agreement. */
    real_runner_free(ctx, &runner);
    return result;
}

static xd_result real_cache_write(xd_ctx *ctx, const real_options *o, real_cache_job *job, const char *path) {
    xd_teacher_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.vocabulary = job->teacher->config.vocab;
    desc.teacher_hash = xd_tokenizer_describe(job->teacher->tokenizer).hash;
    desc.k = 16;
    desc.context = REAL_CONTEXT - 1;
    desc.spans = true;
    desc.name = "SmolLM2-135M-Instruct Q4_1";
    XD_TRY(xd_teacher_cache_writer_create(ctx, &desc, &job->writer));
    xd_result result = xd_teacher_cache_writer_document(job->writer, job->text->data, job->text->bytes);
    job->start = xd_now(ctx);
    if (result == XD_OK) result = real_run(ctx, o, real_cache_rank, job);
    if (result == XD_OK) return xd_teacher_cache_writer_commit(job->writer);
    xd_teacher_cache_writer_abort(job->writer);
    return result;
}

xd_result real_cache(xd_ctx *ctx, const real_options *o) {
    real_teacher teacher;
    real_text text;
    real_cache_job job;
    bool failed = false;
    memset(&text, 0, sizeof text);
    memset(&job, 0, sizeof job);
    XD_TRY(real_teacher_load(ctx, o->path[0], &teacher));
    xd_result result = real_text_load(ctx, teacher.tokenizer, o->path[1], o->bytes, &text);
    job.teacher = &teacher;
    job.text = &text;
    job.logits = (float **)real_room(ctx, o->ranks, sizeof *job.logits, &failed);
    if (failed) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d ranks", o->ranks);
    if (result == XD_OK) result = real_cache_write(ctx, o, &job, o->path[2]);
    const double seconds = xd_now(ctx) - job.start;
    if (result == XD_OK) {
        printf("%s: %lld tokens of %zu bytes in %.0f s\n", o->path[2], (long long)text.count, text.bytes,
               seconds);
        result = real_record(ctx, o,
                             "{\"cache\": \"%s\", \"tokens\": %lld, \"seconds\": %.1f, \"peak_mib\": %.0f}",
                             real_name(o->path[2]), (long long)text.count, seconds, real_peak_mib());
    }
    xd_release(ctx, job.logits);
    real_text_free(ctx, &text);
    real_teacher_free(ctx, &teacher);
    return result;
}
