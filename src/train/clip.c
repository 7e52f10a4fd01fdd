/* Norms of gradients over ranks, and clipping by them. */

#include "comm/internal.h"
#include "train/clip.h"
#include "train/internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What ranks exchange: the sum, or the limbs of the exact one, then these counts. The last is a hash of the settings, whose sum is
 * size times one's own where all have the same. */
enum {
    XDI_CLIP_BATCH = 1024,
    XDI_CLIP_COUNTS = 4,
    XDI_CLIP_NOT_FINITE = 0,
    XDI_CLIP_NAN = 1,
    XDI_CLIP_FAILED = 2,
    XDI_CLIP_SETTINGS = 3
};

static void xdi_clip_list_settings(xdi_facts *facts, const xd_gradient_norm_desc *d) {
    xdi_facts_begin(facts);
    xdi_fact_integer(facts, "type", (int64_t)d->type);
    xdi_fact_integer(facts, "form", (int64_t)d->form);
    xdi_fact_number(facts, "max_norm", d->max_norm);
    xdi_fact_number(facts, "refuse_above", d->refuse_above);
}

static bool xdi_clip_has_gradient(const xd_param *p) {
    return xdi_train_steps(p) && p->count > 0;
}

static xd_result xdi_clip_validate(xd_ctx *ctx, const xd_gradient_norm_desc *d) {
    XD_REQUIRE(ctx, d->param_count >= 0 && (d->params || d->param_count == 0), XD_ERROR_ARGUMENT,
               "%lld parameters, params at %p", (long long)d->param_count, (const void *)d->params);
    XD_REQUIRE(ctx, (int)d->type >= 0 && d->type <= XD_NORM_MAX, XD_ERROR_ARGUMENT, "norm type %d is unknown",
               (int)d->type);
    XD_REQUIRE(ctx, (int)d->form >= 0 && d->form <= XD_CLIP_ALWAYS, XD_ERROR_ARGUMENT,
               "clip form %d is unknown", (int)d->form);
    XD_REQUIRE(ctx, d->max_norm >= 0.0, XD_ERROR_ARGUMENT, "max_norm %g is negative or not a number",
               d->max_norm);
    XD_REQUIRE(ctx, d->refuse_above >= 0.0, XD_ERROR_ARGUMENT, "refuse_above %g is negative or not a number",
               d->refuse_above);
    return xdi_train_check_summed(ctx, d->params, d->param_count, "a norm of gradients");
}

/* This rank's part, a thousand arrays at a time, so that the list needs no memory of its own. */
static xd_result xdi_clip_local(xd_ctx *ctx, const xd_gradient_norm_desc *d, bool exact, xd_norm_sum *sum) {
    const xd_launch launch = xdi_train_launch(ctx, NULL);
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(ctx)->optimizer;
    xd_norm_array arrays[XDI_CLIP_BATCH];
    xd_norm_args args;
    XD_TRY(xdi_clip_validate(ctx, d));
    args.arrays = arrays;
    args.array_count = 0;
    args.type = d->type;
    args.exact = exact;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        if (!xdi_clip_has_gradient(p)) continue;
        xd_norm_array *array = &arrays[args.array_count++];
        array->data = p->gradient;
        array->count = p->count;
        array->dtype = xdi_train_gradient_dtype(p);
        array->replica = p->replica;
        if (args.array_count < XDI_CLIP_BATCH) continue;
        XD_TRY(kernels->norm(&launch, &args, sum));
        args.array_count = 0;
    }
    return kernels->norm(&launch, &args, sum);
}

/* Counts stay exact in double up to 2^53. */
static xd_result xdi_clip_exchange_sum(xd_comm *comm, xd_norm_sum *sum, int64_t *counts) {
    double pack[1 + XDI_CLIP_COUNTS];
    pack[0] = sum->sum;
    for (int i = 0; i < XDI_CLIP_COUNTS; i++) pack[1 + i] = (double)counts[i];
    XD_TRY(xd_all_reduce(comm, pack, pack, 1 + XDI_CLIP_COUNTS, XD_DTYPE_F64, XD_SUM));
    sum->sum = pack[0];
    for (int i = 0; i < XDI_CLIP_COUNTS; i++) counts[i] = (int64_t)pack[1 + i];
    return XD_OK;
}

/* No one reduction takes the maximum of a value and the sum of the counts. */
static xd_result xdi_clip_exchange_largest(xd_comm *comm, xd_norm_sum *sum, int64_t *counts) {
    XD_TRY(xd_all_reduce(comm, &sum->largest, &sum->largest, 1, XD_DTYPE_F64, XD_MAX));
    return xd_all_reduce(comm, counts, counts, XDI_CLIP_COUNTS, XD_DTYPE_I64, XD_SUM);
}

