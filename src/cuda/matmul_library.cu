/* NVIDIA's cuBLASLt for the table's matrix products (matmul_cublas.cu): found, loaded and left. It is loaded at run time, so the
 * unit is linked without it; its header gives the types. Ranks that have it at different versions, or not all of them, compute
 * their own products (xd_ctx_meet_products). */

#if defined(__has_include)
#    if __has_include(<cublasLt.h>)
#        include <cublasLt.h>
#        include <dlfcn.h>
#        define XDI_CUDA_CUBLAS_IS_KNOWN
#    endif
#endif

#if defined(XDI_CUDA_CUBLAS_IS_KNOWN)

/* X(function of cublasLt.h): all functions that are used. */
#    define XDI_CUDA_CUBLAS_FUNCTIONS(X)        \
        X(cublasLtCreate)                       \
        X(cublasLtDestroy)                      \
        X(cublasLtGetProperty)                  \
        X(cublasLtGetVersion)                   \
        X(cublasLtGetStatusString)              \
        X(cublasLtMatmulDescCreate)             \
        X(cublasLtMatmulDescDestroy)            \
        X(cublasLtMatmulDescSetAttribute)       \
        X(cublasLtMatrixLayoutCreate)           \
        X(cublasLtMatrixLayoutDestroy)          \
        X(cublasLtMatmulPreferenceCreate)       \
        X(cublasLtMatmulPreferenceDestroy)      \
        X(cublasLtMatmulPreferenceSetAttribute) \
        X(cublasLtMatmulAlgoGetHeuristic)       \
        X(cublasLtMatmul)

/* A product as cuBLASLt is asked for it: matrices are those of b, a and out, each transposed. No two products of one shape need
 * different algorithms, and all of it is compared as bytes. */
struct xdi_cuda_cublas_shape {
    int64_t rows[3], columns[3], stride[3];
    int32_t type[3], turn[2]; /* cudaDataType_t, cublasOperation_t */
    uint32_t alignment[3];    /* bytes */
};

/* What was found for a shape; also that nothing was. */
struct xdi_cuda_cublas_kept {
    xdi_cuda_cublas_shape shape;
    cublasLtMatmulAlgo_t algorithm;
    bool found;
};

/* A head has six shapes, and as many for the rows of its last chunk. */
enum { XDI_CUDA_CUBLAS_KEPT = 64 };

#    define XDI_CUDA_CUBLAS_MEMBER(function) decltype(&::function) function;
struct xdi_cuda_cublas {
    void *library; /* from dlopen */
    cublasLtHandle_t handle;
    char *memory; /* of the device, since the first product: cuBLASLt's workspace, then the room for rounded elements */
    xdi_cuda_cublas_kept kept[XDI_CUDA_CUBLAS_KEPT];
    int64_t found; /* so far; the oldest entry makes room */
    XDI_CUDA_CUBLAS_FUNCTIONS(XDI_CUDA_CUBLAS_MEMBER)
};
#    undef XDI_CUDA_CUBLAS_MEMBER

/* NVIDIA recommends 32 MiB for Hopper; 96 MiB hold the gradient of 256 rows of 196608 logits. */
static const size_t xdi_cuda_cublas_workspace_bytes = (size_t)32 << 20;
static const size_t xdi_cuda_cublas_room_bytes = (size_t)96 << 20;

/* A status of cuBLASLt as an xd_result: the failed call as written in the source, and the library's text for the status. */
static xd_result xdi_cuda_cublas_result(xd_ctx *ctx, const xdi_cuda_cublas *cublas, cublasStatus_t status,
                                        const char *call, const char *file, int line, const char *function) {
    if (status == CUBLAS_STATUS_SUCCESS) return XD_OK;
    const xd_result result = status == CUBLAS_STATUS_ALLOC_FAILED ? XD_ERROR_MEMORY : XD_ERROR_DEVICE;
    return xd_fail(ctx, result, file, line, function, "%.160s: %s", call,
                   cublas->cublasLtGetStatusString(status));
}

