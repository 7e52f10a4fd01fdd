/* xdistill_mpi.h - the processes of an MPI job as a world of xdistill. License: see xdistill.h.

   In *one* C or C++ file:                            Everywhere else:
       #define XDISTILL_IMPLEMENTATION                          #include "xdistill.h"
       #include "xdistill.h"                                    #include "xdistill_mpi.h"
       #include "xdistill_mpi.h"                      mpicc -std=c99 app.c -lm -lpthread

       MPI_Init(&argc, &argv);
       xd_mpi_desc desc = { .mpi = MPI_COMM_WORLD };
       xd_comm_mpi(ctx, &desc, &world);               examples/05_mpi.c is a whole program
       ...
       xd_comm_destroy(world);
       MPI_Finalize();

   All data goes through non-blocking point-to-point messages, so that every wait has a deadline. Sums are
   computed here, in rank order, by the functions of kernel/reduce.h: the bits are those of the threads
   transport, with any MPI library. Data is memory of the host: on contexts with a GPU, memory of the GPU
   is refused (UNSUPPORTED); xdistill_nccl.h moves it. Needs MPI 3.0. The thread that owns the context makes the MPI
   calls: MPI_THREAD_SINGLE is enough when it is the main thread. Where MPI_Init_thread has given MPI_THREAD_MULTIPLE on
   every rank, queues (xd_queue_create) have a thread and messages of their own. */
/* Generated from src/xdistill_mpi.h by tools/amalgamate.py. Edit src/, then run `make amalgamate`. */
#ifndef XDISTILL_MPI_H
#define XDISTILL_MPI_H

#if !defined(XD_VERSION_MAJOR)
#    error "include xdistill.h before xdistill_mpi.h"
#elif XD_VERSION_MAJOR != 0 || XD_VERSION_MINOR != 3
#    error "xdistill_mpi.h belongs to xdistill.h version 0.3: take both from one release"
#endif

/* The old C++ bindings are not needed and cause warnings. */
#if !defined(OMPI_SKIP_MPICXX)
#    define OMPI_SKIP_MPICXX 1
#endif
#if !defined(MPICH_SKIP_MPICXX)
#    define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#if defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5
#    include <mpi-ext.h>
#endif
#if defined(OMPI_HAVE_MPI_EXT_FTMPI) && OMPI_HAVE_MPI_EXT_FTMPI
#    define XDI_MPI_RECOVERS 1 /* it tells who has died, and the others go on: ULFM */
#endif

/* >>mpi/comm_mpi */

/* How to join a world. Zero is the default of every field. */
typedef struct xd_mpi_desc {
    /* an intra-communicator, which is duplicated and not used again; unset -> MPI_COMM_WORLD */
    MPI_Comm mpi;
    /* host memory for sums, the same on all ranks, at least 1 KiB a rank; 0 -> max(1 MiB, 64 KiB a rank) */
    size_t staging_bytes;
    /* collectives of each group whose arguments are compared, the same on all ranks; 0 -> all; -1 -> none */
    int64_t compare;
} xd_mpi_desc;

/* Joins the processes of an MPI communicator into a world with its ranks. Collective over desc->mpi; waits at most
 * init_timeout_seconds. Takes staging_bytes, once for all groups that are split from the world.
 *
 *   desc   NULL -> MPI_COMM_WORLD with every default
 *   out    destroy it with xd_comm_destroy before MPI_Finalize
 *
 * The context's CPU level becomes the lowest of all ranks. Comparing and failures: docs/concepts.md.
 * Errors on every rank: ARGUMENT (staging_bytes too small, compare below -1), MISMATCH (either of them, floating-point
 * state), MEMORY (PEER on the others), PEER (MPI's own error), TIMEOUT.
 * Errors on one rank, the others get TIMEOUT: STATE (MPI is not running), ARGUMENT (MPI_COMM_NULL, an
 * inter-communicator), MEMORY for the first bytes. */
XD_API xd_result xd_comm_mpi(xd_ctx *ctx, const xd_mpi_desc *desc, xd_comm **out);


#endif

#if defined(XDISTILL_IMPLEMENTATION) && !defined(XDISTILL_MPI_IMPLEMENTED)
#define XDISTILL_MPI_IMPLEMENTED

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* >>mpi/internal */

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

/* >>mpi/world.c */

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

/* >>mpi/wait.c */

/* How a rank waits for its pending messages, and what it says when that ends early. */

/* ---- failure ---- */

/* "2" or "2,3": the world ranks at the other end of pending messages; "" without any. Returns the group rank of
 * the first, or -1. */
static int xdi_mpi_missing(xdi_mpi *t, char *text, size_t size) {
    size_t used = 0;
    int first = -1;
    text[0] = 0;
    for (int r = 0; r < t->base.size && used + 16 < size; r++) {
        bool waits = false;
        for (int i = 0; i < t->posted; i++)
            waits = waits || (t->peers[i] == r && t->requests[i] != MPI_REQUEST_NULL);
        if (!waits) continue;
        used += (size_t)snprintf(text + used, size - used, used ? ",%d" : "%d", t->world_ranks[r]);
        if (first < 0) first = r;
    }
    return first;
}

static bool xdi_mpi_awaits(const xdi_mpi *t, int world_rank) {
    bool waits = false;
    for (int i = 0; i < t->posted; i++)
        waits = waits || (t->world_ranks[t->peers[i]] == world_rank && t->requests[i] != MPI_REQUEST_NULL);
    return waits;
}

