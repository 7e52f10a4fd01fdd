/* Forwards that run again in the backward: the bits, the exchanges and the gathers of training that keeps everything, in less
 * memory, by the amount that was planned; and what is refused. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#endif
#include "xd_test.h"
#include "wrap_calls.h"

#include "../examples/nn/nn_blocks.c"
#include "../examples/nn/nn_describe.c"
#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_layers.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_model.c"
#include "../examples/nn/nn_patch_positions.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_sequence.c"
#include "../examples/nn/nn_transformer.c"
#include "equivalence/stages.c"
#include "equivalence/train.c"

/* ---- the transformer ---- */

/* Floats that a layer keeps of one micro-batch when it does not run again. */
static int64_t layer_floats(const train_config *c) {
    const nn_config config = train_model(false);
    nn_group group;
    nn_model model;
    nn_batch batch;
    memset(&group, 0, sizeof group);
    memset(&batch, 0, sizeof batch);
    group.size = c->tp;
    group.invariant = c->reduction == XD_REDUCTION_INVARIANT;
    CHECK(nn_model_init(&config, &group, NULL, &model) == NULL);
    batch.sequences = 1;
    batch.positions = TRAIN_POSITIONS;
    const nn_sizes sizes = nn_sizes_of(&model, &batch);
    int64_t floats = 0;
    (void)nn_take_layer(&model, &sizes, NULL, &floats);
    nn_model_free(&model);
    return floats;
}

static void check_config(const train_config *c) {
    train_result *kept = (train_result *)calloc(2, sizeof *kept), *again = kept + 1;
    char message[512] = "", name[TRAIN_NAME];
    train_config recompute = *c;
    recompute.recompute = true;
    train_name(&recompute, name);
    const bool ok = train_on_threads(c, kept, message) && train_on_threads(&recompute, again, message) &&
                    train_equal(kept, again, message);
    if (!ok) printf("%s: %s\n", name, message);
    CHECK(ok);
    CHECK_EQ_INT(again->traffic.calls, kept->traffic.calls); /* no second gather */
    CHECK_EQ_INT(again->traffic.bytes_received, kept->traffic.bytes_received);
    CHECK(c->dp == 1 || kept->traffic.bytes_received > 0);
    const nn_config config = train_model(false);
    const int64_t layers = kept->leaves * (config.layers - 1) * layer_floats(c) * (int64_t)sizeof(float);
    CHECK_EQ_INT(kept->workspace - again->workspace, layers);
    CHECK(kept->inputs == 0 &&
          again->inputs >= kept->leaves * config.layers * TRAIN_POSITIONS * config.hidden * 4);
    CHECK(again->workspace + again->inputs < kept->workspace);
    free(kept);
}

XD_TEST(the_transformer_that_runs_its_layers_again_has_the_bits_and_exchanges_of_one_that_keeps_all) {
    static const train_config configs[] = {
        { .wrap = TRAIN_DDP, .dp = 1, .tp = 1 },
        { .wrap = TRAIN_DDP, .dp = 3, .tp = 1, .workers = true },
        { .wrap = TRAIN_SHARDED, .dp = 4, .tp = 1 },
        { .wrap = TRAIN_FSDP, .dp = 1, .tp = 1 },
        { .wrap = TRAIN_FSDP, .dp = 4, .tp = 1 },
        { .wrap = TRAIN_FSDP, .dp = 5, .tp = 1 }, /* leaves that not all ranks have */
        { .wrap = TRAIN_FSDP, .dp = 4, .tp = 1, .whole = true, .bf16 = true },
        { .wrap = TRAIN_FSDP, .dp = 2, .tp = 1, .workers = true },
        { .wrap = TRAIN_FSDP, .dp = 2, .tp = 3 },
        { .wrap = TRAIN_HSDP, .dp = 4, .tp = 1, .groups = 2 },
    };
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++)
        for (int mode = 0; mode < 2; mode++) {
            train_config c = configs[i];
            c.reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
            if (mode && c.wrap == TRAIN_HSDP) continue; /* not offered */
            if (mode && c.wrap == TRAIN_FSDP && c.dp == 5) continue;
            c.steps = 3;
            check_config(&c);
        }
}

XD_TEST(the_passes_over_one_buffer_say_that_they_keep_no_inputs) {
    const nn_config config = train_model(false);
    nn_model model;
    nn_batch batch;
    float nothing[1] = { 0 };
    CHECK(nn_model_init(&config, NULL, NULL, &model) == NULL);
    memset(&batch, 0, sizeof batch);
    batch.sequences = batch.positions = 1;
    model.recompute = true;
    CHECK_EQ_INT(nn_forward(&model, nothing, &batch, true, NULL, nothing), NN_NO_INPUTS);
    nn_model_free(&model);
}

/* ---- two blocks of one weight ---- */

