/* Optimizer steps, averages, casts, norms, sums over ranks and copies on a GPU: the bits of the plain CPU kernels. */
#include "cuda_test.h"

static const xd_dtype narrow[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };

/* Arrays of one update on the host, with their copies on the device. */
struct Update {
    std::vector<unsigned char> gradient, value, average, master, first, second;
    std::vector<int64_t> steps;
    Device d_gradient, d_value, d_average, d_master, d_first, d_second, d_steps;
    xd_update_array host, device;

    Update(Random *random, int64_t n, xd_dtype gradient_dtype, xd_dtype value_dtype, xd_dtype average_dtype, size_t skew,
           bool extremes)
        : gradient(elements(gradient_dtype, n, random, extremes)),
          value(elements(value_dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : value_dtype, n, random, false)),
          average(elements(average_dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : average_dtype, n, random, false)),
          master((size_t)n * 4), first((size_t)n * 4), second((size_t)n * 4), steps(1),
          d_gradient(gradient, skew * xd_dtype_size(gradient_dtype)),
          d_value(value, skew * xd_dtype_size(value_dtype)), d_average(average, skew * xd_dtype_size(average_dtype)),
          d_master((fill(random), master), skew * 4), d_first(first, skew * 4), d_second(second, skew * 4),
          d_steps(steps) {
        memset(&host, 0, sizeof host);
        host.master = (float *)(void *)master.data();
        host.first = (float *)(void *)first.data();
        host.second = (float *)(void *)second.data();
        host.value = value_dtype == XD_DTYPE_NONE ? nullptr : value.data();
        host.value_dtype = value_dtype;
        host.gradient = gradient.data();
        host.gradient_dtype = gradient_dtype;
        host.average = average_dtype == XD_DTYPE_NONE ? nullptr : average.data();
        host.average_dtype = average_dtype;
        host.count = n;
        host.decay = 0.9995f;
        host.weight_decay = 0.01f;
        host.step_size = 0.0123f;
        host.root_correction = 0.3f;
        host.fresh = n % 2 == 0;
        device = host;
        device.master = d_master.at<float>();
        device.first = d_first.at<float>();
        device.second = d_second.at<float>();
        if (host.value) device.value = d_value.at();
        if (host.average) device.average = d_average.at();
        device.gradient = d_gradient.at();
    }

    void fill(Random *random) {
        for (int64_t i = 0; i < (int64_t)master.size() / 4; i++) {
            xd_store_f64(master.data(), XD_DTYPE_F32, i, random->unit());
            xd_store_f64(first.data(), XD_DTYPE_F32, i, random->unit() * 0.1f);
            xd_store_f64(second.data(), XD_DTYPE_F32, i, fabsf(random->unit()) * 0.01f);
        }
    }

    void check() const {
        CHECK_ELEMENTS(XD_DTYPE_F32, master, d_master.host<unsigned char>());
        CHECK_ELEMENTS(XD_DTYPE_F32, first, d_first.host<unsigned char>());
        CHECK_ELEMENTS(XD_DTYPE_F32, second, d_second.host<unsigned char>());
        if (host.value) CHECK_ELEMENTS(host.value_dtype, value, d_value.host<unsigned char>());
        if (host.average) CHECK_ELEMENTS(host.average_dtype, average, d_average.host<unsigned char>());
    }
};

static xd_update_args update_args() {
    xd_update_args args = {};
    args.one_minus_beta1 = (float)(1.0 - 0.9);
    args.one_minus_beta2 = (float)(1.0 - 0.999);
    args.beta2 = (float)0.999;
    args.beta1_exact = 0.9;
    args.beta2_exact = 0.999;
    args.eps = 1e-8f;
    args.momentum = 0.9f;
    args.keep = 0.99;
    return args;
}

