/* What averages hold, for callers: views of shadows, copies to other tensors, states that are saved and loaded. */

#include "train/ema_internal.h"
#include "train/internal.h"

#include <string.h>

XD_PRIVATE int64_t xdi_ema_entries(const xd_ema *ema) {
    return ema->param_count;
}

XD_PRIVATE xd_param xdi_ema_entry(const xd_ema *ema, int64_t index) {
    const xdi_ema_shadow *s = &ema->shadows[ema->names[index].shadow];
    xd_param entry = ema->created[index];
    entry.value = s->value;
    entry.dtype = s->dtype;
    entry.gradient = NULL;
    return entry;
}

/* The compensation of a shadow, in the view of its value; a view of nothing where there is none. */
static xd_param xdi_ema_compensation_of(const xd_ema *ema, const xdi_ema_shadow *s, xd_param view) {
    if (!ema->desc.compensated || s->copied) memset(&view, 0, sizeof view);
    if (view.name) view.dtype = XD_DTYPE_BF16;
    view.value = s->compensation;
    return view;
}

XD_API xd_ema_entry xd_ema_view(const xd_ema *ema, int64_t index) {
    XD_ASSERT(ema);
    xd_ema_entry view;
    memset(&view, 0, sizeof view);
    if (index < 0 || index >= ema->shadow_count) return view;
    const xdi_ema_shadow *s = &ema->shadows[index];
    view.shadow = ema->created[s->source];
    view.shadow.frozen = ema->params[s->source].frozen; /* it may have been thawed */
    view.shadow.name = s->name;
    view.shadow.value = s->value;
    view.shadow.dtype = s->dtype;
    view.shadow.gradient = NULL;
    view.compensation = xdi_ema_compensation_of(ema, s, view.shadow);
    return view;
}

XD_PRIVATE xd_param xdi_ema_entry_compensation(const xd_ema *ema, int64_t index) {
    return xdi_ema_compensation_of(ema, &ema->shadows[ema->names[index].shadow], xdi_ema_entry(ema, index));
}

XD_PRIVATE void xdi_ema_restore(xd_ema *ema, int64_t iteration, bool initialized) {
    ema->counts_there = false;
    ema->iteration = iteration;
    ema->initialized = initialized;
}

XD_API xd_ema_info xd_ema_describe(const xd_ema *ema) {
    XD_ASSERT(ema);
    xd_ema_info info;
    memset(&info, 0, sizeof info);
    info.record.format_version = 1;
    xdi_ema_read_counters(ema, &info.record.iteration, &info.record.initialized);
    info.record.config = ema->desc;
    info.record.config.params = NULL;
    info.record.config.param_count = 0;
    info.count = ema->shadow_count;
    info.decay = xdi_ema_decay_at(&ema->desc, info.record.iteration);
    info.swapped = ema->swapped;
    return info;
}

/* Adds a name to the list of those that did not match, while there is room and there are fewer than five. */
static void xdi_ema_note(xd_ema_match *match, const char *name) {
    const int64_t noted = match->missing_in_shadow + match->missing_in_target + match->wrong_shape;
    const size_t used = strlen(match->names), length = strlen(name), comma = used ? 2 : 0;
    if (noted > 5 || used + comma + length + 1 > sizeof match->names) return;
    if (comma) memcpy(match->names + used, ", ", 2);
    memcpy(match->names + used + comma, name, length + 1);
}

static bool xdi_ema_same_shape(const xd_param *a, const xd_param *b) {
    if (a->count != b->count) return false;
    if (!a->shape || !b->shape) return true;
    return a->dims == b->dims && memcmp(a->shape, b->shape, (size_t)a->dims * sizeof *a->shape) == 0;
}

/* Compares a caller's list with the shadows. Matched shadows are marked by casts[shadow].count >= 0: the array is not
 * in use between updates. */
static void xdi_ema_compare(const xd_ema *ema, const xd_param *list, int64_t count, xd_ema_match *match) {
    char room[XDI_EMA_NAME_ROOM];
    memset(match, 0, sizeof *match);
    for (int64_t i = 0; i < ema->shadow_count; i++) ema->casts[i].count = -1;
    for (int64_t i = 0; i < count; i++) {
        const char *name = list[i].name ? list[i].name : "(unnamed)";
        const int64_t s = xdi_ema_find(ema, name, room, sizeof room);
        if (s < 0) {
            match->missing_in_shadow++;
            xdi_ema_note(match, name);
            continue;
        }
        ema->casts[s].count = 0;
        if (xdi_ema_same_shape(&list[i], &ema->created[ema->shadows[s].source])) {
            match->matched++;
        } else {
            match->wrong_shape++;
            xdi_ema_note(match, name);
        }
    }
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        if (ema->casts[i].count == 0) continue;
        match->missing_in_target++;
        xdi_ema_note(match, ema->shadows[i].name);
    }
}

