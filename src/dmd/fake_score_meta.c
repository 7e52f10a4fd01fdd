/* Fake scores that are described on all ranks before any has memory for them. */

#include "dmd/fake_score_internal.h"

#include "comm/internal.h"
#include "comm/mesh.h"

#include <string.h>

/* ---- settings ---- */

static xd_result xdi_fake_check_source(const xdi_fake *f) {
    const xd_fake_score_source *s = &f->desc->source;
    const bool root = s->from == XD_FAKE_SCORE_FROM_ROOT && xd_comm_rank(f->world) == 0;
    XD_REQUIRE(f->ctx, (int)s->from >= 0 && s->from <= XD_FAKE_SCORE_FROM_READER, XD_ERROR_ARGUMENT,
               "a source of kind %d is unknown", (int)s->from);
    XD_REQUIRE(f->ctx,
               s->from != XD_FAKE_SCORE_FROM_PARTS || (s->part_count >= 0 && (s->parts || !s->part_count)),
               XD_ERROR_ARGUMENT, "the source has %lld parts at %p", (long long)s->part_count,
               (const void *)s->parts);
    XD_REQUIRE(f->ctx, !root || (s->tensor_count >= 0 && (s->tensors || !s->tensor_count)), XD_ERROR_ARGUMENT,
               "the source has %lld tensors at %p", (long long)s->tensor_count, (const void *)s->tensors);
    if (s->from != XD_FAKE_SCORE_FROM_READER) return XD_OK;
    XD_REQUIRE(
        f->ctx, s->reader.read && s->reader.entry_count >= 0 && (s->reader.entries || !s->reader.entry_count),
        XD_ERROR_ARGUMENT, "the reader has %lld entries at %p and %s function",
        (long long)s->reader.entry_count, (const void *)s->reader.entries, s->reader.read ? "a" : "no");
    return XD_OK;
}

static xd_result xdi_fake_check_desc(const xdi_fake *f) {
    const xd_fake_score_meta_desc *d = f->desc;
    const int stages = d->groups && d->groups->pp ? xd_comm_size(d->groups->pp) : 1;
    const bool needed = d->source.from == XD_FAKE_SCORE_FROM_TEACHER || !d->provider.describe;
    XD_REQUIRE(f->ctx, d->teacher || !needed, XD_ERROR_ARGUMENT,
               "there is no teacher, neither described nor of values");
    XD_REQUIRE(f->ctx, !d->teacher || d->teacher->sealed, XD_ERROR_STATE,
               "the teacher is not sealed: xd_model_seal comes first");
    XD_REQUIRE(f->ctx, !d->teacher || d->teacher->ctx == f->ctx, XD_ERROR_ARGUMENT,
               "the teacher, of %lld weights, is another context's", (long long)d->teacher->weight_count);
    XD_REQUIRE(f->ctx, !d->fake.shared, XD_ERROR_ARGUMENT,
               "a fake score that is made of parts on %d ranks has values of its own: it cannot share",
               xd_comm_size(f->world));
    XD_REQUIRE(f->ctx, d->fake.frozen_count >= 0 && (d->fake.frozen || !d->fake.frozen_count),
               XD_ERROR_ARGUMENT, "%d `frozen` at %p", d->fake.frozen_count, (const void *)d->fake.frozen);
    XD_REQUIRE(f->ctx, d->fresh_count >= 0 && (d->fresh || !d->fresh_count), XD_ERROR_ARGUMENT,
               "%d `fresh` at %p", d->fresh_count, (const void *)d->fresh);
    XD_REQUIRE(f->ctx, (!d->fake.frozen || d->fake.frozen_count) && (!d->fresh || d->fresh_count),
               XD_ERROR_ARGUMENT, "a list of names, and frozen_count %d, fresh_count %d",
               d->fake.frozen_count, d->fresh_count);
    XD_REQUIRE(f->ctx, d->lenient || d->fresh_count == 0, XD_ERROR_ARGUMENT,
               "%d `fresh`, which are for `lenient`", d->fresh_count);
    XD_REQUIRE(f->ctx, stages == 1, XD_ERROR_UNSUPPORTED, "a pipeline of %d ranks: a fake score is one stage",
               stages);
    return xdi_fake_check_source(f);
}

static void xdi_fake_list_patterns(xdi_facts *f, const char *names[2], const char *const *patterns,
                                   int count) {
    xdi_fact_integer(f, names[0], count);
    xdi_fact_hash(f, names[1], xdi_fake_hash_patterns(0, patterns, count));
}

