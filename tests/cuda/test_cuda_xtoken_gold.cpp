/* Kernels of losses over common and uncommon ids on a GPU against the plain CPU ones. */
#include "cuda_loss_test.h"

/* Cells as doubles; a NaN of fixed point is one. */
static std::vector<double> cells_of(const unsigned char *at, int64_t count, bool fixed) {
    std::vector<double> out;
    for (int64_t i = 0; i < count; i++) {
        xd_fixed cell = {};
        double value;
        memcpy(&cell, at + (size_t)i * (fixed ? sizeof cell : sizeof value),
               fixed ? sizeof cell : sizeof value);
        memcpy(&value, &cell, sizeof value);
        if (fixed) value = cell.high >= (int64_t)1 << 56 ? NAN : xd_fixed_read(cell);
        out.push_back(value);
    }
    return out;
}

static void check_cells(const unsigned char *a, const unsigned char *b, int64_t count, bool fixed) {
    const std::vector<double> x = cells_of(a, count, fixed), y = cells_of(b, count, fixed);
    check_near(x.data(), y.data(), count, 3e-6);
}

/* The same numbers, a NaN equal to a NaN. */
static void check_equal(const double *a, const double *b, int64_t count) {
    int64_t first = -1;
    for (int64_t i = count - 1; i >= 0; i--)
        if (!(a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))) first = i;
    CHECK_EQ_INT(first, -1);
}

/* ---- log-probabilities ---- */

static void compare_log_probs(Pair *pair, xd_dtype dtype, bool fixed, bool with_lse, bool odd, int64_t rows,
                              int64_t columns) {
    enum { ALL = 7 };
    Random random(10 + (uint64_t)rows);
    Board board;
    const Shape shape = { ALL, columns, 5, 0, dtype, dtype, dtype };
    std::vector<unsigned char> z = logits(dtype, shape, &random);
    std::vector<double> lse;
    if (odd) xd_store_f64(z.data(), dtype, shape.stride() + 3, NAN);
    for (int r = 0; odd && r < ALL; r++) xd_store_f64(z.data(), dtype, r * shape.stride(), -HUGE_VAL);
    for (int r = 0; r < ALL; r++) lse.push_back(3.25 + r);
    const size_t x = board.add(z), s = board.add(lse), list = board.add(std::vector<int64_t>{ 1, 2, 4, 6 });
    const size_t cells = board.add(std::vector<double>((size_t)(2 * columns), 7.0));
    const size_t scratch = board.add(std::vector<float>((size_t)XD_XTOKEN_SCRATCH));
    const std::vector<unsigned char> after =
        pair->run(&board, columns, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_log_probs_args a = {};
            a.x.logits = rows_at(at, x, dtype, shape);
            a.x.columns = columns;
            a.x.temperature = 1.7;
            a.x.lse = with_lse ? place<double>(at, s) : nullptr;
            a.x.rows = place<int64_t>(at, list);
            a.x.count = rows;
            a.scale = 1.0 / 3.0;
            a.cells = place<double>(at, cells);
            a.fixed = fixed;
            a.scratch = place<float>(at, scratch);
            CHECK(xd_ctx_kernels(ctx)->xtoken.log_probs(&launch, &a) == XD_OK);
        });
    const std::vector<double> mine = cells_of(after.data() + cells, columns, fixed);
    const std::vector<double> theirs = cells_of(board.bytes.data() + cells, columns, fixed);
    if (with_lse)
        check_equal(mine.data(), theirs.data(), columns);
    else
        check_near(mine.data(), theirs.data(), columns, 3e-6);
}

XD_TEST(mean_log_probabilities_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 16; form++)
        for (int64_t rows = 0; rows < 5; rows += 2 + rows / 2)
            compare_log_probs(&pair, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, form / 2 % 2 == 1,
                              form / 4 % 2 == 1, form / 8 == 1, rows, 1 + 1009 * (rows + form) % 2741);
}

