/* Collectives on threads and on a group of one, against plain loops. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <pthread.h>
#include <stdlib.h>

static const int rank_counts[] = { 1, 2, 3, 5, 8 };
enum { RANK_COUNTS = 5, MAX_RANKS = 8 };

typedef struct job {
    int64_t count;
    xd_dtype dtype;
    xd_reduce_op op;
    int flag;
} job;

static void run(int ranks, xd_reduction mode, xd_rank_function function, void *argument) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 20 };
    xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
    CHECK_EQ_INT(xd_run_threads(ranks, &desc, function, argument, &error), XD_OK);
    CHECK_EQ_STR(error.message, "");
}

/* Small whole numbers of both signs: exact in every dtype, so that loops in double give the right bits. */
static double value(int rank, int64_t i) {
    return (double)((rank * 7 + i * 3) % 11);
}

static void fill(void *data, xd_dtype dtype, int64_t count, int rank) {
    for (int64_t i = 0; i < count; i++) xd_store_f64(data, dtype, i, value(rank, i));
}

static double expected(int ranks, int64_t i, xd_reduce_op op) {
    double v = value(0, i);
    for (int r = 1; r < ranks; r++) {
        const double x = value(r, i);
        if (op == XD_MAX)
            v = x > v ? x : v;
        else if (op == XD_MIN)
            v = x < v ? x : v;
        else
            v += x;
    }
    return v;
}

/* One rounding of v/n to the dtype, the way one multiplication by 1/n in the accumulation type gives it. */
static void store_expected(void *data, xd_dtype dtype, int64_t i, double v, xd_reduce_op op, int ranks) {
    if (op == XD_AVG && dtype != XD_DTYPE_F64)
        v = (double)((float)v * (1.0f / (float)ranks));
    else if (op == XD_AVG)
        v = v * (1.0 / ranks);
    xd_store_f64(data, dtype, i, v);
}

static xd_result reduce_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    const size_t bytes = (size_t)(j->count + 1) * 8;
    void *send = calloc(1, bytes), *recv = calloc(1, bytes), *want = calloc(1, bytes);
    int64_t counts[MAX_RANKS], begin = 0;
    fill(send, j->dtype, j->count, rank);
    for (int64_t i = 0; i < j->count; i++) store_expected(want, j->dtype, i, expected(n, i, j->op), j->op, n);
    const size_t size = xd_dtype_size(j->dtype);
    CHECK(xd_all_reduce(world, send, recv, j->count, j->dtype, j->op) == XD_OK);
    CHECK(memcmp(recv, want, (size_t)j->count * size) == 0);
    for (int r = 0; r < n; r++) counts[r] = r == 0 ? 0 : j->count / n;   /* uneven: the first gets nothing, */
    counts[n - 1] = j->count - (n - 1 > 0 ? j->count / n * (n - 2) : 0); /* the last what is left */
    for (int r = 0; r < rank; r++) begin += counts[r];
    memset(recv, 0, bytes);
    CHECK(xd_reduce_scatter(world, send, recv, counts, j->dtype, j->op) == XD_OK);
    CHECK(memcmp(recv, (char *)want + (size_t)begin * size, (size_t)counts[rank] * size) == 0);
    memcpy(recv, send, bytes);
    CHECK(xd_reduce_scatter(world, recv, (char *)recv + (size_t)begin * size, counts, j->dtype, j->op) ==
          XD_OK);
    CHECK(memcmp((char *)recv + (size_t)begin * size, (char *)want + (size_t)begin * size,
                 (size_t)counts[rank] * size) == 0);
    CHECK(xd_all_reduce(world, send, send, j->count, j->dtype, j->op) == XD_OK);
    CHECK(memcmp(send, want, (size_t)j->count * size) == 0);
    free(want);
    free(recv);
    free(send);
    return XD_OK;
}

XD_TEST(reductions_equal_a_plain_loop_for_every_dtype_operation_and_size) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                       XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };
    static const int64_t counts[] = { 0, 1, 7, 600, 5003 };
    for (int r = 0; r < RANK_COUNTS; r++)
        for (int d = 0; d < 7; d++)
            for (int op = 0; op < (d < 4 ? 4 : 3); op++)
                for (int c = 0; c < 5; c++) {
                    job j = { counts[c], dtypes[d], (xd_reduce_op)op, 0 };
                    run(rank_counts[r], c % 2 ? XD_REDUCTION_FAST : XD_REDUCTION_DETERMINISTIC, reduce_rank,
                        &j);
                }
}

