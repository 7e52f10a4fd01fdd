/* nn_disc_penalty.c - the gradient by a head's weights of the logit's derivative along a direction of its feature.
 *
 * That derivative is a forward of tangents: the convolution of the direction without its bias, the norm's derivative, scale,
 * slope of LeakyReLU, and the mean. With x = (y - mean) r, r = 1 / sqrt(variance + epsilon), t the tangent of y, and q the gradient
 * by the tangent of x, one group of M numbers adds
 *
 *   S = sum q x' = r (sum q t - M mean(q) mean(t) - M mean(q x) mean(t x)),      x' = r (t - mean(t) - x mean(t x))
 *
 * whose gradient by t is that of the norm, and by y what comes through x and through r. */
#include "nn_disc_head.h"
#include "nn_matmul.h"
#include "nn_patch_layer.h"

/* Means over a group. */
typedef struct nn_penalty_means {
    double t, tx, q, qx, qt;
} nn_penalty_means;

/* Some group of a sample: channels from `first` on. */
typedef struct nn_penalty_group {
    const nn_disc_sizes *sizes;
    const float *const *weights;
    const float *normed; /* [places, inner] of the sample, as the next two */
    float *tangent, *d;
    int64_t first, width;
    double inverse;
} nn_penalty_group;

/* d logit / d (tangent of x) at a place and channel of the sample. */
static double nn_penalty_above(const nn_penalty_group *g, int64_t at, int64_t c) {
    const float *const *w = g->weights;
    const float x = w[NN_HEAD_NORM][c] * g->normed[at] + w[NN_HEAD_NORM_BIAS][c];
    return (double)nn_disc_head_slope(x) * (double)w[NN_HEAD_LAST][c] * (double)w[NN_HEAD_NORM][c] /
           (double)g->sizes->places;
}

static nn_penalty_means nn_penalty_means_of(const nn_penalty_group *g) {
    const double count = (double)(g->sizes->places * g->width);
    nn_penalty_means m = { 0.0, 0.0, 0.0, 0.0, 0.0 };
    for (int64_t p = 0; p < g->sizes->places; p++)
        for (int64_t c = g->first; c < g->first + g->width; c++) {
            const int64_t at = p * g->sizes->inner + c;
            const double q = nn_penalty_above(g, at, c), t = (double)g->tangent[at],
                         x = (double)g->normed[at];
            m.t += t / count;
            m.tx += t * x / count;
            m.q += q / count;
            m.qx += q * x / count;
            m.qt += q * t / count;
        }
    return m;
}

/* Behind the norm: x' is multiplied by the scale, the slope and the last weight, and averaged over the places. */
static void nn_penalty_weights(const nn_penalty_group *g, float *const *gradients, int64_t at, int64_t c,
                               double tangent) {
    const float *const *w = g->weights;
    const float x = w[NN_HEAD_NORM][c] * g->normed[at] + w[NN_HEAD_NORM_BIAS][c];
    const double each = (double)nn_disc_head_slope(x) * tangent / (double)g->sizes->places;
    if (gradients[NN_HEAD_LAST]) gradients[NN_HEAD_LAST][c] += (float)(each * (double)w[NN_HEAD_NORM][c]);
    if (gradients[NN_HEAD_NORM]) gradients[NN_HEAD_NORM][c] += (float)(each * (double)w[NN_HEAD_LAST][c]);
}

/* d = the gradient by y, tangent = that by the tangent of y, which it was. */
static void nn_penalty_norm(const nn_penalty_group *g, float *const *gradients) {
    const nn_penalty_means m = nn_penalty_means_of(g);
    const double r = g->inverse, direct = r * r * (m.qt - m.q * m.t - m.qx * m.tx);
    for (int64_t p = 0; p < g->sizes->places; p++)
        for (int64_t c = g->first; c < g->first + g->width; c++) {
            const int64_t at = p * g->sizes->inner + c;
            const double q = nn_penalty_above(g, at, c), t = (double)g->tangent[at],
                         x = (double)g->normed[at];
            const double by_x = -r * (q * m.tx + t * m.qx), mean = -r * (m.q * m.tx + m.t * m.qx),
                         slope = -2.0 * r * m.qx * m.tx; /* of by_x, and of by_x x */
            nn_penalty_weights(g, gradients, at, c, r * (t - m.t - x * m.tx));
            g->d[at] = (float)(r * (by_x - mean - x * slope) - direct * x);
            g->tangent[at] = (float)(r * (q - m.q - x * m.qx));
        }
}

void nn_disc_head_penalty(const nn_disc_part *part, const float *const *weights, float *const *gradients,
                          const float *direction) {
    const nn_disc_sizes *s = &part->sizes;
    const int64_t rows = part->samples * s->places, width = s->inner / s->groups;
    const nn_view conv = nn_dense(weights[NN_HEAD_CONV], s->inner, s->terms);
    nn_disc_head_columns(s, part->samples, part->feature, part->columns);
    nn_disc_head_columns(s, part->samples, direction, part->d_columns);
    nn_matmul(nn_dense(part->d_columns, rows, s->terms), nn_transpose(conv), part->tangent, s->inner, false);
    for (int64_t k = 0; k < part->samples * s->groups; k++) {
        const int64_t at = k / s->groups * s->places * s->inner;
        const nn_penalty_group group = { s,
                                         weights,
                                         part->normed + at,
                                         part->tangent + at,
                                         part->d_inner + at,
                                         k % s->groups * width,
                                         width,
                                         (double)part->inverse[k] };
        nn_penalty_norm(&group, gradients);
    }
    const nn_patch_map map = { rows, s->terms, s->inner, weights[NN_HEAD_CONV], NULL };
    float *const conv_alone[2] = { gradients[NN_HEAD_CONV], NULL };
    nn_patch_map_backward(&map, part->columns, part->d_inner, NULL, gradients + NN_HEAD_CONV);
    nn_patch_map_backward(&map, part->d_columns, part->tangent, NULL, conv_alone);
}
