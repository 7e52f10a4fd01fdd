#ifndef XDI_TENSOR_INTERNAL_H
#define XDI_TENSOR_INTERNAL_H

#include "base/internal.h"
#include "comm/internal.h"
#include "tensor/fill.h"
#include "tensor/interval_internal.h"
#include "tensor/layout.h"
#include "tensor/part.h"

/* fill.c: xd_tensor_part_fill without checks; elements whose index in the whole is not below `limit` become 0. */
XD_PRIVATE xd_result xdi_part_fill(xd_ctx *ctx, const xd_tensor_part *part, const xd_init *init,
                                   const xd_philox *random, int64_t limit);

/* interval.c: ARGUMENT when entries of a shape from ndim on, which is at most XD_DIMS_MAX, are not 0: a dimension that ndim leaves out. */
XD_PRIVATE xd_result xdi_shape_check_rest(xd_ctx *ctx, const char *name, int ndim, const int64_t *shape);
/* interval.c: "[3, 4]" into text[XDI_SHAPE_TEXT], which is returned. */
enum { XDI_SHAPE_TEXT = 22 * XD_DIMS_MAX + 3 };
XD_PRIVATE const char *xdi_shape_print(int ndim, const int64_t *shape, char *text);

/* fill.c: the errors of a region and a range that are not within a tensor, and of elements at NULL. */
XD_PRIVATE xd_result xdi_part_check_region(xd_ctx *ctx, const xd_tensor_part *part);

/* fill.c: whether an entry of `count` elements is that of a part: as many, or more where the part ends its region and what
 * follows are rows of padding. */
XD_PRIVATE bool xdi_part_fits(const xd_tensor_part *part, int64_t count);

/* runs.c: the elements from `position` of a part's region on that are adjacent in the whole tensor and in the part: their number,
 * and in *index the first one's in the whole tensor. */
XD_PRIVATE int64_t xdi_part_run(const xd_tensor_part *part, int64_t position, int64_t *index);

/* runs.c: the first position of a part whose element has at least this index, the end of its range if none has: indices ascend with
 * positions. */
XD_PRIVATE int64_t xdi_part_position(const xd_tensor_part *part, int64_t index);

/* tensor.c: bytes of the dense part of `rank`; 0 also when they exceed size_t. */
XD_PRIVATE size_t xdi_tensor_bytes(const xd_layout *layout, int rank, xd_dtype dtype);

/* layout.c: elements of the whole tensor. */
XD_PRIVATE int64_t xdi_layout_numel(const xd_layout *layout);

/* layout.c: the same shape on the same ranks, every axis REPLICATE; or on one rank. Errors: ARGUMENT (negative rank), MEMORY. */
XD_PRIVATE xd_result xdi_layout_replicated(xd_ctx *ctx, const xd_layout *layout, xd_layout **out);
XD_PRIVATE xd_result xdi_layout_on_rank(xd_ctx *ctx, const xd_layout *layout, int rank, xd_layout **out);

/* layout.c: hash of all that decides which rank holds an element, for comparison between ranks. */
XD_PRIVATE uint64_t xdi_layout_hash(const xd_layout *layout);

/* layout.c: all of a layout: 4, 4 for each axis and 1 for each dimension, so that two fit into one list. */
XD_PRIVATE void xdi_facts_layout(xdi_facts *facts, const xd_layout *layout);

/* fill.c: the errors of first values that cannot be formed in a dtype. */
XD_PRIVATE xd_result xdi_init_check(xd_ctx *ctx, const char *name, xd_dtype dtype, const xd_init *init);

#endif
