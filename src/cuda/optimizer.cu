/* Optimizer steps. The formulas are in kernel/optimizer_scalar.h, and the bits are the same as on a CPU. They move bytes and
 * compute little: 16-byte accesses, each array read and written once, all of a thread's loads asked for before the first is used;
 * adam 28 bytes an element with bf16 gradients and parameters and f32 masters, 30 with f32 gradients. Grid: blocks of 256 threads,
 * each block a chunk at a time. Optimizers keep their list on the device, so a step is one launch, after one that counts it
 * and computes what depends on the count, once an array. */

/* ---- adam and sgd ---- */

/* What a schedule changes in every step. Arrays share a few of these rates, so they are not part of the list. */
struct xdi_cuda_rate {
    double learning_rate;
    float decay, weight_decay, step_size, root_correction;
    int64_t fresh;
};
static_assert(sizeof(xdi_cuda_rate) == 4 * sizeof(uint64_t), "without gaps: rates are compared by their bytes");

enum { XDI_CUDA_RATES = 16 };

struct xdi_cuda_update {
    float *master, *first, *second;
    void *value;
    const void *gradient;
    int64_t *steps;
    void *average;
    int64_t count;
    uint64_t key;
    int64_t origin;
    uint8_t value_dtype, gradient_dtype, average_dtype, rate, wide, unused[3];
};

/* What the kernel before the step has from the host. */
struct xdi_cuda_step_options {
    const float *gradient_scale;
    const xd_status *status;
    double beta1, beta2;
    bool adam;
    int rate_count;
    xdi_cuda_rate rates[XDI_CUDA_RATES];
};

/* And what it leaves for the step: the scalars of an array. */
struct alignas(16) xdi_cuda_step {
    xd_update_scalars scalars;
    int64_t number; /* 0: not known */
};
static_assert(sizeof(xdi_cuda_step) <= XDI_CUDA_LIST_SCRATCH * sizeof(uint64_t), "the scratch of an array");
static_assert(sizeof(xdi_cuda_update) == (XDI_CUDA_LIST_WORDS - 1) * sizeof(uint64_t), "the arrays that have a scratch");

struct xdi_cuda_update_options {
    const xd_status *status;
    xdi_cuda_lerp_options average;
    uint64_t rounding_seed;
    xd_update_rules rules;
};

/* The scalars of each array, and one step more in its count. One thread per array. */
static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_step_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_update> list,
                         const __grid_constant__ xdi_cuda_step_options options) {
    const int k = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= list.count || xd_status_refuses(options.status)) return;
    const xdi_cuda_update a = list.item(k);
    const xdi_cuda_rate &rate = options.rates[a.rate];
    xdi_cuda_step step;
    xd_update_scalars &s = step.scalars;
    s.scaled = options.gradient_scale != nullptr;
    s.scale = s.scaled ? *options.gradient_scale : 1.0f;
    s.decay = rate.decay;
    s.weight_decay = rate.weight_decay;
    s.step_size = rate.step_size;
    s.root_correction = rate.root_correction;
    s.fresh = rate.fresh != 0;
    step.number = 0;
    if (a.steps) {
        step.number = *a.steps += 1;
        s.fresh = step.number == 1;
        s.step_size = xd_update_step_size(rate.learning_rate, options.beta1, step.number, options.adam);
        if (options.adam) s.root_correction = xd_update_root_correction(options.beta2, step.number);
    }
    reinterpret_cast<xdi_cuda_step *>(list.scratch)[k] = step;
}

struct xdi_cuda_adam {
    const xdi_cuda_update_options &options;
    const xd_update_scalars &s;

    __device__ void operator()(float gradient, float &p, float &m, float &v) const {
        xd_adam_element(&options.rules, &s, gradient, &p, &m, &v);
    }
};

struct xdi_cuda_sgd {
    const xdi_cuda_update_options &options;
    const xd_update_scalars &s;

    __device__ void operator()(float gradient, float &p, float &buffer, float &) const {
        xd_sgd_element(&options.rules, &s, gradient, &p, &buffer);
    }
};

