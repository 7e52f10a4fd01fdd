/* Every CPU level against the plain one: elementwise operations to the bit, norms within their bounds; and
 * a step that takes an average along. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "xd_test_numbers.h"
#include "xd_test_cpu.h"
#include "averages.h"

#include <float.h>
#include <stdlib.h>

enum { SIMD_MOST = 70, SIMD_ROOM = SIMD_MOST + 8 };

static const xd_dtype simd_dtypes[3] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };

static xd_ctx *simd_ctx(xd_cpu_level level) {
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.cpu = level;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

static xd_launch simd_launch(xd_ctx *ctx) {
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    return launch;
}

static xd_optimizer_kernels simd_kernels(int level) {
    const xd_ctx_desc desc = { .cpu = (xd_cpu_level)level };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    const xd_optimizer_kernels kernels = xd_ctx_kernels(ctx)->optimizer;
    xd_ctx_destroy(ctx);
    return kernels;
}

static uint32_t simd_random(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 32);
}

static float simd_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Mostly ordinary numbers; one in eight is a zero, an infinity, a NaN, a subnormal or another extreme. */
static float simd_value(uint64_t *state) {
    static const uint32_t odd[] = { 0x00000000u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00001u,
                                    0xffc12345u, 0x00000001u, 0x807fffffu, 0x00800000u, 0x7f7fffffu,
                                    0x3f808000u, 0x3f818000u, 0x477ff000u, 0x33000000u, 0x33000001u };
    const uint32_t random = simd_random(state);
    if (random % 8 == 0) return simd_float(odd[random / 8 % (sizeof odd / sizeof *odd)]);
    return ldexpf((float)(int32_t)simd_random(state), -31 - (int)(random / 8 % 24));
}

static void simd_fill(void *data, xd_dtype dtype, int64_t n, uint64_t seed) {
    for (int64_t i = 0; i < n; i++) xd_store_f64(data, dtype, i, (double)simd_value(&seed));
}

/* Equal bits, or a NaN in both places: which of two NaNs an operation keeps is the processor's choice. */
static bool simd_same(const void *a, const void *b, xd_dtype dtype, int64_t n) {
    const size_t size = xd_dtype_size(dtype);
    for (int64_t i = 0; i < n; i++) {
        const char *x = (const char *)a + (size_t)i * size, *y = (const char *)b + (size_t)i * size;
        if (memcmp(x, y, size) != 0 && !(isnan(xd_load_f64(a, dtype, i)) && isnan(xd_load_f64(b, dtype, i))))
            return false;
    }
    return true;
}

/* ---- steps ---- */

typedef struct simd_step {
    float master[SIMD_ROOM], first[SIMD_ROOM], second[SIMD_ROOM];
    float gradient[SIMD_ROOM], value[SIMD_ROOM]; /* of any dtype */
    double average[SIMD_ROOM];                   /* of any dtype */
} simd_step;

/* Values for a step of n elements; every array begins `offset` elements behind an aligned address. */
static void simd_step_fill(simd_step *s, xd_dtype gradient, xd_dtype value, xd_dtype average, uint64_t seed) {
    memset(s, 0, sizeof *s);
    simd_fill(s->master, XD_DTYPE_F32, SIMD_ROOM, seed);
    simd_fill(s->first, XD_DTYPE_F32, SIMD_ROOM, seed + 1);
    simd_fill(s->second, XD_DTYPE_F32, SIMD_ROOM, seed + 2);
    simd_fill(s->gradient, gradient, SIMD_ROOM, seed + 3);
    simd_fill(s->value, value, SIMD_ROOM, seed + 4);
    simd_fill(s->average, average, SIMD_ROOM, seed + 5);
}

static void *simd_at(void *data, xd_dtype dtype, int64_t index) {
    return (char *)data + (size_t)index * xd_dtype_size(dtype);
}

static void simd_step_run(xd_ctx *ctx, int level, simd_step *s, const xd_update_args *options,
                          xd_update_array a, int64_t offset, bool sgd) {
    const xd_launch launch = simd_launch(ctx);
    const xd_optimizer_kernels kernels = simd_kernels(level);
    xd_update_args args = *options;
    a.master = s->master + offset;
    a.first = s->first + offset;
    a.second = s->second + offset;
    a.gradient = simd_at(s->gradient, a.gradient_dtype, offset);
    if (a.value_dtype != XD_DTYPE_NONE) a.value = simd_at(s->value, a.value_dtype, offset);
    if (a.average_dtype != XD_DTYPE_NONE) a.average = simd_at(s->average, a.average_dtype, offset);
    args.arrays = &a;
    args.array_count = 1;
    CHECK((sgd ? kernels.sgd : kernels.adam)(&launch, &args) == XD_OK);
}

