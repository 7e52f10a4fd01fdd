/* Matrix products by cuBLASLt: right against double arithmetic, the unit's own where the library has no part in it, and
 * clear words for a library that cannot be used. The emulation has a library of its own (tests/emu/cublaslt.cpp). */
#include "cuda_test.h"
#include "base/internal.h"

#include <cublasLt.h>

#if defined(XD_EMU)
static const char *const library = "libcublasLt_emu.so";
#else
#    define TEXT_OF(number) #number
#    define NAME_OF(major) "libcublasLt.so." TEXT_OF(major)
static const char *const library = NAME_OF(CUBLAS_VER_MAJOR);
#endif

/* NULL where cuBLASLt can be loaded; else why not. */
static const char *missing() {
    static std::string reason;
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    xd_cuda_desc desc = {};
    desc.cublas = library;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    if (xd_cuda_create(ctx, &desc, &cuda) != XD_OK) reason = xd_last_error(ctx)->message;
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
    return reason.empty() ? nullptr : reason.c_str();
}

#if defined(XD_EMU)
#    define NEED_CUBLAS() CHECK_EQ_STR(missing() ? missing() : "", "")
#else
#    define NEED_CUBLAS()                         \
        do {                                      \
            const char *const reason = missing(); \
            if (reason) SKIP(reason);             \
        } while (0)
#endif

/* A matrix of any strides that are not negative, `skew` bytes behind an aligned address. */
struct Matrix {
    std::vector<unsigned char> data;
    Device device;
    xd_matrix view;

    Matrix(std::vector<unsigned char> elements, xd_matrix form, size_t skew = 0)
        : data(std::move(elements)), device(data, skew), view(form) {
        view.data = device.at();
    }
    double at(int64_t r, int64_t c, bool rounded) const {
        const double value = xd_load_f64(data.data(), view.dtype, r * view.row_stride + c * view.col_stride);
        return rounded ? xd_f32_from_bf16(xd_bf16_from_f32((float)value)) : value;
    }
};

static Matrix strided(Random *random, xd_dtype dtype, int64_t rows, int64_t cols, int64_t row_stride,
                      int64_t col_stride, size_t skew = 0) {
    const xd_matrix form = { nullptr, dtype, rows, cols, row_stride, col_stride };
    const int64_t count = rows > 0 && cols > 0 ? (rows - 1) * row_stride + (cols - 1) * col_stride + 1 : 0;
    return Matrix(elements(dtype, count, random, false), form, skew);
}

/* By rows or by columns, `gap` elements between them. */
static Matrix dense(Random *random, xd_dtype dtype, int64_t rows, int64_t cols, bool by_columns, int64_t gap = 0,
                    size_t skew = 0) {
    return by_columns ? strided(random, dtype, rows, cols, 1, rows + gap, skew)
                      : strided(random, dtype, rows, cols, cols + gap, 1, skew);
}

/* How a product is asked for, and who is to make it. */
struct Ask {
    bool bf16 = false, accumulate = false, by_library = true;
    int64_t out_gap = 0;
    size_t out_skew = 0;
};

static xd_matmul_args args_of(const Matrix &a, const Matrix &b, const Ask &ask, float *out) {
    xd_matmul_args args = {};
    args.a = a.view;
    args.b = b.view;
    args.out = out;
    args.out_stride = b.view.cols + ask.out_gap;
    args.accumulate = ask.accumulate;
    args.bf16 = ask.bf16;
    return args;
}

/* Only the emulation can tell who made a product: its library fails when it is told to. */
static void check_maker(const Gpu &gpu, const Matrix &a, const Matrix &b, const std::vector<float> &out,
                        const Ask &ask) {
#if defined(XD_EMU)
    const Device scratch(out, ask.out_skew);
    const xd_launch launch = gpu.launch();
    const xd_matmul_args args = args_of(a, b, ask, scratch.at<float>());
    setenv("EMU_CUBLASLT_FAIL", "1", 1);
    CHECK_EQ_INT(gpu.kernels()->matmul(&launch, &args), ask.by_library ? XD_ERROR_DEVICE : XD_OK);
    unsetenv("EMU_CUBLASLT_FAIL");
    gpu.wait();
#else
    (void)gpu, (void)a, (void)b, (void)out, (void)ask;
#endif
}

