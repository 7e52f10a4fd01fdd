/* distil_report.c - what a run says at its end, and the files that it leaves. */
#include "../../examples/common/html.h"
#include "../../examples/common/json_fields.h"
#include "../../examples/common/plot_page.h"
#include "distil.h"
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What another seed may change, in bits per byte: two seeds of a student differ by some .02. */
static const double DISTIL_SEEDS = 0.02;

static int distil_best_step(const lesson *l) {
    return l->points ? l->heldout_at[l->best_point] : 0;
}

/* ---- the table ---- */

static void distil_print_arm(const distil_run *r, distil_arm_kind kind) {
    const distil_arm *arm = &r->arms[kind];
    if (!arm->done) return;
    printf("%-12s %10.4f %10.4f %12d %10d\n", distil_arm_name(kind), arm->best, arm->last,
           distil_best_step(&arm->lesson), arm->lesson.steps);
}

/* What the numbers mean, one line each; returns how many. */
static int distil_remarks(const distil_run *r, char out[4][160]) {
    const distil_arm *taught = &r->arms[DISTIL_TAUGHT], *alone = &r->arms[DISTIL_ALONE];
    const double gain = alone->best - taught->best;
    int count = 0;
    if (r->teacher_bits >= taught->best)
        snprintf(out[count++], 160,
                 "The teacher is no better than the student on this text: it has nothing to teach.");
    if (!alone->done)
        snprintf(out[count++], 160,
                 "Whether the teacher helped is not known: --alone --overwrite trains the same student "
                 "without it, too.");
    else if (fabs(gain) < DISTIL_SEEDS)
        snprintf(out[count++], 160,
                 "The teacher changes %.4f bits per byte: less than another seed may (%.2f).", gain,
                 DISTIL_SEEDS);
    else
        snprintf(out[count++], 160, "The teacher %s %.4f bits per byte, best against best, with one seed.",
                 gain > 0.0 ? "gains" : "costs", fabs(gain));
    if (taught->last > taught->best + DISTIL_SEEDS)
        snprintf(out[count++], 160, "The student got worse after step %d: the best one is kept.",
                 distil_best_step(&taught->lesson));
    return count;
}

void distil_print(const distil_run *r) {
    char remarks[4][160], name[96];
    const int count = distil_remarks(r, remarks);
    distil_student_name(r, name);
    printf("\nBits per byte of %zu bytes that no student has seen; less is better.\n\n",
           r->split.bytes[TEXT_REPORT]);
    printf("%-12s %10s %10s %12s %10s\n", "", "best", "last", "best at step", "steps");
    printf("%-12s %10.4f\n", "teacher", r->teacher_bits);
    for (int arm = 0; arm < DISTIL_ARMS; arm++) distil_print_arm(r, (distil_arm_kind)arm);
    putchar('\n');
    for (int i = 0; i < count; i++) printf("%s\n", remarks[i]);
    printf("\nIn %s:\n"
           "  student/      the best student (%s);\n"
           "                transformers.AutoModelForCausalLM.from_pretrained(\"%s/student\")\n"
           "  report.html   table, curves and samples; a browser opens it\n"
           "  report.txt    the text that the table is of\n"
           "  events...     the curves for TensorBoard\n"
           "  result.json   the same for programs\n",
           r->o->out, name, r->o->out);
    if (r->arms[DISTIL_ALONE].done) printf("  alone/        the best one without a teacher\n");
    if (!r->o->live)
        printf("  cache/        what the teacher said (%.1f MB)\n", 1e-6 * (double)r->cache.bytes);
}

/* ---- result.json ---- */

