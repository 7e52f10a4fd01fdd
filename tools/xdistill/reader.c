/* reader.c - to examples/nn the past is a context-parallel rank: its keys and values come out of memory instead of over a network. */
#include "reader.h"
#include "ranks.h"

#include <string.h>

/* Rank 0 has the past, rank 1 what is read now. */
static int reader_gather(void *user, const float *send, float *received, const int64_t *counts) {
    reader_cache *c = (reader_cache *)user;
    float *kept = c->values + c->calls++ * c->room * c->width;
    memcpy(kept + counts[0], send, (size_t)counts[1] * sizeof *kept);
    memcpy(received, kept, (size_t)(counts[0] + counts[1]) * sizeof *kept);
    return 0;
}

/* The passes that are the largest: many tokens at once, and the last one of a full context. */
static int64_t reader_floats(const nn_model *model, int room, int most) {
    const int32_t counts[2][2] = { { 0, most }, { room - 1, 1 } };
    int64_t floats = 0;
    for (int i = 0; i < 2; i++) {
        const nn_batch batch = { .sequences = 1, .positions = counts[i][1], .cp_count = counts[i] };
        const int64_t here = nn_workspace_floats(model, &batch, false);
        if (here > floats) floats = here;
    }
    return floats;
}

xd_result reader_create(xd_ctx *ctx, const lm *m, int room, int most, reader *out) {
    const nn_group past = { .size = 2, .rank = 1, .user = &out->cache, .all_gather_v = reader_gather };
    bool failed = false;
    memset(out, 0, sizeof *out);
    out->m = m;
    out->most = most;
    out->cache.room = room;
    out->cache.width = (int64_t)m->config.kv_heads * m->config.head_dim;
    const char *problem = nn_model_init(&m->config, NULL, &past, &out->model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    const int64_t kept = 2 * m->config.layers * room * out->cache.width;
    out->cache.values = (float *)ranks_room(ctx, kept, sizeof(float), &failed);
    out->workspace = (float *)ranks_room(ctx, reader_floats(&out->model, room, most), sizeof(float), &failed);
    out->logits = (float *)ranks_room(ctx, (int64_t)most * m->config.vocab, sizeof(float), &failed);
    out->position = (int32_t *)ranks_room(ctx, room, sizeof(int32_t), &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for a context of %d tokens", room);
    for (int i = 0; i < room; i++) out->position[i] = i;
    return XD_OK;
}

void reader_free(xd_ctx *ctx, reader *r) {
    xd_release(ctx, r->cache.values);
    xd_release(ctx, r->workspace);
    xd_release(ctx, r->logits);
    xd_release(ctx, r->position);
    nn_model_free(&r->model);
    memset(r, 0, sizeof *r);
}

void reader_restart(reader *r) {
    r->cache.past = 0;
}

const float *reader_read(reader *r, const int32_t *ids, int count) {
    const int32_t counts[2] = { r->cache.past, count };
    const nn_batch batch = { .sequences = 1,
                             .positions = count,
                             .ids = ids,
                             .position = r->position + r->cache.past,
                             .cp_count = counts,
                             .cp_position = r->position };
    r->cache.calls = 0;
    (void)nn_forward(&r->model, r->m->weights, &batch, false, r->workspace, r->logits); /* nothing can fail */
    r->cache.past += count;
    return r->logits + (int64_t)(count - 1) * r->m->config.vocab;
}
