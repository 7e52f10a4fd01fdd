/* poison.h - numbers that no training run should hold, in every numeric input of a call.
 *
 * A family describes one public call: how to build a small problem for it, how to call it, and how to leave one unit out of
 * it (a row, a chunk, a sample: what the call's comment names as the reach of a bad number). The harness then puts each
 * value into one element of each input, once with that unit counted and once without, and compares the results with those of
 * the same problem without the value:
 *
 *   left out   nothing differs by a bit, and the status is clean
 *   FOUND      the status (or the error) tells it; all results are those of the call with the unit left out
 *   FINE       all results are finite, and those of other units are what they were
 *   EITHER     one of these two: the size of the value decides
 *   IGNORED    the call does not read it: results are those of the clean call
 *   REFUSED    ARGUMENT, outputs untouched
 *   CALL       one value for the whole call: every result is finite, and when every row is a finding all are zero
 *   LEGAL      as CALL, and infinity is no finding
 *   NORM       what is not finite is counted in the status; the other results are finite
 *   GONE       of a call that reports nothing: all results are those of the call with the unit left out
 *   ALONE      of a call that reports nothing: other units are what they were, this one's results may be anything
 *
 * Every rank runs all cases in the same order and compares its own results; then the ranks compare theirs.
 *
 * A program sets poison_all.backend where contexts compute on a device instead of the CPU's levels (tests/cuda).
 * */
#ifndef XD_POISON_H
#define XD_POISON_H

#include <pthread.h>
#include <stdlib.h>

#include "xd_test.h"
#include "xdistill.h"

enum { POISON_PARTS = 48, POISON_RANKS = 3, POISON_BLOCK = 1 << 20, POISON_WAYS = 5, POISON_KINDS = 512 };

/* How ranks share a problem. */
typedef enum poison_layout {
    POISON_ALONE_RANK = 0,
    POISON_VOCABULARY, /* each has a third of the columns */
    POISON_ROWS_SPLIT, /* each has rows of its own; the value is in rank 1's */
    POISON_LAYOUTS
} poison_layout;

typedef enum poison_verdict {
    POISON_FINE = 0,
    POISON_FOUND,
    POISON_EITHER,
    POISON_IGNORED,
    POISON_REFUSED,
    POISON_CALL,
    POISON_ALONE,
    POISON_LEGAL,
    POISON_NORM,
    POISON_GONE,
    POISON_SKIP /* the value cannot be stored there, or says nothing */
} poison_verdict;

/* What a part of the problem is. */
enum {
    POISON_IN = 1,  /* [rows, cols] numbers that the call reads; a row belongs to a unit */
    POISON_ONE = 2, /* with IN: one value of the whole call */
    POISON_OUT = 4, /* [rows, cols] results of units */
    POISON_TOTAL =
        8, /* results of the whole call: with a finding, those of the call with the unit left out */
    POISON_SAME = 16,  /* on all ranks */
    POISON_LOOSE = 32, /* not the same with and without the unit: counts */
    POISON_LOG = 64,   /* logarithms of probabilities: -infinity is a result */
    POISON_OWN = 128   /* with OUT: also computed for units that are left out */
};

typedef struct poison_part {
    const char *name;
    int role;
    void *data;
    xd_dtype dtype;
    int64_t rows, cols, stride; /* elements of this rank */
    int64_t first, width;       /* the first of its columns among those of all ranks */
    const int *unit;            /* [rows] whose row it is, -1: nobody's; NULL -> the row's number */
} poison_part;

typedef struct poison_family poison_family;

