/* A teacher and a student on different meshes of an MPI job have the loss and gradient of one rank: every
 * process checks what it holds against a computation of its own. Needs four ranks or more. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "xd_test.h"
#include "xtoken_parity.h"

/* TP, CP, DP, first rank, micro-batch. */
static const parity_mesh meshes[][2] = { { { 2, 2, 1, 0, 1 }, { 4, 1, 1, 0, 2 } }, /* every rank is both */
                                         { { 2, 1, 2, 0, 1 }, { 2, 2, 1, 0, 4 } },
                                         { { 1, 3, 1, 0, 2 }, { 1, 1, 1, 3, 1 } }, /* no rank is both */
                                         { { 1, 1, 1, 3, 3 }, { 3, 1, 1, 0, 2 } },
                                         { { 1, 1, 3, 1, 2 }, { 1, 3, 1, 0, 2 } } };
enum { MESHES = sizeof meshes / sizeof *meshes };

static void check_mesh(int i, xd_xtoken_kind kind, xd_route_payload payload, xd_reduction reduction) {
    parity p;
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    memset(&p, 0, sizeof p);
    memset(&desc, 0, sizeof desc);
    desc.reduction = p.reduction = reduction;
    p.teacher = meshes[i][0];
    p.student = meshes[i][1];
    p.kind = kind;
    p.payload = payload;
    parity_prepare(&p);
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(xd_comm_mpi(ctx, MPI_COMM_WORLD, &world) == XD_OK);
    CHECK(parity_body(world, &p) == XD_OK);
    if (xd_last_error(ctx)->result != XD_OK) CHECK_EQ_STR(xd_last_error(ctx)->message, "");
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

static void check_meshes(xd_xtoken_kind kind, xd_route_payload payload) {
    for (int i = 0; i < MESHES; i++) {
        check_mesh(i, kind, payload, XD_REDUCTION_DETERMINISTIC);
        check_mesh(i, kind, payload, XD_REDUCTION_INVARIANT);
    }
}

XD_TEST(p_kl_has_parity_over_processes) {
    check_meshes(XD_XTOKEN_PROJECTED, XD_ROUTE_LOGITS);
}

XD_TEST(p_kl_has_parity_from_chosen_columns_over_processes) {
    check_meshes(XD_XTOKEN_PROJECTED, XD_ROUTE_COLUMNS);
}

XD_TEST(gold_has_parity_from_hidden_states_over_processes) {
    check_meshes(XD_XTOKEN_GOLD, XD_ROUTE_HIDDEN);
}

XD_TEST(one_tokenizer_has_parity_over_processes) {
    check_meshes(XD_XTOKEN_SAME, XD_ROUTE_LOGITS);
}

/* A test has failed when it failed on one rank. */
int main(int argc, char **argv) {
    int rank, size, count[3] = { 0, 0, 0 };
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (const xd_test_case *test = xd_test_first; test; test = test->next) {
        if (argc > 1 && !strstr(test->name, argv[1])) continue;
        int mine = size >= 4 ? xd_test_run_one(test) : 2, worst;
        MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
        if (mine == 2 && rank == 0) printf("skipped %s: needs 4 ranks\n", test->name);
        count[worst]++;
    }
    fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("%d passed, %d failed, %d skipped\n", count[0], count[1], count[2]);
    MPI_Finalize();
    return count[1] > 0;
}