static xd_result xdi_fake_agree(xd_comm *world, const xd_fake_score_meta_desc *d) {
    const char *fresh[2] = { "fresh_count", "list of `fresh`" };
    const char *frozen[2] = { "fake.frozen_count", "list of `fake.frozen`" };
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "source.from", (int64_t)d->source.from);
    xdi_fact_integer(&facts, "lenient", d->lenient);
    xdi_fact_integer(&facts, "staging_bytes", (int64_t)d->staging_bytes);
    xdi_fact_integer(&facts, "compute.call (given)", d->compute.call != NULL);
    xdi_fact_integer(&facts, "provider.describe (given)", d->provider.describe != NULL);
    xdi_fact_dtype(&facts, "fake.dtype", d->fake.dtype);
    xdi_fact_integer(&facts, "fake.adapt (given)", d->fake.adapt != NULL);
    xdi_fake_list_patterns(&facts, fresh, d->fresh, d->fresh_count);
    xdi_fake_list_patterns(&facts, frozen, d->fake.frozen, d->fake.frozen_count);
    return xdi_agree_facts(world, &facts, "settings of a fake score");
}

/* ---- what comes from where ---- */

/* The source's tensor that a weight is: under its own name, or that of a tie. */
static xdi_fake_key *xdi_fake_key_of(const xdi_fake *f, const xd_weight *owner) {
    xdi_fake_key *key = xdi_fake_find(f, owner->name);
    for (int64_t i = owner->index + 1; i < f->model->weight_count && !key; i++)
        if (f->model->weights[i]->owner == owner) key = xdi_fake_find(f, f->model->weights[i]->name);
    return key;
}

static bool xdi_fake_fits_shape(const xdi_fake_key *key, const xd_weight_desc *d) {
    bool same = key->ndim == d->ndim;
    for (int i = 0; same && i < d->ndim; i++) same = key->shape[i] == d->shape[i];
    return same;
}

static void xdi_fake_note(xdi_fake *f, const char *name) {
    xd_fake_score_report *r = &f->report;
    if (r->missing + r->unexpected + r->wrong_shape <= 5) xdi_load_append(r->names, sizeof r->names, name);
}

/* Without a tensor of the source: by the function, by its init, or from nowhere. */
static bool xdi_fake_do_without(xdi_fake *f, xdi_fake_tensor *t, bool wrong_shape) {
    const xd_weight_desc *d = &t->weight->desc;
    const xd_fake_score_meta_desc *desc = f->desc;
    const bool allowed = desc->lenient || (d->transient && !wrong_shape);
    if (d->buffer && desc->compute.call && allowed) {
        t->origin = XDI_FAKE_COMPUTED;
        f->report.computed++;
        return true;
    }
    t->origin = XDI_FAKE_FORMED;
    if (!desc->lenient || !xdi_fake_fits(desc->fresh, desc->fresh_count, t->weight->name)) return false;
    f->report.formed++;
    return true;
}

static xd_result xdi_fake_judge(xdi_fake *f, xdi_fake_tensor *t) {
    const xd_weight *w = t->weight;
    xdi_fake_key *key = xdi_fake_key_of(f, w);
    const bool wrong = key && !xdi_fake_fits_shape(key, &w->desc);
    char theirs[XDI_SHAPE_TEXT], ours[XDI_SHAPE_TEXT];
    if (key) key->used = true;
    if (!key || wrong) {
        const bool found = xdi_fake_do_without(f, t, wrong);
        f->report.wrong_shape += wrong;
        f->report.missing += !wrong && !found;
        if (wrong || !found) xdi_fake_note(f, w->name);
        if (wrong && !found && f->desc->lenient)
            return XD_FAIL(
                f->ctx, XD_ERROR_SHAPE,
                "\"%.80s\" has another shape in the source, and `fresh` does not name it: %s there "
                "and %s here",
                w->name, xdi_shape_print(key->ndim, key->shape, theirs),
                xdi_shape_print(w->desc.ndim, w->desc.shape, ours));
        return XD_OK;
    }
    const bool same = key->dtype == w->desc.dtype;
    XD_REQUIRE(f->ctx, same || (xdi_load_converts(key->dtype) && xdi_load_converts(w->desc.dtype)),
               XD_ERROR_DTYPE, "\"%.80s\" is %s in the source and %s here, which are not converted", w->name,
               xd_dtype_name(key->dtype), xd_dtype_name(w->desc.dtype));
    t->origin = XDI_FAKE_LOADED;
    t->key = key - f->keys;
    f->report.loaded++;
    f->report.converted += !same;
    return XD_OK;
}

static void xdi_fake_find_unexpected(xdi_fake *f) {
    for (int64_t i = 0; i < f->key_count; i++) {
        const xdi_fake_key *key = &f->keys[i];
        if (key->used || xd_model_find_weight(f->model, key->name)) continue; /* another name of a tie */
        f->report.unexpected++;
        xdi_fake_note(f, key->name);
    }
}

