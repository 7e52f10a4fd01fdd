/* Sums over ranks, and the tree over leaves. Elements are processed in tiles that stay in the L1 cache: the tile of every
 * array is read before the result is written, so out may be one of the arrays, and the loops over a tile are simple enough
 * to be vectorised. */

#include "base/scalar.h"
#include "kernel/internal.h"
#include "kernel/reduce.h"

#include <string.h>

enum { XDI_REDUCE_TILE = 512, XDI_REDUCE_LEAF_TILE = 64, XDI_REDUCE_LEVELS = 64 };

static int xdi_reduce_at_most(int64_t left, int tile) {
    return left < tile ? (int)left : tile;
}

#define XDI_REDUCE_SAME(x) (x)
#define XDI_REDUCE_ADD(a, b) ((a) + (b))
/* Through unsigned: signed overflow would be undefined, and it must wrap. */
#define XDI_REDUCE_ADD_I32(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define XDI_REDUCE_ADD_I64(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define XDI_REDUCE_ADD_U8(a, b) ((uint8_t)((a) + (b)))
#define XDI_REDUCE_NAN(x) ((x) != (x))
#define XDI_REDUCE_NEVER(x) false
/* Multiplied, not divided: 1/n is rounded once and is the same for every element. */
#define XDI_REDUCE_SCALE(type, x, n) ((type)((x) * ((type)1 / (type)(n))))
#define XDI_REDUCE_KEEP(type, x, n) (x)

/* One function per dtype. `type`: of stored elements; `sum`: of the additions. */
#define XDI_REDUCE_DEFINE(name, type, sum, LOAD, STORE, ADD, IS_NAN, SCALE)                      \
    static void xdi_reduce_tile_##name(sum *acc, const type *x, int n, xd_reduce_op op) {        \
        if (op == XD_MAX) {                                                                      \
            for (int i = 0; i < n; i++) {                                                        \
                const sum v = LOAD(x[i]);                                                        \
                acc[i] = v > acc[i] || IS_NAN(v) ? v : acc[i];                                   \
            }                                                                                    \
        } else if (op == XD_MIN) {                                                               \
            for (int i = 0; i < n; i++) {                                                        \
                const sum v = LOAD(x[i]);                                                        \
                acc[i] = v < acc[i] || IS_NAN(v) ? v : acc[i];                                   \
            }                                                                                    \
        } else {                                                                                 \
            for (int i = 0; i < n; i++) acc[i] = ADD(acc[i], LOAD(x[i]));                        \
        }                                                                                        \
    }                                                                                            \
    static void xdi_reduce_##name(void *out, const void *const *pieces, int ranks, int64_t from, \
                                  int64_t end, xd_reduce_op op) {                                \
        sum acc[XDI_REDUCE_TILE];                                                                \
        for (int64_t begin = from; begin < end; begin += XDI_REDUCE_TILE) {                      \
            const int n = xdi_reduce_at_most(end - begin, XDI_REDUCE_TILE);                      \
            const type *first = (const type *)pieces[0] + begin;                                 \
            for (int i = 0; i < n; i++) acc[i] = LOAD(first[i]);                                 \
            for (int r = 1; r < ranks; r++)                                                      \
                xdi_reduce_tile_##name(acc, (const type *)pieces[r] + begin, n, op);             \
            if (op == XD_AVG)                                                                    \
                for (int i = 0; i < n; i++) acc[i] = SCALE(sum, acc[i], ranks);                  \
            type *to = (type *)out + begin;                                                      \
            for (int i = 0; i < n; i++) to[i] = STORE(acc[i]);                                   \
        }                                                                                        \
    }