static bool simd_step_same(const simd_step *a, const simd_step *b, xd_dtype value, xd_dtype average) {
    return simd_same(a->master, b->master, XD_DTYPE_F32, SIMD_ROOM) &&
           simd_same(a->first, b->first, XD_DTYPE_F32, SIMD_ROOM) &&
           simd_same(a->second, b->second, XD_DTYPE_F32, SIMD_ROOM) &&
           (value == XD_DTYPE_NONE || simd_same(a->value, b->value, value, SIMD_ROOM)) &&
           (average == XD_DTYPE_NONE || simd_same(a->average, b->average, average, SIMD_ROOM));
}

/* Options by number: scale, sign, L2 decay, first step, average and its form. */
static void simd_options(int number, const float *scale, xd_update_args *args, xd_update_array *a) {
    memset(args, 0, sizeof *args);
    args->gradient_scale = number & 1 ? scale : NULL;
    args->maximize = (number & 2) != 0;
    args->couple_decay = (number & 4) != 0;
    args->one_minus_beta1 = 0.1f;
    args->one_minus_beta2 = 0.001f;
    args->beta2 = 0.999f;
    args->eps = 1e-8f;
    args->momentum = 0.9f;
    args->keep = number & 4 ? 0.3 : 0.999;
    args->weighted_sum = (number & 3) == 3;
    a->decay = 0.9999f;
    a->weight_decay = 0.013f;
    a->step_size = 1.7e-3f;
    a->root_correction = 0.31f;
    a->fresh = (number & 2) != 0;
}

XD_TEST(steps_have_the_same_bits_on_every_level_for_every_length_and_dtype) {
    static const xd_dtype values[4] = { XD_DTYPE_NONE, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    static const xd_dtype averages[5] = { XD_DTYPE_NONE, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16,
                                          XD_DTYPE_F64 };
    const float scale = 0.37f;
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    static simd_step start, plain, other;
    int round = 0;
    for (int64_t n = 0; n <= SIMD_MOST; n++)
        for (int g = 0; g < 3; g++)
            for (int v = 0; v < 4; v++) {
                xd_update_args args;
                xd_update_array a;
                const xd_dtype average = averages[++round % 5];
                const bool sgd = round % 7 == 0;
                const int64_t offset = round % 4;
                memset(&a, 0, sizeof a);
                a.count = n;
                a.gradient_dtype = simd_dtypes[g];
                a.value_dtype = values[v];
                a.average_dtype = average;
                simd_options(round % 8, &scale, &args, &a);
                simd_step_fill(&start, a.gradient_dtype, v ? a.value_dtype : XD_DTYPE_F32,
                               average ? average : XD_DTYPE_F32, (uint64_t)round * 977u);
                plain = start;
                simd_step_run(ctx, XD_CPU_PLAIN, &plain, &args, a, offset, sgd);
                XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
                    other = start;
                    simd_step_run(ctx, level, &other, &args, a, offset, sgd);
                    CHECK(simd_step_same(&plain, &other, a.value_dtype, average));
                }
            }
    xd_ctx_destroy(ctx);
}

/* p <- fma(-step_size, gradient, p) is what one step of momentum-free SGD computes from nothing: any fma
 * can be had. */
static float simd_fma(xd_ctx *ctx, int level, float a, float b, float c) {
    const xd_launch launch = simd_launch(ctx);
    xd_update_args args;
    xd_update_array array;
    float p = c, buffer = 0.0f, gradient = b;
    memset(&args, 0, sizeof args);
    memset(&array, 0, sizeof array);
    array.master = &p;
    array.first = &buffer;
    array.gradient = &gradient;
    array.gradient_dtype = XD_DTYPE_F32;
    array.count = 1;
    array.step_size = -a;
    array.fresh = true;
    args.arrays = &array;
    args.array_count = 1;
    CHECK(simd_kernels(level).sgd(&launch, &args) == XD_OK);
    return p;
}

