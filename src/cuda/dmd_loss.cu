/* Losses over samples, but for the way from samples to one value, which is in dmd_total.cu: kernel/cpu/dmd_loss.c is the
 * reference, kernel/dmd_loss.h has the formulas. Sums have the CPU's bits; so
 * have gradients, but for the terms on logits, whose exponentials are the GPU's. */

/* ---- measure: grid (rows x chunks), block XD_SAMPLE_LANES; reads every element once. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_measure_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const uint32_t b = blockIdx.x / chunks;
    const int64_t words = xd_sample_words(FIXED);
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), blockIdx.x - b * chunks);
    xdi_cuda_sample_sums<FIXED>(terms, b, range, terms.base().parts + (int64_t)blockIdx.x * words, xdi_cuda_sample_nowhere());
}

/* ---- slope: the same grid; one read of what the term needs, one write. ---- */

template <typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_slope_kernel(const __grid_constant__ Terms terms, uint32_t chunks, bool alone) {
    const xd_sample_args &a = terms.base();
    const uint32_t b = blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(a, blockIdx.x - b * chunks);
    const xdi_cuda_sample_by by = xdi_cuda_sample_by_of(a.sample[b].factor, alone ? xdi_cuda_sample_whole(a) : *a.factor);
    xdi_cuda_sample_write<false>(terms, b, range, by, nullptr);
}

/* ---- by sample, the student's term: a block a chunk, which it keeps in shared memory, 64 KiB at most, and a cluster of blocks a
 * sample. So nothing is read twice: three reads and one write of an element in place of the six that measure and slope make, and one
 * launch for three. ---- */

enum { XDI_CUDA_BY_SAMPLE_CHUNKS = 16 }; /* at most: the blocks of a cluster of 9.0 */

template <bool FIXED> struct xdi_cuda_by_sample_sums {
    int64_t words[(int)XD_SAMPLE_SUMS + 2 * (FIXED ? (int)XD_NORM_LIMBS : 1)];
};

/* Sums of several blocks, or of one, added up in their order. */
template <bool FIXED>
static __device__ inline xdi_cuda_by_sample_sums<FIXED> xdi_cuda_by_sample_join(const xdi_cuda_by_sample_sums<FIXED> *of, uint32_t count) {
    xdi_cuda_by_sample_sums<FIXED> sums;
    xd_sample_clear(sums.words, FIXED);
    XD_UNROLL_N(1)
    for (uint32_t k = 0; k < count; k++) xd_sample_join(sums.words, FIXED, of[k].words);
    return sums;
}

/* Tells every block of the cluster this one's sums, at its place in `table`. */
template <bool FIXED>
static __device__ inline void xdi_cuda_by_sample_tell(const xdi_cuda_by_sample_sums<FIXED> *mine, xdi_cuda_by_sample_sums<FIXED> *table,
                                                      uint32_t chunk, uint32_t chunks) {
    if (threadIdx.x < chunks) *xdi_cuda_cluster_map(table + chunk, threadIdx.x) = *mine;
}

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : XDI_CUDA_BLOCKS(Terms::RESIDENT))
    xdi_cuda_by_sample_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    XD_DYN_SHARED(float, kept);
    XD_SHARED(xdi_cuda_by_sample_sums<FIXED>, mine, [1]);
    XD_SHARED(xdi_cuda_by_sample_sums<FIXED>, table, [XDI_CUDA_BY_SAMPLE_CHUNKS]);
    XD_SHARED(xdi_cuda_sample_by, by, [1]);
    const xd_sample_args &a = terms.base();
    const uint32_t b = blockIdx.x / chunks, chunk = blockIdx.x - b * chunks;
    if (chunks > 1) xdi_cuda_cluster_arrive(); /* this block runs */
    xdi_cuda_sample_sums<FIXED>(terms, b, xdi_cuda_sample_chunk(a, chunk), mine->words, xdi_cuda_sample_keeper{ kept });
    __syncthreads();
    if (chunks > 1) {
        xdi_cuda_cluster_wait();
        xdi_cuda_by_sample_tell<FIXED>(mine, table, chunk, chunks);
        xdi_cuda_cluster_arrive();
        xdi_cuda_cluster_wait(); /* from here on nobody writes into another block */
    }
    if (threadIdx.x == 0) {
        const typename Terms::given_type given = terms.given(b);
        const double whole = xdi_cuda_sample_whole(a);
        const xdi_cuda_by_sample_sums<FIXED> sums = xdi_cuda_by_sample_join<FIXED>(chunks > 1 ? table : mine, chunks);
        *by = xdi_cuda_sample_by_of(terms.template weigh<FIXED>(b, sums.words, given, chunk == 0).factor, whole);
    }
    __syncthreads();
    if (terms.out().data) xdi_cuda_sample_write<true>(terms, b, xdi_cuda_sample_chunk(a, xdi_cuda_held((int)chunk)), *by, kept);
}

