/* nn_sequence.c - see nn_sequence.h. */
#include "nn_sequence.h"

#include "nn_layers.h"
#include "nn_matmul.h"

#include <string.h>

xd_interval nn_sequence_part(const nn_sequence *s, int64_t block) {
    const int64_t first = nn_positions_block(&s->at, 0).begin;
    xd_interval part = nn_positions_block(&s->at, block);
    part.begin -= first;
    part.end -= first;
    return part;
}

bool nn_sequence_fits(const nn_group *cp, int all, const int32_t *count, const int32_t *position) {
    const nn_positions at = nn_positions_share(cp->size, cp->rank, all);
    if (!cp->invariant) return true;
    for (int r = 0; r < cp->size && cp->size > 1; r++) {
        const xd_interval tokens = nn_positions_tokens(&at, r);
        if (count[r] != tokens.end - tokens.begin) return false;
    }
    for (int i = 0; i < all && position; i++)
        if (position[i] != i) return false;
    return true;
}

/* ---- sums ---- */

static nn_sums nn_sequence_sums(const nn_sequence *s, int64_t all) {
    const nn_sums sums = { &s->at, all, s->nodes, s->root, s->room };
    return sums;
}

void nn_sequence_add(const nn_sequence *s, int64_t all, const nn_block_sum *of) {
    const nn_sums sums = nn_sequence_sums(s, all);
    nn_sums_add(&sums, of);
}

int nn_sequence_join(const nn_sequence *s, const nn_group *cp, int64_t all, const float **sum) {
    const nn_pieces pieces = { (int)s->at.first, (int)s->at.count, NN_POSITION_BLOCKS };
    *sum = cp->size > 1 ? s->root : s->nodes; /* all blocks make one node */
    return cp->size > 1 ? cp->sum_pieces(cp->user, s->nodes, pieces, all, s->root) : 0;
}

/* ---- rows ---- */

/* Rows of a sequence that follow each other. */
typedef struct nn_run {
    int64_t first, count;
} nn_run;

/* What a run of rows adds to an array of `floats`. */
typedef struct nn_runs {
    const nn_sequence *sequence;
    void (*add)(const void *slope, nn_run rows, float *out);
    const void *slope;
    int64_t floats;
} nn_runs;

static void nn_runs_block(const void *user, int64_t block, float *out) {
    const nn_runs *r = (const nn_runs *)user;
    const xd_interval part = nn_sequence_part(r->sequence, block);
    memset(out, 0, (size_t)r->floats * sizeof *out);
    for (int64_t i = 0; i < r->sequence->sequences && part.begin < part.end; i++) {
        const nn_run rows = { i * r->sequence->positions + part.begin, part.end - part.begin };
        r->add(r->slope, rows, out);
    }
}

static void nn_runs_add(const nn_runs *r, nn_place place) {
    const nn_run all = { 0, r->sequence->sequences * r->sequence->positions };
    const nn_block_sum sum = { nn_runs_block, r, place.offset, r->floats };
    if (r->sequence->blocks)
        nn_sequence_add(r->sequence, place.all, &sum);
    else
        r->add(r->slope, all, place.gradient);
}

static void nn_matrix_run(const void *slope, nn_run rows, float *out) {
    const nn_matrix_slope *m = (const nn_matrix_slope *)slope;
    nn_matmul(nn_transpose(nn_dense(m->d_y + rows.first * m->out, rows.count, m->out)),
              nn_dense(m->x + rows.first * m->in, rows.count, m->in), out, m->in, true);
}

void nn_sequence_matrix(const nn_sequence *s, const nn_matrix_slope *slope) {
    const nn_runs runs = { s, nn_matrix_run, slope, slope->in * slope->out };
    nn_runs_add(&runs, slope->place);
}

static void nn_norm_run(const void *slope, nn_run rows, float *out) {
    const nn_norm_slope *n = (const nn_norm_slope *)slope;
    const int64_t at = rows.first * n->width;
    nn_rmsnorm_backward(rows.count, n->width, n->x + at, n->weight, n->inverse_rms + rows.first, n->d_y + at,
                        n->d_x + at, out);
}

void nn_sequence_norm(const nn_sequence *s, const nn_norm_slope *slope) {
    const nn_runs runs = { s, nn_norm_run, slope, slope->width };
    nn_runs_add(&runs, slope->place);
}

static void nn_embed_run(const void *slope, nn_run rows, float *out) {
    const nn_embed_slope *e = (const nn_embed_slope *)slope;
    for (int64_t r = rows.first; r < rows.first + rows.count; r++) {
        const int64_t row = (int64_t)e->ids[r] - e->begin;
        if (row < 0 || row >= e->count) continue;
        for (int64_t i = 0; i < e->width; i++) out[row * e->width + i] += e->d_x[r * e->width + i];
    }
}

void nn_sequence_embed(const nn_sequence *s, const nn_embed_slope *slope) {
    const nn_runs runs = { s, nn_embed_run, slope, slope->width * slope->count };
    nn_runs_add(&runs, slope->place);
}
