/* Halos: which index of a tensor, on which rank, is at a place of a part with halo, and copies between places. */

#include "tensor/halo_internal.h"

#include <inttypes.h>
#include <string.h>

/* ---- boundaries ---- */

/* The indices of a dimension that the positions of `listed` in one zone have; false when it has none there. */
static bool xdi_halo_stretch_in(const xdi_halo_scene *s, int d, int zone, xd_interval listed,
                                xdi_halo_stretch *out) {
    const int64_t n = s->shape[d];
    const int64_t low = zone == XDI_HALO_INSIDE ? 0 : zone == XDI_HALO_AFTER ? n : INT64_MIN;
    const int64_t high = zone == XDI_HALO_INSIDE ? n : zone == XDI_HALO_AFTER ? INT64_MAX : 0;
    const int64_t begin = listed.begin > low ? listed.begin : low,
                  end = listed.end < high ? listed.end : high;
    const bool below = zone == XDI_HALO_BEFORE;
    if (begin >= end) return false;
    out->at = begin;
    out->count = end - begin;
    out->from = begin;
    out->step = 1;
    out->zone = zone;
    if (zone == XDI_HALO_INSIDE) return true;
    switch (s->desc.boundary[d]) {
    case XD_HALO_ZERO: out->step = 0; break;
    case XD_HALO_PERIODIC: out->from = below ? begin + n : begin - n; break;
    case XD_HALO_REFLECT:
        out->from = below ? -begin : 2 * (n - 1) - begin;
        out->step = -1;
        break;
    default:
        out->from = below ? -1 - begin : 2 * n - 1 - begin;
        out->step = -1;
        break;
    }
    return true;
}

/* Turns the indices of a stretch by half the extent n: two stretches where they pass its end. Returns how many. */
static int xdi_halo_turn(int64_t n, const xdi_halo_stretch *stretch, xdi_halo_stretch *out) {
    const int64_t half = n / 2, from = stretch->from;
    int count = 0;
    if (stretch->step == 0) {
        out[0] = *stretch;
        return 1;
    }
    /* How many come before indices change from one half to the other. */
    int64_t first = stretch->step > 0 ? half - from : from - half + 1;
    first = first < 0 ? 0 : first > stretch->count ? stretch->count : first;
    for (int piece = 0; piece < 2; piece++) {
        xdi_halo_stretch *o = &out[count];
        const int64_t skipped = piece ? first : 0;
        *o = *stretch;
        o->at += skipped;
        o->from += stretch->step * skipped;
        o->count = piece ? stretch->count - first : first;
        if (o->count == 0) continue;
        o->from += o->from < half ? n - half : -half;
        count++;
    }
    return count;
}

/* The part of a stretch whose indices are in [own.begin, own.end). */
static bool xdi_halo_clip(xd_interval own, xdi_halo_stretch *s) {
    const int64_t least = s->step > 0 ? s->from : s->from - s->count + 1, end = least + s->count;
    const int64_t low = least > own.begin ? least : own.begin, high = end < own.end ? end : own.end;
    if (s->step == 0 || low >= high) return false;
    s->at += s->step > 0 ? low - least : end - high;
    s->from = s->step > 0 ? low : high - 1;
    s->count = high - low;
    return true;
}

/* ---- boxes ---- */

/* The stretches of one dimension: beyond a pole (`turned`) or not; positions count from `origin`. Returns how many. */
static int xdi_halo_list_stretches(const xdi_halo_scene *s, int d, bool turned, xd_interval listed,
                                   int64_t origin, xdi_halo_stretch *out) {
    static const int order[] = { XDI_HALO_BEFORE, XDI_HALO_INSIDE, XDI_HALO_AFTER };
    int count = 0;
    for (int i = 0; i < XDI_HALO_ZONES; i++) {
        xdi_halo_stretch stretch;
        if (d == s->pole && (order[i] != XDI_HALO_INSIDE) != turned) continue;
        if (!xdi_halo_stretch_in(s, d, order[i], listed, &stretch)) continue;
        stretch.at -= origin;
        if (turned && d == s->desc.longitude)
            count += xdi_halo_turn(s->shape[d], &stretch, out + count);
        else
            out[count++] = stretch;
    }
    return count;
}

XD_PRIVATE void xdi_halo_walk_begin(xdi_halo_walk *walk, const xdi_halo_scene *scene,
                                    const xdi_halo_part *taker, const xd_interval *listed,
                                    const xdi_halo_part *owner) {
    memset(walk, 0, sizeof *walk);
    walk->ndim = scene->ndim;
    walk->zeros = !owner;
    walk->turns = scene->pole >= 0 ? 2 : 1;
    for (int turned = 0; turned < walk->turns; turned++)
        for (int d = 0; d < scene->ndim; d++) {
            xdi_halo_stretch *list = walk->list[turned][d];
            int kept = 0;
            const int count =
                xdi_halo_list_stretches(scene, d, turned != 0, listed[d], taker->wide[d].begin, list);
            for (int i = 0; i < count; i++)
                if (!owner || xdi_halo_clip(owner->own[d], &list[i])) list[kept++] = list[i];
            walk->count[turned][d] = kept;
        }
}