/* Both shapes of the first tensor that has two. */
static xd_result xdi_fake_refuse_shape(xdi_fake *f) {
    char theirs[XDI_SHAPE_TEXT], ours[XDI_SHAPE_TEXT];
    const xdi_fake_tensor *t = f->tensors;
    const xdi_fake_key *key = NULL;
    for (;; t++) {
        key = xdi_fake_key_of(f, t->weight);
        if (key && !xdi_fake_fits_shape(key, &t->weight->desc)) break;
    }
    const xd_weight_desc *d = &t->weight->desc;
    return XD_FAIL(
        f->ctx, XD_ERROR_SHAPE,
        "%lld of %lld tensors have another shape in the source: %s; the first is %s there and %s here",
        (long long)f->report.wrong_shape, (long long)f->tensor_count, f->report.names,
        xdi_shape_print(key->ndim, key->shape, theirs), xdi_shape_print(d->ndim, d->shape, ours));
}

/* Everything here follows from what all ranks have, so all return the same. */
static xd_result xdi_fake_match(xdi_fake *f) {
    const xd_fake_score_report *r = &f->report;
    for (int64_t i = 0; i < f->tensor_count; i++) XD_TRY(xdi_fake_judge(f, &f->tensors[i]));
    xdi_fake_find_unexpected(f);
    XD_REQUIRE(f->ctx, r->missing == 0, XD_ERROR_MISSING,
               "%lld of %lld tensors of the fake score are not in the source%s: %s", (long long)r->missing,
               (long long)f->tensor_count, f->desc->lenient ? ", and neither computed nor `fresh`" : "",
               r->names);
    if (f->desc->lenient) return XD_OK;
    XD_REQUIRE(f->ctx, r->unexpected == 0, XD_ERROR_UNEXPECTED,
               "the source has %lld of %lld tensors that the fake score lacks: %s", (long long)r->unexpected,
               (long long)f->key_count, r->names);
    return r->wrong_shape ? xdi_fake_refuse_shape(f) : XD_OK;
}

/* ---- the description ---- */

/* Of a layout without its ranks: those of a slice of a mesh differ, and it is the same cut. */
static uint64_t xdi_fake_hash_layout(uint64_t hash, const xd_layout_desc *d) {
    const xd_topology *t = d->topology;
    for (int i = 0; i < t->axis_count; i++) {
        const xd_placement *p = &d->placement[i];
        const int64_t facts[] = { t->size[i],  (int64_t)p->kind, p->dim,      (int64_t)p->op,
                                  p->sections, p->balanced,      d->order[i], p->offsets != NULL };
        hash = xd_hash(hash, facts, sizeof facts);
        if (p->offsets) hash = xd_hash(hash, p->offsets, ((size_t)t->size[i] + 1) * sizeof *p->offsets);
        if (p->section_sizes)
            hash = xd_hash(hash, p->section_sizes, (size_t)p->sections * sizeof *p->section_sizes);
    }
    return hash;
}

static uint64_t xdi_fake_hash_layouts(const xd_model *model) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < model->weight_count; i++) {
        const xd_weight *w = model->weights[i];
        const bool cut = w->desc.layout != NULL;
        hash = xd_hash(hash, &cut, sizeof cut);
        if (cut) hash = xdi_fake_hash_layout(hash, xd_layout_settings(w->desc.layout));
    }
    return hash;
}

static xd_result xdi_fake_list_tensors(xdi_fake *f) {
    const size_t room = (size_t)f->model->weight_count + 1;
    XD_TRY(xdi_fake_check_patterns(f->model, f->desc->fresh, f->desc->fresh_count, "`fresh`"));
    f->tensors = (xdi_fake_tensor *)xd_allocate(f->ctx, room * sizeof *f->tensors);
    XD_REQUIRE(f->ctx, f->tensors, XD_ERROR_MEMORY, "no room for a list of %lld weights",
               (long long)f->model->weight_count);
    for (int64_t i = 0; i < f->model->weight_count; i++) {
        xd_weight *w = f->model->weights[i];
        if (w->owner != w) continue;
        f->tensors[f->tensor_count].init = w->desc.init;
        f->tensors[f->tensor_count++].weight = w;
    }
    return XD_OK;
}

/* The build forms no random numbers where values come from elsewhere, and clears what may stay without any. */
static void xdi_fake_clear_inits(const xdi_fake *f) {
    for (int64_t i = 0; i < f->tensor_count; i++) {
        const xdi_fake_tensor *t = &f->tensors[i];
        if (t->origin != XDI_FAKE_FORMED) memset(&t->weight->desc.init, 0, sizeof t->init);
        t->weight->awaited = t->origin == XDI_FAKE_LOADED;
    }
}

