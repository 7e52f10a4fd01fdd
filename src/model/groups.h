#ifndef XDI_MODEL_GROUPS_H
#define XDI_MODEL_GROUPS_H

#include "comm/mesh.h"

/* This rank's groups, with Megatron's names: tensor (tp), context (cp), expert (ep), data (dp) and pipeline (pp)
 * parallelism. Joined names vary several. NULL -> rank 0 of 1. */
typedef struct xd_groups {
    xd_comm *tp, *pp, *cp, *dp;
    xd_comm *mp; /* tp and pp: one replica of the model */
    xd_comm *tp_cp;
    xd_comm *dp_cp; /* the data group: the same weights */
    xd_comm *tp_dp_cp;
    xd_comm *embedding;          /* embd: first and last stage; NULL on the others */
    xd_comm *position_embedding; /* pos_embd: the first stage alone; NULL on the others */
    /* Of the experts' grid */
    xd_comm *ep, *expert_tp;
    xd_comm *tp_ep, *tp_ep_pp;
    xd_comm *expert_dp; /* the experts' data group */
    /* Instances of the data group, each with a whole optimizer. intra: the ranks of this one. inter: those at its place
     * in all. Without instances: the data group, and NULL */
    xd_comm *intra_dp_cp, *intra_expert_dp;
    xd_comm *inter_instances, *inter_expert_instances;
} xd_groups;

/* All groups; owns them. */
typedef struct xd_grid xd_grid;

/* Makes two grids and all groups. Collective over world, every rank of the run.
 *
 *   dense    tp cp ep=1 dp pp, dp = world / (tp cp pp)
 *   expert   tp=expert_tp cp=1 ep dp pp, dp = world / (expert_tp ep pp)
 *   desc     world_size 0 -> that of `world`
 *
 * Deterministic.
 * Errors: ARGUMENT (sizes, order, virtual pipeline without pp), TOPOLOGY (not divisible; pipeline groups differ;
 * world_size; instances of the experts' data group), MISMATCH (ranks differ), MEMORY.
 * Source: Megatron-Core. */
XD_API xd_result xd_grid_create(xd_comm *world, const xd_expert_desc *desc, xd_grid **out);

/* Returns the groups. Local. */
XD_API const xd_groups *xd_grid_groups(const xd_grid *grid);

/* Destroys the grid. Local. */
XD_API void xd_grid_destroy(xd_grid *grid);

#endif
