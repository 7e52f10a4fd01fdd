/* sizes.h - sizes that belong together disagree.
 *
 * A stage is everything that some calls take, in one struct that begins with a sizes_base. A case names a matrix or a number of
 * it, and the call. The harness makes the call as it is, then with each change of that matrix or number, on one rank and, for
 * collective calls, on two of which the last one has the change: it refuses it, the other gets that result too or PEER with its
 * message, the message has the numbers, and nothing that calls write has changed. tests/build/check_sizes.py reads the names
 * of the cases. */
#ifndef SIZES_H
#define SIZES_H

#include "xd_test.h"
#include "xdistill.h"

#include <ctype.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>

enum { SIZES_RANKS = 2 };

/* What every stage begins with. */
typedef struct sizes_base {
    xd_ctx *ctx;
    xd_comm *comm;  /* of all ranks */
    xd_comm *world; /* the same; NULL on one rank */
    int rank, ranks;
    void *memory; /* what calls may write */
    size_t bytes;
} sizes_base;

/* A matrix of a call, and whether something else tells how many rows and columns it has. */
typedef struct sizes_matrix {
    const char *name;
    size_t offset; /* of the xd_rows in the stage */
    xd_result (*call)(void *stage);
    bool rows, columns; /* another number of rows is wrong; fewer columns are */
    int few;            /* so many columns are too few; 0 -> one less than there are */
    bool optional;      /* no data means that there is no such matrix */
    bool local;         /* not collective: one rank only */
} sizes_matrix;

/* A number of a call that has to fit others. */
typedef struct sizes_count {
    const char *name;
    size_t offset, width; /* of the number in the stage, and its bytes: int or int64_t */
    int64_t wrong;        /* what it becomes */
    xd_result (*call)(void *stage);
    xd_result result;
    const char *text; /* in the message, separated by '|' */
    bool local;
} sizes_count;

typedef struct sizes_table {
    size_t stage_bytes;
    void (*open)(void *stage); /* once; base is filled */
    void (*set)(void *stage);  /* before each call */
    void (*close)(void *stage);
    const sizes_matrix *matrices;
    size_t matrix_count;
    const sizes_count *counts;
    size_t count_count;
} sizes_table;

enum { MORE_ROWS, LESS_ROWS, FEW_COLUMNS, SHORT_STRIDE, NO_DATA, NO_DTYPE, SIZES_CHANGES };
static const char *const sizes_change_names[SIZES_CHANGES] = { "a row more",      "a row less",
                                                               "too few columns", "short stride",
                                                               "no data",         "no dtype" };

/* False when the change is none for this matrix. number: what the message has to name; 0 -> nothing. */
static inline bool sizes_change(xd_rows *rows, const sizes_matrix *x, int kind, int64_t *number) {
    *number = 0;
    switch (kind) {
    case MORE_ROWS: *number = ++rows->rows; return x->rows;
    case LESS_ROWS: *number = --rows->rows; return x->rows;
    case FEW_COLUMNS:
        *number = rows->cols = x->few > 0 ? x->few : rows->cols - 1;
        rows->stride = 0;
        return x->columns;
    case SHORT_STRIDE: *number = rows->stride = rows->cols - 1; return rows->cols > 1;
    case NO_DATA: rows->data = NULL; return !x->optional;
    default: rows->dtype = XD_DTYPE_NONE; return true;
    }
}

/* Does the text have this number, and how many numbers has it? */
static inline bool sizes_names(const char *text, int64_t number, int *numbers) {
    bool found = false;
    *numbers = 0;
    for (const char *at = text; *at; at++) {
        if (!isdigit((unsigned char)*at) || (at > text && isalpha((unsigned char)at[-1]))) continue;
        char *end = NULL;
        found = found || strtoll(at, &end, 10) == (long long)number;
        if (!end) (void)strtoll(at, &end, 10);
        at = end - 1;
        ++*numbers;
    }
    return found;
}

/* Are all parts of the pattern, separated by '|', in the text? */
static inline bool sizes_has(const char *text, const char *pattern) {
    char part[80];
    while (*pattern) {
        const size_t length = strcspn(pattern, "|");
        snprintf(part, sizeof part, "%.*s", (int)length, pattern);
        if (!strstr(text, part)) return false;
        pattern += length + (pattern[length] == '|');
    }
    return true;
}

/* What the ranks of a run share. */
typedef struct sizes_run {
    const sizes_table *table;
    uint32_t arrived; /* atomic */
    xd_result results[SIZES_RANKS];
    int64_t cases; /* of the last rank */
} sizes_run;

