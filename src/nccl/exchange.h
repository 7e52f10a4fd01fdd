#ifndef XDI_NCCL_EXCHANGE_H
#define XDI_NCCL_EXCHANGE_H

/* The exchange of the id.
 *
 * Every message is bound by a keyed hash to the secret, to its direction and to random numbers of both sides, so that
 * a recorded one is worth nothing, and neither the secret nor anything that replaces it is ever sent:
 *
 *     rank r -> 0    hello = protocol, r, size, nonce of this process
 *     0 -> r         challenge = another nonce
 *     r -> 0         tag of 'r', hello, challenge
 *     0 -> r         verdict, id, tag of '0', hello, challenge, verdict, id
 *     r -> 0         one byte: it has the id
 *
 * Rank 0 serves all connections at once and waits for none of them. A rank that has to call again shows the same
 * nonce, so that its place remains its own. By file the same numbers go from FILE.RANK to FILE. */

enum {
    XDI_NCCL_ID = 128,                               /* bytes of an id */
    XDI_NCCL_NONCE = 16,                             /* of a random number that is used once */
    XDI_NCCL_TAG = 32,                               /* of a keyed hash */
    XDI_NCCL_BLOCK = 64,                             /* of the hash's blocks */
    XDI_NCCL_HELLO = 28,                             /* of a rank's question: protocol, rank, size, nonce */
    XDI_NCCL_REPLY = 4 + XDI_NCCL_ID + XDI_NCCL_TAG, /* of rank 0's answer: verdict, id, keyed hash */
    XDI_NCCL_SECRET = 16,                            /* least bytes of a secret */
    XDI_NCCL_DOORS = 8,                              /* addresses of rank 0's machine */
    XDI_NCCL_SPARE = 64, /* connections that rank 0 has room for beyond one a rank */
    XDI_NCCL_TURN = 10   /* milliseconds that a turn of waiting lasts at most */
};

typedef enum xdi_nccl_verdict {
    XDI_NCCL_GIVEN,
    XDI_NCCL_TAKEN,      /* another process has that rank */
    XDI_NCCL_OTHER_SIZE, /* in place of the id: the size of rank 0's world */
} xdi_nccl_verdict;

/* One connection, and what is still to be sent and then received before its next step. */
typedef struct xdi_nccl_line {
    int socket; /* -1: closed */
    int step;   /* steps done */
    size_t sent, sends, received, receives;
    double since;   /* of a rank: when it called */
    int64_t number; /* of rank 0: calls before this one */
    unsigned char hello[XDI_NCCL_HELLO], challenge[XDI_NCCL_NONCE];
    unsigned char out[XDI_NCCL_REPLY], in[XDI_NCCL_REPLY];
} xdi_nccl_line;

#endif
