/* xdistill_nccl.h - GPUs joined by NCCL as a world of xdistill. License: see xdistill.h.

   In *one* C, C++ or CUDA file:                      Everywhere else:
       #define XDISTILL_IMPLEMENTATION                          #include "xdistill.h"
       #include "xdistill.h"                                    #include "xdistill_nccl.h"
       #include "xdistill_nccl.h"                     nvcc app.cu xdistill_cuda.cu -lnccl -lpthread

       cudaSetDevice(local_rank);
       xd_cuda_create(ctx, NULL, &cuda);
       xd_nccl_desc desc = { .rank = rank, .size = size, .host = "node0", .port = "29501", .secret = secret };
       xd_comm_nccl(ctx, &desc, &world);
       ...
       xd_comm_destroy(world);
       xd_cuda_destroy(cuda);

   Data is on the GPU and moves on the context's stream; xd_nccl_desc.compare decides what the host waits for.
   DETERMINISTIC and INVARIANT sums are computed here, in rank order, by the context's kernels: the bits are
   those of the threads transport, with any version of NCCL. Host memory is copied through the GPU, and calls
   with it wait. Needs NCCL 2.18. */
/* Generated from src/xdistill_nccl.h by tools/amalgamate.py. Edit src/, then run `make amalgamate`. */
#ifndef XDISTILL_NCCL_H
#define XDISTILL_NCCL_H

#if !defined(XD_VERSION_MAJOR)
#    error "include xdistill.h before xdistill_nccl.h"
#elif XD_VERSION_MAJOR != 0 || XD_VERSION_MINOR != 3
#    error "xdistill_nccl.h belongs to xdistill.h version 0.3: take both from one release"
#endif

/* The exchange of the id needs neither CUDA nor NCCL, and compiles without them: for its test. */
#if !defined(XDISTILL_NCCL_EXCHANGE)
#    include <cuda_runtime.h>
#    include <nccl.h>
#    if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#        error "xdistill_nccl.h needs NCCL 2.18"
#    endif
#else
typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;
#endif

/* >>nccl/comm_nccl */

/* How to join a world. Zero is the default of every field. Several ranks need `id`, `file`, or `host` and `port`. By
 * `file` or TCP rank 0 makes the id and gives it to each rank that proves the secret, one process a rank. The other
 * ranks take it only from a rank 0 that proves it too. Nothing is encrypted: docs/concepts.md. */
typedef struct xd_nccl_desc {
    int rank, size;         /* size is required */
    const ncclUniqueId *id; /* of xd_nccl_unique_id on one rank, sent to all, for example by MPI */
    /* a path that all ranks see, in a folder where strangers cannot write. FILE and FILE.RANK are written with mode 600
     * and removed; files of an earlier run do no harm */
    const char *file;
    const char *host; /* rank 0's machine, as MASTER_ADDR; rank 0 listens at its addresses only */
    const char *port; /* a free port there: not MASTER_PORT, on which torchrun listens */
    /* collectives of each group whose arguments are compared; 0 -> the first 64; -1 -> none; INT64_MAX -> all, with sends and
     * receives */
    int64_t compare;
    size_t staging_bytes; /* device memory for what other ranks send for a sum; 0 -> 16 MiB */
    /* with `file` or `host`: at least 16 bytes that all ranks know and strangers cannot guess. From a file of mode 600, or
     * a variable that the launcher sets; never on a command line */
    const char *secret;
} xd_nccl_desc;

#if !defined(XDISTILL_NCCL_EXCHANGE)

/* Returns the id of a new world, for xd_nccl_desc.id. Local. Errors: DEVICE, PEER (with NCCL's own text). */
XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out);

/* Joins the ranks that share an id into a world. Collective over `size` ranks; waits at most init_timeout_seconds. Takes
 * staging_bytes of the GPU, once for all groups of the world. Failures: docs/concepts.md.
 *
 *   ctx    of a GPU (xd_cuda_create); ranks of one process have different GPUs. Any device may be the current one at
 *          a call, and it is the same one afterwards
 *   desc   compare and staging_bytes are the same on every rank
 *   out    destroy it, and all groups split from it, before xd_cuda_destroy
 *
 * The context's CPU level becomes the lowest of all ranks. Errors: ARGUMENT, STATE (no GPU), MEMORY (the others get
 * TIMEOUT), IO (file, port), MISMATCH (rank taken, size, compare, staging_bytes, floating-point state), UNSUPPORTED (id
 * size), DEVICE, PEER (with NCCL's text), TIMEOUT.
 *
 * Comparing. After the calls that `compare` covers the host no longer waits. If one rank then passes other arguments than its
 * peers, or refuses a call by itself, the world is lost: ranks that wait for it get TIMEOUT at the deadline, with this rank's
 * last calls. If nobody waits, the group's next barrier or agreement compares a hash of all such calls and returns MISMATCH.
 *
 * CUDA graphs. A stream in a capture records a collective or xd_exchange, in every mode of reduction, when its memory is on
 * the GPU and `compare` no longer covers it. So a step's collectives can be in its graph. Every other call is UNSUPPORTED:
 * barriers, splits, agreements, calls that are compared, memory of the host. Such a refusal loses neither the capture nor
 * the world. The other ranks do not learn of it, so all ranks capture the same calls. They also launch their graphs in the
 * same order. Ranks of one process capture with cudaStreamCaptureModeThreadLocal. Destroy graphs before their groups.
 *
 * A training step fits one graph: losses, norms, xd_parallel_reduce and xd_parallel_publish leave their agreements out in a
 * capture. Make a step before it, and call xd_parallel_publish outside of it now and then.
 *
 * A launch has no deadline. If a rank stops launching, the graphs of the others wait in it. xd_read, xd_barrier and
 * xd_parallel_publish wait with a deadline and return TIMEOUT. The latter two also end the work that waits.
 * cudaStreamSynchronize alone may never return. */
XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out);

#endif


#endif

#if defined(XDISTILL_IMPLEMENTATION) && !defined(XDISTILL_NCCL_IMPLEMENTED)
#define XDISTILL_NCCL_IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* >>nccl/exchange */

/* The exchange of the id. Each tag is a keyed hash by the secret, of a direction and random numbers of both sides. So a
 * recorded message cannot be used again, and neither the secret nor a substitute is ever sent.
 *
 *     rank r -> 0    hello = protocol, r, size, nonce of this process
 *     0 -> r         challenge = another nonce
 *     r -> 0         tag of 'r', hello, challenge
 *     0 -> r         verdict, id, tag of '0', hello, challenge, verdict, id
 *     r -> 0         one byte: it has the id
 *
 * Rank 0 serves all connections at once. A rank that calls again shows the same nonce, and so keeps
 * its place. By file they go from FILE.RANK to FILE. */

enum {
    XDI_NCCL_ID = 128,                               /* bytes of an id */
    XDI_NCCL_NONCE = 16,                             /* of a nonce: a random number used once */
    XDI_NCCL_TAG = 32,                               /* of a tag */
    XDI_NCCL_BLOCK = 64,                             /* of the hash's blocks */
    XDI_NCCL_HELLO = 28,                             /* of a hello: protocol, rank, size, nonce */
    XDI_NCCL_REPLY = 4 + XDI_NCCL_ID + XDI_NCCL_TAG, /* of rank 0's answer: verdict, id, tag */
    XDI_NCCL_SECRET = 16,                            /* least bytes of a secret */
    XDI_NCCL_DOORS = 8,                              /* most addresses of rank 0's machine */
    XDI_NCCL_SPARE = 64,                             /* rank 0's connections beyond one a rank */
    XDI_NCCL_TURN = 10                               /* most milliseconds of a turn of waiting */
};

/* Rank 0's answer to a rank that has proved the secret. */
typedef enum xdi_nccl_verdict {
    XDI_NCCL_GIVEN,      /* with the id */
    XDI_NCCL_TAKEN,      /* another process has that rank */
    XDI_NCCL_OTHER_SIZE, /* in place of the id: the size of rank 0's world */
} xdi_nccl_verdict;

/* One connection. Its next step comes when `sends` bytes are sent and `receives` bytes received. */
typedef struct xdi_nccl_line {
    int socket; /* -1: closed */
    int step;   /* steps done */
    size_t sent, sends, received, receives;
    double since;   /* on the calling rank: when it called */
    int64_t number; /* on rank 0: calls before this one */
    unsigned char hello[XDI_NCCL_HELLO], challenge[XDI_NCCL_NONCE];
    unsigned char out[XDI_NCCL_REPLY], in[XDI_NCCL_REPLY];
} xdi_nccl_line;

/* >>nccl/hash.c */

/* A keyed hash: HMAC (RFC 2104) with SHA-256 (FIPS 180-4), which takes keys of any length. */

static uint32_t xdi_nccl_load(const unsigned char *from) {
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | (uint32_t)from[3];
}

static void xdi_nccl_store(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(value >> (24 - 8 * i) & 255u);
}

static uint32_t xdi_nccl_turn_right(uint32_t x, int bits) {
    return x >> bits | x << (32 - bits);
}

/* One block of SHA-256. */
static void xdi_nccl_hash_block(uint32_t state[8], const unsigned char *block) {
    static const uint32_t constants[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
        0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
        0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
        0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
        0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
        0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
        0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
        0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
        0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
        0xc67178f2u,
    };
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) w[i] = xdi_nccl_load(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (xdi_nccl_turn_right(a, 7) ^ xdi_nccl_turn_right(a, 18) ^ a >> 3) +
               (xdi_nccl_turn_right(b, 17) ^ xdi_nccl_turn_right(b, 19) ^ b >> 10);
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        const uint32_t a = s[0], e = s[4];
        const uint32_t mixed =
            s[7] + constants[i] + w[i] + ((e & s[5]) ^ (~e & s[6])) +
            (xdi_nccl_turn_right(e, 6) ^ xdi_nccl_turn_right(e, 11) ^ xdi_nccl_turn_right(e, 25));
        const uint32_t majority = (a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]);
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += mixed;
        s[0] = mixed + majority +
               (xdi_nccl_turn_right(a, 2) ^ xdi_nccl_turn_right(a, 13) ^ xdi_nccl_turn_right(a, 22));
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

typedef struct xdi_nccl_hash {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[XDI_NCCL_BLOCK];
} xdi_nccl_hash;

static void xdi_nccl_hash_begin(xdi_nccl_hash *h) {
    static const uint32_t start[8] = {
        0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u,
    };
    memcpy(h->state, start, sizeof start);
    h->bytes = 0;
}

static void xdi_nccl_hash_add(xdi_nccl_hash *h, const void *data, size_t bytes) {
    const unsigned char *from = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        h->block[h->bytes++ % XDI_NCCL_BLOCK] = from[i];
        if (h->bytes % XDI_NCCL_BLOCK == 0) xdi_nccl_hash_block(h->state, h->block);
    }
}

static void xdi_nccl_hash_end(xdi_nccl_hash *h, unsigned char out[XDI_NCCL_TAG]) {
    static const unsigned char zero = 0, one = 0x80;
    unsigned char length[8];
    xdi_nccl_store(length, (uint32_t)(h->bytes >> 29));
    xdi_nccl_store(length + 4, (uint32_t)(h->bytes << 3 & 0xffffffffu));
    xdi_nccl_hash_add(h, &one, 1);
    while (h->bytes % XDI_NCCL_BLOCK != XDI_NCCL_BLOCK - sizeof length) xdi_nccl_hash_add(h, &zero, 1);
    xdi_nccl_hash_add(h, length, sizeof length);
    for (int i = 0; i < 8; i++) xdi_nccl_store(out + 4 * i, h->state[i]);
}

typedef struct xdi_nccl_mac {
    xdi_nccl_hash inner, outer;
} xdi_nccl_mac;

static void xdi_nccl_mac_begin(xdi_nccl_mac *m, const char *secret) {
    unsigned char key[XDI_NCCL_BLOCK] = { 0 };
    const size_t bytes = strlen(secret);
    if (bytes > sizeof key) {
        xdi_nccl_hash_begin(&m->inner);
        xdi_nccl_hash_add(&m->inner, secret, bytes);
        xdi_nccl_hash_end(&m->inner, key);
    } else {
        memcpy(key, secret, bytes);
    }
    for (size_t i = 0; i < sizeof key; i++) key[i] ^= 0x36;
    xdi_nccl_hash_begin(&m->inner);
    xdi_nccl_hash_add(&m->inner, key, sizeof key);
    for (size_t i = 0; i < sizeof key; i++) key[i] ^= 0x36 ^ 0x5c;
    xdi_nccl_hash_begin(&m->outer);
    xdi_nccl_hash_add(&m->outer, key, sizeof key);
}

