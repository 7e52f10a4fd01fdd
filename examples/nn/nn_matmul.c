/* nn_matmul.c - a blocked matrix product.
 *
 * A processor multiplies much faster than it reads memory. So the product is cut into tiles of `rows` x
 * `cols` numbers that stay in registers while k runs; what a tile reads is first copied ("packed") into the
 * order in which it is read:
 *
 *     for each block of NN_BLOCK_N columns and NN_BLOCK_K terms:
 *         pack that block of b                                     (it stays in the L2 cache)
 *         for each group of `rows` rows:
 *             pack those rows of a                                 (they stay in the L1 cache)
 *             for each group of `cols` columns:                    one tile = one call of the kernel
 *
 * Packing pads with zeros, so a kernel never sees an odd size. The kernels differ in the tile's size and in
 * the instructions; everything else is shared. */
#include "nn_matmul.h"

#include <string.h>

#ifdef NN_USE_BLAS
#    include <cblas.h>
#endif

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#    define NN_HAVE_X86 1
#    include <immintrin.h>
#else
#    define NN_HAVE_X86 0
#endif

/* The sums of a tile live in registers only if the short loops over them disappear. clang sees that by
 * itself, gcc at -O3; at -O2 gcc must be asked. */
#if defined(__GNUC__) && !defined(__clang__)
#    define NN_UNROLL _Pragma("GCC unroll 8")
#else
#    define NN_UNROLL
#endif

enum {
    NN_BLOCK_K = 256, /* terms a packed block covers */
    NN_BLOCK_N = 512, /* columns a packed block covers; a multiple of every kernel's `cols` */
    NN_MOST_ROWS = 8, /* the largest tile of any kernel */
    NN_MOST_COLS = 32
};

/* tile[rows, cols] (+)= sum over p < k of a[p * rows + i] * b[p * cols + j]. */
typedef void (*nn_tile_fn)(int64_t k, const float *a, const float *b, float *tile, int64_t stride,
                           bool accumulate);

typedef struct nn_kernel {
    nn_tile_fn run;
    int64_t rows, cols;
} nn_kernel;

nn_view nn_block(const float *data, int64_t rows, int64_t cols, int64_t stride) {
    nn_view view;
    view.data = data;
    view.rows = rows;
    view.cols = cols;
    view.row_stride = stride;
    view.col_stride = 1;
    return view;
}

nn_view nn_dense(const float *data, int64_t rows, int64_t cols) {
    return nn_block(data, rows, cols, cols);
}

nn_view nn_transpose(nn_view matrix) {
    nn_view view = matrix;
    view.rows = matrix.cols;
    view.cols = matrix.rows;
    view.row_stride = matrix.col_stride;
    view.col_stride = matrix.row_stride;
    return view;
}

/* ---- kernels ---- */

/* 4 x 8 sums: as many as fit the sixteen registers of the plainest 64-bit processor. */
static void nn_tile_portable(int64_t k, const float *a, const float *b, float *tile, int64_t stride,
                             bool accumulate) {
    float sum[4][8] = { { 0 } };
    for (int64_t p = 0; p < k; p++, a += 4, b += 8) NN_UNROLL
    for (int i = 0; i < 4; i++) NN_UNROLL
    for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
    NN_UNROLL
    for (int i = 0; i < 4; i++) NN_UNROLL
    for (int j = 0; j < 8; j++) {
        float *out = tile + i * stride + j;
        *out = accumulate ? *out + sum[i][j] : sum[i][j];
    }
}

