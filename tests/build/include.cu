// The header inside a CUDA file: nvcc compiles declarations and implementation as C++.
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

__global__ void xd_unit_kernel(int *out) { *out = XD_VERSION_MAJOR; }
