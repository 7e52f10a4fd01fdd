/* Each allocation of each call in turn fails on one of 1 to 4 ranks: that rank gets MEMORY, the others fail with it, nobody
 * hangs, nothing leaks, and the same call works the next time. Under the address sanitizer nothing is used after it was
 * freed. tests/test_memory.c has a training step, and meshes with what moves over them, tests/test_allocations_local.c local
 * calls; tests/build/check_allocations.py holds them against docs/api.txt. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_private.h"
#if defined(XD_TEST_LAYERS)
#    include "model/describe_internal.h"
#    include "dmd/fdistill.h"
#endif
#include "xd_test.h"
#include "xd_test_topology.h"
#include "ids_scene.h"
#include "route_scene.h"
#include "sizes_xtoken.h"
#include "xtoken_rows.h"
#include "averages.h"
#include "softmax_calls.h"
#include "wrap_calls.h"

#include <sys/stat.h>

#include <sched.h>
#include <stdlib.h>

enum { RANKS_MAX = 4, MOST = 200 /* allocations of a call */ };

static __thread int64_t fails_in; /* allocations of this thread until one fails; 0 -> never */

static void *heap_allocate(void *user, size_t bytes) {
    if (fails_in > 0 && --fails_in == 0) return NULL;
    __atomic_add_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    __atomic_sub_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* What a rank's calls use. */
typedef struct part {
    xd_comm *world;
    xd_vocab *vocab;
    xd_layout *split;
    ids_memory memory;
    xsizes x;
    char directory[64]; /* of rank 0 */
    int64_t saves;      /* checkpoints so far */
} part;

typedef struct call {
    const char *names; /* of the public functions that it calls */
    xd_result (*run)(part *p);
    bool quiet; /* allocates nothing on two ranks */
} call;

#define IDS_CALL(number)                                                                    \
    static xd_result run_ids_##number(part *p) {                                            \
        return ids_call(xd_comm_ctx(p->world), p->vocab, &p->memory, XD_DTYPE_I64, number); \
    }
IDS_CALL(0)
IDS_CALL(1)
IDS_CALL(2)
IDS_CALL(3)
IDS_CALL(4)
IDS_CALL(5)
IDS_CALL(6)
IDS_CALL(7)
IDS_CALL(8)
IDS_CALL(9)
IDS_CALL(10)

static xd_result run_row_stats(part *p) {
    double lse[IDS_ROWS];
    int64_t argmax[IDS_ROWS];
    return softmax_row_stats(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), 1.0, lse,
                             argmax);
}

static xd_result run_log_softmax(part *p) {
    return softmax_all(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), 1.0,
                       ids_matrix(p->memory.out.gradient[0]));
}

static xd_result run_log_softmax_backward(part *p) {
    return softmax_all_backward(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), 1.0,
                                ids_matrix(p->memory.teacher), ids_matrix(p->memory.out.gradient[0]));
}

static xd_result split(part *p, int color) {
    xd_comm *group = NULL;
    XD_TRY(xd_comm_split(p->world, color, 0, &group));
    const xd_result result = xd_barrier(group);
    xd_comm_destroy(group);
    return result;
}

static xd_result run_split_alone(part *p) {
    return split(p, xd_comm_rank(p->world));
}

static xd_result run_split_pairs(part *p) {
    return split(p, xd_comm_rank(p->world) / 2);
}

static xd_result run_fork(part *p) {
    xd_comm *twin = NULL;
    XD_TRY(xd_comm_fork(p->world, xd_comm_ctx(p->world), &twin));
    const xd_result result = xd_barrier(twin);
    xd_comm_destroy(twin);
    return result;
}

static xd_result run_queue(part *p) {
    const int size = xd_comm_size(p->world), rank = xd_comm_rank(p->world);
    const xd_queue_desc d = { XD_QUEUE_WORKER, 2 };
    xd_collective c;
    xd_queue *queue = NULL;
    xd_ticket ticket;
    float data[2] = { 1, 1 };
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = c.recv = data;
    c.count = 2;
    c.dtype = XD_DTYPE_F32;
    c.op = XD_MAX;
    XD_TRY(xd_queue_create(p->world, &d, &queue));
    xd_result result = xd_queue_start(queue, &c, &ticket);
    if (result == XD_OK) result = xd_queue_start(queue, &c, NULL);
    if (result == XD_OK) result = xd_queue_wait(queue, ticket);
    if (result == XD_OK) result = xd_queue_wait_all(queue);
    xd_queue_destroy(queue);
    c.kind = rank % 2 ? XD_COLLECTIVE_RECV : XD_COLLECTIVE_SEND;
    c.root = rank ^ 1;
    return result == XD_OK ? xd_exchange(p->world, &c, c.root < size) : result;
}

