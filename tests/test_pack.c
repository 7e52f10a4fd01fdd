/* Latents as rows of tokens: the formula element by element, back to the bits, and what is refused. */
#include "xdistill.h"

#include "xd_test.h"

#include <stdlib.h>
#include <string.h>

enum { ROOM = 4096 };

static unsigned char latents[ROOM * 4], again[ROOM * 4], packed[ROOM * 4];

/* Every byte pattern: also NaN, infinity and what is below the smallest normal number. */
static void fill_bytes(unsigned char *x, size_t bytes) {
    uint32_t state = 12345;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (unsigned char)(state >> 24);
    }
}

static void check_shape(xd_ctx *ctx, xd_latents s, int64_t gap) {
    const size_t size = xd_dtype_size(s.dtype);
    const int64_t tokens = s.height / 2 * (s.width / 2), cols = 4 * s.channels, stride = cols + gap;
    const size_t bytes = (size_t)(s.samples * s.channels * s.height * s.width) * size;
    xd_rows rows = xd_rows_of(packed, s.dtype, s.samples * tokens, cols);
    rows.stride = stride;
    CHECK((size_t)(s.samples * tokens * stride) * size <= sizeof packed && bytes <= sizeof latents);
    fill_bytes(latents, bytes);
    memset(packed, 0xab, sizeof packed);
    CHECK_EQ_INT(xd_latent_pack(ctx, &s, latents, rows), XD_OK);
    for (int64_t b = 0; b < s.samples; b++)
        for (int64_t c = 0; c < s.channels; c++)
            for (int64_t y = 0; y < s.height; y++)
                for (int64_t x = 0; x < s.width; x++) {
                    const int64_t token = y / 2 * (s.width / 2) + x / 2, at = 4 * c + 2 * (y % 2) + x % 2;
                    const int64_t from = ((b * s.channels + c) * s.height + y) * s.width + x,
                                  to = (b * tokens + token) * stride + at;
                    CHECK(memcmp(latents + (size_t)from * size, packed + (size_t)to * size, size) == 0);
                }
    for (int64_t r = 0; r < s.samples * tokens; r++) /* between the rows nothing was written */
        for (size_t k = (size_t)cols * size; k < (size_t)stride * size; k++)
            CHECK(packed[(size_t)(r * stride) * size + k] == 0xab);
    memset(again, 0xcd, sizeof again);
    CHECK_EQ_INT(xd_latent_unpack(ctx, &s, rows, again), XD_OK);
    CHECK(memcmp(again, latents, bytes) == 0);
    CHECK(again[bytes] == 0xcd);
}

XD_TEST(packed_latents_are_those_of_the_formula_and_come_back_to_the_bits) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    static const int64_t shapes[][4] = { { 1, 1, 2, 2 }, { 2, 3, 4, 6 },  { 3, 16, 2, 8 }, { 1, 5, 10, 2 },
                                         { 2, 4, 8, 8 }, { 0, 3, 4, 4 },  { 2, 0, 4, 4 },  { 2, 3, 0, 4 },
                                         { 2, 3, 4, 0 }, { 1, 2, 20, 14 } };
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int type = 0; type < 3; type++)
        for (int k = 0; k < (int)(sizeof shapes / sizeof *shapes); k++)
            for (int64_t gap = 0; gap < 4; gap += 3) {
                const int64_t *n = shapes[k];
                const xd_latents s = { n[0], n[1], n[2], n[3], types[type] };
                check_shape(ctx, s, gap);
            }
    xd_ctx_destroy(ctx);
}

XD_TEST(a_known_picture_is_packed_as_written_down) {
    static const float x[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 }; /* [1, 2, 2, 4] */
    static const float expected[16] = { 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15 };
    const xd_latents s = { 1, 2, 2, 4, XD_DTYPE_F32 };
    float out[16];
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_latent_pack(ctx, &s, x, xd_rows_of(out, XD_DTYPE_F32, 2, 8)), XD_OK);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    xd_ctx_destroy(ctx);
}

