/* train.c - what the ranks do, and how two runs are compared. */
#include "train.h"
#include "../helpers/vocab_calls.h"
#include "../helpers/wrap_calls.h"

#include "../../examples/nn/nn_blocks.h"
#include "../../examples/nn/nn_patch_positions.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WEIGHTS = 32, MOST_POSITIONS = TRAIN_MOST_POSITIONS, VOCAB = TRAIN_VOCAB };

/* Sizes that divide by nothing, and more ranks than some of them have pieces. For a pipeline more layers, which are smaller. */
nn_config train_model(bool pipeline) {
    nn_config c;
    memset(&c, 0, sizeof c);
    c.vocab = VOCAB;
    c.hidden = pipeline ? 10 : 22;
    c.layers = pipeline ? 5 : 2;
    c.heads = 6;
    c.kv_heads = 3;
    c.head_dim = 4;
    c.ffn = pipeline ? 13 : 27;
    c.rope_theta = 100.0f;
    c.norm_eps = 1e-5f;
    return c;
}

/* ---- memory ---- */

enum { TRAIN_BLOCKS = 1024 };

/* Sizes of the blocks that a thread has taken since it last forgot them. */
typedef struct train_blocks {
    int64_t bytes;
    size_t size[TRAIN_BLOCKS];
    int count;
} train_blocks;

typedef union train_piece {
    size_t bytes;
    long double align[2];
} train_piece;

static pthread_once_t train_once = PTHREAD_ONCE_INIT;
static pthread_key_t train_key;

static void train_make_key(void) {
    (void)pthread_key_create(&train_key, NULL);
}

static train_blocks *train_mine(void) {
    pthread_once(&train_once, train_make_key);
    return (train_blocks *)pthread_getspecific(train_key);
}

static void *train_take(void *user, size_t bytes) {
    train_piece *piece = (train_piece *)malloc(sizeof *piece + bytes);
    train_blocks *mine = train_mine();
    (void)user;
    if (!piece) return NULL;
    piece->bytes = bytes;
    if (mine) mine->bytes += (int64_t)bytes;
    if (mine && mine->count < TRAIN_BLOCKS) mine->size[mine->count++] = bytes;
    return piece + 1;
}

static void train_give(void *user, void *memory) {
    train_piece *piece = (train_piece *)memory - 1;
    train_blocks *mine = train_mine();
    (void)user;
    if (mine) mine->bytes -= (int64_t)piece->bytes;
    free(piece);
}

xd_allocator train_allocator(void) {
    const xd_allocator allocator = { train_take, train_give, NULL };
    return allocator;
}

/* ---- a rank ---- */

typedef struct train_state {
    const train_config *config;
    train_result *out;
    xd_ctx *ctx;
    xd_comm *world, *dp, *tp;
    xd_comm *cp, *rows,
        *model_ranks; /* NULL without cp: that group; dp and cp; dp and tp, which have the model once */
    int cp_rank;
    xd_comm *data, *replicas; /* of the wrapper; NULL -> dp */
    train_blocks memory;
    nn_model model, whole; /* this rank's share; all of it */
    nn_description description;
    nn_blocks blocks;
    nn_source source;
    xd_queue *gathers, *reductions;
    xd_parallel *parallel;
    xd_inputs *inputs;
    int64_t own, most;
    xd_vocab *vocab;
    int64_t room; /* rows of a leaf; those behind its positions here count nothing */
    train_sequence sequence;
    int32_t ids[TRAIN_LEAVES * MOST_POSITIONS];
    int64_t labels[TRAIN_LEAVES * MOST_POSITIONS];
    float *workspace, *logits, *teacher; /* [own] leaves */
    int64_t workspace_floats;
    xd_param params[WEIGHTS];
    xd_tensor_part parts[WEIGHTS];
    int64_t count;
    xd_optimizer *optimizer;
    xd_ema *average;
} train_state;

