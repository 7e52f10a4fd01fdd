/* demo.c - distils a teacher into a smaller student on real text, and shows what that is worth.
 *
 *   make demo                          one seed, 2 ranks
 *   build/demo --ranks 4 --mesh dp=2,tp=2 --steps 100 --seed 7
 *   SEEDS=3 make demo                  mean and spread over three seeds
 *   build/demo --reduction invariant   the same bits on every mesh that splits the batch only
 *
 * Two students of the same size start from the same weights and read the same rows of the King James text:
 * one learns from the text alone, the other from 0.9 times the KL divergence to the teacher's next-token
 * distributions plus 0.1 times the text. Then all three models are measured on chapters that none of them has
 * seen. Ranks are threads of this process.
 *
 * Writes out/metrics.jsonl, out/loss.svg, out/run.json and out/student/, a Hugging Face model directory.
 *
 *   build/demo --train-teacher TEXT    trains the teacher itself, into data/teacher (see tools/teacher.sh) */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "demo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct demo_options {
    int ranks, dp, cp, tp;
    int steps; /* 0 -> 300, or 1500 for the teacher */
    int seeds;
    uint64_t seed;
    size_t heldout_bytes; /* measure on no more than these; 0 -> all */
    xd_reduction reduction;
    int save_every; /* 0 -> never */
    bool resume;
    const char *teacher_text; /* train the teacher on it instead */
    const char *data;         /* folder with the texts and teacher/ */
    const char *out;
} demo_options;

/* ---- options ---- */

static int demo_usage(const char *problem, const char *detail) {
    fprintf(
        stderr,
        "demo: %s%s\n"
        "usage: demo [--ranks N] [--mesh dp=N,cp=N,tp=N] [--steps N] [--seed N] [--data DIR] [--out DIR]\n"
        "            [--reduction deterministic|fast|invariant] [--heldout-bytes N] [--train-teacher TEXT]\n"
        "            [--save-every STEPS] [--resume]\n",
        problem, detail);
    return 2;
}

static bool demo_number(const char *text, long least, long most, long *out) {
    char *end = NULL;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) return false;
    *out = value;
    return true;
}

/* "dp=2,tp=2"; axes that are not named have one rank. */
static bool demo_parse_mesh(const char *text, demo_options *o) {
    o->dp = o->cp = o->tp = 1;
    while (*text) {
        char *end = NULL;
        int *axis = strncmp(text, "dp=", 3) == 0   ? &o->dp
                    : strncmp(text, "cp=", 3) == 0 ? &o->cp
                    : strncmp(text, "tp=", 3) == 0 ? &o->tp
                                                   : NULL;
        const long size = axis ? strtol(text + 3, &end, 10) : 0;
        if (!axis || end == text + 3 || size < 1 || size > NN_MOST_RANKS) return false;
        *axis = (int)size;
        if (*end && *end != ',') return false;
        text = *end ? end + 1 : end;
    }
    return true;
}

static bool demo_parse_reduction(const char *text, xd_reduction *out) {
    static const struct {
        const char *name;
        xd_reduction mode;
    } modes[] = { { "deterministic", XD_REDUCTION_DETERMINISTIC },
                  { "fast", XD_REDUCTION_FAST },
                  { "invariant", XD_REDUCTION_INVARIANT } };
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++)
        if (strcmp(text, modes[i].name) == 0) {
            *out = modes[i].mode;
            return true;
        }
    return false;
}

static bool demo_parse_one(const char *name, const char *value, demo_options *o) {
    long number = 0;
    if (strcmp(name, "--ranks") == 0 && demo_number(value, 1, 64, &number))
        o->ranks = (int)number;
    else if (strcmp(name, "--steps") == 0 && demo_number(value, 1, 1000000, &number))
        o->steps = (int)number;
    else if (strcmp(name, "--seed") == 0 && demo_number(value, 0, 1000000000, &number))
        o->seed = (uint64_t)number;
    else if (strcmp(name, "--save-every") == 0 && demo_number(value, 1, 1000000, &number))
        o->save_every = (int)number;
    else if (strcmp(name, "--heldout-bytes") == 0 && demo_number(value, 1, 1000000000, &number))
        o->heldout_bytes = (size_t)number;
    else if (strcmp(name, "--data") == 0)
        o->data = value;
    else if (strcmp(name, "--out") == 0)
        o->out = value;
    else if (strcmp(name, "--train-teacher") == 0)
        o->teacher_text = value;
    else if (strcmp(name, "--reduction") == 0)
        return demo_parse_reduction(value, &o->reduction);
    else
        return strcmp(name, "--mesh") == 0 && demo_parse_mesh(value, o);
    return true;
}

