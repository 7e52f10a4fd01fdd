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

/* Use of the data axis in the configuration form. */
typedef enum xdi_data_parallel {
    XDI_DATA_PARALLEL_NONE = 0,
    XDI_DATA_PARALLEL_DDP,
    XDI_DATA_PARALLEL_FSDP2
} xdi_data_parallel;

/* The configuration form: axes (dp, tp, domain), domain fastest. */
typedef struct xdi_parallelism {
    xdi_data_parallel data; /* of dp */
    int tensor;             /* 0 -> 1 */
    int domain;             /* 0 -> 1 */
    bool replicas;          /* allow data NONE with dp > 1: ranks do not communicate */
} xdi_parallelism;

/* Creates the active axes: tp and domain if > 1, dp if > 1 or data is not NONE. No axis, or only one of size 1: no mesh,
 * axis_count 0.
 * Errors: ARGUMENT (sizes < 0), TOPOLOGY (does not divide the world; data NONE with dp > 1 without `replicas`). */
XD_PRIVATE xd_result xdi_topology_from_config(xd_ctx *ctx, const xdi_parallelism *desc, int world_size,
                                              xd_topology *out);

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

/* Converts axis names joined by ',' or '-', in any order, to bits: bit i for axis i. Errors: ARGUMENT (unnamed axes, unknown,
 * empty or repeated name). */
XD_PRIVATE xd_result xdi_topology_axes(xd_ctx *ctx, const xd_topology *topology, const char *names,
                                       unsigned *mask);

/* Return the rank at a coordinate, and the inverse: false, coordinate untouched, if the rank is not a member. */
XD_PRIVATE int xdi_topology_rank(const xd_topology *topology, const int *coordinate);
XD_PRIVATE bool xdi_topology_coordinate(const xd_topology *topology, int rank, int *coordinate);

/* Lists the groups over the named axes, other axes fixed; members and groups in row-major order.
 *
 *   ranks        [rank_count], group after group
 *   group_size   ranks per group
 *
 * Errors: as xdi_topology_axes. */
XD_PRIVATE xd_result xdi_topology_groups(xd_ctx *ctx, const xd_topology *topology, const char *names,
                                         int *ranks, int *group_size);

/* As above with axes as bits. Returns the group size. */
XD_PRIVATE int xdi_topology_groups_of(const xd_topology *topology, unsigned mask, int *ranks);

/* Returns whether axes, names and rank list are equal. */
XD_PRIVATE bool xdi_topology_equal(const xd_topology *a, const xd_topology *b);

/* The hash by which ranks compare a topology. */
XD_PRIVATE uint64_t xdi_topology_hash(const xd_topology *topology);

/* removes the next name from the front of a list joined by ',' or '-' and returns its length; *list is NULL
 * after the last. */
XD_PRIVATE size_t xdi_topology_next(const char **list, const char **name);

/* letters, digits and '_', not too long. */
XD_PRIVATE bool xdi_topology_name_is_valid(const char *name);

#endif
