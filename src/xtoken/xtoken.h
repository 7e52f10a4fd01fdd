#ifndef XDI_XTOKEN_XTOKEN_H
#define XDI_XTOKEN_XTOKEN_H

#include "align/chunks.h"
#include "align/projection.h"
#include "teacher/cache.h"
#include "loss/common.h"
#include "loss/vocab.h"

/* Distillation from teachers whose tokenizer differs from the student's, chunk by chunk of the text both
 * cover. For a chunk c of n_s student and n_t teacher positions, temperature tau, and J the selected teacher
 * columns:
 *
 *   PROJECTED  q = mean_t softmax(x_t / tau) M, columns J, divided by its sum       (P-KL)
 *              a = mean_t log_softmax_J(y_t / tau), divided by its sum as probabilities
 *              d(c) = sum_J e^a (a - log q)                     reverse: sum_J q (log q - a)
 *   GOLD       alpha, beta = mean_t log_softmax of student and teacher, over their whole vocabularies
 *              d(c) = sum over pairs (s, u) of the exact map of e^beta_u (beta_u - alpha_s)
 *                   + sum_i |x_i - y_i|, x and y the largest e^alpha and e^beta of ids without a partner,
 *                     sorted: min(both counts, tail) of them  (gold; with the relaxed map: H-KL)
 *   SAME       one tokenizer: KL over J of every counted position, both sides renormalised over J
 *   CACHED     J: the ids that a cache has at the chunk's teacher positions
 *              a = mean_t of their cached probabilities, 0 at positions where they are not among the k
 *              q = mean_t softmax(x_t / tau) M, columns J; without a projection M is the identity
 *              d(c) = sum_J a (ln a - ln q), plus the same term for the mass outside J, 1 - sum_J a and 1 - sum_J q
 *                     reverse: with a and q exchanged
 *   LIKELIHOOD l_s, l_t = the sums of the log-probabilities, at temperature 1, of the chunk's tokens, divided by
 *              the chunk's length
 *              d(c) = (l_s - l_t)^2, or the KL between Bernoulli distributions of probability e^l_t and e^l_s
 *
 *   KD_i = tau^2 / D_i sum_c w_c d(c), without tau^2 for LIKELIHOOD
 *   loss = kd_weight sum_i omega_i KD_i + ce_weight CE
 *
 * PROJECTED and SAME say nothing of how much probability the student has outside J: CE holds that.
 * CE is the cross entropy of the student's next tokens at temperature 1. Source of the first three forms:
 * NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/loss_functions.py; the field `compat` lists the differences. */
typedef enum xd_xtoken_kind {
    XD_XTOKEN_PROJECTED = 0,
    XD_XTOKEN_GOLD,
    XD_XTOKEN_SAME,
    XD_XTOKEN_CACHED,
    XD_XTOKEN_LIKELIHOOD
} xd_xtoken_kind;

/* How LIKELIHOOD compares a chunk's two log-likelihoods. */
typedef enum xd_likelihood_form {
    XD_LIKELIHOOD_SQUARED = 0,
    XD_LIKELIHOOD_KL /* KL(teacher || student) of "the chunk comes next" and "it does not"; or reverse */
} xd_likelihood_form;

/* How several teachers are combined into one KD. */
typedef enum xd_xtoken_mode {
    XD_XTOKEN_SUM = 0, /* omega_i: the weights, or softmax(alpha score) */
    /* Teachers of kind SAME with equal widths: one KL over the whole vocabulary from the weighted mean of
     * their logits. With any other teacher: SUM with static weights. */
    XD_XTOKEN_AVERAGED_LOGITS,
    XD_XTOKEN_SELECT /* the teacher with the lowest cross entropy on its labels, weight 1 */
} xd_xtoken_mode;

/* The score behind dynamic weights: a mean over the positions of comm, at temperature 1. */
typedef enum xd_xtoken_score {
    XD_XTOKEN_SCORE_NONE = 0,
    XD_XTOKEN_SCORE_CE,      /* minus the teacher's cross entropy */
    XD_XTOKEN_SCORE_ENTROPY, /* minus the teacher's entropy */
    XD_XTOKEN_SCORE_MAX_PROB /* the teacher's largest probability */
} xd_xtoken_score;

