/* Runs a case on the ranks it was recorded on: tp ranks share the vocabulary, cp ranks the positions. */
#ifndef GOLDEN_SHARDED_H
#define GOLDEN_SHARDED_H

#include "golden.h"

enum { SHARDED_RANKS = 16 };

typedef struct sharded_part sharded_part;

/* The function that one rank runs; results go to whole arrays of the case, every rank writes its own elements. */
typedef xd_result (*sharded_body)(const sharded_part *part, void *user);

struct sharded_part {
    int rank; /* cp_rank * tp + tp_rank */
    xd_ctx *ctx;
    golden_loans *loans; /* of this rank */
    xd_comm *cp;
    xd_vocab *vocab;
    xd_vocab_info info;
    int64_t width;      /* columns of the whole rows */
    int64_t rows;       /* of this rank */
    const int64_t *row; /* [rows] which rows of the whole they are */
};

/* Splits [sequences, length, width] over cfg.tp * cfg.cp ranks (1 when absent) and runs body on each; the sequence in the
 * load-balanced order where it can be split that way, else in contiguous blocks. A failure fails the case. */
bool sharded_run(golden_case *c, int64_t sequences, int64_t length, int64_t width, sharded_body body,
                 void *user);

/* A rank's part of whole rows: its columns, or all `n` entries a row; freed by the caller. */
float *sharded_columns(const sharded_part *part, const float *whole);
float *sharded_f32(const sharded_part *part, const float *whole, int64_t n);
int64_t *sharded_i64(const sharded_part *part, const int64_t *whole, int64_t n);

/* Writes a rank's results to the whole: its columns of a row, or n entries per row. */
void sharded_put_columns(const sharded_part *part, const float *mine, double *whole);
void sharded_put(const sharded_part *part, const double *mine, int64_t n, double *whole);

int sharded_ranks(golden_case *c);
/* Room for one value of each rank, and the comparison of every one of them. */
double *sharded_values(golden_case *c);
void sharded_close_values(golden_case *c, const char *name, const double *values);

xd_rows sharded_rows(const sharded_part *part, float *data);
xd_rows golden_rows(float *data, int64_t rows, int64_t cols);

/* mask[b, t] = token_mask * sample_mask: of the next position (0 at the last) or of the same one. F32 [B,
 * T]. */
float *sharded_mask(golden_case *c, int64_t sequences, int64_t length, bool next);
/* in.global_valid_toks, or the sum of the mask where the file has none; with the peer's 1e-8. */
double sharded_denominator(golden_case *c, const float *mask, int64_t count);

/* The first `length - 1` entries of each sequence: what a file calls [B, T-1]. */
double *sharded_without_last(golden_case *c, const double *whole, int64_t sequences, int64_t length,
                             int64_t n);

/* NeMo-RL's top-k distillation: cases of classic (one rank) and of xtoken-parts (sharded). */
bool topk_distill_claims(const golden_case *c);
void topk_distill_run(golden_case *c);

#endif
