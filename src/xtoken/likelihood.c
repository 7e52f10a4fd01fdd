/* LIKELIHOOD: how likely each side finds a chunk as a whole. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Log-likelihoods above this are taken as this: the logarithm of "it does not come next" has a floor. */
#define XDI_LIKELIHOOD_MOST (-1e-7)

XD_PRIVATE xd_result xdi_xtoken_check_likelihood(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t slots = d->sequences * t->chunks;
    XD_REQUIRE(ctx, d->labels, XD_ERROR_ARGUMENT,
               "teacher %d compares likelihoods, but the student has no labels", index);
    XD_REQUIRE(ctx, t->labels || !xdi_xtoken_reads_logits(t), XD_ERROR_ARGUMENT,
               "teacher %d compares likelihoods, but has neither labels nor log-probabilities", index);
    XD_REQUIRE(ctx, (int)t->likelihood >= 0 && (int)t->likelihood <= (int)XD_LIKELIHOOD_KL, XD_ERROR_ARGUMENT,
               "teacher %d has likelihood form %d", index, (int)t->likelihood);
    for (int64_t i = 0; i < slots && t->chunk_length; i++)
        XD_REQUIRE(ctx, t->chunk_length[i] > 0.0f && isfinite(t->chunk_length[i]), XD_ERROR_ARGUMENT,
                   "teacher %d: chunk %lld of sequence %lld has length %g", index, (long long)(i % t->chunks),
                   (long long)(i / t->chunks), (double)t->chunk_length[i]);
    return XD_OK;
}

/* ---- the two sums of every chunk ---- */

/* The slot of a row's chunk when it is looked at, else -1. */
static int64_t xdi_likelihood_slot(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    return c >= 0 && xdi_xtoken_looks(x, term, b, c) ? b * term->teacher->chunks + c : -1;
}

/* Moments of the teacher's rows that are looked at; a device has made those of all rows. */
static xd_result xdi_likelihood_moments(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    for (int64_t row = 0; row < t->logits.rows; row++) {
        if (xdi_likelihood_slot(x, term, row / term->held, t->teacher_chunks[row]) < 0) continue;
        xd_xtoken_args a = xdi_xtoken_teacher_args(x, term, 1);
        a.rows = &row;
        a.labels = t->labels;
        a.moments = h->moments + row * XD_XTOKEN_MOMENTS;
        XD_TRY(x->kernels.moments(&x->launch, &a));
    }
    return XD_OK;
}

/* The teacher's part: log softmax, at temperature 1, of its rows at their labels. */
static void xdi_likelihood_teacher(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    const bool reads = xdi_xtoken_reads_logits(t);
    for (int64_t row = 0; row < t->logits.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / term->held, t->teacher_chunks[row]);
        const double *m = reads ? h->moments + row * XD_XTOKEN_MOMENTS : NULL;
        if (slot < 0) continue;
        xdi_xtoken_add(x, h->sums, slots + slot,
                       m ? m[XD_XTOKEN_LABEL] - m[XD_XTOKEN_LARGEST] - m[XD_XTOKEN_LOG_SUM]
                         : xdi_xtoken_known(t, row));
    }
}

static xd_result xdi_likelihood_sums(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    xdi_xtoken_zero(x, h->sums, 2 * slots);
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / x->held, t->student_chunks[row]);
        if (slot >= 0) xdi_xtoken_add(x, h->sums, slot, x->log_probs[row]);
    }
    if (xdi_xtoken_reads_logits(t) && !x->on_device) XD_TRY(xdi_likelihood_moments(x, term, h));
    xdi_likelihood_teacher(x, term, h);
    return xdi_xtoken_join(x, h->sums, 2 * slots, x->d.sequence_comm, NULL);
}

/* ---- chunks ---- */

/* ln(1 - e^l) for l < 0, exact on both sides of ln 1/2. */
static double xdi_likelihood_complement(double l) {
    return l > -0.6931471805599453 ? log(-expm1(l)) : log1p(-exp(l));
}

/* p (a - b), 0 where p is: a may be -infinity there. */
static double xdi_likelihood_part(double p, double a, double b) {
    return p > 0.0 ? p * (a - b) : 0.0;
}

/* KL between the coins e^t and e^s, and its derivative by s; with P = e^t, Q = e^s
 *   forward  (Q - P) / (1 - Q)        reverse  Q ((s - t) - (ln(1 - Q) - ln(1 - P))) */
static double xdi_likelihood_coins(double s, double t, bool reverse, double *slope) {
    const bool floor = s > XDI_LIKELIHOOD_MOST;
    if (floor) s = XDI_LIKELIHOOD_MOST;
    if (t > XDI_LIKELIHOOD_MOST) t = XDI_LIKELIHOOD_MOST;
    const double not_s = xdi_likelihood_complement(s), not_t = xdi_likelihood_complement(t);
    const double p = exp(t), q = exp(s);
    *slope = reverse ? xdi_likelihood_part(q, s - t, not_s - not_t) : (q - p) / -expm1(s);
    if (floor) *slope = 0.0;
    if (reverse) return xdi_likelihood_part(q, s, t) - expm1(s) * (not_s - not_t);
    return xdi_likelihood_part(p, t, s) - expm1(t) * (not_t - not_s);
}

