/* Random programs of collectives on 2 to 64 ranks, which are threads, or processes of one machine. Every element that arrives is compared with plain loops
 * (comm_program.h); what INVARIANT mode promises is compared bit by bit between worlds of several sizes. In four programs of
 * ten one rank does something else than the others, leaves or never comes: all ranks return, and name it.
 *
 *     test_comm_programs                              a sample: 1 second of processor
 *     test_comm_programs --seed 7 --count 4000        the programs of the seeds 7 to 4006
 *     test_comm_programs --seed 7 --ranks 5           one program, on five ranks
 *     test_comm_programs --seed 7 --processes 1       its ranks are processes
 *
 * A failure prints the command line that repeats its program. Time stands still, so no rank is late but the one that means to
 * be; an alarm ends a program that hangs. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "comm_program.h"
#include "node_world.h"
#include "tensor_model.h"
#include "xd_test.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

enum { POISON = 0xA5, ALARM_SECONDS = 100 };

/* What the ranks of one program share. */
typedef struct stage {
    program p;
    uint32_t finished, failures; /* ranks that have returned; programs say once what failed; atomic */
    int64_t alive;               /* blocks of memory; atomic */
} stage;

static bool as_processes; /* ranks, rather than threads */

/* Runs ranks of either kind; what they share has to be memory of node_memory. */
static xd_result run_ranks(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                           char message[256]) {
    const node_start start = { .ranks = ranks, .desc = desc, .function = function, .argument = argument };
    xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
    if (as_processes) return node_run(&start, message);
    const xd_result result = xd_run_threads(ranks, desc, function, argument, &error);
    snprintf(message, 256, "%.255s", error.message);
    return result;
}

/* One rank in one step, and its copies of everything that the call takes. */
typedef struct call {
    stage *stage;
    const program_step *s;
    xd_comm *world, *comm;
    int members[PROGRAM_RANKS], n, place,
        peer; /* world ranks of the group; the other end of a message, or -1 */
    int64_t shared[PROGRAM_RANKS], out[PROGRAM_RANKS], in[PROGRAM_RANKS]; /* counts */
    int64_t total, begin; /* of `shared`: the sum, and where this rank's block begins */
    size_t size, bytes;   /* of an element; of each of the two arrays */
    unsigned char *send, *recv;
    bool in_place;
} call;

static char repeat_line[160];

static void say_and_exit(int number) {
    static const char words[] = " hangs\n";
    (void)number;
    if (write(1, repeat_line, strlen(repeat_line)) < 0 || write(1, words, sizeof words - 1) < 0) _exit(3);
    _exit(2);
}

static void expect(stage *g, const call *c, bool right, const char *what) {
    if (right) return;
    if (__atomic_fetch_add(&g->failures, 1, __ATOMIC_RELAXED) < 5)
        printf("rank %d of %d, step %d of kind %d, fault %d of %d, culprit %d: %s: %s\n",
               xd_comm_rank(c->world), g->p.ranks, c->s ? (int)(c->s - g->p.step) : -1, c->s ? c->s->kind : 0,
               (int)g->p.fault, g->p.odd, xd_last_error(xd_comm_ctx(c->world))->culprit, what,
               xd_last_error(xd_comm_ctx(c->world))->message);
}

/* ---- memory and time ---- */