XD_TEST(products_are_added_with_one_rounding_even_halfway_between_floats) {
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    uint64_t seed = 5;
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        for (int k = 1; k <= 11; k++) { /* (1 + 2^-12)(2^-k + 2^-12-k): its last bit is half a unit of 1 */
            const float a = 1.0f + ldexpf(1.0f, -12), b = ldexpf(a, -k);
            const float tiny = ldexpf(1.0f, -70);
            for (int sign = -1; sign <= 1; sign++) {
                const float c = (float)sign * tiny;
                CHECK(simd_fma(ctx, level, a, b, c) == fmaf(a, b, c));
                CHECK(simd_fma(ctx, level, -a, b, c) == fmaf(-a, b, c));
            }
        }
        for (int i = 0; i < 3000; i++) { /* around subnormal results */
            const float a = ldexpf((float)(int32_t)simd_random(&seed), -31), b = ldexpf(a, -128 - i % 24);
            const float c = ldexpf((float)(int32_t)simd_random(&seed), -31 - 126 - i % 20);
            CHECK(simd_fma(ctx, level, a, b, c) == fmaf(a, b, c));
        }
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(an_element_does_not_feel_its_place_in_the_array) {
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    static simd_step whole, alone;
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        xd_update_args args;
        xd_update_array a;
        memset(&a, 0, sizeof a);
        a.gradient_dtype = XD_DTYPE_BF16;
        a.value_dtype = XD_DTYPE_BF16;
        a.average_dtype = XD_DTYPE_F32;
        simd_options(0, NULL, &args, &a);
        simd_step_fill(&whole, XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_F32, 3);
        alone = whole;
        a.count = SIMD_MOST;
        simd_step_run(ctx, level, &whole, &args, a, 0, false);
        a.count = 1;
        for (int64_t i = 0; i < SIMD_MOST; i++) simd_step_run(ctx, level, &alone, &args, a, i, false);
        CHECK(simd_step_same(&whole, &alone, XD_DTYPE_BF16, XD_DTYPE_F32));
    }
    xd_ctx_destroy(ctx);
}

/* ---- averages, casts, scaling ---- */

XD_TEST(averages_have_the_same_bits_on_every_level_for_every_pair_of_dtypes) {
    static const xd_dtype dtypes[4] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    static const double keeps[5] = { 0.0, 0.3, 0.5, 0.9999, 1.0 };
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    const xd_launch launch = simd_launch(ctx);
    int round = 0;
    for (int64_t n = 0; n <= SIMD_MOST; n++)
        for (int pair = 0; pair < 16; pair++) {
            double source[SIMD_ROOM], start[SIMD_ROOM], plain[SIMD_ROOM], other[SIMD_ROOM];
            const xd_dtype target_dtype = dtypes[pair / 4];
            const int64_t offset = round % 4;
            xd_lerp_array a;
            xd_lerp_args args;
            memset(start, 0, sizeof start);
            a.source_dtype = dtypes[pair % 4];
            a.target_dtype = target_dtype;
            a.count = n;
            a.source = simd_at(source, a.source_dtype, offset);
            simd_fill(source, a.source_dtype, SIMD_ROOM, (uint64_t)round);
            simd_fill(start, target_dtype, SIMD_ROOM, (uint64_t)round + 9999u);
            args.arrays = &a;
            args.array_count = 1;
            args.keep = keeps[round % 5];
            args.weighted_sum = round++ % 3 == 0;
            memcpy(plain, start, sizeof start);
            a.target = simd_at(plain, target_dtype, offset);
            CHECK(simd_kernels(XD_CPU_PLAIN).lerp(&launch, &args) == XD_OK);
            XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
                memcpy(other, start, sizeof start);
                a.target = simd_at(other, target_dtype, offset);
                CHECK(simd_kernels(level).lerp(&launch, &args) == XD_OK);
                CHECK(simd_same(plain, other, target_dtype, SIMD_ROOM));
            }
        }
    xd_ctx_destroy(ctx);
}

static void simd_cast(xd_ctx *ctx, int level, const void *source, xd_dtype from, void *target, xd_dtype to,
                      int64_t n) {
    const xd_launch launch = simd_launch(ctx);
    xd_cast_array a;
    a.source = source;
    a.source_dtype = from;
    a.target = target;
    a.target_dtype = to;
    a.count = n;
    CHECK(simd_kernels(level).cast(&launch, &a, 1) == XD_OK);
}

