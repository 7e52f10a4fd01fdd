/* plot.c - the figure of plot.h, written by hand as SVG. */
#include "plot.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double WIDTH = 1120, HEIGHT = 522, PANEL_TOP = 78, PANEL_HEIGHT = 320, PANEL_WIDTH = 344,
                    LEFT_PANEL = 62, RIGHT_PANEL = 474, LEGEND = 842, LEGEND_ROW = 21;

/* The colours of Okabe and Ito, which most eyes tell apart, without their yellow. */
static const char *const plot_colors[] = { "#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                           "#e69f00", "#56b4e9", "#7b4fb5", "#5f5f5f" };

enum { PLOT_COLORS = sizeof plot_colors / sizeof plot_colors[0] };

static const char *const plot_ink = "#222", *const plot_faint_ink = "#666", *const plot_grid = "#e4e4e4";

double plot_smoothing(int steps) {
    return steps > 120 ? steps / 60.0 : 2.0;
}

/* ---- axes ---- */

typedef struct plot_axis {
    double low, high, tick; /* a mark at every multiple of tick between low and high */
} plot_axis;

typedef struct plot_panel {
    double left;
    plot_axis x, y;
} plot_panel;

/* 1, 2 or 5 times a power of ten, so that about `marks` of them cover `range`. */
static double plot_tick(double range, int marks) {
    const double rough = range / marks, power = pow(10.0, floor(log10(rough)));
    const double digit = rough / power;
    return power * (digit <= 1.0 ? 1.0 : digit <= 2.0 ? 2.0 : digit <= 5.0 ? 5.0 : 10.0);
}

/* An axis that shows all of [low, high] and a little more. */
static plot_axis plot_axis_of(double low, double high, double margin) {
    plot_axis axis;
    if (!(high > low)) { /* nothing, or one value only */
        low = isfinite(low) ? low - 0.5 : 0.0;
        high = low + 1.0;
    }
    axis.low = low - margin * (high - low);
    axis.high = high + margin * (high - low);
    axis.tick = plot_tick(axis.high - axis.low, 6);
    return axis;
}

static double plot_x(const plot_panel *p, double value) {
    return p->left + PANEL_WIDTH * (value - p->x.low) / (p->x.high - p->x.low);
}

static double plot_y(const plot_panel *p, double value) {
    return PANEL_TOP + PANEL_HEIGHT * (p->y.high - value) / (p->y.high - p->y.low);
}

static void plot_widen(double value, double *low, double *high) {
    if (!isfinite(value)) return;
    *low = fmin(*low, value);
    *high = fmax(*high, value);
}

static plot_axis plot_steps_axis(const plot_figure *f) {
    int most = 1;
    for (int s = 0; s < f->series_count; s++)
        if (f->series[s].runs[0].steps > most) most = f->series[s].runs[0].steps;
    plot_axis axis = plot_axis_of(0.0, most, 0.0);
    axis.high *= 1.02;
    if (axis.tick < 1.0) axis.tick = 1.0;
    return axis;
}

static plot_axis plot_loss_axis(const plot_figure *f) {
    double low = INFINITY, high = -INFINITY;
    for (int s = 0; s < f->series_count; s++)
        for (int r = 0; r < f->series[s].run_count; r++)
            for (int i = 0; i < f->series[s].runs[r].steps; i++)
                plot_widen((double)f->series[s].runs[r].losses[i], &low, &high);
    return plot_axis_of(low, high, 0.03);
}

static plot_axis plot_heldout_axis(const plot_figure *f) {
    double low = INFINITY, high = -INFINITY;
    if (f->teacher > 0.0) plot_widen(f->teacher, &low, &high);
    for (int s = 0; s < f->series_count; s++)
        for (int r = 0; r < f->series[s].run_count; r++)
            for (int i = 0; i < f->series[s].runs[r].points; i++)
                plot_widen(f->series[s].runs[r].heldout[i], &low, &high);
    return plot_axis_of(low, high, 0.05);
}

/* ---- words ---- */

/* Puts text where signs of XML would end it. */
static void plot_escape(FILE *svg, const char *text) {
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", svg);
        else if (*text == '&')
            fputs("&amp;", svg);
        else
            putc(*text, svg);
    }
}

