/* A teacher and a student on different meshes of an MPI job have the loss and gradient of one rank: every
 * process checks what it holds against a computation of its own. Needs four ranks or more. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "mpi_runner.h"
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
    CHECK(xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, &world) == XD_OK);
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

int main(int argc, char **argv) {
    return mpi_run_tests(argc, argv, 4, 64);
}
