/* The kernel table of the unit, and what runs once: the set-up of a context's GPU. */

/* What the compiler has made of this code. */
struct xdi_cuda_build {
    int architecture; /* 900 for sm_90 */
    float product;    /* of the factors */
    int quotients;    /* lanes whose quotient is not the nearest number */
};

static __global__ void xdi_cuda_probe_kernel(xdi_cuda_build *build, float one_factor, float other_factor) {
#if defined(__CUDA_ARCH__)
    const int compiled_for = __CUDA_ARCH__;
#else
    const int compiled_for = 0;
#endif
    const float x = (float)(8388609 + 9973 * (int)threadIdx.x), y = (float)(8388613 + 7919 * (int)threadIdx.x);
    const unsigned wrong = __ballot_sync(0xffffffffu, x / y != __fdiv_rn(x, y));
    if (threadIdx.x > 0) return;
    build->architecture = compiled_for;
    build->product = __fmul_rn(one_factor, other_factor);
    build->quotients = __popc(wrong);
}

#ifndef XDISTILL_NO_ACROSS
static xd_result xdi_cuda_across_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_xtoken_load(ctx));
    XD_TRY(xdi_cuda_project_load(ctx));
    XD_TRY(xdi_cuda_divergence_load(ctx));
    XD_TRY(xdi_cuda_gradient_load(ctx));
    XD_TRY(xdi_cuda_gold_load(ctx));
    XD_TRY(xdi_cuda_gold_tile_load(ctx));
    XD_TRY(xdi_cuda_xtoken_rows_load(ctx));
    XD_TRY(xdi_cuda_list_kernels_load(ctx));
    XD_TRY(xdi_cuda_chunks_load(ctx));
    return xdi_cuda_uld_load(ctx);
}

static void xdi_cuda_across_fill(xd_kernels *kernels) {
    kernels->xtoken = xdi_cuda_xtoken_table();
    xdi_cuda_project_fill(&kernels->xtoken);
    xdi_cuda_divergence_fill(&kernels->xtoken);
    xdi_cuda_gradient_fill(&kernels->xtoken);
    xdi_cuda_gold_fill(&kernels->xtoken);
    xdi_cuda_gold_tile_fill(&kernels->xtoken);
    xdi_cuda_xtoken_rows_fill(&kernels->xtoken);
    xdi_cuda_list_kernels_fill(&kernels->xtoken);
    xdi_cuda_chunks_fill(&kernels->xtoken);
    kernels->uld = xdi_cuda_uld_table();
}
#endif

static xd_result xdi_cuda_load_all(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_probe_kernel));
    XD_TRY(xdi_cuda_copy_load(ctx));
    XD_TRY(xdi_cuda_init_load(ctx));
    XD_TRY(xdi_cuda_reduce_load(ctx));
    XD_TRY(xdi_cuda_norm_load(ctx));
    XD_TRY(xdi_cuda_matmul_load(ctx));
    XD_TRY(xdi_cuda_matmul_cublas_load(ctx));
    XD_TRY(xdi_cuda_average_load(ctx));
    XD_TRY(xdi_cuda_optimizer_load(ctx));
    XD_TRY(xdi_cuda_loss_load(ctx));
    XD_TRY(xdi_cuda_mft_load(ctx));
    XD_TRY(xdi_cuda_estimate_load(ctx));
    XD_TRY(xdi_cuda_rows_load(ctx));
    XD_TRY(xdi_cuda_softmax_load(ctx));
#ifndef XDISTILL_NO_ACROSS
    XD_TRY(xdi_cuda_across_load(ctx));
#endif
#ifndef XDISTILL_NO_DIFFUSION
    XD_TRY(xdi_cuda_dmd_load(ctx));
    XD_TRY(xdi_cuda_dmd_loss_load(ctx));
#endif
    XD_TRY(xdi_cuda_topk_load(ctx));
    return xdi_cuda_select_load(ctx);
}