static void xdi_nccl_mac_end(xdi_nccl_mac *m, unsigned char tag[XDI_NCCL_TAG]) {
    xdi_nccl_hash_end(&m->inner, tag);
    xdi_nccl_hash_add(&m->outer, tag, XDI_NCCL_TAG);
    xdi_nccl_hash_end(&m->outer, tag);
}

/* Takes the same time wherever the two differ. */
static bool xdi_nccl_equal(const unsigned char *a, const unsigned char *b, size_t bytes) {
    volatile unsigned char difference = 0;
    for (size_t i = 0; i < bytes; i++) difference = (unsigned char)(difference | (a[i] ^ b[i]));
    return difference == 0;
}

/* >>nccl/exchange_line.c */

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

/* >>nccl/exchange_serve.c */

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

/* >>nccl/exchange_ask.c */

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

/* >>nccl/exchange_file.c */

/* The exchange by file.
 *
 * Rank r writes its hello into FILE.r. Rank 0 answers all of them at once in FILE, with the nonces of the hellos in it:
 * a rank believes a FILE that has its own nonce, so no file of an earlier run is ever taken for one of this run. Then it
 * removes FILE.r, by which rank 0 knows. A FILE.r that an earlier run has left is answered too, in vain, and again
 * when the rank of this run has replaced it. The files belong to their user alone (mode 600). */

/* Reads a file of exactly `bytes`; returns an errno value, ENOENT when there is none. No kind of file makes it wait. */
static int xdi_nccl_read_file(const char *path, unsigned char *out, size_t bytes) {
    struct stat status;
    const int file = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) return errno;
    int code = fstat(file, &status) != 0 ? errno : S_ISREG(status.st_mode) ? 0 : EINVAL;
    if (code == 0 && status.st_size != (off_t)bytes) code = EINVAL;
    if (code == 0 && pread(file, out, bytes, 0) != (ssize_t)bytes) code = EIO;
    close(file);
    return code;
}

/* The file appears complete. */
static xd_result xdi_nccl_write_file(xd_ctx *ctx, const char *path, const unsigned char *data, size_t bytes) {
    char *draft = (char *)xd_allocate(ctx, strlen(path) + 5);
    XD_REQUIRE(ctx, draft, XD_ERROR_MEMORY, "no room for the name %s", path);
    memcpy(draft, path, strlen(path));
    memcpy(draft + strlen(path), ".new", 5);
    unlink(draft); /* of a rank that was killed while it wrote */
    const int file = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int code = file < 0 ? errno : 0;
    if (file >= 0 && write(file, data, bytes) != (ssize_t)bytes) code = EIO;
    if (file >= 0 && close(file) != 0 && code == 0) code = errno;
    if (code == 0 && rename(draft, path) != 0) code = errno;
    if (code != 0 && file >= 0) unlink(draft);
    xd_release(ctx, draft);
    XD_REQUIRE(ctx, code == 0, XD_ERROR_IO, "cannot write %s: %s", path, strerror(code));
    return XD_OK;
}

/* Removes a file that still is what this rank has written. */
static void xdi_nccl_remove_own(const char *path, const unsigned char *data, unsigned char *scratch,
                                size_t bytes) {
    if (xdi_nccl_read_file(path, scratch, bytes) == 0 && memcmp(scratch, data, bytes) == 0) unlink(path);
}

/* The tag of all bytes before it; whether it is right. */
static bool xdi_nccl_sign_file(const char *secret, unsigned char *data, size_t bytes) {
    unsigned char tag[XDI_NCCL_TAG];
    xdi_nccl_mac mac;
    xdi_nccl_mac_begin(&mac, secret);
    xdi_nccl_hash_add(&mac.inner, "f", 1);
    xdi_nccl_hash_add(&mac.inner, data, bytes - sizeof tag);
    xdi_nccl_mac_end(&mac, tag);
    const bool right = xdi_nccl_equal(tag, data + bytes - sizeof tag, sizeof tag);
    memcpy(data + bytes - sizeof tag, tag, sizeof tag);
    return right;
}

enum { XDI_NCCL_QUESTION = XDI_NCCL_HELLO + XDI_NCCL_TAG };

/* Bytes of FILE: a hello of rank 0, the id, the nonces of the other ranks, the tag. */
static size_t xdi_nccl_page_bytes(int size) {
    return XDI_NCCL_HELLO + XDI_NCCL_ID + (size_t)(size - 1) * XDI_NCCL_NONCE + XDI_NCCL_TAG;
}

static unsigned char *xdi_nccl_page_nonce(unsigned char *page, int rank) {
    return page + XDI_NCCL_HELLO + XDI_NCCL_ID + (size_t)(rank - 1) * XDI_NCCL_NONCE;
}

typedef struct xdi_nccl_desk {
    xd_ctx *ctx;
    const xd_nccl_desc *desc;
    unsigned char *page, *seen; /* FILE as it should be and as it is */
    char *name;                 /* of a FILE.r */
    bool *asked, *served;       /* [size] */
    bool published;             /* page is in FILE */
} xdi_nccl_desk;

static void xdi_nccl_name(const xdi_nccl_desk *k, int rank) {
    snprintf(k->name, strlen(k->desc->file) + 16, "%s.%d", k->desc->file, rank);
}

/* Looks for new questions, and for those that are gone because the rank has read its answer. */
static void xdi_nccl_collect(xdi_nccl_desk *k, int *left) {
    *left = 0;
    for (int r = 1; r < k->desc->size; r++) {
        unsigned char question[XDI_NCCL_QUESTION], *nonce = xdi_nccl_page_nonce(k->page, r);
        if (k->served[r]) continue;
        xdi_nccl_name(k, r);
        const int code = xdi_nccl_read_file(k->name, question, sizeof question);
        k->served[r] = code == ENOENT && k->asked[r] && k->published;
        *left += !k->served[r];
        if (code != 0 || !xdi_nccl_sign_file(k->desc->secret, question, sizeof question)) continue;
        if (memcmp(question, "xdn2", 4) != 0 || xdi_nccl_load(question + 4) != (uint32_t)r ||
            xdi_nccl_load(question + 8) != (uint32_t)k->desc->size)
            continue;
        k->published = k->published && k->asked[r] && memcmp(nonce, question + 12, XDI_NCCL_NONCE) == 0;
        k->asked[r] = true;
        memcpy(nonce, question + 12, XDI_NCCL_NONCE);
    }
}

static xd_result xdi_nccl_publish_all(xdi_nccl_desk *k, const void *id, double deadline) {
    const xd_nccl_desc *d = k->desc;
    const size_t bytes = xdi_nccl_page_bytes(d->size);
    char missing[128];
    XD_REQUIRE(k->ctx, k->page && k->seen && k->name && k->asked && k->served, XD_ERROR_MEMORY,
               "no room for a list of %d ranks", d->size);
    XD_TRY(xdi_nccl_introduce(k->ctx, d, k->page));
    memcpy(k->page + XDI_NCCL_HELLO, id, XDI_NCCL_ID);
    for (int left = d->size - 1, first = 1;; first = 0) {
        xdi_nccl_collect(k, &left);
        if (left == 0) return XD_OK;
        if (!first && (xdi_nccl_read_file(d->file, k->seen, bytes) != 0 ||
                       memcmp(k->seen, k->page + 0, XDI_NCCL_HELLO) != 0))
            return XD_FAIL(k->ctx, XD_ERROR_IO, "%s was replaced or removed: is another world using it?",
                           d->file);
        if (!k->published) {
            (void)xdi_nccl_sign_file(d->secret, k->page, bytes);
            XD_TRY(xdi_nccl_write_file(k->ctx, d->file, k->page, bytes));
            k->published = true;
        }
        xdi_nccl_nap(XDI_NCCL_TURN);
        if (xd_now(k->ctx) < deadline) continue;
        const int culprit = xdi_nccl_missing(k->served, d->size, missing, sizeof missing);
        return XD_FAIL_CULPRIT(k->ctx, XD_ERROR_TIMEOUT, culprit,
                               "ranks %s did not ask for the id in %s before the deadline", missing, d->file);
    }
}

static xd_result xdi_nccl_publish(xd_ctx *ctx, const xd_nccl_desc *d, const void *id, double deadline) {
    const size_t n = (size_t)d->size, bytes = xdi_nccl_page_bytes(d->size);
    xdi_nccl_desk k;
    memset(&k, 0, sizeof k);
    k.ctx = ctx;
    k.desc = d;
    k.page = (unsigned char *)xd_allocate(ctx, bytes);
    k.seen = (unsigned char *)xd_allocate(ctx, bytes);
    k.name = (char *)xd_allocate(ctx, strlen(d->file) + 16);
    k.asked = (bool *)xd_allocate(ctx, n * sizeof *k.asked);
    k.served = (bool *)xd_allocate(ctx, n * sizeof *k.served);
    const xd_result result = xdi_nccl_publish_all(&k, id, deadline);
    if (k.published) xdi_nccl_remove_own(d->file, k.page, k.seen, bytes);
    xd_release(ctx, k.served);
    xd_release(ctx, k.asked);
    xd_release(ctx, k.name);
    xd_release(ctx, k.seen);
    xd_release(ctx, k.page);
    return result;
}

/* Waits for a FILE with this rank's nonce. */
static xd_result xdi_nccl_await_page(xd_ctx *ctx, const xd_nccl_desc *d, const unsigned char *hello,
                                     unsigned char *page, double deadline) {
    const size_t bytes = xdi_nccl_page_bytes(d->size);
    for (;;) {
        const int code = xdi_nccl_read_file(d->file, page, bytes);
        const bool right = code == 0 && xdi_nccl_sign_file(d->secret, page, bytes);
        if (right && memcmp(xdi_nccl_page_nonce(page, d->rank), hello + 12, XDI_NCCL_NONCE) == 0)
            return XD_OK;
        XD_REQUIRE(ctx, xd_now(ctx) < deadline, XD_ERROR_TIMEOUT, "no id in %s before the deadline: %s",
                   d->file,
                   right            ? "it is of another run"
                   : code == 0      ? "it was made with another secret"
                   : code == EINVAL ? "it is not a file of a world of this size"
                                    : strerror(code));
        xdi_nccl_nap(XDI_NCCL_TURN);
    }
}

static xd_result xdi_nccl_fetch(xd_ctx *ctx, const xd_nccl_desc *d, void *id, double deadline) {
    unsigned char question[XDI_NCCL_QUESTION], seen[XDI_NCCL_QUESTION];
    const size_t bytes = xdi_nccl_page_bytes(d->size), room = strlen(d->file) + 16;
    unsigned char *page = (unsigned char *)xd_allocate(ctx, bytes);
    char *name = (char *)xd_allocate(ctx, room);
    xd_result result = XD_OK;
    if (!page || !name)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld bytes", (long long)(bytes + room));
    if (result == XD_OK) result = xdi_nccl_introduce(ctx, d, question);
    if (result == XD_OK) {
        snprintf(name, room, "%s.%d", d->file, d->rank);
        (void)xdi_nccl_sign_file(d->secret, question, sizeof question);
        result = xdi_nccl_write_file(ctx, name, question, sizeof question);
        if (result == XD_OK) result = xdi_nccl_await_page(ctx, d, question, page, deadline);
        if (result == XD_OK) memcpy(id, page + XDI_NCCL_HELLO, XDI_NCCL_ID);
        xdi_nccl_remove_own(name, question, seen, sizeof question);
    }
    xd_release(ctx, name);
    xd_release(ctx, page);
    return result;
}

/* >>nccl/exchange.c */

/* The exchange, by whichever way the desc names. */

static xd_result xdi_nccl_check_secret(xd_ctx *ctx, const xd_nccl_desc *d) {
    XD_REQUIRE(ctx, d->secret && strlen(d->secret) >= XDI_NCCL_SECRET, XD_ERROR_ARGUMENT,
               "a secret of %d bytes: at least %d are needed, which nobody can guess",
               d->secret ? (int)strlen(d->secret) : 0, (int)XDI_NCCL_SECRET);
    return XD_OK;
}

