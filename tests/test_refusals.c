/* One rank passes arguments that it can see are wrong: all ranks fail at once with the same reason, the others name it, and the
 * group can still be used. A call that returns on that rank alone leaves the others waiting until their deadline. Collectives
 * themselves are in comm_suite.h. 0.1 seconds. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_private.h"
#include "ids_scene.h"
#include "xd_test.h"
#include "softmax_calls.h"

#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 3, ODD = 1 };

/* One rank's arguments of every call. The vocabulary is split over all ranks, so a call is collective over them. */
typedef struct scene {
    xd_comm *world;
    xd_ctx *ctx;
    xd_vocab *vocab;
    xd_mesh *mesh;
    ids_memory m;
    double doubles[IDS_ROWS * IDS_WIDTH];
    float floats[IDS_ROWS * IDS_WIDTH];
    int64_t integers[IDS_ROWS * IDS_WIDTH];
} scene;

static xd_rows student_of(scene *s) {
    return ids_matrix(s->m.student);
}

static xd_ids shared_of(scene *s) {
    return xd_ids_of(s->m.ids, XD_DTYPE_I64);
}

/* ---- softmax functions ---- */

static xd_result no_temperature(scene *s, bool odd) {
    return softmax_row_stats(s->ctx, s->vocab, student_of(s), odd ? -1.0 : 1.0, s->doubles, NULL);
}
static xd_result few_rows_of_out(scene *s, bool odd) {
    xd_rows out = xd_rows_of(s->floats, XD_DTYPE_F32, IDS_ROWS - (odd ? 1 : 0), IDS_WIDTH);
    return softmax_all(s->ctx, s->vocab, student_of(s), 1.0, out);
}
static xd_result few_rows_of_weight(scene *s, bool odd) {
    const xd_rows weight = xd_rows_of(s->m.teacher, XD_DTYPE_F32, IDS_ROWS - (odd ? 1 : 0), IDS_WIDTH);
    return softmax_all_backward(s->ctx, s->vocab, student_of(s), 1.0, weight, ids_matrix(s->floats));
}
static xd_result no_targets(scene *s, bool odd) {
    return softmax_at_ids(s->ctx, s->vocab, student_of(s), 1.0,
                          xd_ids_of(odd ? NULL : s->m.labels, XD_DTYPE_I64), s->floats);
}
static xd_result targets_of_floats(scene *s, bool odd) {
    return softmax_at_ids_backward(s->ctx, s->vocab, student_of(s), 1.0,
                                   xd_ids_of(s->m.labels, odd ? XD_DTYPE_F64 : XD_DTYPE_I64), s->m.row_weight,
                                   ids_matrix(s->floats));
}
static xd_result negative_columns(scene *s, bool odd) {
    return softmax_columns(s->ctx, s->vocab, student_of(s), shared_of(s), odd ? -1 : IDS_K, 0, s->floats);
}
static xd_result no_output(scene *s, bool odd) {
    return softmax_row_stats(s->ctx, s->vocab, student_of(s), 1.0, odd ? NULL : s->doubles, NULL);
}
static xd_log_probs_gradient gradient_of(scene *s) {
    xd_log_probs_gradient g;
    memset(&g, 0, sizeof g);
    g.at_ids = s->m.row_weight;
    g.logits = ids_matrix(s->floats);
    return g;
}
static xd_result gradients_of_two_outputs(scene *s, bool odd) {
    xd_log_probs_desc d = softmax_desc(s->vocab, student_of(s), 1.0);
    xd_log_probs_gradient g = gradient_of(s);
    d.ids = xd_ids_of(s->m.labels, XD_DTYPE_I64);
    if (odd) g.all = ids_matrix(s->m.teacher);
    return xd_log_probs_backward(s->ctx, &d, &g);
}
static xd_result gradient_of_two_ids(scene *s, bool odd) {
    const xd_log_probs_gradient g = gradient_of(s);
    xd_log_probs_desc d = softmax_desc(s->vocab, student_of(s), 1.0);
    d.ids = xd_ids_of(s->m.labels, XD_DTYPE_I64);
    d.ids_per_row = odd ? 2 : 1;
    return xd_log_probs_backward(s->ctx, &d, &g);
}
static xd_result a_column_outside(scene *s, bool odd) {
    s->m.ids[1] = odd ? IDS_VOCAB : 2;
    return softmax_columns(s->ctx, s->vocab, student_of(s), shared_of(s), IDS_K, 0, s->floats);
}
static xd_result columns_of_floats(scene *s, bool odd) {
    return softmax_columns(s->ctx, s->vocab, student_of(s),
                           xd_ids_of(s->m.ids, odd ? XD_DTYPE_F32 : XD_DTYPE_I64), IDS_K, 0, s->floats);
}
static xd_result no_columns(scene *s, bool odd) {
    return softmax_columns(s->ctx, s->vocab, student_of(s), xd_ids_of(odd ? NULL : s->m.ids, XD_DTYPE_I64),
                           IDS_K, 0, s->floats);
}
static xd_result no_labels_to_hit(scene *s, bool odd) {
    const xd_positions positions = { IDS_ROWS, xd_ids_of(odd ? NULL : s->m.labels, XD_DTYPE_I64),
                                     false,    0,
                                     NULL,     NULL };
    return softmax_accuracy(s->ctx, s->vocab, student_of(s), &positions, NULL, s->doubles);
}

