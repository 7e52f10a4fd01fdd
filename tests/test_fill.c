/* First values of parts of tensors: those of the whole, element by element, however it is cut. */
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>

enum { MOST = 700 /* elements of a tensor */ };

static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                   XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8,   XD_DTYPE_BOOL };

static uint64_t seed = 1;

static int64_t below(int64_t n) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)((seed >> 33) % (uint64_t)n);
}

static const xd_philox noise = { 0x123456789abcdef0u, XD_STREAM_USER, 5, 77, 12 };

/* Up to three intervals of [0, extent), none empty; sometimes none at all. */
static int draw_intervals(xd_interval *out, int64_t extent) {
    int n = 0;
    int64_t at = below(3) ? 0 : below(extent + 1);
    for (; n < 3 && at < extent; n++) {
        out[n].begin = at;
        out[n].end = at + 1 + below(extent - at);
        at = out[n].end + below(3);
    }
    return n;
}

/* A tensor of up to four dimensions, a region of it, a range of that. */
static void draw_part(xd_tensor_part *part, xd_region *region) {
    memset(part, 0, sizeof *part);
    memset(region, 0, sizeof *region);
    part->name = "t";
    part->dtype = dtypes[below(8)];
    part->ndim = (int)below(5);
    part->region = below(4) ? region : NULL;
    region->ndim = part->ndim;
    int64_t held = 1;
    for (int d = 0; d < part->ndim; d++) {
        part->shape[d] = below(9) ? 1 + below(5) : 0;
        if (part->ndim == 1) part->shape[d] = below(MOST);
        region->count[d] = draw_intervals(region->interval[d], part->shape[d]);
        int64_t extent = 0;
        for (int k = 0; k < region->count[d]; k++)
            extent += region->interval[d][k].end - region->interval[d][k].begin;
        held *= part->region ? extent : part->shape[d];
    }
    part->range.begin = below(held + 1);
    part->range.end = part->range.begin + below(held - part->range.begin + 1);
}

static bool holds(const xd_region *region, int d, int64_t index) {
    for (int k = 0; k < region->count[d]; k++)
        if (region->interval[d][k].begin <= index && index < region->interval[d][k].end) return true;
    return false;
}

/* The indices of the part in the whole tensor, by going over all of them. */
static int64_t list_indices(const xd_tensor_part *part, int64_t *indices) {
    int64_t numel = 1, position = 0, kept = 0;
    for (int d = 0; d < part->ndim; d++) numel *= part->shape[d];
    for (int64_t index = 0; index < numel; index++) {
        bool inside = true;
        int64_t rest = index;
        for (int d = part->ndim - 1; d >= 0; d--) {
            inside = inside && (!part->region || holds(part->region, d, rest % part->shape[d]));
            rest /= part->shape[d];
        }
        if (!inside) continue;
        if (part->range.begin <= position && position < part->range.end) indices[kept++] = index;
        position++;
    }
    return kept;
}

/* The value of one element: the formulas of the header. */
static float expected_value(const xd_init *init, int64_t index) {
    float number = 0.0f;
    if (init->kind == XD_INIT_ZERO) return 0.0f;
    if (init->kind == XD_INIT_CONSTANT) return init->center;
    if (init->kind == XD_INIT_NORMAL) xd_philox_fill_normal(&noise, index, 1, &number);
    if (init->kind == XD_INIT_UNIFORM) xd_philox_fill_uniform(&noise, index, 1, &number);
    if (init->kind == XD_INIT_UNIFORM) number = 2.0f * number - 1.0f;
    volatile float product = init->scale * number;
    return product + init->center;
}

static xd_init draw_init(xd_dtype dtype) {
    xd_init init = { (xd_init_kind)below(4), 0.75f, 0.3f };
    if (!xd_dtype_is_floating(dtype)) init.center = 3.0f;
    if (below(3) == 0) init.center = 0.0f;
    if (dtype == XD_DTYPE_U8 && init.kind > XD_INIT_CONSTANT) init.kind = XD_INIT_CONSTANT;
    return init;
}