static xd_result run_vocab(part *p) {
    xd_vocab *vocab = NULL;
    XD_TRY(vocab_even(xd_comm_ctx(p->world), p->world, 100, &vocab));
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result run_samples(part *p) {
    float in[3][12] = { { 0 } }, out[12];
    double weights[3], bins[2] = { 1, 1 };
    const double times[3] = { 0.1, 0.2, 0.3 };
    const xd_denoise_term terms[3] = { { 1, 1, -1, 1 }, { 1, 1, -1, 1 }, { 1, 1, -1, 1 } };
    xd_sample_values values;
    xd_vsd_desc vsd = xd_vsd_defaults();
    xd_denoise_desc denoise = xd_denoise_defaults();
    xd_gan_desc gan = xd_gan_defaults();
    xdi_fdistill_desc ratios = xdi_fdistill_defaults();
    vsd.generated = denoise.prediction = gan.fake = ratios.logits = rows_of(in[0], 3, 4);
    vsd.teacher = denoise.clean = rows_of(in[1], 3, 4);
    vsd.fake = denoise.noise = rows_of(in[2], 3, 4);
    vsd.gradient = rows_of(out, 3, 4);
    vsd.common.split = denoise.common.comm = gan.common.comm = ratios.comm = p->world;
    denoise.terms = terms;
    ratios.bins = 2;
    ratios.bin_values = bins;
    ratios.times = times;
    XD_TRY(xd_vsd_loss(xd_comm_ctx(p->world), &vsd, &values));
    XD_TRY(xd_denoise_loss(xd_comm_ctx(p->world), &denoise, &values));
    XD_TRY(xd_gan_loss(xd_comm_ctx(p->world), &gan, &values));
    return xdi_fdistill_weights(xd_comm_ctx(p->world), &ratios, weights);
}

static xd_result run_norm(part *p) {
    xd_param param;
    xd_gradient_norm norm;
    memset(&param, 0, sizeof param);
    param.name = "logits";
    param.value = param.gradient = p->memory.student;
    param.dtype = XD_DTYPE_F32;
    param.count = IDS_ROWS;
    const xd_gradient_norm_desc d = { .params = &param, .param_count = 1, .refuse_above = 1e-30 };
    XD_TRY(xd_gradient_norm_compute(xd_comm_ctx(p->world), p->world, &d, &norm));
    const xd_result result = xd_gradient_norm_check(xd_comm_ctx(p->world), p->world, &d, &norm);
    return result == XD_ERROR_DATA ? XD_OK : result;
}

static xd_result run_route(part *p) {
    const int rank = xd_comm_rank(p->world);
    xd_route_desc d = pair_desc(rank);
    float data[6] = { 0 };
    xd_route *route = NULL;
    xd_route_window window;
    xd_result result = XD_OK;
    if (xd_comm_size(p->world) == 1) return XD_OK;
    XD_TRY(xd_route_create(p->world, &d, &route));
    if (rank == 0) result = xd_route_send(route, rows_of(data, 2, 3), NULL);
    if (rank == 1) result = xd_route_take(route, &window);
    if (rank == 1 && result == XD_OK) result = xd_route_release(route);
    result = xd_agree(p->world, result);
    xd_route_destroy(route);
    return result;
}

static xd_result run_messages(part *p) {
    const int rank = xd_comm_rank(p->world);
    xd_route_desc d = pair_desc(rank);
    xd_route *route = NULL;
    d.messages = true;
    if (xd_comm_size(p->world) == 1) return XD_OK;
    XD_TRY(xd_route_create(p->world, &d, &route));
    xd_route_destroy(route);
    return XD_OK;
}

/* ---- across tokenizers ---- */

#define STAGE_CALL(name)                   \
    static xd_result run_##name(part *p) { \
        xsizes_set(&p->x);                 \
        return xcall_##name(&p->x);        \
    }
STAGE_CALL(projected)
STAGE_CALL(gold)
STAGE_CALL(same)
STAGE_CALL(cached)
STAGE_CALL(likelihood)
STAGE_CALL(chunk_sums)
STAGE_CALL(chunk_sizes)
STAGE_CALL(project)
STAGE_CALL(project_backward)
STAGE_CALL(append_shards)

