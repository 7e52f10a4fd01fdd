/* Wrapped models: what the wrappers and the sharded optimizer cost two ranks.
 *
 *     make bench-wrap         or      build/bench/wrap [-J FILE]      mpirun -n 2 build/bench/wrap_mpi [-J FILE]
 *
 * Ranks are threads, or processes with -DBENCH_MPI. `build/bench/wrap serve` instead carries out orders from its standard
 * input, for bench/torch/wrap.py, which interleaves them with PyTorch's: "open ARM", "step ARM", "close ARM" (the names are
 * printed first), each answered with a line of seconds and bytes that a rank has sent.
 *
 * A step of communication opens and closes every unit for both passes and computes nothing: all of it is the wrapper's. */
#define BENCH_ROUNDS 5
#define BENCH_WARMUP 1
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "stage.h"

#include "wrap_toy.h"

enum { UNITS = 12, WIDTH = 2048 }; /* 12 matrices: 50.3 M weights */

/* COMPARED: a step of communication in which ranks compare their replicas, which they do in one of EVERY. */
typedef enum arm_kind { COMMUNICATION, COMPARED, OPTIMIZER, IN_PLACE, TOY } arm_kind;
enum { EVERY = 256 };

typedef struct arm {
    const char *name;
    arm_kind kind;
    bool sharded;
    team_mode mode;
    int64_t leaves; /* of a step, both ranks together */
    bool kept;      /* TOY: units stay gathered in a step, and leaves are added before they are sent */
} arm;

/* Names are those of orders. Four leaves a rank are an aligned block of the canonical tree. */
static const arm arms[] = {
    { "ddp", COMMUNICATION, false, TEAM_DETERMINISTIC, 2, false },
    { "ddp-compared", COMPARED, false, TEAM_DETERMINISTIC, 2, false },
    { "ddp-invariant", COMMUNICATION, false, TEAM_INVARIANT, 2, false },
    { "fsdp", COMMUNICATION, true, TEAM_DETERMINISTIC, 2, false },
    { "fsdp-invariant", COMMUNICATION, true, TEAM_INVARIANT, 2, false },
    { "ddp-8", COMMUNICATION, false, TEAM_DETERMINISTIC, 8, false },
    { "ddp-8-invariant", COMMUNICATION, false, TEAM_INVARIANT, 8, false },
    { "fsdp-8", COMMUNICATION, true, TEAM_DETERMINISTIC, 8, false },
    { "fsdp-8-invariant", COMMUNICATION, true, TEAM_INVARIANT, 8, false },
    { "optimizer", OPTIMIZER, true, TEAM_DETERMINISTIC, 2, false },
    { "in-place", IN_PLACE, false, TEAM_DETERMINISTIC, 0, false },
    { "toy-one-ddp", TOY, false, TEAM_DETERMINISTIC, 2, false },
    { "toy-one-ddp-invariant", TOY, false, TEAM_INVARIANT, 2, false },
    { "toy-one-fsdp", TOY, true, TEAM_DETERMINISTIC, 2, false },
    { "toy-one-fsdp-invariant", TOY, true, TEAM_INVARIANT, 2, false },
    { "toy-ddp", TOY, false, TEAM_DETERMINISTIC, 16, false },
    { "toy-ddp-invariant", TOY, false, TEAM_INVARIANT, 16, false },
    { "toy-fsdp", TOY, true, TEAM_DETERMINISTIC, 16, false },
    { "toy-fsdp-invariant", TOY, true, TEAM_INVARIANT, 16, false },
    { "toy-kept", TOY, true, TEAM_DETERMINISTIC, 16, true },
    { "toy-kept-invariant", TOY, true, TEAM_INVARIANT, 16, true },
};
enum { ARMS = sizeof arms / sizeof arms[0] };

/* What an open arm has on this rank. */
typedef struct scene {
    const arm *arm;
    xd_ctx *ctx;
    xd_comm *comm;
    xd_model *model;
    xd_block *blocks[UNITS];
    xd_parallel *parallel;
    xd_param params[UNITS];
    xd_optimizer *optimizer;
    xd_ema *average;
    float *memory; /* IN_PLACE */
    toy *toy;
    double seconds, bytes; /* of the last step: between barriers; sent by this rank */
} scene;

