/* nn_conv_pass.c - forward and backward of the convolutional network through the blocks of its model. */
#include "nn_call.h"
#include "nn_conv_inside.h"
#include "nn_patch_layer.h"

#include <string.h>

/* ---- some samples of a call ---- */

/* Where the images and streams of a part are. */
typedef struct nn_conv_span {
    nn_conv_part part; /* its norms are those of a block, or of what stands behind them */
    int64_t first;     /* samples before it */
    int64_t kept;      /* of these, in the slot */
    int64_t image;     /* elements of all images before it */
    float *d_x, *d_active;
} nn_conv_span;

static nn_conv_span nn_conv_span_at(const nn_conv *p, const nn_conv_slot *slot, int64_t first) {
    const int64_t stream = first * p->places * p->config.inner;
    nn_conv_span s;
    memset(&s, 0, sizeof s);
    s.first = first;
    s.kept = slot->keeps ? first : 0;
    s.image = first * p->places * p->config.channels;
    s.part.sizes.samples = slot->samples - first < p->chunk ? slot->samples - first : p->chunk;
    s.part.sizes.places = p->places;
    s.part.sizes.channels = p->config.inner;
    s.part.sizes.groups = p->config.groups;
    s.part.height = p->config.height;
    s.part.width = p->config.width;
    s.part.embedding = p->config.embedding;
    s.part.pieces = &p->pieces;
    s.part.room = p->room;
    s.part.active = slot->time.active + first * p->config.embedding;
    s.part.x = p->x + stream;
    s.d_x = p->d_x + stream;
    s.d_active = p->d_active + first * p->config.embedding;
    return s;
}

/* What is kept of these samples. */
static nn_conv_trace nn_conv_kept(const nn_conv *p, const nn_conv_span *s, nn_conv_trace trace) {
    trace.normed += s->kept * p->places * trace.channels;
    trace.inverse += s->kept * trace.groups;
    return trace;
}

static int64_t nn_conv_span_rows(const nn_conv_span *s) {
    return s->part.sizes.samples * s->part.sizes.places;
}

/* Between images or features [channels, places] of each sample and rows [places, channels]. */
static void nn_conv_to_rows(const nn_conv_span *s, int64_t channels, const float *images, float *rows) {
    const int64_t places = s->part.sizes.places;
    for (int64_t r = 0; r < nn_conv_span_rows(s); r++)
        for (int64_t c = 0; c < channels; c++)
            rows[r * channels + c] = images[(r / places * channels + c) * places + r % places];
}

static void nn_conv_from_rows(const nn_conv_span *s, int64_t channels, const float *rows, float *images) {
    const int64_t places = s->part.sizes.places;
    for (int64_t r = 0; r < nn_conv_span_rows(s); r++)
        for (int64_t c = 0; c < channels; c++)
            images[(r / places * channels + c) * places + r % places] = rows[r * channels + c];
}

/* ---- before and behind the blocks ---- */

static nn_conv_map nn_conv_in(const nn_conv *p, const nn_conv_span *s, const float *const *w) {
    return nn_conv_part_map(&s->part, w + NN_CONV_IN, p->config.channels, p->config.inner);
}

static nn_conv_map nn_conv_out(const nn_conv *p, const nn_conv_span *s, const float *const *w) {
    return nn_conv_part_map(&s->part, w + NN_CONV_OUT, p->config.inner, p->config.channels);
}

static void nn_conv_enter(const nn_conv *p, const float *const *w, const nn_conv_slot *slot,
                          const float *images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_conv_span s = nn_conv_span_at(p, slot, first);
        const nn_conv_map in = nn_conv_in(p, &s, w);
        float *pixels = slot->pixels + s.kept * p->places * p->config.channels;
        nn_conv_to_rows(&s, p->config.channels, images + s.image, pixels);
        nn_conv_map_forward(&in, pixels, s.part.x);
    }
}

