/* Cases of tests/emu: each runs a small kernel, correct (bug == 0) or with one injected bug, and returns 0 when the result is
 * as expected. */
#ifndef EMU_TEST_KERNELS_H
#define EMU_TEST_KERNELS_H

#include <cuda_runtime.h>

/* The builds, and the modes of the plain build, in which a bug has to be found. */
enum {
    SEEN_ASCENDING = 1,
    SEEN_DESCENDING = 2,
    SEEN_COMPARE = 4,
    SEEN_CHECKER = 8,
    SEEN_ASAN = 16,
    SEEN_LAZY = 32, /* plain build with lazy streams */
    SEEN_PLAIN = SEEN_ASCENDING | SEEN_DESCENDING | SEEN_COMPARE,
    SEEN_ALWAYS = SEEN_PLAIN | SEEN_CHECKER | SEEN_ASAN
};

struct Case {
    const char *name;
    int (*run)(int bug);
    unsigned seen;       /* where the bug must show */
    const char *plain;   /* what a report of the plain build says; NULL: a wrong result suffices */
    const char *checker; /* what a report of the checker says; NULL: a wrong result suffices */
};

extern const Case kernel_cases[];
extern const int kernel_case_count;

/* For tests of streams: y[i] = x[i] + add, by a kernel. */
cudaError_t launch_add(float *y, const float *x, float add, int count, cudaStream_t stream);
/* Launches with these numbers, which may be refused. */
cudaError_t launch_shape(dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream);
cudaError_t allow_dynamic(int bytes);
cudaError_t launch_trap(cudaStream_t stream);
cudaError_t launch_atomic_sum(float *sum, cudaStream_t stream);
/* Warp and block operations, atomics and conversions against plain loops: the number of differences. */
int check_device_functions();
int check_bf16_and_fp16();

#endif
