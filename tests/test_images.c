/* test_images.c - examples/images: idx files, the classifier and its features; and data/images. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "images_scene.h"

#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/images/classifier.c"
#include "../examples/images/dataset.c"
#include "../examples/images/frechet.c"
#define IMAGES_REAL_SPLIT "sample" /* the training set is not committed */
#include "../examples/images/real_pictures.c"
#include "../examples/images/tensors.c"

/* ---- idx files ---- */

enum { PIXELS = IDX_SIDE * IDX_SIDE, FILE_ITEMS = 3, IMAGES_BYTES = 16 + FILE_ITEMS * PIXELS };

static uint8_t image_file[IMAGES_BYTES], label_file[8 + FILE_ITEMS];

static void put_number(uint8_t *at, uint32_t value) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void make_files(void) {
    put_number(image_file, 0x803);
    put_number(image_file + 4, FILE_ITEMS);
    put_number(image_file + 8, 28);
    put_number(image_file + 12, 28);
    for (int i = 0; i < FILE_ITEMS * PIXELS; i++) image_file[16 + i] = (uint8_t)(i * 37 + i / 251);
    put_number(label_file, 0x801);
    put_number(label_file + 4, FILE_ITEMS);
    for (int i = 0; i < FILE_ITEMS; i++) label_file[8 + i] = (uint8_t)(3 * i);
}

static xd_result parse_images(xd_ctx *ctx, size_t bytes) {
    idx_view view;
    return idx_images(ctx, "some file", image_file, bytes, &view);
}

static xd_result parse_labels(xd_ctx *ctx, size_t bytes) {
    idx_view view;
    return idx_labels(ctx, "some file", label_file, bytes, &view);
}

