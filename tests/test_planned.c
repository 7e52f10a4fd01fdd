/* Plans: what they say is what each create then takes and what each loss needs, to the byte, on one rank and on several, and for
 * ranks that are not here; what cannot be planned is refused by name. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h" /* xdi_: of the scene */
#endif
#include "checkpoint_files.h"
#include "dmd_scene.h"
#include "live_bytes.h"
#include "loss_calls.h"
#include "planned.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xd_test_topology.h"

enum { RANKS = 3, ROWS = 6, VOCABULARY = 12, WIDTH = 4, ELEMENTS = 40 };

/* One rank with all that creates and losses are made of. */
typedef struct scene {
    xd_ctx *ctx;
    xd_comm *world, *self;
    xd_vocab *vocab;
    xd_topology line;
    xd_layout *layout;
    xd_model *model, *bare;
    xd_param params[2];
    float values[2][ELEMENTS], gradients[2][ELEMENTS];
    xd_optimizer *optimizer, *trained;
    xd_ema *average;
    xd_queue *inline_queue, *worker;
    xd_halo *halo;
    xd_crossing *crossing;
    xd_pipeline *pipeline;
    xd_inputs *inputs;
    xd_leaf_stack *stack, *placed;
    xd_checkpoint_saver *saver;
    xd_dmd *dmd;
    xd_sampler *sampler;
    dmd_net nets[XD_DMD_ROLES];
    float nodes[8 * ELEMENTS];
    float student[ROWS * VOCABULARY], teacher[ROWS * VOCABULARY], gradient[ROWS * VOCABULARY];
    float weight[VOCABULARY * WIDTH], weight_gradient[VOCABULARY * WIDTH];
    int64_t labels[ROWS];
    void *workspace;
    size_t bytes;
} scene;

/* ---- creates ---- */

