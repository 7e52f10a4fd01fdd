/* A loss over rows with a masked column, findings, and logits that grow, on both sides. */
#ifndef XD_CUDA_LOSS_CASE_H
#define XD_CUDA_LOSS_CASE_H

#include "cuda_loss_test.h"

/* Elements of rows; NULL: as they are. */
struct Logits {
    float (*student)(int64_t row, int64_t column, Random *random);
    float (*teacher)(int64_t row, int64_t column, Random *random);
};

struct LossCase {
    Shape shape;
    xd_divergence divergence;
    double temperature, hard, soft, smoothing;
    bool in_place, bad;
    bool rising = false; /* logits grow along a row: both sides', the student's, the teacher's */
    const Logits *given = nullptr;
    double scale = 0.7;
};

static inline void spoil(std::vector<unsigned char> *student, std::vector<unsigned char> *teacher,
                  const LossCase &c) {
    const Shape &s = c.shape;
    for (int64_t r = 0; r < s.rows && s.cols > 4; r++) { /* a masked column */
        xd_store_f64(student->data(), s.student, r * s.stride() + 3, -HUGE_VAL);
        xd_store_f64(teacher->data(), s.teacher, r * s.stride() + 3, -HUGE_VAL);
    }
    for (int64_t i = 4; i < s.cols && c.rising; i++)
        for (int64_t r = 0; r < s.rows; r++) {
            static const double student_slope[] = { 20.0, 300.0, -15.0 },
                                teacher_slope[] = { 15.0, -10.0, 250.0 };
            const double t = (double)i / (double)s.cols;
            xd_store_f64(student->data(), s.student, r * s.stride() + i, student_slope[r % 3] * t * t);
            xd_store_f64(teacher->data(), s.teacher, r * s.stride() + i, teacher_slope[r % 3] * t);
        }
    if (!c.bad) return;
    if (s.rows > 1) xd_store_f64(student->data(), s.student, s.stride(), NAN);
    if (s.rows > 2) xd_store_f64(teacher->data(), s.teacher, 2 * s.stride() + s.cols - 1, HUGE_VAL);
    for (int64_t i = 0; i < s.cols && s.rows > 3; i++)
        xd_store_f64(student->data(), s.student, 3 * s.stride() + i, -HUGE_VAL);
    for (int64_t i = 0; i < s.cols && s.rows > 8; i++)
        xd_store_f64(student->data(), s.student, 8 * s.stride() + i, NAN);
}

static inline void compare_losses(Pair *pair, const LossCase &c, uint64_t seed) {
    Random random(seed);
    const Shape &s = c.shape;
    const size_t size_x = xd_dtype_size(s.student), size_y = xd_dtype_size(s.teacher),
                 size_g = xd_dtype_size(s.gradient);
    std::vector<unsigned char> student = logits(s.student, s, &random),
                               teacher = logits(s.teacher, s, &random);
    std::vector<unsigned char> gradient((size_t)(s.rows * s.stride()) * size_g, 0x5a);
    std::vector<int64_t> labels((size_t)s.rows);
    std::vector<float> weight((size_t)s.rows);
    std::vector<uint8_t> mask((size_t)s.rows, 1);
    spoil(&student, &teacher, c);
    for (int64_t i = 0; c.given && i < s.rows * s.stride(); i++) {
        xd_store_f64(student.data(), s.student, i, (double)c.given->student(i / s.stride(), i % s.stride(), &random));
        xd_store_f64(teacher.data(), s.teacher, i, (double)c.given->teacher(i / s.stride(), i % s.stride(), &random));
    }
    for (int64_t r = 0; r < s.rows; r++) {
        labels[(size_t)r] = c.bad && r == 4 ? s.cols : r == 5 ? XD_IGNORE_INDEX : random.below(s.cols);
        if (labels[(size_t)r] == 3 && s.cols > 4) labels[(size_t)r] = 1; /* not the masked one */
        weight[(size_t)r] = 0.5f + (float)r;
        if (c.bad && r == 7) weight[(size_t)r] = NAN;
        mask[(size_t)r] = r != 6;
    }
    Board board;
    const double scale = c.scale;
    const size_t x = board.add(student, (size_t)s.skew * size_x),
                 y = board.add(teacher, (size_t)s.skew * size_y);
    const size_t g = c.in_place ? x : board.add(gradient, (size_t)s.skew * size_g);
    const size_t l = board.add(labels), w = board.add(weight), m = board.add(mask),
                 f = board.add(&scale, sizeof scale);
    const xd_status none = {};
    const size_t status = board.add(&none, sizeof none), values = board.add(nullptr, sizeof(xd_loss_values));
    const size_t row_loss = board.add(nullptr, (size_t)s.rows * sizeof(float));
    const size_t work_bytes = 4096 + (size_t)s.rows * 1024, work = board.add(nullptr, work_bytes);
    Board untouched = board;
    float *unrounded = nullptr; /* where the CPU's gradient goes, in F32, once the two sides have run */
    const auto call = [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
            xd_loss_desc d = {};
            d.student = rows_at(at, x, s.student, s);
            if (c.soft != 0.0) d.teacher = rows_at(at, y, s.teacher, s);
            d.common.gradient = rows_at(at, g, s.gradient, s);
            if (unrounded) d.common.gradient.data = unrounded, d.common.gradient.dtype = XD_DTYPE_F32;
            d.common.gradient.cols = s.stride(); /* the padding is zeroed */
            d.common.labels.data = place<int64_t>(at, l);
            d.common.mask = place<uint8_t>(at, m);
            d.common.row_weight = place<float>(at, w);
            d.common.scale = place<double>(at, f);
            d.common.status = place<xd_status>(at, status);
            d.common.row_loss = place<float>(at, row_loss);
            d.common.workspace = place<void>(at, work);
            d.common.workspace_bytes = work_bytes;
            d.vocab = vocab;
            d.hard_weight = c.hard;
            d.soft_weight = c.soft;
            d.temperature = c.temperature;
            d.divergence = c.divergence;
            d.label_smoothing = c.smoothing;
            d.beta = 0.3;
            CHECK(xd_loss(ctx, &d, place<xd_loss_values>(at, values)) == XD_OK);
        };
    const std::vector<unsigned char> after = pair->run(&board, s.cols, true, call);
    const unsigned char *a = after.data(), *b = board.bytes.data();
    const int64_t count = s.rows * s.stride();
    std::vector<float> expected = widened(b + g, s.gradient, count);
    if (s.gradient == XD_DTYPE_BF16) {
        xd_vocab *vocab = nullptr;
        unrounded = expected.data();
        CHECK(vocab_even(pair->cpu, nullptr, s.cols, &vocab) == XD_OK);
        call(pair->cpu, vocab, untouched.bytes.data());
        xd_vocab_destroy(vocab);
    }
    check_near(widened(a + g, s.gradient, count).data(), expected.data(), count, tolerance_of(s.gradient));
    check_near((const float *)(const void *)(a + row_loss), (const float *)(const void *)(b + row_loss),
               s.rows, 3e-6);
    const xd_loss_values *va = (const xd_loss_values *)(const void *)(a + values);
    const xd_loss_values *vb = (const xd_loss_values *)(const void *)(b + values);
    check_near(&va->loss, &vb->loss, 3, 3e-6);
    CHECK_EQ_INT(va->counted, vb->counted);
    check_status((const xd_status *)(const void *)(a + status),
                 (const xd_status *)(const void *)(b + status));
}

#endif