/* One rank's problem. Everything that a call reads or writes is in the block, so a copy of the block restores it. */
typedef struct poison_scene {
    const poison_family *family;
    int variant;
    poison_layout layout;
    xd_ctx *ctx;
    xd_comm *world; /* of all ranks */
    xd_comm *data;  /* for ROWS_SPLIT, else NULL */
    int rank, ranks;
    unsigned char *block, *fresh, *clean, *left_out[POISON_WAYS];
    bool has_clean, has_left_out[POISON_WAYS];
    xd_result clean_result, left_out_result[POISON_WAYS];
    size_t used;
    poison_part parts[POISON_PARTS];
    int part_count;
    int unit; /* into which the value goes */
    int row; /* where the call may tell a row instead, e.g. of a chunk: that, or when spread a later one; else 0 */
    bool wide;         /* a choice of columns depends on the numbers of a unit, and all others on that */
    bool spread;       /* rows of the unit are on every rank */
    bool weighed;      /* so do weights of teachers, from the units that have no finding */
    xd_status *status; /* in the block, or NULL: the call reports by its result alone */
    bool *reported;    /* in the block: the call passes the status; else findings come back as DATA */
    xd_result result;
    void *own;     /* the family's descs, in the block */
    void *objects; /* what release frees */
    int64_t size;  /* of the vocabulary; 0: small */
    bool compound; /* objects is a struct that begins with the vocabulary, else the vocabulary */
} poison_scene;

struct poison_family {
    const char *name; /* of the public function */
    int variants, ways;
    bool layouts[POISON_LAYOUTS];
    /* Fills the block with a variant's problem; false: there is none for these ranks, this level or this mode. */
    bool (*build)(poison_scene *s);
    xd_result (*call)(poison_scene *s);
    void (*leave_out)(poison_scene *s, int way);
    poison_verdict (*expect)(const poison_scene *s, const poison_part *part, double value);
    void (*release)(poison_scene *s);
    /* The way in which a finding of the part leaves the unit out, -1: in none exactly; NULL -> 0. */
    int (*found_way)(const poison_scene *s, const poison_part *part);
};

/* ---- building ---- */

static inline void *poison_take(poison_scene *s, size_t bytes) {
    void *at = s->block + s->used;
    s->used += (bytes + 63) / 64 * 64;
    if (s->used > POISON_BLOCK) {
        fprintf(stderr, "%s: the block is too small\n", s->family->name);
        abort();
    }
    return at;
}

/* A number in [-1, 1) that depends on its place alone. */
static inline double poison_noise(uint64_t seed, int64_t row, int64_t col) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + (uint64_t)row * 1000003u + (uint64_t)col * 7919u + 1u;
    x ^= x >> 31, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 29, x *= 0x94d049bb133111ebu, x ^= x >> 32;
    return (double)(x >> 11) / 4503599627370496.0 - 1.0;
}

static inline poison_part *poison_add(poison_scene *s, const char *name, int role, void *data,
                                      xd_dtype dtype) {
    poison_part *part = s->parts + s->part_count++;
    memset(part, 0, sizeof *part);
    if (s->part_count > POISON_PARTS) abort();
    part->name = name;
    part->role = role;
    part->data = data;
    part->dtype = dtype;
    part->rows = part->cols = part->width = part->stride = 1;
    return part;
}

/* A matrix of rows of units. */
static inline poison_part *poison_matrix(poison_scene *s, const char *name, int role, xd_dtype dtype,
                                         int64_t rows, int64_t cols) {
    void *data = poison_take(s, (size_t)(rows * cols) * xd_dtype_size(dtype) + 64);
    poison_part *part = poison_add(s, name, role, data, dtype);
    part->rows = rows;
    part->cols = part->width = part->stride = cols;
    for (int64_t i = 0; i < rows * cols && !(role & POISON_IN); i++) xd_store_f64(data, dtype, i, 7.0);
    return part;
}

/* This rank's columns of a matrix of `width` columns. */
static inline poison_part *poison_shard(poison_scene *s, const char *name, int role, xd_dtype dtype,
                                        int64_t rows, xd_interval columns, int64_t width) {
    poison_part *part = poison_matrix(s, name, role, dtype, rows, columns.end - columns.begin);
    part->first = columns.begin;
    part->width = width;
    return part;
}

