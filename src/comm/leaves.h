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

/* Adds the next leaf, [elements], which is copied. Local, allocates nothing. Errors: STATE when all leaves have
 * been added. */
XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *stack, const float *leaf);

/* The forest so far, [nodes, elements] in the order of the leaves: once all leaves have been added, pass it as
 * xd_collective.send. NULL for NULL. Valid until the next push, reset or destroy. */
XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack);

/* Removes all leaves, for the next step. NULL is fine. */
XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack);

/* Frees the stack. NULL is fine. */
XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack);

#endif
