/* The conformance suite over NCCL with every GPU there is, a thread for each: on a machine with GPUs over NCCL itself. */
#include "cuda_test.h"

#if defined(XD_EMU) || __has_include(<nccl.h>)
#    include "cuda_nccl_suite.h"

static void run_on_all(xd_rank_function function, int64_t compared) {
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0);
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        World world;
        world.reduction = (xd_reduction)mode;
        world.desc.size = devices < SUITE_RANKS ? devices : SUITE_RANKS;
        world.desc.compare = compared;
        run_suite(&world, function);
    }
}

#    define CASE(name)                          \
        XD_TEST(name) {                         \
            run_on_all(suite_##name, INT64_MAX); \
        }
COMM_SUITE(CASE)

static xd_result suite_data(xd_comm *comm, void *) {
#    define RUN(name) XD_TRY(suite_##name(comm, nullptr));
    COMM_SUITE_DATA(RUN)
    return XD_OK;
}

XD_TEST(calls_that_are_not_compared_give_the_same) {
    run_on_all(suite_data, -1);
}
#else
XD_TEST(the_suite_of_transports_runs_over_nccl) {
    SKIP("there is no nccl.h");
}
#endif

XD_CUDA_TEST_MAIN()
