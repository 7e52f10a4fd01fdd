/* A dozen of wrapped trainings on GPUs, by name: a small network under every wrapper, with tensor and context parallelism, has the
 * weights, averages, losses and norms of one GPU, bit for bit. Passes are computed on the host, of copies of what blocks show. */
#include "cuda_test.h"
#include "xd_test_topology.h"
#include "wrap_calls.h"

#include <math.h>

#include <string>
#include <vector>

enum { IN = 5, HID = 14, OUT = 6, POSITIONS = 4, LEAVES = 12, STEPS = 3, WEIGHTS = 3 };
enum Kind { DDP, SHARDED, FSDP, FSDP_WHOLE };
static const int shapes[WEIGHTS][2] = { { OUT, HID }, { OUT, 1 }, { HID, IN } };
static const char *const names[WEIGHTS] = { "down", "bias", "layer.up" };

struct Config {
    const char *name;
    int kind, dp, tp, cp, groups;
    int64_t leaves;
    bool half, queues; /* bf16 with f32 master weights */
    bool shared;       /* sequences are two leaves of half the positions, as ranks of cp have them */
    xd_reduction reduction = XD_REDUCTION_INVARIANT;
    int ranks() const { return dp * tp * cp; }
};

struct Result {
    std::vector<float> values[WEIGHTS], averages[WEIGHTS];
    double losses[STEPS][LEAVES], norms[STEPS];
};

struct Job {
    Config config;
    bool on_gpu;
    Result out;
};

typedef std::vector<float> Floats;

static float number(int64_t a, int64_t b, int64_t c) {
    return sinf((float)(17 * a + 5 * b + 3 * c + 1));
}

/* ---- a rank ---- */

struct Rank {
    Job &job;
    const Config &config;
    const RankGpu gpu;
    xd_comm *world;
    xd_ctx *host = nullptr;
    xd_grid *grid = nullptr;
    const xd_groups *groups = nullptr;
    xd_comm *tp = nullptr, *cp = nullptr; /* of the host */
    xd_layout *layouts[WEIGHTS] = {};
    xd_model *model = nullptr;
    xd_block *layer = nullptr;
    xd_queue *gathers = nullptr, *reductions = nullptr;
    xd_parallel *parallel = nullptr;
    int step = 0;

    Rank(xd_comm *comm, Job &j) : job(j), config(j.config), gpu(comm, nullptr, j.on_gpu), world(comm) {}
    ~Rank() {
        xd_parallel_destroy(parallel);
        xd_queue_destroy(gathers);
        xd_queue_destroy(reductions);
        xd_model_destroy(model);
        for (xd_layout *l : layouts) xd_layout_destroy(l);
        xd_comm_destroy(tp);
        xd_comm_destroy(cp);
        xd_grid_destroy(grid);
        xd_ctx_destroy(host);
    }
    Rank(const Rank &) = delete;

    xd_block *root() const { return xd_model_root(model); }
    /* Of a weight, the rows here. */
    int rows(int weight) const { return shapes[weight][0] / config.tp; }
    int first(int weight) const { return rows(weight) * xd_comm_rank(groups->tp); }
};

static xd_result open(Rank &r) {
    xd_ctx_desc plain = {};
    plain.reduction = r.config.reduction;
    plain.timeout_seconds = 60;
    XD_TRY(xd_ctx_create(&plain, &r.host));
    xd_expert_desc sizes = {};
    sizes.tp = r.config.tp;
    sizes.cp = r.config.cp;
    sizes.optimizer_instances = r.config.groups;
    XD_TRY(xd_grid_create(r.world, &sizes, &r.grid));
    r.groups = xd_grid_groups(r.grid);
    XD_TRY(xd_comm_fork(r.groups->tp, r.host, &r.tp));
    return xd_comm_fork(r.groups->cp, r.host, &r.cp);
}

