#ifndef XDI_KERNEL_MFT_H
#define XDI_KERNEL_MFT_H

#include "kernel/loss.h"
#include "kernel/shard.h"

/* Two more losses in the manner of kernel/loss.h, in steps that each vocabulary shard can compute alone. x is the
 * student, y the teacher, tau the temperature; the ranks exchange their parts of a row between two calls.
 *
 * Minimal fine-tuning corrects the teacher's t towards the label, q = (1 - mu) t + mu onehot(label). Only the label's
 * entry is more than a multiple of t, so all sums are those of KL(t || p), which the loss entries compute: as the
 * reverse KL with the sides exchanged, whose most probable id is then the teacher's. The remaining steps:
 *
 *   at_label   per row and shard: x and y at the label, 0 on the shards that lack it
 *   correct    all shards' -> mu and the divergence from q; the row's sides are exchanged back
 *   write      terms and gradient of this shard's columns
 *
 * Cosine:
 *
 *   largest    per row and shard: the largest |x| and |y|, when sums are xd_fixed
 *   products   per row and shard: sum x x, sum y y and sum x y; fixed ones of x and y over powers of two above largest
 *   cosine     all shards' -> the row's norms and cosine
 *   slopes     the gradient of this shard's columns
 *
 * Products of two logits are exact in double and everything else is double too, so fixed sums give the same bits on every
 * processor. Rows whose scale is 0 are skipped. */

/* The two sides of a row: logits at the label, or largest magnitudes. */
enum { XD_MFT_STUDENT, XD_MFT_TEACHER, XD_MFT_SIDES };

/* Sums of the cosine. */
enum { XD_COSINE_STUDENT, XD_COSINE_TEACHER, XD_COSINE_BOTH, XD_COSINE_SUMS };

/* Lower bound on a norm that divides. */
#define XD_COSINE_LEAST 1e-12

/* Inputs and outputs of the entries. */
typedef struct xd_mft_args {
    xd_rows student, teacher;
    xd_ids labels;           /* [rows] global; minimal fine-tuning only */
    const double *row_scale; /* [rows] factor of the row's gradient; 0 -> the row is skipped */
    const float *row_weight; /* [rows] what multiplies the row's loss in the total; NULL -> 1 */
    xd_vocab_shard vocab;
    double temperature;
    double threshold;        /* of minimal fine-tuning */
    double weight;           /* of the loss in terms and gradient, tau^2 included */
    bool fixed;              /* sums are xd_fixed */
    double *sides;           /* [rows, XD_MFT_SIDES] */
    const double *all_sides; /* [shards][rows, XD_MFT_SIDES], in rank order */
    void *sums;              /* [rows, XD_COSINE_SUMS] double or xd_fixed */
    const void *all_sums;    /* [shards][rows, XD_COSINE_SUMS] */
    /* [rows] soft, finding and, of minimal fine-tuning, max, teacher_max, soft_log, teacher_log, argmax (the teacher's)
     * and mean (mu); of the cosine max and teacher_max (the two norms) and mean (the cosine) */
    xd_loss_row *row;
    /* Data NULL -> none; columns past the shard's are set to zero. */
    xd_rows terms;    /* f32: weight q ln(q/p) */
    xd_rows gradient; /* may be the student's memory */
} xd_mft_args;

/* Entries of the kernel table. */
typedef struct xd_mft_kernels {
    xd_result (*at_label)(const xd_launch *launch, const xd_mft_args *args);
    xd_result (*correct)(const xd_launch *launch, const xd_mft_args *args);
    xd_result (*write)(const xd_launch *launch, const xd_mft_args *args);
    xd_result (*largest)(const xd_launch *launch, const xd_mft_args *args);
    xd_result (*products)(const xd_launch *launch, const xd_mft_args *args);
    xd_result (*cosine)(const xd_launch *launch, const xd_mft_args *args);
    xd_result (*slopes)(const xd_launch *launch, const xd_mft_args *args);
} xd_mft_kernels;

#endif
