/* Ranks as processes of one machine. Every group has a region of the job's file (comm/job.c): rounds, control records and short
 * payloads go through it as in comm/threads.c. No process reads another one's own memory: longer data goes through a slot of
 * shared memory that each rank has, in steps. In a step a rank fills one of the chunks of its slot, then takes its part from the
 * chunks of the others, and it fills a chunk again when all have taken what was in it. Sums are computed from the chunks in
 * place. A slot is filled by one call at a time, on whatever group, so groups that are split from one another share slots;
 * a call ends on a rank when the others have taken all that is in its slot.
 *
 * A process may die at any moment, since nobody needs anything but counters of it: who waits for them finds out (comm/job.c). */

#include "comm/launch.h"
#include "comm/processes_internal.h"
#include "kernel/kernels.h"

#include <stdio.h>
#include <string.h>

enum {
    XDI_PROCESSES_CHUNKS = 4, /* of a slot */
    /* Bytes of a slot for each rank: a chunk holds an element of every node of a forest. */
    XDI_PROCESSES_LEAST = 8 << 10,
    XDI_PROCESSES_SLOT = 512 << 10,
    XDI_PROCESSES_SLOT_RANK = 16 << 10,
    XDI_PROCESSES_NAME = 64 /* letters of a job's */
};

/* ---- rounds ---- */

static xdi_processes_flag *xdi_processes_flag_of(const xdi_processes *t, int rank) {
    return &t->seats[rank].flag[t->round & 1];
}

static xdi_processes_page *xdi_processes_page_of(const xdi_processes *t, int rank) {
    return &t->seats[rank].page[t->round & 1];
}

/* Enters the round and waits for all. The last one to come sees that all have, and wakes them. */
static xd_result xdi_processes_enter(xdi_processes *t, double deadline) {
    const int n = t->base.size;
    __atomic_store_n(&xdi_processes_flag_of(t, t->base.rank)->arrived, t->round, __ATOMIC_SEQ_CST);
    int there = 0;
    while (there < n &&
           __atomic_load_n(&xdi_processes_flag_of(t, there)->arrived, __ATOMIC_SEQ_CST) >= t->round)
        there++;
    if (there == n) xdi_job_ring(&t->group->bell);
    for (int r = there; r < n; r++)
        XD_TRY(xdi_processes_await(t, &xdi_processes_flag_of(t, r)->arrived, t->round, r, deadline));
    return XD_OK;
}

static uint64_t xdi_processes_digest(const xd_control *control) {
    uint64_t words[sizeof *control / 8], digest = 0;
    memcpy(words, control, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) digest = xdi_comm_mix(digest + words[i]);
    return digest;
}

/* ---- what a rank sends ---- */

/* Whether a rank has a block for each other one, rather than one for all. */
static bool xdi_processes_addresses(xd_collective_kind kind) {
    return xdi_comm_reduces(kind) || kind == XD_COLLECTIVE_SCATTER || kind == XD_COLLECTIVE_ALL_TO_ALL;
}

static bool xdi_processes_sends(const xd_collective *c, int rank) {
    const bool rooted = c->kind == XD_COLLECTIVE_BROADCAST || c->kind == XD_COLLECTIVE_SCATTER;
    return !rooted || rank == c->root;
}

static bool xdi_processes_receives(const xd_collective *c, int rank) {
    if (c->kind == XD_COLLECTIVE_BROADCAST) return rank != c->root;
    return c->kind != XD_COLLECTIVE_GATHER || rank == c->root;
}

/* The blocks that this rank sends, and those of a sum: begins and counts. An all_reduce is cut into a block for each rank. */
static void xdi_processes_plan(xdi_processes *t, const xd_collective *c) {
    const int n = t->base.size, me = t->base.rank;
    int64_t end = 0;
    for (int r = 0; r < n; r++) {
        t->begins[r] = t->counts[r] = 0;
        if (c->kind == XD_COLLECTIVE_ALL_REDUCE) {
            xdi_comm_piece(c->count, n, r, &t->begins[r], &end);
            t->counts[r] = end - t->begins[r];
        } else if (xdi_processes_addresses(c->kind)) {
            t->begins[r] = c->send_displacements ? c->send_displacements[r] : end;
            t->counts[r] = xdi_processes_sends(c, me) ? c->send_counts[r] : 0;
            end += c->send_counts[r];
        }
    }
    if (!xdi_processes_addresses(c->kind)) t->counts[0] = xdi_comm_send_elements(c, me, n);
}

/* Elements from one node of this rank's forest to the next. */
static int64_t xdi_processes_stride(const xd_collective *c, int size) {
    return c->kind == XD_COLLECTIVE_ALL_REDUCE ? c->count : xdi_comm_total(c->send_counts, size);
}

/* The longest block that this rank sends or receives. */
static int64_t xdi_processes_longest(const xdi_processes *t, const xd_collective *c) {
    int64_t longest = c->kind == XD_COLLECTIVE_BROADCAST ? c->count : 0;
    for (int r = 0; r < t->base.size; r++) {
        if (t->counts[r] > longest) longest = t->counts[r];
        if (c->recv_counts && c->recv_counts[r] > longest) longest = c->recv_counts[r];
    }
    return longest;
}

