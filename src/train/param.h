#ifndef XDI_TRAIN_PARAM_H
#define XDI_TRAIN_PARAM_H

#include "base/dtype.h"

/* The state of a gradient. */
typedef enum xd_gradient_state {
    XD_GRADIENT_READY = 0, /* `gradient` is valid */
    XD_GRADIENT_WAITS,     /* backwards wait for xd_parallel_reduce: steps and norms are refused */
    XD_GRADIENT_NONE       /* none in this step, as with `gradient` NULL */
} xd_gradient_state;

/* This rank's part of one named parameter or buffer. Optimizers and averages keep the pointer to a list. The caller owns the
 * list; between steps it may change `gradient`, and set `frozen` to false with xd_optimizer_thaw, nothing else. All ranks
 * list the same names in the same order, with count 0 where they hold nothing. */
typedef struct xd_param {
    const char *name;
    void *value;             /* [count] */
    void *gradient;          /* [count]; NULL -> none in this step: skipped */
    xd_dtype dtype;          /* of value */
    xd_dtype gradient_dtype; /* NONE -> F32 */
    int64_t count;           /* elements on this rank */
    const int64_t *shape; /* [dims] local shape, compared by xd_ema_load and xd_ema_copy_to; NULL -> flat */
    int dims;
    int group;     /* index into the optimizer's groups */
    bool frozen;   /* not stepped, not in norms; averaged */
    bool buffer;   /* not stepped, not in norms; copied, or averaged (average_buffers) */
    bool no_decay; /* no weight decay (biases, norms) */
    /* another rank counts these elements in norms; exactly one holder of an element has false */
    bool replica;
    /* Index of the first element in the whole parameter, if the elements are adjacent there. Only stochastic_bf16 reads it. */
    int64_t first;
    const xd_gradient_state *state; /* set by a wrapper; NULL -> READY */
} xd_param;

#endif
