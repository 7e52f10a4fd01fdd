/* How a rank waits for its pending messages, and what it says when that ends early. */

/* ---- failure ---- */

/* "2" or "2,3": the world ranks at the other end of pending messages; "" without any. Returns the group rank of
 * the first, or -1. */
static int xdi_mpi_missing(xdi_mpi *t, char *text, size_t size) {
    size_t used = 0;
    int first = -1;
    text[0] = 0;
    for (int r = 0; r < t->base.size && used + 16 < size; r++) {
        bool waits = false;
        for (int i = 0; i < t->posted; i++)
            waits = waits || (t->peers[i] == r && t->requests[i] != MPI_REQUEST_NULL);
        if (!waits) continue;
        used += (size_t)snprintf(text + used, size - used, used ? ",%d" : "%d", t->world_ranks[r]);
        if (first < 0) first = r;
    }
    return first;
}

static bool xdi_mpi_awaits(const xdi_mpi *t, int world_rank) {
    bool waits = false;
    for (int i = 0; i < t->posted; i++)
        waits = waits || (t->world_ranks[t->peers[i]] == world_rank && t->requests[i] != MPI_REQUEST_NULL);
    return waits;
}

/* Whether nothing is pending. What has failed is over too. */
static bool xdi_mpi_settles(xdi_mpi *t) {
    bool all = true;
    for (int i = 0; i < t->posted; i++) {
        int done = 0;
        if (t->requests[i] == MPI_REQUEST_NULL) continue;
        const bool well = MPI_Test(&t->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS;
        if (!well && t->requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&t->requests[i]);
        all = all && (done || !well);
    }
    return all;
}

/* Ends pending messages, because the caller may free the buffers: those that have not begun to arrive are
 * cancelled, the others get some time. */
static void xdi_mpi_give_up(xdi_mpi *t) {
    const double end = xd_now(t->base.ctx) + XDI_MPI_ARRIVE_SECONDS;
    bool done = false;
    for (int i = 0; i < t->posted; i++)
        if (t->arrives[i] && t->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&t->requests[i]);
    while (!(done = xdi_mpi_settles(t)) && xd_now(t->base.ctx) < end) sched_yield();
    for (int i = 0; i < t->posted && !done; i++) {
        if (t->requests[i] == MPI_REQUEST_NULL) continue;
        MPI_Request_free(&t->requests[i]);
        xdi_mpi_leave_in_flight(t->world);
    }
    t->posted = 0;
}

/* Reports the broken world as comm/threads_wait.c does. A rank that was waiting for the late one returns TIMEOUT, like
 * the rank whose deadline passed first; the late one itself, and every later call, returns PEER. */
static xd_result xdi_mpi_report(xdi_mpi *t, bool waiting) {
    const int culprit = t->world->culprit, me = t->world_ranks[t->base.rank];
    const bool late = t->world->failure == XD_ERROR_TIMEOUT;
    char missing[160];
    xdi_mpi_missing(t, missing, sizeof missing);
    if (!xdi_mpi_awaits(t, culprit)) snprintf(missing, sizeof missing, "%d", culprit);
    xdi_mpi_give_up(t);
    if (late && culprit == me)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit,
                               "rank %d came after the deadline: the world is broken", me);
    if (late && waiting)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, culprit,
                               "rank%s %s did not arrive before the deadline",
                               strchr(missing, ',') ? "s" : "", missing);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "rank %d %s: the world is broken", culprit,
                           late ? "did not arrive before the deadline" : "failed or left");
}

/* An error of MPI itself, in a message from or to `peer`. */
static xd_result xdi_mpi_fault(xdi_mpi *t, int code, int peer) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    const int culprit = t->world_ranks[peer];
    MPI_Error_string(code, text, &length);
    xdi_mpi_break(t->world, XD_ERROR_PEER, culprit);
    xdi_mpi_give_up(t);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "messages with rank %d fail: %.200s", culprit,
                           text);
}

/* ---- waiting ---- */

