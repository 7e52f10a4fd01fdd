/* Whether the ranks of a save hold every element once, and have counted the same steps: found before anything is written. */

#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "tensor/interval_internal.h"

#include <string.h>

/* Each rank looks at every size-th tensor, so it receives what all others hold of that one: for each part its number, how many
 * boxes follow, and each box as the interval lists of its dimensions, each list after its length. */
typedef struct xdi_cover {
    xd_ctx *ctx;
    xd_comm *comm;
    const xdi_content *content;
    int rank, size;
    int64_t *send_counts, *recv_counts, *at; /* [size]; at: where a rank's message is read or written */
    int64_t *sent, *received;
    const int64_t **boxes; /* [levels][box_count] */
    int64_t box_count;
    xd_region whole, pieces[XDI_REGION_FLAT_MAX];
} xdi_cover;

static int64_t xdi_cover_put(int64_t *to, int64_t at, int64_t value) {
    if (to) to[at] = value;
    return at + 1;
}

XD_PRIVATE int64_t xdi_cover_put_box(const xd_region *box, int64_t *to, int64_t at) {
    for (int d = 0; d < box->ndim; d++) {
        at = xdi_cover_put(to, at, box->count[d]);
        for (int i = 0; i < box->count[d]; i++) {
            at = xdi_cover_put(to, at, box->interval[d][i].begin);
            at = xdi_cover_put(to, at, box->interval[d][i].end);
        }
    }
    return at;
}

/* Appends a part to a message; NULL to find its length. Returns the new length. */
static int64_t xdi_cover_put_part(xdi_cover *c, const xd_tensor_part *p, int64_t number, int64_t *to,
                                  int64_t at) {
    int pieces = 0;
    if (p->replica || p->range.begin == p->range.end) return at;
    if (!p->region) c->whole = xdi_region_whole(p->ndim, p->shape);
    (void)xdi_region_flat_range(c->ctx, p->region ? p->region : &c->whole, p->range, c->pieces, &pieces);
    at = xdi_cover_put(to, at, number);
    at = xdi_cover_put(to, at, pieces);
    for (int i = 0; i < pieces; i++) at = xdi_cover_put_box(&c->pieces[i], to, at);
    return at;
}

/* Calls the function above for every part; `at` begins and ends as the positions in the messages. */
static void xdi_cover_pack(xdi_cover *c, int64_t *to) {
    int64_t number = 0;
    for (int n = 0; n < c->content->network_count; n++)
        for (int64_t i = 0; i < c->content->networks[n].part_count; i++, number++) {
            int64_t *at = &c->at[number % c->size];
            *at = xdi_cover_put_part(c, &c->content->networks[n].parts[i], number, to, *at);
        }
}

/* ---- looking ---- */

/* The first index from dimension d on that is not held once by the boxes, which are at their lists of that dimension. `rest` has
 * room for as many boxes in each further dimension. */
static bool xdi_cover_once(const xd_tensor_part *p, int d, const int64_t **boxes, int64_t count, int64_t room,
                           int64_t first[XD_DIMS_MAX], int64_t *holders) {
    const int64_t **rest = boxes + room;
    *holders = count;
    if (d == p->ndim) return count == 1;
    for (int64_t index = 0, next; index < p->shape[d]; index = next) {
        int64_t held = 0;
        next = p->shape[d];
        for (int64_t b = 0; b < count; b++) {
            const int64_t *list = boxes[b], *end = list + 1 + 2 * list[0];
            for (const int64_t *v = list + 1; v < end; v += 2) {
                if (v[0] <= index && index < v[1]) rest[held++] = end;
                if (v[0] > index && v[0] < next) next = v[0];
                if (v[1] > index && v[1] < next) next = v[1];
            }
        }
        first[d] = index;
        *holders = held;
        if (held == 0 || !xdi_cover_once(p, d + 1, rest, held, room, first, holders)) return false;
    }
    return true;
}

