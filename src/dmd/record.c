/* The state of a distillation as text. */

#include "base/internal.h"
#include "base/json.h"
#include "dmd/record.h"
#include "dmd/state.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { XDI_DMD_STATE_VERSION = 1, XDI_DMD_TEXT = 224 };

/* ---- settings in words, which are compared as they are ---- */

typedef enum xdi_dmd_aspect {
    XDI_DMD_SCHEDULE = 0,
    XDI_DMD_RUNGS,
    XDI_DMD_RATIO,
    XDI_DMD_ROLES_AND_AVERAGES,
    XDI_DMD_ASPECTS
} xdi_dmd_aspect;

static const char *xdi_dmd_aspect_key(int aspect) {
    if (aspect == XDI_DMD_SCHEDULE) return "schedule";
    if (aspect == XDI_DMD_RUNGS) return "rungs";
    return aspect == XDI_DMD_RATIO ? "ratio" : "roles";
}

static void xdi_dmd_say_schedule(const xd_noise_schedule *s, char *out) {
    static const char names[][8] = { "FLOW", "EDM", "VP", "TRIG", "CUSTOM" };
    const int used = snprintf(out, XDI_DMD_TEXT, "%s, t from %.17g to %.17g, clamp_min %.17g", names[s->kind],
                              s->min_t, s->max_t, s->clamp_min);
    if (s->kind == XD_NOISE_VP)
        snprintf(out + used, (size_t)(XDI_DMD_TEXT - used), ", %lld levels %016llx",
                 (long long)s->table_count,
                 (unsigned long long)xd_hash(0, s->table, (size_t)s->table_count * sizeof *s->table));
}

static void xdi_dmd_say_rungs(const xd_dmd_rungs *r, char *out) {
    snprintf(out, XDI_DMD_TEXT, "%d steps from %.17g, times %016llx", r->steps, r->list[0],
             (unsigned long long)xd_hash(0, r->list, (size_t)(r->steps + 1) * sizeof *r->list));
}

static void xdi_dmd_say_ratio(const xd_dmd_desc *d, char *out) {
    static const char names[][12] = { "MODELOPT", "FASTGEN", "ORIGINAL" };
    snprintf(out, XDI_DMD_TEXT, "%s, 1 in %lld after %lld", names[d->alternation], (long long)d->frequency,
             (long long)d->lead);
}

static void xdi_dmd_say_roles(const xd_dmd_desc *d, char *out) {
    static const char names[][16] = { "student", "fake score", "discriminator" };
    size_t used = 0;
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        const int averages = d->trainers[role].average_count;
        if (role == XD_DMD_DISCRIMINATOR && !xdi_dmd_adversarial(d)) continue;
        used += (size_t)snprintf(out + used, XDI_DMD_TEXT - used, "%s%s with %d average%s", used ? ", " : "",
                                 names[role], averages, averages == 1 ? "" : "s");
    }
}

static void xdi_dmd_say(const xd_dmd_desc *d, int aspect, char out[XDI_DMD_TEXT]) {
    memset(out, 0, XDI_DMD_TEXT);
    if (aspect == XDI_DMD_SCHEDULE) xdi_dmd_say_schedule(&d->schedule, out);
    if (aspect == XDI_DMD_RUNGS) xdi_dmd_say_rungs(&d->rungs, out);
    if (aspect == XDI_DMD_RATIO) xdi_dmd_say_ratio(d, out);
    if (aspect == XDI_DMD_ROLES_AND_AVERAGES) xdi_dmd_say_roles(d, out);
}

/* Which roles a step trains. */
static const char *xdi_dmd_phase(const xd_dmd_desc *d, int64_t step) {
    const bool student = xd_dmd_trains(d, XD_DMD_STUDENT, step);
    if (xd_dmd_trains(d, XD_DMD_FAKE_SCORE, step)) return student ? "all" : "others";
    return "student";
}

static void xdi_dmd_say_settings(const xd_dmd_desc *d, char out[XDI_DMD_TEXT]) {
    snprintf(out, XDI_DMD_TEXT, "%016llx", (unsigned long long)xdi_dmd_settings_hash(d));
}

/* ---- writing ---- */

static void xdi_dmd_write_count(xd_json_writer *w, const char *key, int64_t value) {
    xd_json_write_key(w, key);
    xd_json_write_int64(w, value);
}

