#ifndef XDI_KERNEL_XTOKEN_H
#define XDI_KERNEL_XTOKEN_H

#include "base/scalar.h"
#include "kernel/types.h"

/* Losses across tokenizers: what one rank computes between two exchanges. All pointers are memory of the
 * device. Sums over rows and ranks are cells: doubles, or xd_fixed in INVARIANT mode. */

/* Lower bound on divisors and arguments of logarithms. */
#define XD_XTOKEN_EPSILON 1e-10

/* Floats of scratch that the entries over whole vocabularies need. */
#define XD_XTOKEN_SCRATCH 34064

/* The rows of a call: rows[0 .. count) of the logits. places[i] is the index of the chunk of rows[i] among those of the
 * call, ascending. With lse, p = exp(z / temperature - lse). */
typedef struct xd_xtoken_rows {
    xd_rows logits;
    int64_t columns; /* of the logits, without padding */
    int64_t first;   /* the student id of column 0 */
    double temperature;
    const double *lse; /* [rows of logits] log-sum-exp at the temperature; NULL: not known */
    const int64_t *rows, *places;
    int64_t count;
    const uint8_t *finite; /* [rows of logits] for `target` and `pick`: a row with 0 is NaN; NULL: none is */
    /* [places + 1] where the rows of each place begin, from begin[0] on; for entries that are given the number of places */
    const int64_t *begin;
} xd_xtoken_rows;

/* A projection of student ids to teacher ids, of both whole vocabularies. */
typedef struct xd_xtoken_projection {
    int64_t teacher_size;
    const int64_t *row_begin;    /* [student ids + 1] */
    const int32_t *teacher_id;   /* ascending within a row */
    const float *weight;         /* of the rows' entries */
    const int64_t *column_begin; /* [teacher_size + 1] the transposed matrix */
    const int32_t *student_id;   /* ascending within a column */
    const float *column_weight;
    int64_t entries;
} xd_xtoken_projection;

/* M: the rows of this shard's student ids, in the columns J. */
typedef struct xd_xtoken_matrix {
    xd_xtoken_projection projection;
    int64_t first, columns; /* student ids [first, first + columns) */
    const int64_t *ids;     /* [k] J, ascending teacher ids */
    int64_t k;
    /* [matrix_bytes] what `prepare` leaves for the other entries, in the form of its device */
    void *prepared;
} xd_xtoken_matrix;

/* The columns of chunks that each have a list of their own. M is the transposed projection in these columns; without
 * column_begin a teacher's id equals the student's. */
typedef struct xd_xtoken_lists {
    xd_xtoken_projection projection;
    int64_t count;         /* chunks of the call; the teacher_size of the projection is set in any case */
    const int64_t *offset; /* [count + 1] where the list of each chunk begins */
    const int32_t *ids;    /* [entries] teacher ids, distinct within a chunk */
    int64_t entries;       /* offset[count] */
} xd_xtoken_lists;

/* One chunk: sizes and settings, and the divergence computed from its sums. */
typedef struct xd_xtoken_chunk {
    double student, teacher; /* positions on each side, plus XD_XTOKEN_EPSILON */
    double factor;           /* of the derivative; 0 -> it is zero */
    double value;            /* out: d(c) */
    double delta;            /* out: sum of q dy, which is the delta of a chunk of one position */
    double largest; /* out: largest |dy|; of a position (compare) 0 when value is not finite, else 1 */
    bool compared;  /* false: dy is set to 0 and nothing else is done */
    bool alone;     /* one position on the student's side: `divergence` gives its delta */
    bool agree;     /* out: the most likely column is the same on both sides */
    double limit;   /* a divergence of this size or more is not finite; 0: every number is */
} xd_xtoken_chunk;

/* The most likely pair of a shard: its mean, its index, and the index of the teacher's. Without a pair the
 * indices are -1 and the mean is -infinity. */
enum { XD_XTOKEN_BEST_MEAN, XD_XTOKEN_BEST_PAIR, XD_XTOKEN_BEST_OTHER, XD_XTOKEN_BEST_WORDS };

