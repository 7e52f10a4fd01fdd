/* PROJECTED: the student's probabilities through a matrix, in chosen columns of the teacher. */

#include "align/project.h"
#include "xtoken/internal.h"

#include <string.h>

/* Private state of a teacher. */
typedef struct xdi_projected {
    int64_t *given;                   /* lists: [B, 2k] J as it was given, and its places in the rows */
    xd_projection projection, copied; /* in memory of the device; what to free of it */
    xd_xtoken_matrix matrix;          /* in the current J */
    const int64_t *ids_in_rows;       /* J in the teacher's rows */
} xdi_projected;

static xd_result xdi_projected_check(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    XD_REQUIRE(ctx, t->projected.projection, XD_ERROR_ARGUMENT, "teacher %d has no projection", index);
    return xdi_xtoken_check_projection(ctx, t, index, size, "its vocabulary is");
}

/* ---- memory ---- */

static xd_xtoken_matrix xdi_projected_matrix(const xdi_xtoken *x, const xd_projection *m) {
    xd_xtoken_matrix matrix;
    memset(&matrix, 0, sizeof matrix);
    matrix.projection = xdi_projection_for_kernels(m);
    matrix.first = x->vocab.begin;
    matrix.columns = x->columns;
    return matrix;
}

/* Columns of all chunks of a tile on a GPU, where a launch costs more than memory, and its most chunks. */
enum { XDI_PROJECTED_ROOM = 1 << 23, XDI_PROJECTED_MOST = 4096 };

static int64_t xdi_projected_at_once(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t tile) {
    const int64_t fits = xdi_xtoken_fits(XDI_PROJECTED_ROOM, term->k), chunks = term->teacher->chunks;
    if (!x->on_device || x->d.tile > 0) return tile;
    tile = fits < XDI_PROJECTED_MOST ? fits : (int64_t)XDI_PROJECTED_MOST;
    return chunks < tile ? xdi_xtoken_most(chunks, 1) : tile;
}

/* The size query may be called with a desc that is not valid yet. */
static void xdi_projected_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s) {
    const int64_t sums = 2 * term->places.tile * term->k;
    const xd_projection *m = term->teacher->projected.projection;
    s->ids = xdi_xtoken_most(s->ids, term->k);
    s->maxima = xdi_xtoken_most(s->maxima, term->vocabulary);
    s->voters = xdi_xtoken_most(s->voters, term->teacher->logits.rows);
    s->settled = xdi_xtoken_most(s->settled, sums);
    s->cells = xdi_xtoken_most(s->cells, sums + x->held);
    s->scratch = xdi_xtoken_most(s->scratch, x->kernels->xtoken.project_scratch(term->k, x->fixed));
    if (!m || m->student_size < x->vocab.end) return;
    xd_xtoken_matrix matrix = xdi_projected_matrix(x, m);
    matrix.k = term->k;
    const size_t bytes = x->kernels->xtoken.matrix_bytes(&matrix);
    if (bytes > s->matrix) s->matrix = bytes;
}

static void xdi_projected_layout(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a) {
    const int64_t given = term->teacher->projected.column_ids ? 2 * x->d.sequences * term->k : 0;
    xdi_projected plan, *p = (xdi_projected *)xdi_xtoken_own(term, a, &plan, sizeof plan);
    p->given = (int64_t *)xdi_xtoken_list(a, given, sizeof(int64_t));
    term->mask = (uint8_t *)xdi_xtoken_list(a, term->teacher->logits.rows, 1);
}

static xd_result xdi_projected_open(xdi_xtoken *x, xdi_xtoken_term *term) {
    xdi_projected *p = (xdi_projected *)term->own;
    p->projection = *term->teacher->projected.projection;
    if (!xdi_projection_is_near(x->ctx, &p->projection)) {
        XD_TRY(xd_projection_upload(x->ctx, term->teacher->projected.projection, &p->copied));
        p->projection = p->copied;
    }
    p->matrix = xdi_projected_matrix(x, &p->projection);
    p->matrix.k = term->k;
    p->matrix.prepared = x->work.matrix;
    return XD_OK;
}

static void xdi_projected_close(const xdi_xtoken *x, xdi_xtoken_term *term) {
    xd_projection_unload(x->ctx, &((xdi_projected *)term->own)->copied);
}

/* ---- a pass ---- */

static xd_result xdi_projected_fill(xdi_xtoken *x, xdi_xtoken_term *term) {
    const int64_t *ids = term->teacher->projected.column_ids, k = term->k;
    int64_t *given = ((xdi_projected *)term->own)->given;
    for (int64_t b = 0; b < x->d.sequences; b++) {
        for (int64_t j = 0; j < k && ids; j++) {
            given[2 * b * k + j] = ids[b * k + j];
            given[(2 * b + 1) * k + j] = j;
        }
        for (int64_t place = 0; place < term->places.listed[b]; place++) {
            const int64_t at = b * term->teacher->chunks + place;
            term->chunks[at] = xdi_xtoken_chunk_of(x, term, b, term->places.order[at], XD_XTOKEN_EPSILON);
            term->chunks[at].alone = term->chunks[at].student < 1.5;
        }
    }
    xdi_xtoken_fill_voters(x, term);
    return XD_OK;
}

