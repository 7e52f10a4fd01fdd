/* Each allocation of each local call in turn fails: the call returns MEMORY, its output is untouched, nothing leaks, and the same
 * call works the next time. Where a call can do without (leftovers of dead writers, caches), it works. Calls of several ranks are in tests/test_allocations.c, and meshes in tests/test_memory.c;
 * tests/build/check_allocations.py holds the three against docs/api.txt. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "xd_private.h"
#include "xd_test.h"
#include "sizes_xtoken.h"
#include "tokenizer_make.h"
#include "averages.h"
#include "weights_calls.h"
#include "xd_test_topology.h"

#include <sys/stat.h>

enum { MOST = 3000 /* allocations of a call */ };

static int64_t fails_in; /* allocations until one fails; 0 -> never */

static void *heap_allocate(void *user, size_t bytes) {
    if (fails_in > 0 && --fails_in == 0) return NULL;
    __atomic_add_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    return malloc(bytes ? bytes : 1);
}

static void heap_release(void *user, void *memory) {
    __atomic_sub_fetch((int64_t *)user, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* What the calls use; everything is made before an allocation may fail. */
typedef struct place {
    xsizes x; /* first */
    xd_ctx *ctx;
    int64_t live;
    const xd_ctx_desc *desc; /* of ctx */
    char directory[64], file[96];
    xd_tokenizer *tokenizer;
    xd_layout *layout;
    xd_topology topology;
    xd_projection_rows rows;
    xd_param params[2];
    float values[2][24], gradient[24];
    char *bytes; /* of a projection's file */
    size_t byte_count;
} place;

static const xd_text strings[6] = { { "a", 1 },       { "bc", 2 },        { " d", 2 },
                                    { "<a b c>", 7 }, { "<other c>", 9 }, { "e", 1 } };

/* Fails the test when an output was written though the call failed. */
static xd_result untouched(xd_result result, const void *out) {
    if (result != XD_OK) CHECK(out == NULL);
    return result;
}

/* The same of a list, which is not empty before. */
static xd_aligned_chunk earlier;

static xd_result untouched_list(xd_result result, const xd_alignment *out) {
    if (result != XD_OK) CHECK(out->chunks == &earlier && out->count == 1);
    return result;
}

/* ---- contexts, worlds, layouts, training ---- */

static xd_result no_pass(void *user, const xd_network_call *call) {
    (void)user, (void)call;
    return XD_OK;
}

static xd_result run_dmd(place *p) {
    static const double rungs[] = { 0.999, 0.0 };
    static const int64_t feature = 3;
    const xd_network network = { .predicts = XD_PREDICT_FLOW, .forward = no_pass, .backward = no_pass };
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_MODELOPT);
    xd_dmd *dmd = NULL;
    for (int role = 0; role < XD_DMD_ROLES; role++) d.networks[role] = network;
    d.networks[XD_DMD_TEACHER].feature_count = 1;
    d.networks[XD_DMD_TEACHER].feature_elements = &feature;
    d.networks[XD_DMD_DISCRIMINATOR].heads = 2;
    d.rungs.list = rungs;
    d.sizes.samples = d.sizes.step_samples = 4;
    d.sizes.elements = 5;
    d.gan.fdistill.on = true;
    XD_TRY(untouched(xd_dmd_create(p->ctx, &d, &dmd), dmd));
    char *text = NULL;
    xd_result result = untouched(xd_dmd_state_save(dmd, &text), text);
    if (result == XD_OK) result = xd_dmd_state_load(dmd, text, NULL);
    xd_release(p->ctx, text);
    xd_dmd_destroy(dmd);
    return result;
}

static xd_result run_sampler(place *p) {
    static const double rungs[] = { 0.999, 0.0 };
    xd_sampler_desc d = xd_sampler_defaults();
    xd_sampler *sampler = NULL;
    d.network.predicts = XD_PREDICT_FLOW;
    d.network.forward = no_pass;
    d.steps = 1;
    d.list = rungs;
    d.samples = 4;
    d.elements = 5;
    XD_TRY(untouched(xd_sampler_create(p->ctx, &d, &sampler), sampler));
    xd_sampler_destroy(sampler);
    return XD_OK;
}

static xd_result run_ctx(place *p) {
    xd_ctx *ctx = NULL;
    XD_TRY(untouched(xd_ctx_create(p->desc, &ctx), ctx));
    xd_ctx_destroy(ctx);
    return XD_OK;
}
static xd_result run_self(place *p) {
    xd_comm *comm = NULL;
    XD_TRY(untouched(xd_comm_self(p->ctx, &comm), comm));
    xd_comm_destroy(comm);
    return XD_OK;
}
static xd_result run_world(place *p) {
    xd_thread_world *world = NULL;
    xd_comm *comm = NULL;
    XD_TRY(untouched(xd_thread_world_create(p->ctx, &(xd_thread_world_desc){ 1 }, &world), world));
    const xd_result result = untouched(xd_thread_world_join(world, p->ctx, 0, &comm), comm);
    xd_comm_destroy(comm);
    xd_thread_world_destroy(world);
    return result;
}
static xd_result run_layout(place *p) {
    static const int64_t offsets[2] = { 0, 8 }, sections[2] = { 1, 2 };
    xd_layout *layout = NULL;
    xd_layout_desc d = { .ndim = 2, .shape = { 8, 3 }, .topology = &p->topology };
    d.placement[0] = (xd_placement){ .kind = XD_SHARD, .offsets = offsets };
    d.placement[1] = (xd_placement){ .kind = XD_SHARD, .dim = 1, .sections = 2, .section_sizes = sections };
    XD_TRY(untouched(xd_layout_create(p->ctx, &d, &layout), layout));
    xd_layout_destroy(layout);
    return XD_OK;
}
static xd_result run_plan(place *p) {
    float from[24] = { 0 }, to[24], whole[24];
    const xd_tensor source = xd_tensor_view(p->layout, 0, from, XD_DTYPE_F32),
                    target = xd_tensor_view(p->layout, 0, to, XD_DTYPE_F32);
    xd_comm *comm = NULL;
    XD_TRY(xd_comm_self(p->ctx, &comm));
    xd_result result = xd_redistribute(comm, &source, &target);
    if (result == XD_OK) result = xd_tensor_gather(comm, &source, NULL, 0, whole);
    if (result == XD_OK) result = xd_tensor_gather(comm, &source, NULL, -1, whole);
    xd_comm_destroy(comm);
    return result;
}
static xd_result run_halo(place *p) {
    const xd_topology alone = { .axis_count = 1, .size = { 1 }, .rank_count = 1 };
    xd_layout_desc cut = { .ndim = 2, .shape = { 8, 3 }, .topology = &alone };
    xd_halo_desc d = { .dtype = XD_DTYPE_F32, .before = { 2 }, .boundary = { XD_HALO_PERIODIC } };
    xd_layout *layout = NULL;
    xd_comm *comm = NULL;
    xd_halo *halo = NULL;
    xd_planned planned;
    XD_TRY(xd_layout_create(p->ctx, &cut, &layout));
    d.layout = layout;
    xd_result result = xd_comm_self(p->ctx, &comm);
    if (result == XD_OK) {
        CHECK_EQ_INT(xd_plan_begin(p->ctx, NULL), XD_OK);
        result = untouched(xd_halo_create(comm, &d, &halo), halo);
        CHECK_EQ_INT(xd_plan_end(p->ctx, &planned), XD_OK);
    }
    if (result == XD_OK) result = untouched(xd_halo_create(comm, &d, &halo), halo);
    xd_halo_destroy(halo);
    xd_comm_destroy(comm);
    xd_layout_destroy(layout);
    return result;
}
static xd_result run_crossing(place *p) {
    const xd_crossing_desc d = {
        .kind = XD_CROSSING_GATHER, .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { 4, 3 }, .dim = 1
    };
    xd_comm *comm = NULL;
    xd_crossing *crossing = NULL;
    XD_TRY(xd_comm_self(p->ctx, &comm));
    const xd_result result = untouched(xd_crossing_create(comm, &d, &crossing), crossing);
    xd_crossing_destroy(crossing);
    xd_comm_destroy(comm);
    return result;
}
static xd_result run_leaves(place *p) {
    static const float leaf[4] = { 1, 2, 3, 4 };
    xd_leaf_stack *stack = NULL;
    const xd_leaves leaves = { 0, 3, 3 };
    XD_TRY(untouched(
        xd_leaf_stack_create(p->ctx, &(xd_leaf_stack_desc){ .leaves = leaves, .elements = 4 }, &stack),
        stack));
    xd_result result = XD_OK;
    for (int i = 0; i < 3 && result == XD_OK; i++) result = xd_leaf_stack_push(stack, leaf);
    xd_leaf_stack_destroy(stack);
    return result;
}
static xd_result run_optimizer(place *p) {
    const xd_optimizer_desc d = xd_adamw_defaults(p->params, 2);
    xd_optimizer *optimizer = NULL;
    XD_TRY(untouched(xd_optimizer_create(p->ctx, &d, &optimizer), optimizer));
    const xd_result result = xd_optimizer_step(optimizer, NULL, NULL);
    xd_optimizer_destroy(optimizer);
    return result;
}
static xd_result run_fill(place *p) {
    const xd_philox random = { .seed = 1, .stream = XD_STREAM_USER };
    const xd_init init = { XD_INIT_NORMAL, 0.0f, 1.0f };
    const xd_tensor_part part = { .name = "w",
                                  .dtype = XD_DTYPE_F32,
                                  .ndim = 2,
                                  .shape = { 4, 6 },
                                  .range = { 0, 24 },
                                  .data = p->values[0] };
    return xd_tensor_part_fill(p->ctx, &part, &init, &random);
}
static xd_result run_ema(place *p) {
    xd_ema *ema = NULL;
    xd_param copies[2] = { p->params[0], p->params[1] };
    XD_TRY(untouched(average_create(p->ctx, p->params, 2, NULL, &ema), ema));
    xd_result result = xd_ema_update(ema, XD_EMA_NEXT, NULL);
    if (result == XD_OK) result = average_load(ema, copies, 2, NULL, NULL);
    if (result == XD_OK) result = xd_ema_copy_to(ema, copies, 2, false, NULL);
    if (result == XD_OK) result = xd_ema_swap(ema);
    xd_ema_destroy(ema);
    return result;
}
static xd_result read_zeros(void *user, int64_t snapshot, int64_t tensor, void *to) {
    (void)snapshot;
    memset(to, 0, (size_t)((const place *)user)->params[tensor].count * sizeof(float));
    return XD_OK;
}
static xd_result run_post_hoc(place *p) {
    const xd_post_hoc_profile snapshots[2] = { { .iteration = 10, .gamma = 7.0 },
                                               { .iteration = 20, .sigma_rel = 0.1 } };
    const xd_post_hoc_desc desc = { .snapshots = snapshots,
                                    .snapshot_count = 2,
                                    .target = { .gamma = 9.0 },
                                    .targets = p->params,
                                    .target_count = 2,
                                    .read = read_zeros,
                                    .user = p };
    double coefficients[2] = { 5.0, 5.0 };
    const xd_result result = xd_post_hoc_average(p->ctx, &desc, coefficients, NULL);
    CHECK(result == XD_OK || coefficients[0] == 5.0);
    return result;
}
static xd_result run_estimate(place *p) {
    const xd_kl_estimate_desc d = { .logprobs = p->values[0], .reference = p->values[1], .count = 24 };
    double sum;
    return xd_kl_estimate(p->ctx, &d, &sum);
}

/* ---- alignment ---- */

static xd_align_side side_of(place *p, int64_t count) {
    const xd_align_side side = { p->x.m->spans, NULL, NULL, NULL, count };
    return side;
}
static xd_result run_align(place *p) {
    const xd_align_side student = side_of(p, 6), teacher = side_of(p, 6);
    xd_alignment out = { &earlier, 1 };
    XD_TRY(untouched_list(xd_align_bytes(p->ctx, &student, &teacher, &out, NULL), &out));
    xd_alignment_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_align_batch(place *p) {
    xd_align_job jobs[3];
    memset(jobs, 0, sizeof jobs);
    for (int i = 0; i < 3; i++) jobs[i].student = jobs[i].teacher = side_of(p, 6 + i);
    const xd_result result = xd_align_batch(p->ctx, jobs, 3);
    for (int i = 0; i < 3; i++) {
        untouched(result, jobs[i].out.chunks);
        xd_alignment_destroy(p->ctx, &jobs[i].out);
    }
    return result;
}
static xd_result run_align_dp(place *p) {
    const xdi_align_dp_desc d = { .student = { strings, 6 }, .teacher = { strings, 6 } };
    xd_alignment out = { &earlier, 1 };
    XD_TRY(untouched_list(xdi_align_dp(p->ctx, &d, &out), &out));
    xd_alignment_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_align_segment(place *p) {
    const xdi_align_dp_desc d = { .student = { strings, 6 }, .teacher = { strings + 1, 5 } };
    xd_alignment out = { &earlier, 1 };
    double score = -7.0;
    const xd_result result = untouched_list(xdi_align_segment(p->ctx, &d, &out, &score), &out);
    CHECK((result == XD_OK) == (score != -7.0));
    XD_TRY(result);
    xd_alignment_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_canonical(place *p) {
    xdi_canonical out = { NULL, NULL, NULL, 0 };
    XD_TRY(untouched(xdi_canonical_sequence(p->ctx, strings, 6, &out), out.text));
    xdi_canonical_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_uld_chunks(place *p) {
    const xdi_uld_trl_side side = { p->x.m->labels, p->x.m->spans, 6, false };
    const xdi_uld_trl_desc d = { .student = side, .teacher = side, .extended = true };
    xd_alignment out = { &earlier, 1 };
    XD_TRY(untouched_list(xdi_compat_uld_chunks(p->ctx, &d, &out), &out));
    xd_alignment_destroy(p->ctx, &out);
    return XD_OK;
}

/* ---- projections ---- */

static xd_result run_votes(place *p) {
    static const int64_t ids[3] = { 1, 2, 3 }, skip[2] = { 0, 1 };
    xdi_vote_pieces tokens[6];
    const xdi_votes_pass pass = { .tokens = tokens,
                                  .count = 6,
                                  .max_pieces = 3,
                                  .skip = skip,
                                  .skip_count = 2,
                                  .foreign_skip = skip,
                                  .foreign_skip_count = 1 };
    const xd_projection_rows_desc how = { .k = 3 };
    xd_votes *votes = NULL;
    xd_projection_rows rows = { NULL, NULL, 0, 0 };
    const xdi_vote *cells;
    int64_t count;
    for (int i = 0; i < 6; i++) tokens[i] = (xdi_vote_pieces){ strings[i], ids, 3 };
    XD_TRY(untouched(votes_create(p->ctx, 40, 40, &votes), votes));
    xd_result result = XD_OK;
    for (int i = 0; i < 200 && result == XD_OK; i++)
        result = xd_votes_add(votes, i * 7 % 40, i * 3 % 40, 1.0);
    if (result == XD_OK) result = xdi_votes_add_pass(votes, &pass);
    if (result == XD_OK) result = xdi_votes_set_exact(votes, 3, 4);
    if (result == XD_OK) result = xdi_votes_read(votes, &cells, &count);
    if (result == XD_OK) result = untouched(xd_projection_rows_from_votes(votes, &how, &rows), rows.ids);
    xd_projection_rows_destroy(p->ctx, &rows);
    xd_votes_destroy(votes);
    return result;
}
static xd_result run_special(place *p) {
    const xdi_special_desc d = { { strings, 6 }, { strings, 6 }, 0.1, 2 };
    xdi_special_pair *pairs = NULL;
    int64_t count;
    XD_TRY(untouched(xdi_special_pairs(p->ctx, &d, &pairs, &count), pairs));
    xd_release(p->ctx, pairs);
    return XD_OK;
}
static xd_result run_exact(place *p) {
    const xd_texts texts = { strings, 6 };
    return xdi_projection_rows_apply_exact(p->ctx, &p->rows, texts, texts);
}
static xd_result run_cut(place *p) {
    const xdi_projection_cut_desc d = { .k = 2 };
    xd_projection_rows out = { NULL, NULL, 0, 0 };
    XD_TRY(untouched(xdi_projection_rows_cut(p->ctx, &p->rows, &d, &out), out.ids));
    xd_projection_rows_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_from_rows(place *p) {
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(xd_projection_from_rows(p->ctx, &p->rows, XV, XU, &out), out.row_begin));
    xd_projection_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_from_cells(place *p) {
    static const xdi_vote votes[2] = { { 1, 2, 1.0 }, { 3, 1, 2.0 } };
    const xdi_projection_cells cells = { votes, 2, XV, XU };
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(xdi_projection_from_cells(p->ctx, &cells, &out), out.row_begin));
    xd_projection_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_map(place *p) {
    xd_exact_map out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(exact_map_create(p->ctx, &p->rows, XU, true, &out), out.student));
    xd_exact_map_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_to_rows(place *p) {
    xd_projection_rows out = { NULL, NULL, 0, 0 };
    XD_TRY(untouched(xd_projection_to_rows(p->ctx, &p->x.projection, 0, &out), out.ids));
    xd_projection_rows_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_upload(place *p) {
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(xd_projection_upload(p->ctx, &p->x.projection, &out), out.row_begin));
    xd_projection_unload(p->ctx, &out);
    return XD_OK;
}
static xd_result run_save(place *p) {
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(xd_projection_save(p->ctx, p->file, &p->x.projection));
    XD_TRY(untouched(projection_load(p->ctx, p->file, NULL, &out), out.row_begin));
    xd_projection_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_load_memory(place *p) {
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(projection_load_memory(p->ctx, p->bytes, p->byte_count, NULL, &out), out.row_begin));
    xd_projection_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_build(place *p) {
    const xd_projection_desc d = { p->tokenizer, p->tokenizer, NULL, NULL };
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(xd_projection_build(p->ctx, &d, &out, NULL), out.row_begin));
    xd_projection_destroy(p->ctx, &out);
    return XD_OK;
}
static xd_result run_cached(place *p) {
    const xd_projection_desc d = { p->tokenizer, p->tokenizer, NULL, NULL };
    xd_projection out;
    memset(&out, 0, sizeof out);
    XD_TRY(untouched(projection_cached(p->ctx, p->directory, &d, &out, NULL), out.row_begin));
    xd_projection_destroy(p->ctx, &out);
    return XD_OK;
}

/* ---- calls of the stage of sizes ---- */

#define STAGE_CALL(name)                          \
    static xd_result run_stage_##name(place *p) { \
        return xcall_##name(&p->x);               \
    }
STAGE_CALL(uld)
STAGE_CALL(embeddings)
STAGE_CALL(similarities)
STAGE_CALL(append)

/* A context retains the memory of such calls, so this one has its own. */
static xd_result run_jsd(place *p) {
    xd_ctx *shared = p->x.base.ctx, *ctx = NULL;
    XD_TRY(xd_ctx_create(p->desc, &ctx));
    p->x.base.ctx = ctx;
    const xd_result result = xcall_jsd(&p->x);
    p->x.base.ctx = shared;
    xd_ctx_destroy(ctx);
    return result;
}

static xd_result run_cache(place *p) {
    xd_teacher_cache_writer *writer = NULL;
    xd_teacher_cache *cache = NULL;
    XD_TRY(untouched(cache_writer_create(p->ctx, p->file, &p->x.cache_desc, &writer), writer));
    xd_result result = xd_teacher_cache_writer_document(writer, "a document", 10);
    if (result == XD_OK) result = xd_teacher_cache_writer_append(writer, &p->x.block);
    if (result != XD_OK) {
        xd_teacher_cache_writer_abort(writer);
        return result;
    }
    XD_TRY(xd_teacher_cache_writer_commit(writer));
    XD_TRY(untouched(cache_open(p->ctx, p->file, NULL, &cache), cache));
    xd_teacher_cache_close(cache);
    return XD_OK;
}
static xd_result run_cache_memory(place *p) {
    xd_teacher_cache *cache = NULL;
    size_t bytes = 0;
    char *data = NULL;
    XD_TRY(xd_file_load(p->ctx, p->file, 0, &data, &bytes));
    const xd_result result = untouched(cache_open_memory(p->ctx, data, bytes, NULL, &cache), cache);
    xd_teacher_cache_close(cache);
    xd_release(p->ctx, data);
    return result;
}

/* ---- files ---- */

static xd_result run_safetensors(place *p) {
    static const int64_t shape[2] = { 4, 6 }, first[2] = { 1, 2 }, size[2] = { 2, 3 };
    static const xd_weights_entry entries[2] = { { "w", XD_DTYPE_F32, 2, shape },
                                                 { "v", XD_DTYPE_F32, 2, shape } };
    static const xd_weights_pair pair = { "key", "value" };
    const xd_weights_writer_desc d = {
        .entries = entries, .entry_count = 2, .metadata = &pair, .metadata_count = 1
    };
    xd_weights_writer *writer = NULL;
    xd_weights *open = NULL;
    float box[6];
    XD_TRY(untouched(weights_write_file(p->ctx, p->file, &d, &writer), writer));
    xd_result result = xd_weights_writer_write(writer, 0, 0, XD_WEIGHTS_REST, p->values[0]);
    if (result == XD_OK) result = xd_weights_writer_write(writer, 1, 0, 96, p->values[1]);
    if (result != XD_OK) {
        xd_weights_writer_abort(writer);
        return result;
    }
    XD_TRY(xd_weights_writer_commit(writer));
    const xd_weights_desc stream = { .mode = XD_WEIGHTS_STREAM };
    XD_TRY(untouched(weights_open_file(p->ctx, p->file, &stream, &open), open));
    result = weights_read_box(open, 0, first, size, box);
    if (result == XD_OK) result = weights_read_bytes(open, 0, 4, 8, box);
    xd_weights_close(open);
    return result;
}
static xd_result run_safetensors_memory(place *p) {
    xd_weights *open = NULL;
    char *data = NULL;
    size_t bytes = 0;
    XD_TRY(xd_file_load(p->ctx, p->file, 0, &data, &bytes));
    const xd_result result = untouched(weights_open_memory(p->ctx, data, bytes, NULL, &open), open);
    xd_weights_close(open);
    xd_release(p->ctx, data);
    return result;
}
static xd_result run_weights(place *p) {
    static const int64_t shape[1] = { 24 };
    static const xd_weights_entry entries[2] = { { "w", XD_DTYPE_F32, 1, shape },
                                                 { "v", XD_DTYPE_F32, 1, shape } };
    const xd_weights_writer_desc d = { .entries = entries, .entry_count = 2, .max_shard_bytes = 100 };
    xd_weights_writer *writer = NULL;
    xd_weights *reader = NULL;
    const int64_t first[1] = { 2 }, size[1] = { 5 };
    float box[5];
    XD_TRY(untouched(weights_write_directory(p->ctx, p->directory, &d, &writer), writer));
    xd_result result = XD_OK;
    for (int i = 0; i < 2 && result == XD_OK; i++)
        result = xd_weights_writer_write(writer, i, 0, 96, p->values[i]);
    if (result != XD_OK) {
        xd_weights_writer_abort(writer);
        return result;
    }
    XD_TRY(xd_weights_writer_commit(writer));
    CHECK(result == XD_OK);
    XD_TRY(untouched(weights_open_directory(p->ctx, p->directory, NULL, &reader), reader));
    result = weights_read_box(reader, 1, first, size, box);
    xd_weights_close(reader);
    return result;
}
static xd_result run_publish(place *p) {
    xd_publish_directory *directory = NULL;
    char path[128];
    snprintf(path, sizeof path, "%s/published", p->directory);
    XD_TRY(untouched(xd_publish_directory_create(p->ctx, &(xd_publish_directory_desc){ path }, &directory),
                     directory));
    return xd_publish_directory_commit(directory);
}

/* ---- tokenizers ---- */

static xd_result run_tokenizer(place *p) {
    const file *f = byte_level(PLAIN_BYTES, "a b|ab c|");
    xd_tokenizer *tokenizer = NULL;
    XD_TRY(untouched(tokenizer_load_memory(p->ctx, f->text, f->bytes, NULL, &tokenizer), tokenizer));
    xd_tokenizer_destroy(tokenizer);
    return XD_OK;
}
static xd_result run_tokenizer_file(place *p) {
    xd_tokenizer *tokenizer = NULL;
    char path[128];
    snprintf(path, sizeof path, "%s/tokenizer.json", p->directory);
    XD_TRY(untouched(tokenizer_load(p->ctx, path, NULL, &tokenizer), tokenizer));
    xd_tokenizer_destroy(tokenizer);
    return XD_OK;
}
static xd_result run_encode(place *p) {
    static const char text[] = "abc abc and other words, more of them than at first: abcabcabc";
    xd_encoder *encoder = NULL;
    xd_encoding out;
    XD_TRY(untouched(encoder_create(p->ctx, p->tokenizer, &encoder), encoder));
    const xd_result result = xd_encode(encoder, text, sizeof text - 1, NULL, &out);
    xd_encoder_destroy(encoder);
    return result;
}
static xd_result run_encode_batch(place *p) {
    const xd_texts texts = { strings, 6 };
    xd_encoder *encoder = NULL;
    xd_encoding_batch out;
    XD_TRY(untouched(batch_encoder_create(p->ctx, p->tokenizer, &encoder), encoder));
    const xd_result result = xd_encode_batch(encoder, &texts, NULL, &out);
    xd_encoder_destroy(encoder);
    return result;
}

/* ---- calls that allocate nothing ---- */

static xd_result run_quiet(place *p) {
    int64_t positions[8];
    XD_TRY(xd_load_balanced_positions(p->ctx, 8, 1, 2, positions));
    return xd_clip_gradients(p->ctx, p->params, 2, 1.0f);
}

static xd_result run_quiet_data(place *p) {
    const xd_status clean = { 0 };
    const int32_t tokens[2] = { 97, 98 };
    char text[8];
    const xd_decode_desc decode = { .ids = tokens, .count = 2, .out = text, .capacity = sizeof text };
    xd_cached_document document;
    double probabilities[XK];
    int32_t ids[XK];
    uint16_t narrow[24];
    size_t length;
    XD_TRY(xd_cast(p->ctx, narrow, XD_DTYPE_BF16, p->values[0], XD_DTYPE_F32, 24));
    XD_TRY(xd_read(p->ctx, narrow, p->values[0], sizeof narrow));
    XD_TRY(xd_status_check(p->ctx, &clean));
    XD_TRY(xd_tokenizer_decode(p->ctx, p->tokenizer, &decode, &length));
    XD_TRY(xd_teacher_cache_find_document(p->ctx, p->x.cache, 0, &document));
    XD_TRY(cache_entries(p->ctx, p->x.cache, 1, ids, probabilities));
    XD_TRY(xcall_read(&p->x));
    XD_TRY(xcall_piece(&p->x));
    XD_TRY(xcall_plan(&p->x));
    XD_TRY(xcall_chunk_averages(&p->x));
    return xcall_chunk_backward(&p->x);
}

typedef struct call {
    const char *names; /* of the public functions that it calls */
    xd_result (*run)(place *p);
    bool quiet; /* allocates nothing */
} call;

static const call calls[] = {
    { "xd_dmd_create, xd_dmd_state_save, xd_dmd_state_load", run_dmd, false },
    { "xd_sampler_create", run_sampler, false },
    { "xd_ctx_create_versioned", run_ctx, false },
    { "xd_comm_self", run_self, false },
    { "xd_thread_world_create, xd_thread_world_join", run_world, false },
    { "xd_layout_create", run_layout, false },
    { "xd_redistribute, xd_tensor_gather", run_plan, false },
    { "xd_leaf_stack_create, xd_leaf_stack_push", run_leaves, false },
    { "xd_halo_create, xd_plan_begin, xd_plan_end", run_halo, false },
    { "xd_crossing_create", run_crossing, false },
    { "xd_optimizer_create, xd_optimizer_step", run_optimizer, false },
    { "xd_tensor_part_fill", run_fill, false },
    { "xd_ema_create, xd_ema_update, xd_ema_load, xd_ema_copy_to, xd_ema_swap", run_ema, false },
    { "xd_post_hoc_average", run_post_hoc, false },
    { "xd_kl_estimate", run_estimate, false },
    { "xd_align_bytes", run_align, false },
    { "xd_align_batch", run_align_batch, false },
    { "xdi_align_dp", run_align_dp, false },
    { "xdi_align_segment", run_align_segment, false },
    { "xdi_canonical_sequence", run_canonical, false },
    { "xdi_compat_uld_chunks", run_uld_chunks, false },
    { "xd_votes_create, xd_votes_add, xdi_votes_add_pass, xdi_votes_set_exact, xdi_votes_read, "
      "xd_projection_rows_from_votes",
      run_votes, false },
    { "xdi_special_pairs", run_special, false },
    { "xdi_projection_rows_apply_exact", run_exact, false },
    { "xdi_projection_rows_cut", run_cut, false },
    { "xd_projection_from_rows", run_from_rows, false },
    { "xdi_projection_from_cells", run_from_cells, false },
    { "xd_exact_map_create", run_map, false },
    { "xd_projection_to_rows", run_to_rows, false },
    { "xd_projection_upload", run_upload, false },
    { "xd_projection_save, xd_projection_load", run_save, false },
    { "xd_projection_load, bytes", run_load_memory, false },
    { "xd_projection_build", run_build, false },
    { "xd_projection_build, a directory", run_cached, false },
    { "xd_uld_loss", run_stage_uld, false },
    { "xdi_compat_jsd_of_probabilities", run_jsd, false },
    { "xdi_projection_rows_from_embeddings", run_stage_embeddings, false },
    { "xdi_projection_rows_from_similarities", run_stage_similarities, false },
    { "xd_teacher_cache_writer_append", run_stage_append, false },
    { "xd_teacher_cache_writer_create, xd_teacher_cache_writer_document, xd_teacher_cache_writer_commit, "
      "xd_teacher_cache_open",
      run_cache, false },
    { "xd_teacher_cache_open, bytes", run_cache_memory, false },
    { "xd_weights_writer_create, xd_weights_writer_write, xd_weights_writer_commit, xd_weights_open, "
      "xd_weights_read, a file",
      run_safetensors, false },
    { "xd_weights_open, bytes", run_safetensors_memory, false },
    { "xd_weights_writer_create, xd_weights_writer_write, xd_weights_writer_commit, xd_weights_open, "
      "xd_weights_read, a directory",
      run_weights, false },
    { "xd_publish_directory_create, xd_publish_directory_commit", run_publish, false },
    { "xd_tokenizer_load, bytes", run_tokenizer, false },
    { "xd_tokenizer_load", run_tokenizer_file, false },
    { "xd_encoder_create, xd_encode", run_encode, false },
    { "xd_encoder_create, batches, xd_encode_batch", run_encode_batch, false },
    { "xd_load_balanced_positions, xd_clip_gradients", run_quiet, true },
    { "xd_cast, xd_read, xd_status_check, xd_tokenizer_decode, xd_teacher_cache_find_document, "
      "xd_teacher_cache_read, xdi_teacher_piece_copy, xdi_teacher_route, xdi_chunk_averages, "
      "xdi_chunk_averages_backward",
      run_quiet_data, true },
};

/* ---- all of it ---- */

static void open_place(place *p) {
    static const xd_axis axes[2] = { { "dp", 1 }, { "tp", 1 } };
    const xd_layout_desc layout = { .ndim = 2, .shape = { 8, 3 }, .topology = &p->topology };
    const xdi_similarity_desc similar = { XK, 0.0 };
    const file *f = byte_level(PLAIN_BYTES, "a b|ab c|");
    char path[128];
    CHECK_EQ_INT(xd_ctx_create(p->desc, &p->ctx), XD_OK);
    p->x.base.ctx = p->ctx;
    p->x.base.ranks = 1;
    xsizes_open(&p->x);
    xsizes_set(&p->x);
    snprintf(p->directory, sizeof p->directory, "/tmp/xdistill-test-allocations-%ld", (long)getpid());
    snprintf(p->file, sizeof p->file, "%s/file", p->directory);
    snprintf(path, sizeof path, "%s/tokenizer.json", p->directory);
    CHECK_EQ_INT(mkdir(p->directory, 0700), 0);
    FILE *out = fopen(path, "wb");
    CHECK(out && fwrite(f->text, 1, f->bytes, out) == f->bytes && fclose(out) == 0);
    CHECK_EQ_INT(tokenizer_load_memory(p->ctx, f->text, f->bytes, NULL, &p->tokenizer), XD_OK);
    p->topology = grid_of(axes, 2, NULL);
    CHECK_EQ_INT(xd_layout_create(p->ctx, &layout, &p->layout), XD_OK);
    CHECK_EQ_INT(xdi_projection_rows_from_similarities(p->ctx, p->x.similarities, &similar, &p->rows), XD_OK);
    for (int i = 0; i < 2; i++)
        p->params[i] =
            (xd_param){ i ? "w" : "module.v", p->values[i], p->gradient, XD_DTYPE_F32, .count = 24 };
    p->x.projection.origin.options = xd_projection_defaults();
    CHECK_EQ_INT(xd_projection_save(p->ctx, p->file, &p->x.projection), XD_OK);
    CHECK_EQ_INT(xd_file_load(p->ctx, p->file, 0, &p->bytes, &p->byte_count), XD_OK);
}

static void close_place(place *p) {
    char command[160];
    xd_release(p->ctx, p->bytes);
    xd_projection_rows_destroy(p->ctx, &p->rows);
    xd_layout_destroy(p->layout);
    xd_tokenizer_destroy(p->tokenizer);
    xsizes_close(&p->x);
    xd_ctx_destroy(p->ctx);
    snprintf(command, sizeof command, "rm -rf '%s'", p->directory);
    CHECK_EQ_INT(system(command), 0);
}

/* A commit that is done but could not remove what it replaced says so, whatever the reason: see xd_weights_writer_commit. */
static bool stays(const place *p) {
    const char *message = xd_last_error(p->ctx)->message;
    return strstr(message, " is complete, but ") && strstr(message, "Cannot allocate memory");
}

/* Makes the call again and again with the next allocation failing, until none is left. Returns the failures. */
static int64_t exhaust(place *p, const call *c) {
    for (int64_t n = 1; n < MOST; n++) {
        fails_in = n;
        const xd_result result = c->run(p);
        const bool failed = fails_in == 0;
        fails_in = 0;
        const bool right =
            result == XD_OK || result == XD_ERROR_MEMORY || (result == XD_ERROR_IO && stays(p));
        if (!right)
            printf("    %s, allocation %lld: %s, %s\n", c->names, (long long)n, xd_result_name(result),
                   xd_last_error(p->ctx)->message);
        CHECK(right);
        if (!failed) {
            CHECK_EQ_INT(result, XD_OK);
            return n - 1;
        }
        CHECK_EQ_INT(c->run(p), XD_OK); /* the same call again */
    }
    printf("    %s: more than %d allocations\n", c->names, (int)MOST);
    return -1;
}

XD_TEST(each_allocation_of_each_local_call_may_fail) {
    place *p = (place *)calloc(1, sizeof *p);
    const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, &p->live },
                               .log_level = XD_LOG_NONE };
    int64_t failures = 0;
    p->desc = &desc;
    open_place(p);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const int64_t found = exhaust(p, &calls[i]);
        CHECK(calls[i].quiet ? found == 0 : found > 0);
        if (!calls[i].quiet && found == 0) printf("    %s: no allocation\n", calls[i].names);
        failures += found;
    }
    close_place(p);
    CHECK_EQ_INT(p->live, 0);
    printf("%lld allocations failed\n", (long long)failures);
    free(p);
}

XD_TEST_MAIN()
