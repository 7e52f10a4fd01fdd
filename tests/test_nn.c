/* test_nn.c - the small transformer of examples/nn: gradients, every split equal to one rank, and its description. */
#define XDISTILL_IMPLEMENTATION
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#endif
#include "xdistill.h"
#include "xd_test.h"

#include <pthread.h>
#include <stdlib.h>

#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_model.c"
#include "../examples/nn/nn_layers.c"
#include "../examples/nn/nn_patch_positions.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_sequence.c"
#include "../examples/nn/nn_transformer.c"
#include "../examples/nn/nn_describe.c"
#include "../examples/nn/nn_blocks.c"

/* ---- help ---- */

/* A repeatable number in (-1, 1). */
static float noise(uint64_t stream, uint64_t index) {
    return (float)((double)(nn_mix(stream * 1000003u + index) >> 11) / 4503599627370496.0 - 1.0);
}

static float *floats(int64_t count) {
    return (float *)calloc((size_t)count + 1, sizeof(float));
}

/* ---- a tiny model ---- */

enum { SEQUENCES = 2, POSITIONS = 9, VOCAB = 23 };

static nn_config tiny_config(bool tied) {
    nn_config c;
    memset(&c, 0, sizeof c);
    c.vocab = VOCAB;
    c.hidden = 12;
    c.layers = 2;
    c.heads = 6;
    c.kv_heads = 3;
    c.head_dim = 4;
    c.ffn = 10;
    c.rope_theta = 100.0f;
    c.norm_eps = 1e-5f;
    c.tied = tied;
    return c;
}

/* One run of forward and backward. The loss is a fixed random weighting of the logits, so every logit counts.
 */
typedef struct tiny_run {
    nn_model model;
    nn_batch batch;
    float *weights, *gradient, *logits, *d_logits, *workspace;
    int code;
} tiny_run;

static int32_t tiny_id(int sequence, int position) {
    return (int32_t)(nn_mix((uint64_t)(sequence * 100 + position)) % VOCAB);
}

static float tiny_d_logit(int sequence, int position, int column) {
    return noise(7, (uint64_t)((sequence * 100 + position) * VOCAB + column));
}

/* `count` positions of every sequence, listed in `list`, on the ranks of the two groups. */
static void tiny_start(tiny_run *t, bool tied, const nn_group *tp, const nn_group *cp, int count,
                       const int32_t *list, int32_t *ids) {
    const nn_config config = tiny_config(tied);
    memset(t, 0, sizeof *t);
    CHECK(nn_model_init(&config, tp, cp, &t->model) == NULL);
    for (int s = 0; s < SEQUENCES; s++)
        for (int i = 0; i < count; i++) ids[s * count + i] = tiny_id(s, list ? list[i] : i);
    t->batch.sequences = SEQUENCES;
    t->batch.positions = count;
    t->batch.ids = ids;
    t->batch.position = list;
    t->weights = floats(t->model.float_count);
    t->gradient = floats(t->model.float_count);
    nn_model_randomize(&t->model, 11, t->weights);
    /* Ten times larger than one starts from, so that the nonlinear parts matter; norms away from one. */
    for (int p = 0; p < t->model.param_count; p++) {
        const nn_param *param = &t->model.params[p];
        for (int64_t i = 0; i < (int64_t)param->rows * param->cols; i++)
            t->weights[param->offset + i] *= param->dims == 2 ? 10.0f : 1.0f + 0.3f * noise(5, (uint64_t)i);
    }
}

static void tiny_step(tiny_run *t) {
    const int columns = t->model.share.vocab_count, rows = SEQUENCES * t->batch.positions;
    t->workspace = floats(nn_workspace_floats(&t->model, &t->batch, true));
    t->logits = floats((int64_t)rows * columns);
    t->d_logits = floats((int64_t)rows * columns);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            const int i = r % t->batch.positions;
            t->d_logits[r * columns + c] =
                tiny_d_logit(r / t->batch.positions, t->batch.position ? t->batch.position[i] : i,
                             t->model.share.vocab_begin + c);
        }
    t->code = nn_forward(&t->model, t->weights, &t->batch, true, t->workspace, t->logits);
    if (!t->code)
        t->code = nn_backward(&t->model, t->weights, &t->batch, t->workspace, t->d_logits, t->gradient);
}

static void tiny_end(tiny_run *t) {
    free(t->weights), free(t->gradient), free(t->logits), free(t->d_logits), free(t->workspace);
    nn_model_free(&t->model);
}

/* ---- gradients against finite differences ---- */

