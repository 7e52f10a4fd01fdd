/* Losses on a GPU against the plain CPU kernels: values, gradients and findings over many shapes; splits of the
 * vocabulary; nothing allocated, waited for or read during a step. */
#include "cuda_loss_case.h"
#include "planned.h"

XD_TEST(losses_of_every_width_are_those_of_the_cpu) {
    Pair pair;
    for (int64_t cols = 1; cols <= 70; cols++) {
        const bool half = cols % 3 == 1;
        const xd_dtype x = half ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                       y = cols % 4 == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        const LossCase c = { { 9, cols, cols % 5, cols % 2, x, y, cols % 7 == 0 ? XD_DTYPE_BF16 : x },
                             (xd_divergence)(cols % 4),
                             cols % 2 ? 1.0 : 1.7,
                             0.4,
                             0.6,
                             0.0,
                             false,
                             cols % 6 == 5 };
        compare_losses(&pair, c, (uint64_t)cols);
    }
}

XD_TEST(every_loss_is_that_of_the_cpu_in_both_modes) {
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int kind = 0; kind < 4; kind++)
            for (int variant = 0; variant < 8; variant++) {
                const LossCase c = { { 9, 40, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 },
                                     (xd_divergence)kind,
                                     variant & 1 ? 2.0 : 1.0,
                                     variant & 2 ? 0.5 : 0.0,
                                     variant & 4 ? 0.0 : 0.5,
                                     variant & 2 && variant & 1 ? 0.1 : 0.0,
                                     (variant & 1) != 0,
                                     kind == 1 };
                if (c.hard == 0.0 && c.soft == 0.0) continue;
                LossCase masked = c; /* smoothing gives masked columns an infinite loss:
                                both sides say so */
                compare_losses(&pair, masked, (uint64_t)(100 + 8 * kind + variant));
            }
    }
}

XD_TEST(long_rows_are_a_whole_block_of_work) {
    Pair plain, invariant(XD_REDUCTION_INVARIANT);
    static const int64_t widths[] = { 2048, 2049, 5003, 2056 };
    for (int i = 0; i < 8; i++) /* each width and each pair of dtypes, in both modes */
        for (int kind = 0; kind < 4; kind += 2) {
            const xd_dtype x = i & 1 ? XD_DTYPE_F32 : XD_DTYPE_BF16, y = i & 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
            const LossCase c = { { 2, widths[i % 4], i % 4 == 2 ? 5 : 0, 0, x, y, x },
                                 (xd_divergence)kind,
                                 1.3,
                                 0.3,
                                 0.7,
                                 0.0,
                                 true,
                                 false };
            compare_losses(i < 4 ? &invariant : &plain, c, (uint64_t)(300 + i));
        }
}

/* Chunks of columns that each hold a larger logit than all before, in rows 1 and 2 so much larger that an
 * exponential relative to the first ones overflows. */
XD_TEST(sums_follow_a_maximum_that_comes_late) {
    Pair plain, invariant(XD_REDUCTION_INVARIANT);
    for (int i = 0; i < 4; i++)
        for (int kind = 0; kind < 3; kind++) {
            const xd_dtype x = i & 1 ? XD_DTYPE_F32 : XD_DTYPE_BF16, y = i & 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
            LossCase c = {
                { 3, i < 2 ? 700 : 6200, 0, 0, x, y, x }, (xd_divergence)kind, 1.2, 0.3, 0.7, 0.0, true, false
            };
            c.rising = true;
            compare_losses(kind == 1 ? &invariant : &plain, c, (uint64_t)(350 + i));
        }
}

/* These kernels have no code for a teacher: short rows and long ones, summed as they come, and exactly. */
XD_TEST(losses_without_a_teacher_are_those_of_the_cpu) {
    Pair plain(XD_REDUCTION_DETERMINISTIC, true), invariant(XD_REDUCTION_INVARIANT);
    for (int i = 0; i < 16; i++) {
        static const int64_t widths[] = { 37, 1000, 2049, 4864 };
        const xd_dtype x = i & 1 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
        const int64_t cols = widths[i / 2 % 4];
        LossCase c = { { i < 8 ? 9 : 3, cols, cols % 8 ? 5 : 0, 0, x, x, i % 3 ? x : XD_DTYPE_F32 },
                       XD_KL_FORWARD,
                       i % 4 < 2 ? 1.0 : 1.7,
                       0.7,
                       0.0,
                       i % 8 == 5 ? 0.1 : 0.0,
                       false,
                       i < 8 };
        c.rising = i >= 8;
        for (Pair *pair : { &plain, &invariant }) compare_losses(pair, c, (uint64_t)(800 + i));
    }
}

