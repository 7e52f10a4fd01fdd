#ifndef XDI_TRAIN_PARAM_H
#define XDI_TRAIN_PARAM_H

#include "base/dtype.h"

/* What the gradient of a parameter is worth now. */
typedef enum xd_gradient_state {
    XD_GRADIENT_READY = 0, /* what `gradient` holds */
    XD_GRADIENT_WAITS, /* backwards of this step wait for xd_parallel_reduce: steps and norms are refused */
    XD_GRADIENT_NONE   /* none in this step: the parameter is left alone, as where `gradient` is NULL */
} xd_gradient_state;

/* This rank's part of one named parameter or buffer. Optimizers, norms and averages take lists of them.
 * Optimizers and averages keep the pointer: the caller owns the list and may change `gradient` between steps, and
 * `frozen` to false with xd_optimizer_thaw, nothing else. All ranks list the same names in the same order; where a rank
 * holds no element of a parameter, its count is 0. */
typedef struct xd_param {
    const char *name;
    void *value;             /* [count] */
    void *gradient;          /* [count]; NULL -> no gradient in this step: the parameter is skipped */
    xd_dtype dtype;          /* of value */
    xd_dtype gradient_dtype; /* NONE -> F32 */
    int64_t count;           /* elements here */
    const int64_t *shape;    /* [dims] local shape, compared when averages are loaded; NULL -> flat */
    int dims;
    int group;     /* index into the optimizer's groups */
    bool frozen;   /* never stepped, not in norms; averaged like the others */
    bool buffer;   /* not a parameter: never stepped, not in norms, copied instead of averaged */
    bool no_decay; /* no weight decay (biases, norms) */
    bool replica;  /* another rank holds the same elements and counts them in norms; exactly one rank of
                    * those that hold an element leaves this false */
    int64_t first; /* of the elements here, which are adjacent in the whole parameter: its index there; read
                    * where bf16 is rounded at random (stochastic_bf16 of optimizers and averages) */
    const xd_gradient_state *state; /* of the gradient: a wrapper's, which changes it; NULL -> READY */
} xd_param;

#endif
