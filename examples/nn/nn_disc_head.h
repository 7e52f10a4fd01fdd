/* nn_disc_head.h - one head of the discriminator on some samples, forward and backward. */
#ifndef NN_DISC_HEAD_H
#define NN_DISC_HEAD_H

#include "nn_disc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Weights of a head, in the order of its block. */
enum {
    NN_HEAD_CONV, /* [inner, channels, 4, 4] */
    NN_HEAD_CONV_BIAS,
    NN_HEAD_NORM, /* [inner] scale, then shift */
    NN_HEAD_NORM_BIAS,
    NN_HEAD_LAST, /* [inner] */
    NN_HEAD_LAST_BIAS,
    NN_HEAD_WEIGHTS
};

/* Of one head. */
typedef struct nn_disc_sizes {
    int64_t channels, height, width;
    int64_t inner, groups; /* channels behind the convolution, and of its norm */
    int64_t down, across;  /* places behind it */
    int64_t places;        /* down * across */
    int64_t elements;      /* of a sample's feature */
    int64_t terms;         /* 16 channels: what an element behind the convolution is a sum of */
} nn_disc_sizes;

nn_disc_sizes nn_disc_sizes_of(nn_disc_feature feature);

/* Some samples in a head. A row is a place of a sample. */
typedef struct nn_disc_part {
    nn_disc_sizes sizes;
    int64_t samples;
    const float *feature;       /* [samples, elements] */
    float *normed, *inverse;    /* [rows, inner], [samples, groups]: written forward, read backward */
    float *columns, *d_columns; /* room [rows, terms] */
    float *d_inner;             /* room [rows, inner] */
    float *tangent;             /* room [rows, inner], of a penalty */
} nn_disc_part;

/* logits[s * stride] = that of sample s */
void nn_disc_head_forward(const nn_disc_part *part, const float *const *weights, float *logits,
                          int64_t stride);

/* slopes[s * stride] is the gradient by the logit of sample s.
 *   gradients   [NN_HEAD_WEIGHTS] +=; those that are NULL are left out
 *   d_feature   [samples, elements] =; NULL -> left out */
void nn_disc_head_backward(const nn_disc_part *part, const float *const *weights, float *const *gradients,
                           const float *slopes, int64_t stride, float *d_feature);

/* Adds the gradient by weights of the sum over samples of <direction, d logit / d feature>, where the forward was. The slope of
 * LeakyReLU counts as a constant, which it is but for one point.
 *   direction   [samples, elements]; a constant
 *   gradients   [NN_HEAD_WEIGHTS] +=; those that are NULL are left out */
void nn_disc_head_penalty(const nn_disc_part *part, const float *const *weights, float *const *gradients,
                          const float *direction);

/* What the places see of a feature: [rows, terms]. */
void nn_disc_head_columns(const nn_disc_sizes *sizes, int64_t samples, const float *feature, float *columns);

/* The slope of LeakyReLU. */
float nn_disc_head_slope(float x);

#ifdef __cplusplus
}
#endif

#endif /* NN_DISC_HEAD_H */
