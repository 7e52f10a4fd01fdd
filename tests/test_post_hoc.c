/* Averages formed after training: widths and exponents, coefficients against an independent solve, sums of snapshots, and all of it
 * against averages that were followed in training. */
#if defined(XD_TEST_LAYERS)
#    include "train/internal.h"
#endif
#include "ema_scene.h"

#include <math.h>

enum { MOST = 40 };

/* ---- widths ---- */

/* The relative width of an exponent, by its formula. */
static double width_of(double gamma) {
    return sqrt((gamma + 1.0) / (gamma + 3.0)) / (gamma + 2.0);
}

XD_TEST(exponents_have_the_published_widths_and_back) {
    static const double known[][2] = { { 0.01, 96.99 }, { 0.05, 16.97 }, { 0.10, 6.94 } };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    double gamma = -1.0, width = -1.0;
    for (int k = 0; k < 3; k++) {
        CHECK_EQ_INT(xdi_post_hoc_gamma(ctx, known[k][0], &gamma), XD_OK);
        CHECK_NEAR(gamma, known[k][1], 0.005);
    }
    for (int k = 0; k < 200; k++) {
        const double asked = sqrt(1.0 / 12.0) * pow(10.0, -(double)k / 20.0);
        CHECK_EQ_INT(xdi_post_hoc_gamma(ctx, asked, &gamma), XD_OK);
        width = width_of(gamma);
        CHECK_NEAR(width, asked, 1e-14 * asked);
    }
    CHECK_EQ_INT(xdi_post_hoc_gamma(ctx, sqrt(1.0 / 12.0), &gamma), XD_OK);
    CHECK_NEAR(gamma, 0.0, 1e-14);
    CHECK_EQ_INT(xdi_post_hoc_gamma(ctx, 1.0 / sqrt(12.0), &gamma), XD_OK); /* which is more by a unit */
    CHECK(gamma == 0.0);
    CHECK_EQ_INT(xdi_post_hoc_gamma(ctx, nextafter(1.0 / sqrt(12.0), 1.0), &gamma), XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

/* The standard deviation of a profile over its length, summed up. */
XD_TEST(a_width_is_the_standard_deviation_of_the_profile) {
    enum { POINTS = 200000 };
    for (int k = 0; k < 3; k++) {
        const double gamma = k == 0 ? 0.0 : k == 1 ? 6.94 : 16.97;
        double mean = 0.0, square = 0.0;
        for (int i = 0; i < POINTS; i++) {
            const double u = (i + 0.5) / POINTS, weight = (gamma + 1.0) * pow(u, gamma) / POINTS;
            mean += weight * u;
            square += weight * u * u;
        }
        CHECK_NEAR(width_of(gamma), sqrt(square - mean * mean), 1e-8);
    }
}

/* In averages and profiles 0 stands for no width. */
static void refuse_width(xd_ctx *ctx, double width) {
    const xd_post_hoc_profile s[2] = { { 10, 7.0, 0.0 }, { 20, 0.0, width } };
    const xd_post_hoc_desc target = { .snapshots = s, .snapshot_count = 1, .target = { 0, 0.0, width } },
                           snapshot = { .snapshots = s, .snapshot_count = 2, .target = { 0, 5.0, 0.0 } };
    xd_ema_desc desc = xd_ema_defaults(XD_EMA_POWER);
    xd_ema *ema = NULL;
    double got[2] = { 3.0, 3.0 };
    desc.sigma_rel = width;
    CHECK_EQ_INT(xd_ema_create(ctx, &desc, &ema), XD_ERROR_ARGUMENT);
    CHECK(scene_says(ctx, "is not in (0, 0.2886") && !ema);
    CHECK_EQ_INT(xd_post_hoc_average(ctx, &target, got, NULL), XD_ERROR_ARGUMENT);
    CHECK(scene_says(ctx, "is not in (0, 0.2886"));
    CHECK_EQ_INT(xd_post_hoc_average(ctx, &snapshot, got, NULL), XD_ERROR_ARGUMENT);
    CHECK(scene_says(ctx, "is not in (0, 0.2886") && got[0] == 3.0);
}

XD_TEST(widths_out_of_range_are_refused) {
    static const double widths[] = { 0.0, -0.1, 0.2887, 1.0, (double)NAN, (double)INFINITY };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    double out = 7.0;
    for (int k = 0; k < 6; k++) CHECK_EQ_INT(xdi_post_hoc_gamma(ctx, widths[k], &out), XD_ERROR_ARGUMENT);
    CHECK(scene_says(ctx, "relative width inf is not in (0, 0.2886"));
    CHECK(out == 7.0);
    for (int k = 1; k < 6; k++) refuse_width(ctx, widths[k]);
    xd_ctx_destroy(ctx);
}

/* ---- coefficients ---- */

/* The integral of the product of two profiles, which are power functions: in closed form. */
static long double product_of(xd_post_hoc_profile a, xd_post_hoc_profile b) {
    const long double least = a.iteration < b.iteration ? (long double)a.iteration : (long double)b.iteration;
    const long double g = a.gamma, h = b.gamma;
    return (g + 1) * (h + 1) / (g + h + 1) * powl(least / (long double)a.iteration, g) *
           powl(least / (long double)b.iteration, h) * least / (long double)a.iteration /
           (long double)b.iteration;
}

/* Gauss's elimination with the largest pivot of a column. */
static void expected_coefficients(const xd_post_hoc_profile *s, int n, xd_post_hoc_profile target,
                                  long double *x) {
    static long double a[MOST][MOST + 1];
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < n; k++) a[i][k] = product_of(s[i], s[k]);
        a[i][n] = product_of(s[i], target);
    }
    for (int j = 0; j < n; j++) {
        int best = j;
        for (int i = j; i < n; i++)
            if (fabsl(a[i][j]) > fabsl(a[best][j])) best = i;
        for (int k = 0; k <= n; k++) {
            const long double kept = a[j][k];
            a[j][k] = a[best][k];
            a[best][k] = kept;
        }
        for (int i = j + 1; i < n; i++) {
            const long double f = a[i][j] / a[j][j];
            for (int k = j; k <= n; k++) a[i][k] -= f * a[j][k];
        }
    }
    for (int i = n - 1; i >= 0; i--) {
        x[i] = a[i][n];
        for (int k = i + 1; k < n; k++) x[i] -= a[i][k] * x[k];
        x[i] /= a[i][i];
    }
}