/* Whether nothing is pending. What has failed is over too. */
static bool xdi_mpi_settles(xdi_mpi *t) {
    bool all = true;
    for (int i = 0; i < t->posted; i++) {
        int done = 0;
        if (t->requests[i] == MPI_REQUEST_NULL) continue;
        const bool well = MPI_Test(&t->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS;
        if (!well && t->requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&t->requests[i]);
        all = all && (done || !well);
    }
    return all;
}

/* Ends pending messages, because the caller may free the buffers: those that have not begun to arrive are
 * cancelled, the others get some time. */
static void xdi_mpi_give_up(xdi_mpi *t) {
    const double end = xd_now(t->base.ctx) + XDI_MPI_ARRIVE_SECONDS;
    bool done = false;
    for (int i = 0; i < t->posted; i++)
        if (t->arrives[i] && t->requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&t->requests[i]);
    while (!(done = xdi_mpi_settles(t)) && xd_now(t->base.ctx) < end) sched_yield();
    for (int i = 0; i < t->posted && !done; i++) {
        if (t->requests[i] == MPI_REQUEST_NULL) continue;
        MPI_Request_free(&t->requests[i]);
        xdi_mpi_leave_in_flight(t->world);
    }
    t->posted = 0;
}

/* Reports the broken world as comm/threads_wait.c does. A rank that was waiting for the late one returns TIMEOUT, like
 * the rank whose deadline passed first; the late one itself, and every later call, returns PEER. */
static xd_result xdi_mpi_report(xdi_mpi *t, bool waiting) {
    const int culprit = t->world->culprit, me = t->world_ranks[t->base.rank];
    const bool late = t->world->failure == XD_ERROR_TIMEOUT;
    char missing[160];
    xdi_mpi_missing(t, missing, sizeof missing);
    if (!xdi_mpi_awaits(t, culprit)) snprintf(missing, sizeof missing, "%d", culprit);
    xdi_mpi_give_up(t);
    if (late && culprit == me)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit,
                               "rank %d came after the deadline: the world is broken", me);
    if (late && waiting)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, culprit,
                               "rank%s %s did not arrive before the deadline",
                               strchr(missing, ',') ? "s" : "", missing);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "rank %d %s: the world is broken", culprit,
                           late ? "did not arrive before the deadline" : "failed or left");
}

/* An error of MPI itself, in a message from or to `peer`. */
static xd_result xdi_mpi_fault(xdi_mpi *t, int code, int peer) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    const int culprit = t->world_ranks[peer];
    MPI_Error_string(code, text, &length);
    xdi_mpi_break(t->world, XD_ERROR_PEER, culprit);
    xdi_mpi_give_up(t);
    return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "messages with rank %d fail: %.200s", culprit,
                           text);
}

/* ---- waiting ---- */

/* Tests every request separately: Testall only reports whether all are complete. */
static xd_result xdi_mpi_test_each(xdi_mpi *t) {
    for (int i = 0; i < t->posted; i++) {
        int done = 0;
        const int code = MPI_Test(&t->requests[i], &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) return xdi_mpi_fault(t, code, t->peers[i]);
    }
    return XD_OK;
}

/* The request that made a test of all fail says so by its status, or when it is tested again. */
static xd_result xdi_mpi_fault_of_all(xdi_mpi *t, int code) {
    for (int i = 0; i < t->posted && code == MPI_ERR_IN_STATUS; i++) {
        const int own = t->statuses[i].MPI_ERROR;
        if (own != MPI_SUCCESS && own != MPI_ERR_PENDING) return xdi_mpi_fault(t, own, t->peers[i]);
    }
    XD_TRY(xdi_mpi_test_each(t));
    return xdi_mpi_fault(t, code, t->peers[0]);
}

/* Whether a notice could still change who is the culprit. The last rank that is silent is the culprit, unless this one is accused,
 * which may have been stopped for long: then the other has spoken before, and is about to be heard. */
static bool xdi_mpi_expects(const xdi_mpi_world *world) {
    int silent = 0;
    for (int r = 0; r < world->size; r++) silent += world->waits_for[r] < 0;
    return silent > (xdi_mpi_accusers(world, world->rank) > 0 ? 0 : 1);
}

/* A deadline has passed, here or where a notice came from. Says whom this rank waits for, and hears the others. */
static xd_result xdi_mpi_expire(xdi_mpi *t) {
    xdi_mpi_world *world = t->world;
    char missing[160];
    XD_TRY(xdi_mpi_test_each(t));
    const int first = xdi_mpi_missing(t, missing, sizeof missing);
    pthread_mutex_lock(&world->lock); /* other threads of this rank have nothing better to do meanwhile */
    if (first < 0 && world->accused < 0 && world->failure == XD_OK) {
        pthread_mutex_unlock(&world->lock);
        return XD_OK; /* the last one has just completed */
    }
    if (first >= 0 && world->failure == XD_OK && world->waits_for[world->rank] < 0) {
        xdi_mpi_notify(world, XD_ERROR_TIMEOUT, t->world_ranks[first]);
        xdi_mpi_accuse(world, world->rank, t->world_ranks[first]);
    }
    const double end = xd_now(t->base.ctx) + XDI_MPI_ANSWER_SECONDS;
    while (world->failure == XD_OK && xdi_mpi_expects(world) && xd_now(t->base.ctx) < end)
        if (!xdi_mpi_hear(world)) sched_yield();
    xdi_mpi_convict(world);
    pthread_mutex_unlock(&world->lock);
    return xdi_mpi_report(t, true);
}

static void xdi_mpi_rest(const xdi_mpi *t) {
    const struct timespec nap = { 0, XDI_MPI_NAP };
    if (t->is_fork)
        nanosleep(&nap, NULL);
    else
        sched_yield();
}

/* A turn of waiting: polls, then rests, and looks for a reason not to go on. A deadline that has passed is believed only after some
 * more turns: a process that was stopped finds first what the others have sent meanwhile, the notice that it is late above all. */
static xd_result xdi_mpi_linger(xdi_mpi *t, int *turn, int *late, double deadline) {
    if (++*turn <= XDI_MPI_SPIN) return XD_OK;
    *turn = XDI_MPI_SPIN;
    xdi_mpi_rest(t);
    if (xdi_mpi_is_told(t->world)) return xdi_mpi_expire(t);
    if (xd_now(t->base.ctx) < deadline || ++*late < XDI_MPI_SPIN) return XD_OK;
    return xdi_mpi_expire(t);
}

/* Waits for all pending messages. */
static xd_result xdi_mpi_wait(xdi_mpi *t, double deadline) {
    for (int turn = 0, late = 0;;) {
        int done = 0;
        const int code = MPI_Testall(t->posted, t->requests, &done, t->statuses);
        if (code != MPI_SUCCESS) return xdi_mpi_fault_of_all(t, code);
        if (done) break;
        XD_TRY(xdi_mpi_linger(t, &turn, &late, deadline));
    }
    t->posted = 0;
    return XD_OK;
}

/* >>mpi/collective.c */

/* Collectives: data that only moves goes as flows between this rank and each other, terms of sums tile by tile. */

/* ---- flows ---- */

static int xdi_mpi_tag(const xdi_mpi *t, int channel) {
    return t->world->first_tag + t->group * XDI_MPI_CHANNELS + channel;
}