static void xdi_processes_copy(void *to, const void *from, int64_t count, size_t size) {
    if (count > 0) memcpy(to, from, (size_t)count * size);
}

/* Where this rank shows a payload. A block for each other rank, other than of a sum, needs the page's offsets. */
static uint32_t xdi_processes_place(const xd_collective *c, size_t bytes) {
    const bool offsets = xdi_processes_addresses(c->kind) && !xdi_comm_reduces(c->kind);
    if (bytes <= XDI_PROCESSES_TINY && !offsets) return XDI_PROCESSES_IN_FLAG;
    return bytes <= XDI_PROCESSES_INLINE ? XDI_PROCESSES_IN_PAGE : XDI_PROCESSES_IN_SLOT;
}

/* Whether this rank reads its own part of a sum where the caller has it. In a forest nodes have one distance for all ranks. */
static bool xdi_processes_reads_own(const xd_collective *c) {
    return xdi_comm_reduces(c->kind) && !c->leaves.total;
}

/* Where the blocks of this rank are in its payload. A rank without leaves shows none, but reads those of others. */
static void xdi_processes_locate(const xdi_processes *t) {
    int64_t *offsets = xdi_processes_page_of(t, t->base.rank)->offsets, at = 0;
    for (int r = 0; r < t->base.size; at += t->counts[r++]) offsets[r] = at;
}

/* Copies all blocks that others read, as if all lay back to back; each node of a forest like this. */
static void xdi_processes_show(const xdi_processes *t, void *payload, const xd_collective *c) {
    const size_t size = xd_dtype_size(c->dtype);
    const int n = t->base.size;
    const int64_t nodes = xdi_comm_reduces(c->kind) ? xdi_comm_nodes(&c->leaves) : 1;
    const int64_t stride = nodes > 1 ? xdi_processes_stride(c, n) : 0;
    const bool skips = xdi_processes_reads_own(c) && c->kind != XD_COLLECTIVE_ALL_REDUCE;
    char *to = (char *)payload;
    int64_t at = 0;
    for (int64_t k = 0; k < nodes; k++)
        for (int r = 0; r < n; r++) {
            if (t->counts[r] == 0) continue; /* send may be NULL */
            if (r != t->base.rank || !skips)
                xdi_processes_copy(to + (size_t)at * size,
                                   (const char *)c->send + (size_t)(k * stride + t->begins[r]) * size,
                                   t->counts[r], size);
            at += t->counts[r];
        }
}

static void xdi_processes_publish(xdi_processes *t, xdi_processes_flag *flag, const xd_collective *c) {
    const size_t bytes =
        (size_t)xdi_comm_send_elements(c, t->base.rank, t->base.size) * xd_dtype_size(c->dtype);
    flag->place = xdi_processes_place(c, bytes);
    flag->longest = 0;
    if (c->kind == XD_COLLECTIVE_BARRIER) return;
    xdi_processes_plan(t, c);
    flag->longest = xdi_processes_longest(t, c);
    if (xdi_processes_addresses(c->kind) && c->kind != XD_COLLECTIVE_ALL_REDUCE) xdi_processes_locate(t);
    if (flag->place == XDI_PROCESSES_IN_FLAG) xdi_processes_show(t, flag->payload, c);
    if (flag->place == XDI_PROCESSES_IN_PAGE)
        xdi_processes_show(t, xdi_processes_page_of(t, t->base.rank)->payload, c);
}

static xd_result xdi_processes_control(xd_transport *transport, const xd_control *mine,
                                       const xd_collective *next, xd_control *all, double deadline) {
    xdi_processes *t = (xdi_processes *)transport;
    if (xdi_job_failure(t->job)) return xdi_processes_report(t, false);
    t->round++;
    xdi_processes_flag *flag = xdi_processes_flag_of(t, t->base.rank);
    xdi_processes_page_of(t, t->base.rank)->control = *mine;
    flag->digest = xdi_processes_digest(mine);
    if (next) xdi_processes_publish(t, flag, next);
    XD_TRY(xdi_processes_enter(t, deadline));
    for (int r = 0; r < t->base.size; r++) {
        const bool same = xdi_processes_flag_of(t, r)->digest == flag->digest;
        all[r] = same ? *mine : xdi_processes_page_of(t, r)->control;
    }
    return XD_OK;
}

/* ---- taking ---- */

/* Sums pieces that t->pieces points to; `stride` elements from node to node. */
static xd_result xdi_processes_reduce(const xdi_processes *t, const xd_collective *c, void *out,
                                      int64_t stride, int64_t count) {
    const xd_reduce_kernels *reduce = &xd_ctx_host_kernels(t->base.ctx)->reduce;
    const xd_launch launch = xd_ctx_launch(t->base.ctx);
    if (count == 0) return XD_OK;
    if (c->leaves.total)
        return reduce->leaves(&launch, out, t->pieces, t->leaves, t->base.size, stride, count, c->dtype,
                              c->op);
    return reduce->pieces(&launch, out, t->pieces, t->base.size, count, c->dtype, c->op);
}

