/* The call: denominators, passes over teachers, values. */

#include "align/chunks.h"
#include "kernel/ids.h"
#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Largest balance: more would turn the rounding of a KD that has vanished into a gradient. */
#define XDI_XTOKEN_BALANCE_MOST 1e4

/* Everything before the first exchange, local to this rank. */
static xd_result xdi_xtoken_prepare(xd_ctx *ctx, const xd_xtoken_desc *desc, xdi_xtoken *x) {
    const xd_xtoken_desc d = xdi_xtoken_resolve(desc);
    XD_TRY(xdi_xtoken_validate(ctx, &d));
    xdi_xtoken_open(x, ctx, &d);
    XD_TRY(xdi_xtoken_provide(x, desc));
    for (int i = 0; i < d.teacher_count; i++)
        if (x->terms[i].kind->open) XD_TRY(x->terms[i].kind->open(x, &x->terms[i]));
    return XD_OK;
}

/* The contribution of rows to the sums. */
static void xdi_xtoken_add_rows(const xdi_xtoken *x) {
    const xd_ids labels = x->d.common.labels;
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const double weight = x->host.row_weight[row];
        const bool right = labels.data && x->host.argmax[row] == xd_id_at(labels, row);
        xdi_xtoken_tally(x, XDI_XTOKEN_TOKENS, weight);
        xdi_xtoken_tally(x, XDI_XTOKEN_RIGHT, right ? weight : 0.0);
        if (x->host.ce_factor[row] != 0.0)
            xdi_xtoken_tally(x, XDI_XTOKEN_CE, -weight * x->host.log_probs[row]);
    }
}

/* ---- denominators and scores ---- */

/* Chunks of every teacher and the ranks that compute them, over sequence_comm; the ids were checked. */
static xd_result xdi_xtoken_count_chunks(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xd_xtoken_teacher *t = term->teacher;
    const xdi_chunk_map student = { t->student_chunks, x->d.sequences, x->held, t->chunks,
                                    x->d.sequence_comm };
    const xdi_chunk_map teacher = { t->teacher_chunks, x->d.sequences, term->held, t->chunks,
                                    x->d.sequence_comm };
    if (term->kind->traits & XDI_KIND_POSITIONS) return XD_OK;
    XD_TRY(xdi_chunk_sizes(x->ctx, &student, term->student_sizes));
    XD_TRY(xdi_chunk_sizes(x->ctx, &teacher, term->teacher_sizes));
    return term->kind->traits & XDI_KIND_APART ? XD_OK : xdi_xtoken_share(x, term);
}

/* This rank's part of D in a cell: sample weights of counted chunks, or their number. */
static void xdi_xtoken_count(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t cell) {
    if ((term->kind->traits & XDI_KIND_POSITIONS) || !x->owner) return;
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t c = 0; c < term->teacher->chunks; c++)
            if (xdi_xtoken_counts(x, term, b, c))
                xdi_xtoken_tally(x, cell, x->d.compat ? 1.0 : xdi_xtoken_sample(x, b));
}

static double xdi_xtoken_denominator(const xdi_xtoken *x, const xdi_xtoken_term *term, double counted) {
    if (term->kind->traits & XDI_KIND_POSITIONS) return x->weights.token_denominator;
    if (term->teacher->denominator_value > 0.0) return term->teacher->denominator_value;
    return x->d.compat && counted < 1.0 ? 1.0 : counted;
}

/* One value of the caller, in device or host memory. */
static xd_result xdi_xtoken_read_value(const xdi_xtoken *x, void *to, const void *from, size_t bytes) {
    if (x->kernels->memory.owns(x->ctx, from)) return xd_read(x->ctx, to, from, bytes);
    memcpy(to, from, bytes);
    return XD_OK;
}

/* The factor of loss and gradient; one that is not finite is a finding, and counts as 0. */
static xd_result xdi_xtoken_read_scale(xdi_xtoken *x) {
    if (!x->d.common.scale) return XD_OK;
    XD_TRY(xdi_xtoken_read_value(x, &x->weights.factor, x->d.common.scale, sizeof x->weights.factor));
    if (isfinite(x->weights.factor)) return XD_OK;
    xdi_xtoken_found(x, 0, x->weights.factor);
    x->weights.factor = 0.0;
    return XD_OK;
}

/* D of CE and SAME. */
static xd_result xdi_xtoken_read_tokens(xdi_xtoken *x, double counted) {
    const xd_loss_common *c = &x->d.common;
    xd_denominator given;
    x->weights.token_denominator = c->denominator_value > 0.0 ? c->denominator_value : counted;
    if (!c->denominator) return XD_OK;
    XD_TRY(xdi_xtoken_read_value(x, &given, c->denominator, sizeof given));
    x->weights.token_denominator = given.inverse > 0.0 ? given.value : 0.0;
    return XD_OK;
}

