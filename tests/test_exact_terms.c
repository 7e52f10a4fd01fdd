/* INVARIANT mode's vectors: any terms add up to what xdi_fixed_add makes of them one by one, and terms of losses have the same
 * bits in every width. These functions are static in the files of the kernels, so the test carries its implementation, without two wings. */
#define XDISTILL_NO_MODELS
#define XDISTILL_NO_DIFFUSION
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "exact_numbers.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

enum { TERMS = 4096 };

/* ---- sums ---- */

/* n terms, a multiple of the lanes, by the vectors of one width. */
#define WIDTH(w, ATTRIBUTES)                                                                          \
    ATTRIBUTES bool w##_sums(const double *terms, int64_t n, bool positive, xd_fixed *sum) {          \
        w##_sum total = w##_no_sum();                                                                 \
        for (int64_t i = 0; i < n; i += w##_lanes) {                                                  \
            w lanes;                                                                                  \
            memcpy(&lanes, terms + i, sizeof lanes);                                                  \
            if (positive)                                                                             \
                w##_add_positive(&total, lanes);                                                      \
            else                                                                                      \
                w##_add(&total, lanes);                                                               \
        }                                                                                             \
        return w##_sum_of(&total, n, sum);                                                            \
    }                                                                                                 \
    ATTRIBUTES void w##_powers(const double *x, int64_t n, double *out) {                             \
        for (int64_t i = 0; i < n; i += w##_lanes) {                                                  \
            w lanes;                                                                                  \
            memcpy(&lanes, x + i, sizeof lanes);                                                      \
            lanes = w##_exp(lanes);                                                                   \
            memcpy(out + i, &lanes, sizeof lanes);                                                    \
        }                                                                                             \
    }                                                                                                 \
    ATTRIBUTES void w##_mixtures(const double *s, const double *t, int64_t n, double *q, double *p) { \
        for (int64_t i = 0; i < n; i += w##_lanes) {                                                  \
            w a, b, teacher, student;                                                                 \
            memcpy(&a, s + i, sizeof a);                                                              \
            memcpy(&b, t + i, sizeof b);                                                              \
            w##_mixture(a, b, 0.3, 0.01, &teacher, &student);                                         \
            memcpy(q + i, &teacher, sizeof teacher);                                                  \
            memcpy(p + i, &student, sizeof student);                                                  \
        }                                                                                             \
    }                                                                                                 \
    static const width w##_width = { w##_sums, w##_powers, w##_mixtures };

typedef struct width {
    bool (*sums)(const double *terms, int64_t n, bool positive, xd_fixed *sum);
    void (*powers)(const double *x, int64_t n, double *out);
    void (*mixtures)(const double *s, const double *t, int64_t n, double *q, double *p);
} width;

#if defined(XDI_PORTABLE)
WIDTH(xdi_w2, XDI_SIMD_128)
#endif
#if defined(XDI_X86)
WIDTH(xdi_w4, XDI_SIMD_256)
WIDTH(xdi_w8, XDI_SIMD_512)
#endif

static const width *width_of(int level) {
    switch (level) {
#if defined(XDI_PORTABLE)
    case XD_CPU_PORTABLE: return &xdi_w2_width;
#endif
#if defined(XDI_X86)
    case XD_CPU_AVX2: return &xdi_w4_width;
    default: return &xdi_w8_width;
#else
    default: return NULL;
#endif
    }
}

static void check_sums(const double *terms, bool positive) {
    xd_fixed one_by_one = { 0, 0 };
    for (int i = 0; i < TERMS; i++) CHECK(xdi_fixed_add(&one_by_one, terms[i]));
    const xd_fixed expected = normal(one_by_one);
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
        xd_fixed sum;
        CHECK(width_of(level)->sums(terms, TERMS, positive, &sum));
        if (!positive) CHECK(sum.high == one_by_one.high && sum.low == one_by_one.low);
        sum = normal(sum);
        CHECK(sum.high == expected.high && sum.low == expected.low);
    }
}

/* Any 53 bits, exponents from `least` to `most`. */
static double any_term(uint64_t *state, int least, int most) {
    const double fraction = 1.0 + uniform(state);
    return ldexp(fraction, least + (int)(random_bits(state) % (uint64_t)(most - least + 1)));
}

XD_TEST(random_terms_add_up_as_one_by_one) {
    static double terms[TERMS];
    uint64_t state = 5;
    for (int round = 0; round < 60; round++) {
        const int least = round % 3 == 0 ? -1074 : round % 3 == 1 ? -90 : -45;
        for (int i = 0; i < TERMS; i++) terms[i] = any_term(&state, least, round % 2 ? 10 : -20);
        check_sums(terms, true);
        for (int i = 0; i < TERMS; i++)
            if (random_bits(&state) % 2) terms[i] = -terms[i];
        check_sums(terms, false);
    }
}

