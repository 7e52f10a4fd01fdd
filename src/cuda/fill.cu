/* First values of boxes of tensors, with the CPU's bits: the formulas are in base/philox_scalar.h and kernel/fill.h. A thread forms
 * four elements, which share a block of random numbers where their indices do. Writes each element once; ten rounds of two
 * products for four elements. Runs when a model is made, so the places are computed from the index by divisions. */

enum { XDI_CUDA_FILL_EACH = 4 };

struct xdi_cuda_init_box {
    xd_copy box;
    xd_init init;
    xd_philox random;
    int64_t count, limit;
    void *out;
    xd_dtype dtype;
};

static __global__ void __launch_bounds__(XDI_CUDA_THREADS)
    xdi_cuda_init_kernel(const __grid_constant__ xdi_cuda_init_box f) {
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * XDI_CUDA_FILL_EACH;
    const bool random = xd_init_is_random(&f.init);
    int64_t block = -1;
    float lanes[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    for (int64_t i = first; i < first + XDI_CUDA_FILL_EACH && i < f.count; i++) {
        int64_t index, place;
        xd_fill_places(&f.box, i, &index, &place);
        if (random && index / 4 != block) {
            block = index / 4;
            xd_philox_lanes(&f.random, block, f.init.kind == XD_INIT_NORMAL, lanes);
        }
        const float value = index < f.limit ? xd_init_value(&f.init, lanes[index % 4]) : 0.0f;
        xd_element_store(f.out, f.dtype, place, (double)value);
    }
}

static xd_result xdi_cuda_init_run(const xd_launch *launch, const xd_fill_args *args) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    for (int64_t k = 0; k < args->box_count; k++) {
        xdi_cuda_init_box f = {};
        f.box = args->boxes[k];
        f.init = args->init;
        f.random = args->random;
        f.limit = args->limit;
        f.out = args->out;
        f.dtype = args->dtype;
        f.count = 1;
        for (int d = 0; d < f.box.ndim; d++) f.count *= f.box.extent[d];
        const int64_t each = (int64_t)XDI_CUDA_THREADS * XDI_CUDA_FILL_EACH, blocks = (f.count + each - 1) / each;
        XD_TRY(XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_THREADS), xdi_cuda_init_kernel, f));
    }
    return XD_OK;
}

static xd_result xdi_cuda_init_load(xd_ctx *ctx) {
    return xdi_cuda_load(ctx, xdi_cuda_init_kernel);
}