/* The box at walk->at, which is moved on; false when it is not among those that are asked for. */
static bool xdi_halo_walk_take(xdi_halo_walk *walk, xdi_halo_box *box) {
    bool zeros = false;
    for (int d = 0; d < walk->ndim; d++) {
        box->dim[d] = walk->list[walk->turned][d][walk->at[d]];
        zeros = zeros || box->dim[d].step == 0;
    }
    int d = walk->ndim - 1;
    while (d >= 0 && ++walk->at[d] == walk->count[walk->turned][d]) walk->at[d--] = 0;
    if (d < 0) walk->turned++;
    return zeros == walk->zeros;
}

XD_PRIVATE bool xdi_halo_walk_next(xdi_halo_walk *walk, xdi_halo_box *box) {
    while (walk->turned < walk->turns) {
        bool none = false;
        for (int d = 0; d < walk->ndim; d++) none = none || walk->count[walk->turned][d] == 0;
        if (none)
            walk->turned++;
        else if (xdi_halo_walk_take(walk, box))
            return true;
    }
    return false;
}

/* ---- copies ---- */

XD_PRIVATE void xdi_halo_dense(int ndim, const int64_t *extent, int64_t *stride) {
    int64_t next = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        stride[d] = next;
        next *= extent[d];
    }
}

XD_PRIVATE void xdi_halo_strides(int ndim, const xd_interval *interval, int64_t *stride) {
    int64_t next = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        stride[d] = next;
        next *= xdi_halo_length(interval[d]);
    }
}

XD_PRIVATE xd_copy xdi_halo_copy_of(int ndim, const int64_t *extent, const xdi_halo_side *src,
                                    const xdi_halo_side *dst) {
    xd_copy copy;
    memset(&copy, 0, sizeof copy);
    copy.ndim = ndim;
    copy.src_offset = src->offset;
    copy.dst_offset = dst->offset;
    for (int d = 0; d < ndim; d++) {
        copy.extent[d] = extent[d];
        copy.src_stride[d] = src->stride[d];
        copy.dst_stride[d] = dst->stride[d];
    }
    xdi_interval_fold(&copy);
    return copy;
}

XD_PRIVATE void xdi_halo_copy(xdi_halo_plan *plan, xdi_halo_list list, int ndim, const int64_t *extent,
                              const xdi_halo_side *src, const xdi_halo_side *dst) {
    if (plan->copies[list])
        plan->copies[list][plan->copy_count[list]] = xdi_halo_copy_of(ndim, extent, src, dst);
    plan->copy_count[list]++;
}

/* ---- settings ---- */

static xd_result xdi_halo_check_width(xd_ctx *ctx, const xd_halo_desc *d, int dim, int64_t extent) {
    const xd_halo_boundary rule = d->boundary[dim];
    const int64_t most = rule == XD_HALO_ZERO      ? INT64_MAX / 8
                         : rule == XD_HALO_REFLECT ? (extent ? extent - 1 : 0)
                                                   : extent;
    XD_REQUIRE(ctx, (int)rule >= 0 && rule <= XD_HALO_POLE, XD_ERROR_ARGUMENT,
               "dimension %d: boundary %d does not exist", dim, (int)rule);
    XD_REQUIRE(ctx, d->before[dim] >= 0 && d->after[dim] >= 0, XD_ERROR_ARGUMENT,
               "dimension %d: a halo of %" PRId64 " before and %" PRId64 " after", dim, d->before[dim],
               d->after[dim]);
    XD_REQUIRE(ctx, d->before[dim] <= most && d->after[dim] <= most, XD_ERROR_SHAPE,
               "dimension %d: a halo of %" PRId64 " before and %" PRId64 " after; of extent %" PRId64
               " its boundary allows %" PRId64,
               dim, d->before[dim], d->after[dim], extent, most);
    return XD_OK;
}

/* Finds the dimension with POLE, and that which it turns. */
static xd_result xdi_halo_check_pole(xd_ctx *ctx, xdi_halo_scene *s) {
    s->pole = -1;
    for (int i = 0; i < s->ndim; i++) {
        if (s->desc.boundary[i] != XD_HALO_POLE) continue;
        XD_REQUIRE(ctx, s->pole < 0, XD_ERROR_ARGUMENT, "dimensions %d and %d both have poles", s->pole, i);
        s->pole = i;
    }
    if (s->pole < 0) return XD_OK;
    const int longitude = s->desc.longitude;
    if (longitude < 0) s->desc.longitude += s->ndim;
    XD_REQUIRE(ctx, s->desc.longitude >= 0 && s->desc.longitude < s->ndim && s->desc.longitude != s->pole,
               XD_ERROR_ARGUMENT, "longitude is dimension %d of %d, and dimension %d has the poles",
               longitude, s->ndim, s->pole);
    return XD_OK;
}

