/* Matrices that belong together disagree: each matrix of each call in turn gets another number of rows, too few columns or a
 * stride that is too short, and the call refuses it before it reads or writes anything. tests/build/check_sizes.py holds the
 * list of matrices against docs/api.txt. And sizes that would wrap are 0. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "ids_scene.h"

#include <stdlib.h>

/* Everything that the calls take; a case changes one matrix of it. */
typedef struct stage {
    xd_ctx *ctx;
    xd_vocab *vocab;
    ids_memory *m;
    xd_loss_desc loss;
    xd_head_loss_desc head;
    xd_mft_desc mft;
    xd_topk_desc topk;
    xd_vocab_topk_desc choice;
    xd_rows first, second, third, chosen; /* of functions that take matrices themselves */
    double written[IDS_ROWS * IDS_WIDTH];
    float values[IDS_ROWS * IDS_WIDTH];
    int64_t ids[IDS_ROWS * IDS_WIDTH];
} stage;

static void set_stage(stage *s) {
    ids_memory *m = s->m;
    ids_fill(m);
    s->loss = ids_loss(s->vocab, m, XD_DTYPE_I64, 0);
    memset(&s->head, 0, sizeof s->head);
    s->head.loss = ids_loss(s->vocab, m, XD_DTYPE_I64, 3);
    s->head.loss.soft_weight = 0.5;
    s->head.student.hidden = s->head.teacher.hidden =
        xd_rows_of(m->hidden, XD_DTYPE_F32, IDS_ROWS, IDS_HIDDEN);
    s->head.student.weight = s->head.teacher.weight =
        xd_rows_of(m->weight, XD_DTYPE_F32, IDS_VOCAB, IDS_HIDDEN);
    s->head.hidden_gradient = xd_rows_of(m->out.gradient[0], XD_DTYPE_F32, IDS_ROWS, IDS_HIDDEN);
    s->head.weight_gradient = m->out.weight_gradient;
    s->mft = xd_mft_defaults();
    s->mft.loss = ids_loss(s->vocab, m, XD_DTYPE_I64, 1);
    memset(&s->topk, 0, sizeof s->topk);
    s->topk.student = ids_matrix(m->student);
    s->topk.teacher = ids_matrix(m->teacher);
    s->topk.vocab = s->vocab;
    s->topk.k = IDS_K;
    s->topk.common.status = &m->out.status;
    s->topk.common.gradient = ids_matrix(m->out.gradient[4]);
    s->mft.terms = ids_matrix(m->out.gradient[0]);
    memset(&s->choice, 0, sizeof s->choice);
    s->choice.vocab = s->vocab;
    s->choice.logits = ids_matrix(m->student);
    s->choice.sequences = 3;
    s->choice.k = IDS_K;
    s->chosen = xd_rows_of(s->values, XD_DTYPE_F32, IDS_ROWS, IDS_K);
    s->first = ids_matrix(m->student);
    s->second = ids_matrix(m->teacher);
    s->third = ids_matrix(m->out.gradient[3]);
}

