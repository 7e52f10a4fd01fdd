#ifndef XDI_COMM_TOPOLOGY_H
#define XDI_COMM_TOPOLOGY_H

#include "base/context.h"

/* Named axes over ranks of a group. No call communicates. Row-major; the rank at coordinate c is
 *     ranks[(c[0] * size[1] + c[1]) * size[2] + c[2] ...] */

#define XD_MESH_AXES_MAX 8
#define XD_AXIS_NAME_MAX 32 /* with terminator; letters, digits, '_' */

/* An axis. */
typedef struct xd_axis {
    const char *name; /* NULL on all axes -> no names */
    int size;         /* -1 on one axis -> ranks / product of other sizes */
} xd_axis;

/* Copies share `ranks`, which must outlive them. */
typedef struct xd_topology {
    int axis_count; /* 1 to XD_MESH_AXES_MAX */
    int size[XD_MESH_AXES_MAX];
    char name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX]; /* "" -> none */
    int rank_count;                                /* product of the sizes */
    const int *ranks;                              /* [rank_count]; NULL -> 0, 1, 2, ... */
} xd_topology;

/* Mixture-of-experts grids. */
typedef struct xd_expert_desc {
    int world_size;          /* required, except in xd_grid_create */
    int tp, cp, ep, pp;      /* 0 -> 1 */
    int expert_tp;           /* 0 -> tp */
    int optimizer_instances; /* 0 -> 1; divides dp * cp */
    int virtual_pipeline;    /* 0 -> none; needs pp > 1 */
    const char *order;       /* NULL -> "tp-cp-ep-dp-pp" */
} xd_expert_desc;

/* Returns the FNV-1a hash of data, continued from seed (0 for the first). Pure. */
XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes);

#endif
