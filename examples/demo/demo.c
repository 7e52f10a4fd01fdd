/* demo.c - distils a teacher into smaller students with another tokenizer, and shows what each way is worth.
 *
 *   make demo                          one seed, 2 ranks
 *   build/demo --ranks 4 --mesh dp=2,tp=2 --steps 100 --seed 7
 *   build/demo --arms text,pkl         some of the students only
 *   SEEDS=3 make demo                  mean and spread over three seeds
 *   build/demo --reduction invariant   the same bits on every mesh that splits the batch only
 *
 * Students of one size start from the same weights and read the same rows of the King James text, in tokens of
 * their own. One learns from the text alone; the others also from the teacher's next-token distributions over
 * the teacher's tokens of the same text, each by another loss across tokenizers, or from a file of what
 * SmolLM2-135M once said about the text. Two more read the first fifth of the text only, one alone and one with
 * that file: a teacher is worth most where text is scarce. Then all are measured on chapters that none of them
 * has seen. Ranks are threads of this process.
 *
 * Writes out/metrics.jsonl, out/loss.svg, out/run.json and out/student/, a Hugging Face model directory: the
 * first of the students with a teacher.
 *
 *   build/demo --train-teacher TEXT    trains the teacher itself, into data/teacher (see tools/teacher.sh)
 *   build/demo --eval DIR              measures a model directory on the held-out chapters
 *   build/demo --encode FILE           prints the ids of a text, one a line; of DIR's tokenizer after --eval
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
    memset(&c, 0, sizeof c);
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

/* What --arms chooses from. */
static const demo_arm demo_student_arms[] = {
    { "text", "text alone", DEMO_TEXT_ALONE, 0.0, 1.0, 1.0, 3e-3, 1.0 },
    { "pkl", "P-KL", DEMO_PROJECTED, 0.76, 0.1, 1.0, 3e-3, 1.0 },
    { "gold", "gold", DEMO_GOLD, 0.4, 0.5, 1.0, 3e-3, 1.0 },
    { "hkl", "H-KL", DEMO_HYBRID, 0.4, 0.5, 1.0, 3e-3, 1.0 },
    { "chunk", "chunk likelihood", DEMO_LIKELIHOOD, 0.5, 1.0, 1.0, 3e-3, 1.0 },
    { "smollm2", "SmolLM2's cache", DEMO_RECORDED, 0.68, 0.1, 1.0, 3e-3, 1.0 },
    /* Where text is scarce, what one learns from it alone is the text. */
    { "text-fifth", "a fifth, alone", DEMO_TEXT_ALONE, 0.0, 1.0, 1.0, 3e-3, 0.2 },
    { "smollm2-fifth", "a fifth, SmolLM2", DEMO_RECORDED, 1.0, 0.1, 1.0, 3e-3, 0.2 },
};

enum { DEMO_STUDENT_ARMS = sizeof demo_student_arms / sizeof demo_student_arms[0] };

static const demo_arm demo_teacher_arm = { "teacher", "teacher", DEMO_TEXT_ALONE, 0.0, 1.0, 1.0, 2e-3, 1.0 };

/* A text for one tokenizer, and what was held out of it. */
typedef struct demo_reader {
    xd_tokenizer *tokenizer;
    demo_text text, heldout;
    char path[512]; /* of the tokenizer.json */
} demo_reader;

/* Everything main owns. */
typedef struct demo_world {
    xd_ctx *ctx;
    xd_comm *processes; /* NULL -> ranks are threads of this one */
    demo_reader student, teacher;
    demo_bridge bridge;
    demo_record record;
    nn_model model; /* the teacher, or the model that is measured */
    float *model_weights, *losses;
    nn_config config;
    demo_result results[DEMO_MOST_SEEDS * DEMO_MOST_ARMS], teacher_result;
    char teacher_directory[480], student_directory[480], resume_directory[480];
    demo_report *report;
} demo_world;

