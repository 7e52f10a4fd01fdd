/* The conformance suite of transports: what collectives do, whatever transport they use. Each case is a function that every
 * rank runs; a program supplies the worlds and makes a test of each case, so that all transports have tests of the same names:
 *
 *     #define CASE(name) XD_TEST(name) { run_in_every_world(suite_##name); }
 *     COMM_SUITE(CASE)
 *
 * Every expected element comes from a plain loop here, never from another transport. A case runs in any reduction mode and
 * in a world of any size up to SUITE_RANKS; it leaves the world as it found it. C99 and C++. */
#ifndef COMM_SUITE_H
#define COMM_SUITE_H

#include "xd_test.h"
#include "xdistill.h"

#include <stdlib.h>

/* The last kind of call that one rank gets wrong. */
#if !defined(SUITE_LAST_KIND)
#    define SUITE_LAST_KIND XD_COLLECTIVE_SPLIT
#endif

enum { SUITE_RANKS = 16, SUITE_POISON = 0xA5 };

/* Cases that move data; and cases in which ranks pass different arguments, for calls whose arguments the ranks compare. */
#define COMM_SUITE_DATA(CASE)                                              \
    CASE(reductions_equal_a_plain_loop_for_every_dtype_operation_and_size) \
    CASE(sums_add_in_rank_order_and_round_once)                            \
    CASE(sums_over_leaves_follow_the_canonical_tree)                       \
    CASE(data_arrives_in_rank_order_with_uneven_and_zero_counts)           \
    CASE(a_message_goes_round_a_ring)                                      \
    CASE(groups_split_by_color_and_key_and_split_again)                    \
    CASE(counters_give_the_bytes_that_pass_between_ranks)
#define COMM_SUITE_COMPARED(CASE)                                  \
    CASE(pieces_may_have_gaps_between_them_on_one_rank_alone)      \
    CASE(what_one_rank_does_otherwise_is_found_before_data_moves)  \
    CASE(sums_that_have_no_meaning_are_refused_on_all_ranks)       \
    CASE(known_leaves_that_are_not_those_are_refused_on_all_ranks) \
    CASE(send_and_receive_that_do_not_fit_fail_on_both_ranks)      \
    CASE(agree_gives_every_rank_the_message_of_the_one_that_failed)
#define COMM_SUITE(CASE)  \
    COMM_SUITE_DATA(CASE) \
    COMM_SUITE_COMPARED(CASE)

/* ---- memory and elements ---- */

/* Where the memory of the calls is; host memory unless a program says otherwise. The sizes are counts of elements. */
typedef struct suite_settings {
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    void (*put)(void *to, const void *host, size_t bytes);
    void (*get)(xd_comm *comm, void *host, const void *from, size_t bytes);
    const int64_t *sizes;
    int size_count;
} suite_settings;

static inline void suite_put_host(void *to, const void *host, size_t bytes) {
    memcpy(to, host, bytes);
}

static inline void suite_get_host(xd_comm *comm, void *host, const void *from, size_t bytes) {
    (void)comm;
    memcpy(host, from, bytes);
}

static const int64_t suite_sizes[] = { 0, 1, 7, 600, 5003 };
static suite_settings suite = { malloc, free, suite_put_host, suite_get_host, suite_sizes, 5 };
static const xd_dtype suite_dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                         XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };

/* Memory that a call takes, and its contents on the host before and after the call. */
typedef struct suite_buffer {
    unsigned char *at, *host;
    size_t bytes;
} suite_buffer;

static inline void suite_put(suite_buffer *b) {
    suite.put(b->at, b->host, b->bytes);
}

static inline void suite_poison(suite_buffer *b) {
    memset(b->host, SUITE_POISON, b->bytes);
    suite_put(b);
}

static inline suite_buffer suite_open(int64_t count, xd_dtype dtype) {
    suite_buffer b;
    b.bytes = (size_t)(count + 1) * xd_dtype_size(dtype);
    b.at = (unsigned char *)suite.allocate(b.bytes);
    b.host = (unsigned char *)malloc(b.bytes);
    CHECK(b.at && b.host);
    suite_poison(&b);
    return b;
}

static inline void suite_get(xd_comm *comm, suite_buffer *b) {
    suite.get(comm, b->host, b->at, b->bytes);
}

static inline void suite_close(suite_buffer *b) {
    suite.release(b->at);
    free(b->host);
}

static inline xd_reduction suite_mode(const xd_comm *comm) {
    return xd_ctx_settings(xd_comm_ctx(comm))->reduction;
}

/* Element i of what a rank sends, after rounding to the dtype: numbers of both signs and many magnitudes that use all bits,
 * where another order of the additions gives other bits; for FAST sums whole numbers, where every order gives the same. */
static inline double suite_element(const xd_comm *comm, xd_dtype dtype, int rank, int64_t i) {
    double rounded;
    const bool fractions = xd_dtype_is_floating(dtype) && suite_mode(comm) != XD_REDUCTION_FAST;
    const double x = sin((double)(rank * 131 + i)) * (double)((1 + i % 7 * 50) * (1 + rank % 3 * 15));
    xd_store_f64(&rounded, dtype, 0, fractions ? x : (double)((rank * 7 + i * 3) % 11));
    return xd_load_f64(&rounded, dtype, 0);
}

static inline void suite_fill(const xd_comm *comm, suite_buffer *b, xd_dtype dtype, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        xd_store_f64(b->host, dtype, i, suite_element(comm, dtype, xd_comm_rank(comm), i));
    suite_put(b);
}

