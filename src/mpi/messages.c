/* Messages between two ranks: the data goes when both have said the same of it. */

/* The sender offers, the receiver replies and, when both agree, the data and a confirmation follow. */
enum { XDI_MPI_OFFERS = 0, XDI_MPI_REPLIES, XDI_MPI_MOVES, XDI_MPI_CONFIRMS };

/* Starts the request of a lane's step. */
static xd_result xdi_mpi_lane_post(xdi_mpi *t, int at) {
    xdi_mpi_lane *lane = &t->lanes[at];
    const bool to = at % 2 == 0, moves = lane->step == XDI_MPI_MOVES;
    const bool arrives = (lane->step == XDI_MPI_OFFERS || moves) != to;
    const int channel = moves ? XDI_MPI_DATA : lane->step == XDI_MPI_OFFERS ? XDI_MPI_OFFER : XDI_MPI_REPLY;
    void *data = moves ? (void *)lane->data : arrives ? (void *)&lane->theirs : (void *)&lane->mine;
    size_t bytes = moves ? lane->left : sizeof lane->mine;
    if (bytes > (size_t)XDI_MPI_CHUNK) bytes = (size_t)XDI_MPI_CHUNK;
    if (moves) lane->data += bytes, lane->left -= bytes;
    const int rank = t->world->seats[t->world_ranks[at / 2]], tag = xdi_mpi_tag(t, channel);
    MPI_Request *request = &t->requests[at];
    t->arrives[at] = arrives;
    const int code = arrives ? MPI_Irecv(data, (int)bytes, MPI_BYTE, rank, tag, t->world->comm, request)
                             : MPI_Isend(data, (int)bytes, MPI_BYTE, rank, tag, t->world->comm, request);
    return code == MPI_SUCCESS ? XD_OK : xdi_mpi_fault(t, code, at / 2);
}

/* Begins the next message of a lane, if there is one. */
static xd_result xdi_mpi_lane_begin(xdi_mpi *t, int at, xd_message *messages, int count) {
    xdi_mpi_lane *lane = &t->lanes[at];
    const xd_collective_kind kind = at % 2 ? XD_COLLECTIVE_RECV : XD_COLLECTIVE_SEND;
    memset(lane, 0, sizeof *lane);
    for (int i = 0; i < count && !lane->message; i++)
        if (messages[i].stage == 0 && messages[i].record.kind == kind && messages[i].record.root == at / 2)
            lane->message = &messages[i];
    if (!lane->message) return XD_OK;
    const xd_collective *c = &lane->message->record;
    lane->message->stage = 1;
    lane->mine.count = c->count;
    lane->mine.dtype = (int32_t)c->dtype;
    lane->data = at % 2 ? (char *)c->recv : (char *)(uintptr_t)c->send;
    lane->left = (size_t)c->count * xd_dtype_size(c->dtype);
    return xdi_mpi_lane_post(t, at);
}

/* The request of a lane is complete: its next step, or its next message. */
static xd_result xdi_mpi_lane_advance(xdi_mpi *t, int at, xd_message *messages, int count) {
    xdi_mpi_lane *lane = &t->lanes[at];
    const bool fits = lane->mine.dtype != (int32_t)XD_DTYPE_NONE && lane->mine.dtype == lane->theirs.dtype &&
                      lane->mine.count == lane->theirs.count;
    if (lane->step == XDI_MPI_CONFIRMS || (lane->step == XDI_MPI_REPLIES && !fits)) {
        lane->message->their_count = lane->theirs.count;
        lane->message->their_dtype = (xd_dtype)lane->theirs.dtype;
        return xdi_mpi_lane_begin(t, at, messages, count);
    }
    if (lane->step != XDI_MPI_MOVES) lane->step++;
    if (lane->step == XDI_MPI_MOVES && lane->left == 0) lane->step++;
    return xdi_mpi_lane_post(t, at);
}

static xd_result xdi_mpi_messages(xd_transport *transport, xd_message *messages, int count, double deadline) {
    xdi_mpi *t = (xdi_mpi *)transport;
    const int lanes = 2 * transport->size;
    if (xdi_mpi_is_broken(t->world)) return xdi_mpi_report(t, false);
    t->posted = lanes;
    for (int i = 0; i < lanes; i++) t->requests[i] = MPI_REQUEST_NULL, t->peers[i] = i / 2;
    for (int i = 0; i < lanes; i++) XD_TRY(xdi_mpi_lane_begin(t, i, messages, count));
    for (int turn = 0, late = 0;;) {
        bool open = false, moved = false;
        for (int i = 0; i < lanes; i++) {
            int done = 0;
            if (!t->lanes[i].message) continue;
            const int code = MPI_Test(&t->requests[i], &done, MPI_STATUS_IGNORE);
            if (code != MPI_SUCCESS) return xdi_mpi_fault(t, code, i / 2);
            if (done) XD_TRY(xdi_mpi_lane_advance(t, i, messages, count));
            moved = moved || done;
            open = open || t->lanes[i].message;
        }
        if (!open) break;
        if (moved)
            turn = 0;
        else
            XD_TRY(xdi_mpi_linger(t, &turn, &late, deadline));
    }
    t->posted = 0;
    return XD_OK;
}