/* J of sequence b, and the projection in it. */
static xd_result xdi_projected_choose(xdi_xtoken *x, xdi_xtoken_term *term, int64_t b) {
    xdi_projected *p = (xdi_projected *)term->own;
    if (term->teacher->projected.column_ids) {
        p->matrix.ids = (const int64_t *)xdi_xtoken_there(&x->lists, p->given + 2 * b * term->k);
        p->ids_in_rows = p->matrix.ids + term->k;
    } else {
        XD_TRY(xdi_xtoken_choose(x, term, term->vocabulary, b));
        p->matrix.ids = p->ids_in_rows = x->work.ids;
    }
    return x->kernels->xtoken.prepare(&x->launch, &p->matrix);
}

/* A tile: its cells are the student's, the teacher's, and those of the student's rows. */
typedef struct xdi_projected_tile {
    const xdi_projected *p;
    xd_xtoken_rows student, teacher;
    xd_comm *comm;
    int64_t places, k;
    xd_xtoken_chunk *chunks; /* there */
    double *sums;            /* [2, places, k] as doubles; the student's become dy */
} xdi_projected_tile;

/* Sums of the tile over all ranks. */
static xd_result xdi_projected_sums(const xdi_xtoken *x, xdi_projected_tile *t) {
    const int64_t count = t->places * t->k, wide = xdi_xtoken_wide(x);
    double *cells = x->work.cells;
    const xd_xtoken_project_args p = {
        t->student, t->places, t->p->matrix, cells, x->fixed, x->work.scratch
    };
    const xd_xtoken_target_args q = { t->teacher,           t->places, t->p->ids_in_rows, t->k,
                                      cells + wide * count, x->fixed,  x->work.scratch };
    XD_TRY(x->kernels->memory.fill(&x->launch, cells, 0,
                                   (size_t)(2 * count + t->student.count) * xdi_xtoken_cell(x)));
    XD_TRY(x->kernels->xtoken.project(&x->launch, &p));
    XD_TRY(x->kernels->xtoken.target(&x->launch, &q));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, cells, count));
    XD_TRY(xdi_xtoken_reduce(x, t->comm, cells, 2 * count));
    return xdi_xtoken_settle(x, cells, x->room, 2 * count, &t->sums);
}

static xd_result xdi_projected_divergence(const xdi_xtoken *x, const xdi_projected_tile *t) {
    xd_xtoken_divergence_args a;
    memset(&a, 0, sizeof a);
    a.student = t->sums;
    a.teacher = t->sums + t->places * t->k;
    a.chunks = t->chunks;
    a.place_count = t->places;
    a.k = t->k;
    a.normalise = !x->d.compat;
    a.reverse = x->d.reverse;
    a.fixed = x->fixed;
    a.scratch = x->work.scratch;
    return x->kernels->xtoken.divergence(&x->launch, &a);
}

/* dz = p (h - delta) / tau, h = M dy, delta = sum p h. */
static xd_result xdi_projected_gradient(const xdi_xtoken *x, const xdi_projected_tile *t) {
    double *cells = x->work.cells + 2 * t->places * t->k * xdi_xtoken_wide(x);
    const xd_xtoken_delta_args d = { t->student, t->p->matrix, t->sums,        t->chunks,
                                     cells,      x->fixed,     x->work.scratch };
    const xd_xtoken_project_gradient_args g = { xdi_xtoken_gradient_of(x, t->student),
                                                t->p->matrix,
                                                t->sums,
                                                x->work.delta,
                                                t->chunks,
                                                x->work.scratch,
                                                t->places };
    XD_TRY(x->kernels->xtoken.delta(&x->launch, &d));
    XD_TRY(xdi_xtoken_row_deltas(x, &t->student, t->chunks, cells));
    return x->kernels->xtoken.project_gradient(&x->launch, &g);
}

static xd_result xdi_projected_run_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                        const xdi_xtoken_tile *tile) {
    xdi_projected_tile t;
    t.p = (const xdi_projected *)term->own;
    t.student = xdi_xtoken_student_tile(x, term, tile);
    t.teacher = xdi_xtoken_teacher_tile(x, term, tile);
    if (!term->teacher->projected.column_ids) t.teacher.finite = x->work.voters;
    t.comm = tile->comm;
    t.places = tile->count;
    t.k = term->k;
    t.chunks = (xd_xtoken_chunk *)xdi_xtoken_there(&x->lists,
                                                   term->chunks + xdi_xtoken_tile_start(&term->places, tile));
    XD_TRY(xdi_projected_sums(x, &t));
    XD_TRY(xdi_projected_divergence(x, &t));
    return x->write ? xdi_projected_gradient(x, &t) : XD_OK;
}

static xd_result xdi_projected_run(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (b == 0 || !x->d.compat) XD_TRY(xdi_projected_choose(x, term, b));
        for (int64_t i = 0; i < xdi_xtoken_tiles(&term->places, b); i++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(&term->places, x->d.sequence_comm, b, i);
            XD_TRY(xdi_projected_run_tile(x, term, &tile));
        }
    }
    return XD_OK;
}

XD_PRIVATE const xdi_xtoken_kind *xdi_projected_kind(void) {
    static const xdi_xtoken_kind kind = { XDI_KIND_ALL_COMPAT,
                                          xdi_projected_check,
                                          xdi_projected_at_once,
                                          xdi_projected_size,
                                          xdi_projected_layout,
                                          xdi_projected_open,
                                          NULL,
                                          xdi_projected_fill,
                                          xdi_projected_run,
                                          xdi_xtoken_tell_chunks,
                                          xdi_projected_close };
    return &kind;
}
