/* The debug form: what is NULL, destroyed or of another kind is an error with its name, and is not read. */
#define XDISTILL_DEBUG
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

static int lines; /* errors so far */

static void count_line(void *user, xd_log_level level, const char *line) {
    (void)user;
    (void)level;
    (void)line;
    lines++;
}

static xd_ctx *context(void) {
    const xd_ctx_desc desc = { .logger = { count_line, NULL }, .log_level = XD_LOG_ERROR };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    return ctx;
}

static bool says(xd_ctx *ctx, const char *text) {
    const char *message = xd_last_error(ctx)->message;
    if (!strstr(message, text)) printf("\"%s\" lacks \"%s\"\n", message, text);
    return strstr(message, text) != NULL;
}

static float value[4], gradient[4];

static xd_optimizer *optimizer_of(xd_ctx *ctx) {
    static xd_param param;
    xd_optimizer *optimizer = NULL;
    param = (xd_param){ "w", value, gradient, XD_DTYPE_F32, .count = 4 };
    const xd_optimizer_desc desc = xd_adamw_defaults(&param, 1);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &desc, &optimizer), XD_OK);
    return optimizer;
}

XD_TEST(a_destroyed_object_is_named_and_not_read) {
    xd_ctx *ctx = context();
    xd_optimizer *optimizer = optimizer_of(ctx);
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    xd_optimizer_destroy(optimizer);
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_ERROR_STATE);
    CHECK(says(ctx, "optimizer is an xd_optimizer that was destroyed"));
    CHECK_EQ_STR(xd_last_error(ctx)->function, "xd_optimizer_step");
    const int before = lines;
    xd_optimizer_destroy(optimizer); /* a second time */
    CHECK_EQ_INT(lines, before + 1);
    CHECK_EQ_STR(xd_last_error(ctx)->function, "xd_optimizer_destroy");
    CHECK(says(ctx, "optimizer is an xd_optimizer that was destroyed"));
    xd_ctx_destroy(ctx);
}

XD_TEST(an_object_of_another_kind_is_named_with_both) {
    xd_ctx *ctx = context();
    xd_optimizer *optimizer = optimizer_of(ctx);
    double memory[64] = { 0.0 };
    void *other = optimizer, *foreign = memory;
    CHECK_EQ_INT(xd_ema_update((xd_ema *)other, 0, NULL), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "ema is no xd_ema, but an xd_optimizer"));
    CHECK_EQ_INT(xd_optimizer_step((xd_optimizer *)foreign, NULL, NULL), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "optimizer is no xd_optimizer, but no object of the library"));
    CHECK_EQ_INT(xd_barrier((xd_comm *)other), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "comm is no xd_comm, but an xd_optimizer"));
    xd_ema_destroy((xd_ema *)other);
    CHECK_EQ_STR(xd_last_error(ctx)->function, "xd_ema_destroy");
    CHECK_EQ_INT(xd_last_error(ctx)->result, XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(an_object_that_is_NULL_is_named_in_the_context_of_the_thread) {
    xd_ctx *ctx = context(), *later = context();
    xd_optimizer *optimizer = optimizer_of(ctx);
    CHECK_EQ_INT(xd_optimizer_step(NULL, NULL, NULL), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "optimizer is NULL"));
    CHECK_EQ_INT(xd_last_error(later)->result, XD_OK); /* not the last that was used */
    CHECK_EQ_INT(xd_barrier(NULL), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "comm is NULL"));
    xd_optimizer_destroy(NULL);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(later);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_destroyed_context_is_named_in_another) {
    xd_ctx *ctx = context(), *gone = context();
    xd_vocab *vocab = NULL;
    CHECK_EQ_INT(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = 7 }, &vocab), XD_OK);
    xd_ctx_destroy(gone); /* nothing is allocated from here on, where it was */
    xd_vocab *kept = vocab;
    CHECK_EQ_INT(xd_vocab_create(gone, &(xd_vocab_desc){ .size = 7 }, &vocab), XD_ERROR_STATE);
    CHECK(says(ctx, "the context is an xd_ctx that was destroyed"));
    CHECK(vocab == kept);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(gone);
    CHECK_EQ_STR(xd_last_error(ctx)->function, "xd_ctx_destroy");
    xd_ctx_destroy(ctx);
}

