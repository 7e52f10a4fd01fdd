/* Losses over samples, but for the way from samples to one value, which is in dmd_total.cu: kernel/cpu/dmd_loss.c is the
 * reference, kernel/dmd_loss.h has the formulas. Sums have the CPU's bits; so
 * have gradients, but for the terms on logits, whose exponentials are the GPU's. */

/* ---- measure: grid (rows x chunks), block XD_SAMPLE_LANES; reads every element once. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : 0)
    xdi_cuda_sample_measure_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const uint32_t b = blockIdx.x / chunks;
    const int64_t words = xd_sample_words(FIXED);
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), blockIdx.x - b * chunks);
    xdi_cuda_sample_sums<FIXED, false>(terms, b, range, terms.base().parts + (int64_t)blockIdx.x * words, nullptr);
}

/* ---- slope: the same grid; one read of what the term needs, one write. ---- */

template <typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_slope_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const uint32_t b = blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), blockIdx.x - b * chunks);
    xdi_cuda_sample_write<false>(terms, b, range, *terms.base().factor, nullptr);
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
    xdi_cuda_sample_sums<FIXED, true>(terms, b, range, a.sums + b * xd_sample_words(FIXED), slope ? kept : nullptr);
    __syncthreads(); /* the sums are there for the first thread */
    if (threadIdx.x == 0) {
        terms.template weigh<FIXED>(b);
        *whole = xd_sample_factor(&a, xd_sample_denominator(&a, a.samples * a.elements));
    }
    __syncthreads();
    if (slope) xdi_cuda_sample_write<true>(terms, b, range, *whole, kept);
}

/* ---- the type that all tensors have ---- */

static bool xdi_cuda_sample_is_even(const xd_rows &x, xd_dtype dtype) {
    return x.dtype == dtype && xdi_cuda_is_aligned16(x.data) && xdi_cuda_stride(x) % XDI_CUDA_EIGHT == 0;
}

/* Calls launch(terms of that type), or of none: then elements are read one at a time. */
template <typename Terms, typename Launch> static xd_result xdi_cuda_sample_typed(const Terms &terms, Launch launch) {
    const xd_dtype dtype = terms.input(0).dtype;
    bool even = !terms.base().mask && !terms.one_at_a_time();
    for (int k = 0; k < 3; k++) even = even && xdi_cuda_sample_is_even(terms.input(k), dtype);
    if (terms.out().data) even = even && xdi_cuda_sample_is_even(terms.out(), dtype);
    if (!even) return launch(terms);
    XDI_CUDA_FLOATS(dtype, T, return launch(terms.template of<T>());)
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_by_sample_launch(const xd_launch *launch, const Terms &terms) {
    const xd_sample_args &a = terms.base();
    const int64_t room = (a.elements + XD_SAMPLE_LANES - 1) / XD_SAMPLE_LANES * XD_SAMPLE_LANES;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(a.samples, XDI_CUDA_SAMPLE_THREADS, (size_t)room * sizeof(float));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_by_sample_kernel<FIXED, Terms>, terms);
}

template <typename Terms> static xd_result xdi_cuda_by_sample(const xd_launch *launch, const Terms &terms,
                                                              const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_REQUIRE(launch->ctx, a->elements <= XDI_CUDA_BY_SAMPLE, XD_ERROR_ARGUMENT,
               "a sample of %lld elements; %lld are finished at once", (long long)a->elements,
               (long long)XDI_CUDA_BY_SAMPLE);
    if (a->samples == 0) return XD_OK;
    if (a->fixed) return xdi_cuda_by_sample_launch<true>(launch, terms);
    return xdi_cuda_sample_typed(terms, [&](const auto &typed) { return xdi_cuda_by_sample_launch<false>(launch, typed); });
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_sample_measure_launch(const xd_launch *launch, const Terms &terms, int64_t chunks) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_measure_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

template <typename Terms> static xd_result xdi_cuda_sample_measure(const xd_launch *launch, const Terms &terms,
                                                                   const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    if (a->fixed) return xdi_cuda_sample_measure_launch<true>(launch, terms, chunks);
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_measure_launch<false>(launch, typed, chunks); });
}

template <typename Terms>
static xd_result xdi_cuda_sample_slope_launch(const xd_launch *launch, const Terms &terms, int64_t chunks) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_slope_kernel<Terms>, terms, (uint32_t)chunks);
}

template <typename Terms> static xd_result xdi_cuda_sample_slope(const xd_launch *launch, const Terms &terms,
                                                                 const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_slope_launch(launch, typed, chunks); });
}

typedef xdi_cuda_vsd_terms<xdi_cuda_none> xdi_cuda_vsd_any;
typedef xdi_cuda_denoise_terms<xdi_cuda_none> xdi_cuda_denoise_any;

static xd_result xdi_cuda_vsd_measure(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_any{ *args, false }, &args->base);
}

static xd_result xdi_cuda_vsd_rounded(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_any{ *args, true }, &args->base);
}

static xd_result xdi_cuda_vsd_slope(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_vsd_any{ *args, args->form == XD_VSD_COMPAT }, &args->base);
}

static xd_result xdi_cuda_denoise_measure(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

static xd_result xdi_cuda_denoise_slope(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

static xd_result xdi_cuda_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_by_sample(launch, xdi_cuda_vsd_any{ *args, false }, &args->base);
}

static xd_result xdi_cuda_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_by_sample(launch, xdi_cuda_denoise_any{ *args }, &args->base);
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

template <typename Terms> static xd_result xdi_cuda_sample_load_type(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<false, Terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, Terms>));
    return xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<Terms>);
}

template <typename Terms> static xd_result xdi_cuda_sample_load_types(xd_ctx *ctx) {
    const Terms terms = {};
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<true, Terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, Terms>));
    XD_TRY(xdi_cuda_sample_load_type<Terms>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<decltype(terms.template of<float>())>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<decltype(terms.template of<xdi_cuda_bf16>())>(ctx));
    return xdi_cuda_sample_load_type<decltype(terms.template of<xdi_cuda_f16>())>(ctx);
}

static xd_result xdi_cuda_dmd_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_sample_load_types<xdi_cuda_vsd_any>(ctx));
    XD_TRY(xdi_cuda_sample_load_types<xdi_cuda_denoise_any>(ctx));
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