static xd_result call_loss(stage *s) {
    return xd_loss(s->ctx, &s->loss, &s->m->out.values[0]);
}
static xd_result call_head(stage *s) {
    return xd_head_loss(s->ctx, &s->head, &s->m->out.values[0]);
}
static xd_result call_mft(stage *s) {
    return xd_mft_loss(s->ctx, &s->mft, &s->m->out.values[0]);
}
static xd_result call_topk(stage *s) {
    return xd_topk_kl_loss(s->ctx, &s->topk, &s->m->out.values[0]);
}
static xd_result call_stats(stage *s) {
    return xd_row_stats(s->ctx, s->vocab, s->first, 1.0, s->written, NULL);
}
static xd_result call_log_softmax(stage *s) {
    return xd_log_softmax(s->ctx, s->vocab, s->first, 1.0, s->third);
}
static xd_result call_log_softmax_backward(stage *s) {
    return xd_log_softmax_backward(s->ctx, s->vocab, s->first, 1.0, s->second, s->third);
}
static xd_result call_target(stage *s) {
    return xd_target_log_probs(s->ctx, s->vocab, s->first, 1.0, xd_ids_of(s->m->labels, XD_DTYPE_I64),
                               s->values);
}
static xd_result call_target_backward(stage *s) {
    return xd_target_log_probs_backward(s->ctx, s->vocab, s->first, 1.0,
                                        xd_ids_of(s->m->labels, XD_DTYPE_I64), s->m->row_weight, s->third);
}
static xd_result call_gather(stage *s) {
    return xd_gather_columns(s->ctx, s->vocab, s->first, xd_ids_of(s->m->ids, XD_DTYPE_I64), IDS_K, IDS_K,
                             s->values);
}
static xd_result call_accuracy(stage *s) {
    const int64_t labels = s->first.rows > IDS_ROWS + 1 ? s->first.rows : IDS_ROWS;
    const xd_positions positions = { labels, xd_ids_of(s->m->labels, XD_DTYPE_I64), false, 0, NULL, NULL };
    return xd_accuracy(s->ctx, s->vocab, s->first, &positions, NULL, s->written);
}
static xd_result call_vocab_topk(stage *s) {
    return xd_vocab_topk(s->ctx, s->vocab, s->first, IDS_K, s->values, s->ids);
}

static xd_result call_choice(stage *s) {
    return xd_vocab_topk_columns(s->ctx, &s->choice, s->ids, NULL);
}
static xd_result call_choice_gather(stage *s) {
    return xd_vocab_topk_gather(s->ctx, &s->choice, s->ids, s->chosen);
}

/* A matrix, where it lies in the stage, the call, and whether another of its call tells its rows. */
typedef struct matrix {
    const char *name;
    size_t offset;
    xd_result (*call)(stage *s);
    bool rows, columns; /* another number of rows is wrong; one column less is */
} matrix;

#define AT(field) offsetof(stage, field)
static const matrix matrices[] = {
    { "xd_loss_desc.student", AT(loss.student), call_loss, true, true },
    { "xd_loss_desc.teacher", AT(loss.teacher), call_loss, true, true },
    { "xd_loss_common.gradient", AT(loss.common.gradient), call_loss, true, true },
    { "xd_head.hidden", AT(head.student.hidden), call_head, true, true },
    { "xd_head.weight", AT(head.student.weight), call_head, true, true },
    { "xd_head.hidden", AT(head.teacher.hidden), call_head, true, true },
    { "xd_head.weight", AT(head.teacher.weight), call_head, true, true },
    { "xd_head_loss_desc.hidden_gradient", AT(head.hidden_gradient), call_head, true, true },
    { "xd_mft_desc.loss.student", AT(mft.loss.student), call_mft, true, true },
    { "xd_mft_desc.loss.teacher", AT(mft.loss.teacher), call_mft, true, true },
    { "xd_mft_desc.loss.common.gradient", AT(mft.loss.common.gradient), call_mft, true, true },
    { "xd_mft_desc.terms", AT(mft.terms), call_mft, true, true },
    { "xd_vocab_topk_desc.logits", AT(choice.logits), call_choice, true, true },
    { "xd_vocab_topk_gather(values)", AT(chosen), call_choice_gather, true, false },
    { "xd_topk_desc.student", AT(topk.student), call_topk, true, true },
    { "xd_topk_desc.teacher", AT(topk.teacher), call_topk, true, true },
    { "xd_topk_desc.common.gradient", AT(topk.common.gradient), call_topk, true, true },
    { "xd_row_stats(logits)", AT(first), call_stats, false, true },
    { "xd_log_softmax(logits)", AT(first), call_log_softmax, true, true },
    { "xd_log_softmax(out)", AT(third), call_log_softmax, true, true },
    { "xd_log_softmax_backward(logits)", AT(first), call_log_softmax_backward, true, true },
    { "xd_log_softmax_backward(weight)", AT(second), call_log_softmax_backward, true, true },
    { "xd_log_softmax_backward(gradient)", AT(third), call_log_softmax_backward, true, true },
    { "xd_target_log_probs(logits)", AT(first), call_target, false, true },
    { "xd_target_log_probs_backward(logits)", AT(first), call_target_backward, true, true },
    { "xd_target_log_probs_backward(gradient)", AT(third), call_target_backward, true, true },
    { "xd_gather_columns(logits)", AT(first), call_gather, false, true },
    { "xd_accuracy(logits)", AT(first), call_accuracy, true, true },
    { "xd_vocab_topk(logits)", AT(first), call_vocab_topk, false, true },
};