/* Starts the next message of one direction of a flow, when there is one. */
static xd_result xdi_mpi_post(xdi_mpi *t, int peer, bool arrives, int tag) {
    xdi_mpi_flow *flow = &t->flows[peer];
    const size_t left = arrives ? flow->in_bytes : flow->out_bytes;
    const size_t bytes = left < (size_t)XDI_MPI_CHUNK ? left : (size_t)XDI_MPI_CHUNK;
    MPI_Request *request = &t->requests[t->posted];
    const int rank = t->world->seats[t->world_ranks[peer]];
    if (bytes == 0) return XD_OK;
    const int code = arrives ? MPI_Irecv(flow->in, (int)bytes, MPI_BYTE, rank, tag, t->world->comm, request)
                             : MPI_Isend(flow->out, (int)bytes, MPI_BYTE, rank, tag, t->world->comm, request);
    if (code != MPI_SUCCESS) return xdi_mpi_fault(t, code, peer);
    t->arrives[t->posted] = arrives;
    t->peers[t->posted++] = peer;
    if (arrives) {
        flow->in += bytes;
        flow->in_bytes -= bytes;
    } else {
        flow->out += bytes;
        flow->out_bytes -= bytes;
    }
    return XD_OK;
}

/* Moves all data of t->flows, which are empty afterwards. Both ends split a flow into the same messages. */
static xd_result xdi_mpi_exchange(xdi_mpi *t, int channel, double deadline) {
    const int n = t->base.size, tag = xdi_mpi_tag(t, channel);
    for (bool more = true; more;) {
        more = false;
        for (int k = 1; k < n; k++) XD_TRY(xdi_mpi_post(t, (t->base.rank + n - k) % n, true, tag));
        for (int k = 1; k < n; k++) XD_TRY(xdi_mpi_post(t, (t->base.rank + k) % n, false, tag));
        XD_TRY(xdi_mpi_wait(t, deadline));
        for (int r = 0; r < n; r++) more = more || t->flows[r].in_bytes || t->flows[r].out_bytes;
    }
    return XD_OK;
}

/* Begins a new exchange. A failed one may have left flows and requests behind. */
static void xdi_mpi_clear(xdi_mpi *t) {
    memset(t->flows, 0, (size_t)t->base.size * sizeof *t->flows);
}

static void xdi_mpi_out(xdi_mpi *t, int peer, const void *data, int64_t begin, int64_t count, size_t size) {
    if (count <= 0) return;
    t->flows[peer].out = (const char *)data + (size_t)begin * size;
    t->flows[peer].out_bytes = (size_t)count * size;
}

static void xdi_mpi_in(xdi_mpi *t, int peer, void *data, int64_t begin, int64_t count, size_t size) {
    if (count <= 0) return;
    t->flows[peer].in = (char *)data + (size_t)begin * size;
    t->flows[peer].in_bytes = (size_t)count * size;
}

/* What stays on this rank is copied, not sent. */
static void xdi_mpi_keep(xdi_mpi *t) {
    xdi_mpi_flow *own = &t->flows[t->base.rank];
    if (own->in_bytes && own->out_bytes && own->in != own->out) memcpy(own->in, own->out, own->in_bytes);
    memset(own, 0, sizeof *own);
}

/* ---- control records ---- */

static xd_result xdi_mpi_gather_records(xdi_mpi *t, double deadline, const int *members, int count) {
    xdi_mpi_clear(t);
    for (int i = 0; i < count; i++) {
        const int r = members ? members[i] : i;
        xdi_mpi_out(t, r, &t->mine, 0, 1, sizeof t->mine);
        xdi_mpi_in(t, r, t->records, r, 1, sizeof t->mine);
    }
    xdi_mpi_keep(t);
    return xdi_mpi_exchange(t, XDI_MPI_CONTROL, deadline);
}

/* Whether the ranks compare this call. All have the same count of calls, so all decide the same. */
static bool xdi_mpi_compares(xdi_mpi *t, const xd_control *mine, const xd_collective *next) {
    const int64_t compare = t->world->said.compare;
    const bool moves =
        mine->kind >= (uint32_t)XD_COLLECTIVE_BROADCAST && mine->kind < (uint32_t)XD_COLLECTIVE_SEND;
    if (!moves || compare == 0) return true;
    return t->calls++ < compare || (next && next->leaves.total && !next->known_leaves);
}

static xd_result xdi_mpi_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                 xd_control *all, double deadline) {
    xdi_mpi *t = (xdi_mpi *)transport;
    const int n = transport->size;
    if (xdi_mpi_is_broken(t->world)) return xdi_mpi_report(t, false);
    if (xdi_mpi_compares(t, mine, next)) {
        t->mine = *mine;
        XD_TRY(xdi_mpi_gather_records(t, deadline, NULL, n));
        memcpy(all, t->records, (size_t)n * sizeof *all);
        return XD_OK;
    }
    if (mine->status != (int32_t)XD_OK) { /* the peers are not comparing, so nothing else tells them */
        xdi_mpi_break(t->world, XD_ERROR_PEER, t->world_ranks[transport->rank]);
        return (xd_result)mine->status;
    }
    xd_control_assume(mine, next, n, all);
    return XD_OK;
}

/* ---- moves ---- */

static void xdi_mpi_put(void *user, int peer, const void *data, size_t bytes) {
    xdi_mpi_out((xdi_mpi *)user, peer, data, 0, (int64_t)bytes, 1);
}

static void xdi_mpi_get(void *user, int peer, void *data, size_t bytes) {
    xdi_mpi_in((xdi_mpi *)user, peer, data, 0, (int64_t)bytes, 1);
}

/* Every kind that only moves data, as flows. */
static void xdi_mpi_plan(xdi_mpi *t, const xd_collective *c) {
    static const xd_message_sink sink = { xdi_mpi_put, xdi_mpi_get };
    xdi_mpi_clear(t);
    xd_collective_messages(c, t->base.rank, t->base.size, &sink, t);
    xdi_mpi_keep(t);
}

/* ---- sums ---- */

static int64_t xdi_mpi_nodes(const xdi_mpi *t, int rank) {
    return t->leaves[rank].total ? xd_leaves_nodes(t->leaves[rank].first, t->leaves[rank].count) : 1;
}

