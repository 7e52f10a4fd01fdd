/* demo_resume.c - what an interrupted run needs to go on, as one safetensors file of whole tensors. */
#include "demo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of each arm: weights and the two moments, each as long as the model, and the losses so far. */
enum { VALUES, MEANS, SQUARES, LOSSES, KINDS };

/* The last two: the seconds of every arm, and its held-out values so far. */
enum { DEMO_MOST_TENSORS = DEMO_MOST_ARMS * KINDS + 2 };

static const char *const demo_kinds[KINDS] = { "weights", "exp_avg", "exp_avg_sq", "losses" };

static const char demo_seconds_name[] = "seconds", demo_heldout_name[] = "heldout";

typedef char demo_tensor_name[32];

static void demo_name_tensor(int arm, int kind, demo_tensor_name name) {
    snprintf(name, sizeof(demo_tensor_name), "%d.%s", arm, demo_kinds[kind]);
}

/* Copies one kind between the model's buffer or the optimizer and `flat`, which is laid out as the weights. */
static void demo_state_copy(const demo_state *s, int arm, int kind, float *flat, bool back) {
    const demo_learner *learner = &s->learners[arm];
    for (int i = 0; i < s->part->param_count; i++) {
        const xd_optimizer_state state = xd_optimizer_state_at(learner->optimizer, i);
        const nn_param *p = &s->part->params[i];
        float *own = kind == VALUES  ? learner->weights + p->offset
                     : kind == MEANS ? state.exp_avg
                                     : state.exp_avg_sq;
        float *other = flat + p->offset;
        memcpy(back ? own : other, back ? other : own, (size_t)nn_param_count(p) * sizeof *own);
        if (back) *state.step = s->done;
    }
}

/* ---- facts ---- */

/* The file's metadata: what two runs must share to have the same bits, and where the run stands. */
enum { ARMS, SEED, STEPS, TEXT, REDUCTION, MESH, SHARED, DONE = SHARED, SECONDS, METRICS, FACTS };

static const char *const demo_facts[FACTS] = { "arms", "seed", "steps",   "text",         "reduction",
                                               "mesh", "done", "seconds", "metrics_bytes" };

typedef char demo_value[128];

/* Keys with commas between them, as --arms takes them. */
static void demo_list_arms(const demo_job *job, demo_value out) {
    size_t used = 0;
    for (int i = 0; i < job->arm_count; i++)
        used +=
            (size_t)snprintf(out + used, sizeof(demo_value) - used, "%s%s", i ? "," : "", job->arms[i].key);
}

static void demo_describe(const demo_state *s, demo_value values[FACTS]) {
    const demo_job *job = s->job;
    demo_list_arms(job, values[ARMS]);
    snprintf(values[SEED], sizeof values[SEED], "%llu", (unsigned long long)s->seed);
    snprintf(values[STEPS], sizeof values[STEPS], "%d", job->steps);
    snprintf(values[TEXT], sizeof values[TEXT], "%lld tokens", (long long)job->text->count);
    snprintf(values[REDUCTION], sizeof values[REDUCTION], "%s", demo_reduction_name(job->reduction));
    snprintf(values[MESH], sizeof values[MESH], "dp=%d,cp=%d,tp=%d", job->dp, job->cp, job->tp);
    snprintf(values[DONE], sizeof values[DONE], "%d", s->done);
    snprintf(values[SECONDS], sizeof values[SECONDS], "%.17g", s->seconds);
    snprintf(values[METRICS], sizeof values[METRICS], "%ld", s->metrics_bytes);
}

/* ---- saving ---- */

void demo_state_path(const char *directory, uint64_t seed, char path[512]) {
    snprintf(path, 512, "%s/%llu.safetensors", directory, (unsigned long long)seed);
}

