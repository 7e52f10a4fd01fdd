/* images.c - distils a diffusion model of small pictures into students that need few steps, and compares what they draw.
 *
 *   make demo-images
 *   build/demo-images --mesh fsdp=2
 *   build/demo-images --mesh cp=2    two ranks share each picture
 *   build/demo-images --help          all options
 *
 * The teacher (data/images/teacher) turns noise into clothes in 50 steps of rectified flow, and has been trained on
 * Fashion-MNIST. Two students begin with its weights and learn to do the same in 4 steps and in 1, by distribution matching
 * (DMD2): a fake score, a copy of the teacher, follows what the student draws, and the difference of what both say of a noised
 * picture is the student's gradient. No picture of the training set is needed for that. With --gan there is a discriminator
 * as well, which tells real pictures from the student's by what the teacher makes of both inside, and the student's gradient
 * by it is added.
 *
 * Writes out/images/grid.png: rows real, teacher at 50 steps, at 4, student at 4, at 1, the same noise in each column; table.txt;
 * and a folder for each student with its model files, checkpoints and metrics.jsonl. Every eighth of a batch is a micro-batch, and
 * sums run in INVARIANT mode: any number of ranks, whole networks or parts, whole pictures or parts, gives the same bits.
 *
 * Compiled by mpicc with -DIMAGES_MPI it is the same program with the processes of an MPI job as ranks, and the same bits:
 * make demo-images ARGS=--mpi. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(IMAGES_MPI)
#    include "xdistill_mpi.h"
#endif

#include "images.h"

#include "images_teacher.h"

#include "../common/progress.h"

#include <stdio.h>
#include <string.h>

/* Everything main owns. */
typedef struct images_world {
    const images_options *options;
    dataset set;        /* with train_teacher */
    real_pictures real; /* with gan */
    images_recipe recipes[IMAGES_STUDENTS];
    images_row rows[IMAGES_ROWS];
} images_world;

/* ---- the teacher ---- */

typedef struct images_watch {
    progress line;
    int steps;
    double sum; /* of the last losses */
} images_watch;

static void images_tell_lesson(void *user, int step, double loss) {
    images_watch *watch = (images_watch *)user;
    char done[64], error[64], left[64], time[32];
    const double now = images_seconds();
    const char *const parts[] = { done, error, left };
    watch->sum += (loss - watch->sum) * (step < 50 ? 1.0 / step : 0.02);
    snprintf(done, sizeof done, "step %d of %d", step, watch->steps);
    snprintf(error, sizeof error, "squared error %.4f", watch->sum);
    snprintf(left, sizeof left, "%s left", progress_time(time, now / step * (watch->steps - step)));
    progress_show(&watch->line, now, parts, 3, step == watch->steps);
}

static xd_result images_teach(xd_comm *world, void *argument) {
    const images_world *w = (const images_world *)argument;
    const images_options *o = w->options;
    images_ranks ranks;
    const images_shape shape = { &ranks, IMAGES_TEACHER_MICRO_BATCHES,
                                 IMAGES_TEACHER_BATCH / IMAGES_TEACHER_MICRO_BATCHES, 1 };
    const images_lesson lesson = { &w->set, o->teacher_steps, o->seed };
    images_watch watch = { progress_begin(), o->teacher_steps, 0.0 };
    images_role teacher;
    memset(&teacher, 0, sizeof teacher);
    char directory[480];
    snprintf(directory, sizeof directory, "%s/teacher", o->data);
    xd_result result = images_ranks_open(world, &o->mesh, &ranks);
    if (result == XD_OK) result = images_role_open(&shape, o->seed, &teacher);
    if (result == XD_OK) result = images_teacher_train(&teacher, &lesson, images_tell_lesson, &watch);
    if (result == XD_OK) result = images_role_save(&teacher, directory);
    images_role_close(&teacher);
    images_ranks_close(&ranks);
    return result;
}

/* ---- the students ---- */

static void images_fill_rows(images_world *w) {
    static const struct {
        const char *title;
        int steps, student;
        const char *model;
    } table[IMAGES_ROWS] = {
        { "teacher, 50 steps", 50, -1, "" },
        { "teacher, 8", 8, -1, "" },
        { "teacher, 4", 4, -1, "" },
        { "teacher, 1", 1, -1, "" },
        { "warm-up alone, 4", 4, IMAGES_FOUR, "warm-up" },
        { "student, 4", 4, IMAGES_FOUR, "student-ema" },
        { "student, 1", 1, IMAGES_ONE, "student-ema" },
    };
    for (int i = 0; i < IMAGES_ROWS; i++) {
        images_row *row = &w->rows[i];
        const images_recipe *recipe = table[i].student < 0 ? NULL : &w->recipes[table[i].student];
        memset(row, 0, sizeof *row);
        row->title = table[i].title;
        row->steps = table[i].steps;
        row->list = recipe ? recipe->list : NULL;
        if (recipe)
            snprintf(row->directory, sizeof row->directory, "%s/%s/%s", w->options->out, recipe->name,
                     table[i].model);
        else
            snprintf(row->directory, sizeof row->directory, "%s/teacher", w->options->data);
    }
}

