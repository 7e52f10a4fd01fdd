/* Kernels of projected losses across tokenizers on a GPU against the plain CPU ones. */
#include "cuda_loss_test.h"

enum {
    STUDENT = 150, /* ids of the student, of which this shard has COLUMNS from FIRST on */
    FIRST = 10,
    COLUMNS = 131,
    WIDTH = 136,
    TEACHER = 97,
    SLOTS = 40,
    ROWS = 9,
    PLACES = 5
};

struct ProjectedCase {
    bool fixed, reverse, normalise, odd;
    xd_dtype dtype;
    bool in_place, written;
};

/* The projection, both ways, and J. */
struct Matrix {
    std::vector<int64_t> row_begin, column_begin, ids;
    std::vector<int32_t> teacher_id, student_id;
    std::vector<float> weight, column_weight;

    explicit Matrix(Random *random) {
        std::vector<float> dense((size_t)(STUDENT * TEACHER));
        for (int v = 0; v < STUDENT; v += 1 + v % 2)
            for (int e = 0; e < 3; e++)
                dense[(size_t)(v * TEACHER + (int)random->below(TEACHER))] = 0.5f + 0.4f * random->unit();
        for (int v = 0; v < STUDENT; v++) dense[(size_t)(v * TEACHER + 5)] = 0.01f; /* a column of more entries than a thread takes */
        for (int j = 0; j < SLOTS; j++) ids.push_back(j * 2 + 3);
        for (int v = 0; v < STUDENT; v++) {
            row_begin.push_back((int64_t)teacher_id.size());
            for (int u = 0; u < TEACHER; u++) {
                if (dense[(size_t)(v * TEACHER + u)] == 0.0f) continue;
                teacher_id.push_back(u);
                weight.push_back(dense[(size_t)(v * TEACHER + u)]);
            }
        }
        row_begin.push_back((int64_t)teacher_id.size());
        for (int u = 0; u < TEACHER; u++) {
            column_begin.push_back((int64_t)student_id.size());
            for (int v = 0; v < STUDENT; v++) {
                if (dense[(size_t)(v * TEACHER + u)] == 0.0f) continue;
                student_id.push_back(v);
                column_weight.push_back(dense[(size_t)(v * TEACHER + u)]);
            }
        }
        column_begin.push_back((int64_t)student_id.size());
    }
};

/* Where everything of a case lies on the board. */
struct Places {
    size_t student, teacher, gradient, lse, lse_one, rows, places, teacher_rows, teacher_places, row_begin,
        teacher_id, weight, column_begin, student_id, column_weight, ids, prepared, student_cells, teacher_cells, teacher_sums,
        chunks, delta_cells, delta, ce_factor, labels, written, u, begin, teacher_begin;
};

