/* plot.h - a figure of training runs as SVG: the loss on the text they read, and what they are worth on a text they
 * have not seen. */
#ifndef PLOT_H
#define PLOT_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PLOT_MOST_RUNS = 8, PLOT_MOST_SERIES = 32, PLOT_NOTES = 3 };

/* One seed of a student. */
typedef struct plot_run {
    const float *losses; /* [steps] nats per token of the rows of each step */
    int steps;
    const double *heldout; /* [points] bits per byte of the held-out text */
    const int *heldout_at; /* [points] after how many steps, rising */
    int points;
    double end; /* bits per byte that the legend tells, of more text than the points perhaps */
} plot_run;

/* All seeds of a student, with the same steps and points. */
typedef struct plot_series {
    const char *name;
    plot_run runs[PLOT_MOST_RUNS];
    int run_count;
} plot_series;

typedef struct plot_figure {
    const char *title;
    const char *notes[PLOT_NOTES]; /* lines below the panels; NULL -> none */
    const plot_series *series;     /* [series_count], at most PLOT_MOST_SERIES */
    int series_count;
    double teacher;    /* bits per byte; 0 -> no teacher */
    bool texts_differ; /* series read other texts: the left panel's title says so */
} plot_figure;

/* Two panels side by side, every value inside of them, and a legend with the values at the end, the best first.
 * Replaces the file. Errors: IO; ARGUMENT for too many series. */
xd_result plot_save(xd_ctx *ctx, const plot_figure *figure, const char *path);

/* The bold line of the left panel is a mean over the steps around, weighted by a Gaussian of that many steps. */
double plot_smoothing(int steps);

#ifdef __cplusplus
}
#endif

#endif /* PLOT_H */
