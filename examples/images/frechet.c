/* frechet.c - moments of features, and the distance of two Gaussians. */
#include "frechet.h"
#include "tensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- moments ---- */

void frechet_begin(frechet_sums *sums, int width) {
    memset(sums, 0, sizeof *sums);
    sums->width = width;
}

void frechet_add(frechet_sums *sums, const float *features, int64_t rows) {
    const int n = sums->width;
    double row[FRECHET_MOST];
    for (int64_t r = 0; r < rows; r++, features += n) {
        for (int i = 0; i < n && sums->rows == 0; i++) sums->origin[i] = (double)features[i];
        sums->rows++;
        for (int i = 0; i < n; i++) row[i] = (double)features[i] - sums->origin[i];
        for (int i = 0; i < n; i++) {
            sums->sum[i] += row[i];
            for (int j = 0; j <= i; j++) sums->products[i * n + j] += row[i] * row[j];
        }
    }
}

void frechet_end(const frechet_sums *sums, frechet_gaussian *out) {
    const int n = sums->width;
    const double rows = (double)sums->rows, free_rows = sums->rows > 1 ? rows - 1.0 : 1.0;
    memset(out, 0, sizeof *out);
    out->width = n;
    out->rows = sums->rows;
    for (int i = 0; i < n; i++) {
        out->mean[i] = sums->origin[i] + sums->sum[i] / rows;
        for (int j = 0; j <= i; j++) {
            const double product = sums->products[i * n + j] - sums->sum[i] * sums->sum[j] / rows;
            out->covariance[i * n + j] = out->covariance[j * n + i] = product / free_rows;
        }
    }
}

/* ---- eigenvalues ---- */

/* Turns columns p and q of a row-major matrix, or its rows: elements (i, p) and (i, q) are i * step apart. */
static void frechet_turn(int n, double *at_p, double *at_q, int step, double c, double s) {
    for (int i = 0; i < n; i++) {
        double *const p = at_p + i * step, *const q = at_q + i * step;
        const double old_p = *p, old_q = *q;
        *p = c * old_p - s * old_q;
        *q = s * old_p + c * old_q;
    }
}

/* One rotation, which makes element (p, q) zero. */
static void frechet_rotate(int n, double *a, double *v, int p, int q) {
    const double off = a[p * n + q];
    if (off == 0.0) return;
    const double theta = (a[q * n + q] - a[p * n + p]) / (2.0 * off);
    const double t = (theta < 0.0 ? -1.0 : 1.0) / (fabs(theta) + sqrt(theta * theta + 1.0));
    const double c = 1.0 / sqrt(t * t + 1.0), s = t * c;
    frechet_turn(n, a + p, a + q, n, c, s);
    frechet_turn(n, a + p * n, a + q * n, 1, c, s);
    frechet_turn(n, v + p, v + q, n, c, s);
    a[p * n + q] = a[q * n + p] = 0.0;
}

void frechet_eigen(int n, double *matrix, double *values, double *vectors) {
    enum { MOST_SWEEPS = 60 }; /* about 8 suffice: the sum of squares falls quadratically in the end */
    double total = 0.0;
    for (int i = 0; i < n * n; i++) total += matrix[i] * matrix[i];
    for (int i = 0; i < n * n; i++) vectors[i] = i % (n + 1) == 0 ? 1.0 : 0.0;
    for (int sweep = 0; sweep < MOST_SWEEPS; sweep++) {
        double off = 0.0;
        for (int p = 0; p < n; p++)
            for (int q = 0; q < p; q++) off += matrix[p * n + q] * matrix[p * n + q];
        if (!(off > 1e-34 * total)) break;
        for (int p = 0; p < n; p++)
            for (int q = p + 1; q < n; q++) frechet_rotate(n, matrix, vectors, p, q);
    }
    for (int i = 0; i < n; i++) values[i] = matrix[i * n + i];
}

/* ---- distance ---- */

/* A covariance has no negative eigenvalues but for rounding. */
static double frechet_root(double eigenvalue) {
    return eigenvalue > 0.0 ? sqrt(eigenvalue) : 0.0;
}

/* out = a^(1/2); `a` is destroyed. */
static void frechet_square_root(int n, double *a, double *out) {
    double values[FRECHET_MOST], vectors[FRECHET_MOST * FRECHET_MOST];
    frechet_eigen(n, a, values, vectors);
    memset(out, 0, (size_t)(n * n) * sizeof *out);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            for (int k = 0; k < n; k++)
                out[i * n + j] += vectors[i * n + k] * frechet_root(values[k]) * vectors[j * n + k];
}

static void frechet_product(int n, const double *a, const double *b, double *out) {
    memset(out, 0, (size_t)(n * n) * sizeof *out);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++)
            for (int j = 0; j < n; j++) out[i * n + j] += a[i * n + k] * b[k * n + j];
}

