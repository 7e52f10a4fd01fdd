/* Lists of a whole model on ranks that have some stages of it: what each has, what is refused, and a run that is saved by a pipeline and
 * goes on without one, and the other way round. */
#define _XOPEN_SOURCE 700 /* mkdtemp */
#include "xdistill.h"

#include "xd_test.h"

#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, WIDTH = 6, LEAVES = 4, STEPS = 4, MOST = LAYERS + 2 };

/* A block for each weight, which is a unit. */
static const char *const blocks[MOST] = { "embed", "l0", "l1", "l2", "l3", "head" };

/* What a stage has, and what it should not have. */
typedef struct scene {
    xd_comm *world;
    xd_ctx *ctx;
    xd_grid *grid;
    xd_built *built;
    xd_model *whole;
    bool copies; /* the last weight is a copy of the first */
    bool odd;    /* a weight that the whole model does not have */
    bool wide;   /* one of another shape */
    bool twice;  /* one that every stage has */
    bool bare;   /* no wrapper */
} scene;

static xd_result add(xd_model *model, const char *name, int64_t width, xd_weight_traits traits) {
    xd_block *block = NULL;
    XD_TRY(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = name, .type = "unit" }, &block));
    const xd_weight_desc d = { .name = "w",
                               .dtype = XD_DTYPE_F32,
                               .ndim = 1,
                               .shape = { width },
                               .init = { XD_INIT_CONSTANT, 0.5f, 0.0f },
                               .traits = traits };
    return xd_weight_add(block, &d, NULL);
}

static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    const scene *s = (const scene *)user;
    const xd_weight_traits copy = { .shared_embedding = s->copies },
                           last = { .shared_embedding = s->copies, .shared = s->copies };
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 3 }, out));
    if (place->first) XD_TRY(add(*out, "embed", WIDTH, copy));
    for (int64_t i = place->first_layer; i < place->first_layer + place->layer_count; i++) {
        const char name[] = { 'l', (char)('0' + i), 0 };
        XD_TRY(add(*out, name, s->wide && i == 1 ? WIDTH + 1 : WIDTH, (xd_weight_traits){ 0 }));
    }
    if (place->last) XD_TRY(add(*out, "head", WIDTH, last));
    if (s->odd && place->last) XD_TRY(add(*out, "odd", WIDTH, (xd_weight_traits){ 0 }));
    return s->twice ? add(*out, "bias", WIDTH, (xd_weight_traits){ .pipeline_parallel = true }) : XD_OK;
}

static xd_result describe_whole(scene *s) {
    scene all = *s;
    const xd_stage_place place = { .first = true, .last = true, .layer_count = LAYERS };
    all.wide = all.odd = false;
    XD_TRY(describe(&all, s->ctx, &place, &s->whole));
    return xd_model_seal(s->whole);
}

static xd_result open_scene(scene *s, xd_comm *world, int pp, int virtual_stages, xd_wrap_kind wrap) {
    const xd_ddp_desc ddp = { .micro_batches = LEAVES };
    static const char *const units[] = { "unit" };
    const xd_fsdp_desc fsdp = { .micro_batches = LEAVES, .unit_types = units, .unit_type_count = 1 };
    s->world = world;
    s->ctx = xd_comm_ctx(world);
    XD_TRY(xd_grid_create(world, &(xd_expert_desc){ .pp = pp }, &s->grid));
    xd_build_desc d = { .groups = xd_grid_groups(s->grid), .provider = { describe, s } };
    d.pipeline = (xd_pipeline_desc){ .layer_count = LAYERS, .virtual_stages = virtual_stages };
    d.wrap.kind = s->bare ? XD_WRAP_NONE : wrap;
    if (wrap == XD_WRAP_DDP && !s->bare) d.wrap.ddp = &ddp;
    if (wrap == XD_WRAP_FSDP && !s->bare) d.wrap.fsdp = &fsdp;
    XD_TRY(xd_build(world, &d, &s->built));
    return describe_whole(s);
}

