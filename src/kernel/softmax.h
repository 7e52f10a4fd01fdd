#ifndef XDI_KERNEL_SOFTMAX_H
#define XDI_KERNEL_SOFTMAX_H

#include "kernel/shard.h"
#include "kernel/types.h"

/* Log-softmax of rows whose vocabulary is split, and columns picked from them: the steps that a shard computes
 * alone, and those that merge the parts of all shards. */

/* Partials of a row: largest element, its lowest global id (-1: no columns), sum of e^((x - largest) / tau). */
enum { XD_SOFTMAX_MAX, XD_SOFTMAX_ARG, XD_SOFTMAX_SUM, XD_SOFTMAX_PARTS };

/* Inputs and outputs of the softmax entries; each reads and writes what its comment names. */
typedef struct xd_softmax_args {
    xd_rows logits;
    xd_vocab_shard vocab;
    double temperature;
    double *parts;       /* [rows, words] of this shard */
    const double *all;   /* [shards][rows, words] */
    int64_t all_stride;  /* elements from one shard to the next */
    double *log_sum_exp; /* [rows] or NULL */
    int64_t *argmax;     /* [rows] or NULL */
    xd_ids ids;          /* row r's begin at r * ids_stride, ids_count of them */
    int64_t ids_count, ids_stride;
    void *values;          /* [rows, ids_count] */
    xd_dtype values_dtype; /* F32 or F64 */
    const float *weight;   /* [rows] */
    xd_rows weights;       /* [rows, columns] */
    xd_rows out;
    const uint8_t *finite; /* [rows] for `pick`: a row with 0 is NaN; NULL: none is */
} xd_softmax_args;

/* Softmax entries of the kernel table. */
typedef struct xd_softmax_kernels {
    /* logits -> parts [rows, XD_SOFTMAX_PARTS] */
    xd_result (*stats)(const xd_launch *launch, const xd_softmax_args *args);
    /* all, in rank order -> log_sum_exp, argmax */
    xd_result (*merge)(const xd_launch *launch, const xd_softmax_args *args);
    /* out = logits / tau - log_sum_exp */
    xd_result (*write)(const xd_launch *launch, const xd_softmax_args *args);
    /* parts [rows, 1] = sum of weights over this shard's columns */
    xd_result (*row_sums)(const xd_launch *launch, const xd_softmax_args *args);
    /* out = (weights - p * sum of all) / tau; columns past the shard's become zero */
    xd_result (*write_backward)(const xd_launch *launch, const xd_softmax_args *args);
    /* parts [rows, ids_count] = logits at this shard's ids, NaN in rows that are not finite, 0 elsewhere */
    xd_result (*pick)(const xd_launch *launch, const xd_softmax_args *args);
    /* values = all's pick of the shard that owns the id, NaN outside the vocabulary; with log_sum_exp their
     * log-probability */
    xd_result (*take)(const xd_launch *launch, const xd_softmax_args *args);
    /* out = (one at the row's id - p) weight / tau; zero for ids outside, weight 0, columns past the shard's */
    xd_result (*write_target_backward)(const xd_launch *launch, const xd_softmax_args *args);
    /* hits[r] = the row's argmax is its label, and mask (NULL -> all) is not 0 */
    xd_result (*hits)(const xd_launch *launch, const int64_t *argmax, xd_ids labels, const uint8_t *mask,
                      int64_t rows, uint8_t *hits);
} xd_softmax_kernels;

#endif
