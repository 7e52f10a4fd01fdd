#ifndef XDI_COMM_LEAVES_H
#define XDI_COMM_LEAVES_H

#include "kernel/types.h"

/* Adds one rank's gradient leaves in the order of the canonical tree (xd_leaves). How many leaves a rank has does not
 * change bits. Belongs to its context. */
typedef struct xd_leaf_stack xd_leaf_stack;

/* Settings. */
typedef struct xd_leaf_stack_desc {
    xd_leaves leaves;
    int64_t elements; /* f32 per leaf */
    /* Nodes, f32-aligned, on the leaves' device; outlives the stack; for one leaf the gradient buffer. NULL -> the
     * context's device allocates. */
    void *memory;
    size_t memory_bytes; /* at least xd_planned.workspace */
} xd_leaf_stack_desc;

/* Creates a stack. Memory: at most 2 log2(count) + 1 leaves, one if count is 1. Runs on the context's stream without
 * waiting. Local.
 * Errors: ARGUMENT (range outside [0, total); memory too small or unaligned), MEMORY. */
XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, const xd_leaf_stack_desc *desc, xd_leaf_stack **out);

/* Returns where to write the next leaf, [elements], which xd_leaf_stack_push then adds without a copy. Until then the
 * place stays the same. Local, allocates nothing. Errors: STATE (all leaves added). */
XD_API xd_result xd_leaf_stack_next(xd_leaf_stack *stack, float **place);

/* Adds the next leaf, [elements]; copies it unless it is at the place of xd_leaf_stack_next. Local, allocates nothing.
 * Errors, stack kept: STATE (all leaves added; not at the place that was given), ARGUMENT (elsewhere in the stack's
 * memory; host and device differ). After any other error (parallel_for) reset the stack. */
XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *stack, const float *leaf);

/* Returns the forest, [nodes, elements] in leaf order; with all leaves it is xd_collective.send. NULL for NULL. Valid
 * until push, reset or destroy. */
XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack);

/* Removes all leaves and the place; NULL is legal. */
XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack);

/* Frees the stack, not the caller's memory. */
XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack);

#endif