static xd_result images_work(xd_comm *world, void *argument) {
    images_world *w = (images_world *)argument;
    images_row *rows = w->rows;
    for (int i = 0; i < IMAGES_STUDENTS; i++) XD_TRY(images_distil(world, w->options, &w->recipes[i]));
    XD_TRY(images_measure(world, w->options, rows, IMAGES_ROWS));
    xd_result told = XD_OK;
    if (xd_comm_rank(world) == 0) told = images_report(xd_comm_ctx(world), w->options, rows, IMAGES_ROWS);
    return xd_agree(world, told);
}

/* ---- main ---- */

/* Runs the ranks: threads of this process, or the processes of an MPI job, of which this is one. */
static xd_result images_run_ranks(images_world *w, xd_ctx *ctx, const xd_ctx_desc *desc, xd_error *error) {
    xd_rank_function work = w->options->train_teacher ? images_teach : images_work;
#if defined(IMAGES_MPI)
    xd_comm *processes = NULL;
    (void)desc;
    xd_result result = xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, &processes);
    if (result == XD_OK) result = work(processes, w);
    if (result != XD_OK) *error = *xd_last_error(ctx);
    if (result != XD_OK && processes) xd_comm_abort(processes); /* peers must not wait */
    xd_comm_destroy(processes);
    return result;
#else
    (void)ctx;
    return xd_run_threads(w->options->ranks, desc, work, w, error);
#endif
}

/* Every rank that knows better than that another one failed says so. */
static void images_complain(xd_result result, const xd_error *error) {
    if (error->culprit >= 0 && error->rank >= 0 && error->culprit != error->rank) return;
    fprintf(stderr, "demo-images: rank %d: %s: %s\n", error->rank, xd_result_name(result), error->message);
}

static xd_result images_with(images_world *w, xd_ctx *ctx, const xd_ctx_desc *desc, xd_error *error) {
    const images_options *o = w->options;
    xd_result result = XD_OK;
    if (o->train_teacher) result = dataset_load(ctx, o->train_teacher, "train", &w->set);
    if (!o->train_teacher && o->gan > 0.0) {
        result = real_pictures_load(ctx, o->real, &w->real);
        for (int i = 0; i < IMAGES_STUDENTS; i++) w->recipes[i].real = &w->real;
    }
    if (result == XD_OK) result = images_recall(ctx, o, &w->rows[IMAGES_TEACHER_50]);
    if (result != XD_OK)
        *error = *xd_last_error(ctx);
    else
        result = images_run_ranks(w, ctx, desc, error);
    dataset_free(ctx, &w->set);
    real_pictures_free(ctx, &w->real);
    return result;
}

static int images_main(const images_options *o) {
    static images_world w;
    xd_ctx *ctx = NULL;
    xd_ctx_desc desc;
    xd_error error;
    memset(&desc, 0, sizeof desc);
    memset(&error, 0, sizeof error);
    desc.reduction = XD_REDUCTION_INVARIANT;
    w.options = o;
    images_recipes(o, w.recipes);
    images_fill_rows(&w);
    xd_result result = xd_ctx_create(&desc, &ctx);
    if (result == XD_OK) result = images_with(&w, ctx, &desc, &error);
    if (result != XD_OK) images_complain(result, &error);
    xd_ctx_destroy(ctx);
    return result != XD_OK;
}

int main(int argc, char **argv) {
    images_options options;
    int status = 2, processes = 0, rank = 0;
#if defined(IMAGES_MPI)
    MPI_Init(&argc, &argv);
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
#endif
    const bool understood = images_parse(argc, argv, processes, &options);
    if (understood && options.help && rank == 0) images_print_help();
    if (understood) status = options.help ? 0 : images_main(&options);
    if (!understood && rank == 0)
        fprintf(stderr, "demo-images: %s\nbuild/demo-images --help lists the options\n", options.problem);
#if defined(IMAGES_MPI)
    MPI_Finalize();
#endif
    return status;
}
