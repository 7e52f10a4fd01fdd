/* Intervals and regions: unions, intersections, and copies from one region to another. */

#include "tensor/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

XD_PRIVATE int xdi_interval_append(xd_interval *out, int count, int64_t begin, int64_t end) {
    if (begin >= end) return count;
    if (count > 0 && out[count - 1].end == begin) {
        out[count - 1].end = end;
        return count;
    }
    out[count].begin = begin;
    out[count].end = end;
    return count + 1;
}

XD_PRIVATE int xdi_intervals_unite(const xd_interval *a, int na, const xd_interval *b, int nb,
                                   xd_interval *out) {
    int count = 0;
    for (int i = 0, k = 0; i < na || k < nb;) {
        const xd_interval next = k >= nb || (i < na && a[i].begin <= b[k].begin) ? a[i++] : b[k++];
        const int64_t reached = count ? out[count - 1].end : next.begin;
        count = xdi_interval_append(out, count, next.begin > reached ? next.begin : reached, next.end);
    }
    return count;
}

XD_PRIVATE int xdi_intervals_intersect(const xd_interval *a, int na, const xd_interval *b, int nb,
                                       xd_interval *out) {
    int count = 0;
    for (int i = 0, k = 0; i < na && k < nb;) {
        const int64_t begin = a[i].begin > b[k].begin ? a[i].begin : b[k].begin;
        const int64_t end = a[i].end < b[k].end ? a[i].end : b[k].end;
        count = xdi_interval_append(out, count, begin, end);
        if (a[i].end < b[k].end)
            i++;
        else
            k++;
    }
    return count;
}

XD_PRIVATE int xdi_intervals_subtract(const xd_interval *a, int na, const xd_interval *b, int nb,
                                      xd_interval *out) {
    int count = 0, k = 0;
    for (int i = 0; i < na; i++) {
        int64_t begin = a[i].begin;
        while (k < nb && b[k].end <= begin) k++;
        /* b[k] may reach into a[i + 1] too, so k stays on it. */
        for (int j = k; j < nb && b[j].begin < a[i].end; j++) {
            count = xdi_interval_append(out, count, begin, b[j].begin);
            if (b[j].end > begin) begin = b[j].end;
        }
        count = xdi_interval_append(out, count, begin, a[i].end);
    }
    return count;
}

XD_PRIVATE int64_t xdi_intervals_extent(const xd_interval *list, int count) {
    int64_t extent = 0;
    for (int i = 0; i < count; i++) extent += list[i].end - list[i].begin;
    return extent;
}

XD_PRIVATE bool xdi_intervals_are_valid(const xd_interval *list, int count, int64_t extent) {
    int64_t reached = 0;
    for (int i = 0; i < count; i++) {
        if (list[i].begin < reached || list[i].end <= list[i].begin) return false;
        reached = list[i].end;
    }
    return reached <= extent;
}

XD_PRIVATE int xdi_intervals_select(const xd_interval *list, int count, int64_t begin, int64_t end,
                                    xd_interval *out) {
    int selected = 0;
    int64_t position = 0;
    for (int i = 0; i < count; i++) {
        const int64_t extent = list[i].end - list[i].begin;
        const int64_t from = begin > position ? begin - position : 0;
        const int64_t to = end - position < extent ? end - position : extent;
        selected = xdi_interval_append(out, selected, list[i].begin + from, list[i].begin + to);
        position += extent;
    }
    return selected;
}

/* The number of lists that hold `index`, and the next index at which it may change. */
static int xdi_interval_holders(const xd_interval *const *lists, const int *counts, int owners, int64_t index,
                                int64_t *next) {
    int holders = 0;
    for (int owner = 0; owner < owners; owner++)
        for (int i = 0; i < counts[owner]; i++) {
            const xd_interval v = lists[owner][i];
            if (v.begin <= index && index < v.end) holders++;
            if (v.begin > index && v.begin < *next) *next = v.begin;
            if (v.end > index && v.end < *next) *next = v.end;
        }
    return holders;
}

XD_PRIVATE bool xdi_intervals_cover_once(const xd_interval *const *lists, const int *counts, int owners,
                                         int64_t extent, int64_t *first, int *holders) {
    for (int64_t index = 0, next; index < extent; index = next) {
        next = extent;
        const int found = xdi_interval_holders(lists, counts, owners, index, &next);
        if (found == 1) continue;
        *first = index;
        *holders = found;
        return false;
    }
    return true;
}

