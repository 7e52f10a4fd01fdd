#ifndef XDI_KERNEL_XTOKEN_H
#define XDI_KERNEL_XTOKEN_H

#include "kernel/types.h"

/* Losses across tokenizers: what one rank computes between two exchanges. All pointers are memory of the
 * device. Sums that go over rows and ranks are cells: doubles, or xd_fixed in INVARIANT mode. */

/* The floor of divisions and logarithms. */
#define XD_XTOKEN_EPSILON 1e-10

/* Floats of scratch that the entries with a matrix of k slots want. */
#define XD_XTOKEN_SCRATCH(k) (16 * (k) + 34064)

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
    /* On a device: not NULL -> the entries above are those of all columns, and slot holds teacher ids, whose places
     * in J these are; -1: not in it. Without begin a student's id is the teacher's. Where chunks have lists of
     * their own, each has its places. */
    const int32_t *places; /* [teacher ids], or [place_count, vocabulary] */
    /* On a device: not NULL -> slot holds teacher ids, whose places in this ascending J [k] are looked up. */
    const int64_t *sorted;
} xd_xtoken_matrix;

/* One chunk's sums become its divergence. */
typedef struct xd_xtoken_chunk {
    double student, teacher; /* positions on each side, plus XD_XTOKEN_EPSILON */
    double factor;           /* of the derivative; 0 -> it is zero */
    double value;            /* out: d(c) */
    double delta;            /* out: sum of q dy: what delta is for a chunk of one position */
    double largest; /* out: largest |dy|; of a position (compare) 0 when value is not finite, else 1 */
    bool compared;  /* false: nothing is done but dy = 0 */
    bool agree;     /* out: the likeliest column is the same on both sides */
} xd_xtoken_chunk;

/* The likeliest pair of a shard: its mean and its number, and the number of the teacher's. Without a pair the
 * numbers are -1 and the mean is -infinity. */
enum { XD_XTOKEN_BEST_MEAN, XD_XTOKEN_BEST_PAIR, XD_XTOKEN_BEST_OTHER, XD_XTOKEN_BEST_WORDS };

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

/* Moments of a row at temperature 1: its largest logit, ln sum e^(z - largest), the entropy with a floor of
 * XD_XTOKEN_EPSILON under the logarithm (0 when not asked for), and the logit at its label: NaN for a label
 * outside the columns. The second is NaN for a row that is not finite. */
enum { XD_XTOKEN_LARGEST, XD_XTOKEN_LOG_SUM, XD_XTOKEN_ENTROPY, XD_XTOKEN_LABEL, XD_XTOKEN_MOMENTS };

/* What all shards found of one chunk: their likeliest pairs, and behind these their sorted tails. */
typedef struct xd_xtoken_merge {
    const double *all; /* [shards][stride]: XD_XTOKEN_BEST_WORDS, then [k] */
    int64_t stride, k;
    int shard, shards;
    const double *others; /* [k] the teacher's tail */
    const int64_t *found; /* [k] columns of this shard's own tail; -1: no entry */
    float *slope;         /* [columns of this shard] */
    double *out;     /* [2] sum of |x - y| over the two tails; 1 when both sides have the same pair, else 0 */
    int64_t *places; /* [shards] scratch */
} xd_xtoken_merge;

/* Rows of several sequences and the chunks that they belong to. ids and sizes are memory of the host on every
 * device; they travel with the launches and may change when the call has returned. */
