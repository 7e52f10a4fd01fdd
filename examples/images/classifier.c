/* classifier.c - the network of classifier.h. Maps are [pictures, positions, channels] in memory, so that a convolution is
 * one matrix product over patches; what fc1 reads is channels x positions, as in its file. */
#include "classifier.h"
#include "tensors.h"
#include "../nn/nn_exp.h"
#include "../nn/nn_matmul.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CONV1_WEIGHT, CONV1_BIAS, CONV2_WEIGHT, CONV2_BIAS, FC1_WEIGHT, FC1_BIAS, FC2_WEIGHT, FC2_BIAS };

enum {
    CHANNELS1 = 16,
    CHANNELS2 = 32,
    SIDE1 = IMAGE_SIDE / 2,
    SIDE2 = IMAGE_SIDE / 4,
    POSITIONS1 = SIDE1 * SIDE1,
    POSITIONS2 = SIDE2 * SIDE2,
    TAPS = 9, /* of a 3 x 3 kernel */
    FLAT = CHANNELS2 * POSITIONS2,
    PIECE = 64 /* pictures at once */
};

const classifier_param *classifier_params(void) {
    static const classifier_param params[CLASSIFIER_PARAMS] = {
        { "conv1.weight", { CHANNELS1, 1, 3, 3 }, 4, 0, 144 },
        { "conv1.bias", { CHANNELS1 }, 1, 144, 16 },
        { "conv2.weight", { CHANNELS2, CHANNELS1, 3, 3 }, 4, 160, 4608 },
        { "conv2.bias", { CHANNELS2 }, 1, 4768, 32 },
        { "fc1.weight", { CLASSIFIER_FEATURES, FLAT }, 2, 4800, 24576 },
        { "fc1.bias", { CLASSIFIER_FEATURES }, 1, 29376, 48 },
        { "fc2.weight", { IMAGE_CLASSES, CLASSIFIER_FEATURES }, 2, 29424, 480 },
        { "fc2.bias", { IMAGE_CLASSES }, 1, 29904, 10 },
    };
    return params;
}

/* ---- the object and its file ---- */

static xd_result classifier_allocate(xd_ctx *ctx, classifier *out) {
    out->feature_scale = 1.0f;
    out->weights = (float *)xd_allocate(ctx, CLASSIFIER_WEIGHTS * sizeof(float));
    XD_REQUIRE(ctx, out->weights, XD_ERROR_MEMORY, "no room for %d weights", CLASSIFIER_WEIGHTS);
    return XD_OK;
}

xd_result classifier_create(xd_ctx *ctx, uint64_t seed, classifier *out) {
    xd_philox random;
    int64_t inputs = 0;
    XD_TRY(classifier_allocate(ctx, out));
    memset(&random, 0, sizeof random);
    random.seed = seed;
    random.stream = XD_STREAM_INIT;
    xd_philox_fill_uniform(&random, 0, CLASSIFIER_WEIGHTS, out->weights);
    for (int p = 0; p < CLASSIFIER_PARAMS; p++) {
        const classifier_param *param = &classifier_params()[p];
        if (param->dims > 1) inputs = param->count / param->shape[0]; /* the bias comes after its weight */
        const float bound = 1.0f / sqrtf((float)inputs);
        float *values = out->weights + param->offset;
        for (int64_t i = 0; i < param->count; i++) values[i] = bound * (2.0f * values[i] - 1.0f);
    }
    return XD_OK;
}

void classifier_free(xd_ctx *ctx, classifier *c) {
    xd_release(ctx, c->weights);
    memset(c, 0, sizeof *c);
}

/* The tensors of the file; the last is the scale. */
static void classifier_entries(xd_weights_entry entries[CLASSIFIER_PARAMS + 1]) {
    static const int64_t one = 1;
    for (int p = 0; p < CLASSIFIER_PARAMS; p++) {
        const classifier_param *param = &classifier_params()[p];
        const xd_weights_entry entry = { param->name, XD_DTYPE_BF16, param->dims, param->shape };
        entries[p] = entry;
    }
    const xd_weights_entry scale = { "feature_scale", XD_DTYPE_F32, 1, &one };
    entries[CLASSIFIER_PARAMS] = scale;
}

