/* strip.c - the strip's passes. */
#include "../../examples/nn/nn_call.h"
#include "strip.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = STRIP_BLOCK + 2 }; /* of a hidden unit: a block, the time, one */

/* Weights of the root: factors of the mean, of the block before, of the one behind; what is added. */
enum { MEAN, BEFORE, BEHIND, BIAS, ROOT_WEIGHTS };
enum { UP, DOWN };

struct strip {
    xd_ctx *ctx;
    strip_cut cut;
    int64_t samples, units, elements, feature;
    xd_interval blocks;
    xd_layout *layouts[3];
    xd_model *model;
    xd_block *root, *body;
    xd_leaf_stack *pieces, *parts;
    xd_leaves of_pieces, of_parts;
    float *y[STRIP_SLOTS];       /* [samples, STRIP_ELEMENTS] of a forward that was kept */
    float *whole, *slopes, *d_y; /* the same size */
    float *hidden, *d_hidden;    /* [samples, blocks, units] here */
    float *here, *gathered;
    float *sum; /* [units, INPUTS] and [STRIP_BLOCK, units] */
};

/* ---- cuts ---- */

/* Of 8 things that n ranks share. */
static xd_interval eighths(const xd_comm *comm) {
    const int64_t r = xd_comm_rank(comm), n = xd_comm_size(comm);
    const xd_interval own = { 8 * r / n, 8 * (r + 1) / n };
    return own;
}

xd_interval strip_elements(const strip_cut *cut) {
    xd_interval own = eighths(cut->cp);
    own.begin *= STRIP_BLOCK;
    own.end *= STRIP_BLOCK;
    return own;
}

xd_result strip_layout(xd_ctx *ctx, const strip_cut *cut, const int64_t shape[2], int dim, xd_layout **out) {
    const int n = xd_comm_size(cut->tp);
    int64_t offsets[STRIP_RANKS + 1];
    xd_topology topology;
    xd_layout_desc desc;
    memset(&topology, 0, sizeof topology);
    memset(&desc, 0, sizeof desc);
    topology.axis_count = 2;
    topology.size[0] = xd_comm_size(cut->cp);
    topology.size[1] = n;
    topology.rank_count = topology.size[0] * n;
    desc.ndim = 2;
    desc.shape[0] = shape[0];
    desc.shape[1] = shape[1];
    desc.topology = &topology;
    for (int r = 0; r <= n; r++) offsets[r] = STRIP_PIECES * r / n * STRIP_PIECE;
    if (dim >= 0) {
        desc.placement[1].kind = XD_SHARD;
        desc.placement[1].dim = dim;
        desc.placement[1].offsets = offsets;
    }
    return xd_layout_create(ctx, &desc, out);
}

/* The sum of all ranks' leaves, on each; the stack is empty afterwards. */
static xd_result strip_sum(xd_comm *comm, xd_leaf_stack *stack, xd_leaves leaves, int64_t count, float *out) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(stack);
    c.recv = out;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.leaves = leaves;
    const xd_result result = xd_collective_run(comm, &c);
    xd_leaf_stack_reset(stack);
    return result;
}

/* [n, blocks here, STRIP_BLOCK] of each rank becomes [n, STRIP_ELEMENTS] on all. */
static xd_result strip_join(strip *s, int64_t n, const float *here, float *whole) {
    const int ranks = xd_comm_size(s->cut.cp);
    int64_t counts[STRIP_RANKS];
    const float *from = s->gathered;
    for (int r = 0; r < ranks; r++) counts[r] = n * (8 * (r + 1) / ranks - 8 * r / ranks) * STRIP_BLOCK;
    XD_TRY(xd_all_gather(s->cut.cp, here, s->gathered, counts, XD_DTYPE_F32));
    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < n; i++) {
            const int64_t begin = 8 * r / ranks * STRIP_BLOCK, size = counts[r] / n;
            memcpy(whole + i * STRIP_ELEMENTS + begin, from, (size_t)size * sizeof *from);
            from += size;
        }
    return XD_OK;
}

/* ---- in the blocks ---- */

