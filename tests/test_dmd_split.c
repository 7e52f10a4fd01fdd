/* Distillations whose samples are split over ranks, or narrow, and what ranks must agree about. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "xd_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WHOLE = 6, HEADS = 2, LEAVES = 4, IN_LEAF = 2, STEPS = 8, WARM_UPS = 3 };

/* y = w x (1 + t) + b, element by element: a rank needs its own elements only. */
typedef struct net {
    xd_ctx *ctx;
    xd_model *model;
    xd_block *block;
    xd_parallel *parallel;
    xd_optimizer *optimizer;
    xd_param params[2];
    int64_t count, elements;
    xd_dtype dtype;
} net;

typedef struct run {
    int split, data; /* ranks */
    xd_dtype dtype;
    bool guided, fresh, judged;
    int fail_rank, fail_batch,
        fail_call;               /* -1: nobody; the leaf that is refused to it, or the call that fails */
    float weights[3][2 * WHOLE]; /* of each role that trains, in the end */
    xd_dmd_values values[STEPS + WARM_UPS];
    xd_result results[4];
} run;

static float load(const void *x, xd_dtype dtype, int64_t i) {
    return dtype == XD_DTYPE_BF16 ? xd_f32_from_bf16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static void store(void *x, xd_dtype dtype, int64_t i, float value) {
    if (dtype == XD_DTYPE_BF16)
        ((uint16_t *)x)[i] = xd_bf16_from_f32(value);
    else
        ((float *)x)[i] = value;
}

static xd_result open_forward(const net *n, const xd_network_call *call, xd_block_view *view) {
    const xd_pass pass = { .kind = call->keep ? XD_PASS_FORWARD : XD_PASS_INFERENCE,
                           .micro_batch = call->micro_batch,
                           .more = call->more };
    return xd_block_begin(n->block, pass, view);
}

static xd_result forward(void *user, const xd_network_call *call) {
    net *n = (net *)user;
    xd_block_view view;
    XD_TRY(open_forward(n, call, &view));
    const float *w = (const float *)view.values[0], *b = (const float *)view.values[1];
    for (int64_t i = 0; i < call->samples * n->elements; i++) {
        const int64_t e = i % n->elements;
        const float t = (float)call->times[i / n->elements], more = call->condition ? 1.3f : 1.0f;
        store(call->raw, n->dtype, i, more * w[e] * load(call->hidden, n->dtype, i) * (1.0f + t) + b[e]);
    }
    return xd_block_end(n->block);
}

static xd_result backward(void *user, const xd_network_call *call) {
    net *n = (net *)user;
    xd_block_view view;
    XD_TRY(xd_block_begin(
        n->block, (xd_pass){ .kind = XD_PASS_BACKWARD, .micro_batch = call->micro_batch, .more = call->more },
        &view));
    float *w = (float *)view.gradients[0], *b = (float *)view.gradients[1];
    for (int64_t i = 0; i < call->samples * n->elements; i++) {
        const int64_t e = i % n->elements;
        const float t = (float)call->times[i / n->elements];
        w[e] += call->raw_gradient[i] * load(call->hidden, n->dtype, i) * (1.0f + t);
        b[e] += call->raw_gradient[i];
    }
    return xd_block_end(n->block);
}

/* A teacher whose feature is the time of a sample, and a discriminator linear in it: what ranks of one sample all have. */
static xd_result forward_with_time(void *user, const xd_network_call *call) {
    for (int64_t i = 0; i < call->samples && call->features; i++)
        call->features[0][i] = (float)call->times[i];
    return forward(user, call);
}

static xd_result backward_of_time(void *user, const xd_network_call *call) {
    const net *n = (const net *)user;
    memset(call->hidden_gradient, 0, (size_t)(call->samples * n->elements) * sizeof(float));
    return XD_OK;
}

static xd_result judge(void *user, const xd_network_call *call) {
    net *n = (net *)user;
    xd_block_view view;
    XD_TRY(open_forward(n, call, &view));
    const float *w = (const float *)view.values[0], *b = (const float *)view.values[1];
    for (int64_t i = 0; i < call->samples * HEADS; i++)
        ((float *)call->raw)[i] = 4.0f * w[i % HEADS] * call->features[0][i / HEADS] - b[i % HEADS];
    return xd_block_end(n->block);
}

static xd_result judge_backward(void *user, const xd_network_call *call) {
    net *n = (net *)user;
    const xd_pass_kind kind = call->weights ? XD_PASS_BACKWARD : XD_PASS_INFERENCE;
    xd_block_view view;
    XD_TRY(xd_block_begin(
        n->block, (xd_pass){ .kind = kind, .micro_batch = call->micro_batch, .more = call->more }, &view));
    float *w = (float *)view.gradients[0], *b = (float *)view.gradients[1];
    for (int64_t i = 0; i < call->samples && call->input_gradients; i++) call->input_gradients[0][i] = 0.0f;
    for (int64_t i = 0; i < call->samples * HEADS && call->weights; i++) {
        w[i % HEADS] += 4.0f * call->raw_gradient[i] * call->features[0][i / HEADS];
        b[i % HEADS] -= call->raw_gradient[i];
    }
    return xd_block_end(n->block);
}

static xd_result make_net(net *n, xd_comm *data, int role, bool trains) {
    xd_ctx *ctx = n->ctx = xd_comm_ctx(data);
    xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { n->elements } };
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 1 }, &n->model));
    XD_TRY(xd_block_add(xd_model_root(n->model), &(xd_block_desc){ .name = "all", .unit = XD_UNIT_ALWAYS },
                        &n->block));
    w.init = (xd_init){ XD_INIT_CONSTANT, .center = 0.3f - 0.1f * (float)role };
    XD_TRY(xd_weight_add(n->block, &w, NULL));
    w.name = "b";
    w.init = (xd_init){ XD_INIT_CONSTANT, .center = 0.1f * (float)role };
    XD_TRY(xd_weight_add(n->block, &w, NULL));
    XD_TRY(xd_model_seal(n->model));
    XD_TRY(wrap_over_ddp(n->model, data, &(xd_ddp_desc){ .micro_batches = LEAVES }, &n->parallel));
    XD_TRY(xd_parallel_params(n->parallel, 2, n->params, &n->count));
    if (!trains) return XD_OK;
    xd_optimizer_desc adamw = xd_adamw_defaults(n->params, n->count);
    adamw.learning_rate = 0.02;
    return xd_optimizer_create(ctx, &adamw, &n->optimizer);
}

