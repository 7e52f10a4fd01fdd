/* The whole state on rank 0, and from there: a window of one tensor at a time. */

#include "checkpoint/full.h"

#include "base/half.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "comm/topology.h"
#include "tensor/internal.h"
#include "train/internal.h"

#include <stdio.h>
#include <string.h>

enum {
    XDI_FULL_ABSENT = -1,  /* the list has no such tensor: it stays as it is */
    XDI_FULL_UNFORMED = -2 /* a state of an optimizer that has never stepped */
};

/* What the ranks have of the tensor that is moved; every rank knows it of all, so none asks before it sends. */
typedef struct xdi_full_rank {
    xd_region region;
    xd_tensor_part part;
    int64_t begin, end; /* positions in this window */
} xdi_full_rank;

typedef struct xdi_full {
    xd_comm *comm;
    xd_ctx *ctx;
    int rank, size;
    const char *group;
    size_t staging_bytes;
    xdi_content content;
    bool gathers;         /* replicas neither send nor count */
    bool as_it_is;        /* scatter: rank 0 has this tensor where it could be sent from, in its type here */
    xdi_full_rank *ranks; /* [size] */
    int64_t *lengths, *counts, *sent, *messages;
    unsigned char *host, *window; /* rank 0: elements in the order of the ranks, and in that of the tensor */
    unsigned char *wire;          /* the former in memory of the device */
    int64_t *match;               /* scatter: [content.tensor_count] entries of the list, or XDI_FULL_... */
    char shapes[100 + 2 * XDI_SHAPE_TEXT]; /* scatter: both of the first tensor that has two; of rank 0 */
} xdi_full;

/* ---- both ways ---- */

static xdi_full xdi_full_begin(xd_comm *comm, const char *group, size_t staging_bytes) {
    xdi_full f;
    memset(&f, 0, sizeof f);
    f.comm = comm;
    f.ctx = xd_comm_ctx(comm);
    f.rank = xd_comm_rank(comm);
    f.size = xd_comm_size(comm);
    f.group = group;
    f.staging_bytes = staging_bytes ? staging_bytes : (size_t)XDI_STAGING;
    /* an element for each rank must fit, as each may hold the same one */
    if (f.staging_bytes < (size_t)f.size * 8) f.staging_bytes = (size_t)f.size * 8;
    return f;
}

static bool xdi_full_on_device(const xdi_full *f) {
    return xd_ctx_kernels(f->ctx)->device != XD_DEVICE_CPU;
}

static void xdi_full_end(xdi_full *f) {
    if (xdi_full_on_device(f)) xd_ctx_kernels(f->ctx)->memory.release(f->ctx, f->wire);
    xd_release(f->ctx, f->match);
    xd_release(f->ctx, f->host);
    xd_release(f->ctx, f->window);
    xd_release(f->ctx, f->lengths);
    xd_release(f->ctx, f->ranks);
    xdi_content_destroy(&f->content);
}

static bool xdi_full_asks(const xdi_full *f, const xdi_stored *t) {
    return !f->group || strcmp(f->content.groups[t->group].name, f->group) == 0;
}

static xd_result xdi_full_check_group(const xdi_full *f) {
    bool found = !f->group;
    for (int64_t g = 0; g < f->content.group_count; g++)
        found = found || strcmp(f->content.groups[g].name, f->group) == 0;
    XD_REQUIRE(f->ctx, found, XD_ERROR_MISSING, "there is no group \"%.80s\" among %lld", f->group,
               (long long)f->content.group_count);
    return XD_OK;
}

/* Bytes of staging that are of use: those of the largest tensor, on each rank that holds all of it. */
static size_t xdi_full_room(const xdi_full *f) {
    const uint64_t copies = f->gathers ? 1 : (uint64_t)f->size;
    uint64_t most = 0;
    for (int64_t i = 0; i < f->content.tensor_count; i++) {
        const xdi_stored *t = &f->content.tensors[i];
        const uint64_t bytes = (uint64_t)xdi_stored_numel(t) * xd_dtype_size(t->dtype);
        if (xdi_full_asks(f, t) && bytes > most) most = bytes;
    }
    if (most > f->staging_bytes / copies) return f->staging_bytes;
    return (size_t)(most * copies);
}