static xd_result describe(Rank &r) {
    const xd_topology topology = line_of("tp", r.config.tp);
    xd_model_desc m = {};
    m.seed = 5;
    m.rank = xd_comm_rank(r.groups->tp);
    XD_TRY(xd_model_create(r.gpu.ctx, &m, &r.model));
    xd_block_desc layer = {};
    layer.name = "layer";
    layer.unit = XD_UNIT_ALWAYS;
    XD_TRY(xd_block_add(r.root(), &layer, &r.layer));
    for (int i = 0; i < WEIGHTS; i++) {
        xd_layout_desc l = {};
        l.ndim = 2;
        l.shape[0] = shapes[i][0];
        l.shape[1] = shapes[i][1];
        l.topology = &topology;
        l.placement[0].kind = XD_SHARD;
        XD_TRY(xd_layout_create(r.gpu.ctx, &l, &r.layouts[i]));
        xd_weight_desc d = {};
        d.name = i == 2 ? "up" : names[i];
        d.dtype = r.config.half ? XD_DTYPE_BF16 : XD_DTYPE_F32;
        d.ndim = 2;
        d.shape[0] = shapes[i][0];
        d.shape[1] = shapes[i][1];
        d.layout = r.layouts[i];
        d.init = { XD_INIT_NORMAL, 0.0f, 0.4f };
        XD_TRY(xd_weight_add(i == 2 ? r.layer : r.root(), &d, nullptr));
    }
    return xd_model_seal(r.model);
}

static xd_result wrap(Rank &r) {
    const Config &c = r.config;
    xd_comm *data = c.groups > 1 ? r.groups->intra_dp_cp : r.groups->dp_cp;
    if (c.queues) XD_TRY(xd_queue_create(data, nullptr, &r.gathers));
    if (c.queues) XD_TRY(xd_queue_create(data, nullptr, &r.reductions));
    xd_ddp_desc ddp = {};
    ddp.micro_batches = c.leaves;
    ddp.sharded_optimizer = c.kind == SHARDED;
    ddp.view_dtype = XD_DTYPE_F32;
    ddp.gathers = r.gathers;
    ddp.reductions = r.reductions;
    ddp.bucket_size = 50;
    xd_fsdp_desc fsdp = {};
    fsdp.micro_batches = c.leaves;
    fsdp.view_dtype = XD_DTYPE_F32;
    fsdp.accumulate_whole = c.kind == FSDP_WHOLE;
    fsdp.replicas = c.groups > 1 ? r.groups->inter_instances : nullptr;
    fsdp.gathers = r.gathers;
    fsdp.reductions = r.reductions;
    fsdp.prefetch = c.queues;
    return c.kind <= SHARDED ? wrap_over_ddp(r.model, data, &ddp, &r.parallel)
                             : wrap_over_fsdp(r.model, data, &fsdp, &r.parallel);
}

/* ---- passes ---- */

struct Weights {
    Floats w[WEIGHTS];
};

static Floats copy_of(const Rank &r, const void *from, int weight) {
    Floats out((size_t)(r.rows(weight) * shapes[weight][1]));
    CHECK(xd_read(r.gpu.ctx, out.data(), from, out.size() * sizeof(float)) == XD_OK);
    return out;
}

static xd_result read_weights(Rank &r, Weights &out) {
    xd_block_view view, inner;
    xd_pass pass = {};
    pass.kind = XD_PASS_FORWARD;
    XD_TRY(xd_block_begin(r.root(), pass, &view));
    XD_TRY(xd_block_begin(r.layer, pass, &inner));
    for (int i = 0; i < WEIGHTS; i++) out.w[i] = copy_of(r, i == 2 ? inner.values[0] : view.values[i], i);
    XD_TRY(xd_block_end(r.layer));
    return xd_block_end(r.root());
}

/* The parts of the ranks of a group, one after another. */
static Floats gather(xd_comm *comm, const Floats &part) {
    const std::vector<int64_t> counts((size_t)xd_comm_size(comm), (int64_t)part.size());
    Floats all(part.size() * counts.size());
    CHECK(xd_all_gather(comm, part.data(), all.data(), counts.data(), XD_DTYPE_F32) == XD_OK);
    return all;
}

/* Rows by columns from the parts of tensor-parallel ranks, each of which has some columns. */
static Floats columns_of(const Rank &r, const Floats &part, int rows, int columns) {
    const int each = columns / r.config.tp;
    const Floats all = gather(r.tp, part);
    Floats out((size_t)(rows * columns));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            out[(size_t)(i * columns + j)] = all[(size_t)((j / each * rows + i) * each + j % each)];
    return out;
}

