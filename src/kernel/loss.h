#ifndef XDI_KERNEL_LOSS_H
#define XDI_KERNEL_LOSS_H

#include "kernel/fixed.h"
#include "kernel/shard.h"
#include "kernel/types.h"

/* The losses over a row of logits, in steps that each vocabulary shard can compute alone. x is the student, y
 * the teacher, tau the temperature; a row's shards are merged by the exchange between two calls:
 *
 *   references   per row and shard: largest x and its id, y at that id, largest y
 *   stats        per row and shard: the sums below, taken relative to references
 *   combine      all shards' references and sums -> the scalars of the row, in rank order
 *   mixture      JSD only: two more sums, which need the normalisers of combine; mixture_combine merges them
 *   grad         the gradient of this shard's columns
 *
 * References may be those of each shard (one exchange: combine rescales) or merged first (INVARIANT: then every
 * term is the same wherever the row is split, and sums are xd_fixed). Rows whose scale is 0 are skipped.
 *
 *   HARD     sum_v e^(x - M)                      CROSS  by divergence, z = x/tau, u = y/tau:
 *   SOFT     sum_v e^((x - M)/tau)                         forward  sum e^(u - N) ((u - N) - (z - M))
 *   TEACHER  sum_v e^((y - N)/tau)                         reverse  sum e^(z - M) ((z - M) - (u - y_arg/tau))
 *   LINEAR   sum_v (x - M)                                 soft CE  sum e^(u - N) (z - M)
 *   TARGET   x_label - M, on the shard that owns it
 *   BAD      number of terms that were not finite; xd_fixed: high counts those, low the terms that were too large
 *
 * The reverse form is relative to the student's most probable id: on nearly one-hot rows the largest term is
 * exactly 0, so nothing cancels. */

enum { XD_LOSS_MAX, XD_LOSS_ARG, XD_LOSS_TEACHER_AT_ARG, XD_LOSS_TEACHER_MAX, XD_LOSS_REFERENCES };
enum {
    XD_LOSS_HARD,
    XD_LOSS_SOFT,
    XD_LOSS_TEACHER,
    XD_LOSS_CROSS,
    XD_LOSS_LINEAR,
    XD_LOSS_TARGET,
    XD_LOSS_BAD,
    XD_LOSS_SUMS
};
enum { XD_LOSS_TEACHER_MIXTURE, XD_LOSS_STUDENT_MIXTURE, XD_LOSS_MIXTURES };

/* Why a row is left out. */
typedef enum xd_row_finding {
    XD_ROW_FINE = 0,
    XD_ROW_NOT_FINITE, /* NaN or +infinity in the row, nothing but -infinity, or a loss or gradient beyond f32 */
    XD_ROW_OVERFLOW, /* a term too large for xd_fixed */
    XD_ROW_LABEL     /* a label or id outside the vocabulary, or an id twice */
} xd_row_finding;

/* Scalars of one row after combine. */
typedef struct xd_loss_row {
    double max, teacher_max, teacher_at_arg; /* references over the whole row */
    double hard_log, soft_log, teacher_log;  /* logarithms of the HARD, SOFT and TEACHER sums */
    double top;                              /* JSD: ln(student/mixture) of the student's most probable id */
    double mean;   /* reverse: CROSS per unit of mass; JSD: mean of ln(student/mixture) - top */
    double hard;   /* cross entropy of the row, nats */
    double soft;   /* divergence of the row, nats, without tau^2 */
    double argmax; /* the student's most probable id, lowest among equals */
    int finding;   /* xd_row_finding; loss and gradient are zero when it is not XD_ROW_FINE */
} xd_loss_row;

/* Inputs and outputs of the loss entries; each entry reads and writes what its comment above names. */
typedef struct xd_loss_args {
    xd_rows student;
    xd_rows teacher;         /* data NULL -> hard loss only */
    xd_ids labels;           /* [rows] global; none -> soft loss only */
    const double *row_scale; /* [rows] factor of the row's gradient; 0 -> the row is skipped */
    const float *row_weight; /* [rows] what multiplies the row's loss in the total; NULL -> 1 */
    xd_vocab_shard vocab;
    double temperature;
    xd_divergence divergence;
    double beta;
    double target_weight; /* hard loss: target_weight * (-l_label) + uniform_weight * sum_v (-l_v) */
    double uniform_weight;
    double hard_weight, soft_weight; /* of the two losses in the gradient; 0 -> the loss is left out */
    bool fixed;                      /* sums are xd_fixed, references are those of the whole row */
    double *references;              /* [rows, XD_LOSS_REFERENCES] */
    void *sums;                      /* [rows, XD_LOSS_SUMS] double or xd_fixed */
    void *mixtures;                  /* [rows, XD_LOSS_MIXTURES] double or xd_fixed */
    const double *all_references;    /* [shards][rows, XD_LOSS_REFERENCES], in rank order */
    const void *all_sums;            /* [shards][rows, XD_LOSS_SUMS] */
    int64_t reference_stride;        /* elements from one shard to the next, of the two above */
    int64_t sums_stride;
    const void *all_mixtures; /* [shards, rows, XD_LOSS_MIXTURES] */
    xd_loss_row *row;         /* [rows] */
    xd_rows gradient;         /* may be the student's memory; columns past the shard's are set to zero */
} xd_loss_args;

/* Loss entries of the kernel table. All rows are independent; the same inputs give the same bits at any
 * position. */
typedef struct xd_loss_kernels {
    xd_result (*references)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*merge_references)(const xd_launch *launch,
                                  const xd_loss_args *args); /* all_references -> references */
    xd_result (*stats)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*combine)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*mixture)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*mixture_combine)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*grad)(const xd_launch *launch, const xd_loss_args *args);
    /* Optional, not for fixed sums: references and stats in one pass; and where one shard is the whole row, all steps
     * (the gradient when gradient.data is set), row by row, so that a row is read from memory once. */
    xd_result (*fused)(const xd_launch *launch, const xd_loss_args *args);
} xd_loss_kernels;

#endif
