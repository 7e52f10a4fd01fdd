/* experts.c - the block of experts behind the layers: a row goes to its expert, wherever that is, and what comes out is added to it. */
#include "toy.h"

#include <string.h>

enum { MATRIX, SHIFT, WEIGHTS };

/* ---- description ---- */

xd_result toy_experts_add(toy *t, toy_storage *s) {
    const xd_block_desc block = { .name = "experts", .type = "experts" };
    xd_weight_desc matrix = { .name = "matrix" }, shift = { .name = "shift" };
    matrix.traits.expert = shift.traits.expert = true;
    matrix.traits.frozen = (t->size.frozen & 8) != 0;
    XD_TRY(xd_block_add(xd_model_root(t->model), &block, &t->experts));
    XD_TRY(toy_add(t, t->experts, SHARE_MATRICES, matrix, s));
    return toy_add(t, t->experts, SHARE_SHIFTS, shift, s);
}

static int members_of(const toy *t) {
    return xd_comm_size(t->share->ranks.members);
}

static int64_t experts_of(const toy *t) {
    return t->share->experts.end - t->share->experts.begin;
}

/* ---- rows ---- */

static int expert_of(const toy *t, const toy_pass *p, int64_t row) {
    return (int)((toy_number(p->step + 201, p->leaf, row) + 0.5f) * (float)t->size.experts);
}

/* Who gets which rows. */
static xd_result route(const toy *t, const toy_pass *p) {
    toy_routes *routes = &p->kept->routes;
    const xd_interval rows = t->share->rows;
    const int members = members_of(t), here = (int)experts_of(t);
    int64_t counts[TOY_EXPERTS] = { 0 }, most[TOY_MEMBERS], mine[TOY_MEMBERS];
    int n = 0;
    memset(routes, 0, sizeof *routes);
    for (int m = 0; m < members; m++) {
        const xd_interval theirs = xd_chunk(t->size.experts, members, m);
        most[m] = theirs.end - theirs.begin;
        mine[m] = here;
        for (int64_t e = theirs.begin; e < theirs.end; e++)
            for (int64_t r = rows.begin; r < rows.end && p->leaf >= 0; r++) {
                if (expert_of(t, p, r) != e) continue;
                routes->order[n++] = r;
                routes->sent[m]++;
                counts[e]++;
            }
    }
    XD_TRY(xd_all_to_all(t->share->ranks.members, counts, most, routes->counts, mine, XD_DTYPE_I64));
    for (int i = 0; i < members * here; i++) routes->came[i / here] += routes->counts[i];
    return xd_all_to_all(t->share->ranks.members, routes->order, routes->sent, routes->numbers, routes->came,
                         XD_DTYPE_I64);
}

/* Rows in the order in which they are sent, to their experts, or back. */
static xd_result move(const toy *t, const toy_routes *routes, float (*from)[TOY_HIDDEN],
                      float (*to)[TOY_HIDDEN], bool back) {
    int64_t out[TOY_MEMBERS], in[TOY_MEMBERS];
    for (int m = 0; m < TOY_MEMBERS; m++) {
        out[m] = TOY_HIDDEN * (back ? routes->came[m] : routes->sent[m]);
        in[m] = TOY_HIDDEN * (back ? routes->sent[m] : routes->came[m]);
    }
    return xd_all_to_all(t->share->ranks.members, from, out, to, in, XD_DTYPE_F32);
}

static int64_t rows_of(const toy *t, const toy_pass *p) {
    return p->leaf < 0 ? 0 : t->share->rows.end - t->share->rows.begin;
}

static xd_result send(const toy *t, const toy_pass *p, float (*rows)[TOY_HIDDEN], float (*to)[TOY_HIDDEN]) {
    float sent[TOY_ROWS][TOY_HIDDEN];
    for (int64_t i = 0; i < rows_of(t, p); i++)
        memcpy(sent[i], rows[p->kept->routes.order[i]], sizeof sent[i]);
    return move(t, &p->kept->routes, sent, to, false);
}

/* What comes back is added to the rows. */
static xd_result bring(const toy *t, const toy_pass *p, float (*from)[TOY_HIDDEN],
                       float (*rows)[TOY_HIDDEN]) {
    float came[TOY_ROWS][TOY_HIDDEN];
    XD_TRY(move(t, &p->kept->routes, from, came, true));
    for (int64_t i = 0; i < rows_of(t, p); i++)
        for (int c = 0; c < t->size.hidden; c++) rows[p->kept->routes.order[i]][c] += came[i][c];
    return XD_OK;
}

/* ---- passes ---- */

/* y = matrix x + shift. */
static void row_forward(int hidden, const float *matrix, const float *shift, const float *x, float *y) {
    for (int i = 0; i < hidden; i++) {
        y[i] = shift[i];
        for (int j = 0; j < hidden; j++) y[i] += matrix[i * hidden + j] * x[j];
    }
}

