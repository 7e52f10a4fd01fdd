/* Losses from the head on a GPU: BF16 logits where they were asked for and the factors are BF16, and rows of a chunk by the
 * workspace, the same on all ranks. */
#include "cuda_test.h"

#include "planned.h"

enum { ROWS = 1100, COLUMNS = 96, WIDTH = 16 };

/* What is asked of a call. */
struct Ask {
    bool bf16 = true, bias = false, gradient = true;
    xd_dtype dtype = XD_DTYPE_BF16; /* of the factors */
    int64_t chunk_rows = 0, rows = ROWS;
};

struct Result {
    xd_loss_values values;
    std::vector<float> hidden, weight;
};

/* The inputs and outputs of a call over columns [begin, end) of the vocabulary. */
struct Head {
    Random random;
    Device hidden, weight, bias, labels, d_hidden, d_weight, values, status;
    xd_vocab *vocab = nullptr;
    xd_head_loss_desc d = {};

    static std::vector<unsigned char> part(xd_dtype dtype, int64_t begin, int64_t end) {
        Random same(5);
        const std::vector<unsigned char> all = elements(dtype, COLUMNS * WIDTH, &same, false);
        const size_t row = WIDTH * xd_dtype_size(dtype);
        return std::vector<unsigned char>(all.begin() + (long)((size_t)begin * row), all.begin() + (long)((size_t)end * row));
    }
    Head(xd_ctx *ctx, const Ask &ask, xd_comm *tp = nullptr, int64_t begin = 0, int64_t end = COLUMNS)
        : random(4), hidden(elements(ask.dtype, ask.rows * WIDTH, &random, false)), weight(part(ask.dtype, begin, end)),
          bias(std::vector<float>((size_t)(end - begin), 0.25f)), labels(std::vector<int64_t>((size_t)ask.rows, 5)),
          d_hidden(std::vector<float>((size_t)(ask.rows * WIDTH))), d_weight(std::vector<float>((size_t)((end - begin) * WIDTH))),
          values(std::vector<xd_loss_values>(1)), status(std::vector<xd_status>(1)) {
        const xd_interval columns = { begin, end };
        xd_vocab_desc split = {};
        split.size = COLUMNS;
        split.tp = tp;
        split.columns = &columns;
        CHECK(xd_vocab_create(ctx, &split, &vocab) == XD_OK);
        d.student.hidden = { hidden.at(), ask.dtype, ask.rows, WIDTH, 0 };
        d.student.weight = { weight.at(), ask.dtype, end - begin, WIDTH, 0 };
        if (ask.bias) d.student.bias = bias.at<float>();
        if (ask.gradient) d.hidden_gradient = { d_hidden.at(), XD_DTYPE_F32, ask.rows, WIDTH, 0 };
        d.weight_gradient = d_weight.at<float>();
        d.bf16 = ask.bf16;
        d.chunk_rows = ask.chunk_rows;
        d.loss.common.labels.data = labels.at<int64_t>();
        d.loss.vocab = vocab;
        d.loss.hard_weight = 1.0;
        d.loss.common.status = status.at<xd_status>();
    }
    ~Head() { xd_vocab_destroy(vocab); }
    Head(const Head &) = delete;

    size_t planned(xd_ctx *ctx) { return PLANNED_WORKSPACE(ctx, xd_head_loss(ctx, &d, values.at<xd_loss_values>())); }

    /* With so many bytes of workspace; 0: the call allocates. How many kernels it launched. */
    long run(xd_ctx *ctx, size_t bytes = 0) {
        const Device workspace(std::vector<unsigned char>(bytes + 1));
        if (bytes) d.workspace = workspace.at(), d.workspace_bytes = bytes;
        const long before = launch_count();
        CHECK(xd_head_loss(ctx, &d, values.at<xd_loss_values>()) == XD_OK);
        const long launched = launch_count() - before;
        CHECK(cudaStreamSynchronize((cudaStream_t)xd_ctx_settings(ctx)->stream) == cudaSuccess);
        d.workspace = nullptr;
        return launched;
    }
    Result result() const { return { values.host<xd_loss_values>()[0], d_hidden.host<float>(), d_weight.host<float>() }; }
};

