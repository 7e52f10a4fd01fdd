/* toy_net.c - forward and backward of the network of points. */
#include "toy_net.h"

#include "../nn/nn_exp.h"
#include "../nn/nn_matmul.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What a forward leaves for its backward, each [samples, inputs of the layer] or [samples, width]. */
typedef struct toy_slot {
    float *input[TOY_LAYERS];   /* of each layer */
    float *sum[TOY_LAYERS];     /* before SiLU; of the last layer none */
    float *sigmoid[TOY_LAYERS]; /* of the sums */
} toy_slot;

struct toy_net {
    xd_ctx *ctx;
    xd_block *layers[TOY_LAYERS];
    int64_t samples;
    int slots;
    toy_slot *slot;   /* [slots + 1]; the last is that of inferences */
    float *slopes[2]; /* [samples, width] gradients by sums and inputs, in turn */
    float *memory;
};

static int64_t toy_inputs(int layer) {
    return layer == 0 ? TOY_INPUTS : TOY_WIDTH;
}

static int64_t toy_outputs(int layer) {
    return layer == TOY_LAYERS - 1 ? TOY_ELEMENTS : TOY_WIDTH;
}

/* ---- making ---- */

static xd_result toy_add_layer(xd_block *root, int layer) {
    char name[16];
    xd_block *block;
    xd_weight_desc weight = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2 };
    xd_weight_desc bias = { .name = "bias", .dtype = XD_DTYPE_F32, .ndim = 1 };
    snprintf(name, sizeof name, "layer%d", layer);
    weight.shape[0] = bias.shape[0] = toy_outputs(layer);
    weight.shape[1] = toy_inputs(layer);
    weight.init = (xd_init){ XD_INIT_NORMAL, .scale = (float)sqrt(1.7 / (double)toy_inputs(layer)) };
    bias.init = (xd_init){ XD_INIT_NORMAL, .scale = 0.1f };
    XD_TRY(xd_block_add(root, &(xd_block_desc){ .name = name, .type = "layer" }, &block));
    XD_TRY(xd_weight_add(block, &weight, NULL));
    return xd_weight_add(block, &bias, NULL);
}

xd_result toy_net_describe(xd_ctx *ctx, uint64_t seed, xd_model **out) {
    xd_model *model;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = seed }, &model));
    xd_result result = XD_OK;
    for (int layer = 0; layer < TOY_LAYERS && result == XD_OK; layer++)
        result = toy_add_layer(xd_model_root(model), layer);
    if (result == XD_OK) result = xd_model_seal(model);
    if (result != XD_OK)
        xd_model_destroy(model);
    else
        *out = model;
    return result;
}

static void toy_lay_out(toy_net *net) {
    const int64_t wide = net->samples * TOY_WIDTH;
    float *at = net->memory;
    for (int s = 0; s <= net->slots; s++)
        for (int layer = 0; layer < TOY_LAYERS; layer++, at += 3 * wide) {
            net->slot[s].input[layer] = at;
            net->slot[s].sum[layer] = at + wide;
            net->slot[s].sigmoid[layer] = at + 2 * wide;
        }
    net->slopes[0] = at;
    net->slopes[1] = at + wide;
}

static xd_result toy_find_layers(toy_net *net, const xd_model *model) {
    char name[16];
    for (int layer = 0; layer < TOY_LAYERS; layer++) {
        snprintf(name, sizeof name, "layer%d", layer);
        net->layers[layer] = xd_model_find_block(model, name);
        XD_REQUIRE(net->ctx, net->layers[layer], XD_ERROR_MISSING, "the model has no block %s", name);
    }
    return XD_OK;
}

xd_result toy_net_create(xd_ctx *ctx, const xd_model *model, int64_t samples, int slots, toy_net **out) {
    const size_t wide = (size_t)samples * TOY_WIDTH * sizeof(float);
    toy_net *net = (toy_net *)xd_allocate(ctx, sizeof *net);
    xd_result result;
    if (!net) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a network");
    memset(net, 0, sizeof *net);
    net->ctx = ctx;
    net->samples = samples;
    net->slots = slots;
    net->slot = (toy_slot *)xd_allocate(ctx, (size_t)(slots + 1) * sizeof *net->slot);
    net->memory = (float *)xd_allocate(ctx, wide * (3 * TOY_LAYERS * ((size_t)slots + 1) + 2));
    if (net->slot && net->memory) {
        toy_lay_out(net);
        result = toy_find_layers(net, model);
    } else
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for passes of %lld samples", (long long)samples);
    if (result != XD_OK)
        toy_net_destroy(net);
    else
        *out = net;
    return result;
}

void toy_net_destroy(toy_net *net) {
    if (!net) return;
    xd_release(net->ctx, net->memory);
    xd_release(net->ctx, net->slot);
    xd_release(net->ctx, net);
}

/* ---- forward ---- */

/* Of a time in [0, 1]: from half a wave on, each frequency 1.7 times the one before it. */
static void toy_embed(double t, float *out) {
    double frequency = 3.14159265358979323846 / 2.0;
    for (int i = 0; i < TOY_FREQUENCIES; i++, frequency *= 1.7) {
        out[2 * i] = (float)sin(frequency * t);
        out[2 * i + 1] = (float)cos(frequency * t);
    }
}