/* Inputs of a teacher of kind PROJECTED. */
typedef struct xd_xtoken_projected {
    /* Required; [V, V_t]. With a GPU use one from xd_projection_upload: any other is copied there in every call. */
    const xd_projection *projection;
    /* [B, k], k the smaller of the desc's columns and V_t, ascending, the same on all ranks that share the sequence: J
     * was chosen on the teacher's ranks (xd_vocab_topk_gather), and rows of logits hold only those k columns. Not with
     * scores, SELECT or compat. NULL -> rows hold all columns, and the loss chooses J. */
    const int64_t *column_ids;
} xd_xtoken_projected;

/* Inputs of a teacher of kind GOLD. */
typedef struct xd_xtoken_gold {
    const xd_exact_map *map; /* required; relaxed: H-KL */
} xd_xtoken_gold;

/* Inputs of a teacher of kind CACHED, or of LIKELIHOOD without logits: a cache instead of logits. Of the teacher's
 * `logits` only the field `rows` is read, and data is NULL. */
typedef struct xd_xtoken_cached {
    const xd_teacher_cache *cache; /* the same file on every rank; CACHED: at the desc's temperature */
    const int64_t *positions;      /* [rows of logits] positions of the cache; -1 where there is no chunk */
    const xd_projection_origin *origin; /* tokenizers in use: a cache of others is refused; NULL -> any */
    const xd_projection *projection;    /* CACHED; as in xd_xtoken_projected. NULL -> one vocabulary, M = 1 */
} xd_xtoken_cached;

/* Inputs of a teacher of kind LIKELIHOOD. A chunk is summed over the positions that predict its tokens. No position
 * predicts the first token of a sequence: when the text has no start token before it, mask that token's chunk. */
typedef struct xd_xtoken_likelihood {
    xd_likelihood_form form;
    const float *target_log_probs; /* [rows of logits] of the teacher's next tokens; NULL -> from
                                    * `cached.cache`, or else from logits and labels */
    const float *chunk_length;     /* [B, C] > 0, bytes or tokens of a chunk; NULL -> 1 */
} xd_xtoken_likelihood;

/* One teacher. Its rows hold its whole vocabulary on every rank that shares the student's; columns beyond
 * `vocabulary` are padding. Positions may lie on the ranks of sequence_comm in any way. */
typedef struct xd_xtoken_teacher {
    xd_xtoken_kind kind;
    xd_rows logits;                  /* [B * held, >= vocabulary] f32 or bf16; SAME: rows as the student's */
    int64_t vocabulary;              /* 0 -> the projection's teacher_size, else all columns */
    const int64_t *student_chunks;   /* [student rows] shifted ids, see xd_chunk_map; not for SAME */
    const int64_t *teacher_chunks;   /* [rows of logits] */
    int64_t chunks;                  /* C */
    const uint8_t *chunk_mask;       /* [B, C] 0: no such chunk; NULL -> all exist. The same on all ranks */
    const uint8_t *chunk_exact;      /* [B, C] 0: the sides differ; for exact_only */
    xd_xtoken_projected projected;   /* PROJECTED */
    xd_xtoken_gold gold;             /* GOLD */
    xd_xtoken_cached cached;         /* CACHED, and LIKELIHOOD without logits */
    xd_xtoken_likelihood likelihood; /* LIKELIHOOD */
    double denominator_value;        /* D_i of the whole step; 0 -> the chunks of this call over comm.
                                        SAME: not used, D is the desc's */
    double weight;                   /* omega_i, without a score; 0: the teacher is left out */
    xd_ids labels; /* [rows of logits] the teacher's next tokens, for scores; SAME: none -> the student's */
    const float *label_weight;    /* [rows of logits]; NULL -> 1 where the label counts */
    const float *position_weight; /* [rows of logits] for ENTROPY and MAX_PROB; NULL -> 1; 0: not scored */
} xd_xtoken_teacher;

/* Sums over comm, for one teacher: numerators and denominators of its metrics. */
typedef struct xd_xtoken_teacher_values {
    double kd;          /* KD_i times the scale, without its weight; 0 for a teacher not selected */
    double weight;      /* omega_i */
    double divergence;  /* sum of w_c times the KL part; divided by denominator: kl_common */
    double tail;        /* GOLD: sum of w_c times the tail; divided by denominator: l1_uncommon */
    double denominator; /* D_i */
    double agreeing; /* chunks (SAME: positions) whose most probable column is the same on both sides ... */
    double compared; /* ... out of so many; those whose loss is not finite do not agree */
    double counted;  /* chunks that count, in compat their number, else their sample weights; SAME: weights
                      * of positions. 0 when there are none, where compat has a denominator of 1 */
} xd_xtoken_teacher_values;

