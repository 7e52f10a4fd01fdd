/* plot_page.c - curves for TensorBoard and a page in HTML. */
#include "plot_page.h"
#include "events.h"
#include "html.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- curves ---- */

static void page_add_run(events *e, const char *name, const plot_run *run) {
    char tag[160];
    snprintf(tag, sizeof tag, "loss/%s", name);
    for (int i = 0; i < run->steps; i++) events_add(e, tag, i + 1, run->losses[i]);
    snprintf(tag, sizeof tag, "held-out bits per byte/%s", name);
    for (int i = 0; i < run->points; i++) events_add(e, tag, run->heldout_at[i], (float)run->heldout[i]);
}

xd_result plot_save_events(xd_ctx *ctx, const plot_figure *figure, const char *directory) {
    char path[512], name[128];
    events e = events_begin(ctx, (double)time(NULL));
    for (int i = 0; i < figure->series_count; i++) {
        const plot_series *s = &figure->series[i];
        for (int run = 0; run < s->run_count; run++) {
            snprintf(name, sizeof name, s->run_count > 1 ? "%.100s, seed %d" : "%.100s", s->name, run + 1);
            page_add_run(&e, name, &s->runs[run]);
        }
    }
    snprintf(path, sizeof path, "%s/events.out.tfevents.xdistill", directory);
    return events_save(&e, path);
}

/* ---- the page ---- */

static void page_table(html *h, const plot_figure *figure) {
    html_raw(h, "<table><tr><th></th><th>bits per byte</th><th>spread</th></tr>");
    if (figure->teacher > 0.0)
        html_format(h, "<tr><td>teacher</td><td>%.4f</td><td></td></tr>", figure->teacher);
    for (int i = 0; i < figure->series_count; i++) {
        const plot_series *s = &figure->series[i];
        double sum = 0.0, low = s->runs[0].end, high = low;
        for (int run = 0; run < s->run_count; run++) {
            sum += s->runs[run].end;
            if (s->runs[run].end < low) low = s->runs[run].end;
            if (s->runs[run].end > high) high = s->runs[run].end;
        }
        html_raw(h, "<tr><td>");
        html_text(h, s->name);
        html_format(h, "</td><td>%.4f</td><td>", sum / s->run_count);
        if (s->run_count > 1) html_format(h, "%.4f", high - low);
        html_raw(h, "</td></tr>");
    }
    html_raw(h, "</table>");
}

static void page_sample(html *h, const char *name, const char *sample) {
    html_raw(h, "<div><h3>");
    html_text(h, name);
    html_raw(h, "</h3><pre>");
    html_text(h, sample);
    html_raw(h, "</pre></div>");
}

static void page_samples(html *h, const plot_figure *figure, const plot_page *page) {
    if (!page->samples) return;
    html_raw(h, "<h2>What they write</h2><div class=\"samples\">");
    if (page->teacher_sample) page_sample(h, "teacher", page->teacher_sample);
    for (int i = 0; i < figure->series_count; i++) page_sample(h, figure->series[i].name, page->samples[i]);
    html_raw(h, "</div>");
}

static xd_result page_figure(xd_ctx *ctx, html *h, const char *path) {
    char *svg = NULL;
    size_t bytes = 0;
    XD_TRY(xd_file_load(ctx, path, 0, &svg, &bytes));
    html_raw_n(h, svg, bytes);
    xd_release(ctx, svg);
    return XD_OK;
}

xd_result plot_save_page(xd_ctx *ctx, const plot_figure *figure, const plot_page *page, const char *path) {
    html h;
    XD_TRY(html_begin(ctx, page->title, &h));
    html_raw(&h, "<h1>");
    html_text(&h, page->title);
    html_raw(&h, "</h1><p>Bits per byte of a text that no student has seen; less is better.</p>");
    page_table(&h, figure);
    const xd_result result = page_figure(ctx, &h, page->svg);
    page_samples(&h, figure, page);
    if (result == XD_OK) return html_save(&h, path);
    html_free(&h);
    return result;
}