/* ---- a step of communication ---- */

static void describe(scene *s) {
    xd_weight_desc w;
    xd_block_desc b;
    char name[16];
    memset(&w, 0, sizeof w);
    memset(&b, 0, sizeof b);
    w.name = "weight";
    w.dtype = XD_DTYPE_F32;
    w.ndim = 2;
    w.shape[0] = w.shape[1] = WIDTH;
    w.init.kind = XD_INIT_CONSTANT;
    w.init.center = 0.5f;
    b.name = name;
    b.unit = XD_UNIT_ALWAYS;
    team_require(s->ctx, xd_model_create(s->ctx, NULL, &s->model));
    for (int i = 0; i < UNITS; i++) {
        snprintf(name, sizeof name, "unit%d", i);
        team_require(s->ctx, xd_block_add(xd_model_root(s->model), &b, &s->blocks[i]));
        team_require(s->ctx, xd_weight_add(s->blocks[i], &w, NULL));
    }
    team_require(s->ctx, xd_model_seal(s->model));
}

static void wrap(scene *s) {
    int64_t count;
    describe(s);
    if (s->arm->sharded) {
        xd_fsdp_desc d;
        memset(&d, 0, sizeof d);
        d.data = s->comm;
        d.micro_batches = s->arm->leaves;
        team_require(s->ctx, xd_fsdp_create(s->model, &d, &s->parallel));
    } else {
        xd_ddp_desc d;
        memset(&d, 0, sizeof d);
        d.data = s->comm;
        d.micro_batches = s->arm->leaves;
        d.compare_steps = s->arm->kind == COMPARED ? 1 : 0;
        team_require(s->ctx, xd_ddp_create(s->model, &d, &s->parallel));
    }
    team_require(s->ctx, xd_parallel_params(s->parallel, UNITS, s->params, &count));
}

/* One pass over all units; with `gradient` every element of it is increased by that. */
static void pass_over(scene *s, xd_pass pass, float gradient) {
    for (int i = 0; i < UNITS; i++) {
        xd_block *block = s->blocks[pass.kind == XD_PASS_BACKWARD ? UNITS - 1 - i : i];
        xd_block_view view;
        team_require(s->ctx, xd_block_begin(block, pass, &view));
        for (int64_t k = 0; gradient != 0.0f && k < (int64_t)WIDTH * WIDTH; k++)
            ((float *)view.gradients[0])[k] += gradient * ((const float *)view.values[0])[k];
        team_require(s->ctx, xd_block_end(block));
    }
}

/* With `check` the gradient of leaf i is (i + 1) times the weights. */
static void communicate(scene *s, bool check) {
    const xd_parallel_micro_batch_count leaves = xd_parallel_micro_batches(s->parallel);
    const int64_t passes = s->arm->sharded ? leaves.max : leaves.own;
    for (int64_t k = 0; k < passes; k++) {
        xd_pass pass = { XD_PASS_FORWARD, 0, false };
        pass_over(s, pass, 0.0f);
        pass.kind = XD_PASS_BACKWARD;
        pass.micro_batch = k;
        pass_over(s, pass, check ? (float)(xd_parallel_micro_batch(s->parallel, k) + 1) : 0.0f);
    }
    team_require(s->ctx, xd_parallel_reduce(s->parallel));
    if (!check) team_require(s->ctx, xd_parallel_publish(s->parallel));
}

/* A step with gradients, whose sums are known. */
static void check_step(scene *s) {
    const float sum = 0.5f * (float)(s->arm->leaves * (s->arm->leaves + 1) / 2);
    communicate(s, true);
    for (int i = 0; i < UNITS; i++)
        for (int64_t k = 0; k < s->params[i].count; k++)
            if (((const float *)s->params[i].gradient)[k] != sum) {
                fprintf(stderr, "%s: a gradient is %g, not %g\n", s->arm->name,
                        (double)((const float *)s->params[i].gradient)[k], (double)sum);
                exit(2);
            }
    team_require(s->ctx, xd_parallel_publish(s->parallel));
}

/* ---- the optimizer ---- */

