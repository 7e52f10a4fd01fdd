/* judge.h - what a model is worth on a text: bits per byte. */
#ifndef JUDGE_H
#define JUDGE_H

#include "../../examples/nn/nn_transformer.h"
#include "text.h"

/* One rank's room for reading rows of a text without a gradient. */
typedef struct judge {
    xd_ctx *ctx;
    xd_comm *world;
    nn_model model;
    nn_batch batch;
    xd_vocab *columns;
    float *workspace, *logits;
    int32_t *ids;
    int64_t *labels;
    int row; /* tokens that a row predicts */
} judge;

/* Local. `row`: tokens read at once, each of which is predicted from those before it in its row. Errors: MEMORY. */
xd_result judge_create(xd_comm *world, const nn_config *config, int row, judge *out);
void judge_free(judge *j);

/* Memory of a judge, in bytes. */
int64_t judge_bytes(const nn_config *config, int row);

/* Every token of the text but the first, from what stands before it in its row. Collective; the same on all ranks. */
xd_result judge_bits(judge *j, const float *weights, const tokens *text, double *bits_per_byte);

/* The same of a text that is one context of more tokens than there are ranks, each of which has a part of its positions. */
xd_result judge_context(xd_comm *world, const nn_config *config, const float *weights, const tokens *text,
                        double *bits_per_byte);

#endif /* JUDGE_H */
