/* state.json: what a checkpoint says beside its tensors. */

#include "base/json.h"
#include "checkpoint/internal.h"
#include "train/internal.h"

#include <stdio.h>
#include <string.h>

#define XDI_STATE_KEY ",\"state\":" /* last in the object, so that the caller's text can be cut out again */
enum { XDI_STATE_FORMAT = 1 };

static const char *const xdi_state_kinds[] = { "adamw", "adam_l2", "sgd" };
static const char *const xdi_state_schedules[] = { "constant", "power", "halflife", "ramp" };

/* ---- writing ---- */

static void xdi_state_write_double(xd_json_writer *w, const char *key, double value) {
    xd_json_write_key(w, key);
    xd_json_write_double(w, value);
}

static void xdi_state_write_optimizer(xd_json_writer *w, const xd_optimizer *optimizer) {
    const xd_optimizer_desc *d = xd_optimizer_settings(optimizer);
    xd_json_write_key(w, "optimizer");
    xd_json_write_object(w);
    xd_json_write_key(w, "kind");
    xd_json_write_string(w, xdi_state_kinds[d->kind]);
    xdi_state_write_double(w, "learning_rate", d->learning_rate);
    xdi_state_write_double(w, "beta1", d->beta1);
    xdi_state_write_double(w, "beta2", d->beta2);
    xdi_state_write_double(w, "eps", d->eps);
    xdi_state_write_double(w, "momentum", d->momentum);
    xd_json_write_key(w, "maximize");
    xd_json_write_bool(w, d->maximize);
    xd_json_write_key(w, "groups");
    xd_json_write_array(w);
    for (int i = 0; i < d->group_count; i++) {
        xd_json_write_object(w);
        xdi_state_write_double(w, "learning_rate_scale", d->groups[i].learning_rate_scale);
        xdi_state_write_double(w, "weight_decay", d->groups[i].weight_decay);
        xd_json_write_end(w);
    }
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static void xdi_state_write_average(xd_json_writer *w, const xd_checkpoint_average *average) {
    const xd_ema_record r = xd_ema_describe(average->ema).record;
    xd_json_write_key(w, average->name);
    xd_json_write_object(w);
    xd_json_write_key(w, "format_version");
    xd_json_write_int64(w, r.format_version);
    xd_json_write_key(w, "iteration");
    xd_json_write_int64(w, r.iteration);
    xd_json_write_key(w, "initialized");
    xd_json_write_bool(w, r.initialized);
    xd_json_write_key(w, "schedule");
    xd_json_write_string(w, xdi_state_schedules[r.config.schedule]);
    xdi_state_write_double(w, "decay", r.config.decay);
    xdi_state_write_double(w, "gamma", r.config.gamma);
    xdi_state_write_double(w, "halflife_kimg", r.config.halflife_kimg);
    xdi_state_write_double(w, "rampup_ratio", r.config.rampup_ratio);
    xd_json_write_key(w, "disable_rampup");
    xd_json_write_bool(w, r.config.disable_rampup);
    xd_json_write_key(w, "batch_size");
    xd_json_write_int64(w, r.config.batch_size);
    xd_json_write_key(w, "start_iteration");
    xd_json_write_int64(w, r.config.start_iteration);
    if (r.config.compensated || r.config.stochastic_bf16) {
        xd_json_write_key(w, r.config.compensated ? "compensated" : "stochastic_bf16");
        xd_json_write_bool(w, true);
    }
    if (r.config.stochastic_bf16) {
        xd_json_write_key(w, "seed");
        xd_json_write_uint64(w, r.config.seed);
    }
    xd_json_write_end(w);
}

static void xdi_state_write_network(xd_json_writer *w, const xd_checkpoint_network *n) {
    xd_json_write_object(w);
    if (n->name) {
        xd_json_write_key(w, "name");
        xd_json_write_string(w, n->name);
    }
    if (n->optimizer) xdi_state_write_optimizer(w, n->optimizer);
    if (n->average_count > 0) {
        xd_json_write_key(w, "averages");
        xd_json_write_object(w);
        for (int i = 0; i < n->average_count; i++) xdi_state_write_average(w, &n->averages[i]);
        xd_json_write_end(w);
    }
    xd_json_write_end(w);
}

static void xdi_state_write_all(xd_json_writer *w, const xd_checkpoint_save_desc *desc) {
    xd_json_write_object(w);
    xd_json_write_key(w, "format");
    xd_json_write_int64(w, XDI_STATE_FORMAT);
    xd_json_write_key(w, "step");
    xd_json_write_int64(w, desc->step);
    xd_json_write_key(w, "networks");
    xd_json_write_array(w);
    for (int i = 0; i < desc->network_count; i++) xdi_state_write_network(w, &desc->networks[i]);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

XD_PRIVATE xd_result xdi_state_check(xd_ctx *ctx, const char *state) {
    xd_json_desc limits;
    xd_json *root = NULL;
    if (!state) return XD_OK;
    memset(&limits, 0, sizeof limits);
    limits.max_depth = XDI_STATE_DEPTH;
    const xd_result result = xd_json_load_memory(ctx, &limits, state, strlen(state), &root);
    const xd_json_kind kind = xd_json_kind_of(root);
    xd_json_destroy(ctx, root);
    XD_REQUIRE(ctx, result == XD_OK, result, "the state: %s", xd_last_error(ctx)->message);
    XD_REQUIRE(ctx, kind == XD_JSON_OBJECT, XD_ERROR_FORMAT, "the state is no JSON object");
    return XD_OK;
}

XD_PRIVATE xd_result xdi_state_write(xd_ctx *ctx, const xd_checkpoint_save_desc *desc, char **text,
                                     size_t *bytes) {
    xd_json_writer w = xd_json_writer_create(ctx);
    const char *written = NULL;
    size_t length = 0;
    xdi_state_write_all(&w, desc);
    xd_result result = xd_json_writer_text(&w, &written, &length);
    const size_t room = length + sizeof XDI_STATE_KEY + (desc->state ? strlen(desc->state) : 0) + 2;
    char *out = result == XD_OK ? (char *)xd_allocate(ctx, room) : NULL;
    if (out) {
        /* all but the last bracket, then the caller's own */
        *bytes = (size_t)snprintf(out, room, "%.*s%s%s}\n", (int)length - 1, written,
                                  desc->state ? XDI_STATE_KEY : "", desc->state ? desc->state : "");
        *text = out;
    } else if (result == XD_OK) {
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a state of %llu bytes", (unsigned long long)room);
    }
    xd_json_writer_destroy(&w);
    return result;
}

/* ---- reading ---- */

/* What state.json has of a network; NULL when it has none of that name. */
static const xd_json *xdi_state_network(const xd_json *root, const char *name) {
    const xd_json *list = xd_json_find(root, "networks");
    for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item)) {
        const char *own = xd_json_string(xd_json_find(item, "name"), NULL);
        if (name ? own && strcmp(own, name) == 0 : !own) return item;
    }
    return NULL;
}

