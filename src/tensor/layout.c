/* Layouts: which rank holds which intervals of a tensor. */

#include "tensor/internal.h"
#include "tensor/layout.h"

#include <string.h>

struct xd_layout {
    xd_ctx *ctx;
    xd_layout_desc desc; /* its pointers point to the members below */
    xd_topology topology;
    int *ranks;
    int64_t *numbers[XD_MESH_AXES_MAX]; /* offsets or section sizes of each axis */
};

/* A topology that the caller may have written. */
static xd_result xdi_layout_check_topology(xd_ctx *ctx, const xd_topology *t) {
    int64_t ranks = 1;
    XD_REQUIRE(ctx, t && t->axis_count > 0, XD_ERROR_ARGUMENT, "a layout needs a topology with axes");
    XD_REQUIRE(ctx, t->axis_count <= XD_MESH_AXES_MAX, XD_ERROR_ARGUMENT,
               "a topology of %d axes, 1 to %d are possible", t->axis_count, XD_MESH_AXES_MAX);
    for (int i = 0; i < t->axis_count && ranks <= INT32_MAX; i++) {
        XD_REQUIRE(ctx, t->size[i] >= 1, XD_ERROR_ARGUMENT,
                   "axis %d of the topology has size %d, must be at least 1", i, t->size[i]);
        ranks *= t->size[i];
    }
    XD_REQUIRE(ctx, ranks == t->rank_count, XD_ERROR_TOPOLOGY,
               "axis sizes of the topology multiply to %lld but rank_count is %d", (long long)ranks,
               t->rank_count);
    return XD_OK;
}

static xd_result xdi_layout_check_shape(xd_ctx *ctx, const xd_layout_desc *d) {
    int64_t room = (int64_t)1 << 62;
    bool empty = false;
    XD_REQUIRE(ctx, d->ndim >= 0 && d->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
               "%d dimensions, 0 to %d are possible", d->ndim, XD_DIMS_MAX);
    XD_TRY(xdi_shape_check_rest(ctx, "", d->ndim, d->shape));
    XD_TRY(xdi_layout_check_topology(ctx, d->topology));
    for (int i = 0; i < d->ndim; i++) {
        XD_REQUIRE(ctx, d->shape[i] >= 0, XD_ERROR_SHAPE, "dimension %d has extent %lld", i,
                   (long long)d->shape[i]);
        empty = empty || d->shape[i] == 0;
    }
    for (int i = 0; i < d->ndim && !empty; i++) {
        room /= d->shape[i];
        XD_REQUIRE(ctx, room > 0, XD_ERROR_SHAPE,
                   "the shape has more than 2^62 elements (at dimension %d, extent %lld)", i,
                   (long long)d->shape[i]);
    }
    return XD_OK;
}

static xd_result xdi_layout_check_split(xd_ctx *ctx, const xd_layout_desc *d, int axis) {
    const xd_placement *p = &d->placement[axis];
    const int forms = (p->offsets != NULL) + (p->sections > 1) + p->balanced;
    XD_REQUIRE(ctx, p->dim >= -d->ndim && p->dim < d->ndim, XD_ERROR_ARGUMENT,
               "axis %d splits dimension %d of a tensor of %d dimensions", axis, p->dim, d->ndim);
    XD_REQUIRE(ctx, forms <= 1, XD_ERROR_ARGUMENT,
               "axis %d: choose one of offsets, sections and balanced, not %d", axis, forms);
    XD_REQUIRE(ctx, p->sections >= 0 && p->sections <= XD_LAYOUT_INTERVALS_MAX, XD_ERROR_ARGUMENT,
               "axis %d has %d sections, at most %d are possible", axis, p->sections,
               XD_LAYOUT_INTERVALS_MAX);
    for (int i = 0; p->offsets && i < d->topology->size[axis]; i++)
        XD_REQUIRE(ctx, p->offsets[0] == 0 && p->offsets[i] <= p->offsets[i + 1], XD_ERROR_ARGUMENT,
                   "axis %d: offsets[%d] is %lld and offsets[%d] is %lld: they must ascend from 0", axis, i,
                   (long long)p->offsets[i], i + 1, (long long)p->offsets[i + 1]);
    for (int i = 0; p->section_sizes && i < p->sections; i++)
        XD_REQUIRE(ctx, p->section_sizes[i] >= 0, XD_ERROR_ARGUMENT, "axis %d: section %d has size %lld",
                   axis, i, (long long)p->section_sizes[i]);
    return XD_OK;
}

