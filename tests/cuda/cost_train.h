/* Parameters, samples of diffusion and copies, for cost.cpp. */
#include "cost.h"

/* ---- parameters ---- */

enum { NORM = 1, AVERAGE = 2, STEP = 4 };

struct Training {
    const char *name;
    int what; /* a set of these */
    xd_dtype dtype;
    int64_t arrays, count; /* of each */
    double bytes;
};

static void measure_parameters(const Training &t) {
    if (!is_wanted(t.name)) return;
    const size_t width = xd_dtype_size(t.dtype), bytes = (size_t)t.count * width;
    char *values = (char *)noise(t.arrays * t.count, t.dtype, 1.0), *gradients = (char *)noise(t.arrays * t.count, t.dtype, 1.0);
    std::vector<std::string> names;
    std::vector<xd_param> params;
    for (int64_t i = 0; i < t.arrays; i++) names.push_back("p" + std::to_string(i));
    for (int64_t i = 0; i < t.arrays; i++) {
        xd_param p = {};
        p.name = names[(size_t)i].c_str();
        p.value = values + (size_t)i * bytes;
        p.gradient = gradients + (size_t)i * bytes;
        p.dtype = p.gradient_dtype = t.dtype;
        p.count = t.count;
        params.push_back(p);
    }
    xd_gradient_norm *norm = (xd_gradient_norm *)room(sizeof *norm);
    xd_optimizer *optimizer = nullptr;
    xd_ema *average = nullptr;
    const xd_optimizer_desc adamw = xd_adamw_defaults(params.data(), t.arrays);
    xd_ema_desc averaged = {};
    averaged.decay = 0.999;
    averaged.init_from_current = true;
    if (t.what & STEP) require(xd_optimizer_create(ctx, &adamw, &optimizer));
    averaged.params = params.data();
    averaged.param_count = t.arrays;
    if (t.what & AVERAGE) require(xd_ema_create(ctx, &averaged, &average));
    xd_gradient_norm_desc all = {};
    all.params = params.data();
    all.param_count = t.arrays;
    xd_optimizer_step_desc step = {};
    step.averages = &average;
    step.average_count = average != nullptr;
    measure({ t.name, t.dtype, (double)(t.arrays * t.count), t.bytes }, [&] {
        if (t.what & NORM) require(xd_gradient_norm_compute(ctx, nullptr, &all, norm));
        if (t.what & STEP) require(xd_optimizer_step(optimizer, &step, nullptr));
        if (t.what == AVERAGE) require(xd_ema_update(average, XD_EMA_NEXT, nullptr));
    });
    xd_ema_destroy(average);
    xd_optimizer_destroy(optimizer);
    release(nullptr);
}

static void measure_training() {
    static const Training all[] = {
        { "norm", NORM, XD_DTYPE_BF16, 1, 1 << 25, 2 },
        { "norm", NORM, XD_DTYPE_F32, 1, 1 << 25, 4 },
        { "ema", AVERAGE, XD_DTYPE_BF16, 1, 1 << 21, 10 },
        { "adamw", STEP, XD_DTYPE_BF16, 1, 1 << 21, 28 },
        { "adamw_ema", STEP | AVERAGE, XD_DTYPE_BF16, 1, 1 << 21, 36 },
        { "norm_list", NORM, XD_DTYPE_BF16, 1000, 4096, 2 },
        { "ema_list", AVERAGE, XD_DTYPE_BF16, 1000, 4096, 10 },
        { "adamw_list", STEP, XD_DTYPE_BF16, 1000, 4096, 28 },
        { "adamw_ema_list", STEP | AVERAGE, XD_DTYPE_BF16, 1000, 4096, 36 },
    };
    for (const Training &t : all) measure_parameters(t);
}

/* ---- diffusion ---- */

/* ALL_SMALL, ALL_LARGE: samples of the sizes that times are predicted for (bench/gpu_budget.txt). What adds up samples in their order
 * takes longer for as many: it is measured with small ones. */
enum { SAMPLES = 8, SMALL = 16384, LARGE = 65536, ALL_SMALL = 4096, ALL_LARGE = 768, TINY = 64 };

static void prepare_samples(xd_sample_common *common, double denominator) {
    common->weight = 1.0;
    common->denominator_value = denominator;
    common->status = (xd_status *)room(sizeof *common->status);
}

/* all: samples of the size of the budget, for a section beside the operation's. */
template <typename Call> static void measure_samples(const Operation &operation, bool all, Call call) {
    if (all)
        measure_all_of(operation, call);
    else
        measure(operation, call);
    release(nullptr);
}

static void measure_vsd(const char *name, int64_t samples, int64_t elements, bool all) {
    if (!is_wanted(name)) return;
    xd_vsd_desc d = xd_vsd_defaults();
    for (xd_rows *rows : { &d.generated, &d.teacher, &d.fake }) *rows = noise_rows(samples, elements, XD_DTYPE_BF16, 1.0);
    d.gradient = empty_rows(samples, elements, XD_DTYPE_BF16);
    prepare_samples(&d.common, (double)(samples * elements));
    xd_sample_values *out = (xd_sample_values *)room(sizeof *out);
    measure_samples({ name, XD_DTYPE_BF16, (double)(samples * elements), 8.0 }, all, [&] { require(xd_vsd_loss(ctx, &d, out)); });
}

