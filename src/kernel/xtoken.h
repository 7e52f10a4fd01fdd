#ifndef XDI_KERNEL_XTOKEN_H
#define XDI_KERNEL_XTOKEN_H

#include "kernel/table.h"

/* Losses across tokenizers: what one rank computes between two exchanges. All pointers are memory of the
 * device. Sums that go over rows and ranks are cells: doubles, or xd_fixed in INVARIANT mode. */

/* The floor of divisions and logarithms. */
#define XD_XTOKEN_EPSILON 1e-10

/* Floats of scratch that the entries with a matrix of k slots want. */
#define XD_XTOKEN_SCRATCH(k) (16 * (k) + 16640)

/* The entries of a projection in the kept columns J, by student id. */
typedef struct xd_xtoken_matrix {
    int64_t columns;               /* student ids of this shard */
    int64_t k;                     /* columns in J: a slot is a place in it */
    const int64_t *begin;          /* [columns + 1] */
    const int32_t *student, *slot; /* [begin[columns]] ascending by student id, then slot */
    const float *weight;           /* [begin[columns]] */
    /* On a device: the transposed projection with all its columns, of which slot j is column ids[j]. */
    const int64_t *column_begin;
    const int32_t *column_student; /* of the whole vocabulary, ascending within a column */
    const float *column_weight;
} xd_xtoken_matrix;

/* One chunk's sums become its divergence. */
typedef struct xd_xtoken_chunk {
    double student, teacher; /* positions on each side, plus XD_XTOKEN_EPSILON */
    double factor;           /* of the derivative; 0 -> it is zero */
    double value;            /* out: d(c) */
    double delta;            /* out: sum of q dy: what delta is for a chunk of one position */
    double largest;          /* out: largest |dy| */
    bool compared;           /* false: nothing is done but dy = 0 */
    bool agree;              /* out: the likeliest column is the same on both sides */
} xd_xtoken_chunk;

/* A list of ids whose largest probabilities are sorted. */
typedef struct xd_xtoken_tail {
    const double *means; /* log-probabilities */
    const int32_t *ids;  /* [count] ascending, of which those in [begin, end) */
    int64_t count, begin, end, k;
    double *values; /* [k] out: probabilities, descending, lowest id first among equals; -1 past the last */
    int64_t *found; /* [k] out: ids less begin; -1 past the last */
    float *scratch; /* [count] */
    bool fixed;     /* the same values however the list is cut */
} xd_xtoken_tail;

/* Inputs and outputs of the entries; each reads and writes what its comment names. Rows at work are
 * rows[0 .. count) of the logits; places[i] is the chunk of rows[i] among those at hand, ascending. */
typedef struct xd_xtoken_args {
    xd_rows logits;
    int64_t columns; /* of the logits, without padding */
    double temperature;
    const double *lse; /* [rows of logits] log-sum-exp at the temperature */
    const int64_t *rows, *places;
    int64_t count, place_count;
    xd_xtoken_matrix matrix;
    const int64_t *ids; /* [k] J */
    int64_t k;
    double *cells;
    bool fixed;
    double scale;              /* of what log_probs adds, and of u in gradient */
    double *student, *teacher; /* [place_count, k] sums over all ranks */
    xd_xtoken_chunk *chunks;   /* [place_count] */
    bool normalise;            /* the target becomes a distribution */
    bool reverse;
    const double *means;         /* [columns] */
    const double *others;        /* the teacher's means */
    const int32_t *pair, *other; /* [pairs] ids on both sides, ascending on the student's */
    int64_t pairs, first;        /* first: the student id of column 0 */
    int64_t best, other_best;    /* out: the likeliest pair of this shard and of the teacher; -1: none */
    xd_rows gradient;
    const double *delta;     /* [count] */
    const float *u;          /* [columns] */
    float *slope;            /* [columns] out */
    const double *lse_one;   /* [rows of logits] log-sum-exp at temperature 1 */
    const double *ce_factor; /* [rows of logits] times ce_weight; NULL or 0 -> no cross entropy */
    double ce_weight;
    const int64_t *labels; /* [rows of logits] */
    uint8_t *written;      /* [rows of logits] the gradient has the row: add to it */
    float *scratch;        /* [XD_XTOKEN_SCRATCH(k)] */
} xd_xtoken_args;

/* Entries of the kernel table. p = exp(z / temperature - lse). */
typedef struct xd_xtoken_kernels {
    /* cells [place_count, k] += p M of the rows */
    xd_result (*project)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [place_count, k] += log_softmax(z / temperature) over the columns `ids` */
    xd_result (*target)(const xd_launch *launch, const xd_xtoken_args *args);
    /* student = sums of p M and teacher = sums of log-probabilities -> chunks; student becomes dy, the
     * derivative of factor d(c) by p M of each position */
    xd_result (*divergence)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [count] += sum of p M dy / largest, dy = student */
    xd_result (*delta)(const xd_launch *launch, const xd_xtoken_args *args);
    /* gradient rows: what they hold when written, else ce_factor (softmax(z) - one at the label), plus
     *   p (M dy - delta) / temperature with a matrix, or   scale u - p delta   with u */
    xd_result (*gradient)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [columns] = the rows' sum of scale log_softmax(z / temperature); lse NULL: it is computed */
    xd_result (*log_probs)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cell 0 += divergence of means and others over this shard's pairs; slope its derivative by means;
     * best, other_best */
    xd_result (*pair)(const xd_launch *launch, xd_xtoken_args *args);
    /* values and found */
    xd_result (*tail)(const xd_launch *launch, const xd_xtoken_tail *tail);
    /* cell 0 += the sum of u */
    xd_result (*total)(const xd_launch *launch, const xd_xtoken_args *args);
} xd_xtoken_kernels;

/* The plain CPU implementation, the specification of the others. */
XD_API xd_xtoken_kernels xd_xtoken_kernels_cpu(void);

#endif