typedef struct pair {
    xd_ctx *ctx;
    xd_model *model;
    xd_block *a, *b;
    xd_inputs *inputs;
    xd_parallel *parallel;
} pair;

static void pair_block(pair *p, const char *name, bool recompute, xd_block **out) {
    const xd_block_desc block = { .name = name, .recompute = recompute };
    const xd_weight_desc weight = { .name = "weight",
                                    .dtype = XD_DTYPE_F32,
                                    .ndim = 1,
                                    .shape = { 3 },
                                    .init = { XD_INIT_NORMAL, .scale = 1.0f } };
    CHECK_EQ_INT(xd_block_add(xd_model_root(p->model), &block, out), XD_OK);
    CHECK_EQ_INT(xd_weight_add(*out, &weight, NULL), XD_OK);
}

static void pair_open(pair *p, xd_ctx *ctx) {
    const xd_model_desc desc = { .seed = 1 };
    memset(p, 0, sizeof *p);
    p->ctx = ctx;
    CHECK_EQ_INT(xd_model_create(ctx, &desc, &p->model), XD_OK);
    pair_block(p, "a", true, &p->a);
    pair_block(p, "b", true, &p->b);
}

static void pair_close(pair *p) {
    xd_inputs_destroy(p->inputs);
    xd_parallel_destroy(p->parallel);
    xd_model_destroy(p->model);
}

/* y = weight * x, where it runs, and how often. */
typedef struct product {
    float y[3];
    int runs;
    xd_result result;
} product;

static xd_result multiply(void *user, const xd_block_view *view, const void *input) {
    product *p = (product *)user;
    CHECK(view->count == 1 && view->gradients[0] == NULL);
    for (int i = 0; i < 3; i++) p->y[i] = ((const float *)view->values[0])[i] * ((const float *)input)[i];
    p->runs++;
    return p->result;
}

static bool says(const pair *p, const char *text) {
    const bool found = strstr(xd_last_error(p->ctx)->message, text) != NULL;
    if (!found) printf("%s\n", xd_last_error(p->ctx)->message);
    return found;
}

static xd_result keep(xd_block *block, int64_t leaf, float x) {
    const float input[3] = { x, 2 * x, 3 * x };
    return xd_inputs_keep(block, leaf, input, sizeof input);
}

static xd_result begin(xd_block *block, xd_pass_kind kind, int64_t leaf) {
    const xd_pass pass = { kind, leaf, false };
    xd_block_view view;
    return xd_block_begin(block, pass, &view);
}