/* `style` has further attributes, or nothing. */
static void plot_text(FILE *svg, double x, double y, const char *style, const char *text) {
    fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    plot_escape(svg, text);
    fputs("</text>\n", svg);
}

/* As many places behind the point as the distance between marks has. */
static void plot_mark_text(double value, double tick, char out[32]) {
    const int places = tick >= 1.0 ? 0 : (int)ceil(-log10(tick) - 1e-9);
    snprintf(out, 32, "%.*f", places, value);
}

/* ---- a panel ---- */

static void plot_x_marks(FILE *svg, const plot_panel *p) {
    const double bottom = PANEL_TOP + PANEL_HEIGHT;
    char text[32];
    for (double i = ceil(p->x.low / p->x.tick); i * p->x.tick <= p->x.high; i++) {
        const double x = plot_x(p, i * p->x.tick);
        plot_mark_text(i * p->x.tick, p->x.tick, text);
        fprintf(svg, "<path d=\"M%.1f %.1fv5\" stroke=\"%s\"/>\n", x, bottom, plot_ink);
        plot_text(svg, x, bottom + 19.0, "text-anchor=\"middle\"", text);
    }
}

static void plot_y_marks(FILE *svg, const plot_panel *p) {
    char text[32];
    for (double i = ceil(p->y.low / p->y.tick); i * p->y.tick <= p->y.high; i++) {
        const double y = plot_y(p, i * p->y.tick);
        plot_mark_text(i * p->y.tick, p->y.tick, text);
        fprintf(svg, "<path d=\"M%.1f %.1fh%.0f\" stroke=\"%s\"/><path d=\"M%.1f %.1fh-5\" stroke=\"%s\"/>\n",
                p->left, y, PANEL_WIDTH, plot_grid, p->left, y, plot_ink);
        plot_text(svg, p->left - 9.0, y + 4.0, "text-anchor=\"end\"", text);
    }
}

static void plot_frame(FILE *svg, const plot_panel *p, const char *title, const char *unit) {
    const double middle = PANEL_TOP + PANEL_HEIGHT / 2.0;
    char turned[96];
    plot_y_marks(svg, p);
    plot_x_marks(svg, p);
    fprintf(svg, "<path d=\"M%.1f %.0fv%.0fh%.0f\" fill=\"none\" stroke=\"%s\"/>\n", p->left, PANEL_TOP,
            PANEL_HEIGHT, PANEL_WIDTH, plot_ink);
    plot_text(svg, p->left, PANEL_TOP - 14.0, "font-weight=\"bold\" font-size=\"13\"", title);
    plot_text(svg, p->left + PANEL_WIDTH / 2.0, PANEL_TOP + PANEL_HEIGHT + 39.0, "text-anchor=\"middle\"",
              "training step");
    snprintf(turned, sizeof turned, "text-anchor=\"middle\" transform=\"rotate(-90 %.1f %.1f)\"",
             p->left - 42.0, middle);
    plot_text(svg, p->left - 42.0, middle, turned, unit);
}

/* ---- curves ---- */

/* Opens a line; points follow, then "\"/>". */
static void plot_begin_line(FILE *svg, const char *color, double width, double opacity) {
    fprintf(svg,
            "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%.1f\" stroke-opacity=\"%.2f\" "
            "stroke-linejoin=\"round\" points=\"",
            color, width, opacity);
}

static double plot_seeds_mean(const plot_series *s, int step) {
    double mean = 0.0;
    for (int r = 0; r < s->run_count; r++) mean += (double)s->runs[r].losses[step] / s->run_count;
    return mean;
}

/* The bold line at a step: the mean over seeds and over the steps around, weighted by a Gaussian. Near the beginning,
 * where losses fall fast, as many steps count on either side; at the end those that there are. */
static double plot_smooth(const plot_series *s, int step) {
    const double sigma = plot_smoothing(s->runs[0].steps);
    const int reach = step < (int)(3.0 * sigma) ? step : (int)(3.0 * sigma);
    double sum = 0.0, weights = 0.0;
    for (int i = step - reach; i <= step + reach; i++) {
        if (i < 0 || i >= s->runs[0].steps || !isfinite(plot_seeds_mean(s, i))) continue;
        const double weight = exp(-0.5 * (i - step) * (i - step) / (sigma * sigma));
        sum += weight * plot_seeds_mean(s, i);
        weights += weight;
    }
    return weights > 0.0 ? sum / weights : NAN;
}

