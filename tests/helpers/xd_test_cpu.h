/* The CPU level that a test runs on: XDISTILL_CPU in the environment names it, so that one program is run once per level. */
#ifndef XD_TEST_CPU_H
#define XD_TEST_CPU_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xdistill.h"

/* Finds the level of a name; false for an unknown one, *out untouched. */
static inline bool xd_test_cpu_find(const char *name, xd_cpu_level *out) {
    for (int level = XD_CPU_BEST; level <= (int)XD_CPU_AVX512_BF16; level++) {
        if (strcmp(name, xd_cpu_level_name((xd_cpu_level)level)) != 0) continue;
        *out = (xd_cpu_level)level;
        return true;
    }
    return false;
}

/* Without the variable the best level of this machine; a level that it lacks makes xd_ctx_create fail. */
static inline xd_cpu_level xd_test_cpu(void) {
    const char *name = getenv("XDISTILL_CPU");
    xd_cpu_level level = XD_CPU_BEST;
    if (name && !xd_test_cpu_find(name, &level)) {
        fprintf(stderr, "XDISTILL_CPU: there is no level %s\n", name);
        exit(2);
    }
    return level;
}

/* The levels from `first` on that this machine and this build have. */
#define XD_TEST_LEVELS(level, first)                                          \
    for (int level = (int)(first); level <= (int)XD_CPU_AVX512_BF16; level++) \
        if (xd_cpu_supports((xd_cpu_level)level))

/* The tolerance of a loss: `exact` on the plain level, which computes in double, else 3e-7 of a value of that size. */
static inline double xd_test_f32(double exact, double size) {
    return xd_test_cpu() == XD_CPU_PLAIN ? exact : fmax(exact, 3e-7 * fabs(size));
}

#endif
