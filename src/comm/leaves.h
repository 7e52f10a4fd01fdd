#ifndef XDI_COMM_LEAVES_H
#define XDI_COMM_LEAVES_H

#include "kernel/types.h"

/* Accumulates one rank's gradient leaves in the order of the canonical tree of xd_leaves: a stack on
 * which neighbouring nodes of equal size that form an aligned block are merged. With a plain running sum the bits
 * would depend on the number of leaves of a rank. Belongs to its context. */
typedef struct xd_leaf_stack xd_leaf_stack;

/* A stack for the leaves [leaves.first, + leaves.count), each of `elements` f32. Memory: at most 2
 * log2(count) + 1 leaves; one when count is 1. Local. Errors: ARGUMENT (a range outside [0, total)),
 * MEMORY. */
XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, xd_leaves leaves, int64_t elements, xd_leaf_stack **out);

/* Where a stack is and what it takes. Read during the call only. */
typedef struct xd_leaf_stack_desc {
    xd_leaves leaves;
    int64_t elements; /* f32 in each leaf */
    /* Memory of the caller's for the nodes, aligned for f32, that outlives the stack: on the host, or on the context's device,
     * where the leaves then are too. With one leaf it is the gradient buffer itself. NULL -> the context's device allocates. */
    void *memory;
    size_t memory_bytes; /* at least xd_leaf_stack_bytes */
} xd_leaf_stack_desc;

/* Bytes that the nodes take, in memory that is given or allocated; 0 also for a range outside [0, total), for negative
 * elements, and for what does not fit into a size_t. Pure. */
XD_API size_t xd_leaf_stack_bytes(const xd_leaf_stack_desc *desc);

/* xd_leaf_stack_create, whose nodes are on the host, with the nodes on the context's device or in memory of the caller's. The
 * bits are the same everywhere; on a device all work is launched on the context's stream and nothing waits. Local. Errors:
 * ARGUMENT (also too little memory, or not aligned), MEMORY. */
XD_API xd_result xd_leaf_stack_create_in(xd_ctx *ctx, const xd_leaf_stack_desc *desc, xd_leaf_stack **out);

/* The place where the next leaf is to be written, [elements], without a copy: fill it, then push it. Until the push, the same
 * place again. Its contents are undefined. Local, allocates nothing. Errors: STATE when all leaves have been added. */
XD_API xd_result xd_leaf_stack_next(xd_leaf_stack *stack, float **place);

/* Adds the next leaf, [elements], which is copied unless it is the place of xd_leaf_stack_next. Local, allocates nothing.
 * Errors: STATE when all leaves have been added, or while xd_leaf_stack_next waits for its place and this is another array;
 * ARGUMENT for a leaf elsewhere in the stack's memory, or on the host when the stack is on a device, and the other way round.
 * The stack is then as before; after an error of an addition (a parallel_for that leaves out pieces) it must be reset. */
XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *stack, const float *leaf);

/* The forest so far, [nodes, elements] in the order of the leaves: once all leaves have been added, pass it as
 * xd_collective.send. NULL for NULL. Valid until the next push, reset or destroy. */
XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack);

/* Removes all leaves, for the next step, and forgets the place of xd_leaf_stack_next. NULL is fine. */
XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack);

/* Frees the stack, not memory that was given. NULL is fine. */
XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack);

#endif