static void open_optimizer(scene *s) {
    xd_optimizer_desc d;
    xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
    wrap(s);
    for (int i = 0; i < UNITS; i++)
        for (int64_t k = 0; k < s->params[i].count; k++)
            ((float *)s->params[i].gradient)[k] = 1e-3f * (float)(k % 2039 - 1000);
    d = xd_adamw_defaults(s->params, UNITS);
    team_require(s->ctx, xd_optimizer_create(s->ctx, &d, &s->optimizer));
    average.params = s->params;
    average.param_count = UNITS;
    team_require(s->ctx, xd_ema_create(s->ctx, &average, &s->average));
}

/* AdamW on this rank's part, clipped by the norm of all parts, with an average in the same pass. */
static void optimize(scene *s) {
    xd_gradient_norm_desc n;
    xd_optimizer_step_desc d;
    xd_gradient_norm norm;
    memset(&n, 0, sizeof n);
    memset(&d, 0, sizeof d);
    n.params = s->params;
    n.param_count = UNITS;
    n.max_norm = 1.0;
    team_require(s->ctx, xd_gradient_norm_compute(s->ctx, s->comm, &n, &norm));
    d.gradient_scale = &norm.coefficient;
    d.averages = &s->average;
    d.average_count = 1;
    team_require(s->ctx, xd_optimizer_step(s->optimizer, &d, NULL));
}

/* Bytes of a rank's optimizer step: gradients are read by the norm; then value, gradient, both moments and the average are
 * read, and all but the gradient written. */
static double optimizer_bytes(void) {
    return 40.0 * (double)UNITS * WIDTH * WIDTH / TEAM_RANKS;
}

/* ---- the rate of memory, both ranks at once ---- */

enum { SWEEP_BYTES = 128 << 20 };

static void open_in_place(scene *s) {
    s->memory = (float *)malloc(SWEEP_BYTES + 64);
    if (!s->memory) exit(2);
    for (int i = 0; i < SWEEP_BYTES / 4 + 16; i++) s->memory[i] = 1.0f;
}

/* Seconds that the bytes of an optimizer's step take at the best way of going through memory. */
static double sweep(scene *s) {
    char *begin = (char *)s->memory + (64 - (uintptr_t)s->memory % 64);
    double best = 1e9;
    for (int w = 0; w < BENCH_WAYS; w++) {
        const int64_t lines = bench_lines(SWEEP_BYTES / 64, bench_ways[w]);
        team_require(s->ctx, xd_barrier(s->comm));
        const double start = bench_now();
        bench_in_place((bench_floats *)(void *)begin, SWEEP_BYTES / 64, bench_ways[w]);
        team_require(s->ctx, xd_barrier(s->comm));
        best = fmin(best, (bench_now() - start) / (128.0 * (double)lines));
    }
    return best * optimizer_bytes();
}

/* ---- orders ---- */

static void open_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    s->arm = &arms[which];
    s->ctx = st->me->ctx[s->arm->mode];
    s->comm = st->me->comm[s->arm->mode];
    if (s->arm->kind <= COMPARED) {
        wrap(s);
        check_step(s);
    } else if (s->arm->kind == OPTIMIZER) {
        open_optimizer(s);
    } else if (s->arm->kind == IN_PLACE) {
        open_in_place(s);
    } else {
        s->toy = toy_open(s->comm, s->arm->sharded, s->arm->kept, s->arm->leaves);
    }
}

static void step_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    team_require(s->ctx, xd_barrier(s->comm));
    const uint64_t sent = xd_comm_traffic(s->comm).bytes_sent;
    const double start = bench_now();
    double own = 0.0;
    if (s->arm->kind <= COMPARED)
        communicate(s, false);
    else if (s->arm->kind == OPTIMIZER)
        optimize(s);
    else if (s->arm->kind == IN_PLACE)
        own = sweep(s);
    else
        toy_step(s->toy);
    s->bytes = (double)(xd_comm_traffic(s->comm).bytes_sent - sent);
    team_require(s->ctx, xd_barrier(s->comm));
    s->seconds = own > 0.0 ? own : bench_now() - start;
}

static void close_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    xd_ema_destroy(s->average);
    xd_optimizer_destroy(s->optimizer);
    xd_parallel_destroy(s->parallel);
    xd_model_destroy(s->model);
    free(s->memory);
    toy_close(s->toy);
    memset(s, 0, sizeof *s);
}