static void *count_allocate(void *user, size_t bytes) {
    __atomic_add_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void count_release(void *user, void *memory) {
    __atomic_sub_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* Time stands still. For a rank that waits for one that never comes, an armed one, it jumps beyond the deadline when all those
 * that wait for it are there: its first look at the clock is the call's deadline, the second is a wait. */
typedef struct patience {
    uint32_t waiting, awaited; /* atomic */
} patience;

static patience *patient; /* of all ranks */
static __thread int looks = -1;

static double patient_clock(void *user) {
    (void)user;
    if (looks >= 0 && ++looks == 2) __atomic_add_fetch(&patient->waiting, 1, __ATOMIC_ACQ_REL);
    if (looks < 2) return 0.0;
    return __atomic_load_n(&patient->waiting, __ATOMIC_ACQUIRE) >= patient->awaited ? 1e6 : 0.0;
}

/* ---- what a call takes ---- */

static void set_counts(call *c) {
    const program_step *s = c->s;
    c->total = c->begin = 0;
    for (int r = 0; r < c->n; r++) {
        c->shared[r] = program_count(s, r, 0);
        c->out[r] = program_count(s, c->place, r);
        c->in[r] = program_count(s, r, c->place);
        if (r < c->place) c->begin += c->shared[r];
        c->total += c->shared[r];
    }
}

static void put(const call *c, unsigned char *to, int64_t at, int from, int target, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        xd_store_f64(to, c->s->dtype, at + i, program_value(c->s, from, target, i));
}

static xd_leaves leaves_of(const call *c) {
    return program_leaves(c->s->seed, c->place, c->n, program_leaf_total(c->s));
}

static void put_forest(const call *c) {
    const xd_leaves l = leaves_of(c);
    int64_t at = 0;
    for (int64_t lo = l.first, end = l.first + l.count; lo < end; lo += xd_leaves_node_size(lo, end))
        for (int64_t i = 0; i < c->s->count; i++)
            xd_store_f64(c->send, c->s->dtype, at++,
                         program_tree(c->s, lo, lo + xd_leaves_node_size(lo, end), i));
}

/* Fills what this rank sends, and poisons what it receives. */
static void prepare(call *c, bool in_place) {
    const int me = c->members[c->place];
    int64_t at = 0;
    memset(c->send, POISON, c->bytes);
    memset(c->recv, POISON, c->bytes);
    c->in_place = in_place;
    switch (c->s->kind) {
    case XD_COLLECTIVE_BROADCAST:
        if (c->place == c->s->root % c->n) put(c, c->recv, 0, me, 0, c->s->count);
        break;
    case XD_COLLECTIVE_ALL_REDUCE:
    case XD_COLLECTIVE_SEND: put(c, c->send, 0, me, 0, c->s->count); break;
    case XD_COLLECTIVE_REDUCE_SCATTER: put(c, c->send, 0, me, 0, c->total); break;
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_GATHER: put(c, c->send, 0, me, 0, c->shared[c->place]); break;
    case XD_COLLECTIVE_SCATTER:
        for (int r = 0; r < c->n; at += c->shared[r++])
            if (c->place == c->s->root % c->n) put(c, c->send, at, me, r, c->shared[r]);
        break;
    case XD_COLLECTIVE_ALL_TO_ALL:
        for (int r = 0; r < c->n; at += c->out[r++]) put(c, c->send, at, me, r, c->out[r]);
        break;
    case STEP_LEAVES: put_forest(c); break;
    default: break;
    }
    if (in_place && c->s->kind == XD_COLLECTIVE_ALL_GATHER)
        put(c, c->recv, c->begin, me, 0, c->shared[c->place]);
}

/* ---- comparing ---- */

/* Elements [at, + count) of an array are those of `from`; nothing behind `end` was written. */
static long differ(const call *c, const unsigned char *data, int64_t at, int from, int target,
                   int64_t count) {
    long wrong = 0;
    for (int64_t i = 0; i < count; i++)
        wrong += xd_load_f64(data, c->s->dtype, at + i) != program_value(c->s, from, target, i);
    return wrong;
}

static long written(const call *c, const unsigned char *data, int64_t end) {
    long count = 0;
    for (size_t i = (size_t)end * c->size; i < c->bytes; i++) count += data[i] != POISON;
    return count;
}

static long differ_reduced(const call *c, const unsigned char *data, int64_t begin, int64_t count) {
    const bool fast = c->stage->p.mode == XD_REDUCTION_FAST;
    long wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        double off = 0.0;
        const double want = program_reduced(c->s, c->members, c->n, begin + i, &off);
        const double got = xd_load_f64(data, c->s->dtype, i);
        wrong += fast ? !(fabs(got - want) <= off) : got != want;
    }
    return wrong;
}

static long differ_leaves(const call *c) {
    const int64_t total = program_leaf_total(c->s);
    long wrong = 0;
    for (int64_t i = 0; i < c->s->count; i++) {
        double want = program_tree(c->s, 0, total, i);
        if (c->s->op == XD_AVG && c->s->dtype == XD_DTYPE_F32)
            want = (double)((float)want * (1.0f / (float)total));
        else if (c->s->op == XD_AVG)
            want *= 1.0 / (double)total;
        wrong += xd_load_f64(c->recv, c->s->dtype, i) != want;
    }
    return wrong;
}

static long differ_blocks(const call *c, const int64_t *counts, int target) {
    long wrong = 0;
    int64_t at = 0;
    for (int r = 0; r < c->n; at += counts[r++])
        wrong += differ(c, c->recv, at, c->members[r], target, counts[r]);
    return wrong + written(c, c->recv, at);
}

/* How many elements are wrong, and bytes were written that nobody sent. */
static long compare(const call *c) {
    const program_step *s = c->s;
    const int root = s->root % c->n;
    const int64_t own = c->shared[c->place];
    const unsigned char *at_own = c->send + (size_t)c->begin * c->size;
    switch (s->kind) {
    case XD_COLLECTIVE_BROADCAST:
        return differ(c, c->recv, 0, c->members[root], 0, s->count) + written(c, c->recv, s->count);
    case XD_COLLECTIVE_ALL_REDUCE:
        if (c->in_place) return differ_reduced(c, c->send, 0, s->count) + written(c, c->send, s->count);
        return differ_reduced(c, c->recv, 0, s->count) + written(c, c->recv, s->count);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        if (c->in_place) return differ_reduced(c, at_own, c->begin, own);
        return differ_reduced(c, c->recv, c->begin, own) + written(c, c->recv, own);
    case XD_COLLECTIVE_ALL_GATHER: return differ_blocks(c, c->shared, 0);
    case XD_COLLECTIVE_GATHER:
        return c->place == root ? differ_blocks(c, c->shared, 0) : written(c, c->recv, 0);
    case XD_COLLECTIVE_SCATTER:
        return differ(c, c->recv, 0, c->members[root], c->place, own) + written(c, c->recv, own);
    case XD_COLLECTIVE_ALL_TO_ALL: return differ_blocks(c, c->in, c->place);
    case XD_COLLECTIVE_SEND:
        if (c->peer < 0 || c->place < c->peer) return written(c, c->recv, 0);
        return differ(c, c->recv, 0, c->members[c->peer], 0, s->count) + written(c, c->recv, s->count);
    case STEP_LEAVES: return differ_leaves(c) + written(c, c->recv, s->count);
    default: return 0;
    }
}

/* ---- tensors and meshes ---- */

static uint64_t draw_of(const call *c, int what) {
    return program_mix(c->s->seed, 1000 + (uint64_t)what);
}

/* A mesh of two axes over the world; the odd rank exchanges their names, or claims another size. */
static xd_result make_mesh(const call *c, program_fault fault, xd_mesh **out) {
    xd_mesh_desc d;
    int a = 1 + (int)(draw_of(c, 1) % (uint64_t)c->n);
    while (c->n % a) a--;
    memset(&d, 0, sizeof d);
    d.axes[0].name = fault == FAULT_COUNT ? "y" : "x";
    d.axes[0].size = a;
    d.axes[1].name = fault == FAULT_COUNT ? "x" : "y";
    d.axes[1].size = c->n / a;
    d.world_size = fault == FAULT_ARGUMENT ? c->n + 1 : c->n;
    return xd_mesh_create(c->world, &d, out);
}

/* Placements on both axes; `offsets` is memory for [2][PROGRAM_RANKS + 1]. Only whole numbers of a source are partial. */
static xd_layout_desc draw_layout(const call *c, const xd_topology *t, int which, int64_t *offsets) {
    xd_layout_desc d;
    bool split[3] = { false, false, false };
    memset(&d, 0, sizeof d);
    d.ndim = 1 + (int)(draw_of(c, 2) % 3);
    d.topology = t;
    for (int k = 0; k < d.ndim; k++) d.shape[k] = (int64_t)(draw_of(c, 3 + k) % 13);
    const bool whole = c->s->dtype == XD_DTYPE_I32 || c->s->dtype == XD_DTYPE_I64;
    for (int axis = 0; axis < 2; axis++, offsets += PROGRAM_RANKS + 1) {
        const uint64_t h = draw_of(c, 10 + 2 * which + axis);
        xd_placement *p = &d.placement[axis];
        d.order[axis] = axis;
        if (h % 4 == 0) continue;
        p->kind = h % 4 == 1 && whole && which == 0 ? XD_PARTIAL : XD_SHARD;
        p->op = XD_SUM;
        if (p->kind == XD_PARTIAL) continue;
        p->dim = (int)(h / 4 % (uint64_t)d.ndim);
        for (int r = 0; r <= t->size[axis]; r++)
            offsets[r] = program_cut(h, r, t->size[axis], d.shape[p->dim]);
        if (!split[p->dim] && h / 64 % 2 && axis == 1) p->offsets = offsets;
        split[p->dim] = true;
    }
    return d;
}

/* Which of how many terms of a partial value a rank holds. */
static int term_of(const xd_layout_desc *d, int rank, int *terms) {
    int at[XD_MESH_AXES_MAX], term = 0;
    *terms = 1;
    coordinate_of(d->topology, rank, at);
    for (int axis = 0; axis < 2; axis++) {
        if (d->placement[axis].kind != XD_PARTIAL) continue;
        term = term * d->topology->size[axis] + at[axis];
        *terms *= d->topology->size[axis];
    }
    return term;
}

/* Element `number` of the whole tensor; of a partial one, its terms sum to 1 + 2 + ... times that. */
static double whole_value(const call *c, int number) {
    return program_value(c->s, 0, 0, number);
}

static xd_tensor fill_source(const call *c, const xd_layout *layout) {
    static __thread int held[MODEL_NUMEL];
    const xd_layout_desc *d = xd_layout_settings(layout);
    const int me = xd_comm_rank(c->world), count = model_held(d, me, held);
    int terms = 1;
    const int term = term_of(d, me, &terms);
    for (int i = 0; i < count; i++)
        xd_store_f64(c->send, c->s->dtype, i, whole_value(c, held[i]) * (term + 1));
    return xd_tensor_view(layout, me, c->send, c->s->dtype);
}

static long differ_moved(const call *c, const xd_layout_desc *from, const xd_layout_desc *to) {
    static __thread int held[MODEL_NUMEL];
    const int me = xd_comm_rank(c->world), count = model_held(to, me, held);
    int terms = 1;
    long wrong = 0;
    term_of(from, me, &terms);
    for (int i = 0; i < count; i++)
        wrong += xd_load_f64(c->recv, c->s->dtype, i) != whole_value(c, held[i]) * (terms * (terms + 1) / 2);
    return wrong + written(c, c->recv, count);
}

static long differ_gathered(const call *c, const xd_layout_desc *from, const xd_interval *w) {
    int terms = 1;
    long wrong = 0;
    int64_t at = 0;
    if (c->place != c->s->root % c->n) return written(c, c->recv, 0);
    term_of(from, c->place, &terms);
    for (int64_t i = w[0].begin; i < w[0].end; i++)
        for (int64_t j = w[1].begin; j < w[1].end; j++)
            for (int64_t k = w[2].begin; k < w[2].end; k++, at++) {
                int64_t number = i;
                if (from->ndim > 1) number = number * from->shape[1] + j;
                if (from->ndim > 2) number = number * from->shape[2] + k;
                wrong += xd_load_f64(c->recv, c->s->dtype, at) !=
                         whole_value(c, (int)number) * (terms * (terms + 1) / 2);
            }
    return wrong + written(c, c->recv, at);
}

/* A window that may be empty; without one, everything. */
static bool draw_window(const call *c, const xd_layout_desc *d, xd_interval *w) {
    const bool all = draw_of(c, 20) % 3 == 0;
    for (int k = 0; k < 3; k++) {
        const int64_t extent = k < d->ndim ? d->shape[k] : 1, begin = (int64_t)(draw_of(c, 21 + k) % 4);
        w[k].begin = all || k >= d->ndim || begin > extent ? 0 : begin;
        w[k].end = all || k >= d->ndim ? extent : extent - (extent > w[k].begin ? begin % 2 : 0);
    }
    return !all;
}

static xd_result gather_tensor(call *c, const xd_layout *layout, program_fault fault, long *wrong) {
    const xd_layout_desc *d = xd_layout_settings(layout);
    const xd_tensor from = fill_source(c, layout);
    xd_interval w[3];
    const bool some = draw_window(c, d, w) || fault == FAULT_ARGUMENT;
    if (fault == FAULT_ARGUMENT) w[0].end = d->shape[0] + 1;
    const xd_result result = xd_tensor_gather(c->world, &from, some ? w : NULL, c->s->root % c->n, c->recv);
    if (result == XD_OK) *wrong = differ_gathered(c, d, w);
    return result;
}

static xd_result redistribute(call *c, const xd_layout *from, const xd_layout *to, program_fault fault,
                              long *wrong) {
    xd_tensor source = fill_source(c, from);
    xd_tensor target = xd_tensor_view(to, xd_comm_rank(c->world), c->recv, c->s->dtype);
    if (fault == FAULT_DTYPE) source.dtype = c->s->dtype == XD_DTYPE_I64 ? XD_DTYPE_I32 : XD_DTYPE_I64;
    if (fault == FAULT_DTYPE) target.dtype = source.dtype;
    if (fault == FAULT_ARGUMENT) source.ndim++;
    const xd_result result = xd_redistribute(c->world, &source, &target);
    if (result == XD_OK) *wrong = differ_moved(c, xd_layout_settings(from), xd_layout_settings(to));
    return result;
}

/* The three steps that need a mesh. */
static xd_result make_composed(call *c, program_fault fault, long *wrong) {
    int64_t offsets[2][2 * (PROGRAM_RANKS + 1)];
    xd_ctx *ctx = xd_comm_ctx(c->world);
    xd_mesh *mesh = NULL;
    xd_layout *from = NULL, *to = NULL;
    xd_comm *line = NULL;
    const bool here = c->s->kind == STEP_MESH;
    if (fault == FAULT_CALL) return xd_barrier(c->world);
    XD_TRY(make_mesh(c, here ? fault : FAULT_NONE, &mesh));
    const xd_topology *t = xd_mesh_topology(mesh);
    const xd_layout_desc d[2] = { draw_layout(c, t, 0, offsets[0]), draw_layout(c, t, 1, offsets[1]) };
    xd_result result = xd_mesh_group(mesh, "x", &line);
    if (result == XD_OK) *wrong = xd_comm_size(line) != t->size[0];
    if (result == XD_OK && !here) result = xd_layout_create(ctx, &d[0], &from);
    if (result == XD_OK && !here) result = xd_layout_create(ctx, &d[1], &to);
    if (result == XD_OK && c->s->kind == STEP_GATHER_TENSOR) result = gather_tensor(c, from, fault, wrong);
    if (result == XD_OK && c->s->kind == STEP_REDISTRIBUTE) result = redistribute(c, from, to, fault, wrong);
    xd_layout_destroy(to);
    xd_layout_destroy(from);
    xd_mesh_destroy(mesh);
    return result;
}

/* ---- making a call ---- */

static xd_result make_split(const call *c, long *wrong) {
    xd_comm *half = NULL;
    XD_TRY(xd_comm_split(c->comm, c->place % 2, -c->place, &half));
    *wrong = xd_comm_size(half) != (c->n + 1 - c->place % 2) / 2;
    *wrong += xd_comm_world_rank(half, xd_comm_rank(half)) != c->members[c->place];
    *wrong += xd_comm_world_rank(half, xd_comm_size(half) - 1) != c->members[c->place % 2];
    xd_comm_destroy(half);
    return XD_OK;
}

static xd_dtype other_dtype(const program_step *s) {
    const bool floats = s->kind == STEP_LEAVES || s->op == XD_AVG;
    if (floats) return s->dtype == XD_DTYPE_F32 ? XD_DTYPE_F64 : XD_DTYPE_F32;
    return s->dtype == XD_DTYPE_U8 ? XD_DTYPE_I32 : XD_DTYPE_U8;
}

static xd_reduce_op other_op(const program_step *s) {
    if (s->kind == STEP_LEAVES) return s->op == XD_SUM ? XD_AVG : XD_SUM;
    return s->op == XD_SUM ? XD_MAX : s->op == XD_AVG ? XD_SUM : s->op == XD_MAX ? XD_MIN : XD_MAX;
}

static xd_result make_leaves(call *c, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    xd_collective r;
    memset(&r, 0, sizeof r);
    r.kind = XD_COLLECTIVE_ALL_REDUCE;
    r.send = c->send;
    r.recv = c->recv;
    r.count = count;
    r.dtype = dtype;
    r.op = op;
    r.leaves = leaves_of(c);
    return xd_collective_run(c->comm, &r);
}

static xd_result make_message(const call *c, int64_t count, xd_dtype dtype) {
    if (c->peer < 0) return XD_OK;
    if (c->place < c->peer) return xd_send(c->comm, c->send, count, dtype, c->peer);
    return xd_recv(c->comm, c->recv, count, dtype, c->peer);
}

/* The call of a step, as this rank makes it. */
static xd_result make(call *c, program_fault fault, long *wrong) {
    const program_step *s = c->s;
    const xd_dtype dtype = fault == FAULT_DTYPE ? other_dtype(s) : s->dtype;
    const xd_reduce_op op = fault == FAULT_OP ? other_op(s) : s->op;
    const int root = (s->root + (fault == FAULT_ROOT ? 1 : 0)) % c->n, next = (c->place + 1) % c->n;
    const int64_t count = fault == FAULT_COUNT ? s->count + 1 : fault == FAULT_ARGUMENT ? -5 : s->count;
    unsigned char *at_own = c->send + (size_t)c->begin * c->size;
    if (fault == FAULT_COUNT) c->shared[next]++, c->out[next]++;
    if (fault == FAULT_ARGUMENT) c->shared[next] = c->out[next] = -5;
    if (s->kind >= STEP_REDISTRIBUTE) return make_composed(c, fault, wrong);
    if (fault == FAULT_CALL && s->kind != XD_COLLECTIVE_BARRIER) return xd_barrier(c->comm);
    switch (s->kind) {
    case XD_COLLECTIVE_BARRIER:
        return fault == FAULT_CALL ? xd_broadcast(c->comm, c->recv, 1, dtype, 0) : xd_barrier(c->comm);
    case XD_COLLECTIVE_BROADCAST: return xd_broadcast(c->comm, c->recv, count, dtype, root);
    case XD_COLLECTIVE_ALL_REDUCE:
        return xd_all_reduce(c->comm, c->send, c->in_place ? c->send : c->recv, count, dtype, op);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xd_reduce_scatter(c->comm, c->send, c->in_place ? at_own : c->recv, c->shared, dtype, op);
    case XD_COLLECTIVE_ALL_GATHER:
        return xd_all_gather(c->comm, c->in_place ? c->recv + (size_t)c->begin * c->size : c->send, c->recv,
                             c->shared, dtype);
    case XD_COLLECTIVE_ALL_TO_ALL: return xd_all_to_all(c->comm, c->send, c->out, c->recv, c->in, dtype);
    case XD_COLLECTIVE_GATHER: return xd_gather(c->comm, c->send, c->recv, c->shared, dtype, root);
    case XD_COLLECTIVE_SCATTER: return xd_scatter(c->comm, c->send, c->recv, c->shared, dtype, root);
    case XD_COLLECTIVE_SEND: return make_message(c, count, dtype);
    case XD_COLLECTIVE_AGREE:
        if (fault != FAULT_ARGUMENT) return xd_agree(c->comm, XD_OK);
        return xd_agree(c->comm, XD_FAIL(xd_comm_ctx(c->world), XD_ERROR_IO, "no disk"));
    case XD_COLLECTIVE_SPLIT: return make_split(c, wrong);
    default: return make_leaves(c, count, dtype, op);
    }
}

/* ---- faults ---- */

/* Whether the odd rank's fault of this step reaches this rank's call. */
static bool concerns(const call *c) {
    const program *p = &c->stage->p;
    if (p->fault == FAULT_NONE || c->s != &p->step[p->fault_step]) return false;
    if (c->s->kind == XD_COLLECTIVE_SEND)
        return c->members[c->place] == p->odd || (c->peer >= 0 && c->members[c->peer] == p->odd);
    for (int r = 0; r < c->n; r++)
        if (c->members[r] == p->odd) return true;
    return false;
}

static bool breaks(const program *p) {
    return p->fault >= FAULT_LEAVES;
}

static bool names_odd(const call *c) {
    char name[24];
    const xd_error *error = xd_last_error(xd_comm_ctx(c->world));
    snprintf(name, sizeof name, "%d", c->stage->p.odd);
    return strstr(error->message, "rank") && strstr(error->message, name);
}

/* The ranks that differ from rank 0 of the group are named, and it is unknown which end of a count of an all_to_all or of a
 * message is wrong. */
static void check_mismatch(const call *c, xd_result got) {
    const program *p = &c->stage->p;
    const bool pair = c->s->kind == XD_COLLECTIVE_SEND;
    const bool open = pair || (c->s->kind == XD_COLLECTIVE_ALL_TO_ALL && p->fault == FAULT_COUNT);
    const int culprit = open ? -1 : p->odd == c->members[0] ? c->members[1] : p->odd;
    expect(c->stage, c, got == XD_ERROR_MISMATCH, "not a mismatch");
    expect(c->stage, c, xd_last_error(xd_comm_ctx(c->world))->culprit == culprit, "another culprit");
    expect(c->stage, c, names_odd(c), "the odd rank is not named");
}

static void check_refused(const call *c, xd_result got) {
    const bool odd = c->members[c->place] == c->stage->p.odd;
    const bool own = got == XD_ERROR_ARGUMENT || got == XD_ERROR_SHAPE || got == XD_ERROR_IO;
    expect(c->stage, c, odd ? own : got == XD_ERROR_PEER, "not refused");
    if (!odd)
        expect(c->stage, c, xd_last_error(xd_comm_ctx(c->world))->culprit == c->stage->p.odd,
               "another culprit");
}

/* In a world that one rank breaks every call may fail, also one before its fault, but all name it; and so does every later
 * call. */
static void check_broken(const call *c, xd_result got) {
    const program *p = &c->stage->p;
    const xd_error *error = xd_last_error(xd_comm_ctx(c->world));
    const bool late = p->fault == FAULT_LATE && xd_comm_rank(c->world) != p->odd;
    expect(c->stage, c, got == XD_ERROR_PEER || (late && got == XD_ERROR_TIMEOUT), "another error");
    expect(c->stage, c, error->culprit == p->odd && names_odd(c), "another culprit");
    expect(c->stage, c, xd_barrier(c->world) == XD_ERROR_PEER && error->culprit == p->odd,
           "the world goes on");
}

static long untouched(const call *c) {
    const bool data = c->s->kind == XD_COLLECTIVE_BROADCAST && c->place == c->s->root % c->n;
    return data ? 0 : written(c, c->recv, 0);
}

/* The faulty form of a call; the group goes on unless it is broken. */
static xd_result play_fault(call *c) {
    const program *p = &c->stage->p;
    const bool odd = c->members[c->place] == p->odd;
    long wrong = 0;
    prepare(c, false);
    if (p->fault == FAULT_LATE && odd)
        while (__atomic_load_n(&c->stage->finished, __ATOMIC_ACQUIRE) + 1 < (uint32_t)p->ranks) sched_yield();
    if (p->fault == FAULT_LATE && !odd) looks = 0;
    const xd_result got = make(c, odd && !breaks(p) ? p->fault : FAULT_NONE, &wrong);
    looks = -1;
    if (breaks(p)) {
        expect(c->stage, c, got != XD_OK, "nobody was missed");
        return got;
    }
    expect(c->stage, c, untouched(c) == 0, "an output was written");
    if (p->fault == FAULT_ARGUMENT)
        check_refused(c, got);
    else
        check_mismatch(c, got);
    set_counts(c);
    return XD_OK;
}

/* ---- a rank ---- */

static bool open_call(call *c, stage *g, xd_comm *const *groups, int step) {
    const program_step *s = &g->p.step[step];
    const int64_t least = MODEL_NUMEL;
    c->stage = g;
    c->s = s;
    c->world = groups[0];
    c->comm = groups[s->group];
    c->n = program_members(&g->p, s->group, xd_comm_rank(c->world), c->members, &c->place);
    c->peer = -1;
    if (c->n == 0) return false;
    if (s->kind == XD_COLLECTIVE_SEND) program_pairs(&g->p, s, c->place, c->n, &c->peer);
    set_counts(c);
    int64_t most = c->total, sent = 0, received = 0;
    for (int r = 0; r < c->n; r++) sent += c->out[r], received += c->in[r];
    if (most < sent) most = sent;
    if (most < received) most = received;
    if (most < s->count * (s->kind == STEP_LEAVES ? 2 * PROGRAM_LEAVES : 1))
        most = s->count * (s->kind == STEP_LEAVES ? 2 * PROGRAM_LEAVES : 1);
    if (s->kind >= STEP_REDISTRIBUTE && most < least) most = least;
    c->size = xd_dtype_size(s->dtype);
    c->bytes = (size_t)(most + 4) * 8;
    c->send = (unsigned char *)malloc(c->bytes);
    c->recv = (unsigned char *)malloc(c->bytes);
    return c->send && c->recv;
}

/* XD_OK, or what broke the world. */
static xd_result play_step(call *c) {
    const bool odd = xd_comm_rank(c->world) == c->stage->p.odd;
    const bool faulty = concerns(c);
    long wrong = 0;
    expect(c->stage, c, xd_comm_size(c->comm) == c->n && xd_comm_rank(c->comm) == c->place, "another group");
    if (faulty) XD_TRY(play_fault(c));
    prepare(c, c->s->in_place);
    const xd_result result = make(c, FAULT_NONE, &wrong);
    if (result == XD_OK) expect(c->stage, c, wrong + compare(c) == 0, "wrong elements");
    if (result != XD_OK && !breaks(&c->stage->p))
        expect(c->stage, c, false, odd ? "the odd rank fails" : "fails");
    return result;
}

/* Whether this rank goes without a word before a step. */
static bool goes(const stage *g, xd_comm *world, int step) {
    const program *p = &g->p;
    const bool silent = p->fault == FAULT_LEAVES || p->fault == FAULT_FAILS;
    return silent && p->fault_step == step && xd_comm_rank(world) == p->odd;
}

static xd_result play_steps(stage *g, xd_comm *const *groups) {
    call c;
    xd_result result = XD_OK;
    memset(&c, 0, sizeof c);
    c.stage = g;
    c.world = groups[0];
    for (int i = 0; i < g->p.steps && result == XD_OK; i++) {
        if (goes(g, groups[0], i)) {
            if (g->p.fault == FAULT_LEAVES) return XD_OK;
            return XD_FAIL(xd_comm_ctx(groups[0]), XD_ERROR_DATA, "the odd rank has had enough");
        }
        c.send = c.recv = NULL;
        if (open_call(&c, g, groups, i)) result = play_step(&c);
        free(c.recv);
        free(c.send);
    }
    if (result == XD_OK) result = xd_barrier(groups[0]);
    if (breaks(&g->p))
        check_broken(&c, result);
    else
        expect(g, &c, result == XD_OK, "the world does not go on");
    return XD_OK;
}

static xd_result play_rank(xd_comm *world, void *argument) {
    stage *g = (stage *)argument;
    xd_comm *groups[PROGRAM_GROUPS] = { world };
    xd_result result = XD_OK;
    for (int i = 1; i < PROGRAM_GROUPS && groups[i - 1] && result == XD_OK; i++) {
        const int own = xd_comm_rank(groups[i - 1]);
        result = xd_comm_split(groups[i - 1], program_color(&g->p, i, own), program_key(&g->p, i, own),
                               &groups[i]);
    }
    if (result == XD_OK) result = xd_barrier(world); /* all groups are there before a rank can go */
    if (result == XD_OK) result = play_steps(g, groups);
    for (int i = PROGRAM_GROUPS - 1; i > 0; i--) xd_comm_destroy(groups[i]);
    __atomic_add_fetch(&g->finished, 1, __ATOMIC_ACQ_REL);
    return result;
}

/* How many ranks wait for the odd one. */
static uint32_t count_waiting(const program *p) {
    int members[PROGRAM_RANKS], place = 0;
    if (p->fault != FAULT_LATE) return 0;
    const program_step *s = &p->step[p->fault_step];
    const int n = program_members(p, s->group, p->odd, members, &place);
    return s->kind == XD_COLLECTIVE_SEND ? 1u : (uint32_t)n - 1u;
}

/* ---- a program ---- */

typedef struct tally {
    long programs, collectives, faults[FAULT_KINDS], failed;
} tally;

static bool play(uint64_t seed, int ranks, tally *t) {
    char message[256];
    stage *g = (stage *)node_memory(sizeof *g);
    g->p = program_of(seed, ranks);
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, &g->alive },
                               .clock = { patient_clock, NULL },
                               .reduction = g->p.mode };
    if (!patient) patient = (patience *)node_memory(sizeof *patient);
    patient->waiting = 0;
    patient->awaited = count_waiting(&g->p);
    snprintf(repeat_line, sizeof repeat_line, "test_comm_programs --seed %llu --ranks %d",
             (unsigned long long)seed, ranks);
    alarm(ALARM_SECONDS);
    const xd_result result = run_ranks(g->p.ranks, &desc, play_rank, g, message);
    const bool right = result == (g->p.fault == FAULT_FAILS ? XD_ERROR_DATA : XD_OK);
    if (!right) printf("the runner returns %s: %s\n", xd_result_name(result), message);
    if (g->alive != 0) printf("%lld blocks of memory are left\n", (long long)g->alive);
    alarm(0);
    t->programs++;
    t->collectives += g->p.steps;
    t->faults[g->p.fault]++;
    const bool fine = right && g->alive == 0 && g->failures == 0;
    munmap(g, sizeof *g);
    return fine;
}