static void toy_fill_input(const xd_network_call *call, float *input) {
    const float *points = (const float *)call->hidden;
    for (int64_t i = 0; i < call->samples; i++, input += TOY_INPUTS) {
        memcpy(input, points + i * TOY_ELEMENTS, TOY_ELEMENTS * sizeof *input);
        toy_embed(call->times[i], input + TOY_ELEMENTS);
    }
}

static void toy_layer_forward(const toy_slot *slot, const xd_block_view *view, int layer, int64_t rows,
                              float *out) {
    const float *weight = (const float *)view->values[0], *bias = (const float *)view->values[1];
    const int64_t inputs = toy_inputs(layer), outputs = toy_outputs(layer);
    const bool last = layer == TOY_LAYERS - 1;
    float *sum = last ? out : slot->sum[layer];
    for (int64_t i = 0; i < rows; i++) memcpy(sum + i * outputs, bias, (size_t)outputs * sizeof *sum);
    nn_matmul(nn_dense(slot->input[layer], rows, inputs), nn_transpose(nn_dense(weight, outputs, inputs)),
              sum, outputs, true);
    if (last) return;
    nn_sigmoid(rows * outputs, sum, slot->sigmoid[layer]);
    for (int64_t i = 0; i < rows * outputs; i++) slot->input[layer + 1][i] = sum[i] * slot->sigmoid[layer][i];
}

static xd_result toy_forward(void *user, const xd_network_call *call) {
    toy_net *net = (toy_net *)user;
    const toy_slot *slot = &net->slot[call->keep ? call->slot : net->slots];
    const xd_pass pass = { .kind = call->keep ? XD_PASS_FORWARD : XD_PASS_INFERENCE,
                           .micro_batch = call->micro_batch };
    xd_block_view view;
    XD_REQUIRE(net->ctx, call->samples <= net->samples && call->slot < net->slots, XD_ERROR_ARGUMENT,
               "%lld samples in slot %d; there is room for %lld in %d", (long long)call->samples, call->slot,
               (long long)net->samples, net->slots);
    toy_fill_input(call, slot->input[0]);
    for (int layer = 0; layer < TOY_LAYERS; layer++) {
        XD_TRY(xd_block_begin(net->layers[layer], pass, &view));
        if (call->samples > 0) toy_layer_forward(slot, &view, layer, call->samples, (float *)call->raw);
        XD_TRY(xd_block_end(net->layers[layer]));
    }
    return XD_OK;
}

/* ---- backward ---- */

/* slope [rows, outputs] is the gradient by the layer's sums; `below`, NULL or [rows, inputs], becomes that by its input. */
static void toy_layer_backward(const toy_slot *slot, const xd_block_view *view, int layer, int64_t rows,
                               const float *slope, float *below) {
    const int64_t inputs = toy_inputs(layer), outputs = toy_outputs(layer);
    float *d_weight = (float *)view->gradients[0], *d_bias = (float *)view->gradients[1];
    if (d_weight)
        nn_matmul(nn_transpose(nn_dense(slope, rows, outputs)), nn_dense(slot->input[layer], rows, inputs),
                  d_weight, inputs, true);
    for (int64_t i = 0; d_bias && i < rows; i++)
        for (int64_t j = 0; j < outputs; j++) d_bias[j] += slope[i * outputs + j];
    if (below)
        nn_matmul(nn_dense(slope, rows, outputs), nn_dense((const float *)view->values[0], outputs, inputs),
                  below, inputs, false);
}

/* From a gradient by SiLU's output to that by its input. */
static void toy_through_silu(const toy_slot *slot, int layer, int64_t rows, float *slope) {
    for (int64_t i = 0; i < rows * TOY_WIDTH; i++) {
        const float z = slot->sum[layer][i], s = slot->sigmoid[layer][i];
        slope[i] *= s * (1.0f + z * (1.0f - s));
    }
}

static xd_result toy_backward(void *user, const xd_network_call *call) {
    toy_net *net = (toy_net *)user;
    const toy_slot *slot = &net->slot[call->slot];
    const xd_pass pass = { .kind = call->weights ? XD_PASS_BACKWARD : XD_PASS_INFERENCE,
                           .micro_batch = call->micro_batch,
                           .more = call->more };
    const float *slope = call->raw_gradient;
    xd_block_view view;
    for (int layer = TOY_LAYERS - 1; layer >= 0; layer--) {
        float *below = layer > 0 || call->hidden_gradient ? net->slopes[layer % 2] : NULL;
        XD_TRY(xd_block_begin(net->layers[layer], pass, &view));
        if (call->samples > 0) toy_layer_backward(slot, &view, layer, call->samples, slope, below);
        XD_TRY(xd_block_end(net->layers[layer]));
        if (layer > 0) toy_through_silu(slot, layer - 1, call->samples, below);
        slope = below;
    }
    for (int64_t i = 0; call->hidden_gradient && i < call->samples; i++)
        memcpy(call->hidden_gradient + i * TOY_ELEMENTS, slope + i * TOY_INPUTS,
               TOY_ELEMENTS * sizeof *slope);
    return XD_OK;
}

xd_network toy_net_network(toy_net *net) {
    xd_network network = {
        .user = net, .predicts = XD_PREDICT_FLOW, .forward = toy_forward, .backward = toy_backward
    };
    return network;
}
