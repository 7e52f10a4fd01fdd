/* lesson_step.c - a step: rows, forward, losses, backward, update. */
#include "lesson_inside.h"

#include <math.h>
#include <string.h>

/* ---- rows ---- */

/* A repeatable number in [0, 1) for (seed, step, row). */
static double lesson_draw(uint64_t seed, int step, int row) {
    const xd_philox random = { .seed = seed, .stream = XD_STREAM_USER };
    return xd_philox_uniform_f64(&random, (int64_t)step * 65536 + row);
}

/* A row is desc->row tokens from a random place, each of which predicts the next. */
static xd_result lesson_read(lesson_rank *r, int step) {
    const lesson_desc *d = r->job->desc;
    const int64_t places = d->text->count - d->row;
    for (int i = 0; i < r->batch.sequences; i++) {
        const double drawn = lesson_draw(d->seed, step, r->first_row + i);
        int64_t start = (int64_t)(drawn * (double)places);
        const int64_t at = (int64_t)i * d->row;
        if (start >= places) start = places - 1;
        r->starts[i] = start;
        for (int t = 0; t < d->row; t++) {
            r->ids[at + t] = d->text->ids[start + t];
            r->labels[at + t] = d->text->ids[start + t + 1];
        }
        if (d->teacher && !d->pair)
            XD_TRY(cached_read(r->ctx, d->teacher, start, d->row, r->cached_ids + at * d->teacher->entries,
                               r->probabilities + at * d->teacher->entries));
    }
    return XD_OK;
}

/* ---- losses ---- */

static xd_rows lesson_rows(const lesson_rank *r, float *data) {
    return xd_rows_of(data, XD_DTYPE_F32, (int64_t)r->batch.sequences * r->job->desc->row,
                      r->job->model.config.vocab);
}

/* Cross entropy, its gradient times `weight` over the logits. */
static xd_result lesson_hard(lesson_rank *r, double weight, double *loss) {
    const lesson_desc *d = r->job->desc;
    xd_loss_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    desc.student = lesson_rows(r, r->logits);
    desc.vocab = r->columns;
    desc.hard_weight = 1.0;
    desc.common.labels = xd_ids_of(r->labels, XD_DTYPE_I32);
    desc.common.comm = r->world;
    desc.common.denominator_value = (double)d->rows * d->row;
    desc.common.scale = &weight;
    if (weight != 0.0) desc.common.gradient = desc.student;
    XD_TRY(loss_of_logits(r->ctx, &r->losses, &desc, &values));
    *loss = values.hard;
    return XD_OK;
}

/* The cache's entries as the loss reads them. */
static void lesson_targets(lesson_rank *r) {
    const int64_t count = (int64_t)r->batch.sequences * r->job->desc->row * r->job->desc->teacher->entries;
    for (int64_t i = 0; i < count; i++) r->values[i] = (float)log(r->probabilities[i]);
}

/* KL to the cached teacher, its gradient times `weight` in `out`. */
static xd_result lesson_soft(lesson_rank *r, double weight, float *out, double *loss) {
    const lesson_desc *d = r->job->desc;
    xd_topk_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    lesson_targets(r);
    desc.student = lesson_rows(r, r->logits);
    desc.vocab = r->columns;
    desc.k = d->teacher->entries;
    desc.ids = xd_ids_of(r->cached_ids, XD_DTYPE_I32);
    desc.values = r->values;
    desc.temperature = desc.values_temperature = d->temperature;
    desc.mode = d->teacher->drawn ? XD_TOPK_TRUNCATE : XD_TOPK_TAIL;
    desc.common.scale = &weight;
    desc.common.labels = xd_ids_of(r->labels, XD_DTYPE_I32);
    desc.common.comm = r->world;
    desc.common.denominator_value = (double)d->rows * d->row;
    desc.common.gradient = lesson_rows(r, out);
    XD_TRY(loss_of_topk(r->ctx, &r->losses, &desc, &values));
    *loss = values.soft;
    return XD_OK;
}

/* Logits -> their gradient, and the loss. */
static xd_result lesson_loss(lesson_rank *r, double *loss) {
    const lesson_desc *d = r->job->desc;
    if (d->pair) return lesson_pair_loss(r, loss);
    if (d->live) return lesson_live_loss(r, loss);
    const double kd = d->teacher ? d->kd_weight : 0.0, ce = d->teacher ? d->ce_weight : 1.0;
    const int64_t count = (int64_t)r->batch.sequences * d->row * r->job->model.config.vocab;
    double hard = 0.0, soft = 0.0;
    float *beside = r->beside ? r->beside : r->logits;
    if (kd != 0.0) XD_TRY(lesson_soft(r, kd, beside, &soft));
    if (ce != 0.0) XD_TRY(lesson_hard(r, ce, &hard));
    for (int64_t i = 0; kd != 0.0 && ce != 0.0 && i < count; i++) r->logits[i] += beside[i];
    *loss = soft + hard;
    return XD_OK;
}

/* ---- update ---- */

/* Warm-up over the first twentieth, then a cosine down to a twentieth. */
static double lesson_rate(const lesson_desc *d, int step) {
    const int warm = d->steps / 20 > 0 ? d->steps / 20 : 1;
    if (step < warm) return d->learning_rate * (step + 1) / warm;
    return d->learning_rate *
           (0.05 + 0.475 * (1.0 + cos(3.14159265358979 * (step - warm) / (d->steps - warm))));
}

/* Every rank has the whole gradient, and steps its own parameters of the weights that all share. */
static xd_result lesson_update(lesson_rank *r, int step) {
    const lesson_job *job = r->job;
    xd_gradient_norm_desc clip;
    xd_gradient_norm norm;
    xd_optimizer_step_desc desc;
    memset(&clip, 0, sizeof clip);
    memset(&desc, 0, sizeof desc);
    XD_TRY(xd_all_reduce(r->world, r->gradient + job->begin, r->gradient + job->begin, job->end - job->begin,
                         XD_DTYPE_F32, XD_SUM));
    clip.params = r->params;
    clip.param_count = r->param_count;
    clip.max_norm = 1.0;
    XD_TRY(xd_gradient_norm_compute(r->ctx, NULL, &clip, &norm));
    XD_REQUIRE(r->ctx, norm.not_finite == 0, XD_ERROR_DATA,
               "step %d: %lld elements of the gradient are not finite; try a smaller --lr than %g", step + 1,
               (long long)norm.not_finite, job->desc->learning_rate);
    XD_TRY(xd_optimizer_set_learning_rate(r->optimizer, lesson_rate(job->desc, step)));
    desc.gradient_scale = &norm.coefficient;
    XD_TRY(xd_optimizer_step(r->optimizer, &desc, NULL));
    return xd_barrier(r->world);
}

xd_result lesson_step(lesson_rank *r, int step, double *loss) {
    const lesson_job *job = r->job;
    XD_TRY(xd_agree(r->world, lesson_read(r, step)));
    XD_TRY((xd_result)nn_forward(&job->model, job->weights, &r->batch, true, r->workspace, r->logits));
    XD_TRY(lesson_loss(r, loss));
    memset(r->gradient + job->begin, 0, (size_t)(job->end - job->begin) * sizeof *r->gradient);
    XD_TRY(
        (xd_result)nn_backward(&job->model, job->weights, &r->batch, r->workspace, r->logits, r->gradient));
    return lesson_update(r, step);
}
