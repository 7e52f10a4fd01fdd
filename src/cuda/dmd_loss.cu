/* Losses over samples, but for the way from samples to one value, which is in dmd_total.cu: kernel/cpu/dmd_loss.c is the
 * reference, kernel/dmd_loss.h has the formulas. Sums have the CPU's bits; so
 * have gradients, but for the terms on logits, whose exponentials are the GPU's. */

enum { XDI_CUDA_SAMPLE_THREADS = XD_SAMPLE_LANES };

/* ---- terms: what is added for an element, and what a gradient is a multiple of ---- */

struct xdi_cuda_sample_pair {
    float first, second; /* a magnitude and a square */
};

static __device__ inline float xdi_cuda_sample_load(const xd_rows &x, int64_t b, int64_t i) {
    return xdi_cuda_read_float(x.data, (uint8_t)x.dtype, b * (x.stride ? x.stride : x.cols) + i);
}

struct xdi_cuda_vsd_terms {
    xd_vsd_args a;
    bool rounded;

    __device__ const xd_sample_args &base() const {
        return a.base;
    }
    __device__ const xd_rows &out() const {
        return a.gradient;
    }
    __device__ void weigh(int64_t b) const {
        xd_vsd_weigh_sample(&a, b);
    }
    __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
        const float x = xdi_cuda_sample_load(a.generated, b, i), t = xdi_cuda_sample_load(a.teacher, b, i),
                    f = xdi_cuda_sample_load(a.fake, b, i);
        if (rounded)
            return { 0.0f, xd_vsd_step(a.generated.dtype, (float)a.base.sample[b].weight, x, t, f) };
        return { xd_subf(x, t), xd_subf(f, t) };
    }
    /* x may be under the gradient already, and only COMPAT needs it. */
    __device__ float slope(int64_t b, int64_t i) const {
        if (rounded) return at(b, i).second;
        return xd_subf(xdi_cuda_sample_load(a.fake, b, i), xdi_cuda_sample_load(a.teacher, b, i));
    }
};

struct xdi_cuda_denoise_terms {
    xd_denoise_args a;

    __device__ const xd_sample_args &base() const {
        return a.base;
    }
    __device__ const xd_rows &out() const {
        return a.gradient;
    }
    __device__ void weigh(int64_t b) const {
        xd_denoise_weigh_sample(&a, b);
    }
    __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
        return { 0.0f, xd_denoise_residual(a.terms + b, xdi_cuda_sample_load(a.prediction, b, i),
                                           xdi_cuda_sample_load(a.clean, b, i), xdi_cuda_sample_load(a.noise, b, i)) };
    }
    __device__ float slope(int64_t b, int64_t i) const {
        return at(b, i).second;
    }
};

/* ---- what a block does with a chunk ---- */

struct xdi_cuda_sample_range {
    int64_t begin, end; /* elements of a sample, XD_SAMPLE_CHUNK at most */
};

static __device__ inline xdi_cuda_sample_range xdi_cuda_sample_chunk(const xd_sample_args &a, int64_t chunk) {
    const int64_t begin = chunk * XD_SAMPLE_CHUNK, end = begin + XD_SAMPLE_CHUNK;
    return { begin, end < a.elements ? end : a.elements };
}

/* The sums of a range to out[xd_sample_words]; all threads of a block of XD_SAMPLE_LANES, one lane a thread. The tree over them
 * is that of kernel/dmd_loss.h: neighbours first. When fixed, integers are added in shared memory. `kept`: gets what the
 * gradient is a multiple of, or NULL; a thread reads only what it has written there itself. */
