/* Losses across tokenizers on vectors. Rows that f32 cannot represent are left to the plain kernels. */

#include "kernel/cpu/xtoken.h"
#include "kernel/ids.h"
#include "kernel/simd/loops.h"

#include <math.h>
#include <string.h>

/* Rows and pairs of ids at a time. */
enum { XDI_XTOKEN_ROWS = 64, XDI_XTOKEN_PAIRS = 512 };

/* ---- rows ---- */

/* scale exp(z / temperature - lse); false where f32 does not fit. */
XD_PRIVATE bool xdi_simd_xtoken_power(double temperature, double lse, double scale, xdi_xtoken_power *p) {
    const double factor = XDI_TILE_LOG2E / temperature, log2_all = lse * temperature * (double)(float)factor;
    if (!xdi_simd_fits(lse * temperature, factor)) return false;
    p->power = xdi_tile_power_of(factor, rint(log2_all));
    p->scale = (float)(scale * exp2(rint(log2_all) - log2_all));
    return true;
}

static bool xdi_simd_xtoken_takes(const xd_rows *rows) {
    return rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16;
}

static bool xdi_simd_xtoken_writes(const xd_xtoken_gradient *to) {
    return !to->fixed && xdi_simd_xtoken_takes(&to->x.logits) && xdi_simd_xtoken_takes(&to->rows);
}

static xd_xtoken_rows xdi_simd_xtoken_one(const xd_xtoken_rows *x, int64_t i) {
    xd_xtoken_rows one = *x;
    one.rows = x->rows + i;
    one.places = x->places + i;
    one.count = 1;
    return one;
}

/* ---- 16 chunks at once ---- */

/* The ids of a block that have tables: all n or, packed, only those that have entries; `list` counts from the first id of the
 * block. */
typedef struct xdi_simd_ids {
    int64_t v, n, tables;
    bool packed;
    int32_t list[XDI_XTOKEN_BLOCK];
} xdi_simd_ids;

/* Which of the rows are used: NULL -> all, otherwise those whose chunk has a nonzero `largest` and, with `several`, more than
 * one position. */
typedef struct xdi_simd_filter {
    const xd_xtoken_chunk *chunks;
    bool several;
} xdi_simd_filter;

static bool xdi_simd_looks(const xdi_simd_filter *filter, int64_t place) {
    const xd_xtoken_chunk *c = filter->chunks ? &filter->chunks[place] : NULL;
    return !c || (c->largest != 0.0 && !(filter->several && c->alone));
}

/* Up to 64 rows, of up to 16 chunks, and their tables in the scratch. */
typedef struct xdi_simd_group {
    const xdi_xtoken_loops *loops;
    const xd_xtoken_rows *x;
    xdi_xtoken_entries m;
    int64_t k;
    int64_t end; /* in x->rows, skipped rows included */
    int64_t places[XDI_XTOKEN_LANES];
    int lanes, rows;
    int64_t row[XDI_XTOKEN_ROWS];        /* indices in x->rows */
    int lane[XDI_XTOKEN_ROWS];           /* of a row */
    bool fits[XDI_XTOKEN_ROWS];          /* false: a row for the plain kernels */
    xdi_xtoken_power p[XDI_XTOKEN_ROWS]; /* its probabilities */
    float *slots;                        /* [k, 16] */
    float *block;                        /* [BLOCK, 16] of a block of ids */
    float *across;                       /* [16, STRIDE] the same, transposed */
    float *packed;                       /* [STRIDE] of one row */
    xdi_simd_ids ids;
} xdi_simd_group;

static void xdi_simd_group_tables(xdi_simd_group *g, float *scratch) {
    g->slots = scratch;
    g->block = g->slots + XDI_XTOKEN_LANES * g->k;
    g->across = g->block + XDI_XTOKEN_LANES * XDI_XTOKEN_BLOCK;
    g->packed = g->across + XDI_XTOKEN_LANES * (int)XDI_XTOKEN_STRIDE;
    memset(g->across, 0, (XDI_XTOKEN_LANES + 1) * XDI_XTOKEN_STRIDE * sizeof *g->across);
}

/* Where the group that begins with a row ends: it takes whole chunks, or a part of one that is longer than a group, so that a
 * chunk's sum does not depend on its neighbours. */
static int64_t xdi_simd_group_end(const xd_xtoken_rows *x, const xdi_simd_filter *filter, int64_t begin) {
    int64_t end = begin, rows = 0;
    for (int lanes = 0; end < x->count;) {
        const int64_t place = x->places[end];
        int64_t next = end;
        while (next < x->count && x->places[next] == place && next - end < XDI_XTOKEN_ROWS) next++;
        if (xdi_simd_looks(filter, place)) {
            if (lanes == XDI_XTOKEN_LANES || rows + (next - end) > XDI_XTOKEN_ROWS) break;
            rows += next - end;
            lanes++;
        }
        end = next;
        if (rows == XDI_XTOKEN_ROWS) break;
    }
    return end;
}

