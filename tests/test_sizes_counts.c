/* Counts that belong to something else disagree with it: each number of a public desc or call that another one limits becomes
 * wrong, and the call refuses it with both numbers before it reads or writes anything; helpers/sizes.h says what is asked.
 * tests/build/check_sizes.py holds the list of numbers against docs/api.txt. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "comm/topology_internal.h"
#    include "tensor/redistribute_internal.h"
#endif
#include "makers.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_private.h"
#include "softmax_calls.h"
#include "xd_test.h"
#include "averages.h"
#include "weights_calls.h"
#include "xd_test_topology.h"
#include "sizes_xtoken.h"

enum { POSITIONS = 4, ELEMENTS = 6 };

/* Besides what calls across tokenizers take. */
typedef struct stage {
    xsizes x; /* first */
    xd_loss_desc loss;
    xd_head_loss_desc head;
    xd_topk_desc topk;
    xd_vocab_topk_desc choice;
    xd_positions positions;
    xd_shift_desc shift;
    xd_kl_estimate_desc estimate;
    xd_log_probs_desc log_probs;
    xd_param param[2];
    xd_optimizer_desc optimizer;
    xd_optimizer_group group;
    xd_optimizer_step_desc step;
    xd_ema_desc ema;
    xd_gradient_norm_desc norm;
    xd_axis axes[2], parts[2];
    xd_mesh_desc mesh;
    xd_mesh_derive_desc derive;
    xd_expert_desc experts;
    xd_topology topology;
    xd_layout_desc layout;
    xdi_redistribution_desc plan;
    xd_projection_rows rows;
    xdi_projection_cells cells;
    xdi_projection_cut_desc cut;
    xd_projection_rows_desc from_votes;
    xdi_special_desc special;
    xdi_votes_pass pass;
    xdi_vote_pieces pieces;
    xd_texts texts;
    xd_text text[3];
    xd_align_side side;
    xdi_align_dp_desc dp;
    xdi_uld_trl_desc trl;
    xd_weights_entry entry;
    xd_weights_writer_desc writer;
    int64_t a, b, c, d;   /* numbers that functions take themselves */
    int64_t teacher_rows; /* of all matrices of a loss at once */
    int root;
    int64_t ids[XALL];
    int32_t row_ids[XV * XK];
    float row_weights[XV * XK], numbers[64];
    char workspace[64];
} stage;
#define STAGE(memory) stage *s = (stage *)(memory)
#define CTX (s->x.base.ctx)

static void set_training(stage *s) {
    for (int i = 0; i < 2; i++)
        s->param[i] = (xd_param){ i ? "v" : "w", s->numbers, s->numbers, XD_DTYPE_F32, .count = ELEMENTS };
    s->optimizer = xd_adamw_defaults(s->param, 2);
    s->group = (xd_optimizer_group){ 1.0, 0.0 };
    s->optimizer.groups = &s->group;
    s->optimizer.group_count = 1;
    memset(&s->step, 0, sizeof s->step);
    memset(&s->log_probs, 0, sizeof s->log_probs);
    s->ema = xd_ema_defaults(XD_EMA_HALFLIFE);
    s->norm = (xd_gradient_norm_desc){ .params = s->param, .param_count = 2, .max_norm = 1.0 };
}

static void set_grids(stage *s) {
    s->axes[0] = (xd_axis){ "dp", 1 };
    s->axes[1] = (xd_axis){ "tp", s->x.base.ranks };
    s->parts[0] = (xd_axis){ "a", 1 };
    s->parts[1] = (xd_axis){ "b", s->x.base.ranks };
    s->mesh = (xd_mesh_desc){ .axes = { s->axes[0], s->axes[1] }, .world_size = s->x.base.ranks };
    s->derive = (xd_mesh_derive_desc){ .axes = "tp", .parts = s->parts, .part_count = 2 };
    s->experts = (xd_expert_desc){ .world_size = 4, .tp = 2, .cp = 1, .ep = 2, .pp = 1 };
    s->topology = grid_of(s->axes, 2, NULL);
    s->layout = (xd_layout_desc){ .ndim = 2, .shape = { 6, 3 }, .topology = &s->topology };
    s->layout.placement[1].kind = XD_SHARD;
    s->layout.placement[1].sections = 1;
    memset(&s->plan, 0, sizeof s->plan);
    s->plan.dtype = XD_DTYPE_F32;
    s->plan.ranks = s->x.base.ranks;
}