/* Halves of a unit of 2^-70, which go to the even neighbour, and what lies just beside them; both limbs. */
XD_TEST(ties_zeros_and_subnormals_add_up_as_one_by_one) {
    static double terms[TERMS];
    uint64_t state = 6;
    for (int sign = 0; sign < 2; sign++) {
        for (int i = 0; i < TERMS; i++) {
            const double units = (double)(random_bits(&state) % 2049) + 0.5;
            const double beside = i % 3 == 0 ? 0.0 : (i % 3 == 1 ? 1.0 : -1.0) * ldexp(1.0, -(i % 41));
            double term = ldexp(units + beside, -70);
            if (i % 5 == 0) term = ldexp((double)(random_bits(&state) % 4096) + 0.5, -31);
            if (i % 7 == 0) term = i % 2 ? 0.0 : -0.0;
            if (i % 11 == 0) term = 4.9406564584124654e-324 * (double)(i + 1);
            if (i % 13 == 0) term = 1.0;
            terms[i] = sign && random_bits(&state) % 2 ? -term : term;
        }
        check_sums(terms, sign == 0);
        check_sums(terms, false);
    }
}

XD_TEST(large_terms_are_not_for_the_vectors) {
    const double large[6] = { 2048.0, -2048.0, 1e300, -INFINITY, INFINITY, (double)NAN };
    double terms[64];
    xd_fixed sum;
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE)
    for (int k = 0; k < 6; k++)
        for (int at = 0; at < 64; at += 3) {
            for (int i = 0; i < 64; i++) terms[i] = i % 2 ? 2047.999 : -2047.999;
            CHECK(width_of(level)->sums(terms, 64, false, &sum));
            terms[at] = large[k];
            CHECK(!width_of(level)->sums(terms, 64, false, &sum));
        }
}

/* ---- terms ---- */

XD_TEST(powers_have_the_same_bits_in_every_width_and_are_within_a_unit) {
    static double x[TERMS], out[TERMS];
    uint64_t state = 7;
    double worst = 0.0;
    for (int round = 0; round < 20; round++) {
        const double range = ldexp(1.0, round - 9);
        for (int i = 0; i < TERMS; i++) x[i] = -range * uniform(&state);
        x[0] = -INFINITY;
        x[1] = 0.0;
        x[2] = -708.0;
        x[3] = -707.9999;
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            width_of(level)->powers(x, TERMS, out);
            for (int i = 0; i < TERMS; i++) {
                const double plain = xdi_exact_exp(x[i]);
                CHECK(memcmp(&out[i], &plain, sizeof plain) == 0);
                if (x[i] > -708.0)
                    worst = fmax(worst, fabs(out[i] / exp(x[i]) - 1.0));
                else
                    CHECK(out[i] == 0.0);
            }
        }
        CHECK(out[1] == 1.0);
    }
    CHECK_NEAR(worst, 0.0, 3.4e-16); /* of which half a unit may be exp's */
}

XD_TEST(terms_of_mixtures_have_the_same_bits_in_every_width_and_few_wrong_ones) {
    static double s[TERMS], t[TERMS], q[TERMS], p[TERMS];
    uint64_t state = 8;
    for (int round = 0; round < 20; round++) {
        const double range = ldexp(1.0, round - 10), shift = ldexp(uniform(&state), round % 5);
        for (int i = 0; i < TERMS; i++) {
            s[i] = -range * uniform(&state);
            t[i] = i % 2 ? s[i] - shift * uniform(&state) : -range * uniform(&state);
        }
        s[0] = t[1] = s[2] = t[2] = -INFINITY;
        t[3] = s[3];
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            width_of(level)->mixtures(s, t, TERMS, q, p);
            for (int i = 0; i < TERMS; i++) {
                double teacher, student;
                xdi_exact_mixture(s[i], t[i], 0.3, 0.01, &teacher, &student);
                CHECK(memcmp(&q[i], &teacher, sizeof teacher) == 0);
                CHECK(memcmp(&p[i], &student, sizeof student) == 0);
            }
        }
        for (int i = 0; i < TERMS; i++) {
            double student, teacher;
            xd_log_ratios(t[i] - s[i], 0.3, &student, &teacher);
            const double size = fabs(t[i] - s[i]) + 1.0;
            CHECK_NEAR(q[i], exp(t[i]) > 0.0 ? exp(t[i]) * teacher : 0.0,
                       2e-15 * exp(t[i]) * fmin(size, 800));
            CHECK_NEAR(p[i], exp(s[i]) > 0.0 ? exp(s[i]) * (student - 0.01) : 0.0,
                       2e-15 * exp(s[i]) * fmin(size, 800));
        }
    }
}

XD_TEST(a_sum_near_its_end_is_left_to_the_plain_kernel) {
    xd_fixed total[2] = { { (int64_t)1 << 53, 0 }, { 0, 0 } };
    const xd_fixed part[2] = { { (int64_t)1 << 53, 1 }, { 2, 3 } };
    CHECK(xdi_exact_join(total, part, 2));
    CHECK(total[0].high == (int64_t)1 << 54 && total[0].low == 1 && total[1].high == 2 && total[1].low == 3);
    CHECK(!xdi_exact_join(total, part, 2));
    CHECK(total[0].high == (int64_t)1 << 54 && total[1].high == 2);
}

XD_TEST_MAIN()
