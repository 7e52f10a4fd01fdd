/* Which chunks of a teacher a rank computes, in what order, and their weights. A chunk whose tokens are all on one
 * rank of the sequence is computed by that rank only, without an exchange over the sequence. The other chunks (with
 * contiguous intervals of positions, one at each boundary between two ranks) are computed by all ranks together, before
 * any rank starts its private chunks: so no rank waits for another's private chunks. */

#include "align/chunks.h"
#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* ---- weight of a chunk ---- */

XD_PRIVATE double xdi_xtoken_sample(const xdi_xtoken *x, int64_t b) {
    return x->d.sample_weight ? (double)x->d.sample_weight[b] : 1.0;
}

/* Tokens on both sides, not masked, and exact if exact_only is set. */
static bool xdi_xtoken_exists(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t at = b * t->chunks + c;
    const bool exact = x->d.exact_only && !(x->d.compat && (term->kind->traits & XDI_KIND_EVEN_COMPAT));
    uint8_t valid;
    xdi_valid_chunks(&term->student_sizes[at], &term->teacher_sizes[at],
                     t->chunk_mask ? &t->chunk_mask[at] : NULL, exact ? &t->chunk_exact[at] : NULL, 1,
                     &valid);
    return valid != 0;
}

XD_PRIVATE bool xdi_xtoken_counts(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    return xdi_xtoken_sample(x, b) != 0.0 && xdi_xtoken_exists(x, term, b, c);
}

XD_PRIVATE bool xdi_xtoken_looks(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    const bool all = x->d.compat && (term->kind->traits & XDI_KIND_ALL_COMPAT) != 0;
    return (all || xdi_xtoken_sample(x, b) != 0.0) && xdi_xtoken_exists(x, term, b, c);
}

XD_PRIVATE double xdi_xtoken_weight(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    if (!xdi_xtoken_counts(x, term, b, c)) return 0.0;
    return x->d.compat && (term->kind->traits & XDI_KIND_EVEN_COMPAT) ? 1.0 : xdi_xtoken_sample(x, b);
}

/* 0 where nothing counts. */
XD_PRIVATE double xdi_xtoken_scale(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const double tau = (term->kind->traits & XDI_KIND_AT_ONE) ? 1.0 : x->d.temperature;
    return term->denominator > 0.0 ? tau * tau / term->denominator : 0.0;
}

/* With the factor of its vocabulary; averaged logits are one teacher of weight 1. */
XD_PRIVATE double xdi_xtoken_omega(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    if (!term->active) return 0.0;
    return x->d.mode == XD_XTOKEN_AVERAGED_LOGITS ? 1.0 : term->weight * term->length;
}

XD_PRIVATE double xdi_xtoken_factor(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    return x->weights.kd * xdi_xtoken_omega(x, term) * xdi_xtoken_scale(x, term) * x->weights.factor;
}

/* Divergences below it are taken by sums, also times the weight: their product may be rounded up, and sums of doubles have many
 * terms. */
XD_PRIVATE double xdi_xtoken_limit(const xdi_xtoken *x, double weight) {
    const double largest = x->fixed ? XD_FIXED_LARGEST * (1.0 - 1e-15) : 1e300;
    return weight > 1.0 ? largest / weight : largest;
}

XD_PRIVATE xd_xtoken_chunk xdi_xtoken_chunk_of(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                               int64_t c, double epsilon) {
    const int64_t at = b * term->teacher->chunks + c;
    xd_xtoken_chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    chunk.compared = true;
    chunk.student = (double)term->student_sizes[at] + epsilon;
    chunk.teacher = (double)term->teacher_sizes[at] + epsilon;
    chunk.factor =
        xdi_xtoken_bounded(xdi_xtoken_weight(x, term, b, c) * xdi_xtoken_factor(x, term)) / chunk.student;
    chunk.limit = xdi_xtoken_limit(x, xdi_xtoken_weight(x, term, b, c));
    return chunk;
}

/* ---- places ---- */

