/* Losses over samples on a GPU against the plain CPU kernels: the same bits of values and gradients, but for terms on logits, whose
 * exponentials differ; nothing allocated, waited for or read during a step. */
#include "cuda_loss_test.h"
#include "dmd/fdistill.h"

struct SampleCase {
    int64_t samples, elements, padding, skew;
    xd_dtype dtype, gradient;
    bool masked, bad, given, over; /* given: N is; over: the gradient lies over an input */
    int kind;                      /* 0 the student's term, 1 its COMPAT form, 2 denoising */
};

static std::vector<unsigned char> numbers(const SampleCase &c, Random *random) {
    const int64_t count = c.samples * (c.elements + c.padding);
    std::vector<unsigned char> out((size_t)count * xd_dtype_size(c.dtype));
    for (int64_t i = 0; i < count; i++) xd_store_f64(out.data(), c.dtype, i, 2.0 * (double)random->unit());
    return out;
}

static xd_rows rows_of(void *base, size_t offset, xd_dtype dtype, const SampleCase &c) {
    const xd_rows r = { (unsigned char *)base + offset, dtype, c.samples, c.elements, c.elements + c.padding };
    return r;
}

/* Where things are on the board. */
struct SampleBoard {
    size_t in[3], gradient, mask, scale, chain, terms, factor, status, values, losses, distances, work, work_bytes;
};

static xd_sample_common common_at(void *at, const SampleBoard &b, const SampleCase &c) {
    xd_sample_common common = {};
    common.weight = 0.7;
    common.scale = place<double>(at, b.factor);
    common.denominator_value = c.given ? 900.0 : 0.0;
    common.sample_loss = place<double>(at, b.losses);
    common.status = place<xd_status>(at, b.status);
    common.workspace = place<void>(at, b.work);
    common.workspace_bytes = b.work_bytes;
    return common;
}

static void call(xd_ctx *ctx, void *at, const SampleBoard &b, const SampleCase &c) {
    xd_sample_values *out = place<xd_sample_values>(at, b.values);
    const uint8_t *mask = c.masked ? place<uint8_t>(at, b.mask) : nullptr;
    if (c.kind == 2) {
        xd_denoise_desc d = xd_denoise_defaults();
        d.prediction = rows_of(at, b.in[0], c.dtype, c);
        d.clean = rows_of(at, b.in[1], c.dtype, c);
        d.noise = rows_of(at, b.in[2], c.dtype, c);
        d.gradient = rows_of(at, b.gradient, c.gradient, c);
        d.mask = mask;
        d.terms = place<xd_denoise_term>(at, b.terms);
        d.common = common_at(at, b, c);
        CHECK(xd_denoise_loss(ctx, &d, out) == XD_OK);
        return;
    }
    xd_vsd_desc d = xd_vsd_defaults();
    d.generated = rows_of(at, b.in[0], c.dtype, c);
    d.teacher = rows_of(at, b.in[1], c.dtype, c);
    d.fake = rows_of(at, b.in[2], c.dtype, c);
    d.gradient = rows_of(at, b.gradient, c.gradient, c);
    d.mask = mask;
    d.sample_scale = place<double>(at, b.scale);
    d.chain = place<double>(at, b.chain);
    d.distance = place<double>(at, b.distances);
    d.form = c.kind == 1 ? XD_VSD_COMPAT : XD_VSD_EXACT;
    d.common = common_at(at, b, c);
    CHECK(xd_vsd_loss(ctx, &d, out) == XD_OK);
}