/* The gradients of both; d, of y, becomes that of x. */
static void row_backward(int hidden, const float *matrix, float *const *g, const float *x, float *d) {
    float out[TOY_HIDDEN] = { 0.0f };
    for (int i = 0; i < hidden; i++) {
        g[SHIFT][i] = d[i];
        for (int j = 0; j < hidden; j++) {
            g[MATRIX][i * hidden + j] = d[i] * x[j];
            out[j] += matrix[i * hidden + j] * d[i];
        }
    }
    memcpy(d, out, sizeof out);
}

/* All rows that came, through the experts once. */
static xd_result compute(const toy *t, xd_pass_kind kind, toy_routes *routes, float (*rows)[TOY_HIDDEN]) {
    const xd_pass pass = { kind, 0, false };
    const int64_t here = experts_of(t), hidden = t->size.hidden;
    int64_t at = 0;
    float *w[WEIGHTS];
    XD_TRY(toy_open(t, t->experts, pass, w, NULL));
    for (int64_t i = 0; i < members_of(t) * here; i++)
        for (int64_t n = 0; n < routes->counts[i]; n++, at++)
            row_forward((int)hidden, w[MATRIX] + i % here * hidden * hidden, w[SHIFT] + i % here * hidden,
                        routes->rows[at], rows[at]);
    return toy_close(t, t->experts);
}

/* Where the row of a member's leaf is among those that came, and its expert here; false when it did not come. */
static bool find_row(const toy *t, const toy_routes *routes, int member, int64_t row, int64_t *at,
                     int64_t *expert) {
    const int64_t here = experts_of(t);
    *at = 0;
    for (int m = 0; m < member; m++) *at += routes->came[m];
    for (*expert = 0; *expert < here; ++*expert)
        for (int64_t n = 0; n < routes->counts[member * here + *expert]; n++, ++*at)
            if (routes->numbers[*at] == row) return true;
    return false;
}

/* The way back of the rows of one member, with the gradients that they give. */
static xd_result member_backward(const toy *t, toy_routes *routes, int member, float *const *w,
                                 float *const *g, float (*rows)[TOY_HIDDEN]) {
    sharing *s = t->share;
    const int64_t hidden = t->size.hidden, matrices = experts_of(t) * hidden * hidden;
    for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
        int64_t at, expert;
        float *place;
        XD_TRY(share_place(s->weights[SHARE_OF_EXPERTS], s->counts[SHARE_OF_EXPERTS], &place));
        if (find_row(t, routes, member, r, &at, &expert)) {
            float *const out[WEIGHTS] = { place + expert * hidden * hidden,
                                          place + matrices + expert * hidden };
            row_backward((int)hidden, w[MATRIX] + expert * hidden * hidden, out, routes->rows[at], rows[at]);
        }
        XD_TRY(xd_leaf_stack_push(s->weights[SHARE_OF_EXPERTS], place));
    }
    XD_TRY(share_join(s, SHARE_OF_EXPERTS));
    toy_add_to(g[MATRIX], s->sum, matrices);
    toy_add_to(g[SHIFT], s->sum + matrices, s->counts[SHARE_OF_EXPERTS] - matrices);
    return XD_OK;
}

xd_result toy_experts_forward(const toy *t, const toy_pass *p) {
    float rows[TOY_MEMBERS * TOY_ROWS][TOY_HIDDEN];
    float(*h)[TOY_HIDDEN] = p->kept->h[t->size.layers + 1];
    memset(rows, 0, sizeof rows);
    memcpy(h, p->kept->h[t->size.layers], sizeof p->kept->h[0]);
    XD_TRY(route(t, p));
    XD_TRY(send(t, p, h, p->kept->routes.rows));
    XD_TRY(compute(t, p->kind, &p->kept->routes, rows));
    return bring(t, p, rows, h);
}

/* A backward for each member's leaf. */
xd_result toy_experts_backward(const toy *t, const toy_pass *p, float d[TOY_ROWS][TOY_HIDDEN]) {
    float rows[TOY_MEMBERS * TOY_ROWS][TOY_HIDDEN], again[TOY_MEMBERS * TOY_ROWS][TOY_HIDDEN];
    const int members = members_of(t);
    XD_TRY(send(t, p, d, rows));
    for (int m = 0; m < members; m++) {
        const xd_pass pass = { XD_PASS_BACKWARD, p->k * members + m, false };
        float *w[WEIGHTS], *g[WEIGHTS];
        XD_TRY(toy_open(t, t->experts, pass, w, g));
        if (p->recompute) XD_TRY(compute(t, XD_PASS_RECOMPUTE, &p->kept->routes, again));
        XD_TRY(member_backward(t, &p->kept->routes, m, w, g, rows));
        XD_TRY(toy_close(t, t->experts));
    }
    return bring(t, p, rows, d);
}