/* Elements of a block of `count` in the tile that begins at `at`. */
static int64_t xdi_mpi_in_tile(int64_t count, int64_t at, int64_t tile) {
    const int64_t left = count > at ? count - at : 0;
    return left < tile ? left : tile;
}

/* Collects the tile at `at` of this rank's block: node k of rank r becomes tile (nodes of the ranks before r)
 * + k of the staging memory. One message per node, since the nodes of a forest are not contiguous. */
static xd_result xdi_mpi_bring(xdi_mpi *t, const xd_collective *c, int64_t stride, int64_t at, int64_t tile,
                               double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    const int n = t->base.size, me = t->base.rank;
    int64_t deepest = 0;
    for (int r = 0; r < n; r++) deepest = xdi_mpi_nodes(t, r) > deepest ? xdi_mpi_nodes(t, r) : deepest;
    for (int64_t k = 0; k < deepest; k++) {
        int64_t slot = 0; /* tiles of the ranks before this one */
        xdi_mpi_clear(t);
        for (int r = 0; r < n; slot += xdi_mpi_nodes(t, r++)) {
            if (k == 0) t->pieces[r] = t->staging + (size_t)(slot * tile) * size;
            if (k < xdi_mpi_nodes(t, me))
                xdi_mpi_out(t, r, c->send, k * stride + t->begins[r] + at,
                            xdi_mpi_in_tile(t->counts[r], at, tile), size);
            if (k < xdi_mpi_nodes(t, r))
                xdi_mpi_in(t, r, t->staging, (slot + k) * tile, xdi_mpi_in_tile(t->counts[me], at, tile),
                           size);
        }
        xdi_mpi_keep(t);
        XD_TRY(xdi_mpi_exchange(t, XDI_MPI_DATA, deadline));
    }
    return XD_OK;
}

/* Reduces this rank's block into out, tile by tile. */
static xd_result xdi_mpi_reduce(xdi_mpi *t, const xd_collective *c, void *out, int64_t stride, int64_t tile,
                                double deadline) {
    const size_t size = xd_dtype_size(c->dtype);
    const xd_reduce_kernels *reduce =
        &xd_ctx_host_kernels(t->base.ctx)->reduce; /* pieces are in host memory */
    const xd_launch launch = xd_ctx_launch(t->base.ctx);
    const int n = t->base.size;
    int64_t longest = 0;
    for (int r = 0; r < n; r++) longest = t->counts[r] > longest ? t->counts[r] : longest;
    for (int64_t at = 0; at < longest; at += tile) {
        const int64_t count = xdi_mpi_in_tile(t->counts[t->base.rank], at, tile);
        XD_TRY(xdi_mpi_bring(t, c, stride, at, tile, deadline));
        if (count == 0) continue;
        char *to = (char *)out + (size_t)at * size;
        if (c->leaves.total)
            XD_TRY(reduce->leaves(&launch, to, t->pieces, t->leaves, n, tile, count, c->dtype, c->op));
        else
            XD_TRY(reduce->pieces(&launch, to, t->pieces, n, count, c->dtype, c->op));
    }
    return XD_OK;
}

/* Finds every rank's leaves; returns the elements that a tile of each node may have. */
static int64_t xdi_mpi_tile(xdi_mpi *t, const xd_collective *c) {
    const int64_t nodes = xd_control_leaves(t->records, c, t->base.size, t->leaves);
    const int64_t tile = t->world->staging_bytes / ((nodes ? nodes : 1) * (int64_t)xd_dtype_size(c->dtype));
    return tile > 0 ? tile : 1;
}

static xd_result xdi_mpi_reduce_scatter(xdi_mpi *t, const xd_collective *c, double deadline) {
    const int64_t tile = xdi_mpi_tile(t, c);
    const int64_t stride = xd_collective_blocks(c, t->base.size, false, t->begins, t->counts);
    return xdi_mpi_reduce(t, c, c->recv, stride, tile, deadline);
}

/* Each rank sums a block, then all gather the sums. Short arrays go to every rank whole, which saves a round. In
 * place, a rank overwrites only elements that it has sent already or does not send. */
static xd_result xdi_mpi_all_reduce(xdi_mpi *t, const xd_collective *c, double deadline) {
    const int n = t->base.size, me = t->base.rank;
    const size_t size = xd_dtype_size(c->dtype);
    const int64_t tile = xdi_mpi_tile(t, c);
    const bool whole = c->count <= tile && (size_t)c->count * size <= (size_t)XDI_MPI_SHORT;
    const int64_t stride = xd_collective_blocks(c, n, whole, t->begins, t->counts);
    char *own = (char *)c->recv + (size_t)t->begins[me] * size;
    XD_TRY(xdi_mpi_reduce(t, c, own, stride, tile, deadline));
    if (whole) return XD_OK;
    xdi_mpi_clear(t);
    for (int r = 0; r < n; r++) {
        if (r == me) continue;
        xdi_mpi_out(t, r, own, 0, t->counts[me], size);
        xdi_mpi_in(t, r, c->recv, t->begins[r], t->counts[r], size);
    }
    return xdi_mpi_exchange(t, XDI_MPI_DATA, deadline);
}

static xd_result xdi_mpi_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_mpi *t = (xdi_mpi *)transport;
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return xdi_mpi_all_reduce(t, c, deadline);
    case XD_COLLECTIVE_REDUCE_SCATTER: return xdi_mpi_reduce_scatter(t, c, deadline);
    default: xdi_mpi_plan(t, c); return xdi_mpi_exchange(t, XDI_MPI_DATA, deadline);
    }
}

/* >>mpi/messages.c */

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

/* >>mpi/shrink.c */

/* Going on without those that were lost.
 *
 * Each rank tells all others that it asks for the next world, and waits until each has told the same, or has died, or has
 * left. Those that have told are its list. Then the ranks take turns, in their order: the one whose turn it is sends its list,
 * and who gets it takes it for his own; who has died or left is passed over, and nobody else is. So after the turn of the first
 * rank that comes to the end all have one list, and no later turn changes it.
 *
 * That MPI says of no living process that it has died is what this rests on. So nobody is left behind for being late: the call
 * fails then. */

#if defined(XDI_MPI_RECOVERS)

