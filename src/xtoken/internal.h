#ifndef XDI_XTOKEN_INTERNAL_H
#define XDI_XTOKEN_INTERNAL_H

#include "align/internal.h"
#include "loss/internal.h"
#include "xtoken/xtoken.h"

/* One driver for all kinds of teachers and all devices. `work` is the memory of the context's device that kernels
 * compute on; the lists that the host makes for them are copied there at once; `host` is memory that only the host
 * reads. On a CPU the three are the same memory, and nothing is copied.
 *
 *   check   checks the teacher's fields, local
 *   size    the maximum size of the blocks that teachers use one after the other
 *   layout  the blocks that only this teacher uses
 *   open    once a call, before the first exchange: allocates what is not in the workspace; local
 *   begin   once a call, when weights and chunks are known: what all passes use; collective
 *   fill    once a pass: the lists, before any kernel runs
 *   upload  copies the lists of all teachers to the device
 *   run     once a pass: sums, divergences, and the gradient when the pass writes it; the host does not wait
 *   tell    once a pass, when the chunks are back on the host: adds them to the sums
 *   close   releases what open and begin took
 *
 * A term is a teacher during a call. A place is a chunk's index among the chunks of its sequence that this rank computes; a
 * tile is a number of consecutive places. Cells are doubles or, in INVARIANT mode, xd_fixed: they are added to, reduced
 * over ranks, and settled, which means converted to doubles.
 *
 * A new kind is a file with its xdi_xtoken_kind and a line in kinds.c. */

enum { XDI_XTOKEN_TILE_MAX = 65536 };

typedef struct xdi_xtoken xdi_xtoken;
typedef struct xdi_xtoken_term xdi_xtoken_term;

/* Widths of the blocks that teachers use one after the other: the maximum of each. */
typedef struct xdi_xtoken_sizes {
    int64_t ids;     /* J */
    int64_t maxima;  /* of columns, that J is chosen from */
    int64_t voters;  /* rows that choose it */
    int64_t slots;   /* of ids in J */
    int64_t settled; /* cells that become doubles ... */
    int64_t cells;   /* ... and the others behind them */
    int64_t doubles; /* that take the place of cells */
    int64_t tail;
    int64_t merged;
    int64_t means; /* GOLD: columns of the chunks of a tile */
    int64_t scratch;
    int64_t moments; /* rows whose moments are asked for */
    size_t matrix;
} xdi_xtoken_sizes;

/* The source of blocks; `fits` is false when one did not fit. */
typedef struct xdi_xtoken_arenas {
    xd_arena *lists, *host, *work;
    bool fits;
} xdi_xtoken_arenas;

/* Properties of a kind. */
enum {
    XDI_KIND_POSITIONS = 1,   /* it compares positions, not chunks */
    XDI_KIND_APART = 2,       /* its chunks are worked on without places */
    XDI_KIND_AT_ONE = 4,      /* at temperature 1 whatever the loss's */
    XDI_KIND_ALL_COMPAT = 8,  /* compat: chunks of sequences that do not count are compared too */
    XDI_KIND_EVEN_COMPAT = 16 /* compat: neither the size of sample weights nor exact_only matters */
};

/* A kind of teachers. Steps that it does not need are NULL. */
typedef struct xdi_xtoken_kind {
    int traits;
    xd_result (*check)(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size);
    int64_t (*tile)(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t tile); /* chunks at once */
    void (*size)(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s);
    void (*layout)(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a);
    xd_result (*open)(xdi_xtoken *x, xdi_xtoken_term *term);
    xd_result (*begin)(xdi_xtoken *x, xdi_xtoken_term *term);
    xd_result (*fill)(xdi_xtoken *x, xdi_xtoken_term *term);
    xd_result (*run)(xdi_xtoken *x, xdi_xtoken_term *term);
    void (*tell)(xdi_xtoken *x, const xdi_xtoken_term *term);
    void (*close)(const xdi_xtoken *x, xdi_xtoken_term *term);
} xdi_xtoken_kind;

/* Rows of the student, or of a teacher, by the places of their chunks. */
typedef struct xdi_xtoken_side {
    int64_t *begin;         /* lists: [B C + 1] where the rows of a place begin, C places a sequence */
    int64_t *rows, *places; /* lists: [rows] those whose chunk has a place, and this place in its tile */
} xdi_xtoken_side;

/* The places of the chunks of each sequence, in host memory. */
typedef struct xdi_xtoken_places {
    int64_t chunks, tile;     /* C; places of a tile, or positions */
    int64_t *order, *place;   /* [B, C] the chunk of a place, and the place of a chunk or -1 */
    int64_t *shared, *listed; /* [B] places of chunks that several ranks hold, and all */
} xdi_xtoken_places;