/* 0, or the exit status. */
static int demo_parse(int argc, char **argv, demo_options *o) {
    long seeds = 1;
    const char *wanted = getenv("SEEDS");
    memset(o, 0, sizeof *o);
    o->seed = 1;
    o->data = "data";
    o->out = "out";
    if (wanted && *wanted && !demo_number(wanted, 1, DEMO_MOST_SEEDS, &seeds))
        return demo_usage("SEEDS must be 1 to 8, not ", wanted);
    o->seeds = (int)seeds;
    for (int i = 1; i < argc; i += 2) {
        if (strcmp(argv[i], "--resume") == 0) {
            o->resume = true;
            i--; /* it has no value */
            continue;
        }
        if (i + 1 == argc) return demo_usage("no value after ", argv[i]);
        if (!demo_parse_one(argv[i], argv[i + 1], o)) return demo_usage("cannot use ", argv[i]);
    }
    if (o->dp == 0) { /* no --mesh: all ranks split the batch */
        if (o->ranks == 0) o->ranks = 2;
        o->dp = o->ranks;
        o->cp = o->tp = 1;
    }
    if (o->ranks == 0) o->ranks = o->dp * o->cp * o->tp;
    if (o->ranks != o->dp * o->cp * o->tp)
        return demo_usage("the mesh does not have as many ranks as --ranks", "");
    if (o->dp > DEMO_BATCH || o->cp > DEMO_ROW)
        return demo_usage("an axis of the mesh is longer than what it splits", "");
    /* Sums inside the model have no leaves: a rank's part of a row or of a weight is no fixed unit. */
    if (o->reduction == XD_REDUCTION_INVARIANT && o->cp * o->tp > 1)
        return demo_usage("--reduction invariant works on dp meshes only", "");
    return 0;
}

/* ---- the job ---- */

static nn_config demo_config(int vocab, bool teacher) {
    nn_config c;
    c.vocab = vocab;
    c.hidden = teacher ? 256 : 128;
    c.layers = teacher ? 4 : 2;
    c.heads = c.hidden / 32;
    c.kv_heads = c.heads / 2;
    c.head_dim = 32;
    c.ffn = 3 * c.hidden;
    c.rope_theta = 10000.0f;
    c.norm_eps = 1e-5f;
    c.tied = true;
    return c;
}

static const demo_arm demo_student_arms[] = { { "text alone", 0.0, 1.0, 3e-3 },
                                              { "distilled", 0.9, 0.1, 3e-3 } };
static const demo_arm demo_teacher_arm = { "teacher", 0.0, 1.0, 2e-3 };

/* Everything main owns. */
typedef struct demo_world {
    xd_ctx *ctx;
    bpe *vocabulary;
    demo_text text, heldout;
    nn_model teacher;
    float *teacher_weights, *losses;
    nn_config config;
    demo_result results[DEMO_MOST_SEEDS * 2], teacher_result;
    char teacher_directory[512], student_directory[512], resume_directory[480], tokenizer[512];
    demo_report *report;
} demo_world;

static xd_result demo_load(demo_world *w, const demo_options *o) {
    char path[512];
    snprintf(w->teacher_directory, sizeof w->teacher_directory, "%s/teacher", o->data);
    snprintf(w->student_directory, sizeof w->student_directory, "%s/student", o->out);
    snprintf(w->resume_directory, sizeof w->resume_directory, "%s/resume", o->out);
    snprintf(w->tokenizer, sizeof w->tokenizer, "%s/teacher/tokenizer.json", o->data);
    XDI_TRY(bpe_load(w->ctx, w->tokenizer, &w->vocabulary));
    snprintf(path, sizeof path, "%s/kjv_heldout.txt", o->data);
    XDI_TRY(demo_text_load(w->ctx, w->vocabulary, path, o->heldout_bytes, &w->heldout));
    snprintf(path, sizeof path, "%s/kjv_student.txt", o->data);
    XDI_TRY(demo_text_load(w->ctx, w->vocabulary, o->teacher_text ? o->teacher_text : path, 0, &w->text));
    if (!o->teacher_text)
        XDI_TRY(demo_model_load(w->ctx, w->teacher_directory, &w->teacher, &w->teacher_weights));
    w->config = demo_config(bpe_size(w->vocabulary), o->teacher_text != NULL);
    XDI_TRY(demo_report_open(w->ctx, o->out, o->resume, &w->report));
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    if (o->save_every && files->make_directory(files->user, w->resume_directory) != 0)
        return XDI_FAIL(w->ctx, XD_ERROR_IO, "cannot make the directory %s", w->resume_directory);
    return XD_OK;
}

