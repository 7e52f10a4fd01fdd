/* Steps of distribution-matching distillation: what everything but the networks costs two ranks.
 *
 *     make bench-dmd         or      build/bench/dmd [-J FILE]
 *
 * A turn is a step of the student and four of the fake score, over 256 samples of both ranks: the networks and the recipe of
 * examples/toys, which are so small that whatever is not theirs shows. Their passes are timed as sections, with the opening and
 * closing of their blocks. `build/bench/dmd serve` instead carries out orders from its standard input, for bench/torch/dmd.py,
 * which interleaves them with PyTorch's: "open ARM", "step ARM", "close ARM", each answered with the seconds of a turn and those
 * outside of the networks. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "stage.h"

#include "../examples/toys/toy_net.h"

enum { BATCH = 256, LEAVES_MOST = 8, STEPS = 5 };

typedef struct arm {
    const char *name;
    team_mode mode;
    int leaves;   /* of a step, both ranks together */
    bool outside; /* told are the seconds outside of the networks */
} arm;

static const arm arms[] = {
    { "dmd", TEAM_DETERMINISTIC, 2, false },
    { "dmd-outside", TEAM_DETERMINISTIC, 2, true },
    { "dmd-invariant", TEAM_INVARIANT, LEAVES_MOST, false },
    { "dmd-invariant-outside", TEAM_INVARIANT, LEAVES_MOST, true },
};
enum { ARMS = sizeof arms / sizeof arms[0] };

/* A network, and the seconds that it took. */
typedef struct actor {
    xd_model *model;
    toy_net *net;
    xd_network inner;
    xd_parallel *parallel;
    xd_optimizer *optimizer;
    xd_ema *average;
    xd_param params[TOY_WEIGHTS];
    double seconds;
} actor;

typedef struct scene {
    const arm *arm;
    xd_ctx *ctx;
    xd_comm *comm;
    actor actors[XD_DMD_ROLES];
    xd_dmd *dmd;
    double seconds, outside; /* of the last turn */
} scene;

static const double rungs[] = { 0.999, 0.0 };

/* ---- networks ---- */

static xd_result forward(void *user, const xd_network_call *call) {
    actor *a = (actor *)user;
    const double start = bench_now();
    const xd_result result = a->inner.forward(a->inner.user, call);
    a->seconds += bench_now() - start;
    return result;
}

static xd_result backward(void *user, const xd_network_call *call) {
    actor *a = (actor *)user;
    const double start = bench_now();
    const xd_result result = a->inner.backward(a->inner.user, call);
    a->seconds += bench_now() - start;
    return result;
}

static void engage(scene *s, xd_dmd_role role, double rate, double decay) {
    actor *a = &s->actors[role];
    const int64_t samples = BATCH / s->arm->leaves;
    int64_t count;
    xd_ddp_desc ddp;
    memset(&ddp, 0, sizeof ddp);
    ddp.data = s->comm;
    ddp.micro_batches = s->arm->leaves;
    team_require(s->ctx, toy_net_describe(s->ctx, (uint64_t)role, &a->model));
    team_require(s->ctx, toy_net_create(s->ctx, a->model, samples, 1, &a->net));
    team_require(s->ctx, xd_ddp_create(a->model, &ddp, &a->parallel));
    team_require(s->ctx, xd_parallel_params(a->parallel, TOY_WEIGHTS, a->params, &count));
    xd_optimizer_desc adamw = xd_adamw_defaults(a->params, count);
    adamw.learning_rate = rate;
    adamw.beta1 = 0.0;
    adamw.beta2 = 0.99;
    team_require(s->ctx, xd_optimizer_create(s->ctx, &adamw, &a->optimizer));
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    ema.decay = decay;
    ema.params = a->params;
    ema.param_count = count;
    if (decay > 0.0) team_require(s->ctx, xd_ema_create(s->ctx, &ema, &a->average));
    a->inner = toy_net_network(a->net);
}

static void fill_role(scene *s, xd_dmd_desc *d, xd_dmd_role role) {
    actor *a = &s->actors[role];
    d->networks[role] = a->inner;
    d->networks[role].user = a;
    d->networks[role].forward = forward;
    d->networks[role].backward = backward;
    d->trainers[role].parallel = a->parallel;
    d->trainers[role].optimizer = a->optimizer;
    d->trainers[role].averages = &a->average;
    d->trainers[role].average_count = a->average != NULL;
}

/* ---- orders ---- */

