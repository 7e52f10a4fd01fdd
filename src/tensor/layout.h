#ifndef XDI_TENSOR_LAYOUT_H
#define XDI_TENSOR_LAYOUT_H

#include "comm/mesh.h"
#include "tensor/region.h"

/* How a mesh holds a tensor. No call communicates. */

/* On one mesh axis. */
typedef enum xd_placement_kind {
    XD_REPLICATE = 0, /* all ranks hold the same */
    XD_SHARD,         /* ranks split `dim` */
    XD_PARTIAL        /* the value is `op` over all ranks' data */
} xd_placement_kind;

/* A split divides what earlier splits of its dimension left, by xd_chunk unless a field says otherwise. */
typedef struct xd_placement {
    xd_placement_kind kind;
    int dim;                      /* SHARD: negative counts from the end */
    xd_reduce_op op;              /* PARTIAL */
    const int64_t *offsets;       /* SHARD: [axis size + 1], 0 to the extent, ascending; NULL -> chunks */
    int sections;                 /* SHARD: fused parts, each split; 0 -> 1 */
    const int64_t *section_sizes; /* [sections], sum: extent; NULL -> equal */
    bool balanced;                /* SHARD: coordinate r of n holds blocks r and 2n-1-r of 2n */
} xd_placement;

/* Describes a layout. */
typedef struct xd_layout_desc {
    int ndim;                                 /* 0: scalar */
    int64_t shape[XD_DIMS_MAX];               /* whole; 0 from ndim on */
    const xd_topology *topology;              /* required; xd_mesh_topology(mesh), or hand-written */
    xd_placement placement[XD_MESH_AXES_MAX]; /* by mesh axis; zero -> REPLICATE */
    /* Axes in splitting order; all zero -> left to right. */
    int order[XD_MESH_AXES_MAX];
} xd_layout_desc;

typedef struct xd_layout xd_layout; /* immutable */

/* Creates a layout; copies all. Local.
 * Errors: ARGUMENT (dimensions, topology, order, offsets not ascending, two forms of one split), TOPOLOGY (rank_count
 * is not the product of the sizes), SHAPE (offsets or sections do not end at the extent; `balanced` or equal sections
 * do not divide it; more than 2^62 elements), UNSUPPORTED (two partial ops; more than XD_LAYOUT_INTERVALS_MAX
 * intervals), MEMORY. */
XD_API xd_result xd_layout_create(xd_ctx *ctx, const xd_layout_desc *desc, xd_layout **out);

/* Frees it. Local. */
XD_API void xd_layout_destroy(xd_layout *layout);

/* Returns the desc with defaults and the layout's own copies of lists. */
XD_API const xd_layout_desc *xd_layout_settings(const xd_layout *layout);

/* Returns a rank's part; empty for an empty split. False and empty outside the mesh. */
XD_API bool xd_layout_region(const xd_layout *layout, int rank, xd_region *out);

#endif