/* Reads every rank's leaves from the control records, which a sum without leaves leaves alone; returns the most nodes of one. */
static int64_t xdi_processes_nodes(const xdi_processes *t, const xd_collective *c) {
    int64_t most = 1;
    if (!c->leaves.total) return most;
    for (int r = 0; r < t->base.size; r++) {
        const xd_control *control = &xdi_processes_page_of(t, r)->control;
        t->leaves[r].first = (int64_t)control->extra;
        t->leaves[r].count = (int64_t)control->leaves;
        t->leaves[r].total = c->leaves.total;
        if (xdi_comm_nodes(&t->leaves[r]) > most) most = xdi_comm_nodes(&t->leaves[r]);
    }
    return most;
}

/* Where the data of a rank goes in recv: *to elements from its beginning; returns how many come. */
static int64_t xdi_processes_room(const xdi_processes *t, const xd_collective *c, int from, int64_t *to) {
    *to = 0;
    if (!xdi_processes_sends(c, from) || !xdi_processes_receives(c, t->base.rank)) return 0;
    if (c->kind == XD_COLLECTIVE_BROADCAST) return c->count;
    if (c->kind == XD_COLLECTIVE_SCATTER) return c->send_counts[t->base.rank];
    *to = xdi_comm_offset(c->recv_counts, c->recv_displacements, from);
    return c->recv_counts[from];
}

/* What this rank sends to itself; a block that is in its place already stays. */
static void xdi_processes_keep(const xdi_processes *t, const xd_collective *c) {
    const size_t size = xd_dtype_size(c->dtype);
    int64_t to;
    const int64_t count = xdi_processes_room(t, c, t->base.rank, &to);
    if (count == 0) return;
    const int64_t from = xdi_processes_addresses(c->kind) ? t->begins[t->base.rank] : 0;
    const char *send = (const char *)c->send + (size_t)from * size;
    char *recv = (char *)c->recv + (size_t)to * size;
    if (send != recv) xdi_processes_copy(recv, send, count, size);
}

/* Where rank r shows the block for this rank; all ranks cut a sum alike. */
static const void *xdi_processes_shown(const xdi_processes *t, const xd_collective *c, int r) {
    const xdi_processes_page *page = xdi_processes_page_of(t, r);
    const xdi_processes_flag *flag = xdi_processes_flag_of(t, r);
    const uint64_t *payload = flag->place == XDI_PROCESSES_IN_FLAG ? flag->payload : page->payload;
    int64_t from = 0;
    if (xdi_processes_addresses(c->kind) && c->kind != XD_COLLECTIVE_ALL_REDUCE)
        from = xdi_processes_page_of(t, xdi_comm_reduces(c->kind) ? t->base.rank : r)->offsets[t->base.rank];
    return (const char *)payload + (size_t)from * xd_dtype_size(c->dtype);
}

/* Everything is in the flags and pages. */
static xd_result xdi_processes_take_short(const xdi_processes *t, const xd_collective *c) {
    const size_t size = xd_dtype_size(c->dtype);
    const int me = t->base.rank, n = t->base.size;
    const bool sums = xdi_comm_reduces(c->kind), whole = c->kind == XD_COLLECTIVE_ALL_REDUCE;
    for (int r = 0; r < n; r++) {
        const void *data = xdi_processes_shown(t, c, r);
        int64_t to;
        t->pieces[r] = data;
        if (sums || r == me) continue;
        const int64_t count = xdi_processes_room(t, c, r, &to);
        if (count > 0) xdi_processes_copy((char *)c->recv + (size_t)to * size, data, count, size);
    }
    if (!sums) {
        xdi_processes_keep(t, c);
        return XD_OK;
    }
    xdi_processes_nodes(t, c);
    const int64_t begin = whole ? 0 : t->begins[me], count = whole ? c->count : c->send_counts[me];
    if (xdi_processes_reads_own(c) && count > 0) t->pieces[me] = (const char *)c->send + (size_t)begin * size;
    return xdi_processes_reduce(t, c, c->recv, xdi_processes_stride(c, n), count);
}

/* ---- steps ---- */

/* How a call is cut. Part d of a chunk is for rank d: `tile` elements of each node of the forest. */
typedef struct xdi_processes_cut {
    const xd_collective *c;
    size_t size;   /* of an element */
    int64_t tile;  /* elements of each block in a step */
    int64_t nodes; /* most of a rank */
    int64_t steps;
    int64_t stride; /* of this rank's forest */
    bool sums, whole;
    uint64_t begin; /* t->steps at the beginning */
    double deadline;
} xdi_processes_cut;

/* Steps of equal length, whose parts begin at lines of the cache where the slot has room for that. */
static void xdi_processes_even_out(xdi_processes_cut *cut, int64_t longest) {
    const int64_t line = (int64_t)((size_t)XDI_JOB_LINE / cut->size);
    if (cut->tile > line) cut->tile -= cut->tile % line;
    cut->steps = (longest + cut->tile - 1) / cut->tile;
    if (cut->steps == 0) return;
    const int64_t even = (longest + cut->steps - 1) / cut->steps, whole = (even + line - 1) / line * line;
    cut->tile = whole < cut->tile ? whole : cut->tile;
}

