#ifndef XDI_BASE_MEMORY_H
#define XDI_BASE_MEMORY_H

#include "base/result.h"

/* Where memory comes from. Called from the thread that owns the context. */
typedef struct xd_allocator {
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL when there is no room */
    void (*release)(void *user, void *memory);   /* NULL memory never arrives here */
    void *user;
} xd_allocator;

/* Offset allocator over an opaque base. The bookkeeping stands outside the memory, so the base may be device memory.
 * With base NULL it is a planning run: every take succeeds and `peak` is the size to provide. Never grows. */
typedef struct xd_arena {
    unsigned char *base; /* NULL -> planning run */
    size_t capacity;     /* bytes behind base; ignored when planning */
    size_t used;         /* bytes taken, alignment included */
    size_t peak;         /* high-water mark of used, to the byte */
    bool sealed;         /* after xd_arena_seal every take fails */
} xd_arena;

#define XD_ARENA_ALIGNMENT 64 /* of every block: one cache line, enough for every vector load */

/* An arena over capacity bytes at base; base NULL starts a planning run. Local, allocates nothing. */
XD_API xd_arena xd_arena_over(void *base, size_t capacity);

/* Takes bytes aligned to XD_ARENA_ALIGNMENT relative to base. *offset may be 0 bytes long. When planning, the offset
 * is still right and there is no memory behind it. False when the arena is full, sealed, or the size overflows;
 * the arena is then unchanged. */
XD_API bool xd_arena_take(xd_arena *arena, size_t bytes, size_t *offset);

/* As xd_arena_take, but gives the address; NULL when there is no room and always NULL when planning. */
XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes);

/* xd_arena_release(a, xd_arena_mark(a)) gives back everything taken in between. The peak stays. */
XD_API size_t xd_arena_mark(const xd_arena *arena);
XD_API void xd_arena_release(xd_arena *arena, size_t mark);

/* No more takes: what is planned is all there is. */
XD_API void xd_arena_seal(xd_arena *arena);

#endif
