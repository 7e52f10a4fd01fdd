#ifndef XDI_TENSOR_LAYOUT_H
#define XDI_TENSOR_LAYOUT_H

#include "comm/mesh.h"
#include "tensor/region.h"

/* How a tensor is distributed over a mesh: a pure function of metadata that every rank has, so every rank can
 * compute the part of any rank without communication. */

/* What one mesh axis does with a tensor. */
typedef enum xd_placement_kind {
    XD_REPLICATE = 0, /* every rank of the axis holds the same elements */
    XD_SHARD,         /* the ranks of the axis split a dimension */
    XD_PARTIAL        /* the value is `op` over what the ranks of the axis hold */
} xd_placement_kind;

/* The placement of a tensor on one mesh axis. A split divides the part that earlier splits of the same dimension
 * gave to the rank, into blocks by xd_chunk unless another form is chosen. */
typedef struct xd_placement {
    xd_placement_kind kind;
    int dim;                      /* SHARD: tensor dimension; negative counts from the end */
    xd_reduce_op op;              /* PARTIAL */
    const int64_t *offsets;       /* SHARD: [axis size + 1] from 0 to the extent, ascending; NULL -> chunks */
    int sections;                 /* SHARD: fused parts back to back, each split by itself; 0 -> 1 */
    const int64_t *section_sizes; /* [sections], their sum is the extent; NULL -> equal */
    bool balanced; /* SHARD: 2n equal blocks, coordinate r holds blocks r and 2n-1-r (causal attention) */
} xd_placement;

/* What to build a layout from. Read during the call only. */
typedef struct xd_layout_desc {
    int ndim;                                 /* 0 is a scalar */
    int64_t shape[XD_DIMS_MAX];               /* of the whole tensor; 0 from ndim on, as in every such pair */
    const xd_topology *topology;              /* required; xd_mesh_topology(mesh) */
    xd_placement placement[XD_MESH_AXES_MAX]; /* one for each mesh axis; zero -> REPLICATE */
    /* Mesh axes in the order in which they split; all zero -> left to right. FSDP over TP: TP first. */
    int order[XD_MESH_AXES_MAX];
} xd_layout_desc;

typedef struct xd_layout xd_layout; /* immutable */

/* Creates a layout. desc and all it points to are copied.
 *
 * Local. Errors: ARGUMENT (dimensions, order, offsets not ascending, two forms of one split), SHAPE (offsets
 * or sections that do not end at the extent, an extent that `balanced` or equal sections do not divide, more
 * than 2^62 elements), UNSUPPORTED (two different partial ops; more than XD_LAYOUT_INTERVALS_MAX intervals),
 * MEMORY. */
XD_API xd_result xd_layout_create(xd_ctx *ctx, const xd_layout_desc *desc, xd_layout **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_layout_destroy(xd_layout *layout);

/* The desc with defaults filled in and pointers to the layout's own copies. */
XD_API const xd_layout_desc *xd_layout_settings(const xd_layout *layout);

/* What a rank holds; false for a rank outside the mesh, whose region is empty. A split of nothing gives an
 * empty region, never an error. */
XD_API bool xd_layout_region(const xd_layout *layout, int rank, xd_region *out);

/* Elements of the whole tensor. */
XD_API int64_t xd_layout_numel(const xd_layout *layout);

/* The same shape on the same ranks with every axis REPLICATE, or on one rank alone. Errors: ARGUMENT for
 * a negative rank, MEMORY. */
XD_API xd_result xd_layout_replicated(xd_ctx *ctx, const xd_layout *layout, xd_layout **out);
XD_API xd_result xd_layout_on_rank(xd_ctx *ctx, const xd_layout *layout, int rank, xd_layout **out);

/* Hash of everything that decides which rank holds an element; ranks compare it. */
XD_API uint64_t xd_layout_hash(const xd_layout *layout);

#endif