static void close_scene(scene *s) {
    xd_model_destroy(s->whole);
    xd_built_destroy(s->built);
    xd_grid_destroy(s->grid);
}

/* ---- what lists hold ---- */

static xd_result lists_rank(xd_comm *world, void *argument) {
    static const char *const names[MOST] = { "embed.w", "l0.w", "l1.w", "l2.w", "l3.w", "head.w" };
    scene s = { .copies = true };
    xd_param params[MOST + 1];
    xd_tensor_part parts[MOST + 1];
    int64_t count = 0, again = 0;
    (void)argument;
    CHECK(open_scene(&s, world, 2, 2, XD_WRAP_DDP) == XD_OK);
    const int stage = xd_comm_rank(xd_grid_groups(s.grid)->pp),
              data = xd_comm_rank(xd_grid_groups(s.grid)->dp);
    CHECK(xd_built_params(s.built, s.whole, 0, NULL, &count) == XD_OK && count == MOST);
    CHECK(xd_built_parts(s.built, s.whole, 0, NULL, &again) == XD_OK && again == MOST);
    CHECK(xd_built_params(s.built, s.whole, MOST + 1, params, &count) == XD_OK && count == MOST);
    CHECK(xd_built_parts(s.built, s.whole, MOST, parts, &again) == XD_OK && again == MOST);
    for (int i = 0; i < MOST; i++) { /* chunks of one layer in turn; the ends with the outer ones */
        const bool here = i == 0 ? stage == 0 : i == MOST - 1 ? stage == 1 : (i - 1) % 2 == stage;
        CHECK(strcmp(params[i].name, names[i]) == 0 && strcmp(parts[i].name, names[i]) == 0);
        CHECK_EQ_INT(params[i].count, here ? WIDTH : 0);
        CHECK_EQ_INT(parts[i].range.end - parts[i].range.begin, here ? WIDTH : 0);
        CHECK(parts[i].ndim == 1 && parts[i].shape[0] == WIDTH && parts[i].dtype == XD_DTYPE_F32);
        CHECK((params[i].value != NULL) == here && params[i].value == parts[i].data);
        CHECK(params[i].gradient != NULL); /* so that steps count alike */
        if (!here) continue;
        CHECK_EQ_INT(params[i].replica, data > 0 || i == MOST - 1); /* norms count the copy once */
        CHECK_EQ_INT(parts[i].replica, data > 0);                   /* files hold it */
    }
    close_scene(&s);
    return XD_OK;
}

XD_TEST(each_rank_lists_all_weights_and_holds_those_of_its_stages) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(4, &d, lists_rank, NULL, NULL), XD_OK);
}

/* ---- what is refused ---- */

static void refuse(const scene *s, int64_t capacity, xd_result expected, const char *text) {
    xd_param params[MOST + 2];
    xd_tensor_part parts[MOST + 2];
    int64_t count = -5;
    CHECK_EQ_INT(xd_built_params(s->built, s->whole, capacity, params, &count), expected);
    const char *message = xd_last_error(s->ctx)->message;
    if (!strstr(message, text)) printf("\"%s\" lacks \"%s\"\n", message, text);
    CHECK(strstr(message, text) && count == -5);
    CHECK_EQ_INT(xd_built_parts(s->built, s->whole, capacity, parts, &count), expected);
    CHECK(strstr(xd_last_error(s->ctx)->message, text) && count == -5);
}

