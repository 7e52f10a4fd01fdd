/* Top-k losses, selection and softmax on a GPU against the plain CPU kernels. */
#include "cuda_loss_test.h"
#include "softmax_calls.h"
#include "loss_calls.h"

/* ---- top-k ---- */

struct TopkCase {
    Shape shape;
    int64_t k;
    xd_topk_mode mode;
    xd_divergence divergence;
    int teacher; /* 0: log-probabilities, 1: its logits, 2: its logits at the
                  student's own ids, 3: a few logits and the normaliser of all */
    bool bad;
};

static void compare_topk(Pair *pair, const TopkCase &c, uint64_t seed) {
    Random random(seed);
    const Shape &s = c.shape;
    const size_t entries = (size_t)(s.rows * c.k);
    Board board;
    const size_t x = board.add(logits(s.student, s, &random)), y = board.add(logits(s.teacher, s, &random));
    const size_t g = board.add(
        std::vector<unsigned char>((size_t)(s.rows * s.stride()) * xd_dtype_size(s.gradient), 0x5a));
    std::vector<int64_t> ids(entries);
    std::vector<float> values(entries);
    for (int64_t r = 0; r < s.rows; r++)
        for (int64_t j = 0; j < c.k; j++) {
            ids[(size_t)(r * c.k + j)] =
                (r * 11 + j * 7) % s.cols; /* 7 and the width have no factor in common */
            values[(size_t)(r * c.k + j)] = -1.5f - 0.3f * (float)j;
        }
    if (c.bad) {
        ids[0] = s.cols;                                                             /* outside */
        ids[(size_t)c.k] = ids[(size_t)c.k + 1];                                     /* twice */
        values[(size_t)(2 * c.k)] = -INFINITY;                                       /* absent */
        ids[(size_t)(2 * c.k)] = 5 * s.cols;                                         /* and so not read */
        for (int64_t j = 0; j < c.k; j++) values[(size_t)(3 * c.k + j)] = -INFINITY; /* no entry at all */
    }
    const size_t i = board.add(ids), v = board.add(values);
    const size_t n = board.add(std::vector<double>((size_t)s.rows, 1.25));
    const xd_status none = {};
    const size_t status = board.add(&none, sizeof none), out = board.add(nullptr, sizeof(xd_loss_values));
    const size_t row_loss = board.add(nullptr, 3 * (size_t)s.rows * sizeof(float));
    const size_t logs = board.add(nullptr, entries * sizeof(float));
    const size_t work_bytes = 4096 + entries * 256 + (size_t)s.rows * 1024,
                 work = board.add(nullptr, work_bytes);
    const std::vector<unsigned char> after =
        pair->run(&board, s.cols, true, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
            xd_topk_desc d = {};
            d.student = rows_at(at, x, s.student, s);
            d.common.gradient = rows_at(at, g, s.gradient, s);
            d.common.gradient.cols = s.stride();
            d.vocab = vocab;
            d.k = c.k;
            d.mode = c.mode;
            d.divergence = c.divergence;
            d.beta = 0.5;
            d.temperature = c.teacher ? 1.6 : 1.0;
            const bool shipped = c.teacher == 0 || c.teacher == 3;
            if (!shipped) d.teacher = rows_at(at, y, s.teacher, s);
            if (shipped) d.values = place<float>(at, v);
            if (c.teacher != 2) d.ids.data = place<int64_t>(at, i);
            if (c.teacher == 3) d.values_kind = XD_TOPK_LOGITS;
            if (c.teacher == 3) d.log_normaliser = place<double>(at, n);
            d.common.status = place<xd_status>(at, status);
            d.common.row_loss = place<float>(at, row_loss);
            d.student_mass = d.common.row_loss + s.rows;
            d.teacher_mass = d.student_mass + s.rows;
            d.student_log_probs = place<float>(at, logs);
            d.common.workspace = place<void>(at, work);
            d.common.workspace_bytes = work_bytes;
            CHECK(xd_topk_kl_loss(ctx, &d, place<xd_loss_values>(at, out)) == XD_OK);
        });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    const int64_t count = s.rows * s.stride();
    check_near(widened(a + g, s.gradient, count).data(), widened(b + g, s.gradient, count).data(), count,
               tolerance_of(s.gradient));
    check_near((const float *)(const void *)(a + row_loss), (const float *)(const void *)(b + row_loss),
               3 * s.rows, 5e-6);
    check_near((const float *)(const void *)(a + logs), (const float *)(const void *)(b + logs),
               (int64_t)entries, 1e-6);
    check_near(&((const xd_loss_values *)(const void *)(a + out))->loss,
               &((const xd_loss_values *)(const void *)(b + out))->loss, 3, 5e-6);
    CHECK(memcmp(a + status, b + status, sizeof none) == 0);
}

