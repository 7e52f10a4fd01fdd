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
 * first of the students with a teacher. A finished one that is there is replaced with --overwrite only, and one run at a
 * time writes into a folder.
 *
 *   build/demo --train-teacher TEXT    trains the teacher itself, into data/teacher (see tools/teacher.sh)
 *   build/demo --eval DIR              measures a model directory on the held-out chapters
 *   build/demo --data DIR              other texts: DIR/text.txt and DIR/heldout.txt, see demo_data.h
 *   build/demo --help                  all options
 *   build/demo --encode FILE           prints the ids of a text, one a line; of DIR's tokenizer after --eval
 *
 * Compiled by mpicc with -DDEMO_MPI it is the same program with the processes of an MPI job as ranks: make
 * demo-mpi. On the same mesh processes have the bits of threads. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(DEMO_MPI)
#    include "xdistill_mpi.h"
#endif

#include "demo_data.h"

#include "../common/model_directory.h"

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
    demo_data data;
    demo_lock *lock;
    demo_report *report;
} demo_world;

/* True in the one process that writes files and speaks. */
static bool demo_speaks(const demo_world *w) {
    return !w->processes || xd_comm_rank(w->processes) == 0;
}

/* ---- texts and models ---- */

static xd_result demo_load_tokenizer(demo_world *w, const char *directory, demo_reader *reader) {
    snprintf(reader->path, sizeof reader->path, "%s/tokenizer.json", directory);
    return xd_tokenizer_load(w->ctx, reader->path, NULL, &reader->tokenizer);
}

/* `text` may be NULL: the held-out one alone. */
static xd_result demo_load_texts(demo_world *w, const demo_options *o, const char *text,
                                 demo_reader *reader) {
    const char *path = w->data.heldout;
    XD_TRY(demo_text_load(w->ctx, reader->tokenizer, path, o->heldout_bytes, &reader->heldout));
    const xd_result enough = demo_text_check(w->ctx, &reader->heldout, path);
    if (enough != XD_OK && o->heldout_bytes)
        return XD_FAIL(w->ctx, enough,
                       "the first %zu bytes of %s are %lld tokens: --heldout-bytes must leave %d",
                       o->heldout_bytes, path, (long long)reader->heldout.count, DEMO_ROW + 2);
    XD_TRY(enough);
    if (!text) return XD_OK;
    XD_TRY(demo_text_load(w->ctx, reader->tokenizer, text, 0, &reader->text));
    return demo_text_check(w->ctx, &reader->text, text);
}

/* The teacher that --train-teacher trains, or the model that --eval measures: one tokenizer, no student. */
static xd_result demo_load_one(demo_world *w, const demo_options *o) {
    demo_reader *reader = o->eval ? &w->teacher : &w->student;
    XD_TRY(demo_load_tokenizer(w, o->eval ? o->eval : w->teacher_directory, reader));
    XD_TRY(demo_load_texts(w, o, o->teacher_text, reader));
    return o->eval ? model_directory_load(w->ctx, o->eval, &w->model, &w->model_weights) : XD_OK;
}

/* What a larger teacher said, when one of the arms learns from it. */
static xd_result demo_load_record(demo_world *w, const demo_job *job) {
    bool wanted = false;
    for (int i = 0; i < job->arm_count; i++) wanted = wanted || job->arms[i].signal == DEMO_RECORDED;
    if (!wanted) return XD_OK;
    XD_REQUIRE(w->ctx, w->data.cache[0], XD_ERROR_MISSING,
               "the arms smollm2 and smollm2-fifth need a teacher.xdcache in the folder of data");
    return demo_record_open(w->ctx, w->data.cache, w->student.tokenizer, &w->student.text, &w->record);
}

/* Fills in the arms, which say what is needed. */
static xd_result demo_load(demo_world *w, const demo_options *o, demo_job *job) {
    snprintf(w->teacher_directory, sizeof w->teacher_directory, "%s/teacher", o->data);
    XD_TRY(demo_data_find(w->ctx, o->data, !o->eval && !o->teacher_text, &w->data));
    if (!o->eval) XD_TRY(demo_fill_arms(w->ctx, o, w->data.cache[0] != 0, job));
    if (o->eval || o->teacher_text) return demo_load_one(w, o);
    XD_TRY(demo_load_tokenizer(w, w->data.tokenizer, &w->student));
    XD_TRY(demo_load_texts(w, o, w->data.text, &w->student));
    XD_TRY(demo_load_tokenizer(w, w->data.teacher, &w->teacher));
    XD_TRY(demo_load_texts(w, o, w->data.text, &w->teacher));
    XD_TRY(model_directory_load(w->ctx, w->data.teacher, &w->model, &w->model_weights));
    XD_TRY(demo_bridge_make(w->ctx, w->student.tokenizer, &w->student.text, w->teacher.tokenizer,
                            &w->teacher.text, &w->bridge));
    return demo_load_record(w, job);
}