static std::vector<float> multiply(const Gpu &gpu, const Matrix &a, const Matrix &b, const std::vector<float> &out,
                                   const Ask &ask) {
    const Device d_out(out, ask.out_skew);
    const xd_launch launch = gpu.launch();
    const xd_matmul_args args = args_of(a, b, ask, d_out.at<float>());
    check_maker(gpu, a, b, out, ask);
    CHECK(gpu.kernels()->matmul(&launch, &args) == XD_OK);
    gpu.wait();
    return d_out.host<float>();
}

static std::vector<float> noise(Random *random, int64_t count) {
    std::vector<float> out((size_t)count);
    for (float &x : out) x = random->unit();
    return out;
}

/* An element in double arithmetic over the sides as they are or rounded. */
static double element_of(const Matrix &a, const Matrix &b, int64_t r, int64_t c, bool rounded) {
    double sum = 0.0;
    for (int64_t t = 0; t < a.view.cols; t++) sum += a.at(r, t, rounded) * b.at(t, c, rounded);
    return sum;
}

/* Multiplies into noise and compares with double arithmetic over what is multiplied: the rounded sides where that was
 * asked for and the library is to do it; on a GPU it may have nothing for odd addresses, and either is right.
 * Elements between the rows of the result stay as they are. */
static void check_product(const Gpu &gpu, const Matrix &a, const Matrix &b, const Ask &ask) {
    Random random(7);
    const int64_t m = a.view.rows, n = b.view.cols, stride = n + ask.out_gap;
    const std::vector<float> before = noise(&random, m * stride), out = multiply(gpu, a, b, before, ask);
    const double allowed = 3e-5 * sqrt((double)a.view.cols);
    for (int64_t i = 0; i < m * stride; i++) {
        const int64_t r = i / stride, c = i % stride;
        const double first = ask.accumulate || c >= n ? before[(size_t)i] : 0.0;
        const bool rounded = ask.bf16 && ask.by_library;
        double sum = c < n ? element_of(a, b, r, c, rounded) : 0.0;
#if !defined(XD_EMU)
        if (rounded && c < n && fabs(out[(size_t)i] - first - sum) > allowed) sum = element_of(a, b, r, c, false);
#endif
        CHECK_NEAR(out[(size_t)i], first + sum, c < n ? allowed : 0.0);
    }
}

XD_TEST(products_agree_with_double_arithmetic_for_odd_sizes_dtypes_and_orientations) {
    static const int64_t sizes[][3] = { { 1, 1, 1 },      { 3, 70, 5 },   { 65, 17, 66 }, { 64, 300, 64 },
                                        { 2, 530, 130 }, { 8, 24, 16 }, { 1, 40, 9 } };
    static const xd_dtype kinds[] = { XD_DTYPE_F32, XD_DTYPE_BF16 };
    NEED_CUBLAS();
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    Random random(1);
    for (int form = 0; form < 112; form++) {
        const int64_t *size = sizes[form % 7];
        const xd_dtype left = kinds[form & 1], right = kinds[form >> 1 & 1];
        const size_t skew = form % 3 == 1 ? 1 : 0;
        Ask ask;
        ask.bf16 = form % 5 < 3;
        ask.accumulate = form % 11 < 5;
        ask.out_gap = form % 3;
        ask.out_skew = form % 13 < 4 ? sizeof(float) : 0;
        ask.by_library = left == right || ask.bf16;
        const Matrix a = dense(&random, left, size[0], size[1], form >> 2 & 1, form % 4, skew * xd_dtype_size(left));
        const Matrix b = dense(&random, right, size[1], size[2], form >> 3 & 1, form % 9, skew * xd_dtype_size(right));
        check_product(gpu, a, b, ask);
    }
}

XD_TEST(a_stride_may_be_anything_where_it_is_not_used) {
    NEED_CUBLAS();
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    Random random(2);
    for (const bool bf16 : { false, true }) {
        Ask ask;
        ask.bf16 = bf16;
        Matrix row = strided(&random, XD_DTYPE_F32, 1, 20, 0, 1), column = strided(&random, XD_DTYPE_F32, 20, 1, 1, 0);
        const Matrix wide = dense(&random, XD_DTYPE_F32, 20, 7, false);
        const Matrix tall = dense(&random, XD_DTYPE_F32, 5, 20, true);
        const Matrix terms = strided(&random, XD_DTYPE_F32, 1, 6, 0, 1);
        check_product(gpu, row, wide, ask);
        check_product(gpu, tall, column, ask);
        check_product(gpu, row, column, ask);
        column.view.cols = 1, column.view.row_stride = 1, column.view.col_stride = 3;
        check_product(gpu, column, terms, ask);
    }
}

