/* Messages between two ranks that are processes. Each goes through a part of the sender's slot, a ring of bytes: both ranks copy
 * at the same time, a portion at a time. */

#include "comm/processes_internal.h"

#include <string.h>

enum {
    XDI_PROCESSES_PORTION = 32 << 10 /* bytes of a message that are copied at a time */
};

/* Stages of a message: a sender posts it with its first bytes, and sends the rest when it has been accepted. */
enum { XDI_PROCESSES_NEW = 0, XDI_PROCESSES_OPEN, XDI_PROCESSES_MET };

static xdi_processes_mail *xdi_processes_mail_of(const xdi_processes *t, const xd_collective *c) {
    const int me = t->base.rank, n = t->base.size;
    return &t->mail[c->kind == XD_COLLECTIVE_SEND ? me * n + c->root : c->root * n + me];
}

static xdi_processes_lane *xdi_processes_lane_of(const xdi_processes *t, const xd_collective *c) {
    return &t->lanes[2 * c->root + (c->kind == XD_COLLECTIVE_RECV ? 1 : 0)];
}

/* Bytes of the part of the sender's slot that a message goes through. */
static size_t xdi_processes_ring(const xdi_processes *t) {
    return t->slots->slot_bytes / (size_t)t->slots->size;
}

/* Bytes that are moved at a time, so that both ranks copy at the same time. */
static size_t xdi_processes_portion(const xdi_processes *t, size_t there) {
    const size_t half = (xdi_processes_ring(t) + 1) / 2, portion = (size_t)XDI_PROCESSES_PORTION;
    const size_t most = half < portion ? half : portion;
    return there < most ? there : most;
}

/* Those that come with the offer of a message. */
static size_t xdi_processes_first_bytes(const xdi_processes *t, int64_t count, int32_t dtype) {
    const bool some = dtype != (int32_t)XD_DTYPE_NONE;
    return some ? xdi_processes_portion(t, (size_t)count * xd_dtype_size((xd_dtype)dtype)) : 0;
}

/* Both sides see the same four values. */
static bool xdi_processes_agrees(const xdi_processes_mail *mail) {
    return mail->dtype != (int32_t)XD_DTYPE_NONE && mail->dtype == mail->wanted_dtype &&
           mail->count == mail->wanted;
}

/* Copies between the lane and this rank's memory as many bytes as there are, or as there is room for, from position `at`. */
static size_t xdi_processes_move(const xdi_processes *t, const xd_collective *c, uint64_t at, size_t most) {
    xdi_processes_lane *lane = xdi_processes_lane_of(t, c);
    const size_t ring = xdi_processes_ring(t);
    const bool sends = c->kind == XD_COLLECTIVE_SEND;
    const int from = t->places[sends ? t->base.rank : c->root],
              to = t->places[sends ? c->root : t->base.rank];
    char *memory = t->slots->first + (size_t)from * t->slots->slot_bytes + (size_t)to * ring;
    size_t moved = 0;
    while (moved < most && lane->left > 0) {
        const size_t place = (size_t)((at + moved) % ring);
        size_t bytes = most - moved < ring - place ? most - moved : ring - place;
        if (bytes > lane->left) bytes = lane->left;
        memcpy(sends ? memory + place : lane->data, sends ? lane->data : memory + place, bytes);
        lane->data += bytes;
        lane->left -= bytes;
        moved += bytes;
    }
    return moved;
}

/* Whether there is something to do for a message that has not met. */
static bool xdi_processes_can(const xdi_processes *t, const xd_message *m) {
    const xdi_processes_mail *mail = xdi_processes_mail_of(t, &m->record);
    const size_t left = xdi_processes_lane_of(t, &m->record)->left;
    if (m->record.kind == XD_COLLECTIVE_RECV) {
        if (m->stage == XDI_PROCESSES_NEW)
            return __atomic_load_n(&mail->posted, __ATOMIC_SEQ_CST) > mail->done;
        return __atomic_load_n(&mail->written, __ATOMIC_SEQ_CST) > mail->read;
    }
    if (m->stage == XDI_PROCESSES_NEW) return true;
    if (__atomic_load_n(&mail->done, __ATOMIC_SEQ_CST) == mail->posted) return true;
    return left > 0 && __atomic_load_n(&mail->met, __ATOMIC_SEQ_CST) == mail->posted &&
           xdi_processes_agrees(mail) &&
           mail->written - __atomic_load_n(&mail->read, __ATOMIC_SEQ_CST) < xdi_processes_ring(t);
}

/* Sends as much as there is room for. */
static void xdi_processes_push(const xdi_processes *t, xdi_processes_mail *mail, const xd_collective *c) {
    const size_t used = (size_t)(mail->written - __atomic_load_n(&mail->read, __ATOMIC_ACQUIRE));
    const size_t room = xdi_processes_ring(t) - used;
    const size_t moved = xdi_processes_move(t, c, mail->written, xdi_processes_portion(t, room));
    __atomic_store_n(&mail->written, mail->written + moved, __ATOMIC_SEQ_CST);
}

static void xdi_processes_pull(const xdi_processes *t, xdi_processes_mail *mail, const xd_collective *c) {
    const size_t there = (size_t)(__atomic_load_n(&mail->written, __ATOMIC_ACQUIRE) - mail->read);
    const size_t moved = xdi_processes_move(t, c, mail->read, xdi_processes_portion(t, there));
    __atomic_store_n(&mail->read, mail->read + moved, __ATOMIC_SEQ_CST);
}