/* True in the one process that writes files and speaks. */
static bool demo_speaks(const demo_world *w) {
    return !w->processes || xd_comm_rank(w->processes) == 0;
}

/* ---- arms ---- */

/* The arm whose key is `length` bytes long, NULL when there is none. */
static const demo_arm *demo_find_arm(const char *key, size_t length) {
    for (int i = 0; i < DEMO_STUDENT_ARMS; i++)
        if (strlen(demo_student_arms[i].key) == length && memcmp(demo_student_arms[i].key, key, length) == 0)
            return &demo_student_arms[i];
    return NULL;
}

/* The arms that --arms names, in its order. */
static xd_result demo_choose_arms(demo_world *w, const char *names, demo_job *job) {
    while (*names) {
        const size_t length = strcspn(names, ",");
        const demo_arm *arm = demo_find_arm(names, length);
        if (!arm || job->arm_count == DEMO_MOST_ARMS || (arm->signal == DEMO_RECORDED && !w->record.cache))
            return XD_FAIL(w->ctx, XD_ERROR_ARGUMENT, "cannot run the arm %.*s", (int)length, names);
        job->arms[job->arm_count++] = *arm;
        names += length + (names[length] == ',');
    }
    return XD_OK;
}

static xd_result demo_fill_arms(demo_world *w, const demo_options *o, demo_job *job) {
    if (o->teacher_text) {
        job->arms[job->arm_count++] = demo_teacher_arm;
        return XD_OK;
    }
    if (o->arms) XD_TRY(demo_choose_arms(w, o->arms, job));
    for (int i = 0; i < DEMO_STUDENT_ARMS && !o->arms; i++)
        if (demo_student_arms[i].signal != DEMO_RECORDED || w->record.cache)
            job->arms[job->arm_count++] = demo_student_arms[i];
    if (job->arm_count == 0) return XD_FAIL(w->ctx, XD_ERROR_ARGUMENT, "there are no arms to run");
    for (int i = job->arm_count - 1; i >= 0; i--)
        if (job->arms[i].signal != DEMO_TEXT_ALONE) job->saved_arm = i;
    return XD_OK;
}

/* ---- texts and models ---- */

static xd_result demo_load_tokenizer(demo_world *w, const char *directory, demo_reader *reader) {
    snprintf(reader->path, sizeof reader->path, "%s/tokenizer.json", directory);
    return xd_tokenizer_load(w->ctx, reader->path, NULL, &reader->tokenizer);
}

/* `text` may be NULL: the held-out one alone. */
static xd_result demo_load_texts(demo_world *w, const demo_options *o, const char *text,
                                 demo_reader *reader) {
    char path[512];
    snprintf(path, sizeof path, "%s/kjv_heldout.txt", o->data);
    XD_TRY(demo_text_load(w->ctx, reader->tokenizer, path, o->heldout_bytes, &reader->heldout));
    XD_TRY(demo_text_check(w->ctx, &reader->heldout, path));
    if (!text) return XD_OK;
    XD_TRY(demo_text_load(w->ctx, reader->tokenizer, text, 0, &reader->text));
    return demo_text_check(w->ctx, &reader->text, text);
}

/* The teacher that --train-teacher trains, or the model that --eval measures: one tokenizer, no student. */
static xd_result demo_load_one(demo_world *w, const demo_options *o) {
    demo_reader *reader = o->eval ? &w->teacher : &w->student;
    XD_TRY(demo_load_tokenizer(w, o->eval ? o->eval : w->teacher_directory, reader));
    XD_TRY(demo_load_texts(w, o, o->teacher_text, reader));
    return o->eval ? demo_model_load(w->ctx, o->eval, &w->model, &w->model_weights) : XD_OK;
}