/* A list of ids whose largest probabilities are sorted. */
typedef struct xd_xtoken_tail {
    const double *means; /* log-probabilities */
    const int32_t *ids;  /* [count] ascending, of which those in [begin, end) */
    int64_t count, begin, end, k;
    double *values; /* [k] out: probabilities, descending, lowest id first among equals; -1 past the last */
    int64_t *found; /* [k] out: ids less begin; -1 past the last */
    float *scratch; /* [count] */
    bool fixed;     /* the same values however the list is split over shards */
} xd_xtoken_tail;

/* Moments of a row at temperature 1: its largest logit, ln sum e^(z - largest), the entropy with a floor of
 * XD_XTOKEN_EPSILON under the logarithm (0 when not requested), and the logit at its label: NaN for a label
 * outside the columns. The second is NaN for a row that is not finite. */
enum { XD_XTOKEN_LARGEST, XD_XTOKEN_LOG_SUM, XD_XTOKEN_ENTROPY, XD_XTOKEN_LABEL, XD_XTOKEN_MOMENTS };

/* What all shards found for one chunk: their most likely pairs, then their sorted tails. */
typedef struct xd_xtoken_merge {
    const double *all; /* [shards][stride]: XD_XTOKEN_BEST_WORDS, then [k] */
    int64_t stride, k;
    int shard, shards;
    const double *others; /* [k] the teacher's tail */
    const int64_t *found; /* [k] columns of this shard's tail; -1: no entry */
    float *slope;         /* [columns of this shard] */
    double *out;     /* [2] sum of |x - y| over the two tails; 1 when both sides have the same pair, else 0 */
    int64_t *places; /* [shards] scratch */
} xd_xtoken_merge;

/* Rows of several sequences and the chunks that they belong to. ids and sizes are memory of the host on every
 * device; they are passed as kernel arguments and may change when the call has returned. */
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

/* p M of the rows, summed over each chunk's. */
typedef struct xd_xtoken_project_args {
    xd_xtoken_rows x;
    int64_t place_count; /* chunks of the call */
    xd_xtoken_matrix matrix;
    double *cells; /* [place_count, k] */
    bool fixed;
    float *scratch; /* [project_scratch] */
} xd_xtoken_project_args;

/* Log-softmax of a teacher's rows at the columns `ids`, summed over each chunk's. */
typedef struct xd_xtoken_target_args {
    xd_xtoken_rows x;
    int64_t place_count;
    const int64_t *ids; /* [k] columns of the logits */
    int64_t k;
    double *cells; /* [place_count, k] */
    bool fixed;
    float *scratch; /* [project_scratch] */
} xd_xtoken_target_args;

/* Sums over all ranks become divergences, and those of the student dy: the derivative of factor d(c) by p M of each
 * position. */
typedef struct xd_xtoken_divergence_args {
    double *student, *teacher; /* [place_count, k] */
    xd_xtoken_chunk *chunks;   /* [place_count] */
    int64_t place_count, k;
    bool normalise; /* the target becomes a distribution */
    bool reverse;
    bool fixed;     /* the sums come from fixed cells: nothing is rounded to f32 */
    float *scratch; /* [project_scratch] */
} xd_xtoken_divergence_args;

/* delta of a row, sum of p M dy, in units of its chunk's largest |dy|. */
typedef struct xd_xtoken_delta_args {
    xd_xtoken_rows x;
    xd_xtoken_matrix matrix;
    const double *dy; /* [chunks, k] */
    const xd_xtoken_chunk *chunks;
    double *cells; /* [count] */
    bool fixed;
    float *scratch; /* [project_scratch] */
} xd_xtoken_delta_args;

/* Turns cells of deltas into the form that the gradients take. */
typedef struct xd_xtoken_row_deltas_args {
    const double *cells; /* [count] */
    bool fixed;
    const int64_t *places;         /* [count] */
    const xd_xtoken_chunk *chunks; /* those of the call */
    int64_t count;
    double *out; /* [count] */
} xd_xtoken_row_deltas_args;

/* Log-probabilities over the whole vocabulary, summed over rows. */
typedef struct xd_xtoken_log_probs_args {
    xd_xtoken_rows x; /* lse NULL: it is computed */
    double scale;
    double *cells; /* [columns] out */
    bool fixed;
    float *scratch; /* [XD_XTOKEN_SCRATCH] */
} xd_xtoken_log_probs_args;