static Result result_of(const Gpu &gpu, const Ask &ask) {
    Head head(gpu.ctx, ask);
    head.run(gpu.ctx);
    return head.result();
}

/* ---- BF16 logits ---- */

/* ||a - b|| / ||b|| */
static double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(difference / size);
}

/* Of each logit and of each gradient 2^-9 at most is rounded off; sums over rows and columns are in f32. */
XD_TEST(bf16_logits_are_as_near_as_their_rounding) {
    Gpu gpu;
    Ask wide;
    wide.bf16 = false;
    const Result narrow = result_of(gpu, Ask()), exact = result_of(gpu, wide);
    const double loss = fabs(narrow.values.loss / exact.values.loss - 1.0);
    const double hidden = distance(narrow.hidden, exact.hidden), weight = distance(narrow.weight, exact.weight);
    printf("    bf16 logits against f32 ones: the loss is off by %.1e, gradients of hidden states and weight by %.1e and %.1e\n", loss,
           hidden, weight);
    CHECK_NEAR(loss, 0.0, 1e-4);
    CHECK(hidden > 1e-5 && hidden < 6e-3);
    CHECK(weight > 1e-5 && weight < 6e-3);
}

XD_TEST(logits_are_bf16_only_where_that_was_asked_for_and_the_factors_are) {
    Ask asks[5];
    asks[1].bf16 = false;
    asks[2].bias = true;
    asks[3].dtype = XD_DTYPE_F32;
    size_t bytes[5];
    Gpu gpu;
    for (int i = 0; i < 4; i++) {
        asks[i].chunk_rows = 512;
        bytes[i] = Head(gpu.ctx, asks[i]).planned(gpu.ctx);
        CHECK_EQ_INT(bytes[i] - bytes[0], i ? 512 * COLUMNS * 2 : 0);
    }
    Gpu invariant(XD_REDUCTION_INVARIANT);
    asks[4].chunk_rows = 512;
    asks[4].gradient = false;
    bytes[4] = Head(invariant.ctx, asks[4]).planned(invariant.ctx);
    asks[4].bf16 = false;
    CHECK_EQ_INT(Head(invariant.ctx, asks[4]).planned(invariant.ctx), bytes[4]);
}

/* ---- rows of a chunk ---- */

#if defined(XD_EMU)
XD_TEST(a_chunk_has_as_many_rows_as_the_workspace_holds) {
    static const int64_t rows[] = { 256, 512, 1280 };
    Gpu gpu;
    long launches[3];
    Result results[3];
    for (int i = 0; i < 3; i++) {
        Ask given, chosen;
        given.chunk_rows = rows[i];
        Head head(gpu.ctx, given), same(gpu.ctx, chosen);
        const size_t bytes = head.planned(gpu.ctx);
        launches[i] = head.run(gpu.ctx, bytes);
        CHECK_EQ_INT(same.run(gpu.ctx, bytes), launches[i]);
        CHECK_EQ_INT(Head(gpu.ctx, chosen).run(gpu.ctx, bytes + 100), launches[i]); /* not enough for 256 more */
        results[i] = head.result();
        CHECK_SAME(results[i].weight, same.result().weight);
        CHECK_SAME(results[i].weight, results[0].weight);
        CHECK_SAME(results[i].hidden, results[0].hidden);
    }
    CHECK(launches[0] > launches[1] && launches[1] > launches[2]);
    Head allocated(gpu.ctx, Ask());
    CHECK_EQ_INT(allocated.run(gpu.ctx), launches[2]);
}
#endif

XD_TEST(a_workspace_that_holds_no_chunk_is_refused_with_both_numbers) {
    Gpu gpu;
    Ask least;
    least.chunk_rows = 256;
    const size_t bytes = Head(gpu.ctx, least).planned(gpu.ctx);
    Head head(gpu.ctx, Ask());
    const Device workspace(std::vector<unsigned char>(bytes - 1));
    char words[100];
    head.d.workspace = workspace.at();
    head.d.workspace_bytes = bytes - 1;
    CHECK(xd_head_loss(gpu.ctx, &head.d, head.values.at<xd_loss_values>()) == XD_ERROR_ARGUMENT);
    snprintf(words, sizeof words, "%zu bytes but the loss needs %zu", bytes - 1, bytes);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, words));
}