static xd_result train_groups(train_state *s) {
    const train_config *c = s->config;
    const int cp = c->cp ? c->cp : 1, across = c->tp * cp;
    const int me = xd_comm_rank(s->world), rank = me / across, column = me % c->tp;
    s->cp_rank = me / c->tp % cp;
    XD_TRY(xd_comm_split(s->world, me % across, me, &s->dp));
    XD_TRY(xd_comm_split(s->world, me / c->tp, me, &s->tp));
    if (c->cp) {
        XD_TRY(xd_comm_split(s->world, rank * c->tp + column, me, &s->cp));
        XD_TRY(xd_comm_split(s->world, column, me, &s->rows));
        XD_TRY(xd_comm_split(s->world, s->cp_rank, me, &s->model_ranks));
    }
    if (c->wrap != TRAIN_HSDP) return XD_OK;
    const int each = c->dp / c->groups;
    XD_TRY(xd_comm_split(s->dp, rank / each, rank, &s->data));
    return xd_comm_split(s->dp, rank % each, rank, &s->replicas);
}

int train_sum(void *user, float *x, int64_t count) {
    return (int)xd_all_reduce((xd_comm *)user, x, x, count, XD_DTYPE_F32, XD_SUM);
}

static int train_gather(void *user, const float *send, float *received, const int64_t *counts) {
    return (int)xd_all_gather((xd_comm *)user, send, received, counts, XD_DTYPE_F32);
}

nn_group train_share_group(const train_config *c, int rank, xd_comm *comm) {
    nn_group cp;
    memset(&cp, 0, sizeof cp);
    cp.size = c->cp;
    cp.rank = rank;
    cp.user = comm;
    cp.all_gather_v = train_gather;
    cp.invariant = c->cp > 0;
    cp.sum_pieces = nn_blocks_sum_pieces;
    return cp;
}

static xd_result train_describe(train_state *s) {
    const nn_config config = train_model(false);
    const nn_group cp = train_share_group(s->config, s->cp_rank, s->cp);
    nn_group tp;
    memset(&tp, 0, sizeof tp);
    tp.size = s->config->tp;
    tp.rank = xd_comm_rank(s->world) % s->config->tp;
    tp.user = s->tp;
    tp.all_reduce_sum = train_sum;
    tp.invariant = s->config->reduction == XD_REDUCTION_INVARIANT;
    tp.sum_pieces = nn_blocks_sum_pieces;
    const char *problem = nn_model_init(&config, &tp, &cp, &s->model);
    if (!problem) problem = nn_model_init(&config, NULL, NULL, &s->whole);
    if (problem) return XD_FAIL(s->ctx, XD_ERROR_ARGUMENT, "model: %s", problem);
    s->model.recompute = s->config->recompute;
    const xd_dtype dtype = s->config->bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    XD_TRY(nn_describe(s->ctx, &s->model, 5, dtype, &s->description));
    const nn_share *share = &s->model.share;
    const xd_interval columns = { share->vocab_begin, share->vocab_begin + share->vocab_count };
    return vocab_of(s->ctx, s->config->tp > 1 ? s->tp : NULL, columns, VOCAB, &s->vocab);
}

static xd_result train_make_queues(train_state *s, xd_comm *data) {
    const xd_queue_desc d = { .form = XD_QUEUE_WORKER, .capacity = WEIGHTS };
    if (!s->config->workers) return XD_OK;
    XD_TRY(xd_queue_create(data, &d, &s->gathers));
    return xd_queue_create(data, &d, &s->reductions);
}