/* Noise of this size around `middle`, the same for every split of the columns. */
static inline void poison_fill(poison_part *part, uint64_t seed, double middle, double size) {
    for (int64_t r = 0; r < part->rows; r++)
        for (int64_t c = 0; c < part->cols; c++)
            xd_store_f64(part->data, part->dtype, r * part->stride + c,
                         middle + size * poison_noise(seed, r, part->first + c));
}

static inline xd_rows poison_rows(const poison_part *part) {
    xd_rows rows = { part->data, part->dtype, part->rows, part->cols, part->stride };
    return rows;
}

/* One value that the block holds. */
static inline poison_part *poison_one(poison_scene *s, const char *name, int role, double *value) {
    return poison_add(s, name, role, value, XD_DTYPE_F64);
}

static inline poison_part *poison_totals(poison_scene *s, const xd_loss_values *values) {
    poison_one(s, "loss", POISON_TOTAL | POISON_SAME, (double *)&values->loss);
    poison_one(s, "hard", POISON_TOTAL | POISON_SAME, (double *)&values->hard);
    poison_one(s, "soft", POISON_TOTAL | POISON_SAME, (double *)&values->soft);
    return poison_add(s, "counted", POISON_TOTAL | POISON_SAME | POISON_LOOSE, (void *)&values->counted,
                      XD_DTYPE_I64);
}

/* ---- where contexts compute ---- */

/* A device. Scenes stay in host memory: the back end brings them to the device for the length of each call. */
typedef struct poison_backend {
    const char *name;
    bool (*serves)(const poison_family *family);
    void (*begin)(
        poison_scene *s); /* this rank's context computes there until `end`; called on the rank's thread */
    void (*end)(poison_scene *s);
    /* What is asked on the device, where the family asks for `verdict`. */
    poison_verdict (*expect)(const poison_scene *s, bool reported, poison_verdict verdict);
} poison_backend;

/* ---- what was found ---- */

/* Violations of one kind, over all levels, modes and ranks. */
typedef struct poison_kind {
    char key[160], example[256];
    long count;
} poison_kind;

static struct {
    pthread_barrier_t barrier;
    poison_kind kinds[POISON_KINDS];
    int kind_count;
    long calls, cases, violations;
    poison_scene *scenes[POISON_RANKS];
    const char *level, *mode;
    const poison_backend *backend; /* NULL: the CPU */
} poison_all;
static pthread_mutex_t poison_lock = PTHREAD_MUTEX_INITIALIZER; /* of the violations */

/* The case at hand, of one rank. */
typedef struct poison_case {
    const poison_part *part;
    double value;
    int way; /* -1: the unit counts */
    bool reported;
} poison_case;

static inline void poison_violation(const poison_scene *s, const poison_case *at, const char *what,
                                    const poison_part *where, double found) {
    static const char *const layouts[] = { "1 rank", "3 ranks of the vocabulary", "3 ranks of rows" };
    char key[160];
    snprintf(key, sizeof key, "%s[%d] %s%s: %s%s%s", s->family->name, s->variant, at->part->name,
             at->way < 0 ? "" : ", left out", what, where ? " " : "", where ? where->name : "");
    pthread_mutex_lock(&poison_lock);
    int i = 0;
    while (i < poison_all.kind_count && strcmp(poison_all.kinds[i].key, key)) i++;
    if (i < POISON_KINDS) {
        poison_kind *kind = poison_all.kinds + i;
        if (i == poison_all.kind_count) {
            poison_all.kind_count++;
            snprintf(kind->key, sizeof kind->key, "%s", key);
            snprintf(kind->example, sizeof kind->example,
                     "value %g, way %d, %s, %s, %s, rank %d, status %s: %g", at->value, at->way,
                     poison_all.level, poison_all.mode, layouts[s->layout], s->rank,
                     at->reported ? "given" : "NULL", found);
        }
        kind->count++;
    }
    poison_all.violations++;
    pthread_mutex_unlock(&poison_lock);
    xd_test_fail();
}

/* ---- comparing ---- */