/* All halves, and floats around every rounding decision; NaNs keep sign and payload. */
XD_TEST(conversions_have_the_bits_of_half_h_on_every_level) {
    enum { ALL = 65536 };
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    uint16_t *half = (uint16_t *)malloc(ALL * sizeof *half),
             *narrow = (uint16_t *)malloc(ALL * sizeof *narrow);
    float *wide = (float *)malloc(ALL * sizeof *wide);
    XD_TEST_LEVELS(level, XD_CPU_PORTABLE) if (half && wide && narrow) for (int d = 1; d < 3; d++) {
        const bool bf16 = simd_dtypes[d] == XD_DTYPE_BF16;
        bool same = true;
        for (int i = 0; i < ALL; i++) half[i] = (uint16_t)i;
        simd_cast(ctx, level, half, simd_dtypes[d], wide, XD_DTYPE_F32, ALL);
        for (int i = 0; i < ALL; i++) {
            const float expected = bf16 ? xd_f32_from_bf16((uint16_t)i) : xd_f32_from_f16((uint16_t)i);
            same = same && (isnan(expected) ? isnan(wide[i]) : memcmp(&wide[i], &expected, 4) == 0);
        }
        CHECK(same);
        for (int below = -1; below <= 1; below++) { /* beside, on and behind the middle between two halves */
            for (int i = 0; i < ALL; i++) {
                const uint32_t step = bf16 ? 0x8000u : 0x1000u;
                const float base = bf16 ? xd_f32_from_bf16((uint16_t)i) : xd_f32_from_f16((uint16_t)i);
                uint32_t bits;
                memcpy(&bits, &base, sizeof bits);
                wide[i] = simd_float(bits + step + (uint32_t)below);
            }
            simd_cast(ctx, level, wide, XD_DTYPE_F32, narrow, simd_dtypes[d], ALL);
            for (int i = 0; i < ALL; i++)
                same = same && narrow[i] == (bf16 ? xd_bf16_from_f32(wide[i]) : f16_of(wide[i]));
            CHECK(same);
        }
    }
    free(half);
    free(narrow);
    free(wide);
    xd_ctx_destroy(ctx);
}

XD_TEST(casts_and_scalings_have_the_same_bits_on_every_level) {
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    const xd_launch launch = simd_launch(ctx);
    for (int64_t n = 0; n <= SIMD_MOST; n++)
        for (int pair = 0; pair < 9; pair++) {
            const xd_dtype from = simd_dtypes[pair / 3], to = simd_dtypes[pair % 3];
            float source[SIMD_ROOM], scaled[SIMD_ROOM], plain[SIMD_ROOM], other[SIMD_ROOM];
            xd_scale_args args;
            simd_fill(source, from, SIMD_ROOM, (uint64_t)(n * 9 + pair));
            memset(plain, 0, sizeof plain);
            simd_cast(ctx, XD_CPU_PLAIN, simd_at(source, from, n % 3), from, plain, to, n);
            args.count = n;
            args.dtype = from;
            args.factor = 1.0f / 3.0f;
            XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
                memset(other, 0, sizeof other);
                simd_cast(ctx, level, simd_at(source, from, n % 3), from, other, to, n);
                CHECK(simd_same(plain, other, to, SIMD_ROOM * 4 / (int64_t)xd_dtype_size(to)));
                memcpy(scaled, source, sizeof scaled);
                memcpy(other, source, sizeof other);
                args.data = scaled;
                CHECK(simd_kernels(XD_CPU_PLAIN).scale(&launch, &args) == XD_OK);
                args.data = other;
                CHECK(simd_kernels(level).scale(&launch, &args) == XD_OK);
                CHECK(simd_same(scaled, other, from, SIMD_ROOM));
            }
        }
    xd_ctx_destroy(ctx);
}