static xd_result xdi_layout_check(xd_ctx *ctx, const xd_layout_desc *d) {
    int first_partial = -1;
    unsigned seen = 0;
    for (int i = 0; i < d->topology->axis_count; i++) {
        const xd_placement *p = &d->placement[i];
        XD_REQUIRE(ctx,
                   d->order[i] >= 0 && d->order[i] < d->topology->axis_count && !(seen >> d->order[i] & 1u),
                   XD_ERROR_ARGUMENT, "order[%d] is %d: the order must name each of the %d axes once", i,
                   d->order[i], d->topology->axis_count);
        seen |= 1u << d->order[i];
        XD_REQUIRE(ctx, p->kind == XD_REPLICATE || p->kind == XD_SHARD || p->kind == XD_PARTIAL,
                   XD_ERROR_ARGUMENT, "axis %d has no such placement as %d", i, (int)p->kind);
        if (p->kind == XD_SHARD) XD_TRY(xdi_layout_check_split(ctx, d, i));
        if (p->kind != XD_PARTIAL) continue;
        if (first_partial < 0) first_partial = i;
        XD_REQUIRE(ctx, p->op == d->placement[first_partial].op, XD_ERROR_UNSUPPORTED,
                   "axes %d and %d are partial by different operations, %d and %d", first_partial, i,
                   (int)d->placement[first_partial].op, (int)p->op);
    }
    return XD_OK;
}

/* One split of a dimension, for one coordinate of the axis. `extent`: indices of the dimension that earlier splits have
 * given to the rank; the result is in positions among them. Returns the number of intervals; -1 when the offsets or
 * sections of the placement do not fit the extent. */
static int xdi_layout_pieces(const xd_placement *p, int size, int coordinate, int64_t extent,
                             xd_interval *pieces) {
    if (p->offsets) {
        pieces[0].begin = p->offsets[coordinate];
        pieces[0].end = p->offsets[coordinate + 1];
        return p->offsets[size] == extent ? 1 : -1;
    }
    if (p->balanced) {
        const int64_t c = extent / (2 * (int64_t)size);
        pieces[0].begin = coordinate * c;
        pieces[0].end = pieces[0].begin + c;
        pieces[1].begin = (2 * (int64_t)size - 1 - coordinate) * c;
        pieces[1].end = pieces[1].begin + c;
        return extent % (2 * (int64_t)size) == 0 ? 2 : -1;
    }
    const int sections = p->sections ? p->sections : 1;
    int64_t begin = 0;
    for (int i = 0; i < sections; i++) {
        const int64_t n = p->section_sizes ? p->section_sizes[i] : extent / sections;
        pieces[i] = xd_chunk(n, size, coordinate);
        pieces[i].begin += begin;
        pieces[i].end += begin;
        begin += n;
    }
    return begin == extent ? sections : -1;
}

/* Applies the splits in order. Returns -1, or the axis whose split does not fit, with the extent it was
 * given; an axis that would give too many intervals is returned with extent -1. */
static int xdi_layout_split(const xd_layout_desc *d, const int *coordinate, xd_region *region,
                            int64_t *extent) {
    region->ndim = d->ndim; /* a region is some KiB: only the used part is filled in */
    memset(region->count, 0, sizeof region->count);
    for (int k = 0; k < d->ndim; k++)
        region->count[k] = xdi_interval_append(region->interval[k], 0, 0, d->shape[k]);
    for (int i = 0; i < d->topology->axis_count; i++) {
        const int axis = d->order[i];
        const xd_placement *p = &d->placement[axis];
        if (p->kind != XD_SHARD) continue;
        xd_interval pieces[XD_LAYOUT_INTERVALS_MAX], all[XD_REGION_INTERVALS_MAX],
            old[XD_REGION_INTERVALS_MAX];
        const int old_count = region->count[p->dim];
        int count = 0;
        memcpy(old, region->interval[p->dim], (size_t)old_count * sizeof *old);
        *extent = xdi_intervals_extent(old, old_count);
        const int n = xdi_layout_pieces(p, d->topology->size[axis], coordinate[axis], *extent, pieces);
        if (n < 0) return axis;
        for (int k = 0; k < n; k++) {
            xd_interval part[XD_REGION_INTERVALS_MAX];
            const int found = xdi_intervals_select(old, old_count, pieces[k].begin, pieces[k].end, part);
            for (int j = 0; j < found && count >= 0; j++) {
                count = xdi_interval_append(all, count, part[j].begin, part[j].end);
                if (count > XD_LAYOUT_INTERVALS_MAX) count = -1;
            }
            if (count < 0) break;
        }
        if (count < 0) *extent = -1;
        if (count < 0) return axis;
        memcpy(region->interval[p->dim], all, (size_t)count * sizeof *all);
        region->count[p->dim] = count;
    }
    return -1;
}

