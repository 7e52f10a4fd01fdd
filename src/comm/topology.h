#ifndef XDI_COMM_TOPOLOGY_H
#define XDI_COMM_TOPOLOGY_H

#include "base/context.h"

/* Named axes over ranks, which are indices into the mesh's group. No call communicates: one machine can compute any topology.
 *
 * Row-major, the last axis fastest. The rank at coordinate c is
 *     ranks[(c[0] * size[1] + c[1]) * size[2] + c[2] ...] */

#define XD_MESH_AXES_MAX 8
#define XD_AXIS_NAME_MAX 32 /* with terminator; letters, digits and '_' */

/* One named axis of a mesh. */
typedef struct xd_axis {
    const char *name; /* NULL -> no name, then on all axes */
    int size;         /* -1, at most once -> number of ranks / other sizes */
} xd_axis;

/* A value; copies share `ranks`, which must outlive them. */
typedef struct xd_topology {
    int axis_count; /* 0 -> no mesh (xd_topology_from_config) */
    int size[XD_MESH_AXES_MAX];
    char name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX]; /* "" -> no name */
    int rank_count;                                /* product of the sizes */
    const int *ranks;                              /* [rank_count], row-major; NULL -> 0, 1, 2, ... */
} xd_topology;

/* Axes and their ranks. */
typedef struct xd_topology_desc {
    const xd_axis *axes; /* required; [axis_count], slowest first without an order */
    int axis_count;
    /* Axis names joined by '-', the leftmost with stride 1 ("tp-cp-ep-dp-pp"); `axes` may then have any order. Omitted axes
     * of size 1 become slowest. NULL -> none. */
    const char *order;
    const int *ranks; /* [rank_count] distinct ranks < world_size; NULL -> the world in order */
    int rank_count;
    int world_size; /* required */
} xd_topology_desc;

/* Creates axes over world_size ranks. Borrows desc->ranks. Pure.
 *
 * Errors: ARGUMENT (names; sizes; two of -1; repeated or unknown ranks; order: unknown or repeated names, omitted axes above
 * 1, "cp" and "ep" above 1), TOPOLOGY (sizes do not fit the number of ranks). */
XD_API xd_result xd_topology_create(xd_ctx *ctx, const xd_topology_desc *desc, xd_topology *out);

/* Use of the data axis in the configuration form. */
typedef enum xd_data_parallel {
    XD_DATA_PARALLEL_NONE = 0,
    XD_DATA_PARALLEL_DDP,
    XD_DATA_PARALLEL_FSDP2
} xd_data_parallel;

/* The configuration form: axes (dp, tp, domain), domain fastest. */
typedef struct xd_parallelism {
    xd_data_parallel data; /* of dp */
    int tensor;            /* 0 -> 1 */
    int domain;            /* 0 -> 1 */
    bool replicas;         /* allow data NONE with dp > 1: ranks do not communicate */
} xd_parallelism;

/* Creates the active axes: tp and domain if > 1, dp if > 1 or data is not NONE. No axis, or only one of size 1: no mesh,
 * axis_count 0.
 * Errors: ARGUMENT (sizes < 0), TOPOLOGY (does not divide the world; data NONE with dp > 1 without `replicas`). */
XD_API xd_result xd_topology_from_config(xd_ctx *ctx, const xd_parallelism *desc, int world_size,
                                         xd_topology *out);

/* The two grids of a mixture of experts over one world. */
typedef struct xd_expert_desc {
    int world_size;          /* required, except in xd_grid_create */
    int tp, cp, ep, pp;      /* 0 -> 1 */
    int expert_tp;           /* 0 -> tp */
    int optimizer_instances; /* 0 -> 1; divides dp * cp */
    int virtual_pipeline;    /* 0 -> none; needs pp > 1 */
    const char *order;       /* NULL -> "tp-cp-ep-dp-pp" */
} xd_expert_desc;

/* Creates two grids, both untouched on failure.
 *
 *   dense    tp cp ep=1 dp pp, dp = world / (tp cp pp)
 *   expert   tp=expert_tp cp=1 ep dp pp, dp = world / (expert_tp ep pp)
 *
 * Errors: ARGUMENT (sizes, order, virtual pipeline without pp), TOPOLOGY (not divisible; pipeline groups differ). */
XD_API xd_result xd_topology_experts(xd_ctx *ctx, const xd_expert_desc *desc, xd_topology *dense,
                                     xd_topology *expert);

/* An axis to split. */
typedef struct xd_unflatten_desc {
    const char *axis;     /* required */
    const xd_axis *parts; /* required; [part_count], slowest first; product as the axis */
    int part_count;
} xd_unflatten_desc;

/* Splits one axis into several, row-major, with the same rank list. Pure. Errors: ARGUMENT, TOPOLOGY. */
XD_API xd_result xd_topology_unflatten(xd_ctx *ctx, const xd_topology *topology,
                                       const xd_unflatten_desc *desc, xd_topology *out);

/* Returns the index of a named axis; -1 for an unknown name. */
XD_API int xd_topology_axis(const xd_topology *topology, const char *name);

/* Converts axis names joined by ',' or '-', in any order, to bits: bit i for axis i. Errors: ARGUMENT (unnamed axes, unknown,
 * empty or repeated name). */
XD_API xd_result xd_topology_axes(xd_ctx *ctx, const xd_topology *topology, const char *names,
                                  unsigned *mask);

/* Return the rank at a coordinate, and the inverse: false, coordinate untouched, if the rank is not a member. */
XD_API int xd_topology_rank(const xd_topology *topology, const int *coordinate);
XD_API bool xd_topology_coordinate(const xd_topology *topology, int rank, int *coordinate);

/* Lists the groups over the named axes, other axes fixed; members and groups in row-major order.
 *
 *   ranks        [rank_count], group after group
 *   group_size   ranks per group
 *
 * Errors: as xd_topology_axes. */
XD_API xd_result xd_topology_groups(xd_ctx *ctx, const xd_topology *topology, const char *names, int *ranks,
                                    int *group_size);

/* As above with axes as bits. Returns the group size. */
XD_API int xd_topology_groups_of(const xd_topology *topology, unsigned mask, int *ranks);

/* Returns whether axes, names and rank list are equal. */
XD_API bool xd_topology_equal(const xd_topology *a, const xd_topology *b);

/* 64-bit FNV-1a, continued from seed (0 to start); and the hash by which ranks compare a topology. */
XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes);
XD_API uint64_t xd_topology_hash(const xd_topology *topology);

#endif
