/* One step of a distillation: all micro-batches of the roles that train, and what follows from them on all ranks. */

#include "base/internal.h"
#include "dmd/state.h"
#include "model/parallel_internal.h"

#include <string.h>

/* ---- micro-batches ---- */

static double *xdi_dmd_sent(const xd_dmd *d) {
    const int64_t ranks = d->desc.data ? xd_comm_size(d->desc.data) : 1;
    return d->table.rows + ranks * (d->micro_batches + 1) * XDI_DMD_COLUMNS;
}

static void xdi_dmd_note(double *row, int64_t number, const xd_dmd_batch *batch,
                         const xd_dmd_values *values) {
    row[XDI_DMD_NUMBER] = (double)number;
    row[XDI_DMD_FIRST] = (double)batch->first;
    row[XDI_DMD_SAMPLES] = (double)batch->samples;
    row[XDI_DMD_VSD] = values->vsd;
    row[XDI_DMD_GENERATOR] = values->generator;
    row[XDI_DMD_FAKE_SCORE] = values->fake_score;
    row[XDI_DMD_DISCRIMINATOR] = values->discriminator;
    row[XDI_DMD_R1] = values->r1;
    row[XDI_DMD_DISTANCE] = values->distance;
    row[XDI_DMD_REGRESSION] = values->regression;
}

/* What a step does. */
typedef struct xdi_dmd_source {
    xd_dmd_batch_function batch;
    void *user;
    bool trains[XD_DMD_ROLES]; /* who is stepped */
    bool warm_up;
} xdi_dmd_source;

/* The batch of a micro-batch. Beyond the rank's own, networks are called without samples, for those that gather. */
static xd_result xdi_dmd_open_micro_batch(xd_dmd *d, const xdi_dmd_source *source, int64_t k,
                                          xd_dmd_batch *batch) {
    const xd_dmd_desc *desc = &d->desc;
    const int64_t number = xd_parallel_micro_batch(desc->trainers[XD_DMD_STUDENT].parallel, k);
    memset(batch, 0, sizeof *batch);
    d->beyond = number < 0 ? k : -1;
    if (number < 0) return XD_OK;
    /* Before the losses' exchanges; ranks of one micro-batch have the same numbers. */
    const xd_result given = source->batch(source->user, number, batch);
    return desc->sizes.split ? xd_agree(desc->sizes.split, given) : given;
}

static xd_result xdi_dmd_run_micro_batch(xd_dmd *d, const xdi_dmd_source *source, int64_t k,
                                         xd_dmd_batch *batch, xd_dmd_values *values) {
    XD_TRY(xdi_dmd_open_micro_batch(d, source, k, batch));
    if (source->warm_up) return xdi_dmd_warm_up(d, k, batch, values);
    if (source->trains[XD_DMD_STUDENT]) XD_TRY(xd_dmd_student(d, k, batch, values));
    if (source->trains[XD_DMD_FAKE_SCORE]) XD_TRY(xd_dmd_fake_score(d, k, batch, values));
    if (source->trains[XD_DMD_DISCRIMINATOR]) XD_TRY(xd_dmd_discriminator(d, k, batch, values));
    return XD_OK;
}

static xd_result xdi_dmd_run_micro_batches(xd_dmd *d, const xdi_dmd_source *source) {
    double *row = xdi_dmd_sent(d);
    for (int64_t k = 0; k < d->micro_batches; k++, row += XDI_DMD_COLUMNS) {
        xd_dmd_batch batch;
        xd_dmd_values values;
        memset(&values, 0, sizeof values);
        const xd_result result = xdi_dmd_run_micro_batch(d, source, k, &batch, &values);
        d->beyond = -1;
        XD_TRY(result);
        xdi_dmd_note(row, xd_parallel_micro_batch(d->desc.trainers[XD_DMD_STUDENT].parallel, k), &batch,
                     &values);
    }
    return XD_OK;
}