XD_TEST(top_k_losses_are_those_of_the_cpu) {
    static const xd_divergence kinds[] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD, XD_KL_MIXED };
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int form = 0; form < 4; form++)
            for (int kind = 0; kind < 4; kind++)
                for (int teacher = 0; teacher < 4; teacher++) {
                    if (form == (int)XD_TOPK_ZERO_OUTSIDE && kinds[kind] == XD_JSD) continue;
                    const xd_dtype x = teacher > 1 && kind == 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
                    const xd_dtype y = teacher > 0 && kind == 3 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
                    const TopkCase c = { { 5, 45, kind, 0, x, y, x },
                                         teacher == 1 ? 35 : 4,
                                         (xd_topk_mode)form,
                                         kinds[kind],
                                         teacher,
                                         teacher == 0 && kind == 1 };
                    compare_topk(&pair, c, (uint64_t)(500 + 16 * form + 4 * kind + teacher));
                }
        const TopkCase wide = { { 2, 3000, 0, 0, XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_BF16 },
                                40,
                                XD_TOPK_TAIL,
                                XD_KL_FORWARD,
                                2,
                                false };
        compare_topk(&pair, wide, 9);
        const TopkCase tall = { { 700, 12, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 }, /* several blocks sum the rows */
                                4,
                                XD_TOPK_TAIL,
                                XD_KL_FORWARD,
                                0,
                                true };
        compare_topk(&pair, tall, 10);
    }
}

/* ---- selection and softmax ---- */

XD_TEST(the_k_largest_are_those_of_the_cpu_to_the_bit) {
    Pair pair;
    static const int64_t widths[] = { 1, 2, 7, 8, 33, 70, 2500 };
    for (int64_t cols : widths)
        for (int64_t k = 1; k <= cols; k = k * 3 + 1) {
            Random random((uint64_t)(cols * 31 + k));
            const Shape s = { 3,           cols, 3, 0, cols % 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16, XD_DTYPE_F32,
                              XD_DTYPE_F32 };
            std::vector<unsigned char> data = logits(s.student, s, &random);
            for (int64_t i = 0; i < s.rows * s.stride(); i++) { /* many equals; odd values */
                if (random.below(2))
                    xd_store_f64(data.data(), s.student, i, (double)(random.below(5) - 2) * 0.0625);
                if (random.below(9) == 0)
                    xd_store_f64(data.data(), s.student, i, random.below(2) ? -HUGE_VAL : NAN);
                if (random.below(9) == 0)
                    xd_store_f64(data.data(), s.student, i, random.below(2) ? -0.0 : HUGE_VAL);
            }
            Board board;
            const size_t x = board.add(data), values = board.add(nullptr, (size_t)(s.rows * k) * sizeof(float));
            const size_t ids = board.add(nullptr, (size_t)(s.rows * k) * 8),
                         columns = board.add(nullptr, (size_t)k * 8);
            const size_t importance = board.add(nullptr, (size_t)cols * sizeof(float));
            const std::vector<unsigned char> after =
                pair.run(&board, cols, false, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
                    const xd_rows rows = rows_at(at, x, s.student, s);
                    CHECK(xd_vocab_topk(ctx, vocab, rows, k, place<float>(at, values),
                                        place<int64_t>(at, ids)) == XD_OK);
                    const xd_vocab_topk_desc d = vocab_topk_desc(vocab, rows, 1, k);
                    CHECK(vocab_topk_columns(ctx, &d, place<int64_t>(at, columns),
                                                place<float>(at, importance)) == XD_OK);
                });
            CHECK_SAME(after, board.bytes);
        }
}