static void nn_conv_enter_backward(const nn_conv *p, const float *const *w, float *const *g,
                                   const nn_conv_slot *slot, float *d_images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_conv_span s = nn_conv_span_at(p, slot, first);
        const nn_conv_map in = nn_conv_in(p, &s, w);
        nn_conv_map_backward(&in, slot->pixels + s.kept * p->places * p->config.channels, s.d_x,
                             d_images ? p->room.pixels : NULL, g + NN_CONV_IN);
        if (d_images) nn_conv_from_rows(&s, p->config.channels, p->room.pixels, d_images + s.image);
    }
}

static void nn_conv_leave(const nn_conv *p, const float *const *w, const nn_conv_slot *slot, float *images) {
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_conv_span s = nn_conv_span_at(p, slot, first);
        const nn_conv_trace last = nn_conv_kept(p, &s, slot->last);
        const nn_conv_map out = nn_conv_out(p, &s, w);
        memcpy(last.normed, s.part.x,
               (size_t)(nn_conv_span_rows(&s) * p->config.inner) * sizeof *last.normed);
        nn_group_norm_forward(&s.part.sizes, last.normed, last.inverse);
        nn_conv_read(&s.part, &last, w + NN_CONV_LAST);
        nn_conv_map_forward(&out, p->room.read, p->room.pixels);
        nn_conv_from_rows(&s, p->config.channels, p->room.pixels, images + s.image);
    }
}

/* Leaves the gradient by the stream behind the blocks in d_x: zeros without one by the images. */
static void nn_conv_leave_backward(const nn_conv *p, const float *const *w, float *const *g,
                                   const nn_conv_slot *slot, const float *d_images) {
    memset(p->d_x, 0, (size_t)(slot->samples * p->places * p->config.inner) * sizeof *p->d_x);
    memset(p->d_active, 0, (size_t)(slot->samples * p->config.embedding) * sizeof *p->d_active);
    for (int64_t first = 0; d_images && first < slot->samples; first += p->chunk) {
        const nn_conv_span s = nn_conv_span_at(p, slot, first);
        const nn_conv_trace last = nn_conv_kept(p, &s, slot->last);
        const nn_conv_map out = nn_conv_out(p, &s, w);
        nn_conv_to_rows(&s, p->config.channels, d_images + s.image, p->room.pixels);
        nn_conv_read(&s.part, &last, w + NN_CONV_LAST);
        nn_conv_map_backward(&out, p->room.read, p->room.pixels, s.d_x, g + NN_CONV_OUT);
        nn_conv_read_backward(&s.part, &last, w + NN_CONV_LAST, g + NN_CONV_LAST, s.d_x);
    }
}

/* ---- blocks ---- */

static xd_result nn_conv_block_chunks(const nn_conv *p, const nn_conv_slot *slot, int block, bool back,
                                      const xd_block_view *view) {
    const float *w[NN_CONV_BLOCK_WEIGHTS];
    float *g[NN_CONV_BLOCK_WEIGHTS];
    nn_call_weights(view, NN_CONV_BLOCK_WEIGHTS, w, g);
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        nn_conv_span s = nn_conv_span_at(p, slot, first);
        for (int i = 0; i < 2; i++) s.part.norms[i] = nn_conv_kept(p, &s, slot->traces[2 * block + i]);
        XD_TRY(back ? nn_conv_block_backward(&s.part, w, g, s.d_x, s.d_active)
                    : nn_conv_block_forward(&s.part, w));
    }
    return XD_OK;
}

static xd_result nn_conv_block_pass(const nn_conv *p, const nn_conv_slot *slot, int block, xd_pass pass,
                                    bool back) {
    xd_block_view view;
    XD_TRY(xd_block_begin(p->blocks[block], pass, &view));
    XD_TRY(nn_conv_block_chunks(p, slot, block, back, &view));
    return xd_block_end(p->blocks[block]);
}

/* ---- features ---- */

/* The stream behind a block, when that is a feature. */
static void nn_conv_give_feature(const nn_conv *p, const nn_conv_slot *slot, int block,
                                 float *const *features) {
    if (!features || p->features.number[block] < 0) return;
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_conv_span s = nn_conv_span_at(p, slot, first);
        nn_conv_from_rows(&s, p->config.inner, s.part.x,
                          features[p->features.number[block]] + first * p->places * p->config.inner);
    }
}

