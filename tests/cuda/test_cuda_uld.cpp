/* Universal logit distillation, the JSD of probabilities and KL estimators on a GPU against the plain CPU
 * kernels. */
#include "cuda_loss_test.h"

/* ---- universal logit distillation ---- */

/* One sequence: chunks of one and of several tokens with rows between them that belong to none. */
struct Sequence {
    Shape student, teacher;
    Board board;
    size_t x, y, gradient;
    std::vector<int64_t> ids, other_ids, matched, other_matched;
    std::vector<xd_aligned_chunk> chunks;
    xd_uld_desc desc = {};
    bool in_place = false;

    Sequence(int64_t columns, int64_t other, int64_t matches, xd_dtype dtype, uint64_t seed)
        : student{ 13, columns + 3, 5, 0, dtype, dtype, dtype }, teacher{ 11,    other + 1, 0,    0,
                                                                          dtype, dtype,     dtype } {
        static const int32_t bounds[5][4] = {
            { 2, 3, 1, 2 }, { 3, 4, 2, 5 }, { 6, 9, 5, 6 }, { 9, 9, 6, 7 }, { 10, 12, 8, 11 }
        };
        Random random(seed);
        x = board.add(logits(dtype, student, &random));
        y = board.add(logits(dtype, teacher, &random));
        gradient = board.add(
            std::vector<unsigned char>((size_t)(13 * student.stride()) * xd_dtype_size(dtype), 0x55));
        for (int64_t t = 0; t < 13; t++) ids.push_back(random.below(columns));
        for (int64_t t = 0; t < 11; t++) other_ids.push_back(random.below(other));
        for (int64_t i = 0; i < matches; i++) {
            matched.push_back((5 * i + 2) % columns);
            other_matched.push_back((3 * i + 1) % other);
        }
        for (const int32_t *b : bounds) {
            xd_aligned_chunk chunk = {};
            chunk.student_begin = b[0];
            chunk.student_end = b[1];
            chunk.teacher_begin = b[2];
            chunk.teacher_end = b[3];
            chunks.push_back(chunk);
        }
        desc.student.vocabulary = columns;
        desc.student.ids = ids.data();
        desc.student.temperature = 1.25;
        desc.teacher.vocabulary = other;
        desc.teacher.ids = other_ids.data();
        desc.chunks = chunks.data();
        desc.chunk_count = (int64_t)chunks.size();
        desc.matched_student = matched.data();
        desc.matched_teacher = other_matched.data();
        desc.matched_count = matches;
        desc.matched_weight = 0.4;
        desc.unmatched_weight = 0.6;
        desc.beta = 0.3;
        desc.scale = 1.5;
    }

    xd_uld_desc at(void *base, bool with_gradient) const {
        xd_uld_desc d = desc;
        d.student.logits = rows_at(base, x, student.student, student);
        d.teacher.logits = rows_at(base, y, teacher.teacher, teacher);
        if (with_gradient) d.gradient = rows_at(base, in_place ? x : gradient, student.gradient, student);
        return d;
    }

    /* Values of both sides agree; the gradients, with all that lies around them, too. */
    void compare(Pair *pair, bool with_gradient = true) {
        xd_uld_values values[2] = {};
        int side = 0;
        const std::vector<unsigned char> after =
            pair->run(&board, 1, false, [&](xd_ctx *ctx, xd_vocab *, void *at) {
                const xd_uld_desc d = this->at(at, with_gradient);
                CHECK(xd_uld_loss(ctx, &d, &values[side++]) == XD_OK);
            });
        CHECK_EQ_INT(values[1].chunks, values[0].chunks);
        CHECK_NEAR(values[1].loss, values[0].loss, 2e-6 * fabs(values[0].loss));
        CHECK_NEAR(values[1].matched, values[0].matched, 2e-6 * fabs(values[0].matched));
        CHECK_NEAR(values[1].unmatched, values[0].unmatched, 2e-6 * fabs(values[0].unmatched));
        const size_t from = in_place ? x : gradient;
        const int64_t count = student.rows * student.stride();
        const std::vector<float> a = widened(after.data() + from, student.gradient, count);
        const std::vector<float> b = widened(board.bytes.data() + from, student.gradient, count);
        std::vector<float> mine, theirs;
        for (size_t i = 0; i < a.size(); i++) {
            if (!with_gradient || (int64_t)i % student.stride() >= student.cols) {
                CHECK(a[i] == b[i]);
                continue;
            }
            mine.push_back(a[i]);
            theirs.push_back(b[i]);
        }
        check_near(mine.data(), theirs.data(), (int64_t)mine.size(), tolerance_of(student.gradient));
    }
};