/* Snapshots of two averages at n / 2 moments each. */
static void make_snapshots(xd_post_hoc_profile *s, int n, int64_t every) {
    for (int i = 0; i < n; i++) {
        s[i].iteration = (1 + i / 2) * every;
        s[i].sigma_rel = 0.0;
        s[i].gamma = i % 2 ? 6.94 : 16.97;
    }
}

XD_TEST(coefficients_are_those_of_an_independent_solve) {
    static const int counts[] = { 1, 2, 4, 8, 16, 24 };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    double most = 0.0;
    for (int k = 0; k < 6; k++)
        for (int t = 0; t < 4; t++) {
            xd_post_hoc_profile s[MOST];
            double got[MOST], largest = 0.0, sum = 0.0, error = -1.0;
            long double expected[MOST];
            make_snapshots(s, counts[k], t % 2 ? 1 : 12345678);
            xd_post_hoc_desc desc = { .snapshots = s, .snapshot_count = counts[k] };
            desc.target.iteration = t == 3 ? s[counts[k] / 2].iteration : 0;
            desc.target.gamma = t == 0 ? 10.0 : t == 1 ? 4.0 : 30.0;
            xd_post_hoc_profile target = desc.target;
            if (target.iteration == 0) target.iteration = s[counts[k] - 1].iteration;
            expected_coefficients(s, counts[k], target, expected);
            CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, got, &error), XD_OK);
            for (int i = 0; i < counts[k]; i++) {
                largest = fmax(largest, fabs((double)expected[i]));
                sum += got[i];
            }
            for (int i = 0; i < counts[k]; i++) {
                CHECK_NEAR(got[i], (double)expected[i], 1e-9 * largest);
                most = fmax(most, fabs(got[i] - (double)expected[i]) / largest);
            }
            long double square = 1.0L;
            for (int i = 0; i < counts[k]; i++)
                square -= expected[i] * product_of(s[i], target) / product_of(target, target);
            CHECK_NEAR(error, sqrt(fmax((double)square, 0.0)), 1e-7);
            if (counts[k] == 24 && t < 2) CHECK_NEAR(sum, 1.0, 1e-3);
        }
    if (getenv("POST_HOC_SHOW")) printf("largest difference %.3g\n", most);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_profile_of_a_snapshot_is_that_snapshot_and_more_of_them_come_closer) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    xd_post_hoc_profile s[MOST];
    double got[MOST], error = -1.0, before = 1.0;
    make_snapshots(s, 12, 1000);
    for (int i = 0; i < 12; i++) {
        const xd_post_hoc_desc desc = { .snapshots = s, .snapshot_count = 12, .target = s[i] };
        CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, got, &error), XD_OK);
        for (int k = 0; k < 12; k++) CHECK_NEAR(got[k], k == i ? 1.0 : 0.0, 1e-10);
        CHECK_NEAR(error, 0.0, 1e-6);
    }
    for (int n = 2; n <= 32; n *= 2) {
        make_snapshots(s, n, 3200 / n);
        const xd_post_hoc_desc desc = { .snapshots = s, .snapshot_count = n, .target.gamma = 10.0 };
        CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, got, &error), XD_OK);
        CHECK(error < before);
        before = error;
    }
    CHECK(error < 4e-3);
    xd_ctx_destroy(ctx);
}