typedef struct xd_chunk_args {
    xd_rows rows;         /* values, or the gradient: [sequences * held, n] f32 or bf16 */
    const int64_t *ids;   /* [rows] chunk in its sequence; -1: none */
    int64_t held, chunks; /* rows and chunks of a sequence */
    int64_t count;        /* chunks of all sequences */
    const int64_t *sizes; /* [count] */
    const double *weight; /* [count, n] */
    const double *sums;   /* [count, n] */
    double *out;          /* [count, n] cells of sums, or averages */
    bool fixed;
} xd_chunk_args;

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
    double scale;              /* of what log_probs, pick and spread write, and of u in gradient */
    double divisor;            /* of the teacher's logits in compare, beside the temperature */
    bool add;                  /* pick adds to what is there */
    double *student, *teacher; /* [place_count, k] sums over all ranks */
    xd_xtoken_chunk *chunks;   /* [place_count] */
    bool normalise;            /* the target becomes a distribution */
    bool reverse;
    const double *means;         /* [columns] */
    const double *others;        /* the teacher's means */
    const int32_t *pair, *other; /* [pairs] ids on both sides, ascending on the student's */
    int64_t pairs, first;        /* first: the student id of column 0 */
    double *best;                /* [XD_XTOKEN_BEST_WORDS] out; NULL -> not asked for */
    xd_rows gradient;
    const double *delta;   /* [count] */
    const float *u;        /* [columns] */
    float *slope;          /* [columns] out */
    const int64_t *offset; /* [place_count + 1] where the list of each chunk begins */
    const int32_t *list;   /* [k] teacher ids, k = offset[place_count]; student and teacher are as long */
    int64_t vocabulary;    /* of the teacher: ids in places of the matrix, and in slots of list_slots */
    bool direct; /* gradient of a device: dy times the chunk's factor is the derivative by the logits */
    const double *slopes;  /* [count] derivative by the label's log-probability at temperature 1; NULL -> 0 */
    double *moments;       /* [count, XD_XTOKEN_MOMENTS] out */
    bool entropy;          /* it is asked for */
    const double *lse_one; /* [rows of logits] log-sum-exp at temperature 1 */
    const double *ce_factor; /* [rows of logits] times ce_weight; NULL or 0 -> no cross entropy */
    double ce_weight;
    const int64_t *labels; /* [rows of logits] */
    uint8_t *written;      /* [rows of logits] the gradient has the row: add to it */
    float *scratch;        /* [XD_XTOKEN_SCRATCH(k)] */
    double *row_lse;       /* [rows of logits] out, or largest elements */
    double *out;           /* what the entries of a device make of cells */
    int32_t *slots;        /* [columns] out, or [place_count, vocabulary] */
} xd_xtoken_args;