static xd_kernels xdi_cuda_table() {
    xd_kernels kernels = {}; /* here and in the tables below: what is not set is not offered */
    kernels.name = "cuda";
    kernels.device = XD_DEVICE_CUDA;
    kernels.memory = xdi_cuda_memory_table();
    kernels.loss = xdi_cuda_loss_table();
    kernels.topk = xdi_cuda_topk_table();
    kernels.mft = xdi_cuda_mft_table();
    kernels.rows = xdi_cuda_rows_table();
    kernels.softmax = xdi_cuda_softmax_table();
#ifndef XDISTILL_NO_ACROSS
    xdi_cuda_across_fill(&kernels);
#endif
    kernels.optimizer.adam = xdi_cuda_adam_run;
    kernels.optimizer.sgd = xdi_cuda_sgd_run;
    kernels.optimizer.lerp = xdi_cuda_lerp;
    kernels.optimizer.cast = xdi_cuda_cast;
    kernels.optimizer.scale = xdi_cuda_scale;
    kernels.optimizer.norm = xdi_cuda_norm;
    kernels.optimizer.list_create = xdi_cuda_list_create;
    kernels.optimizer.list_destroy = xdi_cuda_list_destroy;
    kernels.optimizer.list_bytes = xdi_cuda_kept_bytes;
    kernels.optimizer.average = xdi_cuda_average;
    kernels.optimizer.averages_in_steps = true;
    kernels.optimizer.swap = xdi_cuda_swap;
    kernels.optimizer.turn = xdi_cuda_turn;
    kernels.clip = xdi_cuda_clip;
    kernels.estimate = xdi_cuda_estimate;
    kernels.reduce.pieces = xdi_cuda_reduce_pieces;
    kernels.reduce.leaves = xdi_cuda_reduce_leaves;
    kernels.copies = xdi_cuda_copies;
    kernels.matmul = xdi_cuda_matmul;
    kernels.products = xdi_cuda_products_table();
    kernels.fill = xdi_cuda_init_run;
#ifndef XDISTILL_NO_DIFFUSION
    kernels.dmd = xdi_cuda_dmd_table();
    kernels.dmd_loss = xdi_cuda_dmd_loss_table();
#endif
    return kernels;
}

/* The GPU's properties. */
static xd_result xdi_cuda_inspect(xd_ctx *ctx, xd_cuda *cuda) {
    int major = 0, minor = 0;
    XDI_CUDA_TRY(ctx, cudaGetDevice(&cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device));
    XDI_CUDA_TRY(ctx, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, cuda->device));
    XDI_CUDA_TRY(ctx,
                 cudaDeviceGetAttribute(&cuda->processors, cudaDevAttrMultiProcessorCount, cuda->device));
    cuda->capability = 10 * major + minor;
    XD_REQUIRE(ctx, cuda->capability >= 80, XD_ERROR_UNSUPPORTED,
                "device %d has compute capability %d.%d; 8.0 is the least", cuda->device, major, minor);
    return XD_OK;
}

/* Options of the compiler that change bits which are promised. The product is 2^-130, a subnormal number. */
static xd_result xdi_cuda_check_build(xd_ctx *ctx, const xdi_cuda_build &build) {
    uint32_t product;
    memcpy(&product, &build.product, sizeof product);
    XD_REQUIRE(ctx, product == 0x00080000u, XD_ERROR_UNSUPPORTED,
                "xdistill_cuda.cu was compiled with -ftz=true or -use_fast_math, which makes subnormal numbers 0: "
                "compile it without");
    XD_REQUIRE(ctx, build.quotients == 0, XD_ERROR_UNSUPPORTED,
                "xdistill_cuda.cu was compiled with -prec-div=false or -use_fast_math: %d of %d quotients are not "
                "the nearest number; compile it without",
                build.quotients, (int)XDI_CUDA_WARP);
    return XD_OK;
}

/* Runs the probe and warns once when the build leaves something of the chip unused. */
static xd_result xdi_cuda_probe(xd_ctx *ctx, const xd_cuda *cuda, int *out) {
    const xd_launch launch = xd_ctx_launch(ctx);
    xdi_cuda_build build = {};
    xdi_cuda_build *result = (xdi_cuda_build *)cuda->workspace;
    XD_TRY(XDI_CUDA_LAUNCH(&launch, xdi_cuda_grid_of(1, XDI_CUDA_WARP), xdi_cuda_probe_kernel, result,
                           ldexpf(1.0f, -100), ldexpf(1.0f, -30)));
    XDI_CUDA_TRY(ctx, cudaMemcpyAsync(&build, result, sizeof build, cudaMemcpyDeviceToHost,
                                      (cudaStream_t)launch.stream));
    XDI_CUDA_TRY(ctx, cudaStreamSynchronize((cudaStream_t)launch.stream));
    XD_TRY(xdi_cuda_check_build(ctx, build));
    const int architecture = build.architecture;
    if (architecture > 0 && architecture < 900 && cuda->capability >= 90)
        xd_log(ctx, XD_LOG_WARN,
               "xdistill_cuda.cu was compiled for sm_%d; rebuild with -arch=sm_90 for this device",
               architecture / 10);
    *out = architecture;
    return XD_OK;
}

