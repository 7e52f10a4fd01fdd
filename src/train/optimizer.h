#ifndef XDI_TRAIN_OPTIMIZER_H
#define XDI_TRAIN_OPTIMIZER_H

#include "base/context.h"
#include "kernel/types.h"
#include "train/param.h"

/* Steps one rank's parameters in place, without communication; the same bits for every split. Master copies and moments are
 * f32. */
typedef struct xd_optimizer xd_optimizer;

/* The update rule. */
typedef enum xd_optimizer_kind {
    XD_OPTIMIZER_ADAMW = 0, /* the default; decoupled weight decay */
    XD_OPTIMIZER_ADAM_L2,   /* weight decay as an L2 term of the gradient */
    XD_OPTIMIZER_SGD        /* momentum without dampening or Nesterov; weight decay as ADAM_L2 */
} xd_optimizer_kind;

/* Settings of a parameter group; xd_param.group is the index. */
typedef struct xd_optimizer_group {
    double learning_rate_scale; /* factor on the learning rate; 0: no change */
    double weight_decay;        /* replaces the optimizer's; 0: none */
} xd_optimizer_group;

/* Settings of an optimizer. Numbers are used as given, 0 too: start from a recipe such as xd_adamw_defaults. */
typedef struct xd_optimizer_desc {
    const xd_param *params; /* required; [param_count]; borrowed until xd_optimizer_destroy */
    int64_t param_count;
    xd_optimizer_kind kind;
    double learning_rate;
    double beta1;                     /* Adam; decay of mean gradients */
    double beta2;                     /* Adam; decay of mean squares */
    double eps;                       /* Adam; 0 -> 1e-8 */
    double momentum;                  /* SGD */
    double weight_decay;              /* used when groups is NULL */
    const xd_optimizer_group *groups; /* [group_count], read during creation; NULL -> one default group */
    int group_count;
    bool maximize;        /* ascend instead of descend */
    bool reserve_frozen;  /* allocate state of frozen parameters for xd_optimizer_thaw */
    bool stochastic_bf16; /* BF16 values without master copy, stochastic rounding, see below */
    uint64_t seed;        /* of that rounding */
} xd_optimizer_desc;

/* stochastic_bf16: a step computes in f32 from the BF16 value and rounds x to a neighbour a < b at random. The probability
 * of b is (x - a) / (b - a), a multiple of 2^-16, so the mean is exact. BF16 numbers stay; above the largest the neighbour
 * is infinity. This saves the 4 bytes an element of a master copy. Small steps still move weights on average.
 *
 * Random bits depend on (seed, name, step count, index in the whole parameter). They are the same on every device and CPU
 * level, after a resume, and for every cut into adjacent elements from xd_param.first. Cuts along another dimension differ. */

/* One parameter's state, to save or restore in place: pointers to device memory of the optimizer. All but `step` are NULL
 * for buffers and frozen parameters. */
typedef struct xd_optimizer_state {
    float *master;     /* [count]; f32 master of a bf16 or f16 value; NULL for f32 and stochastic_bf16 */
    float *exp_avg;    /* [count]; Adam: mean gradient; SGD: momentum; NULL when never stepped */
    float *exp_avg_sq; /* [count]; Adam: mean squared gradient; NULL for SGD */
    int64_t *step;     /* updates so far */
} xd_optimizer_state;

struct xd_ema;

/* Modifiers of one step. */
typedef struct xd_optimizer_step_desc {
    /* Multiplies every gradient first, in f32, as if f32 gradients were scaled before; &norm.coefficient clips. In device
     * memory, as the status. NULL or 1 -> none. */
    const float *gradient_scale;
    const xd_status *status; /* an error in it prevents the step; NULL -> always step */
    /* [average_count], no NULL entry, none twice; NULL -> none. Each is updated as by xd_ema_update(average, XD_EMA_NEXT,
     * status) after the step, to the bit, in any order. Up to nine are fused if they are over this list and count no
     * elements. A device fuses one without compensation or stochastic rounding, and eight more with one more read. Average
     * another one's shadows by a separate call. */
    struct xd_ema *const *averages;
    int average_count;
} xd_optimizer_step_desc;

/* Return PyTorch's defaults: learning rate 1e-3, betas 0.9 and 0.999, eps 1e-8. AdamW: weight decay 1e-2, Adam: 0. SGD needs
 * kind and learning_rate only. Pure. */
XD_API xd_optimizer_desc xd_adamw_defaults(const xd_param *params, int64_t param_count);
XD_API xd_optimizer_desc xd_adam_defaults(const xd_param *params, int64_t param_count);

/* Creates an optimizer; master copies start as the current values. One allocation, including states to thaw.
 *
 *    desc   read during the call, except desc->params
 *
 * Local. Errors: ARGUMENT (learning rate, eps, weight decay or momentum negative or not finite; beta outside [0, 1); group;
 * stochastic_bf16: BF16 parameter without name, negative `first`), DTYPE (not F32, BF16 or F16), MEMORY. */
XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out);

/* Frees the optimizer; values and gradients remain. NULL is fine. */
XD_API void xd_optimizer_destroy(xd_optimizer *optimizer);

/* Returns the desc with defaults filled in. */
XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer);

/* Sets the learning rate of later steps. Errors: ARGUMENT (negative or not finite). */
XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate);

/* Steps every parameter with a gradient, except frozen ones and buffers; others keep value, state and step count. Formulas
 * and rounding: kernel/optimizer_scalar.h.
 *
 *    desc      NULL -> no modifiers
 *    skipped   when not NULL: receives whether desc->status prevented the step; false on a device, where kernels read it
 *
 * Local, allocates nothing; the same bits on every device and for every split.
 * Errors, nothing written: ARGUMENT (average NULL, twice, or at iteration INT64_MAX), STATE (a list changed beyond its
 * gradients; a gradient waits for xd_parallel_reduce), DTYPE. */
XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped);

/* Begins the state of parameter `index`, frozen at creation with reserve_frozen: zero moments, step 0, master from the
 * current value. It is then stepped and saved as if never frozen.
 *
 * The caller sets the entry's `frozen` to false, and back if this fails; in between xd_optimizer_step returns STATE.
 * Averages and norms follow the flag. All ranks thaw the same parameters. To rest one again, give it no gradient.
 *
 * Local, allocates nothing. Errors, no change: ARGUMENT (index), STATE (no reserve_frozen; buffer; frozen in the list; has a
 * state; otherwise changed), DTYPE (no memory reserved for the frozen dtype). */
XD_API xd_result xd_optimizer_thaw(xd_optimizer *optimizer, int64_t index);

/* Returns the state of parameter `index`; all NULL out of range. */
XD_API xd_optimizer_state xd_optimizer_state_at(xd_optimizer *optimizer, int64_t index);

#endif
