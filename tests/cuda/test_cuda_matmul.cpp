/* The matrix product on a GPU: right against double arithmetic, with bits that depend on the length of the sum alone. */
#include "cuda_test.h"

/* A matrix [rows, cols], by rows or by columns, on the host and on the device. */
struct Matrix {
    std::vector<unsigned char> data;
    Device device;
    xd_matrix view;

    Matrix(Random *random, xd_dtype dtype, int64_t rows, int64_t cols, bool by_columns)
        : data(elements(dtype, rows * cols, random, false)), device(data) {
        view.data = device.at();
        view.dtype = dtype;
        view.rows = rows;
        view.cols = cols;
        view.row_stride = by_columns ? 1 : cols;
        view.col_stride = by_columns ? rows : 1;
    }
    double at(int64_t r, int64_t c) const {
        return xd_load_f64(data.data(), view.dtype, r * view.row_stride + c * view.col_stride);
    }
};

static std::vector<float> multiply(Gpu *gpu, const Matrix &a, const Matrix &b, std::vector<float> out, bool accumulate) {
    const Device d_out(out);
    const xd_launch launch = gpu->launch();
    xd_matmul_args args = {};
    args.a = a.view;
    args.b = b.view;
    args.out = d_out.at<float>();
    args.out_stride = b.view.cols;
    args.accumulate = accumulate;
    CHECK(gpu->kernels()->matmul(&launch, &args) == XD_OK);
    gpu->wait();
    return d_out.host<float>();
}

XD_TEST(products_agree_with_double_arithmetic_for_odd_sizes_dtypes_and_strides) {
    static const int64_t sizes[][3] = { { 1, 1, 1 }, { 3, 70, 5 }, { 65, 17, 66 }, { 64, 300, 64 }, { 2, 530, 130 } };
    Gpu gpu;
    Random random(1);
    for (int form = 0; form < 20; form++) {
        const int64_t m = sizes[form % 5][0], k = sizes[form % 5][1], n = sizes[form % 5][2];
        const Matrix a(&random, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, m, k, form / 5 % 2 == 1);
        const Matrix b(&random, form % 3 ? XD_DTYPE_F32 : XD_DTYPE_BF16, k, n, form / 10 == 1);
        std::vector<float> before((size_t)(m * n));
        for (float &x : before) x = random.unit();
        const std::vector<float> out = multiply(&gpu, a, b, before, form % 4 == 0);
        for (int64_t r = 0; r < m; r++)
            for (int64_t c = 0; c < n; c++) {
                double sum = form % 4 == 0 ? before[(size_t)(r * n + c)] : 0.0;
                for (int64_t t = 0; t < k; t++) sum += a.at(r, t) * b.at(t, c);
                CHECK_NEAR(out[(size_t)(r * n + c)], sum, 1e-5 * sqrt((double)k));
            }
    }
}

XD_TEST(a_row_has_the_same_bits_whichever_rows_are_computed_with_it) {
    enum { ROWS = 70, TERMS = 600, COLUMNS = 20 };
    Gpu gpu;
    Random random(2);
    Matrix a(&random, XD_DTYPE_F32, ROWS, TERMS, false);
    const Matrix b(&random, XD_DTYPE_F32, TERMS, COLUMNS, false);
    const std::vector<float> none(ROWS * COLUMNS), whole = multiply(&gpu, a, b, none, false);
    a.view.data = a.device.at<float>() + 66 * TERMS;
    a.view.rows = 4;
    std::vector<float> part = multiply(&gpu, a, b, std::vector<float>(4 * COLUMNS), false);
    CHECK_SAME(part, std::vector<float>(whole.begin() + 66 * COLUMNS, whole.end()));
}

XD_TEST(accumulating_over_pieces_of_256_terms_gives_the_bits_of_one_call) {
    enum { ROWS = 5, TERMS = 600, COLUMNS = 7 };
    Gpu gpu;
    Random random(3);
    Matrix a(&random, XD_DTYPE_F32, ROWS, TERMS, false), b(&random, XD_DTYPE_F32, TERMS, COLUMNS, false);
    const std::vector<float> whole = multiply(&gpu, a, b, std::vector<float>(ROWS * COLUMNS), false);
    std::vector<float> sum(ROWS * COLUMNS);
    for (int64_t k = 0; k < TERMS; k += 256) {
        a.view.data = a.device.at<float>() + k;
        a.view.cols = TERMS - k < 256 ? TERMS - k : 256;
        b.view.data = b.device.at<float>() + k * COLUMNS;
        b.view.rows = a.view.cols;
        sum = multiply(&gpu, a, b, sum, k > 0);
    }
    CHECK_SAME(sum, whole);
}

XD_CUDA_TEST_MAIN()
