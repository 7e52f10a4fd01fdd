#ifndef XDI_BASE_MEMORY_H
#define XDI_BASE_MEMORY_H

#include "base/result.h"

/* Where memory comes from. Called from the thread that owns the context. */
typedef struct xd_allocator {
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL when there is no room */
    void (*release)(void *user, void *memory);   /* NULL memory never arrives here */
    void *user;
} xd_allocator;

/* What an object takes: bytes that the context's allocator and that of its device hand out while the object is created. On a
 * CPU all of it is of the host. */
typedef struct xd_memory_bytes {
    size_t host, device;
} xd_memory_bytes;

/* Offset allocator over an opaque base. The bookkeeping is outside the memory, so the base may be device memory.
 * With base NULL it is a planning run: every allocation succeeds and `peak` is the size to provide. Never grows. */
typedef struct xd_arena {
    unsigned char *base; /* NULL -> planning run */
    size_t capacity;     /* bytes behind base; ignored when planning */
    size_t used;         /* bytes allocated, alignment included */
    size_t peak;         /* high-water mark of used, to the byte */
    bool sealed;         /* after xd_arena_seal every allocation fails */
} xd_arena;

#define XD_ARENA_ALIGNMENT 64 /* of every block: one cache line, enough for every vector load */

/* An arena over capacity bytes at base; base NULL starts a planning run. Local, allocates nothing. */
XD_API xd_arena xd_arena_over(void *base, size_t capacity);

/* Allocates `bytes` bytes, which may be 0, at an offset from base that is a multiple of XD_ARENA_ALIGNMENT. When planning,
 * the offset is right too, but there is no memory behind it. False when the arena is full or sealed, or the size
 * overflows; the arena is then unchanged. */
XD_API bool xd_arena_take(xd_arena *arena, size_t bytes, size_t *offset);

/* As xd_arena_take, but gives the address; NULL when there is no room and always NULL when planning. */
XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes);

/* xd_arena_release(arena, mark) frees everything allocated since mark = xd_arena_mark(arena). The peak stays. */
XD_API size_t xd_arena_mark(const xd_arena *arena);
XD_API void xd_arena_release(xd_arena *arena, size_t mark);

/* No more allocations: every later one fails. */
XD_API void xd_arena_seal(xd_arena *arena);

#endif
