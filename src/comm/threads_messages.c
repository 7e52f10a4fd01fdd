/* Messages between two ranks that are threads: the sender posts where its data is, the receiver copies it. */

#include "comm/threads_internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

static xdi_threads_mail *xdi_threads_mail_of(const xdi_threads *t, const xd_collective *c) {
    const int me = t->base.rank, n = t->base.size;
    return &t->group->mail[c->kind == XD_COLLECTIVE_SEND ? me * n + c->root : c->root * n + me];
}

/* Both sides see the same four values. */
static bool xdi_threads_fits(const xdi_threads_mail *mail) {
    return mail->dtype != XD_DTYPE_NONE && mail->dtype == mail->wanted_dtype && mail->count == mail->wanted;
}

static xd_result xdi_threads_post(xdi_threads *t, xdi_threads_mail *mail, const xd_collective *c) {
    mail->data = c->send;
    mail->count = c->count;
    mail->dtype = c->dtype;
    mail->on_device = xdi_threads_sees_device(t, c);
    if (mail->on_device) XD_TRY(xdi_threads_lost(t, xdi_threads_ready(t, c)));
    __atomic_store_n(&mail->posted, mail->posted + 1, __ATOMIC_RELEASE); /* only this thread writes it */
    return XD_OK;
}

/* The receiver is done with what was posted. */
static xd_result xdi_threads_sent(xdi_threads *t, const xdi_threads_mail *mail, xd_message *m) {
    m->their_count = mail->wanted;
    m->their_dtype = mail->wanted_dtype;
    if (!mail->on_device || m->record.count == 0 || !xdi_threads_fits(mail)) return XD_OK;
    const xd_launch launch = xdi_threads_launch(t, &m->record);
    return xd_ctx_kernels(t->base.ctx)->memory.event_wait(&launch, t->group->slots[m->record.root].done);
}

/* The receiver's copy. */
static xd_result xdi_threads_take(xdi_threads *t, const xdi_threads_mail *mail, const xd_collective *c) {
    const size_t bytes = (size_t)c->count * xd_dtype_size(c->dtype);
    t->on_device = mail->on_device;
    if (!t->on_device) return xdi_threads_bytes(t, c, c->recv, mail->data, bytes);
    const xd_device_ops *memory = &xd_ctx_kernels(t->base.ctx)->memory;
    const xd_launch launch = xdi_threads_launch(t, c);
    XD_TRY(xdi_threads_ready(t, c));
    XD_TRY(memory->event_wait(&launch, t->group->slots[c->root].ready));
    XD_TRY(xdi_threads_bytes(t, c, c->recv, mail->data, bytes));
    return memory->event_record(&launch, t->slot->done);
}

static xd_result xdi_threads_receive(xdi_threads *t, xdi_threads_mail *mail, xd_message *m) {
    if (!xdi_threads_enter(t)) return xdi_threads_report(t, true);
    m->their_count = mail->count;
    m->their_dtype = mail->dtype;
    mail->wanted = m->record.count;
    mail->wanted_dtype = m->record.dtype;
    xd_result result = XD_OK;
    if (m->record.count > 0 && xdi_threads_fits(mail))
        result = xdi_threads_lost(t, xdi_threads_take(t, mail, &m->record));
    __atomic_store_n(&mail->done, mail->done + 1, __ATOMIC_RELEASE);
    xdi_threads_exit(t);
    return result;
}

/* Stages of a message. A sender posts it, a receiver takes what is posted. */
enum { XDI_THREADS_NEW = 0, XDI_THREADS_POSTED, XDI_THREADS_MET };

/* Whether there is something to do for a message that has not met. */
static bool xdi_threads_can(const xdi_threads *t, const xd_message *m) {
    const xdi_threads_mail *mail = xdi_threads_mail_of(t, &m->record);
    if (m->record.kind == XD_COLLECTIVE_RECV)
        return __atomic_load_n(&mail->posted, __ATOMIC_ACQUIRE) > mail->done;
    return m->stage == XDI_THREADS_NEW || __atomic_load_n(&mail->done, __ATOMIC_ACQUIRE) == mail->posted;
}

static xd_result xdi_threads_advance(xdi_threads *t, xd_message *m) {
    xdi_threads_mail *mail = xdi_threads_mail_of(t, &m->record);
    const bool sends = m->record.kind == XD_COLLECTIVE_SEND, posts = sends && m->stage == XDI_THREADS_NEW;
    m->stage = posts ? XDI_THREADS_POSTED : XDI_THREADS_MET;
    if (posts) return xdi_threads_post(t, mail, &m->record);
    return sends ? xdi_threads_sent(t, mail, m) : xdi_threads_receive(t, mail, m);
}

/* The first message from `at` on that has not met and is not behind another between the same ranks; count without one. */
static int xdi_threads_next(const xd_message *messages, int count, int at) {
    for (; at < count; at++) {
        const xd_collective *c = &messages[at].record;
        bool free = messages[at].stage != XDI_THREADS_MET;
        for (int i = 0; free && i < at; i++)
            free = messages[i].stage == XDI_THREADS_MET || messages[i].record.kind != c->kind ||
                   messages[i].record.root != c->root;
        if (free) break;
    }
    return at;
}

/* A turn of waiting for the messages that have not met; as xdi_threads_wait. */
static xd_result xdi_threads_linger(xdi_threads *t, const xd_message *messages, int count, int turn,
                                    double deadline) {
    xdi_threads_group *group = t->group;
    const int first = xdi_threads_next(messages, count, 0);
    if (xdi_threads_failure(group->world)) return xdi_threads_report(t, true);
    for (int i = first; i < count; i = xdi_threads_next(messages, count, i + 1)) {
        const int peer = messages[i].record.root;
        if (!xdi_threads_has_left(group, peer) || xdi_threads_can(t, &messages[i])) continue;
        xdi_threads_break(group->world, XD_ERROR_PEER, group->world_ranks[peer]);
        return xdi_threads_report(t, true);
    }
    if (!xdi_threads_pause(t, turn) || xd_now(t->base.ctx) < deadline) return XD_OK;
    for (int i = first; i < count; i = xdi_threads_next(messages, count, i + 1))
        if (xdi_threads_can(t, &messages[i])) return XD_OK;
    xdi_threads_break(group->world, XD_ERROR_TIMEOUT, group->world_ranks[messages[first].record.root]);
    return xdi_threads_report(t, true);
}

XD_PRIVATE xd_result xdi_threads_exchange(xd_transport *transport, xd_message *messages, int count,
                                          double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    if (xdi_threads_failure(t->group->world)) return xdi_threads_report(t, false);
    int turn = xdi_threads_patience(t);
    while (xdi_threads_next(messages, count, 0) < count) {
        bool moved = false;
        for (int i = 0; (i = xdi_threads_next(messages, count, i)) < count; i++) {
            if (!xdi_threads_can(t, &messages[i])) continue;
            XD_TRY(xdi_threads_advance(t, &messages[i]));
            moved = true;
        }
        if (moved) continue;
        XD_TRY(xdi_threads_linger(t, messages, count, turn, deadline));
        turn += turn < XDI_THREADS_YIELD;
    }
    return XD_OK;
}
