/* test_images.c - examples/images: idx files, the classifier and its features, Frechet distances, PNG files; and data/images. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>
#include <unistd.h>

#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/images/classifier.c"
#include "../examples/images/dataset.c"
#include "../examples/images/frechet.c"
#include "../examples/images/grid.c"
#include "../examples/images/png.c"
#define IMAGES_REAL_SPLIT "sample" /* the training set is not committed */
#include "../examples/images/real_pictures.c"
#include "../examples/images/tensors.c"

/* ---- help ---- */

static xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

/* Whether the last error says this. */
static bool says(const xd_ctx *ctx, const char *words) {
    const bool found = strstr(xd_last_error(ctx)->message, words) != NULL;
    if (!found) printf("\"%s\" is not in: %s\n", words, xd_last_error(ctx)->message);
    return found;
}

/* Repeatable numbers: [first, first + count) of a normal distribution. */
static void normal(uint64_t seed, int64_t count, float *out) {
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = seed;
    random.stream = XD_STREAM_USER;
    xd_philox_fill_normal(&random, 0, count, out);
}

/* A file of this process, removed by the caller. */
static const char *scratch(const char *name) {
    static char paths[4][200];
    static int at;
    at = (at + 1) % 4;
    snprintf(paths[at], sizeof paths[at], "/tmp/xdistill-images-%ld-%s", (long)getpid(), name);
    return paths[at];
}

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
    xd_safetensors_entry entry = { "conv1.weight", XD_DTYPE_BF16, 2, shape };
    xd_safetensors_writer_desc desc;
    classifier c;
    frechet_gaussian g;
    memset(&desc, 0, sizeof desc);
    desc.entries = &entry;
    desc.entry_count = 1;
    CHECK_EQ_INT(tensors_save(ctx, path, &desc, values), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &c), XD_ERROR_SHAPE);
    CHECK(says(ctx, "conv1.weight is [48, 47], not [16, 1, 3, 3]"));
    CHECK_EQ_INT(frechet_load(ctx, path, &g), XD_ERROR_MISSING);
    entry.dtype = XD_DTYPE_F32;
    CHECK_EQ_INT(tensors_save(ctx, path, &desc, values), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &c), XD_ERROR_DTYPE);
    CHECK(says(ctx, "conv1.weight is F32, not BF16"));
    entry.name = "covariance";
    CHECK_EQ_INT(tensors_save(ctx, path, &desc, values), XD_OK);
    CHECK_EQ_INT(classifier_load(ctx, path, &c), XD_ERROR_MISSING);
    CHECK(says(ctx, "has no tensor conv1.weight"));
    entry.dtype = XD_DTYPE_I64;
    CHECK_EQ_INT(tensors_save(ctx, path, &desc, values), XD_ERROR_DTYPE);
    CHECK(remove(path) == 0);
    xd_ctx_destroy(ctx);
}

/* ---- Frechet distances ---- */

/* Gaussians are large: one function's would not fit the stack of a thread twice. */
static frechet_gaussian ga, gb, gc;
static frechet_sums sums_a, sums_b;

static void zero_gaussian(frechet_gaussian *g, int width) {
    memset(g, 0, sizeof *g);
    g->width = width;
    g->rows = 1;
}

/* A mean and a covariance of full rank, of `rows` rows of correlated noise. */
static void random_gaussian(uint64_t seed, int width, int rows, frechet_gaussian *g) {
    float *x = (float *)calloc((size_t)(rows * width), sizeof *x);
    normal(seed, (int64_t)rows * width, x);
    for (int r = 0; r < rows; r++)
        for (int i = 1; i < width; i++) x[r * width + i] += 0.7f * x[r * width + i - 1] + 0.01f * (float)i;
    frechet_begin(&sums_a, width);
    frechet_add(&sums_a, x, rows);
    frechet_end(&sums_a, g);
    free(x);
}

