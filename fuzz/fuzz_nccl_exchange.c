/* The input is what a stranger sends in the exchange of NCCL's id: to rank 0, or as rank 0's answer to another rank. The first byte
 * says which, and where a tag that only the secret makes is put right, so that what lies behind it is reached too. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* sockets */
#endif
#define XDISTILL_NCCL_EXCHANGE
#include "fuzz.h"

#include "xdistill_nccl.h"

enum { SIZE = 3, TO_CALLER = 1, KNOWS_SECRET = 2 };
static const char secret[] = "twenty letters of it";

static xd_nccl_desc desc_of(int rank) {
    xd_nccl_desc d;
    memset(&d, 0, sizeof d);
    d.rank = rank;
    d.size = SIZE;
    d.host = "nowhere";
    d.port = "1";
    d.secret = secret;
    return d;
}

/* Both ends of a connection: the line's own, and the stranger's. */
static int open_line(xdi_nccl_line *l) {
    int ends[2];
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    xdi_nccl_pick_up(l, ends[0]);
    FUZZ_CHECK(l->socket >= 0);
    return ends[1];
}

/* Sends at most `most` bytes of what is left of the input, and tells how many. */
static size_t send_part(int socket, const uint8_t **data, size_t *bytes, size_t most) {
    const size_t part = *bytes < most ? *bytes : most;
    FUZZ_CHECK(part == 0 || send(socket, *data, part, MSG_NOSIGNAL) == (ssize_t)part);
    *data += part;
    *bytes -= part;
    return part;
}

/* Takes what the line has sent. */
static void drain(int socket) {
    unsigned char taken[XDI_NCCL_REPLY];
    while (recv(socket, taken, sizeof taken, MSG_DONTWAIT) > 0) {
    }
}

/* Rank 0: hello, tag, a byte; each as far as the input goes. */
static void ask_server(const uint8_t *data, size_t bytes, bool knows) {
    static const unsigned char id[XDI_NCCL_ID] = { 7 };
    unsigned char nonces[SIZE * XDI_NCCL_NONCE] = { 0 }, tag[XDI_NCCL_TAG];
    bool held[SIZE] = { false }, served[SIZE] = { false }, goes_on = true;
    const xd_nccl_desc d = desc_of(0);
    xdi_nccl_line line;
    xdi_nccl_server s;
    memset(&s, 0, sizeof s);
    s.ctx = fuzz_ctx();
    s.desc = &d;
    s.id = id;
    s.left = SIZE - 1;
    s.nonces = nonces;
    s.held = held;
    s.served = served;
    const int stranger = open_line(&line);
    xdi_nccl_expect(&line, 0, XDI_NCCL_HELLO);
    while (goes_on) {
        if (line.step == 1 && knows) {
            xdi_nccl_sign(secret, 'r', &line, NULL, 0, tag);
            FUZZ_CHECK(send(stranger, tag, sizeof tag, MSG_NOSIGNAL) == (ssize_t)sizeof tag);
        } else if (send_part(stranger, &data, &bytes, line.receives) == 0) {
            break;
        }
        const int moved = xdi_nccl_pump(&line);
        FUZZ_CHECK(moved >= 0);
        if (moved == 0) break;
        goes_on = xdi_nccl_answer(&s, &line);
        if (goes_on) (void)xdi_nccl_pump(&line);
        drain(stranger);
    }
    for (int r = 0; r < SIZE; r++) FUZZ_CHECK(!served[r] || (held[r] && r > 0));
    FUZZ_CHECK(!held[0] && s.left >= SIZE - 2 && (knows || (s.left == SIZE - 1 && !held[1] && !held[2])));
    xdi_nccl_hang_up(&line);
    close(stranger);
}

/* Rank 1: a challenge, and an answer. */
static void answer_caller(const uint8_t *data, size_t bytes, bool knows) {
    unsigned char id[XDI_NCCL_ID] = { 0 }, reply[XDI_NCCL_REPLY];
    const xd_nccl_desc d = desc_of(1);
    xdi_nccl_caller c;
    bool over = false;
    memset(&c, 0, sizeof c);
    c.ctx = fuzz_ctx();
    c.desc = &d;
    c.id = id;
    c.count = 1;
    xdi_nccl_line *l = &c.lines[0];
    const int stranger = open_line(l);
    xdi_nccl_expect(l, 0, XDI_NCCL_NONCE);
    if (send_part(stranger, &data, &bytes, XDI_NCCL_NONCE) == XDI_NCCL_NONCE && xdi_nccl_pump(l) == 1) {
        FUZZ_CHECK(xdi_nccl_go_on(&c, l, &over) == XD_OK && !over);
        (void)xdi_nccl_pump(l);
        drain(stranger);
        memset(reply, 0, sizeof reply);
        memcpy(reply, data, bytes < sizeof reply ? bytes : sizeof reply);
        if (knows) xdi_nccl_sign(secret, '0', l, reply, 4 + XDI_NCCL_ID, reply + 4 + XDI_NCCL_ID);
        FUZZ_CHECK(send(stranger, reply, sizeof reply, MSG_NOSIGNAL) == (ssize_t)sizeof reply);
        FUZZ_CHECK(xdi_nccl_pump(l) == 1);
        const xd_result result = xdi_nccl_go_on(&c, l, &over);
        FUZZ_CHECK(result == XD_OK || (result == XD_ERROR_MISMATCH && knows));
        FUZZ_CHECK(over ? c.doubts && id[0] == 0 : knows);
    }
    xdi_nccl_hang_up(l);
    close(stranger);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes == 0) return 0;
    const bool knows = (data[0] & KNOWS_SECRET) != 0;
    if (data[0] & TO_CALLER)
        answer_caller(data + 1, bytes - 1, knows);
    else
        ask_server(data + 1, bytes - 1, knows);
    return 0;
}
