/* nn_layers.h - the operations of the transformer that are not matrix products, forward and backward, each a
 * plain loop.
 *
 * Rows are tokens. In every backward function `d_x` is the gradient of the loss with respect to x. "+=" marks
 * what is added to, "=" what is overwritten. */
#ifndef NN_LAYERS_H
#define NN_LAYERS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* y = x / rms(x) * weight, per row of `width`; keeps 1 / rms for the backward pass.
 *   x, y [rows, width]; weight [width]; inverse_rms [rows]; rms(x) = sqrt(mean(x^2) + eps) */
void nn_rmsnorm(int64_t rows, int64_t width, float eps, const float *x, const float *weight, float *y,
                float *inverse_rms);

/* d_x += ..., d_weight += ... */
void nn_rmsnorm_backward(int64_t rows, int64_t width, const float *x, const float *weight,
                         const float *inverse_rms, const float *d_y, float *d_x, float *d_weight);

/* out = silu(gate) * up, element by element, silu(g) = g / (1 + exp(-g)). */
void nn_swiglu(int64_t count, const float *gate, const float *up, float *out);

/* d_gate = ..., d_up = ... */
void nn_swiglu_backward(int64_t count, const float *gate, const float *up, const float *d_out, float *d_gate,
                        float *d_up);

/* cosine, sine [positions, half] of position * frequency[i]. position NULL = 0, 1, 2, ... */
void nn_rope_table(int positions, const int32_t *position, int half, const double *frequency, float *cosine,
                   float *sine);

/* Turns every head of every row in place: (first half, second half) of a head are the two coordinates of its
 * planes. x [sequences * positions, heads * head_dim]; `direction` +1 forward, -1 for gradients (the inverse
 * rotation) */
void nn_rope(int64_t rows, int positions, int heads, int head_dim, const float *cosine, const float *sine,
             float direction, float *x);

/* One sequence's attention: what is read, per query head h with key head h / group.
 * A query sees the keys whose position is not after its own. */
typedef struct nn_attention {
    int heads, kv_heads, head_dim;      /* held by this rank */
    int queries, keys;                  /* rows of q, rows of k and v */
    const int32_t *query_pos, *key_pos; /* [queries], [keys]; NULL = `query_first` and up; 0, 1, 2, ... */
    const float *q;                     /* [queries, heads * head_dim], rotated */
    const float *k, *v;                 /* [keys, kv_heads * head_dim], k rotated */
    float *probs;                       /* [heads, queries, keys]: written forward, read backward */
    int query_first;
} nn_attention;

/* out [queries, heads * head_dim] = softmax(q k^T / sqrt(head_dim)) v. */
void nn_attention_forward(const nn_attention *a, float *out);

/* d_q = ..., d_k += ..., d_v += ...; d_scores is room for [queries, keys]. */
void nn_attention_backward(const nn_attention *a, const float *d_out, float *d_q, float *d_k, float *d_v,
                           float *d_scores);

#ifdef __cplusplus
}
#endif

#endif /* NN_LAYERS_H */
