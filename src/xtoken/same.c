/* SAME: teachers that share the student's vocabulary; tile after tile of the rows that count. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* The rows that count, sequence by sequence; chunk i is row i of them. */
typedef struct xdi_same {
    int64_t *rows;  /* lists: [rows] */
    int64_t *all;   /* lists: [k] every id, where nothing is chosen */
    int64_t *first; /* host: [B + 1] first of them of each sequence */
    bool chooses;
} xdi_same;

static xd_result xdi_same_check(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    XD_REQUIRE(ctx, t->logits.rows == d->student.rows, XD_ERROR_SHAPE,
               "teacher %d has %lld rows but the student %lld", index, (long long)t->logits.rows,
               (long long)d->student.rows);
    XD_REQUIRE(ctx, xdi_xtoken_vocabulary(t) >= size, XD_ERROR_SHAPE,
               "teacher %d has %lld columns, less than the student's vocabulary of %lld", index,
               (long long)xdi_xtoken_vocabulary(t), (long long)size);
    return XD_OK;
}

/* ---- memory ---- */

static void xdi_same_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s) {
    if (term->k < x->vocab.size) {
        s->ids = xdi_xtoken_most(s->ids, term->k);
        s->maxima = xdi_xtoken_most(s->maxima, x->vocab.size);
        s->voters = xdi_xtoken_most(s->voters, x->d.student.rows);
    }
    s->slots = xdi_xtoken_most(s->slots, x->vocab.size);
    s->doubles = xdi_xtoken_most(s->doubles, 2 * term->places.tile * term->k);
    s->scratch = xdi_xtoken_most(s->scratch, x->kernels->xtoken.pick_scratch(x->columns));
}

static void xdi_same_layout(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a) {
    const int64_t rows = x->d.student.rows;
    xdi_same plan, *s = (xdi_same *)xdi_xtoken_own(term, a, &plan, sizeof plan);
    s->chooses = term->k < x->vocab.size;
    s->rows = (int64_t *)xdi_xtoken_list(a, rows, sizeof(int64_t));
    s->all = (int64_t *)xdi_xtoken_list(a, s->chooses ? 0 : term->k, sizeof(int64_t));
    term->mask = (uint8_t *)xdi_xtoken_list(a, s->chooses ? rows : 0, 1);
    s->first = (int64_t *)xdi_arena_array(a->host, x->d.sequences + 1, sizeof(int64_t), &a->fits);
}

/* ---- a pass ---- */

static xd_xtoken_chunk xdi_same_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row) {
    xd_xtoken_chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    chunk.compared = true;
    chunk.factor =
        xdi_xtoken_bounded(x->host.row_weight[row] * xdi_xtoken_factor(x, term)) / x->d.temperature;
    chunk.limit = xdi_xtoken_limit(x, x->host.row_weight[row]);
    return chunk;
}

static xd_result xdi_same_fill(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xdi_same *s = (const xdi_same *)term->own;
    int64_t count = 0;
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        if (row % x->held == 0) s->first[row / x->held] = count;
        if (x->host.row_weight[row] == 0.0) continue;
        term->chunks[count] = xdi_same_chunk(x, term, row);
        s->rows[count++] = row;
    }
    for (int64_t b = x->held > 0 ? x->d.sequences : 0; b <= x->d.sequences; b++) s->first[b] = count;
    for (int64_t j = 0; j < term->k && !s->chooses; j++) s->all[j] = j;
    if (s->chooses) xdi_xtoken_fill_voters(x, term);
    return XD_OK;
}

/* J of sequence b, and the index of every id in it. */
static xd_result xdi_same_choose(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                 const int64_t **ids) {
    const xdi_same *s = (const xdi_same *)term->own;
    if (b > 0 && (!s->chooses || x->d.compat)) return XD_OK;
    if (s->chooses) XD_TRY(xdi_xtoken_choose(x, term, x->vocab.size, b));
    *ids = s->chooses ? x->work.ids : (const int64_t *)xdi_xtoken_there(&x->lists, s->all);
    const xd_xtoken_slots_args a = { *ids, term->k, x->vocab.size, x->work.slots };
    return x->kernels->xtoken.slots(&x->launch, &a);
}

/* The teacher's columns J of the current rows, or the weighted sum over all teachers when their logits are averaged:
 * `divisor` teachers. */
