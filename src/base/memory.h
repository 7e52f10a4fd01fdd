#ifndef XDI_BASE_MEMORY_H
#define XDI_BASE_MEMORY_H

#include "base/result.h"

/* Called on the context's thread. */
typedef struct xd_allocator {
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL if full */
    void (*release)(void *user, void *memory);   /* never NULL */
    void *user;
} xd_allocator;

/* Bytes that creation takes from the context's and the device's allocators. On a CPU all are host bytes. */
typedef struct xd_memory_bytes {
    size_t host, device;
} xd_memory_bytes;

/* Allocates from a fixed base, which may be device memory. Base NULL plans: every allocation succeeds, and `peak` is the
 * size to provide. */
typedef struct xd_arena {
    unsigned char *base; /* NULL -> planning */
    size_t capacity;     /* bytes; ignored when planning */
    size_t used;         /* with alignment */
    size_t peak;         /* maximum */
} xd_arena;

#define XD_ARENA_ALIGNMENT 64 /* a cache line */

/* Returns an arena; base NULL plans. Local, allocates nothing. */
XD_API xd_arena xd_arena_over(void *base, size_t capacity);

/* Allocates bytes (0 is legal) at a multiple of XD_ARENA_ALIGNMENT from base. Returns NULL, arena unchanged, if it is full
 * or the size overflows; also when planning, which counts. */
XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes);

#endif