/* Gives the id of rank 0 to all ranks; returns on rank 0 when they have it. */
static xd_result xdi_nccl_exchange(xd_ctx *ctx, const xd_nccl_desc *d, void *id, double deadline) {
    XD_TRY(xdi_nccl_check_secret(ctx, d));
    if (d->rank == 0)
        return d->file ? xdi_nccl_publish(ctx, d, id, deadline) : xdi_nccl_serve(ctx, d, id, deadline);
    return d->file ? xdi_nccl_fetch(ctx, d, id, deadline) : xdi_nccl_ask(ctx, d, id, deadline);
}


#if !defined(XDISTILL_NCCL_EXCHANGE)
/* >>nccl/internal */

/* Communicators do not block: a call of NCCL that has to wait for peers returns "in progress", and wait.c
 * polls until it is complete or the deadline has passed.
 *
 * Data moves on the stream of each call. The control plane has a separate stream, so that reading the
 * peers' records does not wait for kernels of the caller. Calls on one communicator must run in order on
 * the device too: each makes a mark after its work, and the next one, on any stream, waits for it.
 *
 * A stream of the caller may be in a capture. Then a call is recorded when all its work is on the stream;
 * capture.c refuses the others before anything has been done. */

enum {
    XDI_NCCL_COMPARED = 64,     /* calls of a group that are compared by default */
    XDI_NCCL_STAGING = 1 << 24, /* bytes */
    XDI_NCCL_MIRROR = 1 << 16,  /* bytes, at first */
    XDI_NCCL_SHORT = 4096,      /* bytes up to which every rank computes the whole sum of an all_reduce */
    XDI_NCCL_ALIGN = 16, /* elements: tiles begin at multiples of it, so that kernels can use wide loads */
    XDI_NCCL_SPIN = 1000 /* polls before each further one is followed by a short sleep */
};

typedef struct xdi_nccl xdi_nccl;

/* The end of the last work of a kind. */
typedef struct xdi_nccl_mark {
    cudaEvent_t done;           /* on any stream, or in a replay, which records it as an external event */
    cudaEvent_t inside;         /* in `capture`: a graph has no other way to wait for its own work */
    unsigned long long capture; /* the last one with such work; 0: none */
} xdi_nccl_mark;

/* What a call changes of the calling thread, and puts back. */
typedef struct xdi_nccl_scope {
    int device, previous;
    enum cudaStreamCaptureMode mode;
    bool is_relaxed;
} xdi_nccl_scope;

/* What the handles of one world share on this rank. */
typedef struct xdi_nccl_world {
    xd_ctx *ctx;
    xdi_nccl *groups;    /* all handles */
    xd_result failure;   /* XD_OK, or what broke the world */
    int culprit;         /* world rank; -1 unknown */
    cudaStream_t stream; /* control records and host memory */
    cudaStream_t adds;   /* kernels of a sum while the next tile comes */
    cudaEvent_t brought, joined, added[2];
    int device;          /* of ctx */
    xdi_nccl_mark spare; /* after the last use of staging */
    char *staging;       /* terms of a sum: a tile of each node of every rank's forest, in order */
    char *mirror;        /* copies of host memory on the device */
    size_t staging_bytes, mirror_bytes;
    int64_t compare; /* calls of a group that are compared */
    bool is_held;    /* by xd_comm_nccl, until the first handle exists */
} xdi_nccl_world;

struct xdi_nccl {
    xd_transport base;
    xdi_nccl_world *world;
    xdi_nccl *next; /* in world->groups */
    ncclComm_t comm;
    int *world_ranks; /* [size] */
    /* [2 size], page-locked: copies into other memory would wait inside CUDA. Those of all ranks, then, of messages, what this one
     * tells each of them */
    xd_control *records;
    xd_control *arrived; /* [2 size], the same on the device */
    xdi_nccl_mark last;  /* after the last work on comm */
    int64_t calls;       /* collectives so far */
    xd_control latest;   /* this rank's last call, and the one before it; kind 0: none */
    xd_control before;
    int64_t unseen; /* calls that were not compared, the hash of them, and what their all_to_alls add up to */
    uint64_t hash, pairs;
    bool displaced;      /* some rank passed displacements to the call in progress */
    int64_t *begins;     /* [size], first element of each rank's block of a sum */
    int64_t *counts;     /* [size], and its length */
    xd_leaves *leaves;   /* [size] */
    const void **pieces; /* [size] */
};

/* >>nccl/history.c */

/* What this rank has called in a group. Calls that the ranks do not compare leave a hash, which the next barrier or agreement
 * compares; and TIMEOUT names the last ones. */

static const char *xdi_nccl_kind(uint32_t kind) {
    static const char *const kinds[] = { "nothing",        "barrier",    "broadcast",  "all_reduce",
                                         "reduce_scatter", "all_gather", "all_to_all", "gather",
                                         "scatter",        "send",       "recv",       "agree",
                                         "split",          "fork" };
    return kind < sizeof kinds / sizeof *kinds ? kinds[kind] : "(unknown)";
}

/* Records of kind 0 belong to the call before them. */
static void xdi_nccl_note(xdi_nccl *t, const xd_control *call) {
    if (call->kind == 0) return;
    t->before = t->latest;
    t->latest = *call;
}

/* "all_reduce 7 of 200 F32", by what the record has of it. */
static void xdi_nccl_call_text(const xd_control *call, char *text, size_t size) {
    char number[24] = "", count[24] = "";
    const bool has_type = call->dtype != (uint32_t)XD_DTYPE_NONE;
    if (call->sequence) snprintf(number, sizeof number, " %llu", (unsigned long long)call->sequence);
    if (has_type && call->count) snprintf(count, sizeof count, " %llu", (unsigned long long)call->count);
    snprintf(text, size, "%s%s%s%s%s%s", xdi_nccl_kind(call->kind), number, has_type ? " of" : "", count,
             has_type ? " " : "", has_type ? xd_dtype_name((xd_dtype)call->dtype) : "");
}

/* The last two calls of this rank: the earlier one may be what the later one waits for. */
static void xdi_nccl_recall(const xdi_nccl *t, char *text, size_t size) {
    char latest[80], before[80];
    xdi_nccl_call_text(&t->latest, latest, sizeof latest);
    xdi_nccl_call_text(&t->before, before, sizeof before);
    if (t->latest.kind == 0)
        snprintf(text, size, "this rank has made no call in it");
    else
        snprintf(text, size, "this rank's last call in it is %s%s%s", latest,
                 t->before.kind ? ", after " : "", t->before.kind ? before : "");
}

/* A call that is not compared. Every rank passes the same, but for counts of an all_to_all: what their layouts add up to is 0. */
static void xdi_nccl_remember(xdi_nccl *t, const xd_control *call) {
    const bool paired = call->kind == (uint32_t)XD_COLLECTIVE_ALL_TO_ALL;
    xd_control alike = *call;
    t->unseen++;
    alike.sequence = (uint64_t)t->unseen;
    alike.extra = t->displaced;
    alike.leaves = 0;
    if (paired) alike.layout = 0;
    t->hash = xd_hash(t->hash, &alike, sizeof alike);
    if (paired) t->pairs += call->layout * (2 * (uint64_t)t->unseen + 1);
}

static bool xdi_nccl_is_meeting(uint32_t kind) {
    return kind == (uint32_t)XD_COLLECTIVE_BARRIER || kind == (uint32_t)XD_COLLECTIVE_AGREE;
}

/* A barrier's or agreement's record has no use of its own for the last two numbers. */
static void xdi_nccl_show_history(const xdi_nccl *t, xd_control *record) {
    if (!xdi_nccl_is_meeting(record->kind)) return;
    record->extra = t->hash;
    record->leaves = t->pairs;
}

/* The rank whose calls were others than rank 0's; -1: none, and t->base.size: some pair's counts. All ranks find the same. */
static int xdi_nccl_stranger(const xdi_nccl *t) {
    const xd_control *all = t->records;
    uint64_t pairs = 0;
    int other = -1;
    for (int r = t->base.size - 1; r >= 0; r--) {
        if (!xdi_nccl_is_meeting(all[r].kind)) return -1;
        if (all[r].extra != all[0].extra) other = r;
        pairs += all[r].leaves;
    }
    return other < 0 && pairs ? t->base.size : other;
}

/* >>nccl/wait.c */

/* The fate of a world on this rank, and how it waits for NCCL and for the device. */

/* ---- failure ---- */

/* Only the first failure is recorded. Ends all pending work on this rank. */
static void xdi_nccl_break(xdi_nccl_world *world, xd_result result, int culprit) {
    if (world->failure != XD_OK) return;
    world->failure = result;
    world->culprit = culprit;
    for (xdi_nccl *t = world->groups; t; t = t->next) {
        if (t->comm) ncclCommAbort(t->comm);
        t->comm = NULL;
    }
}

static xd_result xdi_nccl_report(const xdi_nccl *t) {
    const xdi_nccl_world *world = t->world;
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, world->culprit,
                           "the world is broken since an earlier %s of this rank",
                           xd_result_name(world->failure));
}

/* NCCL's text, and its details of the last error. */
static xd_result xdi_nccl_refuse(xd_ctx *ctx, ncclResult_t code, ncclComm_t comm) {
    const char *detail = ncclGetLastError(comm);
    const bool remote = code == ncclRemoteError || code == ncclSystemError;
    return XD_FAIL(ctx, remote ? XD_ERROR_PEER : XD_ERROR_DEVICE, "NCCL: %s%s%.300s",
                   ncclGetErrorString(code), detail && detail[0] ? ": " : "", detail ? detail : "");
}

static xd_result xdi_nccl_fault(xdi_nccl *t, ncclResult_t code) {
    const xd_result result = xdi_nccl_refuse(t->base.ctx, code, t->comm);
    xdi_nccl_break(t->world, result, -1);
    return result;
}

static xd_result xdi_nccl_expire(xdi_nccl *t) {
    char calls[200];
    xdi_nccl_recall(t, calls, sizeof calls);
    xdi_nccl_break(t->world, XD_ERROR_TIMEOUT, -1);
    return XD_FAIL(t->base.ctx, XD_ERROR_TIMEOUT,
                   "some rank of the group of %d did not arrive before the deadline; %s", t->base.size,
                   calls);
}

/* A failure of this rank alone in the middle of a call: peers cannot go on without its part. */
static xd_result xdi_nccl_lost(xdi_nccl *t, xd_result result) {
    if (result != XD_OK) xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[t->base.rank]);
    return result;
}

/* An error of the device's context is one of a forked handle's. */
static xd_result xdi_nccl_pass_on(xdi_nccl *t, xd_result result) {
    if (result == XD_OK || t->base.ctx == t->world->ctx) return result;
    return XD_FAIL(t->base.ctx, result, "%.300s", xd_last_error(t->world->ctx)->message);
}

static xd_result xdi_nccl_cuda(xdi_nccl *t, cudaError_t code) {
    if (code == cudaSuccess) return XD_OK;
    return xdi_nccl_lost(t, XD_FAIL(t->base.ctx, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code)));
}

/* ---- the calling thread ---- */

/* Makes the device current, as a worker's thread or a caller with several GPUs may have another one. And while some stream is
 * in a capture, lets this thread allocate and ask for events: what it does that for is not part of the capture. */
static cudaError_t xdi_nccl_scope_begin(xdi_nccl_scope *scope, int device) {
    scope->device = scope->previous = device;
    scope->mode = cudaStreamCaptureModeRelaxed;
    scope->is_relaxed = false;
    cudaError_t code = cudaGetDevice(&scope->previous);
    if (code != cudaSuccess) scope->previous = device;
    if (scope->previous != device) code = cudaSetDevice(device);
    if (code != cudaSuccess) return code;
    code = cudaThreadExchangeStreamCaptureMode(&scope->mode);
    scope->is_relaxed = code == cudaSuccess;
    return code;
}

static void xdi_nccl_scope_end(xdi_nccl_scope *scope) {
    if (scope->is_relaxed) cudaThreadExchangeStreamCaptureMode(&scope->mode);
    if (scope->previous != scope->device) cudaSetDevice(scope->previous);
}

