/* Whole steps on a GPU: clip, optimizer and average, over a few arrays and over a thousand; what set-up does, and failures. */
#include "cuda_test.h"
#include "averages.h"
#include "base/internal.h"
#include "planned.h"

/* ---- whole steps ---- */

enum { PARAMS = 7 };

/* A model on the host or on the device, an optimizer over it, an average of it. */
struct Model {
    xd_ctx *ctx;
    std::vector<std::vector<unsigned char>> values, gradients;
    std::vector<Device> d_values, d_gradients;
    xd_param params[PARAMS];
    xd_optimizer *optimizer = nullptr;
    xd_ema *ema = nullptr;

    Model(xd_ctx *context, bool on_device, xd_optimizer_kind kind) : ctx(context) {
        static const int64_t counts[PARAMS] = { 5, 0, 300, 64, 1, 17, 40 };
        static const char *const names[PARAMS] = { "a", "b", "c", "d", "e", "f", "g" };
        Random random(11);
        memset(params, 0, sizeof params);
        for (int i = 0; i < PARAMS; i++) {
            params[i].name = names[i];
            params[i].dtype = narrow[i % 3];
            params[i].gradient_dtype = narrow[(i + 1) % 3];
            params[i].count = counts[i];
            params[i].no_decay = i == 3;
            params[i].buffer = i == 6;
            values.push_back(elements(params[i].dtype, counts[i], &random, false));
            gradients.push_back(elements(params[i].gradient_dtype, counts[i], &random, false));
        }
        for (int i = 0; i < PARAMS; i++) {
            if (on_device) {
                d_values.emplace_back(values[i]);
                d_gradients.emplace_back(gradients[i]);
            }
            params[i].value = on_device ? d_values[i].at() : values[i].data();
            params[i].gradient = on_device ? d_gradients[i].at() : gradients[i].data();
            if (counts[i] == 0) params[i].gradient = params; /* "there is one", of no element */
        }
        xd_optimizer_desc desc = xd_adamw_defaults(params, PARAMS);
        desc.kind = kind;
        if (kind != XD_OPTIMIZER_ADAMW) desc.weight_decay = 0.0;
        desc.momentum = 0.9;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
        xd_ema_desc average = {};
        average.decay = 0.9;
        average.params = params;
        average.param_count = PARAMS;
        CHECK(xd_ema_create(ctx, &average, &ema) == XD_OK);
    }
    ~Model() {
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }

    void step(xd_gradient_norm *norm, xd_status *status, bool fused) {
        xd_gradient_norm_desc clip = {};
        clip.params = params;
        clip.param_count = PARAMS;
        clip.max_norm = 0.5;
        clip.status = status;
        CHECK(xd_gradient_norm_compute(ctx, nullptr, &clip, norm) == XD_OK);
        xd_optimizer_step_desc desc = {};
        desc.gradient_scale = &norm->coefficient;
        desc.status = status;
        desc.averages = &ema;
        desc.average_count = fused;
        CHECK(xd_optimizer_step(optimizer, &desc, nullptr) == XD_OK);
        if (!fused) CHECK(xd_ema_update(ema, XD_EMA_NEXT, status) == XD_OK);
    }
};

static void check_models(const Model &host, const Model &gpu) {
    for (int i = 0; i < PARAMS; i++) {
        CHECK_SAME(host.values[i], gpu.d_values[i].host<unsigned char>());
        const xd_param a = xd_ema_view(host.ema, i).shadow, b = xd_ema_view(gpu.ema, i).shadow;
        std::vector<unsigned char> average((size_t)a.count * xd_dtype_size(a.dtype));
        CHECK(xd_read(gpu.ctx, average.data(), b.value, average.size()) == XD_OK);
        CHECK(average.empty() || memcmp(a.value, average.data(), average.size()) == 0);
        const xd_optimizer_state s = xd_optimizer_state_at(host.optimizer, i);
        const xd_optimizer_state t = xd_optimizer_state_at(gpu.optimizer, i);
        int64_t count = -1;
        CHECK(xd_read(gpu.ctx, &count, t.step, sizeof count) == XD_OK);
        CHECK_EQ_INT(count, *s.step);
    }
}

