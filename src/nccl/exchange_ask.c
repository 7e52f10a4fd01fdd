/* The exchange over TCP: the other ranks. */

typedef struct xdi_nccl_caller {
    xd_ctx *ctx;
    const xd_nccl_desc *desc;
    unsigned char *id;
    unsigned char hello[XDI_NCCL_HELLO];
    xdi_nccl_line lines[XDI_NCCL_DOORS]; /* one for each address of the host */
    struct sockaddr_storage addresses[XDI_NCCL_DOORS];
    socklen_t lengths[XDI_NCCL_DOORS];
    int count;
    bool told;           /* this rank has the id */
    bool doubts;         /* somebody answered without the secret */
    const char *unknown; /* why the host has no address */
} xdi_nccl_caller;

/* A name that nobody knows yet has no address. */
static xd_result xdi_nccl_look_up(xdi_nccl_caller *c) {
    bool everywhere = false;
    struct addrinfo *found = xdi_nccl_resolve(c->desc, &c->unknown, &everywhere);
    c->count = 0;
    for (const struct addrinfo *a = found; a && c->count < XDI_NCCL_DOORS; a = a->ai_next, c->count++) {
        memcpy(&c->addresses[c->count], a->ai_addr, a->ai_addrlen);
        c->lengths[c->count] = (socklen_t)a->ai_addrlen;
        c->lines[c->count].socket = -1;
    }
    if (found) freeaddrinfo(found);
    if (found) c->unknown = NULL;
    return everywhere ? xdi_nccl_no_interface(c->ctx, c->desc) : XD_OK;
}

/* Calls every address with which there is no conversation. */
static void xdi_nccl_call(xdi_nccl_caller *c) {
    for (int i = 0; i < c->count; i++) {
        xdi_nccl_line *l = &c->lines[i];
        if (l->socket >= 0) continue;
        xdi_nccl_pick_up(l, socket(c->addresses[i].ss_family, SOCK_STREAM, 0));
        if (l->socket < 0) continue;
        l->since = xd_now(c->ctx);
        memcpy(l->hello, c->hello, sizeof l->hello);
        memcpy(l->out, c->hello, sizeof c->hello);
        xdi_nccl_expect(l, sizeof c->hello, XDI_NCCL_NONCE);
        const struct sockaddr *address = (const struct sockaddr *)(const void *)&c->addresses[i];
        if (connect(l->socket, address, c->lengths[i]) != 0 && errno != EINPROGRESS) xdi_nccl_hang_up(l);
    }
}

/* Reads rank 0's answer, if it is rank 0's: *over is set when it is not. */
static xd_result xdi_nccl_believe(xdi_nccl_caller *c, xdi_nccl_line *l, bool *over) {
    unsigned char tag[XDI_NCCL_TAG];
    xdi_nccl_sign(c->desc->secret, '0', l, l->in, 4 + XDI_NCCL_ID, tag);
    *over = !xdi_nccl_equal(tag, l->in + 4 + XDI_NCCL_ID, sizeof tag);
    if (*over) {
        c->doubts = true;
        return XD_OK;
    }
    const uint32_t verdict = xdi_nccl_load(l->in);
    XD_REQUIRE(c->ctx, verdict != (uint32_t)XDI_NCCL_TAKEN, XD_ERROR_MISMATCH,
               "another process has joined as rank %d of the world at %s port %s", c->desc->rank,
               c->desc->host, c->desc->port);
    XD_REQUIRE(c->ctx, verdict == (uint32_t)XDI_NCCL_GIVEN, XD_ERROR_MISMATCH,
               "the world at %s port %s has %u ranks, rank %d was told %d", c->desc->host, c->desc->port,
               (unsigned)xdi_nccl_load(l->in + 4), c->desc->rank, c->desc->size);
    memcpy(c->id, l->in + 4, XDI_NCCL_ID);
    l->out[0] = 1;
    xdi_nccl_expect(l, 1, 0);
    return XD_OK;
}

/* The step after one that is complete. */
static xd_result xdi_nccl_go_on(xdi_nccl_caller *c, xdi_nccl_line *l, bool *over) {
    switch (l->step++) {
    case 0:
        memcpy(l->challenge, l->in, sizeof l->challenge);
        xdi_nccl_sign(c->desc->secret, 'r', l, NULL, 0, l->out);
        xdi_nccl_expect(l, XDI_NCCL_TAG, XDI_NCCL_REPLY);
        return XD_OK;
    case 1: return xdi_nccl_believe(c, l, over);
    default: c->told = true; return XD_OK;
    }
}

/* *died is set when a conversation has ended without the id. One that stands still for ten seconds is begun again: rank 0's
 * machine may have restarted. */
static xd_result xdi_nccl_call_turn(xdi_nccl_caller *c, bool *died) {
    struct pollfd watched[XDI_NCCL_DOORS];
    for (int i = 0; i < c->count; i++) watched[i] = xdi_nccl_watch(&c->lines[i]);
    (void)poll(watched, (nfds_t)c->count, XDI_NCCL_TURN);
    for (int i = 0; i < c->count && !c->told; i++) {
        xdi_nccl_line *l = &c->lines[i];
        bool over = l->socket < 0 || xd_now(c->ctx) > l->since + 10.0;
        const int moved = over || !watched[i].revents ? 0 : xdi_nccl_pump(l);
        if (moved < 0 && l->step == 1 && l->sent == l->sends)
            c->doubts = true; /* hung up on this rank's tag */
        if (moved > 0) XD_TRY(xdi_nccl_go_on(c, l, &over));
        if (!over && moved >= 0) continue;
        xdi_nccl_hang_up(l);
        *died = true;
    }
    return XD_OK;
}

static xd_result xdi_nccl_ask_all(xdi_nccl_caller *c, double deadline) {
    int nap = XDI_NCCL_TURN;
    XD_TRY(xdi_nccl_introduce(c->ctx, c->desc, c->hello));
    while (!c->told) {
        bool open = false, died = c->count == 0;
        for (int i = 0; i < c->count; i++) open = open || c->lines[i].socket >= 0;
        if (!open) XD_TRY(xdi_nccl_look_up(c));
        xdi_nccl_call(c);
        XD_TRY(xdi_nccl_call_turn(c, &died));
        XD_REQUIRE(c->ctx, c->told || xd_now(c->ctx) < deadline, XD_ERROR_TIMEOUT,
                   "rank 0 did not answer at %s port %s before the deadline%s%s", c->desc->host,
                   c->desc->port,
                   c->unknown  ? ": "
                   : c->doubts ? ": who answered there has another secret"
                               : "",
                   c->unknown ? c->unknown : "");
        if (c->told || !died) continue;
        xdi_nccl_nap(nap);
        nap = nap < 320 ? 2 * nap : nap;
    }
    return XD_OK;
}

static xd_result xdi_nccl_ask(xd_ctx *ctx, const xd_nccl_desc *d, void *id, double deadline) {
    xdi_nccl_caller *c = (xdi_nccl_caller *)xd_allocate(ctx, sizeof *c);
    XD_REQUIRE(ctx, c, XD_ERROR_MEMORY, "no room for %d connections", (int)XDI_NCCL_DOORS);
    c->ctx = ctx;
    c->desc = d;
    c->id = (unsigned char *)id;
    const xd_result result = xdi_nccl_ask_all(c, deadline);
    for (int i = 0; i < c->count; i++) xdi_nccl_hang_up(&c->lines[i]);
    xd_release(ctx, c);
    return result;
}
