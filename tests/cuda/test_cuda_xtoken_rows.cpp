/* Kernels of losses across tokenizers that look at single rows, on a GPU against the plain CPU ones. */
#include "cuda_loss_test.h"

enum { ROWS = 7, COUNT = 4 };

static const int64_t at_work[COUNT] = { 0, 2, 3, 6 };

static std::vector<unsigned char> odd_logits(xd_dtype dtype, const Shape &shape, bool odd, Random *random) {
    std::vector<unsigned char> z = logits(dtype, shape, random);
    if (odd) xd_store_f64(z.data(), dtype, 2 * shape.stride() + 1, NAN);
    if (odd) xd_store_f64(z.data(), dtype, 6 * shape.stride() + 2, HUGE_VAL);
    for (int r = 0; odd && r < ROWS; r++) xd_store_f64(z.data(), dtype, r * shape.stride(), -HUGE_VAL);
    return z;
}

/* The doubles of one row, each by itself. */
static void check_each(const unsigned char *a, const unsigned char *b, int64_t count, double tolerance) {
    const double *x = (const double *)(const void *)a, *y = (const double *)(const void *)b;
    for (int64_t i = 0; i < count; i++) check_near(x + i, y + i, 1, tolerance, 1.0);
}

/* ---- moments ---- */

static void compare_moments(Pair *pair, xd_dtype dtype, bool odd, bool entropy, bool labelled,
                            int64_t columns) {
    Random random(10 + (uint64_t)columns);
    Board board;
    const Shape shape = { ROWS, columns, 3, 0, dtype, dtype, dtype };
    const size_t x = board.add(odd_logits(dtype, shape, odd, &random));
    const size_t labels = board.add(std::vector<int64_t>{ 0, 1, columns, -100, 2, 1, columns - 1 });
    const size_t rows = board.add(at_work, sizeof at_work);
    const size_t out = board.add(std::vector<double>(COUNT * XD_XTOKEN_MOMENTS, 9.0));
    const std::vector<unsigned char> after =
        pair->run(&board, columns, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_moments_args a = {};
            a.x.logits = rows_at(at, x, dtype, shape);
            a.x.columns = columns;
            a.x.rows = place<int64_t>(at, rows);
            a.x.count = COUNT;
            a.labels.data = labelled ? place<int64_t>(at, labels) : nullptr;
            a.moments = place<double>(at, out);
            a.entropy = entropy;
            CHECK(xd_ctx_kernels(ctx)->xtoken.moments(&launch, &a) == XD_OK);
        });
    for (int i = 0; i < COUNT; i++) {
        const size_t row = out + (size_t)(i * XD_XTOKEN_MOMENTS) * sizeof(double);
        if (!odd || (at_work[i] != 2 && at_work[i] != 6))
            check_each(after.data() + row, board.bytes.data() + row, XD_XTOKEN_MOMENTS, 3e-6);
        else
            CHECK(isnan(place<double>(board.bytes.data(), row)[XD_XTOKEN_LOG_SUM]) &&
                  isnan(((const double *)(const void *)(after.data() + row))[XD_XTOKEN_LOG_SUM]));
    }
}

XD_TEST(moments_of_rows_are_those_of_the_cpu) {
    static const int64_t columns[] = { 3, 257, 4099 };
    Pair pair;
    for (int form = 0; form < 16; form++)
        for (int size = 0; size < 3; size++)
            compare_moments(&pair, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, form / 2 % 2 == 1,
                            form / 4 % 2 == 1, form / 8 == 1, columns[size]);
}

/* ---- columns of rows, compared, and their gradient ---- */

