/* What instructions this processor has, and the levels' names. */

#include "base/cpu.h"

#include <string.h>

#if defined(XDI_X86)
#    include <cpuid.h>

/* Not every compiler can ask for it by name. Asking the processor instead takes microseconds on a virtual
 * machine; what has a name was asked once, before main. */
static bool xdi_cpu_has_f16c(void) {
#    if !defined(__clang__) && __GNUC__ >= 11
    return __builtin_cpu_supports("f16c") != 0;
#    else
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
#    endif
}
#endif

/* Vector kernels are compiled by function attributes, so plain `cc -O2` has them all. */
XD_API xd_cpu_level xd_cpu_best(void) {
#if defined(XDI_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return XD_CPU_PORTABLE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) /* they have F16C, too */
        return __builtin_cpu_supports("avx512bf16") ? XD_CPU_AVX512_BF16 : XD_CPU_AVX512;
    return xdi_cpu_has_f16c() ? XD_CPU_AVX2 : XD_CPU_PORTABLE;
#else
    return XD_CPU_PORTABLE;
#endif
}

static const char *const xdi_cpu_names[] = { "best", "plain", "portable", "avx2", "avx512", "avx512_bf16" };

XD_API const char *xd_cpu_level_name(xd_cpu_level level) {
    return (int)level >= 0 && (int)level <= (int)XD_CPU_AVX512_BF16 ? xdi_cpu_names[(int)level] : "unknown";
}

XD_API bool xd_cpu_level_parse(const char *name, xd_cpu_level *out) {
    for (int i = 0; i <= (int)XD_CPU_AVX512_BF16; i++) {
        if (strcmp(name, xdi_cpu_names[i]) != 0) continue;
        *out = (xd_cpu_level)i;
        return true;
    }
    return false;
}