/* Long arrays are not visited in order. */
XD_TEST(long_arrays_are_worked_on_once_everywhere) {
    enum { LONG = (1 << 17) + 777 };
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    const xd_launch launch = simd_launch(ctx);
    float *memory = (float *)calloc(9, LONG * sizeof *memory), *of[8];
    float *gradient = memory + 8 * (size_t)LONG;
    for (int i = 0; i < 8 && memory; i++) of[i] = memory + (size_t)i * LONG;
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) if (memory) {
        const int64_t n = LONG - level;
        float *const *out = level == XD_CPU_PLAIN ? of : of + 4; /* master, two states, average */
        xd_update_array a;
        xd_update_args args;
        xd_scale_args scale;
        memset(&a, 0, sizeof a);
        simd_options(0, NULL, &args, &a);
        for (int i = 0; i < 4; i++) simd_fill(out[i], XD_DTYPE_F32, LONG, (uint64_t)i);
        simd_fill(gradient, XD_DTYPE_F32, LONG, 4);
        a.master = out[0];
        a.gradient = gradient;
        a.average = out[3];
        a.average_dtype = a.gradient_dtype = XD_DTYPE_F32;
        a.first = out[1];
        a.second = out[2];
        a.count = n;
        args.arrays = &a;
        args.array_count = 1;
        scale.data = out[1];
        scale.count = n;
        scale.dtype = XD_DTYPE_F32;
        scale.factor = 3.0f;
        CHECK(simd_kernels(level).adam(&launch, &args) == XD_OK);
        CHECK(simd_kernels(level).scale(&launch, &scale) == XD_OK);
        simd_cast(ctx, level, out[3], XD_DTYPE_F32, out[2], XD_DTYPE_BF16, n);
        simd_cast(ctx, level, out[2], XD_DTYPE_BF16, out[3], XD_DTYPE_F32, n);
        for (int i = 0; i < 4; i++)
            CHECK(
                simd_same(of[i], out[i], i == 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, n)); /* 2 was cast to bf16 */
    }
    free(memory);
    xd_ctx_destroy(ctx);
}

/* ---- norms ---- */

static xd_norm_sum simd_norm(xd_ctx *ctx, int level, const void *data, xd_dtype dtype, int64_t n,
                             xd_norm_type type, bool exact, bool replica) {
    const xd_launch launch = simd_launch(ctx);
    xd_norm_array array;
    xd_norm_args args;
    xd_norm_sum sum;
    memset(&sum, 0, sizeof sum);
    array.data = data;
    array.count = n;
    array.dtype = dtype;
    array.replica = replica;
    args.arrays = &array;
    args.array_count = 1;
    args.type = type;
    args.exact = exact;
    CHECK(simd_kernels(level).norm(&launch, &args, &sum) == XD_OK);
    return sum;
}

static void simd_norm_check(xd_ctx *ctx, const void *data, xd_dtype dtype, int64_t n) {
    for (int form = 0; form < 12; form++) {
        const xd_norm_type type = (xd_norm_type)(form % 3);
        const bool exact = form / 3 % 2 == 1, replica = form / 6 == 1;
        const xd_norm_sum plain = simd_norm(ctx, XD_CPU_PLAIN, data, dtype, n, type, exact, replica);
        const double bound = dtype == XD_DTYPE_BF16 ? ldexp(1.0, -19) : ldexp(1.0, -40);
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            const xd_norm_sum sum = simd_norm(ctx, level, data, dtype, n, type, exact, replica);
            CHECK_NEAR(sum.sum, plain.sum, bound * plain.sum);
            CHECK(sum.largest == plain.largest);
            CHECK_EQ_INT(sum.not_finite, plain.not_finite);
            CHECK_EQ_INT(sum.nan, plain.nan);
            CHECK(memcmp(sum.limbs, plain.limbs, sizeof sum.limbs) == 0);
        }
    }
}

XD_TEST(norms_keep_their_bounds_and_exact_ones_their_bits_on_every_level) {
    enum { LONG = 70000 };
    static float data[LONG + 4];
    static const int exponents[4] = { 0, -70, 60, -149 }; /* squares that leave f32 on either side too */
    static const int64_t lengths[4] = { 511, 513, 3000, LONG };
    xd_ctx *ctx = simd_ctx(XD_CPU_PLAIN);
    for (int d = 0; d < 3; d++) {
        for (int64_t n = 0; n <= SIMD_MOST; n++) {
            simd_fill(data, simd_dtypes[d], n + 4, (uint64_t)n); /* with infinities and NaNs */
            simd_norm_check(ctx, simd_at(data, simd_dtypes[d], n % 4), simd_dtypes[d], n);
        }
        for (int e = 0; e < 4; e++) {
            uint64_t seed = 77;
            for (int64_t i = 0; i < LONG; i++) {
                const float x = ldexpf((float)(int32_t)simd_random(&seed), -31 + (int)(i % 13));
                xd_store_f64(data, simd_dtypes[d], i, (double)ldexpf(x, exponents[e]));
            }
            simd_norm_check(ctx, data, simd_dtypes[d], lengths[e]);
            simd_norm_check(ctx, data, simd_dtypes[d], lengths[3 - e]);
        }
    }
    xd_store_f64(data, XD_DTYPE_F32, 40000, (double)NAN); /* one bad element in a long array */
    simd_norm_check(ctx, data, XD_DTYPE_F32, LONG);
    xd_ctx_destroy(ctx);
}

