/* A distillation on GPUs: steps, warm-up and samples have the bits of the host. Its networks compute on the host, of copies of what
 * they are given, so that nothing but the library differs. */
#include "cuda_test.h"
#include "dmd/state.h"
#include "wrap_calls.h"

#include <cmath>

enum { ELEMENTS = 6, INPUTS = ELEMENTS + 2, FEATURES = 3, HEADS = 2, SAMPLES = 3, LEAVES = 4, STEPS = 3 };

/* What a test runs: kinds of settings that meet different code. */
struct Setting {
    bool on_gpu, fsdp;
    xd_dtype dtype;
    xd_dmd_deal deal;
    bool fresh_noise, fdistill;
    xd_dmd_penalty penalty;
    std::vector<double> seen; /* everything that came of it, on rank 0 */
    bool own_draws = false;   /* normals by a function of the caller's, on the host */
    int sent = 0;             /* copies of a leaf's noise to the device */
};

static const int with_condition = 0, without_condition = 0; /* their addresses tell networks which it is */

/* Memory of a rank's context, as f32. */
struct Place {
    xd_ctx *ctx;
    cudaStream_t stream; /* NULL: of the host */

    std::vector<float> get(const void *from, int64_t count, xd_dtype dtype = XD_DTYPE_F32) const {
        const size_t size = xd_dtype_size(dtype), n = (size_t)count;
        std::vector<unsigned char> bytes(n * size + 1);
        std::vector<float> out(n);
        if (n) CHECK(xd_read(ctx, bytes.data(), from, n * size) == XD_OK);
        for (size_t i = 0; i < n; i++) out[i] = (float)xd_load_f64(bytes.data(), dtype, (int64_t)i);
        return out;
    }
    void put(void *to, const std::vector<float> &from, xd_dtype dtype = XD_DTYPE_F32) const {
        const size_t size = from.size() * xd_dtype_size(dtype);
        std::vector<unsigned char> bytes(size + 1);
        for (size_t i = 0; i < from.size(); i++) xd_store_f64(bytes.data(), dtype, (int64_t)i, (double)from[i]);
        if (!stream) {
            memcpy(to, bytes.data(), size);
            return;
        }
        CHECK(cudaMemcpyAsync(to, bytes.data(), size, cudaMemcpyHostToDevice, stream) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    }
};

/* One weight W. Most networks are y = W [x, t, 1], with features y_i^2; a discriminator's logits are W times the features. */
struct Net {
    Place place;
    const Setting *setting;
    bool judge;
    xd_model *model = nullptr;
    xd_block *block = nullptr;
    xd_parallel *parallel = nullptr;
    xd_optimizer *optimizer = nullptr;
    xd_ema *average = nullptr;
    xd_param param = {};
    int64_t count = 0;
    struct Slot {
        std::vector<float> in, y;
    } slots[4];

    int64_t rows() const { return judge ? (int64_t)HEADS : (int64_t)ELEMENTS; }
    int64_t columns() const { return judge ? (int64_t)FEATURES : (int64_t)INPUTS; }
};

/* What a pass has of the block. */
struct Open {
    std::vector<float> weight, gradient;
    void *to = nullptr;
};

static xd_result open_block(Net *net, const xd_network_call *call, bool backward, Open *out) {
    xd_pass pass = { XD_PASS_INFERENCE, 0, false };
    xd_block_view view;
    if (backward ? call->weights : call->keep) pass.kind = backward ? XD_PASS_BACKWARD : XD_PASS_FORWARD;
    if (pass.kind == XD_PASS_BACKWARD) pass.micro_batch = call->micro_batch, pass.more = call->more;
    XD_TRY(xd_block_begin(net->block, pass, &view));
    out->weight = net->place.get(view.values[0], net->rows() * net->columns());
    out->to = pass.kind == XD_PASS_BACKWARD ? view.gradients[0] : nullptr;
    if (out->to) out->gradient = net->place.get(out->to, net->rows() * net->columns());
    return XD_OK;
}

static xd_result close_block(Net *net, const Open &open) {
    if (open.to) net->place.put(open.to, open.gradient);
    return xd_block_end(net->block);
}

/* out [samples, rows] = in [samples, columns] W^T */
static std::vector<float> apply(const Net *net, const std::vector<float> &weight, const std::vector<float> &in) {
    const size_t rows = (size_t)net->rows(), columns = (size_t)net->columns(), n = in.size() / columns;
    std::vector<float> out(n * rows);
    for (size_t s = 0; s < n; s++)
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < columns; j++) out[s * rows + i] += weight[i * columns + j] * in[s * columns + j];
    return out;
}