template <bool FIXED, typename Terms>
static __device__ void xdi_cuda_sample_sums(const Terms &terms, int64_t b, xdi_cuda_sample_range range, int64_t *out,
                                            float *kept) {
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    const xd_sample_args &a = terms.base();
    const int t = (int)threadIdx.x;
    double sums[2] = { 0.0, 0.0 };
    int64_t counted = 0, finding = XD_SAMPLE_FINE;
    if (FIXED && t < 2 * XD_NORM_LIMBS) limbs[t] = 0;
    if (FIXED) __syncthreads();
    for (int64_t tile = range.begin; tile < range.end; tile += XD_SAMPLE_TILE) {
        double lane[2] = { 0.0, 0.0 };
        for (int64_t i = tile + t; i < range.end && i < tile + XD_SAMPLE_TILE; i += XD_SAMPLE_LANES) {
            if (a.mask && !a.mask[b * a.elements + i]) continue;
            const xdi_cuda_sample_pair pair = terms.at(b, i);
            counted++;
            if (kept) kept[i - range.begin] = pair.second;
            lane[0] = xd_add(lane[0], fabs((double)pair.first));
            lane[1] = xd_add(lane[1], xd_mul((double)pair.second, (double)pair.second));
            if (!FIXED || !isfinite(pair.first) || !isfinite(pair.second)) continue;
            int exponent;
            uint64_t mantissa = xd_norm_mantissa(pair.first, &exponent);
            xdi_cuda_limbs_add(limbs, mantissa, exponent + 320);
            mantissa = xd_norm_mantissa(pair.second, &exponent);
            xdi_cuda_limbs_add(limbs + XD_NORM_LIMBS, mantissa * mantissa, 2 * exponent + 320);
        }
        for (int k = 0; k < 2; k++) {
            const double sum = xdi_cuda_block_reduce(lane[k], 0.0, xdi_cuda_add());
            if (xd_sample_finding(sum) > finding) finding = xd_sample_finding(sum);
            sums[k] = xd_add(sums[k], sum);
        }
    }
    counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    if (t == 0) {
        out[XD_SAMPLE_COUNTED] = counted;
        out[XD_SAMPLE_FINDING] = finding;
        if (!FIXED) memcpy(out + XD_SAMPLE_SUMS, sums, sizeof sums);
    }
    if (FIXED && t < 2) xd_norm_carry((int64_t *)limbs + t * XD_NORM_LIMBS);
    if (FIXED) __syncthreads();
    if (FIXED && t < 2 * XD_NORM_LIMBS) out[XD_SAMPLE_SUMS + t] = (int64_t)limbs[t];
}

/* The gradient of a range, of what was kept of it or is read again. */
template <typename Terms>
static __device__ void xdi_cuda_sample_write(const Terms &terms, int64_t b, xdi_cuda_sample_range range, double whole,
                                             const float *kept) {
    const xd_sample_args &a = terms.base();
    const xd_rows &out = terms.out();
    const bool none = a.sample[b].factor == 0.0;
    const double factor = xd_mul(a.sample[b].factor, whole);
    for (int64_t i = range.begin + (int64_t)threadIdx.x; i < range.end; i += XD_SAMPLE_LANES) {
        const bool counts = !none && (!a.mask || a.mask[b * a.elements + i]);
        const float slope = !counts ? 0.0f : kept ? kept[i - range.begin] : terms.slope(b, i);
        xd_sample_store(&out, b, i, none ? 0.0 : xd_mul(factor, (double)slope));
    }
}

/* ---- measure: grid (rows x chunks), block XD_SAMPLE_LANES; reads every element once. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : 0)
    xdi_cuda_sample_measure_kernel(const __grid_constant__ Terms terms, int64_t chunks) {
    const int64_t b = (int64_t)blockIdx.x / chunks, words = xd_sample_words(FIXED);
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), (int64_t)blockIdx.x - b * chunks);
    xdi_cuda_sample_sums<FIXED>(terms, b, range, terms.base().parts + (int64_t)blockIdx.x * words, nullptr);
}

/* ---- slope: the same grid; one read of what the term needs, one write. ---- */

template <typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_slope_kernel(const __grid_constant__ Terms terms, int64_t chunks) {
    const int64_t b = (int64_t)blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), (int64_t)blockIdx.x - b * chunks);
    xdi_cuda_sample_write(terms, b, range, *terms.base().factor, nullptr);
}

