#ifndef XDI_KERNEL_COPY_H
#define XDI_KERNEL_COPY_H

#include "kernel/types.h"

/* Performs one copy between two arrays of elements of `size` bytes. */
XD_API void xd_copy_run(const xd_copy *copy, const void *src, void *dst, size_t size);

#endif
