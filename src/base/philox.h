#ifndef XDI_BASE_PHILOX_H
#define XDI_BASE_PHILOX_H

#include "base/config.h"

/* Philox4x32-10: numbers by position. Any rank can compute any element; noise does not depend on the mesh; resuming needs
 * no state. Same bits on every machine, compiler and device. */

/* Purposes; no two share a number. */
enum {
    XD_STREAM_STUDENT_NOISE = 0,
    XD_STREAM_RUNG = 1,
    XD_STREAM_TIME = 2,
    XD_STREAM_EPSILON = 3,
    XD_STREAM_TIME_REAL = 4,
    XD_STREAM_EPSILON_REAL = 5,
    XD_STREAM_R1 = 6,
    XD_STREAM_ROLLOUT = 7,    /* 8 + j: transition j */
    XD_STREAM_EMA = 64,       /* rounding */
    XD_STREAM_OPTIMIZER = 80, /* rounding of parameters */
    XD_STREAM_INIT = 96,
    XD_STREAM_USER = 128 /* to 255: for programs */
};

/* By flat position in the unsharded sample. */
typedef struct xd_philox {
    uint64_t seed;
    uint8_t stream;  /* XD_STREAM_... */
    uint16_t micro;  /* micro-batch, or other index */
    uint32_t sample; /* global, in the step */
    uint32_t step;   /* optimizer step */
} xd_philox;

/* Returns a number in (0, 1) with 53 bits, from words 0 and 1 of `block`. */
XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block);

/* Write elements [first, first + count) to out[0, count); adjacent fills equal one.
 *
 *   uniform   in (0, 1), odd multiples of 2^-24
 *   normal    mean 0, variance 1, Box-Muller on word pairs; |x| <= 5.8 */
XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out);
XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out);

#endif
