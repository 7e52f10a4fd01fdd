#ifndef XDI_ALIGN_PROJECT_H
#define XDI_ALIGN_PROJECT_H

#include "align/projection.h"

/* Copies a projection to the context's device, so that losses need not copy it in each call. Local.
 *
 *   projection  in host memory
 *   out         for this context, not for the host; free with xd_projection_unload before the device leaves the context
 *
 * Takes 16 bytes of device memory per entry and 8 per row and column, and waits for the device. Errors, *out untouched:
 * ARGUMENT (already on the device), MEMORY, DEVICE. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out);

/* Frees such a copy; may be empty. */
XD_API void xd_projection_unload(xd_ctx *ctx, xd_projection *projection);

#endif
