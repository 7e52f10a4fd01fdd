/* The arena: offsets into memory that it does not own. */

#include "base/internal.h"

XD_API xd_arena xd_arena_over(void *base, size_t capacity) {
    xd_arena arena;
    arena.base = (unsigned char *)base;
    arena.capacity = capacity;
    arena.used = 0;
    arena.peak = 0;
    arena.sealed = false;
    return arena;
}

XD_API bool xd_arena_take(xd_arena *arena, size_t bytes, size_t *offset) {
    const size_t mask = (size_t)XD_ARENA_ALIGNMENT - 1;
    if (arena->sealed || arena->used > SIZE_MAX - mask) return false;
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
    if (!xd_arena_take(arena, bytes, &offset) || !arena->base) return NULL;
    return arena->base + offset;
}

XD_PRIVATE void *xdi_arena_array(xd_arena *arena, int64_t count, size_t size, bool *fits) {
    size_t offset = 0, bytes = 0;
    *fits = *fits && xdi_size_multiply((size_t)count, size, &bytes) && xd_arena_take(arena, bytes, &offset);
    return *fits && arena->base ? arena->base + offset : NULL;
}

XD_API size_t xd_arena_mark(const xd_arena *arena) {
    return arena->used;
}

XD_API void xd_arena_release(xd_arena *arena, size_t mark) {
    if (mark < arena->used) arena->used = mark;
}

XD_API void xd_arena_seal(xd_arena *arena) {
    arena->sealed = true;
}
