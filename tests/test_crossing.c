/* Crossings into and out of regions whose ranks share the work: forward and backward of every kind against whole arrays, on up to 8
 * ranks, uneven and empty; bits, bytes, refusals. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "live_bytes.h"
#include "planned.h"
#include "xd_test.h"

#include <stdlib.h>

enum { ROOM = 4096, RANKS = 8 };

typedef double array[ROOM];

static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64 };

/* Small whole numbers, whose sums are exact in every dtype. */
static double value(int salt, int rank, int64_t i) {
    return (double)((i * 7 + rank * 5 + salt * 3) % 13) - 6;
}

static int64_t numel_of(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) n *= shape[d];
    return n;
}

/* The place in the whole of element k of the part of a rank that is cut along dim; dim -1: k. */
static int64_t whole_place(const xd_crossing_desc *d, int dim, int ranks, int rank, int64_t k) {
    int64_t at[XD_DIMS_MAX], place = 0;
    for (int i = d->ndim - 1; i >= 0; i--) {
        const xd_interval own =
            i == dim ? xd_chunk(d->shape[i], ranks, rank) : (xd_interval){ 0, d->shape[i] };
        at[i] = own.begin + k % (own.end - own.begin);
        k /= own.end - own.begin;
    }
    for (int i = 0; i < d->ndim; i++) place = place * d->shape[i] + at[i];
    return place;
}

static int64_t part_numel(const xd_crossing_desc *d, int dim, int ranks, int rank) {
    int64_t n = 1;
    for (int i = 0; i < d->ndim; i++) {
        const xd_interval own =
            i == dim ? xd_chunk(d->shape[i], ranks, rank) : (xd_interval){ 0, d->shape[i] };
        n *= own.end - own.begin;
    }
    return n;
}

/* Where input and output are cut, and whether each direction adds: by the table of the header. */
typedef struct row {
    int in, out; /* 0 whole, 1 along dim, 2 along other_dim */
    bool sums[2];
} row;

static const row table[] = {
    { 0, 0, { false, true } },  { 0, 0, { true, false } }, { 0, 1, { false, false } },
    { 1, 0, { false, false } }, { 1, 0, { false, true } }, { 0, 1, { true, false } },
    { 1, 2, { false, false } },
};

static void check_direction(xd_crossing *c, const xd_crossing_desc *d, xd_comm *world, bool backward,
                            bool in_place) {
    static __thread array in, out;
    const int n = xd_comm_size(world), me = xd_comm_rank(world);
    const row r = table[d->kind];
    const int dims[3] = { -1, d->dim, d->other_dim };
    const int from = dims[backward ? r.out : r.in], to = dims[backward ? r.in : r.out];
    const int64_t in_count = part_numel(d, from, n, me), out_count = part_numel(d, to, n, me);
    const bool sums = r.sums[backward];
    const int salt = backward ? 2 : 1;
    void *target = in_place && d->kind <= XD_CROSSING_REDUCE ? in : out;
    memset(in, 0x5a, sizeof in);
    memset(out, 0x5a, sizeof out);
    for (int64_t k = 0; k < in_count; k++)
        xd_store_f64(in, d->dtype, k, value(salt, sums ? me : 0, whole_place(d, from, n, me, k)));
    const void *source = in_count ? in : NULL;
    void *sink = out_count ? target : NULL;
    CHECK_EQ_INT(backward ? xd_crossing_backward(c, source, sink) : xd_crossing_forward(c, source, sink),
                 XD_OK);
    int64_t bad = 0;
    for (int64_t k = 0; k < out_count; k++) {
        double expected = 0;
        for (int q = 0; q < (sums ? n : 1); q++) expected += value(salt, q, whole_place(d, to, n, me, k));
        bad += xd_load_f64(target, d->dtype, k) != expected;
    }
    CHECK_EQ_INT(bad, 0);
    const size_t size = xd_dtype_size(d->dtype);
    CHECK_EQ_INT(((unsigned char *)target)[(size_t)out_count * size], 0x5a);
}

