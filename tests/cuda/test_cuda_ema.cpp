/* Averages of every format on a GPU: the bits and the counts of the CPU, exchanges, added tensors. */
#include "cuda_test.h"
#include "averages.h"
#include "planned.h"

enum { PARAMS = 8 };

/* Parameters of many lengths and their average, on the host or on the device. */
struct Averaged {
    std::vector<std::vector<unsigned char>> values;
    std::vector<Device> d_values;
    xd_param params[PARAMS];
    xd_ema *ema = nullptr;
    xd_ctx *ctx;
    bool on_device;

    Averaged(xd_ctx *context, bool device, xd_ema_desc desc, bool skewed) : ctx(context), on_device(device) {
        static const char *const names[PARAMS] = { "a", "b", "c", "d", "e", "f", "g", "counter" };
        static const int64_t counts[PARAMS] = { 1, 7, 64, 0, 40000, 301, 33, 3 };
        static const xd_dtype dtypes[PARAMS] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F32, XD_DTYPE_F32,
                                                 XD_DTYPE_F32, XD_DTYPE_F16,  XD_DTYPE_F64, XD_DTYPE_I64 };
        static const int64_t firsts[PARAMS] = { 0, 5, 3, 0, 12, (INT64_C(1) << 35) - 9, 1001, 0 };
        Random random(21);
        memset(params, 0, sizeof params);
        for (int i = 0; i < PARAMS; i++) {
            params[i].name = names[i];
            params[i].dtype = dtypes[i];
            params[i].count = counts[i];
            params[i].first = firsts[i];
            params[i].buffer = i == 7;
            params[i].frozen = i == 2;
            values.push_back(elements(dtypes[i], counts[i], &random, i == 4));
            if (device) d_values.emplace_back(values[i], skewed ? (size_t)(i % 5) * xd_dtype_size(dtypes[i]) : 0);
            params[i].value = device ? d_values[i].at() : values[i].data();
        }
        desc.params = params;
        desc.param_count = PARAMS;
        CHECK_EQ_INT(xd_ema_create(ctx, &desc, &ema), XD_OK);
    }
    ~Averaged() { xd_ema_destroy(ema); }

    /* New values, many of them close to the old ones. */
    void train(uint64_t seed) {
        Random random(seed);
        for (int i = 0; i < PARAMS; i++) {
            if (params[i].frozen) continue;
            const std::vector<unsigned char> fresh = elements(params[i].dtype, params[i].count, &random, false);
            for (int64_t k = 0; k < params[i].count; k++) {
                const double old = xd_load_f64(values[i].data(), params[i].dtype, k);
                const double next = xd_load_f64(fresh.data(), params[i].dtype, k);
                xd_store_f64(values[i].data(), params[i].dtype, k, k % 3 && i != 7 ? old * (1.0 + 1e-4 * next) : next);
            }
            if (on_device && !values[i].empty())
                CHECK(cudaMemcpy(d_values[i].at(), values[i].data(), values[i].size(), cudaMemcpyHostToDevice) ==
                      cudaSuccess);
        }
    }
    std::vector<unsigned char> bytes(const xd_param &view) const {
        std::vector<unsigned char> out((size_t)view.count * xd_dtype_size(view.dtype));
        if (!out.empty()) CHECK(xd_read(ctx, out.data(), view.value, out.size()) == XD_OK);
        return out;
    }
    std::vector<unsigned char> live(int i) const {
        return on_device ? d_values[i].host<unsigned char>() : values[i];
    }
};

static void check_equal(const Averaged &host, const Averaged &device) {
    for (int i = 0; i < PARAMS; i++) {
        const xd_param a = xd_ema_view(host.ema, i).shadow, b = xd_ema_view(device.ema, i).shadow;
        CHECK_ELEMENTS(a.dtype, host.bytes(a), device.bytes(b));
        const xd_param c = xd_ema_view(host.ema, i).compensation, d = xd_ema_view(device.ema, i).compensation;
        CHECK_EQ_INT(c.dtype, d.dtype);
        if (c.dtype != XD_DTYPE_NONE) CHECK_ELEMENTS(c.dtype, host.bytes(c), device.bytes(d));
    }
}