/* ---- by sample: a block a sample, whose only chunk it keeps in shared memory, 64 KiB at most, so nothing is read twice: three
 * reads and one write of an element in place of the six or seven that measure and slope make, and one launch for three. That
 * predicts, in f32, 16 bytes an element for 24 of the student's term and 28 of denoising. A sample of more chunks stays with those:
 * they have a block for each chunk, and one block alone would get the bandwidth of one multiprocessor for all of it. ---- */

enum { XDI_CUDA_BY_SAMPLE = XD_SAMPLE_CHUNK };

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : 0)
    xdi_cuda_by_sample_kernel(const __grid_constant__ Terms terms) {
    XD_DYN_SHARED(float, kept);
    XD_SHARED(double, whole, [1]);
    const xd_sample_args &a = terms.base();
    const int64_t b = (int64_t)blockIdx.x;
    const xdi_cuda_sample_range range = { 0, a.elements };
    const bool slope = terms.out().data != nullptr;
    xdi_cuda_sample_sums<FIXED>(terms, b, range, a.sums + b * xd_sample_words(FIXED), slope ? kept : nullptr);
    __syncthreads(); /* the sums are there for the first thread */
    if (threadIdx.x == 0) {
        terms.weigh(b);
        *whole = xd_sample_factor(&a, xd_sample_denominator(&a, a.samples * a.elements));
    }
    __syncthreads();
    if (slope) xdi_cuda_sample_write(terms, b, range, *whole, kept);
}

template <typename Terms> static xd_result xdi_cuda_by_sample(const xd_launch *launch, const Terms &terms,
                                                              const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_REQUIRE(launch->ctx, a->elements <= XDI_CUDA_BY_SAMPLE, XD_ERROR_ARGUMENT,
               "a sample of %lld elements; %lld are finished at once", (long long)a->elements,
               (long long)XDI_CUDA_BY_SAMPLE);
    if (a->samples == 0) return XD_OK;
    const xdi_cuda_grid grid =
        xdi_cuda_grid_of(a->samples, XDI_CUDA_SAMPLE_THREADS, (size_t)a->elements * sizeof(float));
    if (a->fixed) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_by_sample_kernel<true, Terms>, terms);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_by_sample_kernel<false, Terms>, terms);
}

template <typename Terms> static xd_result xdi_cuda_sample_measure(const xd_launch *launch, const Terms &terms,
                                                                   const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(a->samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    if (a->fixed) return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_measure_kernel<true, Terms>, terms, chunks);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_measure_kernel<false, Terms>, terms, chunks);
}

template <typename Terms> static xd_result xdi_cuda_sample_slope(const xd_launch *launch, const Terms &terms,
                                                                 const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(a->samples * chunks, XDI_CUDA_SAMPLE_THREADS),
                           xdi_cuda_sample_slope_kernel<Terms>, terms, chunks);
}

static xd_result xdi_cuda_vsd_measure(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_terms{ *args, false }, &args->base);
}

static xd_result xdi_cuda_vsd_rounded(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_terms{ *args, true }, &args->base);
}

static xd_result xdi_cuda_vsd_slope(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_vsd_terms{ *args, args->form == XD_VSD_COMPAT }, &args->base);
}

static xd_result xdi_cuda_denoise_measure(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_denoise_terms{ *args }, &args->base);
}

static xd_result xdi_cuda_denoise_slope(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_denoise_terms{ *args }, &args->base);
}

static xd_result xdi_cuda_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_by_sample(launch, xdi_cuda_vsd_terms{ *args, false }, &args->base);
}

static xd_result xdi_cuda_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_by_sample(launch, xdi_cuda_denoise_terms{ *args }, &args->base);
}

/* ---- a thread for each sample ---- */

