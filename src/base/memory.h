#ifndef XDI_BASE_MEMORY_H
#define XDI_BASE_MEMORY_H

#include "base/result.h"

/* A context calls it on its own thread. */
typedef struct xd_allocator {
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL if full */
    void (*release)(void *user, void *memory);   /* never NULL */
    void *user;
} xd_allocator;

/* Bytes that creation takes from the context's and the device's allocators. On a CPU all are host bytes. */
typedef struct xd_memory_bytes {
    size_t host, device;
} xd_memory_bytes;

/* Allocates from a fixed base, which may be device memory. With base NULL it plans: it only counts, and `peak` is the
 * size to provide. */
typedef struct xd_arena {
    unsigned char *base; /* NULL -> planning */
    size_t capacity;     /* bytes; ignored when planning */
    size_t used;         /* bytes, with alignment */
    size_t peak;         /* maximum of `used` */
} xd_arena;

#define XD_ARENA_ALIGNMENT 64 /* a cache line */

/* Returns an arena; base NULL plans. Local, allocates nothing. */
XD_API xd_arena xd_arena_over(void *base, size_t capacity);

/* Allocates bytes (0 is legal) at a multiple of XD_ARENA_ALIGNMENT from base. Returns NULL, arena unchanged, if it is
 * full or the size overflows. A planning arena counts the bytes and returns NULL too. */
XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes);

#endif