xd_result classifier_load(xd_ctx *ctx, const char *path, classifier *out) {
    xd_weights_entry entries[CLASSIFIER_PARAMS + 1];
    xd_weights_desc desc;
    xd_weights *file = NULL;
    classifier c;
    classifier_entries(entries);
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    XD_TRY(xd_weights_open(ctx, &desc, &file));
    xd_result result = classifier_allocate(ctx, &c);
    for (int p = 0; p < CLASSIFIER_PARAMS && result == XD_OK; p++)
        result = tensors_read(ctx, path, file, &entries[p], c.weights + classifier_params()[p].offset);
    if (result == XD_OK)
        result = tensors_read(ctx, path, file, &entries[CLASSIFIER_PARAMS], &c.feature_scale);
    xd_weights_close(file);
    if (result == XD_OK)
        *out = c;
    else
        classifier_free(ctx, &c);
    return result;
}

xd_result classifier_save(xd_ctx *ctx, const char *path, classifier *c) {
    xd_weights_entry entries[CLASSIFIER_PARAMS + 1];
    const float *values[CLASSIFIER_PARAMS + 1];
    xd_weights_writer_desc desc;
    classifier_entries(entries);
    for (int p = 0; p < CLASSIFIER_PARAMS; p++) values[p] = c->weights + classifier_params()[p].offset;
    values[CLASSIFIER_PARAMS] = &c->feature_scale;
    for (int i = 0; i < CLASSIFIER_WEIGHTS; i++)
        c->weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(c->weights[i]));
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    desc.entries = entries;
    desc.entry_count = CLASSIFIER_PARAMS + 1;
    return tensors_save(ctx, &desc, values);
}

/* ---- layers ---- */

/* Patches of 3 x 3 with stride 2 and a zero edge of one, as rows for a matrix product: element (channel, ky, kx).
 *   map [pictures, 2 side, 2 side, channels] -> patches [pictures, side, side, channels * TAPS] */
static void conv_gather(int64_t pictures, int side, int channels, const float *map, float *patches) {
    for (int64_t row = 0; row < pictures * side * side; row++) {
        const int y0 = 2 * (int)(row / side % side) - 1, x0 = 2 * (int)(row % side) - 1;
        const float *picture = map + row / (side * side) * (4 * side * side) * channels;
        for (int tap = 0; tap < TAPS; tap++) {
            const int y = y0 + tap / 3, x = x0 + tap % 3;
            const bool inside = y >= 0 && x >= 0; /* with stride 2 the far edge is never touched */
            const float *from = picture + (inside ? (y * 2 * side + x) * channels : 0);
            float *to = patches + row * channels * TAPS + tap;
            for (int c = 0; c < channels; c++) to[c * TAPS] = inside ? from[c] : 0.0f;
        }
    }
}

/* The transpose of that: map = sum of the patches' elements that were read from there. */
static void conv_scatter(int64_t pictures, int side, int channels, const float *patches, float *map) {
    memset(map, 0, (size_t)(pictures * 4 * side * side * channels) * sizeof *map);
    for (int64_t row = 0; row < pictures * side * side; row++) {
        const int y0 = 2 * (int)(row / side % side) - 1, x0 = 2 * (int)(row % side) - 1;
        float *picture = map + row / (side * side) * (4 * side * side) * channels;
        for (int tap = 0; tap < TAPS; tap++) {
            const int y = y0 + tap / 3, x = x0 + tap % 3;
            if (y < 0 || x < 0) continue;
            float *to = picture + (y * 2 * side + x) * channels;
            const float *from = patches + row * channels * TAPS + tap;
            for (int c = 0; c < channels; c++) to[c] += from[c * TAPS];
        }
    }
}

/* out [rows, outputs] = in [rows, inputs] weight^T + bias */
static void linear(int64_t rows, const float *in, const classifier *c, int which, float *out) {
    const classifier_param *w = &classifier_params()[which], *b = w + 1;
    const int64_t outputs = w->shape[0], inputs = w->count / outputs;
    for (int64_t r = 0; r < rows; r++)
        memcpy(out + r * outputs, c->weights + b->offset, (size_t)outputs * sizeof *out);
    nn_matmul(nn_dense(in, rows, inputs), nn_transpose(nn_dense(c->weights + w->offset, outputs, inputs)),
              out, outputs, true);
}