static Places lay_out(Board *board, const ProjectedCase &c, Random *random) {
    const Shape x = { ROWS, COLUMNS, WIDTH - COLUMNS, 0, c.dtype, c.dtype, c.dtype };
    const Shape y = { ROWS, TEACHER, 0, 0, c.dtype, c.dtype, c.dtype };
    const Matrix m(random);
    std::vector<unsigned char> student = logits(c.dtype, x, random), teacher = logits(c.dtype, y, random);
    if (c.odd) {
        xd_store_f64(student.data(), c.dtype, 2 * WIDTH + 7, NAN);
        xd_store_f64(teacher.data(), c.dtype, 3, -HUGE_VAL);
        for (int r = 0; r < ROWS; r++) xd_store_f64(student.data(), c.dtype, r * WIDTH + 11, -HUGE_VAL);
    }
    std::vector<double> lse, ce;
    std::vector<int64_t> labels;
    for (int r = 0; r < ROWS; r++) {
        double sums[2] = { 0.0, 0.0 };
        for (int v = 0; v < COLUMNS; v++) {
            const double z = xd_load_f64(student.data(), c.dtype, r * WIDTH + v);
            sums[0] += exp(z / 1.7);
            sums[1] += exp(z);
        }
        lse.push_back(log(sums[0]));
        lse.push_back(log(sums[1]));
        ce.push_back(r % 3 == 1 ? 0.0 : 0.25);
        labels.push_back(FIRST + r * 29 % COLUMNS);
    }
    std::vector<double> tau, one;
    for (int r = 0; r < ROWS; r++) {
        tau.push_back(lse[(size_t)(2 * r)]);
        one.push_back(lse[(size_t)(2 * r + 1)]);
    }
    xd_xtoken_chunk none = {};
    std::vector<xd_xtoken_chunk> chunks((size_t)PLACES, none);
    for (int i = 0; i < PLACES; i++) {
        chunks[(size_t)i].compared = i != 3; /* no rows */
        chunks[(size_t)i].student = (i == 0 ? 2.0 : i == 4 ? 3.0 : 1.0) + XD_XTOKEN_EPSILON;
        chunks[(size_t)i].teacher = (i == 2 ? 2.0 : 1.0) + XD_XTOKEN_EPSILON;
        chunks[(size_t)i].factor = 0.3 * i + 0.1;
        chunks[(size_t)i].limit = i == 1 ? 1e-6 : 0.0; /* which any divergence exceeds */
        chunks[(size_t)i].alone = i == 1;
    }
    Places p;
    p.student = board->add(student);
    p.teacher = board->add(teacher);
    p.gradient = board->add(c.in_place ? std::vector<unsigned char>(1) : logits(c.dtype, x, random));
    p.lse = board->add(tau);
    p.lse_one = board->add(one);
    p.rows = board->add(std::vector<int64_t>{ 0, 1, 3, 4, 5, 6, 7 });
    p.places = board->add(std::vector<int64_t>{ 0, 0, 1, 2, 4, 4, 4 });
    p.begin = board->add(std::vector<int64_t>{ 0, 2, 3, 4, 4, 7 });
    p.teacher_begin = board->add(std::vector<int64_t>{ 6, 7, 8, 10, 10, 11 }); /* of another tile */
    p.teacher_rows = board->add(std::vector<int64_t>{ 0, 2, 4, 5, 8 });
    p.teacher_places = board->add(std::vector<int64_t>{ 0, 1, 2, 2, 4 });
    p.row_begin = board->add(m.row_begin);
    p.teacher_id = board->add(m.teacher_id);
    p.weight = board->add(m.weight);
    p.column_begin = board->add(m.column_begin);
    p.student_id = board->add(m.student_id);
    p.column_weight = board->add(m.column_weight);
    p.prepared = board->add(std::vector<int64_t>(4 * (COLUMNS + 1 + 2 * m.weight.size() + TEACHER)));
    p.ids = board->add(m.ids);
    p.student_cells = board->add(std::vector<xd_fixed>((size_t)(PLACES * SLOTS)));
    p.teacher_cells = board->add(std::vector<xd_fixed>((size_t)(PLACES * SLOTS)));
    p.teacher_sums = board->add(std::vector<xd_fixed>((size_t)(PLACES * SLOTS)));
    p.chunks = board->add(chunks);
    p.delta_cells = board->add(std::vector<xd_fixed>((size_t)ROWS));
    p.delta = board->add(std::vector<double>{ 0.1, -0.2, 0.0, 1e-3, 0.4, 0.0, 0.05, 0.0, 0.0 });
    p.ce_factor = board->add(ce);
    p.labels = board->add(labels);
    p.written = board->add(std::vector<uint8_t>((size_t)ROWS, c.written ? 1 : 0));
    std::vector<float> u;
    for (int v = 0; v < COLUMNS; v++) u.push_back(random->unit());
    p.u = board->add(u);
    return p;
}

static xd_xtoken_rows rows_of(const ProjectedCase &c, const Places &p, void *at) {
    return { { place<void>(at, p.student), c.dtype, ROWS, COLUMNS, WIDTH },
             COLUMNS,
             FIRST,
             1.7,
             place<double>(at, p.lse),
             place<int64_t>(at, p.rows),
             place<int64_t>(at, p.places),
             7,
             nullptr,
             place<int64_t>(at, p.begin) };
}

