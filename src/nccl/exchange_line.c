/* One connection of the exchange, and what both sides of it have in common. */

static void xdi_nccl_hang_up(xdi_nccl_line *l) {
    if (l->socket >= 0) close(l->socket);
    l->socket = -1;
}

/* Takes a socket, on which no call waits from now on; -1 is none. */
static void xdi_nccl_pick_up(xdi_nccl_line *l, int socket) {
    memset(l, 0, sizeof *l);
    l->socket = socket;
    if (socket < 0) return;
    const int flags = fcntl(socket, F_GETFL);
    if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(socket, F_SETFD, FD_CLOEXEC) != 0)
        xdi_nccl_hang_up(l);
}

/* The next step: `sends` bytes of out go, then `receives` bytes come. */
static void xdi_nccl_expect(xdi_nccl_line *l, size_t sends, size_t receives) {
    l->sent = l->received = 0;
    l->sends = sends;
    l->receives = receives;
}

/* Moves what moves without waiting: 1 when the step is complete, 0 when it is not, -1 when the other side is gone. */
static int xdi_nccl_pump(xdi_nccl_line *l) {
    while (l->sent < l->sends || l->received < l->receives) {
        const bool sends = l->sent < l->sends;
        const ssize_t moved = sends ? send(l->socket, l->out + l->sent, l->sends - l->sent, MSG_NOSIGNAL)
                                    : recv(l->socket, l->in + l->received, l->receives - l->received, 0);
        if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
        if (moved <= 0) return -1;
        *(sends ? &l->sent : &l->received) += (size_t)moved;
    }
    return 1;
}

static struct pollfd xdi_nccl_watch(const xdi_nccl_line *l) {
    struct pollfd watch;
    watch.fd = l->socket; /* poll leaves out what is closed */
    watch.events = l->sent < l->sends ? POLLOUT : POLLIN;
    watch.revents = 0;
    return watch;
}

static void xdi_nccl_nap(int milliseconds) {
    struct timespec nap;
    nap.tv_sec = 0;
    nap.tv_nsec = (long)milliseconds * 1000000;
    nanosleep(&nap, NULL);
}

static xd_result xdi_nccl_random(xd_ctx *ctx, unsigned char *out, size_t bytes) {
    const int source = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    const ssize_t got = source < 0 ? -1 : read(source, out, bytes);
    if (source >= 0) close(source);
    XD_REQUIRE(ctx, got == (ssize_t)bytes, XD_ERROR_IO, "/dev/urandom gives no random numbers: %s",
               strerror(errno));
    return XD_OK;
}

/* What this process says of itself in every question. */
static xd_result xdi_nccl_introduce(xd_ctx *ctx, const xd_nccl_desc *d, unsigned char hello[XDI_NCCL_HELLO]) {
    memcpy(hello, "xdn2", 4);
    xdi_nccl_store(hello + 4, (uint32_t)d->rank);
    xdi_nccl_store(hello + 8, (uint32_t)d->size);
    return xdi_nccl_random(ctx, hello + 12, XDI_NCCL_NONCE);
}

/* The tag of one direction over what both sides know of a connection, and a message of `bytes`. */
static void xdi_nccl_sign(const char *secret, char direction, const xdi_nccl_line *l,
                          const unsigned char *message, size_t bytes, unsigned char tag[XDI_NCCL_TAG]) {
    xdi_nccl_mac mac;
    xdi_nccl_mac_begin(&mac, secret);
    xdi_nccl_hash_add(&mac.inner, &direction, 1);
    xdi_nccl_hash_add(&mac.inner, l->hello, sizeof l->hello);
    xdi_nccl_hash_add(&mac.inner, l->challenge, sizeof l->challenge);
    xdi_nccl_hash_add(&mac.inner, message, bytes);
    xdi_nccl_mac_end(&mac, tag);
}

/* The addresses of the host; the caller frees them. NULL and why when there are none. Rank 0 listens where the others
 * call, so an address that stands for every interface is none: *everywhere is set. */
static struct addrinfo *xdi_nccl_resolve(const xd_nccl_desc *d, const char **why, bool *everywhere) {
    static const unsigned char zeros[16] = { 0 };
    struct addrinfo hints, *found = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    const int code = getaddrinfo(d->host, d->port, &hints, &found);
    if (code != 0) *why = gai_strerror(code);
    if (code != 0) return NULL;
    for (const struct addrinfo *a = found; a; a = a->ai_next) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)a->ai_addr;
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)a->ai_addr;
        if ((a->ai_family == AF_INET && memcmp(&v4->sin_addr, zeros, 4) == 0) ||
            (a->ai_family == AF_INET6 && memcmp(&v6->sin6_addr, zeros, 16) == 0))
            *everywhere = true;
    }
    return found;
}

static xd_result xdi_nccl_no_interface(xd_ctx *ctx, const xd_nccl_desc *d) {
    return XD_FAIL(ctx, XD_ERROR_ARGUMENT,
                   "host %s stands for every interface: give the one that the ranks use", d->host);
}

/* "1,4,7" of the ranks that are not marked; returns the first of them. */
static int xdi_nccl_missing(const bool *marked, int size, char *text, size_t room) {
    int first = -1;
    size_t at = 0;
    text[0] = 0;
    for (int r = 1; r < size; r++) {
        if (marked[r]) continue;
        const int written = at + 16 < room ? snprintf(text + at, room - at, first < 0 ? "%d" : ",%d", r) : 0;
        if (first < 0) first = r;
        if (written == 0 && at > 0 && at + 4 < room) {
            snprintf(text + at, room - at, "...");
            break;
        }
        at += (size_t)written;
    }
    return first;
}
