/* NeMo-RL's aligner: anchors, a dynamic programme between them, two repairs. */

#include "base/internal.h"
#include "compat/align_dp.h"
#include "compat/canonical.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    XDI_DP_ANCHOR = 3,  /* tokens of an anchor */
    XDI_DP_WINDOW = 10, /* pairs that a repair looks at */
    XDI_DP_MOST_COMBINATION = 64
};

/* How a cell of the table was reached; combinations of n tokens are XDI_DP_ONE_STUDENT + n and
 * XDI_DP_ONE_TEACHER + n. */
enum {
    XDI_DP_DIAGONAL,
    XDI_DP_UP,
    XDI_DP_LEFT,
    XDI_DP_ONE_STUDENT,
    XDI_DP_ONE_TEACHER = XDI_DP_ONE_STUDENT + XDI_DP_MOST_COMBINATION
};

/* One side: the canonical tokens, and their canonical forms again, by which pairs are compared. Tokens are
 * contiguous in memory, so a run of them is one string. */
typedef struct xdi_dp_side {
    xdi_canonical tokens, again;
} xdi_dp_side;

/* A pair of runs of canonical tokens. */
typedef struct xdi_dp_pair {
    int32_t s0, s1, t0, t1;
} xdi_dp_pair;

typedef struct xdi_dp_list {
    xdi_dp_pair *pairs;
    int64_t count;
} xdi_dp_list;

typedef struct xdi_dp {
    xd_ctx *ctx;
    xdi_dp_side student, teacher;
    int combination;
    xdi_dp_list now, next; /* room for every pair there can be */
    unsigned char *trace;  /* [cells of the largest table so far] */
    xdi_align_scores score;
    double *scores; /* [combination + 1][teacher tokens + 1] */
    size_t trace_bytes;
} xdi_dp;

/* ---- strings ---- */

static bool xdi_dp_equal(const xdi_canonical *a, int64_t a0, int64_t a1, const xdi_canonical *b, int64_t b0,
                         int64_t b1) {
    const int64_t size = a->offsets[a1] - a->offsets[a0];
    return size == b->offsets[b1] - b->offsets[b0] &&
           memcmp(a->text + a->offsets[a0], b->text + b->offsets[b0], (size_t)size) == 0;
}

/* Do both sides of the pair spell the same? */
static bool xdi_dp_good(const xdi_dp *dp, const xdi_dp_pair *p) {
    return xdi_dp_equal(&dp->student.again, p->s0, p->s1, &dp->teacher.again, p->t0, p->t1);
}

static void xdi_dp_push(xdi_dp_list *list, int64_t s0, int64_t s1, int64_t t0, int64_t t1) {
    xdi_dp_pair *p = &list->pairs[list->count++];
    p->s0 = (int32_t)s0;
    p->s1 = (int32_t)s1;
    p->t0 = (int32_t)t0;
    p->t1 = (int32_t)t1;
}

/* ---- the table ---- */

/* Student tokens [s0, s0 + rows) and teacher tokens [t0, t0 + cols). */
typedef struct xdi_dp_table {
    int64_t s0, rows, t0, cols;
} xdi_dp_table;

static double *xdi_dp_row(const xdi_dp *dp, const xdi_dp_table *x, int64_t i) {
    return dp->scores + i % (dp->combination + 1) * (x->cols + 1);
}

