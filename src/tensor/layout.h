#ifndef XDI_TENSOR_LAYOUT_H
#define XDI_TENSOR_LAYOUT_H

#include "comm/mesh.h"
#include "tensor/region.h"

/* A layout says how a mesh holds a tensor. Every rank can compute the part of any rank without communication. */

/* Placement on one mesh axis. */
typedef enum xd_placement_kind {
    XD_REPLICATE = 0, /* every rank holds the same elements */
    XD_SHARD,         /* the ranks split a dimension */
    XD_PARTIAL        /* the value is `op` over the ranks' elements */
} xd_placement_kind;

/* The placement on one mesh axis. A split divides the part left by earlier splits of its dimension, by xd_chunk unless a
 * field says otherwise. */
typedef struct xd_placement {
    xd_placement_kind kind;
    int dim;                      /* SHARD: negative counts from the end */
    xd_reduce_op op;              /* PARTIAL */
    const int64_t *offsets;       /* SHARD: [axis size + 1] from 0 to the extent, ascending; NULL -> chunks */
    int sections;                 /* SHARD: adjacent fused parts, each split separately; 0 -> 1 */
    const int64_t *section_sizes; /* [sections], sum is the extent; NULL -> equal */
    bool balanced; /* SHARD: coordinate r of n holds blocks r and 2n-1-r of 2n (causal attention) */
} xd_placement;

/* Describes a layout. Read during the call only. */
typedef struct xd_layout_desc {
    int ndim;                                 /* 0 is a scalar */
    int64_t shape[XD_DIMS_MAX];               /* of the whole tensor; 0 from ndim on, here and elsewhere */
    const xd_topology *topology;              /* required; xd_mesh_topology(mesh), or written by hand */
    xd_placement placement[XD_MESH_AXES_MAX]; /* one for each mesh axis; zero -> REPLICATE */
    /* Mesh axes in splitting order; all zero -> left to right. FSDP over TP: TP first. */
    int order[XD_MESH_AXES_MAX];
} xd_layout_desc;

typedef struct xd_layout xd_layout; /* immutable */

/* Creates a layout; copies desc and all it points to.
 *
 * Local. Errors: ARGUMENT (dimensions, topology, order, offsets not ascending, two forms of one split), SHAPE (offsets or sections do
 * not end at the extent; `balanced` or equal sections do not divide it; more than 2^62 elements), UNSUPPORTED (two partial
 * ops; more than XD_LAYOUT_INTERVALS_MAX intervals), MEMORY. */
XD_API xd_result xd_layout_create(xd_ctx *ctx, const xd_layout_desc *desc, xd_layout **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_layout_destroy(xd_layout *layout);

/* Returns the desc with defaults and the layout's own copies. */
XD_API const xd_layout_desc *xd_layout_settings(const xd_layout *layout);

/* Returns what a rank holds; an empty split gives an empty region. False and empty for a rank outside the mesh. */
XD_API bool xd_layout_region(const xd_layout *layout, int rank, xd_region *out);

#endif