/* What a larger teacher said; without the file the arm that learns from it is left out. */
static xd_result demo_load_record(demo_world *w, const demo_options *o) {
    char path[512];
    snprintf(path, sizeof path, "%s/smollm2/kjv_student.xdcache", o->data);
    FILE *there = fopen(path, "rb");
    if (!there) return XD_OK;
    fclose(there);
    return demo_record_open(w->ctx, path, w->student.tokenizer, &w->student.text, &w->record);
}

static xd_result demo_load(demo_world *w, const demo_options *o) {
    char directory[480], text[512];
    snprintf(w->teacher_directory, sizeof w->teacher_directory, "%s/teacher", o->data);
    if (o->eval || o->teacher_text) return demo_load_one(w, o);
    snprintf(directory, sizeof directory, "%s/student", o->data);
    snprintf(text, sizeof text, "%s/kjv_student.txt", o->data);
    XD_TRY(demo_load_tokenizer(w, directory, &w->student));
    XD_TRY(demo_load_texts(w, o, text, &w->student));
    XD_TRY(demo_load_tokenizer(w, w->teacher_directory, &w->teacher));
    XD_TRY(demo_load_texts(w, o, text, &w->teacher));
    XD_TRY(demo_model_load(w->ctx, w->teacher_directory, &w->model, &w->model_weights));
    XD_TRY(demo_bridge_make(w->ctx, w->student.tokenizer, &w->student.text, w->teacher.tokenizer,
                            &w->teacher.text, &w->bridge));
    return demo_load_record(w, o);
}

static xd_result demo_open_output(demo_world *w, const demo_options *o) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    snprintf(w->student_directory, sizeof w->student_directory, "%s/student", o->out);
    snprintf(w->resume_directory, sizeof w->resume_directory, "%s/resume", o->out);
    if (!demo_speaks(w)) return XD_OK;
    XD_TRY(demo_report_open(w->ctx, o->out, o->resume, &w->report));
    if (o->save_every && files->make_directory(files->user, w->resume_directory) != 0)
        return XD_FAIL(w->ctx, XD_ERROR_IO, "cannot make the directory %s", w->resume_directory);
    return XD_OK;
}

/* What training and measuring have in common. */
static void demo_fill_job(demo_world *w, const demo_options *o, demo_job *job) {
    memset(job, 0, sizeof *job);
    job->tokenizer = w->student.tokenizer;
    job->teacher_tokenizer = w->teacher.tokenizer;
    job->text = &w->student.text;
    job->heldout = &w->student.heldout;
    job->teacher_heldout = &w->teacher.heldout;
    job->dp = o->dp;
    job->cp = o->cp;
    job->tp = o->tp;
    job->reduction = o->reduction;
    job->ranks_are = w->processes ? "processes" : "threads";
    job->seed = o->seed;
    if (o->teacher_text) return;
    job->teacher = &w->model;
    job->teacher_weights = w->model_weights;
    job->teacher_result = &w->teacher_result;
    if (!o->eval) job->bridge = &w->bridge;
    if (w->record.cache) job->record = &w->record;
}

static xd_result demo_fill_training(demo_world *w, const demo_options *o, demo_job *job) {
    const bool training_teacher = o->teacher_text != NULL;
    w->config = demo_config(xd_tokenizer_describe(w->student.tokenizer).size, training_teacher);
    job->config = &w->config;
    job->steps = o->steps;
    job->seeds = o->seeds;
    job->results = w->results;
    job->report = w->report;
    job->save_directory = training_teacher ? w->teacher_directory : w->student_directory;
    job->tokenizer_path = w->student.path;
    job->resume_directory = w->resume_directory;
    job->save_every = o->save_every;
    job->resume = o->resume;

    const int runs = job->seeds * job->arm_count;
    w->losses = (float *)xd_allocate(w->ctx, (size_t)runs * (size_t)job->steps * sizeof *w->losses);
    if (!w->losses) return XD_FAIL(w->ctx, XD_ERROR_MEMORY, "no room for %d losses", runs * job->steps);
    for (int i = 0; i < runs; i++) w->results[i].losses = w->losses + (size_t)i * (size_t)job->steps;
    return XD_OK;
}