static void xdi_processes_advance_send(const xdi_processes *t, xd_message *m) {
    xdi_processes_mail *mail = xdi_processes_mail_of(t, &m->record);
    xdi_processes_lane *lane = xdi_processes_lane_of(t, &m->record);
    if (m->stage == XDI_PROCESSES_NEW) {
        mail->count = m->record.count;
        mail->dtype = (int32_t)m->record.dtype;
        lane->data = (char *)(uintptr_t)m->record.send; /* read only */
        lane->left = (size_t)m->record.count * xd_dtype_size(m->record.dtype);
        const size_t first = xdi_processes_first_bytes(t, mail->count, mail->dtype);
        const size_t moved = xdi_processes_move(t, &m->record, mail->written, first);
        __atomic_store_n(&mail->written, mail->written + moved, __ATOMIC_SEQ_CST);
        __atomic_store_n(&mail->posted, mail->posted + 1, __ATOMIC_SEQ_CST);
        m->stage = XDI_PROCESSES_OPEN;
    } else if (__atomic_load_n(&mail->done, __ATOMIC_ACQUIRE) == mail->posted) {
        m->their_count = mail->wanted;
        m->their_dtype = (xd_dtype)mail->wanted_dtype;
        m->stage = XDI_PROCESSES_MET;
    } else {
        xdi_processes_push(t, mail, &m->record);
    }
}

static void xdi_processes_advance_receive(const xdi_processes *t, xd_message *m) {
    xdi_processes_mail *mail = xdi_processes_mail_of(t, &m->record);
    xdi_processes_lane *lane = xdi_processes_lane_of(t, &m->record);
    if (m->stage == XDI_PROCESSES_NEW) {
        m->their_count = mail->count;
        m->their_dtype = (xd_dtype)mail->dtype;
        mail->wanted = m->record.count;
        mail->wanted_dtype = (int32_t)m->record.dtype;
        lane->data = (char *)m->record.recv;
        lane->left = 0;
        if (xdi_processes_agrees(mail))
            lane->left = (size_t)m->record.count * xd_dtype_size(m->record.dtype);
        else
            mail->read += xdi_processes_first_bytes(t, mail->count, mail->dtype);
        m->stage = XDI_PROCESSES_OPEN;
        __atomic_store_n(&mail->met, mail->met + 1, __ATOMIC_SEQ_CST);
    }
    if (lane->left > 0) xdi_processes_pull(t, mail, &m->record);
    if (lane->left > 0) return;
    m->stage = XDI_PROCESSES_MET;
    __atomic_store_n(&mail->done, mail->done + 1, __ATOMIC_SEQ_CST);
}

/* Does what can be done for a message, and wakes the other rank. */
static void xdi_processes_advance(const xdi_processes *t, xd_message *m) {
    if (m->record.kind == XD_COLLECTIVE_SEND)
        xdi_processes_advance_send(t, m);
    else
        xdi_processes_advance_receive(t, m);
    xdi_job_ring(&t->seats[m->record.root].bell);
}

/* The first message from `at` on that has not met and is not behind another between the same ranks; count without one. */
static int xdi_processes_next(const xd_message *messages, int count, int at) {
    for (; at < count; at++) {
        const xd_collective *c = &messages[at].record;
        bool free = messages[at].stage != XDI_PROCESSES_MET;
        for (int i = 0; free && i < at; i++)
            free = messages[i].stage == XDI_PROCESSES_MET || messages[i].record.kind != c->kind ||
                   messages[i].record.root != c->root;
        if (free) break;
    }
    return at;
}

/* Whom to wait for: a rank that has left or died, if a message waits for one, else that of the first message. */
static int xdi_processes_awaited(const xdi_processes *t, const xd_message *messages, int count, bool sleeps,
                                 bool *gone) {
    const int first = xdi_processes_next(messages, count, 0);
    *gone = false;
    for (int i = first; i < count; i = xdi_processes_next(messages, count, i + 1)) {
        const int peer = messages[i].record.root;
        *gone = xdi_processes_has_left(t, peer) || xdi_job_has_left(t->job, t->world_ranks[peer]) ||
                (sleeps && xdi_job_has_died(t->job, t->world_ranks[peer]));
        if (*gone) return peer;
    }
    return messages[first].record.root;
}

XD_PRIVATE xd_result xdi_processes_exchange(xd_transport *transport, xd_message *messages, int count,
                                            double deadline) {
    xdi_processes *t = (xdi_processes *)transport;
    xdi_job_bell *bell = &t->seats[t->base.rank].bell;
    bool whole = true;
    if (xdi_job_failure(t->job)) return xdi_processes_report(t, false);
    xdi_job_wait wait = xdi_job_wait_begin(t->job, bell, deadline);
    while (whole && xdi_processes_next(messages, count, 0) < count) {
        bool moved = false, gone = false;
        for (int i = 0; (i = xdi_processes_next(messages, count, i)) < count; i++) {
            if (!xdi_processes_can(t, &messages[i])) continue;
            xdi_processes_advance(t, &messages[i]);
            moved = true;
        }
        if (moved) {
            xdi_job_wait_end(t->job, &wait);
            wait = xdi_job_wait_begin(t->job, bell, deadline);
            continue;
        }
        const int peer = xdi_processes_awaited(t, messages, count, wait.armed, &gone);
        whole = xdi_job_turn(t->base.ctx, t->job, &wait, t->world_ranks[peer], gone);
    }
    xdi_job_wait_end(t->job, &wait);
    return whole ? XD_OK : xdi_processes_report(t, true);
}