/* A sequence, or as much of it as is here: leaves of this rank that follow each other, and the positions of each. */
struct Sequence {
    int parts, positions;      /* in each */
    int64_t k, leaf[POSITIONS];
    Floats x, hidden, d_y, d_hidden; /* [all positions here, ...] */
    int count() const { return parts * positions; }
};

static float bend(float x) {
    return x > 0.0f ? x : 0.125f * x;
}

/* hidden = bend(up x), and of the position before. */
static void forward_hidden(const Rank &r, const Weights &w, Sequence &s) {
    const int each = r.rows(2);
    Floats part((size_t)(s.count() * each));
    s.x.assign((size_t)(s.count() * IN), 0.0f);
    for (int p = 0; p < s.count(); p++) {
        const int64_t leaf = s.leaf[p / s.positions];
        for (int c = 0; c < IN && leaf >= 0; c++)
            s.x[(size_t)(p * IN + c)] = number(leaf + 40 * r.step, p % s.positions, c);
        for (int j = 0; j < each; j++) {
            float sum = 0.0f;
            for (int c = 0; c < IN; c++) sum += w.w[2][(size_t)(j * IN + c)] * s.x[(size_t)(p * IN + c)];
            part[(size_t)(p * each + j)] = bend(sum);
        }
    }
    s.hidden = columns_of(r, part, s.count(), HID);
}

/* A row of another position of the sequence, wherever that is: `by` positions on; zeros outside of it. */
static Floats shifted(const Rank &r, const Sequence &s, const Floats &rows, int by) {
    const Floats all = gather(r.cp, rows);
    const int whole = (int)(all.size() / HID), mine = xd_comm_rank(r.cp) * s.count();
    Floats out(rows.size(), 0.0f);
    for (int p = 0; p < s.count(); p++)
        for (int j = 0; j < HID; j++)
            if (mine + p + by >= 0 && mine + p + by < whole)
                out[(size_t)(p * HID + j)] = all[(size_t)((mine + p + by) * HID + j)];
    return out;
}

static float mixed(const Sequence &s, const Floats &before, int p, int j) {
    return s.hidden[(size_t)(p * HID + j)] + 0.5f * before[(size_t)(p * HID + j)];
}

/* y = down (hidden + 0.5 hidden before) + bias; losses, and the gradient of y. */
static void forward_out(Rank &r, const Weights &w, Sequence &s, const Floats &before) {
    const int each = r.rows(0);
    Floats part((size_t)(s.count() * each));
    for (int p = 0; p < s.count(); p++)
        for (int i = 0; i < each; i++) {
            float sum = w.w[1][(size_t)i];
            for (int j = 0; j < HID; j++) sum += w.w[0][(size_t)(i * HID + j)] * mixed(s, before, p, j);
            part[(size_t)(p * each + i)] = sum;
        }
    s.d_y = columns_of(r, part, s.count(), OUT);
    for (int p = 0; p < s.count(); p++) {
        const int64_t leaf = s.leaf[p / s.positions];
        double loss = 0.0;
        for (int i = 0; i < OUT; i++) {
            float &d = s.d_y[(size_t)(p * OUT + i)];
            d = leaf < 0 ? 0.0f : d - number(leaf, p % s.positions, 9 + i);
            loss += 0.5 * (double)d * (double)d;
        }
        if (leaf >= 0 && xd_comm_rank(r.tp) == 0) r.job.out.losses[r.step][leaf] += loss;
    }
}