/* Prepared by the context's kernels. */
static xd_xtoken_matrix matrix_at(xd_ctx *ctx, const Places &p, void *at) {
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_xtoken_matrix m = {};
    m.projection = { TEACHER,
                     place<int64_t>(at, p.row_begin),
                     place<int32_t>(at, p.teacher_id),
                     place<float>(at, p.weight),
                     place<int64_t>(at, p.column_begin),
                     place<int32_t>(at, p.student_id),
                     place<float>(at, p.column_weight),
                     0 };
    m.first = FIRST;
    m.columns = COLUMNS;
    m.ids = place<int64_t>(at, p.ids);
    m.k = SLOTS;
    m.prepared = place<void>(at, p.prepared);
    CHECK(xd_ctx_kernels(ctx)->xtoken.prepare(&launch, &m) == XD_OK);
    return m;
}

static xd_xtoken_delta_args delta_args_at(xd_ctx *ctx, const ProjectedCase &c, const Places &p, void *at) {
    return { rows_of(c, p, at),
             matrix_at(ctx, p, at),
             place<double>(at, p.student_cells),
             place<xd_xtoken_chunk>(at, p.chunks),
             place<double>(at, p.delta_cells),
             c.fixed,
             nullptr };
}

/* Forward: sums in cells; without fixed point also chunks and dy. */
static void sum_and_compare(xd_ctx *ctx, const ProjectedCase &c, const Places &p, void *at) {
    const xd_xtoken_kernels *kernels = &xd_ctx_kernels(ctx)->xtoken;
    const xd_launch launch = xd_ctx_launch(ctx);
    double *student = place<double>(at, p.student_cells), *teacher = place<double>(at, p.teacher_cells);
    const xd_xtoken_project_args a = { rows_of(c, p, at), PLACES, matrix_at(ctx, p, at), student, c.fixed, nullptr };
    xd_xtoken_target_args t = { a.x, PLACES, place<int64_t>(at, p.ids), SLOTS, teacher, c.fixed, nullptr };
    t.x.logits = { place<void>(at, p.teacher), c.dtype, ROWS, TEACHER, 0 };
    t.x.columns = TEACHER;
    t.x.lse = nullptr;
    t.x.rows = place<int64_t>(at, p.teacher_rows);
    t.x.places = place<int64_t>(at, p.teacher_places);
    t.x.begin = place<int64_t>(at, p.teacher_begin);
    t.x.count = 5;
    CHECK(kernels->project(&launch, &a) == XD_OK);
    CHECK(kernels->target(&launch, &t) == XD_OK);
    t.cells = place<double>(at, p.teacher_sums); /* which no divergence overwrites */
    CHECK(kernels->target(&launch, &t) == XD_OK);
    if (c.fixed) return;
    const xd_xtoken_divergence_args d = { student,     teacher,   place<xd_xtoken_chunk>(at, p.chunks),
                                          PLACES,      SLOTS,     c.normalise,
                                          c.reverse,   c.fixed,   nullptr };
    const xd_xtoken_delta_args delta = delta_args_at(ctx, c, p, at);
    CHECK(kernels->divergence(&launch, &d) == XD_OK);
    CHECK(kernels->delta(&launch, &delta) == XD_OK);
}

static std::vector<double> cells_of(const unsigned char *at, int64_t count, bool fixed) {
    std::vector<double> out;
    for (int64_t i = 0; i < count; i++) {
        xd_fixed cell;
        memcpy(&cell, at + (size_t)i * (fixed ? sizeof cell : sizeof(double)),
               fixed ? sizeof cell : sizeof(double));
        double value;
        memcpy(&value, &cell, sizeof value);
        if (fixed && cell.high >= (int64_t)1 << 56)
            value = NAN;
        else if (fixed)
            value = xd_fixed_read(cell);
        out.push_back(value);
    }
    return out;
}

static void check_cells(const unsigned char *a, const unsigned char *b, int64_t count, bool fixed) {
    const std::vector<double> x = cells_of(a, count, fixed), y = cells_of(b, count, fixed);
    check_near(x.data(), y.data(), count, 3e-6);
}

