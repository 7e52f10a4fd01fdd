/* Minimal fine-tuning and the cosine on a GPU against the plain CPU kernels: values, terms, gradients and findings over
 * many shapes, splits of the vocabulary, a graph; nothing allocated, waited for or read during a step. */
#include "cuda_loss_test.h"
#include "planned.h"
#include "loss_calls.h"

/* ---- one rank ---- */

struct MftCase {
    Shape shape;
    bool cosine;
    double temperature, threshold, weight;
    bool in_place, bad, terms;
};

/* The label is the teacher's favourite in every third row, and nearly certain in row 6. */
static std::vector<int64_t> labels_of(const MftCase &c, std::vector<unsigned char> *teacher, Random *random) {
    const Shape &s = c.shape;
    std::vector<int64_t> labels((size_t)s.rows);
    for (int64_t r = 0; r < s.rows; r++) {
        int64_t label = random->below(s.cols);
        if (label == 3 && s.cols > 4) label = 1; /* not the masked one */
        if (r % 3 == 0) xd_store_f64(teacher->data(), s.teacher, r * s.stride() + label, r == 6 ? 40.0 : 6.5);
        labels[(size_t)r] = c.bad && r == 4 ? s.cols : r == 5 ? XD_IGNORE_INDEX : label;
    }
    return labels;
}

static void spoil(std::vector<unsigned char> *student, std::vector<unsigned char> *teacher,
                  const MftCase &c) {
    const Shape &s = c.shape;
    for (int64_t r = 0; r < s.rows && s.cols > 4 && !c.cosine; r++) { /* a masked column */
        xd_store_f64(student->data(), s.student, r * s.stride() + 3, -HUGE_VAL);
        xd_store_f64(teacher->data(), s.teacher, r * s.stride() + 3, -HUGE_VAL);
    }
    if (!c.bad) return;
    if (s.rows > 1) xd_store_f64(student->data(), s.student, s.stride(), NAN);
    if (s.rows > 2) xd_store_f64(teacher->data(), s.teacher, 2 * s.stride() + s.cols - 1, HUGE_VAL);
    for (int64_t i = 0; i < s.cols && s.rows > 3; i++)
        xd_store_f64(student->data(), s.student, 3 * s.stride() + i, c.cosine ? 0.0 : -HUGE_VAL);
}

