/* Ranks as threads, their memory on a GPU: every collective gives the bits that it gives in host memory. */
#include "cuda_test.h"

enum { RANKS = 3, ELEMENTS = 3000 };

/* What one rank sends and what it has received, in the order of the calls. */
struct Rank {
    std::vector<unsigned char> log;
};

struct World {
    bool on_device;
    xd_reduction reduction;
    Rank rank[RANKS];
};

/* One rank of a world, on the host or on a GPU. */
struct Member {
    xd_comm *comm;
    xd_ctx *ctx;
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;
    bool on_device;
    Rank *rank;
    Random random;

    Member(xd_comm *world, World *w)
        : comm(world), ctx(xd_comm_ctx(world)), on_device(w->on_device), rank(&w->rank[xd_comm_rank(world)]),
          random(100 + (uint64_t)xd_comm_rank(world)) {
        int devices = 1;
        if (!on_device) return;
        CHECK(cudaGetDeviceCount(&devices) == cudaSuccess);
        CHECK(cudaSetDevice(xd_comm_rank(world) % devices) == cudaSuccess);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        xd_ctx_set_stream(ctx, stream);
        CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
    }
    ~Member() {
        xd_cuda_destroy(cuda);
        if (stream) cudaStreamDestroy(stream);
    }
};

/* Memory of a member that begins with given bytes. */
struct Buffer {
    Member *member;
    std::vector<unsigned char> bytes;
    Device device;

    Buffer(Member *m, const std::vector<unsigned char> &from)
        : member(m), bytes(from), device(allocate(m, from)) {}
    static Device allocate(Member *m, const std::vector<unsigned char> &from) {
        return m->on_device ? Device(from) : Device();
    }
    void *at() {
        return member->on_device ? device.at() : (void *)bytes.data();
    }
    void keep() { /* appends what it holds to the log; reading orders itself behind the stream */
        std::vector<unsigned char> out(bytes.size());
        if (member->on_device)
            CHECK(xd_read(member->ctx, out.data(), device.at(), out.size()) == XD_OK);
        else
            out = bytes;
        member->rank->log.insert(member->rank->log.end(), out.begin(), out.end());
    }
};

static void reduce_all(Member *m) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64, XD_DTYPE_I64, XD_DTYPE_U8 };
    for (int form = 0; form < 20; form++) {
        const xd_dtype dtype = dtypes[form % 5];
        const xd_reduce_op op = (xd_reduce_op)(form / 5);
        const int64_t n = form % 3 ? 1 + form : ELEMENTS;
        if (!xd_reduce_supports(dtype, op)) continue;
        Buffer in(m, elements(dtype, n, &m->random, false)), out(m, elements(dtype, n, &m->random, false));
        CHECK(xd_all_reduce(m->comm, in.at(), out.at(), n, dtype, op) == XD_OK);
        CHECK(xd_all_reduce(m->comm, out.at(), out.at(), n, dtype, op) == XD_OK);
        out.keep();
        const int64_t counts[RANKS] = { n / 3, n - n / 3, 0 };
        Buffer part(m, elements(dtype, n, &m->random, false));
        CHECK(xd_reduce_scatter(m->comm, in.at(), part.at(), counts, dtype, op) == XD_OK);
        CHECK(xd_all_gather(m->comm, part.at(), out.at(), counts, dtype) == XD_OK);
        out.keep();
    }
}

