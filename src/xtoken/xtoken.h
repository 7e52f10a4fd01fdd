#ifndef XDI_XTOKEN_XTOKEN_H
#define XDI_XTOKEN_XTOKEN_H

#include "align/chunks.h"
#include "align/projection.h"
#include "teacher/cache.h"
#include "loss/common.h"
#include "loss/vocab.h"

/* Distillation from teachers whose tokenizer differs from the student's, chunk by chunk of the text both
 * cover. For a chunk c of n_s student and n_t teacher positions, temperature tau, and J the teacher columns
 * that are kept:
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
 *              q = mean_t softmax(x_t / tau) M, columns J; without projection M is the identity
 *              d(c) = sum_J a (ln a - ln q) and the same for what is outside J, 1 - sum_J a and 1 - sum_J q
 *                     reverse: with a and q exchanged
 *   LIKELIHOOD l_s, l_t = the sums of the log-probabilities, at temperature 1, of the chunk's own tokens, over
 *              the chunk's length
 *              d(c) = (l_s - l_t)^2, or the KL between the coins of probability e^l_t and e^l_s
 *
 *   KD_i = tau^2 / D_i sum_c w_c d(c), without tau^2 for LIKELIHOOD
 *   loss = kd_weight sum_i omega_i KD_i + ce_weight CE
 *
 * CE is the cross entropy of the student's own next tokens at temperature 1. Source of the first three forms:
 * NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/loss_functions.py; where they differ from it is told at the field
 * `compat`. */
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

/* How several teachers become one KD. */
typedef enum xd_xtoken_mode {
    XD_XTOKEN_SUM = 0, /* omega_i: the weights, or softmax(alpha score) */
    /* Teachers of kind SAME with equal widths: one KL over the whole vocabulary from the weighted mean of
     * their logits. With any other teacher: SUM with static weights. */
    XD_XTOKEN_AVERAGED_LOGITS,
    XD_XTOKEN_SELECT /* the teacher with the lowest cross entropy on its own text, weight 1 */
} xd_xtoken_mode;

/* What dynamic weights are made of; means over the positions of comm, at temperature 1. */
typedef enum xd_xtoken_score {
    XD_XTOKEN_SCORE_NONE = 0,
    XD_XTOKEN_SCORE_CE,      /* minus the teacher's cross entropy */
    XD_XTOKEN_SCORE_ENTROPY, /* minus its entropy */
    XD_XTOKEN_SCORE_MAX_PROB /* its largest probability */
} xd_xtoken_score;

/* What a teacher of kind PROJECTED has. */
typedef struct xd_xtoken_projected {
    /* Required; [V, V_t]. With a GPU one from xd_projection_upload: another is copied there in every call. */
    const xd_projection *projection;
    /* [B, k], k the smaller of the desc's columns and V_t, ascending, the same on all ranks that share the sequence: J
     * was chosen where the teacher ran (xd_vocab_topk_gather), and rows of logits hold those k columns alone. Not with
     * scores, SELECT or compat. NULL -> rows hold all, and J is chosen here. */
    const int64_t *column_ids;
} xd_xtoken_projected;

/* ... GOLD ... */
typedef struct xd_xtoken_gold {
    const xd_exact_map *map; /* required; relaxed: H-KL */
} xd_xtoken_gold;

/* ... CACHED, and LIKELIHOOD without logits: what a cache knows instead. Of the teacher's logits,
 * `rows` alone is read, and data is NULL. */
typedef struct xd_xtoken_cached {
    const xd_teacher_cache *cache;      /* the same file on every rank; CACHED: at the desc's temperature */
    const int64_t *positions;           /* [rows of logits] places in it; -1 where there is no chunk */
    const xd_projection_origin *origin; /* tokenizers in use: another one's cache is refused; NULL -> any */
    const xd_projection
        *projection; /* CACHED; as xd_xtoken_projected has it. NULL -> one vocabulary, M = 1 */
} xd_xtoken_cached;

/* ... and LIKELIHOOD. A chunk is summed over the positions that predict its tokens. Nobody predicts the first token of a sequence: where no
 * start token stands before the text, mask the chunk it belongs to. */
typedef struct xd_xtoken_likelihood {
    xd_likelihood_form form;
    const float
        *target_log_probs; /* [rows of logits] of its next tokens; NULL -> from `cached.cache`, or else from
                                      logits and labels */
    const float *chunk_length; /* [B, C] > 0, bytes or tokens of a chunk; NULL -> 1 */
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
    double weight;                   /* omega_i, without a score; 0: it is left out */
    xd_ids labels;             /* [rows of logits] its next tokens, for scores; SAME: none -> the student's */
    const float *label_weight; /* [rows of logits]; NULL -> 1 where the label counts */
    const float *position_weight; /* [rows of logits] for ENTROPY and MAX_PROB; NULL -> 1 */
} xd_xtoken_teacher;