static xd_result make_optimizer(scene *s) {
    const xd_optimizer_desc d = xd_adamw_defaults(s->params, 2);
    return xd_optimizer_create(s->ctx, &d, &s->optimizer);
}
static void drop_optimizer(scene *s) {
    xd_optimizer_destroy(s->optimizer);
}
static xd_result make_average(scene *s) {
    xd_ema_desc d = xd_ema_defaults(XD_EMA_CONSTANT);
    d.params = s->params;
    d.param_count = 2;
    d.compensated = true;
    return xd_ema_create(s->ctx, &d, &s->average);
}
static void drop_average(scene *s) {
    xd_ema_destroy(s->average);
}
static xd_result make_inline(scene *s) {
    const xd_queue_desc d = { XD_QUEUE_INLINE, 5 };
    return xd_queue_create(s->world, &d, &s->inline_queue);
}
static void drop_inline(scene *s) {
    xd_queue_destroy(s->inline_queue);
}
static xd_result make_worker(scene *s) {
    const xd_queue_desc d = { XD_QUEUE_WORKER, 0 };
    return xd_queue_create(s->world, &d, &s->worker);
}
static void drop_worker(scene *s) {
    xd_queue_destroy(s->worker);
}
static xd_result halo_over(scene *s, xd_comm *comm) {
    const xd_halo_desc d = {
        .layout = s->layout, .dtype = XD_DTYPE_F32, .before = { 0, 2 }, .after = { 0, 1 }
    };
    return xd_halo_create(comm, &d, &s->halo);
}
static xd_result make_halo(scene *s) {
    return halo_over(s, s->world);
}
static void drop_halo(scene *s) {
    xd_halo_destroy(s->halo);
}
static xd_result crossing_over(scene *s, xd_comm *comm) {
    const xd_crossing_desc d = {
        .kind = XD_CROSSING_GATHER, .dtype = XD_DTYPE_BF16, .ndim = 2, .shape = { 5, 7 }, .dim = 1
    };
    return xd_crossing_create(comm, &d, &s->crossing);
}
static xd_result make_crossing(scene *s) {
    return crossing_over(s, s->world);
}
static void drop_crossing(scene *s) {
    xd_crossing_destroy(s->crossing);
}
static xd_result pipeline_over(scene *s, xd_comm *comm) {
    const xd_pipeline_run_desc d = { .schedule = { .micro_batches = 4 },
                                     .ndim = 1,
                                     .shape = { 11 },
                                     .dtype = XD_DTYPE_F32,
                                     .value_count = 1 };
    return xd_pipeline_create(comm, &d, &s->pipeline);
}
static xd_result make_pipeline(scene *s) {
    return pipeline_over(s, s->world);
}
static void drop_pipeline(scene *s) {
    xd_pipeline_destroy(s->pipeline);
}
static xd_result make_inputs(scene *s) {
    const xd_inputs_desc d = { 100, 3 };
    return xd_inputs_create(s->model, &d, &s->inputs);
}
static void drop_inputs(scene *s) {
    xd_inputs_destroy(s->inputs);
}
static xd_result make_stack(scene *s) {
    const xd_leaf_stack_desc d = { .leaves = { 1, 5, 8 }, .elements = 9 };
    return xd_leaf_stack_create(s->ctx, &d, &s->stack);
}
static void drop_stack(scene *s) {
    xd_leaf_stack_destroy(s->stack);
}
static xd_result make_placed(scene *s) {
    const xd_leaf_stack_desc d = {
        .leaves = { 1, 5, 8 }, .elements = 9, .memory = s->nodes, .memory_bytes = s->bytes
    };
    return xd_leaf_stack_create(s->ctx, &d, &s->placed);
}
static void drop_placed(scene *s) {
    xd_leaf_stack_destroy(s->placed);
}
static xd_result make_saver(scene *s) {
    const xd_tensor_part parts[2] = {
        { .name = "a",
          .dtype = XD_DTYPE_F32,
          .ndim = 1,
          .shape = { ELEMENTS },
          .range = { 0, ELEMENTS },
          .data = s->values[0] },
        { .name = "b",
          .dtype = XD_DTYPE_F32,
          .ndim = 1,
          .shape = { ELEMENTS },
          .range = { 0, ELEMENTS },
          .data = s->values[1] },
    };
    const xd_checkpoint_network network = { .parts = parts, .part_count = 2, .optimizer = s->trained };
    const xd_checkpoint_saver_desc d = { &network, 1 };
    return xd_checkpoint_saver_create(s->world, &d, &s->saver);
}
static void drop_saver(scene *s) {
    xd_checkpoint_saver_destroy(s->saver);
}
static xd_result make_storage(scene *s) {
    return xd_model_allocate(s->bare);
}
static void drop_storage(scene *s) {
    (void)s; /* with the model */
}
static xd_result make_dmd(scene *s) {
    xd_dmd_desc d = dmd_settings(XD_DMD_MODELOPT, 3);
    for (int role = 0; role < XD_DMD_ROLES; role++)
        d.networks[role] = dmd_network(&s->nets[role], (xd_dmd_role)role);
    d.data = s->world;
    return xd_dmd_create(s->ctx, &d, &s->dmd);
}
static void drop_dmd(scene *s) {
    xd_dmd_destroy(s->dmd);
}
static xd_result make_sampler(scene *s) {
    xd_sampler_desc d = xd_sampler_defaults();
    d.network = dmd_network(&s->nets[0], XD_DMD_STUDENT);
    d.kind = XD_SAMPLER_HEUN;
    d.steps = 3;
    d.list = dmd_rungs_three;
    d.samples = 4;
    d.elements = DMD_ELEMENTS;
    return xd_sampler_create(s->ctx, &d, &s->sampler);
}
static void drop_sampler(scene *s) {
    xd_sampler_destroy(s->sampler);
}

typedef struct creation {
    const char *name;
    xd_result (*make)(scene *s);
    void (*drop)(scene *s);
    size_t out; /* offset of the pointer; 0: none */
} creation;
#define AT(name) #name, make_##name, drop_##name
static const creation creations[] = {
    { AT(optimizer), offsetof(scene, optimizer) }, { AT(average), offsetof(scene, average) },
    { AT(inline), offsetof(scene, inline_queue) }, { AT(worker), offsetof(scene, worker) },
    { AT(halo), offsetof(scene, halo) },           { AT(crossing), offsetof(scene, crossing) },
    { AT(pipeline), offsetof(scene, pipeline) },   { AT(inputs), offsetof(scene, inputs) },
    { AT(stack), offsetof(scene, stack) },         { AT(placed), offsetof(scene, placed) },
    { AT(saver), offsetof(scene, saver) },         { AT(dmd), offsetof(scene, dmd) },
    { AT(sampler), offsetof(scene, sampler) },     { AT(storage), 0 },
};
#undef AT
enum { CREATIONS = sizeof creations / sizeof *creations };

