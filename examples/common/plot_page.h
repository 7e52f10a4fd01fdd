/* plot_page.h - what goes with a figure of training runs: its curves for TensorBoard, and a page with table and samples. */
#ifndef PLOT_PAGE_H
#define PLOT_PAGE_H

#include "plot.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes DIRECTORY/events.out.tfevents.xdistill: each step's loss and each held-out value, under the names of series. Replaces the
 * file. Errors: IO, MEMORY. */
xd_result plot_save_events(xd_ctx *ctx, const plot_figure *figure, const char *directory);

/* What the page has beside the figure. */
typedef struct plot_page {
    const char *title;
    const char *svg;            /* the figure's file, which becomes a part of the page */
    const char *const *samples; /* [series_count] what each student wrote; NULL -> none */
    const char *teacher_sample; /* NULL -> none */
} plot_page;

/* Writes one file without scripts: a table of the values at the end, the figure, samples side by side. Replaces the file. Errors: IO,
 * MEMORY. */
xd_result plot_save_page(xd_ctx *ctx, const plot_figure *figure, const plot_page *page, const char *path);

#ifdef __cplusplus
}
#endif

#endif /* PLOT_PAGE_H */
