/* Columns of a teacher chosen on a GPU are those that the CPU chooses, and a student learns from them over a route. */
#include "cuda_test.h"
#include "xtoken_problem.h"
#include "loss_calls.h"

#include <algorithm>

enum { HELD = 5, SIZE = 23, K = 4, GROUP = 4 };

/* Some of them are zeros, denormals, infinite or not numbers. */
static double logit(int64_t row, int64_t column) {
    static const double odd[] = { 0.0, -0.0, 1e-41, -3e-39, 3.3e38, -HUGE_VAL, NAN, 1.00390625 };
    Random random((uint64_t)(row * SIZE + column) + 17);
    random.bits();
    return random.below(13) == 5 ? odd[random.below(8)] : 40.0 * (double)random.unit();
}

/* What the ranks of a mesh of two by two, vocabulary by positions, have chosen. */
struct Choice {
    bool on_gpu, masked;
    xd_dtype dtype, values_dtype;
    std::vector<int64_t> ids[GROUP];
    std::vector<unsigned char> values[GROUP];
};

static xd_result choose(xd_comm *world, void *argument) {
    Choice *choice = (Choice *)argument;
    const RankGpu p(world, nullptr, choice->on_gpu);
    const int tp_rank = p.rank % 2, cp_rank = p.rank / 2;
    xd_comm *tp = nullptr, *cp = nullptr;
    xd_vocab *vocab = nullptr;
    if (choice->on_gpu) CHECK(!xd_ctx_kernels(p.ctx)->rows.finite_maxima); // for memory of the host only
    CHECK(xd_comm_split(world, cp_rank, tp_rank, &tp) == XD_OK);
    CHECK(xd_comm_split(world, 2 + tp_rank, cp_rank, &cp) == XD_OK);
    const int64_t begin = tp_rank ? 9 : 0, columns = tp_rank ? SIZE - 9 : 9, stride = columns + 2,
                  wide = K + 1;
    CHECK(vocab_of(p.ctx, tp, { begin, begin + columns }, SIZE, &vocab) == XD_OK);
    std::vector<unsigned char> logits((size_t)(SEQUENCES * HELD * stride) * xd_dtype_size(choice->dtype));
    std::vector<unsigned char> values((size_t)(SEQUENCES * HELD * wide) *
                                      xd_dtype_size(choice->values_dtype));
    std::vector<uint8_t> mask(SEQUENCES * HELD);
    for (int64_t r = 0; r < SEQUENCES * HELD; r++) {
        mask[(size_t)r] = r % 3 != 1;
        for (int64_t c = 0; c < columns; c++)
            xd_store_f64(logits.data(), choice->dtype, r * stride + c,
                         logit(cp_rank * SEQUENCES * HELD + r, begin + c));
    }
    Device far_logits(choice->on_gpu ? logits : std::vector<unsigned char>());
    Device far_values(choice->on_gpu ? values : std::vector<unsigned char>());
    Device far_mask(choice->on_gpu ? mask : std::vector<uint8_t>());
    xd_rows from = { logits.data(), choice->dtype, SEQUENCES * HELD, columns, stride };
    xd_rows to = { values.data(), choice->values_dtype, SEQUENCES * HELD, K, wide };
    const uint8_t *votes = mask.data();
    if (choice->on_gpu) {
        from.data = far_logits.at<void>();
        to.data = far_values.at<void>();
        votes = far_mask.at<uint8_t>();
    }
    if (!choice->masked) votes = nullptr;
    std::vector<int64_t> &ids = choice->ids[p.rank];
    ids.assign(SEQUENCES * K, -1);
    to.cols = K + 1;
    xd_vocab_topk_desc d = vocab_topk_desc(vocab, from, SEQUENCES, K);
    d.mask = votes;
    d.comm = cp;
    CHECK(vocab_topk_gather(p.ctx, &d, ids.data(), to) == XD_ERROR_SHAPE);
    to.cols = K;
    CHECK(ids[0] == -1);
    CHECK(vocab_topk_gather(p.ctx, &d, ids.data(), to) == XD_OK);
    choice->values[p.rank] = choice->on_gpu ? far_values.host<unsigned char>() : values;
    xd_vocab_destroy(vocab);
    xd_comm_destroy(tp);
    xd_comm_destroy(cp);
    return XD_OK;
}

XD_TEST(columns_chosen_on_a_gpu_are_those_of_the_cpu) {
    xd_ctx_desc desc = {};
    desc.timeout_seconds = 300.0;
    for (int way = 0; way < 4; way++) {
        Choice host = {}, gpu = {};
        host.masked = gpu.masked = way % 2 == 1;
        host.dtype = gpu.dtype = way == 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        host.values_dtype = gpu.values_dtype = way == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        gpu.on_gpu = true;
        CHECK(xd_run_threads(GROUP, &desc, choose, &host, nullptr) == XD_OK);
        CHECK(xd_run_threads(GROUP, &desc, choose, &gpu, nullptr) == XD_OK);
        for (int r = 0; r < GROUP; r++) {
            CHECK_SAME(host.ids[r], gpu.ids[r]);
            CHECK_SAME(host.ids[r], host.ids[0]);
            CHECK_ELEMENTS(host.values_dtype, host.values[r], gpu.values[r]);
        }
    }
}

