#ifndef XDI_COMM_THREADS_INTERNAL_H
#define XDI_COMM_THREADS_INTERNAL_H

#include "comm/internal.h"

#include <pthread.h>

/* What the files of the transport between threads share: the memory of a group, its world, and a handle on it. */

enum {
    XDI_THREADS_INLINE = 4096,     /* maximum bytes of a payload in the page */
    XDI_THREADS_STAGING = 1 << 22, /* about how many bytes a GPU without access to others takes in a sum */
    XDI_THREADS_SPIN = 100,        /* polls before yielding the core */
    /* The turn from which a wait sleeps. Beside other programs the system may give the core back at once to who yields it, while
     * the thread that is waited for does not run: then yielding takes the time of both. */
    XDI_THREADS_YIELD = 600
};

typedef struct xdi_threads_page {
    xd_control control;
    xd_collective record;
    const void *data; /* record.send, or payload below */
    int64_t *offsets; /* [size], offset in data of the block for each rank */
    bool is_short;
    bool on_device;
    uint64_t payload[XDI_THREADS_INLINE / 8]; /* aligned for every dtype */
} xdi_threads_page;

typedef struct xdi_threads_group xdi_threads_group;

typedef struct xdi_threads_slot {
    uint64_t arrived;         /* rounds this rank has entered; atomic */
    uint32_t left;            /* this rank destroyed its handle; atomic */
    uint32_t busy;            /* this rank accesses memory of peers; atomic */
    uint32_t joined;          /* world group: the rank has joined; atomic */
    unsigned floats;          /* world group: the floating-point state with which it has */
    uint64_t child_round;     /* the round whose split produced `child`; atomic */
    xdi_threads_group *child; /* NULL: no memory */
    /* Events of this rank once it has moved memory of a device: its data to send is complete; its accesses to memory of
     * peers are complete. They live as long as the group, because peers wait for them after this rank has returned. */
    void *ready, *done;
    void (*event_destroy)(void *event);
    xdi_threads_page page[2];
} xdi_threads_slot;

/* A send waiting for its receiver, one for each ordered pair of ranks. */
typedef struct xdi_threads_mail {
    uint64_t posted; /* messages offered so far; atomic, written by the sender */
    uint64_t done;   /* messages processed so far; atomic, written by the receiver */
    const void *data;
    int64_t count, wanted; /* the sender's and the receiver's */
    bool on_device;
    xd_dtype dtype, wanted_dtype;
} xdi_threads_mail;

struct xdi_threads_group {
    struct xd_thread_world *world;
    xdi_threads_group *next; /* in world->groups */
    int size;
    uint32_t holders;        /* handles that exist or may still be created; atomic */
    int *world_ranks;        /* [size] */
    xdi_threads_slot *slots; /* [size] */
    int64_t *offsets;        /* [size][2][size], for the pages */
    xdi_threads_mail *mail;  /* [from][to] */
    void *shared;            /* see xdi_threads_share */
};

struct xd_thread_world {
    xd_allocator allocator;
    uint64_t failure; /* 0, or what broke the world: result << 32 | (culprit + 1); atomic, written once */
    pthread_mutex_t lock;
    xdi_threads_group *groups; /* all that exist, the world's own last; under lock */
    xdi_threads_group *root;
    uint32_t *gone; /* [ranks], the rank has left the world; atomic */
    uint32_t *asks; /* [ranks], it wants to go on with those that live; under lock */
    int *before;    /* [ranks], of a world that survivors made: their numbers in the one before */
    struct xd_thread_world *next; /* of its survivors, which ends with it; under lock, written once */
    bool no_room;                 /* for that one; under lock */
};

typedef struct xdi_threads {
    xd_transport base;
    xdi_threads_group *group;
    xdi_threads_slot *slot; /* this rank's */
    uint64_t round;
    int rest;            /* number of next waits that yield the core at once */
    bool on_device;      /* the collective in progress moves memory of a device */
    void *stream;        /* on which it does so */
    const void **pieces; /* [size], scratch */
    xd_leaves *leaves;   /* [size], scratch */
} xdi_threads;

/* threads_wait.c: breaks a world for good; and what broke it, 0 while it is whole. */
XD_PRIVATE void xdi_threads_break(xd_thread_world *world, xd_result result, int culprit);
XD_PRIVATE uint64_t xdi_threads_failure(const xd_thread_world *world);

/* threads_wait.c: the error of a call in a broken world; `waiting`: this rank waits for others. */
XD_PRIVATE xd_result xdi_threads_report(const xdi_threads *t, bool waiting);

/* threads_wait.c: before a rank leaves a call that failed: its device has completed its accesses, no peer accesses its memory. */
XD_PRIVATE void xdi_threads_settle(const xdi_threads *t);
XD_PRIVATE void xdi_threads_drain(const xdi_threads *t);

/* threads_wait.c: whether a rank has destroyed its handle, or has left the world. */
XD_PRIVATE bool xdi_threads_has_left(const xdi_threads_group *group, int rank);

/* threads_wait.c: the turn at which a wait begins, and a turn of it; true when the caller should check the clock. */
XD_PRIVATE int xdi_threads_patience(xdi_threads *t);
XD_PRIVATE bool xdi_threads_pause(xdi_threads *t, int turn);

/* threads_wait.c: waits until *counter, which `rank` increases, reaches `target`; enters the next round and waits for all. */
XD_PRIVATE xd_result xdi_threads_wait(xdi_threads *t, const uint64_t *counter, uint64_t target, int rank,
                                      double deadline);
XD_PRIVATE xd_result xdi_threads_round(xdi_threads *t, double deadline);

/* threads_move.c: whether a device has what c moves; a launch on the stream of c; records that what c sends is complete at this
 * point of it. */
XD_PRIVATE bool xdi_threads_sees_device(const xdi_threads *t, const xd_collective *c);
XD_PRIVATE xd_launch xdi_threads_launch(const xdi_threads *t, const xd_collective *c);
XD_PRIVATE xd_result xdi_threads_ready(const xdi_threads *t, const xd_collective *c);

/* threads_move.c: a result of this rank's device in the middle of a call: an error breaks the world. */
XD_PRIVATE xd_result xdi_threads_lost(const xdi_threads *t, xd_result result);

/* threads_move.c: copies between this rank's memory and a peer's, between enter and exit: enter is false when the world is broken
 * and memory of peers may be freed. */
XD_PRIVATE xd_result xdi_threads_bytes(const xdi_threads *t, const xd_collective *c, void *to,
                                       const void *from, size_t bytes);
XD_PRIVATE bool xdi_threads_enter(const xdi_threads *t);
XD_PRIVATE void xdi_threads_exit(const xdi_threads *t);

/* threads_move.c: `control` and `execute` of the transport. */
XD_PRIVATE xd_result xdi_threads_control(xd_transport *transport, const xd_control *mine,
                                         const xd_collective *next, xd_control *all, double deadline);
XD_PRIVATE xd_result xdi_threads_execute(xd_transport *transport, const xd_collective *c, double deadline);

/* threads_messages.c: `exchange` of the transport. */
XD_PRIVATE xd_result xdi_threads_exchange(xd_transport *transport, xd_message *messages, int count,
                                          double deadline);

#endif
