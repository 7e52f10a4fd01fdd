/* What the handles of one world share on this rank: its fate, of which notices tell, and its memory. */

/* So short that they are sent at once, so none is waited for: `words` stay as they are, as they may be in use. With the lock. */
static void xdi_mpi_tell(xdi_mpi_world *world, const int32_t *words, int count, int tag) {
    int done = 0;
    for (int r = 0; r < world->size; r++) {
        MPI_Request request = MPI_REQUEST_NULL;
        if (r == world->rank || MPI_Isend(words, count, MPI_INT32_T, world->seats[r], world->first_tag + tag,
                                          world->comm, &request))
            continue;
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done) continue;
        world->in_flight = true;
        if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
}

/* Others do not wait for this rank when they go on. With the lock. */
static void xdi_mpi_leave(xdi_mpi_world *world) {
    if (world->states[world->rank] == XDI_MPI_GONE) return;
    world->states[world->rank] = XDI_MPI_GONE;
#if defined(XDI_MPI_RECOVERS)
    world->answers[1] = XDI_MPI_GONE;
    xdi_mpi_tell(world, &world->answers[1], 1, XDI_MPI_ASK);
#endif
}

static void xdi_mpi_release_world(xd_ctx *ctx, xdi_mpi_world *world) {
    pthread_mutex_lock(&world->lock);
    const int holders = --world->holders;
    pthread_mutex_unlock(&world->lock);
    if (holders > 0) return;
    int finalized = 1;
    MPI_Finalized(&finalized);
    /* After a failure a late notice for a freed communicator could arrive in the next one. */
    if (world->failure == XD_OK && world->comm != MPI_COMM_NULL && !finalized && world->first_tag == 0)
        MPI_Comm_free(&world->comm);
    if (world->failure != XD_OK && world->comm != MPI_COMM_NULL && !finalized &&
        world->states[world->rank] == XDI_MPI_SILENT)
        xdi_mpi_leave(world);
    if (world->in_flight) return;
    pthread_mutex_destroy(&world->lock);
    xd_release(ctx, world->staging);
    xd_release(ctx, world);
}

/* Each rank sends one notice at most. With the lock, like what follows but where it says otherwise. */
static void xdi_mpi_notify(xdi_mpi_world *world, xd_result result, int culprit) {
    world->notice[0] = (int32_t)result;
    world->notice[1] = culprit;
    xdi_mpi_tell(world, world->notice, 2, XDI_MPI_NOTICE);
}

static int xdi_mpi_at_seat(const xdi_mpi_world *world, int seat) {
    int rank = 0;
    while (rank < world->size && world->seats[rank] != seat) rank++;
    return rank < world->size ? rank : -1;
}

/* Notes who has died, and returns the first of them; -1: nobody. From then on a probe from any source succeeds again. */
static int xdi_mpi_see_dead(xdi_mpi_world *world) {
    int first = -1;
#if defined(XDI_MPI_RECOVERS)
    MPI_Group failed, all;
    int count = 0, acknowledged = 0;
    if (MPIX_Comm_get_failed(world->comm, &failed) != MPI_SUCCESS) return -1;
    MPI_Comm_group(world->comm, &all);
    MPI_Group_size(failed, &count);
    for (int i = 0; i < count; i++) {
        int seat = -1;
        MPI_Group_translate_ranks(failed, 1, &i, all, &seat);
        const int rank = xdi_mpi_at_seat(world, seat);
        if (rank < 0) continue; /* of a world before this one */
        world->states[rank] = XDI_MPI_GONE;
        if (first < 0 || rank < first) first = rank;
    }
    (void)MPIX_Comm_ack_failed(world->comm, count, &acknowledged);
    MPI_Group_free(&all);
    MPI_Group_free(&failed);
#else
    (void)world;
#endif
    return first;
}

/* Whether a rank has died, which breaks the world. */
static bool xdi_mpi_mourns(xdi_mpi_world *world) {
    const int dead = xdi_mpi_see_dead(world);
    if (dead < 0) return false;
    world->failure = XD_ERROR_PEER;
    world->culprit = dead;
    return true;
}

/* Only the first failure is recorded. Takes the lock. */
static void xdi_mpi_break(xdi_mpi_world *world, xd_result result, int culprit) {
    pthread_mutex_lock(&world->lock);
    if (world->failure == XD_OK) {
        world->failure = result;
        world->culprit = culprit;
        xdi_mpi_notify(world, result, culprit);
    }
    pthread_mutex_unlock(&world->lock);
}

