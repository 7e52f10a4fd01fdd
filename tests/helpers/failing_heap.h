/* failing_heap.h - memory of which one request of one rank gets nothing: for contexts whose ranks are threads. */
#ifndef FAILING_HEAP_H
#define FAILING_HEAP_H

#include "xdistill.h"

#include <stdlib.h>

static __thread int64_t
    heap_fails_in;                  /* requests of this thread until one gets nothing; 0 -> all get theirs */
static __thread int64_t heap_asked; /* requests of this thread */
static int64_t heap_live;           /* atomic: handed out and not returned, by all threads */

static void *heap_allocate(void *user, size_t bytes) {
    (void)user;
    heap_asked++;
    if (heap_fails_in > 0 && --heap_fails_in == 0) return NULL;
    __atomic_add_fetch(&heap_live, 1, __ATOMIC_RELAXED);
    return malloc(bytes ? bytes : 1);
}

static void heap_release(void *user, void *memory) {
    (void)user;
    __atomic_sub_fetch(&heap_live, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* Settings of contexts that have theirs from here; errors are expected and not printed. */
static inline xd_ctx_desc heap_desc(xd_reduction reduction) {
    const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, NULL },
                               .reduction = reduction,
                               .log_level = XD_LOG_NONE,
                               .timeout_seconds = 60 };
    return desc;
}

#endif