static void check_crossing(xd_comm *world, const xd_crossing_desc *desc) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_crossing *c = NULL;
    xd_planned bytes;
    int64_t in[XD_DIMS_MAX], out[XD_DIMS_MAX];
    const int n = xd_comm_size(world), me = xd_comm_rank(world);
    const xd_result made = xd_crossing_create(world, desc, &c);
    CHECK_EQ_INT(made, XD_OK);
    xd_crossing *none = c;
    CHECK_EQ_INT(PLANNED(ctx, xd_crossing_create(world, desc, &none), &bytes), XD_OK);
    CHECK(none == NULL);
    if (made != XD_OK) return;
    const int dims[3] = { -1, desc->dim, desc->other_dim };
    xd_crossing_shape(c, in, out);
    CHECK_EQ_INT(numel_of(desc->ndim, in), part_numel(desc, dims[table[desc->kind].in], n, me));
    CHECK_EQ_INT(numel_of(desc->ndim, out), part_numel(desc, dims[table[desc->kind].out], n, me));
    for (int in_place = 0; in_place < 2; in_place++) {
        const uint64_t start = xd_comm_traffic(world).bytes_sent;
        check_direction(c, desc, world, false, in_place != 0);
        const uint64_t middle = xd_comm_traffic(world).bytes_sent;
        check_direction(c, desc, world, true, in_place != 0);
        CHECK_EQ_INT(middle - start, bytes.forward_sent);
        CHECK_EQ_INT(xd_comm_traffic(world).bytes_sent - middle, bytes.backward_sent);
    }
    xd_crossing_destroy(c);
}

static xd_result every_kind(xd_comm *world, void *argument) {
    static const int64_t shapes[][3] = { { 8, 1, 8 },  { 7, 2, 5 }, { 3, 4, 9 }, { 1, 3, 2 },
                                         { 10, 1, 1 }, { 0, 2, 4 }, { 1, 1, 16 } };
    (void)argument;
    for (int kind = 0; kind <= XD_CROSSING_ALL_TO_ALL; kind++)
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
            for (int dim = 0; dim < 3; dim++) {
                xd_crossing_desc d;
                memset(&d, 0, sizeof d);
                d.kind = (xd_crossing_kind)kind;
                d.dtype = dtypes[(i + (size_t)dim) % 3];
                d.ndim = 3;
                memcpy(d.shape, shapes[i], sizeof shapes[i]);
                d.dim = dim;
                d.other_dim = (dim + 1 + (int)i % 2) % 3;
                check_crossing(world, &d);
            }
    return XD_OK;
}