enum { MORE_ROWS, LESS_ROWS, FEW_COLUMNS, SHORT_STRIDE, NO_DATA, NO_DTYPE, CHANGES };
static const char *const change_names[CHANGES] = { "a row more",   "a row less", "too few columns",
                                                   "short stride", "no data",    "no dtype" };

/* False when the change is none for this matrix. */
static bool change(xd_rows *rows, const matrix *x, int kind) {
    switch (kind) {
    case MORE_ROWS: rows->rows++; return x->rows;
    case LESS_ROWS: rows->rows--; return x->rows;
    case FEW_COLUMNS:
        rows->cols = rows->cols == IDS_HIDDEN ? IDS_HIDDEN - 1 : IDS_VOCAB - 1;
        rows->stride = 0;
        return x->columns;
    case SHORT_STRIDE: rows->stride = rows->cols - 1; return true;
    case NO_DATA:
        rows->data = NULL;
        return strstr(x->name, "gradient") == NULL && strstr(x->name, "teacher") == NULL &&
               strstr(x->name, "terms") == NULL;
    default: rows->dtype = XD_DTYPE_NONE; return true;
    }
}

XD_TEST(matrices_that_disagree_are_refused_and_nothing_is_written) {
    stage *s = (stage *)calloc(1, sizeof *s);
    ids_memory *before = (ids_memory *)calloc(1, sizeof *before);
    s->m = (ids_memory *)calloc(1, sizeof *s->m);
    CHECK(xd_ctx_create(NULL, &s->ctx) == XD_OK);
    CHECK(xd_vocab_create_even(s->ctx, NULL, IDS_VOCAB, &s->vocab) == XD_OK);
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++)
        for (int kind = 0; kind < CHANGES; kind++) {
            set_stage(s);
            const xd_result whole = matrices[i].call(s);
            if (whole != XD_OK) CHECK_EQ_STR(matrices[i].name, xd_last_error(s->ctx)->message);
            set_stage(s);
            if (!change((xd_rows *)(void *)((char *)s + matrices[i].offset), &matrices[i], kind)) continue;
            *before = *s->m;
            const xd_result result = matrices[i].call(s);
            const bool refused =
                result == XD_ERROR_SHAPE || result == XD_ERROR_ARGUMENT || result == XD_ERROR_DTYPE;
            if (!refused)
                printf("    %s, %s: %s\n", matrices[i].name, change_names[kind], xd_result_name(result));
            CHECK(refused);
            CHECK(memcmp(before, s->m, sizeof *before) == 0);
        }
    xd_vocab_destroy(s->vocab);
    xd_ctx_destroy(s->ctx);
    free(s->m);
    free(before);
    free(s);
}

/* ---- sizes ---- */

