/* Tiles of chunks over common and uncommon ids on a GPU against the plain CPU, which works on one chunk after another: tails of every
 * form of sort, chunks of several rows, ids that have a partner and are in a tail too. */
#include "cuda_loss_test.h"

enum { STUDENT_ROWS = 6, TEACHER_ROWS = 5, CHUNKS = 4 };

struct TileCase {
    int64_t student, teacher, pairs, tail;
    xd_dtype dtype;
    bool reverse, overlap;
    xd_reduction reduction;
    int64_t tile;
};

/* Every third id has a partner, up to `pairs`; the others, and some of these where ids overlap, have none. */
struct Map {
    std::vector<int32_t> student, teacher, student_rest, teacher_rest;
    xd_exact_map map = {};

    explicit Map(const TileCase &c) {
        for (int64_t v = 0; v < c.student; v++) {
            const bool paired = v % 3 == 1 && (int64_t)student.size() < c.pairs;
            if (paired) student.push_back((int32_t)v);
            if (!paired || (c.overlap && v % 2)) student_rest.push_back((int32_t)v);
        }
        for (size_t i = 0; i < student.size(); i++) teacher.push_back((int32_t)((int64_t)i * 7 % c.teacher));
        for (int64_t u = 0; u < c.teacher; u++)
            if (u % 4 != 2) teacher_rest.push_back((int32_t)u);
        map.student = student.data();
        map.teacher = teacher.data();
        map.pairs = (int64_t)student.size();
        map.student_rest = student_rest.data();
        map.student_rest_count = (int64_t)student_rest.size();
        map.teacher_rest = teacher_rest.data();
        map.teacher_rest_count = (int64_t)teacher_rest.size();
    }
};

/* Values of one context and the gradient. */
struct Outcome {
    xd_xtoken_values values = {};
    xd_xtoken_teacher_values teacher = {};
    std::vector<float> gradient;
};

static Outcome run_case(xd_ctx *ctx, const TileCase &c, const Map &map, const void *student, const void *teacher, void *gradient) {
    static const int64_t student_chunks[STUDENT_ROWS] = { 0, 1, 1, 2, 3, -1 }, teacher_chunks[TEACHER_ROWS] = { 0, 1, 2, 2, 3 };
    xd_xtoken_teacher t = xd_xtoken_teacher_defaults(XD_XTOKEN_GOLD);
    xd_xtoken_desc d = xd_xtoken_defaults();
    xd_vocab_desc whole = {};
    xd_vocab *vocab = nullptr;
    Outcome out;
    whole.size = c.student;
    CHECK(xd_vocab_create(ctx, &whole, &vocab) == XD_OK);
    t.logits = { (void *)teacher, c.dtype, TEACHER_ROWS, c.teacher, 0 };
    t.student_chunks = student_chunks;
    t.teacher_chunks = teacher_chunks;
    t.chunks = CHUNKS;
    t.gold.map = &map.map;
    d.student = { (void *)student, c.dtype, STUDENT_ROWS, c.student, 0 };
    d.common.gradient = { gradient, c.dtype, STUDENT_ROWS, c.student, 0 };
    d.vocab = vocab;
    d.teachers = &t;
    d.teacher_count = 1;
    d.teacher_values = &out.teacher;
    d.temperature = 1.3;
    d.reverse = c.reverse;
    d.tail = c.tail;
    d.tile = c.tile;
    d.ce_weight = 0.0;
    CHECK(xd_xtoken_loss(ctx, &d, &out.values) == XD_OK);
    xd_vocab_destroy(vocab);
    return out;
}

static void compare_case(const TileCase &c, uint64_t seed) {
    Random random(seed);
    Gpu gpu(c.reduction);
    xd_ctx *plain = plain_ctx();
    const Map map(c);
    const std::vector<unsigned char> student = logits(c.dtype, { STUDENT_ROWS, c.student, 0, 0, c.dtype, c.dtype, c.dtype }, &random);
    const std::vector<unsigned char> teacher = logits(c.dtype, { TEACHER_ROWS, c.teacher, 0, 0, c.dtype, c.dtype, c.dtype }, &random);
    std::vector<unsigned char> gradient(student.size());
    const Device near_student(student), near_teacher(teacher), near_gradient(gradient);
    const Outcome cpu = run_case(plain, c, map, student.data(), teacher.data(), gradient.data());
    const Outcome mine = run_case(gpu.ctx, c, map, near_student.at<void>(), near_teacher.at<void>(), near_gradient.at<void>());
    const std::vector<unsigned char> back = near_gradient.host<unsigned char>();
    const int64_t count = STUDENT_ROWS * c.student;
    CHECK_NEAR(mine.values.loss, cpu.values.loss, 3e-6 * fmax(1.0, fabs(cpu.values.loss)));
    CHECK_NEAR(mine.teacher.divergence, cpu.teacher.divergence, 3e-6 * fmax(1.0, fabs(cpu.teacher.divergence)));
    CHECK_NEAR(mine.teacher.tail, cpu.teacher.tail, 3e-6 * fmax(1.0, fabs(cpu.teacher.tail)));
    CHECK(mine.teacher.agreeing == cpu.teacher.agreeing && mine.teacher.compared == CHUNKS);
    check_near(widened(back.data(), c.dtype, count).data(), widened(gradient.data(), c.dtype, count).data(), count,
               tolerance_of(c.dtype));
    xd_ctx_destroy(plain);
}

