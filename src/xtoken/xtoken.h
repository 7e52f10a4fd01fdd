#ifndef XDI_XTOKEN_XTOKEN_H
#define XDI_XTOKEN_XTOKEN_H

#include "align/projection.h"
#include "teacher/cache.h"
#include "loss/common.h"
#include "loss/vocab.h"

/* Kinds of teachers: docs/xtoken.md has the formulas.
 *
 *   PROJECTED    KL over J of projected student probabilities
 *   GOLD         KL over exact pairs, L1 over sorted others
 *   SAME         KL over J, one tokenizer
 *   CACHED       KL over a cache's ids
 *   LIKELIHOOD   distance of chunks' log-likelihoods
 *
 * J: the selected teacher columns. All but SAME compare chunks. CE is the student's cross entropy at temperature 1. */
typedef enum xd_xtoken_kind {
    XD_XTOKEN_PROJECTED = 0,
    XD_XTOKEN_GOLD,
    XD_XTOKEN_SAME,
    XD_XTOKEN_CACHED,
    XD_XTOKEN_LIKELIHOOD
} xd_xtoken_kind;

/* How LIKELIHOOD compares. */
typedef enum xd_likelihood_form {
    XD_LIKELIHOOD_SQUARED = 0,
    XD_LIKELIHOOD_KL /* of Bernoulli distributions */
} xd_likelihood_form;

/* How several teachers make one KD. */
typedef enum xd_xtoken_mode {
    XD_XTOKEN_SUM = 0, /* omega_i: the weights, or softmax(alpha score) */
    /* One KL from the weighted mean of logits: SAME with equal widths. Else as SUM without scores. */
    XD_XTOKEN_AVERAGED_LOGITS,
    XD_XTOKEN_SELECT /* the teacher with the lowest cross entropy */
} xd_xtoken_mode;

/* Scores for dynamic weights: means over comm at temperature 1. */
typedef enum xd_xtoken_score {
    XD_XTOKEN_SCORE_NONE = 0,
    XD_XTOKEN_SCORE_CE,      /* minus the cross entropy of labels */
    XD_XTOKEN_SCORE_ENTROPY, /* minus the entropy */
    XD_XTOKEN_SCORE_MAX_PROB /* the largest probability */
} xd_xtoken_score;

/* Inputs of PROJECTED. */
typedef struct xd_xtoken_projected {
    /* [V, V_t]; on a GPU use xd_projection_upload */
    const xd_projection *projection;
    /* [B, k] ascending, k = min(columns, V_t), the same on all ranks of the sequence: J from xd_vocab_topk_columns,
     * the only columns in logits. Not with scores, SELECT or compat. NULL -> the loss chooses J. */
    const int64_t *column_ids;
} xd_xtoken_projected;

/* Inputs of GOLD. */
typedef struct xd_xtoken_gold {
    const xd_exact_map *map; /* relaxed: H-KL */
} xd_xtoken_gold;

/* Inputs of CACHED, or LIKELIHOOD without logits. Then logits.data is NULL, and only logits.rows is read. */
typedef struct xd_xtoken_cached {
    const xd_teacher_cache *cache;      /* the same file on every rank; CACHED: of the loss's temperature */
    const int64_t *positions;           /* [rows of logits] positions of the cache, or -1 */
    const xd_projection_origin *origin; /* must match; NULL -> any */
    const xd_projection *projection;    /* CACHED, as PROJECTED; NULL -> one vocabulary */
} xd_xtoken_cached;

/* Inputs of LIKELIHOOD. */
typedef struct xd_xtoken_likelihood {
    xd_likelihood_form form;
    /* [rows of logits] of next tokens; above 0.1 counts as NaN. NULL -> from `cached`, else from logits and labels */
    const float *target_log_probs;
    const float *chunk_length; /* [B, C] > 0; NULL -> 1 */
} xd_xtoken_likelihood;

/* Rows are whole on each rank of the vocabulary; sequence_comm may split positions. */
typedef struct xd_xtoken_teacher {
    xd_xtoken_kind kind;
    xd_rows logits;     /* [B * held, >= vocabulary] f32 or bf16; SAME: the student's rows */
    int64_t vocabulary; /* 0 -> the projection's teacher_size, else all columns */
    /* [student rows] the chunk of the next token, or -1: shifted ids of xd_chunk_ids; not SAME */
    const int64_t *student_chunks;
    const int64_t *teacher_chunks; /* [rows of logits] */
    int64_t chunks;                /* C */
    const uint8_t *chunk_mask;     /* [B, C] 0: no such chunk; NULL -> all */
    const uint8_t *chunk_exact;    /* [B, C] 0: not exact; required with exact_only */
    xd_xtoken_projected projected;
    xd_xtoken_gold gold;
    xd_xtoken_cached cached;
    xd_xtoken_likelihood likelihood;
    double denominator_value;     /* D_i of the step; 0 -> chunks of this call, SAME: the desc's D */
    double weight;                /* omega_i without a score; 0: not used */
    xd_ids labels;                /* [rows of logits] next tokens, for scores; SAME: none -> the student's */
    const float *label_weight;    /* [rows of logits]; NULL -> 1 */
    const float *position_weight; /* [rows of logits] for ENTROPY and MAX_PROB; NULL -> 1 */
} xd_xtoken_teacher;