/* The best way into one cell; a later candidate must be strictly better. */
static void xdi_dp_cell(const xdi_dp *dp, const xdi_dp_table *x, int64_t i, int64_t j) {
    const xdi_canonical *s = &dp->student.tokens, *t = &dp->teacher.tokens;
    const int64_t si = x->s0 + i, tj = x->t0 + j; /* after the token of this cell */
    const double gap = dp->score.gap, match = dp->score.match, combined = dp->score.combination;
    const double *above = xdi_dp_row(dp, x, i - 1);
    double *row = xdi_dp_row(dp, x, i);
    int how = XDI_DP_DIAGONAL;
    double best = above[j - 1] + (xdi_dp_equal(s, si - 1, si, t, tj - 1, tj) ? match : -match);
    if (above[j] + gap > best) best = above[j] + gap, how = XDI_DP_UP;
    if (row[j - 1] + gap > best) best = row[j - 1] + gap, how = XDI_DP_LEFT;
    for (int n = 2; n <= dp->combination && n <= j; n++)
        if (above[j - n] + n * combined > best && xdi_dp_equal(s, si - 1, si, t, tj - n, tj))
            best = above[j - n] + n * combined, how = XDI_DP_ONE_STUDENT + n;
    for (int n = 2; n <= dp->combination && n <= i; n++) {
        const double score = xdi_dp_row(dp, x, i - n)[j - 1] + n * combined;
        if (score > best && xdi_dp_equal(t, tj - 1, tj, s, si - n, si))
            best = score, how = XDI_DP_ONE_TEACHER + n;
    }
    row[j] = best;
    dp->trace[(i - 1) * x->cols + j - 1] = (unsigned char)how;
}

/* Follows the trace from the last cell and writes the pairs in order. */
static void xdi_dp_follow(const xdi_dp *dp, const xdi_dp_table *x, xdi_dp_list *out) {
    const int64_t first = out->count;
    for (int64_t i = x->rows, j = x->cols; i > 0 || j > 0;) {
        int how = i == 0 ? (int)XDI_DP_LEFT : (int)XDI_DP_UP;
        if (i > 0 && j > 0) how = dp->trace[(i - 1) * x->cols + j - 1];
        int64_t rows = how == XDI_DP_LEFT ? 0 : 1, cols = how == XDI_DP_UP ? 0 : 1;
        if (how > XDI_DP_ONE_TEACHER)
            rows = how - XDI_DP_ONE_TEACHER;
        else if (how > XDI_DP_ONE_STUDENT)
            cols = how - XDI_DP_ONE_STUDENT;
        xdi_dp_push(out, x->s0 + i - rows, x->s0 + i, x->t0 + j - cols, x->t0 + j);
        i -= rows;
        j -= cols;
    }
    for (int64_t a = first, b = out->count - 1; a < b; a++, b--) {
        const xdi_dp_pair swap = out->pairs[a];
        out->pairs[a] = out->pairs[b];
        out->pairs[b] = swap;
    }
}

