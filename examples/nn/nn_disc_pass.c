/* nn_disc_pass.c - forward and backward of the discriminator through the blocks of its model. */
#include "nn_call.h"
#include "nn_disc_inside.h"

#include <string.h>

/* An open head. */
typedef struct nn_disc_open {
    const float *weights[NN_HEAD_WEIGHTS];
    float *gradients[NN_HEAD_WEIGHTS];
} nn_disc_open;

static xd_result nn_disc_open_head(const nn_disc *d, int head, xd_pass pass, nn_disc_open *out) {
    xd_block_view view;
    XD_TRY(xd_block_begin(d->blocks[head], pass, &view));
    for (int i = 0; i < NN_HEAD_WEIGHTS; i++) {
        out->weights[i] = (const float *)view.values[i];
        out->gradients[i] = (float *)view.gradients[i];
    }
    return XD_OK;
}

/* The samples of a chunk, where the slot keeps theirs. */
static nn_disc_part nn_disc_part_at(const nn_disc *d, const nn_disc_slot *slot, int head, int64_t first,
                                    const float *feature) {
    const nn_disc_sizes *s = &d->sizes[head];
    const int64_t left = slot->samples - first, kept = slot->keeps ? first : 0;
    nn_disc_part part;
    part.sizes = *s;
    part.samples = left < d->chunk[head] ? left : d->chunk[head];
    part.feature = feature + first * s->elements;
    part.normed = slot->heads[head].normed + kept * s->places * s->inner;
    part.inverse = slot->heads[head].inverse + kept * s->groups;
    part.columns = d->columns;
    part.d_columns = d->d_columns;
    part.d_inner = d->inner;
    part.tangent = d->tangent;
    return part;
}

static xd_result nn_disc_forward(void *user, const xd_network_call *call) {
    nn_disc *d = (nn_disc *)user;
    const int heads = d->config.heads;
    float *logits = (float *)call->raw;
    XD_TRY(nn_call_check(d->ctx, call, d->samples, d->slot_count, call->keep));
    nn_disc_slot *slot = &d->slots[call->keep ? call->slot : d->slot_count];
    slot->samples = call->samples;
    for (int k = 0; k < heads; k++) {
        nn_disc_open open;
        XD_TRY(nn_disc_open_head(d, k, nn_pass_of(call, false), &open));
        for (int64_t first = 0; first < call->samples; first += d->chunk[k]) {
            const nn_disc_part part = nn_disc_part_at(d, slot, k, first, call->features[k]);
            nn_disc_head_forward(&part, open.weights, logits + first * heads + k, heads);
        }
        XD_TRY(xd_block_end(d->blocks[k]));
    }
    return XD_OK;
}

static xd_result nn_disc_check_slot(const nn_disc *d, const xd_network_call *call) {
    XD_TRY(nn_call_check(d->ctx, call, d->samples, d->slot_count, true));
    const nn_disc_slot *slot = &d->slots[call->slot];
    XD_REQUIRE(d->ctx, slot->samples >= 0, XD_ERROR_STATE,
               "backward of %lld samples where slot %d holds none", (long long)call->samples, call->slot);
    XD_REQUIRE(d->ctx, slot->samples == call->samples, XD_ERROR_STATE,
               "backward of %lld samples where slot %d holds %lld", (long long)call->samples, call->slot,
               (long long)slot->samples);
    return XD_OK;
}

static xd_result nn_disc_backward(void *user, const xd_network_call *call) {
    nn_disc *d = (nn_disc *)user;
    const int heads = d->config.heads;
    XD_TRY(nn_disc_check_slot(d, call));
    for (int k = heads - 1; k >= 0; k--) {
        float *inputs = call->input_gradients ? call->input_gradients[k] : NULL;
        nn_disc_open open;
        XD_TRY(nn_disc_open_head(d, k, nn_pass_of(call, true), &open));
        for (int64_t first = 0; first < call->samples; first += d->chunk[k]) {
            const nn_disc_part part = nn_disc_part_at(d, &d->slots[call->slot], k, first, call->features[k]);
            nn_disc_head_backward(&part, open.weights, open.gradients, call->raw_gradient + first * heads + k,
                                  heads, inputs ? inputs + first * d->sizes[k].elements : NULL);
        }
        XD_TRY(xd_block_end(d->blocks[k]));
    }
    return XD_OK;
}

static xd_result nn_disc_penalty(void *user, const xd_network_call *call) {
    nn_disc *d = (nn_disc *)user;
    XD_TRY(nn_disc_check_slot(d, call));
    for (int k = d->config.heads - 1; k >= 0; k--) {
        nn_disc_open open;
        XD_TRY(nn_disc_open_head(d, k, nn_pass_of(call, true), &open));
        for (int64_t first = 0; first < call->samples; first += d->chunk[k]) {
            const nn_disc_part part = nn_disc_part_at(d, &d->slots[call->slot], k, first, call->features[k]);
            nn_disc_head_penalty(&part, open.weights, open.gradients,
                                 call->directions[k] + first * d->sizes[k].elements);
        }
        XD_TRY(xd_block_end(d->blocks[k]));
    }
    return XD_OK;
}

xd_network nn_disc_network(nn_disc *d) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = d;
    n.feature_count = d->config.heads;
    n.feature_elements = d->elements;
    n.heads = d->config.heads;
    n.forward = nn_disc_forward;
    n.backward = nn_disc_backward;
    n.penalty = nn_disc_penalty;
    return n;
}