/* The group of rows that begins at `begin`. What no row fills is 0. */
static xdi_simd_group xdi_simd_group_at(const xd_launch *launch, const xd_xtoken_rows *x,
                                        const xd_xtoken_matrix *m, const xdi_simd_filter *filter,
                                        int64_t begin) {
    xdi_simd_group g;
    memset(&g, 0, sizeof g);
    g.loops = xdi_loops_of(launch)->xtoken;
    g.x = x;
    g.m = xdi_xtoken_entries_of(m);
    g.k = m->k;
    g.end = xdi_simd_group_end(x, filter, begin);
    for (int64_t i = begin; i < g.end; i++) {
        const int64_t place = x->places[i];
        if (!xdi_simd_looks(filter, place)) continue;
        if (g.lanes == 0 || g.places[g.lanes - 1] != place) g.places[g.lanes++] = place;
        g.row[g.rows] = i;
        g.lane[g.rows] = g.lanes - 1;
        g.fits[g.rows] = xdi_simd_xtoken_power(x->temperature, x->lse[x->rows[i]], 1.0, &g.p[g.rows]);
        g.rows++;
    }
    return g;
}

static int64_t xdi_simd_block_at(int64_t v, int64_t columns) {
    const int64_t block = XDI_XTOKEN_BLOCK;
    return columns - v < block ? columns - v : block;
}

/* Rounded up to whole vectors of every width. */
static int64_t xdi_simd_padded_of(int64_t n) {
    return (n + XDI_XTOKEN_LANES - 1) / XDI_XTOKEN_LANES * XDI_XTOKEN_LANES;
}

/* The block that begins at v. The powers of four ids cost less than gathering one. */
static void xdi_simd_open_block(xdi_simd_group *g, int64_t v) {
    const xdi_xtoken_entries *m = &g->m;
    const int64_t n = xdi_simd_block_at(v, g->x->columns), dense = XDI_XTOKEN_DENSE, end = m->begin[v + n];
    int64_t count = 0;
    int32_t last = -1;
    g->ids.v = v;
    g->ids.packed = end - m->begin[v] < n / 4;
    g->ids.n = g->ids.tables = g->ids.packed || n < dense ? n : dense;
    if (!g->ids.packed) return;
    for (int64_t e = m->begin[v]; e < end; e++) {
        const int32_t id = m->student[e] - (int32_t)v;
        count += id != last ? 1 : 0;
        g->ids.list[count - 1] = last = id;
    }
    g->ids.tables = count;
}

/* All entries of the block, to slots or back. */
static void xdi_simd_walk_block(const xdi_simd_group *g, bool back) {
    const xdi_xtoken_entries *m = &g->m;
    const int64_t from = m->begin[g->ids.v], count = m->begin[g->ids.v + g->ids.n] - from;
    g->loops->walk(m->student + from, m->slot + from, m->weight + from, count, g->ids.packed, g->ids.v,
                   g->block, g->slots, back);
}

/* Logits of the group's row that have tables; how many. */
static int64_t xdi_simd_block_logits(const xdi_simd_group *g, int at, xdi_simd_array *x) {
    *x = xdi_simd_array_of(&g->x->logits, g->x->rows[g->row[at]], g->ids.v);
    if (!g->ids.packed) return g->ids.n;
    g->loops->pack(*x, g->ids.n, g->ids.list, g->ids.tables, g->packed);
    *x = xdi_xtoken_floats(g->packed);
    return xdi_simd_padded_of(g->ids.tables);
}

/* Probabilities of the block, summed over each chunk's rows: in `across`. */
static void xdi_simd_project_block(const xdi_simd_group *g) {
    bool has[XDI_XTOKEN_LANES];
    memset(has, 0, sizeof has);
    for (int at = 0; at < g->rows; at++) {
        const int lane = g->lane[at];
        xdi_simd_array x;
        if (!g->fits[at]) continue;
        const int64_t n = xdi_simd_block_logits(g, at, &x);
        g->loops->powers(x, n, g->p[at], has[lane], g->across + lane * XDI_XTOKEN_STRIDE);
        has[lane] = true;
    }
}

static void xdi_simd_project_group(xdi_simd_group *g, double *cells) {
    memset(g->slots, 0, (size_t)(XDI_XTOKEN_LANES * g->k) * sizeof(float));
    for (int64_t v = 0; v < g->x->columns; v += g->ids.n) {
        xdi_simd_open_block(g, v);
        if (g->ids.tables == 0) continue;
        xdi_simd_project_block(g);
        g->loops->to_tables(g->across, g->ids.tables, g->block);
        xdi_simd_walk_block(g, false);
    }
    for (int64_t j = 0; j < g->k; j += XDI_XTOKEN_BLOCK) {
        const int64_t n = xdi_simd_block_at(j, g->k);
        g->loops->to_lanes(g->slots + j * XDI_XTOKEN_LANES, n, g->across);
        for (int lane = 0; lane < g->lanes; lane++)
            g->loops->widen(xdi_xtoken_floats(g->across + lane * XDI_XTOKEN_STRIDE), n, 1.0, 0.0, true,
                            cells + g->places[lane] * g->k + j);
    }
}

/* Tables of J, of a block of ids in both layouts, and of a row; or both sides of a divergence. The plain kernels, which compute
 * sums in fixed point, need none. */
static int64_t xdi_simd_xtoken_project_scratch(int64_t k, bool fixed) {
    if (fixed) return 0;
    return XDI_XTOKEN_LANES * (k + XDI_XTOKEN_BLOCK) + (XDI_XTOKEN_LANES + 1) * XDI_XTOKEN_STRIDE;
}

