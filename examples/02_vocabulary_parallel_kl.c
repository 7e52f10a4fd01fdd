/* A KL divergence whose vocabulary is split unevenly over four ranks, against the same on one rank.
 *
 *     cc -std=c99 -O2 examples/02_vocabulary_parallel_kl.c -o kl -lm -lpthread
 *
 * No rank ever holds a whole row of logits. In the default mode four ranks and one rank agree to rounding; in INVARIANT
 * mode, which sums integers, they agree in every bit of the value and of the gradient. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POSITIONS = 12, VOCABULARY = 1000 };

/* What all ranks compute together. Each writes its columns. */
typedef struct outcome {
    double loss;
    float gradient[POSITIONS][VOCABULARY];
} outcome;

static float logit(int64_t position, int64_t id, float phase) {
    return 5.0f * cosf(phase + 0.37f * (float)(position * id) + 0.11f * (float)id);
}

/* Columns are split at 0, 100, 100, 650, 1000: shards of very different sizes, one of them empty. */
static int64_t cut(int rank, int ranks) {
    static const int64_t uneven[] = { 0, 100, 100, 650, VOCABULARY };
    return ranks == 4 ? uneven[rank] : rank * VOCABULARY;
}

static xd_result run_rank(xd_comm *tp, void *argument) {
    outcome *out = argument;
    xd_ctx *ctx = xd_comm_ctx(tp);
    const int64_t begin = cut(xd_comm_rank(tp), xd_comm_size(tp)), end = cut(xd_comm_rank(tp) + 1, xd_comm_size(tp));
    const int64_t columns = end - begin;
    xd_vocab *vocab;
    xd_loss_values values;
    XD_TRY(xd_vocab_create(ctx, tp, (xd_interval){ begin, end }, VOCABULARY, &vocab));

    float *student = malloc((size_t)(2 * POSITIONS * columns + 1) * sizeof *student);
    if (!student) return XD_ERROR_MEMORY;
    float *teacher = student + POSITIONS * columns;
    for (int64_t t = 0; t < POSITIONS; t++)
        for (int64_t c = 0; c < columns; c++) {
            student[t * columns + c] = logit(t, begin + c, 0.0f);
            teacher[t * columns + c] = logit(t, begin + c, 0.5f);
        }
    XD_TRY(xd_loss(ctx, &(xd_loss_desc){
        .student = { student, XD_DTYPE_F32, POSITIONS, columns, 0 },
        .teacher = { teacher, XD_DTYPE_F32, POSITIONS, columns, 0 },
        .common.gradient = { student, XD_DTYPE_F32, POSITIONS, columns, 0 }, /* over the student's logits: no extra memory */
        .vocab = vocab, .soft_weight = 1.0, .temperature = 2.0,
    }, &values));

    for (int64_t t = 0; t < POSITIONS; t++)
        memcpy(&out->gradient[t][begin], student + t * columns, (size_t)columns * sizeof *student);
    if (xd_comm_rank(tp) == 0) out->loss = values.loss;
    free(student);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static outcome one, four;

/* True when four ranks gave what one gave, within `limit` of the largest number; 0 means every bit. */
static bool compare(const char *name, xd_reduction reduction, double limit) {
    const xd_ctx_desc desc = { .reduction = reduction };
    xd_error error;
    if (xd_run_threads(1, &desc, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(4, &desc, run_rank, &four, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return false;
    }
    double largest = 0.0, difference = 0.0;
    for (int t = 0; t < POSITIONS; t++)
        for (int c = 0; c < VOCABULARY; c++) {
            largest = fmax(largest, fabs((double)one.gradient[t][c]));
            difference = fmax(difference, fabs((double)one.gradient[t][c] - (double)four.gradient[t][c]));
        }
    printf("%-14s loss %.15f on one rank, %.15f on four; gradient off by %.1e of %.1e\n", name, one.loss, four.loss,
           difference, largest);
    return difference <= limit * largest && fabs(one.loss - four.loss) <= limit * one.loss;
}

int main(void) {
    const bool close = compare("deterministic", XD_REDUCTION_DETERMINISTIC, 1e-6);
    const bool equal = compare("invariant", XD_REDUCTION_INVARIANT, 0.0);
    return close && equal ? 0 : 1;
}