/* Gradients by W and by `in`, of the gradient by the outputs. */
static std::vector<float> return_through(const Net *net, Open *open, const std::vector<float> &in, const std::vector<float> &slope) {
    const size_t rows = (size_t)net->rows(), columns = (size_t)net->columns(), n = in.size() / columns;
    std::vector<float> below(in.size());
    for (size_t s = 0; s < n; s++)
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < columns; j++) {
                const float g = slope[s * rows + i];
                if (open->to) open->gradient[i * columns + j] += g * in[s * columns + j];
                below[s * columns + j] += g * open->weight[i * columns + j];
            }
    return below;
}

static xd_result forward(void *user, const xd_network_call *call) {
    Net *net = (Net *)user;
    Net::Slot *slot = &net->slots[call->slot];
    const xd_dtype dtype = net->setting->dtype;
    Open open;
    XD_TRY(open_block(net, call, false, &open));
    if (net->judge) {
        slot->in = net->place.get(call->features[0], call->samples * FEATURES);
        net->place.put(call->raw, apply(net, open.weight, slot->in));
        return close_block(net, open);
    }
    const std::vector<float> x = net->place.get(call->hidden, call->samples * ELEMENTS, dtype);
    slot->in.clear();
    for (int64_t s = 0; s < call->samples; s++) {
        slot->in.insert(slot->in.end(), x.begin() + s * ELEMENTS, x.begin() + (s + 1) * ELEMENTS);
        slot->in.push_back((float)call->times[s]);
        slot->in.push_back(call->condition == &without_condition ? 0.25f : 1.0f);
    }
    slot->y = apply(net, open.weight, slot->in);
    net->place.put(call->raw, slot->y, dtype);
    std::vector<float> features;
    for (int64_t i = 0; call->features && i < call->samples * FEATURES; i++) {
        const float y = slot->y[(size_t)(i / FEATURES * ELEMENTS + i % FEATURES)];
        features.push_back(y * y);
    }
    if (call->features) net->place.put(call->features[0], features);
    return close_block(net, open);
}

static xd_result backward(void *user, const xd_network_call *call) {
    Net *net = (Net *)user;
    const Net::Slot *slot = &net->slots[call->slot];
    const int64_t outputs = call->samples * net->rows();
    std::vector<float> slope((size_t)outputs);
    Open open;
    XD_TRY(open_block(net, call, true, &open));
    if (call->raw_gradient) slope = net->place.get(call->raw_gradient, outputs);
    if (call->feature_gradients) {
        const std::vector<float> by = net->place.get(call->feature_gradients[0], call->samples * FEATURES);
        for (size_t i = 0; i < by.size(); i++) {
            const size_t at = i / FEATURES * ELEMENTS + i % FEATURES;
            slope[at] += 2.0f * slot->y[at] * by[i];
        }
    }
    const std::vector<float> in =
        net->judge ? net->place.get(call->features[0], call->samples * FEATURES) : slot->in;
    const std::vector<float> below = return_through(net, &open, in, slope);
    if (call->input_gradients) net->place.put(call->input_gradients[0], below);
    std::vector<float> hidden;
    for (size_t i = 0; call->hidden_gradient && i < below.size(); i++)
        if (i % INPUTS < ELEMENTS) hidden.push_back(below[i]);
    if (call->hidden_gradient) net->place.put(call->hidden_gradient, hidden);
    return close_block(net, open);
}

/* By W of <v, sum over heads of W's rows>. */
static xd_result penalty(void *user, const xd_network_call *call) {
    Net *net = (Net *)user;
    Open open;
    XD_TRY(open_block(net, call, true, &open));
    const std::vector<float> v = net->place.get(call->directions[0], call->samples * FEATURES);
    for (size_t i = 0; i < v.size(); i++)
        for (size_t h = 0; h < HEADS; h++) open.gradient[h * FEATURES + i % FEATURES] += v[i];
    return close_block(net, open);
}