/* Groups shared among the threads: runs of groups that begin with a chunk. The rows of run i are [bound[i], bound[i + 1]); at
 * most XDI_XTOKEN_RUNS runs at a time. */
enum { XDI_XTOKEN_RUNS = 64 };

typedef struct xdi_simd_runs {
    const void *args;
    xdi_simd_filter filter;
    int64_t bound[XDI_XTOKEN_RUNS + 1], count;
} xdi_simd_runs;

/* The runs that begin at a row. */
static void xdi_simd_cut(const xd_xtoken_rows *x, xdi_simd_runs *runs, int64_t begin) {
    runs->bound[0] = begin;
    for (runs->count = 0; runs->count < XDI_XTOKEN_RUNS && begin < x->count; runs->count++) {
        begin = xdi_simd_group_end(x, &runs->filter, begin);
        while (begin < x->count && x->places[begin] == x->places[begin - 1])
            begin = xdi_simd_group_end(x, &runs->filter, begin);
        runs->bound[runs->count + 1] = begin;
    }
}

/* Calls the body for all runs, each with tables of its own. */
static xd_result xdi_simd_spread(const xd_launch *launch, const xd_xtoken_rows *x, int64_t k,
                                 xdi_spread_body body, xdi_simd_runs *runs) {
    const size_t bytes = (size_t)xdi_simd_xtoken_project_scratch(k, false) * sizeof(float);
    for (int64_t begin = 0; begin < x->count; begin = runs->bound[runs->count]) {
        xdi_simd_cut(x, runs, begin);
        XD_TRY(xdi_spread_rooms(launch, runs->count, XDI_XTOKEN_ROWS * x->columns, bytes, body, runs));
    }
    return XD_OK;
}

static void xdi_simd_project_runs(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                  int slot) {
    const xdi_simd_runs *runs = (const xdi_simd_runs *)args;
    const xd_xtoken_project_args *a = (const xd_xtoken_project_args *)runs->args;
    float *scratch = (float *)xdi_spread_room(launch, a->scratch, slot);
    for (int64_t row = runs->bound[begin]; row < runs->bound[end];) {
        xdi_simd_group g = xdi_simd_group_at(launch, &a->x, &a->matrix, &runs->filter, row);
        xdi_simd_group_tables(&g, scratch);
        xdi_simd_project_group(&g, a->cells);
        for (int at = 0; at < g.rows; at++) {
            xd_xtoken_project_args one = *a;
            one.x = xdi_simd_xtoken_one(&a->x, g.row[at]);
            if (!g.fits[at]) xdi_xtoken_kernels_plain()->project(launch, &one);
        }
        row = g.end;
    }
}

static xd_result xdi_simd_xtoken_project(const xd_launch *launch, const xd_xtoken_project_args *a) {
    xdi_simd_runs runs = { a, { NULL, false }, { 0 }, 0 };
    if (a->fixed || !xdi_simd_xtoken_takes(&a->x.logits))
        return xdi_xtoken_kernels_plain()->project(launch, a);
    return xdi_simd_spread(launch, &a->x, a->matrix.k, xdi_simd_project_runs, &runs);
}

/* dy of the group's chunks: slots. */
static void xdi_simd_load_slopes(const xdi_simd_group *g, const double *dy) {
    for (int64_t j = 0; j < g->k; j += XDI_XTOKEN_BLOCK) {
        const int64_t n = xdi_simd_block_at(j, g->k);
        for (int lane = 0; lane < g->lanes; lane++)
            g->loops->narrow(dy + g->places[lane] * g->k + j, n, 1.0, 0.0,
                             g->across + lane * XDI_XTOKEN_STRIDE);
        g->loops->to_tables(g->across, n, g->slots + j * XDI_XTOKEN_LANES);
    }
}

/* h = M dy of the block: in `across`. */
static void xdi_simd_back_block(const xdi_simd_group *g) {
    const int64_t tables = xdi_simd_padded_of(g->ids.tables);
    memset(g->block, 0, (size_t)(XDI_XTOKEN_LANES * tables) * sizeof(float));
    xdi_simd_walk_block(g, true);
    g->loops->to_lanes(g->block, tables, g->across);
}

static void xdi_simd_delta_group(xdi_simd_group *g, const xd_xtoken_delta_args *a) {
    xdi_simd_load_slopes(g, a->dy);
    for (int64_t v = 0; v < g->x->columns; v += g->ids.n) {
        xdi_simd_open_block(g, v);
        if (g->ids.tables == 0) continue;
        xdi_simd_back_block(g);
        for (int at = 0; at < g->rows; at++) {
            const int64_t i = g->row[at];
            xdi_simd_array x;
            if (!g->fits[at]) continue;
            const int64_t n = xdi_simd_block_logits(g, at, &x);
            a->cells[i] += g->loops->dot(x, n, g->p[at], g->across + g->lane[at] * XDI_XTOKEN_STRIDE) /
                           a->chunks[a->x.places[i]].largest;
        }
    }
}