/* Four elements of an array, and the next access of its arrays' warp. */
template <bool HAS_SECOND> struct xdi_cuda_update_fours {
    xdi_cuda_four gradient, average;
    float master[4], first[4], second[4];

    __device__ void ask(const xdi_cuda_update &a, bool averages, int64_t i) {
        gradient = xdi_cuda_ask4(a.gradient, a.gradient_dtype, i);
        xdi_cuda_read4(a.master + i, master);
        xdi_cuda_read4(a.first + i, first);
        if (HAS_SECOND) xdi_cuda_read4(a.second + i, second);
        if (averages) average = xdi_cuda_ask4(a.average, a.average_dtype, i);
    }
    template <typename Step> __device__ void move(const xdi_cuda_update &a, const Step &step) {
        float g[4];
        xdi_cuda_widen4(gradient, a.gradient_dtype, g);
        XD_UNROLL
        for (int j = 0; j < 4; j++) step(g[j], master[j], first[j], second[j]);
    }
    __device__ void put(const xdi_cuda_update &a, const xdi_cuda_lerp_options &options, bool averages, int64_t i) {
        xdi_cuda_write4(a.master + i, master);
        xdi_cuda_write4(a.first + i, first);
        if (HAS_SECOND) xdi_cuda_write4(a.second + i, second);
        if (a.value) {
            const xdi_cuda_four value = xdi_cuda_narrow4(master, a.value_dtype);
            xdi_cuda_put4(a.value, a.value_dtype, i, value);
            if (averages) xdi_cuda_widen4(value, a.value_dtype, master);
        }
        if (averages)
            xdi_cuda_put4(a.average, a.average_dtype, i, xdi_cuda_lerp4(options, average, a.average_dtype, master));
    }
};

/* ROUNDED: arrays without a master copy may be in the list; the others pay nothing for them. */
template <typename Step, bool HAS_SECOND, bool ROUNDED>
static __global__ void __launch_bounds__(XDI_CUDA_THREADS, ROUNDED ? 1 : 4)
    xdi_cuda_update_kernel(const __grid_constant__ xdi_cuda_kept<xdi_cuda_update> list,
                           const __grid_constant__ xdi_cuda_update_options options) {
    if (xd_status_refuses(options.status)) return;
    XD_SHARED(xdi_cuda_lerp_options, average, [1]); /* in registers they would spill */
    XD_SHARED(bool, averages, [1]);
    if (threadIdx.x == 0) {
        average[0] = options.average;
        averages[0] = xdi_cuda_lerp_take(&average[0]);
    }
    __syncthreads();
    xdi_cuda_each_kept(list, [&](int k, const xdi_cuda_update &a, xdi_cuda_span span) {
        const xdi_cuda_step now = reinterpret_cast<const xdi_cuda_step *>(list.scratch)[k];
        const Step step = { options, now.scalars };
        const bool rounded = ROUNDED && !a.master, moves = a.average && averages[0];
        const xd_philox random = xd_update_random(options.rounding_seed, a.key, now.number);
        xdi_cuda_walk4(
            span, a.wide != 0 && !rounded, /* four at a time have no registers left for random numbers */
            [&](const int64_t (&at)[XDI_CUDA_FOURS]) {
                xdi_cuda_update_fours<HAS_SECOND> fours[XDI_CUDA_FOURS];
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) fours[q].ask(a, moves, at[q]);
                XD_UNROLL
                for (int q = 0; q < XDI_CUDA_FOURS; q++) {
                    fours[q].move(a, step);
                    fours[q].put(a, average[0], moves, at[q]);
                }
            },
            [&](int64_t i) {
                float p = rounded ? xdi_cuda_read_float(a.value, XD_DTYPE_BF16, i) : a.master[i];
                float m = a.first[i], v = HAS_SECOND ? a.second[i] : 0.0f;
                step(xdi_cuda_read_float(a.gradient, a.gradient_dtype, i), p, m, v);
                if (rounded)
                    p = xdi_cuda_round(random, a.origin + i, p);
                else
                    a.master[i] = p;
                a.first[i] = m;
                if (HAS_SECOND) a.second[i] = v;
                if (a.value) xdi_cuda_write_float(a.value, a.value_dtype, i, p);
                if (!moves) return;
                if (a.value) p = xdi_cuda_as_stored(p, a.value_dtype);
                xdi_cuda_lerp_element(average[0], a.average, a.average_dtype, i, (double)p);
            });
    });
}