/* The scope of a call of the table that peers wait for. */
static xd_result xdi_nccl_begin_call(xdi_nccl *t, xdi_nccl_scope *scope) {
    return xdi_nccl_cuda(t, xdi_nccl_scope_begin(scope, t->world->device));
}

/* ---- waiting ---- */

/* CUDA has changed the arguments of this function twice. */
static cudaError_t xdi_nccl_capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id) {
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL, NULL);
#elif CUDART_VERSION >= 12000
    return cudaStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL);
#else
    return cudaStreamGetCaptureInfo(stream, status, id);
#endif
}

static void xdi_nccl_pause(int turn) {
    const struct timespec nap = { 0, 20000 };
    if (turn >= XDI_NCCL_SPIN) nanosleep(&nap, NULL);
}

/* The capture that a stream is in; 0: none. */
static unsigned long long xdi_nccl_capture_of(const xdi_nccl *t, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (stream == t->world->stream) return 0;
    if (xdi_nccl_capture_info(stream, &status, &id) != cudaSuccess)
        cudaGetLastError(); /* its next use reports it */
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

/* Waits until NCCL has accepted a call that returned `code`. */
static xd_result xdi_nccl_settle(xdi_nccl *t, ncclResult_t code, double deadline) {
    for (int turn = 0; code == ncclInProgress; turn += turn < XDI_NCCL_SPIN) {
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &code);
        if (asked != ncclSuccess) code = asked;
        if (code != ncclInProgress) break;
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
    return code == ncclSuccess ? XD_OK : xdi_nccl_fault(t, code);
}

/* Waits until the device has completed the work before t->last. */
static xd_result xdi_nccl_wait(xdi_nccl *t, double deadline) {
    for (int turn = 0;; turn += turn < XDI_NCCL_SPIN) {
        ncclResult_t state = ncclSuccess;
        const cudaError_t done = cudaEventQuery(t->last.done);
        if (done == cudaSuccess) return XD_OK;
        if (done != cudaErrorNotReady) return xdi_nccl_cuda(t, done);
        const ncclResult_t asked = ncclCommGetAsyncError(t->comm, &state);
        if (asked != ncclSuccess) return xdi_nccl_fault(t, asked);
        if (state != ncclSuccess && state != ncclInProgress) return xdi_nccl_fault(t, state);
        if (xd_now(t->base.ctx) >= deadline) return xdi_nccl_expire(t);
        xdi_nccl_pause(turn);
    }
}

/* Waits on `stream` for the work before the mark. A graph waits for what was before each of its launches. */
static xd_result xdi_nccl_await(xdi_nccl *t, cudaStream_t stream, const xdi_nccl_mark *mark) {
    const unsigned long long capture = xdi_nccl_capture_of(t, stream);
    if (capture == 0) return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, mark->done, 0));
    if (capture == mark->capture) return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, mark->inside, 0));
    return xdi_nccl_cuda(t, cudaStreamWaitEvent(stream, mark->done, cudaEventWaitExternal));
}

/* Marks the end of the work on `stream`. */
static xd_result xdi_nccl_put_mark(xdi_nccl *t, cudaStream_t stream, xdi_nccl_mark *mark) {
    const unsigned long long capture = xdi_nccl_capture_of(t, stream);
    if (capture == 0) return xdi_nccl_cuda(t, cudaEventRecord(mark->done, stream));
    mark->capture = capture;
    XD_TRY(xdi_nccl_cuda(t, cudaEventRecordWithFlags(mark->done, stream, cudaEventRecordExternal)));
    return xdi_nccl_cuda(t, cudaEventRecord(mark->inside, stream));
}

static cudaError_t xdi_nccl_mark_create(xdi_nccl_mark *mark) {
    const cudaError_t code = cudaEventCreateWithFlags(&mark->done, cudaEventDisableTiming);
    return code == cudaSuccess ? cudaEventCreateWithFlags(&mark->inside, cudaEventDisableTiming) : code;
}

static void xdi_nccl_mark_destroy(xdi_nccl_mark *mark) {
    if (mark->done) cudaEventDestroy(mark->done);
    if (mark->inside) cudaEventDestroy(mark->inside);
}

/* Begins work of this communicator on `stream`, after its earlier work; and ends it. */
static xd_result xdi_nccl_enter(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_await(t, stream, &t->last);
}

static xd_result xdi_nccl_leave(xdi_nccl *t, cudaStream_t stream) {
    return xdi_nccl_put_mark(t, stream, &t->last);
}

static xd_result xdi_nccl_copy(xdi_nccl *t, cudaStream_t stream, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || to == from) return XD_OK;
    return xdi_nccl_cuda(t, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}

/* >>nccl/collective.c */

/* Collectives: control records, and what only moves. */

/* ---- sends and receives of one group call ---- */

typedef struct xdi_nccl_batch {
    xdi_nccl *t;
    cudaStream_t stream;
    ncclResult_t code;
    const void *from; /* what this rank keeps: from where to where, and its bytes */
    void *to;
    size_t bytes;
} xdi_nccl_batch;

static xdi_nccl_batch xdi_nccl_begin(xdi_nccl *t, cudaStream_t stream) {
    xdi_nccl_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.t = t;
    batch.stream = stream;
    batch.code = ncclGroupStart();
    return batch;
}

static bool xdi_nccl_goes(const xdi_nccl_batch *b, int peer, int64_t count) {
    return count > 0 && peer != b->t->base.rank && (b->code == ncclSuccess || b->code == ncclInProgress);
}

/* `count` elements of `size` bytes from element `begin`. What stays on this rank is not sent. */
static void xdi_nccl_put(xdi_nccl_batch *b, int peer, const void *data, int64_t begin, int64_t count,
                         size_t size) {
    if (!xdi_nccl_goes(b, peer, count)) return;
    b->code = ncclSend((const char *)data + (size_t)begin * size, (size_t)count * size, ncclUint8, peer,
                       b->t->comm, b->stream);
}

static void xdi_nccl_get(xdi_nccl_batch *b, int peer, void *data, int64_t begin, int64_t count, size_t size) {
    if (!xdi_nccl_goes(b, peer, count)) return;
    b->code = ncclRecv((char *)data + (size_t)begin * size, (size_t)count * size, ncclUint8, peer, b->t->comm,
                       b->stream);
}

static xd_result xdi_nccl_end(xdi_nccl_batch *b, double deadline) {
    const ncclResult_t ended = ncclGroupEnd();
    if (b->code == ncclSuccess || b->code == ncclInProgress) b->code = ended;
    return xdi_nccl_settle(b->t, b->code, deadline);
}

/* ---- the control plane ---- */

static xd_result xdi_nccl_gather_records(xdi_nccl *t, const xd_control *mine, double deadline) {
    const cudaStream_t stream = t->world->stream;
    const size_t n = (size_t)t->base.size, me = (size_t)t->base.rank;
    t->records[me] = *mine;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, &t->arrived[me], &t->records[me], sizeof *mine));
    const ncclResult_t code =
        ncclAllGather(&t->arrived[me], t->arrived, sizeof *mine, ncclUint8, t->comm, stream);
    XD_TRY(xdi_nccl_settle(t, code, deadline));
    XD_TRY(xdi_nccl_copy(t, stream, t->records, t->arrived, n * sizeof *mine));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

static bool xdi_nccl_is_moving(uint32_t kind) {
    return kind >= (uint32_t)XD_COLLECTIVE_BROADCAST && kind < (uint32_t)XD_COLLECTIVE_SEND;
}

/* Whether the ranks compare a call that moves data. All have the same count of calls, so all decide the same. */
static bool xdi_nccl_compares(const xdi_nccl *t, const xd_collective *next) {
    return t->calls < t->world->compare || (next && next->leaves.total && !next->known_leaves);
}

/* What the ranks did before a barrier or an agreement without comparing it. */
static xd_result xdi_nccl_look_back(xdi_nccl *t) {
    const int other = xdi_nccl_stranger(t);
    const bool pairs = other == t->base.size;
    const int culprit = other < 0 || pairs ? -1 : t->world_ranks[other];
    char calls[200];
    if (other < 0) return XD_OK;
    xdi_nccl_recall(t, calls, sizeof calls);
    xdi_nccl_break(t->world, XD_ERROR_MISMATCH, culprit);
    if (pairs)
        return XD_FAIL(t->base.ctx, XD_ERROR_MISMATCH,
                       "counts of an all_to_all differ between two ranks, among %lld calls that were not "
                       "compared; %s",
                       (long long)t->unseen, calls);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_MISMATCH, culprit,
                           "rank %d made other calls than rank %d, of which this one made %lld that were not "
                           "compared; %s",
                           culprit, t->world_ranks[0], (long long)t->unseen, calls);
}

static xd_result xdi_nccl_confer_seen(xdi_nccl *t, const xd_control *mine, xd_control *all, double deadline) {
    const int n = t->base.size;
    xd_control record = *mine;
    if (t->displaced) record.extra = 1; /* otherwise only splits, leaves and histories use it */
    xdi_nccl_show_history(t, &record);
    XD_TRY(xdi_nccl_gather_records(t, &record, deadline));
    XD_TRY(xdi_nccl_look_back(t));
    for (int r = 0; r < n && xdi_nccl_is_moving(mine->kind); r++)
        t->displaced = t->displaced || t->records[r].extra;
    memcpy(all, t->records, (size_t)n * sizeof *all);
    return XD_OK;
}

static xd_result xdi_nccl_confer(xdi_nccl *t, const xd_control *mine, const xd_collective *next,
                                 xd_control *all, double deadline) {
    t->displaced = next && !next->leaves.total && (next->send_displacements || next->recv_displacements);
    const bool moves = xdi_nccl_is_moving(mine->kind), compares = !moves || xdi_nccl_compares(t, next);
    t->calls += moves;
    xdi_nccl_note(t, mine);
    if (compares) return xdi_nccl_confer_seen(t, mine, all, deadline);
    /* The peers are not comparing, so they cannot learn why this rank does not come. */
    if (mine->status != (int32_t)XD_OK) return xdi_nccl_lost(t, (xd_result)mine->status);
    xdi_nccl_remember(t, mine);
    xd_control_assume(mine, next, t->base.size, all);
    return XD_OK;
}

static xd_result xdi_nccl_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                  xd_control *all, double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_confer(t, mine, next, all, deadline);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* ---- moves ---- */

/* True for equal blocks back to back, for which NCCL has calls: the same answer on every rank. */
static bool xdi_nccl_is_even(const xdi_nccl *t, const int64_t *counts) {
    for (int r = 0; r < t->base.size; r++)
        if (counts[r] != counts[0]) return false;
    return !t->displaced;
}

static void xdi_nccl_send(void *user, int peer, const void *data, size_t bytes) {
    xdi_nccl_batch *b = (xdi_nccl_batch *)user;
    if (peer == b->t->base.rank) b->from = data;
    xdi_nccl_put(b, peer, data, 0, (int64_t)bytes, 1);
}

static void xdi_nccl_receive(void *user, int peer, void *data, size_t bytes) {
    xdi_nccl_batch *b = (xdi_nccl_batch *)user;
    if (peer == b->t->base.rank) {
        b->to = data;
        b->bytes = bytes;
    }
    xdi_nccl_get(b, peer, data, 0, (int64_t)bytes, 1);
}

/* Every kind that only moves data, as messages. */
static xd_result xdi_nccl_messages(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                   double deadline) {
    static const xd_message_sink sink = { xdi_nccl_send, xdi_nccl_receive };
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    xd_collective_messages(c, t->base.rank, t->base.size, &sink, &batch);
    XD_TRY(xdi_nccl_end(&batch, deadline));
    return batch.to && batch.from ? xdi_nccl_copy(t, stream, batch.to, batch.from, batch.bytes) : XD_OK;
}