XDI_REDUCE_DEFINE(f32, float, float, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(f64, double, double, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(bf16, uint16_t, float, xd_bits_from_bf16, xd_bits_to_bf16, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(f16, uint16_t, float, xd_bits_from_f16, xd_bits_to_f16, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(i32, int32_t, int32_t, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD_I32,
                  XDI_REDUCE_NEVER, XDI_REDUCE_KEEP)
XDI_REDUCE_DEFINE(i64, int64_t, int64_t, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD_I64,
                  XDI_REDUCE_NEVER, XDI_REDUCE_KEEP)
XDI_REDUCE_DEFINE(u8, uint8_t, uint8_t, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD_U8, XDI_REDUCE_NEVER,
                  XDI_REDUCE_KEEP)

XD_API bool xd_reduce_supports(xd_dtype dtype, xd_reduce_op op) {
    switch (dtype) {
    case XD_DTYPE_F32:
    case XD_DTYPE_F64:
    case XD_DTYPE_BF16:
    case XD_DTYPE_F16: return true;
    case XD_DTYPE_I32:
    case XD_DTYPE_I64:
    case XD_DTYPE_U8: return op != XD_AVG;
    default: return false;
    }
}

/* The arguments of an entry. Elements are independent, so threads take ranges of them. */
typedef struct xdi_reduce_job {
    void *out;
    const void *const *pieces;
    const xd_leaves *leaves; /* NULL: a sum of pieces */
    int ranks;
    int64_t stride;
    xd_dtype dtype;
    xd_reduce_op op;
} xdi_reduce_job;

static void xdi_cpu_reduce_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                 int slot) {
    const xdi_reduce_job *j = (const xdi_reduce_job *)args;
    (void)launch, (void)slot;
    switch (j->dtype) {
    case XD_DTYPE_F32: xdi_reduce_f32(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    case XD_DTYPE_F64: xdi_reduce_f64(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    case XD_DTYPE_BF16: xdi_reduce_bf16(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    case XD_DTYPE_F16: xdi_reduce_f16(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    case XD_DTYPE_I32: xdi_reduce_i32(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    case XD_DTYPE_I64: xdi_reduce_i64(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    default: xdi_reduce_u8(j->out, j->pieces, j->ranks, begin, end, j->op); break;
    }
}

static xd_result xdi_cpu_reduce_pieces(const xd_launch *launch, void *out, const void *const *pieces,
                                       int ranks, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    const xdi_reduce_job job = { out, pieces, NULL, ranks, 0, dtype, op };
    return xdi_spread_elements(launch, count, ranks, xdi_cpu_reduce_piece, &job);
}

XD_API int64_t xd_leaves_node_size(int64_t first, int64_t end) {
    int64_t size = 1;
    while (size <= (end - first) / 2 && first % (size * 2) == 0) size *= 2;
    return size;
}

XD_API int64_t xd_leaves_nodes(int64_t first, int64_t count) {
    const int64_t end = first + count;
    int64_t nodes = 0;
    for (; first < end; first += xd_leaves_node_size(first, end)) nodes++;
    return nodes;
}

/* A binary counter: nodes arrive from the left, neighbours of equal size are merged, so sizes on the stack are strictly
 * decreasing and 64 levels suffice. The remaining nodes are the right edge of the tree, added from the right. */
#define XDI_REDUCE_DEFINE_LEAVES(name, type)                                                                \
    static void xdi_reduce_leaves_merge_##name(type(*stack)[XDI_REDUCE_LEAF_TILE], int top, int n) {        \
        for (int i = 0; i < n; i++) stack[top - 1][i] = stack[top - 1][i] + stack[top][i];                  \
    }                                                                                                       \
    static void xdi_reduce_leaves_tile_##name(type *out, const void *const *forests,                        \
                                              const xd_leaves *leaves, int ranks, int64_t stride,           \
                                              int64_t begin, int n, xd_reduce_op op) {                      \
        type stack[XDI_REDUCE_LEVELS][XDI_REDUCE_LEAF_TILE];                                                \
        int64_t size[XDI_REDUCE_LEVELS];                                                                    \
        int top = -1;                                                                                       \
        for (int r = 0; r < ranks; r++) {                                                                   \
            const int64_t end = leaves[r].first + leaves[r].count;                                          \
            if (leaves[r].count == 0) continue; /* its forest may be NULL */                                \
            const type *node = (const type *)forests[r] + begin;                                            \
            for (int64_t lo = leaves[r].first; lo < end;                                                    \
                 lo += xd_leaves_node_size(lo, end), node += stride) {                                      \
                memcpy(stack[++top], node, (size_t)n * sizeof(type));                                       \
                size[top] = xd_leaves_node_size(lo, end);                                                   \
                for (; top > 0 && size[top - 1] == size[top]; size[--top] *= 2)                             \
                    xdi_reduce_leaves_merge_##name(stack, top, n);                                          \
            }                                                                                               \
        }                                                                                                   \
        for (; top > 0; top--) xdi_reduce_leaves_merge_##name(stack, top, n);                               \
        const type scale = op == XD_AVG ? (type)1 / (type)leaves[0].total : (type)1;                        \
        for (int i = 0; i < n; i++) out[begin + i] = stack[0][i] * scale;                                   \
    }                                                                                                       \
    static void xdi_reduce_leaves_##name(const xdi_reduce_job *j, int64_t from, int64_t end) {              \
        for (int64_t begin = from; begin < end; begin += XDI_REDUCE_LEAF_TILE) {                            \
            const int n = xdi_reduce_at_most(end - begin, XDI_REDUCE_LEAF_TILE);                            \
            xdi_reduce_leaves_tile_##name((type *)j->out, j->pieces, j->leaves, j->ranks, j->stride, begin, \
                                          n, j->op);                                                        \
        }                                                                                                   \
    }

XDI_REDUCE_DEFINE_LEAVES(f32, float)
XDI_REDUCE_DEFINE_LEAVES(f64, double)

static void xdi_cpu_reduce_leaves_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xdi_reduce_job *j = (const xdi_reduce_job *)args;
    (void)launch, (void)slot;
    if (j->dtype == XD_DTYPE_F32)
        xdi_reduce_leaves_f32(j, begin, end);
    else
        xdi_reduce_leaves_f64(j, begin, end);
}

static xd_result xdi_cpu_reduce_leaves(const xd_launch *launch, void *out, const void *const *forests,
                                       const xd_leaves *leaves, int ranks, int64_t stride, int64_t count,
                                       xd_dtype dtype, xd_reduce_op op) {
    const xdi_reduce_job job = { out, forests, leaves, ranks, stride, dtype, op };
    return xdi_spread_elements(launch, count, ranks, xdi_cpu_reduce_leaves_piece, &job);
}

XD_API const xd_reduce_kernels *xd_reduce_kernels_cpu(void) {
    static const xd_reduce_kernels kernels = {
        xdi_cpu_reduce_pieces,
        xdi_cpu_reduce_leaves,
    };
    return &kernels;
}