struct xdi_xtoken_term {
    const xd_xtoken_teacher *teacher;
    const xdi_xtoken_kind *kind;
    int64_t held;                           /* teacher positions of a sequence on this rank */
    int64_t vocabulary;                     /* V_t */
    int64_t k;                              /* columns in J */
    int64_t *student_sizes, *teacher_sizes; /* host: [B, C] */
    xdi_xtoken_places places;
    xdi_xtoken_side student_rows, teacher_rows;
    xd_xtoken_chunk *chunks; /* lists: by place [B, C]; positions: [rows] */
    int64_t chunk_count;     /* of these */
    uint8_t *mask;           /* lists: [teacher rows] 0 -> the row does not count in the choice of J */
    double denominator;      /* D */
    double counted;          /* what was counted for it, before the clamp of compat */
    double weight;           /* omega */
    double length;           /* ln V_i / ln min V, or 1 */
    bool active;             /* takes part in KD */
    bool reads;              /* comes as logits */
    int64_t cell;            /* of its sums, in the order of XDI_XTOKEN_DIVERGENCE and on */
    void *own;               /* host: private state of its kind */
};

/* Places in host.sums, which are summed over comm. Before the passes they are tokens, denominators and scores; after
 * each, these, and those of the teachers. */
enum {
    XDI_XTOKEN_CE,
    XDI_XTOKEN_TOKENS,
    XDI_XTOKEN_RIGHT,
    XDI_XTOKEN_LABEL,
    XDI_XTOKEN_NOT_FINITE,
    XDI_XTOKEN_FIRST
};

/* A teacher's, from its first. */
enum {
    XDI_XTOKEN_DIVERGENCE,
    XDI_XTOKEN_TAIL,
    XDI_XTOKEN_AGREEING,
    XDI_XTOKEN_COMPARED,
    XDI_XTOKEN_PER_TEACHER
};

/* Memory that the host reads; [rows] of the student. */
typedef struct xdi_xtoken_host {
    int64_t *argmax;
    double *log_probs;  /* of the labels */
    double *row_weight; /* 0 where not counted */
    double *ce_factor;  /* a list: of the cross entropy's gradient */
    double *sums;       /* totals: what is summed over comm */
    double *moments;    /* [moment rows, XD_XTOKEN_MOMENTS] */
    int64_t *asked;     /* a list: [moment rows] rows whose moments are asked for */
} xdi_xtoken_host;

/* Device memory that kernels work on. */
typedef struct xdi_xtoken_work {
    double *lse, *lse_one; /* [rows] log-sum-exp at the temperature and at 1 */
    int64_t *argmax;       /* [rows] */
    double *log_probs;     /* [rows] logits at the labels, then log-probabilities */
    void *labels;          /* [rows] where the device cannot read the caller's */
    uint8_t *written;      /* [rows] the gradient has this row */
    double *cells;         /* sums of a tile; `room` doubles before them is where they are settled */
    double *delta;         /* [held] */
    int64_t *ids;          /* [k] J, where it is chosen */
    uint8_t *voters;       /* [teacher rows] of the sequences whose J was chosen, the rows that chose it */
    float *maxima;         /* of columns, and the k largest of them */
    double *values;
    void *matrix;                           /* PROJECTED: what kernels keep of the projection in J */
    int32_t *slots;                         /* SAME: places of ids in J; GOLD: the student's ids' partners */
    float *u;                               /* GOLD: [tile, columns] derivative by a mean */
    double *tails, *all_tails, *other_tail; /* GOLD: of this shard, of all, of the teacher */
    int64_t *tail_ids;                      /* GOLD: both tails', and scratch for shards */
    double *merged;                         /* GOLD: [tile, 2] */
    float *scratch;                         /* for the kernels */
    double *moments;                        /* [moment rows, XD_XTOKEN_MOMENTS] */
    void *moment_labels;                    /* [moment rows] where the device cannot read the caller's */
} xdi_xtoken_work;

/* Lists that the host makes, at both addresses. */
typedef struct xdi_xtoken_lists {
    unsigned char *here, *there; /* of the host, and where the device has them */
    size_t bytes;
} xdi_xtoken_lists;

/* Memory to be released; NULL where it is the caller's. */
typedef struct xdi_xtoken_memory {
    void *host, *lists, *work;
} xdi_xtoken_memory;

/* Of the parts of the loss. */
typedef struct xdi_xtoken_weights {
    double kd, ce;
    double factor;            /* of loss and gradient: the caller's scale */
    double token_denominator; /* D of ce and of kinds that compare positions */
} xdi_xtoken_weights;

