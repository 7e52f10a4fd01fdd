/* The parts that losses across tokenizers are made of, on a GPU: averages of chunks, probabilities in another
 * vocabulary, pieces of a teacher's logits. Against the CPU, and on many ranks against one. */
#include "cuda_loss_test.h"

/* ---- averages of chunks ---- */

/* Ids are the host's, and of no use to anybody once a call has returned. */
struct Ids {
    std::vector<int64_t> ids;
    explicit Ids(const std::vector<int64_t> &from) : ids(from) {}
    ~Ids() {
        for (int64_t &id : ids) id = 1 << 30;
    }
};

static void compare_chunks(Pair *pair, bool sealed, xd_dtype dtype, bool ordered, int64_t held,
                           int64_t chunks, int64_t n) {
    enum { SEQUENCES = 2 };
    Random random(40 + (uint64_t)(held + n));
    Board board;
    const Shape shape = { SEQUENCES * held, n, 5, 0, dtype, dtype, dtype };
    const int64_t cells = SEQUENCES * chunks;
    std::vector<int64_t> ids, sizes[2];
    std::vector<unsigned char> x = logits(dtype, shape, &random);
    std::vector<double> some((size_t)(cells * n), 9.0);
    for (int64_t i = 0; i < shape.rows; i++)
        ids.push_back(ordered ? i % held * chunks / held : random.below(chunks + 1) - 1);
    for (int64_t i = 0; i < shape.rows; i += 3) xd_store_f64(x.data(), dtype, i * shape.stride(), -HUGE_VAL);
    const size_t values = board.add(x), gradient = board.add(x);
    const size_t sums = board.add(some), averages = board.add(some);
    for (double &one : some) one = (double)random.unit();
    const size_t weight = board.add(some);
    const std::vector<unsigned char> after =
        pair->run(&board, 1, sealed, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            std::vector<int64_t> &mine = sizes[ctx == pair->cpu];
            double *out = place<double>(at, sums);
            mine.assign((size_t)cells, 7);
            for (int call = 0; call < 3; call++) {
                Ids once(ids), counts(mine);
                const xdi_chunk_map map = { once.ids.data(), SEQUENCES, held, chunks, nullptr };
                const int64_t *size = counts.ids.data();
                xd_result result = XD_OK;
                if (call == 0)
                    result = xdi_chunk_sums(ctx, &map, rows_at(at, values, dtype, shape), out, mine.data());
                else if (call == 1)
                    result = xdi_chunk_averages(ctx, out, size, cells, n, place<double>(at, averages));
                else
                    result = xdi_chunk_averages_backward(ctx, &map, size, place<double>(at, weight),
                                                        rows_at(at, gradient, dtype, shape));
                CHECK(result == XD_OK);
            }
            CHECK(xdi_chunk_averages(ctx, out, mine.data(), cells, n, out) == XD_OK); /* in place */
        });
    CHECK_SAME(after, board.bytes);
    CHECK_SAME(sizes[0], sizes[1]);
}

XD_TEST(averages_of_chunks_have_the_bits_of_the_cpu) {
    static const int64_t columns[] = { 1, 7, 300, 2053 };
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int form = 0; form < 16; form++)
            compare_chunks(&pair, mode == 0, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, form / 2 % 2 == 1,
                           form / 4 == 1 ? 250 : 21, form / 4 == 1 ? 230 : 9, columns[form / 4]);
    }
}