XD_TEST(without_a_wrapper_a_forward_runs_again_on_the_input_that_was_kept) {
    const xd_inputs_desc desc = { 12, 2 };
    xd_ctx *ctx = NULL;
    pair p;
    product one = { { 0 }, 0, XD_OK };
    const xd_forward forward = { multiply, &one };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    pair_open(&p, ctx);
    CHECK_EQ_INT(xd_inputs_create(p.model, &desc, &p.inputs), XD_ERROR_STATE); /* not sealed */
    CHECK_EQ_INT(xdi_inputs_bytes(p.model, &desc).host, 0);
    CHECK_EQ_INT(xd_model_seal(p.model), XD_OK);
    CHECK_EQ_INT(xd_model_allocate(p.model), XD_OK);
    CHECK_EQ_INT(xd_model_init_weights(p.model), XD_OK);
    CHECK_EQ_INT(xd_inputs_create(p.model, &desc, &p.inputs), XD_OK);
    CHECK_EQ_INT(begin(p.a, XD_PASS_FORWARD, 0), XD_OK);
    CHECK_EQ_INT(keep(p.a, 0, 1.0f), XD_OK);
    CHECK_EQ_INT(keep(p.a, 7, 10.0f), XD_OK); /* a second forward in flight */
    CHECK_EQ_INT(keep(p.a, 8, 1.0f), XD_ERROR_STATE);
    CHECK(says(
        &p,
        "micro-batch 8 of block \"a\" is to keep, and 2 are in flight, that of micro-batch 0 among them"));
    CHECK_EQ_INT(xd_block_end(p.a), XD_OK);
    const float *w = (const float *)xd_weight_describe(xd_model_find_weight(p.model, "a.weight")).value;
    CHECK_EQ_INT(xd_recompute(p.a, 7, forward), XD_OK);
    for (int i = 0; i < 3; i++) CHECK(one.y[i] == w[i] * 10.0f * (float)(i + 1));
    one.result = XD_ERROR_DATA; /* what forward returns; the input is still there */
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_ERROR_DATA);
    one.result = XD_OK;
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_OK);
    for (int i = 0; i < 3; i++) CHECK(one.y[i] == w[i] * (float)(i + 1));
    CHECK_EQ_INT(one.runs, 3);
    pair_close(&p);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_is_recomputed_wrongly_is_refused_with_both_names) {
    const xd_inputs_desc desc = { 12, 0 }, none = { 0, 0 }, fewer = { 12, -1 };
    const xd_ddp_desc ddp = { .micro_batches = 2 };
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    xd_inputs *again = NULL;
    pair p;
    product one = { { 0 }, 0, XD_OK };
    const xd_forward forward = { multiply, &one };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    pair_open(&p, ctx);
    xd_block *plain = NULL;
    pair_block(&p, "plain", false, &plain);
    CHECK_EQ_INT(xd_model_seal(p.model), XD_OK);
    CHECK_EQ_INT(wrap_over_ddp(p.model, self, &ddp, &p.parallel), XD_OK);
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_ERROR_STATE);
    CHECK(says(&p, "micro-batch 0 of block \"a\" is to recompute, and the model has no inputs"));
    CHECK_EQ_INT(xd_inputs_create(p.model, &none, &p.inputs), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_inputs_create(p.model, &fewer, &p.inputs), XD_ERROR_ARGUMENT);
    CHECK(says(&p, "inputs of 12 bytes, -1 of them in flight"));
    const xd_inputs_desc many = { SIZE_MAX - 3, 1 }, more = { SIZE_MAX / 4, INT32_MAX };
    CHECK_EQ_INT(xd_inputs_create(p.model, &many, &p.inputs), XD_ERROR_MEMORY);
    CHECK_EQ_INT(xd_inputs_create(p.model, &more, &p.inputs), XD_ERROR_MEMORY);
    CHECK(xdi_inputs_bytes(p.model, &more).host > SIZE_MAX / 2);
    CHECK_EQ_INT(xd_inputs_create(p.model, &desc, &p.inputs), XD_OK);
    CHECK_EQ_INT(xd_inputs_create(p.model, &desc, &again), XD_ERROR_STATE);
    CHECK(again == NULL && says(&p, "has inputs already"));

    CHECK_EQ_INT(keep(p.a, 0, 1.0f), XD_ERROR_STATE); /* not open */
    CHECK(says(
        &p,
        "micro-batch 0 of block \"a\" is to keep, and the block is open for nothing instead of a forward"));
    CHECK_EQ_INT(begin(p.a, XD_PASS_INFERENCE, 0), XD_OK);
    CHECK_EQ_INT(keep(p.a, 0, 1.0f), XD_ERROR_STATE);
    CHECK(says(&p, "block \"a\" is to keep, and the block is open for an inference instead of a forward"));
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_ERROR_STATE);
    CHECK(says(&p,
               "block \"a\" is to recompute, and the block is open for an inference instead of a backward"));
    CHECK_EQ_INT(xd_block_end(p.a), XD_OK);

    CHECK_EQ_INT(begin(plain, XD_PASS_FORWARD, 0), XD_OK);
    CHECK_EQ_INT(keep(plain, 0, 1.0f), XD_ERROR_STATE);
    CHECK(says(&p, "block \"plain\" is to keep, and the block was described without recompute"));
    CHECK_EQ_INT(xd_block_end(plain), XD_OK);

    CHECK_EQ_INT(begin(p.a, XD_PASS_FORWARD, 0), XD_OK);
    CHECK_EQ_INT(keep(p.a, -1, 1.0f), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_inputs_keep(p.a, 0, &one, 16), XD_ERROR_ARGUMENT);
    CHECK(says(&p, "an input of 16 bytes of block \"a\", planned are 12"));
    CHECK_EQ_INT(keep(p.a, 0, 1.0f), XD_OK);
    CHECK_EQ_INT(keep(p.a, 0, 1.0f), XD_ERROR_STATE);
    CHECK(says(&p, "the input of micro-batch 0 of block \"a\" is kept already"));
    CHECK_EQ_INT(xd_block_end(p.a), XD_OK);
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_ERROR_STATE); /* outside of its backward */

    CHECK_EQ_INT(begin(p.b, XD_PASS_BACKWARD, 0), XD_OK); /* whose input another block has */
    CHECK_EQ_INT(xd_recompute(p.b, 0, forward), XD_ERROR_STATE);
    CHECK(says(
        &p, "no input of micro-batch 0 of block \"b\" is kept; the last one was of micro-batch 0 of \"a\""));
    CHECK_EQ_INT(xd_block_end(p.b), XD_OK);
    CHECK_EQ_INT(begin(p.a, XD_PASS_BACKWARD, 0), XD_OK);
    CHECK_EQ_INT(xd_recompute(p.a, 1, forward), XD_ERROR_STATE);
    CHECK(says(&p, "micro-batch 1 of block \"a\" is to recompute in a backward of micro-batch 0"));
    CHECK_EQ_INT(one.runs, 0);
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_OK);
    CHECK_EQ_INT(xd_recompute(p.a, 0, forward), XD_ERROR_STATE); /* twice */
    CHECK(says(
        &p, "no input of micro-batch 0 of block \"a\" is kept; the last one was of micro-batch 0 of \"a\""));
    CHECK_EQ_INT(one.runs, 1);
    CHECK_EQ_INT(xd_block_end(p.a), XD_OK);

    CHECK_EQ_INT(begin(p.a, XD_PASS_FORWARD, 0), XD_OK); /* kept for nothing: gone with the step */
    CHECK_EQ_INT(keep(p.a, 1, 1.0f), XD_OK);
    CHECK_EQ_INT(xd_block_end(p.a), XD_OK);
    for (int leaf = 0; leaf < 2; leaf++) {
        if (leaf) CHECK_EQ_INT(xd_block_skip(p.a, leaf), XD_OK);
        if (leaf) CHECK_EQ_INT(xd_block_skip(p.b, leaf), XD_OK);
        CHECK_EQ_INT(xd_block_skip(plain, leaf), XD_OK);
    }
    CHECK_EQ_INT(xd_parallel_reduce(p.parallel), XD_OK);
    CHECK_EQ_INT(xd_parallel_publish(p.parallel), XD_OK);
    CHECK_EQ_INT(begin(p.a, XD_PASS_FORWARD, 0), XD_OK);
    CHECK_EQ_INT(keep(p.a, 1, 1.0f), XD_OK);
    CHECK_EQ_INT(xd_block_end(p.a), XD_OK);
    pair_close(&p);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- memory ---- */