/* One call. */
struct xdi_xtoken {
    xd_ctx *ctx;
    xd_launch launch;
    const xd_kernels *kernels;
    xd_xtoken_desc d;
    xd_vocab_info vocab;
    int64_t held, columns;  /* student positions of a sequence; columns of this shard */
    xdi_xtoken_term *terms; /* [teacher_count] */
    xdi_xtoken_host host;
    xdi_xtoken_work work;
    xdi_xtoken_lists lists;
    xdi_xtoken_memory memory;
    int64_t room; /* see work.cells */
    xdi_xtoken_weights weights;
    xd_status found, found_in_rows; /* of this pass, and of the labels alone */
    int selected;
    bool on_device; /* its memory is not the host's */
    bool fixed;     /* INVARIANT: cells are xd_fixed */
    bool write;     /* this pass writes the gradient */
    bool owner;     /* this rank reports what all ranks of sequence_comm know */
};

/* ---- teacher.c: facts from a teacher's desc ---- */

/* Does the teacher have logits? Else it has log-probabilities of its tokens, or a cache. */
XD_PRIVATE bool xdi_xtoken_reads_logits(const xd_xtoken_teacher *t);
/* A log-probability that was rounded may be above 0, but not above this. */
#define XDI_XTOKEN_LOG_MOST 0.1
/* Log-probability, at temperature 1, of the token that a row of such a teacher predicts; -infinity where there is
 * none; NaN for a number that none can be. */
XD_PRIVATE double xdi_xtoken_known(const xd_xtoken_teacher *t, int64_t row);
/* V_t, the size of J, and entries of the sorted tails. */
XD_PRIVATE int64_t xdi_xtoken_vocabulary(const xd_xtoken_teacher *t);
XD_PRIVATE int64_t xdi_xtoken_columns(const xd_xtoken_desc *d, const xd_xtoken_teacher *t, int64_t size);
/* How many lists of n elements there is room for, at least 1. */
XD_PRIVATE int64_t xdi_xtoken_fits(int64_t room, int64_t n);
/* Checks that the projection, if any, is of these two vocabularies; errors name the source of the teacher's. */
XD_PRIVATE xd_result xdi_xtoken_check_projection(xd_ctx *ctx, const xd_xtoken_teacher *t, int index,
                                                 int64_t size, const char *source);

/* ---- cells.c: sums ---- */

/* -infinity is a legal term. NaN, and in INVARIANT mode a number that does not fit, makes the cell NaN. These three work on
 * cells in host memory; join sums them over comm (NULL -> no sum) and converts them to doubles. */
XD_PRIVATE void xdi_xtoken_zero(const xdi_xtoken *x, double *cells, int64_t count);
XD_PRIVATE void xdi_xtoken_add(const xdi_xtoken *x, double *cells, int64_t i, double term);
XD_PRIVATE xd_result xdi_xtoken_join(const xdi_xtoken *x, double *cells, int64_t count, xd_comm *comm);
/* The same for host.sums, which are totals in INVARIANT mode (xd_total): they are zeroed, added to, and summed over comm. */
XD_PRIVATE void xdi_xtoken_clear(const xdi_xtoken *x, int64_t count);
XD_PRIVATE void xdi_xtoken_tally(const xdi_xtoken *x, int64_t i, double term);
XD_PRIVATE xd_result xdi_xtoken_total(const xdi_xtoken *x, int64_t count, xd_comm *comm);
/* Bytes of a cell, and its size in doubles. */
XD_PRIVATE size_t xdi_xtoken_cell(const xdi_xtoken *x);
XD_PRIVATE int64_t xdi_xtoken_wide(const xdi_xtoken *x);
/* Adds up cells in any memory over one group; they remain cells. */
XD_PRIVATE xd_result xdi_xtoken_reduce(const xdi_xtoken *x, xd_comm *comm, double *cells, int64_t count);
/* Converts the first `count` cells to doubles, which are written to the memory before the cells and may overwrite them. */
XD_PRIVATE xd_result xdi_xtoken_settle(const xdi_xtoken *x, double *cells, int64_t room, int64_t count,
                                       double **out);
/* The memory needed before `count` cells to settle them in a few steps, each twice as long as the one before. */
XD_PRIVATE int64_t xdi_xtoken_settle_room(const xdi_xtoken *x, int64_t count);

/* ---- share.c: chunks, the ranks that compute them, and tiles ---- */

