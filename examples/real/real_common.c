/* real_common.c - progress, results, texts, and the teacher. */
#include "real.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

/* ---- small things ---- */

void real_progress(progress *line, const real_stand *at, const char *unit, double seconds) {
    const double rate = seconds > 0.0 ? (double)at->done / seconds : 0.0;
    char done[96], share[16], speed[48], memory[32], left[48], time[32];
    const char *const parts[] = { done, share, speed, memory, left };
    snprintf(done, sizeof done, "%s: %lld/%lld %s", at->what, (long long)at->done, (long long)at->total,
             unit);
    snprintf(share, sizeof share, "%d%%", (int)(100 * at->done / at->total));
    snprintf(speed, sizeof speed, "%.1f %s/s", rate, unit);
    snprintf(memory, sizeof memory, "peak %.0f MiB", real_peak_mib());
    snprintf(left, sizeof left, "%s left",
             progress_time(time, rate > 0.0 ? (double)(at->total - at->done) / rate : 0.0));
    progress_show(line, seconds, parts, 5, at->done == at->total);
}

const char *real_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

double real_processor_seconds(void) {
    struct rusage usage;
    memset(&usage, 0, sizeof usage);
    (void)getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

double real_peak_mib(void) {
    struct rusage usage;
    memset(&usage, 0, sizeof usage);
    (void)getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / 1024.0;
}

xd_result real_record(xd_ctx *ctx, const real_options *o, const char *format, ...) {
    char line[1024];
    va_list arguments;
    if (!o->out) return XD_OK;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    XD_REQUIRE(ctx, length >= 0 && length < (int)sizeof line, XD_ERROR_ARGUMENT, "a result of %d bytes",
               length);
    FILE *file = fopen(o->out, "ab");
    const bool written = file && fprintf(file, "%s\n", line) > 0;
    const bool closed = file && fclose(file) == 0;
    XD_REQUIRE(ctx, written && closed, XD_ERROR_IO, "cannot write %s", o->out);
    return XD_OK;
}

static int real_sum(void *user, float *x, int64_t count) {
    return (int)xd_all_reduce((xd_comm *)user, x, x, count, XD_DTYPE_F32, XD_SUM);
}

static int real_gather(void *user, const float *send, float *received, const int64_t *counts) {
    return (int)xd_all_gather((xd_comm *)user, send, received, counts, XD_DTYPE_F32);
}

nn_group real_group(xd_comm *comm) {
    nn_group group;
    memset(&group, 0, sizeof group);
    group.size = comm ? xd_comm_size(comm) : 1;
    group.rank = comm ? xd_comm_rank(comm) : 0;
    group.user = comm;
    group.all_reduce_sum = real_sum;
    group.all_gather_v = real_gather;
    return group;
}

void *real_room(xd_ctx *ctx, int64_t count, size_t size, bool *failed) {
    void *memory = xd_allocate(ctx, ((size_t)count + 1) * size);
    if (!memory) *failed = true;
    return memory;
}

xd_result real_run(xd_ctx *ctx, const real_options *o, xd_rank_function function, void *argument) {
    xd_error error;
    xd_ctx_desc desc;
    memset(&error, 0, sizeof error);
    memset(&desc, 0, sizeof desc);
    desc.timeout_seconds = 600.0; /* ranks wait for each other as long as a context takes on a slow machine */
    const xd_result result = xd_run_threads(o->ranks, &desc, function, argument, &error);
    return result == XD_OK ? XD_OK : XD_FAIL(ctx, result, "rank %d: %s", error.rank, error.message);
}

/* ---- texts ---- */

static xd_result real_text_encode(xd_ctx *ctx, xd_encoder *encoder, real_text *text) {
    xd_encoding e;
    bool failed = false;
    XD_TRY(xd_encode(encoder, text->data, text->bytes, NULL, &e));
    text->ids = (int32_t *)real_room(ctx, e.count, sizeof *text->ids, &failed);
    text->spans = (xd_token_span *)real_room(ctx, e.count, sizeof *text->spans, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)e.count);
    if (e.count > 0) {
        memcpy(text->ids, e.ids, (size_t)e.count * sizeof *text->ids);
        memcpy(text->spans, e.spans, (size_t)e.count * sizeof *text->spans);
    }
    text->count = e.count;
    return XD_OK;
}

