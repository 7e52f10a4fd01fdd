/* SAME: teachers that share the student's vocabulary. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Rows [first, first + count) are at work. */
static xd_xtoken_args xdi_same_args(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t first,
                                    int64_t count) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, count);
    for (int64_t i = 0; i < count; i++) x->rows[i] = first + i;
    a.ids = x->ids;
    a.k = term->k;
    a.student = x->student;
    a.teacher = x->teacher;
    a.divisor = 1.0;
    a.chunks = x->chunks;
    a.reverse = x->d.reverse;
    return a;
}

/* The teacher's columns J of rows at work, or the weighted sum of all teachers' where their logits are averaged:
 * `divisor` of them. */
static xd_result xdi_same_teacher(xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_args *a) {
    const bool all = x->d.mode == XD_XTOKEN_AVERAGED_LOGITS;
    const xdi_xtoken_term *terms = all ? x->terms : term;
    xd_xtoken_args t = *a;
    t.cells = a->teacher;
    t.first = 0;
    if (all) a->divisor = 0.0;
    for (int i = 0; i < (all ? x->d.teacher_count : 1); i++) {
        t.logits = terms[i].teacher->logits;
        t.columns = t.logits.cols;
        t.scale = all ? terms[i].weight : 1.0;
        t.add = i > 0;
        XD_TRY(x->kernels.pick(&x->launch, &t));
        if (all) a->divisor += terms[i].weight;
    }
    return XD_OK;
}

/* The student's, from the ranks that own them. */
static xd_result xdi_same_student(xdi_xtoken *x, const xd_xtoken_args *a) {
    xd_xtoken_args s = *a;
    s.cells = a->student;
    XD_TRY(x->kernels.pick(&x->launch, &s));
    if (!x->vocab.tp) return XD_OK;
    return xd_all_reduce(x->vocab.tp, s.cells, s.cells, a->count * a->k, XD_DTYPE_F64, XD_MAX);
}

XD_PRIVATE xd_result xdi_same_compare(xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_args *a) {
    XD_TRY(xdi_same_student(x, a));
    XD_TRY(xdi_same_teacher(x, term, a));
    return x->kernels.compare(&x->launch, a);
}

XD_PRIVATE xd_xtoken_chunk xdi_same_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row) {
    xd_xtoken_chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    chunk.compared = x->row_weight[row] != 0.0;
    chunk.factor = x->row_weight[row] * xdi_xtoken_factor(x, term) / x->d.temperature;
    return chunk;
}

XD_PRIVATE void xdi_same_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, const xd_xtoken_chunk *chunk,
                                   int64_t row) {
    const bool good = isfinite(chunk->value) != 0;
    if (!good) xdi_xtoken_found(x, row, chunk->value);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, good && chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE,
                   good ? x->row_weight[row] * chunk->value : 0.0);
}

/* The gradient of row i of those at work. */
static xd_result xdi_same_gradient(xdi_xtoken *x, const xd_xtoken_args *a, int64_t i) {
    xd_xtoken_args one = *a;
    one.student = a->student + i * a->k;
    one.scale = a->chunks[i].factor;
    one.slope = x->u;
    XD_TRY(x->kernels.spread(&x->launch, &one));
    return xdi_xtoken_write(x, a->rows[i], x->u, 0.0);
}

static xd_result xdi_same_tile(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t first, int64_t count) {
    xd_xtoken_args a = xdi_same_args(x, term, first, count);
    for (int64_t i = 0; i < count; i++) x->chunks[i] = xdi_same_chunk(x, term, first + i);
    XD_TRY(xdi_same_compare(x, term, &a));
    for (int64_t i = 0; i < count; i++) {
        if (!a.chunks[i].compared) continue;
        xdi_same_add_chunk(x, term, &a.chunks[i], first + i);
        if (x->write && a.chunks[i].largest != 0.0) XD_TRY(xdi_same_gradient(x, &a, i));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_same(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t j = 0; j < term->k; j++) x->ids[j] = j; /* where nothing is chosen */
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (term->k < x->vocab.size && (b == 0 || !x->d.compat)) XD_TRY(xdi_xtoken_choose(x, term, b));
        const int64_t last = (b + 1) * x->held;
        for (int64_t first = b * x->held; first < last; first += term->tile) {
            const int64_t count = last - first < term->tile ? last - first : term->tile;
            XD_TRY(xdi_same_tile(x, term, first, count));
        }
    }
    return XD_OK;
}