static void make_net(Net *net, xd_comm *world, xd_dmd_role role) {
    const Setting *setting = net->setting;
    xd_model_desc m = {};
    xd_weight_desc w = {};
    xd_ddp_desc ddp = {};
    xd_fsdp_desc fsdp = {};
    m.seed = (uint64_t)role;
    w.name = "w";
    w.dtype = XD_DTYPE_F32;
    w.ndim = 2;
    w.shape[0] = net->rows();
    w.shape[1] = net->columns();
    w.init.kind = XD_INIT_NORMAL;
    w.init.scale = 0.4f;
    ddp.micro_batches = fsdp.micro_batches = LEAVES;
    fsdp.accumulate_whole = true; /* warm-up goes backward once for each rung */
    CHECK(xd_model_create(net->place.ctx, &m, &net->model) == XD_OK);
    net->block = xd_model_root(net->model);
    CHECK(xd_weight_add(net->block, &w, nullptr) == XD_OK && xd_model_seal(net->model) == XD_OK);
    CHECK((setting->fsdp ? wrap_over_fsdp(net->model, world, &fsdp, &net->parallel)
                         : wrap_over_ddp(net->model, world, &ddp, &net->parallel)) == XD_OK);
    CHECK(xd_parallel_params(net->parallel, 1, &net->param, &net->count) == XD_OK);
    xd_optimizer_desc adamw = xd_adamw_defaults(&net->param, net->count);
    xd_ema_desc average = xd_ema_defaults(XD_EMA_RAMP);
    adamw.learning_rate = 0.01;
    CHECK(xd_optimizer_create(net->place.ctx, &adamw, &net->optimizer) == XD_OK);
    average.params = &net->param;
    average.param_count = net->count;
    CHECK(xd_ema_create(net->place.ctx, &average, &net->average) == XD_OK);
}

static void free_net(Net *net) {
    xd_ema_destroy(net->average);
    xd_optimizer_destroy(net->optimizer);
    xd_parallel_destroy(net->parallel);
    xd_model_destroy(net->model);
}

/* ---- a run ---- */

static const double rungs[] = { 0.9, 0.55, 0.2, 0.0 };
static const int64_t feature_elements[] = { FEATURES };

static xd_dmd_desc settings_of(const Setting &setting, xd_comm *world, Net *nets) {
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_ORIGINAL);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        Net *net = &nets[role];
        d.networks[role] = {};
        d.networks[role].user = net;
        d.networks[role].predicts = XD_PREDICT_FLOW;
        d.networks[role].forward = forward;
        d.networks[role].backward = backward;
        d.trainers[role].parallel = net->parallel;
        d.trainers[role].optimizer = net->optimizer;
        d.trainers[role].averages = &net->average;
        d.trainers[role].average_count = 1;
        d.trainers[role].max_norm = 0.5;
    }
    d.networks[XD_DMD_TEACHER].feature_count = 1;
    d.networks[XD_DMD_TEACHER].feature_elements = feature_elements;
    d.networks[XD_DMD_TEACHER].guidance.rescale = 0.3;
    d.networks[XD_DMD_FAKE_SCORE].guidance = { true, 1.25, 0.5 };
    d.networks[XD_DMD_DISCRIMINATOR].heads = HEADS;
    d.networks[XD_DMD_DISCRIMINATOR].penalty = penalty;
    d.data = world;
    d.sizes.samples = SAMPLES;
    d.sizes.step_samples = SAMPLES * LEAVES;
    d.sizes.elements = ELEMENTS;
    d.sizes.dtype = setting.dtype;
    d.student_times.kind = d.fake_times.kind = XD_TIME_UNIFORM;
    d.student_times.min_t = d.fake_times.min_t = 0.05;
    d.student_times.max_t = d.fake_times.max_t = 0.95;
    d.rungs.steps = 3;
    d.rungs.list = rungs;
    d.rungs.roll_out = true;
    d.rungs.deal = setting.deal;
    d.rungs.fresh_noise = setting.fresh_noise;
    d.guided = true;
    d.guidance_scale = 1.5;
    d.fake_loss.space = XD_PREDICT_X0;
    d.gan.weight = 0.1;
    d.gan.r1_weight = 0.2;
    d.gan.r1_alpha = 0.1;
    d.gan.penalty = setting.penalty;
    d.gan.fdistill.on = setting.fdistill;
    d.gan.fdistill.lower = 0.1;
    d.gan.fdistill.upper = 20.0;
    d.gan.fdistill.bins = 3;
    d.gan.fdistill.rate = 0.5;
    d.frequency = 2;
    d.own_samples = setting.penalty == XD_DMD_PENALTY_SLOPE;
    d.regression.substeps = 2;
    d.seed = 7;
    return d;
}

