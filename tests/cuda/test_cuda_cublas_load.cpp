/* Which library makes the matrix products of a context and of a world, and what that takes: by default cuBLASLt where it is found,
 * on all ranks or on none. All of it on the emulation, whose libraries tests/emu/build.sh makes. */
#include "cuda_test.h"

#if defined(XD_EMU)
#    include <dlfcn.h>

#    include <atomic>
#    include <thread>

static const char *const library = "libcublasLt_emu.so";
enum { VERSION = 990100, OWN = 1, PRODUCT_BYTES = 128 << 20 };

/* Device memory that is counted; `most` bytes at a time. */
struct Counted {
    size_t held = 0, most = SIZE_MAX;
    std::vector<std::pair<void *, size_t>> blocks;

    static void *allocate(void *user, size_t bytes) {
        Counted *c = (Counted *)user;
        void *memory = nullptr;
        if (bytes > c->most || cudaMalloc(&memory, bytes) != cudaSuccess) return nullptr;
        c->held += bytes;
        c->blocks.push_back({ memory, bytes });
        return memory;
    }
    static void release(void *user, void *memory) {
        for (auto &block : ((Counted *)user)->blocks)
            if (block.first == memory) ((Counted *)user)->held -= block.second;
        CHECK(cudaFree(memory) == cudaSuccess);
    }
};

/* A context that logs all, on a stream of its own. */
struct Loaded {
    Counted memory;
    xd_ctx *ctx = nullptr;
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;

    explicit Loaded(const char *cublas, xd_reduction reduction = XD_REDUCTION_DETERMINISTIC) {
        xd_ctx_desc desc = {};
        xd_cuda_desc device = {};
        test_log.clear();
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        desc.stream = stream;
        desc.reduction = reduction;
        desc.logger.write = test_write;
        desc.log_level = XD_LOG_INFO;
        device.cublas = cublas;
        device.allocator = { Counted::allocate, Counted::release, &memory };
        CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
        CHECK(xd_cuda_create(ctx, &device, &cuda) == XD_OK);
    }
    ~Loaded() {
        xd_cuda_destroy(cuda);
        CHECK_EQ_INT(memory.held, 0);
        xd_ctx_destroy(ctx);
        cudaStreamDestroy(stream);
    }
    Loaded(const Loaded &) = delete;
};

/* out = a b of small numbers. */
struct Product {
    Device a, b, out;
    int64_t rows;
    bool bf16;
    explicit Product(int64_t m = 4, bool rounded = false)
        : a(std::vector<float>((size_t)m * 8, 0.5f)), b(std::vector<float>(8 * 4, 3.0f)), out(std::vector<float>((size_t)m * 4)),
          rows(m), bf16(rounded) {}
    xd_result run(const Loaded &on) const {
        const xd_launch launch = xd_ctx_launch(on.ctx);
        xd_matmul_args args = {};
        args.a = { a.at(), XD_DTYPE_F32, rows, 8, 8, 1 };
        args.b = { b.at(), XD_DTYPE_F32, 8, 4, 4, 1 };
        args.out = out.at<float>();
        args.out_stride = 4;
        args.bf16 = bf16;
        return xd_ctx_kernels(on.ctx)->matmul(&launch, &args);
    }
    void check(const Loaded &on) const {
        CHECK(cudaStreamSynchronize(on.stream) == cudaSuccess);
        CHECK_SAME(out.host<float>(), std::vector<float>((size_t)rows * 4, 12.0f));
    }
};

static int lines_with(const char *words) {
    int count = 0;
    for (size_t at = test_log.find(words); at != std::string::npos; at = test_log.find(words, at + 1)) count++;
    return count;
}

/* ---- one context; the first test is the first in the process: a library that was loaded stays ---- */