/* The gradients of weight and bias are overwritten, as is d_in unless it is NULL. */
static void linear_backward(int64_t rows, const float *in, const classifier *c, int which, const float *d_out,
                            float *d_weights, float *d_in) {
    const classifier_param *w = &classifier_params()[which], *b = w + 1;
    const int64_t outputs = w->shape[0], inputs = w->count / outputs;
    float *d_bias = d_weights + b->offset;
    memset(d_bias, 0, (size_t)outputs * sizeof *d_bias);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) d_bias[o] += d_out[r * outputs + o];
    nn_matmul(nn_transpose(nn_dense(d_out, rows, outputs)), nn_dense(in, rows, inputs), d_weights + w->offset,
              inputs, false);
    if (d_in)
        nn_matmul(nn_dense(d_out, rows, outputs), nn_dense(c->weights + w->offset, outputs, inputs), d_in,
                  inputs, false);
}

/* y = x sigmoid(x); y is not x. */
static void silu(int64_t count, const float *x, float *y) {
    nn_sigmoid(count, x, y);
    for (int64_t i = 0; i < count; i++) y[i] *= x[i];
}

/* d *= the derivative of y = x s, s = sigmoid(x), which is s + y (1 - s); room [count] is overwritten. */
static void silu_backward(int64_t count, const float *x, float *room, float *d) {
    nn_sigmoid(count, x, room);
    for (int64_t i = 0; i < count; i++) d[i] *= room[i] * (1.0f + x[i] * (1.0f - room[i]));
}

/* [pictures, rows, columns] -> [pictures, columns, rows] */
static void turn(int64_t pictures, int rows, int columns, const float *in, float *out) {
    for (int64_t p = 0; p < pictures; p++, in += rows * columns, out += rows * columns)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) out[c * rows + r] = in[r * columns + c];
}

/* ---- passes ---- */

/* What a pass keeps of every picture; x before an activation, y after it. */
typedef struct classifier_pass {
    int64_t pictures;
    float *memory;
    float *patches1, *x1, *y1, *patches2, *x2, *y2, *flat, *x3, *y3, *logits;
} classifier_pass;

static xd_result pass_create(xd_ctx *ctx, int64_t pictures, classifier_pass *p) {
    const int64_t sizes[] = { POSITIONS1 * TAPS,
                              POSITIONS1 * CHANNELS1,
                              POSITIONS1 * CHANNELS1,
                              POSITIONS2 * CHANNELS1 * TAPS,
                              FLAT,
                              FLAT,
                              FLAT,
                              CLASSIFIER_FEATURES,
                              CLASSIFIER_FEATURES,
                              IMAGE_CLASSES };
    float **const parts[] = { &p->patches1, &p->x1,   &p->y1, &p->patches2, &p->x2,
                              &p->y2,       &p->flat, &p->x3, &p->y3,       &p->logits };
    int64_t floats = 0;
    for (int i = 0; i < 10; i++) floats += sizes[i];
    p->pictures = pictures;
    p->memory = (float *)xd_allocate(ctx, (size_t)(floats * pictures) * sizeof(float) + 1);
    XD_REQUIRE(ctx, p->memory, XD_ERROR_MEMORY, "no room for a pass over %lld pictures", (long long)pictures);
    float *at = p->memory;
    for (int i = 0; i < 10; i++) {
        *parts[i] = at;
        at += sizes[i] * pictures;
    }
    return XD_OK;
}

static void pass_forward(const classifier *c, const float *images, classifier_pass *p) {
    const int64_t n = p->pictures;
    conv_gather(n, SIDE1, 1, images, p->patches1);
    linear(n * POSITIONS1, p->patches1, c, CONV1_WEIGHT, p->x1);
    silu(n * POSITIONS1 * CHANNELS1, p->x1, p->y1);
    conv_gather(n, SIDE2, CHANNELS1, p->y1, p->patches2);
    linear(n * POSITIONS2, p->patches2, c, CONV2_WEIGHT, p->x2);
    silu(n * FLAT, p->x2, p->y2);
    turn(n, POSITIONS2, CHANNELS2, p->y2, p->flat);
    linear(n, p->flat, c, FC1_WEIGHT, p->x3);
    silu(n * CLASSIFIER_FEATURES, p->x3, p->y3);
    linear(n, p->y3, c, FC2_WEIGHT, p->logits);
}

