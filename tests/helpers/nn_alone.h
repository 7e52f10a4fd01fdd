/* nn_alone.h - networks of examples/nn in tests: one rank's model with its passes, calls that allocate nothing or are
 * refused, and some steps of training on any number of ranks. */
#ifndef NN_ALONE_H
#define NN_ALONE_H

#include "xdistill.h"
#include "wrap_calls.h"

#include "xd_test.h"

#include <stdlib.h>
#include <string.h>

enum {
    ALONE_WEIGHTS = 64,
    ALONE_MOST = 8192 /* elements of a weight */,
    ALONE_LEAVES = 8,
    ALONE_STEPS = 2,
    ALONE_IN_LEAF = 3 /* samples of a leaf */,
    ALONE_PIXELS = 512 /* at most, of a picture */
};

/* Repeatable numbers of mean 0 and variance 1. */
static void noise(uint64_t stream, int64_t count, float *out) {
    const xd_philox random = { .seed = stream, .stream = XD_STREAM_USER };
    xd_philox_fill_normal(&random, 0, count, out);
}

static bool same(const float *x, const float *y, int64_t count) {
    return memcmp(x, y, (size_t)count * sizeof *x) == 0;
}

/* ---- one rank ---- */

/* One rank's model under DDP, of one leaf. */
typedef struct alone {
    xd_ctx *ctx;
    xd_model *model;
    xd_parallel *parallel;
    xd_param params[ALONE_WEIGHTS];
    int64_t count;
    void *passes; /* the network's own */
    xd_network network;
} alone;

/* Wraps a->model, its weights away from their first values, which may be zero; the same whole weights, however they are cut. */
static xd_result alone_wrap(alone *a, xd_comm *comm) {
    const xd_init normal = { XD_INIT_NORMAL, 0.0f, 1.0f };
    xd_tensor_part parts[ALONE_WEIGHTS];
    float more[ALONE_MOST];
    XD_TRY(wrap_over_ddp(a->model, comm, &(xd_ddp_desc){ .micro_batches = 1 }, &a->parallel));
    XD_TRY(xd_parallel_params(a->parallel, ALONE_WEIGHTS, a->params, &a->count));
    XD_TRY(xd_parallel_parts(a->parallel, ALONE_WEIGHTS, parts, &a->count));
    for (int64_t i = 0; i < a->count; i++) {
        const xd_philox random = { .seed = 100 + (uint64_t)i, .stream = XD_STREAM_USER };
        float *w = (float *)parts[i].data;
        parts[i].data = more;
        XD_TRY(xd_tensor_part_fill(a->ctx, &parts[i], &normal, &random));
        for (int64_t j = 0; j < a->params[i].count; j++) w[j] += 0.2f * more[j];
    }
    return xd_parallel_publish(a->parallel);
}

static void alone_unwrap(alone *a) {
    xd_parallel_destroy(a->parallel);
    xd_model_destroy(a->model);
}

/* Gradients of all weights after a step of one leaf, one after another. */
static xd_result take_gradients(alone *a, float *out) {
    XD_TRY(xd_parallel_reduce(a->parallel));
    for (int64_t i = 0; i < a->count; i++, out += a->params[i - 1].count)
        memcpy(out, a->params[i].gradient, (size_t)a->params[i].count * sizeof *out);
    return xd_parallel_publish(a->parallel);
}

static void run_with(xd_rank_function function, void *argument) {
    xd_error error = { 0 };
    const xd_result result = xd_run_threads(1, NULL, function, argument, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("%s\n", error.message);
}

static inline void run_alone(xd_rank_function function) {
    run_with(function, NULL);
}

/* The context's last message. */
static void check_refused(xd_ctx *ctx, xd_result result, xd_result code, const char *message) {
    CHECK_EQ_INT(result, code);
    CHECK_EQ_STR(xd_last_error(ctx)->message, message);
}

/* ---- memory ---- */

static void *count_allocate(void *user, size_t bytes) {
    ++*(int *)user;
    return malloc(bytes ? bytes : 1);
}

static void count_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* Passes of a call, which keeps what its backward needs, and then does not. */
static xd_result check_no_allocation(const alone *a, xd_network_call *call, const int *calls) {
    const int before = *calls;
    XD_TRY(a->network.forward(a->network.user, call));
    XD_TRY(a->network.backward(a->network.user, call));
    call->keep = false;
    XD_TRY(a->network.forward(a->network.user, call));
    CHECK_EQ_INT(*calls, before);
    CHECK(before > 0);
    return XD_OK;
}

/* One rank whose allocations are counted in the function's argument. */
static void run_counted(xd_rank_function function) {
    int calls = 0;
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, &calls } };
    xd_error error = { 0 };
    CHECK_EQ_INT(xd_run_threads(1, &desc, function, &calls, &error), XD_OK);
}

