/* SAME on a device: tile after tile of the rows that count, in four launches. */

#include "xtoken/internal.h"

#include <string.h>

XD_PRIVATE void xdi_xtoken_device_same_fill(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_lists *l) {
    int64_t count = 0;
    for (int64_t b = 0; b < x->d.sequences; b++) {
        l->first[b] = count;
        for (int64_t row = b * x->held; row < (b + 1) * x->held; row++) {
            if (x->row_weight[row] == 0.0) continue;
            l->places[count] = (count - l->first[b]) % term->tile;
            l->chunks[count] = xdi_same_chunk(x, term, row);
            l->rows[count++] = row;
        }
        if (term->k < x->vocab.size) xdi_xtoken_voters(x, term, b, l->mask + b * term->held);
    }
    l->first[x->d.sequences] = count;
    for (int64_t j = 0; j < term->k && term->k == x->vocab.size; j++) l->ids[j] = j;
}

/* J of sequence b, and where every id is in it. */
static xd_result xdi_staged_same_columns(xdi_xtoken *x, const xdi_xtoken_term *term,
                                         const xdi_xtoken_lists *l, int64_t b, const int64_t **ids) {
    const bool all = term->k == x->vocab.size;
    xd_xtoken_args a = xdi_xtoken_student_args(x, 0);
    if (b > 0 && (all || x->d.compat)) return XD_OK;
    if (!all) XD_TRY(xdi_xtoken_device_choose(x, term, l, x->vocab.size, b));
    *ids = all ? (const int64_t *)xdi_xtoken_there(x, l->ids) : x->ids;
    a.ids = *ids;
    a.k = term->k;
    a.columns = x->vocab.size;
    a.slots = x->slots;
    return x->kernels.slots(&x->launch, &a);
}

/* Rows [at, at + count) of the list. */
static xd_result xdi_staged_same_tile(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_lists *l,
                                      const int64_t *ids, int64_t at, int64_t count) {
    xd_xtoken_args a = xdi_xtoken_device_args(x, l->rows + at, l->places + at, count);
    a.ids = ids;
    a.k = term->k;
    a.student = x->student;
    a.teacher = x->student + count * term->k;
    a.divisor = 1.0;
    a.chunks = (xd_xtoken_chunk *)xdi_xtoken_there(x, l->chunks + at);
    a.reverse = x->d.reverse;
    XD_TRY(xdi_same_compare(x, term, &a));
    if (!x->write) return XD_OK;
    a.matrix.places = x->slots;
    a.vocabulary = x->vocab.size;
    a.direct = true;
    return x->kernels.gradient(&x->launch, &a);
}

XD_PRIVATE xd_result xdi_xtoken_device_same(xdi_xtoken *x, const xdi_xtoken_term *term,
                                            const xdi_xtoken_lists *l) {
    const int64_t *ids = NULL;
    for (int64_t b = 0; b < x->d.sequences; b++) {
        XD_TRY(xdi_staged_same_columns(x, term, l, b, &ids));
        for (int64_t at = l->first[b]; at < l->first[b + 1]; at += term->tile) {
            const int64_t left = l->first[b + 1] - at;
            XD_TRY(xdi_staged_same_tile(x, term, l, ids, at, left < term->tile ? left : term->tile));
        }
    }
    return XD_OK;
}
