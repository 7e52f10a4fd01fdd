/* Parts of tensors from the cut in which ranks have them to the one in which ranks want them. */

#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "comm/mesh.h"
#include "kernel/internal.h"
#include "tensor/internal.h"

#include <string.h>

/* What a rank has of the tensor that is moved, and what it wants; every rank knows it of all, so none asks before it sends. */
typedef struct xdi_move_rank {
    xd_region region[2];
    xd_tensor_part has, wants;
    bool speaks; /* for the elements that it has; others have copies */
} xdi_move_rank;

typedef struct xdi_mover {
    xd_comm *comm;
    xd_ctx *ctx;
    int rank, size;
    const xdi_move *moves;
    int64_t count;
    size_t room;                                  /* bytes behind `send` */
    int64_t *here;                                /* [count] 1: every rank has what it wants */
    xdi_move_rank *ranks;                         /* [size] */
    int64_t *lengths, *send_counts, *recv_counts; /* [size] */
    int64_t *sent, *messages;                     /* [1, size] times two parts */
    unsigned char *send, *recv;                   /* of the device */
} xdi_mover;

/* ---- common elements ---- */

/* Elements that are adjacent in the tensor and in both parts: how many, and from which positions of their ranges on. */
typedef struct xdi_common {
    int64_t a, b, count;
} xdi_common;

/* The elements of a part from `index` of the tensor on that are adjacent: their number, 0 for none, the first one's index and
 * position. */
static int64_t xdi_move_run(const xd_tensor_part *p, int64_t index, int64_t *first, int64_t *position) {
    *position = xdi_part_position(p, index);
    return *position < p->range.end ? xdi_part_run(p, *position, first) : 0;
}

/* The next elements, from *at to `end` of the tensor, that two parts have and a third, unless that is NULL, has not. */
static bool xdi_move_next(const xd_tensor_part *a, const xd_tensor_part *b, const xd_tensor_part *without,
                          int64_t end, int64_t *at, xdi_common *out) {
    while (*at < end) {
        int64_t first_a = 0, first_b = 0, first_c = 0, ignored;
        const int64_t run_a = xdi_move_run(a, *at, &first_a, &out->a);
        const int64_t run_b = run_a ? xdi_move_run(b, *at, &first_b, &out->b) : 0;
        if (!run_a || !run_b) return false;
        const int64_t begin = first_a > first_b ? first_a : first_b;
        int64_t stop = first_a + run_a < first_b + run_b ? first_a + run_a : first_b + run_b;
        if (stop > end) stop = end;
        if (begin > *at) { /* not yet in both */
            *at = begin;
            continue;
        }
        const int64_t run_c = without ? xdi_move_run(without, *at, &first_c, &ignored) : 0;
        if (run_c && first_c == *at) {
            *at = first_c + run_c;
            continue;
        }
        if (run_c && first_c < stop) stop = first_c;
        out->a -= a->range.begin;
        out->b -= b->range.begin;
        out->count = stop - *at;
        *at = stop;
        return true;
    }
    return false;
}

static int64_t xdi_move_count(const xd_tensor_part *a, const xd_tensor_part *b, const xd_tensor_part *without,
                              xd_interval window) {
    int64_t at = window.begin, total = 0;
    xdi_common common;
    while (xdi_move_next(a, b, without, window.end, &at, &common)) total += common.count;
    return total;
}

static int64_t xdi_move_numel(const xd_tensor_part *p) {
    int64_t numel = 1;
    for (int d = 0; d < p->ndim; d++) numel *= p->shape[d];
    return numel;
}

/* Whether this rank has exactly what it wants, in the same order. */
static bool xdi_move_is_same(const xdi_move *m) {
    const xd_tensor_part *from = m->from, *to = m->to;
    if (from->range.begin != to->range.begin || from->range.end != to->range.end) return false;
    return from->region && to->region ? xdi_region_equal(from->region, to->region)
                                      : from->region == to->region;
}

static bool xdi_move_is_here(const xdi_move *m) {
    if (xdi_move_is_same(m)) return true;
    const xd_interval all = { 0, xdi_move_numel(m->to) };
    return xdi_move_count(m->from, m->to, NULL, all) == m->to->range.end - m->to->range.begin;
}

/* ---- elements ---- */

static void *xdi_move_at(void *data, xd_dtype dtype, int64_t element) {
    return (unsigned char *)data + (size_t)element * xd_dtype_size(dtype);
}

static xd_result xdi_move_copy(const xdi_mover *m, void *to, xd_dtype to_dtype, const void *from,
                               xd_dtype from_dtype, int64_t count) {
    if (to_dtype != from_dtype) return xd_cast(m->ctx, to, to_dtype, from, from_dtype, count);
    return xdi_copy_fresh(m->ctx, to, from, (size_t)count * xd_dtype_size(to_dtype));
}

