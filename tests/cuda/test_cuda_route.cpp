/* Routes from a teacher's ranks to a student's in memory of a GPU: every window has the bits of the CPU's. Ranks are
 * threads on GPUs of their own; teachers fill slots and students read them by work on their streams alone. */
#include "cuda_test.h"

#include "process_world.h"

#include <atomic>
#include <thread>

#if defined(XD_EMU)
#    include <nccl.h>

#    define XDISTILL_IMPLEMENTATION
#    include "../../xdistill_nccl.h"
#endif

enum { LENGTH = 12, COLUMNS = 11, SAMPLES = 5, STEPS = 2, RANKS_MAX = 10, PADDING = 3 };
enum { BATCH_BYTES = SAMPLES * LENGTH * (COLUMNS + PADDING) * 4 };

/* ---- a mesh on each side ---- */

struct Mesh {
    int tp, cp, dp, first; /* ranks [first, first + tp cp dp) of the world */
    int64_t micro_batch;
    bool balanced, replicated; /* two pieces of positions a rank; every rank of tp has all columns */
    int64_t columns[4], cuts[4], positions[4];
    int ranks() const {
        return tp * cp * dp;
    }
};

enum Transport { ON_HOST, SHARED, MESSAGES, BY_NCCL, PROCESSES };

struct Scene {
    Mesh teacher, student;
    xd_route_payload payload;
    xd_dtype source, wire, dtype; /* what is sent; NONE: slots are filled in place */
    bool reversed;                /* the teacher goes through its samples backwards */
    int ranks;
    Transport transport;
    std::vector<unsigned char> rows[RANKS_MAX]; /* what each rank has taken, in order */
    std::vector<int64_t> ids[RANKS_MAX];
    int64_t views[RANKS_MAX];
};

static void draw_cuts(Random *random, int64_t *cuts, int pieces, int64_t size) {
    cuts[0] = 0;
    for (int i = 1; i <= pieces; i++)
        cuts[i] = i == pieces ? size : cuts[i - 1] + random->below(size - cuts[i - 1] + 1);
}

static Mesh draw_mesh(Random *random) {
    Mesh m = {};
    do {
        m.tp = 1 + (int)random->below(3);
        m.cp = 1 + (int)random->below(3);
        m.dp = 1 + (int)random->below(2);
    } while (m.ranks() > 4);
    m.micro_batch = 1 + random->below(3);
    m.balanced = random->below(2) == 0;
    draw_cuts(random, m.columns, m.tp, COLUMNS);
    draw_cuts(random, m.cuts, m.dp, SAMPLES);
    draw_cuts(random, m.positions, m.cp, LENGTH);
    return m;
}

static Scene draw_scene(Random *random) {
    static const xd_dtype floats[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_NONE };
    Scene s = {};
    s.teacher = draw_mesh(random);
    s.student = draw_mesh(random);
    s.payload = (xd_route_payload)random->below(3);
    s.teacher.replicated = s.payload != XD_ROUTE_LOGITS;
    s.student.replicated = s.payload == XD_ROUTE_COLUMNS || random->below(3) > 0;
    s.source = floats[random->below(3)];
    s.wire = floats[random->below(2)];
    s.dtype = random->below(2) ? XD_DTYPE_NONE : floats[random->below(2)];
    s.reversed = random->below(3) == 0;
    s.student.first = (int)random->below(3) * s.teacher.ranks() / 2;
    return s;
}

/* A rank's side; false when it is not on it. */
static bool side_of(const Mesh &m, int rank, xd_route_span *spans, xd_route_side *out) {
    const int at = rank - m.first, t = at % m.tp, c = at / m.tp % m.cp, d = at / m.tp / m.cp;
    *out = xd_route_side();
    if (at < 0 || at >= m.ranks() || m.cuts[d] == m.cuts[d + 1]) return false;
    out->sample_begin = m.cuts[d];
    out->sample_count = m.cuts[d + 1] - m.cuts[d];
    out->micro_batch = m.micro_batch;
    out->positions = spans;
    out->span_count = 1;
    spans[0] = { m.positions[c], m.positions[c + 1] };
    if (m.balanced) {
        const int64_t piece = LENGTH / (2 * m.cp);
        out->span_count = 2;
        spans[0] = { c * piece, (c + 1) * piece };
        spans[1] = { (2 * m.cp - 1 - c) * piece, (2 * m.cp - c) * piece };
    }
    out->column_end = COLUMNS;
    if (!m.replicated) {
        out->column_begin = m.columns[t];
        out->column_end = m.columns[t + 1];
        if (out->column_end == 0) out->column_begin = out->column_end = COLUMNS; /* none: 0 and 0 are all */
    }
    return true;
}

