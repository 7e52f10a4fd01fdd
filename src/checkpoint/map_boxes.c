/* Which elements of a tensor of theirs lie where in our memory. */

#include "checkpoint/map_internal.h"
#include "tensor/internal.h"

#include <string.h>

/* A list that is being made: of one piece and one region. */
typedef struct xdi_mapped_search {
    const xdi_mapped_piece *piece;
    const xd_region *region;
    int64_t stride[XD_DIMS_MAX]; /* of the region's storage */
    xdi_mapped_box box;
    xdi_mapped_boxes *out;
} xdi_mapped_search;

static void xdi_mapped_found(xdi_mapped_search *s, int64_t offset) {
    s->box.offset = offset;
    if (s->out->list && s->out->count < s->out->room) s->out->list[s->out->count] = s->box;
    s->out->count++;
}

/* Goes over the intervals of our dimension d and of those after it. */
static void xdi_mapped_descend(xdi_mapped_search *s, int d, int64_t offset) {
    int64_t before = 0, begin, end;
    int theirs = -1;
    if (d == s->region->ndim) {
        xdi_mapped_found(s, offset);
        return;
    }
    begin = s->piece->box[XDI_OURS].begin[d];
    end = s->piece->box[XDI_OURS].end[d];
    for (int k = 0; k < s->piece->ndim; k++)
        if (s->piece->axis[k] == d) theirs = k;
    for (int i = 0; i < s->region->count[d]; i++) {
        const xd_interval held = s->region->interval[d][i];
        const int64_t low = held.begin > begin ? held.begin : begin, high = held.end < end ? held.end : end;
        const int64_t position = before + low - held.begin;
        before += held.end - held.begin;
        if (low >= high) continue;
        if (theirs >= 0) {
            const int64_t shift = s->piece->box[XDI_THEIRS].begin[theirs] - begin;
            s->box.begin[theirs] = low + shift;
            s->box.end[theirs] = high + shift;
        }
        xdi_mapped_descend(s, d + 1, offset + position * s->stride[d]);
    }
}

/* The boxes of a piece in a region whose storage begins at `offset` of our memory. */
static void xdi_mapped_search_piece(xdi_mapped_search *s, const xdi_mapped_piece *piece, int64_t offset) {
    s->piece = piece;
    memset(&s->box, 0, sizeof s->box);
    s->box.piece = piece;
    for (int k = 0; k < piece->ndim; k++) {
        const int d = piece->axis[k];
        s->box.stride[k] = d < 0 ? 1 : s->stride[d];
        s->box.begin[k] = piece->box[XDI_THEIRS].begin[k]; /* for a stack, which is no dimension of ours */
        s->box.end[k] = piece->box[XDI_THEIRS].end[k];
    }
    xdi_mapped_descend(s, 0, offset);
}

XD_PRIVATE void xdi_mapped_list(const xdi_mapped_plan *plan, int64_t ours, const xd_region *region,
                                xd_interval range, xdi_mapped_boxes *boxes) {
    const xd_tensor_part *part = plan->content->tensors[ours].part;
    xd_region *regions = boxes->regions, *whole = &regions[XDI_REGION_FLAT_MAX];
    int64_t offset = 0, shape[XD_DIMS_MAX];
    int count = 0;
    xdi_mapped_search s;
    memset(&s, 0, sizeof s);
    s.out = boxes;
    if (!region) *whole = xdi_region_whole(part->ndim, part->shape);
    (void)xdi_region_flat_range(plan->ctx, region ? region : whole, range, regions, &count);
    for (int i = 0; i < count; i++) {
        int64_t stride = 1;
        s.region = &regions[i];
        xdi_region_shape(s.region, shape);
        for (int d = part->ndim - 1; d >= 0; stride *= shape[d--]) s.stride[d] = stride;
        for (int64_t k = plan->first[ours]; k < plan->first[ours + 1]; k++)
            xdi_mapped_search_piece(&s, &plan->pieces[k], offset);
        offset += stride;
    }
}

/* ---- tiles ---- */

/* Strides of the memory of a tile, and its copy without what needs no dimension of its own. */
static void xdi_mapped_lay_out(const xdi_mapped_box *box, xdi_mapped_tile *tile) {
    const int ndim = box->piece->ndim;
    xd_copy *copy = &tile->copy;
    tile->count = 1;
    copy->ndim = ndim;
    for (int d = ndim - 1; d >= 0; d--) {
        copy->extent[d] = tile->size[d];
        copy->src_stride[d] = tile->count;
        copy->dst_stride[d] = box->stride[d];
        tile->count *= tile->size[d];
    }
    xdi_interval_fold(copy);
    tile->dense = copy->ndim == 1 && copy->src_stride[0] == 1 && copy->dst_stride[0] == 1;
}

XD_PRIVATE bool xdi_mapped_next_tile(const xdi_mapped_box *box, int64_t room, int64_t at[XD_DIMS_MAX],
                                     xdi_mapped_tile *tile) {
    const int ndim = box->piece->ndim;
    int64_t step[XD_DIMS_MAX];
    memset(tile, 0, sizeof *tile);
    tile->copy.dst_offset = box->offset;
    if (ndim == 0 && at[0]++ > 0) return false;
    for (int d = ndim - 1; d >= 0; d--) {
        const int64_t extent = box->end[d] - box->begin[d], left = box->end[d] - at[d];
        if (left <= 0) return false; /* only of dimension 0, after the last */
        step[d] = extent < room ? extent : room;
        if (step[d] < 1) step[d] = 1;
        room /= step[d];
        tile->begin[d] = at[d];
        tile->size[d] = left < step[d] ? left : step[d];
        tile->copy.dst_offset += (at[d] - box->begin[d]) * box->stride[d];
    }
    xdi_mapped_lay_out(box, tile);
    for (int d = ndim - 1; d >= 0; d--) {
        at[d] += step[d];
        if (at[d] < box->end[d] || d == 0) break;
        at[d] = box->begin[d];
    }
    return true;
}