static inline int poison_unit_of(const poison_part *part, int64_t row) {
    return part->unit ? part->unit[row] : (int)row;
}

static inline const unsigned char *poison_in(const poison_scene *s, const unsigned char *block,
                                             const poison_part *part, int64_t element) {
    const size_t size = xd_dtype_size(part->dtype);
    return block + ((const unsigned char *)part->data - s->block) + (size_t)element * size;
}

static inline double poison_at(const poison_scene *s, const unsigned char *block, const poison_part *part,
                               int64_t element) {
    return xd_load_f64(poison_in(s, block, part, 0), part->dtype, element);
}

/* Are the outputs those of `other`? `units`: 0 all rows, 1 all but the unit's. */
static inline void poison_same(const poison_scene *s, const poison_case *at, const unsigned char *other,
                               int roles, int units, const char *what) {
    for (int p = 0; p < s->part_count; p++) {
        const poison_part *part = s->parts + p;
        const bool mine =
            s->layout != POISON_ROWS_SPLIT || s->rank == 1 || s->spread || part->role & POISON_SAME;
        if (!(part->role & roles) ||
            (part->role & POISON_LOOSE && at->way < 0 && other != s->clean && other != s->fresh))
            continue;
        for (int64_t r = 0; r < part->rows; r++) {
            const bool spared = units == 1 || (part->role & POISON_OWN);
            if (spared && (part->role & POISON_OUT) && mine && poison_unit_of(part, r) == s->unit) continue;
            for (int64_t c = 0; c < part->cols; c++) {
                const int64_t e = r * part->stride + c;
                if (memcmp(poison_in(s, s->block, part, e), poison_in(s, other, part, e),
                           xd_dtype_size(part->dtype)) == 0)
                    continue;
                poison_violation(s, at, what, part, poison_at(s, s->block, part, e));
                r = part->rows - 1;
                break;
            }
        }
    }
}

/* Whether an element passes a test of its own. */
typedef bool (*poison_test)(const poison_scene *s, const poison_part *part, int64_t element);

static inline bool poison_is_finite(const poison_scene *s, const poison_part *part, int64_t element) {
    const double value = poison_at(s, s->block, part, element);
    return isfinite(value) || (part->role & POISON_LOG && value < 0.0);
}

static inline bool poison_is_agreed(const poison_scene *s, const poison_part *part, int64_t element) {
    const poison_scene *first = poison_all.scenes[0];
    const poison_part *theirs = first->parts + (part - s->parts);
    return memcmp(poison_in(s, s->block, part, element), poison_in(first, first->block, theirs, element),
                  xd_dtype_size(part->dtype)) == 0;
}

/* Every element of the parts with one of these roles. */
static inline void poison_every(const poison_scene *s, const poison_case *at, int roles, poison_test test,
                                const char *what) {
    for (int p = 0; p < s->part_count; p++) {
        const poison_part *part = s->parts + p;
        bool failed = false;
        for (int64_t e = 0; e < part->rows * part->cols && (part->role & roles) && !failed; e++) {
            const int64_t element = e / part->cols * part->stride + e % part->cols;
            failed = !test(s, part, element);
            if (failed) poison_violation(s, at, what, part, poison_at(s, s->block, part, element));
        }
    }
}

static inline void poison_finite(const poison_scene *s, const poison_case *at) {
    poison_every(s, at, POISON_OUT | POISON_TOTAL, poison_is_finite, "not finite:");
}

/* The same results on all ranks? */
static inline void poison_agreed(const poison_scene *s, const poison_case *at) {
    const poison_scene *first = poison_all.scenes[0];
    const bool other = s->layout == POISON_ROWS_SPLIT; /* one rank refuses, the others are told that it did */
    if (other ? (s->result == XD_OK) != (first->result == XD_OK) : s->result != first->result)
        poison_violation(s, at, "ranks return different results", NULL, (double)s->result);
    if (s->status && memcmp(s->status, first->status, sizeof *s->status) != 0)
        poison_violation(s, at, "ranks have different statuses", NULL, (double)s->status->not_finite);
    poison_every(s, at, POISON_SAME, poison_is_agreed, "ranks differ in");
}

