/* Kernels of losses whose chunks have lists of columns of their own, on a GPU against the plain CPU ones. */
#include "cuda_loss_test.h"

enum { STUDENT = 150, FIRST = 10, COLUMNS = 131, TEACHER = 97, ROWS = 9, COUNT = 7, PLACES = 5 };

struct ListsCase {
    bool fixed, reverse, projected, odd;
    xd_dtype dtype;
    int64_t first; /* of the shard's columns */
};

/* Where everything of a case lies on the board. */
struct Places {
    size_t logits, lse, rows, places, offset, list, target, sums, chunks, deltas, scratch, row_deltas, gradient,
        written, row_begin, teacher_id, weight, column_begin, student_id, column_weight;
    int64_t entries;
};

/* A projection of both whole vocabularies. */
static void add_projection(Board *board, Places *p, Random *random) {
    std::vector<float> dense((size_t)(STUDENT * TEACHER));
    std::vector<int64_t> begin{ 0 }, column_begin{ 0 };
    std::vector<int32_t> teacher_id, student_id;
    std::vector<float> weight, column_weight;
    for (int v = 0; v < STUDENT; v += 1 + v % 2)
        for (int e = 0; e < 4; e++)
            dense[(size_t)(v * TEACHER + (int)random->below(TEACHER))] = 0.5f + 0.4f * random->unit();
    for (int64_t v = 0; v < STUDENT; v++) {
        for (int64_t u = 0; u < TEACHER; u++) {
            if (dense[(size_t)(v * TEACHER + u)] == 0.0f) continue;
            teacher_id.push_back((int32_t)u);
            weight.push_back(dense[(size_t)(v * TEACHER + u)]);
        }
        begin.push_back((int64_t)teacher_id.size());
    }
    for (int64_t u = 0; u < TEACHER; u++) {
        for (int64_t v = 0; v < STUDENT; v++) {
            if (dense[(size_t)(v * TEACHER + u)] == 0.0f) continue;
            student_id.push_back((int32_t)v);
            column_weight.push_back(dense[(size_t)(v * TEACHER + u)]);
        }
        column_begin.push_back((int64_t)student_id.size());
    }
    p->row_begin = board->add(begin);
    p->teacher_id = board->add(teacher_id);
    p->weight = board->add(weight);
    p->column_begin = board->add(column_begin);
    p->student_id = board->add(student_id);
    p->column_weight = board->add(column_weight);
}

static Places lay_out(Board *board, const ListsCase &c, Random *random) {
    static const int64_t sizes[PLACES] = { 30, 0, 1, 61, 7 };
    const Shape shape = { ROWS, COLUMNS, 3, 0, c.dtype, c.dtype, c.dtype };
    std::vector<unsigned char> z = logits(c.dtype, shape, random);
    std::vector<double> lse, target;
    std::vector<int64_t> offset{ 0 };
    std::vector<int32_t> list;
    xd_xtoken_chunk none = {};
    std::vector<xd_xtoken_chunk> chunks((size_t)PLACES, none);
    for (int v = 0; c.odd && v < COLUMNS; v++) xd_store_f64(z.data(), c.dtype, shape.stride() + v, NAN);
    for (int r = 0; r < ROWS; r++) {
        double sum = 0.0;
        for (int v = 0; v < COLUMNS; v++) {
            const double x = xd_load_f64(z.data(), c.dtype, r * shape.stride() + v);
            if (!isnan(x)) sum += exp(x / 1.7);
        }
        lse.push_back(log(sum));
    }
    for (int i = 0; i < PLACES; i++) {
        for (int64_t j = 0; j < sizes[i]; j++) {
            list.push_back((int32_t)((5 + 37 * (j + i)) % TEACHER));
            target.push_back((double)(1 + random->below(9)) / 9.0 / (double)sizes[i]);
        }
        offset.push_back((int64_t)list.size());
        chunks[(size_t)i].compared = sizes[i] > 0;
        chunks[(size_t)i].student = i == 0 ? 3.0 : i == 3 ? 2.0 : 1.0;
        chunks[(size_t)i].factor = i == 4 ? 0.0 : 0.3 * i + 0.1;
        chunks[(size_t)i].limit = i % 2 == 0 ? 1e-6 : 0.0; /* which any divergence exceeds */
    }
    Places p;
    p.entries = (int64_t)list.size();
    p.logits = board->add(z);
    p.lse = board->add(lse);
    p.rows = board->add(std::vector<int64_t>{ 0, 1, 3, 4, 5, 7, 8 });
    p.places = board->add(std::vector<int64_t>{ 0, 0, 0, 2, 3, 3, 4 });
    p.offset = board->add(offset);
    p.list = board->add(list);
    p.target = board->add(target);
    p.sums = board->add(std::vector<xd_fixed>(list.size()));
    p.chunks = board->add(chunks);
    p.deltas = board->add(std::vector<xd_fixed>((size_t)ROWS));
    p.scratch = board->add(std::vector<int32_t>((size_t)(PLACES * TEACHER > 3 * COLUMNS ? PLACES * TEACHER : 3 * COLUMNS), 7));
    p.row_deltas = board->add(std::vector<double>((size_t)COUNT));
    p.gradient = board->add(logits(c.dtype, shape, random));
    p.written = board->add(std::vector<uint8_t>{ 1, 0, 0, 1, 1, 0, 0, 1, 1 });
    add_projection(board, &p, random);
    return p;
}

