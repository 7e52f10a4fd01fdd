#ifndef XDI_COMM_LEAVES_H
#define XDI_COMM_LEAVES_H

#include "kernel/types.h"

/* Adds one rank's gradient leaves in the order of the canonical tree (xd_leaves): equal neighbouring nodes that form an
 * aligned block merge. A rank's number of leaves does not change the bits. Belongs to its context. */
typedef struct xd_leaf_stack xd_leaf_stack;

/* Settings of a stack: leaves [leaves.first, + leaves.count). */
typedef struct xd_leaf_stack_desc {
    xd_leaves leaves;
    int64_t elements; /* f32 per leaf */
    /* Caller's node memory, f32-aligned, which outlives the stack: on the host, or on the context's device with the leaves.
     * For one leaf it is the gradient buffer. NULL -> the context's device allocates. */
    void *memory;
    size_t memory_bytes; /* as planned: xd_planned.workspace */
} xd_leaf_stack_desc;

/* Creates a stack on the context's device or in the caller's memory, with the same bits. Memory: at most 2 log2(count) + 1
 * leaves, one if count is 1. Device work runs on the context's stream without waiting. Local.
 * Errors: ARGUMENT (range outside [0, total); memory too small or unaligned), MEMORY. */
XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, const xd_leaf_stack_desc *desc, xd_leaf_stack **out);

/* Returns the place for the next leaf, [elements], to fill and push without a copy. Stays the same until the push. Local,
 * allocates nothing. Errors: STATE (all leaves added). */
XD_API xd_result xd_leaf_stack_next(xd_leaf_stack *stack, float **place);

/* Adds the next leaf, [elements]; copies it unless it is the place of xd_leaf_stack_next. Local, allocates nothing. Errors:
 * STATE (all leaves added; not the place of xd_leaf_stack_next), ARGUMENT (elsewhere in the stack's memory; host and device
 * differ). These keep the stack; reset it after a failed addition (parallel_for omits pieces). */
XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *stack, const float *leaf);

/* Returns the forest, [nodes, elements] in leaf order; complete, it is xd_collective.send. NULL for NULL. Valid until the
 * next push, reset or destroy. */
XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack);

/* Removes all leaves and the place of xd_leaf_stack_next; NULL is legal. */
XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack);

/* Frees the stack, not the caller's memory; NULL is legal. */
XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack);

#endif
