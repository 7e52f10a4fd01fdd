/* nn_disc_head.c - one head of the discriminator. */
#include "nn_disc_head.h"

#include "nn_group_norm.h"
#include "nn_patch_layer.h"

#include <string.h>

enum { NN_HEAD_SIDE = 4, NN_HEAD_STRIDE = 2, NN_HEAD_EDGE = 1 };

static const float nn_head_leak = 0.2f;

nn_disc_sizes nn_disc_sizes_of(nn_disc_feature feature) {
    nn_disc_sizes s;
    s.channels = feature.channels;
    s.height = feature.height;
    s.width = feature.width;
    s.inner = feature.channels / 2;
    s.groups = nn_disc_groups(feature.channels / 2);
    s.down = (s.height + 2 * NN_HEAD_EDGE - NN_HEAD_SIDE) / NN_HEAD_STRIDE + 1;
    s.across = (s.width + 2 * NN_HEAD_EDGE - NN_HEAD_SIDE) / NN_HEAD_STRIDE + 1;
    s.places = s.down * s.across;
    s.elements = s.channels * s.height * s.width;
    s.terms = s.channels * NN_HEAD_SIDE * NN_HEAD_SIDE;
    return s;
}

/* ---- the convolution as a product ---- */

/* Of the four columns that a place sees, those inside the feature: [begin, end), and what is under the first of the four. */
typedef struct nn_head_window {
    int64_t first, begin, end;
} nn_head_window;

static nn_head_window nn_head_window_at(int64_t place, int64_t size) {
    const int64_t side = NN_HEAD_SIDE;
    nn_head_window w;
    w.first = place * NN_HEAD_STRIDE - NN_HEAD_EDGE;
    w.begin = w.first < 0 ? -w.first : 0;
    w.end = size - w.first < side ? size - w.first : side;
    return w;
}

/* What a place sees of a sample, as a row of terms: zeros are left as they are. */
static void nn_head_gather(const nn_disc_sizes *s, const float *feature, int64_t place, float *row) {
    const nn_head_window y = nn_head_window_at(place / s->across, s->height),
                         x = nn_head_window_at(place % s->across, s->width);
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t i = y.begin; i < y.end; i++)
            for (int64_t j = x.begin; j < x.end; j++)
                row[(c * NN_HEAD_SIDE + i) * NN_HEAD_SIDE + j] =
                    feature[(c * s->height + y.first + i) * s->width + x.first + j];
}

/* The way back: adds. */
static void nn_head_scatter(const nn_disc_sizes *s, const float *row, int64_t place, float *feature) {
    const nn_head_window y = nn_head_window_at(place / s->across, s->height),
                         x = nn_head_window_at(place % s->across, s->width);
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t i = y.begin; i < y.end; i++)
            for (int64_t j = x.begin; j < x.end; j++)
                feature[(c * s->height + y.first + i) * s->width + x.first + j] +=
                    row[(c * NN_HEAD_SIDE + i) * NN_HEAD_SIDE + j];
}

void nn_disc_head_columns(const nn_disc_sizes *s, int64_t samples, const float *feature, float *columns) {
    memset(columns, 0, (size_t)(samples * s->places * s->terms) * sizeof *columns);
    for (int64_t r = 0; r < samples * s->places; r++)
        nn_head_gather(s, feature + r / s->places * s->elements, r % s->places, columns + r * s->terms);
}

static nn_patch_map nn_head_map(const nn_disc_part *part, const float *const *weights) {
    const nn_disc_sizes *s = &part->sizes;
    const nn_patch_map map = { part->samples * s->places, s->terms, s->inner, weights[NN_HEAD_CONV],
                               weights[NN_HEAD_CONV_BIAS] };
    return map;
}

static nn_group_norm nn_head_norm(const nn_disc_part *part) {
    const nn_disc_sizes *s = &part->sizes;
    const nn_group_norm norm = { part->samples, s->places, s->inner, s->groups };
    return norm;
}

/* ---- behind it ---- */