static xd_result train_wrap_model(train_state *s) {
    static const char *const units[] = { NN_LAYER_TYPE };
    const train_config *c = s->config;
    xd_comm *data = s->data ? s->data : s->dp;
    XD_TRY(train_make_queues(s, data));
    const xd_ddp_desc ddp = { .micro_batches = TRAIN_LEAVES,
                              .sharded_optimizer = c->wrap == TRAIN_SHARDED,
                              .view_dtype = XD_DTYPE_F32,
                              .gathers = s->gathers,
                              .reductions = s->reductions,
                              .bucket_size = 1000 };
    const xd_fsdp_desc fsdp = { .micro_batches = TRAIN_LEAVES,
                                .unit_types = units,
                                .unit_type_count = 1,
                                .replicas = s->replicas,
                                .accumulate_whole = c->whole,
                                .view_dtype = XD_DTYPE_F32,
                                .gathers = s->gathers,
                                .reductions = s->reductions,
                                .prefetch = c->workers };
    s->memory.count = 0;
    XD_TRY(c->wrap <= TRAIN_SHARDED ? wrap_over_ddp(s->description.model, data, &ddp, &s->parallel)
                                    : wrap_over_fsdp(s->description.model, data, &fsdp, &s->parallel));
    const xd_parallel_bytes bytes = xd_parallel_memory(s->parallel);
    const size_t planned = bytes.values + bytes.gradients + bytes.gathered + bytes.whole_gradients;
    bool found = false;
    for (int i = 0; i < s->memory.count; i++) found = found || s->memory.size[i] == planned;
    XD_REQUIRE(s->ctx, found, XD_ERROR_STATE, "the wrapper plans %llu bytes, and took no block of that size",
               (unsigned long long)planned);
    const xd_parallel_micro_batch_count leaves = xd_parallel_micro_batches(s->parallel);
    s->own = leaves.own;
    s->most = c->wrap <= TRAIN_SHARDED ? leaves.own : leaves.max;
    XD_TRY(xd_parallel_params(s->parallel, WEIGHTS, s->params, &s->count));
    return xd_parallel_parts(s->parallel, WEIGHTS, s->parts, &s->count);
}

static xd_result train_make_state(train_state *s) {
    xd_optimizer_desc adamw = xd_adamw_defaults(s->params, s->count);
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    xd_planned planned[2];
    adamw.learning_rate = 0.01;
    ema.decay = 0.9;
    ema.init_from_current = true;
    ema.params = s->params;
    ema.param_count = s->count;
    XD_TRY(xd_plan_begin(s->ctx, NULL));
    XD_TRY(xd_optimizer_create(s->ctx, &adamw, &s->optimizer));
    XD_TRY(xd_plan_end(s->ctx, &planned[0]));
    XD_TRY(xd_plan_begin(s->ctx, NULL));
    XD_TRY(xd_ema_create(s->ctx, &ema, &s->average));
    XD_TRY(xd_plan_end(s->ctx, &planned[1]));
    const int64_t before = s->memory.bytes;
    XD_TRY(xd_optimizer_create(s->ctx, &adamw, &s->optimizer));
    const int64_t optimizer = s->memory.bytes - before;
    XD_TRY(xd_ema_create(s->ctx, &ema, &s->average));
    const int64_t average = s->memory.bytes - before - optimizer;
    XD_REQUIRE(s->ctx,
               optimizer == (int64_t)planned[0].memory.host && average == (int64_t)planned[1].memory.host,
               XD_ERROR_STATE, "optimizer and average take %lld and %lld bytes, planned are %lld and %lld",
               (long long)optimizer, (long long)average, (long long)planned[0].memory.host,
               (long long)planned[1].memory.host);
    return XD_OK;
}

