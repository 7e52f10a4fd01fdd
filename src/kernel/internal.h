#ifndef XDI_KERNEL_INTERNAL_H
#define XDI_KERNEL_INTERNAL_H

#include <math.h>
#include <string.h>

#include "base/half.h"
#include "base/internal.h"
#include "kernel/copy.h"
#include "kernel/fixed.h"
#include "kernel/loss.h"
#include "kernel/matmul.h"
#include "kernel/mft.h"
#include "kernel/rows.h"
#include "kernel/softmax.h"
#include "kernel/uld.h"
#include "kernel/xtoken.h"

/* gcc would fuse the difference of two products; without fusing it is exactly 0 for equal products. */
#if defined(__clang__)
#    define XDI_SIMD_AS_WRITTEN
#else
#    define XDI_SIMD_AS_WRITTEN __attribute__((optimize("fp-contract=off")))
#endif
#define XDI_SIMD_128 XDI_SIMD_AS_WRITTEN static
#define XDI_SIMD_INLINE static inline __attribute__((always_inline))

/* Elements of logits and gradients; f32 is the common case. */
static inline double xdi_loss_load(const xd_rows *x, int64_t row, int64_t column) {
    const int64_t i = row * (x->stride ? x->stride : x->cols) + column;
    if (x->dtype == XD_DTYPE_F32) return (double)((const float *)x->data)[i];
    return xd_load_f64(x->data, x->dtype, i);
}

static inline void xdi_loss_store(const xd_rows *x, int64_t row, int64_t column, double value) {
    const int64_t i = row * (x->stride ? x->stride : x->cols) + column;
    if (x->dtype == XD_DTYPE_F32)
        ((float *)x->data)[i] = (float)value;
    else
        xd_store_f64(x->data, x->dtype, i, value);
}

/* The index of the first of `count` ascending numbers that is not less than `value`; count when there is none. */
static inline int64_t xdi_lower_bound(const int64_t *ascending, int64_t count, int64_t value) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (ascending[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The ids from index `at` on. */
static inline xd_ids xdi_ids_from(xd_ids ids, int64_t at) {
    ids.data = (const char *)ids.data + (size_t)at * (ids.dtype == XD_DTYPE_I32 ? 4 : 8);
    return ids;
}

/* x - reference, where a shard of only -infinity has -infinity as its reference. */
static inline double xdi_loss_minus(double x, double reference) {
    return reference == -INFINITY ? -INFINITY : x - reference;
}

/* The losses that a call has, and the columns of its shard. */
static inline int64_t xdi_loss_columns(const xd_loss_args *a) {
    return a->vocab.end - a->vocab.begin;
}

static inline bool xdi_loss_has_soft(const xd_loss_args *a) {
    return a->teacher.data && a->soft_weight != 0.0;
}

static inline bool xdi_loss_has_hard(const xd_loss_args *a) {
    return a->labels.data && a->hard_weight != 0.0;
}

/* spread.c: calls the body for ranges [begin, end) of rows, or items, that together are all of them, on the threads of the
 * launch's context. The number of rows in a piece depends on their length, or is `grain`. Body and slot are as for
 * xdi_parallel. */
typedef void (*xdi_spread_body)(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                int slot);
XD_PRIVATE xd_result xdi_spread_rows(const xd_launch *launch, int64_t rows, int64_t columns,
                                     xdi_spread_body body, const void *args);
XD_PRIVATE xd_result xdi_spread_items(const xd_launch *launch, int64_t count, int64_t grain,
                                      xdi_spread_body body, const void *args);
/* The same for elements, of `arrays` arrays of `count` elements. */
XD_PRIVATE xd_result xdi_spread_elements(const xd_launch *launch, int64_t count, int64_t arrays,
                                         xdi_spread_body body, const void *args);

/* spread.c: the same for rows or items whose body needs `bytes` bytes of memory; where the threads do not have them, all
 * rows are one piece. In the body: the memory of its slot; slot 0 has that of the call. */
XD_PRIVATE xd_result xdi_spread_rooms(const xd_launch *launch, int64_t rows, int64_t columns, size_t bytes,
                                      xdi_spread_body body, const void *args);
XD_PRIVATE void *xdi_spread_room(const xd_launch *launch, void *own, int slot);

/* cpu/copy.c: memcpy of any bytes, also none, and in place. */
XD_PRIVATE void xdi_copy_bytes(void *to, const void *from, size_t bytes);
/* cpu/copy.c: memset, also of none. */
XD_PRIVATE void xdi_fill_bytes(void *to, uint8_t value, size_t bytes);

/* cpu/copy.c: performs one copy between two arrays of elements of `size` bytes. */
XD_PRIVATE void xdi_copy_run(const xd_copy *copy, const void *src, void *dst, size_t size);

/* fixed.c: xd_fixed_put and xd_fixed_read, not inlined. */
XD_PRIVATE bool xdi_fixed_add(xd_fixed *sum, double term);
XD_PRIVATE double xdi_fixed_value(xd_fixed sum);

/* simd/reduce.c: sum += x; x is zeros then, while it is in a cache. Both on the host, whatever the context's device. */
XD_PRIVATE xd_result xdi_reduce_absorb(const xd_launch *launch, float *sum, float *x, int64_t count);

/* kernels.c: voters[r] = 1 where the mask (NULL -> all) is not 0 and the row's `columns` are neither NaN nor +infinity, else 0; and
 * the largest element of each column over these rows. */
XD_PRIVATE xd_result xdi_rows_elect(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                    int64_t columns, uint8_t *voters, float *maxima);

/* kernels.c: bytes of the host and of the context's device; on a CPU all are the host's. And these as part of an open plan. */
XD_PRIVATE xd_memory_bytes xdi_memory_of(const xd_ctx *ctx, size_t host, size_t device);
XD_PRIVATE xd_result xdi_plan_take(xd_ctx *ctx, size_t host, size_t device);

/* kernels.c: page-locked memory of the host for copies to and from the context's device; NULL on a CPU, and where there is none.
 * xdi_locked_give: NULL is fine. */
XD_PRIVATE void *xdi_locked_take(xd_ctx *ctx, size_t bytes);
XD_PRIVATE void xdi_locked_give(xd_ctx *ctx, void *memory);

/* kernels.c: memory of the context's device that is overwritten before anything reads it: as the table's entry says, also on a
 * CPU, whose entry clears. The table's `release` frees it. */
XD_PRIVATE void *xdi_device_allocate(xd_ctx *ctx, size_t bytes);

/* kernels.c: copies within the context's device to memory that nobody has written yet, whose pages come in the course of it:
 * on a CPU in pieces, so that pages that the system has just cleared are still in the cache when the copy writes them. */
XD_PRIVATE xd_result xdi_copy_fresh(xd_ctx *ctx, void *to, const void *from, size_t bytes);

/* kernels.c: memory of the context's device for the length of a call, not zeroed; on a CPU cached for later calls. */
XD_PRIVATE void *xdi_call_memory(xd_ctx *ctx, size_t bytes);
/* kernels.c: the same for rows * columns elements of `size` bytes and one more, so that it is never an empty block; NULL also
 * for sizes that are negative or do not fit into a size_t. */
XD_PRIVATE void *xdi_call_array(xd_ctx *ctx, int64_t rows, int64_t columns, size_t size);
XD_PRIVATE void xdi_call_memory_done(xd_ctx *ctx, void *memory);
/* kernels.c: the call's memory is taken from the caller's workspace (NULL: no longer, or not). */
XD_PRIVATE void xdi_call_room_open(xd_ctx *ctx, void *workspace, size_t bytes);

#endif