float nn_disc_head_slope(float x) {
    return x > 0.0f ? 1.0f : nn_head_leak;
}

static float nn_head_active(float x) {
    return nn_disc_head_slope(x) * x;
}

static float nn_head_logit(const nn_disc_sizes *s, const float *const *w, const float *normed) {
    double sum = 0.0;
    for (int64_t p = 0; p < s->places; p++)
        for (int64_t c = 0; c < s->inner; c++) {
            const float x = w[NN_HEAD_NORM][c] * normed[p * s->inner + c] + w[NN_HEAD_NORM_BIAS][c];
            sum += (double)w[NN_HEAD_LAST][c] * (double)nn_head_active(x);
        }
    return (float)(sum / (double)s->places + (double)w[NN_HEAD_LAST_BIAS][0]);
}

static void nn_head_add(float *gradient, int64_t at, float value) {
    if (gradient) gradient[at] += value;
}

/* From a sample's logit to the norm: d [places, inner] */
static void nn_head_logit_backward(const nn_disc_sizes *s, const float *const *w, float *const *g,
                                   const float *normed, float slope, float *d) {
    const float each = slope / (float)s->places;
    nn_head_add(g[NN_HEAD_LAST_BIAS], 0, slope);
    for (int64_t p = 0; p < s->places; p++)
        for (int64_t c = 0; c < s->inner; c++) {
            const float y = normed[p * s->inner + c];
            const float x = w[NN_HEAD_NORM][c] * y + w[NN_HEAD_NORM_BIAS][c];
            const float d_x = each * w[NN_HEAD_LAST][c] * nn_disc_head_slope(x);
            nn_head_add(g[NN_HEAD_LAST], c, each * nn_head_active(x));
            nn_head_add(g[NN_HEAD_NORM], c, d_x * y);
            nn_head_add(g[NN_HEAD_NORM_BIAS], c, d_x);
            d[p * s->inner + c] = d_x * w[NN_HEAD_NORM][c];
        }
}

/* ---- both ways ---- */

void nn_disc_head_forward(const nn_disc_part *part, const float *const *weights, float *logits,
                          int64_t stride) {
    const nn_disc_sizes *s = &part->sizes;
    const nn_patch_map map = nn_head_map(part, weights);
    const nn_group_norm norm = nn_head_norm(part);
    nn_disc_head_columns(s, part->samples, part->feature, part->columns);
    nn_patch_map_forward(&map, part->columns, part->normed);
    nn_group_norm_forward(&norm, part->normed, part->inverse);
    for (int64_t b = 0; b < part->samples; b++)
        logits[b * stride] = nn_head_logit(s, weights, part->normed + b * s->places * s->inner);
}

void nn_disc_head_backward(const nn_disc_part *part, const float *const *weights, float *const *gradients,
                           const float *slopes, int64_t stride, float *d_feature) {
    const nn_disc_sizes *s = &part->sizes;
    const nn_patch_map map = nn_head_map(part, weights);
    const nn_group_norm norm = nn_head_norm(part);
    for (int64_t b = 0; b < part->samples; b++) {
        const int64_t at = b * s->places * s->inner;
        nn_head_logit_backward(s, weights, gradients, part->normed + at, slopes[b * stride],
                               part->d_inner + at);
    }
    nn_group_norm_backward(&norm, part->normed, part->inverse, part->d_inner);
    if (gradients[NN_HEAD_CONV]) nn_disc_head_columns(s, part->samples, part->feature, part->columns);
    nn_patch_map_backward(&map, part->columns, part->d_inner, d_feature ? part->d_columns : NULL,
                          gradients + NN_HEAD_CONV);
    if (!d_feature) return;
    memset(d_feature, 0, (size_t)(part->samples * s->elements) * sizeof *d_feature);
    for (int64_t r = 0; r < part->samples * s->places; r++)
        nn_head_scatter(s, part->d_columns + r * s->terms, r % s->places,
                        d_feature + r / s->places * s->elements);
}