static void xdi_dmd_write_string(xd_json_writer *w, const char *key, const char *value) {
    xd_json_write_key(w, key);
    xd_json_write_string(w, value);
}

static xd_result xdi_dmd_write_bins(xd_dmd *d, xd_json_writer *w) {
    const int bins = d->desc.gan.fdistill.on ? d->desc.gan.fdistill.bins : 0;
    if (bins == 0) return XD_OK;
    double *values = (double *)xd_allocate(d->ctx, (size_t)bins * sizeof *values);
    XD_REQUIRE(d->ctx, values, XD_ERROR_MEMORY, "no room for %d bins", bins);
    const xd_result result = xdi_dmd_bins(d, values);
    xd_json_write_key(w, "bins");
    xd_json_write_array(w);
    for (int k = 0; k < bins && result == XD_OK; k++) xd_json_write_double(w, values[k]);
    xd_json_write_end(w);
    xd_release(d->ctx, values);
    return result;
}

static xd_result xdi_dmd_write_state(xd_dmd *d, xd_json_writer *w) {
    const xd_dmd_record record = xd_dmd_describe(d);
    char words[XDI_DMD_TEXT];
    xd_json_write_object(w);
    xdi_dmd_write_string(w, "kind", "xdistill.dmd");
    xdi_dmd_write_count(w, "version", XDI_DMD_STATE_VERSION);
    xdi_dmd_write_count(w, "step", record.step);
    xdi_dmd_write_count(w, "student", record.updates[XD_DMD_STUDENT]);
    xdi_dmd_write_count(w, "fake_score", record.updates[XD_DMD_FAKE_SCORE]);
    xdi_dmd_write_count(w, "discriminator", record.updates[XD_DMD_DISCRIMINATOR]);
    xdi_dmd_write_count(w, "warm_up", record.warm_up);
    xdi_dmd_write_string(w, "phase", xdi_dmd_phase(&d->desc, record.step));
    xd_json_write_key(w, "seed");
    xd_json_write_uint64(w, record.seed);
    for (int aspect = 0; aspect < XDI_DMD_ASPECTS; aspect++) {
        xdi_dmd_say(&d->desc, aspect, words);
        xdi_dmd_write_string(w, xdi_dmd_aspect_key(aspect), words);
    }
    xdi_dmd_say_settings(&d->desc, words);
    xdi_dmd_write_string(w, "settings", words);
    XD_TRY(xdi_dmd_write_bins(d, w));
    xd_json_write_end(w);
    return XD_OK;
}

XD_API xd_result xd_dmd_state_save(xd_dmd *dmd, char **text) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN_OF(dmd, text);
    xd_json_writer writer = xd_json_writer_create(dmd->ctx);
    const char *written = NULL;
    size_t bytes = 0;
    char *made = NULL;
    xd_result result = xdi_dmd_write_state(dmd, &writer);
    if (result == XD_OK) result = xd_json_writer_text(&writer, &written, &bytes);
    if (result == XD_OK) made = (char *)xd_allocate(dmd->ctx, bytes + 1);
    if (made) memcpy(made, written, bytes + 1);
    xd_json_writer_destroy(&writer);
    XD_TRY(result);
    XD_REQUIRE(dmd->ctx, made, XD_ERROR_MEMORY, "no room for a state of %zu bytes", bytes);
    *text = made;
    return XD_OK;
}

/* ---- reading ---- */

/* A text on its way into a distillation. */
typedef struct xdi_dmd_reader {
    const xd_dmd *d;
    const xd_json *object;
    xd_dmd_state_desc desc;
    xd_dmd_record record;
    double *bins; /* [bin_count] of the text; NULL: none */
    int64_t bin_count;
} xdi_dmd_reader;

static bool xdi_dmd_may_miss(const xdi_dmd_reader *r, int part) {
    return (r->desc.allow_missing & part) != 0;
}

static xd_result xdi_dmd_need(const xdi_dmd_reader *r, const char *key, const xd_json **out) {
    *out = xd_json_find(r->object, key);
    XD_REQUIRE(r->d->ctx, *out, XD_ERROR_MISSING, "the state of a distillation has no \"%s\"", key);
    return XD_OK;
}

static xd_result xdi_dmd_read_count(const xdi_dmd_reader *r, const char *key, int64_t *out) {
    const xd_json *value;
    XD_TRY(xdi_dmd_need(r, key, &value));
    XD_REQUIRE(r->d->ctx, xd_json_int64(value, out), XD_ERROR_FORMAT,
               "\"%s\" of the state of a distillation is no whole number, at byte %zu", key,
               xd_json_offset(value));
    return XD_OK;
}