static void compare(Pair *pair, const SampleCase &c, uint64_t seed) {
    Random random(seed);
    Board board;
    SampleBoard b = {};
    const size_t samples = (size_t)c.samples, cells = samples * (size_t)c.elements, size = xd_dtype_size(c.dtype);
    for (int k = 0; k < 3; k++) {
        std::vector<unsigned char> x = numbers(c, &random);
        if (c.bad && c.samples > 2) xd_store_f64(x.data(), c.dtype, k * (c.elements + c.padding), k ? HUGE_VAL : NAN);
        b.in[k] = board.add(x, (size_t)c.skew * size);
    }
    std::vector<uint8_t> mask(cells);
    std::vector<double> scale(samples), chain(samples);
    std::vector<xd_denoise_term> terms(samples);
    for (size_t i = 0; i < cells; i++) mask[i] = random.below(4) != 0;
    for (size_t i = 0; i < samples; i++) {
        scale[i] = 0.25 + (double)i;
        chain[i] = -0.9 + 0.3 * (double)i;
        terms[i] = { -0.7 + 0.1 * (double)i, -0.3, 0.37, 1.5 };
    }
    const size_t stored = samples * (size_t)(c.elements + c.padding) * xd_dtype_size(c.gradient);
    b.gradient = c.over ? b.in[2] : board.add(std::vector<unsigned char>(stored, 0x5a), (size_t)c.skew * xd_dtype_size(c.gradient));
    b.mask = board.add(mask);
    b.scale = board.add(scale);
    b.chain = board.add(chain);
    b.terms = board.add(terms);
    b.factor = board.add(std::vector<double>(1, 0.5));
    const xd_status none = {};
    b.status = board.add(&none, sizeof none);
    b.values = board.add(nullptr, sizeof(xd_sample_values));
    b.losses = board.add(std::vector<double>(samples, 9.0));
    b.distances = board.add(std::vector<double>(samples, 9.0));
    b.work_bytes = 8192 + samples * (size_t)(c.elements / XD_SAMPLE_CHUNK + 3) * 512;
    b.work = board.add(nullptr, b.work_bytes);
    const std::vector<unsigned char> after =
        pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) { call(ctx, at, b, c); });
    const unsigned char *x = after.data(), *y = board.bytes.data();
    CHECK(memcmp(x + b.gradient, y + b.gradient, stored) == 0);
    CHECK(memcmp(x + b.losses, y + b.losses, samples * sizeof(double)) == 0);
    CHECK(c.bad || memcmp(x + b.distances, y + b.distances, samples * sizeof(double)) == 0);
    CHECK(memcmp(x + b.values, y + b.values, sizeof(xd_sample_values)) == 0);
    check_status((const xd_status *)(const void *)(x + b.status), (const xd_status *)(const void *)(y + b.status));
    CHECK(!c.bad || c.samples <= 2 || ((const xd_status *)(const void *)(x + b.status))->not_finite == 3);
}

XD_TEST(losses_over_samples_of_every_length_have_the_bits_of_the_cpu) {
    static const int64_t lengths[] = { 0, 1, 5, 255, 256, 257, 2047, 2048, 2049, 16384, 16385, 33001 };
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
            for (int kind = 0; kind < 3; kind++) {
                const SampleCase c = { lengths[k] > 3000 ? 2 : 5, lengths[k], (int64_t)k % 4, (int64_t)k % 2,
                                       XD_DTYPE_F32, XD_DTYPE_F32, (k & 1) != 0, false, (k & 2) != 0, false, kind };
                compare(&pair, c, 10 * k + (uint64_t)kind);
            }
    }
}

XD_TEST(losses_over_samples_of_narrow_types_and_with_findings_have_the_bits_of_the_cpu) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    for (int mode = 0; mode < 2; mode++) {
        Pair pair(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        for (int variant = 0; variant < 36; variant++) {
            const xd_dtype dtype = types[variant % 3];
            const bool over = variant % 4 == 3;
            const SampleCase c = { 5, 2500, variant % 2, variant % 2, dtype, over ? dtype : types[variant / 3 % 3],
                                   false, variant >= 18, false, over, variant / 6 % 3 };
            compare(&pair, c, 200 + (uint64_t)variant);
        }
    }
}

XD_TEST(losses_without_samples_find_nothing_counted) {
    Pair pair;
    for (int kind = 0; kind < 3; kind++) {
        const SampleCase c = { 0, 9, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, false, false, false, false, kind };
        compare(&pair, c, 300);
    }
}

/* ---- a sample at once ---- */

/* What both sides' entries get. */
static xd_sample_args base_of(void *at, const SampleBoard &b, const SampleCase &c, bool fixed) {
    xd_sample_args base = {};
    base.samples = c.samples;
    base.elements = c.elements;
    base.fixed = fixed;
    base.mask = c.masked ? place<uint8_t>(at, b.mask) : nullptr;
    base.parts = place<int64_t>(at, b.work);
    base.sums = c.elements > XD_SAMPLE_CHUNK ? base.parts + 64 * c.samples * (c.elements / XD_SAMPLE_CHUNK + 1) : base.parts;
    base.all_sums = base.sums;
    base.shards = 1;
    base.sample = place<xd_sample>(at, b.losses);
    base.weight = 0.7;
    base.scale = place<double>(at, b.factor);
    base.denominator_value = 900.0;
    base.factor = place<double>(at, b.values);
    return base;
}

static xd_denoise_args denoise_of(void *at, const SampleBoard &b, const SampleCase &c, bool fixed) {
    xd_denoise_args a = {};
    a.base = base_of(at, b, c, fixed);
    a.prediction = rows_of(at, b.in[0], c.dtype, c);
    a.clean = rows_of(at, b.in[1], c.dtype, c);
    a.noise = rows_of(at, b.in[2], c.dtype, c);
    if (b.gradient) a.gradient = rows_of(at, b.gradient, c.gradient, c);
    a.terms = place<xd_denoise_term>(at, b.terms);
    return a;
}