/* ---- selections ---- */

static xd_result too_many_of_the_best(scene *s, bool odd) {
    return xd_vocab_topk(s->ctx, s->vocab, student_of(s), odd ? IDS_VOCAB + 1 : IDS_K, s->floats,
                         s->integers);
}

static xd_vocab_topk_desc choice_of(scene *s, bool of_all) {
    xd_vocab_topk_desc d = vocab_topk_desc(s->vocab, student_of(s), 3, IDS_K);
    if (of_all) d.comm = s->world;
    return d;
}

static xd_result sequences_that_do_not_divide(scene *s, bool odd) {
    xd_vocab_topk_desc d = choice_of(s, false);
    d.sequences = odd ? 4 : 3;
    return vocab_topk_columns(s->ctx, &d, s->integers, NULL);
}
static xd_result chosen_of_another_dtype(scene *s, bool odd) {
    const xd_vocab_topk_desc d = choice_of(s, false);
    return vocab_topk_gather(s->ctx, &d, s->integers,
                             xd_rows_of(s->floats, odd ? XD_DTYPE_I32 : XD_DTYPE_F32, IDS_ROWS, IDS_K));
}

/* Ranks that hold other positions, each with the whole vocabulary; one has forgotten its own. */
static xd_result choose_alone(scene *s, bool odd, bool gathers) {
    xd_vocab *whole = NULL;
    xd_vocab_topk_desc d = choice_of(s, true);
    XD_TRY(vocab_even(s->ctx, NULL, IDS_VOCAB, &whole));
    d.vocab = odd ? NULL : whole;
    const xd_result result = gathers ? vocab_topk_gather(s->ctx, &d, s->integers,
                                                         xd_rows_of(s->floats, XD_DTYPE_F32, IDS_ROWS, IDS_K))
                                     : vocab_topk_columns(s->ctx, &d, s->integers, NULL);
    xd_vocab_destroy(whole);
    return result;
}
static xd_result no_vocabulary_to_choose_from(scene *s, bool odd) {
    return choose_alone(s, odd, false);
}
static xd_result no_vocabulary_to_gather_from(scene *s, bool odd) {
    return choose_alone(s, odd, true);
}

/* ---- losses ---- */

