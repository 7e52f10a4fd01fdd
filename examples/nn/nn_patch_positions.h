/* nn_patch_positions.h - the tokens of a sample or sequence in eight blocks, which ranks may share, and sums over them that
 * do not depend on how.
 *
 * A rank has a run of whole blocks. What is summed over tokens is a sum of each block, and those are added along the canonical tree
 * of xd_leaves. So a rank that has a block makes the bits that any other would, and the sum is that of one rank. */
#ifndef NN_PATCH_POSITIONS_H
#define NN_PATCH_POSITIONS_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NN_POSITION_BLOCKS = 8 };

typedef struct nn_positions {
    xd_comm *comm;        /* NULL -> all tokens are here, or nothing is gathered or joined */
    int ranks;            /* that share the blocks */
    int64_t all;          /* tokens of a sample */
    int64_t each;         /* tokens of a block; the last blocks may be shorter, and empty */
    int64_t first, count; /* blocks here */
} nn_positions;

/* Those of a rank; of one among `ranks`, without a communicator. Pure. */
nn_positions nn_positions_of(xd_comm *comm, int64_t tokens);
nn_positions nn_positions_share(int ranks, int rank, int64_t tokens);

/* Tokens of a sample that a rank has; that are in a block, counted from the first here. Pure. */
xd_interval nn_positions_tokens(const nn_positions *at, int rank);
xd_interval nn_positions_block(const nn_positions *at, int64_t block);

/* all [tokens of a sample, width] = the tokens of all ranks, of which here [tokens here, width] are this one's. Collective. */
xd_result nn_positions_gather(const nn_positions *at, int64_t width, const float *here, float *all);

/* ---- sums ---- */

/* The sums of some arrays, which lie one behind the other. */
typedef struct nn_sums {
    const nn_positions *at;
    int64_t count; /* floats of all arrays */
    float *nodes;  /* [nn_positions_nodes, count] this rank's nodes of the tree */
    float *root;   /* [count], of nn_sums_join */
    float *room;   /* nn_sums_room of the largest array */
} nn_sums;

/* This rank's nodes of the tree; floats of room for an array of so many. Pure. */
int64_t nn_positions_nodes(const nn_positions *at);
int64_t nn_sums_room(int64_t count);

/* out [count] = what one block gives, the block counted from the first here. */
typedef struct nn_block_sum {
    void (*run)(const void *user, int64_t block, float *out);
    const void *user;
    int64_t offset, count; /* the array's place */
} nn_block_sum;

/* The array's part of every node. Local. */
void nn_sums_add(const nn_sums *sums, const nn_block_sum *of);

/* *root = the sums over the blocks of all ranks, [count]. Collective. */
xd_result nn_sums_join(const nn_sums *sums, const float **root);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_POSITIONS_H */