static xd_result xdi_dp_reserve(xdi_dp *dp, const xdi_dp_table *x) {
    const size_t cells = (size_t)x->rows * (size_t)x->cols;
    if (cells <= dp->trace_bytes) return XD_OK;
    xd_release(dp->ctx, dp->trace);
    dp->trace = (unsigned char *)xd_allocate(dp->ctx, cells);
    dp->trace_bytes = dp->trace ? cells : 0;
    XD_REQUIRE(dp->ctx, dp->trace, XD_ERROR_MEMORY, "no room to align %lld with %lld tokens",
               (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

/* Aligns a rectangle of tokens, appending its pairs. */
static xd_result xdi_dp_align(xdi_dp *dp, int64_t s0, int64_t s1, int64_t t0, int64_t t1, xdi_dp_list *out) {
    const xdi_dp_table x = { s0, s1 - s0, t0, t1 - t0 };
    XD_TRY(xdi_dp_reserve(dp, &x));
    double *top = xdi_dp_row(dp, &x, 0);
    for (int64_t j = 0; j <= x.cols; j++) top[j] = (double)j * dp->score.gap;
    for (int64_t i = 1; i <= x.rows; i++) {
        xdi_dp_row(dp, &x, i)[0] = (double)i * dp->score.gap;
        for (int64_t j = 1; j <= x.cols; j++) xdi_dp_cell(dp, &x, i, j);
    }
    xdi_dp_follow(dp, &x, out);
    return XD_OK;
}

/* ---- anchors: triples of tokens that occur once on each side ---- */

typedef struct xdi_dp_triple {
    const xdi_canonical *side;
    int32_t at;
} xdi_dp_triple;

static int xdi_dp_compare_text(const void *left, const void *right) {
    const xdi_dp_triple *a = (const xdi_dp_triple *)left, *b = (const xdi_dp_triple *)right;
    for (int i = 0; i < XDI_DP_ANCHOR; i++) {
        const int64_t *x = a->side->offsets + a->at + i, *y = b->side->offsets + b->at + i;
        const int64_t n = x[1] - x[0], m = y[1] - y[0];
        if (n != m) return n < m ? -1 : 1;
        const int order = memcmp(a->side->text + x[0], b->side->text + y[0], (size_t)n);
        if (order != 0) return order;
    }
    return 0;
}

static int xdi_dp_compare(const void *left, const void *right) {
    const int order = xdi_dp_compare_text(left, right);
    const xdi_dp_triple *a = (const xdi_dp_triple *)left, *b = (const xdi_dp_triple *)right;
    return order != 0 ? order : (a->at > b->at) - (a->at < b->at);
}

/* Sorted triples of one side, each that occurs once; returns how many. */
static int64_t xdi_dp_unique(const xdi_canonical *side, xdi_dp_triple *triples) {
    const int64_t count = side->count - XDI_DP_ANCHOR + 1;
    int64_t unique = 0;
    for (int64_t i = 0; i < count; i++) {
        triples[i].side = side;
        triples[i].at = (int32_t)i;
    }
    if (count > 0) qsort(triples, (size_t)count, sizeof *triples, xdi_dp_compare);
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + 1;
        while (end < count && xdi_dp_compare_text(&triples[i], &triples[end]) == 0) end++;
        if (end == i + 1) triples[unique++] = triples[i];
    }
    return unique;
}

/* match[i] = teacher index of the candidate that begins at student token i, or -1. */
static void xdi_dp_candidates(const xdi_dp *dp, xdi_dp_triple *s, xdi_dp_triple *t, int32_t *match) {
    const int64_t n = xdi_dp_unique(&dp->student.tokens, s), m = xdi_dp_unique(&dp->teacher.tokens, t);
    for (int64_t i = 0; i < dp->student.tokens.count; i++) match[i] = -1;
    for (int64_t i = 0, j = 0; i < n && j < m;) {
        const int order = xdi_dp_compare_text(&s[i], &t[j]);
        if (order == 0) match[s[i].at] = t[j].at;
        if (order <= 0) i++;
        if (order >= 0) j++;
    }
}

static bool xdi_dp_free_run(const unsigned char *used, int64_t at) {
    for (int i = 0; i < XDI_DP_ANCHOR; i++)
        if (used[at + i]) return false;
    return true;
}

/* Candidates in student order: one that overlaps an accepted one is dropped, then one that goes back on the teacher's
 * side. Writes student and teacher indices, returns their number. */
static int64_t xdi_dp_choose(const xdi_dp *dp, const int32_t *match, unsigned char *used_s,
                             unsigned char *used_t, xdi_dp_pair *anchors) {
    int64_t kept = 0, last = -1;
    for (int64_t i = 0; i + XDI_DP_ANCHOR <= dp->student.tokens.count; i++) {
        const int32_t j = match[i];
        if (j < 0 || !xdi_dp_free_run(used_s, i) || !xdi_dp_free_run(used_t, j)) continue;
        memset(used_s + i, 1, XDI_DP_ANCHOR);
        memset(used_t + j, 1, XDI_DP_ANCHOR);
        if (j <= last) continue;
        anchors[kept].s0 = (int32_t)i;
        anchors[kept++].t0 = j;
        last = j + XDI_DP_ANCHOR - 1;
    }
    return kept;
}

/* Memory of the search for anchors. */
typedef struct xdi_dp_search {
    xdi_dp_triple *s, *t;
    int32_t *match;
    unsigned char *used_s, *used_t;
    xdi_dp_pair *anchors;
} xdi_dp_search;

static bool xdi_dp_search_layout(xd_arena *arena, const xdi_dp *dp, xdi_dp_search *x) {
    const int64_t n = dp->student.tokens.count, m = dp->teacher.tokens.count;
    bool fits = true;
    x->s = (xdi_dp_triple *)xdi_arena_array(arena, n, sizeof *x->s, &fits);
    x->t = (xdi_dp_triple *)xdi_arena_array(arena, m, sizeof *x->t, &fits);
    x->match = (int32_t *)xdi_arena_array(arena, n, sizeof *x->match, &fits);
    x->used_s = (unsigned char *)xdi_arena_array(arena, n, 1, &fits);
    x->used_t = (unsigned char *)xdi_arena_array(arena, m, 1, &fits);
    x->anchors = (xdi_dp_pair *)xdi_arena_array(arena, n, sizeof *x->anchors, &fits);
    return fits;
}

/* Between two anchors, then the anchor itself as pairs of single tokens. */
static xd_result xdi_dp_gaps(xdi_dp *dp, const xdi_dp_pair *anchors, int64_t count) {
    const int64_t n = dp->student.tokens.count, m = dp->teacher.tokens.count;
    int64_t s = 0, t = 0;
    for (int64_t a = 0; a <= count; a++) {
        const int64_t s_end = a < count ? anchors[a].s0 : n, t_end = a < count ? anchors[a].t0 : m;
        if (s_end > s || t_end > t) XD_TRY(xdi_dp_align(dp, s, s_end, t, t_end, &dp->now));
        for (int i = 0; i < XDI_DP_ANCHOR && a < count; i++)
            xdi_dp_push(&dp->now, s_end + i, s_end + i + 1, t_end + i, t_end + i + 1);
        s = s_end + XDI_DP_ANCHOR;
        t = t_end + XDI_DP_ANCHOR;
    }
    return XD_OK;
}

static xd_result xdi_dp_anchored(xdi_dp *dp) {
    xdi_dp_search x;
    xd_arena plan = xd_arena_over(NULL, 0);
    memset(&x, 0, sizeof x);
    const bool fits = xdi_dp_search_layout(&plan, dp, &x);
    void *memory = fits ? xd_allocate(dp->ctx, plan.peak) : NULL;
    XD_REQUIRE(dp->ctx, memory, XD_ERROR_MEMORY, "no room to search %lld tokens for anchors",
               (long long)dp->student.tokens.count);
    xd_arena arena = xd_arena_over(memory, plan.peak);
    xdi_dp_search_layout(&arena, dp, &x);
    xdi_dp_candidates(dp, x.s, x.t, x.match);
    const int64_t kept = xdi_dp_choose(dp, x.match, x.used_s, x.used_t, x.anchors);
    const xd_result result = xdi_dp_gaps(dp, x.anchors, kept);
    xd_release(dp->ctx, memory);
    return result;
}

/* ---- repairs ---- */

static xdi_dp_pair xdi_dp_span(const xdi_dp_pair *first, const xdi_dp_pair *last) {
    xdi_dp_pair p = { first->s0, last->s1, first->t0, last->t1 };
    return p;
}

static void xdi_dp_swap(xdi_dp *dp) {
    const xdi_dp_list swap = dp->now;
    dp->now = dp->next;
    dp->next = swap;
    dp->next.count = 0;
}

/* Runs of bad pairs become one, except in the last fifth. */
static void xdi_dp_merge_bad(xdi_dp *dp) {
    const int64_t count = dp->now.count, boundary = (int64_t)(0.8 * (double)count);
    const xdi_dp_pair *pairs = dp->now.pairs;
    for (int64_t i = 0; i < count;) {
        int64_t end = i + 1;
        if (i < boundary && !xdi_dp_good(dp, &pairs[i]))
            while (end < boundary && !xdi_dp_good(dp, &pairs[end])) end++;
        dp->next.pairs[dp->next.count++] = xdi_dp_span(&pairs[i], &pairs[end - 1]);
        i = end;
    }
    xdi_dp_swap(dp);
}

/* Are both token lists the same, token by token, and longer than one? */
static bool xdi_dp_identical(const xdi_dp *dp, const xdi_dp_pair *p) {
    const int64_t n = p->s1 - p->s0;
    if (n < 2 || p->t1 - p->t0 != n) return false;
    for (int64_t i = 0; i < n; i++)
        if (!xdi_dp_equal(&dp->student.tokens, p->s0 + i, p->s0 + i + 1, &dp->teacher.tokens, p->t0 + i,
                          p->t0 + i + 1))
            return false;
    return true;
}

/* Aligns a window whose two sides spell the same again; keeps the result when all of it is good. */
static xd_result xdi_dp_realign(xdi_dp *dp, const xdi_dp_pair *window) {
    const int64_t first = dp->next.count;
    bool good = true;
    XD_TRY(xdi_dp_align(dp, window->s0, window->s1, window->t0, window->t1, &dp->next));
    for (int64_t i = first; i < dp->next.count; i++) good = good && xdi_dp_good(dp, &dp->next.pairs[i]);
    if (good) return XD_OK;
    dp->next.count = first;
    dp->next.pairs[dp->next.count++] = *window;
    return XD_OK;
}

/* Bad pair b: the shortest window from it whose sides agree. Returns through *end where to go on. */
static xd_result xdi_dp_repair(xdi_dp *dp, int64_t b, int64_t *end) {
    const xdi_dp_pair *pairs = dp->now.pairs;
    for (int64_t w = 2; w <= XDI_DP_WINDOW && b + w <= dp->now.count; w++) {
        const xdi_dp_pair window = xdi_dp_span(&pairs[b], &pairs[b + w - 1]);
        if (!xdi_dp_good(dp, &window)) continue;
        *end = b + w;
        return xdi_dp_realign(dp, &window);
    }
    dp->next.pairs[dp->next.count++] = pairs[b];
    *end = b + 1;
    return XD_OK;
}

static xd_result xdi_dp_split(xdi_dp *dp) {
    const xdi_dp_pair *pairs = dp->now.pairs;
    const int64_t count = dp->now.count;
    for (int64_t i = 0; i < count;) {
        if (xdi_dp_identical(dp, &pairs[i])) {
            const xdi_dp_pair p = pairs[i++];
            for (int32_t k = 0; k < p.s1 - p.s0; k++)
                xdi_dp_push(&dp->next, p.s0 + k, p.s0 + k + 1, p.t0 + k, p.t0 + k + 1);
            continue;
        }
        while (i < count && xdi_dp_good(dp, &pairs[i])) dp->next.pairs[dp->next.count++] = pairs[i++];
        if (i < count) XD_TRY(xdi_dp_repair(dp, i, &i));
    }
    xdi_dp_swap(dp);
    return XD_OK;
}

/* ---- the whole ---- */

/* One block of memory for `count` tokens of `bytes` bytes in total. */
static xd_result xdi_dp_strings(xd_ctx *ctx, int64_t count, size_t bytes, xdi_canonical *out) {
    const size_t offsets = ((size_t)count + 1) * sizeof *out->offsets;
    const size_t origin = ((size_t)count + 1) * sizeof *out->origin;
    char *memory = (char *)xd_allocate(ctx, offsets + origin + bytes);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)count);
    out->offsets = (int64_t *)(void *)memory;
    out->origin = (int32_t *)(void *)(memory + offsets);
    out->text = memory + offsets + origin;
    out->count = count;
    return XD_OK;
}