/* A cache that is written whole; only the first rank of the vocabulary writes. */
static xd_result run_cache(part *p) {
    xd_teacher_cache_writer *writer = NULL;
    xsizes_set(&p->x);
    p->x.cache_desc.vocab = p->x.vocab;
    p->x.cache_desc.vocabulary = XV;
    p->x.shards.next = p->x.m->cache_next;
    XD_TRY(cache_writer_create(xd_comm_ctx(p->world), p->x.path, &p->x.cache_desc, &writer));
    xd_result result = xd_teacher_cache_writer_document(writer, "a document", 10);
    if (result == XD_OK) result = xd_teacher_cache_writer_append(writer, &p->x.shards);
    if (result == XD_OK) return xd_teacher_cache_writer_commit(writer);
    xd_teacher_cache_writer_abort(writer);
    return result;
}

static xd_result run_topk(part *p) {
    float values[IDS_ROWS * IDS_K];
    int64_t ids[IDS_ROWS * IDS_K];
    return xd_vocab_topk(xd_comm_ctx(p->world), p->vocab, ids_matrix(p->memory.student), IDS_K, values, ids);
}

static xd_vocab_topk_desc choice_of(part *p) {
    return vocab_topk_desc(p->vocab, ids_matrix(p->memory.student), 3, IDS_K);
}

static xd_result run_choice(part *p) {
    const xd_vocab_topk_desc d = choice_of(p);
    int64_t ids[3 * IDS_K];
    return vocab_topk_columns(xd_comm_ctx(p->world), &d, ids, NULL);
}

static xd_result run_choice_gather(part *p) {
    const xd_vocab_topk_desc d = choice_of(p);
    int64_t ids[3 * IDS_K];
    return vocab_topk_gather(xd_comm_ctx(p->world), &d, ids,
                             xd_rows_of(p->memory.out.picked, XD_DTYPE_F32, IDS_ROWS, IDS_K));
}

/* Each rank has one of the positions. */
static xd_result run_shift(part *p) {
    const int64_t position = xd_comm_rank(p->world);
    int64_t label;
    const xd_shift_desc d = { .sequences = 1,
                              .length = xd_comm_size(p->world),
                              .positions = &position,
                              .held = 1,
                              .ids = xd_ids_of(p->memory.labels, XD_DTYPE_I64),
                              .comm = p->world };
    return xd_next_token_labels(xd_comm_ctx(p->world), &d, &label);
}

static xd_result run_denominator(part *p) {
    const xd_positions positions = { .count = IDS_ROWS };
    xd_denominator out;
    return xd_denominator_count(xd_comm_ctx(p->world), p->world, &positions, 1, &out);
}

/* Models that differ: the ranks look for the first weight. The model itself is made without a failure. */
static xd_result run_model_agree(part *p) {
    const xd_weight_desc w = {
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 + xd_comm_rank(p->world) }
    };
    const int64_t left = fails_in;
    xd_model *model = NULL;
    fails_in = 0;
    CHECK(xd_model_create(xd_comm_ctx(p->world), NULL, &model) == XD_OK);
    CHECK(xd_weight_add(xd_model_root(model), &w, NULL) == XD_OK && xd_model_seal(model) == XD_OK);
    fails_in = left;
    const xd_result result = xdi_model_agree(model, p->world);
    xd_model_destroy(model);
    return result == XD_ERROR_MISMATCH && xd_comm_size(p->world) > 1 ? XD_OK : result;
}

/* Who differs is told with a list; ranks that agree need none. */
static xd_result run_agree_same(part *p) {
    const xd_result result = xd_agree_same(p->world, (uint64_t)xd_comm_rank(p->world), "a number");
    return result == XD_ERROR_MISMATCH && xd_comm_size(p->world) > 1 ? XD_OK : result;
}

