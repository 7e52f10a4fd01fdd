/* Random programs of collectives: what a seed draws, which ranks are in which group, and every element that a rank sends or must
 * receive, from plain loops. Nothing here calls the library, except to round to a dtype. */
#ifndef COMM_PROGRAM_H
#define COMM_PROGRAM_H

#include "xd_test.h"
#include "xdistill.h"

#include <stdlib.h>

enum {
    PROGRAM_RANKS = 64,
    PROGRAM_STEPS = 10,
    PROGRAM_GROUPS = 3,
    PROGRAM_COUNT = 1500,
    PROGRAM_LEAVES = 24,
    PROGRAM_ELEMENTS = 12000
};

/* The kinds of the library up to SPLIT, then leaves, and calls that are made of several collectives. */
enum { STEP_LEAVES = XD_COLLECTIVE_SPLIT + 1, STEP_REDISTRIBUTE, STEP_GATHER_TENSOR, STEP_MESH, STEP_KINDS };

typedef enum program_fault {
    FAULT_NONE,
    FAULT_CALL,     /* another collective */
    FAULT_DTYPE,    /* another dtype, the next three the same */
    FAULT_OP,       /* */
    FAULT_ROOT,     /* */
    FAULT_COUNT,    /* */
    FAULT_ARGUMENT, /* one that the rank itself refuses; in agree, an error */
    FAULT_LEAVES,   /* returns XD_OK */
    FAULT_FAILS,    /* returns an error */
    FAULT_LATE,     /* comes when all others have gone */
    FAULT_KINDS
} program_fault;

typedef struct program_step {
    int kind, group, root;
    xd_dtype dtype;
    xd_reduce_op op;
    int64_t count; /* of an array, or the largest of the ranks' counts */
    bool in_place;
    uint64_t seed;
} program_step;

typedef struct program {
    uint64_t seed;
    int ranks, steps;
    xd_reduction mode;
    program_step step[PROGRAM_STEPS];
    int colors[PROGRAM_GROUPS]; /* of the split that makes each group from the one before it */
    program_fault fault;
    int fault_step, odd; /* world rank */
} program;

/* ---- numbers ---- */

