/* The same program on one rank, or on the processes of an MPI job: only the world differs.
 *
 *     cc -std=c99 -O2 examples/05_mpi.c -o one -lm -lpthread                   one rank, no MPI
 *     mpicc -std=c99 -O2 -DXD_MPI examples/05_mpi.c -o many -lm -lpthread      mpirun -n 4 ./many
 *
 * Each rank holds its part of a vocabulary and takes part in a cross entropy; each then computes the result from the
 * whole rows locally and compares. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#if defined(XD_MPI)
#include "../xdistill_mpi.h"
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { POSITIONS = 8, VOCABULARY = 1001 };

static float logit(int64_t position, int64_t id) { return 4.0f * cosf((float)(position + 7 * id)); }

/* The mean cross entropy with every column in one place; position t's label is id 100 t. */
static double expected_loss(void) {
    double loss = 0.0;
    for (int64_t t = 0; t < POSITIONS; t++) {
        double sum = 0.0;
        for (int64_t v = 0; v < VOCABULARY; v++) sum += exp((double)logit(t, v));
        loss += (log(sum) - (double)logit(t, 100 * t)) / POSITIONS;
    }
    return loss;
}

static xd_result run_rank(xd_comm *world, double *loss) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab;
    xd_loss_values values;
    int64_t label[POSITIONS];
    XD_TRY(xd_vocab_create_even(ctx, world, VOCABULARY, &vocab));
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;

    float *logits = malloc((size_t)(POSITIONS * columns + 1) * sizeof *logits);
    XD_TRY(xd_agree(world, logits ? XD_OK : XD_ERROR_MEMORY)); /* if one rank has no memory, all ranks return the error */
    for (int64_t t = 0; t < POSITIONS; t++) {
        label[t] = 100 * t;
        for (int64_t c = 0; c < columns; c++) logits[t * columns + c] = logit(t, info.begin + c);
    }
    XD_TRY(xd_loss(ctx, &(xd_loss_desc){ .student = { logits, XD_DTYPE_F32, POSITIONS, columns, 0 },
                                        .common.labels.data = label, .vocab = vocab, .hard_weight = 1.0 }, &values));
    *loss = values.loss;
    free(logits);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result join_world(xd_ctx *ctx, xd_comm **world) {
#if defined(XD_MPI)
    return xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = MPI_COMM_WORLD }, world);
#else
    return xd_comm_self(ctx, world);
#endif
}

static int run(xd_ctx *ctx) {
    xd_comm *world = NULL;
    double loss = 0.0;
    xd_result result = join_world(ctx, &world);
    if (result == XD_OK) result = run_rank(world, &loss);
    if (result != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", xd_last_error(ctx)->rank, xd_last_error(ctx)->message);
    } else if (xd_comm_rank(world) == 0) {
        printf("%d rank%s: cross entropy %.7f, expected %.7f\n", xd_comm_size(world),
               xd_comm_size(world) == 1 ? "" : "s", loss, expected_loss());
    }
    xd_comm_destroy(world);
    return result == XD_OK && fabs(loss - expected_loss()) < 1e-6 ? 0 : 1; /* logits are f32 */
}

int main(int argc, char **argv) {
    xd_ctx *ctx;
    int status = 1;
#if defined(XD_MPI)
    MPI_Init(&argc, &argv);
#else
    (void)argc, (void)argv;
#endif
    if (xd_ctx_create(NULL, &ctx) == XD_OK) {
        status = run(ctx);
        xd_ctx_destroy(ctx);
    }
#if defined(XD_MPI)
    MPI_Finalize();
#endif
    return status;
}
