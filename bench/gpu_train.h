/* Parameters, samples of diffusion and copies, for bench/gpu.cu. */
#ifndef XDISTILL_BENCH_GPU_TRAIN_H
#define XDISTILL_BENCH_GPU_TRAIN_H

#include "gpu_side.h"

/* ---- parameters: rows are blocks of one array, or small arrays ---- */

enum { NORM = 1, AVERAGE = 2, STEP = 4 };

struct Training {
    const char *name;
    int what; /* a set of these */
    xd_dtype dtype;
    bool list;
    int64_t rows;
    double bytes; /* of an element */
};

/* The square sum of what noise fills an array with, over whole periods and the rest. */
static double noise_norm(int64_t count, xd_dtype dtype, double size, uint64_t seed) {
    const std::vector<unsigned char> pattern = noise_pattern(count, dtype, size, seed);
    const int64_t period = noise_period(count), rest = count % period;
    double all = 0.0, part = 0.0;
    for (int64_t i = 0; i < period; i++) {
        const double x = xd_load_f64(pattern.data(), dtype, i);
        all += x * x;
        if (i < rest) part += x * x;
    }
    return sqrt((double)(count / period) * all + part);
}

static void prepare_norm(const Training &t, Side &side, int64_t rows, xd_gradient_norm_desc *all,
                         Operation *op) {
    xd_gradient_norm *norm = (xd_gradient_norm *)side.room(sizeof *norm);
    xd_ctx *ctx = side.ctx;
    op->call = [=] { require(ctx, xd_gradient_norm_compute(ctx, nullptr, all, norm)); };
    const double expected = noise_norm(rows * BLOCK, t.dtype, 1.0, 6);
    op->error = [=] {
        xd_gradient_norm found;
        require(ctx, xd_read(ctx, &found, norm, sizeof found));
        return fabs(found.norm - expected) / expected;
    };
}

static void prepare_step(const Training &t, Side &side, std::vector<xd_param> *params, Operation *op) {
    const int64_t arrays = (int64_t)params->size();
    xd_ctx *ctx = side.ctx;
    xd_optimizer *optimizer = nullptr;
    xd_ema **average = op->hold<xd_ema *>(nullptr);
    xd_optimizer_step_desc *step = op->hold(xd_optimizer_step_desc());
    const xd_optimizer_desc adamw = xd_adamw_defaults(params->data(), arrays);
    xd_ema_desc averaged = {};
    averaged.decay = 0.999;
    averaged.init_from_current = true;
    averaged.params = params->data();
    averaged.param_count = arrays;
    if (t.what & STEP) require(ctx, xd_optimizer_create(ctx, &adamw, &optimizer));
    if (t.what & STEP) op->own(optimizer, xd_optimizer_destroy);
    if (t.what & AVERAGE) require(ctx, xd_ema_create(ctx, &averaged, average));
    if (t.what & AVERAGE) op->own(*average, xd_ema_destroy);
    step->averages = average;
    step->average_count = *average != nullptr;
    if (t.what & STEP)
        op->call = [=] { require(ctx, xd_optimizer_step(optimizer, step, NULL)); };
    else
        op->call = [=] { require(ctx, xd_ema_update(*average, XD_EMA_NEXT, NULL)); };
    op->outputs.push_back({ (*params)[0].value, t.dtype, BLOCK, {}, 0 });
    for (int64_t i = 0; t.what & AVERAGE && i < arrays && i < CHECKED_ROWS; i++)
        op->outputs.push_back({ xd_ema_view(*average, i).shadow.value,
                                XD_DTYPE_F32,
                                BLOCK,
                                {},
                                0,
                                (*params)[(size_t)i].count / BLOCK });
}