/* ---- what is in a row ---- */

static double element(int step, int64_t sample, int64_t position, int64_t column) {
    static const double odd[] = { 0.0, -0.0, 1e-41, -3e-39, 3.3e38, -HUGE_VAL, NAN, 1.00390625 };
    const uint64_t at = (uint64_t)(((step * SAMPLES + sample) * LENGTH + position) * COLUMNS + column);
    Random random(at + 17);
    random.bits();
    return at % 13 == 5 ? odd[random.below(8)] : 40.0 * (double)random.unit();
}

static int64_t sample_at(const Scene *s, const xd_route_side &side, int64_t i) {
    return side.sample_begin + (s->reversed ? side.sample_count - 1 - i : i);
}

static int64_t held_of(const xd_route_side &side) {
    int64_t held = 0;
    for (int i = 0; i < side.span_count; i++) held += side.positions[i].end - side.positions[i].begin;
    return held;
}

static int64_t position_at(const xd_route_side &side, int64_t i) {
    const int64_t first = side.positions[0].end - side.positions[0].begin;
    return i < first ? side.positions[0].begin + i : side.positions[1].begin + i - first;
}

/* ---- one rank ---- */

struct Member {
    Scene *scene;
    int rank;
    xd_comm *world;
    xd_ctx *ctx;
    xd_cuda *cuda = nullptr;
    cudaStream_t stream = nullptr;
    const xd_kernels *kernels;
    xd_route *route = nullptr;
    xd_route_span spans[2][2];
    xd_route_side teacher, student;
    std::vector<std::vector<unsigned char>> batches; /* stay as they are while the GPU copies them */
    unsigned char *logits = nullptr, *log = nullptr; /* memory of the device */
    size_t logged = 0;

    Member(Scene *s, xd_comm *comm)
        : scene(s), rank(xd_comm_rank(comm)), world(comm), ctx(xd_comm_ctx(comm)) {
        if (s->transport == SHARED || s->transport == MESSAGES || s->transport == PROCESSES) use_gpu();
        kernels = xd_ctx_kernels(ctx);
        logits = (unsigned char *)kernels->memory.allocate(ctx, BATCH_BYTES);
        log = (unsigned char *)kernels->memory.allocate(ctx, STEPS * BATCH_BYTES);
    }
    ~Member() {
        kernels->memory.release(ctx, logits);
        kernels->memory.release(ctx, log);
        xd_cuda_destroy(cuda);
        if (stream) cudaStreamDestroy(stream);
    }
    Member(const Member &) = delete;

    void use_gpu() {
        int devices = 1;
        CHECK(cudaGetDeviceCount(&devices) == cudaSuccess);
        CHECK(cudaSetDevice(rank % devices) == cudaSuccess);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        xd_ctx_set_stream(ctx, stream);
        CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
    }
    void copy(void *to, const void *from, size_t bytes, xd_copy_kind kind) {
        const xd_launch launch = xd_ctx_launch(ctx);
        CHECK(kernels->memory.copy(&launch, to, from, bytes, kind) == XD_OK);
    }

    xd_result open() {
        int64_t backwards[SAMPLES];
        xd_route_desc d = {};
        side_of(scene->teacher, rank, spans[0], &teacher);
        side_of(scene->student, rank, spans[1], &student);
        d.payload = scene->payload;
        d.samples = SAMPLES;
        d.length = LENGTH;
        d.columns = COLUMNS;
        d.wire = scene->wire;
        d.dtype = scene->dtype;
        d.messages = scene->transport == MESSAGES;
        for (int64_t i = 0; i < teacher.sample_count; i++) backwards[i] = sample_at(scene, teacher, i);
        if (scene->reversed) teacher.samples = backwards;
        d.teacher = teacher;
        d.student = student;
        const xd_result result = xd_route_create(world, &d, &route);
        teacher.samples = nullptr;
        return result;
    }

