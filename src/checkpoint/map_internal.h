#ifndef XDI_CHECKPOINT_MAP_INTERNAL_H
#define XDI_CHECKPOINT_MAP_INTERNAL_H

#include "checkpoint/internal.h"
#include "checkpoint/map.h"
#include "io/weights.h"

/* The two sides of a map. */
enum { XDI_THEIRS = 0, XDI_OURS = 1, XDI_SIDES = 2 };

/* A box of a tensor of theirs that is a box of one of ours, turned or not. */
typedef struct xdi_mapped_piece {
    const char *theirs; /* the tensor's name */
    int64_t their;      /* of the plan's list */
    int64_t ours;       /* of the content's tensors */
    int ndim;           /* of theirs */
    int axis
        [XD_DIMS_MAX]; /* which of our dimensions a dimension of theirs is; -1 for the one that ours lacks */
    struct {
        int64_t begin[XD_DIMS_MAX], end[XD_DIMS_MAX];
    } box[XDI_SIDES];
} xdi_mapped_piece;

/* A tensor of theirs as the map makes it, and where it is. */
typedef struct xdi_mapped_tensor {
    const char *name;
    xd_dtype dtype; /* of the first weight in it */
    int ndim;
    int64_t shape[XD_DIMS_MAX];
    int64_t index; /* of the reader; -1: it is not read */
} xdi_mapped_tensor;

/* ---- map_plan.c: everything that follows from the weights and the entries ---- */

typedef struct xdi_mapped_plan {
    xd_ctx *ctx;
    const xdi_content *content;
    const xd_mapped_weights *weights;
    xdi_mapped_piece *pieces; /* [piece_count], in the order of ours */
    int64_t piece_count;
    int64_t *first;             /* [content->tensor_count + 1]: of a tensor's pieces */
    const void **order;         /* [piece_count] by tensor of one side and place in it */
    xdi_mapped_tensor *tensors; /* [tensor_count] by name */
    int64_t tensor_count;
    bool *used; /* [map_count] */
    char *text; /* names of theirs */
    size_t text_bytes;
    bool filling; /* false: counting */
} xdi_mapped_plan;

/* Local, and the same on all ranks. The plan is to be freed whatever the result. */
XD_PRIVATE xd_result xdi_mapped_plan_create(const xdi_content *content, const xd_mapped_weights *weights,
                                            bool lenient, xdi_mapped_plan *out);
XD_PRIVATE void xdi_mapped_plan_destroy(xdi_mapped_plan *plan);

/* DTYPE when weights of different types are in one tensor of theirs. */
XD_PRIVATE xd_result xdi_mapped_plan_check_types(const xdi_mapped_plan *plan);

/* Whether an entry leaves a tensor of theirs out. */
XD_PRIVATE bool xdi_mapped_leaves_out(const xd_mapped_weights *weights, const char *name);

/* ---- map_boxes.c: which of it lies where ---- */

/* A box of theirs whose elements have places in our memory that follow from their indices. */
typedef struct xdi_mapped_box {
    const xdi_mapped_piece *piece;
    int64_t begin[XD_DIMS_MAX], end[XD_DIMS_MAX];
    int64_t offset; /* of the element at begin, in elements of our memory, and from neighbour to neighbour */
    int64_t stride[XD_DIMS_MAX];
} xdi_mapped_box;

/* A list of them that is being made. */
typedef struct xdi_mapped_boxes {
    xd_region *regions;   /* [XDI_REGION_FLAT_MAX + 1] to work in */
    xdi_mapped_box *list; /* [room] NULL: they are counted only */
    int64_t count, room;
} xdi_mapped_boxes;

/* Appends the boxes of positions `range` in the dense storage of a region of our tensor `ours`, NULL for the whole; memory begins
 * with the first position. */
XD_PRIVATE void xdi_mapped_list(const xdi_mapped_plan *plan, int64_t ours, const xd_region *region,
                                xd_interval range, xdi_mapped_boxes *boxes);

/* A part of a box, and its place in the dense memory of the part (src) and in ours (dst). */
typedef struct xdi_mapped_tile {
    int64_t begin[XD_DIMS_MAX], size[XD_DIMS_MAX]; /* of theirs */
    int64_t count;
    xd_copy copy;
    bool dense; /* in both, so nothing has to be moved */
} xdi_mapped_tile;

/* The tile of at most `room` elements that begins at `at` of a box; moves `at`, which is box->begin at first. False after the
 * last. Tiles follow one another as their elements do in their tensor. */
XD_PRIVATE bool xdi_mapped_next_tile(const xdi_mapped_box *box, int64_t room, int64_t at[XD_DIMS_MAX],
                                     xdi_mapped_tile *tile);

/* ---- map_pieces.c ---- */

enum { XDI_PIECE_PATH = 4096 };

/* Where each rank writes what it has. */
typedef struct xdi_piece_files {
    const char *directory;
    size_t staging_bytes;
    const xd_weights_pair *metadata; /* [metadata_count] of every file */
    int64_t metadata_count;
} xdi_piece_files;

/* Collective. Errors: MISMATCH when an element is held by no rank or by two that are no replicas; STATE for a directory with
 * files of that kind; IO, MEMORY. */
XD_PRIVATE xd_result xdi_mapped_write_pieces(xd_comm *comm, const xdi_mapped_plan *plan,
                                             const xdi_piece_files *to);

#endif