/* ---- at once, the denoising term: its factor does not depend on the sums. A second kernel, with a thread a sample, joins them and
 * writes zeros over the gradient of a sample that has a finding, or no weight. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : XDI_CUDA_BLOCKS(Terms::RESIDENT))
    xdi_cuda_at_once_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const xd_sample_args &a = terms.base();
    const uint32_t b = blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(a, blockIdx.x - b * chunks);
    const xdi_cuda_sample_writing<Terms> writing = { terms, b, xdi_cuda_sample_tile(range) };
    xdi_cuda_sample_sums<FIXED>(terms, b, range, a.parts + (int64_t)blockIdx.x * xd_sample_words(FIXED), writing);
}

/* The sums of a sample's chunks, four of which are asked for at a time. */
template <bool FIXED>
static __device__ inline xdi_cuda_by_sample_sums<FIXED> xdi_cuda_denoise_sums(const xd_sample_args &a, int64_t b) {
    enum { AHEAD = FIXED ? 1 : 4 };
    const uint32_t chunks = (uint32_t)xd_sample_chunks(a.elements);
    const xdi_cuda_by_sample_sums<FIXED> *from = reinterpret_cast<const xdi_cuda_by_sample_sums<FIXED> *>(a.parts) + b * chunks;
    xdi_cuda_by_sample_sums<FIXED> sums = xdi_cuda_by_sample_join<FIXED>(from, 0), part[AHEAD];
    for (uint32_t k = 0; k < chunks; k += (uint32_t)AHEAD) {
        XD_UNROLL
        for (uint32_t i = 0; i < (uint32_t)AHEAD; i++) part[i] = from[k + i < chunks ? k + i : k];
        XD_UNROLL
        for (uint32_t i = 0; i < (uint32_t)AHEAD; i++)
            if (k + i < chunks) xd_sample_join(sums.words, FIXED, part[i].words);
    }
    return sums;
}

template <bool FIXED>
static __global__ void __launch_bounds__(XDI_CUDA_WARP)
    xdi_cuda_denoise_settle_kernel(const __grid_constant__ xd_denoise_args a) {
    const int64_t first = (int64_t)blockIdx.x * XDI_CUDA_WARP, b = first + threadIdx.x;
    bool none = false;
    if (b < a.base.samples) {
        const xd_denoise_term term = a.terms[b];
        const xdi_cuda_by_sample_sums<FIXED> sums = xdi_cuda_denoise_sums<FIXED>(a.base, b);
        xd_sample sample;
        xd_denoise_weigh_sums(sums.words, FIXED, &term, &sample);
        a.base.sample[b] = sample;
        none = sample.factor == 0.0 && a.gradient.data;
    }
    for (unsigned left = __ballot_sync(0xffffffffu, none); left; left &= left - 1)
        for (int64_t i = threadIdx.x; i < a.base.elements; i += XDI_CUDA_WARP)
            xd_sample_store(&a.gradient, first + __ffs((int)left) - 1, i, 0.0);
}

/* ---- the type that all tensors have ---- */

typedef xdi_cuda_vsd_terms<xdi_cuda_none> xdi_cuda_vsd_any;
typedef xdi_cuda_denoise_terms<xdi_cuda_none> xdi_cuda_denoise_any;

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
    const int64_t chunks = a.elements > 0 ? xd_sample_chunks(a.elements) : 1;
    const int64_t most = chunks > 1 ? (int64_t)XD_SAMPLE_CHUNK : a.elements;
    const int64_t room = (most + XD_SAMPLE_LANES - 1) / XD_SAMPLE_LANES * XD_SAMPLE_LANES;
    xdi_cuda_grid grid = xdi_cuda_grid_of(a.samples * chunks, XDI_CUDA_SAMPLE_THREADS, (size_t)room * sizeof(float));
    grid.cluster = chunks > 1 ? (int)chunks : 0;
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_by_sample_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

static xd_result xdi_cuda_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    const xd_sample_args &a = args->base;
    const int64_t most = xdi_cuda_of(launch->ctx)->kernels.dmd_loss.by_sample_elements;
    const xdi_cuda_vsd_any terms = { *args, false };
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_REQUIRE(launch->ctx, a.elements <= most, XD_ERROR_ARGUMENT,
               "a sample of %lld elements; %lld are finished at once", (long long)a.elements, (long long)most);
    if (a.samples == 0) return XD_OK;
    if (a.fixed) return xdi_cuda_by_sample_launch<true>(launch, terms);
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
static xd_result xdi_cuda_sample_slope_launch(const xd_launch *launch, const Terms &terms, int64_t chunks, bool alone) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_slope_kernel<Terms>, terms, (uint32_t)chunks, alone);
}