/* tr (A B)^(1/2) = tr (A^(1/2) B A^(1/2))^(1/2): the products have the same eigenvalues, and this one is symmetric. */
static double frechet_trace_of_root(int n, const double *a, const double *b) {
    double root[FRECHET_MOST * FRECHET_MOST], part[FRECHET_MOST * FRECHET_MOST];
    double whole[FRECHET_MOST * FRECHET_MOST], values[FRECHET_MOST], trace = 0.0;
    memcpy(part, a, (size_t)(n * n) * sizeof *part);
    frechet_square_root(n, part, root);
    frechet_product(n, root, b, part);
    frechet_product(n, part, root, whole);
    for (int i = 0; i < n; i++) /* symmetric to the bit: rotations use both halves */
        for (int j = 0; j < i; j++)
            whole[i * n + j] = whole[j * n + i] = 0.5 * (whole[i * n + j] + whole[j * n + i]);
    frechet_eigen(n, whole, values, part);
    for (int i = 0; i < n; i++) trace += frechet_root(values[i]);
    return trace;
}

double frechet_distance(const frechet_gaussian *a, const frechet_gaussian *b) {
    const int n = a->width;
    double distance = -2.0 * frechet_trace_of_root(n, a->covariance, b->covariance);
    for (int i = 0; i < n; i++) {
        const double between = a->mean[i] - b->mean[i];
        distance += a->covariance[i * n + i] + b->covariance[i * n + i] + between * between;
    }
    return distance < 0.0 ? 0.0 : distance; /* not fmax, which would hide a NaN */
}

/* ---- files ---- */

static void frechet_entries(const int64_t shape[2], xd_weights_entry entries[2]) {
    const xd_weights_entry mean = { "mean", XD_DTYPE_F32, 1, shape };
    const xd_weights_entry covariance = { "covariance", XD_DTYPE_F32, 2, shape };
    entries[0] = mean;
    entries[1] = covariance;
}

xd_result frechet_save(xd_ctx *ctx, const char *path, const frechet_gaussian *g) {
    const int64_t shape[2] = { g->width, g->width };
    float mean[FRECHET_MOST], covariance[FRECHET_MOST * FRECHET_MOST];
    const float *const values[2] = { mean, covariance };
    char rows[32];
    const xd_weights_pair pair = { "rows", rows };
    xd_weights_entry entries[2];
    xd_weights_writer_desc desc;
    frechet_entries(shape, entries);
    snprintf(rows, sizeof rows, "%lld", (long long)g->rows);
    for (int i = 0; i < g->width; i++) mean[i] = (float)g->mean[i];
    for (int i = 0; i < g->width * g->width; i++) covariance[i] = (float)g->covariance[i];
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    desc.entries = entries;
    desc.entry_count = 2;
    desc.metadata = &pair;
    desc.metadata_count = 1;
    return tensors_save(ctx, &desc, values);
}

/* The width is that of "mean"; everything else has to agree with it. */
static xd_result frechet_read(xd_ctx *ctx, const char *path, const xd_weights *file, frechet_gaussian *g) {
    float mean[FRECHET_MOST], covariance[FRECHET_MOST * FRECHET_MOST];
    xd_weights_entry entries[2];
    const int64_t index = xd_weights_find(file, "mean");
    const xd_weights_tensor *info = index < 0 ? NULL : xd_weights_at(file, index);
    const int64_t width = info && info->ndim == 1 ? info->shape[0] : 1;
    const int64_t shape[2] = { width, width };
    const char *rows = xd_weights_metadata(file, "rows");
    XD_REQUIRE(ctx, width >= 1 && width <= FRECHET_MOST, XD_ERROR_SHAPE,
               "%s: mean has %lld features, at least 1 and at most %d", path, (long long)width, FRECHET_MOST);
    frechet_entries(shape, entries);
    XD_TRY(tensors_read(ctx, path, file, &entries[0], mean));
    XD_TRY(tensors_read(ctx, path, file, &entries[1], covariance));
    XD_REQUIRE(ctx, rows && strtoll(rows, NULL, 10) > 0, XD_ERROR_FORMAT,
               "%s: its metadata does not say of how many rows it was measured", path);
    memset(g, 0, sizeof *g);
    g->width = (int)width;
    g->rows = strtoll(rows, NULL, 10);
    for (int i = 0; i < g->width; i++) g->mean[i] = (double)mean[i];
    for (int i = 0; i < g->width * g->width; i++) g->covariance[i] = (double)covariance[i];
    return XD_OK;
}

xd_result frechet_load(xd_ctx *ctx, const char *path, frechet_gaussian *out) {
    xd_weights_desc desc;
    xd_weights *file = NULL;
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    XD_TRY(xd_weights_open(ctx, &desc, &file));
    const xd_result result = frechet_read(ctx, path, file, out);
    xd_weights_close(file);
    return result;
}