/* ---- one case ---- */

static inline void poison_meet(const poison_scene *s) {
    if (s->ranks > 1) pthread_barrier_wait(&poison_all.barrier);
}

/* Number of findings in the status. */
static inline int64_t poison_findings(const poison_scene *s) {
    if (!s->status) return s->result == XD_ERROR_DATA;
    if (!*s->reported) return s->result == XD_ERROR_DATA;
    return s->status->not_finite + s->status->label_out_of_range + s->status->overflow;
}

static inline int poison_found_way(const poison_scene *s, const poison_part *part) {
    if (s->wide) return -1;
    return s->family->found_way ? s->family->found_way(s, part) : 0;
}

/* `exactly`: the whole unit is left out; else perhaps one of several losses of it. */
static inline void poison_judge_finding(const poison_scene *s, const poison_case *at, bool exactly) {
    const int way = poison_found_way(s, at->part);
    const xd_status *status = s->status;
    if (status && *s->reported && s->result != XD_OK)
        poison_violation(s, at, "a finding makes the call fail", NULL, (double)s->result);
    if (status && *s->reported && status->first_row != s->unit &&
        (!s->row || (s->spread ? status->first_row < s->row : status->first_row != s->row)))
        poison_violation(s, at, "first_row of the status is another", NULL, (double)status->first_row);
    if (status && *s->reported && !isfinite(at->value) && status->first_value < 1e6 &&
        isfinite(status->first_value))
        poison_violation(s, at, "first_value of the status is an innocent number", NULL, status->first_value);
    const bool told = status ? *s->reported : s->result == XD_OK;
    if (way < 0 || (!exactly && s->family->found_way)) {
        if (told) poison_finite(s, at);
        if (!s->wide && !s->weighed) poison_same(s, at, s->clean, POISON_OUT, 1, "other units differ in");
        return;
    }
    poison_same(s, at, s->left_out[way], told ? POISON_OUT | POISON_TOTAL : POISON_OUT, 0,
                "with a finding, not as if left out:");
    if (!told) poison_same(s, at, s->fresh, POISON_TOTAL, 0, "the call fails, but writes");
}

static inline void poison_judge_fine(const poison_scene *s, const poison_case *at) {
    if (s->result != XD_OK) {
        poison_violation(s, at, "a result that is not OK", NULL, (double)s->result);
        return;
    }
    poison_finite(s, at);
    if (!s->wide && !s->weighed) poison_same(s, at, s->clean, POISON_OUT, 1, "other units differ in");
}

static inline void poison_judge_call(const poison_scene *s, const poison_case *at, bool legal) {
    const int64_t findings = poison_findings(s);
    if (s->result == XD_ERROR_ARGUMENT || s->result == XD_ERROR_PEER) {
        poison_same(s, at, s->fresh, POISON_OUT | POISON_TOTAL, 0, "refused, but it wrote");
    } else if (s->result == XD_ERROR_DATA && (!s->status || !*s->reported)) {
        return;
    } else if (s->result != XD_OK) {
        poison_violation(s, at, "a result that is neither OK nor ARGUMENT", NULL, (double)s->result);
    } else {
        poison_finite(s, at);
        if (!legal && !isfinite(at->value) && findings == 0)
            poison_violation(s, at, "nobody told", NULL, at->value);
    }
}