/* Pairs of ids of the two means. */
typedef struct xd_xtoken_pair_args {
    int64_t first, columns;      /* student ids [first, first + columns) */
    const double *means;         /* [columns] */
    const double *others;        /* the teacher's, of all its ids */
    const int32_t *pair, *other; /* [pairs] ids on both sides, ascending on the student's */
    int64_t pairs;
    bool reverse;
    double *cells; /* [1] */
    bool fixed;
    float *slope;   /* [columns] out */
    double *best;   /* [XD_XTOKEN_BEST_WORDS] out */
    float *scratch; /* [XD_XTOKEN_SCRATCH] */
} xd_xtoken_pair_args;

/* Of a shard's pairs in a chunk: the mean and student id of the most likely one, and the teacher's mean and student id of the one that
 * is most likely there; an id of -1: none. */
enum {
    XD_XTOKEN_GOLD_MEAN,
    XD_XTOKEN_GOLD_PAIR,
    XD_XTOKEN_GOLD_OTHER_MEAN,
    XD_XTOKEN_GOLD_OTHER,
    XD_XTOKEN_GOLD_WORDS
};

/* An exact map in memory of the device. */
typedef struct xd_xtoken_gold_map {
    const int32_t *pair, *other; /* [pairs], as in xd_xtoken_pair_args */
    int64_t pairs;
    const int32_t *rest, *other_rest; /* ids without a partner, ascending */
    int64_t rest_count, other_rest_count;
} xd_xtoken_gold_map;

/* A tile of chunks of pairs and tails whose rows are all on this rank. */
typedef struct xd_xtoken_gold_args {
    xd_xtoken_rows student, teacher; /* by their places; the teacher's lse is not known */
    int64_t count;                   /* chunks */
    xd_xtoken_chunk *chunks;         /* [count] */
    xd_xtoken_gold_map map;
    int64_t k; /* of the tails */
    bool reverse, fixed, write;
    int32_t *partner;  /* [student columns + 11] of this shard's ids, or -1; then what the kernels keep */
    double *sums;      /* [count, 2] cells: of the pairs, and of the derivatives */
    float *u;          /* [count, student columns] derivatives by means */
    double *tails;     /* [count][XD_XTOKEN_GOLD_WORDS + k] */
    const double *all; /* [shards][count][XD_XTOKEN_GOLD_WORDS + k] */
    int shard, shards;
    double *other_tail; /* [count, k] */
    int64_t *found;     /* [count, k] */
    double *merged;     /* [count, 2] as in xd_xtoken_merge */
    double *delta;      /* [student rows] */
    void *scratch;      /* [gold_bytes] */
} xd_xtoken_gold_args;

/* The sum of a shard's derivatives. */
typedef struct xd_xtoken_total_args {
    const float *u; /* [columns] */
    int64_t columns;
    double *cells; /* [1] */
    bool fixed;
    float *scratch; /* [XD_XTOKEN_SCRATCH] */
} xd_xtoken_total_args;

/* Completes a chunk of pairs and tails. */
typedef struct xd_xtoken_close_args {
    const double *cells; /* [2] sums of `pair` and of `total` */
    bool fixed;
    const double *merged; /* [2] out of `merge` */
    double scale;
    int64_t count; /* rows */
    double *out;   /* [count] delta for the gradient */
    xd_xtoken_chunk *chunk;
} xd_xtoken_close_args;

/* Moments of rows. */
typedef struct xd_xtoken_moments_args {
    xd_xtoken_rows x;
    xd_ids labels;   /* [rows of logits], or none: no logits at labels */
    bool entropy;    /* whether it is requested */
    bool fixed;      /* INVARIANT: as in xd_xtoken_gradient */
    double *moments; /* [count, XD_XTOKEN_MOMENTS] out */
} xd_xtoken_moments_args;

/* Chosen columns of rows. */
typedef struct xd_xtoken_pick_args {
    xd_xtoken_rows x;
    const int64_t *ids; /* [k] */
    int64_t k;
    double scale;
    bool add;    /* add to out instead of overwriting it */
    double *out; /* [count, k] */
} xd_xtoken_pick_args;

