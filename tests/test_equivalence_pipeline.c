/* The transformer of examples/nn as a pipeline, under every wrapper and beside tensor-parallel ranks, has the bits of one stage. */
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

static train_config pipeline_of(train_wrap wrap, int pp, int virtual_stages, int dp) {
    const train_config c = { .wrap = wrap,
                             .dp = dp,
                             .tp = 1,
                             .pp = pp,
                             .virtual_stages = virtual_stages,
                             .reduction = XD_REDUCTION_INVARIANT,
                             .steps = 3 };
    return c;
}

static train_result *run_of(const train_config *c) {
    train_result *out = (train_result *)calloc(1, sizeof *out);
    char message[512] = "", name[TRAIN_NAME];
    train_name(c, name);
    const bool ok = train_on_threads(c, out, message);
    if (!ok) printf("%s: %s\n", name, message);
    CHECK(ok);
    return out;
}

static void check_run(const train_config *c, const train_result *one) {
    train_result *other = run_of(c);
    char message[512] = "", name[TRAIN_NAME];
    const bool ok = train_equal(one, other, message);
    train_name(c, name);
    if (!ok) printf("%s: %s\n", name, message);
    CHECK(ok);
    free(other);
}

static train_result *one_stage(bool copies, bool bf16) {
    train_config c = pipeline_of(TRAIN_DDP, 1, 0, 1);
    c.copies = copies;
    c.bf16 = bf16;
    return run_of(&c);
}

XD_TEST(a_transformer_in_any_stages_under_any_wrapper_has_the_bits_of_one_stage) {
    const train_config list[] = { pipeline_of(TRAIN_DDP, 2, 0, 1),     pipeline_of(TRAIN_DDP, 4, 0, 1),
                                  pipeline_of(TRAIN_DDP, 2, 2, 1),     pipeline_of(TRAIN_DDP, 2, 0, 2),
                                  pipeline_of(TRAIN_SHARDED, 2, 2, 2), pipeline_of(TRAIN_FSDP, 2, 0, 2),
                                  pipeline_of(TRAIN_FSDP, 2, 2, 2),    pipeline_of(TRAIN_FSDP, 4, 0, 2) };
    train_result *one = one_stage(false, false), *half = one_stage(false, true);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) check_run(&list[i], one);
    for (size_t i = 3; i < 7; i++) { /* with layers in some chunks only, rounded weights, sums on threads */
        train_config c = list[i];
        c.uneven = c.virtual_stages > 0;
        c.bf16 = c.workers = true;
        c.whole = i == 5;
        check_run(&c, half);
    }
    CHECK(memcmp(one->values, half->values, sizeof one->values) != 0);
    free(one);
    free(half);
}

XD_TEST(data_ranks_with_unequal_numbers_of_micro_batches_have_the_bits_of_one_stage) {
    train_result *one = one_stage(false, false);
    for (int wrap = TRAIN_DDP; wrap <= TRAIN_FSDP; wrap++) { /* 24 over 5: 5, 5, 5, 5 and 4 */
        const train_config c = pipeline_of((train_wrap)wrap, 2, 0, wrap == TRAIN_FSDP ? 3 : 5);
        check_run(&c, one);
    }
    free(one);
}

XD_TEST(stages_beside_tensor_parallel_ranks_have_the_bits_of_one_stage) {
    train_result *one = one_stage(false, false);
    train_config c = pipeline_of(TRAIN_DDP, 2, 2, 1);
    c.tp = 2;
    check_run(&c, one);
    c = pipeline_of(TRAIN_FSDP, 2, 0, 2);
    c.tp = 2;
    check_run(&c, one);
    free(one);
}

/* Head and embedding as two copies, in one stage or in two. */
XD_TEST(stages_whose_ranks_share_sequences_have_the_bits_of_one_stage) {
    train_config c = pipeline_of(TRAIN_DDP, 1, 0, 1);
    c.cp = 1;
    c.lengths = true;
    train_result *one = run_of(&c);
    c = pipeline_of(TRAIN_FSDP, 2, 2, 1);
    c.cp = 2;
    c.lengths = true;
    check_run(&c, one);
    free(one);
}

XD_TEST(a_tied_embedding_has_the_bits_of_one_stage_wherever_its_copies_are) {
    train_result *one = one_stage(true, false), *apart = one_stage(false, false);
    const train_config list[] = { pipeline_of(TRAIN_DDP, 2, 0, 1), pipeline_of(TRAIN_DDP, 4, 0, 2),
                                  pipeline_of(TRAIN_SHARDED, 2, 2, 2), pipeline_of(TRAIN_SHARDED, 2, 0, 3) };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        train_config c = list[i];
        c.copies = true;
        c.uneven = i == 2;
        check_run(&c, one);
    }
    nn_model m;
    const nn_config config = train_model(true);
    CHECK(!nn_model_init(&config, NULL, NULL, &m));
    const nn_param *embed = &m.params[nn_param_find(&m, "model.embed_tokens.weight")];
    const nn_param *head = &m.params[nn_param_find(&m, "lm_head.weight")];
    const size_t bytes = (size_t)nn_param_count(embed) * sizeof(float);
    CHECK(memcmp(one->values + embed->offset, one->values + head->offset, bytes) == 0);
    CHECK(memcmp(apart->values + embed->offset, apart->values + head->offset, bytes) != 0);
    nn_model_free(&m);
    free(one);
    free(apart);
}

XD_TEST_MAIN()