template <typename Terms> static xd_result xdi_cuda_sample_slope(const xd_launch *launch, const Terms &terms,
                                                                 const xd_sample_args *a, bool alone = false) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_slope_launch(launch, typed, chunks, alone); });
}

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

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_at_once_launch(const xd_launch *launch, const Terms &terms) {
    const int64_t chunks = xd_sample_chunks(terms.base().elements);
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_at_once_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

/* Sums and gradient in one read, of a gradient that lies over no input: a tile with a number out of range is read again. */
static xd_result xdi_cuda_denoise_at_once(const xd_launch *launch, const xdi_cuda_denoise_any &terms) {
    if (terms.base().samples * terms.base().elements == 0) return XD_OK;
    if (terms.base().fixed) return xdi_cuda_at_once_launch<true>(launch, terms);
    return xdi_cuda_sample_typed(terms, [&](const auto &typed) { return xdi_cuda_at_once_launch<false>(launch, typed); });
}

static xd_result xdi_cuda_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    const xdi_cuda_denoise_any terms = { *args };
    const void *out = args->gradient.data;
    const bool over = out && (out == args->prediction.data || out == args->clean.data || out == args->noise.data);
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    if (args->base.samples == 0) return XD_OK;
    XD_TRY(out && !over ? xdi_cuda_denoise_at_once(launch, terms) : xdi_cuda_denoise_measure(launch, args));
    const int64_t blocks = (args->base.samples + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(blocks, XDI_CUDA_WARP);
    XD_TRY(args->base.fixed ? XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_denoise_settle_kernel<true>, *args)
                            : XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_denoise_settle_kernel<false>, *args));
    return over ? xdi_cuda_sample_slope(launch, terms, &args->base, true) : XD_OK;
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
                                                    (int)(XD_SAMPLE_CHUNK * sizeof(float))));
}

template <typename Storage> static xd_result xdi_cuda_sample_load_type(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_at_once_kernel<false, xdi_cuda_denoise_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, xdi_cuda_vsd_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, xdi_cuda_denoise_terms<Storage> >));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<xdi_cuda_vsd_terms<Storage> >));
    return xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<xdi_cuda_denoise_terms<Storage> >);
}

static xd_result xdi_cuda_dmd_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<true, xdi_cuda_vsd_any>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_at_once_kernel<true, xdi_cuda_denoise_any>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, xdi_cuda_vsd_any>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, xdi_cuda_denoise_any>));
    XD_TRY(xdi_cuda_sample_load_type<xdi_cuda_none>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<float>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<xdi_cuda_bf16>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<xdi_cuda_f16>(ctx));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_settle_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_settle_kernel<false>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_settle_kernel<true>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_terms_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_slope_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_join_kernel));
    return xdi_cuda_dmd_total_load(ctx);
}

/* Whether the device runs clusters of so many blocks of every instance. */
template <typename... Parameters>
static bool xdi_cuda_by_sample_allows(void (*kernel)(Parameters...), unsigned chunks) {
    int clusters = 0;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = chunks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(chunks, 1, 1);
    config.blockDim = dim3(XDI_CUDA_SAMPLE_THREADS, 1, 1);
    config.dynamicSmemBytes = XD_SAMPLE_CHUNK * sizeof(float);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess)
        return clusters > 0;
    cudaGetLastError(); /* "too large" is no failure */
    return false;
}

/* Samples of several chunks, where blocks have clusters: 9.0 and above. */
static void xdi_cuda_by_sample_set_up(xd_cuda *cuda, int architecture) {
#if defined(XD_EMU)
    architecture = 900;
#endif
    if (cuda->capability < 90 || architecture < 900) return;
    for (unsigned chunks = XDI_CUDA_BY_SAMPLE_CHUNKS; chunks > 1; chunks /= 2) {
        if (!xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<true, xdi_cuda_vsd_any>, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_any>, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<float> >, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<xdi_cuda_bf16> >, chunks) ||
            !xdi_cuda_by_sample_allows(xdi_cuda_by_sample_kernel<false, xdi_cuda_vsd_terms<xdi_cuda_f16> >, chunks))
            continue;
        cuda->kernels.dmd_loss.by_sample_elements = (int64_t)chunks * XD_SAMPLE_CHUNK;
        return;
    }
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
    kernels.by_sample_elements = XD_SAMPLE_CHUNK;
    kernels.denoise_at_once = true;
    kernels.finish_alone = xdi_cuda_sample_finish_alone;
    return kernels;
}