XD_TEST(losses_of_sorted_lists_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 8; form++) {
        Sequence s(form % 4 < 2 ? 61 : 700, form % 4 < 2 ? 130 : 333, form / 4 * 23,
                   form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, 10 + (uint64_t)form);
        s.desc.merge = (xd_uld_merge)(form / 2 % 2);
        s.desc.beta = form == 4 ? 0.0 : form == 5 ? 1.0 : 0.3;
        s.compare(&pair, false);
        s.compare(&pair);
        s.in_place = true;
        s.compare(&pair);
    }
}

/* Lists of several segments, without and with many matched ids. */
XD_TEST(long_lists_are_sorted_as_on_the_cpu) {
    Pair pair;
    for (int hybrid = 0; hybrid < 2; hybrid++) {
        Sequence s(9001, 5003, hybrid ? 4400 : 0, XD_DTYPE_F32, 20);
        s.compare(&pair);
    }
}

/* All of a side is matched: nothing is left to be sorted there. */
XD_TEST(a_side_without_a_rest_is_compared_by_its_pairs_alone) {
    Pair pair;
    for (int form = 0; form < 2; form++) {
        Sequence s(form ? 40 : 97, form ? 97 : 40, 40, XD_DTYPE_F32, 30);
        s.matched.clear();
        s.other_matched.clear();
        for (int64_t i = 0; i < 40; i++) {
            s.matched.push_back(i);
            s.other_matched.push_back(39 - i);
        }
        s.desc.matched_student = s.matched.data();
        s.desc.matched_teacher = s.other_matched.data();
        s.compare(&pair);
    }
}

/* Rows of few different logits, zeros of both signs and -infinity among them: equals are ranked by id. */
XD_TEST(equal_logits_are_ranked_by_id) {
    static const double few[] = { 0.0, -0.0, 1.5, -2.0, 3.25, -HUGE_VAL };
    Pair pair;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Sequence s(900, 333, 0, bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32, 40);
        Random random(41);
        for (int64_t i = 0; i < 13 * s.student.stride(); i++)
            xd_store_f64(s.board.bytes.data() + s.x, s.student.student, i, few[random.below(6)]);
        s.compare(&pair);
    }
}

/* Twice the same distribution: no difference at all, and no slope. */
XD_TEST(a_student_that_is_its_teacher_has_no_loss) {
    Pair pair;
    Sequence s(300, 300, 0, XD_DTYPE_F32, 50);
    xd_uld_values values[2] = {};
    int side = 0;
    for (xd_aligned_chunk &chunk : s.chunks) {
        chunk.teacher_begin = chunk.student_begin;
        chunk.teacher_end = chunk.student_end;
    }
    s.desc.teacher = s.desc.student;
    s.teacher = s.student;
    s.y = s.x;
    const std::vector<unsigned char> after =
        pair.run(&s.board, 1, false, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_uld_desc d = s.at(at, true);
            CHECK(xd_uld_loss(ctx, &d, &values[side++]) == XD_OK);
        });
    CHECK(values[0].loss == 0.0 && values[1].loss == 0.0 && values[1].chunks == 4);
    const std::vector<float> g = widened(after.data() + s.gradient, XD_DTYPE_F32, 13 * s.student.stride());
    for (size_t i = 0; i < g.size(); i++)
        if ((int64_t)i % s.student.stride() < s.student.cols) CHECK(g[i] == 0.0f);
}