static void xdi_fake_restore_inits(const xdi_fake *f) {
    for (int64_t i = 0; i < f->tensor_count; i++) {
        f->tensors[i].weight->desc.init = f->tensors[i].init;
        f->tensors[i].weight->awaited = false;
    }
}

/* A provider: the description after the teacher. */
static xd_result xdi_fake_provide(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    const xdi_fake *f = (const xdi_fake *)user;
    (void)ctx;
    (void)place;
    return xd_fake_score_describe(f->desc->teacher, &f->desc->fake, out);
}

/* The hook before the wrap, when nothing has memory yet: description and source are compared on the whole world. Collective. */
static xd_result xdi_fake_prepare(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    xdi_fake *f = (xdi_fake *)user;
    xd_model *model = in->stages[0].model;
    (void)ctx;
    (void)out;
    f->model = model;
    XD_TRY(xd_agree(f->world, model->sealed ? XD_OK : xd_model_seal(model)));
    XD_TRY(xdi_model_agree(model, f->world));
    XD_TRY(xd_agree_same(f->world, xdi_fake_hash_layouts(model), "layouts of the fake score's weights"));
    XD_TRY(xd_agree(f->world, xdi_fake_list_tensors(f)));
    XD_TRY(xdi_fake_list(f));
    XD_TRY(xd_agree(f->world, xdi_fake_match(f)));
    xdi_fake_clear_inits(f);
    return XD_OK;
}

/* ---- values ---- */

static xd_result xdi_fake_compute(const xdi_fake *f) {
    const xd_fake_score_compute *compute = &f->desc->compute;
    for (int64_t i = 0; i < f->tensor_count; i++) {
        const xdi_fake_tensor *t = &f->tensors[i];
        if (t->origin != XDI_FAKE_COMPUTED || t->part.range.begin == t->part.range.end) continue;
        xdi_clear_error(f->ctx);
        XD_TRY(xdi_builder_called(f->ctx, compute->call(compute->user, f->ctx, &t->part), "compute of tensor",
                                  (int)i));
    }
    return XD_OK;
}

static xd_result xdi_fake_set_values(xdi_fake *f, xd_parallel *parallel) {
    for (int64_t i = 0; i < f->tensor_count; i++)
        f->tensors[i].part = xdi_fake_part(f->tensors[i].weight, false);
    XD_TRY(xdi_fake_load(f));
    XD_TRY(xd_agree(f->world, xdi_fake_compute(f)));
    return parallel ? xd_agree(f->world, xd_parallel_publish(parallel)) : XD_OK;
}

static xd_result xdi_fake_build(xdi_fake *f, xd_built **built) {
    const xd_fake_score_meta_desc *d = f->desc;
    xd_build_desc b;
    xd_stage_hooks before;
    memset(&b, 0, sizeof b);
    memset(&before, 0, sizeof before);
    before.count = 1;
    before.hooks[0].call = xdi_fake_prepare;
    before.hooks[0].user = f;
    b.groups = d->groups;
    b.provider = d->provider;
    if (!b.provider.describe) {
        b.provider.describe = xdi_fake_provide;
        b.provider.user = f;
    }
    b.before = &before;
    b.storage = XD_STORAGE_META;
    b.wrap = d->wrap;
    return xd_build(f->world, &b, built);
}

static xd_result xdi_fake_run(xdi_fake *f, xd_built **built) {
    XD_TRY(xd_agree(f->world, xdi_fake_check_desc(f)));
    XD_TRY(xdi_fake_agree(f->world, f->desc));
    XD_TRY(xdi_fake_build(f, built));
    xdi_fake_restore_inits(f);
    return xdi_fake_set_values(f, xd_built_stage(*built, 0).parallel);
}

XD_API xd_result xd_fake_score_create_meta(xd_comm *world, const xd_fake_score_meta_desc *desc,
                                           xd_built **out) {
    XDI_GIVEN_COMM(world, desc, out);
    xdi_fake f;
    xd_built *built = NULL;
    memset(&f, 0, sizeof f);
    f.world = world;
    f.ctx = xd_comm_ctx(world);
    f.desc = desc;
    const xd_result result = xdi_fake_run(&f, &built);
    xdi_fake_list_release(&f);
    xd_release(f.ctx, f.tensors);
    if (desc->report) *desc->report = f.report;
    if (result == XD_OK)
        *out = built;
    else
        xd_built_destroy(built);
    return result;
}