/* One step over the arrays on both sides. */
static void step_both(Gpu *gpu, xd_ctx *host, std::vector<Update> *updates, xd_update_args args, bool adam, float scale) {
    const Device d_scale(&scale, sizeof scale);
    std::vector<xd_update_array> on_host, on_device;
    for (size_t k = 0; k < updates->size(); k++) {
        on_host.push_back((*updates)[k].host);
        on_device.push_back((*updates)[k].device);
    }
    const xd_optimizer_kernels plain = *xd_optimizer_kernels_cpu(), cuda = gpu->kernels().optimizer;
    const xd_launch host_launch = xd_ctx_launch(host), launch = gpu->launch();
    args.array_count = (int64_t)updates->size();
    args.arrays = on_host.data();
    args.gradient_scale = scale == 0.0f ? nullptr : &scale;
    CHECK((adam ? plain.adam : plain.sgd)(&host_launch, &args) == XD_OK);
    args.arrays = on_device.data();
    args.gradient_scale = scale == 0.0f ? nullptr : d_scale.at<float>();
    seal();
    CHECK((adam ? cuda.adam : cuda.sgd)(&launch, &args) == XD_OK);
    unseal();
    gpu->wait();
}

static void check_updates(bool adam) {
    Gpu gpu;
    xd_ctx *host = nullptr;
    Random random(adam ? 1 : 2);
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int form = 0; form < 12; form++) {
        std::vector<Update> updates;
        xd_update_args args = update_args();
        args.couple_decay = form % 2 == 1;
        args.maximize = form % 3 == 1;
        args.weighted_sum = form % 4 == 1;
        updates.reserve(80);
        for (int n = 0; n <= 70; n++) {
            const xd_dtype value = form % 4 == 0 ? XD_DTYPE_NONE : narrow[(n + form) % 3];
            const xd_dtype average = n % 5 == 0 ? XD_DTYPE_F64 : n % 5 < 3 ? XD_DTYPE_NONE : narrow[n % 3];
            updates.emplace_back(&random, n, narrow[n % 3], value, average, form < 6 ? 0 : (size_t)(n % 4), form > 3);
        }
        step_both(&gpu, host, &updates, args, adam, form % 3 == 0 ? 0.0f : 0.37f);
        for (const Update &update : updates) update.check();
    }
    xd_ctx_destroy(host);
}

XD_TEST(adam_has_the_bits_of_the_cpu_for_every_dtype_count_and_alignment) {
    check_updates(true);
}

XD_TEST(sgd_has_the_bits_of_the_cpu_for_every_dtype_count_and_alignment) {
    check_updates(false);
}

XD_TEST(a_list_of_a_thousand_arrays_and_one_of_many_chunks_are_stepped_alike) {
    Gpu gpu;
    xd_ctx *host = nullptr;
    Random random(3);
    std::vector<Update> updates;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    updates.reserve(1001);
    for (int k = 0; k < 1000; k++)
        updates.emplace_back(&random, random.below(12), XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_NONE, 0, false);
    updates.emplace_back(&random, 40000, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F32, 0, false);
    step_both(&gpu, host, &updates, update_args(), true, 0.5f);
    for (const Update &update : updates) update.check();
    xd_ctx_destroy(host);
}