static xd_result demo_state_create(xd_ctx *ctx, const demo_state *s, int64_t count,
                                   xd_weights_writer **writer) {
    const int arms = s->job->arm_count;
    const int64_t losses = s->done, seconds = arms, heldout = (int64_t)arms * DEMO_POINTS;
    demo_value values[FACTS];
    demo_tensor_name names[DEMO_MOST_TENSORS];
    xd_weights_pair pairs[FACTS];
    xd_weights_entry entries[DEMO_MOST_TENSORS];
    xd_weights_writer_desc desc;
    demo_describe(s, values);
    for (int i = 0; i < FACTS; i++) {
        pairs[i].key = demo_facts[i];
        pairs[i].value = values[i];
    }
    for (int i = 0; i < arms * KINDS; i++) {
        demo_name_tensor(i / KINDS, i % KINDS, names[i]);
        entries[i].name = names[i];
        entries[i].dtype = XD_DTYPE_F32;
        entries[i].ndim = 1;
        entries[i].shape = i % KINDS == LOSSES ? &losses : &count;
    }
    for (int i = arms * KINDS; i < arms * KINDS + 2; i++) {
        entries[i].name = i == arms * KINDS ? demo_seconds_name : demo_heldout_name;
        entries[i].dtype = XD_DTYPE_F64;
        entries[i].ndim = 1;
        entries[i].shape = i == arms * KINDS ? &seconds : &heldout;
    }
    memset(&desc, 0, sizeof desc);
    desc.file = s->path;
    desc.entries = entries;
    desc.entry_count = arms * KINDS + 2;
    desc.metadata = pairs;
    desc.metadata_count = FACTS;
    return xd_weights_writer_create(ctx, &desc, writer);
}

/* What rank 0 has without asking the others. */
static xd_result demo_state_write_own(const demo_state *s, xd_weights_writer *writer) {
    const int arms = s->job->arm_count;
    double seconds[DEMO_MOST_ARMS], heldout[DEMO_MOST_ARMS * DEMO_POINTS];
    for (int arm = 0; arm < arms; arm++) {
        seconds[arm] = s->learners[arm].seconds;
        memcpy(heldout + arm * DEMO_POINTS, s->learners[arm].heldout, DEMO_POINTS * sizeof *heldout);
        XD_TRY(xd_weights_writer_write(writer, arm * KINDS + LOSSES, 0, XD_WEIGHTS_REST,
                                       s->learners[arm].losses));
    }
    XD_TRY(xd_weights_writer_write(writer, arms * KINDS, 0, XD_WEIGHTS_REST, seconds));
    return xd_weights_writer_write(writer, arms * KINDS + 1, 0, XD_WEIGHTS_REST, heldout);
}

/* Collects every whole tensor, one at a time; rank 0 writes it. A write that failed is told at the end: the
 * others wait for their part until then. */
static xd_result demo_state_write(xd_ctx *ctx, const demo_state *s, const nn_model *whole, float *values,
                                  float *flat, xd_weights_writer *writer) {
    xd_result result = writer ? demo_state_write_own(s, writer) : XD_OK;
    for (int arm = 0; arm < s->job->arm_count; arm++)
        for (int kind = VALUES; kind < LOSSES; kind++) {
            demo_state_copy(s, arm, kind, flat, false);
            XD_TRY(demo_gather_shares(ctx, s->tp, s->part, flat, whole, values));
            if (writer && result == XD_OK)
                result = xd_weights_writer_write(writer, arm * KINDS + kind, 0, XD_WEIGHTS_REST, values);
        }
    return result;
}