/* Sums over comm, for one teacher: numerators and denominators of its metrics. */
typedef struct xd_xtoken_teacher_values {
    double kd;          /* KD_i times the scale, without its weight; 0 for a teacher not selected */
    double weight;      /* omega_i */
    double divergence;  /* sum of w_c times the KL part; divided by denominator: kl_common */
    double tail;        /* GOLD: sum of w_c times the tail; divided by denominator: l1_uncommon */
    double denominator; /* D_i */
    double agreeing;    /* chunks (SAME: positions) whose likeliest column is the same on both sides ... */
    double compared;    /* ... of these; where the loss is not finite nothing agrees */
} xd_xtoken_teacher_values;

/* Results of one call; sums over comm, the same bits on every rank. */
typedef struct xd_xtoken_values {
    double loss, kd, ce; /* loss = kd_weight kd + ce_weight ce; all times the scale */
    double kd_weight;    /* what was used */
    double
        balance;  /* |ce| / |kd|, 1 when kd is 0: as next step's kd_weight, with ce_weight 1, both terms weigh
                       the same */
    double right; /* weight of the counted positions where the student's argmax is the label ... */
    double tokens; /* ... and of all of them */
    double token_denominator;
    int selected; /* SELECT: the teacher; else -1 */
} xd_xtoken_values;

/* What xd_xtoken_loss computes on. Rows are sequence by sequence: row b * held + i. With a GPU the elements of
 * logits and gradient and the workspace are its memory; everything else, lists, weights, labels, maps and
 * results, is the host's. Projections may be there or here. */
typedef struct xd_xtoken_desc {
    xd_rows student;            /* required; [B * held, V/tp] f32 or bf16 */
    const xd_vocab *vocab;      /* required; a projection has its size */
    int64_t sequences;          /* B, the same on all ranks of sequence_comm; 0 -> 1 */
    xd_comm *sequence_comm;     /* ranks with other positions of the same sequences; NULL -> none */
    const float *sample_weight; /* [B]; 0 -> the sequence does not count; NULL -> 1 */
    /* As in the other losses, [rows], but in memory of the host (scale and denominator: there or here), and
     *   labels       none -> no CE
     *   mask         0 -> the row counts for neither CE nor SAME; chunks have a mask of their own
     *   row_weight   of CE and SAME, includes the sample's
     *   scale        multiplies loss and gradient, and kd and ce, the teachers' too, but no sums. Not finite: a
     *                finding of row 0, and it counts as 0
     *   denominator, denominator_value   D of CE and SAME; 0 -> counted weights, not rows, of this call
     *   comm         data and sequence axes, sums run over it; NULL -> sequence_comm
     *   gradient     with one teacher it may be the student's memory, with several it is separate and f32; data NULL ->
     *                values only
     *   row_loss     must be NULL: chunks have losses, rows do not
     *   status       data errors are added here; NULL -> they are returned, on a GPU too */
    xd_loss_common common;
    const xd_xtoken_teacher *teachers; /* [teacher_count] required, the same kinds on every rank */
    int teacher_count;
    xd_xtoken_mode mode;
    xd_xtoken_score score;        /* SUM: NONE -> static weights */
    double alpha;                 /* of dynamic weights; 0: all alike */
    bool normalise_by_vocabulary; /* SUM: scores and KD_i times ln V_i / ln min_j V_j */
    double temperature;           /* 0 -> 1 */
    bool reverse;                 /* KL(student || teacher) */
    bool exact_only;              /* only chunks whose sides spell the same text */
    int64_t columns;  /* PROJECTED, SAME: size of J, at least 1; all columns when there are fewer */
    int64_t tail;     /* GOLD: longest sorted lists, at least 1 */
    double kd_weight; /* see xd_xtoken_values.balance */
    double ce_weight; /* one of the terms has a weight that is not 0 */
    bool balance;     /* kd_weight = this call's own balance and ce_weight = 1, for one more pass */
    /* As NeMo-RL computes on one rank: J for the whole micro-batch from all positions, masked ones too
     * (default: for each sequence from its counted ones); a not divided by its sum, so that d may be
     * negative; D counts chunks, at least 1 (default: adds up sample weights), GOLD ignores the size of
     * sample weights and exact_only, PROJECTED compares chunks of sequences that do not count. With J for the
     * micro-batch the loss depends on how the batch is cut, in INVARIANT mode too. */
    bool compat;
    /* Chunks (SAME: rows) at once; 0 -> as many as 2 MB hold, at most 32. On a CPU it changes no bit, and threads
     * of the context share a tile: PROJECTED has 16 chunks for each, so that more than two want more. GOLD: always one. CACHED on a GPU: no more
     * than 16 MB hold, of [V_t] words each. */
    int64_t tile;
    xd_xtoken_teacher_values *teacher_values; /* [teacher_count] or NULL */
} xd_xtoken_desc;

