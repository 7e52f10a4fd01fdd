/* A dozen of the list of tests/equivalence over MPI: the transformer of examples/nn has the bits of one rank. Four ranks. */
#define XDISTILL_IMPLEMENTATION
#define MPI_RUNNER_THREADS MPI_THREAD_MULTIPLE
#include "xdistill.h"
#include "xdistill_mpi.h"

#include "mpi_runner.h"
#include "mpi_world.h"
#include "mpi_written.h"

#include "../../examples/nn/nn_blocks.c"
#include "../../examples/nn/nn_describe.c"
#include "../../examples/nn/nn_exp.c"
#include "../../examples/nn/nn_layers.c"
#include "../../examples/nn/nn_matmul.c"
#include "../../examples/nn/nn_model.c"
#include "../../examples/nn/nn_patch_positions.c"
#include "../../examples/nn/nn_patch_rows.c"
#include "../../examples/nn/nn_sequence.c"
#include "../../examples/nn/nn_transformer.c"
#include "../equivalence/stages.c"
#include "../equivalence/train.c"

static train_config config_of(train_wrap wrap, int dp, int cp, int tp) {
    const train_config c = {
        .wrap = wrap, .dp = dp, .tp = tp, .cp = cp, .steps = 4, .reduction = XD_REDUCTION_INVARIANT
    };
    return c;
}

/* On one rank, a thread of this process: the same model, with the same rounding, blocks and stages. */
static train_result *alone(const train_config *of) {
    train_result *one = (train_result *)calloc(1, sizeof *one);
    char message[512] = "";
    train_config c = config_of(TRAIN_DDP, 1, of->cp > 0, 1);
    c.bf16 = of->bf16;
    c.lengths = of->lengths;
    c.pp = of->pp > 0;
    const bool ok = train_on_threads(&c, one, message);
    if (!ok) printf("one rank: %s\n", message);
    CHECK(ok);
    return one;
}

/* What is nobody's has bits that no number of the run has. */
static train_result *unwritten(void) {
    train_result *run = (train_result *)calloc(1, sizeof *run);
    memset(run->values, 0xff, sizeof run->values);
    memset(run->first, 0xff, sizeof run->first);
    memset(run->second, 0xff, sizeof run->second);
    memset(run->average, 0xff, sizeof run->average);
    return run;
}

/* What this rank has written, compared with one rank's; returns how many numbers that were. */
static int64_t compare_written(const train_result *one, const train_result *run) {
    const float *const wanted[WRITTEN_ARRAYS] = { one->values, one->first, one->second, one->average };
    const float *const got[WRITTEN_ARRAYS] = { run->values, run->first, run->second, run->average };
    return compare_arrays(wanted, got, TRAIN_ROOM);
}

static int64_t numbers(bool pipeline) {
    const nn_config config = train_model(pipeline);
    nn_model m;
    CHECK(nn_model_init(&config, NULL, NULL, &m) == NULL);
    const int64_t count = m.float_count;
    nn_model_free(&m);
    return 4 * count;
}

/* Every number is somebody's, once. */
static void check_over_mpi(const train_config *c) {
    train_result *one = alone(c), *run = unwritten();
    const train_job job = { c, run };
    char name[TRAIN_NAME];
    xd_comm *world = join(
        &(xd_ctx_desc){ .reduction = c->reduction, .timeout_seconds = 60, .allocator = train_allocator() });
    train_name(c, name);
    CHECK_EQ_INT(train_ranks(c), xd_comm_size(world));
    const xd_result result = (c->pp ? train_stages_rank : train_rank)(world, (void *)&job);
    if (result != XD_OK) printf("%s: %s\n", name, xd_last_error(xd_comm_ctx(world))->message);
    CHECK(result == XD_OK);
    int64_t written = compare_written(one, run);
    CHECK(xd_all_reduce(world, &written, &written, 1, XD_DTYPE_I64, XD_SUM) == XD_OK);
    CHECK_EQ_INT(written, numbers(c->pp > 0));
    if (xd_comm_rank(world) == 0) {
        CHECK(c->pp || memcmp(run->losses, one->losses, sizeof run->losses) == 0);
        CHECK(memcmp(run->norms, one->norms, sizeof run->norms) == 0);
    }
    leave(world);
    free(run);
    free(one);
}

static void check_all(const train_config *list, int count) {
    for (int i = 0; i < count; i++) check_over_mpi(&list[i]);
}

XD_TEST(data_parallel_wrappers_over_processes_have_the_bits_of_one_rank) {
    train_config list[] = { config_of(TRAIN_DDP, 4, 0, 1), config_of(TRAIN_SHARDED, 4, 0, 1),
                            config_of(TRAIN_FSDP, 4, 0, 1), config_of(TRAIN_FSDP, 4, 0, 1) };
    list[1].workers = true;
    list[2].bf16 = true;
    list[3].whole = list[3].workers = list[3].recompute = true;
    check_all(list, 4);
}

XD_TEST(tensor_parallel_cuts_over_processes_have_the_bits_of_one_rank) {
    train_config list[] = { config_of(TRAIN_DDP, 1, 0, 4), config_of(TRAIN_FSDP, 2, 0, 2),
                            config_of(TRAIN_SHARDED, 2, 0, 2) };
    list[1].workers = true;
    list[2].bf16 = true;
    check_all(list, 3);
}

XD_TEST(shared_sequences_over_processes_have_the_bits_of_one_rank) {
    train_config list[] = { config_of(TRAIN_DDP, 1, 4, 1), config_of(TRAIN_FSDP, 2, 2, 1),
                            config_of(TRAIN_DDP, 1, 2, 2) };
    list[0].lengths = list[2].lengths = true;
    list[1].workers = list[1].bf16 = true;
    check_all(list, 3);
}

XD_TEST(pipelines_over_processes_have_the_bits_of_one_rank) {
    train_config list[] = { config_of(TRAIN_FSDP, 2, 0, 1), config_of(TRAIN_DDP, 1, 0, 2) };
    list[0].pp = list[1].pp = 2;
    list[1].virtual_stages = 2;
    list[0].workers = true;
    check_all(list, 2);
}

int main(int argc, char **argv) {
    return mpi_run_tests(argc, argv, 4, 4);
}
