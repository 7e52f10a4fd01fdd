#ifndef XDI_COMM_JOB_H
#define XDI_COMM_JOB_H

#include "comm/internal.h"
#include "comm/processes.h"

/* What the processes of a job on one machine share: a file in memory, its regions, its fate, and how ranks wait. */

enum {
    XDI_JOB_PAGE = 1 << 16, /* regions begin at multiples of it, which pages of every system divide */
    XDI_JOB_REGIONS = 1024,
    XDI_JOB_TEXT = 192,
    /* Bytes of a line of the cache: what one rank writes and another reads lies in a line of its own. */
    XDI_JOB_LINE = 64
};

/* Where ranks sleep. */
typedef struct xdi_job_bell {
    uint32_t rings;    /* what sleepers wait for a change of; atomic */
    uint32_t sleepers; /* somebody sleeps, or is about to; atomic */
    char line[XDI_JOB_LINE - 8];
} xdi_job_bell;

/* A rank of the job. A process that dies stays in here. */
typedef struct xdi_job_member {
    int64_t process;    /* 0: has not joined */
    uint32_t prepared;  /* has said the next four; atomic */
    int32_t result;     /* xd_result of what this rank prepared alone */
    int32_t cpu;        /* xd_cpu_level */
    uint32_t products;  /* xd_ctx_products */
    uint32_t floats;    /* floating-point state */
    uint32_t gone;      /* has left the world; atomic */
    uint32_t waits_for; /* 1 + the world rank that it waits for; 0: none; atomic */
    uint32_t beats;     /* turns of its waits, by which others see that it is not stopped; atomic */
    uint32_t asks;      /* it wants to go on with those that live; atomic */
    char line[XDI_JOB_LINE - 48];
} xdi_job_member;

/* A world. The first one is in the beginning of the file, those that survivors make have regions of their own. */
typedef struct xdi_job_world {
    uint64_t failure; /* 0, or what broke it: result << 32 | (culprit + 1); atomic, written once */
    uint32_t next;    /* 0, or 1 + the region of the world of its survivors; atomic, written once */
    int32_t size;
    int32_t group;                          /* region of its first group */
    unsigned char locks[XD_NODE_RANKS_MAX]; /* the byte of the file that each rank holds: its first rank */
    xdi_job_bell bell;                      /* of those that join it, or ask for the next */
    xdi_job_member members[XD_NODE_RANKS_MAX];
} xdi_job_world;

/* A piece of the file; when nobody holds it, the next who needs one takes it. */
typedef struct xdi_job_region {
    uint64_t begin, bytes; /* bytes 0: not there yet; atomic, written once */
    uint32_t holders;      /* ranks; atomic */
} xdi_job_region;

/* The beginning of the file. */
typedef struct xdi_job_head {
    uint64_t layout; /* of this struct; written last when the file is made */
    uint64_t slot_bytes;
    int32_t size;
    uint32_t complete;       /* all have joined, and region 0 is there; atomic */
    uint32_t refused;        /* xd_result by which joining ended for everybody, `text` says why; atomic */
    uint32_t region_count;   /* atomic */
    uint64_t bytes;          /* of the file; atomic */
    int32_t culprit;         /* of `refused`; -1: nobody */
    char text[XDI_JOB_TEXT]; /* of `refused` */
    xdi_job_world world;     /* of all that have joined */
    xdi_job_region regions[XDI_JOB_REGIONS];
} xdi_job_head;

/* One process's end of a world of a job; shared by its handles, on several threads. */
typedef struct xdi_job {
    xdi_job_head *head;
    xdi_job_world *world;
    struct xdi_job *first; /* of a world that survivors made: the end of the first one, whose file it uses */
    int region;            /* then: of the world */
    bool asked;            /* for the next */
    char path[96];
    int file; /* open as long as the lock on this rank's byte is needed */
    int rank, size;
    int holders;  /* handles; atomic */
    bool crowded; /* there are more ranks than cores */
} xdi_job;

