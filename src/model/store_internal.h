#ifndef XDI_MODEL_STORE_INTERNAL_H
#define XDI_MODEL_STORE_INTERNAL_H

#include "base/internal.h"
#include "comm/leaves.h"
#include "comm/queue.h"
#include "model/buckets_internal.h"
#include "model/describe_internal.h"
#include "model/parallel.h"
#include "model/place_internal.h"

/* A record on a queue, from its start to its wait. */
typedef struct xdi_flight {
    bool open;
    xd_ticket ticket;
} xdi_flight;

/* A bucket of a flat buffer: the gradients that are summed at once. */
typedef struct xdi_bucket {
    struct xdi_flat *flat;
    xd_interval buffer; /* of the flat buffer */
    int64_t kept;       /* elements of the sum that stay here: this rank's part, or all */
    int64_t blocks;     /* that add to it, ties included; 0: it rests */
    int64_t done; /* of these, in the leaf that is being formed, or in the round of those of all members */
    int64_t micro_batch; /* leaves formed so far */
    /* [members] the whole gradient of each leaf that is being formed; NULL before its first backward, and of members
     * whose leaves are added to that of the first */
    float **places;
    xd_leaf_stack *stack; /* of whole leaves; of parts of sums over the ranks where leaves are strided */
    float *sum;           /* [kept], once reduced; on the host if parts are */
    /* [kept] in memory of the device, where a sum passes on its way to the host; NULL -> it does not */
    float *landed;
    bool reduced;
    /* [members] instead of the stack: of each member's leaves, where they come in turn and lie in rows; NULL -> none */
    xd_leaf_stack **lanes;
    float *joined;        /* the nodes of all lanes, as one stack would have them; NULL -> none */
    xdi_flight sending;   /* the sum over the ranks that is under way: of a strided leaf, or of all leaves */
    xdi_flight spreading; /* values that ranks have stepped in parts, to all */
    uint64_t seen;        /* the last round over a block's buckets that met it */
} xdi_bucket;

/* Weights of one unit and one type, one after another. What is kept has the type of the weights; it may be sent in
 * another one, and shown in a third. */
typedef struct xdi_flat {
    const xdi_place *place;
    struct xdi_unit *unit;
    xd_weight **weights; /* [count] in the model's order */
    int64_t count;
    xd_dtype dtype, sent_dtype, view_dtype;
    bool trained; /* or may be later */
    bool whole;   /* every rank keeps all values; else its part, and the unit is gathered while it is open */
    xdi_bucket_plan *plan;
    size_t kept_bytes; /* of values */
    /* kept: all of them or this rank's part; NULL when all weights have their own; on the host if parts are */
    void *values;
    /* [numel / ranks] this rank's part as it is sent: `values`, or a copy; on the host if parts are. When whole NULL, but
     * [numel] as shown where that is on the host and of another type */
    void *sent;
    void *shown;         /* [numel] values that all ranks keep, as they are shown; NULL -> as they are kept */
    void *resharded;     /* [numel / reshard_ranks] the part of a gathered unit that stays; NULL -> none */
    size_t slot;         /* bytes from the begin of a gathered unit to these, as they were sent */
    size_t view_slot;    /* and as they are shown, where that is another type */
    xdi_flight arriving; /* its gather */
    int64_t offset;      /* elements from the begin of a unit's whole gradient to these */
    xdi_bucket *buckets; /* [bucket_count] */
    int64_t bucket_count; /* 0 when it is not trained */
} xdi_flat;

/* What is gathered and released together; under DDP the one unit is the whole model. */
struct xdi_unit {
    xd_block *block;
    xdi_flat *flats; /* [flat_count] */
    int64_t flat_count;
    int level;              /* units around it */
    size_t gathered_bytes;  /* of its values, 0 when they are kept whole */
    int64_t gradient_count; /* elements of its whole gradient */
    int64_t open;           /* brackets that are open */
    /* [slot_count] where they may be: shared with the units of its level, or its own */
    struct xdi_unit_slot *slots;
    int slot_count;
    struct xdi_unit_slot *slot;     /* where they are, or arrive; NULL -> not gathered */
    bool arriving;                  /* started, and not opened yet */
    bool resharded;                 /* its flats' parts of that name hold the current values */
    struct xdi_gradient_slot *sums; /* [sum_count] where its whole gradient may be: shared by its level */
    int sum_count;
    struct xdi_gradient_slot *sum; /* where it is; NULL -> nowhere */
    int64_t forming, sending; /* buckets whose place is there: that blocks add to; whose sum is under way */
};

