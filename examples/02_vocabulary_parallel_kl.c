/* A KL divergence of vocabulary-parallel logits: four uneven shards give the result of one rank.
 *
 * No rank ever holds a whole row of logits. In the default mode, four ranks and one rank agree to
 * rounding. INVARIANT mode sums integers, so every bit of the value and the gradient is equal.
 *
 *     cc -std=c99 -O2 examples/02_vocabulary_parallel_kl.c -o kl -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POSITIONS = 12, VOCABULARY = 1000 };

/* The result of one run. Each rank writes its columns of the gradient. */
typedef struct outcome {
    double loss;
    float gradient[POSITIONS][VOCABULARY];
} outcome;

static float logit(int64_t position, int64_t id, float phase) {
    return 5.0f * cosf(phase + 0.37f * (float)(position * id) + 0.11f * (float)id);
}

/* The first column of a rank. The four shards have very different sizes, and one is empty. */
static int64_t cut(int rank, int ranks) {
    static const int64_t uneven[] = { 0, 100, 100, 650, VOCABULARY };
    return ranks == 4 ? uneven[rank] : rank * VOCABULARY;
}

static void fill(float *student, float *teacher, int64_t begin, int64_t columns) {
    for (int64_t t = 0; t < POSITIONS; t++)
        for (int64_t c = 0; c < columns; c++) {
            student[t * columns + c] = logit(t, begin + c, 0.0f);
            teacher[t * columns + c] = logit(t, begin + c, 0.5f);
        }
}

static xd_result run_rank(xd_comm *tp, void *argument) {
    outcome *out = argument;
    xd_ctx *ctx = xd_comm_ctx(tp);
    const int rank = xd_comm_rank(tp), ranks = xd_comm_size(tp);
    const int64_t begin = cut(rank, ranks);
    const int64_t end = cut(rank + 1, ranks);
    const int64_t columns = end - begin;
    xd_vocab *vocab;
    xd_loss_values values;
    const xd_interval mine = { begin, end };
    const xd_vocab_desc split = { .size = VOCABULARY, .tp = tp, .columns = &mine };
    XD_TRY(xd_vocab_create(ctx, &split, &vocab));

    float *student = malloc((size_t)(2 * POSITIONS * columns + 1) * sizeof *student);
    if (!student) return XD_ERROR_MEMORY;
    float *teacher = student + POSITIONS * columns;
    fill(student, teacher, begin, columns);

    const xd_loss_desc desc = {
        .student = { student, XD_DTYPE_F32, POSITIONS, columns, 0 },
        .teacher = { teacher, XD_DTYPE_F32, POSITIONS, columns, 0 },
        /* The gradient overwrites the student's logits, so it takes no extra memory. */
        .common.gradient = { student, XD_DTYPE_F32, POSITIONS, columns, 0 },
        .vocab = vocab,
        .soft_weight = 1.0,
        .temperature = 2.0,
    };
    XD_TRY(xd_loss(ctx, &desc, &values));

    const size_t row_bytes = (size_t)columns * sizeof *student;
    for (int64_t t = 0; t < POSITIONS; t++)
        memcpy(&out->gradient[t][begin], student + t * columns, row_bytes);
    if (rank == 0) out->loss = values.loss;
    free(student);
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static outcome one, four;

/* True if both outcomes agree within `limit` of the largest number. 0 requires equal bits. */
static bool agree(const char *name, double limit) {
    double largest = 0.0, difference = 0.0;
    for (int t = 0; t < POSITIONS; t++)
        for (int c = 0; c < VOCABULARY; c++) {
            const double a = (double)one.gradient[t][c];
            const double b = (double)four.gradient[t][c];
            largest = fmax(largest, fabs(a));
            difference = fmax(difference, fabs(a - b));
        }
    printf("%-14s loss %.15f on one rank, %.15f on four; gradient off by %.1e of %.1e\n", name,
           one.loss, four.loss, difference, largest);
    return difference <= limit * largest && fabs(one.loss - four.loss) <= limit * one.loss;
}

static bool compare(const char *name, xd_reduction reduction, double limit) {
    const xd_ctx_desc desc = { .reduction = reduction };
    xd_error error;
    if (xd_run_threads(1, &desc, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(4, &desc, run_rank, &four, &error) != XD_OK) {
        fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
        return false;
    }
    return agree(name, limit);
}

int main(void) {
    const bool close = compare("deterministic", XD_REDUCTION_DETERMINISTIC, 1e-6);
    const bool equal = compare("invariant", XD_REDUCTION_INVARIANT, 0.0);
    return close && equal ? 0 : 1;
}