/* Room for the inputs of all forwards that a step has in flight, planned before the model is wrapped. */
static xd_result train_make_inputs(train_state *s) {
    const nn_config config = train_model(false);
    const xd_inputs_desc d = { (size_t)(s->room * config.hidden) * sizeof(float), (int)s->own };
    xd_planned planned;
    if (!s->config->recompute || s->own == 0) return XD_OK;
    XD_TRY(xd_plan_begin(s->ctx, NULL));
    XD_TRY(xd_inputs_create(s->description.model, &d, &s->inputs));
    XD_TRY(xd_plan_end(s->ctx, &planned));
    const int64_t before = s->memory.bytes;
    XD_TRY(xd_inputs_create(s->description.model, &d, &s->inputs));
    XD_REQUIRE(s->ctx, s->memory.bytes - before == (int64_t)planned.memory.host, XD_ERROR_STATE,
               "inputs take %lld bytes, planned are %lld", (long long)(s->memory.bytes - before),
               (long long)planned.memory.host);
    if (xd_comm_rank(s->world) == 0) s->out->inputs = (int64_t)planned.memory.host;
    return XD_OK;
}

static float *train_floats(int64_t count) {
    return (float *)calloc((size_t)count + 1, sizeof(float));
}

static int train_length(const train_config *c, int64_t leaf) {
    if (!c->cp) return TRAIN_POSITIONS;
    return c->lengths ? 3 + (int)(leaf * 5 % 11) : 11;
}

nn_batch train_sequence_of(const train_config *c, int rank, int64_t leaf, train_sequence *sequence) {
    const nn_positions at = nn_positions_share(c->cp ? c->cp : 1, rank, train_length(c, leaf));
    const xd_interval here = nn_positions_tokens(&at, rank);
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    sequence->first = (int)here.begin;
    batch.sequences = 1;
    batch.positions = (int)(here.end - here.begin);
    if (!c->cp) return batch;
    for (int i = 0; i < MOST_POSITIONS; i++) sequence->positions[i] = i;
    for (int r = 0; r < c->cp; r++) {
        const xd_interval tokens = nn_positions_tokens(&at, r);
        sequence->cp_count[r] = (int32_t)(tokens.end - tokens.begin);
    }
    batch.position = sequence->positions + here.begin;
    batch.cp_count = sequence->cp_count;
    batch.cp_position = sequence->positions;
    return batch;
}

static nn_batch train_batch(train_state *s, int64_t k) {
    nn_batch batch = train_sequence_of(s->config, s->cp_rank, xd_parallel_micro_batch(s->parallel, k), &s->sequence);
    batch.ids = s->ids + k * s->room;
    return batch;
}

static void train_make_buffers(train_state *s) {
    const int64_t logits = s->own * s->room * s->model.share.vocab_count;
    for (int64_t k = 0; k < s->own; k++) {
        const nn_batch batch = train_batch(s, k);
        const int64_t floats = nn_workspace_floats(&s->model, &batch, true);
        s->workspace_floats = floats > s->workspace_floats ? floats : s->workspace_floats;
    }
    s->workspace = train_floats(s->own * s->workspace_floats);
    s->logits = train_floats(logits);
    s->teacher = train_floats(logits);
    if (xd_comm_rank(s->world) == 0) s->out->leaves = s->own;
    if (xd_comm_rank(s->world) == 0)
        s->out->workspace = s->own * s->workspace_floats * (int64_t)sizeof(float);
    s->blocks.model = s->description.model;
    s->source = nn_blocks_source(&s->blocks);
}

/* ---- a step ---- */

static uint64_t train_mix(int64_t a, int64_t b, int64_t c) {
    uint64_t x = (uint64_t)(a * 7919 + b * 104729 + c * 31 + 1) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return x >> 32;
}

/* What a micro-batch holds depends on its number alone. */
void train_read_leaf(int step, int64_t leaf, const train_data *out) {
    for (int i = 0; i < out->positions; i++) {
        const int64_t token = step * 100 + leaf, position = out->first + i;
        out->ids[i] = (int32_t)(train_mix(token, position, 0) % VOCAB);
        out->labels[i] = (out->ids[i] * 3 + 1) % VOCAB;
        if ((leaf + position) % 7 == 0) out->labels[i] = XD_IGNORE_INDEX;
        for (int v = 0; v < out->columns && out->teacher; v++)
            out->teacher[i * out->columns + v] =
                (float)(train_mix(token, position, v + out->column + 1) % 4096) / 1024.0f;
    }
}

