#ifndef XDI_COMM_PROCESSES_INTERNAL_H
#define XDI_COMM_PROCESSES_INTERNAL_H

#include "comm/job.h"

/* What the files of the transport between processes share: the memory of a group, and a handle on it. */

enum {
    XDI_PROCESSES_INLINE = 4096, /* most bytes of a payload in the page */
    XDI_PROCESSES_TINY = 32      /* most in the flag */
};

/* Where a rank's payload of a round is: in its slot, which it fills step by step, or in its page or flag already. */
enum { XDI_PROCESSES_IN_SLOT = 0, XDI_PROCESSES_IN_PAGE, XDI_PROCESSES_IN_FLAG };

/* With what a rank enters a round: one line of the cache, since fetching a line from another core is what a short call costs. */
typedef struct xdi_processes_flag {
    uint64_t arrived; /* the round; atomic, written last */
    uint64_t digest;  /* of the control record: who has the same one need not read that */
    int64_t longest;  /* elements of the longest block that it sends or receives */
    uint32_t place;
    uint32_t unused;
    uint64_t payload[XDI_PROCESSES_TINY / 8];
} xdi_processes_flag;

/* What a rank shows besides in a round. */
typedef struct xdi_processes_page {
    xd_control control;
    uint64_t payload[XDI_PROCESSES_INLINE / 8];
    int64_t offsets[XD_NODE_RANKS_MAX]; /* in the payload, of the block for each rank; not of an all_reduce */
} xdi_processes_page;

/* A rank's place in a group. The counters lie in lines of their own. Of flags and pages, a round has those of its parity: they are
 * written again when all have entered the round between. */
typedef struct xdi_processes_seat {
    xdi_processes_flag flag[2];
    uint64_t filled, summed; /* chunks that it has filled; tiles of sums that it has added; atomic */
    char line[XDI_JOB_LINE - 16];
    uint64_t taken; /* steps in which it has taken its part; atomic */
    char second_line[XDI_JOB_LINE - 8];
    uint32_t left;        /* this rank has destroyed its handle; atomic */
    int32_t child;        /* region of the group that was made in */
    uint64_t child_round; /* this round; atomic */
    char third_line[XDI_JOB_LINE - 16];
    xdi_job_bell bell; /* where this rank waits for messages */
    xdi_processes_page page[2];
} xdi_processes_seat;

/* Messages from one rank to another: what the sender says, and what the receiver says. */
typedef struct xdi_processes_mail {
    uint64_t posted;  /* messages offered so far; atomic */
    uint64_t written; /* bytes in the lane so far; atomic */
    int64_t count;
    int32_t dtype;
    char line[XDI_JOB_LINE - 28];
    uint64_t met;  /* messages accepted or refused so far; atomic */
    uint64_t done; /* messages processed so far; atomic */
    uint64_t read; /* bytes taken from the lane so far; atomic */
    int64_t wanted;
    int32_t wanted_dtype;
    char second_line[XDI_JOB_LINE - 36];
} xdi_processes_mail;

/* The region of a group; seats [size], mail [from][to] and, for the world and forks, slots [size] follow. */
typedef struct xdi_processes_group {
    xdi_job_bell bell;
} xdi_processes_group;

/* The region that has the slots; shared by all groups that are split from one another. */
typedef struct xdi_processes_slots {
    int holders; /* handles; atomic */
    int region, size;
    void *memory; /* the mapping */
    size_t bytes; /* of it */
    char *first;  /* slot */
    size_t slot_bytes;
} xdi_processes_slots;

/* The message to a rank, or from one, that is under way. */
typedef struct xdi_processes_lane {
    char *data; /* what has not been moved yet */
    size_t left;
} xdi_processes_lane;

typedef struct xdi_processes {
    xd_transport base;
    xdi_job *job;
    xdi_processes_slots *slots;
    int region; /* of the group; that of the slots too where they are its own */
    void *memory;
    size_t bytes;
    xdi_processes_group *group;
    xdi_processes_seat *seats;
    xdi_processes_mail *mail;
    int *world_ranks; /* [size] */
    int *places;      /* [size], numbers of slots */
    uint64_t round, steps;
    int64_t *begins, *counts;  /* [size], of the blocks that this rank sends to each, or all sum up */
    xd_leaves *leaves;         /* [size], scratch */
    const void **pieces;       /* [size], scratch */
    xdi_processes_lane *lanes; /* [2 size]: to rank r at 2 r, from it at 2 r + 1 */
} xdi_processes;

/* processes_wait.c: why the world is broken; `waiting`: this rank was waiting for others. */
XD_PRIVATE xd_result xdi_processes_report(const xdi_processes *t, bool waiting);
XD_PRIVATE bool xdi_processes_has_left(const xdi_processes *t, int rank);
/* processes_wait.c: waits until *counter, which `rank` increases, reaches `target`. */
XD_PRIVATE xd_result xdi_processes_await(xdi_processes *t, const uint64_t *counter, uint64_t target, int rank,
                                         double deadline);
/* processes_wait.c: announces a counter of this rank. */
XD_PRIVATE void xdi_processes_tell(const xdi_processes *t, uint64_t *counter, uint64_t value);

/* processes_messages.c: the exchange of the table. */
XD_PRIVATE xd_result xdi_processes_exchange(xd_transport *transport, xd_message *messages, int count,
                                            double deadline);

#endif