static void xdi_simd_delta_runs(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                int slot) {
    const xdi_simd_runs *runs = (const xdi_simd_runs *)args;
    const xd_xtoken_delta_args *a = (const xd_xtoken_delta_args *)runs->args;
    float *scratch = (float *)xdi_spread_room(launch, a->scratch, slot);
    for (int64_t row = runs->bound[begin]; row < runs->bound[end];) {
        xdi_simd_group g = xdi_simd_group_at(launch, &a->x, &a->matrix, &runs->filter, row);
        row = g.end;
        if (g.rows == 0) continue;
        xdi_simd_group_tables(&g, scratch);
        xdi_simd_delta_group(&g, a);
        for (int at = 0; at < g.rows; at++) {
            xd_xtoken_delta_args one = *a;
            one.x = xdi_simd_xtoken_one(&a->x, g.row[at]);
            one.cells = a->cells + g.row[at];
            if (!g.fits[at]) xdi_xtoken_kernels_plain()->delta(launch, &one);
        }
    }
}

static xd_result xdi_simd_xtoken_delta(const xd_launch *launch, const xd_xtoken_delta_args *a) {
    xdi_simd_runs runs = { a, { a->chunks, true }, { 0 }, 0 };
    if (a->fixed || !xdi_simd_xtoken_takes(&a->x.logits)) return xdi_xtoken_kernels_plain()->delta(launch, a);
    return xdi_simd_spread(launch, &a->x, a->matrix.k, xdi_simd_delta_runs, &runs);
}

/* ---- gradient ---- */

/* A gradient of this many bytes is in no cache when it is next read: its stores bypass the caches. */
#define XDI_XTOKEN_PAST ((size_t)1 << 25)

static bool xdi_simd_goes_past(const xd_rows *x) {
    const size_t size = xd_dtype_size(x->dtype), stride = (size_t)(x->stride ? x->stride : x->cols) * size;
    return (uintptr_t)x->data % 64 == 0 && stride % 64 == 0 && (size_t)x->rows * stride >= XDI_XTOKEN_PAST;
}

/* Both parts from one power: (p1 / p) p joins what is subtracted from u. */
static void xdi_simd_join_powers(xdi_xtoken_writer *w) {
    const xdi_tile_power *p = &w->p.power, *p1 = &w->p1.power;
    if (!w->hard || !w->soft || p->factor != p1->factor || p->whole != p1->whole) return;
    w->shift -= w->p1.scale / w->p.scale;
    w->hard = false;
}

/* The constants of rows[i] for all blocks; false where f32 does not suffice. */
static bool xdi_simd_writer(const xdi_xtoken_form *f, int64_t i, xdi_xtoken_writer *w) {
    const xd_xtoken_gradient *to = f->to;
    const xd_xtoken_rows *x = &to->x;
    const int64_t row = x->rows[i];
    const double delta = f->delta ? f->delta[i] : 0.0, tau = x->temperature;
    memset(w, 0, sizeof *w);
    w->add = to->written[row] != 0;
    w->past = !w->add && xdi_simd_goes_past(&to->rows);
    w->times_p = f->dy != NULL;
    w->soft = w->times_p || delta != 0.0;
    w->hard = !w->add && to->ce_factor && to->ce_factor[row] != 0.0;
    w->label = w->hard ? xd_id_at(to->labels, row) - x->first : -1;
    w->u = f->u;
    w->u_scale = f->dy ? 1.0f : (float)f->scale;
    w->shift = (float)delta;
    if (w->soft && !xdi_simd_xtoken_power(tau, x->lse[row], f->dy ? 1.0 / tau : 1.0, &w->p)) return false;
    if (w->hard && !xdi_simd_xtoken_power(1.0, to->lse_one[row], to->ce_factor[row] * to->ce_weight, &w->p1))
        return false;
    xdi_simd_join_powers(w);
    return true;
}

/* Columns [v, v + n) of rows[i]. The label is subtracted before the sum is rounded, and needs the previous gradient and the
 * logit there. */
static void xdi_simd_write_block(const xdi_xtoken_loops *loops, const xdi_xtoken_form *f, int64_t i,
                                 xdi_xtoken_writer *w, int64_t v, int64_t n) {
    const int64_t row = f->to->x.rows[i];
    const bool here = w->label >= v && w->label < v + n;
    double at_label = 0.0;
    if (here) at_label = xdi_xtoken_gradient_at(f, i, w->label, f->dy ? (double)w->u[w->label - v] : 0.0);
    w->x = xdi_simd_array_of(&f->to->x.logits, row, v);
    w->out = xdi_simd_array_of(&f->to->rows, row, v);
    loops->write(w, n);
    if (here) xdi_loss_store(&f->to->rows, row, w->label, at_label);
}

/* Rows of a group by blocks, so that h is computed once for all rows of a chunk. */
static void xdi_simd_write_group(xdi_simd_group *g, const xdi_xtoken_form *f) {
    xdi_xtoken_writer writers[XDI_XTOKEN_ROWS];
    for (int at = 0; at < g->rows; at++) g->fits[at] = xdi_simd_writer(f, g->row[at], &writers[at]);
    xdi_simd_load_slopes(g, f->dy);
    for (int64_t v = 0; v < g->x->columns; v += XDI_XTOKEN_BLOCK) {
        const int64_t n = xdi_simd_block_at(v, g->x->columns);
        g->ids.v = v;
        g->ids.n = g->ids.tables = n;
        g->ids.packed = false;
        xdi_simd_back_block(g);
        for (int at = 0; at < g->rows; at++) {
            if (!g->fits[at]) continue;
            writers[at].u = g->across + g->lane[at] * XDI_XTOKEN_STRIDE;
            xdi_simd_write_block(g->loops, f, g->row[at], &writers[at], v, n);
        }
    }
    for (int at = 0; at < g->rows; at++) {
        if (g->fits[at])
            xdi_xtoken_gradient_end(f->to, g->x->rows[g->row[at]]);
        else
            xdi_xtoken_gradient_row(f, g->row[at]);
    }
}

