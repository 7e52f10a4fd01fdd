#include <math.h>
#include <string.h>

/* Log-likelihoods above this are taken as this: the logarithm of "it does not come next" has a floor. */
#define XDI_LIKELIHOOD_MOST (-1e-7)

/* What the kind needs beside the workspace. */
typedef struct xdi_likelihood {
    double *sums;      /* cells [2 B C]: l_s of every chunk, then l_t; l_s then becomes d loss / d l */
    double *log_probs; /* [rows] of the student's next tokens */
} xdi_likelihood;

XD_PRIVATE xd_result xdi_xtoken_check_likelihood(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t slots = d->sequences * t->chunks;
    XDI_REQUIRE(ctx, d->labels, XD_ERROR_ARGUMENT,
                "teacher %d compares likelihoods, but the student has no labels", index);
    XDI_REQUIRE(ctx, t->labels || !xdi_xtoken_reads_logits(t), XD_ERROR_ARGUMENT,
                "teacher %d compares likelihoods, but has neither labels nor log-probabilities", index);
    XDI_REQUIRE(ctx, (int)t->likelihood >= 0 && (int)t->likelihood <= (int)XD_LIKELIHOOD_KL,
                XD_ERROR_ARGUMENT, "teacher %d has likelihood form %d", index, (int)t->likelihood);
    for (int64_t i = 0; i < slots && t->chunk_length; i++)
        XDI_REQUIRE(ctx, t->chunk_length[i] > 0.0f && isfinite(t->chunk_length[i]), XD_ERROR_ARGUMENT,
                    "teacher %d: chunk %lld of sequence %lld has length %g", index,
                    (long long)(i % t->chunks), (long long)(i / t->chunks), (double)t->chunk_length[i]);
    return XD_OK;
}

/* ---- the two sums of every chunk ---- */

/* log softmax, at temperature 1, of a row of the teacher at its label. NaN for a label it does not have. */
static double xdi_likelihood_teacher(const xdi_xtoken_term *term, int64_t row) {
    const xd_xtoken_teacher *t = term->teacher;
    double max = -INFINITY, sum = 0.0;
    if (!xdi_xtoken_reads_logits(t)) return xdi_xtoken_known(t, row);
    const int64_t label = t->labels[row];
    if (label < 0 || label >= term->vocabulary) return (double)NAN;
    for (int64_t u = 0; u < term->vocabulary; u++) {
        const double z = xdi_loss_load(&t->logits, row, u);
        if (!(z <= max)) max = z; /* a NaN stays */
    }
    for (int64_t u = 0; u < term->vocabulary; u++) sum += exp(xdi_loss_load(&t->logits, row, u) - max);
    return xdi_loss_load(&t->logits, row, label) - max - log(sum);
}

/* The slot of a row's chunk when it is looked at, else -1. */
static int64_t xdi_likelihood_slot(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    return c >= 0 && xdi_xtoken_looks(x, term, b, c) ? b * term->teacher->chunks + c : -1;
}

static xd_result xdi_likelihood_sums(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    XDI_TRY(xd_gather_columns(x->ctx, x->d.vocab, x->d.student, x->d.labels, 1, 1, h->log_probs));
    xdi_xtoken_zero(x, h->sums, 2 * slots);
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / x->held, t->student_chunks[row]);
        if (slot >= 0) xdi_xtoken_add(x, h->sums, slot, h->log_probs[row] - x->lse_one[row]);
    }
    for (int64_t row = 0; row < t->logits.rows; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / term->held, t->teacher_chunks[row]);
        if (slot >= 0) xdi_xtoken_add(x, h->sums, slots + slot, xdi_likelihood_teacher(term, row));
    }
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

/* dz += slope (onehot(label) - p), p at temperature 1; the row's first visit brings the cross entropy's part,
 * which is the same vector. */
static void xdi_likelihood_write(xdi_xtoken *x, int64_t row, double slope) {
    const bool first = x->written[row] == 0;
    const int64_t label = x->d.labels[row] - x->vocab.begin;
    const double factor = slope - (first ? x->ce_factor[row] * x->ce_weight : 0.0);
    x->written[row] = 1;
    for (int64_t v = 0; v < x->columns; v++) {
        const double p = exp(xdi_loss_load(&x->d.student, row, v) - x->lse_one[row]);
        const double before = first ? 0.0 : xdi_loss_load(&x->d.gradient, row, v);
        xdi_loss_store(&x->d.gradient, row, v, before + factor * ((v == label ? 1.0 : 0.0) - p));
    }
    for (int64_t v = x->columns; v < x->d.gradient.cols && first; v++)
        xdi_loss_store(&x->d.gradient, row, v, 0.0);
}

static xd_result xdi_likelihood_run(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_likelihood *h) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t slots = x->d.sequences * t->chunks;
    XDI_TRY(xdi_likelihood_sums(x, term, h));
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t b = slot / t->chunks, c = slot % t->chunks;
        if (xdi_likelihood_slot(x, term, b, c) >= 0)
            xdi_likelihood_chunk(x, term, &h->sums[slot], h->sums[slots + slot], b, c);
    }
    for (int64_t row = 0; row < x->d.student.rows && x->write; row++) {
        const int64_t slot = xdi_likelihood_slot(x, term, row / x->held, t->student_chunks[row]);
        if (slot >= 0 && h->sums[slot] != 0.0) xdi_likelihood_write(x, row, h->sums[slot]);
    }
    return XD_OK;
}

static bool xdi_likelihood_layout(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_likelihood *h,
                                  xd_arena *arena) {
    const int64_t slots = x->d.sequences * term->teacher->chunks;
    bool fits = true;
    h->sums = (double *)xdi_xtoken_take(arena, 2 * slots, sizeof(xd_fixed), &fits);
    h->log_probs = (double *)xdi_xtoken_take(arena, x->d.student.rows, sizeof(double), &fits);
    return fits;
}

XD_PRIVATE xd_result xdi_xtoken_likelihood(xdi_xtoken *x, xdi_xtoken_term *term) {
    xd_arena arena = xd_arena_over(NULL, 0);
    xd_result result = XD_OK;
    xdi_likelihood h;
    void *memory = xdi_likelihood_layout(x, term, &h, &arena) ? xd_allocate(x->ctx, arena.peak + 1) : NULL;
    if (!memory)
        result = XDI_FAIL(x->ctx, XD_ERROR_MEMORY, "no room for the likelihoods of %lld chunks",
                          (long long)(x->d.sequences * term->teacher->chunks));
    result = xdi_vocab_agree(x->vocab.tp, x->d.comm, result);
    arena = xd_arena_over(memory, arena.peak);
    if (result == XD_OK && xdi_likelihood_layout(x, term, &h, &arena))
        result = xdi_likelihood_run(x, term, &h);
    xd_release(x->ctx, memory);
    return result;
}
