/* Routes between the processes of an MPI job: rings that all see, when they are on one node, else messages; the same
 * bits either way. Every process runs every test; rank 0 counts and prints. Needs four ranks. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "mpi_runner.h"
#include "route_scene.h"
#include "xtoken_rows.h"

static bool on_one_node(void) {
    MPI_Comm node;
    int size = 0, all = 0;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    MPI_Comm_size(node, &size);
    MPI_Comm_size(MPI_COMM_WORLD, &all);
    MPI_Comm_free(&node);
    return size == all;
}

/* The function on the first `ranks` processes, as a world of their own. */
static xd_result run_mpi(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument) {
    MPI_Comm some;
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < ranks ? 0 : MPI_UNDEFINED, 0, &some);
    if (some == MPI_COMM_NULL) return XD_OK;
    CHECK(xd_ctx_create(desc, &ctx) == XD_OK);
    CHECK(xd_comm_mpi(ctx, &(xd_mpi_desc){ .mpi = some }, &world) == XD_OK);
    const xd_result result = function(world, argument);
    if (result != XD_OK) CHECK_EQ_STR(xd_last_error(ctx)->message, "");
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    MPI_Comm_free(&some);
    return result;
}

/* A rank that is both sides alone shares its memory with nobody. */
static bool on_one_rank(const scene *s) {
    xd_route_span spans[SPANS];
    xd_route_side half;
    int with_side = 0;
    for (int r = 0; r < ranks_of(s); r++)
        with_side += side_of(&s->teacher, r, spans, &half) || side_of(&s->student, r, spans, &half);
    return with_side == 1;
}

static void play(scene *s) {
    const bool together = on_one_node(); /* all ranks ask */
    s->ranks = ranks_of(s);
    s->steps = STEPS;
    s->refused = !together && !on_one_rank(s);
    CHECK(run_mpi(s->ranks, NULL, route_body, s) == XD_OK);
}

XD_TEST(every_split_gives_every_split_the_same_bits) {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int i = 0; i < 24;) {
        scene s = draw_scene();
        if (ranks_of(&s) > size) continue;
        i++;
        play(&s);
        s.messages = true;
        play(&s);
    }
}

XD_TEST(students_of_another_process_look_into_the_slots) {
    scene s = plain_scene();
    if (!on_one_node()) SKIP("the processes are on several nodes");
    s.student.first = 1;
    s.student.tp = 2;
    play(&s);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    CHECK_EQ_INT(s.views, rank == 1 || rank == 2 ? 4 * STEPS : 0); /* this process's */
}

/* Rank 1 says that it takes no further part, and keeps its route. */
static xd_result abort_body(xd_comm *world, void *argument) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int rank = xd_comm_rank(world);
    const xd_route_desc d = pair_desc(1 - rank);
    xd_route *route = NULL;
    xd_route_window w;
    char word = 0;
    int done = 0;
    (void)argument;
    XD_TRY(xd_route_create(world, &d, &route));
    if (rank == 0) {
        CHECK_EQ_INT(xd_route_take(route, &w), XD_ERROR_PEER);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, "rank 1"));
        MPI_Isend(&word, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD, &request);
    } else {
        xd_comm_abort(world);
        MPI_Irecv(&word, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD, &request);
    }
    while (!done) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    xd_route_destroy(route);
    return XD_OK;
}

XD_TEST(a_rank_that_aborts_wakes_those_that_wait_for_its_slots) {
    if (!on_one_node()) SKIP("the processes are on several nodes");
    CHECK(run_mpi(2, NULL, abort_body, NULL) == XD_OK);
}

int main(int argc, char **argv) {
    return mpi_run_tests(argc, argv, 4, 64);
}