static xd_result no_dtype_of_labels(scene *s, bool odd) {
    xd_loss_desc d = ids_loss(s->vocab, &s->m, odd ? XD_DTYPE_U8 : XD_DTYPE_I64, 0);
    return xd_loss(s->ctx, &d, &s->m.out.values[0]);
}
static xd_result a_wrong_gradient(scene *s, bool odd) {
    mft_desc d = mft_defaults();
    d.loss = ids_loss(s->vocab, &s->m, XD_DTYPE_I64, 1);
    d.loss.common.gradient.rows -= odd ? 1 : 0;
    return mft_loss(s->ctx, &d, &s->m.out.values[1]);
}
static xd_result no_k(scene *s, bool odd) {
    xd_topk_desc d;
    memset(&d, 0, sizeof d);
    d.student = student_of(s);
    d.teacher = ids_matrix(s->m.teacher);
    d.vocab = s->vocab;
    d.k = odd ? 0 : IDS_K;
    return xd_topk_kl_loss(s->ctx, &d, &s->m.out.values[4]);
}
static xd_result a_narrow_head(scene *s, bool odd) {
    const xd_vocab_info info = xd_vocab_describe(s->vocab);
    xd_head_loss_desc d;
    memset(&d, 0, sizeof d);
    d.loss = ids_loss(s->vocab, &s->m, XD_DTYPE_I64, 3);
    d.student.hidden = xd_rows_of(s->m.hidden, XD_DTYPE_F32, IDS_ROWS, IDS_HIDDEN);
    d.student.weight =
        xd_rows_of(s->m.weight, XD_DTYPE_F32, info.end - info.begin, IDS_HIDDEN - (odd ? 1 : 0));
    return xd_head_loss(s->ctx, &d, &s->m.out.values[3]);
}
static xd_result a_position_outside(scene *s, bool odd) {
    const int64_t position = odd ? RANKS : xd_comm_rank(s->world), id = 3;
    xd_shift_desc d;
    memset(&d, 0, sizeof d);
    d.sequences = d.held = 1;
    d.length = RANKS;
    d.positions = &position;
    d.ids = xd_ids_of(&id, XD_DTYPE_I64);
    d.comm = s->world;
    return xd_next_token_labels(s->ctx, &d, s->integers);
}
static xd_result a_norm_of_no_kind(scene *s, bool odd) {
    xd_gradient_norm norm;
    xd_gradient_norm_desc d;
    memset(&d, 0, sizeof d);
    d.max_norm = odd ? -1.0 : 1.0;
    return xd_gradient_norm_compute(s->ctx, s->world, &d, &norm);
}
static xd_result columns_in_no_shard(scene *s, bool odd) {
    xd_vocab *made = NULL;
    const int rank = xd_comm_rank(s->world);
    const xd_interval columns = { odd ? 5 : 4 * rank, 4 * rank + 4 };
    const xd_result result = vocab_of(s->ctx, s->world, columns, 4 * RANKS, &made);
    CHECK(made == NULL);
    return result;
}

/* ---- chunks and projections ---- */

static xd_result a_chunk_outside(scene *s, bool odd) {
    const int64_t id = odd ? 2 : 1;
    xdi_chunk_map map = { &id, 1, 1, 2, s->world };
    return xdi_chunk_sizes(s->ctx, &map, s->integers);
}
static xd_result few_rows_of_chunks(scene *s, bool odd) {
    const int64_t id = 1;
    xdi_chunk_map map = { &id, 1, 1, 2, s->world };
    return xdi_chunk_sums(s->ctx, &map, xd_rows_of(s->m.student, XD_DTYPE_F32, odd ? 2 : 1, 4), s->doubles,
                          s->integers);
}
static xd_result project(scene *s, bool odd, bool backward) {
    const int64_t begins[IDS_VOCAB + 1] = { 0 }, columns[2] = { odd ? 1 : 0, 1 };
    const int32_t none = 0;
    const float weight = 1.0f;
    xd_projection m;
    xdi_project_desc d;
    memset(&m, 0, sizeof m);
    m.student_size = IDS_VOCAB;
    m.teacher_size = 2;
    m.row_begin = m.column_begin = begins;
    m.teacher_id = m.student_id = &none;
    m.weight = m.column_weight = &weight;
    memset(&d, 0, sizeof d);
    d.vocab = s->vocab;
    d.projection = &m;
    d.columns = columns;
    d.k = 2;
    return backward ? xdi_project_backward(s->ctx, &d, s->doubles, ids_matrix(s->floats))
                    : xdi_project(s->ctx, &d, student_of(s), s->doubles);
}
static xd_result a_column_twice(scene *s, bool odd) {
    return project(s, odd, false);
}
static xd_result a_column_twice_backward(scene *s, bool odd) {
    return project(s, odd, true);
}

/* ---- meshes and tensors ---- */

static xd_result a_world_size_that_does_not_fit(scene *s, bool odd) {
    xd_mesh_desc d;
    xd_mesh *mesh = NULL;
    memset(&d, 0, sizeof d);
    d.axes[0].name = "dp";
    d.axes[0].size = RANKS;
    d.world_size = odd ? RANKS + 1 : RANKS;
    const xd_result result = xd_mesh_create(s->world, &d, &mesh);
    CHECK(mesh == NULL);
    return result;
}
static xd_result an_axis_that_is_not_there(scene *s, bool odd) {
    const xd_axis axes[2] = { { "a", 1 }, { "b", RANKS } };
    xd_mesh_derive_desc d;
    xd_mesh *mesh = NULL;
    memset(&d, 0, sizeof d);
    d.axes = odd ? "cp" : "dp";
    d.parts = axes;
    d.part_count = 2;
    const xd_result result = xd_mesh_derive(s->mesh, &d, &mesh);
    CHECK(mesh == NULL);
    return result;
}

enum { GATHERED, WINDOW, MOVED, WHOLE };