/* The loss of the tiny model with `step` times a random direction added to one weight. */
static double moved_loss(tiny_run *t, const nn_param *p, double step) {
    const int64_t count = (int64_t)p->rows * p->cols;
    const int64_t logits = (int64_t)SEQUENCES * POSITIONS * VOCAB;
    float *kept = floats(count);
    double loss = 0.0;
    memcpy(kept, t->weights + p->offset, (size_t)count * sizeof *kept);
    for (int64_t i = 0; i < count; i++)
        t->weights[p->offset + i] += (float)(step * (double)noise(9, (uint64_t)i));
    CHECK_EQ_INT(nn_forward(&t->model, t->weights, &t->batch, true, t->workspace, t->logits), 0);
    for (int64_t i = 0; i < logits; i++) loss += (double)t->logits[i] * (double)t->d_logits[i];
    memcpy(t->weights + p->offset, kept, (size_t)count * sizeof *kept);
    free(kept);
    return loss;
}

static void check_gradient(bool tied) {
    tiny_run t;
    int32_t ids[SEQUENCES * POSITIONS];
    const double step = 2e-3;
    tiny_start(&t, tied, NULL, NULL, POSITIONS, NULL, ids);
    tiny_step(&t);
    for (int i = 0; i < t.model.param_count; i++) {
        const nn_param *p = &t.model.params[i];
        double claimed = 0.0;
        for (int64_t j = 0; j < (int64_t)p->rows * p->cols; j++)
            claimed += (double)t.gradient[p->offset + j] * (double)noise(9, (uint64_t)j);
        const double seen = (moved_loss(&t, p, step) - moved_loss(&t, p, -step)) / (2.0 * step);
        if (fabs(claimed - seen) > 3e-3 * (1.0 + fabs(seen))) printf("    in %s\n", p->name);
        CHECK_NEAR(claimed, seen, 3e-3 * (1.0 + fabs(seen)));
    }
    tiny_end(&t);
}

XD_TEST(gradient_of_every_weight_agrees_with_finite_differences_tied_head) {
    check_gradient(true);
}

XD_TEST(gradient_of_every_weight_agrees_with_finite_differences_own_head) {
    check_gradient(false);
}

XD_TEST(exponentials_are_right_to_two_units_in_the_last_place) {
    const float special[] = { -INFINITY, -100.0f, 0.0f, 100.0f, INFINITY };
    const float expected[] = { 0.0f, 0.0f, 1.0f, INFINITY, INFINITY };
    float out[5], nan = NAN;
    for (int i = 0; i < 100000; i++) {
        float x = 87.0f * noise(3, (uint64_t)i), y = 0.0f;
        nn_exp(1, &x, &y);
        const double exact = exp((double)x);
        CHECK(fabs((double)y - exact) <= 2.0 * exact * 1.1920929e-7);
    }
    nn_exp(5, special, out);
    for (int i = 0; i < 5; i++) CHECK(out[i] == expected[i]);
    nn_exp(1, &nan, &nan);
    CHECK(isnan(nan));
}

XD_TEST(a_position_does_not_see_what_follows_it) {
    tiny_run t;
    int32_t ids[SEQUENCES * POSITIONS];
    float before[5 * VOCAB];
    tiny_start(&t, true, NULL, NULL, POSITIONS, NULL, ids);
    tiny_step(&t);
    memcpy(before, t.logits, sizeof before);
    ids[5] = (ids[5] + 1) % VOCAB;
    CHECK_EQ_INT(nn_forward(&t.model, t.weights, &t.batch, true, t.workspace, t.logits), 0);
    CHECK(memcmp(before, t.logits, sizeof before) == 0);
    tiny_end(&t);
}

XD_TEST(forward_alone_gives_the_same_logits_in_less_room) {
    tiny_run t;
    int32_t ids[SEQUENCES * POSITIONS];
    float again[SEQUENCES * POSITIONS * VOCAB];
    tiny_start(&t, true, NULL, NULL, POSITIONS, NULL, ids);
    tiny_step(&t);
    CHECK(nn_workspace_floats(&t.model, &t.batch, false) < nn_workspace_floats(&t.model, &t.batch, true));
    CHECK_EQ_INT(nn_forward(&t.model, t.weights, &t.batch, false, t.workspace, again), 0);
    CHECK(memcmp(again, t.logits, sizeof again) == 0);
    tiny_end(&t);
}

XD_TEST(bad_configurations_are_named) {
    nn_model model;
    nn_config c = tiny_config(true);
    c.heads = 4;
    CHECK_EQ_STR(nn_model_init(&c, NULL, NULL, &model), "heads is not a multiple of kv_heads");
    c = tiny_config(true);
    c.head_dim = 3;
    CHECK_EQ_STR(nn_model_init(&c, NULL, NULL, &model), "head_dim is not even");
    CHECK(model.params == NULL);
}

/* ---- ranks as threads, in the plainest way ---- */

enum { MOST = 4 };

/* A meeting place: everybody leaves a pointer, waits, reads the others' memory, waits again. */
typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t all_here;
    int size, here, round;
    const float *part[MOST];
} meeting;

