/* dataset.h - small grey pictures with labels from idx files, as Fashion-MNIST and MNIST are given out. */
#ifndef DATASET_H
#define DATASET_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    IDX_SIDE = 28, /* of a picture in a file */
    IMAGE_SIDE = 16,
    IMAGE_PIXELS = IMAGE_SIDE * IMAGE_SIDE,
    IMAGE_CLASSES = 10
};

/* Pictures as networks read them. */
typedef struct dataset {
    int64_t count;
    float *images;   /* [count, IMAGE_SIDE, IMAGE_SIDE] in [-1, 1]: -1 is black */
    int32_t *labels; /* [count] in 0 .. IMAGE_CLASSES - 1 */
} dataset;

/* What an idx file holds: bytes of the file's own, a label or the IDX_SIDE x IDX_SIDE pixels of a picture each. */
typedef struct idx_view {
    int64_t count;
    const uint8_t *items;
} idx_view;

/* Checks the bytes of an idx file of pictures, or of labels, and finds the items in them. `name` stands in messages. Local.
 * Errors: FORMAT for another magic number, sizes other than 28 x 28, fewer or more bytes than the header counts, and a label
 * that is no class, each with both numbers. */
xd_result idx_images(xd_ctx *ctx, const char *name, const uint8_t *data, size_t bytes, idx_view *out);
xd_result idx_labels(xd_ctx *ctx, const char *name, const uint8_t *data, size_t bytes, idx_view *out);

/* The pictures of DIRECTORY/SPLIT-images-idx3-ubyte and their labels in DIRECTORY/SPLIT-labels-idx1-ubyte, not compressed:
 * "train" and "t10k" are the files of Fashion-MNIST. Each picture gets a black edge of two pixels, 32 x 32, and the mean of
 * 2 x 2 pixels is one of 16 x 16. dataset_free frees them. Local. Errors: IO, MEMORY; FORMAT, also when there are more or
 * fewer labels than pictures. */
xd_result dataset_load(xd_ctx *ctx, const char *directory, const char *split, dataset *out);

/* One picture of a file as floats: [IDX_SIDE, IDX_SIDE] -> [IMAGE_SIDE, IMAGE_SIDE]. */
void dataset_convert(const uint8_t *pixels, float *image);

void dataset_free(xd_ctx *ctx, dataset *set);

#ifdef __cplusplus
}
#endif

#endif /* DATASET_H */
