/* State that survivors have in memory, to the cut in which they want it over their new world. */

#include "base/json.h"
#include "checkpoint/inherit.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "tensor/interval_internal.h"

#include <string.h>

typedef struct xdi_inherit {
    xd_comm *comm;
    xd_ctx *ctx;
    int rank, size;
    const xd_state_inherit_desc *desc;
    xdi_content from, to; /* without `from` the first is a list of the second's tensors */
    int64_t part_count;
    xd_checkpoint_network *networks; /* [network_count] of `from`, with these parts: */
    xd_tensor_part *parts;           /* [part_count] empty unless this rank has done the step */
    int64_t *hashes;                 /* [size + 1, part_count] of all ranks, and this one's */
    int64_t *steps;                  /* [size] -1: of a rank that has nothing */
    int64_t *counts;                 /* [size] */
    int64_t message[XDI_PART_NUMBERS];
    xd_region whole, pieces[XDI_REGION_FLAT_MAX];
    int64_t step; /* that is taken */
    int root;     /* the lowest rank that has done it */
    char *text;   /* its state.json */
    size_t bytes;
    xd_json *state;
    xdi_move *moves;      /* [tensor_count] */
    xd_tensor_part *ends; /* [tensor_count, 2] */
} xdi_inherit;

/* ---- lists ---- */

/* Both lists are the same tensors. Local. */
static xd_result xdi_inherit_compare(const xdi_inherit *h) {
    XD_REQUIRE(h->ctx, h->from.tensor_count == h->to.tensor_count, XD_ERROR_MISMATCH,
               "%lld tensors go where there are %lld", (long long)h->from.tensor_count,
               (long long)h->to.tensor_count);
    for (int64_t i = 0; i < h->to.tensor_count; i++) {
        const xdi_stored *a = &h->from.tensors[i], *b = &h->to.tensors[i];
        const bool same =
            strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->part->ndim == b->part->ndim &&
            memcmp(a->part->shape, b->part->shape, (size_t)a->part->ndim * sizeof *a->part->shape) == 0 &&
            strcmp(h->from.groups[a->group].name, h->to.groups[b->group].name) == 0;
        XD_REQUIRE(h->ctx, same, XD_ERROR_MISMATCH,
                   "tensor %lld, \"%.80s\", goes to \"%.80s\", of another name, type, shape or file",
                   (long long)i, a->name, b->name);
    }
    return XD_OK;
}

static xd_result xdi_inherit_list(xdi_inherit *h) {
    const xd_state_inherit_desc *d = h->desc;
    XD_REQUIRE(h->ctx, !d->from || d->step >= 0, XD_ERROR_ARGUMENT, "step %lld is negative",
               (long long)d->step);
    XD_TRY(xdi_state_check(h->ctx, d->from ? d->state : NULL));
    XD_TRY(xdi_content_create(h->ctx, d->networks, d->network_count, &h->to));
    XD_TRY(xdi_content_create(h->ctx, d->from ? d->from : d->networks, d->network_count, &h->from));
    XD_TRY(xdi_inherit_compare(h));
    XD_TRY(xdi_content_get_steps(&h->from));
    for (int n = 0; n < d->network_count; n++) h->part_count += d->networks[n].part_count;
    return XD_OK;
}

/* The tensors of `from` get parts of their own. */
static void xdi_inherit_own_parts(xdi_inherit *h) {
    const xd_checkpoint_network *given = h->from.networks;
    int64_t begin = 0, i = 0, group = 0;
    for (int n = 0; n < h->desc->network_count; begin += given[n++].part_count) {
        h->networks[n] = given[n];
        h->networks[n].parts = &h->parts[begin];
    }
    for (int n = 0; n < h->desc->network_count; n++) {
        const int64_t groups = 1 + (given[n].optimizer != NULL) + given[n].average_count;
        for (int64_t g = 0; g < groups; g++, group++)
            for (int64_t k = 0; k < h->from.groups[group].count; k++, i++)
                h->from.tensors[i].part = &h->networks[n].parts[h->from.tensors[i].part - given[n].parts];
    }
    h->from.networks = h->networks;
}

static xd_result xdi_inherit_reserve(xdi_inherit *h) {
    const size_t parts = (size_t)h->part_count, tensors = (size_t)h->to.tensor_count, size = (size_t)h->size;
    h->networks =
        (xd_checkpoint_network *)xd_allocate(h->ctx, (size_t)h->desc->network_count * sizeof *h->networks);
    h->parts = (xd_tensor_part *)xd_allocate(h->ctx, (parts + 2 * tensors) * sizeof *h->parts);
    h->hashes = (int64_t *)xd_allocate(h->ctx, ((size + 1) * parts + 2 * size) * sizeof *h->hashes);
    h->moves = (xdi_move *)xd_allocate(h->ctx, tensors * sizeof *h->moves);
    XD_REQUIRE(h->ctx, h->networks && h->parts && h->hashes && h->moves, XD_ERROR_MEMORY,
               "no room for a list of %lld tensors", (long long)h->to.tensor_count);
    h->ends = h->parts + parts;
    h->steps = h->hashes + (size + 1) * parts;
    h->counts = h->steps + size;
    return XD_OK;
}