static void set_texts(stage *s) {
    s->text[0] = (xd_text){ "a", 1 };
    s->text[1] = (xd_text){ "bc", 2 };
    s->text[2] = (xd_text){ "<d>", 3 };
    s->texts = (xd_texts){ s->text, 3 };
    for (int i = 0; i < XV * XK; i++) s->row_ids[i] = i % XU, s->row_weights[i] = 0.5f;
    s->rows = (xd_projection_rows){ s->row_ids, s->row_weights, XV, XK };
    static const xdi_vote vote = { 1, 2, 1.0 };
    s->cells = (xdi_projection_cells){ &vote, 1, XV, XU };
    s->cut = (xdi_projection_cut_desc){ .k = 2 };
    s->from_votes = (xd_projection_rows_desc){ .k = 2 };
    s->special = (xdi_special_desc){ s->texts, s->texts, 0.3, 2 };
    s->pieces = (xdi_vote_pieces){ s->text[0], s->ids, 2 };
    s->pass = (xdi_votes_pass){ .tokens = &s->pieces,
                                .count = 1,
                                .max_pieces = 3,
                                .skip = s->ids,
                                .skip_count = 1,
                                .foreign_skip = s->ids,
                                .foreign_skip_count = 1 };
    s->side = (xd_align_side){ s->x.m->spans, NULL, NULL, NULL, 4 };
    s->dp = (xdi_align_dp_desc){ .student = s->texts, .teacher = s->texts };
    s->trl = (xdi_uld_trl_desc){ .student = { s->x.m->labels, s->x.m->spans, 4, false } };
    s->trl.teacher = s->trl.student;
    static const int64_t shape[2] = { 2, 3 };
    s->entry = (xd_weights_entry){ "w", XD_DTYPE_F32, 2, shape };
    s->writer = (xd_weights_writer_desc){ .entries = &s->entry, .entry_count = 1 };
}

static void set_stage(void *memory) {
    STAGE(memory);
    xsizes_set(memory);
    xsizes_memory *m = s->x.m;
    const xd_interval columns = xcolumns(&s->x);
    const xd_rows student = xrows(m->student, XR, columns.end - columns.begin);
    memset(&s->loss, 0, sizeof s->loss);
    s->loss.vocab = s->x.vocab;
    s->loss.student = s->loss.teacher = student;
    s->loss.soft_weight = 1.0;
    s->loss.common.gradient = xrows(m->gradient, XR, columns.end - columns.begin);
    s->loss.common.status = &m->status;
    memset(&s->head, 0, sizeof s->head);
    s->head.loss = (xd_loss_desc){ .vocab = s->x.vocab, .hard_weight = 1.0, .common.status = &m->status };
    s->head.loss.common.labels = xd_ids_of(m->labels, XD_DTYPE_I64);
    s->head.student.hidden = xrows(m->student, XR, 4);
    s->head.student.weight = xrows(m->same, columns.end - columns.begin, 4);
    s->topk = (xd_topk_desc){ .vocab = s->x.vocab, .student = student, .teacher = student, .k = 3 };
    s->topk.common.status = &m->status;
    s->choice = (xd_vocab_topk_desc){ .vocab = s->x.vocab, .logits = student, .sequences = XB, .k = 3 };
    s->positions = (xd_positions){ .count = XR, .labels = xd_ids_of(m->labels, XD_DTYPE_I64) };
    for (int i = 0; i < POSITIONS; i++) s->ids[i] = i * s->x.base.ranks + s->x.base.rank;
    s->shift = (xd_shift_desc){ .sequences = 1,
                                .length = POSITIONS * s->x.base.ranks,
                                .positions = s->ids,
                                .held = POSITIONS,
                                .ids = xd_ids_of(m->labels, XD_DTYPE_I64),
                                .comm = s->x.base.comm };
    s->estimate = (xd_kl_estimate_desc){ .logprobs = m->same, .reference = m->teacher, .count = ELEMENTS };
    set_training(s);
    set_grids(s);
    set_texts(s);
    s->root = 0;
    s->teacher_rows = XR;
    s->a = 2, s->b = 2, s->c = 2, s->d = 2;
}

/* ---- the calls ---- */

