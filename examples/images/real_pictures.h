/* real_pictures.h - pictures of the training set by their class, for the discriminator. */
#ifndef REAL_PICTURES_H
#define REAL_PICTURES_H

#include "dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct real_pictures {
    dataset set;
    int64_t begin[IMAGE_CLASSES + 1]; /* a class is order[begin[class]] to order[begin[class + 1] - 1] */
    int32_t *order;                   /* [set.count] */
} real_pictures;

/* The training pictures of a folder, which tools/fetch_images.sh fills. real_pictures_free frees them. Local. Errors: those of
 * dataset_load, with that hint; FORMAT for a class without pictures; MEMORY. */
xd_result real_pictures_load(xd_ctx *ctx, const char *directory, real_pictures *out);
void real_pictures_free(xd_ctx *ctx, real_pictures *real);

/* One of a class, drawn with the first number of `random`: [IMAGE_PIXELS]. Pure. */
const float *real_pictures_draw(const real_pictures *real, int32_t class_number, const xd_philox *random);

#ifdef __cplusplus
}
#endif

#endif /* REAL_PICTURES_H */