/* What this rank wants and has itself. */
static xd_result xdi_move_own(const xdi_mover *m, const xdi_move *move, xd_interval window) {
    const xd_tensor_part *from = move->from, *to = move->to;
    int64_t at = window.begin;
    xdi_common c;
    while (xdi_move_next(from, to, NULL, window.end, &at, &c))
        XD_TRY(xdi_move_copy(m, xdi_move_at(to->data, to->dtype, c.b), to->dtype,
                             xdi_move_at(from->data, from->dtype, c.a), from->dtype, c.count));
    return XD_OK;
}

/* The same where nothing is exchanged, in one copy if it can be. */
static xd_result xdi_move_local(const xdi_mover *m, const xdi_move *move, xd_interval all) {
    const xd_tensor_part *from = move->from, *to = move->to;
    const int64_t count = to->range.end - to->range.begin;
    if (!xdi_move_is_same(move)) return xdi_move_own(m, move, all);
    return count ? xdi_move_copy(m, to->data, to->dtype, from->data, from->dtype, count) : XD_OK;
}

/* Appends what a rank gets from this one to what is sent. */
static xd_result xdi_move_pack(const xdi_mover *m, const xdi_move *move, const xdi_move_rank *taker,
                               xd_interval window, int64_t *filled) {
    const xd_dtype dtype = move->from->dtype;
    int64_t at = window.begin;
    xdi_common c;
    for (; xdi_move_next(move->from, &taker->wants, &taker->has, window.end, &at, &c); *filled += c.count)
        XD_TRY(xdi_move_copy(m, xdi_move_at(m->send, dtype, *filled), dtype,
                             xdi_move_at(move->from->data, dtype, c.a), dtype, c.count));
    return XD_OK;
}

static xd_result xdi_move_unpack(const xdi_mover *m, const xdi_move *move, const xdi_move_rank *giver,
                                 xd_interval window, int64_t *taken) {
    const xd_tensor_part *to = move->to;
    int64_t at = window.begin;
    xdi_common c;
    for (; xdi_move_next(&giver->has, to, move->from, window.end, &at, &c); *taken += c.count)
        XD_TRY(xdi_move_copy(m, xdi_move_at(to->data, to->dtype, c.b), to->dtype,
                             xdi_move_at(m->recv, move->from->dtype, *taken), move->from->dtype, c.count));
    return XD_OK;
}

/* ---- windows ---- */

/* Who has and wants what of a tensor. Collective. */
static xd_result xdi_move_learn(xdi_mover *m, const xdi_move *move) {
    const xd_tensor_part *from = move->from;
    const int64_t *at = m->messages;
    int64_t length = 1;
    m->sent[0] = !from->replica;
    length += xdi_part_write(from, true, m->sent + length);
    length += xdi_part_write(move->to, true, m->sent + length);
    for (int r = 0; r < m->size; r++) m->send_counts[r] = 1;
    XD_TRY(xd_all_gather(m->comm, &length, m->lengths, m->send_counts, XD_DTYPE_I64));
    XD_TRY(xd_all_gather(m->comm, m->sent, m->messages, m->lengths, XD_DTYPE_I64));
    for (int r = 0; r < m->size; at += m->lengths[r++]) {
        xdi_move_rank *rank = &m->ranks[r];
        const int64_t *next = at + 1;
        rank->speaks = at[0] != 0;
        next += xdi_part_read(from, next, &rank->region[0], &rank->has);
        (void)xdi_part_read(move->to, next, &rank->region[1], &rank->wants);
    }
    return XD_OK;
}

static xd_result xdi_move_gather_sent(xdi_mover *m, const xdi_move *move, xd_interval window) {
    int64_t filled = 0;
    for (int r = 0; r < m->size; r++) {
        const int64_t before = filled;
        if (r != m->rank && !move->from->replica)
            XD_TRY(xdi_move_pack(m, move, &m->ranks[r], window, &filled));
        m->send_counts[r] = filled - before;
    }
    for (int r = 0; r < m->size; r++) {
        const xdi_move_rank *rank = &m->ranks[r];
        const bool gives = r != m->rank && rank->speaks;
        m->recv_counts[r] = gives ? xdi_move_count(&rank->has, move->to, move->from, window) : 0;
    }
    return XD_OK;
}

static xd_result xdi_move_place_received(const xdi_mover *m, const xdi_move *move, xd_interval window) {
    int64_t taken = 0;
    for (int r = 0; r < m->size; r++)
        if (m->recv_counts[r]) XD_TRY(xdi_move_unpack(m, move, &m->ranks[r], window, &taken));
    return xdi_move_own(m, move, window);
}

/* The most elements of a window: each rank may want all of them from one, and others of it. */
static int64_t xdi_move_window(const xdi_mover *m, const xdi_move *move) {
    const int64_t room = (int64_t)(m->room / xd_dtype_size(move->from->dtype)) / (m->size + 1);
    return room > 0 ? room : 1;
}

