#ifndef XDI_DMD_PACK_H
#define XDI_DMD_PACK_H

#include "base/context.h"
#include "kernel/types.h"

/* Latent images, for rows of tokens (2 x 2 patches of all channels): docs/diffusion.md. Sizes may be 0. */
typedef struct xd_latents {
    int64_t samples;
    int64_t channels, height, width; /* height and width even */
    xd_dtype dtype;                  /* F32, BF16, F16 */
} xd_latents;

/* Copy dense latents [samples, channels, height, width] to rows [samples*height*width/4, 4*channels] and back, bit by bit.
 * Rows may have a stride; gaps stay. Device memory, no overlap. Local; do not wait for a GPU, allocate nothing. Errors:
 * SHAPE (odd, negative or too large sizes, other rows), DTYPE, ARGUMENT (no data, one address). */
XD_API xd_result xd_latent_pack(xd_ctx *ctx, const xd_latents *shape, const void *latents, xd_rows packed);
XD_API xd_result xd_latent_unpack(xd_ctx *ctx, const xd_latents *shape, xd_rows packed, void *latents);

#endif
