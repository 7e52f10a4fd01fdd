/* demo_measure.c - what a model is worth: the held-out text. */
#include "demo_rank.h"

#include <math.h>
#include <string.h>

/* ---- held-out text ---- */

/* A model, its text, and where its rows go. */
typedef struct demo_exam {
    const nn_model *model;
    const nn_source *source;
    const demo_text *text;
    int32_t *ids;
    int64_t *labels;
    float *workspace;
    const demo_logits *logits;
    int64_t stride; /* from one measured row to the next, in rows; 1 -> all */
    int64_t bytes;  /* of the tokens that were predicted, once taken */
} demo_exam;

/* Row `row` of those that are measured begins at row * stride * DEMO_ROW; a token is predicted once, from what
 * precedes it in its row. What lies past the end does not count. */
static void demo_read_heldout(const demo_rank *r, const demo_exam *exam, int64_t first_row) {
    const demo_text *text = exam->text;
    int64_t at = 0;
    for (int s = 0; s < r->batch.sequences; s++)
        for (int i = 0; i < r->batch.positions; i++, at++) {
            const int64_t place = (first_row + r->sequences[s]) * exam->stride * DEMO_ROW + r->position[i];
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

/* Bytes of the tokens that the row at `start` predicts. */
static int64_t demo_row_bytes(const demo_text *text, int64_t start) {
    const int64_t last = start + DEMO_ROW < text->count ? start + DEMO_ROW : text->count - 1;
    return text->spans[last].end - text->spans[start].end;
}

static xd_result demo_take_exam(demo_rank *r, demo_exam *exam, double *bits_per_byte) {
    const demo_text *text = exam->text;
    const int64_t apart = exam->stride * DEMO_ROW; /* tokens */
    const xd_loss_desc desc = demo_exam_loss(r, exam);
    double nats = 0.0;
    exam->bytes = 0;
    for (int64_t row = 0; row * apart + 1 < text->count; row += DEMO_BATCH) {
        xd_loss_values values;
        demo_read_heldout(r, exam, row);
        XD_TRY(
            demo_forward(r, exam->model, exam->source, exam->ids, false, exam->workspace, exam->logits->own));
        XD_TRY(xd_loss(r->ctx, &desc, &values));
        nats += values.hard;
    }
    for (int64_t start = 0; start + 1 < text->count; start += apart)
        exam->bytes += demo_row_bytes(text, start);
    *bits_per_byte = nats / log(2.0) / (double)exam->bytes;
    return XD_OK;
}

static demo_exam demo_student_exam(demo_rank *r, const nn_source *source) {
    const demo_exam exam = { &r->model, source, r->job->heldout, r->ids, r->labels, r->workspace, &r->logits,
                             1,         0 };
    return exam;
}

xd_result demo_evaluate_student(demo_rank *r, const nn_source *source, double *bits_per_byte) {
    demo_exam exam = demo_student_exam(r, source);
    return demo_take_exam(r, &exam, bits_per_byte);
}

xd_result demo_glance_at_student(demo_rank *r, const nn_source *source, double *bits_per_byte,
                                 int64_t *bytes) {
    demo_exam exam = demo_student_exam(r, source);
    const int64_t rows = (exam.text->count + DEMO_ROW - 2) / DEMO_ROW;
    exam.stride = (rows + DEMO_GLANCE_ROWS - 1) / DEMO_GLANCE_ROWS;
    XD_TRY(demo_take_exam(r, &exam, bits_per_byte));
    *bytes = exam.bytes;
    return XD_OK;
}

xd_result demo_evaluate_teacher(demo_rank *r, double *bits_per_byte) {
    nn_flat flat = { &r->teacher, r->teacher_weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    demo_exam exam = { &r->teacher,
                       &source,
                       r->job->teacher_heldout,
                       r->teacher_ids,
                       r->teacher_labels,
                       r->teacher_workspace,
                       &r->teacher_logits,
                       1,
                       0 };
    return demo_take_exam(r, &exam, bits_per_byte);
}

/* ---- when ---- */

int demo_point_count(int steps) {
    return steps < DEMO_POINTS ? steps : DEMO_POINTS;
}

int demo_point_step(int i, int steps) {
    return (int)((int64_t)steps * (i + 1) / demo_point_count(steps));
}

int demo_point_at(int done, int steps) {
    for (int i = 0; i < demo_point_count(steps); i++)
        if (demo_point_step(i, steps) == done) return i;
    return -1;
}