static void nn_conv_take_feature(const nn_conv *p, const nn_conv_slot *slot, int block,
                                 const float *const *gradients) {
    const int64_t inner = p->config.inner;
    if (!gradients || p->features.number[block] < 0) return;
    for (int64_t first = 0; first < slot->samples; first += p->chunk) {
        const nn_conv_span s = nn_conv_span_at(p, slot, first);
        nn_conv_to_rows(&s, inner, gradients[p->features.number[block]] + first * p->places * inner,
                        p->room.branch);
        nn_add_all(nn_conv_span_rows(&s) * inner, p->room.branch, s.d_x);
    }
}

/* ---- the network's functions ---- */

static xd_result nn_conv_forward(void *user, const xd_network_call *call) {
    nn_conv *p = (nn_conv *)user;
    const int blocks = p->config.blocks;
    const xd_pass pass = nn_pass_of(call, false);
    xd_block_view root;
    const float *w[NN_CONV_ROOT_WEIGHTS];
    float *g[NN_CONV_ROOT_WEIGHTS];
    XD_TRY(nn_call_check(p->ctx, call, p->samples, p->slot_count, call->keep));
    XD_TRY(nn_condition_check(p->ctx, &p->time, call));
    nn_conv_slot *slot = &p->slots[call->keep ? call->slot : p->slot_count];
    XD_TRY(xd_block_begin(p->blocks[blocks], pass, &root));
    nn_call_weights(&root, NN_CONV_ROOT_WEIGHTS, w, g);
    slot->samples = call->samples;
    if (slot->samples > 0) {
        nn_condition_forward(&p->time, w + NN_CONV_WAVES, call, &slot->time);
        nn_conv_enter(p, w, slot, (const float *)call->hidden);
    }
    for (int i = 0; i < blocks; i++) {
        XD_TRY(nn_conv_block_pass(p, slot, i, pass, false));
        nn_conv_give_feature(p, slot, i, call->features);
    }
    nn_conv_leave(p, w, slot, (float *)call->raw);
    return xd_block_end(p->blocks[blocks]);
}

static xd_result nn_conv_backward(void *user, const xd_network_call *call) {
    nn_conv *p = (nn_conv *)user;
    const int blocks = p->config.blocks;
    const xd_pass pass = nn_pass_of(call, true);
    xd_block_view root;
    const float *w[NN_CONV_ROOT_WEIGHTS];
    float *g[NN_CONV_ROOT_WEIGHTS];
    XD_TRY(nn_call_check(p->ctx, call, p->samples, p->slot_count, true));
    const nn_conv_slot *slot = &p->slots[call->slot];
    XD_TRY(nn_call_check_kept(p->ctx, call, slot->samples));
    XD_TRY(xd_block_begin(p->blocks[blocks], pass, &root));
    nn_call_weights(&root, NN_CONV_ROOT_WEIGHTS, w, g);
    nn_conv_leave_backward(p, w, g, slot, call->raw_gradient);
    for (int i = nn_features_behind(&p->features, call) - 1; i >= 0; i--) {
        nn_conv_take_feature(p, slot, i, call->feature_gradients);
        XD_TRY(nn_conv_block_pass(p, slot, i, pass, true));
    }
    nn_conv_enter_backward(p, w, g, slot, call->hidden_gradient);
    if (slot->samples > 0 && call->weights)
        nn_condition_backward(&p->time, w + NN_CONV_WAVES, g + NN_CONV_WAVES, &slot->time, p->d_active);
    return xd_block_end(p->blocks[blocks]);
}

xd_network nn_conv_network(nn_conv *p) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = p;
    n.predicts = XD_PREDICT_FLOW;
    n.feature_count = p->features.count;
    n.feature_elements = p->features.elements;
    n.forward = nn_conv_forward;
    n.backward = nn_conv_backward;
    return n;
}
