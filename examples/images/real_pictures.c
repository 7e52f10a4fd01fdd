/* real_pictures.c - the training set, sorted by class. */
#include "real_pictures.h"

#include <string.h>

#ifndef IMAGES_REAL_SPLIT
#    define IMAGES_REAL_SPLIT "train" /* tests have few pictures */
#endif

/* Counts first, then places: pictures of a class keep their order. */
static xd_result real_pictures_sort(xd_ctx *ctx, const char *directory, real_pictures *real) {
    int64_t next[IMAGE_CLASSES];
    real->order = (int32_t *)xd_allocate(ctx, (size_t)real->set.count * sizeof *real->order + 1);
    XD_REQUIRE(ctx, real->order, XD_ERROR_MEMORY, "no room for the order of %lld pictures",
               (long long)real->set.count);
    memset(real->begin, 0, sizeof real->begin);
    for (int64_t i = 0; i < real->set.count; i++) real->begin[real->set.labels[i] + 1]++;
    for (int c = 0; c < IMAGE_CLASSES; c++) {
        XD_REQUIRE(ctx, real->begin[c + 1] > 0, XD_ERROR_FORMAT,
                   "%lld real pictures in %s, but none of class %d", (long long)real->set.count, directory,
                   c);
        real->begin[c + 1] += real->begin[c];
        next[c] = real->begin[c];
    }
    for (int64_t i = 0; i < real->set.count; i++) real->order[next[real->set.labels[i]]++] = (int32_t)i;
    return XD_OK;
}

xd_result real_pictures_load(xd_ctx *ctx, const char *directory, real_pictures *out) {
    char why[256];
    memset(out, 0, sizeof *out);
    xd_result result = dataset_load(ctx, directory, IMAGES_REAL_SPLIT, &out->set);
    if (result != XD_OK) {
        strncpy(why, xd_last_error(ctx)->message, sizeof why - 1);
        why[sizeof why - 1] = 0;
        return XD_FAIL(ctx, result,
                       "the discriminator needs the training pictures: tools/fetch_images.sh puts them into "
                       "build/images; %s",
                       why);
    }
    result = real_pictures_sort(ctx, directory, out);
    if (result != XD_OK) real_pictures_free(ctx, out);
    return result;
}

void real_pictures_free(xd_ctx *ctx, real_pictures *real) {
    dataset_free(ctx, &real->set);
    xd_release(ctx, real->order);
    memset(real, 0, sizeof *real);
}

const float *real_pictures_draw(const real_pictures *real, int32_t class_number, const xd_philox *random) {
    const int64_t first = real->begin[class_number], count = real->begin[class_number + 1] - first;
    return real->set.images + (int64_t)real->order[first + xd_draw_index(random, 0, count)] * IMAGE_PIXELS;
}