static void run(int ranks, xd_rank_function function, void *argument) {
    xd_error error;
    memset(&error, 0, sizeof error);
    const xd_result result = xd_run_threads(ranks, NULL, function, argument, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    CHECK_EQ_INT(result, XD_OK);
}

XD_TEST(every_kind_along_every_dimension_forward_and_backward_on_one_to_eight_ranks) {
    for (int ranks = 1; ranks <= RANKS; ranks++) run(ranks, every_kind, NULL);
}

/* ---- a network of two matrix products, columns first, then rows ---- */

enum { TOKENS = 5, WIDTH = 4, HIDDEN = 8, LEAVES = 8 };

typedef struct block_pass {
    float y[TOKENS * WIDTH], d_x[TOKENS * WIDTH];
} block_pass;

/* y = tanh(x A) B with A [WIDTH, HIDDEN] cut in columns and B in rows: COPY before A, REDUCE after B. A leaf is a column of A with
 * its row of B, so the bits are those of one rank. */
static xd_result two_products(xd_comm *world, void *argument) {
    block_pass *p = (block_pass *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_interval own = xd_chunk(HIDDEN, xd_comm_size(world), xd_comm_rank(world));
    xd_crossing_desc d;
    xd_crossing *enter = NULL, *leave = NULL;
    xd_leaf_stack *stack = NULL;
    float x[TOKENS * WIDTH], h[HIDDEN][TOKENS], leaf[TOKENS * WIDTH], y[TOKENS * WIDTH], d_x[TOKENS * WIDTH];
    memset(&d, 0, sizeof d);
    d.dtype = XD_DTYPE_F32;
    d.ndim = 2;
    d.shape[0] = TOKENS;
    d.shape[1] = WIDTH;
    d.leaves.first = own.begin;
    d.leaves.count = own.end - own.begin;
    d.leaves.total = HIDDEN;
    XD_TRY(xd_crossing_create(world, &d, &enter));
    d.kind = XD_CROSSING_REDUCE;
    XD_TRY(xd_crossing_create(world, &d, &leave));
    XD_TRY(xd_leaf_stack_create(ctx, &(xd_leaf_stack_desc){ .leaves = d.leaves, .elements = TOKENS * WIDTH },
                                &stack));
    for (int i = 0; i < TOKENS * WIDTH; i++) d_x[i] = sinf((float)i);
    XD_TRY(xd_crossing_forward(enter, d_x, x));
    for (int64_t c = own.begin; c < own.end; c++) {
        for (int t = 0; t < TOKENS; t++) {
            float sum = 0;
            for (int i = 0; i < WIDTH; i++) sum += x[t * WIDTH + i] * cosf((float)(i * HIDDEN + c));
            h[c][t] = tanhf(sum);
            for (int o = 0; o < WIDTH; o++) leaf[t * WIDTH + o] = h[c][t] * sinf((float)(c * WIDTH + o) / 3);
        }
        XD_TRY(xd_leaf_stack_push(stack, leaf));
    }
    XD_TRY(xd_crossing_forward(leave, xd_leaf_stack_forest(stack), y));
    XD_TRY(
        xd_crossing_backward(leave, y, leaf)); /* the gradient of |y|^2 / 2 is y, and REDUCE passes it on */
    memcpy(y, leaf, sizeof y);
    xd_leaf_stack_reset(stack);
    for (int64_t c = own.begin; c < own.end; c++) {
        for (int t = 0; t < TOKENS; t++) {
            float sum = 0;
            for (int o = 0; o < WIDTH; o++) sum += y[t * WIDTH + o] * sinf((float)(c * WIDTH + o) / 3);
            sum *= 1 - h[c][t] * h[c][t];
            for (int i = 0; i < WIDTH; i++) leaf[t * WIDTH + i] = sum * cosf((float)(i * HIDDEN + c));
        }
        XD_TRY(xd_leaf_stack_push(stack, leaf));
    }
    XD_TRY(xd_crossing_backward(enter, xd_leaf_stack_forest(stack), d_x));
    if (xd_comm_rank(world) == xd_comm_size(world) - 1) {
        memcpy(p->y, y, sizeof y);
        memcpy(p->d_x, d_x, sizeof d_x);
    }
    xd_leaf_stack_destroy(stack);
    xd_crossing_destroy(leave);
    xd_crossing_destroy(enter);
    return XD_OK;
}

XD_TEST(a_tensor_parallel_block_has_the_bits_of_one_rank_with_leaves_in_invariant_mode) {
    xd_ctx_desc invariant;
    block_pass one, many;
    memset(&invariant, 0, sizeof invariant);
    invariant.reduction = XD_REDUCTION_INVARIANT;
    CHECK_EQ_INT(xd_run_threads(1, &invariant, two_products, &one, NULL), XD_OK);
    CHECK(fabsf(one.y[0]) > 1e-3f && fabsf(one.d_x[3]) > 1e-3f);
    for (int ranks = 2; ranks <= RANKS; ranks++) {
        memset(&many, 0, sizeof many);
        CHECK_EQ_INT(xd_run_threads(ranks, &invariant, two_products, &many, NULL), XD_OK);
        CHECK(memcmp(&one, &many, sizeof one) == 0);
    }
}

/* Sums of leaves that end in parts: a forest is packed node by node. */
static xd_result scattered_leaves(xd_comm *world, void *argument) {
    const int n = xd_comm_size(world), me = xd_comm_rank(world);
    (void)argument;
    for (int dim = 0; dim < 2; dim++) {
        const xd_interval own = xd_chunk(LEAVES, n, me);
        xd_crossing_desc d;
        xd_crossing *c = NULL;
        xd_leaf_stack *stack = NULL;
        xd_planned bytes;
        float leaf[21], out[21];
        memset(&d, 0, sizeof d);
        d.kind = XD_CROSSING_REDUCE_SCATTER;
        d.dtype = XD_DTYPE_F32;
        d.ndim = 2;
        d.shape[0] = 7;
        d.shape[1] = 3;
        d.dim = dim;
        d.leaves.first = own.begin;
        d.leaves.count = own.end - own.begin;
        d.leaves.total = LEAVES;
        XD_TRY(xd_crossing_create(world, &d, &c));
        xd_crossing *none = NULL;
        XD_TRY(PLANNED(xd_comm_ctx(world), xd_crossing_create(world, &d, &none), &bytes));
        XD_TRY(xd_leaf_stack_create(xd_comm_ctx(world),
                                    &(xd_leaf_stack_desc){ .leaves = d.leaves, .elements = 21 }, &stack));
        for (int64_t k = own.begin; k < own.end; k++) {
            for (int i = 0; i < 21; i++) leaf[i] = (float)(k * 100 + i);
            XD_TRY(xd_leaf_stack_push(stack, leaf));
        }
        const uint64_t start = xd_comm_traffic(world).bytes_sent;
        const int64_t count = part_numel(&d, dim, n, me);
        XD_TRY(xd_crossing_forward(c, xd_leaf_stack_forest(stack), count ? out : NULL));
        CHECK_EQ_INT(xd_comm_traffic(world).bytes_sent - start, bytes.forward_sent);
        for (int64_t k = 0; k < count; k++)
            CHECK(out[k] == (float)(2800 + 8 * whole_place(&d, dim, n, me, k)));
        xd_leaf_stack_destroy(stack);
        xd_crossing_destroy(c);
    }
    return XD_OK;
}

XD_TEST(forests_are_reduced_and_scattered_along_any_dimension) {
    for (int ranks = 1; ranks <= RANKS; ranks++) run(ranks, scattered_leaves, NULL);
}

/* ---- memory ---- */

static xd_result weigh(xd_comm *world, void *argument) {
    (void)argument;
    for (int kind = 0; kind <= XD_CROSSING_ALL_TO_ALL; kind++) {
        xd_crossing_desc d;
        xd_crossing *c = NULL;
        xd_planned bytes;
        memset(&d, 0, sizeof d);
        d.kind = (xd_crossing_kind)kind;
        d.dtype = XD_DTYPE_BF16;
        d.ndim = 2;
        d.shape[0] = 9;
        d.shape[1] = 11;
        d.dim = 1;
        const long long before = live_bytes;
        XD_TRY(xd_crossing_create(world, &d, &c));
        xd_crossing *none = NULL;
        XD_TRY(PLANNED(xd_comm_ctx(world), xd_crossing_create(world, &d, &none), &bytes));
        CHECK_EQ_INT(live_bytes - before, bytes.memory.host + bytes.memory.device);
        const long long warm = live_bytes;
        for (int i = 0; i < 2; i++) {
            check_direction(c, &d, world, false, false);
            check_direction(c, &d, world, true, false);
        }
        CHECK_EQ_INT(live_bytes, warm);
        xd_crossing_destroy(c);
        CHECK_EQ_INT(live_bytes, before);
    }
    return XD_OK;
}

XD_TEST(memory_is_what_bytes_says_and_calls_take_none) {
    xd_ctx_desc counting;
    memset(&counting, 0, sizeof counting);
    counting.allocator.allocate = count_allocate;
    counting.allocator.release = count_release;
    CHECK_EQ_INT(xd_run_threads(4, &counting, weigh, NULL, NULL), XD_OK);
}

/* ---- refusals ---- */

typedef struct refusal {
    xd_crossing_desc desc;
    xd_result result;
    const char *text;
} refusal;

static const refusal refusals[] = {
    { { .kind = (xd_crossing_kind)7, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } },
      XD_ERROR_ARGUMENT,
      "crossing 7 does not exist" },
    { { .dtype = (xd_dtype)99, .ndim = 1, .shape = { 4 } }, XD_ERROR_DTYPE, "dtype 99 does not exist" },
    { { .dtype = XD_DTYPE_F32, .ndim = 9 }, XD_ERROR_ARGUMENT, "a crossing of 9 dimensions, from 0 to 8" },
    { { .dtype = XD_DTYPE_F32, .ndim = -1 }, XD_ERROR_ARGUMENT, "a crossing of -1 dimensions, from 0 to 8" },
    { { .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 4, -2 } },
      XD_ERROR_SHAPE,
      "dimension 1 of a crossing has extent -2" },
    { { .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { (int64_t)1 << 40, (int64_t)1 << 40 } },
      XD_ERROR_SHAPE,
      "more than 2^56 elements" },
    { { .kind = XD_CROSSING_SCATTER, .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 4, 4 }, .dim = 2 },
      XD_ERROR_ARGUMENT,
      "a crossing along dimension 2 of 2" },
    { { .kind = XD_CROSSING_SCATTER, .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 4, 4 }, .dim = -3 },
      XD_ERROR_ARGUMENT,
      "a crossing along dimension -3 of 2" },
    { { .kind = XD_CROSSING_GATHER, .dtype = XD_DTYPE_F32 },
      XD_ERROR_ARGUMENT,
      "a crossing along dimension 0 of 0" },
    { { .kind = XD_CROSSING_ALL_TO_ALL,
        .dtype = XD_DTYPE_F32,
        .ndim = 2,
        .shape = { 4, 4 },
        .dim = 1,
        .other_dim = -1 },
      XD_ERROR_ARGUMENT,
      "a crossing from dimension 1 to -1, of 2" },
    { { .kind = XD_CROSSING_ALL_TO_ALL,
        .dtype = XD_DTYPE_F32,
        .ndim = 2,
        .shape = { 4, 4 },
        .dim = 1,
        .other_dim = 5 },
      XD_ERROR_ARGUMENT,
      "a crossing from dimension 1 to 5, of 2" },
    { { .kind = XD_CROSSING_COPY, .dtype = XD_DTYPE_BOOL, .ndim = 1, .shape = { 4 } },
      XD_ERROR_DTYPE,
      "has no sums" },
    { { .kind = XD_CROSSING_REDUCE, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 }, .leaves = { 3, 2, 4 } },
      XD_ERROR_ARGUMENT,
      "leaves [3, +2) lie outside [0, 4)" },
    { { .kind = XD_CROSSING_REDUCE,
        .dtype = XD_DTYPE_BF16,
        .ndim = 1,
        .shape = { 4 },
        .leaves = { 0, 1, 3 } },
      XD_ERROR_DTYPE,
      "3 leaves of" },
    { { .kind = XD_CROSSING_GATHER, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 }, .leaves = { 0, 1, 3 } },
      XD_ERROR_ARGUMENT,
      "a crossing of kind 3 adds nothing, and has 3 leaves" },
};