static xd_result xdi_cuda_update_check(const xd_launch *launch, const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        XD_REQUIRE(launch->ctx, xdi_cuda_is_narrow_float(a->gradient_dtype), XD_ERROR_DTYPE,
                    "array %lld: gradients are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->gradient_dtype));
        XD_REQUIRE(launch->ctx, !a->value || xdi_cuda_is_narrow_float(a->value_dtype), XD_ERROR_DTYPE,
                    "array %lld: parameters are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->value_dtype));
        XD_REQUIRE(launch->ctx, a->master || a->count == 0 || (a->value_dtype == XD_DTYPE_BF16 && a->steps),
                    XD_ERROR_DTYPE, "array %lld: %s values have a master copy, BF16 ones a step count",
                    (long long)k, xd_dtype_name(a->value_dtype));
        XD_REQUIRE(launch->ctx, !a->average || xdi_cuda_is_float(a->average_dtype), XD_ERROR_DTYPE,
                    "array %lld: cannot average F32 into %s", (long long)k, xd_dtype_name(a->average_dtype));
    }
    return XD_OK;
}

static xdi_cuda_rate xdi_cuda_rate_of(const xd_update_array *a) {
    xdi_cuda_rate rate;
    rate.learning_rate = a->learning_rate;
    rate.decay = a->decay;
    rate.weight_decay = a->weight_decay;
    rate.step_size = a->step_size;
    rate.root_correction = a->root_correction;
    rate.fresh = a->fresh;
    return rate;
}

static bool xdi_cuda_same_rate(const xdi_cuda_rate *a, const xdi_cuda_rate *b) {
    uint64_t x[4], y[4];
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

/* The index of an array's rate among the options; rate_count when it is not there. */
static int xdi_cuda_find_rate(const xdi_cuda_step_options *options, const xd_update_array *a) {
    const xdi_cuda_rate rate = xdi_cuda_rate_of(a);
    int i = 0;
    while (i < options->rate_count && !xdi_cuda_same_rate(&options->rates[i], &rate)) i++;
    return i;
}

/* The rate of an array in a list of updates. */
static int xdi_cuda_kept_rate(const xd_array_list *list, int64_t k) {
    enum { WORD = offsetof(xdi_cuda_update, rate) / sizeof(uint64_t), BYTE = offsetof(xdi_cuda_update, rate) % sizeof(uint64_t) };
    uint8_t bytes[sizeof(uint64_t)];
    memcpy(bytes, &list->there[WORD * list->count + k], sizeof bytes);
    return bytes[BYTE];
}

/* Puts the rates of arrays from `begin` on into the options; returns the first array whose rate does not fit. *same becomes false
 * where the list, if it is given, has another rate for an array. */
static int64_t xdi_cuda_take_rates(const xd_update_args *args, int64_t begin, const xd_array_list *list,
                                   xdi_cuda_step_options *options, bool *same) {
    options->rate_count = 0;
    for (int64_t k = begin; k < args->array_count; k++) {
        const int at = xdi_cuda_find_rate(options, &args->arrays[k]);
        if (list && xdi_cuda_kept_rate(list, k) != at) *same = false;
        if (at < options->rate_count) continue;
        if (at == XDI_CUDA_RATES) return k;
        options->rates[options->rate_count++] = xdi_cuda_rate_of(&args->arrays[k]);
    }
    return args->array_count;
}

/* Fills every byte, so that equal lists are equal bytes. */
static void xdi_cuda_update_of(const xd_update_array *a, const xdi_cuda_step_options *options,
                               bool has_second, xdi_cuda_update *u) {
    u->master = a->master;
    u->first = a->first;
    u->second = has_second ? a->second : nullptr;
    u->value = a->value;
    u->gradient = a->gradient;
    u->steps = a->steps;
    u->average = a->average;
    u->count = a->count;
    u->key = a->key;
    u->origin = a->origin;
    u->value_dtype = (uint8_t)a->value_dtype;
    u->gradient_dtype = (uint8_t)a->gradient_dtype;
    u->average_dtype = (uint8_t)a->average_dtype;
    u->rate = (uint8_t)xdi_cuda_find_rate(options, a);
    memset(u->unused, 0, sizeof u->unused);
    const uintptr_t addresses = (uintptr_t)u->master | (uintptr_t)u->first | (uintptr_t)u->second | (uintptr_t)u->value |
                                (uintptr_t)u->gradient | (uintptr_t)u->average;
    u->wide = addresses % 16 == 0 && !(u->average && a->average_dtype == XD_DTYPE_F64);
}

/* The step of `count` arrays whose rates are in the options: two launches when the list is kept. */
template <typename Step, bool HAS_SECOND, bool ROUNDED>
static xd_result xdi_cuda_update_arrays(const xd_launch *launch, const xd_update_array *arrays, int64_t count,
                                        const xdi_cuda_step_options &rates, const xdi_cuda_update_options &options,
                                        xd_array_list *keep, bool same) {
    const auto make_item = [&](int64_t k, xdi_cuda_update *item) {
        xdi_cuda_update_of(&arrays[k], &rates, HAS_SECOND, item);
        return item->count;
    };
    return xdi_cuda_listed<xdi_cuda_update>(
        launch, keep, same, count, make_item, [&](const xdi_cuda_kept<xdi_cuda_update> &list) {
            const int64_t blocks = (list.count + XDI_CUDA_THREADS - 1) / XDI_CUDA_THREADS;
            xdi_cuda_grid grid;
            XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_THREADS), xdi_cuda_step_kernel, list, rates));
            if (list.chunks == 0) return (xd_result)XD_OK;
            XD_TRY((xdi_cuda_chunk_grid(launch, list.chunks, xdi_cuda_update_kernel<Step, HAS_SECOND, ROUNDED>, &grid)));
            return XDI_CUDA_LAUNCH(launch, grid, (xdi_cuda_update_kernel<Step, HAS_SECOND, ROUNDED>), list, options);
        });
}