static void compare(Pair *pair, const MftCase &c, bool same_bits, uint64_t seed) {
    Random random(seed);
    const Shape &s = c.shape;
    const size_t rows = (size_t)s.rows;
    const int64_t count = s.rows * s.stride();
    std::vector<unsigned char> student = logits(s.student, s, &random),
                               teacher = logits(s.teacher, s, &random);
    const std::vector<int64_t> labels = labels_of(c, &teacher, &random);
    std::vector<float> weight(rows);
    std::vector<uint8_t> mask(rows, 1);
    spoil(&student, &teacher, c);
    for (size_t r = 0; r < rows; r++) weight[r] = 0.5f + (float)r;
    for (size_t r = 0; r < rows; r++) mask[r] = r != 8;
    Board board;
    const size_t x = board.add(student, (size_t)s.skew * xd_dtype_size(s.student));
    const size_t y = board.add(teacher, (size_t)s.skew * xd_dtype_size(s.teacher));
    const std::vector<unsigned char> old((size_t)count * xd_dtype_size(s.gradient), 0x5a);
    const size_t g = c.in_place ? x : board.add(old, (size_t)s.skew * xd_dtype_size(s.gradient));
    const size_t t = board.add(std::vector<float>((size_t)count, 9.0f), (size_t)s.skew * sizeof(float));
    const size_t l = board.add(labels), w = board.add(weight), m = board.add(mask);
    const xd_status none = {};
    const size_t status = board.add(&none, sizeof none), values = board.add(nullptr, sizeof(xd_loss_values));
    const size_t row_loss = board.add(std::vector<float>(rows, 9.0f));
    const size_t work_bytes = 4096 + rows * 1024, work = board.add(nullptr, work_bytes);
    const std::vector<unsigned char> after =
        pair->run(&board, s.cols, true, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
            mft_desc d = mft_defaults();
            d.loss.student = rows_at(at, x, s.student, s);
            d.loss.teacher = rows_at(at, y, s.teacher, s);
            d.loss.common.gradient = rows_at(at, g, s.gradient, s);
            d.loss.common.gradient.cols = s.stride(); /* the padding is zeroed */
            d.loss.common.labels.data = place<int64_t>(at, l);
            d.loss.common.mask = place<uint8_t>(at, m);
            d.loss.common.row_weight = place<float>(at, w);
            d.loss.common.status = place<xd_status>(at, status);
            d.loss.common.row_loss = place<float>(at, row_loss);
            d.loss.common.workspace = place<void>(at, work);
            d.loss.common.workspace_bytes = work_bytes;
            d.loss.vocab = vocab;
            d.loss.soft_weight = c.weight;
            d.loss.temperature = c.temperature;
            d.threshold = c.threshold;
            if (c.terms) d.terms = rows_at(at, t, XD_DTYPE_F32, s);
            xd_loss_values *out = place<xd_loss_values>(at, values);
            CHECK((c.cosine ? cosine_loss(ctx, &d.loss, out) : mft_loss(ctx, &d, out)) == XD_OK);
        });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    const double loose = 1e-6 + tolerance_of(s.gradient);
    check_near(widened(a + g, s.gradient, count).data(), widened(b + g, s.gradient, count).data(), count,
               loose);
    check_near((const float *)(const void *)(a + t), (const float *)(const void *)(b + t), count, 4e-6);
    check_near((const float *)(const void *)(a + row_loss), (const float *)(const void *)(b + row_loss),
               s.rows, 4e-6);
    check_near(&place<xd_loss_values>((void *)(uintptr_t)a, values)->loss,
               &place<xd_loss_values>((void *)(uintptr_t)b, values)->loss, 3, 4e-6);
    CHECK_EQ_INT(place<xd_loss_values>((void *)(uintptr_t)a, values)->counted,
                 place<xd_loss_values>((void *)(uintptr_t)b, values)->counted);
    check_status((const xd_status *)(const void *)(a + status),
                 (const xd_status *)(const void *)(b + status));
    if (!same_bits) return;
    CHECK(memcmp(a + g, b + g, (size_t)count * xd_dtype_size(s.gradient)) == 0);
    CHECK(memcmp(a + row_loss, b + row_loss, rows * sizeof(float)) == 0);
    CHECK(memcmp(a + values, b + values, sizeof(xd_loss_values)) == 0);
}

XD_TEST(losses_of_every_width_are_those_of_the_cpu) {
    Pair pair;
    for (int64_t cols = 1; cols <= 70; cols++) {
        const xd_dtype x = cols % 3 == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                       y = cols % 4 == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        const Shape s = { 9, cols, cols % 5, cols % 2, x, y, cols % 7 == 0 ? XD_DTYPE_BF16 : x };
        const MftCase c = { s,   cols % 2 == 0, cols % 3 ? 1.0 : 1.7, 0.0,
                            1.0, false,         cols % 6 == 5,        cols % 8 != 3 };
        compare(&pair, c, false, (uint64_t)cols);
    }
}

XD_TEST(both_losses_in_both_modes_and_cosines_of_integer_sums_with_the_bits_of_the_cpu) {
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int variant = 0; variant < 32; variant++) {
            const xd_dtype dtype = variant & 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
            const Shape s = { 9, variant & 1 ? 2500 : 41, 0, 0, dtype, XD_DTYPE_F32, dtype };
            const bool cosine = (variant & 4) != 0;
            const MftCase c = { s,
                                cosine,
                                variant & 8 ? 2.0 : 1.0,
                                variant & 16 ? 1.0 : 0.3,
                                variant & 8 ? -0.5 : 2.0,
                                (variant & 8) != 0,
                                (variant & 16) != 0,
                                true };
            compare(&pair, c, cosine && mode == 1, 100 + (uint64_t)variant);
        }
    }
}

XD_TEST(losses_without_rows_find_nothing_counted) {
    const Gpu gpu;
    Device x(std::vector<float>(8)), status(std::vector<xd_status>(1)), out(std::vector<xd_loss_values>(1));
    xd_vocab *vocab = nullptr;
    CHECK(vocab_even(gpu.ctx, nullptr, 8, &vocab) == XD_OK);
    mft_desc d = mft_defaults();
    d.loss.student = d.loss.teacher = { x.at<void>(), XD_DTYPE_F32, 0, 8, 0 };
    d.loss.common.labels.data = x.at<int64_t>();
    d.loss.vocab = vocab;
    d.loss.common.status = status.at<xd_status>();
    CHECK(mft_loss(gpu.ctx, &d, out.at<xd_loss_values>()) == XD_OK);
    CHECK(cosine_loss(gpu.ctx, &d.loss, out.at<xd_loss_values>()) == XD_OK);
    gpu.wait();
    CHECK_EQ_INT(status.host<xd_status>()[0].nothing_counted, 2);
    d.loss.common.status = nullptr;
    CHECK(mft_loss(gpu.ctx, &d, out.at<xd_loss_values>()) ==
          XD_ERROR_ARGUMENT); /* findings stay on the GPU */
    xd_vocab_destroy(vocab);
}

