/* Numbers by functions that programs do not have. */
#ifndef XD_TEST_NUMBERS_H
#define XD_TEST_NUMBERS_H

#include "xdistill.h"

/* 32 random bits of one element. */
static inline uint32_t word_of(const xd_philox *p, int64_t element) {
    uint32_t words[4];
    xd_philox_words(p, element / 4, words);
    return words[element % 4];
}

/* The bits of a number rounded to F16. */
static inline uint16_t f16_of(float value) {
    uint16_t bits;
    xd_store_f64(&bits, XD_DTYPE_F16, 0, (double)value);
    return bits;
}

#endif
