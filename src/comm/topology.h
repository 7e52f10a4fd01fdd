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
    int axis_count; /* 0 -> no mesh (xdi_topology_from_config) */
    int size[XD_MESH_AXES_MAX];
    char name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX]; /* "" -> no name */
    int rank_count;                                /* product of the sizes */
    const int *ranks;                              /* [rank_count], row-major; NULL -> 0, 1, 2, ... */
} xd_topology;

/* The two grids of a mixture of experts over one world. */
typedef struct xd_expert_desc {
    int world_size;          /* required, except in xd_grid_create */
    int tp, cp, ep, pp;      /* 0 -> 1 */
    int expert_tp;           /* 0 -> tp */
    int optimizer_instances; /* 0 -> 1; divides dp * cp */
    int virtual_pipeline;    /* 0 -> none; needs pp > 1 */
    const char *order;       /* NULL -> "tp-cp-ep-dp-pp" */
} xd_expert_desc;

/* Returns the 64-bit FNV-1a hash of bytes, continued from seed (0 to start). Pure. */
XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes);

#endif
