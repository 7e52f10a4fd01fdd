/* strip.h - a network whose samples can be cut over ranks and whose hidden units can be cut over others, and a discriminator.
 *
 * A sample is a strip of blocks. In each block y = down tanh(up [x, t, 1]); the prediction of an element is y, what is next to it
 * in the blocks on both sides, and the mean over all blocks, each with a factor of its own. The feature is y of the whole strip.
 *
 * The sum over hidden units is one of 8 fixed pieces, and so is a gradient's over the 8 blocks, each along the canonical tree of
 * xd_leaves: every cut has the bits of one rank. */
#ifndef EQUIVALENCE_DMD_STRIP_H
#define EQUIVALENCE_DMD_STRIP_H

#include "xdistill.h"

enum {
    STRIP_BLOCKS = 8,
    STRIP_BLOCK = 3, /* elements */
    STRIP_ELEMENTS = STRIP_BLOCKS * STRIP_BLOCK,
    STRIP_PIECES = 8,
    STRIP_PIECE = 2, /* hidden units */
    STRIP_UNITS = STRIP_PIECES * STRIP_PIECE,
    STRIP_SLOTS = 3,
    STRIP_RANKS = 8,
    JUDGE_UNITS = 4,
    JUDGE_HEADS = 3
};

/* Ranks with the other hidden units, and with the other elements of the same samples; both may be of one rank. Of all of them
 * together, those of `tp` are side by side. */
typedef struct strip_cut {
    xd_comm *tp, *cp;
} strip_cut;

/* The elements of a sample that this rank has. */
xd_interval strip_elements(const strip_cut *cut);

/* How a weight lies over the ranks of the cut: the units in dimension `dim` over tp, or whole with -1. */
xd_result strip_layout(xd_ctx *ctx, const strip_cut *cut, const int64_t shape[2], int dim, xd_layout **out);

/* Adds a weight [shape] of normal first values times `scale`. */
xd_result strip_weight(xd_block *block, const char *name, const int64_t shape[2], const xd_layout *layout,
                       float scale);

typedef struct strip strip;

/* A model without memory for weights, for a wrapper; calls have at most `samples`. Blocks of type "layer" are units. The model lives
 * as long as the strip. Local. */
xd_result strip_create(xd_ctx *ctx, const strip_cut *cut, uint64_t seed, int64_t samples, strip **out);
void strip_destroy(strip *s);
xd_model *strip_model(const strip *s);

/* Its functions, collective over the cut. Flow is predicted. */
xd_network strip_network(strip *s);

/* A discriminator, whole on every rank of the cut: second tanh(first feature). One block, so that a leaf may have several
 * backwards. */
typedef struct judge judge;
xd_result judge_create(xd_ctx *ctx, const strip_cut *cut, uint64_t seed, int64_t elements, judge **out);
void judge_destroy(judge *j);
xd_model *judge_model(const judge *j);
xd_network judge_network(judge *j);

#endif