static xd_result xdi_full_reserve(xdi_full *f) {
    const size_t size = (size_t)f->size, room = xdi_full_room(f);
    const size_t numbers = ((size_t)XDI_PART_NUMBERS + 1) * (size + 1) + 2 * size;
    f->ranks = (xdi_full_rank *)xd_allocate(f->ctx, size * sizeof *f->ranks);
    f->lengths = (int64_t *)xd_allocate(f->ctx, numbers * sizeof *f->lengths);
    XD_REQUIRE(f->ctx, f->ranks && f->lengths, XD_ERROR_MEMORY, "no room for the parts of %d ranks", f->size);
    f->counts = f->lengths + size;
    f->sent = f->counts + size;
    f->messages = f->sent + XDI_PART_NUMBERS + 1;
    if (f->rank != 0) return XD_OK;
    f->host = (unsigned char *)xdi_allocate_unwritten(f->ctx, room);
    f->window = (unsigned char *)xdi_allocate_unwritten(f->ctx, f->gathers ? room : 0);
    f->wire = xdi_full_on_device(f)
                  ? (unsigned char *)xd_ctx_kernels(f->ctx)->memory.allocate(f->ctx, room ? room : 1)
                  : f->host;
    XD_REQUIRE(f->ctx, f->host && f->window && f->wire, XD_ERROR_MEMORY, "no room for %llu bytes of staging",
               (unsigned long long)room);
    return XD_OK;
}

/* Who has what of a tensor, and whether rank 0 has all of it as the ranks do. Collective. */
static xd_result xdi_full_learn(xdi_full *f, const xdi_stored *t, bool as_it_is) {
    const bool holds = !(f->gathers && t->part->replica);
    const int64_t length = 1 + xdi_part_write(t->part, holds, f->sent + 1);
    f->sent[0] = as_it_is;
    const int64_t *at = f->messages;
    for (int r = 0; r < f->size; r++) f->counts[r] = 1;
    XD_TRY(xd_all_gather(f->comm, &length, f->lengths, f->counts, XD_DTYPE_I64));
    XD_TRY(xd_all_gather(f->comm, f->sent, f->messages, f->lengths, XD_DTYPE_I64));
    f->as_it_is = f->messages[0] != 0;
    for (int r = 0; r < f->size; at += f->lengths[r++]) {
        xdi_full_rank *rank = &f->ranks[r];
        (void)xdi_part_read(t->part, at + 1, &rank->region, &rank->part);
        rank->begin = rank->end = rank->part.range.begin;
    }
    return XD_OK;
}

/* The end of the window that begins at `first`: as far as all that its ranks hold of it has room. */
static int64_t xdi_full_plan(xdi_full *f, const xdi_stored *t, int64_t first) {
    const int64_t room = (int64_t)(f->staging_bytes / xd_dtype_size(t->dtype));
    const int64_t numel = xdi_stored_numel(t);
    int64_t length = numel - first < room ? numel - first : room, total = 0;
    for (;; length /= 2, total = 0) {
        for (int r = 0; r < f->size; r++) {
            xdi_full_rank *rank = &f->ranks[r];
            rank->end = xdi_part_position(&rank->part, first + length);
            f->counts[r] = rank->end - rank->begin;
            total += f->counts[r];
        }
        if (total <= room || length <= 1) return first + length;
    }
}

static void xdi_full_next(xdi_full *f) {
    for (int r = 0; r < f->size; r++) f->ranks[r].begin = f->ranks[r].end;
}

/* Where this rank's elements of the window lie. */
static void *xdi_full_own(const xdi_full *f, const xdi_stored *t) {
    const int64_t position = f->ranks[f->rank].begin - t->part->range.begin;
    return f->counts[f->rank] ? (char *)t->data + (size_t)position * xd_dtype_size(t->dtype) : NULL;
}

/* Whether the elements of a window lie in the order of the ranks as they do in the tensor: then none need to be moved. */
static bool xdi_full_is_in_order(const xdi_full *f, int64_t first) {
    int64_t next = first;
    for (int r = 0; r < f->size; r++) {
        const xdi_full_rank *rank = &f->ranks[r];
        for (int64_t at = rank->begin, run, index; at < rank->end; at += run) {
            run = xdi_part_run(&rank->part, at, &index);
            if (index != next) return false;
            if (run > rank->end - at) run = rank->end - at;
            next += run;
        }
    }
    return true;
}