static inline uint64_t program_mix(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The next number in [0, below). */
static inline int program_draw(uint64_t *state, int below) {
    *state = program_mix(*state, 1);
    return (int)((*state >> 11) % (uint64_t)below);
}

/* Element i that rank `from` has for rank `to`, after rounding to the dtype: floats use all bits, so that another order of
 * the additions gives other bits; 64 of the integers fit into every dtype but U8, which wraps. */
static inline double program_value(const program_step *s, int from, int to, int64_t i) {
    const uint64_t h = program_mix(program_mix(s->seed, (uint64_t)from * 64 + (uint64_t)to), (uint64_t)i);
    const bool floats = xd_dtype_is_floating(s->dtype);
    double rounded = 0.0;
    xd_store_f64(&rounded, s->dtype, 0,
                 floats ? ldexp((double)(int32_t)(h >> 32), (int)(h % 9) - 31) : (double)(h % 100));
    return xd_load_f64(&rounded, s->dtype, 0);
}

static inline double program_rounded(xd_dtype dtype, double x) {
    double rounded = 0.0;
    xd_store_f64(&rounded, dtype, 0, x);
    return xd_load_f64(&rounded, dtype, 0);
}

static inline bool program_is_narrow(xd_dtype dtype) {
    return xd_dtype_is_floating(dtype) && dtype != XD_DTYPE_F64;
}

/* The reduction of element i over `n` members: in rank order, in f32 for f32 and narrower types, rounded once; and how far a
 * FAST sum may be from it. */
static inline double program_reduced(const program_step *s, const int *members, int n, int64_t i,
                                     double *off) {
    const bool narrow = program_is_narrow(s->dtype);
    double sum = program_value(s, members[0], 0, i), size = fabs(sum);
    for (int r = 1; r < n; r++) {
        const double x = program_value(s, members[r], 0, i);
        size += fabs(x);
        if (s->op == XD_MAX || s->op == XD_MIN)
            sum = (s->op == XD_MAX) == (x > sum) ? x : sum;
        else
            sum = narrow ? (double)((float)sum + (float)x) : sum + x;
    }
    if (s->op == XD_AVG) sum = narrow ? (double)((float)sum * (1.0f / (float)n)) : sum * (1.0 / n);
    if (s->dtype == XD_DTYPE_U8) sum = fmod(sum, 256.0);
    const int bits = s->dtype == XD_DTYPE_BF16  ? 8
                     : s->dtype == XD_DTYPE_F16 ? 11
                     : s->dtype == XD_DTYPE_F32 ? 24
                                                : 53;
    *off = xd_dtype_is_floating(s->dtype) ? ldexp(size, 1 - bits) * n : 0.0;
    return program_rounded(s->dtype, sum);
}

/* ---- counts ---- */

/* What members[from] has for members[to], or in gathers what it has: uneven, often nothing. */
static inline int64_t program_count(const program_step *s, int from, int to) {
    const uint64_t h = program_mix(s->seed ^ 7, (uint64_t)from * 64 + (uint64_t)to);
    if (s->count == 0 || h % 4 == 0) return 0;
    return h % 4 == 1 ? s->count : (int64_t)((h >> 8) % (uint64_t)s->count);
}

/* Where rank `rank` of `ranks` begins when `total` things are cut at random places; the last one ends at total. */
static inline int64_t program_cut(uint64_t seed, int rank, int ranks, int64_t total) {
    int64_t cuts[PROGRAM_RANKS + 1] = { 0 };
    for (int r = 1; r < ranks; r++) {
        int at = r - 1;
        const int64_t cut = (int64_t)(program_mix(seed, (uint64_t)r) % (uint64_t)(total + 1));
        for (; at > 0 && cuts[at] > cut; at--) cuts[at + 1] = cuts[at];
        cuts[at + 1] = cut;
    }
    return rank == ranks ? total : cuts[rank];
}

static inline xd_leaves program_leaves(uint64_t seed, int rank, int ranks, int64_t total) {
    const int64_t first = program_cut(seed, rank, ranks, total);
    const xd_leaves leaves = { first, program_cut(seed, rank + 1, ranks, total) - first, total };
    return leaves;
}

/* Element i of the node [lo, hi) of the canonical tree. */
static inline double program_tree(const program_step *s, int64_t lo, int64_t hi, int64_t i) {
    if (hi - lo == 1) return program_value(s, (int)lo, 1, i);
    int64_t half = 1;
    while (half * 2 < hi - lo) half *= 2;
    const double a = program_tree(s, lo, lo + half, i), b = program_tree(s, lo + half, hi, i);
    return s->dtype == XD_DTYPE_F32 ? (double)((float)a + (float)b) : a + b;
}

static inline int64_t program_leaf_total(const program_step *s) {
    return 1 + (int64_t)(program_mix(s->seed, 3) % PROGRAM_LEAVES);
}

/* ---- groups ---- */

static inline int program_color(const program *p, int group, int rank) {
    const int color = (int)(program_mix(p->seed ^ 11, (uint64_t)(group * 64 + rank)) % 64);
    return color == 63 ? -1 : color % p->colors[group]; /* now and then a rank that joins nobody */
}

static inline int program_key(const program *p, int group, int rank) {
    return (int)(program_mix(p->seed ^ 13, (uint64_t)(group * 64 + rank)) % 5) - 2;
}

/* World ranks of the group that contains the world rank `me`, in group order, and its place in it; 0 when it is in none. */
static inline int program_members(const program *p, int group, int me, int *members, int *place) {
    int parents[PROGRAM_RANKS], own = 0, count = 0;
    if (group == 0) {
        for (int r = 0; r < p->ranks; r++) members[r] = r;
        *place = me;
        return p->ranks;
    }
    const int parent_count = program_members(p, group - 1, me, parents, &own);
    if (parent_count == 0 || program_color(p, group, own) < 0) return 0;
    for (int key = -2; key <= 2; key++)
        for (int r = 0; r < parent_count; r++) {
            if (program_color(p, group, r) != program_color(p, group, own)) continue;
            if (program_key(p, group, r) != key) continue;
            if (r == own) *place = count;
            members[count++] = parents[r];
        }
    return count;
}

/* ---- a seed's program ---- */

static inline int program_draw_ranks(uint64_t *state) {
    const int kind = program_draw(state, 40);
    if (kind < 22) return 2 + program_draw(state, 5);
    if (kind < 34) return 7 + program_draw(state, 10);
    return kind < 38 ? 17 + program_draw(state, 24) : 41 + program_draw(state, 24);
}

static inline bool program_allows(xd_reduction mode, xd_dtype dtype, xd_reduce_op op) {
    if (!xd_dtype_is_floating(dtype)) return op != XD_AVG;
    return mode != XD_REDUCTION_INVARIANT || op == XD_MAX || op == XD_MIN;
}

static inline program_step program_draw_step(const program *p, uint64_t *state) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                       XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };
    static const int most[] = { 1, 4, 60, 600, PROGRAM_COUNT };
    program_step s;
    memset(&s, 0, sizeof s);
    s.kind = 1 + program_draw(state, STEP_KINDS - 1);
    if (s.kind == XD_COLLECTIVE_RECV) s.kind = XD_COLLECTIVE_SEND; /* both ends are one step */
    s.seed = program_mix(*state, 5);
    s.group = s.kind >= STEP_REDISTRIBUTE ? 0 : program_draw(state, PROGRAM_GROUPS);
    s.root = program_draw(state, PROGRAM_RANKS);
    s.count = program_draw(state, most[program_draw(state, 5)] + 1);
    s.in_place = program_draw(state, 4) == 0;
    do {
        s.dtype = dtypes[program_draw(state, s.kind == STEP_LEAVES ? 2 : 7)];
        s.op = (xd_reduce_op)program_draw(state, 4);
        if (s.kind == STEP_LEAVES) s.op = s.op % 2 ? XD_AVG : XD_SUM;
    } while (s.kind != STEP_LEAVES && !program_allows(p->mode, s.dtype, s.op));
    return s;
}