/* Losses of two rows that are nearly certain of one id; teacher and student
 * agree on it. */
XD_TEST(nearly_one_hot_rows_keep_the_digits_of_their_largest_gradient) {
    static const xd_divergence kinds[] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD };
    const Pair pair;
    const Shape s = { 2, 33, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 };
    for (int kind = -1; kind < 3; kind++) { /* -1: cross entropy */
        Random random(5);
        std::vector<float> x(66), y(66), gradient[2];
        for (size_t i = 0; i < 66; i++) {
            x[i] = random.unit() + (i % 33 == 9 ? 24.0f : 0.0f);
            y[i] = random.unit() + (i % 33 == 9 ? 24.0f : 0.0f);
        }
        const std::vector<int64_t> labels = { 9, 9 };
        Device dx(x), dy(y), dl(labels), dg(std::vector<float>(66)), ds(std::vector<xd_status>(1)),
            dv(std::vector<xd_loss_values>(1));
        for (int side = 0; side < 2; side++) {
            xd_ctx *ctx = side ? pair.gpu.ctx : pair.cpu;
            std::vector<float> g(66);
            xd_loss_values values;
            xd_status status = {};
            xd_vocab *vocab = nullptr;
            CHECK(vocab_even(ctx, nullptr, s.cols, &vocab) == XD_OK);
            xd_loss_desc d = {};
            d.student = rows_at(side ? dx.at<void>() : (void *)x.data(), 0, s.student, s);
            if (kind >= 0) d.teacher = rows_at(side ? dy.at<void>() : (void *)y.data(), 0, s.teacher, s);
            d.common.gradient = rows_at(side ? dg.at<void>() : (void *)g.data(), 0, s.gradient, s);
            d.common.labels.data = side ? dl.at<int64_t>() : labels.data();
            d.hard_weight = kind < 0 ? 1.0 : 0.0;
            d.soft_weight = kind < 0 ? 0.0 : 1.0;
            d.divergence = kind < 0 ? XD_KL_FORWARD : kinds[kind];
            d.common.status = side ? ds.at<xd_status>() : &status;
            d.vocab = vocab;
            CHECK(xd_loss(ctx, &d, side ? dv.at<xd_loss_values>() : &values) == XD_OK);
            pair.gpu.wait();
            gradient[side] = side ? dg.host<float>() : g;
            xd_vocab_destroy(vocab);
        }
        for (size_t i = 9; i < 66; i += 33) {
            CHECK(gradient[0][i] != 0.0f);
            CHECK_NEAR(gradient[1][i] / gradient[0][i], 1.0, 1e-4);
        }
    }
}