XD_TEST(idx_files_are_found_as_they_are) {
    xd_ctx *ctx = new_ctx();
    idx_view images, labels;
    make_files();
    CHECK_EQ_INT(idx_images(ctx, "i", image_file, sizeof image_file, &images), XD_OK);
    CHECK_EQ_INT(idx_labels(ctx, "l", label_file, sizeof label_file, &labels), XD_OK);
    CHECK_EQ_INT(images.count, FILE_ITEMS);
    CHECK(images.items == image_file + 16);
    CHECK_EQ_INT(labels.count, FILE_ITEMS);
    CHECK(labels.items == label_file + 8);
    put_number(image_file + 4, 0); /* a file without pictures is a file */
    CHECK_EQ_INT(idx_images(ctx, "i", image_file, 16, &images), XD_OK);
    CHECK_EQ_INT(images.count, 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(an_idx_file_of_any_other_length_is_refused) {
    xd_ctx *ctx = new_ctx();
    int accepted = 0;
    make_files();
    for (size_t bytes = 0; bytes < sizeof image_file; bytes++) /* every access is inside: sanitizers watch */
        accepted += parse_images(ctx, bytes) != XD_ERROR_FORMAT;
    for (size_t bytes = 0; bytes < sizeof label_file; bytes++)
        accepted += parse_labels(ctx, bytes) != XD_ERROR_FORMAT;
    CHECK_EQ_INT(accepted, 0);
    CHECK_EQ_INT(parse_images(ctx, 15), XD_ERROR_FORMAT);
    CHECK(says(ctx, "some file: 15 bytes, the header alone has 16"));
    CHECK_EQ_INT(parse_images(ctx, 1000), XD_ERROR_FORMAT);
    CHECK(says(ctx, "3 items make 2368 bytes, but it has 1000"));
    put_number(label_file + 4, FILE_ITEMS - 1);
    CHECK_EQ_INT(parse_labels(ctx, sizeof label_file), XD_ERROR_FORMAT);
    CHECK(says(ctx, "2 items make 10 bytes, but it has 11"));
    xd_ctx_destroy(ctx);
}

XD_TEST(counts_that_lie_are_refused_however_large) {
    static const uint32_t counts[] = { 0, 2, 4, 5478280, 0x7fffffff, 0x80000000u, 0xffffffffu };
    xd_ctx *ctx = new_ctx();
    make_files();
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        put_number(image_file + 4, counts[i]);
        put_number(label_file + 4, counts[i]);
        CHECK_EQ_INT(parse_images(ctx, sizeof image_file), XD_ERROR_FORMAT);
        CHECK_EQ_INT(parse_labels(ctx, sizeof label_file), XD_ERROR_FORMAT);
    }
    CHECK(says(ctx, "4294967295 items make 4294967303 bytes, but it has 11"));
    xd_ctx_destroy(ctx);
}

XD_TEST(other_kinds_of_idx_files_are_refused_with_both_numbers) {
    xd_ctx *ctx = new_ctx();
    idx_view view;
    make_files();
    put_number(image_file, 0xd03); /* floats */
    CHECK_EQ_INT(parse_images(ctx, sizeof image_file), XD_ERROR_FORMAT);
    CHECK(says(ctx, "0x00000d03, not 0x00000803"));
    make_files();
    CHECK_EQ_INT(idx_labels(ctx, "pictures", image_file, sizeof image_file, &view), XD_ERROR_FORMAT);
    CHECK(says(ctx, "pictures: the magic number is 0x00000803, not 0x00000801"));
    put_number(image_file, 0x1f8b0800);
    CHECK_EQ_INT(parse_images(ctx, sizeof image_file), XD_ERROR_FORMAT);
    CHECK(says(ctx, "compressed"));
    make_files();
    put_number(image_file + 8, 32);
    CHECK_EQ_INT(parse_images(ctx, sizeof image_file), XD_ERROR_FORMAT);
    CHECK(says(ctx, "dimension 1 of the pictures is 32, not 28"));
    make_files();
    put_number(image_file + 12, 0);
    CHECK_EQ_INT(parse_images(ctx, sizeof image_file), XD_ERROR_FORMAT);
    CHECK(says(ctx, "dimension 2 of the pictures is 0, not 28"));
    label_file[9] = 10;
    CHECK_EQ_INT(parse_labels(ctx, sizeof label_file), XD_ERROR_FORMAT);
    CHECK(says(ctx, "label 1 is 10, there are 10 classes"));
    xd_ctx_destroy(ctx);
}

static xd_result load_written(xd_ctx *ctx, size_t labels, dataset *out) {
    char images[220], classes[220], split[64];
    snprintf(images, sizeof images, "%s", scratch("images-idx3-ubyte"));
    snprintf(classes, sizeof classes, "%s", scratch("labels-idx1-ubyte"));
    CHECK_EQ_INT(xd_file_save(ctx, images, image_file, sizeof image_file), XD_OK);
    put_number(label_file + 4, (uint32_t)labels);
    CHECK_EQ_INT(xd_file_save(ctx, classes, label_file, 8 + labels), XD_OK);
    snprintf(split, sizeof split, "xdistill-images-%ld", (long)getpid());
    const xd_result result = dataset_load(ctx, "/tmp", split, out);
    CHECK(remove(images) == 0 && remove(classes) == 0);
    return result;
}

XD_TEST(pictures_become_means_of_four_pixels_with_a_black_edge) {
    xd_ctx *ctx = new_ctx();
    dataset set;
    make_files();
    CHECK_EQ_INT(load_written(ctx, FILE_ITEMS, &set), XD_OK);
    CHECK_EQ_INT(set.count, FILE_ITEMS);
    for (int i = 0; i < FILE_ITEMS; i++) {
        const uint8_t *file = image_file + 16 + i * PIXELS;
        CHECK_EQ_INT(set.labels[i], 3 * i);
        for (int y = 0; y < 16; y++)
            for (int x = 0; x < 16; x++) {
                const bool edge = y == 0 || x == 0 || y == 15 || x == 15;
                const uint8_t *at = file + (2 * y - 2) * 28 + 2 * x - 2;
                const double mean = edge ? 0.0 : (at[0] + at[1] + at[28] + at[29]) / 4.0;
                CHECK_NEAR(set.images[i * 256 + y * 16 + x], mean / 127.5 - 1.0, 2e-7);
            }
    }
    dataset_free(ctx, &set);
    memset(image_file + 16, 255, PIXELS);
    CHECK_EQ_INT(load_written(ctx, FILE_ITEMS, &set), XD_OK);
    CHECK(set.images[0] == -1.0f && set.images[17] == 1.0f);
    dataset_free(ctx, &set);
    xd_ctx_destroy(ctx);
}

XD_TEST(pictures_without_as_many_labels_are_refused) {
    xd_ctx *ctx = new_ctx();
    dataset set;
    make_files();
    CHECK_EQ_INT(load_written(ctx, FILE_ITEMS - 1, &set), XD_ERROR_FORMAT);
    CHECK(says(ctx, "3 pictures, but 2 labels"));
    CHECK(set.images == NULL && set.labels == NULL && set.count == 0);
    CHECK_EQ_INT(dataset_load(ctx, "/tmp/there/is/no/such", "t10k", &set), XD_ERROR_IO);
    CHECK(says(ctx, "/tmp/there/is/no/such/t10k-images-idx3-ubyte"));
    xd_ctx_destroy(ctx);
}

/* ---- the classifier ---- */

enum { FEW = 3 };

/* Random weights three times as large as one starts with, so that the curves of SiLU matter, and random pictures. */
static void classifier_scene(xd_ctx *ctx, classifier *c, dataset *batch, int count) {
    static float images[200 * IMAGE_PIXELS];
    static int32_t labels[200];
    CHECK_EQ_INT(classifier_create(ctx, 5, c), XD_OK);
    for (int i = 0; i < CLASSIFIER_WEIGHTS; i++) c->weights[i] *= 3.0f;
    normal(6, (int64_t)count * IMAGE_PIXELS, images);
    for (int i = 0; i < count; i++) labels[i] = (7 * i + 2) % IMAGE_CLASSES;
    batch->count = count;
    batch->images = images;
    batch->labels = labels;
}

static double slow_silu(double x) {
    return x / (1.0 + exp(-x));
}

/* A convolution as it is defined, with SiLU: maps are [channels, side, side], the result [outputs, side / 2, side / 2]. */
static void slow_conv(const classifier *c, int which, int side, const double *in, double *out) {
    const classifier_param *w = &classifier_params()[which];
    const int outputs = (int)w->shape[0], inputs = (int)w->shape[1];
    const float *weight = c->weights + w->offset, *bias = c->weights + w[1].offset;
    for (int o = 0; o < outputs; o++)
        for (int p = 0; p < side * side / 4; p++) {
            double sum = (double)bias[o];
            for (int i = 0; i < inputs; i++)
                for (int k = 0; k < 9; k++) {
                    const int y = 2 * (p / (side / 2)) + k / 3 - 1, x = 2 * (p % (side / 2)) + k % 3 - 1;
                    if (y < 0 || x < 0 || y >= side || x >= side) continue;
                    sum += (double)weight[(o * inputs + i) * 9 + k] * in[(i * side + y) * side + x];
                }
            out[o * side * side / 4 + p] = slow_silu(sum);
        }
}

static void slow_linear(const classifier *c, int which, const double *in, double *out) {
    const classifier_param *w = &classifier_params()[which];
    for (int64_t o = 0; o < w->shape[0]; o++) {
        out[o] = (double)c->weights[w[1].offset + o];
        for (int64_t i = 0; i < w->shape[1]; i++)
            out[o] += (double)c->weights[w->offset + o * w->shape[1] + i] * in[i];
    }
}

XD_TEST(the_classifier_is_the_network_that_its_header_describes) {
    xd_ctx *ctx = new_ctx();
    classifier c;
    dataset batch;
    float features[FEW * 48], logits[FEW * 10];
    classifier_scene(ctx, &c, &batch, FEW);
    c.feature_scale = 0.25f;
    CHECK_EQ_INT(classifier_forward(ctx, &c, batch.images, FEW, features, logits), XD_OK);
    for (int n = 0; n < FEW; n++) {
        static double map0[256], map1[1024], map2[512];
        double hidden[48], out[10];
        for (int i = 0; i < 256; i++) map0[i] = (double)batch.images[n * 256 + i];
        slow_conv(&c, CONV1_WEIGHT, 16, map0, map1);
        slow_conv(&c, CONV2_WEIGHT, 8, map1, map2);
        slow_linear(&c, FC1_WEIGHT, map2, hidden);
        for (int i = 0; i < 48; i++) CHECK_NEAR(features[n * 48 + i], 0.25 * hidden[i], 1e-5);
        for (int i = 0; i < 48; i++) hidden[i] = slow_silu(hidden[i]);
        slow_linear(&c, FC2_WEIGHT, hidden, out);
        for (int i = 0; i < 10; i++) CHECK_NEAR(logits[n * 10 + i], out[i], 1e-4);
    }
    int64_t total = 0;
    for (int p = 0; p < CLASSIFIER_PARAMS; p++) {
        int64_t count = 1;
        for (int d = 0; d < classifier_params()[p].dims; d++) count *= classifier_params()[p].shape[d];
        CHECK_EQ_INT(classifier_params()[p].count, count);
        CHECK_EQ_INT(classifier_params()[p].offset, total);
        total += count;
    }
    CHECK_EQ_INT(total, CLASSIFIER_WEIGHTS);
    classifier_free(ctx, &c);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_picture_has_the_same_bits_in_any_company) {
    xd_ctx *ctx = new_ctx();
    classifier c;
    dataset batch;
    static float all[200 * 48], one[48], logits[200 * 10], one_logits[10];
    classifier_scene(ctx, &c, &batch, 200);
    CHECK_EQ_INT(classifier_forward(ctx, &c, batch.images, 200, all, logits), XD_OK);
    for (int i = 0; i < 200; i += 33) {
        CHECK_EQ_INT(classifier_forward(ctx, &c, batch.images + i * 256, 1, one, one_logits), XD_OK);
        CHECK(memcmp(one, all + i * 48, sizeof one) == 0);
        CHECK(memcmp(one_logits, logits + i * 10, sizeof one_logits) == 0);
    }
    CHECK_EQ_INT(classifier_forward(ctx, &c, NULL, 0, NULL, NULL), XD_OK);
    classifier_free(ctx, &c);
    xd_ctx_destroy(ctx);
}

/* The slope of the loss along a direction of unit length, by a central difference of fourth order. */
static double slope(xd_ctx *ctx, classifier *c, const dataset *batch, const float *direction) {
    static float start[CLASSIFIER_WEIGHTS], unused[CLASSIFIER_WEIGHTS];
    static const double at[4] = { -2.0, -1.0, 1.0, 2.0 }, factor[4] = { 1.0, -8.0, 8.0, -1.0 };
    const double step = 2e-2;
    double sum = 0.0;
    memcpy(start, c->weights, sizeof start);
    for (int k = 0; k < 4; k++) {
        double loss = 0.0;
        for (int i = 0; i < CLASSIFIER_WEIGHTS; i++)
            c->weights[i] = (float)((double)start[i] + at[k] * step * (double)direction[i]);
        CHECK_EQ_INT(classifier_loss(ctx, c, batch, unused, &loss), XD_OK);
        sum += factor[k] * loss;
    }
    memcpy(c->weights, start, sizeof start);
    return sum / (12.0 * step);
}

XD_TEST(gradients_of_the_classifier_are_slopes_of_its_loss) {
    xd_ctx *ctx = new_ctx();
    classifier c;
    dataset batch;
    static float gradient[CLASSIFIER_WEIGHTS], direction[CLASSIFIER_WEIGHTS];
    double loss = 0.0;
    classifier_scene(ctx, &c, &batch, FEW);
    for (int i = 0; i < CLASSIFIER_WEIGHTS; i++) gradient[i] = NAN; /* is overwritten */
    CHECK_EQ_INT(classifier_loss(ctx, &c, &batch, gradient, &loss), XD_OK);
    for (int p = 0; p < CLASSIFIER_PARAMS; p++) {
        const classifier_param *param = &classifier_params()[p];
        for (int round = 0; round < 3;
             round++) { /* along the gradient, which is the steepest; then at random */
            double length = 0.0, expected = 0.0;
            memset(direction, 0, sizeof direction);
            if (round) normal((uint64_t)(10 * p + round), param->count, direction + param->offset);
            if (!round)
                memcpy(direction + param->offset, gradient + param->offset,
                       (size_t)param->count * sizeof *direction);
            for (int i = 0; i < CLASSIFIER_WEIGHTS; i++)
                length += (double)direction[i] * (double)direction[i];
            for (int i = 0; i < CLASSIFIER_WEIGHTS; i++) {
                direction[i] = (float)((double)direction[i] / sqrt(length));
                expected += (double)direction[i] * (double)gradient[i];
            }
            if (!round) CHECK(expected > 0.01);
            CHECK_NEAR(slope(ctx, &c, &batch, direction), expected, 1e-3 * fabs(expected) + 5e-5);
        }
    }
    classifier_free(ctx, &c);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_saved_classifier_is_what_it_measures_afterwards) {
    xd_ctx *ctx = new_ctx();
    classifier c, again;
    dataset batch;
    float before[FEW * 48], after[FEW * 48];
    const char *path = scratch("classifier.safetensors");
    classifier_scene(ctx, &c, &batch, FEW);
    c.feature_scale = 0.3f;
    CHECK_EQ_INT(classifier_save(ctx, path, &c), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &again), XD_OK);
    CHECK(memcmp(c.weights, again.weights, CLASSIFIER_WEIGHTS * sizeof(float)) == 0);
    CHECK_EQ_INT(classifier_forward(ctx, &c, batch.images, FEW, before, NULL), XD_OK);
    CHECK_EQ_INT(classifier_forward(ctx, &again, batch.images, FEW, after, NULL), XD_OK);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK(remove(path) == 0);
    classifier_free(ctx, &c);
    classifier_free(ctx, &again);
    xd_ctx_destroy(ctx);
}

