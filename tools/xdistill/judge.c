/* judge.c - bits per byte. */
#include "judge.h"
#include "ranks.h"

#include <math.h>
#include <string.h>

enum { JUDGE_ROWS = 2 }; /* at once on a rank */

int64_t judge_bytes(const nn_config *config, int row) {
    nn_model model;
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = JUDGE_ROWS;
    batch.positions = row;
    if (nn_model_init(config, NULL, NULL, &model)) return 0;
    const int64_t floats =
        nn_workspace_floats(&model, &batch, false) + (int64_t)JUDGE_ROWS * row * config->vocab;
    nn_model_free(&model);
    return 4 * floats;
}

xd_result judge_create(xd_comm *world, const nn_config *config, int row, judge *out) {
    bool failed = false;
    xd_ctx *ctx = xd_comm_ctx(world);
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    out->world = world;
    out->row = row;
    const char *problem = nn_model_init(config, NULL, NULL, &out->model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    out->batch.sequences = JUDGE_ROWS;
    out->batch.positions = row;
    const int64_t held = (int64_t)JUDGE_ROWS * row;
    out->workspace = (float *)ranks_room(ctx, nn_workspace_floats(&out->model, &out->batch, false),
                                         sizeof(float), &failed);
    out->logits = (float *)ranks_room(ctx, held * config->vocab, sizeof(float), &failed);
    out->ids = (int32_t *)ranks_room(ctx, held, sizeof(int32_t), &failed);
    out->labels = (int64_t *)ranks_room(ctx, held, sizeof(int64_t), &failed);
    out->batch.ids = out->ids;
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room to measure rows of %d tokens", row);
    return xd_vocab_create(ctx, &(xd_vocab_desc){ .size = config->vocab }, &out->columns);
}

void judge_free(judge *j) {
    xd_vocab_destroy(j->columns);
    xd_release(j->ctx, j->workspace);
    xd_release(j->ctx, j->logits);
    xd_release(j->ctx, j->ids);
    xd_release(j->ctx, j->labels);
    nn_model_free(&j->model);
    memset(j, 0, sizeof *j);
}

static void judge_read(judge *j, const tokens *text, int64_t row) {
    for (int64_t i = 0; i < (int64_t)JUDGE_ROWS * j->row; i++) {
        const int64_t place = row * j->row + i;
        const bool inside = place + 1 < text->count;
        j->ids[i] = inside ? text->ids[place] : 0;
        j->labels[i] = inside ? text->ids[place + 1] : XD_IGNORE_INDEX;
    }
}

static xd_result judge_rows(judge *j, const float *weights, double *nats) {
    xd_loss_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    XD_TRY((xd_result)nn_forward(&j->model, weights, &j->batch, false, j->workspace, j->logits));
    desc.student = xd_rows_of(j->logits, XD_DTYPE_F32, (int64_t)JUDGE_ROWS * j->row, j->model.config.vocab);
    desc.common.labels.data = j->labels;
    desc.vocab = j->columns;
    desc.hard_weight = 1.0;
    desc.common.denominator_value = 1.0;
    XD_TRY(xd_loss(j->ctx, &desc, &values));
    *nats += values.hard;
    return XD_OK;
}

xd_result judge_bits(judge *j, const float *weights, const tokens *text, double *bits_per_byte) {
    const int64_t rows = (text->count + j->row - 2) / j->row;
    const int64_t bytes = text->count > 1 ? text->spans[text->count - 1].end - text->spans[0].end : 0;
    double nats = 0.0;
    xd_result result = XD_OK;
    for (int64_t row = (int64_t)JUDGE_ROWS * xd_comm_rank(j->world); row < rows && result == XD_OK;
         row += (int64_t)JUDGE_ROWS * xd_comm_size(j->world)) {
        judge_read(j, text, row);
        result = judge_rows(j, weights, &nats);
    }
    XD_TRY(xd_agree(j->world, result));
    XD_REQUIRE(j->ctx, bytes > 0, XD_ERROR_DATA, "a text of %lld tokens cannot be measured",
               (long long)text->count);
    XD_TRY(xd_all_reduce(j->world, &nats, &nats, 1, XD_DTYPE_F64, XD_SUM));
    *bits_per_byte = nats / log(2.0) / (double)bytes;
    return XD_OK;
}