static long check_part(xd_ctx *ctx, const xd_tensor_part *drawn, const xd_init *init) {
    static unsigned char room[8 * MOST + 8], wanted[8 * MOST + 8];
    static int64_t indices[MOST];
    const size_t size = xd_dtype_size(drawn->dtype);
    xd_tensor_part part = *drawn;
    const int64_t n = list_indices(&part, indices);
    memset(room, 0x5a, sizeof room);
    memset(wanted, 0x5a, sizeof wanted);
    part.data = room;
    for (int64_t i = 0; i < n; i++)
        xd_store_f64(wanted, part.dtype, i, (double)expected_value(init, indices[i]));
    CHECK_EQ_INT(n, part.range.end - part.range.begin);
    CHECK_EQ_INT(xd_tensor_part_fill(ctx, &part, init, &noise), XD_OK);
    CHECK(memcmp(room + (size_t)n * size, wanted + (size_t)n * size, 8) == 0); /* nothing behind it */
    return memcmp(room, wanted, sizeof room) != 0;
}

static void check_random_parts(xd_ctx *ctx, int count) {
    long wrong = 0;
    for (int i = 0; i < count; i++) {
        xd_region region;
        xd_tensor_part part;
        draw_part(&part, &region);
        const xd_init init = draw_init(part.dtype);
        wrong += check_part(ctx, &part, &init);
    }
    CHECK_EQ_INT(wrong, 0);
}

XD_TEST(every_part_of_a_tensor_holds_the_elements_of_the_whole) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    check_random_parts(ctx, 4000);
    xd_ctx_destroy(ctx);
}

/* A device whose table has no fill gets what the host forms. */
XD_TEST(a_device_without_the_entry_gets_the_same_bits_from_the_host) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    xd_kernels table = *xd_ctx_kernels(ctx);
    table.fill = NULL;
    xd_ctx_set_kernels(ctx, &table);
    check_random_parts(ctx, 1000);
    xd_ctx_destroy(ctx);
}

/* More elements than one thread takes at a time, on one and on three threads. */
XD_TEST(threads_and_cuts_do_not_change_a_bit) {
    enum { ROWS = 701, COLUMNS = 301, ALL = ROWS * COLUMNS };
    static float whole[ALL], again[ALL], part_of[ALL];
    const xd_init init = { XD_INIT_NORMAL, 0.1f, 0.02f };
    xd_tensor_part part = {
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { ROWS, COLUMNS }, .data = whole
    };
    for (int threads = 1; threads <= 3; threads += 2) {
        const xd_ctx_desc desc = { .threads = threads };
        xd_ctx *ctx = NULL;
        CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
        part.data = threads == 1 ? whole : again;
        part.range.begin = 0;
        part.range.end = ALL;
        CHECK_EQ_INT(xd_tensor_part_fill(ctx, &part, &init, &noise), XD_OK);
        for (int k = 0; k < 5; k++) {
            part.range.begin = (int64_t)ALL * k / 5;
            part.range.end = (int64_t)ALL * (k + 1) / 5;
            part.data = part_of + part.range.begin;
            CHECK_EQ_INT(xd_tensor_part_fill(ctx, &part, &init, &noise), XD_OK);
        }
        xd_ctx_destroy(ctx);
    }
    CHECK(memcmp(whole, again, sizeof whole) == 0 && memcmp(whole, part_of, sizeof whole) == 0);
}

/* These were the bits before there was an entry for fills. */
XD_TEST(the_bits_of_fills_and_of_models_are_those_of_before) {
    enum { N = 1000003 };
    static const uint64_t fills[2] = { 0xb8d0182f26304384u, 0xbca5d966b76ae1deu };
    static const uint64_t models[3] = { 0xed88d42fa138b725u, 0xd23a11a66bf02624u, 0x8734b543184fa470u };
    const xd_philox p = { 0x123456789abcdef0u, XD_STREAM_INIT, 3, 17, 1000 };
    float *values = (float *)malloc(N * sizeof *values);
    for (int normal = 0; normal < 2; normal++) {
        (normal ? xd_philox_fill_normal : xd_philox_fill_uniform)(&p, 0, N, values);
        CHECK(xd_hash(0, values, N * sizeof *values) == fills[normal]);
    }
    free(values);
    for (int k = 0; k < 3; k++) {
        static const xd_dtype of[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64 };
        const xd_weight_desc desc = { .name = "w",
                                      .dtype = of[k],
                                      .ndim = 2,
                                      .shape = { 37, 53 },
                                      .stored_rows = 40,
                                      .init = { k == 2 ? XD_INIT_UNIFORM : XD_INIT_NORMAL, 0.5f, 0.25f } };
        const xd_model_desc seeded = { .seed = 9 };
        xd_ctx *ctx = NULL;
        xd_model *model = NULL;
        xd_weight *weight = NULL;
        CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_model_create(ctx, &seeded, &model) == XD_OK);
        CHECK_EQ_INT(xd_weight_add(xd_model_root(model), &desc, &weight), XD_OK);
        CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK);
        CHECK_EQ_INT(xd_model_init_weights(model), XD_OK);
        const xd_weight_info info = xd_weight_describe(weight);
        CHECK(xd_hash(0, info.value, (size_t)info.count * xd_dtype_size(of[k])) == models[k]);
        xd_model_destroy(model);
        xd_ctx_destroy(ctx);
    }
}