static void train_read(train_state *s, int step) {
    const nn_share *share = &s->model.share;
    for (int64_t i = 0; i < s->own * s->room; i++) s->labels[i] = XD_IGNORE_INDEX;
    for (int64_t k = 0; k < s->own; k++) {
        const int64_t at = k * s->room, leaf = xd_parallel_micro_batch(s->parallel, k);
        const nn_batch batch = train_batch(s, k);
        const train_data data = {
            s->ids + at,        s->labels + at,     s->teacher + at * share->vocab_count,
            share->vocab_begin, share->vocab_count, s->sequence.first,
            batch.positions
        };
        train_read_leaf(step, leaf, &data);
    }
}

static xd_result train_loss(train_state *s, int step) {
    const int width = s->model.share.vocab_count;
    xd_loss_values values;
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    d.student = xd_rows_of(s->logits, XD_DTYPE_F32, s->own * s->room, width);
    d.teacher = xd_rows_of(s->teacher, XD_DTYPE_F32, s->own * s->room, width);
    d.vocab = s->vocab;
    d.common.labels = xd_ids_of(s->labels, XD_DTYPE_I64);
    d.common.gradient = d.student;
    d.common.comm = s->rows ? s->rows : s->dp;
    d.common.denominator_value = TRAIN_LEAVES * TRAIN_POSITIONS;
    d.hard_weight = 1.0;
    d.soft_weight = 0.5;
    XD_TRY(xd_loss(s->ctx, &d, &values));
    if (xd_comm_rank(s->world) == 0) s->out->losses[step] = values.loss;
    return XD_OK;
}

static xd_result train_passes(train_state *s, int step) {
    const int64_t logits = s->room * s->model.share.vocab_count;
    int code = 0;
    for (int64_t k = 0; k < s->most && !code; k++) {
        const nn_batch batch = train_batch(s, k);
        s->blocks.micro_batch = k;
        code = k < s->own ? nn_forward_from(&s->model, &s->source, &batch, true,
                                            s->workspace + k * s->workspace_floats, s->logits + k * logits)
                          : nn_pass_by(&s->model, &s->source, NN_FORWARD);
    }
    if (code) return (xd_result)code;
    XD_TRY(train_loss(s, step));
    for (int64_t k = 0; k < s->most && !code; k++) {
        const nn_batch batch = train_batch(s, k);
        s->blocks.micro_batch = k;
        code = k < s->own ? nn_backward_from(&s->model, &s->source, &batch,
                                             s->workspace + k * s->workspace_floats, s->logits + k * logits)
                          : nn_pass_by(&s->model, &s->source, NN_BACKWARD);
    }
    return (xd_result)code;
}

static xd_result train_step(train_state *s, int step) {
    xd_gradient_norm_desc clip;
    xd_gradient_norm norm;
    xd_optimizer_step_desc d;
    memset(&clip, 0, sizeof clip);
    memset(&d, 0, sizeof d);
    train_read(s, step);
    XD_TRY(train_passes(s, step));
    XD_TRY(xd_parallel_reduce(s->parallel));
    clip.params = s->params;
    clip.param_count = s->count;
    clip.max_norm = 0.05;
    XD_TRY(xd_gradient_norm_compute(s->ctx, s->model_ranks ? s->model_ranks : s->world, &clip, &norm));
    if (xd_comm_rank(s->world) == 0) s->out->norms[step] = norm.norm;
    d.gradient_scale = &norm.coefficient;
    d.averages = &s->average;
    d.average_count = 1;
    XD_TRY(xd_optimizer_step(s->optimizer, &d, NULL));
    return xd_parallel_publish(s->parallel);
}

/* ---- what comes out ---- */