/* The sum over outputs in two pieces, which two tensor-parallel ranks have, too. */
static void backward_hidden(const Rank &r, const Weights &w, Sequence &s) {
    const int each = r.rows(0), size = s.count() * HID;
    Floats pieces((size_t)(2 * size), 0.0f), sum((size_t)size);
    for (int p = 0; p < s.count(); p++)
        for (int i = 0; i < each; i++)
            for (int j = 0; j < HID; j++) {
                const int row = r.first(0) + i, piece = row >= OUT / 2;
                pieces[(size_t)(piece * size + p * HID + j)] +=
                    w.w[0][(size_t)(i * HID + j)] * s.d_y[(size_t)(p * OUT + row)];
            }
    const Floats all = gather(r.tp, pieces);
    const int second = (r.config.tp - 1) * 2 * size + size; /* of the last rank */
    for (int i = 0; i < size; i++) sum[(size_t)i] = all[(size_t)i] + all[(size_t)(second + i)];
    const Floats after = shifted(r, s, sum, 1);
    s.d_hidden.resize((size_t)size);
    for (int i = 0; i < size; i++) s.d_hidden[(size_t)i] = sum[(size_t)i] + 0.5f * after[(size_t)i];
}

/* The gradients of one leaf: of its positions. */
static void leaf_gradients(const Rank &r, const Sequence &s, const Floats &before, int part, Floats *g) {
    for (int i = 0; i < WEIGHTS; i++) g[i].assign((size_t)(r.rows(i) * shapes[i][1]), 0.0f);
    for (int p = part * s.positions; p < (part + 1) * s.positions; p++) {
        for (int i = 0; i < r.rows(0); i++) {
            const float d = s.d_y[(size_t)(p * OUT + r.first(0) + i)];
            g[1][(size_t)i] += d;
            for (int j = 0; j < HID; j++) g[0][(size_t)(i * HID + j)] += d * mixed(s, before, p, j);
        }
        for (int j = 0; j < r.rows(2); j++) {
            const size_t at = (size_t)(p * HID + r.first(2) + j);
            const float d = s.hidden[at] > 0.0f ? s.d_hidden[at] : 0.125f * s.d_hidden[at];
            for (int c = 0; c < IN; c++) g[2][(size_t)(j * IN + c)] += d * s.x[(size_t)(p * IN + c)];
        }
    }
}

/* To what is there: outside of INVARIANT mode a rank's leaves before. */
static void add(const Rank &r, void *to, Floats &from) {
    const size_t bytes = from.size() * sizeof(float);
    Floats sum(from.size());
    if (!to) return;
    CHECK(xd_read(r.gpu.ctx, sum.data(), to, bytes) == XD_OK);
    for (size_t i = 0; i < sum.size(); i++) from[i] = sum[i] + from[i];
    if (!r.job.on_gpu)
        memcpy(to, from.data(), bytes);
    else
        CHECK(cudaMemcpyAsync(to, from.data(), bytes, cudaMemcpyHostToDevice, r.gpu.stream) == cudaSuccess);
}

static xd_result backward_leaf(Rank &r, const Sequence &s, const Floats &before, int part) {
    Floats g[WEIGHTS];
    xd_block_view view, inner;
    xd_pass pass = {};
    pass.kind = XD_PASS_BACKWARD;
    pass.micro_batch = s.k + part;
    leaf_gradients(r, s, before, part, g);
    XD_TRY(xd_block_begin(r.root(), pass, &view));
    XD_TRY(xd_block_begin(r.layer, pass, &inner));
    for (int i = 0; i < WEIGHTS; i++) add(r, i == 2 ? inner.gradients[0] : view.gradients[i], g[i]);
    XD_TRY(xd_block_end(r.layer));
    XD_TRY(xd_block_end(r.root()));
    if (r.job.on_gpu) CHECK(cudaStreamSynchronize(r.gpu.stream) == cudaSuccess); /* `g` ends here */
    return XD_OK;
}

/* Leaves k to k + parts. */
static xd_result train_sequence(Rank &r, int64_t k, int parts, int positions) {
    Sequence s = {};
    Weights w;
    s.k = k;
    s.parts = parts;
    s.positions = positions;
    for (int i = 0; i < parts; i++) s.leaf[i] = xd_parallel_micro_batch(r.parallel, k + i);
    XD_TRY(read_weights(r, w));
    forward_hidden(r, w, s);
    const Floats before = shifted(r, s, s.hidden, -1);
    forward_out(r, w, s, before);
    backward_hidden(r, w, s);
    for (int i = 0; i < parts; i++) XD_TRY(backward_leaf(r, s, before, i));
    return XD_OK;
}

/* ---- a run ---- */