static xd_xtoken_list_args args_at(const ListsCase &c, const Places &p, void *at) {
    const Shape shape = { ROWS, COLUMNS, 3, 0, c.dtype, c.dtype, c.dtype };
    xd_xtoken_list_args a = {};
    a.x = { rows_at(at, p.logits, c.dtype, shape),
            COLUMNS,
            c.first,
            1.7,
            place<double>(at, p.lse),
            place<int64_t>(at, p.rows),
            place<int64_t>(at, p.places),
            COUNT,
            nullptr };
    a.lists.count = PLACES;
    a.lists.offset = place<int64_t>(at, p.offset);
    a.lists.ids = place<int32_t>(at, p.list);
    a.lists.entries = p.entries;
    a.lists.projection.teacher_size = TEACHER;
    a.fixed = c.fixed;
    a.reverse = c.reverse;
    a.student = place<double>(at, p.sums);
    a.teacher = place<double>(at, p.target);
    a.chunks = place<xd_xtoken_chunk>(at, p.chunks);
    if (!c.projected) return a;
    a.lists.projection = { TEACHER,
                           place<int64_t>(at, p.row_begin),
                           place<int32_t>(at, p.teacher_id),
                           place<float>(at, p.weight),
                           place<int64_t>(at, p.column_begin),
                           place<int32_t>(at, p.student_id),
                           place<float>(at, p.column_weight) };
    return a;
}

static void check_cells(const unsigned char *a, const unsigned char *b, int64_t count, bool fixed) {
    std::vector<double> both[2];
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < count; i++) {
            const unsigned char *from = side == 0 ? a : b;
            const xd_fixed *cell = (const xd_fixed *)(const void *)from + i;
            both[side].push_back(fixed ? xd_fixed_read(*cell) : ((const double *)(const void *)from)[i]);
        }
    check_near(both[0].data(), both[1].data(), count, 3e-6);
}

static void lists_gradient(xd_ctx *ctx, const ListsCase &c, const Places &p, void *at) {
    const Shape shape = { ROWS, COLUMNS, 3, 0, c.dtype, c.dtype, c.dtype };
    const xd_xtoken_kernels kernels = xd_ctx_kernels(ctx)->xtoken;
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_xtoken_list_args a = args_at(c, p, at);
    const xd_xtoken_row_deltas_args d = { place<double>(at, p.deltas), false, a.x.places, a.chunks, COUNT,
                                          place<double>(at, p.row_deltas) };
    xd_xtoken_list_gradient_args g = {};
    g.to.x = a.x;
    g.to.rows = rows_at(at, p.gradient, c.dtype, shape);
    g.to.written = place<uint8_t>(at, p.written);
    g.lists = a.lists;
    g.dy = a.student;
    g.delta = d.out;
    g.chunks = a.chunks;
    g.scratch = place<void>(at, p.scratch);
    CHECK(kernels.row_deltas(&launch, &d) == XD_OK);
    CHECK(kernels.list_gradient(&launch, &g) == XD_OK);
}

/* Sums, chunks, deltas and gradients from each other; in fixed point, whose cells a driver settles between them, the sums
 * alone. */