XD_TEST(without_a_library_products_are_the_units_own_and_one_line_says_so) {
    for (const char *name : { (const char *)nullptr, "" }) {
        Loaded gpu(name);
        const Product product;
        CHECK_EQ_INT(xd_ctx_products(gpu.ctx), OWN);
        CHECK_EQ_INT(lines_with("matrix products are the unit's own: cuBLASLt cannot be loaded: libcublasLt.so.99"), 1);
        CHECK_EQ_INT(lines_with("\n"), 1);
        CHECK(product.run(gpu) == XD_OK);
        product.check(gpu);
        CHECK(gpu.memory.held < PRODUCT_BYTES);
    }
}

XD_TEST(a_library_beside_the_runtime_is_used) {
    char folder[4096] = "";
    void *const near = dlopen("libcublasLt_other.so", RTLD_NOW | RTLD_LOCAL);
    CHECK(near && dlinfo(near, RTLD_DI_ORIGIN, folder) == 0);
    void *const runtime = dlopen((std::string(folder) + "/toolkit/libcudart.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK(runtime);
    for (const char *name : { (const char *)nullptr, "" }) {
        Loaded gpu(name);
        CHECK_EQ_INT(xd_ctx_products(gpu.ctx), VERSION);
        CHECK_EQ_INT(lines_with("\n"), 0);
    }
    dlclose(runtime);
    Loaded by_name(nullptr);
    CHECK_EQ_INT(xd_ctx_products(by_name.ctx), VERSION);
    dlclose(near);
}

XD_TEST(none_refuses_the_library) {
    Loaded gpu("none");
    const Product product;
    CHECK_EQ_INT(xd_ctx_products(gpu.ctx), OWN);
    CHECK_EQ_INT(lines_with("\n"), 0);
    setenv("EMU_CUBLASLT_FAIL", "1", 1);
    CHECK(product.run(gpu) == XD_OK);
    unsetenv("EMU_CUBLASLT_FAIL");
    product.check(gpu);
}

XD_TEST(its_memory_comes_with_the_first_product) {
    Loaded gpu(library);
    const Product product;
    const size_t before = gpu.memory.held;
    CHECK(before < PRODUCT_BYTES);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(product.run(gpu) == XD_OK);
        CHECK_EQ_INT(gpu.memory.held - before, PRODUCT_BYTES);
        product.check(gpu);
    }
    Loaded invariant(library, XD_REDUCTION_INVARIANT);
    CHECK(product.run(invariant) == XD_OK);
    product.check(invariant);
    CHECK(invariant.memory.held < PRODUCT_BYTES);
}

XD_TEST(a_lack_of_that_memory_has_its_bytes_and_the_way_out) {
    Loaded gpu(library);
    const Product product;
    gpu.memory.most = PRODUCT_BYTES - 1;
    CHECK(product.run(gpu) == XD_ERROR_MEMORY);
    const char *message = xd_last_error(gpu.ctx)->message;
    CHECK(strstr(message, "134217728 bytes") && strstr(message, "\"none\""));
    gpu.memory.most = PRODUCT_BYTES;
    CHECK(product.run(gpu) == XD_OK);
    product.check(gpu);
}

XD_TEST(algorithms_are_looked_for_once_a_shape) {
    void *const loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    CHECK(loaded);
    long (*const asked)(void) = (long (*)(void))dlsym(loaded, "emu_cublaslt_asked");
    Loaded gpu(library);
    const long before = asked();
    for (int turn = 0; turn < 3; turn++)
        for (const int64_t rows : { 4, 5 }) {
            const Product product(rows);
            CHECK(product.run(gpu) == XD_OK);
            product.check(gpu);
        }
    CHECK_EQ_INT(asked() - before, 2);
    for (int64_t rows = 6; rows < 6 + 64; rows++) { /* more shapes than are kept: the oldest go */
        const Product product(rows);
        CHECK(product.run(gpu) == XD_OK);
        product.check(gpu);
    }
    const Product again(4);
    CHECK(again.run(gpu) == XD_OK);
    again.check(gpu);
    CHECK_EQ_INT(asked() - before, 2 + 64 + 1);
    dlclose(loaded);
}

/* ---- a capture ---- */

XD_TEST(the_first_product_of_a_context_may_be_in_a_capture) {
    for (const bool bf16 : { false, true }) {
        Loaded gpu(library);
        const Product product(4, bf16);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
        CHECK(product.run(gpu) == XD_OK);
        CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
        product.check(gpu);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
}

XD_TEST(a_product_that_has_no_memory_in_a_capture_is_refused_and_the_capture_goes_on) {
    Loaded gpu(library);
    const Product product;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    gpu.memory.most = 1000;
    CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(product.run(gpu) == XD_ERROR_MEMORY);
    gpu.memory.most = SIZE_MAX;
    CHECK(product.run(gpu) == XD_OK);
    CHECK(cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, gpu.stream) == cudaSuccess);
    product.check(gpu);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
}

/* ---- ranks ---- */

#    include <nccl.h>

#    define XDISTILL_IMPLEMENTATION
#    include "../../xdistill_nccl.h"
#    undef XDISTILL_IMPLEMENTATION

/* Ranks that load libraries by these names and join a world over NCCL; whose products each has then. */
static std::vector<uint32_t> joined(const std::vector<const char *> &names) {
    const int size = (int)names.size();
    std::vector<uint32_t> made(names.size());
    std::vector<std::thread> ranks;
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int r = 0; r < size; r++)
        ranks.emplace_back([&, r] {
            xd_ctx *ctx = nullptr;
            xd_cuda *cuda = nullptr;
            xd_comm *comm = nullptr;
            xd_cuda_desc device = {};
            xd_nccl_desc d = {};
            int32_t one = 1, sum = 0;
            device.cublas = names[(size_t)r];
            d.size = size;
            d.rank = r;
            d.id = &id;
            CHECK(cudaSetDevice(r) == cudaSuccess);
            CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK && xd_cuda_create(ctx, &device, &cuda) == XD_OK);
            CHECK(xd_comm_nccl(ctx, &d, &comm) == XD_OK);
            made[(size_t)r] = xd_ctx_products(ctx);
            CHECK(xd_all_reduce(comm, &one, &sum, 1, XD_DTYPE_I32, XD_SUM) == XD_OK && sum == size);
            xd_comm_destroy(comm);
            xd_cuda_destroy(cuda);
            xd_ctx_destroy(ctx);
        });
    for (std::thread &rank : ranks) rank.join();
    return made;
}