XD_TEST(bytes_that_do_not_fit_into_a_size_are_0) {
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_layout *layout = NULL;
    xd_topology topology;
    const int64_t huge = (int64_t)1 << 61;
    const xd_axis axis = { "dp", 1 };
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_vocab_create_even(ctx, NULL, IDS_VOCAB, &vocab) == XD_OK);
    CHECK(xd_topology_create(ctx, &(xd_topology_desc){ .axes = &axis, .axis_count = 1, .world_size = 1 },
                             &topology) == XD_OK);
    const xd_layout_desc large = { .ndim = 2, .shape = { huge / 1024, 1024 }, .topology = &topology };
    CHECK(xd_layout_create(ctx, &large, &layout) == XD_OK);
    CHECK(xd_tensor_bytes(layout, 0, XD_DTYPE_U8) == (size_t)huge);
    CHECK_EQ_INT(xd_tensor_bytes(layout, 0, XD_DTYPE_F64), 0); /* 2^64 */
    for (int shift = 40; shift < 63; shift++) {
        static float somewhere;
        const int64_t rows = ((int64_t)1 << shift) + 5;
        xd_loss_desc d = { .vocab = vocab, .hard_weight = 1.0 };
        xd_topk_desc k = { .vocab = vocab, .k = 3 };
        xd_head_loss_desc h = { .loss = { .vocab = vocab, .hard_weight = 1.0 }, .chunk_rows = rows };
        d.student = k.student = xd_rows_of(&somewhere, XD_DTYPE_F32, rows, IDS_VOCAB);
        h.student.hidden = xd_rows_of(&somewhere, XD_DTYPE_F32, rows, 8);
        h.student.weight = xd_rows_of(&somewhere, XD_DTYPE_F32, IDS_VOCAB, 8);
        const size_t bytes[3] = { xd_loss_workspace_bytes(&d), xd_topk_kl_workspace_bytes(ctx, &k),
                                  xd_head_loss_workspace_bytes(&h) };
        for (int i = 0; i < 3; i++) CHECK(bytes[i] == 0 || bytes[i] / 8 >= (size_t)rows);
        CHECK(shift < 60 || (bytes[0] == 0 && bytes[1] == 0 && bytes[2] == 0));
        CHECK(shift > 44 || (bytes[0] > 0 && bytes[1] > 0 && bytes[2] > 0));
    }
    xd_layout_destroy(layout);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

/* ---- memory of a call ---- */

static void *allocate_little(void *user, size_t bytes) {
    (void)user;
    return bytes <= (size_t)1 << 24 ? malloc(bytes) : NULL;
}

static void release_little(void *user, void *memory) {
    (void)user;
    free(memory);
}

static const struct {
    const char *name;
    xd_result (*call)(stage *s);
} sized_calls[] = { { "xd_row_stats", call_stats },
                    { "xd_log_softmax", call_log_softmax },
                    { "xd_log_softmax_backward", call_log_softmax_backward },
                    { "xd_target_log_probs", call_target },
                    { "xd_target_log_probs_backward", call_target_backward },
                    { "xd_gather_columns", call_gather },
                    { "xd_accuracy", call_accuracy },
                    { "xd_vocab_topk", call_vocab_topk },
                    { "xd_vocab_topk_gather", call_choice_gather } };

/* Rows that no memory holds; times 8, 16 or the ranks they are 0 or small in 64 bits. */
static void call_with_rows(stage *s, int64_t rows) {
    set_stage(s);
    s->choice.sequences = 1;
    s->first.rows = s->second.rows = s->third.rows = s->choice.logits.rows = s->chosen.rows = rows;
    for (size_t i = 0; i < sizeof sized_calls / sizeof *sized_calls; i++) {
        const xd_result result = sized_calls[i].call(s);
        if (result != XD_ERROR_MEMORY && result != XD_ERROR_PEER)
            printf("    %s of %lld rows\n", sized_calls[i].name, (long long)rows);
        CHECK(result == XD_ERROR_MEMORY || result == XD_ERROR_PEER);
    }
}

static xd_result huge_rank(xd_comm *world, void *argument) {
    stage *s = (stage *)calloc(1, sizeof *s);
    s->m = (ids_memory *)calloc(1, sizeof *s->m);
    s->ctx = xd_comm_ctx(world);
    (void)argument;
    const xd_result result = xd_vocab_create_even(s->ctx, world, IDS_VOCAB, &s->vocab);
    for (int shift = 54; shift < 63 && result == XD_OK; shift++) {
        call_with_rows(s, (int64_t)1 << shift);
        call_with_rows(s, ((int64_t)1 << shift) + 1);
        call_with_rows(s, (int64_t)(((uint64_t)1 << (shift + 1)) - 1));
    }
    call_with_rows(s, INT64_MAX / 3 + 1); /* three columns of each */
    xd_vocab_destroy(s->vocab);
    free(s->m);
    free(s);
    return result;
}

XD_TEST(more_rows_than_memory_has_are_refused_on_all_ranks) {
    const xd_ctx_desc desc = { .allocator = { allocate_little, release_little, NULL },
                               .timeout_seconds = 20 };
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        CHECK_EQ_INT(xd_run_threads(ranks, &desc, huge_rank, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
