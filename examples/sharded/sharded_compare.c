/* sharded_compare.c - whether two runs have come to the same numbers: their last checkpoints and their losses. */
#include "sharded.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The files of a checkpoint, by what they hold. */
static const char *const sharded_files[SHARDED_CURVE] = { "model", "optim", ("ema-" SHARDED_AVERAGE_NAME) };

static void sharded_file_path(const char *directory, int step, int what, char path[512]) {
    snprintf(path, 512, "%s/step-%d/%s.safetensors", directory, step, sharded_files[what]);
}

/* ---- tensors ---- */

/* The largest difference of two arrays of floats; infinity where one has a number and the other has none. */
static double sharded_apart(const float *one, const float *other, int64_t count) {
    double most = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double apart = fabs((double)one[i] - (double)other[i]);
        if (!(apart <= most) && memcmp(&one[i], &other[i], sizeof *one) != 0)
            most = isnan(apart) ? INFINITY : apart;
    }
    return most;
}

static void sharded_compare_bytes(sharded_comparison *c, int what, xd_dtype dtype, const void *one,
                                  const void *other, size_t bytes) {
    c->bytes[what] += (int64_t)bytes;
    if (memcmp(one, other, bytes) == 0) return;
    c->same_bits[what] = false;
    const double apart = dtype == XD_DTYPE_F32 ? sharded_apart((const float *)one, (const float *)other,
                                                               (int64_t)(bytes / sizeof(float)))
                                               : INFINITY;
    if (apart > c->apart[what]) c->apart[what] = apart;
}

/* `both` is room for the tensor from each file. */
static xd_result sharded_compare_tensor(xd_weights *one, xd_weights *other, int64_t index, int what,
                                        char *both, sharded_comparison *c) {
    const xd_weights_tensor *here = xd_weights_at(one, index), *there = xd_weights_at(other, index);
    const size_t bytes = (size_t)(here->end - here->begin);
    const bool alike = there && strcmp(here->name, there->name) == 0 && here->dtype == there->dtype &&
                       there->end - there->begin == bytes;
    if (!alike) {
        c->same_bits[what] = false;
        c->apart[what] = INFINITY;
        return XD_OK;
    }
    XD_TRY(xd_weights_read(one, index, NULL, both));
    XD_TRY(xd_weights_read(other, index, NULL, both + bytes));
    sharded_compare_bytes(c, what, here->dtype, both, both + bytes, bytes);
    return XD_OK;
}

static xd_result sharded_compare_open(xd_ctx *ctx, xd_weights *one, xd_weights *other, int what,
                                      sharded_comparison *c) {
    xd_result result = XD_OK;
    const int64_t count = xd_weights_describe(one).tensor_count;
    uint64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const xd_weights_tensor *info = xd_weights_at(one, i);
        if (info->end - info->begin > most) most = info->end - info->begin;
    }
    char *both = (char *)xd_allocate(ctx, 2 * (size_t)most + 1);
    if (!both)
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for two tensors of %llu bytes",
                       (unsigned long long)most);
    c->same_bits[what] = count > 0 && count == xd_weights_describe(other).tensor_count;
    for (int64_t i = 0; i < count && result == XD_OK; i++)
        result = sharded_compare_tensor(one, other, i, what, both, c);
    xd_release(ctx, both);
    return result;
}

static xd_result sharded_compare_files(xd_ctx *ctx, const char *one, const char *other, int step, int what,
                                       sharded_comparison *c) {
    char path[512];
    xd_weights_desc desc;
    xd_weights *here = NULL, *there = NULL;
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    sharded_file_path(one, step, what, path);
    xd_result result = xd_weights_open(ctx, &desc, &here);
    sharded_file_path(other, step, what, path);
    if (result == XD_OK) result = xd_weights_open(ctx, &desc, &there);
    if (result == XD_OK) result = sharded_compare_open(ctx, here, there, what, c);
    xd_weights_close(here);
    xd_weights_close(there);
    return result;
}

/* ---- losses ---- */

static xd_result sharded_read_metrics(xd_ctx *ctx, const char *directory, char **text, size_t *bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/metrics.jsonl", directory);
    return xd_file_load(ctx, path, 0, text, bytes);
}

xd_result sharded_metrics_bytes(xd_ctx *ctx, const char *directory, int lines, long *bytes) {
    char *text = NULL;
    size_t size = 0, at = 0;
    int found = 0;
    XD_TRY(sharded_read_metrics(ctx, directory, &text, &size));
    while (found < lines && at < size) found += text[at++] == '\n';
    xd_release(ctx, text);
    *bytes = (long)at;
    return found == lines
               ? XD_OK
               : XD_FAIL(ctx, XD_ERROR_DATA, "%s/metrics.jsonl has %d lines, the checkpoint is of step %d",
                         directory, found, lines);
}

/* What a step came to, as it was written: losses and norm in 17 digits, which tell every double from every other. */
static const char *sharded_numbers(const char *line, const char *end, size_t *length) {
    static const char first[] = "\"loss\": ", last[] = ", \"learning_rate\"";
    const char *begin = line ? strstr(line, first) : NULL;
    const char *stop = begin ? strstr(begin, last) : NULL;
    *length = stop && stop < end ? (size_t)(stop - begin) : 0;
    return *length ? begin : NULL;
}

static xd_result sharded_compare_line(xd_ctx *ctx, const char **one, const char **other,
                                      sharded_comparison *c) {
    const char *end = strchr(*one, '\n'), *other_end = strchr(*other, '\n');
    size_t length = 0, other_length = 0;
    const char *here = end ? sharded_numbers(*one, end, &length) : NULL;
    const char *there = other_end ? sharded_numbers(*other, other_end, &other_length) : NULL;
    XD_REQUIRE(ctx, here && there, XD_ERROR_FORMAT, "step %lld of metrics.jsonl has no losses",
               (long long)c->bytes[SHARDED_CURVE]);
    const double apart = fabs(strtod(here + 8, NULL) - strtod(there + 8, NULL));
    if (length != other_length || memcmp(here, there, length) != 0) c->same_bits[SHARDED_CURVE] = false;
    if (apart > c->apart[SHARDED_CURVE]) c->apart[SHARDED_CURVE] = apart;
    c->bytes[SHARDED_CURVE]++;
    *one = end + 1;
    *other = other_end + 1;
    return XD_OK;
}

static xd_result sharded_compare_curves(xd_ctx *ctx, const char *one, const char *other,
                                        sharded_comparison *c) {
    char *here = NULL, *there = NULL;
    size_t bytes = 0;
    xd_result result = sharded_read_metrics(ctx, one, &here, &bytes);
    if (result == XD_OK) result = sharded_read_metrics(ctx, other, &there, &bytes);
    const char *a = here, *b = there;
    c->same_bits[SHARDED_CURVE] = true;
    while (result == XD_OK && *a && *b) result = sharded_compare_line(ctx, &a, &b, c);
    if (result == XD_OK && (*a || *b)) c->same_bits[SHARDED_CURVE] = false; /* of other lengths */
    xd_release(ctx, here);
    xd_release(ctx, there);
    return result;
}

xd_result sharded_compare(xd_ctx *ctx, const char *one, const char *other, int step,
                          sharded_comparison *out) {
    memset(out, 0, sizeof *out);
    for (int what = 0; what < SHARDED_CURVE; what++)
        XD_TRY(sharded_compare_files(ctx, one, other, step, what, out));
    return sharded_compare_curves(ctx, one, other, out);
}