static void compare_rows(Pair *pair, xd_dtype dtype, bool odd, bool reverse, int64_t k, int64_t first,
                         int64_t columns) {
    Random random(20 + (uint64_t)k);
    Board board;
    const Shape shape = { ROWS, columns, 3, 0, dtype, dtype, dtype };
    std::vector<int64_t> ids;
    std::vector<double> logits_of_both;
    xd_xtoken_chunk chunk = {};
    std::vector<xd_xtoken_chunk> chunks(COUNT, chunk);
    for (int64_t j = 0; j < k; j++) ids.push_back(3 * j + random.below(3));
    for (int64_t j = 0; j < COUNT * k; j++) logits_of_both.push_back((double)random.below(20) - 8.0);
    for (int64_t j = 0; odd && j < k; j += 4) logits_of_both[(size_t)j] = -HUGE_VAL;
    if (odd) logits_of_both[(size_t)(3 * k)] = NAN;
    for (int i = 0; i < COUNT; i++) chunks[(size_t)i].compared = i != 1;
    for (int i = 0; i < COUNT; i++) {
        chunks[(size_t)i].factor = 0.3 + 0.2 * i;
        chunks[(size_t)i].limit = i % 2 == 0 ? 1e-6 : 0.0; /* which any divergence exceeds */
    }
    const int64_t vocabulary = first + columns > 3 * k ? first + columns : 3 * k;
    const size_t x = board.add(odd_logits(dtype, shape, odd, &random)), list = board.add(ids);
    const size_t rows = board.add(at_work, sizeof at_work), chunks_at = board.add(chunks);
    const size_t picked = board.add(std::vector<double>((size_t)(COUNT * k), 0.5));
    const size_t student = board.add(logits_of_both), teacher = board.add(logits_of_both);
    const size_t slope = board.add(std::vector<float>((size_t)columns, 4.0f));
    const size_t slots = board.add(std::vector<int32_t>((size_t)vocabulary, 7));
    const size_t written = board.add(std::vector<uint8_t>{ 1, 1, 0, 1, 1, 1, 0 });
    const size_t gradient = board.add(logits(dtype, shape, &random));
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_xtoken_kernels *kernels = &xd_ctx_kernels(ctx)->xtoken;
            const xd_launch launch = xd_ctx_launch(ctx);
            const xd_xtoken_rows work = { rows_at(at, x, dtype, shape),
                                          columns,
                                          first,
                                          1.7,
                                          nullptr,
                                          place<int64_t>(at, rows),
                                          nullptr,
                                          COUNT, nullptr };
            const int64_t *ids_at = place<int64_t>(at, list);
            xd_xtoken_pick_args p = { work, ids_at, k, 0.7, false, place<double>(at, picked) };
            CHECK(kernels->pick(&launch, &p) == XD_OK);
            p.add = true;
            p.scale = 0.3;
            CHECK(kernels->pick(&launch, &p) == XD_OK);
            const xd_xtoken_compare_args c = { place<double>(at, student),
                                               place<double>(at, teacher),
                                               place<xd_xtoken_chunk>(at, chunks_at),
                                               COUNT,
                                               k,
                                               1.7,
                                               1.3,
                                               reverse };
            CHECK(kernels->compare(&launch, &c) == XD_OK);
            const xd_xtoken_slots_args s = { ids_at, k, vocabulary, place<int32_t>(at, slots) };
            CHECK(kernels->slots(&launch, &s) == XD_OK);
            xd_xtoken_pick_gradient_args g = {};
            g.to.x = work;
            g.to.rows = rows_at(at, gradient, dtype, shape);
            g.to.written = place<uint8_t>(at, written);
            g.ids = ids_at;
            g.k = k;
            g.slots = s.slots;
            g.dy = c.student;
            g.chunks = c.chunks;
            g.scratch = place<float>(at, slope);
            CHECK(kernels->pick_gradient(&launch, &g) == XD_OK);
        });
    const unsigned char *a = after.data(), *b = board.bytes.data();
    check_each(a + picked, b + picked, COUNT * k, 1e-15);
    for (int i = 0; i < COUNT; i++) {
        const xd_xtoken_chunk *mine = (const xd_xtoken_chunk *)(const void *)(a + chunks_at) + i;
        const xd_xtoken_chunk *theirs = (const xd_xtoken_chunk *)(const void *)(b + chunks_at) + i;
        const size_t s = student + (size_t)(i * k) * sizeof(double);
        /* of probabilities and their logarithms, which come from powers in f32; so do the differences below */
        check_near(&mine->value, &theirs->value, 1, 1e-5, 1e-3);
        if (isfinite(theirs->value)) CHECK(mine->agree == theirs->agree);
        check_near((const double *)(const void *)(a + s), (const double *)(const void *)(b + s), k, 1e-5);
        CHECK(mine->largest == theirs->largest);
    }
    const int64_t elements = ROWS * shape.stride();
    check_near(widened(a + gradient, dtype, elements).data(), widened(b + gradient, dtype, elements).data(),
               elements, tolerance_of(dtype));
    CHECK(memcmp(a + written, b + written, ROWS) == 0);
    CHECK(memcmp(a + slots, b + slots, (size_t)vocabulary * sizeof(int32_t)) == 0);
}