static void add_block(xd_model *model, const char *name, bool recompute) {
    xd_block *block = NULL;
    const xd_block_desc b = { .name = name, .recompute = recompute };
    const xd_weight_desc w = { .name = "weight",
                               .dtype = XD_DTYPE_F32,
                               .ndim = 1,
                               .shape = { ELEMENTS },
                               .init = { .kind = XD_INIT_ZERO } };
    CHECK_EQ_INT(xd_block_add(xd_model_root(model), &b, &block), XD_OK);
    CHECK_EQ_INT(xd_weight_add(block, &w, NULL), XD_OK);
}

static void scene_open(scene *s, xd_comm *world) {
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    CHECK_EQ_INT(xd_comm_self(s->ctx, &s->self), XD_OK);
    CHECK_EQ_INT(vocab_even(s->ctx, world, VOCABULARY, &s->vocab), XD_OK);
    s->line = line_of("dp", xd_comm_size(world));
    const xd_layout_desc cut = {
        .ndim = 2, .shape = { 3, 17 }, .topology = &s->line, .placement = { { .kind = XD_SHARD, .dim = 1 } }
    };
    CHECK_EQ_INT(xd_layout_create(s->ctx, &cut, &s->layout), XD_OK);
    for (int i = 0; i < 2; i++)
        s->params[i] = (xd_param){ .name = i ? "b" : "a",
                                   .value = s->values[i],
                                   .gradient = s->gradients[i],
                                   .dtype = XD_DTYPE_F32,
                                   .count = ELEMENTS };
    const xd_optimizer_desc adamw = xd_adamw_defaults(s->params, 2);
    CHECK_EQ_INT(xd_optimizer_create(s->ctx, &adamw, &s->trained), XD_OK);
    xd_model **const models[] = { &s->model, &s->bare };
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(xd_model_create(s->ctx, NULL, models[i]), XD_OK);
        add_block(*models[i], "a", true);
        add_block(*models[i], "b", false);
        CHECK_EQ_INT(xd_model_seal(*models[i]), XD_OK);
    }
    for (int i = 0; i < ROWS * VOCABULARY; i++) {
        s->student[i] = (float)(i % 7) * 0.25f;
        s->teacher[i] = (float)(i % 5) * 0.5f;
    }
    for (int i = 0; i < VOCABULARY * WIDTH; i++) s->weight[i] = (float)(i % 3);
    for (int i = 0; i < ROWS; i++) s->labels[i] = i % VOCABULARY;
}

static void scene_close(scene *s) {
    xd_optimizer_destroy(s->trained);
    xd_model_destroy(s->model);
    xd_model_destroy(s->bare);
    xd_layout_destroy(s->layout);
    xd_vocab_destroy(s->vocab);
    xd_comm_destroy(s->self);
}

static void run(int ranks, xd_rank_function function) {
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, NULL }, .timeout_seconds = 60 };
    xd_error error;
    memset(&error, 0, sizeof error);
    const xd_result result = xd_run_threads(ranks, &desc, function, NULL, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    CHECK_EQ_INT(result, XD_OK);
}

static void check_creation(scene *s, const creation *c) {
    xd_planned planned;
    void *marker = s;
    if (c->out) memcpy((char *)s + c->out, &marker, sizeof marker);
    (void)PLANNED(s->ctx, c->make(s), &planned); /* the context keeps scratch of its first calls */
    const long long start = live_bytes;
    const xd_result plans = PLANNED(s->ctx, c->make(s), &planned);
    if (plans != XD_OK) printf("    %s: %s\n", c->name, xd_last_error(s->ctx)->message);
    CHECK_EQ_INT(plans, XD_OK);
    CHECK_EQ_INT(live_bytes, start);
    if (c->out) memcpy(&marker, (char *)s + c->out, sizeof marker);
    CHECK(!c->out || marker == NULL);
    s->bytes = planned.workspace;                            /* of nodes in the caller's memory */
    for (int round = 0; round < (c->out ? 2 : 1); round++) { /* the second with scratch that is there */
        CHECK_EQ_INT(xd_barrier(s->world), XD_OK);
        const long long before = live_bytes;
        const xd_result made = c->make(s);
        if (made != XD_OK) printf("    %s: %s\n", c->name, xd_last_error(s->ctx)->message);
        CHECK_EQ_INT(made, XD_OK);
        if ((round || !c->out) && live_bytes - before != (long long)planned.memory.host)
            printf("    %s takes %lld, planned are %zu\n", c->name, live_bytes - before, planned.memory.host);
        if (round || !c->out) CHECK_EQ_INT(live_bytes - before, planned.memory.host);
        CHECK_EQ_INT(xd_barrier(s->world), XD_OK);
        c->drop(s);
    }
    CHECK_EQ_INT(planned.memory.device, 0);
}

