#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "xd_test.h"
#include "xd_test_cpu.h"

#include <math.h>
#include <stdlib.h>

/* The blocked matrix product on every level of this machine, against sums in double. */

enum { MOST = 640 };

/* A matrix as the tests hold it: doubles that f32 and bf16 represent exactly, and its storage. */
typedef struct stored {
    double *exact;
    float *wide;
    uint16_t *narrow;
} stored;

static stored stored_new(int64_t count) {
    stored s;
    s.exact = (double *)calloc((size_t)count + 1, sizeof *s.exact);
    s.wide = (float *)calloc((size_t)count + 1, sizeof *s.wide);
    s.narrow = (uint16_t *)calloc((size_t)count + 1, sizeof *s.narrow);
    for (int64_t i = 0; i < count; i++) {
        const double value = (double)((i * 37 + i / 11) % 31 - 15) / 8.0;
        s.exact[i] = value;
        s.wide[i] = (float)value;
        s.narrow[i] = xd_bf16_from_f32((float)value);
    }
    return s;
}

static void stored_free(stored s) {
    free(s.exact);
    free(s.wide);
    free(s.narrow);
}

static xd_matrix view(const stored *s, xd_dtype dtype, int64_t rows, int64_t cols, bool transposed) {
    xd_rows dense = { dtype == XD_DTYPE_F32 ? (void *)s->wide : (void *)s->narrow, dtype, rows, cols, 0 };
    if (!transposed) return xd_matrix_of_rows(&dense);
    dense.rows = cols;
    dense.cols = rows;
    return xd_matrix_transposed(xd_matrix_of_rows(&dense));
}

static double exact_at(const stored *s, const xd_matrix *m, int64_t r, int64_t c) {
    return s->exact[r * m->row_stride + c * m->col_stride];
}

/* The worst difference of one product from the sums in double. */
static double worst_of(xd_ctx *ctx, const stored *a, const stored *b, xd_matmul_args *args, int64_t stride) {
    static float out[MOST * MOST];
    const int64_t m = args->a.rows, n = args->b.cols, k = args->a.cols;
    double worst = 0.0;
    for (int64_t i = 0; i < m * stride; i++) out[i] = 0.5f;
    args->out = out;
    args->out_stride = stride;
    CHECK_EQ_INT(xd_matmul(ctx, args, NULL), XD_OK);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < stride; j++) {
            double sum = args->accumulate || j >= n ? 0.5 : 0.0;
            for (int64_t p = 0; p < k && j < n; p++)
                sum += exact_at(a, &args->a, i, p) * exact_at(b, &args->b, p, j);
            worst = fmax(worst, fabs(sum - (double)out[i * stride + j]));
        }
    return worst;
}

static void check_forms(xd_ctx *ctx, int64_t m, int64_t n, int64_t k) {
    const stored a = stored_new(m * k), b = stored_new(k * n);
    for (int form = 0; form < 64; form++) {
        xd_matmul_args args;
        memset(&args, 0, sizeof args);
        args.a = view(&a, form & 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32, m, k, (form & 2) != 0);
        args.b = view(&b, form & 4 ? XD_DTYPE_BF16 : XD_DTYPE_F32, k, n, (form & 8) != 0);
        args.accumulate = (form & 16) != 0;
        args.bf16 = (form & 32) != 0;
        /* Products are multiples of 1/64 below 4: every partial sum of k <= 600 terms is exact in f32. */
        CHECK(worst_of(ctx, &a, &b, &args, n + (form & 1)) == 0.0);
    }
    stored_free(a);
    stored_free(b);
}