/* Strings unchanged. */
static xd_result xdi_dp_plain_side(xd_ctx *ctx, xd_texts all, xdi_dp_side *side) {
    const xd_text *tokens = all.texts;
    const int64_t count = all.count;
    xdi_canonical *s = &side->tokens;
    size_t bytes = 1;
    for (int64_t i = 0; i < count; i++)
        XD_REQUIRE(ctx, tokens[i].size >= 0 && (tokens[i].data || tokens[i].size == 0), XD_ERROR_ARGUMENT,
                   "token %lld: data is %s and size %lld", (long long)i, tokens[i].data ? "given" : "NULL",
                   (long long)tokens[i].size);
    for (int64_t i = 0; i < count; i++) bytes += (size_t)tokens[i].size;
    XD_TRY(xdi_dp_strings(ctx, count, bytes, s));
    for (int64_t i = 0; i < count; i++) {
        memcpy(s->text + s->offsets[i], tokens[i].data, (size_t)tokens[i].size);
        s->offsets[i + 1] = s->offsets[i] + tokens[i].size;
        s->origin[i + 1] = (int32_t)i + 1;
    }
    return XD_OK;
}

/* Canonical forms, and the canonical forms of those. */
static xd_result xdi_dp_canonical_side(xd_ctx *ctx, xd_texts all, xdi_dp_side *side) {
    XD_TRY(xdi_canonical_sequence(ctx, all.texts, all.count, &side->tokens));
    const int64_t n = side->tokens.count;
    xdi_canonical *again = &side->again;
    XD_TRY(xdi_dp_strings(ctx, n, (size_t)side->tokens.offsets[n] + 2 * (size_t)n + 8, again));
    for (int64_t i = 0; i < n; i++) {
        const int64_t *at = side->tokens.offsets + i;
        const xd_text token = { side->tokens.text + at[0], at[1] - at[0] };
        again->offsets[i + 1] =
            again->offsets[i] + xdi_canonical_token(token, again->text + again->offsets[i]);
    }
    return XD_OK;
}