/* A chunk of more rows than the scratch holds at once. */
XD_TEST(a_chunk_may_have_any_number_of_rows) {
    enum { ROWS = 8195, COLUMNS = 3 };
    Pair pair;
    Random random(20);
    Board board;
    const Shape shape = { 5, COLUMNS, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, XD_DTYPE_F32 };
    std::vector<int64_t> rows;
    for (int i = 0; i < ROWS; i++) rows.push_back(i % 5);
    const size_t x = board.add(logits(XD_DTYPE_F32, shape, &random)), list = board.add(rows);
    const size_t cells = board.add(std::vector<double>(COLUMNS));
    const size_t scratch = board.add(std::vector<float>((size_t)XD_XTOKEN_SCRATCH));
    const std::vector<unsigned char> after =
        pair.run(&board, COLUMNS, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_log_probs_args a = {};
            a.x.logits = rows_at(at, x, XD_DTYPE_F32, shape);
            a.x.columns = COLUMNS;
            a.x.temperature = 1.0;
            a.x.rows = place<int64_t>(at, list);
            a.x.count = ROWS;
            a.scale = 1.0 / ROWS;
            a.cells = place<double>(at, cells);
            a.scratch = place<float>(at, scratch);
            CHECK(xd_ctx_kernels(ctx)->xtoken.log_probs(&launch, &a) == XD_OK);
        });
    check_cells(after.data() + cells, board.bytes.data() + cells, COLUMNS, false);
}

/* ---- pairs ---- */

/* Log-probabilities with many equal ones. */
static std::vector<double> means(int64_t count, Random *random) {
    std::vector<double> out;
    for (int64_t i = 0; i < count; i++) out.push_back(-0.25 * (double)(1 + random->below(40)));
    return out;
}

enum PairsForm { PLAIN, NAN_IN_FRONT, NAN_BEHIND, NONE_LIKELY };

static void compare_pairs(Pair *pair, bool fixed, bool reverse, PairsForm form, int64_t pairs, int64_t first,
                          int64_t columns) {
    Random random(30 + (uint64_t)pairs);
    Board board;
    const int64_t teacher = 2 * pairs + 3;
    std::vector<double> alpha = means(columns, &random), beta = means(teacher, &random);
    std::vector<int32_t> ids, others;
    int64_t here = -1;
    for (int64_t i = 0; i < pairs; i++) {
        ids.push_back((int32_t)(2 * i + random.below(2)));
        others.push_back((int32_t)(teacher - 1 - 2 * i));
        if (here < 0 && ids.back() >= first) here = i;
    }
    if (here >= 0 && form != PLAIN) {
        const int64_t at = form == NAN_BEHIND ? pairs - 1 : here;
        if (ids[(size_t)at] - first < columns)
            alpha[(size_t)(ids[(size_t)at] - first)] = form == NONE_LIKELY ? -HUGE_VAL : NAN;
        beta[(size_t)others[form == NAN_BEHIND ? (size_t)pairs - 1 : 0]] =
            form == NONE_LIKELY ? -HUGE_VAL : NAN;
    }
    const size_t means_at = board.add(alpha), others_at = board.add(beta), ids_at = board.add(ids);
    const size_t other_at = board.add(others), cell = board.add(std::vector<double>(2));
    const size_t slope = board.add(std::vector<float>((size_t)columns, 3.0f)),
                 best = board.add(std::vector<double>(3));
    const size_t scratch = board.add(std::vector<float>((size_t)XD_XTOKEN_SCRATCH));
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_pair_args a = {};
            a.columns = columns;
            a.first = first;
            a.means = place<double>(at, means_at);
            a.others = place<double>(at, others_at);
            a.pair = place<int32_t>(at, ids_at);
            a.other = place<int32_t>(at, other_at);
            a.pairs = pairs;
            a.reverse = reverse;
            a.fixed = fixed;
            a.cells = place<double>(at, cell);
            a.slope = place<float>(at, slope);
            a.best = place<double>(at, best);
            a.scratch = place<float>(at, scratch);
            CHECK(xd_ctx_kernels(ctx)->xtoken.pair(&launch, &a) == XD_OK);
        });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    check_cells(a + cell, b + cell, 1, fixed);
    check_near((const float *)(const void *)(a + slope), (const float *)(const void *)(b + slope), columns,
               3e-6);
    check_equal((const double *)(const void *)(a + best), (const double *)(const void *)(b + best), 3);
}