static xd_result creations_rank(xd_comm *world, void *unused) {
    scene *s = (scene *)calloc(1, sizeof *s);
    (void)unused;
    scene_open(s, world);
    for (int i = 0; i < CREATIONS; i++) check_creation(s, &creations[i]);
    scene_close(s);
    free(s);
    return XD_OK;
}

XD_TEST(creates_take_what_is_planned_to_the_byte) {
    for (int ranks = 1; ranks <= RANKS; ranks++) run(ranks, creations_rank);
}

/* ---- other ranks ---- */

typedef xd_result over(scene *s, xd_comm *comm);

/* On a group of one rank, for each rank of the world, what that rank plans for itself. */
static void check_elsewhere(scene *s, over *make) {
    const int n = xd_comm_size(s->world);
    xd_planned own, there;
    int64_t mine[3], all[RANKS * 3], counts[RANKS] = { 3, 3, 3 };
    CHECK_EQ_INT(PLANNED(s->ctx, make(s, s->world), &own), XD_OK);
    mine[0] = (int64_t)own.memory.host;
    mine[1] = (int64_t)own.forward_sent;
    mine[2] = (int64_t)own.backward_sent;
    CHECK_EQ_INT(xd_all_gather(s->world, mine, all, counts, XD_DTYPE_I64), XD_OK);
    for (int r = 0; r < n; r++) {
        CHECK_EQ_INT(PLANNED_FOR(s->ctx, r, n, make(s, s->self), &there), XD_OK);
        CHECK_EQ_INT(there.memory.host, all[3 * r]);
        CHECK_EQ_INT(there.forward_sent, all[3 * r + 1]);
        CHECK_EQ_INT(there.backward_sent, all[3 * r + 2]);
    }
}

static xd_result elsewhere_rank(xd_comm *world, void *unused) {
    scene *s = (scene *)calloc(1, sizeof *s);
    (void)unused;
    scene_open(s, world);
    check_elsewhere(s, halo_over);
    check_elsewhere(s, crossing_over);
    check_elsewhere(s, pipeline_over);
    scene_close(s);
    free(s);
    return XD_OK;
}

XD_TEST(shares_of_ranks_that_are_not_here_are_what_they_plan_themselves) {
    run(RANKS, elsewhere_rank);
}

/* ---- losses ---- */

