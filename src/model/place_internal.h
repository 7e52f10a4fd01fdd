#ifndef XDI_MODEL_PLACE_INTERNAL_H
#define XDI_MODEL_PLACE_INTERNAL_H

#include "base/internal.h"
#include "comm/leaves.h"
#include "comm/queue.h"
#include "model/describe_internal.h"
#include "model/parallel.h"

/* Settings of a wrapper, of either kind. */
typedef struct xdi_wrap_settings {
    bool sharded;         /* FSDP */
    bool split_optimizer; /* DDP: each rank steps its part */
    bool reserve_frozen;  /* frozen weights have buckets, which rest until one of their weights is thawed */
    bool wide_padding;    /* of what is cut into parts */
    bool gathers_in_step; /* DDP: of a pipeline */
    xd_queue *gathers, *reductions; /* the caller's; NULL -> in the call itself */
    int prefetch;                   /* units that are gathered ahead */
    int reshard_ranks;              /* that keep a unit together after it was gathered */
    /* DDP: elements of a bucket, or about how many buckets; 0 -> the default */
    int64_t bucket_size, bucket_parts;
    int stage, chunk;                /* DDP: of a pipeline; later ones have one bucket */
    int stages;                      /* of this rank, as its build says; 0 -> this one */
    int compare_steps;               /* as in xd_ddp_desc */
    xd_dtype sent_dtype, view_dtype; /* of floating weights; NONE -> their own */
    bool has_groups; /* the caller has given some: tp, pp and embedding of these, NULL for one rank */
    xd_groups groups;
} xdi_wrap_settings;

/* The micro-batches of a step, and how they fall to the data ranks of a group. */
typedef struct xdi_batches {
    bool strided;       /* a rank has every N-th one */
    xd_leaves own;      /* of this rank in its group, in order unless they are strided */
    int64_t max, total; /* of the rank that has most; of all groups */
    /* [ranks + replica_count]: of each data rank, then of each group, in the sums over them */
    xd_leaves *known;
    float before, after; /* factors of each, and of the sum of all */
} xdi_batches;

/* Where a wrapper stands among its ranks, and what it was asked for: const once it is created. */
typedef struct xdi_place {
    xd_ctx *ctx;
    xd_model *model;
    xd_comm *data, *replicas; /* replicas NULL -> one group */
    xd_comm *resharded; /* the wrapper's own: the ranks that keep a unit together; NULL for one and for all */
    int rank, ranks;    /* in data */
    int replica, replica_count;
    int members;       /* of an expert-parallel group, whose micro-batches come in turn; else 1 */
    bool of_experts;   /* the wrapper of experts inside that of the other weights */
    bool invariant;    /* the reduction mode */
    bool alone;        /* FSDP of one rank, which several would gather units for */
    bool on_host;      /* this rank's parts are kept in memory of xd_fsdp_desc.host */
    xd_ctx *parts_ctx; /* in whose memory they are kept: that one, or the model's */
    xdi_wrap_settings settings;
    xdi_batches batches;
} xdi_place;

/* parallel.c: the place of an empty wrapper of a kind, one of the two; parallel_place.c: then, with its model, on a rank
 * of a group among its replicas. */
XD_PRIVATE void xdi_place_set_kind(xdi_place *place, xd_fsdp_desc *settings, const xd_ddp_desc *ddp,
                                   const xd_fsdp_desc *fsdp);
XD_PRIVATE void xdi_place_set_rank(xdi_place *place, int rank, int ranks, int replica, int replica_count);

/* parallel_place.c: whether a weight, or what it is tied to, is an expert's; and whether a wrapper has it. */
XD_PRIVATE bool xdi_weight_is_expert(const xd_weight *w);
XD_PRIVATE bool xdi_place_has(const xdi_place *place, const xd_weight *w);

/* ---- micro-batches ---- */

/* parallel_place.c: micro-batches of one of the data ranks that this rank has some of, in its group, where they lie in
 * rows; how many backwards a block has in a step; the number of one of these in the whole step, -1 for none; and whether
 * it is this rank's. */
XD_PRIVATE xd_interval xdi_batches_row(const xdi_place *place, int member);
XD_PRIVATE int64_t xdi_batches_passes(const xdi_place *place);
XD_PRIVATE int64_t xdi_batches_number(const xdi_place *place, int64_t micro_batch);
XD_PRIVATE bool xdi_batches_owns(const xdi_place *place, int64_t micro_batch);
/* parallel_gradient.c: the factors that follow from the divisors, once the micro-batches have fallen to ranks. */
XD_PRIVATE xd_result xdi_batches_set_factors(xdi_place *place, const xd_gradient_divisors *divide);

/* parallel_experts.c: whether each member's leaves have a stack of their own. */
XD_PRIVATE bool xdi_place_has_lanes(const xdi_place *place);
/* parallel_experts.c: whether leaves are sent one by one, or a round of them: they are formed in memory of their unit; whole
 * gradients that are there at once; and which of them takes the gradient of a leaf. */
XD_PRIVATE bool xdi_gradient_is_sent(const xdi_place *place);
XD_PRIVATE int64_t xdi_gradient_levels(const xdi_place *place);
XD_PRIVATE int xdi_gradient_member(const xdi_place *place, int64_t micro_batch);
/* parallel_flat.c: the leaves that wait on a bucket's stack: those of a rank, or, where leaves are strided, parts of sums
 * over the ranks; outside of INVARIANT mode a rank adds its own up first. */
XD_PRIVATE xd_leaves xdi_bucket_leaves(const xdi_place *place);

/* ---- parts of this rank ---- */

/* parallel_host.c: whether this rank's parts may be kept on the host. */
XD_PRIVATE xd_result xdi_place_check_host(const xdi_place *place);
/* parallel_host.c: whether open units and their gradients have memory of their own: there are parts of other ranks, or
 * the own one is not there where blocks show it. */
XD_PRIVATE bool xdi_place_assembles(const xdi_place *place);
/* parallel_values.c: whether a few ranks keep gathered units together. */
XD_PRIVATE bool xdi_place_reshards(const xdi_place *place);
/* parallel_host.c: copies from memory of the model's context to this rank's parts, which are written on return; and back. */
XD_PRIVATE xd_result xdi_parts_write(const xdi_place *place, void *to, const void *from, size_t bytes);
XD_PRIVATE xd_result xdi_parts_read(const xdi_place *place, void *to, const void *from, size_t bytes);
/* parallel_host.c: waits until no copy reads parts that are kept on the host. */
XD_PRIVATE xd_result xdi_parts_settle(const xdi_place *place);

/* parallel_units.c: the type in which blocks show a weight. */
XD_PRIVATE xd_dtype xdi_weight_view_dtype(const xdi_wrap_settings *settings, const xd_weight *w);

/* parallel_spectral.c: the vectors of blocks with spectral norm get the type in which their weights are shown: first the
 * type alone, then, in memory of the wrapper, the values; and each has what it was when the wrapper goes, with its values
 * from `kept`, NULL where the model's own have not changed. */
XD_PRIVATE xd_result xdi_spectral_retype(const xdi_place *place);
XD_PRIVATE xd_result xdi_spectral_take(const xdi_place *place, xd_weight *weight, void *kept);
XD_PRIVATE void xdi_spectral_give_back(xd_weight *weight, const void *kept);

/* parallel.c: whether a rank of a lower number in the weight's layout holds the same elements. */
XD_PRIVATE bool xdi_weight_is_copy(const xd_weight *w);

#endif
