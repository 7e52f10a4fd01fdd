/* cache.c - a teacher over a text. Each rank runs whole contexts and writes whole parts, so ranks wait for nobody. */
#define _POSIX_C_SOURCE 200809L /* pthread */
#include "cache.h"
#include "interrupt.h"
#include "../../examples/common/folders.h"
#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* A context has at most this many tokens, of which an eighth is read again from the one before: past the first context a position
 * is predicted from at least those. */
enum { CACHE_CONTEXT = 1024, CACHE_AGAIN = 8 };

static int cache_context(const cache_plan *plan) {
    return plan->teacher->positions < CACHE_CONTEXT ? plan->teacher->positions : (int)CACHE_CONTEXT;
}

static int cache_step(const cache_plan *plan) {
    const int context = cache_context(plan);
    return context - context / CACHE_AGAIN;
}

static int64_t cache_part_contexts(const cache_plan *plan) {
    return plan->contexts > 0 ? plan->contexts : CACHE_PART;
}

static int64_t cache_part_tokens(const cache_plan *plan) {
    return cache_part_contexts(plan) * cache_step(plan);
}

static int64_t cache_part_count(const cache_plan *plan) {
    const int64_t tokens = cache_part_tokens(plan);
    return (plan->text->count + tokens - 1) / tokens;
}

/* The last token has nothing behind it to learn, but a position all the same. */
static int64_t cache_part_end(const cache_plan *plan, int64_t part) {
    const int64_t end = (part + 1) * cache_part_tokens(plan);
    return end < plan->text->count ? end : plan->text->count;
}

static void cache_part_path(const cache_plan *plan, int64_t part, char path[512]) {
    snprintf(path, 512, "%s/%04lld.xdcache", plan->folder, (long long)part);
}

/* The text of a part: from its first token to its last. */
static xd_text cache_part_text(const cache_plan *plan, int64_t part) {
    const int64_t first = part * cache_part_tokens(plan), end = cache_part_end(plan, part);
    const int64_t begin = plan->text->spans[first].begin;
    const xd_text text = { plan->text->data + begin, plan->text->spans[end - 1].end - begin };
    return text;
}

int64_t cache_tokens_read(const cache_plan *plan) {
    return plan->text->count * cache_context(plan) / cache_step(plan);
}

int64_t cache_bytes(const cache_plan *plan) {
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.positions = cache_context(plan);
    const int64_t floats = nn_workspace_floats(&plan->teacher->model, &batch, false) +
                           (int64_t)batch.positions * plan->teacher->config.vocab;
    return 4 * floats * plan->ranks;
}

/* ---- what is there ---- */

static xd_result cache_check(xd_ctx *ctx, const cache_plan *plan, int64_t part, const char *path,
                             const xd_teacher_cache *file) {
    const xd_teacher_cache_info info = xd_teacher_cache_describe(file);
    const xd_text text = cache_part_text(plan, part);
    const int64_t count = cache_part_end(plan, part) - part * cache_part_tokens(plan);
    const uint32_t checksum = xd_crc32c(0, text.data, (size_t)text.size);
    xd_cached_document document;
    XD_TRY(xd_teacher_cache_find_document(ctx, file, 0, &document));
    XD_REQUIRE(ctx, strcmp(info.desc.name, plan->teacher->name) == 0, XD_ERROR_DATA,
               "%s is of the teacher %s, not of %s", path, info.desc.name, plan->teacher->name);
    XD_REQUIRE(ctx, info.desc.k == plan->k && info.desc.draws == plan->draws, XD_ERROR_DATA,
               "%s has %lld tokens and %lld draws a position, asked for are %lld and %lld", path,
               (long long)info.desc.k, (long long)info.desc.draws, (long long)plan->k,
               (long long)plan->draws);
    XD_REQUIRE(ctx, info.desc.temperature == plan->temperature, XD_ERROR_DATA,
               "%s has temperature %g, asked for is %g", path, info.desc.temperature, plan->temperature);
    XD_REQUIRE(ctx,
               info.positions == count && document.text_bytes == text.size &&
                   document.text_checksum == checksum,
               XD_ERROR_DATA, "%s is of another text: %lld tokens and checksum %08x, here %lld and %08x",
               path, (long long)info.positions, document.text_checksum, (long long)count, checksum);
    return XD_OK;
}

