/* Kernels of optimizers, averages, casts and norms on a GPU: the bits of the plain CPU kernels. */
#include "cuda_test.h"

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
    const xd_optimizer_kernels plain = xd_ctx_kernels(host)->optimizer, cuda = gpu->kernels()->optimizer;
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
    xd_ctx *host = plain_ctx();
    Random random(adam ? 1 : 2);
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
    xd_ctx *host = plain_ctx();
    Random random(3);
    std::vector<Update> updates;
    updates.reserve(1001);
    for (int k = 0; k < 1000; k++)
        updates.emplace_back(&random, random.below(12), XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_NONE, 0, false);
    updates.emplace_back(&random, 40000, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F32, 0, false);
    step_both(&gpu, host, &updates, update_args(), true, 0.5f);
    for (const Update &update : updates) update.check();
    xd_ctx_destroy(host);
}

/* Sizes around what a warp and a block take at a time, with every mixture of types in one list, aligned or not. */
XD_TEST(sizes_around_those_of_warps_and_blocks_are_stepped_to_the_bits_of_the_cpu) {
    static const int64_t sizes[] = { 3, 4, 127, 128, 129, 131, 132, 255, 256, 257, 260, 388, 2047, 2048, 2049, 2180, 4095, 4096, 4103, 8197 };
    const int count = (int)(sizeof sizes / sizeof *sizes);
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    Random random(23);
    for (int form = 0; form < 4; form++) {
        std::vector<Update> updates;
        updates.reserve((size_t)count);
        for (int k = 0; k < count; k++) {
            const xd_dtype value = (k + form) % 4 == 3 ? XD_DTYPE_NONE : narrow[(k + form) % 4];
            const xd_dtype average = (k / 4 + form) % 4 == 3 ? XD_DTYPE_NONE : narrow[(k / 4 + form) % 4];
            updates.emplace_back(&random, sizes[k], narrow[(k / 3 + form) % 3], value, average, k % 5 == 4 ? (size_t)1 : (size_t)0,
                                 form == 1);
        }
        step_both(&gpu, host, &updates, update_args(), form % 2 == 0, 0.37f);
        for (const Update &update : updates) update.check();
    }
    xd_ctx_destroy(host);
}

