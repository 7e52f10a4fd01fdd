/* The objects that are alive, of all contexts: the debug form. */

#include "base/live.h"

#if defined(XDISTILL_DEBUG)

#    include <pthread.h>
#    include <stdlib.h>
#    include <string.h>

typedef enum xdi_live_state { XDI_LIVE_FREE = 0, XDI_LIVE_ALIVE, XDI_LIVE_DESTROYED } xdi_live_state;

typedef struct xdi_live_entry {
    const void *object;
    const char *type;
    xd_ctx *ctx; /* that made it; itself of a context */
    xdi_live_state state;
    pthread_t user; /* of a context: the thread that has used it last, and when */
    uint64_t used;
} xdi_live_entry;

/* Open addressing by the address. An entry stays when its object is destroyed, until the address is that of another. */
static struct {
    pthread_mutex_t lock;
    xdi_live_entry *entries;
    size_t room, count; /* room is a power of two */
    uint64_t clock;
    bool is_full; /* no memory for another: from now on nothing is refused */
} xdi_live = { PTHREAD_MUTEX_INITIALIZER, NULL, 0, 0, 0, false };

static xdi_live_entry *xdi_live_slot(xdi_live_entry *entries, size_t room, const void *object) {
    size_t at = (size_t)(((uint64_t)(uintptr_t)object * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (room - 1);
    while (entries[at].state != XDI_LIVE_FREE && entries[at].object != object) at = (at + 1) & (room - 1);
    return &entries[at];
}

/* NULL: never heard of. */
static xdi_live_entry *xdi_live_find(const void *object) {
    if (xdi_live.room == 0) return NULL;
    xdi_live_entry *entry = xdi_live_slot(xdi_live.entries, xdi_live.room, object);
    return entry->state == XDI_LIVE_FREE ? NULL : entry;
}

static bool xdi_live_grow(void) {
    const size_t room = xdi_live.room ? 2 * xdi_live.room : 256;
    xdi_live_entry *larger = (xdi_live_entry *)calloc(room, sizeof *larger);
    if (!larger) return false;
    for (size_t i = 0; i < xdi_live.room; i++)
        if (xdi_live.entries[i].state != XDI_LIVE_FREE)
            *xdi_live_slot(larger, room, xdi_live.entries[i].object) = xdi_live.entries[i];
    free(xdi_live.entries);
    xdi_live.entries = larger;
    xdi_live.room = room;
    return true;
}

XD_PRIVATE void xdi_live_begin(xd_ctx *ctx, const void *object, const char *type) {
    pthread_mutex_lock(&xdi_live.lock);
    xdi_live.is_full = xdi_live.is_full || (2 * (xdi_live.count + 1) > xdi_live.room && !xdi_live_grow());
    if (!xdi_live.is_full) {
        xdi_live_entry *entry = xdi_live_slot(xdi_live.entries, xdi_live.room, object);
        xdi_live.count += entry->state == XDI_LIVE_FREE;
        memset(entry, 0, sizeof *entry);
        entry->object = object;
        entry->type = type;
        entry->ctx = ctx;
        entry->state = XDI_LIVE_ALIVE;
    }
    pthread_mutex_unlock(&xdi_live.lock);
}

XD_PRIVATE void xdi_live_end(const void *object) {
    pthread_mutex_lock(&xdi_live.lock);
    xdi_live_entry *entry = xdi_live_find(object);
    if (entry) entry->state = XDI_LIVE_DESTROYED;
    pthread_mutex_unlock(&xdi_live.lock);
}

XD_PRIVATE bool xdi_live_use(const xd_ctx *ctx) {
    pthread_mutex_lock(&xdi_live.lock);
    xdi_live_entry *entry = xdi_live_find(ctx);
    const bool known = entry && entry->state == XDI_LIVE_ALIVE && strcmp(entry->type, "xd_ctx") == 0;
    if (known) {
        entry->user = pthread_self();
        entry->used = ++xdi_live.clock;
    }
    pthread_mutex_unlock(&xdi_live.lock);
    return known || xdi_live.is_full;
}

XD_PRIVATE xd_ctx *xdi_live_current(void) {
    const xdi_live_entry *last = NULL;
    pthread_mutex_lock(&xdi_live.lock);
    for (size_t i = 0; i < xdi_live.room; i++) {
        const xdi_live_entry *e = &xdi_live.entries[i];
        if (e->state == XDI_LIVE_ALIVE && e->used > 0 && pthread_equal(e->user, pthread_self()) &&
            (!last || e->used > last->used))
            last = e;
    }
    xd_ctx *ctx = last ? last->ctx : NULL;
    pthread_mutex_unlock(&xdi_live.lock);
    return ctx;
}

XD_PRIVATE xdi_life xdi_live_ask(const void *object, const char *type, const char **other) {
    pthread_mutex_lock(&xdi_live.lock);
    const xdi_live_entry *entry = xdi_live_find(object);
    const bool is_known = entry && strcmp(entry->type, type) == 0;
    const bool is_alive = entry && entry->state == XDI_LIVE_ALIVE, is_full = xdi_live.is_full;
    *other = is_alive ? entry->type : NULL;
    pthread_mutex_unlock(&xdi_live.lock);
    if (is_full || (is_known && is_alive)) return XDI_LIFE_ALIVE;
    return is_known ? XDI_LIFE_DESTROYED : XDI_LIFE_UNKNOWN;
}

#endif
