#ifndef XDI_BASE_CPU_H
#define XDI_BASE_CPU_H

#include "base/config.h"

/* Instructions of CPU kernels; each level includes the previous. AdamW, EMA and casts have the same bits on every
 * level; losses and norms agree within declared bounds. Threads of one world need equal levels: MISMATCH at the first
 * collective. Worlds of processes use the lowest level of their ranks. */
typedef enum xd_cpu_level {
    XD_CPU_BEST = 0,   /* default: the machine's highest */
    XD_CPU_PLAIN,      /* loops in double: the slow specification */
    XD_CPU_PORTABLE,   /* f32 vectors, any processor; on x86 with XDISTILL_PORTABLE */
    XD_CPU_AVX2,       /* AVX2, FMA and F16C */
    XD_CPU_AVX512,     /* AVX-512 F, BW, DQ, VL */
    XD_CPU_AVX512_BF16 /* and bf16 dot product */
} xd_cpu_level;

/* Returns whether this machine and build have the level. Local, pure. */
XD_API bool xd_cpu_supports(xd_cpu_level level);

/* Returns the highest level available; on x86 without AVX2 and XDISTILL_PORTABLE that is PLAIN. Local, pure. */
XD_API xd_cpu_level xd_cpu_best(void);

/* Returns "best", "plain", "portable", "avx2", "avx512", "avx512_bf16" or "unknown". */
XD_API const char *xd_cpu_level_name(xd_cpu_level level);

#endif