static xd_result refuse(xd_comm *world, void *argument) {
    const refusal *r = (const refusal *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_crossing *c = NULL;
    xd_planned bytes;
    CHECK_EQ_INT(xd_crossing_create(world, &r->desc, &c), r->result);
    CHECK(strstr(xd_last_error(ctx)->message, r->text) != NULL);
    if (!strstr(xd_last_error(ctx)->message, r->text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK(!c);
    CHECK_EQ_INT(PLANNED_FOR(ctx, 1, 3, xd_crossing_create(world, &r->desc, &c), &bytes), r->result);
    return XD_OK;
}

XD_TEST(wrong_settings_are_refused_with_their_numbers_on_every_rank) {
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        refusal r = refusals[i];
        run(3, refuse, &r);
    }
}

static xd_result differ(xd_comm *world, void *argument) {
    static const char *const texts[5] = { "crossing: rank 2 passed kind = 4, rank 0 passed 3",
                                          "crossing: rank 2 passed dim = 1, rank 0 passed 0",
                                          "crossing: rank 2 passed shape[1] = 5, rank 0 passed 6",
                                          "crossing: rank 2 passed dtype = F16, rank 0 passed F32",
                                          "a crossing along dimension 4 of 2" };
    const int what = *(const int *)argument;
    const bool last = xd_comm_rank(world) == 2;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_crossing_desc d;
    xd_crossing *c = NULL;
    memset(&d, 0, sizeof d);
    d.kind = XD_CROSSING_GATHER;
    d.dtype = XD_DTYPE_F32;
    d.ndim = 2;
    d.shape[0] = d.shape[1] = 6;
    if (last && what == 0) d.kind = XD_CROSSING_ALL_GATHER;
    if (last && what == 1) d.dim = 1;
    if (last && what == 2) d.shape[1] = 5;
    if (last && what == 3) d.dtype = XD_DTYPE_F16;
    if (last && what == 4) d.dim = 4;
    const xd_result wanted = what < 4 ? XD_ERROR_MISMATCH : last ? XD_ERROR_ARGUMENT : XD_ERROR_PEER;
    CHECK_EQ_INT(xd_crossing_create(world, &d, &c), wanted);
    CHECK(strstr(xd_last_error(ctx)->message, texts[what]) != NULL);
    CHECK(!c);
    return xd_barrier(world);
}

XD_TEST(ranks_that_plan_differently_all_hear_of_it) {
    for (int what = 0; what < 5; what++) run(3, differ, &what);
}

static xd_result run_wrong(xd_comm *world, void *argument) {
    const bool second = xd_comm_rank(world) == 1;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_crossing_desc d;
    xd_crossing *c = NULL;
    float in[9], out[9];
    (void)argument;
    memset(in, 0, sizeof in);
    for (int i = 0; i < 9; i++) out[i] = 4.5f;
    memset(&d, 0, sizeof d);
    d.kind = XD_CROSSING_ALL_GATHER;
    d.dtype = XD_DTYPE_F32;
    d.ndim = 2;
    d.shape[0] = d.shape[1] = 3;
    d.dim = 1;
    XD_TRY(xd_crossing_create(world, &d, &c));
    CHECK_EQ_INT(xd_crossing_forward(c, second ? NULL : in, out), second ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "crossing: the input of 3 elements is NULL") != NULL);
    CHECK_EQ_INT(xd_crossing_backward(c, out, second ? NULL : in),
                 second ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "crossing: the output of 3 elements is NULL") != NULL);
    for (int i = 0; i < 9; i++) CHECK(out[i] == 4.5f);
    CHECK_EQ_INT(xd_crossing_forward(c, in, out), XD_OK);
    xd_crossing_destroy(c);
    xd_crossing_destroy(NULL);
    CHECK_EQ_INT(xd_plan_begin(ctx, &(xd_plan_desc){ .ranks = 3, .rank = -1 }), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rank -1 of 3") != NULL);
    return XD_OK;
}

XD_TEST(missing_arrays_reach_every_rank_and_the_group_goes_on) {
    run(3, run_wrong, NULL);
}

static xd_result without_leaves(xd_comm *world, void *argument) {
    xd_crossing_desc d;
    xd_crossing *c = NULL;
    (void)argument;
    memset(&d, 0, sizeof d);
    d.kind = XD_CROSSING_REDUCE;
    d.dtype = XD_DTYPE_F32;
    d.ndim = 1;
    d.shape[0] = 4;
    CHECK_EQ_INT(xd_crossing_create(world, &d, &c), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "needs leaves in INVARIANT mode") != NULL);
    d.kind = XD_CROSSING_GATHER;
    XD_TRY(xd_crossing_create(world, &d, &c));
    xd_crossing_destroy(c);
    return XD_OK;
}

XD_TEST(invariant_mode_needs_leaves_where_something_is_added) {
    xd_ctx_desc invariant;
    memset(&invariant, 0, sizeof invariant);
    invariant.reduction = XD_REDUCTION_INVARIANT;
    CHECK_EQ_INT(xd_run_threads(2, &invariant, without_leaves, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
