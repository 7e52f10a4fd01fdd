#ifndef XDI_TENSOR_HALO_INTERNAL_H
#define XDI_TENSOR_HALO_INTERNAL_H

#include "tensor/halo.h"
#include "tensor/internal.h"

/* What a rank has in the plan: indices of the tensor in each dimension. Those of `wide` and `back` may be below 0 and above
 * the extent. */
typedef struct xdi_halo_part {
    xd_interval own[XD_DIMS_MAX];
    xd_interval wide[XD_DIMS_MAX]; /* with halo */
    xd_interval back[XD_DIMS_MAX]; /* of these the backward takes gradients */
    bool takes_part;               /* exchanges with this rank; false when its part is empty */
} xdi_halo_part;

/* All that the plan follows from. Temporary. */
typedef struct xdi_halo_scene {
    xd_halo_desc desc;
    int ndim, ranks, rank;
    int64_t shape[XD_DIMS_MAX];
    int pole;            /* the dimension with POLE; -1 without one */
    xdi_halo_part *part; /* [ranks] */
} xdi_halo_scene;

/* Where an index of a dimension lies. */
enum { XDI_HALO_INSIDE = 0, XDI_HALO_BEFORE, XDI_HALO_AFTER, XDI_HALO_ZONES };

/* A stretch of one dimension of a part with halo: positions [at, at + count) are the indices from, from + step, ... */
typedef struct xdi_halo_stretch {
    int64_t at, count, from;
    int step; /* 1, -1; 0: zeros */
    int zone;
} xdi_halo_stretch;

enum { XDI_HALO_STRETCHES = 2 * XDI_HALO_ZONES };

/* Goes over the boxes that a rank takes from the part of another, or of itself. `turned` lists are those beyond a pole. */
typedef struct xdi_halo_walk {
    int ndim;
    bool zeros; /* instead: the boxes that nobody holds */
    xdi_halo_stretch list[2][XD_DIMS_MAX][XDI_HALO_STRETCHES];
    int count[2][XD_DIMS_MAX];
    int turned, turns;
    int at[XD_DIMS_MAX];
} xdi_halo_walk;

typedef struct xdi_halo_box {
    xdi_halo_stretch dim[XD_DIMS_MAX];
} xdi_halo_box;

/* halo_map.c: the boxes of the indices `listed` of a rank `taker` that `owner` holds, in an order that both compute alike;
 * owner NULL: those that are zeros. */
XD_PRIVATE void xdi_halo_walk_begin(xdi_halo_walk *walk, const xdi_halo_scene *scene,
                                    const xdi_halo_part *taker, const xd_interval *listed,
                                    const xdi_halo_part *owner);
XD_PRIVATE bool xdi_halo_walk_next(xdi_halo_walk *walk, xdi_halo_box *box);

/* halo_map.c: what a desc has wrong, and the facts that follow from it but for the parts. */
XD_PRIVATE xd_result xdi_halo_check(xd_ctx *ctx, const xd_halo_desc *desc, int ranks, int rank,
                                    xdi_halo_scene *scene);

/* halo_map.c: the part of every rank; UNSUPPORTED for one that is no box. */
XD_PRIVATE xd_result xdi_halo_parts(xd_ctx *ctx, xdi_halo_scene *scene);

/* The strided copies of a plan, by what they move. */
typedef enum xdi_halo_list {
    XDI_HALO_PACK = 0,      /* part -> message */
    XDI_HALO_LOCAL,         /* part -> wide */
    XDI_HALO_ZEROS,         /* a zero -> wide */
    XDI_HALO_UNPACK,        /* message -> wide */
    XDI_HALO_BACK_PACK,     /* wide -> message */
    XDI_HALO_BACK_OWN,      /* wide -> part */
    XDI_HALO_BACK_LOCAL,    /* wide -> terms */
    XDI_HALO_BACK_RECEIVED, /* message -> terms */
    XDI_HALO_BACK_SUMS,     /* terms -> part */
    XDI_HALO_LISTS
} xdi_halo_list;

/* Messages to or from all ranks. */
typedef struct xdi_halo_lane {
    int64_t *counts, *displacements; /* [ranks] */
    int64_t total;
    /* messages are where they are needed: nothing is packed, and displacements are those in the part */
    bool direct;
} xdi_halo_lane;

enum { XDI_HALO_SEND = 0, XDI_HALO_RECV, XDI_HALO_BACK_SEND, XDI_HALO_BACK_RECV, XDI_HALO_LANES };

/* Cells of this rank's part to which equally many terms belong, one behind the other, once for each term. */
typedef struct xdi_halo_sum {
    int terms;
    int64_t at, count; /* elements: of the first term; of each */
} xdi_halo_sum;

/* What is left of a plan. */
typedef struct xdi_halo_plan {
    xdi_halo_lane lane[XDI_HALO_LANES];
    xd_copy *copies[XDI_HALO_LISTS];
    int64_t copy_count[XDI_HALO_LISTS];
    xdi_halo_sum *sums;
    int sum_count, term_most;
    int64_t term_count; /* elements of all terms */
} xdi_halo_plan;

/* A message, or an image within this rank, whose elements are added to a box of its part. */
typedef struct xdi_halo_block {
    int64_t lo[XD_DIMS_MAX], hi[XD_DIMS_MAX]; /* indices of the part */
    int64_t offset,
        stride[XD_DIMS_MAX];  /* where the element of lo is, and how far those of the next indices */
    int zone, rank, sequence; /* the order of terms */
    bool received;
} xdi_halo_block;

/* Memory of the making of a plan. */
typedef struct xdi_halo_making {
    const xdi_halo_scene *scene;
    xdi_halo_plan *plan;
    xdi_halo_block *blocks; /* NULL: they are counted */
    const xdi_halo_block **order;
    int64_t *cuts;   /* [ndim][2 blocks] */
    int64_t *totals; /* [blocks + 2] elements of cells by their number of terms; then their places */
    int block_count, block_room;
    bool decided; /* which lanes are direct */
} xdi_halo_making;

/* halo_plan.c: goes through everything. Copies and sums are written where plan->copies and plan->sums are not NULL, and counted. */
XD_PRIVATE void xdi_halo_make(xdi_halo_making *making);

/* halo_cells.c: the cells of the part, their copies and sums. */
XD_PRIVATE void xdi_halo_cells(xdi_halo_making *making);

/* halo_map.c: a box's copy between two places with these offsets and strides; and the same, appended to a list. */
typedef struct xdi_halo_side {
    int64_t offset, stride[XD_DIMS_MAX];
} xdi_halo_side;
XD_PRIVATE xd_copy xdi_halo_copy_of(int ndim, const int64_t *extent, const xdi_halo_side *src,
                                    const xdi_halo_side *dst);
XD_PRIVATE void xdi_halo_copy(xdi_halo_plan *plan, xdi_halo_list list, int ndim, const int64_t *extent,
                              const xdi_halo_side *src, const xdi_halo_side *dst);

/* halo_map.c: strides of a dense box, of these extents or of the indices of a part. */
XD_PRIVATE void xdi_halo_dense(int ndim, const int64_t *extent, int64_t *stride);
XD_PRIVATE void xdi_halo_strides(int ndim, const xd_interval *interval, int64_t *stride);

/* Indices of an interval. */
static inline int64_t xdi_halo_length(xd_interval i) {
    return i.end - i.begin;
}

#endif
