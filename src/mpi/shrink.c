/* Going on without those that were lost.
 *
 * Each rank tells all others that it asks for the next world, and waits until each has told the same, or has died, or has
 * left. Those that have told are its list. Then the ranks take turns, in their order: the one whose turn it is sends its list,
 * and who gets it takes it for his own; who has died or left is passed over, and nobody else is. So after the turn of the first
 * rank that comes to the end all have one list, and no later turn changes it.
 *
 * That MPI says of no living process that it has died is what this rests on. So nobody is left behind for being late: the call
 * fails then. */

#if defined(XDI_MPI_RECOVERS)

/* What a rank tells of itself; false when there is nothing new. */
static bool xdi_mpi_hear_answer(xdi_mpi_world *world, int rank) {
    int there = 0;
    int32_t answer = XDI_MPI_SILENT;
    const int seat = world->seats[rank], tag = world->first_tag + XDI_MPI_ASK;
    if (rank == world->rank || world->states[rank] == XDI_MPI_GONE) return false;
    if (MPI_Iprobe(seat, tag, world->comm, &there, MPI_STATUS_IGNORE) != MPI_SUCCESS || !there) return false;
    if (MPI_Recv(&answer, 1, MPI_INT32_T, seat, tag, world->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
    world->states[rank] = answer;
    return true;
}

/* A turn of waiting for what `rank` tells. */
static xd_result xdi_mpi_look(xdi_mpi *t, int rank, double deadline) {
    xdi_mpi_world *world = t->world;
    pthread_mutex_lock(&world->lock);
    (void)xdi_mpi_see_dead(world);
    for (int r = 0; r < world->size; r++)
        while (xdi_mpi_hear_answer(world, r)) continue;
    const bool late = world->states[rank] != XDI_MPI_GONE && xd_now(t->base.ctx) >= deadline;
    if (late) xdi_mpi_leave(world);
    pthread_mutex_unlock(&world->lock);
    if (late)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, rank,
                               "rank %d of %d lives, and did not go on with the others before the deadline",
                               rank, world->size);
    sched_yield();
    return XD_OK;
}

/* The list of those that go on, as this rank sees it. */
static xd_result xdi_mpi_ask(xdi_mpi *t, double deadline) {
    xdi_mpi_world *world = t->world;
    pthread_mutex_lock(&world->lock);
    world->answers[0] = world->states[world->rank] = XDI_MPI_ASKS;
    xdi_mpi_tell(world, &world->answers[0], 1, XDI_MPI_ASK);
    pthread_mutex_unlock(&world->lock);
    for (int r = 0; r < world->size; r++)
        while (world->states[r] == XDI_MPI_SILENT) XD_TRY(xdi_mpi_look(t, r, deadline));
    /* Who has asked may have left since: a probe finds what has come only after some turns. */
    for (int turn = 0; turn < XDI_MPI_SPIN; turn++) XD_TRY(xdi_mpi_look(t, world->rank, HUGE_VAL));
    for (int r = 0; r < world->size; r++) world->list[r] = world->states[r] == XDI_MPI_ASKS;
    return XD_OK;
}

/* Takes the list of a rank, if it is there. */
static bool xdi_mpi_take_list(xdi_mpi_world *world, int rank) {
    int there = 0;
    const int seat = world->seats[rank], tag = world->first_tag + XDI_MPI_LIST;
    if (MPI_Iprobe(seat, tag, world->comm, &there, MPI_STATUS_IGNORE) != MPI_SUCCESS || !there) return false;
    /* Nobody needs these now, and a message that breaks off leaves the list as it is. */
    int32_t *room = world->waits_for;
    if (MPI_Recv(room, world->size, MPI_INT32_T, seat, tag, world->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
    memcpy(world->list, room, (size_t)world->size * sizeof *room);
    return true;
}

/* The same list on all that go on. */
static xd_result xdi_mpi_settle_list(xdi_mpi *t, double deadline) {
    xdi_mpi_world *world = t->world;
    const int n = world->size;
    for (int r = 0; r < n; r++) {
        if (r == world->rank) {
            memcpy(world->list + n, world->list, (size_t)n * sizeof *world->list);
            pthread_mutex_lock(&world->lock);
            xdi_mpi_tell(world, world->list + n, n, XDI_MPI_LIST);
            pthread_mutex_unlock(&world->lock);
        }
        while (r != world->rank && world->states[r] == XDI_MPI_ASKS && !xdi_mpi_take_list(world, r))
            XD_TRY(xdi_mpi_look(t, r, deadline));
    }
    XD_REQUIRE(t->base.ctx, world->list[world->rank], XD_ERROR_PEER, "%d ranks go on without rank %d", n - 1,
               world->rank);
    return XD_OK;
}

/* The next world has the listed ranks, in their order. */
static void xdi_mpi_number_next(const xdi_mpi_world *old, xdi_mpi *next) {
    xdi_mpi_world *world = next->world;
    int size = 0;
    for (int r = 0; r < old->size; r++) {
        if (!old->list[r]) continue;
        if (r == old->rank) world->rank = size;
        next->world_ranks[size] = size;
        world->seats[size++] = old->seats[r];
    }
    world->comm = old->comm;
    world->size = next->base.size = size;
    next->base.rank = world->rank;
    world->first_tag = old->first_tag + old->tags;
    world->tags = old->tags;
    world->groups = old->groups;
}

static xd_result xdi_mpi_check_shrink(xdi_mpi *t) {
    xdi_mpi_world *world = t->world;
    int *most = NULL, found = 0;
    const bool broken = xdi_mpi_is_broken(world), left = world->states[world->rank] == XDI_MPI_GONE;
    XD_REQUIRE(t->base.ctx, broken, XD_ERROR_STATE, "nothing has broken this world of %d ranks", world->size);
    XD_REQUIRE(t->base.ctx, world->states[world->rank] == XDI_MPI_SILENT, XD_ERROR_STATE,
               "rank %d has %s this world of %d ranks already", world->rank, left ? "left" : "gone on from",
               world->size);
    MPI_Comm_get_attr(world->comm, MPI_TAG_UB, (void *)&most, &found);
    const int last = found ? *most : 32767;
    XD_REQUIRE(t->base.ctx, world->first_tag <= last - 2 * world->tags, XD_ERROR_UNSUPPORTED,
               "the tags of this MPI are enough for %d worlds, one after another", last / world->tags);
    return XD_OK;
}
#endif