typedef struct member {
    meeting *place;
    int rank;
} member;

static void meet(meeting *m) {
    pthread_mutex_lock(&m->lock);
    const int round = m->round;
    if (++m->here == m->size) {
        m->here = 0;
        m->round++;
        pthread_cond_broadcast(&m->all_here);
    }
    while (round == m->round) pthread_cond_wait(&m->all_here, &m->lock);
    pthread_mutex_unlock(&m->lock);
}

static int meet_and_sum(void *user, float *x, int64_t count) {
    const member *me = (const member *)user;
    meeting *m = me->place;
    float *sum = floats(count);
    m->part[me->rank] = x;
    meet(m);
    for (int r = 0; r < m->size; r++)
        for (int64_t i = 0; i < count; i++) sum[i] += m->part[r][i];
    meet(m);
    memcpy(x, sum, (size_t)count * sizeof *x);
    free(sum);
    return 0;
}

static int meet_and_gather(void *user, const float *send, float *received, const int64_t *counts) {
    const member *me = (const member *)user;
    meeting *m = me->place;
    m->part[me->rank] = send;
    meet(m);
    for (int r = 0; r < m->size; received += counts[r++])
        memcpy(received, m->part[r], (size_t)counts[r] * sizeof *received);
    meet(m);
    return 0;
}

/* ---- every split equals one rank ---- */

/* Positions of each context-parallel rank: uneven, out of order, ends together with middles. */
static const int32_t split_positions[2][POSITIONS] = { { 0, 8, 1, 7 }, { 2, 6, 5, 3, 4 } };
static const int32_t split_counts[2] = { 4, 5 };
static const int32_t whole_count[1] = { POSITIONS };

typedef struct split_rank {
    const tiny_run *whole; /* one rank's result */
    meeting *tp_place, *cp_place;
    int tp_size, tp_rank, cp_size, cp_rank;
    bool tied;
} split_rank;

static void compare_logits(const split_rank *me, const tiny_run *t) {
    const int columns = t->model.share.vocab_count;
    double most = 0.0, scale = 0.0;
    for (int r = 0; r < SEQUENCES * t->batch.positions; r++)
        for (int c = 0; c < columns; c++) {
            const int s = r / t->batch.positions, i = r % t->batch.positions;
            const int position = t->batch.position ? t->batch.position[i] : i;
            const float expected =
                me->whole->logits[(s * POSITIONS + position) * VOCAB + t->model.share.vocab_begin + c];
            most = fmax(most, fabs((double)expected - (double)t->logits[r * columns + c]));
            scale = fmax(scale, fabs((double)expected));
        }
    CHECK_NEAR(most / scale, 0.0, 2e-6);
}

static void compare_gradients(const split_rank *me, const tiny_run *t, const float *gradient) {
    for (int p = 0; p < t->model.param_count; p++) {
        const nn_param *part = &t->model.params[p], *full = &me->whole->model.params[p];
        double most = 0.0, scale = 0.0;
        for (int r = 0; r < part->rows; r++)
            for (int c = 0; c < part->cols; c++) {
                const int64_t at =
                    full->offset + (int64_t)(part->row_begin + r) * full->cols + part->col_begin + c;
                const float expected = me->whole->gradient[at];
                const float got = gradient[part->offset + (int64_t)r * part->cols + c];
                most = fmax(most, fabs((double)expected - (double)got));
                scale = fmax(scale, fabs((double)expected));
            }
        CHECK_EQ_STR(part->name, full->name);
        CHECK(most <= 5e-6 * scale);
    }
}

static void *run_split_rank(void *argument) {
    const split_rank *me = (const split_rank *)argument;
    member tp_member = { me->tp_place, me->tp_rank }, cp_member = { me->cp_place, me->cp_rank };
    const nn_group tp = { me->tp_size, me->tp_rank, &tp_member, meet_and_sum, meet_and_gather, false, NULL };
    const nn_group cp = { me->cp_size, me->cp_rank, &cp_member, meet_and_sum, meet_and_gather, false, NULL };
    int32_t ids[SEQUENCES * POSITIONS], all[POSITIONS];
    tiny_run t;
    const int32_t *counts = me->cp_size > 1 ? split_counts : whole_count;
    for (int r = 0, n = 0; r < me->cp_size && me->cp_size > 1; n += counts[r++])
        memcpy(all + n, split_positions[r], (size_t)counts[r] * sizeof *all);
    tiny_start(&t, me->tied, &tp, &cp, counts[me->cp_rank],
               me->cp_size > 1 ? split_positions[me->cp_rank] : NULL, ids);
    t.batch.cp_count = counts;
    t.batch.cp_position = all;
    tiny_step(&t);
    CHECK_EQ_INT(t.code, 0);
    compare_logits(me, &t);
    if (me->cp_size > 1) CHECK_EQ_INT(meet_and_sum(&cp_member, t.gradient, t.model.float_count), 0);
    compare_gradients(me, &t, t.gradient);
    tiny_end(&t);
    return NULL;
}