static void xdi_simd_project_gradient_runs(const xd_launch *launch, const void *args, int64_t begin,
                                           int64_t end, int slot) {
    const xdi_simd_runs *runs = (const xdi_simd_runs *)args;
    const xd_xtoken_project_gradient_args *a = (const xd_xtoken_project_gradient_args *)runs->args;
    const xdi_xtoken_form f = xdi_xtoken_project_form(a);
    float *scratch = (float *)xdi_spread_room(launch, a->scratch, slot);
    for (int64_t row = runs->bound[begin]; row < runs->bound[end];) {
        xdi_simd_group g = xdi_simd_group_at(launch, &a->to.x, &a->matrix, &runs->filter, row);
        row = g.end;
        if (g.rows == 0) continue;
        xdi_simd_group_tables(&g, scratch);
        xdi_simd_write_group(&g, &f);
    }
    xdi_simd_tiles(launch)->fence();
}

static xd_result xdi_simd_xtoken_project_gradient(const xd_launch *launch,
                                                  const xd_xtoken_project_gradient_args *a) {
    xdi_simd_runs runs = { a, { a->chunks, false }, { 0 }, 0 };
    if (!xdi_simd_xtoken_writes(&a->to)) return xdi_xtoken_kernels_plain()->project_gradient(launch, a);
    return xdi_simd_spread(launch, &a->to.x, a->matrix.k, xdi_simd_project_gradient_runs, &runs);
}

/* Columns [begin, end) of a row by itself; begin is that of a tile. */
static void xdi_simd_write_row(const xd_launch *launch, const xdi_xtoken_form *f, int64_t i, int64_t begin,
                               int64_t end) {
    const xdi_xtoken_loops *loops = xdi_loops_of(launch)->xtoken;
    xdi_xtoken_writer w;
    if (!xdi_simd_xtoken_writes(f->to) || !xdi_simd_writer(f, i, &w)) {
        xdi_xtoken_gradient_piece(f, i, begin, end);
        return;
    }
    for (int64_t v = begin; v < end; v += XDI_TILE) {
        w.u = f->u ? f->u + v : NULL;
        xdi_simd_write_block(loops, f, i, &w, v, xdi_simd_tile_at(v, end));
    }
    if (w.past) xdi_simd_tiles(launch)->fence();
}

static xd_result xdi_simd_xtoken_mean_gradient(const xd_launch *launch,
                                               const xd_xtoken_mean_gradient_args *a) {
    return xdi_xtoken_mean_gradient(launch, a, xdi_simd_write_row);
}

static xd_result xdi_simd_xtoken_pick_gradient(const xd_launch *launch,
                                               const xd_xtoken_pick_gradient_args *a) {
    return xdi_xtoken_pick_gradient(launch, a, xdi_simd_write_row);
}

static xd_result xdi_simd_xtoken_list_gradient(const xd_launch *launch,
                                               const xd_xtoken_list_gradient_args *a) {
    return xdi_xtoken_list_gradient(launch, a, xdi_simd_write_row);
}

static xd_result xdi_simd_xtoken_rest_gradient(const xd_launch *launch, const xd_xtoken_gradient *to) {
    return xdi_xtoken_rest_gradient(launch, to, xdi_simd_write_row);
}

/* ---- teacher ---- */

/* ln sum e^(x / temperature); NaN where f32 does not fit. */
static double xdi_simd_xtoken_lse(const xdi_tiles *tiles, const xd_rows *x, int64_t row, int64_t columns,
                                  double temperature) {
    xdi_row_sum sum;
    if (!xdi_simd_row_sum(tiles, x, row, columns, XDI_TILE_LOG2E / temperature, &sum)) return (double)NAN;
    return sum.max / temperature + log(sum.sum);
}

/* Writes rows[i] at the retained columns to `out`. They are prefetched, for bf16 while the previous row is read. */
static void xdi_simd_pick(const xd_xtoken_target_args *a, int64_t i, float *out) {
    const xd_xtoken_rows *x = &a->x;
    const int64_t k = a->k, *ids = a->ids, ahead = 128;
    const xdi_simd_array y = xdi_simd_array_of(&x->logits, x->rows[i], 0),
                         next = xdi_simd_array_of(&x->logits, x->rows[i + 1 < x->count ? i + 1 : i], 0);
    const float *wide = (const float *)y.data;
    const uint16_t *half = (const uint16_t *)y.data;
    for (int64_t j = 0; j < k && y.bf16; j++) {
        __builtin_prefetch((const uint16_t *)next.data + ids[j]);
        const uint32_t bits = (uint32_t)half[ids[j]] << 16;
        memcpy(out + j, &bits, sizeof bits);
    }
    for (int64_t j = 0; j < k && !y.bf16; j++) {
        __builtin_prefetch(wide + ids[j + ahead < k ? j + ahead : k - 1]);
        out[j] = wide[ids[j]];
    }
}

