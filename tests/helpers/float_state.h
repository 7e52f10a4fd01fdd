#ifndef FLOAT_STATE_H
#define FLOAT_STATE_H

/* Floating-point states of a thread for tests: what a host program may have set before it calls the library. */
#include <fenv.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum float_kind { FLOAT_DEFAULT, FLOAT_UP, FLOAT_FLUSH, FLOAT_KINDS } float_kind;

/* False where the test knows no way to set it. */
static inline bool float_state_set(float_kind kind) {
    fesetround(kind == FLOAT_UP ? FE_UPWARD : FE_TONEAREST);
#if defined(__x86_64__)
    uint32_t word;
    __asm__ volatile("stmxcsr %0" : "=m"(word));
    word = (word & ~0x8040u) | (kind == FLOAT_FLUSH ? 0x8040u : 0u);
    __asm__ volatile("ldmxcsr %0" : : "m"(word) : "memory");
    return true;
#elif defined(__aarch64__)
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    word = (word & ~((uint64_t)1 << 24)) | (uint64_t)(kind == FLOAT_FLUSH) << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory");
    return true;
#else
    return kind != FLOAT_FLUSH;
#endif
}

static const char *const float_words[FLOAT_KINDS] = {
    "rounding to nearest", "rounding up", "rounding to nearest, flush-to-zero and denormals-are-zero"
};

#endif