/* All ranks meet here, whatever has become of their world. */
static inline void sizes_meet(sizes_run *r, int ranks) {
    const uint32_t turn = __atomic_fetch_add(&r->arrived, 1, __ATOMIC_ACQ_REL) / (uint32_t)ranks;
    while (__atomic_load_n(&r->arrived, __ATOMIC_ACQUIRE) < (turn + 1) * (uint32_t)ranks) sched_yield();
}

/* The call with nothing changed. */
static inline void sizes_clean(sizes_base *s, sizes_run *r, const char *name, xd_result (*call)(void *)) {
    r->table->set(s);
    const xd_result result = call(s);
    if (result != XD_OK) CHECK_EQ_STR(name, xd_last_error(s->ctx)->message);
    sizes_meet(r, s->ranks);
}

/* The call with the change, which the stage has already. Returns the result of this rank. */
static inline xd_result sizes_broken(sizes_base *s, sizes_run *r, const char *name, const char *what,
                                     xd_result (*call)(void *)) {
    void *before = malloc(s->bytes);
    memcpy(before, s->memory, s->bytes);
    const xd_result result = r->results[s->rank] = call(s);
    sizes_meet(r, s->ranks);
    const bool written = memcmp(before, s->memory, s->bytes) != 0;
    if (written) printf("    %s, %s, rank %d of %d: it wrote\n", name, what, s->rank, s->ranks);
    CHECK(!written);
    const bool told = result == XD_ERROR_PEER && xd_last_error(s->ctx)->culprit == s->ranks - 1;
    const bool alike = result == r->results[s->ranks - 1] || (s->rank < s->ranks - 1 && told);
    if (!alike)
        printf("    %s, %s: %s on rank %d, %s on the last\n", name, what, xd_result_name(result), s->rank,
               xd_result_name(r->results[s->ranks - 1]));
    CHECK(alike);
    if (s->rank == s->ranks - 1) r->cases++; /* ranks are threads: the others do not touch it */
    sizes_meet(r, s->ranks);
    free(before);
    return result;
}

static inline void sizes_run_matrix(sizes_base *s, sizes_run *r, const sizes_matrix *x) {
    for (int kind = 0; kind < SIZES_CHANGES; kind++) {
        sizes_matrix all = *x;
        int64_t number = 0;
        int numbers = 0;
        xd_rows *rows = (xd_rows *)(void *)((char *)s + x->offset), was;
        all.rows = x->rows || (s->ranks > 1 && !x->local); /* the other rank tells them */
        sizes_clean(s, r, x->name, x->call);
        r->table->set(s);
        was = *rows;
        const bool changed = sizes_change(rows, &all, kind, &number);
        if (s->rank < s->ranks - 1 || !changed) *rows = was;
        if (!changed) continue;
        const xd_result result = sizes_broken(s, r, x->name, sizes_change_names[kind], x->call);
        const bool refused = s->rank < s->ranks - 1 || result == XD_ERROR_SHAPE ||
                             result == XD_ERROR_ARGUMENT || result == XD_ERROR_DTYPE ||
                             result == XD_ERROR_MISMATCH;
        if (!refused) printf("    %s, %s: %s\n", x->name, sizes_change_names[kind], xd_result_name(result));
        CHECK(refused);
        if (!refused || result == XD_OK || number == 0) continue;
        const char *message = xd_last_error(s->ctx)->message;
        const bool named =
            (sizes_names(message, number, &numbers) || result == XD_ERROR_MISMATCH) && numbers >= 2;
        if (!named)
            printf("    %s, %s: %lld is not in \"%s\"\n", x->name, sizes_change_names[kind],
                   (long long)number, message);
        CHECK(named);
    }
}

static inline void sizes_run_count(sizes_base *s, sizes_run *r, const sizes_count *x) {
    const int narrow = (int)x->wrong;
    void *at = (char *)s + x->offset;
    sizes_clean(s, r, x->name, x->call);
    r->table->set(s);
    if (s->rank == s->ranks - 1)
        memcpy(at, x->width == sizeof narrow ? (const void *)&narrow : (const void *)&x->wrong, x->width);
    const xd_result result = sizes_broken(s, r, x->name, "a count", x->call);
    const bool peer = s->rank < s->ranks - 1 && result == XD_ERROR_PEER;
    const char *message = result == XD_OK ? "" : xd_last_error(s->ctx)->message;
    if ((result != x->result && !peer) || !sizes_has(message, x->text))
        printf("    %s = %lld: %s, \"%s\"\n", x->name, (long long)x->wrong, xd_result_name(result), message);
    if (!peer) CHECK_EQ_INT(result, x->result);
    CHECK(sizes_has(message, x->text));
}