    /* Rows of a micro-batch in the dtype, in host memory that stays. */
    const void *make(int step, int64_t begin, int64_t samples, xd_dtype dtype, int64_t stride) {
        const int64_t held = held_of(teacher), columns = teacher.column_end - teacher.column_begin;
        std::vector<unsigned char> data((size_t)(samples * held * stride) * xd_dtype_size(dtype) + 1);
        for (int64_t r = 0; r < samples * held; r++)
            for (int64_t c = 0; c < columns; c++)
                xd_store_f64(data.data(), dtype, r * stride + c,
                             element(step, sample_at(scene, teacher, begin + r / held),
                                     position_at(teacher, r % held), teacher.column_begin + c));
        batches.push_back(std::move(data));
        return batches.back().data();
    }

    /* All logits go through the same memory, so what is sent is overwritten behind the send. */
    xd_result send(int step, int64_t batch) {
        const int64_t begin = batch * teacher.micro_batch, left = teacher.sample_count - begin;
        const int64_t samples = left < teacher.micro_batch ? left : teacher.micro_batch;
        const int64_t columns = teacher.column_end - teacher.column_begin;
        int64_t ids[SAMPLES * COLUMNS], *slot_ids = nullptr;
        xd_rows rows = {};
        for (int64_t i = 0; i < samples * COLUMNS; i++)
            ids[i] = sample_at(scene, teacher, begin + i / COLUMNS) * 1000 + i % COLUMNS + step;
        if (scene->source == XD_DTYPE_NONE) {
            const xd_result result = xd_route_slot(route, &rows, &slot_ids);
            if (result != XD_OK) return result;
            const size_t bytes = (size_t)(rows.rows * rows.cols) * xd_dtype_size(rows.dtype);
            copy(rows.data, make(step, begin, samples, rows.dtype, rows.cols), bytes, XD_COPY_TO_DEVICE);
            if (slot_ids) memcpy(slot_ids, ids, (size_t)(samples * COLUMNS) * sizeof *ids);
            return xd_route_post(route);
        }
        rows.data = logits;
        rows.dtype = scene->source;
        rows.rows = samples * held_of(teacher);
        rows.cols = columns;
        rows.stride = batch % 2 ? columns : columns + PADDING;
        const size_t bytes = (size_t)(rows.rows * rows.stride) * xd_dtype_size(rows.dtype);
        copy(logits, make(step, begin, samples, rows.dtype, rows.stride), bytes, XD_COPY_TO_DEVICE);
        return xd_route_send(route, rows, scene->payload == XD_ROUTE_COLUMNS ? ids : nullptr);
    }

    /* Copies what it sees on the stream and goes on at once. */
    xd_result take() {
        xd_route_window w;
        const xd_result result = xd_route_take(route, &w);
        if (result != XD_OK) return result;
        const size_t size = xd_dtype_size(w.rows.dtype), bytes = (size_t)w.rows.cols * size;
        CHECK_EQ_INT(w.rows.rows, w.sample_count * held_of(student));
        for (int64_t r = 0; r < w.rows.rows; r++, logged += bytes)
            copy(log + logged, (char *)w.rows.data + (size_t)(r * w.rows.stride) * size, bytes,
                 XD_COPY_ON_DEVICE);
        CHECK((w.ids != nullptr) == (scene->payload == XD_ROUTE_COLUMNS));
        std::vector<int64_t> &seen = scene->ids[rank];
        if (w.ids) seen.insert(seen.end(), w.ids, w.ids + w.sample_count * COLUMNS);
        scene->views[rank] += w.is_view;
        return xd_route_release(route);
    }