static xd_result call_loss(void *memory) {
    STAGE(memory);
    return xd_loss(CTX, &s->loss, (xd_loss_values *)(void *)s->x.m->sums);
}
/* One rank has other rows in all of its matrices. */
static xd_result call_loss_rows(void *memory) {
    STAGE(memory);
    s->loss.student.rows = s->loss.teacher.rows = s->loss.common.gradient.rows = s->teacher_rows;
    return call_loss(memory);
}
static xd_result call_loss_workspace(void *memory) {
    STAGE(memory);
    s->loss.common.workspace = s->workspace;
    if (s->loss.common.workspace_bytes == 0) s->loss.common.workspace = NULL;
    return call_loss(memory);
}
static xd_result call_head(void *memory) {
    STAGE(memory);
    s->head.workspace = s->head.workspace_bytes ? s->workspace : NULL;
    return xd_head_loss(CTX, &s->head, (xd_loss_values *)(void *)s->x.m->sums);
}
static xd_result call_topk(void *memory) {
    STAGE(memory);
    return xd_topk_kl_loss(CTX, &s->topk, (xd_loss_values *)(void *)s->x.m->sums);
}
static xd_result call_choice(void *memory) {
    STAGE(memory);
    return vocab_topk_columns(CTX, &s->choice, s->x.m->ids, NULL);
}
static xd_result call_log_probs(void *memory) {
    STAGE(memory);
    s->log_probs.vocab = s->x.vocab;
    s->log_probs.logits = s->choice.logits;
    s->log_probs.argmax = s->x.m->ids;
    s->log_probs.workspace = s->log_probs.workspace_bytes ? s->workspace : NULL;
    return xd_log_probs(CTX, &s->log_probs);
}
static xd_result call_vocab_topk(void *memory) {
    STAGE(memory);
    return xd_vocab_topk(CTX, s->x.vocab, s->choice.logits, s->a, s->x.m->window, s->x.m->ids);
}
static xd_result call_gather(void *memory) {
    STAGE(memory);
    return softmax_columns(CTX, s->x.vocab, s->choice.logits, xd_ids_of(s->x.m->columns, XD_DTYPE_I64), s->a,
                           s->b == 2 ? s->a : s->b, s->x.m->window);
}
static xd_result call_accuracy(void *memory) {
    STAGE(memory);
    return softmax_accuracy(CTX, s->x.vocab, s->choice.logits, &s->positions, NULL, &s->x.m->loss);
}
static xd_result call_denominator(void *memory) {
    STAGE(memory);
    return xd_denominator_count(CTX, s->x.base.world, &s->positions, s->a - 1,
                                (xd_denominator *)(void *)s->x.m->sums);
}
/* a + b, or a where there is no such number. */
static int64_t beyond(int64_t a, int64_t b) {
    return b > 0 ? a > INT64_MAX - b ? a : a + b : a < INT64_MIN - b ? a : a + b;
}

