/* nn_group_norm.h - the norm over groups of channels of images, forward and backward.
 *
 * Rows are places: [samples, places, channels]. A group is channels / groups neighbouring channels of one sample at all its
 * places. */
#ifndef NN_GROUP_NORM_H
#define NN_GROUP_NORM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nn_group_norm {
    int64_t samples, places;
    int64_t channels, groups; /* groups divide the channels */
} nn_group_norm;

/* x = (x - mean) / sqrt(variance + 1e-5), group by group and in place; keeps that inverse, [samples, groups]. The mean comes
 * first, then squares around it, each summed in double, place after place: a mean far from 0 does not cancel the variance. */
void nn_group_norm_forward(const nn_group_norm *norm, float *x, float *inverse);

/* d [samples, places, channels]: in, the gradient by what the norm gave; out, that by what it read. */
void nn_group_norm_backward(const nn_group_norm *norm, const float *normed, const float *inverse, float *d);

#ifdef __cplusplus
}
#endif

#endif /* NN_GROUP_NORM_H */