/* Far more snapshots than double can tell apart: some get no coefficient, and the profile is met all the same. */
XD_TEST(snapshots_that_double_cannot_tell_apart_do_no_harm) {
    enum { MANY = 300 };
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    static xd_post_hoc_profile s[MANY];
    static double got[MANY];
    double error = -1.0, at[3] = { 0.0, 0.0, 0.0 };
    int zeros = 0;
    for (int i = 0; i < MANY; i++) {
        s[i].iteration = 1000000 + i / 3;
        s[i].gamma = 5.0 + i % 3;
    }
    const xd_post_hoc_desc desc = { .snapshots = s, .snapshot_count = MANY, .target.gamma = 5.5 };
    CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, got, &error), XD_OK);
    for (int i = 0; i < MANY; i++) {
        CHECK(isfinite(got[i]));
        zeros += got[i] == 0.0;
        for (int k = 0; k < 3; k++) { /* the profile at three moments */
            const double u = (1.0 - 0.1 * k) * 1e6 / (double)s[i].iteration;
            at[k] += got[i] * (s[i].gamma + 1.0) * pow(u, s[i].gamma) / (double)s[i].iteration;
        }
    }
    CHECK(zeros > 0 && error < 2e-2);
    for (int k = 0; k < 3; k++) {
        const double u = (1.0 - 0.1 * k) * 1e6 / 1000099.0, wanted = 6.5 * pow(u, 5.5) / 1000099.0;
        CHECK_NEAR(at[k], wanted, 2e-2 * wanted);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(profiles_that_make_no_sense_are_refused) {
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    static const char *const words[] = { "0 snapshots at",
                                         "2 snapshots at",
                                         "snapshot 1 is of iteration 0",
                                         "snapshot 1: the exponent -0.5 is not above -1/2",
                                         "snapshot 1: the exponent nan",
                                         "snapshots 0 and 1 have the same profile",
                                         "target 0 is of iteration -4",
                                         "target 0: the exponent inf",
                                         "an average of iteration 21, the last snapshot is of 20" };
    for (int k = 0; k < 9; k++) {
        xd_post_hoc_profile s[2] = { { 10, 7.0, 0.0 }, { 20, 7.0, 0.0 } };
        xd_post_hoc_desc d = { .snapshots = s, .snapshot_count = 2, .target.gamma = 5.0 };
        double got[2] = { 3.0, 3.0 }, error = 4.0;
        if (k == 0) d.snapshot_count = 0;
        if (k == 1) d.snapshots = NULL;
        if (k == 2) s[1].iteration = 0;
        if (k == 3) s[1].gamma = -0.5;
        if (k == 4) s[1].gamma = (double)NAN;
        if (k == 5) s[1] = s[0];
        if (k == 6) d.target.iteration = -4;
        if (k == 7) d.target.gamma = (double)INFINITY;
        if (k == 8) d.target.iteration = 21;
        CHECK_EQ_INT(xd_post_hoc_average(ctx, &d, got, &error), XD_ERROR_ARGUMENT);
        CHECK(k == 4 ? scene_says(ctx, "snapshot 1: the exponent") : scene_says(ctx, words[k]));
        CHECK(got[0] == 3.0 && got[1] == 3.0 && error == 4.0);
    }
    xd_ctx_destroy(ctx);
}

/* ---- sums ---- */

enum { SNAPSHOTS = 5, TENSORS = 4, LENGTH = 701 };

/* Snapshots in memory, of which a rank has a range of each tensor. */
typedef struct store {
    unsigned char data[SNAPSHOTS][TENSORS][LENGTH * 8];
    xd_dtype dtype;
    int64_t begin, end;
    int reads, last_snapshot, fails_at;
    xd_ctx *tells; /* of a failure in its own words; NULL -> it does not */
} store;

static const xd_dtype targets_of[TENSORS] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64, XD_DTYPE_I64 };