XD_TEST(pairs_and_the_likeliest_of_them_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 16; form++) {
        const bool fixed = form % 2 == 1, reverse = form / 2 % 2 == 1;
        const PairsForm odd = (PairsForm)(form / 4);
        compare_pairs(&pair, fixed, reverse, odd, 0, 4, 30);
        compare_pairs(&pair, fixed, reverse, odd, 1, 0, 2);
        compare_pairs(&pair, fixed, reverse, odd, 100, 77, 61);
        compare_pairs(&pair, fixed, reverse, odd, 100, 300, 10); /* none is on this shard */
    }
    for (int form = 0; form < 4; form++)
        compare_pairs(&pair, form % 2 == 1, form / 2 == 1, PLAIN, 33001, 1000, 60000);
}

/* ---- sums ---- */

XD_TEST(totals_are_those_of_the_cpu) {
    static const int64_t sizes[] = { 0, 1, 257, 33013 };
    Pair pair;
    for (int form = 0; form < 8; form++) {
        const int64_t columns = sizes[form / 2];
        const bool fixed = form % 2 == 1;
        Random random(40 + (uint64_t)form);
        Board board;
        std::vector<float> u;
        for (int64_t v = 0; v < columns; v++) u.push_back(random.unit());
        const size_t u_at = board.add(u), cell = board.add(std::vector<double>(2));
        const size_t scratch = board.add(std::vector<float>((size_t)XD_XTOKEN_SCRATCH));
        const std::vector<unsigned char> after =
            pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
                const xd_launch launch = xd_ctx_launch(ctx);
                xd_xtoken_total_args a = {};
                a.columns = columns;
                a.u = place<float>(at, u_at);
                a.cells = place<double>(at, cell);
                a.fixed = fixed;
                a.scratch = place<float>(at, scratch);
                CHECK(xd_ctx_kernels(ctx)->xtoken.total(&launch, &a) == XD_OK);
            });
        if (fixed)
            CHECK(memcmp(after.data() + cell, board.bytes.data() + cell, sizeof(xd_fixed)) == 0);
        else
            check_cells(after.data() + cell, board.bytes.data() + cell, 1, false);
    }
}

/* ---- tails ---- */

static void compare_tails(Pair *pair, int64_t size, int64_t every, int64_t begin, int64_t end, int64_t k,
                          bool odd) {
    Random random(50 + (uint64_t)(size + k));
    Board board;
    std::vector<double> alpha = means(end - begin, &random);
    std::vector<int32_t> ids;
    for (int64_t v = 0; v < size; v += 1 + random.below(every)) ids.push_back((int32_t)v);
    for (size_t i = 0; i < alpha.size(); i++) /* some closer than f32 can tell */
        alpha[i] -= (double)random.below(3) * (i % 2 ? 1e-12 : 1e-3);
    for (size_t i = 0; odd && i < alpha.size(); i += 5) alpha[i] = i % 2 ? -HUGE_VAL : NAN;
    const size_t means_at = board.add(alpha), ids_at = board.add(ids);
    const size_t values = board.add(std::vector<double>((size_t)k)),
                 found = board.add(std::vector<int64_t>((size_t)k));
    const size_t scratch = board.add(std::vector<float>(ids.size()));
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_tail t = {};
            t.means = place<double>(at, means_at);
            t.ids = place<int32_t>(at, ids_at);
            t.count = (int64_t)ids.size();
            t.begin = begin;
            t.end = end;
            t.k = k;
            t.values = place<double>(at, values);
            t.found = place<int64_t>(at, found);
            t.scratch = place<float>(at, scratch);
            CHECK(xd_ctx_kernels(ctx)->xtoken.tail(&launch, &t) == XD_OK);
        });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    check_near((const double *)(const void *)(a + values), (const double *)(const void *)(b + values), k,
               1e-12);
    CHECK(memcmp(a + found, b + found, (size_t)k * sizeof(int64_t)) == 0);
}