/* A split must fit at every coordinate, because the extents that earlier splits leave differ between
 * coordinates. */
static xd_result xdi_layout_check_regions(xd_ctx *ctx, const xd_layout_desc *d) {
    for (int r = 0; r < d->topology->rank_count; r++) {
        const int rank = d->topology->ranks ? d->topology->ranks[r] : r;
        int coordinate[XD_MESH_AXES_MAX];
        xd_region region;
        int64_t extent = 0;
        xdi_topology_coordinate(d->topology, rank, coordinate);
        const int axis = xdi_layout_split(d, coordinate, &region, &extent);
        if (axis < 0) continue;
        XD_REQUIRE(ctx, extent >= 0, XD_ERROR_UNSUPPORTED,
                   "axis %d cuts dimension %d into more than %d intervals on rank %d", axis,
                   d->placement[axis].dim, XD_LAYOUT_INTERVALS_MAX, rank);
        const xd_placement *p = &d->placement[axis];
        const long long given =
            p->offsets ? (long long)p->offsets[d->topology->size[axis]] : (long long)p->sections;
        return XD_FAIL(ctx, XD_ERROR_SHAPE,
                       "axis %d splits %lld indices of dimension %d on rank %d, but its %s %lld", axis,
                       (long long)extent, p->dim, rank,
                       p->offsets    ? "offsets end at"
                       : p->balanced ? "balanced pieces need a multiple of 2 x"
                                     : "sections do not add up to that; there are",
                       p->balanced ? (long long)d->topology->size[axis] : given);
    }
    return XD_OK;
}

static void xdi_layout_defaults(xd_layout_desc *d) {
    bool given = false;
    for (int i = 0; i < XD_MESH_AXES_MAX; i++) given = given || d->order[i] != 0;
    for (int i = 0; i < XD_MESH_AXES_MAX && !given; i++) d->order[i] = i;
}

/* Replaces the pointers of the desc by copies of what they point to. False without memory. */
static bool xdi_layout_own(xd_layout *layout) {
    xd_layout_desc *d = &layout->desc;
    layout->topology = *d->topology;
    layout->ranks = (int *)xd_allocate(layout->ctx, (size_t)d->topology->rank_count * sizeof *layout->ranks);
    if (!layout->ranks) return false;
    for (int i = 0; i < d->topology->rank_count; i++)
        layout->ranks[i] = d->topology->ranks ? d->topology->ranks[i] : i;
    layout->topology.ranks = d->topology->ranks ? layout->ranks : NULL;
    for (int i = 0; i < d->topology->axis_count; i++) {
        xd_placement *p = &d->placement[i];
        const int64_t *from = p->offsets ? p->offsets : p->section_sizes;
        const int count = p->offsets ? d->topology->size[i] + 1 : p->sections;
        if (p->kind != XD_SHARD || !from) continue;
        layout->numbers[i] = (int64_t *)xd_allocate(layout->ctx, (size_t)count * sizeof *from);
        if (!layout->numbers[i]) return false;
        memcpy(layout->numbers[i], from, (size_t)count * sizeof *from);
        if (p->offsets)
            p->offsets = layout->numbers[i];
        else
            p->section_sizes = layout->numbers[i];
    }
    d->topology = &layout->topology;
    return true;
}

XD_API xd_result xd_layout_create(xd_ctx *ctx, const xd_layout_desc *desc, xd_layout **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xd_layout_desc d = *desc;
    xdi_layout_defaults(&d);
    XD_TRY(xdi_layout_check_shape(ctx, &d));
    XD_TRY(xdi_layout_check(ctx, &d));
    for (int i = 0; i < d.topology->axis_count; i++)
        if (d.placement[i].kind == XD_SHARD && d.placement[i].dim < 0) d.placement[i].dim += d.ndim;
    XD_TRY(xdi_layout_check_regions(ctx, &d));
    xd_layout *layout = XDI_OBJECT(xd_layout, ctx, sizeof *layout);
    if (layout) {
        layout->ctx = ctx;
        layout->desc = d;
    }
    const bool fits = layout && xdi_layout_own(layout);
    if (!fits) xd_layout_destroy(layout);
    XD_REQUIRE(ctx, fits, XD_ERROR_MEMORY, "no room for a layout over %d ranks", d.topology->rank_count);
    *out = layout;
    return XD_OK;
}

XD_API void xd_layout_destroy(xd_layout *layout) {
    if (!layout || XDI_IS_GONE(xd_layout, layout)) return;
    for (int i = 0; i < XD_MESH_AXES_MAX; i++) xd_release(layout->ctx, layout->numbers[i]);
    xd_release(layout->ctx, layout->ranks);
    xd_release(layout->ctx, layout);
}