/* How a chunk is computed: stored in places->place until its place is known. */
enum { XDI_SHARE_NONE = -1, XDI_SHARE_OWN = -2, XDI_SHARE_ALL = -3 };

static void xdi_share_mark(const xdi_xtoken_places *places, const int64_t *ids, int64_t rows, int64_t held) {
    for (int64_t row = 0; row < rows; row++)
        if (ids[row] >= 0) places->place[row / held * places->chunks + ids[row]] = 1;
}

/* Which rank computes each chunk, in places->place: this needs the number of ranks that have tokens of it. */
static xd_result xdi_share_sort(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xdi_xtoken_places *places = &term->places;
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t count = x->d.sequences * t->chunks;
    int64_t *ranks = places->order;
    memset(places->place, 0, (size_t)count * sizeof *places->place);
    xdi_share_mark(places, t->student_chunks, x->d.sequences * x->held, x->held);
    xdi_share_mark(places, t->teacher_chunks, x->d.sequences * term->held, term->held);
    memcpy(ranks, places->place, (size_t)count * sizeof *ranks);
    if (x->d.sequence_comm && xd_comm_size(x->d.sequence_comm) > 1)
        XD_TRY(xd_all_reduce(x->d.sequence_comm, ranks, ranks, count, XD_DTYPE_I64, XD_SUM));
    for (int64_t i = 0; i < count; i++) {
        const bool mine = places->place[i] == 1,
                   looks = xdi_xtoken_looks(x, term, i / t->chunks, i % t->chunks);
        places->place[i] = XDI_SHARE_NONE;
        if (looks && ranks[i] > 1) places->place[i] = XDI_SHARE_ALL;
        if (looks && ranks[i] == 1 && mine) places->place[i] = XDI_SHARE_OWN;
    }
    return XD_OK;
}

/* Assigns places from `next` on to the chunks of one sort; returns the next free place. */
static int64_t xdi_share_place(const xdi_xtoken_places *places, int64_t b, int64_t kind, int64_t next) {
    int64_t *order = places->order + b * places->chunks, *place = places->place + b * places->chunks;
    for (int64_t c = 0; c < places->chunks; c++) {
        if (place[c] != kind) continue;
        order[next] = c;
        place[c] = next++;
    }
    return next;
}

/* The place in its tile. */
static int64_t xdi_share_in_tile(const xdi_xtoken_places *places, int64_t b, int64_t place) {
    const int64_t shared = places->shared[b];
    return (place < shared ? place : place - shared) % places->tile;
}

/* Sorts a side's rows by the place of their chunk; rows of one chunk stay in order. */
static void xdi_share_rows(const xdi_xtoken *x, const xdi_xtoken_term *term, const int64_t *ids, int64_t held,
                           const xdi_xtoken_side *side) {
    const int64_t chunks = term->teacher->chunks, count = x->d.sequences * chunks;
    int64_t *begin = side->begin;
    memset(begin, 0, (size_t)(count + 1) * sizeof *begin);
    for (int64_t turn = 0; turn < 2; turn++) {
        for (int64_t row = 0; row < x->d.sequences * held; row++) {
            const int64_t b = row / held, first = b * chunks,
                          place = ids[row] < 0 ? -1 : term->places.place[first + ids[row]];
            if (place < 0) continue;
            if (turn == 0) {
                begin[first + place + 1]++;
            } else {
                side->places[begin[first + place]] = xdi_share_in_tile(&term->places, b, place);
                side->rows[begin[first + place]++] = row; /* begins move to ends ... */
            }
        }
        for (int64_t i = 0; i < count && turn == 0; i++) begin[i + 1] += begin[i];
    }
    for (int64_t i = count; i > 0; i--) begin[i] = begin[i - 1]; /* ... and back */
    begin[0] = 0;
}

XD_PRIVATE xd_result xdi_xtoken_share(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xdi_xtoken_places *places = &term->places;
    XD_TRY(xdi_share_sort(x, term));
    for (int64_t b = 0; b < x->d.sequences; b++) {
        places->shared[b] = xdi_share_place(places, b, XDI_SHARE_ALL, 0);
        places->listed[b] = xdi_share_place(places, b, XDI_SHARE_OWN, places->shared[b]);
    }
    xdi_share_rows(x, term, term->teacher->student_chunks, x->held, &term->student_rows);
    xdi_share_rows(x, term, term->teacher->teacher_chunks, term->held, &term->teacher_rows);
    return XD_OK;
}

