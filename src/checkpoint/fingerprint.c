/* Fingerprints of tensors: sums, so that each rank forms that of its elements alone. */

#include "checkpoint/internal.h"

#include <string.h>

/* A finaliser of 64 bits (splitmix64): every bit of the input changes about half of the output's. */
static uint64_t xdi_fingerprint_mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t xdi_fingerprint_bits(const unsigned char *data, size_t size) {
    uint16_t half;
    uint32_t word;
    uint64_t twice;
    switch (size) {
    case 1: return *data;
    case 2: memcpy(&half, data, sizeof half); return half;
    case 4: memcpy(&word, data, sizeof word); return word;
    default: memcpy(&twice, data, sizeof twice); return twice;
    }
}

XD_PRIVATE uint64_t xdi_fingerprint(const void *data, size_t size, int64_t first, int64_t count) {
    const unsigned char *bytes = (const unsigned char *)data;
    uint64_t sum = 0, key = ((uint64_t)first + 1) * UINT64_C(0x9e3779b97f4a7c15);
    for (int64_t i = 0; i < count; i++, bytes += size, key += UINT64_C(0x9e3779b97f4a7c15))
        sum += xdi_fingerprint_mix(xdi_fingerprint_bits(bytes, size) + key);
    return sum;
}