/* ---- sums over ranks ---- */

XD_TEST(sums_over_pieces_have_the_same_bits_on_every_level) {
    enum { PIECES = 5, LENGTH = 1100 };
    static float data[PIECES][LENGTH], plain[LENGTH], other[LENGTH];
    for (int round = 0; round < 3 * 2 * 20; round++) {
        const xd_dtype dtype = simd_dtypes[round % 3];
        const xd_reduce_op op = round / 3 % 2 ? XD_AVG : XD_SUM;
        const int ranks = 1 + round % PIECES;
        const int64_t n = round < 6 ? LENGTH : round * 3 % SIMD_MOST;
        const void *pieces[PIECES];
        for (int r = 0; r < PIECES; r++) {
            simd_fill(data[r], dtype, LENGTH, (uint64_t)(round * PIECES + r));
            pieces[r] = simd_at(data[r], dtype, n < LENGTH ? r : 0);
        }
        XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
            xd_ctx *ctx = simd_ctx((xd_cpu_level)level);
            memset(other, 0, sizeof other);
            CHECK(xd_reduce_pieces(ctx, other, pieces, ranks, n, dtype, op) == XD_OK);
            if (level == XD_CPU_PLAIN) memcpy(plain, other, sizeof plain);
            CHECK(simd_same(plain, other, dtype, LENGTH));
            xd_ctx_destroy(ctx);
        }
        /* into one of the pieces */
        xd_ctx *ctx = simd_ctx(XD_CPU_BEST);
        void *last = simd_at(data[ranks - 1], dtype, n < LENGTH ? ranks - 1 : 0);
        CHECK(xd_reduce_pieces(ctx, last, pieces, ranks, n, dtype, op) == XD_OK);
        CHECK(simd_same(plain, last, dtype, n));
        xd_ctx_destroy(ctx);
    }
}

/* ---- a step that takes an average along ---- */

enum { TRAIN_N = 600, TRAIN_PARAMS = 7, TRAIN_AVERAGES = 3 };

typedef struct simd_model {
    xd_ctx *ctx;
    float value[TRAIN_PARAMS][TRAIN_N], gradient[TRAIN_N];
    xd_param params[TRAIN_PARAMS], copy[TRAIN_PARAMS];
    xd_optimizer *optimizer;
    xd_ema *averages[TRAIN_AVERAGES];
    int average_count;
} simd_model;

/* f32, bf16 and f16 parameters, one without gradient, a frozen one, a buffer, and a second name for the
 * first. Average i is made over another list of the same when bit i of `other_lists` is set. */
static void simd_model_open(simd_model *m, xd_cpu_level level, xd_optimizer_kind kind,
                            const xd_ema_desc *averages, int average_count, unsigned other_lists) {
    static const char *const names[TRAIN_PARAMS] = { "a", "b", "c", "d", "e", "f", "g" };
    xd_optimizer_desc desc;
    memset(m, 0, sizeof *m);
    m->ctx = simd_ctx(level);
    for (int i = 0; i < TRAIN_PARAMS; i++) {
        xd_param *p = &m->params[i];
        p->name = names[i];
        p->dtype = i < 3 ? simd_dtypes[i] : XD_DTYPE_F32;
        p->count = TRAIN_N - 31 * i;
        p->value = m->value[i];
        p->gradient = m->gradient;
        uint64_t seed = (uint64_t)i;
        for (int k = 0; k < TRAIN_N; k++)
            xd_store_f64(p->value, p->dtype, k, ldexp((double)(int32_t)simd_random(&seed), -31));
    }
    m->params[3].gradient = NULL;
    m->params[4].frozen = true;
    m->params[5].buffer = true;
    m->params[6] = m->params[0];
    m->params[6].name = names[6];
    m->params[6].frozen = true; /* stepped once, under its first name */
    desc = xd_adamw_defaults(m->params, TRAIN_PARAMS);
    desc.kind = kind;
    if (kind != XD_OPTIMIZER_ADAMW) desc.weight_decay = 0.0;
    CHECK(xd_optimizer_create(m->ctx, &desc, &m->optimizer) == XD_OK);
    memcpy(m->copy, m->params, sizeof m->copy);
    m->average_count = average_count;
    for (int i = 0; i < average_count; i++)
        CHECK(average_create(m->ctx, other_lists >> i & 1u ? m->copy : m->params, TRAIN_PARAMS, &averages[i],
                             &m->averages[i]) == XD_OK);
}