static xd_tensor_part good_part(float *data) {
    const xd_tensor_part part = {
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 3, 4 }, .range = { 0, 12 }, .data = data
    };
    return part;
}

/* Refuses with a text, and writes nothing. */
static void check_refused(xd_ctx *ctx, xd_tensor_part part, xd_init init, xd_result expected,
                          const char *text) {
    float before[12], *data = (float *)part.data;
    if (data) memcpy(before, data, sizeof before);
    CHECK_EQ_INT(xd_tensor_part_fill(ctx, &part, &init, &noise), expected);
    CHECK(strstr(xd_last_error(ctx)->message, text) != NULL);
    if (data) CHECK(memcmp(before, data, sizeof before) == 0);
}

XD_TEST(parts_and_values_that_cannot_be_are_refused) {
    float data[12] = { 1.0f, 2.0f };
    const xd_init normal = { XD_INIT_NORMAL, 0.0f, 1.0f };
    xd_region region = { .ndim = 2, .count = { 1, 1 }, .interval = { { { 0, 3 } }, { { 2, 5 } } } };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    xd_tensor_part part = good_part(data);
    part.range.end = 13;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE, "positions [0, 13) of a region of 12 elements");
    part.range.end = -1;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE, "positions [0, -1)");
    part = good_part(data);
    part.region = &region;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE, "not within the size 4 of dimension 1");
    region.ndim = 1;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE, "has 2 dimensions, its region 1");
    part = good_part(data);
    part.ndim = 9;
    check_refused(ctx, part, normal, XD_ERROR_ARGUMENT, "has 9 dimensions, allowed are 8");
    part = good_part(data);
    part.shape[1] = -4;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE, "the size -4 of dimension 1");
    part.shape[0] = part.shape[1] = INT64_C(1) << 40;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE, "of dimension 1 is negative or too large");
    part.shape[1] = 8;
    check_refused(ctx, part, normal, XD_ERROR_SHAPE,
                  "has 8796093022208 elements, random numbers are for 4398046511104");
    part = good_part(NULL);
    check_refused(ctx, part, normal, XD_ERROR_ARGUMENT, "12 elements at NULL");
    part = good_part(data);
    check_refused(ctx, part, (xd_init){ (xd_init_kind)7, 0, 0 }, XD_ERROR_ARGUMENT, "init 7 is unknown");
    check_refused(ctx, part, (xd_init){ XD_INIT_CONSTANT, NAN, 0 }, XD_ERROR_ARGUMENT, "not finite");
    check_refused(ctx, part, (xd_init){ XD_INIT_NORMAL, 0, HUGE_VALF }, XD_ERROR_ARGUMENT, "not finite");
    part.dtype = XD_DTYPE_NONE;
    check_refused(ctx, part, normal, XD_ERROR_DTYPE, "has no dtype");
    part.dtype = XD_DTYPE_F8_E4M3;
    check_refused(ctx, part, normal, XD_ERROR_DTYPE, "F8_E4M3 has no arithmetic");
    CHECK_EQ_INT(xd_tensor_part_fill(ctx, &part, &(xd_init){ XD_INIT_ZERO, 0, 0 }, NULL), XD_OK);
    CHECK(data[0] == 0.0f && data[1] == 0.0f);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
