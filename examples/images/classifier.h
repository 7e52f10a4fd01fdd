/* classifier.h - a small convolutional network that tells the classes of pictures apart. Its last hidden layer gives the
 * features in which distances between sets of pictures are measured.
 *
 *     conv1  3 x 3, stride 2, padding 1:  1 -> 16 channels, 8 x 8     SiLU
 *     conv2  3 x 3, stride 2, padding 1: 16 -> 32 channels, 4 x 4     SiLU
 *     fc1    512 -> 48, the features: before SiLU, times a scale      SiLU
 *     fc2     48 -> 10 logits
 */
#ifndef CLASSIFIER_H
#define CLASSIFIER_H

#include "dataset.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CLASSIFIER_FEATURES = 48, CLASSIFIER_WEIGHTS = 29914, CLASSIFIER_PARAMS = 8 };

typedef struct classifier {
    float *weights;      /* [CLASSIFIER_WEIGHTS] */
    float feature_scale; /* makes the mean variance of the features of the test pictures 1 */
} classifier;

/* One tensor of the weights. Rows are outputs, as in PyTorch; pictures and maps are channels x rows x columns. */
typedef struct classifier_param {
    const char *name; /* in files: "conv1.weight", "conv1.bias", ... */
    int64_t shape[4];
    int dims;
    int64_t offset, count; /* floats of `weights` */
} classifier_param;

/* The CLASSIFIER_PARAMS tensors, which follow each other without gaps. */
const classifier_param *classifier_params(void);

/* Room for random weights, uniform within 1 / sqrt(inputs) of zero, with feature_scale 1; the same for a seed.
 * classifier_free frees them. Local. Errors: MEMORY. */
xd_result classifier_create(xd_ctx *ctx, uint64_t seed, classifier *out);

/* A safetensors file with the tensors above in bf16 and "feature_scale", f32 [1]. Weights that are saved are rounded to bf16
 * here too, so what is measured afterwards is what the file gives. Local. Errors: IO, MEMORY; loading: MISSING, DTYPE, SHAPE
 * and FORMAT of the file, with names and numbers. */
xd_result classifier_load(xd_ctx *ctx, const char *path, classifier *out);
xd_result classifier_save(xd_ctx *ctx, const char *path, classifier *c);

void classifier_free(xd_ctx *ctx, classifier *c);

/* Features and logits of `count` pictures, in pieces of 64; a picture's do not depend on the others.
 *   images    [count, IMAGE_PIXELS]
 *   features  [count, CLASSIFIER_FEATURES], scaled; NULL -> not wanted
 *   logits    [count, IMAGE_CLASSES]; NULL -> not wanted
 * One thread; the same bits for every `count`. Errors: MEMORY. */
xd_result classifier_forward(xd_ctx *ctx, const classifier *c, const float *images, int64_t count,
                             float *features, float *logits);

/* Mean cross-entropy in nats of the pictures, and its gradient: d_weights [CLASSIFIER_WEIGHTS] is overwritten. Memory:
 * 37 KB a picture. Errors: MEMORY. */
xd_result classifier_loss(xd_ctx *ctx, const classifier *c, const dataset *batch, float *d_weights,
                          double *loss);

/* How many of the pictures get their label. Errors: MEMORY. */
xd_result classifier_correct(xd_ctx *ctx, const classifier *c, const dataset *set, int64_t *correct);

#ifdef __cplusplus
}
#endif

#endif /* CLASSIFIER_H */