static void prepare_training(const Training &t, Side &side, int64_t rows, Operation *op) {
    const int64_t arrays = t.list ? rows : 1, count = t.list ? (int64_t)BLOCK : rows * BLOCK;
    const size_t bytes = (size_t)count * xd_dtype_size(t.dtype);
    char *values = (char *)side.noise(t.what == NORM ? 1 : rows * BLOCK, t.dtype, 1.0, 5);
    char *gradients = (char *)side.noise(rows * BLOCK, t.dtype, 1.0, 6);
    std::vector<std::string> *names = op->hold(std::vector<std::string>());
    std::vector<xd_param> *params = op->hold(std::vector<xd_param>((size_t)arrays));
    for (int64_t i = 0; i < arrays; i++) names->push_back("p" + std::to_string((long long)i));
    for (int64_t i = 0; i < arrays; i++) {
        xd_param &p = (*params)[(size_t)i];
        p.name = (*names)[(size_t)i].c_str();
        p.value = values + (t.what == NORM ? 0 : (size_t)i * bytes);
        p.gradient = gradients + (size_t)i * bytes;
        p.dtype = p.gradient_dtype = t.dtype;
        p.count = count;
    }
    if (t.what == NORM) {
        xd_gradient_norm_desc all = {};
        all.params = params->data();
        all.param_count = arrays;
        prepare_norm(t, side, rows, op->hold(all), op);
    } else {
        prepare_step(t, side, params, op);
    }
    op->bytes = t.bytes * (double)(rows * BLOCK);
    op->size = t.list ? size_of(arrays, BLOCK) : std::to_string((long long)(rows * BLOCK));
}

static void add_training(std::vector<Case> *cases) {
    static const Training all[] = {
        { "norm", NORM, XD_DTYPE_BF16, false, 10 * BLOCKS, 2 },
        { "norm", NORM, XD_DTYPE_F32, false, 5 * BLOCKS, 4 },
        { "ema", AVERAGE, XD_DTYPE_BF16, false, BLOCKS, 10 },
        { "adamw", STEP, XD_DTYPE_BF16, false, BLOCKS, 28 },
        { "adamw_ema", STEP | AVERAGE, XD_DTYPE_BF16, false, BLOCKS, 36 },
        { "norm_list", NORM, XD_DTYPE_BF16, true, ARRAYS, 2 },
        { "ema_list", AVERAGE, XD_DTYPE_BF16, true, ARRAYS, 10 },
        { "adamw_list", STEP, XD_DTYPE_BF16, true, ARRAYS, 28 },
        { "adamw_ema_list", STEP | AVERAGE, XD_DTYPE_BF16, true, ARRAYS, 36 },
    };
    for (const Training &t : all) {
        const Training *chosen = &t;
        const bool norm = t.what == NORM;
        /* Steps and averages have the CPU's bits. */
        cases->push_back({ t.name, t.dtype, t.rows,
                           norm     ? 0
                           : t.list ? CHECKED_ROWS
                                    : 1,
                           norm ? 1e-6 : 0.0,
                           [=](const Case &, Side &side, int64_t n, Operation *op) {
                               prepare_training(*chosen, side, n, op);
                           },
                           "", 3 });
    }
}

/* ---- diffusion ---- */

static void prepare_samples(const Case &c, Side &side, int64_t elements, xd_sample_common *common) {
    common->weight = 1.0;
    common->denominator_value = (double)(c.rows * elements);
    common->status = side.status();
}

static void finish_samples(const Case &c, int64_t rows, int64_t elements, double bytes,
                           const xd_rows &written, Operation *op) {
    op->outputs.push_back({ written.data, c.dtype, elements, {}, 0 });
    op->bytes = bytes * (double)(rows * elements);
    op->size = size_of(rows, elements);
}