static void refuse_chunks(xd_reduction reduction) {
    Gpu gpu(reduction);
    std::vector<float> x(12, 1.0f);
    std::vector<double> out(8, 5.0);
    Device values(x), sums(out);
    int64_t ids[4] = { 0, 1, -1, 1 }, sizes[2] = { 7, 7 };
    xdi_chunk_map map = { ids, 1, 4, 2, nullptr };
    xd_rows rows = { values.at(), XD_DTYPE_F64, 4, 3, 0 };
    CHECK(xdi_chunk_sums(gpu.ctx, &map, rows, sums.at<double>(), sizes) == XD_ERROR_DTYPE);
    CHECK(xdi_chunk_averages_backward(gpu.ctx, &map, sizes, sums.at<double>(), rows) == XD_ERROR_DTYPE);
    rows.dtype = XD_DTYPE_F32;
    rows.rows = 3;
    CHECK(xdi_chunk_sums(gpu.ctx, &map, rows, sums.at<double>(), sizes) == XD_ERROR_SHAPE);
    CHECK(xdi_chunk_averages_backward(gpu.ctx, &map, sizes, sums.at<double>(), rows) == XD_ERROR_SHAPE);
    rows.rows = 4;
    ids[3] = 2;
    CHECK(xdi_chunk_sums(gpu.ctx, &map, rows, sums.at<double>(), sizes) == XD_ERROR_ARGUMENT);
    CHECK(xdi_chunk_averages(gpu.ctx, sums.at<double>(), sizes, -1, 3, sums.at<double>()) ==
          XD_ERROR_ARGUMENT);
    gpu.wait();
    CHECK_SAME(sums.host<double>(), out);
    CHECK_EQ_INT(sizes[0], 7);
    map.sequences = 0;
    rows.rows = 0;
    CHECK(xdi_chunk_sums(gpu.ctx, &map, rows, nullptr, sizes) == XD_OK);
    CHECK(xdi_chunk_averages(gpu.ctx, nullptr, nullptr, 0, 3, nullptr) == XD_OK);
    CHECK(xdi_chunk_averages_backward(gpu.ctx, &map, sizes, nullptr, rows) == XD_OK);
}

XD_TEST(what_does_not_fit_the_chunks_is_refused) {
    refuse_chunks(XD_REDUCTION_DETERMINISTIC);
    refuse_chunks(XD_REDUCTION_INVARIANT);
}

/* ---- probabilities in the teacher's vocabulary ---- */

/* A projection of some entries a student id; one teacher id is everybody's, and the last is nobody's. */
struct Matrix {
    xd_ctx *ctx;
    xd_projection m = {};
    Matrix(xd_ctx *c, int64_t student, int64_t teacher, Random *random) : ctx(c) {
        std::vector<xdi_vote> cells;
        for (int64_t s = 0; s < student; s++)
            for (int64_t i = 0; i < s % 5; i++) {
                const int64_t t = i == 0 ? 0 : random->below(teacher - 1);
                cells.push_back({ (int32_t)s, (int32_t)t, 0.5 + 0.4 * (double)random->unit() });
            }
        const xdi_projection_cells list = { cells.data(), (int64_t)cells.size(), student, teacher };
        CHECK(xdi_projection_from_cells(ctx, &list, &m) == XD_OK);
    }
    ~Matrix() {
        xd_projection_destroy(ctx, &m);
    }
};

enum { STUDENT = 301, TEACHER = 67, TOKENS = 5, SOME = 3 };
static const int64_t some_columns[SOME] = { 0, 31, TEACHER - 1 };

static std::vector<float> probabilities(Random *random, int64_t count) {
    std::vector<float> p;
    for (int64_t i = 0; i < count; i++) p.push_back(0.5f + 0.5f * random->unit());
    return p;
}

/* Sums in another order than the CPU's, unless they are exact; derivatives in the same. */
static void compare_project(Pair *pair, xd_dtype dtype, bool all, bool exact, bool near) {
    Random random(60);
    Board board;
    const Matrix matrix(pair->cpu, STUDENT, TEACHER, &random);
    const int64_t k = all ? TEACHER : SOME;
    const Shape shape = { TOKENS, STUDENT, 4, 0, dtype, dtype, dtype };
    std::vector<double> weight;
    for (int64_t i = 0; i < TOKENS * k; i++) weight.push_back((double)random.unit());
    const size_t p = board.add(logits(dtype, shape, &random)),
                 gradient = board.add(logits(dtype, shape, &random));
    const size_t out = board.add(std::vector<double>((size_t)(TOKENS * k), 9.0)), w = board.add(weight);
    const size_t list = board.add(some_columns, sizeof some_columns);
    xd_projection there = {};
    CHECK(xd_projection_upload(pair->gpu.ctx, &matrix.m, &there) == XD_OK);
    const std::vector<unsigned char> after =
        pair->run(&board, STUDENT, near && !exact, [&](xd_ctx *ctx, xd_vocab *vocab, void *at) {
            const xd_projection *m = near && ctx != pair->cpu ? &there : &matrix.m;
            const int64_t *columns = near ? place<int64_t>(at, list) : some_columns;
            const xdi_project_desc desc = { vocab, m, all ? nullptr : columns, k };
            CHECK(xdi_project(ctx, &desc, rows_at(at, p, dtype, shape), place<double>(at, out)) == XD_OK);
            CHECK(xdi_project_backward(ctx, &desc, place<double>(at, w), rows_at(at, gradient, dtype, shape)) == XD_OK);
        });
    const double *a = (const double *)(const void *)(after.data() + out),
                 *b = place<double>(board.bytes.data(), out);
    check_near(a, b, TOKENS * k, exact ? 0.0 : 1e-15);
    const size_t bytes = (size_t)(TOKENS * shape.stride()) * xd_dtype_size(dtype);
    CHECK(memcmp(after.data() + gradient, board.bytes.data() + gradient, bytes) == 0);
    xd_projection_unload(pair->gpu.ctx, &there);
}