static xd_result read_store(void *user, int64_t snapshot, int64_t tensor, void *to) {
    store *s = (store *)user;
    const size_t size = tensor == 3 ? 8 : xd_dtype_size(s->dtype);
    if (++s->reads == s->fails_at)
        return s->tells ? XD_FAIL(s->tells, XD_ERROR_IO, "snapshot-1.bin is short") : XD_ERROR_IO;
    s->last_snapshot = (int)snapshot;
    memcpy(to, s->data[snapshot][tensor] + (size_t)s->begin * size, (size_t)(s->end - s->begin) * size);
    return XD_OK;
}

static store *new_store(xd_dtype dtype) {
    store *s = (store *)calloc(1, sizeof *s);
    s->dtype = dtype;
    s->end = LENGTH;
    for (uint32_t k = 0; k < SNAPSHOTS; k++)
        for (uint32_t i = 0; i < TENSORS; i++)
            if (i == 3)
                for (int e = 0; e < LENGTH; e++) ((int64_t *)(void *)s->data[k][i])[e] = e * 7 + (int64_t)k;
            else
                scene_fill(s->data[k][i], dtype, LENGTH, 100 * k + i);
    return s;
}

static const double added[SNAPSHOTS] = { 0.1, -1.7, 0.0, 2.9, -0.3 };

/* Targets of a range of the elements, filled. */
static void sum_range(xd_ctx *ctx, store *s, int64_t begin, int64_t end, unsigned char (*out)[LENGTH * 8]) {
    static const char *const names[TENSORS] = { "w", "brain", "double", "counter" };
    xd_param targets[TENSORS];
    const xd_post_hoc_desc desc = { .coefficients = added,
                                    .snapshot_count = SNAPSHOTS,
                                    .targets = targets,
                                    .target_count = TENSORS,
                                    .dtype = s->dtype,
                                    .read = read_store,
                                    .user = s };
    double used[SNAPSHOTS], error = 7.0;
    s->begin = begin;
    s->end = end;
    for (int i = 0; i < TENSORS; i++) {
        void *to = out[i] + (size_t)begin * xd_dtype_size(targets_of[i]);
        targets[i] = scene_param(names[i], begin < end ? to : NULL, targets_of[i], end - begin);
    }
    targets[3].buffer = true;
    s->reads = 0;
    CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, used, &error), XD_OK);
    CHECK(memcmp(used, added, sizeof used) == 0 && error == 0.0);
    CHECK_EQ_INT(s->reads, begin < end ? 3 * 4 + 1 : 0); /* the coefficient 0 is not read */
    CHECK(begin == end || s->last_snapshot == SNAPSHOTS - 1);
}

