#ifndef XDI_MODEL_GROUPS_H
#define XDI_MODEL_GROUPS_H

#include "comm/mesh.h"

/* The communicators of one rank in a run that splits a model in several ways, by the names that Megatron gives them: tensor (tp),
 * context (cp), expert (ep), data (dp) and pipeline (pp) parallelism, joined where a group varies several. Each is the group that
 * this rank is in. NULL -> this rank is rank 0 of 1 there. */
typedef struct xd_groups {
    xd_comm *tp, *pp, *cp, *dp;
    xd_comm *mp; /* tp and pp: one replica of the model */
    xd_comm *tp_cp;
    xd_comm *dp_cp; /* the data group of weights: whoever has the same weights and other samples or
                     * positions */
    xd_comm *tp_dp_cp;
    xd_comm *embedding;          /* embd: first and last stage of a pipeline; NULL on the others */
    xd_comm *position_embedding; /* pos_embd: the first stage alone; NULL on the others */
    /* Of the grid of the experts, whose tp and dp are other ones: */
    xd_comm *ep, *expert_tp;
    xd_comm *tp_ep, *tp_ep_pp;
    xd_comm *expert_dp; /* the data group of experts' weights */
    /* Where the data group is cut into instances, each with a whole optimizer: the instance of this rank, and the ranks at its
     * place in all instances. Without instances the data group itself, and NULL. */
    xd_comm *intra_dp_cp, *intra_expert_dp;
    xd_comm *inter_instances, *inter_expert_instances;
} xd_groups;

/* All groups of a run, made from its two grids. Owns the communicators. */
typedef struct xd_grid xd_grid;

/* Makes the meshes of both grids of xd_topology_experts and every group of xd_groups.
 *
 *   world   every rank of the run; must outlive the grid
 *   desc    sizes; world_size 0 -> that of `world`
 *
 * Collective over world. Memory: some hundred bytes for each communicator and rank. Deterministic: which ranks are in a group
 * follows from desc alone.
 * Errors: those of xd_topology_experts; TOPOLOGY (world_size is not that of `world`; instances that do not divide the experts' data
 * group), MISMATCH (ranks with another desc), MEMORY. All ranks alike.
 * Source: Megatron-Core, parallel_state.py and process_groups_config.py. */
XD_API xd_result xd_grid_create(xd_comm *world, const xd_expert_desc *desc, xd_grid **out);

/* The groups; they live as long as the grid. Local. */
XD_API const xd_groups *xd_grid_groups(const xd_grid *grid);

/* Local; NULL is fine. */
XD_API void xd_grid_destroy(xd_grid *grid);

#endif
