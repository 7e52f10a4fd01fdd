/* A world of all processes of the job, with a context of its own. */
#ifndef MPI_WORLD_H
#define MPI_WORLD_H

#include "xd_test.h"

static xd_comm *join(const xd_ctx_desc *desc) {
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(desc, &ctx) == XD_OK);
    CHECK(xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, &world) == XD_OK);
    return world;
}

static void leave(xd_comm *world) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

#endif