/* *out NULL -> there is no such file. */
static xd_result cache_open_part(xd_ctx *ctx, const cache_plan *plan, int64_t part, xd_teacher_cache **out) {
    char path[512];
    const uint64_t hash = xd_tokenizer_describe(plan->teacher->tokenizer).hash;
    const xd_projection_origin origin = { .student_hash = hash, .teacher_hash = hash };
    *out = NULL;
    cache_part_path(plan, part, path);
    FILE *there = fopen(path, "rb");
    if (!there) return XD_OK;
    fclose(there);
    const xd_teacher_cache_open_desc open = { .path = path, .expected = &origin };
    XD_TRY(xd_teacher_cache_open(ctx, &open, out));
    const xd_result result = cache_check(ctx, plan, part, path, *out);
    if (result == XD_OK) return XD_OK;
    xd_teacher_cache_close(*out);
    *out = NULL;
    return result;
}

xd_result cache_missing(xd_ctx *ctx, const cache_plan *plan, int64_t *parts, int64_t *missing) {
    *parts = cache_part_count(plan);
    *missing = 0;
    for (int64_t part = 0; part < *parts; part++) {
        xd_teacher_cache *file = NULL;
        XD_TRY(cache_open_part(ctx, plan, part, &file));
        *missing += file == NULL;
        xd_teacher_cache_close(file);
    }
    return XD_OK;
}

void cache_forget_others(xd_ctx *ctx, const cache_plan *plan) {
    char path[512];
    for (int64_t part = 0; part < cache_part_count(plan); part++) {
        xd_teacher_cache *file = NULL;
        if (cache_open_part(ctx, plan, part, &file) != XD_OK) {
            cache_part_path(plan, part, path);
            (void)remove(path);
        }
        xd_teacher_cache_close(file);
    }
}

/* ---- writing ---- */

/* What ranks share: contexts that are done, of all that there are. */
typedef struct cache_job {
    const cache_plan *plan;
    pthread_mutex_t lock;
    int64_t next, done; /* the next part; contexts */
    meter line;
} cache_job;

/* A rank's room. */
typedef struct cache_rank {
    xd_ctx *ctx;
    nn_batch batch;
    float *workspace, *logits;
    int32_t *next;
    xd_token_span *spans;
} cache_rank;

