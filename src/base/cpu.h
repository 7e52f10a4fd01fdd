#ifndef XDI_BASE_CPU_H
#define XDI_BASE_CPU_H

#include "base/config.h"

/* Instructions of the CPU kernels; each level includes the previous. Elementwise operations (AdamW, EMA, casts) give the same
 * bits on every level; losses and norms agree within declared bounds. Ranks of a world must use one level, or their first
 * collective is a MISMATCH. Worlds of MPI and NCCL use the lowest level of their ranks. */
typedef enum xd_cpu_level {
    XD_CPU_BEST = 0,   /* the default: the highest of this machine */
    XD_CPU_PLAIN,      /* loops in double: slow; the specification */
    XD_CPU_PORTABLE,   /* the compiler's f32 vectors, any processor; on x86 with XDISTILL_PORTABLE */
    XD_CPU_AVX2,       /* AVX2, FMA and F16C */
    XD_CPU_AVX512,     /* AVX-512 F, BW, DQ, VL */
    XD_CPU_AVX512_BF16 /* and bf16 dot product */
} xd_cpu_level;

/* Returns whether this machine and build have the level. Local, pure. */
XD_API bool xd_cpu_supports(xd_cpu_level level);

/* Returns the highest level of this machine and build; PLAIN for x86 without AVX2 and XDISTILL_PORTABLE. Local, pure. */
XD_API xd_cpu_level xd_cpu_best(void);

/* Returns "best", "plain", "portable", "avx2", "avx512" or "avx512_bf16"; "unknown" for other values. */
XD_API const char *xd_cpu_level_name(xd_cpu_level level);

#endif