static void check_split(int tp_size, int cp_size, bool tied) {
    tiny_run whole;
    int32_t ids[SEQUENCES * POSITIONS];
    meeting tp_place[MOST], cp_place[MOST];
    split_rank ranks[MOST];
    pthread_t threads[MOST];
    tiny_start(&whole, tied, NULL, NULL, POSITIONS, NULL, ids);
    tiny_step(&whole);
    for (int i = 0; i < MOST; i++) {
        const meeting fresh = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, { NULL } };
        tp_place[i] = cp_place[i] = fresh;
        tp_place[i].size = tp_size;
        cp_place[i].size = cp_size;
    }
    for (int r = 0; r < tp_size * cp_size; r++) {
        const split_rank rank = { &whole,
                                  &tp_place[r / tp_size],
                                  &cp_place[r % tp_size],
                                  tp_size,
                                  r % tp_size,
                                  cp_size,
                                  r / tp_size,
                                  tied };
        ranks[r] = rank;
        CHECK_EQ_INT(pthread_create(&threads[r], NULL, run_split_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < tp_size * cp_size; r++) pthread_join(threads[r], NULL);
    tiny_end(&whole);
}

XD_TEST(two_tensor_parallel_ranks_with_uneven_heads_equal_one) {
    check_split(2, 1, true);
    check_split(2, 1, false);
}

XD_TEST(four_tensor_parallel_ranks_of_which_one_has_no_head_equal_one) {
    check_split(4, 1, true);
}

XD_TEST(two_context_parallel_ranks_with_uneven_position_lists_equal_one) {
    check_split(1, 2, true);
}

XD_TEST(tensor_and_context_parallel_together_equal_one) {
    check_split(2, 2, false);
}

/* ---- fixed blocks of positions ---- */

/* Nodes of the ranks of a group that meets: rank r has the pieces from 8 r / size on. */
typedef struct met_nodes {
    const meeting *place;
    int64_t count;
} met_nodes;

/* Where a rank's node [first, first + size) is; NULL if that is no whole node of anybody. */
static const float *met_node(const met_nodes *met, int first, int size) {
    for (int r = 0; r < met->place->size; r++) {
        const int end = 8 * (r + 1) / met->place->size;
        int at = 8 * r / met->place->size, number = 0;
        while (at < end) {
            int most = 8;
            while (at % most != 0 || at + most > end) most /= 2;
            if (at == first && most == size) return met->place->part[r] + number * met->count;
            at += most;
            number++;
        }
    }
    return NULL;
}

static float met_sum(const met_nodes *met, int first, int size, int64_t i) {
    const float *node = met_node(met, first, size);
    if (node) return node[i];
    return met_sum(met, first, size / 2, i) + met_sum(met, first + size / 2, size / 2, i);
}

static int meet_and_sum_pieces(void *user, const float *forest, nn_pieces pieces, int64_t count, float *x) {
    const member *me = (const member *)user;
    const met_nodes met = { me->place, count };
    CHECK_EQ_INT(pieces.total, 8);
    CHECK_EQ_INT(pieces.first, 8 * me->rank / me->place->size);
    CHECK_EQ_INT(pieces.count, 8 * (me->rank + 1) / me->place->size - pieces.first);
    me->place->part[me->rank] = forest;
    meet(me->place);
    for (int64_t i = 0; i < count; i++) x[i] = met_sum(&met, 0, 8, i);
    meet(me->place);
    return 0;
}

typedef struct block_rank {
    const tiny_run *one; /* with blocks, on one rank */
    meeting *place;
    int rank, positions;
} block_rank;

/* In order; blocks of ceil(positions / 8) of them, some at the end empty. */
static int block_cut(const block_rank *me, int rank) {
    const int cut = 8 * rank / me->place->size * ((me->positions + 7) / 8);
    return cut < me->positions ? cut : me->positions;
}

static void *run_block_rank(void *argument) {
    const block_rank *me = (const block_rank *)argument;
    member mine = { me->place, me->rank };
    const nn_group cp = {
        me->place->size, me->rank, &mine, NULL, meet_and_gather, true, meet_and_sum_pieces
    };
    const int first = block_cut(me, me->rank), count = block_cut(me, me->rank + 1) - first;
    int32_t ids[SEQUENCES * POSITIONS], all[POSITIONS], counts[MOST];
    tiny_run t;
    for (int i = 0; i < POSITIONS; i++) all[i] = i;
    for (int r = 0; r < me->place->size; r++) counts[r] = block_cut(me, r + 1) - block_cut(me, r);
    tiny_start(&t, false, NULL, &cp, count, all + first, ids);
    t.batch.cp_count = counts;
    t.batch.cp_position = all;
    tiny_step(&t);
    CHECK_EQ_INT(t.code, 0);
    for (int s = 0; s < SEQUENCES && t.code == 0; s++)
        CHECK(memcmp(t.logits + s * count * VOCAB, me->one->logits + (s * me->positions + first) * VOCAB,
                     (size_t)(count * VOCAB) * sizeof(float)) == 0);
    CHECK(memcmp(t.gradient, me->one->gradient, (size_t)t.model.float_count * sizeof(float)) == 0);
    tiny_end(&t);
    return NULL;
}

static void check_block_ranks(const tiny_run *one, int ranks, int positions) {
    meeting place = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, { NULL } };
    block_rank all[MOST];
    pthread_t threads[MOST];
    place.size = ranks;
    for (int r = 0; r < ranks; r++) {
        const block_rank rank = { one, &place, r, positions };
        all[r] = rank;
        CHECK_EQ_INT(pthread_create(&threads[r], NULL, run_block_rank, &all[r]), 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
}

static nn_group one_with_blocks(void) {
    nn_group cp;
    memset(&cp, 0, sizeof cp);
    cp.size = 1;
    cp.invariant = true;
    return cp;
}

/* Nine positions are five blocks of two or less and three empty ones; three positions leave ranks without any. */
XD_TEST(ranks_that_share_fixed_blocks_of_positions_have_the_bits_of_one) {
    const nn_group cp = one_with_blocks();
    for (int positions = 3; positions <= POSITIONS; positions += 3)
        for (int ranks = 2; ranks <= MOST; ranks++) {
            int32_t ids[SEQUENCES * POSITIONS];
            tiny_run one;
            tiny_start(&one, false, NULL, &cp, positions, NULL, ids);
            tiny_step(&one);
            CHECK_EQ_INT(one.code, 0);
            check_block_ranks(&one, ranks, positions);
            tiny_end(&one);
        }
}

/* Blocks add in another order, and compute the same. */
XD_TEST(blocks_of_positions_have_the_same_logits_and_nearly_the_same_gradients) {
    const nn_group cp = one_with_blocks();
    int32_t ids[SEQUENCES * POSITIONS];
    tiny_run whole, blocks;
    const split_rank me = { &whole, NULL, NULL, 1, 0, 1, 0, true };
    tiny_start(&whole, true, NULL, NULL, POSITIONS, NULL, ids);
    tiny_step(&whole);
    tiny_start(&blocks, true, NULL, &cp, POSITIONS, NULL, ids);
    tiny_step(&blocks);
    CHECK(memcmp(whole.logits, blocks.logits, SEQUENCES * POSITIONS * VOCAB * sizeof(float)) == 0);
    CHECK(memcmp(whole.gradient, blocks.gradient, (size_t)whole.model.float_count * sizeof(float)) != 0);
    compare_gradients(&me, &blocks, blocks.gradient);
    tiny_end(&whole);
    tiny_end(&blocks);
}

static void check_misfit(xd_ctx *ctx, const int32_t counts[2], const int32_t *list, const char *text) {
    nn_group cp = one_with_blocks();
    int32_t ids[SEQUENCES * POSITIONS];
    tiny_run t;
    cp.size = 2;
    tiny_start(&t, false, NULL, &cp, counts[0], list, ids);
    t.batch.cp_count = counts;
    t.batch.cp_position = list;
    tiny_step(&t);
    CHECK_EQ_INT(t.code, XD_ERROR_UNSUPPORTED);
    CHECK(nn_blocks_check(ctx, &t.model, &t.batch) == XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, text) != NULL);
    t.model.cp.invariant = false;
    CHECK(nn_batch_fits(&t.model, &t.batch));
    CHECK(nn_blocks_check(ctx, &t.model, &t.batch) == XD_OK);
    tiny_end(&t);
}

/* Nine positions: the first of two ranks has the first four blocks of two, eight of them. */
XD_TEST(balanced_cuts_of_positions_are_refused_with_fixed_blocks) {
    const int32_t in_order[POSITIONS] = { 0, 1, 2, 3, 4, 5, 6, 7, 8 };
    const int32_t balanced[POSITIONS] = { 0, 1, 2, 3, 5, 6, 7, 8, 4 };
    const int32_t half[2] = { 5, 4 }, blocks[2] = { 8, 1 };
    const nn_config config = tiny_config(true);
    nn_group cp = one_with_blocks();
    nn_model model;
    xd_ctx *ctx;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    check_misfit(ctx, half, in_order, "rank 0 of 2 has 5 of 9 positions, its blocks have 8");
    check_misfit(ctx, blocks, balanced, "positions of 2 ranks are not runs of blocks");
    cp.size = 9;
    CHECK_EQ_STR(nn_model_init(&config, NULL, &cp, &model),
                 "more context-parallel ranks than blocks of positions");
    xd_ctx_destroy(ctx);
}

/* ---- blocks ---- */

enum { BLOCKS = 3 };

/* A source whose blocks have buffers of their own, at other addresses each time one is opened; what is closed is NaN. */
typedef struct apart {
    const tiny_run *run;
    float *gradient; /* of the whole model, as the blocks left it */
    float *value[BLOCKS][NN_LAYER_WEIGHTS], *d[BLOCKS][NN_LAYER_WEIGHTS];
    char order[64]; /* what was opened and closed */
} apart;

static void apart_note(apart *a, int block, bool opens) {
    const size_t at = strlen(a->order);
    snprintf(a->order + at, sizeof a->order - at, "%c%c", opens ? '+' : '-',
             block == NN_ROOT ? 'r' : '0' + block);
}

/* The head that is the embedding has its memory, too. */
static bool apart_is_tied(const apart *a, int block, int weight) {
    return block == NN_ROOT && weight == NN_HEAD && a->run->model.config.tied;
}

static int apart_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    apart *a = (apart *)user;
    apart_note(a, block, true);
    for (int i = 0; i < nn_block_weights(&a->run->model, block); i++) {
        const nn_param *p = nn_block_param(&a->run->model, block, i);
        float **value = &a->value[block + 1][i], **d = &a->d[block + 1][i];
        *value = floats(nn_param_count(p));
        *d = apart_is_tied(a, block, i) ? a->d[0][NN_EMBED] : floats(nn_param_count(p));
        memcpy(*value, a->run->weights + p->offset, (size_t)nn_param_count(p) * sizeof **value);
        out->value[i] = *value;
        out->gradient[i] = pass == NN_BACKWARD ? *d : NULL;
    }
    return 0;
}

