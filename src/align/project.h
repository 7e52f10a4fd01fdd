#ifndef XDI_ALIGN_PROJECT_H
#define XDI_ALIGN_PROJECT_H

#include "align/projection.h"

/* Copies a host projection to the context's device, for losses of this context. Free with xd_projection_unload before
 * the device leaves the context. Local. Takes 16 bytes of device memory per entry and 8 per row and column. Waits for
 * the device. Errors: ARGUMENT (already on the device), MEMORY, DEVICE. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out);

/* Frees such a copy; may be empty. */
XD_API void xd_projection_unload(xd_ctx *ctx, xd_projection *projection);

#endif
