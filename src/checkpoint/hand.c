/* A second thread, for one piece of work at a time. The work calls nothing of a context: what a caller may have put into one
 * sees one thread. */

#include "checkpoint/internal.h"

static void *xdi_hand_work(void *argument) {
    xdi_hand *h = (xdi_hand *)argument;
    pthread_mutex_lock(&h->lock);
    for (;;) {
        while (!h->busy && !h->leaving) pthread_cond_wait(&h->change, &h->lock);
        if (!h->busy) break;
        pthread_mutex_unlock(&h->lock);
        h->work(h->argument);
        pthread_mutex_lock(&h->lock);
        h->busy = false;
        pthread_cond_signal(&h->change);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

/* Once: a system that has no thread now is not asked again. */
static void xdi_hand_hire(xdi_hand *h) {
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->change, NULL);
    h->tried = true;
    h->process = xdi_process();
    h->has_thread = xdi_thread_create(&h->thread, xdi_hand_work, h);
}

XD_PRIVATE bool xdi_hand_start(xdi_hand *h, void (*work)(void *argument), void *argument) {
    if (!h->tried) xdi_hand_hire(h);
    if (!h->has_thread || xdi_is_forked(h->process)) return false;
    pthread_mutex_lock(&h->lock);
    h->work = work;
    h->argument = argument;
    h->busy = true;
    pthread_cond_signal(&h->change);
    pthread_mutex_unlock(&h->lock);
    return true;
}

XD_PRIVATE void xdi_hand_wait(xdi_hand *h) {
    pthread_mutex_lock(&h->lock);
    while (h->busy) pthread_cond_wait(&h->change, &h->lock);
    pthread_mutex_unlock(&h->lock);
}

XD_PRIVATE void xdi_hand_end(xdi_hand *h) {
    const bool here = h->tried && !xdi_is_forked(h->process);
    h->tried = false;
    if (!here) return;
    pthread_mutex_lock(&h->lock);
    h->leaving = true;
    pthread_cond_signal(&h->change);
    pthread_mutex_unlock(&h->lock);
    if (h->has_thread) pthread_join(h->thread, NULL);
    pthread_cond_destroy(&h->change);
    pthread_mutex_destroy(&h->lock);
    h->has_thread = false;
}
