/* toy_curves.c - what xd_dmd_step told of a student of four steps, and the points that it makes, as SVG. */
#include "toys.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static const double TOY_WIDE = 300, TOY_HIGH = 220, TOY_APART = 48, TOY_LEFT = 44, TOY_ABOVE = 76;
static const double TOY_OVER = 2.0; /* an axis goes to so many times the teacher's value */

/* From noise to data. */
static const char *const toy_rung_colors[TOY_RUNGS] = { "#56b4e9", "#0072b2", "#009e73", "#d55e00" };

/* A value at the edge is one beyond it. */
static double toy_height(double value, double level) {
    const double most = TOY_OVER * level;
    return TOY_HIGH * (1.0 - (value < most ? value : most) / most);
}

/* Means of the turns at one rung in a row; those that are not whole are left out. */
static void toy_draw_rung(FILE *svg, const toy_run *run, const double *values, double level, int rung) {
    const int hold = (int)xd_dmd_defaults(XD_DMD_DATA_FREE).rungs.hold, steps = run->options->steps;
    bool begun = false;
    fprintf(svg, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\" d=\"", toy_rung_colors[rung]);
    for (int first = rung * hold; first + hold <= steps; first += TOY_RUNGS * hold) {
        double mean = 0.0;
        for (int i = first; i < first + hold; i++) mean += values[i] / hold;
        fprintf(svg, "%s%.1f %.1f", begun ? "L" : "M", TOY_WIDE * (first + hold / 2) / steps,
                toy_height(mean, level));
        begun = true;
    }
    fputs("\"/>\n", svg);
}

static void toy_draw_axis(FILE *svg, double level) {
    for (int i = 0; i <= 4; i++) {
        const double value = TOY_OVER * level * i / 4.0;
        fprintf(svg, "<text x=\"-6\" y=\"%.1f\" text-anchor=\"end\">%.2f</text>\n",
                toy_height(value, level) + 4.0, value);
    }
    fprintf(svg, "<line x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#888\" stroke-dasharray=\"5 4\"/>\n",
            TOY_WIDE, toy_height(level, level), toy_height(level, level));
}

static void toy_begin_panel(FILE *svg, int panel, const char *title, double width) {
    fprintf(svg, "<g transform=\"translate(%.0f %.0f)\">\n<text y=\"-8\">%s</text>\n",
            TOY_LEFT + panel * (TOY_WIDE + TOY_APART), TOY_ABOVE, title);
    fprintf(svg, "<rect width=\"%.0f\" height=\"%.0f\" fill=\"none\" stroke=\"#ccc\"/>\n", width, TOY_HIGH);
}

static void toy_draw_curves(FILE *svg, const toy_run *run, int panel, const char *title, const double *values,
                            double level) {
    toy_begin_panel(svg, panel, title, TOY_WIDE);
    toy_draw_axis(svg, level);
    for (int rung = 0; rung < TOY_RUNGS; rung++) toy_draw_rung(svg, run, values, level, rung);
    fprintf(svg, "<text y=\"%.0f\">0</text><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">%d steps</text>\n",
            TOY_HIGH + 16.0, TOY_WIDE, TOY_HIGH + 16.0, run->options->steps);
    fputs("</g>\n", svg);
}

static void toy_draw_legend(FILE *svg) {
    static const char *const names[TOY_RUNGS] = { "first rung", "second", "third", "last" };
    double x = 70.0;
    for (int rung = 0; rung < TOY_RUNGS; rung++, x += 92.0)
        fprintf(svg,
                "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"344\" y2=\"344\" stroke=\"%s\" stroke-width=\"3\"/>"
                "<text x=\"%.0f\" y=\"348\">%s</text>\n",
                x, x + 16.0, toy_rung_colors[rung], x + 20.0, names[rung]);
    fprintf(svg,
            "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"344\" y2=\"344\" stroke=\"#888\" stroke-dasharray=\"5 4\"/>"
            "<text x=\"%.0f\" y=\"348\">the teacher's own, of data; above the frame: more</text>\n",
            x, x + 24.0, x + 28.0);
}

static void toy_draw_made(FILE *svg, const toy_run *run) {
    enum { SHOWN = TOY_POINTS < 800 ? TOY_POINTS : 800 };
    float fresh[SHOWN * TOY_ELEMENTS];
    toy_fresh(run->kind, run->options->seed, SHOWN, fresh);
    toy_begin_panel(svg, 2, "data, grey, and the student's points", TOY_HIGH);
    toy_draw_points(svg, fresh, SHOWN, "#aaa");
    toy_draw_points(svg, run->points[TOY_STUDENT_4], SHOWN, "#d55e00");
    fputs("</g>\n", svg);
}

xd_result toy_curves_save(xd_ctx *ctx, const toy_run *run, const toy_figures *figures, const char *path) {
    const double width = TOY_LEFT + 2.0 * (TOY_WIDE + TOY_APART) + TOY_HIGH + 20.0, height = 360.0;
    const toy_options *o = run->options;
    FILE *svg = fopen(path, "wb");
    if (svg) {
        toy_begin_svg(svg, width, height);
        fprintf(svg,
                "<text x=\"%.0f\" y=\"26\" font-weight=\"bold\" font-size=\"16\">%s, 4 steps: rate %g, fake "
                "score's %g, 1 step in %d</text>\n",
                TOY_LEFT, toy_names[run->kind], o->rate, o->fake_rate, o->turn);
        fprintf(svg, "<text x=\"%.0f\" y=\"46\">sliced W2 to data %.3f; the teacher in 4 steps %.3f</text>\n",
                TOY_LEFT, figures[TOY_STUDENT_4].distance, figures[TOY_TEACHER_4].distance);
        toy_draw_curves(svg, run, 0, "fake_score", run->curve.fake_score, run->curve.level.fake_score);
        toy_draw_curves(svg, run, 1, "distance", run->curve.distance, run->curve.level.distance);
        toy_draw_made(svg, run);
        toy_draw_legend(svg);
        fputs("</svg>\n", svg);
    }
    const bool failed = !svg || ferror(svg) != 0;
    if ((svg && fclose(svg) != 0) || failed)
        return XD_FAIL(ctx, XD_ERROR_IO, "cannot write %s: %s", path, strerror(errno));
    return XD_OK;
}
