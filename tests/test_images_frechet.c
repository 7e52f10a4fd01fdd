/* test_images_frechet.c - examples/images: Frechet distances between moments of features, and files of moments. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "images_scene.h"

#include "../examples/images/frechet.c"
#include "../examples/images/tensors.c"

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
    const xd_weights_pair pair = { key, value };
    const char *path = scratch("moments.safetensors");
    xd_weights_entry entries[2];
    xd_weights_writer_desc desc;
    frechet_entries(shape, entries);
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    desc.entries = entries;
    desc.entry_count = 2;
    desc.metadata = &pair;
    desc.metadata_count = 1;
    CHECK_EQ_INT(tensors_save(ctx, &desc, values), XD_OK);
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

XD_TEST_MAIN()
