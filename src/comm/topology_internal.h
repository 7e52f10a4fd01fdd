#ifndef XDI_COMM_TOPOLOGY_INTERNAL_H
#define XDI_COMM_TOPOLOGY_INTERNAL_H

#include "base/internal.h"
#include "comm/topology.h"

/* Axes and their ranks. */
typedef struct xdi_topology_desc {
    const xd_axis *axes; /* required; [axis_count], slowest first without an order */
    int axis_count;
    /* Axis names joined by '-', the leftmost with stride 1 ("tp-cp-ep-dp-pp"); `axes` may then have any order. Omitted axes
     * of size 1 become slowest. NULL -> none. */
    const char *order;
    const int *ranks; /* [rank_count] distinct ranks < world_size; NULL -> the world in order */
    int rank_count;
    int world_size; /* required */
} xdi_topology_desc;

/* Creates axes over world_size ranks. Borrows desc->ranks. Pure.
 *
 * Errors: ARGUMENT (names; sizes; two of -1; repeated or unknown ranks; order: unknown or repeated names, omitted axes above
 * 1, "cp" and "ep" above 1), TOPOLOGY (sizes do not fit the number of ranks). */
XD_PRIVATE xd_result xdi_topology_create(xd_ctx *ctx, const xdi_topology_desc *desc, xd_topology *out);

/* Creates two grids, both untouched on failure.
 *
 *   dense    tp cp ep=1 dp pp, dp = world / (tp cp pp)
 *   expert   tp=expert_tp cp=1 ep dp pp, dp = world / (expert_tp ep pp)
 *
 * Errors: ARGUMENT (sizes, order, virtual pipeline without pp), TOPOLOGY (not divisible; pipeline groups differ). */
XD_PRIVATE xd_result xdi_topology_experts(xd_ctx *ctx, const xd_expert_desc *desc, xd_topology *dense,
                                          xd_topology *expert);

/* An axis to split. */
typedef struct xdi_unflatten_desc {
    const char *axis;     /* required */
    const xd_axis *parts; /* required; [part_count], slowest first; product as the axis */
    int part_count;
} xdi_unflatten_desc;

/* Splits one axis into several, row-major, with the same rank list. Pure. Errors: ARGUMENT, TOPOLOGY. */
XD_PRIVATE xd_result xdi_topology_unflatten(xd_ctx *ctx, const xd_topology *topology,
                                            const xdi_unflatten_desc *desc, xd_topology *out);

/* Returns the index of a named axis; -1 for an unknown name. */
XD_PRIVATE int xdi_topology_axis(const xd_topology *topology, const char *name);

/* Return the rank at a coordinate, and the inverse: false, coordinate untouched, if the rank is not a member. */
XD_PRIVATE int xdi_topology_rank(const xd_topology *topology, const int *coordinate);
XD_PRIVATE bool xdi_topology_coordinate(const xd_topology *topology, int rank, int *coordinate);

/* Returns whether axes, names and rank list are equal. */
XD_PRIVATE bool xdi_topology_equal(const xd_topology *a, const xd_topology *b);

/* The hash by which ranks compare a topology. */
XD_PRIVATE uint64_t xdi_topology_hash(const xd_topology *topology);

/* Removes the next name from the front of a list joined by ',' or '-' and returns its length; *list is NULL after
 * the last. */
XD_PRIVATE size_t xdi_topology_next(const char **list, const char **name);

/* Letters, digits and '_', not too long. */
XD_PRIVATE bool xdi_topology_name_is_valid(const char *name);

#endif