/* The boxes of a part in all messages; their order is that of the ranks. */
static int64_t xdi_cover_collect(xdi_cover *c, const xd_tensor_part *p, int64_t number) {
    int64_t count = 0, begin = 0;
    for (int r = 0; r < c->size; begin += c->recv_counts[r++]) {
        const int64_t *at = c->received + begin + c->at[r], *end = c->received + begin + c->recv_counts[r];
        if (at == end || at[0] != number) continue;
        const int64_t pieces = at[1];
        at += 2;
        for (int64_t i = 0; i < pieces; i++) {
            c->boxes[count++] = at;
            for (int d = 0; d < p->ndim; d++) at += 1 + 2 * at[0];
        }
        c->at[r] = at - c->received - begin;
    }
    return count;
}

static xd_result xdi_cover_part(xdi_cover *c, const xd_tensor_part *p, int64_t number) {
    int64_t first[XD_DIMS_MAX] = { 0 }, holders, index = 0;
    const int64_t count = xdi_cover_collect(c, p, number);
    bool once = xdi_cover_once(p, 0, c->boxes, count, c->box_count, first, &holders);
    for (int d = 0; d < p->ndim; d++) once = once || p->shape[d] == 0; /* nothing to hold */
    for (int d = 0; d < p->ndim; d++) index = index * p->shape[d] + first[d];
    if (once) return XD_OK;
    if (holders == 0)
        return XD_FAIL(c->ctx, XD_ERROR_MISMATCH, "tensor \"%.80s\": no rank holds element %lld", p->name,
                       (long long)index);
    return XD_FAIL(
        c->ctx, XD_ERROR_MISMATCH,
        "tensor \"%.80s\": element %lld is held %lld times, not as a replica: a weight that ranks hold "
        "whole needs a layout that replicates it",
        p->name, (long long)index, (long long)holders);
}

static xd_result xdi_cover_look(xdi_cover *c) {
    int64_t number = 0;
    memset(c->at, 0, (size_t)c->size * sizeof *c->at);
    for (int n = 0; n < c->content->network_count; n++)
        for (int64_t i = 0; i < c->content->networks[n].part_count; i++, number++)
            if (number % c->size == c->rank)
                XD_TRY(xdi_cover_part(c, &c->content->networks[n].parts[i], number));
    return XD_OK;
}

/* ---- the exchange ---- */

static xd_result xdi_cover_reserve(xdi_cover *c) {
    const int64_t sent = xdi_comm_total(c->send_counts, c->size),
                  received = xdi_comm_total(c->recv_counts, c->size);
    c->box_count =
        received + 1; /* more than there are, also of scalars, which take two numbers for one box */
    c->sent = (int64_t *)xd_allocate(c->ctx, (size_t)(sent + received) * sizeof *c->sent);
    c->boxes =
        (const int64_t **)xd_allocate(c->ctx, (XD_DIMS_MAX + 1) * (size_t)c->box_count * sizeof *c->boxes);
    XD_REQUIRE(c->ctx, c->sent && c->boxes, XD_ERROR_MEMORY, "no room for %lld numbers about parts",
               (long long)(sent + received));
    c->received = c->sent + sent;
    return XD_OK;
}

static xd_result xdi_cover_exchange(xdi_cover *c) {
    int64_t at = 0;
    xdi_cover_pack(c, NULL);
    memcpy(c->send_counts, c->at, (size_t)c->size * sizeof *c->at);
    for (int i = 0; i < c->size; i++) c->at[i] = 1;
    XD_TRY(xd_all_to_all(c->comm, c->send_counts, c->at, c->recv_counts, c->at, XD_DTYPE_I64));
    XD_TRY(xd_agree(c->comm, xdi_cover_reserve(c)));
    for (int i = 0; i < c->size; at += c->send_counts[i++]) c->at[i] = at;
    xdi_cover_pack(c, c->sent);
    XD_TRY(xd_all_to_all(c->comm, c->sent, c->send_counts, c->received, c->recv_counts, XD_DTYPE_I64));
    return xd_agree(c->comm, xdi_cover_look(c));
}