/* Local: what a process needs before ranks start. */
static xd_result demo_prepare(demo_world *w, const demo_options *o, demo_job *job) {
    XD_TRY(demo_load(w, o));
    demo_fill_job(w, o, job);
    if (o->eval) {
        job->config = &w->model.config;
        return XD_OK;
    }
    XD_TRY(demo_fill_arms(w, o, job));
    XD_TRY(demo_open_output(w, o));
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
    return result == XD_OK ? XD_OK : XD_FAIL(w->ctx, result, "rank %d: %s", error.rank, error.message);
}

static void demo_introduce(const demo_world *w, const demo_options *o) {
    printf("%lld tokens of text, %lld held out; %d ranks: dp=%d cp=%d tp=%d\n",
           (long long)w->student.text.count, (long long)w->student.heldout.count, o->ranks, o->dp, o->cp,
           o->tp);
    if (!o->teacher_text)
        printf("the teacher reads %lld tokens; %lld chunks, %lld of %d entries in both vocabularies\n",
               (long long)w->teacher.text.count, (long long)w->bridge.alignment.count,
               (long long)w->bridge.strict.pairs, w->config.vocab);
    if (!o->teacher_text && !w->record.cache)
        printf("%s/smollm2 has no cache: the student that would learn from it is left out\n", o->data);
}

static xd_result demo_work(demo_world *w, const demo_options *o) {
    demo_job job;
    xd_result result = demo_prepare(w, o, &job);
    if (w->processes) result = xd_agree(w->processes, result);
    if (result == XD_OK && demo_speaks(w) && !o->eval) demo_introduce(w, o);
    if (result == XD_OK) result = demo_run_ranks(w, o, &job);
    if (result != XD_OK || !demo_speaks(w)) return result;
    if (!o->eval) return demo_report_finish(w->ctx, &job, o->out);
    printf("%s: %lld parameters, %.6f bits/byte over %lld held-out tokens\n%s\n", o->eval,
           (long long)w->model.float_count, w->teacher_result.bits_per_byte,
           (long long)w->teacher.heldout.count, w->teacher_result.sample);
    return XD_OK;
}

static xd_result demo_print_ids(demo_world *w, const demo_options *o) {
    char directory[480];
    snprintf(directory, sizeof directory, "%s/student", o->data);
    XD_TRY(demo_load_tokenizer(w, o->eval ? o->eval : directory, &w->student));
    XD_TRY(demo_text_load(w->ctx, w->student.tokenizer, o->encode, 0, &w->student.text));
    for (int64_t i = 0; i < w->student.text.count && demo_speaks(w); i++)
        printf("%d\n", (int)w->student.text.ids[i]);
    return XD_OK;
}

static void demo_free_reader(demo_world *w, demo_reader *reader) {
    demo_text_free(w->ctx, &reader->text);
    demo_text_free(w->ctx, &reader->heldout);
    xd_tokenizer_destroy(reader->tokenizer);
}

static void demo_free(demo_world *w) {
    xd_release(w->ctx, w->losses);
    xd_release(w->ctx, w->model_weights);
    nn_model_free(&w->model);
    demo_bridge_free(w->ctx, &w->bridge);
    demo_record_close(w->ctx, &w->record);
    demo_free_reader(w, &w->student);
    demo_free_reader(w, &w->teacher);
    xd_comm_destroy(w->processes);
    xd_ctx_destroy(w->ctx);
}

static xd_result demo_join(demo_world *w) {
#if defined(DEMO_MPI)
    return xd_comm_mpi(w->ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, &w->processes);
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
        "            [--reduction deterministic|fast|invariant] [--heldout-bytes N] [--arms text,pkl,...]\n"
        "            [--save-every STEPS] [--resume] [--train-teacher TEXT | --eval DIR | --encode FILE]\n",
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