XD_TEST(what_cublas_has_no_form_for_is_made_by_the_units_own_kernel) {
    NEED_CUBLAS();
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    Random random(3);
    const Matrix a = dense(&random, XD_DTYPE_F32, 5, 20, false), b = dense(&random, XD_DTYPE_F32, 20, 7, false);
    const Matrix far = strided(&random, XD_DTYPE_F32, 5, 20, 40, 2), ones = strided(&random, XD_DTYPE_F32, 5, 20, 0, 0);
    const Matrix over = strided(&random, XD_DTYPE_F32, 20, 7, 3, 1);
    const Matrix narrow_b = dense(&random, XD_DTYPE_BF16, 20, 7, false);
    for (const bool bf16 : { false, true }) {
        Ask ask;
        ask.bf16 = bf16;
        ask.by_library = false;
        check_product(gpu, far, b, ask);
        check_product(gpu, ones, b, ask);
        check_product(gpu, a, over, ask);
        ask.accumulate = true;
        check_product(gpu, far, over, ask);
    }
    Ask mixed;
    mixed.by_library = false;
    check_product(gpu, a, narrow_b, mixed);
}

XD_TEST(empty_products_are_nothing_or_zero) {
    NEED_CUBLAS();
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    Random random(4);
    static const int64_t sizes[][3] = { { 0, 3, 4 }, { 3, 0, 4 }, { 3, 4, 0 }, { 0, 0, 0 } };
    for (const auto &size : sizes)
        for (const bool accumulate : { false, true }) {
            const Matrix a = dense(&random, XD_DTYPE_F32, size[0], size[1], false);
            const Matrix b = dense(&random, XD_DTYPE_F32, size[1], size[2], false);
            Ask ask;
            ask.bf16 = ask.accumulate = accumulate;
            ask.by_library = false;
            check_product(gpu, a, b, ask);
        }
}

XD_TEST(a_product_has_the_same_bits_on_every_run) {
    NEED_CUBLAS();
    Random random(5);
    const Matrix a = dense(&random, XD_DTYPE_F32, 33, 700, false), b = dense(&random, XD_DTYPE_F32, 700, 40, true);
    const std::vector<float> none(33 * 40);
    for (const bool bf16 : { false, true }) {
        Ask ask;
        ask.bf16 = bf16;
        std::vector<float> first;
        for (int run = 0; run < 3; run++) {
            Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
            const std::vector<float> out = multiply(gpu, a, b, none, ask);
            if (run > 0) CHECK_SAME(out, first);
            first = out;
        }
    }
}

XD_TEST(an_invariant_context_has_the_bits_of_the_units_own_kernel) {
    NEED_CUBLAS();
    Gpu gpu(XD_REDUCTION_INVARIANT, false, library), own(XD_REDUCTION_INVARIANT);
    Random random(6);
    const Matrix a = dense(&random, XD_DTYPE_F32, 9, 300, false), b = dense(&random, XD_DTYPE_F32, 300, 11, false);
    const std::vector<float> none(9 * 11);
    Ask ask;
    ask.by_library = false;
    for (const bool bf16 : { false, true }) {
        ask.bf16 = bf16;
        CHECK_SAME(multiply(gpu, a, b, none, ask), multiply(own, a, b, none, ask));
    }
}

/* ---- pieces ---- */

/* More rows of 8 terms than the 96 MiB for rounded elements hold when both sides are rounded, and 3 more. */
enum { LONG = (48 << 20) / (2 * 8) + 3, TERMS = 8 };

/* Small whole numbers: every sum is exact in any order, and rounding to bf16 changes none. */
static float whole(int64_t r, int64_t t) {
    return (float)((3 * r + t * t) % 7 - 3);
}