static int apart_end(void *user, int block) {
    apart *a = (apart *)user;
    apart_note(a, block, false);
    for (int i = 0; i < nn_block_weights(&a->run->model, block); i++) {
        const nn_param *p = nn_block_param(&a->run->model, block, i);
        float *value = a->value[block + 1][i], *d = a->d[block + 1][i];
        for (int64_t j = 0; j < nn_param_count(p); j++) value[j] = NAN;
        free(value);
        if (apart_is_tied(a, block, i)) continue;
        for (int64_t j = 0; j < nn_param_count(p); j++) a->gradient[p->offset + j] += d[j];
        free(d);
    }
    return 0;
}

static void check_blocks(bool tied) {
    tiny_run t;
    apart a;
    int32_t ids[SEQUENCES * POSITIONS];
    float logits[SEQUENCES * POSITIONS * VOCAB];
    tiny_start(&t, tied, NULL, NULL, POSITIONS, NULL, ids);
    tiny_step(&t);
    memset(&a, 0, sizeof a);
    a.run = &t;
    a.gradient = floats(t.model.float_count);
    const nn_source source = { &a, apart_begin, apart_end, NULL, NULL };
    CHECK_EQ_INT(nn_forward_from(&t.model, &source, &t.batch, true, t.workspace, logits), 0);
    CHECK_EQ_STR(a.order, "+r+0-0+1-1-r");
    CHECK(memcmp(logits, t.logits, sizeof logits) == 0);
    a.order[0] = 0;
    CHECK_EQ_INT(nn_backward_from(&t.model, &source, &t.batch, t.workspace, t.d_logits), 0);
    CHECK_EQ_STR(a.order, "+r+1-1+0-0-r");
    CHECK(memcmp(a.gradient, t.gradient, (size_t)t.model.float_count * sizeof(float)) == 0);
    a.order[0] = 0;
    CHECK_EQ_INT(nn_pass_by(&t.model, &source, NN_INFERENCE), 0);
    CHECK_EQ_INT(nn_pass_by(&t.model, &source, NN_BACKWARD), 0);
    CHECK_EQ_STR(a.order, "+r+0-0+1-1-r+r+1-1+0-0-r");
    free(a.gradient);
    tiny_end(&t);
}