static void xdi_simd_target_places(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xd_xtoken_target_args *a = (const xd_xtoken_target_args *)args;
    const int64_t last = xdi_xtoken_first_row(&a->x, end);
    const double tau = a->x.temperature;
    float *picked = (float *)xdi_spread_room(launch, a->scratch, slot);
    const xd_rows rows = { picked, XD_DTYPE_F32, 1, a->k, 0 };
    for (int64_t i = xdi_xtoken_first_row(&a->x, begin); i < last; i++) {
        xdi_simd_pick(a, i, picked);
        const double lse = xdi_simd_xtoken_lse(xdi_simd_tiles(launch), &rows, 0, a->k, tau);
        xd_xtoken_target_args one = *a;
        one.x = xdi_simd_xtoken_one(&a->x, i);
        if (isnan(lse) || (a->x.finite && !a->x.finite[a->x.rows[i]]))
            xdi_xtoken_kernels_plain()->target(launch, &one);
        else
            xdi_loops_of(launch)->xtoken->widen(xdi_xtoken_floats(picked), a->k, 1.0 / tau, lse, true,
                                                a->cells + a->x.places[i] * a->k);
    }
}

static xd_result xdi_simd_xtoken_target(const xd_launch *launch, const xd_xtoken_target_args *a) {
    if (a->fixed || !xdi_simd_xtoken_takes(&a->x.logits))
        return xdi_xtoken_kernels_plain()->target(launch, a);
    return xdi_spread_rooms(launch, a->place_count, a->k, (size_t)a->k * sizeof *a->scratch,
                            xdi_simd_target_places, a);
}

static double xdi_simd_log_probs_lse(const xd_launch *launch, const xd_xtoken_rows *x, int64_t row) {
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    const double lse =
        x->lse ? x->lse[row] : xdi_simd_xtoken_lse(tiles, &x->logits, row, x->columns, x->temperature);
    return isfinite(lse) ? lse : xdi_xtoken_row_lse(x, row);
}

static void xdi_simd_log_probs_add(const xd_launch *launch, const xd_xtoken_log_probs_args *a, int64_t i,
                                   double lse, const xdi_log_probs_cut *cut) {
    const xd_xtoken_rows *x = &a->x;
    if (isfinite(lse))
        xdi_loops_of(launch)->xtoken->widen(xdi_simd_array_of(&x->logits, x->rows[i], cut->begin),
                                            cut->end - cut->begin, a->scale / x->temperature, lse * a->scale,
                                            cut->more, a->cells + cut->begin);
    else
        xdi_xtoken_log_probs_piece(a, i, lse, cut);
}

static xd_result xdi_simd_xtoken_log_probs(const xd_launch *launch, const xd_xtoken_log_probs_args *a) {
    static const xdi_log_probs_steps steps = { xdi_simd_log_probs_lse, xdi_simd_log_probs_add };
    if (a->fixed || !xdi_simd_xtoken_takes(&a->x.logits))
        return xdi_xtoken_kernels_plain()->log_probs(launch, a);
    return xdi_xtoken_log_probs(launch, a, &steps);
}

/* ---- divergences ---- */

/* The index of the largest element, the first one among equals. */
static int64_t xdi_simd_argmax(const xdi_tiles *tiles, const float *x, int64_t n) {
    float top = -INFINITY;
    int64_t best = 0, tile = 0;
    for (int64_t j = 0; j < n; j += XDI_TILE) {
        const float max = tiles->max(xdi_xtoken_floats(x + j), xdi_simd_tile_at(j, n));
        if (max > top) tile = j;
        if (!(max <= top)) top = max; /* NaN stays */
    }
    for (int64_t j = tile; j < n && !isnan(top); j++)
        if (x[j] == top) return j;
    for (int64_t j = 1; j < n; j++)
        if (x[j] > x[best]) best = j;
    return best;
}

/* As xdi_cpu_xtoken_chunk; false where f32 does not fit, and then nothing is changed. */
static bool xdi_simd_chunk(const xd_launch *launch, const xd_xtoken_divergence_args *a, float *scratch) {
    xd_xtoken_chunk *c = a->chunks;
    double *q = a->student;
    const double *target = a->teacher;
    const xdi_xtoken_loops *loops = xdi_loops_of(launch)->xtoken;
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    const int64_t k = a->k;
    float *r = scratch, *t = r + k;
    const xd_rows targets = { t, XD_DTYPE_F32, 1, k, 0 };
    double dot = 0.0;
    const double mass = loops->narrow(q, k, 1.0 / c->student, 0.0, r);
    if (!isfinite(mass) || !isfinite(loops->narrow(target, k, 1.0 / c->teacher, 0.0, t))) return false;
    if (a->normalise) {
        const double lse = xdi_simd_xtoken_lse(tiles, &targets, 0, k, 1.0);
        if (isnan(lse)) return false;
        loops->narrow(target, k, 1.0 / c->teacher, lse, t);
    }
    const double z = mass + XD_XTOKEN_EPSILON;
    c->agree = xdi_simd_argmax(tiles, r, k) == xdi_simd_argmax(tiles, t, k);
    c->value = 0.0;
    for (int64_t j = 0; j < k; j += XDI_TILE) {
        double part;
        c->value += loops->slopes(r + j, t + j, xdi_simd_tile_at(j, k), (float)(1.0 / z), a->reverse, &part);
        dot += part;
    }
    c->delta = xd_xtoken_slope_delta(dot, z);
    const double factor = xd_xtoken_chunk_factor(c, c->value);
    c->delta *= factor * c->student;
    loops->widen(xdi_xtoken_floats(r), k, factor / z, dot * (factor / z), false, q);
    if (factor == 0.0) memset(q, 0, (size_t)k * sizeof *q); /* whatever r is */
    c->largest = loops->top(q, k, true);
    return true;
}