/* Results of one call; sums over comm, the same bits on every rank. */
typedef struct xd_xtoken_values {
    double loss, kd, ce; /* loss = kd_weight kd + ce_weight ce; all times the scale */
    double kd_weight;    /* the one used: the desc's, or the balance */
    double balance;      /* |ce| / |kd|, 1 when kd is 0: as the next step's kd_weight, with ce_weight 1, it
                          * makes both terms equally large. At most 1e4, without compat: a KD below 1e-4 of CE
                          * counts as that much, since what is left of it may be rounding */
    double right;        /* weight of the counted positions where the student's argmax is the label ... */
    double tokens;       /* ... and of all counted positions */
    double token_denominator;
    int selected; /* SELECT: the teacher; else -1 */
} xd_xtoken_values;

/* Inputs and options of xd_xtoken_loss. Rows are sequence by sequence: row b * held + i. With a GPU the elements of
 * logits and gradient and the workspace are device memory; everything else, lists, weights, labels, maps and
 * results, is host memory. Projections may be in either. */
typedef struct xd_xtoken_desc {
    xd_rows student;            /* required; [B * held, V/tp] f32 or bf16 */
    const xd_vocab *vocab;      /* required; a projection has its size */
    int64_t sequences;          /* B, the same on all ranks of sequence_comm; 0 -> 1 */
    xd_comm *sequence_comm;     /* ranks with other positions of the same sequences; NULL -> none */
    const float *sample_weight; /* [B]; 0 -> the sequence does not count; NULL -> 1 */
    /* As in the other losses, [rows], but in host memory (scale and denominator: host or device), and
     *   labels       none -> no CE
     *   mask         0 -> the row counts for neither CE nor SAME; chunks have chunk_mask
     *   row_weight   of CE and SAME, includes the sample's
     *   scale        multiplies loss, gradient, kd and ce, also those of each teacher, but not the sums. Not finite, or with
     *                the weights and D a factor of the gradient above 1e30: a finding of row 0, and it counts as 0
     *   denominator, denominator_value   D of CE and SAME; 0 -> counted weights, not rows, of this call
     *   comm         data and sequence axes: results are summed over it; NULL -> sequence_comm
     *   gradient     with one teacher it may be the student's memory, with several it is separate and f32; data NULL ->
     *                values only
     *   row_loss     must be NULL: chunks have losses, rows do not
     *   status       data errors are added here; NULL -> they are returned, on a GPU too */
    xd_loss_common common;
    const xd_xtoken_teacher *teachers; /* [teacher_count] required, the same kinds on every rank */
    int teacher_count;
    xd_xtoken_mode mode;
    xd_xtoken_score score;        /* SUM: NONE -> static weights */
    double alpha;                 /* of dynamic weights; 0: all are equal */
    bool normalise_by_vocabulary; /* SUM: scores and KD_i times ln V_i / ln min_j V_j */
    double temperature;           /* 0 -> 1 */
    bool reverse;                 /* KL(student || teacher) */
    bool exact_only;              /* only chunks whose sides spell the same text */
    int64_t columns;  /* PROJECTED, SAME: size of J, at least 1; all columns when there are fewer */
    int64_t tail;     /* GOLD: maximum length of the sorted lists; 0: none, exact pairs alone */
    double kd_weight; /* see xd_xtoken_values.balance */
    double ce_weight; /* at least one of the two weights is not 0 */
    bool balance;     /* kd_weight = this call's balance and ce_weight = 1, at the cost of one more pass */
    /* As NeMo-RL computes on one rank: J for the whole micro-batch from all positions, also masked ones
     * (default: for each sequence from its counted positions); a not divided by its sum, so d may be
     * negative; D is the number of chunks, at least 1 (default: the sum of their sample weights); GOLD uses sample weights
     * only as zero or not, and ignores exact_only; PROJECTED compares chunks of sequences that do not count; the balance
     * has no bound. With J for
     * the micro-batch the loss depends on how the batch is divided, in INVARIANT mode too. */
    bool compat;
    /* Chunks (SAME: rows) computed together; 0 -> as many as 2 MB hold, at most 32. On a CPU it changes no bit, and the
     * threads of the context share a tile, in PROJECTED 16 chunks each: more than two threads need a larger tile. GOLD:
     * always one. CACHED on a GPU: at most as many as 16 MB hold, of [V_t] words each. */
    int64_t tile;
    xd_xtoken_teacher_values *teacher_values; /* [teacher_count] or NULL */
} xd_xtoken_desc;