static void simd_model_close(simd_model *m) {
    for (int i = 0; i < TRAIN_AVERAGES; i++) xd_ema_destroy(m->averages[i]);
    xd_optimizer_destroy(m->optimizer);
    xd_ctx_destroy(m->ctx);
}

static void simd_model_step(simd_model *m, int step, const xd_status *status, bool together) {
    xd_optimizer_step_desc desc;
    uint64_t seed = 1000u + (uint64_t)step;
    memset(&desc, 0, sizeof desc);
    for (int k = 0; k < TRAIN_N; k++) m->gradient[k] = ldexpf((float)(int32_t)simd_random(&seed), -31);
    desc.status = status;
    desc.averages = m->averages;
    if (together) desc.average_count = m->average_count;
    CHECK(xd_optimizer_step(m->optimizer, &desc, NULL) == XD_OK);
    for (int i = 0; i < m->average_count && !together; i++)
        CHECK(xd_ema_update(m->averages[i], XD_EMA_NEXT, status) == XD_OK);
}

static void simd_model_compare_average(const xd_ema *a, const xd_ema *b) {
    CHECK_EQ_INT(xd_ema_describe(a).record.iteration, xd_ema_describe(b).record.iteration);
    for (int64_t i = 0; i < xd_ema_describe(a).count; i++) {
        const xd_param x = xd_ema_view(a, i).shadow, y = xd_ema_view(b, i).shadow;
        CHECK(memcmp(x.value, y.value, (size_t)x.count * xd_dtype_size(x.dtype)) == 0);
    }
}

static void simd_model_compare(const simd_model *a, const simd_model *b) {
    CHECK(memcmp(a->value, b->value, sizeof a->value) == 0);
    for (int i = 0; i < a->average_count; i++) simd_model_compare_average(a->averages[i], b->averages[i]);
}

static void simd_steps_together_and_apart(xd_cpu_level level, xd_optimizer_kind kind,
                                          const xd_ema_desc *averages, int average_count,
                                          unsigned other_lists) {
    static simd_model together, apart;
    xd_status bad;
    memset(&bad, 0, sizeof bad);
    bad.not_finite = 1;
    simd_model_open(&together, level, kind, averages, average_count, other_lists);
    simd_model_open(&apart, level, kind, averages, average_count, 0);
    for (int step = 0; step < 5; step++) {
        simd_model_step(&together, step, step == 3 ? &bad : NULL, true);
        simd_model_step(&apart, step, step == 3 ? &bad : NULL, false);
        simd_model_compare(&together, &apart);
    }
    simd_model_close(&together);
    simd_model_close(&apart);
}

XD_TEST(a_step_with_an_average_equals_a_step_and_an_update) {
    static const xd_dtype shadows[3] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64 };
    for (int round = 0; round < 24; round++) {
        xd_ema_desc average;
        memset(&average, 0, sizeof average);
        average.decay = 0.9;
        average.dtype = shadows[round / 2 % 3];
        average.start_iteration = round % 4;
        average.init_from_current = round % 5 == 0;
        average.compat_credit = round % 6 == 5;
        simd_steps_together_and_apart(round % 2 ? XD_CPU_BEST : XD_CPU_PLAIN, (xd_optimizer_kind)(round % 3),
                                      &average, 1, round % 8 == 7);
    }
}

