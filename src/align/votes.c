/* Votes: how often a token of one vocabulary covered the same text as one of the other. */

#include "align/internal.h"
#include "align/rows.h"

#include <string.h>

struct xd_votes {
    xd_ctx *ctx;
    int64_t student_size, teacher_size;
    xdi_vote *cells; /* [capacity]; the first `read` are sorted and unique */
    int64_t count, capacity, read;
    int32_t *exact; /* [student_size] the only teacher id of a student id (xdi_votes_set_exact); -1: none */
};

XD_API xd_result xd_votes_create(xd_ctx *ctx, const xd_votes_desc *desc, xd_votes **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    const int64_t student_size = desc->student_size, teacher_size = desc->teacher_size;
    XD_REQUIRE(ctx,
               student_size > 0 && student_size <= INT32_MAX && teacher_size > 0 && teacher_size <= INT32_MAX,
               XD_ERROR_ARGUMENT, "votes between vocabularies of %lld and %lld ids", (long long)student_size,
               (long long)teacher_size);
    xd_votes *v = XDI_OBJECT(xd_votes, ctx, sizeof *v);
    int32_t *exact = (int32_t *)xd_allocate(ctx, (size_t)student_size * sizeof *exact);
    const bool fits = v && exact;
    if (!fits) {
        xd_release(ctx, v);
        xd_release(ctx, exact);
    }
    XD_REQUIRE(ctx, fits, XD_ERROR_MEMORY, "no room for votes of %lld ids", (long long)student_size);
    for (int64_t s = 0; s < student_size; s++) exact[s] = -1;
    v->ctx = ctx;
    v->student_size = student_size;
    v->teacher_size = teacher_size;
    v->exact = exact;
    *out = v;
    return XD_OK;
}

XD_PRIVATE xd_ctx *xdi_votes_describe(const xd_votes *votes, int64_t *student_size, int64_t *teacher_size) {
    *student_size = votes->student_size;
    *teacher_size = votes->teacher_size;
    return votes->ctx;
}

XD_PRIVATE bool xdi_votes_is_exact(const xd_votes *votes, int64_t student_id) {
    return votes->exact[student_id] >= 0;
}

XD_API void xd_votes_destroy(xd_votes *votes) {
    if (!votes || XDI_IS_GONE(xd_votes, votes)) return;
    xd_release(votes->ctx, votes->cells);
    xd_release(votes->ctx, votes->exact);
    xd_release(votes->ctx, votes);
}

static xd_result xdi_votes_check(const xd_votes *v, int64_t student_id, int64_t teacher_id) {
    XD_REQUIRE(v->ctx, student_id >= 0 && student_id < v->student_size, XD_ERROR_ARGUMENT,
               "student id %lld is outside a vocabulary of %lld", (long long)student_id,
               (long long)v->student_size);
    XD_REQUIRE(v->ctx, teacher_id >= 0 && teacher_id < v->teacher_size, XD_ERROR_ARGUMENT,
               "teacher id %lld is outside a vocabulary of %lld", (long long)teacher_id,
               (long long)v->teacher_size);
    return XD_OK;
}