static void check_counters(const xd_ema *host, const xd_ema *device) {
    const xd_ema_record a = xd_ema_describe(host).record, b = xd_ema_describe(device).record;
    CHECK_EQ_INT(a.iteration, b.iteration);
    CHECK_EQ_INT(a.initialized, b.initialized);
}

static xd_ema_desc format(int k, double decay) {
    xd_ema_desc desc = xd_ema_defaults(XD_EMA_CONSTANT);
    desc.decay = decay;
    desc.compensated = k == 0;
    desc.stochastic_bf16 = k == 1;
    desc.seed = 0x123456789u;
    if (k == 2) desc.dtype = XD_DTYPE_BF16;
    if (k == 3) desc.dtype = XD_DTYPE_F64;
    if (k == 4) desc.live_dtype = true;
    if (k == 5) desc.compat_credit = true;
    return desc;
}

static xd_ema_desc on_host(xd_ema_desc desc, bool host) {
    desc.host = host;
    return desc;
}

XD_TEST(averages_of_every_format_and_their_counts_are_those_of_the_cpu) {
    for (int form = 0; form < 24; form++) {
        const xd_ema_desc desc = format(form % 6, form / 6 % 2 ? 0.3 : 0.999);
        Gpu gpu;
        xd_ctx *ctx = nullptr;
        int64_t unmoved = -1, zero = -1, total = 0;
        const Device d_unmoved(&zero, sizeof zero);
        xd_status refused = {};
        refused.not_finite = 1;
        const Device d_refused(&refused, sizeof refused);
        CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
        {
            const xd_ema_desc there = on_host(desc, form % 4 > 1);
            compare_orders(!there.host);
            Averaged host(ctx, false, desc, false), device(gpu.ctx, true, there, form >= 12);
            xd_ema_count_unmoved(host.ema, form % 2 ? nullptr : &unmoved);
            xd_ema_count_unmoved(device.ema, form % 2 ? nullptr : d_unmoved.at<int64_t>());
            for (int64_t t = 0; t < 5; t++) { /* the first one copies */
                host.train(70 + (uint64_t)t);
                device.train(70 + (uint64_t)t);
                seal();
                CHECK(xd_ema_update(device.ema, t, t == 2 ? d_refused.at<xd_status>() : nullptr) == XD_OK);
                unseal();
                gpu.wait();
                CHECK(xd_ema_update(host.ema, t, t == 2 ? &refused : nullptr) == XD_OK);
                if (form % 2 == 0) CHECK_EQ_INT(d_unmoved.host<int64_t>()[0], unmoved);
                total += unmoved;
                check_equal(host, device);
                check_counters(host.ema, device.ema);
            }
            CHECK(form % 2 == 1 || form % 6 == 0 || form / 6 % 2 == 1 || total > 0);
            compare_orders(1);
        }
        xd_ctx_destroy(ctx);
    }
}

/* ---- shadows on the host ---- */