/* ---- the same bits in worlds of every size ---- */

enum { WORLDS = 4, SUMS = 3, ROWS = 5, COLUMNS = 97, NORMED = 1200, SUMMED = 700 };

/* What no split may change, of one world; and the drawn work. */
typedef struct invariant {
    uint64_t seed;
    int64_t alive; /* atomic */
    program_step sum[SUMS];
    unsigned char sums[WORLDS][SUMS][SUMMED * 8];
    xd_gradient_norm norm[WORLDS];
    xd_loss_values loss[WORLDS];
    float gradient[WORLDS][ROWS * COLUMNS];
    int world; /* which is running */
    uint32_t failures;
} invariant;

static void draw_invariant(invariant *v, uint64_t seed) {
    memset(v, 0, sizeof *v);
    v->seed = seed;
    for (int i = 0; i < SUMS; i++) {
        v->sum[i].kind = STEP_LEAVES;
        v->sum[i].seed = program_mix(seed, (uint64_t)i);
        v->sum[i].dtype = i % 2 ? XD_DTYPE_F64 : XD_DTYPE_F32;
        v->sum[i].op = program_mix(seed, 50 + (uint64_t)i) % 2 ? XD_AVG : XD_SUM;
        v->sum[i].count = (int64_t)(program_mix(seed, 60 + (uint64_t)i) % (i == 0 ? 9 : SUMMED));
    }
}