XD_TEST(positions_of_one_tokenizer_are_compared_as_on_the_cpu) {
    Pair pair;
    for (int form = 0; form < 8; form++) {
        const xd_dtype dtype = form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        compare_rows(&pair, dtype, form / 2 % 2 == 1, form / 4 == 1, 1, 0, 5);
        compare_rows(&pair, dtype, form / 2 % 2 == 1, form / 4 == 1, 300, 100, 611);
        compare_rows(&pair, dtype, form / 2 % 2 == 1, form / 4 == 1, 20, 100,
                     611); /* none is on this shard */
    }
}

/* ---- gradients of log-likelihoods ---- */

/* With `rest` the rows that nobody has written get the cross entropy afterwards. */
static void compare_gradient(Pair *pair, xd_dtype dtype, bool in_place, bool with_ce, bool rest) {
    enum { COLUMNS = 261, FIRST = 40 };
    Random random(30);
    Board board;
    const Shape shape = { ROWS, COLUMNS, 3, 0, dtype, dtype, dtype };
    std::vector<double> lse;
    const std::vector<unsigned char> z = logits(dtype, shape, &random);
    for (int r = 0; r < ROWS; r++) {
        double sum = 0.0;
        for (int v = 0; v < COLUMNS; v++) sum += exp(xd_load_f64(z.data(), dtype, r * shape.stride() + v));
        lse.push_back(log(sum));
    }
    const size_t x = board.add(z), lse_at = board.add(lse);
    const size_t g = in_place ? x : board.add(logits(dtype, shape, &random));
    const size_t rows = board.add(at_work, sizeof at_work);
    const size_t slopes = board.add(std::vector<double>{ 0.5, -0.25, 0.125, 0.75 });
    const size_t ce = board.add(std::vector<double>{ 0.5, 0.3, 0.3, 0.0, 0.2, 0.2, 0.1 });
    const size_t labels = board.add(std::vector<int64_t>{ 41, 0, 300, 45, 46, 47, 999 });
    const std::vector<uint8_t> none(ROWS), some{ 0, 0, 1, 0, 1, 0, 1 };
    const size_t written = board.add(in_place ? none : some);
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_xtoken_label_gradient_args a = {};
            a.to.x.logits = rows_at(at, x, dtype, shape);
            a.to.x.columns = COLUMNS;
            a.to.x.first = FIRST;
            a.to.x.temperature = 1.7;
            a.to.x.lse = a.to.lse_one = place<double>(at, lse_at);
            a.to.x.rows = place<int64_t>(at, rows);
            a.to.x.count = COUNT;
            a.to.rows = { place<void>(at, g), dtype, ROWS, COLUMNS + 2, shape.stride() };
            a.to.ce_factor = with_ce ? place<double>(at, ce) : nullptr;
            a.to.ce_weight = 0.6;
            a.to.labels.data = place<int64_t>(at, labels);
            a.to.written = place<uint8_t>(at, written);
            a.slopes = place<double>(at, slopes);
            const xd_xtoken_kernels kernels = xd_ctx_kernels(ctx)->xtoken;
            CHECK(kernels.label_gradient(&launch, &a) == XD_OK);
            if (rest) CHECK(kernels.rest_gradient(&launch, &a.to) == XD_OK);
        });
    const int64_t elements = ROWS * shape.stride();
    check_near(widened(after.data() + g, dtype, elements).data(),
               widened(board.bytes.data() + g, dtype, elements).data(), elements, tolerance_of(dtype));
    CHECK(memcmp(after.data() + written, board.bytes.data() + written, ROWS) == 0);
}

XD_TEST(gradients_of_log_likelihoods_are_those_of_the_cpu) {
    Pair pair;
    for (int form = 0; form < 16; form++)
        compare_gradient(&pair, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, form / 2 % 2 == 1, form / 4 % 2 == 1,
                         form / 8 == 1);
}

XD_CUDA_TEST_MAIN()
