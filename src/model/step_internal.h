#ifndef XDI_MODEL_STEP_INTERNAL_H
#define XDI_MODEL_STEP_INTERNAL_H

#include "base/internal.h"
#include "model/describe_internal.h"
#include "model/pass.h"
#include "model/place_internal.h"
#include "model/store_internal.h"

/* A bracket of this step: a pass, one with more to follow, or a skip. */
enum { XDI_OPENINGS = 64, XDI_OPENING_MORE = XD_PASS_INFERENCE + 1, XDI_OPENING_SKIP };

typedef struct xdi_opening {
    const xd_block *block;
    int kind;
    int64_t micro_batch;
    uint64_t signature; /* of it and all before */
} xdi_opening;

/* The order of the brackets of a step. */
typedef struct xdi_order {
    uint64_t signature;                 /* of all of them */
    xdi_opening openings[XDI_OPENINGS]; /* the last of them: number i at i modulo their number */
    int64_t opening_count;
} xdi_order;

/* Where a wrapper is in its step. xd_parallel_publish resets the first ones. */
typedef struct xdi_step {
    xdi_order order;
    int64_t launched; /* DDP: buckets whose sum was started, in order */
    bool waits;       /* some micro-batch has ended that is not summed yet */
    bool reduced;     /* between reduce and publish */
    bool summed;      /* what traits say over the groups */
    bool finished;    /* xd_pipeline_finish was called */
    bool elsewhere;   /* when ranks were to agree on the last sum some rank was in another call */
    int64_t open;     /* brackets */
    /* over all steps */
    bool compared[3];  /* with the ranks of each kind of traits: how many weights are summed */
    int64_t published; /* steps so far */
    bool recorded;     /* a graph has steps that publish */
    bool late;         /* DDP: sums begin in xd_parallel_reduce alone */
} xdi_step;

/* parallel_order.c: a bracket is added to what ranks compare at the end of a step; and, when that differs, the error that
 * names the first two that do. Collective. */
XD_PRIVATE void xdi_order_add(xdi_order *order, const xd_block *block, xd_pass pass, bool skipped);
XD_PRIVATE xd_result xdi_order_explain(const xdi_order *order, const xd_model *model, xd_comm *comm);

/* parallel_state.c: whether a block has a weight that trains; a backward opens a block, or its weights are in a
 * micro-batch of the caller's. */
XD_PRIVATE bool xdi_block_trains(const xd_block *block);
XD_PRIVATE void xdi_state_use(const xd_block *block);
/* parallel_state.c: what the gradients of a model's weights are worth: once a micro-batch has ended, and when a step ends. */
XD_PRIVATE void xdi_state_wait(const xd_model *model, xdi_step *step);
XD_PRIVATE void xdi_state_reset(const xd_model *model, xdi_step *step);
/* parallel_state.c: whether a weight of this rank has blocks that were all skipped in all micro-batches; and what
 * gradients are worth once all are summed: collective where `skipped` says that some rank has such a weight. */
XD_PRIVATE bool xdi_state_skips(const xdi_place *place);
XD_PRIVATE xd_result xdi_state_sum(const xdi_store *store, bool skipped);

/* parallel_gradient.c: what follows from the end of a block's last backward of a micro-batch; and forgets those of the
 * step. */
XD_PRIVATE xd_result xdi_gradient_finish(xdi_store *store, xdi_step *step, xd_block *block);
XD_PRIVATE void xdi_gradient_reset(xdi_store *store, xdi_step *step);

#endif
