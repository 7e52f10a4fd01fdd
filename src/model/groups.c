/* The communicators of a run that splits a model in several ways. */

#include "base/internal.h"
#include "comm/internal.h"
#include "model/groups.h"

#include <string.h>

enum { XDI_GRID_SPLITS = 6 /* groups that are no axes of a mesh */ };

struct xd_grid {
    xd_ctx *ctx;
    xd_comm *world;
    xd_expert_desc desc;
    xd_mesh *dense, *expert;
    xd_comm *splits[XDI_GRID_SPLITS]; /* [split_count], owned */
    int split_count;
    xd_groups groups;
};

static xd_result xdi_grid_make_meshes(xd_grid *grid, const xd_topology *dense, const xd_topology *expert) {
    xd_mesh_desc d;
    memset(&d, 0, sizeof d);
    d.topology = dense;
    XD_TRY(xd_mesh_create(grid->world, &d, &grid->dense));
    d.topology = expert;
    d.share = grid->dense;
    return xd_mesh_create(grid->world, &d, &grid->expert);
}

static xd_result xdi_grid_name_groups(xd_grid *grid) {
    xd_groups *g = &grid->groups;
    XD_TRY(xd_mesh_group(grid->dense, "tp", &g->tp));
    XD_TRY(xd_mesh_group(grid->dense, "pp", &g->pp));
    XD_TRY(xd_mesh_group(grid->dense, "cp", &g->cp));
    XD_TRY(xd_mesh_group(grid->dense, "dp", &g->dp));
    XD_TRY(xd_mesh_group(grid->dense, "tp,pp", &g->mp));
    XD_TRY(xd_mesh_group(grid->dense, "tp,cp", &g->tp_cp));
    XD_TRY(xd_mesh_group(grid->dense, "dp,cp", &g->dp_cp));
    XD_TRY(xd_mesh_group(grid->dense, "tp,dp,cp", &g->tp_dp_cp));
    XD_TRY(xd_mesh_group(grid->expert, "ep", &g->ep));
    XD_TRY(xd_mesh_group(grid->expert, "tp", &g->expert_tp));
    XD_TRY(xd_mesh_group(grid->expert, "tp,ep", &g->tp_ep));
    XD_TRY(xd_mesh_group(grid->expert, "tp,ep,pp", &g->tp_ep_pp));
    return xd_mesh_group(grid->expert, "dp", &g->expert_dp);
}

/* The ranks of `comm` with the same color; *out NULL for a color below 0. */
static xd_result xdi_grid_split(xd_grid *grid, xd_comm *comm, int color, xd_comm **out) {
    XD_TRY(xd_comm_split(comm, color, 0, out));
    if (*out) grid->splits[grid->split_count++] = *out;
    return XD_OK;
}

static xd_result xdi_grid_split_pipeline(xd_grid *grid) {
    xd_groups *g = &grid->groups;
    const int rank = xd_comm_rank(g->pp), last = xd_comm_size(g->pp) - 1;
    XD_TRY(xdi_grid_split(grid, g->pp, rank == 0 || rank == last ? 0 : -1, &g->embedding));
    return xdi_grid_split(grid, g->pp, rank == 0 ? 0 : -1, &g->position_embedding);
}

/* Runs of consecutive ranks, and the ranks at the same place of each. */
static xd_result xdi_grid_cut(xd_grid *grid, xd_comm *data, xd_comm **intra, xd_comm **inter) {
    const int size = xd_comm_size(data), rank = xd_comm_rank(data), count = grid->desc.optimizer_instances;
    *intra = data;
    if (count == 1) return XD_OK;
    XD_TRY(xdi_grid_split(grid, data, rank / (size / count), intra));
    return xdi_grid_split(grid, data, rank % (size / count), inter);
}

