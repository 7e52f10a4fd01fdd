/* How far a gradient is from its reference, before it is timed. Plain C, which bench/gpu.cu reads as C++, so that
 * tests/test_bench_gradient.c can hold it. Included behind xdistill.h. */
#ifndef XDISTILL_BENCH_GRADIENT_H
#define XDISTILL_BENCH_GRADIENT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* The larger of two errors; NaN is larger than every number, unlike in fmax. */
static inline double bench_larger(double a, double b) {
    return isnan(a) || a > b ? a : b;
}

static inline bool bench_is_zero(const void *data, xd_dtype dtype, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (xd_load_f64(data, dtype, i) != 0.0) return false;
    return true;
}

/* Relative distance of two arrays in the 2-norm. A reference of zeros, against which nothing is small, makes it no number. */
static inline double bench_distance(const void *found, const void *expected, xd_dtype dtype, int64_t count) {
    double difference = 0.0, size = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double x = xd_load_f64(found, dtype, i), y = xd_load_f64(expected, dtype, i);
        difference += (x - y) * (x - y);
        size += y * y;
    }
    return sqrt(difference / size);
}

/* The largest error of the rows of gradients [rows, columns]. The `k` columns that `apart` [rows, k] names are one part of a row,
 * the others another: a label's entry is some hundred times as large as all others together, and would hide them. NULL, 0:
 * rows have one part. */
static inline double bench_gradient_error(const void *found, const void *expected, xd_dtype dtype,
                                          int64_t rows, int64_t columns, const int64_t *apart, int64_t k) {
    double worst = 0.0;
    for (int64_t r = 0; r < rows; r++) {
        double difference[2] = { 0.0, 0.0 }, size[2] = { 0.0, 0.0 };
        int64_t count[2] = { 0, 0 };
        for (int64_t c = 0; c < columns; c++) {
            const double x = xd_load_f64(found, dtype, r * columns + c);
            const double y = xd_load_f64(expected, dtype, r * columns + c);
            int part = 0;
            for (int64_t j = 0; j < k; j++)
                if (apart[r * k + j] == c) part = 1;
            difference[part] += (x - y) * (x - y);
            size[part] += y * y;
            count[part]++;
        }
        for (int part = 0; part < 2; part++)
            if (count[part] > 0) worst = bench_larger(sqrt(difference[part] / size[part]), worst);
    }
    return worst;
}

#endif