/* A tensor of RANKS elements, one on each rank. */
static xd_result move(scene *s, bool odd, int how) {
    xd_layout_desc d;
    xd_layout *layout = NULL;
    float mine = 1.0f, all[RANKS];
    memset(&d, 0, sizeof d);
    d.ndim = 1;
    d.shape[0] = RANKS;
    d.topology = xd_mesh_topology(s->mesh);
    d.placement[0].kind = XD_SHARD;
    XD_TRY(xd_layout_create(s->ctx, &d, &layout));
    xd_tensor from = xd_tensor_view(layout, xd_comm_rank(s->world), &mine, XD_DTYPE_F32), to = from;
    const xd_interval window = { 0, odd ? RANKS + 1 : RANKS };
    xd_result result;
    to.data = all;
    if (how == MOVED && odd) to.dtype = XD_DTYPE_I32;
    if (how == WHOLE && odd) from.data = NULL;
    if (how == GATHERED)
        result = xd_tensor_gather(s->world, &from, NULL, odd ? RANKS : 0, all);
    else if (how == WINDOW)
        result = xd_tensor_gather(s->world, &from, &window, 0, all);
    else
        result = how == MOVED ? xd_redistribute(s->world, &from, &to)
                              : xd_tensor_gather(s->world, &from, NULL, -1, all);
    xd_layout_destroy(layout);
    return result;
}
static xd_result a_root_outside(scene *s, bool odd) {
    return move(s, odd, GATHERED);
}
static xd_result a_window_outside(scene *s, bool odd) {
    return move(s, odd, WINDOW);
}
static xd_result another_dtype(scene *s, bool odd) {
    return move(s, odd, MOVED);
}
static xd_result a_tensor_without_data(scene *s, bool odd) {
    return move(s, odd, WHOLE);
}
static xd_result files_without_a_root(scene *s, bool odd) {
    xd_weights_gather_desc d;
    memset(&d, 0, sizeof d);
    d.directory = "/nowhere";
    d.root = odd ? -1 : 0;
    return xd_weights_gather(s->world, &d);
}

/* ---- files and routes ---- */

static xd_result a_cache_of_no_temperature(scene *s, bool odd) {
    xd_teacher_cache_desc d;
    xd_teacher_cache_writer *writer = NULL;
    char folder[] = "/tmp/xdistill-refusals-XXXXXX", path[64] = "elsewhere"; /* rank 0 writes */
    memset(&d, 0, sizeof d);
    if (xd_comm_rank(s->world) == 0) {
        CHECK(mkdtemp(folder) != NULL);
        snprintf(path, sizeof path, "%s/cache", folder);
    }
    d.vocab = s->vocab;
    d.vocabulary = IDS_VOCAB;
    d.k = IDS_K;
    d.temperature = odd ? -1.0 : 1.0;
    const xd_result result = cache_writer_create(s->ctx, path, &d, &writer);
    CHECK(writer == NULL);
    if (xd_comm_rank(s->world) == 0) CHECK(rmdir(folder) == 0);
    return result;
}
static xd_result a_route_of_no_samples(scene *s, bool odd) {
    xd_route_desc d;
    xd_route *route = NULL;
    memset(&d, 0, sizeof d);
    d.samples = odd ? -1 : 4;
    d.length = 2;
    d.columns = 3;
    const xd_result result = xd_route_create(s->world, &d, &route);
    xd_route_destroy(route);
    return result;
}

#define CASES(CASE)                      \
    CASE(no_temperature)                 \
    CASE(few_rows_of_out)                \
    CASE(few_rows_of_weight)             \
    CASE(no_targets)                     \
    CASE(targets_of_floats)              \
    CASE(negative_columns)               \
    CASE(no_output)                      \
    CASE(gradients_of_two_outputs)       \
    CASE(gradient_of_two_ids)            \
    CASE(a_column_outside)               \
    CASE(columns_of_floats)              \
    CASE(no_columns)                     \
    CASE(no_labels_to_hit)               \
    CASE(too_many_of_the_best)           \
    CASE(sequences_that_do_not_divide)   \
    CASE(chosen_of_another_dtype)        \
    CASE(no_vocabulary_to_choose_from)   \
    CASE(no_vocabulary_to_gather_from)   \
    CASE(no_dtype_of_labels)             \
    CASE(a_wrong_gradient)               \
    CASE(no_k)                           \
    CASE(a_narrow_head)                  \
    CASE(a_position_outside)             \
    CASE(a_norm_of_no_kind)              \
    CASE(a_chunk_outside)                \
    CASE(few_rows_of_chunks)             \
    CASE(a_column_twice)                 \
    CASE(a_column_twice_backward)        \
    CASE(a_world_size_that_does_not_fit) \
    CASE(an_axis_that_is_not_there)      \
    CASE(a_root_outside)                 \
    CASE(a_window_outside)               \
    CASE(another_dtype)                  \
    CASE(a_tensor_without_data)          \
    CASE(files_without_a_root)           \
    CASE(a_cache_of_no_temperature)      \
    CASE(a_route_of_no_samples)

