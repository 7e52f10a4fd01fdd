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
 *   build/demo --train-teacher TEXT    trains the teacher itself, into data/teacher (see tools/teacher.sh)
 *   build/demo --eval DIR              measures a model directory on the held-out chapters
 *   build/demo --encode FILE           prints the ids of a text, one a line
 *
 * Compiled by mpicc with -DDEMO_MPI it is the same program with the processes of an MPI job as ranks: make
 * demo-mpi. On the same mesh processes have the bits of threads. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(DEMO_MPI)
#    include "xdistill_mpi.h"
#endif

#include "demo.h"

#include <stdio.h>
#include <string.h>

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
    xd_comm *processes; /* NULL -> ranks are threads of this one */
    bpe *vocabulary;
    demo_text text, heldout;
    nn_model teacher; /* or the model that is measured */
    float *teacher_weights, *losses;
    nn_config config;
    demo_result results[DEMO_MOST_SEEDS * 2], teacher_result;
    char teacher_directory[480], student_directory[480], resume_directory[480], tokenizer[512];
    demo_report *report;
} demo_world;

/* True in the one process that writes files and speaks. */
static bool demo_speaks(const demo_world *w) {
    return !w->processes || xd_comm_rank(w->processes) == 0;
}

static xd_result demo_load_vocabulary(demo_world *w, const demo_options *o) {
    snprintf(w->teacher_directory, sizeof w->teacher_directory, "%s/teacher", o->data);
    snprintf(w->tokenizer, sizeof w->tokenizer, "%s/tokenizer.json",
             o->eval ? o->eval : w->teacher_directory);
    return bpe_load(w->ctx, w->tokenizer, &w->vocabulary);
}

static xd_result demo_load(demo_world *w, const demo_options *o) {
    char path[512];
    XDI_TRY(demo_load_vocabulary(w, o));
    snprintf(path, sizeof path, "%s/kjv_heldout.txt", o->data);
    XDI_TRY(demo_text_load(w->ctx, w->vocabulary, path, o->heldout_bytes, &w->heldout));
    if (!o->teacher_text)
        XDI_TRY(demo_model_load(w->ctx, o->eval ? o->eval : w->teacher_directory, &w->teacher,
                                &w->teacher_weights));
    if (o->eval) return XD_OK;
    snprintf(path, sizeof path, "%s/kjv_student.txt", o->data);
    return demo_text_load(w->ctx, w->vocabulary, o->teacher_text ? o->teacher_text : path, 0, &w->text);
}

static xd_result demo_open_output(demo_world *w, const demo_options *o) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    snprintf(w->student_directory, sizeof w->student_directory, "%s/student", o->out);
    snprintf(w->resume_directory, sizeof w->resume_directory, "%s/resume", o->out);
    if (!demo_speaks(w)) return XD_OK;
    XDI_TRY(demo_report_open(w->ctx, o->out, o->resume, &w->report));
    if (o->save_every && files->make_directory(files->user, w->resume_directory) != 0)
        return XDI_FAIL(w->ctx, XD_ERROR_IO, "cannot make the directory %s", w->resume_directory);
    return XD_OK;
}

/* What training and measuring have in common. */
static void demo_fill_job(demo_world *w, const demo_options *o, demo_job *job) {
    memset(job, 0, sizeof *job);
    job->vocabulary = w->vocabulary;
    job->text = &w->text;
    job->heldout = &w->heldout;
    job->dp = o->dp;
    job->cp = o->cp;
    job->tp = o->tp;
    job->reduction = o->reduction;
    job->ranks_are = w->processes ? "processes" : "threads";
    job->seed = o->seed;
    if (o->teacher_text) return;
    job->teacher = &w->teacher;
    job->teacher_weights = w->teacher_weights;
    job->teacher_result = &w->teacher_result;
}