/* What a rank tells of itself; false when there is nothing new. */
static bool xdi_mpi_hear_answer(xdi_mpi_world *world, int rank) {
    int there = 0;
    int32_t answer = XDI_MPI_SILENT;
    const int seat = world->seats[rank], tag = world->first_tag + XDI_MPI_ASK;
    if (rank == world->rank || world->states[rank] == XDI_MPI_GONE) return false;
    if (MPI_Iprobe(seat, tag, world->comm, &there, MPI_STATUS_IGNORE) != MPI_SUCCESS || !there) return false;
    if (MPI_Recv(&answer, 1, MPI_INT32_T, seat, tag, world->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
    world->states[rank] = answer;
    return true;
}

/* A turn of waiting for what `rank` tells. */
static xd_result xdi_mpi_look(xdi_mpi *t, int rank, double deadline) {
    xdi_mpi_world *world = t->world;
    pthread_mutex_lock(&world->lock);
    (void)xdi_mpi_see_dead(world);
    for (int r = 0; r < world->size; r++)
        while (xdi_mpi_hear_answer(world, r)) continue;
    const bool late = world->states[rank] != XDI_MPI_GONE && xd_now(t->base.ctx) >= deadline;
    if (late) xdi_mpi_leave(world);
    pthread_mutex_unlock(&world->lock);
    if (late)
        return XD_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, rank,
                               "rank %d of %d lives, and did not go on with the others before the deadline",
                               rank, world->size);
    sched_yield();
    return XD_OK;
}

/* The list of those that go on, as this rank sees it. */
static xd_result xdi_mpi_ask(xdi_mpi *t, double deadline) {
    xdi_mpi_world *world = t->world;
    pthread_mutex_lock(&world->lock);
    world->answers[0] = world->states[world->rank] = XDI_MPI_ASKS;
    xdi_mpi_tell(world, &world->answers[0], 1, XDI_MPI_ASK);
    pthread_mutex_unlock(&world->lock);
    for (int r = 0; r < world->size; r++)
        while (world->states[r] == XDI_MPI_SILENT) XD_TRY(xdi_mpi_look(t, r, deadline));
    /* Who has asked may have left since: a probe finds what has come only after some turns. */
    for (int turn = 0; turn < XDI_MPI_SPIN; turn++) XD_TRY(xdi_mpi_look(t, world->rank, HUGE_VAL));
    for (int r = 0; r < world->size; r++) world->list[r] = world->states[r] == XDI_MPI_ASKS;
    return XD_OK;
}

/* Takes the list of a rank, if it is there. */
static bool xdi_mpi_take_list(xdi_mpi_world *world, int rank) {
    int there = 0;
    const int seat = world->seats[rank], tag = world->first_tag + XDI_MPI_LIST;
    if (MPI_Iprobe(seat, tag, world->comm, &there, MPI_STATUS_IGNORE) != MPI_SUCCESS || !there) return false;
    /* Nobody needs these now, and a message that breaks off leaves the list as it is. */
    int32_t *room = world->waits_for;
    if (MPI_Recv(room, world->size, MPI_INT32_T, seat, tag, world->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
    memcpy(world->list, room, (size_t)world->size * sizeof *room);
    return true;
}

/* The same list on all that go on. */
static xd_result xdi_mpi_settle_list(xdi_mpi *t, double deadline) {
    xdi_mpi_world *world = t->world;
    const int n = world->size;
    for (int r = 0; r < n; r++) {
        if (r == world->rank) {
            memcpy(world->list + n, world->list, (size_t)n * sizeof *world->list);
            pthread_mutex_lock(&world->lock);
            xdi_mpi_tell(world, world->list + n, n, XDI_MPI_LIST);
            pthread_mutex_unlock(&world->lock);
        }
        while (r != world->rank && world->states[r] == XDI_MPI_ASKS && !xdi_mpi_take_list(world, r))
            XD_TRY(xdi_mpi_look(t, r, deadline));
    }
    XD_REQUIRE(t->base.ctx, world->list[world->rank], XD_ERROR_PEER, "%d ranks go on without rank %d", n - 1,
               world->rank);
    return XD_OK;
}

/* The next world has the listed ranks, in their order. */
static void xdi_mpi_number_next(const xdi_mpi_world *old, xdi_mpi *next) {
    xdi_mpi_world *world = next->world;
    int size = 0;
    for (int r = 0; r < old->size; r++) {
        if (!old->list[r]) continue;
        if (r == old->rank) world->rank = size;
        next->world_ranks[size] = size;
        world->seats[size++] = old->seats[r];
    }
    world->comm = old->comm;
    world->size = next->base.size = size;
    next->base.rank = world->rank;
    world->first_tag = old->first_tag + old->tags;
    world->tags = old->tags;
    world->groups = old->groups;
}

static xd_result xdi_mpi_check_shrink(xdi_mpi *t) {
    xdi_mpi_world *world = t->world;
    int *most = NULL, found = 0;
    const bool broken = xdi_mpi_is_broken(world), left = world->states[world->rank] == XDI_MPI_GONE;
    XD_REQUIRE(t->base.ctx, broken, XD_ERROR_STATE, "nothing has broken this world of %d ranks", world->size);
    XD_REQUIRE(t->base.ctx, world->states[world->rank] == XDI_MPI_SILENT, XD_ERROR_STATE,
               "rank %d has %s this world of %d ranks already", world->rank, left ? "left" : "gone on from",
               world->size);
    MPI_Comm_get_attr(world->comm, MPI_TAG_UB, (void *)&most, &found);
    const int last = found ? *most : 32767;
    XD_REQUIRE(t->base.ctx, world->first_tag <= last - 2 * world->tags, XD_ERROR_UNSUPPORTED,
               "the tags of this MPI are enough for %d worlds, one after another", last / world->tags);
    return XD_OK;
}
#endif

/* >>mpi/handle.c */

/* Handles on groups: made by joining, splitting, forking and going on, and their table of calls. */

static void xdi_mpi_destroy(xd_transport *transport);
static xd_result xdi_mpi_create(xd_ctx *ctx, xdi_mpi_world *world, int size, int rank, int group,
                                xdi_mpi **out);

/* The members agree on an id that none of them has used: then no two ranks share it in any other group. `members` NULL: all.
 * *least receives the least `mine` of them. */
static xd_result xdi_mpi_number(xdi_mpi *t, const int *members, int size, int *least, double deadline) {
    XD_REQUIRE(t->base.ctx, !t->is_fork, XD_ERROR_UNSUPPORTED,
               "the communicator of a queue on %d ranks is not split or forked", t->base.size);
    memset(&t->mine, 0, sizeof t->mine);
    t->mine.sequence = (uint64_t)t->world->next_group;
    t->mine.root = *least;
    XD_TRY(xdi_mpi_gather_records(t, deadline, members, size));
    uint64_t id = 0;
    for (int r = 0; r < size; r++) {
        const xd_control *theirs = &t->records[members ? members[r] : r];
        id = theirs->sequence > id ? theirs->sequence : id;
        *least = theirs->root < *least ? theirs->root : *least;
    }
    XD_REQUIRE(t->base.ctx, id < (uint64_t)t->world->groups, XD_ERROR_UNSUPPORTED,
               "the tags of this MPI are enough for %d groups", t->world->groups - 1);
    t->world->next_group = (int)id + 1;
    return XD_OK;
}

static xd_result xdi_mpi_split(xd_transport *transport, const int *members, int size, int rank,
                               double deadline, xd_transport **out) {
    xdi_mpi *t = (xdi_mpi *)transport, *child = NULL;
    int least = 0;
    XD_TRY(xdi_mpi_number(t, members, size, &least, deadline));
    XD_TRY(xdi_mpi_create(transport->ctx, t->world, size, rank, t->world->next_group - 1, &child));
    for (int r = 0; r < size; r++) child->world_ranks[r] = t->world_ranks[members[r]];
    *out = &child->base;
    return XD_OK;
}

static xd_result xdi_mpi_fork(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out) {
    xdi_mpi *t = (xdi_mpi *)transport, *fork = NULL;
    const int size = transport->size;
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    XD_TRY(xdi_mpi_number(t, NULL, size, &level, deadline));
    if (level < MPI_THREAD_MULTIPLE) return XD_OK;
    if (xdi_mpi_create(ctx, t->world, size, transport->rank, t->world->next_group - 1, &fork) == XD_OK) {
        memcpy(fork->world_ranks, t->world_ranks, (size_t)size * sizeof *t->world_ranks);
        fork->is_fork = true;
        fork->staging = (char *)xd_allocate(ctx, (size_t)t->world->staging_bytes);
        *out = &fork->base;
        if (fork->staging) return XD_OK;
        *out = NULL;
        xdi_mpi_destroy(&fork->base);
    }
    return XD_FAIL(transport->ctx, XD_ERROR_MEMORY,
                   "no room for a second handle on %d ranks and its %lld bytes of staging", size,
                   (long long)t->world->staging_bytes);
}

static size_t xdi_mpi_fork_bytes(const xd_transport *transport) {
    const xdi_mpi *t = (const xdi_mpi *)transport;
    const size_t n = (size_t)transport->size;
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE || t->is_fork) return 0;
    return sizeof *t + (size_t)t->world->staging_bytes +
           n * (sizeof *t->world_ranks + sizeof *t->records + sizeof *t->flows + 2 * sizeof *t->requests +
                2 * sizeof *t->statuses + 2 * sizeof *t->peers + 2 * sizeof *t->arrives +
                2 * sizeof *t->lanes + sizeof *t->begins + sizeof *t->counts + sizeof *t->leaves +
                sizeof *t->pieces);
}

static void xdi_mpi_abort(xd_transport *transport) {
    xdi_mpi *t = (xdi_mpi *)transport;
    xdi_mpi_break(t->world, XD_ERROR_PEER, t->world_ranks[transport->rank]);
    pthread_mutex_lock(&t->world->lock);
    xdi_mpi_leave(t->world);
    pthread_mutex_unlock(&t->world->lock);
}

static void xdi_mpi_fail(xd_transport *transport, xd_result result, int culprit) {
    xdi_mpi_break(((xdi_mpi *)transport)->world, result, culprit);
}

/* Polling for a notice calls MPI, which makes progress on pending messages. */
static xd_result xdi_mpi_poll(xd_transport *transport) {
    xdi_mpi *t = (xdi_mpi *)transport;
    return xdi_mpi_is_broken(t->world) ? xdi_mpi_report(t, false) : XD_OK;
}

static void xdi_mpi_destroy(xd_transport *transport) {
    xdi_mpi *t = (xdi_mpi *)transport;
    xd_ctx *ctx = transport->ctx;
    xdi_mpi_world *world = t->world;
    pthread_mutex_lock(&world->lock);
    const bool in_flight = world->in_flight;
    pthread_mutex_unlock(&world->lock);
    xdi_mpi_release_world(ctx, world);
    xd_release(ctx, (void *)t->pieces);
    xd_release(ctx, t->leaves);
    xd_release(ctx, t->counts);
    xd_release(ctx, t->begins);
    xd_release(ctx, t->arrives);
    xd_release(ctx, t->peers);
    xd_release(ctx, t->statuses);
    xd_release(ctx, t->requests);
    xd_release(ctx, t->flows);
    xd_release(ctx, t->world_ranks);
    if (in_flight) return;
    if (t->is_fork) xd_release(ctx, t->staging);
    xd_release(ctx, t->lanes);
    xd_release(ctx, t->records);
    xd_release(ctx, t);
}

#if defined(XDI_MPI_RECOVERS)
/* Room for the next world, as large as this one. */
static xd_result xdi_mpi_prepare_next(xdi_mpi *t, xdi_mpi **out) {
    const xdi_mpi_world *old = t->world;
    const xd_mpi_desc d = { old->comm, (size_t)old->staging_bytes, old->said.compare };
    xd_ctx *ctx = t->base.ctx;
    xdi_mpi_world *world = xdi_mpi_create_world(ctx, &d, old->size, old->rank);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for what is left of %d ranks", old->size);
    world->staging_bytes = old->staging_bytes;
    world->staging = (char *)xd_allocate(ctx, d.staging_bytes);
    xd_result result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu bytes of staging", d.staging_bytes);
    if (world->staging) result = xdi_mpi_create(ctx, world, old->size, old->rank, 1, out);
    xdi_mpi_release_world(ctx, world); /* the handle's now */
    return result;
}

static xd_result xdi_mpi_shrink(xd_transport *transport, double deadline, xd_transport **out) {
    xdi_mpi *t = (xdi_mpi *)transport, *next = NULL;
    XD_TRY(xdi_mpi_check_shrink(t));
    xd_result result = xdi_mpi_prepare_next(t, &next);
    if (result == XD_OK) result = xdi_mpi_ask(t, deadline);
    if (result == XD_OK) result = xdi_mpi_settle_list(t, deadline);
    if (result == XD_OK) {
        xdi_mpi_number_next(t->world, next);
        *out = &next->base;
        return XD_OK;
    }
    pthread_mutex_lock(&t->world->lock);
    xdi_mpi_leave(t->world);
    pthread_mutex_unlock(&t->world->lock);
    if (next) xdi_mpi_destroy(&next->base);
    return result;
}
#endif

static const xd_transport_ops xdi_mpi_ops = { "mpi",
                                              xdi_mpi_control,
                                              xdi_mpi_execute,
                                              xdi_mpi_split,
                                              xdi_mpi_abort,
                                              xdi_mpi_destroy,
                                              xdi_mpi_poll,
                                              false,
                                              xdi_mpi_fail,
                                              xdi_mpi_fork,
                                              xdi_mpi_messages,
                                              xdi_mpi_fork_bytes,
                                              false,
#if defined(XDI_MPI_RECOVERS)
                                              xdi_mpi_shrink,
#else
                                              NULL,
#endif
                                              NULL,
                                              NULL };

/* A handle; the caller fills in world_ranks. */
static xd_result xdi_mpi_create(xd_ctx *ctx, xdi_mpi_world *world, int size, int rank, int group,
                                xdi_mpi **out) {
    const size_t n = (size_t)size;
    xdi_mpi *t = (xdi_mpi *)xd_allocate(ctx, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    t->base.ops = &xdi_mpi_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = size;
    t->world = world;
    t->group = group;
    t->staging = world->staging;
    pthread_mutex_lock(&world->lock);
    world->holders++;
    pthread_mutex_unlock(&world->lock);
    t->world_ranks = (int *)xd_allocate(ctx, n * sizeof *t->world_ranks);
    t->records = (xd_control *)xd_allocate(ctx, n * sizeof *t->records);
    t->flows = (xdi_mpi_flow *)xd_allocate(ctx, n * sizeof *t->flows);
    t->requests = (MPI_Request *)xd_allocate(ctx, 2 * n * sizeof *t->requests);
    t->statuses = (MPI_Status *)xd_allocate(ctx, 2 * n * sizeof *t->statuses);
    t->peers = (int *)xd_allocate(ctx, 2 * n * sizeof *t->peers);
    t->arrives = (bool *)xd_allocate(ctx, 2 * n * sizeof *t->arrives);
    t->lanes = (xdi_mpi_lane *)xd_allocate(ctx, 2 * n * sizeof *t->lanes);
    t->begins = (int64_t *)xd_allocate(ctx, n * sizeof *t->begins);
    t->counts = (int64_t *)xd_allocate(ctx, n * sizeof *t->counts);
    t->leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *t->leaves);
    t->pieces = (const void **)xd_allocate(ctx, n * sizeof *t->pieces);
    if (!t->world_ranks || !t->records || !t->flows || !t->requests || !t->statuses || !t->peers ||
        !t->arrives || !t->lanes || !t->begins || !t->counts || !t->leaves || !t->pieces) {
        xdi_mpi_destroy(&t->base);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    }
    t->base.world_ranks = t->world_ranks;
    *out = t;
    return XD_OK;
}

/* >>mpi/join.c */

/* Joining: the first communication of a world, what must be the same on all ranks, and the public function. */

/* Waits for a request that was started with `code`, with a deadline, in case a rank never comes. */
static xd_result xdi_mpi_join(xd_ctx *ctx, int code, MPI_Request *request, double deadline,
                              const char *what) {
    int done = 0;
    while (code == MPI_SUCCESS) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code == MPI_SUCCESS && done) break;
        XD_REQUIRE(ctx, xd_now(ctx) < deadline, XD_ERROR_TIMEOUT,
                   "some rank of the communicator did not call xd_comm_mpi before the deadline");
        sched_yield();
    }
    XD_REQUIRE(ctx, code == MPI_SUCCESS, XD_ERROR_PEER, "MPI could not %s: code %d", what, code);
    return XD_OK;
}