/* A string that must be that of the distillation. */
static xd_result xdi_dmd_compare(const xdi_dmd_reader *r, const char *what, const char *key,
                                 const char *own) {
    const xd_json *value;
    XD_TRY(xdi_dmd_need(r, key, &value));
    const char *theirs = xd_json_string(value, NULL);
    XD_REQUIRE(r->d->ctx, theirs, XD_ERROR_FORMAT,
               "\"%s\" of the state of a distillation is no string, at byte %zu", key, xd_json_offset(value));
    XD_REQUIRE(r->d->ctx, strcmp(theirs, own) == 0, XD_ERROR_MISMATCH,
               "%s: the run has \"%.100s\", the distillation \"%.100s\"", what, theirs, own);
    return XD_OK;
}

/* Every member is one of those that are written. */
static xd_result xdi_dmd_check_members(const xdi_dmd_reader *r) {
    static const char known[] =
        " kind version step student fake_score discriminator warm_up phase seed schedule "
        "rungs ratio roles settings bins ";
    for (const xd_json *m = xd_json_first(r->object); m; m = xd_json_next(m)) {
        char key[32];
        const bool fits = snprintf(key, sizeof key, " %s ", xd_json_key(m, NULL)) < (int)sizeof key;
        const bool one = !strchr(xd_json_key(m, NULL), ' '); /* two of them are no member */
        XD_REQUIRE(r->d->ctx, fits && one && strstr(known, key), XD_ERROR_FORMAT,
                   "\"%.40s\" is no part of the state of a distillation", xd_json_key(m, NULL));
    }
    return XD_OK;
}

static xd_result xdi_dmd_read_kind(const xdi_dmd_reader *r) {
    const char *kind = xd_json_string(xd_json_find(r->object, "kind"), NULL);
    int64_t version = 0;
    XD_REQUIRE(r->d->ctx, kind && strcmp(kind, "xdistill.dmd") == 0, XD_ERROR_FORMAT,
               "kind \"%.40s\" is not that of the state of a distillation, \"xdistill.dmd\"",
               kind ? kind : "");
    XD_TRY(xdi_dmd_read_count(r, "version", &version));
    XD_REQUIRE(r->d->ctx, version == XDI_DMD_STATE_VERSION, XD_ERROR_UNSUPPORTED,
               "the state of a distillation is of version %lld; %d can be read", (long long)version,
               XDI_DMD_STATE_VERSION);
    return xdi_dmd_check_members(r);
}

static xd_result xdi_dmd_read_record(xdi_dmd_reader *r) {
    const xd_json *seed;
    memset(&r->record, 0, sizeof r->record);
    r->record.warm_up = r->d->record.warm_up;
    XD_TRY(xdi_dmd_read_count(r, "step", &r->record.step));
    XD_TRY(xdi_dmd_read_count(r, "student", &r->record.updates[XD_DMD_STUDENT]));
    XD_TRY(xdi_dmd_read_count(r, "fake_score", &r->record.updates[XD_DMD_FAKE_SCORE]));
    XD_TRY(xdi_dmd_read_count(r, "discriminator", &r->record.updates[XD_DMD_DISCRIMINATOR]));
    if (!xdi_dmd_may_miss(r, XD_DMD_STATE_WARM_UP) || xd_json_find(r->object, "warm_up"))
        XD_TRY(xdi_dmd_read_count(r, "warm_up", &r->record.warm_up));
    XD_TRY(xdi_dmd_need(r, "seed", &seed));
    XD_REQUIRE(r->d->ctx, xd_json_uint64(seed, &r->record.seed), XD_ERROR_FORMAT,
               "\"seed\" of the state of a distillation is no seed, at byte %zu", xd_json_offset(seed));
    XD_REQUIRE(r->d->ctx, r->record.seed == r->d->desc.seed, XD_ERROR_MISMATCH,
               "the run has seed %llu, the distillation %llu", (unsigned long long)r->record.seed,
               (unsigned long long)r->d->desc.seed);
    return XD_OK;
}