static void distil_write_arm(xd_json_writer *w, const distil_arm *arm, const char *name) {
    const lesson *l = &arm->lesson;
    xd_json_write_key(w, name);
    xd_json_write_object(w);
    json_field_double(w, "best", arm->best);
    json_field_double(w, "last", arm->last);
    json_field_int(w, "best_at_step", distil_best_step(l));
    json_field_int(w, "steps", l->steps);
    json_field_double(w, "seconds", l->seconds);
    json_field_string(w, "sample", arm->sample);
    xd_json_write_key(w, "held_out");
    xd_json_write_array(w);
    for (int i = 0; i < l->points; i++) {
        xd_json_write_object(w);
        json_field_int(w, "step", l->heldout_at[i]);
        json_field_double(w, "bits_per_byte", l->heldout[i]);
        xd_json_write_end(w);
    }
    xd_json_write_end(w);
    xd_json_write_key(w, "losses");
    xd_json_write_array(w);
    for (int i = 0; i < l->steps; i++) xd_json_write_double(w, (double)l->losses[i]);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static xd_result distil_write_json(const distil_run *r) {
    char path[512], name[96];
    xd_json_writer w = xd_json_writer_create(r->ctx);
    w.indent = 2;
    distil_student_name(r, name);
    xd_json_write_object(&w);
    json_field_string(&w, "settings", r->facts);
    json_field_string(&w, "student_is", name);
    json_field_string(&w, "teacher_name", r->teacher.name);
    json_field_int(&w, "vocabulary", r->config.vocab);
    json_field_int(&w, "seed", (int64_t)r->o->seed);
    json_field_double(&w, "peak_mib", ranks_peak_mib());
    json_field_int(&w, "report_bytes", (int64_t)r->split.bytes[TEXT_REPORT]);
    json_field_double(&w, "teacher", r->teacher_bits);
    json_field_double(&w, "cache_seconds", r->cache_seconds);
    json_field_int(&w, "cache_bytes", (int64_t)r->cache.bytes);
    distil_write_arm(&w, &r->arms[DISTIL_TAUGHT], "student");
    if (r->arms[DISTIL_ALONE].done) distil_write_arm(&w, &r->arms[DISTIL_ALONE], "text_alone");
    xd_json_write_end(&w);
    snprintf(path, sizeof path, "%s/result.json", r->o->out);
    return json_save(r->ctx, &w, path);
}

/* ---- curves.svg and report.html ---- */

static plot_figure distil_figure(const distil_run *r, plot_series series[DISTIL_ARMS]) {
    plot_figure figure;
    memset(series, 0, DISTIL_ARMS * sizeof *series);
    memset(&figure, 0, sizeof figure);
    for (int i = 0; i < DISTIL_ARMS; i++) {
        const distil_arm *arm = &r->arms[i];
        plot_series *s = &series[figure.series_count];
        if (!arm->done) continue;
        s->name = distil_arm_name((distil_arm_kind)i);
        s->run_count = 1;
        s->runs[0] = (plot_run){ arm->lesson.losses,     arm->lesson.steps,  arm->lesson.heldout,
                                 arm->lesson.heldout_at, arm->lesson.points, arm->best };
        figure.series_count++;
    }
    figure.title = "Students of a text";
    figure.series = series;
    figure.teacher = r->teacher_bits;
    figure.notes[0] =
        "Left: each step's loss, KL to the teacher or cross entropy. Right: the part of the text that "
        "chooses the best student.";
    figure.notes[1] = "The legend: the best student on the report's part, and the teacher on it.";
    return figure;
}

static void distil_html_table(html *h, const distil_run *r) {
    html_raw(h, "<table><tr><th></th><th>best</th><th>last</th><th>best at step</th><th>steps</th></tr>");
    html_format(h, "<tr><td>teacher</td><td>%.4f</td><td></td><td></td><td></td></tr>", r->teacher_bits);
    for (int i = 0; i < DISTIL_ARMS; i++) {
        const distil_arm *arm = &r->arms[i];
        if (!arm->done) continue;
        html_format(h, "<tr><td>%s</td><td>%.4f</td><td>%.4f</td><td>%d</td><td>%d</td></tr>",
                    distil_arm_name((distil_arm_kind)i), arm->best, arm->last, distil_best_step(&arm->lesson),
                    arm->lesson.steps);
    }
    html_raw(h, "</table>");
}

static void distil_html_samples(html *h, const distil_run *r) {
    char beginning[TEXT_BEGINNING];
    text_beginning(r->split.data[TEXT_REPORT], r->split.bytes[TEXT_REPORT], beginning);
    html_raw(h, "<h2>What they write behind \"");
    html_text(h, beginning);
    html_raw(h, "\"</h2><div class=\"samples\">");
    for (int i = 0; i < DISTIL_ARMS; i++) {
        if (!r->arms[i].done) continue;
        html_format(h, "<div><h3>%s</h3><pre>", distil_arm_name((distil_arm_kind)i));
        html_text(h, r->arms[i].sample);
        html_raw(h, "</pre></div>");
    }
    html_raw(h, "</div>");
}

static xd_result distil_write_html(const distil_run *r, const char *svg, size_t svg_bytes) {
    char path[512], remarks[4][160], name[96];
    html h;
    XD_TRY(html_begin(r->ctx, "xdistill distil", &h));
    distil_student_name(r, name);
    html_raw(&h, "<h1>");
    html_text(&h, r->teacher.name);
    html_raw(&h, " and a student of ");
    html_text(&h, ranks_base_name(r->o->text));
    html_format(
        &h, "</h1><p>Bits per byte of %zu bytes that no student has seen; less is better. The student is ",
        r->split.bytes[TEXT_REPORT]);
    html_text(&h, name);
    html_raw(&h, ".</p>");
    distil_html_table(&h, r);
    const int count = distil_remarks(r, remarks);
    for (int i = 0; i < count; i++) html_format(&h, "<p>%s</p>", remarks[i]);
    html_raw_n(&h, svg, svg_bytes);
    distil_html_samples(&h, r);
    html_raw(&h, "<h2>Settings</h2><p>");
    html_text(&h, r->facts);
    html_raw(&h, "</p>");
    snprintf(path, sizeof path, "%s/report.html", r->o->out);
    return html_save(&h, path);
}

/* ---- all of it ---- */

xd_result distil_write(distil_run *r) {
    char path[512], *svg = NULL;
    size_t bytes = 0;
    plot_series series[DISTIL_ARMS];
    const plot_figure figure = distil_figure(r, series);
    snprintf(path, sizeof path, "%s/curves.svg", r->o->out);
    XD_TRY(plot_save(r->ctx, &figure, path));
    XD_TRY(xd_file_load(r->ctx, path, 0, &svg, &bytes));
    const xd_result result = distil_write_html(r, svg, bytes);
    xd_release(r->ctx, svg);
    XD_TRY(result);
    XD_TRY(plot_save_events(r->ctx, &figure, r->o->out));
    snprintf(path, sizeof path, "%s/report.txt", r->o->out);
    XD_TRY(xd_file_save(r->ctx, path, r->split.data[TEXT_REPORT], r->split.bytes[TEXT_REPORT]));
    return distil_write_json(r); /* last: it says that the run is finished */
}
