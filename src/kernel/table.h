#ifndef XDI_KERNEL_TABLE_H
#define XDI_KERNEL_TABLE_H

#include "base/context.h"
#include "base/dtype.h"

/* A borrowed matrix of rows: element (r, c) is data[r * stride + c]. */
typedef struct xd_rows {
    void *data;
    xd_dtype dtype; /* XD_DTYPE_F32 or XD_DTYPE_BF16 for logits */
    int64_t rows, cols;
    int64_t stride; /* elements between rows; 0 -> cols */
} xd_rows;

/* First data error of an operation and how many of each kind there were. Lives in memory of the tensors' device; rides in
 * the packed exchanges, so that all ranks agree. Zero = nothing happened. */
typedef struct xd_status {
    int64_t label_out_of_range; /* rows */
    int64_t not_finite;         /* rows with non-finite logits, or gradient elements that are not finite */
    int64_t nothing_counted;    /* losses whose denominator was zero */
    int64_t overflow;           /* integer accumulators of INVARIANT mode that ran over */
    int64_t first_row;          /* row of the first finding, global where the operation knows it */
    double first_value;         /* and its value */
} xd_status;

/* How every kernel is called. */
typedef struct xd_launch {
    xd_ctx *ctx;
    void *stream; /* NULL on the CPU */
    void *
        workspace; /* device memory for the operation's partials; size from the operation's _workspace query */
    size_t workspace_bytes;
    xd_status *status; /* may be NULL */
} xd_launch;

#endif