/* A model that is made without a failure, wrapped, and trained for a step. */
static xd_result wrapped_step(part *p, xd_model *model, bool sharded) {
    const xd_pass pass = { XD_PASS_BACKWARD, 0, false };
    xd_parallel *parallel = NULL;
    xd_block_view view;
    xd_param params[2];
    xd_tensor_part tensors[2];
    int64_t count;
    const int ranks = xd_comm_size(p->world);
    const xd_fsdp_desc parts = { .reshard_ranks = ranks % 2 ? 0 : ranks / 2, .reserve_frozen = true };
    XD_TRY(sharded ? wrap_over_fsdp(model, p->world, &parts, &parallel)
                   : wrap_over_ddp(model, p->world, NULL, &parallel));
    xd_result result = xd_parallel_params(parallel, 2, params, &count);
    if (result == XD_OK) result = xd_parallel_parts(parallel, 2, tensors, &count);
    if (result == XD_OK && sharded) result = xd_parallel_thaw(parallel, xd_model_find_weight(model, "late"));
    if (result == XD_OK && sharded) result = xd_block_begin(xd_model_root(model), pass, &view);
    if (result == XD_OK && sharded) result = xd_block_end(xd_model_root(model));
    if (result == XD_OK && sharded) result = xd_block_skip(xd_model_find_block(model, "empty"), 0);
    if (result == XD_OK && !sharded) result = xd_parallel_push_micro_batch(parallel);
    if (result == XD_OK) result = xd_parallel_reduce(parallel);
    if (result == XD_OK) result = xd_parallel_publish(parallel);
    xd_parallel_destroy(parallel);
    return result;
}

static xd_result run_wrap(part *p, bool sharded) {
    float value[6] = { 0 }, gradient[6] = { 0 };
    xd_weight_desc w = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 6 } };
    const int64_t left = fails_in;
    xd_model *model = NULL;
    if (!sharded) {
        w.value = value;
        w.gradient = gradient;
        w.room = 6;
    }
    fails_in = 0;
    CHECK(xd_model_create(xd_comm_ctx(p->world), NULL, &model) == XD_OK);
    CHECK(xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "empty" }, NULL) == XD_OK);
    CHECK(xd_weight_add(xd_model_root(model), &w, NULL) == XD_OK);
    w.name = "late";
    w.traits.frozen = true;
    if (sharded) CHECK(xd_weight_add(xd_model_root(model), &w, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK);
    fails_in = left;
    const xd_result result = wrapped_step(p, model, sharded);
    xd_model_destroy(model);
    return result;
}

static xd_result run_ddp(part *p) {
    return run_wrap(p, false);
}

static xd_result run_fsdp(part *p) {
    return run_wrap(p, true);
}

/* ---- every collective; the transport of threads has memory of its own, for all but the longest ---- */

enum { LONG = 1 << 15 };

static xd_result collectives(xd_comm *world, float *data, float *other) {
    const int ranks = xd_comm_size(world), rank = xd_comm_rank(world);
    const int64_t each = LONG / 16;
    int64_t counts[RANKS_MAX];
    double sums[2] = { 1.0, 2.0 };
    for (int i = 0; i < RANKS_MAX; i++) counts[i] = each;
    XD_TRY(xd_broadcast(world, data, LONG, XD_DTYPE_F32, 0));
    XD_TRY(xd_all_reduce(world, data, data, LONG, XD_DTYPE_F32, XD_MAX));
    XD_TRY(xd_reduce_scatter(world, data, other, counts, XD_DTYPE_F32, XD_MAX));
    XD_TRY(xd_all_gather(world, data, other, counts, XD_DTYPE_F32));
    XD_TRY(xd_all_gather_even(world, data, other, each, XD_DTYPE_F32));
    XD_TRY(xd_sum_values(world, sums, 2));
    XD_TRY(xd_all_to_all(world, data, counts, other, counts, XD_DTYPE_F32));
    XD_TRY(xd_gather(world, data, other, counts, XD_DTYPE_F32, 0));
    XD_TRY(xd_scatter(world, data, other, counts, XD_DTYPE_F32, 0));
    if (ranks > 1 && rank == 0) XD_TRY(xd_send(world, data, LONG, XD_DTYPE_F32, 1));
    if (ranks > 1 && rank == 1) XD_TRY(xd_recv(world, data, LONG, XD_DTYPE_F32, 0));
    return xd_barrier(world);
}

static xd_result run_collectives(part *p) {
    float *data = (float *)calloc(2 * LONG, sizeof *data);
    const xd_result result = collectives(p->world, data, data + LONG);
    free(data);
    return result;
}

/* ---- meshes, tensors, files ---- */

static xd_result run_mesh(part *p) {
    const int ranks = xd_comm_size(p->world), dp = ranks == 4 ? 2 : 1;
    const xd_mesh_desc d = { .axes = { { "dp", dp }, { "tp", ranks / dp }, { "cp", 1 } } };
    xd_mesh *mesh = NULL, *slice = NULL, *both = NULL;
    xd_comm *group;
    XD_TRY(xd_mesh_create(p->world, &d, &mesh));
    xd_result result = xd_mesh_group(mesh, "dp,tp", &group);
    if (result == XD_OK) { /* what is local can fail on one rank alone */
        result = xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = "tp" }, &slice);
        if (result == XD_OK) result = xd_mesh_derive(slice, &(xd_mesh_derive_desc){ .axes = "dp,tp" }, &both);
        result = xd_agree(p->world, result);
    }
    xd_mesh_destroy(both);
    xd_mesh_destroy(slice);
    xd_mesh_destroy(mesh);
    return result;
}

