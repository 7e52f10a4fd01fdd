/* 29_own_network.h - a network of three layers with tanh, in plain C. Put yours in its place. */
#include <math.h>
#include <string.h>

enum { D = 2, WIDTH = 64, IN = D + 5, LAYERS = 3 };
typedef char width_is_at_least_in[IN <= WIDTH ? 1 : -1]; /* layers keep WIDTH numbers: raise it with D */

static const int inputs[LAYERS] = { IN, WIDTH, WIDTH }, outputs[LAYERS] = { WIDTH, WIDTH, D };

/* A layer's weight is [inputs + 1, outputs]; the last row is the bias. */
static xd_result describe(xd_ctx *ctx, xd_model **out) {
    static const char *const names[LAYERS] = { "first", "second", "third" };
    XD_TRY(xd_model_create(ctx, NULL, out));
    for (int l = 0; l < LAYERS; l++) {
        const xd_weight_desc w = { .name = names[l], .dtype = XD_DTYPE_F32, .ndim = 2,
                                   .shape = { inputs[l] + 1, outputs[l] },
                                   .init = { XD_INIT_NORMAL, .scale = 2.5f / sqrtf((float)inputs[l]) } };
        XD_TRY(xd_weight_add(xd_model_root(*out), &w, NULL));
    }
    return xd_model_seal(*out);
}

static void layer(int l, const float *w, const float *x, float *y) {
    memcpy(y, w + inputs[l] * outputs[l], (size_t)outputs[l] * sizeof *y);
    for (int i = 0; i < inputs[l]; i++)
        for (int j = 0; j < outputs[l]; j++) y[j] += x[i] * w[i * outputs[l] + j];
    for (int j = 0; l < LAYERS - 1 && j < outputs[l]; j++) y[j] = tanhf(y[j]);
}

/* d is the gradient by a layer's sums. dw gets that by the weight, `below` that by the sums before. */
static void layer_back(int l, const float *w, const float *x, const float *d, float *dw, float *below) {
    for (int i = 0; i <= inputs[l]; i++, w += outputs[l], dw += outputs[l]) {
        const float in = i < inputs[l] ? x[i] : 1;
        float sum = 0;
        for (int j = 0; j < outputs[l]; j++) dw[j] += in * d[j], sum += w[j] * d[j];
        if (i < inputs[l]) below[i] = sum * (1 - in * in);
    }
}

/* A forward to the flow, noise - x0; or with raw_gradient a backward, which computes the layers again. */
static xd_result pass(void *model, const xd_network_call *call) {
    xd_block *const root = xd_model_root((xd_model *)model);
    const xd_pass_kind forward = call->keep ? XD_PASS_FORWARD : XD_PASS_INFERENCE;
    const xd_pass how = { call->raw_gradient ? XD_PASS_BACKWARD : forward, call->micro_batch, call->more };
    xd_block_view v;
    XD_TRY(xd_block_begin(root, how, &v));
    for (int64_t b = 0; b < call->samples; b++) {
        const float t = (float)call->times[b], w = 6.2832f * t;
        float x[LAYERS + 1][WIDTH] = { { 0 } }, d[2][WIDTH];
        const float features[IN - D] = { t, sinf(w), cosf(w), sinf(2 * w), cosf(2 * w) };
        memcpy(x[0], (const float *)call->hidden + b * D, D * sizeof(float));
        memcpy(x[0] + D, features, sizeof features);
        for (int l = 0; l < LAYERS; l++) layer(l, v.values[l], x[l], x[l + 1]);
        if (!call->raw_gradient) memcpy((float *)call->raw + b * D, x[LAYERS], D * sizeof(float));
        if (call->raw_gradient) memcpy(d[0], call->raw_gradient + b * D, D * sizeof(float));
        for (int l = LAYERS - 1; call->raw_gradient && l >= 0; l--, memcpy(d[0], d[1], sizeof d[0]))
            layer_back(l, v.values[l], x[l], d[0], v.gradients[l], d[1]);
    }
    return xd_block_end(root);
}