static xd_result xdi_dp_memory(xdi_dp *dp) {
    const size_t n = (size_t)dp->student.tokens.count, m = (size_t)dp->teacher.tokens.count;
    const size_t rows = (size_t)dp->combination + 1;
    dp->now.pairs = (xdi_dp_pair *)xd_allocate(dp->ctx, (n + m) * sizeof *dp->now.pairs);
    dp->next.pairs = (xdi_dp_pair *)xd_allocate(dp->ctx, (n + m) * sizeof *dp->next.pairs);
    dp->scores = (double *)xd_allocate(dp->ctx, rows * (m + 1) * sizeof *dp->scores);
    XD_REQUIRE(dp->ctx, dp->now.pairs && dp->next.pairs && dp->scores, XD_ERROR_MEMORY,
               "no room to align %zu with %zu tokens", n, m);
    return XD_OK;
}

/* Pairs as chunks of original tokens, judged by the spellings s and t. */
static xd_result xdi_dp_chunks(const xdi_dp *dp, const xdi_canonical *student, const xdi_canonical *teacher,
                               xd_alignment *out) {
    const int32_t *s = dp->student.tokens.origin, *t = dp->teacher.tokens.origin;
    xd_aligned_chunk *chunks =
        (xd_aligned_chunk *)xd_allocate(dp->ctx, (size_t)dp->now.count * sizeof *chunks);
    XD_REQUIRE(dp->ctx, chunks, XD_ERROR_MEMORY, "no room for %lld chunks", (long long)dp->now.count);
    for (int64_t i = 0; i < dp->now.count; i++) {
        const xdi_dp_pair *p = &dp->now.pairs[i];
        xd_aligned_chunk *c = &chunks[i];
        c->student_begin = s[p->s0];
        c->student_end = s[p->s1];
        c->teacher_begin = t[p->t0];
        c->teacher_end = t[p->t1];
        c->flags = xdi_dp_equal(student, p->s0, p->s1, teacher, p->t0, p->t1) ? (uint32_t)XD_CHUNK_EXACT : 0u;
    }
    out->chunks = chunks;
    out->count = dp->now.count;
    return XD_OK;
}