static void xdi_simd_divergence_places(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xd_xtoken_divergence_args *a = (const xd_xtoken_divergence_args *)args;
    float *scratch = (float *)xdi_spread_room(launch, a->scratch, slot);
    for (int64_t i = begin; i < end; i++) {
        xd_xtoken_divergence_args one = *a;
        one.student = a->student + i * a->k;
        one.teacher = a->teacher + i * a->k;
        one.chunks = a->chunks + i;
        one.place_count = 1;
        if (!one.chunks->compared || !xdi_simd_chunk(launch, &one, scratch))
            xdi_xtoken_kernels_plain()->divergence(launch, &one);
    }
}

static xd_result xdi_simd_xtoken_divergence(const xd_launch *launch, const xd_xtoken_divergence_args *a) {
    if (a->fixed) return xdi_xtoken_kernels_plain()->divergence(launch, a);
    return xdi_spread_rooms(launch, a->place_count, a->k, (size_t)(2 * a->k) * sizeof *a->scratch,
                            xdi_simd_divergence_places, a);
}

/* The most probable pair so far. */
typedef struct xdi_simd_best {
    double value;
    int64_t pair;
} xdi_simd_best;

/* Updates *best with pairs [at, at + n), n > 0, which have these values. */
static void xdi_simd_better(const xdi_xtoken_loops *loops, const double *x, int64_t at, int64_t n,
                            xdi_simd_best *best) {
    const double top = loops->top(x, n, false);
    if (best->pair < 0) {
        best->value = x[0];
        best->pair = at;
    }
    if (!(top > best->value)) return;
    best->value = top;
    best->pair = at;
    while (*x++ != top) best->pair++;
}