XD_TEST(moments_are_those_of_two_passes_in_doubles) {
    enum { ROWS = 50, WIDTH = 5 };
    float x[ROWS * WIDTH];
    normal(3, ROWS * WIDTH, x);
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = 4096.0f + 0.5f * (float)(i % WIDTH) * x[i];
    frechet_begin(&sums_a, WIDTH);
    frechet_add(&sums_a, x, ROWS);
    frechet_end(&sums_a, &ga);
    CHECK_EQ_INT(ga.rows, ROWS);
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) {
            double mi = 0.0, mj = 0.0, product = 0.0;
            for (int r = 0; r < ROWS; r++) mi += (double)x[r * WIDTH + i] / ROWS;
            for (int r = 0; r < ROWS; r++) mj += (double)x[r * WIDTH + j] / ROWS;
            for (int r = 0; r < ROWS; r++)
                product += ((double)x[r * WIDTH + i] - mi) * ((double)x[r * WIDTH + j] - mj);
            CHECK_NEAR(ga.mean[i], mi, 1e-10);
            CHECK_NEAR(ga.covariance[i * WIDTH + j], product / (ROWS - 1), 1e-10);
        }
    frechet_begin(&sums_b, WIDTH);
    for (int r = 0; r < ROWS; r += 7) frechet_add(&sums_b, x + r * WIDTH, r + 7 > ROWS ? ROWS - r : 7);
    frechet_end(&sums_b, &gb);
    CHECK(memcmp(&ga, &gb, sizeof ga) == 0); /* however the rows are cut */
    frechet_begin(&sums_b, WIDTH);
    frechet_add(&sums_b, x, 1);
    frechet_end(&sums_b, &gb);
    CHECK(gb.mean[2] == (double)x[2] && gb.covariance[0] == 0.0);
}

XD_TEST(eigenvalues_and_vectors_give_the_matrix_back) {
    static double a[48 * 48], values[48], v[48 * 48];
    random_gaussian(21, 48, 100, &ga);
    memcpy(a, ga.covariance, sizeof a);
    frechet_eigen(48, a, values, v);
    for (int i = 0; i < 48; i++)
        for (int j = 0; j < 48; j++) {
            double matrix = 0.0, unit = 0.0;
            for (int k = 0; k < 48; k++) {
                matrix += v[i * 48 + k] * values[k] * v[j * 48 + k];
                unit += v[i * 48 + k] * v[j * 48 + k];
            }
            CHECK_NEAR(matrix, ga.covariance[i * 48 + j], 1e-12);
            CHECK_NEAR(unit, i == j ? 1.0 : 0.0, 1e-12);
        }
}

XD_TEST(a_gaussian_has_no_distance_to_itself) {
    random_gaussian(22, 48, 200, &ga);
    CHECK_NEAR(frechet_distance(&ga, &ga), 0.0, 1e-11);
    random_gaussian(23, 48, 10, &ga); /* rank 9 of 48 */
    CHECK_NEAR(frechet_distance(&ga, &ga), 0.0, 1e-5);
    zero_gaussian(&ga, 48);
    CHECK(frechet_distance(&ga, &ga) == 0.0);
}

XD_TEST(a_gaussian_moved_and_enlarged_has_the_distance_of_the_formula) {
    double trace = 0.0, moved = 0.0;
    random_gaussian(24, 48, 300, &ga);
    gb = ga;
    for (int i = 0; i < 48; i++) {
        gb.mean[i] += 0.1 * (double)(i % 5);
        moved += 0.01 * (double)(i % 5 * (i % 5));
        trace += ga.covariance[i * 49];
    }
    CHECK_NEAR(frechet_distance(&ga, &gb), moved, 1e-10);
    for (int i = 0; i < 48 * 48; i++) gb.covariance[i] *= 2.25; /* (C 2.25 C)^(1/2) = 1.5 C */
    CHECK_NEAR(frechet_distance(&ga, &gb), moved + 0.25 * trace, 1e-9);
    CHECK_NEAR(frechet_distance(&gb, &ga), moved + 0.25 * trace, 1e-9);
}

/* Covariances of independent pairs, which do not commute: for a pair, tr (A B)^(1/2) = sqrt(tr A B + 2 sqrt(det A B)).
 * Then both are seen in a mirror, which mixes all pairs and changes no distance. */
