#ifndef XDI_BASE_PHILOX_H
#define XDI_BASE_PHILOX_H

#include "base/config.h"

/* Philox4x32-10: a number depends only on its xd_philox and its position. Any rank can compute any element; noise does
 * not depend on the mesh; resuming needs no state. Same bits on every machine, compiler and device. */

/* Purposes of random numbers; two streams share no number. */
enum {
    XD_STREAM_STUDENT_NOISE = 0,
    XD_STREAM_RUNG = 1,
    XD_STREAM_TIME = 2,
    XD_STREAM_EPSILON = 3,
    XD_STREAM_TIME_REAL = 4,
    XD_STREAM_EPSILON_REAL = 5,
    XD_STREAM_R1 = 6,
    XD_STREAM_ROLLOUT = 7,    /* first noise; 8 + j: transition j */
    XD_STREAM_EMA = 64,       /* stochastic rounding of averages */
    XD_STREAM_OPTIMIZER = 80, /* stochastic rounding of parameters */
    XD_STREAM_INIT = 96,
    XD_STREAM_CACHE = 112,
    XD_STREAM_USER = 128 /* to 255: for programs */
};

/* The numbers of a sample, by flat position in the whole sample. */
typedef struct xd_philox {
    uint64_t seed;
    uint8_t stream;  /* XD_STREAM_... */
    uint16_t micro;  /* micro-batch, or other index */
    uint32_t sample; /* global, in the step */
    uint32_t step;   /* optimizer step */
} xd_philox;

/* Returns an odd multiple of 2^-53 in (0, 1), from words 0 and 1 of `block`. */
XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block);

/* Write elements [first, first + count) to out[0, count); adjacent fills give the same numbers as one.
 *
 *   uniform   in (0, 1), odd multiples of 2^-24
 *   normal    mean 0, variance 1, Box-Muller on word pairs; |x| <= 5.8 */
XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out);
XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out);

#endif
