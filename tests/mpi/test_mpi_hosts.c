/* Ranks on several hosts, of which tests/mpi/hosts.sh makes four and starts this program on them:
 *
 *   test_mpi_hosts meet                 two ranks a host: where each of them is; a student whose teacher is on other hosts
 *   test_mpi_hosts calls SEED COMMAND   one rank a host: at a random moment of random collectives the last rank's shell runs COMMAND
 *   test_mpi_hosts route SEED COMMAND   the same of a route from the first two hosts to the others
 *
 * Each rank that comes through prints a line with the number of its failed checks. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xdistill_mpi.h"
#include "drawn_call.h"
#include "mpi_job.h"
#include "route_scene.h"
#include "xtoken_parity.h"

enum {
    HOSTS = 4,
    SEATS = 2 /* ranks of a host, in `meet` */,
    CALLS = 2000,
    LOOKS = 400 /* at the clock, before the command */,
    SECONDS = 2,
    GRACE = 6 /* seconds, on a busy machine */
};

/* ---- two ranks a host ---- */

/* Names of hosts differ, or these are not the hosts that the test is about. */
static void check_names(int rank, int size) {
    char mine[MPI_MAX_PROCESSOR_NAME] = "", all[HOSTS * SEATS][MPI_MAX_PROCESSOR_NAME];
    MPI_Comm host;
    int length = 0, seats = 0;
    MPI_Get_processor_name(mine, &length);
    MPI_Allgather(mine, sizeof mine, MPI_CHAR, all, sizeof mine, MPI_CHAR, MPI_COMM_WORLD);
    for (int r = 0; r < size; r++) CHECK_EQ_INT(strcmp(mine, all[r]) == 0, r / SEATS == rank / SEATS);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &seats);
    CHECK_EQ_INT(seats, SEATS);
    MPI_Comm_free(&host);
}

/* What the launcher says, against what MPI says. */
static void check_place(xd_ctx *ctx, int rank, int size) {
    xd_launch_info info, first;
    memset(&info, 0, sizeof info);
    CHECK_EQ_INT(xd_launch_discover(ctx, &info), XD_OK);
    CHECK_EQ_INT(info.kind, XD_LAUNCH_OPEN_MPI);
    CHECK_EQ_INT(info.rank, rank);
    CHECK_EQ_INT(info.world_size, size);
    CHECK_EQ_INT(info.local_rank, rank % SEATS);
    CHECK_EQ_INT(info.local_world_size, SEATS);
    first = info;
    MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    CHECK(info.job[0] != 0);
    CHECK_EQ_STR(info.job, first.job);
}

/* The first two hosts' rows in the windows of the other two. */
static scene two_and_two(int tp, int dp) {
    scene s = plain_scene();
    s.teacher.tp = s.student.tp = tp;
    s.teacher.dp = s.student.dp = dp;
    s.student.first = tp * dp;
    s.teacher.replicated = false;
    for (int i = 1; i <= tp; i++) s.teacher.columns[i] = s.student.columns[i] = COLUMNS * i / tp;
    for (int i = 1; i <= dp; i++) s.teacher.cuts[i] = s.student.cuts[i] = SAMPLES * i / dp;
    s.steps = STEPS;
    s.refused = true; /* no memory that all ranks can address */
    return s;
}

/* Loss and gradient of one rank, in INVARIANT mode to the last bit. */
static void check_parity(const parity_mesh *teacher, const parity_mesh *student, xd_reduction reduction) {
    parity p;
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    memset(&p, 0, sizeof p);
    memset(&desc, 0, sizeof desc);
    desc.reduction = p.reduction = reduction;
    p.teacher = *teacher;
    p.student = *student;
    p.kind = XD_XTOKEN_SAME;
    p.payload = XD_ROUTE_LOGITS;
    parity_prepare(&p);
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_mpi(ctx, NULL, &world), XD_OK);
    CHECK_EQ_INT(parity_body(world, &p), XD_OK);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