XD_TEST(tails_are_those_of_the_cpu) {
    Pair pair;
    for (int odd = 0; odd < 2; odd++) {
        compare_tails(&pair, 5000, 3, 0, 5000, 700, odd == 1);
        compare_tails(&pair, 5000, 3, 1201, 3333, 33, odd == 1);
        compare_tails(&pair, 90, 2, 10, 50, 64, odd == 1); /* fewer than asked for */
        compare_tails(&pair, 90, 2, 90, 100, 5, odd == 1); /* none */
        compare_tails(&pair, 3, 1, 0, 3, 1, odd == 1);
        compare_tails(&pair, 3, 1, 0, 3, 0, odd == 1);
    }
}

XD_TEST(a_tail_longer_than_shared_memory_is_that_of_the_cpu) {
    Pair pair;
    compare_tails(&pair, 8700, 1, 0, 8700, 8193, false);
}

/* ---- merging shards ---- */

struct MergeCase {
    int shards, shard;
    int64_t k;
    bool same_pair, nan;
};

static void compare_merges(Pair *pair, const MergeCase &c) {
    enum { COLUMNS = 600 };
    Random random(60 + (uint64_t)(c.k + c.shards));
    Board board;
    const int64_t stride = XD_XTOKEN_BEST_WORDS + c.k;
    std::vector<double> all, others;
    std::vector<int64_t> found;
    for (int r = 0; r < c.shards; r++) {
        double value = 0.5;
        all.push_back(r == 1 ? -HUGE_VAL : -0.5);
        all.push_back(r == 1 ? -1.0 : 10.0 + r);
        all.push_back(c.same_pair ? (c.shards > 1 || c.shard == 0 ? 10.0 : 11.0) : 3.0);
        for (int64_t j = 0; j < c.k; j++) {
            if (r == 1 && j > c.k / 2) value = -1.0; /* a shorter list */
            all.push_back(value);
            if (random.below(3) == 0 && value > 0.0) value -= 0.0078125;
        }
    }
    for (int64_t j = 0; j < c.k; j++) {
        found.push_back(c.shard == 1 && j > c.k / 2 ? -1 : (j * 7 + 1) % COLUMNS);
        others.push_back(0.5 - (double)(j / 3) * 0.0078125);
    }
    for (int64_t i = 0; c.nan && i < c.shards * c.k; i++) /* a NaN is in all of them or in none */
        all[(size_t)(i / c.k * stride + XD_XTOKEN_BEST_WORDS + i % c.k)] = NAN;
    const size_t all_at = board.add(all), others_at = board.add(others), found_at = board.add(found);
    const size_t slope = board.add(std::vector<float>(COLUMNS, 2.0f)),
                 out = board.add(std::vector<double>(2));
    const size_t places = board.add(std::vector<int64_t>((size_t)c.shards));
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_merge m = {};
            m.all = place<double>(at, all_at);
            m.stride = stride;
            m.k = c.k;
            m.shard = c.shard;
            m.shards = c.shards;
            m.others = place<double>(at, others_at);
            m.found = place<int64_t>(at, found_at);
            m.slope = place<float>(at, slope);
            m.out = place<double>(at, out);
            m.places = place<int64_t>(at, places);
            CHECK(xd_ctx_kernels(ctx)->xtoken.merge(&launch, &m) == XD_OK);
        });
    const double *mine = (const double *)(const void *)(after.data() + out);
    const double *theirs = (const double *)(const void *)(board.bytes.data() + out);
    check_near(mine, theirs, 2, 1e-12);
    CHECK(mine[1] == theirs[1]);
    CHECK(theirs[1] == (c.same_pair ? 1.0 : 0.0));
    if (!c.nan) CHECK(memcmp(after.data() + slope, board.bytes.data() + slope, COLUMNS * sizeof(float)) == 0);
}