XD_TEST(averages_have_the_bits_of_the_cpu_for_every_pair_of_dtypes) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    static const double keeps[] = { 0.0, 0.3, 0.9999, 1.0 };
    Gpu gpu;
    Random random(4);
    const xd_launch launch = gpu.launch();
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    const xd_launch host_launch = xd_ctx_launch(host);
    for (int form = 0; form < 128; form++) {
        const xd_dtype to = dtypes[form % 4], from = dtypes[form / 4 % 4];
        const int64_t n = 1 + random.below(300);
        const size_t skew = form < 64 ? 0 : xd_dtype_size(to);
        std::vector<unsigned char> target = elements(to, n, &random, true), source = elements(from, n, &random, true);
        const Device d_target(target, skew), d_source(source);
        xd_lerp_array array = { target.data(), source.data(), n, to, from };
        xd_lerp_args args = { &array, 1, keeps[form / 16 % 4], form % 7 == 0, nullptr };
        CHECK(xd_optimizer_kernels_cpu()->lerp(&host_launch, &args) == XD_OK);
        array.target = d_target.at();
        array.source = d_source.at();
        CHECK(gpu.kernels().optimizer.lerp(&launch, &args) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(to, target, d_target.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(casts_have_the_bits_of_the_cpu_for_every_pair_of_dtypes) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64,
                                       XD_DTYPE_I32, XD_DTYPE_I64,  XD_DTYPE_U8,  XD_DTYPE_BOOL };
    Gpu gpu;
    Random random(5);
    const xd_launch launch = gpu.launch();
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    const xd_launch host_launch = xd_ctx_launch(host);
    for (int form = 0; form < 128; form++) {
        const xd_dtype to = dtypes[form % 8], from = dtypes[form / 8 % 8];
        const bool integer = !xd_dtype_is_floating(to); /* out of range or NaN has no meaning there */
        const int64_t n = 1 + random.below(200);
        const size_t skew = form < 64 ? 0 : xd_dtype_size(from);
        std::vector<unsigned char> target = elements(to, n, &random, false);
        std::vector<unsigned char> source = elements(from, n, &random, !integer || to == from);
        if (to == XD_DTYPE_U8)
            for (int64_t i = 0; i < n && from != to; i++) xd_store_f64(source.data(), from, i, (double)(i % 100));
        const Device d_target(target), d_source(source, skew);
        xd_cast_array array = { target.data(), source.data(), n, to, from };
        CHECK(xd_optimizer_kernels_cpu()->cast(&host_launch, &array, 1) == XD_OK);
        array.target = d_target.at();
        array.source = d_source.at();
        CHECK(gpu.kernels().optimizer.cast(&launch, &array, 1) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(to, target, d_target.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(scaling_has_the_bits_of_the_cpu) {
    Gpu gpu;
    Random random(6);
    const xd_launch launch = gpu.launch();
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    const xd_launch host_launch = xd_ctx_launch(host);
    for (int form = 0; form < 213; form++) {
        const xd_dtype dtype = narrow[form % 3];
        const int64_t n = form / 3;
        std::vector<unsigned char> data = elements(dtype, n, &random, true);
        const Device d_data(data, form % 2 ? xd_dtype_size(dtype) : 0);
        xd_scale_args args = { data.data(), n, dtype, 0.7f };
        CHECK(xd_optimizer_kernels_cpu()->scale(&host_launch, &args) == XD_OK);
        args.data = d_data.at();
        CHECK(gpu.kernels().optimizer.scale(&launch, &args) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(dtype, data, d_data.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

/* The sum of a list on both sides; the list has ordinary elements, or some that are not finite too. */
static void check_norm(Gpu *gpu, xd_ctx *host, Random *random, xd_norm_type type, bool exact, bool extremes,
                       int arrays, int64_t longest) {
    std::vector<std::vector<unsigned char>> data;
    std::vector<Device> device;
    std::vector<xd_norm_array> on_host, on_device;
    for (int k = 0; k < arrays; k++) {
        const xd_dtype dtype = narrow[k % 3];
        data.push_back(elements(dtype, random->below(longest), random, extremes));
        device.emplace_back(data.back(), k % 2 ? xd_dtype_size(dtype) : 0);
        const int64_t n = (int64_t)(data.back().size() / xd_dtype_size(dtype));
        const xd_norm_array array = { data.back().data(), n, dtype, k % 5 == 4 };
        on_host.push_back(array);
        on_device.push_back(array);
        on_device.back().data = device.back().at();
    }
    xd_norm_sum zero;
    memset(&zero, 0, sizeof zero);
    xd_norm_sum expected = zero;
    const Device sum(&zero, sizeof zero);
    const xd_launch host_launch = xd_ctx_launch(host), launch = gpu->launch();
    xd_norm_args args = { on_host.data(), arrays, type, exact };
    CHECK(xd_optimizer_kernels_cpu()->norm(&host_launch, &args, &expected) == XD_OK);
    args.arrays = on_device.data();
    seal();
    CHECK(gpu->kernels().optimizer.norm(&launch, &args, sum.at<xd_norm_sum>()) == XD_OK);
    unseal();
    gpu->wait();
    const xd_norm_sum got = sum.host<xd_norm_sum>()[0];
    CHECK_EQ_INT(got.not_finite, expected.not_finite);
    CHECK_EQ_INT(got.nan, expected.nan);
    CHECK(got.largest == expected.largest);
    CHECK_NEAR(got.sum, expected.sum, 1e-14 * expected.sum);
    for (int k = 0; k < XD_NORM_LIMBS; k++) CHECK_EQ_INT(got.limbs[k], expected.limbs[k]);
    double norm = 0.0;
    int64_t not_finite = 0;
    float coefficient = 0.0f;
    const Device d_norm(&norm, 8), d_count(&not_finite, 8), d_coefficient(&coefficient, 4);
    xd_clip_args clip = {};
    clip.sum = &got;
    clip.type = type;
    clip.exact = exact;
    clip.form = (xd_clip_form)random->below(3);
    clip.max_norm = 0.25;
    clip.norm = &norm;
    clip.not_finite = &not_finite;
    clip.coefficient = &coefficient;
    CHECK(xd_clip_cpu(&host_launch, &clip) == XD_OK);
    clip.sum = sum.at<xd_norm_sum>();
    clip.norm = d_norm.at<double>();
    clip.not_finite = d_count.at<int64_t>();
    clip.coefficient = d_coefficient.at<float>();
    CHECK(gpu->kernels().clip(&launch, &clip) == XD_OK);
    gpu->wait();
    const double d = d_norm.host<double>()[0];
    const float c = d_coefficient.host<float>()[0];
    CHECK(memcmp(&d, &norm, 8) == 0 || (d != d && norm != norm));
    CHECK(memcmp(&c, &coefficient, 4) == 0 || (c != c && coefficient != coefficient));
    CHECK_EQ_INT(d_count.host<int64_t>()[0], not_finite);
}

XD_TEST(norms_agree_with_the_cpu_and_exact_ones_to_the_bit) {
    Gpu gpu;
    xd_ctx *host = nullptr;
    Random random(7);
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int form = 0; form < 24; form++)
        check_norm(&gpu, host, &random, (xd_norm_type)(form % 3), form % 2 == 1 && form % 3 != 2, form >= 12, 1 + form,
                   form % 4 == 3 ? 3000 : 70);
    check_norm(&gpu, host, &random, XD_NORM_L2, true, false, 300, 5);
    check_norm(&gpu, host, &random, XD_NORM_L2, false, false, 3, 60000);
    xd_ctx_destroy(host);
}

XD_TEST(sums_over_ranks_have_the_bits_of_the_cpu) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                       XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };
    Gpu gpu;
    Random random(8);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int form = 0; form < 140; form++) {
        const xd_dtype dtype = dtypes[form % 7];
        const xd_reduce_op op = (xd_reduce_op)(form / 7 % 4);
        const int ranks = 1 + (int)random.below(9);
        const int64_t n = random.below(150);
        const size_t skew = form % 3 == 0 ? xd_dtype_size(dtype) : 0;
        if (!xd_reduce_supports(dtype, op)) continue;
        std::vector<std::vector<unsigned char>> data;
        std::vector<Device> device;
        std::vector<const void *> from, on_device;
        for (int r = 0; r < ranks; r++) {
            data.push_back(elements(dtype, n, &random, true));
            device.emplace_back(data.back(), skew);
        }
        for (int r = 0; r < ranks; r++) {
            from.push_back(data[r].data());
            on_device.push_back(device[r].at());
        }
        std::vector<unsigned char> out(data[0].size());
        CHECK(xd_reduce_pieces(host, out.data(), from.data(), ranks, n, dtype, op) == XD_OK);
        CHECK(xd_reduce_pieces(gpu.ctx, device[0].at(), on_device.data(), ranks, n, dtype, op) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(dtype, out, device[0].host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(sums_over_leaves_have_the_bits_of_the_cpu) {
    Gpu gpu;
    Random random(9);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int form = 0; form < 60; form++) {
        const xd_dtype dtype = form % 2 ? XD_DTYPE_F64 : XD_DTYPE_F32;
        const int ranks = 1 + (int)random.below(6);
        const int64_t n = 1 + random.below(300), stride = n + random.below(3);
        std::vector<xd_leaves> leaves(ranks);
        int64_t total = 0;
        for (xd_leaves &l : leaves) {
            l.first = total;
            l.count = random.below(7);
            total += l.count;
        }
        leaves[0].count += total == 0;
        total += total == 0;
        std::vector<std::vector<unsigned char>> data;
        std::vector<Device> device;
        std::vector<const void *> from, on_device;
        for (xd_leaves &l : leaves) {
            l.total = total;
            if (&l != &leaves[0] && l.first == 0) l.first = leaves[0].count;
            data.push_back(elements(dtype, xd_leaves_nodes(l.first, l.count) * stride, &random, false));
            device.emplace_back(data.back());
        }
        for (int r = 0; r < ranks; r++) {
            from.push_back(data[r].data());
            on_device.push_back(device[r].at());
        }
        const xd_reduce_op op = form % 3 ? XD_SUM : XD_AVG;
        std::vector<unsigned char> out((size_t)n * xd_dtype_size(dtype));
        const Device d_out(out);
        CHECK(xd_reduce_leaves(host, out.data(), from.data(), leaves.data(), ranks, stride, n, dtype, op) == XD_OK);
        CHECK(xd_reduce_leaves(gpu.ctx, d_out.at(), on_device.data(), leaves.data(), ranks, stride, n, dtype, op) ==
              XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(dtype, out, d_out.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(strided_blocks_are_copied_as_on_the_cpu) {
    Gpu gpu;
    Random random(10);
    const xd_launch launch = gpu.launch();
    for (int form = 0; form < 60; form++) {
        static const size_t sizes[] = { 1, 2, 4, 8 };
        const size_t size = sizes[form % 4];
        std::vector<xd_copy> copies(1 + (size_t)random.below(30));
        int64_t room = 0; /* blocks of the target stand behind each other; those of the source may overlap */
        for (xd_copy &c : copies) {
            memset(&c, 0, sizeof c);
            c.ndim = 1 + (int)random.below(4);
            int64_t step = form % 3 == 0 ? 2 : 1;
            c.dst_offset = room;
            c.src_offset = random.below(20);
            for (int d = c.ndim - 1; d >= 0; d--) {
                c.extent[d] = 1 + random.below(d == c.ndim - 1 ? 24 : 3);
                c.dst_stride[d] = step;
                c.src_stride[d] = form % 5 == 0 ? 0 : step;
                step *= c.extent[d] + random.below(2) * 4;
            }
            room += step;
        }
        std::vector<unsigned char> source(size * (size_t)(room + 8000)), target(size * (size_t)room);
        for (unsigned char &byte : source) byte = (unsigned char)random.bits();
        const Device d_source(source), d_target(target);
        for (const xd_copy &c : copies) xd_copy_run(&c, source.data(), target.data(), size);
        CHECK(gpu.kernels().copies(&launch, copies.data(), (int64_t)copies.size(), d_source.at(), d_target.at(), size) ==
              XD_OK);
        gpu.wait();
        CHECK_SAME(target, d_target.host<unsigned char>());
    }
}

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
        xd_optimizer_desc desc = {};
        desc.params = params;
        desc.param_count = PARAMS;
        desc.kind = kind;
        desc.momentum = 0.9;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
        xd_ema_desc average = {};
        average.decay = 0.9;
        CHECK(xd_ema_create(ctx, params, PARAMS, &average, &ema) == XD_OK);
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
        desc.ema = fused ? ema : nullptr;
        CHECK(xd_optimizer_step(optimizer, &desc, nullptr) == XD_OK);
        if (!fused) CHECK(xd_ema_update(ema, XD_EMA_NEXT, status) == XD_OK);
    }
};

static void check_models(const Model &host, const Model &gpu) {
    for (int i = 0; i < PARAMS; i++) {
        CHECK_SAME(host.values[i], gpu.d_values[i].host<unsigned char>());
        const xd_param a = xd_ema_view(host.ema, i), b = xd_ema_view(gpu.ema, i);
        std::vector<unsigned char> average((size_t)a.count * xd_dtype_size(a.dtype));
        CHECK(xd_read(gpu.ctx, average.data(), b.value, average.size()) == XD_OK);
        CHECK(average.empty() || memcmp(a.value, average.data(), average.size()) == 0);
        const xd_optimizer_state s = xd_optimizer_get_state(host.optimizer, i);
        const xd_optimizer_state t = xd_optimizer_get_state(gpu.optimizer, i);
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
        groups[1].learning_rate_scale = 0.5;
        groups[2].weight_decay = 0.1;
        xd_optimizer_desc desc = {};
        desc.params = params.data();
        desc.param_count = (int64_t)arrays;
        desc.kind = kind;
        desc.groups = groups;
        desc.group_count = 3;
        CHECK(xd_optimizer_create(ctx, &desc, &optimizer) == XD_OK);
        xd_ema_desc average = {};
        average.decay = 0.9;
        average.init_from_current = true;
        CHECK(xd_ema_create(ctx, params.data(), (int64_t)arrays, &average, &ema) == XD_OK);
    }
    ~Crowd() {
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }

    bool on_device() const { return !d_values.empty(); }

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
        desc.ema = fused ? ema : nullptr;
        CHECK(xd_optimizer_step(optimizer, &desc, nullptr) == XD_OK);
        if (!fused) CHECK(xd_ema_update(ema, XD_EMA_NEXT, nullptr) == XD_OK);
    }
};

static void check_crowds(const Crowd &host, const Crowd &gpu) {
    bool same = true;
    for (size_t i = 0; i < host.params.size(); i++) {
        const xd_param a = xd_ema_view(host.ema, (int64_t)i), b = xd_ema_view(gpu.ema, (int64_t)i);
        const xd_optimizer_state s = xd_optimizer_get_state(host.optimizer, (int64_t)i),
                                 t = xd_optimizer_get_state(gpu.optimizer, (int64_t)i);
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
            step_crowds(&a, &b, step > 1, step % 2 == 1); /* the lists travel in the first step of each form */
            /* six lists of norms and their sum, the coefficient, the step and its count; the average */
            if (step % 2 == 1) CHECK(launches() - before <= (step == 1 ? 11 : 10));
        }
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

/* More rates than the parameters of a launch have room for, and a list that does not fit. */
XD_TEST(arrays_of_many_rates_are_stepped_in_pieces) {
    Gpu gpu;
    xd_ctx *host = nullptr;
    Random random(22);
    std::vector<Update> updates;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    xd_update_args args = update_args();
    CHECK(gpu.kernels().optimizer.list_create(gpu.ctx, 50, &args.list) == XD_OK);
    updates.reserve(60);
    for (int k = 0; k < 60; k++) {
        updates.emplace_back(&random, random.below(30), XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_NONE, 0, false);
        updates[(size_t)k].host.step_size = updates[(size_t)k].device.step_size = 0.001f * (float)(k / 2);
    }
    step_both(&gpu, host, &updates, args, true, 0.5f);
    while (updates.size() > 51) updates.pop_back();
    for (Update &update : updates) update.host.step_size = update.device.step_size = 0.001f;
    step_both(&gpu, host, &updates, args, false, 0.5f);
    for (const Update &update : updates) update.check();
    gpu.kernels().optimizer.list_destroy(args.list);
    gpu.kernels().optimizer.list_destroy(nullptr);
    xd_ctx_destroy(host);
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
    CHECK(cuda == nullptr && xd_ctx_kernels(ctx).device == XD_DEVICE_CPU);
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
    CHECK(xd_ctx_kernels(ctx).device == XD_DEVICE_CPU);
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
    const xd_optimizer_kernels cuda = gpu.kernels().optimizer;
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
    xd_lerp_args lerp = { &pair, 1, 0.5, false, nullptr };
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
        xd_clear_error(ctx);
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

XD_CUDA_TEST_MAIN()
