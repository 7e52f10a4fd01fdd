/* grid.h - rows of pictures side by side, as one PNG file. */
#ifndef GRID_H
#define GRID_H

#include "dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GRID_SCALE = 3, /* pixels of the file for a pixel of a picture, in both directions */
    GRID_GAP = 4,   /* white pixels between pictures and around them */
    GRID_MOST = 256 /* rows, and columns */
};

/* Sides of the file in pixels for as many pictures in a row or in a column; the picture after them begins there. */
int grid_side(int pictures);

/* Pixels to the left of the pictures for labels, [row_count]; NULL -> 0. Pure. */
int grid_margin(const char *const *labels, int row_count);

/* Writes rows[r], [columns, IMAGE_PIXELS] in [-1, 1] each, from top to bottom, each behind its label; -1 and less is black, 1 and
 * more white, and so is what is not a number, to be noticed. Local. Errors: ARGUMENT for counts out of 1 to GRID_MOST, MEMORY, IO. */
xd_result grid_save(xd_ctx *ctx, const char *path, const float *const *rows, const char *const *labels,
                    int row_count, int columns);

#ifdef __cplusplus
}
#endif

#endif /* GRID_H */
