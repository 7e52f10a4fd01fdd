#ifndef XDI_IO_INTERNAL_H
#define XDI_IO_INTERNAL_H

#include "base/internal.h"
#include "io/safetensors.h"

/* safetensors.c: what a writer checks about one tensor; *bytes is its size. */
XD_PRIVATE xd_result xdi_safetensors_check_entry(xd_ctx *ctx, const xd_safetensors_entry *e, uint64_t *bytes);

/* safetensors.c: parses a text of the JSON writer again, which finds repeated names and keys in O(n log n). */
XD_PRIVATE xd_result xdi_safetensors_check_header(xd_ctx *ctx, const char *text, size_t bytes);

#endif
