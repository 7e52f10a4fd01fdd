/* Losses of rows that stay on the chip against the plain CPU kernels: every kind and type, every number of blocks, what rows must
 * not lose, and which rows take the other path. */
#include "cuda_loss_case.h"

#include <algorithm>

/* The divergences and weights that have kernels of their own. */
struct Kind {
    xd_divergence divergence;
    double temperature, hard, soft, smoothing;
};

static const Kind kinds[] = {
    { XD_KL_FORWARD, 1.0, 0.7, 0.0, 0.0 }, { XD_KL_FORWARD, 1.0, 0.7, 0.0, 0.1 }, { XD_KL_FORWARD, 1.7, 0.0, 0.6, 0.0 },
    { XD_KL_REVERSE, 1.7, 0.0, 0.6, 0.0 }, { XD_JSD, 1.7, 0.0, 0.6, 0.0 },        { XD_KL_FORWARD, 1.7, 0.4, 0.6, 0.0 },
    { XD_KL_FORWARD, 1.0, 0.4, 0.6, 0.0 },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static LossCase case_of(const Kind &k, const Shape &s) {
    LossCase c = { s, k.divergence, k.temperature, k.hard, k.soft, k.smoothing, false, false };
    return c;
}

/* True where the path is there, as it is in the emulation; elsewhere its tests have nothing to test. */
static bool has_ring() {
    const Gpu other(XD_REDUCTION_DETERMINISTIC, true), gpu;
    const bool has = other.kernels()->loss.fused != gpu.kernels()->loss.fused;
#if defined(XD_EMU)
    CHECK(has);
#endif
    return has;
}

XD_TEST(rows_on_the_chip_have_the_losses_of_the_cpu) {
    if (!has_ring()) SKIP("needs compute capability 9.0");
    Pair pair;
    static const int64_t widths[] = { 2056, 4096, 4864, 8200 };
    for (int i = 0; i < 4 * KINDS; i++) { /* findings, rows that do not count and padding in half of the cases */
        const xd_dtype x = i & 1 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
        const int64_t cols = widths[i / 2 % 4];
        const Shape s = { i & 2 ? 9 : 3, cols, i % 3 * 8, 0, x, x, x };
        LossCase c = case_of(kinds[i % KINDS], s);
        c.in_place = i % 5 != 0;
        c.bad = (i & 2) != 0;
        c.rising = i % 4 == 3;
        compare_losses(&pair, c, (uint64_t)(500 + i));
    }
}

/* From one block to sixteen, in rings that hold two or one on a multiprocessor, and a row that is too long for any. */
XD_TEST(rows_of_any_number_of_blocks_have_the_losses_of_the_cpu) {
    if (!has_ring()) SKIP("needs compute capability 9.0");
    Pair pair;
    static const int64_t widths[] = { 8200, 17000, 33000, 60000, 128256, 240000, 480000 };
    for (int i = 0; i < 14; i++) {
        const xd_dtype x = i & 1 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
        const Shape s = { i < 6 ? 5 : 2, widths[i / 2], 0, 0, x, x, x };
        LossCase c = case_of(kinds[(i + i / 7) % KINDS], s);
        c.in_place = true;
        compare_losses(&pair, c, (uint64_t)(600 + i));
    }
}

/* Other weights, types, strides and vocabularies in INVARIANT mode: the other path, through the same entry. */
XD_TEST(rows_that_a_ring_cannot_take_are_worked_on_as_without_it) {
    Pair plain, invariant(XD_REDUCTION_INVARIANT);
    const xd_dtype half = XD_DTYPE_BF16, whole = XD_DTYPE_F32;
    const Shape shapes[] = {
        { 3, 2100, 0, 0, half, half, half }, /* columns that are no multiple of eight */
        { 3, 2104, 4, 0, half, half, half }, /* rows that begin anywhere */
        { 3, 2104, 0, 1, half, half, half },
        { 3, 2104, 0, 0, half, whole, half },
        { 3, 2104, 0, 0, half, half, whole },
    };
    for (const Shape &s : shapes) compare_losses(&plain, case_of(kinds[2], s), (uint64_t)(700 + s.cols + s.padding));
    compare_losses(&invariant, case_of(kinds[2], { 3, 2104, 0, 0, half, half, half }), 720);
    LossCase c = case_of({ XD_SOFT_CE, 1.3, 0.0, 0.7, 0.0 }, { 3, 2104, 0, 0, half, half, half });
    compare_losses(&plain, c, 730);
    c.divergence = XD_JSD;
    c.hard = 0.3;
    compare_losses(&plain, c, 731);
}

/* ---- rows that are hard on digits, on one side or both ---- */


static float spread(int64_t, int64_t, Random *random) {
    return 6.0f * random->unit();
}

static float certain(int64_t, int64_t column, Random *random) {
    return random->unit() + (column == 1234 ? 24.0f : 0.0f);
}

/* A third of the columns is masked. */
static float masked(int64_t, int64_t column, Random *random) {
    return column % 3 == 1 ? -INFINITY : 6.0f * random->unit();
}

/* By a number instead. */
static float lowered(int64_t, int64_t column, Random *random) {
    return column % 3 == 1 ? -1e9f : 6.0f * random->unit();
}

static float far(int64_t row, int64_t column, Random *random) {
    return (row % 2 ? 1e5f : -3e6f) + 2048.0f * (float)(column % 7) + 0.0f * random->unit();
}

static float equal(int64_t row, int64_t, Random *) {
    return 2.5f * (float)row;
}

/* Many columns have the largest element. */
static float flat(int64_t, int64_t column, Random *random) {
    return column % 5 ? 3.0f : 2.0f * random->unit();
}

static const Logits given[] = {
    { certain, certain }, { certain, spread }, { spread, certain },
    { masked, masked },    { lowered, spread }, { spread, lowered },
    { far, far },             { equal, spread }, { spread, equal },                    { flat, spread },
    { spread, flat },
};

XD_TEST(rows_on_the_chip_keep_their_digits) {
    if (!has_ring()) SKIP("needs compute capability 9.0");
    Pair pair;
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        for (int k = 0; k < KINDS; k++) {
            const xd_dtype x = (i + (size_t)k) % 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
            LossCase c = case_of(kinds[k], { 4, 4104, 0, 0, x, x, x });
            c.given = &given[i];
            c.in_place = k % 2 == 0;
            c.scale = i % 3 ? 0.7 : -0.7;
            compare_losses(&pair, c, (uint64_t)(900 + 10 * i + (size_t)k));
        }
}

/* ---- copies that never arrive ---- */

#if defined(XD_EMU)

static void lose_copy(long n) {
    compare_orders(0); /* every order of a comparison would lose another one */
    emu_lose_bulk_load(n);
}

static void lose_none() {
    emu_lose_bulk_load(0);
    compare_orders(1);
}

/* A loss of nine rows, several times: its gradient and what it found. */
struct Lossy {
    enum { ROWS = 9, COLS = 2056 };
    const Gpu &gpu;
    const Kind &kind;
    xd_dtype dtype;
    Device student, teacher, labels;
    xd_status status;

    static std::vector<unsigned char> noise(xd_dtype dtype, uint64_t seed) {
        Random random(seed);
        std::vector<unsigned char> x((size_t)(ROWS * COLS) * xd_dtype_size(dtype));
        for (int64_t i = 0; i < ROWS * COLS; i++) xd_store_f64(x.data(), dtype, i, 5.0 * (double)random.unit());
        return x;
    }
    Lossy(const Gpu &on, const Kind &k, xd_dtype d)
        : gpu(on), kind(k), dtype(d), student(noise(d, 1)), teacher(noise(d, 2)), labels(std::vector<int64_t>(ROWS, 77)) {}

    std::vector<float> gradient() {
        const std::vector<float> room((size_t)(ROWS * COLS), 9.0f);
        const xd_status none = {};
        const Device g(room), found(&none, sizeof none), values(std::vector<char>(sizeof(xd_loss_values)));
        xd_vocab *vocab = nullptr;
        xd_loss_desc d = {};
        CHECK(vocab_even(gpu.ctx, nullptr, COLS, &vocab) == XD_OK);
        d.vocab = vocab;
        d.student = xd_rows_of(student.at(), dtype, ROWS, COLS);
        if (kind.soft > 0.0) d.teacher = xd_rows_of(teacher.at(), dtype, ROWS, COLS);
        d.common.gradient = xd_rows_of(g.at(), dtype, ROWS, COLS);
        d.common.labels.data = labels.at();
        d.common.denominator_value = ROWS;
        d.common.status = found.at<xd_status>();
        d.hard_weight = kind.hard;
        d.soft_weight = kind.soft;
        d.temperature = kind.temperature;
        d.divergence = kind.divergence;
        d.label_smoothing = kind.smoothing;
        d.beta = 0.3;
        CHECK(xd_loss(gpu.ctx, &d, values.at<xd_loss_values>()) == XD_OK);
        gpu.wait();
        xd_vocab_destroy(vocab);
        status = found.host<xd_status>()[0];
        return widened(g.host<unsigned char>().data(), dtype, ROWS * COLS);
    }
};

/* The wait for it ends; its row and those after it in the ring are findings, with gradients of zeros, and no other row changes. */
XD_TEST(a_row_whose_copy_never_arrives_is_a_finding) {
    CHECK_EQ_INT(emu_report_count(), 0); /* of the tests before */
    const int cases = code_of_nvcc() ? 1 : 2 * KINDS; /* there a wait takes all of its million tries */
    for (int i = 0; i < cases; i++) {
        Gpu gpu;
        const Kind &kind = kinds[i / 2];
        Lossy loss(gpu, kind, i % 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16);
        const std::vector<float> whole = loss.gradient();
        CHECK_EQ_INT(loss.status.not_finite, 0);
        lose_copy(1 + i % 9);
        const std::vector<float> less = loss.gradient();
        lose_none();
        int64_t found = 0;
        for (int64_t r = 0; r < Lossy::ROWS; r++) {
            const auto begin = less.begin() + r * Lossy::COLS, end = begin + Lossy::COLS;
            const bool zero = std::all_of(begin, end, [](float x) { return x == 0.0f; });
            CHECK(zero || std::equal(begin, end, whole.begin() + r * Lossy::COLS));
            CHECK(zero || r != loss.status.first_row);
            found += zero;
        }
        CHECK(found > 0 && found < Lossy::ROWS);
        CHECK_EQ_INT(loss.status.not_finite, found);
        CHECK(loss.gradient() == whole);
    }
    emu_take_reports(nullptr, 0); /* the checker says that such a row is of memory that nothing has written */
}

/* A ring that loses a copy when a device is made is not used there, and a warning says so once. */
XD_TEST(a_ring_that_differs_from_rows_read_twice_is_not_used) {
    CHECK_EQ_INT(emu_report_count(), 0);
    CHECK(cudaSetDevice(3) == cudaSuccess);
    {
        test_log.clear();
        lose_copy(3);
        const Gpu gpu, other(XD_REDUCTION_DETERMINISTIC, true);
        lose_none();
        CHECK(test_log.find("rows are read twice") != std::string::npos);
        CHECK(gpu.kernels()->loss.fused == other.kernels()->loss.fused);
        test_log.clear();
        const Gpu again;
        CHECK(test_log.find("rows are read twice") == std::string::npos);
        CHECK(again.kernels()->loss.fused == other.kernels()->loss.fused);
        Lossy loss(gpu, kinds[2], XD_DTYPE_BF16);
        loss.gradient();
        CHECK_EQ_INT(loss.status.not_finite, 0);
    }
    CHECK(cudaSetDevice(0) == cudaSuccess);
    emu_take_reports(nullptr, 0);
}

#endif

XD_CUDA_TEST_MAIN()