/* Hidden units of this rank in the blocks of this rank. */
static void strip_hidden(strip *s, const xd_network_call *call, const float *up) {
    const int64_t blocks = s->blocks.end - s->blocks.begin;
    const float *x = (const float *)call->hidden;
    float *h = s->hidden;
    for (int64_t i = 0; i < call->samples * blocks; i++, x += STRIP_BLOCK)
        for (int64_t j = 0; j < s->units; j++) {
            const float *row = up + j * INPUTS;
            float sum = row[STRIP_BLOCK] * (float)call->times[i / blocks] + row[STRIP_BLOCK + 1];
            for (int e = 0; e < STRIP_BLOCK; e++) sum += row[e] * x[e];
            *h++ = tanhf(sum);
        }
}

/* s->here = for each block the sum over units of factors of the element and the unit, by pieces. */
static xd_result strip_by_pieces(strip *s, int64_t n, const float *units, const float *weight, int element,
                                 int unit) {
    const int64_t rows = n * (s->blocks.end - s->blocks.begin);
    for (int64_t p = 0; p < s->of_pieces.count; p++) {
        float *place;
        XD_TRY(xd_leaf_stack_next(s->pieces, &place));
        memset(place, 0, (size_t)(s->samples * s->elements) * sizeof *place);
        for (int64_t r = 0; r < rows; r++)
            for (int e = 0; e < STRIP_BLOCK; e++) {
                float sum = 0.0f;
                for (int64_t j = p * STRIP_PIECE; j < (p + 1) * STRIP_PIECE; j++)
                    sum += weight[e * element + j * unit] * units[r * s->units + j];
                place[r * STRIP_BLOCK + e] = sum;
            }
        XD_TRY(xd_leaf_stack_push(s->pieces, place));
    }
    return strip_sum(s->cut.tp, s->pieces, s->of_pieces, s->samples * s->elements, s->here);
}

/* d_hidden, from d_y. */
static void strip_slopes(strip *s, int64_t n, const float *down) {
    const int64_t blocks = s->blocks.end - s->blocks.begin;
    for (int64_t i = 0; i < n * blocks; i++) {
        const float *g = s->d_y + i / blocks * STRIP_ELEMENTS + (s->blocks.begin + i % blocks) * STRIP_BLOCK;
        for (int64_t j = 0; j < s->units; j++) {
            const float h = s->hidden[i * s->units + j];
            float sum = 0.0f;
            for (int e = 0; e < STRIP_BLOCK; e++) sum += down[e * s->units + j] * g[e];
            s->d_hidden[i * s->units + j] = sum * (1.0f - h * h);
        }
    }
}

/* What one block adds to the gradients of up and down. */
static void strip_block_gradient(const strip *s, const xd_network_call *call, int64_t block, float *out) {
    const int64_t blocks = s->blocks.end - s->blocks.begin;
    float *d_down = out + s->units * INPUTS;
    for (int64_t n = 0; n < call->samples; n++) {
        const int64_t at = n * blocks + block;
        const float *x = (const float *)call->hidden + at * STRIP_BLOCK;
        const float *g = s->d_y + n * STRIP_ELEMENTS + (s->blocks.begin + block) * STRIP_BLOCK;
        for (int64_t j = 0; j < s->units; j++) {
            const float slope = s->d_hidden[at * s->units + j];
            for (int e = 0; e < STRIP_BLOCK; e++) {
                out[j * INPUTS + e] += slope * x[e];
                d_down[e * s->units + j] += g[e] * s->hidden[at * s->units + j];
            }
            out[j * INPUTS + STRIP_BLOCK] += slope * (float)call->times[n];
            out[j * INPUTS + STRIP_BLOCK + 1] += slope;
        }
    }
}

static xd_result strip_body_gradient(strip *s, const xd_network_call *call, void *const *gradients) {
    const int64_t up = s->units * INPUTS, count = up + STRIP_BLOCK * s->units;
    float *d_up = (float *)gradients[UP], *d_down = (float *)gradients[DOWN];
    for (int64_t b = 0; b < s->of_parts.count; b++) {
        float *place;
        XD_TRY(xd_leaf_stack_next(s->parts, &place));
        memset(place, 0, (size_t)count * sizeof *place);
        strip_block_gradient(s, call, b, place);
        XD_TRY(xd_leaf_stack_push(s->parts, place));
    }
    XD_TRY(strip_sum(s->cut.cp, s->parts, s->of_parts, count, s->sum));
    for (int64_t i = 0; i < up; i++) d_up[i] += s->sum[i];
    for (int64_t i = up; i < count; i++) d_down[i - up] += s->sum[i];
    return XD_OK;
}