XD_TEST(weights_a_block_at_a_time_give_the_bits_of_one_buffer) {
    check_blocks(true);
    check_blocks(false);
}

/* Refuses one block. */
static int refuse_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    const int *refused = (const int *)user;
    (void)pass;
    memset(out, 0, sizeof *out);
    return block == *refused ? 70 + block : 0;
}

XD_TEST(a_block_that_cannot_be_opened_ends_the_pass_with_its_code) {
    tiny_run t;
    int32_t ids[SEQUENCES * POSITIONS];
    int refused = 1;
    const nn_source source = { &refused, refuse_begin, nn_flat_end, NULL, NULL };
    tiny_start(&t, true, NULL, NULL, POSITIONS, NULL, ids);
    CHECK_EQ_INT(nn_pass_by(&t.model, &source, NN_BACKWARD), 71);
    refused = NN_ROOT;
    t.workspace = floats(nn_workspace_floats(&t.model, &t.batch, false));
    CHECK_EQ_INT(nn_forward_from(&t.model, &source, &t.batch, false, t.workspace, NULL), 69);
    tiny_end(&t);
}

/* ---- the description ---- */

static void check_weight(const xd_model *description, const nn_model *model, int block, int weight) {
    const nn_param *p = nn_block_param(model, block, weight);
    const xd_weight *found = xd_model_find_weight(description, p->name);
    CHECK(found != NULL);
    if (!found) return;
    const xd_weight_info info = xd_weight_describe(found);
    CHECK_EQ_STR(info.name, p->name);
    CHECK(info.block == nn_find_block(description, block));
    CHECK(info.desc->ndim == p->dims && info.desc->shape[0] == p->full_rows);
    CHECK(p->dims == 1 || info.desc->shape[1] == p->full_cols);
    CHECK_EQ_INT(info.count, nn_param_count(p));
    CHECK((info.desc->traits.decay == XD_DECAY_NEVER) == !nn_param_decays(p));
}