/* Rows that the kernels take different ways through: by how many elements reach a first threshold, by k, and by where they begin. */
enum Kind { RANDOM, ASCENDING, DESCENDING, FIVE_VALUES, LATE, NOTHING, FEW_NUMBERS, KINDS };

static double kind_value(Kind kind, int64_t column, int64_t columns, Random *random) {
    switch (kind) {
    case RANDOM: return 30.0 * (double)random->unit();
    case ASCENDING: return (double)(column - columns / 2) * 0.0625;
    case DESCENDING: return (double)(columns / 2 - column) * 0.0625;
    case FIVE_VALUES: return (double)(random->below(5) - 2) * 0.5;
    case LATE: return column < columns / 2 ? -(double)random->below(9) : (double)random->below(3000);
    case NOTHING: return random->below(2) ? -HUGE_VAL : (double)NAN;
    default: return random->below(2000) ? -HUGE_VAL : random->below(3) ? (double)random->below(4) : -0.0;
    }
}

static void compare_selection(Pair *pair, Kind kind, xd_dtype dtype, int64_t rows, int64_t cols, int64_t k) {
    Random random((uint64_t)(kind * 101 + cols + k));
    const Shape s = { rows, cols, 0, 0, dtype, XD_DTYPE_F32, XD_DTYPE_F32 };
    std::vector<unsigned char> data((size_t)(rows * cols) * xd_dtype_size(dtype));
    for (int64_t i = 0; i < rows * cols; i++) xd_store_f64(data.data(), dtype, i, kind_value(kind, i % cols, cols, &random));
    Board board;
    const size_t x = board.add(data), values = board.add(nullptr, (size_t)(rows * k) * sizeof(float));
    const size_t ids = board.add(nullptr, (size_t)(rows * k) * 8);
    const std::vector<unsigned char> after = pair->run(&board, cols, false, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
        CHECK(xd_vocab_topk(ctx, vocab, rows_at(at, x, dtype, s), k, place<float>(at, values), place<int64_t>(at, ids)) == XD_OK);
    });
    CHECK_SAME(after, board.bytes);
}

XD_TEST(long_rows_have_the_same_selection_whatever_their_values) {
    Pair pair;
    for (int kind = 0; kind < KINDS; kind++)
        for (int64_t k : { 1, 64, 300, 1024 })
            if (k == 64 || kind < DESCENDING || (k == 1024 && kind == FIVE_VALUES)) {
                compare_selection(&pair, (Kind)kind, XD_DTYPE_F32, 2, 25001, k); /* the second row begins on 4 bytes */
                compare_selection(&pair, (Kind)kind, XD_DTYPE_BF16, 1, 25003, k);
            }
}

XD_TEST(selections_of_thousands_are_those_of_the_cpu) {
    Pair pair;
    for (const Kind kind : { RANDOM, FIVE_VALUES, NOTHING }) {
        compare_selection(&pair, kind, XD_DTYPE_F32, 2, 3001, 1025);
        compare_selection(&pair, kind, XD_DTYPE_BF16, 1, 9002, 8192);
    }
    compare_selection(&pair, RANDOM, XD_DTYPE_F32, 1, 8200, 8193);
    compare_selection(&pair, FIVE_VALUES, XD_DTYPE_BF16, 1, 8200, 8193);
}

/* Places on the board of what a captured graph reads and writes. */
struct Captured {
    enum { ROWS = 3, COLUMNS = 3001, FEW = 40, MANY = 1500, IDS = 5, WORKSPACE = 4096 + 8 * ROWS * (3 + IDS * 2) };
    Shape shape = { ROWS, COLUMNS, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 };
    size_t x, ids, few, few_ids, many, many_ids, sums, argmax, at_ids, all, gradient, work;