static xd_tensor tensor_of(part *p) {
    return xd_tensor_view(p->split, xd_comm_rank(p->world), p->memory.student, XD_DTYPE_F32);
}

static xd_result run_full(part *p) {
    const xd_tensor tensor = tensor_of(p);
    return xd_tensor_gather(p->world, &tensor, NULL, -1, p->memory.out.gradient[0]);
}

static xd_result run_weights(part *p) {
    const xd_named_tensor named = { "w", tensor_of(p) };
    const xd_weights_gather_desc d = { .directory = p->directory, .tensors = &named, .tensor_count = 1 };
    return xd_weights_gather(p->world, &d);
}

/* Each save has a step of its own, so that older ones go. Rank 0 has everything. */
static xd_checkpoint_network checkpoint_network(part *p, xd_tensor_part *tensor) {
    xd_checkpoint_network network = { .parts = tensor, .part_count = 1 };
    *tensor = (xd_tensor_part){
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 4, 3 }, .data = p->memory.student
    };
    tensor->range.end = 12;
    tensor->replica = xd_comm_rank(p->world) != 0;
    return network;
}

static xd_result run_checkpoint_save(part *p) {
    xd_tensor_part tensor;
    const xd_checkpoint_network network = checkpoint_network(p, &tensor);
    const xd_checkpoint_save_desc d = { .root = p->directory,
                                        .step = p->saves++,
                                        .networks = &network,
                                        .network_count = 1,
                                        .state = "{}",
                                        .keep = 2 };
    return xd_checkpoint_save(p->world, &d);
}

static xd_result run_checkpoint_load(part *p) {
    const int64_t fails = fails_in;
    xd_tensor_part tensor;
    char *state = NULL;
    fails_in = 0;
    if (p->saves == 0) CHECK_EQ_INT(run_checkpoint_save(p), XD_OK);
    fails_in = fails;
    const xd_checkpoint_network network = checkpoint_network(p, &tensor);
    const xd_checkpoint_load_desc d = { .root = p->directory,
                                        .step = XD_CHECKPOINT_NEWEST,
                                        .networks = &network,
                                        .network_count = 1,
                                        .convert = true };
    const xd_result result = xd_checkpoint_load(p->world, &d, NULL, &state);
    xd_release(xd_comm_ctx(p->world), state);
    return result;
}

static xd_result drop_piece(void *user, const xd_state_tensor *tensor, xd_interval elements,
                            const void *data) {
    (void)user;
    (void)tensor;
    (void)elements;
    return data ? XD_OK : XD_ERROR_DATA;
}

static xd_result run_state_gather(part *p) {
    xd_tensor_part tensor;
    const xd_checkpoint_network network = checkpoint_network(p, &tensor);
    const xd_state_gather_desc d = { .networks = &network, .network_count = 1, .take = drop_piece };
    return xd_state_gather(p->world, &d);
}

/* Turned, converted and in two shards; each save has other names in the place of the older. */
static xd_result run_mapped(part *p, bool reads) {
    static const xd_weight_map maps[2] = { { .theirs = "theirs", .ours = "w", .transpose = true },
                                           { .theirs = "more", .ours = "v" } };
    xd_tensor_part tensors[2];
    (void)checkpoint_network(p, &tensors[0]);
    (void)checkpoint_network(p, &tensors[1]);
    tensors[1].name = "v";
    const xd_mapped_weights weights = { tensors, 2, maps, 2 };
    if (!reads) {
        const xd_weights_export_desc d = { .directory = p->directory,
                                           .weights = weights,
                                           .max_shard_bytes = 48 };
        return xd_weights_export(p->world, &d);
    }
    for (int i = 0; i < 2; i++) tensors[i].dtype = XD_DTYPE_BF16;
    const xd_weights_import_desc d = { .directory = p->directory, .weights = weights, .convert = true };
    return xd_weights_import(p->world, &d, NULL);
}

static xd_result run_export(part *p) {
    return run_mapped(p, false);
}

