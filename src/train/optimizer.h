#ifndef XDI_TRAIN_OPTIMIZER_H
#define XDI_TRAIN_OPTIMIZER_H

#include "base/context.h"
#include "kernel/types.h"
#include "train/param.h"

/* Steps one rank's parameters in place, without communication. Master copies and moments are f32. */
typedef struct xd_optimizer xd_optimizer;

/* The update rule. */
typedef enum xd_optimizer_kind {
    XD_OPTIMIZER_ADAMW = 0, /* decoupled weight decay */
    XD_OPTIMIZER_ADAM_L2,   /* weight decay in the gradient (L2) */
    XD_OPTIMIZER_SGD        /* momentum without dampening or Nesterov; decay as ADAM_L2 */
} xd_optimizer_kind;

/* A parameter group; xd_param.group is the index. */
typedef struct xd_optimizer_group {
    double learning_rate_scale; /* factor on the learning rate; 0: no change */
    double weight_decay;        /* replaces the optimizer's; 0: none */
} xd_optimizer_group;

/* Settings; 0 is a number: start from xd_adamw_defaults or xd_adam_defaults. */
typedef struct xd_optimizer_desc {
    const xd_param *params; /* required; [param_count]; borrowed until destruction */
    int64_t param_count;
    xd_optimizer_kind kind;
    double learning_rate;
    double beta1;                     /* Adam: of mean gradients */
    double beta2;                     /* Adam: of mean squares */
    double eps;                       /* Adam; 0 -> 1e-8 */
    double momentum;                  /* SGD */
    double weight_decay;              /* if groups is NULL */
    const xd_optimizer_group *groups; /* [group_count], read at creation; NULL -> one */
    int group_count;
    bool maximize;        /* ascend */
    bool reserve_frozen;  /* state of frozen parameters, for xd_optimizer_thaw */
    bool stochastic_bf16; /* BF16 values without master copy: docs/questions.md */
    uint64_t seed;        /* of its rounding */
} xd_optimizer_desc;

/* One parameter's state, to save or restore in place, in the optimizer's device memory. All but `step` are NULL for buffers
 * and frozen parameters. */
typedef struct xd_optimizer_state {
    float *master;     /* [count]; of bf16 and f16; NULL: f32, stochastic_bf16 */
    float *exp_avg;    /* [count]; mean gradient or momentum; NULL: never stepped */
    float *exp_avg_sq; /* [count]; mean square; NULL: SGD */
    int64_t *step;     /* updates */
} xd_optimizer_state;

struct xd_ema;

/* Modifiers of one step. */
typedef struct xd_optimizer_step_desc {
    /* First factor on gradients, in f32, in device memory as the status; &norm.coefficient clips. NULL or 1 -> none. */
    const float *gradient_scale;
    const xd_status *status; /* its errors prevent the step; NULL -> none do */
    /* [average_count] not NULL, none twice; NULL -> none. Updates each after the step with the bits of
     * xd_ema_update(average, XD_EMA_NEXT, status), in any order, fused where possible. */
    struct xd_ema *const *averages;
    int average_count;
} xd_optimizer_step_desc;

/* Return PyTorch's defaults: learning rate 1e-3, betas 0.9, 0.999, eps 1e-8, weight decay 1e-2 (AdamW) or 0 (Adam). SGD needs
 * kind and learning_rate only. Pure. */
XD_API xd_optimizer_desc xd_adamw_defaults(const xd_param *params, int64_t param_count);
XD_API xd_optimizer_desc xd_adam_defaults(const xd_param *params, int64_t param_count);

/* Creates an optimizer; master copies start as the current values. Local. One allocation, including states to thaw; on
 * a device states are one more, there.
 * Errors: ARGUMENT (learning_rate, eps, weight_decay, momentum: negative or not finite; beta1, beta2: outside [0, 1);
 * groups; stochastic_bf16: no name, negative first), DTYPE (not F32, BF16, F16), MEMORY. */
XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out);

/* Frees the optimizer, not values and gradients. NULL is fine. */
XD_API void xd_optimizer_destroy(xd_optimizer *optimizer);

/* Returns the desc with its defaults. */
XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer);

/* Sets the learning rate of later steps. Errors: ARGUMENT (learning_rate). */
XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate);

/* Steps every parameter with a gradient, except frozen ones and buffers; others keep value, state and step count. Formulas:
 * kernel/optimizer_scalar.h.
 *
 *    desc      NULL -> no modifiers
 *    skipped   out: the status prevented the step; false on a device; may be NULL
 *
 * Local, allocates nothing; the same bits on every device and for every split.
 * Errors, nothing written: ARGUMENT (averages; one at iteration INT64_MAX), STATE (list changed; gradient waits), DTYPE. */
XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped);

/* Begins the state of a parameter that was frozen at creation, with reserve_frozen: zero moments, step 0, master from
 * the current value. Set its `frozen` to false first, and back to true if this fails; until the call succeeds,
 * xd_optimizer_step returns STATE. All ranks thaw the same parameters.
 *
 * Local, allocates nothing. Errors, no change: ARGUMENT (index), STATE (no reserve_frozen; buffer; frozen; has a state;
 * list changed), DTYPE (nothing reserved for it). */
XD_API xd_result xd_optimizer_thaw(xd_optimizer *optimizer, int64_t index);

/* Returns a parameter's state; all NULL out of range. */
XD_API xd_optimizer_state xd_optimizer_state_at(xd_optimizer *optimizer, int64_t index);

#endif