static void free_net(net *n) {
    xd_optimizer_destroy(n->optimizer);
    xd_parallel_destroy(n->parallel);
    xd_model_destroy(n->model);
}

typedef struct place {
    run *r;
    xd_ctx *ctx;
    int rank, calls;
    float real[IN_LEAF * WHOLE];
} place;

static xd_result give_batch(void *user, int64_t leaf, xd_dmd_batch *batch) {
    place *p = (place *)user;
    if (p->rank == p->r->fail_rank && leaf == p->r->fail_batch)
        return XD_FAIL(p->ctx, XD_ERROR_IO, "leaf %d is not there", (int)leaf);
    batch->samples = IN_LEAF;
    batch->first = leaf * IN_LEAF;
    batch->negative = p;
    for (int i = 0; i < IN_LEAF * WHOLE; i++) store(p->real, p->r->dtype, i, 0.1f);
    batch->real = p->real;
    return XD_OK;
}

static const double three[] = { 0.999, 0.7, 0.3, 0.0 };

/* Uneven: of two ranks the second has four elements. */
static xd_dmd_desc settings(const run *r, xd_comm *data, xd_comm *split) {
    static const int64_t begin[] = { 0, 2 }, count[] = { 2, 4 };
    const int part = xd_comm_rank(split);
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    d.data = data;
    d.sizes.samples = IN_LEAF;
    d.sizes.step_samples = IN_LEAF * LEAVES;
    d.sizes.whole_elements = WHOLE;
    d.sizes.elements = r->split == 1 ? WHOLE : count[part];
    d.sizes.first_element = r->split == 1 ? 0 : begin[part];
    d.sizes.split = r->split == 1 ? NULL : split;
    d.sizes.dtype = r->dtype;
    d.rungs.steps = 3;
    d.rungs.list = three;
    d.rungs.roll_out = true;
    d.rungs.deal = XD_DMD_RUNGS_IN_TURN;
    d.rungs.fresh_noise = r->fresh;
    d.regression.substeps = 2;
    d.own_samples = true;
    d.lead = 1;
    d.frequency = 3;
    d.guided = r->guided;
    d.guidance_scale = 1.5;
    d.gan.fdistill.on = r->judged;
    d.gan.fdistill.rate = 0.5;
    d.gan.fdistill.bins = 3;
    d.seed = 21;
    return d;
}