/* Does the chunk count, and is it compared (a chunk that does not count may still be compared)? */
XD_PRIVATE bool xdi_xtoken_counts(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);
XD_PRIVATE bool xdi_xtoken_looks(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);
/* The sample's weight; w_c; tau^2 / D; omega; and the factor of d(c) in the whole loss. */
XD_PRIVATE double xdi_xtoken_sample(const xdi_xtoken *x, int64_t b);
XD_PRIVATE double xdi_xtoken_weight(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);
XD_PRIVATE double xdi_xtoken_scale(const xdi_xtoken *x, const xdi_xtoken_term *term);
XD_PRIVATE double xdi_xtoken_omega(const xdi_xtoken *x, const xdi_xtoken_term *term);
XD_PRIVATE double xdi_xtoken_factor(const xdi_xtoken *x, const xdi_xtoken_term *term);

/* A chunk before it is compared; epsilon is added to the numbers of its positions. */
XD_PRIVATE xd_xtoken_chunk xdi_xtoken_chunk_of(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                               int64_t c, double epsilon);

/* Assigns places to the chunks that are compared: first to those with tokens on several ranks of sequence_comm, which
 * all ranks compute, then to those of this rank only; another rank's chunks have none. Their sizes are known. Collective
 * over sequence_comm. */
XD_PRIVATE xd_result xdi_xtoken_share(const xdi_xtoken *x, const xdi_xtoken_term *term);

/* Does this rank add the chunk's results to the sums? Exactly one of the ranks that compute it does. */
XD_PRIVATE bool xdi_xtoken_tells(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c);

/* Places [first, first + count) of sequence b; sums over rows are reduced over comm: NULL where they are complete. */
typedef struct xdi_xtoken_tile {
    int64_t b, first, count;
    xd_comm *comm;
} xdi_xtoken_tile;

/* The number of tiles of a sequence: of chunks of several ranks, which come first, and of all; and one of the tiles, with
 * sequence_comm for the former. */
XD_PRIVATE int64_t xdi_xtoken_shared_tiles(const xdi_xtoken_places *places, int64_t b);
XD_PRIVATE int64_t xdi_xtoken_tiles(const xdi_xtoken_places *places, int64_t b);
XD_PRIVATE xdi_xtoken_tile xdi_xtoken_tile_at(const xdi_xtoken_places *places, xd_comm *comm, int64_t b,
                                              int64_t index);
/* The number of the tile's first chunk in term->chunks and places->order. */
XD_PRIVATE int64_t xdi_xtoken_tile_start(const xdi_xtoken_places *places, const xdi_xtoken_tile *tile);

/* Factors of gradients are at most this, and weights below it: beyond, gradients could leave f32. */
#define XDI_XTOKEN_MOST 1e30
/* Is the term a number that sums can take? In INVARIANT mode it must also fit into an xd_fixed. */
XD_PRIVATE bool xdi_xtoken_sums_take(const xdi_xtoken *x, double term);
/* The limit of the divergence of a chunk or position of this weight. */
XD_PRIVATE double xdi_xtoken_limit(const xdi_xtoken *x, double weight);
/* The same for the loss of a chunk or position of this weight, and for the factor of its gradient. */
XD_PRIVATE bool xdi_xtoken_is_good(const xdi_xtoken *x, const xdi_xtoken_term *term, double weight,
                                   double value);
/* 0 in place of a factor that is too large. */
XD_PRIVATE double xdi_xtoken_bounded(double factor);
/* A chunk or position whose loss is not finite. */
XD_PRIVATE void xdi_xtoken_found(xdi_xtoken *x, int64_t row, double value);
/* The contribution of a chunk to the sums. */
XD_PRIVATE void xdi_xtoken_tell_chunk(xdi_xtoken *x, const xdi_xtoken_term *term,
                                      const xd_xtoken_chunk *chunk, int64_t b, int64_t c);
/* The same for all places in order. */
XD_PRIVATE void xdi_xtoken_tell_chunks(xdi_xtoken *x, const xdi_xtoken_term *term);

/* ---- work.c: kernel arguments ---- */

/* A block of host memory for term->own; `plan` instead while blocks are only planned. */
XD_PRIVATE void *xdi_xtoken_own(xdi_xtoken_term *term, xdi_xtoken_arenas *a, void *plan, size_t bytes);
/* Blocks, NULL while planning. */
XD_PRIVATE void *xdi_xtoken_list(xdi_xtoken_arenas *a, int64_t count, size_t size);
XD_PRIVATE int64_t xdi_xtoken_most(int64_t a, int64_t b);

/* The device's address of something in the lists. */
XD_PRIVATE void *xdi_xtoken_there(const xdi_xtoken_lists *lists, const void *list);
XD_PRIVATE xd_result xdi_xtoken_copy(const xdi_xtoken *x, void *to, const void *from, size_t bytes,
                                     xd_copy_kind kind);