static size_t xdi_mpi_least(int size) {
    return (size_t)XDI_MPI_STAGING_LEAST * (size_t)size;
}

static bool xdi_mpi_staging_fits(uint64_t bytes, int size) {
    return bytes >= xdi_mpi_least(size) && bytes < PTRDIFF_MAX;
}

/* What all ranks refuse in the same words, having heard the same: a rank that refused its own alone would leave the others
 * waiting. */
static xd_result xdi_mpi_check_settings(xd_ctx *ctx, const xdi_mpi_entry *all, int size) {
    for (int r = 0; r < size; r++)
        if (!xdi_mpi_staging_fits(all[r].staging_bytes, size))
            return XD_FAIL_CULPRIT(ctx, XD_ERROR_ARGUMENT, r,
                                   "staging_bytes is %llu on rank %d, %d ranks need %zu, and at most %zu",
                                   (unsigned long long)all[r].staging_bytes, r, size, xdi_mpi_least(size),
                                   (size_t)PTRDIFF_MAX - 1);
    for (int r = 1; r < size; r++) /* sums would be split into different tiles */
        if (all[r].staging_bytes != all[0].staging_bytes)
            return XD_FAIL_CULPRIT(
                ctx, XD_ERROR_MISMATCH, r, "staging_bytes is %llu on rank %d, and %llu on rank 0",
                (unsigned long long)all[r].staging_bytes, r, (unsigned long long)all[0].staging_bytes);
    for (int r = 0; r < size; r++)
        if (all[r].compare < -1 || all[r].compare != all[0].compare)
            return XD_FAIL_CULPRIT(ctx, all[r].compare < -1 ? XD_ERROR_ARGUMENT : XD_ERROR_MISMATCH, r,
                                   "compare is %lld on rank %d, and %lld on rank 0",
                                   (long long)all[r].compare, r, (long long)all[0].compare);
    return XD_OK;
}