static void prepare_vsd(int64_t elements, const Case &c, Side &side, int64_t rows, Operation *op) {
    xd_vsd_desc *d = op->hold(xd_vsd_defaults());
    xd_ctx *ctx = side.ctx;
    uint64_t seed = 1;
    for (xd_rows *input : { &d->generated, &d->teacher, &d->fake })
        *input = side.noise_rows(rows, elements, c.dtype, 2.0, seed++);
    d->gradient = side.empty_rows(rows, elements, c.dtype);
    prepare_samples(c, side, elements, &d->common);
    xd_sample_values *out = (xd_sample_values *)side.room(sizeof *out);
    op->call = [=] { require(ctx, xd_vsd_loss(ctx, d, out)); };
    finish_samples(c, rows, elements, 8.0, d->gradient, op);
}

static void prepare_denoise(const Case &c, Side &side, int64_t rows, Operation *op) {
    xd_denoise_desc *d = op->hold(xd_denoise_defaults());
    xd_ctx *ctx = side.ctx;
    uint64_t seed = 1;
    for (xd_rows *input : { &d->prediction, &d->clean, &d->noise })
        *input = side.noise_rows(rows, LONG_SAMPLE, c.dtype, 2.0, seed++);
    d->gradient = side.empty_rows(rows, LONG_SAMPLE, c.dtype);
    const std::vector<xd_denoise_term> terms((size_t)rows, { 0.5, 0.5, 0.5, 0.5 });
    d->terms = (xd_denoise_term *)side.upload(terms.data(), terms.size() * sizeof terms[0]);
    prepare_samples(c, side, LONG_SAMPLE, &d->common);
    xd_sample_values *out = (xd_sample_values *)side.room(sizeof *out);
    op->call = [=] { require(ctx, xd_denoise_loss(ctx, d, out)); };
    finish_samples(c, rows, LONG_SAMPLE, 8.0, d->gradient, op);
}

static void prepare_mix(const Case &c, Side &side, int64_t rows, Operation *op) {
    xd_mix_desc *d = op->hold(xd_mix_desc());
    xd_ctx *ctx = side.ctx;
    d->p = side.noise_rows(rows, LONG_SAMPLE, c.dtype, 2.0, 1);
    d->q = side.noise_rows(rows, LONG_SAMPLE, c.dtype, 2.0, 2);
    d->out = side.empty_rows(rows, LONG_SAMPLE, c.dtype);
    const std::vector<xd_mix> factors((size_t)rows, { 0.5, 0.7 });
    d->mix = (xd_mix *)side.upload(factors.data(), factors.size() * sizeof factors[0]);
    op->call = [=] { require(ctx, xd_mix_rows(ctx, d)); };
    finish_samples(c, rows, LONG_SAMPLE, 6.0, d->out, op);
}

static void prepare_draw(const Case &c, Side &side, int64_t rows, Operation *op) {
    xd_draw_desc *d = op->hold(xd_draw_desc());
    xd_ctx *ctx = side.ctx;
    d->out = side.empty_rows(rows, LONG_SAMPLE, c.dtype);
    op->call = [=] { require(ctx, xd_draw_rows(ctx, d)); };
    finish_samples(c, rows, LONG_SAMPLE, 2.0, d->out, op);
}

/* Logits are few: what takes time here are launches. */
static void prepare_gan(const Case &c, Side &side, int64_t rows, Operation *op) {
    xd_gan_desc *d = op->hold(xd_gan_defaults());
    xd_ctx *ctx = side.ctx;
    d->role = XD_GAN_DISCRIMINATOR;
    d->fake = side.noise_rows(rows, 1, c.dtype, 2.0, 1);
    d->real = side.noise_rows(rows, 1, c.dtype, 2.0, 2);
    d->fake_gradient = side.empty_rows(rows, 1, c.dtype);
    d->real_gradient = side.empty_rows(rows, 1, c.dtype);
    prepare_samples(c, side, 1, &d->common);
    xd_sample_values *out = (xd_sample_values *)side.room(sizeof *out);
    op->call = [=] { require(ctx, xd_gan_loss(ctx, d, out)); };
    finish_samples(c, rows, 1, 16.0, d->fake_gradient, op);
    op->outputs.push_back({ d->real_gradient.data, c.dtype, 1, {}, 0 });
}