    xd_result play() {
        xd_result result = open();
        if (cuda && scene->transport == SHARED) seal();
        for (int step = 0; step < STEPS && result == XD_OK; step++) {
            const xd_route_info info = xd_route_describe(route);
            int64_t posted = 0;
            CHECK(info.shared == (scene->transport != MESSAGES && scene->transport != BY_NCCL) ||
                  !info.slots);
            for (int64_t i = 0; i < info.takes && result == XD_OK; i++) {
                while (result == XD_OK && xd_route_describe(route).due > 0) result = send(step, posted++);
                if (result == XD_OK) result = take();
            }
            while (result == XD_OK && posted < info.posts) result = send(step, posted++);
        }
        if (cuda && scene->transport == SHARED) unseal();
        if (result == XD_OK) {
            scene->rows[rank].resize(logged);
            result = xd_read(ctx, scene->rows[rank].data(), log, logged);
        }
        xd_route_destroy(route);
        return result;
    }
};

static xd_result play_rank(xd_comm *world, void *argument) {
    Member member((Scene *)argument, world);
    return member.play();
}

static xd_ctx_desc patient() {
    xd_ctx_desc desc = {};
    desc.timeout_seconds = 300.0;
    return desc;
}

/* ---- ranks that are processes ---- */

/* What a rank has taken, where the test sees it. */
struct Harvest {
    size_t row_bytes, id_count;
    int64_t views;
    unsigned char rows[STEPS * BATCH_BYTES];
    int64_t ids[STEPS * SAMPLES * COLUMNS];
};

struct Field {
    Scene *scene;     /* each process has its own */
    Harvest *harvest; /* [RANKS_MAX], of all */
};

#if defined(XD_EMU)
/* A GPU works while the host does something else; an emulated one, only when somebody asks. This thread asks. */
struct Engine {
    std::atomic<bool> stop{ false };
    std::thread thread;
    explicit Engine(cudaStream_t stream)
        : thread([this, stream] {
              while (!stop) {
                  cudaStreamQuery(stream);
                  usleep(50);
              }
          }) {}
    ~Engine() {
        stop = true;
        thread.join();
    }
};
#else
struct Engine {
    explicit Engine(cudaStream_t) {}
};
#endif

static xd_result play_process(xd_comm *world, void *argument) {
    const Field *field = (const Field *)argument;
    const int rank = xd_comm_rank(world);
    Scene *s = field->scene;
    Member member(s, world);
    Engine engine(member.stream);
    const xd_result result = member.play();
    Harvest *h = &field->harvest[rank];
    h->row_bytes = s->rows[rank].size();
    h->id_count = s->ids[rank].size();
    h->views = s->views[rank];
    if (h->row_bytes) memcpy(h->rows, s->rows[rank].data(), h->row_bytes);
    if (h->id_count) memcpy(h->ids, s->ids[rank].data(), h->id_count * sizeof *h->ids);
    return result;
}

static void play_processes(Scene *s) {
    const xd_ctx_desc desc = patient();
    char message[256];
    Field field = { s, (Harvest *)process_memory(RANKS_MAX * sizeof(Harvest)) };
    CHECK(process_run(s->ranks, -1, &desc, play_process, &field, message) == XD_OK);
    CHECK_EQ_STR(message, "");
    for (int r = 0; r < s->ranks; r++) {
        const Harvest &h = field.harvest[r];
        s->rows[r].assign(h.rows, h.rows + h.row_bytes);
        s->ids[r].assign(h.ids, h.ids + h.id_count);
        s->views[r] = h.views;
    }
    munmap(field.harvest, RANKS_MAX * sizeof(Harvest));
}