/* A scale, weights or a D with which gradients would leave f32 are a finding, the same on every rank; loss and gradient are
 * then 0, as with a scale that is not finite. */
static void xdi_xtoken_bound(xdi_xtoken *x) {
    double most = x->weights.token_denominator > 0.0
                      ? fabs(x->weights.factor * x->weights.ce / x->weights.token_denominator)
                      : 0.0;
    for (int i = 0; i < x->d.teacher_count; i++)
        most = fmax(most, fabs(xdi_xtoken_factor(x, &x->terms[i])) * fmax(1.0, 1.0 / x->d.temperature));
    if (most <= XDI_XTOKEN_MOST) return;
    if (x->owner) xdi_xtoken_found(x, 0, x->weights.factor);
    x->weights.factor = 0.0;
}

/* One exchange over comm: tokens, D and scores; then weights of teachers and factors of rows. */
static xd_result xdi_xtoken_denominators(xdi_xtoken *x) {
    const int n = x->d.teacher_count;
    const xd_xtoken_score score = x->d.mode == XD_XTOKEN_SELECT ? XD_XTOKEN_SCORE_CE : x->d.score;
    double all = 0.0;
    xdi_xtoken_clear(x, 1 + 3 * n);
    for (int64_t row = 0; row < x->d.student.rows; row++) xdi_xtoken_tally(x, 0, x->host.row_weight[row]);
    for (int i = 0; i < n; i++) {
        XD_TRY(xdi_xtoken_count_chunks(x, &x->terms[i]));
        xdi_xtoken_count(x, &x->terms[i], 1 + i);
        if (score != XD_XTOKEN_SCORE_NONE)
            XD_TRY(xdi_xtoken_score_sums(x, &x->terms[i], score, 1 + n + 2 * i));
    }
    XD_TRY(xdi_xtoken_total(x, 1 + 3 * n, x->d.common.comm));
    XD_TRY(xdi_xtoken_read_tokens(x, x->host.sums[0]));
    for (int i = 0; i < n; i++) {
        const bool positions = (x->terms[i].kind->traits & XDI_KIND_POSITIONS) != 0;
        x->terms[i].counted = x->host.sums[positions ? 0 : 1 + i];
        x->terms[i].denominator = xdi_xtoken_denominator(x, &x->terms[i], x->host.sums[1 + i]);
        all += x->host.sums[1 + i];
    }
    if (all == 0.0 && (x->host.sums[0] == 0.0 || x->weights.token_denominator == 0.0))
        x->found.nothing_counted = 1;
    xdi_xtoken_weigh(x, x->host.sums + 1 + n);
    xdi_xtoken_bound(x);
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        double *factor = &x->host.ce_factor[row];
        *factor = x->weights.token_denominator > 0.0 ? *factor / x->weights.token_denominator : 0.0;
        if (fabs(*factor * x->weights.factor * x->weights.ce) <= XDI_XTOKEN_MOST) continue;
        xdi_xtoken_found(x, row, x->host.row_weight[row]);
        *factor = 0.0;
    }
    return XD_OK;
}

/* ---- passes ---- */

/* Copies all lists that the kernels of a pass read to the device. */
static xd_result xdi_xtoken_upload(xdi_xtoken *x) {
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active) XD_TRY(x->terms[i].kind->fill(x, &x->terms[i]));
    XD_TRY(xdi_xtoken_copy(x, x->lists.there, x->lists.here, x->lists.bytes, XD_COPY_TO_DEVICE));
    return x->kernels->memory.fill(&x->launch, x->work.written, 0, (size_t)x->d.student.rows);
}

/* Copies the chunks with their divergences back and adds them to the sums. */
static xd_result xdi_xtoken_take_home(xdi_xtoken *x) {
    for (int i = 0; i < x->d.teacher_count; i++) {
        const xdi_xtoken_term *term = &x->terms[i];
        if (term->active && term->chunk_count > 0)
            XD_TRY(xdi_xtoken_copy(x, term->chunks, xdi_xtoken_there(&x->lists, term->chunks),
                                   (size_t)term->chunk_count * sizeof *term->chunks, XD_COPY_TO_HOST));
    }
    XD_TRY(x->kernels->memory.synchronize(&x->launch));
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active) x->terms[i].kind->tell(x, &x->terms[i]);
    return XD_OK;
}

