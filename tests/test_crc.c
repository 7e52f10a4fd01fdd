/* CRC-32C: known values, the same bits on every level, and checksums of parts combined. 0.3 s at -O2. */

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/internal.h"
#endif
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <stdlib.h>

enum { LONGEST = 4096, ROOM = 1 << 18 };

/* BEST too: on an x86 without AVX2 it is code that no level has. */
static const xd_cpu_level levels[] = { XD_CPU_BEST, XD_CPU_PLAIN,  XD_CPU_PORTABLE,
                                       XD_CPU_AVX2, XD_CPU_AVX512, XD_CPU_AVX512_BF16 };

enum { LEVELS = sizeof levels / sizeof *levels };

static uint64_t draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 20;
}

/* Bytes that look random. */
typedef struct scene {
    uint64_t state;
    unsigned char *data;
} scene;

static scene scene_make(void) {
    scene s = { 7, (unsigned char *)malloc(ROOM) };
    for (int i = 0; i < ROOM; i++) s.data[i] = (unsigned char)draw(&s.state);
    return s;
}

XD_TEST(every_level_has_the_published_values) {
    unsigned char zeros[32], ones[32], rising[32], falling[32];
    /* A command to read: RFC 3720, B.4, as the next four. */
    static const unsigned char command[48] = {
        [0] = 0x01, [1] = 0xc0, [16] = 0x14, [22] = 0x04, [27] = 0x14, [31] = 0x18, [32] = 0x28, [40] = 0x02
    };
    memset(zeros, 0, sizeof zeros);
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++) rising[i] = (unsigned char)i;
    for (int i = 0; i < 32; i++) falling[i] = (unsigned char)(31 - i);
    CHECK_EQ_INT(xd_crc32c(0, "123456789", 9), 0xe3069283u);
    for (int i = 0; i < LEVELS; i++) {
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, "123456789", 9), 0xe3069283u);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, zeros, 32), 0x8a9136aau);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, ones, 32), 0x62a8ab43u);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, rising, 32), 0x46dd794eu);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, falling, 32), 0x113fdb5cu);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, command, 48), 0xd9963a56u);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, NULL, 0), 0);
        CHECK_EQ_INT(xd_crc32c_level(levels[i], 0x12345678u, NULL, 0), 0x12345678u);
    }
}

XD_TEST(every_level_has_the_same_bits_at_every_length) {
    scene s = scene_make();
    uint32_t plain = 0;
    for (size_t bytes = 0; bytes <= LONGEST; bytes++) {
        for (int i = 0; i < LEVELS; i++)
            if (i != 1) CHECK_EQ_INT(xd_crc32c_level(levels[i], 0, s.data + 3, bytes), plain);
        plain = xd_crc32c_level(XD_CPU_PLAIN, plain, s.data + 3 + bytes, 1);
    }
    CHECK_EQ_INT(xd_crc32c_level(XD_CPU_PLAIN, 0, s.data + 3, LONGEST + 1), plain);
    free(s.data);
}

XD_TEST(every_level_has_the_same_bits_at_every_place) {
    scene s = scene_make();
    for (int n = 0; n < 60; n++) {
        const size_t at = draw(&s.state) % 100, most = n < 50 ? 20000 : ROOM - at;
        const size_t bytes = most - draw(&s.state) % (n < 50 ? most : 100);
        const uint32_t begin = (uint32_t)draw(&s.state);
        const uint32_t plain = xd_crc32c_level(XD_CPU_PLAIN, begin, s.data + at, bytes);
        CHECK_EQ_INT(xd_crc32c(begin, s.data + at, bytes), plain);
        for (int i = 0; i < LEVELS; i++)
            CHECK_EQ_INT(xd_crc32c_level(levels[i], begin, s.data + at, bytes), plain);
    }
    free(s.data);
}

XD_TEST(a_checksum_notices_every_flipped_bit) {
    scene s = scene_make();
    const size_t bytes = 50000;
    const uint32_t whole = xd_crc32c(0, s.data, bytes);
    for (int n = 0; n < 500; n++) {
        const size_t at = draw(&s.state) % bytes;
        const unsigned char bit = (unsigned char)(1u << draw(&s.state) % 8);
        s.data[at] ^= bit;
        CHECK(xd_crc32c(0, s.data, bytes) != whole);
        s.data[at] ^= bit;
    }
    free(s.data);
}

XD_TEST(checksums_of_parts_combine_to_that_of_the_whole) {
    scene s = scene_make();
    for (int n = 0; n < 300; n++) {
        const size_t bytes = draw(&s.state) % (n < 250 ? 300 : ROOM);
        uint32_t crc = 0;
        for (size_t at = 0; at < bytes;) { /* of any lengths, 0 too */
            const size_t part = draw(&s.state) % (bytes - at + 1);
            crc = xdi_crc32c_combine(crc, xd_crc32c(0, s.data + at, part), part);
            at += part;
        }
        CHECK_EQ_INT(crc, xd_crc32c(0, s.data, bytes));
    }
    free(s.data);
}

/* Lengths that nobody can compute: each is twice the one before, so it must be the same as combining that one twice. */
XD_TEST(parts_of_any_length_combine) {
    static const unsigned char zero[1] = { 0 };
    uint32_t zeros = xd_crc32c(0, zero, 1);
    const uint32_t other = xd_crc32c(0, "some text", 9);
    for (int n = 0; n < 63; n++) {
        const uint64_t length = UINT64_C(1) << n;
        const uint32_t once = xdi_crc32c_combine(other, zeros, length);
        const uint32_t twice = xdi_crc32c_combine(zeros, zeros, length);
        CHECK_EQ_INT(xdi_crc32c_combine(once, zeros, length), xdi_crc32c_combine(other, twice, 2 * length));
        CHECK_EQ_INT(xdi_crc32c_combine(xdi_crc32c_combine(other, twice, 2 * length), zeros, length),
                     xdi_crc32c_combine(other, xdi_crc32c_combine(twice, zeros, length), 3 * length));
        zeros = twice;
    }
    unsigned char *memory = (unsigned char *)calloc(ROOM, 1);
    uint32_t crc = xd_crc32c(0, zero, 1);
    for (uint64_t length = 1; length < ROOM; length *= 2) crc = xdi_crc32c_combine(crc, crc, length);
    CHECK_EQ_INT(crc, xd_crc32c(0, memory, ROOM));
    free(memory);
}

XD_TEST_MAIN()