xd_result demo_state_save(xd_ctx *ctx, const demo_state *s) {
    nn_model whole;
    xd_weights_writer *writer = NULL;
    const char *problem = nn_model_init(&s->part->config, NULL, NULL, &whole);
    const int64_t count = problem ? 0 : whole.float_count;
    float *values = (float *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *values);
    float *flat = (float *)xd_allocate(ctx, ((size_t)s->part->float_count + 1) * sizeof *flat);
    xd_result result = problem || !values || !flat ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to save") : XD_OK;
    if (result == XD_OK && xd_comm_rank(s->world) == 0) result = demo_state_create(ctx, s, count, &writer);
    result = xd_agree(s->world, result);
    if (result == XD_OK) result = demo_state_write(ctx, s, &whole, values, flat, writer);
    if (writer && result == XD_OK)
        result = xd_weights_writer_commit(writer);
    else if (writer)
        xd_weights_writer_abort(writer);
    xd_release(ctx, values);
    xd_release(ctx, flat);
    if (!problem) nn_model_free(&whole);
    return xd_agree(s->world, result);
}

/* ---- loading ---- */

/* A fact of the file, or -1 when it is not a number in [least, most]. */
static double demo_state_number(const xd_weights *file, int fact, double least, double most) {
    const char *value = xd_weights_metadata(file, demo_facts[fact]);
    char *end = NULL;
    const double number = value ? strtod(value, &end) : -1.0;
    return value && end != value && !*end && number >= least && number <= most ? number : -1.0;
}

/* The file must be of this run. */
static xd_result demo_state_compare(xd_ctx *ctx, const demo_state *s, const xd_weights *file) {
    demo_value here[FACTS];
    demo_describe(s, here);
    for (int i = 0; i < SHARED; i++) {
        const char *there = xd_weights_metadata(file, demo_facts[i]);
        if (i == MESH && s->job->reduction == XD_REDUCTION_INVARIANT) continue;
        if (!there || strcmp(there, here[i]) != 0)
            return XD_FAIL(
                ctx, XD_ERROR_DATA,
                "cannot go on from %s: its %s is %s, this run's is %s: without --resume a new run begins, "
                "--out names another folder",
                s->path, demo_facts[i], there ? there : "not said", here[i]);
    }
    return XD_OK;
}

static xd_result demo_state_check_tensor(xd_ctx *ctx, const demo_state *s, const xd_weights *file,
                                         const char *name, xd_dtype dtype, int64_t count) {
    const int64_t index = xd_weights_find(file, name);
    const xd_weights_tensor *info = index < 0 ? NULL : xd_weights_at(file, index);
    if (info && info->dtype == dtype && info->ndim == 1 && info->shape[0] == count) return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_SHAPE, "%s does not have %lld numbers in %s", s->path, (long long)count,
                   name);
}

/* Its numbers must be possible, and its tensors as long as they should be. */
static xd_result demo_state_check(xd_ctx *ctx, const demo_state *s, const xd_weights *file, int64_t count) {
    const int arms = s->job->arm_count;
    const double done = demo_state_number(file, DONE, 1.0, s->job->steps);
    demo_tensor_name name;
    XD_TRY(demo_state_compare(ctx, s, file));
    if (done < 0.0 || demo_state_number(file, SECONDS, 0.0, 1e12) < 0.0 ||
        demo_state_number(file, METRICS, 0.0, 1e12) < 0.0)
        return XD_FAIL(ctx, XD_ERROR_DATA, "%s does not say where in %d steps it stands", s->path,
                       s->job->steps);
    for (int i = 0; i < arms * KINDS; i++) {
        demo_name_tensor(i / KINDS, i % KINDS, name);
        XD_TRY(demo_state_check_tensor(ctx, s, file, name, XD_DTYPE_F32,
                                       i % KINDS == LOSSES ? (int64_t)done : count));
    }
    XD_TRY(demo_state_check_tensor(ctx, s, file, demo_heldout_name, XD_DTYPE_F64, arms * DEMO_POINTS));
    return demo_state_check_tensor(ctx, s, file, demo_seconds_name, XD_DTYPE_F64, arms);
}

static xd_result demo_state_fetch(xd_weights *file, const char *name, size_t bytes, void *out) {
    xd_weights_read_desc range;
    memset(&range, 0, sizeof range);
    range.bytes = bytes;
    return xd_weights_read(file, xd_weights_find(file, name), &range, out);
}

