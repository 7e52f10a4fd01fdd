/* demo_report.c - what the demonstration tells: metrics.jsonl, a progress line, and where everything is. */
#define _POSIX_C_SOURCE 200112L /* ftruncate, fileno */
#include "demo.h"

#include "../common/progress.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct demo_report {
    FILE *metrics;
    char path[512]; /* of metrics */
    bool stale;     /* lines of an interrupted run may follow */
    progress progress;
};

/* What the system says about the call that has just failed. */
static xd_result demo_report_failed(xd_ctx *ctx, const char *path) {
    return XD_FAIL(ctx, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
}

xd_result demo_report_open(xd_ctx *ctx, const char *directory, bool resume, demo_report **out) {
    demo_report *report = (demo_report *)xd_allocate(ctx, sizeof *report);
    if (!report) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a report");
    snprintf(report->path, sizeof report->path, "%s/metrics.jsonl", directory);
    report->metrics = resume ? fopen(report->path, "r+b") : NULL;
    report->stale = report->metrics != NULL;
    if (!report->metrics) report->metrics = fopen(report->path, "wb");
    report->progress = progress_begin();
    if (!report->metrics) {
        const xd_result result = demo_report_failed(ctx, report->path);
        xd_release(ctx, report);
        return result;
    }
    (void)setvbuf(report->metrics, NULL, _IOLBF, BUFSIZ); /* a line is there once its step is done */
    *out = report;
    return XD_OK;
}

xd_result demo_report_close(xd_ctx *ctx, demo_report *report) {
    if (!report) return XD_OK;
    const xd_result result = fclose(report->metrics) == 0 ? XD_OK : demo_report_failed(ctx, report->path);
    xd_release(ctx, report);
    return result;
}

xd_result demo_report_position(xd_ctx *ctx, demo_report *report, long *bytes) {
    const long at = fflush(report->metrics) == 0 ? ftell(report->metrics) : -1;
    if (at < 0) return demo_report_failed(ctx, report->path);
    *bytes = at;
    return XD_OK;
}

xd_result demo_report_go_to(xd_ctx *ctx, demo_report *report, long bytes) {
    const long length = fseek(report->metrics, 0, SEEK_END) == 0 ? ftell(report->metrics) : -1;
    if (length >= 0 && length < bytes)
        return XD_FAIL(ctx, XD_ERROR_DATA, "%s has %ld bytes, the state to go on from was saved after %ld",
                       report->path, length, bytes);
    if (length < 0 || fseek(report->metrics, bytes, SEEK_SET) != 0)
        return demo_report_failed(ctx, report->path);
    return XD_OK;
}

/* Cuts off what an interrupted run wrote after the state this one went on from. */
static xd_result demo_cut_stale(xd_ctx *ctx, demo_report *report) {
    const long at = ftell(report->metrics);
    if (at < 0 || ftruncate(fileno(report->metrics), at) != 0) return demo_report_failed(ctx, report->path);
    report->stale = false;
    return XD_OK;
}

xd_result demo_report_step(xd_ctx *ctx, demo_report *report, const demo_job *job, const demo_moment *at,
                           const demo_step *arms) {
    const long long tokens = (long long)(at->step + 1) * DEMO_BATCH * DEMO_ROW;
    if (report->stale) XD_TRY(demo_cut_stale(ctx, report));
    for (int i = 0; i < job->arm_count; i++)
        if (fprintf(report->metrics,
                    "{\"arm\": \"%s\", \"seed\": %llu, \"step\": %d, \"wall\": %.3f, \"loss\": %.17g, "
                    "\"kd\": %.17g, \"ce\": %.17g, \"gradient_norm\": %.17g, \"learning_rate\": %.9g, "
                    "\"tokens\": %lld, \"tokens_per_second\": %.0f}\n",
                    job->arms[i].key, (unsigned long long)at->seed, at->step, at->seconds, arms[i].loss,
                    arms[i].soft, arms[i].hard, arms[i].gradient_norm, arms[i].learning_rate, tokens,
                    DEMO_BATCH * DEMO_ROW / fmax(arms[i].seconds, 1e-6)) < 0)
            return demo_report_failed(ctx, report->path);
    return XD_OK;
}

xd_result demo_report_heldout(xd_ctx *ctx, demo_report *report, const demo_arm *arm, const demo_moment *at,
                              double bits_per_byte, int64_t bytes) {
    if (report->stale) XD_TRY(demo_cut_stale(ctx, report));
    if (fprintf(report->metrics,
                "{\"arm\": \"%s\", \"seed\": %llu, \"step\": %d, \"wall\": %.3f, "
                "\"heldout_bits_per_byte\": %.17g, \"heldout_bytes\": %lld}\n",
                arm->key, (unsigned long long)at->seed, at->step, at->seconds, bits_per_byte,
                (long long)bytes) < 0)
        return demo_report_failed(ctx, report->path);
    return XD_OK;
}

/* ---- progress ---- */

/* The student that is best on the held-out text so far: its name and bits per byte. "" before there is a value. */
static void demo_best_arm(const demo_job *job, const demo_moment *at, char out[64]) {
    const demo_result *results = &job->results[(int)(at->seed - job->seed) * job->arm_count];
    const int points = demo_point_count(job->steps);
    int best = 0, last = -1;
    out[0] = 0;
    for (int i = 0; i < points && demo_point_step(i, job->steps) <= at->step + 1; i++)
        if (results[0].heldout[i] > 0.0) last = i;
    if (last < 0) return;
    for (int arm = 1; arm < job->arm_count; arm++)
        if (results[arm].heldout[last] < results[best].heldout[last]) best = arm;
    snprintf(out, 64, "best %s %.3f bits/byte", job->arms[best].key, results[best].heldout[last]);
}

/* Steps of all seeds count: the time left is that of the whole. */
void demo_report_progress(demo_report *report, const demo_job *job, const demo_moment *at) {
    const int run = (int)(at->seed - job->seed), all = job->steps * job->seeds;
    const int done = run * job->steps + at->step + 1;
    const double per_step = at->seconds / (at->step + 1);
    char step[64], share[16], best[64], rate[32], left[32], time[32];
    const char *parts[5];
    int count = 0;
    if (job->seeds > 1)
        snprintf(step, sizeof step, "seed %d/%d step %d/%d", run + 1, job->seeds, at->step + 1, job->steps);
    else
        snprintf(step, sizeof step, "step %d/%d", at->step + 1, job->steps);
    demo_best_arm(job, at, best);
    snprintf(share, sizeof share, "%d%%", (int)(100LL * done / all));
    snprintf(rate, sizeof rate, "%.1fk tokens/s", DEMO_BATCH * DEMO_ROW * job->arm_count / per_step / 1000.0);
    snprintf(left, sizeof left, "%s left", progress_time(time, per_step * (all - done)));
    parts[count++] = step;
    parts[count++] = share;
    if (best[0]) parts[count++] = best;
    parts[count++] = rate;
    parts[count++] = left;
    progress_show(&report->progress, at->seconds, parts, count, at->step + 1 == job->steps);
}

/* ---- the end ---- */

/* Where everything is, and what opens it. */
static void demo_print_places(const demo_job *job, const char *directory) {
    const char *kept = job->save_directory;
    printf("\nIn %s/:\n", directory);
    printf("  report.html     table, curves and samples; a browser opens it\n");
    printf("  loss.svg        the curves of this table\n");
    printf("  events...       the curves for TensorBoard\n");
    printf("  run.json        what ran, and the table with more digits\n");
    printf("  metrics.jsonl   every step and every held-out value, a line of JSON each\n");
    printf("The model \"%s\" of seed %llu is in %s. Python opens it with\n", job->arms[job->saved_arm].name,
           (unsigned long long)job->seed, kept);
    printf("  transformers.AutoModelForCausalLM.from_pretrained(\"%s\")\n", kept);
    printf("and build/demo --eval %s measures it again.\n", kept);
}

xd_result demo_report_finish(xd_ctx *ctx, const demo_job *job, const char *directory) {
    demo_print_table(job);
    XD_TRY(demo_write_figure(ctx, job, directory));
    XD_TRY(demo_write_run(ctx, job, directory));
    demo_print_places(job, directory);
    return XD_OK;
}