/* NeMo-RL's numbers: columns and tail 8192, kd_weight 1, ce_weight 0.1, alpha 1, temperature 1, one sequence; and a
 * teacher of a kind with weight 1. All else is zero. Pure. */
XD_API xd_xtoken_desc xd_xtoken_defaults(void);
XD_API xd_xtoken_teacher xd_xtoken_teacher_defaults(xd_xtoken_kind kind);

/* Bytes of workspace that xd_xtoken_loss takes for this desc: a few words a row, a chunk and a teacher's row; for
 * PROJECTED [tile, J] times 16 bytes (INVARIANT: 33, on a GPU 48), [J] times 16, [V_t] times 8, and on a CPU [J]
 * times 64 (INVARIANT: 0), 8 bytes a column of this shard and 12 an entry of its projection; for SAME [tile, J] times
 * 16, [J] times 16, [V] times 8 and on a CPU [V/tp] f32; for GOLD [V/tp + V_t] times 8 (INVARIANT: 17, on a GPU 24),
 * [V/tp] f32 twice or [V_t], the tails, and on a GPU the map; for LIKELIHOOD 32 bytes a chunk, 16 a row and 48 a row
 * of logits, as scores take them. CACHED takes memory of its own for the call: [V_t] doubles, 32 bytes a teacher
 * position, 12 bytes an entry of J, and 8 (INVARIANT: 17, on a GPU 24) those of a tile; on a CPU of as many tiles as
 * make 16384 entries, and 12 bytes a column of this shard; on a GPU of all chunks, and a tile's [V_t] words, at most
 * 16 MB of them or one chunk's. 0 for an invalid desc. Local. */
XD_API size_t xd_xtoken_workspace_bytes(const xd_xtoken_desc *desc);

/* Value and gradient, which is that of the global loss: sum it over data ranks. Balance, denominators,
 * weights and the choice of columns are constants in it.
 *
 * Collective over the vocabulary, sequence_comm and comm; a few exchanges a tile, of [tile, J] doubles
 * (PROJECTED, CACHED), or a few a chunk, of the sorted tails and [V/tp + V_t] (GOLD). A chunk with all its tokens
 * on one rank of the sequence is that rank's work alone and is exchanged over the vocabulary only; the others are
 * every rank's, so neighbouring positions are best kept together. Besides the workspace, row statistics take
 * [T] memory for the call. Deterministic for a fixed mesh; in INVARIANT mode value and gradient have the same bits
 * for every split of vocabulary, positions and sequences.
 *
 * On a GPU there are all kinds, beside each other too. The work is ordered on the context's stream, and the host
 * waits for it: with labels once for statistics of rows, once for each teacher that is scored and each of LIKELIHOOD
 * that comes as logits, and at the end of each pass for the divergences, so that the results are on the host when the call
 * returns. Tiles run without it; a larger `tile` means fewer and larger launches: PROJECTED and CACHED take some
 * ten a tile, SAME four, GOLD some twenty a chunk, LIKELIHOOD one a pass. Besides the workspace, row statistics take
 * memory of the GPU for the call, and lists memory of the host; a cache is read there once a call. The bits are
 * the GPU's own: in INVARIANT mode the same for every split there, and up to rounding those of a CPU.
 *
 * Errors, the same on every rank, outputs untouched: ARGUMENT, SHAPE, DTYPE, MEMORY; UNSUPPORTED for scores of
 * logits that a teacher does not have. Data errors: a label outside the vocabulary, and chunks or positions whose
 * loss is not finite: they count with loss and gradient zero, and status counts them, over all of comm; the first
 * finding it shows, the same everywhere, is that of the first rank of comm that has one: a row there, or b * C + c of a
 * chunk. Nothing counted at all: everything is zero and status says so. */
XD_API xd_result xd_xtoken_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out);

#endif
