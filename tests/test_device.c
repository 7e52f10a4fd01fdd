/* Tensors that the host cannot reach: every loss with a table whose memory is closed to the host except inside the
 * table's own entries. A read or write on the host in the middle of a step ends the program. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "softmax_calls.h"

#include <stdlib.h>
#include <sys/mman.h>

/* ---- a device of one mapped range, never reused ---- */

enum { SPACE = 4 << 20 };
static unsigned char *space;
static size_t used;
static int depth; /* entries that are at work */
static xd_kernels plain, guarded;

static void enter(void) {
    if (depth++ == 0) (void)mprotect(space, SPACE, PROT_READ | PROT_WRITE);
}

static xd_result leave(xd_result result) {
    if (--depth == 0) (void)mprotect(space, SPACE, PROT_NONE);
    return result;
}

static void *guarded_allocate(xd_ctx *ctx, size_t bytes) {
    void *memory = space + used;
    (void)ctx;
    if (bytes > SPACE - used) return NULL;
    enter();
    memset(memory, 0xff, bytes); /* not numbers */
    leave(XD_OK);
    used += (bytes + 63) & ~(size_t)63;
    return memory;
}

static void guarded_release(xd_ctx *ctx, void *memory) {
    (void)ctx, (void)memory;
}

static xd_result guarded_copy(const xd_launch *launch, void *to, const void *from, size_t bytes,
                              xd_copy_kind kind) {
    const bool to_device = (unsigned char *)to >= space && (unsigned char *)to < space + SPACE;
    const bool from_device =
        (const unsigned char *)from >= space && (const unsigned char *)from < space + SPACE;
    CHECK(to_device == (kind != XD_COPY_TO_HOST) && from_device == (kind != XD_COPY_TO_DEVICE));
    enter();
    return leave(plain.memory.copy(launch, to, from, bytes, kind));
}

static xd_result guarded_fill(const xd_launch *launch, void *to, uint8_t value, size_t bytes) {
    enter();
    return leave(plain.memory.fill(launch, to, value, bytes));
}

#define GUARDED(group, entry, type)                                                         \
    static xd_result guarded_##group##_##entry(const xd_launch *launch, const type *args) { \
        enter();                                                                            \
        return leave(plain.group.entry(launch, args));                                      \
    }
/* clang-format off */
#define LOSS_ENTRIES(X) \
    X(loss, references, xd_loss_args) \
    X(loss, merge_references, xd_loss_args) \
    X(loss, stats, xd_loss_args) \
    X(loss, combine, xd_loss_args) \
    X(loss, mixture, xd_loss_args) \
    X(loss, mixture_combine, xd_loss_args) \
    X(loss, grad, xd_loss_args) \
    X(topk, maxima, xd_topk_args) \
    X(topk, stats, xd_topk_args) \
    X(topk, merge, xd_topk_args) \
    X(topk, divergence, xd_topk_kl_args) \
    X(topk, grad, xd_topk_kl_args) \
    X(topk, entries, xd_topk_entries_args) \
    X(topk, select, xd_select_args) \
    X(topk, select_merge, xd_select_args) \
    X(rows, scales, xd_row_args) \
    X(rows, sum, xd_row_args) \
    X(rows, finish, xd_row_args) \
    X(softmax, stats, xd_softmax_args) \
    X(softmax, merge, xd_softmax_args) \
    X(softmax, write, xd_softmax_args) \
    X(softmax, row_sums, xd_softmax_args) \
    X(softmax, write_backward, xd_softmax_args) \
    X(softmax, pick, xd_softmax_args) \
    X(softmax, take, xd_softmax_args) \
    X(softmax, write_target_backward, xd_softmax_args)
/* clang-format on */
LOSS_ENTRIES(GUARDED)

static xd_result guarded_count(const xd_launch *launch, const xd_positions *positions, int64_t *part) {
    enter();
    return leave(plain.rows.count(launch, positions, part));
}

static xd_result guarded_denominator(const xd_launch *launch, const int64_t *part, xd_denominator *out) {
    enter();
    return leave(plain.rows.denominator(launch, part, out));
}

static xd_result guarded_ratio(const xd_launch *launch, const xd_denominator *hit,
                               const xd_denominator *counted, double *out) {
    enter();
    return leave(plain.rows.ratio(launch, hit, counted, out));
}