static xd_result refuse_rank(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world);
    (void)argument;
    for (int what = 0; what < 6; what++) {
        scene s = { .odd = what == 0, .wide = what == 1, .twice = what == 2, .bare = what == 3 };
        CHECK(open_scene(&s, world, 2, 2, XD_WRAP_DDP) == XD_OK);
        if (what == 0 && me == 1)
            refuse(&s, MOST + 1, XD_ERROR_MISMATCH,
                   "stage 1 has weight \"odd.w\", and the whole model of 6 weights does not");
        if (what == 1 && me == 1)
            refuse(&s, MOST, XD_ERROR_MISMATCH,
                   "weight \"l1.w\" has another shape or type in stage 0 than in the whole model");
        if (what == 2)
            refuse(&s, MOST + 1, XD_ERROR_MISMATCH,
                   "weight \"bias.w\" of stage 1 is in one before it as well");
        if (what == 3) refuse(&s, MOST, XD_ERROR_STATE, "stage 0 of 2 has no wrapper");
        if (what == 4) refuse(&s, MOST - 1, XD_ERROR_ARGUMENT, "6 weights of a whole model, capacity is 5");
        if (what == 5) {
            xd_model_destroy(s.whole);
            CHECK(xd_model_create(s.ctx, NULL, &s.whole) == XD_OK);
            refuse(&s, MOST, XD_ERROR_STATE, "a whole model of 0 weights that is not sealed");
        }
        close_scene(&s);
    }
    return XD_OK;
}

XD_TEST(lists_that_do_not_fit_are_refused_with_what_is_wrong) {
    const xd_ctx_desc d = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(2, &d, refuse_rank, NULL, NULL), XD_OK);
}

/* ---- saved and loaded ---- */

typedef struct run {
    char directory[64];
    int pp, virtual_stages;
    xd_wrap_kind wrap;
    int begin, end; /* saved at the end */
    float weights[MOST][WIDTH], moments[MOST][WIDTH];
} run;

/* Enough of a gradient. */
static float gradient_of(float value, int64_t leaf, int step, int at) {
    return value * 0.25f + (float)(leaf * 3 + step + at) * 0.125f;
}

static xd_result push_leaf(const xd_stage *stage, int64_t k, int step) {
    const int64_t leaf = xd_parallel_micro_batch(stage->parallel, k);
    const xd_pass pass = { XD_PASS_BACKWARD, k, false };
    xd_block_view view;
    XD_TRY(xd_block_begin(xd_model_root(stage->model), pass, &view));
    for (int b = 0; b < MOST; b++) {
        xd_block *block = xd_model_find_block(stage->model, blocks[b]);
        if (!block) continue;
        XD_TRY(xd_block_begin(block, pass, &view));
        for (int j = 0; j < WIDTH && leaf >= 0; j++)
            ((float *)view.gradients[0])[j] = gradient_of(((float *)view.values[0])[j], leaf, step, j);
        XD_TRY(xd_block_end(block));
    }
    return xd_block_end(xd_model_root(stage->model));
}

static xd_result push_leaves(const scene *s, int step) {
    for (int i = 0; i < xd_built_stage_count(s->built); i++) {
        const xd_stage stage = xd_built_stage(s->built, i);
        for (int64_t k = 0; k < xd_parallel_micro_batches(stage.parallel).opened; k++)
            XD_TRY(push_leaf(&stage, k, step));
    }
    return xd_pipeline_finish(
        s->world, &(xd_pipeline_finish_desc){ .groups = xd_grid_groups(s->grid), .built = s->built });
}

