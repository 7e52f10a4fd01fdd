/* nn_patch_pieces.h - sums over heads, or over the inner width of the feed-forward part, which ranks may share.
 *
 * A sum is made of pieces that do not depend on who has them, added along the canonical tree of xd_leaves. */
#ifndef NN_PATCH_PIECES_H
#define NN_PATCH_PIECES_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is summed over, in pieces of a length. */
typedef struct nn_pieces {
    xd_comm *comm;        /* NULL -> all is here, and sums are whole */
    int64_t begin, end;   /* of it, here */
    int64_t length;       /* of a piece; the last may be shorter */
    xd_leaves leaves;     /* pieces here, of all */
    int64_t elements;     /* most of a sum */
    xd_leaf_stack *stack; /* of these; NULL without comm */
    float *sum;           /* [elements] */
} nn_pieces;

/* This rank's of `whole` in pieces of `length`, without stack and sum. Pure. */
nn_pieces nn_pieces_of(xd_comm *comm, int64_t whole, int64_t length);

/* Where each rank's part of `whole` begins, and the end: [ranks + 1]. Pure. */
void nn_pieces_offsets(const nn_pieces *pieces, int64_t whole, int64_t *offsets);

/* What a piece gives: out [count], `first` and `n` of it, counted from the first here. */
typedef struct nn_piece_sum {
    void (*run)(const void *user, int64_t first, int64_t n, float *out);
    const void *user;
    int64_t count; /* at most pieces->elements */
} nn_piece_sum;

/* y [count] = the sum over the pieces of all ranks. Collective over comm, which is there. */
xd_result nn_pieces_sum(const nn_pieces *pieces, const nn_piece_sum *of, float *y);

/* x [rows, sections * n] times the weight of it, where n is what is here: [out, sections * n] with `turned`, else
 * [sections * n, out]. */
typedef struct nn_piece_product {
    const float *x, *weight;
    int64_t rows, out;
    int sections; /* parts of x, one after the other, that each have all pieces */
    bool turned;
} nn_piece_product;

/* y [rows, out] = the product over all ranks; bias is added in the end, NULL -> there is none. Collective over comm, which is
 * there. */
xd_result nn_pieces_multiply(const nn_pieces *pieces, const nn_piece_product *of, const float *bias,
                             float *y);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_PIECES_H */