XD_API const xd_layout_desc *xd_layout_settings(const xd_layout *layout) {
    XD_ASSERT(layout);
    return &layout->desc;
}

XD_API bool xd_layout_region(const xd_layout *layout, int rank, xd_region *out) {
    XD_ASSERT(layout);
    int coordinate[XD_MESH_AXES_MAX];
    int64_t extent;
    if (!xdi_topology_coordinate(&layout->topology, rank, coordinate)) {
        memset(out, 0, sizeof *out);
        out->ndim = layout->desc.ndim;
        return false;
    }
    xdi_layout_split(&layout->desc, coordinate, out, &extent); /* fits: checked for every rank at creation */
    return true;
}

XD_PRIVATE int64_t xdi_layout_numel(const xd_layout *layout) {
    XD_ASSERT(layout);
    int64_t numel = 1;
    for (int i = 0; i < layout->desc.ndim; i++) numel *= layout->desc.shape[i];
    return numel;
}

static void xdi_layout_same_shape(const xd_layout *layout, const xd_topology *topology, xd_layout_desc *d) {
    memset(d, 0, sizeof *d);
    d->ndim = layout->desc.ndim;
    memcpy(d->shape, layout->desc.shape, sizeof d->shape);
    d->topology = topology;
}

XD_PRIVATE xd_result xdi_layout_replicated(xd_ctx *ctx, const xd_layout *layout, xd_layout **out) {
    XDI_GIVEN(ctx, ctx, layout, out);
    xd_layout_desc d;
    xdi_layout_same_shape(layout, &layout->topology, &d);
    return xd_layout_create(ctx, &d, out);
}

XD_PRIVATE xd_result xdi_layout_on_rank(xd_ctx *ctx, const xd_layout *layout, int rank, xd_layout **out) {
    XDI_GIVEN(ctx, ctx, layout, out);
    xd_topology alone;
    xd_layout_desc d;
    XD_REQUIRE(ctx, rank >= 0, XD_ERROR_ARGUMENT, "rank %d is negative", rank);
    memset(&alone, 0, sizeof alone);
    alone.axis_count = 1;
    alone.size[0] = 1;
    alone.rank_count = 1;
    alone.ranks = &rank;
    xdi_layout_same_shape(layout, &alone, &d);
    return xd_layout_create(ctx, &d, out);
}

XD_PRIVATE uint64_t xdi_layout_hash(const xd_layout *layout) {
    XD_ASSERT(layout);
    const xd_layout_desc *d = &layout->desc;
    uint64_t hash = xdi_topology_hash(&layout->topology);
    hash = xd_hash(hash, d->shape, (size_t)d->ndim * sizeof d->shape[0]);
    for (int i = 0; i < layout->topology.axis_count; i++) {
        const xd_placement *p = &d->placement[i];
        const bool shard = p->kind == XD_SHARD;
        const int count = !shard             ? 0
                          : p->offsets       ? layout->topology.size[i] + 1
                          : p->section_sizes ? p->sections
                                             : 0;
        const int facts[7] = { d->ndim,
                               (int)p->kind,
                               shard ? p->dim : 0,
                               p->kind == XD_PARTIAL ? (int)p->op : 0,
                               shard ? p->sections : 0,
                               shard && p->balanced,
                               d->order[i] };
        hash = xd_hash(hash, facts, sizeof facts);
        if (count) hash = xd_hash(hash, layout->numbers[i], (size_t)count * sizeof *layout->numbers[i]);
    }
    return hash;
}

XD_PRIVATE void xdi_facts_layout(xdi_facts *facts, const xd_layout *layout) {
    const xd_layout_desc *d = &layout->desc;
    xdi_facts_topology(facts, &layout->topology);
    xdi_fact_integer(facts, "ndim", d->ndim);
    for (int i = 0; i < d->ndim; i++) {
        xdi_facts_item(facts, "shape", i);
        xdi_fact_integer(facts, "", d->shape[i]);
    }
    for (int i = 0; i < layout->topology.axis_count; i++) {
        xdi_facts_item(facts, "placement", i);
        xdi_fact_integer(facts, "kind", (int64_t)d->placement[i].kind);
        xdi_fact_integer(facts, "dim", d->placement[i].kind == XD_SHARD ? d->placement[i].dim : 0);
    }
    xdi_facts_item(facts, NULL, 0);
    xdi_fact_hash(facts, "op, offsets, sections, balanced, or order", xdi_layout_hash(layout));
}
