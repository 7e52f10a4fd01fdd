/* demo_figure.c - loss.svg, what plot.c draws of a run, the same curves for TensorBoard, and a page with all. */
#include "demo.h"

#include "../common/plot_page.h"

#include <stdio.h>
#include <string.h>

static plot_series demo_series_of(const demo_job *job, int arm, const int *at) {
    plot_series series;
    memset(&series, 0, sizeof series);
    series.name = job->arms[arm].name;
    series.run_count = job->seeds;
    for (int s = 0; s < job->seeds; s++) {
        const demo_result *result = &job->results[s * job->arm_count + arm];
        series.runs[s].losses = result->losses;
        series.runs[s].steps = job->steps;
        series.runs[s].heldout = result->heldout;
        series.runs[s].heldout_at = at;
        series.runs[s].points = demo_point_count(job->steps);
        series.runs[s].end = result->bits_per_byte;
    }
    return series;
}

/* Whether some students read less of the text than others. */
static bool demo_texts_differ(const demo_job *job) {
    for (int arm = 0; arm < job->arm_count; arm++)
        if (job->arms[arm].share != job->arms[0].share) return true;
    return false;
}

/* The page has what the students of the first seed wrote. */
static xd_result demo_write_page(xd_ctx *ctx, const demo_job *job, const plot_figure *figure,
                                 const char *directory) {
    const char *samples[DEMO_MOST_ARMS];
    char svg[512], path[512];
    snprintf(svg, sizeof svg, "%s/loss.svg", directory);
    snprintf(path, sizeof path, "%s/report.html", directory);
    for (int arm = 0; arm < job->arm_count; arm++) samples[arm] = job->results[arm].sample;
    const plot_page page = { figure->title, svg, samples,
                             job->teacher_result ? job->teacher_result->sample : NULL };
    return plot_save_page(ctx, figure, &page, path);
}

xd_result demo_write_figure(xd_ctx *ctx, const demo_job *job, const char *directory) {
    plot_series series[DEMO_MOST_ARMS];
    plot_figure figure;
    int at[DEMO_POINTS];
    char path[512], title[128], smooth[160];
    memset(&figure, 0, sizeof figure);
    for (int i = 0; i < demo_point_count(job->steps); i++) at[i] = demo_point_step(i, job->steps);
    for (int arm = 0; arm < job->arm_count; arm++) series[arm] = demo_series_of(job, arm, at);
    snprintf(title, sizeof title,
             "What a teacher is worth: %d student%s, %d steps of %d rows of %d tokens, %d seed%s",
             job->arm_count, job->arm_count > 1 ? "s" : "", job->steps, DEMO_BATCH, DEMO_ROW, job->seeds,
             job->seeds > 1 ? "s" : "");
    snprintf(
        smooth, sizeof smooth,
        "Left: every step faint; bold a mean over seeds and the steps around, weighted by a Gaussian of %.3g "
        "steps.",
        plot_smoothing(job->steps));
    figure.title = title;
    figure.notes[0] = smooth;
    figure.notes[1] =
        "Right: a sample spread evenly over the held-out text; dots are seeds, lines their mean. The "
        "legend and the teacher's line: all of it.";
    figure.texts_differ = demo_texts_differ(job);
    if (figure.texts_differ)
        figure.notes[2] =
            "On the left, students with less text compare with each other only: who reads a fifth of "
            "it meets every line five times as often.";
    figure.series = series;
    figure.series_count = job->arm_count;
    figure.teacher = job->teacher_result ? job->teacher_result->bits_per_byte : 0.0;
    snprintf(path, sizeof path, "%s/loss.svg", directory);
    XD_TRY(plot_save(ctx, &figure, path));
    XD_TRY(plot_save_events(ctx, &figure, directory));
    return demo_write_page(ctx, job, &figure, directory);
}
