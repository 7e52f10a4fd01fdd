#ifndef XDI_BASE_INTERNAL_H
#define XDI_BASE_INTERNAL_H

#include "base/extend.h"

/* Functions that several parts use. Unused ones are no warning: a user may need half of the library. */
#if !defined(XD_PRIVATE)
#    if defined(__GNUC__)
#        define XD_PRIVATE static __attribute__((unused))
#    else
#        define XD_PRIVATE static
#    endif
#endif

/* file.c: the POSIX entries where the caller gave none. */
XD_PRIVATE void xdi_files_defaults(xd_files *files);

/* context.c: a * b, false when it overflows. */
XD_PRIVATE bool xdi_size_multiply(size_t a, size_t b, size_t *product);

/* memory.c: a block of count elements; NULL in a planning run. *fits becomes false when there is no room. */
XD_PRIVATE void *xdi_arena_array(xd_arena *arena, int64_t count, size_t size, bool *fits);

/* context.c: memory for the length of a call, aligned for any type, not zero; NULL when there is no room. The
 * context keeps what is given back for the calls to come, so that the same calls again allocate nothing. */
XD_PRIVATE void *xdi_scratch_take(xd_ctx *ctx, size_t bytes);
XD_PRIVATE void xdi_scratch_give(xd_ctx *ctx, void *memory); /* NULL is fine */

/* sort.c: sorts pointers in O(n log n) for every input; not stable. `order` is as for qsort, on the pointers. */
typedef int (*xdi_sort_order)(const void *a, const void *b);
XD_PRIVATE void xdi_sort(const void **items, size_t count, xdi_sort_order order);

#endif