/* Every rank sends rank * 100 + i; counts[r] = (r % 3) * scale, so some are zero. */
static xd_result move_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    int64_t counts[MAX_RANKS], send_counts[MAX_RANKS], recv_counts[MAX_RANKS], total = 0;
    for (int r = 0; r < n; r++) total += counts[r] = (r % 3) * j->count;
    int32_t *mine = (int32_t *)calloc((size_t)(total + 1), 4),
            *all = (int32_t *)calloc((size_t)(total + 1), 4);
    for (int64_t i = 0; i < counts[rank]; i++) mine[i] = (int32_t)(rank * 100 + i);
    CHECK(xd_all_gather(world, mine, all, counts, XD_DTYPE_I32) == XD_OK);
    int64_t at = 0;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < counts[r]; i++) CHECK(all[at++] == (int32_t)(r * 100 + i));
    const int root = n - 1;
    memset(all, 0, (size_t)total * 4);
    CHECK(xd_gather(world, mine, all, counts, XD_DTYPE_I32, root) == XD_OK);
    at = 0;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < counts[r]; i++)
            CHECK(all[at++] == (rank == root ? (int32_t)(r * 100 + i) : 0));
    memset(mine, 0, (size_t)total * 4);
    CHECK(xd_scatter(world, all, mine, counts, XD_DTYPE_I32, root) == XD_OK);
    for (int64_t i = 0; i < counts[rank]; i++) CHECK(mine[i] == (int32_t)(rank * 100 + i));
    CHECK(xd_broadcast(world, all, total, XD_DTYPE_I32, root) == XD_OK);
    at = 0;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < counts[r]; i++) CHECK(all[at++] == (int32_t)(r * 100 + i));
    free(all);
    free(mine);
    int64_t out = 0, in = 0;
    for (int r = 0; r < n; r++) {
        out += send_counts[r] = ((rank + 2 * r) % 4) * j->count;
        in += recv_counts[r] = ((r + 2 * rank) % 4) * j->count;
    }
    int32_t *send = (int32_t *)calloc((size_t)(out + 1), 4), *recv = (int32_t *)calloc((size_t)(in + 1), 4);
    at = 0;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < send_counts[r]; i++) send[at++] = (int32_t)(rank * 10000 + r * 1000 + i);
    CHECK(xd_all_to_all(world, send, send_counts, recv, recv_counts, XD_DTYPE_I32) == XD_OK);
    at = 0;
    for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < recv_counts[r]; i++)
            CHECK(recv[at++] == (int32_t)(r * 10000 + rank * 1000 + i));
    free(recv);
    free(send);
    return xd_barrier(world);
}

XD_TEST(data_arrives_in_rank_order_with_uneven_and_zero_counts) {
    static const int64_t counts[] = { 0, 1, 13, 2000 };
    for (int r = 0; r < RANK_COUNTS; r++)
        for (int c = 0; c < 4; c++) {
            job j = { counts[c], XD_DTYPE_I32, XD_SUM, 0 };
            run(rank_counts[r], XD_REDUCTION_DETERMINISTIC, move_rank, &j);
        }
}

static xd_result ring_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    double *data = (double *)calloc((size_t)j->count + 1, sizeof(double));
    if (rank == 0) {
        for (int64_t i = 0; i < j->count; i++) data[i] = (double)i;
        CHECK(xd_send(world, data, j->count, XD_DTYPE_F64, 1) == XD_OK);
        CHECK(xd_recv(world, data, j->count, XD_DTYPE_F64, n - 1) == XD_OK);
        for (int64_t i = 0; i < j->count; i++) CHECK(data[i] == (double)(i + n - 1));
    } else {
        CHECK(xd_recv(world, data, j->count, XD_DTYPE_F64, rank - 1) == XD_OK);
        for (int64_t i = 0; i < j->count; i++) data[i] += 1;
        CHECK(xd_send(world, data, j->count, XD_DTYPE_F64, (rank + 1) % n) == XD_OK);
    }
    free(data);
    return XD_OK;
}

XD_TEST(a_message_goes_round_a_ring) {
    job j = { 3001, XD_DTYPE_F64, XD_SUM, 0 };
    for (int n = 2; n <= 8; n += 3) run(n, XD_REDUCTION_DETERMINISTIC, ring_rank, &j);
}

static xd_result pair_mismatch_rank(xd_comm *world, void *argument) {
    (void)argument;
    int32_t data[8] = { 0 };
    if (xd_comm_rank(world) == 0)
        CHECK(xd_send(world, data, 5, XD_DTYPE_I32, 1) == XD_ERROR_MISMATCH);
    else
        CHECK(xd_recv(world, data, 8, XD_DTYPE_I32, 0) == XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "count 5") != NULL);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "count 8") != NULL);
    return xd_barrier(world); /* the group goes on */
}