static xd_vsd_args vsd_of(void *at, const SampleBoard &b, const SampleCase &c, bool fixed) {
    xd_vsd_args a = {};
    a.base = base_of(at, b, c, fixed);
    a.generated = rows_of(at, b.in[0], c.dtype, c);
    a.teacher = rows_of(at, b.in[1], c.dtype, c);
    a.fake = rows_of(at, b.in[2], c.dtype, c);
    if (b.gradient) a.gradient = rows_of(at, b.gradient, c.gradient, c);
    a.sample_scale = place<double>(at, b.scale);
    a.normaliser = c.given ? XD_VSD_NONE : XD_VSD_MEAN;
    return a;
}

/* The entry of a table over memory of one side. */
static void call_by_sample(xd_ctx *ctx, void *at, const SampleBoard &b, const SampleCase &c, bool fixed) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_dmd_loss_kernels &kernels = xd_ctx_kernels(ctx)->dmd_loss;
    const xd_denoise_args denoise = denoise_of(at, b, c, fixed);
    const xd_vsd_args vsd = vsd_of(at, b, c, fixed);
    CHECK((c.kind == 2 ? kernels.denoise_by_sample(&launch, &denoise) : kernels.vsd_by_sample(&launch, &vsd)) == XD_OK);
}

/* Sums of chunks, samples, gradient: an entry for each. */
static void call_in_parts(xd_ctx *ctx, void *at, const SampleBoard &b, const SampleCase &c) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_dmd_loss_kernels &kernels = xd_ctx_kernels(ctx)->dmd_loss;
    xd_denoise_args denoise = denoise_of(at, b, c, false);
    xd_vsd_args vsd = vsd_of(at, b, c, false);
    int64_t *sums = place<int64_t>(at, b.work) + 128 * c.samples;
    denoise.base.sums = vsd.base.sums = sums;
    denoise.base.all_sums = vsd.base.all_sums = sums;
    CHECK((c.kind == 2 ? kernels.denoise_measure(&launch, &denoise) : kernels.vsd_measure(&launch, &vsd)) == XD_OK);
    CHECK(kernels.join(&launch, c.kind == 2 ? &denoise.base : &vsd.base) == XD_OK);
    CHECK((c.kind == 2 ? kernels.denoise_weigh(&launch, &denoise) : kernels.vsd_weigh(&launch, &vsd)) == XD_OK);
    CHECK((c.kind == 2 ? kernels.denoise_slope(&launch, &denoise) : kernels.vsd_slope(&launch, &vsd)) == XD_OK);
}

static void compare_by_sample(Pair *pair, const SampleCase &c, bool fixed, uint64_t seed) {
    Random random(seed);
    Board board;
    SampleBoard b = {};
    const size_t samples = (size_t)c.samples, size = xd_dtype_size(c.dtype);
    const int64_t count = c.samples * (c.elements + c.padding);
    const size_t stored = (size_t)count * xd_dtype_size(c.gradient);
    board.add(nullptr, 64); /* offset 0 is none */
    for (int k = 0; k < 3; k++) b.in[k] = board.add(elements(c.dtype, count, &random, c.bad), (size_t)c.skew * size);
    if (seed % 5) b.gradient = c.over ? b.in[(seed + 1) % 3] : board.add(std::vector<unsigned char>(stored, 0x5a));
    std::vector<uint8_t> mask((size_t)(c.samples * c.elements));
    for (uint8_t &m : mask) m = random.below(4) != 0;
    std::vector<double> scale(samples, 0.75);
    if (samples > 1) scale[1] = 0.0;
    b.mask = board.add(mask);
    b.scale = board.add(scale);
    b.terms = board.add(std::vector<xd_denoise_term>(samples, xd_denoise_term{ -0.7, -0.3, 0.37, 1.5 }));
    b.factor = board.add(std::vector<double>(1, 0.5));
    b.losses = board.add(nullptr, samples * sizeof(xd_sample));
    b.values = board.add(nullptr, sizeof(double));
    b.work = board.add(nullptr, samples * 512 * (size_t)(c.elements / XD_SAMPLE_CHUNK + 2));
    const std::vector<unsigned char> after = pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
        call_by_sample(ctx, at, b, c, fixed);
    });
    const xd_sample *x = (const xd_sample *)(const void *)(after.data() + b.losses);
    const xd_sample *y = place<xd_sample>(board.bytes.data(), b.losses);
    for (size_t i = 0; i < samples; i++) { /* a weight of a sample with a finding may be one NaN or another */
        CHECK(memcmp(&x[i].loss, &y[i].loss, 2 * sizeof(double)) == 0 && x[i].counted == y[i].counted);
        CHECK(x[i].finding == y[i].finding && (x[i].weight == y[i].weight || y[i].finding != XD_SAMPLE_FINE));
    }
    if (b.gradient)
        CHECK(memcmp(after.data() + b.gradient, board.bytes.data() + b.gradient, stored) == 0);
}