static xd_loss_desc loss_of(scene *s) {
    const xd_vocab_info v = xd_vocab_describe(s->vocab);
    xd_loss_desc d = {
        .vocab = s->vocab, .hard_weight = 1.0, .soft_weight = 1.0, .divergence = XD_JSD, .beta = 0.5
    };
    d.student = xd_rows_of(s->student, XD_DTYPE_F32, ROWS, v.end - v.begin);
    d.teacher = xd_rows_of(s->teacher, XD_DTYPE_F32, ROWS, v.end - v.begin);
    d.common.gradient = xd_rows_of(s->gradient, XD_DTYPE_F32, ROWS, v.end - v.begin);
    d.common.labels = xd_ids_of(s->labels, XD_DTYPE_I64);
    d.common.workspace = s->workspace;
    d.common.workspace_bytes = s->bytes;
    return d;
}
static xd_result call_loss(scene *s) {
    xd_loss_values values;
    const xd_loss_desc d = loss_of(s);
    return xd_loss(s->ctx, &d, &values);
}
static xd_result call_cosine(scene *s) {
    xd_loss_values values;
    const xd_loss_desc d = loss_of(s);
    return cosine_loss(s->ctx, &d, &values);
}
static xd_result call_mft(scene *s) {
    xd_loss_values values;
    mft_desc d = mft_defaults();
    d.loss = loss_of(s);
    return mft_loss(s->ctx, &d, &values);
}
static xd_result call_head(scene *s) {
    const xd_vocab_info v = xd_vocab_describe(s->vocab);
    xd_loss_values values;
    xd_head_loss_desc d = { .loss = { .vocab = s->vocab, .hard_weight = 1.0 } };
    d.loss.common.labels = xd_ids_of(s->labels, XD_DTYPE_I64);
    d.student.hidden = xd_rows_of(s->student, XD_DTYPE_F32, ROWS, WIDTH);
    d.student.weight = xd_rows_of(s->weight, XD_DTYPE_F32, v.end - v.begin, WIDTH);
    d.hidden_gradient = xd_rows_of(s->gradient, XD_DTYPE_F32, ROWS, WIDTH);
    d.weight_gradient = s->weight_gradient;
    d.workspace = s->workspace;
    d.workspace_bytes = s->bytes;
    return xd_head_loss(s->ctx, &d, &values);
}
static xd_result call_topk(scene *s) {
    const xd_loss_desc from = loss_of(s);
    xd_loss_values values;
    const xd_topk_desc d = {
        .vocab = s->vocab, .k = 3, .student = from.student, .teacher = from.teacher, .common = from.common
    };
    return xd_topk_kl_loss(s->ctx, &d, &values);
}
static xd_result call_xtoken(scene *s) {
    xd_xtoken_values values;
    xd_xtoken_desc d = xd_xtoken_defaults();
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(XD_XTOKEN_SAME);
    const xd_loss_desc from = loss_of(s);
    teacher.logits = xd_rows_of(s->teacher, XD_DTYPE_F32, ROWS, VOCABULARY);
    d.vocab = s->vocab;
    d.student = from.student;
    d.common = from.common;
    d.teachers = &teacher;
    d.teacher_count = 1;
    d.sequences = 2;
    d.columns = 4;
    return xd_xtoken_loss(s->ctx, &d, &values);
}
static xd_sample_common samples_of(scene *s) {
    xd_sample_common common = { .weight = 1.0, .comm = s->world };
    common.workspace = s->workspace;
    common.workspace_bytes = s->bytes;
    return common;
}
static xd_result call_vsd(scene *s) {
    xd_sample_values values;
    xd_vsd_desc d = xd_vsd_defaults();
    d.generated = xd_rows_of(s->student, XD_DTYPE_F32, ROWS, WIDTH);
    d.teacher = xd_rows_of(s->teacher, XD_DTYPE_F32, ROWS, WIDTH);
    d.fake = xd_rows_of(s->weight, XD_DTYPE_F32, ROWS, WIDTH);
    d.gradient = xd_rows_of(s->gradient, XD_DTYPE_F32, ROWS, WIDTH);
    d.common = samples_of(s);
    return xd_vsd_loss(s->ctx, &d, &values);
}
static xd_result call_denoise(scene *s) {
    xd_denoise_term terms[ROWS];
    xd_sample_values values;
    xd_denoise_desc d = xd_denoise_defaults();
    memset(terms, 0, sizeof terms);
    d.prediction = xd_rows_of(s->student, XD_DTYPE_F32, ROWS, WIDTH);
    d.clean = xd_rows_of(s->teacher, XD_DTYPE_F32, ROWS, WIDTH);
    d.noise = xd_rows_of(s->weight, XD_DTYPE_F32, ROWS, WIDTH);
    d.terms = terms;
    d.common = samples_of(s);
    return xd_denoise_loss(s->ctx, &d, &values);
}
static xd_result call_gan(scene *s) {
    xd_sample_values values;
    xd_gan_desc d = xd_gan_defaults();
    d.fake = xd_rows_of(s->student, XD_DTYPE_F32, ROWS, 2);
    d.common = samples_of(s);
    return xd_gan_loss(s->ctx, &d, &values);
}

static const struct loss_call {
    const char *name;
    xd_result (*call)(scene *s);
} losses[] = { { "loss", call_loss }, { "cosine", call_cosine },   { "mft", call_mft },
               { "head", call_head }, { "topk", call_topk },       { "xtoken", call_xtoken },
               { "vsd", call_vsd },   { "denoise", call_denoise }, { "gan", call_gan } };
enum { LOSSES = sizeof losses / sizeof *losses };

