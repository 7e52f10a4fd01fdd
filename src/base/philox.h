#ifndef XDI_BASE_PHILOX_H
#define XDI_BASE_PHILOX_H

#include "base/config.h"

/* Random numbers as a pure function of where they are used (Philox4x32-10; Salmon et al., "Parallel Random Numbers: As
 * Easy as 1, 2, 3", SC11). Any rank can compute any element, so noise does not depend on the mesh, resuming needs no
 * state, and a value can be recomputed instead of stored.
 *
 *     xd_philox noise = { 0 };
 *     noise.seed = 42, noise.stream = XD_STREAM_INIT, noise.sample = row;
 *     xd_philox_fill_normal(&noise, shard_offset, shard_count, shard);
 *
 * The bits are the same on every machine, compiler and device: logarithm, sine and cosine are this library's own
 * polynomials in explicit fused operations. */

/* What the numbers are used for; different purposes never share a number. */
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
    XD_STREAM_USER = 128 /* to 255: the library uses none of these */
};

/* One sequence of numbers, indexed by the element's flat position in the global, unsharded sample. */
typedef struct xd_philox {
    uint64_t seed;
    uint8_t stream;  /* purpose, XD_STREAM_... */
    uint16_t micro;  /* micro-batch, or any second index of the purpose */
    uint32_t sample; /* global index of the sample in the step */
    uint32_t step;   /* optimizer step */
} xd_philox;

/* The block function: 128 random bits for each of 2^128 counters under a 64-bit key. Local. Deterministic. */
XD_API void xd_philox_block(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Counter of block `block` (elements 4 block .. 4 block + 3), in [0, 2^40):
 *   { low 32 bits of block, next 8 bits | stream << 8 | micro << 16, sample, step } */
XD_API void xd_philox_counter(const xd_philox *p, uint64_t block, uint32_t counter[4]);

/* 32 random bits of one element in [0, 2^42). */
XD_API uint32_t xd_philox_word(const xd_philox *p, int64_t element);

/* Uniform in (0, 1) with 53 bits, from words 0 and 1 of block `block`: for times and other scalar draws. */
XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block);

/* Elements [first, first + count) into out[0, count), f32.
 *   uniform   in (0, 1), ends excluded: odd multiples of 2^-24
 *   normal    mean 0, variance 1, by Box-Muller on the word pairs of a block; |x| <= 5.8
 * Several fills of adjacent ranges give the same values as one fill. */
XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out);
XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out);

#endif