static void refuse(xd_ctx *ctx, xd_latents s, xd_rows rows, const void *x, xd_result expected) {
    memset(again, 0xcd, sizeof again);
    CHECK_EQ_INT(xd_latent_unpack(ctx, &s, rows, x ? again : NULL), expected);
    CHECK(again[0] == 0xcd && again[64] == 0xcd);
    memset(packed, 0xab, sizeof packed);
    CHECK_EQ_INT(xd_latent_pack(ctx, &s, x, rows), expected);
    CHECK(packed[0] == 0xab && packed[64] == 0xab);
}

#define REFUSES(code, change, text)                                    \
    do {                                                               \
        xd_latents s = { 2, 3, 4, 6, XD_DTYPE_F32 };                   \
        xd_rows rows = xd_rows_of(packed, XD_DTYPE_F32, 12, 12);       \
        const void *x = latents;                                       \
        change;                                                        \
        refuse(ctx, s, rows, x, code);                                 \
        CHECK(strstr(xd_last_error(ctx)->message, text));              \
        if (!strstr(xd_last_error(ctx)->message, text))                \
            printf("\"%s\": %s\n", text, xd_last_error(ctx)->message); \
    } while (0)

XD_TEST(sizes_that_do_not_fit_are_refused_with_both_numbers) {
    xd_ctx *ctx;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    REFUSES(XD_ERROR_SHAPE, s.height = 5, "height 5 and width 6; both must be even");
    REFUSES(XD_ERROR_SHAPE, s.width = 7, "height 4 and width 7");
    REFUSES(XD_ERROR_SHAPE, s.samples = -1, "latents [-1, 3, 4, 6]");
    REFUSES(XD_ERROR_SHAPE, s.width = -2, "latents [2, 3, 4, -2]");
    REFUSES(XD_ERROR_SHAPE, s.samples = INT64_MAX, "do not fit into memory");
    REFUSES(XD_ERROR_SHAPE, (s.height = INT64_MAX - 1, s.width = INT64_MAX - 1), "do not fit into memory");
    REFUSES(XD_ERROR_SHAPE, (s.samples = 0, s.channels = INT64_MAX), "do not fit into memory");
    REFUSES(XD_ERROR_SHAPE, rows.rows = 11,
            "rows are [11, 12] but [12, 12] is expected: 2 samples of 6 tokens");
    REFUSES(XD_ERROR_SHAPE, rows.cols = 10,
            "rows of 10 numbers, which 4 does not divide; 3 channels have 12");
    REFUSES(XD_ERROR_SHAPE, rows.cols = 16, "rows are [12, 16] but [12, 12] is expected");
    REFUSES(XD_ERROR_SHAPE, rows.stride = 11, "stride 11, less than their 12 columns");
    REFUSES(XD_ERROR_SHAPE, rows.stride = -12, "stride -12");
    REFUSES(XD_ERROR_SHAPE, rows.stride = INT64_MAX, "12 rows with stride 9223372036854775807 do not fit");
    REFUSES(XD_ERROR_DTYPE, s.dtype = XD_DTYPE_F64, "latents of F64; F32, BF16 and F16 are possible");
    REFUSES(XD_ERROR_DTYPE, rows.dtype = XD_DTYPE_BF16, "latents of F32 and rows of BF16");
    REFUSES(XD_ERROR_ARGUMENT, x = NULL, "no data of latents of 2 samples");
    REFUSES(XD_ERROR_ARGUMENT, rows.data = NULL, "no data of rows of 2 samples");
    const xd_latents s = { 2, 3, 4, 6, XD_DTYPE_F32 };
    CHECK_EQ_INT(xd_latent_pack(ctx, &s, packed, xd_rows_of(packed, XD_DTYPE_F32, 12, 12)),
                 XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "at one address"));
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
