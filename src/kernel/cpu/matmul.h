#ifndef XDI_KERNEL_CPU_MATMUL_H
#define XDI_KERNEL_CPU_MATMUL_H

#include <string.h>

#include "kernel/internal.h"
#include "kernel/matmul.h"

/* The blocked matrix product. A processor multiplies much faster than it reads memory, so the product is cut
 * into tiles of `rows` x `cols` sums that stay in registers while k runs; what a tile reads is first copied
 * ("packed") into the order in which it is read:
 *
 *     for each block of BLOCK_N columns and BLOCK_K terms:
 *         pack that block of b, in panels of `cols` columns     (it stays in the L2 cache)
 *         for each block of BLOCK_M rows:
 *             pack those rows of a, in panels of `rows` rows    (they stay in the L2 cache)
 *             for each panel of a:                              (it stays in the L1 cache)
 *                 for each panel of b:                          one tile = one call of the kernel
 *
 * Packing pads with zeros, so a kernel never sees an odd size, and widens or narrows on the way. Kernels
 * differ in the tile's size and in the instructions; everything else is shared.
 *
 * A fast kernel is done with a block soon, and packing must keep up: memory is read in its own order, and is
 * asked ahead for what comes next. A block of a has many rows because a transposed matrix is read across:
 * cache lines a multiple of a page apart drive each other out before another panel would read their rest. */

enum {
    XDI_MATMUL_BLOCK_K = 256, /* terms that a packed block covers; even */
    XDI_MATMUL_BLOCK_M = 96,  /* rows, of two bytes a term twice as many; a multiple of 16 and of any rows */
    XDI_MATMUL_BLOCK_N = 512, /* columns, of two bytes a term twice as many; a multiple of any cols */
    XDI_MATMUL_MOST_ROWS = 8,
    XDI_MATMUL_MOST_COLS = 32,
    XDI_MATMUL_LINE = 64, /* bytes of a cache line */
    XDI_MATMUL_AHEAD = 8  /* terms or lines from what is packed to what memory is asked for */
};

/* The sums of a tile live in registers only if the short loops over them disappear. clang sees that by
 * itself, gcc must be asked. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#    define XDI_MATMUL_UNROLL _Pragma("GCC unroll 8")
#else
#    define XDI_MATMUL_UNROLL
#endif

/* tile[rows, cols] (+)= sum over p < k of a[p, i] b[p, j], both packed; pairs: terms 2p and 2p + 1 of a line
 * lie side by side as bf16. */
typedef void (*xdi_matmul_tile)(int64_t k, const void *a, const void *b, float *tile, int64_t stride,
                                bool accumulate);

/* `lines` lines of `terms` numbers each: a line is a row of a or a column of b. */
typedef struct xdi_matmul_lines {
    const void *data;
    xd_dtype dtype;
    int64_t lines, terms;
    int64_t line_stride, term_stride;
} xdi_matmul_lines;

/* Where they are packed: `width` lines a panel, `bytes` from one panel to the next. */
typedef struct xdi_matmul_panels {
    char *data;
    int64_t width, bytes;
} xdi_matmul_panels;

/* What a CPU level does in its own way. */
typedef struct xdi_matmul_kernel {
    xdi_matmul_tile run;
    void (*pack)(const xdi_matmul_lines *x,
                 const xdi_matmul_panels *to); /* fills panels, but not their last lines */
    int64_t rows, cols;                        /* of a tile */
    bool pairs;
} xdi_matmul_kernel;

static inline int64_t xdi_matmul_smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Asks memory for the cache line of an element, which may lie behind the end of `data`. */
static inline void xdi_matmul_fetch(const void *data, int64_t at, int64_t size) {
#if defined(__GNUC__)
    __builtin_prefetch((const void *)((uintptr_t)data + (uintptr_t)(at * size)));
#else
    (void)data;
    (void)at;
    (void)size;
#endif
}

static inline int64_t xdi_matmul_size(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 ? 4 : 2;
}

static inline float xdi_matmul_float(const xdi_matmul_lines *x, int64_t at) {
    return x->dtype == XD_DTYPE_F32 ? ((const float *)x->data)[at]
                                    : xd_bits_from_bf16(((const uint16_t *)x->data)[at]);
}

/* matmul.c: the kernel in plain C, its packing, panel by panel, and the product on a level's kernel, which needs a
 * workspace of XD_MATMUL_WORKSPACE_BYTES. */
XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_portable(bool bf16);
XD_PRIVATE void xdi_matmul_pack_plain(const xdi_matmul_lines *x, const xdi_matmul_panels *to);
XD_PRIVATE void xdi_matmul_run(const xdi_matmul_kernel *kernel, const xd_matmul_args *args, void *workspace);

#endif
