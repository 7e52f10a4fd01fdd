/* The instruction sets of this processor, and the names of the levels. */

#include "base/cpu.h"

#include <string.h>

#if defined(XDI_X86)
#    include <cpuid.h>

/* Not every compiler has a name for it. CPUID takes microseconds on a virtual machine; for names the compiler's
 * run-time library executes it once, before main. */
static bool xdi_cpu_has_f16c(void) {
#    if !defined(__clang__) && __GNUC__ >= 11
    return __builtin_cpu_supports("f16c") != 0;
#    else
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
#    endif
}

static bool xdi_cpu_has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && xdi_cpu_has_f16c();
}

static bool xdi_cpu_has_avx512(void) {
    return xdi_cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool xdi_cpu_has_avx512_bf16(void) {
    return xdi_cpu_has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif

static bool xdi_cpu_has_any(void) {
    return true;
}

#if !defined(XDI_PORTABLE) || !defined(XDI_X86)
static bool xdi_cpu_has_none(void) {
    return false;
}
#endif

#if defined(XDI_PORTABLE)
#    define XDI_CPU_HAS_PORTABLE xdi_cpu_has_any
#else
#    define XDI_CPU_HAS_PORTABLE xdi_cpu_has_none
#endif
#if defined(XDI_X86)
#    define XDI_CPU_HAS(level) xdi_cpu_has_##level
#else
#    define XDI_CPU_HAS(level) xdi_cpu_has_none
#endif

/* By xd_cpu_level. Vector kernels are compiled by function attributes, so plain `cc -O2` builds all levels. */
static const struct xdi_cpu_row {
    const char *name;
    bool (*has)(void);
} xdi_cpu_rows[] = {
    { "best", xdi_cpu_has_any },          { "plain", xdi_cpu_has_any },
    { "portable", XDI_CPU_HAS_PORTABLE }, { "avx2", XDI_CPU_HAS(avx2) },
    { "avx512", XDI_CPU_HAS(avx512) },    { "avx512_bf16", XDI_CPU_HAS(avx512_bf16) },
};

enum { XDI_CPU_ROWS = (int)(sizeof xdi_cpu_rows / sizeof *xdi_cpu_rows) };

XD_API bool xd_cpu_supports(xd_cpu_level level) {
#if defined(XDI_X86)
    __builtin_cpu_init();
#endif
    return (int)level >= 0 && (int)level < XDI_CPU_ROWS && xdi_cpu_rows[level].has();
}

XD_API xd_cpu_level xd_cpu_best(void) {
    int level = XDI_CPU_ROWS - 1;
    while (!xd_cpu_supports((xd_cpu_level)level)) level--;
    return (xd_cpu_level)level;
}

XD_API const char *xd_cpu_level_name(xd_cpu_level level) {
    return (int)level >= 0 && (int)level < XDI_CPU_ROWS ? xdi_cpu_rows[level].name : "unknown";
}