static bool xdi_cuda_any_rounded(const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++)
        if (!args->arrays[k].master && args->arrays[k].count > 0) return true;
    return false;
}

template <typename Step, bool HAS_SECOND>
static xd_result xdi_cuda_update_run(const xd_launch *launch, const xd_update_args *args) {
    const bool current = xdi_cuda_list_is_current(args->list, args->same, args->array_count);
    if (!current) XD_TRY(xdi_cuda_update_check(launch, args));
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    xdi_cuda_step_options rates = {};
    rates.gradient_scale = args->gradient_scale;
    rates.status = launch->status;
    rates.beta1 = args->beta1_exact;
    rates.beta2 = args->beta2_exact;
    rates.adam = HAS_SECOND;
    xdi_cuda_update_options options = {};
    options.status = launch->status;
    options.average = xdi_cuda_lerp_options_of(args->keep, args->weighted_sum, args->turn);
    options.rules.one_minus_beta1 = args->one_minus_beta1;
    options.rules.one_minus_beta2 = args->one_minus_beta2;
    options.rules.beta2 = args->beta2;
    options.rules.eps = args->eps;
    options.rules.momentum = args->momentum;
    options.rules.couple_decay = args->couple_decay;
    options.rules.maximize = args->maximize;
    options.rounding_seed = args->rounding_seed;
    const bool rounded = current ? args->list->rounded : xdi_cuda_any_rounded(args);
    for (int64_t begin = 0, end; begin < args->array_count; begin = end) {
        bool same = current;
        end = xdi_cuda_take_rates(args, begin, current ? args->list : nullptr, &rates, &same);
        xd_array_list *list = end - begin == args->array_count ? args->list : nullptr;
        if (list) list->rounded = rounded;
        if (!list && args->list) args->list->current = false;
        const auto run = rounded ? xdi_cuda_update_arrays<Step, HAS_SECOND, true>
                                 : xdi_cuda_update_arrays<Step, HAS_SECOND, false>;
        XD_TRY(run(launch, args->arrays + begin, end - begin, rates, options, list, same));
    }
    return XD_OK;
}

/* ---- scale ---- */

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_scale_kernel(void *data, int dtype, int64_t count, bool wide, float factor) {
    xdi_cuda_walk(
        xdi_cuda_span_of(blockIdx.x, count), wide,
        [&](int64_t i) {
            float values[8];
            xdi_cuda_read8(data, dtype, i, values);
            XD_UNROLL
            for (int j = 0; j < 8; j++) values[j] = xd_mulf(values[j], factor);
            xdi_cuda_write8(data, dtype, i, values);
        },
        [&](int64_t i) {
            xdi_cuda_write_float(data, dtype, i, xd_mulf(xdi_cuda_read_float(data, dtype, i), factor));
        });
}

static xd_result xdi_cuda_scale(const xd_launch *launch, const xd_scale_args *args) {
    XD_REQUIRE(launch->ctx, xdi_cuda_is_narrow_float(args->dtype), XD_ERROR_DTYPE,
                "scaling takes F32, BF16 or F16, not %s", xd_dtype_name(args->dtype));
    if (args->count <= 0) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    return XDI_CUDA_LAUNCH(
        launch, xdi_cuda_grid_of((args->count + XDI_CUDA_CHUNK - 1) / XDI_CUDA_CHUNK, XDI_CUDA_THREADS),
        xdi_cuda_scale_kernel, args->data, (int)args->dtype, args->count, xdi_cuda_is_aligned16(args->data),
        args->factor);
}

static xd_result xdi_cuda_adam_run(const xd_launch *launch, const xd_update_args *args) {
    XD_TRY(xdi_cuda_beside_check(launch, args));
    XD_TRY((xdi_cuda_update_run<xdi_cuda_adam, true>(launch, args)));
    return xdi_cuda_beside_run(launch, args);
}

static xd_result xdi_cuda_sgd_run(const xd_launch *launch, const xd_update_args *args) {
    XD_TRY(xdi_cuda_beside_check(launch, args));
    XD_TRY((xdi_cuda_update_run<xdi_cuda_sgd, false>(launch, args)));
    return xdi_cuda_beside_run(launch, args);
}

static xd_result xdi_cuda_optimizer_load(xd_ctx *ctx) {
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_adam, true, false>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_adam, true, true>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_sgd, false, false>)));
    XD_TRY((xdi_cuda_load(ctx, xdi_cuda_update_kernel<xdi_cuda_sgd, false, true>)));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_step_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_patch_kernel));
    return xdi_cuda_load(ctx, xdi_cuda_scale_kernel);
}