XD_PRIVATE xdi_align_scores xdi_align_scores_defaults(void) {
    xdi_align_scores scores;
    scores.match = 3.0;
    scores.combination = 1.5;
    scores.gap = -1.5;
    return scores;
}

static xd_result xdi_dp_open(xd_ctx *ctx, const xdi_align_dp_desc *desc, xdi_dp *dp) {
    const int64_t student_count = desc->student.count, teacher_count = desc->teacher.count;
    memset(dp, 0, sizeof *dp);
    dp->ctx = ctx;
    dp->combination = desc->max_combination ? desc->max_combination : 4;
    dp->score = desc->scores ? *desc->scores : xdi_align_scores_defaults();
    XD_REQUIRE(ctx, isfinite(dp->score.match) && isfinite(dp->score.combination) && isfinite(dp->score.gap),
               XD_ERROR_ARGUMENT, "scores %g, %g and %g must be finite", dp->score.match,
               dp->score.combination, dp->score.gap);
    XD_REQUIRE(ctx, dp->combination >= 1 && dp->combination <= XDI_DP_MOST_COMBINATION, XD_ERROR_ARGUMENT,
               "max_combination %d is outside [1, %d]", dp->combination, XDI_DP_MOST_COMBINATION);
    XD_REQUIRE(ctx,
               student_count >= 0 && student_count < INT32_MAX / 4 && teacher_count >= 0 &&
                   teacher_count < INT32_MAX / 4,
               XD_ERROR_ARGUMENT, "sequences of %lld and %lld tokens", (long long)student_count,
               (long long)teacher_count);
    XDI_GIVEN_LIST(ctx, desc->student.texts, student_count);
    XDI_GIVEN_LIST(ctx, desc->teacher.texts, teacher_count);
    return XD_OK;
}