static xd_result xdi_cuda_set_up(xd_ctx *ctx, xd_cuda *cuda, const xd_cuda_desc *desc) {
    int architecture = 0;
    XD_TRY(xdi_cuda_inspect(ctx, cuda));
    cuda->workspace_bytes = XDI_CUDA_NORM_BLOCKS * sizeof(xd_norm_sum);
    cuda->workspace = cuda->allocator.allocate(cuda->allocator.user, cuda->workspace_bytes);
    XD_REQUIRE(ctx, cuda->workspace, XD_ERROR_MEMORY, "no room for %zu bytes of workspace on device %d",
                cuda->workspace_bytes, cuda->device);
    XD_TRY(xdi_cuda_list_make(cuda, XDI_CUDA_LIST_STAGED, &cuda->stage));
    for (xd_array_list *&list : cuda->norms) XD_TRY(xdi_cuda_list_make(cuda, XDI_CUDA_NORM_LIST, &list));
    XD_TRY(xdi_cuda_load_all(ctx));
    XD_TRY(xdi_cuda_probe(ctx, cuda, &architecture));
    if (!desc->cublas || strcmp(desc->cublas, "none") != 0)
        XD_TRY(xdi_cuda_cublas_open(ctx, cuda, desc->cublas));
    if (desc->two_sweeps) return XD_OK;
#ifndef XDISTILL_NO_DIFFUSION
    xdi_cuda_by_sample_set_up(cuda, architecture);
#endif
    return xdi_cuda_ring_set_up(ctx, cuda, architecture);
}

/* The device is the current one. */
static void xdi_cuda_free(xd_cuda *cuda) {
    xdi_cuda_cublas_close(cuda);
    for (xd_array_list *list : cuda->norms) xdi_cuda_list_free(list);
    xdi_cuda_list_free(cuda->stage);
    if (cuda->workspace) cuda->allocator.release(cuda->allocator.user, cuda->workspace);
    xd_release(cuda->ctx, cuda);
}

XD_API xd_result xd_cuda_create(xd_ctx *ctx, const xd_cuda_desc *desc, xd_cuda **out) {
    const xd_cuda_desc d = desc ? *desc : xd_cuda_desc();
    XD_REQUIRE(ctx, xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU, XD_ERROR_STATE,
                "the context has a device already");
    xd_cuda *cuda = (xd_cuda *)xd_allocate(ctx, sizeof *cuda);
    XD_REQUIRE(ctx, cuda, XD_ERROR_MEMORY, "no room for the handle of a device");
    cuda->ctx = ctx;
    cuda->kernels = xdi_cuda_table();
    cuda->allocator = d.allocator;
    if (!cuda->allocator.allocate || !cuda->allocator.release) {
        cuda->allocator.allocate = xdi_cuda_allocate_plain;
        cuda->allocator.release = xdi_cuda_release_plain;
        cuda->allocator.user = NULL;
    }
    const xd_result result = xdi_cuda_set_up(ctx, cuda, &d);
    if (result != XD_OK) {
        xdi_cuda_free(cuda);
        return result;
    }
    xd_ctx_set_kernels(ctx, &cuda->kernels);
    *out = cuda;
    return XD_OK;
}

XD_API void xd_cuda_destroy(xd_cuda *cuda) {
    if (!cuda) return;
    xd_ctx *ctx = cuda->ctx;
    const xd_launch launch = xd_ctx_launch(ctx);
    xdi_cuda_scope scope(ctx, cuda->device);
    xdi_cuda_synchronize(&launch);
    xd_ctx_set_kernels(ctx, NULL);
    xdi_cuda_free(cuda);
}

#if defined(__NVCC__)
#    pragma nv_diagnostic pop
#endif