static inline void poison_judge(const poison_scene *s, const poison_case *at, poison_verdict verdict) {
    const int64_t findings = poison_findings(s);
    if (at->way >= 0) {
        if (findings) poison_violation(s, at, "a finding of what does not count", NULL, (double)findings);
        poison_same(s, at, s->left_out[at->way], POISON_OUT | POISON_TOTAL, 0, "it changes");
        return;
    }
    switch (verdict) {
    case POISON_FOUND:
        if (!findings) poison_violation(s, at, "nobody told", NULL, at->value);
        poison_judge_finding(s, at, true);
        break;
    case POISON_EITHER:
        if (findings)
            poison_judge_finding(s, at, false);
        else
            poison_judge_fine(s, at);
        break;
    case POISON_FINE:
        if (findings) poison_violation(s, at, "a finding of a legal number", NULL, at->value);
        poison_judge_fine(s, at);
        break;
    case POISON_IGNORED:
        if (findings) poison_violation(s, at, "a finding of what is not read", NULL, at->value);
        poison_same(s, at, s->clean, POISON_OUT | POISON_TOTAL, 0, "not read, but it changes");
        break;
    case POISON_REFUSED:
        if (s->result != XD_ERROR_ARGUMENT && (s->layout != POISON_ROWS_SPLIT || s->result != XD_ERROR_PEER))
            poison_violation(s, at, "not refused", NULL, (double)s->result);
        poison_same(s, at, s->fresh, POISON_OUT | POISON_TOTAL, at->part->role & POISON_OUT ? 1 : 0,
                    "refused, but it wrote");
        break;
    case POISON_NORM:
        if (*s->reported && (findings > 0) == (isfinite(at->value) != 0))
            poison_violation(s, at, "not counted, or a finding of a number", NULL, at->value);
        poison_finite(s, at);
        break;
    case POISON_GONE:
        poison_same(s, at, s->left_out[0], POISON_OUT | POISON_TOTAL, 0, "not as if left out:");
        break;
    case POISON_CALL:
    case POISON_LEGAL: poison_judge_call(s, at, verdict == POISON_LEGAL); break;
    default: poison_same(s, at, s->clean, POISON_OUT, 1, "other units differ in"); break;
    }
}

static inline void poison_run_call(poison_scene *s) {
    s->result = s->family->call(s);
    __atomic_fetch_add(&poison_all.calls, 1, __ATOMIC_RELAXED);
}

/* The call without the value, with its unit or without. */
static inline void poison_reference(poison_scene *s, int way) {
    unsigned char *to = way < 0 ? s->clean : s->left_out[way];
    const poison_case at = { s->parts, 0.0, way, true };
    if (way < 0 ? s->has_clean : s->has_left_out[way]) return;
    memcpy(s->block, s->fresh, s->used);
    if (way >= 0) s->family->leave_out(s, way);
    poison_run_call(s);
    if (s->result != XD_OK || poison_findings(s))
        poison_violation(s, &at, "the clean call fails", NULL, (double)s->result);
    memcpy(to, s->block, s->used);
    if (way < 0)
        s->has_clean = true;
    else
        s->has_left_out[way] = true;
}

/* Puts the value into the unit's rows; false when this part has no such place on any rank. */
static inline void poison_put(poison_scene *s, const poison_part *part, double value, int64_t column) {
    if (s->layout == POISON_ROWS_SPLIT && s->rank != 1 && !(part->role & POISON_ONE)) return;
    for (int64_t r = 0; r < part->rows; r++) {
        const int64_t c = column - part->first;
        if (!(part->role & POISON_ONE) && poison_unit_of(part, r) != s->unit) continue;
        if (c < 0 || c >= part->cols) continue;
        xd_store_f64(part->data, part->dtype, r * part->stride + c, value);
    }
}

/* The value as the part's type holds it. */
static inline double poison_stored(const poison_part *part, double value) {
    double element[2] = { 0.0, 0.0 };
    if ((part->dtype == XD_DTYPE_I32 || part->dtype == XD_DTYPE_I64) && !(fabs(value) < 1e9)) return NAN;
    xd_store_f64(element, part->dtype, 0, value);
    return xd_load_f64(element, part->dtype, 0);
}

