/* What a map makes of a list of weights: their tensors, and which box of one is which box of ours. */

#include "checkpoint/map_internal.h"
#include "io/internal.h"

#include <stdio.h>
#include <string.h>

#define XDI_MAPPED_PLACE "{}"

enum { XDI_MAPPED_DIGITS = 9 };

/* ---- names ---- */

static bool xdi_mapped_has_place(const char *pattern) {
    return strstr(pattern, XDI_MAPPED_PLACE) != NULL;
}

/* The number at the place of a pattern in a name, as it is written without zeros before it; 0 for a pattern that is the name
 * itself; -1 when the name is another. */
static int64_t xdi_mapped_match(const char *pattern, const char *name) {
    const char *place = strstr(pattern, XDI_MAPPED_PLACE);
    if (!place) return strcmp(pattern, name) == 0 ? 0 : -1;
    const char *after = place + strlen(XDI_MAPPED_PLACE);
    const size_t before = (size_t)(place - pattern), rest = strlen(after), all = strlen(name);
    if (all <= before + rest || strncmp(pattern, name, before) != 0) return -1;
    const char *digits = name + before;
    const size_t count = all - before - rest; /* what follows may begin with a digit, so its length decides */
    int64_t number = 0;
    if (count > XDI_MAPPED_DIGITS || (*digits == '0' && count > 1)) return -1;
    for (size_t i = 0; i < count; i++) {
        if (digits[i] < '0' || digits[i] > '9') return -1;
        number = 10 * number + (digits[i] - '0');
    }
    return strcmp(after, digits + count) == 0 ? number : -1;
}

/* The name in memory of the plan; NULL while sizes are counted. */
static const char *xdi_mapped_name(xdi_mapped_plan *p, const char *pattern, int64_t number) {
    const char *place = strstr(pattern, XDI_MAPPED_PLACE);
    const size_t bytes = strlen(pattern) + 24;
    char *text = p->filling ? p->text + p->text_bytes : NULL;
    p->text_bytes += bytes;
    if (!text) return NULL;
    if (place)
        snprintf(text, bytes, "%.*s%lld%s", (int)(place - pattern), pattern, (long long)number,
                 place + strlen(XDI_MAPPED_PLACE));
    else
        snprintf(text, bytes, "%s", pattern);
    return text;
}

XD_PRIVATE bool xdi_mapped_leaves_out(const xd_mapped_weights *weights, const char *name) {
    for (int64_t i = 0; i < weights->map_count; i++)
        if (!weights->maps[i].ours && xdi_mapped_match(weights->maps[i].theirs, name) >= 0) return true;
    return false;
}

/* ---- entries ---- */

static bool xdi_mapped_is_pattern(const char *name) {
    const char *place = strstr(name, XDI_MAPPED_PLACE);
    return name[0] && !(place && strstr(place + 1, XDI_MAPPED_PLACE));
}

static xd_result xdi_mapped_check_entry(xd_ctx *ctx, const xd_weight_map *m, int64_t i) {
    const int64_t most = INT64_MAX / 4;
    XD_REQUIRE(ctx, m->theirs && xdi_mapped_is_pattern(m->theirs), XD_ERROR_ARGUMENT,
               "entry %lld of the map: their name \"%.80s\" is empty or has several " XDI_MAPPED_PLACE,
               (long long)i, m->theirs ? m->theirs : "");
    XD_REQUIRE(ctx, !m->ours || xdi_mapped_is_pattern(m->ours), XD_ERROR_ARGUMENT,
               "entry %lld of the map: our name \"%.80s\" is empty or has several " XDI_MAPPED_PLACE,
               (long long)i, m->ours ? m->ours : "");
    XD_REQUIRE(ctx,
               m->length >= 0 && m->their_begin >= 0 && m->our_begin >= 0 && m->length <= most &&
                   m->their_begin <= most && m->our_begin <= most,
               XD_ERROR_ARGUMENT,
               "entry %lld of the map, \"%.80s\": %lld indices from %lld there and %lld here", (long long)i,
               m->theirs, (long long)m->length, (long long)m->their_begin, (long long)m->our_begin);
    const bool part = m->dim != 0 || m->their_begin != 0 || m->our_begin != 0 || m->length != 0;
    XD_REQUIRE(ctx, !part || m->length > 0, XD_ERROR_ARGUMENT,
               "entry %lld of the map, \"%.80s\": a part of dimension %d has no length", (long long)i,
               m->theirs, m->dim);
    XD_REQUIRE(ctx, m->ours || (!part && !m->transpose), XD_ERROR_ARGUMENT,
               "entry %lld of the map leaves \"%.80s\" out and says how to read it", (long long)i, m->theirs);
    return XD_OK;
}