static xd_ctx *host_context(xd_reduction reduction) {
    xd_ctx_desc desc = {};
    xd_ctx *ctx = nullptr;
    desc.reduction = reduction;
    desc.cpu = XD_CPU_PLAIN;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

XD_TEST(a_step_of_clip_optimizer_and_average_has_the_bits_of_the_cpu_and_never_waits) {
    static const xd_optimizer_kind kinds[] = { XD_OPTIMIZER_ADAMW, XD_OPTIMIZER_ADAM_L2, XD_OPTIMIZER_SGD };
    for (int form = 0; form < 6; form++) {
        Gpu gpu(XD_REDUCTION_INVARIANT);
        xd_ctx *host = host_context(XD_REDUCTION_INVARIANT);
        {
            Model a(host, false, kinds[form % 3]), b(gpu.ctx, true, kinds[form % 3]);
            xd_gradient_norm norm = {};
            const Device d_norm(&norm, sizeof norm);
            xd_status status = {};
            Device d_status(&status, sizeof status);
            for (int step = 0; step < 4; step++) {
                a.step(&norm, &status, form >= 3);
                seal();
                b.step(d_norm.at<xd_gradient_norm>(), d_status.at<xd_status>(), form >= 3);
                unseal();
            }
            xd_gradient_norm got;
            CHECK(xd_read(gpu.ctx, &got, d_norm.at(), sizeof got) == XD_OK);
            CHECK(got.norm == norm.norm && got.coefficient == norm.coefficient);
            check_models(a, b);
        }
        xd_ctx_destroy(host);
    }
}

XD_TEST(a_step_with_a_finding_on_the_device_leaves_everything_as_it_was) {
    Gpu gpu;
    xd_ctx *host = host_context(XD_REDUCTION_DETERMINISTIC);
    {
        Model a(host, false, XD_OPTIMIZER_ADAMW), b(gpu.ctx, true, XD_OPTIMIZER_ADAMW);
        xd_gradient_norm norm = {};
        const Device d_norm(&norm, sizeof norm);
        xd_status status = {};
        Device fine(&status, sizeof status);
        status.overflow = 1;
        Device bad(&status, sizeof status);
        status.overflow = 0;
        a.step(&norm, &status, false);
        b.step(d_norm.at<xd_gradient_norm>(), fine.at<xd_status>(), false);
        b.step(d_norm.at<xd_gradient_norm>(), bad.at<xd_status>(), true);
        a.step(&norm, &status, false);
        b.step(d_norm.at<xd_gradient_norm>(), fine.at<xd_status>(), false);
        check_models(a, b);
    }
    xd_ctx_destroy(host);
}

XD_TEST(a_captured_step_counts_its_steps_when_it_is_replayed) {
    Gpu gpu(XD_REDUCTION_INVARIANT);
    xd_ctx *host = host_context(XD_REDUCTION_INVARIANT);
    {
        Model a(host, false, XD_OPTIMIZER_ADAMW), b(gpu.ctx, true, XD_OPTIMIZER_ADAMW);
        xd_gradient_norm norm = {};
        const Device d_norm(&norm, sizeof norm);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        /* The first update copies, so it is no part of the graph. */
        a.step(&norm, nullptr, false);
        b.step(d_norm.at<xd_gradient_norm>(), nullptr, false);
        gpu.wait();
        CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        b.step(d_norm.at<xd_gradient_norm>(), nullptr, true);
        CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        for (int step = 0; step < 3; step++) {
            a.step(&norm, nullptr, false);
            CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
        }
        gpu.wait();
        check_models(a, b);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
    xd_ctx_destroy(host);
}

/* ---- a thousand arrays ---- */

/* Arrays of all dtypes, small, empty and one of many chunks, on one side. */
struct Crowd {
    xd_ctx *ctx;
    std::vector<xd_param> params;
    std::vector<std::vector<unsigned char>> values, gradients, others;
    std::vector<Device> d_values, d_gradients, d_others;
    xd_optimizer *optimizer = nullptr;
    xd_ema *ema = nullptr;
    xd_gradient_norm norm = {};
    Device d_norm;
    std::vector<std::string> names;

    Crowd(xd_ctx *context, bool on_device, size_t arrays, xd_optimizer_kind kind)
        : ctx(context), params(arrays), d_norm(&norm, sizeof norm), names(arrays) {
        Random random(21);
        xd_optimizer_group groups[3] = {};
        memset(params.data(), 0, arrays * sizeof params[0]);
        for (size_t i = 0; i < arrays; i++) {
            xd_param *p = &params[i];
            names[i] = "array" + std::to_string(i);
            p->name = names[i].c_str();
            p->dtype = narrow[i % 3];
            p->gradient_dtype = narrow[i / 3 % 3];
            p->count = i == 400 ? 70000 : random.below(20);
            p->group = (int)(i % 3);
            p->no_decay = i % 5 == 0;
            values.push_back(elements(p->dtype, p->count, &random, false));
            gradients.push_back(elements(p->gradient_dtype, p->count, &random, false));
            others.push_back(elements(p->gradient_dtype, p->count, &random, false));
            if (on_device) {
                d_values.emplace_back(values[i]);
                d_gradients.emplace_back(gradients[i]);
                d_others.emplace_back(others[i]);
            }
            p->value = on_device ? d_values[i].at() : values[i].data();
        }
        use(false);
        for (int i = 0; i < 3; i++) {
            groups[i].learning_rate_scale = i == 1 ? 0.5 : 1.0;
            groups[i].weight_decay = i == 2 ? 0.1 : kind == XD_OPTIMIZER_ADAMW ? 1e-2 : 0.0;
        }
        xd_optimizer_desc desc = xd_adamw_defaults(params.data(), (int64_t)arrays);
        desc.kind = kind;
        desc.groups = groups;
        desc.group_count = 3;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
        average(XD_DTYPE_F32);
    }
    ~Crowd() {
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }

    bool on_device() const {
        return !d_values.empty();
    }

    void average(xd_dtype dtype) {
        xd_ema_desc desc = {};
        desc.decay = 0.9;
        desc.init_from_current = true;
        desc.dtype = dtype;
        desc.params = params.data();
        desc.param_count = (int64_t)params.size();
        CHECK(xd_ema_create(ctx, &desc, &ema) == XD_OK);
    }

    /* Points to one or the other set of gradients. */
    void use(bool other) {
        for (size_t i = 0; i < params.size(); i++) {
            params[i].gradient = on_device() ? (other ? d_others : d_gradients)[i].at()
                                             : (void *)(other ? others : gradients)[i].data();
            if (params[i].count == 0) params[i].gradient = params.data(); /* "there is one", of no element */
        }
    }

    void step(bool fused, bool clipped) {
        xd_gradient_norm_desc clip = {};
        clip.params = params.data();
        clip.param_count = (int64_t)params.size();
        clip.max_norm = 0.5;
        xd_gradient_norm *out = on_device() ? d_norm.at<xd_gradient_norm>() : &norm;
        if (clipped) CHECK(xd_gradient_norm_compute(ctx, nullptr, &clip, out) == XD_OK);
        xd_optimizer_step_desc desc = {};
        desc.gradient_scale = clipped ? &out->coefficient : nullptr;
        desc.averages = &ema;
        desc.average_count = fused;
        CHECK(xd_optimizer_step(optimizer, &desc, nullptr) == XD_OK);
        if (!fused) CHECK(xd_ema_update(ema, XD_EMA_NEXT, nullptr) == XD_OK);
    }
};

static void check_crowds(const Crowd &host, const Crowd &gpu) {
    bool same = true;
    for (size_t i = 0; i < host.params.size(); i++) {
        const xd_param a = xd_ema_view(host.ema, (int64_t)i).shadow, b = xd_ema_view(gpu.ema, (int64_t)i).shadow;
        const xd_optimizer_state s = xd_optimizer_state_at(host.optimizer, (int64_t)i),
                                 t = xd_optimizer_state_at(gpu.optimizer, (int64_t)i);
        std::vector<unsigned char> average((size_t)a.count * xd_dtype_size(a.dtype));
        int64_t count = -1;
        same = same && first_difference(host.values[i], gpu.d_values[i].host<unsigned char>()) < 0;
        CHECK(xd_read(gpu.ctx, average.data(), b.value, average.size()) == XD_OK);
        same = same && (average.empty() || memcmp(a.value, average.data(), average.size()) == 0);
        CHECK(xd_read(gpu.ctx, &count, t.step, sizeof count) == XD_OK);
        same = same && count == *s.step;
    }
    CHECK(same);
}

/* How many kernels a step launches; 0 where nobody counts. */
static long launches() {
#if defined(XD_EMU)
    return emu_launch_count();
#else
    return 0;
#endif
}

static void step_crowds(Crowd *host, Crowd *gpu, bool fused, bool clipped) {
    host->step(fused, clipped);
    seal();
    gpu->step(fused, clipped);
    unseal();
}

XD_TEST(a_step_over_a_thousand_arrays_is_a_handful_of_launches) {
    Gpu gpu(XD_REDUCTION_INVARIANT);
    xd_ctx *host = host_context(XD_REDUCTION_INVARIANT);
    {
        Crowd a(host, false, 1000, XD_OPTIMIZER_ADAMW), b(gpu.ctx, true, 1000, XD_OPTIMIZER_ADAMW);
        for (int step = 0; step < 4; step++) {
            const long before = launches();
            CHECK(xd_optimizer_set_learning_rate(a.optimizer, 0.01 / (1 + step)) == XD_OK);
            CHECK(xd_optimizer_set_learning_rate(b.optimizer, 0.01 / (1 + step)) == XD_OK);
            step_crowds(&a, &b, step > 1,
                        step % 2 == 1); /* the lists travel in the first step of each form */
            /* the norm and its sum, the coefficient, the count and the step, the average; at first the list of the norm */
            if (step % 2 == 1) CHECK(launches() - before <= (step == 1 ? 6 + 8 : 6));
        }
        check_crowds(a, b);
    }
    xd_ctx_destroy(host);
}

/* Steps of the same arrays leave out what they did for the last one: not where a flag, a rate, an average or a gradient is another. */
XD_TEST(what_changes_between_steps_of_the_same_arrays_is_seen) {
    Gpu gpu(XD_REDUCTION_INVARIANT);
    xd_ctx *host = host_context(XD_REDUCTION_INVARIANT);
    {
        Crowd a(host, false, 60, XD_OPTIMIZER_ADAMW), b(gpu.ctx, true, 60, XD_OPTIMIZER_ADAMW);
        Crowd *const crowds[] = { &a, &b };
        for (int step = 0; step < 14; step++) {
            for (Crowd *crowd : crowds) {
                CHECK(xd_optimizer_set_learning_rate(crowd->optimizer, step < 2 ? 0.0 : 0.01 / (1 + step / 2)) == XD_OK);
                crowd->params[7].no_decay = step == 4 || step == 9;
                crowd->use(step == 6);
                if (step == 8) crowd->params[9].gradient = nullptr;
            }
            step_crowds(&a, &b, step % 7 > 3, step % 3 == 1);
        }
        check_crowds(a, b);
        for (Crowd *crowd : crowds) { /* another average, perhaps at the address of the first */
            xd_ema_destroy(crowd->ema);
            crowd->average(XD_DTYPE_BF16);
        }
        for (int step = 0; step < 2; step++) step_crowds(&a, &b, true, false);
        check_crowds(a, b);
    }
    xd_ctx_destroy(host);
}

XD_TEST(gradients_that_move_or_are_missing_change_the_list_on_the_device) {
    for (int kind = 0; kind < 2; kind++) {
        Gpu gpu(XD_REDUCTION_INVARIANT);
        xd_ctx *host = host_context(XD_REDUCTION_INVARIANT);
        {
            const xd_optimizer_kind which = kind ? XD_OPTIMIZER_SGD : XD_OPTIMIZER_ADAMW;
            Crowd a(host, false, 500, which), b(gpu.ctx, true, 500, which);
            for (int step = 0; step < 4; step++) {
                const long before = launches();
                a.use(step % 2 == 1);
                b.use(step % 2 == 1);
                for (size_t i = 0; i < 500 && step > 1; i++)
                    if (i % 7 == (size_t)step) a.params[i].gradient = b.params[i].gradient = nullptr;
                step_crowds(&a, &b, step == 3, false);
                if (step == 1) CHECK(launches() - before <= 6); /* three of them carry the addresses */
            }
            check_crowds(a, b);
        }
        xd_ctx_destroy(host);
    }
}

/* A graph reads the list when it runs: what comes after its capture must not change what it reads. */
XD_TEST(a_captured_step_keeps_its_arrays_when_later_steps_have_others) {
    Gpu gpu(XD_REDUCTION_INVARIANT);
    xd_ctx *host = host_context(XD_REDUCTION_INVARIANT);
    for (int warm = 0; warm < 2; warm++) { /* the list is on the device before the capture, or not */
        Crowd a(host, false, 100, XD_OPTIMIZER_ADAMW), b(gpu.ctx, true, 100, XD_OPTIMIZER_ADAMW);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        if (warm) step_crowds(&a, &b, true, true);
        gpu.wait();
        CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        b.step(true, true);
        CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        for (int round = 0; round < 2; round++) {
            a.use(true);
            b.use(true);
            step_crowds(&a, &b, true, false);
            a.use(false);
            a.step(true, true);
            CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
        }
        gpu.wait();
        check_crowds(a, b);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
    xd_ctx_destroy(host);
}

/* ---- set-up and failures ---- */

static int pool_live, pool_fail;

static void *pool_allocate(void *, size_t bytes) {
    void *memory = nullptr;
    if (pool_fail || cudaMalloc(&memory, bytes) != cudaSuccess) return nullptr;
    pool_live++;
    return memory;
}

static void pool_release(void *, void *memory) {
    pool_live--;
    cudaFree(memory);
}

XD_TEST(device_memory_comes_from_the_callers_allocator) {
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    xd_cuda_desc desc = {};
    desc.allocator.allocate = pool_allocate;
    desc.allocator.release = pool_release;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    pool_fail = 1;
    CHECK(xd_cuda_create(ctx, &desc, &cuda) == XD_ERROR_MEMORY);
    CHECK(cuda == nullptr && xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU);
    pool_fail = 0;
    CHECK(xd_cuda_create(ctx, &desc, &cuda) == XD_OK);
    CHECK(pool_live > 0);
    {
        Model model(ctx, true, XD_OPTIMIZER_ADAMW);
        CHECK(pool_live >= 3);
    }
    xd_cuda *second = nullptr;
    CHECK(xd_cuda_create(ctx, &desc, &second) == XD_ERROR_STATE);
    xd_cuda_destroy(cuda);
    CHECK_EQ_INT(pool_live, 0);
    CHECK(xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU);
    xd_ctx_destroy(ctx);
}

XD_TEST(calls_leave_the_threads_current_device_alone) {
    int devices = 0, current = -1;
    CHECK(cudaGetDeviceCount(&devices) == cudaSuccess);
    if (devices < 2) SKIP("needs two GPUs");
    CHECK(cudaSetDevice(1) == cudaSuccess);
    {
        Gpu gpu;
        Model model(gpu.ctx, true, XD_OPTIMIZER_SGD);
        CHECK(cudaSetDevice(0) == cudaSuccess);
        xd_gradient_norm norm = {};
        CHECK(cudaSetDevice(1) == cudaSuccess);
        const Device d_norm(&norm, sizeof norm);
        CHECK(cudaSetDevice(0) == cudaSuccess);
        model.step(d_norm.at<xd_gradient_norm>(), nullptr, false);
        CHECK(xd_read(gpu.ctx, &norm, d_norm.at(), sizeof norm) == XD_OK);
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK_EQ_INT(current, 0);
    }
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK_EQ_INT(current, 0);
}

XD_TEST(dtypes_without_a_place_are_refused_by_name) {
    Gpu gpu;
    const xd_launch launch = gpu.launch();
    const xd_optimizer_kernels cuda = gpu.kernels()->optimizer;
    float x = 0.0f;
    const Device data(&x, sizeof x);
    xd_scale_args scale = { data.at(), 1, XD_DTYPE_I32, 1.0f };
    CHECK(cuda.scale(&launch, &scale) == XD_ERROR_DTYPE);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "I32") != nullptr);
    xd_cast_array cast = { data.at(), data.at(), 1, XD_DTYPE_I16, XD_DTYPE_F32 };
    CHECK(cuda.cast(&launch, &cast, 1) == XD_ERROR_DTYPE);
    xd_norm_array array = { data.at(), 1, XD_DTYPE_F64, false };
    xd_norm_args norm = { &array, 1, XD_NORM_L2, false };
    CHECK(cuda.norm(&launch, &norm, nullptr) == XD_ERROR_DTYPE);
    xd_lerp_array pair = { data.at(), data.at(), 1, XD_DTYPE_I32, XD_DTYPE_F32 };
    xd_lerp_args lerp = { &pair, 1, 0.5, false, nullptr, nullptr, false };
    CHECK(cuda.lerp(&launch, &lerp) == XD_ERROR_DTYPE);
    xd_update_array update = {};
    update.gradient_dtype = XD_DTYPE_F64;
    xd_update_args args = {};
    args.arrays = &update;
    args.array_count = 1;
    CHECK(cuda.adam(&launch, &args) == XD_ERROR_DTYPE);
}

#if defined(XD_EMU)
/* Lets the first, second, ... CUDA call of a function fail until it succeeds, and returns the number of its calls. */
template <typename Call> static long fail_each_call(xd_ctx *ctx, Call call) {
    for (long n = 1;; n++) {
        xdi_clear_error(ctx);
        emu_fail_call(n);
        const xd_result result = call();
        emu_fail_call(0);
        emu_reset_errors();
        if (result == XD_OK) return n - 1;
        CHECK(result == XD_ERROR_DEVICE || result == XD_ERROR_MEMORY);
        CHECK(result == XD_ERROR_MEMORY || strstr(xd_last_error(ctx)->message, "cudaError"));
    }
}

XD_TEST(every_failing_cuda_call_becomes_a_result_with_its_name) {
    xd_ctx *ctx = nullptr;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    xd_cuda *cuda = nullptr;
    CHECK(fail_each_call(ctx, [&] {
              const xd_result result = xd_cuda_create(ctx, nullptr, &cuda);
              CHECK((result == XD_OK) == (cuda != nullptr));
              return result;
          }) > 10);
    {
        Model model(ctx, true, XD_OPTIMIZER_ADAMW);
        xd_gradient_norm norm = {};
        const Device d_norm(&norm, sizeof norm);
        xd_gradient_norm_desc clip = {};
        clip.params = model.params;
        clip.param_count = PARAMS;
        CHECK(fail_each_call(ctx, [&] {
                  return xd_gradient_norm_compute(ctx, nullptr, &clip, d_norm.at<xd_gradient_norm>());
              }) > 4);
        CHECK(fail_each_call(ctx, [&] { return xd_optimizer_step(model.optimizer, nullptr, nullptr); }) > 2);
        CHECK(fail_each_call(ctx, [&] { return xd_ema_update(model.ema, XD_EMA_NEXT, nullptr); }) > 1);
        xd_optimizer_desc desc = *xd_optimizer_settings(model.optimizer);
        xd_optimizer *second = nullptr;
        CHECK(fail_each_call(ctx, [&] { return xd_optimizer_create(ctx, &desc, &second); }) > 2);
        xd_optimizer_destroy(second);
        CHECK(fail_each_call(ctx, [&] { return xd_read(ctx, &norm, d_norm.at(), sizeof norm); }) > 2);
    }
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
    emu_take_reports(nullptr, 0);
}
#endif

static size_t counted_bytes[2]; /* host, device */

static void *host_allocate(void *user, size_t bytes) {
    (void)user;
    counted_bytes[0] += bytes;
    return malloc(bytes);
}

static void host_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void *device_allocate(void *user, size_t bytes) {
    void *memory = nullptr;
    (void)user;
    counted_bytes[1] += bytes;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

static void device_release(void *user, void *memory) {
    (void)user;
    cudaFree(memory);
}

XD_TEST(optimizers_and_averages_take_what_is_planned) {
    xd_ctx_desc settings = {};
    xd_cuda_desc device = {};
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    settings.allocator.allocate = host_allocate;
    settings.allocator.release = host_release;
    device.allocator.allocate = device_allocate;
    device.allocator.release = device_release;
    CHECK(xd_ctx_create(&settings, &ctx) == XD_OK);
    CHECK(xd_cuda_create(ctx, &device, &cuda) == XD_OK);
    {
        const Model model(ctx, true, XD_OPTIMIZER_ADAMW);
        const xd_optimizer_desc adamw = xd_adamw_defaults(model.params, PARAMS);
        xd_memory_bytes planned = { 0, 0 };
        xd_optimizer *optimizer = nullptr;
        xd_ema *ema = nullptr;
        size_t before[2] = { counted_bytes[0], counted_bytes[1] };
        CHECK(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &adamw, &optimizer), &planned) == XD_OK);
        CHECK(xd_optimizer_create(ctx, &adamw, &optimizer) == XD_OK);
        CHECK_EQ_INT(counted_bytes[0] - before[0], planned.host);
        CHECK_EQ_INT(counted_bytes[1] - before[1], planned.device);
        memcpy(before, counted_bytes, sizeof before);
        CHECK(PLANNED_MEMORY(ctx, average_create(ctx, model.params, PARAMS, nullptr, &ema), &planned) == XD_OK);
        xd_ema_desc copies = {};
        copies.params = model.params;
        copies.param_count = PARAMS;
        CHECK(xd_ema_create(ctx, &copies, &ema) == XD_OK);
        CHECK_EQ_INT(counted_bytes[0] - before[0], planned.host);
        CHECK_EQ_INT(counted_bytes[1] - before[1], planned.device);
        CHECK(planned.device > 0);
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }
    xd_cuda_destroy(cuda);
    xd_ctx_destroy(ctx);
}

XD_CUDA_TEST_MAIN()