/* [rows, TERMS] or its transposed matrix, by rows or by columns. */
static Matrix whole_matrix(int64_t rows, bool transposed, bool by_columns) {
    std::vector<unsigned char> data((size_t)(rows * TERMS) * sizeof(float));
    float *at = (float *)(void *)data.data();
    const bool along_terms = transposed == by_columns;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < TERMS; t++) at[along_terms ? r * TERMS + t : t * rows + r] = whole(r, t);
    xd_matrix form = { nullptr, XD_DTYPE_F32, rows, TERMS, along_terms ? TERMS : 1, along_terms ? 1 : rows };
    return Matrix(std::move(data), transposed ? xd_matrix_transposed(form) : form);
}

static void check_whole(const std::vector<float> &out, int64_t m, int64_t n) {
    int64_t wrong = 0;
    for (int64_t r = 0; r < m; r++)
        for (int64_t c = 0; c < n; c++) {
            float sum = 0.0f;
            for (int64_t t = 0; t < TERMS; t++) sum += whole(r, t) * whole(c, t);
            wrong += out[(size_t)(r * n + c)] != sum;
        }
    CHECK_EQ_INT(wrong, 0);
}

static void check_pieces(int64_t m, int64_t n, bool by_columns) {
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    const Matrix a = whole_matrix(m, false, by_columns), b = whole_matrix(n, true, by_columns);
    const Device out(std::vector<float>((size_t)(m * n), NAN));
    Ask ask;
    ask.bf16 = true;
    const xd_launch launch = gpu.launch();
    const xd_matmul_args args = args_of(a, b, ask, out.at<float>());
    CHECK(gpu.kernels()->matmul(&launch, &args) == XD_OK);
    gpu.wait();
    check_whole(out.host<float>(), m, n);
}

XD_TEST(rows_that_do_not_fit_into_the_room_for_rounded_ones_are_multiplied_piece_by_piece) {
    NEED_CUBLAS();
    check_pieces(LONG, 2, false);
}

XD_TEST(columns_that_do_not_fit_into_the_room_for_rounded_ones_are_multiplied_piece_by_piece) {
    NEED_CUBLAS();
    check_pieces(1, LONG, false);
}

#if defined(XD_EMU)
XD_TEST(a_piece_that_cublas_has_nothing_for_is_made_by_the_units_own_kernel) {
    setenv("EMU_CUBLASLT_NONE", "3", 1); /* the rows of the last piece */
    check_pieces(LONG, 1, true);
    unsetenv("EMU_CUBLASLT_NONE");
}

XD_TEST(what_cublas_finds_nothing_for_is_made_by_the_units_own_kernel) {
    Gpu own;
    Random random(8);
    const Matrix a = dense(&random, XD_DTYPE_F32, 9, 300, false), b = dense(&random, XD_DTYPE_F32, 300, 11, true);
    const std::vector<float> none(9 * 11);
    for (const char *value : { "0", "-1" })
        for (const bool bf16 : { false, true }) {
            Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library); /* which has met no shape */
            Ask ask;
            ask.bf16 = bf16;
            ask.by_library = false;
            setenv("EMU_CUBLASLT_NONE", value, 1);
            CHECK_SAME(multiply(gpu, a, b, none, ask), multiply(own, a, b, none, ask));
            unsetenv("EMU_CUBLASLT_NONE");
        }
}

XD_TEST(a_failure_of_cublas_has_its_call_and_its_text) {
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    Random random(9);
    const Matrix a = dense(&random, XD_DTYPE_F32, 4, 8, false), b = dense(&random, XD_DTYPE_F32, 8, 4, false);
    check_product(gpu, a, b, Ask());
    xdi_clear_error(gpu.ctx);
    check_maker(gpu, a, b, std::vector<float>(16), Ask());
    const char *message = xd_last_error(gpu.ctx)->message;
    CHECK(strstr(message, "cublasLtMatmul(") && strstr(message, ": the function failed to launch on the GPU"));
    check_product(gpu, a, b, Ask());
}

