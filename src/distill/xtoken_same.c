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

/* The teacher's columns J of rows at work, or the weighted sum of all teachers' where their logits are averaged. */
static xd_result xdi_same_teacher(xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_args *a) {
    const bool all = x->d.mode == XD_XTOKEN_AVERAGED_LOGITS;
    const xdi_xtoken_term *terms = all ? x->terms : term;
    xd_xtoken_args t = *a;
    t.cells = x->teacher;
    t.first = 0;
    if (all) a->divisor = 0.0;
    for (int i = 0; i < (all ? x->d.teacher_count : 1); i++) {
        t.logits = terms[i].teacher->logits;
        t.columns = t.logits.cols;
        t.scale = all ? terms[i].weight : 1.0;
        t.add = i > 0;
        XDI_TRY(x->kernels.pick(&x->launch, &t));
        if (all) a->divisor += terms[i].weight;
    }
    return XD_OK;
}

/* The student's, from the ranks that own them. */
static xd_result xdi_same_student(xdi_xtoken *x, const xd_xtoken_args *a) {
    xd_xtoken_args s = *a;
    s.cells = x->student;
    XDI_TRY(x->kernels.pick(&x->launch, &s));
    if (!x->vocab.tp) return XD_OK;
    return xd_all_reduce(x->vocab.tp, x->student, x->student, a->count * a->k, XD_DTYPE_F64, XD_MAX);
}

/* What row i of those at work adds to the sums, and its gradient. */
static xd_result xdi_same_row(xdi_xtoken *x, const xdi_xtoken_term *term, const xd_xtoken_args *a,
                              int64_t i) {
    const int64_t row = a->rows[i];
    const xd_xtoken_chunk *chunk = &x->chunks[i];
    const double weight = x->row_weight[row];
    const bool good = isfinite(chunk->value) != 0;
    if (!good) xdi_xtoken_found(x, row, chunk->value);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * chunk->value : 0.0);
    if (!good || !x->write) return XD_OK;
    xd_xtoken_args one = *a;
    one.student = x->student + i * a->k;
    one.scale = weight * xdi_xtoken_factor(x, term) / x->d.temperature;
    one.slope = x->u;
    XDI_TRY(x->kernels.spread(&x->launch, &one));
    return xdi_xtoken_write(x, row, x->u, 0.0);
}

static xd_result xdi_same_tile(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t first, int64_t count) {
    xd_xtoken_args a = xdi_same_args(x, term, first, count);
    memset(x->chunks, 0, (size_t)count * sizeof *x->chunks);
    for (int64_t i = 0; i < count; i++) x->chunks[i].compared = x->row_weight[first + i] != 0.0;
    XDI_TRY(xdi_same_student(x, &a));
    XDI_TRY(xdi_same_teacher(x, term, &a));
    XDI_TRY(x->kernels.compare(&x->launch, &a));
    for (int64_t i = 0; i < count; i++)
        if (x->chunks[i].compared) XDI_TRY(xdi_same_row(x, term, &a, i));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_same(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t j = 0; j < term->k; j++) x->ids[j] = j; /* where nothing is chosen */
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (term->k < x->vocab.size && (b == 0 || !x->d.compat)) XDI_TRY(xdi_xtoken_choose(x, term, b));
        const int64_t last = (b + 1) * x->held;
        for (int64_t first = b * x->held; first < last; first += term->tile) {
            const int64_t count = last - first < term->tile ? last - first : term->tile;
            XDI_TRY(xdi_same_tile(x, term, first, count));
        }
    }
    return XD_OK;
}
