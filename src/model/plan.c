/* Plans: a wrapper is laid out without memory and without ranks, and measured. */

#include "base/internal.h"
#include "comm/internal.h"
#include "model/parallel_internal.h"
#include "model/pipeline_internal.h"
#include "model/plan.h"
#include "train/internal.h"

#include <stdio.h>
#include <string.h>

static int xdi_plan_groups(const xd_memory_plan_desc *d) {
    return d->groups > 0 ? d->groups : 1;
}

static int xdi_plan_ranks(const xd_memory_plan_desc *d) {
    return d->ranks > 0 ? d->ranks : 1;
}

static xd_result xdi_plan_check(const xd_model *model, const xd_memory_plan_desc *d, int rank) {
    const int64_t all = (int64_t)xdi_plan_ranks(d) * xdi_plan_groups(d);
    XD_REQUIRE(model->ctx, !d->ddp != !d->fsdp, XD_ERROR_ARGUMENT,
               "%d kinds of wrappers: a plan is of one of ddp and fsdp",
               (d->ddp != NULL) + (d->fsdp != NULL));
    XD_REQUIRE(model->ctx, d->ranks >= 0 && d->groups >= 0, XD_ERROR_ARGUMENT, "%d data ranks in %d groups",
               d->ranks, d->groups);
    XD_REQUIRE(model->ctx, rank >= 0 && rank < all, XD_ERROR_ARGUMENT, "rank %d of %lld", rank,
               (long long)all);
    XD_REQUIRE(model->ctx, model->sealed && !model->parallel, XD_ERROR_STATE,
               "a plan of a model of %lld weights that is %s", (long long)model->weight_count,
               model->sealed ? "wrapped" : "not sealed");
    XDI_GIVEN_LIST(model->ctx, d->averages, d->average_count);
    return XD_OK;
}

/* ---- one rank ---- */

static xd_result xdi_plan_optimizer(xd_ctx *ctx, const xd_memory_plan_desc *d, const xd_param *params,
                                    int64_t count, xd_memory_plan *out) {
    if (d->optimizer) {
        xd_optimizer_desc o = *d->optimizer;
        o.params = params;
        o.param_count = count;
        XD_TRY(xdi_optimizer_bytes(ctx, &o, &out->optimizer));
    }
    for (int i = 0; i < d->average_count; i++) {
        xd_ema_desc e = d->averages[i];
        xd_memory_bytes bytes;
        e.params = params;
        e.param_count = count;
        XD_TRY(xdi_ema_bytes(ctx, &e, &bytes));
        out->averages.host += bytes.host;
        out->averages.device += bytes.device;
    }
    return XD_OK;
}

/* Objects that take lists compare the addresses of values and read none: here each weight's own description stands for its
 * values. */
static xd_result xdi_plan_list(const xdi_place *place, const xd_memory_plan_desc *d, xd_param *params,
                               xd_memory_plan *out) {
    const xd_model *model = place->model;
    int64_t count = 0;
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *w = model->weights[i];
        xdi_bucket_piece piece;
        if (!xdi_weight_is_listed(w)) continue;
        xd_param *param = &params[count++];
        *param = xdi_weight_describe_part(w, &piece);
        param->value = param->gradient = w;
        out->elements += param->count;
    }
    return xdi_plan_optimizer(place->parts_ctx, d, params, count, out);
}

static xd_result xdi_plan_measure(xd_parallel *p, const xd_memory_plan_desc *d, const xd_fsdp_desc *settings,
                                  xd_memory_plan *out) {
    const xdi_place *place = &p->place;
    xdi_room room;
    XD_TRY(xdi_experts_place(p, settings, d->expert_ranks ? d->expert_ranks : place->ranks));
    XD_TRY(xdi_parallel_lay(p, settings));
    XD_TRY(xdi_experts_lay(p, settings));
    XD_TRY(xdi_store_measure(&p->store, &room));
    if (p->experts) XD_TRY(xdi_store_measure(&p->experts->store, &room));
    out->wrapper = xd_parallel_memory(p);
    xd_ctx *ctx = place->ctx;
    const int64_t count = place->model->weight_count;
    xd_param *params = (xd_param *)xd_allocate(ctx, ((size_t)count + 1) * sizeof *params);
    XD_REQUIRE(ctx, params, XD_ERROR_MEMORY, "no room for a list of %lld weights", (long long)count);
    const xd_result result = xdi_plan_list(place, d, params, out);
    xd_release(ctx, params);
    return result;
}

static xd_memory_bytes xdi_plan_queues(const xd_memory_plan_desc *d, const xd_fsdp_desc *wrapper) {
    const xd_queue *queues[3];
    xd_memory_bytes sum;
    memset(&sum, 0, sizeof sum);
    queues[0] = wrapper->gathers;
    queues[1] = wrapper->reductions;
    queues[2] = d->pipeline ? d->pipeline->sends : NULL;
    for (int i = 0; i < 3; i++) {
        bool is_new = queues[i] != NULL;
        for (int k = 0; k < i; k++) is_new = is_new && queues[k] != queues[i];
        if (!is_new) continue;
        const xd_memory_bytes bytes = xdi_queue_memory(queues[i]);
        sum.host += bytes.host;
        sum.device += bytes.device;
    }
    return sum;
}

