/* real_figure.c - a picture of the students that were kept, and what each writes by itself. */
#include "real.h"

#include "../common/plot.h"

#include <stdio.h>
#include <string.h>

/* A curve.json as it is read back. */
typedef struct real_kept {
    char name[64];
    char sample[SAMPLE_BYTES];
    float *losses;
    double *heldout;
    int *heldout_at;
    int steps, points;
    int vocabulary; /* 0 -> not told */
    double end;
} real_kept;

static void real_copy_string(const xd_json *value, char *out, size_t room) {
    size_t bytes = 0;
    const char *text = xd_json_string(value, &bytes);
    if (!text) bytes = 0;
    if (bytes > room - 1) bytes = room - 1;
    if (bytes) memcpy(out, text, bytes);
    out[bytes] = 0;
}

/* Numbers of three arrays; false when one is none. */
static bool real_read_numbers(const xd_json *root, real_kept *out) {
    const xd_json *losses = xd_json_first(xd_json_find(root, "losses"));
    const xd_json *heldout = xd_json_first(xd_json_find(root, "heldout"));
    const xd_json *at = xd_json_first(xd_json_find(root, "heldout_at"));
    for (int i = 0; i < out->steps; i++, losses = xd_json_next(losses)) {
        double value = 0.0;
        if (!xd_json_double(losses, &value)) return false;
        out->losses[i] = (float)value;
    }
    for (int i = 0; i < out->points; i++, heldout = xd_json_next(heldout), at = xd_json_next(at)) {
        int64_t step = 0;
        if (!xd_json_double(heldout, &out->heldout[i]) || !xd_json_int64(at, &step)) return false;
        out->heldout_at[i] = (int)step;
    }
    return xd_json_double(xd_json_find(root, "bits_per_byte"), &out->end);
}

static xd_result real_read_root(xd_ctx *ctx, const xd_json *root, const char *path, real_kept *out) {
    const xd_json *points = xd_json_find(root, "heldout");
    int64_t vocabulary = 0;
    bool failed = false;
    (void)xd_json_int64(xd_json_find(root, "vocabulary"), &vocabulary);
    out->vocabulary = (int)vocabulary;
    real_copy_string(xd_json_find(root, "name"), out->name, sizeof out->name);
    real_copy_string(xd_json_find(root, "sample"), out->sample, sizeof out->sample);
    out->steps = (int)xd_json_count(xd_json_find(root, "losses"));
    out->points = (int)xd_json_count(points);
    out->losses = (float *)real_room(ctx, out->steps, sizeof *out->losses, &failed);
    out->heldout = (double *)real_room(ctx, out->points, sizeof *out->heldout, &failed);
    out->heldout_at = (int *)real_room(ctx, out->points, sizeof *out->heldout_at, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %s", path);
    XD_REQUIRE(ctx, (int)xd_json_count(xd_json_find(root, "heldout_at")) == out->points && out->points > 0,
               XD_ERROR_FORMAT, "%s has %d held-out values and not as many steps", path, out->points);
    XD_REQUIRE(ctx, real_read_numbers(root, out), XD_ERROR_FORMAT, "%s has something else than numbers",
               path);
    return XD_OK;
}

static xd_result real_read_kept(xd_ctx *ctx, const char *directory, real_kept *out) {
    char path[512];
    xd_json *root = NULL;
    snprintf(path, sizeof path, "%s/curve.json", directory);
    XD_TRY(xd_json_load(ctx, NULL, path, &root));
    const xd_result result = real_read_root(ctx, root, path, out);
    xd_json_destroy(ctx, root);
    return result;
}

/* Adds a run to the series of its name; seeds of a student have the same. */
static void real_add_run(const real_kept *kept, plot_series *series, int *count) {
    plot_series *s = series;
    for (; s < series + *count; s++)
        if (strcmp(s->name, kept->name) == 0 && s->runs[0].steps == kept->steps &&
            s->runs[0].points == kept->points)
            break;
    if (s == series + *count) {
        memset(s, 0, sizeof *s);
        s->name = kept->name;
        ++*count;
    }
    if (s->run_count == PLOT_MOST_RUNS) return;
    plot_run *run = &s->runs[s->run_count++];
    run->losses = kept->losses;
    run->steps = kept->steps;
    run->heldout = kept->heldout;
    run->heldout_at = kept->heldout_at;
    run->points = kept->points;
    run->end = kept->end;
}

/* With the size of the students' vocabulary, where they have the same. */
static void real_title(const real_kept *kept, int count, char out[96]) {
    int entries = 0;
    for (int i = 0; i < count; i++) {
        if (kept[i].steps == 0) continue;
        if (entries == 0) entries = kept[i].vocabulary;
        if (kept[i].vocabulary != entries) entries = -1;
    }
    if (entries > 0)
        snprintf(out, 96, "Students of %d entries, alone and from SmolLM2-135M", entries);
    else
        snprintf(out, 96, "Students alone and from SmolLM2-135M");
}

static xd_result real_draw(xd_ctx *ctx, const char *path, const real_kept *kept, int count) {
    plot_series series[PLOT_MOST_SERIES];
    plot_figure figure;
    char title[96];
    memset(&figure, 0, sizeof figure);
    real_title(kept, count, title);
    for (int i = 0; i < count; i++) {
        if (kept[i].steps == 0) figure.teacher = kept[i].end;
        if (kept[i].steps > 0 && figure.series_count < PLOT_MOST_SERIES)
            real_add_run(&kept[i], series, &figure.series_count);
    }
    figure.title = title;
    figure.series = series;
    figure.notes[0] =
        "Left: every step faint; bold a mean over seeds and the steps around, weighted by a Gaussian of a "
        "sixtieth of all steps, 2 at least.";
    figure.notes[1] =
        "Right: a sample spread evenly over the held-out text; dots are seeds, lines their mean. The "
        "legend: all of it, but for the teacher.";
    return plot_save(ctx, &figure, path);
}

xd_result real_figure(xd_ctx *ctx, const real_options *o) {
    const int count = o->paths - 1;
    bool failed = false;
    real_kept *kept = (real_kept *)real_room(ctx, count, sizeof *kept, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %d curves", count);
    xd_result result = XD_OK;
    for (int i = 0; i < count && result == XD_OK; i++) result = real_read_kept(ctx, o->path[i + 1], &kept[i]);
    if (result == XD_OK) result = real_draw(ctx, o->path[0], kept, count);
    for (int i = 0; i < count; i++) {
        if (result == XD_OK) sample_print(kept[i].name, kept[i].sample);
        xd_release(ctx, kept[i].losses);
        xd_release(ctx, kept[i].heldout);
        xd_release(ctx, kept[i].heldout_at);
    }
    xd_release(ctx, kept);
    return result;
}