static xd_result run_import(part *p) {
    const int64_t fails = fails_in;
    fails_in = 0;
    if (p->saves++ == 0) CHECK_EQ_INT(run_export(p), XD_OK);
    fails_in = fails;
    return run_mapped(p, true);
}

static xd_result run_state_scatter(part *p) {
    static const float whole[12] = { 0 };
    static const int64_t shape[2] = { 4, 3 };
    const xd_state_tensor given = { "model", "w", XD_DTYPE_F32, 2, shape, whole };
    xd_tensor_part tensor;
    const xd_checkpoint_network network = checkpoint_network(p, &tensor);
    const xd_state_scatter_desc d = {
        .networks = &network, .network_count = 1, .tensors = &given, .tensor_count = 1
    };
    return xd_state_scatter(p->world, &d, NULL);
}

/* What ranks have together, every one gets in other memory. */
static xd_result run_state_inherit(part *p) {
    float whole[12];
    xd_tensor_part tensors[2];
    const xd_checkpoint_network from = checkpoint_network(p, &tensors[0]),
                                to = checkpoint_network(p, &tensors[1]);
    const xd_state_inherit_desc d = {
        .from = &from, .networks = &to, .network_count = 1, .step = 3, .state = "{\"at\": 1}"
    };
    char *state = NULL;
    int64_t step;
    tensors[1].range = (xd_interval){ 0, 12 };
    tensors[1].data = whole;
    const xd_result result = xd_state_inherit(p->world, &d, &step, &state);
    xd_release(xd_comm_ctx(p->world), state);
    return result;
}

/* There and back. */
static xd_result run_average(part *p) {
    static const float whole[12] = { 0 };
    static const int64_t shape[2] = { 4, 3 };
    const xd_state_tensor given = { "ema-slow", "w", XD_DTYPE_F32, 2, shape, whole };
    const xd_param param = { .name = "w", .value = p->memory.student, .dtype = XD_DTYPE_F32, .count = 12 };
    const xd_ema_desc constant = xd_ema_defaults(XD_EMA_CONSTANT);
    xd_tensor_part tensor;
    xd_checkpoint_network network = checkpoint_network(p, &tensor);
    xd_checkpoint_average average = { "slow", NULL };
    xd_ema_record record;
    const xd_state_gather_desc out = {
        .networks = &network, .network_count = 1, .average = true, .record = &record, .take = drop_piece
    };
    const xd_state_scatter_desc in = { .networks = &network,
                                       .network_count = 1,
                                       .average = true,
                                       .record = &record,
                                       .tensors = &given,
                                       .tensor_count = 1 };
    const int64_t fails = fails_in;
    fails_in = 0;
    CHECK_EQ_INT(average_create(xd_comm_ctx(p->world), &param, 1, &constant, &average.ema), XD_OK);
    fails_in = fails;
    network.averages = &average;
    network.average_count = 1;
    xd_result result = xd_state_gather(p->world, &out);
    if (result == XD_OK) result = xd_state_scatter(p->world, &in, NULL);
    xd_ema_destroy(average.ema);
    return result;
}

/* A split of 12 rows over the ranks. */
static void open_split(part *p) {
    const xd_topology topology = line_of("dp", xd_comm_size(p->world));
    xd_layout_desc d = { .ndim = 2, .shape = { 12, 3 }, .topology = &topology };
    d.placement[0].kind = XD_SHARD;
    CHECK_EQ_INT(xd_layout_create(xd_comm_ctx(p->world), &d, &p->split), XD_OK);
    snprintf(p->directory, sizeof p->directory, "/tmp/xdistill-test-allocations-%ld", (long)getpid());
}

static void remove_directory(part *p) {
    char command[160];
    snprintf(command, sizeof command, "rm -rf '%s'", p->directory);
    CHECK_EQ_INT(system(command), 0);
}

