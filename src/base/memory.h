#ifndef XDI_BASE_MEMORY_H
#define XDI_BASE_MEMORY_H

#include "base/result.h"

/* A memory allocator, called on the context's thread. */
typedef struct xd_allocator {
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL if full */
    void (*release)(void *user, void *memory);   /* never gets NULL */
    void *user;
} xd_allocator;

/* Bytes that an object takes from the context's and the device's allocators at creation. On a CPU all are host bytes. */
typedef struct xd_memory_bytes {
    size_t host, device;
} xd_memory_bytes;

/* Allocates offsets over a fixed base, which may be device memory: bookkeeping is outside. Base NULL is a planning run: every
 * allocation succeeds, and `peak` is the size to provide. */
typedef struct xd_arena {
    unsigned char *base; /* NULL -> planning run */
    size_t capacity;     /* bytes at base; ignored when planning */
    size_t used;         /* bytes, with alignment */
    size_t peak;         /* maximum of used */
} xd_arena;

#define XD_ARENA_ALIGNMENT 64 /* of every block: a cache line, enough for vector loads */

/* Returns an arena over capacity bytes at base; base NULL starts a planning run. Local, allocates nothing. */
XD_API xd_arena xd_arena_over(void *base, size_t capacity);

/* Allocates `bytes` bytes (0 is legal) at a multiple of XD_ARENA_ALIGNMENT from base. Returns NULL, arena unchanged, if it is
 * full or the size overflows; also in a planning run, which only counts. */
XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes);

#endif