static xd_result make_all(const xd_dmd_desc *base, net *nets, xd_comm *world, xd_dmd_desc *d) {
    static const int64_t one = 1;
    const bool judged = base->gan.fdistill.on;
    *d = *base;
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        const bool judges = role == XD_DMD_DISCRIMINATOR;
        if (judges && !judged) continue;
        net *n = &nets[role];
        n->elements = judges ? HEADS : d->sizes.elements;
        n->dtype = d->sizes.dtype;
        XD_TRY(make_net(n, d->data, role, role != XD_DMD_TEACHER));
        d->networks[role] =
            (xd_network){ .user = n, .predicts = XD_PREDICT_FLOW, .forward = forward, .backward = backward };
        d->trainers[role] = (xd_dmd_trainer){ .parallel = n->parallel,
                                              .optimizer = n->optimizer,
                                              .max_norm = 0.05,
                                              .norm = judges ? NULL : world };
    }
    if (base->guided) {
        d->networks[XD_DMD_TEACHER].guidance.rescale = 0.7;
        d->networks[XD_DMD_FAKE_SCORE].guidance = (xd_guidance){ true, 1.25, 0.5 };
    }
    if (!judged) return XD_OK;
    d->networks[XD_DMD_TEACHER].feature_count = 1;
    d->networks[XD_DMD_TEACHER].feature_elements = &one;
    d->networks[XD_DMD_TEACHER].forward = forward_with_time;
    d->networks[XD_DMD_TEACHER].backward = backward_of_time;
    d->networks[XD_DMD_DISCRIMINATOR].heads = HEADS;
    d->networks[XD_DMD_DISCRIMINATOR].forward = judge;
    d->networks[XD_DMD_DISCRIMINATOR].backward = judge_backward;
    return XD_OK;
}

static xd_result train(place *p, const xd_dmd_desc *d) {
    xd_dmd_values values;
    xd_result result = XD_OK;
    xd_dmd *dmd;
    XD_TRY(xd_dmd_create(p->ctx, d, &dmd));
    for (int step = 0; step < WARM_UPS + STEPS && result == XD_OK; step++) {
        result = step < WARM_UPS ? xd_dmd_warm_up_step(dmd, give_batch, p, &values)
                                 : xd_dmd_step(dmd, give_batch, p, &values);
        if (p->rank == 0 && result == XD_OK) p->r->values[step] = values;
    }
    xd_dmd_destroy(dmd);
    return result;
}

/* The discriminator is whole on every rank. */
static void keep_weights(run *r, const xd_dmd_desc *d, net *nets, int rank) {
    for (int k = 0; k < 2 && d->gan.fdistill.on && rank == 0; k++)
        memcpy(r->weights[XD_DMD_DISCRIMINATOR] + k * HEADS, nets[XD_DMD_DISCRIMINATOR].params[k].value,
               HEADS * sizeof(float));
    for (int role = 0; role < 2; role++)
        for (int k = 0; k < 2; k++)
            memcpy(r->weights[role] + k * WHOLE + d->sizes.first_element, nets[role].params[k].value,
                   (size_t)d->sizes.elements * sizeof(float));
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = (run *)argument;
    place p = { r, xd_comm_ctx(world), xd_comm_rank(world), 0, { 0 } };
    net nets[XD_DMD_ROLES];
    xd_comm *data = NULL, *split = NULL;
    xd_dmd_desc d;
    memset(nets, 0, sizeof nets);
    XD_TRY(xd_comm_split(world, p.rank / r->split, p.rank, &split));
    XD_TRY(xd_comm_split(world, p.rank % r->split, p.rank, &data));
    const xd_dmd_desc base = settings(r, data, split);
    xd_result result = make_all(&base, nets, world, &d);
    if (result == XD_OK) result = train(&p, &d);
    r->results[p.rank] = result;
    if (result == XD_OK && p.rank / r->split == 0) keep_weights(r, &d, nets, p.rank);
    for (int role = 0; role < XD_DMD_ROLES; role++) free_net(&nets[role]);
    xd_comm_destroy(data);
    xd_comm_destroy(split);
    return r->fail_rank < 0 ? result
                            : XD_OK; /* a rank that leaves with an error would end the others' calls */
}

