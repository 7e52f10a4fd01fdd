/* nn_patch_rows.h - the operations of the patch transformer that are not matrix products with weights, as plain loops.
 *
 * Rows are tokens of samples: the first token of every sample, then the second of every sample, and so on. "+=" marks what is added
 * to, "=" what is overwritten. */
#ifndef NN_PATCH_ROWS_H
#define NN_PATCH_ROWS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* So many samples of so many rows; `width` is a multiple of 8. */
typedef struct nn_grid {
    int64_t samples, tokens, width;
    int64_t block; /* tokens that a sum over tokens takes together; divides `tokens` */
} nn_grid;

/* Shift, scale or gate of each sample: `stride` floats from one sample to the next. A gradient by it is a sum over tokens:
 * there is one for each block of them, `block` floats from one to the next. */
typedef struct nn_per_sample {
    float *data;
    int64_t stride, block;
} nn_per_sample;

/* y = (x - mean) / sqrt(variance + 1e-6), row by row; keeps that inverse. inverse [rows] */
void nn_layernorm(int64_t rows, int64_t width, const float *x, float *y, float *inverse);

/* y = x (1 + scale) + shift */
void nn_modulate(nn_grid grid, const float *x, nn_per_sample shift, nn_per_sample scale, float *y);

/* What a normalised and modulated row has kept for its backward. */
typedef struct nn_normed {
    const float *y, *inverse; /* of nn_layernorm */
    nn_per_sample scale;
} nn_normed;

/* Both steps backward: d_x += ..., d_shift = ..., d_scale = ... */
void nn_modulated_backward(nn_grid grid, const nn_normed *kept, const float *d_out, float *d_x,
                           nn_per_sample d_shift, nn_per_sample d_scale);

/* x += gate * y */
void nn_gate(nn_grid grid, const float *y, nn_per_sample gate, float *x);

/* d_y = gate * d_x, d_gate = ... */
void nn_gate_backward(nn_grid grid, const float *y, nn_per_sample gate, const float *d_x, float *d_y,
                      nn_per_sample d_gate);

/* out = x * sigmoid; d *= the slope of that product by x. */
void nn_silu(int64_t count, const float *x, const float *sigmoid, float *out);
void nn_silu_backward(int64_t count, const float *x, const float *sigmoid, float *d);

/* The sum of a row; the sum of its products with another. `width` is a multiple of 8. */
float nn_row_sum(int64_t width, const float *x);
float nn_row_dot(int64_t width, const float *x, const float *y);

/* Every row of y = bias; y += x, element by element; sum += all rows of x. */
void nn_fill_rows(int64_t rows, int64_t width, const float *bias, float *y);
void nn_add_all(int64_t count, const float *x, float *y);
void nn_sum_rows(int64_t rows, int64_t width, const float *x, float *sum);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_ROWS_H */
