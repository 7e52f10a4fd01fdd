#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "xd_test_numbers.h"

#include <stdlib.h>

static void check_block(const uint32_t counter[4], const uint32_t key[2], const uint32_t expected[4]) {
    uint32_t out[4];
    xd_philox_rounds(counter, key, out);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(out[i], expected[i]);
}

static xd_philox sequence(void) {
    xd_philox p = { 0x123456789abcdef0u, XD_STREAM_INIT, 3, 17, 1000 };
    return p;
}

XD_TEST(the_block_function_gives_the_known_answers) {
    const uint32_t zero[4] = { 0, 0, 0, 0 };
    const uint32_t ones[4] = { 0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu };
    const uint32_t pi[4] = { 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u };
    const uint32_t pi_key[2] = { 0xa4093822u, 0x299f31d0u };
    const uint32_t from_zero[4] = { 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u };
    const uint32_t from_ones[4] = { 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu };
    const uint32_t from_pi[4] = { 0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u };
    check_block(zero, zero, from_zero);
    check_block(ones, ones, from_ones);
    check_block(pi, pi_key, from_pi);
}

XD_TEST(the_counter_holds_block_stream_micro_sample_and_step) {
    const xd_philox p = { 0, 0xab, 0xcdef, 0x11223344u, 0x55667788u };
    uint32_t counter[4];
    xd_philox_counter_of(&p, 0xfe76543210u, counter);
    CHECK_EQ_INT(counter[0], 0x76543210u);
    CHECK_EQ_INT(counter[1], 0xcdefabfeu);
    CHECK_EQ_INT(counter[2], 0x11223344u);
    CHECK_EQ_INT(counter[3], 0x55667788u);
}

XD_TEST(a_shard_holds_the_same_values_as_the_whole) {
    enum { COUNT = 103 };
    const xd_philox p = sequence();
    float whole[COUNT], part[COUNT];
    for (int normal = 0; normal < 2; normal++) {
        void (*fill)(const xd_philox *, int64_t, int64_t, float *) =
            normal ? xd_philox_fill_normal : xd_philox_fill_uniform;
        fill(&p, 0, COUNT, whole);
        for (int first = 0; first < COUNT; first += 7)
            for (int count = 0; first + count <= COUNT; count += 5) {
                part[count] = -99.0f;
                fill(&p, first, count, part);
                CHECK(memcmp(part, whole + first, (size_t)count * sizeof *part) == 0);
                CHECK(part[count] == -99.0f);
            }
    }
}

XD_TEST(every_field_of_the_sequence_changes_the_numbers) {
    xd_philox p[7];
    for (int i = 0; i < 7; i++) p[i] = sequence();
    p[1].seed ^= 1;
    p[2].seed ^= (uint64_t)1 << 63;
    p[3].stream ^= 1;
    p[4].micro ^= 1;
    p[5].sample ^= 1;
    p[6].step ^= 1;
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < i; j++) CHECK(word_of(&p[i], 5) != word_of(&p[j], 5));
    CHECK(word_of(p, (int64_t)1 << 40) != word_of(p, 0)); /* the bits above 32 count */
}

XD_TEST(uniforms_lie_inside_the_open_interval_and_are_exact) {
    const xd_philox p = sequence();
    double sum = 0.0;
    for (int64_t i = 0; i < 40000; i++) {
        float u;
        xd_philox_fill_uniform(&p, i, 1, &u);
        const double exact = ((double)(word_of(&p, i) >> 9) + 0.5) / 8388608.0;
        CHECK((double)u == exact && u > 0.0f && u < 1.0f);
        const double wide = xd_philox_uniform_f64(&p, i);
        CHECK(wide > 0.0 && wide < 1.0);
        sum += (double)u + wide;
    }
    CHECK_NEAR(sum / 80000.0, 0.5, 0.005);
}

/* Distance in units in the last place of the expected value. */
static double ulps(double got, double expected) {
    int exponent;
    frexp(expected, &exponent);
    return fabs(got - expected) / ldexp(1.0, exponent - 24);
}

XD_TEST(normals_agree_with_the_mathematical_library_to_a_few_units_in_the_last_place) {
    const xd_philox p = sequence();
    const double turn = 6.283185307179586;
    double worst = 0.0;
    for (int64_t i = 0; i < 200000; i += 2) {
        float u[2], x[2];
        xd_philox_fill_uniform(&p, i, 2, u);
        xd_philox_fill_normal(&p, i, 2, x);
        const double radius = sqrt(-2.0 * log((double)u[0]));
        const double error = fmax(ulps((double)x[0], radius * cos(turn * (double)u[1])),
                                  ulps((double)x[1], radius * sin(turn * (double)u[1])));
        if (error > worst) worst = error;
    }
    CHECK_NEAR(worst, 0.0, 3.0);
}

XD_TEST(normals_have_the_moments_of_the_normal_distribution) {
    enum { COUNT = 400000 };
    const xd_philox p = sequence();
    float *x = (float *)malloc(COUNT * sizeof *x);
    double moment[5] = { 0.0, 0.0, 0.0, 0.0, 0.0 };
    xd_philox_fill_normal(&p, 0, COUNT, x);
    for (int i = 0; i < COUNT; i++) {
        double power = 1.0;
        for (int k = 1; k < 5; k++) moment[k] += (power *= (double)x[i]) / COUNT;
        CHECK(x[i] >= -5.8f && x[i] <= 5.8f);
    }
    CHECK_NEAR(moment[1], 0.0, 0.006);
    CHECK_NEAR(moment[2], 1.0, 0.01);
    CHECK_NEAR(moment[3], 0.0, 0.03);
    CHECK_NEAR(moment[4], 3.0, 0.08);
    free(x);
}

/* The same number under every compiler, flag and language; it changes only when the contract does. */
XD_TEST(the_bits_of_the_normals_are_fixed) {
    const xd_philox p = sequence();
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < 20000; i += 100) {
        float x[100];
        xd_philox_fill_normal(&p, i, 100, x);
        for (int k = 0; k < 100; k++) {
            uint32_t bits;
            memcpy(&bits, &x[k], sizeof bits);
            hash = (hash ^ bits) * 0x100000001b3u;
        }
    }
    CHECK(hash == 0x0ec23273bc1d516du);
}

XD_TEST_MAIN()