static void compare_sums(Pair *pair, const ProjectedCase &c, uint64_t seed) {
    Random random(seed);
    Board board;
    const Places p = lay_out(&board, c, &random);
    const std::vector<unsigned char> after = pair->run(
        &board, STUDENT, true, [&](xd_ctx *ctx, xd_vocab *, void *at) { sum_and_compare(ctx, c, p, at); });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    check_cells(a + p.student_cells, b + p.student_cells, PLACES * SLOTS, c.fixed);
    check_cells(a + p.teacher_sums, b + p.teacher_sums, PLACES * SLOTS, c.fixed);
    if (c.fixed) return;
    check_cells(a + p.delta_cells, b + p.delta_cells, 7, false);
    for (int i = 0; i < PLACES; i++) {
        const xd_xtoken_chunk *x = (const xd_xtoken_chunk *)(const void *)(a + p.chunks) + i;
        const xd_xtoken_chunk *y = (const xd_xtoken_chunk *)(const void *)(b + p.chunks) + i;
        if (!y->compared) continue;
        CHECK(x->agree == y->agree);
        check_near(&x->value, &y->value, 1, 3e-6);
        check_near(&x->largest, &y->largest, 1, 3e-6);
        check_near(&x->delta, &y->delta, 1, 3e-6);
    }
}

/* The gradient from slopes that are given. */
static void compare_gradient(Pair *pair, const ProjectedCase &c, bool with_matrix, uint64_t seed) {
    Random random(seed);
    Board board;
    const Places p = lay_out(&board, c, &random);
    std::vector<double> dy;
    for (int i = 0; i < PLACES * SLOTS; i++) dy.push_back((double)random.unit());
    memcpy(board.bytes.data() + p.student_cells, dy.data(), dy.size() * sizeof(double));
    for (int i = 0; i < PLACES; i++)
        place<xd_xtoken_chunk>(board.bytes.data(), p.chunks)[i].largest = i == 2 ? 0.0 : 1.0;
    const std::vector<unsigned char> after =
        pair->run(&board, STUDENT, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_xtoken_kernels *kernels = &xd_ctx_kernels(ctx)->xtoken;
            const xd_launch launch = xd_ctx_launch(ctx);
            const xd_xtoken_chunk *chunks = place<xd_xtoken_chunk>(at, p.chunks);
            xd_xtoken_gradient to = {};
            to.x = rows_of(c, p, at);
            to.rows = { place<void>(at, c.in_place ? p.student : p.gradient), c.dtype, ROWS, WIDTH, WIDTH };
            to.lse_one = place<double>(at, p.lse_one);
            to.ce_factor = place<double>(at, p.ce_factor);
            to.ce_weight = 0.6;
            to.labels.data = place<int64_t>(at, p.labels);
            to.written = place<uint8_t>(at, p.written);
            const double *delta = place<double>(at, p.delta);
            const xd_xtoken_project_gradient_args a = {
                to, matrix_at(ctx, p, at), place<double>(at, p.student_cells), delta, chunks, nullptr, PLACES
            };
            const xd_xtoken_mean_gradient_args b = { to, place<float>(at, p.u), 0.7, delta, chunks };
            CHECK((with_matrix ? kernels->project_gradient(&launch, &a) : kernels->mean_gradient(&launch, &b)) == XD_OK);
        });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    const size_t g = c.in_place ? p.student : p.gradient;
    check_near(widened(a + g, c.dtype, ROWS * WIDTH).data(), widened(b + g, c.dtype, ROWS * WIDTH).data(),
               ROWS * WIDTH, tolerance_of(c.dtype));
    CHECK(memcmp(a + p.written, b + p.written, ROWS) == 0);
}

XD_TEST(sums_over_chunks_and_their_divergences_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 16; form++) {
        const ProjectedCase c = { false,
                                  form % 2 == 1,
                                  form / 2 % 2 == 1,
                                  form / 4 % 2 == 1,
                                  form / 8 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                                  false,
                                  false };
        compare_sums(&pair, c, 100 + (uint64_t)form);
    }
}

XD_TEST(sums_in_fixed_point_are_those_of_the_cpu) {
    Pair pair(XD_REDUCTION_INVARIANT);
    for (int form = 0; form < 2; form++) {
        const ProjectedCase c = { true, false, true, form == 1, XD_DTYPE_F32, false, false };
        compare_sums(&pair, c, 200 + (uint64_t)form);
    }
}