static xd_result xdi_state_fits_optimizer(xd_ctx *ctx, const xd_json *saved, const xd_checkpoint_network *n,
                                          bool lenient) {
    const xd_json *record = xd_json_find(saved, "optimizer");
    const char *kind = xd_json_string(xd_json_find(record, "kind"), NULL);
    double rate;
    if (!n->optimizer || (!record && lenient)) return XD_OK;
    const char *here = xdi_state_kinds[xd_optimizer_settings(n->optimizer)->kind];
    XD_REQUIRE(ctx, record, XD_ERROR_MISSING,
               "the checkpoint has no optimizer of %s%s: it was saved without, and a load with optimizer "
               "NULL or lenient leaves the state here as it is",
               n->name ? "the network " : "the model", n->name ? n->name : "");
    XD_REQUIRE(ctx, kind && xd_json_double(xd_json_find(record, "learning_rate"), &rate) && rate >= 0.0,
               XD_ERROR_FORMAT, "%s: the optimizer has no kind or no learning rate", XDI_STATE_FILE);
    XD_REQUIRE(ctx, strcmp(kind, here) == 0, XD_ERROR_STATE,
               "the optimizer is %s, the checkpoint has one of kind %.20s", here, kind);
    return XD_OK;
}

static const xd_json *xdi_state_average(const xd_json *saved, const char *name) {
    return xd_json_find(xd_json_find(saved, "averages"), name);
}

