/* Sums over ranks, and the tree over leaves. Elements are processed in tiles that stay in the L1 cache: the tile of every
 * array is read before the result is written, so out may be one of the arrays, and the loops over a tile are simple enough
 * to be vectorised. */

#include "base/scalar.h"
#include "kernel/cpu/internal.h"

#include <string.h>

enum { XDI_REDUCE_TILE = 512, XDI_REDUCE_LEAF_TILE = 128, XDI_REDUCE_STEP = 16, XDI_REDUCE_LEVELS = 64 };

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
 * decreasing and 64 levels suffice. The remaining nodes are the right edge of the tree, added from the right. A node stays where it
 * is until it is added; a sum is in the room of its level. Elements are worked on in small arrays of their own, which compilers
 * make vectors of: they need not ask whether two of the places are one. */
#define XDI_REDUCE_DEFINE_LEAVES(name, type)                                                                \
    static void xdi_reduce_add_##name(type *sum, const type *left, const type *right, int n) {              \
        int i = 0;                                                                                          \
        for (; i + XDI_REDUCE_STEP <= n; i += XDI_REDUCE_STEP) {                                            \
            type a[XDI_REDUCE_STEP], b[XDI_REDUCE_STEP];                                                    \
            memcpy(a, left + i, sizeof a);                                                                  \
            memcpy(b, right + i, sizeof b);                                                                 \
            for (int k = 0; k < XDI_REDUCE_STEP; k++) a[k] = a[k] + b[k];                                   \
            memcpy(sum + i, a, sizeof a);                                                                   \
        }                                                                                                   \
        for (; i < n; i++) sum[i] = left[i] + right[i];                                                     \
    }                                                                                                       \
    static void xdi_reduce_scale_##name(type *out, const type *x, type scale, int n) {                      \
        int i = 0;                                                                                          \
        for (; i + XDI_REDUCE_STEP <= n; i += XDI_REDUCE_STEP) {                                            \
            type a[XDI_REDUCE_STEP];                                                                        \
            memcpy(a, x + i, sizeof a);                                                                     \
            for (int k = 0; k < XDI_REDUCE_STEP; k++) a[k] = a[k] * scale;                                  \
            memcpy(out + i, a, sizeof a);                                                                   \
        }                                                                                                   \
        for (; i < n; i++) out[i] = x[i] * scale;                                                           \
    }                                                                                                       \
    typedef struct xdi_reduce_stack_##name {                                                                \
        const type *node[XDI_REDUCE_LEVELS];                                                                \
        int64_t size[XDI_REDUCE_LEVELS];                                                                    \
        type room[XDI_REDUCE_LEVELS][XDI_REDUCE_LEAF_TILE];                                                 \
        int top;                                                                                            \
    } xdi_reduce_stack_##name;                                                                              \
    static void xdi_reduce_leaves_merge_##name(xdi_reduce_stack_##name *s, int n) {                         \
        const type *right = s->node[s->top--], *left = s->node[s->top];                                     \
        type *sum = s->room[s->top];                                                                        \
        xdi_reduce_add_##name(sum, left, right, n);                                                         \
        s->node[s->top] = sum;                                                                              \
        s->size[s->top] *= 2;                                                                               \
    }                                                                                                       \
    static void xdi_reduce_leaves_push_##name(xdi_reduce_stack_##name *s, const type *node, int64_t size,   \
                                              int n) {                                                      \
        s->node[++s->top] = node;                                                                           \
        s->size[s->top] = size;                                                                             \
        while (s->top > 0 && s->size[s->top - 1] == s->size[s->top]) xdi_reduce_leaves_merge_##name(s, n);  \
    }                                                                                                       \
    static void xdi_reduce_leaves_tile_##name(const xdi_reduce_job *j, int64_t begin, int n) {              \
        xdi_reduce_stack_##name s;                                                                          \
        type *out = (type *)j->out + begin;                                                                 \
        s.top = -1;                                                                                         \
        for (int r = 0; r < j->ranks; r++) {                                                                \
            const int64_t end = j->leaves[r].first + j->leaves[r].count;                                    \
            if (j->leaves[r].count == 0) continue; /* its forest may be NULL */                             \
            const type *node = (const type *)j->pieces[r] + begin;                                          \
            for (int64_t lo = j->leaves[r].first, size; lo < end; lo += size, node += j->stride) {          \
                size = xd_leaves_node_size(lo, end);                                                        \
                xdi_reduce_leaves_push_##name(&s, node, size, n);                                           \
            }                                                                                               \
        }                                                                                                   \
        while (s.top > 0) xdi_reduce_leaves_merge_##name(&s, n);                                            \
        const type scale = j->op == XD_AVG ? (type)1 / (type)j->leaves[0].total : (type)1;                  \
        xdi_reduce_scale_##name(out, s.node[0], scale, n);                                                  \
    }                                                                                                       \
    static void xdi_reduce_leaves_##name(const xdi_reduce_job *j, int64_t from, int64_t end) {              \
        for (int64_t begin = from; begin < end; begin += XDI_REDUCE_LEAF_TILE)                              \
            xdi_reduce_leaves_tile_##name(j, begin, xdi_reduce_at_most(end - begin, XDI_REDUCE_LEAF_TILE)); \
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

XD_PRIVATE const xd_reduce_kernels *xdi_reduce_kernels_cpu(void) {
    static const xd_reduce_kernels kernels = {
        xdi_cpu_reduce_pieces,
        xdi_cpu_reduce_leaves,
    };
    return &kernels;
}
