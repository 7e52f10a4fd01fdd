/* Which chunks of a teacher a rank works on, and in what order. A chunk whose tokens all lie on one rank of the sequence is
 * that rank's alone, and nothing of it is exchanged. The others (where positions lie in order, one at each cut between two
 * ranks) are worked on by all ranks together, before any of them turns to its own: so nobody waits for another's. */

#include "xtoken/internal.h"

#include <string.h>

/* What becomes of a chunk, in term->place until its place is known. */
enum { XDI_SHARE_NONE = -1, XDI_SHARE_OWN = -2, XDI_SHARE_ALL = -3 };

static void xdi_share_mark(const xdi_xtoken_term *term, const int64_t *ids, int64_t rows, int64_t held) {
    for (int64_t row = 0; row < rows; row++)
        if (ids[row] >= 0) term->place[row / held * term->teacher->chunks + ids[row]] = 1;
}

/* Whose each chunk is, in term->place: that takes the number of ranks that have tokens of it. */
static xd_result xdi_share_sort(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t count = x->d.sequences * t->chunks;
    int64_t *ranks = term->order;
    memset(term->place, 0, (size_t)count * sizeof *term->place);
    xdi_share_mark(term, t->student_chunks, x->d.sequences * x->held, x->held);
    xdi_share_mark(term, t->teacher_chunks, x->d.sequences * term->held, term->held);
    memcpy(ranks, term->place, (size_t)count * sizeof *ranks);
    if (x->d.sequence_comm && xd_comm_size(x->d.sequence_comm) > 1)
        XD_TRY(xd_all_reduce(x->d.sequence_comm, ranks, ranks, count, XD_DTYPE_I64, XD_SUM));
    for (int64_t i = 0; i < count; i++) {
        const bool mine = term->place[i] == 1,
                   looks = xdi_xtoken_looks(x, term, i / t->chunks, i % t->chunks);
        term->place[i] = XDI_SHARE_NONE;
        if (looks && ranks[i] > 1) term->place[i] = XDI_SHARE_ALL;
        if (looks && ranks[i] == 1 && mine) term->place[i] = XDI_SHARE_OWN;
    }
    return XD_OK;
}

/* Gives the chunks of one kind their places from `next` on; returns the next one. */
static int64_t xdi_share_place(const xdi_xtoken_term *term, int64_t b, int64_t kind, int64_t next) {
    int64_t *order = term->order + b * term->teacher->chunks,
            *place = term->place + b * term->teacher->chunks;
    for (int64_t c = 0; c < term->teacher->chunks; c++) {
        if (place[c] != kind) continue;
        order[next] = c;
        place[c] = next++;
    }
    return next;
}

/* Sorts a side's rows by the place of their chunk; rows of one chunk stay in order. */
static void xdi_share_rows(const xdi_xtoken *x, const xdi_xtoken_term *term, const int64_t *ids, int64_t held,
                           const xdi_xtoken_side *side) {
    const int64_t chunks = term->teacher->chunks, count = x->d.sequences * chunks;
    int64_t *begin = side->begin;
    memset(begin, 0, (size_t)(count + 1) * sizeof *begin);
    for (int64_t turn = 0; turn < 2; turn++) {
        for (int64_t row = 0; row < x->d.sequences * held; row++) {
            const int64_t first = row / held * chunks,
                          place = ids[row] < 0 ? -1 : term->place[first + ids[row]];
            if (place < 0) continue;
            if (turn == 0)
                begin[first + place + 1]++;
            else
                side->rows[begin[first + place]++] = row; /* begins move to ends ... */
        }
        for (int64_t i = 0; i < count && turn == 0; i++) begin[i + 1] += begin[i];
    }
    for (int64_t i = count; i > 0; i--) begin[i] = begin[i - 1]; /* ... and back */
    begin[0] = 0;
}

XD_PRIVATE xd_result xdi_xtoken_share(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    XD_TRY(xdi_share_sort(x, term));
    for (int64_t b = 0; b < x->d.sequences; b++) {
        term->shared[b] = xdi_share_place(term, b, XDI_SHARE_ALL, 0);
        term->listed[b] = xdi_share_place(term, b, XDI_SHARE_OWN, term->shared[b]);
    }
    xdi_share_rows(x, term, term->teacher->student_chunks, x->held, &term->student_rows);
    xdi_share_rows(x, term, term->teacher->teacher_chunks, term->held, &term->teacher_rows);
    return XD_OK;
}

XD_PRIVATE bool xdi_xtoken_tells(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    const int64_t place = term->place[b * term->teacher->chunks + c];
    return place >= 0 && (place >= term->shared[b] || x->owner);
}

/* ---- tiles ---- */

static int64_t xdi_share_tiles(int64_t chunks, int64_t tile) {
    return (chunks + tile - 1) / tile;
}

XD_PRIVATE int64_t xdi_xtoken_most_tiles(int64_t chunks, int64_t tile) {
    return xdi_share_tiles(chunks, tile) + 1; /* a tile is not of both kinds */
}

XD_PRIVATE int64_t xdi_xtoken_shared_tiles(const xdi_xtoken_term *term, int64_t b) {
    return xdi_share_tiles(term->shared[b], term->tile);
}

XD_PRIVATE int64_t xdi_xtoken_tiles(const xdi_xtoken_term *term, int64_t b) {
    return xdi_xtoken_shared_tiles(term, b) + xdi_share_tiles(term->listed[b] - term->shared[b], term->tile);
}

XD_PRIVATE xdi_xtoken_tile xdi_xtoken_tile_at(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                              int64_t index) {
    const int64_t together = xdi_xtoken_shared_tiles(term, b), own = index - together;
    const int64_t end = own < 0 ? term->shared[b] : term->listed[b];
    xdi_xtoken_tile t = { b, own < 0 ? index * term->tile : term->shared[b] + own * term->tile, 0,
                          own < 0 ? x->d.sequence_comm : NULL };
    t.count = end - t.first < term->tile ? end - t.first : term->tile;
    return t;
}

XD_PRIVATE int64_t xdi_xtoken_tile_rows(const xdi_xtoken_term *term, const xdi_xtoken_side *side,
                                        const xdi_xtoken_tile *tile, int64_t *rows, int64_t *places) {
    const int64_t *begin = side->begin + tile->b * term->teacher->chunks + tile->first;
    int64_t count = 0;
    for (int64_t place = 0; place < tile->count; place++)
        for (int64_t i = begin[place]; i < begin[place + 1]; i++) {
            rows[count] = side->rows[i];
            places[count++] = place;
        }
    return count;
}
