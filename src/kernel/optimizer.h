#ifndef XDI_KERNEL_OPTIMIZER_H
#define XDI_KERNEL_OPTIMIZER_H

#include "kernel/types.h"

/* What optimizer steps, gradient norms and averages do to arrays. Every entry takes a list of arrays, because
 * a model has a thousand small ones and a launch for each would cost more than the work. Arrays are aligned
 * for their dtype, may have zero elements, and do not overlap. Floats are F32, BF16 or F16 unless the comment of an
 * entry names others; narrow storage is widened on load and rounded once, to nearest even, on store. Elements are
 * independent of each other, so the result does not depend on how an array is split; every rounding is
 * explicit, so it does not depend on the compiler's flags either. */

enum { XD_AVERAGE_KEEPS = 4096 /* the last iterations whose decays an average on a device knows */ };

/* The counters of an average in memory of its device, where alone it is known which steps were refused, and what follows from
 * them for the update under way. Entries that are given one read it instead of their own numbers. */
typedef struct xd_average_turn {
    /* holds a finding when this update does nothing: its step was refused, or the average has not started */
    xd_status rests;
    int64_t copies;    /* not 0: sources are copied, rounded to nearest, instead of averaged */
    double keep;       /* decay */
    int64_t iteration; /* of the last update whose step was not refused */
    int64_t initialized;
    int64_t known[XD_AVERAGE_KEEPS]; /* iterations, each at its remainder, and their decays */
    double keeps[XD_AVERAGE_KEEPS];
} xd_average_turn;

/* Inputs of the turn entry. */
typedef struct xd_turn_args {
    xd_average_turn *turn;
    int64_t iteration; /* as if no step had been refused */
    double keep;       /* its decay; also used where that of the true iteration is not known any more */
    bool next;         /* the iteration is the one after the last; false -> `iteration` itself */
    int64_t start;     /* earlier updates do nothing */
    bool begins;       /* the counters become those below, and no decay is known */
    int64_t last;
    bool initialized;
} xd_turn_args;

/* One array of an optimizer step. The scalars are per array because the step count is: an array without a
 * gradient in some step has a lower count than the others. */
typedef struct xd_update_array {
    /* [count] parameter in f32; NULL -> `value`, BF16, is the parameter and is rounded at random; needs `steps` */
    float *master;
    float *first;  /* [count] Adam: running mean of gradients; SGD: momentum buffer */
    float *second; /* [count] Adam: running mean of squared gradients; SGD: not used */
    void *value;   /* [count] receives master rounded to value_dtype; NULL -> master is the parameter */
    const void *gradient; /* [count] */
    int64_t count;
    xd_dtype value_dtype;
    xd_dtype gradient_dtype;
    float decay;           /* AdamW: 1 - learning_rate * weight_decay; otherwise not used */
    float weight_decay;    /* Adam-L2 and SGD: added to the gradient as weight_decay * parameter */
    float step_size;       /* Adam: learning_rate / (1 - beta1^t); SGD: learning_rate */
    float root_correction; /* Adam: sqrt(1 - beta2^t) */
    bool fresh;            /* SGD: the first gradient this array gets; it starts the momentum buffer */
    /* [count]; updated from the new parameter (value, or master when that is NULL) as by the lerp entry, in the same
     * pass over memory and with the same bits; NULL -> none */
    void *average;
    xd_dtype average_dtype; /* also F64 */
    /* Updates so far, in memory of the arrays' device: only there is it known whether a step happened. The entry computes
     * step_size, root_correction and fresh from it and adds one. NULL -> those three are used as given. */
    int64_t *steps;
    double learning_rate; /* read only when steps is given */
    uint64_t key;         /* of the random bits: of this array */
    int64_t origin;       /* and the index of its first element in the whole parameter */
} xd_update_array;

/* Memory of a device in which an entry stores the list of arrays of its last call. A caller that passes the same arrays
 * again passes the same xd_array_list, and only changes are copied. Created by the table for a maximum number of arrays. */
typedef struct xd_array_list xd_array_list;

/* Inputs and outputs of an optimizer entry. */
typedef struct xd_update_args {
    const xd_update_array *arrays;
    int64_t array_count;
    const float *gradient_scale;     /* one value that multiplies every gradient first; NULL -> none */
    float one_minus_beta1;           /* Adam */
    float one_minus_beta2;           /* Adam */
    float beta2;                     /* Adam */
    float eps;                       /* Adam */
    float momentum;                  /* SGD */
    bool couple_decay;               /* Adam: the L2 form, weight decay through the gradient */
    bool maximize;                   /* change the sign of every gradient */
    double keep;                     /* of the averages; see xd_lerp_args */
    bool weighted_sum;               /* of the averages */
    double beta1_exact, beta2_exact; /* before rounding; read only when an array gives steps */
    xd_array_list *list;             /* NULL -> the list of arrays is not stored */
    uint64_t rounding_seed;          /* of arrays without master */
    /* Averages beside those of the arrays, of any format, in the same pass and with the bits of the average entry; only for a table
     * that has `averages_in_steps`. arrays[k] is of array k of the step and has the new parameter as its source; without target it
     * is left out. Kind MOVE, not counted. */
    const struct xd_average_args *averages;
    int average_count;
    const xd_average_turn *turn; /* of the averages of the arrays; NULL -> they move by `keep` */
    /* But for `decay` and `learning_rate` the arrays are those of the last call with `list`, which returned OK. */
    bool same;
} xd_update_args;

/* One array of an average: target <- target + weight * (source - target). */
typedef struct xd_lerp_array {
    void *target;
    const void *source;
    int64_t count;
    xd_dtype target_dtype; /* also F64: then the arithmetic is f64 */
    xd_dtype source_dtype; /* also F64 */
} xd_lerp_array;

