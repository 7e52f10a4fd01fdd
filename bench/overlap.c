/* How much of a slow wire queues hide: FSDP and DDP on two ranks over a transport that holds each record back for a while, around
 * passes that take longer. Passes and delays sleep, so the cores are free.
 *
 *     build/bench/overlap [delay in ms] [pass in ms]
 *
 * hidden = (seconds inline - seconds on workers) / (seconds inline - seconds without a delay). */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

enum { RANKS = 2, UNITS = 12, ROWS = 256, STEPS = 6 };

/* ---- a slow wire ---- */

typedef struct slow {
    xd_transport base; /* first */
    xd_transport *inner;
    xd_comm *owner; /* of inner; NULL for a twin */
    double seconds;
} slow;

static void rest(double seconds) {
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    nanosleep(&t, NULL);
}

static xd_transport *slow_create(xd_transport *inner, xd_comm *owner, double seconds);

static xd_result slow_control(xd_transport *t, const xd_control *mine, const xd_collective *next,
                              xd_control *all, double deadline) {
    xd_transport *inner = ((slow *)t)->inner;
    return inner->ops->control(inner, mine, next, all, deadline);
}

static xd_result slow_execute(xd_transport *t, const xd_collective *c, double deadline) {
    slow *s = (slow *)t;
    if (s->seconds > 0.0) rest(s->seconds);
    return s->inner->ops->execute(s->inner, c, deadline);
}

static xd_result slow_split(xd_transport *t, const int *members, int size, int rank, double deadline,
                            xd_transport **out) {
    xd_transport *inner = ((slow *)t)->inner;
    return inner->ops->split(inner, members, size, rank, deadline, out);
}

static void slow_abort(xd_transport *t) {
    xd_transport *inner = ((slow *)t)->inner;
    inner->ops->abort(inner);
}

static void slow_destroy(xd_transport *t) {
    slow *s = (slow *)t;
    if (s->owner)
        xd_comm_destroy(s->owner);
    else
        s->inner->ops->destroy(s->inner);
    free(s);
}

static xd_result slow_fork(xd_transport *t, xd_ctx *ctx, double deadline, xd_transport **out) {
    slow *s = (slow *)t;
    xd_transport *inner = NULL;
    XD_TRY(s->inner->ops->fork(s->inner, ctx, deadline, &inner));
    *out = slow_create(inner, NULL, s->seconds);
    return XD_OK;
}

static const xd_transport_ops slow_ops = { .name = "slow",
                                           .control = slow_control,
                                           .execute = slow_execute,
                                           .split = slow_split,
                                           .abort = slow_abort,
                                           .destroy = slow_destroy,
                                           .fork = slow_fork };

static xd_transport *slow_create(xd_transport *inner, xd_comm *owner, double seconds) {
    slow *s = (slow *)calloc(1, sizeof *s);
    s->base = *inner;
    s->base.ops = &slow_ops;
    s->inner = inner;
    s->owner = owner;
    s->seconds = seconds;
    return &s->base;
}

/* ---- training ---- */

typedef struct setting {
    bool fsdp, workers;
    double delay, pass;
    double seconds; /* of a step, on rank 0 */
    xd_thread_world *world;
} setting;

static xd_result one_pass(xd_block *block, xd_pass_kind kind, double seconds) {
    xd_pass pass = { kind, 0, false };
    xd_block_view view;
    XD_TRY(xd_block_begin(block, pass, &view));
    rest(seconds);
    return xd_block_end(block);
}

static xd_result one_step(const setting *s, xd_parallel *parallel, xd_block *const *blocks) {
    for (int i = 0; i < UNITS; i++) XD_TRY(one_pass(blocks[i], XD_PASS_FORWARD, s->pass));
    for (int i = UNITS - 1; i >= 0; i--) XD_TRY(one_pass(blocks[i], XD_PASS_BACKWARD, s->pass));
    XD_TRY(xd_parallel_reduce(parallel));
    return xd_parallel_publish(parallel);
}