static double pairs_scene(frechet_gaussian *a, frechet_gaussian *b, int width) {
    float x[8];
    double expected = 0.0;
    zero_gaussian(a, width);
    zero_gaussian(b, width);
    for (int i = 0; i < width; i += 2) {
        double m[2][4];
        normal((uint64_t)(100 + i), 8, x);
        for (int k = 0; k < 2; k++) { /* L L^T */
            const double l = 0.5 + fabs((double)x[4 * k]), u = (double)x[4 * k + 1],
                         w = 0.1 + fabs((double)x[4 * k + 2]);
            frechet_gaussian *g = k ? b : a;
            m[k][0] = l * l, m[k][1] = m[k][2] = l * u, m[k][3] = u * u + w * w;
            for (int e = 0; e < 4; e++) g->covariance[(i + e / 2) * width + i + e % 2] = m[k][e];
            expected += m[k][0] + m[k][3];
        }
        const double trace = m[0][0] * m[1][0] + 2.0 * m[0][1] * m[1][1] + m[0][3] * m[1][3];
        const double det = (m[0][0] * m[0][3] - m[0][1] * m[0][1]) * (m[1][0] * m[1][3] - m[1][1] * m[1][1]);
        expected -= 2.0 * sqrt(trace + 2.0 * sqrt(det));
    }
    return expected;
}

/* C -> H C H with H = 1 - 2 h h^T, h = (1, 1, ...) / sqrt(width) */
static void mirror(frechet_gaussian *g) {
    const int n = g->width;
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < n; i++) {
            double sum = 0.0;
            for (int j = 0; j < n; j++) sum += g->covariance[side ? j * n + i : i * n + j];
            for (int j = 0; j < n; j++) g->covariance[side ? j * n + i : i * n + j] -= 2.0 * sum / n;
        }
}

XD_TEST(covariances_that_do_not_commute_have_the_distance_of_the_formula) {
    static const int widths[] = { 2, 6, 48, 64 };
    for (int i = 0; i < 4; i++) {
        const double expected = pairs_scene(&ga, &gb, widths[i]);
        CHECK(expected > 0.1);
        CHECK_NEAR(frechet_distance(&ga, &gb), expected, 1e-10 * widths[i]);
        mirror(&ga);
        mirror(&gb);
        CHECK(widths[i] == 2 || fabs(ga.covariance[3]) > 1e-3);
        CHECK_NEAR(frechet_distance(&ga, &gb), expected, 1e-10 * widths[i]);
        CHECK_NEAR(frechet_distance(&gb, &ga), expected, 1e-10 * widths[i]);
    }
}

XD_TEST(covariances_of_rank_one_have_the_distance_of_their_directions) {
    float u[48], v[48];
    double uu = 0.0, vv = 0.0, uv = 0.0;
    normal(31, 48, u);
    normal(32, 48, v);
    zero_gaussian(&ga, 48);
    zero_gaussian(&gb, 48);
    for (int i = 0; i < 48; i++) {
        uu += (double)u[i] * (double)u[i];
        vv += (double)v[i] * (double)v[i];
        uv += (double)u[i] * (double)v[i];
        for (int j = 0; j < 48; j++) {
            ga.covariance[i * 48 + j] = (double)u[i] * (double)u[j];
            gb.covariance[i * 48 + j] = (double)v[i] * (double)v[j];
        }
    }
    /* u u^T v v^T has the eigenvalue (u v)^2 and zeros. */
    CHECK_NEAR(frechet_distance(&ga, &gb), uu + vv - 2.0 * fabs(uv), 1e-4);
    zero_gaussian(&gb, 48);
    CHECK_NEAR(frechet_distance(&ga, &gb), uu, 1e-11);
}

XD_TEST(a_width_of_one_is_the_distance_of_two_bells) {
    zero_gaussian(&ga, 1);
    zero_gaussian(&gb, 1);
    ga.mean[0] = 1.0, ga.covariance[0] = 4.0;
    gb.mean[0] = -2.0, gb.covariance[0] = 0.25;
    CHECK_NEAR(frechet_distance(&ga, &gb), 9.0 + 1.5 * 1.5, 1e-14);
    gb.mean[0] = NAN;
    CHECK(isnan(frechet_distance(&ga, &gb)));
}