static void expect_same(invariant *v, bool same, const char *what, int ranks) {
    if (same) return;
    if (__atomic_fetch_add(&v->failures, 1, __ATOMIC_RELAXED) < 3)
        printf("%s is not the same on %d ranks\n", what, ranks);
}

static xd_result sum_leaves(xd_comm *world, invariant *v, int i) {
    const program_step *s = &v->sum[i];
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    unsigned char *sums = (unsigned char *)calloc(SUMMED, 8);
    call c;
    memset(&c, 0, sizeof c);
    c.s = s;
    c.place = rank;
    c.n = ranks;
    c.comm = world;
    c.recv = sums;
    c.send = (unsigned char *)malloc((size_t)(2 * PROGRAM_LEAVES * SUMMED * 8));
    put_forest(&c);
    const xd_result result = make_leaves(&c, s->count, s->dtype, s->op);
    const size_t bytes = (size_t)s->count * xd_dtype_size(s->dtype);
    if (v->world == 0) memcpy(v->sums[0][i], sums, bytes);
    if (result == XD_OK) expect_same(v, memcmp(v->sums[0][i], sums, bytes) == 0, "a sum of leaves", ranks);
    free(c.send);
    free(sums);
    return result;
}

static float number_of(const invariant *v, int what, int64_t i) {
    const uint64_t h = program_mix(v->seed + (uint64_t)what, (uint64_t)i);
    return (float)ldexp((double)(int32_t)(h >> 32), (int)(h % 7) - 33);
}