static xd_result xdi_nccl_move(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    if (c->kind == XD_COLLECTIVE_BROADCAST) {
        /* root's is not written */
        void *data = c->root == t->base.rank ? (void *)(uintptr_t)c->send : c->recv;
        const size_t bytes = (size_t)c->count * size;
        if (bytes == 0) return XD_OK;
        const ncclResult_t code = ncclBroadcast(data, data, bytes, ncclUint8, c->root, t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    if (c->kind == XD_COLLECTIVE_ALL_GATHER && xdi_nccl_is_even(t, c->recv_counts)) {
        const size_t bytes = (size_t)c->recv_counts[0] * size;
        if (bytes == 0) return XD_OK;
        return xdi_nccl_settle(t, ncclAllGather(c->send, c->recv, bytes, ncclUint8, t->comm, stream),
                               deadline);
    }
    return xdi_nccl_messages(t, c, stream, deadline);
}

/* >>nccl/sum.c */

/* Sums in rank order by the context's kernels, and those that NCCL does itself. */

/* A sum of this rank's block, tile by tile. Staging has two halves: while the kernels add one, on a stream of the world, the next
 * tile comes into the other. What this rank adds itself is read where it is, unless it is a forest of several nodes. */
typedef struct xdi_nccl_sum {
    const xd_collective *c;
    cudaStream_t stream, adds; /* the caller's, and that of the kernels: the same when one tile is enough */
    void *out;
    int64_t stride; /* elements from one node of send to the next */
    int64_t tile;   /* elements of each node */
    size_t half;    /* bytes of a half of staging; 0: there is one */
} xdi_nccl_sum;

static int64_t xdi_nccl_nodes(const xdi_nccl *t, int rank) {
    return t->leaves[rank].total ? xd_leaves_nodes(t->leaves[rank].first, t->leaves[rank].count) : 1;
}

/* Elements of a block of `count` in the tile that begins at `at`. */
static int64_t xdi_nccl_in_tile(int64_t count, int64_t at, int64_t tile) {
    const int64_t left = count > at ? count - at : 0;
    return left < tile ? left : tile;
}

/* Nodes of all ranks that need room in staging on some rank. */
static int64_t xdi_nccl_slots(const xdi_nccl *t) {
    bool single = true;
    int64_t nodes = 0;
    for (int r = 0; r < t->base.size; r++) {
        nodes += xdi_nccl_nodes(t, r);
        single = single && xdi_nccl_nodes(t, r) == 1;
    }
    return single ? nodes - 1 : nodes;
}

/* Collects the tile at `at` of this rank's block in the half `half`: the nodes of the ranks, back to back. */
static xd_result xdi_nccl_bring(xdi_nccl *t, const xdi_nccl_sum *s, int half, int64_t at, double deadline) {
    const size_t size = xd_dtype_size(s->c->dtype), bytes = (size_t)s->tile * size;
    const int n = t->base.size, me = t->base.rank;
    const int64_t own = xdi_nccl_in_tile(t->counts[me], at, s->tile);
    const bool in_place = xdi_nccl_nodes(t, me) == 1;
    const char *mine = (const char *)s->c->send + (size_t)(t->begins[me] + at) * size;
    char *room = t->world->staging + (size_t)half * s->half;
    xdi_nccl_batch batch = xdi_nccl_begin(t, s->stream);
    for (int r = 0; r < n; r++) {
        t->pieces[r] = r == me && in_place ? mine : room;
        if (r == me && in_place) continue;
        for (int64_t k = 0; k < xdi_nccl_nodes(t, me); k++)
            xdi_nccl_put(&batch, r, s->c->send, k * s->stride + t->begins[r] + at,
                         xdi_nccl_in_tile(t->counts[r], at, s->tile), size);
        for (int64_t k = 0; k < xdi_nccl_nodes(t, r); k++, room += bytes)
            xdi_nccl_get(&batch, r, room, 0, own, size);
    }
    XD_TRY(xdi_nccl_end(&batch, deadline));
    for (int64_t k = 0; k < xdi_nccl_nodes(t, me) && !in_place; k++)
        XD_TRY(xdi_nccl_copy(t, s->stream, (char *)(uintptr_t)t->pieces[me] + (size_t)k * bytes,
                             mine + (size_t)(k * s->stride) * size, (size_t)own * size));
    return XD_OK;
}

/* Adds t->pieces, whose nodes are `stride` elements apart, into out. */
static xd_result xdi_nccl_add(xdi_nccl *t, const xdi_nccl_sum *s, void *out, int64_t stride, int64_t count) {
    const xd_collective *c = s->c;
    const int n = t->base.size;
    const xd_reduce_kernels *reduce = &xd_ctx_kernels(t->world->ctx)->reduce;
    xd_launch launch = xd_ctx_launch(t->world->ctx);
    launch.stream = s->adds;
    const xd_result result =
        c->leaves.total
            ? reduce->leaves(&launch, out, t->pieces, t->leaves, n, stride, count, c->dtype, c->op)
            : reduce->pieces(&launch, out, t->pieces, n, count, c->dtype, c->op);
    return xdi_nccl_lost(t, xdi_nccl_pass_on(t, result));
}

/* `later` goes on after what `earlier` has so far. */
static xd_result xdi_nccl_follow(xdi_nccl *t, cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
    if (later == earlier) return XD_OK;
    XD_TRY(xdi_nccl_cuda(t, cudaEventRecord(event, earlier)));
    return xdi_nccl_cuda(t, cudaStreamWaitEvent(later, event, 0));
}

/* Each half is free again when its sum is done. In place, a rank writes only what it does not send. */
static xd_result xdi_nccl_reduce_tiles(xdi_nccl *t, const xdi_nccl_sum *s, double deadline) {
    const size_t size = xd_dtype_size(s->c->dtype);
    xdi_nccl_world *world = t->world;
    int64_t longest = 0;
    int half = 0;
    for (int r = 0; r < t->base.size; r++) longest = t->counts[r] > longest ? t->counts[r] : longest;
    for (int64_t at = 0; at < longest; at += s->tile, half = s->half ? 1 - half : 0) {
        const int64_t count = xdi_nccl_in_tile(t->counts[t->base.rank], at, s->tile);
        const bool again = s->adds != s->stream && count > 0 && at >= 2 * s->tile;
        if (again) XD_TRY(xdi_nccl_cuda(t, cudaStreamWaitEvent(s->stream, world->added[half], 0)));
        XD_TRY(xdi_nccl_bring(t, s, half, at, deadline));
        if (count == 0) continue;
        XD_TRY(xdi_nccl_follow(t, s->adds, s->stream, world->brought));
        XD_TRY(xdi_nccl_add(t, s, (char *)s->out + (size_t)at * size, s->tile, count));
        if (s->adds != s->stream) XD_TRY(xdi_nccl_cuda(t, cudaEventRecord(world->added[half], s->adds)));
    }
    return xdi_nccl_follow(t, s->stream, s->adds, world->joined);
}

/* A rank alone brings nothing: it copies, or adds its own nodes. */
static xd_result xdi_nccl_reduce_alone(xdi_nccl *t, const xdi_nccl_sum *s) {
    const size_t size = xd_dtype_size(s->c->dtype);
    t->pieces[0] = (const char *)s->c->send + (size_t)t->begins[0] * size;
    if (s->c->leaves.total) return xdi_nccl_add(t, s, s->out, s->stride, t->counts[0]);
    return xdi_nccl_copy(t, s->stream, s->out, t->pieces[0], (size_t)t->counts[0] * size);
}

/* Whether the kernels can be on the world's stream for them: a capture that it is in must be that of the caller's stream. */
static bool xdi_nccl_can_overlap(const xdi_nccl *t, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (xdi_nccl_capture_info(t->world->adds, &status, &id) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    if (status == cudaStreamCaptureStatusNone) return true;
    return status == cudaStreamCaptureStatusActive && id == xdi_nccl_capture_of(t, stream);
}

/* Reduces this rank's block into out. */
static xd_result xdi_nccl_reduce(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, void *out,
                                 int64_t stride, int64_t tile, double deadline) {
    xdi_nccl_sum sum;
    memset(&sum, 0, sizeof sum);
    sum.c = c;
    sum.stream = sum.adds = stream;
    sum.out = out;
    sum.stride = stride;
    sum.tile = tile;
    if (t->base.size == 1) return xdi_nccl_reduce_alone(t, &sum);
    const size_t bytes = (size_t)(xdi_nccl_slots(t) * tile) * xd_dtype_size(c->dtype);
    sum.half = 2 * bytes <= t->world->staging_bytes ? bytes : 0;
    if (sum.half && t->counts[t->base.rank] > tile && xdi_nccl_can_overlap(t, stream))
        sum.adds = t->world->adds;
    XD_TRY(xdi_nccl_await(t, stream, &t->world->spare));
    XD_TRY(xdi_nccl_reduce_tiles(t, &sum, deadline));
    return xdi_nccl_put_mark(t, stream, &t->world->spare);
}

/* Finds every rank's leaves; returns the elements of each node in a tile, two of which are in staging if there is room. */
static int64_t xdi_nccl_tile(xdi_nccl *t, const xd_collective *c) {
    (void)xd_control_leaves(t->records, c, t->base.size, t->leaves);
    const int64_t slots = t->base.size == 1 ? 0 : xdi_nccl_slots(t);
    if (slots == 0) return INT64_MAX; /* nothing is staged */
    const int64_t room = (int64_t)t->world->staging_bytes / (slots * (int64_t)xd_dtype_size(c->dtype));
    const int64_t tile = room / 2 - room / 2 % XDI_NCCL_ALIGN;
    return tile > 0 ? tile : room > 1 ? room / 2 : room;
}

static xd_result xdi_nccl_room(xdi_nccl *t, int64_t tile) {
    if (tile > 0) return XD_OK;
    return xdi_nccl_lost(t, XD_FAIL(t->base.ctx, XD_ERROR_MEMORY,
                                    "%lld bytes of staging do not hold one element of every node of a sum",
                                    (long long)t->world->staging_bytes));
}

/* Reductions that NCCL may do itself: FAST sums, and those without rounding. NCCL's MAX and MIN may lose a NaN. */
static bool xdi_nccl_is_native(const xdi_nccl *t, const xd_collective *c) {
    if (xd_ctx_settings(t->base.ctx)->reduction != XD_REDUCTION_FAST || c->leaves.total) return false;
    return !xd_dtype_is_floating(c->dtype) || c->op == XD_SUM || c->op == XD_AVG;
}

static ncclDataType_t xdi_nccl_type(xd_dtype dtype) {
    switch (dtype) {
    case XD_DTYPE_F32: return ncclFloat32;
    case XD_DTYPE_F64: return ncclFloat64;
    case XD_DTYPE_BF16: return (ncclDataType_t)9; /* ncclBfloat16: C does not see it in every release */
    case XD_DTYPE_F16: return ncclFloat16;
    case XD_DTYPE_I32: return ncclInt32;
    case XD_DTYPE_I64: return ncclInt64;
    default: return ncclUint8;
    }
}

static ncclRedOp_t xdi_nccl_op(xd_reduce_op op) {
    return op == XD_MAX ? ncclMax : op == XD_MIN ? ncclMin : op == XD_AVG ? ncclAvg : ncclSum;
}

static xd_result xdi_nccl_reduce_scatter(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                         double deadline) {
    if (xdi_nccl_is_native(t, c) && xdi_nccl_is_even(t, c->send_counts)) {
        if (c->send_counts[0] == 0) return XD_OK;
        const ncclResult_t code =
            ncclReduceScatter(c->send, c->recv, (size_t)c->send_counts[0], xdi_nccl_type(c->dtype),
                              xdi_nccl_op(c->op), t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    const int64_t tile = xdi_nccl_tile(t, c);
    XD_TRY(xdi_nccl_room(t, tile));
    const int64_t stride = xd_collective_blocks(c, t->base.size, false, t->begins, t->counts);
    return xdi_nccl_reduce(t, c, stream, c->recv, stride, tile, deadline);
}

/* Each rank sums a block, then all gather the sums. Short arrays go to every rank whole, which saves a round. In
 * place, a rank overwrites only elements that it has sent already or does not send. */
static xd_result xdi_nccl_all_reduce(xdi_nccl *t, const xd_collective *c, cudaStream_t stream,
                                     double deadline) {
    const int n = t->base.size, me = t->base.rank;
    const size_t size = xd_dtype_size(c->dtype);
    if (c->count == 0) return XD_OK;
    if (xdi_nccl_is_native(t, c)) {
        const ncclResult_t code = ncclAllReduce(c->send, c->recv, (size_t)c->count, xdi_nccl_type(c->dtype),
                                                xdi_nccl_op(c->op), t->comm, stream);
        return xdi_nccl_settle(t, code, deadline);
    }
    const int64_t tile = xdi_nccl_tile(t, c);
    XD_TRY(xdi_nccl_room(t, tile));
    const bool whole = c->count <= tile && (size_t)c->count * size <= (size_t)XDI_NCCL_SHORT;
    const int64_t stride = xd_collective_blocks(c, n, whole, t->begins, t->counts);
    char *own = (char *)c->recv + (size_t)t->begins[me] * size;
    XD_TRY(xdi_nccl_reduce(t, c, stream, own, stride, tile, deadline));
    if (whole) return XD_OK;
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 0; r < n; r++) {
        xdi_nccl_put(&batch, r, own, 0, t->counts[me], size);
        xdi_nccl_get(&batch, r, c->recv, t->begins[r], t->counts[r], size);
    }
    return xdi_nccl_end(&batch, deadline);
}

/* >>nccl/call.c */

/* One call of a collective, with memory of the device or of the host. */

/* Starts a call whose memory is all on the device. */
static xd_result xdi_nccl_start(xdi_nccl *t, const xd_collective *c, cudaStream_t stream, double deadline) {
    XD_TRY(xdi_nccl_enter(t, stream));
    if (c->kind == XD_COLLECTIVE_ALL_REDUCE) {
        XD_TRY(xdi_nccl_all_reduce(t, c, stream, deadline));
    } else if (c->kind == XD_COLLECTIVE_REDUCE_SCATTER) {
        XD_TRY(xdi_nccl_reduce_scatter(t, c, stream, deadline));
    } else {
        XD_TRY(xdi_nccl_move(t, c, stream, deadline));
    }
    return xdi_nccl_leave(t, stream);
}

/* The largest end of a block. */
static int64_t xdi_nccl_extent(const int64_t *counts, const int64_t *displacements, int n) {
    int64_t extent = 0, end = 0;
    for (int r = 0; r < n; end += counts[r++]) {
        const int64_t begin = displacements ? displacements[r] : end;
        if (counts[r] && begin + counts[r] > extent) extent = begin + counts[r];
    }
    return extent;
}

/* Elements of memory that a call reads, and writes, on this rank. */
static void xdi_nccl_extents(const xdi_nccl *t, const xd_collective *c, int64_t *send, int64_t *recv) {
    const int n = t->base.size, me = t->base.rank;
    const bool root = c->root == me;
    const int64_t nodes = c->leaves.total ? xd_leaves_nodes(c->leaves.first, c->leaves.count) : 1;
    const int64_t sent = c->send_counts ? xdi_nccl_extent(c->send_counts, c->send_displacements, n) : 0;
    const int64_t received = c->recv_counts ? xdi_nccl_extent(c->recv_counts, c->recv_displacements, n) : 0;
    *send = *recv = 0;
    switch (c->kind) {
    case XD_COLLECTIVE_BROADCAST: *(root ? send : recv) = c->count; break;
    case XD_COLLECTIVE_ALL_REDUCE: *send = c->count * nodes, *recv = c->count; break;
    case XD_COLLECTIVE_REDUCE_SCATTER: *send = sent * nodes, *recv = c->send_counts[me]; break;
    case XD_COLLECTIVE_ALL_GATHER: *send = c->recv_counts[me], *recv = received; break;
    case XD_COLLECTIVE_GATHER: *send = c->recv_counts[me], *recv = root ? received : 0; break;
    case XD_COLLECTIVE_SCATTER: *send = root ? sent : 0, *recv = c->send_counts[me]; break;
    default: *send = sent, *recv = received; break;
    }
}

static bool xdi_nccl_on_host(const xdi_nccl *t, const void *memory, int64_t elements) {
    xd_ctx *ctx = t->world->ctx;
    return memory && elements > 0 && !xd_ctx_kernels(ctx)->memory.owns(ctx, memory);
}

/* Enlarges the mirror to at least `bytes`. Nothing uses it between calls. */
static xd_result xdi_nccl_widen(xdi_nccl *t, size_t bytes) {
    xdi_nccl_world *world = t->world;
    const xd_device_ops *memory = &xd_ctx_kernels(world->ctx)->memory;
    if (bytes <= world->mirror_bytes) return XD_OK;
    memory->release(world->ctx, world->mirror);
    world->mirror_bytes = 0;
    world->mirror = (char *)memory->allocate(world->ctx, bytes);
    if (!world->mirror)
        return xdi_nccl_lost(t,
                             XD_FAIL(t->base.ctx, XD_ERROR_MEMORY,
                                     "the GPU has no room for %lld bytes of host memory", (long long)bytes));
    world->mirror_bytes = bytes;
    return XD_OK;
}

/* A call with host memory, through the mirror: first what is sent, then what is received, with its gaps. */
static xd_result xdi_nccl_run_host(xdi_nccl *t, const xd_collective *c, size_t send, size_t recv,
                                   double deadline) {
    const cudaStream_t stream = t->world->stream;
    const size_t behind = (send + 255) / 256 * 256;
    xd_collective record = *c;
    XD_TRY(xdi_nccl_widen(t, behind + recv));
    if (send) record.send = t->world->mirror;
    if (recv) record.recv = t->world->mirror + behind;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, t->world->mirror, c->send, send));
    XD_TRY(xdi_nccl_copy(t, stream, t->world->mirror + behind, c->recv, recv));
    XD_TRY(xdi_nccl_start(t, &record, stream, deadline));
    XD_TRY(xdi_nccl_wait(t, deadline)); /* the copy below may block inside CUDA, so nothing may be pending */
    XD_TRY(xdi_nccl_copy(t, stream, c->recv, t->world->mirror + behind, recv));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

static xd_result xdi_nccl_run(xdi_nccl *t, const xd_collective *c, double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    int64_t send, recv;
    void *const given = c->stream ? c->stream : xd_ctx_settings(t->base.ctx)->stream;
    const cudaStream_t stream = (cudaStream_t)given;
    xdi_nccl_extents(t, c, &send, &recv);
    const bool from_host = xdi_nccl_on_host(t, c->send, send), to_host = xdi_nccl_on_host(t, c->recv, recv);
    if (!from_host && !to_host) return xdi_nccl_start(t, c, stream, deadline);
    /* The buffer on the device belongs to a stream of the caller. */
    if (send && recv && from_host != to_host) {
        XD_TRY(xdi_nccl_enter(t, stream));
        XD_TRY(xdi_nccl_leave(t, stream));
    }
    return xdi_nccl_run_host(t, c, (size_t)send * size, (size_t)recv * size, deadline);
}

static xd_result xdi_nccl_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_run(t, c, deadline);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* >>nccl/messages.c */

/* Messages between two ranks, as a caller lists them. */

/* The messages of a pair of ranks have an order that both know: those from the lower rank first, then as listed. The k-th of each
 * pair are a wave, which all ranks are in at the same time. */
static void xdi_nccl_number(const xdi_nccl *t, xd_message *messages, int count) {
    for (int i = 0; i < count; i++) {
        const xd_collective *c = &messages[i].record;
        const bool up = (c->kind == XD_COLLECTIVE_SEND) == (t->base.rank < c->root);
        int before = 0;
        for (int k = 0; k < count; k++) {
            const xd_collective *other = &messages[k].record;
            const bool same = other->kind == c->kind;
            if (other->root == c->root && (same ? k < i : !up)) before++;
        }
        messages[i].stage = 1 + before;
    }
}

/* Swaps what both ranks passed, for all messages of a wave at once; false in *any without one. */
static xd_result xdi_nccl_offer(xdi_nccl *t, xd_message *messages, int count, int wave, bool *any,
                                double deadline) {
    const cudaStream_t stream = t->world->stream;
    const int n = t->base.size;
    const size_t size = sizeof *t->records;
    xd_control *mine = t->records + n;
    *any = false;
    memset(mine, 0, (size_t)n * size);
    for (int i = 0; i < count; i++) {
        if (messages[i].stage != wave) continue;
        mine[messages[i].record.root].count = (uint64_t)messages[i].record.count;
        mine[messages[i].record.root].dtype = (uint32_t)messages[i].record.dtype;
        *any = true;
    }
    if (!*any) return XD_OK;
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_copy(t, stream, t->arrived + n, mine, (size_t)n * size));
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int i = 0; i < count; i++) {
        if (messages[i].stage != wave) continue;
        xdi_nccl_put(&batch, messages[i].record.root, t->arrived, n + messages[i].record.root, 1, size);
        xdi_nccl_get(&batch, messages[i].record.root, t->arrived, messages[i].record.root, 1, size);
    }
    XD_TRY(xdi_nccl_end(&batch, deadline));
    for (int i = 0; i < count; i++) {
        const int peer = messages[i].record.root;
        if (messages[i].stage == wave)
            XD_TRY(xdi_nccl_copy(t, stream, &t->records[peer], &t->arrived[peer], size));
    }
    XD_TRY(xdi_nccl_leave(t, stream));
    XD_TRY(xdi_nccl_wait(t, deadline));
    for (int i = 0; i < count; i++) {
        if (messages[i].stage != wave) continue;
        messages[i].their_count = (int64_t)t->records[messages[i].record.root].count;
        messages[i].their_dtype = (xd_dtype)t->records[messages[i].record.root].dtype;
    }
    return XD_OK;
}

/* Whether a message of this wave moves data. */
static bool xdi_nccl_moves(const xd_message *m, int wave) {
    const xd_collective *c = &m->record;
    return m->stage == wave && c->count > 0 && c->dtype != XD_DTYPE_NONE && c->dtype == m->their_dtype &&
           c->count == m->their_count;
}

/* A message's memory and its bytes; on the device at *behind of the mirror when it is the host's, and *behind goes on. */
static void *xdi_nccl_reach(const xdi_nccl *t, const xd_collective *c, size_t *bytes, size_t *behind) {
    void *data = c->kind == XD_COLLECTIVE_SEND ? (void *)(uintptr_t)c->send : c->recv;
    const size_t at = *behind;
    *bytes = (size_t)c->count * xd_dtype_size(c->dtype);
    if (!xdi_nccl_on_host(t, data, c->count)) return data;
    *behind += (*bytes + 255) / 256 * 256;
    return t->world->mirror + at;
}

/* Copies between the host's memory of a wave's messages of a kind and the mirror. */
static xd_result xdi_nccl_reflect(xdi_nccl *t, const xd_message *messages, int count, int wave,
                                  xd_collective_kind kind) {
    const cudaStream_t stream = t->world->stream;
    size_t bytes, behind = 0;
    for (int i = 0; i < count; i++) {
        const xd_collective *c = &messages[i].record;
        if (!xdi_nccl_moves(&messages[i], wave)) continue;
        char *there = (char *)xdi_nccl_reach(t, c, &bytes, &behind);
        if (c->kind != kind) continue;
        if (kind == XD_COLLECTIVE_SEND && there != c->send)
            XD_TRY(xdi_nccl_copy(t, stream, there, c->send, bytes));
        if (kind == XD_COLLECTIVE_RECV && there != c->recv)
            XD_TRY(xdi_nccl_copy(t, stream, c->recv, there, bytes));
    }
    return XD_OK;
}

/* Starts all of a wave as one group. */
static xd_result xdi_nccl_launch(xdi_nccl *t, const xd_message *messages, int count, int wave,
                                 cudaStream_t stream, double deadline) {
    size_t bytes, behind = 0;
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int i = 0; i < count; i++) {
        const xd_collective *c = &messages[i].record;
        if (!xdi_nccl_moves(&messages[i], wave)) continue;
        void *data = xdi_nccl_reach(t, c, &bytes, &behind);
        if (c->kind == XD_COLLECTIVE_SEND) xdi_nccl_put(&batch, c->root, data, 0, (int64_t)bytes, 1);
        if (c->kind == XD_COLLECTIVE_RECV) xdi_nccl_get(&batch, c->root, data, 0, (int64_t)bytes, 1);
    }
    return xdi_nccl_end(&batch, deadline);
}