/* True when the first run left a state to go on from. */
static bool demo_has_state(const demo_world *w, const demo_options *o) {
    char path[512];
    demo_state_path(w->resume_directory, o->seed, path);
    return demo_is_file(path);
}

/* A run that goes on may find what it left itself; demo_run.c looks at that when it has a model. */
static xd_result demo_check_output(demo_world *w, const demo_options *o) {
    const char *kept = o->teacher_text ? w->teacher_directory : w->student_directory;
    if (o->overwrite || !model_directory_is_finished(kept)) return XD_OK;
    if (o->resume && demo_has_state(w, o)) return XD_OK;
    return XD_FAIL(w->ctx, XD_ERROR_STATE,
                   "%s holds a finished model: --overwrite replaces it, --out names another folder", kept);
}

static xd_result demo_open_output(demo_world *w, const demo_options *o) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    snprintf(w->student_directory, sizeof w->student_directory, "%s/student", o->out);
    snprintf(w->resume_directory, sizeof w->resume_directory, "%s/resume", o->out);
    if (!demo_speaks(w)) return XD_OK;
    XD_TRY(demo_lock_take(w->ctx, o->out, &w->lock));
    XD_TRY(demo_check_output(w, o));
    XD_TRY(demo_report_open(w->ctx, o->out, o->resume, &w->report));
    if (o->save_every && files->make_directory(files->user, w->resume_directory) != 0)
        return XD_FAIL(w->ctx, XD_ERROR_IO, "cannot make the directory %s", w->resume_directory);
    return XD_OK;
}

/* What training and measuring have in common. */
static void demo_fill_job(demo_world *w, const demo_options *o, demo_job *job) {
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
    job->overwrite = o->overwrite;

    const int runs = job->seeds * job->arm_count;
    w->losses = (float *)xd_allocate(w->ctx, (size_t)runs * (size_t)job->steps * sizeof *w->losses);
    if (!w->losses) return XD_FAIL(w->ctx, XD_ERROR_MEMORY, "no room for %d losses", runs * job->steps);
    for (int i = 0; i < runs; i++) w->results[i].losses = w->losses + (size_t)i * (size_t)job->steps;
    return XD_OK;
}

/* Local: what a process needs before ranks start. */
static xd_result demo_prepare(demo_world *w, const demo_options *o, demo_job *job) {
    memset(job, 0, sizeof *job);
    XD_TRY(demo_load(w, o, job));
    demo_fill_job(w, o, job);
    if (o->eval) {
        job->config = &w->model.config;
        return XD_OK;
    }
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
    printf("%lld tokens of text, %lld held out; %d rank%s: dp=%d cp=%d tp=%d\n",
           (long long)w->student.text.count, (long long)w->student.heldout.count, o->ranks,
           o->ranks > 1 ? "s" : "", o->dp, o->cp, o->tp);
    if (!o->teacher_text)
        printf("the teacher reads %lld tokens; %lld chunks, %lld of %d entries in both vocabularies\n",
               (long long)w->teacher.text.count, (long long)w->bridge.alignment.count,
               (long long)w->bridge.strict.pairs, w->config.vocab);
    if (!o->teacher_text)
        printf("text %s, held out %s, the teacher is %s\n", w->data.text, w->data.heldout, w->data.teacher);
    if (!o->teacher_text && !o->arms && !w->data.cache[0])
        printf("%s has no teacher.xdcache: the students that would learn from it are left out\n", o->data);
    fflush(stdout); /* into a file, too, before the minutes that follow */
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
    demo_lock_release(world.ctx, world.lock);
    if (result == XD_OK) result = closed;
    if (result != XD_OK) demo_complain(&world, result);
    if (result != XD_OK && world.processes) xd_comm_abort(world.processes); /* peers must not wait */
    demo_free(&world);
    return result != XD_OK;
}

int main(int argc, char **argv) {
    demo_options options;
    int status = 0, ranks = 0, rank = 0;
#if defined(DEMO_MPI)
    MPI_Init(&argc, &argv);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
#endif
    const bool understood = demo_parse(argc, argv, ranks, &options);
    if (understood && options.help && rank == 0) demo_print_help();
    if (understood && !options.help) status = demo_main(&options);
    if (!understood && rank == 0)
        fprintf(stderr, "demo: %s\nbuild/demo --help lists the options\n", options.problem);
    if (!understood) status = 2;
#if defined(DEMO_MPI)
    MPI_Finalize();
#endif
    return status;
}
