/* nn_sequence.h - gradients of weights as sums over the positions of sequences: whole, or made of those of eight fixed blocks.
 *
 * Rows are the positions here of one sequence after another. With blocks, a rank has a run of them, and a sum over positions
 * is added along the canonical tree of xd_leaves over the blocks of all ranks: any number of ranks, one with the blocks too,
 * has the same bits. A sum of an open block's weights is then complete after nn_sequence_join alone. */
#ifndef NN_SEQUENCE_H
#define NN_SEQUENCE_H

#include "nn_model.h"
#include "nn_patch_positions.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nn_sequence {
    int64_t sequences, positions; /* positions here, of each sequence */
    bool blocks;
    nn_positions at; /* only with blocks, as all that follows */
    float *nodes;    /* nn_positions_nodes of all gradients that are open together */
    float *root;     /* these gradients */
    float *room;     /* nn_sums_room of the largest array */
} nn_sequence;

/* Positions here that are in a block, counted from the first here. Pure. */
xd_interval nn_sequence_part(const nn_sequence *s, int64_t block);

/* Whether ranks hold runs of whole blocks; always without blocks.
 *
 *   count     [cp.size] positions of each rank; not read with one rank
 *   position  [all] which those are, in rank order; NULL -> 0, 1, 2, ...
 */
bool nn_sequence_fits(const nn_group *cp, int all, const int32_t *count, const int32_t *position);

/* Where a gradient goes: added there; with blocks, its place among `all` floats of those that are joined together. */
typedef struct nn_place {
    float *gradient;
    int64_t offset, all;
} nn_place;

/* gradient [out, in] of a matrix: d_y^T x. x [rows, in], d_y [rows, out] */
typedef struct nn_matrix_slope {
    int64_t in, out;
    const float *x, *d_y;
    nn_place place;
} nn_matrix_slope;
void nn_sequence_matrix(const nn_sequence *s, const nn_matrix_slope *slope);

/* nn_rmsnorm_backward of all rows, with its weight's gradient. */
typedef struct nn_norm_slope {
    int64_t width;
    const float *x, *weight, *inverse_rms, *d_y;
    float *d_x;
    nn_place place;
} nn_norm_slope;
void nn_sequence_norm(const nn_sequence *s, const nn_norm_slope *slope);

/* gradient [count, width] of the rows [begin, begin + count) of an embedding: the sum of d_x [rows, width] of their ids. */
typedef struct nn_embed_slope {
    int64_t width;
    int begin, count;
    const int32_t *ids;
    const float *d_x;
    nn_place place;
} nn_embed_slope;
void nn_sequence_embed(const nn_sequence *s, const nn_embed_slope *slope);

/* What one block gives to an array; see nn_patch_positions.h. */
void nn_sequence_add(const nn_sequence *s, int64_t all, const nn_block_sum *of);

/* *sum = the `all` floats, of the blocks of all ranks; without a group of several ranks they are here. Collective over cp.
 * Returns the group's codes. */
int nn_sequence_join(const nn_sequence *s, const nn_group *cp, int64_t all, const float **sum);

#ifdef __cplusplus
}
#endif

#endif /* NN_SEQUENCE_H */