static xd_result call_shift(void *memory) {
    STAGE(memory);
    return xd_next_token_labels(CTX, &s->shift, s->x.m->out_sizes);
}
static xd_result call_balanced(void *memory) {
    STAGE(memory);
    return xd_load_balanced_positions(CTX, beyond(s->a, s->a), (int)s->b - 1, (int)s->c, s->x.m->out_sizes);
}
static xd_result call_estimate(void *memory) {
    STAGE(memory);
    return xd_kl_estimate(CTX, &s->estimate, &s->x.m->loss);
}
static xd_result call_vocab(void *memory) {
    STAGE(memory);
    xd_vocab *vocab = NULL;
    XD_TRY(vocab_of(CTX, s->x.base.world, xcolumns(&s->x), beyond(s->a, XV - 2), &vocab));
    xd_vocab_destroy(vocab);
    return XD_OK;
}
static xd_result call_vocab_even(void *memory) {
    STAGE(memory);
    xd_vocab *vocab = NULL;
    XD_TRY(vocab_even(CTX, s->x.base.world, s->a, &vocab));
    xd_vocab_destroy(vocab);
    return XD_OK;
}
static xd_result call_cast(void *memory) {
    STAGE(memory);
    return xd_cast(CTX, s->x.m->window, XD_DTYPE_BF16, s->x.m->same, XD_DTYPE_F32, s->a);
}
static xd_result call_optimizer(void *memory) {
    STAGE(memory);
    xd_optimizer *optimizer = NULL;
    XD_TRY(xd_optimizer_create(CTX, &s->optimizer, &optimizer));
    const xd_result result = xd_optimizer_step(optimizer, &s->step, NULL);
    xd_optimizer_destroy(optimizer);
    return result;
}
/* The list changes after the optimizer was made. */
static xd_result call_step(void *memory) {
    STAGE(memory);
    const int64_t count = s->param[1].count;
    xd_optimizer *optimizer = NULL;
    s->param[1].count = ELEMENTS;
    XD_TRY(xd_optimizer_create(CTX, &s->optimizer, &optimizer));
    s->param[1].count = count;
    const xd_result result = xd_optimizer_step(optimizer, &s->step, NULL);
    xd_optimizer_destroy(optimizer);
    return result;
}
static xd_result call_ema(void *memory) {
    STAGE(memory);
    xd_ema *ema = NULL;
    XD_TRY(average_create(CTX, s->param, s->a, &s->ema, &ema));
    xd_result result = xd_ema_update(ema, s->b, NULL);
    if (result == XD_OK) result = xd_ema_copy_to(ema, s->param, s->c, false, NULL);
    if (result == XD_OK) result = average_load(ema, s->param, s->d, NULL, NULL);
    xd_ema_destroy(ema);
    return result;
}
static xd_result call_norm(void *memory) {
    STAGE(memory);
    return xd_gradient_norm_compute(CTX, s->x.base.world, &s->norm, (xd_gradient_norm *)(void *)s->x.m->sums);
}
static xd_result call_clip(void *memory) {
    STAGE(memory);
    return xd_clip_gradients(CTX, s->param, s->a, 1.0f);
}
static xd_result call_mesh(void *memory) {
    STAGE(memory);
    static const int ranks[2] = { 0, 1 };
    xd_mesh *mesh = NULL;
    if (s->mesh.rank_count) s->mesh.ranks = ranks;
    XD_TRY(xd_mesh_create(s->x.base.comm, &s->mesh, &mesh));
    xd_mesh_destroy(mesh);
    return XD_OK;
}
static xd_result call_derive(void *memory) {
    STAGE(memory);
    xd_mesh *mesh = NULL, *split = NULL;
    XD_TRY(xd_mesh_create(s->x.base.comm, &s->mesh, &mesh));
    const xd_result result = xd_mesh_derive(mesh, &s->derive, &split);
    xd_mesh_destroy(split);
    xd_mesh_destroy(mesh);
    return result;
}
static xd_result call_experts(void *memory) {
    STAGE(memory);
    xd_topology dense, expert;
    return xdi_topology_experts(CTX, &s->experts, &dense, &expert);
}
static xd_result call_layout(void *memory) {
    STAGE(memory);
    xd_layout *layout = NULL;
    XD_TRY(xd_layout_create(CTX, &s->layout, &layout));
    xd_layout_destroy(layout);
    return XD_OK;
}
/* From one layout to another, whose shape differs. */
static xd_result call_plan(void *memory) {
    STAGE(memory);
    xd_layout *from = NULL, *to = NULL;
    xdi_redistribution *plan = NULL;
    XD_TRY(xd_layout_create(CTX, &s->layout, &from));
    s->layout.shape[0] = beyond(s->a, 4);
    xd_result result = xd_layout_create(CTX, &s->layout, &to);
    s->plan.from = from;
    s->plan.to = to;
    if (result == XD_OK) result = xdi_redistribution_create(CTX, &s->plan, &plan);
    xdi_redistribution_destroy(plan);
    xd_layout_destroy(to);
    xd_layout_destroy(from);
    return result;
}
/* A view whose shape is not that of its layout. */
static xd_result call_tensor(void *memory) {
    STAGE(memory);
    xd_layout *layout = NULL;
    XD_TRY(xd_layout_create(CTX, &s->layout, &layout));
    xd_tensor tensor = xd_tensor_view(layout, s->x.base.rank, s->x.m->same, XD_DTYPE_F32);
    tensor.ndim += (int)s->b - 2;
    if (s->a != 2) tensor.shape[1] = s->a;
    const xd_result result = xd_tensor_gather(s->x.base.comm, &tensor, NULL, s->root, s->x.m->window);
    xd_layout_destroy(layout);
    return result;
}
static xd_result call_reduce(void *memory) {
    STAGE(memory);
    return xd_all_reduce(s->x.base.comm, s->x.m->same, s->x.m->window, s->a, XD_DTYPE_F32, XD_SUM);
}
static xd_result call_broadcast(void *memory) {
    STAGE(memory);
    return xd_broadcast(s->x.base.comm, s->x.m->sums, s->a, XD_DTYPE_F64, s->root);
}
static xd_result call_gather_even(void *memory) {
    STAGE(memory);
    return xd_all_gather_even(s->x.base.comm, s->x.m->same, s->x.m->window, s->a, XD_DTYPE_F32);
}
static xd_result call_sum_values(void *memory) {
    STAGE(memory);
    return xd_sum_values(s->x.base.comm, s->x.m->sums, s->a);
}
static xd_result call_gather_root(void *memory) {
    STAGE(memory);
    const int64_t counts[2] = { 1, 1 };
    return xd_gather(s->x.base.comm, s->x.m->same, s->x.m->window, counts, XD_DTYPE_F32, s->root);
}
static xd_result call_scatter_root(void *memory) {
    STAGE(memory);
    const int64_t counts[2] = { 1, 1 };
    return xd_scatter(s->x.base.comm, s->x.m->same, s->x.m->window, counts, XD_DTYPE_F32, s->root);
}
static xd_result call_rows(void *memory) {
    STAGE(memory);
    xd_projection out;
    XD_TRY(xd_projection_from_rows(CTX, &s->rows, beyond(s->a, XV), beyond(s->b, XU), &out));
    xd_projection_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_cells(void *memory) {
    STAGE(memory);
    xd_projection out;
    XD_TRY(xdi_projection_from_cells(CTX, &s->cells, &out));
    xd_projection_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_map(void *memory) {
    STAGE(memory);
    xd_exact_map out;
    XD_TRY(exact_map_create(CTX, &s->rows, beyond(s->a, XU), false, &out));
    xd_exact_map_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_cut(void *memory) {
    STAGE(memory);
    xd_projection_rows out;
    XD_TRY(xdi_projection_rows_cut(CTX, &s->rows, &s->cut, &out));
    xd_projection_rows_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_exact(void *memory) {
    STAGE(memory);
    return xdi_projection_rows_apply_exact(CTX, &s->rows, s->texts, s->dp.teacher);
}
static xd_result call_to_rows(void *memory) {
    STAGE(memory);
    xd_projection_rows out;
    XD_TRY(xd_projection_to_rows(CTX, &s->x.projection, s->a, &out));
    xd_projection_rows_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_votes(void *memory) {
    STAGE(memory);
    xd_votes *votes = NULL;
    xd_projection_rows out = { NULL, NULL, 0, 0 };
    XD_TRY(votes_create(CTX, beyond(s->a, 8), beyond(s->b, 8), &votes));
    xd_result result = xd_votes_add(votes, s->c, s->d, 1.0);
    if (result == XD_OK) result = xdi_votes_set_exact(votes, s->c, s->d);
    if (result == XD_OK) result = xdi_votes_add_pass(votes, &s->pass);
    if (result == XD_OK) result = xd_projection_rows_from_votes(votes, &s->from_votes, &out);
    xd_projection_rows_destroy(CTX, &out);
    xd_votes_destroy(votes);
    return result;
}
static xd_result call_special(void *memory) {
    STAGE(memory);
    xdi_special_pair *pairs = NULL;
    int64_t count;
    XD_TRY(xdi_special_pairs(CTX, &s->special, &pairs, &count));
    xd_release(CTX, pairs);
    return XD_OK;
}
static xd_result call_align(void *memory) {
    STAGE(memory);
    xd_align_job jobs[2];
    memset(jobs, 0, sizeof jobs);
    for (int i = 0; i < 2; i++) jobs[i].student = jobs[i].teacher = s->side;
    XD_TRY(xd_align_batch(CTX, jobs, s->a));
    for (int i = 0; i < 2; i++) xd_alignment_destroy(CTX, &jobs[i].out);
    return XD_OK;
}
static xd_result call_align_dp(void *memory) {
    STAGE(memory);
    xd_alignment out;
    XD_TRY(xdi_align_dp(CTX, &s->dp, &out));
    xd_alignment_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_canonical(void *memory) {
    STAGE(memory);
    xdi_canonical out;
    XD_TRY(xdi_canonical_sequence(CTX, s->text, s->a, &out));
    xdi_canonical_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_trl(void *memory) {
    STAGE(memory);
    xd_alignment out;
    XD_TRY(xdi_compat_uld_chunks(CTX, &s->trl, &out));
    xd_alignment_destroy(CTX, &out);
    return XD_OK;
}
static xd_result call_writer(void *memory) {
    STAGE(memory);
    xd_weights_writer *writer = NULL;
    XD_TRY(weights_write_file(CTX, s->x.path, &s->writer, &writer));
    const xd_result result =
        xd_weights_writer_write(writer, s->a - 2, (uint64_t)s->b - 2, (size_t)s->c + 22, s->numbers);
    xd_weights_writer_abort(writer);
    return result;
}

#define AT(name, field, wrong, call, result, text, local) \
    { name, offsetof(stage, field), sizeof(((stage *)0)->field), wrong, call, result, text, local },
static const sizes_count counts[] = {
#include "sizes_counts.h"
};
#undef AT

static const sizes_table table = {
    sizeof(stage), xsizes_open, set_stage, xsizes_close, NULL, 0, counts, sizeof counts / sizeof *counts,
};

XD_TEST(counts_that_disagree_are_refused_and_nothing_is_written) {
    for (int ranks = 1; ranks <= SIZES_RANKS; ranks++) CHECK(sizes_run_table(&table, ranks) > 30);
}

XD_TEST_MAIN()
