/* Any bytes are an idx file of pictures or of labels for the reader of examples/images, or refused; of an accepted file every
 * item can be read, and nothing is behind the last. */
#include "fuzz.h"

#include "../examples/images/dataset.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint8_t *copy =
        (uint8_t *)malloc(bytes ? bytes : 1); /* of this very size, so that a sanitizer sees its end */
    float image[IMAGE_PIXELS];
    idx_view view;
    FUZZ_CHECK(copy != NULL);
    if (bytes) memcpy(copy, data, bytes);
    if (idx_images(fuzz_ctx(), "pictures", copy, bytes, &view) == XD_OK) {
        FUZZ_CHECK(view.items + view.count * IDX_PIXELS == copy + bytes);
        for (int64_t i = 0; i < view.count; i++) {
            dataset_convert(view.items + i * IDX_PIXELS, image);
            for (int p = 0; p < IMAGE_PIXELS; p++) FUZZ_CHECK(image[p] >= -1.0f && image[p] <= 1.0f);
        }
    }
    if (idx_labels(fuzz_ctx(), "labels", copy, bytes, &view) == XD_OK) {
        FUZZ_CHECK(view.items + view.count == copy + bytes);
        for (int64_t i = 0; i < view.count; i++) FUZZ_CHECK(view.items[i] < IMAGE_CLASSES);
    }
    free(copy);
    return 0;
}
