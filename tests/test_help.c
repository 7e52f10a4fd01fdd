/* What errors say to the one who made the slip: the function that he called, the bound, the other shape, the steps there are. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, MAP_ANONYMOUS */
#endif

#include "checkpoint_files.h"
#include "node_world.h"
#include "xd_test.h"
#include "xdistill.h"

#include <unistd.h>

/* What the ranks do differently, in one call of many steps. */
typedef enum slip {
    SLIP_STAYS_AWAY, /* the others: TIMEOUT */
    SLIP_LEAVES,     /* PEER */
    SLIP_DIFFERS,    /* MISMATCH */
    SLIP_FAILS       /* PEER with its text on the others */
} slip;

typedef struct slip_scene {
    slip slip;
    char root[200];
} slip_scene;

static bool has(xd_ctx *ctx, const char *text) {
    const char *message = xd_last_error(ctx)->message;
    if (!strstr(message, text)) printf("\"%s\" lacks \"%s\"\n", message, text);
    return strstr(message, text) != NULL;
}

static bool says(xd_comm *world, const char *text) {
    return has(xd_comm_ctx(world), text);
}

static xd_result slip_save(xd_comm *world, const slip_scene *s) {
    const bool odd = xd_comm_rank(world) == 1;
    xd_checkpoint_save_desc save = { .root = s->root, .step = 3 };
    if (odd && s->slip == SLIP_DIFFERS) save.step = 4;
    if (odd && s->slip == SLIP_FAILS) save.keep = -1;
    return xd_checkpoint_save(world, &save);
}

static xd_result slip_rank(xd_comm *world, void *argument) {
    static const xd_result expected[] = { XD_ERROR_TIMEOUT, XD_ERROR_PEER, XD_ERROR_MISMATCH, XD_ERROR_PEER };
    const slip_scene *s = (const slip_scene *)argument;
    const bool odd = xd_comm_rank(world) == 1;
    CHECK_EQ_INT(xd_barrier(world), XD_OK); /* the first call has the longer deadline */
    if (odd && s->slip == SLIP_LEAVES) return XD_OK;
    if (odd && s->slip == SLIP_STAYS_AWAY) {
        usleep(600000);
        return XD_OK;
    }
    const xd_result got = slip_save(world, s);
    const bool own = odd && s->slip == SLIP_FAILS;
    CHECK_EQ_INT(got, own ? XD_ERROR_ARGUMENT : expected[s->slip]);
    if (!own) CHECK(says(world, "(in xd_checkpoint_save)"));
    if (s->slip != SLIP_DIFFERS && s->slip != SLIP_FAILS) return XD_OK;
    CHECK_EQ_INT(xd_agree(world, XD_OK), XD_OK); /* the name is that of one call */
    int32_t values[2] = { xd_comm_rank(world), 0 };
    CHECK_EQ_INT(xd_broadcast(world, values, odd ? 1 : 2, XD_DTYPE_I32, 0), XD_ERROR_MISMATCH);
    CHECK(says(world, "(in xd_broadcast)"));
    return XD_OK;
}

static const xd_ctx_desc slip_ctx = { .timeout_seconds = 0.3 };

XD_TEST(errors_between_processes_name_the_call_that_the_caller_is_in) {
    char message[256];
    for (int k = SLIP_STAYS_AWAY; k <= SLIP_FAILS; k++) {
        slip_scene s = { .slip = (slip)k };
        const node_start start = { .ranks = 3, .desc = &slip_ctx, .function = slip_rank, .argument = &s };
        snprintf(s.root, sizeof s.root, "%s", new_root());
        CHECK_EQ_INT(node_run(&start, message), XD_OK);
        remove_all(s.root);
    }
}

XD_TEST(errors_between_threads_name_the_call_that_the_caller_is_in) {
    for (int k = SLIP_STAYS_AWAY; k <= SLIP_FAILS; k++) {
        slip_scene s = { .slip = (slip)k };
        snprintf(s.root, sizeof s.root, "%s", new_root());
        (void)xd_run_threads(3, &slip_ctx, slip_rank, &s, NULL);
        remove_all(s.root);
    }
}

static xd_ctx *context(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

/* ---- labels ---- */

XD_TEST(a_label_out_of_range_names_the_bound_and_labels_of_32_bits) {
    enum { ROWS = 3, SIZE = 7 };
    static const float logits[ROWS * SIZE] = { 1.0f, 2.0f };
    const int64_t labels[ROWS] = { 2, 7, -100 };
    xd_ctx *ctx = context();
    xd_vocab *vocab = NULL;
    xd_loss_values values;
    CHECK_EQ_INT(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = SIZE }, &vocab), XD_OK);
    const xd_loss_desc loss = {
        .vocab = vocab,
        .student = xd_rows_of(logits, XD_DTYPE_F32, ROWS, SIZE),
        .hard_weight = 1.0,
        .common.labels.data = labels,
    };
    CHECK_EQ_INT(xd_loss(ctx, &loss, &values), XD_ERROR_DATA);
    CHECK(has(ctx, "1 labels out of range"));
    CHECK(has(ctx, "labels are 0 to 6, or ignore_index"));
    CHECK(has(ctx, "xd_ids_of(labels, XD_DTYPE_I32)"));
    const xd_status status = { .not_finite = 1 };
    CHECK_EQ_INT(xd_status_check(ctx, &status), XD_ERROR_DATA);
    CHECK(!strstr(xd_last_error(ctx)->message, "xd_ids_of"));
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