static void plot_bold(FILE *svg, const plot_panel *p, const plot_series *s, const char *color) {
    plot_begin_line(svg, color, 1.8, 1.0);
    for (int i = 0; i < s->runs[0].steps; i++)
        if (isfinite(plot_smooth(s, i)))
            fprintf(svg, "%.1f,%.1f ", plot_x(p, i + 1), plot_y(p, plot_smooth(s, i)));
    fputs("\"/>\n", svg);
}

static void plot_raw(FILE *svg, const plot_panel *p, const plot_run *run, const char *color) {
    plot_begin_line(svg, color, 0.8, 0.3);
    for (int i = 0; i < run->steps; i++)
        if (isfinite((double)run->losses[i]))
            fprintf(svg, "%.1f,%.1f ", plot_x(p, i + 1), plot_y(p, (double)run->losses[i]));
    fputs("\"/>\n", svg);
}

static void plot_losses(FILE *svg, const plot_figure *f, const int *order) {
    const plot_panel panel = { LEFT_PANEL, plot_steps_axis(f), plot_loss_axis(f) };
    plot_frame(svg, &panel, f->texts_differ ? "Training loss, each student on its own text" : "Training loss",
               "cross entropy, nats per token");
    for (int i = f->series_count - 1; i >= 0; i--)
        for (int r = 0; r < f->series[order[i]].run_count; r++)
            plot_raw(svg, &panel, &f->series[order[i]].runs[r], plot_colors[order[i] % PLOT_COLORS]);
    for (int i = f->series_count - 1; i >= 0; i--)
        plot_bold(svg, &panel, &f->series[order[i]], plot_colors[order[i] % PLOT_COLORS]);
}

/* The mean over the seeds at point `i`. */
static double plot_heldout_mean(const plot_series *s, int i) {
    double mean = 0.0;
    for (int r = 0; r < s->run_count; r++) mean += s->runs[r].heldout[i] / s->run_count;
    return mean;
}

static void plot_heldout_series(FILE *svg, const plot_panel *p, const plot_series *s, const char *color) {
    const plot_run *first = &s->runs[0];
    plot_begin_line(svg, color, 1.8, 1.0);
    for (int i = 0; i < first->points; i++)
        if (isfinite(plot_heldout_mean(s, i)))
            fprintf(svg, "%.1f,%.1f ", plot_x(p, first->heldout_at[i]), plot_y(p, plot_heldout_mean(s, i)));
    fputs("\"/>\n", svg);
    for (int r = 0; r < s->run_count; r++)
        for (int i = 0; i < s->runs[r].points; i++)
            if (isfinite(s->runs[r].heldout[i]))
                fprintf(svg,
                        "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\" fill=\"%s\" stroke=\"white\" "
                        "stroke-width=\"0.6\"/>\n",
                        plot_x(p, s->runs[r].heldout_at[i]), plot_y(p, s->runs[r].heldout[i]), color);
}

static void plot_heldout(FILE *svg, const plot_figure *f, const int *order) {
    const plot_panel panel = { RIGHT_PANEL, plot_steps_axis(f), plot_heldout_axis(f) };
    plot_frame(svg, &panel, "Held-out text, the same for all", "bits per byte");
    if (f->teacher > 0.0) {
        fprintf(svg,
                "<path d=\"M%.1f %.1fh%.0f\" stroke=\"%s\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"/>\n",
                panel.left, plot_y(&panel, f->teacher), PANEL_WIDTH, plot_ink);
        plot_text(svg, panel.left + 8.0, plot_y(&panel, f->teacher) - 6.0, "", "teacher");
    }
    for (int i = f->series_count - 1; i >= 0; i--)
        plot_heldout_series(svg, &panel, &f->series[order[i]], plot_colors[order[i] % PLOT_COLORS]);
}

/* ---- legend ---- */

/* Held-out bits per byte at the end; what was never measured is worst. */
static double plot_end(const plot_series *s) {
    double mean = 0.0;
    for (int r = 0; r < s->run_count; r++) mean += s->runs[r].end / s->run_count;
    return isfinite(mean) ? mean : INFINITY;
}