static void compare_lists(Pair *pair, const ListsCase &c, uint64_t seed) {
    Random random(seed);
    Board board;
    const Places p = lay_out(&board, c, &random);
    const std::vector<unsigned char> after =
        pair->run(&board, STUDENT, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_xtoken_kernels *kernels = &xd_ctx_kernels(ctx)->xtoken;
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_list_args a = args_at(c, p, at);
            a.cells = a.student;
            CHECK(kernels->list_project(&launch, &a) == XD_OK);
            if (c.fixed) return;
            CHECK(kernels->list_divergence(&launch, &a) == XD_OK);
            a.cells = place<double>(at, p.deltas);
            CHECK(kernels->list_delta(&launch, &a) == XD_OK);
            lists_gradient(ctx, c, p, at);
        });
    const Shape shape = { ROWS, COLUMNS, 3, 0, c.dtype, c.dtype, c.dtype };
    const int64_t elements = ROWS * shape.stride();
    const unsigned char *a = after.data(), *b = board.bytes.data();
    check_cells(a + p.sums, b + p.sums, p.entries, c.fixed);
    if (c.fixed) return;
    check_cells(a + p.deltas, b + p.deltas, COUNT, false);
    check_near(widened(a + p.gradient, c.dtype, elements).data(),
               widened(b + p.gradient, c.dtype, elements).data(), elements, tolerance_of(c.dtype));
    CHECK(memcmp(a + p.written, b + p.written, ROWS) == 0);
    for (int i = 0; i < PLACES; i++) {
        const xd_xtoken_chunk *x = (const xd_xtoken_chunk *)(const void *)(a + p.chunks) + i;
        const xd_xtoken_chunk *y = (const xd_xtoken_chunk *)(const void *)(b + p.chunks) + i;
        if (isfinite(y->value)) CHECK(x->agree == y->agree);
        check_near(&x->value, &y->value, 1, 3e-6);
        check_near(&x->largest, &y->largest, 1, 3e-6);
    }
}

XD_TEST(chunks_with_lists_of_their_own_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 16; form++) {
        const ListsCase c = { false,
                              form % 2 == 1,
                              form / 2 % 2 == 1,
                              false,
                              form / 4 % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                              form / 8 ? FIRST : 0 };
        compare_lists(&pair, c, 100 + (uint64_t)form);
    }
}

XD_TEST(sums_over_lists_in_fixed_point_are_those_of_the_cpu) {
    Pair pair(XD_REDUCTION_INVARIANT);
    for (int form = 0; form < 4; form++) {
        const ListsCase c = { true, false, form % 2 == 1, false, form / 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                              FIRST };
        compare_lists(&pair, c, 200 + (uint64_t)form);
    }
}

XD_TEST(deltas_over_lists_in_fixed_point_are_those_of_the_cpu) {
    Pair pair(XD_REDUCTION_INVARIANT);
    const ListsCase c = { true, false, true, false, XD_DTYPE_F32, FIRST };
    Random random(300);
    Board board;
    const Places p = lay_out(&board, c, &random);
    for (int64_t i = 0; i < p.entries; i++)
        place<double>(board.bytes.data(), p.sums)[i] = i % 5 ? (double)random.unit() : 0.0;
    for (int i = 0; i < PLACES; i++) place<xd_xtoken_chunk>(board.bytes.data(), p.chunks)[i].largest = 1.0;
    const std::vector<unsigned char> after =
        pair.run(&board, STUDENT, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_list_args a = args_at(c, p, at);
            a.cells = place<double>(at, p.deltas);
            CHECK(xd_ctx_kernels(ctx)->xtoken.list_delta(&launch, &a) == XD_OK);
        });
    check_cells(after.data() + p.deltas, board.bytes.data() + p.deltas, COUNT, true);
}

/* A row with a NaN spoils its chunk and no other. */
XD_TEST(a_row_that_is_not_finite_spoils_its_chunk_alone) {
    Pair pair;
    for (int form = 0; form < 2; form++) {
        const ListsCase c = { false, form == 1, true, true, XD_DTYPE_F32, 0 };
        compare_lists(&pair, c, 400 + (uint64_t)form);
    }
}

XD_CUDA_TEST_MAIN()