static xd_result guarded_column_maxima(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                       int64_t columns, float *maxima) {
    enter();
    return leave(plain.rows.column_maxima(launch, logits, mask, columns, maxima));
}

static xd_result guarded_voters(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                int64_t columns, uint8_t *voters) {
    enter();
    return leave(plain.rows.voters(launch, logits, mask, columns, voters));
}

static xd_result guarded_sort_ids(const xd_launch *launch, int64_t *ids, int64_t count) {
    enter();
    return leave(plain.rows.sort_ids(launch, ids, count));
}

static xd_result guarded_hits(const xd_launch *launch, const int64_t *argmax, xd_ids labels,
                              const uint8_t *mask, int64_t rows, uint8_t *hits) {
    enter();
    return leave(plain.softmax.hits(launch, argmax, labels, mask, rows, hits));
}

static xd_result guarded_cast(const xd_launch *launch, const xd_cast_array *arrays, int64_t count) {
    enter();
    return leave(plain.optimizer.cast(launch, arrays, count));
}

static void make_tables(void) {
    const xd_ctx_desc desc = { .cpu = XD_CPU_PLAIN };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    plain = *xd_ctx_kernels(ctx);
    xd_ctx_destroy(ctx);
    guarded = plain;
    guarded.name = "guarded";
    guarded.device = XD_DEVICE_CUDA;
    guarded.memory.allocate = guarded_allocate;
    guarded.memory.release = guarded_release;
    guarded.memory.copy = guarded_copy;
    guarded.memory.fill = guarded_fill;
#define TAKE(group, entry, type) guarded.group.entry = guarded_##group##_##entry;
    LOSS_ENTRIES(TAKE)
    guarded.rows.count = guarded_count;
    guarded.rows.denominator = guarded_denominator;
    guarded.rows.ratio = guarded_ratio;
    guarded.rows.column_maxima = guarded_column_maxima;
    guarded.rows.voters = guarded_voters;
    guarded.rows.sort_ids = guarded_sort_ids;
    guarded.softmax.hits = guarded_hits;
    guarded.optimizer.cast = guarded_cast;
    used = 0;
    if (!space) space = (unsigned char *)mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* ---- the same call on the CPU and on the device ---- */

enum { ROWS = 5, VOCAB = 21, WIDTH = 24, K = 4 };

/* Everything a call reads and writes, at one place on each side. */
typedef struct board {
    float student[ROWS * WIDTH], teacher[ROWS * WIDTH], gradient[ROWS * WIDTH];
    float weight[ROWS], row_loss[ROWS], values[ROWS * K], mass[ROWS], importance[VOCAB];
    int64_t labels[ROWS], ids[ROWS * K], argmax[ROWS];
    double scale, accuracy, lse[ROWS];
    float log_probs[ROWS], picked[ROWS * K];
    xd_denominator denominator;
    xd_status status;
    xd_loss_values loss;
    uint8_t mask[ROWS];
} board;

typedef struct side {
    xd_ctx *ctx;
    xd_vocab *vocab;
    board *b; /* in memory of the side */
} side;

static double uniform(uint64_t *state) { /* in (-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

static void fill(board *b) {
    uint64_t state = 3;
    memset(b, 0, sizeof *b);
    for (int i = 0; i < ROWS * WIDTH; i++) {
        b->student[i] = (float)(4.0 * uniform(&state));
        b->teacher[i] = (float)(4.0 * uniform(&state));
    }
    for (int r = 0; r < ROWS; r++) {
        b->labels[r] = r == 1 ? XD_IGNORE_INDEX : r == 3 ? VOCAB + 2 : r * 4; /* row 3 is a finding */
        b->weight[r] = 0.5f + (float)r;
        b->mask[r] = 1;
        for (int j = 0; j < K; j++) {
            b->ids[r * K + j] = (r + 5 * j) % VOCAB;
            b->values[r * K + j] = -1.0f - (float)j;
        }
    }
    b->scale = 0.75;
    b->accuracy = -1.0;
}

static void side_open(side *s, const xd_kernels *table, const board *from, xd_reduction reduction) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kernels = table;
    desc.reduction = reduction;
    CHECK(xd_ctx_create(&desc, &s->ctx) == XD_OK);
    CHECK(vocab_even(s->ctx, NULL, VOCAB, &s->vocab) == XD_OK);
    const xd_launch launch = xd_ctx_launch(s->ctx);
    s->b = (board *)table->memory.allocate(s->ctx, sizeof *s->b);
    CHECK(table->memory.copy(&launch, s->b, from, sizeof *from, XD_COPY_TO_DEVICE) == XD_OK);
}

