/* Parameters that are thawed on a GPU: the bits of the CPU, without a wait and without an allocation. */
#include "cuda_test.h"
#include "planned.h"

enum { PARAMS = 3 };

/* Three parameters of the narrow dtypes, two of them frozen, on the host or on the device. */
struct Frozen {
    xd_ctx *ctx;
    std::vector<std::vector<unsigned char>> values, gradients;
    std::vector<Device> d_values, d_gradients;
    xd_param params[PARAMS];
    xd_optimizer *optimizer = nullptr;

    Frozen(xd_ctx *context, bool on_device, xd_optimizer_kind kind) : ctx(context) {
        static const char *const names[PARAMS] = { "a", "b", "c" };
        Random random(5);
        memset(params, 0, sizeof params);
        for (int i = 0; i < PARAMS; i++) {
            params[i].name = names[i];
            params[i].dtype = narrow[i];
            params[i].count = 300 + i;
            params[i].frozen = i > 0;
            values.push_back(elements(params[i].dtype, params[i].count, &random, false));
            gradients.push_back(elements(XD_DTYPE_F32, params[i].count, &random, false));
            if (on_device) {
                d_values.emplace_back(values[i]);
                d_gradients.emplace_back(gradients[i]);
            }
            params[i].value = on_device ? d_values[i].at() : values[i].data();
            params[i].gradient = on_device ? d_gradients[i].at() : gradients[i].data();
        }
        xd_optimizer_desc desc = xd_adamw_defaults(params, PARAMS);
        desc.kind = kind;
        desc.momentum = 0.9;
        desc.reserve_frozen = true;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
    }
    ~Frozen() { xd_optimizer_destroy(optimizer); }

    void step() { CHECK(xd_optimizer_step(optimizer, nullptr, nullptr) == XD_OK); }

    void thaw(int i) {
        params[i].frozen = false;
        CHECK(xd_optimizer_thaw(optimizer, i) == XD_OK);
    }
};

static void check_state(const Gpu &gpu, const Frozen &host, const Frozen &device, int i) {
    const xd_optimizer_state a = xd_optimizer_state_at(host.optimizer, i);
    const xd_optimizer_state b = xd_optimizer_state_at(device.optimizer, i);
    const float *const there[] = { a.master, a.exp_avg, a.exp_avg_sq }, *const here[] = { b.master, b.exp_avg, b.exp_avg_sq };
    const size_t bytes = (size_t)host.params[i].count * sizeof(float);
    int64_t step = -1;
    CHECK(xd_read(gpu.ctx, &step, b.step, sizeof step) == XD_OK);
    CHECK_EQ_INT(step, *a.step);
    for (int k = 0; k < 3; k++) {
        std::vector<unsigned char> copy(bytes);
        CHECK((there[k] == nullptr) == (here[k] == nullptr));
        if (!there[k] || !here[k]) continue;
        CHECK(xd_read(gpu.ctx, copy.data(), here[k], bytes) == XD_OK);
        CHECK(memcmp(copy.data(), there[k], bytes) == 0);
    }
}

XD_TEST(thawed_parameters_have_the_bits_of_the_cpu) {
    for (int kind = 0; kind <= XD_OPTIMIZER_SGD; kind++) {
        Gpu gpu;
        xd_ctx *ctx = nullptr;
        CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
        {
            Frozen host(ctx, false, (xd_optimizer_kind)kind), device(gpu.ctx, true, (xd_optimizer_kind)kind);
            Frozen *const both[] = { &host, &device };
            Random random(6);
            const std::vector<unsigned char> loaded = elements(XD_DTYPE_BF16, host.params[1].count, &random, false);
            host.values[1] = loaded; /* the same size: the pointer stays */
            CHECK(host.values[1].data() == host.params[1].value);
            CHECK(cudaMemcpy(device.params[1].value, loaded.data(), loaded.size(), cudaMemcpyHostToDevice) == cudaSuccess);
            seal();
            for (Frozen *f : both) {
                f->step();
                f->thaw(1);
                f->step();
                f->thaw(2);
                f->step();
            }
            unseal();
            gpu.wait();
            for (int i = 0; i < PARAMS; i++) {
                CHECK_SAME(host.values[i], device.d_values[i].host<unsigned char>());
                check_state(gpu, host, device, i);
            }
        }
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(what_a_gpu_sets_aside_is_told_beforehand) {
    Gpu gpu;
    Frozen f(gpu.ctx, true, XD_OPTIMIZER_ADAMW);
    xd_optimizer_desc d = *xd_optimizer_settings(f.optimizer);
    xd_memory_bytes with = { 0, 0 }, without = { 0, 0 };
    xd_optimizer *none = nullptr;
    CHECK(PLANNED_MEMORY(gpu.ctx, xd_optimizer_create(gpu.ctx, &d, &none), &with) == XD_OK);
    d.reserve_frozen = false;
    CHECK(PLANNED_MEMORY(gpu.ctx, xd_optimizer_create(gpu.ctx, &d, &none), &without) == XD_OK);
    CHECK(with.device >= without.device + 3 * (301 + 302) * sizeof(float));
}

XD_CUDA_TEST_MAIN()
