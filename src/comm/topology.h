#ifndef XDI_COMM_TOPOLOGY_H
#define XDI_COMM_TOPOLOGY_H

#include "base/context.h"

/* How ranks are arranged: named axes over a list of ranks. Pure metadata: no call here communicates, so any
 * topology can be computed and tested on one machine for any number of ranks. A rank is an index into the
 * group that a mesh is made over.
 *
 * Row-major: the last axis varies fastest. The rank at coordinate c is
 *     ranks[(c[0] * size[1] + c[1]) * size[2] + c[2] ...] */

#define XD_MESH_AXES_MAX 8
#define XD_AXIS_NAME_MAX 32 /* with its terminator; letters, digits and '_' */

/* One named axis of a mesh. */
typedef struct xd_axis {
    const char *name; /* NULL -> no name; either all axes of a mesh have a name or none has */
    int size;         /* -1, on at most one axis -> number of ranks / product of the other sizes */
} xd_axis;

/* A plain value; copies share `ranks`, which must outlive them. */
typedef struct xd_topology {
    int axis_count; /* 0 -> no mesh at all (see xd_topology_from_config) */
    int size[XD_MESH_AXES_MAX];
    char name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX]; /* "" -> no name */
    int rank_count;                                /* product of the sizes */
    const int *ranks;                              /* [rank_count], row-major; NULL -> 0, 1, 2, ... */
} xd_topology;

/* Axes and the ranks that they order. */
typedef struct xd_topology_desc {
    const xd_axis *axes; /* required; [axis_count], slowest first when there is no order */
    int axis_count;
    const char *order; /* axis names joined by '-', the leftmost with stride 1 ("tp-cp-ep-dp-pp"); `axes`
                        * may then be in any order, and an axis of size 1 that `order` leaves out becomes
                        * the slowest. NULL -> none */
    const int *ranks;  /* [rank_count] distinct ranks below world_size; NULL -> the whole world in order */
    int rank_count;
    int world_size; /* required */
} xd_topology_desc;

/* Axes over a world of world_size ranks. Borrows desc->ranks. Pure.
 *
 * Errors: ARGUMENT (names, sizes, two axes of size -1, repeated or unknown ranks; an order in which a name is unknown or
 * repeated, that leaves out an axis of size above 1, or with "cp" and "ep" both above 1), TOPOLOGY (the product of the
 * sizes is not the number of ranks, or, with a size of -1, does not divide it). */
XD_API xd_result xd_topology_create(xd_ctx *ctx, const xd_topology_desc *desc, xd_topology *out);

/* What happens over the data axis in the configuration form. */
typedef enum xd_data_parallel {
    XD_DATA_PARALLEL_NONE = 0,
    XD_DATA_PARALLEL_DDP,
    XD_DATA_PARALLEL_FSDP2
} xd_data_parallel;

/* The configuration form: axes (dp, tp, domain), domain fastest. */
typedef struct xd_parallelism {
    xd_data_parallel data; /* what happens over dp */
    int tensor;            /* 0 -> 1 */
    int domain;            /* 0 -> 1 */
    bool replicas;         /* allow data NONE with dp > 1: replicas that never communicate */
} xd_parallelism;

/* Has the active axes only: dp when data is not NONE or dp > 1 (even of size 1, beside another axis), tp and
 * domain when > 1. Without an active axis, or with a single one of size 1, there is no mesh: axis_count is 0.
 * Errors: ARGUMENT (sizes below 0), TOPOLOGY (does not divide the world; data NONE with dp > 1 and not
 * `replicas`). */
XD_API xd_result xd_topology_from_config(xd_ctx *ctx, const xd_parallelism *desc, int world_size,
                                         xd_topology *out);

/* The two grids of a mixture-of-experts run over one world. */
typedef struct xd_expert_desc {
    int world_size;          /* required, but in xd_grid_create */
    int tp, cp, ep, pp;      /* 0 -> 1 */
    int expert_tp;           /* 0 -> tp */
    int optimizer_instances; /* 0 -> 1; must divide dp * cp */
    int virtual_pipeline;    /* 0 -> none; needs pp > 1 */
    const char *order;       /* NULL -> "tp-cp-ep-dp-pp" */
} xd_expert_desc;

/* The axes of dense: tp cp ep=1 dp pp with dp = world / (tp cp pp); of expert: tp=expert_tp cp=1 ep dp pp with
 * dp = world / (expert_tp ep pp). Both outputs are untouched on failure.
 * Errors: ARGUMENT (sizes, order, virtual pipeline without pp), TOPOLOGY (not divisible; the pipeline groups
 * of the two grids differ). */
XD_API xd_result xd_topology_experts(xd_ctx *ctx, const xd_expert_desc *desc, xd_topology *dense,
                                     xd_topology *expert);

/* One axis that becomes several. */
typedef struct xd_unflatten_desc {
    const char *axis;     /* required; the one to split */
    const xd_axis *parts; /* required; [part_count], slowest first; the product of their sizes is that of
                           * the axis */
    int part_count;
} xd_unflatten_desc;

/* Splits one axis into several with the same product, row-major; the rank list stays. Pure. Errors: ARGUMENT,
 * TOPOLOGY. */
XD_API xd_result xd_topology_unflatten(xd_ctx *ctx, const xd_topology *topology,
                                       const xd_unflatten_desc *desc, xd_topology *out);

/* Index of the axis of that name; -1 for an unknown name. */
XD_API int xd_topology_axis(const xd_topology *topology, const char *name);

/* The set of axes in a list of names joined by ',' or '-', bit i for axis i; the order inside the list does
 * not matter. Errors: ARGUMENT (unnamed axes, unknown, empty or repeated name). */
XD_API xd_result xd_topology_axes(xd_ctx *ctx, const xd_topology *topology, const char *names,
                                  unsigned *mask);

/* Rank at a coordinate, and the inverse: false when the rank is not a member (coordinate is then untouched). */
XD_API int xd_topology_rank(const xd_topology *topology, const int *coordinate);
XD_API bool xd_topology_coordinate(const xd_topology *topology, int rank, int *coordinate);

/* All groups over the named axes: every other axis fixed, the named ones varying, members and groups in
 * row-major order.
 *
 *   ranks        [rank_count], the groups back to back
 *   group_size   ranks in each group
 *
 * Errors: as xd_topology_axes. */
XD_API xd_result xd_topology_groups(xd_ctx *ctx, const xd_topology *topology, const char *names, int *ranks,
                                    int *group_size);

/* As above with the axes as bits. Returns the group size. */
XD_API int xd_topology_groups_of(const xd_topology *topology, unsigned mask, int *ranks);

/* Same axes, names and rank list. */
XD_API bool xd_topology_equal(const xd_topology *a, const xd_topology *b);

/* 64-bit FNV-1a, continued from seed (0 to start), and the hash of a topology by which ranks compare theirs. */
XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes);
XD_API uint64_t xd_topology_hash(const xd_topology *topology);

#endif
