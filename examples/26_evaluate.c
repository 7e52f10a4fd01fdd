/* Perplexity and accuracy of a model whose vocabulary and sequences are split over ranks.
 *
 * Four ranks: two share the columns of the logits, two share the positions of each sequence in the
 * order that balances causal attention. Each rank has a quarter of the logits. No rank has the
 * labels of its positions: the next token may be on another rank.
 *
 *     cc -std=c99 -O2 examples/26_evaluate.c -o evaluate -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 4, SPLIT = 2, SEQUENCES = 3, LENGTH = 16, VOCABULARY = 61, BATCHES = 4 };
enum { HELD = LENGTH / SPLIT, ROWS = SEQUENCES * HELD };

/* Token t of sequence b of a batch. */
static int32_t token(int batch, int64_t b, int64_t t) {
    return (int32_t)((5 * t + 3 * b + 7 * batch) % VOCABULARY);
}

/* Your model, for one column of one position: right about the next token in two of three cases. */
static float logit(int32_t id, int64_t column) {
    const int64_t guess = id % 3 ? (id + 5) % VOCABULARY : (id + 6) % VOCABULARY;
    return column == guess ? 4.0f : sinf((float)(id + 3 * column));
}

typedef struct evaluation {
    xd_comm *tp, *cp; /* ranks with other columns; with other positions */
    xd_vocab *vocab;
    int64_t positions[HELD];
    int32_t ids[ROWS], labels[ROWS];
    float logits[ROWS * VOCABULARY], log_probs[ROWS];
} evaluation;

/* One batch: the sum of cross entropies, and the share of right positions. */
static xd_result evaluate(evaluation *e, int batch, xd_loss_values *values, double *accuracy) {
    xd_ctx *ctx = xd_comm_ctx(e->tp);
    const xd_vocab_info own = xd_vocab_describe(e->vocab);
    const int64_t columns = own.end - own.begin;
    for (int64_t i = 0; i < ROWS; i++) {
        e->ids[i] = token(batch, i / HELD, e->positions[i % HELD]);
        for (int64_t c = 0; c < columns; c++)
            e->logits[i * columns + c] = logit(e->ids[i], own.begin + c);
    }

    const xd_shift_desc shift = {
        .sequences = SEQUENCES,
        .length = LENGTH,
        .positions = e->positions,
        .held = HELD,
        .ids = xd_ids_of(e->ids, XD_DTYPE_I32),
        .comm = e->cp,
    };
    XD_TRY(xd_next_token_labels(ctx, &shift, e->labels));

    const xd_loss_desc loss = {
        .student = xd_rows_of(e->logits, XD_DTYPE_F32, ROWS, columns),
        .vocab = e->vocab,
        .hard_weight = 1.0,
        .common.labels = xd_ids_of(e->labels, XD_DTYPE_I32),
        .common.comm = e->cp,
    };
    XD_TRY(xd_loss(ctx, &loss, values));

    /* The log-probability of each label too, for a histogram or a filter. */
    const xd_log_probs_desc measure = {
        .vocab = e->vocab,
        .logits = loss.student,
        .ids = loss.common.labels,
        .at_ids = e->log_probs,
        .counted = { .count = ROWS, .labels = loss.common.labels },
        .comm = e->cp,
        .accuracy = accuracy,
    };
    return xd_log_probs(ctx, &measure);
}

static xd_result run_rank(xd_comm *world, void *result) {
    static evaluation all[RANKS];
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    evaluation *e = &all[rank];
    double cross_entropy = 0.0, right = 0.0, *out = result;
    XD_TRY(xd_comm_split(world, rank / SPLIT, rank, &e->tp));
    XD_TRY(xd_comm_split(world, rank % SPLIT, rank, &e->cp));
    XD_TRY(xd_load_balanced_positions(ctx, LENGTH, xd_comm_rank(e->cp), SPLIT, e->positions));
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY, .tp = e->tp }, &e->vocab));

    for (int batch = 0; batch < BATCHES; batch++) { /* batches have equally many labels */
        xd_loss_values values;
        double accuracy;
        XD_TRY(evaluate(e, batch, &values, &accuracy));
        cross_entropy += values.hard / BATCHES;
        right += accuracy / BATCHES;
    }
    if (rank == 0) {
        printf("perplexity %.3f, accuracy %.3f\n", exp(cross_entropy), right);
        *out = right;
    }
    xd_vocab_destroy(e->vocab);
    xd_comm_destroy(e->cp);
    xd_comm_destroy(e->tp);
    return XD_OK;
}

int main(void) {
    xd_error error;
    double right = 0.0;
    if (xd_run_threads(RANKS, NULL, run_rank, &right, &error) == XD_OK)
        return right > 0.5 && right < 0.8 ? 0 : 1;
    fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
    return 1;
}