XD_TEST(a_sequence_without_chunks_has_a_gradient_of_zeros) {
    Pair pair;
    Sequence s(61, 130, 0, XD_DTYPE_F32, 60);
    s.desc.chunk_count = 0;
    s.compare(&pair);
    s.student.rows = s.teacher.rows = 0; /* nor any token */
    s.compare(&pair);
}

XD_TEST(rows_that_are_not_finite_are_refused_when_they_are_needed) {
    for (int form = 0; form < 4; form++) {
        Pair pair;
        Sequence s(61, 130, 0, XD_DTYPE_F32, 70);
        xd_uld_values values[2] = {};
        int side = 0;
        const bool student = form % 2 == 0, needed = form / 2 == 0;
        const int64_t row = student ? (needed ? 5 : 9) : needed ? 8 : 6; /* BAYESIAN: 9 and 6 are nobody's */
        const Shape shape = student ? s.student : s.teacher;
        xd_store_f64(s.board.bytes.data() + (student ? s.x : s.y), XD_DTYPE_F32, row * shape.stride() + 7,
                     form == 1 ? HUGE_VAL : NAN);
        values[1].loss = 7.0;
        if (form == 2) s.chunks[4].student_begin = 11;
        if (form == 3) s.chunks[4].teacher_begin = 9;
        pair.run(&s.board, 1, false, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_uld_desc d = s.at(at, true);
            CHECK_EQ_INT(xd_uld_loss(ctx, &d, &values[side++]), needed ? XD_ERROR_DATA : XD_OK);
            if (needed)
                CHECK(strstr(xd_last_error(ctx)->message, student ? "tokens [6, 9)" : "tokens [8, 11)"));
        });
        CHECK(needed ? values[1].loss == 7.0 : isfinite(values[1].loss));
    }
}

XD_TEST(what_cannot_be_is_refused_before_the_device_is_asked) {
    Gpu gpu;
    Sequence s(61, 130, 3, XD_DTYPE_F32, 80);
    Device device(s.board.bytes);
    xd_uld_values values;
    xd_uld_desc d = s.at(device.at<void>(), true);
    d.gradient.dtype = XD_DTYPE_F16;
    CHECK_EQ_INT(xd_uld_loss(gpu.ctx, &d, &values), XD_ERROR_DTYPE);
    d = s.at(device.at<void>(), true);
    s.ids[3] = 61;
    CHECK_EQ_INT(xd_uld_loss(gpu.ctx, &d, &values), XD_ERROR_ARGUMENT);
    s.ids[3] = 0;
    s.other_matched[1] = 130;
    CHECK_EQ_INT(xd_uld_loss(gpu.ctx, &d, &values), XD_ERROR_ARGUMENT);
}

/* ---- probabilities ---- */

static void compare_probabilities(Pair *pair, double beta, xd_dtype dtype, int64_t rows, int64_t cols,
                                  bool in_place) {
    Random random(90 + (uint64_t)(rows * cols));
    const Shape shape = { rows, cols, 3, 0, dtype, dtype, dtype };
    Board board;
    std::vector<unsigned char> s = logits(dtype, shape, &random), t = logits(dtype, shape, &random);
    for (int64_t i = 0; i < rows * shape.stride(); i++) {
        const double u = xd_load_f64(s.data(), dtype, i), v = xd_load_f64(t.data(), dtype, i);
        xd_store_f64(s.data(), dtype, i, i % 7 == 3 ? 1e-9 : i % 11 == 5 ? 0.0 : exp(2.0 * (u - 6.0)));
        xd_store_f64(t.data(), dtype, i, i % 5 == 1 ? 0.0 : exp(v - 6.0));
    }
    const size_t x = board.add(s), y = board.add(t), g = board.add(s);
    double loss[2] = {};
    int side = 0;
    const std::vector<unsigned char> after =
        pair->run(&board, 1, false, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            CHECK(xdi_compat_jsd_of_probabilities(
                      ctx, rows_at(at, x, dtype, shape), rows_at(at, y, dtype, shape), beta, 3.0,
                      rows_at(at, in_place ? x : g, dtype, shape), &loss[side++]) == XD_OK);
        });
    CHECK_NEAR(loss[1], loss[0], 1e-12 * fabs(loss[0]) + 1e-15);
    const int64_t count = rows * shape.stride();
    check_near(widened(after.data() + (in_place ? x : g), dtype, count).data(),
               widened(board.bytes.data() + (in_place ? x : g), dtype, count).data(), count,
               tolerance_of(dtype));
}