static xd_result losses_rank(xd_comm *world, void *unused) {
    scene *s = (scene *)calloc(1, sizeof *s);
    (void)unused;
    scene_open(s, world);
    for (int i = 0; i < LOSSES; i++) {
        float before[ROWS * VOCABULARY];
        memcpy(before, s->gradient, sizeof before);
        s->workspace = NULL;
        s->bytes = 0;
        const long long start = live_bytes;
        const size_t bytes = PLANNED_WORKSPACE(s->ctx, losses[i].call(s));
        if (bytes == 0) printf("    %s: %s\n", losses[i].name, xd_last_error(s->ctx)->message);
        CHECK(bytes > 0 && live_bytes == start && memcmp(before, s->gradient, sizeof before) == 0);
        s->workspace = malloc(bytes);
        for (int less = 0; less < 2; less++) {
            s->bytes = bytes - (size_t)less;
            const xd_result result = losses[i].call(s);
            if (!less && result != XD_OK)
                printf("    %s: %s\n", losses[i].name, xd_last_error(s->ctx)->message);
            CHECK_EQ_INT(result, less ? XD_ERROR_ARGUMENT : XD_OK);
        }
        free(s->workspace);
    }
    scene_close(s);
    free(s);
    return XD_OK;
}

XD_TEST(losses_need_what_is_planned_to_the_byte) {
    for (int ranks = 1; ranks <= RANKS; ranks++) run(ranks, losses_rank);
}

/* ---- what a plan is, and what it refuses ---- */

static bool says(const scene *s, const char *words) {
    const char *message = xd_last_error(s->ctx)->message;
    if (!strstr(message, words)) printf("    \"%s\" is not in: %s\n", words, message);
    return strstr(message, words) != NULL;
}

static xd_result sums_rank(xd_comm *world, void *unused) {
    scene *s = (scene *)calloc(1, sizeof *s);
    xd_planned one, two, both, none = { { 1, 1 }, 1, 1, 1 };
    (void)unused;
    scene_open(s, world);
    CHECK_EQ_INT(PLANNED(s->ctx, make_optimizer(s), &one), XD_OK);
    CHECK_EQ_INT(PLANNED(s->ctx, make_average(s), &two), XD_OK);
    const size_t loss = PLANNED_WORKSPACE(s->ctx, call_loss(s)), gan = PLANNED_WORKSPACE(s->ctx, call_gan(s));
    CHECK_EQ_INT(xd_plan_begin(s->ctx, NULL), XD_OK);
    CHECK_EQ_INT(make_optimizer(s), XD_OK);
    CHECK_EQ_INT(make_average(s), XD_OK);
    CHECK_EQ_INT(call_loss(s), XD_OK);
    CHECK_EQ_INT(call_gan(s), XD_OK);
    s->params[0].count = -1; /* what fails adds nothing */
    CHECK_EQ_INT(make_optimizer(s), XD_ERROR_ARGUMENT);
    s->params[0].count = ELEMENTS;
    CHECK_EQ_INT(xd_plan_end(s->ctx, &both), XD_OK);
    CHECK_EQ_INT(both.memory.host, one.memory.host + two.memory.host);
    CHECK_EQ_INT(both.workspace, loss > gan ? loss : gan);
    CHECK_EQ_INT(xd_plan_begin(s->ctx, NULL), XD_OK);
    CHECK_EQ_INT(xd_plan_end(s->ctx, &none), XD_OK);
    CHECK(none.memory.host == 0 && none.workspace == 0 && none.forward_sent == 0);
    CHECK_EQ_INT(xd_plan_end(s->ctx, &none), XD_ERROR_STATE);
    CHECK(says(s, "no plan is open: xd_plan_begin opens one"));
    CHECK_EQ_INT(xd_plan_begin(s->ctx, &(xd_plan_desc){ .ranks = 4, .rank = 2 }), XD_OK);
    CHECK_EQ_INT(xd_plan_begin(s->ctx, NULL), XD_ERROR_STATE);
    CHECK(says(s, "a plan is open for rank 2 of 4: xd_plan_end ends it"));
    CHECK_EQ_INT(xd_plan_end(s->ctx, NULL), XD_OK);
    scene_close(s);
    free(s);
    return XD_OK;
}

XD_TEST(a_plan_adds_creates_and_takes_the_largest_loss) {
    run(1, sums_rank);
}