XD_TEST(moments_come_back_from_their_file) {
    xd_ctx *ctx = new_ctx();
    const char *path = scratch("features.safetensors");
    random_gaussian(41, 7, 33, &ga);
    CHECK_EQ_INT(frechet_save(ctx, path, &ga), XD_OK);
    CHECK_EQ_INT(frechet_load(ctx, path, &gb), XD_OK);
    CHECK_EQ_INT(gb.width, 7);
    CHECK_EQ_INT(gb.rows, 33);
    for (int i = 0; i < 7; i++) CHECK(gb.mean[i] == (double)(float)ga.mean[i]);
    for (int i = 0; i < 49; i++) CHECK(gb.covariance[i] == (double)(float)ga.covariance[i]);
    CHECK(remove(path) == 0);
    CHECK_EQ_INT(frechet_load(ctx, path, &gb), XD_ERROR_IO);
    xd_ctx_destroy(ctx);
}

static xd_result load_moments(xd_ctx *ctx, int64_t features, const char *key, const char *value) {
    static const float zeros[65 * 65];
    static const float *const values[2] = { zeros, zeros };
    const int64_t shape[2] = { features, features };
    const xd_safetensors_pair pair = { key, value };
    const char *path = scratch("moments.safetensors");
    xd_safetensors_entry entries[2];
    xd_safetensors_writer_desc desc;
    frechet_entries(shape, entries);
    memset(&desc, 0, sizeof desc);
    desc.entries = entries;
    desc.entry_count = 2;
    desc.metadata = &pair;
    desc.metadata_count = 1;
    CHECK_EQ_INT(tensors_save(ctx, path, &desc, values), XD_OK);
    const xd_result result = frechet_load(ctx, path, &gc);
    CHECK(remove(path) == 0);
    return result;
}

XD_TEST(files_of_moments_that_cannot_be_are_refused) {
    xd_ctx *ctx = new_ctx();
    CHECK_EQ_INT(load_moments(ctx, 64, "rows", "12"), XD_OK);
    CHECK(gc.rows == 12 && gc.width == 64);
    CHECK_EQ_INT(load_moments(ctx, 65, "rows", "12"), XD_ERROR_SHAPE);
    CHECK(says(ctx, "65 features, at least 1 and at most 64"));
    CHECK_EQ_INT(load_moments(ctx, 0, "rows", "12"), XD_ERROR_SHAPE);
    CHECK_EQ_INT(load_moments(ctx, 4, "rows", "none"), XD_ERROR_FORMAT);
    CHECK_EQ_INT(load_moments(ctx, 4, "columns", "12"), XD_ERROR_FORMAT);
    xd_ctx_destroy(ctx);
}

/* ---- PNG files ---- */

/* Reads bits as RFC 1951 numbers them; past the end there are zeros, and `bad` is set. */
typedef struct bit_reader {
    const uint8_t *data;
    size_t bytes, at; /* at: bits */
    bool bad;
} bit_reader;

static unsigned take_bit(bit_reader *in) {
    if (in->at >= 8 * in->bytes) {
        in->bad = true;
        return 0;
    }
    const unsigned bit = in->data[in->at / 8] >> in->at % 8 & 1;
    in->at++;
    return bit;
}

static unsigned take_bits(bit_reader *in, unsigned count) {
    unsigned value = 0;
    for (unsigned i = 0; i < count; i++) value |= take_bit(in) << i;
    return value;
}

/* A symbol of the fixed codes, by the ranges of the table in the standard. */
static unsigned take_symbol(bit_reader *in) {
    unsigned code = 0;
    for (int i = 0; i < 7; i++) code = code << 1 | take_bit(in);
    if (code <= 0x17) return 256 + code;
    code = code << 1 | take_bit(in);
    if (code >= 0x30 && code <= 0xbf) return code - 0x30;
    if (code >= 0xc0 && code <= 0xc7) return 280 + code - 0xc0;
    return 144 + (code << 1 | take_bit(in)) - 0x190;
}

static const unsigned length_base[29] = { 3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                          31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258 };
static const unsigned length_extra[29] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                           2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0 };

/* One block of fixed codes with runs of one byte; returns the bytes that it makes. */
static size_t inflate_fixed(bit_reader *in, uint8_t *out, size_t room) {
    size_t made = 0;
    CHECK_EQ_INT(take_bits(in, 3), 3);
    while (!in->bad) {
        const unsigned symbol = take_symbol(in);
        if (symbol == 256) return made;
        if (symbol < 256) {
            CHECK(made < room);
            if (made < room) out[made++] = (uint8_t)symbol;
            continue;
        }
        CHECK(symbol <= 285 && made > 0);
        if (symbol > 285 || made == 0) return 0;
        unsigned length = length_base[symbol - 257] + take_bits(in, length_extra[symbol - 257]);
        CHECK_EQ_INT(take_bits(in, 5), 0);
        for (CHECK(made + length <= room); length && made < room; length--, made++) out[made] = out[made - 1];
    }
    return made;
}

static uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* CRC-32 by long division, bit by bit from the highest: not the way of png.c. */
static uint32_t slow_crc(const uint8_t *data, size_t bytes) {
    uint32_t rest = 0xffffffffu, reversed = 0;
    for (size_t i = 0; i < 8 * bytes; i++) {
        const uint32_t bit = data[i / 8] >> i % 8 & 1;
        rest = (rest >> 31 ^ bit) ? rest << 1 ^ 0x04c11db7u : rest << 1;
    }
    for (int i = 0; i < 32; i++) reversed |= (rest >> i & 1) << (31 - i);
    return ~reversed;
}

/* A chunk of this name, whose CRC is right; returns where the next begins. */
static size_t check_chunk(const uint8_t *png, size_t at, const char *name) {
    const size_t length = big_endian(png + at);
    CHECK(memcmp(png + at + 4, name, 4) == 0);
    CHECK_EQ_INT(big_endian(png + at + 8 + length), slow_crc(png + at + 4, length + 4));
    return at + 12 + length;
}

/* Encodes, decodes, and compares every pixel; returns the bytes of the file. */
static size_t check_png(xd_ctx *ctx, const uint8_t *pixels, int width, int height) {
    static const uint8_t header[5] = { 8, 0, 0, 0, 0 };
    const size_t filtered = (size_t)height * (size_t)(width + 1);
    uint8_t *png = NULL, *rows = (uint8_t *)calloc(filtered + 1, 1);
    size_t bytes = 0;
    unsigned low = 1, high = 0, wrong = 0;
    CHECK_EQ_INT(png_encode(ctx, pixels, width, height, &png, &bytes), XD_OK);
    CHECK(memcmp(png, "\x89PNG\r\n\x1a\n", 8) == 0);
    CHECK_EQ_INT(big_endian(png + 16), width);
    CHECK_EQ_INT(big_endian(png + 20), height);
    CHECK(memcmp(png + 24, header, 5) == 0);
    const size_t data = check_chunk(png, 8, "IHDR"), end = check_chunk(png, data, "IDAT");
    CHECK_EQ_INT(check_chunk(png, end, "IEND"), bytes);
    CHECK_EQ_INT(big_endian(png + data + 8) >> 16, 0x7801);
    bit_reader in = { png + data + 10, end - data - 18, 0, false };
    CHECK_EQ_INT(inflate_fixed(&in, rows, filtered), filtered);
    CHECK(!in.bad);
    CHECK_EQ_INT((in.at + 7) / 8, in.bytes);
    for (size_t i = 0; i < filtered; i++) {
        low = (low + rows[i]) % 65521;
        high = (high + low) % 65521;
    }
    CHECK_EQ_INT(big_endian(png + end - 8), high << 16 | low);
    for (int y = 0; y < height; y++) {
        uint8_t *row = rows + (size_t)y * (size_t)(width + 1);
        wrong += row[0] != 2;
        for (int x = 1; x <= width; x++) {
            row[x] = (uint8_t)(row[x] + (y ? row[x - width - 1] : 0));
            wrong += row[x] != pixels[y * width + x - 1];
        }
    }
    CHECK_EQ_INT(wrong, 0);
    free(rows);
    xd_release(ctx, png);
    return bytes;
}