static xd_result xdi_votes_grow(xd_votes *v) {
    const int64_t capacity = v->capacity ? 2 * v->capacity : 4096;
    xdi_vote *cells = (xdi_vote *)xd_allocate(v->ctx, (size_t)capacity * sizeof *cells);
    XD_REQUIRE(v->ctx, cells, XD_ERROR_MEMORY, "no room for %lld votes", (long long)capacity);
    if (v->count) memcpy(cells, v->cells, (size_t)v->count * sizeof *cells);
    xd_release(v->ctx, v->cells);
    v->cells = cells;
    v->capacity = capacity;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_check_weight(xd_ctx *ctx, double weight, int64_t student_id, int64_t teacher_id) {
    XD_REQUIRE(ctx, weight >= 0.0 && weight <= 3e38, XD_ERROR_ARGUMENT,
               "weight %g of ids %lld and %lld is negative or not finite", weight, (long long)student_id,
               (long long)teacher_id);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_check_row_weights(xd_ctx *ctx, const xd_projection_rows *rows) {
    XD_REQUIRE(ctx, rows->rows >= 0 && rows->rows <= INT32_MAX && rows->k >= 0 && rows->k <= INT32_MAX,
               XD_ERROR_ARGUMENT, "%lld rows of %lld entries", (long long)rows->rows, (long long)rows->k);
    XD_REQUIRE(ctx, (rows->ids && rows->weights) || rows->rows * rows->k == 0, XD_ERROR_ARGUMENT,
               "%lld rows of %lld entries without ids or weights", (long long)rows->rows, (long long)rows->k);
    for (int64_t i = 0; i < rows->rows * rows->k; i++)
        if (rows->ids[i] >= 0)
            XD_TRY(xdi_check_weight(ctx, (double)rows->weights[i], i / rows->k, rows->ids[i]));
    return XD_OK;
}

XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight) {
    XDI_LIVE(xd_votes, votes);
    XDI_GIVEN(NULL, votes);
    XD_TRY(xdi_votes_check(votes, student_id, teacher_id));
    XD_TRY(xdi_check_weight(votes->ctx, weight, student_id, teacher_id));
    if (votes->count == votes->capacity) XD_TRY(xdi_votes_grow(votes));
    xdi_vote *cell = &votes->cells[votes->count++];
    cell->student_id = (int32_t)student_id;
    cell->teacher_id = (int32_t)teacher_id;
    cell->weight = weight;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id) {
    XDI_GIVEN(NULL, votes);
    XD_TRY(xdi_votes_check(votes, student_id, teacher_id));
    votes->exact[student_id] = (int32_t)teacher_id;
    return XD_OK;
}

/* ---- passes ---- */

XD_PRIVATE void xdi_piece_weights(int64_t count, double *weights) {
    double sum = 0.0, weight = 0.9;
    for (int64_t i = 0; i < count; i++, weight *= 0.1) {
        weights[i] = weight;
        sum += weight;
    }
    for (int64_t i = 0; i < count; i++) weights[i] /= sum;
}

static bool xdi_votes_among(const int64_t *ids, int64_t count, int64_t id) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

static bool xdi_votes_special(xd_text text) {
    return text.size >= 4 && memcmp(text.data, "<|", 2) == 0 &&
           memcmp(text.data + text.size - 2, "|>", 2) == 0;
}

static bool xdi_votes_silent(const xdi_votes_pass *pass, int64_t id) {
    const xdi_vote_pieces *token = &pass->tokens[id];
    if (xdi_votes_special(token->text) || xdi_votes_among(pass->skip, pass->skip_count, id)) return true;
    for (int64_t i = 0; i < token->count; i++)
        if (xdi_votes_among(pass->foreign_skip, pass->foreign_skip_count, token->ids[i])) return true;
    return false;
}

enum { XDI_VOTES_MOST_PIECES = 32 };

XD_PRIVATE xd_result xdi_votes_add_pass(xd_votes *votes, const xdi_votes_pass *pass) {
    XDI_GIVEN_OF(votes, pass);
    XDI_GIVEN_LIST(votes->ctx, pass->tokens, pass->count);
    XDI_GIVEN_LIST(votes->ctx, pass->skip, pass->skip_count);
    XDI_GIVEN_LIST(votes->ctx, pass->foreign_skip, pass->foreign_skip_count);
    const int64_t most = pass->max_pieces;
    double weights[XDI_VOTES_MOST_PIECES];
    XD_REQUIRE(votes->ctx, most >= 1 && most <= XDI_VOTES_MOST_PIECES, XD_ERROR_ARGUMENT,
               "max_pieces %lld is outside [1, %d]", (long long)most, XDI_VOTES_MOST_PIECES);
    XD_REQUIRE(votes->ctx, pass->count >= 0 && pass->skip_count >= 0 && pass->foreign_skip_count >= 0,
               XD_ERROR_ARGUMENT, "%lld tokens, of which %lld are skipped and %lld pieces",
               (long long)pass->count, (long long)pass->skip_count, (long long)pass->foreign_skip_count);
    for (int64_t id = 0; id < pass->count; id++) {
        const xdi_vote_pieces *token = &pass->tokens[id];
        const int64_t n = token->count < most ? token->count : most;
        XD_REQUIRE(votes->ctx, n >= 0, XD_ERROR_ARGUMENT, "token %lld of %lld has %lld pieces", (long long)id,
                   (long long)pass->count, (long long)n);
        if (xdi_votes_silent(pass, id)) continue;
        xdi_piece_weights(n, weights);
        for (int64_t i = 0; i < n; i++) {
            const int64_t student = pass->reverse ? token->ids[i] : id;
            const int64_t teacher = pass->reverse ? id : token->ids[i];
            XD_TRY(xd_votes_add(votes, student, teacher, weights[i]));
        }
    }
    return XD_OK;
}

/* ---- reading ---- */

static int64_t xdi_votes_key(const xdi_vote *cell, bool by_student) {
    return by_student ? cell->student_id : cell->teacher_id;
}

/* Stable counting sort by one of the two ids. begin has vocabulary + 1 elements. */
static void xdi_votes_order(const xdi_vote *from, xdi_vote *to, int64_t count, bool by_student, int64_t size,
                            int64_t *begin) {
    memset(begin, 0, (size_t)(size + 1) * sizeof *begin);
    for (int64_t i = 0; i < count; i++) begin[xdi_votes_key(&from[i], by_student) + 1]++;
    for (int64_t i = 0; i < size; i++) begin[i + 1] += begin[i];
    for (int64_t i = 0; i < count; i++) to[begin[xdi_votes_key(&from[i], by_student)]++] = from[i];
}

/* Adds up equal cells of a sorted list in the order in which they were cast; exact ids have one cell. */
static int64_t xdi_votes_combine(const xd_votes *v, const xdi_vote *from, xdi_vote *to) {
    int64_t n = 0, at = 0;
    for (int32_t s = 0; s < (int32_t)v->student_size; s++) {
        if (v->exact[s] >= 0) {
            to[n].student_id = s;
            to[n].teacher_id = v->exact[s];
            to[n++].weight = 1.0;
        }
        for (; at < v->count && from[at].student_id == s; at++) {
            if (v->exact[s] >= 0) continue;
            if (n > 0 && to[n - 1].student_id == s && to[n - 1].teacher_id == from[at].teacher_id)
                to[n - 1].weight += from[at].weight;
            else
                to[n++] = from[at];
        }
    }
    return n;
}

XD_PRIVATE xd_result xdi_votes_read(xd_votes *votes, const xdi_vote **cells, int64_t *count) {
    XDI_GIVEN_OF(votes, cells, count);
    xd_votes *v = votes;
    const int64_t size = v->student_size > v->teacher_size ? v->student_size : v->teacher_size;
    const int64_t room = v->count + v->student_size; /* every id may be exact without a vote */
    int64_t *begin = (int64_t *)xd_allocate(v->ctx, (size_t)(size + 1) * sizeof *begin);
    xdi_vote *one = (xdi_vote *)xd_allocate(v->ctx, (size_t)room * sizeof *one);
    xdi_vote *two = (xdi_vote *)xd_allocate(v->ctx, (size_t)room * sizeof *two);
    const bool fits = begin && one && two;
    if (fits) {
        xdi_votes_order(v->cells, one, v->count, false, v->teacher_size, begin);
        xdi_votes_order(one, two, v->count, true, v->student_size, begin);
        v->count = xdi_votes_combine(v, two, one);
        v->capacity = room;
        xd_release(v->ctx, v->cells);
        v->cells = one;
        *cells = v->cells;
        *count = v->count;
    } else {
        xd_release(v->ctx, one);
    }
    xd_release(v->ctx, two);
    xd_release(v->ctx, begin);
    return fits ? XD_OK : XD_FAIL(v->ctx, XD_ERROR_MEMORY, "no room to sort %lld votes", (long long)v->count);
}