static void check_sum(xd_cpu_level level, int threads, xd_dtype dtype) {
    static unsigned char whole[TENSORS][LENGTH * 8], pieces[TENSORS][LENGTH * 8];
    static const int64_t cuts[] = { 0, 1, 1, 300, 555, LENGTH };
    xd_ctx *ctx = scene_ctx(level, threads);
    store *s = new_store(dtype);
    memset(whole, 0, sizeof whole);
    memset(pieces, 0, sizeof pieces);
    sum_range(ctx, s, 0, LENGTH, whole);
    for (int i = 0; i < 3; i++)
        for (int64_t e = 0; e < LENGTH; e++) {
            float sum = 0.0f;
            for (int k = 0; k < SNAPSHOTS; k++)
                if (k != 2) sum = fmaf((float)added[k], (float)xd_load_f64(s->data[k][i], dtype, e), sum);
            const double expected = targets_of[i] == XD_DTYPE_BF16
                                        ? (double)xd_f32_from_bf16(xd_bf16_from_f32(sum))
                                        : (double)sum;
            CHECK_NEAR(xd_load_f64(whole[i], targets_of[i], e), expected, 0.0);
        }
    CHECK(memcmp(whole[3], s->data[SNAPSHOTS - 1][3], sizeof whole[3]) == 0);
    for (int c = 0; c < 5; c++) sum_range(ctx, s, cuts[c], cuts[c + 1], pieces);
    CHECK(memcmp(whole, pieces, sizeof whole) == 0);
    free(s);
    xd_ctx_destroy(ctx);
}

XD_TEST(snapshots_are_added_in_order_by_fused_steps_and_shards_have_the_bits_of_the_whole) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    for (int level = XD_CPU_PLAIN; level <= (int)xd_cpu_best(); level++)
        for (int k = 0; k < 4 && xd_cpu_supports((xd_cpu_level)level); k++)
            check_sum((xd_cpu_level)level, 1 + k % 2 * 2, dtypes[k]);
}

XD_TEST(a_sum_that_cannot_be_formed_writes_nothing_and_one_that_cannot_be_read_says_which) {
    static const char *const words[] = { "0 snapshots",
                                         "nothing that reads",
                                         "the coefficient nan of snapshot 1 of 5",
                                         "the coefficient 1e+39 of snapshot 1 of 5",
                                         "parameters of snapshots are F32",
                                         "target 0 has no name",
                                         "w: -1 elements",
                                         "w: 3 elements, value at",
                                         "cannot be a sum",
                                         "w: snapshot 1 of 5 could not be read",
                                         "snapshot-1.bin is short" };
    for (int k = 0; k < 11; k++) {
        xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
        store *s = new_store(XD_DTYPE_F32);
        double coefficients[SNAPSHOTS] = { 1.0, 1.0, 1.0, 1.0, 1.0 };
        float value[3] = { 5.0f, 5.0f, 5.0f };
        xd_param target = scene_param("w", value, XD_DTYPE_F32, 3);
        xd_post_hoc_desc d = { .coefficients = coefficients,
                               .snapshot_count = SNAPSHOTS,
                               .targets = &target,
                               .target_count = 1,
                               .read = read_store,
                               .user = s };
        s->end = 3;
        s->fails_at = 2;
        s->tells = k == 10 ? ctx : NULL;
        if (k == 0) d.snapshot_count = 0;
        if (k == 1) d.read = NULL;
        if (k == 2) coefficients[1] = (double)NAN;
        if (k == 3) coefficients[1] = 1e39;
        if (k == 4) d.dtype = XD_DTYPE_I64;
        if (k == 5) target.name = NULL;
        if (k == 6) target.count = -1;
        if (k == 7) target.value = NULL;
        if (k == 8) target.dtype = XD_DTYPE_I32;
        CHECK_EQ_INT(xd_post_hoc_average(ctx, &d, NULL, NULL), k >= 9             ? XD_ERROR_IO
                                                               : k == 4 || k == 8 ? XD_ERROR_DTYPE
                                                                                  : XD_ERROR_ARGUMENT);
        CHECK(k == 2 ? scene_says(ctx, "of snapshot 1 of 5 is no f32") : scene_says(ctx, words[k]) || k == 4);
        CHECK(value[0] == 5.0f && value[2] == 5.0f);
        d.target_count = -1;
        if (k == 9) CHECK_EQ_INT(xd_post_hoc_average(ctx, &d, NULL, NULL), XD_ERROR_ARGUMENT);
        CHECK_EQ_INT(s->reads, k >= 9 ? 2 : 0);
        free(s);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(given_coefficients_need_no_memory_and_may_be_the_output) {
    enum { MANY = (1 << 24) + 1 };
    double *coefficients = (double *)malloc(MANY * sizeof *coefficients), error = 1.0;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_post_hoc_desc desc = { .coefficients = coefficients, .snapshot_count = MANY };
    for (int i = 0; i < MANY; i++) coefficients[i] = i % 7;
    CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, coefficients, &error), XD_OK);
    CHECK(coefficients[MANY - 1] == (MANY - 1) % 7 && error == 0.0);
    free(coefficients);
    xd_ctx_destroy(ctx);
}