XD_TEST(the_jsd_of_probabilities_is_that_of_the_cpu) {
    Pair pair;
    static const double betas[] = { 0.0, 0.3, 1.0 };
    for (double beta : betas) {
        compare_probabilities(&pair, beta, XD_DTYPE_F32, 3, 1237, false);
        compare_probabilities(&pair, beta, XD_DTYPE_BF16, 5, 77, true);
    }
    compare_probabilities(&pair, 0.5, XD_DTYPE_F32, 9, 8001, true); /* more than a turn of every block */
    compare_probabilities(&pair, 0.5, XD_DTYPE_F32, 0, 8, false);
}

/* ---- estimates ---- */

static void compare_estimates(Pair *pair, xd_kl_estimator kind, int64_t count, bool weighted, double input,
                              double output, int64_t bad) {
    Random random(100 + (uint64_t)count);
    Board board;
    std::vector<float> s, t, w;
    for (int64_t i = 0; i < count; i++) {
        s.push_back(-8.0f + 8.0f * random.unit());
        t.push_back(-8.0f + 8.0f * random.unit());
        w.push_back((float)random.below(3));
    }
    if (bad >= 0) {
        s[(size_t)bad] = NAN;
        w[(size_t)bad] = 1.0f;
        if (bad > 0) t[(size_t)bad - 1] = NAN;
        if (bad > 0) w[(size_t)bad - 1] = 0.0f; /* left out, so nobody minds */
    }
    const size_t x = board.add(s), y = board.add(t), z = board.add(w), values = board.add(s),
                 gradient = board.add(s);
    double sum[2] = { 7.0, 7.0 };
    int side = 0;
    const std::vector<unsigned char> after =
        pair->run(&board, 1, false, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            xd_kl_estimate_desc d = {};
            d.logprobs = place<float>(at, x);
            d.reference = place<float>(at, y);
            d.weight = weighted ? place<float>(at, z) : nullptr;
            d.count = count;
            d.kind = kind;
            d.input_clamp = input;
            d.output_clamp = output;
            d.values = place<float>(at, values);
            d.gradient = place<float>(at, gradient);
            CHECK_EQ_INT(xd_kl_estimate(ctx, &d, &sum[side++]), bad < 0 ? XD_OK : XD_ERROR_DATA);
            if (bad >= 0)
                CHECK(strstr(xd_last_error(ctx)->message, ("token " + std::to_string(bad)).c_str()));
        });
    CHECK_NEAR(sum[1], sum[0], 1e-12 * fabs(sum[0]));
    check_near(place<float>((void *)after.data(), values), place<float>(board.bytes.data(), values), count,
               1e-6);
    check_near(place<float>((void *)after.data(), gradient), place<float>(board.bytes.data(), gradient),
               count, 1e-6);
}

XD_TEST(estimates_are_those_of_the_cpu) {
    Pair pair;
    for (int kind = 0; kind < 3; kind++) {
        compare_estimates(&pair, (xd_kl_estimator)kind, 1, false, 0.0, 0.0, -1);
        compare_estimates(&pair, (xd_kl_estimator)kind, 1000, true, 3.0, 2.0, -1);
        compare_estimates(&pair, (xd_kl_estimator)kind, 70001, false, HUGE_VAL, 10.0,
                          -1); /* more than a turn */
        compare_estimates(&pair, (xd_kl_estimator)kind, 1000, true, 0.0, 0.0, 613);
    }
    compare_estimates(&pair, XD_KL_K3, 0, false, 0.0, 0.0, -1);
}

XD_TEST_MAIN()
