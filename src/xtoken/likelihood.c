/* LIKELIHOOD: the probability that each side gives to a chunk as a whole. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Upper bound of log-likelihoods: ln(1 - e^l) then stays finite. */
#define XDI_LIKELIHOOD_MOST (-1e-7)

/* Log-likelihoods of chunks; in host memory, except for the gradient. */
typedef struct xdi_likelihood {
    double *sums;    /* cells [2 B C]: l_s of every chunk, then l_t; then d loss / d l, and d(c) */
    double *teacher; /* [rows of logits] log-probabilities of the teacher's tokens, from logits */
    int64_t *rows;   /* lists: [count] of the student that have a gradient */
    double *slopes;  /* lists: [count] d loss / d log-probability of those */
    int64_t count;
} xdi_likelihood;

static xd_result xdi_likelihood_check(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t slots = d->sequences * t->chunks;
    (void)size;
    XD_REQUIRE(ctx, d->common.labels.data, XD_ERROR_ARGUMENT,
               "teacher %d compares likelihoods, but the student has no labels", index);
    XD_REQUIRE(ctx, t->labels.data || !xdi_xtoken_reads_logits(t), XD_ERROR_ARGUMENT,
               "teacher %d compares likelihoods, but has neither labels nor log-probabilities", index);
    XD_REQUIRE(ctx, (int)t->likelihood.form >= 0 && (int)t->likelihood.form <= (int)XD_LIKELIHOOD_KL,
               XD_ERROR_ARGUMENT, "teacher %d has likelihood form %d", index, (int)t->likelihood.form);
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, slots) && t->likelihood.chunk_length; i++) {
        const bool counts = (!t->chunk_mask || t->chunk_mask[i]) &&
                            (d->compat || !d->sample_weight || d->sample_weight[i / t->chunks] != 0.0f);
        if (!counts) continue;
        XD_REQUIRE(ctx, t->likelihood.chunk_length[i] > 0.0f && isfinite(t->likelihood.chunk_length[i]),
                   XD_ERROR_ARGUMENT, "teacher %d: chunk %lld of sequence %lld has length %g", index,
                   (long long)(i % t->chunks), (long long)(i / t->chunks),
                   (double)t->likelihood.chunk_length[i]);
    }
    return XD_OK;
}

/* ---- the two sums of every chunk ---- */

/* The index of a row's chunk if that chunk is compared, else -1. */
static int64_t xdi_likelihood_slot(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    return c >= 0 && xdi_xtoken_looks(x, term, b, c) ? b * term->teacher->chunks + c : -1;
}

/* log softmax, at temperature 1, of the teacher's rows of compared chunks, at their labels. */
static xd_result xdi_likelihood_begin(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xd_xtoken_teacher *t = term->teacher;
    xdi_likelihood *h = (xdi_likelihood *)term->own;
    int64_t count = 0;
    if (!term->reads) return XD_OK;
    for (int64_t row = 0; row < t->logits.rows; row++)
        if (xdi_likelihood_slot(x, term, row / term->held, t->teacher_chunks[row]) >= 0)
            x->host.asked[count++] = row;
    XD_TRY(xdi_xtoken_moments(x, term, term->vocabulary, count, t->labels, false));
    for (int64_t i = 0; i < count; i++) {
        const double *m = x->host.moments + i * XD_XTOKEN_MOMENTS;
        h->teacher[x->host.asked[i]] = m[XD_XTOKEN_LABEL] - m[XD_XTOKEN_LARGEST] - m[XD_XTOKEN_LOG_SUM];
    }
    return XD_OK;
}

static xd_result xdi_likelihood_sums(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                     const xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    xdi_xtoken_zero(x, h->sums, 2 * slots);
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / x->held, t->student_chunks[row]);
        if (slot >= 0) xdi_xtoken_add(x, h->sums, slot, x->host.log_probs[row]);
    }
    for (int64_t row = 0; row < t->logits.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / term->held, t->teacher_chunks[row]);
        if (slot >= 0)
            xdi_xtoken_add(x, h->sums, slots + slot,
                           term->reads ? h->teacher[row] : xdi_xtoken_known(t, row));
    }
    return xdi_xtoken_join(x, h->sums, 2 * slots, x->d.sequence_comm);
}

/* ---- chunks ---- */

/* ln(1 - e^l) for l < 0, accurate on both sides of ln 1/2. */
static double xdi_likelihood_complement(double l) {
    return l > -0.6931471805599453 ? log(-expm1(l)) : log1p(-exp(l));
}

/* p (a - b), 0 where p is 0: a may be -infinity there. */
static double xdi_likelihood_part(double p, double a, double b) {
    return p > 0.0 ? p * (a - b) : 0.0;
}

