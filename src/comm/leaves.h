#ifndef XDI_COMM_LEAVES_H
#define XDI_COMM_LEAVES_H

#include "kernel/types.h"

/* Accumulates one rank's gradient leaves the way the canonical tree of xd_leaves adds them: a stack on
 * which equal neighbours that form an aligned block merge. A plain running sum would tie the bits to the
 * number of leaves a rank has. Belongs to its context. */
typedef struct xd_leaf_stack xd_leaf_stack;

/* A stack for the leaves [leaves.first, + leaves.count), each of `elements` f32. Memory: at most 2
 * log2(count) + 1 leaves; one when count is 1. Local. Errors: ARGUMENT (a range outside [0, total)),
 * MEMORY. */
XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, xd_leaves leaves, int64_t elements, xd_leaf_stack **out);

/* Adds the next leaf, [elements], copied. Local, allocates nothing. Errors: STATE when all leaves are
 * there. */
XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *stack, const float *leaf);

/* The forest so far, [nodes, elements] in the order of the leaves: what xd_collective.send wants once every
 * leaf is there. NULL for NULL. Valid until the next push, reset or destroy. */
XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack);

/* Forgets all leaves: the next step begins. NULL is fine. */
XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack);

/* Frees the stack. NULL is fine. */
XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack);

#endif