static void check_description(bool tied) {
    const nn_config config = tiny_config(tied);
    nn_model model;
    xd_ctx *ctx = NULL;
    nn_description description;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(nn_model_init(&config, NULL, NULL, &model) == NULL);
    CHECK(nn_describe(ctx, &model, 3, XD_DTYPE_F32, &description) == XD_OK);
    CHECK_EQ_INT(xd_model_describe(description.model).weight_count, model.param_count + tied);
    CHECK_EQ_INT(xd_model_describe(description.model).parameter_count, model.float_count);
    CHECK_EQ_INT(xd_model_describe(description.model).trained_count, model.float_count);
    for (int block = NN_ROOT; block < config.layers; block++)
        for (int i = 0; i < nn_block_weights(&model, block); i++)
            check_weight(description.model, &model, block, i);
    const xd_weight *head = xd_model_find_weight(description.model, "lm_head.weight");
    CHECK_EQ_STR(xd_weight_describe(xd_weight_describe(head).owner).name,
                 tied ? "model.embed_tokens.weight" : "lm_head.weight");
    CHECK_EQ_STR(xd_block_describe(xd_model_find_block(description.model, "model.layers.1")).desc->type,
                 NN_LAYER_TYPE);
    nn_description_free(&description);
    nn_model_free(&model);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_description_has_the_names_shapes_and_blocks_of_the_model) {
    check_description(true);
    check_description(false);
}

/* sqrt(mean(x^2)) of a weight of the description. */
static double size_of(const xd_model *description, const char *name) {
    const xd_weight_info info = xd_weight_describe(xd_model_find_weight(description, name));
    const float *x = (const float *)info.value;
    double sum = 0.0;
    for (int64_t i = 0; i < info.count; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)info.count);
}

XD_TEST(first_values_have_the_size_that_the_model_wants) {
    nn_config config = tiny_config(true);
    nn_model model;
    xd_ctx *ctx = NULL;
    nn_description description;
    config.hidden = config.ffn = 96;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(nn_model_init(&config, NULL, NULL, &model) == NULL);
    CHECK(nn_describe(ctx, &model, 3, XD_DTYPE_F32, &description) == XD_OK);
    CHECK(xd_model_allocate(description.model) == XD_OK && xd_model_init_weights(description.model) == XD_OK);
    CHECK_NEAR(size_of(description.model, "model.layers.0.mlp.up_proj.weight"), 0.02, 0.002);
    CHECK_NEAR(size_of(description.model, "model.layers.0.mlp.down_proj.weight"), 0.01, 0.001);
    CHECK_NEAR(size_of(description.model, "model.embed_tokens.weight"), 0.02, 0.002);
    CHECK_NEAR(size_of(description.model, "model.norm.weight"), 1.0, 0.0);
    nn_description_free(&description);
    nn_model_free(&model);
    xd_ctx_destroy(ctx);
}

/* A rank's first values are those of the whole model at the places that it holds. */
static void check_share(xd_ctx *ctx, const nn_model *whole, const xd_model *all, int ranks, int rank) {
    nn_group tp;
    nn_model part;
    nn_description share;
    memset(&tp, 0, sizeof tp);
    tp.size = ranks;
    tp.rank = rank;
    CHECK(nn_model_init(&whole->config, &tp, NULL, &part) == NULL);
    CHECK(nn_describe(ctx, &part, 3, XD_DTYPE_F32, &share) == XD_OK);
    CHECK(xd_model_allocate(share.model) == XD_OK && xd_model_init_weights(share.model) == XD_OK);
    CHECK_EQ_INT(xd_model_describe(share.model).parameter_count, part.float_count);
    CHECK(xdi_model_hash(share.model) == xdi_model_hash(all));
    for (int i = 0; i < part.param_count; i++) {
        const nn_param *p = &part.params[i];
        const xd_weight_info here = xd_weight_describe(xd_model_find_weight(share.model, p->name));
        const float *own = (const float *)here.value;
        const float *full = (const float *)xd_weight_describe(xd_model_find_weight(all, p->name)).value;
        CHECK_EQ_INT(here.count, nn_param_count(p));
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->cols; c++)
                CHECK(own[r * p->cols + c] == full[(p->row_begin + r) * p->full_cols + p->col_begin + c]);
    }
    nn_description_free(&share);
    nn_model_free(&part);
}