XD_TEST(files_of_another_network_are_refused_with_names_and_sizes) {
    const int64_t shape[2] = { 48, 47 };
    static const float zeros[48 * 47];
    const float *const values[1] = { zeros };
    xd_ctx *ctx = new_ctx();
    const char *path = scratch("other.safetensors");
    xd_weights_entry entry = { "conv1.weight", XD_DTYPE_BF16, 2, shape };
    xd_weights_writer_desc desc;
    classifier c;
    frechet_gaussian g;
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    desc.entries = &entry;
    desc.entry_count = 1;
    CHECK_EQ_INT(tensors_save(ctx, &desc, values), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &c), XD_ERROR_SHAPE);
    CHECK(says(ctx, "conv1.weight is [48, 47], not [16, 1, 3, 3]"));
    CHECK_EQ_INT(frechet_load(ctx, path, &g), XD_ERROR_MISSING);
    entry.dtype = XD_DTYPE_F32;
    CHECK_EQ_INT(tensors_save(ctx, &desc, values), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &c), XD_ERROR_DTYPE);
    CHECK(says(ctx, "conv1.weight is F32, not BF16"));
    entry.name = "covariance";
    CHECK_EQ_INT(tensors_save(ctx, &desc, values), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &c), XD_ERROR_MISSING);
    CHECK(says(ctx, "has no tensor conv1.weight"));
    entry.dtype = XD_DTYPE_I64;
    CHECK_EQ_INT(tensors_save(ctx, &desc, values), XD_ERROR_DTYPE);
    CHECK(remove(path) == 0);
    xd_ctx_destroy(ctx);
}

