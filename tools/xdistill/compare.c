/* compare.c - `xdistill compare`: a table, a picture and samples of what several runs of distil left. */
#include "../../examples/common/plot.h"
#include "../../examples/common/sample.h"
#include "command.h"
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* An arm of a run, out of its result.json. */
typedef struct compare_arm {
    char name[64]; /* of the run, without its seed */
    char sample[SAMPLE_BYTES];
    float *losses;
    double *heldout;
    int *heldout_at;
    int steps, points;
    double best, last, seconds, peak_mib;
} compare_arm;

enum { COMPARE_MOST_RUNS = 64, COMPARE_MOST_ARMS = 2 * COMPARE_MOST_RUNS };

typedef struct compare_runs {
    compare_arm *arms; /* [COMPARE_MOST_ARMS] */
    int count;
    char teacher_name[64]; /* of the first run */
    double teacher;
    int64_t bytes;      /* of the report's text */
    int64_t vocabulary; /* 0 -> students have different ones */
} compare_runs;

/* ---- reading ---- */

static void compare_string(const xd_json *root, const char *key, char *out, size_t room) {
    size_t bytes = 0;
    const char *text = xd_json_string(xd_json_find(root, key), &bytes);
    if (!text) bytes = 0;
    if (bytes > room - 1) bytes = room - 1;
    if (bytes) memcpy(out, text, bytes);
    out[bytes] = 0;
}

static bool compare_double(const xd_json *root, const char *key, double *out) {
    return xd_json_double(xd_json_find(root, key), out);
}

/* False when something is no number. */
static bool compare_numbers(const xd_json *root, compare_arm *out) {
    const xd_json *loss = xd_json_first(xd_json_find(root, "losses"));
    const xd_json *point = xd_json_first(xd_json_find(root, "held_out"));
    for (int i = 0; i < out->steps; i++, loss = xd_json_next(loss)) {
        double value = 0.0;
        if (!xd_json_double(loss, &value)) return false;
        out->losses[i] = (float)value;
    }
    for (int i = 0; i < out->points; i++, point = xd_json_next(point)) {
        int64_t step = 0;
        if (!compare_double(point, "bits_per_byte", &out->heldout[i]) ||
            !xd_json_int64(xd_json_find(point, "step"), &step))
            return false;
        out->heldout_at[i] = (int)step;
    }
    return compare_double(root, "best", &out->best) && compare_double(root, "last", &out->last) &&
           compare_double(root, "seconds", &out->seconds);
}

