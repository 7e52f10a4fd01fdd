/* toy_figure.c - points as SVG. */
#include "toys.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static const double TOY_PANEL = 220, TOY_GAP = 16, TOY_TOP = 64, TOY_SIDE = 20, TOY_REACH = 2.6;

enum { TOY_SHOWN = TOY_POINTS < 1500 ? TOY_POINTS : 1500 }; /* points of a panel */

static double toy_place(double value) {
    return TOY_PANEL * (value + TOY_REACH) / (2.0 * TOY_REACH);
}

/* One path; a point is a line of no length with round ends. */
void toy_draw_points(FILE *svg, const float *points, int count, const char *color) {
    fprintf(svg, "<path stroke=\"%s\" stroke-width=\"2\" stroke-linecap=\"round\" stroke-opacity=\".5\" d=\"",
            color);
    for (int i = 0; i < count; i++) {
        const double x = (double)points[i * TOY_ELEMENTS], y = (double)points[i * TOY_ELEMENTS + 1];
        if (fabs(x) < TOY_REACH && fabs(y) < TOY_REACH)
            fprintf(svg, "M%.1f %.1fh0", toy_place(x), toy_place(-y));
    }
    fputs("\"/>\n", svg);
}

static void toy_draw_panel(FILE *svg, const float *points, int column, double top, const char *color) {
    const double left = TOY_SIDE + column * (TOY_PANEL + TOY_GAP);
    fprintf(svg, "<g transform=\"translate(%.0f %.0f)\">\n", left, top);
    fprintf(svg, "<rect width=\"%.0f\" height=\"%.0f\" fill=\"none\" stroke=\"#ccc\"/>\n", TOY_PANEL,
            TOY_PANEL);
    toy_draw_points(svg, points, TOY_SHOWN, color);
}

/* Data, then samplers. */
static void toy_draw_panels(FILE *svg, const toy_run *run, double top) {
    float fresh[TOY_SHOWN * TOY_ELEMENTS];
    toy_fresh(run->kind, run->options->seed, TOY_SHOWN, fresh);
    toy_draw_panel(svg, fresh, 0, top, "#555");
    fprintf(svg, "<text y=\"-6\">%s: data</text>\n</g>\n", toy_names[run->kind]);
    for (int row = 0; row < TOY_ROWS; row++) {
        toy_draw_panel(svg, run->points[row], 1 + row, top, row < TOY_STUDENT_4 ? "#0072b2" : "#d55e00");
        fprintf(svg, "<text y=\"-6\">%s: %s</text>\n</g>\n", toy_names[run->kind], toy_row_names[row]);
    }
}

void toy_begin_svg(FILE *svg, double width, double height) {
    fprintf(svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" "
            "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" fill=\"#222\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width, height, width, height);
}

xd_result toy_figure_save(xd_ctx *ctx, const toy_run *runs, int count, const char *path) {
    const double width = 2 * TOY_SIDE + (TOY_ROWS + 1) * TOY_PANEL + TOY_ROWS * TOY_GAP;
    const double height = TOY_TOP + count * (TOY_PANEL + 2 * TOY_GAP);
    FILE *svg = fopen(path, "wb");
    if (svg) {
        toy_begin_svg(svg, width, height);
        fprintf(
            svg,
            "<text x=\"%.0f\" y=\"28\" font-weight=\"bold\" font-size=\"16\">Data, a flow by Euler's method, "
            "and students of few steps distilled from it; %d points each</text>\n",
            TOY_SIDE, (int)TOY_SHOWN);
        for (int i = 0; i < count; i++)
            toy_draw_panels(svg, &runs[i], TOY_TOP + i * (TOY_PANEL + 2 * TOY_GAP));
        fputs("</svg>\n", svg);
    }
    const bool failed = !svg || ferror(svg) != 0;
    if ((svg && fclose(svg) != 0) || failed)
        return XD_FAIL(ctx, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
    return XD_OK;
}