XD_PRIVATE bool xdi_xtoken_tells(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    const int64_t place = term->places.place[b * term->teacher->chunks + c];
    return place >= 0 && (place >= term->places.shared[b] || x->owner);
}

/* ---- tiles ---- */

static int64_t xdi_share_tiles(int64_t chunks, int64_t tile) {
    return (chunks + tile - 1) / tile;
}

XD_PRIVATE int64_t xdi_xtoken_shared_tiles(const xdi_xtoken_places *places, int64_t b) {
    return xdi_share_tiles(places->shared[b], places->tile);
}

XD_PRIVATE int64_t xdi_xtoken_tiles(const xdi_xtoken_places *places, int64_t b) {
    return xdi_xtoken_shared_tiles(places, b) +
           xdi_share_tiles(places->listed[b] - places->shared[b], places->tile);
}

XD_PRIVATE xdi_xtoken_tile xdi_xtoken_tile_at(const xdi_xtoken_places *places, xd_comm *comm, int64_t b,
                                              int64_t index) {
    const int64_t together = xdi_xtoken_shared_tiles(places, b), shared = places->shared[b];
    const bool own = index >= together;
    const int64_t first = own ? shared + (index - together) * places->tile : index * places->tile;
    const int64_t left = (own ? places->listed[b] : shared) - first;
    const xdi_xtoken_tile tile = { b, first, left < places->tile ? left : places->tile, own ? NULL : comm };
    return tile;
}

XD_PRIVATE int64_t xdi_xtoken_tile_start(const xdi_xtoken_places *places, const xdi_xtoken_tile *tile) {
    return tile->b * places->chunks + tile->first;
}

/* ---- results of chunks ---- */

XD_PRIVATE bool xdi_xtoken_sums_take(const xdi_xtoken *x, double term) {
    return isfinite(term) && (!x->fixed || fabs(term) < XD_FIXED_LARGEST);
}

XD_PRIVATE double xdi_xtoken_bounded(double factor) {
    return fabs(factor) <= XDI_XTOKEN_MOST ? factor : 0.0;
}

XD_PRIVATE bool xdi_xtoken_is_good(const xdi_xtoken *x, const xdi_xtoken_term *term, double weight,
                                   double value) {
    return fabs(value) < xdi_xtoken_limit(x, weight) &&
           fabs(weight * xdi_xtoken_factor(x, term)) <= XDI_XTOKEN_MOST;
}

XD_PRIVATE void xdi_xtoken_found(xdi_xtoken *x, int64_t row, double value) {
    if (x->found.not_finite++ > 0 || x->found.label_out_of_range > 0) return;
    x->found.first_row = row;
    x->found.first_value = value;
}

XD_PRIVATE void xdi_xtoken_tell_chunk(xdi_xtoken *x, const xdi_xtoken_term *term,
                                      const xd_xtoken_chunk *chunk, int64_t b, int64_t c) {
    const double weight = xdi_xtoken_weight(x, term, b, c);
    const bool good = xdi_xtoken_is_good(x, term, weight, chunk->value);
    if (!chunk->compared || !xdi_xtoken_tells(x, term, b, c)) return;
    if (!good && weight != 0.0) xdi_xtoken_found(x, b * term->teacher->chunks + c, chunk->value);
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * chunk->value : 0.0);
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_AGREEING, good && chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_COMPARED, 1.0);
}

XD_PRIVATE void xdi_xtoken_tell_chunks(xdi_xtoken *x, const xdi_xtoken_term *term) {
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t place = 0; place < term->places.listed[b]; place++) {
            const int64_t at = b * term->teacher->chunks + place;
            xdi_xtoken_tell_chunk(x, term, &term->chunks[at], b, term->places.order[at]);
        }
}