static xd_result xdi_halo_check_layout(xd_ctx *ctx, const xd_layout_desc *l, int ranks) {
    for (int i = 0; i < l->topology->axis_count; i++)
        XD_REQUIRE(ctx, l->placement[i].kind != XD_PARTIAL, XD_ERROR_UNSUPPORTED,
                   "axis %d of %d is partial: reduce it first", i, l->topology->axis_count);
    for (int i = 0; i < l->topology->rank_count; i++) {
        const int rank = l->topology->ranks ? l->topology->ranks[i] : i;
        XD_REQUIRE(ctx, rank < ranks, XD_ERROR_TOPOLOGY, "the layout is on rank %d, there are %d", rank,
                   ranks);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_halo_check(xd_ctx *ctx, const xd_halo_desc *desc, int ranks, int rank,
                                    xdi_halo_scene *s) {
    memset(s, 0, sizeof *s);
    s->desc = *desc;
    s->ranks = ranks;
    s->rank = rank;
    XD_REQUIRE(ctx, desc->layout, XD_ERROR_ARGUMENT, "a halo needs the layout of the %d ranks", ranks);
    XD_REQUIRE(ctx, rank >= 0 && rank < ranks, XD_ERROR_ARGUMENT, "rank %d of %d", rank, ranks);
    const xd_layout_desc *l = xd_layout_settings(desc->layout);
    s->ndim = l->ndim;
    memcpy(s->shape, l->shape, sizeof s->shape);
    XD_REQUIRE(ctx, xd_dtype_size(desc->dtype) > 0, XD_ERROR_DTYPE, "dtype %d does not exist",
               (int)desc->dtype);
    XD_REQUIRE(ctx, (int)desc->gradient >= 0 && desc->gradient <= XD_HALO_COMPLETE, XD_ERROR_ARGUMENT,
               "gradient %d does not exist", (int)desc->gradient);
    for (int i = 0; i < s->ndim; i++) XD_TRY(xdi_halo_check_width(ctx, desc, i, s->shape[i]));
    for (int i = s->ndim; i < XD_DIMS_MAX; i++)
        XD_REQUIRE(ctx, desc->before[i] == 0 && desc->after[i] == 0 && (int)desc->boundary[i] == 0,
                   XD_ERROR_ARGUMENT, "a halo in dimension %d of a tensor that has %d", i, s->ndim);
    XD_TRY(xdi_halo_check_pole(ctx, s));
    return xdi_halo_check_layout(ctx, l, ranks);
}

/* ---- parts ---- */

/* Whether two ranks are at the same place of all axes that cut nothing, so that they exchange with each other. */
static bool xdi_halo_together(const xd_layout_desc *l, int a, int b) {
    int at[XD_MESH_AXES_MAX] = { 0 }, other[XD_MESH_AXES_MAX] = { 0 };
    if (!xdi_topology_coordinate(l->topology, a, at) || !xdi_topology_coordinate(l->topology, b, other))
        return false;
    for (int i = 0; i < l->topology->axis_count; i++)
        if (l->placement[i].kind != XD_SHARD && at[i] != other[i]) return false;
    return true;
}

/* What a rank holds becomes its part: nothing at all when a dimension is empty. */
static xd_result xdi_halo_part_of(xd_ctx *ctx, const xdi_halo_scene *s, int rank, xdi_halo_part *part) {
    xd_region region;
    int64_t numel = 1;
    part->takes_part = xd_layout_region(s->desc.layout, rank, &region);
    for (int i = 0; i < s->ndim && part->takes_part; i++) {
        XD_REQUIRE(ctx, region.count[i] <= 1, XD_ERROR_UNSUPPORTED,
                   "rank %d holds %d intervals of dimension %d: a halo goes around one", rank,
                   region.count[i], i);
        if (region.count[i] == 0) continue;
        const xd_interval own = region.interval[i][0];
        part->own[i] = part->wide[i] = part->back[i] = own;
        part->wide[i].begin -= s->desc.before[i];
        part->wide[i].end += s->desc.after[i];
        if (s->desc.gradient == XD_HALO_PARTIAL || own.begin == 0) part->back[i].begin = part->wide[i].begin;
        if (s->desc.gradient == XD_HALO_PARTIAL || own.end == s->shape[i])
            part->back[i].end = part->wide[i].end;
        const int64_t extent = xdi_halo_length(part->wide[i]);
        XD_REQUIRE(ctx, numel <= ((int64_t)1 << 62) / extent, XD_ERROR_SHAPE,
                   "the part of rank %d has more than 2^62 elements with a halo of %" PRId64 " and %" PRId64
                   " in dimension %d",
                   rank, s->desc.before[i], s->desc.after[i], i);
        numel *= extent;
    }
    for (int i = 0; i < s->ndim; i++)
        if (xdi_halo_length(part->own[i]) == 0) part->takes_part = false;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_halo_parts(xd_ctx *ctx, xdi_halo_scene *s) {
    const xd_layout_desc *l = xd_layout_settings(s->desc.layout);
    for (int r = 0; r < s->ranks; r++) {
        XD_TRY(xdi_halo_part_of(ctx, s, r, &s->part[r]));
        if (!xdi_halo_together(l, r, s->rank)) s->part[r].takes_part = false;
    }
    return XD_OK;
}
