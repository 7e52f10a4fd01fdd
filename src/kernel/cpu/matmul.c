/* The blocked matrix product in plain C, with the loops over blocks and tiles that every CPU level shares. */

#include "kernel/cpu/matmul.h"

static void xdi_matmul_tile_portable(int64_t k, const void *packed_a, const void *packed_b, float *tile,
                                     int64_t stride, bool accumulate) {
    const float *a = (const float *)packed_a, *b = (const float *)packed_b;
    float sum[4][8];
    memset(sum, 0, sizeof sum);
    for (int64_t p = 0; p < k; p++, a += 4, b += 8) XDI_MATMUL_UNROLL
    for (int i = 0; i < 4; i++) XDI_MATMUL_UNROLL
    for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j++) {
            float *out = tile + i * stride + j;
            *out = accumulate ? *out + sum[i][j] : sum[i][j];
        }
}

/* ---- packing ---- */

/* packed[p * width + line] of one panel. Lines that are adjacent in memory are copied eight at a time, others one by
 * one, so that memory is read in order. */
static void xdi_matmul_pack_f32(const xdi_matmul_lines *x, int64_t width, float *packed) {
    const float *data = (const float *)x->data;
    int64_t line = 0;
    for (; x->line_stride == 1 && line + 8 <= x->lines; line += 8)
        for (int64_t p = 0; p < x->terms; p++)
            memcpy(packed + p * width + line, data + p * x->term_stride + line, 8 * sizeof *packed);
    for (; line < x->lines; line++)
        for (int64_t p = 0; p < x->terms; p++)
            packed[p * width + line] = data[line * x->line_stride + p * x->term_stride];
}

static void xdi_matmul_pack_widened(const xdi_matmul_lines *x, int64_t width, float *packed) {
    const uint16_t *data = (const uint16_t *)x->data;
    int64_t line = 0;
    for (; x->line_stride == 1 && line + 8 <= x->lines; line += 8)
        for (int64_t p = 0; p < x->terms; p++)
            for (int64_t i = 0; i < 8; i++)
                packed[p * width + line + i] = xd_bits_from_bf16(data[p * x->term_stride + line + i]);
    for (; line < x->lines; line++)
        for (int64_t p = 0; p < x->terms; p++)
            packed[p * width + line] = xd_bits_from_bf16(data[line * x->line_stride + p * x->term_stride]);
}

/* Panel by panel, for any machine. */
XD_PRIVATE void xdi_matmul_pack_plain(const xdi_matmul_lines *x, const xdi_matmul_panels *to) {
    char *packed = to->data;
    for (int64_t line = 0; line < x->lines; line += to->width, packed += to->bytes) {
        xdi_matmul_lines panel = *x;
        panel.data = (const char *)x->data + line * x->line_stride * xdi_matmul_size(x->dtype);
        panel.lines = xdi_matmul_smaller(to->width, x->lines - line);
        if (x->dtype == XD_DTYPE_F32)
            xdi_matmul_pack_f32(&panel, to->width, (float *)(void *)packed);
        else
            xdi_matmul_pack_widened(&panel, to->width, (float *)(void *)packed);
    }
}

static void xdi_matmul_pack(const xdi_matmul_kernel *kernel, const xdi_matmul_lines *x,
                            const xdi_matmul_panels *to) {
    if (x->lines % to->width) memset(to->data + x->lines / to->width * to->bytes, 0, (size_t)to->bytes);
    kernel->pack(x, to);
}

static const void *xdi_matmul_at(const xd_matrix *x, int64_t row, int64_t col) {
    return (const char *)x->data + (row * x->row_stride + col * x->col_stride) * xdi_matmul_size(x->dtype);
}

static xdi_matmul_lines xdi_matmul_rows(const xd_matrix *a, int64_t i, int64_t rows, int64_t k0, int64_t k) {
    xdi_matmul_lines x = { xdi_matmul_at(a, i, k0), a->dtype, rows, k, a->row_stride, a->col_stride };
    return x;
}

static xdi_matmul_lines xdi_matmul_columns(const xd_matrix *b, int64_t j, int64_t cols, int64_t k0,
                                           int64_t k) {
    xdi_matmul_lines x = { xdi_matmul_at(b, k0, j), b->dtype, cols, k, b->col_stride, b->row_stride };
    return x;
}

XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_portable(bool bf16) {
    const xdi_matmul_kernel kernel = { xdi_matmul_tile_portable, xdi_matmul_pack_plain, 4, 8, false };
    (void)bf16;
    return kernel;
}

/* ---- the product ---- */

/* One tile at the edge of the result: the full tile is computed in a buffer, of which the existing part is copied. */
static void xdi_matmul_edge(const xdi_matmul_kernel *kernel, int64_t k, const void *a, const void *b,
                            float *out, int64_t stride, int64_t rows, int64_t cols, bool accumulate) {
    float tile[XDI_MATMUL_MOST_ROWS * XDI_MATMUL_MOST_COLS];
    kernel->run(k, a, b, tile, kernel->cols, false);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            const float value = tile[i * kernel->cols + j];
            out[i * stride + j] = accumulate ? out[i * stride + j] + value : value;
        }
}