/* ---- data/images ---- */

XD_TEST(the_committed_classifier_knows_the_committed_pictures) {
    xd_ctx *ctx = new_ctx();
    dataset set;
    classifier c;
    int64_t right = 0;
    CHECK_EQ_INT(dataset_load(ctx, "data/images", "sample", &set), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, "data/images/classifier.safetensors", &c), XD_OK);
    CHECK_EQ_INT(set.count, 100);
    for (int64_t i = 0; i < set.count; i++) CHECK_EQ_INT(set.labels[i], i % IMAGE_CLASSES);
    CHECK_EQ_INT(classifier_correct(ctx, &c, &set, &right), XD_OK);
    CHECK(right >= 80); /* 85 */
    for (int64_t i = 0; i < set.count; i++) set.labels[i] = (set.labels[i] + 1) % IMAGE_CLASSES;
    CHECK_EQ_INT(classifier_correct(ctx, &c, &set, &right), XD_OK);
    CHECK(right < 20);
    dataset_free(ctx, &set);
    classifier_free(ctx, &c);
    xd_ctx_destroy(ctx);
}

XD_TEST(real_pictures_are_drawn_from_their_class) {
    xd_ctx *ctx = new_ctx();
    real_pictures real;
    int drawn[100] = { 0 }, different = 0;
    CHECK_EQ_INT(real_pictures_load(ctx, "data/images", &real), XD_OK);
    for (int64_t i = 0; i < 100; i++) { /* ten of each, in the order of the file */
        CHECK_EQ_INT(real.order[i], i % 10 * 10 + i / 10);
        CHECK_EQ_INT(real.set.labels[real.order[i]], i / 10);
    }
    for (int i = 0; i <= IMAGE_CLASSES; i++) CHECK_EQ_INT(real.begin[i], 10 * i);
    for (int i = 0; i < 2000; i++) {
        const xd_philox random = { 9, XD_STREAM_USER, 0, (uint32_t)i, 4 };
        const int64_t at = (real_pictures_draw(&real, i % 10, &random) - real.set.images) / IMAGE_PIXELS;
        CHECK_EQ_INT(real.set.labels[at], i % 10);
        drawn[at]++;
    }
    for (int i = 0; i < 100; i++) different += drawn[i] > 5 && drawn[i] < 45; /* 20 on average */
    CHECK_EQ_INT(different, 100);
    real_pictures_free(ctx, &real);
    xd_ctx_destroy(ctx);
}

