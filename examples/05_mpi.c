/* The same program on one rank, or on the processes of an MPI job: only the world differs.
 *
 * Each rank holds a shard of the vocabulary and takes part in a cross entropy. Each rank then
 * computes the expected result locally from whole rows, and compares.
 *
 *     cc -std=c99 -O2 examples/05_mpi.c -o one -lm -lpthread                   one rank, no MPI
 *     mpicc -std=c99 -O2 -DXD_MPI examples/05_mpi.c -o many -lm -lpthread      mpirun -n 4 ./many
 */
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

/* The mean cross entropy of whole rows. The label of position t is id 100 t. */
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
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY, .tp = world }, &vocab));
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;

    float *logits = malloc((size_t)(POSITIONS * columns + 1) * sizeof *logits);
    /* If one rank has no memory, all ranks return the error. */
    XD_TRY(xd_agree(world, logits ? XD_OK : XD_ERROR_MEMORY));
    for (int64_t t = 0; t < POSITIONS; t++) {
        label[t] = 100 * t;
        for (int64_t c = 0; c < columns; c++) logits[t * columns + c] = logit(t, info.begin + c);
    }

    const xd_loss_desc desc = {
        .student = { logits, XD_DTYPE_F32, POSITIONS, columns, 0 },
        .common.labels.data = label,
        .vocab = vocab,
        .hard_weight = 1.0,
    };
    XD_TRY(xd_loss(ctx, &desc, &values));
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
        const xd_error *error = xd_last_error(ctx);
        fprintf(stderr, "rank %d: %s\n", error->rank, error->message);
    } else if (xd_comm_rank(world) == 0) {
        const int ranks = xd_comm_size(world);
        printf("%d rank%s: cross entropy %.7f, expected %.7f\n", ranks, ranks == 1 ? "" : "s",
               loss, expected_loss());
    }
    xd_comm_destroy(world);
    /* The tolerance allows for the rounding of f32 logits. */
    return result == XD_OK && fabs(loss - expected_loss()) < 1e-6 ? 0 : 1;
}

int main(int argc, char **argv) {
    xd_ctx *ctx;
    int status = 1;
#if defined(XD_MPI)
    MPI_Init(&argc, &argv);
#else
    (void)argc;
    (void)argv;
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