static inline bool suite_says(const xd_comm *comm, const char *text) {
    return strstr(xd_last_error(xd_comm_ctx(comm))->message, text) != NULL;
}

/* ---- reductions ---- */

/* In rank order, in f32 for f32 and narrower types, rounded once. */
static inline double suite_reduced(const xd_comm *comm, xd_dtype dtype, xd_reduce_op op, int64_t i) {
    const bool narrow = xd_dtype_is_floating(dtype) && dtype != XD_DTYPE_F64;
    const int n = xd_comm_size(comm);
    double sum = suite_element(comm, dtype, 0, i);
    for (int r = 1; r < n; r++) {
        const double x = suite_element(comm, dtype, r, i);
        if (op == XD_MAX || op == XD_MIN)
            sum = (op == XD_MAX) == (x > sum) ? x : sum;
        else
            sum = narrow ? (double)((float)sum + (float)x) : sum + x;
    }
    if (op != XD_AVG) return sum;
    return narrow ? (double)((float)sum * (1.0f / (float)n)) : sum * (1.0 / n);
}

/* Elements [begin, end) of the reduction are at `skip` in the buffer, and nothing after them was written. FAST averages agree
 * to rounding. */
static inline void suite_check_reduced(xd_comm *comm, suite_buffer *b, xd_dtype dtype, xd_reduce_op op,
                                       int64_t skip, int64_t begin, int64_t end) {
    const bool near = suite_mode(comm) == XD_REDUCTION_FAST && op == XD_AVG;
    const double part = dtype == XD_DTYPE_BF16 ? 0.01 : dtype == XD_DTYPE_F16 ? 0.002 : 1e-6;
    long wrong = 0;
    suite_get(comm, b);
    for (int64_t i = begin; i < end; i++) {
        double want = 0.0;
        xd_store_f64(&want, dtype, 0, suite_reduced(comm, dtype, op, i));
        want = xd_load_f64(&want, dtype, 0);
        const double got = xd_load_f64(b->host, dtype, skip + i - begin);
        wrong += !(near ? fabs(got - want) <= part * fabs(want) : got == want);
    }
    CHECK_EQ_INT(wrong, 0);
}

/* The first rank gets nothing, the last one the remainder. */
static inline int64_t suite_uneven(const xd_comm *comm, int64_t count, int64_t *counts) {
    const int n = xd_comm_size(comm);
    int64_t begin = 0;
    for (int r = 0; r < n; r++) counts[r] = r == 0 ? 0 : count / n;
    counts[n - 1] = count - (n > 1 ? count / n * (n - 2) : 0);
    for (int r = 0; r < xd_comm_rank(comm); r++) begin += counts[r];
    return begin;
}

/* Floating sums in INVARIANT mode are those over leaves; integers have no average. */
static inline bool suite_allows(const xd_comm *comm, xd_dtype dtype, xd_reduce_op op) {
    if (!xd_dtype_is_floating(dtype)) return op != XD_AVG;
    return suite_mode(comm) != XD_REDUCTION_INVARIANT || op == XD_MAX || op == XD_MIN;
}

static inline void suite_reduce(xd_comm *comm, xd_dtype dtype, xd_reduce_op op, int64_t count) {
    const size_t size = xd_dtype_size(dtype);
    int64_t counts[SUITE_RANKS];
    const int64_t begin = suite_uneven(comm, count, counts), own = counts[xd_comm_rank(comm)];
    if (!suite_allows(comm, dtype, op)) return;
    suite_buffer send = suite_open(count, dtype), recv = suite_open(count, dtype);
    suite_fill(comm, &send, dtype, count);
    CHECK_EQ_INT(xd_all_reduce(comm, send.at, recv.at, count, dtype, op), XD_OK);
    suite_check_reduced(comm, &recv, dtype, op, 0, 0, count);
    CHECK_EQ_INT(recv.host[(size_t)count * size], SUITE_POISON);
    suite_poison(&recv);
    CHECK_EQ_INT(xd_reduce_scatter(comm, send.at, recv.at, counts, dtype, op), XD_OK);
    suite_check_reduced(comm, &recv, dtype, op, 0, begin, begin + own);
    CHECK_EQ_INT(recv.host[(size_t)own * size], SUITE_POISON);
    suite_fill(comm, &recv, dtype, count); /* in place */
    CHECK_EQ_INT(xd_reduce_scatter(comm, recv.at, recv.at + (size_t)begin * size, counts, dtype, op), XD_OK);
    suite_check_reduced(comm, &recv, dtype, op, begin, begin, begin + own);
    CHECK_EQ_INT(xd_all_reduce(comm, send.at, send.at, count, dtype, op), XD_OK);
    suite_check_reduced(comm, &send, dtype, op, 0, 0, count);
    suite_close(&recv);
    suite_close(&send);
}

static inline xd_result suite_reductions_equal_a_plain_loop_for_every_dtype_operation_and_size(xd_comm *world,
                                                                                               void *unused) {
    (void)unused;
    for (int d = 0; d < 7; d++)
        for (int op = XD_SUM; op <= XD_AVG; op++)
            for (int s = 0; s < suite.size_count; s++)
                suite_reduce(world, suite_dtypes[d], (xd_reduce_op)op, suite.sizes[s]);
    return xd_barrier(world);
}