static xd_result xdi_ema_judge(const xd_ema *ema, const xd_ema_match *m, bool lenient, bool loading) {
    XD_REQUIRE(ema->ctx, m->wrong_shape == 0, XD_ERROR_SHAPE, "%lld of %lld tensors have another shape: %s",
               (long long)m->wrong_shape, (long long)(m->matched + m->wrong_shape), m->names);
    if (lenient) return XD_OK;
    /* missing: a name that the receiver needs and does not get; unexpected: one that it does not have */
    XD_REQUIRE(ema->ctx, m->missing_in_target == 0, loading ? XD_ERROR_MISSING : XD_ERROR_UNEXPECTED,
               "%lld shadows of %lld have no counterpart: %s", (long long)m->missing_in_target,
               (long long)ema->shadow_count, m->names);
    XD_REQUIRE(ema->ctx, m->missing_in_shadow == 0, loading ? XD_ERROR_UNEXPECTED : XD_ERROR_MISSING,
               "%lld names have no shadow: %s", (long long)m->missing_in_shadow, m->names);
    return XD_OK;
}

static xd_result xdi_ema_move(const xd_ema *ema, const xd_param *list, int64_t count, bool loading,
                              bool write) {
    const xd_launch launch = xdi_train_launch(ema->ctx, NULL);
    char room[XDI_EMA_NAME_ROOM];
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = xdi_ema_find(ema, list[i].name, room, sizeof room);
        if (index < 0) continue;
        XD_REQUIRE(ema->ctx, list[i].value || list[i].count == 0, XD_ERROR_ARGUMENT,
                   "%s: %lld elements, value at NULL", list[i].name, (long long)list[i].count);
        const xdi_ema_shadow *s = &ema->shadows[index];
        xd_cast_array cast;
        cast.target = loading ? s->value : list[i].value;
        cast.target_dtype = loading ? s->dtype : list[i].dtype;
        cast.source = loading ? list[i].value : s->value;
        cast.source_dtype = loading ? list[i].dtype : s->dtype;
        cast.count = write ? list[i].count : 0; /* an empty cast still checks its dtypes */
        XD_TRY(xd_ctx_kernels(ema->ctx)->optimizer.cast(&launch, &cast, 1));
    }
    return XD_OK;
}

/* All checks come before the first element is written. */
static xd_result xdi_ema_exchange(const xd_ema *ema, const xd_param *list, int64_t count, bool lenient,
                                  bool loading, xd_ema_match *match) {
    xd_ema_match found;
    XD_TRY(xdi_ema_in_place(ema));
    XD_REQUIRE(ema->ctx, count >= 0 && (list || count == 0), XD_ERROR_ARGUMENT, "%lld tensors at %p",
               (long long)count, (const void *)list);
    xdi_ema_compare(ema, list, count, &found);
    if (match) *match = found;
    XD_TRY(xdi_ema_judge(ema, &found, lenient, loading));
    XD_TRY(xdi_ema_move(ema, list, count, loading, false));
    return xdi_ema_move(ema, list, count, loading, true);
}

XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match) {
    XDI_LIVE(xd_ema, ema);
    XDI_GIVEN(ema ? ema->ctx : NULL, ema);
    XDI_GIVEN_LIST(ema->ctx, targets, count);
    return xdi_ema_exchange(ema, targets, count, lenient, false, match);
}

/* Whether the last comparison matched every shadow that is averaged. */
static bool xdi_ema_complete(const xd_ema *ema) {
    for (int64_t i = 0; i < ema->shadow_count; i++)
        if (ema->casts[i].count < 0 && !ema->shadows[i].copied) return false;
    return ema->shadow_count > 0;
}

/* Compensations of what the last comparison matched become zero. */
static xd_result xdi_ema_forget(const xd_ema *ema) {
    const xd_launch launch = xdi_train_launch(ema->ctx, NULL);
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const size_t bytes = (size_t)ema->created[s->source].count * sizeof *s->compensation;
        if (!s->compensation || ema->casts[i].count < 0 || bytes == 0) continue;
        XD_TRY(xd_ctx_kernels(ema->ctx)->memory.fill(&launch, s->compensation, 0, bytes));
    }
    return XD_OK;
}

XD_API xd_result xd_ema_load(xd_ema *ema, const xd_ema_load_desc *desc, xd_ema_match *match) {
    XDI_LIVE(xd_ema, ema);
    XDI_GIVEN(ema ? ema->ctx : NULL, ema);
    XDI_GIVEN(ema->ctx, desc);
    XDI_GIVEN_LIST(ema->ctx, desc->sources, desc->source_count);
    const xd_ema_record *record = desc->record;
    XD_REQUIRE(ema->ctx, !record || record->format_version == 1, XD_ERROR_FORMAT,
               "the record has format version %d, this library reads 1", record->format_version);
    XD_TRY(xdi_ema_exchange(ema, desc->sources, desc->source_count, desc->lenient, true, match));
    XD_TRY(xdi_ema_forget(ema));
    xdi_ema_recall_counters(ema);
    if (record) ema->iteration = record->iteration;
    if (xdi_ema_complete(ema) || (record && record->initialized)) ema->initialized = true;
    return XD_OK;
}