static xd_result xdi_clip_exchange_exact(xd_comm *comm, xd_norm_sum *sum, int64_t *counts) {
    int64_t pack[XD_NORM_LIMBS + XDI_CLIP_COUNTS];
    memcpy(pack, sum->limbs, sizeof sum->limbs);
    memcpy(pack + XD_NORM_LIMBS, counts, XDI_CLIP_COUNTS * sizeof *counts);
    XD_TRY(xd_all_reduce(comm, pack, pack, XD_NORM_LIMBS + XDI_CLIP_COUNTS, XD_DTYPE_I64, XD_SUM));
    memcpy(sum->limbs, pack, sizeof sum->limbs);
    memcpy(counts, pack + XD_NORM_LIMBS, XDI_CLIP_COUNTS * sizeof *counts);
    return XD_OK;
}

/* Sums over the ranks, as the norm needs. Where the others are in the call that this rank has left out, its own error names that
 * call. */
static xd_result xdi_clip_exchange_all(xd_comm *comm, const xd_gradient_norm_desc *d, bool exact,
                                       xd_result mine, xd_norm_sum *sum, int64_t *counts) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const xd_error own = *xd_last_error(ctx);
    const xd_result told = exact                    ? xdi_clip_exchange_exact(comm, sum, counts)
                           : d->type == XD_NORM_MAX ? xdi_clip_exchange_largest(comm, sum, counts)
                                                    : xdi_clip_exchange_sum(comm, sum, counts);
    const bool knows = told == XD_ERROR_MISMATCH && mine != XD_OK && own.result == mine;
    return knows ? xdi_ctx_adopt(ctx, &own) : told;
}

/* Sums over the ranks. A rank whose arguments were refused takes part too and reports that in its counts, and so does one with other
 * settings, by which ranks would scale their parts of one gradient differently; only then there is a second exchange, which
 * names it. */
static xd_result xdi_clip_exchange(xd_comm *comm, const xd_gradient_norm_desc *d, bool exact, xd_result mine,
                                   xd_norm_sum *sum) {
    xdi_facts settings;
    xdi_clip_list_settings(&settings, d);
    const int64_t hash = (int64_t)(xdi_facts_hash(0, &settings) >> 32); /* sums of it are exact in double */
    int64_t counts[XDI_CLIP_COUNTS];
    counts[XDI_CLIP_SETTINGS] = hash;
    counts[XDI_CLIP_NOT_FINITE] = sum->not_finite;
    counts[XDI_CLIP_NAN] = sum->nan;
    counts[XDI_CLIP_FAILED] = mine != XD_OK;
    if (comm) XD_TRY(xdi_clip_exchange_all(comm, d, exact, mine, sum, counts));
    if (counts[XDI_CLIP_FAILED] > 0) return comm ? xd_agree(comm, mine) : mine;
    if (comm && counts[XDI_CLIP_SETTINGS] != hash * xd_comm_size(comm))
        return xdi_agree_facts(comm, &settings, "settings of a norm");
    sum->not_finite = counts[XDI_CLIP_NOT_FINITE];
    sum->nan = counts[XDI_CLIP_NAN];
    return XD_OK;
}

/* Sums over the ranks in device memory; nothing is copied to the host. */
static xd_result xdi_clip_exchange_device(xd_comm *comm, xd_norm_type type, bool exact, xd_norm_sum *sum) {
    /* not_finite, nan and the limbs are contiguous. */
    const int64_t integers = exact ? 2 + XD_NORM_LIMBS : 2;
    XD_TRY(xd_all_reduce(comm, &sum->not_finite, &sum->not_finite, integers, XD_DTYPE_I64, XD_SUM));
    if (type == XD_NORM_MAX)
        return xd_all_reduce(comm, &sum->largest, &sum->largest, 1, XD_DTYPE_F64, XD_MAX);
    return exact ? XD_OK : xd_all_reduce(comm, &sum->sum, &sum->sum, 1, XD_DTYPE_F64, XD_SUM);
}

/* On a device the sum is a member of the result, and ranks agree on refusals before any of them adds. */
static xd_result xdi_clip_on_device(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *d, bool exact,
                                    xd_gradient_norm *out) {
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_result mine = xd_ctx_kernels(ctx)->memory.fill(&launch, &out->sum, 0, sizeof out->sum);
    if (mine == XD_OK) mine = xdi_clip_local(ctx, d, exact, &out->sum);
    if (!comm) return mine;
    XD_TRY(xdi_comm_agree_or_record(comm, mine, 0));
    return xdi_clip_exchange_device(comm, d->type, exact, &out->sum);
}