/* 1e8 + 1 - 1e8 in f32, 256 + 1 + 1 in bf16, and a NaN in a maximum. */
static inline xd_result suite_sums_add_in_rank_order_and_round_once(xd_comm *world, void *unused) {
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    const bool ordered = suite_mode(world) == XD_REDUCTION_DETERMINISTIC;
    const float large[3] = { 1e8f, 1.0f, -1e8f };
    suite_buffer x = suite_open(2, XD_DTYPE_F32), h = suite_open(1, XD_DTYPE_BF16);
    float sum = large[0];
    (void)unused;
    for (int r = 1; r < n; r++) sum = sum + (r < 3 ? large[r] : 0.0f);
    xd_store_f64(x.host, XD_DTYPE_F32, 0, rank < 3 ? (double)large[rank] : 0.0);
    suite_put(&x);
    if (ordered) {
        CHECK_EQ_INT(xd_all_reduce(world, x.at, x.at, 1, XD_DTYPE_F32, XD_SUM), XD_OK);
        suite_get(world, &x);
        CHECK(xd_load_f64(x.host, XD_DTYPE_F32, 0) == (double)sum);
        xd_store_f64(h.host, XD_DTYPE_BF16, 0, rank == 0 ? 256.0 : rank < 3 ? 1.0 : 0.0);
        suite_put(&h);
        CHECK_EQ_INT(xd_all_reduce(world, h.at, h.at, 1, XD_DTYPE_BF16, XD_SUM), XD_OK);
        suite_get(world, &h);
        CHECK(xd_load_f64(h.host, XD_DTYPE_BF16, 0) == (n < 3 ? 256.0 : 258.0)); /* 256 + 1 alone stays 256 */
    }
    xd_store_f64(x.host, XD_DTYPE_F32, 0, rank == n - 1 ? (double)NAN : 2.0);
    xd_store_f64(x.host, XD_DTYPE_F32, 1, (double)rank);
    suite_put(&x);
    CHECK_EQ_INT(xd_all_reduce(world, x.at, x.at, 2, XD_DTYPE_F32, XD_MAX), XD_OK);
    suite_get(world, &x);
    CHECK(isnan(xd_load_f64(x.host, XD_DTYPE_F32, 0)) &&
          xd_load_f64(x.host, XD_DTYPE_F32, 1) == (double)(n - 1));
    suite_close(&h);
    suite_close(&x);
    return xd_barrier(world);
}

/* ---- sums over leaves ---- */

/* Element i of a node of the canonical tree. */
static inline double suite_tree(xd_dtype dtype, int64_t lo, int64_t hi, int64_t i) {
    if (hi - lo == 1) return (double)(sinf((float)(lo * 131 + i)) * (float)(1 + lo % 5 * 1000));
    int64_t half = 1;
    while (half * 2 < hi - lo) half *= 2;
    const double a = suite_tree(dtype, lo, lo + half, i), b = suite_tree(dtype, lo + half, hi, i);
    return dtype == XD_DTYPE_F32 ? (double)((float)a + (float)b) : a + b;
}

/* Uneven numbers of leaves, none on some ranks: this rank's, and `known` receives those of all. */
static inline xd_leaves suite_leaves(const xd_comm *comm, xd_leaves known[SUITE_RANKS]) {
    int64_t total = 0;
    for (int r = 0; r < xd_comm_size(comm); total += known[r++].count) {
        known[r].first = total;
        known[r].count = r == 0 ? 5 : (3 * r + 2) % 4;
    }
    for (int r = 0; r < xd_comm_size(comm); r++) known[r].total = total;
    return known[xd_comm_rank(comm)];
}

static inline void suite_check_leaves(xd_comm *comm, suite_buffer *b, xd_dtype dtype, int64_t total,
                                      int64_t begin, int64_t count, bool average) {
    long wrong = 0;
    suite_get(comm, b);
    for (int64_t i = 0; i < count; i++) {
        double want = suite_tree(dtype, 0, total, begin + i);
        if (average)
            want = dtype == XD_DTYPE_F32 ? (double)((float)want * (1.0f / (float)total))
                                         : want * (1.0 / (double)total);
        wrong += xd_load_f64(b->host, dtype, i) != want;
    }
    CHECK_EQ_INT(wrong, 0);
}

static inline void suite_sum_leaves_as(xd_comm *comm, xd_dtype dtype, int64_t count, bool are_known) {
    xd_leaves known[SUITE_RANKS];
    const xd_leaves leaves = suite_leaves(comm, known);
    const int64_t nodes = xd_leaves_nodes(leaves.first, leaves.count), end = leaves.first + leaves.count;
    suite_buffer forest = suite_open(nodes * count + count, dtype), sum = suite_open(count, dtype);
    int64_t counts[SUITE_RANKS], at = 0;
    const int64_t begin = suite_uneven(comm, count, counts);
    for (int64_t lo = leaves.first; lo < end; lo += xd_leaves_node_size(lo, end))
        for (int64_t i = 0; i < count; i++)
            xd_store_f64(forest.host, dtype, at++,
                         suite_tree(dtype, lo, lo + xd_leaves_node_size(lo, end), i));
    suite_put(&forest);
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_REDUCE_SCATTER;
    c.send = forest.at;
    c.recv = sum.at;
    c.send_counts = counts;
    c.dtype = dtype;
    c.op = XD_AVG;
    c.leaves = leaves;
    c.known_leaves = are_known ? known : NULL;
    CHECK_EQ_INT(xd_collective_run(comm, &c), XD_OK);
    suite_check_leaves(comm, &sum, dtype, leaves.total, begin, counts[xd_comm_rank(comm)], true);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send_counts = NULL;
    c.count = count;
    c.op = XD_SUM;
    CHECK_EQ_INT(xd_collective_run(comm, &c), XD_OK);
    suite_check_leaves(comm, &sum, dtype, leaves.total, 0, count, false);
    c.recv = forest.at; /* in place */
    CHECK_EQ_INT(xd_collective_run(comm, &c), XD_OK);
    suite_check_leaves(comm, &forest, dtype, leaves.total, 0, count, false);
    suite_close(&sum);
    suite_close(&forest);
}