/* The same numbers, drawn by the caller. */
static xd_result draw_normals(void *, const xd_dmd_draw *draw, float *out) {
    xd_philox random = draw->random;
    for (int64_t i = 0; i < draw->rows; i++, random.sample++)
        xd_philox_fill_normal(&random, draw->first, draw->columns, out + i * draw->columns);
    return XD_OK;
}

static const xd_dmd_draws drawn_by_caller = { nullptr, draw_normals, nullptr, nullptr };

/* Counts what the library copies to the device and is as large as the f32 noise of a leaf; nothing else is. */
static thread_local int sent;
static thread_local xd_result (*real_copy)(const xd_launch *, void *, const void *, size_t, xd_copy_kind);

static xd_result counted_copy(const xd_launch *launch, void *to, const void *from, size_t bytes, xd_copy_kind kind) {
    sent += kind == XD_COPY_TO_DEVICE && bytes == SAMPLES * ELEMENTS * sizeof(float);
    return real_copy(launch, to, from, bytes, kind);
}

static void count_copies(xd_ctx *ctx) {
    xd_kernels *kernels = const_cast<xd_kernels *>(xd_ctx_kernels(ctx));
    sent = 0;
    real_copy = kernels->memory.copy;
    kernels->memory.copy = counted_copy;
}

struct Run {
    Place place;
    const Setting *setting;
    std::vector<void *> real; /* of each leaf, in memory of the device */
};

static xd_result batch_of(void *user, int64_t leaf, xd_dmd_batch *out) {
    Run *run = (Run *)user;
    out->samples = SAMPLES;
    out->first = leaf * SAMPLES;
    out->real = run->real[(size_t)leaf];
    out->condition = &with_condition;
    out->negative = &without_condition;
    return XD_OK;
}

static void note(std::vector<double> *seen, const xd_dmd_values &v) {
    CHECK(!v.skipped);
    for (double x : { v.vsd, v.generator, v.fake_score, v.discriminator, v.r1, v.distance, v.regression }) seen->push_back(x);
    for (double x : v.norms) seen->push_back(x);
}

static void note_weights(std::vector<double> *seen, const Net &net) {
    for (const xd_param &p : { net.param, xd_ema_view(net.average, 0).shadow })
        for (float x : net.place.get(p.value, net.count ? p.count : 0)) seen->push_back((double)x);
}

/* Samples of all kinds; each rank draws the same. */
static void sample(const Place &place, const Setting &setting, const xd_dmd_desc &d, std::vector<double> *seen) {
    for (int kind = XD_SAMPLER_ODE; kind <= XD_SAMPLER_HEUN; kind++) {
        xd_sampler_desc s = xd_sampler_of_student(&d);
        xd_sampler *sampler = nullptr;
        s.network.guidance = {};
        s.kind = (xd_sampler_kind)kind;
        s.guided = kind % 2 == 1;
        s.guidance_scale = 2.0;
        xd_dmd_batch batch = {};
        batch.samples = SAMPLES;
        batch.condition = &with_condition;
        batch.negative = &without_condition;
        CHECK(xd_sampler_create(place.ctx, &s, &sampler) == XD_OK);
        const size_t bytes = SAMPLES * ELEMENTS * xd_dtype_size(setting.dtype);
        void *out = xd_ctx_kernels(place.ctx)->memory.allocate(place.ctx, bytes);
        CHECK(out && xd_sampler_run(sampler, &batch, out) == XD_OK);
        for (float x : place.get(out, SAMPLES * ELEMENTS, setting.dtype)) seen->push_back((double)x);
        xd_ctx_kernels(place.ctx)->memory.release(place.ctx, out);
        xd_sampler_destroy(sampler);
    }
}

static void fill_real(Run *run) {
    const xd_ctx *ctx = run->place.ctx;
    for (int64_t leaf = 0; leaf < LEAVES; leaf++) {
        std::vector<float> values;
        Random random((uint64_t)leaf + 11);
        for (int i = 0; i < SAMPLES * ELEMENTS; i++) values.push_back(random.unit());
        void *at = xd_ctx_kernels(ctx)->memory.allocate(run->place.ctx,
                                                        values.size() * xd_dtype_size(run->setting->dtype));
        CHECK(at != nullptr);
        run->place.put(at, values, run->setting->dtype);
        run->real.push_back(at);
    }
}

