/* First values formed on a GPU: the bits of the CPU for every kind, dtype, region and range; models initialised there. */
#include "cuda_test.h"

static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                   XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8,   XD_DTYPE_BOOL };

/* A part of a tensor, without data. */
static void draw_part(Random *random, xd_tensor_part *part, xd_region *region) {
    memset(part, 0, sizeof *part);
    memset(region, 0, sizeof *region);
    part->name = "t";
    part->dtype = dtypes[random->below(8)];
    part->ndim = (int)random->below(4);
    part->region = random->below(3) ? region : nullptr;
    region->ndim = part->ndim;
    int64_t held = 1;
    for (int d = 0; d < part->ndim; d++) {
        int64_t at = random->below(3), extent = 0;
        part->shape[d] = part->ndim == 1 ? 1 + random->below(3000) : 4 + random->below(12);
        while (region->count[d] < 3 && at < part->shape[d]) {
            xd_interval *interval = &region->interval[d][region->count[d]++];
            interval->begin = at;
            interval->end = at + 1 + random->below(part->shape[d] - at);
            at = interval->end + random->below(4);
            extent += interval->end - interval->begin;
        }
        held *= part->region ? extent : part->shape[d];
    }
    part->range.begin = random->below(held + 1);
    part->range.end = part->range.begin + random->below(held - part->range.begin + 1);
}

XD_TEST(parts_have_the_bits_of_the_cpu) {
    Gpu gpu;
    Random random(3);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int i = 0; i < 300; i++) {
        xd_tensor_part part;
        xd_region region;
        xd_philox noise = { random.bits(), (uint8_t)random.bits(), (uint16_t)random.bits(), (uint32_t)random.bits(), 9 };
        draw_part(&random, &part, &region);
        xd_init init = { (xd_init_kind)random.below(4), 1.5f, 0.3f };
        if (part.dtype == XD_DTYPE_U8) init.kind = XD_INIT_CONSTANT;
        const size_t bytes = (size_t)(part.range.end - part.range.begin) * xd_dtype_size(part.dtype);
        std::vector<unsigned char> on_host(bytes + 16, 0x5a);
        const Device on_device(on_host);
        part.data = on_host.data();
        CHECK(xd_tensor_part_fill(host, &part, &init, &noise) == XD_OK);
        part.data = on_device.at();
        seal();
        CHECK(xd_tensor_part_fill(gpu.ctx, &part, &init, &noise) == XD_OK);
        unseal();
        gpu.wait();
        CHECK_SAME(on_host, on_device.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

/* Every exponent that the logarithm sees, and every quarter of the circle. */
XD_TEST(a_long_run_of_normal_numbers_has_the_bits_of_the_cpu) {
    enum { N = 100003 };
    Gpu gpu;
    const xd_philox noise = { 42, XD_STREAM_USER, 0, 1, 2 };
    const xd_init init = { XD_INIT_NORMAL, 0.0f, 1.0f };
    std::vector<float> host(N);
    const Device device(host);
    xd_tensor_part part = {};
    part.dtype = XD_DTYPE_F32;
    part.ndim = 1;
    part.shape[0] = part.range.end = N;
    part.data = device.at();
    xd_philox_fill_normal(&noise, 0, N, host.data());
    CHECK(xd_tensor_part_fill(gpu.ctx, &part, &init, &noise) == XD_OK);
    gpu.wait();
    CHECK_SAME(host, device.host<float>());
}

/* The rows of samples that a distillation draws: whole, and in parts as ranks have them. */
XD_TEST(rows_of_samples_have_the_bits_of_the_cpu_however_they_are_split) {
    static const int64_t cuts[] = { 0, 1, 6, 8, 1003, 1004, 4111 };
    static const xd_dtype floating[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    Gpu gpu;
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int k = 0; k < 16; k++) {
        xd_draw_desc d = {};
        const int64_t rows = 3, columns = 4111, stride = k % 3 ? columns + 1 : columns, pad = k % 5;
        const size_t size = xd_dtype_size(floating[k % 4]);
        std::vector<unsigned char> whole((size_t)(rows * stride + pad) * size, 0x5a);
        const Device parts(whole), step(std::vector<int64_t>(1, 3));
        d.random = { 5, XD_STREAM_EPSILON, 1, 17, 4 };
        d.uniform = k / 4 % 2 != 0;
        d.first = k * 3;
        d.out = { whole.data() + (size_t)pad * size, floating[k % 4], rows, columns, stride };
        d.random.step += k % 2 ? 3 : 0;
        CHECK(xd_draw_rows(host, &d) == XD_OK);
        d.random.step -= k % 2 ? 3 : 0;
        d.step = k % 2 ? step.at<int64_t>() : nullptr;
        seal();
        for (size_t c = 0; c + 1 < sizeof cuts / sizeof *cuts; c++) {
            d.first = k * 3 + cuts[c];
            d.out.data = parts.at<unsigned char>() + (size_t)(pad + cuts[c]) * size;
            d.out.cols = cuts[c + 1] - cuts[c];
            CHECK(xd_draw_rows(gpu.ctx, &d) == XD_OK);
        }
        unseal();
        gpu.wait();
        CHECK_SAME(whole, parts.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

/* Padded rows, and several types. */
static xd_model *make_model(xd_ctx *ctx) {
    xd_model_desc seeded = {};
    seeded.seed = 5;
    xd_model *model = nullptr;
    CHECK(xd_model_create(ctx, &seeded, &model) == XD_OK);
    xd_weight_desc d = {};
    d.name = "embed";
    d.dtype = XD_DTYPE_BF16;
    d.ndim = 2;
    d.shape[0] = 37;
    d.shape[1] = 12;
    d.stored_rows = 40;
    d.init.kind = XD_INIT_NORMAL;
    d.init.scale = 0.02f;
    CHECK(xd_weight_add(xd_model_root(model), &d, nullptr) == XD_OK);
    d.name = "bias";
    d.dtype = XD_DTYPE_F32;
    d.ndim = 1;
    d.shape[1] = 0;
    d.stored_rows = 0;
    d.init.kind = XD_INIT_UNIFORM;
    CHECK(xd_weight_add(xd_model_root(model), &d, nullptr) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK);
    return model;
}

XD_TEST(models_on_a_gpu_begin_with_the_bits_of_the_cpu) {
    Gpu gpu;
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    xd_model *models[2] = { make_model(host), make_model(gpu.ctx) };
    CHECK(xd_model_init_weights(models[0]) == XD_OK);
    seal();
    CHECK(xd_model_init_weights(models[1]) == XD_OK);
    unseal();
    for (int i = 0; i < 2; i++) {
        const xd_weight_info a = xd_weight_describe(xd_model_weight_at(models[0], i));
        const xd_weight_info b = xd_weight_describe(xd_model_weight_at(models[1], i));
        std::vector<unsigned char> copy((size_t)a.count * xd_dtype_size(a.desc->dtype));
        CHECK(xd_read(gpu.ctx, copy.data(), b.value, copy.size()) == XD_OK);
        CHECK(memcmp(copy.data(), a.value, copy.size()) == 0);
    }
    for (xd_model *model : models) xd_model_destroy(model);
    xd_ctx_destroy(host);
}

XD_CUDA_TEST_MAIN()
