#ifndef XDI_DMD_PACK_H
#define XDI_DMD_PACK_H

#include "base/context.h"
#include "kernel/types.h"

/* Latent pictures as rows of tokens, as transformers of Qwen-Image's kind take them: each 2 x 2 patch of all channels is a token,
 *
 *   packed[b (H/2) (W/2) + i (W/2) + j, 4 c + 2 p + q] = x[b, c, 2 i + p, 2 j + q]
 *
 * A permutation: every bit pattern goes through, NaN too. */
typedef struct xd_latents {
    int64_t samples;                 /* 0 is fine, and so is 0 of what follows */
    int64_t channels, height, width; /* height and width even */
    xd_dtype dtype;                  /* F32, BF16, F16 */
} xd_latents;

/* Latents [samples, channels, height, width] without gaps become rows [samples * height / 2 * width / 2, 4 * channels], and
 * back. Rows may have a stride; what is between them is not touched. Both arrays are in memory of the context's device, and
 * they do not overlap.
 *
 * Local; do not wait for a GPU, allocate nothing. Errors, with nothing written: SHAPE (an odd height or width, a negative
 * size, more elements than fit, rows of another shape: with both; columns that 4 does not divide), DTYPE (another dtype, or
 * two), ARGUMENT (no data, or both at one address).
 * Source: the packing of the Qwen-Image pipelines, by the formula above. */
XD_API xd_result xd_latent_pack(xd_ctx *ctx, const xd_latents *shape, const void *latents, xd_rows packed);
XD_API xd_result xd_latent_unpack(xd_ctx *ctx, const xd_latents *shape, xd_rows packed, void *latents);

#endif