/* f-distill: the logits of all micro-batches, for weights of the whole step. */
static xd_result xdi_dmd_look_ahead(xd_dmd *d, const xdi_dmd_source *source, xd_result result) {
    for (int64_t k = 0; k < d->micro_batches && result == XD_OK; k++) {
        xd_dmd_batch batch;
        result = xdi_dmd_open_micro_batch(d, source, k, &batch);
        if (result == XD_OK) result = xdi_dmd_collect_ratios(d, k, &batch);
        d->beyond = -1;
    }
    XD_TRY(xdi_dmd_agree(&d->desc, result)); /* nobody waits for the weights of a rank that has failed */
    return xdi_dmd_weigh(d);
}

/* ---- what all ranks know ---- */

/* The micro-batches of all ranks have each sample of the step once, whatever their order. */
static xd_result xdi_dmd_check_cover(const xd_dmd *d, int64_t rows, int64_t step_samples) {
    int64_t samples = 0;
    for (int64_t i = 0; i < rows; i++) {
        const double *a = d->table.rows + i * XDI_DMD_COLUMNS;
        if (a[XDI_DMD_NUMBER] < 0.0) continue;
        samples += (int64_t)a[XDI_DMD_SAMPLES];
        for (int64_t k = 0; k < i; k++) {
            const double *b = d->table.rows + k * XDI_DMD_COLUMNS;
            const bool apart = b[XDI_DMD_NUMBER] < 0.0 ||
                               a[XDI_DMD_FIRST] + a[XDI_DMD_SAMPLES] <= b[XDI_DMD_FIRST] ||
                               b[XDI_DMD_FIRST] + b[XDI_DMD_SAMPLES] <= a[XDI_DMD_FIRST];
            XD_REQUIRE(d->ctx, apart || a[XDI_DMD_SAMPLES] <= 0.0 || b[XDI_DMD_SAMPLES] <= 0.0,
                       XD_ERROR_ARGUMENT,
                       "micro-batches %.0f and %.0f begin at samples %.0f and %.0f and have %.0f and %.0f: "
                       "`first` counts over the whole step",
                       b[XDI_DMD_NUMBER], a[XDI_DMD_NUMBER], b[XDI_DMD_FIRST], a[XDI_DMD_FIRST],
                       b[XDI_DMD_SAMPLES], a[XDI_DMD_SAMPLES]);
        }
    }
    XD_REQUIRE(d->ctx, samples == step_samples, XD_ERROR_ARGUMENT,
               "step_samples is %lld, the micro-batches of all ranks have %lld", (long long)step_samples,
               (long long)samples);
    return XD_OK;
}

/* Micro-batches are added in the order of their numbers, so that the sum does not depend on who had them. */
static void xdi_dmd_sum_values(const xd_dmd *d, int64_t rows, xd_dmd_values *out) {
    const int64_t total = xd_parallel_micro_batches(d->desc.trainers[XD_DMD_STUDENT].parallel).total;
    for (int64_t number = 0; number < total; number++)
        for (int64_t i = 0; i < rows; i++) {
            const double *row = d->table.rows + i * XDI_DMD_COLUMNS;
            if (row[XDI_DMD_NUMBER] != (double)number) continue;
            out->vsd += row[XDI_DMD_VSD];
            out->generator += row[XDI_DMD_GENERATOR];
            out->fake_score += row[XDI_DMD_FAKE_SCORE];
            out->discriminator += row[XDI_DMD_DISCRIMINATOR];
            out->r1 += row[XDI_DMD_R1];
            out->distance += row[XDI_DMD_DISTANCE];
            out->regression += row[XDI_DMD_REGRESSION];
        }
}