XD_API xd_interval xd_chunk(int64_t n, int parts, int part) {
    const int64_t c = n / parts + (n % parts != 0);
    xd_interval piece;
    /* Compared by division, so that part * c cannot overflow. */
    piece.begin = c == 0 || part > n / c ? n : part * c;
    piece.end = n - piece.begin < c ? n : piece.begin + c;
    return piece;
}

XD_PRIVATE const char *xdi_shape_print(int ndim, const int64_t *shape, char *text) {
    size_t used = 1;
    text[0] = '[';
    for (int d = 0; d < ndim && d < XD_DIMS_MAX; d++)
        used += (size_t)snprintf(text + used, XDI_SHAPE_TEXT - used, "%s%lld", d ? ", " : "",
                                 (long long)shape[d]);
    text[used] = ']';
    text[used + 1] = '\0';
    return text;
}

XD_PRIVATE xd_result xdi_shape_check_rest(xd_ctx *ctx, const char *name, int ndim, const int64_t *shape) {
    for (int d = XD_DIMS_MAX - 1; d >= ndim; d--)
        XD_REQUIRE(ctx, shape[d] == 0, XD_ERROR_ARGUMENT, "%s%sshape[%d] is %lld and ndim %d", name,
                   name[0] ? ": " : "", d, (long long)shape[d], ndim);
    return XD_OK;
}

XD_PRIVATE xd_region xdi_region_whole(int ndim, const int64_t *shape) {
    xd_region region;
    memset(&region, 0, sizeof region);
    region.ndim = ndim;
    for (int d = 0; d < ndim; d++) region.count[d] = xdi_interval_append(region.interval[d], 0, 0, shape[d]);
    return region;
}

XD_PRIVATE void xdi_region_shape(const xd_region *region, int64_t *shape) {
    for (int d = 0; d < region->ndim; d++)
        shape[d] = xdi_intervals_extent(region->interval[d], region->count[d]);
}

XD_PRIVATE int64_t xdi_region_numel(const xd_region *region) {
    int64_t numel = 1;
    for (int d = 0; d < region->ndim; d++)
        numel *= xdi_intervals_extent(region->interval[d], region->count[d]);
    return numel;
}

XD_PRIVATE bool xdi_region_intersect(const xd_region *a, const xd_region *b, xd_region *out) {
    bool common = true;
    out->ndim = a->ndim;
    for (int d = 0; d < a->ndim; d++) {
        out->count[d] = xdi_intervals_intersect(a->interval[d], a->count[d], b->interval[d], b->count[d],
                                                out->interval[d]);
        common = common && out->count[d] > 0;
    }
    return common;
}

XD_PRIVATE bool xdi_region_equal(const xd_region *a, const xd_region *b) {
    if (a->ndim != b->ndim) return false;
    for (int d = 0; d < a->ndim; d++) {
        xd_interval rest[2 * XD_REGION_INTERVALS_MAX];
        const int only_a =
            xdi_intervals_subtract(a->interval[d], a->count[d], b->interval[d], b->count[d], rest);
        const int only_b =
            xdi_intervals_subtract(b->interval[d], b->count[d], a->interval[d], a->count[d], rest);
        if (only_a || only_b) return false;
    }
    return true;
}

/* A run of one dimension that is contiguous in both storages. */
typedef struct xdi_interval_run {
    int64_t src, dst, extent;
} xdi_interval_run;

/* Position of an index inside a list that holds it. */
static int64_t xdi_interval_position(const xd_interval *list, int64_t index) {
    int64_t position = 0;
    for (; list->end <= index; list++) position += list->end - list->begin;
    return position + index - list->begin;
}

/* Goes over both lists together. Touching intervals of one side, and gaps that both sides skip, do not end a
 * run. */
static int xdi_interval_runs(const xd_region *a, const xd_region *b, int d, xdi_interval_run *runs) {
    xd_interval common[2 * XD_REGION_INTERVALS_MAX];
    const int n = xdi_intervals_intersect(a->interval[d], a->count[d], b->interval[d], b->count[d], common);
    int count = 0;
    for (int i = 0; i < n; i++) {
        const int64_t src = xdi_interval_position(a->interval[d], common[i].begin);
        const int64_t dst = xdi_interval_position(b->interval[d], common[i].begin);
        const int64_t extent = common[i].end - common[i].begin;
        xdi_interval_run *last = count ? &runs[count - 1] : NULL;
        if (last && last->src + last->extent == src && last->dst + last->extent == dst) {
            last->extent += extent;
            continue;
        }
        runs[count].src = src;
        runs[count].dst = dst;
        runs[count++].extent = extent;
    }
    return count;
}

