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

#include "../common/folder_lock.h"
#include "../common/model_directory.h"

#include <stdio.h>
#include <string.h>

/* Everything main owns. */
typedef struct demo_world {
    xd_ctx *ctx;
    xd_comm *processes; /* NULL -> ranks are threads of this one */
    demo_lesson lesson; /* its model is the teacher, or the one that is measured */
    demo_record record;
    float *losses;
    nn_config config;
    demo_result results[DEMO_MOST_SEEDS * DEMO_MOST_ARMS], teacher_result;
    char teacher_directory[480], student_directory[480], resume_directory[480];
    folder_lock *lock;
    demo_report *report;
} demo_world;

/* True in the one process that writes files and speaks. */
static bool demo_speaks(const demo_world *w) {
    return !w->processes || xd_comm_rank(w->processes) == 0;
}

/* ---- texts and models ---- */

/* The teacher that --train-teacher trains, or the model that --eval measures: one tokenizer, no student. */
static xd_result demo_load_one(demo_world *w, const demo_options *o) {
    demo_lesson *l = &w->lesson;
    demo_reader *reader = o->eval ? &l->teacher : &l->student;
    const char *directory = o->eval ? o->eval : w->teacher_directory;
    XD_TRY(demo_reader_open(w->ctx, directory, o->teacher_text, l->data.heldout, o->heldout_bytes, reader));
    return o->eval ? model_directory_load(w->ctx, o->eval, &l->model, &l->model_weights) : XD_OK;
}

/* What a larger teacher said, when one of the arms learns from it. */
static xd_result demo_load_record(demo_world *w, const demo_job *job) {
    bool wanted = false;
    for (int i = 0; i < job->arm_count; i++) wanted = wanted || job->arms[i].signal == DEMO_RECORDED;
    if (!wanted) return XD_OK;
    XD_REQUIRE(w->ctx, w->lesson.data.cache[0], XD_ERROR_MISSING,
               "the arms smollm2 and smollm2-fifth need a teacher.xdcache in the folder of data");
    return demo_record_open(w->ctx, w->lesson.data.cache, w->lesson.student.tokenizer,
                            &w->lesson.student.text, &w->record);
}

/* Fills in the arms, which say what is needed. */
static xd_result demo_load(demo_world *w, const demo_options *o, demo_job *job) {
    snprintf(w->teacher_directory, sizeof w->teacher_directory, "%s/teacher", o->data);
    XD_TRY(demo_data_find(w->ctx, o->data, !o->eval && !o->teacher_text, &w->lesson.data));
    if (!o->eval) XD_TRY(demo_fill_arms(w->ctx, o, w->lesson.data.cache[0] != 0, job));
    if (o->eval || o->teacher_text) return demo_load_one(w, o);
    XD_TRY(demo_lesson_load(w->ctx, o->heldout_bytes, &w->lesson));
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
    XD_TRY(folder_lock_take(w->ctx, o->out, "; --resume goes on from where it was saved with --save-every",
                            &w->lock));
    XD_TRY(demo_check_output(w, o));
    XD_TRY(demo_report_open(w->ctx, o->out, o->resume, &w->report));
    if (o->save_every && files->make_directory(files->user, w->resume_directory) != 0)
        return XD_FAIL(w->ctx, XD_ERROR_IO, "cannot make the directory %s", w->resume_directory);
    return XD_OK;
}

/* What training and measuring have in common. */
static void demo_fill_job(demo_world *w, const demo_options *o, demo_job *job) {
    demo_lesson_tell(&w->lesson, job);
    job->dp = o->axes.dp;
    job->cp = o->axes.cp;
    job->tp = o->axes.tp;
    job->reduction = o->reduction;
    job->ranks_are = w->processes ? "processes" : "threads";
    job->seed = o->seed;
    if (!o->teacher_text) job->teacher_result = &w->teacher_result;
    if (w->record.cache) job->record = &w->record;
}

static xd_result demo_fill_training(demo_world *w, const demo_options *o, demo_job *job) {
    const bool training_teacher = o->teacher_text != NULL;
    w->config = demo_config(xd_tokenizer_describe(w->lesson.student.tokenizer).size, training_teacher);
    job->config = &w->config;
    job->steps = o->steps;
    job->seeds = o->seeds;
    job->results = w->results;
    job->report = w->report;
    job->save_directory = training_teacher ? w->teacher_directory : w->student_directory;
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
        job->config = &w->lesson.model.config;
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
           (long long)w->lesson.student.text.count, (long long)w->lesson.student.heldout.count, o->ranks,
           o->ranks > 1 ? "s" : "", o->axes.dp, o->axes.cp, o->axes.tp);
    if (!o->teacher_text)
        printf("the teacher reads %lld tokens; %lld chunks, %lld of %d entries in both vocabularies\n",
               (long long)w->lesson.teacher.text.count, (long long)w->lesson.bridge.alignment.count,
               (long long)w->lesson.bridge.strict.pairs, w->config.vocab);
    if (!o->teacher_text)
        printf("text %s, held out %s, the teacher is %s\n", w->lesson.data.text, w->lesson.data.heldout,
               w->lesson.data.teacher);
    if (!o->teacher_text && !o->arms && !w->lesson.data.cache[0])
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
           (long long)w->lesson.model.float_count, w->teacher_result.bits_per_byte,
           (long long)w->lesson.teacher.heldout.count, w->teacher_result.sample);
    return XD_OK;
}

static xd_result demo_print_ids(demo_world *w, const demo_options *o) {
    char directory[480];
    snprintf(directory, sizeof directory, "%s/student", o->data);
    demo_reader *reader = &w->lesson.student;
    XD_TRY(demo_reader_open_tokenizer(w->ctx, o->eval ? o->eval : directory, reader));
    XD_TRY(demo_text_load(w->ctx, reader->tokenizer, o->encode, 0, &reader->text));
    for (int64_t i = 0; i < reader->text.count && demo_speaks(w); i++)
        printf("%d\n", (int)reader->text.ids[i]);
    return XD_OK;
}

static void demo_free(demo_world *w) {
    xd_release(w->ctx, w->losses);
    demo_record_close(w->ctx, &w->record);
    demo_lesson_free(w->ctx, &w->lesson);
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
    folder_lock_release(world.ctx, world.lock);
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