/* Both sides' logits at chosen columns, row by row. */
typedef struct xd_xtoken_compare_args {
    double *student, *teacher; /* [count, k] logits */
    xd_xtoken_chunk *chunks;   /* [count] */
    int64_t count, k;
    double temperature, divisor; /* divisor: of the teacher's logits, in addition to the temperature */
    bool reverse;
} xd_xtoken_compare_args;

/* The index of each id in a list of ids. */
typedef struct xd_xtoken_slots_args {
    const int64_t *ids; /* [k] */
    int64_t k, size;
    int32_t *slots; /* [size] out */
} xd_xtoken_slots_args;

/* Chunks with lists. */
typedef struct xd_xtoken_list_args {
    xd_xtoken_rows x;
    xd_xtoken_lists lists;
    double *cells; /* list_project: [entries]; list_delta: [count] */
    bool fixed;
    /* [entries] list_divergence: sums of p M and mean probabilities; list_delta: dy first */
    double *student, *teacher;
    xd_xtoken_chunk *chunks; /* [lists.count] */
    bool reverse;
} xd_xtoken_list_args;

/* What all gradients take: the rows, the output, and the cross entropy, which the first writer of a row adds,
 *   ce_factor ce_weight (softmax(z) - one at the label) */
typedef struct xd_xtoken_gradient {
    xd_xtoken_rows x;
    xd_rows rows;            /* may be the logits' memory */
    const double *lse_one;   /* [rows of logits] log-sum-exp at temperature 1 */
    const double *ce_factor; /* [rows of logits]; NULL or 0 -> no cross entropy */
    double ce_weight;
    xd_ids labels;    /* [rows of logits] */
    uint8_t *written; /* [rows of logits] the row has been written: add to it. Every writer marks its rows */
    bool fixed;       /* INVARIANT: a CPU rounds no intermediate value to f32 */
} xd_xtoken_gradient;

/* The gradient through a projection. */
typedef struct xd_xtoken_project_gradient_args {
    xd_xtoken_gradient to;
    xd_xtoken_matrix matrix;
    const double *dy;    /* [chunks, k] */
    const double *delta; /* [count] */
    const xd_xtoken_chunk *chunks;
    float *scratch; /* [project_scratch] */
    int64_t place_count;
} xd_xtoken_project_gradient_args;

/* The gradient of one chunk's mean log-probabilities. */
typedef struct xd_xtoken_mean_gradient_args {
    xd_xtoken_gradient to;
    const float *u; /* [columns] */
    double scale;
    const double *delta;          /* [count] */
    const xd_xtoken_chunk *chunk; /* of all rows */
} xd_xtoken_mean_gradient_args;

/* The gradient at chosen columns. */
typedef struct xd_xtoken_pick_gradient_args {
    xd_xtoken_gradient to;
    const int64_t *ids; /* [k] student ids */
    int64_t k;
    const int32_t *slots;          /* [vocabulary] as `slots` makes them of ids */
    const double *dy;              /* [count, k] */
    const xd_xtoken_chunk *chunks; /* [count] */
    float *scratch;                /* [pick_scratch] */
} xd_xtoken_pick_gradient_args;

/* The gradient through the columns of each chunk. */
typedef struct xd_xtoken_list_gradient_args {
    xd_xtoken_gradient to;
    xd_xtoken_lists lists;
    const double *dy;    /* [entries] */
    const double *delta; /* [count] */
    const xd_xtoken_chunk *chunks;
    void *scratch; /* [list_bytes] */
} xd_xtoken_list_gradient_args;

/* The gradient through the log-probabilities of labels. */
typedef struct xd_xtoken_label_gradient_args {
    xd_xtoken_gradient to;
    /* [count] derivative with respect to the label's log-probability at temperature 1 */
    const double *slopes;
} xd_xtoken_label_gradient_args;

/* log-sum-exps of all rows from sums in fixed point. */
typedef struct xd_xtoken_row_sums_args {
    xd_rows logits;
    int64_t columns;
    double temperature;
    double *lse; /* [rows] the largest z of all shards; out of row_logs the log-sum-exp at the temperature */
    double *cells; /* [rows] fixed */
} xd_xtoken_row_sums_args;