XD_TEST(shadows_on_the_host_leave_the_counters_on_the_device) {
    for (int k = 0; k < 6; k++) {
        const xd_ema_desc desc = format(k, 0.5), there = on_host(desc, true);
        Gpu gpu;
        compare_orders(0);
        Averaged near(gpu.ctx, true, desc, false), far(gpu.ctx, true, there, false);
        xd_memory_bytes on_device = { 0, 0 }, on_both = { 0, 0 };
        xd_ema *none = nullptr;
        CHECK(PLANNED_MEMORY(gpu.ctx, average_create(gpu.ctx, near.params, PARAMS, &desc, &none), &on_device) == XD_OK);
        CHECK(PLANNED_MEMORY(gpu.ctx, average_create(gpu.ctx, near.params, PARAMS, &there, &none), &on_both) == XD_OK);
        CHECK(on_both.device < on_device.device && on_both.device >= sizeof(xd_average_turn));
        CHECK(on_both.host > on_device.host);
        CHECK(gpu.kernels()->memory.owns(gpu.ctx, xd_ema_view(near.ema, 2).shadow.value));
        CHECK(!gpu.kernels()->memory.owns(gpu.ctx, xd_ema_view(far.ema, 2).shadow.value));
        check_equal(near, far);
        compare_orders(1);
        if (k != 4) continue; /* of the parameters' types: exchanged */
        compare_orders(0);
        const std::vector<unsigned char> before = far.live(4);
        far.train(90);
        near.train(90);
        CHECK(xd_ema_swap(far.ema) == XD_OK && xd_ema_swap(near.ema) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(XD_DTYPE_F32, before, far.live(4));
        check_equal(near, far);
        compare_orders(1);
    }
}

XD_TEST(a_device_without_page_locked_memory_refuses_an_average_on_the_host) {
    Gpu gpu;
    float value = 1.0f;
    const Device d_value(&value, sizeof value);
    xd_ema_desc desc = on_host(xd_ema_defaults(XD_EMA_CONSTANT), true);
    xd_param param = {};
    xd_ema *ema = nullptr;
    xd_kernels *table = const_cast<xd_kernels *>(gpu.kernels());
    const auto host_allocate = table->memory.host_allocate;
    param.name = "w";
    param.value = d_value.at();
    param.dtype = XD_DTYPE_F32;
    param.count = 1;
    table->memory.host_allocate = nullptr;
    desc.params = &param;
    desc.param_count = 1;
    CHECK_EQ_INT(xd_ema_create(gpu.ctx, &desc, &ema), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "offers no page-locked memory") != nullptr);
    table->memory.host_allocate = [](xd_ctx *, size_t) -> void * { return nullptr; };
    CHECK_EQ_INT(xd_ema_create(gpu.ctx, &desc, &ema), XD_ERROR_MEMORY);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "4 bytes of page-locked memory") != nullptr && !ema);
    table->memory.host_allocate = host_allocate;
}

/* ---- steps that are refused ---- */

/* Updates of a run: whether each one's step was refused. The first ones were, and the one at which the average starts. */
static const bool refusals[] = { true, true, false, false, true, false, true, true, false, false, false, true, false };