static xd_result train(const scene *s, run *r, xd_optimizer *optimizer, const xd_tensor_part *parts) {
    const xd_checkpoint_network network = { .parts = parts, .part_count = MOST, .optimizer = optimizer };
    const xd_checkpoint_save_desc save = {
        .root = r->directory, .step = r->end, .networks = &network, .network_count = 1, .overwrite = true
    };
    const xd_checkpoint_load_desc load = {
        .root = r->directory, .step = r->begin, .networks = &network, .network_count = 1
    };
    if (r->begin > 0) XD_TRY(xd_checkpoint_load(s->world, &load, NULL, NULL));
    for (int step = r->begin; step < r->end; step++) {
        for (int i = 0; i < xd_built_stage_count(s->built); i++)
            XD_TRY(xd_parallel_publish(xd_built_stage(s->built, i).parallel));
        XD_TRY(push_leaves(s, step));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
    }
    for (int i = 0; i < MOST; i++) CHECK_EQ_INT(*xd_optimizer_state_at(optimizer, i).step, r->end);
    return xd_checkpoint_save(s->world, &save);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = (run *)argument;
    scene s = { .copies = true };
    xd_param params[MOST];
    xd_tensor_part parts[MOST];
    xd_optimizer *optimizer = NULL;
    int64_t count = 0;
    CHECK(open_scene(&s, world, r->pp, r->virtual_stages, r->wrap) == XD_OK);
    CHECK(xd_built_params(s.built, s.whole, MOST, params, &count) == XD_OK);
    CHECK(xd_built_parts(s.built, s.whole, MOST, parts, &count) == XD_OK);
    const xd_optimizer_desc adamw = xd_adamw_defaults(params, MOST);
    CHECK(xd_optimizer_create(s.ctx, &adamw, &optimizer) == XD_OK);
    const xd_result result = train(&s, r, optimizer, parts);
    if (result != XD_OK) printf("%s\n", xd_last_error(s.ctx)->message);
    for (int i = 0; i < MOST; i++)
        for (int64_t j = parts[i].range.begin; j < parts[i].range.end && !parts[i].replica; j++) {
            const int64_t here = j - parts[i].range.begin;
            r->weights[i][j] = ((const float *)parts[i].data)[here];
            r->moments[i][j] = xd_optimizer_state_at(optimizer, i).exp_avg_sq[here];
        }
    xd_optimizer_destroy(optimizer);
    close_scene(&s);
    return result;
}

static void execute(run *r, int ranks, int pp, int virtual_stages, xd_wrap_kind wrap) {
    const xd_ctx_desc d = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    r->pp = pp;
    r->virtual_stages = virtual_stages;
    r->wrap = wrap;
    CHECK_EQ_INT(xd_run_threads(ranks, &d, run_rank, r, NULL), XD_OK);
}

static void start(run *r, const char *template, int begin, int end) {
    memset(r, 0, sizeof *r);
    snprintf(r->directory, sizeof r->directory, "%s", template);
    r->begin = begin;
    r->end = end;
}

static bool equal(const run *a, const run *b) {
    return memcmp(a->weights, b->weights, sizeof a->weights) == 0 &&
           memcmp(a->moments, b->moments, sizeof a->moments) == 0;
}

XD_TEST(what_a_pipeline_saves_goes_on_without_one_and_the_other_way_round) {
    static const struct {
        int ranks, pp, virtual_stages;
        xd_wrap_kind wrap;
    } ways[] = { { 1, 1, 0, XD_WRAP_DDP },  { 3, 1, 0, XD_WRAP_FSDP }, { 2, 2, 0, XD_WRAP_DDP },
                 { 4, 2, 2, XD_WRAP_FSDP }, { 4, 4, 0, XD_WRAP_DDP },  { 4, 2, 2, XD_WRAP_DDP } };
    char directory[64] = "/tmp/xdistill-list-XXXXXX", command[128];
    run one, first, second;
    CHECK(mkdtemp(directory) != NULL);
    start(&one, directory, 0, STEPS);
    execute(&one, 1, 1, 0, XD_WRAP_DDP);
    CHECK(one.weights[0][0] != 0.5f && one.weights[0][0] != one.weights[0][1]);
    CHECK(memcmp(one.weights[0], one.weights[MOST - 1], sizeof one.weights[0]) == 0); /* copies stay equal */
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++) {
            start(&first, directory, 0, STEPS / 2);
            execute(&first, ways[i].ranks, ways[i].pp, ways[i].virtual_stages, ways[i].wrap);
            start(&second, directory, STEPS / 2, STEPS);
            execute(&second, ways[j].ranks, ways[j].pp, ways[j].virtual_stages, ways[j].wrap);
            CHECK(!equal(&first, &one));
            CHECK(equal(&second, &one));
        }
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    CHECK(system(command) == 0);
}

XD_TEST_MAIN()