static xd_result xdi_xtoken_pass(xdi_xtoken *x, bool write) {
    x->write = write;
    x->found = x->found_in_rows;
    xdi_xtoken_clear(x, XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * x->d.teacher_count);
    xdi_xtoken_add_rows(x);
    XD_TRY(xdi_xtoken_upload(x));
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active) XD_TRY(x->terms[i].kind->run(x, &x->terms[i]));
    if (write) {
        const xd_xtoken_gradient rest = xdi_xtoken_gradient_of(x, xdi_xtoken_student(x, NULL, NULL, 0));
        XD_TRY(x->kernels->xtoken.rest_gradient(&x->launch, &rest));
    }
    return xdi_xtoken_take_home(x);
}

/* When several ranks have a finding, all ranks report that of the first. */
static xd_result xdi_xtoken_agree_found(xdi_xtoken *x) {
    xd_comm *comm = x->d.common.comm;
    const bool any = x->host.sums[XDI_XTOKEN_LABEL] != 0.0 || x->host.sums[XDI_XTOKEN_NOT_FINITE] != 0.0;
    const bool mine = x->found.label_out_of_range > 0 || x->found.not_finite > 0;
    if (!any || !comm || xd_comm_size(comm) == 1) return XD_OK;
    int64_t first = mine ? xd_comm_rank(comm) : xd_comm_size(comm);
    double named[2] = { (double)x->found.first_row, x->found.first_value };
    XD_TRY(xd_all_reduce(comm, &first, &first, 1, XD_DTYPE_I64, XD_MIN));
    XD_TRY(xd_broadcast(comm, named, 2, XD_DTYPE_F64, (int)first));
    x->found.first_row = (int64_t)named[0];
    x->found.first_value = named[1];
    return XD_OK;
}

/* The sums of a pass over comm. */
static xd_result xdi_xtoken_finish(xdi_xtoken *x) {
    xdi_xtoken_tally(x, XDI_XTOKEN_LABEL, (double)x->found.label_out_of_range);
    xdi_xtoken_tally(x, XDI_XTOKEN_NOT_FINITE, (double)x->found.not_finite);
    XD_TRY(xdi_xtoken_total(x, XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * x->d.teacher_count,
                            x->d.common.comm));
    return xdi_xtoken_agree_found(x);
}

static xd_xtoken_teacher_values xdi_xtoken_teacher_result(const xdi_xtoken *x, int index) {
    const xdi_xtoken_term *term = &x->terms[index];
    const double *one = x->host.sums + term->cell;
    xd_xtoken_teacher_values v;
    v.kd = (one[XDI_XTOKEN_DIVERGENCE] + one[XDI_XTOKEN_TAIL]) * xdi_xtoken_scale(x, term);
    v.weight = term->weight;
    v.divergence = one[XDI_XTOKEN_DIVERGENCE];
    v.tail = one[XDI_XTOKEN_TAIL];
    v.denominator = term->denominator;
    v.agreeing = one[XDI_XTOKEN_AGREEING];
    v.compared = one[XDI_XTOKEN_COMPARED];
    v.counted = term->counted;
    return v;
}

static xd_xtoken_values xdi_xtoken_result(const xdi_xtoken *x) {
    xd_xtoken_values v;
    memset(&v, 0, sizeof v);
    for (int i = 0; i < x->d.teacher_count; i++)
        v.kd += xdi_xtoken_omega(x, &x->terms[i]) * xdi_xtoken_teacher_result(x, i).kd;
    v.ce =
        x->weights.token_denominator > 0.0 ? x->host.sums[XDI_XTOKEN_CE] / x->weights.token_denominator : 0.0;
    v.kd_weight = x->weights.kd;
    v.balance = v.kd != 0.0 ? fabs(v.ce) / fabs(v.kd) : 1.0;
    if (!x->d.compat) v.balance = fmin(v.balance, XDI_XTOKEN_BALANCE_MOST);
    v.kd *= x->weights.factor;
    v.ce *= x->weights.factor;
    v.loss = x->weights.kd * v.kd + x->weights.ce * v.ce;
    v.right = x->host.sums[XDI_XTOKEN_RIGHT];
    v.tokens = x->host.sums[XDI_XTOKEN_TOKENS];
    v.token_denominator = x->weights.token_denominator;
    v.selected = x->selected;
    return v;
}