XD_TEST(shares_of_tensor_parallel_ranks_are_described_as_parts_of_the_whole) {
    const nn_config config = tiny_config(false);
    nn_model model;
    xd_ctx *ctx = NULL;
    nn_description whole;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(nn_model_init(&config, NULL, NULL, &model) == NULL);
    CHECK(nn_describe(ctx, &model, 3, XD_DTYPE_F32, &whole) == XD_OK);
    CHECK(xd_model_allocate(whole.model) == XD_OK && xd_model_init_weights(whole.model) == XD_OK);
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int rank = 0; rank < ranks; rank++) check_share(ctx, &model, whole.model, ranks, rank);
    nn_description_free(&whole);
    nn_model_free(&model);
    xd_ctx_destroy(ctx);
}

/* ---- attention over more queries than one block ---- */

enum { LONG = 2 * NN_QUERY_BLOCK + 37, LONG_HEADS = 2, LONG_DIM = 4 };

/* Query i of head h, the plain way. */
static void attend_plainly(const nn_attention *a, int h, int i, double out[LONG_DIM]) {
    const int32_t position = nn_position(a->query_pos, i);
    double sum = 0.0;
    for (int d = 0; d < LONG_DIM; d++) out[d] = 0.0;
    for (int j = 0; j < a->keys; j++) {
        double score = 0.0;
        if (nn_position(a->key_pos, j) > position) continue;
        for (int d = 0; d < LONG_DIM; d++)
            score += (double)a->q[(i * LONG_HEADS + h) * LONG_DIM + d] * (double)a->k[j * LONG_DIM + d];
        score = exp(score / sqrt((double)LONG_DIM));
        sum += score;
        for (int d = 0; d < LONG_DIM; d++) out[d] += score * (double)a->v[j * LONG_DIM + d];
    }
    for (int d = 0; d < LONG_DIM; d++) out[d] /= sum;
}

/* `shuffle` numbers the positions in another order than they lie in memory. */
static void check_long_attention(bool shuffle) {
    int32_t position[LONG];
    nn_attention a;
    float *q = floats(LONG * LONG_HEADS * LONG_DIM), *k = floats(LONG * LONG_DIM),
          *v = floats(LONG * LONG_DIM);
    float *out = floats(LONG * LONG_HEADS * LONG_DIM);
    memset(&a, 0, sizeof a);
    for (int i = 0; i < LONG; i++) position[i] = shuffle ? (i * 7 + 3) % LONG : i;
    for (int i = 0; i < LONG * LONG_HEADS * LONG_DIM; i++) q[i] = 3.0f * noise(1, (uint64_t)i);
    for (int i = 0; i < LONG * LONG_DIM; i++) k[i] = noise(2, (uint64_t)i), v[i] = noise(3, (uint64_t)i);
    a.heads = LONG_HEADS;
    a.kv_heads = 1;
    a.head_dim = LONG_DIM;
    a.queries = a.keys = LONG;
    a.query_pos = a.key_pos = shuffle ? position : NULL;
    a.q = q, a.k = k, a.v = v;
    a.probs = floats((int64_t)LONG_HEADS * LONG * LONG);
    for (int64_t i = 0; i < (int64_t)LONG_HEADS * LONG * LONG; i++)
        a.probs[i] = NAN; /* all of it is written */
    nn_attention_forward(&a, out);
    for (int h = 0; h < LONG_HEADS; h++)
        for (int i = 0; i < LONG; i++) {
            double expected[LONG_DIM], sum = 0.0;
            attend_plainly(&a, h, i, expected);
            for (int d = 0; d < LONG_DIM; d++)
                CHECK_NEAR((double)out[(i * LONG_HEADS + h) * LONG_DIM + d], expected[d], 1e-5);
            for (int j = 0; j < LONG; j++) sum += (double)a.probs[((int64_t)h * LONG + i) * LONG + j];
            CHECK_NEAR(sum, 1.0, 1e-5);
        }
    free(q), free(k), free(v), free(out), free(a.probs);
}

XD_TEST(attention_over_several_blocks_of_queries_is_what_its_formula_says) {
    check_long_attention(false);
    check_long_attention(true);
}

XD_TEST_MAIN()