static xd_result xdi_mapped_check_entries(xd_ctx *ctx, const xd_mapped_weights *w) {
    XD_REQUIRE(ctx, w->map_count >= 0 && (w->maps || w->map_count == 0), XD_ERROR_ARGUMENT,
               "%lld entries of a map, maps is %s", (long long)w->map_count, w->maps ? "given" : "NULL");
    for (int64_t i = 0; i < w->map_count; i++) XD_TRY(xdi_mapped_check_entry(ctx, &w->maps[i], i));
    return XD_OK;
}

/* ---- pieces: the functions run twice, to count and to fill in ---- */

/* How an entry brings a weight in: its number and whose dimension 0 that number is an index of. */
typedef struct xdi_mapped_use {
    const xd_weight_map *map;
    int64_t number;
    bool stacked[XDI_SIDES];
} xdi_mapped_use;

/* The boxes of a whole weight, or of one index of a stacked one. */
static xd_result xdi_mapped_shape(xdi_mapped_plan *p, const xdi_mapped_use *use, xdi_mapped_piece *piece) {
    const xd_tensor_part *part = p->content->tensors[piece->ours].part;
    const int above = use->stacked[XDI_THEIRS], lost = use->stacked[XDI_OURS], ndim = part->ndim - lost;
    const bool turned = use->map && use->map->transpose;
    XD_REQUIRE(p->ctx, ndim + above <= XD_DIMS_MAX && (!turned || ndim >= 2), XD_ERROR_ARGUMENT,
               "tensor \"%.80s\" has %d dimensions, of which the map %s", part->name, part->ndim,
               turned && ndim < 2 ? "exchanges the last two" : "makes one more");
    piece->ndim = ndim + above;
    for (int d = 0; d < part->ndim; d++) piece->box[XDI_OURS].end[d] = part->shape[d];
    for (int d = above; d < piece->ndim; d++) {
        int ours = d - above;
        if (turned && ours >= ndim - 2) ours = 2 * ndim - 3 - ours;
        piece->axis[d] = ours + lost;
        piece->box[XDI_THEIRS].end[d] = part->shape[ours + lost];
    }
    for (int side = 0; side < XDI_SIDES; side++) {
        if (!use->stacked[side]) continue;
        piece->box[side].begin[0] = use->number;
        piece->box[side].end[0] = use->number + 1;
    }
    if (above) piece->axis[0] = -1;
    return XD_OK;
}

/* Restricts the boxes to the indices that the entry names. */
static xd_result xdi_mapped_slice(xdi_mapped_plan *p, const xdi_mapped_use *use, xdi_mapped_piece *piece) {
    const xd_weight_map *m = use->map;
    const xd_tensor_part *part = p->content->tensors[piece->ours].part;
    if (!m || m->length == 0) return XD_OK;
    XD_REQUIRE(
        p->ctx, m->dim >= 0 && m->dim < piece->ndim && piece->axis[m->dim] >= 0, XD_ERROR_ARGUMENT,
        "tensor \"%.80s\": \"%.80s\" has no dimension %d that can be taken in parts, but %d dimensions",
        part->name, m->theirs, m->dim, piece->ndim);
    const int axis = piece->axis[m->dim];
    XD_REQUIRE(
        p->ctx, m->length <= part->shape[axis] && m->our_begin <= part->shape[axis] - m->length,
        XD_ERROR_SHAPE,
        "tensor \"%.80s\": indices [%lld, %lld) of dimension %d, which has %lld, are those of \"%.80s\"",
        part->name, (long long)m->our_begin, (long long)(m->our_begin + m->length), axis,
        (long long)part->shape[axis], m->theirs);
    piece->box[XDI_OURS].begin[axis] = m->our_begin;
    piece->box[XDI_OURS].end[axis] = m->our_begin + m->length;
    piece->box[XDI_THEIRS].begin[m->dim] = m->their_begin;
    piece->box[XDI_THEIRS].end[m->dim] = m->their_begin + m->length;
    return XD_OK;
}

