#include <math.h>
#include <string.h>

/* The teacher's logit, or the weighted mean of all teachers' where their logits are averaged. */
static double xdi_same_teacher(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row, int64_t id) {
    if (x->d.mode != XD_XTOKEN_AVERAGED_LOGITS) return xdi_loss_load(&term->teacher->logits, row, id);
    double sum = 0.0, weights = 0.0;
    for (int i = 0; i < x->d.teacher_count; i++) {
        sum += x->terms[i].weight * xdi_loss_load(&x->terms[i].teacher->logits, row, id);
        weights += x->terms[i].weight;
    }
    return sum / weights;
}

static int64_t xdi_same_id(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t j) {
    return term->k == x->vocab.size ? j : x->ids[j];
}

/* Log-softmax in place. */
static void xdi_same_log_softmax(double *x, int64_t k) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t j = 0; j < k; j++)
        if (!(x[j] <= max)) max = x[j];
    for (int64_t j = 0; j < k; j++) sum += exp(x[j] - max);
    const double lse = max + log(sum);
    for (int64_t j = 0; j < k; j++) x[j] -= lse;
}

/* The student's columns J of rows [first, end), from the ranks that own them. */
static xd_result xdi_same_gather(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t first, int64_t end) {
    const int64_t count = (end - first) * term->k;
    for (int64_t i = 0; i < count; i++) {
        const int64_t id = xdi_same_id(x, term, i % term->k);
        const bool mine = id >= x->vocab.begin && id < x->vocab.end;
        x->student[i] =
            mine ? xdi_loss_load(&x->d.student, first + i / term->k, id - x->vocab.begin) / x->d.temperature
                 : -INFINITY;
    }
    if (!x->vocab.tp) return XD_OK;
    return xd_all_reduce(x->vocab.tp, x->student, x->student, count, XD_DTYPE_F64, XD_MAX);
}

/* One position: KL over J, and in s its derivative by the logits over tau. */
static double xdi_same_divergence(double *s, const double *t, int64_t k, bool reverse) {
    double value = 0.0;
    for (int64_t j = 0; j < k; j++) {
        const double p = reverse ? exp(s[j]) : exp(t[j]), difference = reverse ? s[j] - t[j] : t[j] - s[j];
        if (p != 0.0) value += p * difference;
    }
    for (int64_t j = 0; j < k; j++) {
        const double p = exp(s[j]);
        if (!reverse)
            s[j] = p - exp(t[j]);
        else
            s[j] = p != 0.0 ? p * (s[j] - t[j] - value) : 0.0;
    }
    return value;
}

static xd_result xdi_same_row(xdi_xtoken *x, xdi_xtoken_term *term, int64_t row, double *s) {
    const double weight = x->row_weight[row], factor = weight * xdi_xtoken_factor(x, term) / x->d.temperature;
    int64_t best[2] = { 0, 0 };
    for (int64_t j = 0; j < term->k; j++) {
        x->teacher[j] = xdi_same_teacher(x, term, row, xdi_same_id(x, term, j)) / x->d.temperature;
        if (s[j] > s[best[0]]) best[0] = j;
        if (x->teacher[j] > x->teacher[best[1]]) best[1] = j;
    }
    xdi_same_log_softmax(s, term->k);
    xdi_same_log_softmax(x->teacher, term->k);
    const double value = xdi_same_divergence(s, x->teacher, term->k, x->d.reverse);
    const bool good = isfinite(value) != 0;
    if (!good) xdi_xtoken_found(x, row, value);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, best[0] == best[1] ? 1.0 : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * value : 0.0);
    if (!good || !x->write) return XD_OK;
    memset(x->u, 0, (size_t)x->columns * sizeof *x->u);
    for (int64_t j = 0; j < term->k; j++) {
        const int64_t id = xdi_same_id(x, term, j);
        if (id >= x->vocab.begin && id < x->vocab.end) x->u[id - x->vocab.begin] = (float)(factor * s[j]);
    }
    return xdi_xtoken_write(x, row, x->u, 0.0);
}

XD_PRIVATE xd_result xdi_xtoken_same(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (term->k < x->vocab.size && (b == 0 || !x->d.compat)) XDI_TRY(xdi_xtoken_choose(x, term, b));
        const int64_t last = (b + 1) * x->held;
        for (int64_t first = b * x->held; first < last; first += term->tile) {
            const int64_t end = first + term->tile < last ? first + term->tile : last;
            XDI_TRY(xdi_same_gather(x, term, first, end));
            for (int64_t row = first; row < end; row++)
                if (x->row_weight[row] != 0.0)
                    XDI_TRY(xdi_same_row(x, term, row, x->student + (row - first) * term->k));
        }
    }
    return XD_OK;
}