#if defined(XD_EMU)
/* Ranks that share nothing but the network. */
static void play_nccl(Scene *s) {
    ncclUniqueId id;
    std::vector<std::thread> threads;
    ncclGetUniqueId(&id);
    emu_set_device_count(RANKS_MAX);
    for (int rank = 0; rank < s->ranks; rank++)
        threads.emplace_back([=] {
            xd_ctx_desc desc = patient();
            xd_nccl_desc nccl = {};
            xd_ctx *ctx = nullptr;
            xd_cuda *cuda = nullptr;
            xd_comm *comm = nullptr;
            cudaStream_t stream = nullptr;
            CHECK(cudaSetDevice(rank) == cudaSuccess);
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
            desc.stream = stream;
            nccl.id = &id;
            nccl.rank = rank;
            nccl.size = s->ranks;
            CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
            CHECK(xd_cuda_create(ctx, nullptr, &cuda) == XD_OK);
            CHECK(xd_comm_nccl(ctx, &nccl, &comm) == XD_OK);
            CHECK(play_rank(comm, s) == XD_OK);
            CHECK_EQ_STR(xd_last_error(ctx)->message, "");
            xd_comm_destroy(comm);
            xd_cuda_destroy(cuda);
            xd_ctx_destroy(ctx);
            cudaStreamDestroy(stream);
        });
    for (std::thread &thread : threads) thread.join();
    emu_set_device_count(4);
}
#endif