/* What a plan says of 4,096 rows of a large vocabulary, whose memory nobody reads. */
static size_t planned_large(const Gpu &gpu, bool bf16, bool teacher, int64_t chunk_rows) {
    enum { VOCABULARY = 128256 };
    static char somewhere[16];
    xd_vocab *vocab = nullptr;
    xd_head_loss_desc d = {};
    xd_loss_values *const out = (xd_loss_values *)(void *)somewhere;
    CHECK(vocab_even(gpu.ctx, nullptr, VOCABULARY, &vocab) == XD_OK);
    d.student.hidden = { somewhere, XD_DTYPE_BF16, 4096, 64, 0 };
    d.student.weight = { somewhere, XD_DTYPE_BF16, VOCABULARY, 64, 0 };
    d.weight_gradient = (float *)(void *)somewhere;
    if (teacher) d.teacher = d.student;
    d.loss.soft_weight = teacher ? 1.0 : 0.0;
    d.loss.hard_weight = teacher ? 0.0 : 1.0;
    if (!teacher) d.loss.common.labels.data = somewhere;
    d.loss.vocab = vocab;
    d.bf16 = bf16;
    d.loss.common.status = (xd_status *)(void *)somewhere;
    d.chunk_rows = chunk_rows;
    const size_t bytes = PLANNED_WORKSPACE(gpu.ctx, xd_head_loss(gpu.ctx, &d, out));
    CHECK(bytes > 0);
    if (bytes == 0) printf("    %s\n", xd_last_error(gpu.ctx)->message);
    xd_vocab_destroy(vocab);
    return bytes;
}

XD_TEST(without_a_workspace_the_logits_take_256_mib_at_most) {
    Gpu gpu;
    CHECK_EQ_INT(planned_large(gpu, true, false, 0), planned_large(gpu, true, false, 1024));
    CHECK_EQ_INT(planned_large(gpu, false, false, 0), planned_large(gpu, false, false, 512));
    CHECK_EQ_INT(planned_large(gpu, true, true, 0), planned_large(gpu, true, true, 512));
    CHECK(planned_large(gpu, true, false, 0) < ((size_t)256 << 20) + ((size_t)4 << 20));
    CHECK_EQ_INT((planned_large(gpu, true, false, 2048) - ((size_t)2048 * 128256 * 2)) >> 23, 0); /* 501 MiB and a little */
}

/* ---- ranks ---- */

/* What ranks have: columns, and rows that the workspace of each has room for. */
struct Split {
    int64_t chunk_rows;
    Result result[2];
};

static xd_result rank_of(xd_comm *world, void *argument) {
    static const int64_t ends[] = { 0, 64, COLUMNS };
    Split *split = (Split *)argument;
    xd_cuda_desc own = {};
    own.cublas = "none";
    const RankGpu gpu(world, &own);
    const int rank = gpu.rank;
    Ask ask, room;
    room.chunk_rows = rank == 0 ? 1280 : 512;
    ask.chunk_rows = split->chunk_rows;
    const size_t bytes = Head(gpu.ctx, room, world, ends[rank], ends[rank + 1]).planned(gpu.ctx);
    Head head(gpu.ctx, ask, world, ends[rank], ends[rank + 1]);
    head.run(gpu.ctx, bytes);
    split->result[rank] = head.result();
    return XD_OK;
}

XD_TEST(ranks_take_the_rows_that_all_have_room_for) {
    Split chosen = { 0, {} }, given = { 512, {} };
    xd_error error = {};
    CHECK_EQ_INT(xd_run_threads(2, nullptr, rank_of, &chosen, &error), XD_OK);
    if (error.message[0]) printf("    %s\n", error.message);
    CHECK_EQ_INT(xd_run_threads(2, nullptr, rank_of, &given, &error), XD_OK);
    for (int r = 0; r < 2; r++) {
        CHECK_SAME(chosen.result[r].hidden, given.result[r].hidden);
        CHECK_SAME(chosen.result[r].weight, given.result[r].weight);
        CHECK_SAME(chosen.result[r].hidden, chosen.result[0].hidden); /* the same bits on every rank */
        CHECK(chosen.result[r].values.loss == chosen.result[0].values.loss && chosen.result[r].values.loss > 1.0);
    }
}

XD_CUDA_TEST_MAIN()
