/* nn_condition.h - the embedding of a sample's time and class, forward and backward:
 *
 *   embedding = time(sines and cosines of the time) + the class's row        active = silu(embedding)
 *
 * Half as many frequencies as sines and cosines, 1 to 1000 in equal ratios. The last class is "none". */
#ifndef NN_CONDITION_H
#define NN_CONDITION_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Weights, next to each other in their block. */
enum {
    NN_CONDITION_TIME, /* [width, frequencies] */
    NN_CONDITION_TIME_BIAS,
    NN_CONDITION_LABEL, /* [labels, width] */
    NN_CONDITION_WEIGHTS
};

typedef struct nn_condition {
    int frequencies, labels; /* sines and cosines together, even */
    int64_t width;
    double *frequency; /* [frequencies / 2] */
} nn_condition;

/* What a forward keeps of its samples. */
typedef struct nn_conditioned {
    int64_t samples;                     /* of the last forward */
    int32_t *labels;                     /* [samples] */
    float *waves;                        /* [samples, frequencies] */
    float *embedding, *sigmoid, *active; /* [samples, width] */
} nn_conditioned;

/* Memory of an arena, once to count and once to place; the frequencies' values, once they have memory. */
void nn_condition_place(nn_condition *condition, xd_arena *arena);
void nn_conditioned_place(const nn_condition *condition, xd_arena *arena, int64_t samples,
                          nn_conditioned *out);
void nn_condition_fill(nn_condition *condition);

/* Labels of a call, which may have none. Errors: ARGUMENT (one out of range, with sample and both numbers). */
xd_result nn_condition_check(xd_ctx *ctx, const nn_condition *condition, const xd_network_call *call);

/* Of the samples of a call; those without a class are of the last. */
void nn_condition_forward(const nn_condition *condition, const float *const *weights,
                          const xd_network_call *call, nn_conditioned *out);

/* d_active [samples, width]: in, the gradient by `active`; out, that by the embedding. gradients [NN_CONDITION_WEIGHTS] +=; those
 * that are NULL are left out. */
void nn_condition_backward(const nn_condition *condition, const float *const *weights,
                           float *const *gradients, const nn_conditioned *kept, float *d_active);

#ifdef __cplusplus
}
#endif

#endif /* NN_CONDITION_H */