static xd_result xdi_grid_split_instances(xd_grid *grid) {
    xd_groups *g = &grid->groups;
    const int experts = xd_comm_size(g->expert_dp), count = grid->desc.optimizer_instances;
    XD_REQUIRE(grid->ctx, experts % count == 0, XD_ERROR_TOPOLOGY,
               "the data group of experts has %d ranks, not a multiple of %d optimizer instances", experts,
               count);
    XD_TRY(xdi_grid_cut(grid, g->dp_cp, &g->intra_dp_cp, &g->inter_instances));
    return xdi_grid_cut(grid, g->expert_dp, &g->intra_expert_dp, &g->inter_expert_instances);
}

static xd_result xdi_grid_agree_sizes(xd_comm *world, const xd_expert_desc *d) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "world_size", d->world_size);
    xdi_fact_integer(&facts, "tp", d->tp);
    xdi_fact_integer(&facts, "cp", d->cp);
    xdi_fact_integer(&facts, "ep", d->ep);
    xdi_fact_integer(&facts, "pp", d->pp);
    xdi_fact_integer(&facts, "expert_tp", d->expert_tp);
    xdi_fact_integer(&facts, "optimizer_instances", d->optimizer_instances);
    xdi_fact_integer(&facts, "virtual_pipeline", d->virtual_pipeline);
    xdi_fact_bytes(&facts, "order", d->order, d->order ? strlen(d->order) : 0);
    return xdi_agree_facts(world, &facts, "sizes of a grid");
}

static xd_result xdi_grid_compute(xd_ctx *ctx, const xd_expert_desc *d, int ranks, xd_topology *dense,
                                  xd_topology *expert) {
    XD_REQUIRE(ctx, d->world_size == ranks, XD_ERROR_TOPOLOGY, "world_size is %d, the world has %d ranks",
               d->world_size, ranks);
    return xdi_topology_experts(ctx, d, dense, expert);
}

/* The grid without groups, or none on any rank. */
static xd_result xdi_grid_open(xd_comm *world, const xd_expert_desc *d, xd_grid **out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_grid *grid = XDI_OBJECT(xd_grid, ctx, sizeof *grid);
    const xd_result result =
        xd_agree(world, grid ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a grid"));
    if (result != XD_OK) {
        xd_release(ctx, grid);
        return result;
    }
    grid->ctx = ctx;
    grid->world = world;
    grid->desc = *d;
    *out = grid;
    return XD_OK;
}

static xd_result xdi_grid_fill(xd_grid *grid, const xd_topology *dense, const xd_topology *expert) {
    XD_TRY(xdi_grid_make_meshes(grid, dense, expert));
    XD_TRY(xdi_grid_name_groups(grid));
    XD_TRY(xdi_grid_split_pipeline(grid));
    return xdi_grid_split_instances(grid);
}

XD_API xd_result xd_grid_create(xd_comm *world, const xd_expert_desc *desc, xd_grid **out) {
    XDI_GIVEN_COMM(world, desc, out);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_topology dense, expert;
    xd_expert_desc d = *desc;
    xd_grid *grid = NULL;
    if (!d.world_size) d.world_size = xd_comm_size(world);
    if (!d.optimizer_instances) d.optimizer_instances = 1;
    XD_TRY(xd_agree(world, xdi_grid_compute(ctx, &d, xd_comm_size(world), &dense, &expert)));
    XD_TRY(xdi_grid_agree_sizes(world, &d));
    XD_TRY(xdi_grid_open(world, &d, &grid));
    const xd_result result = xd_agree(world, xdi_grid_fill(grid, &dense, &expert));
    if (result == XD_OK)
        *out = grid;
    else
        xd_grid_destroy(grid);
    return result;
}

XD_API const xd_groups *xd_grid_groups(const xd_grid *grid) {
    XD_ASSERT(grid);
    return &grid->groups;
}

XD_API void xd_grid_destroy(xd_grid *grid) {
    if (!grid || XDI_IS_GONE(xd_grid, grid)) return;
    for (int i = grid->split_count - 1; i >= 0; i--) xd_comm_destroy(grid->splits[i]);
    xd_mesh_destroy(grid->expert);
    xd_mesh_destroy(grid->dense);
    xd_release(grid->ctx, grid);
}