static inline void suite_sum_leaves(xd_comm *comm, xd_dtype dtype, int64_t count) {
    suite_sum_leaves_as(comm, dtype, count, false);
    suite_sum_leaves_as(comm, dtype, count, true);
}

static inline xd_result suite_sums_over_leaves_follow_the_canonical_tree(xd_comm *world, void *unused) {
    (void)unused;
    for (int s = 1; s < suite.size_count; s++) {
        suite_sum_leaves(world, XD_DTYPE_F32, suite.sizes[s]);
        suite_sum_leaves(world, XD_DTYPE_F64, suite.sizes[s]);
    }
    return xd_barrier(world);
}

/* ---- data that only moves ---- */

/* What rank `from` sends to rank `to`. */
static inline double suite_piece(int from, int to, int64_t i) {
    return (double)((from * 37 + to * 11 + i * 3) % 101);
}

static inline void suite_write(suite_buffer *b, xd_dtype dtype, int64_t at, int from, int to, int64_t count) {
    for (int64_t i = 0; i < count; i++) xd_store_f64(b->host, dtype, at + i, suite_piece(from, to, i));
}

static inline long suite_differ(const suite_buffer *b, xd_dtype dtype, int64_t at, int from, int to,
                                int64_t count) {
    long wrong = 0;
    for (int64_t i = 0; i < count; i++)
        wrong += xd_load_f64(b->host, dtype, at + i) != suite_piece(from, to, i);
    return wrong;
}

static inline long suite_written(const suite_buffer *b, size_t begin, size_t end) {
    long written = 0;
    for (size_t i = begin; i < end; i++) written += b->host[i] != SUITE_POISON;
    return written;
}

/* The blocks of all ranks, for every rank (to == 0), one after another; nothing after them. */
static inline void suite_check_all(xd_comm *comm, suite_buffer *all, xd_dtype dtype, const int64_t *counts) {
    int64_t at = 0;
    long wrong = 0;
    suite_get(comm, all);
    for (int r = 0; r < xd_comm_size(comm); at += counts[r++])
        wrong += suite_differ(all, dtype, at, r, 0, counts[r]);
    CHECK_EQ_INT(wrong, 0);
    CHECK_EQ_INT(suite_written(all, (size_t)at * xd_dtype_size(dtype), all->bytes), 0);
}

static inline void suite_gather(xd_comm *comm, xd_dtype dtype, int64_t unit) {
    const int n = xd_comm_size(comm), rank = xd_comm_rank(comm), root = n - 1;
    int64_t counts[SUITE_RANKS], total = 0, begin = 0;
    for (int r = 0; r < n; r++) counts[r] = (r + 1) % 3 * unit;
    for (int r = 0; r < n; r++) total += counts[r];
    for (int r = 0; r < rank; r++) begin += counts[r];
    suite_buffer mine = suite_open(2 * unit, dtype), all = suite_open(total, dtype);
    suite_write(&mine, dtype, 0, rank, 0, counts[rank]);
    suite_put(&mine);
    CHECK_EQ_INT(xd_all_gather(comm, mine.at, all.at, counts, dtype), XD_OK);
    suite_check_all(comm, &all, dtype, counts);
    suite_poison(&all);
    suite_write(&all, dtype, begin, rank, 0, counts[rank]);
    suite_put(&all);
    CHECK_EQ_INT(xd_all_gather(comm, all.at + (size_t)begin * xd_dtype_size(dtype), all.at, counts, dtype),
                 XD_OK);
    suite_check_all(comm, &all, dtype, counts); /* in place */
    suite_poison(&all);
    CHECK_EQ_INT(xd_gather(comm, mine.at, all.at, counts, dtype, root), XD_OK);
    suite_get(comm, &all);
    if (rank != root) CHECK_EQ_INT(suite_written(&all, 0, all.bytes), 0);
    if (rank == root) suite_check_all(comm, &all, dtype, counts);
    suite_poison(&mine);
    CHECK_EQ_INT(xd_scatter(comm, all.at, mine.at, counts, dtype, root), XD_OK);
    suite_get(comm, &mine);
    CHECK_EQ_INT(suite_differ(&mine, dtype, 0, rank, 0, counts[rank]), 0);
    CHECK_EQ_INT(suite_written(&mine, (size_t)counts[rank] * xd_dtype_size(dtype), mine.bytes), 0);
    CHECK_EQ_INT(xd_broadcast(comm, all.at, total, dtype, root), XD_OK);
    suite_check_all(comm, &all, dtype, counts);
    suite_close(&all);
    suite_close(&mine);
}