static xd_result xdi_state_fits_average(xd_ctx *ctx, const xd_json *saved, const char *name, bool lenient) {
    const xd_json *record = xdi_state_average(saved, name);
    int64_t version, iteration;
    bool initialized;
    if (!record && lenient) return XD_OK;
    XD_REQUIRE(
        ctx, record, XD_ERROR_MISSING,
        "the checkpoint has no average \"%s\": averages are found by the names that the save gave them",
        name);
    XD_REQUIRE(ctx,
               xd_json_int64(xd_json_find(record, "format_version"), &version) && version == 1 &&
                   xd_json_int64(xd_json_find(record, "iteration"), &iteration) && iteration >= 0 &&
                   xd_json_bool(xd_json_find(record, "initialized"), &initialized),
               XD_ERROR_FORMAT, "%s: the record of the average \"%s\" is none of version 1", XDI_STATE_FILE,
               name);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_state_fits(xd_ctx *ctx, const xd_json *root, const xd_checkpoint_load_desc *desc) {
    int64_t format = 0;
    const xd_json *state = xd_json_find(root, "state");
    XD_REQUIRE(ctx, xd_json_int64(xd_json_find(root, "format"), &format) && format == XDI_STATE_FORMAT,
               XD_ERROR_FORMAT, "%s of format %lld, known is %d", XDI_STATE_FILE, (long long)format,
               (int)XDI_STATE_FORMAT);
    XD_REQUIRE(ctx, !state || xd_json_kind_of(state) == XD_JSON_OBJECT, XD_ERROR_FORMAT,
               "%s: the state is no object", XDI_STATE_FILE);
    for (int i = 0; i < desc->network_count; i++) {
        const xd_checkpoint_network *n = &desc->networks[i];
        const xd_json *saved = xdi_state_network(root, n->name);
        XD_TRY(xdi_state_fits_optimizer(ctx, saved, n, desc->lenient));
        for (int k = 0; k < n->average_count; k++)
            XD_TRY(xdi_state_fits_average(ctx, saved, n->averages[k].name, desc->lenient));
    }
    return XD_OK;
}

/* The saved rate, which xdi_state_fits has seen not to be negative. */
static void xdi_state_apply_rate(xd_ctx *ctx, const xd_json *saved, xd_optimizer *optimizer,
                                 xd_checkpoint_report *report) {
    const double own = xd_optimizer_settings(optimizer)->learning_rate;
    double rate;
    if (!xd_json_double(xd_json_find(xd_json_find(saved, "optimizer"), "learning_rate"), &rate) ||
        rate == own)
        return;
    (void)xd_optimizer_set_learning_rate(optimizer, rate);
    xd_log(ctx, XD_LOG_INFO, "the load has set a learning rate from %g to %g, the saved one", own, rate);
    if (report->rates++ > 0) return;
    report->own_rate = own;
    report->saved_rate = rate;
}

XD_PRIVATE void xdi_state_apply(xd_ctx *ctx, const xd_json *root, const xd_checkpoint_load_desc *desc,
                                xd_checkpoint_report *report) {
    for (int i = 0; i < desc->network_count; i++) {
        const xd_checkpoint_network *n = &desc->networks[i];
        const xd_json *saved = xdi_state_network(root, n->name);
        if (n->optimizer && !desc->keep_learning_rate) xdi_state_apply_rate(ctx, saved, n->optimizer, report);
        for (int k = 0; k < n->average_count; k++) {
            const xd_json *record = xdi_state_average(saved, n->averages[k].name);
            int64_t iteration;
            bool initialized;
            if (xd_json_int64(xd_json_find(record, "iteration"), &iteration) &&
                xd_json_bool(xd_json_find(record, "initialized"), &initialized))
                xdi_ema_restore(n->averages[k].ema, iteration, initialized);
        }
    }
}

XD_PRIVATE xd_result xdi_state_take(xd_ctx *ctx, const xd_json *root, const char *text, size_t bytes,
                                    char **state) {
    const xd_json *own = xd_json_find(root, "state");
    *state = NULL;
    if (!own) return XD_OK;
    const size_t begin = xd_json_offset(own);
    size_t end = bytes;
    while (end > begin && text[end - 1] != '}') end--;
    end -= end > begin; /* the bracket of the whole */
    while (end > begin && text[end - 1] != '}') end--;
    char *copy = (char *)xd_allocate(ctx, end - begin + 1);
    XD_REQUIRE(ctx, copy, XD_ERROR_MEMORY, "no room for a state of %llu bytes",
               (unsigned long long)(end - begin));
    memcpy(copy, text + begin, end - begin);
    const xd_result result = xdi_state_check(ctx, copy); /* it was the last one, as saves write it */
    if (result == XD_OK)
        *state = copy;
    else
        xd_release(ctx, copy);
    return result;
}