/* The caller's labels in memory that kernels can read: in place, or copied to the block. */
XD_PRIVATE xd_result xdi_xtoken_bring_labels(const xdi_xtoken *x, xd_ids labels, int64_t rows, void *block,
                                             xd_ids *out);

/* Rows of a tile: the student's or a teacher's; `rows` and `places` are lists. */
XD_PRIVATE xd_xtoken_rows xdi_xtoken_student(const xdi_xtoken *x, const int64_t *rows, const int64_t *places,
                                             int64_t count);
XD_PRIVATE xd_xtoken_rows xdi_xtoken_student_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                                  const xdi_xtoken_tile *tile);
XD_PRIVATE xd_xtoken_rows xdi_xtoken_teacher_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                                  const xdi_xtoken_tile *tile);
/* The rows' gradient. */
XD_PRIVATE xd_xtoken_gradient xdi_xtoken_gradient_of(const xdi_xtoken *x, xd_xtoken_rows rows);

/* The rows that count in the choice of J, in term->mask. */
XD_PRIVATE void xdi_xtoken_fill_voters(const xdi_xtoken *x, const xdi_xtoken_term *term);
/* Chooses J of sequence b, or where compat of all, in work.ids, of ids [0, size), from rows that count and are finite:
 * work.voters. Collective over sequence_comm. */
XD_PRIVATE xd_result xdi_xtoken_choose(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t size,
                                       int64_t b);

/* Cells of deltas, which are summed over the vocabulary, become work.delta. */
XD_PRIVATE xd_result xdi_xtoken_row_deltas(const xdi_xtoken *x, const xd_xtoken_rows *rows,
                                           const xd_xtoken_chunk *chunks, double *cells);

/* Moments of the `count` rows of a teacher that host.asked names, in host.moments; the host waits for them. Labels are
 * the caller's or NULL. */
XD_PRIVATE xd_result xdi_xtoken_moments(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t columns,
                                        int64_t count, xd_ids labels, bool entropy);

/* ---- the kinds ---- */

XD_PRIVATE const xdi_xtoken_kind *xdi_projected_kind(void);
XD_PRIVATE const xdi_xtoken_kind *xdi_gold_kind(void);
XD_PRIVATE const xdi_xtoken_kind *xdi_same_kind(void);
XD_PRIVATE const xdi_xtoken_kind *xdi_xcached_kind(void);
XD_PRIVATE const xdi_xtoken_kind *xdi_likelihood_kind(void);
/* kinds.c; NULL for a number that is no kind. */
XD_PRIVATE const xdi_xtoken_kind *xdi_xtoken_kind_of(xd_xtoken_kind kind);

/* check.c: the desc with every default filled in, and the checks. */
XD_PRIVATE xd_xtoken_desc xdi_xtoken_resolve(const xd_xtoken_desc *desc);
XD_PRIVATE xd_result xdi_xtoken_validate(xd_ctx *ctx, const xd_xtoken_desc *d);

/* work.c: how many elements of an array of the batch a check reads: none while a plan is open. */
XD_PRIVATE int64_t xdi_xtoken_read(const xd_ctx *ctx, int64_t count);

/* layout.c: the call before its first kernel: everything except memory, the size of memory, and then the memory. */
XD_PRIVATE void xdi_xtoken_open(xdi_xtoken *x, xd_ctx *ctx, const xd_xtoken_desc *d);
XD_PRIVATE bool xdi_xtoken_plan(xdi_xtoken *x, size_t *work, size_t *host, size_t *lists); /* bytes */
XD_PRIVATE xd_result xdi_xtoken_provide(xdi_xtoken *x, const xd_xtoken_desc *desc);
/* Also after a failure, when kernels that were launched may still read the memory. */
XD_PRIVATE void xdi_xtoken_close(xdi_xtoken *x, xd_result result);

/* score.c: adds numerator and denominator of a teacher's score on this rank to two cells; omega of every teacher, and
 * which take part: scores [teacher_count][2], summed over comm, become means. */
XD_PRIVATE xd_result xdi_xtoken_score_sums(xdi_xtoken *x, const xdi_xtoken_term *term, xd_xtoken_score score,
                                           int64_t cell);
XD_PRIVATE void xdi_xtoken_weigh(xdi_xtoken *x, double *scores);

/* rows.c: statistics of rows: which count, and the factors of their cross entropy; the host waits for them if
 * there are labels. */
XD_PRIVATE xd_result xdi_xtoken_read_rows(xdi_xtoken *x);

#endif