static const char *name_of(int which) {
    return arms[which].name;
}

static void answer(const stage *st, int which) {
    const scene *s = (const scene *)stage_scene(st, which);
    printf("%.9f %.0f\n", s->seconds, s->bytes);
}

/* ---- rows ---- */

static double measure_arm(void *state) {
    const stage_arm *a = (const stage_arm *)state;
    return ((const scene *)stage_lead(a->stage, STAGE_STEP, a->which))->seconds;
}

/* Of the toy's last step. */
static void print_shares(const scene *s) {
    const toy_seconds t = toy_spent(s->toy);
    const double work = t.step.processor - t.waiting.processor;
    printf("#   %s: of a step %.4f at work inside the wrapper's calls, %.4f in front of them until the other "
           "rank came to the same one, %.4f in norm, step and average; of the processor's time without that "
           "waiting %.4f and %.4f\n",
           s->arm->name, t.wrapper.clock / t.step.clock, t.waiting.clock / t.step.clock,
           t.optimizer.clock / t.step.clock, t.wrapper.processor / work, t.optimizer.processor / work);
}

/* The quickest of a few steps of an arm that is open. */
static double quickest(stage *st, int which) {
    double least = 1e9;
    for (int i = 0; i < 5; i++) {
        const double seconds = ((const scene *)stage_lead(st, STAGE_STEP, which))->seconds;
        least = seconds < least ? seconds : least;
    }
    return least;
}

static void print_price(stage *st, int compared, int plain) {
    const double step = quickest(st, plain), price = quickest(st, compared) - step;
    printf("#   comparing the replicas of 50.3 M weights takes %.4f s; once in %d steps that is %.6f of this "
           "step, which computes nothing\n",
           price, EVERY, price / EVERY / step);
}

/* Times two arms in turn; the second is the reference. Bytes, and for the toy what calls of the library took, are of a step
 * before. */
static bool compare(stage *st, FILE *json, const bench_machine *m, const char *ours, const char *other) {
    stage_arm a = { st, stage_find(st, ours) }, b = { st, stage_find(st, other) };
    char shape[256], variant[64];
    const bool optimizer = arms[a.which].kind == OPTIMIZER;
    stage_open_both(&a, &b);
    (void)stage_lead(st, STAGE_STEP, a.which);
    const scene *s = (const scene *)stage_lead(st, STAGE_STEP, a.which);
    int length = snprintf(shape, sizeof shape, "\"n\":%d,\"leaves\":%lld,\"bytes_sent\":%.0f", TEAM_RANKS,
                          (long long)arms[a.which].leaves, s->bytes);
    if (s->toy) {
        const toy_seconds t = toy_spent(s->toy);
        length += snprintf(shape + length, sizeof shape - (size_t)length,
                           ",\"wrapper_share\":%.4f,\"waiting_share\":%.4f,\"optimizer_share\":%.4f",
                           t.wrapper.clock / t.step.clock, t.waiting.clock / t.step.clock,
                           t.optimizer.clock / t.step.clock);
        print_shares(s);
        (void)stage_lead(st, STAGE_STEP, b.which);
        print_shares((const scene *)stage_lead(st, STAGE_STEP, b.which));
    }
    if (arms[a.which].kind == COMPARED) print_price(st, a.which, b.which);
    snprintf(variant, sizeof variant, "%s, %s", team_transport, ours);
    const bench_arm one = { ours, &a, NULL, measure_arm }, two = { other, &b, NULL, measure_arm };
    const bench_row row = { optimizer                   ? "adamw+clip+ema"
                            : arms[a.which].kind == TOY ? "toy_step"
                                                        : "communication_step",
                            variant,
                            shape,
                            "f32",
                            optimizer ? optimizer_bytes() : 0.0,
                            optimizer ? m->in_place : 0.0,
                            "in place, one thread",
                            0.0,
                            0.0,
                            0.0,
                            0.0 };
    const bool good = bench_run(json, m, &row, &one, &two);
    stage_close_both(&a, &b);
    return good;
}

/* ---- the plan of many ranks, on one core ---- */