/* Where element `at` of a rank's share of a weight is among all weights. */
static int64_t train_place(const nn_param *share, const nn_param *whole, int64_t at) {
    const int64_t row = at / share->cols + share->row_begin, column = at % share->cols + share->col_begin;
    return whole->offset + row * whole->cols + column;
}

static void train_keep(const train_state *s) {
    train_result *out = s->out;
    for (int64_t i = 0; i < s->count && s->cp_rank == 0; i++) {
        const xd_tensor_part *part = &s->parts[i];
        const nn_param *share = &s->model.params[nn_param_find(&s->model, part->name)];
        const nn_param *whole = &s->whole.params[nn_param_find(&s->whole, part->name)];
        const xd_optimizer_state state = xd_optimizer_state_at(s->optimizer, i);
        const float *average = (const float *)xd_ema_view(s->average, i).shadow.value;
        for (int64_t at = part->range.begin; at < part->range.end && !part->replica; at++) {
            const int64_t to = train_place(share, whole, at), here = at - part->range.begin;
            out->values[to] = state.master ? state.master[here] : ((const float *)part->data)[here];
            out->first[to] = state.exp_avg[here];
            out->second[to] = state.exp_avg_sq[here];
            out->average[to] = average[here];
        }
    }
}

static xd_result train_run(train_state *s) {
    s->room = s->config->cp ? MOST_POSITIONS : TRAIN_POSITIONS;
    XD_TRY(train_groups(s));
    XD_TRY(xd_agree(s->world, train_describe(s)));
    XD_TRY(xd_agree(s->world, train_wrap_model(s)));
    train_make_buffers(s);
    XD_TRY(xd_agree(s->world, train_make_inputs(s)));
    XD_TRY(xd_agree(s->world, train_make_state(s)));
    for (int step = 0; step < s->config->steps; step++) XD_TRY(train_step(s, step));
    if (xd_comm_rank(s->world) == 0) s->out->traffic = xd_comm_traffic(s->data ? s->data : s->dp);
    train_keep(s);
    return XD_OK;
}

static void train_close(train_state *s) {
    xd_inputs_destroy(s->inputs);
    xd_ema_destroy(s->average);
    xd_optimizer_destroy(s->optimizer);
    xd_parallel_destroy(s->parallel);
    xd_queue_destroy(s->gathers);
    xd_queue_destroy(s->reductions);
    if (s->description.ctx) nn_description_free(&s->description);
    xd_vocab_destroy(s->vocab);
    nn_model_free(&s->model);
    nn_model_free(&s->whole);
    if (s->replicas) xd_comm_destroy(s->replicas);
    if (s->data) xd_comm_destroy(s->data);
    if (s->model_ranks) xd_comm_destroy(s->model_ranks);
    if (s->rows) xd_comm_destroy(s->rows);
    if (s->cp) xd_comm_destroy(s->cp);
    if (s->tp) xd_comm_destroy(s->tp);
    if (s->dp) xd_comm_destroy(s->dp);
    free(s->workspace);
    free(s->logits);
    free(s->teacher);
}

xd_result train_rank(xd_comm *world, void *job) {
    train_state *s = (train_state *)calloc(1, sizeof *s);
    s->config = ((const train_job *)job)->config;
    s->out = ((const train_job *)job)->out;
    s->world = world;
    s->ctx = xd_comm_ctx(world);
    (void)train_mine();
    (void)pthread_setspecific(train_key, &s->memory);
    const xd_result result = train_run(s);
    train_close(s);
    (void)pthread_setspecific(train_key, NULL);
    free(s);
    return result;
}

int train_ranks(const train_config *c) {
    return c->dp * c->tp * (c->pp ? c->pp : 1) * (c->cp ? c->cp : 1);
}

