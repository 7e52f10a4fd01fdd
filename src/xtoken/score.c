/* Scores of teachers, and the weights computed from them. */

#include "kernel/ids.h"
#include "xtoken/internal.h"

#include <math.h>

/* The weight of a row in this score, 0 where it does not count. */
static double xdi_score_weight(const xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_score score,
                               int64_t row) {
    const xd_xtoken_teacher *t = term->teacher;
    if (score != XD_XTOKEN_SCORE_CE) return t->position_weight ? (double)t->position_weight[row] : 1.0;
    if (!term->reads) {
        if (xdi_xtoken_known(t, row) == -INFINITY) return 0.0;
        return t->label_weight ? (double)t->label_weight[row] : 1.0;
    }
    if (!t->labels.data) return x->host.row_weight[row]; /* one tokenizer: the student's */
    const int64_t label = xd_id_at(t->labels, row);
    if (label == x->d.common.ignore_index || label < 0 || label >= t->logits.cols) return 0.0;
    return t->label_weight ? (double)t->label_weight[row] : 1.0;
}

/* The score of a row from its moments, over all columns of the logits, padding included, as in the reference. */
static double xdi_score_of(const double *m, xd_xtoken_score score) {
    const double lse = m[XD_XTOKEN_LARGEST] + m[XD_XTOKEN_LOG_SUM];
    if (score == XD_XTOKEN_SCORE_CE) return m[XD_XTOKEN_LABEL] - lse;
    return score == XD_XTOKEN_SCORE_MAX_PROB ? exp(m[XD_XTOKEN_LARGEST] - lse) : -m[XD_XTOKEN_ENTROPY];
}

XD_PRIVATE xd_result xdi_xtoken_score_sums(xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_score score,
                                           int64_t cell) {
    const xd_xtoken_teacher *t = term->teacher;
    xd_ids labels = t->labels.data ? t->labels : x->d.common.labels;
    const double *moments = x->host.moments;
    int64_t asked = 0;
    if (score != XD_XTOKEN_SCORE_CE) labels.data = NULL;
    for (int64_t row = 0; row < t->logits.rows && term->reads; row++)
        if (xdi_score_weight(x, term, score, row) != 0.0) x->host.asked[asked++] = row;
    if (term->reads)
        XD_TRY(xdi_xtoken_moments(x, term, t->logits.cols, asked, labels, score == XD_XTOKEN_SCORE_ENTROPY));
    for (int64_t row = 0; row < t->logits.rows; row++) {
        const double weight = xdi_score_weight(x, term, score, row);
        if (weight == 0.0) continue;
        const double value = term->reads ? xdi_score_of(moments, score) : xdi_xtoken_known(t, row);
        if (term->reads) moments += XD_XTOKEN_MOMENTS;
        if (!xdi_xtoken_sums_take(x, weight * value)) {
            xdi_xtoken_found(x, row, value);
            continue;
        }
        xdi_xtoken_tally(x, cell, weight * value);
        xdi_xtoken_tally(x, cell + 1, weight);
    }
    return XD_OK;
}

/* ln V_i / ln min_j V_j. */
static void xdi_score_lengths(xdi_xtoken *x) {
    int64_t least = x->terms[0].vocabulary;
    for (int i = 1; i < x->d.teacher_count; i++)
        if (x->terms[i].vocabulary < least) least = x->terms[i].vocabulary;
    for (int i = 0; i < x->d.teacher_count; i++)
        x->terms[i].length =
            x->d.normalise_by_vocabulary ? log((double)x->terms[i].vocabulary) / log((double)least) : 1.0;
}

static void xdi_score_softmax(xdi_xtoken *x, const double *score) {
    double max = -INFINITY, sum = 0.0;
    for (int i = 0; i < x->d.teacher_count; i++) {
        x->terms[i].weight =
            score[2 * i] > -INFINITY ? x->d.alpha * score[2 * i] * x->terms[i].length : -INFINITY;
        if (x->terms[i].weight > max) max = x->terms[i].weight;
    }
    if (max == -INFINITY) max = 0.0; /* no teacher has a score */
    for (int i = 0; i < x->d.teacher_count; i++) sum += x->terms[i].weight = exp(x->terms[i].weight - max);
    if (sum == 0.0)
        for (int i = 0; i < x->d.teacher_count; i++) sum += x->terms[i].weight = 1.0;
    for (int i = 0; i < x->d.teacher_count; i++) x->terms[i].weight /= sum;
}

XD_PRIVATE void xdi_xtoken_weigh(xdi_xtoken *x, double *scores) {
    int best = 0;
    xdi_score_lengths(x);
    for (int i = 0; i < x->d.teacher_count; i++) {
        if (scores[2 * i + 1] > 0.0)
            scores[2 * i] /= scores[2 * i + 1] > 1.0 ? scores[2 * i + 1] : 1.0;
        else
            scores[2 * i] = -INFINITY; /* nothing was scored: behind every teacher that was */
        if (scores[2 * i] > scores[2 * best]) best = i;
        x->terms[i].active = true;
    }
    if (x->d.score != XD_XTOKEN_SCORE_NONE) xdi_score_softmax(x, scores);
    for (int i = 0; i < x->d.teacher_count; i++) {
        if (x->d.mode == XD_XTOKEN_AVERAGED_LOGITS) x->terms[i].active = i == 0;
        if (x->d.mode != XD_XTOKEN_SELECT) continue;
        x->terms[i].active = i == best;
        x->terms[i].weight = i == best ? 1.0 : 0.0;
    }
    if (x->d.mode == XD_XTOKEN_SELECT) x->selected = best;
}