static xd_result levels_rank(xd_comm *world, void *argument) {
    const bool odd = xd_comm_rank(world) == 1;
    (void)argument;
    xd_ctx_set_cpu(xd_comm_ctx(world), odd ? XD_CPU_PORTABLE : XD_CPU_PLAIN);
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "portable") != NULL);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "plain") != NULL);
    xd_ctx_set_cpu(xd_comm_ctx(world), XD_CPU_PLAIN);
    return xd_barrier(world); /* the group goes on */
}

XD_TEST(ranks_on_different_cpu_levels_are_named) {
    run(3, XD_REDUCTION_DETERMINISTIC, levels_rank, NULL);
}

XD_TEST(send_and_receive_of_different_counts_fail_on_both_ranks_with_both_numbers) {
    run(2, XD_REDUCTION_DETERMINISTIC, pair_mismatch_rank, NULL);
}

static xd_result split_rank(xd_comm *world, void *argument) {
    (void)argument;
    const int rank = xd_comm_rank(world), n = xd_comm_size(world);
    for (int round = 0; round < 3; round++) {
        xd_comm *row = NULL, *pair = NULL, *none = NULL;
        int32_t one = rank, sum = 0, want = 0;
        CHECK(xd_comm_split(world, rank % 2, -rank, &row) == XD_OK); /* keys turn the order round */
        CHECK_EQ_INT(xd_comm_size(row), (n + 1 - rank % 2) / 2);
        for (int r = 0; r + 1 < xd_comm_size(row); r++)
            CHECK(xd_comm_world_rank(row, r) > xd_comm_world_rank(row, r + 1));
        CHECK_EQ_INT(xd_comm_world_rank(row, xd_comm_rank(row)), rank);
        CHECK(xd_all_reduce(row, &one, &sum, 1, XD_DTYPE_I32, XD_SUM) == XD_OK);
        for (int r = rank % 2; r < n; r += 2) want += r;
        CHECK_EQ_INT(sum, want);
        CHECK(xd_comm_split(row, xd_comm_rank(row) / 2, 0, &pair) == XD_OK);
        CHECK(xd_barrier(pair) == XD_OK);
        CHECK(xd_comm_split(world, rank == 0 ? 0 : -1, 0, &none) == XD_OK);
        CHECK((none != NULL) == (rank == 0));
        xd_comm_destroy(none);
        xd_comm_destroy(pair);
        xd_comm_destroy(row);
    }
    return xd_barrier(world);
}

XD_TEST(groups_split_by_color_and_key_and_split_again) {
    for (int r = 1; r < RANK_COUNTS; r++) run(rank_counts[r], XD_REDUCTION_DETERMINISTIC, split_rank, NULL);
}

static xd_result counters_rank(xd_comm *world, void *argument) {
    (void)argument;
    const uint64_t n = (uint64_t)xd_comm_size(world), rank = (uint64_t)xd_comm_rank(world);
    static const int64_t counts[3] = { 10, 20, 5 };
    float a[64] = { 0 }, b[64] = { 0 };
    xd_comm_counters before = xd_comm_traffic(world), after;
    CHECK(xd_reduce_scatter(world, a, b, counts, XD_DTYPE_F32, XD_SUM) == XD_OK);
    after = xd_comm_traffic(world);
    CHECK_EQ_INT(after.bytes_sent - before.bytes_sent, 4u * (35u - (uint64_t)counts[rank]));
    CHECK_EQ_INT(after.bytes_received - before.bytes_received, 4u * (uint64_t)counts[rank] * (n - 1));
    before = after;
    CHECK(xd_all_gather(world, a, b, counts, XD_DTYPE_F32) == XD_OK);
    after = xd_comm_traffic(world);
    CHECK_EQ_INT(after.bytes_sent - before.bytes_sent, 4u * (uint64_t)counts[rank] * (n - 1));
    CHECK_EQ_INT(after.bytes_received - before.bytes_received, 4u * (35u - (uint64_t)counts[rank]));
    before = after;
    CHECK(xd_all_reduce(world, a, b, 30, XD_DTYPE_F32, XD_SUM) == XD_OK);
    after = xd_comm_traffic(world);
    CHECK_EQ_INT(after.bytes_sent - before.bytes_sent, 4u * (20 + 10 * (n - 1)));
    CHECK_EQ_INT(after.bytes_received - before.bytes_received, 4u * (20 + 10 * (n - 1)));
    before = after;
    CHECK(xd_broadcast(world, a, 30, XD_DTYPE_F32, 1) == XD_OK);
    after = xd_comm_traffic(world);
    CHECK_EQ_INT(after.bytes_sent - before.bytes_sent, rank == 1 ? 120u * (n - 1) : 0u);
    CHECK_EQ_INT(after.bytes_received - before.bytes_received, rank == 1 ? 0u : 120u);
    CHECK_EQ_INT(after.calls - before.calls, 1);
    return XD_OK;
}