XD_PRIVATE xd_result xdi_cover_check(const xdi_content *content, xd_comm *comm) {
    const size_t size = (size_t)xd_comm_size(comm);
    xdi_cover *c = (xdi_cover *)xd_allocate(content->ctx, sizeof *c + 3 * size * sizeof *c->at);
    const xd_result room =
        xd_agree(comm, c ? XD_OK
                         : XD_FAIL(content->ctx, XD_ERROR_MEMORY, "no room to compare %llu ranks",
                                   (unsigned long long)size));
    if (room != XD_OK) {
        xd_release(content->ctx, c);
        return room;
    }
    c->ctx = content->ctx;
    c->comm = comm;
    c->content = content;
    c->rank = xd_comm_rank(comm);
    c->size = (int)size;
    c->send_counts = (int64_t *)(void *)(c + 1);
    c->recv_counts = c->send_counts + size;
    c->at = c->recv_counts + size;
    const xd_result result = xdi_cover_exchange(c);
    xd_release(c->ctx, c->boxes);
    xd_release(c->ctx, c->sent);
    xd_release(c->ctx, c);
    return result;
}

/* ---- steps ---- */

/* The largest count and the largest complement, which tells the smallest count, of those that hold elements. */
static void xdi_cover_list_steps(const xdi_content *c, int64_t *most) {
    int64_t at = 0;
    for (int64_t i = 0; i < c->tensor_count; i++) {
        const xdi_stored *t = &c->tensors[i];
        if (!t->step) continue;
        const bool holds = t->part->range.begin < t->part->range.end;
        most[at++] = holds ? *t->step : INT64_MIN;
        most[at++] = holds ? ~*t->step : INT64_MIN;
    }
}

static xd_result xdi_cover_take_steps(const xdi_content *c, const int64_t *most) {
    int64_t at = 0;
    for (int64_t i = 0; i < c->tensor_count; i++) {
        const xdi_stored *t = &c->tensors[i];
        if (!t->step) continue;
        const int64_t high = most[at++], low = ~most[at++];
        const bool held = high != INT64_MIN;
        XD_REQUIRE(c->ctx, !held || high == low, XD_ERROR_MISMATCH,
                   "tensor \"%.80s\": some rank has counted %lld steps, another %lld", t->part->name,
                   (long long)low, (long long)high);
        *t->step = held ? high : 0; /* of an empty tensor: no step has changed anything */
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_cover_steps(const xdi_content *c, xd_comm *comm) {
    const int64_t count = 2 * c->step_count;
    int64_t *most = (int64_t *)xd_allocate(c->ctx, (size_t)count * sizeof *most);
    xd_result result = xd_agree(
        comm,
        most ? XD_OK : XD_FAIL(c->ctx, XD_ERROR_MEMORY, "no room for %lld steps", (long long)c->step_count));
    if (result == XD_OK) {
        xdi_cover_list_steps(c, most);
        result = xd_all_reduce(comm, most, most, count, XD_DTYPE_I64, XD_MAX);
    }
    if (result == XD_OK) result = xdi_cover_take_steps(c, most);
    xd_release(c->ctx, most);
    return result;
}

/* ---- a part as numbers ---- */

XD_PRIVATE int64_t xdi_part_write(const xd_tensor_part *p, bool holds, int64_t *message) {
    holds = holds && p->range.begin < p->range.end;
    message[0] = holds ? p->range.begin : 0;
    message[1] = holds ? p->range.end : 0;
    message[2] = holds && p->region != NULL;
    return message[2] ? xdi_cover_put_box(p->region, message, 3) : 3;
}

XD_PRIVATE int64_t xdi_part_read(const xd_tensor_part *own, const int64_t *message, xd_region *region,
                                 xd_tensor_part *part) {
    const int64_t *at = message + 3;
    *part = *own;
    part->range.begin = message[0];
    part->range.end = message[1];
    part->region = message[2] ? region : NULL;
    if (!message[2]) return 3;
    memset(region, 0, sizeof *region);
    region->ndim = own->ndim;
    for (int d = 0; d < own->ndim; d++) {
        region->count[d] = (int)*at++;
        for (int i = 0; i < region->count[d]; i++) {
            region->interval[d][i].begin = *at++;
            region->interval[d][i].end = *at++;
        }
    }
    return at - message;
}
