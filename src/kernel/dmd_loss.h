#ifndef XDI_KERNEL_DMD_LOSS_H
#define XDI_KERNEL_DMD_LOSS_H

#include "kernel/dmd_types.h"

/* Losses over samples, cut where ranks must exchange: "this rank's sums", "all ranks' sums to a sample", "samples to a value".
 *
 * Sums over the elements of a row have a fixed order, so that they have the same bits on every level, on a GPU and for any
 * number of threads: a row is cut into chunks of XD_SAMPLE_CHUNK elements, a chunk into tiles. Element i of a tile is added to
 * lane i % XD_SAMPLE_LANES, lanes are joined pairwise (neighbours first), then tiles and chunks in order. All of it in double,
 * of f32 terms, whose squares a double holds exactly. When `fixed`, the terms are added as integers (xd_norm_sum) instead, and
 * no order matters. */
enum { XD_SAMPLE_LANES = 256, XD_SAMPLE_TILE = 8 * XD_SAMPLE_LANES, XD_SAMPLE_CHUNK = 8 * XD_SAMPLE_TILE };

/* The words of a row's sums, or of a chunk's. Two sums follow, each a double's bits or, when fixed, limbs. */
enum { XD_SAMPLE_COUNTED, XD_SAMPLE_FINDING, XD_SAMPLE_SUMS };

/* Kinds of findings. The larger one stays when two meet. */
enum { XD_SAMPLE_FINE = 0, XD_SAMPLE_INFINITE, XD_SAMPLE_NAN };

/* The words of a rank's record. Two sums follow: of the positive losses, and of the negative ones' magnitudes. */
enum {
    XD_SAMPLE_RECORD_COUNTED,
    XD_SAMPLE_RECORD_FINDINGS,
    XD_SAMPLE_RECORD_FIRST, /* sample of the first finding, and its value as bits of a double */
    XD_SAMPLE_RECORD_VALUE,
    XD_SAMPLE_RECORD_SUMS
};

/* What is known of a sample once all ranks' sums are joined. */
typedef struct xd_sample {
    double loss;   /* of the whole sample, without weight, scale and N; 0 with a finding */
    double factor; /* the gradient is factor * scale / N * what the loss says; 0 with a finding */
    double weight; /* VSD: w_b */
    double value;  /* of the finding */
    int64_t counted;
    int64_t finding;
} xd_sample;

/* What all these losses share. `words` is those of a sum: 1, or XD_NORM_LIMBS when fixed. */
typedef struct xd_sample_args {
    int64_t samples, elements; /* of this rank's rows */
    bool fixed;
    const uint8_t *mask;     /* [samples, elements] or NULL */
    int64_t *parts;          /* [samples][chunks][XD_SAMPLE_SUMS + 2 words] */
    int64_t *sums;           /* [samples][...] of this rank */
    const int64_t *all_sums; /* [shards][samples][...] */
    int shards;
    xd_sample *sample;   /* [samples] */
    double *sample_loss; /* [samples] or NULL */
    double weight;
    const double *scale;               /* NULL -> 1 */
    const xd_denominator *denominator; /* NULL -> denominator_value; 0 -> the elements counted */
    double denominator_value;
    int64_t *record;        /* [XD_SAMPLE_RECORD_SUMS + 2 words] of this rank */
    const int64_t *records; /* [ranks][...] */
    int ranks;
    double *factor; /* one value: weight scale / N, 0 when nothing counted */
    xd_sample_values *values;
} xd_sample_args;

/* The student's term. */
typedef struct xd_vsd_args {
    xd_sample_args base;
    xd_rows generated, teacher, fake, gradient;
    const double *sample_scale, *chain;
    double *distance; /* [samples] out: mean |x - T|, or NULL */
    xd_vsd_normaliser normaliser;
    xd_vsd_form form;
} xd_vsd_args;

/* The denoising term. */
typedef struct xd_denoise_args {
    xd_sample_args base;
    xd_rows prediction, clean, noise, gradient;
    const xd_denoise_term *terms;
} xd_denoise_args;