/* job.c: joins; `region_bytes` is the size of region 0. Errors: see xd_comm_node. *out has one holder. */
XD_PRIVATE xd_result xdi_job_join(xd_ctx *ctx, const xd_node_desc *desc, size_t region_bytes, xdi_job **out);
/* job.c: tells the others what this rank has prepared, and waits for them. */
XD_PRIVATE xd_result xdi_job_meet(xd_ctx *ctx, xdi_job *job, xd_result mine, double deadline);
XD_PRIVATE void xdi_job_hold(xdi_job *job);
/* job.c: the last handle on worlds of the file closes it: then this rank counts as dead. */
XD_PRIVATE void xdi_job_release(xd_ctx *ctx, xdi_job *job);

/* The bytes that the first group of a world of `size` ranks needs. */
typedef size_t xdi_job_bytes(const xdi_job *job, int size);

/* job_shrink.c: a world of those that are left of a broken one. Errors: see xd_comm_shrink. *out has one holder. */
XD_PRIVATE xd_result xdi_job_shrink(xd_ctx *ctx, xdi_job *old, xdi_job_bytes *bytes, double deadline,
                                    xdi_job **out);

/* job.c: takes a zeroed region, held by `holders` ranks; -1: there is no memory. xdi_job_drop: gives up what nobody has heard
 * of. */
XD_PRIVATE int xdi_job_take(xdi_job *job, size_t bytes, int holders);
XD_PRIVATE void xdi_job_drop(const xdi_job *job, int region);
XD_PRIVATE void *xdi_job_map(const xdi_job *job, int region, size_t bytes); /* NULL: no memory */
/* job.c: unmaps a region, if this rank has mapped it, and gives it up. */
XD_PRIVATE void xdi_job_give(const xdi_job *job, int region, void *memory, size_t bytes);

/* job.c: only the first failure is recorded. */
XD_PRIVATE void xdi_job_break(xdi_job *job, xd_result result, int culprit);
XD_PRIVATE uint64_t xdi_job_failure(const xdi_job *job);
/* job.c: whether a world rank has left the world; whether its process has ended, which takes a call of the system. */
XD_PRIVATE bool xdi_job_has_left(const xdi_job *job, int rank);
XD_PRIVATE bool xdi_job_has_died(const xdi_job *job, int rank);

/* job.c: a wait. Its owner asks for what it waits for before each turn, and goes on with turns until it is there. */
typedef struct xdi_job_wait {
    xdi_job_bell *bell;
    double deadline;
    int turn;       /* so far */
    bool armed;     /* sleeps in the next turn unless the bell rings */
    uint32_t rings; /* then: of the bell */
    /* XD_OK, or why the next turn ends the wait: what was waited for may have come just before. */
    xd_result excuse;
    bool tells; /* others may read whom this rank waits for */
} xdi_job_wait;

XD_PRIVATE bool xdi_job_is_crowded(int ranks); /* more than cores */
XD_PRIVATE xdi_job_wait xdi_job_wait_begin(const xdi_job *job, xdi_job_bell *bell, double deadline);
/* job.c: a turn of waiting for the world rank `rank`; false when the world is broken, by this wait or another. `gone`: it is
 * known to have left the group. */
XD_PRIVATE bool xdi_job_turn(xd_ctx *ctx, xdi_job *job, xdi_job_wait *wait, int rank, bool gone);
XD_PRIVATE void xdi_job_wait_end(xdi_job *job, xdi_job_wait *wait);
/* job.c: wakes who sleeps at the bell, after a seq_cst store of what they wait for. */
XD_PRIVATE void xdi_job_ring(xdi_job_bell *bell);
/* job.c: sleeps a fiftieth of a second, or until the bell has rung more often than `rings`: see xdi_job_ring. */
XD_PRIVATE void xdi_job_sleep(xdi_job_bell *bell, uint32_t rings);

#endif
