/* First values of a part of a tensor. */

#include "kernel/kernels.h"
#include "tensor/internal.h"

#include <math.h>
#include <string.h>

enum { XDI_FILL_ROOM = 4096 /* elements that the host forms at a time for a device without the entry */ };

/* ---- a device that cannot form them: the host does, and copies ---- */

/* `n` elements from element `at` of a box on, which follow each other on both sides. */
static xd_result xdi_fill_copy(const xd_launch *launch, const xd_fill_args *args, const xd_copy *box,
                               int64_t at, int64_t n, void *room) {
    const xd_kernels *kernels = xd_ctx_kernels(launch->ctx);
    const size_t size = xd_dtype_size(args->dtype);
    int64_t place;
    xd_copy run;
    xd_fill_args part = *args;
    memset(&run, 0, sizeof run);
    run.ndim = 1;
    run.extent[0] = n;
    run.src_stride[0] = run.dst_stride[0] = 1;
    xd_fill_places(box, at, &run.src_offset, &place);
    part.boxes = &run;
    part.box_count = 1;
    part.out = room;
    XD_TRY(xd_ctx_host_kernels(launch->ctx)->fill(launch, &part));
    XD_TRY(kernels->memory.copy(launch, (unsigned char *)args->out + (size_t)place * size, room,
                                (size_t)n * size, XD_COPY_TO_DEVICE));
    return kernels->memory.synchronize(launch); /* the room is used again */
}

static xd_result xdi_fill_from_host(const xd_launch *launch, const xd_fill_args *args) {
    void *room = xd_allocate(launch->ctx, XDI_FILL_ROOM * xd_dtype_size(args->dtype));
    xd_result result = XD_OK;
    XD_REQUIRE(launch->ctx, room, XD_ERROR_MEMORY, "no room for %d values", (int)XDI_FILL_ROOM);
    for (int64_t k = 0; k < args->box_count; k++) {
        const xd_copy *box = &args->boxes[k];
        const int last = box->ndim - 1;
        const int64_t row = box->src_stride[last] == 1 && box->dst_stride[last] == 1 ? box->extent[last] : 1;
        int64_t count = 1;
        for (int d = 0; d <= last; d++) count *= box->extent[d];
        for (int64_t at = 0, n; at < count && result == XD_OK; at += n) {
            n = row - at % row;
            if (n > XDI_FILL_ROOM) n = XDI_FILL_ROOM;
            result = xdi_fill_copy(launch, args, box, at, n, room);
        }
    }
    xd_release(launch->ctx, room);
    return result;
}

/* ---- regions as boxes ---- */

typedef struct xdi_fill_plan {
    xd_region whole, parts[XDI_REGION_FLAT_MAX]; /* of the range, one after the other in its storage */
    int part_count;
} xdi_fill_plan;

/* The boxes of all parts, placed behind each other; `boxes` NULL counts them. */
static int64_t xdi_fill_list(const xdi_fill_plan *plan, xd_copy *boxes, int64_t capacity) {
    int64_t count = 0, before = 0;
    for (int i = 0; i < plan->part_count; i++) {
        const int64_t n = xdi_region_copies(&plan->whole, NULL, &plan->parts[i], NULL,
                                            boxes ? boxes + count : NULL, boxes ? capacity - count : 0);
        for (int64_t k = 0; boxes && k < n; k++) boxes[count + k].dst_offset += before;
        count += n;
        before += xdi_region_numel(&plan->parts[i]);
    }
    return count;
}

static xd_result xdi_fill_boxes(xd_ctx *ctx, const xdi_fill_plan *plan, xd_fill_args *args) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    args->box_count = xdi_fill_list(plan, NULL, 0);
    xd_copy *boxes = (xd_copy *)xd_allocate(ctx, (size_t)args->box_count * sizeof *boxes);
    XD_REQUIRE(ctx, boxes, XD_ERROR_MEMORY, "no room for a list of %lld boxes", (long long)args->box_count);
    xdi_fill_list(plan, boxes, args->box_count);
    args->boxes = boxes;
    const xd_result result = kernels->fill ? kernels->fill(&launch, args) : xdi_fill_from_host(&launch, args);
    xd_release(ctx, boxes);
    return result;
}

XD_PRIVATE xd_result xdi_part_fill(xd_ctx *ctx, const xd_tensor_part *part, const xd_init *init,
                                   const xd_philox *random, int64_t limit) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const size_t bytes = (size_t)(part->range.end - part->range.begin) * xd_dtype_size(part->dtype);
    xd_fill_args args;
    if (bytes == 0) return XD_OK;
    if (init->kind == XD_INIT_ZERO) return xd_ctx_kernels(ctx)->memory.fill(&launch, part->data, 0, bytes);
    xdi_fill_plan *plan = (xdi_fill_plan *)xd_allocate(ctx, sizeof *plan);
    XD_REQUIRE(ctx, plan, XD_ERROR_MEMORY, "no room for the regions of tensor \"%.80s\"", part->name);
    memset(&args, 0, sizeof args);
    args.init = *init;
    if (random) args.random = *random;
    args.limit = limit;
    args.out = part->data;
    args.dtype = part->dtype;
    plan->whole = xdi_region_whole(part->ndim, part->shape);
    xd_result result = xdi_region_flat_range(ctx, part->region ? part->region : &plan->whole, part->range,
                                             plan->parts, &plan->part_count);
    if (result == XD_OK) result = xdi_fill_boxes(ctx, plan, &args);
    xd_release(ctx, plan);
    return result;
}