static xd_result xdi_same_teacher(const xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_pick_args t,
                                  double *divisor) {
    const bool all = x->d.mode == XD_XTOKEN_AVERAGED_LOGITS;
    const xdi_xtoken_term *terms = all ? x->terms : term;
    t.x.first = 0;
    t.x.lse = NULL;
    if (((const xdi_same *)term->own)->chooses) t.x.finite = x->work.voters;
    *divisor = all ? 0.0 : 1.0;
    for (int i = 0; i < (all ? x->d.teacher_count : 1); i++) {
        t.x.logits = terms[i].teacher->logits;
        t.x.columns = t.x.logits.cols;
        t.scale = all ? terms[i].weight : 1.0;
        t.add = i > 0;
        XD_TRY(x->kernels->xtoken.pick(&x->launch, &t));
        if (all) *divisor += terms[i].weight;
    }
    return XD_OK;
}

/* The student's columns, from the ranks that own them. */
static xd_result xdi_same_student(const xdi_xtoken *x, const xd_xtoken_pick_args *a) {
    XD_TRY(x->kernels->xtoken.pick(&x->launch, a));
    if (!x->vocab.tp) return XD_OK;
    return xd_all_reduce(x->vocab.tp, a->out, a->out, a->x.count * a->k, XD_DTYPE_F64, XD_MAX);
}

/* Rows [at, at + count) of the list. */
static xd_result xdi_same_run_tile(const xdi_xtoken *x, const xdi_xtoken_term *term, const int64_t *ids,
                                   int64_t at, int64_t count) {
    const xdi_same *s = (const xdi_same *)term->own;
    const xd_xtoken_rows rows = xdi_xtoken_student(x, s->rows + at, NULL, count);
    double *student = x->work.cells - x->room, *teacher = student + count * term->k;
    const xd_xtoken_pick_args p = { rows, ids, term->k, 1.0, false, student };
    xd_xtoken_pick_args q = p;
    xd_xtoken_compare_args c = {
        student, teacher,     (xd_xtoken_chunk *)xdi_xtoken_there(&x->lists, term->chunks + at),
        count,   term->k,     x->d.temperature,
        1.0,     x->d.reverse
    };
    const xd_xtoken_pick_gradient_args g = {
        xdi_xtoken_gradient_of(x, rows), ids, term->k, x->work.slots, student, c.chunks, x->work.scratch
    };
    q.out = teacher;
    XD_TRY(xdi_same_student(x, &p));
    XD_TRY(xdi_same_teacher(x, term, q, &c.divisor));
    XD_TRY(x->kernels->xtoken.compare(&x->launch, &c));
    return x->write ? x->kernels->xtoken.pick_gradient(&x->launch, &g) : XD_OK;
}

static xd_result xdi_same_run(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xdi_same *s = (const xdi_same *)term->own;
    const int64_t *ids = NULL;
    for (int64_t b = 0; b < x->d.sequences; b++) {
        XD_TRY(xdi_same_choose(x, term, b, &ids));
        for (int64_t at = s->first[b]; at < s->first[b + 1]; at += term->places.tile) {
            const int64_t left = s->first[b + 1] - at;
            XD_TRY(xdi_same_run_tile(x, term, ids, at, left < term->places.tile ? left : term->places.tile));
        }
    }
    return XD_OK;
}

static void xdi_same_tell(xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xdi_same *s = (const xdi_same *)term->own;
    for (int64_t i = 0; i < s->first[x->d.sequences]; i++) {
        const xd_xtoken_chunk *chunk = &term->chunks[i];
        const bool good = xdi_xtoken_is_good(x, term, x->host.row_weight[s->rows[i]], chunk->value);
        if (!good) xdi_xtoken_found(x, s->rows[i], chunk->value);
        xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_COMPARED, 1.0);
        xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_AGREEING, good && chunk->agree ? 1.0 : 0.0);
        xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_DIVERGENCE,
                         good ? x->host.row_weight[s->rows[i]] * chunk->value : 0.0);
    }
}

XD_PRIVATE const xdi_xtoken_kind *xdi_same_kind(void) {
    static const xdi_xtoken_kind kind = { XDI_KIND_POSITIONS, xdi_same_check, NULL, xdi_same_size,
                                          xdi_same_layout,    NULL,           NULL, xdi_same_fill,
                                          xdi_same_run,       xdi_same_tell,  NULL };
    return &kind;
}
