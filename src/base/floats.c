/* The floating-point state of a thread: how it rounds, and whether denormal numbers become zero. */

#include "base/internal.h"

#include <fenv.h>

/* The parts of a state: the lowest two bits say how results are rounded, 0 to nearest. */
enum {
    XDI_FLOAT_DOWN = 1,
    XDI_FLOAT_UP = 2,
    XDI_FLOAT_TOWARD_ZERO = 3,
    XDI_FLOAT_FLUSH = 4,
    XDI_FLOAT_DENORMALS = 8
};
enum { XDI_FLOAT_STATES = 16 };

static const char *const xdi_float_states[XDI_FLOAT_STATES] = {
    "rounding to nearest",
    "rounding down",
    "rounding up",
    "rounding toward zero",
    "rounding to nearest and flush-to-zero",
    "rounding down and flush-to-zero",
    "rounding up and flush-to-zero",
    "rounding toward zero and flush-to-zero",
    "rounding to nearest and denormals-are-zero",
    "rounding down and denormals-are-zero",
    "rounding up and denormals-are-zero",
    "rounding toward zero and denormals-are-zero",
    "rounding to nearest, flush-to-zero and denormals-are-zero",
    "rounding down, flush-to-zero and denormals-are-zero",
    "rounding up, flush-to-zero and denormals-are-zero",
    "rounding toward zero, flush-to-zero and denormals-are-zero",
};

#if defined(__GNUC__) && defined(__x86_64__) && !defined(__CUDA_ARCH__)
/* The register without its lowest six bits, which tell what has happened and change no result. */
XD_PRIVATE uint64_t xdi_float_word(void) {
    uint32_t word;
    __asm__ volatile("stmxcsr %0" : "=m"(word));
    return word & ~(uint32_t)0x3f;
}

XD_PRIVATE void xdi_float_set(uint64_t word) {
    const uint32_t value = (uint32_t)word;
    __asm__ volatile("ldmxcsr %0" : : "m"(value) : "memory");
}

static unsigned xdi_float_of(uint64_t word) {
    static const unsigned char rounding[] = { 0, XDI_FLOAT_DOWN, XDI_FLOAT_UP, XDI_FLOAT_TOWARD_ZERO };
    return rounding[word >> 13 & 3u] | (word >> 15 & 1u ? (unsigned)XDI_FLOAT_FLUSH : 0u) |
           (word >> 6 & 1u ? (unsigned)XDI_FLOAT_DENORMALS : 0u);
}
#elif defined(__GNUC__) && defined(__aarch64__) && !defined(__CUDA_ARCH__)
XD_PRIVATE uint64_t xdi_float_word(void) {
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}

XD_PRIVATE void xdi_float_set(uint64_t word) {
    __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory");
}

/* One bit does both: it flushes results, and denormal operands are zero. */
static unsigned xdi_float_of(uint64_t word) {
    static const unsigned char rounding[] = { 0, XDI_FLOAT_UP, XDI_FLOAT_DOWN, XDI_FLOAT_TOWARD_ZERO };
    return rounding[word >> 22 & 3u] |
           (word >> 24 & 1u ? (unsigned)XDI_FLOAT_FLUSH | (unsigned)XDI_FLOAT_DENORMALS : 0u);
}
#else
XD_PRIVATE uint64_t xdi_float_word(void) {
    return (uint64_t)(int64_t)fegetround();
}

XD_PRIVATE void xdi_float_set(uint64_t word) {
    (void)fesetround((int)(int64_t)word);
}

static unsigned xdi_float_of(uint64_t word) {
    const int rounding = (int)(int64_t)word;
    (void)rounding;
#    if defined(FE_DOWNWARD)
    if (rounding == FE_DOWNWARD) return XDI_FLOAT_DOWN;
#    endif
#    if defined(FE_UPWARD)
    if (rounding == FE_UPWARD) return XDI_FLOAT_UP;
#    endif
#    if defined(FE_TOWARDZERO)
    if (rounding == FE_TOWARDZERO) return XDI_FLOAT_TOWARD_ZERO;
#    endif
    return 0;
}
#endif

XD_API unsigned xd_float_state(void) {
    return xdi_float_of(xdi_float_word());
}

XD_PRIVATE const char *xdi_float_state_name(unsigned state) {
    return state < (unsigned)XDI_FLOAT_STATES ? xdi_float_states[state] : "unknown";
}

XD_API xd_result xd_float_state_compare(xd_ctx *ctx, int rank, unsigned theirs, unsigned first) {
    if (theirs == first) return XD_OK;
    return XD_FAIL_CULPRIT(ctx, XD_ERROR_MISMATCH, rank, "rank %d computes with %s, rank 0 with %s", rank,
                           xdi_float_state_name(theirs), xdi_float_state_name(first));
}