static void keep(Rank &r, const xd_tensor_part *parts, xd_optimizer *optimizer, xd_ema *average) {
    for (int i = 0; i < WEIGHTS; i++) {
        const xd_optimizer_state state = xd_optimizer_state_at(optimizer, i);
        const size_t count = (size_t)(parts[i].range.end - parts[i].range.begin);
        const int64_t to = (int64_t)r.first(i) * shapes[i][1] + parts[i].range.begin;
        if (parts[i].replica || count == 0) continue;
        const void *const from[2] = { state.master ? state.master : parts[i].data,
                                      xd_ema_view(average, i).shadow.value };
        CHECK(xd_read(r.gpu.ctx, &r.job.out.values[i][(size_t)to], from[0], count * sizeof(float)) == XD_OK);
        CHECK(xd_read(r.gpu.ctx, &r.job.out.averages[i][(size_t)to], from[1], count * sizeof(float)) == XD_OK);
    }
}

static xd_result train_step(Rank &r, const xd_param *params, xd_optimizer *optimizer, xd_ema *average) {
    const int parts = r.config.shared ? 2 / r.config.cp : 1, positions = r.config.shared ? POSITIONS / 2 : POSITIONS;
    for (int64_t k = 0; k < xd_parallel_micro_batches(r.parallel).opened; k += parts)
        XD_TRY(train_sequence(r, k, parts, positions));
    XD_TRY(xd_parallel_reduce(r.parallel));
    xd_gradient_norm_desc clip = {};
    xd_gradient_norm norm = {};
    const Device there(&norm, sizeof norm);
    xd_gradient_norm *place = r.job.on_gpu ? there.at<xd_gradient_norm>() : &norm;
    clip.params = params;
    clip.param_count = WEIGHTS;
    clip.max_norm = 0.5;
    XD_TRY(xd_gradient_norm_compute(r.gpu.ctx, r.world, &clip, place));
    CHECK(xd_read(r.gpu.ctx, &norm, place, sizeof norm) == XD_OK);
    if (xd_comm_rank(r.world) == 0) r.job.out.norms[r.step] = norm.norm;
    xd_optimizer_step_desc d = {};
    d.gradient_scale = &place->coefficient;
    d.averages = &average;
    d.average_count = 1;
    XD_TRY(xd_optimizer_step(optimizer, &d, nullptr));
    return xd_parallel_publish(r.parallel);
}

static xd_result train(Rank &r) {
    xd_param params[WEIGHTS];
    xd_tensor_part parts[WEIGHTS];
    xd_optimizer *optimizer = nullptr;
    xd_ema *average = nullptr;
    int64_t count = 0;
    XD_TRY(open(r));
    XD_TRY(describe(r));
    XD_TRY(wrap(r));
    XD_TRY(xd_parallel_params(r.parallel, WEIGHTS, params, &count));
    XD_TRY(xd_parallel_parts(r.parallel, WEIGHTS, parts, &count));
    xd_optimizer_desc adamw = xd_adamw_defaults(params, count);
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    adamw.learning_rate = 0.02;
    ema.decay = 0.9;
    ema.init_from_current = true;
    XD_TRY(xd_optimizer_create(r.gpu.ctx, &adamw, &optimizer));
    ema.params = params;
    ema.param_count = count;
    xd_result result = xd_ema_create(r.gpu.ctx, &ema, &average);
    for (r.step = 0; r.step < STEPS && result == XD_OK; r.step++)
        result = train_step(r, params, optimizer, average);
    if (result == XD_OK) keep(r, parts, optimizer, average);
    xd_ema_destroy(average);
    xd_optimizer_destroy(optimizer);
    return result;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    Rank r(world, *(Job *)argument);
    return train(r);
}

static bool execute(Job &job) {
    xd_ctx_desc desc = {};
    xd_error error;
    desc.reduction = job.config.reduction;
    desc.timeout_seconds = 60;
    memset(job.out.losses, 0, sizeof job.out.losses);
    memset(job.out.norms, 0, sizeof job.out.norms);
    for (int i = 0; i < WEIGHTS; i++)
        job.out.values[i].assign((size_t)(shapes[i][0] * shapes[i][1]), NAN),
            job.out.averages[i] = job.out.values[i];
    const xd_result result = xd_run_threads(job.config.ranks(), &desc, run_rank, &job, &error);
    if (result != XD_OK) printf("%s: %s\n", job.config.name, error.message);
    return result == XD_OK;
}