XD_TEST(every_level_multiplies_every_form_exactly) {
    const int64_t sizes[][3] = { { 1, 1, 1 },     { 4, 8, 2 },   { 8, 32, 16 },  { 7, 31, 5 },
                                 { 9, 33, 257 },  { 17, 70, 3 }, { 6, 16, 512 }, { 2, 530, 30 },
                                 { 13, 40, 301 }, { 5, 3, 0 } };
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        const xd_ctx_desc desc = { .cpu = (xd_cpu_level)level };
        xd_ctx *ctx = NULL;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            check_forms(ctx, sizes[i][0], sizes[i][1], sizes[i][2]);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(a_row_has_the_same_bits_in_any_company) {
    enum { M = 21, N = 45, K = 300 };
    static float a[M * K], b[K * N], whole[M * N], part[M * N];
    for (int i = 0; i < M * K; i++) a[i] = sinf((float)i);
    for (int i = 0; i < K * N; i++) b[i] = cosf((float)i);
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        const xd_ctx_desc desc = { .cpu = (xd_cpu_level)level };
        xd_ctx *ctx = NULL;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        const xd_rows left = { a, XD_DTYPE_F32, M, K, 0 }, right = { b, XD_DTYPE_F32, K, N, 0 };
        xd_matmul_args args = { xd_matrix_of_rows(&left), xd_matrix_of_rows(&right), whole, N, false, false };
        CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_OK);
        args.out = part;
        args.a.rows = 2;
        args.a.data = a + 5 * K;
        CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_OK);
        CHECK(memcmp(part, whole + 5 * N, 2 * N * sizeof *part) == 0);
        /* the same, in two pieces of k cut at a multiple of 256 */
        args.a.cols = args.b.rows = 256;
        CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_OK);
        args.accumulate = true;
        args.a.data = a + 5 * K + 256;
        args.b.data = b + 256 * N;
        args.a.cols = args.b.rows = K - 256;
        CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_OK);
        CHECK(memcmp(part, whole + 5 * N, 2 * N * sizeof *part) == 0);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(whole_blocks_stay_in_the_workspace) {
    enum { M = 200, N = 1040, K = 259 };
    const stored a = stored_new(M * K), b = stored_new(K * N);
    const size_t words = XD_MATMUL_WORKSPACE_BYTES / sizeof(float);
    float *workspace = (float *)malloc((words + 2) * sizeof *workspace);
    float *out = (float *)malloc((size_t)M * N * sizeof *out);
    for (int form = 0; form < 16; form++) {
        const xd_dtype dtype = form & 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        const xd_matrix left = view(&a, dtype, M, K, (form & 2) != 0);
        const xd_matrix right = view(&b, dtype, K, N, (form & 4) != 0);
        const xd_matmul_args args = { left, right, out, N, false, (form & 8) != 0 };
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            workspace[0] = workspace[words + 1] = 7.0f;
            xd_matmul_cpu((xd_cpu_level)level, &args, workspace + 1); /* not at the begin of a cache line */
            CHECK(workspace[0] == 7.0f && workspace[words + 1] == 7.0f);
            for (int64_t i = 0; i < M; i += 3)
                for (int64_t j = (i * 7) % 11; j < N; j += 11) {
                    double sum = 0.0;
                    for (int64_t p = 0; p < K; p++)
                        sum += exact_at(&a, &left, i, p) * exact_at(&b, &right, p, j);
                    CHECK((double)out[i * N + j] == sum);
                }
        }
    }
    free(workspace);
    free(out);
    stored_free(a);
    stored_free(b);
}

XD_TEST(shapes_and_dtypes_that_do_not_fit_are_refused_with_both_numbers) {
    float data[16] = { 0 };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const xd_rows rows = { data, XD_DTYPE_F32, 2, 3, 0 };
    xd_matmul_args args = { xd_matrix_of_rows(&rows), xd_matrix_of_rows(&rows), data + 8, 3, false, false };
    CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "3 columns") && strstr(xd_last_error(ctx)->message, "2 rows"));
    args.b = xd_matrix_transposed(args.a);
    args.out_stride = 1;
    CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_ERROR_ARGUMENT);
    args.out_stride = 2;
    args.a.dtype = XD_DTYPE_F64;
    CHECK_EQ_INT(xd_matmul(ctx, &args, NULL), XD_ERROR_DTYPE);
    CHECK(data[8] == 0.0f);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_level_this_machine_lacks_is_refused) {
    xd_ctx *ctx = NULL;
    const xd_ctx_desc desc = { .cpu = (xd_cpu_level)((int)XD_CPU_AVX512_BF16 + 1) };
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_UNSUPPORTED);
    CHECK(ctx == NULL);
    for (int i = 0; i <= (int)XD_CPU_AVX512_BF16; i++) {
        xd_cpu_level level = XD_CPU_BEST;
        CHECK(xd_test_cpu_find(xd_cpu_level_name((xd_cpu_level)i), &level) && (int)level == i);
    }
    xd_cpu_level level = XD_CPU_AVX2;
    CHECK(!xd_test_cpu_find("sse", &level) && level == XD_CPU_AVX2);
}

XD_TEST_MAIN()