XD_TEST(averages_have_the_bits_of_the_cpu_for_every_pair_of_dtypes) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };
    static const double keeps[] = { 0.0, 0.3, 0.9999, 1.0 };
    Gpu gpu;
    Random random(4);
    const xd_launch launch = gpu.launch();
    xd_ctx *host = plain_ctx();
    const xd_launch host_launch = xd_ctx_launch(host);
    for (int form = 0; form < 128; form++) {
        const xd_dtype to = dtypes[form % 4], from = dtypes[form / 4 % 4];
        const int64_t n = form % 5 == 4 ? 2040 + random.below(20) : 1 + random.below(300);
        const size_t skew = form < 64 ? 0 : xd_dtype_size(to);
        std::vector<unsigned char> target = elements(to, n, &random, true), source = elements(from, n, &random, true);
        const Device d_target(target, skew), d_source(source);
        xd_lerp_array array = { target.data(), source.data(), n, to, from };
        xd_lerp_args args = { &array, 1, keeps[form / 16 % 4], form % 7 == 0, nullptr, nullptr, false };
        CHECK(xd_ctx_kernels(host)->optimizer.lerp(&host_launch, &args) == XD_OK);
        array.target = d_target.at();
        array.source = d_source.at();
        CHECK(gpu.kernels()->optimizer.lerp(&launch, &args) == XD_OK);
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
    xd_ctx *host = plain_ctx();
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
        CHECK(xd_ctx_kernels(host)->optimizer.cast(&host_launch, &array, 1) == XD_OK);
        array.target = d_target.at();
        array.source = d_source.at();
        CHECK(gpu.kernels()->optimizer.cast(&launch, &array, 1) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(to, target, d_target.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(scaling_has_the_bits_of_the_cpu) {
    Gpu gpu;
    Random random(6);
    const xd_launch launch = gpu.launch();
    xd_ctx *host = plain_ctx();
    const xd_launch host_launch = xd_ctx_launch(host);
    for (int form = 0; form < 213; form++) {
        const xd_dtype dtype = narrow[form % 3];
        const int64_t n = form / 3;
        std::vector<unsigned char> data = elements(dtype, n, &random, true);
        const Device d_data(data, form % 2 ? xd_dtype_size(dtype) : 0);
        xd_scale_args args = { data.data(), n, dtype, 0.7f };
        CHECK(xd_ctx_kernels(host)->optimizer.scale(&host_launch, &args) == XD_OK);
        args.data = d_data.at();
        CHECK(gpu.kernels()->optimizer.scale(&launch, &args) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(dtype, data, d_data.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

/* The sum of a list on both sides; the list has ordinary elements, or some that are not finite too. */
static void check_norm(Gpu *gpu, xd_ctx *host, Random *random, xd_norm_type type, bool exact, bool extremes,
                       const std::vector<int64_t> &counts) {
    std::vector<std::vector<unsigned char>> data;
    std::vector<Device> device;
    std::vector<xd_norm_array> on_host, on_device;
    const int arrays = (int)counts.size();
    for (int k = 0; k < arrays; k++) {
        const xd_dtype dtype = narrow[k % 3];
        data.push_back(elements(dtype, counts[(size_t)k], random, extremes));
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
    CHECK(xd_ctx_kernels(host)->optimizer.norm(&host_launch, &args, &expected) == XD_OK);
    args.arrays = on_device.data();
    seal();
    CHECK(gpu->kernels()->optimizer.norm(&launch, &args, sum.at<xd_norm_sum>()) == XD_OK);
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
    CHECK(xd_ctx_kernels(host)->clip(&host_launch, &clip) == XD_OK);
    clip.sum = sum.at<xd_norm_sum>();
    clip.norm = d_norm.at<double>();
    clip.not_finite = d_count.at<int64_t>();
    clip.coefficient = d_coefficient.at<float>();
    CHECK(gpu->kernels()->clip(&launch, &clip) == XD_OK);
    gpu->wait();
    const double d = d_norm.host<double>()[0];
    const float c = d_coefficient.host<float>()[0];
    CHECK(memcmp(&d, &norm, 8) == 0 || (d != d && norm != norm));
    CHECK(memcmp(&c, &coefficient, 4) == 0 || (c != c && coefficient != coefficient));
    CHECK_EQ_INT(d_count.host<int64_t>()[0], not_finite);
}

static void check_norm(Gpu *gpu, xd_ctx *host, Random *random, xd_norm_type type, bool exact, bool extremes, int arrays,
                       int64_t longest) {
    std::vector<int64_t> counts;
    for (int k = 0; k < arrays; k++) counts.push_back(random->below(longest));
    check_norm(gpu, host, random, type, exact, extremes, counts);
}

XD_TEST(norms_agree_with_the_cpu_and_exact_ones_to_the_bit) {
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    Random random(7);
    for (int form = 0; form < 24; form++)
        check_norm(&gpu, host, &random, (xd_norm_type)(form % 3), form % 2 == 1 && form % 3 != 2, form >= 12, 1 + form,
                   form % 4 == 3 ? 3000 : 70);
    check_norm(&gpu, host, &random, XD_NORM_L2, true, false, 300, 5);
    check_norm(&gpu, host, &random, XD_NORM_L2, false, false, 3, 60000);
    xd_ctx_destroy(host);
}

/* Gradients whose squares are outside of f32, or sum to more than the largest of them, and some that are not finite. */
XD_TEST(norms_of_the_largest_and_smallest_numbers_agree_with_the_cpu) {
    static const float values[] = { 3.3e38f, -3.3e38f, 1e-40f, -1e-45f, 0.0f, INFINITY, -INFINITY, NAN };
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    const xd_launch host_launch = xd_ctx_launch(host), launch = gpu.launch();
    for (int form = 0; form < 8 * 9; form++) {
        const xd_dtype dtype = narrow[form / 8 % 3];
        const int64_t n = 9000 + form, size = (int64_t)xd_dtype_size(dtype);
        std::vector<unsigned char> data((size_t)(n * size));
        for (int64_t i = 0; i < n; i++) /* those that are not finite are few, and may come last */
            xd_store_f64(data.data(), dtype, i, form % 8 < 5 ? values[form % 8] : i % 4001 == 4000 ? values[form % 8] : 0.25f);
        const Device d_data(data);
        xd_norm_sum zero;
        memset(&zero, 0, sizeof zero);
        xd_norm_sum expected = zero;
        const Device sum(&zero, sizeof zero);
        xd_norm_array array = { data.data(), n, dtype, form % 2 == 1 && form >= 48 };
        xd_norm_args args = { &array, 1, (xd_norm_type)(form / 24), false };
        CHECK(xd_ctx_kernels(host)->optimizer.norm(&host_launch, &args, &expected) == XD_OK);
        array.data = d_data.at();
        CHECK(gpu.kernels()->optimizer.norm(&launch, &args, sum.at<xd_norm_sum>()) == XD_OK);
        gpu.wait();
        const xd_norm_sum got = sum.host<xd_norm_sum>()[0];
        CHECK_EQ_INT(got.not_finite, expected.not_finite);
        CHECK_EQ_INT(got.nan, expected.nan);
        CHECK(got.largest == expected.largest);
        CHECK_NEAR(got.sum, expected.sum, 1e-14 * expected.sum);
    }
    xd_ctx_destroy(host);
}

/* The table of a list has an entry for several chunks then. */
XD_TEST(a_norm_of_more_chunks_than_a_table_has_is_that_of_the_cpu) {
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    Random random(24);
    check_norm(&gpu, host, &random, XD_NORM_L2, false, false, { 8500001, 0, 3, 4999, 0, 2, 8400003, 5 });
    xd_ctx_destroy(host);
}

/* Which lists norms find again, and which they bring: in any order, and more of them than are kept. */
XD_TEST(norms_of_several_lists_take_two_launches_once_they_are_known) {
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    Random random(25);
    std::vector<std::vector<unsigned char>> data;
    std::vector<Device> device;
    const xd_launch host_launch = xd_ctx_launch(host), launch = gpu.launch();
    for (int k = 0; k < 3; k++) {
        data.push_back(elements(XD_DTYPE_BF16, 5000, &random, false));
        device.emplace_back(data.back());
    }
    for (int turn = 0; turn < 9; turn++) {
        const int which = turn < 4 ? turn % 2 : turn % 3;
        xd_norm_sum zero;
        memset(&zero, 0, sizeof zero);
        xd_norm_sum expected = zero;
        const Device sum(&zero, sizeof zero);
        xd_norm_array array = { data[(size_t)which].data(), 5000, XD_DTYPE_BF16, false };
        xd_norm_args args = { &array, 1, XD_NORM_L2, true };
        CHECK(xd_ctx_kernels(host)->optimizer.norm(&host_launch, &args, &expected) == XD_OK);
        array.data = device[(size_t)which].at();
        const long before = launch_count();
        CHECK(gpu.kernels()->optimizer.norm(&launch, &args, sum.at<xd_norm_sum>()) == XD_OK);
        if (turn == 2 || turn == 3) CHECK(launch_count() - before <= 2);
        gpu.wait();
        const xd_norm_sum got = sum.host<xd_norm_sum>()[0];
        for (int k = 0; k < XD_NORM_LIMBS; k++) CHECK_EQ_INT(got.limbs[k], expected.limbs[k]);
    }
    xd_ctx_destroy(host);
}

/* A call may say that its arrays are those of the last one, but rates that were equal may differ now, and a call between may have
 * been one whose list was not kept. */
XD_TEST(rates_of_the_same_arrays_may_part_and_meet) {
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    Random random(26);
    std::vector<Update> updates;
    xd_update_args args = update_args();
    CHECK(gpu.kernels()->optimizer.list_create(gpu.ctx, 40, &args.list) == XD_OK);
    updates.reserve(40);
    for (int k = 0; k < 40; k++)
        updates.emplace_back(&random, 100 + random.below(30), XD_DTYPE_BF16, XD_DTYPE_BF16, XD_DTYPE_NONE, 0, false);
    for (int turn = 0; turn < 7; turn++) { /* one rate; three; twenty, with other gradients, which no list keeps; one again */
        static const int rates[] = { 1, 3, 1, 20, 1, 3, 3 };
        for (size_t k = 0; k < updates.size(); k++) {
            Update &u = updates[k];
            u.host.decay = u.device.decay = 1.0f - 0.001f * (float)(k % (size_t)rates[turn]);
            if (turn != 3) continue;
            u.host.gradient = updates[(k + 1) % 40].gradient.data();
            u.device.gradient = updates[(k + 1) % 40].d_gradient.at();
            u.host.count = u.device.count = 100;
        }
        args.same = turn != 0 && turn != 3;
        step_both(&gpu, host, &updates, args, true, 0.5f);
    }
    for (const Update &update : updates) update.check();
    gpu.kernels()->optimizer.list_destroy(args.list);
    xd_ctx_destroy(host);
}

/* More rates than the parameters of a launch have room for, and a list that does not fit. */
XD_TEST(arrays_of_many_rates_are_stepped_in_pieces) {
    Gpu gpu;
    xd_ctx *host = plain_ctx();
    Random random(22);
    std::vector<Update> updates;
    xd_update_args args = update_args();
    CHECK(gpu.kernels()->optimizer.list_create(gpu.ctx, 50, &args.list) == XD_OK);
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
    gpu.kernels()->optimizer.list_destroy(args.list);
    gpu.kernels()->optimizer.list_destroy(nullptr);
    xd_ctx_destroy(host);
}

XD_CUDA_TEST_MAIN()