/* Crossings of 2^58 bytes, until the bytes of all exceed size_t: the last one counts nowhere. */
static xd_result excess_rank(xd_comm *world, void *unused) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int64_t side = INT64_C(1) << 28;
    const xd_crossing_desc desc = {
        .kind = XD_CROSSING_ALL_TO_ALL, .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { side, side }, .dim = 1
    };
    xd_crossing *crossing = NULL;
    xd_planned planned;
    int made = 0;
    (void)unused;
    CHECK_EQ_INT(xd_plan_begin(ctx, &(xd_plan_desc){ .ranks = 2 }), XD_OK);
    while (made < 1000 && xd_crossing_create(world, &desc, &crossing) == XD_OK) made++;
    CHECK(made > 1 && made < 1000);
    CHECK_EQ_INT(xd_last_error(ctx)->result, XD_ERROR_MEMORY);
    CHECK_EQ_INT(xd_plan_end(ctx, &planned), XD_OK);
    /* Of its half of the columns a rank sends half of the rows. */
    CHECK(planned.forward_sent == (uint64_t)made * (uint64_t)side * (uint64_t)side);
    CHECK(planned.backward_sent == planned.forward_sent);
    return XD_OK;
}

XD_TEST(a_create_beyond_all_memory_adds_nothing_to_a_plan) {
    run(1, excess_rank);
}

static xd_result refusals_rank(xd_comm *world, void *unused) {
    scene *s = (scene *)calloc(1, sizeof *s);
    float number = 1.0f, out[3 * 17 + 1] = { 0 };
    xd_vocab *vocab = NULL;
    xd_model *model = NULL;
    xd_weights *weights = NULL;
    int64_t step = -1;
    xd_block_view view;
    (void)unused;
    scene_open(s, world);
    CHECK_EQ_INT(make_average(s), XD_OK);
    CHECK_EQ_INT(make_halo(s), XD_OK);
    CHECK_EQ_INT(xd_model_allocate(s->model), XD_OK);
    xd_block *block = xd_model_find_block(s->model, "a");
    CHECK_EQ_INT(xd_plan_begin(s->ctx, NULL), XD_OK);
    CHECK_EQ_INT(vocab_even(s->ctx, NULL, 5, &vocab), XD_ERROR_UNSUPPORTED);
    CHECK(says(s, "xd_vocab_create while a plan is open, which does not measure it: xd_plan_end ends it"));
    CHECK_EQ_INT(xd_model_create(s->ctx, NULL, &model), XD_ERROR_UNSUPPORTED);
    CHECK(says(s, "xd_model_create while a plan is open") && vocab == NULL && model == NULL);
    CHECK_EQ_INT(xd_optimizer_step(s->trained, NULL, NULL), XD_ERROR_STATE);
    CHECK(says(s, "xd_optimizer_step while a plan is open: xd_plan_end ends it"));
    CHECK_EQ_INT(xd_ema_update(s->average, 1, NULL), XD_ERROR_STATE);
    CHECK(says(s, "xd_ema_update while a plan is open"));
    CHECK_EQ_INT(xd_halo_exchange(s->halo, s->values[0], out), XD_ERROR_STATE);
    CHECK(says(s, "xd_halo_exchange while a plan is open"));
    CHECK_EQ_INT(xd_block_begin(block, (xd_pass){ .kind = XD_PASS_FORWARD }, &view), XD_ERROR_STATE);
    CHECK(says(s, "xd_block_begin while a plan is open"));
    CHECK_EQ_INT(xd_weights_open(s->ctx, &(xd_weights_desc){ .directory = "/nowhere" }, &weights),
                 XD_ERROR_STATE);
    CHECK(says(s, "xd_weights_open while a plan is open"));
    CHECK_EQ_INT(xd_checkpoint_find(s->ctx, "/nowhere", &step), XD_ERROR_STATE);
    CHECK_EQ_INT(xd_all_reduce(world, &number, &number, 1, XD_DTYPE_F32, XD_SUM), XD_ERROR_STATE);
    CHECK(says(s, "all_reduce while a plan is open: xd_plan_end ends it"));
    CHECK_EQ_INT(xd_agree(world, XD_OK), XD_ERROR_STATE);
    CHECK_EQ_INT(xd_plan_end(s->ctx, NULL), XD_OK);
    CHECK_EQ_INT(xd_optimizer_step(s->trained, NULL, NULL), XD_OK);
    CHECK_EQ_INT(xd_all_reduce(world, &number, &number, 1, XD_DTYPE_F32, XD_SUM), XD_OK);
    drop_halo(s);
    drop_average(s);
    scene_close(s);
    free(s);
    return XD_OK;
}