static void run_refused(const xd_ema_desc &desc, bool counts) {
    Gpu gpu;
    xd_ctx *ctx = nullptr;
    int64_t unmoved = -1, zero = -1;
    const Device d_unmoved(&zero, sizeof zero);
    xd_status states[2] = {};
    states[1].overflow = 1;
    const Device d_states(states, sizeof states);
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    {
        Averaged host(ctx, false, desc, false), device(gpu.ctx, true, desc, false);
        if (counts) xd_ema_count_unmoved(host.ema, &unmoved);
        if (counts) xd_ema_count_unmoved(device.ema, d_unmoved.at<int64_t>());
        for (size_t t = 0; t < sizeof refusals; t++) {
            host.train(170 + t);
            device.train(170 + t);
            const xd_status *d_status = d_states.at<xd_status>() + refusals[t], *status = &states[refusals[t]];
            seal();
            CHECK_EQ_INT(xd_ema_update(device.ema, XD_EMA_NEXT, t == 9 ? nullptr : d_status), XD_OK);
            unseal();
            gpu.wait();
            CHECK_EQ_INT(xd_ema_update(host.ema, XD_EMA_NEXT, status), XD_OK);
            check_equal(host, device);
            check_counters(host.ema, device.ema);
            if (counts) CHECK_EQ_INT(d_unmoved.host<int64_t>()[0], unmoved);
            if (t != 10) continue; /* counters that are set begin again from there */
            const xd_ema_record record = xd_ema_describe(device.ema).record;
            xd_ema_load_desc load = {};
            load.lenient = true;
            if (counts) load.record = &record;
            CHECK_EQ_INT(xd_ema_load(device.ema, &load, nullptr), XD_OK);
            check_counters(host.ema, device.ema);
        }
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(a_refused_step_advances_no_average_on_the_device_either) {
    static const xd_ema_schedule schedules[] = { XD_EMA_CONSTANT, XD_EMA_POWER, XD_EMA_HALFLIFE, XD_EMA_RAMP };
    for (int form = 0; form < 24; form++) {
        xd_ema_desc desc = format(form % 6, 0.7);
        desc.schedule = schedules[form % 4];
        desc.gamma = 1.5;
        desc.halflife_kimg = 0.004;
        desc.start_iteration = form / 6 == 1 ? 2 : form / 6 == 2 ? 100 : 0;
        desc.init_from_current = form / 6 == 3;
        run_refused(desc, form % 2 == 0);
    }
}

XD_TEST(a_decay_that_is_not_known_any_more_is_that_without_refusals) {
    Gpu gpu;
    xd_status states[2] = {};
    states[1].not_finite = 1;
    const Device d_states(states, sizeof states);
    std::vector<unsigned char> nothing(sizeof(xd_average_turn), 0xee);
    const Device turn(nothing);
    static const int64_t iterations[] = { 6, 6 + XD_AVERAGE_KEEPS, 7 }, known[] = { 6, 6, 7 };
    for (int forgets = 0; forgets < 2; forgets++)
        for (int i = 0; i < 3; i++) {
            xd_launch launch = gpu.launch();
            launch.status = d_states.at<xd_status>() + (i < 2);
            xd_turn_args args = {};
            args.turn = turn.at<xd_average_turn>();
            args.iteration = forgets ? iterations[i] : known[i];
            args.keep = 0.25 * (i + 1);
            args.next = true;
            args.begins = i == 0;
            args.last = 5;
            args.initialized = true;
            CHECK_EQ_INT(gpu.kernels()->optimizer.turn(&launch, &args), XD_OK);
            gpu.wait();
            const xd_average_turn found = turn.host<xd_average_turn>()[0];
            CHECK_EQ_INT(found.iteration, i < 2 ? 5 : 6);
            CHECK_EQ_INT(found.rests.not_finite, i < 2);
            if (i == 2) CHECK(found.keep == (forgets ? 0.75 : 0.5) && found.copies == 0 && found.initialized == 1);
        }
}

/* ---- averages in a step ---- */

enum { STEPPED = 5, MANY = 12 };

/* An optimizer and many averages over one list, on the host or the device; one parameter may rest. */
struct Stepped {
    bool on_device;
    xd_ctx *ctx;
    xd_param params[STEPPED];
    std::vector<std::vector<unsigned char>> values, gradients;
    std::vector<Device> d_values, d_gradients;
    xd_optimizer *optimizer = nullptr;
    xd_ema *averages[MANY] = {};
    int count;

    Stepped(xd_ctx *c, bool device, bool adam, int many, bool skewed, bool rests) : on_device(device), ctx(c), count(many) {
        static const char *const label[STEPPED] = { "a", "b", "c", "d", "e" };
        static const xd_dtype dtype[STEPPED] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F32, XD_DTYPE_BF16 };
        static const int64_t size[STEPPED] = { 7, 40001, 260, 16, 1 };
        Random random(5);
        memset(params, 0, sizeof params);
        d_values.reserve(STEPPED), d_gradients.reserve(STEPPED);
        for (int i = 0; i < STEPPED; i++) {
            const size_t skew = skewed ? (size_t)(i % 3) * xd_dtype_size(dtype[i]) : 0;
            params[i].name = label[i];
            params[i].dtype = params[i].gradient_dtype = dtype[i];
            params[i].count = size[i];
            params[i].first = 3 * i;
            params[i].frozen = i == 3 && rests;
            values.push_back(elements(dtype[i], size[i], &random, false));
            gradients.push_back(elements(dtype[i], size[i], &random, false));
            if (device) d_values.emplace_back(values[i], skew), d_gradients.emplace_back(gradients[i], skew);
            params[i].value = device ? d_values[i].at() : values[i].data();
            params[i].gradient = params[i].frozen ? nullptr : device ? d_gradients[i].at() : gradients[i].data();
        }
        xd_optimizer_desc o = xd_adamw_defaults(params, STEPPED);
        if (!adam) o.kind = XD_OPTIMIZER_SGD;
        if (!adam) o.weight_decay = 0.0;
        CHECK_EQ_INT(xd_optimizer_create(ctx, &o, &optimizer), XD_OK);
        for (int i = 0; i < count; i++) {
            xd_ema_desc desc = format((i + 5) % 6, i % 2 ? 0.3 : 0.999);
            desc.schedule = (xd_ema_schedule)(i % 4);
            desc.gamma = 1.5;
            desc.start_iteration = i % 3;
            desc.host = i % 5 == 2;
            desc.params = params;
            desc.param_count = STEPPED;
            CHECK_EQ_INT(xd_ema_create(ctx, &desc, &averages[i]), XD_OK);
        }
    }
    ~Stepped() {
        for (int i = 0; i < count; i++) xd_ema_destroy(averages[i]);
        xd_optimizer_destroy(optimizer);
    }
    void step(bool together, const xd_status *status) {
        xd_optimizer_step_desc d = {};
        d.status = status;
        d.averages = together ? averages : nullptr;
        d.average_count = together ? count : 0;
        CHECK_EQ_INT(xd_optimizer_step(optimizer, &d, nullptr), XD_OK);
        for (int i = 0; i < count && !together; i++)
            CHECK_EQ_INT(xd_ema_update(averages[i], XD_EMA_NEXT, status), XD_OK);
    }
    std::vector<unsigned char> bytes(const xd_param &view) const {
        std::vector<unsigned char> out((size_t)view.count * xd_dtype_size(view.dtype));
        if (!out.empty()) CHECK(xd_read(ctx, out.data(), view.value, out.size()) == XD_OK);
        return out;
    }
};

static void check_stepped(const Stepped &host, const Stepped &device) {
    for (int i = 0; i < STEPPED; i++)
        CHECK_ELEMENTS(host.params[i].dtype, host.bytes(host.params[i]), device.bytes(device.params[i]));
    for (int k = 0; k < host.count; k++) check_counters(host.averages[k], device.averages[k]);
    for (int k = 0; k < host.count; k++)
        for (int64_t i = 0; i < xd_ema_describe(host.averages[k]).count; i++) {
            const xd_param a = xd_ema_view(host.averages[k], i).shadow, b = xd_ema_view(device.averages[k], i).shadow;
            CHECK_ELEMENTS(a.dtype, host.bytes(a), device.bytes(b));
            const xd_param c = xd_ema_view(host.averages[k], i).compensation,
                           d = xd_ema_view(device.averages[k], i).compensation;
            if (c.dtype != XD_DTYPE_NONE) CHECK_ELEMENTS(c.dtype, host.bytes(c), device.bytes(d));
        }
}

/* The host takes them one by one. With ten or more some have no place in the step, and two are a pass of their own. */
XD_TEST(a_step_on_the_device_moves_many_averages_to_the_bits_of_calls_on_the_cpu) {
    static const int many[] = { 1, 2, 3, 4, 6, MANY };
    for (int form = 0; form < 12; form++) {
        Gpu gpu;
        xd_ctx *ctx = nullptr;
        xd_status refused = {};
        refused.not_finite = 1;
        const xd_status both[2] = { refused, xd_status() };
        const Device d_refused(both, sizeof both);
        CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
        {
            compare_orders(many[form / 2] < 3); /* the third has its shadows on the host */
            Stepped host(ctx, false, form % 2 == 0, many[form / 2], false, true);
            Stepped device(gpu.ctx, true, form % 2 == 0, many[form / 2], form % 3 == 1, true);
            /* First a step is refused after others without a status; then as above. */
            for (int step = 0; step < (form < 2 ? 4 : 9); step++) {
                const bool refuses = form < 2 ? step == 3 : refusals[step];
                const bool said = refuses || (form > 2 && step != 8);
                host.step(false, refuses ? &refused : nullptr);
                seal();
                device.step(true, said ? d_refused.at<xd_status>() + !refuses : nullptr);
                unseal();
                gpu.wait();
                check_stepped(host, device);
            }
            compare_orders(1);
        }
        xd_ctx_destroy(ctx);
    }
}

/* Launches of a step with its averages, once all of them average and have their lists there. */
static long launches_of(int count, bool together) {
    Gpu gpu;
    Stepped s(gpu.ctx, true, true, count, false, false);
    for (int step = 0; step < 3; step++) s.step(together, nullptr);
    gpu.wait();
    const long before = launch_count();
    s.step(together, nullptr);
    gpu.wait();
    return launch_count() - before;
}

XD_TEST(averages_of_a_step_beyond_one_share_a_launch_on_the_device) {
    if (launch_count() < 0) SKIP("launches are counted by the emulation");
    CHECK_EQ_INT(launches_of(2, true), launches_of(2, false) - 1); /* one in the arrays' pass, one apart */
    CHECK_EQ_INT(launches_of(4, true), launches_of(4, false) - 3);
    CHECK_EQ_INT(launches_of(9, true), launches_of(9, false) - 8);
}

XD_TEST(an_exchange_on_the_device_is_that_of_the_cpu_and_comes_back) {
    for (int skewed = 0; skewed < 2; skewed++) {
        const xd_ema_desc desc = format(4, 0.5);
        Gpu gpu;
        xd_ctx *ctx = nullptr;
        CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
        {
            Averaged host(ctx, false, desc, false), device(gpu.ctx, true, desc, skewed != 0);
            host.train(3);
            device.train(3);
            for (int turn = 0; turn < 3; turn++) {
                seal();
                CHECK_EQ_INT(xd_ema_swap(device.ema), XD_OK);
                unseal();
                gpu.wait();
                CHECK_EQ_INT(xd_ema_swap(host.ema), XD_OK);
                check_equal(host, device);
                for (int i = 0; i < PARAMS; i++) CHECK_ELEMENTS(host.params[i].dtype, host.live(i), device.live(i));
            }
            CHECK_EQ_INT(xd_ema_update(device.ema, 1, nullptr), XD_ERROR_STATE);
        }
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(tensors_are_added_and_arrays_refused_as_on_the_cpu) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    Gpu gpu;
    xd_ctx *ctx = plain_ctx();
    Random random(4);
    const xd_launch launch = gpu.launch(), host_launch = xd_ctx_launch(ctx);
    for (int k = 0; k < 8; k++) {
        const int64_t n = 1 + random.below(50000);
        std::vector<unsigned char> target = elements(XD_DTYPE_F32, n, &random, true),
                                   source = elements(dtypes[k % 4], n, &random, true);
        const Device d_target(target, k < 4 ? 0 : 4), d_source(source);
        xd_average_array array = {};
        xd_average_args args = {};
        array.target = target.data();
        array.source = source.data();
        array.count = n;
        array.target_dtype = XD_DTYPE_F32;
        array.source_dtype = dtypes[k % 4];
        args.arrays = &array;
        args.array_count = 1;
        args.kind = XD_AVERAGE_ADD;
        args.factor = -1.37f;
        CHECK(xd_ctx_kernels(ctx)->optimizer.average(&host_launch, &args) == XD_OK);
        array.target = d_target.at();
        array.source = d_source.at();
        CHECK(gpu.kernels()->optimizer.average(&launch, &args) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(XD_DTYPE_F32, target, d_target.host<unsigned char>());
        uint16_t term = 0;
        for (int wrong = 0; wrong < 4; wrong++) {
            xd_average_array bad = array;
            args.arrays = &bad;
            args.kind = wrong == 1 ? XD_AVERAGE_ADD : XD_AVERAGE_MOVE;
            bad.target_dtype = wrong == 3 ? XD_DTYPE_F32 : XD_DTYPE_F16;
            bad.source_dtype = wrong == 0 ? XD_DTYPE_I32 : XD_DTYPE_F32;
            bad.compensation = wrong == 2 ? &term : nullptr;
            bad.random = wrong == 3;
            CHECK_EQ_INT(gpu.kernels()->optimizer.average(&launch, &args), XD_ERROR_DTYPE);
            CHECK_EQ_INT(xd_ctx_kernels(ctx)->optimizer.average(&host_launch, &args), XD_ERROR_DTYPE);
        }
    }
    xd_ctx_destroy(ctx);
}

/* Snapshots on the host, brought to either side. */
struct Snapshots {
    enum { COUNT = 4, TENSORS = 3 };
    std::vector<unsigned char> data[COUNT][TENSORS];
    const Gpu *gpu = nullptr; /* NULL: the host */

    static xd_result read(void *user, int64_t snapshot, int64_t tensor, void *to) {
        const Snapshots *s = (const Snapshots *)user;
        const std::vector<unsigned char> &from = s->data[snapshot][tensor];
        if (!s->gpu) {
            memcpy(to, from.data(), from.size());
            return XD_OK;
        }
        const xd_launch launch = s->gpu->launch();
        const xd_result result =
            s->gpu->kernels()->memory.copy(&launch, to, from.data(), from.size(), XD_COPY_TO_DEVICE);
        return result == XD_OK ? s->gpu->kernels()->memory.synchronize(&launch) : result;
    }
};

XD_TEST(sums_of_snapshots_have_the_bits_of_the_cpu) {
    static const int64_t counts[] = { 1001, 37, 5 };
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_U8 };
    static const double coefficients[] = { 0.3, -2.7, 0.0, 3.4 };
    Gpu gpu;
    xd_ctx *ctx = nullptr;
    Random random(6);
    Snapshots snapshots;
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    for (int k = 0; k < Snapshots::COUNT; k++)
        for (int i = 0; i < Snapshots::TENSORS; i++)
            snapshots.data[k][i] = elements(i == 2 ? XD_DTYPE_U8 : XD_DTYPE_BF16, counts[i], &random, k == 1);
    xd_post_hoc_desc desc = {};
    desc.snapshot_count = Snapshots::COUNT;
    desc.coefficients = coefficients;
    desc.target_count = Snapshots::TENSORS;
    desc.dtype = XD_DTYPE_BF16;
    desc.read = Snapshots::read;
    desc.user = &snapshots;
    std::vector<unsigned char> found[2][Snapshots::TENSORS];
    for (int side = 0; side < 2; side++) {
        std::vector<Device> memory;
        xd_param targets[Snapshots::TENSORS];
        memset(targets, 0, sizeof targets);
        for (int i = 0; i < Snapshots::TENSORS; i++) {
            found[side][i] = elements(dtypes[i], counts[i], &random, false);
            memory.emplace_back(found[side][i]);
            targets[i].name = "tensor";
            targets[i].dtype = dtypes[i];
            targets[i].count = counts[i];
            targets[i].buffer = i == 2;
            targets[i].value = side ? memory[i].at() : found[side][i].data();
        }
        snapshots.gpu = side ? &gpu : nullptr;
        desc.targets = targets;
        CHECK_EQ_INT(xd_post_hoc_average(side ? gpu.ctx : ctx, &desc, nullptr, nullptr), XD_OK);
        gpu.wait();
        for (int i = 0; i < Snapshots::TENSORS && side; i++) found[side][i] = memory[i].host<unsigned char>();
    }
    for (int i = 0; i < Snapshots::TENSORS; i++) CHECK_ELEMENTS(dtypes[i], found[0][i], found[1][i]);
    xd_ctx_destroy(ctx);
}

XD_CUDA_TEST_MAIN()