XD_TEST(deltas_in_fixed_point_are_those_of_the_cpu) {
    Pair pair(XD_REDUCTION_INVARIANT);
    const ProjectedCase c = { true, false, true, false, XD_DTYPE_F32, false, false };
    Random random(300);
    Board board;
    const Places p = lay_out(&board, c, &random);
    for (int i = 0; i < PLACES * SLOTS; i++)
        place<double>(board.bytes.data(), p.student_cells)[i] = random.unit();
    for (int i = 0; i < PLACES; i++)
        place<xd_xtoken_chunk>(board.bytes.data(), p.chunks)[i].largest = i == 2 ? 0.0 : 1.0;
    const std::vector<unsigned char> after =
        pair.run(&board, STUDENT, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            const xd_xtoken_delta_args a = delta_args_at(ctx, c, p, at);
            CHECK(xd_ctx_kernels(ctx)->xtoken.delta(&launch, &a) == XD_OK);
        });
    check_cells(after.data() + p.delta_cells, board.bytes.data() + p.delta_cells, 7, true);
}

XD_TEST(gradients_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 16; form++) {
        const bool in_place = form / 2 % 2 == 1;
        const ProjectedCase c = { false,
                                  false,
                                  true,
                                  false,
                                  form / 8 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                                  in_place,
                                  !in_place && form / 4 % 2 == 1 };
        compare_gradient(&pair, c, form % 2 == 1, 400 + (uint64_t)form);
    }
}

/* Sums are doubles again, and rows have their log-sum-exps. */
XD_TEST(cells_in_fixed_point_are_settled_as_on_the_cpu) {
    Pair pair(XD_REDUCTION_INVARIANT);
    const ProjectedCase c = { true, false, true, false, XD_DTYPE_F32, false, false };
    Random random(500);
    Board board;
    const Places p = lay_out(&board, c, &random);
    const size_t out = board.add(std::vector<double>((size_t)(PLACES * SLOTS), 7.0));
    const size_t lse = board.add(std::vector<double>((size_t)ROWS, 3.5));
    const std::vector<unsigned char> after =
        pair.run(&board, STUDENT, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_xtoken_kernels kernels = xd_ctx_kernels(ctx)->xtoken;
            const xd_launch launch = xd_ctx_launch(ctx);
            const xd_xtoken_row_sums_args a = { rows_of(c, p, at).logits, COLUMNS, 1.7, place<double>(at, lse),
                                                place<double>(at, p.delta_cells) };
            sum_and_compare(ctx, c, p, at);
            CHECK(kernels.settle(&launch, place<double>(at, p.student_cells), PLACES * SLOTS,
                                 place<double>(at, out)) == XD_OK);
            CHECK(kernels.row_sums(&launch, &a) == XD_OK && kernels.row_logs(&launch, &a) == XD_OK);
        });
    check_near(place<double>((void *)after.data(), out), place<double>(board.bytes.data(), out), PLACES * SLOTS, 3e-6);
    check_near(place<double>((void *)after.data(), lse), place<double>(board.bytes.data(), lse), ROWS, 1e-12);
}

XD_TEST(nothing_to_do_is_no_launch) {
    Gpu gpu;
    const xd_launch launch = gpu.launch();
    const xd_xtoken_kernels kernels = gpu.kernels()->xtoken;
    const xd_xtoken_project_args p = {};
    const xd_xtoken_target_args t = {};
    const xd_xtoken_divergence_args v = {};
    const xd_xtoken_delta_args d = {};
    const xd_xtoken_project_gradient_args g = {};
    CHECK(kernels.project(&launch, &p) == XD_OK && kernels.target(&launch, &t) == XD_OK);
    CHECK(kernels.divergence(&launch, &v) == XD_OK && kernels.delta(&launch, &d) == XD_OK);
    CHECK(kernels.project_gradient(&launch, &g) == XD_OK && kernels.rest_gradient(&launch, &g.to) == XD_OK);
}

XD_CUDA_TEST_MAIN()
