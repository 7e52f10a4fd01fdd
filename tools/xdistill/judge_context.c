/* judge_context.c - a text as one context, whose positions the ranks share: keys and values are gathered. */
#include "judge.h"
#include "ranks.h"

#include <math.h>
#include <string.h>

/* What a rank holds of it. */
typedef struct context_share {
    nn_model model;
    nn_batch batch;
    int begin; /* of its positions */
    int32_t *position, *all, *counts;
    int32_t *labels;
    float *workspace, *logits;
    xd_vocab *columns;
} context_share;

static int context_cut(int64_t total, int part, int parts) {
    return (int)(total * part / parts);
}

/* The last token predicts nothing. */
static xd_result context_rooms(xd_comm *world, const tokens *text, context_share *s) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int count = s->batch.positions, ranks = xd_comm_size(world), read = (int)text->count - 1;
    bool failed = false;
    s->position = (int32_t *)ranks_room(ctx, count, sizeof(int32_t), &failed);
    s->labels = (int32_t *)ranks_room(ctx, count, sizeof(int32_t), &failed);
    s->all = (int32_t *)ranks_room(ctx, read, sizeof(int32_t), &failed);
    s->counts = (int32_t *)ranks_room(ctx, ranks, sizeof(int32_t), &failed);
    s->logits = (float *)ranks_room(ctx, (int64_t)count * s->model.config.vocab, sizeof(float), &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %d positions", count);
    for (int r = 0; r < ranks; r++)
        s->counts[r] = context_cut(read, r + 1, ranks) - context_cut(read, r, ranks);
    for (int i = 0; i < read; i++) s->all[i] = i;
    for (int i = 0; i < count; i++) {
        s->position[i] = s->begin + i;
        s->labels[i] = text->ids[s->begin + i + 1];
    }
    s->batch.ids = text->ids + s->begin;
    s->batch.position = s->position;
    s->batch.cp_count = s->counts;
    s->batch.cp_position = s->all;
    s->workspace =
        (float *)ranks_room(ctx, nn_workspace_floats(&s->model, &s->batch, false), sizeof(float), &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for a context of %d tokens", read);
    return xd_vocab_create(ctx, &(xd_vocab_desc){ .size = s->model.config.vocab }, &s->columns);
}

static xd_result context_create(xd_comm *world, const nn_config *config, const tokens *text,
                                context_share *s) {
    const int ranks = xd_comm_size(world), rank = xd_comm_rank(world);
    const nn_group cp = ranks_group(world);
    memset(s, 0, sizeof *s);
    const char *problem = nn_model_init(config, NULL, &cp, &s->model);
    XD_REQUIRE(xd_comm_ctx(world), !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    s->begin = context_cut(text->count - 1, rank, ranks);
    s->batch.sequences = 1;
    s->batch.positions = context_cut(text->count - 1, rank + 1, ranks) - s->begin;
    return context_rooms(world, text, s);
}

static void context_free(xd_ctx *ctx, context_share *s) {
    void *rooms[] = { s->position, s->all, s->counts, s->labels, s->workspace, s->logits };
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) xd_release(ctx, rooms[i]);
    xd_vocab_destroy(s->columns);
    nn_model_free(&s->model);
}

static xd_result context_nats(xd_comm *world, const float *weights, context_share *s, double *nats) {
    xd_loss_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    XD_TRY((xd_result)nn_forward(&s->model, weights, &s->batch, false, s->workspace, s->logits));
    desc.student = xd_rows_of(s->logits, XD_DTYPE_F32, s->batch.positions, s->model.config.vocab);
    desc.common.labels = xd_ids_of(s->labels, XD_DTYPE_I32);
    desc.vocab = s->columns;
    desc.hard_weight = 1.0;
    desc.common.denominator_value = 1.0; /* the sum, not the mean */
    desc.common.comm = world;
    XD_TRY(xd_loss(xd_comm_ctx(world), &desc, &values));
    *nats = values.hard;
    return XD_OK;
}

xd_result judge_context(xd_comm *world, const nn_config *config, const float *weights, const tokens *text,
                        double *bits_per_byte) {
    const int64_t bytes = text->spans[text->count - 1].end - text->spans[0].end;
    context_share s;
    double nats = 0.0;
    xd_result result = xd_agree(world, context_create(world, config, text, &s));
    if (result == XD_OK) result = context_nats(world, weights, &s, &nats);
    context_free(xd_comm_ctx(world), &s);
    if (result == XD_OK && bytes <= 0)
        result = XD_FAIL(xd_comm_ctx(world), XD_ERROR_DATA, "a text of %lld tokens cannot be measured",
                         (long long)text->count);
    *bits_per_byte = nats / log(2.0) / (double)bytes;
    return result;
}