static run like(xd_dtype dtype, int split, int data) {
    run r;
    memset(&r, 0, sizeof r);
    r.split = split;
    r.data = data;
    r.dtype = dtype;
    r.fail_rank = -1;
    return r;
}

static xd_result execute(run *r, xd_reduction reduction) {
    const xd_ctx_desc desc = { .reduction = reduction };
    xd_error error = { 0 };
    const xd_result result = xd_run_threads(r->split * r->data, &desc, run_rank, r, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    return result;
}

static void check_splits_of(run like_this) {
    const xd_dtype dtype = like_this.dtype;
    run one = like_this;
    CHECK_EQ_INT(execute(&one, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(one.weights[0][0] != 0.0f && one.weights[0][0] != one.weights[0][1]);
    CHECK(one.values[0].regression > 0.0 && one.values[WARM_UPS + 1].vsd > 0.0);
    CHECK(one.values[WARM_UPS + 1].distance > 0.0 && one.values[WARM_UPS].fake_score > 0.0);
    for (int split = 1; split <= 2; split++)
        for (int data = 1; data <= 2; data++) {
            run other = like(dtype, split, data);
            other.guided = one.guided, other.fresh = one.fresh, other.judged = one.judged;
            CHECK_EQ_INT(execute(&other, XD_REDUCTION_INVARIANT), XD_OK);
            CHECK(memcmp(one.weights, other.weights, sizeof one.weights) == 0);
            CHECK(memcmp(one.values, other.values, sizeof one.values) == 0);
        }
}

static void check_splits(xd_dtype dtype, bool guided, bool fresh) {
    run one = like(dtype, 1, 1);
    one.guided = guided, one.fresh = fresh;
    check_splits_of(one);
}

XD_TEST(weights_of_split_samples_keep_the_bits) {
    run one = like(XD_DTYPE_F32, 1, 1), plain = one;
    one.judged = true;
    check_splits_of(one);
    CHECK_EQ_INT(execute(&one, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK_EQ_INT(execute(&plain, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(one.weights[XD_DMD_DISCRIMINATOR][0] != 0.1f && one.values[STEPS + WARM_UPS - 1].generator > 0.0);
    CHECK(memcmp(one.weights[0], plain.weights[0], sizeof one.weights[0]) != 0);
}

XD_TEST(split_samples_keep_the_bits_of_whole_ones) {
    check_splits(XD_DTYPE_F32, false, false);
    check_splits(XD_DTYPE_F32, true, true);
}

XD_TEST(narrow_samples_keep_the_bits_on_every_layout) {
    check_splits(XD_DTYPE_BF16, true, false);
    check_splits(XD_DTYPE_BF16, false, true);
}

/* Two ways to the same numbers: narrow samples lose some of them, but not the sense. */
XD_TEST(narrow_samples_train_like_wide_ones) {
    run wide = like(XD_DTYPE_F32, 1, 1), narrow = like(XD_DTYPE_BF16, 1, 1);
    CHECK_EQ_INT(execute(&wide, XD_REDUCTION_DETERMINISTIC), XD_OK);
    CHECK_EQ_INT(execute(&narrow, XD_REDUCTION_DETERMINISTIC), XD_OK);
    CHECK(memcmp(wide.values, narrow.values, sizeof wide.values) != 0);
    for (int step = 0; step < WARM_UPS; step++)
        CHECK(fabs(narrow.values[step].regression / wide.values[step].regression - 1.0) < 0.05);
    CHECK(fabs(narrow.values[WARM_UPS].fake_score / wide.values[WARM_UPS].fake_score - 1.0) < 0.05);
    CHECK(fabs(narrow.values[WARM_UPS + 1].distance / wide.values[WARM_UPS + 1].distance - 1.0) < 0.05);
}

XD_TEST(an_error_of_one_rank_is_one_of_all_over_both_axes) {
    for (int rank = 0; rank < 4; rank++) {
        run r = like(XD_DTYPE_F32, 2, 2);
        r.fail_rank = rank;
        r.fail_batch = rank < 2 ? 1 : 3; /* each pair of ranks has two leaves */
        CHECK_EQ_INT(execute(&r, XD_REDUCTION_DETERMINISTIC), XD_OK);
        for (int k = 0; k < 4; k++) CHECK_EQ_INT(r.results[k], k == rank ? XD_ERROR_IO : XD_ERROR_PEER);
    }
}

/* ---- what ranks must share ---- */

typedef struct difference {
    xd_result results[2];
    int number;
    char messages[2][512];
} difference;

static xd_result nothing(void *user, const xd_network_call *call) {
    (void)user, (void)call;
    return XD_OK;
}

enum { HOLD = 35, DIFFERENCES };

static void differ(xd_dmd_desc *d, int number) {
    static const double other[] = { 0.999, 0.6, 0.3, 0.0 };
    switch (number) {
    case 0: d->rungs.list = other; break;
    case 1: d->rungs.deal = XD_DMD_ONE_RUNG; break;
    case 2: d->rungs.fresh_noise = true; break;
    case 3: d->lead = 1; break;
    case 4: d->regression.substeps = 3; break;
    case 5: d->regression.step_samples = 3; break;
    case 6: d->network_scale = 1000.0; break;
    case 7: d->network_dtype = XD_DTYPE_BF16; break;
    case 8: d->v_is_flow = true; break;
    case 9: d->student_times.min_t = 0.02; break;
    case 10: d->fake_times.max_t = 0.9; break;
    case 11: d->fake_times.shift = 3.0; break;
    case 12: d->student_times.dtype = XD_DTYPE_F64; break;
    case 13: d->schedule.clamp_min = 1e-3; break;
    case 14: d->gan.r1_alpha = 0.2; break;
    case 15: d->gan.same_noise = true; break;
    case 16: d->gan.kind = XD_GAN_HINGE; break;
    case 17: d->fake_loss.space = XD_PREDICT_FLOW; break;
    case 18: d->normaliser = XD_VSD_NONE; break;
    case 19: d->guided = true; break;
    case 20: d->frequency = 7; break;
    case 21: d->seed = 22; break;
    case 22: d->own_samples = true; break;
    case 23: d->trainers[XD_DMD_STUDENT].max_norm = 2.0; break;
    case 24: d->networks[XD_DMD_TEACHER].predicts = XD_PREDICT_X0; break;
    case 25: d->sizes.step_samples = 9; break;
    case 26: d->gan.fdistill.divergence = XD_F_KL; break;
    case 27: d->gan.fdistill.upper = 30.0; break;
    case 28: d->gan.fdistill.bins = 9; break;
    case 29: d->gan.fdistill.rate = 0.5; break;
    case 30: d->gan.fdistill.max_t = 0.5; break;
    case 31: d->networks[XD_DMD_FAKE_SCORE].guidance.on = true; break;
    case 32: d->networks[XD_DMD_FAKE_SCORE].guidance.scale = 1.5; break;
    case 33: d->guided = true, d->networks[XD_DMD_TEACHER].guidance.rescale = 0.5; break;
    case 34: d->gan.penalty = XD_DMD_PENALTY_SLOPE; break;
    case HOLD: d->rungs.hold = 4; break;
    default: break;
    }
}

static xd_result differ_rank(xd_comm *world, void *argument) {
    difference *x = (difference *)argument;
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    xd_dmd *dmd = NULL;
    for (int role = 0; role < XD_DMD_ROLES; role++)
        if (role != XD_DMD_DISCRIMINATOR)
            d.networks[role] =
                (xd_network){ .predicts = XD_PREDICT_FLOW, .forward = nothing, .backward = nothing };
    d.data = world;
    d.rungs.steps = 3;
    d.rungs.list = three;
    d.rungs.roll_out = true;
    d.rungs.deal = XD_DMD_RUNGS_IN_TURN;
    d.sizes.samples = 2;
    d.sizes.step_samples = 8;
    d.sizes.elements = WHOLE;
    if (x->number == HOLD) d.rungs.deal = XD_DMD_ONE_RUNG;
    if (xd_comm_rank(world) == 1) differ(&d, x->number);
    const xd_result result = xd_dmd_create(xd_comm_ctx(world), &d, &dmd);
    x->results[xd_comm_rank(world)] = result;
    snprintf(x->messages[xd_comm_rank(world)], sizeof x->messages[0], "%s",
             xd_last_error(xd_comm_ctx(world))->message);
    xd_dmd_destroy(dmd);
    return result;
}

/* What the error says of each of them. */
static const char *const differences[DIFFERENCES] = {
    "rank 1 passed another rungs.list than rank 0",
    "rungs.deal = 0, rank 0 passed 1",
    "rungs.fresh_noise = 1, rank 0 passed 0",
    "lead = 1, rank 0 passed 0",
    "regression.substeps = 3, rank 0 passed ",
    "regression.step_samples = 3, rank 0 passed ",
    "network_scale = 1000, rank 0 passed 0",
    "network_dtype = ",
    "v_is_flow = 1, rank 0 passed 0",
    "student_times.min_t = 0.02, rank 0 passed 0.001",
    "fake_times.max_t = 0.9, rank 0 passed 0.999",
    "fake_times.shift = 3, rank 0 passed 5",
    "student_times.dtype = ",
    "schedule.clamp_min = 0.001, rank 0 passed ",
    "gan.r1_alpha = 0.2, rank 0 passed 0.1",
    "gan.same_noise = 1, rank 0 passed 0",
    "gan.kind = 1, rank 0 passed 0",
    "fake_loss.space = 3, rank 0 passed 0",
    "normaliser = ",
    "guided = 1, rank 0 passed 0",
    "frequency = 7, rank 0 passed 5",
    "seed = 22, rank 0 passed ",
    "own_samples = 1, rank 0 passed 0",
    "student.max_norm = 2, rank 0 passed ",
    "teacher.predicts = 0, rank 0 passed 3",
    "sizes.step_samples = 9, rank 0 passed 8",
    "gan.fdistill.divergence = 2, rank 0 passed ",
    "gan.fdistill.upper = 30, rank 0 passed 20",
    "gan.fdistill.bins = 9, rank 0 passed 10",
    "gan.fdistill.rate = 0.5, rank 0 passed 0",
    "gan.fdistill.max_t = 0.5, rank 0 passed ",
    "fake score.guidance.on = 1, rank 0 passed 0",
    "fake score.guidance.scale = 1.5, rank 0 passed ",
    "guided = 1, rank 0 passed 0",
    "gan.penalty = 1, rank 0 passed 0",
    "rungs.hold = 4, rank 0 passed 0",
};

XD_TEST(settings_that_decide_are_the_same_on_all_ranks) {
    for (int number = 0; number <= DIFFERENCES; number++) {
        difference x = { .number = number };
        const bool same = number == DIFFERENCES;
        (void)xd_run_threads(2, NULL, differ_rank, &x, NULL);
        for (int rank = 0; rank < 2; rank++) {
            CHECK_EQ_INT(x.results[rank], same ? XD_OK : XD_ERROR_MISMATCH);
            if ((x.results[rank] == XD_OK) != same) printf("difference %d\n", number);
            if (!same && !strstr(x.messages[rank], differences[number]))
                CHECK_EQ_STR(x.messages[rank], differences[number]);
        }
    }
}

XD_TEST_MAIN()