static xd_result xdi_mapped_add(xdi_mapped_plan *p, int64_t ours, const xdi_mapped_use *use) {
    const char *name =
        use->map ? xdi_mapped_name(p, use->map->theirs, use->number) : p->content->tensors[ours].name;
    const int64_t at = p->piece_count++;
    if (!p->filling) return XD_OK;
    xdi_mapped_piece *piece = &p->pieces[at];
    memset(piece, 0, sizeof *piece);
    piece->theirs = name;
    piece->ours = ours;
    p->order[at] = piece;
    XD_TRY(xdi_mapped_shape(p, use, piece));
    return xdi_mapped_slice(p, use, piece);
}

/* An entry that names tensor `ours`. */
static xd_result xdi_mapped_apply(xdi_mapped_plan *p, int64_t ours, const xd_weight_map *map,
                                  int64_t number) {
    const xd_tensor_part *part = p->content->tensors[ours].part;
    const bool there = xdi_mapped_has_place(map->theirs), here = xdi_mapped_has_place(map->ours);
    xdi_mapped_use use;
    memset(&use, 0, sizeof use);
    use.map = map;
    use.number = number;
    use.stacked[XDI_THEIRS] = here && !there;
    use.stacked[XDI_OURS] = there && !here;
    if (!use.stacked[XDI_OURS]) return xdi_mapped_add(p, ours, &use);
    XD_REQUIRE(p->ctx, part->ndim > 0, XD_ERROR_ARGUMENT,
               "tensor \"%.80s\" is a scalar, and not the stack of all \"%.80s\"", part->name, map->theirs);
    for (use.number = 0; use.number < part->shape[0]; use.number++) XD_TRY(xdi_mapped_add(p, ours, &use));
    return XD_OK;
}

static xd_result xdi_mapped_list_pieces(xdi_mapped_plan *p, bool filling) {
    const xd_mapped_weights *w = p->weights;
    xdi_mapped_use itself;
    memset(&itself, 0, sizeof itself);
    p->filling = filling;
    p->piece_count = 0;
    p->text_bytes = 0;
    for (int64_t i = 0; i < p->content->tensor_count; i++) {
        bool named = false;
        p->first[i] = p->piece_count;
        for (int64_t k = 0; k < w->map_count; k++) {
            const xd_weight_map *map = &w->maps[k];
            const int64_t number = map->ours ? xdi_mapped_match(map->ours, p->content->tensors[i].name) : -1;
            if (number < 0) continue;
            named = p->used[k] = true;
            XD_TRY(xdi_mapped_apply(p, i, map, number));
        }
        if (!named) XD_TRY(xdi_mapped_add(p, i, &itself));
    }
    p->first[p->content->tensor_count] = p->piece_count;
    return XD_OK;
}

/* ---- whether each element is there once ---- */

static int xdi_mapped_by_place(const xdi_mapped_piece *a, const xdi_mapped_piece *b, int side) {
    const int64_t one = a->box[side].begin[0], other = b->box[side].begin[0];
    if (one != other) return one < other ? -1 : 1;
    return (a > b) - (a < b);
}

static int xdi_mapped_by_ours(const void *a, const void *b) {
    const xdi_mapped_piece *one = (const xdi_mapped_piece *)a, *other = (const xdi_mapped_piece *)b;
    if (one->ours != other->ours) return one->ours < other->ours ? -1 : 1;
    return xdi_mapped_by_place(one, other, XDI_OURS);
}

static int xdi_mapped_by_theirs(const void *a, const void *b) {
    const xdi_mapped_piece *one = (const xdi_mapped_piece *)a, *other = (const xdi_mapped_piece *)b;
    const int names = strcmp(one->theirs, other->theirs);
    return names ? names : xdi_mapped_by_place(one, other, XDI_THEIRS);
}

/* The pieces of one tensor, which are in order[first .. end) by their place in it. */
typedef struct xdi_mapped_cover {
    const char *name;
    int side, ndim;
    const int64_t *shape;
    int64_t first, end;
} xdi_mapped_cover;

static bool xdi_mapped_overlap(const xdi_mapped_piece *a, const xdi_mapped_piece *b,
                               const xdi_mapped_cover *c) {
    bool common = true;
    for (int d = 0; d < c->ndim; d++)
        common = common && a->box[c->side].begin[d] < b->box[c->side].end[d] &&
                 b->box[c->side].begin[d] < a->box[c->side].end[d];
    return common;
}