/* The loss of a chunk is added; l_s becomes d loss / d l of each of its tokens. */
static void xdi_likelihood_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, double *l_s, double l_t,
                                 int64_t b, int64_t c) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slot = b * t->chunks + c;
    const double length = t->chunk_length ? (double)t->chunk_length[slot] : 1.0;
    const double weight = xdi_xtoken_weight(x, term, b, c), s = *l_s / length, target = l_t / length;
    double slope = 2.0 * (s - target), value = (s - target) * (s - target);
    if (t->likelihood == XD_LIKELIHOOD_KL) value = xdi_likelihood_coins(s, target, x->d.reverse, &slope);
    const bool good = isfinite(value) && isfinite(slope);
    if (!good && weight != 0.0 && x->owner) xdi_xtoken_found(x, slot, value);
    if (x->owner) xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * value : 0.0);
    *l_s = good ? weight * xdi_xtoken_factor(x, term) * slope / length : 0.0;
}

/* ---- gradient ---- */

/* The rows that have a gradient, and by how much. */
static void xdi_likelihood_rows(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h) {
    h->count = 0;
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / x->held, term->teacher->student_chunks[row]);
        if (slot < 0 || h->sums[slot] == 0.0) continue;
        h->rows[h->count] = row;
        h->slopes[h->count++] = h->sums[slot];
    }
}

XD_PRIVATE xd_result xdi_likelihood_settle(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    XD_TRY(xdi_likelihood_sums(x, term, h));
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t b = slot / t->chunks, c = slot % t->chunks;
        if (xdi_likelihood_slot(x, term, b, c) >= 0)
            xdi_likelihood_chunk(x, term, &h->sums[slot], h->sums[slots + slot], b, c);
    }
    xdi_likelihood_rows(x, term, h);
    return XD_OK;
}

/* dz += slope (onehot(label) - p), p at temperature 1. */
static xd_result xdi_likelihood_run(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h) {
    XD_TRY(xdi_likelihood_settle(x, term, h));
    if (!x->write) return XD_OK;
    xd_xtoken_args a = xdi_xtoken_student_args(x, h->count);
    a.rows = h->rows;
    a.slopes = h->slopes;
    return x->kernels.gradient(&x->launch, &a);
}

XD_PRIVATE void xdi_likelihood_layout_lists(const xdi_xtoken *x, xdi_likelihood *h, xd_arena *arena,
                                            bool *fits) {
    h->rows = (int64_t *)xdi_arena_array(arena, x->d.student.rows, sizeof(int64_t), fits);
    h->slopes = (double *)xdi_arena_array(arena, x->d.student.rows, sizeof(double), fits);
}

XD_PRIVATE void xdi_likelihood_layout_work(const xdi_xtoken *x, const xd_xtoken_teacher *t, xdi_likelihood *h,
                                           xd_arena *arena, bool *fits) {
    const int64_t rows = xdi_xtoken_reads_logits(t) ? t->logits.rows : 0;
    h->sums = (double *)xdi_arena_array(arena, 2 * x->d.sequences * t->chunks, sizeof(xd_fixed), fits);
    h->moments = (double *)xdi_arena_array(arena, rows, XD_XTOKEN_MOMENTS * sizeof(double), fits);
}

static bool xdi_likelihood_layout(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h,
                                  xd_arena *arena) {
    bool fits = true;
    xdi_likelihood_layout_lists(x, h, arena, &fits);
    xdi_likelihood_layout_work(x, term->teacher, h, arena, &fits);
    return fits;
}

XD_PRIVATE xd_result xdi_xtoken_likelihood(xdi_xtoken *x, xdi_xtoken_term *term) {
    xd_arena arena = xd_arena_over(NULL, 0);
    xd_result result = XD_OK;
    xdi_likelihood h;
    void *memory = xdi_likelihood_layout(x, term, &h, &arena) ? xd_allocate(x->ctx, arena.peak + 1) : NULL;
    if (!memory)
        result = XD_FAIL(x->ctx, XD_ERROR_MEMORY, "no room for the likelihoods of %lld chunks",
                         (long long)(x->d.sequences * term->teacher->chunks));
    result = xdi_vocab_agree(x->vocab.tp, x->d.comm, result);
    arena = xd_arena_over(memory, arena.peak);
    if (result == XD_OK && xdi_likelihood_layout(x, term, &h, &arena))
        result = xdi_likelihood_run(x, term, &h);
    xd_release(x->ctx, memory);
    return result;
}