static xd_result xdi_dmd_read_settings(const xdi_dmd_reader *r) {
    const bool missing = xdi_dmd_may_miss(r, XD_DMD_STATE_SETTINGS) && !xd_json_find(r->object, "settings");
    char words[XDI_DMD_TEXT];
    for (int aspect = 0; aspect < XDI_DMD_ASPECTS; aspect++) {
        xdi_dmd_say(&r->d->desc, aspect, words);
        XD_TRY(xdi_dmd_compare(r, xdi_dmd_aspect_key(aspect), xdi_dmd_aspect_key(aspect), words));
    }
    xdi_dmd_say_settings(&r->d->desc, words);
    if (!missing && !r->desc.allow_settings)
        XD_TRY(xdi_dmd_compare(r,
                               "settings (a hash of clips, losses, weights, guidance and times; "
                               "xd_dmd_state_desc.allow_settings permits others)",
                               "settings", words));
    return xdi_dmd_compare(r, "phase", "phase", xdi_dmd_phase(&r->d->desc, r->record.step));
}

static xd_result xdi_dmd_read_bins(xdi_dmd_reader *r) {
    const int bins = r->d->desc.gan.fdistill.on ? r->d->desc.gan.fdistill.bins : 0;
    const xd_json *array = xd_json_find(r->object, "bins"), *value = xd_json_first(array);
    if (bins == 0 && (!array || r->desc.allow_settings)) return XD_OK;
    if (!array && xdi_dmd_may_miss(r, XD_DMD_STATE_BINS)) return XD_OK;
    XD_TRY(xdi_dmd_need(r, "bins", &array));
    XD_REQUIRE(r->d->ctx, xd_json_kind_of(array) == XD_JSON_ARRAY, XD_ERROR_FORMAT,
               "\"bins\" of the state of a distillation are no list, at byte %zu", xd_json_offset(array));
    r->bin_count = (int64_t)xd_json_count(array);
    XD_REQUIRE(r->d->ctx, r->bin_count == bins, XD_ERROR_MISMATCH,
               "the run has %lld bins of f-distill, the distillation %d", (long long)r->bin_count, bins);
    r->bins = (double *)xd_allocate(r->d->ctx, (size_t)bins * sizeof *r->bins);
    XD_REQUIRE(r->d->ctx, r->bins, XD_ERROR_MEMORY, "no room for %d bins", bins);
    for (int k = 0; k < bins; k++, value = xd_json_next(value))
        XD_REQUIRE(r->d->ctx, xd_json_double(value, &r->bins[k]) && r->bins[k] > 0.0, XD_ERROR_FORMAT,
                   "bin %d of %d is no number above 0, at byte %zu", k, bins, xd_json_offset(value));
    return XD_OK;
}

static xd_result xdi_dmd_read_state(xdi_dmd_reader *r) {
    XD_TRY(xdi_dmd_read_kind(r));
    XD_TRY(xdi_dmd_read_record(r));
    XD_TRY(xdi_dmd_read_settings(r));
    return xdi_dmd_read_bins(r);
}

XD_API xd_result xd_dmd_state_load(xd_dmd *dmd, const char *text, const xd_dmd_state_desc *desc) {
    XDI_LIVE(xd_dmd, dmd);
    XDI_GIVEN(dmd ? dmd->ctx : NULL, dmd);
    xdi_dmd_reader reader;
    xd_json *root = NULL;
    memset(&reader, 0, sizeof reader);
    reader.d = dmd;
    if (desc) reader.desc = *desc;
    XD_REQUIRE(dmd->ctx,
               reader.desc.allow_missing >= 0 && reader.desc.allow_missing < (int)XD_DMD_STATE_PARTS,
               XD_ERROR_ARGUMENT, "allow_missing %d; sums up to %d are possible", reader.desc.allow_missing,
               (int)XD_DMD_STATE_PARTS - 1);
    XD_REQUIRE(dmd->ctx, text, XD_ERROR_MISSING, "the checkpoint has no state of a distillation of seed %llu",
               (unsigned long long)dmd->desc.seed);
    XD_TRY(xd_json_load_memory(dmd->ctx, NULL, text, strlen(text), &root));
    reader.object = xd_json_find(root, "dmd");
    if (!reader.object) reader.object = root;
    xd_result result = xdi_dmd_read_state(&reader);
    if (result == XD_OK) result = xd_dmd_resume(dmd, &reader.record);
    if (result == XD_OK && reader.bins) result = xdi_dmd_set_bins(dmd, reader.bins, (int)reader.bin_count);
    xd_release(dmd->ctx, reader.bins);
    xd_json_destroy(dmd->ctx, root);
    return result;
}