/* NeMo-RL's settings: columns and tail 8192, kd_weight 1, ce_weight 0.1, alpha 1, temperature 1, one sequence; and a
 * teacher of a kind with weight 1. All else is zero. Pure. */
XD_API xd_xtoken_desc xd_xtoken_defaults(void);
XD_API xd_xtoken_teacher xd_xtoken_teacher_defaults(xd_xtoken_kind kind);

/* Bytes of workspace that xd_xtoken_loss takes for this desc: a few words a row, a chunk and a teacher's row; for
 * PROJECTED [tile, J] times 16 bytes (INVARIANT: 33, on a GPU 48), [J] times 16, [V_t] times 8, and on a CPU [J]
 * times 64 (INVARIANT: 0), 8 bytes a column of this shard and 12 an entry of its projection; for SAME [tile, J] times
 * 16, [J] times 16, [V] times 8 and on a CPU [V/tp] f32; for GOLD [V/tp + V_t] times 8 (INVARIANT: 17, on a GPU 24),
 * [V/tp] f32 twice or [V_t], the tails, and on a GPU the map; for LIKELIHOOD 32 bytes a chunk, 16 a row and 48 a row
 * of logits, as for scores. CACHED allocates memory for the call instead: [V_t] doubles, 32 bytes per teacher
 * position, 12 bytes per entry of J, and 8 (INVARIANT: 17, on a GPU 24) per entry of a tile; on a CPU for as many tiles as
 * make 16384 entries, and 12 bytes per column of this shard; on a GPU for all chunks, and a tile's [V_t] words, at most
 * 16 MB of them or one chunk's. 0 for an invalid desc. Local. */
XD_API size_t xd_xtoken_workspace_bytes(const xd_xtoken_desc *desc);

/* Value and gradient, which is that of the global loss: sum it over data ranks. Balance, denominators,
 * weights and the choice of columns are constants in it.
 *
 * Collective over the vocabulary, sequence_comm and comm; a few exchanges per tile, of [tile, J] doubles
 * (PROJECTED, CACHED), or a few per chunk, of the sorted tails and [V/tp + V_t] (GOLD). A chunk with all its tokens
 * on one rank of the sequence is computed by that rank only and exchanged over the vocabulary only; other chunks involve
 * every rank of the sequence, so it is best to split a sequence into contiguous intervals. Besides the workspace, row
 * statistics take [T] memory for the call. Deterministic for a fixed mesh; in INVARIANT mode value and gradient have the
 * same bits for every split of vocabulary, positions and sequences.
 *
 * On a GPU all kinds are supported, also together. The work is queued on the context's stream, and the host
 * waits for it: with labels once for statistics of rows, once for each teacher that is scored and each LIKELIHOOD teacher
 * with logits, and at the end of each pass for the divergences, so that the results are on the host when the call
 * returns. The host does not wait between tiles; a larger `tile` means fewer and larger launches: PROJECTED and CACHED need
 * about ten per tile, SAME four, GOLD about twenty per chunk, LIKELIHOOD one per pass. Besides the workspace, row
 * statistics take device memory for the call, and lists take host memory; the host reads a cache once per call. Bits on a
 * GPU: in INVARIANT mode the same for every split on GPUs, and equal to those of a CPU up to rounding.
 *
 * Errors, the same on every rank, outputs untouched: ARGUMENT, also for weights of what counts that are negative, not finite or
 * not below 1e30 (INVARIANT: 2^22), SHAPE, DTYPE, MEMORY; UNSUPPORTED for scores of a teacher without logits. Data errors: a
 * label outside the vocabulary, and chunks or positions whose loss is not finite or, times its weight, too large for the sums
 * of INVARIANT mode (2^22): they count with loss and gradient zero, and status counts them, over all of comm; a log-probability
 * above 0.1 is no number. A teacher's row whose score is not finite is counted too, and is not scored; a teacher of which
 * nothing is scored is behind all others. A row of PROJECTED or SAME that holds NaN or +infinity in a column outside J has no
 * part in the choice of J either, and its chunk or position is not finite; with column_ids only the chosen columns can be seen.
 * The status' first finding, the same everywhere, is that of the first rank of comm that has one: a row of that rank, or
 * b * C + c of a chunk. Nothing counted: everything is zero and status reports it. */
XD_API xd_result xd_xtoken_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out);

#endif