static xd_result measure_norm(xd_comm *world, invariant *v) {
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const int64_t begin = program_cut(v->seed, rank, ranks, NORMED),
                  end = program_cut(v->seed, rank + 1, ranks, NORMED);
    float part[NORMED];
    xd_param param;
    xd_gradient_norm norm;
    xd_gradient_norm_desc d;
    memset(&param, 0, sizeof param);
    memset(&d, 0, sizeof d);
    for (int64_t i = begin; i < end; i++) part[i - begin] = 1e-3f * number_of(v, 1, i);
    param.name = "x";
    param.value = param.gradient = part;
    param.dtype = XD_DTYPE_F32;
    param.count = end - begin;
    d.params = &param;
    d.param_count = 1;
    d.max_norm = 1.0;
    memset(&norm, 0, sizeof norm);
    XD_TRY(xd_gradient_norm_compute(xd_comm_ctx(world), world, &d, &norm));
    if (v->world == 0) v->norm[0] = norm;
    const xd_gradient_norm *one = &v->norm[0];
    expect_same(v, memcmp(&one->norm, &norm.norm, sizeof norm.norm) == 0, "a norm", ranks);
    expect_same(v, one->coefficient == norm.coefficient, "a coefficient", ranks);
    return XD_OK;
}

/* A loss over a vocabulary that is split at random. */
static xd_result measure_loss(xd_comm *world, invariant *v) {
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const xd_interval columns = { program_cut(v->seed + 2, rank, ranks, COLUMNS),
                                  program_cut(v->seed + 2, rank + 1, ranks, COLUMNS) };
    const int64_t width = columns.end - columns.begin;
    float student[ROWS * COLUMNS], teacher[ROWS * COLUMNS], gradient[ROWS * COLUMNS];
    int64_t labels[ROWS];
    xd_vocab *vocab = NULL;
    xd_loss_values values;
    xd_loss_desc d;
    memset(&values, 0, sizeof values);
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < ROWS * width; i++) {
        const int64_t at = i / width * COLUMNS + columns.begin + i % width;
        student[i] = number_of(v, 3, at);
        teacher[i] = number_of(v, 4, at);
    }
    for (int r = 0; r < ROWS; r++) labels[r] = (int64_t)(program_mix(v->seed + 5, (uint64_t)r) % COLUMNS);
    XD_TRY(vocab_of(xd_comm_ctx(world), world, columns, COLUMNS, &vocab));
    d.vocab = vocab;
    d.hard_weight = 0.25;
    d.soft_weight = 0.75;
    d.divergence = (xd_divergence)(v->seed % 3);
    d.beta = 0.5;
    d.student = xd_rows_of(student, XD_DTYPE_F32, ROWS, width);
    d.teacher = xd_rows_of(teacher, XD_DTYPE_F32, ROWS, width);
    d.common.gradient = xd_rows_of(gradient, XD_DTYPE_F32, ROWS, width);
    d.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    const xd_result result = xd_loss(xd_comm_ctx(world), &d, &values);
    if (v->world == 0) v->loss[0] = values;
    expect_same(v, result != XD_OK || memcmp(&v->loss[0], &values, sizeof values) == 0, "a loss", ranks);
    for (int64_t i = 0; i < ROWS * width && result == XD_OK; i++)
        v->gradient[v->world][i / width * COLUMNS + columns.begin + i % width] = gradient[i];
    xd_vocab_destroy(vocab);
    return result;
}