/* Moves the data of a wave: on the caller's stream, or through the mirror when some of it is the host's, and then the host
 * waits. */
static xd_result xdi_nccl_carry(xdi_nccl *t, const xd_message *messages, int count, int wave,
                                double deadline) {
    void *const given = messages[0].record.stream;
    const cudaStream_t theirs = (cudaStream_t)given;
    size_t bytes, behind = 0;
    int moving = 0;
    for (int i = 0; i < count; i++) {
        if (!xdi_nccl_moves(&messages[i], wave)) continue;
        (void)xdi_nccl_reach(t, &messages[i].record, &bytes, &behind);
        moving++;
    }
    if (moving == 0) return XD_OK;
    XD_TRY(xdi_nccl_enter(t, theirs));
    if (behind == 0) {
        XD_TRY(xdi_nccl_launch(t, messages, count, wave, theirs, deadline));
        return xdi_nccl_leave(t, theirs);
    }
    const cudaStream_t stream = t->world->stream;
    XD_TRY(xdi_nccl_leave(t, theirs)); /* buffers on the device belong to it */
    XD_TRY(xdi_nccl_widen(t, behind));
    XD_TRY(xdi_nccl_enter(t, stream));
    XD_TRY(xdi_nccl_reflect(t, messages, count, wave, XD_COLLECTIVE_SEND));
    XD_TRY(xdi_nccl_launch(t, messages, count, wave, stream, deadline));
    XD_TRY(xdi_nccl_leave(t, stream));
    /* The copies below may block inside CUDA, so nothing may be pending. */
    XD_TRY(xdi_nccl_wait(t, deadline));
    XD_TRY(xdi_nccl_reflect(t, messages, count, wave, XD_COLLECTIVE_RECV));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

/* What is not compared is one wave: on each way between two ranks data goes in the order of the lists. */
static xd_result xdi_nccl_exchange_unseen(xdi_nccl *t, xd_message *messages, int count, double deadline) {
    int refused = 0;
    for (int i = 0; i < count; i++) {
        messages[i].stage = 1;
        messages[i].their_count = messages[i].record.count;
        messages[i].their_dtype = messages[i].record.dtype;
        refused += messages[i].record.dtype == XD_DTYPE_NONE;
    }
    if (refused == 0) return xdi_nccl_carry(t, messages, count, 1, deadline);
    xdi_nccl_break(t->world, XD_ERROR_PEER, t->world_ranks[t->base.rank]); /* as in control */
    return refused == count ? XD_OK : xdi_nccl_report(t);
}

/* A pair of ranks has no common count of calls, so messages are compared only when all calls are. */
static xd_result xdi_nccl_exchange_seen(xdi_nccl *t, xd_message *messages, int count, double deadline) {
    if (t->world->compare < INT64_MAX) return xdi_nccl_exchange_unseen(t, messages, count, deadline);
    xdi_nccl_number(t, messages, count);
    for (int wave = 1;; wave++) {
        bool any;
        XD_TRY(xdi_nccl_offer(t, messages, count, wave, &any, deadline));
        if (!any) return XD_OK;
        XD_TRY(xdi_nccl_carry(t, messages, count, wave, deadline));
    }
}

static xd_result xdi_nccl_exchange_all(xd_transport *transport, xd_message *messages, int count,
                                       double deadline) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_control call;
    memset(&call, 0, sizeof call);
    call.kind = (uint32_t)messages[0].record.kind;
    call.dtype = (uint32_t)messages[0].record.dtype;
    call.count = (uint64_t)messages[0].record.count;
    xdi_nccl_note(t, &call);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_exchange_seen(t, messages, count, deadline);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* >>nccl/capture.c */

/* Streams that are being captured: a call becomes part of the graph, or is refused with nothing lost. */

static bool xdi_nccl_is_message(const xd_collective *c) {
    return c->kind == XD_COLLECTIVE_SEND || c->kind == XD_COLLECTIVE_RECV;
}

/* Whether a call works on the caller's stream, not on the world's alone. */
static bool xdi_nccl_uses_stream(const xd_collective *next) {
    return next && (xdi_nccl_is_message(next) || xdi_nccl_is_moving((uint32_t)next->kind));
}

/* What keeps a call out of a graph; NULL: nothing. */
static const char *xdi_nccl_obstacle(const xdi_nccl *t, const xd_collective *next) {
    int64_t send = 0, recv = 0;
    if (!xdi_nccl_uses_stream(next)) return "the host waits for its peers";
    const bool is_message = xdi_nccl_is_message(next);
    if (is_message ? t->world->compare == INT64_MAX : xdi_nccl_compares(t, next))
        return "the ranks compare it, and the host waits for that (xd_nccl_desc.compare)";
    if (is_message)
        *(next->kind == XD_COLLECTIVE_SEND ? &send : &recv) = next->count;
    else
        xdi_nccl_extents(t, next, &send, &recv);
    if (xdi_nccl_on_host(t, next->send, send) || xdi_nccl_on_host(t, next->recv, recv))
        return "its memory is the host's, and the host waits for copies of it";
    return NULL;
}

/* Asks CUDA only what a capture allows. A fork for a context without a GPU works on the world's own stream. */
static xd_result xdi_nccl_admit_on(xdi_nccl *t, const xd_collective *next, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id;
    const cudaError_t code = xdi_nccl_capture_info(stream, &status, &id);
    if (code != cudaSuccess) {
        cudaGetLastError(); /* if it is another error, the call reports it */
        XD_REQUIRE(t->base.ctx, code != cudaErrorStreamCaptureImplicit || !xdi_nccl_uses_stream(next),
                   XD_ERROR_UNSUPPORTED,
                   "the legacy stream cannot be used while a blocking stream is captured");
        return XD_OK;
    }
    if (status == cudaStreamCaptureStatusNone) return XD_OK;
    XD_REQUIRE(t->base.ctx, status == cudaStreamCaptureStatusActive, XD_ERROR_UNSUPPORTED,
               "the capture of the stream was invalidated by an earlier call");
    const char *obstacle = xdi_nccl_obstacle(t, next);
    XD_REQUIRE(t->base.ctx, !obstacle, XD_ERROR_UNSUPPORTED, "a captured stream cannot record this call: %s",
               obstacle);
    return XD_OK;
}

static bool xdi_nccl_is_recording(xd_transport *transport) {
    const xdi_nccl *t = (const xdi_nccl *)transport;
    const xd_ctx_desc *settings = xd_ctx_settings(transport->ctx);
    const bool has_device = settings->kernels && settings->kernels->device == XD_DEVICE_CUDA;
    xdi_nccl_scope scope;
    bool recording = false;
    if (t->world->failure != XD_OK || !has_device) return false;
    if (xdi_nccl_scope_begin(&scope, t->world->device) == cudaSuccess)
        recording = xdi_nccl_capture_of(t, (cudaStream_t)settings->stream) != 0;
    xdi_nccl_scope_end(&scope);
    return recording;
}

static xd_result xdi_nccl_admit_call(xd_transport *transport, const xd_collective *next) {
    xdi_nccl *t = (xdi_nccl *)transport;
    const xd_ctx_desc *settings = xd_ctx_settings(transport->ctx);
    void *const given = next && next->stream ? next->stream : settings->stream;
    const bool has_device = settings->kernels && settings->kernels->device == XD_DEVICE_CUDA;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK || !has_device) return XD_OK;
    xd_result result = XD_OK;
    if (xdi_nccl_scope_begin(&scope, t->world->device) == cudaSuccess)
        result = xdi_nccl_admit_on(t, next, (cudaStream_t)given);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* >>nccl/handle.c */

/* Handles on groups: made by joining, splitting and forking, and their table of calls. */

static xd_result xdi_nccl_create(xdi_nccl_world *world, int size, int rank, xdi_nccl **out);

/* Joins the communicator of `id`. */
static xd_result xdi_nccl_join(xdi_nccl *t, const ncclUniqueId *id, double deadline) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t code = ncclCommInitRankConfig(&t->comm, t->base.size, *id, t->base.rank, &config);
    return xdi_nccl_settle(t, code, deadline);
}

