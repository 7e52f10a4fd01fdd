/* A fake score of a teacher that is sharded over two ranks: from the teacher's shards, and from whole tensors of rank 0.
 *
 *     make bench-fake        or      build/bench/fake [-J FILE]
 *
 * The teacher has LAYERS weights of WIDTH x WIDTH, each a unit of FSDP, as has the fake score. Destroying it is not timed.
 * `build/bench/fake serve` carries out orders for bench/torch/fake.py, which interleaves them with PyTorch's: see stage.h. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "stage.h"

enum { LAYERS = 24, WIDTH = 1024, ELEMENTS = WIDTH * WIDTH };

typedef struct scene {
    bool root;
    xd_ctx *ctx;
    xd_comm *comm;
    xd_model *teacher;
    xd_parallel *parallel;
    float *whole; /* [LAYERS, ELEMENTS] of rank 0, from root */
    double seconds;
} scene;

static const char *const names[] = { "fake-shards", "fake-root" };
enum { ARMS = sizeof names / sizeof names[0] };

static const int64_t shape[2] = { WIDTH, WIDTH };

static xd_result describe(xd_ctx *ctx, xd_model **out) {
    const xd_model_desc desc = { .seed = 1 };
    XD_TRY(xd_model_create(ctx, &desc, out));
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        xd_block *block;
        snprintf(name, sizeof name, "layer%d", i);
        const xd_block_desc b = { .name = name, .type = "layer" };
        xd_weight_desc weight = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2 };
        weight.shape[0] = weight.shape[1] = WIDTH;
        weight.init.kind = XD_INIT_NORMAL;
        weight.init.scale = 0.03f;
        XD_TRY(xd_block_add(xd_model_root(*out), &b, &block));
        XD_TRY(xd_weight_add(block, &weight, NULL));
    }
    return xd_model_seal(*out);
}

static void open_scene(stage *st, int which) {
    static const char *const unit[1] = { "layer" };
    xd_fsdp_desc fsdp = { .unit_types = unit, .unit_type_count = 1 };
    scene *s = (scene *)stage_scene(st, which);
    s->root = which == 1;
    s->ctx = st->me->ctx[TEAM_DETERMINISTIC];
    s->comm = st->me->comm[TEAM_DETERMINISTIC];
    fsdp.data = s->comm;
    team_require(s->ctx, describe(s->ctx, &s->teacher));
    if (!s->root) {
        team_require(s->ctx, xd_fsdp_create(s->teacher, &fsdp, &s->parallel));
        return;
    }
    if (xd_comm_rank(s->comm) > 0) return;
    s->whole = (float *)malloc((size_t)LAYERS * ELEMENTS * sizeof(float));
    if (!s->whole) exit(2);
    for (int64_t i = 0; i < (int64_t)LAYERS * ELEMENTS; i++) s->whole[i] = (float)(i % 1009);
}

/* The whole tensors of rank 0. */
static void list_root(const scene *s, char texts[LAYERS][24], xd_state_tensor *tensors,
                      xd_fake_score_source *source) {
    memset(tensors, 0, LAYERS * sizeof *tensors);
    for (int i = 0; i < LAYERS && s->whole; i++) {
        snprintf(texts[i], sizeof texts[i], "layer%d.weight", i);
        tensors[i].name = texts[i];
        tensors[i].dtype = XD_DTYPE_F32;
        tensors[i].ndim = 2;
        tensors[i].shape = shape;
        tensors[i].data = s->whole + (size_t)i * ELEMENTS;
    }
    source->from = XD_FAKE_SCORE_FROM_ROOT;
    source->tensors = s->whole ? tensors : NULL;
    source->tensor_count = s->whole ? LAYERS : 0;
}

static void step_scene(stage *st, int which) {
    static const char *const unit[1] = { "layer" };
    xd_fsdp_desc fsdp = { .unit_types = unit, .unit_type_count = 1 };
    scene *s = (scene *)stage_scene(st, which);
    const xd_groups groups = { .dp = s->comm };
    char texts[LAYERS][24];
    xd_state_tensor tensors[LAYERS];
    xd_fake_score_report report;
    xd_built *built = NULL;
    xd_fake_score_meta_desc d;
    memset(&d, 0, sizeof d);
    d.teacher = s->teacher;
    d.groups = &groups;
    d.wrap.kind = XD_WRAP_FSDP;
    d.wrap.fsdp = &fsdp;
    d.report = &report;
    if (s->root) list_root(s, texts, tensors, &d.source);
    team_require(s->ctx, xd_barrier(s->comm));
    const double start = bench_now();
    team_require(s->ctx, xd_fake_score_create_meta(s->comm, &d, &built));
    team_require(s->ctx, xd_barrier(s->comm));
    s->seconds = bench_now() - start;
    if (report.loaded != LAYERS) exit(2);
    xd_built_destroy(built);
}

static void close_scene(stage *st, int which) {
    scene *s = (scene *)stage_scene(st, which);
    xd_parallel_destroy(s->parallel);
    xd_model_destroy(s->teacher);
    free(s->whole);
    memset(s, 0, sizeof *s);
}

static const char *name_of(int which) {
    return names[which];
}

static void answer(const stage *st, int which) {
    const scene *s = (const scene *)stage_scene(st, which);
    printf("%.9f %.9f\n", s->seconds, s->seconds);
}

/* ---- rows ---- */

static double measure_arm(void *state) {
    const stage_arm *a = (const stage_arm *)state;
    return ((const scene *)stage_lead(a->stage, STAGE_STEP, a->which))->seconds;
}

static int run_rows(stage *st, FILE *json) {
    const bench_machine machine = bench_measure_machine((size_t)64 << 20);
    stage_arm a = { st, stage_find(st, names[0]) }, b = { st, stage_find(st, names[1]) };
    char size[64];
    snprintf(size, sizeof size, "\"n\":2,\"tensors\":%d,\"P\":%d", LAYERS, LAYERS * ELEMENTS);
    bench_header(&machine, "fake scores of a sharded teacher, two ranks");
    stage_open_both(&a, &b);
    const bench_arm one = { names[0], &a, NULL, measure_arm }, two = { names[1], &b, NULL, measure_arm };
    const bench_row row = {
        "fake_score", "from the teacher's shards", size, "f32", 0.0, 0.0, "", 0.0, 0.0, 0.0, 0.0
    };
    const bool good = bench_run(json, &machine, &row, &one, &two);
    stage_close_both(&a, &b);
    return !good;
}

int main(int argc, char **argv) {
    static const stage_program program = { name_of,     ARMS,   open_scene, step_scene,
                                           close_scene, answer, run_rows,   sizeof(scene) };
    return stage_main(&program, argc, argv);
}