/* Processes may run on different processors; the bits of losses depend on the CPU level, so all use the lowest. */
static xd_result xdi_mpi_agree(xd_ctx *ctx, const xdi_mpi_entry *all, int size, xd_result mine) {
    int32_t lowest = all[0].cpu;
    XD_TRY(xdi_mpi_check_settings(ctx, all, size));
    XD_TRY(mine);
    for (int r = 0; r < size; r++) {
        if (all[r].result != XD_OK)
            return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, r, "rank %d could not join: %s", r,
                                   xd_result_name((xd_result)all[r].result));
        lowest = all[r].cpu < lowest ? all[r].cpu : lowest;
    }
    for (int r = 1; r < size; r++)
        XD_TRY(xd_float_state_compare(ctx, r, (unsigned)all[r].floats, (unsigned)all[0].floats));
    for (int r = 0; r < size; r++) xd_ctx_meet_products(ctx, r, all[r].products);
    xd_ctx_set_cpu(ctx, (xd_cpu_level)lowest);
    return XD_OK;
}

static xd_result xdi_mpi_duplicate(xd_ctx *ctx, MPI_Comm mpi, MPI_Comm *out, double deadline) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Comm_idup(mpi, out, &request);
    XD_TRY(xdi_mpi_join(ctx, code, &request, deadline, "duplicate the communicator"));
    MPI_Comm_set_errhandler(*out, MPI_ERRORS_RETURN);
    return XD_OK;
}