static inline void poison_run_case(poison_scene *s, const poison_case *at, poison_verdict verdict,
                                   int64_t column) {
    memcpy(s->block, s->fresh, s->used);
    if (s->reported) *s->reported = at->reported;
    poison_put(s, at->part, at->value, column);
    if (at->way >= 0) s->family->leave_out(s, at->way);
    poison_run_call(s);
    poison_all.scenes[s->rank] = s;
    poison_meet(s);
    poison_judge(s, at, verdict);
    poison_agreed(s, at);
    poison_meet(s);
}

static const double poison_values[] = { NAN,  INFINITY, -INFINITY, 3.4e38, -3.4e38,
                                        1e30, -1e30,    1e-41,     500.0,  -1.0 };
enum { POISON_VALUES = sizeof poison_values / sizeof *poison_values };

/* Every `stride`-th case; the first differs from one family, level and mode to the next. */
typedef struct poison_sample {
    long stride, next;
} poison_sample;

/* The column of an input: the first, the last and one between take turns. */
static inline int64_t poison_column(const poison_part *part, long turn) {
    return turn % 3 == 0 ? 0 : turn % 3 == 1 ? part->width - 1 : part->width / 2;
}

static inline poison_verdict poison_asked(const poison_scene *s, const poison_case *at,
                                          poison_verdict verdict) {
    return poison_all.backend ? poison_all.backend->expect(s, at->reported, verdict) : verdict;
}

/* One input: every value, counted and left out in every way; what is found also with no status to tell it. */
static inline void poison_run_part(poison_scene *s, const poison_part *part, poison_sample *sample) {
    for (int v = 0; v < POISON_VALUES; v++) {
        poison_case at = { part, poison_stored(part, poison_values[v]), -1, true };
        const poison_verdict verdict = s->family->expect(s, part, at.value);
        const bool twice = s->reported && verdict != POISON_FINE && verdict != POISON_IGNORED;
        if (verdict == POISON_SKIP) continue;
        const int ways = part->role & POISON_ONE ? 0 : s->family->ways;
        for (int way = twice ? -2 : -1; way < ways; way++) {
            if (sample->next++ % sample->stride != 0) continue;
            at.way = way < 0 ? -1 : way;
            at.reported = way != -2;
            poison_reference(s, -1);
            const int other = at.way < 0 ? poison_found_way(s, part) : at.way;
            if (s->family->ways && other >= 0) poison_reference(s, other);
            poison_run_case(s, &at, poison_asked(s, &at, verdict), poison_column(part, sample->next));
            if (s->rank == 0) poison_all.cases++;
        }
    }
}

static inline void poison_forget(poison_scene *s, int variant, poison_layout layout) {
    s->variant = variant;
    s->layout = layout;
    s->used = 0;
    s->part_count = 0;
    s->status = NULL;
    s->reported = NULL;
    s->row = 0;
    s->wide = s->weighed = s->compound = s->spread = false;
    s->own = s->objects = NULL;
    s->data = layout == POISON_ROWS_SPLIT ? s->world : NULL;
    s->has_clean = false;
    memset(s->has_left_out, 0, sizeof s->has_left_out);
    memset(s->block, 0, POISON_BLOCK);
}

static inline void poison_run_family(poison_scene *s, const poison_family *family, poison_sample *sample) {
    s->family = family;
    for (int layout = 0; layout < (int)POISON_LAYOUTS; layout++)
        for (int variant = 0; variant < family->variants; variant++) {
            if (!family->layouts[layout] || (layout == 0) != (s->ranks == 1)) continue;
            poison_forget(s, variant, (poison_layout)layout);
            if (!family->build(s)) continue;
            memcpy(s->fresh, s->block, s->used);
            for (int p = 0; p < s->part_count; p++)
                if (s->parts[p].role & POISON_IN) poison_run_part(s, s->parts + p, sample);
            if (family->release) family->release(s);
        }
}

/* ---- all of it ---- */

typedef struct poison_job {
    const poison_family *const *families;
    int count;
    long stride, first;
    int64_t size;
} poison_job;

