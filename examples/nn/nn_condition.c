/* nn_condition.c - see nn_condition.h. */
#include "nn_condition.h"

#include "nn_exp.h"
#include "nn_patch_layer.h"

#include <math.h>

static float *nn_condition_floats(xd_arena *arena, int64_t count) {
    return (float *)xd_arena_take_pointer(arena, (size_t)count * sizeof(float));
}

void nn_condition_place(nn_condition *c, xd_arena *arena) {
    c->frequency = (double *)xd_arena_take_pointer(arena, (size_t)c->frequencies / 2 * sizeof(double));
}

void nn_conditioned_place(const nn_condition *c, xd_arena *arena, int64_t samples, nn_conditioned *out) {
    out->labels = (int32_t *)xd_arena_take_pointer(arena, (size_t)samples * sizeof *out->labels);
    out->waves = nn_condition_floats(arena, samples * c->frequencies);
    out->embedding = nn_condition_floats(arena, samples * c->width);
    out->sigmoid = nn_condition_floats(arena, samples * c->width);
    out->active = nn_condition_floats(arena, samples * c->width);
}

void nn_condition_fill(nn_condition *c) {
    const int half = c->frequencies / 2;
    for (int i = 0; i < half; i++) c->frequency[i] = half == 1 ? 1.0 : pow(1000.0, (double)i / (half - 1));
}

xd_result nn_condition_check(xd_ctx *ctx, const nn_condition *c, const xd_network_call *call) {
    for (int64_t s = 0; call->condition && s < call->samples; s++) {
        const int32_t label = ((const int32_t *)call->condition)[s];
        XD_REQUIRE(ctx, label >= 0 && label < c->labels, XD_ERROR_ARGUMENT, "sample %lld has label %ld of %d",
                   (long long)s, (long)label, c->labels);
    }
    return XD_OK;
}

static nn_patch_map nn_condition_map(const nn_condition *c, const float *const *w, int64_t samples) {
    const nn_patch_map map = { samples, c->frequencies, c->width, w[NN_CONDITION_TIME],
                               w[NN_CONDITION_TIME_BIAS] };
    return map;
}

void nn_condition_forward(const nn_condition *c, const float *const *w, const xd_network_call *call,
                          nn_conditioned *out) {
    const int half = c->frequencies / 2;
    const int64_t width = c->width, count = call->samples;
    const int32_t *labels = (const int32_t *)call->condition;
    const nn_patch_map time = nn_condition_map(c, w, count);
    out->samples = count;
    for (int64_t s = 0; s < count; s++)
        for (int i = 0; i < half; i++) {
            const double angle = call->times[s] * c->frequency[i];
            out->waves[(2 * s) * half + i] = (float)sin(angle);
            out->waves[(2 * s + 1) * half + i] = (float)cos(angle);
        }
    nn_patch_map_forward(&time, out->waves, out->embedding);
    for (int64_t s = 0; s < count; s++) {
        out->labels[s] = labels ? labels[s] : c->labels - 1;
        nn_add_all(width, w[NN_CONDITION_LABEL] + out->labels[s] * width, out->embedding + s * width);
    }
    nn_sigmoid(count * width, out->embedding, out->sigmoid);
    nn_silu(count * width, out->embedding, out->sigmoid, out->active);
}

void nn_condition_backward(const nn_condition *c, const float *const *w, float *const *g,
                           const nn_conditioned *kept, float *d_active) {
    const int64_t width = c->width, count = kept->samples;
    const nn_patch_map time = nn_condition_map(c, w, count);
    nn_silu_backward(count * width, kept->embedding, kept->sigmoid, d_active);
    nn_patch_map_backward(&time, kept->waves, d_active, NULL, g + NN_CONDITION_TIME);
    for (int64_t s = 0; g[NN_CONDITION_LABEL] && s < count; s++)
        nn_add_all(width, d_active + s * width, g[NN_CONDITION_LABEL] + kept->labels[s] * width);
}