/* One block of b, where it is packed, and where the blocks of a are. */
typedef struct xdi_matmul_blocks {
    xdi_matmul_panels a, b;
    int64_t m; /* rows of a block of a */
    int64_t k0, k, n0, n;
} xdi_matmul_blocks;

/* Rows [i, i + rows) of the result for one block of b; all are packed already. */
static void xdi_matmul_tiles(const xdi_matmul_kernel *kernel, const xd_matmul_args *args,
                             const xdi_matmul_blocks *at, int64_t i, int64_t rows, bool accumulate) {
    const char *a = at->a.data;
    for (int64_t r = 0; r < rows; r += kernel->rows, a += at->a.bytes) {
        const int64_t height = xdi_matmul_smaller(kernel->rows, rows - r);
        const char *b = at->b.data;
        for (int64_t j = 0; j < at->n; j += kernel->cols, b += at->b.bytes) {
            const int64_t width = xdi_matmul_smaller(kernel->cols, at->n - j);
            float *tile = args->out + (i + r) * args->out_stride + at->n0 + j;
            if (height == kernel->rows && width == kernel->cols)
                kernel->run(at->k, a, b, tile, args->out_stride, accumulate);
            else
                xdi_matmul_edge(kernel, at->k, a, b, tile, args->out_stride, height, width, accumulate);
        }
    }
}

/* All rows of the result for one block of b, which is packed already. */
static void xdi_matmul_block(const xdi_matmul_kernel *kernel, const xd_matmul_args *args,
                             const xdi_matmul_blocks *at, bool accumulate) {
    for (int64_t i = 0; i < args->a.rows; i += at->m) {
        const int64_t rows = xdi_matmul_smaller(at->m, args->a.rows - i);
        const xdi_matmul_lines lines = xdi_matmul_rows(&args->a, i, rows, at->k0, at->k);
        xdi_matmul_pack(kernel, &lines, &at->a);
        xdi_matmul_tiles(kernel, args, at, i, rows, accumulate);
    }
}

static void xdi_matmul_clear(const xd_matmul_args *args) {
    for (int64_t i = 0; i < args->a.rows; i++)
        memset(args->out + i * args->out_stride, 0, (size_t)args->b.cols * sizeof *args->out);
}

/* Panels of `width` lines of k terms from `data` on; each begins at a cache line and has room for k + 1 terms. */
static xdi_matmul_panels xdi_matmul_panels_at(const xdi_matmul_kernel *kernel, char *data, int64_t width,
                                              int64_t k) {
    const int64_t bytes = (k + 1) * width * (kernel->pairs ? 2 : 4) + XDI_MATMUL_LINE - 1;
    const xdi_matmul_panels panels = { data, width, bytes - bytes % XDI_MATMUL_LINE };
    return panels;
}

XD_PRIVATE void xdi_matmul_run(const xdi_matmul_kernel *kernel, const xd_matmul_args *args, void *workspace) {
    const int64_t terms = args->a.cols, columns = args->b.cols;
    const int64_t more = kernel->pairs ? 2 : 1, block_n = more * XDI_MATMUL_BLOCK_N;
    const uintptr_t past = (uintptr_t)workspace % XDI_MATMUL_LINE;
    char *base = (char *)workspace + (past ? XDI_MATMUL_LINE - past : 0);
    xdi_matmul_blocks at;
    at.m = more * XDI_MATMUL_BLOCK_M;
    if (terms == 0 && !args->accumulate) xdi_matmul_clear(args);
    for (at.n0 = 0; at.n0 < columns; at.n0 += block_n) {
        at.n = xdi_matmul_smaller(block_n, columns - at.n0);
        for (at.k0 = 0; at.k0 < terms; at.k0 += XDI_MATMUL_BLOCK_K) {
            at.k = xdi_matmul_smaller(XDI_MATMUL_BLOCK_K, terms - at.k0);
            at.a = xdi_matmul_panels_at(kernel, base, kernel->rows, at.k);
            at.b = xdi_matmul_panels_at(kernel, base + at.m / kernel->rows * at.a.bytes, kernel->cols, at.k);
            const xdi_matmul_lines lines = xdi_matmul_columns(&args->b, at.n0, at.n, at.k0, at.k);
            xdi_matmul_pack(kernel, &lines, &at.b);
            xdi_matmul_block(kernel, args, &at, args->accumulate || at.k0 > 0);
        }
    }
}

XD_API xd_matrix xd_matrix_of_rows(const xd_rows *rows) {
    xd_matrix matrix = {
        rows->data, rows->dtype, rows->rows, rows->cols, rows->stride ? rows->stride : rows->cols, 1
    };
    return matrix;
}

XD_API xd_matrix xd_matrix_transposed(xd_matrix m) {
    xd_matrix matrix = { m.data, m.dtype, m.cols, m.rows, m.col_stride, m.row_stride };
    return matrix;
}