static xdi_processes_cut xdi_processes_cut_of(const xdi_processes *t, const xd_collective *c,
                                              double deadline) {
    xdi_processes_cut cut;
    const int n = t->base.size;
    const bool parts = xdi_processes_addresses(c->kind);
    int64_t longest = 0;
    memset(&cut, 0, sizeof cut);
    cut.c = c;
    cut.size = xd_dtype_size(c->dtype);
    cut.sums = xdi_comm_reduces(c->kind);
    cut.whole = c->kind == XD_COLLECTIVE_ALL_REDUCE;
    cut.nodes = cut.sums ? xdi_processes_nodes(t, c) : 1;
    cut.stride = cut.sums ? xdi_processes_stride(c, n) : 0;
    cut.tile = (int64_t)(t->slots->slot_bytes / XDI_PROCESSES_CHUNKS / cut.size);
    cut.tile /= parts ? n * cut.nodes + (cut.whole ? 1 : 0) : 1;
    for (int r = 0; r < n; r++)
        if (xdi_processes_flag_of(t, r)->longest > longest) longest = xdi_processes_flag_of(t, r)->longest;
    xdi_processes_even_out(&cut, longest);
    cut.begin = t->steps;
    cut.deadline = deadline;
    return cut;
}

/* Elements of a block in a step. */
static int64_t xdi_processes_in_step(const xdi_processes_cut *cut, int64_t count, int64_t step) {
    const int64_t left = count > step * cut->tile ? count - step * cut->tile : 0;
    return left < cut->tile ? left : cut->tile;
}

/* The chunk of a rank in a step; the sums of an all_reduce are behind all parts. */
static char *xdi_processes_chunk(const xdi_processes *t, int rank, const xdi_processes_cut *cut,
                                 int64_t step) {
    const size_t each = t->slots->slot_bytes / XDI_PROCESSES_CHUNKS;
    const uint64_t number = (cut->begin + (uint64_t)step) % XDI_PROCESSES_CHUNKS;
    return t->slots->first + (size_t)t->places[rank] * t->slots->slot_bytes + (size_t)number * each;
}

static char *xdi_processes_part(char *chunk, const xdi_processes_cut *cut, int64_t part) {
    return chunk + (size_t)(part * cut->nodes * cut->tile) * cut->size;
}

/* Fills this rank's chunk. What it sums itself is read where it is, unless it is a forest: nodes have the distance of a tile. */
static void xdi_processes_fill(const xdi_processes *t, const xdi_processes_cut *cut, int64_t step) {
    char *chunk = xdi_processes_chunk(t, t->base.rank, cut, step);
    const int64_t nodes = cut->sums ? xdi_comm_nodes(&cut->c->leaves) : 1;
    const bool skips =
        xdi_processes_addresses(cut->c->kind) && (!cut->sums || xdi_processes_reads_own(cut->c));
    for (int r = 0; r < t->base.size; r++) {
        const int64_t count = xdi_processes_in_step(cut, t->counts[r], step);
        if (r == t->base.rank && skips) continue;
        for (int64_t k = 0; k < nodes && count > 0; k++)
            xdi_processes_copy(xdi_processes_part(chunk, cut, r) + (size_t)(k * cut->tile) * cut->size,
                               (const char *)cut->c->send +
                                   (size_t)(k * cut->stride + t->begins[r] + step * cut->tile) * cut->size,
                               count, cut->size);
    }
}

/* Sums this rank's block of a step. In place nobody else reads it. */
static xd_result xdi_processes_add(const xdi_processes *t, const xdi_processes_cut *cut, int64_t step) {
    const int me = t->base.rank, n = t->base.size;
    const int64_t at = step * cut->tile, count = xdi_processes_in_step(cut, t->counts[me], step);
    for (int r = 0; r < n; r++)
        t->pieces[r] = xdi_processes_part(xdi_processes_chunk(t, r, cut, step), cut, me);
    if (xdi_processes_reads_own(cut->c) && count > 0)
        t->pieces[me] = (const char *)cut->c->send + (size_t)(t->begins[me] + at) * cut->size;
    char *sums =
        count > 0 ? (char *)cut->c->recv + (size_t)((cut->whole ? t->begins[me] : 0) + at) * cut->size : NULL;
    char *shown = cut->whole ? xdi_processes_part(xdi_processes_chunk(t, me, cut, step), cut, n) : sums;
    XD_TRY(xdi_processes_reduce(t, cut->c, shown, cut->tile, count));
    if (cut->whole) xdi_processes_copy(sums, shown, count, cut->size);
    return XD_OK;
}

/* Copies what the others have for this rank; of an all_reduce, their sums. */
static void xdi_processes_collect(const xdi_processes *t, const xdi_processes_cut *cut, int64_t step,
                                  int from) {
    const bool parts = xdi_processes_addresses(cut->c->kind);
    int64_t to = t->begins[from], count = t->counts[from];
    if (!cut->whole) count = xdi_processes_room(t, cut->c, from, &to);
    const int64_t now = xdi_processes_in_step(cut, count, step);
    const char *part = xdi_processes_part(xdi_processes_chunk(t, from, cut, step), cut,
                                          cut->whole ? t->base.size
                                          : parts    ? t->base.rank
                                                     : 0);
    if (now > 0)
        xdi_processes_copy((char *)cut->c->recv + (size_t)(to + step * cut->tile) * cut->size, part, now,
                           cut->size);
}