/* Adds the findings to the caller's status, or turns them into an error. */
static xd_result xdi_xtoken_report(const xdi_xtoken *x) {
    xd_status found = x->found, *status = x->d.common.status;
    found.label_out_of_range = (int64_t)x->host.sums[XDI_XTOKEN_LABEL];
    found.not_finite = (int64_t)x->host.sums[XDI_XTOKEN_NOT_FINITE];
    if (!status) return xdi_status_check(x->ctx, &found, x->vocab.size);
    if (status->label_out_of_range == 0 && status->not_finite == 0) {
        status->first_row = found.first_row;
        status->first_value = found.first_value;
    }
    status->label_out_of_range += found.label_out_of_range;
    status->not_finite += found.not_finite;
    status->nothing_counted += found.nothing_counted;
    return XD_OK;
}

static xd_result xdi_xtoken_run(xdi_xtoken *x, xd_xtoken_values *out) {
    const bool write = x->d.common.gradient.data != NULL;
    xd_xtoken_values values;
    XD_TRY(xdi_xtoken_read_scale(x));
    XD_TRY(xdi_xtoken_read_rows(x));
    XD_TRY(xdi_xtoken_denominators(x));
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active && x->terms[i].kind->begin) XD_TRY(x->terms[i].kind->begin(x, &x->terms[i]));
    x->found_in_rows = x->found;
    if (x->d.balance) x->weights.kd = x->weights.ce = 1.0;
    XD_TRY(xdi_xtoken_pass(x, write && !x->d.balance));
    XD_TRY(xdi_xtoken_finish(x));
    values = xdi_xtoken_result(x);
    if (x->d.balance) {
        x->weights.kd = values.balance;
        if (write) XD_TRY(xdi_xtoken_pass(x, true));
        if (write) XD_TRY(xdi_xtoken_finish(x));
        values = xdi_xtoken_result(x);
    }
    XD_TRY(xdi_xtoken_report(x));
    for (int i = 0; i < x->d.teacher_count && x->d.teacher_values; i++) {
        x->d.teacher_values[i] = xdi_xtoken_teacher_result(x, i);
        x->d.teacher_values[i].kd *= x->weights.factor;
    }
    *out = values;
    return XD_OK;
}

/* Are the sizes so small that no sum of them overflows? More rows have no room in any memory. */
static bool xdi_xtoken_is_sized(const xd_xtoken_desc *d) {
    const int64_t most = INT64_MAX / 256;
    bool fits = d->student.rows <= most;
    for (int i = 0; i < d->teacher_count; i++) {
        const xd_xtoken_teacher *t = &d->teachers[i];
        fits = fits && t->logits.rows <= most && t->chunks >= 0 && t->chunks <= INT32_MAX &&
               xdi_xtoken_vocabulary(t) <= INT32_MAX;
    }
    return fits;
}

static xd_result xdi_xtoken_measure(xd_ctx *ctx, const xd_xtoken_desc *desc, size_t *work) {
    xdi_xtoken x;
    size_t host, lists;
    const xd_xtoken_desc d = xdi_xtoken_resolve(desc);
    XD_TRY(xdi_xtoken_validate(ctx, &d));
    XD_REQUIRE(ctx, xdi_xtoken_is_sized(&d), XD_ERROR_ARGUMENT,
               "the workspace of %lld rows in %lld sequences for %d teachers would not fit into memory",
               (long long)d.student.rows, (long long)d.sequences, d.teacher_count);
    xdi_xtoken_open(&x, ctx, &d);
    XD_REQUIRE(ctx, xdi_xtoken_plan(&x, work, &host, &lists), XD_ERROR_ARGUMENT,
               "the workspace would not fit into memory");
    return XD_OK;
}

static xd_result xdi_xtoken_add_to_plan(xd_ctx *ctx, const xd_xtoken_desc *desc,
                                        const xd_xtoken_values *out) {
    size_t work = 0;
    xd_result result = xdi_xtoken_measure(ctx, desc, &work);
    if (result == XD_OK) result = xdi_loss_check_out(ctx, desc->student.rows, out);
    return xdi_plan_add_workspace(ctx, result, work);
}

XD_API xd_result xd_xtoken_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    XDI_LIVE(xd_vocab, desc->vocab);
    if (xdi_plan_is_open(ctx)) return xdi_xtoken_add_to_plan(ctx, desc, out);
    xdi_xtoken x;
    memset(&x, 0, sizeof x);
    xd_result result = xdi_xtoken_prepare(ctx, desc, &x);
    if (result == XD_OK) result = xdi_loss_check_out(ctx, desc->student.rows, out);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL,
                             desc->common.comm ? desc->common.comm : desc->sequence_comm, result);
    if (result == XD_OK) result = xdi_xtoken_run(&x, out);
    xdi_xtoken_close(&x, result);
    return result;
}