XD_TEST(tiles_with_tails_of_every_sort_are_the_chunks_of_the_cpu) {
    const xd_reduction reductions[2] = { XD_REDUCTION_DETERMINISTIC, XD_REDUCTION_INVARIANT };
    for (int form = 0; form < 8; form++)
        compare_case({ 211, 170, 40, form % 3 ? 50 : 0, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, form / 4 == 1, form % 4 == 3,
                       reductions[form / 2 % 2], form % 3 },
                     10 + (uint64_t)form);
    for (int form = 0; form < 2; form++) /* on the chip */
        compare_case({ 2900, 2500, 700, 1500, form ? XD_DTYPE_BF16 : XD_DTYPE_F32, form == 1, form == 1, reductions[form], 0 },
                     20 + (uint64_t)form);
    compare_case({ 9100, 11400, 300, 8300, XD_DTYPE_F32, false, false, XD_REDUCTION_DETERMINISTIC, 0 }, 30); /* in memory */
}

/* A row that is not finite leaves its chunk without a gradient, and the others as they are. */
XD_TEST(a_chunk_that_is_not_finite_leaves_the_others_of_its_tile) {
    const TileCase c = { 211, 170, 40, 50, XD_DTYPE_F32, false, false, XD_REDUCTION_DETERMINISTIC, 0 };
    Random random(40);
    Gpu gpu;
    const Map map(c);
    std::vector<unsigned char> student = logits(c.dtype, { STUDENT_ROWS, c.student, 0, 0, c.dtype, c.dtype, c.dtype }, &random);
    std::vector<unsigned char> teacher = logits(c.dtype, { TEACHER_ROWS, c.teacher, 0, 0, c.dtype, c.dtype, c.dtype }, &random);
    std::vector<float> found[2];
    for (int bad = 0; bad < 2; bad++) {
        if (bad) xd_store_f64(teacher.data(), c.dtype, 4 * c.teacher + 9, NAN);
        const Device near_student(student), near_teacher(teacher), near_gradient(std::vector<unsigned char>(student.size()));
        xd_xtoken_teacher t = xd_xtoken_teacher_defaults(XD_XTOKEN_GOLD);
        xd_status status = {};
        const int64_t student_chunks[STUDENT_ROWS] = { 0, 1, 1, 2, 3, -1 }, teacher_chunks[TEACHER_ROWS] = { 0, 1, 2, 2, 3 };
        xd_xtoken_desc d = xd_xtoken_defaults();
        xd_vocab_desc whole = {};
        xd_vocab *vocab = nullptr;
        xd_xtoken_values values;
        whole.size = c.student;
        CHECK(xd_vocab_create(gpu.ctx, &whole, &vocab) == XD_OK);
        t.logits = { near_teacher.at<void>(), c.dtype, TEACHER_ROWS, c.teacher, 0 };
        t.student_chunks = student_chunks;
        t.teacher_chunks = teacher_chunks;
        t.chunks = CHUNKS;
        t.gold.map = &map.map;
        d.student = { near_student.at<void>(), c.dtype, STUDENT_ROWS, c.student, 0 };
        d.common.gradient = { near_gradient.at<void>(), c.dtype, STUDENT_ROWS, c.student, 0 };
        d.common.status = &status;
        d.vocab = vocab;
        d.teachers = &t;
        d.teacher_count = 1;
        d.ce_weight = 0.0;
        CHECK(xd_xtoken_loss(gpu.ctx, &d, &values) == XD_OK);
        CHECK(status.not_finite == bad && isfinite(values.loss));
        found[bad] = widened(near_gradient.host<unsigned char>().data(), c.dtype, STUDENT_ROWS * c.student);
        xd_vocab_destroy(vocab);
    }
    for (int64_t i = 0; i < STUDENT_ROWS * c.student; i++) {
        const bool of_bad = i / c.student == 4;
        CHECK(of_bad ? found[1][(size_t)i] == 0.0f : found[1][(size_t)i] == found[0][(size_t)i]);
    }
}

XD_CUDA_TEST_MAIN()