XD_TEST(projected_probabilities_are_those_of_the_cpu) {
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int form = 0; form < 8; form++)
            compare_project(&pair, form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, form / 2 % 2 == 1, mode == 1,
                            form / 4 == 1);
    }
}

static void refuse_projection(xd_reduction reduction) {
    Gpu gpu(reduction);
    Random random(61);
    const Matrix matrix(gpu.ctx, STUDENT, TEACHER, &random);
    const std::vector<double> nines(TOKENS * TEACHER, 9.0);
    Device p(probabilities(&random, TOKENS * STUDENT)), out(nines);
    const int64_t outside[2] = { 4, TEACHER }, unordered[2] = { 4, 4 };
    xd_rows rows = { p.at(), XD_DTYPE_F32, TOKENS, STUDENT, 0 };
    xd_vocab *vocab = nullptr, *other = nullptr;
    CHECK(vocab_even(gpu.ctx, nullptr, STUDENT, &vocab) == XD_OK);
    CHECK(vocab_even(gpu.ctx, nullptr, STUDENT - 1, &other) == XD_OK);
    double *at = out.at<double>();
    const xdi_project_desc all = { vocab, &matrix.m, nullptr, TEACHER }, short_of = { vocab, &matrix.m, nullptr, 2 };
    const xdi_project_desc beyond = { vocab, &matrix.m, outside, 2 }, twice = { vocab, &matrix.m, unordered, 2 };
    const xdi_project_desc another = { other, &matrix.m, nullptr, TEACHER };
    CHECK(xdi_project(gpu.ctx, &beyond, rows, at) == XD_ERROR_ARGUMENT);
    CHECK(xdi_project(gpu.ctx, &twice, rows, at) == XD_ERROR_ARGUMENT);
    CHECK(xdi_project(gpu.ctx, &short_of, rows, at) == XD_ERROR_SHAPE);
    CHECK(xdi_project(gpu.ctx, &another, rows, at) == XD_ERROR_SHAPE);
    CHECK(xdi_project_backward(gpu.ctx, &beyond, at, rows) == XD_ERROR_ARGUMENT);
    const int64_t there[3] = { -1, 4, TEACHER };
    Device columns(there, sizeof there), three(std::vector<double>(3 * TOKENS, 9.0));
    const xdi_project_desc near = { vocab, &matrix.m, columns.at<int64_t>(), 3 };
    CHECK(xdi_project(gpu.ctx, &near, rows, three.at<double>()) == XD_OK);
    gpu.wait();
    const std::vector<double> found = three.host<double>();
    CHECK(found[0] == 0.0 && found[1] > 0.0 && found[2] == 0.0);
    rows.dtype = XD_DTYPE_F64;
    CHECK(xdi_project(gpu.ctx, &all, rows, at) == XD_ERROR_DTYPE);
    CHECK(xdi_project_backward(gpu.ctx, &all, at, rows) == XD_ERROR_DTYPE);
    rows.dtype = XD_DTYPE_F32;
    rows.stride = STUDENT - 1;
    CHECK(xdi_project(gpu.ctx, &all, rows, at) == XD_ERROR_SHAPE);
    rows.stride = rows.rows = 0;
    CHECK(xdi_project(gpu.ctx, &all, rows, at) == XD_OK);
    CHECK(xdi_project_backward(gpu.ctx, &all, at, rows) == XD_OK);
    gpu.wait();
    CHECK_SAME(out.host<double>(), nines);
    xd_vocab_destroy(other);
    xd_vocab_destroy(vocab);
}