/* With gaps: the blocks are in reverse order, with space between them. */
static inline void suite_exchange(xd_comm *comm, xd_dtype dtype, int64_t unit, bool gaps) {
    const int n = xd_comm_size(comm), rank = xd_comm_rank(comm);
    const int64_t stride = 3 * unit + 5;
    int64_t out[SUITE_RANKS], in[SUITE_RANKS], from[SUITE_RANKS], to[SUITE_RANKS], sent = 0, received = 0;
    for (int r = 0; r < n; r++) {
        out[r] = (rank + 2 * r) % 4 * unit;
        in[r] = (r + 2 * rank) % 4 * unit;
        from[r] = gaps ? (n - 1 - r) * stride : sent;
        to[r] = gaps ? (n - 1 - r) * stride + 2 : received;
        sent += out[r];
        received += in[r];
    }
    suite_buffer send = suite_open(n * stride, dtype), recv = suite_open(n * stride, dtype);
    for (int r = 0; r < n; r++) suite_write(&send, dtype, from[r], rank, r, out[r]);
    suite_put(&send);
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_TO_ALL;
    c.send = send.at;
    c.recv = recv.at;
    c.send_counts = out;
    c.recv_counts = in;
    c.send_displacements = from;
    c.recv_displacements = to;
    c.dtype = dtype;
    CHECK_EQ_INT(gaps ? xd_collective_run(comm, &c) : xd_all_to_all(comm, send.at, out, recv.at, in, dtype),
                 XD_OK);
    suite_get(comm, &recv);
    long wrong = 0;
    for (int r = 0; r < n; r++) wrong += suite_differ(&recv, dtype, to[r], r, rank, in[r]);
    CHECK_EQ_INT(wrong, 0);
    const size_t size = xd_dtype_size(dtype);
    CHECK_EQ_INT(suite_written(&recv, 0, recv.bytes) <= (long)((size_t)received * size), 1);
    for (int r = 0; r < n && gaps; r++)
        CHECK_EQ_INT(
            suite_written(&recv, (size_t)(to[r] + in[r]) * size, (size_t)(to[r] - 2 + stride) * size), 0);
    suite_close(&recv);
    suite_close(&send);
}

static inline xd_result suite_data_arrives_in_rank_order_with_uneven_and_zero_counts(xd_comm *world,
                                                                                     void *unused) {
    (void)unused;
    for (int d = 0; d < 7; d++)
        for (int s = 0; s < suite.size_count; s++) {
            suite_gather(world, suite_dtypes[d], suite.sizes[s]);
            suite_exchange(world, suite_dtypes[d], suite.sizes[s], false);
            suite_exchange(world, suite_dtypes[d], suite.sizes[s], true);
        }
    return xd_barrier(world);
}

static inline xd_result suite_pieces_may_have_gaps_between_them_on_one_rank_alone(xd_comm *world,
                                                                                  void *unused) {
    const int n = xd_comm_size(world), rank = xd_comm_rank(world);
    int64_t counts[SUITE_RANKS], places[SUITE_RANKS];
    suite_buffer mine = suite_open(40, XD_DTYPE_F32), all = suite_open(60 * n, XD_DTYPE_F32);
    long wrong = 0;
    (void)unused;
    for (int r = 0; r < n; r++) counts[r] = 40, places[r] = rank == n / 2 ? (n - 1 - r) * 60 + 7 : 40 * r;
    suite_write(&mine, XD_DTYPE_F32, 0, rank, 0, 40);
    suite_put(&mine);
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_GATHER;
    c.send = mine.at;
    c.recv = all.at;
    c.recv_counts = counts;
    c.recv_displacements = rank == n / 2 ? places : NULL;
    c.dtype = XD_DTYPE_F32;
    CHECK_EQ_INT(xd_collective_run(world, &c), XD_OK);
    suite_get(world, &all);
    for (int r = 0; r < n; r++) wrong += suite_differ(&all, XD_DTYPE_F32, places[r], r, 0, 40);
    CHECK_EQ_INT(wrong, 0);
    CHECK_EQ_INT(suite_written(&all, 0, 4) == 0, rank == n / 2);
    suite_close(&all);
    suite_close(&mine);
    return xd_barrier(world);
}

static inline xd_result suite_a_message_goes_round_a_ring(xd_comm *world, void *unused) {
    const int n = xd_comm_size(world), rank = xd_comm_rank(world), next = (rank + 1) % n;
    (void)unused;
    for (int d = 0; d < 7; d++)
        for (int s = 0; s < suite.size_count; s++) {
            const xd_dtype dtype = suite_dtypes[d];
            const int64_t count = suite.sizes[s];
            suite_buffer data = suite_open(count, dtype);
            suite_write(&data, dtype, 0, 3, 1, rank == 0 ? count : 0);
            suite_put(&data);
            if (n == 1) CHECK_EQ_INT(xd_send(world, data.at, count, dtype, 0), XD_ERROR_ARGUMENT);
            if (n > 1 && rank == 0) CHECK_EQ_INT(xd_send(world, data.at, count, dtype, next), XD_OK);
            if (rank == 0) suite_poison(&data);
            if (n > 1) {
                CHECK_EQ_INT(xd_recv(world, data.at, count, dtype, (rank + n - 1) % n), XD_OK);
                suite_get(world, &data);
                CHECK_EQ_INT(suite_differ(&data, dtype, 0, 3, 1, count), 0);
                CHECK_EQ_INT(suite_written(&data, (size_t)count * xd_dtype_size(dtype), data.bytes), 0);
            }
            if (rank != 0) CHECK_EQ_INT(xd_send(world, data.at, count, dtype, next), XD_OK);
            suite_close(&data);
        }
    return xd_barrier(world);
}

/* ---- groups ---- */