/* The first member creates an id and sends it to the others; `members` NULL: all. NCCL has a split too, but ranks outside the
 * group would have to call it as well. */
static xd_result xdi_nccl_hand_on(xdi_nccl *t, const int *members, int size, int rank, ncclUniqueId *id,
                                  double deadline) {
    const cudaStream_t stream = t->world->stream;
    const size_t bytes = sizeof *id;
    if (rank == 0) {
        const ncclResult_t code = ncclGetUniqueId(id);
        if (code != ncclSuccess) return xdi_nccl_fault(t, code);
        XD_TRY(xdi_nccl_copy(t, stream, t->world->mirror, id, bytes));
    }
    XD_TRY(xdi_nccl_enter(t, stream));
    xdi_nccl_batch batch = xdi_nccl_begin(t, stream);
    for (int r = 1; r < size && rank == 0; r++)
        xdi_nccl_put(&batch, members ? members[r] : r, t->world->mirror, 0, 1, bytes);
    if (rank > 0) xdi_nccl_get(&batch, members ? members[0] : 0, t->world->mirror, 0, 1, bytes);
    XD_TRY(xdi_nccl_end(&batch, deadline));
    XD_TRY(xdi_nccl_leave(t, stream));
    XD_TRY(xdi_nccl_wait(t, deadline));
    if (rank == 0) return XD_OK;
    XD_TRY(xdi_nccl_copy(t, stream, id, t->world->mirror, bytes));
    XD_TRY(xdi_nccl_leave(t, stream));
    return xdi_nccl_wait(t, deadline);
}

static void xdi_nccl_destroy(xd_transport *transport);

static xd_result xdi_nccl_split_off(xdi_nccl *t, const int *members, int size, int rank, double deadline,
                                    xd_transport **out) {
    xdi_nccl *child = NULL;
    ncclUniqueId id;
    XD_TRY(xdi_nccl_create(t->world, size, rank, &child));
    for (int r = 0; r < size; r++) child->world_ranks[r] = t->world_ranks[members[r]];
    xd_result result = xdi_nccl_hand_on(t, members, size, rank, &id, deadline);
    if (result == XD_OK) result = xdi_nccl_join(child, &id, deadline);
    if (result == XD_OK)
        *out = &child->base;
    else
        xdi_nccl_destroy(&child->base);
    return result;
}

static xd_result xdi_nccl_split(xd_transport *transport, const int *members, int size, int rank,
                                double deadline, xd_transport **out) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_split_off(t, members, size, rank, deadline, out);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* The same ranks, and the world's stream and memory on the device: calls of both come from one thread, in one order. */
static xd_result xdi_nccl_fork_for(xdi_nccl *t, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_nccl *twin = NULL;
    const int n = t->base.size, rank = t->base.rank;
    ncclUniqueId id;
    XD_TRY(xdi_nccl_pass_on(t, xdi_nccl_create(t->world, n, rank, &twin)));
    memcpy(twin->world_ranks, t->world_ranks, (size_t)n * sizeof *t->world_ranks);
    twin->base.ctx = t->base.ctx; /* whose errors these are */
    xd_result result = xdi_nccl_hand_on(t, NULL, n, rank, &id, deadline);
    if (result == XD_OK) result = xdi_nccl_join(twin, &id, deadline);
    if (result != XD_OK) {
        xdi_nccl_destroy(&twin->base);
        return result;
    }
    twin->base.ctx = ctx;
    *out = &twin->base;
    return XD_OK;
}

static xd_result xdi_nccl_fork(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xdi_nccl_scope scope;
    if (t->world->failure != XD_OK) return xdi_nccl_report(t);
    xd_result result = xdi_nccl_begin_call(t, &scope);
    if (result == XD_OK) result = xdi_nccl_fork_for(t, ctx, deadline, out);
    xdi_nccl_scope_end(&scope);
    return result;
}

/* What follows ends things, and does so without the scope when CUDA refuses it. */
static void xdi_nccl_fail(xd_transport *transport, xd_result result, int culprit) {
    xdi_nccl_world *world = ((xdi_nccl *)transport)->world;
    xdi_nccl_scope scope;
    (void)xdi_nccl_scope_begin(&scope, world->device);
    xdi_nccl_break(world, result, culprit);
    xdi_nccl_scope_end(&scope);
}

static void xdi_nccl_abort(xd_transport *transport) {
    const xdi_nccl *t = (const xdi_nccl *)transport;
    xdi_nccl_fail(transport, XD_ERROR_PEER, t->world_ranks[transport->rank]);
}