/* Sums over comm, one teacher. */
typedef struct xd_xtoken_teacher_values {
    double kd;          /* KD_i times scale, not weight; 0 if not selected */
    double weight;      /* omega_i */
    double divergence;  /* sum of w_c KL */
    double tail;        /* GOLD: sum of w_c L1 */
    double denominator; /* D_i */
    double agreeing;    /* chunks (SAME: positions) with equal most probable columns ... */
    double compared;    /* ... of so many */
    /* Sample weights of counted chunks; compat: their number; SAME: position weights. */
    double counted;
} xd_xtoken_teacher_values;

/* Sums over comm, the same bits on every rank. */
typedef struct xd_xtoken_values {
    double loss, kd, ce; /* loss = kd_weight kd + ce_weight ce; all times scale */
    double kd_weight;    /* the desc's, or the balance */
    /* |ce| / |kd|, 1 if kd is 0; at most 1e4 without compat */
    double balance;
    double right;  /* weight of positions where the student's argmax is the label ... */
    double tokens; /* ... and of all counted positions */
    double token_denominator;
    int selected; /* SELECT: the teacher; else -1 */
} xd_xtoken_values;

/* Row b * held + i is position i of sequence b. On a GPU logits, gradient and workspace are device memory,
 * projections are in either, all else is host memory. */
typedef struct xd_xtoken_desc {
    xd_rows student;            /* [B * held, V/tp] f32 or bf16 */
    const xd_vocab *vocab;      /* of a projection's size */
    int64_t sequences;          /* B; 0 -> 1 */
    xd_comm *sequence_comm;     /* ranks with other positions; NULL -> none */
    const float *sample_weight; /* [B] 0: does not count; NULL -> 1 */
    /* As in other losses, but [rows] lists are host memory; scale and denominator device or host memory.
     *   labels       none -> no CE; LIKELIHOOD and balance need them
     *   mask         0: not in CE or SAME
     *   row_weight   of CE and SAME, with the sample's
     *   scale        of loss, gradient, kd and ce
     *   denominator, denominator_value   of CE and SAME; 0 -> counted weights
     *   comm         data and sequence axes; NULL -> sequence_comm
     *   gradient     one teacher: may be student; several: separate, f32; data NULL -> none
     *   row_loss     must be NULL
     *   status       NULL -> data errors are returned, on a GPU too */
    xd_loss_common common;
    const xd_xtoken_teacher *teachers; /* [teacher_count] the same kinds on every rank */
    int teacher_count;
    xd_xtoken_mode mode;
    xd_xtoken_score score;        /* SUM: NONE -> static weights */
    double alpha;                 /* of dynamic weights */
    bool normalise_by_vocabulary; /* SUM: scores and KD_i times ln V_i / ln min_j V_j */
    double temperature;           /* 0 -> 1 */
    bool reverse;                 /* KL(student || teacher) */
    bool exact_only;              /* only exact chunks */
    int64_t columns;              /* PROJECTED, SAME: size of J, at least 1 */
    int64_t tail;                 /* GOLD: length of sorted lists; 0: exact pairs alone */
    double kd_weight;
    double ce_weight; /* this or kd_weight is not 0 */
    bool balance;     /* kd_weight = this call's balance, ce_weight = 1; one more pass */
    /* as NeMo-RL on one rank: docs/xtoken.md */
    bool compat;
    /* chunks (SAME: rows) at once; 0 -> 2 MB of them, at most 32; GOLD: 1; more on a GPU: docs/xtoken.md */
    int64_t tile;
    xd_xtoken_teacher_values *teacher_values; /* [teacher_count] or NULL */
} xd_xtoken_desc;

/* Return NeMo-RL's settings: columns and tail 8192, kd_weight 1, ce_weight 0.1, alpha 1, temperature 1, sequences 1;
 * a teacher's weight 1. Pure. */
XD_API xd_xtoken_desc xd_xtoken_defaults(void);
XD_API xd_xtoken_teacher xd_xtoken_teacher_defaults(xd_xtoken_kind kind);

/* Computes the global loss and its gradient; sum the gradient over data ranks. Collective over the vocabulary,
 * sequence_comm and comm. Takes [T] memory besides the workspace, CACHED more. Results are on the host. Deterministic
 * for a fixed mesh; INVARIANT: the same bits for every split. If nothing counts, all is zero, and status reports it.
 * Errors: ARGUMENT (also a weight negative, not finite, or from 1e30 on, INVARIANT: from 2^22 on), SHAPE, DTYPE,
 * MEMORY, UNSUPPORTED (ENTROPY or MAX_PROB without logits). */
XD_API xd_result xd_xtoken_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out);

#endif