#if defined(XD_EMU) || CUDART_VERSION >= 12000
XD_TEST(a_loss_is_captured_into_a_graph) {
    const Gpu gpu;
    const Shape s = { 4, 100, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 };
    Random random(6);
    const std::vector<unsigned char> first = logits(s.student, s, &random),
                                     second = logits(s.student, s, &random);
    const std::vector<int64_t> labels(4, 17);
    Device x(first), l(labels), g(first), out(std::vector<xd_loss_report>(1));
    xd_loss_report *report = out.at<xd_loss_report>(), replayed, again; /* one allocation, one read */
    xd_vocab *vocab = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CHECK(vocab_even(gpu.ctx, nullptr, s.cols, &vocab) == XD_OK);
    xd_loss_desc d = {};
    d.student = rows_at(x.at<void>(), 0, s.student, s);
    d.common.gradient = rows_at(g.at<void>(), 0, s.gradient, s);
    d.common.labels.data = l.at<int64_t>();
    d.vocab = vocab;
    d.hard_weight = 1.0;
    d.common.status = &report->status;
    d.common.workspace_bytes = PLANNED_WORKSPACE(gpu.ctx, xd_loss(gpu.ctx, &d, &report->values));
    Device workspace(std::vector<unsigned char>(d.common.workspace_bytes));
    d.common.workspace = workspace.at<void>();
    CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(xd_loss(gpu.ctx, &d, &report->values) == XD_OK);
    CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (const std::vector<unsigned char> &data :
         { second, first }) { /* the graph reads what is there then */
        CHECK(cudaMemcpy(x.at<void>(), data.data(), data.size(), cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
        CHECK(xd_read(gpu.ctx, &replayed, report, sizeof replayed) == XD_OK);
        const std::vector<unsigned char> gradient = g.host<unsigned char>();
        CHECK(xd_loss(gpu.ctx, &d, &report->values) == XD_OK);
        CHECK(xd_read(gpu.ctx, &again, report, sizeof again) == XD_OK);
        CHECK(xd_status_check(gpu.ctx, &again.status) == XD_OK);
        CHECK(replayed.values.loss > 1.0 && replayed.values.counted == 4);
        CHECK(memcmp(&replayed, &again, sizeof again) == 0);
        CHECK_SAME(gradient, g.host<unsigned char>());
    }
    const float bad = NAN; /* of a row that counts: the same read says so */
    CHECK(cudaMemcpy(d.student.data, &bad, sizeof bad, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
    CHECK(xd_read(gpu.ctx, &again, report, sizeof again) == XD_OK);
    CHECK(again.status.not_finite == 1 && again.status.first_row == 0);
    CHECK_EQ_INT(xd_status_check(gpu.ctx, &again.status), XD_ERROR_DATA);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    xd_vocab_destroy(vocab);
}
#endif

/* ---- splits of the vocabulary, entry by entry ---- */

/* How partials are made: two sweeps, two with integer sums, one sweep. */
enum Sums { PLAIN, FIXED, FUSED };

/* One row set on the device, cut into shards, through all entries; returns row
 * scalars, then the gradient. */
static std::vector<unsigned char> split_run(const Gpu &gpu, const Shape &s,
                                            const std::vector<int64_t> &offsets, xd_divergence divergence,
                                            Sums how) {
    const bool fixed = how == FIXED;
    Random random(77);
    const std::vector<unsigned char> student = logits(s.student, s, &random),
                                     teacher = logits(s.teacher, s, &random);
    const size_t rows = (size_t)s.rows, shards = offsets.size() - 1,
                 size = fixed ? sizeof(xd_fixed) : sizeof(double);
    const size_t one_ref = rows * XD_LOSS_REFERENCES, one_sum = rows * XD_LOSS_SUMS;
    std::vector<int64_t> labels(rows);
    const std::vector<double> scales(rows, 0.25);
    for (size_t r = 0; r < rows; r++) labels[r] = random.below(s.cols);
    const std::vector<unsigned char> zeros(shards * one_sum * sizeof(xd_fixed));
    const std::vector<unsigned char> result(rows * sizeof(xd_loss_row) +
                                            rows * (size_t)s.stride() * xd_dtype_size(s.gradient));
    Device x(student), y(teacher), l(labels), scale(scales), cuts(offsets), out(result);
    Device refs(zeros), own(zeros), sums(zeros), mixtures(zeros);
    const xd_loss_kernels k = gpu.kernels()->loss;
    const xd_launch launch = gpu.launch();
    std::vector<xd_loss_args> args(shards);
    for (size_t i = 0; i < shards; i++) {
        xd_loss_args *a = &args[i];
        memset(a, 0, sizeof *a);
        a->student =
            rows_at(x.at<unsigned char>() + (size_t)offsets[i] * xd_dtype_size(s.student), 0, s.student, s);
        a->teacher =
            rows_at(y.at<unsigned char>() + (size_t)offsets[i] * xd_dtype_size(s.teacher), 0, s.teacher, s);
        a->gradient = rows_at(out.at<unsigned char>(),
                              rows * sizeof(xd_loss_row) + (size_t)offsets[i] * xd_dtype_size(s.gradient),
                              s.gradient, s);
        a->student.cols = a->teacher.cols = a->gradient.cols = offsets[i + 1] - offsets[i];
        a->labels.data = l.at<int64_t>();
        a->row_scale = scale.at<double>();
        a->vocab = { offsets[i], offsets[i + 1], offsets[shards], (int)i, (int)shards, cuts.at<int64_t>() };
        a->temperature = 1.4;
        a->divergence = divergence;
        a->beta = 0.6;
        a->target_weight = 0.9;
        a->uniform_weight = 0.1 / (double)s.cols;
        a->hard_weight = 0.3;
        a->soft_weight = 0.7;
        a->fixed = fixed;
        a->all_references = refs.at<double>();
        a->reference_stride = (int64_t)one_ref;
        a->references = refs.at<double>() + i * one_ref;
        a->all_sums = sums.at<void>();
        a->sums_stride = (int64_t)one_sum;
        a->sums = sums.at<unsigned char>() + i * one_sum * size;
        a->all_mixtures = mixtures.at<void>();
        a->mixtures = mixtures.at<unsigned char>() + i * rows * XD_LOSS_MIXTURES * size;
        a->row = out.at<xd_loss_row>();
        CHECK((how == FUSED ? k.fused(&launch, a) : k.references(&launch, a)) == XD_OK);
    }
    for (size_t i = 0; i < shards && how != FUSED; i++) {
        if (fixed) args[i].references = own.at<double>();
        if (fixed) CHECK(k.merge_references(&launch, &args[i]) == XD_OK);
        CHECK(k.stats(&launch, &args[i]) == XD_OK);
    }
    if (how == FUSED && shards == 1) { /* that was all */
        gpu.wait();
        return out.host<unsigned char>();
    }
    CHECK(k.combine(&launch, &args[0]) == XD_OK);
    for (size_t i = 0; i < shards && divergence == XD_JSD; i++) CHECK(k.mixture(&launch, &args[i]) == XD_OK);
    if (divergence == XD_JSD) CHECK(k.mixture_combine(&launch, &args[0]) == XD_OK);
    for (size_t i = 0; i < shards; i++) CHECK(k.grad(&launch, &args[i]) == XD_OK);
    gpu.wait();
    return out.host<unsigned char>();
}

XD_TEST(splits_of_the_vocabulary_change_no_bit_in_invariant_mode_and_little_otherwise) {
    const Gpu gpu;
    const Shape shapes[] = { { 3, 61, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 },
                             { 2, 61, 0, 0, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F32 },
                             { 2, 61, 0, 0, XD_DTYPE_BF16, XD_DTYPE_F32, XD_DTYPE_F32 },
                             { 1, 2200, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 },
                             { 1, 2200, 0, 0, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_BF16 },
                             { 1, 2200, 0, 0, XD_DTYPE_BF16, XD_DTYPE_F32, XD_DTYPE_F32 },
                             { 2, 4200, 0, 0, XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_BF16 } };
    for (const Shape &s : shapes)
        for (int kind = 0; kind < 4; kind++)
            for (const Sums how : { PLAIN, FIXED, FUSED }) {
                const std::vector<unsigned char> whole =
                    split_run(gpu, s, { 0, s.cols }, (xd_divergence)kind, how);
                const std::vector<std::vector<int64_t>> cuts = { { 0, 7, s.cols },
                                                                 { 0, 32, 32, s.cols - 1, s.cols } };
                for (const std::vector<int64_t> &cut : cuts) {
                    const std::vector<unsigned char> parts = split_run(gpu, s, cut, (xd_divergence)kind, how);
                    if (how == FIXED) CHECK_SAME(whole, parts);
                    const xd_loss_row *a = (const xd_loss_row *)(const void *)parts.data();
                    const xd_loss_row *b = (const xd_loss_row *)(const void *)whole.data();
                    for (int64_t r = 0; r < s.rows; r++) {
                        CHECK_NEAR(a[r].hard, b[r].hard, 1e-6 * b[r].hard);
                        CHECK_NEAR(a[r].soft, b[r].soft, 3e-6 * fabs(b[r].soft));
                        CHECK_EQ_INT(a[r].finding, 0);
                        CHECK(a[r].argmax == b[r].argmax);
                    }
                    const size_t at = (size_t)s.rows * sizeof(xd_loss_row);
                    const int64_t n = s.rows * s.cols;
                    check_near(widened(parts.data() + at, s.gradient, n).data(),
                               widened(whole.data() + at, s.gradient, n).data(), n, tolerance_of(s.gradient));
                }
            }
}

/* ---- ranks that share a vocabulary ---- */

/* What rank 0 found of the whole, and everyone's columns of the gradients: of xd_loss, and of xd_topk_kl_loss at the
 * student's own ids, of which a shard may hold fewer than k. */
struct TpWorld : TpLogits {
    using TpLogits::TpLogits;
    xd_divergence divergence = XD_KL_FORWARD;
    std::vector<float> gradient = std::vector<float>(TP_ROWS * TP_COLS), topk_gradient = gradient;
    xd_loss_values values = {}, topk_values = {};
};

template <typename T> static Device copy_if(bool on_device, const std::vector<T> &from) {
    return on_device ? Device(from) : Device();
}

static xd_result tp_rank(xd_comm *world, void *argument) {
    TpWorld *w = (TpWorld *)argument;
    const RankGpu gpu(world, nullptr, w->on_device);
    xd_ctx *ctx = gpu.ctx;
    xd_vocab *vocab = nullptr;
    const int64_t columns = w->columns(gpu.rank), begin = w->cuts[(size_t)gpu.rank];
    CHECK(vocab_of(ctx, world, { begin, begin + columns }, TP_COLS, &vocab) == XD_OK);
    std::vector<float> x = w->shard(w->student, gpu.rank), y = w->shard(w->teacher, gpu.rank);
    {
        std::vector<float> topk(x);
        const Device dt = copy_if(w->on_device, topk);
        std::vector<int64_t> labels = { 3, 44, XD_IGNORE_INDEX, 20 };
        xd_loss_values values;
        xd_status status = {};
        const Device dx = copy_if(w->on_device, x), dy = copy_if(w->on_device, y);
        const Device dl = copy_if(w->on_device, labels),
                     ds = copy_if(w->on_device, std::vector<xd_status>(1));
        const Device dv = copy_if(w->on_device, std::vector<xd_loss_values>(1));
        xd_loss_desc d = {};
        d.student = { w->on_device ? dx.at<void>() : (void *)x.data(), XD_DTYPE_F32, TP_ROWS, columns, 0 };
        d.teacher = { w->on_device ? dy.at<void>() : (void *)y.data(), XD_DTYPE_F32, TP_ROWS, columns, 0 };
        d.common.gradient = d.student;
        d.common.labels.data = w->on_device ? dl.at<int64_t>() : labels.data();
        d.common.status = w->on_device ? ds.at<xd_status>() : &status;
        d.vocab = vocab;
        d.hard_weight = d.soft_weight = 1.0;
        d.divergence = w->divergence;
        d.beta = 0.5;
        d.temperature = 1.5;
        xd_topk_desc t = {};
        t.student = { w->on_device ? dt.at<void>() : (void *)topk.data(), XD_DTYPE_F32, TP_ROWS, columns, 0 };
        t.teacher = d.teacher;
        t.common.gradient = t.student;
        t.common.labels = d.common.labels;
        t.common.status = d.common.status;
        t.vocab = vocab;
        t.divergence = w->divergence;
        t.beta = 0.5;
        t.k = 9;
        t.mode = XD_TOPK_TAIL;
        xd_loss_values *out = w->on_device ? dv.at<xd_loss_values>() : &values;
        CHECK(xd_loss(ctx, &d, out) == XD_OK);
        if (w->on_device) CHECK(xd_read(ctx, &values, out, sizeof values) == XD_OK);
        if (gpu.rank == 0) w->values = values;
        CHECK(xd_topk_kl_loss(ctx, &t, out) == XD_OK);
        if (w->on_device) {
            CHECK(xd_read(ctx, &values, out, sizeof values) == XD_OK);
            xd_status read;
            CHECK(xd_read(ctx, &read, d.common.status, sizeof read) == XD_OK);
            CHECK(xd_status_check(ctx, &read) == XD_OK);
            CHECK(xd_read(ctx, x.data(), dx.at<void>(), x.size() * sizeof(float)) == XD_OK);
            CHECK(xd_read(ctx, topk.data(), dt.at<void>(), x.size() * sizeof(float)) == XD_OK);
        }
        if (gpu.rank == 0) w->topk_values = values;
        w->put(gpu.rank, x, &w->gradient);
        w->put(gpu.rank, topk, &w->topk_gradient);
        CHECK(xd_barrier(world) == XD_OK); /* nobody frees what a peer may read */
    }
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static TpWorld tp_run(const std::vector<int64_t> &cuts, bool on_device, xd_divergence divergence,
                      xd_reduction reduction) {
    TpWorld w(cuts, on_device);
    w.divergence = divergence;
    w.run(reduction, tp_rank, &w);
    return w;
}

static void tp_compare(const TpWorld &a, const TpWorld &b) {
    check_near(&a.values.loss, &b.values.loss, 3, 3e-6);
    check_near(&a.topk_values.loss, &b.topk_values.loss, 3, 5e-6);
    check_near(a.gradient.data(), b.gradient.data(), TP_ROWS * TP_COLS, 3e-6);
    check_near(a.topk_gradient.data(), b.topk_gradient.data(), TP_ROWS * TP_COLS, 3e-6);
}

XD_TEST(ranks_that_share_a_vocabulary_find_what_one_cpu_finds) {
    static const xd_reduction modes[] = { XD_REDUCTION_DETERMINISTIC, XD_REDUCTION_INVARIANT };
    static const std::vector<int64_t> whole = { 0, TP_COLS }, cuts[] = { { 0, 15, 30, TP_COLS },
                                                                         { 0, 7, TP_COLS - 1, TP_COLS },
                                                                         { 0, 0, 31, TP_COLS } };
    for (const xd_reduction mode : modes)
        for (int kind = 0; kind < 3; kind++) {
            const TpWorld cpu = tp_run(whole, false, (xd_divergence)kind, mode);
            const TpWorld one = tp_run(whole, true, (xd_divergence)kind, mode);
            tp_compare(one, cpu);
            for (const std::vector<int64_t> &cut : cuts) {
                const TpWorld parts = tp_run(cut, true, (xd_divergence)kind, mode);
                tp_compare(parts, cpu);
                if (mode != XD_REDUCTION_INVARIANT) continue;
                CHECK(memcmp(&one.values, &parts.values, sizeof one.values) == 0);
                CHECK(memcmp(&one.topk_values, &parts.topk_values, sizeof one.values) == 0);
                CHECK_SAME(one.gradient, parts.gradient);
                CHECK_SAME(one.topk_gradient, parts.topk_gradient);
            }
        }
}

/* ---- rows ---- */

XD_TEST(denominators_are_counted_to_the_bit) {
    Pair pair;
    Random random(4);
    const int64_t n = 1000;
    std::vector<int64_t> labels((size_t)n);
    std::vector<float> weight((size_t)n);
    std::vector<uint8_t> mask((size_t)n);
    for (size_t i = 0; i < (size_t)n; i++) {
        labels[i] = random.below(3) ? 1 : XD_IGNORE_INDEX;
        weight[i] = fabsf(random.unit()) * 1e-3f;
        mask[i] = random.below(4) != 0;
    }
    for (int bad = 0; bad < 2; bad++) {
        Board board;
        labels[7] = 1;
        mask[7] = 1;
        if (bad) weight[7] = -1.0f;
        const size_t l = board.add(labels), w = board.add(weight), m = board.add(mask);
        const size_t out = board.add(nullptr, sizeof(xd_denominator));
        const std::vector<unsigned char> after =
            pair.run(&board, 5, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
                xd_positions p[2] = { { n, { place<int64_t>(at, l), XD_DTYPE_I64 }, false, 0, place<uint8_t>(at, m),
                                        place<float>(at, w) },
                                      { 33, {}, false, 0, nullptr, nullptr } };
                const xd_result refused = bad && ctx == pair.cpu ? XD_ERROR_ARGUMENT : XD_OK;
                CHECK(xd_denominator_count(ctx, nullptr, p, 2, place<xd_denominator>(at, out)) == refused);
            });
        const xd_denominator *a = (const xd_denominator *)(const void *)(after.data() + out);
        if (!bad) CHECK(memcmp(a, board.bytes.data() + out, sizeof *a) == 0);
        CHECK_EQ_INT(a->refused, bad);
        CHECK((a->inverse > 0.0) == !bad);
    }
}

XD_TEST(losses_without_rows_find_nothing_counted) {
    Pair pair;
    const LossCase c = { { 0, 12, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 },
                         XD_KL_FORWARD,
                         1.0,
                         0.5,
                         0.5,
                         0.0,
                         false,
                         false };
    compare_losses(&pair, c, 1);
}

XD_CUDA_TEST_MAIN()