/* Waits until the counter at `field` bytes of every other rank's seat has reached what it is after `step` steps. */
static xd_result xdi_processes_await_all(xdi_processes *t, const xdi_processes_cut *cut, size_t field,
                                         int64_t step) {
    const int n = t->base.size;
    for (int k = 1; k < n && step > 0; k++) {
        const int r = (t->base.rank + k) % n;
        const uint64_t *counter = (const uint64_t *)(const void *)((const char *)&t->seats[r] + field);
        XD_TRY(xdi_processes_await(t, counter, cut->begin + (uint64_t)step, r, cut->deadline));
    }
    return XD_OK;
}

/* The first part of a step: fills a chunk, once all have done with what was in it. */
static xd_result xdi_processes_give(xdi_processes *t, const xdi_processes_cut *cut, int64_t step) {
    xdi_processes_seat *seat = &t->seats[t->base.rank];
    XD_TRY(xdi_processes_await_all(t, cut, offsetof(xdi_processes_seat, taken),
                                   step - XDI_PROCESSES_CHUNKS + 1));
    if (xdi_processes_sends(cut->c, t->base.rank)) xdi_processes_fill(t, cut, step);
    xdi_processes_tell(t, &seat->filled, cut->begin + (uint64_t)step + 1);
    return XD_OK;
}

/* The second part, of all that only moves: takes what is there, whoever has filled it. */
static xd_result xdi_processes_take(xdi_processes *t, const xdi_processes_cut *cut, int64_t step) {
    const int n = t->base.size;
    xdi_processes_seat *seat = &t->seats[t->base.rank];
    for (int k = 1; k < n; k++) {
        const int r = (t->base.rank + k) % n;
        int64_t to;
        if (xdi_processes_room(t, cut->c, r, &to) <= step * cut->tile) continue;
        XD_TRY(
            xdi_processes_await(t, &t->seats[r].filled, cut->begin + (uint64_t)step + 1, r, cut->deadline));
        xdi_processes_collect(t, cut, step, r);
    }
    xdi_processes_tell(t, &seat->taken, cut->begin + (uint64_t)step + 1);
    return XD_OK;
}

/* The second part, of a sum; an all_reduce has a third one. */
static xd_result xdi_processes_sum(xdi_processes *t, const xdi_processes_cut *cut, int64_t step) {
    xdi_processes_seat *seat = &t->seats[t->base.rank];
    XD_TRY(xdi_processes_await_all(t, cut, offsetof(xdi_processes_seat, filled), step + 1));
    XD_TRY(xdi_processes_add(t, cut, step));
    xdi_processes_tell(t, cut->whole ? &seat->summed : &seat->taken, cut->begin + (uint64_t)step + 1);
    return XD_OK;
}

static xd_result xdi_processes_spread(xdi_processes *t, const xdi_processes_cut *cut, int64_t step) {
    const int n = t->base.size;
    XD_TRY(xdi_processes_await_all(t, cut, offsetof(xdi_processes_seat, summed), step + 1));
    for (int k = 1; k < n; k++) xdi_processes_collect(t, cut, step, (t->base.rank + k) % n);
    xdi_processes_tell(t, &t->seats[t->base.rank].taken, cut->begin + (uint64_t)step + 1);
    return XD_OK;
}

static xd_result xdi_processes_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_processes *t = (xdi_processes *)transport;
    bool is_short = true;
    for (int r = 0; r < t->base.size; r++)
        is_short = is_short && xdi_processes_flag_of(t, r)->place != XDI_PROCESSES_IN_SLOT;
    if (is_short) return xdi_processes_take_short(t, c);
    const xdi_processes_cut cut = xdi_processes_cut_of(t, c, deadline);
    if (!cut.sums) xdi_processes_keep(t, c);
    /* A part of a step comes one turn after the one before it, when the others have had time for that. */
    for (int64_t turn = 0; turn < cut.steps + 2; turn++) {
        const int64_t second = turn - 1, third = turn - 2;
        if (turn < cut.steps) XD_TRY(xdi_processes_give(t, &cut, turn));
        if (second >= 0 && second < cut.steps)
            XD_TRY(cut.sums ? xdi_processes_sum(t, &cut, second) : xdi_processes_take(t, &cut, second));
        if (cut.whole && third >= 0) XD_TRY(xdi_processes_spread(t, &cut, third));
    }
    XD_TRY(xdi_processes_await_all(t, &cut, offsetof(xdi_processes_seat, taken), cut.steps));
    t->steps += (uint64_t)cut.steps;
    return XD_OK;
}

/* ---- handles ---- */

static size_t xdi_processes_align(size_t bytes) {
    return (bytes + XDI_JOB_LINE - 1) / XDI_JOB_LINE * XDI_JOB_LINE;
}

/* Bytes of a group's region without slots. */
static size_t xdi_processes_group_bytes(int size) {
    const size_t n = (size_t)size;
    return sizeof(xdi_processes_group) + xdi_processes_align(n * sizeof(xdi_processes_seat)) +
           n * n * sizeof(xdi_processes_mail);
}