static xd_result xdi_move_tensor(xdi_mover *m, const xdi_move *move) {
    const int64_t numel = xdi_move_numel(move->to), most = xdi_move_window(m, move);
    xd_interval window = { 0, 0 };
    XD_TRY(xdi_move_learn(m, move));
    m->recv = m->send + (size_t)(most * m->size) * xd_dtype_size(move->from->dtype);
    for (; window.begin < numel; window.begin = window.end) {
        window.end = numel - window.begin < most ? numel : window.begin + most;
        XD_TRY(xd_agree(m->comm, xdi_move_gather_sent(m, move, window)));
        XD_TRY(xd_all_to_all(m->comm, m->send, m->send_counts, m->recv, m->recv_counts, move->from->dtype));
        XD_TRY(xd_agree(m->comm, xdi_move_place_received(m, move, window)));
    }
    return XD_OK;
}

/* ---- all of it ---- */

/* Bytes of staging that are of use: those of the largest tensor that is exchanged; at least an element for each rank. */
static size_t xdi_move_room(const xdi_mover *m, size_t staging_bytes) {
    const size_t least = ((size_t)m->size + 1) * 8;
    size_t most = 0;
    for (int64_t i = 0; i < m->count; i++) {
        const xd_tensor_part *from = m->moves[i].from;
        const size_t bytes = (size_t)xdi_move_numel(from) * xd_dtype_size(from->dtype);
        if (!m->here[i] && bytes > most) most = bytes;
    }
    if (most == 0) return 0;
    if (most > staging_bytes) most = staging_bytes;
    return most > least ? most : least;
}

static xd_result xdi_move_reserve(xdi_mover *m) {
    const size_t size = (size_t)m->size, numbers = 2 * (size_t)XDI_PART_NUMBERS + 1;
    if (m->room == 0) return XD_OK;
    m->ranks = (xdi_move_rank *)xd_allocate(m->ctx, size * sizeof *m->ranks);
    m->lengths = (int64_t *)xd_allocate(m->ctx, (numbers * (size + 1) + 3 * size) * sizeof *m->lengths);
    XD_REQUIRE(m->ctx, m->ranks && m->lengths, XD_ERROR_MEMORY, "no room for the parts of %d ranks", m->size);
    m->send_counts = m->lengths + size;
    m->recv_counts = m->send_counts + size;
    m->sent = m->recv_counts + size;
    m->messages = m->sent + numbers;
    m->send = (unsigned char *)xdi_device_allocate(m->ctx, m->room);
    XD_REQUIRE(m->ctx, m->send, XD_ERROR_MEMORY, "no room for %llu bytes of staging",
               (unsigned long long)m->room);
    return XD_OK;
}

static xd_result xdi_move_run_all(xdi_mover *m, size_t staging_bytes, int64_t *local) {
    xd_result mine = XD_OK;
    m->here = (int64_t *)xd_allocate(m->ctx, (size_t)m->count * sizeof *m->here);
    if (!m->here)
        mine = XD_FAIL(m->ctx, XD_ERROR_MEMORY, "no room for %lld tensors that move", (long long)m->count);
    XD_TRY(xd_agree(m->comm, mine));
    for (int64_t i = 0; i < m->count; i++) m->here[i] = xdi_move_is_here(&m->moves[i]);
    XD_TRY(xd_all_reduce(m->comm, m->here, m->here, m->count, XD_DTYPE_I64, XD_MIN));
    m->room = xdi_move_room(m, staging_bytes);
    XD_TRY(xd_agree(m->comm, xdi_move_reserve(m)));
    for (int64_t i = 0; i < m->count; i++)
        if (!m->here[i]) XD_TRY(xdi_move_tensor(m, &m->moves[i]));
    for (int64_t i = 0; i < m->count && mine == XD_OK; i++) {
        const xd_interval all = { 0, xdi_move_numel(m->moves[i].to) };
        *local += m->here[i];
        if (m->here[i]) mine = xdi_move_local(m, &m->moves[i], all);
    }
    return xd_agree(m->comm, mine);
}

XD_PRIVATE xd_result xdi_move_parts(xd_comm *comm, const xdi_move *moves, int64_t count, size_t staging_bytes,
                                    int64_t *local) {
    xdi_mover m;
    memset(&m, 0, sizeof m);
    m.comm = comm;
    m.ctx = xd_comm_ctx(comm);
    m.rank = xd_comm_rank(comm);
    m.size = xd_comm_size(comm);
    m.moves = moves;
    m.count = count;
    *local = 0;
    const xd_result result = xdi_move_run_all(&m, staging_bytes ? staging_bytes : (size_t)XDI_STAGING, local);
    xd_ctx_kernels(m.ctx)->memory.release(m.ctx, m.send);
    xd_release(m.ctx, m.lengths);
    xd_release(m.ctx, m.ranks);
    xd_release(m.ctx, m.here);
    return result;
}