static xd_result distil(xd_comm *world, void *argument) {
    Setting &setting = *(Setting *)argument;
    const RankGpu p(world, nullptr, setting.on_gpu);
    const Place place = { p.ctx, p.stream };
    std::vector<double> seen;
    Run run = { place, &setting, {} };
    std::vector<Net> nets(XD_DMD_ROLES);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        nets[(size_t)role].place = place;
        nets[(size_t)role].setting = &setting;
        nets[(size_t)role].judge = role == XD_DMD_DISCRIMINATOR;
        make_net(&nets[(size_t)role], world, (xd_dmd_role)role);
    }
    fill_real(&run);
    xd_dmd_desc d = settings_of(setting, world, nets.data());
    xd_dmd *dmd = nullptr;
    if (setting.own_draws) d.draws = &drawn_by_caller;
    if (setting.on_gpu) count_copies(p.ctx);
    xd_dmd_values values;
    XD_TRY(xd_dmd_create(p.ctx, &d, &dmd));
    XD_TRY(xd_dmd_warm_up_step(dmd, batch_of, &run, &values));
    note(&seen, values);
    for (int step = 0; step < STEPS; step++) {
        XD_TRY(xd_dmd_step(dmd, batch_of, &run, &values));
        note(&seen, values);
    }
    double bins[3] = { 0.0, 0.0, 0.0 };
    if (setting.fdistill) XD_TRY(xdi_dmd_bins(dmd, bins));
    seen.insert(seen.end(), bins, bins + 3);
    sample(place, setting, d, &seen);
    for (const Net &net : nets) note_weights(&seen, net);
    if (p.rank == 0) setting.seen = seen, setting.sent = setting.on_gpu ? sent : 0;
    xd_dmd_destroy(dmd);
    for (void *at : run.real) xd_ctx_kernels(p.ctx)->memory.release(p.ctx, at);
    for (Net &net : nets) free_net(&net);
    return XD_OK;
}

static Setting run_once(Setting setting, int ranks, bool on_gpu) {
    xd_ctx_desc desc = {};
    xd_error error;
    desc.reduction = XD_REDUCTION_INVARIANT;
    desc.timeout_seconds = 60;
    setting.on_gpu = on_gpu;
    const xd_result result = xd_run_threads(ranks, &desc, distil, &setting, &error);
    if (result != XD_OK) printf("%d ranks, %s: %s\n", ranks, on_gpu ? "GPU" : "host", error.message);
    CHECK(result == XD_OK);
    return setting;
}

/* The same numbers: bits, but for what f-distillation takes from exp, whose last bit is a device's own. */
static void check_seen(const std::vector<double> &a, const std::vector<double> &b, bool fdistill) {
    if (fdistill && code_of_nvcc()) {
        CHECK_EQ_INT(a.size(), b.size());
        for (size_t i = 0; i < a.size() && i < b.size(); i++) CHECK_NEAR(a[i], b[i], 1e-5 * fmax(1.0, fabs(b[i])));
        return;
    }
    CHECK_SAME(a, b);
}

XD_TEST(a_distillation_on_gpus_has_the_bits_of_the_host) {
    static const struct {
        int ranks;
        Setting setting;
    } cases[] = {
        { 1, { false, false, XD_DTYPE_F32, XD_DMD_ONE_RUNG, true, true, XD_DMD_PENALTY_SLOPE, {} } },
        { 2, { false, true, XD_DTYPE_F32, XD_DMD_RUNGS_IN_TURN, false, true, XD_DMD_PENALTY_DIFFERENCE, {} } },
        { 2, { false, false, XD_DTYPE_BF16, XD_DMD_RUNGS_IN_TURN, true, false, XD_DMD_PENALTY_SLOPE, {} } },
        { 1, { false, true, XD_DTYPE_F16, XD_DMD_ONE_RUNG, false, false, XD_DMD_PENALTY_DIFFERENCE, {} } },
    };
    for (const auto &c : cases) {
        const Setting host = run_once(c.setting, c.ranks, false), gpu = run_once(c.setting, c.ranks, true);
        CHECK(host.seen.size() > 100);
        check_seen(gpu.seen, host.seen, c.setting.fdistill);
        for (double x : host.seen) CHECK(std::isfinite(x));
        CHECK_EQ_INT(gpu.sent, 0); /* noise is drawn there */
    }
}

