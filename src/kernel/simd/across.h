#ifndef XDI_KERNEL_SIMD_ACROSS_H
#define XDI_KERNEL_SIMD_ACROSS_H

#include "kernel/simd/xtoken_loops.h"
#include "kernel/uld.h"

/* The entries of losses across tokenizers that are faster with vectors. */
XD_PRIVATE void xdi_simd_xtoken_fill(xd_xtoken_kernels *kernels);
XD_PRIVATE void xdi_simd_uld_fill(xd_uld_kernels *kernels);

/* ---- universal logit distillation ---- */

/* Ranks, or pairs of matched ids, at a time. */
enum { XDI_ULD_TILE = 1024 };

/* A tile of both sides. */
typedef struct xdi_uld_tile {
    float x[XDI_ULD_TILE], y[XDI_ULD_TILE]; /* logits of student and teacher */
    float slope[XDI_ULD_TILE];              /* out */
    double value, mean; /* out: sums of the terms, and of slope times the student's merged probability */
} xdi_uld_tile;

/* The inner loops of one vector width; n elements of a tile. */
typedef struct xdi_uld_loops {
    /* |a - b|; slope is the sign of a - b */
    void (*ranks)(xdi_uld_tile *tile, int64_t n, const xdi_xtoken_power *p, const xdi_xtoken_power *q);
    /* the generalised JSD, and its derivative */
    void (*pairs)(xdi_uld_tile *tile, int64_t n, const xdi_xtoken_power *p, const xdi_xtoken_power *q,
                  double beta);
} xdi_uld_loops;

#if defined(XDI_X86)
/* avx2.c: entries of losses across tokenizers that AVX-512 uses unchanged. */
XD_PRIVATE void xdi_v8_to_tables(const float *lanes, int64_t n, float *tables);
XD_PRIVATE void xdi_v8_to_lanes(const float *tables, int64_t n, float *lanes);
#endif

#endif