static inline xd_result suite_groups_split_by_color_and_key_and_split_again(xd_comm *world, void *unused) {
    const int rank = xd_comm_rank(world), n = xd_comm_size(world);
    (void)unused;
    for (int round = 0; round < 2; round++) {
        xd_comm *row = NULL, *pair = NULL, *none = NULL;
        CHECK_EQ_INT(xd_comm_split(world, rank % 2, -rank, &row), XD_OK); /* keys reverse the order */
        if (!row) return XD_ERROR_STATE;
        CHECK_EQ_INT(xd_comm_size(row), (n + 1 - rank % 2) / 2);
        for (int r = 0; r + 1 < xd_comm_size(row); r++)
            CHECK(xd_comm_world_rank(row, r) > xd_comm_world_rank(row, r + 1));
        CHECK_EQ_INT(xd_comm_world_rank(row, xd_comm_rank(row)), rank);
        suite_reduce(row, XD_DTYPE_I64, XD_SUM, 600);
        suite_reduce(row, XD_DTYPE_F32, XD_AVG, 33);
        suite_sum_leaves(row, XD_DTYPE_F32, 20);
        suite_gather(row, XD_DTYPE_BF16, 13);
        suite_exchange(row, XD_DTYPE_U8, 13, true);
        CHECK_EQ_INT(xd_comm_split(row, xd_comm_rank(row) / 2, 0, &pair), XD_OK);
        suite_reduce(pair, XD_DTYPE_F64, XD_MAX, 9);
        CHECK_EQ_INT(xd_comm_split(world, rank == n - 1 ? 0 : -1, 0, &none), XD_OK);
        CHECK_EQ_INT(none != NULL, rank == n - 1);
        xd_comm_destroy(none);
        xd_comm_destroy(pair);
        xd_comm_destroy(row);
    }
    return xd_barrier(world);
}

/* ---- counters ---- */

static inline void suite_check_traffic(const xd_comm *comm, xd_comm_counters *before, int64_t sent,
                                       int64_t received) {
    const xd_comm_counters now = xd_comm_traffic(comm);
    CHECK_EQ_INT(now.bytes_sent - before->bytes_sent, sent);
    CHECK_EQ_INT(now.bytes_received - before->bytes_received, received);
    CHECK_EQ_INT(now.calls - before->calls, 1);
    *before = now;
}

static inline xd_result suite_counters_give_the_bytes_that_pass_between_ranks(xd_comm *world, void *unused) {
    const int n = xd_comm_size(world), rank = xd_comm_rank(world), root = n / 2;
    const int64_t others = n - 1, even = 10 * n, sent = 30;
    int64_t counts[SUITE_RANKS], total = 0;
    (void)unused;
    for (int r = 0; r < n; r++) total += counts[r] = 5 + 3 * r;
    const int64_t room = total + even + sent;
    suite_buffer a = suite_open(room, XD_DTYPE_I32), b = suite_open(room, XD_DTYPE_I32);
    xd_comm_counters before = xd_comm_traffic(world);
    CHECK_EQ_INT(xd_reduce_scatter(world, a.at, b.at, counts, XD_DTYPE_I32, XD_MAX), XD_OK);
    suite_check_traffic(world, &before, 4 * (total - counts[rank]), 4 * counts[rank] * others);
    CHECK_EQ_INT(xd_all_gather(world, a.at, b.at, counts, XD_DTYPE_I32), XD_OK);
    suite_check_traffic(world, &before, 4 * counts[rank] * others, 4 * (total - counts[rank]));
    CHECK_EQ_INT(xd_all_reduce(world, a.at, b.at, even, XD_DTYPE_I32, XD_MAX), XD_OK);
    suite_check_traffic(world, &before, 4 * 20 * others, 4 * 20 * others);
    CHECK_EQ_INT(xd_broadcast(world, a.at, sent, XD_DTYPE_I32, root), XD_OK);
    suite_check_traffic(world, &before, rank == root ? 120 * others : 0, rank == root ? 0 : 120);
    suite_close(&b);
    suite_close(&a);
    return xd_barrier(world);
}

/* ---- errors: one rank in the middle does something else than the others ---- */

typedef enum suite_fault {
    SUITE_COUNT,
    SUITE_DTYPE,
    SUITE_OPERATION,
    SUITE_ARGUMENT,
    SUITE_FAULTS
} suite_fault;

static inline xd_result suite_split(xd_comm *comm) {
    xd_comm *all = NULL;
    const xd_result result = xd_comm_split(comm, 0, 0, &all);
    CHECK_EQ_INT(all != NULL, result == XD_OK);
    xd_comm_destroy(all);
    return result;
}

/* One call of each kind; the odd rank commits the fault. Each call is one that INVARIANT mode allows. */
static inline xd_result suite_call(xd_comm *comm, int kind, suite_fault fault, bool odd, int64_t size,
                                   void *send, void *recv) {
    int64_t counts[SUITE_RANKS], own[SUITE_RANKS], count = size;
    for (int r = 0; r < xd_comm_size(comm); r++) counts[r] = own[r] = size;
    if (odd && fault == SUITE_COUNT) count = counts[1] = size - 1;
    if (odd && fault == SUITE_ARGUMENT) count = counts[1] = -5;
    const xd_dtype dtype = odd && fault == SUITE_DTYPE ? XD_DTYPE_I64 : XD_DTYPE_I32;
    const bool other = odd && fault == SUITE_OPERATION;
    const xd_reduce_op op = other ? XD_MAX : XD_SUM;
    const int root = other ? 1 : 0;
    switch (kind) {
    case XD_COLLECTIVE_BARRIER: return other ? xd_broadcast(comm, recv, 1, dtype, 0) : xd_barrier(comm);
    case XD_COLLECTIVE_BROADCAST: return xd_broadcast(comm, recv, count, dtype, root);
    case XD_COLLECTIVE_ALL_REDUCE: return xd_all_reduce(comm, send, recv, count, dtype, op);
    case XD_COLLECTIVE_REDUCE_SCATTER: return xd_reduce_scatter(comm, send, recv, counts, dtype, op);
    case XD_COLLECTIVE_ALL_GATHER:
        return other ? xd_barrier(comm) : xd_all_gather(comm, send, recv, counts, dtype);
    case XD_COLLECTIVE_ALL_TO_ALL:
        return other ? xd_barrier(comm) : xd_all_to_all(comm, send, counts, recv, own, dtype);
    case XD_COLLECTIVE_GATHER: return xd_gather(comm, send, recv, counts, dtype, root);
    case XD_COLLECTIVE_AGREE: return other ? xd_barrier(comm) : xd_agree(comm, XD_OK);
    case XD_COLLECTIVE_SPLIT: return other ? xd_barrier(comm) : suite_split(comm);
    default: return xd_scatter(comm, send, recv, counts, dtype, root);
    }
}