static xd_result cache_rank_create(xd_ctx *ctx, const cache_plan *plan, cache_rank *r) {
    bool failed = false;
    memset(r, 0, sizeof *r);
    r->ctx = ctx;
    r->batch.sequences = 1;
    r->batch.positions = cache_context(plan);
    const int64_t floats = nn_workspace_floats(&plan->teacher->model, &r->batch, false);
    r->workspace = (float *)ranks_room(ctx, floats, sizeof(float), &failed);
    r->logits = (float *)ranks_room(ctx, (int64_t)r->batch.positions * plan->teacher->config.vocab,
                                    sizeof(float), &failed);
    r->next = (int32_t *)ranks_room(ctx, r->batch.positions, sizeof(int32_t), &failed);
    r->spans = (xd_token_span *)ranks_room(ctx, r->batch.positions, sizeof *r->spans, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for a context of %d tokens", r->batch.positions);
    return XD_OK;
}

static void cache_rank_free(cache_rank *r) {
    xd_release(r->ctx, r->workspace);
    xd_release(r->ctx, r->logits);
    xd_release(r->ctx, r->next);
    xd_release(r->ctx, r->spans);
}

/* Positions [begin, end), which predict what follows them, from a context that begins earlier. */
static xd_result cache_append(const cache_plan *plan, cache_rank *r, xd_teacher_cache_writer *writer,
                              int64_t part, int64_t begin, int64_t end) {
    const tokens *text = plan->text;
    const int64_t again = cache_context(plan) - cache_step(plan), last = cache_part_end(plan, part);
    const int64_t read = begin >= again ? begin - again : 0;
    const int64_t origin = text->spans[part * cache_part_tokens(plan)].begin;
    const int vocab = plan->teacher->config.vocab;
    xd_teacher_cache_block block;
    r->batch.ids = text->ids + read;
    r->batch.positions = (int)(end - read);
    XD_TRY((xd_result)nn_forward(&plan->teacher->model, plan->teacher->weights, &r->batch, false,
                                 r->workspace, r->logits));
    for (int64_t i = begin; i < end; i++) {
        r->next[i - begin] = i + 1 < last ? text->ids[i + 1] : -1;
        r->spans[i - begin].begin = text->spans[i].begin - origin;
        r->spans[i - begin].end = text->spans[i].end - origin;
    }
    memset(&block, 0, sizeof block);
    block.logits = xd_rows_of(r->logits + (begin - read) * vocab, XD_DTYPE_F32, end - begin, vocab);
    block.ids = text->ids + begin;
    block.next = r->next;
    block.spans = r->spans;
    return xd_teacher_cache_writer_append(writer, &block);
}

static void cache_tell(xd_ctx *ctx, cache_job *job) {
    pthread_mutex_lock(&job->lock);
    meter_show(ctx, &job->line, ++job->done, NULL);
    pthread_mutex_unlock(&job->lock);
}

static xd_result cache_contexts(cache_job *job, cache_rank *r, xd_teacher_cache_writer *writer,
                                int64_t part) {
    const cache_plan *plan = job->plan;
    const xd_text text = cache_part_text(plan, part);
    const int64_t end = cache_part_end(plan, part), step = cache_step(plan);
    XD_TRY(xd_teacher_cache_writer_document(writer, text.data, (size_t)text.size));
    for (int64_t at = part * cache_part_tokens(plan); at < end; at += step) {
        XD_TRY(cache_append(plan, r, writer, part, at, at + step < end ? at + step : end));
        cache_tell(r->ctx, job);
    }
    return XD_OK;
}

static xd_result cache_write_part(cache_job *job, cache_rank *r, int64_t part) {
    const cache_plan *plan = job->plan;
    xd_teacher_cache_writer *writer = NULL;
    xd_teacher_cache *there = NULL;
    xd_teacher_cache_desc desc;
    char path[512];
    XD_TRY(cache_open_part(r->ctx, plan, part, &there));
    xd_teacher_cache_close(there);
    if (there) return XD_OK;
    cache_part_path(plan, part, path);
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.vocabulary = plan->teacher->config.vocab;
    desc.teacher_hash = xd_tokenizer_describe(plan->teacher->tokenizer).hash;
    desc.k = plan->k;
    desc.draws = plan->draws;
    desc.seed = plan->draws ? ((plan->seed - 1) << 32) + (uint64_t)part + 1 : 0;
    desc.temperature = plan->temperature;
    desc.context = cache_context(plan) - 1;
    desc.spans = true;
    desc.name = plan->teacher->name;
    XD_TRY(xd_teacher_cache_writer_create(r->ctx, &desc, &writer));
    const xd_result result = cache_contexts(job, r, writer, part);
    if (result == XD_OK) return xd_teacher_cache_writer_commit(writer);
    xd_teacher_cache_writer_abort(writer);
    return result;
}

/* The next part that nobody has taken; -1 at the end, or after Ctrl-C. */
static int64_t cache_take(cache_job *job) {
    pthread_mutex_lock(&job->lock);
    const bool more = !interrupt_asked() && job->next < cache_part_count(job->plan);
    const int64_t part = more ? job->next++ : -1;
    pthread_mutex_unlock(&job->lock);
    return part;
}

static xd_result cache_run_rank(xd_comm *world, void *argument) {
    cache_job *job = (cache_job *)argument;
    cache_rank r;
    xd_result result = cache_rank_create(xd_comm_ctx(world), job->plan, &r);
    for (int64_t part = cache_take(job); part >= 0 && result == XD_OK; part = cache_take(job))
        result = cache_write_part(job, &r, part);
    cache_rank_free(&r);
    return result;
}

xd_result cache_write(xd_ctx *ctx, const cache_plan *plan) {
    int64_t parts = 0, missing = 0;
    cache_job job;
    XD_REQUIRE(ctx, strlen(plan->teacher->name) < XD_CACHE_NAME_BYTES, XD_ERROR_ARGUMENT,
               "the teacher's name %s has %zu bytes, a cache holds %d", plan->teacher->name,
               strlen(plan->teacher->name), (int)XD_CACHE_NAME_BYTES - 1);
    XD_TRY(folders_make(ctx, plan->folder));
    XD_TRY(cache_missing(ctx, plan, &parts, &missing));
    if (missing == 0) return XD_OK;
    const int64_t contexts = (plan->text->count + cache_step(plan) - 1) / cache_step(plan);
    const int64_t left = missing * cache_part_contexts(plan), before = contexts > left ? contexts - left : 0;
    memset(&job, 0, sizeof job);
    job.plan = plan;
    job.done = before;
    job.line = meter_begin(ctx, "teacher's cache", "contexts", before, contexts);
    XD_REQUIRE(ctx, pthread_mutex_init(&job.lock, NULL) == 0, XD_ERROR_MEMORY, "no room for a lock");
    const xd_result result = ranks_run(ctx, plan->ranks, cache_run_rank, &job);
    pthread_mutex_destroy(&job.lock);
    XD_TRY(result);
    XD_TRY(cache_missing(ctx, plan, &parts, &missing));
    XD_REQUIRE(ctx, missing == 0, XD_ERROR_STATE,
               "the teacher's cache stopped with %lld of %lld parts: the same command goes on",
               (long long)(parts - missing), (long long)parts);
    return XD_OK;
}

/* ---- reading ---- */

xd_result cached_open(xd_ctx *ctx, const cache_plan *plan, cached *out) {
    bool failed = false;
    xd_result result = XD_OK;
    memset(out, 0, sizeof *out);
    out->part_count = cache_part_count(plan);
    out->part_tokens = cache_part_tokens(plan);
    out->entries = plan->k + plan->draws;
    out->drawn = plan->draws > 0;
    out->parts = (xd_teacher_cache **)ranks_room(ctx, out->part_count, sizeof *out->parts, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld parts", (long long)out->part_count);
    for (int64_t part = 0; part < out->part_count && result == XD_OK; part++) {
        result = cache_open_part(ctx, plan, part, &out->parts[part]);
        if (result == XD_OK && !out->parts[part])
            result = XD_FAIL(ctx, XD_ERROR_MISSING, "%s lacks part %lld of %lld", plan->folder,
                             (long long)part, (long long)out->part_count);
        if (result == XD_OK) out->bytes += xd_teacher_cache_describe(out->parts[part]).bytes;
    }
    if (result != XD_OK) cached_close(ctx, out);
    return result;
}

void cached_close(xd_ctx *ctx, cached *c) {
    for (int64_t part = 0; c->parts && part < c->part_count; part++) xd_teacher_cache_close(c->parts[part]);
    xd_release(ctx, c->parts);
    memset(c, 0, sizeof *c);
}

xd_result cached_read(xd_ctx *ctx, const cached *c, int64_t first, int64_t count, int32_t *ids,
                      double *probabilities) {
    while (count > 0) {
        const int64_t part = first / c->part_tokens, at = first % c->part_tokens;
        const int64_t here = c->part_tokens - at < count ? c->part_tokens - at : count;
        const xd_teacher_cache_read_desc read = { at, here, NULL, ids, probabilities };
        XD_TRY(xd_teacher_cache_read(ctx, c->parts[part], &read));
        first += here;
        count -= here;
        ids += here * c->entries;
        probabilities += here * c->entries;
    }
    return XD_OK;
}