XD_TEST(counters_give_the_bytes_that_pass_between_ranks) {
    run(3, XD_REDUCTION_DETERMINISTIC, counters_rank, NULL);
}

static xd_result order_rank(xd_comm *world, void *argument) {
    (void)argument;
    const int rank = xd_comm_rank(world);
    float x[2] = { rank == 0 ? 1.0f : rank == 1 ? 1e8f : -1e8f, rank == 1 ? NAN : 2.0f }, sum[2], top[2];
    CHECK(xd_all_reduce(world, x, sum, 2, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK(sum[0] == ((1.0f + 1e8f) + -1e8f)); /* rank order, in f32 */
    CHECK(xd_all_reduce(world, x, top, 2, XD_DTYPE_F32, XD_MAX) == XD_OK);
    CHECK(top[0] == 1e8f && isnan(top[1]));
    uint16_t h = xd_bf16_from_f32(rank == 0 ? 256.0f : 1.0f), total;
    CHECK(xd_all_reduce(world, &h, &total, 1, XD_DTYPE_BF16, XD_SUM) == XD_OK);
    CHECK(xd_f32_from_bf16(total) ==
          258.0f); /* one rounding at the end: 256 + 1 alone would stay 256 in bf16 */
    return XD_OK;
}

XD_TEST(sums_add_in_rank_order_and_round_once) {
    run(3, XD_REDUCTION_DETERMINISTIC, order_rank, NULL);
}

/* ---- INVARIANT ---- */

enum { LEAF = 3000 }; /* elements of a leaf: the long path */
static float invariant_want[LEAF];

static float leaf_value(int64_t leaf, int64_t i) {
    return sinf((float)(leaf * 131 + i)) * (float)(1 + leaf % 5 * 1000);
}

static void tree(int64_t lo, int64_t hi, float *out) {
    if (hi - lo == 1) {
        for (int64_t i = 0; i < LEAF; i++) out[i] = leaf_value(lo, i);
        return;
    }
    int64_t m = 1;
    while (m * 2 < hi - lo) m *= 2;
    float *right = (float *)malloc(LEAF * sizeof(float));
    tree(lo, lo + m, out);
    tree(lo + m, hi, right);
    for (int64_t i = 0; i < LEAF; i++) out[i] = out[i] + right[i];
    free(right);
}

static xd_result invariant_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument; /* count = leaves */
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    /* Uneven: rank 0 gets what a fair split leaves over. */
    const int64_t each = j->count / n, rest = j->count % n;
    const xd_leaves leaves = { rank ? rest + each * rank : 0, each + (rank ? 0 : rest), j->count };
    xd_leaf_stack *stack = NULL;
    float *leaf = (float *)malloc(LEAF * sizeof *leaf), *sum = (float *)malloc(LEAF * sizeof *sum);
    CHECK(xd_leaf_stack_create(xd_comm_ctx(world), leaves, LEAF, &stack) == XD_OK);
    for (int64_t l = 0; stack && l < leaves.count; l++) {
        for (int64_t i = 0; i < LEAF; i++) leaf[i] = leaf_value(leaves.first + l, i);
        CHECK(xd_leaf_stack_push(stack, leaf) == XD_OK);
    }
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(stack);
    c.recv = sum;
    c.count = LEAF;
    c.dtype = XD_DTYPE_F32;
    c.leaves = leaves;
    CHECK(xd_collective_run(world, &c) == XD_OK);
    CHECK(memcmp(sum, invariant_want, LEAF * sizeof *sum) == 0);
    int64_t counts[MAX_RANKS];
    for (int r = 0; r < n; r++) counts[r] = LEAF / n + (r < LEAF % n);
    int64_t begin = 0;
    for (int r = 0; r < rank; r++) begin += counts[r];
    c.kind = XD_COLLECTIVE_REDUCE_SCATTER;
    c.send_counts = counts;
    c.count = 0;
    CHECK(xd_collective_run(world, &c) == XD_OK);
    CHECK(memcmp(sum, invariant_want + begin, (size_t)counts[rank] * sizeof *sum) == 0);
    CHECK(xd_all_reduce(world, leaf, sum, 4, XD_DTYPE_F32, XD_SUM) == XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "leaves") != NULL);
    CHECK(xd_all_reduce(world, leaf, sum, 4, XD_DTYPE_F32, XD_MAX) == XD_OK);
    xd_leaf_stack_destroy(stack);
    free(sum);
    free(leaf);
    return XD_OK;
}

