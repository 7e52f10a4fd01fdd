/* Wrapped models over MPI, without queues and with workers: the bits of one rank. Four ranks or more. */
#define XDISTILL_IMPLEMENTATION
#define MPI_RUNNER_THREADS MPI_THREAD_MULTIPLE
#include "xdistill.h"

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

/* Messages of control rounds that this rank has sent: of every four tags of a group, the first; 0 is that of notices. */
static int control_messages;

static int send_noted(const void *data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm,
                      MPI_Request *request) {
    control_messages += tag > 0 && tag % 4 == 0;
    return MPI_Isend(data, count, type, rank, tag, comm, request);
}

#define MPI_Isend send_noted
#include "xdistill_mpi.h"
#undef MPI_Isend

#include "mpi_runner.h"
#include "mpi_world.h"
#include "mpi_written.h"
#include "wrap_train.h"

/* What this rank has counted and written, compared with one rank's; returns how many numbers that were. */
static int64_t compare_written(const wrap_run *one, const wrap_run *run) {
    const float *const wanted[WRITTEN_ARRAYS] = { one->values, one->averages, one->moments, one->squares };
    const float *const got[WRITTEN_ARRAYS] = { run->values, run->averages, run->moments, run->squares };
    return compare_arrays(wanted, got, WRAP_ROOM);
}

static void over_mpi(const wrap_run *one, wrap_kind kind, int queues) {
    xd_comm *world = join(&(xd_ctx_desc){ .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 });
    wrap_run *run = wrap_new(kind, xd_comm_size(world), one->leaves, one->reduction);
    run->queues = queues;
    run->prefetch = queues && kind >= WRAP_FSDP;
    run->nested = queues == 0;
    memset(run->values, 0xff, sizeof run->values);
    memset(run->averages, 0xff, sizeof run->averages);
    memset(run->moments, 0xff, sizeof run->moments);
    memset(run->squares, 0xff, sizeof run->squares);
    const xd_result result = wrap_rank_run(world, run);
    if (result != XD_OK) printf("%s\n", xd_last_error(xd_comm_ctx(world))->message);
    CHECK(result == XD_OK);
    int64_t written = compare_written(one, run);
    CHECK(xd_all_reduce(world, &written, &written, 1, XD_DTYPE_I64, XD_SUM) == XD_OK);
    CHECK(written > 1000);
    free(run);
    leave(world);
}

static void all_kinds(int queues) {
    wrap_run *one = wrap_new(WRAP_DDP, 1, 8, XD_REDUCTION_INVARIANT);
    CHECK(wrap_execute(one) == XD_OK);
    for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++) over_mpi(one, (wrap_kind)kind, queues);
    free(one);
}

XD_TEST(every_wrapper_over_processes_trains_to_the_bits_of_one_rank) {
    all_kinds(0);
}

XD_TEST(workers_beside_the_passes_change_no_bit_over_processes) {
    all_kinds(2); /* inline where this MPI has no MPI_THREAD_MULTIPLE */
}

/* Trains with this many leaves where nothing is compared; returns the messages of control rounds. */
static int train_uncompared(wrap_kind kind, int64_t leaves) {
    wrap_run *one = wrap_new(WRAP_DDP, 1, leaves, XD_REDUCTION_INVARIANT);
    CHECK(wrap_execute(one) == XD_OK);
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    CHECK(xd_comm_mpi(ctx, &(xd_mpi_desc){ .compare = -1 }, &world) == XD_OK);
    wrap_run *run = wrap_new(kind, xd_comm_size(world), leaves, XD_REDUCTION_INVARIANT);
    memset(run->values, 0xff, sizeof run->values);
    memset(run->averages, 0xff, sizeof run->averages);
    memset(run->moments, 0xff, sizeof run->moments);
    memset(run->squares, 0xff, sizeof run->squares);
    const int before = control_messages;
    CHECK(wrap_rank_run(world, run) == XD_OK);
    const int messages = control_messages - before;
    int64_t written = compare_written(one, run);
    CHECK(xd_all_reduce(world, &written, &written, 1, XD_DTYPE_I64, XD_SUM) == XD_OK);
    CHECK(written > 1000);
    free(run);
    free(one);
    leave(world);
    return messages;
}

/* With as many again there are as many sums again where leaves are dealt. */
XD_TEST(leaves_take_no_control_rounds_where_nothing_is_compared) {
    for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++) {
        const int messages = train_uncompared((wrap_kind)kind, 8);
        CHECK(messages > 0);
        CHECK_EQ_INT(train_uncompared((wrap_kind)kind, 16), messages);
    }
}

int main(int argc, char **argv) {
    return mpi_run_tests(argc, argv, 4, 64);
}