XD_PRIVATE void xdi_interval_fold(xd_copy *copy) {
    int n = 0;
    for (int d = 0; d < copy->ndim; d++) {
        const int64_t extent = copy->extent[d], src = copy->src_stride[d], dst = copy->dst_stride[d];
        if (extent == 1) continue;
        const bool runs_on =
            n && copy->src_stride[n - 1] == src * extent && copy->dst_stride[n - 1] == dst * extent;
        if (!runs_on) n++;
        copy->extent[n - 1] = runs_on ? copy->extent[n - 1] * extent : extent;
        copy->src_stride[n - 1] = src;
        copy->dst_stride[n - 1] = dst;
    }
    if (n == 0) copy->extent[0] = copy->src_stride[0] = copy->dst_stride[0] = 1;
    copy->ndim = n ? n : 1;
}

static void xdi_interval_dense(const xd_region *region, const int64_t *given, int64_t *stride) {
    int64_t shape[XD_DIMS_MAX], next = 1;
    xdi_region_shape(region, shape);
    for (int d = region->ndim - 1; d >= 0; d--) {
        stride[d] = given ? given[d] : next;
        next *= shape[d];
    }
}

/* The outermost dimension along which whole rows begin at `begin` and fit before `end`; the last one's rows are single
 * positions. */
static int xdi_interval_rows(const int64_t *stride, int ndim, int64_t begin, int64_t end) {
    int d = 0;
    while (d < ndim - 1 && (begin % stride[d] || stride[d] > end - begin)) d++;
    return d;
}

XD_PRIVATE xd_result xdi_region_flat_range(xd_ctx *ctx, const xd_region *region, xd_interval range,
                                           xd_region *out, int *count) {
    const int64_t numel = xdi_region_numel(region);
    int64_t shape[XD_DIMS_MAX] = { 1 }, stride[XD_DIMS_MAX] = { 1 };
    int found = 0;
    XD_REQUIRE(ctx, range.begin >= 0 && range.begin <= range.end && range.end <= numel, XD_ERROR_ARGUMENT,
               "positions [%" PRId64 ", %" PRId64 ") of a region of %" PRId64 " elements", range.begin,
               range.end, numel);
    xdi_region_shape(region, shape);
    xdi_interval_dense(region, NULL, stride);
    /* The rows grow up to the first dimension in which the ends of the range differ, and shrink after it. */
    for (int64_t at = range.begin, taken; at < range.end; at += taken) {
        const int rows = xdi_interval_rows(stride, region->ndim, at, range.end);
        const int64_t after = shape[rows] - at / stride[rows] % shape[rows];
        const int64_t fit = (range.end - at) / stride[rows], extent = fit < after ? fit : after;
        xd_region *piece = &out[found++];
        taken = extent * stride[rows];
        *piece = *region;
        for (int d = 0; d <= rows && d < region->ndim; d++) {
            const int64_t begin = at / stride[d] % shape[d], end = begin + (d == rows ? extent : 1);
            piece->count[d] =
                xdi_intervals_select(region->interval[d], region->count[d], begin, end, piece->interval[d]);
        }
    }
    *count = found;
    return XD_OK;
}

XD_PRIVATE int64_t xdi_region_copies(const xd_region *src, const int64_t *src_stride, const xd_region *dst,
                                     const int64_t *dst_stride, xd_copy *copies, int64_t capacity) {
    xdi_interval_run runs[XD_DIMS_MAX][2 * XD_REGION_INTERVALS_MAX];
    int64_t from[XD_DIMS_MAX], to[XD_DIMS_MAX], total = 1;
    int count[XD_DIMS_MAX], at[XD_DIMS_MAX] = { 0 };
    for (int d = 0; d < src->ndim; d++) {
        count[d] = xdi_interval_runs(src, dst, d, runs[d]);
        total *= count[d];
    }
    xdi_interval_dense(src, src_stride, from);
    xdi_interval_dense(dst, dst_stride, to);
    for (int64_t i = 0; i < total && i < capacity; i++) {
        xd_copy *copy = &copies[i];
        memset(copy, 0, sizeof *copy);
        copy->ndim = src->ndim;
        for (int d = 0; d < src->ndim; d++) {
            const xdi_interval_run run = runs[d][at[d]];
            copy->src_offset += run.src * from[d];
            copy->dst_offset += run.dst * to[d];
            copy->extent[d] = run.extent;
            copy->src_stride[d] = from[d];
            copy->dst_stride[d] = to[d];
        }
        xdi_interval_fold(copy);
        for (int d = src->ndim - 1; d >= 0 && ++at[d] == count[d]; d--) at[d] = 0;
    }
    return total;
}