XD_TEST(what_does_not_fit_the_projection_is_refused) {
    refuse_projection(XD_REDUCTION_DETERMINISTIC);
    refuse_projection(XD_REDUCTION_INVARIANT);
}

/* ---- many ranks ---- */

enum { RANKS = 3, HELD = 4, CHUNKS = 5 };
static const int64_t cuts[RANKS + 1] = { 0, 7, 7, STUDENT }; /* uneven, and one rank has nothing */

/* The same numbers for every rank, and what rank 0 has found. */
struct Shared {
    bool invariant, wrong;
    std::vector<float> probs, values;
    std::vector<double> weight, out, sums;
    std::vector<float> gradient;
    std::vector<int64_t> ids, sizes;
};

static Shared shared_numbers(bool invariant) {
    Random random(62);
    Shared s;
    s.invariant = invariant;
    s.wrong = false;
    s.probs = probabilities(&random, TOKENS * STUDENT);
    s.values = probabilities(&random, RANKS * HELD * STUDENT);
    for (int i = 0; i < TOKENS * TEACHER; i++) s.weight.push_back((double)random.unit());
    for (int i = 0; i < RANKS * HELD; i++) s.ids.push_back(random.below(CHUNKS + 1) - 1);
    s.out.resize(TOKENS * TEACHER);
    s.gradient.resize(TOKENS * STUDENT);
    s.sums.resize(CHUNKS * STUDENT);
    s.sizes.resize(CHUNKS);
    return s;
}

/* The columns of a rank out of whole rows. */
static std::vector<float> columns_of(const std::vector<float> &whole, int64_t begin, int64_t end) {
    std::vector<float> part;
    for (int t = 0; t < TOKENS; t++)
        part.insert(part.end(), whole.begin() + t * STUDENT + begin, whole.begin() + t * STUDENT + end);
    return part;
}

static void project_of_rank(xd_ctx *ctx, xd_comm *world, Shared *s) {
    Random random(63);
    const Matrix matrix(ctx, STUDENT, TEACHER, &random);
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const int64_t begin = ranks == 1 ? 0 : cuts[rank], end = ranks == 1 ? (int64_t)STUDENT : cuts[rank + 1];
    Device probs(columns_of(s->probs, begin, end)), weight(s->weight), out(s->out);
    xd_rows rows = { probs.at(), XD_DTYPE_F32, TOKENS, end - begin, 0 };
    xd_vocab *vocab = nullptr;
    CHECK(vocab_of(ctx, ranks > 1 ? world : nullptr, { begin, end }, STUDENT, &vocab) == XD_OK);
    if (s->wrong && rank == 0) rows.dtype = XD_DTYPE_I32;
    const xdi_project_desc all = { vocab, &matrix.m, nullptr, TEACHER };
    xd_result result = xdi_project(ctx, &all, rows, out.at<double>());
    CHECK(result == (!s->wrong ? XD_OK : rank == 0 ? XD_ERROR_DTYPE : XD_ERROR_PEER));
    std::vector<double> mine(s->out.size());
    CHECK(xd_read(ctx, mine.data(), out.at(), mine.size() * sizeof(double)) == XD_OK);
    result = xdi_project_backward(ctx, &all, weight.at<double>(), rows);
    CHECK(result == (!s->wrong ? XD_OK : rank == 0 ? XD_ERROR_DTYPE : XD_ERROR_PEER));
    std::vector<float> part((size_t)(TOKENS * (end - begin)));
    CHECK(xd_read(ctx, part.data(), probs.at(), part.size() * sizeof(float)) == XD_OK);
    for (int64_t i = 0; i < (int64_t)part.size() && !s->wrong; i++)
        s->gradient[(size_t)(i / (end - begin) * STUDENT + begin + i % (end - begin))] = part[(size_t)i];
    if (rank == 0 && !s->wrong) s->out = mine;
    xd_vocab_destroy(vocab);
}

