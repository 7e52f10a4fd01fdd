/* images_data.c - makes data/images: trains the classifier, measures the features of the test pictures, picks samples.
 *
 *     build/images_data build/images data/images      (tools/fetch_images.sh fetches the files of the first folder)
 *
 * About half a minute on one core. The same bits on one kind of processor with one compiler. */
#include "../examples/images/classifier.h"
#include "../examples/images/dataset.h"
#include "../examples/images/frechet.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EPOCHS = 5, BATCH = 128, SAMPLES = 10, RANDOM = 5000, DRAWS = 100, SEED = 1 };
static const double peak_rate = 2e-3, last_rate = 2e-5;

typedef struct work {
    xd_ctx *ctx;
    const char *out;
    dataset train, test;
    classifier net;
    frechet_gaussian reference; /* of all test pictures */
} work;

static void path_of(char path[512], const char *directory, const char *name) {
    snprintf(path, 512, "%s/%s", directory, name);
}

/* ---- training ---- */

/* order [count]: a random permutation of 0 .. count - 1, another one for each `step`. */
static void shuffle(uint32_t step, int64_t count, int64_t *order) {
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = SEED;
    random.stream = XD_STREAM_USER;
    random.step = step;
    for (int64_t i = 0; i < count; i++) {
        const int64_t j = xd_draw_index(&random, i, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
}

static void gather(const dataset *from, const int64_t *order, int64_t count, dataset *to) {
    to->count = count;
    for (int64_t i = 0; i < count; i++) {
        memcpy(to->images + i * IMAGE_PIXELS, from->images + order[i] * IMAGE_PIXELS,
               IMAGE_PIXELS * sizeof(float));
        to->labels[i] = from->labels[order[i]];
    }
}

static xd_result train_epoch(work *w, xd_optimizer *adamw, int epoch, int64_t *order, float *gradient) {
    static float images[BATCH * IMAGE_PIXELS];
    static int32_t labels[BATCH];
    dataset batch = { 0, images, labels };
    const int64_t steps = w->train.count / BATCH;
    double loss = 0.0, sum = 0.0;
    shuffle((uint32_t)epoch, w->train.count, order);
    for (int64_t step = 0; step < steps; step++) {
        const double done = (double)(epoch * steps + step) / (double)(EPOCHS * steps);
        const double rate = last_rate + (peak_rate - last_rate) * 0.5 * (1.0 + cos(3.14159265358979 * done));
        gather(&w->train, order + step * BATCH, BATCH, &batch);
        XD_TRY(classifier_loss(w->ctx, &w->net, &batch, gradient, &loss));
        XD_TRY(xd_optimizer_set_learning_rate(adamw, rate));
        XD_TRY(xd_optimizer_step(adamw, NULL, NULL));
        sum += loss;
    }
    printf("epoch %d of %d: mean loss %.4f\n", epoch + 1, EPOCHS, sum / (double)steps);
    return XD_OK;
}

static xd_result train(work *w) {
    xd_param params[CLASSIFIER_PARAMS];
    xd_optimizer *adamw = NULL;
    int64_t *order = (int64_t *)xd_allocate(w->ctx, (size_t)w->train.count * sizeof *order);
    float *gradient = (float *)xd_allocate(w->ctx, CLASSIFIER_WEIGHTS * sizeof *gradient);
    XD_REQUIRE(w->ctx, order && gradient, XD_ERROR_MEMORY, "no room for an order of %lld pictures",
               (long long)w->train.count);
    XD_TRY(classifier_create(w->ctx, SEED, &w->net));
    memset(params, 0, sizeof params);
    for (int p = 0; p < CLASSIFIER_PARAMS; p++) {
        const classifier_param *from = &classifier_params()[p];
        params[p].name = from->name;
        params[p].value = w->net.weights + from->offset;
        params[p].gradient = gradient + from->offset;
        params[p].dtype = XD_DTYPE_F32;
        params[p].count = from->count;
        params[p].no_decay = from->dims == 1;
    }
    xd_optimizer_desc desc = xd_adamw_defaults(params, CLASSIFIER_PARAMS);
    XD_TRY(xd_optimizer_create(w->ctx, &desc, &adamw));
    for (int epoch = 0; epoch < EPOCHS; epoch++) XD_TRY(train_epoch(w, adamw, epoch, order, gradient));
    xd_optimizer_destroy(adamw);
    xd_release(w->ctx, gradient);
    xd_release(w->ctx, order);
    return XD_OK;
}

/* ---- features ---- */

/* The features of all pictures of a set; freed with xd_release. */
static xd_result features_of(work *w, const dataset *set, float **out) {
    float *features =
        (float *)xd_allocate(w->ctx, (size_t)(set->count * CLASSIFIER_FEATURES) * sizeof(float));
    XD_REQUIRE(w->ctx, features, XD_ERROR_MEMORY, "no room for features of %lld pictures",
               (long long)set->count);
    *out = features;
    return classifier_forward(w->ctx, &w->net, set->images, set->count, features, NULL);
}

static xd_result measure_test(work *w) {
    static frechet_sums sums;
    float *features = NULL;
    XD_TRY(features_of(w, &w->test, &features));
    frechet_begin(&sums, CLASSIFIER_FEATURES);
    frechet_add(&sums, features, w->test.count);
    frechet_end(&sums, &w->reference);
    xd_release(w->ctx, features);
    return XD_OK;
}

static xd_result save_classifier(work *w) {
    char path[512];
    double variance = 0.0;
    path_of(path, w->out, "classifier.safetensors");
    XD_TRY(classifier_save(w->ctx, path, &w->net)); /* rounds the weights */
    XD_TRY(measure_test(w));
    for (int i = 0; i < CLASSIFIER_FEATURES; i++)
        variance += w->reference.covariance[i * (CLASSIFIER_FEATURES + 1)] / CLASSIFIER_FEATURES;
    w->net.feature_scale = (float)((double)w->net.feature_scale / sqrt(variance));
    XD_TRY(classifier_save(w->ctx, path, &w->net));
    XD_TRY(measure_test(w));
    path_of(path, w->out, "features.safetensors");
    XD_TRY(frechet_save(w->ctx, path, &w->reference));
    return frechet_load(w->ctx, path, &w->reference);
}

/* ---- samples ---- */

/* A header of `dimensions` sizes in front of the items; returns the bytes written to `to`. */
static size_t header(uint8_t *to, int dimensions, int64_t count) {
    const size_t bytes = 4 + 4 * (size_t)dimensions;
    memset(to, 0, bytes);
    to[2] = 8;
    to[3] = (uint8_t)dimensions;
    to[6] = (uint8_t)(count >> 8);
    to[7] = (uint8_t)count;
    for (int d = 1; d < dimensions; d++) to[7 + 4 * d] = IDX_SIDE;
    return bytes;
}

/* The first SAMPLES test pictures of every class, one of each class after another, as they are in the files. */
static xd_result save_samples(work *w, const char *from) {
    enum { PIXELS = IDX_SIDE * IDX_SIDE, COUNT = SAMPLES * IMAGE_CLASSES };
    static uint8_t images[16 + COUNT * PIXELS], labels[8 + COUNT];
    int seen[IMAGE_CLASSES] = { 0 };
    char path[512], *data = NULL;
    size_t bytes = 0;
    idx_view view;
    path_of(path, from, "t10k-images-idx3-ubyte");
    XD_TRY(xd_file_load(w->ctx, path, 0, &data, &bytes));
    XD_TRY(idx_images(w->ctx, path, (const uint8_t *)data, bytes, &view));
    uint8_t *const pixels = images + header(images, 3, COUNT), *const classes =
                                                                   labels + header(labels, 1, COUNT);
    for (int64_t i = 0; i < w->test.count; i++) {
        const int label = w->test.labels[i];
        if (seen[label] == SAMPLES) continue;
        const int at = seen[label]++ * IMAGE_CLASSES + label;
        memcpy(pixels + at * PIXELS, view.items + i * PIXELS, PIXELS);
        classes[at] = (uint8_t)label;
    }
    xd_release(w->ctx, data);
    path_of(path, w->out, "sample-images-idx3-ubyte");
    XD_TRY(xd_file_save(w->ctx, path, images, sizeof images));
    path_of(path, w->out, "sample-labels-idx1-ubyte");
    return xd_file_save(w->ctx, path, labels, sizeof labels);
}

/* ---- what it came to ---- */

/* Of the `count` rows that `order` lists. */
static double distance_of(const work *w, const float *features, const int64_t *order, int64_t count) {
    static frechet_sums sums;
    static frechet_gaussian some;
    frechet_begin(&sums, CLASSIFIER_FEATURES);
    for (int64_t i = 0; i < count; i++) frechet_add(&sums, features + order[i] * CLASSIFIER_FEATURES, 1);
    frechet_end(&sums, &some);
    return frechet_distance(&some, &w->reference);
}

static xd_result report_distances(work *w) {
    double sum = 0.0, squares = 0.0;
    float *features = NULL;
    int64_t *order = (int64_t *)xd_allocate(w->ctx, (size_t)w->train.count * sizeof *order);
    XD_REQUIRE(w->ctx, order, XD_ERROR_MEMORY, "no room for an order of %lld pictures",
               (long long)w->train.count);
    XD_TRY(features_of(w, &w->train, &features));
    for (uint32_t draw = 0; draw < DRAWS; draw++) {
        shuffle(1000 + draw, w->train.count, order);
        const double distance = distance_of(w, features, order, RANDOM);
        sum += distance;
        squares += distance * distance;
    }
    printf("distance of all %lld training pictures to the test pictures: %.4f\n", (long long)w->train.count,
           distance_of(w, features, order, w->train.count));
    printf("of %d at random: %.4f, standard deviation %.4f (%d draws)\n", RANDOM, sum / DRAWS,
           sqrt((squares - sum * sum / DRAWS) / (DRAWS - 1)), DRAWS);
    xd_release(w->ctx, features);
    xd_release(w->ctx, order);
    return XD_OK;
}

static xd_result report(work *w) {
    dataset sample;
    int64_t right = 0, sample_right = 0;
    XD_TRY(classifier_correct(w->ctx, &w->net, &w->test, &right));
    XD_TRY(dataset_load(w->ctx, w->out, "sample", &sample));
    XD_TRY(classifier_correct(w->ctx, &w->net, &sample, &sample_right));
    printf("right: %lld of %lld test pictures, %lld of the %lld samples; features times %.4f\n",
           (long long)right, (long long)w->test.count, (long long)sample_right, (long long)sample.count,
           (double)w->net.feature_scale);
    dataset_free(w->ctx, &sample);
    return report_distances(w);
}

static xd_result run(work *w, const char *from) {
    XD_TRY(dataset_load(w->ctx, from, "train", &w->train));
    XD_TRY(dataset_load(w->ctx, from, "t10k", &w->test));
    XD_TRY(train(w));
    XD_TRY(save_classifier(w));
    XD_TRY(save_samples(w, from));
    return report(w);
}

int main(int argc, char **argv) {
    static work w;
    if (argc != 3) {
        fprintf(stderr, "usage: %s FASHION_MNIST_FOLDER OUT_FOLDER\n", argv[0]);
        return 2;
    }
    if (xd_ctx_create(NULL, &w.ctx) != XD_OK) return 1;
    w.out = argv[2];
    const xd_result result = run(&w, argv[1]);
    if (result != XD_OK) fprintf(stderr, "%s: %s\n", argv[0], xd_last_error(w.ctx)->message);
    dataset_free(w.ctx, &w.train);
    dataset_free(w.ctx, &w.test);
    classifier_free(w.ctx, &w.net);
    xd_ctx_destroy(w.ctx);
    return result == XD_OK ? 0 : 1;
}
