/* What tools/cuda_build.sh puts before the CUDA unit to look for products that nvcc joins to sums. A fused multiply-add that
 * is meant becomes inline assembly, which the PTX marks, and functions of the math library become calls of functions that
 * are not there: what is left of fma, and of products and sums without .rn, nvcc has made or may make. */

#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <utility>

static __device__ inline float ptx_fmaf(float a, float b, float c) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}

static __device__ inline double ptx_fma(double a, double b, double c) {
    double sum;
    asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(sum) : "d"(a), "d"(b), "d"(c));
    return sum;
}

#define __fmaf_rn(a, b, c) ptx_fmaf(a, b, c)
#define __fma_rn(a, b, c) ptx_fma(a, b, c)

extern __host__ __device__ double ptx_exp(double), ptx_expm1(double), ptx_log(double), ptx_log1p(double);
extern __host__ __device__ float ptx_expf(float), ptx_exp2f(float), ptx_expm1f(float), ptx_logf(float), ptx_log1pf(float);
extern __host__ __device__ double ptx_ldexp(double, int), ptx_frexp(double, int *);

#define exp(x) ptx_exp(x)
#define expm1(x) ptx_expm1(x)
#define log(x) ptx_log(x)
#define log1p(x) ptx_log1p(x)
#define expf(x) ptx_expf(x)
#define exp2f(x) ptx_exp2f(x)
#define expm1f(x) ptx_expm1f(x)
#define logf(x) ptx_logf(x)
#define log1pf(x) ptx_log1pf(x)
#define ldexp(x, n) ptx_ldexp(x, n)
#define frexp(x, n) ptx_frexp(x, n)