XD_API xd_result xd_plan_memory(xd_model *model, const xd_memory_plan_desc *desc, int rank,
                                xd_memory_plan *out) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN_IN_PLAN(model ? model->ctx : NULL, model, desc, out);
    xd_memory_plan plan;
    xd_fsdp_desc settings;
    XD_TRY(xdi_plan_check(model, desc, rank));
    xdi_place place;
    memset(&plan, 0, sizeof plan);
    xdi_place_set_kind(&place, &settings, desc->ddp, desc->fsdp);
    if (desc->pipeline && desc->pipeline_rank > place.settings.stage)
        place.settings.stage = desc->pipeline_rank;
    place.model = model;
    xdi_place_set_rank(&place, rank % xdi_plan_ranks(desc), xdi_plan_ranks(desc), rank / xdi_plan_ranks(desc),
                       xdi_plan_groups(desc));
    xd_parallel *p = xdi_parallel_at(&place);
    XD_REQUIRE(model->ctx, p, XD_ERROR_MEMORY, "no room for a wrapper");
    xd_result result = xdi_plan_measure(p, desc, &settings, &plan);
    xd_parallel_destroy(p);
    if (result == XD_OK && desc->pipeline)
        result = xdi_pipeline_bytes(model->ctx, desc->pipeline, desc->pipeline_rank, &plan.pipeline);
    plan.queues = xdi_plan_queues(desc, &settings);
    if (desc->inputs) plan.inputs = xdi_inputs_bytes(model, desc->inputs);
    if (result == XD_OK) *out = plan;
    return result;
}

/* ---- the table ---- */

enum { XDI_PLAN_COLUMNS = 11 };

/* values, gradients, gathered, whole gradients, parts on the host, optimizer, averages, inputs, pipeline, queues, all. */
static void xdi_plan_columns(const xd_memory_plan *plan, size_t *columns) {
    const xd_parallel_bytes *w = &plan->wrapper;
    const size_t parts[] = { w->values,
                             w->gradients,
                             w->gathered,
                             w->whole_gradients,
                             w->host,
                             plan->optimizer.host + plan->optimizer.device,
                             plan->averages.host + plan->averages.device,
                             plan->inputs.host + plan->inputs.device,
                             plan->pipeline.host + plan->pipeline.device,
                             plan->queues.host + plan->queues.device };
    columns[XDI_PLAN_COLUMNS - 1] = 0;
    for (int i = 0; i < XDI_PLAN_COLUMNS - 1; i++) {
        columns[i] = parts[i];
        columns[XDI_PLAN_COLUMNS - 1] += parts[i];
    }
}

static void xdi_plan_write(xd_ctx *ctx, const xd_build_report *report, const char *line) {
    if (report->write)
        report->write(report->user, line);
    else
        xd_log(ctx, XD_LOG_INFO, "%s", line);
}

static void xdi_plan_write_row(xd_ctx *ctx, const xd_build_report *report, const char *head,
                               const size_t *columns) {
    char line[256]; /* for the longest numbers that a size_t can be */
    int used = snprintf(line, sizeof line, "%8s", head);
    for (int i = 0; i < XDI_PLAN_COLUMNS; i++)
        used += snprintf(line + used, sizeof line - (size_t)used, " %12.1f", (double)columns[i] / 1024.0);
    xdi_plan_write(ctx, report, line);
}

XD_API xd_result xd_plan_print(xd_model *model, const xd_memory_plan_desc *desc, xd_build_report report) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN_IN_PLAN(model ? model->ctx : NULL, model, desc);
    size_t columns[XDI_PLAN_COLUMNS], max[XDI_PLAN_COLUMNS] = { 0 }, sum[XDI_PLAN_COLUMNS] = { 0 };
    const int ranks = xdi_plan_ranks(desc) * xdi_plan_groups(desc);
    char head[24];
    xd_memory_plan plan;
    XD_TRY(xd_plan_memory(model, desc, 0, &plan)); /* what is wrong is wrong on all */
    xdi_plan_write(model->ctx, &report,
                   "KiB of       values    gradients     gathered  whole grad.      on host    optimizer     "
                   "averages       inputs     pipeline       queues          all");
    for (int rank = 0; rank < ranks; rank++) {
        XD_TRY(xd_plan_memory(model, desc, rank, &plan));
        xdi_plan_columns(&plan, columns);
        snprintf(head, sizeof head, "rank %d", rank);
        xdi_plan_write_row(model->ctx, &report, head, columns);
        for (int i = 0; i < XDI_PLAN_COLUMNS; i++) {
            sum[i] += columns[i];
            if (columns[i] > max[i]) max[i] = columns[i];
        }
    }
    xdi_plan_write_row(model->ctx, &report, "largest", max);
    xdi_plan_write_row(model->ctx, &report, "sum", sum);
    return XD_OK;
}