#if NN_HAVE_X86
/* 6 x 16: twelve sums of eight lanes, two for b and one for a leave one of the sixteen registers free. */
__attribute__((target("avx2,fma"))) static void nn_tile_avx2(int64_t k, const float *a, const float *b,
                                                             float *tile, int64_t stride, bool accumulate) {
    __m256 sum[6][2];
    NN_UNROLL
    for (int i = 0; i < 6; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += 6, b += 16) {
        const __m256 left = _mm256_loadu_ps(b), right = _mm256_loadu_ps(b + 8);
        NN_UNROLL
        for (int i = 0; i < 6; i++) {
            const __m256 factor = _mm256_set1_ps(a[i]);
            sum[i][0] = _mm256_fmadd_ps(factor, left, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(factor, right, sum[i][1]);
        }
    }
    NN_UNROLL
    for (int i = 0; i < 6; i++) NN_UNROLL
    for (int j = 0; j < 2; j++) {
        float *out = tile + i * stride + 8 * j;
        _mm256_storeu_ps(out, accumulate ? _mm256_add_ps(_mm256_loadu_ps(out), sum[i][j]) : sum[i][j]);
    }
}

/* 8 x 32: sixteen sums of sixteen lanes. */
__attribute__((target("avx512f"))) static void nn_tile_avx512(int64_t k, const float *a, const float *b,
                                                              float *tile, int64_t stride, bool accumulate) {
    __m512 sum[8][2];
    NN_UNROLL
    for (int i = 0; i < 8; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += 8, b += 32) {
        const __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + 16);
        NN_UNROLL
        for (int i = 0; i < 8; i++) {
            const __m512 factor = _mm512_set1_ps(a[i]);
            sum[i][0] = _mm512_fmadd_ps(factor, left, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(factor, right, sum[i][1]);
        }
    }
    NN_UNROLL
    for (int i = 0; i < 8; i++) NN_UNROLL
    for (int j = 0; j < 2; j++) {
        float *out = tile + i * stride + 16 * j;
        _mm512_storeu_ps(out, accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sum[i][j]) : sum[i][j]);
    }
}
#endif

nn_cpu_level nn_cpu_best(void) {
#if NN_HAVE_X86
    if (__builtin_cpu_supports("avx512f")) return NN_CPU_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return NN_CPU_AVX2;
#endif
    return NN_CPU_PORTABLE;
}

static nn_kernel nn_kernel_of(nn_cpu_level level) {
    nn_kernel kernel = { nn_tile_portable, 4, 8 };
#if NN_HAVE_X86
    if (level == NN_CPU_AVX2) {
        kernel.run = nn_tile_avx2;
        kernel.rows = 6;
        kernel.cols = 16;
    }
    if (level == NN_CPU_AVX512) {
        kernel.run = nn_tile_avx512;
        kernel.rows = 8;
        kernel.cols = 32;
    }
#else
    (void)level;
#endif
    return kernel;
}

/* ---- packing ---- */

static int64_t nn_smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Copies `lines` <= width lines of `terms` numbers into packed[p * width + line], zeros where a line is
 * missing. A "line" is a row of a or a column of b: both are packed by this one function. `line_stride` leads
 * from line to line, `term_stride` along k. Lines that lie side by side are copied eight at a time, all
 * others one after the other, so that memory is read in its own order. */
static void nn_pack(const float *data, int64_t lines, int64_t terms, int64_t line_stride, int64_t term_stride,
                    int64_t width, float *packed) {
    int64_t line = 0;
    if (lines < width)
        for (int64_t i = 0; i < terms * width; i++) packed[i] = 0.0f;
    for (; line_stride == 1 && line + 8 <= lines; line += 8)
        for (int64_t p = 0; p < terms; p++)
            memcpy(packed + p * width + line, data + p * term_stride + line, 8 * sizeof *packed);
    for (; line < lines; line++)
        for (int64_t p = 0; p < terms; p++)
            packed[p * width + line] = data[line * line_stride + p * term_stride];
}

/* ---- the product ---- */

/* One tile at the edge of the result: computed aside in full, then only what exists is copied. */
static void nn_edge_tile(const nn_kernel *kernel, int64_t k, const float *a, const float *b, float *out,
                         int64_t stride, int64_t rows, int64_t cols, bool accumulate) {
    float tile[NN_MOST_ROWS * NN_MOST_COLS];
    kernel->run(k, a, b, tile, kernel->cols, false);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            const float value = tile[i * kernel->cols + j];
            out[i * stride + j] = accumulate ? out[i * stride + j] + value : value;
        }
}