    Captured(Board *board, const std::vector<unsigned char> &logits) {
        const std::vector<int64_t> columns = { 0, 7, 3000, 8, 2047 };
        x = board->add(logits), ids = board->add(columns);
        few = board->add(nullptr, ROWS * FEW * 4), few_ids = board->add(nullptr, ROWS * FEW * 8);
        many = board->add(nullptr, ROWS * MANY * 4), many_ids = board->add(nullptr, ROWS * MANY * 8);
        sums = board->add(nullptr, ROWS * 8), argmax = board->add(nullptr, ROWS * 8);
        at_ids = board->add(nullptr, ROWS * IDS * 4), all = board->add(nullptr, ROWS * COLUMNS * 4);
        gradient = board->add(nullptr, ROWS * COLUMNS * 4);
        work = board->add(nullptr, WORKSPACE);
    }
    void calls(xd_ctx *ctx, xd_vocab *vocab, void *at) const {
        xd_log_probs_desc d = {};
        const xd_rows rows = rows_at(at, x, XD_DTYPE_F32, shape);
        CHECK(xd_vocab_topk(ctx, vocab, rows, FEW, place<float>(at, few), place<int64_t>(at, few_ids)) == XD_OK);
        CHECK(xd_vocab_topk(ctx, vocab, rows, MANY, place<float>(at, many), place<int64_t>(at, many_ids)) == XD_OK);
        d.vocab = vocab;
        d.logits = rows;
        d.ids.data = place<int64_t>(at, ids);
        d.ids_per_row = IDS;
        d.ids_shared = true;
        d.argmax = place<int64_t>(at, argmax);
        d.at_ids = place<float>(at, at_ids);
        d.all = rows_at(at, all, XD_DTYPE_F32, shape);
        d.workspace = place<void>(at, work);
        d.workspace_bytes = WORKSPACE - 1;
        CHECK(xd_log_probs(ctx, &d) == XD_ERROR_ARGUMENT);
        d.workspace_bytes++;
        CHECK(xd_log_probs(ctx, &d) == XD_OK);
        d.at_ids = nullptr;
        d.log_sum_exp = place<double>(at, sums);
        CHECK(xd_log_probs(ctx, &d) == XD_OK);
        xd_log_probs_gradient g = {};
        g.all = d.all;
        g.logits = rows_at(at, gradient, XD_DTYPE_F32, shape);
        CHECK(xd_log_probs_backward(ctx, &d, &g) == XD_OK);
    }
    template <typename T> void check(const unsigned char *a, const unsigned char *b, size_t at, int64_t count) const {
        check_near((const T *)(const void *)(a + at), (const T *)(const void *)(b + at), count, 3e-6);
    }
};

/* Rows that climb and fall by hundreds, with -infinity before, between and everywhere, with equal largest elements, NaN, +infinity. */
static double steep(int kind, int64_t c, int64_t columns, Random *random) {
    const double x = (double)random->unit();
    switch (kind) {
    case 0: return 0.03 * (double)c + x;
    case 1: return 300.0 - 0.05 * (double)c + x;
    case 2: return c < columns / 2 || c % 3 == 1 ? -HUGE_VAL : 7.0 * x;
    case 3: return -HUGE_VAL;
    case 4: return c % 701 == 5 ? 50.0 : x;
    case 5: return c == columns - 2 ? (double)NAN : c < 9 ? -HUGE_VAL : x;
    case 6: return c == columns / 3 ? HUGE_VAL : x;
    default: return c == 2 ? (double)NAN : -HUGE_VAL;
    }
}

XD_TEST(log_sums_of_steep_rows_are_those_of_the_cpu) {
    enum { KINDS = 8 };
    static const int64_t widths[] = { 259, 9001, 16384 };
    static const double temperatures[] = { 1.0, 0.3, 4.0 };
    Pair pair;
    Random random(78);
    for (int k = 0; k < 12; k++) {
        const int64_t columns = widths[k % 3];
        const xd_dtype dtype = k % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        std::vector<unsigned char> x((size_t)(KINDS * columns) * xd_dtype_size(dtype));
        for (int64_t i = 0; i < KINDS * columns; i++)
            xd_store_f64(x.data(), dtype, i, steep((int)(i / columns), i % columns, columns, &random));
        Board board;
        const size_t at_x = board.add(x), sums = board.add(nullptr, KINDS * sizeof(double)),
                     places = board.add(nullptr, KINDS * sizeof(int64_t)), work = board.add(nullptr, 65536);
        const std::vector<unsigned char> after = pair.run(&board, columns, true, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
            xd_log_probs_desc d = {};
            d.vocab = vocab;
            d.logits = xd_rows_of(place<void>(at, at_x), dtype, KINDS, columns);
            d.temperature = temperatures[k / 3 % 3];
            d.log_sum_exp = place<double>(at, sums);
            d.argmax = place<int64_t>(at, places);
            d.workspace = place<void>(at, work);
            d.workspace_bytes = 65536;
            CHECK(xd_log_probs(ctx, &d) == XD_OK);
        });
        check_near((const double *)(const void *)(after.data() + sums), (const double *)(const void *)(board.bytes.data() + sums), KINDS, 1e-6);
        CHECK(memcmp(after.data() + places, board.bytes.data() + places, KINDS * sizeof(int64_t)) == 0);
    }
}