XD_TEST(merged_tails_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 4; form++) {
        const bool same_pair = form % 2 == 1, nan = form / 2 == 1;
        compare_merges(&pair, { 1, 0, 0, same_pair, nan });
        compare_merges(&pair, { 1, 0, 1, same_pair, nan });
        compare_merges(&pair, { 1, 0, 555, same_pair, nan });
        for (int shard = 0; shard < 3; shard++) compare_merges(&pair, { 3, shard, 301, same_pair, nan });
    }
}

/* ---- closing a chunk ---- */

struct CloseCase {
    double pairs, tails, limit; /* the divergence is their sum; a NaN of `pairs` is one of the gradient's sum */
    bool fixed, takes;
};

/* Two cells, of which the first is the divergence of pairs and the second the sum of its gradient. */
static size_t add_cells(Board *board, const CloseCase &c) {
    const double values[2] = { isnan(c.pairs) ? 1.0 : c.pairs, isnan(c.pairs) ? NAN : 0.3 };
    xd_fixed cells[2] = {};
    if (!c.fixed) return board->add(std::vector<double>(values, values + 2));
    for (int i = 0; i < 2; i++)
        if (isnan(values[i]))
            cells[i].high = XD_CELL_NAN;
        else
            CHECK(xd_fixed_put(&cells[i], values[i]));
    return board->add(std::vector<xd_fixed>(cells, cells + 2));
}

static void compare_closes(Pair *pair, const CloseCase &c) {
    enum { COUNT = 300 };
    Board board;
    xd_xtoken_chunk chunk = {};
    chunk.limit = c.limit;
    const size_t cells = add_cells(&board, c), merged = board.add(std::vector<double>{ c.tails, 1.0 });
    const size_t out = board.add(std::vector<double>(COUNT, 7.0));
    const size_t chunks = board.add(std::vector<xd_xtoken_chunk>(1, chunk));
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_close_args a = {};
            a.cells = place<double>(at, cells);
            a.fixed = c.fixed;
            a.merged = place<double>(at, merged);
            a.scale = 1.0 / 3.0;
            a.count = COUNT;
            a.out = place<double>(at, out);
            a.chunk = place<xd_xtoken_chunk>(at, chunks);
            CHECK(xd_ctx_kernels(ctx)->xtoken.close(&launch, &a) == XD_OK);
        });
    const xd_xtoken_chunk *mine = (const xd_xtoken_chunk *)(const void *)(after.data() + chunks);
    const xd_xtoken_chunk *theirs = (const xd_xtoken_chunk *)(const void *)(board.bytes.data() + chunks);
    check_equal((const double *)(const void *)(after.data() + out),
                (const double *)(const void *)(board.bytes.data() + out), COUNT);
    check_equal(&mine->value, &theirs->value, 1);
    check_equal(&mine->delta, &theirs->delta, 1);
    check_equal(&mine->largest, &theirs->largest, 1);
    CHECK(mine->largest == (c.takes ? 1.0 : 0.0) && mine->agree && theirs->agree);
}

XD_TEST(chunks_at_and_beyond_their_limit_are_closed_like_those_of_the_cpu) {
    Pair pair;
    for (int i = 0; i < 2; i++) {
        const bool fixed = i == 1;
        compare_closes(&pair, { 0.75, 0.5, 0.0, fixed, true }); /* without a limit */
        compare_closes(&pair, { 0.75, 0.5, 1.5, fixed, true });
        compare_closes(&pair, { 0.75, 0.5, 1.25, fixed, false }); /* of this size or more */
        compare_closes(&pair, { 0.75, 0.5, 1.0, fixed, false });  /* pairs and tails alone are below it */
        compare_closes(&pair, { 0.75, -2.5, 1.0, fixed, false });
        compare_closes(&pair, { 0.75, HUGE_VAL, 0.0, fixed, false });
        compare_closes(&pair, { NAN, 0.5, 0.0, fixed, false });
        compare_closes(&pair, { NAN, 0.5, 9.0, fixed, false });
    }
}

XD_CUDA_TEST_MAIN()