/* Blocks of a cluster share a sample: of two and more chunks, of a last one that is not whole, INVARIANT too. */
XD_TEST(a_sample_of_several_chunks_at_once_has_the_bits_of_the_cpu) {
    static const int64_t lengths[] = { 16385, 33001, 49152, 65536 + 8 };
    static const xd_dtype types[] = { XD_DTYPE_BF16, XD_DTYPE_F32, XD_DTYPE_F16 };
    Pair pair;
    for (uint64_t k = 0; k < 24; k++) {
        const xd_dtype dtype = types[k % 3];
        const bool over = k % 6 == 5;
        const SampleCase c = { 2, lengths[k % 4], 0, 0, dtype, dtype, k % 7 == 6, k % 5 == 4, k % 2 != 0, over, k / 4 % 2 ? 2 : 0 };
        compare_by_sample(&pair, c, k / 8 == 2, 1600 + k);
    }
}

XD_TEST(a_sample_at_once_has_the_bits_of_the_cpu) {
    static const int64_t lengths[] = { 0, 1, 31, 256, 2049, 5001, 16383, 16384 };
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    Pair pair;
    for (uint64_t k = 0; k < 96; k++) {
        const int64_t length = lengths[k % 8];
        const xd_dtype dtype = types[k % 3];
        const bool over = k / 4 % 3 == 2;
        const SampleCase c = { length > 3000 ? 2 : 4, length, (int64_t)k % 4, (int64_t)k % 2,
                               dtype, over ? dtype : types[k / 3 % 3], k % 7 > 3, k % 5 > 2, k % 2 != 0, over,
                               k / 8 % 2 ? 2 : 0 };
        compare_by_sample(&pair, c, k / 2 % 2 != 0, 600 + k);
    }
}

/* The student's term: the samples, the value. Denoising: also what joins its chunks. Of more chunks than a cluster has blocks, and
 * where N is counted first: measure, a join of chunks, weigh, the value, slope. */
XD_TEST(samples_that_fit_take_one_launch) {
    static const struct {
        int64_t elements;
        bool masked, given;
        int kind;
        long launches;
    } cases[] = {
        { 16384, false, false, 0, 2 },  { 77, true, true, 2, 3 },   { 77, true, false, 0, 4 },   { 16385, false, false, 0, 2 },
        { 262145, false, false, 0, 5 }, { 16385, false, false, 2, 3 }, { 77, false, false, 1, 6 },
    };
    Pair pair;
    Random random(1);
    for (const auto &k : cases) {
        const SampleCase c = { 3, k.elements, 0, 0, XD_DTYPE_F32, XD_DTYPE_F32, k.masked, false, k.given, false, k.kind };
        const size_t cells = (size_t)(c.samples * c.elements);
        Board board;
        SampleBoard b = {};
        for (int i = 0; i < 3; i++) b.in[i] = board.add(numbers(c, &random));
        b.gradient = board.add(nullptr, cells * sizeof(float));
        b.mask = board.add(std::vector<uint8_t>(cells, 1));
        b.scale = b.chain = b.factor = board.add(std::vector<double>(3, 0.5));
        b.terms = board.add(std::vector<xd_denoise_term>(3, xd_denoise_term{ 1.0, -1.0, 0.5, 1.0 }));
        const xd_status none = {};
        b.status = board.add(&none, sizeof none);
        b.values = board.add(nullptr, sizeof(xd_sample_values));
        b.losses = board.add(nullptr, 3 * sizeof(double));
        b.distances = board.add(nullptr, 3 * sizeof(double));
        b.work_bytes = 65536;
        b.work = board.add(nullptr, b.work_bytes);
        pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const long before = launch_count();
            call(ctx, at, b, c);
            if (xd_ctx_kernels(ctx)->device == XD_DEVICE_CUDA && launch_count() >= 0)
                CHECK_EQ_INT(launch_count() - before, k.launches);
        });
    }
}

XD_TEST(a_sample_too_long_to_be_finished_at_once_is_refused) {
    const Gpu gpu;
    const xd_launch launch = gpu.launch();
    xd_vsd_args a = {};
    a.base.samples = 1;
    a.base.elements = gpu.kernels()->dmd_loss.by_sample_elements + 1;
    CHECK(gpu.kernels()->dmd_loss.vsd_by_sample(&launch, &a) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "a sample of 262145 elements; 262144 are finished at once"));
}

/* ---- whole tiles of one type ---- */

/* Numbers for the ways by integers: of like size; whole ones, whose products are ties; of every size of the type, subnormal ones
 * among them; large ones, whose squares leave F32. */
static std::vector<unsigned char> tile_numbers(const SampleCase &c, int kind, Random *random) {
    std::vector<unsigned char> out((size_t)(c.samples * c.elements) * xd_dtype_size(c.dtype));
    for (int64_t i = 0; i < c.samples * c.elements; i++) {
        double value = 2.0 * (double)random->unit();
        if (kind == 1) value = (double)(random->below(513) - 256) / 64.0;
        if (kind == 2) value = ldexp(value, (int)random->below(264) - 140);
        if (kind == 3) value = i % 5 ? value * 1e30 : 0.0;
        xd_store_f64(out.data(), c.dtype, i, value);
    }
    return out;
}