/* What counts a replica is elsewhere: in another rank's list, or in this one, which only the caller knows. A norm without that rank
 * would lack it on this rank alone, and ranks would scale one gradient differently. */
static xd_result xdi_clip_check_alone(xd_ctx *ctx, const xd_gradient_norm_desc *d) {
    for (int64_t i = 0; d->params && i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        XD_REQUIRE(
            ctx, !p->replica || !xdi_clip_has_gradient(p), XD_ERROR_ARGUMENT,
            "comm is NULL, and parameter %lld of %lld, \"%.80s\", is a replica: pass the ranks that step "
            "together, or a group of this one if its list has the other copy",
            (long long)i, (long long)d->param_count, p->name ? p->name : "(unnamed)");
    }
    return XD_OK;
}

XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out) {
    XDI_LIVE(xd_comm, comm);
    XDI_GIVEN_TO_ALL(ctx, comm, ctx, desc, out);
    if (!comm) XD_TRY(xdi_clip_check_alone(ctx, desc));
    const bool exact = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT && desc->type != XD_NORM_MAX;
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_clip_args args;
    xd_norm_sum sum;
    args.sum = &sum;
    if (kernels->device == XD_DEVICE_CPU) {
        memset(&sum, 0, sizeof sum);
        const xd_result mine = xdi_clip_local(ctx, desc, exact, &sum);
        XD_TRY(xdi_clip_exchange(comm, desc, exact, mine, &sum));
    } else {
        XD_TRY(xdi_clip_on_device(ctx, comm, desc, exact, out));
        args.sum = &out->sum;
    }
    args.type = desc->type;
    args.exact = exact;
    args.form = desc->form;
    args.max_norm = desc->max_norm;
    args.refuse_above = desc->refuse_above;
    args.norm = &out->norm;
    args.not_finite = &out->not_finite;
    args.coefficient = &out->coefficient;
    args.status = desc->status;
    return kernels->clip(&launch, &args);
}

/* ---- what was found, and where ---- */

/* A parameter of a list, and what its gradient has. */
typedef struct xdi_clip_place {
    int64_t index; /* -1: none */
    xd_norm_sum sum;
} xdi_clip_place;

/* One gradient as part of a norm of the largest elements; `scratch` is on the device. */
static xd_result xdi_clip_look(xd_ctx *ctx, const xd_param *p, xd_norm_sum *scratch, xd_norm_sum *out) {
    const xd_launch launch = xdi_train_launch(ctx, NULL);
    xd_norm_array array;
    xd_norm_args args;
    memset(&args, 0, sizeof args);
    array.data = p->gradient;
    array.count = p->count;
    array.dtype = xdi_train_gradient_dtype(p);
    array.replica = p->replica;
    args.arrays = &array;
    args.array_count = 1;
    args.type = XD_NORM_MAX;
    XD_TRY(xd_ctx_kernels(ctx)->memory.fill(&launch, scratch, 0, sizeof *scratch));
    XD_TRY(xd_ctx_kernels(ctx)->optimizer.norm(&launch, &args, scratch));
    return xd_read(ctx, out, scratch, sizeof *out);
}

/* The first of this rank's parameters that is not finite; or, where all are, the one with the largest element. */
static xd_result xdi_clip_find(xd_ctx *ctx, const xd_gradient_norm_desc *d, bool finite, xd_norm_sum *scratch,
                               xdi_clip_place *out) {
    memset(out, 0, sizeof *out);
    out->index = -1;
    for (int64_t i = 0; i < d->param_count; i++) {
        xd_norm_sum sum;
        if (!xdi_clip_has_gradient(&d->params[i])) continue;
        XD_TRY(xdi_clip_look(ctx, &d->params[i], scratch, &sum));
        if (finite ? sum.largest <= out->sum.largest : sum.not_finite == 0) continue;
        out->index = i;
        out->sum = sum;
        if (!finite) break;
    }
    return XD_OK;
}

/* Which rank tells: among those with the largest element, or with anything, the one of the lowest entry of its list. */
static xd_result xdi_clip_choose(xd_comm *comm, const xdi_clip_place *mine, int *teller) {
    const int64_t ranks = xd_comm_size(comm);
    double largest = mine->sum.largest;
    int64_t key = mine->index * ranks + xd_comm_rank(comm);
    XD_TRY(xd_all_reduce(comm, &largest, &largest, 1, XD_DTYPE_F64, XD_MAX));
    if (mine->index < 0 || (mine->sum.not_finite == 0 && mine->sum.largest < largest)) key = INT64_MAX;
    XD_TRY(xd_all_reduce(comm, &key, &key, 1, XD_DTYPE_I64, XD_MIN));
    *teller = key == INT64_MAX ? -1 : (int)(key % ranks);
    return XD_OK;
}