XD_TEST(a_loss_names_a_destroyed_vocabulary) {
    static float logits[7];
    const int64_t label = 3;
    xd_ctx *ctx = context();
    xd_vocab *vocab = NULL;
    xd_loss_values values;
    CHECK_EQ_INT(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = 7 }, &vocab), XD_OK);
    xd_loss_desc loss = { .vocab = vocab, .hard_weight = 1.0, .common.labels.data = &label };
    loss.student = xd_rows_of(logits, XD_DTYPE_F32, 1, 7);
    CHECK_EQ_INT(xd_loss(ctx, &loss, &values), XD_OK);
    xd_vocab_destroy(vocab);
    CHECK_EQ_INT(xd_loss(ctx, &loss, &values), XD_ERROR_STATE);
    CHECK(says(ctx, "desc->vocab is an xd_vocab that was destroyed"));
    xd_ctx_destroy(ctx);
}

XD_TEST(a_model_its_blocks_and_its_weights_are_objects) {
    xd_ctx *ctx = context();
    xd_model *model = NULL;
    xd_block *block = NULL;
    xd_weight *weight = NULL;
    CHECK_EQ_INT(xd_model_create(ctx, NULL, &model), XD_OK);
    xd_block *root = xd_model_root(model);
    CHECK_EQ_INT(xd_block_add(root, &(xd_block_desc){ .name = "b" }, &block), XD_OK);
    const xd_weight_desc desc = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    CHECK_EQ_INT(xd_weight_add(block, &desc, &weight), XD_OK);
    CHECK_EQ_INT(xd_model_seal(model), XD_OK);
    xd_model_destroy(model);
    CHECK_EQ_INT(xd_model_seal(model), XD_ERROR_STATE);
    CHECK_EQ_INT(xd_block_add(root, &(xd_block_desc){ .name = "c" }, NULL), XD_ERROR_STATE);
    CHECK_EQ_INT(xd_weight_add(block, &desc, NULL), XD_ERROR_STATE);
    CHECK_EQ_INT(xd_weight_set_frozen(weight, true), XD_ERROR_STATE);
    CHECK(says(ctx, "weight is an xd_weight that was destroyed"));
    xd_ctx_destroy(ctx);
}

static xd_result ranks(xd_comm *world, void *argument) {
    xd_comm *pair = NULL;
    xd_mesh *mesh = NULL;
    (void)argument;
    CHECK_EQ_INT(xd_comm_split(world, xd_comm_rank(world) / 2, 0, &pair), XD_OK);
    CHECK_EQ_INT(xd_barrier(pair), XD_OK);
    xd_comm_destroy(pair);
    CHECK_EQ_INT(xd_barrier(pair), XD_ERROR_STATE);
    CHECK(says(xd_comm_ctx(world), "comm is an xd_comm that was destroyed"));
    CHECK_EQ_INT(xd_mesh_create(world, &(xd_mesh_desc){ .axes = { { "dp", 4 } } }, &mesh), XD_OK);
    CHECK_EQ_INT(xd_mesh_group(mesh, "dp", &pair), XD_OK);
    xd_mesh_destroy(mesh);
    CHECK_EQ_INT(xd_mesh_group(mesh, "dp", &pair), XD_ERROR_STATE);
    CHECK(says(xd_comm_ctx(world), "mesh is an xd_mesh that was destroyed"));
    return xd_barrier(world);
}

XD_TEST(every_rank_has_its_own_error) {
    CHECK_EQ_INT(xd_run_threads(4, NULL, ranks, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
