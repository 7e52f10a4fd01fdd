#ifndef XDI_TRAIN_OPTIMIZER_H
#define XDI_TRAIN_OPTIMIZER_H

#include "base/context.h"
#include "kernel/types.h"
#include "train/param.h"

/* Steps the parameters of one rank. Works on shards in place, needs no communication, and gives the same
 * bits however the parameters are split. Master copies and moments are f32. */
typedef struct xd_optimizer xd_optimizer;

/* Which update. */
typedef enum xd_optimizer_kind {
    XD_OPTIMIZER_ADAMW = 0, /* the default: decoupled weight decay */
    XD_OPTIMIZER_ADAM_L2,   /* weight decay as an L2 term of the gradient */
    XD_OPTIMIZER_SGD        /* momentum, neither dampened nor Nesterov's; weight decay as in ADAM_L2 */
} xd_optimizer_kind;

/* What differs between groups of parameters; xd_param.group is the index. */
typedef struct xd_optimizer_group {
    double learning_rate_scale; /* factor on the learning rate; 0: the group is not changed */
    double weight_decay;        /* instead of the optimizer's; 0: none */
} xd_optimizer_group;

/* Settings of an optimizer. Numbers are used as given, 0 too, so start from xd_adamw_defaults or another recipe. */
typedef struct xd_optimizer_desc {
    const xd_param *params; /* required; [param_count]; borrowed until xd_optimizer_destroy, see xd_param */
    int64_t param_count;
    xd_optimizer_kind kind;
    double learning_rate;
    double beta1;                     /* Adam; decay of the mean of gradients */
    double beta2;                     /* Adam; decay of the mean of their squares */
    double eps;                       /* Adam; 0 -> 1e-8 */
    double momentum;                  /* SGD */
    double weight_decay;              /* used when groups is NULL */
    const xd_optimizer_group *groups; /* [group_count], read during creation; NULL -> one plain group */
    int group_count;
    bool maximize;        /* climb instead of descend */
    bool reserve_frozen;  /* memory for the state of frozen parameters too, so that xd_optimizer_thaw can
                           * begin it */
    bool stochastic_bf16; /* BF16 values have no master copy and are rounded up or down at random, see
                           * below */
    uint64_t seed;        /* of that rounding */
} xd_optimizer_desc;

/* stochastic_bf16: a step computes in f32 as always, from the BF16 value, and stores the neighbour above or below with the
 * probabilities that make the mean exact: x between neighbours a < b becomes b with probability (x - a) / (b - a), a multiple of
 * 2^-16. What BF16 can hold does not change; above its largest number the neighbour is infinity. It costs 4 bytes an element
 * less than a master copy, and steps below half a unit in the last place still move the weights, on average.
 *
 * The random bits are a function of (seed, name, step count of the parameter, index in the whole parameter): the same on every
 * device and CPU level, after a resumed run, and for every cut into adjacent elements (rows, flat shards), which say by
 * xd_param.first where they begin. A part that is cut along another dimension has bits of its own. */

/* The state of one parameter, to save and to restore in place. Pointers into the optimizer, in memory of the
 * context's device. All but `step` are NULL for buffers and while the parameter is frozen. */
typedef struct xd_optimizer_state {
    float *master;     /* [count]; the f32 parameter behind a bf16 or f16 value; NULL where the value is the
                        * parameter: f32, and bf16 with stochastic_bf16 */
    float *exp_avg;    /* [count]; Adam: mean of gradients; SGD: momentum buffer; NULL when never stepped */
    float *exp_avg_sq; /* [count]; Adam: mean of squared gradients; NULL for SGD */
    int64_t *step;     /* updates so far */
} xd_optimizer_state;

struct xd_ema;