/* The same on one rank. */
static Job alone(const Config &like, bool on_gpu) {
    Job one = { like, on_gpu, {} };
    one.config.kind = FSDP;
    one.config.dp = one.config.tp = one.config.cp = 1;
    one.config.groups = 0;
    one.config.queues = false;
    CHECK(execute(one) && one.out.norms[STEPS - 1] > 0.5 && one.out.losses[STEPS - 1][0] > 0.0);
    return one;
}

static bool equal(const Result &a, const Result &b) {
    for (int i = 0; i < WEIGHTS; i++)
        if (a.values[i] != b.values[i] || a.averages[i] != b.averages[i]) return false;
    return memcmp(a.losses, b.losses, sizeof a.losses) == 0 && memcmp(a.norms, b.norms, sizeof a.norms) == 0;
}

static double apart(const Result &a, const Result &b) {
    double most = 0.0;
    for (int i = 0; i < WEIGHTS; i++)
        for (size_t j = 0; j < a.values[i].size(); j++)
            most = fmax(most, fabs((double)a.values[i][j] - (double)b.values[i][j]));
    return most;
}

static const Config dozen[] = {
    { "ddp, a leaf each", DDP, 3, 1, 1, 0, 3, false, false, false },
    { "ddp, three leaves each, bf16", DDP, 2, 1, 1, 0, 6, true, true, false },
    { "sharded optimizer, a leaf each, bf16", SHARDED, 3, 1, 1, 0, 3, true, false, false },
    { "sharded optimizer, uneven leaves", SHARDED, 2, 1, 1, 0, 5, false, true, false },
    { "fsdp, a leaf each", FSDP, 4, 1, 1, 0, 4, false, false, false },
    { "fsdp, three leaves each, bf16", FSDP, 2, 1, 1, 0, 6, true, true, false },
    { "fsdp, uneven leaves, one send", FSDP_WHOLE, 3, 1, 1, 0, 7, false, false, false },
    { "hsdp, a leaf each, bf16", FSDP, 4, 1, 1, 2, 4, true, false, false },
    { "hsdp, two leaves each", FSDP, 6, 1, 1, 3, 12, false, false, false },
    { "tp x fsdp, a leaf each", FSDP, 2, 2, 1, 0, 2, false, false, false },
    { "tp x fsdp, three leaves each, bf16", FSDP, 2, 2, 1, 0, 6, true, true, false },
    { "cp x fsdp, a leaf each", FSDP, 2, 1, 2, 0, 4, false, false, true },
    { "cp x fsdp, three leaves each, bf16", FSDP, 2, 1, 2, 0, 12, true, false, true },
};

XD_TEST(a_dozen_of_wrapped_trainings_on_gpus_have_the_bits_of_one) {
    for (const Config &c : dozen) {
        const Job one = alone(c, true);
        Job many = { c, true, {} };
        const bool ok = execute(many) && equal(one.out, many.out);
        if (!ok) printf("%s: other bits\n", c.name);
        CHECK(ok);
    }
}

XD_TEST(a_gpu_trains_to_the_weights_of_the_host) {
    for (bool half : { false, true }) {
        Config c = dozen[0];
        c.half = half;
        const Job gpu = alone(c, true), host = alone(c, false);
        CHECK(apart(gpu.out, host.out) <= 1e-5);
    }
}

XD_TEST(deterministic_trainings_on_gpus_are_close) {
    for (const Config &c : dozen) {
        if (c.half) continue;
        const Job one = alone(c, true);
        Job many = { c, true, {} };
        many.config.reduction = XD_REDUCTION_DETERMINISTIC;
        CHECK(execute(many));
        const double most = apart(one.out, many.out);
        if (most > 1e-4) printf("%s: weights within %g\n", c.name, most);
        CHECK(most <= 1e-4);
    }
}

XD_TEST_MAIN()
