/* demo_resume.c - what an interrupted arm needs to go on, as one safetensors file. It holds whole tensors, so the
 * mesh that goes on may cut the weights otherwise. */
#include "demo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VALUES, MEANS, SQUARES, KINDS }; /* weights and the two moments, each as long as the model */

static const char *const demo_kinds[KINDS] = { "weights", "exp_avg", "exp_avg_sq" };

/* Copies one kind between the model's buffer or the optimizer and `flat`, which is laid out as the weights. */
static void demo_state_copy(const demo_state *s, int kind, float *flat, bool back) {
    for (int i = 0; i < s->part->param_count; i++) {
        const xd_optimizer_state state = xd_optimizer_get_state(s->optimizer, i);
        const nn_param *p = &s->part->params[i];
        float *own = kind == VALUES  ? s->weights + p->offset
                     : kind == MEANS ? state.exp_avg
                                     : state.exp_avg_sq;
        float *other = flat + p->offset;
        memcpy(back ? own : other, back ? other : own, (size_t)nn_param_count(p) * sizeof *own);
        if (back) *state.step = s->done;
    }
}

static xd_result demo_state_write(xd_ctx *ctx, const demo_state *s, const float *whole, int64_t count) {
    char done[16], steps[16], seed[24], seconds[40], metrics[24];
    const int64_t losses = s->done;
    const xd_safetensors_pair pairs[] = { { "arm", s->arm },      { "seed", seed },
                                          { "steps", steps },     { "done", done },
                                          { "seconds", seconds }, { "metrics_bytes", metrics } };
    xd_safetensors_entry entries[KINDS + 1];
    xd_safetensors_writer_desc desc;
    xd_safetensors_writer *writer = NULL;
    snprintf(done, sizeof done, "%d", s->done);
    snprintf(steps, sizeof steps, "%d", s->steps);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)s->seed);
    snprintf(seconds, sizeof seconds, "%.17g", s->seconds);
    snprintf(metrics, sizeof metrics, "%ld", s->metrics_bytes);
    for (int k = 0; k <= KINDS; k++) {
        entries[k].name = k < KINDS ? demo_kinds[k] : "losses";
        entries[k].dtype = XD_DTYPE_F32;
        entries[k].ndim = 1;
        entries[k].shape = k < KINDS ? &count : &losses;
    }
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = KINDS + 1;
    desc.metadata = pairs;
    desc.metadata_count = (int64_t)(sizeof pairs / sizeof pairs[0]);
    XDI_TRY(xd_safetensors_create(ctx, s->path, &desc, &writer));
    xd_result result = xd_safetensors_write(writer, KINDS, s->losses);
    for (int k = 0; k < KINDS && result == XD_OK; k++)
        result = xd_safetensors_write(writer, k, whole + k * count);
    if (result == XD_OK) return xd_safetensors_commit(writer);
    xd_safetensors_abort(writer);
    return result;
}

static bool demo_state_is(const xd_safetensors *file, const char *key, const char *expected) {
    const char *value = xd_safetensors_metadata(file, key);
    return value && strcmp(value, expected) == 0;
}

static double demo_state_number(const xd_safetensors *file, const char *key) {
    const char *value = xd_safetensors_metadata(file, key);
    return value ? strtod(value, NULL) : -1.0;
}