XD_TEST(what_cannot_be_planned_is_refused_by_name) {
    for (int ranks = 1; ranks <= 2; ranks++) run(ranks, refusals_rank);
}

/* What a refused commit would have published is gone: a writer of the same name can start at once. */
static xd_result commits_rank(xd_comm *world, void *unused) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int64_t shape[1] = { 2 };
    const xd_weights_entry entry = { "w", XD_DTYPE_F32, 1, shape };
    const float values[2] = { 1.0f, 2.0f };
    const char *root = new_root(); /* one rank runs this */
    const xd_publish_directory_desc place = { path_in(root, "place") };
    const xd_weights_writer_desc desc = { .file = path_in(root, "file"),
                                          .entries = &entry,
                                          .entry_count = 1 };
    long long held = 0;
    (void)unused;
    for (int i = 0; i < 2; i++) {
        xd_publish_directory *directory = NULL;
        xd_weights_writer *file = NULL;
        CHECK_EQ_INT(xd_publish_directory_create(ctx, &place, &directory), XD_OK);
        CHECK_EQ_INT(xd_weights_writer_create(ctx, &desc, &file), XD_OK);
        CHECK_EQ_INT(xd_weights_writer_write(file, 0, 0, XD_WEIGHTS_REST, values), XD_OK);
        CHECK_EQ_INT(xd_plan_begin(ctx, NULL), XD_OK);
        CHECK_EQ_INT(xd_publish_directory_commit(directory), XD_ERROR_STATE);
        CHECK_EQ_INT(xd_weights_writer_commit(file), XD_ERROR_STATE);
        CHECK_EQ_INT(xd_plan_end(ctx, NULL), XD_OK);
        CHECK_EQ_STR(names_in(ctx, root), "");
        if (i == 1) CHECK(live_bytes == held);
        held = live_bytes;
    }
    remove_all(root);
    return XD_OK;
}

XD_TEST(a_commit_in_a_plan_discards_what_it_would_publish) {
    run(1, commits_rank);
}

/* Rank 1 alone plans: it waits for nobody, and the others hear of what it may not do. */
static xd_result alone_rank(xd_comm *world, void *unused) {
    scene *s = (scene *)calloc(1, sizeof *s);
    const bool plans = xd_comm_rank(world) == 1;
    float number = 1.0f;
    (void)unused;
    scene_open(s, world);
    if (plans) {
        CHECK_EQ_INT(xd_plan_begin(s->ctx, NULL), XD_OK);
        for (int i = 0; i < CREATIONS; i++) CHECK_EQ_INT(creations[i].make(s), XD_OK);
        for (int i = 0; i < LOSSES; i++) CHECK_EQ_INT(losses[i].call(s), XD_OK);
        CHECK_EQ_INT(xd_halo_create(world, NULL, &s->halo), XD_ERROR_ARGUMENT);
    }
    CHECK_EQ_INT(xd_barrier(world), plans ? XD_ERROR_STATE : XD_ERROR_PEER);
    CHECK(says(s, "barrier while a plan is open"));
    if (xd_comm_rank(world) == 0) {
        CHECK_EQ_INT(xd_recv(world, &number, 1, XD_DTYPE_F32, 1), XD_ERROR_PEER);
    } else if (plans) {
        CHECK_EQ_INT(xd_send(world, &number, 1, XD_DTYPE_F32, 0), XD_ERROR_STATE);
    }
    if (xd_comm_rank(world) == 0) {
        CHECK_EQ_INT(xd_send(world, &number, 1, XD_DTYPE_F32, 1), XD_ERROR_PEER);
    } else if (plans) {
        CHECK_EQ_INT(xd_recv(world, &number, 1, XD_DTYPE_F32, 0), XD_ERROR_STATE);
        CHECK(says(s, "recv while a plan is open"));
    }
    CHECK_EQ_INT(xd_collective_run(world, plans ? NULL : &(xd_collective){ .kind = XD_COLLECTIVE_BARRIER }),
                 plans ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(says(s, "collective is NULL"));
    if (plans) CHECK_EQ_INT(xd_plan_end(s->ctx, NULL), XD_OK);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    scene_close(s);
    free(s);
    return XD_OK;
}

XD_TEST(a_rank_that_plans_alone_waits_for_nobody) {
    run(RANKS, alone_rank);
}

XD_TEST_MAIN()