static void xdi_mpi_accuse(xdi_mpi_world *world, int accuser, int accused) {
    world->waits_for[accuser] = accused;
    if (world->accused < 0) world->accused = accused;
}

/* Takes a notice, if there is one. The probe fails when a rank has died; any other error is left to the messages. */
static bool xdi_mpi_hear(xdi_mpi_world *world) {
    int there = 0;
    int32_t notice[2];
    MPI_Status status;
    const int tag = world->first_tag + XDI_MPI_NOTICE;
    if (MPI_Iprobe(MPI_ANY_SOURCE, tag, world->comm, &there, &status) != MPI_SUCCESS)
        return xdi_mpi_mourns(world);
    if (!there || MPI_Recv(notice, 2, MPI_INT32_T, status.MPI_SOURCE, tag, world->comm, MPI_STATUS_IGNORE))
        return false;
    if (notice[0] == (int32_t)XD_ERROR_TIMEOUT) {
        xdi_mpi_accuse(world, xdi_mpi_at_seat(world, status.MPI_SOURCE), notice[1]);
    } else {
        world->failure = (xd_result)notice[0];
        world->culprit = notice[1];
    }
    return true;
}

static int xdi_mpi_accusers(const xdi_mpi_world *world, int rank) {
    int count = 0;
    for (int r = 0; r < world->size; r++) count += world->waits_for[r] == rank;
    return count;
}

/* Ends the world by what notices of deadlines say: the first rank that is waited for and has said nothing; when all have,
 * the one that most wait for, and of equals the one that was accused first. A process that was stopped may have accused
 * another before it hears that all wait for it: MPI may hold their notices back until it takes messages again. */
static void xdi_mpi_convict(xdi_mpi_world *world) {
    if (world->failure != XD_OK) return;
    int culprit = world->size;
    for (int r = 0; r < world->size; r++) {
        const int32_t accused = world->waits_for[r];
        if (accused >= 0 && accused < culprit && world->waits_for[accused] < 0) culprit = accused;
    }
    if (culprit == world->size) {
        culprit = world->accused;
        for (int r = 0; r < world->size; r++)
            if (xdi_mpi_accusers(world, r) > xdi_mpi_accusers(world, culprit)) culprit = r;
    }
    world->culprit = culprit;
    world->failure = XD_ERROR_TIMEOUT;
}

/* True when the world is broken, as far as this rank, which does not wait, knows. Takes the lock. */
static bool xdi_mpi_is_broken(xdi_mpi_world *world) {
    pthread_mutex_lock(&world->lock);
    while (world->failure == XD_OK && xdi_mpi_hear(world)) continue;
    if (world->accused >= 0) xdi_mpi_convict(world);
    const bool broken = world->failure != XD_OK;
    pthread_mutex_unlock(&world->lock);
    return broken;
}

/* Whether there is a reason not to wait any longer. Takes the lock. */
static bool xdi_mpi_is_told(xdi_mpi_world *world) {
    pthread_mutex_lock(&world->lock);
    const bool told = world->failure != XD_OK || world->accused >= 0 || xdi_mpi_hear(world);
    pthread_mutex_unlock(&world->lock);
    return told;
}

static void xdi_mpi_leave_in_flight(xdi_mpi_world *world) {
    pthread_mutex_lock(&world->lock);
    world->in_flight = true;
    pthread_mutex_unlock(&world->lock);
}

static xdi_mpi_world *xdi_mpi_create_world(xd_ctx *ctx, const xd_mpi_desc *d, int size, int rank) {
    const size_t each = sizeof(xdi_mpi_entry) + 4 * sizeof(int32_t) + sizeof(int);
    xdi_mpi_world *world = (xdi_mpi_world *)xd_allocate(ctx, sizeof *world + (size_t)size * each);
    if (!world) return NULL;
    if (pthread_mutex_init(&world->lock, NULL) != 0) {
        xd_release(ctx, world);
        return NULL;
    }
    world->comm = MPI_COMM_NULL;
    world->size = size;
    world->rank = rank;
    world->holders = 1; /* xd_comm_mpi, until all have agreed */
    world->next_group = 2;
    world->said.staging_bytes = d->staging_bytes;
    world->said.compare = d->compare;
    world->heard = (xdi_mpi_entry *)(world + 1);
    world->waits_for = (int32_t *)(world->heard + size);
    world->states = world->waits_for + size;
    world->list = world->states + size;
    world->seats = (int *)(world->list + 2 * size);
    for (int r = 0; r < size; r++) {
        world->waits_for[r] = -1;
        world->seats[r] = r;
    }
    world->accused = -1;
    return world;
}