/* A term's own entries on both sides, with factors that are powers of two, rounded ones, large and tiny. */
static void compare_tiles(Pair *pair, const SampleCase &c, int kind, uint64_t seed) {
    static const double factors[] = { 0.015625, 0.3, 1.7, 1e-33, 1e-3 };
    static const xd_denoise_term terms[] = { { 0.5, 0.5, -0.5, 0.5 }, { -0.7, -0.3, 0.37, 1.5 }, { 1e-9, 0.0, -1.0, 1.0 } };
    Random random(seed);
    Board board;
    SampleBoard b = {};
    const size_t samples = (size_t)c.samples, stored = samples * (size_t)c.elements * xd_dtype_size(c.dtype);
    board.add(nullptr, 64); /* offset 0 is none */
    for (int k = 0; k < 3; k++) {
        std::vector<unsigned char> x = tile_numbers(c, kind, &random);
        if (c.bad) xd_store_f64(x.data(), c.dtype, c.elements + 77 * k, k == 1 ? NAN : HUGE_VAL);
        b.in[k] = board.add(x);
    }
    b.gradient = c.over ? b.in[2] : board.add(std::vector<unsigned char>(stored, 0x5a));
    b.scale = board.add(std::vector<double>(samples, 0.3));
    b.terms = board.add(std::vector<xd_denoise_term>(samples, terms[seed % 3]));
    b.factor = board.add(std::vector<double>(1, factors[seed % 5]));
    b.losses = board.add(nullptr, samples * sizeof(xd_sample));
    b.values = board.add(std::vector<double>(1, factors[seed % 5]));
    b.work = board.add(nullptr, samples * 2048);
    const std::vector<unsigned char> after = pair->run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
        call_in_parts(ctx, at, b, c);
    });
    const xd_sample *x = (const xd_sample *)(const void *)(after.data() + b.losses);
    const xd_sample *y = place<xd_sample>(board.bytes.data(), b.losses);
    for (size_t i = 0; i < samples; i++) {
        CHECK(memcmp(&x[i].loss, &y[i].loss, 2 * sizeof(double)) == 0 && x[i].counted == y[i].counted);
        CHECK(x[i].finding == y[i].finding);
    }
    CHECK(memcmp(after.data() + b.gradient, board.bytes.data() + b.gradient, stored) == 0);
}

XD_TEST(whole_tiles_of_one_type_have_the_bits_of_the_cpu) {
    static const xd_dtype types[] = { XD_DTYPE_BF16, XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    static const int64_t lengths[] = { 4096, 2048 + 24, 16384 + 2048 };
    Pair pair;
    for (uint64_t k = 0; k < 120; k++) {
        const SampleCase c = { 2, lengths[k % 3], 0, 0, types[k / 2 % 4], types[k / 2 % 4], false, k % 11 == 10, k % 2 != 0,
                               k % 13 == 12, k % 2 ? 2 : 0 };
        compare_tiles(&pair, c, (int)(k / 8 % 4), 900 + k);
    }
}

/* ---- terms on logits ---- */

XD_TEST(terms_on_logits_are_those_of_the_cpu) {
    for (int variant = 0; variant < 48; variant++) {
        Pair pair(variant & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        Random random(400 + (uint64_t)variant);
        const int role = variant / 2 % 3, kind = variant / 6 % 2, heads = variant < 24 ? 1 : 5;
        const xd_dtype dtype = variant / 12 % 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        const int64_t samples = 37, count = samples * heads;
        Board board;
        std::vector<unsigned char> x((size_t)count * xd_dtype_size(dtype)), y = x;
        for (int64_t i = 0; i < count; i++) {
            xd_store_f64(x.data(), dtype, i, 9.0 * (double)random.unit());
            xd_store_f64(y.data(), dtype, i, i % 5 ? 9.0 * (double)random.unit() : 30.0);
        }
        if (variant % 5 == 0) xd_store_f64(x.data(), dtype, 3 * heads, NAN);
        const size_t fake = board.add(x), real = board.add(y), of_fake = board.add(std::vector<float>((size_t)count)),
                     of_real = board.add(std::vector<float>((size_t)count));
        const xd_status none = {};
        const size_t status = board.add(&none, sizeof none), values = board.add(nullptr, sizeof(xd_sample_values)),
                     work = board.add(nullptr, 16384);
        const std::vector<unsigned char> after = pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            xd_gan_desc d = xd_gan_defaults();
            d.role = (xd_gan_role)role;
            d.kind = (xd_gan_kind)kind;
            d.fake = xd_rows_of(place<void>(at, fake), dtype, samples, heads);
            d.fake_gradient = xd_rows_of(place<void>(at, of_fake), XD_DTYPE_F32, samples, heads);
            if (role) d.real = xd_rows_of(place<void>(at, real), dtype, samples, heads);
            if (role) d.real_gradient = xd_rows_of(place<void>(at, of_real), XD_DTYPE_F32, samples, heads);
            d.common.status = place<xd_status>(at, status);
            d.common.workspace = place<void>(at, work);
            d.common.workspace_bytes = 16384;
            CHECK(xd_gan_loss(ctx, &d, place<xd_sample_values>(at, values)) == XD_OK);
        });
        const unsigned char *a = after.data(), *b = board.bytes.data();
        check_near((const float *)(const void *)(a + of_fake), (const float *)(const void *)(b + of_fake), count, 1e-6);
        check_near((const float *)(const void *)(a + of_real), (const float *)(const void *)(b + of_real), count, 1e-6);
        check_near((const double *)(const void *)(a + values), (const double *)(const void *)(b + values), 2, 1e-12);
        check_status((const xd_status *)(const void *)(a + status), (const xd_status *)(const void *)(b + status));
    }
}

