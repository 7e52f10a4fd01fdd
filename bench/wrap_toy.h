/* A step of a small transformer, wrapped: hidden 256, 6 layers, 16 sequences of 128 tokens over both ranks. Calls of the library
 * are timed on their own; the loss is the program's, a gradient of the logits that costs nothing. */
#ifndef XDISTILL_BENCH_WRAP_TOY_H
#define XDISTILL_BENCH_WRAP_TOY_H

#include "../examples/nn/nn_blocks.h"

enum { TOY_SEQUENCES = 16, TOY_POSITIONS = 128, TOY_VOCABULARY = 1024, TOY_WEIGHTS_MOST = 128 };

/* A time, or a length of time: by the clock, and of this thread on a processor. */
typedef struct toy_time {
    double clock, processor;
} toy_time;

/* Seconds of the last step on this rank. */
typedef struct toy_seconds {
    toy_time step;
    toy_time wrapper; /* inside begin and end of blocks, reduce and publish */
    toy_time waiting; /* until the other rank came to the same call too; in none of the others but the step */
    toy_time optimizer; /* norm, AdamW and average */
} toy_seconds;

static toy_time toy_now(void) {
    struct timespec now;
    toy_time out;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    out.processor = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    out.clock = bench_now();
    return out;
}

static void toy_add(toy_time *sum, toy_time since) {
    const toy_time now = toy_now();
    sum->clock += now.clock - since.clock;
    sum->processor += now.processor - since.processor;
}

typedef struct toy {
    xd_comm *comm;
    xd_ctx *ctx;
    bool sharded;
    nn_model nn;
    nn_description description;
    nn_blocks blocks;
    xd_parallel *parallel;
    xd_param params[TOY_WEIGHTS_MOST];
    int64_t count;
    xd_optimizer *optimizer;
    xd_ema *average;
    float *workspace, *logits;
    int32_t ids[TOY_SEQUENCES * TOY_POSITIONS];
    nn_batch batch;
    toy_seconds spent;
} toy;

/* Ahead of a call in which ranks meet: what is left of its time is its work. */
static void toy_meet(toy *t) {
    const toy_time start = toy_now();
    team_require(t->ctx, xd_barrier(t->comm));
    toy_add(&t->spent.waiting, start);
}

static int toy_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    toy *t = (toy *)user;
    const nn_source source = nn_blocks_source(&t->blocks);
    if (t->sharded) toy_meet(t);
    const toy_time start = toy_now();
    const int code = source.begin(source.user, block, pass, out);
    toy_add(&t->spent.wrapper, start);
    return code;
}

static int toy_end(void *user, int block) {
    toy *t = (toy *)user;
    const nn_source source = nn_blocks_source(&t->blocks);
    if (t->sharded) toy_meet(t);
    const toy_time start = toy_now();
    const int code = source.end(source.user, block);
    toy_add(&t->spent.wrapper, start);
    return code;
}

static void toy_wrap(toy *t, bool kept, int64_t leaves) {
    static const char *const units[] = { NN_LAYER_TYPE };
    xd_fsdp_desc fsdp;
    xd_ddp_desc ddp;
    memset(&fsdp, 0, sizeof fsdp);
    memset(&ddp, 0, sizeof ddp);
    ddp.data = fsdp.data = t->comm;
    fsdp.unit_types = units;
    fsdp.unit_type_count = 1;
    ddp.micro_batches = fsdp.micro_batches = leaves;
    fsdp.accumulate_whole = kept;
    fsdp.reshard_ranks = kept ? 1 : 0;
    team_require(t->ctx, t->sharded ? xd_fsdp_create(t->description.model, &fsdp, &t->parallel)
                                    : xd_ddp_create(t->description.model, &ddp, &t->parallel));
    team_require(t->ctx, xd_parallel_params(t->parallel, TOY_WEIGHTS_MOST, t->params, &t->count));
}

/* Of a leaf. */
static int toy_positions(const toy *t) {
    return (int)t->batch.sequences * TOY_POSITIONS;
}