/* ---- ranks that share a vocabulary ---- */

/* What rank 0 found of the whole, and everyone's columns. */
struct World : TpLogits {
    using TpLogits::TpLogits;
    bool cosine = false;
    std::vector<float> gradient = std::vector<float>(TP_ROWS * TP_COLS), terms = gradient;
    xd_loss_values values = {};
};

static xd_result world_rank(xd_comm *world, void *argument) {
    World *w = (World *)argument;
    const RankGpu gpu(world, nullptr, w->on_device);
    const int64_t columns = w->columns(gpu.rank), begin = w->cuts[(size_t)gpu.rank];
    const std::vector<int64_t> labels = { 3, 44, XD_IGNORE_INDEX, 20 };
    std::vector<float> x = w->shard(w->student, gpu.rank), y = w->shard(w->teacher, gpu.rank);
    xd_vocab *vocab = nullptr;
    CHECK(vocab_of(gpu.ctx, world, { begin, begin + columns }, TP_COLS, &vocab) == XD_OK);
    std::vector<float> terms(x.size());
    {
        const xd_device_ops *memory = &xd_ctx_kernels(gpu.ctx)->memory;
        const size_t bytes = x.size() * sizeof(float), label_bytes = labels.size() * sizeof(int64_t);
        const size_t sizes[] = {
            bytes, bytes, bytes, label_bytes, sizeof(xd_status), sizeof(xd_loss_values)
        };
        const xd_status clean = {};
        const void *from[] = { x.data(), y.data(), terms.data(), labels.data(), &clean, &w->values };
        const xd_launch launch = xd_ctx_launch(gpu.ctx);
        void *at[6];
        for (int i = 0; i < 6; i++) {
            at[i] = memory->allocate(gpu.ctx, sizes[i]);
            CHECK(memory->copy(&launch, at[i], from[i], sizes[i], XD_COPY_TO_DEVICE) == XD_OK);
        }
        mft_desc d = mft_defaults();
        d.loss.student = d.loss.common.gradient = { at[0], XD_DTYPE_F32, TP_ROWS, columns, 0 };
        d.loss.teacher = { at[1], XD_DTYPE_F32, TP_ROWS, columns, 0 };
        d.terms = { at[2], XD_DTYPE_F32, TP_ROWS, columns, 0 };
        d.loss.common.labels.data = (const int64_t *)at[3];
        d.loss.common.status = (xd_status *)at[4];
        d.loss.vocab = vocab;
        d.loss.temperature = 1.5;
        xd_loss_values *out = (xd_loss_values *)at[5], values;
        CHECK((w->cosine ? cosine_loss(gpu.ctx, &d.loss, out) : mft_loss(gpu.ctx, &d, out)) == XD_OK);
        xd_status read;
        CHECK(xd_read(gpu.ctx, &read, d.loss.common.status, sizeof read) == XD_OK);
        CHECK(xd_status_check(gpu.ctx, &read) == XD_OK);
        CHECK(xd_read(gpu.ctx, x.data(), at[0], bytes) == XD_OK);
        CHECK(xd_read(gpu.ctx, terms.data(), at[2], bytes) == XD_OK);
        CHECK(xd_read(gpu.ctx, &values, out, sizeof values) == XD_OK);
        CHECK(xd_barrier(world) == XD_OK); /* nobody frees what a peer may read */
        if (gpu.rank == 0) w->values = values;
        for (int i = 0; i < 6; i++) memory->release(gpu.ctx, at[i]);
    }
    w->put(gpu.rank, x, &w->gradient);
    w->put(gpu.rank, terms, &w->terms);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static World world_run(const std::vector<int64_t> &cuts, bool on_device, bool cosine,
                       xd_reduction reduction) {
    World w(cuts, on_device);
    w.cosine = cosine;
    w.run(reduction, world_rank, &w);
    return w;
}

static void world_compare(const World &a, const World &b) {
    check_near(&a.values.loss, &b.values.loss, 3, 3e-6);
    check_near(a.gradient.data(), b.gradient.data(), TP_ROWS * TP_COLS, 3e-6);
    check_near(a.terms.data(), b.terms.data(), TP_ROWS * TP_COLS, 4e-6);
}

XD_TEST(ranks_that_share_a_vocabulary_find_what_one_cpu_finds) {
    static const std::vector<int64_t> whole = { 0, TP_COLS }, cuts[] = { { 0, 15, 30, TP_COLS },
                                                                         { 0, 7, TP_COLS - 1, TP_COLS },
                                                                         { 0, 0, 31, TP_COLS },
                                                                         { 0, 9, 18, 27, TP_COLS } };
    for (int mode = 0; mode < 2; mode++)
        for (int kind = 0; kind < 2; kind++) {
            const xd_reduction reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
            const World cpu = world_run(whole, false, kind == 1, reduction);
            const World one = world_run(whole, true, kind == 1, reduction);
            world_compare(one, cpu);
            for (const std::vector<int64_t> &cut : cuts) {
                const World parts = world_run(cut, true, kind == 1, reduction);
                world_compare(parts, cpu);
                if (mode == 0) continue;
                const World &same = kind == 1 ? cpu : one; /* a cosine has the bits of the CPU */
                CHECK(memcmp(&same.values, &parts.values, sizeof one.values) == 0);
                CHECK_SAME(same.gradient, parts.gradient);
                CHECK_SAME(same.terms, parts.terms);
            }
        }
}

/* ---- graphs ---- */

#if defined(XD_EMU) || CUDART_VERSION >= 12000
static void capture(bool cosine) {
    const Gpu gpu;
    const Shape s = { 4, 100, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 };
    Random random(6);
    const std::vector<unsigned char> first = logits(s.student, s, &random),
                                     second = logits(s.student, s, &random);
    const std::vector<int64_t> labels(4, 17);
    Device x(first), y(logits(s.teacher, s, &random)), l(labels), g(first), t(first),
        status(std::vector<xd_status>(1)), out(std::vector<xd_loss_values>(1));
    xd_vocab *vocab = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CHECK(vocab_even(gpu.ctx, nullptr, s.cols, &vocab) == XD_OK);
    mft_desc d = mft_defaults();
    d.loss.student = rows_at(x.at<void>(), 0, s.student, s);
    d.loss.teacher = rows_at(y.at<void>(), 0, s.teacher, s);
    d.loss.common.gradient = rows_at(g.at<void>(), 0, s.gradient, s);
    d.terms = rows_at(t.at<void>(), 0, XD_DTYPE_F32, s);
    d.loss.common.labels.data = l.at<int64_t>();
    d.loss.vocab = vocab;
    d.loss.common.status = status.at<xd_status>();
    d.loss.common.workspace_bytes = PLANNED_WORKSPACE(gpu.ctx, mft_loss(gpu.ctx, &d, out.at<xd_loss_values>()));
    Device workspace(std::vector<unsigned char>(d.loss.common.workspace_bytes));
    d.loss.common.workspace = workspace.at<void>();
    const auto call = [&]() {
        xd_loss_values *values = out.at<xd_loss_values>();
        CHECK((cosine ? cosine_loss(gpu.ctx, &d.loss, values) : mft_loss(gpu.ctx, &d, values)) ==
              XD_OK);
    };
    CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    call();
    CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (const std::vector<unsigned char> &data :
         { second, first }) { /* the graph reads what is there then */
        CHECK(cudaMemcpy(x.at<void>(), data.data(), data.size(), cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
        gpu.wait();
        const std::vector<xd_loss_values> replayed = out.host<xd_loss_values>();
        const std::vector<unsigned char> gradient = g.host<unsigned char>(), terms = t.host<unsigned char>();
        call();
        gpu.wait();
        CHECK(replayed[0].loss > 0.1);
        CHECK(replayed[0].loss == out.host<xd_loss_values>()[0].loss);
        CHECK_SAME(gradient, g.host<unsigned char>());
        CHECK_SAME(terms, t.host<unsigned char>());
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    xd_vocab_destroy(vocab);
}

XD_TEST(both_losses_are_captured_into_a_graph) {
    capture(false);
    capture(true);
}
#endif

XD_CUDA_TEST_MAIN()