static void xdi_dp_close(xdi_dp *dp) {
    xdi_canonical *strings[4] = { &dp->student.tokens, &dp->student.again, &dp->teacher.tokens,
                                  &dp->teacher.again };
    for (int i = 0; i < 4; i++) xdi_canonical_destroy(dp->ctx, strings[i]);
    xd_release(dp->ctx, dp->now.pairs);
    xd_release(dp->ctx, dp->next.pairs);
    xd_release(dp->ctx, dp->scores);
    xd_release(dp->ctx, dp->trace);
}

static xd_result xdi_dp_run(xdi_dp *dp, const xdi_align_dp_desc *desc, xd_alignment *out) {
    XD_TRY(xdi_dp_canonical_side(dp->ctx, desc->student, &dp->student));
    XD_TRY(xdi_dp_canonical_side(dp->ctx, desc->teacher, &dp->teacher));
    XD_TRY(xdi_dp_memory(dp));
    XD_TRY(xdi_dp_anchored(dp));
    xdi_dp_merge_bad(dp);
    XD_TRY(xdi_dp_split(dp));
    return xdi_dp_chunks(dp, &dp->student.again, &dp->teacher.again, out);
}

XD_PRIVATE xd_result xdi_align_dp(xd_ctx *ctx, const xdi_align_dp_desc *desc, xd_alignment *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xdi_dp dp;
    XD_TRY(xdi_dp_open(ctx, desc, &dp));
    const xd_result result = xdi_dp_run(&dp, desc, out);
    xdi_dp_close(&dp);
    return result;
}

static xd_result xdi_dp_run_segment(xdi_dp *dp, const xdi_align_dp_desc *desc, xd_alignment *out,
                                    double *score) {
    const int64_t n = desc->student.count, m = desc->teacher.count;
    const xdi_dp_table x = { 0, n, 0, m };
    XD_TRY(xdi_dp_plain_side(dp->ctx, desc->student, &dp->student));
    XD_TRY(xdi_dp_plain_side(dp->ctx, desc->teacher, &dp->teacher));
    XD_TRY(xdi_dp_memory(dp));
    XD_TRY(xdi_dp_align(dp, 0, n, 0, m, &dp->now));
    XD_TRY(xdi_dp_chunks(dp, &dp->student.tokens, &dp->teacher.tokens, out));
    if (score) *score = xdi_dp_row(dp, &x, n)[m];
    return XD_OK;
}

XD_PRIVATE xd_result xdi_align_segment(xd_ctx *ctx, const xdi_align_dp_desc *desc, xd_alignment *out,
                                       double *score) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xdi_dp dp;
    XD_TRY(xdi_dp_open(ctx, desc, &dp));
    const xd_result result = xdi_dp_run_segment(&dp, desc, out, score);
    xdi_dp_close(&dp);
    return result;
}