/* KL between Bernoulli distributions e^t and e^s, and its derivative by s; with P = e^t, Q = e^s
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

/* l_s becomes d loss / d l of each of the chunk's tokens, 0 where the loss is not finite, and l_t the loss. */
static void xdi_likelihood_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, double *l_s, double *l_t,
                                 int64_t b, int64_t c) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slot = b * t->chunks + c;
    const double length = t->likelihood.chunk_length ? (double)t->likelihood.chunk_length[slot] : 1.0;
    const double weight = xdi_xtoken_weight(x, term, b, c), s = *l_s / length, target = *l_t / length;
    double slope = 2.0 * (s - target), value = (s - target) * (s - target);
    if (t->likelihood.form == XD_LIKELIHOOD_KL) value = xdi_likelihood_coins(s, target, x->d.reverse, &slope);
    const double gradient = weight * xdi_xtoken_factor(x, term) * slope / length;
    const bool good = xdi_xtoken_is_good(x, term, weight, value) && fabs(gradient) <= XDI_XTOKEN_MOST;
    *l_s = good ? gradient : 0.0;
    *l_t = isfinite(slope) || !isfinite(value) ? value : slope;
    if (!good && isfinite(*l_t)) *l_t = (double)INFINITY;
}

/* ---- a pass ---- */

/* The rows that have a gradient, and its factors. */
static void xdi_likelihood_rows(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h) {
    h->count = 0;
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / x->held, term->teacher->student_chunks[row]);
        if (slot < 0 || h->sums[slot] == 0.0) continue;
        h->rows[h->count] = row;
        h->slopes[h->count++] = h->sums[slot];
    }
}

static xd_result xdi_likelihood_fill(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    xdi_likelihood *h = (xdi_likelihood *)term->own;
    XD_TRY(xdi_likelihood_sums(x, term, h));
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t b = slot / t->chunks, c = slot % t->chunks;
        if (xdi_likelihood_slot(x, term, b, c) >= 0)
            xdi_likelihood_chunk(x, term, &h->sums[slot], &h->sums[slots + slot], b, c);
    }
    xdi_likelihood_rows(x, term, h);
    return XD_OK;
}

/* dz += slope (onehot(label) - p), p at temperature 1. */
static xd_result xdi_likelihood_run(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xdi_likelihood *h = (const xdi_likelihood *)term->own;
    const xd_xtoken_label_gradient_args a = { xdi_xtoken_gradient_of(
                                                  x, xdi_xtoken_student(x, h->rows, NULL, h->count)),
                                              (const double *)xdi_xtoken_there(&x->lists, h->slopes) };
    return x->write ? x->kernels->xtoken.label_gradient(&x->launch, &a) : XD_OK;
}

static void xdi_likelihood_tell(xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xdi_likelihood *h = (const xdi_likelihood *)term->own;
    const int64_t chunks = term->teacher->chunks, slots = x->d.sequences * chunks;
    for (int64_t slot = 0; slot < slots && x->owner; slot++) {
        const int64_t b = slot / chunks, c = slot % chunks;
        const double weight = xdi_xtoken_weight(x, term, b, c), value = h->sums[slots + slot];
        if (xdi_likelihood_slot(x, term, b, c) < 0) continue;
        if (!isfinite(value) && weight != 0.0) xdi_xtoken_found(x, slot, value);
        xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_DIVERGENCE, isfinite(value) ? weight * value : 0.0);
    }
}

/* ---- memory ---- */

static void xdi_likelihood_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s) {
    (void)x;
    if (term->reads) s->moments = xdi_xtoken_most(s->moments, term->teacher->logits.rows);
}

static void xdi_likelihood_layout(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a) {
    const int64_t rows = x->d.student.rows, teacher_rows = term->reads ? term->teacher->logits.rows : 0;
    xdi_likelihood plan, *h = (xdi_likelihood *)xdi_xtoken_own(term, a, &plan, sizeof plan);
    h->sums = (double *)xdi_arena_array(a->host, 2 * x->d.sequences * term->teacher->chunks,
                                        xdi_xtoken_cell(x), &a->fits);
    h->teacher = (double *)xdi_arena_array(a->host, teacher_rows, sizeof(double), &a->fits);
    h->rows = (int64_t *)xdi_xtoken_list(a, rows, sizeof(int64_t));
    h->slopes = (double *)xdi_xtoken_list(a, rows, sizeof(double));
}

XD_PRIVATE const xdi_xtoken_kind *xdi_likelihood_kind(void) {
    static const xdi_xtoken_kind kind = { XDI_KIND_APART | XDI_KIND_AT_ONE,
                                          xdi_likelihood_check,
                                          NULL,
                                          xdi_likelihood_size,
                                          xdi_likelihood_layout,
                                          NULL,
                                          xdi_likelihood_begin,
                                          xdi_likelihood_fill,
                                          xdi_likelihood_run,
                                          xdi_likelihood_tell,
                                          NULL };
    return &kind;
}