/* Memory whose first block is in the middle of a range of 4 GiB. In structs a number of 32 bits may lie beside four bytes
 * that nobody has set; if those were the upper half of an address, both would look like a pointer into a block at the range's
 * beginning. */
static inline unsigned char *poison_take_memory(size_t bytes) {
    unsigned char *taken[64], *memory = NULL;
    int count = 0;
    while (count < 64 && !memory) {
        unsigned char *next = taken[count++] = (unsigned char *)malloc(bytes);
        const uint32_t low = (uint32_t)(uintptr_t)next;
        if (next && low > 1u << 24 && low < UINT32_MAX - POISON_BLOCK) memory = next;
    }
    for (int i = 0; i < count; i++)
        if (taken[i] != memory) free(taken[i]);
    if (!memory) abort(); /* other ranks would wait */
    return memory;
}

static inline xd_result poison_rank(xd_comm *world, void *argument) {
    const poison_job *job = (const poison_job *)argument;
    poison_sample sample = { job->stride, job->first };
    poison_scene s;
    memset(&s, 0, sizeof s);
    s.ctx = xd_comm_ctx(world);
    s.world = world;
    s.rank = xd_comm_rank(world);
    s.ranks = xd_comm_size(world);
    s.size = job->size;
    unsigned char *memory = poison_take_memory((size_t)POISON_BLOCK * (3 + POISON_WAYS));
    s.block = memory;
    s.fresh = memory + POISON_BLOCK;
    s.clean = s.fresh + POISON_BLOCK;
    for (int i = 0; i < POISON_WAYS; i++) s.left_out[i] = s.clean + (size_t)(i + 1) * POISON_BLOCK;
    const poison_backend *backend = poison_all.backend;
    if (backend) backend->begin(&s);
    for (int i = 0; i < job->count; i++)
        if (!backend || backend->serves(job->families[i])) poison_run_family(&s, job->families[i], &sample);
    if (backend) backend->end(&s);
    free(memory);
    return XD_OK;
}

/* With vocabularies of this size, 0: small ones. */
static inline void poison_run_sized(const poison_family *const *families, int count, long stride,
                                    int64_t size) {
    static const char *const modes[] = { "DETERMINISTIC", "FAST", "INVARIANT" };
    const int last = poison_all.backend ? (int)XD_CPU_PLAIN : (int)XD_CPU_AVX512_BF16;
    long turn = 0;
    for (int level = (int)XD_CPU_PLAIN; level <= last; level++)
        for (int mode = 0; mode < 3; mode++)
            for (int ranks = 1; ranks <= POISON_RANKS; ranks += POISON_RANKS - 1) {
                poison_job job = { families, count, stride, turn++ * 5, size };
                xd_ctx_desc desc;
                if (!xd_cpu_supports((xd_cpu_level)level)) continue;
                memset(&desc, 0, sizeof desc);
                desc.cpu = (xd_cpu_level)level;
                desc.reduction = (xd_reduction)mode;
                desc.log_level = XD_LOG_NONE;
                poison_all.level =
                    poison_all.backend ? poison_all.backend->name : xd_cpu_level_name((xd_cpu_level)level);
                poison_all.mode = modes[mode];
                pthread_barrier_init(&poison_all.barrier, NULL, (unsigned)ranks);
                CHECK_EQ_INT(xd_run_threads(ranks, &desc, poison_rank, &job, NULL), XD_OK);
                pthread_barrier_destroy(&poison_all.barrier);
            }
}

static inline void poison_run(const poison_family *const *families, int count, long stride) {
    poison_run_sized(families, count, stride, 0);
}

static inline void poison_report(const char *name) {
    for (int i = 0; i < poison_all.kind_count; i++)
        printf("%6ld  %s (%s)\n", poison_all.kinds[i].count, poison_all.kinds[i].key,
               poison_all.kinds[i].example);
    printf("%s: %ld calls, %ld cases, %ld violations of %d kinds\n", name, poison_all.calls, poison_all.cases,
           poison_all.violations, poison_all.kind_count);
}

#endif
