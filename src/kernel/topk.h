#ifndef XDI_KERNEL_TOPK_H
#define XDI_KERNEL_TOPK_H

#include "kernel/loss.h"
#include "kernel/shard.h"

/* Top-k losses: sums over the columns outside a row's ids, and the logits at the ids, in three steps as in
 * kernel/loss.h: maxima and stats per shard, merge over shards in rank order, divergence of the merged sides. z =
 * x/tau:
 *   OUTSIDE  sum over v not in ids of e^(z - M)
 *   ENTROPY  sum over v not in ids of e^(z - M) (z - M) */
enum { XD_TOPK_MAX, XD_TOPK_OUTSIDE, XD_TOPK_ENTROPY, XD_TOPK_BAD, XD_TOPK_SUMS };

/* One side, student or teacher, of one row after the merge. */
typedef struct xd_topk_side {
    double max, outside,
        entropy; /* reference, NaN when a logit is not finite, and the two sums relative to it */
    int finding; /* xd_row_finding */
} xd_topk_side;

/* The gradient of one row: at an id the value in its slot; at a column v outside, p_v (outside + entropy ln p_v)
 * with ln p_v = (x - max)/tau - log. All times scale. */
typedef struct xd_topk_row {
    double max, log;
    double outside, entropy;
    double loss; /* divergence of the row, nats */
    double student_mass, teacher_mass;
    int finding; /* xd_row_finding; loss and gradient are zero when it is not XD_ROW_FINE */
} xd_topk_row;

/* One side, student or teacher: what maxima, stats and merge read and write. */
typedef struct xd_topk_args {
    xd_rows logits;
    const int64_t *ids; /* [rows, k] global; negative: no entry */
    int64_t k;
    xd_vocab_shard vocab;
    double temperature;
    bool fixed;              /* sums are xd_fixed, relative to maxima of the whole row */
    bool outside;            /* the two sums are requested */
    const double *row_scale; /* [rows] 0 -> the row is skipped */
    double *maxima; /* [rows] largest logit of this shard; of the whole row when fixed. NaN: not finite. */
    void *sums;     /* [rows, XD_TOPK_SUMS] double or xd_fixed */
    double *values; /* [rows, k] stats: logits at this shard's ids; merge: at all ids */
    int64_t *order; /* [threads of the context, k] scratch; a device needs [rows, k] */
    const int64_t *all; /* every shard's sums, then values, as 8-byte words in rank order */
    int64_t all_stride; /* words from one shard to the next */
    xd_topk_side *side; /* [rows] written by merge */
} xd_topk_args;

/* Both sides after the merge: what divergence and grad read and write. */
typedef struct xd_topk_kl_args {
    xd_rows logits;     /* the student's, like values and side */
    const int64_t *ids; /* [rows, k] global; negative: no entry */
    int64_t k;
    xd_vocab_shard vocab;
    double temperature;
    const double *row_scale;          /* [rows] factor of the row's gradient; 0 -> the row is skipped */
    const float *row_weight;          /* [rows] what multiplies the row's loss in the total; NULL -> 1 */
    const double *values;             /* [rows, k] logits */
    const xd_topk_side *side;         /* [rows] */
    const double *teacher_values;     /* [rows, k] logits, or log-probabilities; -infinity: no entry */
    const xd_topk_side *teacher_side; /* [rows]; NULL -> teacher_log and log-probabilities */
    const double *teacher_log; /* [rows] logarithm of the teacher's whole sum; NULL -> values are log-probs */
    double teacher_temperature; /* divides teacher_values; 1 for log-probabilities */
    bool unnormalised;          /* teacher_values are logits, of which the sum is not known */
    bool fixed;                 /* losses are added to an xd_fixed */
    xd_topk_mode mode;
    xd_divergence divergence;
    double beta;
    double weight;    /* of the gradient, in addition to row_scale */
    double *slots;    /* [rows, k] gradient at each id */
    float *log_probs; /* [rows, k] the student's, as the mode normalises them; or NULL */
    double *scratch;  /* [threads of the context, 3 (k + 1)]; a device needs [rows, 3 (k + 1)] */
    xd_topk_row *row; /* [rows] */
    xd_rows gradient;
} xd_topk_kl_args;

/* The ids and values as the caller gave them, and where to write them in the form that the other kernels read. */
typedef struct xd_topk_entries_args {
    int64_t count;       /* of entries, rows k */
    int64_t size;        /* of the vocabulary */
    xd_ids ids;          /* [count]; none -> entry_ids is left alone */
    const float *values; /* [count] -infinity: the entry is absent; NULL -> entry_values becomes 0 */
    int64_t *entry_ids;  /* [count] absent: -1; negative or too large: size */
    double *entry_values;
} xd_topk_entries_args;

/* The k largest of each row, descending, lowest id first among equals; NaN is smaller than everything. Rows
 * with fewer columns are filled with -infinity and id -1. */
typedef struct xd_select_args {
    xd_rows logits;
    int64_t k, first, columns;
    double *values; /* [rows, k] */
    int64_t *ids;   /* [rows, k] global */
    float *narrow;  /* [rows, k] instead of values; only where the table has select_narrow */
    /* select_merge: the shards' values, then ids, as 8-byte words in rank order */
    const int64_t *all;
    int64_t all_stride; /* words from one shard to the next */
    int shards;
} xd_select_args;

/* Entries of the kernel table for top-k losses and for selections. All rows are independent. */
typedef struct xd_topk_kernels {
    xd_result (*maxima)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*stats)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*merge)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*divergence)(const xd_launch *launch, const xd_topk_kl_args *args);
    xd_result (*grad)(const xd_launch *launch, const xd_topk_kl_args *args);
    xd_result (*entries)(const xd_launch *launch, const xd_topk_entries_args *args);
    xd_result (*select)(const xd_launch *launch, const xd_select_args *args);
    xd_result (*select_merge)(const xd_launch *launch, const xd_select_args *args);
    bool select_narrow; /* select writes f32 where the caller wants them */
} xd_topk_kernels;

#endif
