/* Matrices of the losses over one vocabulary that belong together disagree: helpers/sizes.h says what is asked. The others are in
 * tests/test_sizes_xtoken.c, and sizes that are no matrices in tests/test_sizes_counts.c; tests/build/check_sizes.py holds the
 * lists against docs/api.txt. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "ids_scene.h"
#include "sizes.h"
#include "softmax_calls.h"

/* Everything that the calls take; a case changes one matrix of it. */
typedef struct stage {
    sizes_base base;
    xd_vocab *vocab;
    ids_memory *m;
    xd_loss_desc loss;
    xd_head_loss_desc head;
    mft_desc mft;
    xd_topk_desc topk;
    xd_vocab_topk_desc choice;
    xd_rows first, second, third, chosen; /* of functions that take matrices themselves */
    double written[IDS_ROWS * IDS_WIDTH];
    float values[IDS_ROWS * IDS_WIDTH];
    int64_t ids[IDS_ROWS * IDS_WIDTH];
} stage;

static void set_stage(void *memory) {
    stage *s = (stage *)memory;
    const xd_vocab_info vocab = xd_vocab_describe(s->vocab);
    ids_memory *m = s->m;
    ids_fill(m);
    s->loss = ids_loss(s->vocab, m, XD_DTYPE_I64, 0);
    memset(&s->head, 0, sizeof s->head);
    s->head.loss = ids_loss(s->vocab, m, XD_DTYPE_I64, 3);
    s->head.loss.soft_weight = 0.5;
    s->head.student.hidden = s->head.teacher.hidden =
        xd_rows_of(m->hidden, XD_DTYPE_F32, IDS_ROWS, IDS_HIDDEN);
    s->head.student.weight = s->head.teacher.weight =
        xd_rows_of(m->weight, XD_DTYPE_F32, vocab.end - vocab.begin, IDS_HIDDEN);
    s->head.hidden_gradient = xd_rows_of(m->out.gradient[0], XD_DTYPE_F32, IDS_ROWS, IDS_HIDDEN);
    s->head.weight_gradient = m->out.weight_gradient;
    s->mft = mft_defaults();
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

static xd_result call_loss(void *memory) {
    stage *s = (stage *)memory;
    return xd_loss(s->base.ctx, &s->loss, &s->m->out.values[0]);
}
static xd_result call_head(void *memory) {
    stage *s = (stage *)memory;
    return xd_head_loss(s->base.ctx, &s->head, &s->m->out.values[0]);
}
static xd_result call_mft(void *memory) {
    stage *s = (stage *)memory;
    return mft_loss(s->base.ctx, &s->mft, &s->m->out.values[0]);
}
static xd_result call_topk(void *memory) {
    stage *s = (stage *)memory;
    return xd_topk_kl_loss(s->base.ctx, &s->topk, &s->m->out.values[0]);
}
static xd_result call_stats(void *memory) {
    stage *s = (stage *)memory;
    return softmax_row_stats(s->base.ctx, s->vocab, s->first, 1.0, s->written, NULL);
}
static xd_result call_log_softmax(void *memory) {
    stage *s = (stage *)memory;
    return softmax_all(s->base.ctx, s->vocab, s->first, 1.0, s->third);
}
static xd_result call_log_softmax_backward(void *memory) {
    stage *s = (stage *)memory;
    return softmax_all_backward(s->base.ctx, s->vocab, s->first, 1.0, s->second, s->third);
}
static xd_result call_target(void *memory) {
    stage *s = (stage *)memory;
    return softmax_at_ids(s->base.ctx, s->vocab, s->first, 1.0, xd_ids_of(s->m->labels, XD_DTYPE_I64),
                          s->values);
}
static xd_result call_target_backward(void *memory) {
    stage *s = (stage *)memory;
    return softmax_at_ids_backward(s->base.ctx, s->vocab, s->first, 1.0,
                                   xd_ids_of(s->m->labels, XD_DTYPE_I64), s->m->row_weight, s->third);
}
static xd_result call_gather(void *memory) {
    stage *s = (stage *)memory;
    return softmax_columns(s->base.ctx, s->vocab, s->first, xd_ids_of(s->m->ids, XD_DTYPE_I64), IDS_K, IDS_K,
                           s->values);
}
static xd_result call_accuracy(void *memory) {
    stage *s = (stage *)memory;
    const int64_t labels = s->first.rows > IDS_ROWS + 1 ? s->first.rows : IDS_ROWS;
    const xd_positions positions = { labels, xd_ids_of(s->m->labels, XD_DTYPE_I64), false, 0, NULL, NULL };
    return softmax_accuracy(s->base.ctx, s->vocab, s->first, &positions, NULL, s->written);
}
static xd_result call_vocab_topk(void *memory) {
    stage *s = (stage *)memory;
    return xd_vocab_topk(s->base.ctx, s->vocab, s->first, IDS_K, s->values, s->ids);
}

static xd_result call_choice(void *memory) {
    stage *s = (stage *)memory;
    return vocab_topk_columns(s->base.ctx, &s->choice, s->ids, NULL);
}
static xd_result call_choice_gather(void *memory) {
    stage *s = (stage *)memory;
    return vocab_topk_gather(s->base.ctx, &s->choice, s->ids, s->chosen);
}

enum { FEW = IDS_VOCAB / SIZES_RANKS - 1 }; /* columns that are too few on two ranks, too */
#define AT(field) offsetof(stage, field)
static const sizes_matrix matrices[] = {
    { "xd_loss_desc.student", AT(loss.student), call_loss, true, true, FEW, false, false },
    { "xd_loss_desc.teacher", AT(loss.teacher), call_loss, true, true, FEW, true, false },
    { "xd_loss_common.gradient", AT(loss.common.gradient), call_loss, true, true, FEW, true, false },
    { "xd_head.hidden", AT(head.student.hidden), call_head, true, true, IDS_HIDDEN - 1, false, false },
    { "xd_head.weight", AT(head.student.weight), call_head, true, true, IDS_HIDDEN - 1, false, false },
    { "xd_head.hidden", AT(head.teacher.hidden), call_head, true, true, IDS_HIDDEN - 1, true, false },
    { "xd_head.weight", AT(head.teacher.weight), call_head, true, true, IDS_HIDDEN - 1, true, false },
    { "xd_head_loss_desc.hidden_gradient", AT(head.hidden_gradient), call_head, true, true, IDS_HIDDEN - 1,
      true, false },
    { "xd_loss_desc.student, MFT", AT(mft.loss.student), call_mft, true, true, FEW, false, false },
    { "xd_loss_desc.teacher, MFT", AT(mft.loss.teacher), call_mft, true, true, FEW, true, false },
    { "xd_loss_common.gradient, MFT", AT(mft.loss.common.gradient), call_mft, true, true, FEW, true, false },
    { "xd_loss_desc.mft_terms", AT(mft.terms), call_mft, true, true, FEW, true, false },
    { "xd_vocab_topk_desc.logits", AT(choice.logits), call_choice, true, true, FEW, false, false },
    { "xd_vocab_topk_desc.values", AT(chosen), call_choice_gather, true, false, FEW, false, false },
    { "xd_topk_desc.student", AT(topk.student), call_topk, true, true, FEW, false, false },
    { "xd_topk_desc.teacher", AT(topk.teacher), call_topk, true, true, FEW, true, false },
    { "xd_topk_desc.common.gradient", AT(topk.common.gradient), call_topk, true, true, FEW, true, false },
    { "xd_log_probs_desc.logits", AT(first), call_stats, false, true, FEW, false, false },
    { "xd_log_probs_desc.logits, of all", AT(first), call_log_softmax, true, true, FEW, false, false },
    { "xd_log_probs_desc.all", AT(third), call_log_softmax, true, true, FEW, false, false },
    { "xd_log_probs_desc.logits, back from all", AT(first), call_log_softmax_backward, true, true, FEW, false,
      false },
    { "xd_log_probs_gradient.all", AT(second), call_log_softmax_backward, true, true, FEW, false, false },
    { "xd_log_probs_gradient.logits", AT(third), call_log_softmax_backward, true, true, FEW, true, false },
    { "xd_log_probs_desc.logits, at ids", AT(first), call_target, false, true, FEW, false, false },
    { "xd_log_probs_desc.logits, back from ids", AT(first), call_target_backward, true, true, FEW, false,
      false },
    { "xd_log_probs_gradient.logits, at ids", AT(third), call_target_backward, true, true, FEW, true, false },
    { "xd_log_probs_desc.logits, logits at ids", AT(first), call_gather, false, true, FEW, false, false },
    { "xd_log_probs_desc.logits, accuracy", AT(first), call_accuracy, true, true, FEW, false, false },
    { "xd_vocab_topk(logits)", AT(first), call_vocab_topk, false, true, FEW, false, false },
};

static void open_stage(void *memory) {
    stage *s = (stage *)memory;
    s->m = (ids_memory *)calloc(1, sizeof *s->m);
    s->base.memory = s->m;
    s->base.bytes = sizeof *s->m;
    CHECK_EQ_INT(vocab_even(s->base.ctx, s->base.world, IDS_VOCAB, &s->vocab), XD_OK);
}

static void close_stage(void *memory) {
    stage *s = (stage *)memory;
    xd_vocab_destroy(s->vocab);
    free(s->m);
}

static const sizes_table table = {
    sizeof(stage), open_stage, set_stage, close_stage, matrices, sizeof matrices / sizeof *matrices, NULL, 0,
};

XD_TEST(matrices_of_losses_that_disagree_are_refused_and_nothing_is_written) {
    for (int ranks = 1; ranks <= SIZES_RANKS; ranks++) CHECK(sizes_run_table(&table, ranks) > 100);
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
    xd_result (*call)(void *stage);
} sized_calls[] = { { "xd_log_probs, sums", call_stats },
                    { "xd_log_probs, all", call_log_softmax },
                    { "xd_log_probs_backward, all", call_log_softmax_backward },
                    { "xd_log_probs, at ids", call_target },
                    { "xd_log_probs_backward, at ids", call_target_backward },
                    { "xd_log_probs, logits", call_gather },
                    { "xd_log_probs, accuracy", call_accuracy },
                    { "xd_vocab_topk", call_vocab_topk },
                    { "xd_vocab_topk_columns, values", call_choice_gather } };

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
    s->base.world = world;
    s->base.ctx = xd_comm_ctx(world);
    (void)argument;
    open_stage(s);
    for (int shift = 54; shift < 63; shift++) {
        call_with_rows(s, (int64_t)1 << shift);
        call_with_rows(s, ((int64_t)1 << shift) + 1);
        call_with_rows(s, (int64_t)(((uint64_t)1 << (shift + 1)) - 1));
    }
    call_with_rows(s, INT64_MAX / 3 + 1); /* three columns of each */
    close_stage(s);
    free(s);
    return XD_OK;
}

XD_TEST(more_rows_than_memory_has_are_refused_on_all_ranks) {
    const xd_ctx_desc desc = { .allocator = { allocate_little, release_little, NULL },
                               .timeout_seconds = 60 };
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        CHECK_EQ_INT(xd_run_threads(ranks, &desc, huge_rank, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
