#ifndef XDI_BASE_EXTEND_H
#define XDI_BASE_EXTEND_H

#include <stdarg.h>

#include "base/fail.h"

/* For companion headers and backends of your own (a second translation unit sees nothing private). */

/* One line to the logger when level is enabled. */
XD_API void xd_log(xd_ctx *ctx, xd_log_level level, const char *format, ...) XD_PRINTF(3, 4);

/* Seconds of the context's clock. */
XD_API double xd_now(const xd_ctx *ctx);

/* The world rank that this context's messages carry. */
XD_API void xd_ctx_set_rank(xd_ctx *ctx, int rank);

/* Lowers the CPU level to what the processes of a world have agreed on. */
XD_API void xd_ctx_set_cpu(xd_ctx *ctx, xd_cpu_level level);

/* Gives the context another backend's table, which must outlive its use; NULL -> the CPU's again. */
XD_API void xd_ctx_set_kernels(xd_ctx *ctx, const struct xd_kernels *kernels);

#endif