/* Memory for the values of one unit at a time. */
typedef struct xdi_unit_slot {
    size_t bytes;
    unsigned char *memory;
    struct xdi_unit *unit; /* whose values are there; NULL -> nobody's */
    uint64_t opened;       /* when that unit was last opened */
} xdi_unit_slot;

/* Memory for the whole gradient of one unit at a time. */
typedef struct xdi_gradient_slot {
    int64_t count;
    float *memory;         /* [count] */
    struct xdi_unit *unit; /* whose it is; NULL -> nobody's */
    uint64_t taken;        /* when that unit took it */
} xdi_gradient_slot;

/* Memory of a wrapper. */
typedef struct xdi_wrap_memory {
    void *device, *host;     /* the latter NULL unless parts are kept on the host */
    bool unwritten;          /* where parts of values are kept is not cleared */
    void *locked;            /* `host`, where the model's device has locked its pages; else NULL */
    xd_parallel_bytes bytes; /* by purpose */
} xdi_wrap_memory;

/* Lists for one call at a time. */
typedef struct xdi_store_scratch {
    int64_t *counts;      /* [ranks] */
    int *used;            /* [weights of the model] */
    const void **forests; /* [members], and which leaves these are */
    xd_leaves *forest_leaves;
} xdi_store_scratch;

/* What a wrapper keeps of its model on this rank: values, gradients, and where units are gathered. */
typedef struct xdi_store {
    const xdi_place *place;
    int level_count;        /* of units inside units */
    struct xdi_unit *units; /* [unit_count], a unit after those around it */
    int64_t unit_count;
    xdi_flat *flats; /* [flat_count], those of a unit together */
    int64_t flat_count;
    xdi_bucket *buckets; /* [bucket_count] of all flats */
    int64_t bucket_count;
    xd_leaf_stack **lanes; /* [bucket_count, members] of all buckets; NULL -> none */
    float **places;        /* [bucket_count, members] of all buckets */
    xd_weight **weights;   /* of all flats */
    xdi_unit_slot *slots;  /* [slot_count] */
    int64_t slot_count;
    xdi_gradient_slot *sums; /* [sum_count] */
    int64_t sum_count;
    uint64_t round;  /* over a block's buckets */
    uint64_t opened; /* units so far, and pieces of memory that they took */
    xdi_wrap_memory memory;
    xdi_store_scratch scratch;
} xdi_store;

/* Memory of a wrapper that is measured or given out: of the device, and of the host where parts are there. */
typedef struct xdi_room {
    xd_arena device, host;
    size_t values; /* bytes at the begin of what is kept: this rank's parts of values */
} xdi_room;

/* parallel_units.c: the units of a model and the weights of each, by type. On failure the wrapper is to be destroyed. */
XD_PRIVATE xd_result xdi_store_divide(xdi_store *store, const xd_fsdp_desc *d);
/* parallel_place.c: the unit of a block that is wrapped. */
XD_PRIVATE struct xdi_unit *xdi_block_unit(const xd_block *block);

/* parallel_flat.c: plans of the flat buffers; what all memory takes, by purpose in memory.bytes; the memory, and the
 * values in it. */
XD_PRIVATE xd_result xdi_store_plan(xdi_store *store);
XD_PRIVATE xd_result xdi_store_measure(xdi_store *store, xdi_room *room);
XD_PRIVATE xd_result xdi_store_take_memory(xdi_store *store);
XD_PRIVATE xd_result xdi_store_take_values(xdi_store *store);
/* parallel_flat.c: releases the model's own storage, once all values have been taken, where the wrapper has them instead. */
XD_PRIVATE void xdi_place_leave_storage(const xdi_place *place);

/* parallel_flat.c: what this rank has of a weight: a range of its region, and where that lies in the kept values and sums.
 * False when that is nothing. */
XD_PRIVATE bool xdi_flat_piece(const xd_weight *weight, xdi_bucket_piece *out);
/* parallel_flat.c: the address of a weight's kept values from element `at` of its region on. */
XD_PRIVATE void *xdi_flat_value(const xd_weight *weight, const xdi_bucket_piece *piece);
/* parallel_flat.c: the place of a weight in the kept values of its buffer. */
XD_PRIVATE void *xdi_flat_place(const xd_weight *weight);

/* parallel_flat.c: the bucket with the place of a weight's owner; NULL when it has no gradient and never will. And the
 * one that takes its gradient now; NULL when it does not train. */
XD_PRIVATE xdi_bucket *xdi_flat_bucket(const xd_weight *owner);
XD_PRIVATE xdi_bucket *xdi_gradient_bucket(const xd_weight *owner);
/* parallel_flat.c: how many blocks add to each bucket, from the weights that train now. */
XD_PRIVATE void xdi_store_count_blocks(xdi_store *store);
/* parallel_flat.c: the bucket of a block's weight number i, each bucket once in a round, which begins at i = 0; NULL ->
 * none, or met already. */