/* With 16 leaves a leaf is a sequence; with fewer it has that many more of them. */
static toy *toy_open(xd_comm *comm, bool sharded, bool kept, int64_t leaves) {
    nn_config config;
    xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
    toy *t = (toy *)calloc(1, sizeof *t);
    memset(&config, 0, sizeof config);
    config.vocab = TOY_VOCABULARY;
    config.hidden = 256;
    config.layers = 6;
    config.heads = config.kv_heads = 4;
    config.head_dim = 64;
    config.ffn = 1024;
    config.rope_theta = 10000.0f;
    config.norm_eps = 1e-5f;
    if (!t || nn_model_init(&config, NULL, NULL, &t->nn)) exit(2);
    t->comm = comm;
    t->ctx = xd_comm_ctx(comm);
    t->sharded = sharded;
    team_require(t->ctx, nn_describe(t->ctx, &t->nn, 1, XD_DTYPE_F32, &t->description));
    t->blocks.model = t->description.model;
    toy_wrap(t, kept, leaves);
    const xd_optimizer_desc adamw = xd_adamw_defaults(t->params, t->count);
    team_require(t->ctx, xd_optimizer_create(t->ctx, &adamw, &t->optimizer));
    average.params = t->params;
    average.param_count = t->count;
    team_require(t->ctx, xd_ema_create(t->ctx, &average, &t->average));
    t->batch.sequences = (int)(TOY_SEQUENCES / leaves);
    t->batch.positions = TOY_POSITIONS;
    t->batch.ids = t->ids;
    t->workspace = (float *)malloc((size_t)nn_workspace_floats(&t->nn, &t->batch, true) * sizeof(float));
    t->logits = (float *)malloc((size_t)toy_positions(t) * TOY_VOCABULARY * sizeof(float));
    if (!t->workspace || !t->logits) exit(2);
    return t;
}

/* The gradient of the loss is a thousandth of the logits. */
static void toy_leaf(toy *t, int64_t k) {
    const nn_source source = { t, toy_begin, toy_end, NULL, NULL };
    const int64_t leaf = xd_parallel_micro_batch(t->parallel, k);
    t->blocks.micro_batch = k;
    const int positions = toy_positions(t);
    for (int i = 0; i < positions; i++) {
        const int64_t sequence = leaf * t->batch.sequences + i / TOY_POSITIONS;
        t->ids[i] = (int32_t)((sequence * 131 + i % TOY_POSITIONS * 7) % TOY_VOCABULARY);
    }
    if (nn_forward_from(&t->nn, &source, &t->batch, true, t->workspace, t->logits) != 0) exit(2);
    for (int i = 0; i < positions * TOY_VOCABULARY; i++) t->logits[i] *= 1e-3f;
    if (nn_backward_from(&t->nn, &source, &t->batch, t->workspace, t->logits) != 0) exit(2);
}

static void toy_optimize(toy *t) {
    xd_gradient_norm_desc n;
    xd_optimizer_step_desc d;
    xd_gradient_norm norm;
    memset(&n, 0, sizeof n);
    memset(&d, 0, sizeof d);
    n.params = t->params;
    n.param_count = t->count;
    n.max_norm = 1.0;
    team_require(t->ctx, xd_gradient_norm_compute(t->ctx, t->comm, &n, &norm));
    d.gradient_scale = &norm.coefficient;
    d.averages = &t->average;
    d.average_count = 1;
    team_require(t->ctx, xd_optimizer_step(t->optimizer, &d, NULL));
}

static void toy_step(toy *t) {
    const toy_time start = toy_now();
    memset(&t->spent, 0, sizeof t->spent);
    const int64_t own = xd_parallel_micro_batches(t->parallel).own; /* the same on both ranks */
    for (int64_t k = 0; k < own; k++) toy_leaf(t, k);
    toy_meet(t);
    const toy_time met = toy_now();
    team_require(t->ctx, xd_parallel_reduce(t->parallel));
    toy_add(&t->spent.wrapper, met);
    const toy_time reduced = toy_now();
    toy_optimize(t);
    toy_add(&t->spent.optimizer, reduced);
    toy_meet(t);
    const toy_time stepped = toy_now();
    team_require(t->ctx, xd_parallel_publish(t->parallel));
    toy_add(&t->spent.wrapper, stepped);
    toy_add(&t->spent.step, start);
}

static toy_seconds toy_spent(const toy *t) {
    return t->spent;
}

static void toy_close(toy *t) {
    if (!t) return;
    free(t->logits);
    free(t->workspace);
    xd_ema_destroy(t->average);
    xd_optimizer_destroy(t->optimizer);
    xd_parallel_destroy(t->parallel);
    nn_description_free(&t->description);
    nn_model_free(&t->nn);
    free(t);
}

#endif
