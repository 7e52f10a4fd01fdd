/* Wrapped models whose storage is on GPUs: what blocks show, and sums of leaves, have the bits of the host. */
#include "cuda_test.h"
#include "wrap_calls.h"

#include <atomic>
#include <string>
#include <utility>
#include <vector>

enum { LEAVES = 6, ROWS = 13, COLUMNS = 5, SIZE = ROWS * COLUMNS };
enum Kind { DDP, SHARDED, FSDP, FSDP_WHOLE, KINDS };

/* Never zero, so that a copy to a place of zeros is an addition. */
static float leaf_gradient(int64_t leaf, int64_t block, int64_t at) {
    Random random((uint64_t)(leaf * 1000003 + block * 7919 + at) + 1);
    random.bits();
    return (float)random.unit() + 1e-3f;
}

static float tree(int64_t begin, int64_t end, int64_t block, int64_t at) {
    int64_t half = 1;
    if (end - begin == 1) return leaf_gradient(begin, block, at);
    while (2 * half < end - begin) half *= 2;
    return tree(begin, begin + half, block, at) + tree(begin + half, end, block, at);
}

/* A root and a layer, of one weight each. */
static xd_model *two_blocks(xd_ctx *ctx, xd_block *blocks[2]) {
    xd_model *model = nullptr;
    xd_model_desc desc = {};
    desc.seed = 5;
    CHECK(xd_model_create(ctx, &desc, &model) == XD_OK);
    xd_block_desc layer = {};
    layer.name = "layer";
    layer.unit = XD_UNIT_ALWAYS;
    blocks[0] = xd_model_root(model);
    CHECK(xd_block_add(blocks[0], &layer, &blocks[1]) == XD_OK);
    for (int i = 0; i < 2; i++) {
        xd_weight_desc d = {};
        d.name = "w";
        d.dtype = XD_DTYPE_F32;
        d.ndim = 2;
        d.shape[0] = ROWS;
        d.shape[1] = COLUMNS;
        d.init = { XD_INIT_NORMAL, 0.0f, 1.0f };
        CHECK(xd_weight_add(blocks[i], &d, nullptr) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

/* First values as a model on the host has them. */
static std::vector<float> first_values(int block) {
    xd_ctx *ctx = nullptr;
    xd_block *blocks[2];
    CHECK(xd_ctx_create(nullptr, &ctx) == XD_OK);
    xd_model *model = two_blocks(ctx, blocks);
    CHECK(xd_model_allocate(model) == XD_OK && xd_model_init_weights(model) == XD_OK);
    const float *value = (const float *)xd_weight_describe(xd_model_weight_at(model, block)).value;
    const std::vector<float> out(value, value + SIZE);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
    return out;
}

static void check_values(xd_ctx *ctx, const xd_block_view &view, int block) {
    std::vector<float> values(SIZE);
    CHECK(xd_read(ctx, values.data(), view.values[0], SIZE * sizeof(float)) == XD_OK);
    CHECK(values == first_values(block));
}

/* The layer inside of the root; gradients arrive on the rank's stream. */
static void run_leaf(const RankGpu &p, xd_block *const blocks[2], xd_parallel *parallel, int64_t k) {
    static const int order[2] = { 0, 1 };
    const int64_t leaf = xd_parallel_micro_batch(parallel, k);
    std::vector<float> gradient[2];
    for (int b : order) {
        xd_block_view view;
        const xd_pass pass = { XD_PASS_BACKWARD, k, false };
        CHECK(xd_block_begin(blocks[b], pass, &view) == XD_OK);
        check_values(p.ctx, view, b);
        for (int64_t i = 0; i < SIZE; i++) gradient[b].push_back(leaf_gradient(leaf, b, i));
        CHECK(cudaMemcpyAsync(view.gradients[0], gradient[b].data(), SIZE * sizeof(float), cudaMemcpyHostToDevice,
                              p.stream) == cudaSuccess);
    }
    CHECK(xd_block_end(blocks[1]) == XD_OK && xd_block_end(blocks[0]) == XD_OK);
    CHECK(cudaStreamSynchronize(p.stream) == cudaSuccess); /* `gradient` ends here */
}

/* With divisors each leaf is a quarter of itself, which is exact, and the sum becomes the mean. */
static void check_sums(xd_ctx *home, const xd_parallel *parallel, bool divides) {
    const float before = divides ? 0.25f : 1.0f, after = divides ? (float)(1.0 / LEAVES) : 1.0f;
    xd_param params[2];
    xd_tensor_part parts[2];
    int64_t count = 0;
    CHECK(xd_parallel_params(parallel, 2, params, &count) == XD_OK && count == 2);
    CHECK(xd_parallel_parts(parallel, 2, parts, &count) == XD_OK && count == 2);
    for (int b = 0; b < 2; b++) {
        std::vector<float> sum((size_t)params[b].count);
        CHECK(xd_read(home, sum.data(), params[b].gradient, sum.size() * sizeof(float)) == XD_OK);
        for (size_t i = 0; i < sum.size(); i++) {
            const float whole = before * tree(0, LEAVES, b, parts[b].range.begin + (int64_t)i);
            CHECK(sum[i] == whole * after);
        }
    }
}

struct Setting {
    int kind;
    bool queues; /* of streams: gathers ahead, sums beside the passes; gradients are divided then */
    bool offloaded; /* FSDP: parts in memory of the host */
};

static bool is_locked(const void *memory) {
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, memory) == cudaSuccess);
    return attributes.type == cudaMemoryTypeHost;
}

/* What the host has is a rank's own; it is the next step's when blocks are opened again. Its pages are locked. */
static void check_values_at_home(const xd_parallel *parallel) {
    xd_tensor_part parts[2];
    int64_t count = 0;
    CHECK(xd_parallel_parts(parallel, 2, parts, &count) == XD_OK && count == 2);
    for (int b = 0; b < 2; b++) {
        const std::vector<float> whole = first_values(b);
        CHECK(parts[b].range.begin == parts[b].range.end || is_locked(parts[b].data));
        for (int64_t i = parts[b].range.begin; i < parts[b].range.end; i++)
            CHECK(((const float *)parts[b].data)[i - parts[b].range.begin] == whole[(size_t)i]);
    }
}

static xd_result train_once(xd_comm *world, void *argument) {
    const Setting &setting = *(const Setting *)argument;
    const int kind = setting.kind;
    const RankGpu p(world);
    xd_queue *gathers = nullptr, *reductions = nullptr;
    if (setting.queues) CHECK(xd_queue_create(world, nullptr, &gathers) == XD_OK);
    if (setting.queues) CHECK(xd_queue_create(world, nullptr, &reductions) == XD_OK);
    xd_block *blocks[2];
    xd_parallel *parallel = nullptr;
    xd_model *model = two_blocks(p.ctx, blocks);
    xd_ddp_desc ddp = {};
    ddp.micro_batches = LEAVES;
    ddp.sharded_optimizer = kind == SHARDED;
    ddp.gathers = gathers;
    ddp.reductions = reductions;
    ddp.bucket_size = SIZE;
    ddp.divide.average = setting.queues;
    ddp.divide.before = setting.queues ? 4.0 : 0.0;
    xd_fsdp_desc fsdp = {};
    fsdp.micro_batches = LEAVES;
    fsdp.accumulate_whole = kind == FSDP_WHOLE;
    fsdp.gathers = gathers;
    fsdp.reductions = reductions;
    fsdp.prefetch = setting.queues;
    fsdp.divide = ddp.divide;
    xd_ctx *host = nullptr;
    xd_ctx_desc plain = {};
    plain.reduction = XD_REDUCTION_INVARIANT;
    CHECK(xd_ctx_create(&plain, &host) == XD_OK);
    fsdp.host = setting.offloaded ? host : nullptr;
    CHECK((kind <= SHARDED ? wrap_over_ddp(model, world, &ddp, &parallel)
                           : wrap_over_fsdp(model, world, &fsdp, &parallel)) == XD_OK);
    for (int step = 0; step < 2; step++) {
        for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).own; k++) run_leaf(p, blocks, parallel, k);
        CHECK(xd_parallel_reduce(parallel) == XD_OK);
        check_sums(setting.offloaded ? host : p.ctx, parallel, setting.queues);
        if (setting.offloaded) check_values_at_home(parallel);
        CHECK(xd_parallel_publish(parallel) == XD_OK);
    }
    xd_parallel_destroy(parallel);
    xd_ctx_destroy(host);
    xd_queue_destroy(gathers);
    xd_queue_destroy(reductions);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(wrapped_models_on_gpus_show_the_values_and_sum_to_the_bits_of_the_host) {
    static const int ranks[] = { 1, 2, 3 };
    for (int n : ranks)
        for (int i = 0; i < 3 * KINDS; i++) {
            if (i >= 2 * KINDS && i % KINDS < FSDP) continue;
            Setting setting = { i % KINDS, i >= KINDS && (i < 2 * KINDS || n == 2), i >= 2 * KINDS };
            xd_ctx_desc desc = {};
            desc.reduction = XD_REDUCTION_INVARIANT;
            desc.timeout_seconds = 60;
            xd_error error;
            const xd_result result = xd_run_threads(n, &desc, train_once, &setting, &error);
            if (result != XD_OK) printf("%d ranks, kind %d: %s\n", n, setting.kind, error.message);
            CHECK(result == XD_OK);
        }
}