/* ---- which step ---- */

/* Parts of a rank that has done another step are empty. */
static void xdi_inherit_take_parts(xdi_inherit *h, const xd_checkpoint_network *given, int64_t step) {
    xd_tensor_part *at = h->parts;
    for (int n = 0; n < h->desc->network_count; n++)
        for (int64_t k = 0; k < given[n].part_count; k++, at++) {
            *at = given[n].parts[k];
            if (h->steps[h->rank] != step) at->range.end = at->range.begin = 0;
        }
}

/* A number for the elements of a part, the same however it describes them; 0 for none. */
static uint64_t xdi_inherit_hash(xdi_inherit *h, const xd_tensor_part *p) {
    uint64_t hash = 0;
    int pieces = 0;
    if (!p->region) h->whole = xdi_region_whole(p->ndim, p->shape);
    (void)xdi_region_flat_range(h->ctx, p->region ? p->region : &h->whole, p->range, h->pieces, &pieces);
    for (int i = 0; i < pieces; i++) {
        const int64_t length = xdi_cover_put_box(&h->pieces[i], h->message, 0);
        hash = xd_hash(hash, h->message, (size_t)length * sizeof *h->message) | 1;
    }
    return hash;
}

/* Of ranks with the same elements the lowest speaks for them. Collective. */
static xd_result xdi_inherit_choose(xdi_inherit *h) {
    const int64_t n = h->part_count;
    int64_t *own = h->hashes + n * h->size;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t hash = xdi_inherit_hash(h, &h->parts[i]);
        memcpy(&own[i], &hash, sizeof hash);
    }
    for (int r = 0; r < h->size; r++) h->counts[r] = n;
    XD_TRY(xd_all_gather(h->comm, own, h->hashes, h->counts, XD_DTYPE_I64));
    for (int64_t i = 0; i < n; i++) {
        h->parts[i].replica = false;
        for (int r = 0; r < h->rank && own[i]; r++)
            if (h->hashes[r * n + i] == own[i]) h->parts[i].replica = true;
    }
    return XD_OK;
}

/* Whether every element is held by a rank that has done the step. Collective. */
static xd_result xdi_inherit_try(xdi_inherit *h, bool *whole) {
    xdi_inherit_take_parts(h, h->desc->from ? h->desc->from : h->desc->networks, h->step);
    XD_TRY(xdi_inherit_choose(h));
    const xd_result result = xdi_cover_check(&h->from, h->comm);
    int32_t mismatch = result == XD_ERROR_MISMATCH; /* some rank has seen it, and the others PEER */
    *whole = result == XD_OK;
    if (*whole) return XD_OK;
    XD_TRY(xd_all_reduce(h->comm, &mismatch, &mismatch, 1, XD_DTYPE_I32, XD_MAX));
    return mismatch ? XD_OK : result;
}

/* The next step below one that some rank has done, and the lowest rank that has; false when there is none. */
static bool xdi_inherit_next(xdi_inherit *h, int64_t below) {
    h->step = -1;
    for (int r = 0; r < h->size; r++) {
        if (h->steps[r] >= below || h->steps[r] <= h->step) continue;
        h->step = h->steps[r];
        h->root = r;
    }
    return h->step >= 0;
}

/* The highest that is whole. Collective. */
static xd_result xdi_inherit_find(xdi_inherit *h) {
    const int64_t mine = h->desc->from ? h->desc->step : -1;
    int64_t below = INT64_MAX;
    bool whole = false;
    for (int r = 0; r < h->size; r++) h->counts[r] = 1;
    XD_TRY(xd_all_gather(h->comm, &mine, h->steps, h->counts, XD_DTYPE_I64));
    for (; !whole && xdi_inherit_next(h, below); below = h->step) XD_TRY(xdi_inherit_try(h, &whole));
    if (whole) return XD_OK;
    XD_REQUIRE(h->ctx, below < INT64_MAX, XD_ERROR_MISSING, "none of %d ranks has a state", h->size);
    const xd_error cause = *xd_last_error(h->ctx);
    return XD_FAIL(h->ctx, XD_ERROR_MISSING, "no step is whole on %d ranks; of step %lld: %.120s", h->size,
                   (long long)below, cause.message);
}

/* ---- what stands beside the tensors ---- */

static xd_result xdi_inherit_write(xdi_inherit *h) {
    xd_checkpoint_save_desc save;
    memset(&save, 0, sizeof save);
    save.step = h->step;
    save.networks = h->desc->from;
    save.network_count = h->desc->network_count;
    save.state = h->desc->state;
    return h->rank == h->root ? xdi_state_write(h->ctx, &save, &h->text, &h->bytes) : XD_OK;
}

static xd_checkpoint_load_desc xdi_inherit_target(const xdi_inherit *h) {
    xd_checkpoint_load_desc load;
    memset(&load, 0, sizeof load);
    load.networks = h->desc->networks;
    load.network_count = h->desc->network_count;
    return load;
}