/* Inputs and outputs of the EMA entry. */
typedef struct xd_lerp_args {
    const xd_lerp_array *arrays;
    int64_t array_count;
    double keep;                 /* decay b; the weight is 1 - b, computed in double and rounded once */
    bool weighted_sum;           /* fma(1 - b, source, b * target) instead, as CREDIT does */
    xd_array_list *list;         /* NULL -> the list of arrays is not stored */
    const xd_average_turn *turn; /* NULL -> `keep` */
    bool same;                   /* the arrays are those of the last call with `list`, which returned OK */
} xd_lerp_args;

/* What the average entry does to its targets. */
typedef enum xd_average_kind {
    XD_AVERAGE_MOVE = 0, /* as the lerp entry, to the bit where it has the format */
    XD_AVERAGE_COPY,     /* target <- source, rounded to nearest; compensation 0 */
    XD_AVERAGE_ADD       /* target <- fma(factor, source, target), F32; the source is rounded to F32 first */
} xd_average_kind;

/* One array of an average in a format that lerp does not have, or whose elements are counted. */
typedef struct xd_average_array {
    void *target;
    uint16_t *compensation; /* [count] BF16: what the F32 target lacks of the average; NULL -> none */
    const void *source;
    int64_t count;
    int64_t origin;        /* random: index of the first element in the whole parameter */
    uint64_t key;          /* random: of this array */
    xd_dtype target_dtype; /* F32 BF16 F16 F64 */
    xd_dtype source_dtype; /* F32 BF16 F16 F64 */
    bool random;           /* MOVE: the target, BF16, is rounded at random */
} xd_average_array;

/* Inputs and outputs of the average entry. */
typedef struct xd_average_args {
    const xd_average_array *arrays;
    int64_t array_count;
    xd_average_kind kind;
    bool weighted_sum; /* MOVE, of arrays that lerp has: see xd_lerp_args */
    double keep;       /* MOVE */
    float factor;      /* ADD */
    uint64_t seed;     /* of random arrays */
    int64_t iteration; /* of random arrays */
    /* MOVE: receives more: elements that kept their bits although the source differs from them; in memory of the
     * arrays' device; NULL -> not counted */
    int64_t *unmoved;
    const xd_average_turn *turn; /* MOVE; NULL -> `keep` and `iteration` */
} xd_average_args;

/* Two arrays that change places; neither overlaps another one. */
typedef struct xd_swap_array {
    void *a, *b;
    int64_t bytes;
} xd_swap_array;

/* Converts between any two dtypes that have arithmetic, or copies bytes when they are the same. */
typedef struct xd_cast_array {
    void *target;
    const void *source;
    int64_t count;
    xd_dtype target_dtype;
    xd_dtype source_dtype;
} xd_cast_array;

/* One gradient of a norm. */
typedef struct xd_norm_array {
    const void *data;
    int64_t count;
    xd_dtype dtype;
    bool replica; /* another rank adds these elements; here they are only searched for NaN and infinities */
} xd_norm_array;

/* Inputs and outputs of the norm entry. */
typedef struct xd_norm_args {
    const xd_norm_array *arrays;
    int64_t array_count;
    xd_norm_type type;
    bool exact; /* sum in limbs instead of double */
} xd_norm_args;

/* Inputs and outputs of the clip entry: what follows from a sum over all ranks. */
typedef struct xd_clip_args {
    const xd_norm_sum *sum;
    xd_norm_type type;
    bool exact;
    xd_clip_form form;
    double max_norm;     /* 0 -> no clipping, the coefficient is 1 */
    double refuse_above; /* a larger norm is a finding; 0 -> none is */
    double *norm;        /* infinity or NaN when an element is */
    int64_t *not_finite; /* elements */
    float *coefficient;
    xd_status *status; /* not_finite and large_norms are added to it; NULL -> not recorded */
} xd_clip_args;

/* Inputs and outputs of the scale entry. */
typedef struct xd_scale_args {
    void *data;
    int64_t count;
    xd_dtype dtype;
    float factor;
} xd_scale_args;

/* The entries of the table. The formulas are in kernel/optimizer_scalar.h. All return XD_OK, or DTYPE for an array
 * whose dtype they do not support; then nothing was written. adam, sgd, lerp, cast and average do nothing when
 * launch->status holds a finding; they never write to it. */
typedef struct xd_optimizer_kernels {
    xd_result (*adam)(const xd_launch *launch, const xd_update_args *args);
    xd_result (*sgd)(const xd_launch *launch, const xd_update_args *args);
    xd_result (*lerp)(const xd_launch *launch, const xd_lerp_args *args);
    xd_result (*cast)(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count);
    xd_result (*scale)(const xd_launch *launch, const xd_scale_args *args);
    xd_result (*norm)(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum); /* adds to *sum */
    /* Optional, all or none: lists of up to `arrays` arrays. Destroying takes effect after work already launched. */
    xd_result (*list_create)(xd_ctx *ctx, int64_t arrays, xd_array_list **out);
    void (*list_destroy)(xd_array_list *list); /* NULL is fine */
    /* What list_create takes. */
    xd_memory_bytes (*list_bytes)(int64_t arrays);
    xd_result (*average)(const xd_launch *launch, const xd_average_args *args);
    xd_result (*swap)(const xd_launch *launch, const xd_swap_array *arrays, int64_t array_count);
    bool averages_in_steps; /* adam and sgd take args->averages; false: average_count is 0 */
    /* Optional, for devices: begins an update of an average, by the launch's status; see xd_average_take_turn. */
    xd_result (*turn)(const xd_launch *launch, const xd_turn_args *args);
} xd_optimizer_kernels;

#endif
