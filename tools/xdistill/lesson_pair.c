/* lesson_pair.c - the loss of a student whose teacher has another tokenizer: a row at a time, each from its part of the cache or from
 * the teacher that runs. */
#include "lesson_inside.h"

#include <string.h>

static xd_rows pair_row_logits(const lesson_rank *r, int row) {
    const int64_t columns = r->job->model.config.vocab, length = r->job->desc->row;
    return xd_rows_of(r->logits + (int64_t)row * length * columns, XD_DTYPE_F32, length, columns);
}

/* The teacher reads its part of the row alone; a cache has read what stands before, too. */
static xd_result pair_run_teacher(lesson_rank *r) {
    const lm *teacher = r->job->desc->live;
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    if (!teacher || r->pair_row.held == 0) return XD_OK;
    batch.sequences = 1;
    batch.positions = r->pair_row.held;
    batch.ids = r->job->desc->pair->teacher->ids + r->pair_row.from;
    return (xd_result)nn_forward(&teacher->model, teacher->weights, &batch, false, r->teacher_workspace,
                                 r->teacher_logits);
}

static xd_xtoken_teacher pair_teacher(const lesson_rank *r) {
    const lesson_desc *d = r->job->desc;
    const pairing_row *row = &r->pair_row;
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(d->live ? XD_XTOKEN_PROJECTED : XD_XTOKEN_CACHED);
    teacher.logits.rows = row->places;
    teacher.student_chunks = row->student_chunks;
    teacher.teacher_chunks = row->teacher_chunks;
    teacher.chunks = row->length;
    teacher.chunk_mask = row->mask;
    teacher.projected.projection = teacher.cached.projection = &d->pair->projection;
    teacher.cached.positions = row->cache_positions;
    if (d->live)
        teacher.logits = xd_rows_of(r->teacher_logits, XD_DTYPE_F32, row->places, d->live->config.vocab);
    else
        teacher.cached.cache = d->teacher->parts[row->part];
    return teacher;
}

/* Both losses of one row, their gradient over its logits. */
static xd_result pair_row_loss(lesson_rank *r, int row, double kd, double *loss) {
    const lesson_desc *d = r->job->desc;
    const double share = 1.0 / d->rows;
    const xd_xtoken_teacher teacher = pair_teacher(r);
    xd_xtoken_desc desc = xd_xtoken_defaults();
    xd_xtoken_values values;
    desc.student = pair_row_logits(r, row);
    desc.vocab = r->columns;
    desc.sequences = 1;
    desc.common.labels = xd_ids_of(r->labels + (int64_t)row * d->row, XD_DTYPE_I32);
    desc.common.scale = &share;
    desc.common.gradient = desc.student;
    desc.teachers = &teacher;
    desc.teacher_count = 1;
    desc.temperature = d->temperature;
    desc.kd_weight = kd;
    desc.ce_weight = d->ce_weight;
    XD_TRY(loss_of_xtoken(r->ctx, &r->losses, &desc, &values));
    *loss += values.loss;
    return XD_OK;
}

/* A row without a chunk has no loss of the teacher. */
xd_result lesson_pair_loss(lesson_rank *r, double *loss) {
    const lesson_desc *d = r->job->desc;
    double sum = 0.0;
    xd_result result = XD_OK;
    for (int row = 0; row < r->batch.sequences && result == XD_OK; row++) {
        const xd_rows logits = pair_row_logits(r, row);
        pairing_read_row(d->pair, d->live ? 0 : d->teacher->part_tokens, r->starts[row], &r->pair_row);
        const double kd = r->pair_row.held > 0 ? d->kd_weight : 0.0;
        if (kd == 0.0 && d->ce_weight == 0.0)
            memset(logits.data, 0, (size_t)(logits.rows * logits.cols) * sizeof(float));
        else if ((result = pair_run_teacher(r)) == XD_OK)
            result = pair_row_loss(r, row, kd, &sum);
    }
    XD_TRY(xd_agree(r->world, result));
    float all = (float)sum;
    XD_TRY(xd_all_reduce(r->world, &all, &all, 1, XD_DTYPE_F32, XD_SUM));
    *loss = (double)all;
    return XD_OK;
}