static void open_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_FASTGEN);
    s->arm = &arms[which];
    s->ctx = st->me->ctx[s->arm->mode];
    s->comm = st->me->comm[s->arm->mode];
    engage(s, XD_DMD_STUDENT, 3e-4, 0.99);
    engage(s, XD_DMD_FAKE_SCORE, 2e-3, 0.0);
    engage(s, XD_DMD_TEACHER, 0.0, 0.0);
    for (int role = 0; role < XD_DMD_ROLES; role++)
        if (role != XD_DMD_DISCRIMINATOR) fill_role(s, &d, (xd_dmd_role)role);
    d.student_times.kind = XD_TIME_UNIFORM;
    d.student_times.min_t = 0.02;
    d.student_times.max_t = 0.98;
    d.fake_times = d.student_times;
    d.fake_loss.space = XD_PREDICT_FLOW;
    d.alternation = XD_DMD_MODELOPT;
    d.frequency = STEPS;
    d.own_samples = true;
    d.rungs.steps = 1;
    d.rungs.list = rungs;
    d.sizes.samples = BATCH / s->arm->leaves;
    d.sizes.step_samples = BATCH;
    d.sizes.elements = TOY_ELEMENTS;
    d.data = s->comm;
    team_require(s->ctx, xd_dmd_create(s->ctx, &d, &s->dmd));
}

static xd_result batch(void *user, int64_t micro_batch, xd_dmd_batch *out) {
    const scene *s = (const scene *)user;
    out->samples = BATCH / s->arm->leaves;
    out->first = micro_batch * out->samples;
    return XD_OK;
}

static void step_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    xd_dmd_values values;
    for (int role = 0; role < XD_DMD_ROLES; role++) s->actors[role].seconds = 0.0;
    team_require(s->ctx, xd_barrier(s->comm));
    const double start = bench_now();
    for (int i = 0; i < STEPS; i++) {
        team_require(s->ctx, xd_dmd_step(s->dmd, batch, s, &values));
        if (values.skipped) team_require(s->ctx, XD_ERROR_DATA);
    }
    team_require(s->ctx, xd_barrier(s->comm));
    s->outside = s->seconds = bench_now() - start;
    for (int role = 0; role < XD_DMD_ROLES; role++) s->outside -= s->actors[role].seconds;
}

static void close_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    xd_dmd_destroy(s->dmd);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        actor *a = &s->actors[role];
        xd_ema_destroy(a->average);
        xd_optimizer_destroy(a->optimizer);
        xd_parallel_destroy(a->parallel);
        toy_net_destroy(a->net);
        xd_model_destroy(a->model);
    }
    memset(s, 0, sizeof *s);
}

static const char *name_of(int which) {
    return arms[which].name;
}

static void answer(const stage *st, int which) {
    const scene *s = (const scene *)stage_scene(st, which);
    printf("%.9f %.9f\n", s->seconds, s->outside);
}

/* ---- rows ---- */

static double measure_arm(void *state) {
    const stage_arm *a = (const stage_arm *)state;
    const scene *s = (const scene *)stage_lead(a->stage, STAGE_STEP, a->which);
    return s->arm->outside ? s->outside : s->seconds;
}

/* Two arms in turn; the second is the reference. */
static bool compare(stage *st, FILE *json, const bench_machine *m, const char *ours, const char *other) {
    stage_arm a = { st, stage_find(st, ours) }, b = { st, stage_find(st, other) };
    char variant[64];
    snprintf(variant, sizeof variant, "%s, %s", team_transport, ours);
    stage_open_both(&a, &b);
    const bench_arm one = { ours, &a, NULL, measure_arm }, two = { other, &b, NULL, measure_arm };
    const bench_row row = {
        "dmd_turn", variant, "\"n\":2,\"B\":256,\"steps\":5", "f32", 0.0, 0.0, "", 0.0, 0.0, 0.0, 0.0
    };
    const bool good = bench_run(json, m, &row, &one, &two);
    stage_close_both(&a, &b);
    return good;
}

static int run_rows(stage *st, FILE *json) {
    const bench_machine machine = bench_measure_machine((size_t)64 << 20);
    int wrong = 0;
    bench_header(&machine, "distillation by distribution matching, two ranks");
    wrong += !compare(st, json, &machine, "dmd-outside", "dmd");
    wrong += !compare(st, json, &machine, "dmd-invariant", "dmd");
    wrong += !compare(st, json, &machine, "dmd-invariant-outside", "dmd-invariant");
    return wrong;
}

int main(int argc, char **argv) {
    static const stage_program program = { name_of,     ARMS,   open_scene, step_scene,
                                           close_scene, answer, run_rows,   sizeof(scene) };
    return stage_main(&program, argc, argv);
}