/* Entries of the kernel table. p = exp(z / temperature - lse). */
typedef struct xd_xtoken_kernels {
    /* cells [place_count, k] += p M of the rows. On a device rows, places, ids and lse may be NULL: row i and place i,
     * column j, and logits that are the p; with `vocabulary` a column outside it has no entries. */
    xd_result (*project)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [place_count, k] += log_softmax(z / temperature) over the columns `ids` */
    xd_result (*target)(const xd_launch *launch, const xd_xtoken_args *args);
    /* student = sums of p M and teacher = sums of log-probabilities -> chunks; student becomes dy, the
     * derivative of factor d(c) by p M of each position */
    xd_result (*divergence)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [count] += sum of p M dy / largest, dy = student */
    xd_result (*delta)(const xd_launch *launch, const xd_xtoken_args *args);
    /* gradient rows: what they hold when written, else ce_factor (softmax(z) - one at the label), plus
     *   p (M dy - delta) / temperature with a matrix, or   scale u - p delta   with u,
     * plus   slopes (one at the label - softmax(z))
     * On a device rows of a chunk whose largest is 0 have no part of matrix or u; on a CPU they are left out. On a
     * device, with `direct`, the part of a matrix is   factor M dy; then rows, places, chunks, written and the logits'
     * data may be NULL: row i and place i, factor 1, no row written before. */
    xd_result (*gradient)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [columns] = the rows' sum of scale log_softmax(z / temperature); lse NULL: it is computed */
    xd_result (*log_probs)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cell 0 += divergence of means and others over this shard's pairs; slope its derivative by means; best */
    xd_result (*pair)(const xd_launch *launch, const xd_xtoken_args *args);
    /* values and found */
    xd_result (*tail)(const xd_launch *launch, const xd_xtoken_tail *tail);
    /* the shards' tails as one list, of equals the lowest shard's first: out, and slope where an entry of the
     * list is this shard's */
    xd_result (*merge)(const xd_launch *launch, const xd_xtoken_merge *merge);
    /* cell 0 += the sum of u */
    xd_result (*total)(const xd_launch *launch, const xd_xtoken_args *args);
    /* moments of the rows; labels NULL: none is looked at */
    xd_result (*moments)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [count, k], doubles: scale z at the columns ids - first; -infinity for what this shard lacks */
    xd_result (*pick)(const xd_launch *launch, const xd_xtoken_args *args);
    /* student and teacher [count, k] logits -> value, agree and largest of chunks [count], of which only those
     * marked as compared are touched; student becomes the derivative of value by its logits over the temperature */
    xd_result (*compare)(const xd_launch *launch, const xd_xtoken_args *args);
    /* slope = 0, but scale student [k] at the columns ids - first that this shard has. NULL on a device, where
     * `gradient` reads student by itself. */
    xd_result (*spread)(const xd_launch *launch, const xd_xtoken_args *args);

    /* Chunks with lists of columns of their own. M is the transposed projection of the matrix; without
     * column_begin a teacher's id is the student's. */

    /* cells [offset[place_count]] += p M of the rows */
    xd_result (*list_project)(const xd_launch *launch, const xd_xtoken_args *args);
    /* student = sums of p M and teacher = mean probabilities -> value, agree and largest of chunks: divergence
     * with one more entry for what the list leaves out; student becomes dy. A chunk's `student` is without
     * epsilon here, and chunks without a list are left alone. */
    xd_result (*list_divergence)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [count] += sum of p M dy / largest */
    xd_result (*list_delta)(const xd_launch *launch, const xd_xtoken_args *args);
    /* of one row whose chunk's largest is not 0: slope = p M dy / temperature. cells [columns] is scratch, zero
     * before and after. NULL on a device, which has list_slots and `gradient` for it. */
    xd_result (*list_slopes)(const xd_launch *launch, const xd_xtoken_args *args);

    /* Averages of chunks. */

    /* out += the rows of each chunk, in their order */
    xd_result (*chunk_sums)(const xd_launch *launch, const xd_chunk_args *args);
    /* out = sums / sizes, 0 where a chunk is empty; they may share memory. Of rows only cols is looked at. */
    xd_result (*chunk_averages)(const xd_launch *launch, const xd_chunk_args *args);
    /* rows = weight / size of their chunk, 0 for those without one */
    xd_result (*chunk_spread)(const xd_launch *launch, const xd_chunk_args *args);

    /* What the driver of a CPU does itself; NULL there. */

    /* slots [columns] = place of each id in `ids`, -1 where it has none */
    xd_result (*slots)(const xd_launch *launch, const xd_xtoken_args *args);
    /* slots [place_count, vocabulary] = place of each id in its chunk's list, -1 where it has none */
    xd_result (*list_slots)(const xd_launch *launch, const xd_xtoken_args *args);
    /* fixed cells [count] -> out: doubles, in memory of their own */
    xd_result (*settle)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [count] of `delta` or list_delta -> out: what gradient takes as delta. Positions alone in their chunk have
     * its own, but where chunks have lists. */
    xd_result (*row_deltas)(const xd_launch *launch, const xd_xtoken_args *args);
    /* fixed cells [rows of logits] += sum of exp((z - row_lse) / temperature), row_lse the largest z */
    xd_result (*row_sums)(const xd_launch *launch, const xd_xtoken_args *args);
    /* row_lse = log-sum-exp from those cells */
    xd_result (*row_logs)(const xd_launch *launch, const xd_xtoken_args *args);
    /* cells [2], the sums of `pair` and of `total`, and out of `merge` in delta -> chunk 0: value the first, delta the
     * tail's sum, agree, largest 0 when they are not finite, else 1; out [count]: what gradient takes as delta */
    xd_result (*close)(const xd_launch *launch, const xd_xtoken_args *args);
} xd_xtoken_kernels;

/* The plain CPU implementation, the specification of the others. */
XD_API xd_xtoken_kernels xd_xtoken_kernels_cpu(void);

#endif