static xd_result demo_state_read_arm(demo_state *s, xd_weights *file, int arm, const nn_model *whole,
                                     float *values, float *flat) {
    demo_tensor_name name;
    demo_learner *learner = &s->learners[arm];
    for (int kind = VALUES; kind < LOSSES; kind++) {
        demo_name_tensor(arm, kind, name);
        XD_TRY(demo_state_fetch(file, name, (size_t)whole->float_count * sizeof *values, values));
        demo_take_share(whole, values, s->part, flat);
        demo_state_copy(s, arm, kind, flat, true);
    }
    if (!learner->losses) return XD_OK;
    demo_name_tensor(arm, LOSSES, name);
    return demo_state_fetch(file, name, (size_t)s->done * sizeof *learner->losses, learner->losses);
}

static xd_result demo_state_read(xd_ctx *ctx, demo_state *s, xd_weights *file, const nn_model *whole,
                                 float *values, float *flat) {
    double seconds[DEMO_MOST_ARMS], heldout[DEMO_MOST_ARMS * DEMO_POINTS];
    const size_t bytes = (size_t)s->job->arm_count * sizeof *seconds;
    XD_TRY(demo_state_check(ctx, s, file, whole->float_count));
    s->done = (int)demo_state_number(file, DONE, 1.0, s->job->steps);
    s->seconds = demo_state_number(file, SECONDS, 0.0, 1e12);
    s->metrics_bytes = (long)demo_state_number(file, METRICS, 0.0, 1e12);
    XD_TRY(demo_state_fetch(file, demo_seconds_name, bytes, seconds));
    XD_TRY(demo_state_fetch(file, demo_heldout_name, bytes * DEMO_POINTS, heldout));
    for (int arm = 0; arm < s->job->arm_count; arm++) {
        s->learners[arm].seconds = seconds[arm];
        if (s->learners[arm].heldout)
            memcpy(s->learners[arm].heldout, heldout + arm * DEMO_POINTS, DEMO_POINTS * sizeof *heldout);
        XD_TRY(demo_state_read_arm(s, file, arm, whole, values, flat));
    }
    return XD_OK;
}

/* The file, which is there. */
static xd_result demo_state_open(xd_ctx *ctx, demo_state *s) {
    nn_model whole;
    xd_weights_desc desc;
    xd_weights *file = NULL;
    const char *problem = nn_model_init(&s->part->config, NULL, NULL, &whole);
    const int64_t count = problem ? 0 : whole.float_count;
    float *values = (float *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *values);
    float *flat = (float *)xd_allocate(ctx, ((size_t)s->part->float_count + 1) * sizeof *flat);
    xd_result result =
        problem || !values || !flat ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to resume") : XD_OK;
    memset(&desc, 0, sizeof desc);
    desc.file = s->path;
    if (result == XD_OK) result = xd_weights_open(ctx, &desc, &file);
    if (result == XD_OK) result = demo_state_read(ctx, s, file, &whole, values, flat);
    xd_weights_close(file);
    xd_release(ctx, values);
    xd_release(ctx, flat);
    if (!problem) nn_model_free(&whole);
    return result;
}

xd_result demo_state_load(xd_ctx *ctx, demo_state *s) {
    int64_t ranks = demo_is_file(s->path);
    XD_TRY(xd_all_reduce(s->world, &ranks, &ranks, 1, XD_DTYPE_I64, XD_SUM));
    if (ranks == 0) return XD_OK; /* this run has not begun */
    if (ranks != xd_comm_size(s->world))
        return XD_FAIL(ctx, XD_ERROR_IO, "%lld of %d ranks can read %s", (long long)ranks,
                       xd_comm_size(s->world), s->path);
    return xd_agree(s->world, demo_state_open(ctx, s));
}