/* ---- positions ---- */

XD_TEST(a_position_of_the_caller_is_that_of_one_call) {
    xd_ctx *ctx = context();
    xd_vocab *vocab = NULL;
    const xd_vocab_desc good = { .size = 7 }, bad = { .size = -1 };
    CHECK_EQ_INT(xd_vocab_create(XD_AT(ctx), &bad, &vocab), XD_ERROR_SHAPE);
    CHECK(has(ctx, "test_help.c:"));
    CHECK_EQ_INT(xd_vocab_create(XD_AT(ctx), &good, &vocab), XD_OK); /* no error: the position goes */
    xd_vocab_destroy(vocab);
    CHECK_EQ_INT(xd_vocab_create(ctx, &bad, &vocab), XD_ERROR_SHAPE);
    CHECK(!strstr(xd_last_error(ctx)->message, "caller"));
    CHECK_EQ_INT(xd_vocab_create(XD_AT((xd_ctx *)NULL), &bad, &vocab), XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

/* ---- checkpoints ---- */

typedef struct saved_scene {
    xd_ctx *ctx;
    xd_comm *world;
    float values[12];
    float rate;
    xd_tensor_part part;
    xd_param param;
    xd_optimizer *optimizer;
    xd_checkpoint_network network;
    xd_checkpoint_save_desc save;
    xd_checkpoint_load_desc load;
} saved_scene;

static void open_saved(saved_scene *s, const char *root, double rate) {
    memset(s, 0, sizeof *s);
    s->ctx = context();
    CHECK_EQ_INT(xd_comm_self(s->ctx, &s->world), XD_OK);
    s->part = (xd_tensor_part){ .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 3, 4 } };
    s->part.range.end = 12;
    s->part.data = s->values;
    s->param = (xd_param){ .name = "w", .value = s->values, .gradient = s->values, .dtype = XD_DTYPE_F32 };
    s->param.count = 12;
    xd_optimizer_desc sgd = xd_adamw_defaults(&s->param, 1);
    sgd.kind = XD_OPTIMIZER_SGD;
    sgd.learning_rate = rate;
    CHECK_EQ_INT(xd_optimizer_create(s->ctx, &sgd, &s->optimizer), XD_OK);
    s->network.parts = &s->part;
    s->network.part_count = 1;
    s->network.optimizer = s->optimizer;
    s->save.root = s->load.root = root;
    s->save.networks = s->load.networks = &s->network;
    s->save.network_count = s->load.network_count = 1;
}

static void close_saved(saved_scene *s) {
    xd_optimizer_destroy(s->optimizer);
    xd_comm_destroy(s->world);
    xd_ctx_destroy(s->ctx);
}

XD_TEST(a_step_that_is_missing_names_those_there_are) {
    const char *root = new_root();
    saved_scene s;
    open_saved(&s, root, 0.5);
    s.load.step = 7;
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, NULL, NULL), XD_ERROR_MISSING);
    CHECK(has(s.ctx, "it has no manifest.json; there is no other step"));
    for (int64_t step = 100; step <= 700; step += 100) {
        s.save.step = step;
        CHECK_EQ_INT(xd_checkpoint_save(s.world, &s.save), XD_OK);
        if (step != 200) continue;
        CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, NULL, NULL), XD_ERROR_MISSING);
        CHECK(has(s.ctx, "; there are steps 200, 100"));
    }
    CHECK(mkdir(path_in(root, "step-900"), 0777) == 0); /* no checkpoint */
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, NULL, NULL), XD_ERROR_MISSING);
    CHECK(has(s.ctx, "; there are steps 700, 600, 500, 400, 300 and more"));
    s.load.root = path_in(root, "nowhere");
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, NULL, NULL), XD_ERROR_MISSING);
    CHECK(has(s.ctx, "; there is no directory \""));
    close_saved(&s);
    remove_all(root);
}