/* Elements between host and wire, on a device. */
static xd_result xdi_full_copy(const xdi_full *f, size_t size, xd_copy_kind kind) {
    const xd_launch launch = xd_ctx_launch(f->ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(f->ctx)->memory;
    const size_t bytes = (size_t)xdi_comm_total(f->counts, f->size) * size;
    const bool out = kind == XD_COPY_TO_HOST;
    if (!xdi_full_on_device(f) || bytes == 0) return XD_OK;
    XD_TRY(memory->copy(&launch, out ? f->host : f->wire, out ? f->wire : f->host, bytes, kind));
    return memory->synchronize(&launch);
}

/* ---- gather ---- */

/* Puts what has arrived into the order of the tensor. */
static void xdi_full_unpack(xdi_full *f, size_t size, int64_t first) {
    const unsigned char *from = f->host;
    for (int r = 0; r < f->size; r++) {
        const xdi_full_rank *rank = &f->ranks[r];
        for (int64_t at = rank->begin, run, index; at < rank->end; at += run) {
            run = xdi_part_run(&rank->part, at, &index);
            if (run > rank->end - at) run = rank->end - at;
            memcpy(f->window + (size_t)(index - first) * size, from, (size_t)run * size);
            from += (size_t)run * size;
        }
    }
}

static xd_result xdi_full_take(const xdi_full *f, const xd_state_gather_desc *desc, const xdi_stored *t,
                               xd_interval elements, const void *data) {
    xd_state_tensor whole;
    memset(&whole, 0, sizeof whole);
    whole.group = f->content.groups[t->group].name;
    whole.name = t->name;
    whole.dtype = t->dtype;
    whole.ndim = t->step ? 0 : t->part->ndim;
    whole.shape = t->part->shape;
    const xd_result result = desc->take(desc->user, &whole, elements, data);
    XD_REQUIRE(f->ctx, result == XD_OK, result, "tensor \"%.80s\": elements [%lld, %lld) were refused",
               t->name, (long long)elements.begin, (long long)elements.end);
    return XD_OK;
}

static xd_result xdi_full_gather_window(xdi_full *f, const xd_state_gather_desc *desc, const xdi_stored *t,
                                        xd_interval elements) {
    const size_t size = xd_dtype_size(t->dtype);
    xd_result mine = XD_OK;
    XD_TRY(xd_gather(f->comm, xdi_full_own(f, t), f->wire, f->counts, t->dtype, 0));
    if (f->rank == 0) {
        mine = xdi_full_copy(f, size, XD_COPY_TO_HOST);
        const bool in_order = xdi_full_is_in_order(f, elements.begin);
        if (mine == XD_OK && !in_order) xdi_full_unpack(f, size, elements.begin);
        if (mine == XD_OK) mine = xdi_full_take(f, desc, t, elements, in_order ? f->host : f->window);
    }
    return xd_agree(f->comm, mine);
}

static xd_result xdi_full_gather_tensor(xdi_full *f, const xd_state_gather_desc *desc, const xdi_stored *t) {
    xd_interval elements = { 0, 1 };
    if (t->step)
        return xd_agree(f->comm, f->rank == 0 ? xdi_full_take(f, desc, t, elements, t->step) : XD_OK);
    const int64_t numel = xdi_stored_numel(t);
    XD_TRY(xdi_full_learn(f, t, false));
    elements.end = 0;
    do {
        elements.begin = elements.end;
        elements.end = xdi_full_plan(f, t, elements.begin);
        XD_TRY(xdi_full_gather_window(f, desc, t, elements));
        xdi_full_next(f);
    } while (elements.end < numel);
    return XD_OK;
}

static xd_result xdi_full_gather_list(xdi_full *f, const xd_state_gather_desc *desc) {
    XD_REQUIRE(f->ctx, f->rank != 0 || desc->take, XD_ERROR_ARGUMENT, "rank 0 of %d has nothing that takes",
               f->size);
    XD_TRY(xdi_content_create(f->ctx, desc->networks, desc->network_count, &f->content));
    XD_TRY(xdi_full_check_group(f));
    return xdi_content_get_steps(&f->content);
}

/* Group and staging decide what each rank takes part in. */
static xd_result xdi_full_agree_settings(const xdi_full *f, const xd_state_scatter_desc *scatter) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "scatter", scatter != NULL);
    xdi_fact_integer(&facts, "staging_bytes", (int64_t)f->staging_bytes);
    xdi_fact_integer(&facts, "lenient", scatter && scatter->lenient);
    xdi_fact_integer(&facts, "convert", scatter && scatter->convert);
    xdi_fact_bytes(&facts, "group", f->group, f->group ? strlen(f->group) : 0);
    return xdi_agree_facts(f->comm, &facts, scatter ? "settings of a scatter" : "settings of a gather");
}