#define XDI_CUDA_EACH_SAMPLE(name, type, base, call)                                                               \
    static __global__ void XDI_CUDA_KERNEL xdi_cuda_##name##_kernel(const __grid_constant__ type args) {           \
        const int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;                                          \
        if (b < args.base samples) call(&args, b);                                                                 \
    }                                                                                                              \
    static xd_result xdi_cuda_##name(const xd_launch *launch, const type *args) {                                  \
        xdi_cuda_scope scope(launch);                                                                              \
        XD_TRY(scope.result);                                                                                      \
        if (args->base samples == 0) return XD_OK;                                                                 \
        const int64_t blocks = (args->base samples + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP;                           \
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_WARP), xdi_cuda_##name##_kernel, *args);  \
    }

XDI_CUDA_EACH_SAMPLE(vsd_weigh, xd_vsd_args, base., xd_vsd_weigh_sample)
XDI_CUDA_EACH_SAMPLE(vsd_settle, xd_vsd_args, base., xd_vsd_settle_sample)
XDI_CUDA_EACH_SAMPLE(denoise_weigh, xd_denoise_args, base., xd_denoise_weigh_sample)
XDI_CUDA_EACH_SAMPLE(gan_terms, xd_gan_args, base., xd_gan_sample)
XDI_CUDA_EACH_SAMPLE(gan_slope, xd_gan_args, base., xd_gan_slope_sample)
XDI_CUDA_EACH_SAMPLE(sample_join, xd_sample_args, , xd_sample_join_chunks)

/* ---- the table ---- */

/* The dynamic shared memory is more than a block has unasked. */
template <typename... Parameters>
static xd_result xdi_cuda_by_sample_load(xd_ctx *ctx, void (*kernel)(Parameters...)) {
    XD_TRY(xdi_cuda_load(ctx, kernel));
    return XDI_CUDA_CHECK(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)(XDI_CUDA_BY_SAMPLE * sizeof(float))));
}

static xd_result xdi_cuda_dmd_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms>));
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<true, xdi_cuda_vsd_terms>));
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<false, xdi_cuda_denoise_terms>));
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<true, xdi_cuda_denoise_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, xdi_cuda_vsd_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, xdi_cuda_vsd_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, xdi_cuda_denoise_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, xdi_cuda_denoise_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<xdi_cuda_vsd_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<xdi_cuda_denoise_terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_settle_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_terms_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_slope_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_join_kernel));
    return xdi_cuda_dmd_total_load(ctx);
}

static xd_dmd_loss_kernels xdi_cuda_dmd_loss_table() {
    xd_dmd_loss_kernels kernels = {};
    kernels.vsd_measure = xdi_cuda_vsd_measure;
    kernels.vsd_weigh = xdi_cuda_vsd_weigh;
    kernels.vsd_rounded = xdi_cuda_vsd_rounded;
    kernels.vsd_settle = xdi_cuda_vsd_settle;
    kernels.vsd_slope = xdi_cuda_vsd_slope;
    kernels.denoise_measure = xdi_cuda_denoise_measure;
    kernels.denoise_weigh = xdi_cuda_denoise_weigh;
    kernels.denoise_slope = xdi_cuda_denoise_slope;
    kernels.gan_terms = xdi_cuda_gan_terms;
    kernels.gan_slope = xdi_cuda_gan_slope;
    kernels.join = xdi_cuda_sample_join;
    kernels.total = xdi_cuda_sample_total;
    kernels.finish = xdi_cuda_sample_finish;
    kernels.fdistill_ratios = xdi_cuda_fdistill_ratios;
    kernels.fdistill_bins = xdi_cuda_fdistill_bins;
    kernels.fdistill_weights = xdi_cuda_fdistill_weights;
    kernels.vsd_by_sample = xdi_cuda_vsd_by_sample;
    kernels.denoise_by_sample = xdi_cuda_denoise_by_sample;
    kernels.by_sample_elements = XDI_CUDA_BY_SAMPLE;
    return kernels;
}