typedef struct heap {
    int64_t bytes, calls, at;
} heap;

static void *heap_allocate(void *user, size_t bytes) {
    heap *h = (heap *)user;
    train_piece *piece = h->calls++ == h->at ? NULL : (train_piece *)malloc(sizeof *piece + bytes);
    if (!piece) return NULL;
    piece->bytes = bytes;
    h->bytes += (int64_t)bytes;
    return piece + 1;
}

static void heap_release(void *user, void *memory) {
    train_piece *piece = (train_piece *)memory - 1;
    ((heap *)user)->bytes -= (int64_t)piece->bytes;
    free(piece);
}

XD_TEST(planned_memory_of_inputs_is_what_they_take_and_no_pass_takes_more) {
    heap h = { 0, 0, -1 };
    const xd_ctx_desc settings = { .allocator = { heap_allocate, heap_release, &h } };
    const xd_inputs_desc desc = { 12, 5 };
    const xd_ddp_desc ddp = { .micro_batches = 1 };
    const xd_memory_plan_desc plan_desc = { .ddp = &ddp, .inputs = &desc };
    xd_memory_plan plan;
    xd_ctx *ctx = NULL;
    pair p;
    product one = { { 0 }, 0, XD_OK };
    const xd_forward forward = { multiply, &one };
    CHECK_EQ_INT(xd_ctx_create(&settings, &ctx), XD_OK);
    pair_open(&p, ctx);
    CHECK_EQ_INT(xd_model_seal(p.model), XD_OK);
    CHECK_EQ_INT(xd_model_allocate(p.model), XD_OK);
    CHECK_EQ_INT(xd_plan_memory(p.model, &plan_desc, 0, &plan), XD_OK);
    CHECK_EQ_INT(plan.inputs.host, xdi_inputs_bytes(p.model, &desc).host);
    CHECK(plan.inputs.host >= 2 * 5 * XD_ARENA_ALIGNMENT && plan.inputs.device == 0);
    const int64_t before = h.bytes;
    for (int n = 0; n < 2; n++) {
        h.calls = 0;
        h.at = n;
        CHECK_EQ_INT(xd_inputs_create(p.model, &desc, &p.inputs), XD_ERROR_MEMORY);
        CHECK(p.inputs == NULL && h.bytes == before);
    }
    h.at = -1;
    CHECK_EQ_INT(xd_inputs_create(p.model, &desc, &p.inputs), XD_OK);
    CHECK_EQ_INT(h.bytes - before, plan.inputs.host);
    h.calls = 0;
    CHECK_EQ_INT(begin(p.b, XD_PASS_FORWARD, 0), XD_OK);
    for (int leaf = 0; leaf < 5; leaf++) CHECK_EQ_INT(keep(p.b, leaf, (float)leaf), XD_OK);
    CHECK_EQ_INT(xd_block_end(p.b), XD_OK);
    for (int leaf = 4; leaf >= 0; leaf--) CHECK_EQ_INT(xd_recompute(p.b, leaf, forward), XD_OK);
    CHECK_EQ_INT(h.calls, 0);
    pair_close(&p);
    xd_ctx_destroy(ctx);
    CHECK_EQ_INT(h.bytes, 0);
}

XD_TEST_MAIN()