/* ---- f-distill ---- */

XD_TEST(weights_of_samples_are_those_of_the_cpu) {
    for (int variant = 0; variant < 28; variant++) {
        Pair pair(variant & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        Random random(500 + (uint64_t)variant);
        const int64_t samples = 29, heads = 3;
        Board board;
        std::vector<float> logits((size_t)(samples * heads));
        std::vector<double> times((size_t)samples), bins(10, 1.0), weights((size_t)samples, 9.0);
        for (size_t i = 0; i < logits.size(); i++) logits[i] = 3.0f * (float)random.unit();
        for (size_t i = 0; i < times.size(); i++) times[i] = 0.03 * (double)i;
        if (variant % 4 == 0) logits[7] = NAN;
        const size_t z = board.add(logits), t = board.add(times), k = board.add(bins), w = board.add(weights);
        const xd_status none = {};
        const size_t status = board.add(&none, sizeof none), work = board.add(nullptr, 16384);
        const std::vector<unsigned char> after = pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            xdi_fdistill_desc d = xdi_fdistill_defaults();
            d.logits = xd_rows_of(place<void>(at, z), XD_DTYPE_F32, samples, heads);
            d.divergence = (xd_f_divergence)(variant / 2 % 7);
            d.bins = variant < 14 ? 10 : 0;
            d.rate = 0.5;
            d.times = place<double>(at, t);
            d.bin_values = place<double>(at, k);
            d.status = place<xd_status>(at, status);
            d.workspace = place<void>(at, work);
            d.workspace_bytes = 16384;
            CHECK(xdi_fdistill_weights(ctx, &d, place<double>(at, w)) == XD_OK);
        });
        const unsigned char *a = after.data(), *b = board.bytes.data();
        check_near((const double *)(const void *)(a + w), (const double *)(const void *)(b + w), samples, 1e-12);
        check_near((const double *)(const void *)(a + k), (const double *)(const void *)(b + k), 10, 1e-12);
        check_status((const xd_status *)(const void *)(a + status), (const xd_status *)(const void *)(b + status));
    }
}

/* ---- many samples ---- */

/* More than a tile of the block that adds them up, and losses of both signs: hinge has no exponential, so all bits are the CPU's. */
XD_TEST(totals_of_many_samples_have_the_bits_of_the_cpu) {
    static const int64_t counts[] = { 1, 31, 64, 65, 255, 256, 257, 1030 };
    for (uint64_t k = 0; k < 32; k++) {
        Pair pair(k & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        Random random(700 + k);
        const int64_t samples = counts[k / 4];
        Board board;
        std::vector<float> x((size_t)samples);
        for (float &v : x) v = random.unit() * (random.below(3) ? 1e-3f : 1e4f);
        if (k & 2) x[(size_t)random.below(samples)] = NAN, x[(size_t)(samples - 1)] = INFINITY;
        const xd_status none = {};
        const size_t fake = board.add(x), slope = board.add(x), status = board.add(&none, sizeof none),
                     values = board.add(nullptr, sizeof(xd_sample_values)),
                     losses = board.add(nullptr, (size_t)samples * sizeof(double)),
                     room = 4096 + (size_t)samples * 256, work = board.add(nullptr, room);
        const std::vector<unsigned char> after = pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            xd_gan_desc d = xd_gan_defaults();
            d.kind = XD_GAN_HINGE;
            d.fake = xd_rows_of(place<void>(at, fake), XD_DTYPE_F32, samples, 1);
            d.fake_gradient = xd_rows_of(place<void>(at, slope), XD_DTYPE_F32, samples, 1);
            d.common.status = place<xd_status>(at, status);
            d.common.sample_loss = place<double>(at, losses);
            d.common.workspace = place<void>(at, work);
            d.common.workspace_bytes = room;
            CHECK(xd_gan_loss(ctx, &d, place<xd_sample_values>(at, values)) == XD_OK);
        });
        const unsigned char *a = after.data(), *b = board.bytes.data();
        CHECK(memcmp(a + values, b + values, sizeof(xd_sample_values)) == 0);
        CHECK(memcmp(a + losses, b + losses, (size_t)samples * sizeof(double)) == 0);
        CHECK(memcmp(a + slope, b + slope, (size_t)samples * sizeof(float)) == 0);
        check_status((const xd_status *)(const void *)(a + status), (const xd_status *)(const void *)(b + status));
    }
}