static void move_all(Member *m) {
    const int me = xd_comm_rank(m->comm), next = (me + 1) % RANKS, before = (me + RANKS - 1) % RANKS;
    const int64_t to[RANKS] = { 10 + me, 3, 700 }, from[RANKS] = { me == 0   ? 10
                                                                   : me == 1 ? 3
                                                                             : 700,
                                                                   me == 0   ? 11
                                                                   : me == 1 ? 3
                                                                             : 700,
                                                                   me == 0   ? 12
                                                                   : me == 1 ? 3
                                                                             : 700 };
    Buffer in(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    Buffer out(m, elements(XD_DTYPE_F32, ELEMENTS, &m->random, false));
    CHECK(xd_all_to_all(m->comm, in.at(), to, out.at(), from, XD_DTYPE_F32) == XD_OK);
    out.keep();
    CHECK(xd_broadcast(m->comm, out.at(), ELEMENTS, XD_DTYPE_F32, 1) == XD_OK);
    out.keep();
    if (me % 2 == 0) {
        CHECK(xd_send(m->comm, in.at(), 50, XD_DTYPE_F32, next) == XD_OK);
        CHECK(xd_recv(m->comm, out.at(), 50, XD_DTYPE_F32, before) == XD_OK);
    } else {
        CHECK(xd_recv(m->comm, out.at(), 50, XD_DTYPE_F32, before) == XD_OK);
        CHECK(xd_send(m->comm, in.at(), 50, XD_DTYPE_F32, next) == XD_OK);
    }
    out.keep();
    /* A group of its own, and host memory beside that of the device. */
    xd_comm *half = nullptr;
    CHECK(xd_comm_split(m->comm, me == 2, me, &half) == XD_OK);
    CHECK(xd_all_reduce(half, in.at(), in.at(), 100, XD_DTYPE_F32, XD_SUM) == XD_OK);
    in.keep();
    int64_t count = me + 1;
    CHECK(xd_all_reduce(half, &count, &count, 1, XD_DTYPE_I64, XD_SUM) == XD_OK);
    CHECK_EQ_INT(count, 3);
    xd_comm_destroy(half);
}

static xd_result run_collectives(xd_comm *comm, void *argument) {
    Member member(comm, (World *)argument);
    reduce_all(&member);
    move_all(&member);
    return XD_OK;
}

static void run_worlds(World *host, World *gpu, xd_rank_function function) {
    xd_ctx_desc desc = {};
    xd_error error;
    desc.timeout_seconds = 300.0;
    desc.reduction = host->reduction;
    memset(&error, 0, sizeof error);
    host->on_device = false;
    gpu->on_device = true;
    CHECK(xd_run_threads(RANKS, &desc, function, host, nullptr) == XD_OK);
    CHECK(xd_run_threads(RANKS, &desc, function, gpu, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
    for (int r = 0; r < RANKS; r++) {
        CHECK(!gpu->rank[r].log.empty());
        CHECK_SAME(host->rank[r].log, gpu->rank[r].log);
    }
}

XD_TEST(collectives_on_device_memory_give_the_bits_of_the_host) {
    World host = {}, gpu = {};
    run_worlds(&host, &gpu, run_collectives);
}

static bool is_apart; /* GPUs cannot access each other's memory, so sums take some for copies */

/* Shards of a model: a norm over the ranks, the leaf sums of its gradients, a step of each shard. */
static xd_result run_step(xd_comm *comm, void *argument) {
    Member m(comm, (World *)argument);
    const int me = xd_comm_rank(comm);
    const int64_t n = 200 + 17 * me;
    Buffer value(&m, elements(XD_DTYPE_BF16, n, &m.random, false));
    Buffer gradient(&m, elements(XD_DTYPE_F32, n, &m.random, false));
    xd_gradient_norm zero;
    memset(&zero, 0, sizeof zero);
    Buffer norm(&m, std::vector<unsigned char>(sizeof zero));
    xd_param param = {};
    param.name = "w";
    param.value = value.at();
    param.gradient = gradient.at();
    param.dtype = XD_DTYPE_BF16;
    param.count = n;
    const xd_optimizer_desc desc = xd_adamw_defaults(&param, 1);
    xd_optimizer *optimizer = nullptr;
    CHECK(xd_optimizer_create(m.ctx, &desc, &optimizer) == XD_OK);
    for (int step = 0; step < 3; step++) {
        xd_gradient_norm_desc clip = {};
        clip.params = &param;
        clip.param_count = 1;
        clip.max_norm = 0.1;
        clip.type = step == 2 ? XD_NORM_MAX : XD_NORM_L2;
        xd_gradient_norm *result = (xd_gradient_norm *)norm.at();
        if (m.on_device && !is_apart) seal();
        CHECK(xd_gradient_norm_compute(m.ctx, comm, &clip, result) == XD_OK);
        xd_optimizer_step_desc modifiers = {};
        modifiers.gradient_scale = &result->coefficient;
        CHECK(xd_optimizer_step(optimizer, &modifiers, nullptr) == XD_OK);
        unseal();
        value.keep();
        CHECK(xd_gradient_norm_check(m.ctx, comm, &clip, result) == XD_OK);
        clip.refuse_above = 1e-30;
        CHECK(xd_gradient_norm_compute(m.ctx, comm, &clip, result) == XD_OK);
        CHECK(xd_gradient_norm_check(m.ctx, comm, &clip, result) == XD_ERROR_DATA);
        CHECK(strstr(xd_last_error(m.ctx)->message, "the largest element is in \"w\" on rank "));
    }
    xd_optimizer_destroy(optimizer);
    xd_leaves leaves;
    leaves.first = me * 2;
    leaves.count = 2;
    leaves.total = 2 * RANKS;
    Buffer forest(&m, elements(XD_DTYPE_F32, 2 * 300, &m.random, false));
    Buffer sum(&m, elements(XD_DTYPE_F32, 300, &m.random, false));
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = forest.at();
    c.recv = sum.at();
    c.count = 300;
    c.dtype = XD_DTYPE_F32;
    c.leaves = leaves;
    CHECK(xd_collective_run(comm, &c) == XD_OK);
    sum.keep();
    return XD_OK;
}

XD_TEST(a_step_over_sharded_parameters_has_the_bits_of_the_host) {
    World host = {}, gpu = {};
    host.reduction = gpu.reduction = XD_REDUCTION_INVARIANT;
    run_worlds(&host, &gpu, run_step);
}

#if defined(XD_EMU)
static xd_result run_long_sum(xd_comm *comm, void *argument) {
    Member m(comm, (World *)argument);
    const int64_t n = 3 * 400000; /* a rank's block needs two turns of copies */
    Buffer data(&m, elements(XD_DTYPE_F32, n, &m.random, false));
    CHECK(xd_all_reduce(comm, data.at(), data.at(), n, XD_DTYPE_F32, XD_SUM) == XD_OK);
    data.keep();
    return XD_OK;
}

/* Kernels of a GPU cannot read another's memory: what ranks add is copied to each of them first. The checker's build watches. */
XD_TEST(gpus_without_access_to_each_other_give_the_bits_of_the_host) {
    World host = {}, gpu = {}, invariant_host = {}, invariant_gpu = {};
    invariant_host.reduction = invariant_gpu.reduction = XD_REDUCTION_INVARIANT;
    World long_host = {}, long_gpu = {};
    emu_set_peer_access(0);
    is_apart = true;
    run_worlds(&host, &gpu, run_collectives);
    run_worlds(&invariant_host, &invariant_gpu, run_step);
    run_worlds(&long_host, &long_gpu, run_long_sum);
    is_apart = false;
    emu_set_peer_access(1);
}
#endif

/* Partial sums become shards by columns, those shards by rows: reductions, strided packing and unpacking. */
static xd_result run_redistribution(xd_comm *comm, void *argument) {
    enum { ROWS = 14, COLUMNS = 11 };
    Member m(comm, (World *)argument);
    const int me = xd_comm_rank(comm);
    xd_mesh_desc mesh_desc = {};
    mesh_desc.axes[0].name = "tp";
    mesh_desc.axes[0].size = RANKS;
    xd_mesh *mesh = nullptr;
    CHECK(xd_mesh_create(comm, &mesh_desc, &mesh) == XD_OK);
    xd_layout_desc desc = {};
    desc.ndim = 2;
    desc.shape[0] = ROWS;
    desc.shape[1] = COLUMNS;
    desc.topology = xd_mesh_topology(mesh);
    xd_layout *layouts[4] = {};
    CHECK(xd_layout_create(m.ctx, &desc, &layouts[3]) == XD_OK); /* everything on every rank */
    desc.placement[0].kind = XD_PARTIAL;
    CHECK(xd_layout_create(m.ctx, &desc, &layouts[0]) == XD_OK);
    desc.placement[0].kind = XD_SHARD;
    desc.placement[0].dim = 1;
    CHECK(xd_layout_create(m.ctx, &desc, &layouts[1]) == XD_OK);
    desc.placement[0].dim = 0;
    CHECK(xd_layout_create(m.ctx, &desc, &layouts[2]) == XD_OK);
    Buffer partial(&m, elements(XD_DTYPE_F32, ROWS * COLUMNS, &m.random, false));
    Buffer columns(&m, std::vector<unsigned char>(4 * ROWS * COLUMNS));
    Buffer rows(&m, std::vector<unsigned char>(4 * ROWS * COLUMNS));
    Buffer whole(&m, std::vector<unsigned char>(4 * ROWS * COLUMNS));
    const xd_tensor a = xd_tensor_view(layouts[0], me, partial.at(), XD_DTYPE_F32);
    const xd_tensor b = xd_tensor_view(layouts[1], me, columns.at(), XD_DTYPE_F32);
    const xd_tensor c = xd_tensor_view(layouts[2], me, rows.at(), XD_DTYPE_F32);
    CHECK(xd_redistribute(comm, &a, &b) == XD_OK);
    CHECK(xd_redistribute(comm, &b, &c) == XD_OK);
    const xd_tensor d = xd_tensor_view(layouts[3], me, whole.at(), XD_DTYPE_F32);
    CHECK(xd_redistribute(comm, &c, &d) == XD_OK);
    columns.keep();
    rows.keep();
    whole.keep();
    for (xd_layout *layout : layouts) xd_layout_destroy(layout);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

XD_TEST(redistributions_on_device_memory_give_the_bits_of_the_host) {
    World host = {}, gpu = {};
    run_worlds(&host, &gpu, run_redistribution);
}

/* Halos of parts that are cut along rows, or along columns of which one beyond a pole lies on another rank, and their gradients. */
static xd_result run_halos(xd_comm *comm, void *argument) {
    enum { ROWS = 7, COLUMNS = 5, ROOM = 2 * (ROWS + 6) * (COLUMNS + 4) };
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64, XD_DTYPE_I32 };
    Member m(comm, (World *)argument);
    xd_topology line = {};
    line.axis_count = 1;
    line.size[0] = line.rank_count = RANKS;
    for (int form = 0; form < 12; form++) {
        xd_layout_desc cut = {};
        cut.ndim = 3;
        cut.shape[0] = form % 3 ? 2 : ROWS;
        cut.shape[1] = form % 3 ? ROWS : 2;
        cut.shape[2] = COLUMNS;
        cut.topology = &line;
        cut.placement[0].kind = XD_SHARD;
        cut.placement[0].dim = form % 3;
        xd_layout *layout = nullptr;
        xd_halo *halo = nullptr;
        CHECK(xd_layout_create(m.ctx, &cut, &layout) == XD_OK);
        xd_halo_desc desc = {};
        desc.layout = layout;
        desc.dtype = dtypes[form % 4];
        desc.longitude = 2;
        desc.gradient = form / 4 ? XD_HALO_PARTIAL : XD_HALO_COMPLETE;
        if (form % 3 == 0) {
            desc.before[0] = 3, desc.after[0] = 1;
        } else {
            desc.before[1] = 3, desc.after[1] = 2, desc.before[2] = desc.after[2] = 2;
            desc.boundary[1] = XD_HALO_POLE;
            desc.boundary[2] = form % 2 ? XD_HALO_PERIODIC : XD_HALO_REFLECT;
        }
        CHECK(xd_halo_create(comm, &desc, &halo) == XD_OK);
        Buffer part(&m, elements(desc.dtype, ROOM, &m.random, false)), wide(&m, elements(desc.dtype, ROOM, &m.random, false));
        for (int round = 0; round < 2; round++) {
            if (m.on_device && round) seal(); /* the first round makes events of the group */
            CHECK(xd_halo_exchange(halo, part.at(), wide.at()) == XD_OK);
            CHECK(xd_halo_exchange_backward(halo, wide.at(), part.at()) == XD_OK);
            unseal();
            part.keep();
            wide.keep();
        }
        xd_halo_destroy(halo);
        xd_layout_destroy(layout);
    }
    return XD_OK;
}

XD_TEST(halos_on_device_memory_give_the_bits_of_the_host) {
    World host = {}, gpu = {};
    run_worlds(&host, &gpu, run_halos);
}

/* Activations across a region and back, along the first and the last dimension. */
static xd_result run_crossings(xd_comm *comm, void *argument) {
    enum { ROOM = 7 * 2 * 5 };
    Member m(comm, (World *)argument);
    for (int kind = 0; kind <= (int)XD_CROSSING_ALL_TO_ALL; kind++)
        for (int dim = 0; dim < 3; dim += 2) {
            xd_crossing_desc desc = {};
            desc.kind = (xd_crossing_kind)kind;
            desc.dtype = dim ? XD_DTYPE_BF16 : XD_DTYPE_F32;
            desc.ndim = 3;
            desc.shape[0] = 7, desc.shape[1] = 2, desc.shape[2] = 5;
            desc.dim = dim;
            desc.other_dim = 2 - dim;
            xd_crossing *crossing = nullptr;
            CHECK(xd_crossing_create(comm, &desc, &crossing) == XD_OK);
            Buffer in(&m, elements(desc.dtype, ROOM, &m.random, false)), out(&m, elements(desc.dtype, ROOM, &m.random, false));
            for (int round = 0; round < 2; round++) {
                if (m.on_device && round) seal();
                CHECK(xd_crossing_forward(crossing, in.at(), out.at()) == XD_OK);
                CHECK(xd_crossing_backward(crossing, out.at(), in.at()) == XD_OK);
                unseal();
                in.keep();
                out.keep();
            }
            xd_crossing_destroy(crossing);
        }
    return XD_OK;
}

XD_TEST(crossings_on_device_memory_give_the_bits_of_the_host) {
    World host = {}, gpu = {};
    run_worlds(&host, &gpu, run_crossings);
}

/* Records on queues with streams of their own, several open at a time and waited for in another order; what the caller's stream
 * writes before a start is sent, and what it reads after the wait has arrived. */
static xd_result run_queues(xd_comm *comm, void *argument) {
    enum { OPEN = 4, COUNT = 500 };
    Member m(comm, (World *)argument);
    xd_queue *queues[2] = {};
    xd_queue_desc desc = {};
    desc.capacity = OPEN;
    for (xd_queue *&queue : queues) {
        CHECK(xd_queue_create(comm, &desc, &queue) == XD_OK);
        CHECK_EQ_INT(xd_queue_describe(queue).form, m.on_device ? XD_QUEUE_STREAM : XD_QUEUE_INLINE);
    }
    std::vector<Buffer> in, out;
    in.reserve(2 * OPEN);
    out.reserve(2 * OPEN);
    for (int i = 0; i < 2 * OPEN; i++) {
        in.emplace_back(&m, elements(XD_DTYPE_F32, COUNT, &m.random, false));
        out.emplace_back(&m, elements(XD_DTYPE_F32, COUNT, &m.random, false));
    }
    const xd_device_ops *device = &xd_ctx_kernels(m.ctx)->memory;
    for (int round = 0; round < 3; round++) {
        xd_ticket tickets[2 * OPEN] = {};
        if (m.on_device && round) seal(); /* the first round makes events of the group */
        for (int i = 0; i < 2 * OPEN; i++) {
            const xd_launch launch = xd_ctx_launch(m.ctx);
            if (round == 1)
                CHECK(device->fill(&launch, in[(size_t)i].at(), (uint8_t)(i + xd_comm_rank(comm)),
                                   COUNT * sizeof(float)) == XD_OK);
            xd_collective c = {};
            c.kind = i % 3 ? XD_COLLECTIVE_ALL_REDUCE : XD_COLLECTIVE_BROADCAST;
            c.send = in[(size_t)i].at();
            c.recv = i % 3 ? out[(size_t)i].at() : in[(size_t)i].at();
            c.count = COUNT;
            c.dtype = XD_DTYPE_F32;
            c.root = i % RANKS;
            CHECK(xd_queue_start(queues[i % 2], &c, &tickets[i]) == XD_OK);
        }
        for (int i = 2 * OPEN - 1; i >= 0; i--)
            CHECK(round == 2 ? xd_queue_wait_all(queues[i % 2]) == XD_OK
                             : xd_queue_wait(queues[i % 2], tickets[i]) == XD_OK);
        unseal();
        for (int i = 0; i < 2 * OPEN; i++) in[(size_t)i].keep(), out[(size_t)i].keep();
    }
    for (xd_queue *queue : queues) xd_queue_destroy(queue);
    return XD_OK;
}

XD_TEST(queues_on_streams_of_their_own_give_the_bits_of_the_host) {
    World host = {}, gpu = {};
    run_worlds(&host, &gpu, run_queues);
}

/* A transport as MPI's: it moves memory of the host only, and says so. */
static xd_result host_control(xd_transport *, const xd_control *mine, const xd_collective *, xd_control *all,
                              double) {
    all[0] = *mine;
    return XD_OK;
}

static xd_result host_execute(xd_transport *, const xd_collective *c, double) {
    memmove(c->recv, c->send, (size_t)c->count * xd_dtype_size(c->dtype));
    return XD_OK;
}

static xd_result host_split(xd_transport *, const int *, int, int, double, xd_transport **) {
    return XD_ERROR_UNSUPPORTED;
}

static void host_leave(xd_transport *) {}

XD_TEST(device_memory_is_refused_where_the_transport_moves_only_the_host_s) {
    static const xd_transport_ops ops = { "host",     host_control, host_execute, host_split,
                                          host_leave, host_leave,   nullptr,      false,
                                          nullptr,    nullptr,      nullptr,      nullptr,   false,   nullptr,
                                          nullptr,
                                          nullptr };
    static const int world_ranks[1] = { 0 };
    Gpu gpu;
    xd_transport transport = { &ops, gpu.ctx, 0, 1, world_ranks };
    xd_comm *comm = nullptr;
    CHECK(xd_comm_create(gpu.ctx, &transport, &comm) == XD_OK);
    std::vector<float> host(4, 1.0f), out(4, 0.0f);
    Device device(host);
    CHECK(xd_all_reduce(comm, host.data(), out.data(), 4, XD_DTYPE_F32, XD_SUM) == XD_OK);
    CHECK(out == host);
    CHECK(xd_all_reduce(comm, device.at(), device.at(), 4, XD_DTYPE_F32, XD_SUM) == XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(gpu.ctx)->message, "which host does not move") != nullptr);
    CHECK(xd_all_reduce(comm, host.data(), device.at(), 4, XD_DTYPE_F32, XD_SUM) == XD_ERROR_UNSUPPORTED);
    xd_comm_destroy(comm);
}

#if defined(XD_EMU)
/* The n-th CUDA call of rank 1 fails inside a collective: it says so, its peers learn of it, nobody hangs. */
static xd_result run_failure(xd_comm *comm, void *argument) {
    World *world = (World *)argument;
    Member m(comm, world);
    Buffer data(&m, elements(XD_DTYPE_F32, 100, &m.random, false));
    const int64_t n = world->reduction == XD_REDUCTION_FAST ? 10 : 4; /* the launch; the event before it */
    CHECK(xd_all_reduce(comm, data.at(), data.at(), 100, XD_DTYPE_F32, XD_SUM) == XD_OK);
    if (xd_comm_rank(comm) == 1) emu_fail_call(n);
    const xd_result result = xd_all_reduce(comm, data.at(), data.at(), 100, XD_DTYPE_F32, XD_SUM);
    emu_fail_call(0);
    CHECK(result == (xd_comm_rank(comm) == 1 ? XD_ERROR_DEVICE : XD_ERROR_PEER));
    CHECK(cudaStreamSynchronize(m.stream) == cudaSuccess);
    return XD_OK;
}

XD_TEST(a_rank_whose_device_fails_takes_its_peers_out_of_the_collective) {
    for (int form = 0; form < 2; form++) {
        xd_ctx_desc desc = {};
        World world = {};
        desc.timeout_seconds = 300.0;
        desc.reduction = world.reduction = form ? XD_REDUCTION_FAST : XD_REDUCTION_DETERMINISTIC;
        world.on_device = true;
        CHECK(xd_run_threads(RANKS, &desc, run_failure, &world, nullptr) == XD_OK);
    }
    emu_reset_errors();
    emu_take_reports(nullptr, 0);
}
#endif

XD_CUDA_TEST_MAIN()