/* ---- between the blocks ---- */

/* The mean over the blocks of element e of a sample. */
static float strip_mean(const float *y, int e) {
    float sum = 0.0f;
    for (int b = 0; b < STRIP_BLOCKS; b++) sum += y[b * STRIP_BLOCK + e];
    return sum / STRIP_BLOCKS;
}

/* y of element e in a block that may be beyond the ends. */
static float strip_next(const float *y, int64_t block, int e) {
    return block < 0 || block >= STRIP_BLOCKS ? 0.0f : y[block * STRIP_BLOCK + e];
}

static void strip_predict(const strip *s, int64_t n, const float *whole, void *const *values, float *raw) {
    const float *w[ROOT_WEIGHTS];
    for (int i = 0; i < ROOT_WEIGHTS; i++) w[i] = (const float *)values[i];
    for (int64_t i = 0; i < n; i++, whole += STRIP_ELEMENTS)
        for (int64_t b = s->blocks.begin; b < s->blocks.end; b++)
            for (int e = 0; e < STRIP_BLOCK; e++) {
                float sum = whole[b * STRIP_BLOCK + e] + w[BIAS][e];
                sum += w[MEAN][e] * strip_mean(whole, e);
                sum += w[BEFORE][e] * strip_next(whole, b - 1, e);
                *raw++ = sum + w[BEHIND][e] * strip_next(whole, b + 1, e);
            }
}

/* d_y of all blocks, from the slopes of all predictions. */
static void strip_predict_slopes(strip *s, int64_t n, void *const *values) {
    const float *w[ROOT_WEIGHTS];
    for (int i = 0; i < ROOT_WEIGHTS; i++) w[i] = (const float *)values[i];
    for (int64_t i = 0; i < n; i++) {
        const float *g = s->slopes + i * STRIP_ELEMENTS;
        float *d = s->d_y + i * STRIP_ELEMENTS;
        for (int b = 0; b < STRIP_BLOCKS; b++)
            for (int e = 0; e < STRIP_BLOCK; e++) {
                float sum = g[b * STRIP_BLOCK + e] + w[MEAN][e] * strip_mean(g, e);
                sum += w[BEFORE][e] * strip_next(g, b + 1, e);
                d[b * STRIP_BLOCK + e] = sum + w[BEHIND][e] * strip_next(g, b - 1, e);
            }
    }
}

static void strip_root_gradient(const strip *s, int64_t n, const float *y, void *const *gradients) {
    float *g[ROOT_WEIGHTS];
    for (int i = 0; i < ROOT_WEIGHTS; i++) g[i] = (float *)gradients[i];
    for (int64_t i = 0; i < n; i++, y += STRIP_ELEMENTS)
        for (int b = 0; b < STRIP_BLOCKS; b++)
            for (int e = 0; e < STRIP_BLOCK; e++) {
                const float slope = s->slopes[i * STRIP_ELEMENTS + b * STRIP_BLOCK + e];
                g[MEAN][e] += slope * strip_mean(y, e);
                g[BEFORE][e] += slope * strip_next(y, b - 1, e);
                g[BEHIND][e] += slope * strip_next(y, b + 1, e);
                g[BIAS][e] += slope;
            }
}

/* ---- passes ---- */

static xd_result strip_forward_body(strip *s, const xd_network_call *call, xd_pass pass, float *y) {
    xd_block_view view;
    XD_TRY(xd_block_begin(s->body, pass, &view));
    if (call->samples > 0) {
        strip_hidden(s, call, (const float *)view.values[UP]);
        XD_TRY(
            strip_by_pieces(s, call->samples, s->hidden, (const float *)view.values[DOWN], (int)s->units, 1));
        XD_TRY(strip_join(s, call->samples, s->here, y));
    }
    return xd_block_end(s->body);
}