typedef xd_result (*call)(scene *s, bool odd);
#define ENTRY(name) { #name, name },
static const struct {
    const char *name;
    call make;
} calls[] = { CASES(ENTRY) };
enum { CALLS = sizeof calls / sizeof *calls };

static void refuse(scene *s, int i) {
    const bool odd = xd_comm_rank(s->world) == ODD;
    const xd_error *error = xd_last_error(s->ctx);
    ids_fill(&s->m);
    const xd_result result = calls[i].make(s, odd);
    const bool own = result == XD_ERROR_ARGUMENT || result == XD_ERROR_SHAPE || result == XD_ERROR_DTYPE ||
                     result == XD_ERROR_TOPOLOGY;
    const bool right = odd ? own : result == XD_ERROR_PEER && error->culprit == ODD;
    if (!right) printf("%s: %s\n", calls[i].name, error->message);
    CHECK(right);
    CHECK_EQ_INT(xd_barrier(s->world), XD_OK);
}

static xd_result refuse_all(xd_comm *world, void *argument) {
    scene *s = (scene *)calloc(1, sizeof *s);
    xd_mesh_desc d;
    memset(&d, 0, sizeof d);
    d.axes[0].name = "dp";
    d.axes[0].size = RANKS;
    s->world = world;
    s->ctx = xd_comm_ctx(world);
    (void)argument;
    xd_result result = vocab_even(s->ctx, world, IDS_VOCAB, &s->vocab);
    if (result == XD_OK) result = xd_mesh_create(world, &d, &s->mesh);
    for (int i = 0; i < CALLS && result == XD_OK; i++) {
        refuse(s, i);
        result = xd_barrier(world);
    }
    xd_mesh_destroy(s->mesh);
    xd_vocab_destroy(s->vocab);
    free(s);
    return result;
}

XD_TEST(what_one_rank_refuses_is_an_error_of_all_that_names_it) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, refuse_all, NULL, &error), XD_OK);
    CHECK_EQ_STR(error.message, "");
}

/* The error is that of the ranks together, so no rank needs to be named. */
static xd_result overlap_rank(xd_comm *world, void *argument) {
    scene *s = (scene *)calloc(1, sizeof *s);
    (void)argument;
    s->world = world;
    s->ctx = xd_comm_ctx(world);
    CHECK_EQ_INT(columns_in_no_shard(s, xd_comm_rank(world) == ODD), XD_ERROR_SHAPE);
    free(s);
    return xd_barrier(world);
}

XD_TEST(shards_that_leave_a_gap_are_refused_on_all_ranks) {
    CHECK_EQ_INT(xd_run_threads(RANKS, NULL, overlap_rank, NULL, NULL), XD_OK);
}

/* Ranks that share a vocabulary pass other numbers of rows, which none of them can see: the counts of an exchange differ. */
static xd_result other_rows(xd_comm *world, void *argument) {
    float logits[3 * 2] = { 0 };
    xd_vocab *vocab = NULL;
    xd_loss_values values;
    xd_loss_desc d;
    (void)argument;
    CHECK_EQ_INT(vocab_even(xd_comm_ctx(world), world, 2 * RANKS, &vocab), XD_OK);
    memset(&d, 0, sizeof d);
    d.vocab = vocab;
    d.soft_weight = 1.0;
    d.student = d.teacher = xd_rows_of(logits, XD_DTYPE_F32, xd_comm_rank(world) == ODD ? 3 : 2, 2);
    CHECK_EQ_INT(xd_loss(xd_comm_ctx(world), &d, &values), XD_ERROR_MISMATCH);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message,
                 "; ranks that share a vocabulary pass the same number of rows and the same settings"));
    xd_vocab_destroy(vocab);
    return xd_barrier(world);
}

XD_TEST(rows_that_differ_are_an_error_of_all_that_says_so) {
    CHECK_EQ_INT(xd_run_threads(RANKS, NULL, other_rows, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
