/* The conformance suite over processes of one machine, and what only these have. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "comm_suite.h"
#include "node_world.h"
#include "xd_test.h"

static void run(int ranks, xd_reduction mode, size_t slot_bytes, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = mode, .timeout_seconds = 60, .init_timeout_seconds = 60 };
    const node_start start = {
        .ranks = ranks, .desc = &desc, .slot_bytes = slot_bytes, .function = function
    };
    char message[256];
    CHECK_EQ_INT(node_run(&start, message), XD_OK);
    CHECK_EQ_STR(message, "");
}

/* With the smallest slots too, where most calls take many steps. */
static void run_everywhere(xd_rank_function function) {
    for (int ranks = 1; ranks <= 8; ranks += 1 + ranks / 3)
        run(ranks, XD_REDUCTION_DETERMINISTIC, ranks % 2 ? 0 : (size_t)ranks << 13, function);
    run(3, XD_REDUCTION_FAST, 0, function);
    run(2, XD_REDUCTION_INVARIANT, 2 << 13, function);
    run(5, XD_REDUCTION_INVARIANT, 5 << 13, function);
}

#define CASE(name)                    \
    XD_TEST(name) {                   \
        run_everywhere(suite_##name); \
    }
COMM_SUITE(CASE)

XD_TEST_MAIN()
