/* grid.c - pictures enlarged, in rows. */
#include "grid.h"
#include "letters.h"
#include "png.h"

#include <string.h>

int grid_side(int pictures) {
    return GRID_GAP + pictures * (GRID_SCALE * IMAGE_SIDE + GRID_GAP);
}

static uint8_t grid_grey(float value) {
    if (value <= -1.0f) return 0;
    return value < 1.0f ? (uint8_t)(127.5f * (value + 1.0f) + 0.5f) : 255;
}

/* `corner` is the upper left pixel of the picture's place. */
static void grid_draw(const float *image, uint8_t *corner, int width) {
    for (int y = 0; y < GRID_SCALE * IMAGE_SIDE; y++)
        for (int x = 0; x < GRID_SCALE * IMAGE_SIDE; x++)
            corner[(size_t)y * (size_t)width + (size_t)x] =
                grid_grey(image[y / GRID_SCALE * IMAGE_SIDE + x / GRID_SCALE]);
}

int grid_margin(const char *const *labels, int row_count) {
    int most = 0;
    for (int r = 0; labels && r < row_count; r++)
        if (letters_width(labels[r]) > most) most = letters_width(labels[r]);
    return most ? most + GRID_GAP : 0;
}

xd_result grid_save(xd_ctx *ctx, const char *path, const float *const *rows, const char *const *labels,
                    int row_count, int columns) {
    XD_REQUIRE(ctx, row_count >= 1 && columns >= 1 && row_count <= GRID_MOST && columns <= GRID_MOST,
               XD_ERROR_ARGUMENT, "%s: %d rows of %d pictures; both are 1 to %d", path, row_count, columns,
               GRID_MOST);
    const int margin = grid_margin(labels, row_count);
    const int width = margin + grid_side(columns), height = grid_side(row_count);
    const size_t bytes = (size_t)width * (size_t)height;
    uint8_t *pixels = (uint8_t *)xd_allocate(ctx, bytes);
    XD_REQUIRE(ctx, pixels, XD_ERROR_MEMORY, "no room for a picture of %d x %d pixels", width, height);
    memset(pixels, 255, bytes);
    for (int r = 0; r < row_count; r++) {
        uint8_t *row = pixels + (size_t)grid_side(r) * (size_t)width;
        const size_t middle = (GRID_SCALE * IMAGE_SIDE - LETTERS_HEIGHT) / 2;
        for (int c = 0; c < columns; c++)
            grid_draw(rows[r] + (size_t)c * IMAGE_PIXELS, row + margin + grid_side(c), width);
        if (labels) letters_draw(labels[r], row + middle * (size_t)width + GRID_GAP, width);
    }
    const xd_result result = png_save(ctx, path, pixels, width, height);
    xd_release(ctx, pixels);
    return result;
}
