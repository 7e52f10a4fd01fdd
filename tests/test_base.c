#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/internal.h"
#endif
#include "xd_test.h"

#include <stdlib.h>
#include <unistd.h>

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- dtypes ---- */

XD_TEST(dtypes_know_their_size_name_and_kind) {
    CHECK_EQ_INT(xd_dtype_size(XD_DTYPE_BF16), 2);
    CHECK_EQ_INT(xd_dtype_size(XD_DTYPE_F64), 8);
    CHECK_EQ_INT(xd_dtype_size(XD_DTYPE_NONE), 0);
    CHECK_EQ_INT(xd_dtype_size(XD_DTYPE_COUNT), 0);
    CHECK_EQ_STR(xd_dtype_name(XD_DTYPE_F8_E4M3), "F8_E4M3");
    CHECK(xd_dtype_is_floating(XD_DTYPE_F16) && !xd_dtype_is_floating(XD_DTYPE_U8));
    for (int i = 1; i < (int)XD_DTYPE_COUNT; i++)
        CHECK_EQ_INT(xdi_dtype_from_name(xd_dtype_name((xd_dtype)i)), i);
    CHECK_EQ_INT(xdi_dtype_from_name("F4"), XD_DTYPE_NONE);
    CHECK_EQ_INT(xdi_dtype_from_name("f32"), XD_DTYPE_NONE);
}

XD_TEST(the_best_cpu_level_is_the_highest_that_there_is_and_the_default) {
    const xd_cpu_level best = xd_cpu_best();
    xd_ctx *ctx = NULL;
    CHECK(best >= XD_CPU_PLAIN && xd_cpu_supports(best));
    for (int level = (int)best + 1; level <= (int)XD_CPU_AVX512_BF16; level++)
        CHECK(!xd_cpu_supports((xd_cpu_level)level));
    const xd_ctx_desc desc = { .cpu = best };
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK_EQ_INT(xd_ctx_settings(ctx)->cpu, best);
    xd_ctx_destroy(ctx);
}

/* ---- 16-bit floats ---- */

typedef struct half_format {
    uint16_t (*from)(float);
    float (*to)(uint16_t);
    uint16_t infinity;
} half_format;

static const half_format half_formats[] = { { xd_bf16_from_f32, xd_f32_from_bf16, 0x7f80 },
                                            { xdi_f16_from_f32, xd_f32_from_f16, 0x7c00 } };

XD_TEST(every_16_bit_float_survives_the_way_through_f32) {
    for (int f = 0; f < 2; f++) {
        const half_format *h = &half_formats[f];
        for (uint32_t i = 0; i < 0x10000u; i++) {
            const uint16_t bits = (uint16_t)i;
            const float wide = h->to(bits);
            if ((bits & 0x7fff) > h->infinity) {
                CHECK(isnan(wide) && (h->from(wide) & 0x7fff) > h->infinity);
                CHECK_EQ_INT(h->from(wide) & 0x8000, bits & 0x8000);
            } else {
                CHECK_EQ_INT(h->from(wide), bits);
            }
        }
    }
}

/* Between neighbours a < b: below the middle gives a, above gives b, the middle itself the even one. */
XD_TEST(rounding_to_16_bits_is_to_nearest_with_ties_to_even) {
    for (int f = 0; f < 2; f++) {
        const half_format *h = &half_formats[f];
        for (uint16_t a = 0; a < h->infinity - 1; a++) {
            const float low = h->to(a), high = h->to((uint16_t)(a + 1));
            const float middle = (float)(0.5 * ((double)low + (double)high));
            const uint16_t even = (uint16_t)(a + (a & 1));
            CHECK_EQ_INT(h->from(middle), even);
            CHECK_EQ_INT(h->from(-middle), even | 0x8000);
            CHECK_EQ_INT(h->from(float_of(bits_of(middle) - 1u)), a);
            CHECK_EQ_INT(h->from(float_of(bits_of(middle) + 1u)), a + 1);
        }
    }
}