enum { PLAN_WEIGHTS = 10000, PLAN_IN_BLOCK = 10, PLAN_RANKS = 512 };

/* From the description on; ranks of the state, an int. */
static void run_plan(void *state) {
    const int ranks = *(const int *)state;
    static const char *const units[] = { "layer" };
    xd_ctx *ctx = NULL;
    xd_model *model = NULL;
    xd_block *block = NULL;
    xd_memory_plan_desc d;
    xd_memory_plan plan;
    xd_fsdp_desc fsdp;
    char name[32];
    memset(&d, 0, sizeof d);
    memset(&fsdp, 0, sizeof fsdp);
    team_require(NULL, xd_ctx_create(NULL, &ctx));
    const xd_optimizer_desc adamw = xd_adamw_defaults(NULL, 0);
    team_require(ctx, xd_model_create(ctx, NULL, &model));
    for (int i = 0; i < PLAN_WEIGHTS; i++) {
        xd_weight_desc w;
        xd_block_desc b;
        memset(&w, 0, sizeof w);
        memset(&b, 0, sizeof b);
        b.name = w.name = name;
        b.type = units[0];
        snprintf(name, sizeof name, "%s%d", i % PLAN_IN_BLOCK ? "weight" : "layers.", i);
        if (i % PLAN_IN_BLOCK == 0) team_require(ctx, xd_block_add(xd_model_root(model), &b, &block));
        snprintf(name, sizeof name, "weight%d", i);
        w.dtype = XD_DTYPE_F32;
        w.ndim = 2;
        w.shape[0] = 1000 + i % 7;
        w.shape[1] = 1024;
        team_require(ctx, xd_weight_add(block, &w, NULL));
    }
    team_require(ctx, xd_model_seal(model));
    fsdp.unit_types = units;
    fsdp.unit_type_count = 1;
    d.fsdp = &fsdp;
    d.ranks = ranks;
    d.optimizer = &adamw;
    team_require(ctx, xd_plan_memory(model, &d, ranks - 1, &plan));
    if (plan.elements <= 0) exit(2);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

static bool compare_plans(FILE *json, const bench_machine *m) {
    int many = PLAN_RANKS, few = TEAM_RANKS;
    const bench_row row = { "plan",
                            "10,000 weights, 512 ranks",
                            "\"weights\":10000,\"n\":512",
                            "f32",
                            0.0,
                            0.0,
                            "",
                            0.0,
                            0.0,
                            0.0,
                            0.0 };
    const bench_arm ours = { "xdistill", &many, run_plan, NULL }, other = { "2 ranks", &few, run_plan, NULL };
    return bench_run(json, m, &row, &ours, &other);
}

static int run_rows(stage *st, FILE *json) {
    const bench_machine machine = bench_measure_machine((size_t)128 << 20);
    int wrong = 0;
    bench_header(&machine, "wrapped models, two ranks");
    wrong += !compare(st, json, &machine, "ddp-invariant", "ddp");
    wrong += !compare(st, json, &machine, "ddp-compared", "ddp");
    wrong += !compare(st, json, &machine, "fsdp-invariant", "fsdp");
    wrong += !compare(st, json, &machine, "ddp-8-invariant", "ddp-8");
    wrong += !compare(st, json, &machine, "fsdp-8-invariant", "fsdp-8");
    wrong += !compare(st, json, &machine, "optimizer", "in-place");
    wrong += !compare(st, json, &machine, "toy-one-ddp-invariant", "toy-one-ddp");
    wrong += !compare(st, json, &machine, "toy-one-fsdp-invariant", "toy-one-fsdp");
    wrong += !compare(st, json, &machine, "toy-ddp-invariant", "toy-ddp");
    wrong += !compare(st, json, &machine, "toy-fsdp-invariant", "toy-fsdp");
    wrong += !compare(st, json, &machine, "toy-kept-invariant", "toy-kept");
#if !defined(BENCH_MPI)
    wrong += !compare_plans(json, &machine);
#endif
    return wrong;
}

int main(int argc, char **argv) {
    static const stage_program program = { name_of,     ARMS,   open_scene, step_scene,
                                           close_scene, answer, run_rows,   sizeof(scene) };
    return stage_main(&program, argc, argv);
}