static const call calls[] = {
    { "xd_loss", run_ids_0, false },
    { "xd_loss, MFT", run_ids_1, false },
    { "xd_loss, cosine", run_ids_2, false },
    { "xd_head_loss", run_ids_3, false },
    { "xd_topk_kl_loss", run_ids_4, false },
    { "xd_topk_kl_loss, given ids", run_ids_5, false },
    { "xd_denominator_count", run_ids_6, true },
    { "xd_log_probs, at ids", run_ids_7, false },
    { "xd_log_probs_backward, at ids", run_ids_8, false },
    { "xd_log_probs, logits", run_ids_9, false },
    { "xd_log_probs, accuracy", run_ids_10, false },
    { "xd_log_probs", run_row_stats, false },
    { "xd_log_probs, all", run_log_softmax, false },
    { "xd_log_probs_backward", run_log_softmax_backward, false },
    { "xd_comm_split, alone", run_split_alone, false },
    { "xd_comm_split, pairs", run_split_pairs, false },
    { "xd_comm_fork", run_fork, false },
    { "xd_queue_create, xd_queue_start, xd_queue_wait, xd_queue_wait_all, xd_exchange", run_queue, false },
    { "xd_vocab_create", run_vocab, false },
    { "xd_barrier, xd_broadcast, xd_all_reduce, xd_reduce_scatter, xd_all_gather, "
      "xd_all_gather_even, xd_sum_values, xd_all_to_all, xd_gather, xd_scatter, xd_send, xd_recv",
      run_collectives, true },
    { "xd_gradient_norm_compute, xd_gradient_norm_check", run_norm, true },
    { "xd_vsd_loss, xd_denoise_loss, xd_gan_loss, xdi_fdistill_weights", run_samples, false },
    { "xd_route_create, xd_route_send, xd_route_take, xd_route_release", run_route, false },
    { "xd_route_create, messages", run_messages, false },
    { "xd_xtoken_loss, PROJECTED", run_projected, false },
    { "xd_xtoken_loss, GOLD", run_gold, false },
    { "xd_xtoken_loss, SAME", run_same, false },
    { "xd_xtoken_loss, CACHED", run_cached, false },
    { "xd_xtoken_loss, LIKELIHOOD", run_likelihood, false },
    { "xdi_chunk_sums", run_chunk_sums, true },
    { "xdi_chunk_sizes", run_chunk_sizes, true },
    { "xdi_project", run_project, true },
    { "xdi_project_backward", run_project_backward, true },
    { "xd_teacher_cache_writer_append", run_append_shards, false },
    { "xd_teacher_cache_writer_create, xd_teacher_cache_writer_document", run_cache, false },
    { "xd_vocab_topk", run_topk, false },
    { "xd_vocab_topk_columns", run_choice, false },
    { "xd_vocab_topk_columns, values", run_choice_gather, false },
    { "xd_next_token_labels", run_shift, false },
    { "xd_denominator_count, over ranks", run_denominator, true },
    { "xd_agree_same", run_agree_same, false },
    { "xdi_model_agree", run_model_agree, false },
    { "xd_ddp_create, xd_parallel_push_micro_batch, xd_parallel_params, xd_parallel_parts", run_ddp, false },
    { "xd_fsdp_create, xd_block_begin, xd_block_end, xd_block_skip, xd_parallel_reduce, xd_parallel_publish, "
      "xd_parallel_thaw",
      run_fsdp, false },
    { "xd_mesh_create, xd_mesh_group, xd_mesh_derive", run_mesh, false },
    { "xd_tensor_gather to all", run_full, false },
    { "xd_weights_gather", run_weights, false },
    { "xd_checkpoint_save", run_checkpoint_save, false },
    { "xd_checkpoint_load", run_checkpoint_load, false },
    { "xd_state_gather", run_state_gather, false },
    { "xd_weights_export", run_export, false },
    { "xd_weights_import", run_import, false },
    { "xd_state_scatter", run_state_scatter, false },
    { "xd_state_inherit", run_state_inherit, false },
    { "xd_state_gather, xd_state_scatter", run_average, false }
};

/* What all ranks of a run share: a world of its own for each call, because contexts retain memory. */
typedef struct run {
    const call *call;
    int victim, failures;         /* failures: of the victim */
    bool alike;                   /* did the ranks end alike in the last call? */
    uint32_t arrived;             /* atomic */
    xd_result results[RANKS_MAX]; /* of the last call */
} run;

/* All ranks meet here, whatever has become of their world. */
static void meet(run *r, int ranks) {
    const uint32_t turn = __atomic_fetch_add(&r->arrived, 1, __ATOMIC_ACQ_REL) / (uint32_t)ranks;
    while (__atomic_load_n(&r->arrived, __ATOMIC_ACQUIRE) < (turn + 1) * (uint32_t)ranks) sched_yield();
}

