/* Halos: the backward's sums. Blocks overlap, so the part is cut where one of them begins or ends: in the cells between the
 * cuts all elements have the same terms. Cells with equally many terms lie one behind the other in a staging array, once for
 * each term, and become one sum of dense arrays. */

#include "tensor/halo_internal.h"

#include <string.h>

static int xdi_halo_block_order(const void *a, const void *b) {
    const xdi_halo_block *x = (const xdi_halo_block *)a, *y = (const xdi_halo_block *)b;
    if (x->zone != y->zone) return x->zone < y->zone ? -1 : 1;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    return x->sequence < y->sequence ? -1 : x->sequence > y->sequence;
}

/* Inserts into an ascending list without repetition; returns the new count. */
static int xdi_halo_cut(int64_t *cuts, int count, int64_t at) {
    int i = count;
    while (i > 0 && cuts[i - 1] >= at) i--;
    if (i < count && cuts[i] == at) return count;
    memmove(cuts + i + 1, cuts + i, (size_t)(count - i) * sizeof *cuts);
    cuts[i] = at;
    return count + 1;
}

/* A box between neighbouring cuts, and its terms. */
typedef struct xdi_halo_cell {
    int64_t lo[XD_DIMS_MAX], extent[XD_DIMS_MAX], numel;
    int terms; /* this rank's own value is one */
} xdi_halo_cell;

static bool xdi_halo_covers(const xdi_halo_making *m, const xdi_halo_block *block,
                            const xdi_halo_cell *cell) {
    for (int d = 0; d < m->scene->ndim; d++)
        if (block->lo[d] > cell->lo[d] || block->hi[d] < cell->lo[d] + cell->extent[d]) return false;
    return true;
}

static void xdi_halo_cell_count(const xdi_halo_making *m, xdi_halo_cell *cell) {
    cell->numel = 1;
    cell->terms = 1;
    for (int d = 0; d < m->scene->ndim; d++) cell->numel *= cell->extent[d];
    for (int i = 0; i < m->block_count; i++) cell->terms += xdi_halo_covers(m, m->order[i], cell);
}

/* The copies of a cell: its terms to staging, and its sum back. m->totals[terms] is the place of the next cell. */
static void xdi_halo_cell_copies(const xdi_halo_making *m, const xdi_halo_cell *cell, int64_t stride) {
    const xdi_halo_scene *s = m->scene;
    const xdi_halo_part *me = &s->part[s->rank];
    xdi_halo_side part, wide, staged;
    memset(&part, 0, sizeof part);
    wide = staged = part;
    xdi_halo_strides(s->ndim, me->own, part.stride);
    xdi_halo_strides(s->ndim, me->wide, wide.stride);
    xdi_halo_dense(s->ndim, cell->extent, staged.stride);
    staged.offset = m->totals[cell->terms];
    for (int d = 0; d < s->ndim; d++) {
        part.offset += cell->lo[d] * part.stride[d];
        wide.offset += (me->own[d].begin + cell->lo[d] - me->wide[d].begin) * wide.stride[d];
    }
    xdi_halo_copy(m->plan, XDI_HALO_BACK_SUMS, s->ndim, cell->extent, &staged, &part);
    xdi_halo_copy(m->plan, XDI_HALO_BACK_LOCAL, s->ndim, cell->extent, &wide, &staged);
    for (int i = 0; i < m->block_count; i++) {
        const xdi_halo_block *block = m->order[i];
        xdi_halo_side src;
        if (!xdi_halo_covers(m, block, cell)) continue;
        memset(&src, 0, sizeof src);
        src.offset = block->offset;
        for (int d = 0; d < s->ndim; d++) {
            src.offset += (cell->lo[d] - block->lo[d]) * block->stride[d];
            src.stride[d] = block->stride[d];
        }
        staged.offset += stride;
        xdi_halo_copy(m->plan, block->received ? XDI_HALO_BACK_RECEIVED : XDI_HALO_BACK_LOCAL, s->ndim,
                      cell->extent, &src, &staged);
    }
}

/* The cell at `at`, which is moved on; false after the last. */
static bool xdi_halo_cell_next(const xdi_halo_making *m, const int *cut_count, int *at, xdi_halo_cell *cell) {
    const int ndim = m->scene->ndim;
    if (at[ndim] != 0) return false;
    for (int d = 0; d < ndim; d++) {
        const int64_t *cut = m->cuts + 2 * (int64_t)m->block_room * d + at[d];
        cell->lo[d] = cut[0];
        cell->extent[d] = cut[1] - cut[0];
    }
    int d = ndim - 1;
    while (d >= 0 && ++at[d] == cut_count[d] - 1) at[d--] = 0;
    at[ndim] = d < 0;
    xdi_halo_cell_count(m, cell);
    return true;
}

/* The places of sums in staging, from the elements of one term; afterwards totals are the places of their first cells. */
static void xdi_halo_place_sums(xdi_halo_making *m) {
    xdi_halo_plan *plan = m->plan;
    plan->sum_count = 0;
    plan->term_count = 0;
    plan->term_most = 0;
    for (int terms = 2; terms <= m->block_count + 1; terms++) {
        const int64_t count = m->totals[terms];
        if (count == 0) continue;
        if (plan->sums) {
            plan->sums[plan->sum_count].terms = terms;
            plan->sums[plan->sum_count].at = plan->term_count;
            plan->sums[plan->sum_count].count = count;
        }
        m->totals[terms] = plan->term_count;
        plan->term_count += terms * count;
        plan->term_most = terms;
        plan->sum_count++;
    }
}

/* From one term of a cell to the next, where sums have been placed. */
static int64_t xdi_halo_stride(const xdi_halo_plan *plan, int terms) {
    for (int i = 0; plan->sums && i < plan->sum_count; i++)
        if (plan->sums[i].terms == terms) return plan->sums[i].count;
    return 0;
}

XD_PRIVATE void xdi_halo_cells(xdi_halo_making *m) {
    const int ndim = m->scene->ndim;
    int cut_count[XD_DIMS_MAX] = { 0 }, at[XD_DIMS_MAX + 1] = { 0 };
    xdi_halo_cell cell;
    memset(&cell, 0, sizeof cell);
    for (int i = 0; i < m->block_count; i++) {
        m->order[i] = &m->blocks[i];
        for (int d = 0; d < ndim; d++) {
            int64_t *cuts = m->cuts + 2 * (int64_t)m->block_room * d;
            cut_count[d] = xdi_halo_cut(cuts, cut_count[d], m->blocks[i].lo[d]);
            cut_count[d] = xdi_halo_cut(cuts, cut_count[d], m->blocks[i].hi[d]);
        }
    }
    memset(m->totals, 0, (size_t)(m->block_count + 2) * sizeof *m->totals);
    if (m->block_count == 0) return;
    xdi_sort((const void **)m->order, (size_t)m->block_count, xdi_halo_block_order);
    while (xdi_halo_cell_next(m, cut_count, at, &cell))
        if (cell.terms > 1) m->totals[cell.terms] += cell.numel;
    xdi_halo_place_sums(m);
    memset(at, 0, sizeof at);
    while (xdi_halo_cell_next(m, cut_count, at, &cell)) {
        if (cell.terms == 1) continue;
        xdi_halo_cell_copies(m, &cell, xdi_halo_stride(m->plan, cell.terms));
        m->totals[cell.terms] += cell.numel;
    }
}