/* Values of all ranks; a finding of any of them is then in everybody's status. */
static xd_result xdi_dmd_share(xd_dmd *d, bool warm_up, xd_dmd_values *out) {
    const int ranks = d->desc.data ? xd_comm_size(d->desc.data) : 1;
    const int64_t rows = d->micro_batches + 1;
    double *sent = xdi_dmd_sent(d), *own = sent + d->micro_batches * XDI_DMD_COLUMNS;
    xd_status status;
    XD_TRY(xd_read(d->ctx, &status, d->results.status, sizeof status));
    memset(own, 0, XDI_DMD_COLUMNS * sizeof *own);
    own[XDI_DMD_NUMBER] = -1.0;
    own[XDI_DMD_VSD] = (double)status.not_finite;
    if (d->desc.data) {
        for (int r = 0; r < ranks; r++) d->table.counts[r] = rows * XDI_DMD_COLUMNS;
        XD_TRY(xd_all_gather(d->desc.data, sent, d->table.rows, d->table.counts, XD_DTYPE_F64));
    } else {
        memcpy(d->table.rows, sent, (size_t)(rows * XDI_DMD_COLUMNS) * sizeof *sent);
    }
    XD_TRY(xdi_dmd_check_cover(d, rows * ranks,
                               warm_up ? xdi_dmd_warm_up_samples(&d->desc) : d->desc.sizes.step_samples));
    memset(out, 0, sizeof *out);
    xdi_dmd_sum_values(d, rows * ranks, out);
    for (int r = 0; r < ranks && status.not_finite == 0; r++)
        status.not_finite = (int64_t)d->table.rows[((r + 1) * rows - 1) * XDI_DMD_COLUMNS + XDI_DMD_VSD];
    return xdi_dmd_send(d->ctx, d->results.status, &status, sizeof status);
}

/* ---- steps ---- */

static xd_result xdi_dmd_reduce(xd_dmd *d, xd_dmd_role role) {
    const xd_dmd_trainer *trainer = &d->desc.trainers[role];
    const xd_optimizer_desc *list = xd_optimizer_settings(trainer->optimizer);
    xd_gradient_norm_desc norm;
    memset(&norm, 0, sizeof norm);
    norm.params = list->params;
    norm.param_count = list->param_count;
    norm.max_norm = trainer->max_norm;
    norm.status = d->results.status;
    XD_TRY(xd_parallel_reduce(trainer->parallel));
    return xd_gradient_norm_compute(d->ctx, trainer->norm ? trainer->norm : d->desc.data, &norm,
                                    &d->norms[role]);
}

static xd_result xdi_dmd_advance(xd_dmd *d, xd_dmd_role role) {
    const xd_dmd_trainer *trainer = &d->desc.trainers[role];
    xd_optimizer_step_desc step;
    memset(&step, 0, sizeof step);
    step.gradient_scale = &d->norms[role].coefficient;
    step.status = d->results.status;
    step.averages = trainer->averages;
    step.average_count = trainer->average_count;
    XD_TRY(xd_optimizer_step(trainer->optimizer, &step, NULL));
    return xd_parallel_publish(trainer->parallel);
}

static xd_result xdi_dmd_read_norm(xd_dmd *d, int role, double *out) {
    xd_gradient_norm norm;
    XD_TRY(xd_read(d->ctx, &norm, &d->norms[role], sizeof norm));
    *out = norm.norm;
    return XD_OK;
}

/* All norms before any step: a finding in one role's gradient keeps the others from stepping too. */
static xd_result xdi_dmd_step_roles(xd_dmd *d, const xdi_dmd_source *source, xd_dmd_values *values) {
    xd_status status;
    for (int role = 0; role < XD_DMD_TEACHER; role++)
        if (source->trains[role]) XD_TRY(xdi_dmd_reduce(d, (xd_dmd_role)role));
    for (int role = 0; role < XD_DMD_TEACHER; role++)
        if (source->trains[role]) XD_TRY(xdi_dmd_advance(d, (xd_dmd_role)role));
    for (int role = 0; role < XD_DMD_TEACHER; role++)
        if (source->trains[role]) XD_TRY(xdi_dmd_read_norm(d, role, &values->norms[role]));
    XD_TRY(xd_read(d->ctx, &status, d->results.status, sizeof status));
    values->skipped = status.not_finite != 0 || status.overflow != 0;
    return XD_OK;
}