/* The state by name, as rank 0 has it; counts of steps as one number. */
typedef std::vector<std::pair<std::string, std::vector<float>>> State;

static xd_result keep(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    State &state = *(State *)user;
    if (elements.begin == 0) state.push_back({ tensor->name, {} });
    for (int64_t i = 0; i < elements.end - elements.begin; i++)
        state.back().second.push_back((float)(tensor->dtype == XD_DTYPE_I64 ? (double)((const int64_t *)data)[i]
                                                                           : (double)((const float *)data)[i]));
    return XD_OK;
}

/* Scatters the values of a rule and gathers them again, with an optimizer whose state the list lacks for the root's weight. */
static xd_result there_and_back(xd_comm *world, void *argument) {
    const RankGpu p(world);
    xd_block *blocks[2];
    xd_parallel *parallel = nullptr;
    xd_optimizer *adamw = nullptr;
    xd_param params[2];
    xd_tensor_part parts[2];
    int64_t count = 0;
    const int64_t shape[2] = { ROWS, COLUMNS }, steps = 7;
    std::vector<float> values[4];
    xd_model *model = two_blocks(p.ctx, blocks);
    xd_fsdp_desc fsdp = {};
    const xd_ddp_desc ddp = {};
    CHECK((*(const int *)argument == FSDP ? wrap_over_fsdp(model, world, &fsdp, &parallel)
                                          : wrap_over_ddp(model, world, &ddp, &parallel)) == XD_OK);
    CHECK(xd_parallel_params(parallel, 2, params, &count) == XD_OK);
    CHECK(xd_parallel_parts(parallel, 2, parts, &count) == XD_OK);
    const xd_optimizer_desc o = xd_adamw_defaults(params, count);
    CHECK(xd_optimizer_create(p.ctx, &o, &adamw) == XD_OK);
    for (int b = 0; b < 4; b++)
        for (int64_t i = 0; i < SIZE; i++) values[b].push_back(leaf_gradient(9, b, i));
    const xd_state_tensor list[] = {
        { "model", "w", XD_DTYPE_F32, 2, shape, values[0].data() },
        { "model", "layer.w", XD_DTYPE_F32, 2, shape, values[1].data() },
        { "optim", "optim.exp_avg.layer.w", XD_DTYPE_F32, 2, shape, values[2].data() },
        { "optim", "optim.exp_avg_sq.layer.w", XD_DTYPE_F32, 2, shape, values[3].data() },
        { "optim", "optim.step.layer.w", XD_DTYPE_I64, 0, nullptr, &steps },
    };
    xd_checkpoint_network network = {};
    network.parts = parts;
    network.part_count = count;
    network.optimizer = adamw;
    xd_state_scatter_desc in = {};
    in.networks = &network;
    in.network_count = 1;
    in.tensors = list;
    in.tensor_count = 5;
    in.staging_bytes = 100; /* several windows */
    State state;
    xd_state_gather_desc out = {};
    out.networks = &network;
    out.network_count = 1;
    out.staging_bytes = 100;
    out.take = keep;
    out.user = &state;
    xd_state_report report;
    CHECK(xd_state_scatter(world, &in, &report) == XD_OK);
    CHECK(report.loaded == 5 && report.synthesised == 3);
    CHECK(xd_state_gather(world, &out) == XD_OK);
    CHECK(state.size() == (xd_comm_rank(world) == 0 ? 8u : 0u));
    const std::vector<float> zeros(SIZE), none(1), seven(1, 7.0f);
    for (const auto &t : state) {
        const std::string &n = t.first;
        const bool layer = n.find("layer.") != std::string::npos;
        if (n.find("optim.exp_avg_sq.") == 0) CHECK(t.second == (layer ? values[3] : zeros));
        else if (n.find("optim.exp_avg.") == 0) CHECK(t.second == (layer ? values[2] : zeros));
        else if (n.find("optim.step.") == 0) CHECK(t.second == (layer ? seven : none));
        else CHECK(t.second == values[layer]);
    }
    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(a_state_on_gpus_goes_to_rank_0_and_comes_from_it) {
    for (int n = 1; n <= 3; n++)
        for (int kind : { (int)DDP, (int)FSDP }) {
            xd_ctx_desc desc = {};
            desc.timeout_seconds = 60;
            xd_error error;
            const xd_result result = xd_run_threads(n, &desc, there_and_back, &kind, &error);
            if (result != XD_OK) printf("%d ranks, kind %d: %s\n", n, kind, error.message);
            CHECK(result == XD_OK);
        }
}

/* ---- page-locked memory ---- */

XD_TEST(a_device_gives_page_locked_memory_of_the_host_and_a_cpu_its_own) {
    Gpu gpu;
    const xd_device_ops *device = &gpu.kernels()->memory, *plain = &xd_ctx_host_kernels(gpu.ctx)->memory;
    for (size_t bytes : { (size_t)0, (size_t)1, (size_t)5000 }) {
        unsigned char *memory = (unsigned char *)device->host_allocate(gpu.ctx, bytes);
        CHECK(memory && is_locked(memory) && !device->owns(gpu.ctx, memory));
        for (size_t i = 0; i < bytes; i++) memory[i] = (unsigned char)i;
        device->host_release(gpu.ctx, memory);
        memory = (unsigned char *)plain->host_allocate(gpu.ctx, bytes);
        CHECK(memory && !is_locked(memory));
        plain->host_release(gpu.ctx, memory);
    }
    device->host_release(gpu.ctx, nullptr);
    CHECK(device->host_allocate(gpu.ctx, SIZE_MAX / 2) == nullptr);
}

static std::atomic<int> locked_blocks, locked_most;
static void *(*lock_really)(xd_ctx *, size_t);
static void (*unlock_really)(xd_ctx *, void *);

static void *lock_noted(xd_ctx *ctx, size_t bytes) {
    locked_most = ++locked_blocks > locked_most ? locked_blocks.load() : locked_most.load();
    return lock_really(ctx, bytes);
}

static void *lock_never(xd_ctx *, size_t) {
    return nullptr;
}

static void unlock_noted(xd_ctx *ctx, void *memory) {
    locked_blocks--;
    unlock_really(ctx, memory);
}

/* Saves a wrapped model of one rank beside training, into a folder. */
static void save_beside(const std::string &root, void *(*lock)(xd_ctx *, size_t)) {
    Gpu gpu(XD_REDUCTION_INVARIANT);
    xd_kernels *table = (xd_kernels *)(uintptr_t)gpu.kernels(); /* the unit finds its own by this address */
    xd_comm *self = nullptr;
    xd_block *blocks[2];
    xd_parallel *parallel = nullptr;
    xd_tensor_part parts[2];
    int64_t count = 0;
    xd_checkpoint_saver *saver = nullptr;
    lock_really = table->memory.host_allocate;
    unlock_really = table->memory.host_release;
    table->memory.host_allocate = lock;
    table->memory.host_release = unlock_noted;
    CHECK(xd_comm_self(gpu.ctx, &self) == XD_OK);
    xd_model *model = two_blocks(gpu.ctx, blocks);
    const xd_fsdp_desc fsdp = {};
    CHECK(wrap_over_fsdp(model, self, &fsdp, &parallel) == XD_OK);
    CHECK(xd_parallel_parts(parallel, 2, parts, &count) == XD_OK);
    xd_checkpoint_network network = {};
    network.parts = parts;
    network.part_count = count;
    const xd_checkpoint_saver_desc of = { &network, 1 };
    CHECK(xd_checkpoint_saver_create(self, &of, &saver) == XD_OK);
    xd_checkpoint_save_desc save = {};
    save.root = root.c_str();
    save.step = 7;
    save.networks = &network;
    save.network_count = 1;
    CHECK(xd_checkpoint_save_start(saver, &save) == XD_OK);
    CHECK(xd_checkpoint_save_wait(saver) == XD_OK);
    xd_checkpoint_saver_destroy(saver);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    xd_comm_destroy(self);
}

XD_TEST(a_save_beside_training_is_copied_into_page_locked_memory_where_there_is_some) {
    char folder[] = "/tmp/xdistill-locked-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string root = folder;
    save_beside(root + "/locked", lock_noted);
    CHECK(locked_most == 1 && locked_blocks == 0);
    save_beside(root + "/none", lock_never);
    save_beside(root + "/not_offered", nullptr);
    CHECK(locked_most == 1 && locked_blocks == 0);
    CHECK(system(("diff -r " + root + "/locked " + root + "/none").c_str()) == 0);
    CHECK(system(("diff -r " + root + "/locked " + root + "/not_offered").c_str()) == 0);
    CHECK(system(("rm -r " + root).c_str()) == 0);
}

/* ---- averages on the host ---- */

/* Saves or loads the average of a list, which lies on the host or not, and gives back what its views have then. */
static std::vector<float> travel(const std::string &root, bool host, bool loads) {
    Gpu gpu(XD_REDUCTION_INVARIANT);
    xd_comm *self = nullptr;
    xd_block *blocks[2];
    xd_parallel *parallel = nullptr;
    xd_param params[2];
    xd_tensor_part parts[2];
    xd_ema *ema = nullptr;
    int64_t count = 0;
    compare_orders(!host);
    CHECK(xd_comm_self(gpu.ctx, &self) == XD_OK);
    xd_model *model = two_blocks(gpu.ctx, blocks);
    const xd_fsdp_desc fsdp = {};
    CHECK(wrap_over_fsdp(model, self, &fsdp, &parallel) == XD_OK);
    CHECK(xd_parallel_params(parallel, 2, params, &count) == XD_OK);
    CHECK(xd_parallel_parts(parallel, 2, parts, &count) == XD_OK);
    xd_ema_desc desc = xd_ema_defaults(XD_EMA_CONSTANT);
    desc.host = host;
    desc.params = params;
    desc.param_count = count;
    CHECK(xd_ema_create(gpu.ctx, &desc, &ema) == XD_OK);
    const xd_checkpoint_average average = { "half", ema };
    xd_checkpoint_network network = {};
    network.parts = parts;
    network.part_count = count;
    network.averages = &average;
    network.average_count = 1;
    if (loads) {
        xd_checkpoint_load_desc load = {};
        load.root = root.c_str();
        load.step = 3;
        load.networks = &network;
        load.network_count = 1;
        const xd_launch launch = gpu.launch();
        for (int i = 0; i < 2; i++) /* what is not written would be seen */
            CHECK(gpu.kernels()->memory.copy(&launch, xd_ema_view(ema, i).shadow.value, params[1 - i].value,
                                             SIZE * sizeof(float), XD_COPY_ON_DEVICE) == XD_OK);
        CHECK_EQ_INT(xd_checkpoint_load(self, &load, nullptr, nullptr), XD_OK);
    } else {
        xd_checkpoint_save_desc save = {};
        save.root = root.c_str();
        save.step = 3;
        save.networks = &network;
        save.network_count = 1;
        CHECK_EQ_INT(xd_checkpoint_save(self, &save), XD_OK);
    }
    std::vector<float> out(2 * SIZE);
    for (int i = 0; i < 2; i++)
        CHECK(xd_read(gpu.ctx, &out[i * SIZE], xd_ema_view(ema, i).shadow.value, SIZE * sizeof(float)) == XD_OK);
    xd_ema_destroy(ema);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    xd_comm_destroy(self);
    compare_orders(1);
    return out;
}

XD_TEST(an_average_on_the_host_is_saved_and_loaded_as_one_on_the_device) {
    char folder[] = "/tmp/xdistill-average-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string root = folder;
    const std::vector<float> near = travel(root + "/near", false, false), far = travel(root + "/far", true, false);
    CHECK(near == far);
    CHECK(system(("diff -r " + root + "/near " + root + "/far").c_str()) == 0);
    CHECK(travel(root + "/near", true, true) == near);
    CHECK(travel(root + "/far", false, true) == near);
    CHECK(system(("rm -r " + root).c_str()) == 0);
}

XD_TEST_MAIN()