/* Whether a fault means something in a step; FAULT_LATE and those that leave always do. */
static inline bool program_fits(const program_step *s, program_fault fault) {
    const int k = s->kind;
    const bool moves = k >= XD_COLLECTIVE_BROADCAST && k <= XD_COLLECTIVE_SCATTER;
    const bool reduces =
        k == XD_COLLECTIVE_ALL_REDUCE || k == XD_COLLECTIVE_REDUCE_SCATTER || k == STEP_LEAVES;
    switch (fault) {
    case FAULT_CALL: return k != XD_COLLECTIVE_SEND;
    case FAULT_DTYPE: return moves || k == XD_COLLECTIVE_SEND || k == STEP_LEAVES || k == STEP_REDISTRIBUTE;
    case FAULT_OP: return reduces;
    case FAULT_ROOT:
        return k == XD_COLLECTIVE_BROADCAST || k == XD_COLLECTIVE_GATHER || k == XD_COLLECTIVE_SCATTER;
    case FAULT_COUNT: return moves || k == XD_COLLECTIVE_SEND || k == STEP_LEAVES || k == STEP_MESH;
    case FAULT_ARGUMENT: return k != XD_COLLECTIVE_BARRIER && k != XD_COLLECTIVE_SPLIT;
    default: return true;
    }
}

static inline bool program_pairs(const program *p, const program_step *s, int place, int n, int *peer);

/* A rank that is not alone in the group of the step, and in a message one that has a peer. */
static inline void program_draw_fault(program *p, uint64_t *state) {
    int members[PROGRAM_RANKS], place = 0, peer = 0;
    p->fault_step = program_draw(state, p->steps);
    p->odd = program_draw(state, p->ranks);
    p->fault = (program_fault)(1 + program_draw(state, FAULT_KINDS - 1));
    const program_step *s = &p->step[p->fault_step];
    const int n = program_members(p, s->group, p->odd, members, &place);
    const bool alone = n < 2 || (s->kind == XD_COLLECTIVE_SEND && !program_pairs(p, s, place, n, &peer));
    if (alone || !program_fits(s, p->fault)) p->fault = FAULT_NONE;
}

/* Who exchanges a message with whom: members in a drawn order, two and two. */
static inline bool program_pairs(const program *p, const program_step *s, int place, int n, int *peer) {
    int order[PROGRAM_RANKS], at = 0;
    uint64_t state = s->seed ^ p->seed;
    for (int i = 0; i < n; i++) order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        const int j = program_draw(&state, i + 1), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    while (order[at] != place) at++;
    *peer = at % 2 ? order[at - 1] : at + 1 < n ? order[at + 1] : -1;
    return *peer >= 0;
}

/* The program of a seed. `ranks` 0: drawn. Four in ten have a fault. */
static inline program program_of(uint64_t seed, int ranks) {
    program p;
    memset(&p, 0, sizeof p);
    uint64_t state = program_mix(seed, 17);
    p.seed = seed;
    p.ranks = program_draw_ranks(&state);
    if (ranks > 0) p.ranks = ranks;
    p.mode = (xd_reduction)program_draw(&state, 3);
    p.steps = 3 + program_draw(&state, PROGRAM_STEPS - 2);
    for (int g = 1; g < PROGRAM_GROUPS; g++) p.colors[g] = 1 + program_draw(&state, 3);
    for (int i = 0; i < p.steps; i++) {
        p.step[i] = program_draw_step(&p, &state);
        if (p.step[i].count * p.ranks > PROGRAM_ELEMENTS) p.step[i].count %= PROGRAM_ELEMENTS / p.ranks;
    }
    for (int i = 0; i < 40 && p.fault == FAULT_NONE && seed % 5 < 2; i++) program_draw_fault(&p, &state);
    return p;
}

#endif