XD_TEST(png_files_decode_to_their_pixels) {
    static const int sides[][2] = { { 1, 1 }, { 1, 300 }, { 300, 1 }, { 7, 5 }, { 257, 3 }, { 258, 259 } };
    static uint8_t pixels[258 * 300];
    xd_ctx *ctx = new_ctx();
    for (size_t s = 0; s < sizeof sides / sizeof *sides; s++)
        for (int kind = 0; kind < 4; kind++) {
            const int count = sides[s][0] * sides[s][1];
            xd_philox random = { 9, XD_STREAM_USER, (uint16_t)kind, (uint32_t)s, 0 };
            for (int i = 0; i < count; i++) {
                const uint32_t word = xd_philox_word(&random, i);
                pixels[i] = (uint8_t)word;                                   /* noise: every literal */
                if (kind == 1) pixels[i] = (uint8_t)(word % 9 ? 200 : word); /* short runs */
                if (kind == 2) pixels[i] = 255;                              /* the longest runs */
                if (kind == 3) pixels[i] = i && word % 60 ? pixels[i - 1] : (uint8_t)(word >> 8);
            }
            CHECK(check_png(ctx, pixels, sides[s][0], sides[s][1]) <= 65 + (size_t)(count + 300) * 9 / 8);
        }
    xd_ctx_destroy(ctx);
}

/* A row of one value after another one: a run of every length that a symbol can say, and beyond. */
XD_TEST(runs_of_every_length_decode) {
    uint8_t pixels[600];
    xd_ctx *ctx = new_ctx();
    for (int length = 1; length < 540; length++) {
        memset(pixels, 9, sizeof pixels);
        pixels[0] = 77;
        pixels[length + 1] = 130;
        check_png(ctx, pixels, length + 2, 1);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(png_files_without_pixels_are_refused_and_checksums_are_known_ones) {
    static const int sides[][2] = { { 0, 1 }, { 1, 0 }, { -3, 5 }, { 16385, 1 }, { 1, 16385 } };
    const uint8_t pixel = 0;
    uint8_t *data = NULL;
    size_t bytes = 0;
    xd_ctx *ctx = new_ctx();
    for (size_t s = 0; s < sizeof sides / sizeof *sides; s++)
        CHECK_EQ_INT(png_encode(ctx, &pixel, sides[s][0], sides[s][1], &data, &bytes), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "a picture of 1 x 16385 pixels; the sides are 1 to 16384"));
    CHECK(data == NULL && bytes == 0);
    CHECK_EQ_INT(png_crc((const uint8_t *)"123456789", 9), 0xcbf43926u);
    CHECK_EQ_INT(png_adler((const uint8_t *)"Wikipedia", 9), 0x11e60398u);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_grid_has_every_picture_in_its_place) {
    enum { ROWS = 2, COLUMNS = 3, WIDTH = 4 + 3 * 52, HEIGHT = 4 + 2 * 52 };
    static float images[ROWS][COLUMNS * IMAGE_PIXELS];
    static uint8_t pixels[WIDTH * HEIGHT];
    static const float values[6] = { -1.0f, 1.0f, 0.0f, -7.0f, 7.0f, -0.5f };
    static const int greys[6] = { 0, 255, 128, 0, 255, 64 };
    const float *const rows[ROWS] = { images[0], images[1] };
    const char *path = scratch("grid.png");
    xd_ctx *ctx = new_ctx();
    char *file = NULL;
    uint8_t *expected = NULL;
    size_t bytes = 0, expected_bytes = 0;
    memset(pixels, 255, sizeof pixels);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COLUMNS * IMAGE_PIXELS; i++) {
            const int at = (i + i / 7) % 6, in = i % 256;
            images[r][i] = values[at];
            for (int k = 0; k < 9; k++)
                pixels[(4 + 52 * r + 3 * (in / 16) + k / 3) * WIDTH + 4 + 52 * (i / 256) + 3 * (in % 16) +
                       k % 3] = (uint8_t)greys[at];
        }
    CHECK_EQ_INT(grid_save(ctx, path, rows, ROWS, COLUMNS), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, path, 0, &file, &bytes), XD_OK);
    CHECK_EQ_INT(png_encode(ctx, pixels, WIDTH, HEIGHT, &expected, &expected_bytes), XD_OK);
    CHECK_EQ_INT(bytes, expected_bytes);
    CHECK(bytes == expected_bytes && memcmp(file, expected, bytes) == 0);
    CHECK(remove(path) == 0);
    CHECK_EQ_INT(grid_save(ctx, path, rows, 0, 1), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(grid_save(ctx, path, rows, 1, 257), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "1 rows of 257 pictures; both are 1 to 256"));
    CHECK_EQ_INT(grid_grey(NAN), 255);
    xd_release(ctx, file);
    xd_release(ctx, expected);
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