static xd_result invariant_rank(xd_comm *world, void *argument) {
    invariant *v = (invariant *)argument;
    for (int i = 0; i < SUMS; i++) XD_TRY(sum_leaves(world, v, i));
    XD_TRY(measure_norm(world, v));
    return measure_loss(world, v);
}

static bool play_invariant(uint64_t seed, int ranks, tally *t) {
    invariant *v = (invariant *)node_memory(sizeof *v);
    uint64_t state = program_mix(seed, 19);
    bool right = true;
    draw_invariant(v, seed);
    for (v->world = 0; v->world < WORLDS; v->world++) {
        const int drawn = program_draw_ranks(&state), size = v->world == 0 ? 1 : ranks > 0 ? ranks : drawn;
        char message[256];
        const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, &v->alive },
                                   .clock = { patient_clock, NULL },
                                   .reduction = XD_REDUCTION_INVARIANT };
        alarm(ALARM_SECONDS);
        const bool ran = run_ranks(size, &desc, invariant_rank, v, message) == XD_OK;
        right = right && ran;
        if (message[0]) printf("%s\n", message);
        expect_same(v, memcmp(v->gradient[0], v->gradient[v->world], sizeof v->gradient[0]) == 0,
                    "a gradient", size);
        t->collectives += SUMS + 2;
    }
    alarm(0);
    t->programs++;
    const bool fine = right && v->alive == 0 && v->failures == 0;
    munmap(v, sizeof *v);
    return fine;
}