XD_TEST(ranks_that_join_a_world_all_use_one_version_or_none) {
    typedef std::vector<uint32_t> Versions;
    CHECK(joined({ library, library }) == Versions({ VERSION, VERSION }));
    CHECK(joined({ library, "libcublasLt_newer.so" }) == Versions({ OWN, OWN }));
    CHECK(joined({ library, "none", library }) == Versions({ OWN, OWN, OWN }));
    CHECK(joined({ "none", "none" }) == Versions({ OWN, OWN }));
}

/* Ranks of threads, whose devices come after the world: the next call compares them. A rank without a name is on the CPU. */
static xd_result rank_of(xd_comm *world, void *argument) {
    const char *const *names = (const char *const *)argument;
    const char *const name = names[xd_comm_rank(world)];
    xd_cuda_desc device = {};
    device.cublas = name;
    const RankGpu gpu(world, &device, name != nullptr);
    return xd_barrier(world);
}

XD_TEST(ranks_whose_products_differ_later_are_told) {
    const char *same[] = { library, library }, *hosts[] = { library, nullptr }, *other[] = { library, "none" };
    xd_error error = {};
    CHECK(xd_run_threads(2, nullptr, rank_of, same, &error) == XD_OK);
    CHECK(xd_run_threads(2, nullptr, rank_of, hosts, &error) == XD_OK);
    CHECK(xd_run_threads(2, nullptr, rank_of, other, &error) == XD_ERROR_MISMATCH);
    CHECK(strstr(error.message, "version 990100") && strstr(error.message, "rank 1") && strstr(error.message, "itself"));
    if (!strstr(error.message, "itself")) printf("    %s\n", error.message);
}
#endif

XD_CUDA_TEST_MAIN()
