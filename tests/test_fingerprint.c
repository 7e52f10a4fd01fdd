/* Fingerprints of tensors: every level has the bits of the plain loop, and those of parts add up. 0.1 s at -O2. */

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

enum { MOST = 83, ROOM = MOST * 8 + 8 };

static const xd_cpu_level levels[] = { XD_CPU_BEST, XD_CPU_PORTABLE, XD_CPU_AVX2, XD_CPU_AVX512,
                                       XD_CPU_AVX512_BF16 };

/* Also where numbers wrap around. */
static const int64_t firsts[] = { 0, 1, 5, INT64_C(1) << 32, INT64_C(1) << 40, INT64_MAX - MOST };

static void fill(unsigned char *data, int size) {
    uint64_t state = 3;
    for (int i = 0; i < size; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        data[i] = state >> 63 ? 0xff : (unsigned char)(state >> 40); /* carries run through whole elements */
    }
}

XD_TEST(every_level_has_the_bits_of_the_plain_loop) {
    unsigned char data[ROOM];
    fill(data, ROOM);
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++)
        for (size_t size = 1; size <= 8; size *= 2)
            for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
                for (int64_t count = 0; count <= MOST; count++) {
                    const unsigned char *at = data + count % 8; /* not aligned */
                    CHECK(xdi_fingerprint_level(levels[l], at, size, firsts[f], count) ==
                          xdi_fingerprint_level(XD_CPU_PLAIN, at, size, firsts[f], count));
                }
}

XD_TEST(parts_add_up_to_the_whole) {
    unsigned char data[ROOM];
    fill(data, ROOM);
    for (size_t size = 1; size <= 8; size *= 2) {
        const uint64_t whole = xdi_fingerprint(data, size, 0, MOST);
        for (int64_t cut = 0; cut <= MOST; cut++) {
            const uint64_t head = xdi_fingerprint(data, size, 0, cut);
            CHECK(head + xdi_fingerprint(data + (size_t)cut * size, size, cut, MOST - cut) == whole);
        }
    }
}

/* Each bit of an element and its place count. */
XD_TEST(a_bit_or_a_place_changes_it) {
    unsigned char data[ROOM];
    fill(data, ROOM);
    for (size_t size = 1; size <= 8; size *= 2) {
        const uint64_t before = xdi_fingerprint(data, size, 0, MOST);
        for (size_t bit = 0; bit < 8 * size * MOST; bit++) {
            data[bit / 8] ^= (unsigned char)(1 << bit % 8);
            CHECK(xdi_fingerprint(data, size, 0, MOST) != before);
            data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
        CHECK(xdi_fingerprint(data, size, 1, MOST) != before);
    }
}

XD_TEST_MAIN()