/* Gives up the slots, and with the last handle their region. */
static void xdi_processes_leave_slots(xdi_processes *t) {
    xdi_processes_slots *slots = t->slots;
    if (!slots || __atomic_sub_fetch(&slots->holders, 1, __ATOMIC_ACQ_REL) > 0) return;
    xdi_job_give(t->job, slots->region, slots->memory, slots->bytes);
    xd_release(t->base.ctx, slots);
}

static void xdi_processes_destroy(xd_transport *transport) {
    xdi_processes *t = (xdi_processes *)transport;
    xd_ctx *ctx = transport->ctx;
    const bool is_in_slots = t->slots && t->slots->region == t->region;
    if (t->memory) {
        __atomic_store_n(&t->seats[transport->rank].left, 1u, __ATOMIC_SEQ_CST);
        xdi_job_ring(&t->group->bell);
        for (int r = 0; r < transport->size; r++) xdi_job_ring(&t->seats[r].bell);
    }
    xdi_processes_leave_slots(t);
    if (t->region >= 0 && !is_in_slots) xdi_job_give(t->job, t->region, t->memory, t->bytes);
    xdi_job_release(ctx, t->job);
    xd_release(ctx, t->lanes);
    xd_release(ctx, (void *)t->pieces);
    xd_release(ctx, t->leaves);
    xd_release(ctx, t->counts);
    xd_release(ctx, t->begins);
    xd_release(ctx, t->places);
    xd_release(ctx, t->world_ranks);
    xd_release(ctx, t);
}

/* Slots of a group's own, behind the rest of its region. */
static bool xdi_processes_own_slots(xdi_processes *t, size_t slot_bytes) {
    t->slots = (xdi_processes_slots *)xd_allocate(t->base.ctx, sizeof *t->slots);
    if (!t->slots) return false;
    t->slots->holders = 1;
    t->slots->region = t->region;
    t->slots->size = t->base.size;
    t->slots->memory = t->memory;
    t->slots->bytes = t->bytes;
    t->slots->slot_bytes = slot_bytes;
    t->slots->first = (char *)t->memory + xdi_processes_group_bytes(t->base.size);
    return true;
}

/* Gives a region to a handle, whatever becomes of the rest. slot_bytes 0: it uses the slots of `parent`. */
static xd_result xdi_processes_bind(xdi_processes *t, int region, size_t slot_bytes,
                                    xdi_processes_slots *parent) {
    const size_t n = (size_t)t->base.size;
    t->region = region;
    t->bytes = xdi_processes_group_bytes(t->base.size) + n * slot_bytes;
    char *memory = (char *)xdi_job_map(t->job, region, t->bytes);
    t->memory = memory;
    XD_REQUIRE(t->base.ctx, memory, XD_ERROR_MEMORY, "%zu bytes that %d ranks share cannot be mapped",
               t->bytes, (int)n);
    t->group = (xdi_processes_group *)(void *)memory;
    t->seats = (xdi_processes_seat *)(void *)(memory + sizeof *t->group);
    t->mail =
        (xdi_processes_mail *)(void *)(memory + sizeof *t->group + xdi_processes_align(n * sizeof *t->seats));
    if (parent) {
        __atomic_add_fetch(&parent->holders, 1, __ATOMIC_ACQ_REL);
        t->slots = parent;
    }
    XD_REQUIRE(t->base.ctx, parent || xdi_processes_own_slots(t, slot_bytes), XD_ERROR_MEMORY,
               "no room for the slots of %d ranks", (int)n);
    return XD_OK;
}

static xd_result xdi_processes_attach(xd_ctx *ctx, xdi_job *job, int size, int rank, xdi_processes **out);

/* The first member takes a region for the new group and publishes it in its seat, where the others read it. */
static xd_result xdi_processes_child(xdi_processes *t, int first, int size, size_t slot_bytes,
                                     double deadline, int *region) {
    xdi_processes_seat *leader = &t->seats[first];
    const size_t bytes = xdi_processes_group_bytes(size) + (size_t)size * slot_bytes;
    if (first == t->base.rank) {
        leader->child = xdi_job_take(t->job, bytes, size);
        xdi_processes_tell(t, &leader->child_round, t->round);
    } else {
        XD_TRY(xdi_processes_await(t, &leader->child_round, t->round, first, deadline));
    }
    *region = leader->child;
    XD_REQUIRE(
        t->base.ctx, *region >= 0, XD_ERROR_MEMORY,
        "no room in /dev/shm for %zu bytes that a group of %d ranks shares, or a job has %d groups already",
        bytes, size, (int)XDI_JOB_REGIONS);
    return XD_OK;
}

/* A handle on a region that has been taken. */
static xd_result xdi_processes_open(xd_ctx *ctx, xdi_job *job, int size, int rank, int region,
                                    size_t slot_bytes, xdi_processes_slots *parent, xdi_processes **out) {
    xdi_processes *made = NULL;
    const xd_result attached = xdi_processes_attach(ctx, job, size, rank, &made);
    if (attached != XD_OK) xdi_job_give(job, region, NULL, 0);
    XD_TRY(attached);
    const xd_result bound = xdi_processes_bind(made, region, slot_bytes, parent);
    if (bound != XD_OK) xdi_processes_destroy(&made->base);
    if (bound == XD_OK) *out = made;
    return bound;
}

