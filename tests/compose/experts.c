/* experts.c - the block of experts behind the layers: a row goes to its expert, wherever that is, and what comes out is added to it. */
#include "toy.h"

#include <string.h>

enum { MATRIX, SHIFT, WEIGHTS };

/* ---- description ---- */

xd_result toy_experts_add(toy *t, xd_ctx *ctx, toy_storage *s) {
    const int64_t hidden = t->size.hidden, shape[3] = { t->size.experts, hidden, hidden };
    static const char *const names[WEIGHTS] = { "matrix", "shift" };
    const int members = xd_comm_size(t->members);
    const xd_axis axis = { "ep", members };
    const xd_topology_desc ranks = { .axes = &axis, .axis_count = 1, .world_size = members };
    const xd_block_desc block = { .name = "experts", .type = "experts" };
    xd_topology topology;
    t->mine = xd_chunk(t->size.experts, members, xd_comm_rank(t->members));
    XD_TRY(xd_topology_create(ctx, &ranks, &topology));
    XD_TRY(xd_block_add(xd_model_root(t->model), &block, &t->experts));
    for (int i = 0; i < WEIGHTS; i++) {
        xd_layout_desc l = { .ndim = 3 - i, .topology = &topology, .placement = { { XD_SHARD } } };
        memcpy(l.shape, shape, sizeof shape);
        if (i == SHIFT) l.shape[2] = 0;
        XD_TRY(xd_layout_create(ctx, &l, &t->layouts[i]));
        xd_weight_desc d = { .name = names[i], .dtype = s->dtype, .ndim = l.ndim, .layout = t->layouts[i] };
        memcpy(d.shape, l.shape, sizeof shape);
        d.init.kind = XD_INIT_NORMAL;
        d.init.scale = 0.3f;
        d.traits.expert = true;
        d.traits.frozen = i == MATRIX && (t->size.frozen & 8) != 0;
        toy_place(&d, (t->mine.end - t->mine.begin) * hidden * (i == MATRIX ? hidden : 1), s);
        XD_TRY(xd_weight_add(t->experts, &d, NULL));
    }
    return XD_OK;
}

/* ---- rows ---- */

static int expert_of(const toy *t, const toy_pass *p, int row) {
    return (int)((toy_number(p->step + 201, p->leaf, row) + 0.5f) * (float)t->size.experts);
}

/* Who gets which rows. */
static xd_result route(const toy *t, const toy_pass *p) {
    toy_routes *routes = &p->kept->routes;
    const int members = xd_comm_size(t->members), here = (int)(t->mine.end - t->mine.begin);
    int64_t counts[TOY_EXPERTS] = { 0 }, most[TOY_MEMBERS], mine[TOY_MEMBERS];
    int n = 0;
    memset(routes, 0, sizeof *routes);
    for (int m = 0; m < members; m++) {
        const xd_interval theirs = xd_chunk(t->size.experts, members, m);
        most[m] = theirs.end - theirs.begin;
        mine[m] = here;
        for (int64_t e = theirs.begin; e < theirs.end; e++)
            for (int r = 0; r < t->size.rows && p->leaf >= 0; r++) {
                if (expert_of(t, p, r) != e) continue;
                routes->order[n++] = r;
                routes->sent[m]++;
                counts[e]++;
            }
    }
    XD_TRY(xd_all_to_all(t->members, counts, most, routes->counts, mine, XD_DTYPE_I64));
    for (int i = 0; i < members * here; i++) routes->came[i / here] += routes->counts[i];
    return XD_OK;
}

/* Rows in the order in which they are sent, to their experts, or back. */
static xd_result move(const toy *t, const toy_routes *routes, float (*from)[TOY_HIDDEN],
                      float (*to)[TOY_HIDDEN], bool back) {
    int64_t out[TOY_MEMBERS], in[TOY_MEMBERS];
    for (int m = 0; m < TOY_MEMBERS; m++) {
        out[m] = TOY_HIDDEN * (back ? routes->came[m] : routes->sent[m]);
        in[m] = TOY_HIDDEN * (back ? routes->sent[m] : routes->came[m]);
    }
    return xd_all_to_all(t->members, from, out, to, in, XD_DTYPE_F32);
}

static int64_t rows_of(const toy *t, const toy_pass *p) {
    return p->leaf < 0 ? 0 : t->size.rows;
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

/* Adds to gradients; d, of y, becomes that of x. */
static void row_backward(int hidden, const float *matrix, float *const *g, const float *x, float *d) {
    float out[TOY_HIDDEN] = { 0.0f };
    for (int i = 0; i < hidden; i++) {
        if (g[SHIFT]) g[SHIFT][i] += d[i];
        for (int j = 0; j < hidden; j++) {
            if (g[MATRIX]) g[MATRIX][i * hidden + j] += d[i] * x[j];
            out[j] += matrix[i * hidden + j] * d[i];
        }
    }
    memcpy(d, out, sizeof out);
}

/* The rows of one member through this rank's experts; with gradients `g`, the way back. */
static void member_rows(const toy *t, toy_routes *routes, int member, float *const *w, float *const *g,
                        float (*rows)[TOY_HIDDEN]) {
    const int64_t here = t->mine.end - t->mine.begin, hidden = t->size.hidden;
    int64_t at = 0;
    for (int m = 0; m < member; m++) at += routes->came[m];
    for (int64_t e = 0; e < here; e++)
        for (int64_t n = 0; n < routes->counts[member * here + e]; n++, at++) {
            const float *matrix = w[MATRIX] + e * hidden * hidden, *shift = w[SHIFT] + e * hidden;
            if (!g) {
                row_forward((int)hidden, matrix, shift, routes->rows[at], rows[at]);
                continue;
            }
            float *const gradients[WEIGHTS] = { g[MATRIX] ? g[MATRIX] + e * hidden * hidden : NULL,
                                                g[SHIFT] ? g[SHIFT] + e * hidden : NULL };
            row_backward((int)hidden, matrix, gradients, routes->rows[at], rows[at]);
        }
}

/* All rows that came, through the experts once. */
static xd_result compute(const toy *t, xd_pass_kind kind, toy_routes *routes, float (*rows)[TOY_HIDDEN]) {
    const xd_pass pass = { kind, 0, false };
    float *w[WEIGHTS];
    XD_TRY(toy_open(t, t->experts, pass, w, NULL));
    for (int m = 0; m < xd_comm_size(t->members); m++) member_rows(t, routes, m, w, NULL, rows);
    return toy_close(t, t->experts);
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
    const int members = xd_comm_size(t->members);
    XD_TRY(send(t, p, d, rows));
    for (int m = 0; m < members; m++) {
        const xd_pass pass = { XD_PASS_BACKWARD, p->k * members + m, false };
        float *w[WEIGHTS], *g[WEIGHTS];
        XD_TRY(toy_open(t, t->experts, pass, w, g));
        if (p->recompute) XD_TRY(compute(t, XD_PASS_RECOMPUTE, &p->kept->routes, again));
        member_rows(t, &p->kept->routes, m, w, g, rows);
        XD_TRY(toy_close(t, t->experts));
    }
    return bring(t, p, rows, d);
}
