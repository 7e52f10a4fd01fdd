#ifndef XDI_NCCL_INTERNAL_H
#define XDI_NCCL_INTERNAL_H

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

#endif