XD_TEST(every_failing_call_becomes_a_result_and_leaves_nothing_behind) {
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    xd_cuda_desc desc = {};
    desc.cublas = library;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    const int before = emu_live_handles(nullptr, 0);
    for (long n = 1; !cuda; n++) {
        emu_fail_call(n);
        const xd_result result = xd_cuda_create(ctx, &desc, &cuda);
        emu_fail_call(0);
        emu_reset_errors();
        CHECK(result == XD_OK || result == XD_ERROR_DEVICE || result == XD_ERROR_MEMORY);
        if (result != XD_OK) CHECK_EQ_INT(emu_live_handles(nullptr, 0), before);
    }
    Random random(10);
    const Matrix a = dense(&random, XD_DTYPE_F32, 4, 8, false), b = dense(&random, XD_DTYPE_F32, 8, 4, false);
    const Device out(std::vector<float>(16));
    const xd_launch launch = xd_ctx_launch(ctx);
    Ask ask;
    ask.bf16 = true;
    const xd_matmul_args args = args_of(a, b, ask, out.at<float>());
    const int created = emu_live_handles(nullptr, 0);
    xd_result prepared = XD_ERROR_DEVICE;
    for (long n = 1; prepared != XD_OK; n++) {
        emu_fail_call(n);
        prepared = xd_ctx_kernels(ctx)->products.prepare(&launch);
        emu_fail_call(0);
        emu_reset_errors();
        CHECK(prepared == XD_OK || prepared == XD_ERROR_DEVICE || prepared == XD_ERROR_MEMORY);
        CHECK_EQ_INT(emu_live_handles(nullptr, 0), created + (prepared == XD_OK));
    }
    const int made = emu_live_handles(nullptr, 0);
    xd_result result = XD_ERROR_DEVICE;
    for (long n = 1; result != XD_OK; n++) {
        emu_fail_call(n);
        result = xd_ctx_kernels(ctx)->matmul(&launch, &args);
        emu_fail_call(0);
        emu_reset_errors();
        CHECK(result == XD_OK || result == XD_ERROR_DEVICE || result == XD_ERROR_MEMORY);
        CHECK_EQ_INT(emu_live_handles(nullptr, 0), made);
    }
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
}
#endif

/* ---- libraries that cannot be used ---- */

/* Refused with these words; the context works on, on the CPU and then on the GPU. */
static void check_refused(const char *name, const char *words, const char *more = "") {
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    xd_cuda_desc desc = {};
    desc.cublas = name;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_cuda_create(ctx, &desc, &cuda), XD_ERROR_UNSUPPORTED);
    const char *message = xd_last_error(ctx)->message;
    CHECK(strstr(message, words) && strstr(message, more));
    if (!strstr(message, words) || !strstr(message, more)) printf("    %s\n", message);
    CHECK(cuda == nullptr && xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU);
    const float ones[4] = { 1.0f, 2.0f, 3.0f, 4.0f };
    float out = 0.0f;
    xd_matmul_args args = {};
    args.a = { ones, XD_DTYPE_F32, 1, 4, 4, 1 };
    args.b = { ones, XD_DTYPE_F32, 4, 1, 1, 1 };
    args.out = &out;
    args.out_stride = 1;
    CHECK(xd_matmul(ctx, &args, nullptr) == XD_OK && out == 30.0f);
    desc.cublas = "none";
    CHECK(xd_cuda_create(ctx, &desc, &cuda) == XD_OK);
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_library_that_is_not_there_is_refused_with_the_loaders_words) {
    check_refused("/nowhere/libcublasLt.so", "/nowhere/libcublasLt.so");
}

XD_TEST(a_library_without_the_functions_is_refused_with_the_name_of_one) {
    check_refused("libm.so.6", "libm.so.6", "cublasLtCreate");
}

#if defined(XD_EMU)
XD_TEST(a_library_of_another_major_version_is_refused_with_both) {
    check_refused("libcublasLt_other.so", "120803", "990100");
}

XD_TEST(a_library_may_be_given_by_its_name) {
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, "libcublasLt_newer.so");
    Random random(11);
    const Matrix a = dense(&random, XD_DTYPE_BF16, 4, 8, false), b = dense(&random, XD_DTYPE_BF16, 8, 4, false);
    check_product(gpu, a, b, Ask());
}
#endif

/* ---- what stands on products ---- */

struct HeadResult {
    xd_loss_values values;
    std::vector<float> hidden, weight, bias;
};