/* The first pair whose student id is at least `id`. */
static int64_t xdi_simd_pair_from(const xd_xtoken_pair_args *a, int64_t id) {
    int64_t begin = 0, end = a->pairs;
    while (begin < end) {
        const int64_t middle = begin + (end - begin) / 2;
        if (a->pair[middle] < id)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* The divergence of pairs [at, at + n) of this shard; y holds the other side's means. */
static double xdi_simd_pair_tile(const xdi_xtoken_loops *loops, const xd_xtoken_pair_args *a, int64_t at,
                                 int64_t n, const double *y, xdi_simd_best *best) {
    double x[XDI_XTOKEN_PAIRS];
    float alpha[XDI_XTOKEN_PAIRS], beta[XDI_XTOKEN_PAIRS], slope[XDI_XTOKEN_PAIRS];
    const int32_t *ids = a->pair + at;
    for (int64_t i = 0; i < n; i++) x[i] = a->means[ids[i] - a->first];
    xdi_simd_better(loops, x, at, n, best);
    loops->narrow(x, n, 1.0, 0.0, alpha);
    loops->narrow(y, n, 1.0, 0.0, beta);
    const double sum = loops->pair(alpha, beta, n, a->reverse, slope);
    for (int64_t i = 0; i < n; i++) a->slope[ids[i] - a->first] = slope[i];
    return sum;
}

static xd_result xdi_simd_xtoken_pair(const xd_launch *launch, const xd_xtoken_pair_args *a) {
    const xdi_xtoken_loops *loops = xdi_loops_of(launch)->xtoken;
    const int64_t begin = xdi_simd_pair_from(a, a->first), end = xdi_simd_pair_from(a, a->first + a->columns);
    const int64_t tile = XDI_XTOKEN_PAIRS;
    xdi_simd_best best = { -INFINITY, -1 }, other = best;
    if (a->fixed) return xdi_xtoken_kernels_plain()->pair(launch, a);
    memset(a->slope, 0, (size_t)a->columns * sizeof *a->slope);
    for (int64_t at = 0; at < a->pairs; at += tile) {
        const int64_t n = a->pairs - at < tile ? a->pairs - at : tile;
        const int64_t from = begin > at ? begin : at, to = end < at + n ? end : at + n;
        double y[XDI_XTOKEN_PAIRS];
        for (int64_t i = 0; i < n; i++) y[i] = a->others[a->other[at + i]];
        xdi_simd_better(loops, y, at, n, &other);
        if (from < to) a->cells[0] += xdi_simd_pair_tile(loops, a, from, to - from, y + (from - at), &best);
    }
    xdi_xtoken_best(a, best.pair, other.pair);
    return XD_OK;
}

/* Without -infinity and NaN the selected values are the logarithms of the probabilities in f32. */
static xd_result xdi_simd_xtoken_tail(const xd_launch *launch, const xd_xtoken_tail *t) {
    const xdi_xtoken_loops *loops = xdi_loops_of(launch)->xtoken;
    const xdi_xtoken_power p = { xdi_tile_power_of(XDI_TILE_LOG2E, 0.0), 1.0f };
    int64_t first;
    float *powers = t->scratch;
    XD_TRY(xdi_xtoken_tail_select(launch, t, xdi_simd_select, &first));
    if (t->fixed) return xdi_xtoken_tail_finish(t, first);
    for (int64_t i = 0; i < t->k; i++)
        if (t->found[i] < 0 || !(t->values[i] > -INFINITY)) return xdi_xtoken_tail_finish(t, first);
    for (int64_t i = 0; i < t->k; i++) {
        t->found[i] = t->ids[first + t->found[i]] - t->begin;
        powers[i] = (float)t->values[i];
    }
    for (int64_t i = 0; i < t->k; i += XDI_TILE)
        loops->powers(xdi_xtoken_floats(powers + i), xdi_simd_tile_at(i, t->k), p, false, powers + i);
    for (int64_t i = 0; i < t->k; i++) t->values[i] = (double)powers[i];
    return XD_OK;
}

static xd_result xdi_simd_xtoken_total(const xd_launch *launch, const xd_xtoken_total_args *a) {
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    if (a->fixed) return xdi_xtoken_kernels_plain()->total(launch, a);
    for (int64_t v = 0; v < a->columns; v += XDI_TILE)
        a->cells[0] += tiles->linear(xdi_xtoken_floats(a->u + v), xdi_simd_tile_at(v, a->columns), 0.0f);
    return XD_OK;
}

/* ---- single positions ---- */

/* False where f32 does not fit. */
static bool xdi_simd_moments_row(const xd_launch *launch, const xd_xtoken_moments_args *a, int64_t row,
                                 double *out) {
    const xd_xtoken_rows *x = &a->x;
    const xdi_xtoken_loops *loops = xdi_loops_of(launch)->xtoken;
    const int64_t label = a->labels.data ? xd_id_at(a->labels, row) : -1;
    xdi_row_sum sum;
    xdi_xtoken_power p;
    if (!xdi_simd_row_sum(xdi_simd_tiles(launch), &x->logits, row, x->columns, XDI_TILE_LOG2E, &sum))
        return false;
    const double log_sum = log(sum.sum);
    if (!xdi_simd_xtoken_power(1.0, sum.max + log_sum, 1.0, &p)) return false;
    out[XD_XTOKEN_LARGEST] = sum.max;
    out[XD_XTOKEN_LOG_SUM] = log_sum;
    out[XD_XTOKEN_ENTROPY] = 0.0;
    out[XD_XTOKEN_LABEL] =
        label >= 0 && label < x->columns ? xdi_loss_load(&x->logits, row, label) : (double)NAN;
    for (int64_t v = 0; v < x->columns && a->entropy; v += XDI_TILE)
        out[XD_XTOKEN_ENTROPY] +=
            loops->entropy(xdi_simd_array_of(&x->logits, row, v), xdi_simd_tile_at(v, x->columns), p);
    return true;
}

static void xdi_simd_moments_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                  int slot) {
    const xd_xtoken_moments_args *a = (const xd_xtoken_moments_args *)args;
    (void)slot;
    for (int64_t i = begin; i < end; i++) {
        xd_xtoken_moments_args one = *a;
        one.x.rows = a->x.rows + i;
        one.x.count = 1;
        one.moments = a->moments + i * XD_XTOKEN_MOMENTS;
        if (!xdi_simd_moments_row(launch, a, a->x.rows[i], one.moments))
            xdi_xtoken_kernels_plain()->moments(launch, &one);
    }
}

static xd_result xdi_simd_xtoken_moments(const xd_launch *launch, const xd_xtoken_moments_args *a) {
    if (a->fixed || !xdi_simd_xtoken_takes(&a->x.logits))
        return xdi_xtoken_kernels_plain()->moments(launch, a);
    return xdi_spread_rows(launch, a->x.count, a->x.columns, xdi_simd_moments_rows, a);
}

/* The entries that are faster with vectors. */
XD_PRIVATE void xdi_simd_xtoken_fill(xd_xtoken_kernels *kernels) {
    kernels->project_scratch = xdi_simd_xtoken_project_scratch;
    kernels->project = xdi_simd_xtoken_project;
    kernels->target = xdi_simd_xtoken_target;
    kernels->divergence = xdi_simd_xtoken_divergence;
    kernels->delta = xdi_simd_xtoken_delta;
    kernels->project_gradient = xdi_simd_xtoken_project_gradient;
    kernels->mean_gradient = xdi_simd_xtoken_mean_gradient;
    kernels->pick_gradient = xdi_simd_xtoken_pick_gradient;
    kernels->list_gradient = xdi_simd_xtoken_list_gradient;
    kernels->rest_gradient = xdi_simd_xtoken_rest_gradient;
    kernels->log_probs = xdi_simd_xtoken_log_probs;
    kernels->pair = xdi_simd_xtoken_pair;
    kernels->tail = xdi_simd_xtoken_tail;
    kernels->total = xdi_simd_xtoken_total;
    kernels->moments = xdi_simd_xtoken_moments;
}