/* XDI_CUDA_CUBLAS_TRY(ctx, cublas, cublasLtCreate(arguments...)); */
#    define XDI_CUDA_CUBLAS_TRY(ctx, cublas, call) \
        XD_TRY(xdi_cuda_cublas_result((ctx), (cublas), (cublas)->call, #call, __FILE__, __LINE__, __func__))

/* ---- loading ---- */

/* Why the library is not used: with no name, this is no error. */
struct xdi_cuda_cublas_refusal {
    xd_result result;
    char words[320];
};

/* Opens a file beside the CUDA runtime that the process has loaded; NULL: there is none, as where it is linked into a program. */
static void *xdi_cuda_open_beside_runtime(const char *name) {
    char path[1024];
    Dl_info place = {};
    snprintf(path, sizeof path, "libcudart.so.%d", CUDART_VERSION / 1000);
    void *runtime = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    void *inside = runtime ? dlsym(runtime, "cudaGetDevice") : NULL;
    const bool known = inside && dladdr(inside, &place) != 0 && place.dli_fname;
    const char *slash = known ? strrchr(place.dli_fname, '/') : NULL;
    const int folder = slash ? (int)(slash - place.dli_fname) : 0;
    if (slash) snprintf(path, sizeof path, "%.*s/%s", folder, place.dli_fname, name);
    if (runtime) dlclose(runtime);
    return slash ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

static bool xdi_cuda_cublas_find(xdi_cuda_cublas *cublas, const char *name, bool beside,
                                 xdi_cuda_cublas_refusal *no) {
    cublas->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!cublas->library) {
        const char *words = dlerror();
        snprintf(no->words, sizeof no->words, "cuBLASLt cannot be loaded: %s", words ? words : name);
        if (beside) cublas->library = xdi_cuda_open_beside_runtime(name);
    }
    if (!cublas->library) return false;
#    define XDI_CUDA_CUBLAS_FIND(function)                                                             \
        cublas->function = reinterpret_cast<decltype(&::function)>(dlsym(cublas->library, #function)); \
        if (!cublas->function) {                                                                       \
            snprintf(no->words, sizeof no->words, "%s has no function " #function, name);              \
            return false;                                                                              \
        }
    XDI_CUDA_CUBLAS_FUNCTIONS(XDI_CUDA_CUBLAS_FIND)
#    undef XDI_CUDA_CUBLAS_FIND
    return true;
}

/* What the header declares about functions and their arguments holds within a major version. */
static bool xdi_cuda_cublas_fits(const xdi_cuda_cublas *cublas, const char *name,
                                 xdi_cuda_cublas_refusal *no) {
    int major = 0;
    if (cublas->cublasLtGetProperty(MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS &&
        major == CUBLAS_VER_MAJOR)
        return true;
    snprintf(no->words, sizeof no->words, "%s is version %zu of cuBLASLt, the unit was built for version %d",
             name, cublas->cublasLtGetVersion(), CUBLAS_VERSION);
    return false;
}

static bool xdi_cuda_cublas_start(xdi_cuda_cublas *cublas, const char *name, bool beside,
                                  xdi_cuda_cublas_refusal *no) {
    no->result = XD_ERROR_UNSUPPORTED;
    if (!xdi_cuda_cublas_find(cublas, name, beside, no) || !xdi_cuda_cublas_fits(cublas, name, no))
        return false;
    const cublasStatus_t status = cublas->cublasLtCreate(&cublas->handle);
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    no->result = status == CUBLAS_STATUS_ALLOC_FAILED ? XD_ERROR_MEMORY : XD_ERROR_DEVICE;
    snprintf(no->words, sizeof no->words, "cublasLtCreate(&handle): %s", cublas->cublasLtGetStatusString(status));
    return false;
}

/* The device is the current one; its work has ended. */
static void xdi_cuda_cublas_close(xd_cuda *cuda) {
    xdi_cuda_cublas *cublas = cuda->cublas;
    if (!cublas) return;
    if (cublas->memory) cuda->allocator.release(cuda->allocator.user, cublas->memory);
    if (cublas->handle) cublas->cublasLtDestroy(cublas->handle);
    if (cublas->library) dlclose(cublas->library);
    xd_release(cuda->ctx, cublas);
    cuda->cublas = NULL;
}

/* name: as xd_cuda_desc.cublas, but never "none". What was created before a failure is destroyed by xdi_cuda_cublas_close. */
static xd_result xdi_cuda_cublas_open(xd_ctx *ctx, xd_cuda *cuda, const char *name) {
    char of_this_toolkit[32];
    xdi_cuda_cublas_refusal no = {};
    const bool is_named = name && name[0];
    snprintf(of_this_toolkit, sizeof of_this_toolkit, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    cuda->cublas = (xdi_cuda_cublas *)xd_allocate(ctx, sizeof *cuda->cublas);
    XD_REQUIRE(ctx, cuda->cublas, XD_ERROR_MEMORY, "no room for the functions of cuBLASLt");
    if (xdi_cuda_cublas_start(cuda->cublas, is_named ? name : of_this_toolkit, !is_named, &no)) {
        cuda->kernels.products.library = (uint32_t)cuda->cublas->cublasLtGetVersion();
        return XD_OK;
    }
    if (is_named) return XD_FAIL(ctx, no.result, "%s", no.words);
    xdi_cuda_cublas_close(cuda);
    xd_log(ctx, XD_LOG_INFO, "matrix products are the unit's own: %s", no.words);
    return XD_OK;
}

/* ---- memory ---- */

/* During its lifetime this thread may load kernels and allocate while a stream is captured, which takes no part in it. */
struct xdi_cuda_relaxed {
    cudaStreamCaptureMode mode;
    bool changed;

    xdi_cuda_relaxed() : mode(cudaStreamCaptureModeRelaxed) {
        changed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
    }
    ~xdi_cuda_relaxed() {
        if (changed) cudaThreadExchangeStreamCaptureMode(&mode);
    }
    xdi_cuda_relaxed(const xdi_cuda_relaxed &) = delete;
    xdi_cuda_relaxed &operator=(const xdi_cuda_relaxed &) = delete;
};

/* The library that this context's next product may use; NULL: it is the unit's own. */
static xdi_cuda_cublas *xdi_cuda_cublas_of(const xd_launch *launch) {
    const xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    const bool invariant = xd_ctx_settings(launch->ctx)->reduction == XD_REDUCTION_INVARIANT;
    return cuda->kernels.products.library && !invariant ? cuda->cublas : NULL;
}

/* What the first product allocates, in a capture too. */
static xd_result xdi_cuda_cublas_prepare(const xd_launch *launch) {
    const xd_cuda *cuda = xdi_cuda_of(launch->ctx);
    xdi_cuda_cublas *cublas = xdi_cuda_cublas_of(launch);
    const size_t bytes = xdi_cuda_cublas_workspace_bytes + xdi_cuda_cublas_room_bytes;
    if (!cublas || cublas->memory) return XD_OK;
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const xdi_cuda_relaxed relaxed;
    cublas->memory = (char *)cuda->allocator.allocate(cuda->allocator.user, bytes);
    XD_REQUIRE(launch->ctx, cublas->memory, XD_ERROR_MEMORY,
               "no room for %zu bytes for the products of cuBLASLt on device %d; xd_cuda_desc.cublas \"none\" "
               "takes none",
               bytes, cuda->device);
    return XD_OK;
}

#else

static xd_result xdi_cuda_cublas_open(xd_ctx *ctx, xd_cuda *, const char *name) {
    XD_REQUIRE(ctx, !name || !name[0], XD_ERROR_UNSUPPORTED, "the CUDA unit was built without cublasLt.h");
    xd_log(ctx, XD_LOG_INFO, "matrix products are the unit's own: it was built without cublasLt.h");
    return XD_OK;
}

static void xdi_cuda_cublas_close(xd_cuda *) {}

static xd_result xdi_cuda_cublas_prepare(const xd_launch *) {
    return XD_OK;
}

#endif

/* Ranks have agreed on it. The library stays loaded: work of it may be on its way. */
static void xdi_cuda_products_own(xd_ctx *ctx) {
    xdi_cuda_of(ctx)->kernels.products.library = 0;
}

static xd_product_kernels xdi_cuda_products_table() {
    xd_product_kernels table = {};
    table.narrow = true;
    table.prepare = xdi_cuda_cublas_prepare;
    table.own = xdi_cuda_products_own;
    return table;
}