static xd_result demo_fill_job(demo_world *w, const demo_options *o, demo_job *job) {
    const bool training_teacher = o->teacher_text != NULL;
    memset(job, 0, sizeof *job);
    job->vocabulary = w->vocabulary;
    job->text = &w->text;
    job->heldout = &w->heldout;
    job->config = &w->config;
    job->teacher = training_teacher ? NULL : &w->teacher;
    job->teacher_weights = w->teacher_weights;
    job->dp = o->dp;
    job->cp = o->cp;
    job->tp = o->tp;
    job->steps = o->steps ? o->steps : training_teacher ? 1500 : 300;
    job->seed = o->seed;
    job->seeds = training_teacher ? 1 : o->seeds;
    job->arms = training_teacher ? &demo_teacher_arm : demo_student_arms;
    job->arm_count = training_teacher ? 1 : 2;
    job->results = w->results;
    job->teacher_result = training_teacher ? NULL : &w->teacher_result;
    job->report = w->report;
    job->save_directory = training_teacher ? w->teacher_directory : w->student_directory;
    job->tokenizer = w->tokenizer;
    job->resume_directory = w->resume_directory;
    job->save_every = o->save_every;
    job->resume = o->resume;

    const int runs = job->seeds * job->arm_count;
    w->losses = (float *)xd_allocate(w->ctx, (size_t)runs * (size_t)job->steps * sizeof *w->losses);
    if (!w->losses) return XDI_FAIL(w->ctx, XD_ERROR_MEMORY, "no room for %d losses", runs * job->steps);
    for (int i = 0; i < runs; i++) w->results[i].losses = w->losses + (size_t)i * (size_t)job->steps;
    return XD_OK;
}

static xd_result demo_work(demo_world *w, const demo_options *o) {
    demo_job job;
    xd_error error;
    xd_ctx_desc desc;
    memset(&error, 0, sizeof error);
    memset(&desc, 0, sizeof desc);
    desc.reduction = o->reduction;
    XDI_TRY(demo_load(w, o));
    XDI_TRY(demo_fill_job(w, o, &job));
    printf("%lld tokens of text, %lld held out; %d ranks: dp=%d cp=%d tp=%d\n", (long long)w->text.count,
           (long long)w->heldout.count, o->ranks, o->dp, o->cp, o->tp);
    const xd_result result = xd_run_threads(o->ranks, &desc, demo_run_rank, &job, &error);
    if (result != XD_OK) return XDI_FAIL(w->ctx, result, "rank %d: %s", error.rank, error.message);
    return demo_report_finish(w->ctx, &job, o->out);
}

static void demo_free(demo_world *w) {
    demo_report_close(w->ctx, w->report);
    xd_release(w->ctx, w->losses);
    xd_release(w->ctx, w->teacher_weights);
    nn_model_free(&w->teacher);
    demo_text_free(w->ctx, &w->text);
    demo_text_free(w->ctx, &w->heldout);
    bpe_destroy(w->ctx, w->vocabulary);
    xd_ctx_destroy(w->ctx);
}

int main(int argc, char **argv) {
    demo_options options;
    demo_world world;
    const int refused = demo_parse(argc, argv, &options);
    if (refused) return refused;
    memset(&world, 0, sizeof world);
    if (xd_ctx_create(NULL, &world.ctx) != XD_OK) return 1;
    const xd_result result = demo_work(&world, &options);
    if (result != XD_OK)
        fprintf(stderr, "demo: %s: %s\n", xd_result_name(result), xd_last_error(world.ctx)->message);
    demo_free(&world);
    return result != XD_OK;
}