/* Loss i of a kind whose sum rounds in some way. */
static double rounding_loss(int kind, int64_t i, Random *random) {
    const double unit = ((double)random->below(1 << 26) + (double)random->below(1 << 26) * 0x1p-26) * 0x1p-26;
    switch (kind) {
    case 0: return unit;
    case 1: return random->below(2) ? unit : -unit;
    case 2: return i == 0 ? 1.0 : (double)(2 * random->below(4) + 1) * 0x1p-53; /* often between two numbers */
    case 3: return ldexp(1.0 + unit, (int)(i / 40));                            /* reaches powers of 2 */
    case 4: return ldexp((double)random->below(1000), -1074 + (int)(i / 100));  /* without all digits */
    case 5: return 0.1;
    case 6: return i % 300 == 299 ? unit : 0.0;
    case 7: return i > 500 ? 1e308 : unit; /* to infinity */
    default: return i % 64 == 0 ? ldexp(1.0 + unit, -(int)(i / 64)) : ldexp(unit, -30);
    }
}

XD_TEST(losses_of_samples_are_added_with_the_bits_of_their_order) {
    static const int64_t counts[] = { 5, 33, 256, 300, 1024, 1025, 2500 };
    Pair pair;
    for (int k = 0; k < 63; k++) {
        Random random(900 + (uint64_t)k);
        Board board;
        std::vector<xd_sample> samples((size_t)counts[k % 7]);
        for (size_t i = 0; i < samples.size(); i++) {
            samples[i].loss = rounding_loss(k / 7, (int64_t)i, &random);
            samples[i].factor = samples[i].weight = 1.0;
            samples[i].counted = 1;
            samples[i].finding = XD_SAMPLE_FINE;
        }
        const size_t bytes = XD_SAMPLE_RECORD_SUMS * sizeof(int64_t) + 2 * sizeof(double), in = board.add(samples),
                     record = board.add(nullptr, bytes);
        const std::vector<unsigned char> after = pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            const xd_launch launch = xd_ctx_launch(ctx);
            xd_sample_args a = {};
            a.samples = (int64_t)samples.size();
            a.sample = (xd_sample *)((unsigned char *)at + in);
            a.record = place<int64_t>(at, record);
            CHECK(xd_ctx_kernels(ctx)->dmd_loss.total(&launch, &a) == XD_OK);
        });
        CHECK(memcmp(after.data() + record, board.bytes.data() + record, bytes) == 0);
    }
}

/* Ratios at the ends of their range need no exponential: all bits of weights and bins are the CPU's. More samples, and more bins, than
 * a block has threads. */
