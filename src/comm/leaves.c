/* The stack of a rank's leaves: the canonical tree over gradients, built as they arrive. */

#include "base/internal.h"
#include "comm/internal.h"
#include "comm/leaves.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

#include <inttypes.h>
#include <string.h>

struct xd_leaf_stack {
    xd_ctx *ctx;
    xd_leaves leaves;
    int64_t elements;
    int64_t pushed; /* leaves so far */
    int64_t depth;  /* nodes on the stack */
    float *nodes;   /* [deepest, elements] */
    size_t bytes;
    const xd_kernels *kernels; /* of the memory that the nodes are in */
    bool owned;                /* the nodes were allocated, from the kernels' memory */
    bool open;                 /* xd_leaf_stack_next has given the place of the next leaf */
    bool clears;               /* leaves begin as zeros: nodes that were added become zeros */
    uint64_t zeroed;           /* bit i: node i is zeros; of the first 64 */
};

/* Maximum number of nodes on the stack while the leaves are pushed: at each push, the forest of the earlier leaves
 * and the new leaf. At most 2 log2(count) + 1; computed, not estimated, unless there are more leaves than a step can have. */
static int64_t xdi_leaf_stack_deepest(const xd_leaves *leaves) {
    int64_t deepest = 1;
    if (leaves->count > (INT64_C(1) << 20)) {
        for (int64_t n = leaves->count; n > 1; n -= n / 2) deepest += 2;
        return deepest;
    }
    for (int64_t n = 1; n <= leaves->count; n++) {
        const int64_t depth = xd_leaves_nodes(leaves->first, n - 1) + 1;
        if (depth > deepest) deepest = depth;
    }
    return deepest;
}

static bool xdi_leaf_stack_fits(const xd_leaves *leaves) {
    return leaves->first >= 0 && leaves->count >= 0 && leaves->first <= leaves->total &&
           leaves->count <= leaves->total - leaves->first;
}

/* False when the nodes do not fit into a size_t; range and elements have been checked. */
static bool xdi_leaf_stack_size(const xd_leaves *leaves, int64_t elements, size_t *bytes) {
    return xdi_size_multiply((size_t)elements, sizeof(float), bytes) &&
           xdi_size_multiply(*bytes, (size_t)xdi_leaf_stack_deepest(leaves), bytes);
}

XD_PRIVATE size_t xdi_leaf_stack_bytes(const xd_leaf_stack_desc *desc) {
    size_t bytes = 0;
    if (!xdi_leaf_stack_fits(&desc->leaves) || desc->elements < 0) return 0;
    return xdi_leaf_stack_size(&desc->leaves, desc->elements, &bytes) ? bytes : 0;
}

/* Memory for the nodes: the caller's, or the device's. */
static xd_result xdi_leaf_stack_memory(xd_leaf_stack *s, const xd_leaf_stack_desc *d) {
    const xd_kernels *device = xd_ctx_kernels(s->ctx), *host = xd_ctx_host_kernels(s->ctx);
    const bool on_host = d->memory && !device->memory.owns(s->ctx, d->memory);
    s->kernels = on_host ? host : device;
    s->nodes = (float *)d->memory;
    s->owned = !d->memory;
    XD_REQUIRE(s->ctx, !d->memory || d->memory_bytes >= s->bytes, XD_ERROR_ARGUMENT,
               "memory has %zu bytes but the stack needs %zu", d->memory_bytes, s->bytes);
    XD_REQUIRE(s->ctx, (uintptr_t)d->memory % sizeof(float) == 0, XD_ERROR_ARGUMENT,
               "the memory of a stack is at %p, not at a multiple of 4", d->memory);
    if (s->owned) s->nodes = (float *)device->memory.allocate(s->ctx, s->bytes);
    XD_REQUIRE(s->ctx, s->nodes || !s->bytes, XD_ERROR_MEMORY,
               "no room for a stack of leaves of %" PRId64 " elements", s->elements);
    return XD_OK;
}

XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, const xd_leaf_stack_desc *desc, xd_leaf_stack **out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, out);
    const xd_leaves leaves = desc->leaves;
    size_t bytes = 0;
    XD_REQUIRE(ctx, xdi_leaf_stack_fits(&leaves), XD_ERROR_ARGUMENT,
               "leaves [%" PRId64 ", +%" PRId64 ") lie outside [0, %" PRId64 ")", leaves.first, leaves.count,
               leaves.total);
    XD_REQUIRE(ctx, desc->elements >= 0, XD_ERROR_ARGUMENT, "%" PRId64 " elements in a leaf", desc->elements);
    XD_REQUIRE(ctx, xdi_leaf_stack_size(&leaves, desc->elements, &bytes), XD_ERROR_MEMORY,
               "no room for a stack of leaves of %" PRId64 " elements", desc->elements);
    if (xdi_plan_is_open(ctx)) {
        *out = NULL;
        const xd_result taken = xdi_plan_take(ctx, sizeof **out, desc->memory ? 0 : bytes);
        return xdi_plan_add_workspace(ctx, taken, desc->memory ? bytes : 0);
    }
    xd_leaf_stack *stack = XDI_OBJECT(xd_leaf_stack, ctx, sizeof *stack);
    XD_REQUIRE(ctx, stack, XD_ERROR_MEMORY, "no room for a stack of leaves");
    stack->ctx = ctx;
    stack->leaves = leaves;
    stack->elements = desc->elements;
    stack->bytes = bytes;
    const xd_result result = xdi_leaf_stack_memory(stack, desc);
    if (result != XD_OK) {
        xd_leaf_stack_destroy(stack);
        return result;
    }
    *out = stack;
    return XD_OK;
}