static xd_result xdi_mapped_check_cover(const xdi_mapped_plan *p, const xdi_mapped_cover *c) {
    const xdi_mapped_piece *const *list = (const xdi_mapped_piece *const *)(const void *)p->order;
    int64_t held = 0, numel = 1;
    for (int64_t i = c->first; i < c->end; i++) {
        int64_t volume = 1;
        for (int d = 0; d < c->ndim; d++)
            volume *= list[i]->box[c->side].end[d] - list[i]->box[c->side].begin[d];
        held += volume; /* cannot overflow: those before have nothing in common */
        for (int64_t k = i + 1; k < c->end; k++) {
            if (c->ndim > 0 && list[k]->box[c->side].begin[0] >= list[i]->box[c->side].end[0]) break;
            XD_REQUIRE(p->ctx, !xdi_mapped_overlap(list[i], list[k], c), XD_ERROR_ARGUMENT,
                       "tensor \"%.80s\": the map has elements of it twice, for \"%.80s\" and \"%.80s\"",
                       c->name,
                       c->side == XDI_OURS ? list[i]->theirs : p->content->tensors[list[i]->ours].name,
                       c->side == XDI_OURS ? list[k]->theirs : p->content->tensors[list[k]->ours].name);
        }
    }
    for (int d = 0; d < c->ndim; d++) numel *= c->shape[d];
    XD_REQUIRE(p->ctx, held == numel, XD_ERROR_SHAPE,
               "tensor \"%.80s\" of %s has %lld elements, the map names %lld", c->name,
               c->side == XDI_OURS ? "ours" : "theirs", (long long)numel, (long long)held);
    return XD_OK;
}

static xd_result xdi_mapped_check_ours(xdi_mapped_plan *p) {
    xdi_mapped_cover c;
    xdi_sort(p->order, (size_t)p->piece_count, xdi_mapped_by_ours);
    c.side = XDI_OURS;
    for (int64_t i = 0; i < p->content->tensor_count; i++) {
        const xd_tensor_part *part = p->content->tensors[i].part;
        c.name = part->name;
        c.ndim = part->ndim;
        c.shape = part->shape;
        c.first = p->first[i];
        c.end = p->first[i + 1];
        XD_TRY(xdi_mapped_check_cover(p, &c));
    }
    return XD_OK;
}

/* ---- tensors of theirs ---- */

/* Makes a tensor of the pieces in order[first .. end), as large as the largest of them says. */
static xd_result xdi_mapped_join(xdi_mapped_plan *p, int64_t first, int64_t end) {
    xdi_mapped_tensor *t = &p->tensors[p->tensor_count];
    const xdi_mapped_piece *one = (const xdi_mapped_piece *)p->order[first];
    xd_weights_entry entry;
    xdi_mapped_cover c;
    uint64_t bytes;
    memset(t, 0, sizeof *t);
    t->name = one->theirs;
    t->dtype = p->content->tensors[one->ours].dtype;
    t->ndim = one->ndim;
    for (int64_t i = first; i < end; i++) {
        xdi_mapped_piece *piece = (xdi_mapped_piece *)p->order[i];
        XD_REQUIRE(p->ctx, piece->ndim == t->ndim, XD_ERROR_SHAPE,
                   "tensor \"%.80s\" has %d dimensions for \"%.80s\" and %d for \"%.80s\"", t->name, t->ndim,
                   p->content->tensors[one->ours].name, piece->ndim, p->content->tensors[piece->ours].name);
        piece->their = p->tensor_count;
        for (int d = 0; d < t->ndim; d++)
            if (piece->box[XDI_THEIRS].end[d] > t->shape[d]) t->shape[d] = piece->box[XDI_THEIRS].end[d];
    }
    entry.name = c.name = t->name;
    entry.dtype = t->dtype;
    entry.ndim = c.ndim = t->ndim;
    entry.shape = c.shape = t->shape;
    XD_TRY(xdi_safetensors_check_entry(p->ctx, &entry, p->tensor_count, &bytes));
    p->tensor_count++;
    c.side = XDI_THEIRS;
    c.first = first;
    c.end = end;
    return xdi_mapped_check_cover(p, &c);
}

