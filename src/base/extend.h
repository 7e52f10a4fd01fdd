#ifndef XDI_BASE_EXTEND_H
#define XDI_BASE_EXTEND_H

#include <stdarg.h>

#include "base/fail.h"

/* For companion headers and back ends of your own: another translation unit cannot use what is private. */

/* Writes one line to the logger when the level is enabled. */
XD_API void xd_log(xd_ctx *ctx, xd_log_level level, const char *format, ...) XD_PRINTF(3, 4);

/* Text for a terminal: control characters, as names in a file may have them, become \xNN; what does not fit is cut. Messages and
 * lines of the log have passed through it. Returns `out`, of `size` bytes, at least 1. Pure. */
XD_API const char *xd_text_escape(const char *text, char *out, size_t size);

/* Seconds of the context's clock. */
XD_API double xd_now(const xd_ctx *ctx);

/* Sets the world rank in this context's messages. */
XD_API void xd_ctx_set_rank(xd_ctx *ctx, int rank);

/* Lowers the CPU level to what the processes of a world have agreed on. */
XD_API void xd_ctx_set_cpu(xd_ctx *ctx, xd_cpu_level level);

/* Whose matrix products these are: 0 on the CPU, 1 a device's own, else the version of a library (xd_product_kernels). Ranks
 * compare them when they join a world. xd_ctx_meet_products makes them the device's own where `theirs`, of rank `rank`, are
 * another device's from elsewhere; the log warns once. Local. */
XD_API uint32_t xd_ctx_products(const xd_ctx *ctx);
XD_API void xd_ctx_meet_products(xd_ctx *ctx, int rank, uint32_t theirs);

/* The floating-point state of the calling thread as a small number, 0 for that of a C program: rounding to nearest, denormal
 * numbers kept. In another state sums have other bits, so the ranks of a world compare theirs when they join: MISMATCH, naming
 * the rank, when `theirs` is not `first`, that of rank 0. The context warns once. Local. */
XD_API unsigned xd_float_state(void);
XD_API xd_result xd_float_state_compare(xd_ctx *ctx, int rank, unsigned theirs, unsigned first);

/* Sets another backend's table of kernels, which must outlive its use; NULL -> the CPU's again. */
XD_API void xd_ctx_set_kernels(xd_ctx *ctx, const struct xd_kernels *kernels);

#endif
