#ifndef XDI_BASE_CPU_H
#define XDI_BASE_CPU_H

#include "base/config.h"

/* Which instructions the CPU kernels use. Each level includes the ones before it. Elementwise operations
 * (AdamW, EMA, casts) give the same bits on every level; losses and norms agree within the bounds that their
 * declarations state. So all ranks of a world must use one level; otherwise their first collective is a
 * MISMATCH. Worlds of MPI and NCCL use the lowest level of their ranks from joining on. */
typedef enum xd_cpu_level {
    XD_CPU_BEST = 0, /* the default: the highest level of this machine */
    XD_CPU_PLAIN,    /* plain loops that compute in double: slow; the specification of the other levels */
    XD_CPU_PORTABLE, /* the compiler's own f32 vectors, for any processor; on x86 with XDISTILL_PORTABLE only */
    XD_CPU_AVX2,     /* AVX2, FMA and F16C */
    XD_CPU_AVX512,   /* AVX-512 F, BW, DQ, VL */
    XD_CPU_AVX512_BF16 /* and its bf16 dot product */
} xd_cpu_level;

/* Whether this machine and this build have the level. Local, pure. */
XD_API bool xd_cpu_supports(xd_cpu_level level);

/* The highest level that this machine and this build have; PLAIN for an x86 without AVX2 in a build without
 * XDISTILL_PORTABLE. Local, pure. */
XD_API xd_cpu_level xd_cpu_best(void);

/* "best", "plain", "portable", "avx2", "avx512", "avx512_bf16"; "unknown" for other values. */
XD_API const char *xd_cpu_level_name(xd_cpu_level level);

/* The level of a name, e.g. from an environment variable. False, and *out untouched, for an unknown one. */
XD_API bool xd_cpu_level_from_name(const char *name, xd_cpu_level *out);

#endif