/* ---- all of it ---- */

enum { WEIGHTS = 64, STEPS = 4000, KEPT = 2 * 20 };

static xd_result read_kept(void *user, int64_t snapshot, int64_t tensor, void *to) {
    (void)tensor;
    memcpy(to, ((float(*)[WEIGHTS])user)[snapshot], sizeof(float) * WEIGHTS);
    return XD_OK;
}

/* Weights that drift and shake; two averages are followed and kept 20 times, a third one only to know the truth. */
XD_TEST(an_average_formed_afterwards_is_close_to_the_one_that_would_have_been_followed) {
    static float kept[KEPT][WEIGHTS];
    static const double widths[3] = { 0.05, 0.10, 0.075 };
    static xd_post_hoc_profile profiles[KEPT];
    float value[WEIGHTS], noise[WEIGHTS], found[WEIGHTS];
    double coefficients[KEPT], far = 0.0, near = 1e9, size = 0.0;
    xd_ctx *ctx = scene_ctx(XD_CPU_BEST, 1);
    const xd_param param = scene_param("w", value, XD_DTYPE_F32, WEIGHTS),
                   target = scene_param("w", found, XD_DTYPE_F32, WEIGHTS);
    xd_ema *ema[3];
    for (int k = 0; k < 3; k++) {
        xd_ema_desc d = xd_ema_defaults(XD_EMA_POWER);
        d.sigma_rel = widths[k];
        ema[k] = scene_ema(ctx, &param, 1, d);
    }
    for (int t = 1, n = 0; t <= STEPS; t++) {
        scene_fill(noise, XD_DTYPE_F32, WEIGHTS, (uint32_t)t * 77u);
        for (int i = 0; i < WEIGHTS; i++)
            value[i] =
                (float)(sin(0.002 * t + i) + 0.3 * cos(0.02 * t * (1 + i % 3)) + 0.2 * (double)noise[i]);
        for (int k = 0; k < 3; k++) CHECK_EQ_INT(xd_ema_update(ema[k], XD_EMA_NEXT, NULL), XD_OK);
        for (int k = 0; k < 2 && t % (STEPS / 20) == 0; k++, n++) {
            profiles[n].iteration = t;
            profiles[n].sigma_rel = widths[k];
            memcpy(kept[n], xd_ema_view(ema[k], 0).shadow.value, sizeof kept[n]);
        }
    }
    const xd_post_hoc_desc desc = { .snapshots = profiles,
                                    .snapshot_count = KEPT,
                                    .target.sigma_rel = widths[2],
                                    .targets = &target,
                                    .target_count = 1,
                                    .read = read_kept,
                                    .user = kept };
    CHECK_EQ_INT(xd_post_hoc_average(ctx, &desc, coefficients, NULL), XD_OK);
    const float *truth = (const float *)xd_ema_view(ema[2], 0).shadow.value;
    for (int i = 0; i < WEIGHTS; i++) {
        far = fmax(far, fabs((double)(found[i] - truth[i])));
        size = fmax(size, fabs((double)truth[i]));
    }
    for (int k = 0; k < KEPT; k++) {
        double distance = 0.0;
        for (int i = 0; i < WEIGHTS; i++) distance = fmax(distance, fabs((double)(kept[k][i] - truth[i])));
        near = fmin(near, distance);
    }
    if (getenv("POST_HOC_SHOW"))
        printf("distance %.3g, of the nearest snapshot %.3g, of %.3g\n", far, near, size);
    CHECK(far < 2e-3 && near > 20.0 * far);
    for (int k = 0; k < 3; k++) xd_ema_destroy(ema[k]);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