static void side_close(side *s) {
    xd_ctx_kernels(s->ctx)->memory.release(s->ctx, s->b);
    xd_vocab_destroy(s->vocab);
    xd_ctx_destroy(s->ctx);
}

static xd_rows rows_of(float *data) {
    xd_rows r = { data, XD_DTYPE_F32, ROWS, WIDTH, 0 };
    return r;
}

typedef void (*call)(side *s, int variant);

/* Runs a call on both sides: afterwards both boards hold the same bytes. */
static void same_on_both(call run, int variant, xd_reduction reduction) {
    board start, cpu_end, device_end;
    side cpu, device;
    make_tables();
    fill(&start);
    side_open(&cpu, &plain, &start, reduction);
    side_open(&device, &guarded, &start, reduction);
    run(&cpu, variant);
    run(&device, variant);
    memcpy(&cpu_end, cpu.b, sizeof cpu_end);
    CHECK(xd_read(device.ctx, &device_end, device.b, sizeof device_end) == XD_OK);
    CHECK(memcmp(&cpu_end, &device_end, sizeof cpu_end) == 0);
    CHECK(memcmp(&cpu_end, &start, sizeof cpu_end) != 0);
    side_close(&device);
    side_close(&cpu);
}

static void call_loss(side *s, int variant) {
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    d.student = rows_of(s->b->student);
    d.teacher = rows_of(s->b->teacher);
    d.common.gradient = rows_of(variant & 4 ? s->b->student : s->b->gradient);
    d.common.labels = xd_ids_of(s->b->labels, XD_DTYPE_I64);
    d.common.mask = s->b->mask;
    d.vocab = s->vocab;
    d.hard_weight = d.soft_weight = 1.0;
    d.beta = 0.5;
    d.common.row_weight = s->b->weight;
    d.common.scale = &s->b->scale;
    d.common.row_loss = s->b->row_loss;
    d.common.status = &s->b->status;
    d.divergence = (xd_divergence)(variant & 3);
    if (variant & 4) {
        const xd_positions p = { ROWS, { s->b->labels, XD_DTYPE_I64 }, false, 0, s->b->mask, s->b->weight };
        CHECK(xd_denominator_count(s->ctx, NULL, &p, 1, &s->b->denominator) == XD_OK);
        d.common.denominator = &s->b->denominator;
    }
    CHECK(xd_loss(s->ctx, &d, &s->b->loss) == XD_OK);
}

static void call_topk(side *s, int variant) {
    xd_topk_desc d;
    memset(&d, 0, sizeof d);
    d.student = rows_of(s->b->student);
    d.common.gradient = rows_of(s->b->gradient);
    d.vocab = s->vocab;
    d.k = K;
    d.beta = 0.5;
    d.mode = (xd_topk_mode)(variant & 3);
    d.divergence = variant & 8 ? XD_KL_MIXED : XD_KL_FORWARD;
    if (variant & 4) {
        d.teacher = rows_of(s->b->teacher);
    } else {
        d.ids = xd_ids_of(s->b->ids, XD_DTYPE_I64);
        d.values = s->b->values;
    }
    d.common.row_loss = s->b->row_loss;
    d.student_mass = s->b->mass;
    d.student_log_probs = s->b->picked;
    d.common.status = &s->b->status;
    CHECK(xd_topk_kl_loss(s->ctx, &d, &s->b->loss) == XD_OK);
}

