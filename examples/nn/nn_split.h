/* nn_split.h - ranks that share the contractions of a network, and how its weights lie over them. */
#ifndef NN_SPLIT_H
#define NN_SPLIT_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NN_SPLIT_RANKS = 8 /* at most */ };

typedef struct nn_split nn_split;

/* Ranks of tp share what a network says. With a split, also of one rank, its sums over that are made of those of pieces along the
 * canonical tree of xd_leaves, so that any number of ranks has the bits of one. That takes longer than whole sums, which have
 * other bits.
 *
 *   cp   ranks with other tokens of the same samples, or NULL. Ranks of tp are side by side in what both make together
 *
 * tp and cp must outlive it, and it the models that are described with it. Local. Errors: MEMORY. */
xd_result nn_split_create(xd_comm *tp, xd_comm *cp, nn_split **out);

/* NULL is fine. Local. */
void nn_split_destroy(nn_split *split);

/* The ranks of tp, and this rank among those of the layouts; NULL and 0 of no split. */
xd_comm *nn_split_comm(const nn_split *split);
int nn_split_rank(const nn_split *split);

/* The layout of a weight that lies over tp as `over` says; the split keeps it. The same number `cut` for the same way of
 * cutting, whose layouts are made once. Local. Errors: ARGUMENT (too many layouts), those of xd_layout_create. */
xd_result nn_split_layout(nn_split *split, const xd_weight_desc *weight, int cut, const xd_placement *over,
                          const xd_layout **out);

#ifdef __cplusplus
}
#endif

#endif /* NN_SPLIT_H */