static xd_result xdi_processes_split(xd_transport *transport, const int *members, int size, int rank,
                                     double deadline, xd_transport **out) {
    xdi_processes *t = (xdi_processes *)transport, *child = NULL;
    int region = -1;
    XD_TRY(xdi_processes_child(t, members[0], size, 0, deadline, &region));
    XD_TRY(xdi_processes_open(transport->ctx, t->job, size, rank, region, 0, t->slots, &child));
    for (int r = 0; r < size; r++) {
        child->world_ranks[r] = t->world_ranks[members[r]];
        child->places[r] = t->places[members[r]];
    }
    *out = &child->base;
    return XD_OK;
}

static xd_result xdi_processes_fork(xd_transport *transport, xd_ctx *ctx, double deadline,
                                    xd_transport **out) {
    xdi_processes *t = (xdi_processes *)transport, *twin = NULL;
    const int size = transport->size;
    int region = -1;
    XD_TRY(xdi_processes_child(t, 0, size, t->slots->slot_bytes, deadline, &region));
    const xd_result made =
        xdi_processes_open(ctx, t->job, size, transport->rank, region, t->slots->slot_bytes, NULL, &twin);
    if (made != XD_OK) return xdi_ctx_adopt(transport->ctx, xd_last_error(ctx));
    memcpy(twin->world_ranks, t->world_ranks, (size_t)size * sizeof *t->world_ranks);
    *out = &twin->base;
    return XD_OK;
}

/* A handle and what it knows of its slots. What processes share is the system's. */
static size_t xdi_processes_fork_bytes(const xd_transport *transport) {
    const size_t n = (size_t)transport->size;
    return sizeof(xdi_processes) + sizeof(xdi_processes_slots) +
           n * (2 * sizeof(int) + 2 * sizeof(int64_t) + sizeof(xd_leaves) + sizeof(void *) +
                2 * sizeof(xdi_processes_lane));
}

static size_t xdi_processes_world_bytes(const xdi_job *job, int size) {
    return xdi_processes_group_bytes(size) + (size_t)size * (size_t)job->head->slot_bytes;
}

static xd_result xdi_processes_shrink(xd_transport *transport, double deadline, xd_transport **out) {
    const xdi_processes *t = (const xdi_processes *)transport;
    xd_ctx *ctx = transport->ctx;
    xdi_processes *made = NULL;
    xdi_job *job = NULL;
    XD_TRY(xdi_job_shrink(ctx, t->job, xdi_processes_world_bytes, deadline, &job));
    const xd_result result = xdi_processes_open(ctx, job, job->size, job->rank, job->world->group,
                                                (size_t)job->head->slot_bytes, NULL, &made);
    xdi_job_release(ctx, job); /* without a handle this rank has left that world too */
    if (result == XD_OK) *out = &made->base;
    return result;
}

static void xdi_processes_abort(xd_transport *transport) {
    xdi_processes *t = (xdi_processes *)transport;
    const int me = t->world_ranks[transport->rank];
    xdi_job_break(t->job, XD_ERROR_PEER, me);
    __atomic_store_n(&t->job->world->members[me].gone, 1u, __ATOMIC_SEQ_CST);
    xdi_job_ring(&t->group->bell);
}

static void xdi_processes_fail(xd_transport *transport, xd_result result, int culprit) {
    xdi_job_break(((xdi_processes *)transport)->job, result, culprit);
}

static xd_result xdi_processes_poll(xd_transport *transport) {
    const xdi_processes *t = (const xdi_processes *)transport;
    return xdi_job_failure(t->job) ? xdi_processes_report(t, false) : XD_OK;
}

static const xd_transport_ops xdi_processes_ops = { "processes",
                                                    xdi_processes_control,
                                                    xdi_processes_execute,
                                                    xdi_processes_split,
                                                    xdi_processes_abort,
                                                    xdi_processes_destroy,
                                                    xdi_processes_poll,
                                                    false,
                                                    xdi_processes_fail,
                                                    xdi_processes_fork,
                                                    xdi_processes_exchange,
                                                    xdi_processes_fork_bytes,
                                                    false,
                                                    xdi_processes_shrink,
                                                    NULL,
                                                    NULL };

/* A handle without a region, of the job's ranks in their order. */
static xd_result xdi_processes_attach(xd_ctx *ctx, xdi_job *job, int size, int rank, xdi_processes **out) {
    const size_t n = (size_t)size;
    xdi_processes *t = (xdi_processes *)xd_allocate(ctx, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    t->base.ops = &xdi_processes_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = size;
    t->job = job;
    t->region = -1;
    xdi_job_hold(job);
    t->world_ranks = (int *)xd_allocate(ctx, n * sizeof *t->world_ranks);
    t->places = (int *)xd_allocate(ctx, n * sizeof *t->places);
    t->begins = (int64_t *)xd_allocate(ctx, n * sizeof *t->begins);
    t->counts = (int64_t *)xd_allocate(ctx, n * sizeof *t->counts);
    t->leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *t->leaves);
    t->pieces = (const void **)xd_allocate(ctx, n * sizeof *t->pieces);
    t->lanes = (xdi_processes_lane *)xd_allocate(ctx, 2 * n * sizeof *t->lanes);
    if (!t->world_ranks || !t->places || !t->begins || !t->counts || !t->leaves || !t->pieces || !t->lanes) {
        xdi_processes_destroy(&t->base);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks", size);
    }
    for (int r = 0; r < size; r++) t->world_ranks[r] = t->places[r] = r;
    t->base.world_ranks = t->world_ranks;
    *out = t;
    return XD_OK;
}

