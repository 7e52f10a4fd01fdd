#ifndef XDI_KERNEL_ROWS_H
#define XDI_KERNEL_ROWS_H

#include "kernel/fixed.h"
#include "kernel/topk.h"
#include "kernel/types.h"

/* Which rows of a loss count, what they are multiplied by, and how their losses become one value. */

/* One rank's part of a denominator, as integers, so that the sum over ranks is exact. */
enum { XD_COUNT_POSITIONS, XD_COUNT_HIGH, XD_COUNT_LOW, XD_COUNT_REFUSED, XD_COUNT_WORDS };

/* One rank's part of a loss as int64 words, so that doubles and limbs can be sent together. */
enum {
    XD_RECORD_HARD, /* a double's bits, or the rest of an xd_total when fixed */
    XD_RECORD_SOFT = 2,
    XD_RECORD_COUNTED = 4,
    XD_RECORD_LABEL, /* rows with a finding, by kind */
    XD_RECORD_NOT_FINITE,
    XD_RECORD_OVERFLOW,
    XD_RECORD_FIRST_ROW, /* of the first finding: its row, and its value for the status */
    XD_RECORD_FIRST_VALUE,
    XD_RECORD_HARD_EIGHTS, /* the last words of the totals; 0 unless fixed */
    XD_RECORD_SOFT_EIGHTS,
    XD_RECORD_WORDS
};

/* Inputs and outputs of the row entries; each reads and writes what its comment names. */
typedef struct xd_row_args {
    xd_positions positions;            /* rows; weights of any sign here */
    const double *scale;               /* one value; NULL -> 1 */
    const xd_denominator *denominator; /* NULL -> denominator_value */
    double denominator_value;
    double *row_scale; /* [rows] weight scale / D; 0 for rows that do not count or have no finite factor */
    double *factor;    /* one value, scale / D */
    const xd_loss_row *loss_rows; /* [rows] losses: these */
    const xd_topk_row *topk_rows; /* [rows] or these */
    double hard_weight, soft_weight;
    bool fixed;                                    /* sums are xd_fixed */
    float *row_loss, *student_mass, *teacher_mass; /* [rows] or NULL; the masses are those of topk_rows */
    int64_t *record;                               /* [XD_RECORD_WORDS] of this rank */
    const int64_t *records;                        /* [ranks][XD_RECORD_WORDS] */
    int ranks;
    xd_loss_values *values;
} xd_row_args;

/* Rows that a loss goes on with: they count and have no finding. The others become zero, whatever they hold. */
typedef struct xd_kept_rows {
    xd_rows from, to;        /* of one shape and dtype; may be the same memory */
    const double *row_scale; /* [rows] 0 -> the row does not count */
    xd_loss_row *row;        /* [rows] */
    bool judge;              /* an element that is not finite is a finding of its row */
} xd_kept_rows;

/* Row entries of the kernel table. */
typedef struct xd_row_kernels {
    /* adds positions to part[XD_COUNT_WORDS], which the caller has set to zero; a negative count is refused */
    xd_result (*count)(const xd_launch *launch, const xd_positions *positions, int64_t *part);
    /* a part summed over ranks becomes the denominator; they may share memory */
    xd_result (*denominator)(const xd_launch *launch, const int64_t *part, xd_denominator *out);
    /* hit.value / counted.value; 0 when nothing counted, NaN when a weight was refused */
    xd_result (*ratio)(const xd_launch *launch, const xd_denominator *hit, const xd_denominator *counted,
                       double *out);
    /* positions, scale, denominator -> row_scale, factor */
    xd_result (*scales)(const xd_launch *launch, const xd_row_args *args);
    /* losses -> record, row_loss and masses */
    xd_result (*sum)(const xd_launch *launch, const xd_row_args *args);
    /* records of all ranks, in rank order -> values; findings are added to launch->status */
    xd_result (*finish)(const xd_launch *launch, const xd_row_args *args);
    /* maxima[c] = largest element of column c over the rows whose mask (NULL -> all) is not 0 */
    xd_result (*column_maxima)(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                               int64_t columns, float *maxima);
    /* ascending, in place */
    xd_result (*sort_ids)(const xd_launch *launch, int64_t *ids, int64_t count);
    xd_result (*keep)(const xd_launch *launch, const xd_kept_rows *args);
    /* voters[r] = 1 where the mask (NULL -> all) is not 0 and none of the row's `columns` is NaN or +infinity, else 0;
     * -infinity is a legal element */
    xd_result (*voters)(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask, int64_t columns,
                        uint8_t *voters);
    /* Optional, for memory of the host: column_maxima in the same read that tells whether all it read is finite. NULL -> voters
     * are asked first. */
    xd_result (*finite_maxima)(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                               int64_t columns, float *maxima, bool *finite);
} xd_row_kernels;

#endif