XD_TEST(overflow_to_16_bits_gives_infinity_and_nan_stays_quiet) {
    CHECK_EQ_INT(xdi_f16_from_f32(65504.0f), 0x7bff);
    CHECK_EQ_INT(xdi_f16_from_f32(65519.996f), 0x7bff);
    CHECK_EQ_INT(xdi_f16_from_f32(65520.0f), 0x7c00);
    CHECK_EQ_INT(xdi_f16_from_f32(-1e30f), 0xfc00);
    CHECK_EQ_INT(xd_bf16_from_f32(float_of(0x7f7f7fffu)), 0x7f7f);
    CHECK_EQ_INT(xd_bf16_from_f32(float_of(0x7f7f8000u)), 0x7f80);
    CHECK_EQ_INT(xd_bf16_from_f32(-INFINITY), 0xff80);
    CHECK_EQ_INT(xd_bf16_from_f32(float_of(0x7f800001u)), 0x7fc0); /* signalling, payload in the lost bits */
    CHECK_EQ_INT(xdi_f16_from_f32(float_of(0xff800001u)), 0xfe00);
}

XD_TEST(elements_of_any_arithmetic_dtype_load_and_store) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                       XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        double room[4] = { 0.0, 0.0, 0.0, 0.0 };
        for (int k = 0; k < 4; k++) xd_store_f64(room, dtypes[i], k, 3.0 + k);
        for (int k = 0; k < 4; k++) CHECK_EQ_INT(xd_load_f64(room, dtypes[i], k), 3 + k);
    }
}

/* ---- the arena ---- */

XD_TEST(a_planning_run_gives_the_offsets_and_the_size_of_the_real_one) {
    static const size_t sizes[] = { 1, 0, 64, 65, 7 };
    xd_arena plan = xd_arena_over(NULL, 0);
    size_t offsets[5];
    for (int i = 0; i < 5; i++) CHECK(xdi_arena_take(&plan, sizes[i], &offsets[i]));
    CHECK_EQ_INT(plan.peak, 263);
    CHECK(xd_arena_take_pointer(&plan, 1) == NULL);
    unsigned char memory[263];
    xd_arena real = xd_arena_over(memory, sizeof memory);
    for (int i = 0; i < 5; i++) {
        const unsigned char *at = (const unsigned char *)xd_arena_take_pointer(&real, sizes[i]);
        CHECK(at == memory + offsets[i]);
    }
    CHECK_EQ_INT(real.used, sizeof memory);
    CHECK(xd_arena_take_pointer(&real, 1) == NULL);
    CHECK_EQ_INT(real.used, sizeof memory);
}

XD_TEST(sizes_that_overflow_are_refused_by_the_arena) {
    xd_arena plan = xd_arena_over(NULL, 0);
    size_t offset = 7;
    CHECK(xdi_arena_take(&plan, 1, &offset));
    CHECK(!xdi_arena_take(&plan, SIZE_MAX - 10, &offset));
    CHECK_EQ_INT(plan.used, 1);
}

/* ---- the context and its errors ---- */

typedef struct log_book {
    int lines;
    xd_log_level level;
    char last[640];
} log_book;

static void log_line(void *user, xd_log_level level, const char *line) {
    log_book *book = (log_book *)user;
    book->lines++;
    book->level = level;
    snprintf(book->last, sizeof book->last, "%s", line);
}

static void *no_memory(void *user, size_t bytes) {
    (void)user, (void)bytes;
    return NULL;
}

static void no_release(void *user, void *memory) {
    (void)user, (void)memory;
}

XD_TEST(the_settings_show_every_default) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const xd_ctx_desc *d = xd_ctx_settings(ctx);
    CHECK(d->timeout_seconds == 60.0 && d->init_timeout_seconds == 600.0);
    CHECK(d->allocator.allocate && d->clock.now_seconds && d->files.open && d->files.sync_directory);
    CHECK_EQ_INT(d->reduction, XD_REDUCTION_DETERMINISTIC);
    CHECK(xd_now(ctx) <= xd_now(ctx));
    CHECK_EQ_INT(xd_last_error(ctx)->result, XD_OK);
    xd_ctx_destroy(ctx);
    xd_ctx_destroy(NULL);
}

XD_TEST(a_bad_desc_or_no_memory_gives_no_context) {
    xd_ctx *ctx = NULL;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_seconds = -1.0;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_ARGUMENT);
    desc.timeout_seconds = (double)NAN;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_ARGUMENT);
    desc.timeout_seconds = 1.0;
    desc.allocator.allocate = no_memory;
    desc.allocator.release = no_release;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_MEMORY);
    CHECK(ctx == NULL);
}