/* Tests every request separately: Testall only reports whether all are complete. */
static xd_result xdi_mpi_test_each(xdi_mpi *t) {
    for (int i = 0; i < t->posted; i++) {
        int done = 0;
        const int code = MPI_Test(&t->requests[i], &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) return xdi_mpi_fault(t, code, t->peers[i]);
    }
    return XD_OK;
}

/* The request that made a test of all fail says so by its status, or when it is tested again. */
static xd_result xdi_mpi_fault_of_all(xdi_mpi *t, int code) {
    for (int i = 0; i < t->posted && code == MPI_ERR_IN_STATUS; i++) {
        const int own = t->statuses[i].MPI_ERROR;
        if (own != MPI_SUCCESS && own != MPI_ERR_PENDING) return xdi_mpi_fault(t, own, t->peers[i]);
    }
    XD_TRY(xdi_mpi_test_each(t));
    return xdi_mpi_fault(t, code, t->peers[0]);
}

/* Whether a notice could still change who is the culprit. The last rank that is silent is the culprit, unless this one is accused,
 * which may have been stopped for long: then the other has spoken before, and is about to be heard. */
static bool xdi_mpi_expects(const xdi_mpi_world *world) {
    int silent = 0;
    for (int r = 0; r < world->size; r++) silent += world->waits_for[r] < 0;
    return silent > (xdi_mpi_accusers(world, world->rank) > 0 ? 0 : 1);
}

/* A deadline has passed, here or where a notice came from. Says whom this rank waits for, and hears the others. */
static xd_result xdi_mpi_expire(xdi_mpi *t) {
    xdi_mpi_world *world = t->world;
    char missing[160];
    XD_TRY(xdi_mpi_test_each(t));
    const int first = xdi_mpi_missing(t, missing, sizeof missing);
    pthread_mutex_lock(&world->lock); /* other threads of this rank have nothing better to do meanwhile */
    if (first < 0 && world->accused < 0 && world->failure == XD_OK) {
        pthread_mutex_unlock(&world->lock);
        return XD_OK; /* the last one has just completed */
    }
    if (first >= 0 && world->failure == XD_OK && world->waits_for[world->rank] < 0) {
        xdi_mpi_notify(world, XD_ERROR_TIMEOUT, t->world_ranks[first]);
        xdi_mpi_accuse(world, world->rank, t->world_ranks[first]);
    }
    const double end = xd_now(t->base.ctx) + XDI_MPI_ANSWER_SECONDS;
    while (world->failure == XD_OK && xdi_mpi_expects(world) && xd_now(t->base.ctx) < end)
        if (!xdi_mpi_hear(world)) sched_yield();
    xdi_mpi_convict(world);
    pthread_mutex_unlock(&world->lock);
    return xdi_mpi_report(t, true);
}

static void xdi_mpi_rest(const xdi_mpi *t) {
    const struct timespec nap = { 0, XDI_MPI_NAP };
    if (t->is_fork)
        nanosleep(&nap, NULL);
    else
        sched_yield();
}

/* A turn of waiting: polls, then rests, and looks for a reason not to go on. A deadline that has passed is believed only after some
 * more turns: a process that was stopped finds first what the others have sent meanwhile, the notice that it is late above all. */
static xd_result xdi_mpi_linger(xdi_mpi *t, int *turn, int *late, double deadline) {
    if (++*turn <= XDI_MPI_SPIN) return XD_OK;
    *turn = XDI_MPI_SPIN;
    xdi_mpi_rest(t);
    if (xdi_mpi_is_told(t->world)) return xdi_mpi_expire(t);
    if (xd_now(t->base.ctx) < deadline || ++*late < XDI_MPI_SPIN) return XD_OK;
    return xdi_mpi_expire(t);
}

/* Waits for all pending messages. */
static xd_result xdi_mpi_wait(xdi_mpi *t, double deadline) {
    for (int turn = 0, late = 0;;) {
        int done = 0;
        const int code = MPI_Testall(t->posted, t->requests, &done, t->statuses);
        if (code != MPI_SUCCESS) return xdi_mpi_fault_of_all(t, code);
        if (done) break;
        XD_TRY(xdi_mpi_linger(t, &turn, &late, deadline));
    }
    t->posted = 0;
    return XD_OK;
}
