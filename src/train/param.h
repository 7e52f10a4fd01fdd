#ifndef XDI_TRAIN_PARAM_H
#define XDI_TRAIN_PARAM_H

#include "base/dtype.h"

/* The state of a gradient. */
typedef enum xd_gradient_state {
    XD_GRADIENT_READY = 0, /* valid */
    XD_GRADIENT_WAITS,     /* for xd_parallel_reduce: steps and norms are refused */
    XD_GRADIENT_NONE       /* as `gradient` NULL */
} xd_gradient_state;

/* This rank's part of a named parameter or buffer. Optimizers and averages keep the pointer to the caller's list.
 * Between steps a program changes only `gradient`, and `frozen` with xd_optimizer_thaw. All ranks list the same names
 * in one order, with count 0 where they hold nothing. */
typedef struct xd_param {
    const char *name;
    void *value;             /* [count] */
    void *gradient;          /* [count]; NULL -> none in this step; a WARN if all are */
    xd_dtype dtype;          /* of value */
    xd_dtype gradient_dtype; /* NONE -> F32 */
    int64_t count;           /* elements on this rank */
    const int64_t *shape;    /* [dims] local, compared by xd_ema_load, xd_ema_copy_to; NULL -> flat */
    int dims;
    int group;     /* of the optimizer */
    bool frozen;   /* not stepped, not in norms; averaged */
    bool buffer;   /* not stepped, not in norms; copied, or averaged (average_buffers) */
    bool no_decay; /* no weight decay (biases, norms) */
    /* Norms count these elements on another rank; exactly one holder has false. */
    bool replica;
    /* Index of the first of these adjacent elements in the whole parameter; only stochastic_bf16 reads it. */
    int64_t first;
    const xd_gradient_state *state; /* of a wrapper; NULL -> READY */
} xd_param;

#endif