static void chunks_of_rank(xd_ctx *ctx, xd_comm *world, Shared *s) {
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const int64_t held = RANKS * HELD / ranks;
    const std::vector<float> mine(s->values.begin() + rank * held * STUDENT,
                                  s->values.begin() + (rank + 1) * held * STUDENT);
    Device values(mine), sums(s->sums);
    std::vector<int64_t> sizes(CHUNKS);
    const xdi_chunk_map map = { s->ids.data() + rank * held, 1, held, CHUNKS, ranks > 1 ? world : nullptr };
    xd_rows rows = { values.at(), XD_DTYPE_F32, held, STUDENT, 0 };
    if (s->wrong && rank == 0) rows.rows--;
    const xd_result result = xdi_chunk_sums(ctx, &map, rows, sums.at<double>(), sizes.data());
    CHECK(result == (!s->wrong ? XD_OK : rank == 0 ? XD_ERROR_SHAPE : XD_ERROR_PEER));
    std::vector<double> all(s->sums.size());
    CHECK(xd_read(ctx, all.data(), sums.at(), all.size() * sizeof(double)) == XD_OK);
    if (rank != 0 || s->wrong) return;
    s->sums = all;
    s->sizes = sizes;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    Shared *s = (Shared *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    xd_ctx_set_stream(ctx, stream);
    CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
    project_of_rank(ctx, world, s);
    chunks_of_rank(ctx, world, s);
    xd_cuda_destroy(cuda);
    cudaStreamDestroy(stream);
    return XD_OK;
}

static void run_ranks(int ranks, Shared *s) {
    xd_ctx_desc desc = {};
    desc.timeout_seconds = 300.0;
    desc.logger.write = [](void *, xd_log_level, const char *) {};
    desc.reduction = s->invariant ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
    CHECK(xd_run_threads(ranks, &desc, run_rank, s, nullptr) == XD_OK);
}

XD_TEST(many_ranks_find_what_one_finds) {
    for (int mode = 0; mode < 2; mode++) {
        Shared one = shared_numbers(mode == 1), many = shared_numbers(mode == 1);
        run_ranks(1, &one);
        run_ranks(RANKS, &many);
        check_near(many.out.data(), one.out.data(), TOKENS * TEACHER, mode ? 0.0 : 1e-15);
        check_near(many.sums.data(), one.sums.data(), CHUNKS * STUDENT, 1e-15);
        CHECK_SAME(many.gradient, one.gradient);
        CHECK_SAME(many.sizes, one.sizes);
        if (mode) CHECK_SAME(many.out, one.out);
        if (mode) CHECK_SAME(many.sums, one.sums);
    }
}

XD_TEST(an_error_of_one_rank_is_one_of_all_of_them) {
    for (int mode = 0; mode < 2; mode++) {
        Shared s = shared_numbers(mode == 1);
        s.wrong = true;
        run_ranks(RANKS, &s);
    }
}

/* ---- pieces of logits ---- */

XD_TEST(pieces_of_logits_have_the_bits_of_the_cpu) {
    Pair pair;
    Random random(64);
    for (int form = 0; form < 8; form++) {
        const xd_dtype from = form % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32,
                       to = form / 2 % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        const Shape shape = { 40, 37, form / 4, 0, from, from, from }, window = { 45, 50, 3, 0, to, to, to };
        const xdi_teacher_piece pieces[3] = { { 0, 1, 2, 3, 5, 39, 30 },
                                             { 0, 0, 0, 0, 40, 2, 10 },
                                             { 0, 40, 0, 7, 0, 0, 9 } };
        Board board;
        const size_t x = board.add(logits(from, shape, &random)), y = board.add(logits(to, window, &random));
        const std::vector<unsigned char> after =
            pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
                for (const xdi_teacher_piece &piece : pieces)
                    CHECK(xdi_teacher_piece_copy(ctx, &piece, rows_at(at, x, from, shape),
                                                rows_at(at, y, to, window)) == XD_OK);
                const xdi_teacher_piece outside = { 0, 0, 0, 0, 30, 1, 21 };
                xd_rows rows = rows_at(at, x, from, shape);
                CHECK(xdi_teacher_piece_copy(ctx, &outside, rows, rows_at(at, y, to, window)) ==
                      XD_ERROR_SHAPE);
                rows.dtype = XD_DTYPE_F16;
                CHECK(xdi_teacher_piece_copy(ctx, &pieces[0], rows, rows_at(at, y, to, window)) ==
                      XD_ERROR_DTYPE);
                rows.dtype = from;
                rows.stride = 3;
                CHECK(xdi_teacher_piece_copy(ctx, &pieces[0], rows, rows_at(at, y, to, window)) ==
                      XD_ERROR_SHAPE);
            });
        CHECK_SAME(after, board.bytes);
    }
}

XD_CUDA_TEST_MAIN()
