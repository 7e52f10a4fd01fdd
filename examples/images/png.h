/* png.h - grey pictures as PNG files. */
#ifndef PNG_H
#define PNG_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A PNG file of 8-bit grey pixels in memory: pixels [height, width], 0 is black; both at least 1 and at most 16384. Rows are
 * stored as differences to the row above, runs of one byte in a few bits: enough for enlarged pictures. *data is freed with
 * xd_release. Local. The same bytes everywhere. Errors: ARGUMENT, MEMORY. */
xd_result png_encode(xd_ctx *ctx, const uint8_t *pixels, int width, int height, uint8_t **data,
                     size_t *bytes);

/* The same as a file, which appears whole. Errors: those, and IO. */
xd_result png_save(xd_ctx *ctx, const char *path, const uint8_t *pixels, int width, int height);

#ifdef __cplusplus
}
#endif

#endif /* PNG_H */