/* False when the ranks did not end alike. */
static bool check_alike(run *r, int ranks, const call *c, int64_t n) {
    bool alike = true;
    for (int i = 0; i < ranks; i++) {
        const bool ok = r->results[i] == XD_OK, all = r->results[r->victim] == XD_OK;
        const bool named =
            r->results[i] == XD_ERROR_MEMORY || (i != r->victim && r->results[i] == XD_ERROR_PEER);
        alike = alike && ok == all && (ok || named);
    }
    if (!alike) {
        printf("    %s, allocation %lld of rank %d:", c->names, (long long)n, r->victim);
        for (int i = 0; i < ranks; i++) printf(" %s", xd_result_name(r->results[i]));
        printf("\n");
    }
    CHECK(alike);
    return alike;
}

/* Makes the call again and again with the next allocation failing, until none is left. */
static void exhaust(part *p, run *r, const call *c) {
    const int rank = xd_comm_rank(p->world), ranks = xd_comm_size(p->world);
    for (int64_t n = 1; n < MOST; n++) {
        fails_in = rank == r->victim ? n : 0;
        r->results[rank] = c->run(p);
        fails_in = 0;
        meet(r, ranks);
        if (rank == 0) r->alike = check_alike(r, ranks, c, n);
        const bool over = r->results[r->victim] == XD_OK, broken = xd_barrier(p->world) != XD_OK;
        if (rank == r->victim && !over) r->failures++;
        meet(r, ranks);
        CHECK(!broken);
        if (over || broken || !r->alike) return;
    }
    CHECK(false); /* no end in sight */
}

static xd_result allocations_rank(xd_comm *world, void *argument) {
    run *r = (run *)argument;
    part *p = (part *)calloc(1, sizeof *p);
    p->world = world;
    ids_fill(&p->memory);
    XD_TRY(vocab_even(xd_comm_ctx(world), world, IDS_VOCAB, &p->vocab));
    p->x.base.ctx = xd_comm_ctx(world);
    p->x.base.comm = world;
    p->x.base.rank = xd_comm_rank(world);
    p->x.base.ranks = xd_comm_size(world);
    p->x.base.world = p->x.base.ranks > 1 ? world : NULL;
    p->x.no_cache = r->call->run != run_cached;
    xsizes_open(&p->x);
    open_split(p);
    const bool writes = r->call->run == run_weights || r->call->run == run_checkpoint_save ||
                        r->call->run == run_checkpoint_load || r->call->run == run_export ||
                        r->call->run == run_import;
    if (writes && p->x.base.rank == 0) CHECK_EQ_INT(mkdir(p->directory, 0700), 0);
    XD_TRY(xd_barrier(world)); /* the directory is there */
    exhaust(p, r, r->call);
    const xd_result result = xd_barrier(world);
    if (writes && p->x.base.rank == 0) remove_directory(p);
    if (r->call->run == run_cache) remove(p->x.path);
    xd_layout_destroy(p->split);
    xsizes_close(&p->x);
    xd_vocab_destroy(p->vocab);
    free(p);
    return result;
}

/* Returns the allocations that failed. */
static int64_t run_call(const call *c, int ranks, int victim, xd_reduction reduction) {
    run r;
    int64_t live = 0;
    const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, &live },
                               .reduction = reduction,
                               .log_level = XD_LOG_NONE,
                               .timeout_seconds = 60 };
    memset(&r, 0, sizeof r);
    r.call = c;
    r.victim = victim;
    CHECK_EQ_INT(xd_run_threads(ranks, &desc, allocations_rank, &r, NULL), XD_OK);
    CHECK_EQ_INT(live, 0);
    return r.failures;
}

static int64_t run_ranks(int ranks, xd_reduction reduction) {
    const bool judged = ranks == 2 && reduction == XD_REDUCTION_DETERMINISTIC;
    int64_t failures = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int64_t found = 0;
        for (int victim = 0; victim < ranks; victim++) found += run_call(&calls[i], ranks, victim, reduction);
        if (judged && found == 0 && !calls[i].quiet) printf("    %s: no allocation\n", calls[i].names);
        CHECK(!judged || (found == 0) == calls[i].quiet);
        failures += found;
    }
    return failures;
}

XD_TEST(each_allocation_of_each_call_may_fail_on_each_rank) {
    int64_t failures = 0;
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) failures += run_ranks(ranks, XD_REDUCTION_DETERMINISTIC);
    printf("%lld allocations failed\n", (long long)failures);
}

XD_TEST(each_allocation_of_invariant_mode_may_fail_on_each_rank) {
    int64_t failures = 0;
    for (int ranks = 1; ranks <= 2; ranks++) failures += run_ranks(ranks, XD_REDUCTION_INVARIANT);
    printf("%lld allocations failed\n", (long long)failures);
}

XD_TEST_MAIN()