static xd_result describe(xd_ctx *ctx, xd_model **model, xd_block **blocks) {
    XD_TRY(xd_model_create(ctx, NULL, model));
    for (int i = 0; i < UNITS; i++) {
        char name[16];
        xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { ROWS, ROWS } };
        snprintf(name, sizeof name, "layers.%d", i);
        XD_TRY(xd_block_add(xd_model_root(*model), &(xd_block_desc){ .name = name, .type = "layer" },
                            &blocks[i]));
        XD_TRY(xd_weight_add(blocks[i], &w, NULL));
    }
    return xd_model_seal(*model);
}

static xd_result train(setting *s, xd_comm *comm) {
    static const char *const types[] = { "layer" };
    const xd_queue_desc form = { .form = s->workers ? XD_QUEUE_WORKER : XD_QUEUE_INLINE,
                                 .capacity = 4 * UNITS };
    xd_queue *gathers = NULL, *reductions = NULL;
    xd_model *model = NULL;
    xd_block *blocks[UNITS];
    xd_parallel *parallel = NULL;
    XD_TRY(describe(xd_comm_ctx(comm), &model, blocks));
    XD_TRY(xd_queue_create(comm, &form, &gathers));
    XD_TRY(xd_queue_create(comm, &form, &reductions));
    const xd_ddp_desc ddp = { .data = comm, .reductions = reductions, .bucket_size = ROWS * ROWS };
    const xd_fsdp_desc fsdp = { .data = comm,
                                .unit_types = types,
                                .unit_type_count = 1,
                                .gathers = gathers,
                                .reductions = reductions,
                                .prefetch = s->workers ? 1 : 0 };
    XD_TRY(s->fsdp ? xd_fsdp_create(model, &fsdp, &parallel) : xd_ddp_create(model, &ddp, &parallel));
    XD_TRY(one_step(s, parallel, blocks));
    const double begin = bench_now();
    for (int i = 0; i < STEPS; i++) XD_TRY(one_step(s, parallel, blocks));
    if (xd_comm_rank(comm) == 0) s->seconds = (bench_now() - begin) / STEPS;
    xd_parallel_destroy(parallel);
    xd_queue_destroy(gathers);
    xd_queue_destroy(reductions);
    xd_model_destroy(model);
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    setting *s = (setting *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm *inner = NULL, *comm = NULL;
    XD_TRY(xd_comm_split(world, 0, xd_comm_rank(world), &inner));
    XD_TRY(xd_comm_create(ctx, slow_create(xdi_comm_transport(inner), inner, s->delay), &comm));
    const xd_result result = train(s, comm);
    xd_comm_destroy(comm);
    return result;
}

static double measure(bool fsdp, bool workers, double delay, double pass) {
    setting s = { fsdp, workers, delay, pass, 0.0, NULL };
    xd_error error;
    if (xd_run_threads(RANKS, NULL, run_rank, &s, &error) == XD_OK) return s.seconds;
    fprintf(stderr, "%s\n", error.message);
    exit(1);
}

int main(int argc, char **argv) {
    const double delay = 1e-3 * (argc > 1 ? atof(argv[1]) : 4.0),
                 pass = 1e-3 * (argc > 2 ? atof(argv[2]) : 6.0);
    printf("%d ranks, %d units, a delay of %.1f ms a record, passes of %.1f ms\n", RANKS, UNITS, delay * 1e3,
           pass * 1e3);
    for (int fsdp = 0; fsdp < 2; fsdp++) {
        const double still = measure(fsdp, false, 0.0, pass), here = measure(fsdp, false, delay, pass),
                     beside = measure(fsdp, true, delay, pass);
        printf("%-5s step %.1f ms without a delay, %.1f ms inline, %.1f ms on workers: %.1f %% hidden\n",
               fsdp ? "FSDP" : "DDP", still * 1e3, here * 1e3, beside * 1e3,
               100.0 * (here - beside) / (here - still));
    }
    return 0;
}