/* Modifiers of one step. */
typedef struct xd_optimizer_step_desc {
    /* Both in memory of the context's device. */
    const float *gradient_scale; /* every gradient is multiplied by it first, in f32; clipping passes
                                  * &norm.coefficient, which equals scaling f32 gradients beforehand to the
                                  * bit. NULL or 1 -> none */
    const xd_status *status; /* when it holds an error the step changes nothing at all; NULL -> always step */
    struct xd_ema *const *averages; /* [average_count], no entry NULL, none twice; each is updated as by
                                     * xd_ema_update(average, XD_EMA_NEXT, status) right after the step, to the bit.
                                     * Those that average, were created over the optimizer's own list and count no
                                     * elements are updated while the new parameters are in the cache, up to nine (on a
                                     * device one, without compensation or random rounding, and eight more by one further
                                     * read), so the order among averages is not fixed: update an average of another one's
                                     * shadows by a separate call. NULL -> none */
    int average_count;
} xd_optimizer_step_desc;

/* Recipes: a desc for these parameters with PyTorch's defaults, to change before xd_optimizer_create. Learning rate 1e-3;
 * AdamW and Adam have betas 0.9 and 0.999 and eps 1e-8, AdamW weight decay 1e-2, the others none; SGD has no momentum.
 * Pure. */
XD_API xd_optimizer_desc xd_adamw_defaults(const xd_param *params, int64_t param_count);
XD_API xd_optimizer_desc xd_adam_defaults(const xd_param *params, int64_t param_count);
XD_API xd_optimizer_desc xd_sgd_defaults(const xd_param *params, int64_t param_count);

/* What xd_optimizer_create takes with this desc. Local, allocates nothing. Errors: as xd_optimizer_create, but MEMORY. */
XD_API xd_result xd_optimizer_bytes(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_memory_bytes *out);

/* Creates an optimizer; master copies start as the current values. One allocation holds everything, the states of
 * parameters to be thawed too.
 *
 *   desc   read during the call, except desc->params
 *
 * Local. Errors: ARGUMENT (learning rate, eps, weight decay or momentum negative or not finite, beta outside
 * [0, 1), group out of range; with stochastic_bf16: a BF16 parameter without name, first negative), DTYPE (values and
 * gradients are F32, BF16 or F16), MEMORY. */
XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out);

/* Frees the optimizer; values and gradients are the caller's. NULL is fine. */
XD_API void xd_optimizer_destroy(xd_optimizer *optimizer);

/* The desc in force, every default filled in. */
XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer);

/* Sets the learning rate of later steps. Errors: ARGUMENT for a negative or non-finite one. */
XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate);

/* One step of every parameter that has a gradient and is neither frozen nor a buffer; value, state and step count of
 * the others do not change. Formulas and rounding order: kernel/optimizer_scalar.h.
 *
 *   desc      NULL -> no modifiers
 *   skipped   when not NULL: receives whether desc->status prevented the step; always false on a device, where only
 *             the kernels read the status; parameters, state and step counts are right there too
 *
 * Local, allocates nothing, the same bits on every device and for every split of the parameters.
 * Errors: ARGUMENT (an average that is NULL or listed twice, or has had iteration INT64_MAX), STATE when the parameter list,
 * or that of an average, changed in more than gradients, or when a gradient waits for xd_parallel_reduce (xd_param.state), DTYPE.
 * Nothing is written then. */
XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped);

/* Begins the state of parameter `index`, which was frozen when the optimizer was created with reserve_frozen: moments zero,
 * no step, the master copy from the value of now, whatever it was before. From then on the parameter is stepped as one that
 * was never frozen, and saves have its state.
 *
 * The caller sets `frozen` of the entry in his list to false, and to true again when this fails; until both have happened
 * xd_optimizer_step returns STATE. Averages and norms over the list take the change as it is. Every rank thaws
 * alike; a parameter that shall rest again gets no gradient.
 *
 * Local, allocates nothing. Errors, with the name; nothing has changed then: ARGUMENT (index out of range), STATE
 * (reserve_frozen was not set; a buffer; still frozen in the list; has a state already; changed otherwise since creation), DTYPE
 * (frozen values of other dtypes have no memory set aside). */
XD_API xd_result xd_optimizer_thaw(xd_optimizer *optimizer, int64_t index);

/* State of parameter `index` of the list; all NULL when it is out of range. */
XD_API xd_optimizer_state xd_optimizer_state_at(xd_optimizer *optimizer, int64_t index);

#endif