XD_TEST(a_step_with_three_averages_equals_a_step_and_three_updates) {
    xd_ema_desc averages[TRAIN_AVERAGES];
    for (int i = 0; i < TRAIN_AVERAGES; i++) averages[i] = xd_ema_defaults(XD_EMA_CONSTANT);
    averages[0].decay = 0.9;
    averages[0].start_iteration =
        2; /* the second one averages before it: the one that is taken along changes */
    averages[1].decay = 0.5;
    averages[1].dtype = XD_DTYPE_BF16;
    averages[2] = xd_ema_defaults(XD_EMA_RAMP);
    averages[2].compat_credit = true;
    for (unsigned other_lists = 0; other_lists < 8; other_lists++)
        simd_steps_together_and_apart(other_lists % 2 ? XD_CPU_PLAIN : XD_CPU_BEST,
                                      (xd_optimizer_kind)(other_lists % 3), averages, TRAIN_AVERAGES,
                                      other_lists);
}

XD_TEST(a_step_with_a_list_of_no_average_is_a_plain_step) {
    static simd_model listed, plain;
    simd_model_open(&listed, XD_CPU_BEST, XD_OPTIMIZER_ADAMW, NULL, 0, 0);
    simd_model_open(&plain, XD_CPU_BEST, XD_OPTIMIZER_ADAMW, NULL, 0, 0);
    simd_model_step(&listed, 0, NULL, true);
    memcpy(plain.gradient, listed.gradient, sizeof plain.gradient);
    CHECK(xd_optimizer_step(plain.optimizer, NULL, NULL) == XD_OK);
    CHECK(memcmp(plain.value, listed.value, sizeof plain.value) == 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(listed.optimizer, 0).step, 1);
    simd_model_close(&plain);
    simd_model_close(&listed);
}

/* A step with this list of averages is refused and changes nothing. */
static void simd_step_refused(simd_model *m, xd_ema *const *averages, int count, xd_result expected,
                              const char *message) {
    static simd_model before;
    xd_optimizer_step_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.averages = averages;
    desc.average_count = count;
    before = *m;
    const int64_t step = *xd_optimizer_state_at(m->optimizer, 0).step;
    const int64_t iteration = xd_ema_describe(m->averages[0]).record.iteration;
    CHECK(xd_optimizer_step(m->optimizer, &desc, NULL) == expected);
    CHECK_EQ_STR(xd_last_error(m->ctx)->message, message);
    CHECK(memcmp(before.value, m->value, sizeof m->value) == 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(m->optimizer, 0).step, step);
    CHECK_EQ_INT(xd_ema_describe(m->averages[0]).record.iteration, iteration);
}

XD_TEST(a_list_of_averages_with_a_hole_is_refused) {
    static simd_model m;
    const xd_ema_desc average[1] = { xd_ema_defaults(XD_EMA_CONSTANT) };
    simd_model_open(&m, XD_CPU_BEST, XD_OPTIMIZER_ADAMW, average, 1, 0);
    simd_model_step(&m, 0, NULL, true);
    xd_ema *const hole[3] = { m.averages[0], NULL, m.averages[0] };
    xd_ema *const twice[2] = { m.averages[0], m.averages[0] };
    simd_step_refused(&m, hole, 3, XD_ERROR_ARGUMENT, "average 1 of 3 is NULL");
    simd_step_refused(&m, twice, 2, XD_ERROR_ARGUMENT, "averages 0 and 1 are the same one");
    simd_step_refused(&m, twice, -2, XD_ERROR_ARGUMENT, "-2 averages");
    simd_step_refused(&m, NULL, 2, XD_ERROR_ARGUMENT, "2 averages at NULL");
    simd_model_close(&m);
}

XD_TEST(a_step_whose_average_has_lost_its_parameters_changes_nothing) {
    static simd_model m;
    static xd_param list[1];
    const xd_ema_desc average[1] = { xd_ema_defaults(XD_EMA_CONSTANT) };
    simd_model_open(&m, XD_CPU_BEST, XD_OPTIMIZER_ADAMW, average, 1, 1);
    simd_model_step(&m, 0, NULL, true);
    list[0] = m.params[0];
    CHECK(average_create(m.ctx, list, 1, NULL, &m.averages[1]) == XD_OK);
    list[0].count--;
    simd_step_refused(&m, m.averages, 2, XD_ERROR_STATE,
                      "a: value, dtype, count or flags changed since creation: count was 600 and is 599");
    simd_model_close(&m);
}

XD_TEST_MAIN()