XD_TEST(real_pictures_that_are_not_there_are_asked_for) {
    xd_ctx *ctx = new_ctx();
    real_pictures real;
    CHECK_EQ_INT(real_pictures_load(ctx, "/tmp/there/is/no/such", &real), XD_ERROR_IO);
    CHECK(says(ctx, "tools/fetch_images.sh puts them into build/images"));
    CHECK(says(ctx, "/tmp/there/is/no/such/sample-images-idx3-ubyte"));
    CHECK(real.order == NULL && real.set.images == NULL);
    memset(&real, 0, sizeof real);
    make_files();
    CHECK_EQ_INT(load_written(ctx, FILE_ITEMS, &real.set), XD_OK);
    CHECK_EQ_INT(real_pictures_sort(ctx, "some folder", &real), XD_ERROR_FORMAT);
    CHECK(says(ctx, "3 real pictures in some folder, but none of class 1"));
    real_pictures_free(ctx, &real);
    xd_ctx_destroy(ctx);
}

static frechet_gaussian ga, gb;
static frechet_sums sums_a;

static double distance_to_reference(xd_ctx *ctx, const classifier *c, const float *images) {
    static float features[100 * CLASSIFIER_FEATURES];
    CHECK_EQ_INT(classifier_forward(ctx, c, images, 100, features, NULL), XD_OK);
    frechet_begin(&sums_a, CLASSIFIER_FEATURES);
    frechet_add(&sums_a, features, 100);
    frechet_end(&sums_a, &gb);
    return frechet_distance(&ga, &gb);
}

