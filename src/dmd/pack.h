#ifndef XDI_DMD_PACK_H
#define XDI_DMD_PACK_H

#include "base/context.h"
#include "kernel/types.h"

/* Latent images as rows of tokens, as in the Qwen-Image pipelines: a token is a 2 x 2 patch of all channels.
 *
 *     packed[b (H/2) (W/2) + i (W/2) + j, 4 c + 2 p + q] = x[b, c, 2 i + p, 2 j + q] */
typedef struct xd_latents {
    int64_t samples;                 /* all sizes may be 0 */
    int64_t channels, height, width; /* height and width even */
    xd_dtype dtype;                  /* F32, BF16, F16 */
} xd_latents;

/* Copy dense latents [samples, channels, height, width] to rows [samples * height / 2 * width / 2, 4 * channels] and back, with
 * all bits. Rows may have a stride; gaps stay untouched. Device memory, without overlap.
 *
 * Local; do not wait for a GPU, allocate nothing. Errors, nothing written: SHAPE (odd, negative or too large sizes, other
 * rows), DTYPE, ARGUMENT (no data, one address). */
XD_API xd_result xd_latent_pack(xd_ctx *ctx, const xd_latents *shape, const void *latents, xd_rows packed);
XD_API xd_result xd_latent_unpack(xd_ctx *ctx, const xd_latents *shape, xd_rows packed, void *latents);

#endif
