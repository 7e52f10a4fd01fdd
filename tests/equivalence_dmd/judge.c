/* judge.c - the discriminator's passes. */
#include "../../examples/nn/nn_call.h"
#include "strip.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct judge {
    int64_t elements;
    xd_layout *layouts[2];
    xd_model *model;
};

static void judge_hidden(const float *first, const float *x, int64_t elements, float h[JUDGE_UNITS]) {
    for (int j = 0; j < JUDGE_UNITS; j++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < elements; i++) sum += first[j * elements + i] * x[i];
        h[j] = tanhf(sum);
    }
}

static xd_result judge_forward(void *user, const xd_network_call *call) {
    const judge *d = (const judge *)user;
    float *logits = (float *)call->raw;
    xd_block_view view;
    XD_TRY(xd_block_begin(xd_model_root(d->model), nn_pass_of(call, false), &view));
    const float *first = (const float *)view.values[0], *second = (const float *)view.values[1];
    for (int64_t n = 0; n < call->samples; n++) {
        float h[JUDGE_UNITS];
        judge_hidden(first, call->features[0] + n * d->elements, d->elements, h);
        for (int k = 0; k < JUDGE_HEADS; k++) {
            float sum = 0.0f;
            for (int j = 0; j < JUDGE_UNITS; j++) sum += second[k * JUDGE_UNITS + j] * h[j];
            logits[n * JUDGE_HEADS + k] = sum;
        }
    }
    return xd_block_end(xd_model_root(d->model));
}

static void judge_sample(const judge *d, const xd_network_call *call, const xd_block_view *view, int64_t n) {
    const float *first = (const float *)view->values[0], *second = (const float *)view->values[1];
    float *d_first = (float *)view->gradients[0], *d_second = (float *)view->gradients[1];
    const float *x = call->features[0] + n * d->elements, *g = call->raw_gradient + n * JUDGE_HEADS;
    float *d_x = call->input_gradients ? call->input_gradients[0] + n * d->elements : NULL;
    float h[JUDGE_UNITS];
    judge_hidden(first, x, d->elements, h);
    for (int64_t i = 0; d_x && i < d->elements; i++) d_x[i] = 0.0f;
    for (int j = 0; j < JUDGE_UNITS; j++) {
        float slope = 0.0f;
        for (int k = 0; k < JUDGE_HEADS; k++) {
            slope += g[k] * second[k * JUDGE_UNITS + j];
            if (d_second) d_second[k * JUDGE_UNITS + j] += g[k] * h[j];
        }
        slope *= 1.0f - h[j] * h[j];
        for (int64_t i = 0; i < d->elements; i++) {
            if (d_first) d_first[j * d->elements + i] += slope * x[i];
            if (d_x) d_x[i] += slope * first[j * d->elements + i];
        }
    }
}

static xd_result judge_backward(void *user, const xd_network_call *call) {
    const judge *d = (const judge *)user;
    xd_block_view view;
    XD_TRY(xd_block_begin(xd_model_root(d->model), nn_pass_of(call, true), &view));
    for (int64_t n = 0; n < call->samples; n++) judge_sample(d, call, &view, n);
    return xd_block_end(xd_model_root(d->model));
}

xd_network judge_network(judge *d) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = d;
    n.heads = JUDGE_HEADS;
    n.forward = judge_forward;
    n.backward = judge_backward;
    return n;
}

xd_result judge_create(xd_ctx *ctx, const strip_cut *cut, uint64_t seed, int64_t elements, judge **out) {
    const int64_t first[2] = { JUDGE_UNITS, elements }, second[2] = { JUDGE_HEADS, JUDGE_UNITS };
    judge *d = (judge *)calloc(1, sizeof *d);
    xd_model_desc model;
    memset(&model, 0, sizeof model);
    model.seed = seed;
    model.rank = xd_comm_rank(cut->cp) * xd_comm_size(cut->tp) + xd_comm_rank(cut->tp);
    *out = d;
    d->elements = elements;
    XD_TRY(strip_layout(ctx, cut, first, -1, &d->layouts[0]));
    XD_TRY(strip_layout(ctx, cut, second, -1, &d->layouts[1]));
    XD_TRY(xd_model_create(ctx, &model, &d->model));
    XD_TRY(strip_weight(xd_model_root(d->model), "first", first, d->layouts[0], 0.2f));
    XD_TRY(strip_weight(xd_model_root(d->model), "second", second, d->layouts[1], 0.2f));
    return xd_model_seal(d->model);
}

void judge_destroy(judge *d) {
    if (!d) return;
    xd_model_destroy(d->model);
    xd_layout_destroy(d->layouts[0]);
    xd_layout_destroy(d->layouts[1]);
    free(d);
}

xd_model *judge_model(const judge *d) {
    return d->model;
}