/* A term on logits. Its elements are counted here, and losses are known at once. */
typedef struct xd_gan_args {
    xd_sample_args base;
    xd_rows fake, real, fake_gradient, real_gradient;
    xd_gan_role role;
    xd_gan_kind kind;
} xd_gan_args;

/* Words of a bin: a count and a sum. */
enum { XD_FDISTILL_BIN_WORDS = 1 + XD_NORM_LIMBS };

/* f-distill. The bin behind the others is that of the findings: their count, and the first one's sample and value as bits in
 * the sum's place. */
typedef struct xd_fdistill_args {
    xd_rows logits;
    xd_f_divergence divergence;
    double lower, upper, rate, min_t, max_t;
    int64_t bins;
    const double *times;
    double *bin_values;
    bool fixed;
    double *weights;        /* [samples] rho, then h, then the weight; NaN for a finding in between */
    double *next;           /* [bins] what rho is divided by */
    int64_t *record;        /* [bins + 1][XD_FDISTILL_BIN_WORDS] of this rank */
    const int64_t *records; /* [ranks][...] */
    int64_t *mass;          /* [XD_FDISTILL_BIN_WORDS] of this rank: count and sum of h */
    const int64_t *masses;  /* [ranks][...] */
    int ranks;
} xd_fdistill_args;

/* The entries. */
typedef struct xd_dmd_loss_kernels {
    /* sums |x - T| and (F - T)^2 -> parts */
    xd_result (*vsd_measure)(const xd_launch *launch, const xd_vsd_args *args);
    /* all_sums -> sample */
    xd_result (*vsd_weigh)(const xd_launch *launch, const xd_vsd_args *args);
    /* COMPAT: the second of the sums is (x - (x - g))^2 -> parts */
    xd_result (*vsd_rounded)(const xd_launch *launch, const xd_vsd_args *args);
    /* COMPAT: all_sums of the last -> sample, but for its weight */
    xd_result (*vsd_settle)(const xd_launch *launch, const xd_vsd_args *args);
    xd_result (*vsd_slope)(const xd_launch *launch, const xd_vsd_args *args);
    /* the second sum is r^2 -> parts */
    xd_result (*denoise_measure)(const xd_launch *launch, const xd_denoise_args *args);
    xd_result (*denoise_weigh)(const xd_launch *launch, const xd_denoise_args *args);
    xd_result (*denoise_slope)(const xd_launch *launch, const xd_denoise_args *args);
    /* logits -> sample */
    xd_result (*gan_terms)(const xd_launch *launch, const xd_gan_args *args);
    xd_result (*gan_slope)(const xd_launch *launch, const xd_gan_args *args);
    /* parts -> sums */
    xd_result (*join)(const xd_launch *launch, const xd_sample_args *args);
    /* sample -> record, sample_loss */
    xd_result (*total)(const xd_launch *launch, const xd_sample_args *args);
    /* records -> factor, values; findings are added to launch->status */
    xd_result (*finish)(const xd_launch *launch, const xd_sample_args *args);
    /* logits, times -> weights = rho, record */
    xd_result (*fdistill_ratios)(const xd_launch *launch, const xd_fdistill_args *args);
    /* records -> next, bin_values, findings to launch->status; weights = h; their sum -> mass */
    xd_result (*fdistill_bins)(const xd_launch *launch, const xd_fdistill_args *args);
    /* masses -> weights */
    xd_result (*fdistill_weights)(const xd_launch *launch, const xd_fdistill_args *args);
    /* measure, weigh and slope of each sample at once, while it is in a cache: where nobody else has parts of samples, and
     * N is known before, so that `factor` need not hold it. Not of the COMPAT form. The same bits. NULL: not offered */
    xd_result (*vsd_by_sample)(const xd_launch *launch, const xd_vsd_args *args);
    xd_result (*denoise_by_sample)(const xd_launch *launch, const xd_denoise_args *args);
    int64_t by_sample_elements; /* the most that a sample of these two has */
    /* denoise_by_sample computes sums and gradient of an element at once, and takes samples of any size, also fewer than threads */
    bool denoise_at_once;
    /* total and finish of a rank alone, in one. NULL: not offered */
    xd_result (*finish_alone)(const xd_launch *launch, const xd_sample_args *args);
} xd_dmd_loss_kernels;

#endif
