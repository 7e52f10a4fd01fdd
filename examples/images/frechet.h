/* frechet.h - the Frechet distance between two sets of features, each taken for a Gaussian:
 *
 *     |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))
 *
 * the square of the Wasserstein-2 distance of the two; no root is taken, as is the custom for distances of this name. */
#ifndef FRECHET_H
#define FRECHET_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FRECHET_MOST = 64 }; /* features of a row */

/* A mean and a covariance of `width` features. */
typedef struct frechet_gaussian {
    int width;
    int64_t rows; /* of which it was measured */
    double mean[FRECHET_MOST];
    double covariance[FRECHET_MOST * FRECHET_MOST]; /* [width, width], divided by rows - 1 */
} frechet_gaussian;

/* Sums over rows that arrive in pieces, in doubles, about the first row: a mean far from zero costs no digits. */
typedef struct frechet_sums {
    int width;
    int64_t rows;
    double origin[FRECHET_MOST], sum[FRECHET_MOST];
    double products[FRECHET_MOST * FRECHET_MOST]; /* [width, width], the lower triangle */
} frechet_sums;

/* Begins anew. width: 1 to FRECHET_MOST */
void frechet_begin(frechet_sums *sums, int width);

/* Adds `rows` rows: features [rows, width]. The order of rows matters to rounding only, and how they are cut into pieces not
 * at all. */
void frechet_add(frechet_sums *sums, const float *features, int64_t rows);

/* What was added so far, at least one row; the covariance of a single row is zero. */
void frechet_end(const frechet_sums *sums, frechet_gaussian *out);

/* The distance, never below 0; equal Gaussians have it about 1e-14 of their variances, or 1e-6 where the covariance is
 * singular, whose zeros are known to rounding and have a root. The widths are equal. Symmetric but for rounding. */
double frechet_distance(const frechet_gaussian *a, const frechet_gaussian *b);

/* A symmetric matrix taken apart by Jacobi's rotations: matrix [n, n] = V diag(values) V^T, the columns of `vectors` being V.
 * The matrix is destroyed; n up to FRECHET_MOST. */
void frechet_eigen(int n, double *matrix, double *values, double *vectors);

/* A safetensors file: "mean" [width] and "covariance" [width, width] in f32, and the number of rows in its metadata. Local.
 * Errors: IO, MEMORY; loading: MISSING, DTYPE, SHAPE and FORMAT of the file, with names and numbers. */
xd_result frechet_load(xd_ctx *ctx, const char *path, frechet_gaussian *out);
xd_result frechet_save(xd_ctx *ctx, const char *path, const frechet_gaussian *g);

#ifdef __cplusplus
}
#endif

#endif /* FRECHET_H */