static HeadResult head_of(const Gpu &gpu, int64_t rows, int64_t columns, int64_t width) {
    Random random(12);
    const Device hidden(elements(XD_DTYPE_BF16, rows * width, &random, false));
    const Device weight(elements(XD_DTYPE_BF16, columns * width, &random, false));
    const Device bias(noise(&random, columns)), labels(std::vector<int64_t>((size_t)rows, 5));
    const Device d_hidden(std::vector<float>((size_t)(rows * width))), d_bias(std::vector<float>((size_t)columns));
    const Device d_weight(std::vector<float>((size_t)(columns * width)));
    const Device values(std::vector<xd_loss_values>(1)), status(std::vector<xd_status>(1));
    xd_vocab *vocab = nullptr;
    xd_head_loss_desc d = {};
    CHECK(vocab_even(gpu.ctx, nullptr, columns, &vocab) == XD_OK);
    d.student.hidden = { hidden.at(), XD_DTYPE_BF16, rows, width, 0 };
    d.student.weight = { weight.at(), XD_DTYPE_BF16, columns, width, 0 };
    d.student.bias = bias.at<float>();
    d.hidden_gradient = { d_hidden.at(), XD_DTYPE_F32, rows, width, 0 };
    d.weight_gradient = d_weight.at<float>();
    d.bias_gradient = d_bias.at<float>();
    d.bf16 = true;
    d.loss.common.labels.data = labels.at<int64_t>();
    d.loss.vocab = vocab;
    d.loss.hard_weight = 1.0;
    d.loss.common.status = status.at<xd_status>();
    CHECK(xd_head_loss(gpu.ctx, &d, values.at<xd_loss_values>()) == XD_OK);
    gpu.wait();
    xd_vocab_destroy(vocab);
    return { values.host<xd_loss_values>()[0], d_hidden.host<float>(), d_weight.host<float>(), d_bias.host<float>() };
}

/* ||a - b|| / ||b|| */
static double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(difference / size);
}

XD_TEST(losses_from_the_head_agree_with_those_of_the_units_own_products) {
    NEED_CUBLAS();
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library), own;
    for (const int64_t columns : { 203, 256 }) {
        const HeadResult a = head_of(gpu, 300, columns, 40), b = head_of(own, 300, columns, 40);
        CHECK(b.values.loss > 1.0);
        CHECK_NEAR(a.values.loss, b.values.loss, 1e-5 * b.values.loss);
        CHECK_NEAR(distance(a.bias, b.bias), 0.0, 1e-5);
        /* The logits' gradients are rounded to bf16 there: 2^-9 of each. */
        CHECK_NEAR(distance(a.hidden, b.hidden), 0.0, 4e-3);
        CHECK_NEAR(distance(a.weight, b.weight), 0.0, 4e-3);
    }
}

XD_TEST(a_product_can_be_captured_into_a_graph) {
    NEED_CUBLAS();
    enum { ROWS = 20, WIDTH = 48, COLUMNS = 12 };
    Gpu gpu(XD_REDUCTION_DETERMINISTIC, false, library);
    Random random(13);
    const Matrix a = dense(&random, XD_DTYPE_F32, ROWS, WIDTH, false);
    const Matrix b = dense(&random, XD_DTYPE_BF16, WIDTH, COLUMNS, true);
    const Device out(std::vector<float>(ROWS * COLUMNS));
    Ask ask;
    ask.bf16 = true;
    const xd_launch launch = gpu.launch();
    const xd_matmul_args args = args_of(a, b, ask, out.at<float>());
    CHECK(gpu.kernels()->matmul(&launch, &args) == XD_OK); /* loads what the library needs */
    gpu.wait();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    seal();
    CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(gpu.kernels()->matmul(&launch, &args) == XD_OK);
    CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
    unseal();
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (int turn = 0; turn < 2; turn++) { /* the graph reads what is there then */
        const std::vector<unsigned char> data = elements(XD_DTYPE_F32, ROWS * WIDTH, &random, false);
        CHECK(cudaMemcpy(a.device.at(), data.data(), data.size(), cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
        gpu.wait();
        const std::vector<float> replayed = out.host<float>();
        CHECK(gpu.kernels()->matmul(&launch, &args) == XD_OK);
        gpu.wait();
        CHECK_SAME(replayed, out.host<float>());
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

XD_CUDA_TEST_MAIN()
