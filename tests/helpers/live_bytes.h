/* An allocator that knows how many bytes a thread holds: count_allocate and count_release for xd_ctx_desc.allocator. A thread
 * releases what it has allocated. */
#ifndef LIVE_BYTES_H
#define LIVE_BYTES_H

#include <stdlib.h>

static __thread long long live_bytes, live_most; /* the latter: the most so far; a test sets it */

static void *count_allocate(void *user, size_t bytes) {
    size_t *block = (size_t *)malloc(bytes + 64);
    (void)user;
    if (!block) return NULL;
    *block = bytes;
    live_bytes += (long long)bytes;
    if (live_bytes > live_most) live_most = live_bytes;
    return (char *)block + 64;
}

static void count_release(void *user, void *memory) {
    size_t *block = (size_t *)(void *)((char *)memory - 64);
    (void)user;
    live_bytes -= (long long)*block;
    free(block);
}

#endif
