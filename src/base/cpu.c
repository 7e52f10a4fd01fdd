#include <string.h>

#if defined(XDI_X86)
#    include <cpuid.h>

/* Not every compiler can ask for it by name. */
static bool xdi_cpu_has_f16c(void) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

/* Vector kernels are compiled by function attributes, so plain `cc -O2` has them all. */
static xd_cpu_level xdi_cpu_ask(void) {
#if defined(XDI_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !xdi_cpu_has_f16c())
        return XD_CPU_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return XD_CPU_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? XD_CPU_AVX512_BF16 : XD_CPU_AVX512;
#else
    return XD_CPU_PORTABLE;
#endif
}

/* A virtual machine takes microseconds to say what its processor has, so it is asked once. */
XD_API xd_cpu_level xd_cpu_best(void) {
    static int known; /* XD_CPU_BEST, 0: not asked yet. Threads that ask at the same time write the same. */
    int level = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (level == (int)XD_CPU_BEST) {
        level = (int)xdi_cpu_ask();
        __atomic_store_n(&known, level, __ATOMIC_RELAXED);
    }
    return (xd_cpu_level)level;
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
