/* images_report.c - the table and the picture. */
#include "images.h"

#include "grid.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static double images_mean(const images_options *o, const images_row *row) {
    double sum = 0.0;
    for (int i = 0; i < o->generations; i++) sum += row->distance[i] / o->generations;
    return sum;
}

static double images_spread(const images_options *o, const images_row *row) {
    const double mean = images_mean(o, row);
    double most = 0.0;
    for (int i = 0; i < o->generations; i++) most = fmax(most, fabs(row->distance[i] - mean));
    return most;
}

/* ---- the table ---- */

/* A line on standard output and in the file. */
static void images_line(FILE *file, const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    printf("%s\n", line);
    fprintf(file, "%s\n", line);
}

static void images_print_ratios(FILE *file, const images_options *o, const images_row *rows) {
    static const struct {
        int of, to;
        const char *what;
    } ratios[] = {
        { IMAGES_STUDENT_4, IMAGES_TEACHER_4, "student at 4 of the teacher at 4" },
        { IMAGES_STUDENT_4, IMAGES_TEACHER_50, "student at 4 of the teacher at 50" },
        { IMAGES_STUDENT_4, IMAGES_TEACHER_8, "student at 4 of the teacher at 8" },
        { IMAGES_STUDENT_4, IMAGES_WARMED, "student at 4 of its warm-up alone" },
        { IMAGES_STUDENT_1, IMAGES_TEACHER_4, "student at 1 of the teacher at 4" },
        { IMAGES_STUDENT_1, IMAGES_TEACHER_1, "student at 1 of the teacher at 1" },
    };
    for (size_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++)
        images_line(file, "%-36s %.2f", ratios[i].what,
                    images_mean(o, &rows[ratios[i].of]) / images_mean(o, &rows[ratios[i].to]));
}

static xd_result images_print_table(xd_ctx *ctx, const images_options *o, const images_row *rows, int count) {
    char path[480];
    snprintf(path, sizeof path, "%s/table.txt", o->out);
    FILE *file = fopen(path, "wb");
    XD_REQUIRE(ctx, file, XD_ERROR_IO, "cannot write %s", path);
    images_line(file, "Frechet distance to 10,000 test images; %d generated, %d generations", o->count,
                o->generations);
    if (o->gan > 0.0)
        images_line(file, "with GAN: weight %g, R1 %g, real pictures of %s", o->gan, o->gan_r1, o->real);
    for (int i = 0; i < count; i++)
        images_line(file, "%-20s %6.3f +- %.3f   right class %4.1f %%%s", rows[i].title,
                    images_mean(o, &rows[i]), images_spread(o, &rows[i]), 100.0 * rows[i].accuracy,
                    rows[i].known ? "  (measured before)" : "");
    images_print_ratios(file, o, rows);
    const bool failed = ferror(file) != 0;
    XD_REQUIRE(ctx, fclose(file) == 0 && !failed, XD_ERROR_IO, "cannot write %s", path);
    return XD_OK;
}

/* ---- the picture ---- */

/* Test pictures in the order of the columns' classes: the first and the second of each. */
static xd_result images_real(xd_ctx *ctx, const images_options *o, float *out) {
    dataset set;
    int seen[IMAGE_CLASSES] = { 0 };
    memset(&set, 0, sizeof set);
    XD_TRY(dataset_load(ctx, o->data, "sample", &set));
    for (int64_t i = 0; i < set.count; i++) {
        const int column = set.labels[i] + IMAGE_CLASSES * seen[set.labels[i]]++;
        if (column < IMAGES_COLUMNS)
            memcpy(out + column * IMAGE_PIXELS, set.images + i * IMAGE_PIXELS, IMAGE_PIXELS * sizeof *out);
    }
    dataset_free(ctx, &set);
    return XD_OK;
}

static xd_result images_save_grid(xd_ctx *ctx, const images_options *o, const images_row *rows) {
    float real[IMAGES_COLUMNS * IMAGE_PIXELS] = { 0 };
    const float *const shown[] = { real, rows[IMAGES_TEACHER_50].shown, rows[IMAGES_TEACHER_4].shown,
                                   rows[IMAGES_STUDENT_4].shown, rows[IMAGES_STUDENT_1].shown };
    static const char *const labels[] = { "real", "teacher, 50", "teacher, 4", "student, 4", "student, 1" };
    char path[480];
    snprintf(path, sizeof path, "%s/grid.png", o->out);
    XD_TRY(images_real(ctx, o, real));
    XD_TRY(grid_save(ctx, path, shown, labels, 5, IMAGES_COLUMNS));
    images_say("%s: real pictures, and those of teacher and students with their steps", path);
    return XD_OK;
}

xd_result images_report(xd_ctx *ctx, const images_options *options, const images_row *rows, int count) {
    XD_TRY(images_print_table(ctx, options, rows, count));
    if (options->teacher_50) XD_TRY(images_remember(ctx, options, &rows[IMAGES_TEACHER_50]));
    return images_save_grid(ctx, options, rows);
}