XD_TEST(distances_to_the_committed_features_tell_pictures_from_others) {
    xd_ctx *ctx = new_ctx();
    dataset set;
    classifier c;
    double trace = 0.0;
    CHECK_EQ_INT(dataset_load(ctx, "data/images", "sample", &set), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, "data/images/classifier.safetensors", &c), XD_OK);
    CHECK_EQ_INT(frechet_load(ctx, "data/images/features.safetensors", &ga), XD_OK);
    CHECK_EQ_INT(ga.width, CLASSIFIER_FEATURES);
    CHECK_EQ_INT(ga.rows, 10000);
    for (int i = 0; i < CLASSIFIER_FEATURES; i++) trace += ga.covariance[i * (CLASSIFIER_FEATURES + 1)];
    CHECK_NEAR(trace / CLASSIFIER_FEATURES, 1.0, 1e-5); /* what the scale is for */
    const double real = distance_to_reference(ctx, &c, set.images);
    for (int64_t i = 0; i < 50 * IMAGE_PIXELS; i++) { /* upside down */
        const float top = set.images[i / 128 * 256 + i % 128];
        float *bottom = &set.images[i / 128 * 256 + 255 - i % 128];
        set.images[i / 128 * 256 + i % 128] = *bottom;
        *bottom = top;
    }
    const double turned = distance_to_reference(ctx, &c, set.images);
    normal(51, 100 * IMAGE_PIXELS, set.images);
    const double noise = distance_to_reference(ctx, &c, set.images);
    printf("distances of 100 pictures: %.3f; turned %.3f; noise %.3f\n", real, turned, noise);
    CHECK(real < 2.5 && turned > 2.0 * real && noise > 10.0 * real);
    dataset_free(ctx, &set);
    classifier_free(ctx, &c);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