XD_TEST(a_tensor_of_another_shape_is_named_with_both) {
    const char *root = new_root();
    saved_scene s;
    open_saved(&s, root, 0.5);
    CHECK_EQ_INT(xd_checkpoint_save(s.world, &s.save), XD_OK);
    s.part.shape[0] = 4;
    s.part.shape[1] = 3;
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, NULL, NULL), XD_ERROR_SHAPE);
    CHECK(has(s.ctx, "\"w\" is [3, 4] there and [4, 3] here"));
    const int64_t shape[] = { 12 };
    const xd_state_tensor tensor = {
        .group = "model", .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = shape, .data = s.values
    };
    const xd_state_scatter_desc scatter = {
        .networks = &s.network, .network_count = 1, .tensors = &tensor, .tensor_count = 1
    };
    xd_state_report report;
    s.network.optimizer = NULL;
    CHECK_EQ_INT(xd_state_scatter(s.world, &scatter, &report), XD_ERROR_SHAPE);
    CHECK(has(s.ctx, "\"w\" is [12] there and [4, 3] here"));
    close_saved(&s);
    remove_all(root);
}

XD_TEST(a_load_that_replaces_a_learning_rate_reports_it_and_a_flag_keeps_it) {
    const char *root = new_root();
    saved_scene s;
    xd_checkpoint_report report;
    open_saved(&s, root, 0.5);
    CHECK_EQ_INT(xd_checkpoint_save(s.world, &s.save), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, &report, NULL), XD_OK);
    CHECK(report.rates == 0 && report.own_rate == 0.0 && report.saved_rate == 0.0);
    close_saved(&s);
    open_saved(&s, root, 0.25);
    s.load.keep_learning_rate = true;
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, &report, NULL), XD_OK);
    CHECK_EQ_INT(report.rates, 0);
    CHECK_NEAR(xd_optimizer_settings(s.optimizer)->learning_rate, 0.25, 0.0);
    s.load.keep_learning_rate = false;
    CHECK_EQ_INT(xd_checkpoint_load(s.world, &s.load, &report, NULL), XD_OK);
    CHECK_EQ_INT(report.rates, 1);
    CHECK_NEAR(report.own_rate, 0.25, 0.0);
    CHECK_NEAR(report.saved_rate, 0.5, 0.0);
    CHECK_NEAR(xd_optimizer_settings(s.optimizer)->learning_rate, 0.5, 0.0);
    close_saved(&s);
    remove_all(root);
}

/* ---- sums to report ---- */

enum { SUM_RANKS = 3, SUM_VALUES = 700 /* several pieces */ };

/* Not associative: another order has other bits. */
static double sum_value(int rank, int i) {
    static const double large[SUM_RANKS] = { 1e16, 1.0, -1e16 };
    return large[(rank + i) % SUM_RANKS] + i * 0.1;
}

static xd_result sum_rank(xd_comm *world, void *argument) {
    (void)argument;
    const int rank = xd_comm_rank(world);
    double values[SUM_VALUES];
    float even[2 * SUM_RANKS], own[2] = { (float)rank, (float)rank + 0.5f };
    for (int i = 0; i < SUM_VALUES; i++) values[i] = sum_value(rank, i);
    CHECK_EQ_INT(xd_sum_values(world, values, SUM_VALUES), XD_OK);
    for (int i = 0; i < SUM_VALUES; i++) {
        double sum = sum_value(0, i);
        for (int r = 1; r < SUM_RANKS; r++) sum += sum_value(r, i);
        CHECK(memcmp(&sum, &values[i], sizeof sum) == 0);
    }
    CHECK_EQ_INT(xd_all_gather_even(world, own, even, 2, XD_DTYPE_F32), XD_OK);
    for (int i = 0; i < 2 * SUM_RANKS; i++) CHECK(even[i] == (float)(i / 2) + 0.5f * (float)(i % 2));
    CHECK_EQ_INT(xd_sum_values(world, values, rank == 1 ? 2 : 1), XD_ERROR_MISMATCH);
    CHECK(says(world, "rank 1 passed count 2, rank 0 passed count 1 (in xd_sum_values)"));
    CHECK_EQ_INT(xd_sum_values(world, rank == 1 ? NULL : values, 1),
                 rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(says(world, "values is NULL"));
    CHECK_EQ_INT(xd_sum_values(world, values, rank == 1 ? -1 : 1),
                 rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK_EQ_INT(xd_all_gather_even(world, own, even, rank == 1 ? 1 : 2, XD_DTYPE_F32), XD_ERROR_MISMATCH);
    CHECK_EQ_INT(xd_sum_values(world, values, 0), XD_OK);
    return XD_OK;
}

XD_TEST(values_to_report_are_added_in_rank_order_in_every_mode) {
    for (int mode = 0; mode <= XD_REDUCTION_INVARIANT; mode++) {
        const xd_ctx_desc desc = { .reduction = (xd_reduction)mode };
        CHECK_EQ_INT(xd_run_threads(SUM_RANKS, &desc, sum_rank, NULL, NULL), XD_OK);
    }
}

XD_TEST_MAIN()
