/* nn_group_norm.c - see nn_group_norm.h. */
#include "nn_group_norm.h"

#include <math.h>

static const double nn_group_epsilon = 1e-5;

/* One group of a sample, whose rows begin with it, in place. Returns the inverse of its deviation. */
static float nn_group_forward(const nn_group_norm *n, float *rows) {
    const int64_t width = n->channels / n->groups;
    const double count = (double)(n->places * width);
    double mean = 0.0, variance = 0.0;
    for (int64_t p = 0; p < n->places; p++)
        for (int64_t i = 0; i < width; i++) mean += (double)rows[p * n->channels + i];
    mean /= count;
    for (int64_t p = 0; p < n->places; p++)
        for (int64_t i = 0; i < width; i++) {
            const double from = (double)rows[p * n->channels + i] - mean;
            variance += from * from;
        }
    const double inverse = 1.0 / sqrt(variance / count + nn_group_epsilon);
    for (int64_t p = 0; p < n->places; p++)
        for (int64_t i = 0; i < width; i++)
            rows[p * n->channels + i] = (float)(((double)rows[p * n->channels + i] - mean) * inverse);
    return (float)inverse;
}

static void nn_group_backward(const nn_group_norm *n, const float *normed, float inverse, float *d) {
    const int64_t width = n->channels / n->groups;
    const double count = (double)(n->places * width);
    double mean = 0.0, slope = 0.0;
    for (int64_t p = 0; p < n->places; p++)
        for (int64_t i = p * n->channels; i < p * n->channels + width; i++) {
            mean += (double)d[i];
            slope += (double)d[i] * (double)normed[i];
        }
    mean /= count;
    slope /= count;
    for (int64_t p = 0; p < n->places; p++)
        for (int64_t i = p * n->channels; i < p * n->channels + width; i++)
            d[i] = (float)((double)inverse * ((double)d[i] - mean - (double)normed[i] * slope));
}

/* Where a group begins, counted over all samples. */
static int64_t nn_group_at(const nn_group_norm *n, int64_t k) {
    return k / n->groups * n->places * n->channels + k % n->groups * (n->channels / n->groups);
}

void nn_group_norm_forward(const nn_group_norm *norm, float *x, float *inverse) {
    for (int64_t k = 0; k < norm->samples * norm->groups; k++)
        inverse[k] = nn_group_forward(norm, x + nn_group_at(norm, k));
}

void nn_group_norm_backward(const nn_group_norm *norm, const float *normed, const float *inverse, float *d) {
    for (int64_t k = 0; k < norm->samples * norm->groups; k++)
        nn_group_backward(norm, normed + nn_group_at(norm, k), inverse[k], d + nn_group_at(norm, k));
}