/* ---- the command line ---- */

/* Every eighth seed is a program that compares worlds. */
static void play_all(uint64_t seed, int64_t count, int ranks, tally *t) {
    signal(SIGALRM, say_and_exit);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t one = seed + (uint64_t)i;
        snprintf(repeat_line, sizeof repeat_line, "test_comm_programs --seed %llu --ranks %d",
                 (unsigned long long)one, ranks);
        if (one % 8 == 7 ? play_invariant(one, ranks, t) : play(one, ranks, t)) continue;
        printf("FAILED: %s\n", repeat_line);
        t->failed++;
    }
}

XD_TEST(random_programs_of_collectives_give_what_plain_loops_give) {
    tally t;
    memset(&t, 0, sizeof t);
    play_all(3560, 100, 0, &t);
    CHECK_EQ_INT(t.failed, 0);
    for (int f = 0; f < FAULT_KINDS; f++) CHECK(t.faults[f] > 0); /* every fault is in the sample */
}

XD_TEST(ranks_that_are_processes_do_the_same) {
    tally t;
    memset(&t, 0, sizeof t);
    as_processes = true;
    play_all(3560, 60, 0, &t);
    as_processes = false;
    CHECK_EQ_INT(t.failed, 0);
}

static int run_chosen(int argc, char **argv) {
    static const char *const names[FAULT_KINDS] = { "none",  "call",     "dtype",  "operation", "root",
                                                    "count", "argument", "leaves", "fails",     "late" };
    uint64_t seed = 0;
    int64_t count = 1;
    int ranks = 0;
    tally t;
    memset(&t, 0, sizeof t);
    for (int i = 1; i + 1 < argc; i += 2) {
        const long long value = atoll(argv[i + 1]);
        if (strcmp(argv[i], "--seed") == 0) seed = (uint64_t)value;
        if (strcmp(argv[i], "--count") == 0) count = value;
        if (strcmp(argv[i], "--processes") == 0) as_processes = value != 0;
        if (strcmp(argv[i], "--ranks") == 0) ranks = value >= 0 && value <= PROGRAM_RANKS ? (int)value : 0;
    }
    play_all(seed, count, ranks, &t);
    printf("%ld programs, %ld steps; faults:", t.programs, t.collectives);
    for (int f = 0; f < FAULT_KINDS; f++) printf(" %s %ld", names[f], t.faults[f]);
    printf("\n%ld passed, %ld failed, 0 skipped\n", t.programs - t.failed, t.failed);
    return t.failed > 0;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    if (argc > 1 && strncmp(argv[1], "--", 2) == 0) return run_chosen(argc, argv);
    return xd_test_main(argc, argv);
}
