/* share.h - ranks that share the work of a leaf: tensor-parallel ones (tp) cut its weights, context-parallel ones (cp) its positions.
 *
 * What is summed over rows of a matrix, columns of it, or positions is a sum of one piece for each, along the canonical tree of
 * xd_leaves, also on one rank; so any ranks that share have its bits. Experts lie over members, and each of them over none of these
 * ranks: all have them alike. */
#ifndef SHARE_H
#define SHARE_H

#include "xdistill.h"

/* How a weight lies over the ranks. */
typedef enum share_cut {
    SHARE_SCALAR,   /* on all */
    SHARE_VOCAB,    /* [vocabulary, hidden], rows are cut; perhaps stored with more of them */
    SHARE_UP,       /* [inner, hidden], rows are cut */
    SHARE_BIAS,     /* [inner], cut */
    SHARE_SHIFT,    /* [hidden], on all */
    SHARE_DOWN,     /* [hidden, inner], columns are cut */
    SHARE_NOTHING,  /* [0, hidden], no rows are cut */
    SHARE_MATRICES, /* [experts, hidden, hidden], experts are dealt to members */
    SHARE_SHIFTS,   /* [experts, hidden], likewise */
    SHARE_CUTS
} share_cut;

/* Crossings, each with the sum that belongs to it. */
typedef enum share_kind {
    SHARE_LOOK,  /* embeddings of rows, of which every rank has some: [rows, hidden], summed over tp */
    SHARE_SEE,   /* positions, gathered over cp; backwards summed, and cut */
    SHARE_ENTER, /* into the inner width; backwards summed over it */
    SHARE_LEAVE, /* out of it, summed over it */
    SHARE_LOGITS, /* into the vocabulary; backwards [rows * (hidden + 1)] summed over it: of the rows, and of the scale */
    SHARE_KINDS
} share_kind;

/* Gradients of weights, summed over positions. */
typedef enum share_weights {
    SHARE_OF_EMBED,
    SHARE_OF_LAYER,
    SHARE_OF_EXPERTS, /* matrices, then shifts, of those that are here */
    SHARE_OF_HEAD,
    SHARE_WEIGHTS
} share_weights;

typedef struct share_sizes {
    int rows, hidden, width;           /* `width`: from one row of activations to the next */
    int inner, vocab, stored, experts; /* `stored`: rows of the vocabulary, with those beyond it */
} share_sizes;

/* Ranks that share a leaf are side by side, those of tp first; then members, which share the experts. */
typedef struct share_ranks {
    xd_comm *world;
    xd_comm *tp, *cp, *members; /* never NULL */
} share_ranks;

typedef struct sharing {
    share_sizes size;
    xd_ctx *ctx;
    share_ranks ranks;
    xd_interval rows, inner, vocab, experts; /* here */
    xd_layout *layouts[SHARE_CUTS];          /* of ranks of the world; NULL -> whole on this rank */
    xd_crossing *crossings[SHARE_KINDS];
    xd_leaf_stack *stacks[SHARE_KINDS], *weights[SHARE_WEIGHTS];
    xd_leaves leaves[SHARE_KINDS];
    int64_t counts[SHARE_WEIGHTS]; /* elements of these gradients */
    float *sum;                    /* [largest of them] */
} sharing;

/* The shape of a weight that lies so, all ranks together; returns its dimensions. Pure. */
int share_shape(const share_sizes *sizes, share_cut cut, int64_t *shape);

/* The ranks must outlive it, and it the models that are described with its layouts. Collective over tp and cp. */
xd_result share_create(const share_ranks *ranks, const share_sizes *sizes, sharing **out);
void share_destroy(sharing *s); /* NULL is fine */

/* A stack's next leaf, of zeros. */
xd_result share_place(xd_leaf_stack *stack, int64_t elements, float **place);

/* The sum of all that was pushed for a crossing: by its forward, or its backward. Collective over its group. */
xd_result share_forward(sharing *s, share_kind kind, float *out);
xd_result share_backward(sharing *s, share_kind kind, float *out);

/* s->sum = the gradients of all positions. Collective over cp. */
xd_result share_join(sharing *s, share_weights of);

/* Where position `at` of a part's region is in the whole tensor. */
int64_t share_whole_place(const xd_tensor_part *part, int64_t at);

#endif