static xd_result xdi_inherit_read(xdi_inherit *h) {
    const xd_checkpoint_load_desc load = xdi_inherit_target(h);
    XD_TRY(xd_json_load_memory(h->ctx, NULL, h->text, h->bytes, &h->state));
    return xdi_state_fits(h->ctx, h->state, &load);
}

/* Every rank gets the text. Collective. */
static xd_result xdi_inherit_share(xdi_inherit *h) {
    XD_TRY(xd_agree(h->comm, xdi_inherit_write(h)));
    uint64_t bytes = h->bytes;
    XD_TRY(xd_broadcast(h->comm, &bytes, 1, XD_DTYPE_U64, h->root));
    h->bytes = (size_t)bytes;
    if (h->rank != h->root) h->text = (char *)xd_allocate(h->ctx, h->bytes + 1);
    XD_TRY(xd_agree(h->comm, h->text ? XD_OK
                                     : XD_FAIL(h->ctx, XD_ERROR_MEMORY, "no room for a state of %llu bytes",
                                               (unsigned long long)bytes)));
    XD_TRY(xd_broadcast(h->comm, h->text, (int64_t)h->bytes, XD_DTYPE_U8, h->root));
    return xd_agree(h->comm, xdi_inherit_read(h));
}

/* ---- elements ---- */

static xd_result xdi_inherit_move(xdi_inherit *h) {
    int64_t count = 0, local = 0;
    for (int64_t i = 0; i < h->to.tensor_count; i++) {
        const xdi_stored *a = &h->from.tensors[i], *b = &h->to.tensors[i];
        if (b->step) {
            *b->step = *a->step;
            continue;
        }
        xd_tensor_part *ends = &h->ends[2 * count];
        ends[0] = *a->part;
        ends[1] = *b->part;
        ends[0].dtype = ends[1].dtype = a->dtype;
        ends[0].data = a->data;
        ends[1].data = b->data;
        h->moves[count].from = &ends[0];
        h->moves[count++].to = &ends[1];
    }
    XD_TRY(xdi_move_parts(h->comm, h->moves, count, h->desc->staging_bytes, &local));
    return xd_agree(h->comm, xdi_content_put_steps(&h->to));
}

/* ---- all of it ---- */

static xd_result xdi_inherit_run(xdi_inherit *h, char **state) {
    const xd_checkpoint_load_desc target = xdi_inherit_target(h);
    xd_checkpoint_report unread;
    xdi_facts facts;
    memset(&unread, 0, sizeof unread);
    xdi_facts_begin(&facts);
    XD_TRY(xd_agree(h->comm, xdi_inherit_list(h)));
    xdi_fact_integer(&facts, "staging_bytes", (int64_t)h->desc->staging_bytes);
    XD_TRY(xdi_agree_facts(h->comm, &facts, "settings of an inherited state"));
    XD_TRY(xdi_content_agree(&h->to, h->comm));
    XD_TRY(xd_agree(h->comm, xdi_inherit_reserve(h)));
    xdi_inherit_own_parts(h);
    XD_TRY(xdi_inherit_find(h));
    XD_TRY(xdi_cover_steps(&h->from, h->comm));
    XD_TRY(xdi_inherit_share(h));
    XD_TRY(xd_agree(h->comm, xdi_state_take(h->ctx, h->state, h->text, h->bytes, state)));
    XD_TRY(xdi_inherit_move(h));
    xdi_state_apply(h->ctx, h->state, &target, &unread);
    return XD_OK;
}

static void xdi_inherit_end(xdi_inherit *h) {
    if (h->state) xd_json_destroy(h->ctx, h->state);
    xd_release(h->ctx, h->text);
    xd_release(h->ctx, h->moves);
    xd_release(h->ctx, h->hashes);
    xd_release(h->ctx, h->parts);
    xd_release(h->ctx, h->networks);
    xdi_content_destroy(&h->from);
    xdi_content_destroy(&h->to);
    xd_release(h->ctx, h);
}

XD_API xd_result xd_state_inherit(xd_comm *comm, const xd_state_inherit_desc *desc, int64_t *step,
                                  char **state) {
    XDI_GIVEN_COMM(comm, desc, step);
    xd_ctx *ctx = xd_comm_ctx(comm);
    xdi_inherit *h = (xdi_inherit *)xd_allocate(ctx, sizeof *h);
    char *own = NULL;
    xd_result result =
        xd_agree(comm, h ? XD_OK
                         : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to inherit a state by %d ranks",
                                   xd_comm_size(comm)));
    if (h) {
        h->comm = comm;
        h->ctx = ctx;
        h->rank = xd_comm_rank(comm);
        h->size = xd_comm_size(comm);
        h->desc = desc;
        if (result == XD_OK) result = xdi_inherit_run(h, &own);
        if (result == XD_OK) *step = h->step;
        xdi_inherit_end(h);
    }
    if (result == XD_OK && state)
        *state = own;
    else
        xd_release(ctx, own);
    return result;
}