static xd_result xdi_full_gather_run(xdi_full *f, const xd_state_gather_desc *desc) {
    XD_TRY(xd_agree(f->comm, xdi_full_gather_list(f, desc)));
    XD_TRY(xdi_full_agree_settings(f, NULL));
    XD_TRY(xdi_content_agree(&f->content, f->comm));
    XD_TRY(xdi_cover_check(&f->content, f->comm));
    XD_TRY(xdi_cover_steps(&f->content, f->comm));
    XD_TRY(xd_agree(f->comm, xdi_full_reserve(f)));
    for (int64_t i = 0; i < f->content.tensor_count; i++)
        if (xdi_full_asks(f, &f->content.tensors[i]))
            XD_TRY(xdi_full_gather_tensor(f, desc, &f->content.tensors[i]));
    return XD_OK;
}

static xd_result xdi_full_gather(xd_comm *comm, const xd_state_gather_desc *desc) {
    xdi_full f = xdi_full_begin(comm, desc->group, desc->staging_bytes);
    f.gathers = true;
    const xd_result result = xdi_full_gather_run(&f, desc);
    xdi_full_end(&f);
    return result;
}

/* ---- scatter: which tensors, found by rank 0 ---- */

static int xdi_full_by_name(const void *a, const void *b) {
    const xd_state_tensor *s = (const xd_state_tensor *)a, *t = (const xd_state_tensor *)b;
    const int order = strcmp(s->group, t->group);
    return order ? order : strcmp(s->name, t->name);
}

static xd_result xdi_full_sort(const xdi_full *f, const xd_state_scatter_desc *desc, const void **order) {
    for (int64_t i = 0; i < desc->tensor_count; i++) {
        const xd_state_tensor *t = &desc->tensors[i];
        XD_REQUIRE(f->ctx,
                   t->group && t->name && t->ndim >= 0 && t->ndim <= XD_DIMS_MAX &&
                       (t->ndim == 0 || t->shape),
                   XD_ERROR_ARGUMENT, "tensor %lld of the list: \"%.80s\" of %d dimensions at %p",
                   (long long)i, t->name ? t->name : "", t->ndim, (const void *)t->shape);
        order[i] = t;
    }
    xdi_sort(order, (size_t)desc->tensor_count, xdi_full_by_name);
    for (int64_t i = 1; i < desc->tensor_count; i++)
        XD_REQUIRE(f->ctx, xdi_full_by_name(order[i - 1], order[i]) != 0, XD_ERROR_ARGUMENT,
                   "two tensors of %.80s are named \"%.80s\"", ((const xd_state_tensor *)order[i])->group,
                   ((const xd_state_tensor *)order[i])->name);
    return XD_OK;
}

