#ifndef XDI_KERNEL_CPU_MATMUL_H
#define XDI_KERNEL_CPU_MATMUL_H

#include <string.h>

#include "kernel/internal.h"
#include "kernel/matmul.h"

/* The blocked matrix product. A processor multiplies much faster than it reads memory, so the product is split
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
 * Packing pads with zeros, so a kernel never sees an odd size, and converts to the kernel's dtype. Kernels
 * differ in the tile's size and in the instructions; everything else is shared.
 *
 * With a fast kernel packing must be fast too: memory is read in order and prefetched. A block of a has many rows
 * because of transposed matrices, whose terms are far apart: cache lines at multiples of a page evict each other before
 * another panel would read their other elements. */

enum {
    XDI_MATMUL_BLOCK_K = 256, /* terms that a packed block covers; even */
    XDI_MATMUL_BLOCK_M =
        96, /* rows, twice as many for bf16 terms; a multiple of 16 and every kernel's rows */
    XDI_MATMUL_BLOCK_N = 512, /* columns, twice as many for bf16 terms; a multiple of every kernel's cols */
    XDI_MATMUL_MOST_ROWS = 8,
    XDI_MATMUL_MOST_COLS = 32,
    XDI_MATMUL_LINE = 64, /* bytes of a cache line */
    XDI_MATMUL_AHEAD = 8  /* prefetch distance in terms or lines */
};

/* The sums of a tile stay in registers only if the short loops over them are unrolled. clang does that by
 * itself, gcc needs a pragma. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#    define XDI_MATMUL_UNROLL _Pragma("GCC unroll 8")
#else
#    define XDI_MATMUL_UNROLL
#endif

/* tile[rows, cols] (+)= sum over p < k of a[p, i] b[p, j], both packed; pairs: terms 2p and 2p + 1 of a line
 * are adjacent, as bf16. */
typedef void (*xdi_matmul_tile)(int64_t k, const void *a, const void *b, float *tile, int64_t stride,
                                bool accumulate);

/* `lines` lines of `terms` elements each: a line is a row of a or a column of b. */
typedef struct xdi_matmul_lines {
    const void *data;
    xd_dtype dtype;
    int64_t lines, terms;
    int64_t line_stride, term_stride;
} xdi_matmul_lines;

/* The panels they are packed into: `width` lines per panel, `bytes` from one panel to the next. */
typedef struct xdi_matmul_panels {
    char *data;
    int64_t width, bytes;
} xdi_matmul_panels;

/* The functions and sizes of a CPU level. */
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

/* Prefetches the cache line of an element, which may be past the end of `data`. */
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
