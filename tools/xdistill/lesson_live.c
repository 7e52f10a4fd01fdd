/* lesson_live.c - the loss of a student whose teacher runs on every row. */
#include "lesson_inside.h"
#include "ranks.h"

#include <string.h>

/* What the teacher reads at once: all rows of a rank, or its part of one where it has another tokenizer. */
static nn_batch live_batch(const lesson_desc *d) {
    const int places = PAIRING_PLACES * d->row;
    nn_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = d->pair ? 1 : (d->rows + d->ranks - 1) / d->ranks;
    batch.positions = d->pair ? (places < d->live->positions ? places : d->live->positions) : d->row;
    return batch;
}

int64_t lesson_live_bytes(const lesson_desc *d) {
    if (!d->live) return 0;
    const nn_batch batch = live_batch(d);
    return 4 * (nn_workspace_floats(&d->live->model, &batch, false) +
                (int64_t)batch.sequences * batch.positions * d->live->config.vocab);
}

xd_result lesson_live_create(lesson_rank *r) {
    const lesson_desc *d = r->job->desc;
    bool failed = false;
    if (!d->live) return XD_OK;
    const nn_batch batch = live_batch(d);
    const int64_t floats = nn_workspace_floats(&d->live->model, &batch, false);
    const int64_t logits = (int64_t)batch.sequences * batch.positions * d->live->config.vocab;
    r->teacher_workspace = (float *)ranks_room(r->ctx, floats, sizeof(float), &failed);
    r->teacher_logits = (float *)ranks_room(r->ctx, logits, sizeof(float), &failed);
    return failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the teacher over %d rows of %d tokens",
                            batch.sequences, batch.positions)
                  : XD_OK;
}

void lesson_live_free(lesson_rank *r) {
    xd_release(r->ctx, r->teacher_workspace);
    xd_release(r->ctx, r->teacher_logits);
}

/* Both models have read the same tokens: a row begins with nothing before it. */
xd_result lesson_live_loss(lesson_rank *r, double *loss) {
    const lesson_desc *d = r->job->desc;
    const nn_model *teacher = &d->live->model;
    const int64_t rows = (int64_t)r->batch.sequences * d->row;
    xd_loss_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    XD_TRY((xd_result)nn_forward(teacher, d->live->weights, &r->batch, false, r->teacher_workspace,
                                 r->teacher_logits));
    desc.student = xd_rows_of(r->logits, XD_DTYPE_F32, rows, r->job->model.config.vocab);
    desc.teacher = xd_rows_of(r->teacher_logits, XD_DTYPE_F32, rows, teacher->config.vocab);
    desc.vocab = r->columns;
    desc.hard_weight = d->ce_weight;
    desc.soft_weight = d->kd_weight;
    desc.temperature = d->temperature;
    desc.common.labels = xd_ids_of(r->labels, XD_DTYPE_I32);
    desc.common.comm = r->world;
    desc.common.denominator_value = (double)d->rows * d->row;
    desc.common.gradient = desc.student;
    XD_TRY(loss_of_logits(r->ctx, &r->losses, &desc, &values));
    *loss = values.loss;
    return XD_OK;
}