/* The file must be of this run, and its tensors as long as they should be. */
static xd_result demo_state_check(xd_ctx *ctx, const demo_state *s, const xd_safetensors *file,
                                  int64_t count) {
    char steps[16], seed[24];
    const double done = demo_state_number(file, "done");
    snprintf(steps, sizeof steps, "%d", s->steps);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)s->seed);
    if (!demo_state_is(file, "arm", s->arm) || !demo_state_is(file, "seed", seed) ||
        !demo_state_is(file, "steps", steps) || !(done >= 1.0 && done <= s->steps))
        return XDI_FAIL(ctx, XD_ERROR_DATA, "%s is not of arm %s, seed %s, %s steps", s->path, s->arm, seed,
                        steps);
    for (int k = 0; k <= KINDS; k++) {
        const int64_t index = xd_safetensors_find(file, k < KINDS ? demo_kinds[k] : "losses");
        const xd_safetensors_info *info = index < 0 ? NULL : xd_safetensors_at(file, index);
        if (!info || info->dtype != XD_DTYPE_F32 || info->ndim != 1 ||
            info->shape[0] != (k < KINDS ? count : (int64_t)done))
            return XDI_FAIL(ctx, XD_ERROR_SHAPE, "%s does not fit a model of %lld weights", s->path,
                            (long long)count);
    }
    return XD_OK;
}

static xd_result demo_state_read(xd_ctx *ctx, demo_state *s, xd_safetensors *file, const nn_model *whole,
                                 float *values, float *flat) {
    const size_t bytes = (size_t)whole->float_count * sizeof *values;
    XDI_TRY(demo_state_check(ctx, s, file, whole->float_count));
    s->done = (int)demo_state_number(file, "done");
    s->seconds = demo_state_number(file, "seconds");
    s->metrics_bytes = (long)demo_state_number(file, "metrics_bytes");
    for (int k = 0; k < KINDS; k++) {
        XDI_TRY(xd_safetensors_read_range(file, xd_safetensors_find(file, demo_kinds[k]), 0, bytes, values));
        demo_take_share(whole, values, s->part, flat);
        demo_state_copy(s, k, flat, true);
    }
    if (!s->losses) return XD_OK;
    return xd_safetensors_read_range(file, xd_safetensors_find(file, "losses"), 0,
                                     (size_t)s->done * sizeof *s->losses, s->losses);
}

xd_result demo_state_save(xd_ctx *ctx, const demo_state *s) {
    nn_model whole;
    const char *problem = nn_model_init(&s->part->config, NULL, NULL, &whole);
    const int64_t count = problem ? 0 : whole.float_count;
    float *values = (float *)xd_allocate(ctx, ((size_t)count * KINDS + 1) * sizeof *values);
    float *flat = (float *)xd_allocate(ctx, ((size_t)s->part->float_count + 1) * sizeof *flat);
    xd_result result =
        problem || !values || !flat ? XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room to save") : XD_OK;
    result = xd_agree(s->world, result);
    for (int k = 0; k < KINDS && result == XD_OK; k++) {
        demo_state_copy(s, k, flat, false);
        result = demo_gather_shares(ctx, s->tp, s->part, flat, &whole, values + k * count);
    }
    if (result == XD_OK && xd_comm_rank(s->world) == 0) result = demo_state_write(ctx, s, values, count);
    xd_release(ctx, values);
    xd_release(ctx, flat);
    if (!problem) nn_model_free(&whole);
    return xd_agree(s->world, result);
}

xd_result demo_state_load(xd_ctx *ctx, demo_state *s) {
    nn_model whole;
    xd_safetensors *file = NULL;
    FILE *there = fopen(s->path, "rb");
    if (!there) return xd_agree(s->world, XD_OK); /* this arm has not begun */
    fclose(there);
    const char *problem = nn_model_init(&s->part->config, NULL, NULL, &whole);
    const int64_t count = problem ? 0 : whole.float_count;
    float *values = (float *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *values);
    float *flat = (float *)xd_allocate(ctx, ((size_t)s->part->float_count + 1) * sizeof *flat);
    xd_result result =
        problem || !values || !flat ? XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room to resume") : XD_OK;
    if (result == XD_OK) result = xd_safetensors_open(ctx, s->path, NULL, &file);
    if (result == XD_OK) result = demo_state_read(ctx, s, file, &whole, values, flat);
    xd_safetensors_close(file);
    xd_release(ctx, values);
    xd_release(ctx, flat);
    if (!problem) nn_model_free(&whole);
    return xd_agree(s->world, result);
}