static void xdi_clip_write_place(const xd_param *p, const xdi_clip_place *at, int rank, char *text,
                                 size_t size) {
    const char *name = p->name ? p->name : "(unnamed)";
    if (at->sum.not_finite > 0)
        snprintf(text, size, "\"%.80s\" on rank %d: %lld of %lld elements there, %lld of them NaN", name,
                 rank, (long long)at->sum.not_finite, (long long)p->count, (long long)at->sum.nan);
    else
        snprintf(text, size, "\"%.80s\" on rank %d: %g", name, rank, at->sum.largest);
}

/* The words of the rank that tells, on all; empty where gradients have changed and nobody has any. */
static xd_result xdi_clip_tell(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *d, bool finite,
                               xd_norm_sum *scratch, char text[192]) {
    xdi_clip_place mine;
    xd_result result = xdi_clip_validate(ctx, d);
    int teller = 0;
    memset(text, 0, 192);
    if (result == XD_OK) result = xdi_clip_find(ctx, d, finite, scratch, &mine);
    XD_TRY(comm ? xd_agree(comm, result) : result);
    if (comm) XD_TRY(xdi_clip_choose(comm, &mine, &teller));
    const bool tells = mine.index >= 0 && (!comm || teller == xd_comm_rank(comm));
    if (tells)
        xdi_clip_write_place(&d->params[mine.index], &mine, comm ? xd_comm_world_rank(comm, teller) : 0, text,
                             192);
    return comm && teller >= 0 ? xd_broadcast(comm, text, 192, XD_DTYPE_U8, teller) : XD_OK;
}

static xd_result xdi_clip_check_list(xd_ctx *ctx, const xd_gradient_norm_desc *desc) {
    XDI_GIVEN_LIST(ctx, desc->params, desc->param_count);
    return XD_OK;
}

XD_API xd_result xd_gradient_norm_check(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                        xd_gradient_norm *norm) {
    XDI_LIVE(xd_comm, comm);
    XDI_GIVEN_TO_ALL(ctx, comm, ctx, desc, norm);
    XD_TRY(xdi_comm_given(comm, xdi_clip_check_list(ctx, desc)));
    xd_gradient_norm found;
    char text[192];
    XD_TRY(xd_read(ctx, &found, norm, sizeof found));
    const bool large = desc->refuse_above > 0.0 && found.norm > desc->refuse_above;
    if (found.not_finite == 0 && !large) return XD_OK;
    XD_TRY(xdi_clip_tell(ctx, comm, desc, found.not_finite == 0, &norm->sum, text));
    if (found.not_finite > 0)
        return XD_FAIL(ctx, XD_ERROR_DATA, "%lld elements of gradients are not finite, first in %s",
                       (long long)found.not_finite, text);
    return XD_FAIL(ctx, XD_ERROR_DATA,
                   "the norm of the gradients is %g, above %g; the largest element is in %s", found.norm,
                   desc->refuse_above, text);
}

XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient) {
    XDI_GIVEN(ctx, ctx);
    XDI_GIVEN_LIST(ctx, params, param_count);
    const xd_launch launch = xdi_train_launch(ctx, NULL);
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(ctx)->optimizer;
    XD_REQUIRE(ctx, param_count >= 0 && (params || param_count == 0), XD_ERROR_ARGUMENT,
               "%lld parameters, params at %p", (long long)param_count, (const void *)params);
    XD_TRY(xdi_train_check_summed(ctx, params, param_count, "xd_clip_gradients"));
    for (int64_t i = 0; i < param_count; i++)
        XD_REQUIRE(
            ctx, !xdi_clip_has_gradient(&params[i]) || xdi_train_takes(xdi_train_gradient_dtype(&params[i])),
            XD_ERROR_DTYPE, "%s: gradients are F32, BF16 or F16, not %s",
            params[i].name ? params[i].name : "(unnamed)", xd_dtype_name(params[i].gradient_dtype));
    for (int64_t i = 0; i < param_count && coefficient != 1.0f; i++) {
        if (!xdi_clip_has_gradient(&params[i])) continue;
        xd_scale_args args;
        args.data = params[i].gradient;
        args.count = params[i].count;
        args.dtype = xdi_train_gradient_dtype(&params[i]);
        args.factor = coefficient;
        XD_TRY(kernels->scale(&launch, &args));
    }
    return XD_OK;
}