XD_TEST(draws_of_the_caller_go_to_the_gpu_and_have_the_bits_of_those_that_it_makes) {
    for (xd_dtype dtype : { XD_DTYPE_F32, XD_DTYPE_BF16 }) {
        Setting setting = { false, false, dtype, XD_DMD_ONE_RUNG, true, true, XD_DMD_PENALTY_SLOPE, {} };
        const Setting made = run_once(setting, 1, true);
        setting.own_draws = true;
        const Setting given = run_once(setting, 1, true), host = run_once(setting, 1, false);
        CHECK_SAME(made.seen, given.seen);
        check_seen(made.seen, host.seen, setting.fdistill);
        CHECK(given.sent > 20);
    }
}

/* What ranks have of samples that are split, drawn there, is the whole sample's of the host. */
XD_TEST(noise_of_split_samples_is_drawn_on_the_gpu) {
    static const int64_t cuts[] = { 0, 3, 4, 17, 30 };
    static const double list[] = { 0.9, 0.4, 0.0 };
    for (xd_dtype dtype : narrow) {
        Gpu gpu;
        xd_ctx *host = nullptr;
        CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
        count_copies(gpu.ctx);
        const size_t size = xd_dtype_size(dtype);
        std::vector<unsigned char> whole(3 * 30 * size);
        for (size_t c = 0; c < 5; c++) { /* the whole one first */
            const int64_t first = c ? cuts[c - 1] : 0, elements = c ? cuts[c] - first : 30;
            xd_ctx *ctx = c ? gpu.ctx : host;
            xd_sampler_desc s = {};
            xd_sampler *sampler = nullptr;
            xd_dmd_batch batch = {};
            s.network.forward = forward;
            s.network.predicts = XD_PREDICT_FLOW;
            s.schedule = xd_noise_defaults(XD_NOISE_FLOW);
            s.steps = 2;
            s.list = list;
            s.samples = 3;
            s.elements = elements;
            s.first_element = first;
            s.dtype = dtype;
            s.seed = 21;
            s.step = 6;
            batch.samples = 3;
            batch.first = 12;
            CHECK(xd_sampler_create(ctx, &s, &sampler) == XD_OK);
            std::vector<unsigned char> here((size_t)(3 * elements) * size);
            const Device there(here);
            CHECK(xdi_sampler_noise(sampler, &batch, c ? there.at() : whole.data()) == XD_OK);
            gpu.wait();
            here = there.host<unsigned char>();
            for (int64_t i = 0; c && i < 3; i++)
                CHECK(memcmp(here.data() + (size_t)(i * elements) * size,
                             whole.data() + (size_t)(i * 30 + first) * size, (size_t)elements * size) == 0);
            xd_sampler_destroy(sampler);
        }
        CHECK_EQ_INT(sent, 0);
        xd_ctx_destroy(host);
    }
}

XD_TEST(latents_on_gpus_are_packed_and_unpacked_as_on_the_host) {
    const xd_latents shape = { 2, 3, 4, 6, XD_DTYPE_BF16 };
    const size_t count = 2 * 3 * 4 * 6;
    std::vector<uint16_t> latents, rows(count), back(count);
    for (size_t i = 0; i < count; i++) latents.push_back((uint16_t)(i * 401 + 7));
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    xd_rows packed = { rows.data(), XD_DTYPE_BF16, 2 * 2 * 3, 12, 0 };
    CHECK(xd_latent_pack(host, &shape, latents.data(), packed) == XD_OK);
    xd_ctx_destroy(host);
    const Gpu gpu;
    const Device in(latents), out(back), again(back);
    packed.data = out.at();
    CHECK(xd_latent_pack(gpu.ctx, &shape, in.at(), packed) == XD_OK);
    CHECK(xd_latent_unpack(gpu.ctx, &shape, packed, again.at()) == XD_OK);
    gpu.wait();
    CHECK_SAME(out.host<uint16_t>(), rows);
    CHECK_SAME(again.host<uint16_t>(), latents);
}

XD_CUDA_TEST_MAIN()