static void play(Scene *s, Transport transport) {
    const xd_ctx_desc desc = patient();
    const int students = s->student.first + s->student.ranks();
    xd_error error = {};
    s->ranks = (s->teacher.ranks() > students ? s->teacher.ranks() : students) + 1; /* the last has no side */
    s->transport = transport;
    if (transport == PROCESSES) return play_processes(s);
#if defined(XD_EMU)
    if (transport == BY_NCCL) return play_nccl(s);
#endif
    CHECK(xd_run_threads(s->ranks, &desc, play_rank, s, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
}

/* On the host, then the same by another transport. */
static void compare(const Scene &drawn, Transport transport) {
    Scene host = drawn, gpu = drawn;
    const xd_dtype wire = drawn.wire == XD_DTYPE_NONE ? XD_DTYPE_F32 : drawn.wire;
    size_t bytes = 0;
    play(&host, ON_HOST);
    play(&gpu, transport);
    for (int r = 0; r < host.ranks; r++) {
        bytes += host.rows[r].size();
        CHECK_ELEMENTS(drawn.dtype == XD_DTYPE_NONE ? wire : drawn.dtype, host.rows[r], gpu.rows[r]);
        CHECK_SAME(host.ids[r], gpu.ids[r]);
        CHECK_EQ_INT(gpu.views[r], transport == SHARED || transport == PROCESSES ? host.views[r] : 0);
    }
    CHECK(bytes > 0);
}

static void part_processes();
static void fail_processes();

/* First of all tests: a process that has used a GPU cannot fork one that uses it too. */
XD_TEST(processes_have_the_windows_of_the_cpu) {
    Random random(4);
    for (int i = 0; i < 6; i++) compare(draw_scene(&random), PROCESSES);
    part_processes();
    fail_processes();
}

XD_TEST(every_split_has_the_windows_of_the_cpu) {
    Random random(1);
    for (int i = 0; i < 14; i++) compare(draw_scene(&random), SHARED);
}

XD_TEST(messages_have_the_windows_of_the_cpu) {
    Random random(2);
    for (int i = 0; i < 8; i++) compare(draw_scene(&random), MESSAGES);
}

#if defined(XD_EMU)
XD_TEST(nccl_brings_the_windows_of_the_cpu) {
    Random random(3);
    for (int i = 0; i < 6; i++) compare(draw_scene(&random), BY_NCCL);
}
#endif

/* ---- taking turns ---- */

static bool in_process; /* ranks are processes, whose GPUs work by themselves */

/* A teacher (rank 0) and a student (rank 1) of one sample a micro-batch, two slots. */
struct Pair : RankGpu {
    xd_route *route = nullptr;
    Engine *engine = nullptr;

    explicit Pair(xd_comm *world, const xd_cuda_desc *cuda_desc = nullptr, bool on_gpu = true)
        : RankGpu(world, cuda_desc, on_gpu) {
        if (on_gpu && in_process) engine = new Engine(stream);
    }
    ~Pair() {
        xd_route_destroy(route);
        delete engine;
    }
    xd_route_desc desc() const {
        xd_route_desc d = {};
        d.samples = 4;
        d.length = 2;
        d.columns = 3;
        xd_route_side *side = rank ? &d.student : &d.teacher;
        side->sample_count = 4;
        side->micro_batch = 1;
        return d;
    }
    bool says(const char *text) const {
        return strstr(xd_last_error(ctx)->message, text) != nullptr;
    }
};

static xd_rows rows_at(const Device &memory) {
    xd_rows rows = { memory.at<void>(), XD_DTYPE_F32, 2, 3, 0 };
    return rows;
}

struct Seen {
    const void *slot[2], *window[2];
};

/* The first two windows are the slots themselves, on a GPU that both ranks see. */
static xd_result look(xd_comm *world, void *argument) {
    Pair p(world);
    Seen *seen = (Seen *)argument;
    const xd_route_desc d = p.desc();
    CHECK(xd_route_create(world, &d, &p.route) == XD_OK);
    Device data(std::vector<float>{ 1, 2, 3, 4, 5, 6 });
    for (int i = 0; i < 2; i++) {
        xd_rows slot = {};
        xd_route_window w = {};
        if (p.rank == 0) {
            CHECK(xd_route_slot(p.route, &slot, nullptr) == XD_OK);
            seen->slot[i] = slot.data;
            CHECK(xd_route_send(p.route, rows_at(data), nullptr) == XD_OK);
        } else {
            CHECK(xd_route_take(p.route, &w) == XD_OK && w.is_view);
            seen->window[i] = w.rows.data;
            float host[6];
            CHECK(xd_read(p.ctx, host, w.rows.data, sizeof host) == XD_OK);
            CHECK(host[0] == 1.0f && host[5] == 6.0f);
            CHECK(xd_route_release(p.route) == XD_OK);
        }
    }
    return XD_OK;
}

XD_TEST(a_window_in_one_slot_is_a_pointer_into_it) {
    Seen seen = {};
    const xd_ctx_desc desc = patient();
    CHECK(xd_run_threads(2, &desc, look, &seen, nullptr) == XD_OK);
    for (int i = 0; i < 2; i++) CHECK(seen.slot[i] && seen.slot[i] == seen.window[i]);
    CHECK(seen.slot[0] != seen.slot[1]);
}

/* The teacher destroys its route while the student looks at a slot; what is posted can still be taken, then the
 * student is told. Or the student goes first, with a window in its hands. */
static xd_result part_early(xd_comm *world, void *argument) {
    const bool teacher_first = *(const bool *)argument;
    Pair p(world);
    const xd_route_desc d = p.desc();
    CHECK(xd_route_create(world, &d, &p.route) == XD_OK);
    Device data(std::vector<float>{ 1, 2, 3, 4, 5, 6 });
    xd_route_window w = {};
    xd_result result = XD_OK;
    if (p.rank == 0) {
        for (int i = 0; i < 2; i++) CHECK(xd_route_send(p.route, rows_at(data), nullptr) == XD_OK);
        CHECK(xd_barrier(world) == XD_OK);
        if (!teacher_first) result = xd_route_send(p.route, rows_at(data), nullptr); /* has to wait */
        CHECK(result == (teacher_first ? XD_OK : XD_ERROR_PEER));
        CHECK(teacher_first || p.says("rank 1 has destroyed its route"));
    } else {
        CHECK(xd_route_take(p.route, &w) == XD_OK);
        CHECK(xd_barrier(world) == XD_OK);
        for (int i = 0; i < 2 && teacher_first; i++) {
            float host[6];
            CHECK(xd_read(p.ctx, host, w.rows.data, sizeof host) == XD_OK);
            CHECK(host[0] == 1.0f && host[5] == 6.0f);
            CHECK(xd_route_release(p.route) == XD_OK);
            result = xd_route_take(p.route, &w);
            CHECK(result == (i == 0 ? XD_OK : XD_ERROR_PEER));
        }
        CHECK(!teacher_first || p.says("rank 0"));
    }
    xd_route_destroy(p.route);
    p.route = nullptr;
    return XD_OK;
}

XD_TEST(a_ring_lasts_until_nobody_reads_it) {
    const xd_ctx_desc desc = patient();
    for (int first = 0; first < 2; first++) {
        bool teacher_first = first == 0;
        CHECK(xd_run_threads(2, &desc, part_early, &teacher_first, nullptr) == XD_OK);
    }
}

/* A process dies while the other waits for it: the teacher for a slot, the student for a window. */
static xd_result die(xd_comm *world, void *argument) {
    const bool teacher_dies = *(const bool *)argument;
    Pair p(world);
    const xd_route_desc d = p.desc();
    CHECK(xd_route_create(world, &d, &p.route) == XD_OK);
    Device data(std::vector<float>{ 1, 2, 3, 4, 5, 6 });
    xd_route_window w = {};
    xd_result result = XD_OK;
    for (int i = 0; result == XD_OK; i++) {
        if (i == 1 && teacher_dies == (p.rank == 0)) _exit(3);
        result = p.rank == 0 ? xd_route_send(p.route, rows_at(data), nullptr) : xd_route_take(p.route, &w);
        if (result == XD_OK && p.rank == 1) result = xd_route_release(p.route);
    }
    CHECK(result == XD_ERROR_PEER && p.says(teacher_dies ? "rank 0" : "rank 1"));
    return XD_OK;
}

static void run_pair(xd_rank_function function, void *argument, int victim) {
    const xd_ctx_desc desc = patient();
    char message[256];
    in_process = true;
    CHECK(process_run(2, victim, &desc, function, argument, message) == XD_OK);
    CHECK_EQ_STR(message, "");
    in_process = false;
}

static void part_processes() {
    for (int first = 0; first < 2; first++) {
        bool teacher_first = first == 0;
        run_pair(part_early, &teacher_first, -1);
        run_pair(die, &teacher_first, first);
    }
}

#if defined(XD_EMU)
/* The n-th CUDA call of one rank fails while the route is made: both ranks have it or neither, and nothing is left. */
struct Fault {
    int rank;
    long call;
    bool made[2], refused; /* refused: no shared memory, and messages that do not move a GPU's */
};

static xd_result create_with_fault(xd_comm *world, void *argument) {
    Fault *fault = (Fault *)argument;
    Pair p(world);
    const xd_route_desc d = p.desc();
    if (p.rank == fault->rank) emu_fail_call(fault->call);
    const xd_result result = xd_route_create(world, &d, &p.route);
    emu_fail_call(0);
    fault->made[p.rank] = result == XD_OK;
    if (result == XD_ERROR_UNSUPPORTED) fault->refused = true;
    CHECK(result == XD_OK || result == XD_ERROR_DEVICE || result == XD_ERROR_MEMORY ||
          result == XD_ERROR_PEER || result == XD_ERROR_UNSUPPORTED);
    return XD_OK;
}

static void fail_processes() {
    Fault *fault = (Fault *)process_memory(sizeof *fault);
    for (fault->rank = 0; fault->rank < 2; fault->rank++) {
        int failed = 0;
        fault->refused = false;
        for (fault->call = 1; fault->call < 60; fault->call++) {
            run_pair(create_with_fault, fault, -1);
            CHECK(fault->made[0] == fault->made[1]);
            failed += !fault->made[0];
        }
        CHECK(fault->made[0] && failed > 0 && fault->refused);
    }
    munmap(fault, sizeof *fault);
}
#else
static void fail_processes() {}
#endif

/* ---- errors ---- */

static xd_result misuse(xd_comm *world, void *) {
    Pair p(world);
    xd_route_desc d = p.desc();
    float host[6] = { 0 };
    int64_t ids[3] = { 7, 8, 9 };
    d.payload = XD_ROUTE_COLUMNS;
    CHECK(xd_route_create(world, &d, &p.route) == XD_OK);
    Device data(std::vector<float>(6)), far_ids(std::vector<int64_t>(3));
    xd_rows rows = rows_at(data), wrong = rows;
    xd_route_window w = {};
    if (p.rank == 1) {
        CHECK(xd_route_send(p.route, rows, ids) == XD_ERROR_STATE);
        CHECK(xd_barrier(world) == XD_OK); /* nothing of all that was posted before */
        CHECK(xd_route_take(p.route, &w) == XD_OK && w.ids[0] == 7 && w.ids[2] == 9);
        return xd_route_release(p.route);
    }
    wrong.data = host;
    CHECK(xd_route_send(p.route, wrong, ids) == XD_ERROR_ARGUMENT && p.says("memory of the host"));
    CHECK(xd_route_send(p.route, rows, far_ids.at<int64_t>()) == XD_ERROR_ARGUMENT);
    CHECK(p.says("lists are the host's"));
    CHECK(xd_route_send(p.route, rows, nullptr) == XD_ERROR_ARGUMENT);
    wrong = rows;
    wrong.cols = 2;
    CHECK(xd_route_send(p.route, wrong, ids) == XD_ERROR_SHAPE && p.says("2 by 2") && p.says("2 by 3"));
    wrong = rows;
    wrong.dtype = XD_DTYPE_F16;
    CHECK(xd_route_send(p.route, wrong, ids) == XD_ERROR_DTYPE);
    CHECK(xd_route_take(p.route, &w) == XD_ERROR_STATE);
    CHECK(xd_route_post(p.route) == XD_ERROR_STATE);
    CHECK(xd_barrier(world) == XD_OK);
    return xd_route_send(p.route, rows, ids);
}

XD_TEST(misuse_is_refused_and_leaves_the_ring_as_it_is) {
    const xd_ctx_desc desc = patient();
    xd_error error = {};
    CHECK(xd_run_threads(2, &desc, misuse, nullptr, &error) == XD_OK);
    CHECK_EQ_STR(error.message, "");
}

static xd_result mixed(xd_comm *world, void *) {
    Pair p(world, nullptr, xd_comm_rank(world) == 0);
    xd_route_desc d = p.desc();
    CHECK(xd_route_create(world, &d, &p.route) == XD_ERROR_MISMATCH && !p.route);
    CHECK(p.says("the kind of device"));
    return xd_barrier(world);
}

XD_TEST(one_rank_on_a_gpu_and_one_on_a_cpu_have_no_route) {
    const xd_ctx_desc desc = patient();
    CHECK(xd_run_threads(2, &desc, mixed, nullptr, nullptr) == XD_OK);
}

/* One rank's GPU has no room for the n-th block: both ranks have the route or neither. */
struct Scarce {
    int rank, calls, fails;
    bool messages, made[2];
};

static void *scarce_allocate(void *user, size_t bytes) {
    Scarce *s = (Scarce *)user;
    void *memory = nullptr;
    if (++s->calls == s->fails) return nullptr;
    CHECK(cudaMalloc(&memory, bytes) == cudaSuccess);
    return memory;
}

static void scarce_release(void *, void *memory) {
    CHECK(cudaFree(memory) == cudaSuccess);
}

static xd_result create_with_little(xd_comm *world, void *argument) {
    Scarce *s = (Scarce *)argument;
    xd_cuda_desc scarce = {};
    scarce.allocator = { scarce_allocate, scarce_release, s };
    Pair p(world, xd_comm_rank(world) == s->rank ? &scarce : nullptr);
    xd_route_desc d = p.desc();
    d.messages = s->messages;
    if (p.rank == s->rank) s->calls = 0; /* those of xd_cuda_create do not count */
    const xd_result result = xd_route_create(world, &d, &p.route);
    s->made[p.rank] = result == XD_OK;
    CHECK(s->made[p.rank] == (p.route != nullptr));
    if (p.rank == s->rank) CHECK(result == XD_OK || (result == XD_ERROR_MEMORY && p.says("no room for")));
    xd_route_destroy(p.route);
    p.route = nullptr;
    return XD_OK;
}

XD_TEST(no_room_on_one_gpu_is_an_error_of_all) {
    const xd_ctx_desc desc = patient();
    for (int way = 0; way < 4; way++) {
        int failed = 0;
        Scarce s = { way % 2, 0, 1, way / 2 == 1, {} };
        do {
            s.calls = -100;
            CHECK(xd_run_threads(2, &desc, create_with_little, &s, nullptr) == XD_OK);
            CHECK(s.made[0] == s.made[1]);
            failed += !s.made[0];
        } while (!s.made[0] && s.fails++ < 20);
        CHECK(s.made[0] && failed > 0);
    }
}

XD_CUDA_TEST_MAIN()