static xd_result xdi_dmd_check_trains(const xd_dmd *d, const xdi_dmd_source *source) {
    static const char *const names[] = { "student", "fake score", "discriminator" };
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        const xd_dmd_trainer *trainer = &d->desc.trainers[role];
        const bool trains = source->warm_up ? source->trains[role]
                                            : role != XD_DMD_DISCRIMINATOR || xdi_dmd_adversarial(&d->desc);
        XD_REQUIRE(d->ctx, !trains || (trainer->parallel && trainer->optimizer), XD_ERROR_STATE,
                   "the %s has no %s", names[role], trainer->parallel ? "optimizer" : "wrapper");
    }
    return XD_OK;
}

/* What was added up for a step that failed is forgotten, so that it may be made again. */
static void xdi_dmd_drop_step(const xd_dmd *d, const xdi_dmd_source *source) {
    for (int role = 0; role < XD_DMD_TEACHER; role++)
        if (source->trains[role] && d->desc.trainers[role].parallel)
            xdi_parallel_drop_micro_batches(d->desc.trainers[role].parallel);
}

/* Everything but the counters. */
static xd_result xdi_dmd_try_step(xd_dmd *d, const xdi_dmd_source *source, xd_dmd_values *values) {
    const xd_launch launch = xd_ctx_launch(d->ctx);
    const bool weighs = d->desc.gan.fdistill.on && source->trains[XD_DMD_STUDENT] && !source->warm_up;
    xd_result result = xdi_dmd_check_trains(d, source);
    if (result == XD_OK)
        result =
            xd_ctx_kernels(d->ctx)->memory.fill(&launch, d->results.status, 0, sizeof *d->results.status);
    if (weighs) result = xdi_dmd_look_ahead(d, source, result);
    if (result == XD_OK) result = xdi_dmd_run_micro_batches(d, source);
    XD_TRY(xdi_dmd_agree(&d->desc, result));
    XD_TRY(xdi_dmd_share(d, source->warm_up, values));
    return xdi_dmd_step_roles(d, source, values);
}

static xd_result xdi_dmd_make_step(xd_dmd *d, const xdi_dmd_source *source, xd_dmd_values *values) {
    const xd_result result = xdi_dmd_try_step(d, source, values);
    if (result != XD_OK) xdi_dmd_drop_step(d, source);
    return result;
}

XD_API xd_result xd_dmd_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user, xd_dmd_values *values) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, batch);
    xdi_dmd_source source;
    xd_dmd_values shared;
    memset(&source, 0, sizeof source);
    source.batch = batch;
    source.user = user;
    for (int role = 0; role < XD_DMD_ROLES; role++)
        source.trains[role] = xd_dmd_trains(&dmd->desc, (xd_dmd_role)role, dmd->record.step);
    if (dmd->desc.gan.fdistill.on)
        xdi_dmd_forget_ratios(dmd); /* an earlier step's bins are not to be undone */
    const xd_result made = xdi_dmd_make_step(dmd, &source, &shared);
    if (made != XD_OK || shared.skipped) (void)xdi_dmd_undo_weigh(dmd); /* of a broken device: made says so */
    XD_TRY(made);
    for (int64_t k = 0; k < dmd->micro_batches && shared.skipped; k++)
        dmd->kept.counts[k] = -1; /* they may be what was found */
    for (int role = 0; role < XD_DMD_TEACHER && !shared.skipped; role++)
        dmd->record.updates[role] += source.trains[role];
    dmd->record.step++;
    if (values) *values = shared;
    return XD_OK;
}

XD_API xd_result xd_dmd_warm_up_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user,
                                     xd_dmd_values *values) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, batch);
    xdi_dmd_source source;
    xd_dmd_values shared;
    memset(&source, 0, sizeof source);
    source.batch = batch;
    source.user = user;
    source.trains[XD_DMD_STUDENT] = source.warm_up = true;
    XD_TRY(xdi_dmd_make_step(dmd, &source, &shared));
    dmd->record.warm_up++;
    if (values) *values = shared;
    return XD_OK;
}