static inline void suite_check_named(const xd_comm *comm, int rank, int culprit) {
    char name[24];
    snprintf(name, sizeof name, "rank %d", rank);
    CHECK(suite_says(comm, name));
    CHECK_EQ_INT(xd_last_error(xd_comm_ctx(comm))->culprit, culprit);
}

/* All ranks fail alike and name the rank that differs, nothing is written, and the group remains usable. */
static inline void suite_commit(xd_comm *comm, int kind, suite_fault fault, int64_t size) {
    const int n = xd_comm_size(comm), middle = n / 2;
    const bool odd = xd_comm_rank(comm) == middle, bad = fault == SUITE_ARGUMENT;
    suite_buffer send = suite_open(n * size, XD_DTYPE_I64), recv = suite_open(n * size, XD_DTYPE_I64);
    const xd_result got = suite_call(comm, kind, fault, odd, size, send.at, recv.at);
    CHECK_EQ_INT(got, !bad ? XD_ERROR_MISMATCH : odd ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    /* Two ranks disagree on a count of an all_to_all: it is unknown which of them is wrong, and both are named. */
    const bool open = kind == XD_COLLECTIVE_ALL_TO_ALL && fault == SUITE_COUNT;
    if (!odd || !bad) suite_check_named(comm, middle, open ? -1 : middle);
    suite_get(comm, &recv);
    CHECK_EQ_INT(suite_written(&recv, 0, recv.bytes), 0);
    CHECK_EQ_INT(suite_call(comm, kind, SUITE_FAULTS, odd, size, send.at, recv.at), XD_OK);
    suite_close(&recv);
    suite_close(&send);
}

static inline xd_result suite_what_one_rank_does_otherwise_is_found_before_data_moves(xd_comm *world,
                                                                                      void *unused) {
    (void)unused;
    for (int kind = XD_COLLECTIVE_BARRIER; kind <= SUITE_LAST_KIND && xd_comm_size(world) > 1; kind++)
        for (int fault = 0; fault < SUITE_FAULTS; fault++) {
            const bool pair = kind == XD_COLLECTIVE_SEND || kind == XD_COLLECTIVE_RECV; /* below */
            const bool counts = kind >= XD_COLLECTIVE_BROADCAST && kind <= XD_COLLECTIVE_SCATTER;
            if (pair || (!counts && fault != SUITE_OPERATION)) continue;
            suite_commit(world, kind, (suite_fault)fault, 3);
            suite_commit(world, kind, (suite_fault)fault, 3000); /* the long path, where there is one */
        }
    return xd_barrier(world);
}

static inline xd_result suite_sums_that_have_no_meaning_are_refused_on_all_ranks(xd_comm *world,
                                                                                 void *unused) {
    int64_t counts[SUITE_RANKS];
    suite_uneven(world, 7, counts);
    (void)unused;
    for (int d = 0; d < 7; d++)
        for (int op = XD_SUM; op <= XD_AVG; op++) {
            const bool whole = !xd_dtype_is_floating(suite_dtypes[d]);
            const xd_result want = whole ? XD_ERROR_DTYPE : XD_ERROR_UNSUPPORTED;
            if (suite_allows(world, suite_dtypes[d], (xd_reduce_op)op)) continue;
            suite_buffer a = suite_open(7, suite_dtypes[d]), b = suite_open(7, suite_dtypes[d]);
            CHECK_EQ_INT(xd_all_reduce(world, a.at, b.at, 7, suite_dtypes[d], (xd_reduce_op)op), want);
            CHECK(suite_says(world, whole ? "AVG" : "leaves"));
            CHECK_EQ_INT(xd_reduce_scatter(world, a.at, b.at, counts, suite_dtypes[d], (xd_reduce_op)op),
                         want);
            suite_get(world, &b);
            CHECK_EQ_INT(suite_written(&b, 0, b.bytes), 0);
            suite_close(&b);
            suite_close(&a);
        }
    return xd_barrier(world);
}

/* A sum of two leaves a rank, whose table the caller may have spoilt. */
static inline xd_result suite_sum_known(xd_comm *comm, const xd_leaves *known, float *sum) {
    static const float forest[2] = { 1.0f, 2.0f };
    const int rank = xd_comm_rank(comm);
    const xd_leaves mine = { 2 * rank, 2, 2 * xd_comm_size(comm) };
    suite_buffer send = suite_open(2, XD_DTYPE_F32), recv = suite_open(1, XD_DTYPE_F32);
    memcpy(send.host, forest, sizeof forest);
    suite_put(&send);
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = send.at;
    c.recv = recv.at;
    c.count = 1;
    c.dtype = XD_DTYPE_F32;
    c.leaves = mine;
    c.known_leaves = known;
    const xd_result result = xd_collective_run(comm, &c);
    suite_get(comm, &recv);
    CHECK_EQ_INT(suite_written(&recv, 0, sizeof *sum) == 0, result != XD_OK);
    memcpy(sum, recv.host, sizeof *sum);
    suite_close(&recv);
    suite_close(&send);
    return result;
}

static inline xd_result suite_known_leaves_that_are_not_those_are_refused_on_all_ranks(xd_comm *world,
                                                                                       void *unused) {
    const int n = xd_comm_size(world), rank = xd_comm_rank(world), last = n - 1;
    xd_leaves known[SUITE_RANKS], odd[SUITE_RANKS];
    float sum = 0.0f;
    (void)unused;
    for (int r = 0; r < n; r++) {
        known[r].first = 2 * r;
        known[r].count = 2;
        known[r].total = 2 * n;
    }
    memcpy(odd, known, sizeof odd);
    odd[last].count = 1; /* another rank's for this one, and one leaf too few for the others */
    CHECK_EQ_INT(suite_sum_known(world, odd, &sum), XD_ERROR_ARGUMENT);
    CHECK(suite_says(world, rank == last ? ", +1) of " : "known leaves of "));
    CHECK_EQ_INT(suite_sum_known(world, rank == last ? odd : known, &sum),
                 rank == last ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(suite_says(world, ", +1) of "));
    odd[last].count = 2;
    odd[0].total = 2 * n + 1;
    CHECK_EQ_INT(suite_sum_known(world, odd, &sum), XD_ERROR_ARGUMENT);
    odd[0].total = 2 * n;
    if (n > 1) {
        CHECK_EQ_INT(suite_sum_known(world, rank == last ? NULL : known, &sum), XD_ERROR_MISMATCH);
        CHECK(suite_says(world, "passed known leaves of so many ranks: 0"));
    }
    if (n > 2) { /* a table that fits for itself */
        odd[1].count = 3;
        odd[2].first = 5;
        odd[2].count = 1;
        CHECK_EQ_INT(suite_sum_known(world, rank == 0 ? odd : known, &sum), XD_ERROR_MISMATCH);
        CHECK(suite_says(world, "passed known_leaves[2].first = 4"));
        CHECK(suite_says(world, "rank 0 passed 5"));
    }
    CHECK_EQ_INT(suite_sum_known(world, known, &sum), XD_OK);
    CHECK(sum == (float)n); /* pairs of neighbouring leaves are one node */
    return xd_barrier(world);
}

/* One end of a message between the first and the last rank; the last commits the fault. */
static inline xd_result suite_end(xd_comm *comm, bool sends, suite_fault fault, void *data) {
    const int last = xd_comm_size(comm) - 1, peer = last - xd_comm_rank(comm);
    const bool odd = peer == 0;
    const int64_t count = !odd ? 8 : fault == SUITE_COUNT ? 5 : fault == SUITE_ARGUMENT ? -1 : 8;
    const xd_dtype dtype = odd && fault == SUITE_DTYPE ? XD_DTYPE_I32 : XD_DTYPE_F32;
    return sends ? xd_send(comm, data, count, dtype, peer) : xd_recv(comm, data, count, dtype, peer);
}

static inline xd_result suite_send_and_receive_that_do_not_fit_fail_on_both_ranks(xd_comm *world,
                                                                                  void *unused) {
    const int last = xd_comm_size(world) - 1, rank = xd_comm_rank(world);
    (void)unused;
    static const suite_fault faults[3] = { SUITE_COUNT, SUITE_DTYPE, SUITE_ARGUMENT };
    for (int form = 0; form < 6 && last > 0 && rank % last == 0; form++) {
        const suite_fault fault = faults[form / 2];
        const bool sends = (form % 2 == 0) == (rank == 0), bad = fault == SUITE_ARGUMENT;
        suite_buffer data = suite_open(8, XD_DTYPE_F32);
        CHECK_EQ_INT(suite_end(world, sends, fault, data.at), !bad           ? XD_ERROR_MISMATCH
                                                              : rank == last ? XD_ERROR_ARGUMENT
                                                                             : XD_ERROR_PEER);
        if (fault == SUITE_COUNT) CHECK(suite_says(world, "count 5") && suite_says(world, "count 8"));
        if (bad && rank == 0) suite_check_named(world, last, last);
        suite_get(world, &data);
        CHECK_EQ_INT(suite_written(&data, 0, data.bytes), 0);
        CHECK_EQ_INT(suite_end(world, sends, SUITE_FAULTS, data.at), XD_OK);
        suite_close(&data);
    }
    return xd_barrier(world);
}

static inline xd_result suite_agree_gives_every_rank_the_message_of_the_one_that_failed(xd_comm *world,
                                                                                        void *unused) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const bool odd = xd_comm_rank(world) == xd_comm_size(world) / 2;
    (void)unused;
    CHECK_EQ_INT(xd_agree(world, XD_OK), XD_OK);
    const xd_result mine = odd ? XD_FAIL(ctx, XD_ERROR_IO, "no disk under this rank") : XD_OK;
    CHECK_EQ_INT(xd_agree(world, mine), odd ? XD_ERROR_IO : XD_ERROR_PEER);
    CHECK(suite_says(world, "no disk under this rank"));
    return xd_agree(world, XD_OK);
}

#endif