/* Rows times a projection, and back. */
typedef struct xd_xtoken_product_args {
    xd_rows rows;           /* [rows, >= columns] probabilities, or a gradient */
    int64_t first, columns; /* student ids [first, first + columns) */
    xd_xtoken_projection projection;
    const int64_t *ids; /* [k] ascending columns; NULL: all, k = teacher_size */
    int64_t k;
    double *cells; /* product: [rows, k] */
    bool fixed;
    const double *weight; /* product_back: [rows, k] */
} xd_xtoken_product_args;

/* Entries of the kernel table; each means the same on every device. */
typedef struct xd_xtoken_kernels {
    /* bytes of matrix->prepared; reads only the host's pointers of the projection */
    size_t (*matrix_bytes)(const xd_xtoken_matrix *matrix);
    /* floats of scratch for k columns in J, and fixed cells or not */
    int64_t (*project_scratch)(int64_t k, bool fixed);
    /* prepared, for this J */
    xd_result (*prepare)(const xd_launch *launch, const xd_xtoken_matrix *matrix);
    /* cells += p M of the rows */
    xd_result (*project)(const xd_launch *launch, const xd_xtoken_project_args *args);
    /* cells += log_softmax(z / temperature) over the columns `ids`, NaN for rows that are not finite */
    xd_result (*target)(const xd_launch *launch, const xd_xtoken_target_args *args);
    /* student = sums of p M and teacher = sums of log-probabilities -> chunks, and dy in student */
    xd_result (*divergence)(const xd_launch *launch, const xd_xtoken_divergence_args *args);
    /* cells += sum of p M dy / largest, except for rows whose chunk is alone or has a largest of 0 */
    xd_result (*delta)(const xd_launch *launch, const xd_xtoken_delta_args *args);
    /* out = cells times largest; for chunks that are alone, their delta; 0 where largest is 0 */
    xd_result (*row_deltas)(const xd_launch *launch, const xd_xtoken_row_deltas_args *args);
    /* cells = the rows' sum of scale log_softmax(z / temperature) */
    xd_result (*log_probs)(const xd_launch *launch, const xd_xtoken_log_probs_args *args);
    /* cell 0 += divergence of means and others over this shard's pairs; slope its derivative by means; best */
    xd_result (*pair)(const xd_launch *launch, const xd_xtoken_pair_args *args);
    /* values and found */
    xd_result (*tail)(const xd_launch *launch, const xd_xtoken_tail *tail);
    /* merges the shards' tails into one list, among equals the lowest shard's first: out, and slope for the entries
     * that are this shard's */
    xd_result (*merge)(const xd_launch *launch, const xd_xtoken_merge *merge);
    /* cell 0 += the sum of u */
    xd_result (*total)(const xd_launch *launch, const xd_xtoken_total_args *args);
    /* chunk: value = cell 0, delta = merged 0, agree = merged 1, largest 0 when value + delta is not finite, else 1;
     * out = cell 1 times scale */
    xd_result (*close)(const xd_launch *launch, const xd_xtoken_close_args *args);
    /* moments of the rows */
    xd_result (*moments)(const xd_launch *launch, const xd_xtoken_moments_args *args);
    /* out = scale z at the columns ids - first; -infinity for what this shard lacks; NaN for rows that are not finite or whose
     * lse is not */
    xd_result (*pick)(const xd_launch *launch, const xd_xtoken_pick_args *args);
    /* value, agree and largest of the chunks that are marked as compared; student becomes the derivative of value with
     * respect to its logits divided by the temperature */
    xd_result (*compare)(const xd_launch *launch, const xd_xtoken_compare_args *args);
    /* slots = index of each id in `ids`, -1 for an id that is not in it */
    xd_result (*slots)(const xd_launch *launch, const xd_xtoken_slots_args *args);

    /* cells += p M of the rows, in the columns of their chunk */
    xd_result (*list_project)(const xd_launch *launch, const xd_xtoken_list_args *args);
    /* student = sums of p M and teacher = mean probabilities -> value, agree and largest of chunks: divergence
     * with one more entry for what the list leaves out; student becomes dy. A chunk's `student` is without
     * epsilon here, and chunks without a list are not changed. */
    xd_result (*list_divergence)(const xd_launch *launch, const xd_xtoken_list_args *args);
    /* cells += sum of p M dy / largest */
    xd_result (*list_delta)(const xd_launch *launch, const xd_xtoken_list_args *args);
    /* floats of scratch of pick_gradient for `columns` of a shard */
    int64_t (*pick_scratch)(int64_t columns);
    /* bytes of scratch of list_gradient for `columns` of a shard; reads only the counts of the lists */
    size_t (*list_bytes)(int64_t columns, const xd_xtoken_lists *lists);

    /* The gradient of the rows of the call: what it holds where the row was written, else the cross entropy, plus ...
     * Rows of a chunk whose largest is 0 are not changed. */
    /* ... p (M dy - delta) / temperature */
    xd_result (*project_gradient)(const xd_launch *launch, const xd_xtoken_project_gradient_args *args);
    /* ... scale u - p delta */
    xd_result (*mean_gradient)(const xd_launch *launch, const xd_xtoken_mean_gradient_args *args);
    /* ... the chunk's factor times dy, at the columns ids - first */
    xd_result (*pick_gradient)(const xd_launch *launch, const xd_xtoken_pick_gradient_args *args);
    /* ... p (M dy - delta) / temperature, in the columns of the row's chunk */
    xd_result (*list_gradient)(const xd_launch *launch, const xd_xtoken_list_gradient_args *args);
    /* ... slopes (one at the label - softmax(z)) */
    xd_result (*label_gradient)(const xd_launch *launch, const xd_xtoken_label_gradient_args *args);
    /* The cross entropy of all rows that have not been written, rows of the call or not. */
    xd_result (*rest_gradient)(const xd_launch *launch, const xd_xtoken_gradient *to);

    /* Averages of chunks. */

    /* out += the rows of each chunk, in their order */
    xd_result (*chunk_sums)(const xd_launch *launch, const xd_chunk_args *args);
    /* out = sums / sizes, 0 where a chunk is empty; they may share memory. Of `rows`, only cols is read. */
    xd_result (*chunk_averages)(const xd_launch *launch, const xd_chunk_args *args);
    /* rows = weight / size of their chunk, 0 for those without one */
    xd_result (*chunk_spread)(const xd_launch *launch, const xd_chunk_args *args);

    /* out = fixed cells [count] as doubles, in other memory than cells */
    xd_result (*settle)(const xd_launch *launch, const double *cells, int64_t count, double *out);
    /* fixed cells += sum of exp((z - lse) / temperature) */
    xd_result (*row_sums)(const xd_launch *launch, const xd_xtoken_row_sums_args *args);
    /* lse = log-sum-exp from those cells */
    xd_result (*row_logs)(const xd_launch *launch, const xd_xtoken_row_sums_args *args);
    /* cells += rows times the projection in the columns `ids`; columns outside it have no entries */
    xd_result (*product)(const xd_launch *launch, const xd_xtoken_product_args *args);
    /* rows = the transposed projection times weight; 0 beyond `columns` */
    xd_result (*product_back)(const xd_launch *launch, const xd_xtoken_product_args *args);

    /* Pairs and tails of a tile of chunks at once; NULL on a CPU, which works on one chunk after another. Bytes of scratch, from
     * the counts alone; */
    size_t (*gold_bytes)(const xd_xtoken_gold_args *args);
    /* partner; */
    xd_result (*gold_partners)(const xd_launch *launch, const xd_xtoken_gold_args *args);
    /* sums, u of the pairs, and the tails of this shard; where it is the only one, all that the next two entries leave, too; */
    xd_result (*gold_sums)(const xd_launch *launch, const xd_xtoken_gold_args *args);
    /* of several shards: merged, and u and its sum with the tails of all shards; */
    xd_result (*gold_merge)(const xd_launch *launch, const xd_xtoken_gold_args *args);
    /* of several shards: chunks and delta, from sums over all; then the gradient. */
    xd_result (*gold_close)(const xd_launch *launch, const xd_xtoken_gold_args *args);
    xd_result (*gold_gradient)(const xd_launch *launch, const xd_xtoken_gold_args *args,
                               const xd_xtoken_gradient *to);
} xd_xtoken_kernels;

#endif