XD_TEST(selections_and_log_probabilities_allocate_nothing_and_go_into_a_graph) {
    Pair pair;
    Random random(77);
    Board board;
    xd_vocab *vocab = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    const Captured c(&board, logits(XD_DTYPE_F32, { Captured::ROWS, Captured::COLUMNS, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 }, &random));
    const std::vector<unsigned char> later = logits(XD_DTYPE_F32, c.shape, &random);
    Device device(board.bytes);
    CHECK(vocab_even(pair.gpu.ctx, nullptr, Captured::COLUMNS, &vocab) == XD_OK);
    seal();
    CHECK(cudaStreamBeginCapture(pair.gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    c.calls(pair.gpu.ctx, vocab, device.at<void>());
    CHECK(cudaStreamEndCapture(pair.gpu.stream, &graph) == cudaSuccess);
    unseal();
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    CHECK(cudaMemcpy(device.at<unsigned char>() + c.x, later.data(), later.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, pair.gpu.stream) == cudaSuccess);
    pair.gpu.wait();
    xd_vocab_destroy(vocab);
    memcpy(board.bytes.data() + c.x, later.data(), later.size());
    CHECK(vocab_even(pair.cpu, nullptr, Captured::COLUMNS, &vocab) == XD_OK);
    c.calls(pair.cpu, vocab, board.bytes.data());
    xd_vocab_destroy(vocab);
    const std::vector<unsigned char> after = device.host<unsigned char>();
    const unsigned char *a = after.data(), *b = board.bytes.data();
    CHECK(memcmp(a + c.few, b + c.few, c.sums - c.few) == 0); /* both selections */
    CHECK(memcmp(a + c.argmax, b + c.argmax, Captured::ROWS * 8) == 0);
    c.check<double>(a, b, c.sums, Captured::ROWS);
    c.check<float>(a, b, c.at_ids, Captured::ROWS * Captured::IDS);
    c.check<float>(a, b, c.all, Captured::ROWS * Captured::COLUMNS);
    c.check<float>(a, b, c.gradient, Captured::ROWS * Captured::COLUMNS);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

XD_TEST(candidates_of_several_shards_merge_in_the_order_of_the_columns) {
    const Gpu gpu;
    const int64_t k = 3, shards = 3, rows = 2;
    xd_select_args a = {};
    std::vector<int64_t> all((size_t)(shards * rows * k * 2)), best_ids((size_t)(rows * k));
    std::vector<double> best((size_t)(rows * k));
    const double values[18] = { 5, 4, 4, 2, 2, 1, 4, 4, 1, 2, -HUGE_VAL, -HUGE_VAL, 5, 0, -1, 3, 2, 2 };
    const int64_t ids[18] = { 2, 0, 1, 0, 3, 1, 10, 12, 11, 10, -1, -1, 20, 21, 22, 22, 20, 21 };
    for (int64_t i = 0; i < shards; i++) /* values are [shard][row][k] */
        for (int64_t j = 0; j < rows * k; j++) {
            memcpy(&all[(size_t)(i * rows * k * 2 + j)], &values[i * rows * k + j], 8);
            all[(size_t)(i * rows * k * 2 + rows * k + j)] = ids[i * rows * k + j];
        }
    Device d_all(all), d_best(best), d_ids(best_ids);
    a.logits.rows = rows;
    a.k = k;
    a.all = d_all.at<int64_t>();
    a.all_stride = 2 * rows * k;
    a.shards = (int)shards;
    a.values = d_best.at<double>();
    a.ids = d_ids.at<int64_t>();
    const xd_launch launch = gpu.launch();
    CHECK(gpu.kernels()->topk.select_merge(&launch, &a) == XD_OK);
    gpu.wait();
    static const int64_t expected[6] = { 2, 20, 0, 22, 0, 3 };
    const std::vector<int64_t> got = d_ids.host<int64_t>();
    for (size_t i = 0; i < 6; i++) CHECK_EQ_INT(got[i], expected[i]);
}

XD_TEST(softmax_and_its_gradients_are_those_of_the_cpu) {
    Pair pair;
    static const int64_t widths[] = { 1, 8, 29, 70, 2300 };
    for (int64_t cols : widths) {
        Random random((uint64_t)cols);
        const Shape s = { 5, cols, 2, 1, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 };
        const size_t n = (size_t)(s.rows * s.stride()) * sizeof(float);
        std::vector<unsigned char> data = logits(XD_DTYPE_F32, s, &random);
        if (cols > 8) xd_store_f64(data.data(), XD_DTYPE_F32, s.stride() + 2, NAN);
        if (cols > 8) xd_store_f64(data.data(), XD_DTYPE_F32, 4, -HUGE_VAL);
        const std::vector<int64_t> labels = { 0, cols - 1, -1, cols, 0 };
        const std::vector<float> weight = { 1.0f, -2.0f, 1.0f, 1.0f, 0.0f };
        Board board;
        const size_t x = board.add(data, 4), w = board.add(logits(XD_DTYPE_F32, s, &random), 4);
        const size_t out = board.add(nullptr, 3 * n, 4), l = board.add(labels), u = board.add(weight);
        const size_t scalars = board.add(nullptr, 64 * sizeof(double)), argmax = board.add(nullptr, 64),
                     floats = board.add(nullptr, 20 * sizeof(float));
        const std::vector<unsigned char> after =
            pair.run(&board, cols, false, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
                const xd_rows logits_rows = rows_at(at, x, XD_DTYPE_F32, s);
                xd_rows to[3] = { logits_rows, logits_rows, logits_rows };
                for (size_t i = 0; i < 3; i++) to[i] = rows_at(at, out + i * n, XD_DTYPE_F32, s);
                double *d = place<double>(at, scalars);
                float *f = place<float>(at, floats);
                const int64_t *ids = place<int64_t>(at, l);
                const xd_positions p = { s.rows, { ids, XD_DTYPE_I64 }, false, 0, nullptr, nullptr };
                CHECK(softmax_row_stats(ctx, vocab, logits_rows, 1.5, d, place<int64_t>(at, argmax)) == XD_OK);
                CHECK(softmax_all(ctx, vocab, logits_rows, 1.5, to[0]) == XD_OK);
                CHECK(softmax_all_backward(ctx, vocab, logits_rows, 1.5, rows_at(at, w, XD_DTYPE_F32, s),
                                              to[1]) == XD_OK);
                CHECK(softmax_at_ids(ctx, vocab, logits_rows, 1.5, xd_ids_of(ids, XD_DTYPE_I64), f) == XD_OK);
                CHECK(softmax_at_ids_backward(ctx, vocab, logits_rows, 1.5, xd_ids_of(ids, XD_DTYPE_I64), place<float>(at, u),
                                                   to[2]) == XD_OK);
                CHECK(softmax_columns(ctx, vocab, logits_rows, xd_ids_of(ids, XD_DTYPE_I64), 1, 1, f + 10) == XD_OK);
                CHECK(softmax_accuracy(ctx, vocab, logits_rows, &p, nullptr, d + 30) == XD_OK);
            });
        const unsigned char *a = after.data(), *b = board.bytes.data();
        for (size_t i = 0; i < 3; i++)
            check_near((const float *)(const void *)(a + out + i * n),
                       (const float *)(const void *)(b + out + i * n), s.rows * s.stride(), 3e-6,
                       1.0); /* of the weights: with one column nothing is left */
        check_near((const double *)(const void *)(a + scalars), (const double *)(const void *)(b + scalars),
                   64, 1e-6);
        check_near((const float *)(const void *)(a + floats), (const float *)(const void *)(b + floats), 20, 1e-6);
        CHECK(memcmp(a + argmax, b + argmax, 4 * sizeof(int64_t)) == 0);
    }
}

XD_CUDA_TEST_MAIN()