/* Counts of which the library believes what the caller says: lists, bytes and ranks. */
static inline bool sizes_is_believed(const char *name) {
    static const char *const believed[] = {
        "xdi_chunk_averages(chunks)",
        "xdi_chunk_averages(n)",
        "xd_cast(count)",
        "xd_decode_desc.count",
        "xd_param.count",
        "xdi_canonical_sequence(count)",
        "xdi_projection_cells.count",
        "xd_optimizer_desc.group_count",
        "xdi_votes_pass.skip_count",
        "xdi_votes_pass.foreign_skip_count",
        "xdi_votes_pass.count",
        "xdi_vote_pieces.count",
        "xd_xtoken_desc.teacher_count",
        "xd_uld_desc.chunk_count",
        "xd_route_side.sample_count",
        "xd_positions.count",
        "xd_denominator_count(batch_count)",
        "xd_kl_estimate_desc.count",
        "xd_ema_copy_to(count)",
        "xd_ema_load_desc.source_count",
        "xd_gradient_norm_desc.param_count",
        "xd_clip_gradients(param_count)",
        "xd_texts.count",
        "xd_align_batch(count)",
        "xdi_uld_trl_side.count",
        "xd_thread_world_desc.ranks",
        "xd_run_threads(ranks)",
        "xd_teacher_cache_writer_document(bytes)",
        "xd_tokenizer_desc.data_bytes",
    };
    for (size_t i = 0; i < sizeof believed / sizeof *believed; i++)
        if (strcmp(name, believed[i]) == 0) return true;
    return strstr(name, "workspace_bytes") != NULL;
}

/* AddressSanitizer aborts if there is not enough memory. The tests want NULL from malloc, and MEMORY from the call. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "allocator_may_return_null=1";
}

/* The ends of its type: what the call answers is its own, but nothing overflows (a build with a sanitizer sees it), and a call
 * that refuses the number has written nothing. On one rank; what two make of a wrong number is above. Cases add small numbers to
 * the arguments of functions, which leave room for that. */
static inline void sizes_run_ends(sizes_base *s, sizes_run *r, const sizes_count *x) {
    const int64_t room = strchr(x->name, '(') ? 16 : 0;
    for (int i = 0; i < 2; i++) {
        const int narrow = i ? INT_MIN + (int)room : INT_MAX - (int)room;
        const int64_t wide = i ? INT64_MIN + room : INT64_MAX - room, half = room ? wide / 2 : wide;
        if (sizes_is_believed(x->name) && (!i || strstr(x->name, "bytes"))) continue; /* bytes have no sign */
        r->table->set(s);
        memcpy((char *)s + x->offset, x->width == sizeof narrow ? (const void *)&narrow : (const void *)&half,
               x->width);
        void *before = malloc(s->bytes);
        memcpy(before, s->memory, s->bytes);
        const bool refused = x->call(s) != XD_OK;
        if (refused && memcmp(before, s->memory, s->bytes) != 0)
            printf("    %s, end %d: it wrote\n", x->name, i);
        CHECK(!refused || memcmp(before, s->memory, s->bytes) == 0);
        free(before);
    }
}

static inline xd_result sizes_rank(xd_comm *world, void *argument) {
    sizes_run *r = (sizes_run *)argument;
    sizes_base *s = (sizes_base *)calloc(1, r->table->stage_bytes);
    s->ctx = xd_comm_ctx(world);
    s->rank = xd_comm_rank(world);
    s->ranks = xd_comm_size(world);
    s->comm = world;
    s->world = s->ranks > 1 ? world : NULL;
    r->table->open(s);
    for (size_t i = 0; i < r->table->matrix_count; i++)
        if (s->ranks == 1 || !r->table->matrices[i].local) sizes_run_matrix(s, r, &r->table->matrices[i]);
    for (size_t i = 0; i < r->table->count_count; i++)
        if (s->ranks == 1 ? r->table->counts[i].result != XD_ERROR_MISMATCH : !r->table->counts[i].local)
            sizes_run_count(s, r, &r->table->counts[i]);
    for (size_t i = 0; s->ranks == 1 && i < r->table->count_count; i++)
        if (r->table->counts[i].result != XD_ERROR_MISMATCH) sizes_run_ends(s, r, &r->table->counts[i]);
    r->table->close(s);
    free(s);
    return XD_OK;
}

/* Returns the changes that were tried. */
static inline int64_t sizes_run_table(const sizes_table *table, int ranks) {
    const xd_ctx_desc desc = { .timeout_seconds = 60, .log_level = XD_LOG_NONE };
    sizes_run r;
    memset(&r, 0, sizeof r);
    r.table = table;
    CHECK_EQ_INT(xd_run_threads(ranks, &desc, sizes_rank, &r, NULL), XD_OK);
    return r.cases;
}

#endif