/* ---- checks ---- */

/* Elements of the whole tensor, whose product fits. */
static xd_result xdi_part_check_shape(xd_ctx *ctx, const xd_tensor_part *p, int64_t *numel) {
    size_t product = 1;
    XD_REQUIRE(ctx, p->ndim >= 0 && p->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\" has %d dimensions, allowed are %d", p->name, p->ndim, (int)XD_DIMS_MAX);
    XD_REQUIRE(ctx, xd_dtype_size(p->dtype) > 0, XD_ERROR_DTYPE, "tensor \"%.80s\" has no dtype", p->name);
    for (int d = 0; d < p->ndim; d++)
        XD_REQUIRE(ctx,
                   p->shape[d] >= 0 && xdi_size_multiply(product, (size_t)p->shape[d], &product) &&
                       product <= (size_t)INT64_MAX / 8,
                   XD_ERROR_SHAPE, "tensor \"%.80s\": the size %lld of dimension %d is negative or too large",
                   p->name, (long long)p->shape[d], d);
    *numel = (int64_t)product;
    return XD_OK;
}

XD_PRIVATE bool xdi_part_fits(const xd_tensor_part *p, int64_t count) {
    const int64_t here = p->range.end - p->range.begin;
    int64_t numel = 1;
    if (count == here) return true;
    for (int d = 0; d < p->ndim; d++)
        numel *= p->region ? xdi_intervals_extent(p->region->interval[d], p->region->count[d]) : p->shape[d];
    return p->ndim > 0 && count > here && p->range.end == numel;
}

XD_PRIVATE xd_result xdi_part_check_region(xd_ctx *ctx, const xd_tensor_part *p) {
    XD_TRY(xdi_shape_check_rest(ctx, p->name, p->ndim, p->shape));
    int64_t numel = 1;
    XD_REQUIRE(ctx, !p->region || p->region->ndim == p->ndim, XD_ERROR_SHAPE,
               "tensor \"%.80s\" has %d dimensions, its region %d", p->name, p->ndim,
               p->region ? p->region->ndim : 0);
    for (int d = 0; d < p->ndim; d++) {
        const xd_region *r = p->region;
        XD_REQUIRE(ctx,
                   !r || (r->count[d] >= 0 && r->count[d] <= XD_REGION_INTERVALS_MAX &&
                          xdi_intervals_are_valid(r->interval[d], r->count[d], p->shape[d])),
                   XD_ERROR_SHAPE, "tensor \"%.80s\": the region is not within the size %lld of dimension %d",
                   p->name, (long long)p->shape[d], d);
        numel *= r ? xdi_intervals_extent(r->interval[d], r->count[d]) : p->shape[d];
    }
    XD_REQUIRE(ctx, p->range.begin >= 0 && p->range.begin <= p->range.end && p->range.end <= numel,
               XD_ERROR_SHAPE, "tensor \"%.80s\": positions [%lld, %lld) of a region of %lld elements",
               p->name, (long long)p->range.begin, (long long)p->range.end, (long long)numel);
    XD_REQUIRE(ctx, p->data || p->range.begin == p->range.end, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\": %lld elements at NULL", p->name,
               (long long)(p->range.end - p->range.begin));
    return XD_OK;
}

static bool xdi_fill_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F64 || dtype == XD_DTYPE_BF16 ||
           dtype == XD_DTYPE_F16 || dtype == XD_DTYPE_I32 || dtype == XD_DTYPE_I64 || dtype == XD_DTYPE_U8 ||
           dtype == XD_DTYPE_BOOL;
}

XD_PRIVATE xd_result xdi_init_check(xd_ctx *ctx, const char *name, xd_dtype dtype, const xd_init *init) {
    XD_REQUIRE(ctx, (int)init->kind >= 0 && init->kind <= XD_INIT_UNIFORM, XD_ERROR_ARGUMENT,
               "weight \"%.80s\": init %d is unknown", name, (int)init->kind);
    XD_REQUIRE(ctx, isfinite(init->center) && isfinite(init->scale), XD_ERROR_ARGUMENT,
               "weight \"%.80s\": init center %g or scale %g is not finite", name, (double)init->center,
               (double)init->scale);
    XD_REQUIRE(ctx, init->kind == XD_INIT_ZERO || xdi_fill_takes(dtype), XD_ERROR_DTYPE,
               "weight \"%.80s\": %s has no arithmetic, its init can only be zero", name,
               xd_dtype_name(dtype));
    return XD_OK;
}

XD_API xd_result xd_tensor_part_fill(xd_ctx *ctx, const xd_tensor_part *part, const xd_init *init,
                                     const xd_philox *random) {
    XDI_GIVEN(ctx, ctx, part, init);
    xd_tensor_part named = *part;
    int64_t numel = 0;
    if (!named.name) named.name = "";
    XD_TRY(xdi_part_check_shape(ctx, &named, &numel));
    XD_TRY(xdi_part_check_region(ctx, &named));
    XD_TRY(xdi_init_check(ctx, named.name, named.dtype, init));
    XD_REQUIRE(ctx, !xd_init_is_random(init) || numel <= INT64_C(1) << 42, XD_ERROR_SHAPE,
               "tensor \"%.80s\" has %lld elements, random numbers are for %lld", named.name,
               (long long)numel, (long long)(INT64_C(1) << 42));
    return xdi_part_fill(ctx, &named, init, random, numel);
}