XD_TEST(weights_of_many_samples_have_the_bits_of_the_cpu) {
    static const int64_t counts[] = { 1, 64, 256, 257, 700 }, bin_counts[] = { 0, 1, 300, 4096 };
    for (uint64_t k = 0; k < 40; k++) {
        Pair pair(k & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        Random random(800 + k);
        const int64_t samples = counts[k / 2 % 5], bin_count = bin_counts[k / 10];
        Board board;
        std::vector<float> logits((size_t)samples);
        std::vector<double> times((size_t)samples), bins((size_t)bin_count + 1, 0.3), weights((size_t)samples, 9.0);
        for (float &v : logits) v = random.below(2) ? 30.0f : -30.0f;
        for (double &v : times) v = 0.5 + 0.5 * (double)random.unit();
        if (k % 4 == 3) logits[(size_t)random.below(samples)] = NAN, times[(size_t)(samples / 2)] = INFINITY;
        const xd_status none = {};
        const size_t z = board.add(logits), t = board.add(times), v = board.add(bins), w = board.add(weights),
                     status = board.add(&none, sizeof none), room = 8192 + (size_t)(bin_count + samples) * 512,
                     work = board.add(nullptr, room);
        const std::vector<unsigned char> after = pair.run(&board, 1, true, [&](xd_ctx *ctx, xd_vocab *, void *at) {
            xdi_fdistill_desc d = xdi_fdistill_defaults();
            d.logits = xd_rows_of(place<void>(at, z), XD_DTYPE_F32, samples, 1);
            d.divergence = XD_F_KL;
            d.lower = 0.1;
            d.upper = 7.3;
            d.bins = bin_count;
            d.rate = 0.6;
            d.times = place<double>(at, t);
            d.bin_values = place<double>(at, v);
            d.status = place<xd_status>(at, status);
            d.workspace = place<void>(at, work);
            d.workspace_bytes = room;
            CHECK(xdi_fdistill_weights(ctx, &d, place<double>(at, w)) == XD_OK);
        });
        const unsigned char *a = after.data(), *b = board.bytes.data();
        CHECK(memcmp(a + w, b + w, (size_t)samples * sizeof(double)) == 0);
        CHECK(memcmp(a + v, b + v, bins.size() * sizeof(double)) == 0);
        check_status((const xd_status *)(const void *)(a + status), (const xd_status *)(const void *)(b + status));
    }
}

/* ---- a captured step ---- */

/* Noise, the student's term on it and the denoising term, captured once: a replay draws what the step in memory says, and has the
 * bits of the host. */
XD_TEST(a_captured_draw_and_losses_have_the_bits_of_the_cpu_at_every_replay) {
    enum { ROWS = 3, COLUMNS = 1003, CELLS = ROWS * COLUMNS };
    Pair pair;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Board board;
    Random random(900);
    std::vector<float> x(2 * CELLS);
    for (float &v : x) v = random.unit();
    const xd_status none = {};
    const size_t in = board.add(x), noise = board.add(nullptr, CELLS * sizeof(float)),
                 gradients = board.add(nullptr, 2 * CELLS * sizeof(float)), step = board.add(std::vector<int64_t>(1, 0)),
                 terms = board.add(std::vector<xd_denoise_term>(ROWS, xd_denoise_term{ -0.7, -0.3, 0.37, 1.5 })),
                 status = board.add(&none, sizeof none), values = board.add(nullptr, 2 * sizeof(xd_sample_values)),
                 work = board.add(nullptr, 16384);
    const Device device(board.bytes);
    const auto run = [&](xd_ctx *ctx, void *at) {
        const auto rows = [&](size_t offset, int k) {
            return xd_rows_of(place<float>(at, offset) + k * CELLS, XD_DTYPE_F32, ROWS, COLUMNS);
        };
        xd_draw_desc draw = {};
        draw.random = { 3, XD_STREAM_EPSILON, 0, 40, 1 };
        draw.step = place<int64_t>(at, step);
        draw.first = 7;
        draw.out = rows(noise, 0);
        CHECK(xd_draw_rows(ctx, &draw) == XD_OK);
        xd_vsd_desc vsd = xd_vsd_defaults();
        vsd.generated = rows(in, 0);
        vsd.teacher = rows(in, 1);
        vsd.fake = rows(noise, 0);
        vsd.gradient = rows(gradients, 0);
        vsd.common.status = place<xd_status>(at, status);
        vsd.common.workspace = place<void>(at, work);
        vsd.common.workspace_bytes = 16384;
        CHECK(xd_vsd_loss(ctx, &vsd, place<xd_sample_values>(at, values)) == XD_OK);
        xd_denoise_desc denoise = xd_denoise_defaults();
        denoise.prediction = rows(in, 0);
        denoise.clean = rows(in, 1);
        denoise.noise = rows(noise, 0);
        denoise.gradient = rows(gradients, 1);
        denoise.terms = place<xd_denoise_term>(at, terms);
        denoise.common = vsd.common;
        CHECK(xd_denoise_loss(ctx, &denoise, place<xd_sample_values>(at, values) + 1) == XD_OK);
    };
    CHECK(cudaStreamBeginCapture(pair.gpu.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    run(pair.gpu.ctx, device.at<void>());
    CHECK(cudaStreamEndCapture(pair.gpu.stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    std::vector<double> losses;
    for (int64_t k = 0; k < 3; k++) {
        *place<int64_t>(board.bytes.data(), step) = 5 * k;
        CHECK(cudaMemcpy(device.at<unsigned char>() + step, board.bytes.data() + step, sizeof k,
                         cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, pair.gpu.stream) == cudaSuccess);
        pair.gpu.wait();
        run(pair.cpu, board.bytes.data());
        const std::vector<unsigned char> after = device.host<unsigned char>();
        CHECK(memcmp(after.data() + noise, board.bytes.data() + noise, CELLS * sizeof(float)) == 0);
        CHECK(memcmp(after.data() + gradients, board.bytes.data() + gradients, 2 * CELLS * sizeof(float)) == 0);
        CHECK(memcmp(after.data() + values, board.bytes.data() + values, 2 * sizeof(xd_sample_values)) == 0);
        for (double loss : losses) CHECK(loss != place<xd_sample_values>(board.bytes.data(), values)->loss);
        losses.push_back(place<xd_sample_values>(board.bytes.data(), values)->loss);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

XD_TEST(a_loss_over_samples_without_a_status_is_refused) {
    const Gpu gpu;
    Device x(std::vector<float>(8)), out(std::vector<xd_sample_values>(1));
    xd_vsd_desc d = xd_vsd_defaults();
    d.generated = d.teacher = d.fake = xd_rows_of(x.at<void>(), XD_DTYPE_F32, 2, 4);
    CHECK(xd_vsd_loss(gpu.ctx, &d, out.at<xd_sample_values>()) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "needs a status"));
}

XD_TEST_MAIN()