static void call_softmax(side *s, int variant) {
    board *b = s->b;
    const xd_rows student = rows_of(b->student), teacher = rows_of(b->teacher),
                  gradient = rows_of(b->gradient);
    const xd_positions p = { ROWS, { b->labels, XD_DTYPE_I64 }, false, 0, b->mask, NULL };
    xd_vocab_topk_desc choice = vocab_topk_desc(s->vocab, student, 1, K);
    choice.mask = b->mask;
    switch (variant) {
    case 0: CHECK(softmax_row_stats(s->ctx, s->vocab, student, 1.5, b->lse, b->argmax) == XD_OK); break;
    case 1: CHECK(softmax_all(s->ctx, s->vocab, student, 1.5, gradient) == XD_OK); break;
    case 2: CHECK(softmax_all_backward(s->ctx, s->vocab, student, 1.5, teacher, gradient) == XD_OK); break;
    case 3:
        CHECK(softmax_at_ids(s->ctx, s->vocab, student, 1.5, xd_ids_of(b->labels, XD_DTYPE_I64),
                             b->log_probs) == XD_OK);
        break;
    case 4:
        CHECK(softmax_at_ids_backward(s->ctx, s->vocab, student, 1.5, xd_ids_of(b->labels, XD_DTYPE_I64),
                                      b->weight, gradient) == XD_OK);
        break;
    case 5:
        CHECK(softmax_columns(s->ctx, s->vocab, student, xd_ids_of(b->ids, XD_DTYPE_I64), K, 0, b->picked) ==
              XD_OK);
        break;
    case 6: CHECK(softmax_accuracy(s->ctx, s->vocab, student, &p, NULL, &b->accuracy) == XD_OK); break;
    case 7: CHECK(xd_vocab_topk(s->ctx, s->vocab, student, K, b->picked, b->ids) == XD_OK); break;
    default: CHECK(vocab_topk_columns(s->ctx, &choice, b->ids, b->importance) == XD_OK);
    }
}

