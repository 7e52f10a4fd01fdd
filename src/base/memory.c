/* The arena: offsets into memory that it does not own. */

#include "base/internal.h"

XD_API xd_arena xd_arena_over(void *base, size_t capacity) {
    xd_arena arena;
    arena.base = (unsigned char *)base;
    arena.capacity = capacity;
    arena.used = 0;
    arena.peak = 0;
    return arena;
}

XD_PRIVATE bool xdi_arena_take(xd_arena *arena, size_t bytes, size_t *offset) {
    const size_t mask = (size_t)XD_ARENA_ALIGNMENT - 1;
    if (arena->used > SIZE_MAX - mask) return false;
    const size_t begin = (arena->used + mask) & ~mask;
    if (bytes > SIZE_MAX - begin) return false;
    if (arena->base && begin + bytes > arena->capacity) return false;
    arena->used = begin + bytes;
    if (arena->used > arena->peak) arena->peak = arena->used;
    *offset = begin;
    return true;
}

XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes) {
    size_t offset;
    if (!xdi_arena_take(arena, bytes, &offset) || !arena->base) return NULL;
    return arena->base + offset;
}

XD_PRIVATE void *xdi_arena_array(xd_arena *arena, int64_t count, size_t size, bool *fits) {
    size_t offset = 0, bytes = 0;
    *fits = *fits && xdi_size_multiply((size_t)count, size, &bytes) && xdi_arena_take(arena, bytes, &offset);
    return *fits && arena->base ? arena->base + offset : NULL;
}