/* order = the series, best at the end first. */
static void plot_sort(const plot_figure *f, int *order) {
    for (int i = 0; i < f->series_count; i++) {
        int at = i;
        for (; at > 0 && plot_end(&f->series[order[at - 1]]) > plot_end(&f->series[i]); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
}

static void plot_legend_row(FILE *svg, double y, const plot_series *s, const char *color) {
    char text[32];
    fprintf(svg, "<path d=\"M%.0f %.1fh20\" stroke=\"%s\" stroke-width=\"2.4\"/>", LEGEND, y - 4.0, color);
    fprintf(svg, "<circle cx=\"%.0f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", LEGEND + 10, y - 4.0, color);
    plot_text(svg, LEGEND + 28.0, y, "", s->name);
    snprintf(text, sizeof text, "%.2f", plot_smooth(s, s->runs[0].steps - 1));
    plot_text(svg, LEGEND + 196.0, y, "text-anchor=\"end\"", text);
    snprintf(text, sizeof text, isfinite(plot_end(s)) ? "%.3f" : "-", plot_end(s));
    plot_text(svg, LEGEND + 258.0, y, "text-anchor=\"end\" font-weight=\"bold\"", text);
}

static void plot_legend(FILE *svg, const plot_figure *f, const int *order) {
    double y = PANEL_TOP + 6.0;
    char text[32], small[96];
    snprintf(small, sizeof small, "fill=\"%s\" text-anchor=\"end\"", plot_faint_ink);
    plot_text(svg, LEGEND, y - 20.0, "font-weight=\"bold\" font-size=\"13\"", "At the end");
    plot_text(svg, LEGEND + 196.0, y - 20.0, small, "training");
    plot_text(svg, LEGEND + 258.0, y - 20.0, small, "held-out");
    plot_text(svg, LEGEND + 196.0, y - 6.0, small, "nats/token");
    plot_text(svg, LEGEND + 258.0, y - 6.0, small, "bits/byte");
    for (int i = 0; i < f->series_count; i++) {
        y += LEGEND_ROW;
        plot_legend_row(svg, y, &f->series[order[i]], plot_colors[order[i] % PLOT_COLORS]);
    }
    if (f->teacher <= 0.0) return;
    y += LEGEND_ROW;
    fprintf(svg, "<path d=\"M%.0f %.1fh20\" stroke=\"%s\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"/>\n",
            LEGEND, y - 4.0, plot_ink);
    plot_text(svg, LEGEND + 28.0, y, "", "teacher");
    snprintf(text, sizeof text, "%.3f", f->teacher);
    plot_text(svg, LEGEND + 258.0, y, "text-anchor=\"end\" font-weight=\"bold\"", text);
}

/* ---- the whole ---- */

static void plot_draw(FILE *svg, const plot_figure *f) {
    int order[PLOT_MOST_SERIES];
    char small[64];
    snprintf(small, sizeof small, "fill=\"%s\"", plot_faint_ink);
    plot_sort(f, order);
    fprintf(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
        "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" fill=\"%s\">\n<title>",
        WIDTH, HEIGHT, WIDTH, HEIGHT, plot_ink);
    plot_escape(svg, f->title);
    fputs("</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n", svg);
    plot_text(svg, 20.0, 30.0, "font-weight=\"bold\" font-size=\"16\"", f->title);
    plot_losses(svg, f, order);
    plot_heldout(svg, f, order);
    plot_legend(svg, f, order);
    for (int i = 0; i < PLOT_NOTES; i++)
        if (f->notes[i]) plot_text(svg, 20.0, PANEL_TOP + PANEL_HEIGHT + 72.0 + 17.0 * i, small, f->notes[i]);
    fputs("</svg>\n", svg);
}

xd_result plot_save(xd_ctx *ctx, const plot_figure *figure, const char *path) {
    XD_REQUIRE(ctx, figure->series_count <= PLOT_MOST_SERIES, XD_ERROR_ARGUMENT, "%d curves, at most %d",
               figure->series_count, PLOT_MOST_SERIES);
    FILE *svg = fopen(path, "wb");
    if (svg) plot_draw(svg, figure);
    const bool failed = !svg || ferror(svg) != 0;
    if ((svg && fclose(svg) != 0) || failed)
        return XD_FAIL(ctx, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
    return XD_OK;
}