bool train_on_threads(const train_config *config, train_result *out, char message[512]) {
    const train_job job = { config, out };
    xd_ctx_desc d;
    xd_error error;
    memset(&d, 0, sizeof d);
    memset(out, 0, sizeof *out);
    d.reduction = config->reduction;
    d.timeout_seconds = 60;
    d.allocator = train_allocator();
    const int ranks = train_ranks(config);
    if (xd_run_threads(ranks, &d, config->pp ? train_stages_rank : train_rank, (void *)&job, &error) == XD_OK)
        return true;
    snprintf(message, 512, "%.500s", error.message);
    return false;
}

/* ---- comparison ---- */

/* False with words about the first element that differs. */
static bool train_same(const char *what, const float *a, const float *b, char message[512]) {
    const nn_config config = train_model(false);
    nn_model m;
    if (memcmp(a, b, TRAIN_ROOM * sizeof *a) == 0) return true;
    if (nn_model_init(&config, NULL, NULL, &m)) return false;
    for (int p = 0; p < m.param_count; p++)
        for (int64_t i = 0; i < nn_param_count(&m.params[p]); i++) {
            const int64_t at = m.params[p].offset + i;
            if (memcmp(&a[at], &b[at], sizeof *a) == 0) continue;
            snprintf(message, 512, "%s of %s [%lld]: %.9g, one rank has %.9g", what, m.params[p].name,
                     (long long)i, (double)b[at], (double)a[at]);
            nn_model_free(&m);
            return false;
        }
    snprintf(message, 512, "%s beyond the model", what);
    nn_model_free(&m);
    return false;
}

static bool train_same_curve(const char *what, const double *a, const double *b, char message[512]) {
    for (int i = 0; i < TRAIN_STEPS; i++) {
        if (memcmp(&a[i], &b[i], sizeof *a) == 0) continue;
        snprintf(message, 512, "%s of step %d: %.17g, one rank has %.17g", what, i, b[i], a[i]);
        return false;
    }
    return true;
}

bool train_equal(const train_result *a, const train_result *b, char message[512]) {
    return train_same_curve("loss", a->losses, b->losses, message) &&
           train_same_curve("gradient norm", a->norms, b->norms, message) &&
           train_same("value", a->values, b->values, message) &&
           train_same("first moment", a->first, b->first, message) &&
           train_same("second moment", a->second, b->second, message) &&
           train_same("average", a->average, b->average, message);
}

double train_apart(const train_result *a, const train_result *b, double *losses) {
    double most = 0.0;
    *losses = 0.0;
    for (int i = 0; i < TRAIN_ROOM; i++) most = fmax(most, fabs((double)a->values[i] - (double)b->values[i]));
    for (int i = 0; i < TRAIN_STEPS; i++) *losses = fmax(*losses, fabs(a->losses[i] - b->losses[i]));
    return most;
}

void train_name(const train_config *c, char name[TRAIN_NAME]) {
    static const char *const wraps[] = { "DDP", "DDP + sharded optimizer", "FSDP", "HSDP" };
    const int ranks = c->groups > 0 ? c->groups : 1;
    snprintf(name, TRAIN_NAME, "%s%-23s dp=%d tp=%d groups=%d %s %s", c->tp > 1 ? "TP x " : "",
             wraps[c->wrap], c->dp, c->tp, ranks,
             c->whole || c->wrap <= TRAIN_SHARDED ? "one-send" : "each-sent", c->bf16 ? "bf16" : "f32");
    if (c->pp) {
        char stages[48];
        snprintf(stages, sizeof stages, " pp=%d x %d%s%s", c->pp, c->virtual_stages ? c->virtual_stages : 1,
                 c->uneven ? " uneven" : "", c->copies ? " copies" : "");
        strcat(name, stages);
    }
    if (c->cp) {
        char sequences[24];
        snprintf(sequences, sizeof sequences, " cp=%d%s", c->cp, c->lengths ? " lengths" : "");
        strcat(name, sequences);
    }
    if (c->workers) strcat(name, " workers");
    if (c->recompute) strcat(name, " recompute");
}
