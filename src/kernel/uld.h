#ifndef XDI_KERNEL_ULD_H
#define XDI_KERNEL_ULD_H

#include "kernel/estimate.h"
#include "kernel/softmax.h"
#include "kernel/types.h"

/* Universal logit distillation, and the divergence of rows that are probabilities already. All pointers are memory of the
 * device. */

/* Lower bound on the probabilities of merged tokens, and on those of the generalised JSD. */
#define XD_ULD_FLOOR 1e-8

/* Elements of a sorted list, or pairs of ids, that a block of a device processes at a time. */
enum { XD_ULD_SEGMENT = 4096 };

/* Bytes of scratch for lists of n elements and pairs together. */
#define XD_ULD_SCRATCH(n) ((size_t)((n) / XD_ULD_SEGMENT + 2) * 1024)

/* The two sides. */
enum { XD_ULD_STUDENT, XD_ULD_TEACHER, XD_ULD_SIDES };

/* A pair of groups of tokens. The distribution of a side is that of its base row times the probabilities that the
 * other rows give to their tokens. */
typedef struct xd_uld_chunk {
    int64_t begin[XD_ULD_SIDES], end[XD_ULD_SIDES], base[XD_ULD_SIDES]; /* rows of the logits */
    double factor[XD_ULD_SIDES]; /* out of merge: product of those probabilities, none below the floor */
    /* out of compare: JSD of the matched ids, sum of |a - b| over the other ids, sorted */
    double matched, unmatched;
    double mean; /* out of compare: sum of p slope over the student's base row */
    bool finite; /* out of merge: all rows are; if not, the other entries skip the chunk */
} xd_uld_chunk;

/* One side of the chunks of a call. */
typedef struct xd_uld_rows {
    xd_rows logits;
    int64_t columns; /* of the vocabulary, the first ones */
    double temperature;
    const double *parts; /* [rows, XD_SOFTMAX_PARTS] as written by `stats` of the softmax entries */
    const int64_t *ids;  /* [rows] the token that a row predicts */
    double *scores;      /* [rows] out of merge: its probability; those of base rows are not written */
    const int32_t *list; /* [count] the ids that are sorted, ascending; NULL: all, count = columns */
    int64_t count;
    uint64_t *sorted; /* [chunks, count] out of sort: keys of logits over ids, ascending. A larger logit has a
                         smaller key, both zeros have the same, and equal logits are ranked by id. */
    uint64_t *spare;  /* as long */
} xd_uld_rows;

/* Inputs and outputs of the entries; each reads and writes what its comment names. */
typedef struct xd_uld_args {
    xd_uld_rows side[XD_ULD_SIDES];
    xd_uld_chunk *chunks; /* those of the call */
    int64_t count;
    const int32_t *matched[XD_ULD_SIDES]; /* [matched_count] ids of pairs */
    int64_t matched_count;
    double matched_weight, unmatched_weight, beta;
    float *slope; /* [chunks, columns of the student] d value / d merged probability; NULL -> no gradient */
    xd_rows gradient;
    int64_t row, rows;      /* of the gradient: those to be written */
    const int32_t *owner;   /* [all rows] index of a row's chunk among all; -1: none */
    int32_t first;          /* index of chunks[0] among all */
    double share;           /* factor on the gradient */
    unsigned char *scratch; /* [chunks, XD_ULD_SCRATCH(of the longest)]; for a device */
} xd_uld_args;

/* Rows that are probabilities, and their generalised JSD. */
typedef struct xd_jsd_args {
    xd_rows student, teacher,
        gradient;             /* of one shape and dtype; gradient.data may be NULL, or student's memory */
    double beta, denominator; /* the gradient is divided by it, the sum is not */
    xd_flagged_sum *out;      /* [XD_FLAGGED_SUMS] */
} xd_jsd_args;

/* Entries of the kernel table. Sums do not depend on how chunks are grouped into calls. */
typedef struct xd_uld_kernels {
    /* parts -> factor, finite and scores */
    xd_result (*merge)(const xd_launch *launch, const xd_uld_args *args);
    /* logits of the base rows -> sorted, of both sides */
    xd_result (*sort)(const xd_launch *launch, const xd_uld_args *args);
    /* sorted and the matched ids -> matched, unmatched, mean and slope. An empty list is not compared with the
     * other: unmatched is then 0. */
    xd_result (*compare)(const xd_launch *launch, const xd_uld_args *args);
    /* slope -> rows of the gradient, all columns; 0 in rows without a chunk, or with one that is not finite */
    xd_result (*gradient)(const xd_launch *launch, const xd_uld_args *args);
    /* the sum over all entries, those below the floor raised to it, and its derivative with respect to the student's */
    xd_result (*jsd)(const xd_launch *launch, const xd_jsd_args *args);
} xd_uld_kernels;

#endif
