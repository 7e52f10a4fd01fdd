/* Losses over samples: the student's term and the denoising term against plain loops in double and finite differences, over
 * dtypes, masks, CPU levels, threads and splits. test_dmd_findings.c has what they refuse and what they find. */
#include "planned.h"
#include "sample_losses.h"

/* ---- values and gradients ---- */

XD_TEST(the_students_term_has_the_numbers_of_the_specification) {
    static float x[8] = { 1, 2, -1, .5f, .25f, -.75f, 1.5f, -2 },
                 t[8] = { .5f, 2.5f, -1.5f, 0, .3f, -.8f, 1.4f, -1.9f },
                 f[8] = { .75f, 2, -1, .25f, .28f, -.7f, 1.45f, -1.95f };
    static const double expected[8] = { 0.06249987500025,    -0.1249997500005,     0.1249997500005,
                                        0.06249987500025,    -0.03333288889481465, 0.16666444447407372,
                                        0.08333222223703686, -0.08333222223703686 };
    for (int form = 0; form < 2; form++) {
        float gradient[8];
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        xd_vsd_desc d = xd_vsd_defaults();
        xd_sample_values values;
        d.generated = xd_rows_of(x, XD_DTYPE_F32, 2, 4);
        d.teacher = xd_rows_of(t, XD_DTYPE_F32, 2, 4);
        d.fake = xd_rows_of(f, XD_DTYPE_F32, 2, 4);
        d.gradient = xd_rows_of(gradient, XD_DTYPE_F32, 2, 4);
        d.form = (xd_vsd_form)form;
        CHECK_EQ_INT(xd_vsd_loss(ctx, &d, &values), XD_OK);
        CHECK_NEAR(values.loss, 0.3273559232412808, 1e-6 * 0.33);
        for (int i = 0; i < 8; i++)
            CHECK_NEAR(gradient[i], expected[i],
                       (4 * ldexp(1.0, -24) * (fabs((double)x[i]) + fabs(8 * expected[i])) +
                        1e-5 * fabs(8 * expected[i])) /
                           8);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(values_and_gradients_are_those_of_the_formulas) {
    static const int64_t sizes[] = { 1, 7, 255, 256, 257, 2048, 2049, 16384, 16385, 40000 };
    for (int mode = 0; mode < 2; mode++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            for (int variant = 0; variant < 8; variant++) {
                xd_ctx *ctx = context(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
                fill((loss_kind)(variant & 1), sizes[k], XD_DTYPE_F32, (variant & 2) != 0);
                p.counted = !(variant & 4);
                p.normaliser = (xd_vsd_normaliser)(sizes[k] < 7 ? 0 : (int)k % 3);
                if (p.masked && p.normaliser == XD_VSD_ORIGINAL)
                    p.normaliser = XD_VSD_MEAN; /* the empty sample */
                call_alone(ctx, &first);
                same_as_formulas(&first, 2e-6);
                xd_ctx_destroy(ctx);
            }
}

XD_TEST(narrow_types_are_widened_and_gradients_rounded_once) {
    static const xd_dtype types[] = { XD_DTYPE_BF16, XD_DTYPE_F16 };
    for (int k = 0; k < 2; k++)
        for (int variant = 0; variant < 4; variant++) {
            xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
            fill((loss_kind)(variant & 1), 3001, types[k], (variant & 2) != 0);
            p.counted = false; /* gradients of a size that F16 holds */
            p.gradient_dtype = XD_DTYPE_F32;
            call_alone(ctx, &first);
            same_as_formulas(&first, 2e-6);
            p.gradient_dtype = types[k];
            call_alone(ctx, &second);
            for (int64_t i = 0; i < SAMPLES * p.elements; i++)
                if (second.gradient[i] != rounded(first.gradient[i], types[k]))
                    CHECK_NEAR(second.gradient[i], rounded(first.gradient[i], types[k]), 0.0);
            CHECK(memcmp(&first.values, &second.values, sizeof first.values) == 0);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(the_peers_roundings_are_near_the_exact_form) {
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    fill(VSD, 5000, XD_DTYPE_BF16, true);
    call_alone(ctx, &first);
    p.form = XD_VSD_COMPAT;
    call_alone(ctx, &second);
    double error = 0.0, size = 0.0;
    for (int64_t i = 0; i < SAMPLES * p.elements; i++) {
        error += pow((double)second.gradient[i] - (double)first.gradient[i], 2.0);
        size += pow((double)first.gradient[i], 2.0);
    }
    CHECK(sqrt(error / size) > 1e-3); /* they do round */
    CHECK(sqrt(error / size) < 3.5e-2);
    CHECK_NEAR(second.values.loss, first.values.loss, 2e-2 * first.values.loss);
    xd_ctx_destroy(ctx);
}

/* A counted N of a whole step has the bits of the same number, and goes before denominator_value. */
XD_TEST(a_denominator_of_the_step_divides_as_its_value_does) {
    for (int variant = 0; variant < 8; variant++) {
        const xd_denominator step = { 1000.0, 1.0 / 1000.0, 1000, 0 };
        xd_ctx *ctx = context(variant & 4 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        fill((loss_kind)(variant & 1), 300, XD_DTYPE_F32, (variant & 2) != 0);
        p.counted = false;
        call_alone(ctx, &first);
        part s;
        memset(&s, 0, sizeof s);
        memset(&second, 0, sizeof second);
        s.to = SAMPLES;
        s.end = p.elements;
        xd_sample_common common = common_of(&second, &s, NULL, NULL);
        common.denominator = &step;
        common.denominator_value = 7.0;
        part_open(&s);
        second.result = p.kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                      : denoise_of(ctx, &s, &common, &second.values);
        part_close(&s, &second);
        same_as_formulas(&second, 2e-6);
        same_bits(&first, &second);
        xd_ctx_destroy(ctx);
    }
}

/* ---- bits ---- */

XD_TEST(every_level_and_number_of_threads_has_the_same_bits) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    for (int variant = 0; variant < 24; variant++) {
        const xd_reduction mode = variant & 4 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        fill((loss_kind)(variant & 1), variant & 8 ? 39987 : 2311, types[variant % 3], (variant & 2) != 0);
        p.form = variant & 16 ? XD_VSD_COMPAT : XD_VSD_EXACT;
        xd_ctx *plain = open_ctx(1, NULL, mode, XD_CPU_PLAIN);
        call_alone(plain, &first);
        xd_ctx_destroy(plain);
        XD_TEST_LEVELS(level, XD_CPU_PLAIN)
        for (int threads = 1; threads <= 3; threads += 2) {
            xd_ctx *ctx = open_ctx(threads, NULL, mode, (xd_cpu_level)level);
            call_alone(ctx, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
    }
}

/* Tiles of one type without a mask are formed apart from others; 6160 elements are three and sixteen. */
XD_TEST(whole_tiles_have_the_same_bits_on_every_level_with_numbers_that_are_not_finite_too) {
    static const float found[] = { 0.0f, INFINITY, NAN };
    for (int variant = 0; variant < 12; variant++) {
        const int special = variant / 4;
        fill((loss_kind)(variant & 1), 6160, variant & 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, false);
        if (special) p.in[special - 1][p.elements + 4099] = found[special];
        xd_ctx *plain = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_PLAIN);
        call_alone(plain, &first);
        xd_ctx_destroy(plain);
        CHECK_EQ_INT(first.status.not_finite, special ? 1 : 0);
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            xd_ctx *ctx = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, (xd_cpu_level)level);
            call_alone(ctx, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
    }
}

/* Every product is in the middle between two of bf16, or a fraction of a step of f32 beside it: a level that rounds an estimate
 * in f32 has to notice. 4144 elements are two tiles, a vector and half of one. */
XD_TEST(products_in_the_middle_between_two_of_bf16_are_rounded_alike_on_every_level) {
    static const double beside[SAMPLES] = { 0.0, 0x1p-24, -0x1p-25, 0x1.8p-24, -0x1p-30 };
    for (int kind = 0; kind < 2; kind++) {
        fill((loss_kind)kind, 4144, XD_DTYPE_BF16, false);
        p.normaliser = XD_VSD_NONE;
        p.counted = false;
        p.factor = 1000.0 / 1.5;
        for (int b = 0; b < SAMPLES; b++) {
            const xd_denoise_term term = { 1.0, -1.0, 0.0, 0.5 + 0.5 * beside[b] };
            p.scale[b] = 1.0 + beside[b];
            p.chain[b] = 1.0;
            p.terms[b] = term;
        }
        for (int64_t i = 0; i < SAMPLES * p.elements; i++) {
            const float sign = i % 3 ? 1.0f : -1.0f;
            p.in[1][i] = sign * -0x1p-8f;
            p.in[kind == VSD ? 2 : 0][i] = sign * (1.0f + (float)(i % 128) / 128.0f);
        }
        xd_ctx *plain = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_PLAIN);
        call_alone(plain, &first);
        xd_ctx_destroy(plain);
        CHECK(first.gradient[0] == -1.0f && first.gradient[p.elements + 2] == -1.3984375f);
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            xd_ctx *ctx = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, (xd_cpu_level)level);
            call_alone(ctx, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
    }
}

/* A mask makes N unknown until all samples were measured, so gradients come after all sums. */
XD_TEST(one_sample_after_the_other_has_the_bits_of_all_sums_before_all_gradients) {
    static const int64_t lengths[] = { 1, 300, 16391, 40000 };
    for (int k = 0; k < 16; k++) {
        xd_ctx *ctx = context(k % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        fill(k < 8 ? VSD : DENOISE, lengths[k % 8 / 2], k % 4 < 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16, false);
        call_alone(ctx, &first);
        p.masked = true;
        memset(p.mask, 1, sizeof p.mask);
        call_alone(ctx, &second);
        CHECK_EQ_INT(first.result, XD_OK);
        same_bits(&first, &second);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(invariant_mode_has_the_same_bits_for_every_split_of_samples_and_batch) {
    static const int grids[][2] = { { 1, 1 }, { 1, 2 }, { 1, 3 }, { 1, 4 },
                                    { 2, 1 }, { 4, 1 }, { 2, 2 }, { 3, 2 } };
    for (int variant = 0; variant < 8; variant++)
        for (size_t k = 0; k < sizeof grids / sizeof *grids; k++) {
            fill((loss_kind)(variant & 1), variant & 4 ? 20011 : 3, XD_DTYPE_F32, (variant & 2) != 0);
            p.form = variant == 6 ? XD_VSD_COMPAT : XD_VSD_EXACT;
            xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
            call_alone(ctx, &first);
            call_grid(XD_REDUCTION_INVARIANT, grids[k][0], grids[k][1], &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(deterministic_mode_agrees_to_rounding_over_splits) {
    for (int variant = 0; variant < 4; variant++) {
        fill((loss_kind)(variant & 1), 9001, XD_DTYPE_F32, (variant & 2) != 0);
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        call_alone(ctx, &first);
        call_grid(XD_REDUCTION_DETERMINISTIC, 2, 3, &second);
        CHECK_EQ_INT(second.result, XD_OK);
        CHECK_NEAR(first.values.loss, second.values.loss, 1e-13 * first.values.loss);
        for (int64_t i = 0; i < SAMPLES * p.elements; i++)
            CHECK_NEAR(first.gradient[i], second.gradient[i], 2e-7 * fabs((double)first.gradient[i]));
        xd_ctx_destroy(ctx);
    }
}

/* Counts what is allocated. */
static void *counted_allocate(void *user, size_t bytes) {
    ++*(int *)user;
    return malloc(bytes);
}

static void counted_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(a_workspace_of_the_size_asked_is_enough_and_nothing_is_allocated) {
    for (int variant = 0; variant < 8; variant++) {
        const int kind = variant & 1;
        int allocations = 0;
        xd_ctx_desc desc;
        xd_ctx *ctx = NULL;
        memset(&desc, 0, sizeof desc);
        desc.allocator.allocate = counted_allocate;
        desc.allocator.release = counted_release;
        desc.allocator.user = &allocations;
        desc.reduction = variant & 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        fill((loss_kind)kind, variant & 4 ? 33333 : 20, XD_DTYPE_F32, false);
        call_alone(ctx, &first);
        part s;
        memset(&s, 0, sizeof s);
        memset(&second, 0, sizeof second);
        s.to = SAMPLES;
        s.end = p.elements;
        xd_sample_common common = common_of(&second, &s, NULL, NULL);
        part_open(&s);
        common.workspace_bytes = kind == VSD
                                     ? PLANNED_WORKSPACE(ctx, vsd_of(ctx, &s, &common, &second.values))
                                     : PLANNED_WORKSPACE(ctx, denoise_of(ctx, &s, &common, &second.values));
        part_close(&s, &second);
        common.workspace = malloc(common.workspace_bytes);
        part_open(&s);
        const int before = allocations;
        second.result = kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                    : denoise_of(ctx, &s, &common, &second.values);
        CHECK_EQ_INT(allocations, before);
        same_bits(&first, (part_close(&s, &second), &second));
        part_open(&s);
        common.workspace_bytes--;
        second.result = kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                    : denoise_of(ctx, &s, &common, &second.values);
        CHECK_EQ_INT(second.result, XD_ERROR_ARGUMENT);
        part_close(&s, &second);
        free(common.workspace);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(a_gradient_may_lie_over_an_input) {
    for (int k = 0; k < 3; k++)
        for (int kind = 0; kind < 2; kind++) {
            xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
            fill((loss_kind)kind, 4321, XD_DTYPE_F32, false);
            call_alone(ctx, &first);
            part s;
            memset(&s, 0, sizeof s);
            memset(&second, 0, sizeof second);
            s.to = SAMPLES;
            s.end = p.elements;
            const xd_sample_common common = common_of(&second, &s, NULL, NULL);
            part_open(&s);
            void *apart = s.gradient;
            s.gradient = s.in[k];
            second.result = kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                        : denoise_of(ctx, &s, &common, &second.values);
            memcpy(apart, s.in[k], (size_t)(SAMPLES * p.elements) * sizeof(float));
            s.gradient = apart;
            part_close(&s, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
}

/* More than 8 MiB from the first row to behind the last, so that stores bypass the caches where a row is aligned for them: of rows
 * that begin at a multiple of 64 bytes, and of others. What lies between the rows stays. */
XD_TEST(a_large_gradient_has_the_bits_of_a_small_one) {
    enum { STRIDE = 1 << 20, LENGTH = 6160 };
    char *const memory = (char *)malloc((size_t)SAMPLES * STRIDE * sizeof(float) + 128);
    CHECK(memory != NULL);
    for (int k = 0; k < 8 && memory; k++) {
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        fill((loss_kind)(k & 1), LENGTH, k & 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, false);
        if (k & 4) p.in[1][LENGTH + 5000] = INFINITY; /* this sample's is zero */
        call_alone(ctx, &first);
        const size_t size = xd_dtype_size(p.dtype), shift = k == 2 || k == 3 ? 4 : 0;
        char *const out = memory + (64 - (uintptr_t)memory % 64) + shift;
        part s;
        memset(&s, 0, sizeof s);
        memset(&second, 0, sizeof second);
        s.to = SAMPLES;
        s.end = LENGTH;
        const xd_sample_common common = common_of(&second, &s, NULL, NULL);
        part_open(&s);
        void *const apart = s.gradient;
        for (int b = 0; b < SAMPLES; b++) out[((size_t)b * STRIDE + LENGTH) * size] = 7;
        s.gradient = out;
        p.gradient_stride = STRIDE;
        second.result = p.kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                      : denoise_of(ctx, &s, &common, &second.values);
        for (int b = 0; b < SAMPLES; b++) {
            CHECK_EQ_INT(out[((size_t)b * STRIDE + LENGTH) * size], 7);
            memcpy((char *)apart + (size_t)b * LENGTH * size, out + (size_t)b * STRIDE * size, LENGTH * size);
        }
        s.gradient = apart;
        part_close(&s, &second);
        CHECK_EQ_INT(second.status.not_finite, k & 4 ? 1 : 0);
        same_bits(&first, &second);
        xd_ctx_destroy(ctx);
    }
    free(memory);
}

XD_TEST_MAIN()
