/* BF16 parameters that a GPU rounds at random: the bits of the CPU, whatever the alignment and wherever parts begin. */
#include "cuda_test.h"
#include "float_state.h"

enum { PARAMS = 9 };

/* Parameters with and without a master copy, on the host or on the device; an average in the same pass. */
struct Rounded {
    std::vector<std::vector<unsigned char>> values, gradients;
    std::vector<Device> d_values, d_gradients;
    xd_param params[PARAMS];
    xd_optimizer *optimizer = nullptr;
    xd_ema *ema = nullptr;

    Rounded(xd_ctx *ctx, bool on_device, xd_optimizer_kind kind, bool skewed) {
        static const char *const names[PARAMS] = { "a", "b", "c", "d", "e", "f", "g", "h", "i" };
        static const int64_t counts[PARAMS] = { 1, 7, 8, 64, 0, 301, 40000, 33, 100 };
        static const int64_t firsts[PARAMS] = { 0, 5, 8, 3, 0, 1001, 12, (INT64_C(1) << 35) - 9, 0 };
        Random random(21);
        memset(params, 0, sizeof params);
        for (int i = 0; i < PARAMS; i++) {
            params[i].name = names[i];
            params[i].dtype = i < 8 ? XD_DTYPE_BF16 : XD_DTYPE_F16;
            params[i].count = counts[i];
            params[i].first = firsts[i];
            params[i].gradient_dtype = narrow[i % 3];
            values.push_back(elements(params[i].dtype, counts[i], &random, i == 6));
            gradients.push_back(elements(params[i].gradient_dtype, counts[i], &random, false));
            if (on_device) {
                const size_t skew = skewed ? (size_t)(i % 5) : 0;
                d_values.emplace_back(values[i], skew * xd_dtype_size(params[i].dtype));
                d_gradients.emplace_back(gradients[i], skew * xd_dtype_size(params[i].gradient_dtype));
            }
            params[i].value = on_device ? d_values[i].at() : values[i].data();
            params[i].gradient = on_device ? d_gradients[i].at() : gradients[i].data();
            if (counts[i] == 0) params[i].gradient = params;
        }
        xd_optimizer_desc desc = xd_adamw_defaults(params, PARAMS);
        desc.kind = kind;
        desc.momentum = 0.9;
        desc.stochastic_bf16 = true;
        desc.seed = 77;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
        xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
        average.decay = 0.5;
        average.init_from_current = true;
        average.params = params;
        average.param_count = PARAMS;
        CHECK(xd_ema_create(ctx, &average, &ema) == XD_OK);
    }
    ~Rounded() {
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }

    void step(const xd_status *status) {
        xd_optimizer_step_desc with = {};
        with.averages = &ema;
        with.average_count = 1;
        with.status = status;
        CHECK(xd_optimizer_step(optimizer, &with, nullptr) == XD_OK);
    }
};

static void check_equal(const Gpu &gpu, const Rounded &host, const Rounded &device) {
    for (int i = 0; i < PARAMS; i++) {
        CHECK_ELEMENTS(host.params[i].dtype, host.values[i], device.d_values[i].host<unsigned char>());
        const xd_param a = xd_ema_view(host.ema, i).shadow, b = xd_ema_view(device.ema, i).shadow;
        std::vector<unsigned char> there((size_t)a.count * 4), here((size_t)a.count * 4);
        if (a.count == 0) continue;
        memcpy(there.data(), a.value, there.size());
        CHECK(xd_read(gpu.ctx, here.data(), b.value, here.size()) == XD_OK);
        CHECK_ELEMENTS(XD_DTYPE_F32, there, here);
    }
}

XD_TEST(steps_round_to_the_bits_of_the_cpu) {
    for (int kind = 0; kind <= XD_OPTIMIZER_SGD; kind++)
        for (int skewed = 0; skewed < 2; skewed++) {
            Gpu gpu;
            xd_ctx *ctx = nullptr;
            CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
            {
                Rounded host(ctx, false, (xd_optimizer_kind)kind, false);
                Rounded device(gpu.ctx, true, (xd_optimizer_kind)kind, skewed != 0);
                xd_status refused = {};
                refused.not_finite = 1;
                const Device d_refused(&refused, sizeof refused);
                seal();
                for (int step = 0; step < 4; step++) {
                    host.step(step == 1 ? &refused : nullptr); /* a step that does not happen draws nothing */
                    device.step(step == 1 ? d_refused.at<xd_status>() : nullptr);
                }
                unseal();
                gpu.wait();
                check_equal(gpu, host, device);
            }
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(arrays_that_the_kernels_cannot_round_are_refused_on_both_sides) {
    Gpu gpu;
    const Device memory(std::vector<unsigned char>(256));
    xd_update_array array = {};
    array.value = memory.at();
    array.first = array.second = memory.at<float>();
    array.gradient = memory.at();
    array.count = 4;
    array.value_dtype = XD_DTYPE_F16;
    array.gradient_dtype = XD_DTYPE_F32;
    array.steps = memory.at<int64_t>();
    xd_update_args args = {};
    args.arrays = &array;
    args.array_count = 1;
    xd_ctx *host = plain_ctx();
    const xd_launch launch = gpu.launch(), host_launch = xd_ctx_launch(host);
    for (int k = 0; k < 2; k++) {
        CHECK(gpu.kernels()->optimizer.adam(&launch, &args) == XD_ERROR_DTYPE);
        CHECK(xd_ctx_kernels(host)->optimizer.adam(&host_launch, &args) == XD_ERROR_DTYPE);
        array.value_dtype = XD_DTYPE_BF16;
        array.steps = nullptr;
    }
    xd_ctx_destroy(host);
}

#if defined(XD_EMU)
/* The emulation computes on this thread, so its own flush does what -ftz=true does on a GPU. */
XD_TEST(a_unit_that_makes_subnormal_numbers_zero_is_refused) {
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    const bool flushes = float_state_set(FLOAT_FLUSH);
    const xd_result result = xd_cuda_create(ctx, nullptr, &cuda);
    float_state_set(FLOAT_DEFAULT);
    if (flushes) {
        CHECK_EQ_INT(result, XD_ERROR_UNSUPPORTED);
        CHECK(strstr(xd_last_error(ctx)->message, "compiled with -ftz=true or -use_fast_math") != nullptr);
        CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
    }
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
}
#endif

XD_CUDA_TEST_MAIN()
