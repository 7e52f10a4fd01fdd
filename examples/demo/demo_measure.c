/* demo_measure.c - what a model is worth: the held-out text, and a sample. */
#include "demo_rank.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- held-out text ---- */

/* A model, its text, and where its rows go. */
typedef struct demo_exam {
    const nn_model *model;
    const float *weights;
    const demo_text *text;
    int32_t *ids;
    int64_t *labels;
    float *workspace;
    const demo_logits *logits;
} demo_exam;

/* Row `row` of the held-out text begins at row * DEMO_ROW; a token is predicted once, from what precedes it
 * in its row. What lies past the end does not count. */
static void demo_read_heldout(const demo_rank *r, const demo_exam *exam, int64_t first_row) {
    const demo_text *text = exam->text;
    int64_t at = 0;
    for (int s = 0; s < r->batch.sequences; s++)
        for (int i = 0; i < r->batch.positions; i++, at++) {
            const int64_t place = (first_row + r->first_sequence + s) * DEMO_ROW + r->position[i];
            const bool inside = place + 1 < text->count;
            exam->ids[at] = inside ? text->ids[place] : 0;
            exam->labels[at] = inside ? text->ids[place + 1] : XD_IGNORE_INDEX;
        }
}

static xd_loss_desc demo_exam_loss(const demo_rank *r, const demo_exam *exam) {
    xd_loss_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.student.data = exam->logits->own;
    desc.student.dtype = XD_DTYPE_F32;
    desc.student.rows = demo_rank_rows(r);
    desc.student.cols = exam->model->share.vocab_count;
    desc.common.labels.data = exam->labels;
    desc.vocab = exam->logits->vocab;
    desc.hard_weight = 1.0;
    desc.common.denominator_value = 1.0; /* the sum, not the mean */
    desc.common.comm = r->rows;
    return desc;
}

static xd_result demo_take_exam(demo_rank *r, const demo_exam *exam, double *bits_per_byte) {
    const demo_text *text = exam->text;
    const xd_loss_desc desc = demo_exam_loss(r, exam);
    double nats = 0.0;
    for (int64_t row = 0; row * DEMO_ROW + 1 < text->count; row += DEMO_BATCH) {
        xd_loss_values values;
        demo_read_heldout(r, exam, row);
        XD_TRY(demo_forward(r, exam->model, exam->weights, exam->ids, false, exam->workspace,
                            exam->logits->own));
        XD_TRY(xd_loss(r->ctx, &desc, &values));
        nats += values.hard;
    }
    *bits_per_byte = nats / log(2.0) / (double)text->bytes;
    return XD_OK;
}

xd_result demo_evaluate_student(demo_rank *r, const float *weights, double *bits_per_byte) {
    const demo_exam exam = {
        &r->model, weights, r->job->heldout, r->ids, r->labels, r->workspace, &r->logits
    };
    return demo_take_exam(r, &exam, bits_per_byte);
}

xd_result demo_evaluate_teacher(demo_rank *r, double *bits_per_byte) {
    const demo_exam exam = { &r->teacher,       r->teacher_weights,   r->job->teacher_heldout, r->teacher_ids,
                             r->teacher_labels, r->teacher_workspace, &r->teacher_logits };
    return demo_take_exam(r, &exam, bits_per_byte);
}

/* ---- a sample ---- */

enum { DEMO_SAMPLE_TOKENS = 64 };

/* An entry drawn from softmax(logits / 0.8). */
static int32_t demo_draw(const float *logits, int count, double uniform) {
    double max = -INFINITY, sum = 0.0, passed = 0.0;
    for (int i = 0; i < count; i++) max = fmax(max, (double)logits[i]);
    for (int i = 0; i < count; i++) sum += exp(((double)logits[i] - max) / 0.8);
    for (int i = 0; i < count; i++) {
        passed += exp(((double)logits[i] - max) / 0.8);
        if (passed > uniform * sum) return i;
    }
    return count - 1;
}

/* Bytes of the character that begins at `text`, or 0 when it is not UTF-8. */
static size_t demo_character(const unsigned char *text, size_t left) {
    const unsigned char lead = text[0];
    const size_t bytes = lead < 0x80   ? 1
                         : lead < 0xc2 ? 0
                         : lead < 0xe0 ? 2
                         : lead < 0xf0 ? 3
                         : lead < 0xf5 ? 4
                                       : 0;
    const unsigned char least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (bytes > left) return 0;
    if (bytes > 1 && (text[1] < least || text[1] > most)) return 0;
    for (size_t i = 2; i < bytes; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    return bytes;
}

/* A model may begin a character and not end it: such bytes become question marks. */
static void demo_mend_text(char *text, size_t length) {
    for (size_t i = 0; i < length;) {
        const size_t bytes = demo_character((const unsigned char *)text + i, length - i);
        if (bytes == 0 || text[i] == 0) text[i] = '?';
        i += bytes ? bytes : 1;
    }
}

/* The beginning as ids; how many, 0 on failure. */
static int demo_begin_sample(demo_rank *r, const xd_tokenizer *tokenizer, const char *beginning,
                             int32_t ids[DEMO_SAMPLE_TOKENS]) {
    xd_encoder *encoder = NULL;
    xd_encoding encoding;
    int count = 0;
    if (xd_encoder_create(r->ctx, tokenizer, &encoder) != XD_OK) return 0;
    if (xd_encode(encoder, beginning, strlen(beginning), NULL, &encoding) == XD_OK)
        for (; count < encoding.count && count < DEMO_SAMPLE_TOKENS; count++)
            ids[count] = encoding.ids[count];
    xd_encoder_destroy(encoder);
    return count;
}

/* The whole text is run again for every token: at this size that costs less than the code to keep keys and
 * values would. */
xd_result demo_write_sample(demo_rank *r, const nn_model *whole, const float *weights,
                            const xd_tokenizer *tokenizer, uint64_t seed, char sample[DEMO_SAMPLE]) {
    int32_t ids[DEMO_SAMPLE_TOKENS];
    nn_batch batch;
    bool failed = false;
    size_t length = 0;
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.positions = DEMO_SAMPLE_TOKENS;
    batch.ids = ids;
    const int vocab = whole->config.vocab;
    float *workspace =
        (float *)demo_room(r, nn_workspace_floats(whole, &batch, false), sizeof(float), &failed);
    float *logits = (float *)demo_room(r, (int64_t)DEMO_SAMPLE_TOKENS * vocab, sizeof(float), &failed);
    int count = failed ? 0 : demo_begin_sample(r, tokenizer, "And it came to pass", ids);
    failed = count == 0;
    for (; !failed && count < DEMO_SAMPLE_TOKENS; count++) {
        batch.positions = count;
        (void)nn_forward(whole, weights, &batch, false, workspace, logits); /* one rank: nothing can fail */
        ids[count] =
            demo_draw(logits + (int64_t)(count - 1) * vocab, vocab, demo_random(seed, 2, (uint64_t)count));
    }
    xd_release(r->ctx, workspace);
    xd_release(r->ctx, logits);
    if (failed) return XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for a sample");
    XD_TRY(xd_tokenizer_decode(r->ctx, tokenizer, ids, count, false, sample, DEMO_SAMPLE - 1, &length));
    if (length > DEMO_SAMPLE - 1) length = DEMO_SAMPLE - 1;
    demo_mend_text(sample, length);
    sample[length] = 0;
    return XD_OK;
}