/* The entry of the list that is a tensor of the content. */
static int64_t xdi_full_find(const xdi_full *f, const xd_state_scatter_desc *desc, const void **order,
                             const xdi_stored *t) {
    xd_state_tensor key;
    int64_t low = 0, high = desc->tensor_count;
    memset(&key, 0, sizeof key);
    key.group = f->content.groups[t->group].name;
    key.name = t->name;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (xdi_full_by_name(order[middle], &key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == desc->tensor_count || xdi_full_by_name(order[low], &key) != 0) return XDI_FULL_ABSENT;
    return (const xd_state_tensor *)order[low] - desc->tensors;
}

static bool xdi_full_is_state(const xdi_full *f, const xdi_stored *t) {
    return strncmp(f->content.groups[t->group].name, "optim", 5) == 0;
}

static bool xdi_full_is_master(const xdi_full *f, const xdi_stored *t) {
    return xdi_full_is_state(f, t) && strncmp(t->name, "optim.master.", 13) == 0;
}

/* Marks states that nobody has formed. Those of a parameter follow one another. */
static void xdi_full_mark_unformed(xdi_full *f) {
    const xdi_content *c = &f->content;
    for (int64_t first = 0, end; first < c->tensor_count; first = end) {
        const xdi_stored *t = &c->tensors[first];
        bool any = false;
        for (end = first;
             end < c->tensor_count && c->tensors[end].part == t->part && c->tensors[end].group == t->group;
             end++)
            any = any || f->match[end] >= 0;
        for (int64_t i = first; i < end && xdi_full_is_state(f, t) && xdi_full_asks(f, t); i++)
            if (f->match[i] < 0 && (!any || xdi_full_is_master(f, &c->tensors[i])))
                f->match[i] = XDI_FULL_UNFORMED;
    }
}

static bool xdi_full_fits_type(const xdi_stored *t, xd_dtype dtype, bool convert) {
    if (t->dtype == dtype) return true;
    return convert && xdi_load_converts(dtype) && (t->step || xdi_load_converts(t->dtype));
}

/* The name of what was counted last. */
static void xdi_full_note(xd_state_report *r, const char *name) {
    if (r->missing + r->unexpected + r->wrong_shape + r->wrong_type <= 5)
        xdi_load_append(r->names, sizeof r->names, name);
}

static void xdi_full_note_shapes(xdi_full *f, const xdi_stored *t, const xd_state_tensor *given) {
    char theirs[XDI_SHAPE_TEXT] = "another", ours[XDI_SHAPE_TEXT];
    if (f->shapes[0]) return;
    if (given->shape || given->ndim == 0) (void)xdi_shape_print(given->ndim, given->shape, theirs);
    snprintf(f->shapes, sizeof f->shapes, "\"%.80s\" is %s there and %s here", t->name, theirs,
             xdi_shape_print(t->step ? 0 : t->part->ndim, t->part->shape, ours));
}

/* Counts one tensor of the content, and forgets its entry when that does not fit. */
static xd_result xdi_full_judge(xdi_full *f, const xd_state_scatter_desc *desc, int64_t i,
                                xd_state_report *report) {
    const xdi_stored *t = &f->content.tensors[i];
    const xd_state_tensor *given = f->match[i] >= 0 ? &desc->tensors[f->match[i]] : NULL;
    const int ndim = t->step ? 0 : t->part->ndim;
    if (f->match[i] == XDI_FULL_UNFORMED) {
        report->synthesised++;
        return XD_OK;
    }
    const bool shape = given && given->ndim == ndim &&
                       memcmp(given->shape ? given->shape : t->part->shape, t->part->shape,
                              (size_t)ndim * sizeof *t->part->shape) == 0;
    const bool type = given && xdi_full_fits_type(t, given->dtype, desc->convert);
    if (given && !shape) xdi_full_note_shapes(f, t, given);
    if (!shape || !type) {
        report->missing += !given;
        report->wrong_shape += given && !shape;
        report->wrong_type += given && shape;
        xdi_full_note(report, t->name);
        f->match[i] = XDI_FULL_ABSENT;
        return XD_OK;
    }
    XD_REQUIRE(f->ctx, given->data || xdi_stored_numel(t) == 0, XD_ERROR_STATE,
               "tensor \"%.80s\": %lld elements at NULL", t->name, (long long)xdi_stored_numel(t));
    report->loaded++;
    if (given->dtype == t->dtype) return XD_OK;
    if (report->converted++ < 5)
        xdi_load_append(report->converted_names, sizeof report->converted_names, t->name);
    return XD_OK;
}

/* A count of steps as an entry of the list has it. */
static xd_result xdi_full_take_step(const xdi_full *f, const xdi_stored *t, const xd_state_tensor *given) {
    if (given->dtype == XD_DTYPE_I64) {
        memcpy(t->step, given->data, sizeof *t->step);
    } else {
        const double value = xd_load_f64(given->data, given->dtype, 0);
        XD_REQUIRE(f->ctx, value >= 0.0 && value < 9007199254740992.0 && value == (double)(int64_t)value,
                   XD_ERROR_DATA, "tensor \"%.80s\" is %g, no count of steps", t->name, value);
        *t->step = (int64_t)value;
    }
    XD_REQUIRE(f->ctx, *t->step >= 0, XD_ERROR_DATA, "tensor \"%.80s\" is %lld, no count of steps", t->name,
               (long long)*t->step);
    return XD_OK;
}

static xd_result xdi_full_compare(xdi_full *f, const xd_state_scatter_desc *desc, const void **order,
                                  xd_state_report *report) {
    bool *used = (bool *)(void *)(order + desc->tensor_count);
    XD_TRY(xdi_full_sort(f, desc, order));
    for (int64_t i = 0; i < f->content.tensor_count; i++) {
        const xdi_stored *t = &f->content.tensors[i];
        f->match[i] = xdi_full_asks(f, t) ? xdi_full_find(f, desc, order, t) : (int64_t)XDI_FULL_ABSENT;
        if (f->match[i] >= 0) used[f->match[i]] = true;
    }
    xdi_full_mark_unformed(f);
    for (int64_t i = 0; i < f->content.tensor_count; i++) {
        const xdi_stored *t = &f->content.tensors[i];
        if (!xdi_full_asks(f, t)) continue;
        XD_TRY(xdi_full_judge(f, desc, i, report));
        if (t->step && f->match[i] >= 0) XD_TRY(xdi_full_take_step(f, t, &desc->tensors[f->match[i]]));
        if (t->step && f->match[i] == XDI_FULL_UNFORMED) *t->step = 0;
    }
    for (int64_t i = 0; i < desc->tensor_count; i++) {
        if (used[i]) continue;
        report->unexpected++;
        xdi_full_note(report, desc->tensors[i].name);
    }
    return XD_OK;
}

/* Rank 0. */
static xd_result xdi_full_match(xdi_full *f, const xd_state_scatter_desc *desc, xd_state_report *report) {
    const size_t count = desc->tensor_count > 0 ? (size_t)desc->tensor_count : 0;
    if (f->rank != 0) return XD_OK;
    XD_REQUIRE(f->ctx, desc->tensor_count >= 0 && (desc->tensors || count == 0), XD_ERROR_ARGUMENT,
               "%lld tensors at %p", (long long)desc->tensor_count, (const void *)desc->tensors);
    const void **order = (const void **)xd_allocate(f->ctx, count * (sizeof *order + sizeof(bool)));
    XD_REQUIRE(f->ctx, order, XD_ERROR_MEMORY, "no room to sort %lld tensors", (long long)count);
    memset((void *)order, 0, count * (sizeof *order + sizeof(bool)));
    const xd_result result = xdi_full_compare(f, desc, order, report);
    xd_release(f->ctx, (void *)order);
    return result;
}

/* The same on every rank, as it follows from what all of them have. */
static xd_result xdi_full_accept(const xdi_full *f, const xd_state_report *r, bool lenient) {
    XD_REQUIRE(f->ctx, r->wrong_type == 0, XD_ERROR_DTYPE,
               "%lld tensors have types that are not converted: %s", (long long)r->wrong_type, r->names);
    if (lenient) return XD_OK;
    XD_REQUIRE(f->ctx, r->missing == 0, XD_ERROR_MISSING, "%lld tensors are not in the list of rank 0: %s",
               (long long)r->missing, r->names);
    XD_REQUIRE(f->ctx, r->unexpected == 0, XD_ERROR_UNEXPECTED,
               "the list of rank 0 has %lld tensors more: %s", (long long)r->unexpected, r->names);
    XD_REQUIRE(f->ctx, r->wrong_shape == 0, XD_ERROR_SHAPE, "%lld tensors have another shape: %s; %s",
               (long long)r->wrong_shape, r->names, f->shapes);
    return XD_OK;
}

/* ---- scatter: elements ---- */

/* Puts the window into the order of the ranks, in the type that they have. */
static xd_result xdi_full_pack(xdi_full *f, const xdi_stored *t, const xd_state_tensor *given) {
    const xd_launch launch = xd_ctx_launch(f->ctx);
    const size_t size = xd_dtype_size(t->dtype);
    unsigned char *to = f->host;
    for (int r = 0; r < f->size; r++) {
        const xdi_full_rank *rank = &f->ranks[r];
        for (int64_t at = rank->begin, run, index; at < rank->end; at += run) {
            xd_cast_array cast;
            run = xdi_part_run(&rank->part, at, &index);
            if (run > rank->end - at) run = rank->end - at;
            cast.target = to;
            cast.target_dtype = t->dtype;
            cast.source_dtype = given->dtype;
            cast.source = (const char *)given->data + (size_t)index * xd_dtype_size(given->dtype);
            cast.count = run;
            if (t->dtype == given->dtype)
                memcpy(to, cast.source, (size_t)run * size);
            else
                XD_TRY(xd_ctx_host_kernels(f->ctx)->optimizer.cast(&launch, &cast, 1));
            to += (size_t)run * size;
        }
    }
    return xdi_full_copy(f, size, XD_COPY_TO_DEVICE);
}

/* All of a tensor as one window, if rank 0 can send it from where it lies. */
static bool xdi_full_plan_whole(xdi_full *f) {
    for (int r = 0; r < f->size; r++) {
        f->ranks[r].end = f->ranks[r].part.range.end;
        f->counts[r] = f->ranks[r].end - f->ranks[r].begin;
    }
    return f->as_it_is && xdi_full_is_in_order(f, 0);
}

static xd_result xdi_full_scatter_tensor(xdi_full *f, const xdi_stored *t, const xd_state_tensor *given) {
    const int64_t numel = xdi_stored_numel(t);
    XD_TRY(xdi_full_learn(f, t, f->rank == 0 && t->dtype == given->dtype && !xdi_full_on_device(f)));
    if (numel > 0 && xdi_full_plan_whole(f))
        return xd_scatter(f->comm, f->rank == 0 ? given->data : NULL, xdi_full_own(f, t), f->counts, t->dtype,
                          0);
    for (int64_t first = 0, end; first < numel; first = end) {
        end = xdi_full_plan(f, t, first);
        XD_TRY(xd_agree(f->comm, f->rank == 0 ? xdi_full_pack(f, t, given) : XD_OK));
        XD_TRY(xd_scatter(f->comm, f->wire, xdi_full_own(f, t), f->counts, t->dtype, 0));
        xdi_full_next(f);
    }
    return XD_OK;
}

/* A state that has never stepped. */
static xd_result xdi_full_form(const xdi_full *f, const xdi_stored *t) {
    const xd_launch launch = xd_ctx_launch(f->ctx);
    const xd_kernels *kernels = xd_ctx_kernels(f->ctx);
    const int64_t count = t->part->range.end - t->part->range.begin;
    xd_cast_array cast;
    if (t->step || count == 0) return XD_OK;
    if (!xdi_full_is_master(f, t))
        return kernels->memory.fill(&launch, t->data, 0, (size_t)count * xd_dtype_size(t->dtype));
    cast.target = t->data;
    cast.target_dtype = t->dtype;
    cast.source = t->part->data;
    cast.source_dtype = t->part->dtype;
    cast.count = count;
    return kernels->optimizer.cast(&launch, &cast, 1);
}

static xd_result xdi_full_finish(xdi_full *f) {
    for (int64_t i = 0; i < f->content.tensor_count; i++)
        if (f->match[i] == XDI_FULL_UNFORMED) XD_TRY(xdi_full_form(f, &f->content.tensors[i]));
    return xdi_content_put_steps(&f->content);
}

static xd_result xdi_full_scatter_list(xdi_full *f, const xd_state_scatter_desc *desc) {
    XD_TRY(xdi_content_create(f->ctx, desc->networks, desc->network_count, &f->content));
    XD_TRY(xdi_full_check_group(f));
    f->match = (int64_t *)xd_allocate(f->ctx, (size_t)f->content.tensor_count * sizeof *f->match);
    XD_REQUIRE(f->ctx, f->match, XD_ERROR_MEMORY, "no room to match %lld tensors",
               (long long)f->content.tensor_count);
    XD_TRY(xdi_full_reserve(f));
    return xdi_content_get_steps(&f->content); /* those that are not loaded stay as they are */
}

static xd_result xdi_full_scatter_run(xdi_full *f, const xd_state_scatter_desc *desc,
                                      xd_state_report *report) {
    XD_TRY(xd_agree(f->comm, xdi_full_scatter_list(f, desc)));
    XD_TRY(xdi_full_agree_settings(f, desc));
    XD_TRY(xdi_content_agree(&f->content, f->comm));
    XD_TRY(xd_agree(f->comm, xdi_full_match(f, desc, report)));
    XD_TRY(xd_broadcast(f->comm, report, (int64_t)sizeof *report, XD_DTYPE_U8, 0));
    XD_TRY(xd_broadcast(f->comm, f->shapes, (int64_t)sizeof f->shapes, XD_DTYPE_U8, 0));
    XD_TRY(xd_broadcast(f->comm, f->match, f->content.tensor_count, XD_DTYPE_I64, 0));
    XD_TRY(xd_broadcast(f->comm, f->content.steps, f->content.step_count, XD_DTYPE_I64, 0));
    XD_TRY(xdi_full_accept(f, report, desc->lenient));
    for (int64_t i = 0; i < f->content.tensor_count; i++) {
        const xdi_stored *t = &f->content.tensors[i];
        if (f->match[i] < 0 || t->step) continue;
        XD_TRY(xdi_full_scatter_tensor(f, t, f->rank == 0 ? &desc->tensors[f->match[i]] : NULL));
    }
    return xd_agree(f->comm, xdi_full_finish(f));
}

static xd_result xdi_full_scatter(xd_comm *comm, const xd_state_scatter_desc *desc, xd_state_report *report) {
    xdi_full f = xdi_full_begin(comm, desc->group, desc->staging_bytes);
    xd_state_report own;
    memset(&own, 0, sizeof own);
    const xd_result result = xdi_full_scatter_run(&f, desc, &own);
    if (report) *report = own;
    xdi_full_end(&f);
    return result;
}

/* ---- averages ---- */

/* The group of the one average there is. */
static xd_result xdi_full_average(xd_ctx *ctx, const xd_checkpoint_network *n, int count, const char *group,
                                  char name[XDI_GROUP_ROOM]) {
    XD_REQUIRE(ctx, n && count == 1 && n->average_count == 1 && n->averages && !group, XD_ERROR_ARGUMENT,
               "%d networks, %d averages in the first and the group \"%.40s\"; needed are one, one and none",
               count, n && count > 0 ? n->average_count : 0, group ? group : "");
    XD_REQUIRE(ctx,
               n->averages[0].name && (!n->name || strlen(n->name) < 32) && strlen(n->averages[0].name) < 32,
               XD_ERROR_ARGUMENT, "the average has no name, or one that is too long: \"%.40s\"",
               n->averages[0].name ? n->averages[0].name : "");
    snprintf(name, XDI_GROUP_ROOM, "ema-%s%s%s", n->name ? n->name : "", n->name ? "-" : "",
             n->averages[0].name);
    return XD_OK;
}

XD_API xd_result xd_state_gather(xd_comm *comm, const xd_state_gather_desc *desc) {
    XDI_GIVEN_COMM(comm, desc);
    if (!desc->average) return xdi_full_gather(comm, desc);
    xd_ctx *ctx = xd_comm_ctx(comm);
    xd_state_gather_desc d = *desc;
    char group[XDI_GROUP_ROOM];
    XD_TRY(xd_agree(comm, xdi_full_average(ctx, d.networks, d.network_count, d.group, group)));
    d.group = group;
    XD_TRY(xdi_full_gather(comm, &d));
    if (desc->record) *desc->record = xd_ema_describe(d.networks->averages[0].ema).record;
    return XD_OK;
}

XD_API xd_result xd_state_scatter(xd_comm *comm, const xd_state_scatter_desc *desc, xd_state_report *report) {
    XDI_GIVEN_COMM(comm, desc);
    if (!desc->average) return xdi_full_scatter(comm, desc, report);
    const xd_ema_record *record = desc->record;
    xd_ctx *ctx = xd_comm_ctx(comm);
    xd_state_scatter_desc d = *desc;
    xd_state_report own;
    char group[XDI_GROUP_ROOM];
    int64_t counters[3] = { 0, 0, 0 }; /* whether there are any, iteration, initialized */
    xd_result mine = xdi_full_average(ctx, d.networks, d.network_count, d.group, group);
    if (mine == XD_OK && record && xd_comm_rank(comm) == 0) {
        if (record->format_version != 1 || record->iteration < 0)
            mine =
                XD_FAIL(ctx, XD_ERROR_FORMAT, "a record of version %d and iteration %lld, known is version 1",
                        record->format_version, (long long)record->iteration);
        counters[0] = 1;
        counters[1] = record->iteration;
        counters[2] = record->initialized;
    }
    XD_TRY(xd_agree(comm, mine));
    XD_TRY(xd_broadcast(comm, counters, 3, XD_DTYPE_I64, 0));
    d.group = group;
    memset(&own, 0, sizeof own);
    const xd_result result = xdi_full_scatter(comm, &d, &own);
    if (report) *report = own;
    XD_TRY(result);
    xd_ema *ema = d.networks->averages[0].ema;
    const xd_ema_record now = xd_ema_describe(ema).record;
    const bool filled = own.missing + own.wrong_shape == 0;
    if (counters[0])
        xdi_ema_restore(ema, counters[1], counters[2] != 0);
    else
        xdi_ema_restore(ema, now.iteration, now.initialized || filled);
    return XD_OK;
}