/* Pending work gets the time of one collective; then the communicator is aborted. */
static void xdi_nccl_close(xdi_nccl *t) {
    const double deadline = xd_now(t->base.ctx) + xd_ctx_settings(t->base.ctx)->timeout_seconds;
    if (t->comm && xdi_nccl_wait(t, deadline) == XD_OK &&
        xdi_nccl_settle(t, ncclCommFinalize(t->comm), deadline) == XD_OK)
        ncclCommDestroy(t->comm);
    t->comm = NULL; /* a failure has aborted it */
}

static void xdi_nccl_release_world(xdi_nccl_world *world) {
    const xd_device_ops *memory = &xd_ctx_kernels(world->ctx)->memory;
    if (world->groups || world->is_held) return;
    const cudaEvent_t events[] = { world->brought, world->joined, world->added[0], world->added[1] };
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    if (world->adds) cudaStreamDestroy(world->adds);
    if (world->stream) cudaStreamDestroy(world->stream);
    xdi_nccl_mark_destroy(&world->spare);
    memory->release(world->ctx, world->mirror);
    memory->release(world->ctx, world->staging);
    xd_release(world->ctx, world);
}

static void xdi_nccl_destroy(xd_transport *transport) {
    xdi_nccl *t = (xdi_nccl *)transport;
    xd_ctx *ctx = t->world->ctx; /* a forked handle's own has no device */
    xdi_nccl **at = &t->world->groups;
    xdi_nccl_scope scope;
    (void)xdi_nccl_scope_begin(&scope, t->world->device);
    xdi_nccl_close(t);
    while (*at != t) at = &(*at)->next;
    *at = t->next;
    xdi_nccl_release_world(t->world);
    xdi_nccl_mark_destroy(&t->last);
    if (t->records) cudaFreeHost(t->records);
    xd_ctx_kernels(ctx)->memory.release(ctx, t->arrived);
    xd_release(ctx, (void *)t->pieces);
    xd_release(ctx, t->leaves);
    xd_release(ctx, t->counts);
    xd_release(ctx, t->begins);
    xd_release(ctx, t->world_ranks);
    xd_release(ctx, t);
    xdi_nccl_scope_end(&scope);
}

static const xd_transport_ops xdi_nccl_ops = { "nccl",
                                               xdi_nccl_control,
                                               xdi_nccl_execute,
                                               xdi_nccl_split,
                                               xdi_nccl_abort,
                                               xdi_nccl_destroy,
                                               NULL,
                                               true,
                                               xdi_nccl_fail,
                                               xdi_nccl_fork,
                                               xdi_nccl_exchange_all,
                                               NULL,
                                               true,
                                               NULL,
                                               xdi_nccl_admit_call,
                                               xdi_nccl_is_recording };

/* A handle without a communicator; the caller fills in world_ranks. */
static xd_result xdi_nccl_create(xdi_nccl_world *world, int size, int rank, xdi_nccl **out) {
    xd_ctx *ctx = world->ctx;
    const size_t n = (size_t)size;
    void *records = NULL;
    xdi_nccl *t = (xdi_nccl *)xd_allocate(ctx, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    t->base.ops = &xdi_nccl_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = size;
    t->world = world;
    t->next = world->groups;
    world->groups = t;
    t->world_ranks = (int *)xd_allocate(ctx, n * sizeof *t->world_ranks);
    t->base.world_ranks = t->world_ranks;
    t->begins = (int64_t *)xd_allocate(ctx, n * sizeof *t->begins);
    t->counts = (int64_t *)xd_allocate(ctx, n * sizeof *t->counts);
    t->leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *t->leaves);
    t->pieces = (const void **)xd_allocate(ctx, n * sizeof *t->pieces);
    t->arrived = (xd_control *)xd_ctx_kernels(ctx)->memory.allocate(ctx, 2 * n * sizeof *t->arrived);
    cudaError_t code = xdi_nccl_mark_create(&t->last);
    if (code == cudaSuccess) code = cudaMallocHost(&records, 2 * n * sizeof *t->records);
    t->records = (xd_control *)records;
    if (!t->world_ranks || !t->begins || !t->counts || !t->leaves || !t->pieces || !t->arrived ||
        code != cudaSuccess) {
        xdi_nccl_destroy(&t->base);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks: CUDA says %s", size,
                       cudaGetErrorString(code));
    }
    *out = t;
    return XD_OK;
}

/* >>nccl/join.c */

/* Joining: the id, the memory of a world, what must be the same on all ranks, and the public functions. */

/* ---- the id ---- */

XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out) {
    if (!ctx) return XD_ERROR_ARGUMENT;
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "out is NULL");
    const ncclResult_t code = ncclGetUniqueId(out);
    return code == ncclSuccess ? XD_OK : xdi_nccl_refuse(ctx, code, NULL);
}

static xd_result xdi_nccl_learn_id(xd_ctx *ctx, const xd_nccl_desc *d, ncclUniqueId *id, double deadline) {
    if (d->id) {
        *id = *d->id;
        return XD_OK;
    }
    XD_REQUIRE(ctx, sizeof *id == XDI_NCCL_ID, XD_ERROR_UNSUPPORTED,
               "an id of this NCCL has %d bytes, not %d", (int)sizeof *id, (int)XDI_NCCL_ID);
    if (d->rank == 0) XD_TRY(xd_nccl_unique_id(ctx, id));
    return d->size == 1 ? XD_OK : xdi_nccl_exchange(ctx, d, id, deadline);
}

/* ---- joining ---- */

static xd_result xdi_nccl_validate(xd_ctx *ctx, const xd_nccl_desc *d) {
    const xd_kernels *kernels = xd_ctx_settings(ctx)->kernels; /* NULL: the CPU's */
    XD_REQUIRE(ctx, d->size >= 1 && d->rank >= 0 && d->rank < d->size, XD_ERROR_ARGUMENT,
               "rank %d is outside [0, %d)", d->rank, d->size);
    XD_REQUIRE(ctx, d->size == 1 || d->id || d->file || (d->host && d->port), XD_ERROR_ARGUMENT,
               "%d ranks need an id, a file, or a host and a port", d->size);
    if (d->size > 1 && !d->id) XD_TRY(xdi_nccl_check_secret(ctx, d));
    XD_REQUIRE(ctx, d->compare >= -1, XD_ERROR_ARGUMENT, "compare is %lld", (long long)d->compare);
    XD_REQUIRE(ctx, kernels && kernels->device == XD_DEVICE_CUDA, XD_ERROR_STATE,
               "xd_comm_nccl comes after xd_cuda_create");
    return XD_OK;
}

/* The memory of a world, and the device that it is on. */
static xd_result xdi_nccl_place(xdi_nccl_world *world) {
    xd_ctx *ctx = world->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    struct cudaPointerAttributes attributes;
    world->staging = (char *)memory->allocate(ctx, world->staging_bytes);
    world->mirror = (char *)memory->allocate(ctx, XDI_NCCL_MIRROR);
    XD_REQUIRE(ctx, world->staging && world->mirror, XD_ERROR_MEMORY,
               "the GPU has no room for %lld bytes of staging", (long long)world->staging_bytes);
    world->mirror_bytes = XDI_NCCL_MIRROR;
    const cudaError_t code = cudaPointerGetAttributes(&attributes, world->staging);
    XD_REQUIRE(ctx, code == cudaSuccess, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    world->device = attributes.device;
    return XD_OK;
}

static xd_result xdi_nccl_furnish(xdi_nccl_world *world) {
    cudaEvent_t *const events[] = { &world->brought, &world->joined, &world->added[0], &world->added[1] };
    cudaError_t code = cudaStreamCreateWithFlags(&world->stream, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&world->adds, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = xdi_nccl_mark_create(&world->spare);
    for (size_t i = 0; i < sizeof events / sizeof *events && code == cudaSuccess; i++)
        code = cudaEventCreateWithFlags(events[i], cudaEventDisableTiming);
    XD_REQUIRE(world->ctx, code == cudaSuccess, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    return XD_OK;
}

/* Ranks may run on different processors, and the bits of losses depend on the CPU level: all use the lowest, and
 * matrix products of one origin. The same exchange compares the settings that must be the same on all ranks. */
static xd_result xdi_nccl_agree(xdi_nccl *t, double deadline) {
    xdi_nccl_world *world = t->world;
    uint64_t lowest = (uint64_t)xd_ctx_settings(t->base.ctx)->cpu;
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = lowest;
    mine.extra = (uint64_t)world->staging_bytes;
    mine.layout = (uint64_t)world->compare;
    mine.leaves = xd_float_state();
    mine.dtype = xd_ctx_products(t->base.ctx);
    XD_TRY(xdi_nccl_gather_records(t, &mine, deadline));
    for (int r = 0; r < t->base.size; r++) {
        const xd_control *theirs = &t->records[r], *first = &t->records[0];
        if (theirs->count < lowest) lowest = theirs->count;
        XD_REQUIRE(t->base.ctx, theirs->extra == first->extra && theirs->layout == first->layout,
                   XD_ERROR_MISMATCH,
                   "rank %d passed staging_bytes %llu and compare %lld, rank 0 %llu and %lld", r,
                   (unsigned long long)theirs->extra, (long long)theirs->layout,
                   (unsigned long long)first->extra, (long long)first->layout);
        XD_TRY(xd_float_state_compare(t->base.ctx, r, (unsigned)theirs->leaves, (unsigned)first->leaves));
    }
    for (int r = 0; r < t->base.size; r++) xd_ctx_meet_products(t->base.ctx, r, t->records[r].dtype);
    xd_ctx_set_cpu(t->base.ctx, (xd_cpu_level)lowest);
    return XD_OK;
}

static xd_result xdi_nccl_enter_world(xdi_nccl *t, const xd_nccl_desc *d) {
    xd_ctx *ctx = t->base.ctx;
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    ncclUniqueId id;
    XD_TRY(xdi_nccl_learn_id(ctx, d, &id, deadline));
    XD_TRY(xdi_nccl_join(t, &id, deadline));
    return xdi_nccl_agree(t, deadline);
}

/* The first handle of a world, which then holds it; NULL and the world remains after an error. */
static xd_result xdi_nccl_found(xdi_nccl_world *world, const xd_nccl_desc *d, xdi_nccl **out) {
    xdi_nccl *t = NULL;
    xdi_nccl_scope scope;
    const cudaError_t code = xdi_nccl_scope_begin(&scope, world->device);
    xd_result result = code == cudaSuccess
                           ? xdi_nccl_furnish(world)
                           : XD_FAIL(world->ctx, XD_ERROR_DEVICE, "CUDA: %s", cudaGetErrorString(code));
    if (result == XD_OK) result = xdi_nccl_create(world, d->size, d->rank, &t);
    if (result == XD_OK) {
        for (int r = 0; r < d->size; r++) t->world_ranks[r] = r;
        result = xdi_nccl_enter_world(t, d);
        if (result != XD_OK) xdi_nccl_destroy(&t->base);
    }
    xdi_nccl_scope_end(&scope);
    *out = result == XD_OK ? t : NULL;
    return result;
}

XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out) {
    if (!ctx) return XD_ERROR_ARGUMENT;
    XD_REQUIRE(ctx, desc, XD_ERROR_ARGUMENT, "desc is NULL");
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "out is NULL");
    xd_nccl_desc d = *desc;
    if (!d.staging_bytes) d.staging_bytes = XDI_NCCL_STAGING;
    XD_TRY(xdi_nccl_validate(ctx, &d));
    xd_ctx_set_rank(ctx, d.rank);
    xdi_nccl *t = NULL;
    xdi_nccl_world *world = (xdi_nccl_world *)xd_allocate(ctx, sizeof *world);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", d.size);
    world->ctx = ctx;
    world->staging_bytes = d.staging_bytes;
    world->compare = d.compare == 0 ? (int64_t)XDI_NCCL_COMPARED : d.compare < 0 ? 0 : d.compare;
    world->is_held = true;
    xd_result result = xdi_nccl_place(world);
    if (result == XD_OK) result = xdi_nccl_found(world, &d, &t);
    world->is_held = false;
    if (result == XD_OK) return xd_comm_create(ctx, &t->base, out);
    xdi_nccl_release_world(world);
    return result;
}

#endif

#endif
/* xdistill sha256 0efb306960beba74f0c988a38ba07e264e87c15e5db124992a9bbb4f32e193c1 */
