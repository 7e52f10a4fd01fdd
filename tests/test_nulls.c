/* NULL on the last of two ranks, in collective calls: that rank gets ARGUMENT with the name, the other one PEER, neither waits, and the
 * same call works the next time. tests/build/nulls.py asks each call of one rank with each of its pointers. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "wrap_calls.h"

enum { RANKS = 2 };

typedef struct scene {
    xd_comm *world;
    xd_ctx *ctx;
    bool without; /* this rank passes NULL */
} scene;

/* Returns what the call did, with one argument NULL where the scene says so; nothing stays. */
typedef xd_result (*ask)(const scene *s);

static xd_result ask_mesh_desc(const scene *s) {
    const xd_mesh_desc desc = { .axes = { { "dp", RANKS } } };
    xd_mesh *mesh = NULL;
    const xd_result result = xd_mesh_create(s->world, s->without ? NULL : &desc, &mesh);
    xd_mesh_destroy(mesh);
    return result;
}

static xd_result ask_split_out(const scene *s) {
    xd_comm *part = NULL;
    const xd_result result = xd_comm_split(s->world, 0, 0, s->without ? NULL : &part);
    xd_comm_destroy(part);
    return result;
}

static xd_result ask_queue_out(const scene *s) {
    xd_queue *queue = NULL;
    const xd_result result = xd_queue_create(s->world, NULL, s->without ? NULL : &queue);
    xd_queue_destroy(queue);
    return result;
}

static xd_result ask_vocab_out(const scene *s) {
    xd_vocab *vocab = NULL;
    const xd_result result = vocab_even(s->ctx, s->world, 10, s->without ? NULL : &vocab);
    xd_vocab_destroy(vocab);
    return result;
}

static xd_result ask_norm_desc(const scene *s) {
    const xd_gradient_norm_desc desc = { .max_norm = 1.0 };
    xd_gradient_norm norm;
    return xd_gradient_norm_compute(s->ctx, s->world, s->without ? NULL : &desc, &norm);
}

static xd_result ask_send(const scene *s) {
    float mine = 1.0f, sum;
    return xd_all_reduce(s->world, s->without ? NULL : &mine, &sum, 1, XD_DTYPE_F32, XD_SUM);
}

static xd_result ask_record(const scene *s) {
    float mine = 1.0f, sum;
    const xd_collective record = {
        .kind = XD_COLLECTIVE_ALL_REDUCE, .count = 1, .dtype = XD_DTYPE_F32, .send = &mine, .recv = &sum
    };
    return xd_collective_run(s->world, s->without ? NULL : &record);
}

static xd_result ask_wrapper_out(const scene *s) {
    const xd_weight_desc weight = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    CHECK_EQ_INT(xd_model_create(s->ctx, NULL, &model), XD_OK);
    CHECK_EQ_INT(xd_weight_add(xd_model_root(model), &weight, NULL), XD_OK);
    CHECK_EQ_INT(xd_model_seal(model), XD_OK);
    const xd_result result = wrap_over_ddp(model, s->world, NULL, s->without ? NULL : &parallel);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return result;
}

static xd_result ask_labels(const scene *s) {
    const int64_t ids[2] = { 1, 2 }, position = xd_comm_rank(s->world);
    int64_t labels[1] = { -5 };
    xd_shift_desc desc = { .sequences = 1,
                           .length = RANKS,
                           .held = 1,
                           .positions = s->without ? NULL : &position,
                           .comm = s->world };
    desc.ids = xd_ids_of(ids, XD_DTYPE_I64);
    const xd_result result = xd_next_token_labels(s->ctx, &desc, labels);
    CHECK(result == XD_OK || labels[0] == -5);
    return result;
}

static const struct {
    const char *name; /* in the message */
    ask call;
} asked[] = { { "desc", ask_mesh_desc },    { "out", ask_split_out },   { "out", ask_queue_out },
              { "out", ask_vocab_out },     { "desc", ask_norm_desc },  { "send", ask_send },
              { "collective", ask_record }, { "out", ask_wrapper_out }, { "positions", ask_labels } };

static xd_result ask_all(xd_comm *world, void *argument) {
    scene s = { world, xd_comm_ctx(world), false };
    const bool last = xd_comm_rank(world) == RANKS - 1;
    (void)argument;
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        s.without = last;
        CHECK_EQ_INT(asked[i].call(&s), last ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
        const xd_error *error = xd_last_error(s.ctx);
        if (last) CHECK(strstr(error->message, asked[i].name) != NULL);
        if (!last) CHECK_EQ_INT(error->culprit, RANKS - 1);
        s.without = false;
        CHECK_EQ_INT(asked[i].call(&s), XD_OK);
    }
    return XD_OK;
}

XD_TEST(null_on_one_rank_is_told_to_the_others_and_the_next_call_works) {
    const xd_ctx_desc desc = { .timeout_seconds = 60, .log_level = XD_LOG_NONE };
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, ask_all, NULL, NULL), XD_OK);
}

XD_TEST(objects_and_contexts_that_are_null_are_refused_without_a_message) {
    const xd_ctx_desc quiet = { .log_level = XD_LOG_NONE };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(&quiet, &ctx), XD_OK);
    CHECK_EQ_INT(xd_loss(NULL, NULL, NULL), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_barrier(NULL), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_optimizer_step(NULL, NULL, NULL), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_parallel_reduce(NULL), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_last_error(ctx)->result, XD_OK);
    CHECK_EQ_INT(xd_loss(ctx, NULL, NULL), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "desc is NULL");
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