/* ---- several ranks ---- */

/* A network that is trained. */
typedef struct trainer {
    xd_network network;
    xd_parallel *parallel;
    double rate;
    bool zero; /* a leaf without samples on every rank */
    xd_result (*leaf)(const struct trainer *t, int64_t k, int step); /* its forward and backward */
    int pixels, labels; /* of train_pictures: a picture's elements, and how many labels there are */
} trainer;

/* A leaf of pictures of noise, which the network learns to predict. */
static inline xd_result train_pictures(const trainer *t, int64_t k, int step) {
    enum { MOST = ALONE_IN_LEAF * ALONE_PIXELS };
    const xd_network *n = &t->network;
    const int all = ALONE_IN_LEAF * t->pixels;
    float x[MOST], raw[MOST], d_raw[MOST];
    double times[ALONE_IN_LEAF];
    int32_t labels[ALONE_IN_LEAF];
    const int64_t leaf = xd_parallel_micro_batch(t->parallel, k);
    const bool own = k < xd_parallel_micro_batches(t->parallel).own;
    xd_network_call call = { .samples = own ? ALONE_IN_LEAF : 0,
                             .hidden = x,
                             .times = times,
                             .condition = labels,
                             .keep = true,
                             .raw = raw,
                             .raw_gradient = d_raw,
                             .weights = true,
                             .micro_batch = k };
    if (own) noise((uint64_t)(1000 + step * ALONE_LEAVES + leaf), all, x);
    for (int i = 0; i < ALONE_IN_LEAF; i++) times[i] = (double)i / ALONE_IN_LEAF, labels[i] = i % t->labels;
    XD_TRY(n->forward(n->user, &call));
    for (int i = 0; own && i < all; i++) d_raw[i] = (raw[i] - x[i]) * 0.125f;
    return n->backward(n->user, &call);
}

static inline void run_invariant(int ranks, xd_rank_function function, void *argument) {
    xd_error error = { 0 };
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    const xd_result result = xd_run_threads(ranks, &desc, function, argument, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
}

static xd_result hash_part(void *user, const xd_state_tensor *tensor, xd_interval elements,
                           const void *data) {
    uint64_t *hash = (uint64_t *)user;
    *hash = xd_hash(*hash, data, (size_t)(elements.end - elements.begin) * xd_dtype_size(tensor->dtype));
    return XD_OK;
}

/* Some steps, and then on rank 0 a hash of all weights and moments. */
static xd_result train(xd_comm *world, const trainer *t, uint64_t *hash) {
    xd_param params[ALONE_WEIGHTS];
    xd_tensor_part parts[ALONE_WEIGHTS];
    xd_optimizer *optimizer;
    int64_t count;
    XD_TRY(xd_parallel_params(t->parallel, ALONE_WEIGHTS, params, &count));
    XD_TRY(xd_parallel_parts(t->parallel, ALONE_WEIGHTS, parts, &count));
    xd_optimizer_desc adamw = xd_adamw_defaults(params, count);
    adamw.learning_rate = t->rate;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &adamw, &optimizer));
    for (int step = 0; step < ALONE_STEPS; step++) {
        for (int64_t k = 0; k < xd_parallel_micro_batches(t->parallel).opened; k++)
            XD_TRY(t->leaf(t, k, step));
        XD_TRY(xd_parallel_reduce(t->parallel));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        XD_TRY(xd_parallel_publish(t->parallel));
    }
    const xd_checkpoint_network all = { .parts = parts, .part_count = count, .optimizer = optimizer };
    xd_state_gather_desc gather = { .networks = &all, .network_count = 1, .user = hash };
    if (xd_comm_rank(world) == 0) gather.take = hash_part;
    XD_TRY(xd_state_gather(world, &gather));
    xd_optimizer_destroy(optimizer);
    return XD_OK;
}

/* Under FSDP blocks of type `unit` are units. */
static xd_result wrap_in(xd_comm *world, xd_model *model, const char *unit, bool sharded, xd_parallel **out) {
    const xd_fsdp_desc fsdp = { .micro_batches = ALONE_LEAVES, .unit_types = &unit, .unit_type_count = 1 };
    return sharded ? wrap_over_fsdp(model, world, &fsdp, out)
                   : wrap_over_ddp(model, world, &(xd_ddp_desc){ .micro_batches = ALONE_LEAVES }, out);
}

#endif
