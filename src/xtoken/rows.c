/* Statistics of the student's rows, and which of them count. */

#include "kernel/ids.h"
#include "loss/softmax.h"
#include "loss/topk.h"
#include "xtoken/internal.h"

#include <math.h>

/* log-sum-exp of every row. In INVARIANT mode relative to the whole row's maximum, so that the terms are
 * those of one rank. */
static xd_result xdi_xrows_lse(const xdi_xtoken *x, double temperature, double *lse) {
    const xd_rows *z = &x->d.student;
    const xd_xtoken_row_sums_args a = { *z, x->columns, temperature, lse, x->work.cells };
    XD_TRY(xdi_row_stats(x->ctx, x->d.vocab, *z, temperature, lse, x->work.argmax));
    if (!x->fixed) return XD_OK;
    XD_TRY(xdi_vocab_at_ids(x->ctx, x->d.vocab, z, xd_ids_of(x->work.argmax, XD_DTYPE_I64), lse));
    XD_TRY(x->kernels->memory.fill(&x->launch, a.cells, 0, (size_t)z->rows * sizeof(xd_fixed)));
    XD_TRY(x->kernels->xtoken.row_sums(&x->launch, &a));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, a.cells, z->rows));
    return x->kernels->xtoken.row_logs(&x->launch, &a);
}

/* row_weight temporarily holds the log-sum-exps at temperature 1. */
static xd_result xdi_xrows_stats(const xdi_xtoken *x) {
    const xd_xtoken_desc *d = &x->d;
    const xdi_xtoken_work *w = &x->work;
    const xdi_xtoken_host *h = &x->host;
    const size_t bytes = (size_t)d->student.rows * 8;
    xd_ids labels;
    XD_TRY(xdi_xrows_lse(x, d->temperature, w->lse));
    if (!d->common.labels.data) return XD_OK;
    XD_TRY(xdi_xtoken_bring_labels(x, d->common.labels, d->student.rows, w->labels, &labels));
    if (d->temperature == 1.0)
        XD_TRY(xdi_xtoken_copy(x, w->lse_one, w->lse, bytes, XD_COPY_ON_DEVICE));
    else
        XD_TRY(xdi_xrows_lse(x, 1.0, w->lse_one));
    XD_TRY(xdi_vocab_at_ids(x->ctx, d->vocab, &d->student, labels, w->log_probs));
    XD_TRY(xdi_xtoken_copy(x, h->argmax, w->argmax, bytes, XD_COPY_TO_HOST));
    XD_TRY(xdi_xtoken_copy(x, h->row_weight, w->lse_one, bytes, XD_COPY_TO_HOST));
    XD_TRY(xd_read(x->ctx, h->log_probs, w->log_probs, bytes));
    for (int64_t row = 0; row < d->student.rows; row++) h->log_probs[row] -= h->row_weight[row];
    return XD_OK;
}

/* Does the row count, and with what weight? A label outside the vocabulary is found here. */
static double xdi_xrows_weight(xdi_xtoken *x, int64_t row) {
    const xd_loss_common *c = &x->d.common;
    const double weight = c->row_weight ? (double)c->row_weight[row] : 1.0;
    if (c->mask && !c->mask[row]) return 0.0;
    if (!c->labels.data) return weight;
    const int64_t label = xd_id_at(c->labels, row);
    if (label == c->ignore_index || weight == 0.0) return 0.0;
    if (label >= 0 && label < x->vocab.size) return weight;
    if (x->found.label_out_of_range++ == 0 && x->found.not_finite == 0) {
        x->found.first_row = row;
        x->found.first_value = (double)label;
    }
    return 0.0;
}

XD_PRIVATE xd_result xdi_xtoken_read_rows(xdi_xtoken *x) {
    const xdi_xtoken_host *h = &x->host;
    XD_TRY(xdi_xrows_stats(x));
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const double weight = h->row_weight[row] = xdi_xrows_weight(x, row);
        h->ce_factor[row] = 0.0;
        if (!x->d.common.labels.data || weight == 0.0) continue;
        if (xdi_xtoken_sums_take(x, h->log_probs[row]) && xdi_xtoken_sums_take(x, weight * h->log_probs[row]))
            h->ce_factor[row] = weight;
        else
            xdi_xtoken_found(x, row, h->log_probs[row]);
    }
    return XD_OK;
}
