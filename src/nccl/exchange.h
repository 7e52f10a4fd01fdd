#ifndef XDI_NCCL_EXCHANGE_H
#define XDI_NCCL_EXCHANGE_H

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

#endif