static xd_result xdi_leaf_stack_check(const xd_leaf_stack *s) {
    XD_REQUIRE(s->ctx, s->pushed < s->leaves.count, XD_ERROR_STATE, "all %" PRId64 " leaves are there",
               s->leaves.count);
    return XD_OK;
}

static uint64_t xdi_leaf_stack_bit(int64_t node) {
    return node < 64 ? (uint64_t)1 << node : 0;
}

XD_API xd_result xd_leaf_stack_next(xd_leaf_stack *s, float **place) {
    XDI_LIVE(xd_leaf_stack, s);
    XDI_GIVEN_OF(s, place);
    XD_TRY(xdi_leaf_stack_check(s));
    s->open = true;
    s->zeroed &= ~xdi_leaf_stack_bit(s->depth);
    *place = s->elements ? s->nodes + s->depth * s->elements : s->nodes;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_leaf_stack_next_zeros(xd_leaf_stack *s, float **place) {
    const xd_launch launch = xd_ctx_launch(s->ctx);
    const bool are_zeros = (s->zeroed & xdi_leaf_stack_bit(s->depth)) != 0;
    XD_TRY(xd_leaf_stack_next(s, place));
    s->clears = s->kernels->device == XD_DEVICE_CPU;
    return are_zeros ? XD_OK
                     : s->kernels->memory.fill(&launch, *place, 0, (size_t)s->elements * sizeof **place);
}

/* Adds the last node to the one below. */
static xd_result xdi_leaf_stack_merge(xd_leaf_stack *s, const xd_launch *launch) {
    float *below = s->nodes + (s->depth - 2) * s->elements, *last = below + s->elements;
    const void *pair[2];
    pair[0] = below;
    pair[1] = last;
    if (!s->clears)
        return s->kernels->reduce.pieces(launch, below, pair, 2, s->elements, XD_DTYPE_F32, XD_SUM);
    XD_TRY(xdi_reduce_absorb(launch, below, last, s->elements));
    s->zeroed |= xdi_leaf_stack_bit(s->depth - 1);
    return XD_OK;
}

/* Copies a leaf to the top of the stack. */
static xd_result xdi_leaf_stack_copy(const xd_leaf_stack *s, const xd_launch *launch, const float *leaf) {
    const uintptr_t at = (uintptr_t)leaf, nodes = (uintptr_t)s->nodes;
    const size_t bytes = (size_t)s->elements * sizeof *leaf;
    const bool on_device = s->kernels->device != XD_DEVICE_CPU;
    const xd_kernels *device = xd_ctx_kernels(s->ctx);
    XD_REQUIRE(s->ctx, !s->open, XD_ERROR_STATE,
               "leaf %" PRId64 " has a place from xd_leaf_stack_next, and another array is pushed",
               s->leaves.first + s->pushed);
    if (!bytes) return XD_OK;
    XD_REQUIRE(s->ctx, at + bytes <= nodes || nodes + s->bytes <= at, XD_ERROR_ARGUMENT,
               "leaf %" PRId64 " lies in the memory of the stack, not where xd_leaf_stack_next puts it",
               s->leaves.first + s->pushed);
    XD_REQUIRE(s->ctx, device->device == XD_DEVICE_CPU || device->memory.owns(s->ctx, leaf) == on_device,
               XD_ERROR_ARGUMENT, "the stack is on the %s, leaf %" PRId64 " is not",
               on_device ? "device" : "host", s->leaves.first + s->pushed);
    return s->kernels->memory.copy(launch, s->nodes + s->depth * s->elements, leaf, bytes, XD_COPY_ON_DEVICE);
}

XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *s, const float *leaf) {
    XDI_LIVE(xd_leaf_stack, s);
    XDI_GIVEN(s ? s->ctx : NULL, s);
    XDI_GIVEN_LIST(s->ctx, leaf, s->elements);
    const xd_launch launch = xd_ctx_launch(s->ctx);
    xd_result result = XD_OK;
    XD_TRY(xdi_leaf_stack_check(s));
    if (!s->open || (s->elements && leaf != s->nodes + s->depth * s->elements))
        XD_TRY(xdi_leaf_stack_copy(s, &launch, leaf));
    s->open = false;
    s->zeroed &= ~xdi_leaf_stack_bit(s->depth);
    s->depth++;
    const int64_t nodes = xd_leaves_nodes(s->leaves.first, ++s->pushed);
    for (; s->depth > nodes; s->depth--)
        if (s->elements && result == XD_OK) result = xdi_leaf_stack_merge(s, &launch);
    return result;
}

XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack) {
    return stack ? stack->nodes : NULL;
}

XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack) {
    if (!stack || XDI_IS_GONE(xd_leaf_stack, stack)) return;
    stack->pushed = 0;
    stack->depth = 0;
    stack->open = false;
}

XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack) {
    if (!stack || XDI_IS_GONE(xd_leaf_stack, stack)) return;
    if (stack->owned) stack->kernels->memory.release(stack->ctx, stack->nodes);
    xd_release(stack->ctx, stack);
}