static xd_result xdi_mapped_join_all(xdi_mapped_plan *p) {
    xdi_sort(p->order, (size_t)p->piece_count, xdi_mapped_by_theirs);
    for (int64_t first = 0, end; first < p->piece_count; first = end) {
        const char *name = ((const xdi_mapped_piece *)p->order[first])->theirs;
        for (end = first + 1; end < p->piece_count; end++)
            if (strcmp(name, ((const xdi_mapped_piece *)p->order[end])->theirs) != 0) break;
        XD_REQUIRE(p->ctx, !xdi_mapped_leaves_out(p->weights, name), XD_ERROR_ARGUMENT,
                   "tensor \"%.80s\" is \"%.80s\" in the files, which an entry of the map leaves out",
                   p->content->tensors[((const xdi_mapped_piece *)p->order[first])->ours].name, name);
        XD_TRY(xdi_mapped_join(p, first, end));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_mapped_plan_check_types(const xdi_mapped_plan *p) {
    for (int64_t i = 0; i < p->piece_count; i++) {
        const xdi_mapped_piece *piece = &p->pieces[i];
        const xdi_stored *ours = &p->content->tensors[piece->ours];
        XD_REQUIRE(p->ctx, ours->dtype == p->tensors[piece->their].dtype, XD_ERROR_DTYPE,
                   "tensor \"%.80s\" is %s, and what else is in \"%.80s\" is %s", ours->name,
                   xd_dtype_name(ours->dtype), piece->theirs, xd_dtype_name(p->tensors[piece->their].dtype));
    }
    return XD_OK;
}

/* ---- the plan ---- */

static xd_result xdi_mapped_check_used(const xdi_mapped_plan *p) {
    for (int64_t i = 0; i < p->weights->map_count; i++)
        XD_REQUIRE(p->ctx, p->used[i] || !p->weights->maps[i].ours, XD_ERROR_ARGUMENT,
                   "entry %lld of the map: no weight here is \"%.80s\"", (long long)i,
                   p->weights->maps[i].ours);
    return XD_OK;
}

static xd_result xdi_mapped_reserve(xdi_mapped_plan *p) {
    const size_t count = (size_t)p->piece_count;
    p->pieces = (xdi_mapped_piece *)xd_allocate(p->ctx, count * sizeof *p->pieces);
    p->order = (const void **)xd_allocate(p->ctx, count * sizeof *p->order);
    p->tensors = (xdi_mapped_tensor *)xd_allocate(p->ctx, count * sizeof *p->tensors);
    p->text = (char *)xd_allocate(p->ctx, p->text_bytes);
    XD_REQUIRE(p->ctx, p->pieces && p->order && p->tensors && p->text, XD_ERROR_MEMORY,
               "no room for a map of %lld pieces", (long long)count);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_mapped_plan_create(const xdi_content *content, const xd_mapped_weights *weights,
                                            bool lenient, xdi_mapped_plan *out) {
    memset(out, 0, sizeof *out);
    out->ctx = content->ctx;
    out->content = content;
    out->weights = weights;
    XD_TRY(xdi_mapped_check_entries(out->ctx, weights));
    out->first = (int64_t *)xd_allocate(out->ctx, ((size_t)content->tensor_count + 1) * sizeof *out->first);
    out->used = (bool *)xd_allocate(out->ctx, (size_t)weights->map_count * sizeof *out->used);
    XD_REQUIRE(out->ctx, out->first && out->used, XD_ERROR_MEMORY, "no room for a map of %lld tensors",
               (long long)content->tensor_count);
    memset(out->used, 0, (size_t)weights->map_count * sizeof *out->used);
    XD_TRY(xdi_mapped_list_pieces(out, false));
    XD_TRY(xdi_mapped_reserve(out));
    XD_TRY(xdi_mapped_list_pieces(out, true));
    if (!lenient) XD_TRY(xdi_mapped_check_used(out));
    XD_TRY(xdi_mapped_check_ours(out));
    return xdi_mapped_join_all(out);
}

XD_PRIVATE void xdi_mapped_plan_destroy(xdi_mapped_plan *p) {
    if (p->ctx) {
        xd_release(p->ctx, p->text);
        xd_release(p->ctx, p->tensors);
        xd_release(p->ctx, (void *)p->order);
        xd_release(p->ctx, p->pieces);
        xd_release(p->ctx, p->used);
        xd_release(p->ctx, p->first);
    }
    memset(p, 0, sizeof *p);
}