xd_result real_text_load(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *path, int64_t most,
                         real_text *out) {
    xd_encoder *encoder = NULL;
    memset(out, 0, sizeof *out);
    XD_TRY(xd_file_load(ctx, path, 0, &out->data, &out->bytes));
    if (most > 0 && (uint64_t)most < out->bytes) out->bytes = (size_t)most;
    xd_result result = xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder);
    if (result == XD_OK) result = real_text_encode(ctx, encoder, out);
    xd_encoder_destroy(encoder);
    if (result != XD_OK) real_text_free(ctx, out);
    return result;
}

void real_text_free(xd_ctx *ctx, real_text *text) {
    xd_release(ctx, text->data);
    xd_release(ctx, text->ids);
    xd_release(ctx, text->spans);
    memset(text, 0, sizeof *text);
}

/* ---- the teacher ---- */

static xd_result real_teacher_read_weights(xd_ctx *ctx, real_teacher *t) {
    bool failed = false;
    const char *problem = nn_model_init(&t->config, NULL, NULL, &t->model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    t->weights = (float *)real_room(ctx, t->model.float_count, sizeof *t->weights, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld weights", (long long)t->model.float_count);
    return gguf_model_weights(ctx, t->file, &t->model, t->weights);
}

xd_result real_teacher_open(xd_ctx *ctx, const char *path, real_teacher *out) {
    memset(out, 0, sizeof *out);
    XD_TRY(gguf_open(ctx, path, &out->file));
    xd_result result = gguf_model_config(ctx, out->file, &out->config);
    if (result == XD_OK) result = gguf_model_tokenizer(ctx, out->file, &out->tokenizer);
    if (result != XD_OK) real_teacher_free(ctx, out);
    return result;
}

xd_result real_teacher_load(xd_ctx *ctx, const char *path, real_teacher *out) {
    XD_TRY(real_teacher_open(ctx, path, out));
    const xd_result result = real_teacher_read_weights(ctx, out);
    if (result != XD_OK) real_teacher_free(ctx, out);
    return result;
}

void real_teacher_free(xd_ctx *ctx, real_teacher *teacher) {
    xd_tokenizer_destroy(teacher->tokenizer);
    nn_model_free(&teacher->model);
    xd_release(ctx, teacher->weights);
    gguf_close(teacher->file);
    memset(teacher, 0, sizeof *teacher);
}

/* ---- a rank's model ---- */

xd_result real_runner_create(xd_ctx *ctx, const nn_config *config, int positions, real_runner *out) {
    bool failed = false;
    memset(out, 0, sizeof *out);
    const char *problem = nn_model_init(config, NULL, NULL, &out->model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    out->batch.sequences = 1;
    out->batch.positions = positions;
    const int64_t floats = nn_workspace_floats(&out->model, &out->batch, false);
    out->workspace = (float *)real_room(ctx, floats, sizeof(float), &failed);
    out->logits = (float *)real_room(ctx, (int64_t)positions * config->vocab, sizeof(float), &failed);
    if (!failed) return XD_OK;
    real_runner_free(ctx, out);
    return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a context of %d tokens", positions);
}

void real_runner_free(xd_ctx *ctx, real_runner *runner) {
    nn_model_free(&runner->model);
    xd_release(ctx, runner->workspace);
    xd_release(ctx, runner->logits);
    memset(runner, 0, sizeof *runner);
}

xd_result real_runner_forward(real_runner *runner, const float *weights, const int32_t *ids, int count) {
    runner->batch.ids = ids;
    runner->batch.positions = count;
    return (xd_result)nn_forward(&runner->model, weights, &runner->batch, false, runner->workspace,
                                 runner->logits);
}