static xd_result strip_forward(void *user, const xd_network_call *call) {
    strip *s = (strip *)user;
    const xd_pass pass = nn_pass_of(call, false);
    float *y = call->keep ? s->y[call->slot] : s->whole;
    xd_block_view root;
    XD_REQUIRE(s->ctx, call->samples <= s->samples && call->slot < STRIP_SLOTS, XD_ERROR_ARGUMENT,
               "%lld samples in slot %d", (long long)call->samples, call->slot);
    XD_TRY(xd_block_begin(s->root, pass, &root));
    XD_TRY(strip_forward_body(s, call, pass, y));
    strip_predict(s, call->samples, y, root.values, (float *)call->raw);
    if (call->features) memcpy(call->features[0], y, (size_t)(call->samples * STRIP_ELEMENTS) * sizeof *y);
    return xd_block_end(s->root);
}

static xd_result strip_backward_body(strip *s, const xd_network_call *call, xd_pass pass) {
    xd_block_view view;
    XD_TRY(xd_block_begin(s->body, pass, &view));
    if (call->samples > 0) {
        const float *up = (const float *)view.values[UP];
        const size_t bytes = (size_t)(call->samples * s->elements) * sizeof(float);
        strip_hidden(s, call, up);
        strip_slopes(s, call->samples, (const float *)view.values[DOWN]);
        if (call->weights) XD_TRY(strip_body_gradient(s, call, view.gradients));
        if (call->hidden_gradient) {
            XD_TRY(strip_by_pieces(s, call->samples, s->d_hidden, up, 1, INPUTS));
            memcpy(call->hidden_gradient, s->here, bytes);
        }
    }
    return xd_block_end(s->body);
}

static xd_result strip_backward(void *user, const xd_network_call *call) {
    strip *s = (strip *)user;
    const xd_pass pass = nn_pass_of(call, true);
    const int64_t n = call->samples;
    xd_block_view root;
    memset(s->slopes, 0, (size_t)(s->samples * STRIP_ELEMENTS) * sizeof *s->slopes);
    if (call->raw_gradient && n > 0) XD_TRY(strip_join(s, n, call->raw_gradient, s->slopes));
    XD_TRY(xd_block_begin(s->root, pass, &root));
    strip_predict_slopes(s, n, root.values);
    for (int64_t i = 0; call->feature_gradients && i < n * STRIP_ELEMENTS; i++)
        s->d_y[i] += call->feature_gradients[0][i];
    XD_TRY(strip_backward_body(s, call, pass));
    if (call->weights) strip_root_gradient(s, n, s->y[call->slot], root.gradients);
    return xd_block_end(s->root);
}

xd_network strip_network(strip *s) {
    xd_network n;
    memset(&n, 0, sizeof n);
    n.user = s;
    n.predicts = XD_PREDICT_FLOW;
    n.feature_count = 1;
    n.feature_elements = &s->feature;
    n.forward = strip_forward;
    n.backward = strip_backward;
    return n;
}

/* ---- making ---- */

xd_result strip_weight(xd_block *block, const char *name, const int64_t shape[2], const xd_layout *layout,
                       float scale) {
    xd_weight_desc w;
    memset(&w, 0, sizeof w);
    w.name = name;
    w.dtype = XD_DTYPE_F32;
    w.ndim = 2;
    w.shape[0] = shape[0];
    w.shape[1] = shape[1];
    w.layout = layout;
    w.init.kind = XD_INIT_NORMAL;
    w.init.scale = scale;
    return xd_weight_add(block, &w, NULL);
}

