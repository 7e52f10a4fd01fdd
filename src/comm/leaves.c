/* The stack of a rank's leaves: the canonical tree over gradients, built as they arrive. */

#include "base/internal.h"
#include "comm/leaves.h"
#include "kernel/reduce.h"

#include <inttypes.h>
#include <string.h>

struct xd_leaf_stack {
    xd_ctx *ctx;
    xd_leaves leaves;
    int64_t elements;
    int64_t pushed; /* leaves so far */
    int64_t depth;  /* nodes on the stack */
    float *nodes;   /* [deepest, elements] */
};

/* Maximum number of nodes on the stack while the leaves are pushed: at each push, the forest of the earlier leaves
 * and the new leaf. At most 2 log2(count) + 1; computed, not estimated. */
static int64_t xdi_leaf_stack_deepest(const xd_leaves *leaves) {
    int64_t deepest = 1;
    for (int64_t n = 1; n <= leaves->count; n++) {
        const int64_t depth = xd_leaves_nodes(leaves->first, n - 1) + 1;
        if (depth > deepest) deepest = depth;
    }
    return deepest;
}

XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, xd_leaves leaves, int64_t elements, xd_leaf_stack **out) {
    XD_REQUIRE(ctx,
               leaves.first >= 0 && leaves.count >= 0 && leaves.first <= leaves.total &&
                   leaves.count <= leaves.total - leaves.first,
               XD_ERROR_ARGUMENT, "leaves [%" PRId64 ", +%" PRId64 ") lie outside [0, %" PRId64 ")",
               leaves.first, leaves.count, leaves.total);
    XD_REQUIRE(ctx, elements >= 0, XD_ERROR_ARGUMENT, "%" PRId64 " elements in a leaf", elements);
    size_t bytes = 0;
    xd_leaf_stack *stack = (xd_leaf_stack *)xd_allocate(ctx, sizeof *stack);
    XD_REQUIRE(ctx, stack, XD_ERROR_MEMORY, "no room for a stack of leaves");
    stack->ctx = ctx;
    stack->leaves = leaves;
    stack->elements = elements;
    if (xdi_size_multiply((size_t)elements * sizeof(float), (size_t)xdi_leaf_stack_deepest(&leaves), &bytes))
        stack->nodes = (float *)xd_allocate(ctx, bytes);
    if (!stack->nodes) {
        xd_leaf_stack_destroy(stack);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a stack of leaves of %" PRId64 " elements",
                       elements);
    }
    *out = stack;
    return XD_OK;
}

XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *s, const float *leaf) {
    XD_REQUIRE(s->ctx, s->pushed < s->leaves.count, XD_ERROR_STATE, "all %" PRId64 " leaves are there",
               s->leaves.count);
    float *top = s->nodes + s->depth++ * s->elements;
    memcpy(top, leaf, (size_t)s->elements * sizeof *top);
    const int64_t nodes = xd_leaves_nodes(s->leaves.first, ++s->pushed);
    for (; s->depth > nodes; s->depth--, top -= s->elements)
        for (int64_t i = 0; i < s->elements; i++) top[i - s->elements] = top[i - s->elements] + top[i];
    return XD_OK;
}

XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack) {
    return stack ? stack->nodes : NULL;
}

XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack) {
    if (!stack) return;
    stack->pushed = 0;
    stack->depth = 0;
}

XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack) {
    if (!stack) return;
    xd_release(stack->ctx, stack->nodes);
    xd_release(stack->ctx, stack);
}
