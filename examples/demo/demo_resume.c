/* demo_resume.c - what an interrupted arm needs to go on, as one safetensors file of whole tensors. */
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

/* The file's metadata: what two runs must share to have the same bits, and where the arm stands. */
enum { ARM, SEED, STEPS, TEXT, REDUCTION, MESH, SHARED, DONE = SHARED, SECONDS, METRICS, FACTS };

static const char *const demo_facts[FACTS] = { "arm",  "seed", "steps",   "text",         "reduction",
                                               "mesh", "done", "seconds", "metrics_bytes" };

typedef char demo_value[48];

static void demo_describe(const demo_state *s, demo_value values[FACTS]) {
    const demo_job *job = s->job;
    snprintf(values[ARM], sizeof values[ARM], "%s", s->arm);
    snprintf(values[SEED], sizeof values[SEED], "%llu", (unsigned long long)s->seed);
    snprintf(values[STEPS], sizeof values[STEPS], "%d", job->steps);
    snprintf(values[TEXT], sizeof values[TEXT], "%lld tokens", (long long)job->text->count);
    snprintf(values[REDUCTION], sizeof values[REDUCTION], "%s", demo_reduction_name(job->reduction));
    snprintf(values[MESH], sizeof values[MESH], "dp=%d,cp=%d,tp=%d", job->dp, job->cp, job->tp);
    snprintf(values[DONE], sizeof values[DONE], "%d", s->done);
    snprintf(values[SECONDS], sizeof values[SECONDS], "%.17g", s->seconds);
    snprintf(values[METRICS], sizeof values[METRICS], "%ld", s->metrics_bytes);
}

static xd_result demo_state_write(xd_ctx *ctx, const demo_state *s, const float *whole, int64_t count) {
    demo_value values[FACTS];
    const int64_t losses = s->done;
    xd_safetensors_pair pairs[FACTS];
    xd_safetensors_entry entries[KINDS + 1];
    xd_safetensors_writer_desc desc;
    xd_safetensors_writer *writer = NULL;
    demo_describe(s, values);
    for (int i = 0; i < FACTS; i++) {
        pairs[i].key = demo_facts[i];
        pairs[i].value = values[i];
    }
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
    desc.metadata_count = FACTS;
    XDI_TRY(xd_safetensors_create(ctx, s->path, &desc, &writer));
    xd_result result = xd_safetensors_write(writer, KINDS, s->losses);
    for (int k = 0; k < KINDS && result == XD_OK; k++)
        result = xd_safetensors_write(writer, k, whole + k * count);
    if (result == XD_OK) return xd_safetensors_commit(writer);
    xd_safetensors_abort(writer);
    return result;
}

/* A fact of the file, or -1 when it is not a number in [least, most]. */
static double demo_state_number(const xd_safetensors *file, int fact, double least, double most) {
    const char *value = xd_safetensors_metadata(file, demo_facts[fact]);
    char *end = NULL;
    const double number = value ? strtod(value, &end) : -1.0;
    return value && end != value && !*end && number >= least && number <= most ? number : -1.0;
}

/* The file must be of this run. */
static xd_result demo_state_compare(xd_ctx *ctx, const demo_state *s, const xd_safetensors *file) {
    demo_value here[FACTS];
    demo_describe(s, here);
    for (int i = 0; i < SHARED; i++) {
        const char *there = xd_safetensors_metadata(file, demo_facts[i]);
        if (i == MESH && s->job->reduction == XD_REDUCTION_INVARIANT) continue;
        if (!there || strcmp(there, here[i]) != 0)
            return XDI_FAIL(ctx, XD_ERROR_DATA, "cannot go on from %s: its %s is %s, this run's is %s",
                            s->path, demo_facts[i], there ? there : "not said", here[i]);
    }
    return XD_OK;
}

/* Its numbers must be possible, and its tensors as long as they should be. */
static xd_result demo_state_check(xd_ctx *ctx, const demo_state *s, const xd_safetensors *file,
                                  int64_t count) {
    const double done = demo_state_number(file, DONE, 1.0, s->job->steps);
    XDI_TRY(demo_state_compare(ctx, s, file));
    if (done < 0.0 || demo_state_number(file, SECONDS, 0.0, 1e12) < 0.0 ||
        demo_state_number(file, METRICS, 0.0, 1e12) < 0.0)
        return XDI_FAIL(ctx, XD_ERROR_DATA, "%s does not say where in %d steps it stands", s->path,
                        s->job->steps);
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
    s->done = (int)demo_state_number(file, DONE, 1.0, s->job->steps);
    s->seconds = demo_state_number(file, SECONDS, 0.0, 1e12);
    s->metrics_bytes = (long)demo_state_number(file, METRICS, 0.0, 1e12);
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

/* The file, which is there. */
static xd_result demo_state_open(xd_ctx *ctx, demo_state *s) {
    nn_model whole;
    xd_safetensors *file = NULL;
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
    return result;
}

xd_result demo_state_load(xd_ctx *ctx, demo_state *s) {
    FILE *there = fopen(s->path, "rb");
    int64_t ranks = there != NULL;
    if (there) fclose(there);
    XDI_TRY(xd_all_reduce(s->world, &ranks, &ranks, 1, XD_DTYPE_I64, XD_SUM));
    if (ranks == 0) return XD_OK; /* this arm has not begun */
    if (ranks != xd_comm_size(s->world))
        return XDI_FAIL(ctx, XD_ERROR_IO, "%lld of %d ranks can read %s", (long long)ranks,
                        xd_comm_size(s->world), s->path);
    return xd_agree(s->world, demo_state_open(ctx, s));
}
