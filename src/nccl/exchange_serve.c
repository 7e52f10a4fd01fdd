/* The exchange over TCP: rank 0, which serves all connections at once. */

typedef struct xdi_nccl_server {
    xd_ctx *ctx;
    const xd_nccl_desc *desc;
    const unsigned char *id;
    unsigned char seed[XDI_NCCL_NONCE]; /* of the challenges */
    int doors[XDI_NCCL_DOORS], door_count;
    int room, left;         /* connections at most; ranks that do not have the id yet */
    int64_t calls, refused; /* connections so far; those whose tag was wrong */
    xdi_nccl_line *lines;   /* [room] */
    struct pollfd *watched; /* [room + doors] */
    unsigned char *nonces;  /* [size][XDI_NCCL_NONCE], of the processes that have the places */
    bool *held, *served;    /* [size] */
} xdi_nccl_server;

/* A socket that listens at one address, without waiting; -1, with errno, when there is none. */
static int xdi_nccl_door(const struct addrinfo *a) {
    const int on = 1;
    xdi_nccl_line door;
    xdi_nccl_pick_up(&door, socket(a->ai_family, a->ai_socktype, a->ai_protocol));
    if (door.socket < 0) return -1;
    setsockopt(door.socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (a->ai_family == AF_INET6) setsockopt(door.socket, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(door.socket, a->ai_addr, a->ai_addrlen) == 0 && listen(door.socket, 1024) == 0)
        return door.socket;
    const int code = errno;
    xdi_nccl_hang_up(&door);
    errno = code;
    return -1;
}

/* Listens at every address of the host that is free. */
static xd_result xdi_nccl_listen(xdi_nccl_server *s) {
    const char *why = NULL;
    bool everywhere = false;
    struct addrinfo *found = xdi_nccl_resolve(s->desc, &why, &everywhere);
    for (const struct addrinfo *a = found; a && !everywhere && s->door_count < XDI_NCCL_DOORS;
         a = a->ai_next) {
        const int door = xdi_nccl_door(a);
        if (door < 0) why = strerror(errno);
        if (door >= 0) s->doors[s->door_count++] = door;
    }
    if (found) freeaddrinfo(found);
    if (everywhere) return xdi_nccl_no_interface(s->ctx, s->desc);
    XD_REQUIRE(s->ctx, s->door_count > 0, XD_ERROR_IO, "cannot listen at %s port %s: %s", s->desc->host,
               s->desc->port, why ? why : "it has no address");
    return XD_OK;
}

/* The connection of the caller that has shown nothing for longest; NULL when there is no connection. */
static xdi_nccl_line *xdi_nccl_oldest(xdi_nccl_server *s) {
    xdi_nccl_line *oldest = NULL;
    for (int i = 0; i < s->room; i++) {
        xdi_nccl_line *l = &s->lines[i];
        const bool proven = l->step >= 2, than = oldest && oldest->step >= 2;
        if (l->socket < 0) continue;
        if (!oldest || (proven == than ? l->number < oldest->number : than)) oldest = l;
    }
    return oldest;
}

/* Takes the next caller, in the place of the oldest stranger when there is no other, or no descriptor. */
static void xdi_nccl_admit(xdi_nccl_server *s, int door) {
    xdi_nccl_line *l = NULL;
    const int caller = accept(door, NULL, NULL);
    const bool full =
        caller < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
    if (caller < 0 && !full) return;
    for (int i = 0; i < s->room && !full && !l; i++)
        if (s->lines[i].socket < 0) l = &s->lines[i];
    if (!l) l = xdi_nccl_oldest(s);
    if (l) xdi_nccl_hang_up(l);
    if (full) {
        xdi_nccl_nap(XDI_NCCL_TURN);
        return;
    }
    xdi_nccl_pick_up(l, caller);
    l->number = s->calls++;
    xdi_nccl_expect(l, 0, XDI_NCCL_HELLO);
}

/* What rank 0 says to a caller that has the secret. */
static xdi_nccl_verdict xdi_nccl_judge(xdi_nccl_server *s, const xdi_nccl_line *l) {
    const uint32_t rank = xdi_nccl_load(l->hello + 4), size = xdi_nccl_load(l->hello + 8);
    const unsigned char *nonce = l->hello + 12;
    if (size != (uint32_t)s->desc->size) return XDI_NCCL_OTHER_SIZE;
    if (rank == 0 || rank >= size) return XDI_NCCL_TAKEN;
    unsigned char *place = s->nonces + (size_t)rank * XDI_NCCL_NONCE;
    if (!s->held[rank]) memcpy(place, nonce, XDI_NCCL_NONCE);
    s->held[rank] = true;
    return memcmp(place, nonce, XDI_NCCL_NONCE) == 0 ? XDI_NCCL_GIVEN : XDI_NCCL_TAKEN;
}

/* The answer to a caller's tag. False when the tag is wrong: it gets none. */
static bool xdi_nccl_reply(xdi_nccl_server *s, xdi_nccl_line *l) {
    unsigned char tag[XDI_NCCL_TAG];
    const char *secret = s->desc->secret;
    xdi_nccl_sign(secret, 'r', l, NULL, 0, tag);
    if (!xdi_nccl_equal(tag, l->in, sizeof tag)) {
        s->refused++;
        return false;
    }
    const xdi_nccl_verdict verdict = xdi_nccl_judge(s, l);
    memset(l->out, 0, sizeof l->out);
    xdi_nccl_store(l->out, (uint32_t)verdict);
    if (verdict == XDI_NCCL_GIVEN) memcpy(l->out + 4, s->id, XDI_NCCL_ID);
    if (verdict == XDI_NCCL_OTHER_SIZE) xdi_nccl_store(l->out + 4, (uint32_t)s->desc->size);
    xdi_nccl_sign(secret, '0', l, l->out, 4 + XDI_NCCL_ID, l->out + 4 + XDI_NCCL_ID);
    xdi_nccl_expect(l, XDI_NCCL_REPLY, 1);
    return true;
}

/* A number that nobody can foresee and that comes once: no descriptor is needed for it, which strangers could use up. */
static void xdi_nccl_challenge(const xdi_nccl_server *s, xdi_nccl_line *l) {
    unsigned char tag[XDI_NCCL_TAG];
    xdi_nccl_mac mac;
    xdi_nccl_mac_begin(&mac, s->desc->secret);
    xdi_nccl_hash_add(&mac.inner, "c", 1);
    xdi_nccl_hash_add(&mac.inner, s->seed, sizeof s->seed);
    xdi_nccl_hash_add(&mac.inner, &l->number, sizeof l->number);
    xdi_nccl_mac_end(&mac, tag);
    memcpy(l->challenge, tag, sizeof l->challenge);
    memcpy(l->out, tag, sizeof l->challenge);
    xdi_nccl_expect(l, sizeof l->challenge, XDI_NCCL_TAG);
}

/* The step after one that is complete. False when the conversation is over. */
static bool xdi_nccl_answer(xdi_nccl_server *s, xdi_nccl_line *l) {
    const uint32_t rank = xdi_nccl_load(l->hello + 4);
    switch (l->step++) {
    case 0:
        memcpy(l->hello, l->in, sizeof l->hello);
        if (memcmp(l->hello, "xdn2", 4) != 0) return false;
        xdi_nccl_challenge(s, l);
        return true;
    case 1: return xdi_nccl_reply(s, l);
    default: /* refused callers send nothing more */
        if (xdi_nccl_load(l->out) != (uint32_t)XDI_NCCL_GIVEN) return false;
        if (!s->served[rank]) s->left--;
        s->served[rank] = true;
        return false;
    }
}

/* Only what is open is watched: poll refuses lists that are longer than a process may have descriptors. */
static void xdi_nccl_serve_turn(xdi_nccl_server *s) {
    int watched = s->door_count;
    for (int i = 0; i < s->door_count; i++) {
        s->watched[i].fd = s->doors[i];
        s->watched[i].events = POLLIN;
        s->watched[i].revents = 0;
    }
    for (int i = 0; i < s->room; i++)
        if (s->lines[i].socket >= 0) s->watched[watched++] = xdi_nccl_watch(&s->lines[i]);
    const int ready = poll(s->watched, (nfds_t)watched, XDI_NCCL_TURN);
    if (ready < 0) xdi_nccl_nap(XDI_NCCL_TURN);
    if (ready <= 0) return;
    for (int i = s->room - 1; i >= 0; i--) {
        xdi_nccl_line *l = &s->lines[i];
        if (l->socket < 0 || !s->watched[--watched].revents) continue;
        const int moved = xdi_nccl_pump(l);
        if (moved < 0 || (moved > 0 && !xdi_nccl_answer(s, l))) xdi_nccl_hang_up(l);
    }
    for (int i = 0; i < s->door_count; i++)
        if (s->watched[i].revents) xdi_nccl_admit(s, s->doors[i]);
}

static xd_result xdi_nccl_serve_all(xdi_nccl_server *s, double deadline) {
    char missing[128];
    XD_REQUIRE(s->ctx, s->lines && s->watched && s->nonces && s->held && s->served, XD_ERROR_MEMORY,
               "no room for a list of %d ranks", s->desc->size);
    for (int i = 0; i < s->room; i++) s->lines[i].socket = -1;
    XD_TRY(xdi_nccl_random(s->ctx, s->seed, sizeof s->seed));
    XD_TRY(xdi_nccl_listen(s));
    while (s->left > 0) {
        xdi_nccl_serve_turn(s);
        if (s->left == 0 || xd_now(s->ctx) < deadline) continue;
        const int first = xdi_nccl_missing(s->served, s->desc->size, missing, sizeof missing);
        return XD_FAIL_CULPRIT(s->ctx, XD_ERROR_TIMEOUT, first,
                               "ranks %s did not ask for the id at %s port %s before the deadline (%lld "
                               "calls, %lld with another secret)",
                               missing, s->desc->host, s->desc->port, (long long)s->calls,
                               (long long)s->refused);
    }
    return XD_OK;
}

/* Rank 0 gives the id to every other rank. */
static xd_result xdi_nccl_serve(xd_ctx *ctx, const xd_nccl_desc *d, const void *id, double deadline) {
    const size_t n = (size_t)d->size;
    xdi_nccl_server s;
    memset(&s, 0, sizeof s);
    s.ctx = ctx;
    s.desc = d;
    s.id = (const unsigned char *)id;
    s.left = d->size - 1;
    s.room = d->size + XDI_NCCL_SPARE;
    s.lines = (xdi_nccl_line *)xd_allocate(ctx, (size_t)s.room * sizeof *s.lines);
    s.watched = (struct pollfd *)xd_allocate(ctx, ((size_t)s.room + XDI_NCCL_DOORS) * sizeof *s.watched);
    s.nonces = (unsigned char *)xd_allocate(ctx, n * XDI_NCCL_NONCE);
    s.held = (bool *)xd_allocate(ctx, n * sizeof *s.held);
    s.served = (bool *)xd_allocate(ctx, n * sizeof *s.served);
    const xd_result result = xdi_nccl_serve_all(&s, deadline);
    for (int i = 0; i < s.door_count; i++) close(s.doors[i]);
    for (int i = 0; s.door_count > 0 && i < s.room; i++) xdi_nccl_hang_up(&s.lines[i]);
    xd_release(ctx, s.served);
    xd_release(ctx, s.held);
    xd_release(ctx, s.nonces);
    xd_release(ctx, s.watched);
    xd_release(ctx, s.lines);
    return result;
}