XD_PRIVATE xdi_bucket *xdi_block_bucket(xdi_store *store, const xd_block *block, int64_t i);

/* ---- records that are under way ---- */

/* parallel_flight.c: runs a record on a queue, or at once where that is NULL; and waits for it. */
XD_PRIVATE xd_result xdi_flight_start(xd_queue *queue, xd_comm *comm, const xd_collective *record,
                                      xdi_flight *flight);
XD_PRIVATE xd_result xdi_flight_land(xd_queue *queue, xdi_flight *flight);
/* parallel_flight.c: waits for everything that is under way, whatever comes of it. */
XD_PRIVATE void xdi_store_land(xdi_store *store);
/* parallel_flight.c: waits for values that ranks have stepped in parts. */
XD_PRIVATE xd_result xdi_store_land_values(xdi_store *store);
/* parallel_flight.c: whether the caller's queues are over the data ranks and have room for all that is under way at once. */
XD_PRIVATE xd_result xdi_store_check_queues(const xdi_store *store);

/* ---- values ---- */

/* parallel_values.c: which slots each unit may use; in lists that are allocated. */
XD_PRIVATE void xdi_store_deal_slots(xdi_store *store);
/* parallel_values.c: a bracket of a unit begins: its values are gathered, unless they still are from before, and those of
 * the next units are started. */
XD_PRIVATE xd_result xdi_unit_open(xdi_store *store, struct xdi_unit *unit, bool backward);
/* parallel_values.c: drops the units that were gathered ahead and not opened. */
XD_PRIVATE void xdi_store_drop_ahead(xdi_store *store);
/* parallel_values.c: where a weight's values are while its unit is open, or without a wrapper. */
XD_PRIVATE void *xdi_weight_shown(const xd_weight *owner);
/* parallel_values.c: after kept values have changed: no unit is gathered; other types of what is kept are made again. */
XD_PRIVATE void xdi_store_forget_values(xdi_store *store);
XD_PRIVATE xd_result xdi_store_convert_values(xdi_store *store);
/* parallel_flat.c: after kept values have changed: where ranks step parts of weights that all keep, every rank's part to
 * all; and what blocks show is made from them again. */
XD_PRIVATE xd_result xdi_store_renew_values(xdi_store *store);

/* ---- lists ---- */

/* parallel.c: whether optimizers and files see a weight: once, and not what is computed again. */
XD_PRIVATE bool xdi_weight_is_listed(const xd_weight *w);
/* parallel.c: the entry of such lists for this rank's part of a weight, and where that is; without value and gradient. */
XD_PRIVATE xd_param xdi_weight_describe_part(const xd_weight *w, xdi_bucket_piece *piece);
/* parallel.c: an entry of xd_parallel_params, and of xd_parallel_parts, of any weight that is no tie. */
XD_PRIVATE xd_param xdi_weight_kept_param(const xd_weight *w);
XD_PRIVATE xd_tensor_part xdi_weight_kept_part(const xd_weight *w);
/* parallel.c: whether another rank of the wrapper, or of the cut by tensor parallelism, owns what is here of a weight. */
XD_PRIVATE bool xdi_weight_is_elsewhere(const xd_weight *w);

/* ---- gradients ---- */

/* parallel_experts.c: whether leaves of a bucket are being formed; the leaves of a round along the tree over them, at the
 * place of the first; and the nodes of a bucket's lanes as those of one stack. */
XD_PRIVATE bool xdi_bucket_is_forming(const xdi_bucket *b);
XD_PRIVATE xd_result xdi_round_join(const xdi_store *store, const xdi_bucket *b);
XD_PRIVATE xd_result xdi_lanes_join(const xdi_store *store, const xdi_bucket *b);
/* parallel_gradient.c: STATE for a block's backward of a leaf while another block has not ended one before, where both
 * add to the same sum and its leaves are kept apart. */
XD_PRIVATE xd_result xdi_gradient_check_micro_batch(const xdi_place *place, const xd_block *block,
                                                    int64_t micro_batch);
/* parallel_gradient.c: the place where a weight's gradient of a leaf is to be added; and adds the caller's there. */
XD_PRIVATE xd_result xdi_gradient_place(xdi_store *store, const xd_weight *weight, int64_t micro_batch,
                                        void **out);
XD_PRIVATE xd_result xdi_gradient_add(const xd_weight *weight, void *place);
/* parallel_gradient.c: sums what is left. */
XD_PRIVATE xd_result xdi_gradient_reduce(xdi_store *store);

#endif