static xd_result compare_read_arm(xd_ctx *ctx, const xd_json *root, const char *path, compare_arm *out) {
    bool failed = false;
    compare_string(root, "sample", out->sample, sizeof out->sample);
    out->steps = (int)xd_json_count(xd_json_find(root, "losses"));
    out->points = (int)xd_json_count(xd_json_find(root, "held_out"));
    out->losses = (float *)ranks_room(ctx, out->steps, sizeof *out->losses, &failed);
    out->heldout = (double *)ranks_room(ctx, out->points, sizeof *out->heldout, &failed);
    out->heldout_at = (int *)ranks_room(ctx, out->points, sizeof *out->heldout_at, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %s", path);
    XD_REQUIRE(ctx, out->steps > 0 && out->points > 0 && compare_numbers(root, out), XD_ERROR_FORMAT,
               "%s lacks the curves of a student", path);
    return XD_OK;
}

/* The folder's name without its seed: "cached-1" and "cached-2" are seeds of one student. */
static void compare_name(const char *directory, int64_t seed, const char *arm, char out[64]) {
    char end[32];
    size_t last = strlen(directory), first;
    const size_t behind = (size_t)snprintf(end, sizeof end, "-%lld", (long long)seed);
    while (last > 1 && directory[last - 1] == '/') last--;
    for (first = last; first > 0 && directory[first - 1] != '/';) first--;
    if (last - first > behind && strncmp(directory + last - behind, end, behind) == 0) last -= behind;
    snprintf(out, 64, "%.*s%s", (int)(last - first < 40 ? last - first : 40), directory + first, arm);
}

static xd_result compare_read_root(xd_ctx *ctx, const xd_json *root, const char *directory,
                                   compare_runs *runs) {
    static const char *const keys[] = { "student", "text_alone" };
    static const char *const names[] = { "", ", text alone" };
    int64_t vocabulary = 0, seed = 0, bytes = 0;
    double teacher = 0.0;
    const bool first = runs->count == 0;
    (void)xd_json_int64(xd_json_find(root, "seed"), &seed);
    (void)xd_json_int64(xd_json_find(root, "vocabulary"), &vocabulary);
    if (first) compare_string(root, "teacher_name", runs->teacher_name, sizeof runs->teacher_name);
    (void)compare_double(root, "teacher", &teacher);
    (void)xd_json_int64(xd_json_find(root, "report_bytes"), &bytes);
    if (first) runs->teacher = teacher;
    if (first) runs->bytes = bytes;
    XD_REQUIRE(
        ctx, bytes == runs->bytes && fabs(teacher - runs->teacher) < 1e-6, XD_ERROR_MISMATCH,
        "%s reports on %lld bytes, for which its teacher needs %.4f bits each; the first run on %lld, for "
        "%.4f: only runs with one teacher and text compare",
        directory, (long long)bytes, teacher, (long long)runs->bytes, runs->teacher);
    runs->vocabulary = first || vocabulary == runs->vocabulary ? vocabulary : 0;
    for (int i = 0; i < 2; i++) {
        const xd_json *arm = xd_json_find(root, keys[i]);
        compare_arm *out = &runs->arms[runs->count];
        if (!arm) continue;
        compare_name(directory, seed, names[i], out->name);
        (void)compare_double(root, "peak_mib", &out->peak_mib);
        runs->count++;
        XD_TRY(compare_read_arm(ctx, arm, directory, out));
    }
    return XD_OK;
}

static xd_result compare_read(xd_ctx *ctx, const char *directory, compare_runs *runs) {
    char path[512];
    xd_json *root = NULL;
    XD_REQUIRE(ctx, strlen(directory) <= OPTIONS_MOST_PATH, XD_ERROR_ARGUMENT,
               "a path of %zu bytes, %d are allowed", strlen(directory), (int)OPTIONS_MOST_PATH);
    snprintf(path, sizeof path, "%s/result.json", directory);
    const xd_result loaded = xd_json_load(ctx, NULL, path, &root);
    XD_REQUIRE(ctx, loaded != XD_ERROR_IO, loaded, "%s is no finished run: it has no result.json", directory);
    XD_TRY(loaded);
    const xd_result result = compare_read_root(ctx, root, directory, runs);
    xd_json_destroy(ctx, root);
    return result;
}

/* ---- telling ---- */

static bool compare_same(const compare_arm *a, const compare_arm *b) {
    return strcmp(a->name, b->name) == 0 && a->steps == b->steps && a->points == b->points;
}

/* True for the first of the seeds of a student. */
static bool compare_leads(const compare_runs *runs, int arm) {
    for (int i = 0; i < arm; i++)
        if (compare_same(&runs->arms[i], &runs->arms[arm])) return false;
    return true;
}

static void compare_print_row(const compare_runs *runs, const compare_arm *arm) {
    double best = 0.0, last = 0.0, seconds = 0.0, peak = 0.0, low = INFINITY, high = -INFINITY;
    char spread[16] = "-";
    int seeds = 0;
    for (int i = 0; i < runs->count; i++) {
        const compare_arm *a = &runs->arms[i];
        if (!compare_same(a, arm)) continue;
        best += a->best;
        last += a->last;
        seconds += a->seconds;
        peak = fmax(peak, a->peak_mib);
        low = fmin(low, a->best);
        high = fmax(high, a->best);
        seeds++;
    }
    if (seeds > 1) snprintf(spread, sizeof spread, "%.4f", high - low);
    printf("%-28s %6d %5d %8.4f %8s %8.4f %7.0f %5.0f\n", arm->name, arm->steps, seeds, best / seeds, spread,
           last / seeds, seconds / seeds, peak);
}

static void compare_print(const compare_runs *runs) {
    printf("%-28s %6s %5s %8s %8s %8s %7s %5s\n", "bits per byte", "steps", "seeds", "best", "spread", "last",
           "seconds", "MiB");
    printf("%-28s %6s %5s %8.4f\n", "teacher", "", "", runs->teacher);
    for (int i = 0; i < runs->count; i++)
        if (compare_leads(runs, i)) compare_print_row(runs, &runs->arms[i]);
    for (int i = 0; i < runs->count; i++)
        if (compare_leads(runs, i)) sample_print(runs->arms[i].name, runs->arms[i].sample);
}

/* All seeds of a student; false if they are too many. */
static bool compare_add(const compare_runs *runs, const compare_arm *arm, plot_series *series) {
    memset(series, 0, sizeof *series);
    series->name = arm->name;
    for (int i = 0; i < runs->count; i++) {
        const compare_arm *a = &runs->arms[i];
        if (!compare_same(a, arm)) continue;
        if (series->run_count == PLOT_MOST_RUNS) return false;
        series->runs[series->run_count++] =
            (plot_run){ a->losses, a->steps, a->heldout, a->heldout_at, a->points, a->best };
    }
    return true;
}

static xd_result compare_draw(xd_ctx *ctx, const char *path, const compare_runs *runs) {
    plot_series series[PLOT_MOST_SERIES];
    plot_figure figure;
    char title[160];
    memset(&figure, 0, sizeof figure);
    for (int i = 0; i < runs->count; i++) {
        if (!compare_leads(runs, i)) continue;
        XD_REQUIRE(ctx, figure.series_count < PLOT_MOST_SERIES, XD_ERROR_ARGUMENT,
                   "more than %d students: a picture holds no more", (int)PLOT_MOST_SERIES);
        XD_REQUIRE(ctx, compare_add(runs, &runs->arms[i], &series[figure.series_count++]), XD_ERROR_ARGUMENT,
                   "%s has more than %d seeds: a picture holds no more", runs->arms[i].name,
                   (int)PLOT_MOST_RUNS);
    }
    if (runs->vocabulary)
        snprintf(title, sizeof title, "Students of %lld entries from %s", (long long)runs->vocabulary,
                 runs->teacher_name);
    else
        snprintf(title, sizeof title, "Students from %s", runs->teacher_name);
    figure.title = title;
    figure.series = series;
    figure.teacher = runs->teacher;
    figure.notes[0] =
        "Left: each step's loss, to the teacher or to the text; bold a mean over seeds and the steps around.";
    figure.notes[1] = "Right: the part of the text that chooses the best student; dots are seeds, lines "
                      "their mean. The legend: the report's "
                      "part.";
    return plot_save(ctx, &figure, path);
}

/* ---- the command ---- */

static xd_result compare_all(xd_ctx *ctx, int count, char **words, compare_runs *runs) {
    bool failed = false;
    runs->arms = (compare_arm *)ranks_room(ctx, COMPARE_MOST_ARMS, sizeof *runs->arms, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %d runs", count - 1);
    XD_REQUIRE(ctx, count - 1 <= COMPARE_MOST_RUNS, XD_ERROR_ARGUMENT, "%d runs, %d are allowed", count - 1,
               (int)COMPARE_MOST_RUNS);
    XD_TRY(command_check_output(ctx, words[0], "picture", "<svg"));
    for (int i = 1; i < count; i++) XD_TRY(compare_read(ctx, words[i], runs));
    XD_TRY(compare_draw(ctx, words[0], runs));
    compare_print(runs);
    return XD_OK;
}

int command_compare(xd_ctx *ctx, int count, char **words) {
    compare_runs runs;
    if (count < 2) return command_usage("compare");
    memset(&runs, 0, sizeof runs);
    const xd_result result = compare_all(ctx, count, words, &runs);
    for (int i = 0; i < runs.count; i++) {
        xd_release(ctx, runs.arms[i].losses);
        xd_release(ctx, runs.arms[i].heldout);
        xd_release(ctx, runs.arms[i].heldout_at);
    }
    xd_release(ctx, runs.arms);
    return command_end(ctx, "compare", result);
}