static void measure_denoise(int64_t samples, int64_t elements, bool all) {
    if (!is_wanted("denoise")) return;
    xd_denoise_desc d = xd_denoise_defaults();
    for (xd_rows *rows : { &d.prediction, &d.clean, &d.noise }) *rows = noise_rows(samples, elements, XD_DTYPE_BF16, 1.0);
    d.gradient = empty_rows(samples, elements, XD_DTYPE_BF16);
    const std::vector<xd_denoise_term> terms((size_t)samples, { 0.5, 0.5, 0.5, 0.5 });
    d.terms = (xd_denoise_term *)upload(terms.data(), terms.size() * sizeof terms[0]);
    prepare_samples(&d.common, (double)(samples * elements));
    xd_sample_values *out = (xd_sample_values *)room(sizeof *out);
    measure_samples({ "denoise", XD_DTYPE_BF16, (double)(samples * elements), 8.0 }, all, [&] { require(xd_denoise_loss(ctx, &d, out)); });
}

static void measure_mix() {
    if (!is_wanted("mix")) return;
    xd_mix_desc d = {};
    d.p = noise_rows(SAMPLES, LARGE, XD_DTYPE_BF16, 1.0);
    d.q = noise_rows(SAMPLES, LARGE, XD_DTYPE_BF16, 1.0);
    d.out = empty_rows(SAMPLES, LARGE, XD_DTYPE_BF16);
    const std::vector<xd_mix> factors(SAMPLES, { 0.5, 0.7 });
    d.mix = (xd_mix *)upload(factors.data(), factors.size() * sizeof factors[0]);
    measure({ "mix", XD_DTYPE_BF16, (double)SAMPLES * LARGE, 6.0 }, [&] { require(xd_mix_rows(ctx, &d)); });
    release(nullptr);
}

static void measure_draw() {
    if (!is_wanted("draw")) return;
    xd_draw_desc d = {};
    d.out = empty_rows(SAMPLES, LARGE, XD_DTYPE_BF16);
    measure({ "draw", XD_DTYPE_BF16, (double)SAMPLES * LARGE, 2.0 }, [&] { require(xd_draw_rows(ctx, &d)); });
    release(nullptr);
}

/* Logits are few: what counts here are launches. */
static void measure_gan() {
    enum { LOGITS = 4096 };
    if (!is_wanted("gan")) return;
    xd_gan_desc d = xd_gan_defaults();
    d.role = XD_GAN_DISCRIMINATOR;
    d.fake = noise_rows(LOGITS, 1, XD_DTYPE_F32, 1.0);
    d.real = noise_rows(LOGITS, 1, XD_DTYPE_F32, 1.0);
    d.fake_gradient = empty_rows(LOGITS, 1, XD_DTYPE_F32);
    d.real_gradient = empty_rows(LOGITS, 1, XD_DTYPE_F32);
    prepare_samples(&d.common, LOGITS);
    xd_sample_values *out = (xd_sample_values *)room(sizeof *out);
    measure({ "gan", XD_DTYPE_F32, LOGITS, 16.0 }, [&] { require(xd_gan_loss(ctx, &d, out)); });
    release(nullptr);
}

static void measure_diffusion() {
    measure_vsd("vsd_16384", SAMPLES, SMALL, false);
    measure_vsd("vsd_16384", ALL_SMALL, TINY, true);
    measure_vsd("vsd_65536", SAMPLES, LARGE, false);
    measure_vsd("vsd_65536", ALL_LARGE, TINY, true);
    measure_denoise(SAMPLES, LARGE, false);
    measure_denoise(ALL_LARGE, TINY, true);
    measure_mix();
    measure_draw();
    measure_gan();
}

/* ---- what moves between ranks ---- */

/* A block of columns, as a redistribution packs it. */
static void measure_pack() {
    enum { DOWN = 1024, ACROSS = 2048 };
    if (!is_wanted("redistribute")) return;
    xd_copy copy = {};
    copy.ndim = 2;
    copy.extent[0] = DOWN;
    copy.extent[1] = ACROSS;
    copy.src_stride[0] = 2 * ACROSS;
    copy.dst_stride[0] = ACROSS;
    copy.src_stride[1] = copy.dst_stride[1] = 1;
    const void *from = noise((int64_t)DOWN * ACROSS * 2, XD_DTYPE_BF16, 1.0);
    void *to = room((size_t)DOWN * ACROSS * 2);
    const xd_launch launch = xd_ctx_launch(ctx);
    measure({ "redistribute", XD_DTYPE_BF16, (double)DOWN * ACROSS, 4.0 },
            [&] { require(xd_ctx_kernels(ctx)->copies(&launch, &copy, 1, from, to, 2)); });
    release(nullptr);
}

/* The sum of eight ranks' pieces. */
static void measure_reduce() {
    enum { RANKS = 8, ELEMENTS = 1 << 20 };
    if (!is_wanted("reduce_pieces")) return;
    std::vector<const void *> pieces;
    for (int r = 0; r < RANKS; r++) pieces.push_back(noise(ELEMENTS, XD_DTYPE_F32, 1.0));
    void *out = room(ELEMENTS * sizeof(float));
    measure({ "reduce_pieces", XD_DTYPE_F32, ELEMENTS, 4.0 * (RANKS + 1) },
            [&] { require(xd_reduce_pieces(ctx, out, pieces.data(), RANKS, ELEMENTS, XD_DTYPE_F32, XD_SUM)); });
    release(nullptr);
}

static void measure_copies() {
    measure_pack();
    measure_reduce();
}