/* `logits` holds their gradient; each y becomes room or a gradient once nothing reads it any more. */
static void pass_backward(const classifier *c, classifier_pass *p, float *d_weights, float *d_patches2) {
    const int64_t n = p->pictures;
    float *const d3 = p->y3, *const d2 = p->y2, *const d1 = p->y1;
    float *const room = d_patches2; /* written after its last use as room */
    linear_backward(n, p->y3, c, FC2_WEIGHT, p->logits, d_weights, room);
    memcpy(d3, room, (size_t)(n * CLASSIFIER_FEATURES) * sizeof *d3);
    silu_backward(n * CLASSIFIER_FEATURES, p->x3, room, d3);
    linear_backward(n, p->flat, c, FC1_WEIGHT, d3, d_weights, room);
    turn(n, CHANNELS2, POSITIONS2, room, d2);
    silu_backward(n * FLAT, p->x2, room, d2);
    linear_backward(n * POSITIONS2, p->patches2, c, CONV2_WEIGHT, d2, d_weights, d_patches2);
    conv_scatter(n, SIDE2, CHANNELS1, d_patches2, d1);
    silu_backward(n * POSITIONS1 * CHANNELS1, p->x1, room, d1);
    linear_backward(n * POSITIONS1, p->patches1, c, CONV1_WEIGHT, d1, d_weights, NULL);
}

xd_result classifier_forward(xd_ctx *ctx, const classifier *c, const float *images, int64_t count,
                             float *features, float *logits) {
    classifier_pass pass;
    XD_TRY(pass_create(ctx, PIECE, &pass));
    for (int64_t first = 0; first < count; first += PIECE) {
        int64_t n = count - first;
        if (n > PIECE) n = PIECE;
        pass.pictures = n;
        pass_forward(c, images + first * IMAGE_PIXELS, &pass);
        for (int64_t i = 0; features && i < n * CLASSIFIER_FEATURES; i++)
            features[first * CLASSIFIER_FEATURES + i] = c->feature_scale * pass.x3[i];
        if (logits)
            memcpy(logits + first * IMAGE_CLASSES, pass.logits, (size_t)(n * IMAGE_CLASSES) * sizeof *logits);
    }
    xd_release(ctx, pass.memory);
    return XD_OK;
}

/* Cross-entropy of one row, whose logits become their gradient times `scale`. */
static double cross_entropy(float *logits, int32_t label, float scale) {
    double sum = 0.0, highest = (double)logits[0];
    for (int i = 1; i < IMAGE_CLASSES; i++) highest = fmax(highest, (double)logits[i]);
    for (int i = 0; i < IMAGE_CLASSES; i++) sum += exp((double)logits[i] - highest);
    const double log_sum = highest + log(sum), loss = log_sum - (double)logits[label];
    for (int i = 0; i < IMAGE_CLASSES; i++)
        logits[i] = scale * ((float)exp((double)logits[i] - log_sum) - (i == label ? 1.0f : 0.0f));
    return loss;
}

xd_result classifier_loss(xd_ctx *ctx, const classifier *c, const dataset *batch, float *d_weights,
                          double *loss) {
    const int64_t n = batch->count;
    const size_t room = (size_t)(n * POSITIONS2 * CHANNELS1 * TAPS) * sizeof(float);
    classifier_pass pass;
    double sum = 0.0;
    XD_TRY(pass_create(ctx, n, &pass));
    float *d_patches2 = (float *)xd_allocate(ctx, room + 1);
    if (!d_patches2) {
        xd_release(ctx, pass.memory);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the gradient of %lld pictures", (long long)n);
    }
    pass_forward(c, batch->images, &pass);
    for (int64_t i = 0; i < n; i++)
        sum += cross_entropy(pass.logits + i * IMAGE_CLASSES, batch->labels[i], 1.0f / (float)n);
    pass_backward(c, &pass, d_weights, d_patches2);
    *loss = sum / (double)n;
    xd_release(ctx, d_patches2);
    xd_release(ctx, pass.memory);
    return XD_OK;
}

xd_result classifier_correct(xd_ctx *ctx, const classifier *c, const dataset *set, int64_t *correct) {
    float *logits = (float *)xd_allocate(ctx, (size_t)(set->count * IMAGE_CLASSES) * sizeof *logits + 1);
    XD_REQUIRE(ctx, logits, XD_ERROR_MEMORY, "no room for the logits of %lld pictures",
               (long long)set->count);
    const xd_result result = classifier_forward(ctx, c, set->images, set->count, NULL, logits);
    int64_t right = 0;
    for (int64_t i = 0; i < set->count; i++) {
        const float *row = logits + i * IMAGE_CLASSES;
        int best = 0;
        for (int k = 1; k < IMAGE_CLASSES; k++) best = row[k] > row[best] ? k : best;
        right += best == set->labels[i];
    }
    xd_release(ctx, logits);
    if (result == XD_OK) *correct = right;
    return result;
}