/* ---- worlds ---- */

static bool xdi_processes_is_name(const char *name) {
    size_t length = 0;
    for (; name && name[length]; length++) {
        const char c = name[length];
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(c >= '0' && c <= '9') && c != '-' && c != '_') return false;
        if (length == XDI_PROCESSES_NAME) return false;
    }
    return length > 0;
}

/* Checks the desc and fills in its defaults. */
static xd_result xdi_processes_resolve(xd_ctx *ctx, xd_node_desc *d) {
    XD_REQUIRE(ctx, xdi_processes_is_name(d->name), XD_ERROR_ARGUMENT,
               "a job is named by 1 to %d letters, digits, '-' and '_', not by \"%.80s\"",
               (int)XDI_PROCESSES_NAME, d->name ? d->name : "");
    XD_REQUIRE(ctx, d->size >= 1 && d->size <= XD_NODE_RANKS_MAX, XD_ERROR_ARGUMENT,
               "job %s: size %d is outside [1, %d]", d->name, d->size, XD_NODE_RANKS_MAX);
    XD_REQUIRE(ctx, d->rank >= 0 && d->rank < d->size, XD_ERROR_ARGUMENT,
               "job %s: rank %d is outside [0, %d)", d->name, d->rank, d->size);
    XD_REQUIRE(ctx, d->timeout_s >= 0.0, XD_ERROR_ARGUMENT, "job %s: timeout_s is %g", d->name, d->timeout_s);
    const size_t least = (size_t)XDI_PROCESSES_LEAST * (size_t)d->size, most = SIZE_MAX / 128;
    if (d->slot_bytes == 0) {
        d->slot_bytes = (size_t)XDI_PROCESSES_SLOT_RANK * (size_t)d->size;
        if (d->slot_bytes < XDI_PROCESSES_SLOT) d->slot_bytes = XDI_PROCESSES_SLOT;
    }
    XD_REQUIRE(ctx, d->slot_bytes >= least && d->slot_bytes <= most, XD_ERROR_ARGUMENT,
               "job %s: slot_bytes is %zu, %d ranks need %zu, and at most %zu", d->name, d->slot_bytes,
               d->size, least, most);
    d->slot_bytes = d->slot_bytes / XDI_PROCESSES_LEAST * XDI_PROCESSES_LEAST;
    if (d->timeout_s <= 0.0) d->timeout_s = xd_ctx_settings(ctx)->init_timeout_seconds;
    return XD_OK;
}

XD_API xd_result xd_comm_node(xd_ctx *ctx, const xd_node_desc *desc, xd_comm **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xd_node_desc d = *desc;
    xdi_job *job = NULL;
    xdi_processes *t = NULL;
    xd_comm *comm = NULL;
    XD_TRY(xdi_processes_resolve(ctx, &d));
    xd_ctx_set_rank(ctx, d.rank);
    const size_t bytes = xdi_processes_group_bytes(d.size) + (size_t)d.size * d.slot_bytes;
    const double deadline = xd_now(ctx) + d.timeout_s;
    XD_TRY(xdi_job_join(ctx, &d, bytes, &job));
    xd_result result = xdi_processes_open(ctx, job, d.size, d.rank, 0, d.slot_bytes, NULL, &t);
    if (result == XD_OK) result = xd_comm_create(ctx, &t->base, &comm);
    result = xdi_job_meet(ctx, job, result, deadline);
    if (result == XD_OK)
        *out = comm;
    else
        xd_comm_destroy(comm);
    xdi_job_release(ctx, job);
    return result;
}

XD_API xd_result xd_comm_launched(xd_ctx *ctx, xd_comm **out) {
    XDI_GIVEN(ctx, ctx, out);
    xd_launch_info place;
    xd_node_desc node;
    XD_TRY(xd_launch_discover(ctx, &place));
    if (place.world_size == 1) return xd_comm_self(ctx, out);
    XD_REQUIRE(
        ctx, place.local_world_size == 0 || place.local_world_size == place.world_size, XD_ERROR_UNSUPPORTED,
        "%d of %d ranks are on this machine: for several machines there are xd_comm_mpi and xd_comm_nccl",
        place.local_world_size, place.world_size);
    XD_REQUIRE(ctx, place.job[0], XD_ERROR_MISSING,
               "nothing names this job of %d ranks: set XDISTILL_JOB to a name that no other has",
               place.world_size);
    memset(&node, 0, sizeof node);
    node.name = place.job;
    node.rank = place.rank;
    node.size = place.world_size;
    return xd_comm_node(ctx, &node, out);
}