static void add_samples(std::vector<Case> *cases) {
    for (const bool longer : { false, true })
        cases->push_back({ longer ? "vsd_65536" : "vsd_16384", XD_DTYPE_BF16,
                           longer ? SAMPLES * 3 / 4 : SAMPLES * 4, CHECKED_ROWS, 0.0,
                           [=](const Case &c, Side &side, int64_t n, Operation *op) {
                               prepare_vsd(longer ? LONG_SAMPLE : SAMPLE, c, side, n, op);
                           } });
    cases->push_back({ "denoise", XD_DTYPE_BF16, SAMPLES * 3 / 4, CHECKED_ROWS, 0.0, prepare_denoise });
    cases->push_back({ "mix", XD_DTYPE_BF16, SAMPLES * 3 / 4, CHECKED_ROWS, 0.0, prepare_mix });
    cases->push_back({ "draw", XD_DTYPE_BF16, SAMPLES * 3 / 4, CHECKED_ROWS, 4e-3, prepare_draw });
    cases->push_back({ "gan", XD_DTYPE_F32, GAN_LOGITS, GAN_LOGITS, 1e-5, prepare_gan });
}

/* ---- what moves between ranks ---- */

/* A block of columns, as a redistribution packs it. */
static void prepare_pack(const Case &c, Side &side, int64_t rows, Operation *op) {
    const int64_t columns = BLOCK / 2;
    xd_copy *copy = op->hold(xd_copy());
    xd_ctx *ctx = side.ctx;
    copy->ndim = 2;
    copy->extent[0] = rows;
    copy->extent[1] = columns;
    copy->src_stride[0] = 2 * columns;
    copy->dst_stride[0] = columns;
    copy->src_stride[1] = copy->dst_stride[1] = 1;
    const void *from = side.noise(rows * columns * 2, c.dtype, 1.0, 1);
    void *to = side.room((size_t)(rows * columns) * 2);
    const xd_launch *launch = op->hold(xd_ctx_launch(ctx));
    op->call = [=] { require(ctx, xd_ctx_kernels(ctx)->copies(launch, copy, 1, from, to, 2)); };
    op->outputs.push_back({ to, c.dtype, columns, {}, 0 });
    op->bytes = 4.0 * (double)(rows * columns);
    op->size = size_of(rows, columns);
}

/* The sum of eight ranks' pieces. */
static void prepare_pieces(const Case &c, Side &side, int64_t rows, Operation *op) {
    enum { RANKS = 8, COLUMNS = 2048 };
    std::vector<const void *> *pieces = op->hold(std::vector<const void *>());
    xd_ctx *ctx = side.ctx;
    for (int r = 0; r < RANKS; r++) pieces->push_back(side.noise(rows * COLUMNS, c.dtype, 1.0, (uint64_t)r));
    void *out = side.room((size_t)(rows * COLUMNS) * sizeof(float));
    op->call = [=] {
        require(ctx, xd_reduce_pieces(ctx, out, pieces->data(), RANKS, rows * COLUMNS, XD_DTYPE_F32, XD_SUM));
    };
    op->outputs.push_back({ out, c.dtype, COLUMNS, {}, 0 });
    op->bytes = 4.0 * (RANKS + 1) * (double)(rows * COLUMNS);
    op->size = "8x" + std::to_string((long long)(rows * COLUMNS));
}

static void add_copies(std::vector<Case> *cases) {
    cases->push_back({ "redistribute", XD_DTYPE_BF16, PIECE_ROWS, CHECKED_ROWS, 0.0, prepare_pack });
    cases->push_back({ "reduce_pieces", XD_DTYPE_F32, PIECE_ROWS, CHECKED_ROWS, 0.0, prepare_pieces });
}

#endif