/* out[m, n] (+)= a[m, k] * b[k, n] for one block of b, which is packed already: k <= NN_BLOCK_K, n <=
 * NN_BLOCK_N. */
static void nn_block_product(const nn_kernel *kernel, nn_view a, const float *packed_b, int64_t n, float *out,
                             int64_t out_stride, bool accumulate) {
    float packed_a[NN_BLOCK_K * NN_MOST_ROWS];
    for (int64_t i = 0; i < a.rows; i += kernel->rows) {
        const int64_t rows = nn_smaller(kernel->rows, a.rows - i);
        nn_pack(a.data + i * a.row_stride, rows, a.cols, a.row_stride, a.col_stride, kernel->rows, packed_a);
        for (int64_t j = 0; j < n; j += kernel->cols) {
            const int64_t cols = nn_smaller(kernel->cols, n - j);
            const float *b = packed_b + j * a.cols; /* every panel holds a.cols * kernel->cols numbers */
            float *tile = out + i * out_stride + j;
            if (rows == kernel->rows && cols == kernel->cols)
                kernel->run(a.cols, packed_a, b, tile, out_stride, accumulate);
            else
                nn_edge_tile(kernel, a.cols, packed_a, b, tile, out_stride, rows, cols, accumulate);
        }
    }
}

void nn_matmul_at(nn_cpu_level level, nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate) {
    const nn_kernel kernel = nn_kernel_of(level);
    float packed_b[NN_BLOCK_K * NN_BLOCK_N];
    if (a.cols == 0 && !accumulate)
        for (int64_t i = 0; i < a.rows; i++)
            for (int64_t j = 0; j < b.cols; j++) out[i * out_stride + j] = 0.0f;

    for (int64_t n0 = 0; n0 < b.cols; n0 += NN_BLOCK_N) {
        const int64_t n = nn_smaller(NN_BLOCK_N, b.cols - n0);
        for (int64_t k0 = 0; k0 < a.cols; k0 += NN_BLOCK_K) {
            const int64_t k = nn_smaller(NN_BLOCK_K, a.cols - k0);
            nn_view part = a;
            part.data = a.data + k0 * a.col_stride;
            part.cols = k;
            for (int64_t j = 0; j < n; j += kernel.cols)
                nn_pack(b.data + k0 * b.row_stride + (n0 + j) * b.col_stride, nn_smaller(kernel.cols, n - j),
                        k, b.col_stride, b.row_stride, kernel.cols, packed_b + j * k);
            nn_block_product(&kernel, part, packed_b, n, out + n0, out_stride, accumulate || k0 > 0);
        }
    }
}

#ifdef NN_USE_BLAS
void nn_matmul(nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate) {
    const bool a_plain = a.col_stride == 1, b_plain = b.col_stride == 1;
    if (a.rows == 0 || b.cols == 0 || a.cols == 0 || (!a_plain && a.row_stride != 1) ||
        (!b_plain && b.row_stride != 1)) {
        nn_matmul_at(nn_cpu_best(), a, b, out, out_stride, accumulate);
        return;
    }
    cblas_sgemm(CblasRowMajor, a_plain ? CblasNoTrans : CblasTrans, b_plain ? CblasNoTrans : CblasTrans,
                (int)a.rows, (int)b.cols, (int)a.cols, 1.0f, a.data,
                (int)(a_plain ? a.row_stride : a.col_stride), b.data,
                (int)(b_plain ? b.row_stride : b.col_stride), accumulate ? 1.0f : 0.0f, out, (int)out_stride);
}
#else
void nn_matmul(nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate) {
    nn_matmul_at(nn_cpu_best(), a, b, out, out_stride, accumulate);
}
#endif
