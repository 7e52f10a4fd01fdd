/* toys.c - distribution-matching distillation of points in the plane, from nothing to a table in less than a minute.
 *
 *   make demo-toys
 *   build/demo-toys --toy moons --ranks 1
 *   build/demo-toys --help             all options
 *
 * For each toy, two moons and eight Gaussians on a circle, a teacher learns the flow from noise to points. Two students begin as
 * copies of it and learn without data, by xd_dmd_step, to generate in four steps and in one. All are measured on 10,000 points
 * by their sliced Wasserstein distance to fresh data; of the Gaussians also how much of the mass each mode has.
 *
 * Ranks are threads that share each batch. In INVARIANT mode table and figure have the same bytes for any number of them.
 *
 * Writes out/toys/table.txt, toys.svg, and for each toy curves-NAME.svg: what the student of four steps told while it learned. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "toys.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

const char *const toy_row_names[TOY_ROWS] = { "teacher, 50 steps", "teacher, 4 steps", "student, 4 steps",
                                              "student, 1 step" };

/* Everything main owns. */
typedef struct toy_world {
    xd_ctx *ctx;
    const toy_options *options;
    toy_run runs[TOY_KINDS];
    toy_figures figures[TOY_KINDS][TOY_ROWS];
    int count; /* toys */
    float *points;
    double *curves;
} toy_world;

/* ---- set-up ---- */

/* The folder, and those that it lies in. */
static xd_result toy_make_folder(xd_ctx *ctx, const char *directory) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    char part[512];
    for (size_t i = 1; i <= strlen(directory); i++) {
        if (directory[i] != '/' && directory[i] != 0) continue;
        snprintf(part, sizeof part, "%.*s", (int)i, directory);
        XD_REQUIRE(ctx, files->make_directory(files->user, part) == 0, XD_ERROR_IO,
                   "cannot make the directory %s", part);
    }
    return XD_OK;
}

static xd_result toy_set_up(toy_world *w) {
    const int64_t numbers = (int64_t)TOY_POINTS * TOY_ELEMENTS;
    XD_TRY(toy_make_folder(w->ctx, w->options->out));
    w->points = (float *)xd_allocate(w->ctx, (size_t)(TOY_KINDS * TOY_ROWS * numbers) * sizeof *w->points);
    if (!w->points) return XD_FAIL(w->ctx, XD_ERROR_MEMORY, "no room for %d points", TOY_POINTS);
    const size_t told = (size_t)w->options->steps;
    w->curves = (double *)xd_allocate(w->ctx, 2 * TOY_KINDS * told * sizeof *w->curves);
    if (!w->curves) return XD_FAIL(w->ctx, XD_ERROR_MEMORY, "no room for %zu turns", told);
    memset(w->curves, 0, 2 * TOY_KINDS * told * sizeof *w->curves);
    for (int kind = 0; kind < TOY_KINDS; kind++) {
        if (w->options->toy != TOY_KINDS && w->options->toy != kind) continue;
        toy_run *run = &w->runs[w->count];
        run->options = w->options;
        run->kind = (toy_kind)kind;
        for (int row = 0; row < TOY_ROWS; row++)
            run->points[row] = w->points + (w->count * TOY_ROWS + row) * numbers;
        run->curve.fake_score = w->curves + 2 * (size_t)w->count * told;
        run->curve.distance = run->curve.fake_score + told;
        w->count++;
    }
    return XD_OK;
}

/* ---- what comes out ---- */

static void toy_print_row(FILE *out, const toy_world *w, int toy, int row) {
    const toy_figures *f = &w->figures[toy][row];
    fprintf(out, "%-10s %-18s %9.4f %9.2f", toy_names[w->runs[toy].kind], toy_row_names[row], f->distance,
            f->distance / w->figures[toy][TOY_TEACHER_4].distance);
    if (w->runs[toy].kind == TOY_GAUSSIANS) fprintf(out, " %9.4f %9.4f", f->least_mode, f->within);
    putc('\n', out);
}

static void toy_print_table(FILE *out, const toy_world *w) {
    fprintf(out, "seed %llu, %d steps of the teacher, %d of each student\n\n",
            (unsigned long long)w->options->seed, w->options->teacher_steps, w->options->steps);
    fprintf(out, "%-10s %-18s %9s %9s %9s %9s\n", "", "", "sliced W2", "ratio to", "least of", "within");
    fprintf(out, "%-10s %-18s %9s %9s %9s %9s\n", "toy", "sampler", "to data", "T at 4", "8 modes",
            "3 sigma");
    for (int toy = 0; toy < w->count; toy++)
        for (int row = 0; row < TOY_ROWS; row++) toy_print_row(out, w, toy, row);
}

static xd_result toy_write(const toy_world *w) {
    char path[512];
    snprintf(path, sizeof path, "%s/table.txt", w->options->out);
    FILE *table = fopen(path, "wb");
    if (table) toy_print_table(table, w);
    const bool failed = !table || ferror(table) != 0;
    if ((table && fclose(table) != 0) || failed)
        return XD_FAIL(w->ctx, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
    for (int toy = 0; toy < w->count; toy++) {
        snprintf(path, sizeof path, "%s/curves-%s.svg", w->options->out, toy_names[w->runs[toy].kind]);
        XD_TRY(toy_curves_save(w->ctx, &w->runs[toy], w->figures[toy], path));
    }
    snprintf(path, sizeof path, "%s/toys.svg", w->options->out);
    return toy_figure_save(w->ctx, w->runs, w->count, path);
}

/* ---- the way ---- */

static xd_result toy_work(toy_world *w) {
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    const toy_options *o = w->options;
    xd_error error = { 0 };
    XD_TRY(toy_set_up(w));
    for (int toy = 0; toy < w->count; toy++) {
        const xd_result result = xd_run_threads(o->ranks, &invariant, toy_run_rank, &w->runs[toy], &error);
        if (result != XD_OK) return XD_FAIL(w->ctx, result, "rank %d: %s", error.rank, error.message);
        for (int row = 0; row < TOY_ROWS; row++)
            XD_TRY(toy_measure(w->ctx, w->runs[toy].kind, o->seed, w->runs[toy].points[row],
                               &w->figures[toy][row]));
    }
    XD_TRY(toy_write(w));
    toy_print_table(stdout, w);
    printf("\n%.0f seconds of processors with %d rank%s; the figure is %s/toys.svg\n",
           (double)clock() / CLOCKS_PER_SEC, o->ranks, o->ranks > 1 ? "s" : "", o->out);
    return XD_OK;
}

int main(int argc, char **argv) {
    toy_options options;
    toy_world world;
    memset(&world, 0, sizeof world);
    if (!toy_parse(argc, argv, &options)) {
        fprintf(stderr, "demo-toys: %s\nbuild/demo-toys --help lists the options\n", options.problem);
        return 2;
    }
    if (options.help) {
        toy_print_help();
        return 0;
    }
    world.options = &options;
    if (xd_ctx_create(NULL, &world.ctx) != XD_OK) return 1;
    const xd_result result = toy_work(&world);
    if (result != XD_OK)
        fprintf(stderr, "demo-toys: %s: %s\n", xd_result_name(result), xd_last_error(world.ctx)->message);
    xd_release(world.ctx, world.curves);
    xd_release(world.ctx, world.points);
    xd_ctx_destroy(world.ctx);
    return result != XD_OK;
}
