/* The conformance suite of transports through queues of both forms, on threads and on a group of one. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "queue_suite.h"

typedef struct scene {
    xd_queue_form form;
    xd_rank_function function;
} scene;

static xd_result case_rank(xd_comm *world, void *argument) {
    const scene *s = (const scene *)argument;
    return queued_case(world, s->form, s->function);
}

static void run(int ranks, xd_reduction mode, xd_rank_function function) {
    const xd_ctx_desc d = { .reduction = mode, .timeout_seconds = 60 };
    for (int form = XD_QUEUE_INLINE; form <= XD_QUEUE_WORKER; form++) {
        scene s = { (xd_queue_form)form, function };
        xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
        CHECK_EQ_INT(xd_run_threads(ranks, &d, case_rank, &s, &error), XD_OK);
        CHECK_EQ_STR(error.message, "");
    }
}

static void run_alone(xd_reduction mode, xd_rank_function function) {
    const xd_ctx_desc d = { .reduction = mode };
    for (int form = XD_QUEUE_INLINE; form <= XD_QUEUE_WORKER; form++) {
        xd_ctx *ctx = NULL;
        xd_comm *self = NULL;
        CHECK(xd_ctx_create(&d, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
        CHECK_EQ_INT(queued_case(self, (xd_queue_form)form, function), XD_OK);
        xd_comm_destroy(self);
        xd_ctx_destroy(ctx);
    }
}

static void run_everywhere(xd_rank_function function) {
    run_alone(XD_REDUCTION_DETERMINISTIC, function);
    run_alone(XD_REDUCTION_INVARIANT, function);
    for (int ranks = 1; ranks <= 4; ranks++) run(ranks, XD_REDUCTION_DETERMINISTIC, function);
    run(3, XD_REDUCTION_FAST, function);
    run(5, XD_REDUCTION_INVARIANT, function);
}

#define CASE(name)                    \
    XD_TEST(name) {                   \
        run_everywhere(suite_##name); \
    }
COMM_SUITE(CASE)

XD_TEST_MAIN()
