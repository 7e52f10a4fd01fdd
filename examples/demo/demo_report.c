/* demo_report.c - what the demonstration tells: a progress line, metrics.jsonl, a table, loss.svg and
 * run.json. */
#define _POSIX_C_SOURCE 200112L /* ftruncate, fileno */
#include "demo.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct demo_report {
    FILE *metrics;
    char path[512]; /* of metrics */
    bool stale;     /* lines of an interrupted run may follow */
    bool terminal;  /* redraw one line instead of writing many */
};

/* What the system says about the call that has just failed. */
static xd_result demo_report_failed(xd_ctx *ctx, const char *path) {
    return XD_FAIL(ctx, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
}

xd_result demo_report_open(xd_ctx *ctx, const char *directory, bool resume, demo_report **out) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    if (files->make_directory(files->user, directory) != 0)
        return XD_FAIL(ctx, XD_ERROR_IO, "cannot make the directory %s", directory);
    demo_report *report = (demo_report *)xd_allocate(ctx, sizeof *report);
    if (!report) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a report");
    snprintf(report->path, sizeof report->path, "%s/metrics.jsonl", directory);
    report->metrics = resume ? fopen(report->path, "r+b") : NULL;
    report->stale = report->metrics != NULL;
    if (!report->metrics) report->metrics = fopen(report->path, "wb");
    report->terminal = isatty(1) != 0;
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

static void demo_progress(const demo_report *report, const demo_job *job, uint64_t seed, int step,
                          double seconds, const demo_step *arms) {
    const int done = step + 1, left = job->steps - done;
    const double per_step = seconds / done;
    const int eta = (int)(per_step * left + 0.5);
    const int tenth = job->steps >= 10 ? job->steps / 10 : 1;
    if (!report->terminal && left > 0 && done % tenth != 0) return;
    printf("%sstep %d/%d | seed %llu | ce", report->terminal ? "\r" : "", done, job->steps,
           (unsigned long long)seed);
    for (int i = 0; i < job->arm_count; i++) printf(" %s %.3f", job->arms[i].key, arms[i].hard);
    printf(" | lr %.1e | %.1fk tok/s | eta %d:%02d%s", arms[0].learning_rate,
           DEMO_BATCH * DEMO_ROW * job->arm_count / per_step / 1000.0, eta / 60, eta % 60,
           report->terminal && left > 0 ? "   " : "\n");
    fflush(stdout);
}

xd_result demo_report_step(xd_ctx *ctx, demo_report *report, const demo_job *job, uint64_t seed, int step,
                           double seconds, const demo_step *arms) {
    if (report->stale) XD_TRY(demo_cut_stale(ctx, report));
    for (int i = 0; i < job->arm_count; i++)
        if (fprintf(report->metrics,
                    "{\"arm\": \"%s\", \"seed\": %llu, \"step\": %d, \"wall\": %.3f, \"loss\": %.17g, "
                    "\"kd\": %.17g, \"ce\": %.17g, \"gradient_norm\": %.17g, \"learning_rate\": %.9g}\n",
                    job->arms[i].key, (unsigned long long)seed, step, seconds, arms[i].loss, arms[i].soft,
                    arms[i].hard, arms[i].gradient_norm, arms[i].learning_rate) < 0)
            return demo_report_failed(ctx, report->path);
    demo_progress(report, job, seed, step, seconds, arms);
    return XD_OK;
}

/* ---- the table ---- */

/* Mean, and largest minus smallest, of an arm over the seeds. */
static void demo_over_seeds(const demo_job *job, int arm, double *mean, double *spread) {
    double low = INFINITY, high = -INFINITY, sum = 0.0;
    for (int s = 0; s < job->seeds; s++) {
        const double bits = job->results[s * job->arm_count + arm].bits_per_byte;
        low = fmin(low, bits);
        high = fmax(high, bits);
        sum += bits;
    }
    *mean = sum / job->seeds;
    *spread = high - low;
}

/* A sample on one line: what would break the line becomes a slash. */
static void demo_print_sample(const char *name, const char *sample) {
    printf("\n%s:\n  ", name);
    for (const char *c = sample; *c; c++) {
        if (*c == '\n')
            printf(" / ");
        else
            putchar(*c);
    }
    putchar('\n');
}

/* The arm without a teacher that `other`, which reads as much of the text, is compared with; -1 when none ran. */
static int demo_plain_arm(const demo_job *job, int other) {
    for (int arm = 0; arm < job->arm_count; arm++)
        if (job->arms[arm].signal == DEMO_TEXT_ALONE && job->arms[arm].share == job->arms[other].share)
            return arm;
    return -1;
}

static void demo_table_row(const demo_job *job, int arm, long long parameters) {
    const int plain = demo_plain_arm(job, arm);
    double mean = 0.0, spread = 0.0, plain_mean = 0.0, seconds = 0.0;
    demo_over_seeds(job, arm, &mean, &spread);
    for (int s = 0; s < job->seeds; s++) seconds += job->results[s * job->arm_count + arm].seconds;
    printf("%-16s %10lld %18.4f ", job->arms[arm].name, parameters, mean);
    if (plain >= 0 && plain != arm) {
        demo_over_seeds(job, plain, &plain_mean, &spread);
        printf("%+8.4f ", plain_mean - mean);
        demo_over_seeds(job, arm, &mean, &spread);
    } else {
        printf("%8s ", "");
    }
    if (job->seeds > 1)
        printf("%9.4f ", spread);
    else
        printf("%9s ", "one seed");
    printf("%8.1f\n", seconds / job->seeds);
}

static void demo_table(const demo_job *job) {
    nn_model whole;
    const char *problem = nn_model_init(job->config, NULL, NULL, &whole);
    printf("\n%-16s %10s %18s %8s %9s %8s\n", "", "parameters", "held-out bits/byte", "lead", "max - min",
           "seconds");
    if (job->teacher_result)
        printf("%-16s %10lld %18.4f %8s %9s %8.1f\n", "teacher", (long long)job->teacher->float_count,
               job->teacher_result->bits_per_byte, "", "", job->teacher_result->seconds / job->seeds);
    for (int arm = 0; arm < job->arm_count; arm++)
        demo_table_row(job, arm, problem ? 0 : (long long)whole.float_count);
    nn_model_free(&whole);
    if (job->teacher_result) demo_print_sample("teacher", job->teacher_result->sample);
    for (int arm = 0; arm < job->arm_count; arm++)
        demo_print_sample(job->arms[arm].name, job->results[arm].sample);
}

/* ---- loss.svg ---- */

enum { SVG_WIDTH = 720, SVG_HEIGHT = 400, SVG_LEFT = 60, SVG_TOP = 20, SVG_RIGHT = 700, SVG_BOTTOM = 360 };

static const char *const demo_colors[] = { "#c05020", "#2060b0", "#208040", "#803090",
                                           "#a08000", "#008090", "#606060", "#b04080" };

enum { DEMO_COLORS = sizeof demo_colors / sizeof demo_colors[0] };

static double demo_svg_x(int step, int steps) {
    return SVG_LEFT + (double)(SVG_RIGHT - SVG_LEFT) * step / (steps > 1 ? steps - 1 : 1);
}

/* Losses from 2 to 8 nats from bottom to top. */
static double demo_svg_y(double loss) {
    const double clipped = fmin(8.0, fmax(2.0, loss));
    return SVG_BOTTOM - (SVG_BOTTOM - SVG_TOP) * (clipped - 2.0) / 6.0;
}

static void demo_svg_curve(FILE *svg, const demo_job *job, int arm) {
    const float *losses = job->results[arm].losses;
    double smooth = (double)losses[0];
    fprintf(svg, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\" points=\"",
            demo_colors[arm % DEMO_COLORS]);
    for (int i = 0; i < job->steps; i++) {
        smooth += 0.2 * ((double)losses[i] - smooth);
        fprintf(svg, "%.1f,%.1f ", demo_svg_x(i, job->steps), demo_svg_y(smooth));
    }
    fprintf(svg, "\"/>\n<text x=\"%d\" y=\"%d\" text-anchor=\"end\" fill=\"%s\">%s</text>\n", SVG_RIGHT - 8,
            SVG_TOP + 20 + 18 * arm, demo_colors[arm % DEMO_COLORS], job->arms[arm].name);
}

static xd_result demo_write_svg(xd_ctx *ctx, const demo_job *job, const char *directory) {
    char path[512];
    snprintf(path, sizeof path, "%s/loss.svg", directory);
    FILE *svg = fopen(path, "wb");
    if (!svg) return demo_report_failed(ctx, path);
    fprintf(svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            SVG_WIDTH, SVG_HEIGHT);
    for (int loss = 2; loss <= 8; loss++)
        fprintf(svg,
                "<path d=\"M%d %.1fH%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%.1f\" "
                "text-anchor=\"end\">%d</text>\n",
                SVG_LEFT, demo_svg_y(loss), SVG_RIGHT, SVG_LEFT - 8, demo_svg_y(loss) + 4.0, loss);
    fprintf(svg,
            "<text x=\"%d\" y=\"%d\">step 0</text><text x=\"%d\" y=\"%d\" text-anchor=\"end\">%d</text>\n"
            "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">cross entropy against the text, nats per token, "
            "smoothed</text>\n",
            SVG_LEFT, SVG_BOTTOM + 20, SVG_RIGHT, SVG_BOTTOM + 20, job->steps, (SVG_LEFT + SVG_RIGHT) / 2,
            SVG_BOTTOM + 20);
    for (int arm = 0; arm < job->arm_count; arm++) demo_svg_curve(svg, job, arm);
    fprintf(svg, "</svg>\n");
    const bool failed = ferror(svg) != 0;
    return fclose(svg) != 0 || failed ? demo_report_failed(ctx, path) : XD_OK;
}

/* ---- run.json ---- */

static void demo_run_number(xd_json_writer *w, const char *key, double value) {
    xd_json_write_key(w, key);
    xd_json_write_double(w, value);
}

static void demo_run_int(xd_json_writer *w, const char *key, int64_t value) {
    xd_json_write_key(w, key);
    xd_json_write_int64(w, value);
}

static void demo_run_string(xd_json_writer *w, const char *key, const char *value) {
    xd_json_write_key(w, key);
    xd_json_write_string(w, value);
}

/* What the program is made of and runs on: the bits of a run depend on each of these. */
static void demo_run_build(xd_json_writer *w, xd_ctx *ctx) {
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", XD_VERSION_MAJOR, XD_VERSION_MINOR, XD_VERSION_PATCH);
    demo_run_string(w, "version", version);
#if defined(__clang__)
    demo_run_string(w, "compiler", __VERSION__);
#elif defined(__GNUC__)
    demo_run_string(w, "compiler", "gcc " __VERSION__);
#else
    demo_run_string(w, "compiler", "unknown");
#endif
    demo_run_string(w, "cpu", xd_cpu_level_name(xd_ctx_settings(ctx)->cpu));
    demo_run_int(w, "processors", sysconf(_SC_NPROCESSORS_ONLN));
}

static void demo_run_arm_json(xd_json_writer *w, const demo_job *job, int arm) {
    xd_json_write_object(w);
    xd_json_write_key(w, "name");
    xd_json_write_string(w, job->arms[arm].name);
    demo_run_number(w, "kd_weight", job->arms[arm].kd_weight);
    demo_run_number(w, "ce_weight", job->arms[arm].ce_weight);
    demo_run_number(w, "temperature", job->arms[arm].temperature);
    demo_run_number(w, "learning_rate", job->arms[arm].learning_rate);
    demo_run_number(w, "share", job->arms[arm].share);
    xd_json_write_key(w, "heldout_bits_per_byte");
    xd_json_write_array(w);
    for (int s = 0; s < job->seeds; s++)
        xd_json_write_double(w, job->results[s * job->arm_count + arm].bits_per_byte);
    xd_json_write_end(w);
    demo_run_number(w, "seconds", job->results[arm].seconds);
    xd_json_write_end(w);
}

static xd_result demo_write_run(xd_ctx *ctx, const demo_job *job, const char *directory) {
    char path[512];
    const char *text = NULL;
    size_t bytes = 0;
    xd_json_writer w = xd_json_writer_create(ctx);
    w.indent = 2;
    xd_json_write_object(&w);
    demo_run_build(&w, ctx);
    demo_run_string(&w, "ranks_are", job->ranks_are);
    demo_run_int(&w, "ranks", (int64_t)job->dp * job->cp * job->tp);
    xd_json_write_key(&w, "mesh");
    xd_json_write_object(&w);
    demo_run_int(&w, "dp", job->dp);
    demo_run_int(&w, "cp", job->cp);
    demo_run_int(&w, "tp", job->tp);
    xd_json_write_end(&w);
    demo_run_string(&w, "reduction", demo_reduction_name(job->reduction));
    demo_run_int(&w, "steps", job->steps);
    demo_run_int(&w, "batch", DEMO_BATCH);
    demo_run_int(&w, "row", DEMO_ROW);
    demo_run_int(&w, "seed", (int64_t)job->seed);
    demo_run_int(&w, "seeds", job->seeds);
    demo_run_int(&w, "layers", job->config->layers);
    demo_run_int(&w, "hidden", job->config->hidden);
    if (job->teacher_result) demo_run_number(&w, "teacher_bits_per_byte", job->teacher_result->bits_per_byte);
    xd_json_write_key(&w, "arms");
    xd_json_write_array(&w);
    for (int arm = 0; arm < job->arm_count; arm++) demo_run_arm_json(&w, job, arm);
    xd_json_write_end(&w);
    xd_json_write_end(&w);
    snprintf(path, sizeof path, "%s/run.json", directory);
    xd_result result = xd_json_writer_text(&w, &text, &bytes);
    if (result == XD_OK) result = xd_file_save(ctx, path, text, bytes);
    xd_json_writer_destroy(&w);
    return result;
}

xd_result demo_report_finish(xd_ctx *ctx, const demo_job *job, const char *directory) {
    demo_table(job);
    XD_TRY(demo_write_svg(ctx, job, directory));
    return demo_write_run(ctx, job, directory);
}