XD_TEST(refusals_without_a_context_tell_the_logger) {
    log_book book = { 0, XD_LOG_NONE, "" };
    xd_ctx *ctx = NULL;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.logger.write = log_line;
    desc.logger.user = &book;
    desc.timeout_seconds = -2.5;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_ERROR_ARGUMENT);
    CHECK(strstr(book.last, "timeout_seconds -2.5") != NULL);
    desc.timeout_seconds = 0.0;
    desc.log_level = XD_LOG_NONE;
    CHECK_EQ_INT(xd_ctx_create_versioned(10200, &desc, &ctx), XD_ERROR_MISMATCH);
    CHECK_EQ_INT(book.lines, 1);
    desc.log_level = XD_LOG_WARN;
    CHECK_EQ_INT(xd_ctx_create_versioned(10203, &desc, &ctx), XD_ERROR_MISMATCH);
    char both[100];
    snprintf(both, sizeof both, "version 1.2.3, but the implementation is %d.%d.%d", XD_VERSION_MAJOR,
             XD_VERSION_MINOR, XD_VERSION_PATCH);
    CHECK(strstr(book.last, both) != NULL && book.level == XD_LOG_ERROR);
    CHECK(ctx == NULL);
    /* Patches change no declaration. */
    CHECK_EQ_INT(xd_ctx_create_versioned(XD_VERSION + 1, &desc, &ctx), XD_OK);
    xd_ctx_destroy(ctx);
}

XD_TEST(elements_are_converted_where_nothing_is_cut_off) {
    const int32_t labels[3] = { 7, -100, 2147483647 };
    const float numbers[3] = { 1.0f, 1.00390625f, -65504.0f }; /* the second lies between two bf16 */
    int64_t wide[3] = { 0 };
    double doubles[3] = { 0.0 };
    uint16_t narrow[3] = { 0 };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_cast(ctx, wide, XD_DTYPE_I64, labels, XD_DTYPE_I32, 3), XD_OK);
    CHECK(wide[0] == 7 && wide[1] == -100 && wide[2] == 2147483647);
    CHECK_EQ_INT(xd_cast(ctx, doubles, XD_DTYPE_F64, labels, XD_DTYPE_I32, 3), XD_OK);
    CHECK(doubles[1] == -100.0);
    CHECK_EQ_INT(xd_cast(ctx, narrow, XD_DTYPE_BF16, numbers, XD_DTYPE_F32, 3), XD_OK);
    CHECK(xd_f32_from_bf16(narrow[0]) == 1.0f && xd_f32_from_bf16(narrow[1]) == 1.0f); /* ties to even */
    CHECK_EQ_INT(xd_cast(ctx, wide, XD_DTYPE_I64, numbers, XD_DTYPE_F32, 3), XD_ERROR_DTYPE);
    CHECK(strstr(xd_last_error(ctx)->message, "F32 to I64") != NULL);
    CHECK_EQ_INT(xd_cast(ctx, narrow, XD_DTYPE_I32, wide, XD_DTYPE_I64, 1), XD_ERROR_DTYPE);
    CHECK_EQ_INT(xd_cast(ctx, wide, XD_DTYPE_I64, labels, XD_DTYPE_I32, -1), XD_ERROR_ARGUMENT);
    CHECK(wide[0] == 7);
    const xd_rows rows = xd_rows_of(numbers, XD_DTYPE_F32, 1, 3);
    CHECK(rows.data == numbers && rows.rows == 1 && rows.cols == 3 && rows.stride == 3);
    xd_ctx_destroy(ctx);
}