static void meet(xd_comm *world) {
    /* TP, CP, DP, first rank, micro-batch: a group within a host, and one over both */
    static const parity_mesh meshes[][2] = { { { 2, 2, 1, 0, 1 }, { 2, 1, 2, 4, 2 } },
                                             { { 4, 1, 1, 0, 2 }, { 4, 1, 1, 4, 1 } },
                                             { { 2, 1, 2, 0, 1 }, { 2, 2, 1, 4, 4 } } };
    const int rank = xd_comm_rank(world), size = xd_comm_size(world);
    scene s = two_and_two(2, 2);
    CHECK_EQ_INT(size, HOSTS * SEATS);
    if (size != HOSTS * SEATS) return;
    check_names(rank, size);
    check_place(xd_comm_ctx(world), rank, size);
    CHECK_EQ_INT(route_body(world, &s), XD_OK);
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        check_parity(&meshes[i][0], &meshes[i][1], XD_REDUCTION_INVARIANT);
        check_parity(&meshes[i][0], &meshes[i][1], XD_REDUCTION_DETERMINISTIC);
    }
}

/* ---- one rank a host, of which the last has an accident ---- */

static int looks_left = -1; /* -1: no accident is to come */
static const char *accident;

static double fatal_clock(void *user) {
    (void)user;
    if (looks_left >= 0 && looks_left-- == 0 && system(accident) != 0) CHECK_EQ_STR(accident, "");
    return MPI_Wtime();
}

static xd_result play_calls(xd_comm *world, uint64_t *state) {
    const int rank = xd_comm_rank(world);
    xd_comm *pair = NULL;
    xd_result result = xd_comm_split(world, rank / 2, rank, &pair);
    for (int i = 0; i < CALLS && result == XD_OK; i++) result = drawn_call(state, world, pair);
    return result;
}

static xd_result play_route(xd_comm *world) {
    scene s = two_and_two(2, 1);
    s.steps = CALLS;
    return route_body(world, &s);
}

/* Whoever still reaches the others has the victim's number; a victim that still runs reaches nobody, and names one of them. */
static void check_error(xd_comm *world, xd_result result, double seconds) {
    const int rank = xd_comm_rank(world), victim = HOSTS - 1;
    const xd_error *error = xd_last_error(xd_comm_ctx(world));
    CHECK(result == XD_ERROR_TIMEOUT || result == XD_ERROR_PEER);
    CHECK_EQ_INT(error->culprit == victim, rank != victim);
    CHECK(error->culprit >= 0 && error->culprit < HOSTS);
    if (!strstr(error->message, "rank") || !strchr(error->message, '0' + error->culprit))
        CHECK_EQ_STR(error->message, "");
    CHECK(seconds < SECONDS + GRACE);
    const int culprit = error->culprit;
    CHECK_EQ_INT(xd_barrier(world), XD_ERROR_PEER);
    CHECK_EQ_INT(error->culprit, culprit);
}

static void suffer(xd_comm *world, bool routes, uint64_t state) {
    const int rank = xd_comm_rank(world), looks = drawn_number(&state, LOOKS);
    CHECK_EQ_INT(xd_comm_size(world), HOSTS);
    if (xd_comm_size(world) != HOSTS) return;
    CHECK_EQ_INT(xd_barrier(world),
                 XD_OK); /* the first call has the longer deadline, and makes the connections */
    if (rank == HOSTS - 1) looks_left = looks;
    const double begin = MPI_Wtime();
    const xd_result result = routes ? play_route(world) : play_calls(world, &state);
    check_error(world, result, MPI_Wtime() - begin);
    job_survived(rank);
}

int main(int argc, char **argv) {
    const xd_ctx_desc desc = { .clock = { fatal_clock, NULL }, .timeout_seconds = argc == 4 ? SECONDS : 0 };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    MPI_Init(&argc, &argv);
    if (argc < 2 || xd_ctx_create(&desc, &ctx) != XD_OK || xd_comm_mpi(ctx, NULL, &world) != XD_OK) return 1;
    const int rank = xd_comm_rank(world);
    if (argc == 4) {
        accident = argv[3];
        suffer(world, strcmp(argv[1], "route") == 0, (uint64_t)atoi(argv[2]));
    } else {
        meet(world);
    }
    printf("survivor %d: %ld failed checks\n", rank, xd_test_failures);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    MPI_Finalize();
    return 0;
}