/* P-KL of a problem on one GPU: the teacher's rows with its whole vocabulary, or the columns that were chosen there,
 * through a route. */
static xd_xtoken_values distill(problem *p, bool routed, std::vector<float> *gradient) {
    call c;
    xd_comm *self = nullptr;
    xd_vocab *vocab = nullptr;
    xd_route *route = nullptr;
    xd_route_window w = {};
    int64_t ids[SEQUENCES * K];
    uint8_t mask[TEACHER_ROWS];
    open_call(p, &c);
    Device student(p->student, sizeof p->student), teacher(p->teacher, sizeof p->teacher);
    Device derivative(c.gradient, sizeof c.gradient), values(std::vector<float>(TEACHER_ROWS * K));
    c.d.student.data = student.at<void>();
    c.d.common.gradient.data = derivative.at<void>();
    c.teachers[0].logits.data = teacher.at<void>();
    CHECK(xd_comm_self(p->ctx, &self) == XD_OK);
    if (routed) {
        for (int i = 0; i < TEACHER_ROWS; i++) { /* chunks that both sides have */
            const int64_t *theirs = p->student_chunks + i / TEACHER_LENGTH * STUDENT_LENGTH;
            mask[i] = 0;
            for (int j = 0; j < STUDENT_LENGTH; j++)
                mask[i] |= p->teacher_chunks[i] >= 0 && theirs[j] == p->teacher_chunks[i];
        }
        Device votes(mask, sizeof mask);
        const xd_rows rows = { values.at<void>(), XD_DTYPE_F32, TEACHER_ROWS, K, 0 };
        CHECK(vocab_even(p->ctx, nullptr, TEACHER_SIZE, &vocab) == XD_OK);
        xd_vocab_topk_desc choice = vocab_topk_desc(vocab, c.teachers[0].logits, SEQUENCES, K);
        choice.mask = votes.at<uint8_t>();
        CHECK(vocab_topk_gather(p->ctx, &choice, ids, rows) == XD_OK);
        xd_route_desc d = {};
        d.payload = XD_ROUTE_COLUMNS;
        d.samples = SEQUENCES;
        d.length = TEACHER_LENGTH;
        d.columns = K;
        d.teacher.sample_count = d.student.sample_count = SEQUENCES;
        CHECK(xd_route_create(self, &d, &route) == XD_OK);
        CHECK(xd_route_send(route, rows, ids) == XD_OK);
        CHECK(xd_route_take(route, &w) == XD_OK && w.is_view);
        c.teachers[0].logits = w.rows;
        c.teachers[0].projected.column_ids = w.ids;
    }
    const xd_xtoken_values out = run_call(p, &c);
    if (routed) CHECK(xd_route_release(route) == XD_OK);
    *gradient = derivative.host<float>();
    xd_route_destroy(route);
    xd_vocab_destroy(vocab);
    xd_vocab_destroy(c.vocab);
    xd_comm_destroy(self);
    return out;
}

XD_TEST(a_student_learns_from_routed_columns_what_it_learns_from_all) {
    problem p;
    xd_cuda *cuda = nullptr;
    std::vector<float> whole, chosen;
    open_problem(&p, XD_XTOKEN_PROJECTED);
    p.settings.columns = K;
    CHECK(xd_cuda_create(p.ctx, nullptr, &cuda) == XD_OK);
    const xd_xtoken_values a = distill(&p, false, &whole), b = distill(&p, true, &chosen);
    CHECK(a.loss > 0.0 && a.loss == b.loss);
    CHECK_SAME(whole, chosen);
    xd_cuda_destroy(cuda);
    close_problem(&p);
}

/* Of one tile, of a part of one, and of several in one or two sizes. */
XD_TEST(ids_are_sorted_whatever_their_number) {
    const Gpu gpu;
    const xd_launch launch = gpu.launch();
    for (int64_t count : { 0, 1, 4095, 4096, 4097, 9000, 17000 }) {
        Random random((uint64_t)count + 3);
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < count; i++) ids.push_back(random.below(3 * count) - 5);
        Device device(ids);
        CHECK(gpu.kernels()->rows.sort_ids(&launch, device.at<int64_t>(), count) == XD_OK);
        gpu.wait();
        std::sort(ids.begin(), ids.end());
        CHECK(device.host<int64_t>() == ids);
    }
}

XD_CUDA_TEST_MAIN()