XD_TEST(invariant_sums_have_the_same_bits_for_any_number_of_ranks) {
    static const int64_t leaves[] = { 8, 13, 24 };
    for (int l = 0; l < 3; l++) {
        tree(0, leaves[l], invariant_want);
        for (int r = 0; r < RANK_COUNTS; r++) {
            job j = { leaves[l], XD_DTYPE_F32, XD_SUM, 0 };
            run(rank_counts[r], XD_REDUCTION_INVARIANT, invariant_rank, &j);
        }
    }
}

XD_TEST(a_forest_is_cut_into_aligned_powers_of_two) {
    CHECK_EQ_INT(xd_leaves_nodes(0, 8), 1);
    CHECK_EQ_INT(xd_leaves_nodes(3, 6), 3); /* 3 | 4-7 | 8 */
    CHECK_EQ_INT(xd_leaves_nodes(5, 0), 0);
    CHECK_EQ_INT(xd_leaves_node_size(4, 7), 2);
    CHECK_EQ_INT(xd_leaves_node_size(0, 7), 4);
}

/* ---- threads of the caller's own ---- */

typedef struct guest {
    xd_thread_world *world;
    int rank, sum;
} guest;

static void *visit(void *argument) {
    guest *g = (guest *)argument;
    const xd_ctx_desc desc = { .init_timeout_seconds = 20, .timeout_seconds = 20 };
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    const int one = g->rank + 1;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_thread_world_join(g->world, ctx, g->rank, &comm), XD_OK);
    if (comm) {
        CHECK(xd_comm_size(comm) == 4 && xd_comm_rank(comm) == g->rank);
        CHECK(xd_all_reduce(comm, &one, &g->sum, 1, XD_DTYPE_I32, XD_SUM) == XD_OK);
    }
    xd_comm_destroy(comm);
    xd_ctx_destroy(ctx);
    return NULL;
}

XD_TEST(threads_that_the_caller_started_join_a_world) {
    xd_ctx *ctx = NULL;
    xd_thread_world *world = NULL;
    pthread_t threads[4];
    guest guests[4];
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_thread_world_create(ctx, 4, &world) == XD_OK);
    for (int r = 0; r < 4; r++) {
        guests[r] = (guest){ world, r, 0 };
        CHECK(pthread_create(&threads[r], NULL, visit, &guests[r]) == 0);
    }
    for (int r = 0; r < 4; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < 4; r++) CHECK_EQ_INT(guests[r].sum, 10);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
}

/* ---- a group of one ---- */

XD_TEST(a_group_of_one_copies) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL, *again = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_comm_self(ctx, &self) == XD_OK);
    float a[3] = { 1, 2, 3 }, b[3] = { 0 };
    const int64_t counts[1] = { 3 };
    CHECK(xd_all_reduce(self, a, b, 3, XD_DTYPE_F32, XD_AVG) == XD_OK && b[2] == 3);
    memset(b, 0, sizeof b);
    CHECK(xd_all_to_all(self, a, counts, b, counts, XD_DTYPE_F32) == XD_OK && b[1] == 2);
    memset(b, 0, sizeof b);
    CHECK(xd_gather(self, a, b, counts, XD_DTYPE_F32, 0) == XD_OK && b[0] == 1);
    CHECK(xd_broadcast(self, a, 3, XD_DTYPE_F32, 0) == XD_OK);
    CHECK(xd_barrier(self) == XD_OK && xd_agree(self, XD_OK) == XD_OK);
    CHECK(xd_agree(self, XD_ERROR_IO) == XD_ERROR_IO);
    CHECK(xd_send(self, a, 1, XD_DTYPE_F32, 0) == XD_ERROR_ARGUMENT);
    CHECK(xd_all_reduce(self, a, a + 1, 2, XD_DTYPE_F32, XD_SUM) == XD_ERROR_ARGUMENT); /* overlap */
    CHECK(xd_all_reduce(self, a, b, 2, XD_DTYPE_I8, XD_SUM) == XD_ERROR_DTYPE);
    CHECK(xd_all_reduce(self, a, b, 2, XD_DTYPE_I32, XD_AVG) == XD_ERROR_DTYPE);
    CHECK(xd_comm_split(self, 0, 0, &again) == XD_OK);
    xd_comm_destroy(again);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
