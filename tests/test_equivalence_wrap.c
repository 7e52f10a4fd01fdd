/* A dozen of the list of tests/equivalence: the transformer of examples/nn under wrappers has the bits of one rank. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

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

static train_config config_of(train_wrap wrap, int dp, int tp, int groups) {
    const train_config c = {
        .wrap = wrap, .dp = dp, .tp = tp, .groups = groups, .reduction = XD_REDUCTION_INVARIANT, .steps = 4
    };
    return c;
}

static void check_run(const train_config *c, const train_result *one) {
    train_result *other = (train_result *)calloc(1, sizeof *other);
    char message[512] = "", name[TRAIN_NAME];
    const bool ok = train_on_threads(c, other, message) && train_equal(one, other, message);
    train_name(c, name);
    if (!ok) printf("%s: %s\n", name, message);
    CHECK(ok);
    free(other);
}

static train_result *alone(bool bf16) {
    train_config c = config_of(TRAIN_DDP, 1, 1, 0);
    train_result *one = (train_result *)calloc(1, sizeof *one);
    char message[512] = "";
    c.bf16 = bf16;
    CHECK(train_on_threads(&c, one, message));
    return one;
}

XD_TEST(a_transformer_under_any_wrapper_and_tensor_parallel_cut_has_the_bits_of_one_rank) {
    const train_config list[] = {
        config_of(TRAIN_DDP, 3, 1, 0),     config_of(TRAIN_SHARDED, 5, 1, 0), config_of(TRAIN_FSDP, 4, 1, 0),
        config_of(TRAIN_HSDP, 6, 1, 3),    config_of(TRAIN_DDP, 1, 2, 0),     config_of(TRAIN_FSDP, 2, 2, 0),
        config_of(TRAIN_SHARDED, 2, 3, 0), config_of(TRAIN_HSDP, 3, 2, 3),    config_of(TRAIN_FSDP, 1, 8, 0),
    };
    train_result *one = alone(false), *half = alone(true);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) check_run(&list[i], one);
    for (size_t i = 3; i < 6; i++) { /* and one send a step, with rounded weights */
        train_config c = list[i];
        c.bf16 = true;
        c.whole = true;
        c.workers = true;
        check_run(&c, half);
    }
    CHECK(memcmp(one->values, half->values, sizeof one->values) != 0);
    free(one);
    free(half);
}

/* Ranks share sequences of eleven positions, or of three to thirteen, of which the last blocks and ranks may have none. */
XD_TEST(ranks_that_share_sequences_in_blocks_have_the_bits_of_one_rank) {
    const train_config list[] = { config_of(TRAIN_DDP, 1, 2, 0), config_of(TRAIN_SHARDED, 2, 1, 0),
                                  config_of(TRAIN_FSDP, 2, 1, 0) };
    for (int lengths = 0; lengths < 2; lengths++) {
        train_config c = config_of(TRAIN_DDP, 1, 1, 0);
        train_result *one = (train_result *)calloc(1, sizeof *one);
        char message[512] = "";
        c.cp = 1;
        c.lengths = lengths != 0;
        CHECK(train_on_threads(&c, one, message));
        for (int i = 0; i < 3; i++) {
            c = list[i];
            c.cp = i == 1 ? 4 : 2;
            c.lengths = lengths != 0;
            c.recompute = c.workers = i == 2;
            check_run(&c, one);
        }
        free(one);
    }
}

/* What the pieces are for: in the other modes a cut has other bits, and is close. */
XD_TEST(without_fixed_pieces_a_cut_is_only_close) {
    train_config c = config_of(TRAIN_FSDP, 1, 2, 0);
    train_result *one = alone(false), *other = (train_result *)calloc(1, sizeof *other);
    char message[512] = "";
    double losses = 0.0;
    c.reduction = XD_REDUCTION_DETERMINISTIC;
    CHECK(train_on_threads(&c, other, message));
    CHECK(!train_equal(one, other, message));
    CHECK(train_apart(one, other, &losses) <= 1e-2);
    CHECK(losses <= 1e-3);
    free(one);
    free(other);
}

XD_TEST_MAIN()