static xd_result demo_fill_training(demo_world *w, const demo_options *o, demo_job *job) {
    const bool training_teacher = o->teacher_text != NULL;
    w->config = demo_config(bpe_size(w->vocabulary), training_teacher);
    job->config = &w->config;
    job->steps = o->steps;
    job->seeds = o->seeds;
    job->arms = training_teacher ? &demo_teacher_arm : demo_student_arms;
    job->arm_count = training_teacher ? 1 : 2;
    job->results = w->results;
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

/* Local: what a process needs before ranks start. */
static xd_result demo_prepare(demo_world *w, const demo_options *o, demo_job *job) {
    XDI_TRY(demo_load(w, o));
    demo_fill_job(w, o, job);
    if (o->eval) {
        job->config = &w->teacher.config;
        return XD_OK;
    }
    XDI_TRY(demo_open_output(w, o));
    return demo_fill_training(w, o, job);
}

/* ---- ranks ---- */

static xd_result demo_run_ranks(demo_world *w, const demo_options *o, demo_job *job) {
    xd_error error;
    xd_ctx_desc desc;
    if (w->processes) return demo_run_rank(w->processes, job);
    memset(&error, 0, sizeof error);
    memset(&desc, 0, sizeof desc);
    desc.reduction = o->reduction;
    const xd_result result = xd_run_threads(o->ranks, &desc, demo_run_rank, job, &error);
    return result == XD_OK ? XD_OK : XDI_FAIL(w->ctx, result, "rank %d: %s", error.rank, error.message);
}

static xd_result demo_work(demo_world *w, const demo_options *o) {
    demo_job job;
    xd_result result = demo_prepare(w, o, &job);
    if (w->processes) result = xd_agree(w->processes, result);
    if (result == XD_OK && demo_speaks(w) && !o->eval)
        printf("%lld tokens of text, %lld held out; %d ranks: dp=%d cp=%d tp=%d\n", (long long)w->text.count,
               (long long)w->heldout.count, o->ranks, o->dp, o->cp, o->tp);
    if (result == XD_OK) result = demo_run_ranks(w, o, &job);
    if (result != XD_OK || !demo_speaks(w)) return result;
    if (!o->eval) return demo_report_finish(w->ctx, &job, o->out);
    printf("%s: %lld parameters, %.6f bits/byte over %lld held-out tokens\n%s\n", o->eval,
           (long long)w->teacher.float_count, w->teacher_result.bits_per_byte, (long long)w->heldout.count,
           w->teacher_result.sample);
    return XD_OK;
}

static xd_result demo_print_ids(demo_world *w, const demo_options *o) {
    char *text = NULL;
    size_t bytes = 0;
    XDI_TRY(demo_load_vocabulary(w, o));
    XDI_TRY(xd_file_load(w->ctx, o->encode, 0, &text, &bytes));
    int32_t *ids = (int32_t *)xd_allocate(w->ctx, (bytes + 1) * sizeof *ids);
    const int64_t count = ids ? bpe_encode(w->vocabulary, text, bytes, ids) : 0;
    for (int64_t i = 0; i < count && demo_speaks(w); i++) printf("%d\n", (int)ids[i]);
    xd_release(w->ctx, text);
    xd_release(w->ctx, ids);
    return ids ? XD_OK : XDI_FAIL(w->ctx, XD_ERROR_MEMORY, "no room for the ids of %zu bytes", bytes);
}

static void demo_free(demo_world *w) {
    xd_release(w->ctx, w->losses);
    xd_release(w->ctx, w->teacher_weights);
    nn_model_free(&w->teacher);
    demo_text_free(w->ctx, &w->text);
    demo_text_free(w->ctx, &w->heldout);
    bpe_destroy(w->ctx, w->vocabulary);
    xd_comm_destroy(w->processes);
    xd_ctx_destroy(w->ctx);
}

static xd_result demo_join(demo_world *w) {
#if defined(DEMO_MPI)
    return xd_comm_mpi(w->ctx, MPI_COMM_WORLD, &w->processes);
#else
    (void)w;
    return XD_OK;
#endif
}

/* Every rank that knows better than that another one failed says so. */
static void demo_complain(const demo_world *w, xd_result result) {
    const xd_error *error = xd_last_error(w->ctx);
    if (w->processes && error->culprit >= 0 && error->culprit != error->rank) return;
    fprintf(stderr, "demo: %s: %s\n", xd_result_name(result), error->message);
}

static int demo_main(const demo_options *o) {
    demo_world world;
    xd_ctx_desc desc;
    memset(&world, 0, sizeof world);
    memset(&desc, 0, sizeof desc);
    desc.reduction = o->reduction;
    if (xd_ctx_create(&desc, &world.ctx) != XD_OK) return 1;
    xd_result result = demo_join(&world);
    if (result == XD_OK) result = o->encode ? demo_print_ids(&world, o) : demo_work(&world, o);
    const xd_result closed = demo_report_close(world.ctx, world.report);
    if (result == XD_OK) result = closed;
    if (result != XD_OK) demo_complain(&world, result);
    if (result != XD_OK && world.processes) xd_comm_abort(world.processes); /* peers must not wait */
    demo_free(&world);
    return result != XD_OK;
}

static int demo_usage(const demo_options *o) {
    fprintf(
        stderr,
        "demo: %s%s\n"
        "usage: demo [--ranks N] [--mesh dp=N,cp=N,tp=N] [--steps N] [--seed N] [--data DIR] [--out DIR]\n"
        "            [--reduction deterministic|fast|invariant] [--heldout-bytes N] [--save-every STEPS]\n"
        "            [--resume] [--train-teacher TEXT | --eval DIR | --encode FILE]\n",
        o->problem, o->detail);
    return 2;
}

int main(int argc, char **argv) {
    demo_options options;
    int status = 0, ranks = 0, rank = 0;
#if defined(DEMO_MPI)
    MPI_Init(&argc, &argv);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
#endif
    if (demo_parse(argc, argv, ranks, &options))
        status = demo_main(&options);
    else
        status = rank == 0 ? demo_usage(&options) : 2;
#if defined(DEMO_MPI)
    MPI_Finalize();
#endif
    return status;
}