static xd_result strip_describe(strip *s, uint64_t seed) {
    static const int64_t up[2] = { STRIP_UNITS, INPUTS }, down[2] = { STRIP_BLOCK, STRIP_UNITS },
                         row[2] = { 1, STRIP_BLOCK };
    xd_model_desc model;
    xd_block_desc body;
    memset(&model, 0, sizeof model);
    memset(&body, 0, sizeof body);
    model.seed = seed;
    model.rank = xd_comm_rank(s->cut.cp) * xd_comm_size(s->cut.tp) + xd_comm_rank(s->cut.tp);
    body.name = "body";
    body.type = "layer";
    XD_TRY(strip_layout(s->ctx, &s->cut, up, 0, &s->layouts[0]));
    XD_TRY(strip_layout(s->ctx, &s->cut, down, 1, &s->layouts[1]));
    XD_TRY(strip_layout(s->ctx, &s->cut, row, -1, &s->layouts[2]));
    XD_TRY(xd_model_create(s->ctx, &model, &s->model));
    s->root = xd_model_root(s->model);
    XD_TRY(xd_block_add(s->root, &body, &s->body));
    XD_TRY(strip_weight(s->body, "up", up, s->layouts[0], 0.3f));
    XD_TRY(strip_weight(s->body, "down", down, s->layouts[1], 0.3f));
    XD_TRY(strip_weight(s->root, "mean", row, s->layouts[2], 0.3f));
    XD_TRY(strip_weight(s->root, "before", row, s->layouts[2], 0.3f));
    XD_TRY(strip_weight(s->root, "behind", row, s->layouts[2], 0.3f));
    XD_TRY(strip_weight(s->root, "bias", row, s->layouts[2], 0.3f));
    return xd_model_seal(s->model);
}

static float *strip_floats(int64_t count) {
    return (float *)calloc((size_t)count + 1, sizeof(float));
}

static xd_result strip_take(strip *s) {
    const xd_interval pieces = eighths(s->cut.tp), blocks = eighths(s->cut.cp);
    const int64_t all = s->samples * STRIP_ELEMENTS;
    s->blocks = blocks;
    s->elements = (blocks.end - blocks.begin) * STRIP_BLOCK;
    s->units = (pieces.end - pieces.begin) * STRIP_PIECE;
    s->of_pieces.first = pieces.begin;
    s->of_pieces.count = pieces.end - pieces.begin;
    s->of_pieces.total = STRIP_PIECES;
    s->of_parts.first = blocks.begin;
    s->of_parts.count = blocks.end - blocks.begin;
    s->of_parts.total = STRIP_BLOCKS;
    for (int i = 0; i < STRIP_SLOTS; i++) s->y[i] = strip_floats(all);
    s->whole = strip_floats(all);
    s->slopes = strip_floats(all);
    s->d_y = strip_floats(all);
    s->here = strip_floats(all);
    s->gathered = strip_floats(all);
    s->hidden = strip_floats(s->samples * STRIP_BLOCKS * STRIP_UNITS);
    s->d_hidden = strip_floats(s->samples * STRIP_BLOCKS * STRIP_UNITS);
    s->sum = strip_floats(STRIP_UNITS * (INPUTS + STRIP_BLOCK));
    const xd_leaf_stack_desc of_pieces = { .leaves = s->of_pieces, .elements = s->samples * s->elements };
    const xd_leaf_stack_desc of_parts = { .leaves = s->of_parts, .elements = s->units * (INPUTS + STRIP_BLOCK) };
    XD_TRY(xd_leaf_stack_create(s->ctx, &of_pieces, &s->pieces));
    return xd_leaf_stack_create(s->ctx, &of_parts, &s->parts);
}

xd_result strip_create(xd_ctx *ctx, const strip_cut *cut, uint64_t seed, int64_t samples, strip **out) {
    strip *s = (strip *)calloc(1, sizeof *s);
    *out = s;
    s->ctx = ctx;
    s->cut = *cut;
    s->samples = samples;
    s->feature = STRIP_ELEMENTS;
    XD_TRY(strip_describe(s, seed));
    return strip_take(s);
}

void strip_destroy(strip *s) {
    if (!s) return;
    xd_leaf_stack_destroy(s->pieces);
    xd_leaf_stack_destroy(s->parts);
    xd_model_destroy(s->model);
    for (int i = 0; i < 3; i++) xd_layout_destroy(s->layouts[i]);
    for (int i = 0; i < STRIP_SLOTS; i++) free(s->y[i]);
    free(s->whole);
    free(s->slopes);
    free(s->d_y);
    free(s->here);
    free(s->gathered);
    free(s->hidden);
    free(s->d_hidden);
    free(s->sum);
    free(s);
}

xd_model *strip_model(const strip *s) {
    return s->model;
}