XD_TEST(an_error_keeps_message_place_rank_and_culprit) {
    log_book book;
    xd_ctx *ctx = NULL;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(&book, 0, sizeof book);
    desc.logger.write = log_line;
    desc.logger.user = &book;
    desc.rank = 3;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(xd_fail(ctx, XD_ERROR_SHAPE, "a.c", 7, "f", "%d and %d", 1, 2), XD_ERROR_SHAPE);
    const xd_error *error = xd_last_error(ctx);
    CHECK_EQ_INT(error->result, XD_ERROR_SHAPE);
    CHECK_EQ_STR(error->message, "1 and 2");
    CHECK_EQ_INT(error->line, 7);
    CHECK_EQ_INT(error->rank, 3);
    CHECK_EQ_INT(error->culprit, -1);
    CHECK_EQ_INT(book.lines, 1);
    CHECK_EQ_INT(book.level, XD_LOG_ERROR);
    CHECK_EQ_STR(book.last, "a.c:7: [xd][rank 3] f: ERROR_SHAPE: 1 and 2");
    xd_fail_culprit(ctx, XD_ERROR_PEER, 5, "a.c", 8, "g", "after: %s", error->message);
    CHECK_EQ_STR(error->message, "after: 1 and 2");
    CHECK_EQ_INT(error->culprit, 5);
    xd_fail(xd_at(ctx, "user.c", 42), XD_ERROR_DATA, "a.c", 9, "h", "x");
    CHECK_EQ_STR(error->message, "x (caller user.c:42)");
    xdi_clear_error(ctx);
    CHECK_EQ_INT(error->result, XD_OK);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_logger_gets_what_its_level_asks_for) {
    static const int heard[][5] = {
        { 1, 0, 1, 0, 0 }, { 0, 0, 0, 0, 0 }, { 0, 0, 1, 0, 0 }, { 1, 0, 1, 1, 0 }, { 1, 0, 1, 1, 1 }
    };
    for (int level = 0; level < 5; level++) {
        log_book book;
        xd_ctx *ctx = NULL;
        xd_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.logger.write = log_line;
        desc.logger.user = &book;
        desc.log_level = (xd_log_level)level;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        for (int line = 0; line < 5; line++) {
            if (line == XD_LOG_NONE) continue;
            book.lines = 0;
            xd_log(ctx, (xd_log_level)line, "hello");
            CHECK_EQ_INT(book.lines, heard[level][line]);
        }
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(every_result_has_a_name_and_a_text) {
    CHECK_EQ_STR(xd_result_name(XD_OK), "OK");
    CHECK_EQ_STR(xd_result_name(XD_ERROR_SHAPE), "ERROR_SHAPE");
    CHECK_EQ_STR(xd_result_name(XD_RESULT_COUNT), "ERROR_UNKNOWN");
    for (int i = 0; i < (int)XD_RESULT_COUNT; i++) CHECK(xd_result_text((xd_result)i)[0] != '\0');
}

/* ---- whole files ---- */

XD_TEST(a_saved_file_loads_and_a_missing_or_long_one_is_an_error) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/xdistill-test-base-%ld", (long)getpid());
    xd_ctx *ctx = NULL;
    char *data = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_file_save(ctx, path, "old", 3), XD_OK);
    CHECK_EQ_INT(xd_file_save(ctx, path, "new text", 8), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, path, 8, &data, &bytes), XD_OK);
    CHECK_EQ_INT(bytes, 8);
    CHECK_EQ_STR(data, "new text");
    xd_release(ctx, data);
    CHECK_EQ_INT(xd_file_load(ctx, path, 7, &data, &bytes), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(ctx)->message, "8 bytes, allowed are 7"));
    CHECK(remove(path) == 0);
    CHECK_EQ_INT(xd_file_load(ctx, path, 0, &data, &bytes), XD_ERROR_IO);
    CHECK_EQ_INT(xd_file_save(ctx, "/tmp/no such directory/file", "x", 1), XD_ERROR_IO);
    xd_ctx_destroy(ctx);
}

/* ---- memory ---- */

/* Blocks of sizes in which pages are cleared in another way, of memory that was written before. */
XD_TEST(memory_is_zero_however_large_a_block_is_and_whatever_was_there) {
    static const size_t sizes[] = {
        1, 4095, (size_t)4 << 20, ((size_t)16 << 20) - 1, (size_t)16 << 20, ((size_t)18 << 20) + 4097
    };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            unsigned char *block = (unsigned char *)xd_allocate(ctx, sizes[i]);
            CHECK(block != NULL);
            if (!block) continue;
            CHECK(block[0] == 0 &&
                  memcmp(block, block + 1, sizes[i] - 1) == 0); /* each byte is the one before it */
            memset(block, 0xa5, sizes[i]);
            xd_release(ctx, block);
        }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
