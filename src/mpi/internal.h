#ifndef XDI_MPI_INTERNAL_H
#define XDI_MPI_INTERNAL_H

/* Two ranks of a group exchange messages in the order of their calls, and MPI preserves the order of messages
 * with the same tag: so a group needs a tag for each kind of message, and messages need no number. Group ids
 * increase and are never used twice by one rank.
 *
 * The rank that finds the world broken sends a notice to all others, which poll for it while they wait and
 * before each call. So a rank that arrives too late learns that the others do not wait for it any more.
 *
 * At a deadline the rank that did not come may itself wait for another one, in another group or an earlier message. So a
 * notice of a deadline says whom its sender waits for, whoever waits answers with one of its own, and the culprit is the
 * rank that is waited for and says nothing, or when all say something the one that most wait for.
 *
 * A handle that is forked for another thread has a group id, staging and scratch of its own; the fate of the world, which it
 * shares, is under a lock. Groups are numbered on one thread, so a forked handle is not split.
 *
 * A world that is made of those that are left of another uses the same communicator with other tags. */

enum {
    XDI_MPI_NOTICE = 0, /* the tag of notices; groups begin at XDI_MPI_CHANNELS */
    XDI_MPI_CONTROL = 0,
    XDI_MPI_DATA,
    XDI_MPI_OFFER, /* send and recv: what the sender passes */
    XDI_MPI_REPLY, /* send and recv: what the receiver expects; later, that it has the data */
    XDI_MPI_CHANNELS,
    XDI_MPI_ASK = 1, /* tags of no group, as notices: that a rank goes on with those that live, or does not */
    XDI_MPI_LIST,    /* and with whom */
    XDI_MPI_CHUNK = 1 << 30,         /* bytes of one message: counts of MPI are int */
    XDI_MPI_STAGING = 1 << 20,       /* bytes for the terms of a sum, at least */
    XDI_MPI_STAGING_RANK = 1 << 16,  /* the same for each rank */
    XDI_MPI_STAGING_LEAST = 1 << 10, /* for each rank: an element of every node that its forest can have */
    XDI_MPI_SHORT = 4096, /* bytes up to which every rank computes the whole sum of an all_reduce */
    XDI_MPI_SPIN = 200,   /* polls before the core is yielded after each further one */
    XDI_MPI_NAP = 20000   /* nanoseconds that a forked handle, whose thread is its own, sleeps instead */
};

/* Of the second after a deadline: for notices of ranks that wait, then for messages that have begun to arrive. */
#define XDI_MPI_ANSWER_SECONDS 0.5
#define XDI_MPI_ARRIVE_SECONDS 0.5

/* What is known of a rank whose world is broken. */
enum { XDI_MPI_SILENT = 0, XDI_MPI_ASKS, XDI_MPI_GONE };

/* What ranks tell each other before there is a world. */
typedef struct xdi_mpi_entry {
    uint64_t staging_bytes;
    int64_t compare;
    int32_t cpu;       /* xd_cpu_level */
    int32_t result;    /* xd_result of what this rank prepared alone */
    uint32_t floats;   /* xd_float_state */
    uint32_t products; /* xd_ctx_products */
} xdi_mpi_entry;

/* What the handles of one world share on this rank. */
typedef struct xdi_mpi_world {
    MPI_Comm comm;
    int size, rank;
    int *seats;    /* [size], behind `waits_for`: ranks of comm */
    int first_tag; /* of its own; so many tags each world has: */
    int tags;
    int32_t *states;      /* [size], behind `seats`: XDI_MPI_SILENT and so on */
    int32_t *list;        /* [size], behind them: who is in the next world; and [size] that are being sent */
    int32_t answers[2];   /* to XDI_MPI_ASK, being sent: it asks, it is gone */
    int next_group;       /* above every id this rank has used */
    int groups;           /* ids that the tags of this MPI allow */
    pthread_mutex_t lock; /* of what follows, up to `accused` but for `said` and `heard` */
    int holders;          /* handles */
    xd_result failure;    /* XD_OK, or what broke the world; like culprit, written once */
    int culprit;          /* world rank */
    bool in_flight;       /* MPI may still access memory of this world */
    int32_t notice[2];    /* failure and culprit, being sent to the others */
    xdi_mpi_entry said, *heard; /* of this rank; [size], of all: behind this struct */
    int32_t *waits_for;         /* [size], behind them: whom each waits for, by its notice; -1: none came */
    int32_t accused;            /* by the first notice of a deadline; -1: there is none yet */
    char *staging;              /* terms of a sum: a tile of each node of every rank's forest, in order */
    int64_t staging_bytes;
} xdi_mpi_world;

/* The data that this rank and one other exchange. */
typedef struct xdi_mpi_flow {
    const char *out;
    char *in;
    size_t out_bytes, in_bytes;
} xdi_mpi_flow;

/* What the two ranks of a message tell each other. */
typedef struct xdi_mpi_offer {
    int64_t count;
    int32_t dtype, unused;
} xdi_mpi_offer;

/* The messages to one rank, or from one, of which one is under way. */
typedef struct xdi_mpi_lane {
    xdi_mpi_offer mine, theirs;
    xd_message *message; /* NULL: none is left */
    int step;
    char *data; /* what has not been moved yet */
    size_t left;
} xdi_mpi_lane;

typedef struct xdi_mpi {
    xd_transport base;
    xdi_mpi_world *world;
    int group;
    int *world_ranks; /* [size], and ranks of world->comm */
    xd_control mine;
    xd_control *records;   /* [size], of the last control round */
    xdi_mpi_flow *flows;   /* [size] */
    MPI_Request *requests; /* [2 size], of the pending messages */
    MPI_Status *statuses;  /* [2 size], scratch: some compilers take MPICH's "ignore" for an array of none */
    int *peers;            /* [2 size], the group rank at the other end */
    bool *arrives;         /* [2 size], it receives */
    int posted;            /* requests */
    xdi_mpi_lane *lanes;   /* [2 size]: to rank r at 2 r, from it at 2 r + 1 */
    int64_t *begins;       /* [size], first element of each rank's block of a sum */
    int64_t *counts;       /* [size], and its length */
    xd_leaves *leaves;     /* [size] */
    const void **pieces;   /* [size] */
    int64_t calls;         /* collectives so far */
    char *staging;         /* the world's, or its own: */
    bool is_fork;
} xdi_mpi;

#endif