/* Collects what must be known of all ranks. */
static xd_result xdi_mpi_compare(xd_ctx *ctx, xdi_mpi_world *world, double deadline) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int bytes = (int)sizeof world->said;
    const int code =
        MPI_Iallgather(&world->said, bytes, MPI_BYTE, world->heard, bytes, MPI_BYTE, world->comm, &request);
    return xdi_mpi_join(ctx, code, &request, deadline, "compare the ranks' settings");
}

/* The first communication. `mine`: what xdi_mpi_prepare returned here. */
static xd_result xdi_mpi_meet(xd_ctx *ctx, MPI_Comm mpi, xdi_mpi_world *world, int size, xd_result mine) {
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    int *most = NULL, found = 0;
    world->said.cpu = (int32_t)xd_ctx_settings(ctx)->cpu;
    world->said.result = (int32_t)mine;
    world->said.floats = xd_float_state();
    world->said.products = xd_ctx_products(ctx);
    world->failure = xdi_mpi_duplicate(ctx, mpi, &world->comm, deadline);
    if (world->failure == XD_OK) world->failure = xdi_mpi_compare(ctx, world, deadline);
    if (world->failure != XD_OK)
        world->in_flight = true; /* MPI may still write to the buffers of the request */
    XD_TRY(world->failure);
    XD_TRY(xdi_mpi_agree(ctx, world->heard, size, mine));
    MPI_Comm_get_attr(world->comm, MPI_TAG_UB, (void *)&most, &found);
    world->tags = found ? *most : 32767;
#if defined(XDI_MPI_RECOVERS)
    world->tags /= world->tags >> 30 ? 1 << 10 : 1 << 4; /* for the worlds that may follow */
#endif
    world->groups = world->tags / XDI_MPI_CHANNELS;
    return XD_OK;
}

/* What can fail on one rank alone comes before the first communication, which tells the others. Memory of a size that every
 * rank will refuse is not asked for. */
static xd_result xdi_mpi_prepare(xd_ctx *ctx, xdi_mpi_world *world, int size, int rank, xd_comm **out) {
    const size_t bytes = (size_t)world->said.staging_bytes;
    xdi_mpi *t = NULL;
    if (!xdi_mpi_staging_fits(bytes, size)) return XD_OK;
    world->staging_bytes = (int64_t)bytes;
    world->staging = (char *)xd_allocate(ctx, bytes);
    XD_REQUIRE(ctx, world->staging, XD_ERROR_MEMORY, "no room for %zu bytes of staging", bytes);
    XD_TRY(xdi_mpi_create(ctx, world, size, rank, 1, &t));
    for (int r = 0; r < size; r++) t->world_ranks[r] = r;
    return xd_comm_create(ctx, &t->base, out);
}

/* The desc with its defaults. Unset handles have all bits zero, which no MPI gives to a communicator. */
static xd_result xdi_mpi_resolve(xd_ctx *ctx, xd_mpi_desc *d) {
    int running = 0, finalized = 0, size = 0, between = 0;
    MPI_Comm unset;
    memset(&unset, 0, sizeof unset);
    MPI_Initialized(&running);
    MPI_Finalized(&finalized);
    XD_REQUIRE(ctx, running && !finalized, XD_ERROR_STATE,
               "xd_comm_mpi comes after MPI_Init and before MPI_Finalize");
    if (d->mpi == unset) d->mpi = MPI_COMM_WORLD;
    XD_REQUIRE(ctx, d->mpi != MPI_COMM_NULL, XD_ERROR_ARGUMENT, "the communicator is MPI_COMM_NULL");
    MPI_Comm_test_inter(d->mpi, &between);
    XD_REQUIRE(ctx, !between, XD_ERROR_ARGUMENT, "the communicator joins two groups: it has to be of one");
    MPI_Comm_size(d->mpi, &size);
    if (d->staging_bytes) return XD_OK;
    d->staging_bytes = (size_t)XDI_MPI_STAGING_RANK * (size_t)size;
    if (d->staging_bytes < XDI_MPI_STAGING) d->staging_bytes = XDI_MPI_STAGING;
    return XD_OK;
}

XD_API xd_result xd_comm_mpi(xd_ctx *ctx, const xd_mpi_desc *desc, xd_comm **out) {
    int size = 0, rank = 0;
    xd_mpi_desc d;
    if (!ctx) return XD_ERROR_ARGUMENT;
    XD_REQUIRE(ctx, out, XD_ERROR_ARGUMENT, "out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    XD_TRY(xdi_mpi_resolve(ctx, &d));
    MPI_Comm_size(d.mpi, &size);
    MPI_Comm_rank(d.mpi, &rank);
    xd_ctx_set_rank(ctx, rank);
    xdi_mpi_world *world = xdi_mpi_create_world(ctx, &d, size, rank);
    XD_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", size);
    xd_comm *comm = NULL;
    const xd_result mine = xdi_mpi_prepare(ctx, world, size, rank, &comm);
    const xd_result result = xdi_mpi_meet(ctx, d.mpi, world, size, mine);
    if (result == XD_OK)
        *out = comm;
    else
        xd_comm_destroy(comm);
    xdi_mpi_release_world(ctx, world);
    return result;
}


#endif
/* xdistill sha256 f1f7cb253acb2aec198a358a34f987d2ee61f0b2d5a5f404ff37500f47b51830 */
