/* Random numbers from counters. */

#include "base/philox_scalar.h"

XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block) {
    uint32_t words[4];
    xd_philox_words(p, block, words);
    const uint64_t bits = (uint64_t)words[1] << 32 | words[0];
    /* Odd multiples of 2^-53: 52 bits and the one below them, exact, never 0 or 1. */
    return (double)((bits >> 12) * 2u + 1u) * (1.0 / 9007199254740992.0);
}

/* Goes over the blocks that [first, first + count) overlaps; of the first and the last some lanes may be unused. */
static void xdi_philox_fill(const xd_philox *p, int64_t first, int64_t count, float *out, bool normal) {
    const int64_t end = first + count;
    for (int64_t block = first / 4; block * 4 < end; block++) {
        float lanes[4];
        xd_philox_lanes(p, block, normal, lanes);
        const int64_t begin = block * 4 < first ? first : block * 4;
        for (int64_t i = begin; i < block * 4 + 4 && i < end; i++) out[i - first] = lanes[i % 4];
    }
}

XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out) {
    xdi_philox_fill(p, first, count, out, false);
}

XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out) {
    xdi_philox_fill(p, first, count, out, true);
}