XD_TEST(a_loss_reads_nothing_on_the_host) {
    for (int variant = 0; variant < 8; variant++)
        for (int mode = 0; mode < 2; mode++)
            same_on_both(call_loss, variant, mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
}

XD_TEST(a_top_k_loss_reads_nothing_on_the_host) {
    for (int variant = 0; variant < 16; variant++)
        for (int mode = 0; mode < 2; mode++)
            same_on_both(call_topk, variant, mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
}

XD_TEST(softmax_and_selection_read_nothing_on_the_host) {
    for (int variant = 0; variant < 9; variant++)
        same_on_both(call_softmax, variant, XD_REDUCTION_DETERMINISTIC);
}

XD_TEST(findings_of_a_device_are_read_when_asked_for) {
    board start;
    side s;
    xd_loss_desc d;
    make_tables();
    fill(&start);
    side_open(&s, &guarded, &start, XD_REDUCTION_DETERMINISTIC);
    memset(&d, 0, sizeof d);
    d.student = rows_of(s.b->student);
    d.common.labels = xd_ids_of(s.b->labels, XD_DTYPE_I64);
    d.vocab = s.vocab;
    d.hard_weight = 1.0;
    CHECK(xd_loss(s.ctx, &d, &s.b->loss) == XD_ERROR_ARGUMENT); /* where would the finding go? */
    d.common.status = &s.b->status;
    CHECK(xd_loss(s.ctx, &d, &s.b->loss) == XD_OK);
    xd_loss_values values;
    CHECK(xd_read(s.ctx, &values, &s.b->loss, sizeof values) == XD_OK);
    CHECK(values.loss > 0.0);
    xd_status read;
    CHECK(xd_read(s.ctx, &read, &s.b->status, sizeof read) == XD_OK);
    CHECK(xd_status_check(s.ctx, &read) == XD_ERROR_DATA);
    CHECK(strstr(xd_last_error(s.ctx)->message, "first: row 3, value 23") != NULL);
    side_close(&s);
}

XD_TEST(weights_and_scales_that_are_not_finite_are_findings) {
    board b;
    side s;
    make_tables();
    for (int which = 0; which < 2; which++) {
        fill(&b);
        b.labels[3] = 2;
        if (which)
            b.scale = (double)INFINITY;
        else
            b.weight[2] = NAN;
        side_open(&s, &plain, &b, XD_REDUCTION_DETERMINISTIC);
        call_loss(&s, 0);
        CHECK_EQ_INT(s.b->status.not_finite, which ? 4 : 1);
        CHECK_EQ_INT(s.b->status.first_row, which ? 0 : 2);
        CHECK(isfinite(s.b->loss.loss));
        for (int i = 2 * WIDTH; i < 3 * WIDTH; i++) CHECK(s.b->gradient[i] == 0.0f);
        side_close(&s);
    }
}

XD_TEST(refused_weights_of_a_device_leave_nothing_to_divide_by) {
    board start, end;
    side s;
    make_tables();
    fill(&start);
    start.weight[0] = -1.0f;
    side_open(&s, &guarded, &start, XD_REDUCTION_DETERMINISTIC);
    call_loss(&s, 4);
    CHECK(xd_read(s.ctx, &end, s.b, sizeof end) == XD_OK);
    CHECK_EQ_INT(end.denominator.refused, 1);
    CHECK(end.denominator.inverse == 0.0 && end.loss.loss == 0.0);
    CHECK_EQ_INT(end.status.nothing_counted, 1);
    side_close(&s);
}

XD_TEST(a_group_of_one_copies_through_the_table) {
    board start, end;
    side s;
    xd_comm *self = NULL;
    const int64_t count = ROWS;
    make_tables();
    fill(&start);
    side_open(&s, &guarded, &start, XD_REDUCTION_DETERMINISTIC);
    CHECK(xd_comm_self(s.ctx, &self) == XD_OK);
    CHECK(xd_all_gather(self, s.b->labels, s.b->argmax, &count, XD_DTYPE_I64) == XD_OK);
    CHECK(xd_read(s.ctx, &end, s.b, sizeof end) == XD_OK);
    CHECK(memcmp(end.argmax, start.labels, sizeof end.argmax) == 0);
    xd_comm_destroy(self);
    side_close(&s);
}

XD_TEST(a_context_has_its_table_from_its_creation_on) {
    xd_ctx_desc desc = { 0 };
    xd_ctx *ctx = NULL;
    make_tables();
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    const xd_kernels *table = xd_ctx_kernels(ctx);
    const char *best = table->name;
    CHECK(table == xd_ctx_kernels(ctx) && table == xd_ctx_host_kernels(ctx));
    CHECK(strcmp(best, xd_cpu_level_name(xd_ctx_settings(ctx)->cpu)) == 0);
    xd_ctx_set_cpu(ctx, XD_CPU_PLAIN); /* as ranks that agree on a level do: the same table, of that level */
    CHECK(table == xd_ctx_kernels(ctx));
    CHECK(strcmp(table->name, "plain") == 0 && table->loss.stats == plain.loss.stats);
    xd_ctx_set_kernels(ctx, &guarded);
    CHECK(xd_ctx_kernels(ctx) == &guarded && xd_ctx_host_kernels(ctx) == table);
    xd_ctx_set_kernels(ctx, NULL);
    CHECK(xd_ctx_kernels(ctx) == table);
    xd_ctx_destroy(ctx);
}

/* Bytes of a pattern that no stretch of a copy repeats. */
static unsigned char patterned(size_t i) {
    return (unsigned char)(i * 131u + (i >> 8) * 7u + (i >> 16) * 29u + 1u);
}

/* Bytes at `memory` that are not as they were before a call or, in [begin, end), as a call should leave them. */
static int64_t count_wrong(const unsigned char *memory, size_t all, size_t begin, size_t end, bool filled) {
    int64_t wrong = 0;
    for (size_t i = 0; i < all; i++)
        wrong += memory[i] != (i < begin || i >= end ? 0xee : filled ? 0x5a : patterned(i - begin));
    return wrong;
}

XD_TEST(copies_and_fills_of_any_length_write_what_they_are_told) {
    static const size_t lengths[] = { 0, 1, 131071, 131072, 135167, 1048653, 8388608, 8388609 };
    const size_t most = 8388609, room = most + 64;
    unsigned char *from = (unsigned char *)malloc(room), *to = (unsigned char *)malloc(room);
    xd_ctx *ctx = NULL;
    CHECK(from && to && xd_ctx_create(NULL, &ctx) == XD_OK);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const size_t n = lengths[i], at = 1 + i % 5, source = i % 3;
        for (size_t k = 0; k < n; k++) from[source + k] = patterned(k);
        memset(to, 0xee, room);
        CHECK(memory->copy(&launch, to + at, from + source, n, XD_COPY_ON_DEVICE) == XD_OK);
        CHECK_EQ_INT(count_wrong(to, room, at, at + n, false), 0);
        memset(to, 0xee, room);
        CHECK(memory->fill(&launch, to + at, 0x5a, n) == XD_OK);
        CHECK_EQ_INT(count_wrong(to, room, at, at + n, true), 0);
    }
    xd_ctx_destroy(ctx);
    free(from);
    free(to);
}

XD_TEST_MAIN()
